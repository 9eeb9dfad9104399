"""Chat messages of every common spelling to the one that chat templates read, and which of them are learned.

OpenAI's, ShareGPT's and LLaMA-Factory's: roles, tool calls with arguments as text, tool results, parts of content,
reasoning, and per-turn weights. What a tokenizer's template does not render is refused, never left to vanish.
"""

import hashlib
import itertools
import json
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from finetune.data.answer_marks import special_pattern, special_texts
from finetune.data.blocks import OF_INTERFACES, ROLES, joined_thoughts, plain_schemas, plain_turns
from finetune.data.columns import LEARNED, Row
from finetune.data.meanings import (
    IN_CONVERSATION,
    is_left_out,
    is_nothing,
    meaning_in,
    meaning_of,
    plain_name,
    text_beside,
    texts_in,
)
from finetune.data.turn_order import check_branch, check_order
from finetune.errors import PlanError
from finetune.model_files.tokenizer import Tokenizer
from finetune.system.json_files import json_in_cell, json_kind, strict_json

REASONING = ("reasoning_content", "thinking", "reasoning")
CITED = ("citations", "annotations", "references", "sources")  # what a part of text names beside it
ANY_TEMPLATE = ("role", "content")
MASKS = ("mask", "masked", "ignore", "ignored", "skip")  # that may say which turns are not learned
TURN_PARTS = ("parts", "content_blocks", "tool_invocations")  # beside a turn's content
TEXT_TYPES = ("text", "input_text", "output_text")  # of parts, as interfaces name those with a text
RECIPIENTS = ("all", "user", "assistant")  # of a turn that is no call
# Of a tool's message: that it failed is what the answer is about.
OF_RESULTS = ("is_error", "error", "status", "success", "state", "exit_code")
PARTS = re.compile(r"\s*\[\s*\{")  # in JSON
SHOWN = 60
CODE = re.compile(r"{[{%](.*?)[%}]}", re.S)  # of a template
QUOTED = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"")
SWITCH = re.compile(r"(?<![\w.])[A-Za-z_]\w*")
THOUGHT = re.compile(r"\s*<think>(.*?)</think>", re.S)


@dataclass(frozen=True)
class TemplateWords:
    """The words in a chat template's source, by which it is known what it can render."""

    words: frozenset
    switches: frozenset = frozenset()  # names in its code that are neither texts nor fields
    specials: re.Pattern | None = None  # the texts of the tokenizer's control tokens
    short_ids: bool = False  # it rejects ids of tool calls that have not nine characters

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "TemplateWords":
        given = tokenizer.chat_template
        texts = [given or ""]
        if isinstance(given, dict):
            texts = list(given.values())
        text = "\n".join(t for t in texts if isinstance(t, str))
        return cls(
            switches=frozenset(name for code in CODE.findall(text) for name in SWITCH.findall(QUOTED.sub("''", code))),
            words=frozenset(re.findall(r"\w+", text)),
            specials=special_pattern(special_texts(tokenizer)),
            short_ids=bool(re.search(r"length\s*!=\s*9\b", text)),
        )

    def check(self, word: str, where: str, what: str, name: str) -> None:
        """Raises PlanError unless the template has `word`. `name`: what --ignore_columns would leave out."""
        if word not in self.words:
            raise not_rendered(where, what, name)


def not_rendered(where: str, what: str, name: str) -> PlanError:
    """The error for what the chat template leaves out. `name`: what --ignore_columns would."""
    return PlanError(
        f"{where}: the tokenizer's chat template does not render {what}. Use a model whose template does, or "
        f"add --ignore_columns {name} to train without."
    )


