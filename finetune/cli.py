"""Strict parsing of command lines and config files: no abbreviations; an unknown name gets the nearest known one."""

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from finetune import __version__
from finetune.config import FIELDS, GROUPS, NAMES, value_type
from finetune.errors import PlanError
from finetune.help import HelpAction
from finetune.older import translate

MAX_NAME_BYTES = 255  # NAME_MAX of every file system in use
MAX_PATH_BYTES = 3000  # PATH_MAX is 4096, and files of a run are up to a few hundred bytes below it
DECIMAL_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)$")
DECIMAL_FLOAT = re.compile(
    r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+][0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)
MAX_YAML_BYTES = 2**16  # a file that sets every flag has 4 KiB; yaml reads a MiB in 10 s
MAX_JSON_BYTES = 2**20
TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


class Parser(argparse.ArgumentParser):
    """ArgumentParser whose errors are PlanErrors naming the nearest flag.
    Dashes and underscores are equivalent in flags.
    """

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def parse_args(self, args=None, namespace=None):
        args = [_underscored(a) for a in (sys.argv[1:] if args is None else args)]
        for arg in args:  # before argparse finds that a required flag is missing: it may be the misspelled one
            if arg.startswith("--"):
                self._check_known(arg.split("=")[0])
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._check_known(unknown[0].split("=")[0])
        return known

    def number(self, name: str, default: int | float, text: str) -> None:
        """Adds a flag with a number of the default's type, which its help ends with."""
        shown = f"{text} (default: {default:g})"
        metavar = "N" if isinstance(default, int) else "X"
        self.add_argument(f"--{name}", type=type(default), default=default, metavar=metavar, help=shown)

    def _check_known(self, flag: str) -> None:
        if not flag.startswith("-"):
            rows = "--dataset" in self._option_string_actions and os.path.exists(flag)
            advice = f"Use --dataset {flag}." if rows else "See --help."
            raise PlanError(f"{shown(flag)}: not a flag, and this command takes no positional arguments. {advice}")
        if flag not in self._option_string_actions:
            raise PlanError(f"{shown(flag)}: unknown flag.{nearest(flag, self._option_string_actions)} See --help.")

    def error(self, message):
        raise PlanError(message[0].upper() + message[1:] + ". See --help.")


class FlagParser(Parser):
    """The parser of the flags of TrainConfig: names and values of other programs are translated, a list of values is
    one value of a flag that takes several, and of a flag given twice the last one counts. `lines`: what to say of it.
    """

    def __init__(self, **kwargs):
        super().__init__(add_help=False, usage="%(prog)s [--FLAG VALUE ...]", **kwargs)
        self.lines: list[str] = []
        self.add_argument(
            "-h", "--help", action=HelpAction, metavar="all|FLAG", help="print every flag, or more about one, and exit"
        )
        self.add_argument("--version", action="version", version=f"finetune {__version__}", help="print it and exit")

    def parse_args(self, args=None, namespace=None):
        self.lines.clear()
        args = [_underscored(a) for a in (sys.argv[1:] if args is None else args)]
        helps = [at for at, word in enumerate(args) if word.partition("=")[0] in ("-h", "--help")]
        if helps:
            asked = "=".join(args[helps[0] :][:2]).partition("=")[2]
            return super().parse_args([f"--help={asked}"], namespace)
        return super().parse_args(self._ours(args), namespace)

    def nearest(self, flag: str) -> str:
        return nearest(flag, self._option_string_actions)

    def _ours(self, args: list[str]) -> list[str]:
        """The words of a command line with our names and values only."""
        words, foreign, at = [], {}, 0
        named = {arg.partition("=")[0] for arg in args}
        while at < len(args):
            flag, equals, value = args[at].partition("=")
            end = at + 1
            while not equals and flag.startswith("--") and end < len(args) and not args[end].startswith("--"):
                end += 1
            values, at = [value] if equals else args[at + 1 : end], end
            if flag == "--push_to_hub" and not values and "--hub_model_id" in named:
                self.lines.append("--push_to_hub: left out. --hub_model_id names the repository to push to.")
                continue
            if flag[2:] in NAMES and flag.startswith("--"):
                words += self._own(flag, values)
                continue
            name, theirs = self._foreign(flag, values)
            if name is None:
                words += [flag + equals + value] if equals else [flag, *values]
            else:
                foreign[name] = theirs
        return [*self._translated(foreign, words), *words]

    def _own(self, flag: str, values: list[str]) -> list[str]:
        """One of our flags with its values, as one word or more. Without any it is true, where another program's is."""
        name = NAMES[flag[2:]]
        if not values and "true" in translate.words_elsewhere(name):
            values = ["true"]
        if len(values) == 1:
            found = translate.own_value(name, values[0], f"{flag} {shown(values[0])}")
            if found is not None:
                self.lines += [found.line] if found.line else []
                return [f"--{n}={v}" for part in (found.given, found.otherwise) for n, v in part.items()]
        meta = FIELDS[name].metadata
        if len(values) > 1 and meta["comma_separated"]:
            values = [",".join(values)]
        if len(values) > 1 and meta["repeatable"]:
            return [f"{flag}={value}" for value in values]
        return [f"{flag}={values[0]}", *values[1:]] if values else [flag]

    def _foreign(self, flag: str, values: list[str]) -> tuple[str | None, object]:
        """(the name of another program, its value), or (None, "") if nobody has it. --no_x is x false."""
        name = flag[2:] if flag.startswith("--") else ""
        if flag in self._option_string_actions or not name:
            return None, ""
        if translate.known(name) is None:
            negated = name.removeprefix("no_")
            return (negated, "false") if negated != name and not values and translate.known(negated) else (None, "")
        return name, (values if len(values) > 1 else values[0]) if values else "true"

    def _translated(self, foreign: dict, words: list[str]) -> list[str]:
        """Our words for names of other programs, to stand before those of the command line."""
        settled, found = translate.joined(foreign)
        for name, value in foreign.items():
            if name not in settled:
                where = f"--{name}" + (f" {translate.words_of(value)}" if value != "true" else "")
                entry = translate.known(name)
                found.append(translate.translated(entry, value, where))
                for flag, raw in found[-1].given.items():
                    parse_value(NAMES[flag], raw, f"--{name}")
        self.lines += [t.line for t in found if t.line]
        given = {NAMES[word[2:].partition("=")[0]] for word in words if word[2:].partition("=")[0] in NAMES}
        said = {name: value for name, value in translate.merged(found).items()}
        weak = {NAMES[n] for t in found for n in t.otherwise} - {NAMES[n] for t in found for n in t.given}
        return [f"--{n}={_word(v)}" for n, v in said.items() if not (n in weak and n in given)]


