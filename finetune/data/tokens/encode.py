"""Rows to token ids with their targets marked, a batch at a time: read by columns, rendered, tokenized."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import TracebackType
from typing import Any

import numpy as np

from finetune.data.answer_marks import special_texts, split_end_of_turn
from finetune.data.chat_template import TemplateRenderer
from finetune.data.columns import OF_TASKS, Row, RowReader
from finetune.data.conversation import Conversation
from finetune.data.formats import Document, Span, render_text, token_document, uses_template
from finetune.data.head_rows import last_alone, padding_of, texts_of, without_padding
from finetune.data.images.inputs import ImageInputs
from finetune.data.messages import TemplateWords, has_control_token
from finetune.data.plain_rows import note_damaged, note_plain_row, note_printed
from finetune.data.preference_rows import labelled_of
from finetune.data.tokens.overlong import Cut, cut_document
from finetune.errors import PlanError
from finetune.model_files.tokenizer import Tokenizer, continued, own_length
from finetune.parts.answer_metrics import CLOSES
from finetune.parts.objectives import EMBED
from finetune.system.untrusted import untrusted

Places = tuple[np.ndarray, np.ndarray, np.ndarray]  # of tokens in a text, see _places
SPACE = "\u0120"  # as byte-level tokenizers write it
NEAR = 2  # characters beside the whitespace at a prompt's end that decide its tokens
NO_TEMPLATE = (
    "needs a chat template, and the run began without one, as its first rows need none. Begin it with --chat_template "
    "chatml, or remove the row."
)


@dataclass
class Tokens:
    """The part of a tokenizer's encoding that is read here."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    special_tokens_mask: list[int]


@dataclass(frozen=True)
class Encoded:
    """A document as arrays. `answer_text(token)`: the text of its answer from that token on.

    `conversation`: what the template renders, if the document can be cut at its messages. `label`: of --task
    classify its number; KTO's 1 if it is desirable.
    `images`: the digests of those that it shows; `is_image`: the tokens of the texts in their places. `asked`: tokens
    before its last answer, where thoughts are not learned: these are the answer's.
    """

    ids: np.ndarray
    is_target: np.ndarray
    answer_text: Callable[[int], str]
    conversation: Conversation | None = None
    label: int = 1
    images: tuple[bytes, ...] = ()
    is_image: np.ndarray | None = None
    asked: int | None = None

    def learnable(self, number: int) -> np.ndarray:
        """A bool for each of the first `number` tokens: True but for those of images."""
        if self.is_image is None:
            return np.ones(number, bool)
        return ~self.is_image[:number]


@dataclass(frozen=True)
class Rendered:
    """A document with the conversation that it renders, if it is of one. `ids`: the tokens that it has to have, of a
    document that shows images.
    """

    document: Document
    conversation: Conversation | None = None
    ids: np.ndarray | None = None


