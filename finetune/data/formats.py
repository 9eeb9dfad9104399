"""Dataset rows rendered to text through prompt formats and chat templates, with the target spans marked.

FORMATS is the table. Chat rows (and alpaca and qna rows, if the tokenizer has a chat template) are rendered by the
template, once per assistant turn: the target is the text a turn adds to the generation prompt before it. All other
formats are joined here. A model's chat template is third-party code: it runs in a limited child process.
"""

import re
from dataclasses import dataclass

from finetune.data.chat_template import request_of, split_end_of_turn
from finetune.errors import PlanError

ALPACA_PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
ALPACA_PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
QNA_PROMPT = "###Question:\n{question}\n###Answer:\n"
QNA_PROMPT_WITH_CONTEXT = "###Context:\n{context}\n###Question:\n{question}\n###Answer:\n"
TEXT_MARKER = re.compile(r"### (Human|Assistant):")
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "system": "system",
    "tool": "tool",
}
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Span:
    """A piece of text. `is_end`: the end-of-turn token, a target that is not part of the answer text."""

    text: str
    is_target: bool
    is_end: bool = False


@dataclass(frozen=True)
class Document:
    """Spans tokenized as one text. `from_template`: contains its own BOS, if any. `add_eos`: ends with an answer."""

    spans: tuple[Span, ...]
    from_template: bool
    add_eos: bool


@dataclass(frozen=True)
class Format:
    """A dataset format. `required`: fields a row must have, each with its accepted names.

    `optional`: ones it may have.
    """

    required: tuple[tuple[str, ...], ...]
    optional: tuple[tuple[str, ...], ...] = ()

    def __str__(self) -> str:
        fields = ["|".join(names) for names in self.required] + [f"[{'|'.join(names)}]" for names in self.optional]
        return " + ".join(fields)


# In order of detection: a dataset with both messages and text is a chat dataset.
FORMATS = {
    "chat": Format((("messages", "conversations"),)),
    "alpaca": Format((("instruction",), ("output", "response")), (("input", "context"),)),
    "prompt_completion": Format((("prompt",), ("completion", "response"))),
    "qna": Format((("question",), ("answer",)), (("context",),)),
    "text": Format((("text",),)),
}


def detect_format(columns, dataset: str = "--dataset") -> str:
    """The first of FORMATS whose required fields are all in `columns`. Raises PlanError listing both."""
    for name, fmt in FORMATS.items():
        if all(any(field in columns for field in names) for names in fmt.required):
            return name
    known = "; ".join(f"{name} ({fmt})" for name, fmt in FORMATS.items())
    found = ", ".join(map(str, columns)) or "(none)"
    raise PlanError(f"{dataset}: columns {found} match no format. Rename them to match one: {known}.")


def uses_template(fmt: str, tokenizer) -> bool:
    return fmt == "chat" or (fmt in ("alpaca", "qna") and bool(tokenizer.chat_template))


def describe_format(fmt: str, tokenizer) -> str:
    """A description of the format and of how its rows are rendered."""
    if fmt == "chat":
        return "chat: rendered by the tokenizer's chat template"
    if fmt in ("alpaca", "qna"):
        how = "as one turn of the tokenizer's chat template" if tokenizer.chat_template else f"in the {fmt} text prompt"
        return f"{fmt}: {how}"
    return {"prompt_completion": "prompt_completion: concatenated", "text": "text: unchanged"}[fmt]


# ------ rows to documents


def render_text(row: dict, source: str, fmt: str, tokenizer) -> Document:
    """The document of a row whose format uses no chat template.

    Raises PlanError naming `source` and the field. A row without a non-empty answer has no target span.
    """
    if fmt == "text":
        return _render_text(get_field(row, source, ("text",)), tokenizer)
    question, extra, answer = _question_and_answer(row, source, fmt)
    if fmt == "alpaca":
        prompt = (ALPACA_PROMPT_WITH_INPUT if extra else ALPACA_PROMPT).format(instruction=question, input=extra)
    elif fmt == "qna":
        prompt = (QNA_PROMPT_WITH_CONTEXT if extra else QNA_PROMPT).format(question=question, context=extra)
    else:
        prompt = question
    return Document((Span(prompt, False), Span(answer, bool(answer.strip()))), from_template=False, add_eos=True)


def _question_and_answer(row: dict, source: str, fmt: str) -> tuple[str, str, str]:
    required, optional = FORMATS[fmt].required, FORMATS[fmt].optional
    question, answer = (get_field(row, source, names) for names in required)
    extra = get_field(row, source, optional[0], required=False) if optional else ""
    return question, extra, answer


