"""From the run's settings to its data: raw rows of every dataset it names, then tokenized rows."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path

import numpy as np

from finetune.config import TrainConfig
from finetune.data.chat_template import shared_renderer
from finetune.data.collate import largest_microbatch, microbatches, preference_microbatches
from finetune.data.columns import Row, RowOptions, RowReader, parse_columns, parse_names
from finetune.data.encode import RowEncoder
from finetune.data.formats import needs_template
from finetune.data.overlong import Cut
from finetune.data.reading.mixture import Source, sources_of
from finetune.data.reading.rows import BadRow, RawDataset, skip_or_raise
from finetune.data.reading.sources import find_files, read_rows
from finetune.data.reading.stream import SourceStream, Stream, StreamedFile
from finetune.data.sampler import Cursor, rank_rows, rows_so_far, split_validation, step_rows, total_steps
from finetune.data.token_cache import LEAST_BYTES, TokenCache
from finetune.data.tokenize import (
    Limits,
    TokenizedDataset,
    encode_row,
    generation_examples,
    joined_datasets,
    joined_parts,
    tokenize,
)
from finetune.data.workers import tokenize_on_cores
from finetune.engine import Batch
from finetune.errors import PlanError
from finetune.estimate.model_shape import ModelShape
from finetune.model_files.files import ModelFiles
from finetune.model_files.tokenizer import end_ids, pad_id

EVA_ROWS = 256  # rows whose activations --init_lora_weights eva reads
DATASETS = {  # use: (flag, split of a folder or Hub name)
    "train": ("dataset", "train"),
    "validation": ("validation_dataset", "validation"),
    "score": ("score_dataset", "test"),
}


@dataclass(frozen=True)
class Data:
    """Everything a run reads: training rows, validation rows, and examples scored by exact match.

    `score_examples`: (prompt ids, expected answer, source) each. `example`: one row as it was read. `stop_ids`: tokens
    that end an answer.
    """

    tokenizer: object
    stop_ids: set[int]

    train: TokenizedDataset
    validation: TokenizedDataset | None
    score_examples: list
    example: Row | None

    def step(self, plan, state, data_rank: int, pad_id: int) -> tuple[list[Batch], np.ndarray, Cursor]:
        """(microbatches of this data rank, all rows of the step, where the next step begins)."""
        s = plan.settings
        rows, cursor = step_rows(self.train.order, plan.rows_per_step, s.seed, state.cursor)
        mine = slice(data_rank, None, plan.data_ranks)  # sampler.rank_rows
        return preference_microbatches(self.train, rows, mine, s, pad_id, s.batch_size), rows, cursor

    def sources_of(self, rows) -> list[str]:
        """Where these rows of a step are from."""
        return [self.train.row_source(row) for row in rows]

    def close(self) -> None:
        """Ends what reads rows while training; here nothing."""

    def total_steps(self, plan) -> int:
        s = plan.settings
        return total_steps(self.train.order, plan.rows_per_step, s.num_epochs, s.max_steps)

    def tokens_by_dataset(self, plan, state) -> dict[str, int]:
        """Tokens trained on so far of each dataset; empty if there is one."""
        train, found = self.train, np.zeros(len(self.train.parts), np.int64)
        if not train.parts:
            return {}
        numbers, lengths = train.part_numbers(), train.row_lengths
        for rows in rows_so_far(train.order, plan.settings.seed, state.cursor):
            found += np.bincount(numbers[rows], lengths[rows], len(found)).astype(np.int64)
        return {part.name: int(n) for part, n in zip(train.parts, found, strict=True)}

    def largest_microbatch(self, plan, pad_id: int) -> Batch:
        """The largest microbatch of the run's first epochs, as the loop will make it."""
        s, num_steps = plan.settings, self.total_steps(plan)
        return largest_microbatch(
            self.train, plan.rows_per_step, s.seed, s.batch_layout, s.batch_size, s.microbatch_tokens, pad_id, num_steps
        )


@dataclass
class Read:
    """A dataset to train on: how its rows are read, at once or when they are asked for, and where its tokens are kept.

    `example`: a row with its source, where the tokens were found without the rows.
    """

    source: Source
    options: RowOptions
    read: Callable[[], RawDataset]
    cache: TokenCache | None = None
    example: tuple[str, dict] | None = None

    @cached_property
    def raw(self) -> RawDataset:
        """Its rows. Raises PlanError."""
        return self.read()

    @classmethod
    def of(cls, raw: RawDataset, options: RowOptions, source: Source) -> "Read":
        """A dataset of rows that are read already."""
        return cls(source, options, lambda: raw)

    def row(self, name: str) -> Row | None:
        """The row of this source, or the example if only tokens are here; None if it is not one of these rows."""
        if self.example:
            return RowReader(self.options).read(self.example[1], self.example[0])
        if name not in self.raw.sources:
            return None
        return RowReader(self.options).read(self.raw.rows[self.raw.sources.index(name)], name)


