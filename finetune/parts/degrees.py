"""Parallel degrees: one row per flag that divides a step over ranks.

Flags, help, the mesh's order, conflicts, memory and time follow from the rows; how an engine divides a model is in
torch_engine/parallel/, degree by degree.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from finetune.parts.rows import Limit

MLX_HAS_NONE = "the MLX engine has data parallelism only"
FULL_MODULES = "trains full modules, which FSDP and DDP alone share out"
BESIDE_DATA_PARALLELISM = (Limit("mlx", MLX_HAS_NONE), Limit("full modules", FULL_MODULES))


@dataclass(frozen=True)
class Excluded:
    """A value of another setting that contradicts a degree above 1."""

    setting: str
    value: object
    why: str


def nothing(shape: Any) -> dict[str, int | None]:
    """No dimension: the degree divides any model."""
    return {}


@dataclass(frozen=True)
class DegreeFacts:
    """One degree. `axis`: its field of ParallelDims.

    `place`: of the axis on the mesh, the outermost first; None: its ranks are those of another axis.
    `is_data`: it multiplies the data-parallel world size. `splits_positions`: each rank has its share of a row's
    positions. `in_forward`: its ranks communicate within a layer's forward. `slices_matrices`: optimizers of
    full matrices are refused beside it.
    `divided(shape)`: {dimension of a ModelShape: size} that the degree must divide.
    `excluded`: values of other settings; `limits`: as of other tables, see plan.conflicts.
    `exchanges`: 'module.name' of what its ranks send in a step: (dims, traffic, stage) -> list of Exchange.
    `item`: the item of predicted time that these exchanges count as; empty: gathers and reductions.
    """

    axis: str
    help: str
    place: int | None
    exchanges: str
    item: str = ""
    default: int = 1
    minimum: int = 1
    is_data: bool = False
    splits_positions: bool = False
    in_forward: bool = True
    slices_matrices: bool = False
    divided: Callable[[Any], dict[str, int | None]] = nothing
    excluded: tuple[Excluded, ...] = ()
    limits: tuple[Limit, ...] = BESIDE_DATA_PARALLELISM


def sliced(shape: Any) -> dict[str, int | None]:
    """The dimensions of a ModelShape that tensor parallelism slices."""
    heads = {"num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads}
    if shape.num_experts:
        return heads | {"size of an expert": shape.expert_size}
    return heads | {"intermediate_size": shape.intermediate_size}


DEGREES = {
    "dp_degree": DegreeFacts(
        "dp_replicate",
        "data-parallel replicas",
        place=1,
        exchanges="finetune.estimate.communication.of_replicas",
        is_data=True,
        in_forward=False,
        limits=(),
    ),
    "dp_shards": DegreeFacts(
        "dp_shard",
        "FSDP degree: ranks that shard one replica; -1: the remaining ranks",
        place=2,
        exchanges="finetune.estimate.communication.of_shards",
        default=-1,
        minimum=-1,
        is_data=True,
        in_forward=False,
        limits=(),
    ),
    "tp_degree": DegreeFacts(
        "tp",
        "tensor parallelism: ranks that split each layer",
        place=4,
        exchanges="finetune.estimate.communication.of_slices",
        item="tensor parallelism",
        divided=sliced,
        slices_matrices=True,
        limits=(
            Limit("mlx", f"mlx-lm's sharded layers do not support adapters, and {MLX_HAS_NONE}"),
            Limit("full modules", FULL_MODULES),
        ),
    ),
    "cp_degree": DegreeFacts(
        "cp",
        "context parallelism: ranks that split each sequence",
        place=3,
        exchanges="finetune.estimate.communication.of_ring",
        item="context parallelism",
        splits_positions=True,
        excluded=(
            Excluded("batch_layout", "padded", "splits only padding-free rows"),
            Excluded("sharding_strategy", "ddp", "shards weights over the ranks that split a sequence"),
        ),
    ),
    "pp_degree": DegreeFacts(
        "pp",
        "pipeline parallelism: number of stages",
        place=0,
        exchanges="finetune.estimate.communication.of_stages",
        item="pipeline",
        excluded=(
            Excluded("use_activation_cpu_offload", True, "keeps the activations of several microbatches on the device"),
        ),
    ),
    "ep_degree": DegreeFacts(
        "ep",
        "expert parallelism: ranks of --dp_shards that hold different experts",
        place=None,
        exchanges="finetune.estimate.communication.of_routes",
        item="expert parallelism",
        divided=lambda shape: {"the number of experts": shape.num_experts},
        excluded=(Excluded("use_cpu_offload", True, "keeps whole experts on the device"),),
    ),
}
# {axis: its flag}, in the order of the mesh; degrees that take the ranks of another axis come last.
FLAGS = {
    facts.axis: name for name, facts in sorted(DEGREES.items(), key=lambda item: (item[1].place is None, item[1].place))
}
AXES = tuple(axis for axis, name in FLAGS.items() if DEGREES[name].place is not None)
DATA_AXES = tuple(axis for axis, name in FLAGS.items() if DEGREES[name].is_data)
POSITION_AXES = tuple(axis for axis, name in FLAGS.items() if DEGREES[name].splits_positions)
# Degrees beside data parallelism, the only one of accelerate and of MLX.
MODEL_PARALLEL = tuple(name for name, facts in DEGREES.items() if not facts.is_data)
