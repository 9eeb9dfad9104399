"""Which rank does what: the degrees of a run, their product, and the coordinates and groups of a rank. No framework here.

Ranks are numbered with the axes in the order of AXES, the last running fastest, so that ranks that exchange most are
neighbours. Data ranks are those that take rows of their own: dp_replicate x dp_shard.
"""

from dataclasses import asdict, dataclass
from itertools import product
from math import prod

from finetune.config import RESIDUAL_INITS
from finetune.errors import PlanError

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
FLAGS = {"pp": "pp_degree", "dp_replicate": "dp_degree", "dp_shard": "dp_shards", "cp": "cp_degree", "tp": "tp_degree"}
KEEPS_GATHERED = ("shard_grad_op", "hybrid_shard_grad_op")  # strategies that do not reshard after forward


@dataclass(frozen=True)
class ParallelDims:
    """Degrees of parallelism. Their product is the world size."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def world_size(self) -> int:
        return prod(asdict(self).values())

    @property
    def data_ranks(self) -> int:
        """How many ranks take rows of their own; those of one cp, tp or pp group share theirs."""
        return self.dp_replicate * self.dp_shard

    @property
    def shards(self) -> int:
        """Over how many ranks each weight is cut by rows: those of one context-parallel group share weights too."""
        return self.dp_shard * self.cp

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Degrees in the order of AXES."""
        return tuple(getattr(self, axis) for axis in AXES)

    def coordinates(self, rank: int) -> dict[str, int]:
        """{axis: place on it} of a rank."""
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
        """Which share of a step's rows the rank takes, 0 to data_ranks - 1."""
        at = self.coordinates(rank)
        return at["dp_replicate"] * self.dp_shard + at["dp_shard"]

    def shard_rank(self, rank: int) -> int:
        """Which of the `shards` parts of each weight the rank holds."""
        at = self.coordinates(rank)
        return at["dp_shard"] * self.cp + at["cp"]

    def is_data_leader(self, rank: int) -> bool:
        """Whether the rank is the first of those that share its rows of data."""
        at = self.coordinates(rank)
        return at["cp"] == at["tp"] == at["pp"] == 0

    def group(self, rank: int, *axes: str) -> list[int]:
        """The ranks that differ from `rank` on `axes` alone, itself among them, in their order."""
        at, axes = self.coordinates(rank), [axis for axis in AXES if axis in axes]
        places = product(*(range(getattr(self, axis)) for axis in axes))
        return [self.rank_at(at | dict(zip(axes, place, strict=True))) for place in places]

    def __str__(self) -> str:
        named = [f"{FLAGS[axis]} {degree}" for axis, degree in zip(AXES, self.mesh_shape, strict=True)]
        return " x ".join(n for n in named if not n.endswith(" 1")) or "one rank"


