"""What a column or a field says about its row is used, refused or said, under the names that programs give it."""

import json
import re

import pytest

from finetune.data.columns import RowOptions, parse_columns, parse_names
from finetune.data.meanings import has_words
from finetune.data.prepare import check_columns
from finetune.data.reading.sources import read_rows
from finetune.data.tokens.tokenize import render_row, tokenize
from finetune.errors import PlanError
from tests.support.rows import jsonl

QNA = {"question": "How tall?", "answer": "40 cm."}
WITH_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>{{ m.reasoning_content }}"
    "</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}


def read(tmp_path, tokenizer, row: dict, columns: str = "", ignored: tuple = ()):
    raw = read_rows(jsonl(tmp_path / "a.jsonl", [row]))
    options = RowOptions(columns=parse_columns(columns), ignored=ignored)
    check_columns(raw, options, "--dataset a")
    return tokenize(raw, options, tokenizer, 512)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (QNA | {"grade": "F"}, "column 'grade' may say which answers are wrong"),
        (CHAT | {"resolved": False}, "column 'resolved' is false, which may say that the row is not wanted"),
        (CHAT | {"exit_status": "error"}, "column 'exit_status' is \"error\", which may say"),
        (CHAT | {"pass_rate": 0.0}, "column 'pass_rate' is 0.0, which may say"),
        (QNA | {"thought": "As tall as a cat."}, "column 'thought' explains the answer"),
        (QNA | {"reasoning_trace": "As tall as a cat."}, "column 'reasoning_trace' explains the answer"),
        (QNA | {"human_label": "wrong"}, "column 'human_label' may say which answers are wrong"),
        (
            CHAT | {"correctness_math_verify": [True], "is_correct": [True]},
            "correctness_math_verify,is_correct to train",
        ),
        (QNA | {"ground_truth": "41 cm."}, "column 'ground_truth' is another answer"),
        (QNA | {"finish_reason": "length"}, "column 'finish_reason' is \"length\", which may say"),
        (QNA | {"truncated": True}, "column 'truncated' is true, which may say"),
        (QNA | {"stop_reason": "pause_turn"}, "column 'stop_reason' is \"pause_turn\", which may say"),
        (QNA | {"is_label_issue": True}, "column 'is_label_issue' is true, which may say"),
        (QNA | {"truncated_cells": ["answer"]}, "column 'truncated_cells' is .*, which may say"),
        (QNA | {"status": "draft"}, "column 'status' is \"draft\", which may say"),
        (QNA | {"partition": "test"}, "column 'partition' is \"test\", which may say"),
        (QNA | {"db_schema": "CREATE TABLE lamps"}, "column 'db_schema' may be a part of the prompt"),
        (CHAT | {"instructions": "Be brief."}, "column 'instructions' may be a part of the prompt"),
        (CHAT | {"documents": [{"text": "A lamp."}]}, "column 'documents' may be a part of the prompt"),
        (QNA | {"turn_index": 2}, "column 'turn_index' makes a conversation of several rows"),
        (QNA | {"completion_mask": [0, 1]}, "column 'completion_mask' may say which tokens are learned"),
        (CHAT | {"mask": "Assistant"}, "column 'mask' may say which turns are learned"),
        (QNA | {"alternatives": ["41 cm."]}, "column 'alternatives' is another answer"),
        ({"input_ids": [5, 6], "position_ids": [0, 0]}, "column 'position_ids' may say which tokens are learned"),
        (QNA | {"is_safe": False}, "column 'is_safe' is false, which may say that the row is not wanted"),
        (QNA | {"is_response_0_safe": "no"}, "column 'is_response_0_safe' is \"no\", which may say"),
        (CHAT | {"safe": 0}, "column 'safe' is 0, which may say"),
        (QNA | {"moderation": {"flagged": True}}, "column 'moderation' says that flagged is true"),
        (QNA | {"A": "40", "B": "41"}, "column 'A' may be a choice of the question"),
        (QNA | {"opa": "40", "opb": "41"}, "column 'opa' may be a choice of the question"),
        (QNA | {"option_1": "40", "option_2": "41"}, "column 'option_1' may be a choice of the question"),
        (QNA | {"thumbs": "down"}, "column 'thumbs' may say which answers are wrong"),
        (QNA | {"downvotes": 3}, "column 'downvotes' may say which answers are wrong"),
        (QNA | {"quality.responses": [1]}, "column 'quality.responses' may say which answers are wrong"),
        (CHAT | {"kto_tag": False}, "column 'kto_tag' says which answers are wanted"),
        (QNA | {"answer_2": "41 cm."}, "column 'answer_2' is another answer"),
        (QNA | {"reference_answer": "41 cm."}, "column 'reference_answer' is another answer"),
        (QNA | {"response": "41 cm."}, "columns 'answer' and 'response' both hold the answer"),
        (QNA | {"input": "The lamp."}, "columns 'question' and 'input' both hold the question"),
        (QNA | {"Question": "How wide?"}, "columns 'question' and 'Question' both hold the question"),
        (QNA | {"instruction": "Answer in inches."}, "column 'instruction' may be a part of the question"),
        (QNA | {"gold": "41 cm."}, "column 'gold' is another answer"),
        (QNA | {"reasoning": "I measured."}, "column 'reasoning' explains the answer"),
        (QNA | {"stars": 1}, "column 'stars' rates the answers"),
        (QNA | {"approved": False}, "column 'approved' is false, which may say that the row is not wanted"),
        (QNA | {"deleted": 1}, "column 'deleted' is 1, which may say that the row is not wanted"),
        (QNA | {"status": "Rejected"}, "column 'status' is \"Rejected\", which may say that the row is not wanted"),
        (CHAT | {"rejected_response": "No."}, "column 'rejected_response' holds an answer that was rejected"),
        (
            {"messages": [CHAT["messages"][0], CHAT["messages"][1] | {"train_detail": [{"train": False}]}]},
            "train_detail' says which parts of a turn are learned",
        ),
    ],
)
def test_a_column_that_changes_what_a_row_means_is_refused_with_what_to_do(row, said, tmp_path, plain_tokenizer):
    with pytest.raises(PlanError, match=said) as error:
        read(tmp_path, plain_tokenizer, row)
    assert "--ignore_columns" in str(error.value)


def test_a_system_prompt_and_a_mask_are_read_under_other_names(tmp_path, plain_tokenizer, chat_tokenizer):
    asked = read(tmp_path, chat_tokenizer, CHAT | {"systemPrompt": "Be brief."})
    assert "Be brief." in chat_tokenizer.decode(asked.tokens)
    learned = read(tmp_path, plain_tokenizer, {"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]})
    assert learned.is_target.tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        *((QNA | {"answer": text}, "a program prints") for text in ("b'40'", "['40']", "{'a': array(['40'])}")),
        (QNA | {"answer": "[object Object]"}, "a program prints"),
        *((QNA | {"answer": text}, "is it a missing value?") for text in ("\\N", "N/A", "undefined")),
        *((QNA | {"context": text}, "which is asked: is it a missing value?") for text in ("nan", "<noinput>")),
        (QNA | {"answer": "One.\\nTwo."}, "learned as two characters"),
        (QNA | {"answer": "caf\\u00e9"}, "learned as two characters"),
        ({"text": "One.<|endoftext|>Two."}, "a control token of another model"),
        ({"input_ids": [5, 6, 2, 2, 2]}, "is it padding?"),
    ],
)
def test_text_as_another_program_writes_it_is_said(row, said, tmp_path, plain_tokenizer):
    assert said in " ".join(read(tmp_path, plain_tokenizer, row).noted)


