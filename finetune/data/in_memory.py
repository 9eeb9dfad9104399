"""Rows that a Python program holds, as a file: lists, DataFrames, datasets, tables, iterators.

Each rank reads the rows on its own, and a resumed run reads them again, so they are written once as JSON lines, under
the digest of what they say: the same rows are the same file.
"""

import contextlib
import datetime
import hashlib
import io
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from finetune.data.columns import Notices
from finetune.data.images.decode_process import orientation_of, upright
from finetune.data.images.references import ImageReference, has_signature, keep_image
from finetune.data.reading.arrow import features_in
from finetune.data.reading.mixture import KEYS
from finetune.data.reading.rows import NotedRow, check_no_repeated, hash_file
from finetune.data.reading.structs import ADDED_NULLS, NullsOfRows, with_class_names, without_added_nulls
from finetune.errors import NO_SPACE, PlanError
from finetune.system.files import WRITING, cache_folder, scratch_folder
from finetune.system.json_files import json_kind
from finetune.system.terminal import say
from finetune.system.untrusted import untrusted

SAY_AFTER_S = 5.0
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
DEEP_MODES = ("I;16B", "I;16L", "I;16N")  # of 16 bits, which Pillow turns into others through 32
# {another of Pillow's modes whose pixels have 8 bits: what it is turned into}
AS_PNG = {**dict.fromkeys(("CMYK", "HSV", "LAB", "RGBX", "YCbCr"), "RGB"), "PA": "RGBA", "RGBa": "RGBA", "La": "LA"}
SHARE_OF_DISK = 0.8  # that rows may fill of what is free


def is_rows(value: Any) -> bool:
    """True for rows; False for names of datasets, and for entries that have one."""
    if isinstance(value, str | dict | bytes) or value is None:
        return False
    if isinstance(value, list | tuple):
        odd = any(isinstance(row, dict) and not _is_entry(row) for row in value)
        return odd and not any(isinstance(row, str | os.PathLike) for row in value)
    return isinstance(value, Iterable) or hasattr(value, "to_pylist")  # pyarrow's tables


def _is_entry(row: dict) -> bool:
    return isinstance(row.get("name"), str) and set(row) <= set(KEYS)


def rows_of(value: Any) -> Iterator:
    """The rows of a list, a pandas or polars DataFrame, a pyarrow table, a datasets.Dataset or any iterable. Images of
    the package datasets stay the files that they are: it would decode them.
    """
    if hasattr(value, "with_format") and _has_images(features_of(value)):
        return (_with_files(row) for table in value.with_format("arrow") for row in table.to_pylist())
    if hasattr(value, "to_pylist"):
        return iter(value.to_pylist())
    if hasattr(value, "to_dicts"):
        return iter(value.to_dicts())
    if hasattr(value, "to_dict") and hasattr(value, "columns"):
        return iter(value.to_dict("records"))
    return iter(value)


def features_of(value: Any) -> dict:
    """The package datasets' types of the columns, of its Dataset or of a table that it wrote; empty without."""
    schema = getattr(value, "schema", None)
    if hasattr(schema, "metadata"):
        return features_in(schema)
    features = getattr(value, "features", None) or {}
    if hasattr(features, "to_dict"):
        return features.to_dict()
    return {}


def _has_images(feature: Any) -> bool:
    """True if one of the package datasets' types is that of images."""
    if isinstance(feature, dict):
        return feature.get("_type") == "Image" or any(map(_has_images, feature.values()))
    return isinstance(feature, list) and any(map(_has_images, feature))


def _with_files(value: Any) -> Any:
    """A row whose images have their bytes, of local files too, as the package datasets would open them."""
    if isinstance(value, list):
        return [_with_files(part) for part in value]
    if not isinstance(value, dict):
        return value
    path = value.get("path")
    if value.keys() == {"bytes", "path"} and value["bytes"] is None and isinstance(path, str) and os.path.isfile(path):
        return {"bytes": Path(path).read_bytes(), "path": path}
    return {name: _with_files(part) for name, part in value.items()}