class RowEncoder:
    """Encodes rows with one tokenizer. A context: the process that renders templates ends with it.

    `reader` says what the columns mean and counts what became of them. `renderer`: of this tokenizer, to share its
    process; by default an own one. `images`: of rows that show some, of a run that sees them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        reader: RowReader,
        renderer: TemplateRenderer | None = None,
        images: ImageInputs | None = None,
    ):
        self.tokenizer = tokenizer
        self.reader = reader
        self.renderer = renderer
        self.images = images
        self.template = TemplateWords.of(tokenizer)
        self.specials = special_texts(tokenizer)
        self.changes: dict[tuple[str, str], bool] = {}  # of texts around a prompt's end: see _changes
        self.pad_id: int | None = None
        if reader.options.has_head:
            self.pad_id = padding_of(tokenizer)
        self.stack = contextlib.ExitStack()

    def __enter__(self):
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stack.close()

    def encode(self, rows: list[dict], sources: list[str]) -> list[list[Encoded] | PlanError]:
        """The documents of each row, or what is wrong with it. Of a pair: the chosen and the rejected one."""
        options = self.reader.options
        if not (options.pairs or options.labels or options.has_head):
            return self._encoded([self._read(row, source) for row, source in zip(rows, sources, strict=True)])
        answers = [self._answers(row, source) for row, source in zip(rows, sources, strict=True)]
        encoded = iter(self._encoded([answer for row in answers for answer, _ in row]))
        found = [_last_of_each([(read, next(encoded), label) for read, label in row]) for row in answers]
        if options.has_head:
            return [row if isinstance(row, PlanError) else [self._for_head(each) for each in row] for row in found]
        return found

    def _for_head(self, document: Encoded) -> Encoded:
        """The document that a head reads at its last token; without a target if its pair's answer is empty."""
        ids = document.ids
        if self.reader.options.pairs and not document.is_target[1:].any():
            return replace(document, is_target=np.zeros(len(ids), bool), conversation=None)
        if self.reader.options.task != EMBED and self.pad_id is not None:  # whose readers go by the attention mask
            ids = without_padding(ids, self.pad_id)
        return replace(document, ids=ids, is_target=last_alone(len(ids)), conversation=None)

    def _read(self, row: dict, source: str) -> Row | PlanError:
        try:
            return self.reader.read(row, source)
        except PlanError as error:
            return error

    def _answers(self, row: dict, source: str) -> Sequence[tuple[Row | PlanError, int]]:
        """(row, label) of each document of the row: both answers of a pair, the texts that a head reads, or the row
        itself without pairs; an error where it cannot be read.
        """
        try:
            read = self.reader.read(row, source)
            if read.format in OF_TASKS:
                return texts_of(read)
            if self.reader.options.has_head and not self.reader.options.pairs:
                return [(read, 0)]
            return labelled_of(read)
        except PlanError as error:
            return [(error, 1)]

    def _encoded(self, read: list[Row | PlanError]) -> list[list[Encoded] | PlanError]:
        rendered = self._rendered(read)
        for from_template in (False, True):
            flat = [
                (i, k)
                for i, documents in enumerate(rendered)
                if isinstance(documents, list)
                for k, item in enumerate(documents)
                if isinstance(item, Rendered) and item.document.from_template is from_template
            ]
            first = next((row.source for row in read if isinstance(row, Row)), "")
            encoded = self._tokenized([rendered[i][k] for i, k in flat], from_template, first)
            for (i, k), document in zip(flat, encoded, strict=True):
                rendered[i][k] = document
        return rendered

    def cut(self, document: Encoded, cut: Cut, source: str) -> tuple[list[tuple], str | None, Encoded]:
        """([(input ids, is_target)], what became of it or None, the document that these are of), see
        overlong.cut_document.

        auto cuts a conversation before a message, so that the rest is exactly as the template renders it.
        """
        bos_id = self.tokenizer.bos_token_id
        name = None
        if document.conversation and cut.overlong == "auto" and _end(document) > cut.context_length:
            shorter = self._shortened(document, document.conversation, cut.context_length)
            name = "messages_cut" if shorter is not document else None
            document = shorter
        if document.images and _end(document) > cut.context_length and cut.policy(document.is_target) != "error":
            return [], "dropped_long", document  # an image is seen as a whole
        parts, how = cut_document(document.ids, document.is_target, cut, bos_id, source)
        return parts, how or name, document

    def _shortened(self, document: Encoded, conversation: Conversation, context_length: int) -> Encoded:
        """The document from the earliest user message on from which it fits, or from the last one before its answer."""
        starts = conversation.starts()
        shortened = document
        low = 0
        high = len(starts)
        while low < high:  # the shortest is kept if none fits
            middle = (low + high) // 2
            tried = self._one(conversation.from_message(starts[middle]))
            if tried is None:
                return document
            if _end(tried) <= context_length:
                shortened = tried
                high = middle
            else:
                low = middle + 1
                shortened = tried if middle == len(starts) - 1 else shortened
        return shortened

    def _one(self, conversation: Conversation) -> Encoded | None:
        """The one document of a shorter conversation; None if the template does not render it."""
        source = conversation.row.source
        renderer = self._running()
        (rendering,) = renderer.render([conversation.request()], [source])
        if isinstance(rendering, PlanError):
            return None
        documents = conversation.documents(rendering, renderer.marks, count=False)
        if len(documents) == 1:
            return self._tokenized([self._expanded(documents[0], conversation, source)], True, source)[0]
        return None

    def _expanded(self, document: Document, conversation: Conversation | None, source: str) -> Rendered:
        """The document with the model's text in the places of its images. Raises PlanError."""
        if self.images is None:
            assert not document.images, f"{source}: shows images, and nothing here makes the model's tokens of them"
            return Rendered(document, conversation)
        document, ids = self.images.expanded(document, source)
        return Rendered(document, conversation, ids)

    def _running(self) -> TemplateRenderer:
        if self.renderer is None:
            self.renderer = self.stack.enter_context(TemplateRenderer(self.tokenizer))
        return self.renderer

    def _rendered(self, rows: list[Row | PlanError]) -> list:
        """Per row a list of Rendered or Encoded, or a PlanError."""
        rendered: list = []
        asked = []
        requests = []
        for read in rows:
            if isinstance(read, PlanError):
                rendered.append(read)
                continue
            try:
                if read.format not in ("tokens", "text", "document"):
                    note_printed(read)
                if read.format == "tokens":
                    ids, is_target = token_document(read)
                    rendered.append([Encoded(ids, is_target, self._text_from(ids))])
                elif uses_template(read, bool(self.tokenizer.chat_template)):
                    conversation = Conversation.of(read, self.template)
                    if not self.tokenizer.chat_template:  # of rows that are streamed, the first decide
                        raise PlanError(f"{read.source}: {NO_TEMPLATE}")
                    requests.append(conversation.request())
                    asked.append((len(rendered), conversation))
                    rendered.append(None)
                elif read.format == "document":
                    document = Document((Span(read.text("text"), True),), from_template=False, add_eos=False)
                    self._check_control_tokens(read, document)
                    note_damaged(read, document)
                    rendered.append([Rendered(document)])
                else:
                    document = render_text(read, self.tokenizer)
                    self._check_control_tokens(read, document)
                    note_damaged(read, document)
                    has_template = bool(self.tokenizer.chat_template)
                    note_plain_row(read, document, has_template, self.template.specials, self.joins_space)
                    rendered.append([self._expanded(document, None, read.source)])
            except PlanError as error:
                rendered.append(error)
        if not asked:
            return rendered
        renderer = self._running()
        answers = renderer.render(requests, [conversation.row.source for _, conversation in asked])
        for (i, conversation), rendering in zip(asked, answers, strict=True):
            try:
                if isinstance(rendering, PlanError):
                    raise rendering
                documents = conversation.with_documents(rendering, renderer.marks)
                if documents:
                    note_damaged(conversation.row, documents[-1][0])
                rendered[i] = [self._expanded(document, of, of.row.source) for document, of in documents]
            except PlanError as error:
                rendered[i] = error
        return rendered

    @cached_property
    def takes_whitespace(self) -> list[int]:
        """Ids of added tokens to whose text the whitespace after it belongs, as of Phi-3's <|assistant|>."""
        return [number for number, token in self.tokenizer.added_tokens_decoder.items() if token.rstrip]

    @cached_property
    def spaces_after(self) -> np.ndarray | None:
        """The number of spaces at each token's end, after other characters, as of a line break and an indentation; None
        if no token has some, or if offsets leave no space out.
        """
        text = "a b"
        (encoding,) = self.tokenizer(
            [text], add_special_tokens=False, return_offsets_mapping=True, verbose=False
        ).encodings
        if "".join(text[first:last] for first, last in encoding.offsets) == text:
            return None
        vocabulary = self.tokenizer.get_vocab()
        ending = {text: number for text, number in vocabulary.items() if text.endswith(SPACE) and text.strip(SPACE)}
        if not ending:
            return None
        counts = np.zeros(1 + max(vocabulary.values()), np.int64)
        for text, number in ending.items():
            counts[number] = len(text) - len(text.rstrip(SPACE))
        return counts

    @cached_property
    def joins_space(self) -> bool:
        """True if the tokenizer makes one token of a space and the word after it."""
        apart, together = self.tokenizer(
            ["a: ", "a: b"], add_special_tokens=False, return_offsets_mapping=True, verbose=False
        ).encodings
        return together.ids[: len(apart.ids)] != apart.ids

    def _check_control_tokens(self, row: Row, document: Document) -> None:
        """Counts a row without a template whose text has control tokens, as already rendered rows do."""
        text = "".join(span.text for span in document.spans if not span.is_end)
        first = self.template.specials and self.template.specials.search(text)
        if first and row.options.special_tokens == "error":
            raise PlanError(has_control_token(row.source, first[0]))
        if first:
            row.note(f"a text has control tokens such as {first[0]}, which stay so")

    def _text_from(self, ids: np.ndarray) -> Callable[[int], str]:
        """The answer from a token on, as tokens of rows have it: with its special tokens, without its end."""
        return lambda token: split_end_of_turn(self.tokenizer.decode(ids[token:].tolist()), self.specials)[0]

    def _tokenized(self, rendered: list[Rendered], from_template: bool, first: str) -> list[Encoded]:
        if not rendered:
            return []
        texts = ["".join(span.text for span in item.document.spans) for item in rendered]
        with untrusted(f"{first}: its tokenizer fails on this row or one after it", "Use a tokenizer you trust."):
            encodings = self.tokenizer(
                texts, add_special_tokens=not from_template, return_offsets_mapping=True, verbose=False
            ).encodings
        found = []
        for item, text, encoding in zip(rendered, texts, encodings, strict=True):
            if item.ids is not None and encoding.ids != item.ids.tolist():
                raise PlanError(
                    f"{first}: the model's own processor makes other tokens of a text with images than its tokenizer "
                    "of the same text. Rows with images cannot be learned with this model."
                )
            places = _places(encoding, text, self.spaces_after)
            if item.ids is None and (cut := self._cuts(item.document, text, encoding, places, from_template)):
                encoding = self._apart(text, cut, from_template)
                places = _places(encoding, text, self.spaces_after)
            of_document = _with_targets(
                item.document, text, encoding, places, self.tokenizer.eos_token_id, self.takes_whitespace
            )
            images = tuple(image.digest.encode() for image in item.document.images)
            is_image = None
            if images:
                is_image = np.zeros(len(of_document[0]), bool)
                is_image[: len(encoding.ids)] = _of_images(item.document, encoding)
            asked = None
            if self.reader.options.mask_reasoning and from_template and (end := _asked_end(item.document)):
                asked = int((places[0] < end).sum())
            found.append(Encoded(*of_document, item.conversation, images=images, is_image=is_image, asked=asked))
        return found

    def _cuts(self, document: Document, text: str, encoding: Any, places: Places, from_template: bool) -> list[int]:
        """The ends of prompts at which a text is tokenized apart, to give these the tokens that programs ask with: a
        token has the last characters and a rendered answer's first ones, or line breaks are others at a text's end.
        """
        _, ends, starts = places
        cut = []
        for at in _prompt_ends(document, from_template):
            crossed = np.flatnonzero((starts < at) & (ends > at))
            if any(encoding.ids[token] not in self.takes_whitespace for token in crossed):
                is_cut = from_template
            else:
                is_cut = text[max(0, at - 2) : at].isspace() and self._changes(_tail(text[:at]), text[at : at + NEAR])
            if is_cut:
                cut.append(at)
        return cut

    def _apart(self, text: str, cut: list[int], from_template: bool) -> Tokens:
        """The tokens of a text's parts."""
        found = Tokens([], [], [])
        for start, stop in itertools.pairwise([0, *cut, len(text)]):
            if start:
                ids, offsets = continued(self.tokenizer, text[start:stop])
            else:
                (first,) = self.tokenizer(
                    [text[:stop]], add_special_tokens=not from_template, return_offsets_mapping=True, verbose=False
                ).encodings
                own = own_length(first.special_tokens_mask)
                ids = first.ids[:own]
                offsets = first.offsets[:own]
            found.ids += ids
            found.offsets += [(start + a, start + b) for a, b in offsets]
            found.special_tokens_mask += [0] * len(ids)
        return found

    def _changes(self, before: str, after: str) -> bool:
        """True if the tokens of a text's end are others where the text goes on."""
        if (before, after) not in self.changes:
            alone, joined = self.tokenizer(
                [before, before + after], add_special_tokens=False, return_offsets_mapping=True, verbose=False
            ).encodings
            self.changes[before, after] = joined.ids[: len(alone.ids)] != alone.ids
        return self.changes[before, after]


