"""The marks of a chat template around an answer, found by rendering chats: prefix, end, and the next role's marker.

A template is a program, and its source says little of what it renders. Two chats tell: one that ends with the answer,
and the same one with a question after it. What both have after the answer is the end of a turn.
"""

import os
import re
from dataclasses import dataclass
from typing import Protocol

from finetune.errors import PlanError
from finetune.model_files.tokenizer import Tokenizer

MARK = "c0ntent"  # the text of an answer, or of a tool call's argument
ASKED = "qu3stion"
ASKED_AGAIN = "sec0nd"
RESULT = "r3sult"
THOUGHT = "th0ught"
CALL = {"id": "call00001", "type": "function", "function": {"name": "lookup", "arguments": {"word": MARK}}}
PARAMETERS = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
TOOLS = [{"type": "function", "function": {"name": "lookup", "description": "Looks up.", "parameters": PARAMETERS}}]


@dataclass(frozen=True)
class AnswerMarks:
    """`prefix`: between the generation prompt and a plain answer. `end`: special tokens that end a plain answer.

    `trailing`: what only the last answer has after its end. `next_user`, `next_tool`: the marker of the role that
    follows an answer or a tool call, where the template itself ends neither. `call_end`: as `end`, of a tool call.
    """

    specials: tuple[str, ...] = ()
    prefix: str = ""
    end: str = ""
    trailing: str = ""
    next_user: str = ""
    call_end: str = ""
    next_tool: str = ""

    def split(self, answer: str, is_call: bool) -> tuple[str, str, bool]:
        """(answer, its end if it has one, whether the end is in the text already) of what a template renders."""
        text, end = split_end_of_turn(answer.removesuffix(self.trailing), self.specials)
        if end:
            return text, end, True
        return text, self.next_tool if is_call else self.next_user, False

    def stops(self) -> set[str]:
        """Texts of the tokens by which an answer or a tool call ends."""
        ends = (self.end, self.next_user, self.call_end, self.next_tool)
        return {split_end_of_turn(end, self.specials)[1] for end in ends} - {""}


def chat(*turns: dict) -> list[dict]:
    """A conversation that begins with a question."""
    return [{"role": "user", "content": ASKED}, *turns]


def answer(content: str = MARK, **more: object) -> dict:
    return {"role": "assistant", "content": content, **more}


class Renderer(Protocol):
    """The interface of a TemplateRenderer that marks are found by."""

    def render_each(self, chats: list[tuple], /) -> list[list[str] | PlanError]: ...


def answer_marks(renderer: Renderer, specials: tuple[str, ...]) -> AnswerMarks:
    """The marks of a renderer's template; empty ones if it fails, or rejects a question and its answer."""
    again = {"role": "user", "content": ASKED_AGAIN}
    result = {"role": "tool", "content": RESULT, "tool_call_id": CALL["id"], "name": "lookup"}
    calls = chat(answer("", tool_calls=[CALL]), result)
    try:
        asked, called = renderer.render_each(
            [
                (chat(answer(), again), None, [(1, True), (1, False), (2, False), (3, False)]),
                (calls, TOOLS, [(2, False), (3, False)]),
            ]
        )
    except PlanError:  # named where a row is rendered
        return AnswerMarks(specials)
    if isinstance(asked, PlanError) or not all(MARK in text for text in asked[2:]):
        return AnswerMarks(specials)
    prompt, unprompted, answered, continued = asked
    prefix = ""
    if answered.startswith(prompt):
        prefix = answered[len(prompt) :].partition(MARK)[0]
    last = answered.partition(MARK)[2]
    middle = continued.partition(MARK)[2].partition(ASKED_AGAIN)[0]
    end = _common_end(last, middle, specials) or split_end_of_turn(last, specials)[1]
    if prompt == unprompted:
        end = _without_prompt(end, last, prompt.rpartition(ASKED)[2], specials)
    end_at = 0
    if end:
        end_at = last.find(end) + len(end)
    trailing = ""
    if end and last[end_at:].strip():
        trailing = last[end_at:]
    if end:
        next_user = ""
    else:
        next_user = _first_special(middle, specials)
    call_end = ""
    next_tool = ""
    if not isinstance(called, PlanError) and all(MARK in text for text in called):
        call_end = split_end_of_turn(called[0].rpartition(MARK)[2], specials)[1]
        between = called[1].removeprefix(called[0].rstrip())
        if call_end:
            next_tool = ""
        else:
            next_tool = _first_special(between, specials)
    return AnswerMarks(specials, prefix, end, trailing, next_user, call_end, next_tool)


def split_end_of_turn(answer: str, specials: tuple[str, ...]) -> tuple[str, str]:
    """(answer, its end-of-turn token if any), without the whitespace that a template appends."""
    stripped = answer.rstrip()
    end = max((text for text in specials if stripped.endswith(text)), key=len, default="")
    if end:
        return (stripped.removesuffix(end), end)
    return (answer, "")


def special_texts(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Texts of the tokens that can end a turn."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return tuple(text for text in {*added, *tokenizer.all_special_tokens} if text)


def special_pattern(specials: tuple[str, ...]) -> re.Pattern | None:
    """Matches the texts of control tokens, the longest first."""
    texts = sorted(specials, key=len, reverse=True)
    if texts:
        return re.compile("|".join(map(re.escape, texts)))
    return None


def _common_end(last: str, middle: str, specials: tuple[str, ...]) -> str:
    """The longest text that both begin with and that ends with a special token."""
    pattern = special_pattern(specials)
    shared = os.path.commonprefix([last, middle])
    ends = []
    if pattern:
        ends = [match.end() for match in pattern.finditer(shared)]
    if ends:
        return shared[: ends[-1]]
    return ""


def _without_prompt(end: str, last: str, after_question: str, specials: tuple[str, ...]) -> str:
    """`end` without the generation prompt that a template writes after every chat, whether it is asked to or not.

    The end of the question's turn and the prompt follow the question too: what both share, but for its first token.
    """
    shared = os.path.commonprefix([last[::-1], after_question[::-1]])[::-1]
    pattern = special_pattern(specials)
    first = None
    if pattern:
        first = pattern.match(shared)
    without = last[: len(last) - len(shared)] + (first[0] if first else "")
    return without if first and len(without) < len(end) else end


def _first_special(text: str, specials: tuple[str, ...]) -> str:
    """The special token that a text begins with, after whitespace."""
    pattern = special_pattern(specials)
    match = None
    if pattern:
        match = pattern.match(text, len(text) - len(text.lstrip()))
    if match:
        return text[: match.end()]
    return ""
