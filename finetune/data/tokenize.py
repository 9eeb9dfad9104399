"""Tokenization: rows to token arrays with targets marked; a dataset is three flat arrays, so a row is a slice."""

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from finetune.data.chat_template import TemplateRenderer, special_texts
from finetune.data.formats import Conversation, Document, describe_format, detect_format, render_text, uses_template
from finetune.data.readers import RawDataset
from finetune.data.sources import read_rows
from finetune.errors import PlanError
from finetune.terminal import clean
from finetune.untrusted import untrusted

__all__ = ["RawDataset", "read_rows"]  # re-exported, so that callers need only this module
TOKENIZER_BATCH = 512


@dataclass(frozen=True)
class TokenizedDataset:
    """Documents as flat arrays: document i is tokens[offsets[i] : offsets[i + 1]].

    Its first token is never a target, as nothing predicts it. counts: rows, tokens and targets of this dataset;
    skipped, dropped_empty, prompt_truncated and answer_truncated while reading.
    """

    tokens: np.ndarray  # int32
    is_target: np.ndarray  # bool
    offsets: np.ndarray  # int64, number of documents + 1
    sources: tuple[str, ...]
    counts: dict
    description: str = ""
    skipped: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def document(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """(input ids, is_target) of one document."""
        part = slice(self.offsets[i], self.offsets[i + 1])
        return self.tokens[part], self.is_target[part]

    def select(self, indices) -> "TokenizedDataset":
        """Dataset of the documents at `indices`, in that order."""
        parts = [self.document(i) for i in indices]
        counts = self.counts | _sizes([ids for ids, _ in parts], [targets for _, targets in parts])
        sources = tuple(self.sources[i] for i in indices)
        return replace(self, **_joined(parts), sources=sources, counts=counts)

    def digest(self) -> str:
        """sha256 of tokens, targets and document offsets: equal for equal training data."""
        hasher = hashlib.sha256()
        for array in (self.tokens, self.is_target, self.offsets):
            hasher.update(np.ascontiguousarray(array).tobytes())
        return hasher.hexdigest()

    def describe(self) -> str:
        """One line: rows, tokens, targets, and the numbers of truncated, dropped and skipped rows."""
        c = self.counts
        longest = int(self.lengths.max()) if len(self) else 0
        parts = [f"{c['rows']:,} rows", f"{c['tokens']:,} tokens (longest {longest:,})", f"{c['targets']:,} targets"]
        for name, text in (
            ("prompt_truncated", "truncated at the start of the prompt"),
            ("answer_truncated", "truncated at the end of the answer"),
            ("dropped_empty", "dropped: no answer"),
            ("skipped", "skipped: bad rows"),
        ):
            if c[name]:
                parts.append(f"{c[name]:,} {text}")
        return ", ".join(parts) + (f"; {self.description}" if self.description else "")


# ------ tokenizing


def tokenize(
    raw: RawDataset,
    fmt: str,
    tokenizer,
    context_length: int,
    train_on_prompt: bool = False,
    vocab_size: int | None = None,
    renderer: TemplateRenderer | None = None,
) -> TokenizedDataset:
    """Tokenizes rows and marks targets, truncating to `context_length`. `fmt`: a key of FORMATS, or auto.

    A token is a target iff it contains a character of an answer; the end-of-turn token is one too. `vocab_size`:
    rows of the model's embedding. `renderer`: of this tokenizer, to share its process; by default an own one. Raises
    PlanError for a row that does not fit the format, or if no row has a target.
    """
    fmt = resolve_format(raw, fmt, tokenizer)
    skipped = list(raw.skipped)
    counts = dict(dropped_empty=0, prompt_truncated=0, answer_truncated=0)
    parts, sources = [], []
    for row, ids, is_target, _ in _encoded(raw, fmt, tokenizer, skipped, renderer):
        if vocab_size is not None and ids.max() >= vocab_size:
            raise PlanError(
                f"{raw.sources[row]}: token id {ids[ids >= vocab_size][0]} is out of range for the model's "
                f"{vocab_size} "
                "embedding rows. Use the model's own tokenizer."
            )
        ids, is_target, cut = truncate(ids, is_target, context_length, tokenizer.bos_token_id)
        if not is_target[1:].any():
            counts["dropped_empty"] += 1
            continue
        if cut:
            counts[cut] += 1
        is_target = np.ones_like(is_target) if train_on_prompt else is_target
        is_target[0] = False
        parts.append((ids, is_target))
        sources.append(raw.sources[row])
    if not parts:
        raise PlanError(
            f"{raw.description}: none of its {len(raw.rows)} rows has an answer to train on. Fill in the answers."
        )
    counts |= dict(skipped=len(skipped)) | _sizes([ids for ids, _ in parts], [targets for _, targets in parts])
    description = f"{raw.description}, {describe_format(fmt, tokenizer)}"
    if tokenizer.eos_token_id is None:
        description += ", the tokenizer has no EOS token"
    return TokenizedDataset(
        **_joined(parts), sources=tuple(sources), counts=counts, description=description, skipped=tuple(skipped)
    )


def generation_examples(raw: RawDataset, fmt: str, tokenizer, renderer=None) -> list[tuple[list[int], str, str]]:
    """(prompt ids, answer text, source) for each row's last answer, to score by generation.

    The prompt is the training input before the answer's first token; if that token also contains the last characters of
    the prompt, they belong to the answer text. Rows without an answer are left out.
    """
    fmt = resolve_format(raw, fmt, tokenizer)
    by_row = {}  # a row rendered as several documents is scored on its last
    for row, ids, is_target, text_from in _encoded(raw, fmt, tokenizer, list(raw.skipped), renderer):
        if is_target.any():
            start = last_answer_start(is_target)
            by_row[row] = (ids[:start].tolist(), text_from(start), raw.sources[row])
    if not by_row:
        raise PlanError(
            f"{raw.description}: none of its {len(raw.rows)} rows has an answer to score. Fill in the answers."
        )
    return list(by_row.values())


def resolve_format(raw: RawDataset, fmt: str, tokenizer) -> str:
    """Resolves format `auto` from the columns. Raises PlanError if none matches or the tokenizer has no offsets."""
    if not tokenizer.is_fast:
        raise PlanError(
            f"tokenizer {tokenizer.name_or_path}: does not return character offsets. Use a model with a tokenizer.json."
        )
    return detect_format(raw.columns, raw.description) if fmt == "auto" else fmt


def truncate(ids, is_target, context_length: int, bos_id: int | None):
    """(input ids, is_target, name of its truncation count or None), truncated to context_length.

    A row that is too long keeps BOS and its last answer and is truncated at the start of the prompt; an answer too long
    by itself is truncated at its end. Tokens after the last target are dropped.
    """
    targets = np.flatnonzero(is_target)
    end = targets[-1] + 1 if len(targets) else len(ids)
    ids, is_target = ids[:end], is_target[:end]
    if len(ids) <= context_length or not len(targets):
        return ids, is_target, None
    head = int(ids[0] == bos_id) if bos_id is not None else 0
    start = max(last_answer_start(is_target), head)
    room = context_length - head
    first = end - room if end - start <= room else start
    keep = np.r_[:head, first : first + room]
    return ids[keep], is_target[keep], "prompt_truncated" if end - start <= room else "answer_truncated"


def last_answer_start(is_target) -> int:
    """Index at which the last contiguous run of targets starts."""
    targets = np.flatnonzero(is_target)
    gaps = np.flatnonzero(np.diff(targets) > 1)
    return int(targets[gaps[-1] + 1] if len(gaps) else targets[0])


def _encoded(raw: RawDataset, fmt: str, tokenizer, skipped: list[str], renderer) -> Iterator[tuple]:
    """Yields (row number, input ids, is_target, answer_text(token)) per document; appends bad rows to `skipped`."""

    def encode_pending():
        texts = ["".join(span.text for span in document.spans) for _, document in pending]
        first = raw.sources[pending[0][0]]
        with untrusted(f"{first}: its tokenizer fails on this row or one after it", "Use a tokenizer you trust."):
            encodings = tokenizer(
                texts, add_special_tokens=not pending[0][1].from_template, return_offsets_mapping=True, verbose=False
            ).encodings
        for (row, document), text, encoding in zip(pending, texts, encodings, strict=True):
            yield row, *_with_targets(document, text, encoding, tokenizer.eos_token_id)

    pending = []
    for row, documents in _rendered(raw, fmt, tokenizer, renderer):
        if isinstance(documents, PlanError):
            if len(skipped) >= raw.skip_bad_rows:
                raise documents
            skipped.append(str(documents))
            continue
        pending += [(row, document) for document in documents]
        if len(pending) >= TOKENIZER_BATCH:
            yield from encode_pending()
            pending = []
    if pending:
        yield from encode_pending()


def _rendered(raw: RawDataset, fmt: str, tokenizer, renderer) -> Iterator[tuple[int, list[Document] | PlanError]]:
    """Yields (row number, its documents or what is wrong with it)."""
    if not uses_template(fmt, tokenizer):
        for row, (fields, source) in enumerate(zip(raw.rows, raw.sources, strict=True)):
            try:
                yield row, [render_text(fields, source, fmt, tokenizer)]
            except PlanError as error:
                yield row, error
        return
    with contextlib.ExitStack() as stack:
        renderer = renderer or stack.enter_context(TemplateRenderer(tokenizer))
        specials = special_texts(tokenizer)
        for start in range(0, len(raw.rows), TOKENIZER_BATCH):
            rows = range(start, min(start + TOKENIZER_BATCH, len(raw.rows)))
            yield from zip(rows, _rendered_batch(raw, fmt, rows, renderer, specials), strict=True)


def _rendered_batch(raw: RawDataset, fmt: str, rows, renderer, specials) -> list[list[Document] | PlanError]:
    found, asked, requests = {}, [], []
    for row in rows:
        try:
            found[row] = Conversation.of(raw.rows[row], raw.sources[row], fmt)
            requests.append(found[row].request(raw.sources[row]))
            asked.append(row)
        except PlanError as error:
            found[row] = error
    for row, texts in zip(asked, renderer.render(requests, [raw.sources[row] for row in asked]), strict=True):
        try:
            failed = isinstance(texts, PlanError)
            found[row] = texts if failed else found[row].documents(texts, raw.sources[row], specials)
        except PlanError as error:
            found[row] = error
    return [found[row] for row in rows]


def _with_targets(document: Document, text: str, encoding, eos_id: int | None):
    ids = np.array(encoding.ids, np.int32)
    if not len(ids):
        return np.zeros(1, np.int32), np.zeros(1, bool), str
    starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
    # Byte-level tokenizers trim spaces off a token's offsets: a token of only spaces has an empty span, and starts
    # where
    # the previous one ended.
    before = np.maximum.accumulate(np.r_[0, ends[:-1]])
    trimmed = np.minimum(starts, before)
    starts = np.where(starts == ends, trimmed, starts)
    is_target, at, answer_end = np.zeros(len(ids), bool), 0, len(text)
    for span in document.spans:
        if span.is_target and span.text:
            is_target |= (starts < at + len(span.text)) & (ends > at)
            answer_end = answer_end if span.is_end else at + len(span.text)
        at += len(span.text)
    if document.add_eos and eos_id is not None and is_target.any():
        if ids[-1] != eos_id:
            ids, is_target = np.append(ids, np.int32(eos_id)), np.append(is_target, False)
        is_target[-1] = True
    return ids, is_target, lambda token: text[trimmed[token] : answer_end]


def _joined(parts: list) -> dict:
    lengths = [len(ids) for ids, _ in parts]
    return dict(
        tokens=np.concatenate([ids for ids, _ in parts] or [np.zeros(0)]).astype(np.int32),
        is_target=np.concatenate([targets for _, targets in parts] or [np.zeros(0)]).astype(bool),
        offsets=np.cumsum([0, *lengths], dtype=np.int64),
    )


def _sizes(ids: list, targets: list) -> dict:
    return dict(rows=len(ids), tokens=sum(len(i) for i in ids), targets=int(sum(t.sum() for t in targets)))


def render_sample(dataset: TokenizedDataset, i: int, tokenizer, color: bool) -> str:
    """One row as the model sees it, cleaned, with its targets marked: in green, or between ⟦ and ⟧."""
    ids, is_target = dataset.document(i)
    edges = np.r_[0, np.flatnonzero(np.diff(is_target)) + 1, len(ids)]
    pieces = []
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        text = tokenizer.decode(ids[start:end].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        text = clean(text)
        marks = ("\x1b[32m", "\x1b[0m") if color else ("⟦", "⟧")
        pieces.append(f"{marks[0]}{text}{marks[1]}" if is_target[start] else text)
    return "".join(pieces)