def _tail(text: str) -> str:
    """The whitespace at a text's end with what is before it."""
    return text[max(0, len(text.rstrip()) - NEAR) :]


def _prompt_ends(document: Document, from_template: bool) -> list[int]:
    """The characters of a text at which an answer begins."""
    if from_template:
        return [end for span, _, end in _placed(document) if span.ends_prompt and end]
    places = list(_placed(document))
    pairs = itertools.pairwise(places)
    return [end for (span, _, end), (after, _, _) in pairs if end and not span.is_target and after.is_target]


def _asked_end(document: Document) -> int | None:
    """The character at which the last answer begins; None of one whose thought is not learned and has other marks than
    <think>: what is said after such a thought is not known.
    """
    end = None
    is_thought = False
    for span, _, after in _placed(document):
        if span.ends_prompt:
            end = after
            is_thought = False
        elif span.is_target and is_thought and not span.is_end and not span.text.lstrip().startswith(CLOSES):
            return None
        else:
            is_thought = not span.is_target and bool(span.text)
    return end


def _last_of_each(answers: list[tuple]) -> list[Encoded] | PlanError:
    """A document per answer: the last one, if its template has several. `answers`: (row, documents, label) of each."""
    wrong = next((documents for _, documents, _ in answers if isinstance(documents, PlanError)), None)
    if wrong:
        return wrong
    for read, documents, _ in answers:
        if len(documents) > 1 and not read.options.has_head:
            read.note("only the last turn of an answer is learned: the chat template writes those before it otherwise")
    return [replace(documents[-1], label=int(label)) for _, documents, label in answers]


