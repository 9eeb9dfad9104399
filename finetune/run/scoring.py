"""Scores of answers: what each word of --metric counts as right, and the likeliest of several answers.

Whitespace around answers never counts. Every metric is a fraction of the rows, 0 to 1.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from finetune.data.chat_template import ensure_chat_template, shared_renderer
from finetune.data.collate import microbatches
from finetune.data.fit_template import fit_template
from finetune.data.formats import needs_template
from finetune.data.images.inputs import ImageInputs
from finetune.data.prepare import DatasetSource, rows_of
from finetune.data.tokens.overlong import Cut
from finetune.data.tokens.tokenize import TokenizedDataset, generation_examples, joined_datasets, joined_parts, tokenize
from finetune.engine import Batch, Engine, FineTuningEngine
from finetune.generation import Prompt, legible
from finetune.model_files.tokenizer import FullTokenizer, continued_ids
from finetune.parts.answer_metrics import choices_among, judges
from finetune.system.files import replace
from finetune.system.patterns import REMEDY

MOST_SHOWN = 8  # rows named in a line
FORWARD_TOKENS = 2048  # of scored rows in one forward


@dataclass(frozen=True)
class Answer:
    """A row's answer, and which metrics find it right. `is_endless`: a pattern found no end on it, which is wrong."""

    source: str
    prompt: str
    expected: str
    answer: str
    right: dict[str, bool]
    is_endless: bool = False

    @property
    def wrong(self) -> bool:
        return not all(self.right.values())


def evaluated(
    engine: FineTuningEngine,
    tokenizer: FullTokenizer,
    datasets: list[DatasetSource],
    cut: Cut,
    images: ImageInputs | None = None,
):
    """(rows, questions, the engine's StepResult) of datasets' rows, as training renders them. Sets ChatML on a
    tokenizer without a template, if rows need one. `images`: of a model that sees those of rows.
    """
    ensure_chat_template(tokenizer, lambda: any(map(needs_template, rows_of({"score": datasets}))))
    is_runs = (Path(tokenizer.name_or_path) / "run_plan.json").is_file()  # whose template fits what it was trained on
    if is_runs:
        notice = None
    else:
        notice = fit_template(tokenizer, lambda: rows_of({"score": datasets}))
    cut = cut.within(engine.context_limit())
    with shared_renderer(tokenizer) as renderer:
        found = [
            tokenize(read.raw, read.options, tokenizer, cut, False, engine.vocab_size(), renderer, images)
            for read in datasets
        ]
        rows = joined_datasets(found, [(str(read.source), None) for read in datasets])
        if notice:
            rows = dataclasses.replace(rows, description=f"{rows.description}; {notice}")
        questions = [
            question
            for read in datasets
            for question in generation_examples(read.raw, read.options, tokenizer, renderer, images)
        ]
    return rows, questions, engine.next_token_loss(forwards(engine, rows, FORWARD_TOKENS))


def forwards(engine: FineTuningEngine, rows: TokenizedDataset, tokens: int) -> list[Batch]:
    """Microbatches of all rows, of as many tokens, or one row."""
    return microbatches(rows, range(rows.num_rows), engine.layout, rows.num_rows, tokens, engine.pad_id)


def judged(
    questions: list, answers: list[str], metrics: list[str], pattern: str | None, decode: Callable[[list[int]], str]
) -> list[Answer]:
    """`questions`: (prompt ids, expected, source), see tokenize.generation_examples; `decode`: ids to text."""
    by_name = judges(metrics, pattern)
    found = []
    for (ids, expected, source), answer in zip(questions, answers, strict=True):
        right = {}
        is_endless = False
        for name, judge in by_name.items():
            try:
                right[name] = judge(answer, expected)
            except TimeoutError:
                right[name] = False
                is_endless = True
        found.append(Answer(source, decode(legible(ids)), expected, answer, right, is_endless))
    return found


def judged_alike(engine: Engine, answers: list[Answer]) -> list[Answer]:
    """The answers as rank 0 judged them: how long a search takes differs between ranks. Collective."""
    found = engine.broadcast_object([[answer.right, answer.is_endless] for answer in answers])
    return [
        dataclasses.replace(answer, right=right, is_endless=is_endless)
        for answer, (right, is_endless) in zip(answers, found, strict=True)
    ]


