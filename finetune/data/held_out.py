"""Held-out rows as a prompt and what is expected of it, for the samples of a run."""

from collections.abc import Sequence

import numpy as np

from finetune.data.tokens.overlong import last_answer_start
from finetune.data.tokens.tokenize import TokenizedDataset
from finetune.model_files.tokenizer import Decoder, Tokenizer, continued_ids
from finetune.parts.answer_metrics import WHOLE, after_thought, without_empty_thought

TEXT_TOKENS = 32  # of a text that the model goes on with


def prompts_of(dataset: TokenizedDataset, tokenizer: Tokenizer, stop_ids: set[int], number: int) -> list[tuple]:
    """(prompt ids, expected answer, source) of the first rows. Of a preference pair the chosen answer is expected. A
    text is cut after its first tokens.
    """
    each = dataset.documents_per_row
    rows = range(min(number, dataset.num_rows))
    found = []
    for row in rows:
        prompt, answer = split_document(dataset, row * each, tokenizer, stop_ids)
        if dataset.images is not None:
            prompt = dataset.images.prompt(prompt, dataset.images_of(row * each).tolist())
        found.append((prompt, answer, dataset.row_source(row)))
    return found


def split_document(
    dataset: TokenizedDataset, document: int, tokenizer: Decoder, stop_ids: set[int]
) -> tuple[list[int], str]:
    """(ids before a document's last answer, its text without thoughts that are not learned)."""
    ids, is_target = dataset.document(document)
    start = dataset.answer_start(document)
    prompt, answer = split_at_answer(ids, is_target, tokenizer, stop_ids, start)
    unlearned = ids[start : last_answer_start(is_target)].tolist()
    return prompt, after_thought(tokenizer.decode(unlearned), answer)


def split_at_answer(
    ids: np.ndarray, is_target: np.ndarray, tokenizer: Decoder, stop_ids: set[int], start: int | None = None
) -> tuple[list[int], str]:
    """(ids before a row's last answer, its text). `start`: the number of these ids; None: as targets say."""
    if start is None:
        start = last_answer_start(is_target)
    if start <= 1:
        start = max(1, min(TEXT_TOKENS, len(ids) // 2))
    answer = ids[start:][is_target[start:]].tolist()
    while answer and answer[-1] in stop_ids:
        answer.pop()
    return ids[:start].tolist(), tokenizer.decode(answer)


def too_long(
    questions: Sequence[tuple], metrics: Sequence[str], tokenizer: Tokenizer, most: int, flag: str
) -> list[str]:
    """The line about expected answers that the model has no room to give, if there are any and a metric asks for them
    whole. `questions`: (prompt ids, expected answer, source) each; `most`: tokens of an answer, by `flag`.
    """
    if not set(WHOLE) & set(metrics):
        return []
    lengths = []
    for prompt, expected, _ in questions:
        text = without_empty_thought(expected).rstrip()
        if len(text.encode("utf-8", "replace")) > most:  # a token has a byte, or more
            lengths.append(len(continued_ids(tokenizer, prompt, text)))
    long = [length for length in lengths if length > most]
    if not long:
        return []
    return [
        f"{len(long):,} of {len(questions):,} expected answers have more tokens than --{flag} {most} (the longest "
        f"{max(long):,}): no answer to these rows is right"
    ]
