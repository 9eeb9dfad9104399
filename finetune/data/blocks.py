"""Messages of Anthropic's and Gemini's interfaces, whose content is blocks, as turns of one kind of content each."""

import json
from typing import Any

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


def plain_turns(message: Any) -> list:
    """The turns that a message is: results of tools come before what else its turn says."""
    if not isinstance(message, dict):
        return [message]
    if "parts" in message and "content" not in message:
        message = {k: v for k, v in message.items() if k != "parts"} | {"content": _blocks_of(message["parts"])}
    blocks = message.get("content")
    if not isinstance(blocks, list) or not any(_kind(block) in MOVED for block in blocks):
        return [message]
    kinds: dict[str, list] = {kind: [block for block in blocks if _kind(block) == kind] for kind in MOVED}
    rest = [block for block in blocks if _kind(block) not in MOVED]
    found = dict(message) | {"content": rest or ""}
    if kinds["thinking"]:
        found["reasoning_content"] = "".join(str(block.get("thinking") or "") for block in kinds["thinking"])
    if kinds["tool_use"]:
        found["tool_calls"] = [_call(block) for block in kinds["tool_use"]]
    results = [_result(block) for block in kinds["tool_result"]]
    return results + ([found] if rest or len(results) < 1 else [])


MOVED = ("thinking", "tool_use", "tool_result")


def _kind(block: Any) -> str:
    if isinstance(block, dict):
        return str(block.get("type", "text"))
    return "text"


def _call(block: dict) -> dict:
    call_id = {}
    if block.get("id"):
        call_id = {"id": block["id"]}
    return {
        **call_id,
        "type": "function",
        "function": {"name": block.get("name"), "arguments": block.get("input") or {}},
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


def _blocks_of(parts: Any) -> list | object:
    """Gemini's parts as blocks."""
    if isinstance(parts, list):
        return [_block(part) for part in parts]
    return parts


def _block(part: Any):
    if not isinstance(part, dict):
        return part
    call = part.get("functionCall") or part.get("function_call")
    result = part.get("functionResponse") or part.get("function_response")
    if isinstance(call, dict):
        return {"type": "tool_use", "name": call.get("name"), "input": call.get("args") or {}}
    if isinstance(result, dict):
        return {"type": "tool_result", "name": result.get("name"), "content": json.dumps(result.get("response"))}
    if part.get("thought") is True:
        return {"type": "thinking", "thinking": part.get("text")}
    return part


def plain_schemas(tool: dict) -> list[dict]:
    """An entry of a row's tools as templates read it: of Gemini's one for each function that it declares."""
    if "function" in tool:
        return [tool]
    declared = tool.get("functionDeclarations") or tool.get("function_declarations")
    if isinstance(declared, list) and all(isinstance(entry, dict) for entry in declared):
        return [_schema(entry, _lowered(entry.get("parameters"))) for entry in declared]
    if "input_schema" in tool:
        return [_schema(tool, tool["input_schema"])]
    spec = tool.get("toolSpec")
    if isinstance(spec, dict) and isinstance(spec.get("inputSchema"), dict):
        return [_schema(spec, spec["inputSchema"].get("json"))]
    return [tool]


def _schema(tool: dict, parameters: Any) -> dict:
    function = {key: tool[key] for key in ("name", "description") if key in tool}
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def _lowered(schema: Any) -> Any:
    """A JSON schema whose types are Gemini's, in capitals, with JSON's own."""
    if isinstance(schema, list):
        return [_lowered(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _lowered(part) for key, part in schema.items()}
    if isinstance(found.get("type"), str):
        found["type"] = found["type"].lower()
    return found
