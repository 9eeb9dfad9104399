"""Rows that a chat template renders: their messages, and which of the rendered text is learned.

The template renders a conversation up to each answer and after it. The target is what the answer adds to the generation
prompt before it. A model's chat template is third-party code: it runs in a limited child process.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from finetune.data.answer_marks import AnswerMarks
from finetune.data.chat_template import Rendering, request_of
from finetune.data.columns import Row
from finetune.data.formats import Document, Span, joined_question, question_and_answer
from finetune.data.images.marks import IMAGE_MARK, marked_in, with_plain_marks
from finetune.data.images.references import ImageReference
from finetune.data.messages import (
    REASONING,
    TemplateWords,
    chat_messages,
    check_rendered,
    check_tools,
    note_turns,
    note_unanswered,
    note_unread_fields,
    past_turns,
    system_text,
    template_variables,
    tool_schemas,
    with_known_roles,
    with_nine_character_ids,
    with_plain_contents,
    with_system,
)
from finetune.errors import PlanError

TAGGED = re.compile(r"\s*<([\w-]+)>.*</\1>\s*", re.S)  # a message that brings the marks around it
OF_THOUGHTS = re.compile(r"\s*</?think>")  # a mark that an answer begins with
NO_THOUGHT = re.compile(r"\s*<think>\s*</think>\s*")
THOUGHT_OF_PROMPT = re.compile(r"<think>\s*(</think>\s*)?$")  # at its end
INLINE_THOUGHT = re.compile(r"\s*(?:<think>)?(.*)</think>", re.S)  # at the front of an answer's content


@dataclass(frozen=True)
class Turn:
    """One answer as rendered. `before`: the prompt; `begun`: how much of the answer's beginning is in the prompt too;
    `unlearned`: how much of it is no target.
    """

    before: str
    answer: str
    end: str
    ends_in_text: bool
    is_target: bool
    begun: int = 0
    unlearned: int = 0

    @property
    def whole(self) -> str:
        return self.before + self.answer + self.end

    def spans(self, done: int) -> list[Span]:
        """The turn from character `done` of its prompt on."""
        prompt = self.before[done:] + self.answer[: self.begun]
        unlearned = self.answer[self.begun : self.unlearned]
        rest = self.answer[max(self.begun, self.unlearned) :]
        return [
            Span(prompt, False, ends_prompt=self.is_target),
            *([Span(unlearned, False)] if unlearned else []),
            Span(rest, self.is_target),
            Span(self.end, self.is_target, is_end=True),
        ]


@dataclass(frozen=True)
class Conversation:
    """A row for the chat template. `answers`: indices of the assistant's messages; `learned`: the targets.

    A row of a head without answers of its own, as of --task classify, has none: all of it is read.
    `begun`: {index of an answer: its beginning, which is part of the prompt}. `variables`: the template's switches.
    `images`: what the marks in its messages represent, in order.
    """

    messages: list[dict]
    tools: list | None
    answers: tuple[int, ...]
    learned: frozenset
    row: Row
    begun: dict[int, str] = field(default_factory=dict)
    variables: dict = field(default_factory=dict)
    images: tuple[ImageReference, ...] = ()

    @classmethod
    def of(cls, row: Row, template: TemplateWords) -> "Conversation":
        """Raises PlanError naming the row's source and the field."""
        messages, learned, begun = joined_answer(*turns_of(row))
        if begun:
            row.note("a prompt ends with the beginning of the assistant's answer, which is continued")
        messages = with_plain_contents(with_known_roles(messages, template), template.specials, row)
        tools = tool_schemas(row.get("tools"), row.columns.get("tools", "tools"), row.source)
        check_rendered(messages, tools, template, row)
        if template.short_ids:
            messages = with_nine_character_ids(messages)
        is_read = row.options.reads_texts and row.options.whole
        answers = () if is_read else tuple(_answers(messages, row))
        asked = answers[-1:] if row.options.last_turn else answers
        targets = [i for i in asked if learned[i]]
        variables = template_variables(row, template)
        images: tuple[ImageReference, ...] = ()
        if row.images:
            images = tuple(image for message in messages for image in marked_in(message["content"], row.images))
            messages = [{**message, "content": with_plain_marks(message["content"])} for message in messages]
        found = cls(messages, tools, answers, frozenset(targets), row, begun, variables, images)
        end = max(targets, default=len(messages)) + 1
        if any(IMAGE_MARK in message["content"] for message in messages[end:]):
            return found.before(end)
        return found

    def request(self) -> bytes:
        """The request for the texts that `documents` reads: before and after each answer, or of the whole."""
        upto = [point for i in self.answers for point in ((i, True), (i + 1, False))]
        upto = upto or [(len(self.messages), False)]
        marks = bool(self.images)
        return request_of(self.messages, self.tools, upto, self.row.source, variables=self.variables, marks=marks)

    def starts(self) -> list[int]:
        """Messages that a shorter conversation may begin with: of users, after the first, before the last target."""
        users = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        return [i for i in users[1:] if self.learned and i < max(self.learned)]

    def from_message(self, start: int) -> "Conversation":
        """The conversation from message `start` on, after the system messages at its front."""
        head = _first_turn(self.messages)
        moved = start - head
        return replace(
            self,
            messages=self.messages[:head] + self.messages[start:],
            answers=tuple(i - moved for i in self.answers if i >= start),
            learned=frozenset(i - moved for i in self.learned if i >= start),
            begun={i - moved: text for i, text in self.begun.items() if i >= start},
            images=self._images_before(head) + self.images[len(self._images_before(start)) :],
        )

    def _pieces(self, content: str) -> list[str]:
        """The text between a content's images, which a template may write elsewhere."""
        if self.images:
            return content.split(IMAGE_MARK)
        return [content]

    def upto_turn(self, turn: int | None) -> "Conversation":
        """The conversation of a document: whole, or up to its only answer."""
        if turn is None:
            return self
        last = self.answers[turn]
        return replace(self.before(last + 1), learned=frozenset({last}))

    def before(self, end: int) -> "Conversation":
        """The conversation of the first messages: tokens after the last target are not kept, so that images in them are
        not shown either.
        """
        answers = tuple(i for i in self.answers if i < end)
        return replace(self, messages=self.messages[:end], answers=answers, images=self._images_before(end))

    def _images_before(self, number: int) -> tuple[ImageReference, ...]:
        """The images of the first messages."""
        if not self.images:
            return ()
        return self.images[: sum(message["content"].count(IMAGE_MARK) for message in self.messages[:number])]

    def with_documents(self, rendering: Rendering, marks: AnswerMarks) -> list[tuple]:
        """[(document, its conversation)], see `documents`."""
        return [(document, self.upto_turn(document.turn)) for document in self.documents(rendering, marks)]

    def documents(self, rendering: Rendering, marks: AnswerMarks, count: bool = True) -> list[Document]:
        """One document, or one per answer if the chat template rewrites earlier turns or ends none of them.
        `count`: the row's notices are counted. Raises PlanError.
        """
        texts = rendering.texts
        if count:
            note_unread_fields(self.messages, rendering.unread, self.row)
            check_tools(self.tools, rendering.unread, self.row)
        if not self.answers:
            if count and self.row.options.reads_texts:
                self._count_unrendered({}, texts[0])
            return [Document((Span(texts[0], False),), from_template=True, add_eos=False, images=self.images)]
        pairs = zip(self.answers, texts[::2], texts[1::2], strict=True)
        turns = [self._turn(i, before, after, marks) for i, before, after in pairs]
        if count:
            self._count_unrendered(dict(zip(self.answers, turns, strict=True)), turns[-1].whole)
        documents = _documents_of_turns(turns)
        if not self.images:
            return documents
        lasts = [self.answers[-1 if document.turn is None else document.turn] for document in documents]
        return [replace(d, images=self._images_before(i + 1)) for d, i in zip(documents, lasts, strict=True)]

    def _turn(self, i: int, before: str, after: str, marks: AnswerMarks) -> Turn:
        message = self.messages[i]
        is_target = i in self.learned and not _is_empty(message)
        if after.startswith(before):
            rest = after[len(before) :]
        elif is_target:
            rest = self._after_prompt(i, before, after)
        else:
            return Turn(after, "", "", ends_in_text=True, is_target=False)
        answer, end, ends_in_text = marks.split(rest, "tool_calls" in message)
        begun = _place_after(self.begun.get(i, ""), answer)
        unlearned = 0
        if self.row.options.mask_reasoning:
            unlearned = _thought_end(message, answer)
        if is_target and unlearned and not answer[unlearned:].lstrip().startswith("</think>"):
            self.row.note("what scores and samples ask has the row's thought, whose marks are not <think> and </think>")
        return Turn(before, answer, end, ends_in_text, is_target, begun, unlearned)

    def _after_prompt(self, i: int, before: str, after: str) -> str:
        """The text of answer `i` where the template renders what is before it otherwise once it is answered: what
        follows the last message's end, which both have. One without a thought closes that which its prompt opens.
        """
        asked = self._pieces(self.messages[i - 1]["content"])[-1].strip()
        if asked:
            tail = before.rpartition(asked)[1:]
        else:
            tail = ("", "")
        closed = "".join(tail)
        if closed and closed in after:
            return after.rpartition(closed)[2]
        rest = after_thought_of_prompt(before, after)
        if rest is not None and not thought_of(self.messages[i]):
            self.row.note("an answer without a thought follows that of its prompt, which is closed")
            return rest
        raise PlanError(
            f"{self.row.source}: the chat template renders the prompt of messages[{i}] otherwise than the answer to "
            "it. Add --chat_template chatml to train with another template."
        )

    def _count_unrendered(self, turn_of: dict[int, Turn], whole: str) -> None:
        """Counts what the template leaves out of the whole text: of an answer that is learned, in its own turn's."""
        for i, message in enumerate(self.messages[: max(turn_of, default=len(self.messages)) + 1]):
            if i in self.learned and len(self.learned) > 1 and _is_empty(message):
                self.row.note("an empty answer among others is not learned")
            if i in turn_of:
                if turn_of[i].is_target:
                    rendered = turn_of[i].answer
                else:
                    rendered = whole
                for what, wanted in wanted_of(message):
                    place = _before_text(message, rendered) if what == "reasoning" else rendered
                    if not _is_in(wanted, place) and (what == "text" or turn_of[i].is_target):
                        self.row.note(f"the {what} of an answer is altered or left out by the chat template")
            elif not all(_is_in(piece, whole) for piece in self._pieces(message["content"])):
                self.row.note(f"a message of {message['role']} is altered or left out by the chat template")
            elif (tag := TAGGED.fullmatch(message["content"])) and _is_in(f"<{tag[1]}>{message['content']}", whole):
                self.row.note(f"a message of {message['role']} has <{tag[1]}> twice: the chat template writes it too")


