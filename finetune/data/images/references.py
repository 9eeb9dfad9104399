"""References to images: a file, bytes, a data: URI or a URL, as rows name them. Nothing is decoded here.

Rows are other people's: a path may not leave the folder of its dataset, and nothing is asked of a network unless the
user says so.
"""

import base64
import binascii
import hashlib
import os
import re
import stat
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from finetune.data.images.fetch import fetched
from finetune.errors import PlanError
from finetune.system.files import cache_folder, open_file, replace
from finetune.system.json_files import json_kind

MAX_FILE_BYTES = 2**28  # of an encoded image
SHOWN = 60  # characters of a value in a message
# Where objects have an image, in the order of preference: bytes first, as the path beside them is only where they
# came from.
BYTES = ("bytes", "data", "base64", "b64", "b64_json", "image_bytes", "image_base64")
PLACES = ("sha256", "path", "image_path", "file_path", "file", "url", "uri", "image_url", "file_uri", "fileUri")
INNER = ("source", "image", "inline_data", "inlineData", "file_data", "fileData")
ELSEWHERE = ("file_id", "fileId", "s3Location")  # of a provider
SIGNATURES = (
    *(b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"BM", b"II*\0", b"MM\0*", b"P5", b"P6"),
    *(b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51"),
)
# How base64 of the usual formats begins: JPEG, PNG, GIF, WebP.
BASE64 = re.compile(r"(/9j/|iVBORw0KGg|R0lGOD|UklGR)[A-Za-z0-9+/\s]{40,}={0,2}\s*")
SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".avif", ".jp2", ".ppm", ".pgm", ".jfif")
SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


@dataclass(frozen=True)
class ImageOptions:
    """Options for reading rows' images: the folder that paths may not leave (None: there is none, and paths are
    refused), and whether URLs are read.
    """

    root: Path | None = None
    allow_urls: bool = False

    def __post_init__(self):
        if self.root is not None:
            object.__setattr__(self, "root", self.root.resolve())


@dataclass(frozen=True, eq=False)
class ImageReference:
    """An image of a row: its file, its bytes or its URL. `source`: the row and field, for messages.

    `sha256`: of what the file must hold, if that is known. `names`: what its row calls it.
    Equal for equal bytes, which comparing and hashing read.
    """

    source: str
    path: Path | None = None
    data: bytes | None = field(default=None, repr=False)
    url: str | None = None
    sha256: str | None = None
    names: frozenset[str] = frozenset()

    @property
    def key(self) -> tuple:
        """A key that equal references have without reading what they refer to."""
        return self.path, self.data, self.url

    @cached_property
    def digest(self) -> str:
        """sha256 of the image's bytes. Raises PlanError."""
        return hashlib.sha256(self.read_bytes()).hexdigest()

    def read_bytes(self) -> bytes:
        """The encoded image. Raises PlanError naming its row."""
        if self.data is not None:
            return self.data
        if self.url is not None:
            return fetched(self.url, self.source, MAX_FILE_BYTES, is_kept=has_signature)
        assert self.path is not None, self
        try:
            with open_file(self.path, "rb") as file:
                found = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise PlanError(f"{self.source}: {self.path} cannot be read ({error.strerror}). Check the file.") from None
        _check_size(found, f"{self.source}: {self.path}")
        if self.sha256 is not None and hashlib.sha256(found).hexdigest() != self.sha256:
            raise PlanError(f"{self.source}: {self.path} is not as it was written. Give the rows again.")
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ImageReference) and (self.key == other.key or self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)


def image_root_of(dataset: str, given: str | None) -> Path | None:
    """The folder that a dataset's paths of images may not leave: --image_root, else the folder of its file, else the
    dataset's own; of a Python program's rows the current one; None for a dataset that is not a file here. Raises
    PlanError for a folder that does not exist.
    """
    if given is not None:
        folder = Path(given).expanduser()
        if not folder.is_dir():
            raise PlanError(f"--image_root {given}: is not a folder. Give the folder that the rows' paths begin in.")
        return folder.resolve()
    try:
        path = Path(dataset).expanduser()
        if path.is_dir():
            return path.resolve()
        if path.is_file() and path.parent == kept_images().parent:
            return Path.cwd()
        if path.is_file():  # which may be a link, as in the Hub's cache
            return path.parent.resolve()
    except (OSError, RuntimeError, ValueError):  # no path at all, which reading says
        return None
    return None


def kept_images() -> Path:
    """The folder of images that a Python program's rows hold, each under its digest; beside the rows themselves."""
    return cache_folder("rows") / "images"


