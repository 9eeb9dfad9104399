"""A made-up head of classes, its objective and their rows: the double by which the seams of a head are shown."""

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from finetune.arrays import Named, Per
from finetune.objectives import LossOf, NextToken
from finetune.parts.heads import HEADS, HeadFacts
from finetune.parts.objectives import OBJECTIVES, ObjectiveFacts
from finetune.torch_engine.device import to_device

WORD = "classes"
HEAD = HeadFacts(task_type="SEQ_CLS", module="score", width="num_labels")
ROW = ObjectiveFacts(
    "tests.support.class_head.Classes",
    "a label per answer",
    {"num_labels": "preference_beta"},  # which is a number, as a flag of its own would be
    head=WORD,
)


@dataclass(frozen=True)
class Classes(NextToken):
    """The cross-entropy of each document's label."""

    num_labels: float

    sums = ("right",)
    counts_rows = True
    loss_of = LossOf.DOCUMENTS

    def count(self, batch) -> tuple[int, ...]:
        return (len(batch.rows),)

    def loss(self, forward, batch, totals) -> tuple:
        outputs_D = forward.document_outputs(batch)
        if not batch.rows:
            return outputs_D.sum() * 0.0, None
        labels_D = to_device(torch.as_tensor(batch.arrays["label"].values), outputs_D.device)
        return F.cross_entropy(outputs_D, labels_D, reduction="sum"), (outputs_D.argmax(-1) == labels_D).float()

    def sums_of(self, observed) -> dict[str, float]:
        return {"right": float(observed.sum())}

    def means(self, sums: dict[str, float], totals) -> dict[str, float]:
        return {"accuracy": sums["right"] / totals.count}


def add_rows() -> None:
    """The two rows, in this process."""
    HEADS[WORD] = HEAD
    OBJECTIVES[WORD] = ROW


def labelled(dataset, num_labels: int):
    """The dataset with a label for each document: the remainder of its first token."""
    firsts = dataset.tokens[dataset.offsets[:-1]].astype(np.int64)
    return replace(dataset, arrays={"label": Named(firsts % num_labels, Per.DOCUMENT)})
