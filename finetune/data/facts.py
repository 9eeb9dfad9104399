"""Facts of a run's rows that its log keeps: lengths, what is odd, and how alike rows and answers are."""

import hashlib
import math
from collections import Counter

import numpy as np

from finetune.data.preview import histogram, lint
from finetune.data.run_data import Data
from finetune.data.tokens.tokenize import LABEL, TokenizedDataset
from finetune.parts.objectives import EMBED, GENERATE

MOST_ROWS = 100_000  # that are compared: some seconds


def facts_of(data: object) -> dict:
    """Facts of a run_data.Data, as JSON: of the first MOST_ROWS rows of each of its datasets. Of other data none."""
    if not isinstance(data, Data):
        return {}
    train = first_rows(data.train)
    datasets = {"train": train}
    held_out = data.score_rows
    if data.validation is not None:
        held_out = data.validation
    if held_out is not None:
        name = "score" if held_out is data.score_rows else "validation"
        datasets[name] = first_rows(held_out)
    found: dict = {"lengths": histogram(train.lengths), "checks": lint(data.tokenizer, datasets)}
    if train.task == GENERATE or LABEL in train.arrays:  # others have no answers to compare
        found["alike"] = alike(train)
    if train.task == EMBED:
        found["positives"] = {"rows": train.num_rows, "shared": shared_positives(train)}
    if data.only_asks:
        found["only_asks"] = True
    if held_out is not None:
        seen = {_digest(train.document(i)[0], train.images_of(i)) for i in range(len(train))}
        others = datasets[name]
        again = sum(_digest(others.document(i)[0], others.images_of(i)) in seen for i in range(len(others)))
        found["held_out"] = {"of": name, "rows": len(others), "in_training": again}
        found["held_out_sha256"] = held_out.digest()
    if data.scored_sha256:
        found["scored_sha256"] = data.scored_sha256
    return found


def shared_positives(dataset: TokenizedDataset) -> int:
    """Rows of --task embed whose positive another of them has too."""
    each = dataset.documents_per_row
    positives = Counter(_digest(dataset.document(i)[0]) for i in range(1, len(dataset), each))
    return sum(count for count in positives.values() if count > 1)


def first_rows(dataset: TokenizedDataset) -> TokenizedDataset:
    if dataset.num_rows <= MOST_ROWS:
        return dataset
    return dataset.select(range(MOST_ROWS))


def alike(dataset: TokenizedDataset) -> dict:
    """Numbers of distinct documents and answers, of which a label is one; for one-token answers, nats per target by
    answer frequency alone.
    """
    answers: Counter[bytes] = Counter()
    documents = set()
    single = 0
    targets = 0
    for i in range(len(dataset)):
        ids, is_target = dataset.document(i)
        documents.add(_digest(ids, is_target, dataset.images_of(i)))
        answer = ids[is_target]
        if LABEL in dataset.arrays:
            answer = dataset.arrays[LABEL].values[i : i + 1]
        answers[answer.tobytes()] += 1
        single += len(answer) <= 2  # with its end token
        targets += len(answer)
    total = len(dataset)
    entropy = -sum(n / total * math.log(n / total) for n in answers.values()) * total / max(1, targets)
    return {
        "rows": total,
        "distinct_rows": len(documents),
        "distinct_answers": len(answers),
        "answers_of_one_token": single == total,
        "entropy_per_target": entropy,
    }


def _digest(*arrays: np.ndarray) -> bytes:
    hasher = hashlib.blake2b(digest_size=16)
    for array in arrays:
        hasher.update(array.tobytes())
    return hasher.digest()
