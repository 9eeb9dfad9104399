"""Outputs of an opened head for rows and texts: for score.py, generate.py and the result of fine_tune."""

import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from finetune.adapters.heads import HeadRecord
from finetune.data.chat_template import ensure_chat_template, shared_renderer
from finetune.data.columns import RowOptions
from finetune.data.facts import shared_positives
from finetune.data.formats import needs_template
from finetune.data.head_rows import reads_messages
from finetune.data.prepare import DatasetSource, cut_of, rows_of, with_text_options
from finetune.data.reading.mixture import Source
from finetune.data.reading.rows import RawDataset
from finetune.data.settled_by_rows import counted, has_negative
from finetune.data.tokens.overlong import Cut
from finetune.data.tokens.tokenize import TokenizedDataset, joined_datasets, tokenize
from finetune.engine import FineTuningEngine
from finetune.errors import PlanError
from finetune.estimate.inference import Work
from finetune.model_files.tokenizer import FullTokenizer
from finetune.parts.objectives import EMBED
from finetune.run import head_scores, scoring
from finetune.system.terminal import say
from finetune.trained_base import TrainedBase


def options_for(record: HeadRecord, options: RowOptions) -> RowOptions:
    """The options of rows that a checkpoint's head reads."""
    return replace(options, task=record.task, class_names=record.labels, pairs=record.reads_pairs, whole=record.whole)


def refuse_unread(record: HeadRecord | None, args: Namespace, names: tuple[str, ...]) -> None:
    """Raises PlanError for a flag that asks for answers of a checkpoint with a head."""
    given = next((name for name in names if getattr(args, name, None)), None)
    if record is not None and given:
        raise PlanError(
            f"--{given} {getattr(args, given)}: {args.checkpoint} was trained with --task {record.task}, and answers "
            "nothing. Omit it."
        )


def rows_in(
    engine: FineTuningEngine, tokenizer: FullTokenizer, datasets: list[DatasetSource], cut: Cut
) -> TokenizedDataset:
    """Rows of datasets as training renders them, of at most as many tokens as the cut and the model allow."""
    ensure_chat_template(tokenizer, lambda: any(map(needs_template, rows_of({"score": datasets}))))
    cut = cut.within(engine.context_limit())
    with shared_renderer(tokenizer) as renderer:
        found = [
            tokenize(read.raw, read.options, tokenizer, cut, False, engine.vocab_size(), renderer) for read in datasets
        ]
    return joined_datasets(found, [(str(read.source), None) for read in datasets])


def outputs_of(engine: FineTuningEngine, rows: TokenizedDataset) -> np.ndarray:
    """[D, outputs] of all documents. Collective."""
    outputs = head_scores.outputs_of(engine, scoring.forwards(engine, rows, scoring.FORWARD_TOKENS), len(rows))
    assert outputs is not None, "nothing stops it"
    return outputs


def scored(
    engine: FineTuningEngine, tokenizer: FullTokenizer, base: TrainedBase, args: Namespace
) -> tuple[dict, list[str], list, Work]:
    """The result of scored_rows.score_rows for a head. Collective."""
    options = with_text_options(args.options, base.plan.data)
    read = DatasetSource.of(args.raw, options, Source(args.raw.description))
    if read.options.task == EMBED:
        having = counted([read], has_negative)
        read.options = replace(read.options, negatives=bool(having[1]) and not having[0])
    cut = cut_of(base.plan.data).of_length(base.context_length)
    rows, values = values_of(engine, tokenizer, [read], cut)
    figures = {"rows": rows.num_rows, **values}
    record = HeadRecord.read(Path(args.checkpoint))
    others = 0
    if record is not None and record.messages is not None:
        learned = record.messages
        has_template = bool(tokenizer.chat_template)
        others = counted([read], lambda row: int(reads_messages(row, has_template) is not learned))[1]
    tokens = min(scoring.FORWARD_TOKENS, int(rows.lengths.sum()))
    notes = [f"note: {line}" for line in rows.notices]
    if others:
        forms = ("texts as they are", "messages, rendered by the chat template")
        notes.append(
            f"note: {others:,} of the {rows.num_rows:,} rows are {forms[not learned]}, and the run learned "
            f"{forms[learned]}: it is asked in another form"
        )
    shared = 0
    if read.options.task == EMBED:
        shared = shared_positives(rows)
    if shared:
        notes.append(
            f"note: {shared:,} of the {rows.num_rows:,} rows have a positive that another has too, which counts as a "
            "wrong one: recall@1 is lower than it is of rows with one each"
        )
    if notes:
        figures["notes"] = notes
    return figures, [*notes, rows.describe(), head_scores.line_of(values)], [], Work(scored=tokens, targets=0)


