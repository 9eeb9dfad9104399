"""Preparation of the run's data from its plan: raw rows of every dataset it names, then tokenized rows."""

import contextlib
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from finetune.data.answer_marks import AnswerMarks
from finetune.data.asking import as_read, asking
from finetune.data.chat_template import TemplateRenderer, shared_renderer, stop_ids
from finetune.data.collate import microbatches
from finetune.data.columns import (
    OF_TASKS,
    Row,
    RowOptions,
    RowReader,
    check_named_columns,
    missing_column,
    parse_columns,
    parse_names,
)
from finetune.data.images.decode import NO_PILLOW, ImageReader
from finetune.data.images.inputs import ImageInputs
from finetune.data.images.references import ImageOptions, image_root_of
from finetune.data.images.rows import image_columns
from finetune.data.preference_rows import answers_in
from finetune.data.reading.mixture import Source, dataset_words, sources_of
from finetune.data.reading.rows import RawDataset
from finetune.data.reading.sources import find_files, is_local, read_rows
from finetune.data.run_data import Data
from finetune.data.sampler import step_rows
from finetune.data.streaming import first_rows, streamed_data
from finetune.data.tokens.overlong import Cut
from finetune.data.tokens.token_cache import LEAST_BYTES, TokenCache
from finetune.data.tokens.tokenize import Limits, TokenizedDataset, generation_examples, joined_datasets, tokenize
from finetune.data.tokens.workers import tokenize_on_cores
from finetune.engine import Batch
from finetune.errors import PlanError
from finetune.estimate.model_shape import ModelShape
from finetune.generation import Prompt
from finetune.model_files.ends import ends_line, learned_ends, with_learned_end
from finetune.model_files.files import ModelFiles
from finetune.model_files.processor import ImageProcessor
from finetune.model_files.tokenizer import FullTokenizer, Tokenizer, pad_id
from finetune.parts.data import DataPlan
from finetune.parts.objective import names_in
from finetune.parts.objectives import OBJECTIVES
from finetune.parts.parts import Parts
from finetune.parts.rows import implementation, in_prose, words_with
from finetune.parts.train_state import Cursor

OF_ROWS = {"choice", "perplexity"}  # of --score_metric, which need more of a row than its prompt and answer
EVA_ROWS = 256  # rows whose activations --init_lora_weights eva reads
DATASETS = {  # use: (flag, split of a folder or Hub name)
    "train": ("dataset", "train"),
    "validation": ("validation_dataset", "validation"),
    "score": ("score_dataset", "test"),
}


@dataclass
class DatasetSource:
    """A dataset to train on: how its rows are read, at once or when they are asked for, and where its tokens are kept.

    `example`: a row with its source, where the tokens were found without the rows.
    """

    source: Source
    options: RowOptions
    load: Callable[[], RawDataset]
    cache: TokenCache | None = None
    example: tuple[str, dict] | None = None

    @cached_property
    def raw(self) -> RawDataset:
        """Rows of the source. Raises PlanError."""
        return self.load()

    def rows_as_read(self) -> Iterator[tuple[str, dict]]:
        """(source, row) of each row, with the columns that only a reward reads."""
        for source, row in zip(self.raw.sources, self.raw.rows, strict=True):
            yield source, as_read(row)

    @classmethod
    def of(cls, raw: RawDataset, options: RowOptions, source: Source) -> "DatasetSource":
        """A dataset of rows that are read already."""
        return cls(source, options, lambda: raw)

    def row(self, name: str) -> Row | None:
        """The row of this source, or the example if only tokens are here; None if it is not one of these rows."""
        if self.example:
            return RowReader(self.options).read(self.example[1], self.example[0])
        if name not in self.raw.sources:
            return None
        return RowReader(self.options).read(self.raw.rows[self.raw.sources.index(name)], name)