@dataclass(frozen=True)
class Conversation:
    """A row for the chat template. `answers`: indices of the messages that are answers."""

    messages: list[dict]
    tools: list | None
    answers: tuple[int, ...]

    @classmethod
    def of(cls, row: dict, source: str, fmt: str) -> "Conversation":
        """Raises PlanError naming `source` and the field."""
        if fmt != "chat":
            question, extra, answer = _question_and_answer(row, source, fmt)
            parts = [question, extra] if fmt == "alpaca" else [extra, question]
            content = "\n\n".join(part for part in parts if part)
            return cls([{"role": "user", "content": content}, {"role": "assistant", "content": answer}], None, (1,))
        messages, tools = chat_messages(row, source), row.get("tools")
        if tools is not None and tools != [] and not isinstance(tools, list):
            raise PlanError(f"{source}: field 'tools' is {type(tools).__name__}, must be a list of tool schemas.")
        if not all(isinstance(tool, dict) for tool in tools or ()):
            raise PlanError(f"{source}: field 'tools' must hold objects, tool schemas.")
        # A first message is not an answer.
        answers = tuple(i for i, message in enumerate(messages) if i and message["role"] == "assistant")
        return cls(messages, tools, answers)

    def request(self, source: str) -> bytes:
        """The request for the texts that `documents` reads: before and after each answer, or of the whole."""
        upto = [point for i in self.answers for point in ((i, True), (i + 1, False))]
        return request_of(self.messages, self.tools, upto or [(len(self.messages), False)], source)

    def documents(self, texts: list[str], source: str, specials: tuple[str, ...]) -> list[Document]:
        """One document, or one per answer if the chat template rewrites earlier turns. `specials`: special_texts."""
        if not self.answers:
            return [Document((Span(texts[0], False),), from_template=True, add_eos=False)]
        turns = []  # (prompt text, answer with its end-of-turn, whether it is empty)
        for i, before, after in zip(self.answers, texts[::2], texts[1::2], strict=True):
            if not after.startswith(before):
                raise PlanError(
                    f"{source}: the chat template's rendering up to messages[{i}] does not start with its generation "
                    "prompt. Give the rows as prompt and completion."
                )
            message = self.messages[i]
            is_empty = not message["content"].strip() and not message.get("tool_calls")
            turns.append((before, after[len(before) :], is_empty))
        return _documents_of_turns(turns, specials)


def get_field(row: dict, source: str, names: tuple[str, ...], required: bool = True) -> str:
    """Text of the first field in `names` that the row has. Raises PlanError if it is missing or not a string."""
    name = next((n for n in names if row.get(n) is not None), None)
    if name is None:
        if not required:
            return ""
        name = next((n for n in names if n in row), names[0])
        raise PlanError(f"{source}: field {name!r} is {'null' if name in row else 'missing'}, must be a string.")
    if not isinstance(row[name], str):
        raise PlanError(f"{source}: field {name!r} is {type(row[name]).__name__}, must be a string.")
    return row[name]


def chat_messages(row: dict, source: str) -> list[dict]:
    """The row's messages as role and content, from either spelling. Raises PlanError naming an invalid message."""
    name = next((n for n in FORMATS["chat"].required[0] if row.get(n) is not None), None)
    if name is None:
        fact = "null" if "messages" in row else "missing"
        raise PlanError(f"{source}: field 'messages' is {fact}, must be a list of messages.")
    if not isinstance(row[name], list) or not row[name]:
        fact = "empty" if row[name] == [] else type(row[name]).__name__
        raise PlanError(f"{source}: field {name!r} is {fact}, must be a list of messages.")
    messages = []
    for i, message in enumerate(row[name]):
        where = f"field '{name}[{i}]"
        if not isinstance(message, dict):
            raise PlanError(f"{source}: {where}' is {type(message).__name__}, must be an object with role and content.")
        # Arrow gives every message in a column the union of all fields, with nulls for missing ones.
        message = {key: value for key, value in message.items() if value is not None}
        role_key, content_key = ("from", "value") if "from" in message else ("role", "content")
        role, content = message.pop(role_key, None), message.pop(content_key, None)
        known = SHAREGPT_ROLES if role_key == "from" else dict(zip(ROLES, ROLES, strict=True))
        if not isinstance(role, str) or role not in known:
            raise PlanError(f"{source}: {where}.{role_key}' is {role!r}, must be one of {', '.join(known)}.")
        if content is None and message.get("tool_calls"):
            content = ""
        if not isinstance(content, str):
            fact = "missing" if content is None else type(content).__name__
            raise PlanError(f"{source}: {where}.{content_key}' is {fact}, must be a string.")
        messages.append({"role": known[role], "content": content, **message})
    return messages


def _render_text(text: str, tokenizer) -> Document:
    """Plain text is all target; with Human and Assistant markers, the answers are targets, each ending with EOS."""
    pieces = TEXT_MARKER.split(text)
    if "Human" not in pieces[1::2] or "Assistant" not in pieces[1::2]:
        return Document((Span(text, bool(text.strip())),), from_template=False, add_eos=True)
    spans = [Span(pieces[0], False)]
    for i in range(1, len(pieces), 2):
        marker, content, is_last = pieces[i], pieces[i + 1], i + 2 >= len(pieces)
        spans.append(Span(f"### {marker}:", False))
        is_target = marker == "Assistant" and bool(content.strip())
        spans.append(Span(content, is_target))
        if is_target and not is_last:
            spans.append(Span(tokenizer.eos_token or "", True, is_end=True))
    return Document(tuple(spans), from_template=False, add_eos=spans[-1].is_target)


def _documents_of_turns(turns: list[tuple[str, str, bool]], specials) -> list[Document]:
    texts = [before + answer for before, answer, _ in turns]
    is_stable = all(turns[i + 1][0].startswith(texts[i]) for i in range(len(turns) - 1))
    documents, spans, done = [], [], 0
    for before, answer, is_empty in turns:
        answer, end = split_end_of_turn(answer, specials)
        spans += [Span(before[done:], False), Span(answer, not is_empty), Span(end, not is_empty, is_end=True)]
        # If the template ends turns with plain text only, EOS can only go at the end of the document.
        if not is_stable:
            documents.append(Document(tuple(spans), from_template=True, add_eos=not end and not is_empty))
            spans, done = [], 0
        else:
            done = len(before) + len(answer) + len(end)
    if is_stable:
        documents.append(Document(tuple(spans), from_template=True, add_eos=not end and not is_empty))
    return documents
