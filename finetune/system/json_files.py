"""Reads our own JSON files back: content is checked against a schema, so that no damage becomes a traceback.

A schema is a type, a tuple of types, object for anything, [schema] for a list, {str: schema} for any keys, or
{"key": schema} for these keys, of which "key?" may be absent. Keys that it does not name are allowed: newer versions
add some.
"""

import json
import stat
from pathlib import Path
from typing import Any

from finetune.errors import PlanError, first_line

MAX_BYTES = 256 * 2**20  # far above the index of any model; anything longer is not one of our files
NUMBER = (int, float)
OPTIONAL_NUMBER = (int, float, type(None))
JSON_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}


def json_kind(value: object) -> str:
    """JSON's name of a value's type, such as "an object"."""
    return JSON_NAMES.get(type(value), type(value).__name__)


class NotStrictError(ValueError):
    """JSON that has a key twice or is no Unicode text."""


def strict_json(text: str) -> Any:
    """The value of a JSON text. Raises NotStrictError, and ValueError for text that is not JSON."""
    try:
        value = json.loads(text, object_pairs_hook=_once_each)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise NotStrictError("has half of a surrogate pair") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    return value


def json_in_cell(text: str, where: str) -> Any:
    """The value of a JSON text in a field of a row; of other text itself. Raises PlanError for what a file of rows may
    not have either.
    """
    try:
        return strict_json(text)
    except NotStrictError as error:
        raise PlanError(f"{where}: its JSON {error}. Fix it.") from None
    except ValueError:
        return text


def _once_each(pairs: list[tuple[str, Any]]) -> dict:
    """The object of these pairs. Raises NotStrictError for a key that has two values."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise NotStrictError(f"has duplicate key {twice[:80]!r}")
    return found


class JsonFileError(PlanError):
    """A JSON file that cannot be read, or whose content does not match its schema; names the file and the field."""


def read_json(path: Path, schema: Any) -> Any:
    """Content of one of our own JSON files. Raises JsonFileError; FileNotFoundError passes through."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # a pipe would never end
            raise JsonFileError(f"{path}: is not a regular file")
        if found.st_size > MAX_BYTES:
            raise JsonFileError(f"{path}: has {found.st_size:,} bytes, more than any such file")
        data = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise JsonFileError(f"{path}: cannot be read ({error.strerror or error})") from None
    return parse_json(data, schema, str(path))


def parse_json(data: bytes, schema: Any, where: str) -> Any:
    """`data` parsed and checked; `where` begins every error."""
    try:
        content = json.loads(data)
    except RecursionError:
        raise JsonFileError(f"{where}: is not JSON (nested too deeply)") from None
    except ValueError as error:  # also UnicodeDecodeError
        raise JsonFileError(f"{where}: is not JSON ({first_line(error)})") from None
    check(content, schema, where)
    return content


def check(value: Any, schema: Any, where: str, field: str = "") -> None:
    """Raises JsonFileError for the first field of `value` that does not match `schema`."""
    if field:
        said = f"{where}: {field}"
    else:
        said = f"{where}: content"
    if isinstance(schema, dict):
        _check_type(value, (dict,), said)
        if set(schema) == {str}:
            for key, inner in value.items():
                check(inner, schema[str], where, f"{field}.{key[:80]}" if field else key[:80])
            return
        for name, inner in schema.items():
            key = name.removesuffix("?")
            if key in value:
                check(value[key], inner, where, f"{field}.{key}" if field else key)
            elif key == name:
                raise JsonFileError(f"{where}: {f'{field}.{key}' if field else key} is missing")
    elif isinstance(schema, list):
        _check_type(value, (list,), said)
        for i, inner in enumerate(value):
            check(inner, schema[0], where, f"{field}[{i}]")
    elif schema is not object:
        _check_type(value, schema if isinstance(schema, tuple) else (schema,), said)


def _check_type(value: Any, types: tuple, said: str) -> None:
    kind = type(value)
    if kind in types or (kind is int and float in types):
        return
    needed = " or ".join("null" if t is type(None) else JSON_NAMES[t] for t in types)
    raise JsonFileError(f"{said} is {kind.__name__}, must be {needed}")