def _word(value) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def check_ranges(args, ranges: dict[str, tuple]) -> None:
    """Raises PlanError for a number outside of its range: {name: (smallest, largest)}."""
    for name, (low, high) in ranges.items():
        if not low <= getattr(args, name) <= high:
            raise PlanError(f"--{name} {getattr(args, name)}: must be {low} to {high}.")


def _underscored(arg: str) -> str:
    if not arg.startswith("--") or arg == "--":
        return arg
    name, equals, value = arg.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def nearest(word, known) -> str:
    """The nearest known name to an unknown one, as a sentence; empty if none has its words."""
    near = difflib.get_close_matches(shown(word), [str(k) for k in known], n=3, cutoff=0.5)
    meant = [name for name in near if _is_meant(shown(word), name)]
    return f" Nearest: {meant[0]}." if meant else ""


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


def parse_value(name: str, value, where: str | None = None):
    """Value of flag `name` converted to its type, from a string or a YAML scalar.
    Raises PlanError beginning with `where`.
    """
    field, where = FIELDS[name], where or f"--{name}"
    meta = field.metadata
    if value is None:
        return None
    if meta["repeatable"] and isinstance(value, list | tuple):
        entries = [v if isinstance(v, dict) else parse_value(name, v, where) for v in value]
        if not entries:
            raise PlanError(f"{where}: is an empty list. Give a name or omit the flag.")
        return entries if len(entries) > 1 or isinstance(entries[0], dict) else entries[0]
    if (
        meta["comma_separated"]
        and isinstance(value, list | tuple)
        and all(isinstance(v, str) or (meta["metavar"] == "N,..." and type(v) is int) for v in value)
    ):
        value = ",".join(map(str, value))
    if meta["comma_separated"] and isinstance(value, dict) and all(isinstance(v, str) for v in value.values()):
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
    return _expanded(value, where) if name == "output_dir" else value


def accepts_booleans(field) -> bool:
    """True if the flag may be given without a value, which then means true."""
    return value_type(field) is bool or set(field.metadata["choices"] or ()) >= {"true", "false"}


