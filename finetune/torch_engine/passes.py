"""No-grad forward passes that an objective runs before a step."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from finetune.engine import Batch
from finetune.torch_engine import preference
from finetune.torch_engine.device import to_host
from finetune.torch_engine.forward import ModelForward, fill_counts
from finetune.torch_engine.lora.adapters import adapters_off
from finetune.torch_engine.parallel.parallelism import Parallelism


@dataclass(frozen=True)
class Passes:
    """`advice(batch)`: a context around each forward. `everywhere`: every rank holds all microbatches, as in an
    evaluation, and takes its share; in a step each rank holds its own. `stop()`: give up.

    Every method but `share` is collective, and is called by all ranks with as many microbatches.
    """

    parallel: Parallelism
    advice: Callable[[Batch], AbstractContextManager]
    everywhere: bool = False
    stop: Callable[[], bool] | None = None
    adapters_on: bool = False

    def share(self, microbatches: list[Batch]) -> list[Batch]:
        """This rank's share of the microbatches."""
        if self.everywhere:
            return self.parallel.forward.share(microbatches)
        return microbatches

    def filled(self, microbatches: list[Batch]) -> list[Batch]:
        """This rank's, with empty ones up to the number of the rank that has most."""
        forward = self.parallel.forward
        mine = self.share(microbatches)
        return forward.filled(mine, forward.groups.all_gather_scalars(fill_counts(mine)))

    @torch.no_grad()
    def map(self, work: Callable, microbatches: list[Batch]) -> list:
        """[work(forward, batch): a tensor per document], without dropout; fewer if `stop` ended it. On a stage of a
        pipeline before the last, of no document.
        """
        forward = self.parallel.forward
        found: list[torch.Tensor] = []
        if not microbatches:
            return found
        forward.model.eval()
        for batch in microbatches:
            if self.stop and self.stop():
                break
            with self.advice(batch):
                of_documents = forward.pipeline.forward_only(
                    self.parallel.call, partial(work, forward, batch), forward.shape(batch)
                )
            found.append(torch.zeros(0, device=forward.device) if of_documents is None else of_documents)
        self.parallel.reshard()
        return found

    def log_probs_before_training(self, microbatches: list[Batch]) -> list[torch.Tensor]:
        """Log-probability of each document, per microbatch, on the device: under the base with its adapters off, or
        with `adapters_on` under the current model.
        """
        return self.map(_log_probs if self.adapters_on else _log_probs_before_training, microbatches)

    def log_ratios(self, microbatches: list[Batch]) -> list[torch.Tensor]:
        """Log-probability of each document less the reference's, which the batch holds, per microbatch, on the host."""
        return to_host(self.map(preference.log_ratios, microbatches))

    def of_all_ranks(self, rows_NH: torch.Tensor) -> tuple[torch.Tensor, int]:
        """(the rows of all data ranks one after the other, the number of the first of this rank's)."""
        groups = self.parallel.forward.groups
        if groups.single_process:
            return rows_NH, 0
        counts = groups.all_gather_scalars([len(rows_NH)])[:, 0].astype(int)
        most = int(counts.max())
        padded = rows_NH.new_zeros(most, rows_NH.shape[1])
        padded[: len(rows_NH)] = rows_NH
        by_rank = groups.all_gather_scalars(padded.flatten().tolist()).reshape(len(counts), most, -1)
        every = np.concatenate([rows[:count] for rows, count in zip(by_rank, counts, strict=True)])
        return torch.from_numpy(every).to(rows_NH), int(counts[: groups.rank].sum())

    def sum(self, numbers: list[float]) -> list[float]:
        """Sums over ranks."""
        return self.parallel.forward.groups.sum_scalars(numbers).tolist()

    def statistics(self, values: np.ndarray) -> tuple[float, float]:
        """(mean, standard deviation) of the values of all ranks; (0, 0) if there are none."""
        count, total = self.sum([float(len(values)), float(values.sum())])
        mean = total / max(1.0, count)
        (squares,) = self.sum([float(np.square(values - mean).sum())])
        return mean, math.sqrt(squares / max(1.0, count))


def _log_probs(forward: ModelForward, batch: Batch) -> torch.Tensor:
    return forward.document_log_probs(batch)


def _log_probs_before_training(forward: ModelForward, batch: Batch) -> torch.Tensor:
    with adapters_off(forward.model):
        return _log_probs(forward, batch)
