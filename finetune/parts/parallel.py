"""Work shared among ranks."""

from dataclasses import dataclass

from finetune.parts.fields import Settings
from finetune.parts.parallel_dims import KEEPS_GATHERED

CHUNKS = {"1f1b": 1, "gpipe": 1, "interleaved1f1b": 2}  # runs of layers per stage, by --pp_schedule


@dataclass(frozen=True)
class ParallelPlan:
    """Division of the work over ranks. `distribution`: the library that shards and all-reduces, a key of
    accelerate_config.NAMES.

    `reshard_after_forward`: a layer's gathered weights are freed between its forward and its backward.
    `vocab_parallel`: under FSDP2 no rank gathers embedding and head. `sequence_parallel`: between the blocks of
    tensor-parallel layers each rank has its share of the positions.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp_shards: int = 1
    reshard_after_forward: bool = True
    no_sync: bool = False
    pp_schedule: str = "1f1b"
    rank_timeout: float = 600.0
    distribution: str = "ptd"
    cp: int = 1
    vocab_parallel: bool = False
    sequence_parallel: bool = False

    @property
    def pp_chunks(self) -> int:
        """Runs of layers that each stage of a pipeline holds."""
        return CHUNKS[self.pp_schedule]

    @classmethod
    def of(cls, settings: Settings, distribution: str) -> "ParallelPlan":
        s = settings
        reshards = s.sharding_strategy not in KEEPS_GATHERED
        return cls(
            s.tp_degree,
            s.pp_degree,
            s.ep_degree,
            s.dp_shards,
            reshards,
            s.no_sync,
            s.pp_schedule,
            s.rank_timeout,
            distribution,
            s.cp_degree,
            s.vocab_parallel == "true",
            s.sequence_parallel,
        )
