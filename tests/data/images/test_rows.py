"""Rows with images, as programs write them: the conversation that each is, and its images, or why it is refused."""

import base64
import json
import os

import pytest

from finetune.data.columns import RowOptions, RowReader
from finetune.data.conversation import Conversation
from finetune.data.formats import render_text, uses_template
from finetune.data.images.marks import IMAGE_MARK
from finetune.data.images.references import ImageOptions, keep_image
from finetune.data.meanings import NOT_TEXT, meaning_in
from finetune.data.messages import TemplateWords
from finetune.data.preference_rows import answers_in
from finetune.errors import PlanError

SIGNATURE = b"\x89PNG\r\n\x1a\n"
A, B, C, D = (SIGNATURE + name for name in (b"A", b"B", b"C", b"D" * 60))
NAMES = {A: "A", B: "B", C: "C", D: "D"}
URI = "data:image/png;base64," + base64.b64encode(A).decode()
BASE64 = base64.b64encode(D).decode()
PAIRS = {"pairs": True}
LABELS = {"labels": True}


def text(value):
    return {"type": "text", "text": value}


def user(*parts):
    return {"role": "user", "content": parts[0] if len(parts) == 1 else list(parts)}


def answer(content="cat"):
    return {"role": "assistant", "content": content}


def chat(*parts, **columns):
    return {"messages": [user(*parts), answer()], **columns}


def human(value, **columns):
    return {"conversations": [{"from": "human", "value": value}, {"from": "gpt", "value": "cat"}], **columns}