def _unwritten(where: str, folder: Path, error: OSError) -> PlanError:
    return PlanError(f"{where}: rows cannot be written to {folder} ({error.strerror}). Set XDG_CACHE_HOME.")


class _Watch:
    """Watches rows that are written: they may come from an iterator without an end. Says how many there are while it
    takes long. Raises PlanError before they fill the disk.
    """

    def __init__(self, where: str, folder: Path):
        self.where = where
        self.rows = 0
        self.image_bytes = 0
        self.most_bytes = shutil.disk_usage(folder).free * SHARE_OF_DISK
        self.began = time.monotonic()
        self.next_s = SAY_AFTER_S

    def keep(self, image: bytes) -> str:
        """Writes an image beside the rows; its digest."""
        self.image_bytes += len(image)
        return keep_image(image)

    def count(self, num_bytes: int) -> None:
        self.rows += 1
        if num_bytes + self.image_bytes > self.most_bytes:
            raise PlanError(
                f"{self.where}: {self.rows:,} rows fill {SHARE_OF_DISK:.0%} of the free disk, and there are more. End "
                "them, as with itertools.islice(rows, 1000), or give a file."
            )
        if time.monotonic() - self.began > self.next_s:
            self.next_s *= 2
            say(f"{self.where}: {self.rows:,} rows so far. An iterator without an end needs itertools.islice(rows, N).")


def as_file(value: Any, where: str, note: Callable[[str], object] = lambda line: None) -> str:
    """The path of a file of JSON lines with these rows. `note` is called with a line on what is left out.
    Raises PlanError, which `where` begins, for what is not a row.
    """
    folder = cache_folder("rows")
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            beside = stack.enter_context(scratch_folder(folder, WRITING))
        except OSError as error:
            raise _unwritten(where, folder, error) from None
        try:
            return str(_written(value, where, beside, note))
        except OSError as error:
            if error.errno not in NO_SPACE:  # the rows' own iterator may raise too
                raise
            raise _unwritten(where, folder, error) from None


def _written(value: Any, where: str, beside: Path, note: Callable[[str], object]) -> Path:
    """The file of `as_file`, written in the folder `beside` and then moved to the one above."""
    notices = Notices()
    nulls = NullsOfRows()
    watch = _Watch(where, beside.parent)
    file = beside / "rows"
    with _opened(file) as out:
        for source, row in _plain_rows(value, where, watch.keep):
            if isinstance(row, NotedRow):
                for text, count in row.notes.items():
                    notices.add(text, source, count)
            nulls.add(row)
            out.write(_line(row))
            watch.count(out.tell())
        if not out.tell():
            raise PlanError(f"{where}: has no rows. Give some.")
    if nulls.added:
        file = _rewritten(file, nulls)
    if nulls.num_deep:
        notices.add(ADDED_NULLS, where, nulls.num_deep)
    digest = hashlib.sha256()
    hash_file(file, digest)
    for text, count in notices.counts.items():
        note(f"note: {where}: {text}: {count:,} x")
    try:
        return file.replace(beside.parent / f"{digest.hexdigest()[:24]}.jsonl")
    except (PermissionError, IsADirectoryError) as error:  # another user's, who alone removes it, or a folder
        raise _unwritten(where, beside.parent, error) from None


def _opened(file: Path) -> IO[bytes]:
    """A new file that no other user reads."""
    return open(file, "xb", opener=partial(os.open, mode=0o600))


def _plain_rows(value: Any, where: str, keep: Callable[[bytes], str]) -> Iterator[tuple[str, dict]]:
    """(place, row in JSON types) of each row; a table's rows without the nulls it adds. Raises PlanError."""
    is_table = any(hasattr(value, name) for name in ("to_pylist", "to_dicts", "to_dict", "column_names"))
    features = features_of(value)
    if is_table:
        names = getattr(value, "column_names", None)
        check_no_repeated(getattr(value, "columns", ()) if names is None else names, where)
    for number, row in enumerate(rows_of(value), 1):
        source = f"{where}, row {number}"
        if not isinstance(row, dict):
            raise PlanError(f"{source}: is {type(row).__name__}, not a dict. Give rows as dicts.")
        check_no_repeated(row, source)
        try:
            plain = {_unicode(str(name)): _plain(part, f"{source}: column {name}", keep) for name, part in row.items()}
        except RecursionError:
            raise PlanError(f"{source}: contains itself, or is nested too deeply. Give plain values.") from None
        yield source, with_class_names(without_added_nulls(plain), features) if is_table else plain


