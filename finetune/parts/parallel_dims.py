"""The device mesh without a framework: parallel degrees, and the coordinates and process groups of each rank.

Ranks are numbered row-major over AXES (the last axis varies fastest), so that ranks that communicate most are adjacent.
Data ranks are those that take different rows: dp_replicate x dp_shard. Expert parallelism takes its ranks from them, as
in torchtitan: ep divides dp_shard, and does not multiply the world size.
"""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import Protocol

from finetune.errors import PlanError
from finetune.parts.degrees import AXES, DATA_AXES, DEGREES, FLAGS, POSITION_AXES

KEEPS_GATHERED = ("shard_grad_op", "hybrid_shard_grad_op")  # reshard_after_forward=False (ZeRO-2)


@dataclass(frozen=True)
class ParallelDims:
    """Parallel degrees. Their product is the world size."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        return prod(self.mesh_shape)

    @property
    def data_ranks(self) -> int:
        """Data-parallel world size: the ranks of one cp, tp or pp group take the same rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def position_ranks(self) -> int:
        """Number of ranks that share out the positions of each row."""
        return prod(getattr(self, axis) for axis in POSITION_AXES)

    @property
    def shards(self) -> int:
        """Number of row-wise shards of each weight: FSDP also shards over the context-parallel group."""
        return self.dp_shard * self.cp

    @property
    def expert_shards(self) -> int:
        """Number of row-wise shards of each expert's weights: the ranks of `shards` that hold the same experts."""
        return self.shards // self.ep

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Mesh shape in the order of AXES."""
        return tuple(getattr(self, axis) for axis in AXES)

    def coordinates(self, rank: int) -> dict[str, int]:
        """{axis: coordinate} of a rank."""
        assert 0 <= rank < self.world_size, (rank, self)
        found = {}
        for axis, degree in zip(reversed(AXES), reversed(self.mesh_shape), strict=True):
            rank, found[axis] = divmod(rank, degree)
        return {axis: found[axis] for axis in AXES}

    def rank_at(self, coordinates: dict[str, int]) -> int:
        rank = 0
        for axis, degree in zip(AXES, self.mesh_shape, strict=True):
            rank = rank * degree + coordinates[axis]
        return rank

    def data_rank(self, rank: int) -> int:
        """The rank's data-parallel rank, 0 to data_ranks - 1: selects its rows of a step."""
        at = self.coordinates(rank)
        return at["dp_replicate"] * self.dp_shard + at["dp_shard"]

    def is_data_leader(self, rank: int) -> bool:
        """True on the first of the ranks that share the same rows of data."""
        at = self.coordinates(rank)
        return not any(at[axis] for axis in AXES if axis not in DATA_AXES)

    def group(self, rank: int, *axes: str) -> list[int]:
        """The process group of `rank` along `axes`: ranks that differ from it only there, itself included, in order.
        The axes "expert_shard" and "ep" (adjacent ranks) divide "dp_shard".
        """
        at = self.coordinates(rank)
        ranges = {axis: range(getattr(self, axis)) for axis in axes_of_the_mesh(axes)}
        if "ep" in axes:
            first = at["dp_shard"] // self.ep * self.ep
            ranges["dp_shard"] = range(first, first + self.ep)
        elif "expert_shard" in axes:
            ranges["dp_shard"] = range(at["dp_shard"] % self.ep, self.dp_shard, self.ep)
        return [self.rank_at(at | dict(zip(ranges, place, strict=True))) for place in product(*ranges.values())]

    def __str__(self) -> str:
        named = [f"{flag} {getattr(self, axis)}" for axis, flag in FLAGS.items()]
        return " x ".join(n for n in named if not n.endswith(" 1")) or "one rank"


def axes_of_the_mesh(axes: Collection[str]) -> list[str]:
    """Axes in the mesh's order; those of experts, "ep" and "expert_shard", divide "dp_shard"."""
    return [axis for axis in AXES if axis in axes or (axis == "dp_shard" and {"ep", "expert_shard"} & {*axes})]