@pytest.mark.parametrize("answer", ['["40"]', '{"a": "x\\ny"}', "print('a')", "$\\nabla x \\neq 0$", "One.\nC:\\new"])
def test_answers_in_a_format_are_not_said(answer, tmp_path, plain_tokenizer):
    assert not read(tmp_path, plain_tokenizer, QNA | {"answer": answer}).noted


def test_what_a_part_of_text_cites_is_said_to_be_left_out(tmp_path, chat_tokenizer):
    parts = [{"type": "text", "text": "Green.", "citations": [{"cited_text": "green"}]}]
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": parts}]}
    assert "citations of a part" in " ".join(read(tmp_path, chat_tokenizer, chat).noted)


def test_a_second_answer_is_left_out_if_it_says_the_same_or_the_other_is_named(tmp_path, plain_tokenizer):
    for row in (QNA | {"response": "40 cm."}, QNA | {"final_answer": "40"}, QNA | {"answer_type": "length"}):
        assert read(tmp_path, plain_tokenizer, row).counts["rows"] == 1
    for wanted in ({"approved": True}, {"deleted": False}, {"status": "done"}, {"prompt": "Tell me: How tall?"}):
        assert read(tmp_path, plain_tokenizer, QNA | wanted).counts["rows"] == 1
    for second in ("answer_2", "response"):
        found = read(tmp_path, plain_tokenizer, QNA | {second: "41 cm."}, f"answer={second}")
        assert "⟦41 cm." in render_row(found, 0, plain_tokenizer, color=False)


def test_contexts_are_what_a_question_is_about(tmp_path, plain_tokenizer):
    found = read(tmp_path, plain_tokenizer, QNA | {"contexts": ["The lamp is 40 cm.", "It is red."]})
    assert "###Context:\nThe lamp is 40 cm.\n\nIt is red.\n###Question" in render_row(found, 0, plain_tokenizer, False)


def test_a_whole_number_with_a_fraction_is_said(tmp_path, plain_tokenizer):
    assert "such as 4.0" in "".join(read(tmp_path, plain_tokenizer, QNA | {"answer": "4.0"}).notices)
    for failed in ("NaN", "#N/A", "#REF!"):
        assert "a missing value" in "".join(read(tmp_path, plain_tokenizer, QNA | {"answer": failed}).notices), failed
    assert not read(tmp_path, plain_tokenizer, QNA | {"answer": "4.5"}).notices


@pytest.mark.parametrize("field", [{"loss": False}, {"loss_mask": 0}, {"training": False}, {"trainable": False}])
def test_turns_that_are_not_to_be_learned_are_context(field, tmp_path, chat_tokenizer):
    question, answer = CHAT["messages"]
    row = {"messages": [question, answer | field, {"role": "user", "content": "So?"}, answer | {"content": "Yes."}]}
    shown = render_row(read(tmp_path, chat_tokenizer, row), 0, chat_tokenizer, color=False)
    assert shown.count("⟦") == 1 and "⟦Yes." in shown and "Hello." in shown
    with pytest.raises(PlanError, match=f"{next(iter(field))}' is 2, must be 0 or 1"):
        read(tmp_path, chat_tokenizer, {"messages": [question, answer | dict.fromkeys(field, 2)]})


def test_harmony_s_analysis_is_the_reasoning_of_the_answer(tmp_path, chat_tokenizer):
    user, final = CHAT["messages"]
    analysis = {"role": "assistant", "channel": "analysis", "content": "A greeting."}
    row = {"messages": [user, analysis, final | {"channel": "final"}]}
    with pytest.raises(PlanError, match="does not render reasoning_content"):
        read(tmp_path, chat_tokenizer, row)
    shown = render_row(
        read(tmp_path, chat_tokenizer, row, ignored=("reasoning_content",)), 0, chat_tokenizer, color=False
    )
    assert "A greeting" not in shown and "⟦Hello." in shown
    chat_tokenizer.chat_template = WITH_THOUGHTS
    shown = render_row(read(tmp_path, chat_tokenizer, row), 0, chat_tokenizer, color=False)
    assert shown.count("⟦") == 1 and "⟦<think>A greeting.</think>Hello." in shown


def test_columns_of_letters_that_are_no_choices_are_a_line(tmp_path, plain_tokenizer):
    for more in ({"a": "x"}, {"A": "tall", "B": "How tall?"}, {"is_safe": True}):
        assert read(tmp_path, plain_tokenizer, QNA | more).num_rows == 1


def test_an_empty_question_is_said_in_every_form(tmp_path, plain_tokenizer, chat_tokenizer):
    rows = (
        {"question": " ", "answer": "40 cm."},
        {"instruction": "", "input": "", "output": "40 cm."},
        {"prompt": "", "completion": "40 cm."},
        {"prompt": [{"role": "user", "content": ""}], "completion": "40 cm."},
    )
    for row in rows:
        for tokenizer in (plain_tokenizer, chat_tokenizer):
            if tokenizer.chat_template or not isinstance(row.get("prompt"), list):
                assert any("is empty" in line for line in read(tmp_path, tokenizer, row).noted), row
    assert not any("is empty" in line for line in read(tmp_path, plain_tokenizer, rows[1] | {"input": "So?"}).noted)


TWICE = '{"role": "user", "content": "Hi", "content": "Ho"}'


@pytest.mark.parametrize(
    "row",
    [
        {"messages": f'[{TWICE}, {{"role": "assistant", "content": "Hello."}}]'},
        CHAT | {"tools": '[{"name": "a", "name": "b"}]'},
        CHAT | {"chat_template_kwargs": '{"think": 1, "think": 2}'},
        {"messages": '[{"role": "user", "content": "\\ud83d"}, {"role": "assistant", "content": "Hello."}]'},
    ],
)
def test_json_in_a_cell_is_as_strict_as_that_of_a_file(row, tmp_path, chat_tokenizer):
    with pytest.raises(PlanError, match="a.jsonl:1: field .*: its JSON has (duplicate key|half of a surrogate)"):
        read(tmp_path, chat_tokenizer, row)
    nested = {"data": '{"q": "Hi", "q": "Ho"}', "answer": "Hello."}
    with pytest.raises(PlanError, match="a.jsonl:1: 'data': its JSON has duplicate key 'q'"):
        read(tmp_path, chat_tokenizer, nested, columns="question=data.q,answer=answer")


def test_a_call_s_arguments_have_any_of_their_names_and_what_else_it_says_is_a_line(tmp_path, make_tokenizer):
    tokenizer = make_tokenizer(
        tmp_path / "t",
        chat_template="{% if false %}tool_calls{% endif %}"
        + WITH_THOUGHTS.replace(
            "{{ m.content }}", "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls else '' }}"
        ),
    )
    for name in ("arguments", "parameters", "args", "input"):
        dataset = read(tmp_path, tokenizer, answered(tool_calls=[{"name": "get", name: {"x": 1}, "extra": "e"}]))
        assert '"arguments": {"x": 1}' in render_row(dataset, 0, tokenizer, color=False)
        assert dataset.noted["field 'extra' of a tool call is not read"] == 1
    with pytest.raises(PlanError, match="has arguments and input. Keep one"):
        read(tmp_path, tokenizer, answered(tool_calls=[{"name": "get", "arguments": "{}", "input": {"x": 1}}]))


