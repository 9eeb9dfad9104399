"""Images in files of rows and in rows that a Python program holds, from reading to the pixels."""

import io
import json
import re

import numpy as np
import pytest

import generate
from finetune.data.asking import asking
from finetune.data.columns import RowOptions, RowReader
from finetune.data.conversation import Conversation
from finetune.data.formats import render_text
from finetune.data.images.decode import ImageReader
from finetune.data.images.references import ImageOptions, image_root_of, kept_images
from finetune.data.in_memory import as_file
from finetune.data.messages import TemplateWords
from finetune.data.preference_rows import as_answer
from finetune.data.prepare import check_columns
from finetune.data.reading.sources import read_rows
from finetune.data.tokens.tokenize import tokenize
from finetune.errors import PlanError
from tests.support.commands import ROOT
from tests.support.rows import jsonl

Image = pytest.importorskip("PIL.Image", reason="needs the package pillow")
ImageOps = pytest.importorskip("PIL.ImageOps", reason="needs the package pillow")

RNG = np.random.default_rng(3)
PIXELS = [RNG.integers(0, 256, (4 + i, 6, 3), np.uint8) for i in range(3)]
PICTURES = [Image.fromarray(pixels) for pixels in PIXELS]


def png(i):
    file = io.BytesIO()
    PICTURES[i].save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def reader():
    with ImageReader() as opened:
        yield opened


def pixels_of(dataset, reader, given=None):
    """[the pixels of each row's images] of a dataset by its name."""
    raw = read_rows(str(dataset))
    options = RowOptions(images=ImageOptions(image_root_of(str(dataset), given)))
    rows = RowReader(options, raw.columns)
    read = [rows.read(row, source) for row, source in zip(raw.rows, raw.sources, strict=True)]
    return [[reader.read(image) for image in as_answer(row).images] for row in read]


def check(found, *numbers):
    """`numbers`: of each row's pictures."""
    assert len(found) == len(numbers)
    for images, expected in zip(found, numbers, strict=True):
        assert len(images) == len(expected)
        assert all(np.array_equal(image, PIXELS[int(i)]) for image, i in zip(images, expected, strict=True))


def test_paths_begin_in_the_folder_of_the_file_or_of_the_dataset_or_in_image_root(tmp_path, reader, monkeypatch):
    data = tmp_path / "data"
    (data / "train").mkdir(parents=True)
    for name, i in (("a.png", 0), ("train/b.png", 1), ("train/a.png", 2)):
        PICTURES[i].save(data / name)
    rows = [{"file_name": "b.png", "text": "B"}, {"file_name": "a.png", "text": "A"}]
    file = jsonl(data / "train" / "metadata.jsonl", rows)
    check(pixels_of(file, reader), "1", "2")
    check(pixels_of(data, reader), "1", "2")  # of the file's own folder first
    monkeypatch.chdir(data)
    check(pixels_of("train/metadata.jsonl", reader), "1", "2")
    other = jsonl(tmp_path / "rows.jsonl", [{"question": "?", "answer": "A", "image": "a.png"}])
    check(pixels_of(other, reader, str(data)), "0")
    with pytest.raises(PlanError, match="there is no such file in .*--image_root"):
        pixels_of(other, reader)
    with pytest.raises(PlanError, match="--image_root .*none: is not a folder"):
        pixels_of(other, reader, str(tmp_path / "none"))
    assert image_root_of("org/name", None) is None and image_root_of("a\0b", None) is None


def test_files_of_a_snapshot_in_the_hubs_cache_are_links_to_its_blobs(tmp_path, reader):
    repo = tmp_path / "datasets--org--name"
    (repo / "blobs").mkdir(parents=True)
    (repo / "snapshots" / "abc" / "images").mkdir(parents=True)
    PICTURES[0].save(repo / "blobs" / "1234", "PNG")
    jsonl(repo / "blobs" / "5678", [{"question": "?", "answer": "A", "image": "images/a.png"}])
    snapshot = repo / "snapshots" / "abc"
    (snapshot / "images" / "a.png").symlink_to("../../../blobs/1234")
    (snapshot / "rows.jsonl").symlink_to("../../blobs/5678")
    check(pixels_of(snapshot / "rows.jsonl", reader), "0")
    check(pixels_of(snapshot, reader), "0")
    (tmp_path / "outside.png").write_bytes(png(0))
    (snapshot / "images" / "a.png").unlink()
    (snapshot / "images" / "a.png").symlink_to(tmp_path / "outside.png")
    with pytest.raises(PlanError, match="which is outside"):
        pixels_of(snapshot, reader)