@dataclass(frozen=True)
class StreamedData(Data):
    """Data of --streaming: `train` holds the first rows only, and each step reads its own from the stream.

    Every rank reads and tokenizes all rows of a step, and takes its share: the order needs no exchange.
    """

    stream: Stream
    encoders: tuple[RowEncoder, ...]
    limits: Limits
    skipped: list[str] = field(default_factory=list)
    last_sources: list[str] = field(default_factory=list)

    def step(self, plan, state, data_rank: int, pad_id: int) -> tuple[list[Batch], np.ndarray, Cursor]:
        """As Data's; a cursor's index counts rows as read. Steps whose rows have no target are passed over."""
        s, cursor, parts, began = plan.settings, state.cursor, [], state.cursor
        while not parts:
            rows, cursor = self._rows(cursor, plan.rows_per_step)
            parts, sources, numbers = self._encoded(rows, s.skip_bad_rows)
            if not parts and cursor.epoch > began.epoch + 1:
                raise PlanError(f"{self.train.description}: no row after {began} has an answer. Fill in the answers.")
        self.last_sources[:] = sources
        self._count(state, numbers, parts)
        dataset = replace(self.train, **joined_parts(parts), sources=tuple(sources), parts=())
        mine = rank_rows(np.arange(len(dataset)), data_rank, plan.data_ranks)
        batches = microbatches(dataset, mine, s.batch_layout, s.batch_size, s.microbatch_tokens, pad_id)
        return batches, np.arange(len(dataset)), cursor

    def _rows(self, cursor: Cursor, number: int) -> tuple[list[tuple], Cursor]:
        found = []
        for index in range(cursor.index, cursor.index + number):
            row = self.stream.row(cursor.epoch, index)
            if row is None:
                break
            found.append(row)
        at_end = len(found) < number or self.stream.row(cursor.epoch, cursor.index + number) is None
        return found, Cursor(cursor.epoch + 1, 0) if at_end else Cursor(cursor.epoch, cursor.index + number)

    def _count(self, state, numbers: list[int], parts: list[tuple]) -> None:
        """Adds the step's tokens to those of each dataset, if the run has counted them from its beginning."""
        if state.step == 0:
            state.dataset_tokens = [0] * len(self.encoders)
        if state.dataset_tokens is not None:
            for number, (ids, _) in zip(numbers, parts, strict=True):
                state.dataset_tokens[number] += len(ids)

    def _encoded(self, rows: list[tuple], skip_bad_rows: int) -> tuple[list[tuple], list[str], list[int]]:
        """Documents, and of each its source and the number of its dataset."""
        parts, sources, numbers = [], [], []
        for number, source, row in rows:
            bad = row
            if not isinstance(row, BadRow):
                batch = encode_row(self.encoders[number], row, source, self.limits)
                bad = batch.bad and BadRow(source, batch.bad.removeprefix(f"{source}: "))
                parts += batch.parts
                sources += [source] * len(batch.parts)
                numbers += [number] * len(batch.parts)
            if bad:
                self.skipped.append(skip_or_raise(bad, len(self.skipped), skip_bad_rows))
        return parts, sources, numbers

    def sources_of(self, rows) -> list[str]:
        return [self.last_sources[row] for row in rows]

    def total_steps(self, plan) -> int:
        return plan.settings.max_steps

    def tokens_by_dataset(self, plan, state) -> dict[str, int]:
        """As Data's; empty if the run began with a version that did not count them."""
        names = [part.name for part in self.train.parts]
        return dict(zip(names, state.dataset_tokens or (), strict=False))

    def close(self) -> None:
        for encoder in self.encoders:
            encoder.__exit__(None, None, None)


def read_datasets(settings: TrainConfig) -> dict[str, list[Read]]:
    """{use: its datasets} that the settings name. Every broken row is found here. Raises PlanError."""
    found = {}
    for use, (name, split) in DATASETS.items():
        if not getattr(settings, name):
            continue
        samples = {"train": settings.dataset_samples, "validation": -1, "score": settings.score_samples}[use]
        found[use] = [
            read_source(source, settings, samples, split, f"--{name}") for source in named_sources(settings, name)
        ]
    return found