BARE = {"type": "image"}
LLAVA = human("<image>\nWhat?", image="a.png")
CHOICES = {"question": "<image> Which?", "choices": ["<image>", "none"], "answer": "A", "images": ["a.png", "b.png"]}
# name: (row, options, [conversation of each answer, images]); @ is a mark.
READ = {
    "places in choices": (CHOICES, {}, ["user:@ Which?\n\nA. @\nB. none", "assistant:A"], "AB"),
    "places in choices of ARC": (
        CHOICES | {"choices": {"text": ["<image>", "none"], "label": ["A", "B"]}},
        {},
        ["user:@ Which?\n\nA. @\nB. none", "assistant:A"],
        "AB",
    ),
    "bare places with an index as tables have it": (
        chat({**BARE, "index": "1"}, "?", {**BARE, "index": 0.0}, images=["a.png", "b.png"]),
        {},
        "@?@",
        "BA",
    ),
    "bare places that name their images": (
        chat(
            {**BARE, "id": "x"}, "?", {**BARE, "file_name": "c.png"}, images=[{"id": "x", "path": "a.png"}, "sub/c.png"]
        ),
        {},
        "@?@",
        "AC",
    ),
    "part image: path": (chat({"type": "image", "image": "a.png"}, text("What?")), {}, "@What?", "A"),
    "part image: path in a folder": (chat({"type": "image", "path": "sub/c.png"}, text("?")), {}, "@?", "C"),
    "part image: file URI": (chat({"type": "image", "image": "file://{root}/a.png"}, text("?")), {}, "@?", "A"),
    "part image: absolute path in the root": (chat({"type": "image", "path": "{root}/b.png"}, "?"), {}, "@?", "B"),
    "part image: dot-dot that stays inside": (chat({"type": "image", "path": "sub/../a.png"}, "?"), {}, "@?", "A"),
    "part image: bytes": (chat({"type": "image", "bytes": A}, text("What?")), {}, "@What?", "A"),
    "part image: object of bytes and path": (
        chat({"type": "image", "image": {"bytes": A, "path": "/elsewhere.png"}}, text("?")),
        {},
        "@?",
        "A",
    ),
    "part image: base64": (chat({"type": "image", "base64": base64.b64encode(A).decode()}, text("?")), {}, "@?", "A"),
    "part image: base64 without its key": (chat({"type": "image", "image": BASE64}, text("?")), {}, "@?", "D"),
    "part image: url-safe base64 in lines": (
        chat({"type": "image", "data": base64.urlsafe_b64encode(A).decode().rstrip("=") + "\n"}, text("?")),
        {},
        "@?",
        "A",
    ),
    "part image: data URI": (chat(text("a "), {"type": "image", "url": URI}, text(" b")), {}, "a @ b", "A"),
    "part image: percent-encoded data URI": (
        chat({"type": "image", "url": "data:image/png,%89PNG%0D%0A%1A%0AB"}, text("?")),
        {},
        "@?",
        "B",
    ),
    "part image_url of OpenAI": (
        chat(text("What?"), {"type": "image_url", "image_url": {"url": URI, "detail": "low"}}),
        {},
        "What?@",
        "A",
    ),
    "part image_url: text": (chat({"type": "image_url", "image_url": "b.png"}, text("?")), {}, "@?", "B"),
    "part input_image of OpenAI's responses": (
        chat({"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": URI}),
        {},
        "What?@",
        "A",
    ),
    "part image of Anthropic": (
        chat(
            {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(A).decode()},
            },
            text("?"),
        ),
        {},
        "@?",
        "A",
    ),
    "result of a tool of Anthropic": (
        {
            "messages": [
                user("Look."),
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "see", "input": {}}]},
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "t",
                            "content": [text("seen "), {**BARE, "path": "a.png"}],
                        }
                    ],
                },
                answer(),
            ]
        },
        {},
        ["user:Look.", "assistant:", "tool:seen @", "assistant:cat"],
        "A",
    ),
    "parts of Gemini": (
        {
            "contents": [
                {
                    "role": "user",
                    "parts": [
                        {"inline_data": {"mime_type": "image/png", "data": base64.b64encode(A).decode()}},
                        {"inlineData": {"mimeType": "image/png", "data": base64.b64encode(B).decode()}},
                        {"text": "?"},
                    ],
                },
                {"role": "model", "parts": [{"text": "cat"}]},
            ]
        },
        {},
        "@@?",
        "AB",
    ),
    "parts of Gemini: a file": (
        {
            "contents": [
                {"role": "user", "parts": [{"fileData": {"fileUri": "a.png", "mimeType": "image/png"}}, {"text": "?"}]},
                {"role": "model", "parts": [{"text": "cat"}]},
            ]
        },
        {},
        "@?",
        "A",
    ),
    "blocks of Bedrock": (chat({"image": {"format": "png", "source": {"bytes": A}}}, {"text": "?"}), {}, "@?", "A"),
    "parts of Qwen without types": (chat({"image": "a.png"}, {"text": "?"}), {}, "@?", "A"),
    "images of a message, as Ollama has them": (
        {"messages": [{**user("What?"), "images": [BASE64]}, answer()]},
        {},
        "@What?",
        "D",
    ),
    "images of a message in its places": (
        {"messages": [{**user("a <image> b <image>"), "images": ["a.png", "b.png"]}, answer()]},
        {},
        "a @ b @",
        "AB",
    ),
    "images of two messages": (
        {
            "messages": [
                {**user("one"), "images": ["a.png"]},
                answer("1"),
                {**user("two"), "images": ["b.png", URI]},
                answer("2"),
            ]
        },
        {},
        ["user:@one", "assistant:1", "user:@@two", "assistant:2"],
        "ABA",
    ),
    "bare parts and a column": (chat(BARE, text("a"), BARE, text("b"), images=["a.png", "b.png"]), {}, "@a@b", "AB"),
    "bare parts and a column of objects": (chat(BARE, text("?"), images=[{"bytes": A}]), {}, "@?", "A"),
    "bare parts with numbers": (
        chat({**BARE, "index": 1, "text": None}, text("a"), {**BARE, "index": 0}, images=["a.png", "b.png"]),
        {},
        "@a@",
        "BA",
    ),
    "bare parts with a number twice": (
        chat({**BARE, "index": 0}, text("a"), {**BARE, "index": 0}, images=["a.png"]),
        {},
        "@a@",
        "AA",
    ),
    "LLaVA": (LLAVA, {}, "@\nWhat?", "A"),
    "LLaVA over turns": (
        {
            "conversations": [
                {"from": "human", "value": "<image>\none"},
                {"from": "gpt", "value": "1"},
                {"from": "human", "value": "two <image>"},
                {"from": "gpt", "value": "2"},
            ],
            "image": ["a.png", "b.png"],
        },
        {},
        ["user:@\none", "assistant:1", "user:two @", "assistant:2"],
        "AB",
    ),
    "LLaVA without an image": (human("What?"), {}, "What?", ""),
    "LLaVA, image null": (human("What?", image=None), {}, "What?", ""),
    "LLaVA, images empty": (human("What?", images=[]), {}, "What?", ""),
    "LLaVA, image an empty text": (human("What?", image=""), {}, "What?", ""),
    "LLaVA, image an object of nulls": (human("What?", image={"bytes": None, "path": None}), {}, "What?", ""),
    "<image> in a text of a row without images": (human("Write <image> in HTML."), {}, "Write <image> in HTML.", ""),
    "<image> in an answer that is about it": (
        {"messages": [user("<image>What tag?"), answer("<image>")], "images": ["a.png"]},
        {},
        ["user:@What tag?", "assistant:<image>"],
        "A",
    ),
    "LLaMA-Factory's alpaca": (
        {"instruction": "<image>What?", "input": "", "output": "cat", "images": ["a.png"]},
        {},
        "@What?",
        "A",
    ),
    "Swift's query and response": (
        {"query": "<image>What?", "response": "cat", "images": ["a.png"]},
        {},
        "@What?",
        "A",
    ),
    "Swift's query and response with history": (
        {"query": "two", "response": "cat", "history": [["<image>one", "1"]], "images": ["a.png"]},
        {},
        ["user:@one", "assistant:1", "user:two", "assistant:cat"],
        "A",
    ),
    "Swift's without places": (
        {"messages": [answer("You are."), user("What?"), answer()], "images": ["a.png", "b.png"]},
        {},
        ["assistant:You are.", "user:@@What?", "assistant:cat"],
        "AB",
    ),
    "chat without places, after a system prompt": (
        {
            "messages": [{"role": "system", "content": "Be."}, user("a"), answer("b"), user("c"), answer()],
            "image": "a.png",
        },
        {},
        ["system:Be.", "user:@a", "assistant:b", "user:c", "assistant:cat"],
        "A",
    ),
    "chat of parts without places": (chat(text("What"), text("?"), images=["a.png"]), {}, "@What?", "A"),
    "an image in a system prompt": (
        {"messages": [{"role": "system", "content": [text("Logo: "), {**BARE, "path": "a.png"}]}, user("?"), answer()]},
        {},
        ["system:Logo: @", "user:?", "assistant:cat"],
        "A",
    ),
    "a system prompt of parts in a column": (
        {"system": [text("Logo: "), BARE], **chat("?"), "images": ["a.png"]},
        {},
        ["system:Logo: @", "user:?", "assistant:cat"],
        "A",
    ),
    "pairs of turns, as FineVision has them": (
        {
            "images": [{"bytes": A, "path": None}],
            "texts": [{"user": "one", "assistant": "1", "source": "s"}, {"user": "two", "assistant": "2"}],
            "source": "s",
        },
        {},
        ["user:@one", "assistant:1", "user:two", "assistant:2"],
        "A",
    ),
    "a path without a suffix in a column for them": (
        {"question": "What?", "answer": "cat", "image_path": "d"},
        {},
        "@What?",
        "D",
    ),
    "question, answer, image": ({"question": "What?", "answer": "cat", "image": "a.png"}, {}, "@What?", "A"),
    "question, answer, image of datasets": (
        {"question": "What?", "answer": "cat", "image": {"bytes": A, "path": "x.png"}},
        {},
        "@What?",
        "A",
    ),
    "question with a context": (
        {"question": "What?", "context": "See.", "answer": "cat", "image": A},
        {},
        "@See.\n\nWhat?",
        "A",
    ),
    "alpaca with an input": (
        {"instruction": "Say.", "input": "in", "output": "cat", "image": A},
        {},
        "@Say.\n\nin",
        "A",
    ),
    "prompt and completion of messages": (
        {"prompt": [user(BARE, text("What?"))], "completion": [answer()], "images": ["a.png"]},
        {},
        "@What?",
        "A",
    ),
    "a completion that contains its prompt": (
        {"prompt": "What?", "completion": [user("What?"), answer()], "image": "a.png"},
        {},
        "@What?",
        "A",
    ),
    "prompt and completion of text": (
        {"prompt": "<image>\nWhat? ", "completion": "cat", "image": "a.png"},
        {},
        "text:@\nWhat? cat",
        "A",
    ),
    "prompt and completion without a place": (
        {"prompt": "What? ", "completion": "cat", "image": A},
        {},
        "text:@What? cat",
        "A",
    ),
    "a caption": ({"text": "A cat.", "image": "a.png"}, {}, "text:@A cat.", "A"),
    "text with images inside": (
        {"text": "One <image> two <image>.", "images": ["a.png", "b.png"]},
        {},
        "text:One @ two @.",
        "AB",
    ),
    "a column of another name": (
        {"question": "What?", "answer": "cat", "scan": "a.png"},
        {"columns": {"images": "scan"}},
        "@What?",
        "A",
    ),
    "a column of another name beside an image": (
        {"question": "What?", "answer": "cat", "scan": "a.png", "image": "b.png", "img": "c.png"},
        {"columns": {"images": "scan"}},
        "@What?",
        "A",
    ),
    "a column of another name that is null": (
        {"question": "What?", "answer": "cat", "scan": None, "image": "b.png"},
        {"columns": {"images": "scan"}},
        "What?",
        "",
    ),
    "a column whose value is an image": (
        {"question": "What?", "answer": "cat", "image_path": "a.png"},
        {},
        "@What?",
        "A",
    ),
    "file_name of an image folder": ({"file_name": "a.png", "text": "A cat."}, {}, "text:@A cat.", "A"),
    "image and where it came from": (
        {"question": "What?", "answer": "cat", "image": A, "image_url": "https://a.b/c.png", "file_name": "c.png"},
        {},
        "@What?",
        "A",
    ),
    "an image column left out": (human("What?", image="a.png"), {"ignored": ("image",)}, "What?", ""),
    "a list in a cell of a table": (
        {"question": "What?", "answer": "cat", "images": '["a.png", "b.png"]'},
        {},
        "@@What?",
        "AB",
    ),
    "messages in a cell of a table": (
        {"messages": json.dumps([user({**BARE, "path": "a.png"}, text("?")), answer()])},
        {},
        "@?",
        "A",
    ),
    "image and images that are the same": (human("<image>?", image="a.png", images=["a.png"]), {}, "@?", "A"),
    "images in parts and in a column": (chat({**BARE, "path": "a.png"}, text("?"), images=["a.png"]), {}, "@?", "A"),
    "TRL's preference rows": (
        {
            "prompt": [user(BARE, text("What?"))],
            "chosen": [answer([text("yes")])],
            "rejected": [answer([text("no")])],
            "images": [{"bytes": A}],
        },
        PAIRS,
        [["user:@What?", "assistant:yes"], ["user:@What?", "assistant:no"]],
        "A",
    ),
    "preference rows of conversations": (
        {
            "chosen": [user(BARE, text("?")), answer("yes")],
            "rejected": [user(BARE, text("?")), answer("no")],
            "images": ["a.png"],
        },
        PAIRS,
        [["user:@?", "assistant:yes"], ["user:@?", "assistant:no"]],
        "A",
    ),
    "preference rows of conversations of equal parts": (
        {
            "chosen": [user({**BARE, "bytes": A}, text("?")), answer("yes")],
            "rejected": [user({**BARE, "bytes": A}, text("?")), answer("no")],
        },
        PAIRS,
        [["user:@?", "assistant:yes"], ["user:@?", "assistant:no"]],
        "A",
    ),
    "preference rows whose answers contain the prompt": (
        {
            "prompt": [user("<image>?")],
            "chosen": [user("<image>?"), answer("yes")],
            "rejected": [user("<image>?"), answer("no")],
            "images": ["a.png"],
        },
        PAIRS,
        [["user:@?", "assistant:yes"], ["user:@?", "assistant:no"]],
        "A",
    ),
    "preference rows without places": (
        {
            "prompt": [user("?")],
            "chosen": [user("?"), answer("yes")],
            "rejected": [user("?"), answer("no")],
            "image": "a.png",
        },
        PAIRS,
        [["user:@?", "assistant:yes"], ["user:@?", "assistant:no"]],
        "A",
    ),
    "preference rows of a question": (
        {"question": "What?", "chosen": "yes", "rejected": "no", "image": "a.png"},
        PAIRS,
        [["user:@What?", "assistant:yes"], ["user:@What?", "assistant:no"]],
        "A",
    ),
    "preference rows of text": (
        {"prompt": "<image>What? ", "chosen": "yes", "rejected": "no", "images": ["a.png"]},
        PAIRS,
        ["text:@What? yes", "text:@What? no"],
        "A",
    ),
    "LLaMA-Factory's preference rows": (
        {
            "conversations": [{"from": "human", "value": "<image>What?"}],
            "chosen": {"from": "gpt", "value": "yes"},
            "rejected": {"from": "gpt", "value": "no"},
            "images": ["a.png"],
        },
        PAIRS,
        [["user:@What?", "assistant:yes"], ["user:@What?", "assistant:no"]],
        "A",
    ),
    "KTO rows": (
        {"prompt": [user("<image>What?")], "completion": [answer()], "label": True, "images": ["a.png"]},
        LABELS,
        "@What?",
        "A",
    ),
}
REFUSED = {
    "the mark in a text": (human("a \ufdd0 b"), "field 'conversations' has a noncharacter"),
    "a path outside": (
        human("<image>?", image="../outside.png"),
        "field 'image' is '../outside.png', which is outside",
    ),
    "an absolute path outside": (
        human("?", image="/etc/hostname"),
        "field 'image' is '/etc/hostname', which is outside",
    ),
    "a link that leads outside": (human("?", image="link.png"), "field 'image' is 'link.png', which is outside"),
    "a path outside that does not exist": (human("?", image="../none.png"), "which is outside"),
    "no such file": (
        human("?", images=["a.png", "none.png"]),
        "field 'images[1]' is 'none.png': there is no such file",
    ),
    "a folder": (human("?", image="sub"), "is not a regular file"),
    "a pipe": (human("?", image="pipe.png"), "is not a regular file"),
    "a NUL character": (human("?", image="a\0.png"), "cannot be opened"),
    "a long path": (human("?", image="a" * 5000), "cannot be opened"),
    "a URL": (human("?", image="https://a.b/c.png"), "is the URL 'https://a.b/c.png'. Add --allow_urls"),
    "a URL of http": (human("?", image="http://a.b/c.png"), "of URLs only those with https are read"),
    "a URL in a column for them": (
        {"question": "?", "answer": "a", "image_url": "https://a.b/c?id=1"},
        "field 'image_url' is the URL 'https://a.b/c?id=1'. Add --allow_urls",
    ),
    "a bucket": (human("?", image="s3://a/b.png"), "of URLs only those with https are read"),
    "a label": (human("?", image="cat"), "field 'image' is 'cat': there is no such file"),
    "a number": (human("?", image=3), "field 'image' is an integer, must be an image"),
    "pixels as numbers": (human("?", image=[[[1, 2, 3]]]), "field 'image[0]' is a list, must be an image"),
    "an empty image in a list": (human("<image><image>", images=["a.png", None]), "field 'images[1]' is empty"),
    "broken base64": (chat({**BARE, "data": "a$b"}, text("?")), "field 'messages[0].content[0]' is not base64"),
    "a data URI of a video": (human("?", image="data:video/mp4;base64,AAAA"), "of type 'video/mp4'"),
    "an audio part of Gemini": (
        {
            "contents": [
                {"role": "user", "parts": [{"inline_data": {"mime_type": "audio/wav", "data": "AAAA"}}]},
                answer(),
            ]
        },
        "is of type 'audio/wav', which is not an image",
    ),
    "a provider's file": (chat({"type": "input_image", "file_id": "f"}, text("?")), "is a file of a provider"),
    "an object without an image": (human("?", image={"id": 7}), "is an object with id, and none of these is an image"),
    "more places than images": (
        human("<image><image>?", image="a.png"),
        "has 1 image, and the questions have 2 <image>",
    ),
    "more images than places": (human("<image>?", images=["a.png", "b.png"]), "has 2 images, and the questions have 1"),
    "more bare parts than images": (chat(BARE, BARE, text("?"), images=["a.png"]), "the questions have 2 places"),
    "a bare part without an image": (chat(BARE, text("?")), "field 'messages[0].content[0]' is the place of an image"),
    "a number of no image": (
        chat({**BARE, "index": 1}, text("?"), images=["a.png"]),
        "have the numbers 1, must be 0 to 0",
    ),
    "a message with other images than places": (
        {"messages": [{**user("<image><image>"), "images": ["a.png"]}, answer()]},
        "has 2 <image> and its message 1 image",
    ),
    "an image in an answer": (
        {"messages": [user("?"), answer([text("see "), {**BARE, "path": "a.png"}])]},
        "field 'messages[1].content[1]' is an image in an answer",
    ),
    "a bare part in an answer": (
        {"messages": [user("?"), answer([BARE])], "images": ["a.png"]},
        "is an image in an answer",
    ),
    "the place in an answer": (
        {"messages": [user("<image>?"), answer("<image>")], "images": ["a.png", "b.png"]},
        "has 2 images, and the questions have 1 <image>",
    ),
    "other images in parts and in a column": (
        chat({**BARE, "path": "a.png"}, text("?"), images=["b.png"]),
        "its messages hold 1 image and column 'images' 1 others",
    ),
    "image and images that differ": (
        human("<image>?", image="a.png", images=["b.png"]),
        "columns 'images' and 'image' both hold images",
    ),
    "images of several columns": (
        {"question": "?", "answer": "cat", "image": A, "image_2": {"bytes": B}},
        "column 'image_2' holds an image",
    ),
    "a column that nobody named": (
        {"question": "?", "answer": "cat", "scan": {"bytes": B}},
        "column 'scan' holds an image (--columns images=scan reads those of one column)",
    ),
    "images of the rejected answer": (
        {"prompt": "?", "chosen": "a", "rejected": "b", "images": ["a.png"], "rejected_images": ["b.png"]},
        "column 'rejected_images' holds an image",
    ),
    "a file_name that is not an image of the row": (
        {"text": "Read.", "file_name": "scan.png"},
        "there is no such file in",
    ),
    "places with numbers": (
        human("<image 1> and <image 2>", images=["a.png", "b.png"]),
        "has '<image 1>', and which image",
    ),
    "a video part": (chat({"type": "video", "video": "a.mp4"}, text("?")), "only text and images are read"),
    "a video column": (human("?", videos=["a.mp4"]), "column 'videos' is neither text nor an image"),
    "an image part with a text": (chat({**BARE, "path": "a.png", "text": "see"}), "is an image and has a text"),
    "token ids": ({"input_ids": [1, 2], "image": "a.png"}, "token ids have no place for them"),
    "answers to one question with two images": (
        {
            "chosen": [user({**BARE, "path": "a.png"}, text("?")), answer("yes")],
            "rejected": [user({**BARE, "path": "b.png"}, text("?")), answer("no")],
        },
        "chosen and rejected begin with different messages",
    ),
    "a prompt with an image that is not used": (
        {
            "prompt": "See <image>.",
            "chosen": [user("?"), answer("a")],
            "rejected": [user("?"), answer("b")],
            "image": A,
        },
        "field 'prompt' has an image and is not used, as 'chosen' begins with a question too",
    ),
    **{
        f"a place as another program writes it: {place}": (
            human(f"{place} What?", image="a.png"),
            f"has '{place}', and which image of column 'image' that is",
        )
        for place in (
            "<IMAGE>",
            "<Image>",
            "<image/>",
            "<ImageHere>",
            "<image_placeholder>",
            "[image]",
            "{image}",
            "<video>",
        )
    },
    "a choice with another program's place": (
        {"question": "Which?", "choices": ["<image 1>", "none"], "answer": "A", "image": "a.png"},
        "field 'choices[0]' has '<image 1>'",
    ),
    "places that name images in another order": (
        chat({**BARE, "file_name": "b.png"}, text("?"), {**BARE, "file_name": "a.png"}, images=["a.png", "b.png"]),
        "field 'messages[0].content[0]' is the place of 'b.png', which is another image of column 'images'",
    ),
    "places with ids in another order": (
        chat({**BARE, "id": 2}, {**BARE, "id": 1}, images=[{"id": 1, "path": "a.png"}, {"id": 2, "path": "b.png"}]),
        "is the place of '2', which is another image",
    ),
    "an index that is no number": (chat({**BARE, "index": "first"}, images=["a.png"]), "has the index 'first'"),
    "an image that is not wanted": (
        chat(BARE, text("?"), images=[{"path": "a.png", "deleted": True}]),
        "field 'images[0]': field 'deleted' of an image is 'True', which may say that the row is not wanted",
    ),
    "an image beside a message's content": (
        {"messages": [{"role": "user", "content": "What?", "screenshot": "a.png"}, answer()]},
        "field 'messages[0]': field 'screenshot' of a message holds an image",
    ),
    "an image under a name that nobody reads": (
        human("?", screenshots=["a.png"]),
        "column 'screenshots' holds an image",
    ),
    "base64 under a name that nobody reads": (human("?", scan=BASE64), "column 'scan' holds an image"),
    "an image beside the image": (
        human("<image>?", image="a.png", depth_image="b.png"),
        "'depth_image' holds an image",
    ),
    "no question": (
        {"messages": [{"role": "system", "content": "s"}, answer()], "image": "a.png"},
        "there is no question",
    ),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows").resolve()
    (folder / "data" / "sub").mkdir(parents=True)
    for name, content in (("a.png", A), ("b.png", B), ("sub/c.png", C), ("../outside.png", A), ("d", D)):
        (folder / "data" / name).write_bytes(content)
    (folder / "data" / "link.png").symlink_to(folder / "outside.png")
    os.mkfifo(folder / "data" / "pipe.png")
    return folder / "data"


def with_root(value, root):
    if isinstance(value, str):
        return value.replace("{root}", str(root))
    if isinstance(value, list):
        return [with_root(part, root) for part in value]
    return {k: with_root(v, root) for k, v in value.items()} if isinstance(value, dict) else value


def conversations(row, root, tokenizer, **options):
    """([the turns or the text of each answer of a row, with @ for marks], [the names of its images], the reader)."""
    reader = RowReader(RowOptions(images=ImageOptions(root), **options))
    found = []
    images = []
    for answered in answers_in(reader.read(with_root(row, root), "rows.jsonl:1")):
        if uses_template(answered, has_template=True):
            conversation = Conversation.of(answered, TemplateWords(frozenset({"tool", "tool_calls"})))
            found.append([f"{m['role']}:{m['content']}".replace(IMAGE_MARK, "@") for m in conversation.messages])
            references = conversation.images
        else:
            document = render_text(answered, tokenizer)
            found.append("text:" + "".join(span.text for span in document.spans).replace(IMAGE_MARK, "@"))
            references = document.images
        assert sum(part.count("@") for part in found[-1]) == len(references)
        images.append("".join(NAMES[reference.read_bytes()] for reference in references))
    return found, images, reader


@pytest.mark.parametrize("name", READ)
def test_row_is_read_with_its_images_in_order(name, root, plain_tokenizer):
    row, options, expected, names = READ[name]
    if isinstance(expected, str) and not expected.startswith("text:"):
        expected = [f"user:{expected}", "assistant:cat"]
    if not isinstance(expected, list) or not (isinstance(expected[0], list) or expected[0].startswith("text:")):
        expected = [expected]
    found, images, _ = conversations(row, root, plain_tokenizer, **options)
    assert found == expected
    assert images == [names] * len(expected)


@pytest.mark.parametrize("name", REFUSED)
def test_row_is_refused_in_a_line_that_names_it_and_its_field(name, root, plain_tokenizer):
    row, fact = REFUSED[name]
    with pytest.raises(PlanError) as error:
        conversations(row, root, plain_tokenizer, pairs="chosen" in row)
    line = str(error.value)
    assert fact in line and line.startswith("rows.jsonl:1: ") and "\n" not in line and line.endswith((".", "..."))


def test_the_line_on_a_likely_column_says_how_to_leave_it_out(root, plain_tokenizer):
    with pytest.raises(PlanError, match="If it is not the row's image, add --ignore_columns file_name.$"):
        conversations(REFUSED["a file_name that is not an image of the row"][0], root, plain_tokenizer)


def test_rows_with_images_are_refused_as_before_where_no_images_are_read(root):
    for row, fact in (
        (LLAVA, "column 'image' is not text, which is all this learns"),
        (chat(BARE, text("?")), "field 'messages[0].content[0]' is of type 'image': only text is learned here"),
    ):
        with pytest.raises(PlanError) as error:
            Conversation.of(RowReader(RowOptions()).read(row, "rows.jsonl:1"), TemplateWords(frozenset()))
        assert fact in str(error.value)
    reader = RowReader(RowOptions())
    kept = {"sha256": keep_image(A)}
    for name, value in (
        ("screenshot", "a.png"),
        ("scan", BASE64),
        ("scans", [URI]),
        ("queryImage", "a.png"),
        ("x", kept),
    ):
        with pytest.raises(PlanError, match=f"column '{name}' holds an image .*--columns images={name.lower()}"):
            reader.read({"question": "?", "answer": "cat", name: value}, "rows.jsonl:1")
    reader.read({"question": "?", "answer": "cat", "thumbnail": "a.png", "photo": "of a cat"}, "rows.jsonl:1")
    reader.read({"question": "?", "answer": "cat", "origin": {"path": "a.pdf", "sha256": "0" * 64}}, "rows.jsonl:1")
    assert meaning_in("photo", "a.png", "message") == NOT_TEXT  # of a field of a message too
    reader = RowReader(RowOptions(columns={"images": "scan"}))
    with pytest.raises(PlanError, match="column 'scan' is not text"):
        reader.read({"question": "?", "answer": "cat", "scan": "a.png"}, "rows.jsonl:1")


def test_columns_of_an_image_and_a_text_have_a_remedy_that_works(root, plain_tokenizer):
    row = {"image": {"bytes": A, "path": "x.png"}, "caption_en": "A cat.", "width": 640}
    with pytest.raises(PlanError) as error:
        RowReader(RowOptions(images=ImageOptions(root)), tuple(row), "a", [row])
    assert "use --columns text=caption_en;" in str(error.value)
    found, images, _ = conversations(row, root, plain_tokenizer, columns={"text": "caption_en"})
    assert (found, images) == (["text:@A cat."], ["A"])


def test_a_row_shows_an_image_if_it_has_one_or_fails_on_one(root):
    reader = RowReader(RowOptions(images=ImageOptions(root)))
    for row, shows in (
        (LLAVA, True),
        (human("?", image="none.png"), True),
        (chat({"type": "image", "path": "../x.png"}, text("?")), True),
        (human("<image>", image=None), False),
        (chat(text("?")), False),
    ):
        assert reader.shows_image(row, "rows.jsonl:1") is shows
    assert not RowReader(RowOptions()).shows_image(human("?"), "rows.jsonl:1")


def test_text_that_stays_beside_images_and_columns_that_are_not_used_are_counted(root, plain_tokenizer):
    _, _, reader = conversations(READ["<image> in an answer that is about it"][0], root, plain_tokenizer)
    assert any("<image>, which stays text" in line for line in reader.notices.counts)
    _, _, reader = conversations(READ["image and where it came from"][0], root, plain_tokenizer)
    assert {f"column {name!r} is not used" for name in ("image_url", "file_name")} <= reader.notices.counts.keys()
    _, _, reader = conversations(human("Picture 1: <img>a.png</img> What?"), root, plain_tokenizer)
    assert any("a text has <img>, which stays text" in line for line in reader.notices.counts)


@pytest.mark.parametrize(
    ("part", "names"),
    [
        (
            {"type": "image", "image": "a.png", "max_pixels": 784, "resized_height": 28},
            ["max_pixels", "resized_height"],
        ),
        ({"type": "image_url", "image_url": {"url": URI, "detail": "low"}}, ["detail"]),
        ({"type": "image_url", "image_url": {"url": URI, "detail": "auto"}, "max_pixels": None}, []),
    ],
)
def test_how_an_image_is_made_smaller_is_said_not_to_be_read(root, plain_tokenizer, part, names):
    _, _, reader = conversations(chat(part, text("?")), root, plain_tokenizer)
    said = [line for line in reader.notices.counts if "of an image is not read" in line]
    assert said == [f"field {name!r} of an image is not read; --image_max_pixels is for all of them" for name in names]


def test_rows_of_a_table_with_text_alone_among_them_have_one_schema(root, plain_tokenizer):
    """A Parquet table of both kinds: nulls where a row has no image."""
    rows = [human("<image>?", image={"bytes": A, "path": None}), human("?", image=None)]
    found = [conversations(row, root, plain_tokenizer)[:2] for row in rows]
    assert [images for _, images in found] == [["A"], [""]]


def test_a_conversation_cut_to_some_turns_has_their_images(root, plain_tokenizer):
    row = {
        "messages": [
            {"role": "system", "content": [{**BARE, "path": "sub/c.png"}, text("Be.")]},
            user({**BARE, "path": "a.png"}, text("one")),
            answer("1"),
            user("two"),
            answer("2"),
            user({**BARE, "path": "b.png"}, text("three")),
            answer("3"),
        ]
    }
    reader = RowReader(RowOptions(images=ImageOptions(root)))
    conversation = Conversation.of(reader.read(row, "rows.jsonl:1"), TemplateWords(frozenset()))

    def names(of):
        return "".join(NAMES[image.read_bytes()] for image in of.images)

    assert names(conversation) == "CAB"
    assert [names(conversation.upto_turn(turn)) for turn in (0, 1, 2, None)] == ["CA", "CA", "CAB", "CAB"]
    assert [names(conversation.from_message(start)) for start in conversation.starts()] == ["CB", "CB"]
    assert names(conversation.from_message(3).upto_turn(0)) == "C"


def test_what_else_a_part_says_of_its_image_is_said(root, plain_tokenizer):
    part = {"type": "image", "image": "a.png", "caption": "A lamp.", "width": 3, "alt": ""}
    _, _, reader = conversations(chat(part, text("?")), root, plain_tokenizer)
    assert [line for line in reader.notices.counts if "image" in line] == ["field 'caption' of an image is not read"]


@pytest.mark.parametrize(
    ("row", "names"),
    [
        (chat(BARE, text("?"), images=[{"path": "a.png", "bbox": [0, 0, 5, 5]}]), ["bbox"]),
        (chat({**BARE, "image": {"path": "a.png", "rotation": 90}}, text("?")), ["rotation"]),
        (
            {"messages": [{"role": "user", "content": "?", "images": [{"path": "a.png", "alt": "A."}]}, answer()]},
            ["alt"],
        ),
    ],
)
def test_what_an_object_says_of_its_image_is_said_too(root, plain_tokenizer, row, names):
    _, _, reader = conversations(row, root, plain_tokenizer)
    said = [line for line in reader.notices.counts if "of an image" in line]
    assert said == [f"field {name!r} of an image is not read" for name in names]


def test_two_images_of_one_part_and_a_name_that_the_column_lacks_are_said(root, plain_tokenizer):
    row = chat({**BARE, "image": "a.png", "path": "b.png"}, text("?"))
    _, images, reader = conversations(row, root, plain_tokenizer)
    assert images == ["A"]
    assert any(line.startswith("field 'path' of an image is not read:") for line in reader.notices.counts)
    _, _, reader = conversations(chat({**BARE, "id": "left"}, text("?"), image="a.png"), root, plain_tokenizer)
    assert "field 'id' of an image's place is not read: images are taken in order" in reader.notices.counts
