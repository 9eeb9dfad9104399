"""Formats: which text a row becomes, and which of it is a target."""

import json

import pytest

from finetune.data.columns import RowReader
from finetune.errors import PlanError
from tests.support.chats import FORGETFUL, rendered, targets, text, with_template
from tests.support.runs import read_events


@pytest.mark.parametrize(
    ("columns", "fmt"),
    [
        (["messages", "prompt", "completion"], "chat"),
        (["id", "conversations"], "chat"),
        (["instruction", "input", "output", "text"], "alpaca"),
        (["instruction", "context", "response"], "alpaca"),
        (["prompt", "completion"], "prompt_completion"),
        (["prompt", "response"], "prompt_completion"),
        (["context", "question", "answer"], "qna"),
        (["question", "answer"], "qna"),
        (["text", "meta"], "text"),
    ],
)
def test_format_is_recognised_from_columns(columns, fmt):
    assert RowReader(columns=tuple(columns)).main.format == fmt


def test_unknown_columns_are_named_beside_the_known_formats():
    with pytest.raises(PlanError) as error:
        RowReader(columns=("foo", "bar"), dataset="x.csv")
    assert str(error.value).startswith(
        "x.csv: columns foo, bar match no format. If foo is the question and bar the answer, use --columns "
        "question=foo,answer=bar. The formats: chat (messages); alpaca (instruction, output); "
    )
    assert len(str(error.value)) < 400


def test_prompt_and_completion_are_joined_exactly_as_given(chat_tokenizer):
    (document,) = rendered({"prompt": " a\n", "completion": "\tb "}, "prompt_completion", chat_tokenizer)
    assert (text(document), targets([document])) == (" a\n\tb ", [["\tb "]])
    assert document.add_eos and not document.from_template


def test_alpaca_and_qna_use_the_classic_prompts_without_a_template(plain_tokenizer):
    (document,) = rendered({"instruction": "Add {1}", "input": "2 {x}", "output": "3"}, "alpaca", plain_tokenizer)
    assert text(document).endswith("### Instruction:\nAdd {1}\n\n### Input:\n2 {x}\n\n### Response:\n3")
    (document,) = rendered({"instruction": "Add", "input": None, "output": "3"}, "alpaca", plain_tokenizer)
    assert text(document).endswith("request.\n\n### Instruction:\nAdd\n\n### Response:\n3")
    (document,) = rendered({"question": "q", "answer": "a", "context": "c"}, "qna", plain_tokenizer)
    assert text(document) == "###Context:\nc\n###Question:\nq\n###Answer:\na"
    assert targets([document]) == [["a"]]


def test_alpaca_is_one_turn_of_the_chat_template_if_there_is_one(chat_tokenizer):
    (document,) = rendered({"instruction": "Add", "input": "2", "output": "3"}, "alpaca", chat_tokenizer)
    assert text(document) == "<|im_start|>user\nAdd\n\n2<|im_end|>\n<|im_start|>assistant\n3<|im_end|>"
    assert targets([document]) == [["3", "<|im_end|>"]]
    assert not document.add_eos


def test_every_assistant_turn_and_its_end_is_a_target(chat_tokenizer):
    row = {
        "conversations": [
            {"from": "system", "value": "s"},
            {"from": "human", "value": "u1"},
            {"from": "gpt", "value": "a1"},
            {"from": "human", "value": "u2"},
            {"from": "gpt", "value": "a2"},
            {"from": "human", "value": "u3"},
        ]
    }
    (document,) = rendered(row, "chat", chat_tokenizer)
    assert targets([document]) == [["a1", "<|im_end|>", "a2", "<|im_end|>"]]
    roles = {"system": "system", "human": "user", "gpt": "assistant"}
    messages = [{"role": roles[m["from"]], "content": m["value"]} for m in row["conversations"]]
    assert text(document) + "\n" == chat_tokenizer.apply_chat_template(messages[:5], tokenize=False)


def test_guanaco_text_learns_answers_only_and_ends_each(plain_tokenizer):
    row = {"text": "### Human: a### Assistant: b### Human: c### Assistant: d"}
    (document,) = rendered(row, "text", plain_tokenizer)
    assert targets([document]) == [[" b", "</s>", " d"]]
    assert document.add_eos
    (document,) = rendered({"text": "only ### Assistant: here"}, "text", plain_tokenizer)
    assert targets([document]) == [["only ### Assistant: here"]]


def test_a_template_that_rewrites_earlier_turns_gives_a_document_an_answer(chat_tokenizer):
    tokenizer = with_template(chat_tokenizer, FORGETFUL)
    roles = ["user", "assistant", "user", "assistant"]
    row = {"messages": [{"role": r, "content": c} for r, c in zip(roles, ["q", "t|a", "r", "t|b"], strict=True)]}
    documents = rendered(row, "chat", tokenizer)
    assert targets(documents) == [["t|a", "<|im_end|>"], ["t|b", "<|im_end|>"]]
    assert text(documents[1]).startswith("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>")