def answered(**fields) -> dict:
    return {"messages": [CHAT["messages"][0], {"role": "assistant", "content": "Hello."} | fields]}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"reasoning_content": {"text": "hm"}}, "reasoning_content' is an object, must be a string"),
        ({"reasoning_content": ["hm"]}, "reasoning_content' is a list, must be a string"),
        ({"reasoning_content": "hm", "reasoning": "ah"}, "reasoning_content and reasoning, which differ"),
        (
            {"reasoning_content": "hm", "content": "<think>hm</think>Hello."},
            "thoughts in its content and in reasoning_content",
        ),
        ({"rating": -1}, "field 'rating' rates the answers"),
        ({"thinking_blocks": [{"thinking": "hm"}]}, "field 'thinking_blocks' explains the answer"),
        (
            {"parts": [{"type": "text", "text": "Hello."}, {"type": "tool-get"}]},
            "field 'parts' holds parts of the turn",
        ),
        ({"toolInvocations": [{"toolName": "get"}]}, "field 'toolInvocations' holds parts of the turn"),
        ({"mask": True}, "field 'mask' may say which turns are learned"),
        ({"deleted": True}, "field 'deleted' is true, which may say that the turn is not wanted"),
        ({"thought": "hm"}, "field 'thought' explains the answer"),
        ({"reasoning_details": [{"text": "hm"}]}, "field 'reasoning_details' explains the answer"),
        ({"tool_calls": [{"name": "get", "arguments": '{"x": 1, "x": 2}'}]}, "duplicate key 'x'"),
    ],
)
def test_a_message_says_nothing_that_is_left_out(fields, said, tmp_path, make_tokenizer):
    tokenizer = make_tokenizer(tmp_path / "t", chat_template=WITH_THOUGHTS + "{# tool_calls #}")
    with pytest.raises(PlanError, match=re.escape(said)):
        read(tmp_path, tokenizer, answered(**fields))


READS_ALL_MESSAGES = "{{ messages | tojson | length and '' }}" + WITH_THOUGHTS
OF_TOOLS = "{% set name, tools = 1, 2 %}{# m.name, m.tools, m.rating #}rating " + WITH_THOUGHTS.replace(
    "{{ m.content }}",
    "{{ m.content }}{% if m.role == 'tool' %}{{ m.name }}{{ m.get('tools') }}{{ m['rating'] }}{% endif %}",
)


def test_a_field_is_read_where_the_template_reads_it_of_that_message(tmp_path, make_tokenizer):
    """Not where its source has the word: in prose, of another role or as a variable's name."""
    user, final = CHAT["messages"]
    named = {"messages": [user | {"name": "bob"}, final]}
    listed = {"messages": [{"role": "system", "content": "S", "tools": [{"name": "f"}]}, user, final]}
    rated = {"messages": [user, final | {"rating": 1}]}
    by_role = make_tokenizer(tmp_path / "a", chat_template=OF_TOOLS)
    assert read(tmp_path, by_role, named).noted["message field 'name' is not read by the chat template"] == 1
    for row, fact in ((listed, "lists the tools of a conversation"), (rated, "rates the answers")):
        with pytest.raises(PlanError, match=f"message .: field .* {fact}, and the chat template does not read it"):
            read(tmp_path, by_role, row)
    for template in (
        READS_ALL_MESSAGES,
        WITH_THOUGHTS.replace("{{ m.c", "{{ m.name, m['tools'], 'rating' in m }}{{ m.c"),
    ):
        reads = make_tokenizer(tmp_path / "b", chat_template=template)
        assert not any(
            "is not read" in text for row in (named, listed, rated) for text in read(tmp_path, reads, row).noted
        )


def test_tools_and_switches_are_read_where_they_have_an_effect(tmp_path, make_tokenizer):
    """A word of the template's prose or of its messages is no reading of them."""
    template = (
        "{% if tools is iterable and tools | length %}{% endif %}You may use tools, deep ones.{{ messages[0].deep }}"
        + WITH_THOUGHTS
    )
    tokenizer = make_tokenizer(tmp_path / "t", chat_template=template)
    row = CHAT | {"chat_template_kwargs": {"deep": True}}
    assert read(tmp_path, tokenizer, row).noted["chat_template_kwargs 'deep' is not read by the chat template"] == 1
    tools = [{"type": "function", "function": {"name": name}} for name in ("lookup", "search")]
    with pytest.raises(PlanError, match="does not render tools"):
        read(tmp_path, tokenizer, CHAT | {"tools": tools})
    names_it = CHAT | {"tools": [{"type": "function", "function": {"name": "Hello"}}]}
    with pytest.raises(PlanError, match="does not render tools"):  # whatever words the texts have
        read(tmp_path, tokenizer, names_it)
    for written in ("{{ tools | tojson }}", "{{ tools }}", "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"):
        quoted = CHAT | {"tools": [{"type": "function", "function": {"name": 'q"q'}}]}
        reads = make_tokenizer(tmp_path / "r", chat_template=written + WITH_THOUGHTS)
        dataset = read(tmp_path, reads, quoted)
        assert dataset.noted == {} and "function" in render_row(dataset, 0, reads, color=False)
    first = make_tokenizer(tmp_path / "u", chat_template="{{ (tools or [''])[0] }}{{ deep }}" + WITH_THOUGHTS)
    assert read(tmp_path, first, row | {"tools": tools}).noted == {
        "a tool of the row is left out by the chat template": 1
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "hm", "reasoning": "hm"},
        {"reasoning_content": "hm", "reasoning_details": [{"text": "hm"}], "thinking_blocks": [{"thinking": "hm"}]},
        {"parts": [{"type": "text", "text": "Hello."}]},
        {"rating": None, "feedback": "", "deleted": False, "parent_id": "7"},
    ],
)
def test_a_message_may_say_a_thing_twice_or_nothing(fields, tmp_path, make_tokenizer):
    tokenizer = make_tokenizer(tmp_path / "t", chat_template=WITH_THOUGHTS)
    dataset = read(tmp_path, tokenizer, answered(**fields))
    assert render_row(dataset, 0, tokenizer, color=False).count("hm") == ("reasoning_content" in fields)


def test_calls_and_results_that_do_not_meet_are_said(tmp_path, make_tokenizer):
    template = "{{ tools | tojson }}{# tool_calls tool #}" + WITH_THOUGHTS
    calls = [{"id": name, "function": {"name": name, "arguments": {}}} for name in ("one", "two")]
    results = [{"role": "tool", "tool_call_id": name, "content": "1"} for name in ("two", "one", "three")]
    messages = [CHAT["messages"][0], answered(tool_calls=calls)["messages"][1], *results, CHAT["messages"][1]]
    row = {"messages": messages, "tools": [{"type": "function", "function": {"name": "one"}}]}
    noted = read(tmp_path, make_tokenizer(tmp_path / "t", chat_template=template), row).noted
    assert noted["a call is of a tool that the row does not list"] == 1
    assert noted["results of calls come in another order than the calls"] == 1
    assert noted["a result is of no call before it"] == 1


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (QNA | {"answer": "Itâ€™s 40 cm."}, "seems to be UTF-8 that was read in another encoding"),
        (QNA | {"question": "Un cafÃ©?"}, "seems to be UTF-8 that was read in another encoding"),
        (QNA | {"answer": "40\ufffdcm."}, "U+FFFD"),
        (QNA | {"answer": "&lt;40 cm&gt;"}, "HTML's escapes"),
        (
            QNA | {"answer": '<details type="reasoning" done="true">\n<summary>Thought</summary>\nHm\n</details>\n40'},
            "block of reasoning that chat programs show folded",
        ),
        ({"text": "---\ntitle: Cats\n---\n\nCats are tall."}, "front matter"),
        (QNA | {"answer": "Ça va, Ângela? Ã is a letter, & so is â€."}, None),
        ({"text": "---\n\nCats are tall.\n\n---\n\nDogs too: taller."}, None),
    ],
)
@pytest.mark.parametrize("chat", [False, True])
def test_text_that_was_damaged_on_its_way_is_said(row, said, chat, tmp_path, plain_tokenizer, chat_tokenizer):
    noted = read(tmp_path, chat_tokenizer if chat else plain_tokenizer, row).noted
    found = [text for text in noted if re.search("encoding|FFFD|escapes|folded|front matter", text)]
    assert [said in text for text in found] == [True] * bool(said), noted


