"""What a turn teaches, by templates of each form that models publish: its text, its end, and what a line says."""

import codecs
import copy
import itertools
import json

import pytest
import tokenizers
import transformers
from tokenizers.processors import TemplateProcessing

from finetune.config import TrainConfig
from finetune.data.built_in_templates import BUILT_IN
from finetune.data.chat_template import marks_of, named_template
from finetune.data.collate import microbatches
from finetune.data.columns import RowOptions, RowReader
from finetune.data.fit_template import fit_template, prepare_template
from finetune.data.held_out import split_document
from finetune.data.reading.rows import RawDataset
from finetune.data.tokens.overlong import Cut
from finetune.data.tokens.tokenize import generation_examples, joined_datasets, render_sample, tokenize
from finetune.errors import PlanError
from finetune.model_files.tokenizer import load_tokenizer, opened_ids
from finetune.parts.data import DataPlan
from tests.support.chats import with_template
from tests.support.sentencepiece_bases import write_sentencepiece
from tests.support.templates import R1


@pytest.mark.parametrize("value", ["26/07/2024", "{{ 7 }}", '"%}', "a{# b", 3, 0.5])
def test_a_value_that_every_row_sets_is_no_code_of_the_template(chat_tokenizer, value):
    template = "{% if not day is defined %}{% set day = 'today' %}{% endif %}<{{ day }}>" + CHATML
    tokenizer = with_template(chat_tokenizer, template)
    read = RowReader(RowOptions()).read({"messages": [ASK, PEAR], "chat_template_kwargs": {"day": value}}, "a.jsonl:1")
    notice = fit_template(tokenizer, lambda: [read])
    assert notice is not None and "day is" in notice
    asked = tokenizer.apply_chat_template([ASK], tokenize=False, add_generation_prompt=True)
    assert asked == tokenizer.apply_chat_template([ASK], tokenize=False, add_generation_prompt=True, day=value)
    assert asked.startswith(f"<{value}>")
    tokenizer = with_template(chat_tokenizer, template)
    read = RowReader(RowOptions()).read({"messages": [ASK, PEAR], "chat_template_kwargs": {"day": ["a"]}}, "a.jsonl:1")
    assert "every row sets day, which is not saved" in (fit_template(tokenizer, lambda: [read]) or "")


