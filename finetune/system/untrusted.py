"""Other people's files in the hands of libraries that raise whatever they happen to meet."""

import os
import re
from traceback import walk_tb
from types import TracebackType

from finetune.errors import EXPECTED, PlanError, is_out_of_memory

PASS = (*EXPECTED, KeyboardInterrupt, SystemExit, GeneratorExit)


class untrusted:  # noqa: N801  used as a statement, like contextlib.suppress
    """A context in which any failure is a PlanError: `fact (what the failure says). remedy`.

    transformers validates configs by classes of its own and fails on what they let through with any built-in error;
    tokenizers raises plain Exception, and PanicException, which is none. A list of types would never be complete.
    `passing`: errors that are handled around it. `reads`: the fact is about a file's content, of which nothing is known
    if it may not be opened.
    """

    def __init__(self, fact: str, remedy: str, passing: tuple[type[BaseException], ...] = (), reads: bool = True):
        self.fact = fact
        self.remedy = remedy
        self.passing = passing
        self.reads = reads

    def __enter__(self):
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, PASS + self.passing) or is_out_of_memory(error):
            return
        if self.reads and isinstance(error, PermissionError) and error.filename:
            flag = ""
            if self.fact.startswith("--"):
                flag = self.fact.partition(": ")[0] + ": "
            raise PlanError(f"{flag}{error.filename}: permission denied. Change its permissions.") from error
        raise PlanError(f"{self.fact} ({_summary(error)}). {self.remedy}") from error


def _summary(error: BaseException) -> str:
    """An error in one line; its type too where the text alone says nothing, as of a KeyError."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    text = " ".join(line for line in lines if line)[:200].rstrip(".")
    if not text or isinstance(error, LookupError | ArithmeticError | AssertionError):
        if text:
            text = f"{type(error).__name__}: {text}"
        else:
            text = type(error).__name__
    return text


class tokenizer_failures:  # noqa: N801  used as a statement
    """A context in which what a tokenizer raises of a text, in the middle of anything, is a PlanError: a plain
    Exception, or Rust's PanicException, which is none and would leave a caller from Python.
    """

    def __enter__(self):
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or not (kind is Exception or type(error).__module__ == "pyo3_runtime"):
            return
        frames = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
        if frames[-1].startswith(("transformers.tokenization", "finetune.model_files.plain_tokenizer")):
            raise PlanError(f"the model's tokenizer fails on a text ({_summary(error)}). Use a tokenizer you trust.")


class rust_errors:  # noqa: N801  used as a statement
    """Context that turns the plain Exception of tokenizers for a failed write back into the OSError it was."""

    def __enter__(self):
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        number = None
        if kind is Exception:
            number = re.search(r"\(os error (\d+)\)", str(error))
        if number:
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