NESTED = {"data": {"q": "Hi"}, "notes": [{"a": "Hello.", "was_cancelled": True}, {"a": "Ho."}]}
WITH_CALLS = WITH_THOUGHTS.replace(
    "{{ m.content }}", "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls else '' }}"
)
CALL = {"id": "1", "function": {"name": "get", "arguments": {"x": "up"}}}


@pytest.mark.parametrize(
    "name", ["isCorrect", "is-correct", "Is Correct", "IS_CORRECT", "_is_correct", "IsCorrect", "is correct"]
)
def test_a_name_is_judged_by_its_words(name, tmp_path, plain_tokenizer):
    with pytest.raises(PlanError, match=f"column '{name}' may say which rows are wrong") as error:
        read(tmp_path, plain_tokenizer, QNA | {name: False})
    flag = re.search(r"--ignore_columns ('[^']+'|\S+) ", str(error.value))[1].strip("'")
    assert read(tmp_path, plain_tokenizer, QNA | {name: False}, ignored=parse_names(flag)).num_rows == 1


UNWANTED_IN_NUMBERS = {"exclude": "x", "no_train": 1, "bad": 1, "valid": 0, "part": "holdout", "tvt": "test"}
UNWANTED_IN_NUMBERS |= {"used_for": "evaluation", "quality_flag": "low", "finish": "length"}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (CHAT | {"response": "Good day."}, "column 'response' is another answer"),
        (CHAT | {"output": {"role": "assistant", "content": "Good day."}}, "column 'output' is another answer"),
        (CHAT | {"prompt": "Be brief."}, "column 'prompt' may be a part of the prompt"),
        ({"text": "How tall?", "answer": "40 cm."}, "is another answer (--columns question=text learns it"),
        ({"text": "Tall.", "prompt": "How tall?"}, "(--columns question=prompt,answer=text asks it)"),
        ({"text": "Hi", "role": "user"}, "column 'role' says who speaks"),
        ({"text": "Hi", "chat_history": [{"message": "Ho"}]}, "column 'chat_history' holds earlier turns"),
        *((QNA | {name: value}, f"column '{name}' is") for name, value in UNWANTED_IN_NUMBERS.items()),
        (QNA | {"suffix": "return x"}, "column 'suffix' may be a part of the prompt"),
        (QNA | {"error": "Rate limit reached"}, "column 'error' is \"Rate limit reached\", which may say"),
        (QNA | {"level": "ERROR"}, "column 'level' is \"ERROR\", which may say"),
        (QNA | {"trainable": False}, "column 'trainable' is false, which may say"),
        (QNA | {"sample_weight": 0.5}, "column 'sample_weight' weighs the rows"),
        (QNA | {"thinking_trajectories": ["I measured it."]}, "column 'thinking_trajectories' explains the answer"),
        (QNA | {"Complex_CoT": "I measured it."}, "column 'Complex_CoT' explains the answer"),
        (CHAT | {"available_tools": [{"name": "get"}]}, "column 'available_tools' lists the tools"),
        (CHAT | {"turn_mask": [0, 1]}, "column 'turn_mask' may say which turns are learned"),
        (QNA | {"audio_path": "a.wav"}, "column 'audio_path' is not text"),
        (CHAT | {"finish_reasons": ["stop", "length"]}, "column 'finish_reasons' is"),
        (CHAT | {"http_status": 429}, "column 'http_status' is 429, which may say"),
        (CHAT | {"meta": {"is_visually_hidden_from_view": True}}, "says that is_visually_hidden_from_view is true"),
        ({"text": "q a", "segments": [{"label": False, "text": "q "}]}, "has label false, which may say which turns"),
        (
            QNA | {"table": {"header": ["lamp", "tall"], "rows": [["red", "38 inches"]]}},
            "'table' may be a part of the prompt",
        ),
        (QNA | {"story": "A lamp was 40 cm tall."}, "column 'story' may be a part of the prompt"),
        (QNA | {"task_definition": "Say the size in inches."}, "column 'task_definition' may be a part of the prompt"),
        (QNA | {"rules": ["Be brief.", "Say no numbers."]}, "column 'rules' may be a part of the prompt"),
        (QNA | {"solution_steps": "Measure it, then say it."}, "column 'solution_steps' is another answer"),
        (QNA | {"attachments": [{"name": "a.pdf"}]}, "column 'attachments' holds what was attached"),
        (CHAT | {"metadata": {"is_wrong": True}}, "column 'metadata' says that is_wrong is true"),
        (CHAT | {"meta": {"quality": "low"}}, "column 'meta' says that quality is \"low\""),
        (CHAT | {"eval": {"score": 0}}, "column 'eval' says that score is 0"),
        (CHAT | {"superseded_by": "row 7"}, "column 'superseded_by' may say which rows are not wanted"),
        (CHAT | {"labels": 0}, "column 'labels' may say which rows are wrong"),
        (CHAT | {"overall_preference": -2}, "column 'overall_preference' may say which answer is better"),
        (CHAT | {"answer_key": "No."}, "column 'answer_key' is another answer"),
        (QNA | {"ideal": "41 cm."}, "column 'ideal' is another answer"),
        (QNA | {"improved": "It is 41 cm."}, "column 'improved' is another answer"),
        (QNA | {"human_override": "It is 41 cm."}, "column 'human_override' is another answer"),
        ({"text": "Add two numbers.", "code": "def add(a, b): return a + b"}, "column 'code' is another answer"),
        (CHAT | {"moderation": [{"x": 1}, {"flagged": True}]}, "column 'moderation' says that flagged is true"),
        (CHAT | {"raw": {"choices": [{"finish_reason": "length"}]}}, "column 'raw' says that finish_reason is"),
        (CHAT | {"turn_weights": [0, 1]}, "column 'turn_weights' may say which turns are learned"),
        (CHAT | {"trainable_turns": [0]}, "column 'trainable_turns' may say which turns are learned"),
        (CHAT | {"skip_turns": [1]}, "column 'skip_turns' may say which turns are learned"),
        (CHAT | {"last_turn_only": True}, "column 'last_turn_only' may say which turns are learned"),
    ],
)
def test_what_is_beside_a_conversation_or_a_text_is_refused(row, said, tmp_path, plain_tokenizer):
    with pytest.raises(PlanError, match=re.escape(said)):
        read(tmp_path, plain_tokenizer, row)


ASKED_TWO = "Is it yes or no, 4 or 14?"
SAID_14 = {
    "messages": [{"role": "user", "content": ASKED_TWO}, {"role": "assistant", "content": "no, it is 14.5 or 14."}]
}


