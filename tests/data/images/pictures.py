"""Images of every kind as files, made from a seed; and the pixels that Pillow has of a file, by hand."""

import io
import struct
import zlib

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

Image.init()
KNOWN = ["JPEG", "MPO", "PNG", "GIF", "WEBP", "BMP", "DIB", "TIFF", "PPM", "AVIF", "JPEG2000"]
LARGE = "large"
FORMATS = [name for name in KNOWN if name in Image.OPEN]


def saved(image, fmt="PNG", **how):
    file = io.BytesIO()
    image.save(file, fmt, **how)
    return file.getvalue()


def noise(rng, *shape, most=256, dtype=np.uint8):
    """A gradient with some noise, so that no format shrinks it to nothing."""
    ramp = np.linspace(0, most - 1, int(np.prod(shape))).reshape(shape)
    return np.clip(ramp + rng.normal(0, most / 16, shape), 0, most - 1).astype(dtype)


def png(width, height, depth, colour, rows=b"", chunks=()):
    """A PNG of raw rows, as no program need write it. `chunks`: (name, data) before the pixels."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    parts = [chunk(b"IHDR", header), *(chunk(name, data) for name, data in chunks)]
    return b"\x89PNG\r\n\x1a\n" + b"".join([*parts, chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")])


def png16(values):
    """A PNG of 16-bit values, [H, W, C]."""
    height, width, channels = values.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    return png(width, height, 16, {1: 0, 2: 4, 3: 2, 4: 6}[channels], rows)


def tiff(width, height, bits, pixels, white_is_zero=False, signed=False):
    """A grayscale TIFF of one strip, as scanners and microscopes write it."""
    tags = {256: width, 257: height, 258: bits, 259: 1, 262: int(not white_is_zero), 277: 1, 278: height}
    tags |= {279: len(pixels), 339: 1 + signed}
    tags[273] = 8 + 2 + 12 * (len(tags) + 1) + 4  # where the pixels begin
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, tags[tag]) for tag in sorted(tags))
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + pixels


def turned(orientation, image, fmt="JPEG"):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(image, fmt, exif=exif)


def whole(rng):
    """{name: file} of images as programs write them."""
    height, width = (int(n) for n in rng.integers(5, 48, 2))
    rgb = Image.fromarray(noise(rng, height, width, 3))
    rgba = Image.fromarray(np.dstack([np.array(rgb), noise(rng, height, width)]))
    gray = rgb.convert("L")
    palette = rgb.quantize(16)
    seen = rgba.quantize(16)
    deep = noise(rng, height, width, most=65536, dtype=np.uint16)
    return {
        "png": saved(rgb),
        "png rgba": saved(rgba),
        "png gray": saved(gray),
        "png gray alpha": saved(rgba.convert("LA")),
        "png palette": saved(palette),
        "png palette alpha": saved(seen),
        "png palette, one colour clear": saved(palette, transparency=3),
        "png 1 bit": saved(rgb.convert("1")),
        "png 16 bit gray": saved(Image.fromarray(deep)),
        "png 16 bit gray, no Pillow": png16(deep[..., None]),
        "png 16 bit rgb": png16(noise(rng, height, width, 3, most=65536, dtype=np.uint16)),
        "png 16 bit rgba": png16(noise(rng, height, width, 4, most=65536, dtype=np.uint16)),
        "png rgb, one colour clear": png(2, 1, 8, 2, b"\0\1\2\3\4\5\6", [(b"tRNS", b"\0\1\0\2\0\3")]),
        "jpeg": saved(rgb, "JPEG"),
        "jpeg progressive": saved(rgb, "JPEG", progressive=True, quality=40),
        "jpeg gray": saved(gray, "JPEG"),
        "jpeg cmyk": saved(rgb.convert("CMYK"), "JPEG"),
        **{f"jpeg turned {n}": turned(n, rgb) for n in range(1, 9)},
        "png turned": turned(6, rgb, "PNG"),
        "jpeg turned 9": turned(9, rgb),
        "jpeg of a phone": saved(rgb, "MPO", save_all=True, append_images=[rgb.rotate(90)]),
        "gif": saved(palette, "GIF"),
        "gif clear": saved(palette, "GIF", transparency=0),
        "webp": saved(rgb, "WEBP"),
        "webp lossless alpha": saved(rgba, "WEBP", lossless=True),
        "bmp": saved(rgb, "BMP"),
        "tiff": saved(rgb, "TIFF"),
        "tiff lzw": saved(rgb, "TIFF", compression="tiff_lzw"),
        "tiff cmyk": saved(rgb.convert("CMYK"), "TIFF"),
        "tiff 16 bit, by hand": tiff(2, 2, 16, deep.tobytes()[:8]),
        "tiff 8 bit, 0 is white": tiff(2, 2, 8, deep.tobytes()[:4], white_is_zero=True),
        **{f"tiff turned {n}": turned(n, rgb, "TIFF") for n in (3, 6)},
        "tiff 16 bit": saved(Image.fromarray(deep), "TIFF"),
        "tiff 16 bit, big-endian": saved(big_endian(deep), "TIFF"),
        "ppm": saved(rgb, "PPM"),
        "pgm 16 bit": b"P5 3 2 65535\n" + deep.astype(">u2").tobytes()[:12],
        "1x1": saved(rgb.resize((1, 1))),
        "1x1 jpeg": saved(rgb.resize((1, 1)), "JPEG"),
    }


def big_endian(deep):
    """A picture of Pillow's of 16 bits, the upper 8 of which come first."""
    return Image.frombytes("I;16B", deep.shape[::-1], deep.astype(">u2").tobytes())


