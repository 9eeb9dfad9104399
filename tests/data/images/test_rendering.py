"""Conversations with images under chat templates as vision models and others have them."""

import re

import pytest

from finetune.data.chat_template import TemplateRenderer
from finetune.data.columns import RowOptions, RowReader
from finetune.data.conversation import Conversation
from finetune.data.images.marks import IMAGE_MARK
from finetune.data.images.references import ImageOptions
from finetune.data.messages import TemplateWords
from finetune.errors import PlanError
from tests.support.chats import FORGETFUL, rendered, targets, text, with_template
from tests.support.tiny import CHATML

ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
QWEN_LIKE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' or 'image' in part or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}" + ASK
)
GEMMA_LIKE = (  # roles take turns, and texts are trimmed
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}"
    "{% endif %}<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{% if m.content is string %}"
    "{{ m.content | trim }}{% else %}{% for item in m.content %}{% if item['type'] == 'image' %}"
    "{{ '<start_of_image>' }}{% elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
LLAVA_LIKE = (  # reads parts alone, and writes images first
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\\n' }}{% endfor %}{% for c in m.content | selectattr('type', 'equalto', 'text') %}{{ c['text'] }}"
    "{% endfor %}<|im_end|>\n{% endfor %}" + ASK
)
IDEFICS_LIKE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] | capitalize }}{% if m['content'][0]['type'] == 'image' %}"
    "{{ ':' }}{% else %}{{ ': ' }}{% endif %}{% for line in m['content'] %}{% if line['type'] == 'text' %}"
    "{{ line['text'] }}{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>Assistant: {% endif %}"
)
WRITES_LISTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + ASK
)  # a list as Python writes it
WRITES_JSON = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if m.content is string else m.content | tojson }}"
    "<|im_end|>\n{% endfor %}" + ASK
)
JOINS_TEXTS = (  # parts, of which an image is nothing
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if m.content is string else "
    "m.content | map(attribute='text') | join('\n') }}<|im_end|>\n{% endfor %}" + ASK
)
PARTS_OF_TEXT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}"
    "{% endif %}{% endfor %}<|im_end|>\n{% endfor %}" + ASK
)
USERS_IN_PARTS = (  # those of the others as they are, a list too
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'user' %}{% for c in m.content %}"
    "{% if c.type == 'text' %}{{ c.text }}{% else %}<image>{% endif %}{% endfor %}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}" + ASK
)
# name: (template, the question "@What is @ here?", one without an image, "@" alone), @ for the mark
RENDERED = {
    "like Qwen2.5-VL": (
        QWEN_LIKE,
        "<|vision_start|><|image_pad|><|vision_end|>What is <|vision_start|><|image_pad|><|vision_end|> here?",
        "And now?",
        "<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "like Gemma 3": (GEMMA_LIKE, "<start_of_image>What is<start_of_image>here?", "And now?", "<start_of_image>"),
    "like LLaVA": (LLAVA_LIKE, "<image>\n<image>\nWhat is  here?", "And now?", "<image>\n"),
    "like Idefics 3": (IDEFICS_LIKE, "<image>What is <image> here?", "And now?", "<image>"),
    "parts of users alone": (USERS_IN_PARTS, "<image>What is <image> here?", "And now?", "<image>"),
    "ChatML": (CHATML, "@What is @ here?", "And now?", "@"),
    "lists as they are": (WRITES_LISTS, "@What is @ here?", "And now?", "@"),
    "lists as JSON": (WRITES_JSON, "@What is @ here?", "And now?", "@"),
    "texts of parts": (JOINS_TEXTS, "@What is @ here?", "And now?", "@"),
    "parts of text alone": (PARTS_OF_TEXT, "@What is @ here?", "And now?", "@"),
}
A, B, C = (b"\x89PNG\r\n\x1a\n" + name for name in (b"A", b"B", b"C"))
MESSAGES = [
    {"role": "user", "content": "<image>What is <image> here?"},
    {"role": "assistant", "content": "cat"},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "dog"},
    {"role": "user", "content": "<image>"},
    {"role": "assistant", "content": "cow"},
]
ROW = {"messages": MESSAGES, "images": [A, B, C]}