@pytest.mark.parametrize("row", [SAID_14, {"prompt": ASKED_TWO + " ", "completion": "no, it is 14.5 or 14."}])
def test_an_answer_that_is_within_a_word_or_in_the_question_is_another_one(
    row, tmp_path, plain_tokenizer, chat_tokenizer
):
    tokenizer = chat_tokenizer if "messages" in row else plain_tokenizer
    for answer in ("4", "yes", "5", "i", "1"):
        with pytest.raises(PlanError, match="column 'answer' is another answer"):
            read(tmp_path, tokenizer, row | {"answer": answer})
    for answer in ("14", "no", "14.5", "it is  14.5", "it is 14.5 or 14."):
        assert read(tmp_path, tokenizer, row | {"answer": answer}).num_rows == 1


def test_a_text_has_whole_words_of_another():
    for said, text in (
        ("The answer is 42.", "42"),
        (r"So \boxed{42}", "42"),
        ("它高四十厘米。", "四十"),
        ("x = -3,", "-3"),
        ("at 4,", "4"),
        ("a b", ""),
    ):
        assert has_words(said, text), (said, text)
    for said, text in (("14", "4"), ("4.5", "4"), ("1,400", "400"), ("lampe", "lamp"), ("notyes no", "yes")):
        assert not has_words(said, text), (said, text)


def test_columns_that_a_conversation_or_a_text_has_are_a_line(tmp_path, plain_tokenizer, chat_tokenizer):
    for more in (
        {"response": "Hello.", "prompt": "Hi"},
        {"answer": 42, "error": None, "thinking_tokens": 512, "level": 3, "moderation": [{"flagged": False}]},
        {"error": "0.03", "status": "done", "sample_weight": 1, "role": "teacher"},
        {"gen_input_configs": {"template": "a text of five words", "temperature": 1}},
        {"labels": ["greeting"], "edited": "2024-01-01", "toxicity": 0.01, "quality": None, "meta": {"score": 0.9}},
        {"finish_reasons": ["stop"], "http_status": 200, "code": 7, "meta": {"is_hidden": False, "label": True}},
        {"parallel_tool_calls": False, "num_tool_calls": 2, "file_path": "a/b.txt", "tool_choice": "auto"},
    ):
        assert read(tmp_path, chat_tokenizer, CHAT | more).num_rows == 1
    text = {"text": "How tall? 40 cm.", "answer": "40 cm.", "prompt": "How tall?", "role": "teacher"}
    assert read(tmp_path, plain_tokenizer, text).num_rows == 1


def test_what_is_beside_a_nested_column_is_judged_as_a_column(tmp_path, chat_tokenizer):
    columns = "question=data.q,answer=notes.0.a"
    with pytest.raises(PlanError, match="'notes.0.was_cancelled' is true, which may say") as error:
        read(tmp_path, chat_tokenizer, NESTED, columns)
    assert "--ignore_columns notes.0.was_cancelled" in str(error.value)
    noted = read(tmp_path, chat_tokenizer, NESTED, columns, ignored=("notes.0.was_cancelled",)).noted
    assert noted["of a list 'notes' only entry 0 is used, and it has more"] == 1
    with pytest.raises(PlanError, match="'body.messages' has 2 messages, of which --columns names entry 0 alone"):
        read(tmp_path, chat_tokenizer, {"body": CHAT, "reply": "Ho"}, "question=body.messages.0.content,answer=reply")
    body = {"body": CHAT | {"tools": [{"name": "f"}]}}
    with pytest.raises(PlanError, match=r"'body.tools' lists the tools of a conversation"):
        read(tmp_path, chat_tokenizer, body, "messages=body.messages")
    assert read(tmp_path, chat_tokenizer, body, "messages=body.messages,tools=body.tools", ("body.tools",)).num_rows


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"toolCalls": [{"name": "get"}]}, "field 'toolCalls' holds what the assistant calls"),
        ({"reasoningContent": "I measured."}, "field 'reasoningContent' explains the answer"),
        ({"tool_call": {"name": "get"}}, "field 'tool_call' holds what the assistant calls"),
        ({"tool_results": [{"output": "42"}]}, "field 'tool_results' holds what tools gave"),
        ({"steps": [{"action": "get"}]}, "field 'steps' holds a text that its content does not have"),
        ({"context": "A lamp."}, "field 'context' holds a text that its content does not have"),
        ({"loss_scale": 0}, "field 'loss_scale' may say which turns are learned"),
        ({"loss_scale": 0.5}, "field 'loss_scale' may say which turns are learned"),
        ({"output_with_loss": False}, "field 'output_with_loss' may say which turns are learned"),
        ({"need_train_in_this_round": False}, "'need_train_in_this_round' may say which turns are learned"),
        ({"is_masked": True}, "field 'is_masked' may say which turns are learned"),
        ({"trained": "false"}, "field 'trained' may say which turns are learned"),
        ({"loss_scale": "0.5"}, "field 'loss_scale' may say which turns are learned"),
        ({"with_loss": 0.0}, "field 'with_loss' may say which turns are learned"),
        ({"exclude_from_loss": True}, "field 'exclude_from_loss' may say which turns are learned"),
        ({"refusal": "No."}, "field 'refusal' holds a text that its content does not have"),
        ({"value": "Ho."}, "field 'value' holds a text"),
        ({"inner_voice": "They want to be greeted."}, "field 'inner_voice' holds a text"),
        ({"error": {"content": "Network problem"}}, 'field \'error\' is {"content": "Network problem"}'),
        ({"additional_kwargs": {"tool_calls": [{"name": "get"}]}}, "'additional_kwargs' has tool_calls, which holds"),
        ({"response_metadata": {"finish_reason": "length"}}, "'response_metadata' says that finish_reason is"),
        ({"recipient": "functions.get"}, "field 'recipient' says that the turn is a call"),
        ({"content": [{"type": "text", "text": "Hello.", "train": False}]}, "field 'train' of a part of a message may"),
        ({"content": [{"type": "text", "text": "Hello.", "weight": 0}]}, "field 'weight' of a part of a message may"),
        ({"content": [{"type": "text", "text": "Hello.", "rating": 1}]}, "field 'rating' of a part of a message rates"),
        ({"tool_calls": [CALL | {"success": False}]}, "field 'success' of a tool call is false"),
        ({"tool_calls": [CALL | {"result": "5 C"}]}, "field 'result' of a tool call holds a text"),
        ({"tool_calls": [{"function": CALL["function"] | {"output": "5 C"}}]}, "field 'output' of a tool call holds"),
    ],
)
def test_a_turn_its_parts_and_its_calls_are_judged_alike(fields, said, tmp_path, make_tokenizer):
    tokenizer = make_tokenizer(tmp_path / "t", chat_template=WITH_CALLS)
    with pytest.raises(PlanError, match=re.escape(said)) as error:
        read(tmp_path, tokenizer, answered(**fields))
    name = re.search(r"--ignore_columns (\S+)", str(error.value))[1].rstrip(".").casefold()
    assert read(tmp_path, tokenizer, answered(**fields), ignored=(name,)).num_rows == 1


def test_fields_that_say_that_a_turn_is_learned_are_a_line(tmp_path, chat_tokenizer):
    for fields in (
        {"loss_scale": 1},
        {"no_loss": False},
        {"is_masked": "false"},
        {"with_loss": True},
        {"nll_loss": 0.0},
        {"training_step": 0, "mask_id": 7, "not_masked": True, "mask_loss": False, "not_trainable": False},
    ):
        assert read(tmp_path, chat_tokenizer, answered(**fields)).num_rows == 1
    asked = {"role": "user", "content": "Hi", "trained": False, "loss_scale": 0, "is_masked": True}
    row = {"messages": [asked, {"role": "assistant", "content": "Yo", "trained": True, "loss_scale": 1}]}
    more = {"last_turn_only": False, "bad_turns": 2, "turn_weights": [1, 1], "turn_loss": 0.7}
    assert read(tmp_path, chat_tokenizer, row | more).num_rows == 1