def with_two_line_breaks(tokenizer, own: bool = False):
    """The tokenizer with a token of two line breaks, which are apart from words, as Qwen's are, or with its `own`
    pre-tokenizer.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model = content["model"]
    pair = ["\u010a", "\u010a"]
    (rare,) = ["".join(model["merges"].pop())]
    model["vocab"]["".join(pair)] = model["vocab"].pop(rare)
    model["merges"].insert(0, pair)
    bytes_of = content["pre_tokenizer"]
    split = {"type": "Split", "pattern": {"Regex": r"[\r\n]+|[^\r\n]+"}, "behavior": "Isolated", "invert": False}
    if not own:
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, bytes_of | {"use_regex": False}]}
    tokenizer._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    return tokenizer


BEGIN = "{% for m in messages %}"
END = "{% endfor %}{% if add_generation_prompt %}"
ASKED = "<|im_start|>user\nA fruit?<|im_end|>\n<|im_start|>assistant\n"
ASK = {"role": "user", "content": "A fruit?"}
PEAR = {"role": "assistant", "content": "A pear."}
PLUM = {"role": "assistant", "content": "A plum."}
SYSTEM = {"role": "system", "content": "Be short."}
THOUGHT = {"role": "assistant", "content": "A pear.", "reasoning_content": "Pears are fruit."}
AGAIN = {"role": "user", "content": "Another?"}
TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
THINKS = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"

# The generation prompt opens a thought; answers have none, and no switch says so (DeepSeek-R1's distills).
OPENS = BEGIN + TURN + END + "<|im_start|>assistant\n<think>\n{% endif %}"
# The same, put together from pieces that no search in the source finds.
OPENS_IN_PIECES = BEGIN + TURN + END + "<|im_start|>assistant\n{{ '<' + 'think>' }}{% endif %}"
# The generation prompt closes an empty thought unless a switch is on (Gemma 4).
CLOSES = (
    BEGIN + "<|im_start|>{{ m.role }}\n" + THINKS + "{{ m.content }}<|im_end|>\n" + END + "<|im_start|>assistant\n"
    "{% if not enable_thinking | default(false) %}<think></think>{% endif %}{% endif %}"
)
# A switch that is on by default; a plain answer has an empty thought (Nemotron 3).
SWITCHED = (
    BEGIN + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>"
    "{% if m.reasoning_content %}{{ '\n' + m.reasoning_content }}{% endif %}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n"
    + END
    + "<|im_start|>assistant\n<think>{{ '\n' if enable_thinking | default(true) else '</think>' }}{% endif %}"
)
# The next role's marker is where an answer stops, another one where a tool call does (GLM 4.5).
NEXT_ROLE = (
    BEGIN + "{% if m.role == 'tool' %}</s>{{ m.content }}{% elif m.role == 'user' %}<|im_start|>{{ m.content }}"
    "{% else %}<|im_end|>{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "{% endif %}" + END + "<|im_end|>{% endif %}"
)
# The system prompt goes into the last turn of the user, so that an answered one has none (Mistral v3).
MOVES_SYSTEM = (
    "{% set told = messages[0].content if messages[0].role == 'system' else '' %}" + BEGIN + "{% if m.role == 'user' %}"
    "[INST]{{ told + ' ' if loop.last and told else '' }}{{ m.content }}[/INST]{% elif m.role == 'assistant' %}"
    "{{ m.content }}</s>{% endif %}{% endfor %}"
)
# Contents are lists of parts only, as of vision-language models.
PARTS = (
    BEGIN + "<|im_start|>{{ m.role }}\n{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>\n{% endfor %}"
)
# The whole ends with EOS, in the middle turns do not (Phi 3).
EOS_LAST = BEGIN + TURN + "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}</s>{% endif %}"
# The generation prompt is written after every chat, asked for or not (Command A).
ALWAYS_ASKS = BEGIN + TURN + "{% endfor %}<|im_start|>assistant\n"
# Turns end with plain text.
PLAIN_END = BEGIN + "{{ m.role }}: {{ m.content }}\n" + END + "assistant:{% endif %}"


def shown(tokenizer, template: str, row: dict, **options) -> tuple[list[str], list[str]]:
    """(the documents with their targets marked, the lines) of a row by a template that was made to fit it."""
    tokenizer = with_template(tokenizer, template)
    how = RowOptions(**options)
    notice = fit_template(tokenizer, lambda: [RowReader(how).read(row, "row")])
    raw = RawDataset([row], ["row"], tuple(row), (), "", "rows", 0)
    dataset = tokenize(raw, how, tokenizer, 512)
    documents = [render_sample(dataset, i, tokenizer, color=False) for i in range(len(dataset))]
    return documents, [*dataset.notices, *([notice] if notice else [])]


@pytest.mark.parametrize(
    ("template", "turns", "expected"),
    [
        (OPENS, [ASK, PEAR], [ASKED + "⟦A pear.<|im_end|>⟧"]),
        (OPENS_IN_PIECES, [ASK, PEAR], [ASKED + "⟦A pear.<|im_end|>⟧"]),
        (CLOSES, [ASK, PEAR], [ASKED + "⟦A pear.<|im_end|>⟧"]),
        (CLOSES, [ASK, THOUGHT], [ASKED + "⟦<think>Pears are fruit.</think>A pear.<|im_end|>⟧"]),
        (SWITCHED, [ASK, PEAR], [ASKED + "<think></think>⟦A pear.<|im_end|>⟧"]),
        (SWITCHED, [ASK, THOUGHT], [ASKED + "<think>\n⟦Pears are fruit.</think>A pear.<|im_end|>⟧"]),
        (
            NEXT_ROLE,
            [ASK, PEAR, AGAIN, PLUM],
            ["<|im_start|>A fruit?<|im_end|>⟦A pear.<|im_start|>⟧Another?<|im_end|>⟦A plum.<|im_start|>⟧"],
        ),
        (MOVES_SYSTEM, [SYSTEM, ASK, PEAR], ["[INST]Be short. A fruit?[/INST]⟦A pear.</s>⟧"]),
        (
            MOVES_SYSTEM,
            [SYSTEM, ASK, PEAR, AGAIN, PLUM],
            [
                "[INST]Be short. A fruit?[/INST]⟦A pear.</s>⟧",
                "[INST]A fruit?[/INST]A pear.</s>[INST]Be short. Another?[/INST]⟦A plum.</s>⟧",
            ],
        ),
        (PARTS, [ASK, PEAR], ["<|im_start|>user\nA fruit?<|im_end|>\n⟦<|im_start|>assistant\nA pear.<|im_end|>⟧"]),
        (
            EOS_LAST,
            [ASK, PEAR, AGAIN, PLUM],
            [
                ASKED + "⟦A pear.<|im_end|>⟧\n"
                "<|im_start|>user\nAnother?<|im_end|>\n<|im_start|>assistant\n⟦A plum.<|im_end|>⟧"
            ],
        ),
        (
            PLAIN_END,
            [ASK, PEAR, AGAIN, PLUM],
            [
                "user: A fruit?\nassistant:⟦ A pear.\n</s>⟧",
                "user: A fruit?\nassistant: A pear.\nuser: Another?\nassistant:⟦ A plum.\n</s>⟧",
            ],
        ),
    ],
    ids=range(12),
)
def test_of_each_form_of_template_the_answer_and_its_end_are_learned(chat_tokenizer, template, turns, expected):
    documents, _ = shown(chat_tokenizer, template, {"messages": turns})
    assert documents == expected


def test_a_generation_prompt_that_is_always_written_is_not_learned(chat_tokenizer):
    (document,), _ = shown(chat_tokenizer, ALWAYS_ASKS, {"messages": [ASK, PEAR]})
    assert document.endswith("A pear.<|im_end|>⟧") and document.count("⟦") == 1


def test_a_tool_call_ends_with_the_marker_of_its_result(chat_tokenizer):
    call = {"id": "call00001", "type": "function", "function": {"name": "fruit", "arguments": {"sort": "red"}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": "cherry", "tool_call_id": "call00001"}
    row = {"messages": [ASK, called, result, PEAR]}
    (document,), _ = shown(chat_tokenizer, NEXT_ROLE, row)
    assert '"red"}}</s>⟧cherry<|im_end|>⟦A pear.<|im_start|>⟧' in document
    marks = marks_of(with_template(chat_tokenizer, NEXT_ROLE))
    assert marks.stops() == {"<|im_start|>", "</s>"}


@pytest.mark.parametrize("template", [OPENS, OPENS_IN_PIECES, CLOSES, SWITCHED])
def test_the_template_that_is_saved_asks_as_the_rows_answer(chat_tokenizer, template):
    """What generate.py, score.py and other programs ask with: transformers' own rendering of the saved template."""
    tokenizer = with_template(chat_tokenizer, template)
    row = {"messages": [ASK, PEAR]}
    notice = fit_template(tokenizer, lambda: [RowReader().read(row, "row")])
    prompt = tokenizer.apply_chat_template([ASK], add_generation_prompt=True, tokenize=False)
    whole = tokenizer.apply_chat_template([ASK, PEAR], tokenize=False)
    assert whole.startswith(prompt) and whole.removeprefix(prompt).startswith("A pear.")
    assert notice and "saved with the tokenizer" in notice
    saved = tokenizer.chat_template
    assert fit_template(tokenizer, lambda: [RowReader().read(row, "row")]) is None and tokenizer.chat_template == saved