def test_a_template_whose_answers_do_not_follow_its_generation_prompt_is_refused(chat_tokenizer):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}[DRAFT]{% endif %}"
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    with pytest.raises(
        PlanError, match=r"^rows.jsonl:1: the chat template renders the prompt of messages\[1\] otherwise"
    ):
        rendered(row, "chat", with_template(chat_tokenizer, template))


def test_an_answer_without_end_token_gets_the_eos(chat_tokenizer):
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    (document,) = rendered(row, "chat", with_template(chat_tokenizer, template))
    assert document.add_eos


@pytest.mark.parametrize(
    ("fmt", "row", "message"),
    [
        ("alpaca", {"instruction": "a"}, "field 'output' is missing, must be a string."),
        ("alpaca", {"instruction": "a", "output": 3.5}, "field 'output' is a number, must be a string."),
        ("alpaca", {"instruction": "a", "output": None}, "field 'output' is null, must be a string."),
        ("alpaca", {"instruction": "a", "output": "b", "input": ["x"]}, "field 'input' is a list, must be a string."),
        ("qna", {"answer": "a"}, "field 'question' is missing, must be a string."),
        ("prompt_completion", {"prompt": "a", "response": 1.5}, "field 'response' is a number, must be a string."),
        ("text", {"text": None}, "field 'text' is null, must be a string."),
        ("chat", {"x": 1}, "field 'messages' is missing, must be a list of messages."),
        ("chat", {"messages": []}, "field 'messages' is empty, must be a list of messages."),
        ("chat", {"messages": "hello"}, "field 'messages' is a string, must be a list of messages."),
        ("chat", {"messages": ["x"]}, "field 'messages[0]' is a string, must be an object with role and content."),
        (
            "chat",
            {"messages": [{"role": "wizard", "content": "x"}]},
            "field 'messages[0].role' is 'wizard', must be one of",
        ),
        ("chat", {"messages": [{"role": ["a"], "content": "x"}]}, "field 'messages[0].role' is ['a'], must be one of"),
        (
            "chat",
            {"messages": [{"role": "user", "content": None}]},
            "field 'messages[0].content' is missing, must be a string.",
        ),
        (
            "chat",
            {"messages": [{"role": "user", "content": [1]}]},
            "field 'messages[0].content[0]' is an integer, must be a string or a part with text.",
        ),
        ("chat", {"conversations": [{"from": "cat", "value": "x"}]}, "field 'conversations[0].from' is 'cat', must be"),
        (
            "chat",
            {"messages": [{"role": "user", "content": "a"}], "tools": "x"},
            "field 'tools' is a string, must be a list of",
        ),
    ],
)
def test_wrong_fields_are_named(fmt, row, message, plain_tokenizer, chat_tokenizer):
    with pytest.raises(PlanError) as error:
        rendered(row, fmt, chat_tokenizer if fmt == "chat" else plain_tokenizer)
    assert str(error.value).startswith(f"rows.jsonl:1: {message}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}]},
        {"messages": [{"role": "user", "content": "a"}]},
        {"messages": [{"role": "assistant", "content": "greeting"}]},
    ],
)
def test_a_conversation_without_answer_has_no_target(row, chat_tokenizer):
    assert targets(rendered(row, "chat", chat_tokenizer)) == [[]]


def test_a_row_that_the_template_refuses_is_named(chat_tokenizer):
    tokenizer = with_template(chat_tokenizer, "{{ raise_exception('roles must alternate') }}")
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    with pytest.raises(PlanError, match=r"^rows.jsonl:1: the chat template rejects this row \(roles must alternate\)"):
        rendered(row, "chat", tokenizer)


def test_dataset_format_overrides_what_the_columns_say(plain_run, tmp_path):
    """A row with columns of two formats, and one without those of the format that is asked for."""
    file = tmp_path / "rows.jsonl"
    rows = [{"text": f"All of {i} is learned.", "prompt": f"Say {i}: ", "completion": f"{i}."} for i in range(8)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = dict(dataset=str(file), max_steps=1)
    asked = {"prompt_completion": "text", "text": "prompt,completion"}
    for fmt, others in asked.items():
        plain_run(**run, dataset_format=fmt, ignore_columns=others, output_dir=str(tmp_path / fmt))
    pairs, text = (read_events(tmp_path / fmt, "step")[0]["num_targets"] for fmt in asked)
    assert 0 < pairs < text
    with pytest.raises(PlanError, match="rows.jsonl"):
        plain_run(**run, dataset_format="chat", output_dir=str(tmp_path / "chat"))