def test_a_number_for_each_turn_or_token_is_refused(tmp_path, plain_tokenizer, chat_tokenizer):
    fact = "has a number for each token or turn, and may say which are learned"
    for row, tokenizer in (
        (CHAT | {"wanted": [0, 1]}, chat_tokenizer),
        (CHAT | {"wanted": [False, True]}, chat_tokenizer),
        ({"input_ids": [5, 6, 7], "assistant_tokens_mask": [0, 1, 1]}, plain_tokenizer),
        ({"input_ids": [5, 6, 7], "advantages": [0.5, 0, 1]}, plain_tokenizer),
    ):
        with pytest.raises(PlanError, match=fact):
            read(tmp_path, tokenizer, row)
    for row, tokenizer in (
        (CHAT | {"times": [1700000000, 1700000001], "wanted": [1, 1], "tags": ["a", "b"]}, chat_tokenizer),
        ({"input_ids": [5, 6, 7], "token_type_ids": [0, 0, 0], "offsets": [[0, 1], [1, 2], [2, 3]]}, plain_tokenizer),
    ):
        assert read(tmp_path, tokenizer, row).num_rows == 1


@pytest.mark.parametrize("name", ["parentId", "parent_message_uuid", "parent"])
def test_branches_of_a_tree_are_refused(name, tmp_path, chat_tokenizer):
    user, final = CHAT["messages"]
    one = user | {"id": "1"}
    two = final | {"id": "2", name: "1"}
    three = final | {"id": "3", name: "1"}
    with pytest.raises(PlanError, match=rf"messages\[2\].{name}' is another message than the one before it"):
        read(tmp_path, chat_tokenizer, {"messages": [one, two, three]})
    assert read(tmp_path, chat_tokenizer, {"messages": [one, two, three]}, ignored=(name.casefold(),)).num_rows == 1
    for others in (
        [one | {name: "0"}, two],
        [one | {name: None}, two, user | {"id": "4", name: "2"}, final | {name: "4"}],
    ):
        assert read(tmp_path, chat_tokenizer, {"messages": others}).num_rows == 1


def test_speakers_that_the_template_does_not_name_are_said(tmp_path, chat_tokenizer):
    user, final = CHAT["messages"]
    for others, many in ((["Bob", "Eve"], 1), (["Bob", "Bob"], 0)):
        row = {"messages": [user | {"name": others[0]}, final, user | {"name": others[1]}, final]}
        noted = read(tmp_path, chat_tokenizer, row).noted
        assert sum("turns of user have several names" in text for text in noted) == many


def test_a_turn_has_one_role(tmp_path, chat_tokenizer):
    user, final = CHAT["messages"]
    with pytest.raises(PlanError, match=r"messages\[1\]' has two roles, 'gpt' and 'user'. Keep one."):
        read(tmp_path, chat_tokenizer, {"messages": [user, {"from": "gpt", "role": "user", "value": "Hello."}]})
    row = {"messages": [user | {"from": "human"}, final | {"from": "gpt"}]}
    shown = render_row(read(tmp_path, chat_tokenizer, row), 0, chat_tokenizer, color=False)
    assert shown == render_row(read(tmp_path, chat_tokenizer, CHAT), 0, chat_tokenizer, color=False)


def test_a_user_s_deleted_turn_is_refused_and_a_failed_result_is_not(tmp_path, make_tokenizer):
    user, final = CHAT["messages"]
    tokenizer = make_tokenizer(tmp_path / "t", chat_template=WITH_CALLS + "{# tool #}")
    with pytest.raises(PlanError, match="message 0: field 'deleted' is true"):
        read(tmp_path, tokenizer, {"messages": [user | {"deleted": True}, final]})
    result = {"role": "tool", "content": "No such city.", "status": "error", "is_error": True}
    row = {"messages": [user, answered(tool_calls=[CALL])["messages"][1], result, final]}
    noted = read(tmp_path, tokenizer, row).noted
    assert noted["message field 'status' is not read by the chat template"] == 1


def test_fields_that_say_what_is_there_already_are_a_line(tmp_path, make_tokenizer):
    tokenizer = make_tokenizer(tmp_path / "t", chat_template=WITH_CALLS)
    part = {"type": "output_text", "text": "Hello.", "annotations": [], "weight": 1}
    for fields in (
        {"value": "Hello.", "text": "Hello."},
        {"content": [part], "model": "a b c d e", "created_at": "1 May 2025 at noon", "title": "A greeting"},
        {"tool_calls": [CALL | {"index": 0, "summary": "up"}], "recipient": "all", "usage": {"total": 3}},
        {"original_content": "Another text of five words.", "info": {"reference": "A text of more than four words."}},
    ):
        assert read(tmp_path, tokenizer, answered(**fields)).num_rows == 1


def test_objects_that_hold_choices_answers_and_system_prompts_are_judged_too(tmp_path, chat_tokenizer):
    choices = {"text": ["40", "41"], "label": ["A", "B"]}
    asked = {"question": "How tall?", "choices": choices, "answer": "A"}
    for row, said in (
        (asked | {"choices": choices | {"is_correct": [True, False]}}, "field 'is_correct' of column 'choices'"),
        (QNA | {"answer": {"text": ["40 cm."], "score": [0]}}, "field 'score' of column 'answer' rates"),
        (CHAT | {"system": {"parts": [{"text": "S"}], "tools": [{"name": "f"}]}}, "'tools' of the system prompt lists"),
    ):
        with pytest.raises(PlanError, match=said):
            read(tmp_path, chat_tokenizer, row)
    assert read(tmp_path, chat_tokenizer, asked).num_rows == 1
    assert not read(tmp_path, chat_tokenizer, QNA | {"answer": {"text": ["40 cm."], "answer_start": [0]}}).noted


UNWANTED_ROWS = [
    *({name: True} for name in ("blocked", "has_failed", "exclude", "doNotTrain", "opt_out", "is_swapped")),
    *({name: "True"} for name in ("response_toxic", "is corrupted")),
    *({name: True} for name in ("wrong", "is_bad", "human_reject", "skip", "outdated", "user_dislike", "draft")),
    *({name: False} for name in ("valid", "tests_passed", "is_complete", "consent", "chosen_wins")),
    *({name: False} for name in ("use_for_training", "pass", "helpful", "user_liked", "published")),
    *({"toxicity": 0.99}, {"stage": "eval"}, {"purpose": "evaluation"}, {"acc": 0.0}, {"annotation": "reject"}),
    *({"tags": ["long", "delete"]},),
    *({name: "no"} for name in ("task_completed", "ok")),
    *({name: value} for name, value in (("llm_judge", "incorrect"), ("test_result", "FAILED"), ("x", "rejected"))),
]
WANTED_ROWS = [
    {"blocked_by": "x", "failed": 0, "error_correction": True, "valid": True, "opt_in": True, "completed_at": "no"},
    {"category": "wrong", "topic": "rejected", "source": "failed", "language": "invalid"},
    {"valid_until": False, "complete_name": "no", "done_by": "no", "is_passed": 1},
]


@pytest.mark.parametrize("more", UNWANTED_ROWS)
def test_a_row_is_not_wanted_by_the_last_word_of_a_name_or_by_a_verdict(more, tmp_path, plain_tokenizer):
    with pytest.raises(PlanError, match="which may say that the row is not wanted"):
        read(tmp_path, plain_tokenizer, QNA | more)


