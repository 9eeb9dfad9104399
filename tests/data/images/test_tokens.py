"""Documents with images: their tokens, what is learned of them, and which images they show."""

import json
import shlex
import shutil

import numpy as np
import pytest

from finetune.data.columns import RowOptions, RowReader
from finetune.data.images.decode import ImageReader
from finetune.data.images.inputs import ImageInputs
from finetune.data.images.marks import IMAGE_MARK
from finetune.data.images.references import ImageOptions, ImageReference
from finetune.data.mismatched import mismatched_documents
from finetune.data.reading.sources import read_rows
from finetune.data.tokens.tokenize import generation_examples, tokenize
from finetune.errors import PlanError
from finetune.model_files.files import find_model
from finetune.model_files.processor import ImageProcessor
from finetune.model_files.tokenizer import load_tokenizer
from finetune.run.answers import prompt_ids, shown_of
from finetune.run.report import ask_command
from tests.support import vision
from tests.support.cells import but_slow
from tests.support.rows import jsonl

NAMES = but_slow(["qwen2_5_vl", "llava", "idefics3"], ["qwen2_5_vl"])
TURNS = ((1, 1), (2, 1), (1, 0), (1, 2))  # images of the two questions of each row


@pytest.fixture(scope="module", params=NAMES)
def folder(request, tmp_path_factory):
    return vision.save_model(request.param, tmp_path_factory.mktemp("models") / request.param)


def inputs_of(folder):
    """(a model's tokenizer, what makes its arrays of images)."""
    tokenizer = load_tokenizer(folder)
    processor = ImageProcessor.open(folder, find_model(str(folder)).config, tokenizer)
    return tokenizer, ImageInputs(processor, ImageReader())


def write_turns(folder, **last):
    """A file of chats of two questions with so many images; `last`: more of the last answers."""
    one = [row["messages"] for row in vision.chats(folder, [a for a, _ in TURNS])]
    (folder / "second").mkdir()
    two = [row["messages"] for row in vision.chats(folder / "second", [b for _, b in TURNS])]
    for row in two:
        for part in row[0]["content"]:
            if "image" in part:
                part["image"] = f"second/{part['image']}"
    file = folder / "turns.jsonl"
    lines = [json.dumps({"messages": [*a, b[0], {**b[1], **last}]}) for a, b in zip(one, two, strict=True)]
    file.write_text("\n".join(lines) + "\n")
    return file


def read(file, folder, context_length=1024, **how):
    tokenizer, inputs = inputs_of(folder)
    raw = read_rows(str(file), samples=-1)
    options = RowOptions(images=ImageOptions(file.parent))
    dataset = tokenize(raw, options, tokenizer, context_length, images=inputs, **how)
    return dataset, generation_examples(raw, options, tokenizer, images=inputs)


def num_shown(tokens, images, inputs):
    """(tokens for parts of images, those that the processor makes for these images)."""
    ids = list(inputs.processor.image_ids)
    decoded = [inputs.reader.read(inputs.references[bytes(digest)]) for digest in images]
    made = []
    if decoded:
        _, made = inputs.processor.of_text(inputs.processor.token * len(decoded), decoded, True)
    return int(np.isin(tokens, ids).sum()), int(np.isin(made, ids).sum())


def check_shown(dataset):
    for i in range(len(dataset)):
        found, made = num_shown(dataset.document(i)[0], dataset.images_of(i), dataset.images)
        assert found == made, (i, found, made)


def test_documents_show_the_images_whose_tokens_they_have(folder, tmp_path):
    file = write_turns(tmp_path)
    dataset, _ = read(file, folder)
    assert [len(dataset.images_of(i)) for i in range(len(dataset))] == [sum(counts) for counts in TURNS]
    check_shown(dataset)


def test_a_chat_that_loses_its_oldest_messages_loses_their_images(folder, tmp_path):
    file = write_turns(tmp_path)
    longest = int(read(file, folder)[0].lengths.max())
    dataset, _ = read(file, folder, longest - 1)
    assert dataset.counts["messages_cut"]
    check_shown(dataset)


def test_images_after_the_last_learned_answer_are_not_shown(folder, tmp_path):
    file = write_turns(tmp_path, weight=0)
    dataset, questions = read(file, folder)
    assert [len(dataset.images_of(i)) for i in range(len(dataset))] == [one for one, _ in TURNS]
    check_shown(dataset)
    for prompt, _, _ in questions:
        found, made = num_shown(prompt, prompt.images, dataset.images)
        assert found == made