@pytest.mark.parametrize("template", [SWITCHED, CLOSES])
def test_a_program_that_asks_for_thoughts_is_answered_as_in_training(chat_tokenizer, template):
    """mlx-lm sets the switch for every model that knows thoughts."""
    tokenizer = with_template(chat_tokenizer, template)
    fit_template(tokenizer, lambda: [RowReader().read({"messages": [ASK, PEAR]}, "row")])
    ask = dict(add_generation_prompt=True, tokenize=False)
    assert tokenizer.apply_chat_template([ASK], enable_thinking=True, **ask) == tokenizer.apply_chat_template(
        [ASK], **ask
    )


def test_a_switch_that_some_rows_set_can_still_be_set(chat_tokenizer):
    tokenizer = with_template(chat_tokenizer, SWITCHED)
    rows = [{"messages": [ASK, PEAR]}, {"messages": [ASK, THOUGHT], "chat_template_kwargs": {"enable_thinking": True}}]
    fit_template(tokenizer, lambda: [RowReader().read(row, "row") for row in rows])
    ask = dict(add_generation_prompt=True, tokenize=False)
    assert tokenizer.apply_chat_template([ASK], **ask).endswith("<think></think>")
    assert tokenizer.apply_chat_template([ASK], enable_thinking=True, **ask).endswith("<think>\n")


def test_rows_with_and_without_thoughts_are_asked_alike(chat_tokenizer):
    """Then the prompt is what both have, and a thought is the model's choice."""
    tokenizer = with_template(chat_tokenizer, CLOSES)
    rows = [{"messages": [ASK, PEAR]}, {"messages": [ASK, THOUGHT]}]
    assert "<think></think>" in fit_template(tokenizer, lambda: [RowReader().read(row, "row") for row in rows])
    prompt = tokenizer.apply_chat_template([ASK], add_generation_prompt=True, tokenize=False)
    assert prompt.endswith("assistant\n")


def test_of_named_templates_each_is_made_to_ask_as_its_own_rows_answer(chat_tokenizer):
    tools = "{% if tools %}{{ tools | length }}{% endif %}"
    tokenizer = with_template(chat_tokenizer, {"default": OPENS, "tool_use": tools + OPENS_IN_PIECES})
    schema = {"type": "function", "function": {"name": "look", "parameters": {}}}
    rows = [{"messages": [ASK, PEAR]}, {"messages": [ASK, PEAR], "tools": [schema]}]
    notice = fit_template(tokenizer, lambda: [RowReader().read(row, "row") for row in rows])
    assert notice and set(tokenizer.chat_template) == {"default", "tool_use"}
    for given in (None, [schema]):
        asked = tokenizer.apply_chat_template([ASK], tools=given, add_generation_prompt=True, tokenize=False)
        assert asked.endswith("assistant\n")


def test_a_switch_that_the_template_does_not_read_leaves_the_row_as_without_it(chat_tokenizer):
    row = {"messages": [ASK, PEAR], "chat_template_kwargs": {"enable_thinking": False}}
    (document,), _ = shown(chat_tokenizer, OPENS, row)
    assert document.startswith(f"{ASKED}⟦A pear.<|im_end|>")


@pytest.mark.parametrize("template", [OPENS, SWITCHED])
def test_rows_that_a_head_reads_have_no_answers_that_decide_a_template(chat_tokenizer, template):
    """Chats with a label ended in a KeyError beside such a template."""
    tokenizer = with_template(chat_tokenizer, template)
    rows = [{"text": [ASK], "label": "a"}, {"text": "b", "label": ["a", "b"]}]
    reader = RowReader(RowOptions(task="classify"))
    fit_template(tokenizer, lambda: [reader.read(row, "row") for row in rows])
    assert tokenizer.chat_template == template


def test_a_template_that_fits_by_itself_is_not_touched_and_one_row_is_read(chat_tokenizer):
    def rows():
        yield RowReader(RowOptions()).read({"messages": [ASK, PEAR]}, "a.jsonl:1")
        raise AssertionError

    before = chat_tokenizer.chat_template
    assert fit_template(chat_tokenizer, rows) is None and chat_tokenizer.chat_template == before


