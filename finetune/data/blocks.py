"""Messages of Anthropic's and Gemini's interfaces, whose content is blocks, as turns of one kind of content each."""

import json
from collections.abc import Callable, Container
from typing import Any, Protocol

from finetune.data.meanings import texts_in
from finetune.errors import PlanError
from finetune.system.json_files import json_kind

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_call": "assistant",
}


def is_assistant(message: dict) -> bool:
    """True for a message that is the assistant's, under any of its names."""
    return ROLES.get(str(message.get("role", message.get("from"))).casefold()) == "assistant"


class RowOfParts(Protocol):
    """The interface of a row that blocks need, see columns.Row."""

    def note(self, text: str, /) -> None: ...

    def leave(self, part: dict, read: Container[str], what: str, where: str, said: str = "", /) -> None: ...


def plain_turns(message: Any, where: str, row: RowOfParts) -> list:
    """The turns that a message is, in the order of its blocks: a result of a tool is one of its own. Counts what its
    blocks say and nothing reads. Raises PlanError for an order that no template writes, and what is said twice.
    """
    if not isinstance(message, dict):
        return [message]
    key = "content"
    if message.get("parts") is not None and message.get("content") is None:
        key = "parts"
        message = {name: value for name, value in message.items() if name != key} | {"content": message[key]}
        if isinstance(message["content"], list):
            parts = enumerate(message["content"])
            message["content"] = [_block(part, f"{where}.parts[{k}]'", row) for k, part in parts]
    blocks = message.get("content")
    if not isinstance(blocks, list) or not any(_kind(block) in READ for block in blocks):
        return [message]
    message = {name: value for name, value in message.items() if value not in (None, "", [])}
    turns: list[dict] = []
    last = ""  # the kind of the block before, in the same turn
    for k, block in enumerate(blocks):
        kind = _kind(block)
        at = f"{where}.{key}[{k}]"
        if kind in READ:
            read = (*READ[kind], *OF_INTERFACES)
            said = "\n".join(texts_in([block.get(name) for name in READ[kind]]))
            row.leave(block, read, f"a block of type {kind}", f"{at}'", said)
        for name in TWICE.get(kind, ()):
            if message.get(name):
                raise PlanError(f"{at}' is {kind}, and the message has {name} too. Keep one of them.")
        if kind == "tool_result":
            turns.append(_result(block))
            last = ""
            continue
        if not last:
            turns.append({**message, "content": []})
        elif ORDER.get(kind, 1) < ORDER.get(last, 1):
            raise PlanError(
                f"{at}' is {kind} after {last}: chat templates write the thoughts of a turn, then its text, then its "
                "calls. Write what follows as a turn of its own, or remove the row."
            )
        last = kind
        if kind == "thinking":
            thought = _thought(block.get("thinking"), f"{at}.thinking'")
            turns[-1]["reasoning_content"] = joined_thoughts(turns[-1].get("reasoning_content", ""), thought, row.note)
        elif kind == "tool_use":
            turns[-1].setdefault("tool_calls", []).append(_call(block))
        else:
            turns[-1]["content"].append(block)
    if all(turn.get("role") == "tool" for turn in turns):
        turns[0] = {name: value for name, value in message.items() if name not in ("role", "from")} | turns[0]
    return [turn | {"content": turn["content"] or ""} for turn in turns]