def _parse_number(field, value, where: str):
    kind, meta = value_type(field), field.metadata
    example = "1e-4" if meta["auto"] and kind is float else 1 if field.default is None else field.default
    if isinstance(value, bool):
        raise PlanError(f"{where} {value}: not a number. Give one, such as {example}.")
    try:
        number = _whole(value) if kind is int and isinstance(value, float) else kind(value)
    except (TypeError, ValueError, OverflowError):
        what = "an integer" if kind is int else "a number"
        raise PlanError(f"{where} {shown(value)}: not {what}. Give one, such as {example}.") from None
    low, above = meta["minimum"], meta["above"]
    if number != number or (low is not None and number < low) or (above is not None and number <= above):
        raise PlanError(
            f"{where} {shown(value)}: must be {'>= ' + str(low) if low is not None else '> ' + str(above)}."
        )
    if meta["maximum"] is not None and number > meta["maximum"]:
        raise PlanError(f"{where} {shown(value)}: must be <= {meta['maximum']}.")
    if meta["nonzero"] and number == 0:
        no = "ranks. Use -1, or omit the flag" if meta["group"] == "machine" else "rows. Use -1 for all of them"
        raise PlanError(f"{where} 0: leaves no {no}.")
    if number == float("inf"):
        raise PlanError(f"{where} {shown(value)}: not finite. Give a number, such as {example}.")
    if kind is int and number >= 2**63:
        raise PlanError(f"{where} {shown(value)}: must be below 2**63 ({2**63}).")
    return number


def _parse_choice(meta, value: str, where: str) -> str:
    word = value if value in meta["choices"] else value.lower()
    word = meta["value_aliases"].get(word, word)
    if word not in meta["choices"]:
        near = nearest(word, meta["choices"])
        raise PlanError(f"{where} {shown(value)}: not one of {', '.join(meta['choices'])}.{near}")
    return word


def _check_text(meta, value: str, where: str) -> None:
    if "\0" in value:
        raise PlanError(f"{where}: contains a NUL byte. Remove it.")
    try:
        os.fsencode(value)  # as the system passes names that are not UTF-8
    except UnicodeEncodeError as error:
        raise PlanError(f"{where}: is not Unicode text (character {error.start + 1}). Change it.") from None
    if meta["nonempty"] and not value.strip():
        raise PlanError(f"{where} {value!r}: is empty. Give a name or omit the flag.")
    if meta["path"]:
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise PlanError(f"{where} {value!r}: is not UTF-8. Give a path that is.") from None
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


def shown(value) -> str:
    """A value as messages show it: in one line, truncated to 80 characters."""
    text = str(value).replace("\n", "\\n")
    return text if len(text) <= 80 else text[:80] + "..."


def _whole(value: float) -> int:
    if value != int(value):
        raise ValueError
    return int(value)


def add_flags(parser: FlagParser) -> None:
    """Adds every field of TrainConfig to `parser`, grouped. Unset flags are absent from the parsed namespace."""
    for key, title in GROUPS.items():
        group = parser.add_argument_group(title)
        for name, field in FIELDS.items():
            meta = field.metadata
            if meta["group"] != key:
                continue
            options = dict(nargs="?", const="true") if accepts_booleans(field) else {}
            group.add_argument(
                *(f"--{n}" for n in (name, *meta["aliases"])),
                dest=name,
                default=argparse.SUPPRESS,
                action=_OneValue,
                metavar=_metavar(name, field),
                help=help_text(field),
                **options,
            )


class _OneValue(argparse.Action):
    """Converts the value; of a flag given twice (aliases included) the last one counts, unless it is repeatable."""

    def __call__(self, parser, namespace, value, option_string=None):
        new, old = parse_value(self.dest, value, option_string), getattr(namespace, self.dest, None)
        if old is not None and FIELDS[self.dest].metadata["repeatable"]:
            setattr(namespace, self.dest, [*(old if isinstance(old, list) else [old]), new])
            return
        if old is not None and old != new:
            parser.lines.append(
                f"{option_string} {shown(value)}: the last one counts; --{self.dest} was {shown(old)} before"
            )
        setattr(namespace, self.dest, new)


def _metavar(name, field) -> str:
    meta = field.metadata
    if meta["choices"]:
        return "{" + ",".join(c for c in meta["choices"] if c) + "}"
    return meta["metavar"] or {int: "N", float: "X", bool: "true|false"}.get(value_type(field), "TEXT")


def help_text(field) -> str:
    default = field.metadata["unset"] or field.default
    if default is None:
        return field.metadata["help"].replace("%", "%%")
    shown = str(default).lower() if isinstance(default, bool) else default
    return f"{field.metadata['help']} (default: {shown})".replace("%", "%%")


