"""--streaming: rows are read, tokenized and counted while the run trains."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice

import numpy as np

from finetune.data.columns import Notices, RowReader
from finetune.data.reading.mixture import Source
from finetune.data.reading.rows import BadRow, RawDataset, collected
from finetune.data.reading.sources import find_files
from finetune.data.reading.stream import SourceStream, Stream, StreamedFile
from finetune.data.run_data import Data, of_step
from finetune.data.sampler import rank_rows
from finetune.data.tokens.encode import RowEncoder
from finetune.data.tokens.overlong import CUTS
from finetune.data.tokens.tokenize import ASKED, EncodedRow, Limits, encode_row, joined_parts, notice_lines
from finetune.engine import Batch, Engine
from finetune.errors import PlanError
from finetune.model_files.tokenizer import Tokenizer
from finetune.parts.data import DataPlan
from finetune.parts.parts import Parts
from finetune.parts.train_state import Cursor, TrainState


@dataclass(frozen=True)
class StreamedData(Data):
    """Data of --streaming: `train` holds the first rows only, and each step reads its own from the stream.

    Every rank reads and tokenizes all rows of a step, and takes its share: the order needs no exchange.
    """

    stream: Stream
    encoders: tuple[RowEncoder, ...]
    limits: Limits
    skipped: dict[str, str] = field(default_factory=dict)  # {source of a bad row: notice}
    last: list[tuple[str, int, int]] = field(default_factory=list)  # of the last step: source, dataset, tokens of a row

    def step(self, plan: Parts, state: TrainState, engine: Engine) -> tuple[list[Batch], np.ndarray, Cursor]:
        """Microbatches of the next step; a cursor's index counts rows as read. Steps whose rows have no target are
        passed over.
        """
        cursor = began = state.cursor
        parts: list[tuple] = []
        while not parts:
            rows, cursor = self._rows(cursor, plan.rows_per_step)
            parts, sources, numbers = self._encoded(rows, plan.data.skip_bad_rows)
            if not parts and cursor.epoch > began.epoch + 1:
                raise PlanError(f"{self.train.description}: no row after {began} has an answer. Fill in the answers.")
        self.last[:] = [(s, n, len(ids)) for s, n, (ids, _) in zip(sources, numbers, parts, strict=True)]
        assert self.train.arrays.keys() <= {ASKED}, "the plan refuses preferences of a stream"
        dataset = replace(self.train, **joined_parts(parts), sources=tuple(sources), parts=(), arrays={})
        mine = rank_rows(np.arange(len(dataset)), engine.data_rank, plan.dims.data_ranks)
        batches = self.microbatches(dataset, mine, slice(None), plan, engine.pad_id, plan.steps.batch_size)
        return of_step(batches, state.step + 1), np.arange(len(dataset)), cursor

    def _rows(self, cursor: Cursor, number: int) -> tuple[list[tuple], Cursor]:
        found = []
        for index in range(cursor.index, cursor.index + number):
            row = self.stream.row(cursor.epoch, index)
            if row is None:
                break
            found.append(row)
        at_end = len(found) < number or self.stream.row(cursor.epoch, cursor.index + number) is None
        return found, Cursor(cursor.epoch + 1, 0) if at_end else Cursor(cursor.epoch, cursor.index + number)

    def count_step(self, state: TrainState) -> None:
        """Adds the step's tokens to those of each dataset, if the run has counted them from its beginning.
        The state also holds what was read of each file, and which rows were bad.
        """
        state.stream = {
            "read": [file.read.record() if file.read else None for file in self._files()],
            "bad_rows": list(self.skipped),
        }
        if state.step == 0:
            state.dataset_tokens = [0] * len(self.encoders)
        if state.dataset_tokens is not None:
            for _, number, num_tokens in self.last:
                state.dataset_tokens[number] += num_tokens

    def resume(self, state: TrainState) -> list[str]:
        """Checks that the bytes read of each file are those in it now."""
        if state.stream is None:
            return []
        self.skipped.update(dict.fromkeys(state.stream["bad_rows"], ""))
        records = zip(self._files(), state.stream["read"], strict=True)
        return [notice for file, record in records if (notice := file.check(record))]

    def _files(self) -> list[StreamedFile]:
        return [file for source in self.stream.sources for file in source.files]

    def _encoded(self, rows: list[tuple], skip_bad_rows: int) -> tuple[list[tuple], list[str], list[int]]:
        """Documents, and of each its source and the number of its dataset."""
        parts = []
        sources = []
        numbers = []
        for number, source, row in rows:
            bad = row
            if not isinstance(row, BadRow):
                batch = encode_row(self.encoders[number], row, source, self.limits)
                bad = batch.bad and BadRow(source, batch.bad.removeprefix(f"{source}: "))
                parts += batch.parts
                sources += [source] * len(batch.parts)
                numbers += [number] * len(batch.parts)
                _count(batch, source, self.encoders[number].reader.notices)
            if bad and source not in self.skipped:  # once, however often the dataset is read
                if len(self.skipped) >= skip_bad_rows:
                    more = len(self.skipped) + 1
                    raise PlanError(
                        f"{bad.where}: {bad.reason.rstrip('.')}. Resume with --skip_bad_rows {more} to pass over it."
                    )
                self.skipped[source] = f"{bad.where}: {bad.reason}"
        return parts, sources, numbers

    def sources_of(self, rows: Sequence[int] | np.ndarray) -> list[str]:
        return [self.last[row][0] for row in rows]

    def total_steps(self, plan: Parts) -> int:
        return plan.steps.max_steps

    def noted_while_training(self) -> list[str]:
        """Lines on the rows read so far, without those that the first rows had too."""
        found = Notices()
        for encoder in self.encoders:
            of_reader = encoder.reader.notices
            new = {text: count for text, count in of_reader.counts.items() if text not in self.train.noted}
            found.update(new, of_reader.first, of_reader.examples)
        return [f"note: of rows read while training: {line}" for line in notice_lines(found)]

    def tokens_by_dataset(self, plan: Parts, state: TrainState) -> dict[str, int]:
        """Tokens so far of each dataset; empty if the run began with a version that did not count them."""
        names = [part.name for part in self.train.parts]
        return dict(zip(names, state.dataset_tokens or (), strict=False))

    def close(self) -> None:
        for encoder in self.encoders:
            encoder.__exit__(None, None, None)


def _count(row: EncodedRow, source: str, notices: Notices) -> None:
    """Counts what a row lost."""
    if row.empty:
        notices.add("an answer is empty and not learned", source)
    for name in row.cuts:
        notices.add(f"a row over --context_length is {CUTS[name]}", source)
    if row.num_lost:
        notices.add("tokens of such rows are not learned", source, row.num_lost)


def first_rows(source: Source, plan: DataPlan, split: str) -> RawDataset:
    """The first block of a streamed dataset: what is checked, shown and planned by before the run."""
    every_row = chain.from_iterable(file.rows(0) for file in streamed_files(source, plan, split))
    first_block = islice(every_row, plan.shuffle_buffer)
    rows, sources, columns, skipped, notices = collected(first_block, plan.skip_bad_rows)
    if not rows:
        raise PlanError(f"--dataset {source}: has no rows. Give a file with at least one row.")
    description = f"{source}: its first {len(rows):,} rows, the rest is streamed"
    return RawDataset(
        rows, sources, tuple(columns), tuple(skipped), "", description, plan.skip_bad_rows, notices=notices
    )


def streamed_files(source: Source, plan: DataPlan, split: str) -> list[StreamedFile]:
    files = find_files(source.name, source.split or split, "--dataset", plan.text_unit, plan.first_rows)[0]
    return [StreamedFile(*file) for file in files]


def streamed_data(data: Data, tokenizer: Tokenizer, plan: DataPlan, reads: list, limits: Limits) -> StreamedData:
    """`data`, its training rows read while the run trains and encoded by `tokenizer`."""
    sources = [
        SourceStream(streamed_files(read.source, plan, "train"), plan.seed, i, plan.shuffle_buffer)
        for i, read in enumerate(reads)
    ]
    if reads[0].source.weight is None:
        weights = None
    else:
        weights = [read.source.weight for read in reads]
    sizes = [f"{file.label} {file.num_bytes()}" for source in sources for file in source.files]
    first = replace(data, train=replace(data.train, rest="\n".join(sizes)))
    readers = [RowReader(read.options, read.raw.columns, "--dataset") for read in reads]
    encoders = tuple(RowEncoder(tokenizer, reader) for reader in readers)
    stream = Stream(sources, weights, plan.seed)
    return StreamedData(**vars(first), stream=stream, encoders=encoders, limits=limits)
