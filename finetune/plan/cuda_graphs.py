"""--cuda_graphs in the plan: what a captured microbatch excludes. The rest is tried on the loaded model."""

from backend_manager import Backend
from finetune.parts.parts import Parts
from finetune.parts.trains import Adapter
from finetune.plan.asked import Asked, Change, Ranks, Said, first_obstacle
from finetune.plan.facts import Facts


def cuda_graphs(asked: Asked, facts: Facts, ranks: Ranks, trial: Parts) -> Said:
    """--cuda_graphs, where nothing is captured; what is left open is timed on the loaded model."""
    if asked.cuda_graphs == "false":
        return
    device = facts.backend
    if asked.assumes_cuda:
        device = Backend.CUDA
    why = _obstacle(device, ranks, trial)
    if why is None and (asked.cuda_graphs == "true" or ranks.dims.world_size == 1):
        return
    yield Change("cuda_graphs", "false", why if why and asked.given("cuda_graphs") else "")


def _obstacle(device: Backend, ranks: Ranks, trial: Parts) -> str | None:
    """The fact by which no microbatch of this run is captured; None if one may be."""
    memory = trial.memory
    objective = trial.objective
    dims = ranks.dims
    in_16_bits = trial.precision.compute != "fp32"
    obstacles = (
        (device is not Backend.CUDA, f"CUDA graphs are of NVIDIA cards, not of {device}"),
        (ranks.distribution != "ptd", f"{ranks.distribution} is accelerate's"),
        (dims.shards * dims.tp * dims.pp * dims.ep * dims.cp > 1, "ranks communicate within a microbatch"),
        (memory.recompute, "layers that are recomputed restore random states, which a graph does not"),
        (memory.base_offload is not None, "layers of an offloaded base come and go"),
        (memory.offload or memory.offload_activations, "what is offloaded comes and goes by the host"),
        (not objective.facts.captured, f"the loss {objective.name} reads numbers of its batch"),
        (bool(objective.load_balancing), "routes of a load-balancing loss are counted by the host"),
        (bool(objective.neftune_noise_alpha), "--neftune_noise_alpha draws from each batch's own lengths"),
        (isinstance(trial.trains, Adapter) and trial.trains.dropout > 0, "dropout would depend on a batch's filling"),
        (trial.data.images, "images have sizes of their own"),
        (trial.data.layout == "padded", "padded rows have the length of their batch"),
        (not in_16_bits, "kernels that attend by bounds of documents compute in 16 bits"),
        (not trial.attention.kernels, "groups of documents have sizes of their batch"),
    )
    return first_obstacle(obstacles)
