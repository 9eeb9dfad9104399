"""Tool calls, tool results and reasoning through templates that models publish: targets are what the model would say.

The reference is transformers' own rendering of the same conversation in the form templates are documented for.
"""

import json
import re

import pytest

from finetune.data.columns import RowOptions, RowReader
from finetune.errors import PlanError
from tests.support.chats import documents_of, rendered, targets, text, with_template
from tests.support.templates import TEMPLATES

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
ARGUMENTS = {"city": "Zürich", "days": 2}
IDS = {"Mistral": "abcdefghi"}  # its template accepts ids of nine characters only


def conversation(call_id: str, arguments) -> list[dict]:
    call = {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "Weather in Zürich?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "name": "weather", "content": "21 C"},
        {"role": "assistant", "content": "It is 21 C."},
        {"role": "user", "content": "Thanks."},
        {"role": "assistant", "content": "Welcome."},
    ]


def said_in_inference(tokenizer, messages, tools, i: int) -> str:
    """What the model adds to the prompt when it says message i."""
    options = dict(tools=tools, tokenize=False)
    before = tokenizer.apply_chat_template(messages[:i], add_generation_prompt=True, **options)
    return tokenizer.apply_chat_template(messages[: i + 1], **options).removeprefix(before)


def learned(documents) -> list[str]:
    return ["".join(spans) for spans in targets(documents)]


def in_llama_factory(messages) -> dict:
    """The conversation as ShareGPT messages, with the tools as text."""
    turns = []
    for message in messages:
        if message.get("tool_calls"):
            value = json.dumps(message["tool_calls"][0]["function"], ensure_ascii=False)
            turns.append({"from": "function_call", "value": value})
        else:
            roles = {"user": "human", "assistant": "gpt", "tool": "observation"}
            turns.append({"from": roles[message["role"]], "value": message["content"]})
    return {"conversations": turns, "tools": json.dumps(TOOLS)}


@pytest.mark.parametrize(
    "spelling", ["arguments as text", "arguments as an object", "OpenAI's null", "LLaMA-Factory's"]
)
@pytest.mark.parametrize("name", ["Qwen2.5", "Qwen3", "Llama-3.1", "Mistral"])
def test_targets_are_what_the_model_says_in_inference(name, spelling, make_tokenizer, tmp_path):
    tokenizer = make_tokenizer(tmp_path, chat_template=TEMPLATES[name])
    documented = conversation(IDS.get(name, "call_1"), ARGUMENTS)
    as_text = json.dumps(ARGUMENTS, ensure_ascii=False)
    given = conversation(IDS.get(name, "call_1"), ARGUMENTS if spelling == "arguments as an object" else as_text)
    if spelling == "OpenAI's null":
        given[1]["content"] = None
    row = {"messages": given, "tools": TOOLS}
    if spelling == "LLaMA-Factory's":
        row = in_llama_factory(documented)
    found = learned(rendered(row, "chat", tokenizer))
    if spelling == "LLaMA-Factory's" and name == "Mistral":  # which has no ids: theirs are chosen here
        (chosen,) = re.findall(r'"id": "(\w{9})"', "".join(found))
        documented = conversation(chosen, ARGUMENTS)
    said = [said_in_inference(tokenizer, documented, TOOLS, i).rstrip() for i in (1, 3, 5)]
    assert "".join(found) == "".join(said)
    assert all(one for one in said) and '{"city": "Zürich", "days": 2}' in said[0]


def test_what_precedes_each_answer_is_the_prompt_of_inference(make_tokenizer, tmp_path):
    for name in ("Qwen3", "Mistral"):  # both rewrite earlier turns, so each answer is a document
        tokenizer = make_tokenizer(tmp_path / name, chat_template=TEMPLATES[name])
        messages = conversation(IDS.get(name, "call_1"), ARGUMENTS)
        documents = rendered({"messages": messages, "tools": TOOLS}, "chat", tokenizer)
        for document, i in zip(documents, (1, 3, 5), strict=False):
            before = tokenizer.apply_chat_template(messages[:i], TOOLS, tokenize=False, add_generation_prompt=True)
            assert text(document).startswith(before)


def test_ids_of_tool_calls_are_shortened_where_the_template_demands_it(make_tokenizer, tmp_path):
    tokenizer = make_tokenizer(tmp_path, chat_template=TEMPLATES["Mistral"])
    documents = rendered({"messages": conversation("call_a-long-one", "{}"), "tools": TOOLS}, "chat", tokenizer)
    whole = "".join(text(document) for document in documents)
    used = set(part.split('"')[0] for part in whole.split('"id": "')[1:] + whole.split('"call_id": "')[1:])
    assert len(used) == 1 and len(used.pop()) == 9


