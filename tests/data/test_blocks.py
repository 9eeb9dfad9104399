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


def test_types_are_lowered_in_schemas_alone():
    def schema(kind: str, text: str) -> dict:
        value = {"type": "ABC", "properties": {"type": "DEF"}}
        values = {"default": value, "example": value, "enum": [value], "const": value, "x-note": value}
        named = {"default": {"type": text}, "type": {"type": text, **values}, "properties": {"anyOf": [{"type": text}]}}
        several = {"type": "ARRAY" if text.isupper() else "array", "items": {"not": {"type": [text, "null"]}}}
        return {"type": kind, "properties": named, "$defs": {"several": several}, "required": ["type"], **values}

    (found,) = tool_schemas([{"name": "a", "parameters": schema("OBJECT", "STRING")}], "tools", "row")
    assert found["function"]["parameters"] == schema("object", "string")


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


def read_messages(*messages: dict) -> tuple[list[dict], dict]:
    """(the messages of a row, its notices)."""
    reader = RowReader(RowOptions())
    return turns_of(reader.read({"messages": list(messages)}, "rows.jsonl:1"))[0], reader.notices.counts


TEXT = {"type": "text", "text": "Sunny."}
USE = {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Rome"}}


def thought(value) -> dict:
    return {"type": "thinking", "thinking": value}


def test_thoughts_of_mistral_s_are_their_text_and_what_is_no_text_is_refused():
    parts = [{"type": "text", "text": "hm, "}, {"type": "text", "text": "so"}]
    (found,), _ = read_messages({"role": "assistant", "content": [thought(parts), TEXT]})
    assert found == {"role": "assistant", "content": "Sunny.", "reasoning_content": "hm, so"}
    for wrong in ({"text": "hm"}, 7, [7], [{"type": "image", "url": "x"}]):
        with pytest.raises(
            PlanError, match=r"messages\[0\]\.content\[0\]\.thinking' is .*, must be a string or a list"
        ):
            read_messages({"role": "assistant", "content": [thought(wrong), TEXT]})


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        ([thought("a"), TEXT, thought("b"), TEXT], r"\.content\[2\]' is thinking after text"),
        ([USE, TEXT], r"\.content\[1\]' is text after tool_use"),
        ([USE, thought("a")], r"\.content\[1\]' is thinking after tool_use"),
    ],
)
def test_blocks_in_an_order_that_no_template_writes_are_refused(blocks, said):
    with pytest.raises(PlanError, match=said):
        read_messages({"role": "assistant", "content": blocks})


def test_results_of_tools_stay_where_they_are_among_the_blocks():
    result = {"type": "tool_result", "tool_use_id": "1", "content": "21 C"}
    found, _ = read_messages({"role": "assistant", "content": [thought("I ask."), USE, result, TEXT], "weight": 1})
    assert [(message["role"], message["content"]) for message in found] == [
        ("assistant", ""),
        ("tool", "21 C"),
        ("assistant", "Sunny."),
    ]
    assert found[0]["reasoning_content"] == "I ask." and "reasoning_content" not in found[2]
    found, _ = read_messages({"role": "user", "content": [TEXT, result]})
    assert [message["role"] for message in found] == ["user", "tool"]
    (found,), _ = read_messages({"role": "user", "content": [result], "rating": 1})
    assert found["rating"] == 1


def test_a_weight_of_another_turn_than_the_assistants_is_a_line():
    _, noted = read_messages({"role": "user", "content": "Hi", "weight": 1})
    assert noted == {"weight of a turn of user is not read: only the assistant's are learned": 1}


def test_texts_of_a_list_are_joined_with_a_line():
    found, noted = read_messages({"role": "user", "content": ["One.", "Two."]})
    assert found[0]["content"] == "One.Two."
    assert noted == {"the texts of a list are joined as they are, without a space": 1}


def test_thoughts_are_not_glued_and_what_a_block_says_beside_is_a_line():
    (found,), noted = read_messages({"role": "assistant", "content": [thought("One."), thought("Two."), TEXT]})
    assert found["reasoning_content"] == "One.\n\nTwo." and noted == {
        "thoughts that follow each other are joined by a blank line": 1
    }
    odd = USE | {"caller": {"type": "direct"}, "cache_control": {"type": "ephemeral"}}
    _, noted = read_messages({"role": "assistant", "content": [odd]})
    assert noted == {"field 'caller' of a block of type tool_use is not read": 1}
    part = {"functionCall": {"id": "7", "name": "f", "args": {}}, "text": "So:"}
    with pytest.raises(PlanError, match=r"parts\[0\]': field 'text' of a part of Gemini's holds a text"):
        read_messages({"role": "model", "parts": [part], "content": None})
    (found,), noted = read_messages({"role": "model", "parts": [part | {"text": "f"}], "content": None})
    assert found["tool_calls"][0]["id"] == "7" and noted == {"field 'text' of a part of Gemini's is not read": 1}