def chat_messages(value: Any, name: str, row: Row) -> tuple[list[dict], list[bool]]:
    """(messages as role, content and what else a template reads, whether each is learned if it is an answer).
    `name`: the column, for messages. Raises PlanError naming an invalid message.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):  # as a table's cell holds a list
        value = json_in_cell(value, f"{row.source}: field {name!r}")
    if not isinstance(value, list) or not value:
        if value is None:
            fact = "null"
        elif value == []:
            fact = "empty"
        else:
            fact = json_kind(value)
        raise PlanError(f"{row.source}: field {name!r} is {fact}, must be a list of messages.")
    wheres = [f"{row.source}: field '{name}[{i}]" for i in range(len(value))]
    check_branch(value, wheres, row)
    check_order(value, wheres, row)
    found = [
        _message(turn, where, row)
        for message, where in zip(value, wheres, strict=True)
        for turn in plain_turns(message, where, row)
    ]
    found = with_thoughts(found, row)
    return [message for message, _ in found], [learned for _, learned in found]


def with_thoughts(found: list[tuple[dict, bool]], row: Row) -> list[tuple[dict, bool]]:
    """The messages with those of Harmony's analysis channel as the reasoning of the answer that follows."""
    kept: list[tuple[dict, bool]] = []
    thought = ""
    learns = True  # the thought
    for message, learned in found:
        channel = message.get("channel") if message["role"] == "assistant" else None
        if channel == "analysis" and "tool_calls" not in message:
            for name in message.keys() - {*ANY_TEMPLATE, "channel"}:
                _check_unread(name, message, f"{row.source}: a message of the channel analysis")
                row.note(f"field {name!r} of a message of the channel analysis is not read")
            if REASONING[0] in row.options.ignored:
                row.note("reasoning in messages of its own is left out")
            else:
                learns = learned if not thought else learns and learned
                thought = joined_thoughts(thought, message["content"], row.note)
            continue
        if channel == "final":
            del message["channel"]
        if thought and message["role"] == "assistant":
            if any(message.get(name, thought) != thought for name in REASONING):
                raise PlanError(f"{row.source}: an answer has {REASONING[0]} and a message of analysis. Keep one.")
            if learned and not (learns or row.options.mask_reasoning):
                raise PlanError(
                    f"{row.source}: an answer is learned and its message of analysis is not. Use --mask_reasoning, or "
                    "give both the same weight."
                )
            message = {**message, REASONING[0]: thought}
        elif thought:
            kept.append(({"role": "assistant", "content": "", REASONING[0]: thought}, learns))
        thought = ""
        kept.append((message, learned))
    return kept + ([({"role": "assistant", "content": "", REASONING[0]: thought}, learns)] if thought else [])


def note_turns(messages: list[dict], row: Row) -> None:
    """Counts turns that are not as they usually are."""
    for before, message in itertools.pairwise(messages):
        if before["role"] == message["role"] == "assistant" and not before.get("tool_calls"):
            row.note("two turns of the assistant follow each other")
    note_unanswered(messages, row)


def note_unanswered(messages: list[dict], row: Row) -> None:
    """Counts a conversation whose last turns are read by nothing."""
    if messages[-1]["role"] != "assistant" and any(message["role"] == "assistant" for message in messages):
        row.note("a conversation ends without an answer to its last turn")