def test_what_every_row_sets_is_what_a_program_asks_with_that_sets_nothing(chat_tokenizer):
    def fitted(values):
        tokenizer = with_template(chat_tokenizer, CLOSES)
        rows = [{"messages": [ASK, PEAR], "chat_template_kwargs": {"enable_thinking": value}} for value in values]
        reader = RowReader(RowOptions())
        notice = fit_template(tokenizer, lambda: [reader.read(row, f"a.jsonl:{i}") for i, row in enumerate(rows)])
        return tokenizer, notice

    tokenizer, notice = fitted((True, True))
    assert notice is not None and notice.startswith("chat template: enable_thinking is true where a program does not")
    asked = [tokenizer.apply_chat_template([ASK], tokenize=False, add_generation_prompt=True)]
    asked += [
        tokenizer.apply_chat_template([ASK], tokenize=False, add_generation_prompt=True, enable_thinking=value)
        for value in (True, False)
    ]
    assert [text.endswith("<think></think>") for text in asked] == [False, False, True]
    again = tokenizer.chat_template
    reader = RowReader(RowOptions())
    row = {"messages": [ASK, PEAR], "chat_template_kwargs": {"enable_thinking": True}}
    assert fit_template(tokenizer, lambda: [reader.read(row, "a.jsonl:1")]) is None  # as of a resumed run
    assert tokenizer.chat_template == again
    tokenizer = with_template(chat_tokenizer, CLOSES)
    said = fit_template(tokenizer, lambda: [reader.read(row, "a.jsonl:1")], are_all=False)
    assert said is not None and "the first rows set its switches" in said and tokenizer.chat_template == CLOSES
    for values in ((True, False), (False, False)):  # others; what it does by itself
        assert fitted(values)[0].chat_template == CLOSES


@pytest.mark.parametrize("end", ["\n", "\n\n", "\n\n\n", ":", ""])
def test_line_breaks_at_a_prompts_end_have_the_tokens_that_they_have_alone(plain_tokenizer, chat_tokenizer, end):
    """The pre-tokenizer of GPT-2 takes the last one for itself where a word follows."""
    template = (
        BEGIN + "<|im_start|>{{ m.role }}" + end + "{{ m.content }}<|im_end|>\n" + END + "<|im_start|>assistant" + end
    )
    rendered = with_template(chat_tokenizer, template + "{% endif %}")
    for tokenizer, row in (
        (plain_tokenizer, {"prompt": f"A fruit?{end}", "completion": "A pear."}),
        (rendered, {"messages": [ASK, PEAR]}),
    ):
        tokenizer = with_two_line_breaks(copy.deepcopy(tokenizer), own=True)
        raw = RawDataset([row], ["0"], tuple(row), (), "", "rows", 0)
        ids, is_target = tokenize(raw, RowOptions(), tokenizer, 512).document(0)
        if "messages" in row:
            asked = tokenizer.apply_chat_template([ASK], add_generation_prompt=True).input_ids
        else:
            asked = opened_ids(tokenizer, row["prompt"])
        size = len(asked)
        assert ids[:size].tolist() == asked and not is_target[:size].any() and is_target[size:].all()
        assert tokenizer.decode(ids[size:]).startswith("A pear.")
        ((prompt, expected, _),) = generation_examples(raw, RowOptions(), tokenizer)
        assert prompt == asked and expected == "A pear."


SWITCHES_OFF = "{% if enable_thinking is defined and enable_thinking is false %}{{ '\n' }}</think>\n\n{% endif %}"


@pytest.mark.parametrize("switch", ["", SWITCHES_OFF])
def test_the_tokens_of_a_prompt_are_those_that_programs_ask_with(chat_tokenizer, switch):
    """The prompt opens a thought, and answers without one close it at once: two line breaks would be one token."""
    template = BEGIN + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content }}\n"
    template += "</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n" + END + "<|im_start|>assistant\n<think>\n"
    tokenizer = with_two_line_breaks(with_template(chat_tokenizer, template + switch + "{% endif %}"))
    rows = [{"messages": [ASK, PEAR]}]
    read = [RowReader(RowOptions()).read(row, "a.jsonl:1") for row in rows]
    before = tokenizer.chat_template
    for how in (dict(are_learned=False), dict(are_all=False)):  # of a run by rewards, and of a stream
        assert fit_template(tokenizer, lambda: read, **how) is None and tokenizer.chat_template == before
    notice = fit_template(tokenizer, lambda: read)
    assert (notice is not None and "enable_thinking is false" in notice) is bool(switch)
    raw = RawDataset(rows, ["0"], tuple(rows[0]), (), "", "rows", 0)
    ((prompt, expected, _),) = generation_examples(raw, RowOptions(), tokenizer)
    assert prompt == tokenizer.apply_chat_template([ASK], add_generation_prompt=True).input_ids
    ids, is_target = tokenize(raw, RowOptions(), tokenizer, 512).document(0)
    size = len(prompt)
    assert ids[:size].tolist() == prompt and not is_target[:size].any() and is_target[size:].all()
    assert expected == ("A pear." if switch else "\n</think>\n\nA pear.")


@pytest.mark.parametrize("closed", ["</think>", "[/THINK]"])
def test_a_prompt_is_cut_before_a_mark_and_not_inside(chat_tokenizer, closed):
    """DeepSeek-V3.1's kind: answers begin with one of two marks, which share their first letter."""
    opened = closed.replace("/", "")
    answer = BEGIN + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% if m.reasoning_content %}" + opened
    answer += "{{ m.reasoning_content }}{% endif %}" + closed + "{% endif %}{{ m.content }}<|im_end|>\n" + END
    tokenizer = with_template(chat_tokenizer, answer + "<|im_start|>assistant\n" + closed + "{% endif %}")
    chats = [{"messages": [ASK, PEAR]}, {"messages": [ASK, PEAR | {"reasoning_content": "Pears are fruit."}]}]
    read = [RowReader(RowOptions()).read(row, "a.jsonl:1") for row in chats]
    assert fit_template(tokenizer, lambda: read) is not None
    asked = tokenizer.apply_chat_template([ASK], add_generation_prompt=True, tokenize=False)
    assert asked.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("thought", "expected"),
    [("<think>\n", "\n</think>\n\nA pear."), ("<think>\n\n</think>\n\n", "A pear."), ("<draft>", "A pear.")],
)
def test_a_run_by_rewards_is_asked_as_the_model_was(chat_tokenizer, thought, expected):
    """Templates leave thoughts out of answers. A prompt's end that is no thought is cut, so that rows can be read."""
    tokenizer = with_template(chat_tokenizer, CHATML.replace("assistant\n{%", "assistant\n" + thought + "{%"))
    template = tokenizer.chat_template
    assert thought in template
    rows = [{"messages": [ASK, PEAR]}]
    (read,) = [RowReader(RowOptions()).read(row, "a.jsonl:1") for row in rows]
    notice = fit_template(tokenizer, lambda: [read], are_learned=False)
    assert (notice is None and tokenizer.chat_template == template) is (thought != "<draft>")
    raw = RawDataset(rows, ["0"], ("messages",), (), "", "rows", 0)
    ((prompt, answer, _),) = generation_examples(raw, RowOptions(), tokenizer)
    assert prompt == tokenizer.apply_chat_template([ASK], add_generation_prompt=True).input_ids
    assert answer == expected