def named_sources(settings: TrainConfig, name: str) -> tuple[Source, ...]:
    """The datasets that --dataset, --validation_dataset or --score_dataset names. Raises PlanError."""
    sources = sources_of(getattr(settings, name), f"--{name}")
    if name != "dataset" and sources[0].weight is not None:
        raise PlanError(f"--{name} {getattr(settings, name)}: has a weight, and only training data is mixed. Omit it.")
    return sources


def read_source(source: Source, settings: TrainConfig, samples: int, split: str, flag: str) -> Read:
    """One dataset, its rows read unless its tokens are cached. Raises PlanError."""
    if source.split and Path(source.name).is_file() and not source.name.endswith(".json"):
        raise PlanError(f"{flag} {source}: a file has no splits. Name it without @{source.split}.")
    split, options = source.split or split, options_of(source, settings, flag)
    said = f"{flag} {source}" if isinstance(settings.dataset, list) else flag

    def read() -> RawDataset:
        raw = read_rows(source.name, samples, settings.skip_bad_rows, split, flag, settings.text_unit)
        check_columns(raw, options, said)
        return raw

    if settings.streaming and flag == "--dataset":
        raw = first_rows(source, settings, split)
        check_columns(raw, options, said)
        return Read(source, options, lambda: raw)
    reading = [samples, settings.skip_bad_rows, split, settings.text_unit]
    cache = cache_of(source.name, split, flag, reading, options)
    if cache and cache.holds_some():
        return Read(source, options, read, cache)
    raw = read()  # now, so that every broken row is found before weights are loaded
    return Read(source, options, lambda: raw, cache)


def cache_of(name: str, split: str, flag: str, reading: list, options: RowOptions) -> TokenCache | None:
    """Where a dataset's tokens are kept; None for a small one. Raises PlanError if there is no such dataset."""
    files = [(path, label) for _, path, label in find_files(name, split, flag)[0] if path is not None]
    if sum(path.stat().st_size for path, _ in files) < LEAST_BYTES:
        return None
    return TokenCache(files, reading, options)


def options_of(source: Source, settings: TrainConfig, flag: str = "--dataset") -> RowOptions:
    """How a dataset's columns are read: as it says itself, else as the settings do. Raises PlanError."""
    columns = source.columns or parse_columns(settings.columns)
    word = "none" if flag == "--score_dataset" else settings.preference  # what is scored is an answer
    ignored = parse_names(settings.ignore_columns)
    return RowOptions(
        source.format or settings.dataset_format, columns, ignored, word in ("dpo", "orpo"), word == "kto"
    )


def check_columns(raw: RawDataset, options: RowOptions, flag: str) -> None:
    """Raises PlanError for columns that match no format, or that say what is not learned."""
    reader, seen = RowReader(options, raw.columns, flag), set()
    for row, source in zip(raw.rows, raw.sources, strict=True):
        names = tuple(row)
        if names not in seen or reader.has_unused(names):
            seen.add(names)
            reader.read(row, source)


def needs_chat_template(raw_datasets: dict[str, list[Read]]) -> bool:
    """True if some row is rendered by a chat template only."""
    return any(
        needs_template(reader.read(row, source))
        for datasets in raw_datasets.values()
        for read in datasets
        for reader in [RowReader(read.options, read.raw.columns)]
        for row, source in zip(read.raw.rows, read.raw.sources, strict=True)
    )


def load_data(settings: TrainConfig, raw_datasets: dict, tokenizer, files: ModelFiles, say=lambda line: None) -> Data:
    """Tokenizes what `read_datasets` found, and splits validation rows off if asked. Raises PlanError.

    `say` is called with lines on what takes long.
    """
    vocab_size = ModelShape.from_config(files.config).vocab_size

    def tokenized(use: str, renderer) -> TokenizedDataset:
        limits = Limits(cut_of(settings), settings.train_on_prompt and use == "train", vocab_size)
        found = [tokenized_once(read, tokenizer, limits, renderer, say) for read in raw_datasets[use]]
        return joined_datasets(found, [(str(r.source), r.source.weight) for r in raw_datasets[use]])

    with shared_renderer(tokenizer) as renderer:
        train, validation, score_examples = tokenized("train", renderer), None, []
        if "validation" in raw_datasets:
            validation = tokenized("validation", renderer)
        elif settings.validation_split:
            rows, held_out = split_validation(train.num_rows, settings.validation_split, settings.seed)
            train, validation = train.select(rows), train.select(held_out)
        if "score" in raw_datasets:
            for read in raw_datasets["score"]:
                score_examples += generation_examples(read.raw, read.options, tokenizer, renderer)
            if settings.preference == "none":
                validation = validation or tokenized("score", renderer)
    source = score_examples[0][2] if score_examples else train.sources[0]
    named = (read.row(source) for read in raw_datasets["score" if score_examples else "train"])
    example = next((row for row in named if row), None)
    facts = tokenizer, end_ids(tokenizer, files.folder), train, validation, score_examples, example
    if settings.streaming:
        limits = Limits(cut_of(settings), settings.train_on_prompt, vocab_size)
        return streamed_data(facts, settings, raw_datasets["train"], limits)
    return Data(*facts)


