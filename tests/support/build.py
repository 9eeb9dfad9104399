"""Engines as tests and benchmarks build them: from a model in memory, or from a folder."""

from finetune.parts.parallel_dims import ParallelDims
from finetune.parts.parts import Parts
from finetune.torch_engine import open as torch_open
from finetune.torch_engine.engine import TorchEngine
from finetune.torch_engine.parallel.parallelize import parallelize
from finetune.torch_engine.parallel.process_groups import SINGLE_PROCESS, ProcessGroups
from tests.support import emulated_device


def torch_engine(
    model,
    settings,
    device=None,
    pad_id: int = 0,
    base_config: dict | None = None,
    ranks: ProcessGroups = SINGLE_PROCESS,
    share=None,
    distribution: str = "ptd",
) -> TorchEngine:
    """The engine of a loaded model, distributed over `ranks`; `share`: its local shards."""
    groups = ranks if device is None or not ranks.single_process else ProcessGroups(device=device)
    plan = Parts(settings, ParallelDims(), distribution)
    if groups.device.type == emulated_device.NAME:  # as on an Apple GPU: through the wrapper
        from mps_fsdp_wrapper import MPSFSDPWrapper

        parallel = MPSFSDPWrapper(device_type=groups.device.type).distribute(model, plan, groups, share, pad_id)
    else:
        parallel = parallelize(model, plan, groups, share, pad_id)
    return TorchEngine(parallel, plan, base_config)


def load_model(folder, settings, device, share=None, say=print, batches=None, saved=None, files=None):
    """The model of a folder as a run loads it; `say` is called with each notice."""
    groups = ProcessGroups(device=device)
    return torch_open.load_model(folder, Parts(settings), groups, share, batches, saved, say, files=files)
