"""Values of flags, from strings and YAML scalars, checked."""

import difflib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import Field
from typing import Any

from finetune.config import FIELDS, value_type
from finetune.errors import PlanError

MAX_NAME_BYTES = 255  # NAME_MAX of every file system in use
MAX_PATH_BYTES = 3000  # PATH_MAX is 4096, and files of a run are up to a few hundred bytes below it
TRUE = ("true", "1", "yes", "on")
FALSE = ("false", "0", "no", "off")
DECIMAL_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)$")
DECIMAL_FLOAT = re.compile(
    r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+][0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)
# What a flag that rejects 0 would leave none of, by its group.
NOTHING_LEFT = {"machine": "ranks. Use -1, or omit the flag", "adapter": "layers. Use -1 for all of them"}
MAX_YAML_BYTES = 2**16  # a file that sets every flag has 4 KiB; yaml reads a MiB in 10 s


def nearest(word: object, known: Iterable[object]) -> str:
    """The nearest known name to an unknown one, as a sentence; empty if none has its words."""
    near = difflib.get_close_matches(shown(word), [str(k) for k in known], n=3, cutoff=0.5)
    meant = [name for name in near if _is_meant(shown(word), name)]
    if meant:
        return f" Nearest: {meant[0]}."
    return ""


def _is_meant(one: str, other: str) -> bool:
    """True if each word of the first is one of the other, but for a letter or two or the rest of it: a word in common
    or similar letters alone mean nothing.
    """
    theirs = re.split(r"[_.]", other.lower().lstrip("-"))
    words = [word for word in re.split(r"[_.]", one.lower().lstrip("-")) if word]
    return bool(words) and (all(_is_near(w, theirs) for w in words) or "".join(words) == "".join(theirs))


def _is_near(word: str, others: list[str]) -> bool:
    begins = any(len(word) > 2 and other.startswith(word) for other in others)
    return begins or any(difflib.SequenceMatcher(None, word, other).ratio() >= 0.75 for other in others)


def parse_value(name: str, value: Any, where: str | None = None):
    """Value of flag `name` converted to its type, from a string or a YAML scalar.
    Raises PlanError beginning with `where`.
    """
    field = FIELDS[name]
    where = where or f"--{name}"
    meta = field.metadata
    if value is None:
        return None
    if meta["repeatable"] and isinstance(value, list | tuple):
        if not value:
            raise PlanError(f"{where}: is an empty list. Give a name or omit the flag.")
        if None in value:  # never the flag's default in its place
            raise PlanError(f"{where}: entry {value.index(None) + 1} of the list is empty. Give a name, or remove it.")
        named = [os.fspath(v) if isinstance(v, os.PathLike) else v for v in value]
        entries = [v if isinstance(v, dict) else parse_value(name, v, where) for v in named]
        if len(entries) > 1 or isinstance(entries[0], dict):
            return entries
        return entries[0]
    if (
        meta["comma_separated"]
        and isinstance(value, list | tuple)
        and all(isinstance(v, str) or (meta["metavar"] == "N,..." and type(v) is int) for v in value)
    ):
        value = ",".join(map(str, value))
    kinds = (int, float, str) if "=" in (meta["metavar"] or "") else str
    if meta["comma_separated"] and isinstance(value, dict) and all(isinstance(v, kinds) for v in value.values()):
        value = ",".join(f"{k}={v}" for k, v in value.items())
    if accepts_booleans(field):
        word = str(value).lower()
        value = "true" if word in TRUE else "false" if word in FALSE else word
        if value_type(field) is bool and value not in ("true", "false"):
            raise PlanError(f"{where} {shown(word)}: not a boolean. Use true or false.")
        if value_type(field) is bool:
            return value == "true"
    if str(value).lower() in (*(("auto",) if meta["auto"] else ()), *meta["words"]):
        return str(value).lower()
    if value_type(field) in (int, float):
        return _parse_number(field, value, where)
    if not isinstance(value, str):
        if name == "model_name" and not isinstance(value, int | float | list | tuple | dict):
            raise PlanError(
                f"{where}: is a {type(value).__name__}, and each rank loads the model from its files. Write it with "
                "save_pretrained(FOLDER), its tokenizer too, and give FOLDER."
            )
        raise PlanError(f"{where}: is {type(value).__name__} {shown(value)}, must be a string.")
    if meta["choices"]:
        return _parse_choice(meta, value, where)
    _check_text(meta, value, where)
    if name == "output_dir":
        return _expanded(value, where)
    return value


def accepts_booleans(field: Field) -> bool:
    """True if the flag may be given without a value, which then means true."""
    return value_type(field) is bool or set(field.metadata["choices"] or ()) >= {"true", "false"}


