"""Chat templates: the default one, and hostile ones."""

import copy
import json
import os
import shutil
import signal
import time
from dataclasses import replace
from datetime import date

import pytest

from finetune.data.answer_marks import AnswerMarks
from finetune.data.built_in_templates import CHATML_TEMPLATE
from finetune.data.chat_template import (
    TemplateRenderer,
    day_of,
    ensure_chat_template,
    marks_of,
    on_day,
    request_of,
    stop_ids,
)
from finetune.data.reading.rows import RawDataset
from finetune.data.tokens.tokenize import tokenize
from finetune.errors import PlanError
from generate import content_of, prompt_ids
from tests.support.chats import FORGETFUL, rendered, text, with_template
from tests.support.rows import jsonl
from tests.support.runs import steps
from train import fine_tune

CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_a_tokenizer_without_template_gets_chatml(plain_tokenizer):
    tokenizer = copy.deepcopy(plain_tokenizer)
    assert "ChatML (answers end with </s>)" in ensure_chat_template(tokenizer)
    assert ensure_chat_template(tokenizer) is None
    (document,) = rendered(CHAT, "chat", tokenizer)
    assert text(document) == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na</s>"


@pytest.mark.parametrize(
    ("template", "fact"),
    [
        (LOOPS, "does not render within 2 s of processor time"),
        ("{% if 'probe' not in messages[0].content %}" + LOOPS + "{% endif %}", "does not render within"),
        ("{% if messages[0].content == 'q' %}{{ 'x' * 3000000000 }}{% endif %}", "needs over 256 MiB"),
        ("{{ 'a' * 10**10 }}", "needs over 256 MiB"),
        ("{% for a in range(9999) %}{{ 'a' * 1000 }}{% endfor %}", "renders a row of "),
        ("{{ 'a' * 1000000 }}", "renders a row of "),
        ("{{ strftime_now('%c' * 100000) }}", "renders a row of "),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "accesses attributes outside the sandbox"),
        ("{{ messages.append.__globals__['x'] }}", "accesses attributes outside the sandbox"),
        ("{{ lipsum.__globals__['os'].popen('touch canary') }}", "accesses attributes outside the sandbox"),
        ("{{ cycler.__init__.__globals__.os.system('touch canary') }}", "accesses attributes outside the sandbox"),
        ("{{ '%s'.format.__self__.__class__.__base__.x }}", "accesses attributes outside the sandbox"),
        ("{% set n = namespace(_x=1) %}", "accesses attributes outside the sandbox"),
        ("{{ messages.clear() }}", "accesses attributes outside the sandbox"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses endlessly"),
        ("{% if %}", "is not a valid template"),
        ("{{ 'x' | nonsense }}", "is not a valid template"),
    ],
)
def test_a_hostile_template_is_refused(template, fact, chat_tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError) as error:  # one that is not stopped never ends
        rendered(CHAT, "chat", with_template(chat_tokenizer, template))
    assert fact in str(error.value) and str(error.value).startswith("chat template of ")
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


def test_a_template_that_hangs_on_one_row_names_it(chat_tokenizer):
    template = "{% if messages[0].content == 'row 700' %}" + LOOPS + "{% endif %}{{ messages[-1].content }}"
    rows = [{"messages": [{"role": "user", "content": f"row {i}"}]} for i in range(1000)]
    raw = RawDataset(rows, [f"rows:{i}" for i in range(1000)], ("messages",), (), "", "rows", skip_bad_rows=5)
    with pytest.raises(PlanError, match="does not render within 2 s of processor time, at rows:700. Use a template"):
        tokenize(raw, "auto", with_template(chat_tokenizer, template), 512)


def test_a_template_that_is_slow_for_every_row_is_refused_before_the_last(chat_tokenizer):
    slow = "{% for a in range(99999) %}{% for b in range(5) %}{% endfor %}{% endfor %}"  # 30 ms
    tokenizer = with_template(chat_tokenizer, slow * 4)
    request = request_of(CHAT["messages"], None, [(1, True)], "row")
    began = time.monotonic()
    with TemplateRenderer(tokenizer) as renderer, pytest.raises(PlanError, match="does not render within"):
        renderer.render([request] * 1000, ["row"] * 1000)
    assert time.monotonic() - began < 60  # 1000 rows would take 120 s and more


def test_a_prompt_is_rendered_within_the_same_limits(chat_tokenizer):
    ids = prompt_ids(chat_tokenizer, [("system", "be brief"), ("user", "hi")], raw=False)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert ids == chat_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    with pytest.raises(PlanError, match="does not render within"):
        prompt_ids(with_template(chat_tokenizer, LOOPS), [("user", "hi")], raw=False)
    with pytest.raises(PlanError, match="--prompt: the chat template rejects this row .no system"):
        prompt_ids(with_template(chat_tokenizer, "{{ raise_exception('no system') }}"), [("user", "hi")], raw=False)


def test_signals_of_the_terminal_do_not_end_the_process_that_renders(chat_tokenizer):
    request = request_of(CHAT["messages"], None, [(1, True)], "row")
    with TemplateRenderer(chat_tokenizer) as renderer:
        (first,) = renderer.render([request], ["row"])
        for number in (signal.SIGINT, signal.SIGTERM):
            renderer.child.process.send_signal(number)
        assert renderer.render([request], ["row"]) == [first]
        child = renderer.child.process
    assert child.returncode is not None and renderer.child is None


