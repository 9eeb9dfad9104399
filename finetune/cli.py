"""Strict parsing of command lines and config files: no abbreviations; an unknown name gets the nearest known one."""

import argparse
import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import Field
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NoReturn

from finetune import __version__
from finetune.config import FIELDS, GROUPS, NAMES, value_type
from finetune.errors import OutputClosedError, PlanError
from finetune.flag_values import MAX_YAML_BYTES, _fact, accepts_booleans, nearest, parse_value, read_yaml, shown
from finetune.help import HelpAction
from finetune.names import translate
from finetune.system.terminal import say

MAX_JSON_BYTES = 2**20


class Parser(argparse.ArgumentParser):
    """ArgumentParser whose errors are PlanErrors naming the nearest flag.
    Dashes and underscores are equivalent in flags.
    """

    def __init__(self, **kwargs: Any):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]  # overloads of the stubs
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
            advice = "See --help."
            if rows:
                advice = f"Use --dataset {flag}."
            raise PlanError(f"{shown(flag)}: not a flag, and this command takes no positional arguments. {advice}")
        if flag not in self._option_string_actions:
            raise PlanError(f"{shown(flag)}: unknown flag.{nearest(flag, self._option_string_actions)} See --help.")

    def _print_message(self, message: str, file: Any = None) -> None:
        stream = file or sys.stderr
        if stream is None:
            return
        try:
            say(message.removesuffix("\n"), file=stream, in_words=True)
        except OutputClosedError as error:
            sys.exit(error.exit_code)

    def error(self, message: str) -> NoReturn:
        raise PlanError(message[0].upper() + message[1:] + ". See --help.")


class FlagParser(Parser):
    """The parser of the flags of TrainConfig: names and values of other programs are translated, a list of values is
    one value of a flag that takes several, and of a flag given twice the last one counts. `lines`: what to say of it.
    """

    def __init__(self, **kwargs: Any):
        super().__init__(add_help=False, usage="%(prog)s [--FLAG VALUE ...]", **kwargs)
        self.lines: list[str] = []
        self.add_argument(
            "-h", "--help", action=HelpAction, metavar="all|FLAG", help="print every flag, or more about one, and exit"
        )
        self.add_argument("--version", action="version", version=f"finetune {__version__}", help="print it and exit")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]  # overloads of the stubs
        self.lines.clear()
        args = [_underscored(a) for a in (sys.argv[1:] if args is None else args)]
        helps = [at for at, word in enumerate(args) if word.partition("=")[0] in ("-h", "--help")]
        if helps:
            asked = "=".join(args[helps[0] :][:2]).partition("=")[2]
            return super().parse_args([f"--help={asked}"], namespace)
        return super().parse_args(self._ours(args), namespace)

    def _ours(self, args: list[str]) -> list[str]:
        """The words of a command line with our names and values only."""
        words = []
        foreign = {}
        at = 0
        named = {arg.partition("=")[0] for arg in args}
        while at < len(args):
            flag, equals, value = args[at].partition("=")
            end = at + 1
            while not equals and flag.startswith("--") and end < len(args) and not args[end].startswith("--"):
                end += 1
            if equals:
                values = [value]
            else:
                values = args[at + 1 : end]
            at = end
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
        if values:
            return [f"{flag}={values[0]}", *values[1:]]
        return [flag]

    def _foreign(self, flag: str, values: list[str]) -> tuple[str | None, object]:
        """(the name of another program, its value), or (None, "") if nobody has it. --no_x is x false."""
        name = ""
        if flag.startswith("--"):
            name = flag[2:]
        if flag in self._option_string_actions or not name:
            return None, ""
        if translate.known(name) is None:
            negated = name.removeprefix("no_")
            if negated != name and not values and translate.known(negated):
                return (negated, "false")
            return (None, "")
        return name, (values if len(values) > 1 else values[0]) if values else "true"

    def _translated(self, foreign: dict, words: list[str]) -> list[str]:
        """Our words for names of other programs, to stand before those of the command line."""
        given = {NAMES[word[2:].partition("=")[0]] for word in words if word[2:].partition("=")[0] in NAMES}
        settled, found = translate.joined(foreign, rewarded="reward" in given)
        for name, value in foreign.items():
            if name not in settled:
                where = f"--{name}" + (f" {translate.words_of(value)}" if value != "true" else "")
                found.append(translate.translated(translate.entry_named(name), value, where))
                for flag, raw in found[-1].given.items():
                    parse_value(NAMES[flag], raw, f"--{name}")
        self.lines += [t.line for t in found if t.line]
        said = {name: value for name, value in translate.merged(found).items()}
        weak = {NAMES[n] for t in found for n in t.otherwise} - {NAMES[n] for t in found for n in t.given}
        return [f"--{n}={_word(v)}" for n, v in said.items() if not (n in weak and n in given)]