def read_config(path: str, say: Callable[[str], object] = lambda line: None) -> dict:
    """{flag: value} from a YAML file of flags or of another program, or as requested in a run_plan.json.
    Raises PlanError naming file and key. `say`: what to do with each line of a translation.
    """
    file = Path(path)
    if not file.is_file():
        raise PlanError(f"--config {path}: no such file. Give a YAML file of flags or a run_plan.json.")
    limit = MAX_JSON_BYTES if file.suffix == ".json" else MAX_YAML_BYTES
    try:
        with open(file, "rb") as opened:
            data = opened.read(limit + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise PlanError(f"--config {path}: cannot be read ({error.strerror}). Change its permissions.") from None
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: byte {error.start} is not UTF-8. Save the file as UTF-8.") from None
    if len(data) > limit:
        raise PlanError(f"{path}: has over {limit >> 10} KiB, which no file of flags needs. Shorten it.")
    if file.suffix == ".json":
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"{path}:{error.lineno}: {error.msg}. Fix the JSON.") from None
        except (ValueError, RecursionError) as error:
            raise PlanError(f"{path}: cannot be parsed as JSON ({_fact(error)}). Fix the JSON.") from None
        if isinstance(content, dict) and "requested" in content:
            content = content["requested"]
    else:
        content = read_yaml(path, text)
    if not isinstance(content, dict):
        raise PlanError(f"{path}: contains {type(content).__name__}, must contain `flag: value` lines.")
    program = translate.recognised(content) if file.suffix != ".json" else None
    if program:
        content, lines, theirs = translate.of_file(content, program, path)
        for line in lines:
            say(line)
        return parse_config(content, path, say, theirs)
    return parse_config(content, path, say)


def parse_config(
    content: dict, path: str, say: Callable[[str], object] = lambda line: None, keys: dict | None = None
) -> dict:
    """{flag: value} from parsed file content, each value converted to its flag's type.
    Raises PlanError naming file and key. `keys`: {flag: the file's key for it}, where it is another.
    """
    if "config" in content:
        raise PlanError(f"{path}: 'config' is not supported inside a config file. Remove it.")
    named = keys or {}
    return parse_named(
        content, lambda key: f"{path}: {named.get(key, key)}", lambda key: f"{path}: unknown key '{shown(key)}'.", say
    )


def parse_named(content: dict, where: Callable, unknown: Callable, say: Callable[[str], object]) -> dict:
    """{flag: value} of a mapping by our names or other programs', converted. Raises PlanError, which `where(name)`
    begins, or `unknown(name)` for a name that nobody has.
    """
    overrides, foreign, found = {}, {}, []
    for key, value in content.items():
        word = str(key).replace("-", "_")
        name = NAMES.get(word)
        if name is None and translate.known(word) is None:
            raise PlanError(unknown(key) + nearest(key, NAMES))
        if name is None:
            foreign[word] = value
            continue
        theirs = translate.own_value(name, value, f"{where(key)} {shown(value)}")
        if theirs is not None:
            found.append(theirs)
            continue
        new = parse_value(name, value, where(key))
        if name in overrides and overrides[name] != new:
            raise PlanError(f"{where(key)}: gives --{name} a second value. Give it once.")
        overrides[name] = new
    settled, together = translate.joined(foreign, where=where)
    found += together
    for name, value in foreign.items():
        if name not in settled:
            found.append(
                translate.translated(translate.known(name), value, f"{where(name)} {translate.words_of(value)}")
            )
    for line in filter(None, (t.line for t in found)):
        say(line)
    for name, value in translate.merged(found).items():
        weak = not any(name == NAMES[n] for t in found for n in t.given)
        new = parse_value(name, value, where(name))
        if overrides.get(name) is not None and overrides[name] != new:
            if weak:
                continue
            raise PlanError(f"{where(name)}: has a second value, {shown(value)}. Give it once.")
        overrides[name] = new
    return {name: value for name, value in overrides.items() if value is not None}


def read_yaml(path: str, text: str):
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent, index):
            if self.check_event(yaml.AliasEvent):  # nine levels of them are a value of gigabytes
                line = self.peek_event().start_mark.line + 1
                raise PlanError(f"{path}:{line}: aliases (*name) are not supported. Write the value out.")
            return super().compose_node(parent, index)

        def construct_mapping(self, node, deep=False):
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
        line = f":{mark.line + 1}" if mark else ""
        raise PlanError(f"{path}{line}: {getattr(error, 'problem', None) or _fact(error)}. Fix the YAML.") from None
    except PlanError:
        raise
    # yaml raises ValueError for a date such as 2026-13-45, and AttributeError for a text that is tagged as a date.
    except (ValueError, AttributeError, RecursionError) as error:
        raise PlanError(f"{path}: cannot be parsed as YAML ({_fact(error)}). Fix the YAML.") from None


def _fact(error) -> str:
    if isinstance(error, AttributeError):
        return "what is tagged as a date is none"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0][:200]


def parse_overrides(argv, parser: FlagParser, say: Callable[[str], object] = lambda line: None) -> dict:
    """{flag: value} of what the user set: the config file, overridden by the command line.

    `say`: what to do with each line about names of other programs, and about flags given twice.
    """
    given = vars(parser.parse_args(argv))
    for line in parser.lines:
        say(line)
    return with_config(given, say)


def with_config(given: dict, say: Callable[[str], object] = lambda line: None) -> dict:
    """`given` merged over the values in its --config file, if any."""
    return {**read_config(given["config"], say), **given} if given.get("config") else given