READ = {  # the fields that are read of blocks that are not content
    "thinking": ("thinking",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id", "name", "content", "is_error"),
}
ORDER = {"thinking": 0, "tool_use": 2}  # of the blocks of a turn; content is between them
TWICE = {"thinking": ("reasoning_content", "thinking", "reasoning"), "tool_use": ("tool_calls", "function_call")}
# What an interface says of a part to itself.
OF_INTERFACES = ("type", "cache_control", "signature", "thoughtSignature", "thought_signature", "index", "closed")


def _kind(block: Any) -> str:
    if isinstance(block, dict):
        return str(block.get("type", "text"))
    return "text"


def _thought(value: Any, where: str) -> str:
    """The text of a thought: Mistral's is a list of parts. Raises PlanError."""
    texts = [value or ""]
    if isinstance(value, list):
        texts = [part.get("text") if isinstance(part, dict) and _kind(part) == "text" else part for part in value]
    if not all(isinstance(text, str) for text in texts):
        raise PlanError(f"{where} is {json_kind(value)}, must be a string or a list of parts with text.")
    return "".join(texts)


def joined_thoughts(before: str, after: str, note: Callable[[str], object]) -> str:
    """Thoughts of one answer as one text."""
    if not before or not after or before[-1].isspace() or after[0].isspace():
        return before + after
    note("thoughts that follow each other are joined by a blank line")
    return f"{before}\n\n{after}"


def _call(block: dict) -> dict:
    arguments = block.get("input")
    return {
        **({"id": block["id"]} if block.get("id") else {}),
        "type": "function",
        "function": {"name": block.get("name"), "arguments": {} if arguments is None else arguments},
    }


def _result(block: dict) -> dict:
    content = block.get("content")
    call_id = {}
    if block.get("tool_use_id"):
        call_id = {"tool_call_id": block["tool_use_id"]}
    name = {}
    if block.get("name"):
        name = {"name": block["name"]}
    failed = {}
    if block.get("is_error"):
        failed = {"is_error": True}  # which a template reads or a line names
    return {"role": "tool", **call_id, **name, **failed, "content": "" if content is None else content}


def _block(part: Any, where: str, row: RowOfParts):
    """A part of Gemini's as a block. Counts what it says beside that."""
    if not isinstance(part, dict):
        return part
    names = [name for name in GEMINI if isinstance(part.get(name), dict)]
    if not names:
        if part.get("thought") is True and isinstance(part.get("text"), str):
            return {name: value for name, value in part.items() if name not in ("thought", "text")} | {
                "type": "thinking",
                "thinking": part["text"],
            }
        return {name: value for name, value in part.items() if name != "thought" or value}
    inner = part[names[0]]
    row.leave(part, (names[0], *OF_INTERFACES), "a part of Gemini's", where, "\n".join(texts_in(inner)))
    row.leave(inner, ("id", "name", "args", "response", *OF_INTERFACES), f"a part's {names[0]}", where)
    if GEMINI[names[0]] == "tool_use":
        return {"type": "tool_use", "id": inner.get("id"), "name": inner.get("name"), "input": inner.get("args")}
    response = json.dumps(inner.get("response"), ensure_ascii=False)
    return {"type": "tool_result", "tool_use_id": inner.get("id"), "name": inner.get("name"), "content": response}


GEMINI = {  # parts that are not text
    "functionCall": "tool_use",
    "function_call": "tool_use",
    "functionResponse": "tool_result",
    "function_response": "tool_result",
}


def plain_schemas(tool: dict, where: str) -> list[dict]:
    """An entry of a row's tools as templates read it, with all that it says: of Gemini's one for each function that it
    declares. Raises PlanError for one of several kinds, or with two schemas.
    """
    if "function" in tool:
        return [tool]
    given = {name: value for name, value in tool.items() if value is not None}
    spec = given.get("toolSpec")
    for name in ("functionDeclarations", "function_declarations"):
        declared = given.get(name)
        if isinstance(declared, list) and all(isinstance(entry, dict) for entry in declared):
            _check_alone(given, name, where)
            return [_schema(entry, where) for entry in declared]
    if isinstance(spec, dict) and isinstance(spec.get("inputSchema"), dict):
        _check_alone(given, "toolSpec", where)
        return [_schema(spec | {"inputSchema": spec["inputSchema"].get("json")}, where)]
    if "name" in given and (SCHEMAS & given.keys() or given.get("type") == "function"):
        return [_schema(given, where)]
    return [tool]


SCHEMAS = {"parameters", "parametersJsonSchema", "parameters_json_schema", "input_schema", "inputSchema"}
OF_GEMINI = {"parameters", "response"}  # whose types are in capitals
RESPONSES = {"response", "responseJsonSchema", "response_json_schema"}


def _check_alone(tool: dict, name: str, where: str) -> None:
    others = [other for other, value in tool.items() if other != name and value not in ([], {})]
    if others:
        raise PlanError(f"{where} has {name} and {others[0]}. Write each tool as an entry of its own.")


def _schema(tool: dict, where: str) -> dict:
    """The function of a tool whose schemas have any names. Raises PlanError for two of its input or its response."""
    tool = {name: value for name, value in tool.items() if value is not None and name not in OF_INTERFACES}
    plain: dict[str, str] = {}
    for renamed, names in (("parameters", SCHEMAS), ("response", RESPONSES)):
        named = [name for name in tool if name in names]
        if len(named) > 1:
            raise PlanError(f"{where} has {named[0]} and {named[1]}. Keep one of them.")
        plain |= dict.fromkeys(named, renamed)
    function = {}
    for name, value in tool.items():
        function[plain.get(name, name)] = _lowered(value) if name in OF_GEMINI else value
    return {"type": "function", "function": function}


# Of a JSON schema: keys that hold a schema or a list of them, and keys that hold an object of named ones.
INNER = {"items", "prefixItems", "additionalItems", "additionalProperties", "propertyNames", "contains"}
INNER |= {"anyOf", "oneOf", "allOf", "not", "if", "then", "else", "unevaluatedItems", "unevaluatedProperties"}
NAMED = {"properties", "patternProperties", "dependentSchemas", "definitions", "$defs", "defs"}


def _lowered(schema: Any) -> Any:
    """A JSON schema whose types are Gemini's, in capitals, with JSON's own. Values that it names stay as they are."""
    if isinstance(schema, list):
        return [_lowered(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, part in schema.items():
        if key == "type" and isinstance(part, str):
            found[key] = part.lower()
        elif key == "type" and isinstance(part, list):  # one of several
            found[key] = [each.lower() if isinstance(each, str) else each for each in part]
        elif key in INNER:
            found[key] = _lowered(part)
        elif key in NAMED and isinstance(part, dict):
            found[key] = {name: _lowered(inner) for name, inner in part.items()}
        else:
            found[key] = part
    return found
