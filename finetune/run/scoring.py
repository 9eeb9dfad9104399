"""Scores of answers: what each word of --metric counts as right, and the likeliest of several answers.

Whitespace around answers never counts. Every metric is a fraction of the rows, 0 to 1.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from finetune.data.chat_template import ensure_chat_template, shared_renderer
from finetune.data.collate import microbatches
from finetune.data.fit_template import fit_template
from finetune.data.formats import needs_template
from finetune.data.prepare import DatasetSource, rows_of
from finetune.data.tokens.tokenize import TokenizedDataset, generation_examples, joined_datasets, joined_parts, tokenize
from finetune.engine import Batch
from finetune.errors import PlanError
from finetune.system.files import replace

NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?")
FENCE = re.compile(r"```(?:json)?\s*(.*?)```", re.DOTALL)
NUMERIC_TOLERANCE = 1e-6  # relative: 0.1 + 0.2 is 0.3
MOST_CHOICES = 32
FORWARD_TOKENS = 2048  # of scored rows in one forward
METRICS = ("exact", "contains", "numeric", "json", "regex", "choice", "perplexity")
OF_ANSWERS = ("exact", "contains", "numeric", "json", "regex")


@dataclass(frozen=True)
class Answer:
    """A row's answer, and which metrics find it right."""

    source: str
    prompt: str
    expected: str
    answer: str
    right: dict[str, bool]

    @property
    def wrong(self) -> bool:
        return not all(self.right.values())


def metrics_of(words: str, pattern: str | None, flag: str = "metric", pattern_flag: str = "pattern") -> list[str]:
    """The names in the value of a flag. Raises PlanError."""
    names = [name.strip() for name in words.split(",") if name.strip()]
    unknown = next((name for name in names if name not in METRICS), None)
    if unknown or not names:
        raise PlanError(f"--{flag} {unknown or words}: is not one. Use {', '.join(METRICS)}.")
    judges(names, pattern, flag, pattern_flag)
    if pattern and "regex" not in names:
        raise PlanError(f"--{pattern_flag} {pattern}: is for --{flag} regex. Add it, or omit the pattern.")
    return list(dict.fromkeys(names))


def judges(
    metrics: list[str], pattern: str | None, flag: str = "metric", pattern_flag: str = "pattern"
) -> dict[str, Callable[[str, str], bool]]:
    """{metric: (answer, expected) -> right} of those that compare an answer's text. Raises PlanError."""
    found: dict[str, Callable[[str, str], bool]] = {
        "exact": lambda answer, expected: answer.strip() == expected.strip(),
        "contains": lambda answer, expected: _words(expected) in _words(answer),
        "numeric": _same_number,
        "json": _same_json,
    }
    if "regex" in metrics:
        if not pattern:
            raise PlanError(f"--{flag} regex: needs --{pattern_flag}, which finds what is compared in both answers.")
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise PlanError(f"--{pattern_flag} {pattern}: is not a regular expression ({error}). Correct it.") from None
        found["regex"] = lambda answer, expected: (
            _found(compiled, answer) is not None and _found(compiled, answer) == _found(compiled, expected)
        )
    return {name: found[name] for name in metrics if name in OF_ANSWERS}


def _words(text: str) -> str:
    """Without case, and with one space between words."""
    return " ".join(text.casefold().split())


def _last_number(text: str) -> float | None:
    numbers = [match.group() for match in NUMBER.finditer(text) if any(c.isdigit() for c in match.group())]
    return float(numbers[-1].replace(",", "")) if numbers else None


def _same_number(answer: str, expected: str) -> bool:
    """The last number of both is the same."""
    one, two = _last_number(answer), _last_number(expected)
    return one is not None and two is not None and math.isclose(one, two, rel_tol=NUMERIC_TOLERANCE, abs_tol=1e-12)


def _same_json(answer: str, expected: str) -> bool:
    """Both are JSON of the same value; an answer may have it in a fence. 1 is 1.0 and not true."""
    fenced = FENCE.search(answer)
    try:
        one, two = (json.loads(text) for text in ((fenced[1] if fenced else answer).strip(), expected.strip()))
        return _canonical(one) == _canonical(two)
    except (ValueError, RecursionError):  # not JSON, or nested too deeply to be read
        return False


def _canonical(value) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{_canonical(v)}" for k, v in sorted(value.items())) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_canonical, value)) + "]"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value)