def read_datasets(plan: DataPlan) -> dict[str, list[DatasetSource]]:
    """{use: its datasets} that the plan names. Every broken row is found here. Raises PlanError."""
    found = {}
    for use, (name, split) in DATASETS.items():
        if not getattr(plan, name):
            continue
        samples = {"train": plan.dataset_samples, "validation": -1, "score": plan.score_samples}[use]
        found[use] = [read_source(source, plan, samples, split, f"--{name}") for source in named_sources(plan, name)]
    check_shared_columns([read for datasets in found.values() for read in datasets])
    return found


def named_sources(plan: DataPlan, name: str) -> tuple[Source, ...]:
    """The datasets that --dataset, --validation_dataset or --score_dataset names. Raises PlanError."""
    sources = sources_of(getattr(plan, name), f"--{name}")
    if name != "dataset" and any(source.weight is not None for source in sources):
        raise PlanError(
            f"--{name} {dataset_words(getattr(plan, name))}: has a weight, and only training data is mixed. Omit it."
        )
    return sources


def read_source(source: Source, plan: DataPlan, samples: int, split: str, flag: str) -> DatasetSource:
    """One dataset, its rows read unless its tokens are cached. Raises PlanError."""
    is_file = Path(source.name).is_file() and not source.name.endswith(".json")
    if is_file and source.split and not (source.is_part and source.split_name == "train"):
        raise PlanError(f"{flag} {source}: a file has no splits. Name it without @{source.split}.")
    split = source.split_name or split
    options = options_of(source, plan, flag)
    said = f"{flag} {source}"
    if source.is_part and plan.streaming and flag == "--dataset":
        raise PlanError(f"{said}: --streaming reads a split from its first row to its last. Name the split alone.")

    def load() -> RawDataset:
        read = -1 if source.is_part else samples
        raw = read_rows(source.name, read, plan.skip_bad_rows, split, flag, plan.text_unit, plan.first_rows)
        raw = part_of(raw, source, samples)
        if flag in ("--dataset", "--score_dataset"):
            raw = as_asked(raw, plan, options, may_lack=flag == "--dataset")
        check_columns(raw, options, said, bool(source.columns))
        return raw

    if plan.streaming and flag == "--dataset":
        raw = first_rows(source, plan, split)
        check_columns(raw, options, said, bool(source.columns))
        return DatasetSource(source, options, lambda: raw)
    reading = [samples, plan.skip_bad_rows, source.split if source.is_part else split, plan.text_unit]
    only_first = plan.first_rows and not is_local(source.name)
    # Rewards and labels need the rows themselves; files of images may change.
    if only_first or plan.reward or options.images or plan.task in OF_TASKS:
        cache = None
    else:
        cache = cache_of(source.name, split, flag, reading, options)
    if cache and cache.holds_some():
        return DatasetSource(source, options, load, cache)
    raw = load()  # now, so that every broken row is found before weights are loaded
    return DatasetSource(source, options, lambda: raw, cache)


def part_of(raw: RawDataset, source: Source, samples: int) -> RawDataset:
    """The rows of the part of a split that `source` names, at most `samples`. Raises PlanError if there are none."""
    if not source.is_part:
        return raw
    if raw.about is not None:  # the first rows of a file that is not read: any of them show what the part is like
        return replace(raw, about=len(source.rows(raw.about)))
    rows = source.rows(len(raw.rows))
    if samples >= 0:
        rows = rows[:samples]
    return replace(raw, rows=[raw.rows[i] for i in rows], sources=[raw.sources[i] for i in rows])


def as_asked(raw: RawDataset, plan: DataPlan, options: RowOptions, may_lack: bool = True) -> RawDataset:
    """The rows of a run with rewards, whose answers may be in other columns. `may_lack`: or be missing."""
    if plan.reward is None:
        return raw
    kept = {} if options.images is None else image_columns({str(n).strip().casefold(): n for n in raw.columns})
    by_functions = plan.reward.by_functions
    return asking(raw, options.columns, only_known=by_functions, may_lack=may_lack, kept=tuple(kept))


