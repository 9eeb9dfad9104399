"""The child process that decodes images, other people's files, within limits; decode.py starts it.

Its first message holds the settings. Each after it is one image; the answer is a header in JSON and the pixels, RGB in
rows from the top. Only this module imports Pillow.
"""

import importlib.util
import io
import json
import math
import sys
from collections.abc import Iterator
from typing import Any

from finetune.errors import PlanError
from finetune.system.child import limit_memory, limit_time, serve
from finetune.system.untrusted import untrusted

# MPO: what phones write as .jpg, of which the first picture is the photo. No format whose reader starts a program.
FORMATS = ("JPEG", "MPO", "PNG", "GIF", "WEBP", "BMP", "DIB", "TIFF", "AVIF", "JPEG2000", "PPM")
MAX_PIXELS = 178_956_970  # Pillow's own bound of a decompression bomb
MAX_ASPECT = 200  # the longer side by the shorter one; models refuse more
# of processor time: so much, and so much for each byte and pixel; ten times what a format takes
IMAGE_S = 5.0
S_PER_BYTE = 1e-6
S_PER_PIXEL = 1e-6
# of memory: Python and Pillow, each byte of the file, and each pixel
MIN_BYTES = 2**29
BYTES_PER_BYTE = 4
BYTES_PER_PIXEL = 24
OPEN_PIXELS = 2**24  # that a reader may have room for before the size is known
MAX_TEXT_BYTES = 2**26  # of a PNG's texts and profile, which programs that make images fill
ORIENTATION = 0x0112
# of a TIFF's tags, and values of them
BITS_PER_SAMPLE = 258
PHOTOMETRIC = 262
SAMPLE_FORMAT = 339
WHITE_IS_ZERO = 0
SIGNED = 2
# what is asked of an image: its size, that and whether it can be decoded, its pixels
HEADER = "header"
WHOLE = "whole"
PIXELS = "pixels"
NOT_INSTALLED = "is not installed"
PNG_ORIENTED = (b"eXIf", b"Raw profile type", b"XML:com.adobe.xmp")  # chunks and texts, also behind the pixels
# {first bytes: what to say of a file that is not an image here}
REMEDIES = {
    b"%PDF": "is a PDF. Save its pages as images",
    b"<svg": "is an SVG drawing. Save it as PNG",
    b"<?xm": "is XML. Save the drawing as PNG",
    b"<!DO": "is a web page. Download the image itself",
    b"<htm": "is a web page. Download the image itself",
    b"vers": "is a pointer of Git LFS, not the image itself. Run git lfs pull",
}
HEIF = (b"heic", b"heix", b"hevc", b"mif1", b"msf1", b"heim", b"heis")


def answers(messages: Iterator[list[bytes]]) -> Iterator[tuple[bytes, ...]]:
    start = json.loads(next(messages)[0])
    missing = missing_pillow()
    if missing:
        yield from (_answer(missing=missing, is_there=missing != NOT_INSTALLED) for _ in messages)
        return
    for wanted, data in messages:
        try:
            with untrusted("cannot be decoded", "Save the image again, or remove the row.", reads=False):
                image, facts = decoded(data, wanted.decode(), **start)
                yield json.dumps(facts).encode(), image.tobytes() if wanted.decode() == PIXELS else b""
        except PlanError as error:
            yield _answer(error=str(error))
        except MemoryError:
            yield _answer(error="needs more memory to be decoded than its size allows. Save the image again.")


def missing_pillow() -> str:
    """The fact on a Pillow that is not there; empty if it is."""
    if importlib.util.find_spec("PIL") is None:
        return NOT_INSTALLED
    try:
        with untrusted("cannot be imported", "", reads=False):
            import PIL.Image  # noqa: F401
    except PlanError as error:
        return str(error).rstrip(". ")
    return ""


def _answer(**facts: object) -> tuple[bytes, bytes]:
    return json.dumps(facts).encode(), b""


def decoded(data: bytes, wanted: str, max_pixels: int | None) -> tuple[Any, dict]:
    """(the image as RGB, upright, of at most `max_pixels`, or as opened if HEADER is wanted; {"width", "height"} of
    it). Raises PlanError.
    """
    import PIL.Image
    import PIL.PngImagePlugin

    _limit(len(data), OPEN_PIXELS)
    PIL.PngImagePlugin.MAX_TEXT_CHUNK = MAX_TEXT_BYTES
    if not data:
        raise PlanError("is empty. Write the image again.")
    PIL.Image.MAX_IMAGE_PIXELS = None  # `checked_size` says more
    try:
        image = PIL.Image.open(io.BytesIO(data), formats=available(FORMATS))
    except PIL.UnidentifiedImageError:
        raise PlanError(f"{said_of(data)}, or remove the row.") from None
    # Pillow's own error comes at twice its limit, for frames that are larger than the header says.
    PIL.Image.MAX_IMAGE_PIXELS = MAX_PIXELS // 2
    width, height = checked_size(*image.size)
    _limit(len(data), width * height)
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise PlanError(
            f"has {getattr(image, 'n_frames', 2)} frames: an animation is a video. Save the frame that is meant."
        )
    if wanted != HEADER:
        # Before EXIF is read, which loads a PNG as well: a second load of a damaged one raises nothing.
        image.load()
    orientation = 1
    is_plain = wanted == HEADER and image.format == "PNG" and not any(name in data for name in PNG_ORIENTED)
    if not is_plain and image.format != "TIFF":  # whose size is that of the turned picture, which loading turns
        orientation = orientation_of(image)
    if orientation in (5, 6, 7, 8):
        width, height = height, width
    width, height = shrunk_size(width, height, max_pixels)
    facts = {"width": width, "height": height}
    if wanted == HEADER:
        return image, facts
    image = as_rgb(image)
    image = upright(image, orientation)
    if image.size != (width, height):
        image = image.resize((width, height), PIL.Image.Resampling.LANCZOS)
    return image, facts


