"""Decoding of images: each is what Pillow has of it by hand, or is refused in a line that names its row."""

import contextlib
import io
import os
import pickle
import signal
import subprocess
import sys
import time
import zlib

import numpy as np
import pytest

from finetune.data.images.decode import BROKEN_PILLOW, NO_PILLOW, ImageReader
from finetune.data.images.decode_process import shrunk_size
from finetune.data.images.references import ImageReference
from finetune.errors import PlanError
from tests.support.commands import ROOT

Image = pytest.importorskip("PIL.Image", reason="needs the package pillow")
from tests.data.images import pictures  # noqa: E402  imports Pillow

NUM_DAMAGED = 200
MOST_SECONDS = 10  # of one image


@pytest.fixture(scope="module")
def reader():
    with ImageReader() as opened:
        yield opened


def reference(data, row=1):
    return ImageReference(f"rows.jsonl:{row}: field 'image'", data=data)


def refusal(reader, data, row=1):
    with pytest.raises(PlanError) as error:
        reader.read(reference(data, row))
    line = str(error.value)
    assert line.startswith(f"rows.jsonl:{row}: field 'image': ") and "\n" not in line and line.endswith(".")
    assert "Traceback" not in line
    return line


def same(found, expected):
    """True for the same pixels; those that are transparent are rounded by one in 255 at most."""
    return found.shape == expected.shape and int(np.abs(found.astype(int) - expected).max()) <= 1


@pytest.mark.parametrize("seed", [0, 1])
def test_images_of_every_kind_are_what_pillow_has_of_them(reader, seed):
    for name, data in pictures.whole(np.random.default_rng(seed)).items():
        expected = pictures.by_hand(data)
        found = reader.read(reference(data))
        assert found.dtype == np.uint8 and same(found, expected), name
        if not any(word in name for word in ("alpha", "rgba", "clear")):
            assert np.array_equal(found, expected), name
        assert reader.size(reference(data)) == found.shape[:2], name


def test_sizes_are_those_of_headers_and_damage_is_seen_by_whole_ones():
    with ImageReader() as reader:
        for name, data in pictures.whole(np.random.default_rng(6)).items():
            expected = pictures.by_hand(data).shape[:2]
            assert reader.size(reference(data)) == reader.size(reference(data), whole=True) == expected, name
        data = pictures.saved(Image.new("RGB", (300, 200), "red"), "BMP")[:-7]
        assert reader.size(reference(data)) == (200, 300)
        for _ in range(2):
            with pytest.raises(PlanError, match="rows.jsonl:1: field 'image': cannot be decoded .*truncated"):
                reader.size(reference(data), whole=True)
        assert not reader.kept


def test_long_texts_of_a_png_are_read_past_and_endless_ones_refused(reader):
    for size, fact in ((2**22, None), (2**26 + 1, "Decompressed data too large")):
        packed = zlib.compress(bytes(size), 1)
        texts = [(b"zTXt", b"prompt\0\0" + packed), (b"iCCP", b"profile\0\0" + packed)]
        for chunk in texts:
            data = pictures.png(2, 1, 8, 2, b"\0\1\2\3\4\5\6", [chunk])
            if fact is None:
                assert reader.read(reference(data)).tolist() == [[[1, 2, 3], [4, 5, 6]]]
            else:
                assert fact in refusal(reader, data)


@pytest.mark.parametrize("fmt", ["AVIF", "JPEG2000"])
def test_newer_formats_are_read_where_pillow_has_them(reader, fmt):
    Image.init()
    if fmt not in Image.SAVE:
        pytest.skip(f"this Pillow was built without {fmt}")
    data = pictures.saved(Image.fromarray(pictures.noise(np.random.default_rng(0), 32, 48, 3)), fmt)
    assert np.array_equal(reader.read(reference(data)), pictures.by_hand(data))


def test_what_is_no_picture_is_refused_by_what_it_is(reader):
    for row, (name, (data, fact)) in enumerate(pictures.refused(np.random.default_rng(0)).items()):
        assert fact in refusal(reader, data, row), name


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_damaged_images_are_what_pillow_has_of_them_or_refused(reader):
    """Faults drawn from a seed: cut, flipped, filled and longer files. A fault in a picture's own numbers is not seen:
    then the pixels are Pillow's.
    """
    rng = np.random.default_rng(20)
    whole = list(pictures.whole(rng).values())
    read = num_refused = 0
    for row in range(NUM_DAMAGED):
        data = pictures.damaged(rng, whole[int(rng.integers(len(whole)))])
        expected = pictures.by_hand(data)
        began = time.monotonic()
        if expected is pictures.LARGE:
            with contextlib.suppress(PlanError):
                reader.read(reference(data, row))
        elif expected is None:
            refusal(reader, data, row)
            num_refused += 1
        else:
            assert same(reader.read(reference(data, row)), expected), row
            read += 1
        assert time.monotonic() - began < MOST_SECONDS
    assert min(read, num_refused) > NUM_DAMAGED // 5


SHRUNK = [
    ((100, 100), 10_000, (100, 100)),
    ((100, 100), 9_999, (99, 99)),
    ((400, 100), 10_000, (200, 50)),
    ((100, 400), 10_000, (50, 200)),
    ((3, 600), 100, (1, 100)),
    ((200, 1), 100, (100, 1)),
    ((5, 5), 1, (1, 1)),
]