def _end(document: Encoded) -> int:
    targets = np.flatnonzero(document.is_target)
    if len(targets):
        return int(targets[-1]) + 1
    return 0


def _of_images(document: Document, encoding: Any) -> np.ndarray:
    """A bool per token: True for those of the texts in the places of images."""
    starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
    found = np.zeros(len(starts), bool)
    for span, first, end in _placed(document):
        if span.is_image:
            found |= (starts < end) & (ends > first)
    return found


def _placed(document: Document) -> Iterator[tuple[Span, int, int]]:
    """(span, its first character in the whole text, the one after its last) of each span."""
    at = 0
    for span in document.spans:
        yield span, at, at + len(span.text)
        at += len(span.text)


def _places(encoding: Any, text: str, spaces_after: np.ndarray | None = None) -> Places:
    """(first characters, the ones after the last, first ones with spaces before them) of tokens. `spaces_after`: see
    RowEncoder.

    Byte-level tokenizers trim spaces off a token's offsets: a token of only spaces has an empty span, and starts where
    the previous one ended; one that ends in spaces ends where the next one begins, at most.
    """
    starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
    if spaces_after is not None and (after := spaces_after[np.array(encoding.ids, np.int64)]).any():
        following = np.append(starts[1:], len(text))
        ends = np.maximum(ends, np.minimum(ends + after, following))
    before = np.maximum.accumulate(np.r_[0, ends[:-1]])[: len(starts)]
    trimmed = np.minimum(starts, before)
    return np.where(starts == ends, trimmed, starts), ends, trimmed


