"""A row's images: where its conversation has them, and the marks that represent them in its texts.

An image is a part of a message, or its place is there (a bare part, or <image> in a text) and the image is in a column
beside it. Nothing is guessed: places and images are as many, or the row is refused. Images without any place come
before the first question.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from finetune.data.blocks import ROLES
from finetune.data.images.marks import RESERVED, numbered
from finetune.data.images.references import (
    BYTES,
    INNER,
    PLACES,
    ImageOptions,
    ImageReference,
    is_nothing,
    looks_like_image,
    reference_of,
)
from finetune.data.meanings import holds_image, is_unwanted, plain_name
from finetune.errors import PlanError
from finetune.system.json_files import json_in_cell

PLACEHOLDER = "<image>"
# Other programs' placeholders, of which some have numbers: rows are refused rather than filled in order.
OTHER_PLACEHOLDER = re.compile(
    r"(?!(?-i:<image>))<\|?(image|img|picture|photo|video|audio)"
    r"([ _-]?(here|placeholder|pad|soft_token|token|\d+))?\s*/?\|?>"
    r"|\[(image|img)([ _-]?\d+)?\]|\{(image|img)\}|<start_of_image>",
    re.IGNORECASE,
)
IMAGE_FIELD = "images"
PAIRS_OF_TURNS = "texts"  # of what user and assistant say, as The Cauldron and FineVision have them
# Columns of images, and those that are read as such if their name says where an image is, or they hold what is one
# beyond doubt.
COLUMNS = (IMAGE_FIELD, "image")
NAMES_PLACE = re.compile(r"(image|img)s?_(path|file|url|bytes|base64)s?")
LIKELY_COLUMNS = (
    *("image_path", "image_paths", "image_file", "image_files", "image_url", "image_urls", "image_bytes"),
    *("image_base64", "img", "imgs", "img_path", "img_paths", "picture", "pictures", "photo", "photos"),
    *("file_name", "filename", "file_path"),
)
IMAGE_NAMES = frozenset(COLUMNS + LIKELY_COLUMNS)
IMAGE_TYPES = ("image", "image_url", "input_image", "image_path", "img")
# Keys of a part, or of a message, that hold its image.
PART_KEYS = (
    *("image", "image_url", "path", "url", "source", "base64", "bytes", "data", "file", "image_path", "image_file"),
    *("inline_data", "inlineData", "file_data", "fileData", "sha256", "image_bytes", "uri", "file_id"),
)
SHAPING = ("min_pixels", "max_pixels", "resized_height", "resized_width", "crop", "detail")  # of a part's image
# Keys of a part that is an image: those that are read, and what an interface says of its file.
OF_PART = {*PART_KEYS, *SHAPING, "type", "text", "index", "cache_control", "media_type", "mime_type", "mimeType"}
OF_PART |= {"format", "width", "height", "size", "id", "name", "file_name", "filename", "image_id"}
OF_OBJECT = {*BYTES, *PLACES, *INNER}  # of an object that is an image, or of a column's
UNTYPED_KEYS = ("image", "image_url", "inline_data", "inlineData", "file_data", "fileData")
MESSAGE_KEYS = ("images", "image")
# {format: its fields in the order of the conversation}; of others those of prompt and completion
ORDER = {
    "chat": ("system", "messages"),
    "preference": ("system", "context", "question", "prompt", "chosen", "rejected"),
    "alpaca": ("system", "history", "instruction", "input", "output"),
    "prompt_completion": ("system", "prompt", "completion"),
    "qna": ("system", "history", "context", "question", "choices", "answer"),
    "text": ("text",),
    "tokens": (),
}
ANSWERS = ("output", "completion", "answer", "chosen", "rejected")
STAYS_TEXT = "a text has {found}, which stays text: the row's images are elsewhere, or it has none"
NAMES = ("id", "image_id", "name", "file_name", "filename")  # under which a part, or a column's object, names its image


@dataclass(frozen=True)
class Speaker:
    """The role whose turn it is. `branch`: chosen or rejected, empty for what both halves of a pair share. `ignored`:
    message fields that are left out.
    """

    role: str
    branch: str
    ignored: tuple[str, ...] = ()


@dataclass
class Place:
    """A place in a row's conversation: a text, or a part that is an image or a bare place of one.

    `container[key]` is what it becomes. `images`: those that its message has beside its text. `part`: the row's own, of
    a place that is one; `others`: its fields that hold an image too.
    """

    where: str
    speaker: Speaker
    container: Any
    key: Any
    text: str | None = None
    image: Any = None
    index: int | None = None  # of a bare place: the number of its image in the column
    names: dict[str, str] = field(default_factory=dict)  # of a bare place: {field that names its image: name}
    images: list[Any] = field(default_factory=list)
    marks: list[ImageReference] = field(default_factory=list)
    in_front: list[ImageReference] = field(default_factory=list)
    part: dict | None = None
    others: tuple[str, ...] = ()

    @property
    def role(self) -> str:
        return self.speaker.role

    @property
    def branch(self) -> str:
        return self.speaker.branch

    @property
    def is_bare(self) -> bool:
        return self.text is None and self.image is None

    @property
    def num_placeholders(self) -> int:
        return (self.text or "").count(PLACEHOLDER)


@dataclass(frozen=True)
class Reading:
    """Facts of a row beside its values: its format, {field: column}, its place, and how images are read.

    `ignored`: columns and message fields that are left out; `is_named`: --columns names the column of images; `note`:
    counts what a user should know.
    """

    format: str
    columns: dict[str, str]
    source: str
    options: ImageOptions
    ignored: tuple[str, ...] = ()
    is_named: bool = False
    note: Callable[[str], None] = lambda text: None


def image_columns(known: Mapping[str, str]) -> dict[str, bool]:
    """{column that may hold a row's images: whether its name says so}, the preferred one first. `known`: {name without
    case: column}.
    """
    found: dict[str, bool] = {}
    for names in (COLUMNS, LIKELY_COLUMNS):
        for name in names:
            if name in known:
                found.setdefault(known[name], names is COLUMNS)
    return found


def with_marks(values: dict, given: list[tuple[str, Any, bool]], row: Reading) -> tuple[dict, list[ImageReference]]:
    """(the fields of a row with a numbered mark for each image, its images). `given`: (column, value, whether its name
    says that it holds images).

    Raises PlanError naming the row and the field: for a value that is not an image, images that have no place or places
    without an image, and an image in an answer.
    """
    for name, value in values.items():
        if _has_reserved(value):
            raise PlanError(
                f"{row.source}: field {row.columns.get(name, name)!r} has a noncharacter such as U+FDD0, which marks "
                "an image here. Remove it."
            )
    column, images = column_images(given, row)
    if row.format == "tokens" and images:
        raise PlanError(f"{row.source}: column {column!r} has images, and token ids have no place for them. Use text.")
    values = dict(values)
    places = [place for name in order_of(row, values) for place in _places(values, name, row)]
    for place in places:
        _read_own(place, row)
    own = [reference for place in places for reference in (*place.in_front, *place.marks)]
    if own and images:
        if list(dict.fromkeys(r.key for r in own)) != list(dict.fromkeys(r.key for r in images)):
            raise PlanError(
                f"{row.source}: its messages hold {_count(len(own), 'image')} and column {column!r} {len(images)} "
                f"others. Keep those of one, or add --ignore_columns {column}."
            )
        images = []
    bare = [place for place in places if place.is_bare]
    if bare and not images:
        raise PlanError(
            f"{bare[0].where} is the place of an image, and the row has none for it. Give it, or a column images."
        )
    if images:
        fill(places, images, column, row.source)
        for place in bare:
            _check_name(place, images, column, row)
    found = _numbered(places)
    for place in places:
        other = OTHER_PLACEHOLDER.search(place.text or "")
        if place.num_placeholders > len(place.marks):
            row.note(STAYS_TEXT.format(found=PLACEHOLDER))
        elif other:
            row.note(STAYS_TEXT.format(found=other[0]))
    for place in places:
        place.container[place.key] = _result(place, found)
    return values, found


def column_images(given: list[tuple[str, Any, bool]], row: Reading) -> tuple[str, list[ImageReference]]:
    """(the column of a row's images, they). Raises PlanError for two columns that differ, and a value that is none."""
    chosen = ""
    found: list[ImageReference] = []
    for column, value, is_named in given:
        if is_nothing(value):
            continue
        is_likely = NAMES_PLACE.fullmatch(column.strip().casefold()) is not None or looks_like_image(value)
        if not is_named and (chosen or row.is_named or not is_likely):
            row.note(f"column {column!r} is not used")
            continue
        try:
            images = _listed(value, column, row)
        except PlanError as error:
            if is_named:
                raise
            raise PlanError(f"{error} If it is not the row's image, add --ignore_columns {column}.") from None
        if not chosen:
            chosen = column
            found = images
        elif [image.key for image in images] != [image.key for image in found]:
            raise PlanError(
                f"{row.source}: columns {chosen!r} and {column!r} both hold images. Add --columns "
                f"{IMAGE_FIELD}={chosen} --ignore_columns {column} to use the first."
            )
        else:
            row.note(f"column {column!r} is not used")
    return chosen, found


def _listed(value: Any, column: str, row: Reading) -> list[ImageReference]:
    """The images of a column's value: of one, or of a list of them."""
    where = f"{row.source}: field '{column}"
    if isinstance(value, str) and value.lstrip().startswith("["):  # as a table's cell holds a list
        value = json_in_cell(value, f"{where}'")  # a path, where it is no JSON
    if not isinstance(value, list):
        _note_unread(value, f"{where}'", row, is_inner=True)
        found = reference_of(value, f"{where}'", row.source, row.options)
        return [replace(found, names=_names_of(value))] if found else []
    images = []
    for i, part in enumerate(value):
        _note_unread(part, f"{where}[{i}]'", row, is_inner=True)
        reference = reference_of(part, f"{where}[{i}]'", row.source, row.options)
        if reference is None:
            raise PlanError(f"{where}[{i}]' is empty, must be an image. Remove it, or the row.")
        images.append(replace(reference, names=_names_of(part)))
    return images


def _note_unread(value: Any, where: str, row: Reading, is_inner: bool = False) -> None:
    """Notes what an object with an image says beside it, in the objects inside it too. Raises PlanError for what says
    that its row is not wanted.
    """
    if not isinstance(value, dict):
        return
    for name, part in value.items():
        if name in row.ignored or is_nothing(part):
            continue
        if name in SHAPING:
            if part not in ("auto", "high"):
                row.note(f"field {name!r} of an image is not read; --image_max_pixels is for all of them")
        elif name in OF_PART or (is_inner and name in OF_OBJECT):
            _note_unread(part, where, row, is_inner=True)
        elif is_unwanted(plain_name(name), part):
            raise PlanError(
                f"{where}: field {name!r} of an image is {str(part)[:40]!r}, which may say that the row is not wanted. "
                f"Add --ignore_columns {name} to train on it."
            )
        else:
            row.note(f"field {name!r} of an image is not read")


def _names_of(value: Any) -> frozenset[str]:
    """Names by which a row may call the image that a value of its column is."""
    given = [value]
    if isinstance(value, dict):
        given = [value.get(name) for name in (*NAMES, "path", "url")]
    names = [str(name) for name in given if isinstance(name, str | int)]
    return frozenset(part for name in names for part in (name, name.replace("\\", "/").rpartition("/")[2]))


def _check_name(place: Place, images: list[ImageReference], column: str, row: Reading) -> None:
    """Raises PlanError for a place that names another of the column's images than the one that it has."""
    for key, name in place.names.items():
        if name in place.marks[0].names:
            continue
        if any(name in image.names for image in images):
            raise PlanError(
                f"{place.where} is the place of {name[:40]!r}, which is another image of column {column!r} than the "
                "one in its order. Write both in the same order, or an index, from 0 on, in the places."
            )
        row.note(f"field {key!r} of an image's place is not read: images are taken in order")


# ------ the places in a row's conversation


def order_of(row: Reading, values: dict) -> tuple[str, ...]:
    """The fields of a format in the order of its conversation: an instruction comes before its input. A prompt that its
    completion contains is not one of them.
    """
    order = ORDER.get(row.format, ORDER["prompt_completion"])
    completion = values.get("completion")
    if isinstance(values.get("prompt"), str) and isinstance(completion, list) and completion:
        if isinstance(completion[0], dict) and _role(completion[0]) != "assistant":
            return tuple(name for name in order if name != "prompt")
    if row.format == "preference" and row.columns.get("question", "").strip().casefold() == "instruction":
        return ("system", "question", "context", *order[3:])
    return order


def _places(values: dict, name: str, row: Reading) -> Iterator[Place]:
    """The places in one field, which is copied as far as they go."""
    value = values.get(name)
    role = "user"
    if name in ANSWERS:
        role = "assistant"
    elif name == "system":
        role = "system"
    speaker = Speaker(role, name if name in ("chosen", "rejected") else "", row.ignored)
    where = f"{row.source}: field '{row.columns.get(name, name)}"
    if isinstance(value, str) and value.lstrip().startswith("[") and name == "messages":
        value = json_in_cell(value, f"{where}'")
    if isinstance(value, str):
        yield Place(f"{where}'", speaker, values, name, text=value)
        return
    if name == "choices":
        yield from _in_choices(values, where, speaker)
        return
    if name == "system" and isinstance(value, dict | list):
        values[name] = copied = {"content": value} if isinstance(value, list) else dict(value)
        yield from _in_message(copied, where, speaker)
        if isinstance(value, list):
            values[name] = copied["content"]
        return
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        values[name] = copied = dict(value)
        yield from _in_messages(copied, "messages", f"{where}.messages", speaker)
    elif isinstance(value, dict) and {"role", "from"} & value.keys():
        values[name] = copied = dict(value)
        yield from _in_message(copied, where, replace(speaker, role=_role(copied)))
    elif name == "history" and isinstance(value, list):
        values[name] = pairs = [list(pair) if isinstance(pair, list | tuple) else pair for pair in value]
        for i, pair in enumerate(pairs):
            for k, text in enumerate(pair if isinstance(pair, list) else ()):
                if isinstance(text, str):
                    asker = replace(speaker, role=("user", "assistant")[k % 2])
                    yield Place(f"{where}[{i}][{k}]'", asker, pair, k, text=text)
    elif isinstance(value, list):
        values[name] = value
        yield from _in_messages(values, name, where, speaker)


def _in_choices(values: dict, where: str, speaker: "Speaker") -> Iterator[Place]:
    """The places in the texts of a question's choices: of a list, or of an object with one."""
    container = values
    key = "choices"
    if isinstance(values.get(key), dict):
        values[key] = container = dict(values[key])
        key = "text"
    if isinstance(container.get(key), list):
        container[key] = copied = list(container[key])
        for i, text in enumerate(copied):
            if isinstance(text, str):
                yield Place(f"{where}[{i}]'", speaker, copied, i, text=text)


def _in_messages(container: dict, key: str, where: str, speaker: "Speaker") -> Iterator[Place]:
    container[key] = copied = [dict(m) if isinstance(m, dict) else m for given in container[key] for m in _turns(given)]
    for i, message in enumerate(copied):
        if isinstance(message, dict):
            yield from _in_message(message, f"{where}[{i}]", replace(speaker, role=_role(message)))


def _turns(message: Any) -> list:
    """The message; of a pair of what user and assistant say, both."""
    pair = {"user", "assistant"}
    if isinstance(message, dict) and pair <= message.keys() <= {*pair, "source"}:
        return [{"role": role, "content": message[role]} for role in ("user", "assistant")]
    return [message]


def _role(message: dict) -> str:
    role = message.get("from") if message.get("from") is not None else message.get("role")
    return ROLES.get(str(role).lower(), "user")


def _in_message(message: dict, where: str, speaker: "Speaker") -> Iterator[Place]:
    """The places in a message, a copy that is changed."""
    key = next((k for k in ("content", "value", "parts") if message.get(k) is not None), None)
    held = []
    for name in MESSAGE_KEYS:
        if name in message and name not in speaker.ignored:
            value = message.pop(name)
            held += value if isinstance(value, list) else [] if is_nothing(value) else [value]
    for name, value in message.items():
        if name != key and name not in speaker.ignored and holds_image(plain_name(name), value):
            raise PlanError(
                f"{where}': field {name!r} of a message holds an image, and those in 'images' are read. Rename it, or "
                f"add --ignore_columns {name} to train without it."
            )
    if key is None:
        if held:
            raise PlanError(f"{where}' has images and no content. Write what is asked about them.")
        return
    content = message[key]
    if isinstance(content, dict) and _is_image_part(content):
        content = [content]
    if isinstance(content, list) and held:
        content = [{"type": "image", "image": value} for value in held] + content
        held = []
    if isinstance(content, str):
        yield Place(f"{where}.{key}'", speaker, message, key, text=content, images=held)
    elif content == []:
        yield Place(f"{where}.{key}'", speaker, message, key, text="")
    elif isinstance(content, list):
        message[key] = copied = list(content)
        yield from _in_parts(copied, f"{where}.{key}", speaker)


def _in_parts(parts: list, where: str, speaker: "Speaker") -> Iterator[Place]:
    for k, part in enumerate(parts):
        said = f"{where}[{k}]'"
        if isinstance(part, str):
            yield Place(said, speaker, parts, k, text=part)
        elif not isinstance(part, dict):
            continue
        elif _is_image_part(part):
            yield _image_place(part, Place(said, speaker, parts, k))
        elif isinstance(part.get("content"), list):  # a tool's result
            parts[k] = inner = dict(part)
            inner["content"] = copied = list(part["content"])
            yield from _in_parts(copied, f"{where}[{k}].content", replace(speaker, role="tool"))
        elif isinstance(part.get("text"), str) and part.get("type", "text") in ("text", "input_text", "output_text"):
            parts[k] = inner = {**part, "type": "text"}
            yield Place(said, speaker, inner, "text", text=part["text"])


def _is_image_part(part: dict) -> bool:
    kind = part.get("type")
    if kind is not None:
        return kind in IMAGE_TYPES
    return any(not is_nothing(part.get(name)) for name in UNTYPED_KEYS) and not part.get("text")


def _image_place(part: dict, place: Place) -> Place:
    """The place of a part that is an image, or a bare one."""
    if isinstance(part.get("text"), str) and part["text"].strip():
        raise PlanError(f"{place.where} is an image and has a text. Write a part for each.")
    place.part = part
    held = [name for name in PART_KEYS if not is_nothing(part.get(name))]
    if held:
        name = held[0]
        place.image = {name: part[name]} if name not in ("image", "image_url", "source") else part[name]
        place.others = tuple(other for other in held[1:] if part[other] != part[name])
        return place
    place.names = {name: str(part[name]) for name in NAMES if isinstance(part.get(name), str | int)}
    if not is_nothing(part.get("index")):
        place.index = _whole(part["index"], place.where)
    return place


def _whole(value: Any, where: str) -> int:
    """A place's number, which tables also write as 1.0 and "1". Raises PlanError."""
    try:
        if not isinstance(value, bool) and float(value) == int(float(value)):
            return int(float(value))
    except (TypeError, ValueError, OverflowError):
        pass
    raise PlanError(f"{where} has the index {str(value)[:40]!r}, must be the number of an image, from 0 on.")


def _read_own(place: Place, row: Reading) -> None:
    """Reads the images that a place itself holds. Raises PlanError for one in an answer, and for no image."""
    if (place.text is None or place.images) and place.role == "assistant":
        raise PlanError(
            f"{place.where} is an image in an answer, and only text is learned. Remove the row, or cut it before."
        )
    _note_unread(place.part, place.where, row)
    for value in place.images:
        _note_unread(value, place.where, row, is_inner=True)
    for name in place.others:
        row.note(f"field {name!r} of an image is not read: the image is in another field of its part")
    if place.image is not None:
        place.marks = [_given_image(place.image, place.where, row)]
    if not place.images:
        return
    found = [_given_image(value, place.where, row) for value in place.images]
    if place.num_placeholders not in (0, len(found)):
        raise PlanError(
            f"{place.where} has {place.num_placeholders} {PLACEHOLDER} and its message {_count(len(found), 'image')}. "
            "Write one for each."
        )
    if place.num_placeholders:
        place.marks = found
    else:
        place.in_front = found


def _given_image(value: Any, where: str, row: Reading) -> ImageReference:
    reference = reference_of(value, where, row.source, row.options)
    if reference is None:
        raise PlanError(f"{where} is an empty image. Give it, or remove the row.")
    return reference


# ------ a column's images in their places


def fill(places: list[Place], images: list[ImageReference], column: str, source: str) -> None:
    """Gives each place its image of the row's column. Raises PlanError unless they are as many.

    Of a pair, what both answers share has the images, or each answer's own conversation, or both: an answer may contain
    its prompt.
    """
    asked = [place for place in places if place.role != "assistant"]
    bare = [place for place in asked if place.is_bare]
    if bare and any(place.index is not None for place in bare):
        _fill_by_number(bare, images, column, source)
        return
    open_places = bare or [place for place in asked if place.num_placeholders]
    branches = {name: [p for p in open_places if p.branch == name] for name in ("", "chosen", "rejected")}
    sizes = {name: sum(1 if p.is_bare else p.num_placeholders for p in found) for name, found in branches.items()}
    shared, chosen, rejected = sizes.values()
    number = len(images)
    if not any(sizes.values()):
        _put_in_front(asked, images, column, source)
    elif chosen == rejected == 0 and shared == number:
        _fill_in_order(branches[""], images)
    elif chosen == rejected == number and shared in (0, number):
        for found in branches.values():
            _fill_in_order(found, images)
    elif chosen == rejected and shared + chosen == number:
        for name in ("chosen", "rejected"):
            _fill_in_order(branches[""] + branches[name], images)
    else:
        what = "places" if bare else PLACEHOLDER
        many = shared + max(chosen, rejected)
        raise PlanError(
            f"{source}: column {column!r} has {_count(number, 'image')}, and the questions have {many} {what}. Write "
            "one for each image."
        )


def _fill_in_order(places: list[Place], images: list[ImageReference]) -> None:
    at = 0
    for place in places:
        size = 1 if place.is_bare else place.num_placeholders
        place.marks = images[at : at + size]
        at += size


def _fill_by_number(bare: list[Place], images: list[ImageReference], column: str, source: str) -> None:
    """Places that say which of the images they are for, from 0 on."""
    numbers = [place.index for place in bare]
    if set(numbers) != set(range(len(images))):
        shown = ", ".join(map(str, numbers))
        raise PlanError(
            f"{source}: column {column!r} has {_count(len(images), 'image')}, and the places in its messages have the "
            f"numbers {shown}, must be 0 to {len(images) - 1}. Write one for each image."
        )
    for place in bare:
        assert place.index is not None, place
        place.marks = [images[place.index]]


def _put_in_front(asked: list[Place], images: list[ImageReference], column: str, source: str) -> None:
    """Puts images before the first question; of a pair whose answers contain it, before that in each of them."""
    for place in asked:
        other = OTHER_PLACEHOLDER.search(place.text or "")
        if other:
            raise PlanError(
                f"{place.where} has {other[0]!r}, and which image of column {column!r} that is, is not known here. "
                f"Write {PLACEHOLDER} where each image is."
            )
    firsts: dict[str, Place] = {}
    for place in asked:
        if place.role == "user":
            firsts.setdefault(place.branch, place)
    shared = firsts.get("")
    if not firsts:
        raise PlanError(f"{source}: column {column!r} has images, and there is no question that they are before.")
    for branch, place in firsts.items():
        if not branch or shared is None or place.text == shared.text:
            place.in_front = images


def _numbered(places: list[Place]) -> list[ImageReference]:
    """The row's images in the order of their first marks, equal ones once."""
    found: dict[tuple, ImageReference] = {}
    for place in places:
        for reference in (*place.in_front, *place.marks):
            found.setdefault(reference.key, reference)
    return list(found.values())


def _result(place: Place, images: list[ImageReference]) -> Any:
    """Value of a place: its text with marks, or a part of text that is one."""
    numbers = {reference.key: number for number, reference in enumerate(images)}
    marks = [numbered(numbers[reference.key]) for reference in place.marks]
    if place.text is None:
        return {"type": "text", "text": "".join(marks)}
    text = place.text
    if marks:
        pieces = text.split(PLACEHOLDER)
        text = pieces[0] + "".join(mark + piece for mark, piece in zip(marks, pieces[1:], strict=True))
    return "".join(numbered(numbers[reference.key]) for reference in place.in_front) + text


def _has_reserved(value: Any) -> bool:
    """True if a text in a value has the mark, or what numbers it."""
    if isinstance(value, str):
        return not value.isascii() and RESERVED.search(value) is not None
    if isinstance(value, dict):
        return any(map(_has_reserved, value.values()))
    return isinstance(value, list | tuple) and any(map(_has_reserved, value))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1 and not noun.endswith('>'))}"