def documents_of(row, tokenizer, **options):
    reader = RowReader(RowOptions(images=ImageOptions(), **options))
    conversation = Conversation.of(reader.read(row, "rows.jsonl:1"), TemplateWords.of(tokenizer))
    with TemplateRenderer(tokenizer) as renderer:
        (rendering,) = renderer.render([conversation.request()], ["rows.jsonl:1"])
        if isinstance(rendering, PlanError):
            raise rendering
        return conversation.documents(rendering, renderer.marks), reader.notices.counts


@pytest.mark.parametrize("name", RENDERED)
def test_images_are_rendered_as_parts_where_the_template_reads_them_else_as_the_mark(name, chat_tokenizer):
    template, first, plain, alone = RENDERED[name]
    (document,), notices = documents_of(ROW, with_template(chat_tokenizer, template))
    found = text(document).replace(IMAGE_MARK, "@")
    questions = re.findall(r"<\|im_start\|>[Uu]ser[:\n] ?(.*?)<\|im_end\|>", found, re.S)
    assert questions == [first, plain, alone]
    assert [image.read_bytes() for image in document.images] == [A, B, C]
    assert targets([document]) == [["cat", "<|im_end|>", "dog", "<|im_end|>", "cow", "<|im_end|>"]]
    assert not any("altered or left out" in line for line in notices)


def test_a_conversation_without_images_is_rendered_as_before(chat_tokenizer):
    """By templates of every kind, in the bytes of a run that reads no images."""
    row = {"messages": MESSAGES[2:4]}
    for template in (QWEN_LIKE, LLAVA_LIKE, WRITES_LISTS):
        tokenizer = with_template(chat_tokenizer, template)
        plain = Conversation.of(RowReader(RowOptions()).read(row, "rows.jsonl:1"), TemplateWords.of(tokenizer))
        with TemplateRenderer(tokenizer) as renderer:
            (rendering,) = renderer.render([plain.request()], ["rows.jsonl:1"])
            expected = plain.documents(rendering, renderer.marks)
        assert documents_of(row, tokenizer)[0] == expected


def test_the_mark_is_a_character_like_others_in_a_run_without_images(chat_tokenizer):
    row = {"messages": [{"role": "user", "content": f"a {IMAGE_MARK} b"}, MESSAGES[1]]}
    for template in (QWEN_LIKE, LLAVA_LIKE):
        (document,) = rendered(row, "chat", with_template(chat_tokenizer, template))
        assert f"a {IMAGE_MARK} b" in text(document) and not document.images


def test_documents_of_single_answers_have_the_images_of_their_turns(chat_tokenizer):
    thinking = [{**m, "content": m["content"].replace("c", "thought|c")} for m in MESSAGES]
    row = {**ROW, "messages": thinking}
    documents, _ = documents_of(row, with_template(chat_tokenizer, FORGETFUL))
    assert [document.turn for document in documents] == [0, 1, 2]
    assert [[image.read_bytes() for image in document.images] for document in documents] == [[A, B], [A, B], [A, B, C]]
    for document in documents:
        assert text(document).count(IMAGE_MARK) == len(document.images)


def test_what_a_template_leaves_out_beside_an_image_is_counted(chat_tokenizer):
    template = QWEN_LIKE.replace("{{ part.text }}", "{{ part.text.split('?')[0] }}")
    row = {"messages": [{"role": "user", "content": "<image>What? And why?"}, MESSAGES[1]], "images": [A]}
    _, notices = documents_of(row, with_template(chat_tokenizer, template))
    assert notices["a message of user is altered or left out by the chat template"] == 1


def test_an_image_in_a_conversation_without_an_answer_is_kept(chat_tokenizer):
    (document,), _ = documents_of({"messages": MESSAGES[4:5], "images": [C]}, with_template(chat_tokenizer, QWEN_LIKE))
    assert [image.read_bytes() for image in document.images] == [C] and not targets([document])[0]