def dims_of(values: dict, world_size: int, local_world_size: int) -> ParallelDims:
    """The degrees that the flags mean for `world_size` ranks, `local_world_size` of them on this machine. Raises PlanError.

    --dp_shards -1 is what the others leave. --sharding_strategy, the older script's word, sets dp_degree and dp_shards.
    """
    dp_degree, dp_shards = _strategy(values, world_size, local_world_size)
    others = {axis: values[FLAGS[axis]] for axis in ("cp", "tp", "pp")}
    taken = prod(others.values()) * dp_degree
    if dp_shards == -1:
        dp_shards = max(1, world_size // taken)
    dims = ParallelDims(dp_degree, dp_shards, **others)
    if dims.world_size != world_size:
        said = " x ".join(f"--{FLAGS[a]} {d}" for a, d in zip(AXES, dims.mesh_shape, strict=True) if d > 1)
        raise PlanError(
            f"{said or '--dp_shards 1'}: the product of the degrees is {dims.world_size}, and the world size is {world_size}. "
            f"Use --world_size {dims.world_size}, or other degrees."
        )
    return dims


def loads_full_model(settings) -> str | None:
    """Why a sharded rank loads the whole model before it is cut; None where it reads and keeps its own rows alone."""
    if settings.tp_degree * settings.pp_degree > 1:
        return "a model whose layers are cut is proved whole before"
    if settings.llama_pro_path:
        return "new layers are proved identities on the loaded weights"
    if settings.train_type != "full" and settings.init_lora_weights == "eva":
        return "eva starts from what flows through the unquantized model"
    if settings.train_type != "full" and settings.init_lora_weights in RESIDUAL_INITS:
        return f"{settings.init_lora_weights} changes whole matrices before they are stored"
    return None


def check_model(dims: ParallelDims, shape) -> None:
    """Raises PlanError where the degrees do not divide what they cut; `shape` (a ModelShape) says what that is.

    What transformers plans for the model is asked of it when it is loaded.
    """
    sizes = {"attention heads": shape.num_heads, "key/value heads": shape.num_kv_heads}
    if not shape.num_experts:
        sizes["intermediate size"] = shape.intermediate_size
    _divides("tp_degree", dims.tp, sizes)
    _divides("pp_degree", dims.pp, {"layers": shape.num_layers})
    if dims.tp > 1 and shape.num_experts:
        raise PlanError(
            f"--tp_degree {dims.tp}: experts are not cut in this version, and the model has {shape.num_experts} a "
            "layer. Use --dp_shards instead."
        )


def check_settings(dims: ParallelDims, values: dict) -> None:
    """Raises PlanError where a degree contradicts a setting."""
    for axis, name, wrong, why in (
        ("cp", "batch_layout", "padded", "cuts flat rows"),
        ("cp", "sharding_strategy", "ddp", "shards weights over the ranks that share a row"),
        ("tp", "optimizer", "adamw_8bit", "cuts rows that its blocks run over"),
        ("pp", "use_activation_cpu_offload", True, "keeps activations of several microbatches on the device"),
    ):
        if getattr(dims, axis) > 1 and values[name] == wrong:
            word = "true" if wrong is True else wrong
            raise PlanError(
                f"--{name} {word}: contradicts --{FLAGS[axis]} {getattr(dims, axis)}, which {why}. Leave one out."
            )


def _divides(flag: str, degree: int, sizes: dict) -> None:
    sizes = {what: n for what, n in sizes.items() if n}
    odd = next(((what, n) for what, n in sizes.items() if n % degree), None)
    if odd:
        fine = [d for d in range(1, max(sizes.values()) + 1) if not any(n % d for n in sizes.values())]
        raise PlanError(
            f"--{flag} {degree}: {odd[1]} {odd[0]} are no multiple of it. Use one of {', '.join(map(str, fine[:12]))}."
        )


def _strategy(values: dict, world_size: int, local_world_size: int) -> tuple[int, int]:
    """(dp_degree, dp_shards) as --sharding_strategy wants them; as given where there is none."""
    word, dp_degree, dp_shards = values["sharding_strategy"], values["dp_degree"], values["dp_shards"]
    if word is None:
        return dp_degree, dp_shards
    others = values["cp_degree"] * values["tp_degree"] * values["pp_degree"]
    if word == "ddp":
        if dp_shards not in (-1, 1):
            raise PlanError(f"--dp_shards {dp_shards}: contradicts --sharding_strategy ddp, which shards nothing.")
        return (dp_degree if dp_degree > 1 else max(1, world_size // others)), 1
    if word.startswith("hybrid"):
        machines = world_size // local_world_size if dp_degree == 1 else dp_degree
        if machines == 1 and world_size > 1:
            raise PlanError(
                f"--sharding_strategy {word}: replicates over machines, and there is one. Give --dp_degree, the number of replicas."
            )
        return machines, dp_shards
    if dp_degree != 1:
        raise PlanError(
            f"--dp_degree {dp_degree}: contradicts --sharding_strategy {word}, which has one replica. Use hybrid_{word}."
        )
    return dp_degree, dp_shards
