"""Base of both torch engines: delegates collectives to the process groups, and state to its keeper."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from finetune.engine import BaseReads
from finetune.torch_engine.memory_stats import MemoryCounter
from finetune.torch_engine.parallel.process_groups import ProcessGroups


class EngineBase:
    """The part of finetune.engine.Engine that every torch engine answers alike, from these three.
    `state`: has trainable_state, optimizer_state, optimizer_values, rng_state, load_state, prepare_snapshot and copies.
    """

    groups: ProcessGroups
    state: Any
    counter: MemoryCounter
    base_reads: BaseReads | None = None

    # ---- collectives

    @property
    def rank(self) -> int:
        return self.groups.rank

    @property
    def data_rank(self) -> int:
        return self.groups.data_rank

    def all_reduce_max(self, number: int) -> int:
        return int(self.groups.all_reduce_max(number))

    def all_gather_object(self, value: Any) -> list:
        return self.groups.all_gather_object(value)

    def broadcast_object(self, value: Any):
        return self.groups.broadcast_object(value)

    def shard_list(self, items: list) -> list:
        """This rank's share of the items; the ranks of one tensor-parallel group get the same."""
        groups = self.groups
        dims = self.groups.dims
        return items[groups.data_rank * dims.cp + groups.coordinate("cp") :: dims.data_ranks * dims.cp]

    def call_before_exit(self, call: Callable[[int], object]) -> None:
        pass  # a watchdog ends it, see finetune.distributed.watchdog

    # ---- state

    def prepare_snapshot(self) -> None:
        self.state.prepare_snapshot()

    def snapshot(self):
        return self.state.copies.taken()

    def trainable_state(self) -> dict[str, np.ndarray]:
        return self.state.trainable_state()

    def optimizer_state(self) -> tuple[dict[str, np.ndarray], dict]:
        return self.state.optimizer_state()

    def optimizer_values(self) -> dict:
        return self.state.optimizer_values()

    def rng_state(self) -> dict[str, np.ndarray]:
        return self.state.rng_state()

    def load_state(self, trainable: Mapping, optimizer: Mapping, values: dict, rng: Mapping) -> None:
        self.state.load_state(trainable, optimizer, values, rng)

    # ---- memory

    def reset_memory(self) -> int:
        return self.counter.peak()