def test_no_token_of_an_image_is_learned_with_the_prompt(folder, tmp_path):
    file = vision.write_chats(tmp_path)
    dataset, _ = read(file, folder, train_on_prompt=True)
    answers, _ = read(file, folder)
    processor = dataset.images.processor
    for i in range(len(dataset)):
        ids, is_target = dataset.document(i)
        assert is_target.sum() > answers.document(i)[1].sum()
        assert not is_target[np.isin(ids, list(processor.image_ids))].any()
    ids, is_target = dataset.document(0)
    (text,), _ = processor.of_text(processor.token, [vision.picture(0)], True)
    written = processor.own.tokenizer(text, add_special_tokens=False).input_ids
    special = {n for n in written if processor.own.tokenizer.decode([n]).startswith("<")}
    assert special and not special & set(ids[is_target].tolist())


def test_mismatched_documents_show_the_images_of_their_prompts(folder, tmp_path):
    dataset, _ = read(vision.write_chats(tmp_path, (1, 2, 0, 1)), folder)
    numbers = list(range(dataset.num_rows))
    found = mismatched_documents(dataset, numbers, slice(None), 1024, dataset)
    for i in numbers:
        assert found.images_of(i).tolist() == dataset.images_of(i).tolist()
    check_shown(found)
    assert found.arrays.keys() == dataset.arrays.keys()
    short = mismatched_documents(dataset, numbers, slice(None), int(dataset.lengths.max()), dataset)
    check_shown(short)


def test_rows_are_other_rows_with_other_settings_of_the_processor(folder, tmp_path):
    file = vision.write_chats(tmp_path)
    own = read(file, folder)[0].digest()
    assert read(file, folder)[0].digest() == own
    other = shutil.copytree(folder, tmp_path / "other")
    settings = other / "preprocessor_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"image_mean": [0.25, 0.25, 0.25]}))
    assert read(file, other)[0].digest() != own


def test_a_tokenizer_without_a_padding_token_reads_images(folder, tmp_path):
    file = vision.write_chats(tmp_path)
    other = shutil.copytree(folder, tmp_path / "other")
    settings = other / "tokenizer_config.json"
    kept = {name: value for name, value in json.loads(settings.read_text()).items() if name != "pad_token"}
    settings.write_text(json.dumps(kept))
    dataset, _ = read(file, other)
    own, _ = read(file, folder)
    assert load_tokenizer(other).pad_token is None
    assert np.array_equal(dataset.tokens, own.tokens)
    assert dataset.images.inputs(dataset.arrays["images"]).keys() == own.images.inputs(own.arrays["images"]).keys()


@pytest.mark.parametrize("text", ["Is <image> or <image> brighter?", "<image><image>Which?", "Which?"])
def test_a_prompt_shows_images_in_its_places_as_rows_do(folder, tmp_path, text):
    names = []
    for k in range(2):
        (tmp_path / f"{k}.png").write_bytes(vision.png(vision.picture(k)))
        names.append(f"{k}.png")
    file = tmp_path / "rows.jsonl"
    jsonl(file, [{"question": text, "answer": "no", "images": names}])
    _, ((expected, _, _), *_) = read(file, folder)
    tokenizer, inputs = inputs_of(folder)
    images = tuple(ImageReference(name, path=tmp_path / name) for name in names)
    shown = shown_of(images, inputs)
    assert prompt_ids(tokenizer, [("user", text)], False, shown) == list(expected)
    assert prompt_ids(tokenizer, [("user", text)], True, shown) != list(expected)
    with pytest.raises(PlanError, match="^prompt: has 1 <image>, and images are 2. Write one for each, or none.$"):
        prompt_ids(tokenizer, [("user", "What is <image>?")], False, shown)
    row = RowReader(RowOptions(images=ImageOptions(tmp_path))).read(json.loads(file.read_text()), "rows.jsonl:1")
    asked = text.removeprefix("<image><image>")
    shows = [word for name in names for word in ("--image", str(tmp_path / name))]
    assert shlex.split(ask_command("out", row, tokenizer))[-6:] == [*shows, "--prompt", asked]


def test_a_mark_in_a_prompt_of_text_is_no_image(folder):
    tokenizer, inputs = inputs_of(folder)
    ids = prompt_ids(tokenizer, [("user", f"What is {IMAGE_MARK}?")], False)
    assert not np.isin(ids, list(inputs.processor.image_ids)).any()