def keep_image(data: bytes) -> str:
    """Writes an image of a Python program's rows to `kept_images`; its digest, under which `reference_of` finds it."""
    digest = hashlib.sha256(data).hexdigest()
    path = kept_images() / digest
    if not path.is_file() or path.read_bytes() != data:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace(path) as file:
            file.write(data)
    return digest


# ------ values of rows


def reference_of(value: Any, where: str, source: str, options: ImageOptions) -> ImageReference | None:
    """The image that a row's value is; None for one that is null or empty. `where`: the row and field.

    Raises PlanError for a value that is not an image, or one that may not be read.
    """
    if is_nothing(value):
        return None
    if isinstance(value, bytes | bytearray):
        _check_size(value, where)
        return ImageReference(where, data=bytes(value))
    if isinstance(value, dict):
        return _of_object(value, where, source, options)
    if not isinstance(value, str):
        raise PlanError(f"{where} is {json_kind(value)}, must be an image: a path, bytes or a data: URI.")
    text = value.strip()
    if text[:5].lower() == "data:":
        return ImageReference(where, data=_of_data_uri(text, where))
    if BASE64.fullmatch(text):
        return ImageReference(where, data=_of_base64(text, where))
    if text[:8].lower() == "file:///":
        text = unquote(text[7:])
    elif SCHEME.match(text) and not re.match(r"[A-Za-z]:[\\/]", text):
        return _of_url(text, where, options)
    return ImageReference(where, path=_inside(text, where, source, options.root))


def is_nothing(value: Any) -> bool:
    """True for no image: null, empty text, and an object without a value."""
    if isinstance(value, dict):
        return all(part is None or part in ("", b"") for part in value.values())
    return value is None or (isinstance(value, str) and not value.strip()) or value in (b"", [])


def looks_like_image(value: Any) -> bool:
    """True for bytes of an image and what names one beyond doubt, whatever its column is called."""
    if isinstance(value, list):
        return bool(value) and all(map(looks_like_image, value))
    if isinstance(value, bytes):
        return has_signature(value)
    if isinstance(value, dict):
        if isinstance(value.get("bytes"), bytes):
            return has_signature(value["bytes"])
        if isinstance(value.get("sha256"), str) or isinstance(value.get("bytes"), dict):
            return value.keys() <= {"path", "sha256", "bytes"}
        return value.keys() <= {"path", "sha256", "bytes"} and any(map(looks_like_image, value.values()))
    if not isinstance(value, str):
        return False
    text = value.strip()
    if is_encoded_image(text):
        return True
    return "\n" not in text and text.lower().partition("?")[0].endswith(SUFFIXES)


def is_encoded_image(value: Any) -> bool:
    """True for an image itself: its bytes, base64 or a data: URI, and one that a Python program's row has."""
    if isinstance(value, dict):
        digest = value.get("sha256")
        if not isinstance(digest, str) or not value.keys() <= {"sha256", "path", "bytes"}:
            return False
        return re.fullmatch("[0-9a-f]{64}", digest) is not None and (kept_images() / digest).is_file()
    if isinstance(value, bytes):
        return has_signature(value)
    if not isinstance(value, str):
        return False
    text = value.strip()
    return text[:11].lower() == "data:image/" or BASE64.fullmatch(text) is not None


def has_signature(data: bytes) -> bool:
    """True for bytes that begin as a usual format of images does."""
    return data.startswith(SIGNATURES) or (data[:4] == b"RIFF" and data[8:12] == b"WEBP") or data[4:8] == b"ftyp"


def _of_object(value: dict, where: str, source: str, options: ImageOptions) -> ImageReference | None:
    there = {name: part for name, part in value.items() if not is_nothing(part)}
    if any(name in there for name in ELSEWHERE):
        raise PlanError(f"{where} is a file of a provider, which is not here. Give the image itself.")
    kind = there.get("mime_type", there.get("mimeType", there.get("media_type", "image/")))
    if not str(kind).lower().startswith("image/"):
        raise PlanError(f"{where} is of type {str(kind)[:SHOWN]!r}, which is not an image. Remove the row.")
    for name in BYTES:
        part = there.get(name)
        if isinstance(part, bytes | bytearray | dict):
            return reference_of(part, where, source, options)
        if isinstance(part, str):
            if part[:5].lower() == "data:":
                return reference_of(part, where, source, options)
            return ImageReference(where, data=_of_base64(part, where))
    for name in (*PLACES, *INNER):
        if name == "sha256" and name in there:
            return _kept(str(there[name]), where)
        if name in there:
            return reference_of(there[name], where, source, options)
    keys = ", ".join(map(str, there))[:SHOWN]
    raise PlanError(f"{where} is an object with {keys}, and none of these is an image. Give bytes, path or url.")