CLOSED = (
    BEGIN + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
)
CLOSED += "{% endif %}{{ m.content }}<|im_end|>\n" + END + "<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
OWN = CLOSED.replace("<think>\n{{ m.reasoning_content }}\n</think>\n\n", "<think></think>")
OWN = OWN.replace("<think>\n\n</think>\n\n{% endif %}", "<think>\n{% endif %}")


def test_an_empty_thought_of_a_row_by_rewards_is_its_prompt_s(chat_tokenizer):
    for template in (R1, OWN):
        for answer in ("A pear.", "<think></think>A pear."):
            if template == OWN and "think" in answer:
                continue
            tokenizer = with_template(chat_tokenizer, template.replace(".split('</think>')[-1]", ""))
            rows = [{"messages": [ASK, PEAR | {"content": answer}]}]
            read = [RowReader(RowOptions()).read(row, "a.jsonl:1") for row in rows]
            assert fit_template(tokenizer, lambda rows=read: rows, are_learned=False) is None
            raw = RawDataset(rows, ["0"], ("messages",), (), "", "rows", 0)
            ((_, expected, _),) = generation_examples(raw, RowOptions(), tokenizer)
            assert expected == "\n</think>\n\nA pear."


@pytest.mark.parametrize(
    ("template", "thoughts"), [*itertools.product((R1, CLOSED), ((False,), (True,), (False, True))), (OWN, (False,))]
)
def test_rows_by_rewards_are_read_whether_they_have_thoughts_or_not(chat_tokenizer, template, thoughts):
    tokenizer = with_template(chat_tokenizer, template)
    thought = THOUGHT
    if "reasoning_content" not in template:
        thought = PEAR | {"content": "<think>Pears are fruit.</think>A pear."}
    rows = [{"messages": [ASK, thought if thinks else PEAR]} for thinks in thoughts]
    read = [RowReader(RowOptions()).read(row, "a.jsonl:1") for row in rows]
    fit_template(tokenizer, lambda: read, are_learned=False)
    raw = RawDataset(rows, [str(i) for i in range(len(rows))], ("messages",), (), "", "rows", 0)
    for prompt, answer, _ in generation_examples(raw, RowOptions(), tokenizer):
        assert prompt == tokenizer.apply_chat_template([ASK], add_generation_prompt=True).input_ids
        assert answer.count("</think>") <= 1 and answer.endswith("A pear.")


def test_a_stream_is_asked_as_later_rows_with_thoughts_begin_too(chat_tokenizer):
    """Only line breaks are left out for them: a prompt that closes its thought is one of answers without."""
    answer = BEGIN + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content }}"
    answer += "\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n" + END + "<|im_start|>assistant\n<think>\n\n"
    for ending in ("", "</think>\n\n"):
        tokenizer = with_template(chat_tokenizer, answer + ending + "{% endif %}")
        (read,) = [RowReader(RowOptions()).read({"messages": [ASK, PEAR]}, "a.jsonl:1")]
        notice = fit_template(tokenizer, lambda row=read: [row], are_all=False)
        assert (notice is None) is bool(ending)
        asked = tokenizer.apply_chat_template([ASK], add_generation_prompt=True, tokenize=False)
        assert asked.endswith("<think>\n\n" + ending if ending else "assistant\n<think>\n")
    text = RowReader(RowOptions()).read({"text": "of no answer"}, "a.jsonl:1")
    tokenizer = with_template(chat_tokenizer, answer + "{% endif %}")
    assert fit_template(tokenizer, lambda: [text], are_all=False) is None


def test_what_a_template_leaves_out_of_an_answer_is_said(chat_tokenizer):
    words = (
        BEGIN
        + "{% set unused = m.reasoning_content, m.tool_calls %}"
        + TURN
        + END
        + "<|im_start|>assistant\n{% endif %}"
    )
    documents, lines = shown(chat_tokenizer, words, {"messages": [ASK, THOUGHT]})
    assert "Pears are fruit" not in documents[0]
    assert lines == ["the reasoning of an answer is altered or left out by the chat template: 1 x"]
    names = ("red", "green")
    calls = [{"function": {"name": "fruit", "arguments": {"sort": name}}} for name in names]
    first = words.replace("{{ m.content }}", "{{ m.content }}{{ (m.tool_calls or [''])[0] | tojson }}")
    _, lines = shown(chat_tokenizer, first, {"messages": [ASK, {**PEAR, "tool_calls": calls}]})
    assert lines == ["the tool call of an answer is altered or left out by the chat template: 1 x"]  # green