def dims_of(values: dict, world_size: int, local_world_size: int) -> ParallelDims:
    """Resolves the degree flags for `world_size` ranks, `local_world_size` of them on this machine. Raises PlanError.
    --dp_shards -1 takes the remaining ranks. The older --sharding_strategy sets dp_degree and dp_shards.
    """
    dp_degree, dp_shards = _strategy(values, world_size, local_world_size)
    others = {axis: values[flag] for axis, flag in FLAGS.items() if axis not in DATA_AXES}
    taken = prod(degree for axis, degree in others.items() if axis in AXES) * dp_degree
    if dp_shards == -1:
        dp_shards = max(1, world_size // taken)
    dims = ParallelDims(dp_degree, dp_shards, **others)
    if dims.world_size != world_size:
        said = " x ".join(f"--{FLAGS[a]} {d}" for a, d in zip(AXES, dims.mesh_shape, strict=True) if d > 1)
        raise PlanError(
            f"{said or '--dp_shards 1'}: the product of the degrees is {dims.world_size}, but the world size is "
            f"{world_size}. Use --world_size {dims.world_size}, or other degrees."
        )
    check_expert_parallelism(dims)
    return dims


def check_expert_parallelism(dims: ParallelDims) -> None:
    """Raises PlanError if --ep_degree does not divide the data ranks, or is beside what it does not compose with."""
    if dims.ep == 1:
        return
    if dims.tp > 1:
        raise PlanError(
            f"--ep_degree {dims.ep}: contradicts --tp_degree {dims.tp}, which slices every expert already. Use "
            f"--ep_degree {dims.ep * dims.tp} without --tp_degree, or --tp_degree without --ep_degree."
        )
    if dims.dp_shard % dims.ep:
        fine = [str(d) for d in range(1, dims.dp_shard + 1) if dims.dp_shard % d == 0]
        raise PlanError(
            f"--ep_degree {dims.ep}: takes its ranks from --dp_shards {dims.dp_shard}, and does not divide it. "
            f"Use one of {', '.join(fine)}, or other --dp_shards."
        )


class Divided(Protocol):
    """The dimensions of a model that degrees divide."""

    @property
    def num_layers(self) -> int | None: ...
    @property
    def num_heads(self) -> int | None: ...
    @property
    def num_kv_heads(self) -> int | None: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def expert_size(self) -> int: ...


def check_model(dims: ParallelDims, shape: Divided, chunks: int = 1) -> None:
    """Raises PlanError if a degree does not divide the dimension of `shape` that it splits.
    `chunks`: of layers per pipeline stage. The model's transformers TP plan is checked later, when the model is loaded.
    """
    if dims.ep > 1 and not shape.num_experts:
        raise PlanError(f"--ep_degree {dims.ep}: the model has no experts. Use --dp_shards instead.")
    for name, facts in DEGREES.items():
        _divides(name, getattr(dims, facts.axis), facts.divided(shape))
    if shape.num_layers:
        check_num_layers(shape.num_layers, dims.pp, chunks)


def check_num_layers(num_layers: int, stages: int, chunks: int) -> None:
    """Raises PlanError if a pipeline has more chunks than the model has layers."""
    if stages * chunks <= num_layers:
        return
    has = f"--pp_degree {stages}: the model has {num_layers} layers"
    if stages > num_layers:
        raise PlanError(f"{has}. Use at most as many stages.")
    raise PlanError(f"{has}, and --pp_schedule interleaved1f1b takes {chunks} per stage. Use 1f1b, or fewer stages.")


def stage_layers(num_layers: int, stages: int, head: float = 0.0) -> list[range]:
    """Layers of each pipeline stage: runs that take about the same time. `head`: what the last stage computes beside
    its layers, in layers. Of the others, later ones have more: the first keeps most microbatches and the embedding.
    """
    if stages == 1:
        return [range(num_layers)]
    most = num_layers - stages + 1
    last = min(range(most, 0, -1), key=lambda n: max(-(-(num_layers - n) // (stages - 1)), n + head))
    bounds = [stage * (num_layers - last) // (stages - 1) for stage in range(stages)] + [num_layers]
    return [range(*pair) for pair in pairwise(bounds)]


def _divides(flag: str, degree: int, sizes: dict) -> None:
    sizes = {what: n for what, n in sizes.items() if n}
    odd = next(((what, n) for what, n in sizes.items() if n % degree), None)
    if odd:
        fine = [d for d in range(1, max(sizes.values()) + 1) if not any(n % d for n in sizes.values())]
        raise PlanError(
            f"--{flag} {degree}: does not divide {odd[0]} {odd[1]}. Use one of {', '.join(map(str, fine[:12]))}."
        )


def _strategy(values: dict, world_size: int, local_world_size: int) -> tuple[int, int]:
    """(dp_degree, dp_shards) for --sharding_strategy; unchanged if it is unset."""
    word = values["sharding_strategy"]
    dp_degree = values["dp_degree"]
    dp_shards = values["dp_shards"]
    if word is None:
        return dp_degree, dp_shards
    others = prod(values[flag] for axis, flag in FLAGS.items() if axis in AXES and axis not in DATA_AXES)
    if word == "ddp":
        if dp_shards not in (-1, 1):
            raise PlanError(f"--dp_shards {dp_shards}: contradicts --sharding_strategy ddp, which shards nothing.")
        return (dp_degree if dp_degree > 1 else max(1, world_size // others)), 1
    if word.startswith("hybrid"):
        if dp_degree == 1:
            machines = world_size // local_world_size
        else:
            machines = dp_degree
        if machines == 1 and world_size > 1:
            raise PlanError(
                f"--sharding_strategy {word}: replicates across nodes, and there is only one. Give --dp_degree, "
                "the number of replicas."
            )
        return machines, dp_shards
    if dp_degree != 1:
        raise PlanError(
            f"--dp_degree {dp_degree}: contradicts --sharding_strategy {word}, which has one replica. Use "
            f"hybrid_{word}."
        )
    return dp_degree, dp_shards