def cache_of(name: str, split: str, flag: str, reading: list, options: RowOptions) -> TokenCache | None:
    """Cache of a dataset's tokens; None for a small one. Raises PlanError if there is no such dataset."""
    files = [(path, label) for _, path, label in find_files(name, split, flag)[0] if path is not None]
    if sum(path.stat().st_size for path, _ in files) < LEAST_BYTES:
        return None
    return TokenCache(files, reading, options)


def open_images(plan: DataPlan, files: ModelFiles, tokenizer: Any) -> ImageInputs:
    """The maker of the model's arrays of rows' images; its `close` ends the process that decodes them. `tokenizer`:
    transformers'. Raises PlanError.
    """
    if find_spec("PIL") is None:
        raise PlanError(NO_PILLOW)
    processor = ImageProcessor.open(files.folder, files.config, tokenizer)
    return ImageInputs(processor, ImageReader(plan.image_max_pixels))


@contextlib.contextmanager
def images_of(plan: DataPlan, files: ModelFiles | None, tokenizer: Any) -> Iterator[ImageInputs | None]:
    """A context: what makes the model's arrays of images, of a plan whose rows show some."""
    if not plan.images or files is None:
        yield None
        return
    with contextlib.closing(open_images(plan, files, tokenizer)) as images:
        yield images


def options_of(source: Source, plan: DataPlan, flag: str = "--dataset", sees_images: bool | None = None) -> RowOptions:
    """Options for reading a dataset's columns: its own, else the plan's. `sees_images`: rows may show images; None: as
    the plan says. Raises PlanError.
    """
    columns = source.columns or parse_columns(plan.columns)
    answers = flag == "--score_dataset"  # what is scored is an answer, not a comparison
    ignored = parse_names(plan.ignore_columns)
    images = None
    if plan.images if sees_images is None else sees_images:
        images = ImageOptions(image_root_of(source.name, plan.image_root), plan.allow_urls)
    options = RowOptions(
        source.format or plan.format,
        columns,
        ignored,
        plan.pairs and not (answers and not plan.has_head),
        plan.labels and not answers,
        images=images,
        task=plan.task,
        class_names=names_in(plan.class_names),
        negatives=plan.hard_negatives == "true",
    )
    return with_text_options(options, plan)


def with_text_options(options: RowOptions, plan: DataPlan) -> RowOptions:
    """The options with the plan's treatment of special tokens, turns and reasoning."""
    return replace(
        options,
        special_tokens=plan.special_tokens_in_text,
        last_turn=plan.train_on_last_turn,
        mask_reasoning=plan.mask_reasoning,
    )


def check_shared_columns(datasets: list[DatasetSource]) -> None:
    """Raises PlanError if --columns names a column that none of the datasets has. One that some lack is fine."""
    shared = [read for read in datasets if not read.source.columns]
    if not shared:
        return
    kept = [read for read in shared if read.cache and read.cache.holds_some()]  # their rows are read only if need be
    columns = dict.fromkeys(column for read in shared if read not in kept for column in read.raw.columns)
    columns |= dict.fromkeys(column for read in kept if read.cache for column in read.cache.columns())
    for read in kept:
        if missing_column(tuple(columns), shared[0].options) is not None:
            columns |= dict.fromkeys(read.raw.columns)
    names = " and ".join(dict.fromkeys(read.source.name for read in shared))
    check_named_columns(tuple(columns), shared[0].options, names)


def check_columns(raw: RawDataset, options: RowOptions, flag: str, names_its_own: bool = True) -> None:
    """Raises PlanError for columns that match no format, say what is not learned, or are named and missing.

    `names_its_own`: --columns is for this dataset alone.
    """
    if names_its_own:
        check_named_columns(raw.columns, options, flag)
    reader = RowReader(options, raw.columns, flag, raw.rows)
    for row, source in zip(raw.rows, raw.sources, strict=True):
        reader.check(row, source)