def _with_targets(
    document: Document,
    text: str,
    encoding: Any,
    places: Places,
    eos_id: int | None,
    takes_whitespace: Sequence[int] = (),
) -> tuple[np.ndarray, np.ndarray, Callable[[int], str]]:
    """(ids, targets, see Encoded.answer_text). `takes_whitespace`: ids whose offsets hold whitespace after them."""
    ids = np.array(encoding.ids, np.int32)
    if not len(ids):
        return np.zeros(1, np.int32), np.zeros(1, bool), str
    starts, ends, trimmed = places
    is_target = np.zeros(len(ids), bool)
    is_mark = np.isin(ids, takes_whitespace) if takes_whitespace else np.zeros(len(ids), bool)
    answer_end = len(text)
    for span, first, end in _placed(document):
        if span.is_target and span.text:
            is_target |= (starts < end) & (ends > first) & ~(is_mark & (starts < first))
            if not span.is_end:
                answer_end = end
    if document.add_eos and eos_id is not None and is_target.any():
        own = len(ids)  # without what the tokenizer puts after each text, as Qwen3-Embedding's, which is no end
        while encoding.special_tokens_mask[own - 1] and ids[own - 1] != eos_id:
            own -= 1
        ids = ids[:own]
        is_target = is_target[:own]
        if ids[-1] != eos_id:
            ids = np.append(ids, np.int32(eos_id))
            is_target = np.append(is_target, False)
        is_target[-1] = True
    return ids, is_target, lambda token: text[trimmed[token] : answer_end]