def _line(row: dict) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # half of a pair of surrogates, which is a bad row
        return json.dumps(row).encode() + b"\n"


def _rewritten(written: Path, nulls: NullsOfRows) -> Path:
    """A file of the same rows without the nulls that a table added before they were Python's."""
    without = written.with_name("rows-without-nulls")
    with open(written, "rb") as file, _opened(without) as kept:
        for line in file:
            kept.write(_line(nulls.without(json.loads(line))))
    return without


def _plain(value: Any, where: str, keep: Callable[[bytes], str]):
    """A value as JSON has it: numbers and arrays of numpy as Python's, what is missing as null, and images by the
    digest under which `keep` writes them.
    """
    if isinstance(value, str):
        return _unicode(value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, bytes) and has_signature(value):
        return {"sha256": keep(value)}
    if is_picture(value):
        return {"sha256": keep(_png_of(value, where))}
    if hasattr(value, "tolist"):  # a number or an array of numpy
        return _plain(value.tolist(), where, keep)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        check_no_repeated(value, where)
        return {_unicode(str(k)): _plain(v, where, keep) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, where, keep) for v in value]
    if isinstance(value, datetime.date | datetime.datetime):
        return value.isoformat()
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    raise PlanError(f"{where} is {type(value).__name__}, which is no text, number or list. Convert it.")


def _unicode(text: str) -> str:
    """The text with pairs of surrogates as the characters that they are; half of one stays, for the reader of the rows
    to say.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    return text


def given_images(value: Any, where: str) -> tuple[ImageReference, ...]:
    """The images that a program gives: one or a list of paths, bytes of files or pictures of Pillow's. Raises
    PlanError, which `where` begins.
    """
    found = []
    for image in value if isinstance(value, list | tuple) else [] if value is None else [value]:
        if isinstance(image, str | os.PathLike):
            found.append(ImageReference(where, path=Path(image).expanduser().absolute()))
        elif isinstance(image, bytes):
            found.append(ImageReference(where, data=image))
        elif is_picture(image):
            found.append(ImageReference(where, data=_png_of(image, where)))
        else:
            raise PlanError(
                f"{where}: is {json_kind(image)}, must be a path, bytes of an image or a picture of Pillow's."
            )
    return tuple(found)


def is_picture(value: Any) -> bool:
    """True for an image of Pillow's, which is not imported here."""
    return all(hasattr(value, name) for name in ("tobytes", "save", "convert", "mode", "size", "getbands"))


def _png_of(picture: Any, where: str) -> bytes:
    """A Pillow image's pixels as a PNG file, turned as its EXIF says. Raises PlanError for one that cannot be read or
    written, and for pixels without a known white.
    """
    with untrusted(f"{where}: the image cannot be read", "Save it again.", reads=False):
        picture.load()  # which turns some formats itself
        picture = upright(picture, orientation_of(picture))
    if picture.mode in DEEP_MODES:
        with untrusted(f"{where}: the image cannot be read", "Save it again.", reads=False):
            picture = picture.convert("I").convert("I;16")
    if picture.mode not in (*PNG_MODES, *AS_PNG):
        raise PlanError(
            f"{where}: has pixels of Pillow's mode {picture.mode}, of which white is not known. Give it as 8-bit RGB."
        )
    written = io.BytesIO()
    with untrusted(f"{where}: the image cannot be written as PNG", "Convert it to RGB.", reads=False):
        if picture.mode in AS_PNG:
            picture = picture.convert(AS_PNG[picture.mode])
        picture.save(written, format="PNG")
    return written.getvalue()