def test_a_rows_own_switches_are_obeyed(chat_tokenizer):
    row = {"messages": [ASK, PEAR], "chat_template_kwargs": {"enable_thinking": False}}
    (document,), lines = shown(chat_tokenizer, SWITCHED, row)
    assert "<think></think>⟦A pear." in document
    said = "chat template: enable_thinking is false where a program does not say, as in every row"
    assert [line.partition(";")[0] for line in lines] == [said]
    _, lines = shown(chat_tokenizer, SWITCHED, {**row, "chat_template_kwargs": '{"enable_thinking": false, "x": 1}'})
    assert lines[0] == "chat_template_kwargs 'x' is not read by the chat template: 1 x" and len(lines) == 2
    with pytest.raises(PlanError, match="^row: field 'chat_template_kwargs' sets messages, which"):
        shown(chat_tokenizer, SWITCHED, {**row, "chat_template_kwargs": {"messages": []}})
    with pytest.raises(PlanError, match="^row: field 'chat_template_kwargs' is a list, must be an object"):
        shown(chat_tokenizer, SWITCHED, {**row, "chat_template_kwargs": []})


CHATML = BEGIN + TURN + END + "<|im_start|>assistant\n{% endif %}"


def test_a_prompt_that_ends_with_the_beginning_of_the_answer_is_continued(chat_tokenizer):
    row = {
        "prompt": [ASK, {"role": "assistant", "content": "Sure:"}],
        "completion": [{"role": "assistant", "content": "a pear."}],
    }
    (document,), lines = shown(chat_tokenizer, CHATML, row)
    assert document.endswith("<|im_start|>assistant\nSure:⟦a pear.<|im_end|>⟧")
    assert lines == ["a prompt ends with the beginning of the assistant's answer, which is continued: 1 x"]


@pytest.mark.parametrize("content", ["A pear.", "  A pear.", "\nA pear."])
def test_a_mark_that_takes_the_whitespace_after_it_is_no_target(tmp_path, content):
    """The offsets of Phi-3's <|assistant|> in the text hold the whitespace that an answer begins with."""
    write_sentencepiece(tmp_path, transformers.LlamaTokenizer)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.chat_template = BEGIN + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n" + END + "<|assistant|>\n{% endif %}"
    how = dict(rstrip=True, special=True, normalized=False)
    marks = [tokenizers.AddedToken(text, **how) for text in ("<|user|>", "<|assistant|>", "<|end|>")]
    tokenizer.add_special_tokens({"extra_special_tokens": marks})
    rows = [{"messages": [ASK, PEAR | {"content": content}]}]
    raw = RawDataset(rows, ["0"], tuple(rows[0]), (), "", "rows", 0)
    dataset = tokenize(raw, RowOptions(), tokenizer, 512)
    assert render_sample(dataset, 0, tokenizer, False).endswith("<|assistant|>⟦A pear.<|end|>⟧")
    ((prompt, expected, _),) = generation_examples(raw, RowOptions(), tokenizer)
    assert expected == "A pear." and tokenizer.decode(prompt).endswith("<|assistant|>")


@pytest.mark.parametrize("row", [{"prompt": "q:", "completion": "yes"}, {"text": "yes"}])
def test_what_a_tokenizer_puts_after_each_text_is_no_end_of_an_answer(plain_tokenizer, row):
    """The token that Qwen3-Embedding's puts there is not its EOS."""
    tokenizer = copy.deepcopy(plain_tokenizer)
    pad = "<s>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {pad}", special_tokens=[(pad, tokenizer.convert_tokens_to_ids(pad))]
    )
    raw = RawDataset([row], ["0"], tuple(row), (), "", "rows", 0)
    shown = render_sample(tokenize(raw, RowOptions(), tokenizer, 512), 0, tokenizer, False)
    assert shown.endswith("es</s>⟧") and pad not in shown[3:]


def test_a_turn_of_the_completion_that_is_not_learned_stays_a_turn(chat_tokenizer):
    answers = [{"role": "assistant", "content": "Wait.", "weight": 0}, PEAR]
    (document,), lines = shown(chat_tokenizer, CHATML, {"prompt": [ASK], "completion": answers})
    assert document.endswith("<|im_start|>assistant\nWait.<|im_end|>\n<|im_start|>assistant\n⟦A pear.<|im_end|>⟧")
    assert lines == []


STRIPS = NEXT_ROLE.replace("{{ m.content }}{% for c", "{{ m.reasoning_content if loop.last }}{{ m.content }}{% for c")


def test_an_answer_whose_thought_is_stripped_later_ends_with_the_next_roles_marker_too(chat_tokenizer):
    turns = [ASK, THOUGHT, AGAIN, {**PLUM, "reasoning_content": "So are plums."}]
    documents, _ = shown(chat_tokenizer, STRIPS, {"messages": turns})
    assert [text.rpartition("⟦")[2] for text in documents] == [
        "Pears are fruit.A pear.<|im_start|>⟧",
        "So are plums.A plum.<|im_start|>⟧",
    ]


def test_a_developers_message_is_the_system_prompt_of_a_template_that_does_not_know_the_role(chat_tokenizer):
    (document,), lines = shown(chat_tokenizer, CHATML, {"messages": [{**SYSTEM, "role": "developer"}, ASK, PEAR]})
    assert document.startswith("<|im_start|>system\nBe short.<|im_end|>") and lines == []


