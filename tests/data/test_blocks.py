"""Messages of Anthropic's and Gemini's interfaces are those of OpenAI's."""

import pytest

from finetune.data.columns import RowOptions, RowReader
from finetune.data.conversation import turns_of
from finetune.data.messages import tool_schemas
from finetune.errors import PlanError

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
ANTHROPIC = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "I ask.", "signature": "x"},
            {"type": "text", "text": "One moment."},
            {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Rome"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "21 C"}]},
            {"type": "text", "text": "Well?"},
        ],
    },
    {"role": "assistant", "content": [{"type": "text", "text": "It is 21 C."}]},
]
OPENAI = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "One moment.",
        "tool_calls": [CALL | {"id": "call_1"}],
        "reasoning_content": "I ask.",
    },
    {"role": "tool", "content": "21 C", "tool_call_id": "call_1"},
    {"role": "user", "content": "Well?"},
    {"role": "assistant", "content": "It is 21 C."},
]
GEMINI = {
    "systemInstruction": {"parts": [{"text": "Be brief."}]},
    "contents": [
        {"role": "user", "parts": [{"text": "Weather?"}]},
        {"role": "model", "parts": [{"functionCall": {"name": "weather", "args": {"city": "Rome"}}}]},
        {"role": "user", "parts": [{"functionResponse": {"name": "weather", "response": {"t": 21}}}]},
        {"role": "model", "parts": [{"text": "It is "}, {"text": "21 C."}]},
    ],
}


def messages_of(row: dict) -> list[dict]:
    return turns_of(RowReader(RowOptions()).read(row, "row"))[0]


def test_blocks_of_anthropic_s_are_turns():
    assert messages_of({"messages": ANTHROPIC}) == OPENAI
    (schema,) = tool_schemas([{"name": "weather", "input_schema": {"type": "object"}}], "tools", "row")
    assert schema == {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def test_tools_of_gemini_s_and_bedrock_s_are_functions():
    cities = {"type": "OBJECT", "properties": {"type": {"type": "STRING", "enum": ["A"]}}}
    gemini = {"functionDeclarations": [{"name": "weather", "parameters": cities}, {"name": "time"}]}
    bedrock = {"toolSpec": {"name": "add", "description": "d", "inputSchema": {"json": {"type": "object"}}}}
    lowered = {"type": "object", "properties": {"type": {"type": "string", "enum": ["A"]}}}
    assert [schema["function"] for schema in tool_schemas([gemini, bedrock], "tools", "row")] == [
        {"name": "weather", "parameters": lowered},
        {"name": "time"},
        {"name": "add", "description": "d", "parameters": {"type": "object"}},
    ]


def test_contents_of_gemini_s_are_messages():
    assert messages_of(GEMINI) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"t": 21}', "name": "weather"},
        {"role": "assistant", "content": "It is 21 C."},
    ]


@pytest.mark.parametrize("part", [{"inlineData": {"data": "x"}}, {"type": "redacted_thinking", "data": "x"}])
def test_a_block_that_is_no_text_is_named(part):
    with pytest.raises(PlanError, match=r"content\[0\]'|\[0\]\.content"):
        messages_of({"messages": [{"role": "user", "content": [part]}]})
