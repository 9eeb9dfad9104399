"""Completion scripts for shells, by shtab: static text, so that no Python starts at a press of the tab key."""

import argparse
import importlib
from typing import Any

from finetune.errors import PlanError

SHELLS = ("bash", "zsh", "tcsh")


def script(shell: str, commands: dict) -> str:
    """The completion script of a shell for {word: command}. Raises PlanError for another shell, and without shtab."""
    if shell not in SHELLS:
        raise PlanError(f"finetune completion {shell}: not one of {', '.join(SHELLS)}. Use one of them.")
    try:
        import shtab
    except ImportError:
        raise PlanError(f"finetune completion {shell}: shtab is not installed. pip install shtab.") from None
    return shtab.complete(parser_of_all(commands), shell)


def parser_of_all(commands: dict) -> argparse.ArgumentParser:
    """One parser that has each command's flags below its word; it is described, never used to parse."""
    whole = argparse.ArgumentParser(prog="finetune", description="fine-tunes language models")
    words = whole.add_subparsers(dest="command")
    for word, command in commands.items():
        build = getattr(importlib.import_module(command.module), "build_parser", None)
        parser = words.add_parser(word, help=command.what, add_help=False)
        for action in build()._actions if build else ():
            parser._add_action(plain(action))
    words.add_parser("completion", help="print a completion script").add_argument("shell", choices=SHELLS)
    return whole


def plain(action: argparse.Action) -> argparse.Action:
    """A flag as a completion knows it: its names, whether a value follows, and which values there are."""
    if action.nargs == 0:
        kind: type[argparse.Action] = argparse._StoreTrueAction
        options: dict[str, Any] = {}
    else:
        kind = argparse._StoreAction
        options = {"nargs": action.nargs, "choices": choices_of(action)}
    return kind(action.option_strings, action.dest, help=(action.help or "").replace("%", "%%"), **options)


def choices_of(action: argparse.Action) -> list | None:
    """The values of a flag: its choices, or those that its metavar lists."""
    if action.choices:
        return list(action.choices)
    listed = ""
    if isinstance(action.metavar, str):
        listed = action.metavar
    if listed.startswith("{"):
        return listed[1:-1].split(",")
    if listed == "true|false":
        return ["true", "false"]
    return None