def _message(message: Any, where: str, row: Row) -> tuple[dict, bool]:
    if not isinstance(message, dict):
        raise PlanError(f"{where}' is {json_kind(message)}, must be an object with role and content.")
    # Arrow gives every message in a column the union of all fields, with nulls for missing ones.
    message = {k: v for k, v in message.items() if v is not None and k.strip().casefold() not in row.options.ignored}
    role_key = "from" if "from" in message else "role"
    content_key = "value" if "value" in message and "content" not in message else "content"
    role = message.pop(role_key, None)
    content = message.pop(content_key, None)
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise PlanError(f"{where}.{role_key}' is {role!r}, must be one of {', '.join(ROLES)}.")
    other_role = str(message.pop("role", role)).lower()
    if ROLES.get(other_role) != ROLES[role.lower()]:
        raise PlanError(f"{where}' has two roles, {role[:40]!r} and {other_role[:40]!r}. Keep one.")
    if message.get("train_detail"):  # Axolotl's
        raise PlanError(
            f"{where}.train_detail' says which parts of a turn are learned, and a turn is learned as a whole or not. "
            "Add --ignore_columns train_detail, or write the parts as turns with train."
        )
    learned = _is_learned(message, where, ROLES[role.lower()], row)
    calls = message.pop("tool_calls", None) or []
    if not isinstance(calls, list):
        raise PlanError(f"{where}.tool_calls' is {type(calls).__name__}, must be a list of calls.")
    if "function_call" in message:
        if calls:
            raise PlanError(
                f"{where}' has tool_calls and function_call. Keep one, or add --ignore_columns function_call."
            )
        calls = [message.pop("function_call")]
    if role.lower() == "function_call" and "function_call" not in row.options.ignored:
        if calls:
            raise PlanError(f"{where}' has calls in its {content_key} and in another field. Keep one of them.")
        calls = _parsed_calls(content, f"{where}.{content_key}'")
        content = ""
    if calls and ROLES[role.lower()] != "assistant":
        raise PlanError(
            f"{where}' is a turn of {ROLES[role.lower()]} with tool calls: chat templates render the assistant's. "
            "Make it a turn of the assistant, or remove them."
        )
    calls = [_call(call, f"{where}.tool_calls[{k}]'", row) for k, call in enumerate(calls)]
    if any(value is None for call in calls for value in call["function"]["arguments"].values()):
        row.note("a tool call has an argument that is null, which is learned")
    if content is None and (calls or "tool_calls" in row.options.ignored or any(name in message for name in REASONING)):
        content = ""
    if isinstance(content, str) and ROLES[role.lower()] != "tool" and are_parts(content):
        row.note("a message is JSON of parts, written as a text, and stays so", example=content[:SHOWN])
    content = _content(content, f"{where}.{content_key}'", row)
    _check_reasoning(message, ROLES[role.lower()], content, where, row)
    return {
        "role": ROLES[role.lower()],
        "content": content,
        **({"tool_calls": calls} if calls else {}),
        **message,
    }, learned


def _check_reasoning(message: dict, role: str, content: str, where: str, row: Row) -> None:
    """Takes a message's reasoning off where it is none of an answer. Raises PlanError for what templates would leave
    out, or show twice.
    """
    given = {name: message[name] for name in REASONING if message.get(name)}
    for name, value in given.items():
        if not isinstance(value, str):
            raise PlanError(f"{where}.{name}' is {json_kind(value)}, must be a string.")
        if role != "assistant":
            row.note(f"message field {name!r} of a turn of {role} is not read")
            del message[name]
    if role != "assistant" or not given:
        return
    first, *others = given
    for other in others:
        if given[other] != given[first]:
            raise PlanError(
                f"{where}' has {first} and {other}, which differ. Keep one, or add --ignore_columns {other}."
            )
    inline = THOUGHT.match(content)
    if inline and inline[1].strip():
        raise PlanError(
            f"{where}' has thoughts in its content and in {first}. Keep one of them, or add --ignore_columns {first}."
        )


def are_parts(text: str) -> bool:
    """True for JSON of a list of parts, as databases keep a message's content."""
    if not PARTS.match(text):
        return False
    try:
        parts = strict_json(text)
    except ValueError:
        return False
    return isinstance(parts, list) and all(
        isinstance(part, dict) and isinstance(part.get("type"), str) for part in parts
    )


def _is_learned(message: dict, where: str, role: str, row: Row) -> bool:
    """Takes what says so off the message, see LEARNED. Raises PlanError for what is neither 0 nor 1."""
    learned = True
    for name in [name for name in LEARNED if name in message]:
        value = message.pop(name)
        if value not in (0, 1):  # True and False are
            raise PlanError(f"{where}.{name}' is {value!r}, must be 0 or 1: a turn is learned or not. Change it.")
        if value and role != "assistant":
            only = "only the assistant's are learned"
            if name != "weight":
                raise PlanError(f"{where}.{name}' is {json.dumps(value)} on a turn of {role}: {only}. Remove it.")
            row.note(f"weight of a turn of {role} is not read: {only}")
        learned = learned and bool(value)
    return learned