def test_several_calls_at_once_are_one_answer_or_refused_by_the_template(make_tokenizer, tmp_path):
    messages = conversation("call_1", "{}")
    messages[1]["tool_calls"] *= 2
    tokenizer = make_tokenizer(tmp_path / "qwen", chat_template=TEMPLATES["Qwen2.5"])
    assert learned(rendered({"messages": messages[:2], "tools": TOOLS}, "chat", tokenizer))[0].count("<tool_call>") == 2
    tokenizer = make_tokenizer(tmp_path / "llama", chat_template=TEMPLATES["Llama-3.1"])
    with pytest.raises(PlanError, match=r"rejects this row \(This model only supports single tool-calls at once!\)"):
        rendered({"messages": messages, "tools": TOOLS}, "chat", tokenizer)


def notices_of(messages, tokenizer) -> dict:
    """{text: (count, example)} of a row's notices."""
    read = RowReader(RowOptions.of("chat")).read({"messages": messages}, "rows.jsonl:1")
    documents_of(read, tokenizer)
    return {text: (count, read.notices.examples.get(text)) for text, count in read.notices.counts.items()}


def test_numbers_that_json_writes_otherwise_are_named(make_tokenizer, tmp_path):
    tokenizer = make_tokenizer(tmp_path, chat_template=TEMPLATES["Qwen2.5"])
    for arguments, counted in (('{"a": 1.10, "b": [1E3, 1.5, 7, "1.10"]}', 2), ('{"a": 1.5, "b": -0.25, "c": 10}', 0)):
        messages = conversation("call_1", arguments)
        found = notices_of(messages, tokenizer).get("a number of a tool call is learned as JSON writes it", (0, None))
        assert found == (counted, "1.10" if counted else None)


def test_a_result_that_brings_the_templates_marks_is_named(make_tokenizer, tmp_path):
    tokenizer = make_tokenizer(tmp_path, chat_template=TEMPLATES["Qwen2.5"])
    for content, counted in (("<tool_response>\n21 C\n</tool_response>", 1), ("<weather>21 C</weather>", 0)):
        messages = conversation("call_1", "{}")
        messages[2]["content"] = content
        named = "a message of tool has <tool_response> twice: the chat template writes it too"
        assert notices_of(messages, tokenizer).get(named, (0,))[0] == counted


@pytest.mark.parametrize("name", TEMPLATES)
def test_reasoning_is_learned_where_the_template_renders_it_and_refused_elsewhere(name, chat_tokenizer):
    tokenizer = with_template(chat_tokenizer, TEMPLATES[name])
    for field in ("reasoning_content", "thinking", "reasoning"):
        answer = {"role": "assistant", "content": "4", field: "2 and 2."}
        row = {"messages": [{"role": "user", "content": "2+2?"}, answer]}
        if name != "Qwen3":
            with pytest.raises(
                PlanError, match=f"message 1: .* does not render {field}. .* add --ignore_columns {field}"
            ):
                rendered(row, "chat", tokenizer)
        else:
            assert learned(rendered(row, "chat", tokenizer)) == ["<think>\n2 and 2.\n</think>\n\n4<|im_end|>"]


def test_smollm2_refuses_what_its_template_leaves_out(chat_tokenizer):
    tokenizer = with_template(chat_tokenizer, TEMPLATES["SmolLM2"])
    row = {"messages": conversation("call_1", "{}"), "tools": TOOLS}
    with pytest.raises(PlanError, match="does not render tools"):
        rendered(row, "chat", tokenizer)
    with pytest.raises(PlanError, match="message 1: .* does not render tool calls"):
        rendered({"messages": row["messages"]}, "chat", tokenizer)
    plain = rendered({"messages": row["messages"][4:]}, "chat", tokenizer)
    assert learned(plain) == ["Welcome.<|im_end|>"]


@pytest.mark.parametrize("flags", [{"weight": 0}, {"train": False}, {"weight": False}])
def test_a_turn_that_is_not_to_be_learned_is_not(flags, make_tokenizer, tmp_path):
    for name in ("Qwen2.5", "Qwen3"):  # one document for all answers, and one for each
        tokenizer = make_tokenizer(tmp_path / name, chat_template=TEMPLATES[name])
        messages = conversation("call_1", "{}")
        messages[3] |= flags
        found = "".join(learned(rendered({"messages": messages, "tools": TOOLS}, "chat", tokenizer)))
        assert "<tool_call>" in found and "Welcome." in found and "It is 21 C." not in found
