"""The installed command: `finetune train`, `finetune generate`, ... run the scripts of the repository by their names.

Each word is a top-level module, which stays runnable as a file. `python -m finetune` is the same command.
"""

import os
import runpy
import sys
from dataclasses import dataclass

from finetune import __version__
from finetune.completion import SHELLS, script
from finetune.errors import PlanError
from finetune.system import process
from finetune.system.program import COMMAND
from finetune.system.terminal import say


@dataclass(frozen=True)
class Command:
    """A word of the command line: the module it runs, what it does, and the flags that it puts first."""

    module: str
    what: str
    flags: tuple[str, ...] = ()


COMMANDS = {
    "train": Command("train", "fine-tune a model on your rows"),
    "generate": Command("generate", "ask a trained model"),
    "score": Command("score", "loss and exact match on rows"),
    "export": Command("export", "merge or convert for other programs"),
    "report": Command("report", "one page with the curves of a run, or of several"),
    "expand": Command("expand", "add layers to a model (LLaMA-Pro)"),
    "pretrain": Command("pretrain", "train a tiny recursive model from scratch"),
    "build-chat-dataset": Command("dataset.build_chat_dataset", "conversations for pretrain"),
    "build-puzzle-dataset": Command("dataset.build_puzzle_dataset", "puzzles for pretrain"),
    "doctor": Command("train", "what this machine can do", ("--doctor",)),
}


def usage() -> str:
    """Text of `finetune` and `finetune --help`."""
    lines = ["Fine-tunes any Hugging Face causal language model on your own rows.", ""]
    lines += [f"  finetune {word:<22}{command.what}" for word, command in COMMANDS.items()]
    lines += [f"  finetune {'completion SHELL':<22}print a completion script: {', '.join(SHELLS)}", ""]
    return "\n".join(
        [*lines, "finetune train --help shows the flags that are used every day. --version prints the version."]
    )


def main() -> None:
    """Runs the word after `finetune` and exits with its code."""
    word, rest = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("--help", [])
    if word in COMMANDS:
        command = COMMANDS[word]
        os.environ[COMMAND] = "finetune"
        sys.argv[1:] = [*command.flags, *rest]
        runpy.run_module(command.module, run_name="__main__", alter_sys=True)
        return
    process.exit_with(lambda: answered(word, rest))


def answered(word: str, rest: list[str]) -> int:
    """Everything that is not a script. Raises PlanError for an unknown word."""
    if word in ("-h", "--help", "help"):
        say(usage())
    elif word in ("--version", "version"):
        say(f"finetune {__version__}")
    elif word == "completion":
        say(script(rest[0] if rest else "", COMMANDS))
    else:
        import difflib

        near = difflib.get_close_matches(word, COMMANDS, n=1, cutoff=0.7)
        nearest = ""
        if near:
            nearest = f" Nearest: {near[0]}."
        raise PlanError(f"finetune {word}: no such command.{nearest} There are {', '.join(COMMANDS)}.")
    return 0