def test_sizes_are_shrunk_to_so_many_pixels_and_keep_their_ratio():
    for size, most, expected in SHRUNK:
        assert shrunk_size(*size, most) == expected
    for width, height, most in np.random.default_rng(5).integers(1, 5000, (2000, 3)).tolist():
        found = shrunk_size(width, height, most)
        assert found == shrunk_size(height, width, most)[::-1] and found[0] * found[1] <= max(most, 1)
        assert found == (width, height) if width * height <= most else 1 <= min(found)


def test_larger_images_are_shrunk_by_lanczos():
    with ImageReader(max_pixels=100) as reader:
        for size, expected in (((60, 20), (17, 5)), ((20, 60), (5, 17)), ((10, 10), (10, 10))):
            data = pictures.saved(Image.fromarray(pictures.noise(np.random.default_rng(1), size[1], size[0], 3)))
            found = reader.read(reference(data))
            assert found.shape == (*expected[::-1], 3) and reader.size(reference(data)) == found.shape[:2]
            by_hand = Image.open(io.BytesIO(data)).resize(expected, Image.Resampling.LANCZOS)
            assert np.array_equal(found, np.asarray(by_hand))


def test_a_shrunk_image_is_turned_first():
    image = Image.fromarray(pictures.noise(np.random.default_rng(1), 40, 20, 3))
    with ImageReader(max_pixels=200) as reader:
        turned = reference(pictures.turned(6, image, "PNG"))
        assert reader.size(turned) == (10, 20) and reader.read(turned).shape == (10, 20, 3)


def test_a_decoder_that_died_is_replaced(reader):
    data = pictures.saved(Image.fromarray(pictures.noise(np.random.default_rng(2), 9, 7, 3)))
    reader.read(reference(pictures.saved(Image.new("RGB", (3, 5)))))
    os.kill(reader.child.process.pid, signal.SIGKILL)
    assert np.array_equal(reader.read(reference(data)), pictures.by_hand(data))


def endless_jpeg(scans):
    """A progressive JPEG whose last scan is written again and again: each passes over every block."""
    data = pictures.saved(Image.new("L", (2048, 2048), 77), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * scans + data[-2:]


@pytest.mark.slow
def test_an_image_that_takes_too_long_costs_a_child_and_the_next_one_is_read(reader):
    began = time.monotonic()
    assert "processor time" in refusal(reader, endless_jpeg(40_000), 7)
    assert time.monotonic() - began < 60
    data = pictures.saved(Image.new("RGB", (4, 4), "red"))
    assert reader.read(reference(data)).shape == (4, 4, 3)


@pytest.mark.slow
def test_an_image_at_the_limit_of_pixels_is_read(reader):
    data = pictures.saved(Image.new("RGB", (13_000, 13_000), (1, 2, 3)), compress_level=1)
    with ImageReader(max_pixels=10_000) as shrinking:
        found = shrinking.read(reference(data))
    assert found.shape == (100, 100, 3) and (found == [1, 2, 3]).all()


def test_decoded_images_are_kept_within_a_bound_the_latest_used_longest():
    files = [pictures.saved(Image.new("RGB", (10, 10), (i, i, i))) for i in range(3)]
    with ImageReader(cache_bytes=2 * 300) as reader:
        first, second = (reader.read(reference(data)) for data in files[:2])
        assert reader.read(reference(files[0])) is first
        reader.read(reference(files[2]))
        assert reader.kept_bytes == 600 and reader.read(reference(files[0])) is first
        assert reader.read(reference(files[1])) is not second
        large = reader.read(reference(pictures.saved(Image.new("RGB", (20, 20)))))
        assert large.shape == (20, 20, 3) and reader.kept_bytes == 600


def test_a_file_that_changes_while_it_is_used_is_refused(tmp_path, reader):
    file = tmp_path / "a.png"
    file.write_bytes(pictures.saved(Image.new("RGB", (3, 3), "red")))
    first = ImageReference("rows.jsonl:1: field 'image'", path=file)
    assert pickle.loads(pickle.dumps(first)) == first == ImageReference("other", data=file.read_bytes())
    assert {first: 1}[ImageReference("other", data=file.read_bytes())] == 1
    file.write_bytes(pictures.saved(Image.new("RGB", (4, 4), "red")))
    assert first != ImageReference("other", data=file.read_bytes())
    with pytest.raises(PlanError, match="has changed since it was read"):
        reader.read(first)
    file.unlink()
    with pytest.raises(PlanError, match=r"rows.jsonl:2: field 'image': .* cannot be read \(No such file"):
        reader.read(ImageReference("rows.jsonl:2: field 'image'", path=file))


def test_a_missing_or_broken_pillow_is_one_line(tmp_path, monkeypatch):
    """The child's import path is this process'."""
    without = [p for p in sys.path if not os.path.isdir(os.path.join(p, "PIL"))]
    (tmp_path / "PIL").mkdir()
    (tmp_path / "PIL" / "__init__.py").write_text("raise ImportError('libjpeg.so.62: cannot open')")
    broken = BROKEN_PILLOW.format(fact="cannot be imported (libjpeg.so.62: cannot open)")
    for path, line in ((without, NO_PILLOW), ([str(tmp_path), *without], broken)):
        monkeypatch.setattr(sys, "path", path)
        with ImageReader() as reader, pytest.raises(PlanError) as error:
            reader.read(reference(b"\x89PNG\r\n\x1a\n"))
        assert str(error.value) == line and "pip install" in line


def test_rows_and_their_reader_import_no_pillow():
    code = (
        "import sys; import finetune.data.prepare, finetune.data.in_memory, finetune.data.images.decode; "
        "print(sorted({'PIL', 'cv2', 'torchvision'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