def test_the_rows_of_the_page_are_one_conversation(tmp_path, reader):
    PICTURES[0].save(tmp_path / "lamp.png")
    (page,) = re.findall(r"^```json\n(.*?)^```$", (ROOT / "docs" / "images.md").read_text(), re.M | re.S)
    (tmp_path / "rows.jsonl").write_text(page)
    check(pixels_of(tmp_path / "rows.jsonl", reader), "0", "0", "0", "0")
    raw = read_rows(str(tmp_path / "rows.jsonl"))
    rows = RowReader(RowOptions(images=ImageOptions(tmp_path.resolve())), raw.columns)
    read = [Conversation.of(rows.read(row, "a:1"), TemplateWords(frozenset())).messages for row in raw.rows]
    expected = [{"role": "user", "content": "\ufdd0What is this?"}, {"role": "assistant", "content": "A lamp."}]
    assert read == [expected] * 4


def test_rows_of_the_hub_have_no_folder(reader):
    rows = RowReader(RowOptions(images=ImageOptions(None)))
    with pytest.raises(PlanError, match="field 'image' is the path 'a.png', and the rows have no folder.*--image_root"):
        rows.read({"question": "?", "answer": "A", "image": "a.png"}, "org/name/train.parquet:row 1")


def test_structs_of_bytes_and_paths_are_read_from_parquet_and_arrow(tmp_path, reader):
    """One per row, lists of them, and rows without any, as the package datasets writes its Image columns."""
    import pyarrow
    import pyarrow.parquet

    PICTURES[1].save(tmp_path / "b.png")
    image = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    columns = {
        "question": ["<image>?", "no image?", "<image>", "none?"],
        "answer": ["a", "b", "c", "d"],
        "image": pyarrow.array(
            [
                {"bytes": png(0), "path": "/elsewhere/0.png"},
                None,
                {"bytes": None, "path": "b.png"},
                {"bytes": None, "path": None},
            ],
            image,
        ),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "one.parquet")
    check(pixels_of(tmp_path / "one.parquet", reader), "0", "", "1", "")
    lists = pyarrow.array(
        [[columns["image"][0].as_py(), {"bytes": png(2), "path": None}], [], None], pyarrow.list_(image)
    )
    rows = pyarrow.table({"question": ["?"] * 3, "answer": ["a"] * 3, "images": lists})
    with (
        pyarrow.OSFile(str(tmp_path / "several.arrow"), "wb") as file,
        pyarrow.ipc.new_stream(file, rows.schema) as out,
    ):
        out.write_table(rows)
    check(pixels_of(tmp_path / "several.arrow", reader), "02", "", "")


@pytest.mark.slow
def test_image_columns_of_datasets_are_read_from_parquet_and_arrow(tmp_path, reader):
    """Columns of structs, lists of them, and rows without an image among them; written by the package itself."""
    import datasets

    columns = {
        "question": ["<image>?", "no image?", "<image>"],
        "answer": ["a", "b", "c"],
        "image": [PICTURES[0], None, PICTURES[2]],
    }
    one = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    one.to_parquet(tmp_path / "one.parquet")
    check(pixels_of(tmp_path / "one.parquet", reader), "0", "", "2")
    one.save_to_disk(tmp_path / "saved")
    check(pixels_of(tmp_path / "saved", reader), "0", "", "2")
    chats = [
        [{"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "?"}]}],
        [{"role": "user", "content": [{"type": "text", "text": "?"}]}],
    ]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "cat"}]}
    features = datasets.Features(
        {
            "messages": [
                {"role": datasets.Value("string"), "content": [{k: datasets.Value("string") for k in ("type", "text")}]}
            ],
            "images": datasets.Sequence(datasets.Image()),
        }
    )
    rows = {"messages": [[*chat, answer] for chat in chats], "images": [[PICTURES[1]], []]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "chats.parquet")
    check(pixels_of(tmp_path / "chats.parquet", reader), "1", "")


