"""What FSDP2 adds to a step's peak on a GPU, counted to the byte: python -m tests.support.sharded_peaks

Rank 0 of two over torch's fake process group, on the device `emulated`, whose storages are resized as CUDA's. The same
step of one process is subtracted: what is left is what was gathered.
"""

import gc
import json

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from finetune.data.collate import microbatches
from finetune.distributed.env import RankEnv
from finetune.estimate import memory
from finetune.estimate.model_cost import ModelCost
from finetune.estimate.model_shape import ModelShape
from finetune.parts.parallel_dims import ParallelDims
from finetune.parts.parts import Parts
from finetune.torch_engine.attention import per_document
from finetune.torch_engine.attention.varlen import Attention
from finetune.torch_engine.forward import Layout
from finetune.torch_engine.lora.layers import cast_once
from finetune.torch_engine.parallel import device_shims
from finetune.torch_engine.parallel.parallelize import parallelize
from finetune.torch_engine.parallel.process_groups import ProcessGroups
from tests.support import emulated_device, large, tiny
from tests.support.planned import settings_of

LLAMA = large.LLAMA_8B | dict(hidden_size=256, intermediate_size=768, num_attention_heads=8, num_key_value_heads=4)
# A root larger than the layers, as of small models, whose first gather is the peak; and a root that is small.
CELLS = {
    "large root, lora": (LLAMA | dict(num_hidden_layers=4, vocab_size=16000), "lora", (40, 40)),
    "large root, qlora": (LLAMA | dict(num_hidden_layers=4, vocab_size=16000), "qlora", (40, 40)),
    "small root, lora": (LLAMA | dict(num_hidden_layers=4, vocab_size=500), "lora", (160, 160)),
    "small root, qlora": (LLAMA | dict(num_hidden_layers=4, vocab_size=500), "qlora", (160, 160)),
}


def step_bytes(config: dict, settings, lengths, groups: ProcessGroups) -> int:
    """Peak bytes of the second microbatch above what stands between steps."""
    device = emulated_device.extension()
    model = large.model(config, settings, groups.device)
    parallel = parallelize(model, Parts(settings), groups)
    per_document.register()
    parallel.forward.use(Layout(True, "", chunked_head=True))
    parallel.forward.attention = Attention()
    rows = tiny.dataset(lengths, vocab=config["vocab_size"])
    (batch,) = microbatches(rows, range(len(lengths)), "padding_free", len(lengths), 10**9, 0)
    for _ in range(2):
        gc.collect()
        device.reset_peak()
        before = device.live_bytes()
        model.train()
        with cast_once(model, torch.bfloat16), parallel.accumulating(last=True):
            parallel.backward(parallel.call(parallel.forward.nll, batch))
        for parameter in model.parameters():
            parameter.grad = None
    return device.peak_bytes() - before


def figures(name: str) -> dict:
    config, kind, lengths = CELLS[name]
    settings = settings_of(kind, "bf16", use_gradient_checkpointing="true")
    device = torch.device(emulated_device.NAME)
    ranks = ProcessGroups.of(RankEnv(0, 2, 0, 2), ParallelDims(dp_shard=2), device, saves=False)
    sharded, alone = (step_bytes(config, settings, lengths, groups) for groups in (ranks, ProcessGroups(device=device)))
    cost = ModelCost(ModelShape.from_config(config), Parts(settings), "cuda")
    unit = memory.units(cost)
    predicted = memory.gathered_bytes(cost, alone)
    return {"sharded": sharded, "alone": alone, "layer": unit.largest, "root": unit.root, "gathered": predicted}


if __name__ == "__main__":
    emulated_device.load(refuses_resize=False)
    device_shims.install(emulated_device.NAME)
    dist.init_process_group(f"cpu:fake,{emulated_device.NAME}:fake", store=FakeStore(), rank=0, world_size=2)
    print(json.dumps({name: figures(name) for name in CELLS}))