def _content(content: Any, where: str, row: Row) -> str:
    if isinstance(content, list):
        texts = [_part(part, f"{where[:-1]}[{k}]'", row) for k, part in enumerate(content)]
        if len(content) > 1 and all(isinstance(part, str) for part in content):
            row.note("the texts of a list are joined as they are, without a space")
        elif any(map(_meet, content, content[1:])):
            row.note("the texts of a message's parts are joined as they are, without a space")
        return "".join(texts)
    if not isinstance(content, str):
        if content is None:
            fact = "missing"
        else:
            fact = json_kind(content)
        raise PlanError(f"{where} is {fact}, must be a string.")
    return content


def _meet(part: Any, following: Any) -> bool:
    """True if the texts of two parts have no space between them."""
    texts = [each.get("text") if isinstance(each, dict) else each for each in (part, following)]
    before, after = (text if isinstance(text, str) else "" for text in texts)
    return bool(before and after) and not (before[-1].isspace() or after[0].isspace())


def _part(part: Any, where: str, row: Row) -> str:
    kind = "text"
    if isinstance(part, dict):
        kind = part.get("type", "text")
    text = None
    if isinstance(part, str):
        text = part
    elif isinstance(part, dict):
        text = part.get("text")
    if kind not in TEXT_TYPES:
        read = "only text is learned here" if row.options.images is None else "only text and images are read"
        raise PlanError(f"{where} is of type {str(kind)[:40]!r}: {read}. Remove the row.")
    if not isinstance(text, str):
        raise PlanError(f"{where} is {json_kind(part)}, must be a string or a part with text.")
    if isinstance(part, dict):
        if left := [name for name in CITED if part.get(name)]:
            row.note(f"{left[0]} of a part of a message are left out, and its text is learned without them")
        row.leave(part, ("text", "id", *CITED, *OF_INTERFACES), "a part of a message", where, text)
    return text


ARGUMENTS = ("arguments", "parameters", "args", "input")  # of a call, as programs name them


def _call(call: Any, where: str, row: Row) -> dict:
    """A tool call as templates read it: arguments an object, whatever the row has them as."""
    function = None
    if isinstance(call, dict):
        function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise PlanError(f"{where} has no function name. Write {{'function': {{'name': ..., 'arguments': ...}}}}.")
    given = [name for name in ARGUMENTS if function.get(name) is not None]
    if len(given) > 1:
        raise PlanError(f"{where} has {given[0]} and {given[1]}. Keep one of them.")
    said = "\n".join(texts_in([function[name] for name in given]))
    if function is not call:
        row.leave(call, ("id", "function", *OF_INTERFACES), "a tool call", where, said)
    row.leave(function, ("id", "name", *ARGUMENTS, *OF_INTERFACES), "a tool call", where, said)
    arguments = function[given[0]] if given else {}
    if isinstance(arguments, str):
        try:
            if arguments.strip():
                value = strict_json(arguments)
                for numeral in rewritten_numerals(arguments):
                    row.note("a number of a tool call is learned as JSON writes it", example=numeral)
                arguments = value
            else:
                arguments = {}
        except ValueError as error:
            raise PlanError(f"{where}: its arguments are not JSON ({error}). Fix them.") from None
    if not isinstance(arguments, dict):
        raise PlanError(f"{where}: its arguments are {type(arguments).__name__}, must be an object. Fix them.")
    call_id = {}
    if isinstance(call.get("id"), str):
        call_id = {"id": call["id"]}
    return {"type": "function", **call_id, "function": {"name": function["name"], "arguments": arguments}}


