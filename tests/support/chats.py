"""Rows rendered, and templates that misbehave."""

import copy

from finetune.data.chat_template import TemplateRenderer
from finetune.data.columns import RowOptions, RowReader
from finetune.data.conversation import Conversation
from finetune.data.formats import render_text, uses_template
from finetune.data.messages import TemplateWords
from finetune.errors import PlanError


def targets(documents):
    return [[span.text for span in document.spans if span.is_target and span.text] for document in documents]


def text(document):
    return "".join(span.text for span in document.spans)


def rendered(row, fmt, tokenizer):
    """The documents of one row, as tokenize() makes them."""
    return documents_of(RowReader(RowOptions.of(fmt)).read(row, "rows.jsonl:1"), tokenizer)


def documents_of(read, tokenizer):
    """The documents of a row that was read."""
    if not uses_template(read, bool(tokenizer.chat_template)):
        return [render_text(read, tokenizer)]
    conversation = Conversation.of(read, TemplateWords.of(tokenizer))
    with TemplateRenderer(tokenizer) as renderer:
        (rendering,) = renderer.render([conversation.request()], ["rows.jsonl:1"])
    if isinstance(rendering, PlanError):
        raise rendering
    return conversation.documents(rendering, renderer.marks)


def with_template(tokenizer, template):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


FORGETFUL = (  # like templates that drop earlier thinking: all but the last answer lose their first word
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('|')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