def after_thought_of_prompt(before: str, after: str) -> str | None:
    """The text of an answer without a thought after a prompt that ends in one, of a template that writes none in its
    answers: an opened one is closed at once. None where the two texts differ in more than that.
    """
    thought = THOUGHT_OF_PROMPT.search(before)
    if thought is None or not after.startswith(before[: thought.start()]):
        return None
    answer = after[thought.start() :]
    if own := NO_THOUGHT.match(answer):
        answer = answer[own.end() :]
    if OF_THOUGHTS.match(answer):
        return None
    return answer if thought[1] else f"\n</think>\n\n{answer}"


def wanted_of(message: dict) -> Iterator[tuple[str, str]]:
    """(kind, text) of each part of an answer."""
    yield "text", said_by(message)
    yield "reasoning", thought_of(message)
    for call in message.get("tool_calls", ()):
        yield "tool call", call["function"]["name"]
        yield from (("tool call", text) for text in _leaves(call["function"]["arguments"]))


def said_by(message: dict) -> str:
    """An answer's content without the thoughts at its front."""
    inline = INLINE_THOUGHT.match(message["content"])
    if inline:
        return message["content"][inline.end() :]
    return message["content"]


def thought_of(message: dict) -> str:
    """An answer's reasoning, of its own field or at the front of its text; empty without."""
    given = next((message[name] for name in REASONING if isinstance(message.get(name), str)), "")
    inline = INLINE_THOUGHT.match(message["content"])
    return (given or (inline[1] if inline else "")).strip()


