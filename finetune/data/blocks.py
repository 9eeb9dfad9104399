"""Messages of Anthropic's and Gemini's interfaces, whose content is blocks, as turns of one kind of content each."""

import json
from typing import Any


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
    return {"role": "tool", **call_id, **name, "content": "" if content is None else content}


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


def plain_schema(tool: dict) -> dict:
    """A tool's schema as templates read it."""
    if "input_schema" not in tool or "function" in tool:
        return tool
    function = {key: tool[key] for key in ("name", "description") if key in tool}
    return {"type": "function", "function": function | {"parameters": tool["input_schema"]}}