def endless_lines(answers: list[Answer], flag: str, pattern: str | None) -> list[str]:
    """The line about answers on which the pattern found no end, if there are any."""
    rows = [str(number) for number, answer in enumerate(answers, 1) if answer.is_endless]
    if not rows:
        return []
    return [f"note: --{flag} {pattern}: finds no end on row {_listed(rows)}, counted as wrong. {REMEDY}"]


def unreachable_lines(answers: list[Answer], metrics: list[str], flag: str, pattern: str | None) -> list[str]:
    """A line per metric by which no answer to some rows is right, not even the expected one."""
    lines = []
    for name, judge in judges(metrics, pattern).items():
        rows = []
        for number, answer in enumerate(answers, 1):
            with contextlib.suppress(TimeoutError):  # which endless_lines names
                if not judge(answer.expected, answer.expected):
                    rows.append(str(number))
        if rows:
            lines.append(f"note: --{flag} {name}: no answer to row {_listed(rows)} is right, not even the expected one")
    return lines


def _listed(rows: list[str]) -> str:
    shown = ", ".join(rows[:MOST_SHOWN])
    if len(rows) > MOST_SHOWN:
        shown += f" and {len(rows) - MOST_SHOWN} more"
    return shown


def end_of(rows: TokenizedDataset, ends: set[int]) -> int | None:
    """The token that ends an answer in these rows, as training teaches it; None if no answer has one of `ends`."""
    for row in range(len(rows)):
        ids, is_target = rows.document(row)
        found = next((int(i) for i in ids[is_target][::-1] if int(i) in ends), None)
        if found is not None:
            return found
    return None


def log_prob_of(
    engine: FineTuningEngine, tokenizer: FullTokenizer, prompt: list[int], text: str, end: int | None
) -> float:
    """Log-probability of a text after a prompt, and of `end` after it, summed over the tokens. Collective."""
    ids = continued_ids(tokenizer, prompt, text)
    return log_prob_of_ids(engine, prompt, ids if end is None else [*ids, end])


def log_prob_of_ids(engine: FineTuningEngine, prompt: list[int], ids: list[int]) -> float:
    """Log-probability of tokens after others, which may not be empty; summed. Collective."""
    row = np.array([*prompt, *ids], np.int64), np.arange(len(prompt) + len(ids)) >= len(prompt)
    counts = dict(rows=1, tokens=len(row[0]), targets=len(ids), skipped=0, dropped_empty=0)
    counts |= dict(prompt_truncated=0, answer_truncated=0)
    document = TokenizedDataset(**joined_parts([row]), sources=("choice",), counts=counts)
    if isinstance(prompt, Prompt):
        images: Any = prompt.source
        document = dataclasses.replace(document, images=images, arrays=images.beside(row[0], [prompt.images]))
    result = engine.next_token_loss(forwards(engine, document, len(row[0])))
    return -result.loss * result.num_targets


def greedy_log_prob(engine: FineTuningEngine, prompt: list[int], ids: list[int]) -> tuple[float, bool]:
    """(log-probability of tokens after a prompt, whether greedy decoding gives them). Collective."""
    (new,) = engine.generate([prompt], len(ids), set())
    return log_prob_of_ids(engine, prompt, ids), new == ids


def choices_of(questions: list, flag: str = "metric") -> list[str]:
    """The distinct answers of the rows, in order. Raises PlanError unless there are a few of them."""
    return choices_among([expected for _, expected, _ in questions], flag)


def choice(questions: list, choices: list[str], log_prob: Callable[[list[int], str], float]) -> float:
    """The fraction of rows whose answer has the highest log-probability of all `choices` after the prompt."""
    right = 0
    for ids, expected, _ in questions:
        before = expected[: len(expected) - len(expected.lstrip())]  # the space that the prompt's last token may hold
        scores = [log_prob(ids, before + text) for text in choices]
        right += choices[max(range(len(choices)), key=scores.__getitem__)] == expected.strip()
    return right / len(questions)


def write_predictions(file: Path, answers: list[Answer]) -> None:
    """A JSON object per row, wrong ones first."""
    ordered = sorted(answers, key=lambda row: not row.wrong)
    rows = [
        {"source": a.source, "prompt": a.prompt, "expected": a.expected, "answer": a.answer, "right": a.right}
        for a in ordered
    ]
    with replace(file) as out:
        out.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode("utf-8", "replace"))
