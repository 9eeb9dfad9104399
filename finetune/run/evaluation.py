"""Validation loss and exact match of a model during a run, over all ranks."""

import math
from dataclasses import dataclass, field, replace

from finetune.data.collate import preference_microbatches
from finetune.data.prepare import Data
from finetune.errors import NonFiniteError


@dataclass(frozen=True)
class Evaluation:
    """`loss`: mean nll per target, or over preference rows. `exact_match`: 0..1, None if nothing is scored.
    `first_answer`: to the first example. `metrics`: of preference rows, whose number is `num_rows`.
    """

    loss: float
    num_targets: int
    exact_match: float | None = None
    first_answer: str | None = None
    num_rows: int | None = None
    metrics: dict = field(default_factory=dict)

    @property
    def values(self) -> dict:
        """What the eval event of metrics.jsonl holds."""
        values = {"loss": self.loss, "num_targets": self.num_targets}
        values |= {} if self.num_rows is None else {"num_rows": self.num_rows, **self.metrics}
        return values if self.exact_match is None else values | {"exact_match": self.exact_match}


def evaluate(engine, data: Data, plan, step: int, stopping) -> Evaluation | None:
    """Loss on the validation rows and exact match on the scored ones. None if `stopping()` became true. Collective.

    `step` begins the message of the NonFiniteError that a loss which is not finite raises.
    """
    s, rows = plan.settings, data.validation
    batches = preference_microbatches(rows, range(rows.num_rows), slice(None), s, engine.pad_id, rows.num_rows)
    if s.preference == "none":
        nll, num_targets = engine.evaluate(batches, stopping)
        found = None if stopping() else Evaluation(nll / num_targets, num_targets)
    else:
        result = engine.measure(batches, stopping)
        counts = dict(num_rows=result.num_rows, metrics=result.metrics)
        found = None if stopping() else Evaluation(result.loss, result.num_targets, **counts)
    if found is None:
        return None
    if not math.isfinite(found.loss):
        raise NonFiniteError(f"step {step}: the evaluation's loss is {found.loss}. Lower --lr {s.lr}.")
    if not data.score_examples:
        return found
    mine, matched, answers = engine.shard_list(data.score_examples), 0.0, [None]
    with engine.full_weights():
        if mine:
            matched, answers = exact_match(
                engine, data.tokenizer, mine, s.score_max_new_tokens, data.stop_ids, stopping=stopping
            )
    if stopping():
        return None
    match = round(engine.all_reduce_sum(matched * len(mine))) / len(data.score_examples)
    return replace(found, exact_match=match, first_answer=engine.broadcast_object(answers[0]))


def exact_match(
    engine, tokenizer, examples, max_new_tokens: int, stop_ids: set[int], batch_size: int = 32, stopping=None
) -> tuple[float, list[str]]:
    """(fraction of the examples whose greedy answer is the expected text, every answer as far as it was generated).

    `examples` are data.tokenize.generation_examples'. Whitespace around an answer is ignored. A row ends as soon as
    its text can no longer become the expected one, which changes no score. `stop_ids` end an answer; `stopping()`: give
    up.
    """
    answers = []
    for start in range(0, len(examples), batch_size):
        batch = examples[start : start + batch_size]
        expected = [answer.strip() for _, answer, _ in batch]

        def stop_row(row, ids, expected=expected):
            if stopping and stopping():
                return True
            text = tokenizer.decode(ids, skip_special_tokens=True).lstrip().rstrip("\ufffd")
            return not (expected[row].startswith(text) or text.strip() == expected[row])

        new = engine.generate([prompt for prompt, _, _ in batch], max_new_tokens, stop_ids, stop_row)
        answers += [tokenizer.decode(ids, skip_special_tokens=True) for ids in new]
    right = sum(a.strip() == expected.strip() for a, (_, expected, _) in zip(answers, examples, strict=True))
    return right / len(examples), answers


def sample_answer(engine, data: Data, plan, scored: str | None, stopping) -> str:
    """The model's answer to the first scored example, in one line.

    `scored`: its answer in scoring, which ends where it goes wrong; it is generated again if it did.
    """
    (prompt, expected, _), tokenizer = data.score_examples[0], data.tokenizer
    answer = scored
    if answer is None or answer.strip() != expected.strip():
        max_new_tokens = plan.settings.score_max_new_tokens
        new = engine.generate([prompt], max_new_tokens, data.stop_ids, lambda row, ids: stopping())
        answer = tokenizer.decode(new[0], skip_special_tokens=True)
    return " ".join(answer.split())[:300]


# ---- of arrays, for pretrain.py

ROWS_AT_A_TIME = 32


@dataclass(frozen=True)
class ArraysEvaluation:
    """What an evaluation of arrays found: of all test rows together, and of each data path if there are several."""

    values: dict
    first_answer: None = None

    @property
    def loss(self) -> float:
        return self.values["loss"]


def evaluate_arrays(engine, data, plan, step: int, stopping) -> ArraysEvaluation | None:
    """Loss, perplexity, right targets and exact rows on the test rows of each path. None if stopped. Collective."""
    found = {p: engine.score(data.test_batches(rows, ROWS_AT_A_TIME), stopping) for p, rows in data.tests.items()}
    if stopping():
        return None
    total = [sum(numbers) for numbers in zip(*found.values(), strict=True)]
    if not math.isfinite(total[0]):
        raise NonFiniteError(f"step {step}: the evaluation's loss is {total[0]}. Lower lr={plan.settings.lr}.")
    values = _scores(total, sum(map(len, data.tests.values())))
    if len(found) > 1:
        for path, numbers in found.items():
            each = _scores(numbers, len(data.tests[path]))
            values |= {f"{path} {name}": value for name, value in each.items() if name != "num_targets"}
    return ArraysEvaluation(values)


def _scores(numbers, num_rows: int) -> dict:
    nll, num_targets, targets_right, rows_right = numbers
    loss = nll / num_targets
    return {
        "loss": loss,
        "num_targets": num_targets,
        "perplexity": math.exp(min(loss, 700.0)),
        "targets_right": targets_right / num_targets,
        "rows_right": rows_right / num_rows,
    }