def rewritten_numerals(text: str) -> list[str]:
    """The decimals of a JSON text that its value, written again, has otherwise: 1.10 or 1E3."""
    decimals: list[str] = []
    json.loads(text, parse_float=decimals.append)
    return [numeral for numeral in decimals if json.dumps(float(numeral)) != numeral]


def _parsed_calls(content: Any, where: str) -> list:
    try:
        if isinstance(content, str):
            value = strict_json(content)
        else:
            value = content
    except ValueError as error:
        raise PlanError(f"{where} is not JSON ({error}), as a function_call must be. Fix it.") from None
    if isinstance(value, list):
        return value
    return [value]


# ------ what else a conversation has


def tool_schemas(value: Any, name: str, source: str) -> list[dict] | None:
    """The row's tools, from a list or the JSON text of one; None if it has none. Raises PlanError."""
    if isinstance(value, str):
        value = json_in_cell(value, f"{source}: field {name!r}") if value.strip() else None
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise PlanError(f"{source}: field {name!r} is {json_kind(value)}, must be a list of tool schemas.")
    if not all(isinstance(tool, dict) for tool in value):
        raise PlanError(f"{source}: field {name!r} must hold objects, tool schemas.")
    if name == "functions":
        return [{"type": "function", "function": tool} for tool in value]
    wheres = [f"{source}: field '{name}[{i}]'" for i in range(len(value))]
    return [schema for tool, where in zip(value, wheres, strict=True) for schema in plain_schemas(tool, where)]


RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")


def template_variables(row: Row, template: TemplateWords) -> dict:
    """The row's chat_template_kwargs: values of the template's own switches. Counts those that it does not read.
    Raises PlanError.
    """
    value = row.get("chat_template_kwargs")
    column = row.columns.get("chat_template_kwargs")
    if isinstance(value, str):
        value = json_in_cell(value, f"{row.source}: field {column!r}") if value.strip() else None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise PlanError(f"{row.source}: field {column!r} is {json_kind(value)}, must be an object.")
    for name in value:
        if name in RESERVED:
            raise PlanError(
                f"{row.source}: field {column!r} sets {name}, which the row's own columns are for. Remove it."
            )
        if name not in template.switches:
            row.note(f"{column} {name!r} is not read by the chat template")
    return {name: given for name, given in value.items() if given is not None}


def past_turns(value: Any, name: str, source: str) -> list[dict]:
    """Messages of LLaMA-Factory's `history`: pairs of a question and its answer, which is learned too."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return []
    if isinstance(value, str):
        value = json_in_cell(value, f"{source}: field {name!r}")
    if not isinstance(value, list) or not all(map(_is_pair, value)):
        raise PlanError(f"{source}: field {name!r} must hold pairs of question and answer, both strings.")
    roles = ("user", "assistant")
    return [{"role": r, "content": text} for pair in value for r, text in zip(roles, pair, strict=True)]


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(text, str) for text in value)


def system_text(row: Row) -> str:
    """The row's system prompt, of text or of parts."""
    value = row.get("system")
    if isinstance(value, dict):
        where = f"{row.source}: field '{row.columns['system']}"
        row.leave(value, ("role", "type", "content", "parts"), "the system prompt", f"{where}'")
        (turn, *more) = plain_turns({"role": "system", **value}, where, row)
        if more or turn.keys() & {"tool_calls", "reasoning_content"}:
            raise PlanError(f"{where}' has blocks that are no text. Keep the text, or remove the row.")
        value = turn.get("content")
    if isinstance(value, list):
        return _content(value, f"{row.source}: field '{row.columns['system']}'", row)
    return row.text("system", required=False)


def with_system(messages: list[dict], system: str, name: str, source: str) -> list[dict]:
    """The messages with the row's system prompt in front. Raises PlanError if they begin with another."""
    if not system:
        return messages
    if messages and messages[0]["role"] == "system":
        if messages[0]["content"] != system:
            raise PlanError(f"{source}: field {name!r} and the first message are two system prompts. Keep one.")
        return messages
    return [{"role": "system", "content": system}, *messages]