def _kept(digest: str, where: str) -> ImageReference:
    """A reference to an image of a Python program's rows."""
    path = kept_images() / digest
    if not re.fullmatch(r"[0-9a-f]{64}", digest) or not path.is_file():
        raise PlanError(f"{where}: {digest[:SHOWN]!r} is not an image in {path.parent}. Give the rows again.")
    return ImageReference(where, path=path, sha256=digest)


def _of_data_uri(text: str, where: str) -> bytes:
    head, comma, body = text[5:].partition(",")
    kind, *options = [word.strip().lower() for word in head.split(";")]
    if not comma:
        raise PlanError(f"{where} is a data: URI without a comma. Write data:image/png;base64,...")
    if kind and not kind.startswith("image/") and kind != "application/octet-stream":
        raise PlanError(f"{where} is a data: URI of type {kind[:SHOWN]!r}, which is not an image. Remove the row.")
    if "base64" in options:
        return _of_base64(unquote(body), where)
    found = unquote_to_bytes(body)
    _check_size(found, where)
    return found


def _of_base64(text: str, where: str) -> bytes:
    """The bytes of base64, of either alphabet, with or without padding and line ends. Raises PlanError."""
    plain = "".join(text.split()).rstrip("=").translate(str.maketrans("-_", "+/"))
    try:
        found = base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise PlanError(f"{where} is not base64 ({error}). Write the image again.") from None
    if not found:
        raise PlanError(f"{where} is an image of no bytes. Write it again.")
    _check_size(found, where)
    return found


def _of_url(text: str, where: str, options: ImageOptions) -> ImageReference:
    scheme = SCHEME.match(text)
    assert scheme is not None, text
    shown = text[:SHOWN]
    if scheme[0].lower() != "https:":
        what = f"is {shown!r}, and of URLs only those with https are read"
        raise PlanError(f"{where} {what}. Download the image and give its path.")
    if not options.allow_urls:
        raise PlanError(
            f"{where} is the URL {shown!r}. Add --allow_urls to read it over the network, or download the image."
        )
    try:
        host = urlsplit(text).hostname
    except ValueError:
        host = None
    if not host:
        raise PlanError(f"{where} is {shown!r}, a URL without a host. Fix it.")
    return ImageReference(where, url=text)


def _inside(text: str, where: str, source: str, root: Path | None) -> Path:
    """The regular file at a path, relative to its dataset's file or to `root`, which it is inside of. PlanError."""
    shown = text[:SHOWN]
    if root is None:
        raise PlanError(
            f"{where} is the path {shown!r}, and the rows have no folder that it could begin in. Add --image_root."
        )
    found = None
    inside = (root, *blobs_of(root))
    for folder in folders_of(source, root):
        try:
            path = Path(os.path.realpath(folder / text))
            is_inside = any(path.is_relative_to(allowed) for allowed in inside)
            mode = stat.S_IFMT(os.stat(path).st_mode) if is_inside else None
        except FileNotFoundError:
            found = found or f"there is no such file in {root}"
            continue
        except (OSError, ValueError):  # too long, a loop of links, a NUL character, no permission
            found = found or "cannot be opened"
            continue
        if mode is None:
            raise PlanError(
                f"{where} is {shown!r}, which is outside {root}. Move the image there, or give --image_root."
            )
        if mode == stat.S_IFREG:
            return path
        found = "is not a regular file"
    raise PlanError(f"{where} is {shown!r}: {found}. Give an image, or the folder that paths begin in as --image_root.")


@lru_cache(maxsize=64)
def blobs_of(root: Path) -> tuple[Path, ...]:
    """The folder that the files of a snapshot in the Hub's cache link to, where `root` is in one."""
    snapshot = next((folder for folder in (root, *root.parents) if folder.parent.name == "snapshots"), None)
    if snapshot is None:
        return ()
    return (snapshot.parent.parent / "blobs",)


@lru_cache(maxsize=1024)
def folders_of(source: str, root: Path) -> tuple[Path, ...]:
    """Folders that a row's paths may begin in: that of its file, where it is inside `root`, and `root`."""
    return _folders(source.rpartition(":")[0], root)


@lru_cache(maxsize=64)
def _folders(label: str, root: Path) -> tuple[Path, ...]:
    parts = Path(label).parts
    for start in range(len(parts)):
        if ".." not in parts[start:] and parts[start] != "/":
            file = root.joinpath(*parts[start:])
            if file.is_file():
                return tuple(dict.fromkeys((file.parent, root)))
    return (root,)


def _check_size(data: bytes | bytearray, what: str) -> None:
    if len(data) > MAX_FILE_BYTES:
        raise PlanError(f"{what} has over {MAX_FILE_BYTES >> 20} MiB. Give a smaller image.")