def first_rows(source: Source, settings: TrainConfig, split: str) -> RawDataset:
    """The first block of a streamed dataset: what is checked, shown and planned by before the run."""
    rows, sources, skipped, columns = [], [], [], {}
    files = streamed_files(source, settings, split)
    for name, row in islice(chain.from_iterable(file.rows(0) for file in files), settings.shuffle_buffer):
        if isinstance(row, BadRow):
            skipped.append(skip_or_raise(row, len(skipped), settings.skip_bad_rows))
            continue
        rows.append(row)
        sources.append(name)
        columns.update(dict.fromkeys(row))
    if not rows:
        raise PlanError(f"--dataset {source}: has no rows. Give a file with at least one row.")
    description = f"{source}: its first {len(rows):,} rows, the rest is streamed"
    return RawDataset(rows, sources, tuple(columns), tuple(skipped), "", description, settings.skip_bad_rows)


def streamed_files(source: Source, settings: TrainConfig, split: str) -> list[StreamedFile]:
    files = find_files(source.name, source.split or split, "--dataset", settings.text_unit)[0]
    return [StreamedFile(*file) for file in files]


def streamed_data(facts: tuple, settings: TrainConfig, reads: list[Read], limits: Limits) -> "StreamedData":
    """Data whose training rows are read while the run trains. `facts`: the fields of Data."""
    sources = [
        SourceStream(streamed_files(read.source, settings, "train"), settings.seed, i, settings.shuffle_buffer)
        for i, read in enumerate(reads)
    ]
    weights = None if reads[0].source.weight is None else [read.source.weight for read in reads]
    sizes = [f"{file.label} {file.num_bytes()}" for source in sources for file in source.files]
    tokenizer, stop_ids, train, *others = facts
    facts = tokenizer, stop_ids, replace(train, rest="\n".join(sizes)), *others
    readers = [RowReader(read.options, read.raw.columns, "--dataset") for read in reads]
    encoders = tuple(RowEncoder(facts[0], reader) for reader in readers)
    return StreamedData(*facts, Stream(sources, weights, settings.seed), encoders, limits)


def tokenized_once(read: Read, tokenizer, limits: Limits, renderer=None, say=lambda line: None) -> TokenizedDataset:
    """A dataset's tokens: from the cache, where one process of a host makes them on all its cores, or made here."""
    if read.cache is None:
        return tokenize(
            read.raw, read.options, tokenizer, limits.cut, limits.train_on_prompt, limits.vocab_size, renderer
        )
    entry = read.cache.entry(tokenizer, limits)
    with read.cache.locked(entry):
        found = read.cache.get(entry)
        if found:
            dataset, read.example = found
            say(f"tokens of {read.source}: {dataset.num_rows:,} rows from {entry}")
            return dataset
        dataset = tokenize_on_cores(read.raw, read.options, tokenizer, limits, say)
        first = dataset.sources[0]
        read.cache.put(entry, dataset, [first, read.raw.rows[read.raw.sources.index(first)]])
    return dataset


def cut_of(settings: TrainConfig) -> Cut:
    """How the settings have long documents cut."""
    return Cut(settings.context_length, settings.overlong, settings.window_overlap)


def eva_batches(data: Data, settings: TrainConfig) -> list[Batch]:
    """Padded batches of the first rows of the run, which --init_lora_weights eva reads activations of."""
    rows, _ = step_rows(data.train.order, min(data.train.num_rows, EVA_ROWS), settings.seed, Cursor())
    return microbatches(data.train, rows, "padded", 16, settings.microbatch_tokens, pad_id(data.tokenizer))
