"""No-grad forward passes that an objective runs before a step, see torch_engine/passes.py."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from finetune.engine import Batch
from finetune.preference import REFERENCE


@dataclass(frozen=True)
class Passes:
    """`everywhere`: every rank holds all microbatches, as in an evaluation, and takes its share; in a step each rank
    holds its own. `stop()`: give up. No method but `sum` needs the other ranks.
    """

    engine: Any
    everywhere: bool = False
    stop: Callable[[], bool] | None = None

    def share(self, microbatches: list[Batch]) -> list[Batch]:
        """This rank's share of the microbatches."""
        if self.everywhere:
            return self.engine.shard_list(microbatches)
        return microbatches

    def filled(self, microbatches: list[Batch]) -> list[Batch]:
        """The same: ranks meet at a step's end only."""
        return self.share(microbatches)

    def log_probs_before_training(self, microbatches: list[Batch]) -> list[np.ndarray]:
        """Log-probability of each document, per microbatch, under the base without adapters, or with the one that the
        run continues from; fewer if `stop` ended it.
        """
        return self._log_probs(microbatches, off=not self.engine.plan.objective.reference_is_adapter)

    def log_ratios(self, microbatches: list[Batch]) -> list[np.ndarray]:
        """Log-probability of each document less the reference's, which the batch holds, per microbatch."""
        found = self._log_probs(microbatches, off=False)
        return [own - np.asarray(b.arrays[REFERENCE].values) for own, b in zip(found, microbatches, strict=False)]

    def sum(self, numbers: list[float]) -> list[float]:
        """Sums over ranks."""
        return self.engine.ranks.sum_numbers(*numbers)

    def _log_probs(self, microbatches: list[Batch], off: bool) -> list[np.ndarray]:
        found: list[np.ndarray] = []
        for batch in microbatches:
            if self.stop and self.stop():
                break
            found.append(self.engine.document_log_probs(batch, off))
        return found