def test_only_the_last_turn_is_learned_if_asked(chat_tokenizer):
    (document,), _ = shown(chat_tokenizer, CHATML, {"messages": [ASK, PEAR, AGAIN, PLUM]}, last_turn=True)
    assert document.count("⟦") == 1 and document.endswith("⟦A plum.<|im_end|>⟧")
    rows = [{"messages": [ASK, PEAR, AGAIN, PLUM | {"weight": 0}]}, {"messages": [ASK, PEAR]}]
    raw = RawDataset(rows, ["0", "1"], tuple(rows[0]), (), "", "rows", 0)
    how = RowOptions(last_turn=True)
    assert tokenize(raw, how, with_template(chat_tokenizer, CHATML), 512).num_rows == 1  # the pear is context


def test_an_answer_that_is_context_may_differ_from_what_the_generation_prompt_begins(chat_tokenizer):
    """Targets without thoughts switch them off, which closes an empty one in the prompt of an earlier answer."""
    rows = {"messages": [ASK, THOUGHT, AGAIN, PLUM]}
    template = CLOSES.replace(
        "{{ m.content }}",
        "{% if not m.reasoning_content and m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}",
    )
    (document,), _ = shown(chat_tokenizer, template, rows, last_turn=True)
    assert "<think>Pears are fruit.</think>A pear." in document
    assert document.count("⟦") == 1 and document.endswith("⟦A plum.<|im_end|>⟧")


@pytest.mark.parametrize(
    "answer", [THOUGHT, {"role": "assistant", "content": "<think>Pears are fruit.</think>A pear."}]
)
def test_reasoning_is_context_only_if_asked(chat_tokenizer, answer):
    template = CHATML.replace("{{ m.content }}", THINKS + "{{ m.content }}")
    (document,), _ = shown(chat_tokenizer, template, {"messages": [ASK, answer]}, mask_reasoning=True)
    assert document.endswith("<think>Pears are fruit.⟦</think>A pear.<|im_end|>⟧")
    (document,), _ = shown(chat_tokenizer, template, {"messages": [ASK, answer]})
    assert document.endswith("⟦<think>Pears are fruit.</think>A pear.<|im_end|>⟧")


def test_what_is_asked_has_no_thought_of_the_row(chat_tokenizer):
    """Thoughts that are not learned are in no prompt of a score, a sample or a reward: they tell the answer."""
    tokenizer = with_template(chat_tokenizer, CHATML.replace("{{ m.content }}", THINKS + "{{ m.content }}"))
    asked = tokenizer.apply_chat_template([ASK], add_generation_prompt=True).input_ids
    options = RowOptions(mask_reasoning=True)
    twice = {"messages": [ASK, THOUGHT, ASK, THOUGHT]}
    raw = RawDataset([twice, {"messages": [ASK, THOUGHT]}], ["0", "1"], ("messages",), (), "", "rows", 0)
    right = "<think></think>A pear."
    for prompt, expected, _ in generation_examples(raw, options, tokenizer):
        assert prompt[-len(asked) :] == asked and expected == right
    whole = tokenize(raw, options, tokenizer, 512)
    (batch,) = microbatches(whole, range(len(whole)), "padded", 8, 10**6, pad_id=0)
    assert not batch.arrays  # no engine reads where answers begin
    cut = tokenize(raw, options, tokenizer, len(asked) + 40)
    split = tokenize(raw, options, tokenizer, Cut(len(whole.document(0)[0]) - 2, "split"))
    assert split_document(split, 0, tokenizer, {tokenizer.eos_token_id})[0][-len(asked) :] == asked
    for rows in (whole, whole.select([1, 0]), joined_datasets([whole, whole], [("a", None), ("b", None)]), cut):
        for document in range(len(rows)):
            prompt, expected = split_document(rows, document, tokenizer, {tokenizer.eos_token_id})
            assert prompt[-len(asked) :] == asked[-len(prompt) :] and expected.removesuffix("<|im_end|>") == right


def test_a_thought_with_other_marks_stays_in_what_is_asked_and_is_said(chat_tokenizer):
    """The text after a model's own thought is known of <think> alone: else no answer would be right."""
    thinks = THINKS.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
    tokenizer = with_template(chat_tokenizer, CHATML.replace("{{ m.content }}", thinks + "{{ m.content }}"))
    rows = [{"messages": [ASK, THOUGHT]}]
    raw = RawDataset(rows, ["0"], ("messages",), (), "", "rows", 0)
    options = RowOptions(mask_reasoning=True)
    ((prompt, expected, _),) = generation_examples(raw, options, tokenizer)
    assert tokenizer.decode(prompt).endswith("[THINK]Pears are fruit.") and expected == "[/THINK]A pear."
    assert any("whose marks are not <think>" in line for line in tokenize(raw, options, tokenizer, 512).notices)


@pytest.mark.parametrize(
    ("content", "argument"), [("", "a pear"), ("a pear", "a pear"), ("", "a pear fruit"), ("", "x")]
)
def test_a_thought_whose_words_a_call_has_too_hides_no_call(chat_tokenizer, content, argument):
    call = {"function": {"name": "fruit", "arguments": {"of": argument}}}
    answer = {"role": "assistant", "content": content, "reasoning_content": "a pear", "tool_calls": [call]}
    template = CHATML.replace("{{ m.content }}", THINKS + "{{ m.content }}{{ (m.tool_calls or [''])[0] | tojson }}")
    (document,), _ = shown(chat_tokenizer, template, {"messages": [ASK, answer]}, mask_reasoning=True)
    assert "<think>a pear⟦</think>" in document and document.count("⟦") == 1