def _word(value: object) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)


def check_ranges(args: Namespace, ranges: dict[str, tuple]) -> None:
    """Raises PlanError for a number outside of its range: {name: (smallest, largest)}."""
    for name, (low, high) in ranges.items():
        value = getattr(args, name)
        if not isinstance(value, Real) or not low <= value <= high:
            raise PlanError(f"--{name} {value}: must be {low} to {high}.")


def check_amounts(args: Namespace) -> None:
    """Raises PlanError for a number of rows or tokens to score that is out of its range."""
    for name in ("context_length", "max_new_tokens", "batch_size"):
        value = getattr(args, name)
        if value is not None and (not isinstance(value, Integral) or value < 1):
            raise PlanError(f"--{name} {value}: must be a whole number >= 1.")
    if not isinstance(args.samples, Integral) or args.samples == 0 or args.samples < -1:
        raise PlanError(f"--samples {args.samples}: must be -1 for all rows, or at least 1.")


def _underscored(arg: str) -> str:
    if not arg.startswith("--") or arg == "--":
        return arg
    name, equals, value = arg.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def add_flags(parser: FlagParser) -> None:
    """Adds every field of TrainConfig to `parser`, grouped. Unset flags are absent from the parsed namespace."""
    for key, title in GROUPS.items():
        group = parser.add_argument_group(title)
        for name, field in FIELDS.items():
            meta = field.metadata
            if meta["group"] != key:
                continue
            options: dict[str, Any] = {}
            if accepts_booleans(field):
                options = dict(nargs="?", const="true")
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

    def __call__(self, parser: ArgumentParser, namespace: Namespace, value: Any, option_string: str | None = None):
        assert isinstance(parser, FlagParser), parser
        new = parse_value(self.dest, value, option_string)
        old = getattr(namespace, self.dest, None)
        if old is not None and FIELDS[self.dest].metadata["repeatable"]:
            setattr(namespace, self.dest, [*(old if isinstance(old, list) else [old]), new])
            return
        if old is not None and old != new:
            parser.lines.append(
                f"{option_string} {shown(value)}: the last one counts; --{self.dest} was {shown(old)} before"
            )
        setattr(namespace, self.dest, new)


def _metavar(name: str, field: Field) -> str:
    meta = field.metadata
    if meta["choices"]:
        return "{" + ",".join(c for c in meta["choices"] if c) + "}"
    return meta["metavar"] or {int: "N", float: "X", bool: "true|false"}.get(value_type(field), "TEXT")


def help_text(field: Field) -> str:
    default = field.metadata["unset"] or field.default
    if default is None:
        return field.metadata["help"].replace("%", "%%")
    if isinstance(default, bool):
        shown = str(default).lower()
    else:
        shown = str(default)
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
    program = None
    if file.suffix != ".json":
        program = translate.recognised(content)
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
    overrides: dict[str, Any] = {}
    foreign: dict[str, Any] = {}
    found: list[translate.Translation] = []
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
    settled, together = translate.joined(foreign, where=where, rewarded=bool(overrides.get("reward")))
    found += together
    for name, value in foreign.items():
        if name not in settled:
            found.append(
                translate.translated(translate.entry_named(name), value, f"{where(name)} {translate.words_of(value)}")
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


def parse_overrides(
    argv: list[str] | None, parser: FlagParser, say: Callable[[str], object] = lambda line: None
) -> dict:
    """{flag: value} of what the user set: the config file, overridden by the command line.

    `say`: what to do with each line about names of other programs, and about flags given twice.
    """
    given = vars(parser.parse_args(argv))
    for line in parser.lines:
        say(line)
    return with_config(given, say)


def with_config(given: dict, say: Callable[[str], object] = lambda line: None) -> dict:
    """`given` merged over the values in its --config file, if any."""
    if given.get("config"):
        return {**read_config(given["config"], say), **given}
    return given