def test_pictures_and_bytes_of_a_python_program_are_kept_beside_its_rows(cache, reader):
    rows = [
        {"question": "?", "answer": "a", "image": PICTURES[0]},
        {"question": "?", "answer": "b", "image": {"bytes": png(1), "path": None}},
        {"question": "?", "answer": "c", "images": [PICTURES[2], png(0)]},
        {"question": "?", "answer": "d", "image": None},
    ]
    file = as_file(rows, "dataset")
    check(pixels_of(file, reader), "0", "1", "20", "")
    assert as_file(rows, "dataset") == file and len(list(kept_images().iterdir())) == 3
    chat = [{"role": "user", "content": [{"type": "image", "image": PICTURES[1]}, {"type": "text", "text": "?"}]}]
    check(pixels_of(as_file([{"messages": chat}], "dataset"), reader), "1")
    assert "sha256" in open(file).readline()
    digest = json.loads(open(file).readline())["image"]["sha256"]
    image = (kept_images() / digest).read_bytes()
    (kept_images() / digest).write_bytes(image[::-1])
    with pytest.raises(PlanError, match="field 'image': .* is not as it was written. Give the rows again"):
        pixels_of(file, reader)
    check(pixels_of(as_file(rows, "dataset"), reader), "0", "1", "20", "")
    (kept_images() / digest).unlink()
    with pytest.raises(PlanError, match="is not an image in"):
        pixels_of(file, reader)


@pytest.mark.slow
def test_pictures_of_datasets_are_kept(cache, reader):
    import datasets

    columns = {"question": ["?", "?"], "answer": ["a", "b"], "image": [PICTURES[0], None]}
    table = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    check(pixels_of(as_file(table, "dataset"), reader), "0", "")
    check(pixels_of(as_file(table.data.table, "dataset"), reader), "0", "")  # an Arrow table has bytes
    check(pixels_of(as_file(table.select([1, 0, 0]), "dataset"), reader), "", "0", "0")


@pytest.mark.slow
def test_images_of_datasets_stay_the_files_that_they_are(cache, reader, tmp_path):
    """A JPEG is not written as PNG, and one that is damaged is refused by its row, not by the package datasets."""
    import datasets

    files = [tmp_path / "a.jpg", tmp_path / "b.jpg"]
    PICTURES[0].save(files[0])
    files[1].write_bytes(files[0].read_bytes()[:-40])
    columns = {"question": ["?"] * 2, "answer": ["a"] * 2, "images": [[str(file)] for file in files]}
    features = datasets.Features(
        {
            "question": datasets.Value("string"),
            "answer": datasets.Value("string"),
            "images": datasets.List(datasets.Image()),
        }
    )
    file = as_file(datasets.Dataset.from_dict(columns, features=features), "dataset")
    kept = {path.read_bytes() for path in kept_images().iterdir()}
    assert kept == {path.read_bytes() for path in files}
    with pytest.raises(PlanError, match=r":2: field 'images\[0\]': cannot be decoded"):
        pixels_of(file, reader)


def test_paths_in_rows_of_a_python_program_begin_in_the_current_folder(cache, reader, tmp_path, monkeypatch):
    PICTURES[1].save(tmp_path / "a.png")
    file = as_file([{"question": "?", "answer": "a", "image": "a.png"}], "dataset")
    monkeypatch.chdir(tmp_path)
    check(pixels_of(file, reader), "1")


def test_pictures_of_other_modes_are_kept(cache, reader):
    for mode in ("CMYK", "YCbCr", "HSV", "L", "P", "RGBA", "I;16"):
        picture = Image.new("L", (3, 2), 200) if mode == "I;16" else PICTURES[0]
        rows = [{"question": "?", "answer": "a", "image": picture.convert(mode)}]
        ((found,),) = pixels_of(as_file(rows, "dataset"), reader)
        assert found.shape == (picture.height, picture.width, 3)
    with pytest.raises(PlanError, match="row 1: column image: the image cannot be read"):
        picture = Image.open(io.BytesIO(png(0)[:60]))
        as_file([{"question": "?", "answer": "a", "image": picture}], "dataset")
    with pytest.raises(PlanError, match="column data is bytes, which is no text"):
        as_file([{"question": "?", "answer": "a", "data": b"no image"}], "dataset")


