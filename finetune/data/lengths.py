"""Number and lengths of a dataset's rows, estimated from a sample: they decide the settings that were left open."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from finetune.data.columns import RowReader
from finetune.data.fit_template import prepare_template
from finetune.data.images.inputs import ImageInputs
from finetune.data.prepare import (
    DatasetSource,
    as_asked,
    open_images,
    options_of,
    part_of,
    rows_of,
    rows_showing_images,
)
from finetune.data.reading.first_rows import NotReadError
from finetune.data.reading.mixture import sources_of
from finetune.data.reading.sources import is_local, read_rows
from finetune.data.tokens.encode import RowEncoder
from finetune.data.tokens.overlong import last_answer_start
from finetune.errors import PlanError
from finetune.model_files.files import ModelFiles
from finetune.model_files.hub import hub_unreachable
from finetune.model_files.plain_tokenizer import tokenizer_of_folder
from finetune.model_files.processor import sees_images
from finetune.model_files.tokenizer import Tokenizer, load_tokenizer
from finetune.model_files.vocabulary import add_tokens
from finetune.parts.data import DataPlan

READ_ROWS = 20_000  # of each dataset
SAMPLE_ROWS = 1000  # of these: about a second
IMAGE_ROWS = 48  # where they show images, each of which is decoded


@dataclass(frozen=True)
class DataSample:
    """`lengths`: tokens of the documents of some rows, uncut; none without a tokenizer that can be read here.
    `text_lengths`: of those that are text alone, and are split by --overlong auto.

    `showing`: how many rows show images, to a model that sees them. `prompts`: tokens of each before its last answer.
    `num_rows`: in all datasets together, bad ones too; `is_all` is False where there are more. `per_row`: rows to train
    on that one makes: a conversation may be one of each answer. `weighted`: (name, rows, weight) of each dataset, if
    they have weights.
    """

    lengths: tuple[int, ...]
    num_rows: int
    is_all: bool = True
    prompts: tuple[int, ...] = ()
    text_lengths: tuple[int, ...] = ()
    showing: int = 0
    per_row: float = 1.0
    weighted: tuple[tuple[str, int, float], ...] = ()

    def pieces(self, context_length: int, overlong: str) -> float:
        """Mean number of rows to train on that a row is split into at this length."""
        split: tuple[int, ...] = ()
        if overlong == "split":
            split = self.lengths
        elif overlong == "auto":
            split = self.text_lengths
        further = sum((n - 1) // context_length for n in split)
        return self.per_row * (1 + further / max(1, len(self.lengths)))


def data_sample(
    plan: DataPlan, tokenizer_folder: Path, fetch: bool, files: ModelFiles | None = None
) -> DataSample | None:
    """SAMPLE_ROWS rows of each dataset, of the first READ_ROWS. None if it is not on this disk.

    `fetch`: datasets may be downloaded; `files`: of the model. Raises PlanError for files that cannot be read; a bad
    row counts for nothing here, as it is reported where all rows are read.
    """
    sources = sources_of(plan.dataset)
    if not fetch and not all(is_local(s.name) for s in sources) and (not plan.first_rows or hub_unreachable()):
        return None
    tokenizer = tokenizer_of_folder(tokenizer_folder)
    if tokenizer is not None:
        add_tokens(tokenizer, plan.new_tokens)
    reads = []
    seeing = files is not None and sees_images(files.folder, files.config)
    num_rows = 0
    is_all = True
    weighted = []
    for source in sources:
        # a stream is not to be held in memory
        if plan.streaming:
            most = 2 * SAMPLE_ROWS
        else:
            most = READ_ROWS
        limited = 0 <= plan.dataset_samples <= most and not source.is_part
        if limited:
            rows = plan.dataset_samples
        else:
            rows = most
        split = source.split_name or "train"
        try:
            raw = read_rows(source.name, rows, 10**9, split, "--dataset", plan.text_unit, plan.first_rows)
        except NotReadError:
            return None
        is_all = is_all and raw.about is None and (limited or len(raw.rows) < most)
        raw = part_of(raw, source, plan.dataset_samples)
        num_rows += raw.about or len(raw.rows)
        if source.weight is not None:
            weighted.append((str(source), raw.about or len(raw.rows), source.weight))
        options = options_of(source, plan, sees_images=seeing)
        reads.append(DatasetSource.of(as_asked(raw, plan, options), options, source))
    showing = 0
    if seeing:
        showing = sum(1 for read in reads for _ in rows_showing_images(read.raw, read.options))
    if showing:
        tokenizer = load_tokenizer(tokenizer_folder)
    if tokenizer is not None:
        prepare_template(tokenizer, plan, partial(rows_of, {"train": reads}))
    with contextlib.ExitStack() as stack:
        images = None
        if showing and files is not None and tokenizer is not None:
            images = stack.enter_context(contextlib.closing(open_images(plan, files, tokenizer)))
        by_row = [list(_targets(read, tokenizer, images)) for read in reads if tokenizer]
    targets = [is_target for of_read in by_row for of_row in of_read for is_target in of_row or ()]
    per_row = 1.0
    if targets and not plan.has_head:
        total = 0.0
        for read, of_read in zip(reads, by_row, strict=True):
            each = sum(1 if of_row is None else len(of_row) / plan.documents_per_row for of_row in of_read)
            total += (read.raw.about or len(read.raw.rows)) * each / max(1, len(of_read))
        per_row = total / num_rows
    lengths = tuple(int(np.flatnonzero(is_target)[-1]) + 1 for is_target in targets)
    prompts = tuple(map(last_answer_start, targets))
    texts: tuple[int, ...] = ()
    if not (plan.pairs or plan.labels):  # whose answers are never split
        texts = tuple(n for n, is_target in zip(lengths, targets, strict=True) if is_target[1:].all())
    return DataSample(lengths, num_rows, is_all, prompts, texts, showing, per_row, tuple(weighted))


def _targets(
    read: DatasetSource, tokenizer: Tokenizer, images: ImageInputs | None
) -> Iterator[list[np.ndarray] | None]:
    """Targets of each sampled row: [a bool per token of each of its documents that has some]; None of a bad one."""
    reader = RowReader(read.options, read.raw.columns, f"--dataset {read.source}", read.raw.rows)
    most = SAMPLE_ROWS if images is None else IMAGE_ROWS
    sampled = one_of_each(len(read.raw.rows), max(1, len(read.raw.rows) // most))
    rows, sources = ([column[row] for row in sampled] for column in (read.raw.rows, read.raw.sources))
    with RowEncoder(tokenizer, reader, images=images) as encoder:
        for documents in encoder.encode(rows, sources):
            if isinstance(documents, PlanError):
                yield None
            else:
                yield [d.is_target for d in documents if d.is_target.any()]


def one_of_each(count: int, stride: int) -> list[int]:
    """One of every `stride` of the numbers below `count`, drawn: rows whose kinds alternate are sampled as they are
    mixed, where those at equal distances may all be of one kind.
    """
    starts = np.arange(0, count, stride)
    return np.random.default_rng(0).integers(starts, np.minimum(starts + stride, count)).tolist()