def check_rendered(messages: list[dict], tools: list[dict] | None, template: TemplateWords, row: Row) -> None:
    """Raises PlanError for what no rendering of the template would have."""
    source = row.source
    if tools:
        template.check("tools", source, "tools", row.columns.get("tools", "tools"))
    _note_calls(messages, tools, row)
    for i, message in enumerate(messages):
        where = f"{source}: message {i}"
        if "tool_calls" in message:
            template.check("tool_calls", where, "tool calls", "tool_calls")
        if message["role"] == "tool":
            if "tool" not in template.words:
                raise PlanError(
                    f"{where}: the tokenizer's chat template does not render the role tool. Use a model whose template "
                    "does, or remove the row."
                )
        if any(name in message for name in REASONING) and not template.words & set(REASONING):
            named = next(name for name in REASONING if name in message)
            template.check(named, where, named, named)


def note_unread_fields(messages: list[dict], unread: list[tuple], row: Row) -> None:
    """Counts fields of messages that the template has not read. Raises PlanError for one that may not be left out."""
    named: defaultdict[str, set[str]] = defaultdict(set)
    for i, name in unread:
        if i is not None and name is not None:
            _check_unread(name, messages[i], f"{row.source}: message {i}")
            named[messages[i]["role"]].add(str(messages[i][name]) if name == "name" else "")
            row.note(f"message field {name!r} is not read by the chat template")
    for role, names in named.items():
        if role in ("user", "assistant") and len(names - {""}) > 1:
            row.note(f"turns of {role} have several names, and the chat template writes none: who speaks is left out")


def check_tools(tools: list[dict] | None, unread: list[tuple], row: Row) -> None:
    """Counts tools that the template has not read. Raises PlanError if it has read none."""
    lost = [(tools or [])[number] for i, number in unread if i is None]
    if lost and len(lost) == len(tools or ()):
        raise not_rendered(row.source, "tools", row.columns.get("tools", "tools"))
    for number in [i for i, name in unread if name is None]:
        shown = (tool_names((tools or [])[number : number + 1]) or [""])[0]
        row.note("the parameters of a tool are left out by the chat template", example=shown)
    for tool in lost:
        row.note("a tool of the row is left out by the chat template", example=(tool_names([tool]) or [""])[0])


def tool_names(tools: list[dict] | None) -> list[str]:
    functions = [tool.get("function", tool) for tool in tools or ()]
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    return [name for name in names if isinstance(name, str)]


def _check_unread(name: str, message: dict, where: str) -> None:
    """Raises PlanError for a message's field that no template reads and that may not be left out, as of columns."""
    value = message[name]
    plain = plain_name(name)
    if is_nothing(value) or meaning_of(plain) == IN_CONVERSATION:  # where it was, and not what it means
        return
    meaning = None
    said = "\n".join(texts_in([message.get(other) for other in (*ANY_TEMPLATE, "tool_calls", *REASONING)]))
    if plain in MASKS or (message["role"] == "assistant" and is_left_out(plain, value)):
        meaning = "may say which turns are learned, as train does"
    elif plain in TURN_PARTS:
        meaning = None if _are_content(value, message["content"]) else "holds parts of the turn"
    elif plain == "recipient" and message["role"] == "assistant" and value not in RECIPIENTS:
        meaning = "says that the turn is a call"
    elif not (plain.startswith(("reasoning_", "thinking_")) and any(message.get(other) for other in REASONING)):
        # of the same in parts, or of a result that says that it failed
        meaning = (
            None if message["role"] == "tool" and plain in OF_RESULTS else meaning_in(name, value, "turn", lambda: said)
        )
        meaning = meaning or (None if plain in CITED else text_beside(name, value, said))
    if meaning:
        raise PlanError(
            f"{where}: field {name!r} {meaning}, and the chat template does not read it. Add --ignore_columns {name} "
            "to train without it."
        )