@pytest.mark.parametrize("fmt", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_a_picture_is_turned_as_its_file_is(cache, reader, tmp_path, fmt):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(RNG.integers(0, 256, (12, 20, 3), np.uint8)).save(tmp_path / "a", fmt, exif=exif)
    rows = [{"question": "?", "answer": "a", "image": Image.open(tmp_path / "a")}]
    upright = [{"question": "?", "answer": "a", "image": ImageOps.exif_transpose(Image.open(tmp_path / "a"))}]
    ((expected,),) = pixels_of(jsonl(tmp_path / "rows.jsonl", [rows[0] | {"image": "a"}]), reader)
    for given in (rows, upright):
        ((found,),) = pixels_of(as_file(given, "dataset"), reader)
        assert found.shape == (20, 12, 3) and (found == expected).all()


def test_a_picture_is_what_its_file_is_whatever_its_mode(cache, reader, tmp_path):
    """Bytes of 16-bit pixels in either order, pixels that are transparent; pixels of which white is not known."""
    deep = Image.frombytes("I;16B", (3, 2), bytes(range(0, 240, 20)))
    clear = Image.new("RGBA", (3, 2), (200, 40, 40, 0))
    for picture, written, kind in ((deep, deep, "TIFF"), (clear.convert("RGBa"), clear, "PNG")):
        written.save(tmp_path / f"a.{kind}")
        one, of_file = ({"question": "?", "answer": "a", "image": image} for image in (picture, f"a.{kind}"))
        ((found,),) = pixels_of(as_file([one], "dataset"), reader)
        ((expected,),) = pixels_of(jsonl(tmp_path / "rows.jsonl", [of_file]), reader)
        assert (found == expected).all() and found.max() > 0
    for mode in ("F", "I"):
        with pytest.raises(
            PlanError, match="row 1: column image: has pixels of Pillow's mode [FI], of which white is not known"
        ):
            as_file([{"question": "?", "answer": "a", "image": Image.new(mode, (3, 2))}], "dataset")


def test_a_conversation_is_saved_with_the_images_that_it_shows(cache, reader, tmp_path):
    PICTURES[1].save(tmp_path / "shown.png")
    turns = [("system", "Be brief."), ("user", "What is it?"), ("assistant", "A cat."), ("user", "And?")]
    turns.append(("assistant", "No dog."))
    file = tmp_path / "elsewhere" / "chat.jsonl"
    file.parent.mkdir()
    assert generate.saved(turns, str(file), [str(tmp_path / "shown.png")]) == f"(saved to {file})"
    check(pixels_of(file, reader), "1")
    (row,) = (json.loads(line) for line in file.read_text().splitlines())
    assert row["messages"][1]["content"][1] == {"type": "text", "text": "What is it?"}
    assert row["messages"][3] == {"role": "user", "content": "And?"}


def test_rows_with_images_are_no_tokens_without_the_models_processor(tmp_path, chat_tokenizer):
    PICTURES[0].save(tmp_path / "a.png")
    raw = read_rows(jsonl(tmp_path / "rows.jsonl", [{"question": "See <image>?", "answer": "cat", "image": "a.png"}]))
    with pytest.raises(AssertionError, match="shows images"):
        tokenize(raw, RowOptions(images=ImageOptions(tmp_path.resolve())), chat_tokenizer, 512)


def test_a_row_whose_image_is_bad_can_be_skipped(tmp_path, chat_tokenizer):
    rows = [{"question": "?", "answer": "a", "image": "none.png"}, {"question": "?", "answer": "b"}]
    raw = read_rows(jsonl(tmp_path / "rows.jsonl", rows), skip_bad_rows=1)
    options = RowOptions(images=ImageOptions(tmp_path.resolve()))
    check_columns(raw, options, "--dataset rows.jsonl")  # where no row is skipped
    found = tokenize(raw, options, chat_tokenizer, 512)
    assert len(found) == 1 and "none.png" in found.skipped[0]


def test_rows_for_a_reward_function_keep_their_images(tmp_path):
    row = {"question": "?", "answer": "a", "image": "a.png", "difficulty": 3}
    raw = read_rows(jsonl(tmp_path / "rows.jsonl", [row]))
    assert asking(raw, {}, only_known=True, kept=("image",)).columns == ("question", "answer", "image")
    asked = asking(raw, {}, only_known=True)
    assert asked.columns == ("question", "answer")
    said = {f"column {name!r} is not asked: reward functions alone see it": 1 for name in ("image", "difficulty")}
    assert asked.notices.counts == said and not raw.notices.counts


def test_images_are_no_target_of_a_text(plain_tokenizer):
    row = RowReader(RowOptions(images=ImageOptions())).read({"text": "a <image> b", "image": png(0)}, "rows.jsonl:1")
    spans = render_text(row, plain_tokenizer).spans
    assert [(span.text, span.is_target) for span in spans] == [("a ", True), ("\ufdd0", False), (" b", True)]
