"""Ollama's Modelfile: its Go template writes what the chat template writes, or there is none."""

import json
import re

import pytest

from finetune.data import ollama
from finetune.data.built_in_templates import CHATML_TEMPLATE

LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
WITH_DEFAULT = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
SYSTEM_IN_USER = (
    "{% if messages[0].role == 'system' %}{% set s = '<<SYS>>' + messages[0].content + '<</SYS>>' %}"
    "{% set messages = messages[1:] %}{% else %}{% set s = '' %}{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] {{ s if loop.first else '' }}{{ m.content }} [/INST]{% else %}{{ m.content }}</s>"
    "{% endif %}{% endfor %}"
)
FORGETS = (  # as reasoning models do: earlier answers are written otherwise than the last
    "{% for m in messages %}<{{ m.role }}>{{ m.content if loop.index0 > messages | length - 3 else m.content[:3] }}</>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
LAST_THREE = (
    "{% for m in messages[-3:] %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
INSTRUCTION = re.compile(r'(FROM|TEMPLATE|SYSTEM|PARAMETER \w+) ("""(.*?)"""|[^\n]+)\n', re.DOTALL)


def parsed(text: str) -> dict[str, list[str]]:
    """A Modelfile by Ollama's grammar: instructions, each with a line or a triple-quoted text, and nothing else."""
    found: dict[str, list[str]] = {}
    at = 0
    while at < len(text):
        match = INSTRUCTION.match(text, at)
        assert match, text[at : at + 60]
        found.setdefault(match[1], []).append(match[2] if match[3] is None else match[3])
        at = match.end()
    return found


def go_rendered(template: str, messages: list[dict], default: str) -> str:
    """What Go's text/template makes of the actions that our templates have: range, if eq, else if, end, .Content."""
    if default and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": default}, *messages]
    body, tail = re.fullmatch(r"\{\{ range \.Messages \}\}(.*)\{\{ end \}\}(.*)", template, re.DOTALL).groups()
    branches = re.findall(
        r'\{\{ (?:else )?if eq \.Role "(\w+)" \}\}(.*?)(?=\{\{ else if|\{\{ end \}\})', body, re.DOTALL
    )
    texts = dict(branches)
    return "".join(texts[m["role"]].replace("{{ .Content }}", m["content"]) for m in messages) + tail


CHATS = [
    [("user", "One?")],
    [("system", "Brief."), ("user", "One?"), ("assistant", "1"), ("user", "Two?")],
    [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e")],
]


@pytest.mark.parametrize(
    ("template", "bos"), [(CHATML_TEMPLATE, False), (LLAMA_3, True), (WITH_DEFAULT, False), (NO_SYSTEM, False)]
)
def test_the_go_template_writes_what_the_chat_template_writes(make_tokenizer, tmp_path, template, bos):
    tokenizer = make_tokenizer(tmp_path, bos=bos)
    tokenizer.chat_template = template
    text, notice = ollama.modelfile(tmp_path, tokenizer, [], "model.gguf")
    assert notice is None
    found = parsed(text)
    (go,), (default,) = found["TEMPLATE"], found.get("SYSTEM", [""])
    for chat in CHATS:
        messages = [{"role": role, "content": content} for role, content in chat]
        if template is NO_SYSTEM and chat[0][0] == "system":
            continue
        expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # llama.cpp puts BOS before the text where the tokenizer does.
        assert go_rendered(go, messages, default) == expected.removeprefix(tokenizer.bos_token if bos else "")


@pytest.mark.parametrize("template", [SYSTEM_IN_USER, FORGETS, LAST_THREE, "{{ messages[-1].content }}", "{{ 1 / 0 }}"])
def test_a_template_that_is_not_a_sequence_of_turns_is_left_to_ollama_with_a_line(make_tokenizer, tmp_path, template):
    tokenizer = make_tokenizer(tmp_path, bos=False)
    tokenizer.chat_template = template
    text, notice = ollama.modelfile(tmp_path, tokenizer, [], "model.gguf")
    found = parsed(text)
    assert "TEMPLATE" not in found and "not a sequence of turns" in notice


CHATML_OF = (
    "{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{content}<|im_end|>\n{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
)
DATED = WITH_DEFAULT.replace("Be kind.", "Today: {{ strftime_now('%d %b %Y') }}")
DROPS_THOUGHTS = CHATML_OF.format(content="{{ m.content.split('</think>')[-1] }}")
TRIMS = CHATML_OF.format(content="{{ m.content | trim }}")
OTHER_FROM_THE_SEVENTH = CHATML_OF.format(content="{{ m.content }}{{ '!' if loop.index > 6 }}")
QUOTED = WITH_DEFAULT.replace("Be kind.", 'Say "hi"')
QUOTES_ANSWERS = '{% for m in messages %}{{ m.role }}: "{{ m.content }}"\n{% endfor %}'
QUOTES_ANSWERS += '{% if add_generation_prompt %}assistant: "{% endif %}'


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (DATED, "prints the day, so the Modelfile has no TEMPLATE"),
        (DROPS_THOUGHTS, "drops earlier reasoning, so the Modelfile has no TEMPLATE"),
        (OTHER_FROM_THE_SEVENTH, "not a sequence of turns"),
        (QUOTED, "text that a Modelfile cannot hold"),
        (QUOTES_ANSWERS, "text that a Modelfile cannot hold"),
        (TRIMS, "takes spaces off the ends of messages, and Ollama's does not"),
    ],
)
def test_what_a_template_does_beside_its_turns_is_said(make_tokenizer, tmp_path, template, said):
    tokenizer = make_tokenizer(tmp_path, bos=False)
    tokenizer.chat_template = template
    text, notice = ollama.modelfile(tmp_path, tokenizer, [], "model.gguf")
    assert said in notice and ("TEMPLATE" in parsed(text)) == (template is TRIMS)


def test_stops_and_sampling_stand_in_the_modelfile_and_prompts_without_template_are_raw(make_tokenizer, tmp_path):
    tokenizer = make_tokenizer(tmp_path, bos=False)
    tokenizer.chat_template = None
    sampling = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1, "do_sample": True, "eos_token_id": 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(sampling))
    text, notice = ollama.modelfile(tmp_path, tokenizer, ['<"end">', "</s>"], "model.gguf")
    found = parsed(text)
    assert notice is None and found["FROM"] == ["./model.gguf"] and found["TEMPLATE"] == ["{{ .Prompt }}"]
    assert [json.loads(stop) for stop in found["PARAMETER stop"]] == ['<"end">', "</s>"]
    assert (found["PARAMETER temperature"], found["PARAMETER repeat_penalty"]) == (["0.6"], ["1.1"])
    assert "PARAMETER do_sample" not in text