def rows_showing_images(raw: RawDataset, options: RowOptions) -> Iterator[str]:
    """Sources of the rows that show an image, be it a broken one: that is named where it is tokenized."""
    reader = RowReader(options, raw.columns)
    for row, source in zip(raw.rows, raw.sources, strict=True):
        with contextlib.suppress(PlanError):
            if reader.shows_image(row, source):
                yield source


def rows_of(raw_datasets: dict[str, list[DatasetSource]], use: str | None = None) -> Iterator[Row]:
    """Every row of the datasets of one use, or of all, by the fields of its format; one that cannot be read is named
    where it is tokenized.
    """
    for datasets in raw_datasets.values() if use is None else [raw_datasets[use]]:
        for read in datasets:
            reader = RowReader(read.options, read.raw.columns)
            for row, source in zip(read.raw.rows, read.raw.sources, strict=True):
                with contextlib.suppress(PlanError):
                    yield from answers_in(reader.read(row, source))


def rows_digest(rows: list[dict], prompts: Iterable[list[int]] = ()) -> str:
    """sha256 of rows as they were read, and of the images that their prompts show: equal for equal rows of any file."""
    hasher = hashlib.sha256()
    for row in rows:
        hasher.update(json.dumps(row, sort_keys=True, default=repr).encode())
    for prompt in prompts:
        if isinstance(prompt, Prompt):
            hasher.update(b"".join(prompt.images))
    return hasher.hexdigest()


def load_data(
    plan: DataPlan,
    raw_datasets: dict,
    tokenizer: FullTokenizer,
    files: ModelFiles,
    say: Callable[[str], object] = lambda line: None,
) -> Data:
    """Tokenizes what `read_datasets` found, and splits validation rows off if asked. Raises PlanError.

    `say` is called with lines on what takes long.
    """
    vocab_size = ModelShape.from_config(files.config).with_vocabulary(files).vocab_size

    def tokenized(use: str, renderer: TemplateRenderer | None, by: FullTokenizer) -> TokenizedDataset:
        limits = Limits(cut_of(plan, use), plan.train_on_prompt and use == "train", vocab_size)
        found = [tokenized_once(read, by, limits, renderer, say, images) for read in raw_datasets[use]]
        return joined_datasets(found, [(str(r.source), r.source.weight) for r in raw_datasets[use]])

    images = None
    if plan.images:
        images = open_images(plan, files, tokenizer)
    with shared_renderer(tokenizer) as renderer:
        train = tokenized("train", renderer, tokenizer)
        validation = None
        score_examples = []
        score_rows = None
        scored_sha256 = ""
        if plan.validation_split and "validation" not in raw_datasets:
            rows, held_out = train.split(plan.validation_split, plan.seed)
            names = [part.name for part in train.parts]
            if plan.validation_split * train.num_rows < 1:
                say(f"  note: --validation_split: 1 of {train.num_rows} rows is held out, as one at least is")
            train, validation = train.select(rows), train.select(held_out)
            for name in (name for name in names if name not in {part.name for part in train.parts}):
                say(f"  note: --validation_split: all rows of {name} are held out, and none is trained on")
            for name in sorted(set(train.row_sources) & set(validation.row_sources)):
                say(f"  note: --validation_split: of {name} the last rows are held out, and those before trained on")
        ends: Counter[int] = Counter()
        if not plan.has_head:
            ends = learned_ends(train.tokens, train.is_target, train.offsets, tokenizer)
        ended = with_learned_end(tokenizer, ends, files.folder)  # by which held-out rows end, as score.py reads them
        if "validation" in raw_datasets:
            validation = tokenized("validation", renderer, ended)
        if "score" in raw_datasets and plan.has_head:
            score_rows = tokenized("score", renderer, ended)
            scored_sha256 = rows_digest([row for read in raw_datasets["score"] for row in read.raw.rows])
            validation = validation or score_rows
        elif "score" in raw_datasets:
            for read in raw_datasets["score"]:
                score_examples += generation_examples(read.raw, read.options, ended, renderer, images)
            scored = [row for read in raw_datasets["score"] for row in read.raw.rows]
            scored_sha256 = rows_digest(scored, [prompt for prompt, _, _ in score_examples])
            of_answers_alone = plan.pairs or plan.labels or plan.reward  # which are no validation rows of such a run
            if OF_ROWS & {name.strip() for name in plan.score_metric.split(",")} or not (
                validation or of_answers_alone
            ):
                score_rows = tokenized("score", renderer, ended)
            validation = validation or (None if of_answers_alone else score_rows)
        if renderer:
            marks = renderer.marks
        else:
            marks = AnswerMarks()
    if score_examples:
        source = score_examples[0][2]
    else:
        source = train.sources[0]
    named = (read.row(source) for read in raw_datasets["score" if score_examples else "train"])
    example = next((row for row in named if row), None)
    if line := ends_line(set(ends), files.folder, tokenizer):
        say(f"  note: {line}")
    check_mismatches(plan, train)
    data = implementation(plan.source).of(
        plan,
        {source: row for read in raw_datasets["train"] if plan.reward for source, row in read.rows_as_read()},
        tokenizer=ended,
        stop_ids=stop_ids(ended, files.folder, marks) | set(ends),
        train=train,
        validation=validation,
        score_examples=score_examples,
        example=example,
        score_rows=score_rows,
        learned_ends=frozenset(ends),
        scored_sha256=scored_sha256,
    )
    if plan.streaming:
        limits = Limits(cut_of(plan), plan.train_on_prompt, vocab_size)
        return streamed_data(data, tokenizer, plan, raw_datasets["train"], limits)
    return data


