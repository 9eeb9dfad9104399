"""From the run's settings to its data: raw rows of every dataset it names, then tokenized rows."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from finetune.config import TrainConfig
from finetune.data.chat_template import shared_renderer
from finetune.data.collate import largest_microbatch, microbatches
from finetune.data.columns import Row, RowOptions, RowReader, parse_columns, parse_names
from finetune.data.formats import needs_template
from finetune.data.mixture import Source, sources_of
from finetune.data.overlong import Cut
from finetune.data.rows import RawDataset
from finetune.data.sampler import Cursor, rank_rows, rows_so_far, split_validation, step_rows, total_steps
from finetune.data.sources import find_files, read_rows
from finetune.data.token_cache import LEAST_BYTES, TokenCache
from finetune.data.tokenize import Limits, TokenizedDataset, generation_examples, joined_datasets, tokenize
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
        mine = rank_rows(rows, data_rank, plan.data_ranks)
        return microbatches(self.train, mine, s.batch_layout, s.batch_size, s.microbatch_tokens, pad_id), rows, cursor

    def total_steps(self, plan) -> int:
        s = plan.settings
        return total_steps(self.train.order, plan.rows_per_step, s.num_epochs, s.max_steps)

    def tokens_by_dataset(self, plan, state) -> dict[str, int]:
        """Tokens trained on so far of each dataset; empty if there is one."""
        train, found = self.train, np.zeros(len(self.train.parts), np.int64)
        if not train.parts:
            return {}
        numbers, lengths = train.part_numbers(), train.lengths
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
        """The row of this source, None if it is not one of these rows."""
        rows = self.example
        if rows is None:
            rows = (name, self.raw.rows[self.raw.sources.index(name)]) if name in self.raw.sources else (None, {})
        return RowReader(self.options).read(rows[1], name) if rows[0] == name else None


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
    split, options = source.split or split, options_of(source, settings)
    said = f"{flag} {source}" if isinstance(settings.dataset, list) else flag

    def read() -> RawDataset:
        raw = read_rows(source.name, samples, settings.skip_bad_rows, split, flag, settings.text_unit)
        check_columns(raw, options, said)
        return raw

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


def options_of(source: Source, settings: TrainConfig) -> RowOptions:
    """How a dataset's columns are read: as it says itself, else as the settings do. Raises PlanError."""
    columns = source.columns or parse_columns(settings.columns)
    return RowOptions(source.format or settings.dataset_format, columns, parse_names(settings.ignore_columns))


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
            rows, held_out = split_validation(len(train), settings.validation_split, settings.seed)
            train, validation = train.select(rows), train.select(held_out)
        if "score" in raw_datasets:
            for read in raw_datasets["score"]:
                score_examples += generation_examples(read.raw, read.options, tokenizer, renderer)
            validation = validation or tokenized("score", renderer)
    source = score_examples[0][2] if score_examples else train.sources[0]
    named = (read.row(source) for read in raw_datasets["score" if score_examples else "train"])
    example = next((row for row in named if row), None)
    return Data(tokenizer, end_ids(tokenizer, files.folder), train, validation, score_examples, example)


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
            say(f"tokens of {read.source}: {len(dataset):,} rows from {entry}")
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
    num_rows = len(data.train)
    rows, _ = step_rows(data.train.order, min(num_rows, EVA_ROWS), settings.seed, Cursor())
    return microbatches(data.train, rows, "padded", 16, settings.microbatch_tokens, pad_id(data.tokenizer))
