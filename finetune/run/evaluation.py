"""Validation loss and scores of a model during a run, over all ranks."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

from finetune.data.head_data import HeadData
from finetune.data.held_out import too_long
from finetune.data.run_data import Data
from finetune.engine import Engine, FineTuningEngine
from finetune.errors import NonFiniteError
from finetune.model_files.tokenizer import Tokenizer
from finetune.parts import answer_metrics
from finetune.parts.data import DataPlan
from finetune.parts.plan_base import PlanBase
from finetune.parts.run_data import RunData
from finetune.plan.run_plan import RunPlan
from finetune.run import head_scores, scoring
from finetune.system.progress import Progress, duration

EXACT = "exact_match"  # what the eval event calls --score_metric exact; other scores have the metric's name
OF_LABELS = ("accuracy", "macro_f1")
SCORE_NAMES = (
    EXACT,
    *(name for name in answer_metrics.METRICS if name != "exact"),
    *OF_LABELS,
    *(f"score_{name}" for name in OF_LABELS),
    *("recall_at_1", "score_recall_at_1"),
)
# of a loss that is not finite before the first update, in which no rate has a part
UNTRAINED = "Nothing was learned yet: look at the model's weights and config.json, or give --precision fp32."


@dataclass(frozen=True)
class Evaluation:
    """`values`: what the eval event of metrics.jsonl holds, `loss` among it, of runs that have rows for a loss.
    `right`: {score: numbers of the scored rows that it finds right, from 0}; `answers`: to these rows, None where one
    ended at its first wrong token; `num_scored`: how many these rows are; `lines`: what is to be said of them.
    """

    values: dict
    right: dict[str, list[int]] = field(default_factory=dict)
    answers: list[str | None] = field(default_factory=list)
    num_scored: int = 0
    lines: list[str] = field(default_factory=list)

    @property
    def loss(self) -> float:
        return self.values.get("loss", math.nan)

    def wrong(self) -> list[int]:
        """Numbers of the scored rows that a score finds wrong."""
        right = [set(rows) for rows in self.right.values()]
        return [row for row in range(len(self.answers)) if any(row not in rows for rows in right)]


def evaluate(
    engine: Engine, data: RunData, plan: PlanBase, step: int, stopping: Callable[[], bool]
) -> Evaluation | None:
    """Loss on the validation rows, and scores of the scored ones. None if `stopping()` became true. Collective.

    `step` begins the message of the NonFiniteError that a loss which is not finite raises.
    """
    found = Evaluation({})
    if isinstance(data, HeadData):
        return of_head(engine, data, plan, step, stopping)
    if data.validation is not None:  # preferences have other rows than what is scored
        batches = data.evaluation_batches(plan, engine.pad_id)
        mine = sum(-(-len(part) // plan.data_ranks) for part in batches.values())
        with Progress("evaluation loss", mine, "batches") as progress:  # of the scored rows, where no others are given
            counted = progress.counting(stopping)
            results = {name: engine.evaluate(part, counted) for name, part in batches.items()}
        if stopping():  # nothing may have been counted yet
            return None
        found = Evaluation(data.evaluation_values(results))
    if stopping():
        return None
    if data.validation is not None and not math.isfinite(found.loss):
        remedy = f"Lower {plan.lr_flag}."
        if step == 0:
            remedy = UNTRAINED
        raise NonFiniteError(f"step {step}: the evaluation's loss is {found.loss}. {remedy}")
    if not data.score_examples:
        return found
    assert isinstance(data, Data) and isinstance(plan, RunPlan), "a recipe scores no answers"
    scored = scores(cast(FineTuningEngine, engine), data, plan.data, found.loss, stopping)
    if stopping():
        return None
    return replace(scored, values=found.values | scored.values)


def of_head(
    engine: Engine, data: HeadData, plan: PlanBase, step: int, stopping: Callable[[], bool]
) -> Evaluation | None:
    """The same of what a head gives of each document. Of scored rows beside validation rows: `score_accuracy` and so
    on.
    """
    assert isinstance(plan, RunPlan), plan
    sets = {"": data.validation}
    if data.score_rows is not None and data.score_rows is not data.validation:
        sets["score_"] = data.score_rows
    values: dict = {}
    for prefix, rows in sets.items():
        assert rows is not None, "evaluated only where there are rows"
        batches = data.microbatches(rows, range(rows.num_rows), slice(None), plan, engine.pad_id, rows.num_rows)
        with Progress("evaluation", -(-len(batches) // plan.data_ranks), "batches") as progress:
            outputs = head_scores.outputs_of(engine, batches, len(rows), progress.counting(stopping))
        if outputs is None:
            return None
        scores = partial(head_scores.scores_of, plan.data.task, plan.objective.labels, outputs, rows)
        found = scores()
        if not math.isfinite(found["loss"]):
            remedy = UNTRAINED if step == 0 else f"Lower {plan.lr_flag}."
            raise NonFiniteError(f"step {step}: the evaluation's loss is {found['loss']}. {remedy}")
        parts: dict[str, range] = {}
        if rows is data.validation:
            parts = data.validation_parts(plan)
        if len(parts) > 1:
            found |= {f"loss/{name}": scores(of_part)["loss"] for name, of_part in parts.items()}
        values |= {f"{prefix}{name}": value for name, value in found.items()}
    more = {"num_scored": values.pop("score_num_rows")} if "score_num_rows" in values else {}
    return Evaluation(values | more)


def check_scored(data: Data, how: DataPlan) -> list[str]:
    """Lines on rows that --score_metric finds never right, before anything is computed of them. Raises PlanError for
    rows that it cannot score.
    """
    if not data.score_examples:
        return []
    metrics = answer_metrics.metrics_of(how.score_metric, how.score_pattern)
    if "choice" in metrics:
        scoring.choices_of(data.score_examples, "score_metric")
    return too_long(data.score_examples, metrics, data.tokenizer, how.score_max_new_tokens, "score_max_new_tokens")


def scores(
    engine: FineTuningEngine,
    data: Data,
    how: DataPlan,
    loss: float = math.nan,
    stopping: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """The scores of the scored rows by --score_metric. Collective. `loss`: of the validation rows."""
    names = answer_metrics.metrics_of(how.score_metric, how.score_pattern)
    examples = data.score_examples
    asked = [name for name in names if name in answer_metrics.OF_ANSWERS]
    values = {}
    right = {}
    texts = []
    lines = []
    if asked:
        whole = asked != ["exact"]
        _, answers = exact_match(
            engine, data.tokenizer, examples, how.score_max_new_tokens, data.stop_ids, stopping=stopping, whole=whole
        )
        judged = scoring.judged(examples, answers, asked, how.score_pattern, data.tokenizer.decode)
        if "regex" in asked:
            judged = scoring.judged_alike(engine, judged)
            lines = scoring.endless_lines(judged, "score_pattern", how.score_pattern)
        lines += scoring.unreachable_lines(judged, asked, "score_metric", how.score_pattern)
        texts = [row.answer if whole or row.right["exact"] else None for row in judged]
        for name in asked:
            right[EXACT if name == "exact" else name] = [i for i, row in enumerate(judged) if row.right[name]]
        values = {name: len(rows) / len(examples) for name, rows in right.items()}
    if "choice" in names and not stopping():
        assert data.score_rows is not None, names
        end = scoring.end_of(data.score_rows, data.stop_ids)
        log_prob = partial(scoring.log_prob_of, engine, data.tokenizer, end=end)
        values["choice"] = scoring.choice(examples, scoring.choices_of(examples, "score_metric"), log_prob)
    if "perplexity" in names and not stopping():
        if data.validation is not data.score_rows:
            assert data.score_rows is not None, names
            loss = engine.next_token_loss(scoring.forwards(engine, data.score_rows, how.row_length), stopping).loss
        values["perplexity"] = math.exp(min(loss, 700))
    return Evaluation(values, right, answers=texts, num_scored=len(examples), lines=lines)


def exact_match(
    engine: Engine,
    tokenizer: Tokenizer,
    examples: list[tuple],
    max_new_tokens: int,
    stop_ids: set[int],
    batch_size: int = 32,
    stopping: Callable[[], bool] | None = None,
    whole: bool = False,
) -> tuple[float, list[str]]:
    """(fraction of the examples whose greedy answer is the expected text, every answer as far as it was generated).
    Collective: each rank answers its share.

    `examples` are data.tokenize.generation_examples'. Special tokens count, whitespace around an answer does not. A row
    ends as soon as its text can no longer become the expected one, which changes no score, unless answers are to be
    `whole`. `stop_ids` end an answer; `stopping()`: give up.
    """

    tokens = [0]

    def answered(batch: list) -> list[list[int]]:
        expected = [answer for _, answer, _ in batch]

        def stop_row(row: int, ids: list[int], expected: list[str] = expected):
            tokens[0] += 1
            if stopping and stopping():
                return True
            if whole:
                return False
            return not answer_metrics.may_become(tokenizer.decode(ids).rstrip("\ufffd"), expected[row])

        found = engine.generate([prompt for prompt, _, _ in batch], max_new_tokens, stop_ids, stop_row)
        progress.update(len(batch))
        return found

    began = time.monotonic()

    def describe() -> str:
        so_far = f"{progress.done:,}/{progress.total:,} answers, {tokens[0]:,} tokens"
        return f"answering: {so_far}, {duration(time.monotonic() - began)}"

    progress = Progress("answering", len(engine.shard_list(list(range(len(examples))))), describe=describe)
    with progress:
        answers = [tokenizer.decode(ids) for ids in shared(engine, examples, batch_size, answered)]
    exact = answer_metrics.judges(["exact"], None)["exact"]
    right = sum(exact(answer, expected) for answer, (_, expected, _) in zip(answers, examples, strict=True))
    return right / len(examples), answers


def shared(engine: Engine, items: list, batch_size: int, work: Callable[[list], list]) -> list:
    """[the result of each item], computed by all ranks together, each its share in batches. Collective.

    `work(batch)`: the results of a batch, as JSON. Ranks call it equally often, some with an empty batch at the end.
    """
    mine = engine.shard_list(list(range(len(items))))
    found = []
    with engine.full_weights():
        for start in range(0, engine.all_reduce_max(len(mine)), batch_size):
            found += work([items[i] for i in mine[start : start + batch_size]])
    by_number = {i: result for part in engine.all_gather_object([mine, found]) for i, result in zip(*part, strict=True)}
    return [by_number[i] for i in range(len(items))]


def sample_answer(
    engine: Engine, data: RunData, plan: PlanBase, scored: str | None, stopping: Callable[[], bool]
) -> str:
    """The model's answer to the first scored example, in one line. `scored`: that of scoring, if it has a whole one."""
    if scored is None:
        prompt = data.score_examples[0][0]
        most = plan.output.score_max_new_tokens
        new = engine.generate([prompt], most, data.stop_ids, lambda row, ids: stopping())
        scored = data.tokenizer.decode(new[0])
    return " ".join(scored.split())[:300]