def values_of(
    engine: FineTuningEngine, tokenizer: FullTokenizer, datasets: list[DatasetSource], cut: Cut
) -> tuple[TokenizedDataset, dict]:
    """(rows of datasets, the values of their evaluation, see head_scores). Collective."""
    rows = rows_in(engine, tokenizer, datasets, cut)
    options = datasets[0].options
    return rows, head_scores.scores_of(options.task, options.class_names, outputs_of(engine, rows), rows)


def outputs_of_texts(
    engine: FineTuningEngine, tokenizer: FullTokenizer, base: TrainedBase, record: HeadRecord, texts: list[Any]
) -> np.ndarray:
    """[D, outputs] of texts, or of lists of messages. Collective. Raises PlanError."""
    sources = [f"text {number}" for number in range(1, len(texts) + 1)]
    if record.messages:  # as the rows were that it learned
        texts = [[{"role": "user", "content": text}] if isinstance(text, str) else text for text in texts]
    if record.gives_vectors:  # two texts are a row
        even = texts + texts[-1:] * (len(texts) % 2)
        rows = [{"anchor": one, "positive": other} for one, other in zip(even[::2], even[1::2], strict=True)]
        sources = [f"{one} or the next" for one in sources[::2]]
    else:
        rows = [{"text": text, "label": record.labels[0]} for text in texts]
    raw = RawDataset(rows, sources, tuple(rows[0]), (), "", "the texts")
    options = with_text_options(options_for(record, RowOptions()), base.plan.data)
    read = DatasetSource.of(raw, options, Source(raw.description))
    cut = Cut(base.context_length)  # each is read, whatever rows of a run were
    documents = rows_in(engine, tokenizer, [read], cut)
    length = cut.within(engine.context_limit()).context_length
    over = int((documents.full_lengths[: len(texts)] > length).sum())  # the last may be read twice
    if over and engine.rank == 0:
        say(
            f"note: {over:,} of the texts are over --context_length {length:,} of the run, and read to there alone "
            f"(the longest: {documents.full_lengths.max():,} tokens)",
            file=sys.stderr,
        )
    return outputs_of(engine, documents)[: len(texts)]


def classified(
    engine: FineTuningEngine, tokenizer: FullTokenizer, base: TrainedBase, record: HeadRecord, texts: list[Any]
) -> list[dict[str, float]]:
    """{label: probability}, the likeliest first, of each text or list of messages. Collective. Raises PlanError."""
    found = []
    for each_C in head_scores.probabilities(outputs_of_texts(engine, tokenizer, base=base, record=record, texts=texts)):
        order = np.argsort(-each_C, kind="stable")
        found.append({record.labels[number]: float(each_C[number]) for number in order})
    return found


def embedded(
    engine: FineTuningEngine, tokenizer: FullTokenizer, base: TrainedBase, record: HeadRecord, texts: list[Any]
) -> np.ndarray:
    """[texts, hidden size]: vectors of unit length. Collective. Raises PlanError."""
    vectors_DH = outputs_of_texts(engine, tokenizer, base=base, record=record, texts=texts)
    return vectors_DH / np.linalg.norm(vectors_DH, axis=-1, keepdims=True)