def available(formats: tuple[str, ...]) -> list[str]:
    """The formats that this Pillow was built with."""
    import PIL.Image

    PIL.Image.init()
    return [name for name in formats if name in PIL.Image.OPEN]


def said_of(data: bytes) -> str:
    """The fact on bytes that are not an image, and what to do."""
    if data[4:8] == b"ftyp" and data[8:12] in HEIF:
        return "is HEIC, which Pillow does not read. Save it as JPEG"
    if data[4:8] == b"ftyp":
        return "is a video, or an image that this Pillow does not read. Save it as JPEG"
    for begins, said in REMEDIES.items():
        if data.lstrip()[:4].lower() == begins.lower():
            return said
    return (
        f"is not an image of a known format ({', '.join(FORMATS[:1] + FORMATS[2:6])}, ...) or is damaged. Save it again"
    )


def checked_size(width: int, height: int) -> tuple[int, int]:
    """The size itself. Raises PlanError for one that no image has, or that nobody means."""
    if width < 1 or height < 1:
        raise PlanError(f"is {width} x {height} pixels. Remove the row.")
    if width * height > MAX_PIXELS:
        raise PlanError(f"is {width} x {height} pixels, over the maximum of {MAX_PIXELS:,}. Save it smaller.")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise PlanError(
            f"is {width} x {height} pixels, and the longer side is over {MAX_ASPECT} times the shorter. Cut it."
        )
    return width, height


def shrunk_size(width: int, height: int, max_pixels: int | None) -> tuple[int, int]:
    """The size of an image with at most so many pixels: the same sides' ratio, as far as whole pixels have it."""
    if max_pixels is None or width * height <= max_pixels:
        return width, height
    scale = math.sqrt(max_pixels / (width * height))
    short, long = sorted((width, height))
    short = max(1, math.floor(short * scale))
    long = max(1, min(math.floor(long * scale), max_pixels // short))
    return (short, long) if width <= height else (long, short)


def orientation_of(image: Any) -> int:
    """The EXIF orientation, 1 to 8; 1 without, and where EXIF is damaged: the picture itself is not."""
    try:
        with untrusted("EXIF", "", reads=False):
            found = image.getexif().get(ORIENTATION, 1)
    except PlanError:
        return 1
    return found if found in range(1, 9) else 1


def upright(image: Any, orientation: int) -> Any:
    """The image turned as its orientation says."""
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    if orientation in turns:
        return image.transpose(turns[orientation])
    return image


def as_rgb(image: Any) -> Any:
    """The image as 8-bit RGB: what is transparent is on white, 16 bits are the upper 8 of them. Raises PlanError."""
    import PIL.Image

    if image.format == "TIFF":
        _check_tiff(image)
    if image.mode.startswith("I;16") or image.mode == "I":
        return _upper_bits(image)
    if image.mode == "F":
        raise PlanError("has numbers with fractions as its pixels, of which white is not known. Save it as 8-bit PNG.")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = PIL.Image.new("RGBA", image.size, "white")
        return PIL.Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _check_tiff(image: Any) -> None:
    """Raises PlanError for a TIFF whose numbers Pillow gives as they are, though they mean another brightness."""
    bits = image.tag_v2.get(BITS_PER_SAMPLE, (1,))[0]
    signs = image.tag_v2.get(SAMPLE_FORMAT, (1,))
    is_deep = image.mode.startswith("I;16")
    fact = ""
    if is_deep and bits != 16:
        fact = f"has pixels of {bits} bits"
    elif is_deep and image.tag_v2.get(PHOTOMETRIC) == WHITE_IS_ZERO:
        fact = "has pixels of 16 bits of which 0 is white"
    elif image.mode == "L" and SIGNED in signs:
        fact = "has pixels below 0"
    if fact:
        raise PlanError(f"{fact}, which Pillow does not show as they are meant. Save it as 8-bit PNG.")


def _upper_bits(image: Any) -> Any:
    """A grayscale image of 16 bits as RGB. Raises PlanError for one of 32 bits."""
    import PIL.Image

    data = image.tobytes()
    if image.mode == "I":
        least, most = image.getextrema()
        if image.format == "TIFF" or least < 0 or most > 65535:
            raise PlanError("has pixels of 32 bits, of which white is not known. Save it as 8-bit PNG.")
        upper = data[1::4] if sys.byteorder == "little" else data[2::4]
    elif image.mode == "I;16B" or (image.mode == "I;16N" and sys.byteorder == "big"):
        upper = data[0::2]
    else:
        upper = data[1::2]
    return PIL.Image.frombytes("L", image.size, upper).convert("RGB")


def _limit(num_bytes: int, num_pixels: int) -> None:
    limit_memory(MIN_BYTES + BYTES_PER_BYTE * num_bytes + BYTES_PER_PIXEL * num_pixels)
    limit_time(IMAGE_S + S_PER_BYTE * num_bytes + S_PER_PIXEL * num_pixels)


if __name__ == "__main__":
    serve(answers)