TEMPLATES = {
    "ChatML": CHATML_TEMPLATE,
    "forgetful": FORGETFUL,
    "blocks": "{% generation %}{{ strftime_now('%Y') }}{% endgeneration %}\n  {% if true %}\n x\n  {% endif %}\n",
    "controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "json": "{{ messages | tojson }}{{ tools | tojson(indent=2) }}{{ {'b': 'é<', 'a': 1} | tojson(sort_keys=true) }}",
    "specials": "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token }}{{ documents }}{{ nothing }}",
    "namespace": "{% set n = namespace(x=0) %}{% for m in messages %}{% set n.x = n.x + 1 %}{% endfor %}{{ n.x }}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }};{% endfor %}",
    "calls": "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_renderings_are_those_of_transformers(name, chat_tokenizer):
    tokenizer = with_template(chat_tokenizer, TEMPLATES[name])
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": [1, 2.5, None, True]}}}]
    messages = [
        {"role": "system", "content": "naïve 日本語 🙂 <b> & \u2028"},
        {"role": "user", "content": "q\n\t\"'", "name": None},
        {"role": "assistant", "content": "a", "thinking": "hm"},
        {"role": "assistant", "content": "", "tool_calls": calls, "reasoning": "so"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": 2}}}]
    with TemplateRenderer(tokenizer) as renderer:
        for given in (None, tools):
            upto = [(i, prompt) for i in (1, 2, 3, 4) for prompt in (True, False)]
            (rendering,) = renderer.render([request_of(messages, given, upto, "row")], ["row"])
            for (number, prompt), own in zip(upto, rendering.texts, strict=True):
                options = dict(tools=given, tokenize=False, add_generation_prompt=prompt)
                assert own == tokenizer.apply_chat_template(messages[:number], **options), (number, prompt)


@pytest.mark.parametrize("template", [{"a": 5}, {"default": 5}, 7, "x" * (2**20 + 1)])
def test_a_template_that_is_no_text_of_usual_size_is_refused(template, chat_tokenizer):
    with pytest.raises(PlanError, match="^chat template of "):
        TemplateRenderer(with_template(chat_tokenizer, template))


def test_a_resumed_run_prints_the_day_of_its_first_start(tiny_model, plain_run, tmp_path, monkeypatch, capsys):
    """The same rows on another day, by a template that prints the date."""
    model = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((model / "tokenizer_config.json").read_text())
    dated = "Today is {{ strftime_now('%d %b %Y') }}. " + CHATML_TEMPLATE
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": dated}))
    (model / "chat_template.jinja").write_text(dated)
    data = jsonl(tmp_path / "chat.jsonl", [CHAT] * 8)
    chat = dict(model_name=str(model), dataset=data, batch_size=2, save_every=1, keep_last=9)
    with on_day("2020-02-29"):
        plain_run(**chat, max_steps=4, output_dir=str(tmp_path / "whole"))
        plain_run(**chat, max_steps=2, output_dir=str(tmp_path / "part"))
    assert "Today is 29 Feb 2020" in capsys.readouterr().out
    fine_tune(resume=str(tmp_path / "part"), max_steps=4)
    assert steps(tmp_path / "part") == steps(tmp_path / "whole")
    plan = json.loads((tmp_path / "part" / "run_plan.json").read_text())
    assert plan["settled"]["day"] == "2020-02-29" and "FINETUNE_DAY" not in os.environ
    assert day_of({}) == day_of({"day": "never"}) == str(date.today())


# As gpt-oss': thoughts end with another token than answers, and tokens stand before an answer.
THINKS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant<s>final</s>{{ m.content }}"
    "{{ '<|im_end|>' if loop.last else '<|end|>' }}{% else %}<|im_start|>user {{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)


def test_an_answer_ends_with_what_ends_the_last_turn_and_is_what_follows_its_marks(plain_tokenizer, tmp_path):
    tokenizer = copy.deepcopy(plain_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|end|>"]})
    end, thought = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|end|>"])
    tokenizer.chat_template = THINKS
    marks = marks_of(tokenizer)
    assert (marks.prefix, marks.end) == ("<s>final</s>", "<|im_end|>")
    assert stop_ids(tokenizer, tmp_path) == {tokenizer.eos_token_id, end}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [thought]}))
    assert stop_ids(tokenizer, tmp_path) == {tokenizer.eos_token_id, end, thought}
    ids = tokenizer(
        "<s>think</s> it is one<|end|><|im_start|>assistant<s>final</s>A1", add_special_tokens=False
    ).input_ids
    assert content_of(tokenizer, ids, raw=False) == "A1"
    assert content_of(tokenizer, ids, raw=True) == tokenizer.decode(ids)
    tokenizer.chat_template = THINKS.replace("<s>final</s>", " ")  # a space before an answer, as of Mistral's
    ids = tokenizer(" one two<|end|> three four", add_special_tokens=False).input_ids
    assert marks_of(tokenizer).prefix == " "
    assert content_of(tokenizer, ids, raw=False) == tokenizer.decode(ids)
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert replace(marks_of(tokenizer), specials=()) == AnswerMarks()
