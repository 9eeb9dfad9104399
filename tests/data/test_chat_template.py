"""Chat templates: the default one, and hostile ones."""

import copy

import pytest

from finetune.data.chat_template import CHATML_TEMPLATE, check_chat_template, ensure_chat_template
from finetune.errors import PlanError
from tests.support.chats import FORGETFUL, rendered, text, with_template


def test_a_tokenizer_without_template_gets_chatml(plain_tokenizer):
    tokenizer = copy.deepcopy(plain_tokenizer)
    assert "ChatML (answers end with </s>)" in ensure_chat_template(tokenizer)
    assert ensure_chat_template(tokenizer) is None
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    (document,) = rendered(row, "chat", tokenizer)
    assert text(document) == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na</s>"


@pytest.mark.parametrize(
    ("template", "fact"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "does not render two messages within",
        ),
        ("{{ 'a' * 10**10 }}", "needs over 256 MiB"),
        ("{% for a in range(9999) %}{{ 'a' * 1000 }}{% endfor %}", "renders two messages to over 1 MiB of text"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "accesses attributes outside the sandbox"),
        ("{{ messages.append.__globals__['x'] }}", "accesses attributes outside the sandbox"),
        ("{{ lipsum.__globals__['os'].popen('touch canary') }}", "accesses attributes outside the sandbox"),
        ("{{ cycler.__init__.__globals__.os.system('touch canary') }}", "accesses attributes outside the sandbox"),
        ("{{ '%s'.format.__self__.__class__.__base__.x }}", "accesses attributes outside the sandbox"),
        ("{{ messages.clear() }}", "accesses attributes outside the sandbox"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses endlessly"),
        ("{% if %}", "is not a valid template"),
    ],
)
def test_a_hostile_template_is_refused(template, fact, chat_tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError) as error:  # one that is not stopped never ends
        check_chat_template(with_template(chat_tokenizer, template))
    assert fact in str(error.value) and str(error.value).startswith("chat template of ")
    assert not list(tmp_path.iterdir())


def test_usual_templates_pass_the_trial(chat_tokenizer):
    check_chat_template(chat_tokenizer)
    check_chat_template(with_template(chat_tokenizer, CHATML_TEMPLATE))
    check_chat_template(with_template(chat_tokenizer, FORGETFUL))
    check_chat_template(with_template(chat_tokenizer, "{% generation %}{{ strftime_now('%Y') }}{% endgeneration %}"))
    check_chat_template(
        with_template(chat_tokenizer, "{% for m in messages %}{% break %}{% endfor %}{{ messages | tojson }}")
    )
    check_chat_template(with_template(chat_tokenizer, "{{ raise_exception('no system') }}"))