def check_mismatches(plan: DataPlan, train: TokenizedDataset) -> None:
    """Raises PlanError for one training row, where each prompt is also read with another row's answer."""
    if plan.mismatches and train.num_rows < 2:
        raise PlanError(
            f"--preference {in_prose(words_with(OBJECTIVES, lambda facts: facts.mismatches), 'or')}: "
            f"{train.description} has one row to train on, and each prompt is also read with another row's answer. "
            "Add rows."
        )


def tokenized_once(
    read: DatasetSource,
    tokenizer: Tokenizer,
    limits: Limits,
    renderer: TemplateRenderer | None = None,
    say: Callable[[str], object] = lambda line: None,
    images: ImageInputs | None = None,
) -> TokenizedDataset:
    """A dataset's tokens: from the cache, where one process of a host makes them on all its cores, or made here."""
    if read.cache is None:
        return tokenize(
            read.raw, read.options, tokenizer, limits.cut, limits.train_on_prompt, limits.vocab_size, renderer, images
        )
    entry = read.cache.entry(tokenizer, limits)
    with read.cache.locked(entry) as progress:
        found = read.cache.get(entry, limits.vocab_size, say)
        if found:
            dataset, read.example = found
            say(f"tokens of {read.source}: {dataset.num_rows:,} rows from {entry}")
            return dataset

        def say_progress(line: str) -> None:
            progress()
            say(line)

        dataset = tokenize_on_cores(read.raw, read.options, tokenizer, limits, say_progress)
        first = dataset.sources[0]
        read.cache.put(entry, dataset, (first, read.raw.rows[read.raw.sources.index(first)]))
    return dataset


def cut_of(plan: DataPlan, use: str = "train") -> Cut:
    """Treatment of overlong documents in this plan. Rows that answers are sampled to are whole: their own answers are
    compared, not learned.
    """
    if plan.reward is not None and use == "train":
        return Cut(sys.maxsize, "error")
    return Cut(plan.context_length, plan.overlong, plan.window_overlap)


def eva_batches(data: Data, plan: Parts) -> list[Batch]:
    """Padded batches of the first rows of the run, which --init_lora_weights eva reads activations of."""
    rows, _ = step_rows(data.train.order, min(data.train.num_rows, EVA_ROWS), plan.data.seed, Cursor())
    return microbatches(data.train, rows, "padded", 16, plan.steps.microbatch_tokens, pad_id(data.tokenizer))