def refused(rng):
    """{name: (file, what is said of it)} of what is not a picture, or not meant as one."""
    rgb = Image.fromarray(noise(rng, 12, 16, 3))
    other = rgb.rotate(180)
    animated = {"save_all": True, "append_images": [other, rgb]}
    jpeg = saved(rgb, "JPEG")
    at = jpeg.index(b"\xff\xc0") + 5
    pixels = saved(rgb, "WEBP")[12:]
    canvas = b"VP8X\x0a\0\0\0\0\0\0\0" + b"\xfe\x3f\0" * 2  # 16383 x 16383
    webp = b"RIFF" + struct.pack("<I", 4 + len(canvas) + len(pixels)) + b"WEBP" + canvas + pixels
    return {
        "gif animated": (saved(rgb, "GIF", **animated), "an animation is a video"),
        "webp animated": (saved(rgb, "WEBP", **animated), "an animation is a video"),
        "png animated": (saved(rgb, "PNG", **animated), "an animation is a video"),
        "tiff of pages": (saved(rgb, "TIFF", **animated), "has 3 frames"),
        "png huge": (png(60_000, 60_000, 8, 2), "is 60000 x 60000 pixels, over the maximum"),
        "png of 2**31": (png(2**31 - 1, 2**31 - 1, 8, 2), "over the maximum"),
        "jpeg huge": (jpeg[:at] + b"\xff\xdc\xff\xdc" + jpeg[at + 4 :], "is 65500 x 65500 pixels"),
        "gif huge": (b"GIF89a\xff\xff\xff\xff\0\0\0" + b",\0\0\0\0\xff\xff\xff\xff\0\2\2D\1\0;", "65535 x 65535"),
        "bmp huge": (patched(saved(rgb, "BMP"), 18, struct.pack("<ii", 100_000, 100_000)), "100000 x 100000"),
        "webp huge": (webp, ""),
        "tiff 32 bit": (saved(Image.fromarray(np.arange(6, dtype=np.int32).reshape(2, 3)), "TIFF"), "32 bits"),
        "tiff of fractions": (saved(Image.fromarray(np.ones((2, 3), np.float32)), "TIFF"), "numbers with fractions"),
        "tiff 12 bit": (tiff(4, 1, 12, bytes(6)), "has pixels of 12 bits"),
        "tiff 16 bit, 0 is white": (tiff(2, 2, 16, bytes(8), white_is_zero=True), "of which 0 is white"),
        "tiff 8 bit, signed": (tiff(2, 2, 8, bytes(4), signed=True), "has pixels below 0"),
        "png of no width": (png(0, 4, 8, 2), ""),
        "png of no height": (png(4, 0, 8, 2), ""),
        "a line": (png(1, 400, 8, 0, b"\0\0" * 400), "over 200 times the shorter"),
        "ico": (saved(rgb, "ICO"), "is not an image of a known format"),
        "tga": (saved(rgb, "TGA"), "is not an image of a known format"),
        "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not an image of a known format"),
        "pdf": (b"%PDF-1.7\n", "is a PDF"),
        "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is an SVG drawing"),
        "html": (b"<!DOCTYPE html><html>404</html>", "is a web page"),
        "heic": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "is HEIC"),
        "a pointer of Git LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS"),
        "empty": (b"", "is empty"),
        "text": (b"no image at all", "is not an image of a known format"),
        "signature alone": (b"\x89PNG\r\n\x1a\n", ""),
    }


def patched(data, at, with_bytes):
    return data[:at] + with_bytes + data[at + len(with_bytes) :]


def damaged(rng, data):
    """The file with one of the faults that disks, networks and programs leave."""
    kind = rng.integers(5)
    at = int(rng.integers(len(data)))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return patched(data, at, bytes(rng.integers(0, 256, 1, np.uint8)))[: len(data)]
    if kind == 2:
        return bytes(b ^ (1 << int(rng.integers(8))) if rng.random() < 0.01 else b for b in data)
    if kind == 3:
        return data[:at] + bytes(int(rng.integers(1, 64))) + data[at:]
    return patched(data, at, bytes(min(64, len(data) - at)))


def by_hand(data):
    """The pixels of a file, [H, W, 3]; None if Pillow does not read it, or it is not one still picture. LARGE for a
    size that a fault has made of a small one: what Pillow does with that is not tried here.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        if image.width * image.height > 2**24:
            return LARGE
        if image.format != "MPO" and getattr(image, "is_animated", False):
            return None
        image.load()
    except Image.DecompressionBombError:
        return LARGE
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, EOFError, TypeError, IndexError, KeyError):
        return None
    if max(image.size) > 200 * min(image.size):
        return None
    if image.mode.startswith("I;16") or image.mode == "I":
        found = np.stack([np.asarray(image).astype(np.int64) // 256] * 3, -1).astype(np.uint8)
        return np.asarray(ImageOps.exif_transpose(Image.fromarray(found)))
    if image.mode == "F":
        return None
    image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:
        seen = np.asarray(image.convert("RGBA")).astype(np.float64)
        alpha = seen[..., 3:] / 255
        return np.round(seen[..., :3] * alpha + 255 * (1 - alpha)).astype(np.uint8)
    return np.asarray(image.convert("RGB"))
