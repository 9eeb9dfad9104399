"""The one place that writes to the terminal, where file names, data, templates and other hosts' answers end up.

Control characters are shown as escapes, secrets are masked, and what the stream cannot encode is replaced.
"""

import contextlib
import errno
import os
import re
import stat
import sys
import urllib.parse
from collections.abc import Callable, Iterator
from typing import TextIO

from finetune.errors import NO_SPACE, OutputClosedError

# All of C0, C1 and DEL but tab and newline, the marks that reorder text, and halves of characters (undecodable names).
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
USERINFO = re.compile(r"(?<=://)[^\s/?#]*@")
SECRET_NAME = re.compile(r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|KEY)$", re.IGNORECASE)
# Tokens of the Hub and of other services, as these begin them.
TOKEN = re.compile(r"\b(?:(?:hf|ghp|gho|ghs)_[A-Za-z0-9]{16,}|(?:glpat-|github_pat_|sk-)[A-Za-z0-9_-]{16,})")
MIN_SECRET = 8  # a shorter value, such as a 1, would be masked wherever it occurs
MASK = "***"
WIDTH = 80  # of a terminal that does not say its own
MAX_LINE = 2000  # of an error, whatever was put into it
STYLE = re.compile(r"\x1b\[[\d;]*m")
# Commands are for copying: a break inside them would be copied too.
COMMAND = re.compile(r"\b(python|torchrun|pip|ollama|mpirun|srun) \S")
ASCII_MARKS = str.maketrans({"⟦": "[[", "⟧": "]]", "━": "=", "─": "-"})
_when_closed: list[Callable[[], object]] = []  # what to do where nobody reads the output any more


@contextlib.contextmanager
def outliving_its_reader(closed: Callable[[], object]) -> Iterator[None]:
    """A context in which output that nobody reads any more ends nothing at once: `closed()` is called instead. Output
    for which there is no room is left out.
    """
    _when_closed.append(closed)
    try:
        yield
    finally:
        _when_closed.remove(closed)


def say(
    text: object = "", end: str = "\n", file: TextIO | None = None, styled: bool = False, in_words: bool = False
) -> None:
    """Prints `text`, cleaned. `styled`: the caller has cleaned it, and its own escape sequences are kept.
    `in_words`: lines wider than the terminal end between words; commands are left to the terminal. A stream that the
    caller has closed, and a terminal that is gone, get nothing. Raises OutputClosedError where nobody reads it.
    """
    if file is None:
        stream = sys.stdout
    else:
        stream = file
    if is_closed(stream):
        return
    text = encodable(str(text) if styled else clean(str(text)), getattr(stream, "encoding", None))
    columns = columns_of(stream)
    if in_words and columns is not None:
        text = wrapped(text, columns)
    try:
        with above_bars(stream):
            print(text, end=end, file=stream, flush=True)
    except BrokenPipeError as error:
        if not _when_closed:
            raise OutputClosedError(*error.args) from None
        _when_closed[-1]()
    except OSError as error:
        is_gone = error.errno == errno.EIO and _is_device(stream)
        if not is_gone and not (_when_closed and error.errno in NO_SPACE):  # a run goes on without its log
            raise


def is_closed(stream: TextIO) -> bool:
    return bool(getattr(stream, "closed", False))  # a stream of the caller's, which can only write


def _is_device(stream: TextIO) -> bool:
    """True for the output of a terminal, also once it is gone."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return stat.S_ISCHR(os.fstat(stream.fileno()).st_mode)
    return False


def wrapped(text: str, columns: int) -> str:
    """`text` whose lines are at most so many columns wide, where no word is wider; what follows is indented."""
    lines = []
    for line in text.split("\n"):
        before = " " * (len(line) - len(line.lstrip(" ")))
        words = line.lstrip(" ").split(" ")
        words[0] = before + words[0]
        while words and not COMMAND.search(line):
            taken = next((i for i in range(1, len(words)) if _width(words[: i + 1]) > columns), len(words))
            if taken == len(words):
                break
            lines.append(" ".join(words[:taken]))
            words = [f"{before}  {words[taken]}", *words[taken + 1 :]]
        lines.append(" ".join(words))
    return "\n".join(lines)


def _width(words: list[str]) -> int:
    return len(STYLE.sub("", " ".join(words)))


def above_bars(stream: TextIO) -> contextlib.AbstractContextManager:
    """A context in which tqdm's bars, if any are drawn, are taken off the terminal and then drawn again below."""
    tqdm = None
    if is_terminal(stream):
        tqdm = sys.modules.get("tqdm")
    bars = getattr(tqdm, "tqdm", None)  # which another thread may just be importing
    if bars:
        return bars.external_write_mode(file=stream)
    return contextlib.nullcontext()


def columns_of(stream: TextIO) -> int | None:
    """Width of the terminal behind `stream`, or COLUMNS; None for files and pipes."""
    if not is_terminal(stream):
        return None
    asked = os.environ.get("COLUMNS", "")
    if asked.isdecimal() and int(asked):
        return int(asked)
    columns = 0
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a stream of the caller's, without a file
        columns = os.get_terminal_size(stream.fileno()).columns
    return columns or WIDTH


def reopened() -> list[str]:
    """Names of the process's output streams that code of a user closed; they are open again."""
    found = []
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(getattr(sys, name), "closed", False):
            setattr(sys, name, open(number, "w", closefd=False))  # open for the life of the process
            found.append(name)
    return found


def is_terminal(stream: TextIO) -> bool:
    """True if a line on `stream` can be redrawn."""
    if is_closed(stream):
        return False
    return bool(getattr(stream, "isatty", lambda: False)()) and os.environ.get("TERM") != "dumb"


def log_error(text: object) -> None:
    """Prints the one-line message of a failure to stderr; a terminal shows it in as many rows as it needs. A line that
    cannot be written, as to a disk that is full, is none: the exit code says what it is of.
    """
    line = clean(" ".join(str(text).split("\n")))
    if not line.startswith("error"):
        line = f"error: {line}"
    if len(line) > MAX_LINE:
        line = f"{line[: MAX_LINE - 320]} ... {line[-300:]}"
    with contextlib.suppress(OSError):
        say(line, file=sys.stderr, styled=True, in_words=True)


def clean(text: str) -> str:
    """`text` without secrets, its control characters as visible escapes."""
    text = TOKEN.sub(MASK, USERINFO.sub(f"{MASK}@", text))
    for secret in secrets():
        text = text.replace(secret, MASK)
    return CONTROL.sub(_escape, text)


def secrets() -> set[str]:
    """Values of environment variables that are never shown: tokens, keys, and passwords inside URLs."""
    found = set()
    for name, value in os.environ.items():
        if SECRET_NAME.search(name):
            found.add(value)
        elif "@" in value and "://" in value:
            password = value.partition("://")[2].rpartition("@")[0].partition(":")[2]
            found |= {password, urllib.parse.unquote(password)}
    return {secret for secret in found if len(secret) >= MIN_SECRET}


def encodable(text: str, encoding: str | None) -> str:
    """`text` in characters that `encoding` has: marks in ASCII, anything else as an escape."""
    if encoding is None:
        return text
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(ASCII_MARKS).encode(encoding, "backslashreplace").decode(encoding)
    return text


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 256:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}"
