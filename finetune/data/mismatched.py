"""Data of objectives that also read mismatched documents: a prompt with another row's answer (KTO)."""

from dataclasses import dataclass, replace

import numpy as np

from finetune.data.collate import microbatches
from finetune.data.run_data import Data
from finetune.data.tokens.tokenize import TokenizedDataset, joined_parts
from finetune.engine import Batch


@dataclass(frozen=True)
class DataWithMismatches(Data):
    """Before the microbatches of some rows, those of the mismatched documents of all `rows`' order."""

    def microbatches(
        self, dataset: TokenizedDataset, rows, mine: slice, plan, pad_id: int, batch_size: int
    ) -> list[Batch]:
        others = mismatched_documents(dataset, rows, mine, plan.data.context_length)
        layout = plan.data.layout, batch_size, plan.steps.microbatch_tokens, pad_id
        mismatched = [replace(b, mismatched=True) for b in microbatches(others, range(len(others)), *layout)]
        return mismatched + super().microbatches(dataset, rows, mine, plan, pad_id, batch_size)


def mismatched_documents(dataset: TokenizedDataset, rows, mine: slice, context_length: int) -> TokenizedDataset:
    """The prompt of each of `rows[mine]` with the answer of the row before it in `rows`, the first with the last's.

    What KTO's reference point is computed from. One that is too long loses the start of its prompt.
    """
    rows, parts = [int(row) for row in rows], []
    for row, other in list(zip(rows, rows[-1:] + rows[:-1], strict=True))[mine]:
        (prompt, asked), (answer, learned) = dataset.document(row), dataset.document(other)
        start, end = int(asked.argmax()), int(learned.argmax())
        start = min(start, max(1, context_length - len(answer) + end))
        first = int(asked.argmax()) - start
        ids, is_target = np.r_[prompt[first : first + start], answer[end:]], np.r_[np.zeros(start, bool), learned[end:]]
        parts.append((ids[:context_length], is_target[:context_length]))
    return replace(dataset, **joined_parts(parts), desirable=None, reference=None)