def _leaves(value: object) -> Iterator[str]:
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _leaves(part)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield str(value)


def _is_in(wanted: str, text: str) -> bool:
    """True if a text has it, as it is or as JSON writes it, whatever the whitespace."""
    forms = {wanted, json.dumps(wanted)[1:-1], json.dumps(wanted, ensure_ascii=False)[1:-1]}
    squeezed = "".join(text.split())
    return any("".join(form.split()) in squeezed for form in forms)


def _before_text(message: dict, answer: str) -> str:
    """The part of a rendered answer before its own text and its calls: its thoughts, if the template writes them."""
    end = len(answer)
    calls = message.get("tool_calls", ())
    if calls:  # the first begins where its name is, and all arguments follow
        said = [text for call in calls for text in _leaves(call["function"]["arguments"])]
        names = [call["function"]["name"] for call in calls]
        places = [found.start() for found in re.finditer(re.escape(names[0]), answer)]
        places = places[: len(places) + 1 - names.count(names[0])]  # all calls of this name follow
        end = max((at for at in places if all(_is_in(text, answer[at:]) for text in said)), default=end)
    text = said_by(message).strip()
    if text and text in answer[:end]:
        end = answer.rindex(text, 0, end)
    return answer[:end]


def _thought_end(message: dict, answer: str) -> int:
    """The number of characters up to the end of the thoughts in a rendered answer; 0 if the template leaves them out.
    A thought's words are elsewhere too: in the answer, and inside of the marks around it.
    """
    thought = thought_of(message)
    if not thought:
        return 0
    whole = re.compile(rf"(?<![A-Za-z0-9_</|]){re.escape(thought)}(?![A-Za-z0-9_>|])")
    return max((found.end() for found in whole.finditer(_before_text(message, answer))), default=0)


