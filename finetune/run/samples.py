"""samples.jsonl: how the model answers a few held-out prompts at each evaluation, so that a run can be watched."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from finetune.checkpoint.store import replace_bytes, storage
from finetune.engine import Engine
from finetune.generation import Prompt, legible
from finetune.parts.answer_metrics import judges, may_become
from finetune.parts.run_data import RunData
from finetune.run.evaluation import shared
from finetune.system.files import open_file
from finetune.system.progress import Progress

FILE = "samples.jsonl"
MOST_TOKENS = 64  # of an answer
MOST_LETTERS = 4000  # of a prompt in the file, from its end


class SampledAnswer(NamedTuple):
    """An answer's text. `is_cut`: it was sampled to the most tokens, without an end."""

    text: str
    is_cut: bool = False


def answers_to(
    engine: Engine,
    data: RunData,
    prompts: list,
    known: list[str | None],
    most_tokens: int,
    stopping: Callable[[], bool],
) -> list[SampledAnswer]:
    """Each prompt's answer: that in `known`, or one generated where it has None. [] if `stopping()` became true.
    Collective.
    """

    most = min(MOST_TOKENS, most_tokens)

    def work(batch: list) -> list[list[int]]:
        ids = [prompt for prompt, _, _ in batch]
        return engine.generate(ids, most, data.stop_ids, lambda row, new: stopping())

    asked = [prompt for prompt, answer in zip(prompts, known, strict=True) if answer is None]
    with Progress("answering samples"):
        generated = iter(shared(engine, asked, len(asked), work) if asked else [])
    answers = []
    for answer in known:
        if answer is None:
            ids = next(generated)
            answers.append(SampledAnswer(data.tokenizer.decode(ids), is_cut=len(ids) >= most))
        else:
            answers.append(SampledAnswer(answer))
    if stopping():
        return []
    return answers


def more_wrong(wrong: list[int], examples: list, prompts: list, *, most: int) -> list[int]:
    """Numbers of scored rows to sample beside `prompts`, until `most` of the `wrong` rows are sampled."""
    others = [row for row in wrong if examples[row] not in prompts]
    return others[: max(0, most - (len(wrong) - len(others)))]


def lines_of(
    data: RunData, prompts: list, answers: list[SampledAnswer], step: int, *, num_drawn: int, of_step: int | None = None
) -> list[dict]:
    """The lines of samples.jsonl for this step. Prompts from `num_drawn` on were picked because a score found them
    wrong; their lines say so. `of_step`: the step of the weights, if it is another. Of an answer that was cut on its
    way to the expected one it is not known whether it is right.
    """
    weights = {}
    if of_step is not None:
        weights["of_step"] = of_step
    lines = [
        {
            "step": step,
            **weights,
            "source": source,
            "prompt": data.tokenizer.decode(legible(prompt))[-MOST_LETTERS:],
            "expected": expected[:MOST_LETTERS],
            "answer": answer.text[:MOST_LETTERS],
            "right": _is_right(answer, expected),
            **({"images": prompt.pictures()} if isinstance(prompt, Prompt) else {}),
        }
        for (prompt, expected, source), answer in zip(prompts, answers, strict=True)
    ]
    for line in lines[num_drawn:]:
        line["picked"] = "wrong"
    return lines


def _is_right(answer: SampledAnswer, expected: str) -> bool | None:
    """True if an answer is the expected one; None of its beginning."""
    if judges(["exact"], None)["exact"](answer.text, expected):
        return True
    return None if answer.is_cut and may_become(answer.text, expected) else False


def append(root: Path, lines: list[dict]) -> None:
    file = root / FILE
    with storage(file), open_file(file, "a", encoding="utf-8") as out:
        out.write("".join(json.dumps(line) + "\n" for line in lines))


def keep_evaluated(root: Path, evaluated: set[tuple[int, int | None]], mark: str) -> None:
    """Drops the answers of evaluations that a resumed run takes again. `evaluated`: (step, of_step) of the others."""
    kept = [line for line in read(root) if (line["step"], line.get("of_step")) in evaluated]
    with storage(root / FILE):
        if kept or (root / FILE).exists():
            replace_bytes(root / FILE, "".join(json.dumps(line) + "\n" for line in kept).encode(), mark)


def read(root: Path) -> list[dict]:
    """The lines of samples.jsonl; those that are damaged are left out."""
    try:
        with open_file(Path(root) / FILE, "r", encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            sample = json.loads(line)
        except (ValueError, RecursionError):
            continue
        texts = ("source", "prompt", "expected", "answer")
        if isinstance(sample, dict) and all(isinstance(sample.get(name, 0), int) for name in ("step", "of_step")):
            if "step" in sample and all(isinstance(sample.get(name), str) for name in texts):
                found.append(sample)
    return found