def _parse_number(field: Field, value: Any, where: str):
    kind = value_type(field)
    meta = field.metadata
    if meta["auto"] and kind is float:
        example = "1e-4"
    elif field.default is None:
        example = "1"
    else:
        example = str(field.default)
    if isinstance(value, bool):
        raise PlanError(f"{where} {value}: not a number. Give one, such as {example}.")
    try:
        if kind is int and isinstance(value, float):
            number = _whole(value)
        else:
            number = kind(value)
    except (TypeError, ValueError, OverflowError):
        what = "an integer" if kind is int else "a number"
        raise PlanError(f"{where} {shown(value)}: not {what}. Give one, such as {example}.") from None
    low = meta["minimum"]
    above = meta["above"]
    if number != number or (low is not None and number < low) or (above is not None and number <= above):
        raise PlanError(
            f"{where} {shown(value)}: must be {'>= ' + str(low) if low is not None else '> ' + str(above)}."
        )
    if meta["maximum"] is not None and number > meta["maximum"]:
        raise PlanError(f"{where} {shown(value)}: must be <= {meta['maximum']}.")
    if meta["nonzero"] and number == 0:
        raise PlanError(f"{where} 0: leaves no {NOTHING_LEFT.get(meta['group'], 'rows. Use -1 for all of them')}.")
    if number == float("inf"):
        raise PlanError(f"{where} {shown(value)}: not finite. Give a number, such as {example}.")
    if kind is int and number >= 2**63:
        raise PlanError(f"{where} {shown(value)}: must be below 2**63 ({2**63}).")
    return number


def _parse_choice(meta: Mapping[str, Any], value: str, where: str) -> str:
    if value in meta["choices"]:
        word = value
    else:
        word = value.lower()
    word = meta["value_aliases"].get(word, word)
    if word not in meta["choices"]:
        near = nearest(word, meta["choices"])
        raise PlanError(f"{where} {shown(value)}: not one of {', '.join(meta['choices'])}.{near}")
    return word


def _check_text(meta: Mapping[str, Any], value: str, where: str) -> None:
    if "\0" in value:
        raise PlanError(f"{where}: contains a NUL byte. Remove it.")
    try:
        os.fsencode(value)  # as the system passes names that are not UTF-8
    except UnicodeEncodeError as error:
        raise PlanError(f"{where}: is not Unicode text (character {error.start + 1}). Change it.") from None
    if not meta["may_be_empty"] and not value.strip():
        raise PlanError(f"{where} {value!r}: is empty. Give a name or omit the flag.")
    if meta["path"]:
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            remedy = "Give a path that is."
            if sys.getfilesystemencoding() != "utf-8":
                remedy = f"Python reads names of files as {sys.getfilesystemencoding()} here: set PYTHONUTF8=1."
            raise PlanError(f"{where} {value!r}: is not UTF-8. {remedy}") from None
        if len(os.fsencode(value)) > MAX_PATH_BYTES:
            raise PlanError(
                f"{where} {shown(value)}: has {len(os.fsencode(value))} bytes, the maximum is {MAX_PATH_BYTES}. "
                "Shorten it."
            )
        longest = max(len(os.fsencode(part)) for part in value.split("/"))
        if longest > MAX_NAME_BYTES:
            raise PlanError(
                f"{where} {shown(value)}: a path component has {longest} bytes, the maximum is {MAX_NAME_BYTES}. "
                "Shorten it."
            )


def _expanded(folder: str, where: str) -> str:
    """A folder with ~ expanded: in a config file no shell does it."""
    found = os.path.expanduser(folder)
    if found.startswith("~"):
        raise PlanError(f"{where} {folder}: no such user. Give another folder.")
    return found


def shown(value: object) -> str:
    """A value as messages show it: in one line, truncated to 80 characters."""
    text = str(value).replace("\n", "\\n")
    if len(text) <= 80:
        return text
    return text[:80] + "..."


def _whole(value: float) -> int:
    if value != int(value):
        raise ValueError
    return int(value)


def read_yaml(path: str, text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            if self.check_event(yaml.AliasEvent):  # nine levels of them are a value of gigabytes
                line = self.peek_event().start_mark.line + 1
                raise PlanError(f"{path}:{line}: aliases (*name) are not supported. Write the value out.")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False):
            seen = set()
            for key_node, _ in node.value:
                key = str(self.construct_object(key_node, deep=True))
                if key in seen:
                    line = key_node.start_mark.line + 1
                    raise PlanError(f"{path}:{line}: key '{shown(key)}' is given twice. Give it once.")
                seen.add(key)
            return super().construct_mapping(node, deep)

    # YAML 1.1 reads 010 as 8, 0x10 as 16 and 1:30 as 90: here they are text, which parse_value() reads as it does the
    # command line's. 2e-4 is a string in YAML 1.1 too.
    tags = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
    Loader.yaml_implicit_resolvers = {
        first: [(tag, r) for tag, r in found if tag not in tags]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver(tags[0], DECIMAL_INT, list("-+0123456789"))
    Loader.add_implicit_resolver(tags[1], DECIMAL_FLOAT, list("-+0123456789."))
    try:
        return yaml.load(text, Loader) or {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = ""
        if mark:
            line = f":{mark.line + 1}"
        raise PlanError(f"{path}{line}: {getattr(error, 'problem', None) or _fact(error)}. Fix the YAML.") from None
    except PlanError:
        raise
    # yaml raises ValueError for a date such as 2026-13-45, and AttributeError for a text that is tagged as a date.
    except (ValueError, AttributeError, RecursionError) as error:
        raise PlanError(f"{path}: cannot be parsed as YAML ({_fact(error)}). Fix the YAML.") from None


def _fact(error: BaseException) -> str:
    if isinstance(error, AttributeError):
        return "what is tagged as a date is none"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return str(error).splitlines()[0][:200]