def _place_after(begun: str, answer: str) -> int:
    """The number of characters up to the end of `begun` in an answer, however the template trims it."""
    if not begun:
        return 0
    for form in (begun, begun.strip()):
        if form and form in answer:
            return answer.index(form) + len(form)
    return 0


def _is_empty(message: dict) -> bool:
    said = [message["content"], *(message[name] for name in REASONING if isinstance(message.get(name), str))]
    return not "".join(said).strip() and not message.get("tool_calls")


def _first_turn(messages: list[dict]) -> int:
    """The index of the first message that is not a system prompt."""
    roles = [message["role"] for message in messages]
    return next((i for i, role in enumerate(roles) if role not in ("system", "developer")), len(roles))


def _answers(messages: list[dict], row: Row) -> Iterator[int]:
    """Indices of the answers: the assistant's messages, but for a greeting that nobody asked for."""
    first = _first_turn(messages)
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and i > first:
            yield i
        elif message["role"] == "assistant":
            row.note("a conversation begins with the assistant: that message is context, not an answer")


# ------ a row's messages


def turns_of(row: Row) -> tuple[list[dict], list[bool], int]:
    """(messages, whether each is learned if it is an answer, the number of those in the prompt of a completion) of a
    row of any format that a template renders.
    """
    asked = 0
    if row.format == "chat":
        if "messages" not in row.values:
            raise PlanError(f"{row.source}: field {row.columns['messages']!r} is missing, must be a list of messages.")
        messages, learned = chat_messages(row.get("messages"), row.columns["messages"], row)
        if not row.options.reads_texts:
            note_turns(messages, row)
    elif row.format == "prompt_completion":
        messages, learned, asked = _prompted(row)
        note_unanswered(messages, row)
    else:
        messages = past_turns(row.get("history"), row.columns.get("history", "history"), row.source)
        question, extra, answer = question_and_answer(row)
        messages.append({"role": "user", "content": joined_question(row, question, extra)})
        messages.append({"role": "assistant", "content": answer})
        learned = [True] * len(messages)
    for message in messages:
        if message["role"] == "user" and not message["content"].strip():
            row.note("a turn of the user is empty")
    system = system_text(row)
    whole = with_system(messages, system, row.columns.get("system", "system"), row.source)
    added = len(whole) - len(messages)
    return whole, [True] * added + learned, asked and asked + added


