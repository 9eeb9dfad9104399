"""Scores of heads that read whole documents, from what they give of each: numpy alone, for runs and for score.py."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from finetune.data.tokens.tokenize import LABEL, TokenizedDataset
from finetune.engine import Engine, HeadEngine
from finetune.parts.heads import COSINE_SCALE
from finetune.parts.objectives import CLASSIFY, EMBED, REWARD_MODEL
from finetune.run.intervals import wilson

MOST_CONFUSIONS = 50  # kept of an evaluation, the largest first
RESAMPLES = 1000
AT_ONCE = 1024  # rows that are compared with all
CHECKED_PERCENT = (2.5, 97.5)


@dataclass(frozen=True)
class Confusions:
    """Counts of documents by their label and by the one that was found: counts_CC[label, found]."""

    counts_CC: np.ndarray

    @classmethod
    def of(cls, labels_D: np.ndarray, found_D: np.ndarray, num_labels: int) -> "Confusions":
        flat = np.bincount(labels_D * num_labels + found_D, minlength=num_labels * num_labels)
        return cls(flat.reshape(num_labels, num_labels))

    @property
    def accuracy(self) -> float:
        return float(np.trace(self.counts_CC) / self.counts_CC.sum())

    @property
    def macro_f1(self) -> float:
        """The mean of the classes' F1, over those that are a label or were found, as scikit-learn has it."""
        right_C = np.diag(self.counts_CC)
        seen_C = self.counts_CC.sum(0) + self.counts_CC.sum(1)
        f1_C = 2 * right_C / np.maximum(1, seen_C)
        return float(f1_C[seen_C > 0].mean())

    def macro_f1_interval(self) -> list[float]:
        """The 95 % interval of the macro F1 by resampled documents: percentile bootstrap, of a fixed seed."""
        size = len(self.counts_CC)
        cells = np.flatnonzero(self.counts_CC)
        counts = self.counts_CC.flatten()[cells]
        total = int(counts.sum())
        drawn = np.random.default_rng(0).multinomial(total, counts / total, size=RESAMPLES)
        scores = []
        for counts in drawn:
            resampled = np.zeros(size * size, np.int64)
            resampled[cells] = counts
            scores.append(Confusions(resampled.reshape(size, size)).macro_f1)
        return [float(score) for score in np.percentile(scores, CHECKED_PERCENT)]

    def wrong(self, names: tuple[str, ...]) -> list[list]:
        """[label, found, how often, documents of the label] of each cell off the diagonal, the largest first."""
        off = self.counts_CC.copy()
        np.fill_diagonal(off, 0)
        cells = np.flatnonzero(off)
        order = cells[np.argsort(-off.flatten()[cells], kind="stable")][:MOST_CONFUSIONS]
        of_label = self.counts_CC.sum(1)
        size = len(names)
        return [
            [names[cell // size], names[cell % size], int(off.flat[cell]), int(of_label[cell // size])]
            for cell in order
        ]


def log_softmax(logits_DC: np.ndarray) -> np.ndarray:
    shifted = logits_DC - logits_DC.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def probabilities(logits_DC: np.ndarray) -> np.ndarray:
    return np.exp(log_softmax(logits_DC))


def of_classes(logits_DC: np.ndarray, labels_D: np.ndarray, names: tuple[str, ...]) -> dict:
    """Values of an evaluation of classes: {"loss", "num_rows", "accuracy", "macro_f1", ...}."""
    loss = -log_softmax(logits_DC)[np.arange(len(labels_D)), labels_D].mean()
    found = Confusions.of(labels_D, logits_DC.argmax(-1), len(names))
    return {
        "loss": float(loss),
        "num_rows": len(labels_D),
        "accuracy": found.accuracy,
        "macro_f1": found.macro_f1,
        "macro_f1_interval": found.macro_f1_interval(),
        "confusions": found.wrong(names),
    }


def of_pairs(scores_D: np.ndarray) -> dict:
    """Values of an evaluation of pairs, whose chosen and rejected answers alternate, under the names of a step's."""
    chosen_P = scores_D[::2]
    rejected_P = scores_D[1::2]
    margins_P = chosen_P - rejected_P
    return {
        "loss": float(np.logaddexp(0.0, -margins_P).mean()),
        "num_rows": len(margins_P),
        "rewards/chosen": float(chosen_P.mean()),
        "rewards/rejected": float(rejected_P.mean()),
        "rewards/margins": float(margins_P.mean()),
        "rewards/accuracies": float((margins_P > 0).mean()),
    }


def of_vectors(vectors_REH: np.ndarray) -> dict:
    """Values of an evaluation of texts that belong together: each row's positive among the positives and negatives of
    all rows.
    """
    unit_REH = vectors_REH / np.maximum(np.linalg.norm(vectors_REH, axis=-1, keepdims=True), 1e-12)
    candidates_CH = unit_REH[:, 1:].transpose(1, 0, 2).reshape(-1, unit_REH.shape[-1])
    losses = []
    found = 0
    for start in range(0, len(unit_REH), AT_ONCE):
        scores_RC = COSINE_SCALE * unit_REH[start : start + AT_ONCE, 0] @ candidates_CH.T
        own = np.arange(start, start + len(scores_RC))
        losses.append(-log_softmax(scores_RC)[np.arange(len(own)), own])
        found += int((scores_RC.argmax(-1) == own).sum())
    rows = len(unit_REH)
    return {"loss": float(np.concatenate(losses).mean()), "num_rows": rows, "recall_at_1": found / rows}


def scores_of(
    task: str, names: tuple[str, ...], outputs_DC: np.ndarray, dataset: TokenizedDataset, rows: range | None = None
) -> dict:
    """Values of an evaluation of a dataset, of which the head gave `outputs_DC`; of `rows` alone, if they are given."""
    per_row = dataset.documents_per_row
    documents = slice(None)
    if rows is not None:
        documents = slice(rows.start * per_row, rows.stop * per_row)
    outputs_DC = outputs_DC[documents]
    if task == CLASSIFY:
        return of_classes(outputs_DC, np.asarray(dataset.arrays[LABEL].values)[documents], names)
    if task == EMBED:
        return of_vectors(outputs_DC.reshape(-1, per_row, outputs_DC.shape[-1]))
    assert task == REWARD_MODEL, task
    return of_pairs(outputs_DC[:, 0])


def outputs_of(
    engine: Engine, microbatches: list, documents: int, stopping: Callable[[], bool] | None = None
) -> np.ndarray | None:
    """[D, outputs] of a dataset's documents; None if `stopping()` became true. Collective."""
    found = cast(HeadEngine[Any], engine).document_outputs(microbatches, stopping)
    if len(found) < documents:
        return None
    return np.stack([found[document] for document in range(documents)])


def line_of(values: dict) -> str:
    """The values of an evaluation as score.py says them."""
    parts = [f"loss {values['loss']:.4f}"]
    number = values["num_rows"]
    if "accuracy" in values:
        low, high = wilson(values["accuracy"], number)
        parts.append(f"accuracy {values['accuracy']:.1%} of {number:,} ({low:.1%} to {high:.1%})")
    if "recall_at_1" in values:
        low, high = wilson(values["recall_at_1"], number)
        parts.append(f"recall@1 {values['recall_at_1']:.1%} of {number:,} ({low:.1%} to {high:.1%})")
    if "rewards/accuracies" in values:
        low, high = wilson(values["rewards/accuracies"], number)
        right = f"{values['rewards/accuracies']:.1%} of {number:,} pairs ({low:.1%} to {high:.1%})"
        parts.append(f"chosen above rejected {right} | margin {values['rewards/margins']:.4f}")
    if "macro_f1" in values:
        low, high = values["macro_f1_interval"]
        parts.append(f"macro F1 {values['macro_f1']:.1%} ({low:.1%} to {high:.1%})")
    return " | ".join(parts)
