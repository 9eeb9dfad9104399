"""Steps of a base that streams to a device with streams, as CUDA: python -m tests.support.streamed_base_cases FOLDER

Prints what each source of the layers gives, and what its steps made the host and the device wait for. A process of its
own: the device has streams from its first load on, and autograd must meet it before its first backward.
"""

import json
import sys
import threading
from pathlib import Path

import torch

from finetune.data.collate import microbatches
from finetune.model_files.files import find_model
from finetune.torch_engine import base_offload
from finetune.torch_engine.lora.layers import adapter_parameters
from tests.support import emulated_device, tiny
from tests.support.build import load_model, torch_engine
from tests.support.host_waits import HostWaits
from tests.support.planned import settings_of

ROWS = tiny.dataset((40, 37, 12, 30, 44, 9))


def steps(folder: Path, source: str, layers: int) -> dict:
    model = folder / f"model-{layers}"
    if not model.exists():
        tiny.build("llama", num_hidden_layers=layers).save_pretrained(model)
    device = torch.device(emulated_device.NAME)
    settings = settings_of("qlora", "fp32", packed_cache=str(folder / "cache"), base_offload=source)
    loaded = load_model(model, settings, device, say=lambda line: None, files=find_model(str(model)))
    engine = torch_engine(loaded, settings, device)
    engine.verify("auto")
    batches = microbatches(ROWS, range(len(ROWS)), engine.layout, 6, 90, 0)
    losses = [engine.train_step(batches, 1e-2).nll for _ in range(2)]
    emulated_device.Stream.waits.clear()
    emulated_device.Stream.host_waits.clear()
    offload = base_offload.of_model(engine.model)
    before = offload.counters.reads if offload else 0
    with HostWaits(emulated_device.NAME) as waits:
        losses.append(engine.train_step(batches, 1e-2).nll)
    return {
        "losses": losses,
        "adapters": [p.detach().cpu().sum().item() for _, p in adapter_parameters(engine.model).items()],
        "microbatches": len(batches),
        "layers_read": offload.counters.reads - before if offload else 0,
        "reads": len(waits.reads),
        "uploads": len(waits.uploads),
        "device_waits": len(emulated_device.Stream.waits),
        "host_waits": sum(thread is threading.main_thread() for thread in emulated_device.Stream.host_waits),
        "thread_waits": len(emulated_device.Stream.host_waits),
    }


if __name__ == "__main__":
    emulated_device.load(refuses_resize=False, streams=True)
    found = {f"{s} {n}": steps(Path(sys.argv[1]), s, n) for n in (3, 6) for s in ("none", "host", "disk")}
    print(json.dumps(found))
