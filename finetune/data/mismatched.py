"""Data of objectives that also read mismatched documents: a prompt with another row's answer (KTO)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from finetune.arrays import Arrays
from finetune.data.collate import microbatches
from finetune.data.run_data import Data
from finetune.data.tokens.overlong import last_answer_start
from finetune.data.tokens.tokenize import TokenizedDataset, joined_parts
from finetune.engine import Batch
from finetune.parts.parts import Parts


@dataclass(frozen=True)
class DataWithMismatches(Data):
    """Data whose microbatches are preceded by those of mismatched documents, drawn from the order of all `rows`."""

    def microbatches(
        self,
        dataset: TokenizedDataset,
        rows: Sequence[int] | np.ndarray,
        mine: slice,
        plan: Parts,
        pad_id: int,
        batch_size: int,
    ) -> list[Batch]:
        others = mismatched_documents(dataset, rows, mine, plan.data.context_length, self.train)
        mismatched = [
            replace(b, mismatched=True)
            for b in microbatches(
                others, range(len(others)), plan.data.layout, batch_size, plan.steps.microbatch_tokens, pad_id
            )
        ]
        return mismatched + super().microbatches(dataset, rows, mine, plan, pad_id, batch_size)


def mismatched_documents(
    dataset: TokenizedDataset,
    rows: Sequence[int] | np.ndarray,
    mine: slice,
    context_length: int,
    train: TokenizedDataset,
) -> TokenizedDataset:
    """The prompt of each of `rows[mine]` with another row's answer, which `others_of` chooses; `train`: where there is
    no other row in `dataset`.

    What KTO's reference point is computed from. One that is too long loses the start of its prompt; if rows show
    images, the end of its answer. Then the answer is a row's last one, which all its images are before.
    """
    rows = [int(row) for row in rows]
    parts = []
    source = dataset if dataset.num_rows > 1 else train
    for row, other in list(zip(rows, others_of(rows, source.num_rows), strict=True))[mine]:
        (prompt, asked), (answer, learned) = dataset.document(row), source.document(other)
        if dataset.images is None:
            asked_tokens = int(asked.argmax())
            end = int(learned.argmax())
            start = min(asked_tokens, max(1, context_length - len(answer) + end))
        else:
            asked_tokens = start = last_answer_start(asked)
            end = last_answer_start(learned)
        first = asked_tokens - start
        ids = np.r_[prompt[first : first + start], answer[end:]]
        is_target = np.r_[np.zeros(start, bool), learned[end:]]
        parts.append((ids[:context_length], is_target[:context_length]))
    joined = joined_parts(parts)
    arrays: Arrays = {}
    if dataset.images is not None:
        shown = [dataset.images_of(row).tolist() for row in rows[mine]]
        arrays = dataset.images.beside(joined["tokens"], shown)
    return replace(dataset, **joined, arrays=arrays)


def others_of(rows: list[int], num_rows: int) -> list[int]:
    """Another row for each of a step's rows: the nearest different one before it in the step, cyclically. In a step of
    one row (an epoch may end with one), the row before it among all `num_rows`.
    """
    found = []
    for i, row in enumerate(rows):
        before = (rows[i - k] for k in range(1, len(rows)))
        found.append(next((other for other in before if other != row), (row - 1) % num_rows))
    return found