def test_words_elsewhere_in_a_name_and_topics_are_no_verdicts(tmp_path, plain_tokenizer):
    for more in WANTED_ROWS:
        assert read(tmp_path, plain_tokenizer, QNA | more).num_rows == 1


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"answer_de": "Das sind vierzig Zentimeter."}, "column 'answer_de' is another answer"),
        ({"suggested_edit": "It is 40 cm tall."}, "column 'suggested_edit' is another answer"),
        ({"question_body": "I mean the red lamp."}, "column 'question_body' may be a part of the prompt"),
        ({"better_response_id": 1}, "may say which answer is better"),
        ({"parentMessageId": "7"}, "makes a conversation of several rows"),
        ({"in_reply_to": "7"}, "makes a conversation of several rows"),
    ],
)
def test_a_text_beside_a_question_is_judged_by_the_words_of_its_name(more, said, tmp_path, plain_tokenizer):
    with pytest.raises(PlanError, match=said):
        read(tmp_path, plain_tokenizer, QNA | more)
    for fine in (
        {"answer_type": "a text of four words", "original_question": "What is its height?"},
        {"answer_de": "40 cm.", "prompt_id": "a b c d", "story": "Lamps"},
    ):
        assert read(tmp_path, plain_tokenizer, QNA | fine).num_rows == 1


ASKED_IN_JSON = '[{"role": "user", "content": "Hi"}]'


def test_json_of_messages_or_parts_in_a_text_is_refused_or_said(tmp_path, plain_tokenizer, chat_tokenizer):
    for row in (
        {"prompt": ASKED_IN_JSON, "completion": "Hello."},
        {"input": f'{{"messages": {ASKED_IN_JSON}}}', "output": "Hello."},
        {"question": "Hi", "answer": '{"from": "gpt", "value": "Hello."}'},
        {"text": ASKED_IN_JSON},
    ):
        with pytest.raises(PlanError, match="is JSON of messages, written as a text"):
            read(tmp_path, plain_tokenizer, row)
    for answer in ('{"role": "admin"}', '[{"role": "user"}]', '[{"id": 1}]', "[{", '{"type": "a", "content": "b"}'):
        assert not read(tmp_path, plain_tokenizer, QNA | {"answer": answer}).noted
    parts = '[{"type": "text", "text": "Hi"}]'
    row = {"messages": [{"role": "user", "content": parts}, CHAT["messages"][1]]}
    assert any("is JSON of parts" in text for text in read(tmp_path, chat_tokenizer, row).noted)
    whole = {"messages": '[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]'}
    assert not read(tmp_path, chat_tokenizer, whole).noted


def test_a_place_of_an_image_stays_text_with_a_line(tmp_path, plain_tokenizer):
    noted = read(tmp_path, plain_tokenizer, QNA | {"question": "<image>\nHow tall?"}).noted
    assert noted == {"a text has <image>, which stays text: this run reads no images": 1}


def test_an_answer_that_is_a_choice_s_number_and_another_s_text_is_said(tmp_path, plain_tokenizer):
    """MMLU's answers are places, of numbers too."""
    row = {"question": "1 + 1?", "choices": ["1", "3", "2"], "answer": 2}
    found = read(tmp_path, plain_tokenizer, row)
    assert "⟦C" in render_row(found, 0, plain_tokenizer, color=False) and not found.noted
    found = read(tmp_path, plain_tokenizer, row | {"choices": ["1", "2", "3"]})
    assert "⟦C" in render_row(found, 0, plain_tokenizer, color=False)
    assert any("is the number of one choice and the text of another" in line for line in found.noted)
    for answer, choices, letter in ((1, ["0", "1"], "B"), (1, ["a", "b"], "B"), ("2", ["1", "2", "3"], "B")):
        found = read(tmp_path, plain_tokenizer, row | {"choices": choices, "answer": answer})
        assert f"⟦{letter}" in render_row(found, 0, plain_tokenizer, color=False)


def test_an_answer_of_a_table_that_is_a_choice_and_another_s_number_is_said(tmp_path, plain_tokenizer):
    row = {"question": "5 - 2?", "choices": ["4", "2", "3", "1"]}
    found = read(tmp_path, plain_tokenizer, row | {"answer": "2"})
    assert "⟦B" in render_row(found, 0, plain_tokenizer, color=False)
    assert any("is the text of one choice and the number of another" in line for line in found.noted)
    for choices, answer, letter in (
        (row["choices"], "4", "A"),
        (["True", "False"], True, "A"),
        (["a", "b"], 1.0, "B"),
        ({"text": ["Rome", "Paris", "Oslo"], "label": ["1", "2", "3"]}, 3, "3"),
        (["true", "false"], False, "B"),
        ('["4", "2"]', "2", "B"),
    ):
        found = read(tmp_path, plain_tokenizer, row | {"choices": choices, "answer": answer})
        assert f"⟦{letter}" in render_row(found, 0, plain_tokenizer, color=False) and not found.noted
    numbered = row | {"choices": {"text": ["Rome", "Paris", "Oslo"], "label": ["1", "2", "3"]}}
    found = read(tmp_path, plain_tokenizer, numbered | {"answer": 2})
    assert "⟦2" in render_row(found, 0, plain_tokenizer, color=False)
    assert any("is the label of one choice and the number of another" in line for line in found.noted)
    with pytest.raises(PlanError, match=r"field 'answer' is '0', none of the choices 1, 2, 3"):
        read(tmp_path, plain_tokenizer, numbered | {"answer": 0})
    with pytest.raises(PlanError, match=r"field 'answer' is 'x', 2 of the choices A, B, C. Give a letter"):
        read(tmp_path, plain_tokenizer, row | {"choices": ["x", "x", "y"], "answer": "x"})


def test_an_empty_history_is_none(tmp_path, chat_tokenizer):
    row = {"instruction": "Say", "input": "Hi", "output": "Yo"}
    without = read(tmp_path, chat_tokenizer, row)
    for history in ("", " ", "[]", []):
        assert read(tmp_path, chat_tokenizer, row | {"history": history}).digest() == without.digest()
    pairs = [["Hello", "Hi."]]
    as_text = read(tmp_path, chat_tokenizer, row | {"history": json.dumps(pairs)})
    assert as_text.digest() == read(tmp_path, chat_tokenizer, row | {"history": pairs}).digest() != without.digest()


@pytest.mark.parametrize(
    ("parts", "is_said"), [(("Line one.", "Line two."), True), (("3 ", "4"), False), (("3",), False)]
)
def test_parts_of_a_message_that_meet_are_a_line(parts, is_said, tmp_path, chat_tokenizer):
    answer = {"role": "assistant", "content": [{"type": "text", "text": text} for text in parts]}
    noted = read(tmp_path, chat_tokenizer, {"messages": [{"role": "user", "content": "q"}, answer]}).noted
    assert ("the texts of a message's parts are joined as they are, without a space" in noted) is is_said