def _prompted(row: Row) -> tuple[list[dict], list[bool], int]:
    """Messages of a prompt and a completion, one of them a list, and the number of the prompt's: only the completion's
    turns are learned.
    """
    prompt = row.get("prompt")
    completion = row.get("completion")
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    answer, learned = chat_messages(completion, row.columns["completion"], row)
    if answer[0]["role"] != "assistant" and isinstance(prompt, str):  # it contains its prompt, as chosen often does
        kept = [image.key for message in answer for image in marked_in(message["content"], row.images)]
        if any(image.key not in kept for image in marked_in(prompt, row.images)):
            raise PlanError(
                f"{row.source}: field {row.columns['prompt']!r} has an image and is not used, as "
                f"{row.columns['completion']!r} begins with a question too. Write the image in that, or one of them."
            )
        said = [message["content"] for message in answer if message["role"] != "assistant"]
        if not any(prompt.strip() in text for text in (*said, "\n\n".join(said))):
            raise PlanError(_two_questions(row))
        row.note(f"column {row.columns['prompt']!r} is not used: {row.columns['completion']!r} contains it")
        return answer, learned, 0
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    question, _ = chat_messages(prompt, row.columns["prompt"], row)
    repeated = _repeated(question, answer)
    if repeated:
        row.note(f"messages of {row.columns['prompt']!r} that {row.columns['completion']!r} repeats are read once")
    elif question[-1]["role"] == "user" and answer[0]["role"] in ("user", "system", "developer"):
        raise PlanError(_two_questions(row))
    return question + answer[repeated:], [False] * len(question) + learned[repeated:], len(question)


def _two_questions(row: Row) -> str:
    prompt = row.columns["prompt"]
    return (
        f"{row.source}: field {prompt!r} and the first messages of {row.columns['completion']!r} are two questions. "
        f"Keep one, or add --ignore_columns {prompt}."
    )


def _repeated(question: list[dict], answer: list[dict]) -> int:
    """The number of a question's last messages that an answer begins with. The assistant's alone are none: they are
    continued.
    """
    for number in range(min(len(question), len(answer)), 0, -1):
        again = answer[:number]
        if question[-number:] == again and any(message["role"] != "assistant" for message in again):
            return number
    return 0


def joined_answer(
    messages: list[dict], learned: list[bool], asked: int
) -> tuple[list[dict], list[bool], dict[int, str]]:
    """(messages, whether each is learned, {index: its beginning}) where a prompt, the first `asked` messages, ends with
    the beginning of the answer. Both are one turn of the assistant: it is continued, not closed.
    """
    if not 0 < asked < len(messages):
        return messages, learned, {}
    begun, rest = messages[asked - 1 : asked + 1]
    if not (begun["role"] == rest["role"] == "assistant" and "tool_calls" not in begun and learned[asked]):
        return messages, learned, {}
    whole = {**begun, **rest, "content": begun["content"] + rest["content"]}
    joined = [*messages[: asked - 1], whole, *messages[asked + 1 :]]
    return joined, learned[: asked - 1] + learned[asked:], {asked - 1: begun["content"]}


# ------ documents


def _documents_of_turns(turns: list[Turn]) -> list[Document]:
    turns = [_ended(turn, following) for turn, following in zip(turns, [*turns[1:], None], strict=True)]
    continues = all(after.before.startswith(turn.whole) for turn, after in zip(turns, turns[1:], strict=False))
    has_ends = all(turn.end or not turn.is_target for turn in turns[:-1])
    documents = []
    spans = []
    done = 0
    is_stable = continues and has_ends
    for number, turn in enumerate(turns):
        spans += turn.spans(done)
        done = len(turn.whole)
        if not is_stable:
            # If the template ends turns with plain text only, EOS can only go at the end of the document.
            add_eos = not turn.end and turn.is_target
            documents.append(Document(tuple(spans), from_template=True, add_eos=add_eos, turn=number))
            spans = []
            done = 0
    if is_stable:
        add_eos = not turns[-1].end and turns[-1].is_target
        documents.append(Document(tuple(spans), from_template=True, add_eos=add_eos))
    learned = [d for d in documents if any(span.is_target for span in d.spans)]
    return learned or documents[-1:]


def _ended(turn: Turn, following: Turn | None) -> Turn:
    """The turn without the next role's marker as its end where the conversation goes on with another one."""
    if following is None or turn.ends_in_text or following.before.startswith(turn.whole):
        return turn
    goes_on = following.before.startswith(turn.before + turn.answer)
    if goes_on:
        return replace(turn, end="")
    return turn