@pytest.mark.parametrize(
    ("field", "block"), [("tool_calls", USE), ("reasoning_content", thought("hm")), ("reasoning", thought("hm"))]
)
def test_a_block_and_a_field_that_say_the_same_are_refused(field, block):
    given = {"tool_calls": [CALL]}.get(field, "ah")
    with pytest.raises(PlanError, match=f"the message has {field} too"):
        read_messages({"role": "assistant", "content": [block], field: given})
    empty = {"tool_calls": []}.get(field)
    (found,), _ = read_messages({"role": "assistant", "content": [block], field: empty})
    assert empty in (None, []) and found.get("tool_calls" if block is USE else "reasoning_content")


def test_tools_keep_all_that_they_say():
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    response = {"type": "STRING"}
    gemini = {"name": "a", "parametersJsonSchema": schema, "response": response}
    anthropic = {"name": "b", "input_schema": schema, "strict": True, "input_examples": [{"city": "Rome"}]}
    flat = {"type": "function", "name": "c", "parameters": schema, "strict": True}
    found = tool_schemas([{"functionDeclarations": [gemini]}, anthropic | {"cache_control": {}}, flat], "tools", "row")
    assert [tool["function"] for tool in found] == [
        {"name": "a", "parameters": schema, "response": {"type": "string"}},
        {"name": "b", "parameters": schema, "strict": True, "input_examples": [{"city": "Rome"}]},
        {"name": "c", "parameters": schema, "strict": True},
    ]
    for wrong in (
        gemini | {"parameters": {}},
        gemini | {"responseJsonSchema": schema},
        {"name": "a", "response_json_schema": schema, "responseJsonSchema": response, "parameters": schema},
        {"functionDeclarations": [gemini], "googleSearch": {"x": 1}},
    ):
        with pytest.raises(PlanError, match=r"row: field 'tools\[0\]' has \w+ and \w+"):
            tool_schemas([wrong], "tools", "row")


def test_a_message_of_analysis_says_nothing_that_is_left_out_in_silence():
    def said(text, **more):
        return {"role": "assistant", "content": text, **more}

    analysis = said("One.", channel="analysis")
    (found,), noted = read_messages(analysis, analysis, said("Sunny.", channel="final"))
    assert found == said("Sunny.", reasoning_content="One.\n\nOne.") and len(noted) == 1
    (found,), _ = read_messages(said("Sunny.", channel="commentary"))
    assert found["channel"] == "commentary"  # which is named where no template reads it
    for answer, fact in (
        (said("Sunny.", reasoning="Two."), "has reasoning_content and a message of analysis"),
        (said("Sunny.", weight=1), "its message of analysis is not"),
    ):
        with pytest.raises(PlanError, match=fact):
            read_messages(analysis | ({"weight": 0} if "weight" in answer else {}), answer)
    with pytest.raises(PlanError, match="channel analysis: field 'rating' rates"):
        read_messages(analysis | {"rating": 0}, said("Sunny."))


OLDER = {"name": "weather", "arguments": "{}"}


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ({"role": "assistant", "tool_calls": [CALL], "function_call": OLDER}, "has tool_calls and function_call"),
        ({"role": "function_call", "content": OLDER, "tool_calls": [CALL]}, "has calls in its content and in another"),
        ({"from": "function_call", "value": OLDER, "function_call": OLDER}, "has calls in its value and in another"),
    ],
)
def test_calls_that_a_turn_has_twice_are_refused(turn, said):
    with pytest.raises(PlanError, match=rf"rows.jsonl:1: field 'messages\[0\]' {said}.*\. Keep one"):
        read_messages(turn)
    for name in turn.keys() & {"tool_calls", "function_call"}:
        (found,), _ = read_messages({other: value for other, value in turn.items() if other != name})
        assert len(found["tool_calls"]) == 1


@pytest.mark.parametrize("role", ["user", "system", "tool", "function"])
def test_calls_of_a_turn_that_is_not_the_assistant_s_are_refused(role):
    calls = {"tool_calls": [CALL]}, {"function_call": OLDER}, {"content": [TEXT, USE]}
    for given in calls:
        with pytest.raises(PlanError, match=r"'messages\[0\]' is a turn of \w+ with tool calls"):
            read_messages({"role": role, "content": "Sunny."} | given)
    (found,), _ = read_messages({"role": role, "content": "Sunny.", "tool_calls": []})
    assert "tool_calls" not in found