def test_what_a_template_leaves_out_of_a_tool_is_said_or_refused(tmp_path, make_tokenizer):
    tool = {"type": "function", "function": {"name": "get", "description": "d", "parameters": {"type": "object"}}}
    left_out = {"the parameters of a tool are left out by the chat template": 1}
    for written, noted in (
        ("{% for t in tools or [] %}{{ t.function.name }}{% endfor %}", left_out),
        ("{% for t in tools or [] %}{{ t.function.name }}{{ t.function.parameters }}{% endfor %}", {}),
        ("{% for t in tools or [] %}{{ t.function | tojson(indent=2) }}{% endfor %}", {}),
        ("{{ tools | tojson if tools else '' }}", {}),
        ("{{ tools }}", {}),
    ):
        tokenizer = make_tokenizer(tmp_path / "t", chat_template=written + WITH_THOUGHTS)
        assert read(tmp_path, tokenizer, CHAT | {"tools": [tool]}).noted == noted, written
    kind = "{% for t in tools or [] %}{{ t.type }}{% endfor %}"
    tokenizer = make_tokenizer(tmp_path / "u", chat_template=kind + WITH_THOUGHTS)
    with pytest.raises(PlanError, match="does not render tools"):
        read(tmp_path, tokenizer, CHAT | {"tools": [tool]})
    assert read(tmp_path, tokenizer, CHAT | {"tools": [tool]}, ignored=("tools",)).num_rows == 1


ASKED = "Give me three tips to stay healthy, please."
ANSWER = "Eat well, sleep enough and walk every day."
ALPACA = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\n{}\n\n### Input:\n{}\n\n### Response:\n{}"
)
INSTRUCTED = {"instruction": ASKED, "input": "I am old.", "output": ANSWER}
TOLD = {"messages": [{"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWER}]}
SHARED = {"conversations": [{"from": "human", "value": ASKED}, {"from": "gpt", "value": ANSWER}]}


@pytest.mark.parametrize(
    "row",
    [
        INSTRUCTED | {"text": ALPACA.format(*INSTRUCTED.values())},
        SHARED | {"text": f"<|start|>user\n{ASKED}<|end|>\n<|start|>assistant\n{ANSWER}<|end|>"},
        INSTRUCTED | {"seed": "def foo(a, b): return a + b", "lang": "python"},
        INSTRUCTED | {"input_output": '{"inputs": ["1 2 3"], "outputs": ["3 2 1"]}', "difficulty": "interview"},
        INSTRUCTED | {"human_verified": False, "answer_from": "human", "metadata": {"a": "some text of four words"}},
        {"question": ASKED, "answer": ANSWER, "code": 4021, "document_title": "The history of health in Europe"},
        {"question": ASKED, "answer": ANSWER, "reasoning_types": "Numerical reasoning | Multiple constraints"},
        TOLD | {"prompt": ASKED, "solution": ANSWER, "source": "synthetic_math"},
        TOLD | {"reasoning": "Eat well, sleep enough", "openai_moderation": [{"flagged": False, "scores": {"a": 0.1}}]},
        TOLD | {"turn": 1, "toxic": False, "redacted": True, "header": {"user-agent": "Mozilla/5.0 (Windows NT 10.0)"}},
        {
            "messages": [
                TOLD["messages"][0] | {"ts": "Mon Nov 28 23:32:46 2026", "device": "a phone of last year"},
                TOLD["messages"][1],
            ]
        },
        {"messages": [TOLD["messages"][0], TOLD["messages"][1] | {"thought": "Eat well,\n", "agent": "main"}]},
        {"messages": [TOLD["messages"][0] | {"info": {"reference_answer": "3"}}, TOLD["messages"][1]]},
    ],
)
def test_rows_as_many_data_sets_have_them_are_read(row, tmp_path, chat_tokenizer):
    """Alpaca's, OSS-Instruct's, NuminaMath's, WildChat's, of SWE-agent, and others: what is beside them is there
    already, or about them.
    """
    assert read(tmp_path, chat_tokenizer, row).num_rows == 1


def test_a_code_is_no_program(tmp_path, plain_tokenizer):
    for more in ({"code": "J45.0"}, {"code": "en-US"}, {"schema": "v2"}):
        assert read(tmp_path, plain_tokenizer, QNA | more).num_rows == 1
    for more in ({"code": "print(1)"}, {"code": "x = 1"}, {"schema": "CREATE TABLE lamps"}):
        with pytest.raises(PlanError, match="may be a part of the prompt"):
            read(tmp_path, plain_tokenizer, QNA | more)


def test_a_text_that_says_more_than_its_row_is_refused(tmp_path, plain_tokenizer):
    about = (
        "The lamp on the desk is red and as tall as a large cat that sits upright, which is about forty centimetres; "
    )
    with pytest.raises(PlanError, match="column 'text' may be a part of the prompt"):
        read(tmp_path, plain_tokenizer, QNA | {"text": f"{about * 2}How tall? 40 cm."})
    with pytest.raises(PlanError, match="column 'text' may be a part of the prompt"):
        read(tmp_path, plain_tokenizer, QNA | {"text": "How tall? 41 cm."})


@pytest.mark.parametrize("value", ["on", "off", True, False])
def test_a_switch_is_not_an_explanation(value, tmp_path, chat_tokenizer):
    with pytest.raises(PlanError, match="column 'reasoning' may say whether the answer thinks"):
        read(tmp_path, chat_tokenizer, CHAT | {"reasoning": value})
    assert read(tmp_path, chat_tokenizer, CHAT | {"thinking": 512}).num_rows == 1


@pytest.mark.parametrize(
    "values",
    [
        {"tests_passed": (True, False)},
        {"verdict_of_judge": ("fine", "rejected")},
        {"meta": ({"flagged": False}, {"flagged": True})},
        {"http_status": (200, 429)},
        {"story": ("Lamps", "A lamp was 40 cm tall.")},
        {"question": ("How tall?", '[{"role": "user", "content": "Hi"}]')},
    ],
)
def test_a_later_row_is_judged_before_anything_is_loaded(values, tmp_path):
    """Whatever its columns' names are: the first row's values say nothing of it."""
    rows = [QNA | {name: value[i] for name, value in values.items()} for i in (0, 1)]
    raw = read_rows(jsonl(tmp_path / "a.jsonl", rows))
    with pytest.raises(PlanError, match="a.jsonl:2: "):
        check_columns(raw, RowOptions(), "--dataset a")


@pytest.mark.parametrize("values", [(True, False), ("True", "false"), (False, None, True)])
def test_a_column_that_says_yes_of_some_rows_is_refused_by_whatever_name(values, tmp_path):
    raw = read_rows(jsonl(tmp_path / "a.jsonl", [QNA | {"zorp": value} for value in values]))
    last = str(values[-1]).lower()
    with pytest.raises(
        PlanError, match=rf"a.jsonl:{len(values)}: column 'zorp' is {last}, and the other in rows above"
    ):
        check_columns(raw, RowOptions(), "--dataset a")
    check_columns(raw, RowOptions(ignored=("zorp",)), "--dataset a")


# Of OpenHermes, WildChat, Nectar, WildGuard, the Arena, Self-Instruct, SQuAD, Amazon's reviews, The Stack and Reddit.
OF_KNOWN_DATASETS = ("custom_instruction", "skip_prompt_formatting", "redacted", "good_natured", "adversarial", "anony")
OF_KNOWN_DATASETS += ("is_classification", "is_impossible", "verified_purchase", "is_vendor", "over_18")


@pytest.mark.parametrize(
    "more", [{"zorp": True}, {"zorp": 1}, {"has_code": True}, *({name: True} for name in OF_KNOWN_DATASETS)]
)
def test_what_all_rows_say_counts_and_what_a_text_has_are_a_line(more, tmp_path):
    others = {name: value if name == "zorp" else False for name, value in more.items()}
    if more == {"zorp": 1}:
        others = {"zorp": 0}
    raw = read_rows(jsonl(tmp_path / "a.jsonl", [QNA | more, QNA | others]))
    check_columns(raw, RowOptions(), "--dataset a")