def _found(pattern: re.Pattern, text: str) -> str | None:
    """The first group of the last match, or all of it."""
    matches = list(pattern.finditer(text))
    if not matches:
        return None
    group = matches[-1].group(1) if pattern.groups else matches[-1].group()
    return None if group is None else group.strip()


def evaluated(engine, tokenizer, datasets: list[DatasetSource], length: int):
    """(rows, questions, the engine's StepResult) of datasets' rows, as training renders them. Sets ChatML on a
    tokenizer without a template, if rows need one.
    """
    ensure_chat_template(tokenizer, lambda: any(map(needs_template, rows_of({"score": datasets}))))
    is_runs = (Path(tokenizer.name_or_path) / "run_plan.json").is_file()  # whose template fits what it was trained on
    notice = None if is_runs else fit_template(tokenizer, lambda: rows_of({"score": datasets}))
    length = min(length, engine.context_limit() or length)
    with shared_renderer(tokenizer) as renderer:
        found = [
            tokenize(read.raw, read.options, tokenizer, length, False, engine.vocab_size(), renderer)
            for read in datasets
        ]
        rows = joined_datasets(found, [(str(read.source), None) for read in datasets])
        rows = dataclasses.replace(rows, description=f"{rows.description}; {notice}") if notice else rows
        questions = [q for read in datasets for q in generation_examples(read.raw, read.options, tokenizer, renderer)]
    return rows, questions, engine.next_token_loss(forwards(engine, rows, FORWARD_TOKENS))


def forwards(engine, rows: TokenizedDataset, tokens: int) -> list[Batch]:
    """Microbatches of all rows, of as many tokens, or one row."""
    return microbatches(rows, range(rows.num_rows), engine.layout, rows.num_rows, tokens, engine.pad_id)


def judged(questions: list, answers: list[str], metrics: list[str], pattern: str | None, decode) -> list[Answer]:
    """`questions`: (prompt ids, expected, source), see tokenize.generation_examples; `decode`: ids to text."""
    by_name = judges(metrics, pattern)
    return [
        Answer(
            source, decode(ids), expected, answer, {name: right(answer, expected) for name, right in by_name.items()}
        )
        for (ids, expected, source), answer in zip(questions, answers, strict=True)
    ]


def end_of(rows: TokenizedDataset, ends: set[int]) -> int | None:
    """The token that ends an answer in these rows, as training teaches it; None if no answer has one of `ends`."""
    for row in range(len(rows)):
        ids, is_target = rows.document(row)
        found = next((int(i) for i in ids[is_target][::-1] if int(i) in ends), None)
        if found is not None:
            return found
    return None


def log_prob_of(engine, tokenizer, prompt: list[int], text: str, end: int | None) -> float:
    """Log-probability of a text after a prompt, and of `end` after it, summed over the tokens. Collective."""
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return log_prob_of_ids(engine, prompt, ids if end is None else [*ids, end])


def log_prob_of_ids(engine, prompt: list[int], ids: list[int]) -> float:
    """Log-probability of tokens after others, which may not be empty; summed. Collective."""
    row = np.array([*prompt, *ids], np.int64), np.arange(len(prompt) + len(ids)) >= len(prompt)
    counts = dict(rows=1, tokens=len(row[0]), targets=len(ids), skipped=0, dropped_empty=0)
    counts |= dict(prompt_truncated=0, answer_truncated=0)
    document = TokenizedDataset(**joined_parts([row]), sources=("choice",), counts=counts)
    result = engine.next_token_loss(forwards(engine, document, len(row[0])))
    return -result.loss * result.num_targets


def greedy_log_prob(engine, prompt: list[int], ids: list[int]) -> tuple[float, bool]:
    """(log-probability of tokens after a prompt, whether greedy decoding gives them). Collective."""
    (new,) = engine.generate([prompt], len(ids), set())
    return log_prob_of_ids(engine, prompt, ids), new == ids


def choices_of(questions: list, flag: str = "metric") -> list[str]:
    """The distinct answers of the rows, in order. Raises PlanError unless there are a few of them."""
    found = list(dict.fromkeys(expected.strip() for _, expected, _ in questions))
    if not 2 <= len(found) <= MOST_CHOICES:
        raise PlanError(
            f"--{flag} choice: the rows have {len(found)} distinct answers, of which the likeliest is taken; 2 to "
            f"{MOST_CHOICES} are. Use another metric."
        )
    return found


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