def _are_content(parts: Any, content: str) -> bool:
    """True for a list of parts with text alone, which the content has."""
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        return False
    texts = [part for part in parts if part.get("type") != "step-start"]  # which says nothing
    return all(part.keys() <= {"type", "text", "state"} and str(part.get("text")) in content for part in texts)


def _note_calls(messages: list[dict], tools: list[dict] | None, row: Row) -> None:
    """Counts calls of tools that the row does not list, and results that belong to no call before them, or in another
    order than the calls.
    """
    listed = tool_names(tools)
    called: list[str] = []
    answered: list[str] = []
    for message in messages:
        for call in message.get("tool_calls", []):
            if listed and call["function"]["name"] not in listed:
                row.note("a call is of a tool that the row does not list", example=call["function"]["name"])
        named = message.get("tool_call_id")
        if message["role"] == "assistant":
            called = [call["id"] for call in message.get("tool_calls", []) if call.get("id")]
            answered = []
        elif message["role"] == "tool" and called and named:
            if named not in called:
                row.note("a result is of no call before it", example=str(named)[:40])
                continue
            if any(called.index(named) < called.index(other) for other in answered):
                row.note("results of calls come in another order than the calls")
            answered.append(named)


# ------ control tokens in text

ZERO_WIDTH_SPACE = "\u200b"


def escaped(text: str, specials: re.Pattern | None) -> str:
    """`text` with a zero-width space after the first character of each control token, which makes it plain text."""
    if specials:
        return specials.sub(lambda match: match[0][0] + ZERO_WIDTH_SPACE + match[0][1:], text)
    return text


def with_plain_contents(messages: list[dict], specials: re.Pattern | None, row: Row) -> list[dict]:
    """The messages with control tokens escaped in what users, system prompts and tools say, unless they are kept.

    An assistant's message is learned as it is given. Raises PlanError with --special_tokens_in_text error.
    """
    found = []
    for i, message in enumerate(messages):
        first = specials and specials.search(message["content"])
        if first:
            if row.options.special_tokens == "error":
                raise PlanError(has_control_token(f"{row.source}: message {i}", first[0]))
            if message["role"] == "assistant" or row.options.special_tokens == "keep":
                row.note(f"a message of {message['role']} has control tokens such as {first[0]}, which stay so")
            else:
                row.note(f"a message of {message['role']} has control tokens such as {first[0]}, which become text")
                message = {**message, "content": escaped(message["content"], specials)}
        found.append(message)
    return found


def has_control_token(where: str, token: str) -> str:
    return f"{where}: has the control token {token}. Remove it, or use --special_tokens_in_text escape or keep."


def with_known_roles(messages: list[dict], template: TemplateWords) -> list[dict]:
    """The messages, a developer's turned into a system prompt if the template does not know that role."""
    if "developer" in template.words:
        return messages
    return [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]


def with_nine_character_ids(messages: list[dict]) -> list[dict]:
    """The messages with ids of tool calls that have nine characters, as Mistral's templates demand, results included.
    A result without an id takes that of the next call in order.
    """
    found: list[dict] = []
    calls: list[str] = []
    for message in messages:
        message = dict(message)
        if "tool_calls" in message:
            ids = [_nine(call.get("id") or f"{len(found)}.{k}") for k, call in enumerate(message["tool_calls"])]
            message["tool_calls"] = [{**c, "id": i} for c, i in zip(message["tool_calls"], ids, strict=True)]
            calls = list(ids)
        elif message["role"] == "tool":
            named = message.get("tool_call_id")
            message["tool_call_id"] = _nine(named) if named else calls[0] if calls else _nine("0")
            calls = [i for i in calls if i != message["tool_call_id"]]
        found.append(message)
    return found


def _nine(call_id: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9]{9}", call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]
