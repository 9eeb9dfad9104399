"""Tokenization: rows to token arrays with targets marked; a dataset is three flat arrays, so a row is a slice."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from finetune.arrays import Arrays, Named, Per, joined, of_documents
from finetune.data.asking import shown
from finetune.data.chat_template import TemplateRenderer
from finetune.data.columns import Notices, RowOptions, RowReader
from finetune.data.formats import describe_format
from finetune.data.head_rows import last_alone
from finetune.data.images.inputs import DIGEST, IMAGES, ImageInputs
from finetune.data.reading.rows import RawDataset
from finetune.data.sampler import Mix, split_validation
from finetune.data.tokens.encode import Encoded, RowEncoder
from finetune.data.tokens.overlong import CUTS, Cut, cut_for_head, last_answer_start
from finetune.errors import PlanError
from finetune.model_files.tokenizer import Tokenizer, unknown_id
from finetune.parts.answer_metrics import after_thought
from finetune.parts.objectives import CLASSIFY, EMBED, GENERATE
from finetune.system.progress import Progress
from finetune.system.terminal import clean

TOKENIZER_BATCH = 512
DESIRABLE = "desirable"  # KTO's label of each document
LABEL = "label"  # that of --task classify
ASKED = "asked"  # tokens before a document's last answer, where its targets do not say so
NO_IMAGES = np.zeros(0, DIGEST)


@dataclass(frozen=True)
class Part:
    """One of the datasets that rows come from: the number of its rows, and its weight if they are mixed by it."""

    name: str
    num_rows: int
    weight: float | None = None
    line: str = ""


@dataclass(frozen=True)
class TokenizedDataset:
    """Documents as flat arrays: document i is tokens[offsets[i] : offsets[i + 1]].

    Its first token is never a target, as nothing predicts it. counts: rows, tokens and targets of this dataset;
    skipped, dropped_empty, tokens_lost and overlong.CUTS while reading. `notices`: what a user should know of its rows;
    `full_lengths`: of the documents before any cut. `noted`: {what a user should know of the rows: how often}, `first`
    the first place of each of these and of each count. `parts`: the datasets it is joined from, in order;
    `rest`: what identifies rows that are not held, of a stream. `documents_per_row`: 2 if rows are pairs, of which
    document 2i is the chosen answer and 2i + 1 the rejected. `arrays`: what documents have beside their tokens:
    "desirable", KTO's label; "label", a class's number; "reference", the log-probability under the reference, once that
    is computed; "images".
    `images`: makes of these what the model takes, a microbatch at a time. `task`: a word
    of --task, for which the rows are read; `class_names`: of its labels, by number.
    """

    tokens: np.ndarray  # int32
    is_target: np.ndarray  # bool
    offsets: np.ndarray  # int64, number of documents + 1
    sources: tuple[str, ...]
    counts: dict
    description: str = ""
    skipped: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    full_lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    first: dict = field(default_factory=dict)
    noted: dict = field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    rest: str = ""
    documents_per_row: int = 1
    arrays: Arrays = field(default_factory=dict)
    images: ImageInputs | None = None
    task: str = GENERATE
    class_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_rows(self) -> int:
        return len(self) // self.documents_per_row

    @property
    def order(self) -> int | Mix:
        """The sampler's population: the number of rows, or a mixture by weights."""
        if not self.parts or self.parts[0].weight is None:
            return self.num_rows
        return Mix(tuple(p.num_rows for p in self.parts), tuple(p.weight for p in self.parts if p.weight is not None))

    def part_numbers(self) -> np.ndarray:
        """Number of the part that each row belongs to."""
        return np.repeat(np.arange(len(self.parts)), [part.num_rows for part in self.parts])

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def row_lengths(self) -> np.ndarray:
        """Tokens per row: of a pair, of both documents."""
        return self.lengths.reshape(-1, self.documents_per_row).sum(1)

    def row_source(self, row: int) -> str:
        return self.sources[row * self.documents_per_row]

    @property
    def row_sources(self) -> tuple[str, ...]:
        """Places that the rows are from: answers of one conversation and windows of one text are from one."""
        return self.sources[:: self.documents_per_row]

    def document(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """(input ids, is_target) of one document."""
        part = slice(self.offsets[i], self.offsets[i + 1])
        return self.tokens[part], self.is_target[part]

    def images_of(self, i: int) -> np.ndarray:
        """The digests of the images that a document shows, in order."""
        if IMAGES not in self.arrays:
            return NO_IMAGES
        return self.arrays[IMAGES].of_documents([i], self.offsets, self.documents_per_row).values

    def split(self, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """(training rows, validation rows), see split_validation: some rows of each weighted part, and of each label,
        are trained on.
        """
        kinds = np.zeros(self.num_rows, np.int64)
        if self.parts and self.parts[0].weight is not None:
            kinds = self.part_numbers()
        if LABEL in self.arrays:
            labels = self.arrays[LABEL].values
            kinds = kinds * (1 + labels.max()) + labels
        return split_validation(self.row_sources, fraction, seed, kinds)

    def answer_start(self, i: int) -> int:
        """The number of tokens of a document before its last answer."""
        said = last_answer_start(self.document(i)[1])
        if ASKED not in self.arrays:
            return said
        return min(int(self.arrays[ASKED].values[i]) or said, said)

    def select(self, indices: Sequence[int] | np.ndarray) -> "TokenizedDataset":
        """Dataset of the rows at `indices`, in that order."""
        each = self.documents_per_row
        numbers: np.ndarray = np.zeros(0, np.int64)
        if self.parts:
            numbers = np.bincount(self.part_numbers()[indices], minlength=len(self.parts))
        indices = [row * each + k for row in indices for k in range(each)]
        parts = [self.document(i) for i in indices]
        counts = self.counts | _sizes([ids for ids, _ in parts], [targets for _, targets in parts])
        counts["rows"] //= each
        sources = tuple(self.sources[i] for i in indices)
        kept = tuple(replace(part, num_rows=int(n)) for part, n in zip(self.parts, numbers, strict=True) if n)
        arrays = of_documents(self.arrays, indices, self.offsets, each)
        return replace(self, **joined_parts(parts), sources=sources, counts=counts, parts=kept, arrays=arrays)

    def digest(self) -> str:
        """sha256 of tokens, targets, document offsets and what was read beside them: equal for equal training data."""
        hasher = hashlib.sha256()
        for values in (self.tokens, self.is_target, self.offsets):
            hasher.update(np.ascontiguousarray(values).tobytes())
        for name, array in sorted(self.arrays.items()):
            if array.is_data:
                if name != DESIRABLE:  # whose digest is in runs that were saved before there were others
                    hasher.update(f"{name} {array.per.value} {array.values.dtype}".encode())
                hasher.update(np.ascontiguousarray(array.values).tobytes())
                if array.counts_D is not None:
                    hasher.update(np.ascontiguousarray(array.counts_D).tobytes())
        hasher.update(self.rest.encode())
        if self.images is not None:
            hasher.update(self.images.processor.settings.encode())
        return hasher.hexdigest()

    def lost(self) -> str | None:
        """The line on tokens lost to --context_length, and the length that keeps all; None if none are."""
        c = self.counts
        if not c.get("tokens_lost"):
            return None
        share = c["tokens_lost"] / (c["tokens_lost"] + c["tokens"])
        p50, p95, longest = (int(np.percentile(self.full_lengths, q)) for q in (50, 95, 100))
        return (
            f"{c['tokens_lost']:,} tokens ({share:.1%}) are over the context length and not learned; --context_length "
            f"{longest} keeps all (p50 {p50:,}, p95 {p95:,}, max {longest:,})"
        )

    @property
    def num_cut(self) -> int:
        """Documents of which the context length leaves something out."""
        return sum(number for name, number in self.counts.items() if name in CUTS and name not in ("split", "alike"))

    def describe(self) -> str:
        """One line: rows, tokens, targets, and the numbers of truncated, dropped and skipped rows."""
        c = self.counts
        longest = 0
        if len(self):
            longest = int(self.lengths.max())
        rows = f"{c['rows']:,} row{'s' * (c['rows'] != 1)}"
        parts = [rows, f"{c['tokens']:,} tokens (longest {longest:,})", f"{c['targets']:,} targets"]
        for name, text in {**CUTS, "dropped_empty": "dropped: no answer", "skipped": "skipped: bad rows"}.items():
            if c.get(name):
                parts.append(f"{c[name]:,} {text}")
        return ", ".join(parts) + (f"; {self.description}" if self.description else "")


# ------ tokenizing


def tokenize(
    raw: RawDataset,
    options: RowOptions | str,
    tokenizer: Tokenizer,
    cut: Cut | int,
    train_on_prompt: bool = False,
    vocab_size: int | None = None,
    renderer: TemplateRenderer | None = None,
    images: ImageInputs | None = None,
) -> TokenizedDataset:
    """Tokenizes rows and marks targets. `options`: RowOptions or a format; `cut`: a Cut or a context length.

    A token is a target iff it contains a character of an answer; the end-of-turn token is one too. `vocab_size`:
    rows of the model's embedding. `renderer`: of this tokenizer, to share its process; by default an own one. `images`:
    of a run that sees them. Raises PlanError for a row that does not fit the format, or if no row has a target.
    """
    reader = reader_of(raw, options, tokenizer)
    limits = Limits(Cut.of(cut), train_on_prompt, vocab_size)
    builder = Builder(raw.description, raw.skipped, raw.skip_bad_rows)
    progress = Progress("tokenizing", len(raw.rows), "rows")
    with RowEncoder(tokenizer, reader, renderer, images) as encoder, progress:
        for start in range(0, len(raw.rows), TOKENIZER_BATCH):
            part = slice(start, start + TOKENIZER_BATCH)
            rows = raw.rows[part]
            sources = raw.sources[part]
            builder.add(encode_batch(encoder, rows, sources, limits), sources)
            progress.update(len(rows))
    return builder.finished(reader, tokenizer, len(raw.rows), images)


@dataclass(frozen=True)
class Limits:
    """Limits of every document, and whether all of its tokens are learned."""

    cut: Cut
    train_on_prompt: bool = False
    vocab_size: int | None = None


@dataclass
class EncodedRow:
    """One row encoded: its documents, or why it is left out.

    `full`: tokens of each document before any cut; `cuts`: what became of those cut; `labels`: of each, see Encoded;
    `images`: the digests of those that each shows; `asked`: see asked_tokens.
    """

    parts: list
    full: list[int]
    cuts: list[str]
    empty: int = 0
    bad: str | None = None
    labels: list[int] = field(default_factory=list)
    images: list[tuple[bytes, ...]] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)

    @property
    def num_lost(self) -> int:
        """Tokens over the context length that are not learned."""
        return tokens_lost(self.full, self.cuts, sum(len(ids) for ids, _ in self.parts))


def tokens_lost(full: list[int], cuts: list[str], kept: int) -> int:
    """Tokens that a row lost to the context length. `full`: of its documents before any cut; `kept`: after it."""
    if cuts and set(cuts) != {"split"}:
        return max(0, sum(full) - kept)
    return 0


@dataclass
class EncodedBatch:
    """A batch of rows encoded: the arrays of all documents, and per row their number and the facts of EncodedRow."""

    tokens: np.ndarray
    is_target: np.ndarray
    lengths: list[int]
    rows: list[list]  # number of documents, full, cuts, empty, bad, labels, asked
    images: list[tuple[bytes, ...]] = field(default_factory=list)  # of each document, of a run that sees them

    @classmethod
    def of(cls, rows: list[EncodedRow]) -> "EncodedBatch":
        parts = [part for row in rows for part in row.parts]
        joined = joined_parts(parts)
        facts = [[len(row.parts), row.full, row.cuts, row.empty, row.bad, row.labels, row.asked] for row in rows]
        images = [of_document for row in rows for of_document in row.images]
        return cls(joined["tokens"], joined["is_target"], [len(ids) for ids, _ in parts], facts, images)


def encode_batch(encoder: RowEncoder, rows: list[dict], sources: list[str], limits: Limits) -> EncodedBatch:
    """Encodes each row."""
    found = zip(sources, encoder.encode(rows, sources), strict=True)
    return EncodedBatch.of([_limited(encoder, documents, source, limits) for source, documents in found])


def encode_row(encoder: RowEncoder, row: dict, source: str, limits: Limits) -> EncodedRow:
    """Encodes one row."""
    (documents,) = encoder.encode([row], [source])
    return _limited(encoder, documents, source, limits)


def _limited(encoder: RowEncoder, documents: list[Encoded] | PlanError, source: str, limits: Limits) -> EncodedRow:
    if isinstance(documents, PlanError):
        return EncodedRow([], [], [], bad=str(documents))
    found = EncodedRow([], [], [])
    options = encoder.reader.options
    for document in documents:
        ids = document.ids
        is_target = document.is_target
        if limits.vocab_size is not None and ids.max() >= limits.vocab_size:
            raise PlanError(
                f"{source}: token id {ids[ids >= limits.vocab_size][0]} is out of range for the model's "
                f"{limits.vocab_size} embedding rows. Use the model's own tokenizer."
            )
        if options.has_head and not is_target.any():
            continue
        if options.has_head:
            ids, how = cut_for_head(ids, limits.cut, source)
            found.full.append(len(document.ids))
            found.cuts += [how] if how else []
            if len(ids):
                found.parts.append((ids, last_alone(len(ids))))
                found.labels.append(document.label)
                found.images.append(document.images)
            continue
        if not is_target[1:].any():
            found.empty += 1
            continue
        if is_target[0] and not is_target[1:-1].any():
            encoder.reader.notices.add("an answer is in the first token of its row: its end alone is learned", source)
        splits = limits.cut.policy(is_target) == "split"
        if splits and (options.pairs or options.labels):  # an answer without a prompt is no text
            limits = replace(limits, cut=replace(limits.cut, overlong="keep_end"))
            splits = False
        if limits.train_on_prompt and splits:  # before windows repeat tokens that are not to be learned again
            document = replace(document, is_target=document.learnable(len(ids)))
        parts, how, document = encoder.cut(document, limits.cut, source)
        found.full.append(int(np.flatnonzero(is_target)[-1]) + 1)
        found.cuts += [how] if how else []
        for ids, is_target in parts:
            if not is_target[1:].any():
                found.empty += 1
                continue
            if limits.train_on_prompt and not splits:
                is_target = document.learnable(len(ids))
            else:
                is_target = is_target.copy()
            is_target[0] = False
            found.parts.append((ids, is_target))
            found.labels.append(document.label)
            found.images.append(document.images)
            found.asked.append(asked_tokens(document, ids, how))
    if options.documents > 1 and len(found.parts) != options.documents:  # one part alone says nothing
        is_cut = "dropped_long" in found.cuts
        return replace(found, parts=[], labels=[], images=[], asked=[], empty=0 if is_cut else 1)
    if options.pairs and all(map(np.array_equal, *found.parts)):  # what differs was over the context length
        found.cuts.append("alike")
    return found


def asked_tokens(document: Encoded, ids: np.ndarray, how: str | None) -> int:
    """Tokens before the last answer of a document, of which `ids` are left; 0 where its targets say so, and of a part
    that does not begin with all of them. `how`: see overlong.cut_document.
    """
    if document.asked is None:
        return 0
    if how == "prompt_truncated":
        return max(0, len(ids) - int(np.flatnonzero(document.is_target)[-1]) - 1 + document.asked)
    asked = document.asked
    return asked if len(ids) > asked and np.array_equal(ids[:asked], document.ids[:asked]) else 0


class Builder:
    """Collects encoded rows into a TokenizedDataset."""

    def __init__(self, description: str, skipped: Sequence[str] = (), skip_bad_rows: int = 0):
        self.description = description
        self.skipped = list(skipped)
        self.skip_bad_rows = skip_bad_rows
        self.batches: list[EncodedBatch] = []
        self.sources: list[str] = []
        self.full: list[int] = []
        self.labels: list[int] = []
        self.asked: list[int] = []
        self.counts = dict.fromkeys(("dropped_empty", "tokens_lost", *CUTS), 0)
        self.first: dict[str, str] = {}  # where each of them was seen first

    def add(self, batch: EncodedBatch, sources: list[str]) -> None:
        """Raises PlanError for more bad rows than may be skipped."""
        self.batches.append(batch)
        lengths = iter(batch.lengths)
        for (num_parts, full, cuts, empty, bad, labels, asked), source in zip(batch.rows, sources, strict=True):
            if bad is not None:
                if len(self.skipped) >= self.skip_bad_rows:
                    raise PlanError(bad)
                self.skipped.append(bad)
                continue
            kept = sum(next(lengths) for _ in range(num_parts))
            self.sources += [source] * num_parts
            self.full += full
            self.labels += labels
            self.asked += asked
            self.counts["dropped_empty"] += empty
            for name in cuts:
                self.counts[name] += 1
            for name in ("dropped_empty",) * bool(empty) + tuple(cuts):
                self.first.setdefault(name, source)
            self.counts["tokens_lost"] += tokens_lost(full, cuts, kept)

    def finished(
        self, reader: RowReader, tokenizer: Tokenizer, num_rows: int, images: ImageInputs | None = None
    ) -> TokenizedDataset:
        """Raises PlanError if there is nothing to train on."""
        if not self.sources:
            long = self.counts["dropped_long"]
            if long:
                why = f"all of its {long} rows with an answer are too long, see --context_length"
            else:
                why = f"none of its {num_rows} rows has an answer to train on. Fill in the answers"
            raise PlanError(f"{self.description}: {why}.")
        if reader.options.pairs and 2 * self.counts["alike"] == len(self.sources):
            raise PlanError(
                f"{self.description}: in all of its {self.counts['alike']} pairs the chosen and rejected answers are "
                "the same tokens, so neither is preferred. Raise --context_length if they are truncated."
            )
        tokens = np.concatenate([batch.tokens for batch in self.batches])
        is_target = np.concatenate([batch.is_target for batch in self.batches])
        lengths = [length for batch in self.batches for length in batch.lengths]
        each = reader.options.documents
        sizes = dict(rows=len(lengths) // each, tokens=len(tokens), targets=int(is_target.sum()))
        counts = self.counts | dict(skipped=len(self.skipped)) | sizes
        description = f"{self.description}, {describe_formats(reader.formats, tokenizer)}"
        if tokenizer.eos_token_id is None:
            description += ", the tokenizer has no EOS token"
        labelled = {}
        if reader.options.labels:
            labelled = labels_of(self.labels)
        elif reader.options.task == CLASSIFY:
            labelled = classes_of(self.labels)
        if reader.options.mask_reasoning:
            labelled |= asked_of(self.asked)
        beside = {}
        if images is not None:
            beside = images.beside(tokens, [shown for batch in self.batches for shown in batch.images])
        is_unknown = tokens == unknown_id(tokenizer)
        many = int(is_unknown.sum()), int((is_unknown & is_target).sum())
        unknown = []
        if many[0]:
            unknown = [f"tokens that the tokenizer does not know: {many[0]:,}, {many[1]:,} of them learned"]
        return TokenizedDataset(
            tokens=tokens,
            is_target=is_target,
            offsets=np.cumsum([0, *lengths], dtype=np.int64),
            sources=tuple(self.sources),
            counts=counts,
            description=description,
            skipped=tuple(self.skipped),
            notices=(*notice_lines(reader.notices), *unknown),
            full_lengths=np.array(self.full, np.int32),
            first=self.first | reader.notices.first,
            noted=dict(reader.notices.counts),
            documents_per_row=each,
            arrays=labelled | beside,
            images=images,
            task=reader.options.task,
            class_names=reader.options.class_names,
        )


def joined_datasets(datasets: list[TokenizedDataset], parts: list[tuple[str, float | None]]) -> TokenizedDataset:
    """The documents of several datasets one after the other. `parts`: (name, weight) of each."""
    if len(datasets) == 1:
        return datasets[0]
    counts = {name: sum(d.counts[name] for d in datasets) for name in datasets[0].counts}
    lengths = np.concatenate([d.lengths for d in datasets])
    found = tuple(Part(n, d.num_rows, w, d.describe()) for (n, w), d in zip(parts, datasets, strict=True))
    mixed = " mixed by weight" if parts[0][1] is not None else ""
    return TokenizedDataset(
        tokens=np.concatenate([d.tokens for d in datasets]),
        is_target=np.concatenate([d.is_target for d in datasets]),
        offsets=np.cumsum(np.r_[0, lengths], dtype=np.int64),
        sources=tuple(s for d in datasets for s in d.sources),
        counts=counts,
        description=f"{len(datasets)} datasets{mixed}",
        skipped=tuple(line for d in datasets for line in d.skipped),
        notices=tuple(f"{n}: {line}" for (n, _), d in zip(parts, datasets, strict=True) for line in d.notices),
        full_lengths=np.concatenate([d.full_lengths for d in datasets]),
        first={key: place for d in reversed(datasets) for key, place in d.first.items()},
        noted={key: sum(d.noted.get(key, 0) for d in datasets) for d in datasets for key in d.noted},
        parts=found,
        documents_per_row=datasets[0].documents_per_row,
        arrays=joined([d.arrays for d in datasets]),
        images=datasets[0].images,
        task=datasets[0].task,
        class_names=datasets[0].class_names,
    )


def describe_formats(formats: Counter[str], tokenizer: Tokenizer) -> str:
    """The format of all rows, or the number of rows in each."""
    if len(formats) == 1:
        return describe_format(next(iter(formats)), tokenizer)
    return ", ".join(f"{count:,} {describe_format(fmt, tokenizer)}" for fmt, count in formats.items())


def notice_lines(notices: Notices) -> tuple[str, ...]:
    """A line per notice with its count; columns that are not used in one."""
    counts = notices.counts
    unused = {key: n for key, n in counts.items() if key.endswith("is not used") and key.startswith("column ")}
    named = ", ".join(f"{key.split(maxsplit=1)[1].removesuffix(' is not used')} ({n:,})" for key, n in unused.items())
    lines = []
    if named:
        lines = [f"columns not used, with their number of rows: {named}"]
    shown = {key: f", as in {json.dumps(text, ensure_ascii=False)}" for key, text in notices.examples.items()}
    return (*lines, *(f"{key}{shown.get(key, '')}: {n:,} x" for key, n in counts.items() if key not in unused))


def generation_examples(
    raw: RawDataset,
    options: RowOptions | str,
    tokenizer: Tokenizer,
    renderer: TemplateRenderer | None = None,
    images: ImageInputs | None = None,
) -> list[tuple[list[int], str, str]]:
    """(prompt ids, answer text, source) for each row's last answer, to score by generation.

    The prompt is the training input before the answer's first token; if that token also contains the last characters of
    the prompt, they belong to the answer text. Rows without an answer are left out, and texts, which ask nothing.
    """
    examples = []
    answered = False
    with RowEncoder(tokenizer, reader_of(raw, options, tokenizer), renderer, images) as encoder:
        for at in range(0, len(raw.rows), TOKENIZER_BATCH):
            sources = raw.sources[at : at + TOKENIZER_BATCH]
            encoded = encoder.encode(raw.rows[at : at + TOKENIZER_BATCH], sources)
            for source, documents in zip(sources, encoded, strict=True):
                if isinstance(documents, PlanError):
                    if not raw.skip_bad_rows:
                        raise documents
                    continue
                documents = [d for d in documents if d.is_target.any()]
                answered = answered or bool(documents)
                if not documents:
                    continue
                last = documents[-1]  # a row rendered as several documents is scored on its last
                said = last_answer_start(last.is_target)  # after thoughts that are not learned
                start = min(last.asked or said, said)
                if start > int(last.ids[0] == tokenizer.bos_token_id):
                    prompt = last.ids[:start].tolist()
                    if images is not None:
                        prompt = images.prompt(prompt, last.images)
                    expected = last.answer_text(said)
                    unlearned = last.answer_text(start).removesuffix(expected)
                    examples.append((prompt, after_thought(unlearned, expected), source))
    if not answered:
        raise PlanError(
            f"{raw.description}: none of its {len(raw.rows)} rows has an answer to score. Fill in the answers."
        )
    return examples


def reader_of(raw: RawDataset, options: RowOptions | str, tokenizer: Tokenizer) -> RowReader:
    """A reader of the rows' columns. Raises PlanError if no format matches or the tokenizer has no offsets."""
    if not tokenizer.is_fast:
        raise PlanError(
            f"tokenizer {tokenizer.name_or_path}: does not return character offsets. Use a model with a tokenizer.json."
        )
    reader = RowReader(RowOptions.of(options), raw.columns, raw.description)
    reader.notices.update(raw.notices.counts, raw.notices.first, raw.notices.examples)
    return reader


def labels_of(desirable: Sequence[int] | np.ndarray) -> dict[str, Named]:
    """KTO's labels as what documents have beside their tokens."""
    return {DESIRABLE: Named(np.array(desirable, bool), Per.DOCUMENT)}


def classes_of(numbers: Sequence[int]) -> dict[str, Named]:
    """The labels of --task classify as what documents have beside their tokens."""
    return {LABEL: Named(np.array(numbers, np.int64), Per.DOCUMENT)}


def asked_of(tokens: Sequence[int] | np.ndarray) -> dict[str, Named]:
    """The tokens before each document's last answer, where its targets do not say so."""
    return {ASKED: Named(np.array(tokens, np.int64), Per.DOCUMENT, is_data=False)}


def joined_parts(parts: list) -> dict:
    """The arrays of a dataset of these (input ids, is_target)."""
    lengths = [len(ids) for ids, _ in parts]
    return dict(
        tokens=np.concatenate([ids for ids, _ in parts] or [np.zeros(0)]).astype(np.int32),
        is_target=np.concatenate([targets for _, targets in parts] or [np.zeros(0)]).astype(bool),
        offsets=np.cumsum([0, *lengths], dtype=np.int64),
    )


def _sizes(ids: list, targets: list) -> dict:
    return dict(rows=len(ids), tokens=sum(len(i) for i in ids), targets=int(sum(t.sum() for t in targets)))


def render_row(dataset: TokenizedDataset, row: int, tokenizer: Tokenizer, color: bool) -> str:
    """One row as `render_sample` shows its documents; of preference rows, each after what it is."""
    if LABEL in dataset.arrays:
        text = tokenizer.decode(dataset.document(row)[0].tolist(), skip_special_tokens=False)
        label = str(dataset.arrays[LABEL].values[row])
        if dataset.class_names:
            label = dataset.class_names[int(label)]
        return f"{clean(label)}: {clean(text)}"
    if dataset.documents_per_row == 1 and DESIRABLE not in dataset.arrays:
        return render_sample(dataset, row, tokenizer, color)
    each = dataset.documents_per_row
    names: tuple[str, ...] = ("chosen", "rejected")
    if dataset.task == EMBED:
        names = ("anchor", "positive", "negative")[:each]
    if DESIRABLE in dataset.arrays:
        names = ("desirable" if dataset.arrays[DESIRABLE].values[row] else "undesirable",)
    texts = [render_sample(dataset, row * each + k, tokenizer, color) for k in range(each)]
    return "\n".join(f"{name}: {text}" for name, text in zip(names, texts, strict=True))


def render_sample(dataset: TokenizedDataset, i: int, tokenizer: Tokenizer, color: bool) -> str:
    """One document as the model sees it, cleaned, with its targets marked: in green, or between ⟦ and ⟧."""
    ids, is_target = dataset.document(i)
    edges = np.r_[0, np.flatnonzero(np.diff(is_target)) + 1, len(ids)]
    pieces = []
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        part = ids[start:end]
        if dataset.images is not None:
            part = dataset.images.shortened(part)
        text = tokenizer.decode(part.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        text = clean(shown(text) if is_target[start] else text)
        if color:
            marks = ("\x1b[32m", "\x1b[0m")
        else:
            marks = ("⟦", "⟧")
        pieces.append(f"{marks[0]}{text}{marks[1]}" if is_target[start] else text)
    return "".join(pieces)