def test_a_thought_in_two_equal_calls_hides_neither(chat_tokenizer):
    call = {"function": {"name": "fruit", "arguments": {"of": "a pear"}}}
    answer = {"role": "assistant", "content": "", "reasoning_content": "a pear", "tool_calls": [call, call]}
    template = CHATML.replace("{{ m.content }}", THINKS + "{{ m.content }}{{ (m.tool_calls or []) | tojson }}")
    (document,), _ = shown(chat_tokenizer, template, {"messages": [ASK, answer]}, mask_reasoning=True)
    assert "<think>a pear⟦</think>" in document and document.count("⟦") == 1


@pytest.mark.parametrize("thought", ["pear", "A pear.", "think", "n"])
def test_a_thought_that_the_answer_or_a_mark_repeats_hides_neither(chat_tokenizer, thought):
    """Its words elsewhere are no thought; with a template that leaves thoughts out, that is said."""
    answer = {"role": "assistant", "content": "A pear.", "reasoning_content": thought}
    rows = {"messages": [ASK, answer]}
    (document,), lines = shown(chat_tokenizer, CHATML + "{# reasoning_content #}", rows, mask_reasoning=True)
    assert document.endswith("<|im_start|>assistant\n⟦A pear.<|im_end|>⟧")
    assert any("the reasoning of an answer is altered or left out" in line for line in lines)
    template = CHATML.replace("{{ m.content }}", THINKS + "{{ m.content }}")
    (document,), _ = shown(chat_tokenizer, template, rows, mask_reasoning=True)
    assert document.endswith(f"<think>{thought}⟦</think>A pear.<|im_end|>⟧")


@pytest.mark.parametrize("system", [[], [SYSTEM]])
def test_a_greeting_that_nobody_asked_for_is_context_with_and_without_a_system_prompt(chat_tokenizer, system):
    greeting = {"role": "assistant", "content": "Hello!"}
    (document,), lines = shown(chat_tokenizer, CHATML, {"messages": [*system, greeting, ASK, PEAR]})
    assert "Hello!" in document and document.count("⟦") == 1 and document.endswith("⟦A pear.<|im_end|>⟧")
    assert lines == ["a conversation begins with the assistant: that message is context, not an answer: 1 x"]


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        ("{% for m in messages %}{{ m.content ", "is not a valid template (unexpected end"),
        ("{{ 'always the same' }}", "does not render a question and its answer. Give a chat template."),
        ("", "has 0 characters, must have 1 to "),
        (None, "is neither a file nor a built-in template. Use chatml, llama3, "),
    ],
)
def test_a_chat_template_that_is_none_is_refused_before_anything_is_loaded(plain_run, tmp_path, content, fact):
    file = tmp_path / "chat.jinja"
    if content is not None:
        file.write_text(content)
    with pytest.raises(PlanError) as refused:
        plain_run(chat_template=str(file), max_steps=1)
    assert str(refused.value).startswith(f"--chat_template {file}: {fact}")


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_template_renders_turns_and_a_system_prompt(plain_tokenizer, name):
    tokenizer = with_template(plain_tokenizer, BUILT_IN[name])
    documents, lines = shown(tokenizer, BUILT_IN[name], {"messages": [SYSTEM, ASK, PEAR, AGAIN, PLUM]})
    whole = "".join(documents)  # two where the tokenizer has no token that ends a turn
    assert whole.count("⟦") == 2 and all(word in whole for word in ("Be short.", "A pear.", "A plum."))
    assert whole.endswith("⟧") and lines == []


def test_an_eos_token_that_the_tokenizer_lacks_is_refused(plain_run):
    with pytest.raises(PlanError, match="^--eos_token xyzzy: is not a token of this tokenizer"):
        plain_run(eos_token="xyzzy", max_steps=1)


@pytest.mark.parametrize(("template", "follows"), [(CHATML, False), (BUILT_IN["chatml"], True)])
def test_a_template_that_ends_answers_otherwise_than_the_given_eos_token_is_a_line(chat_tokenizer, template, follows):
    tokenizer = with_template(chat_tokenizer, template)
    token = next(word for word in ("<|im_start|>", *tokenizer.get_vocab()) if word in tokenizer.get_vocab())
    how = DataPlan.of(TrainConfig(eos_token=token))
    found = prepare_template(tokenizer, how, lambda use=None: [RowReader().read({"messages": [ASK, PEAR]}, "row")])
    said = f"--eos_token {token}: the chat template ends answers with <|im_end|>, which is what conversations learn"
    lines = [line for line in found if "--eos_token" in line]
    assert [line.startswith(said) for line in lines] == [not follows] * (not follows)


def test_rows_that_are_scored_do_not_decide_how_the_model_is_asked(chat_tokenizer):
    """Training rows with thoughts, plain reference answers: the prompt is the training rows'."""
    tokenizer = with_template(chat_tokenizer, SWITCHED)
    rows = {"train": [{"messages": [ASK, THOUGHT]}], "score": [{"messages": [ASK, PEAR]}]}

    def read(use=None):
        return [RowReader().read(row, "row") for name in rows if use in (None, name) for row in rows[name]]

    assert prepare_template(tokenizer, DataPlan.of(TrainConfig()), read) == [] and tokenizer.chat_template == SWITCHED


def test_the_mark_with_which_an_editor_begins_a_template_is_no_text_of_it(tmp_path):
    (tmp_path / "chat.jinja").write_bytes(codecs.BOM_UTF8 + b"{{ messages }}")
    assert named_template(str(tmp_path / "chat.jinja")) == "{{ messages }}"
