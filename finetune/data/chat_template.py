"""Chat templates: the default one, and rendering by a tokenizer's own, which is a program, in a limited process."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from types import TracebackType

from finetune.data.answer_marks import AnswerMarks, answer_marks, special_texts
from finetune.data.built_in_templates import BUILT_IN
from finetune.data.render_process import BURST_S, DAY
from finetune.errors import PlanError, first_line
from finetune.model_files.tokenizer import FullTokenizer, Tokenizer, end_ids
from finetune.system.child import Child, ChildEnded

MAX_TEMPLATE_CHARS = 2**20
BATCH_BYTES = 2**20


def ensure_chat_template(tokenizer: Tokenizer, is_needed: Callable[[], bool] = lambda: True) -> str | None:
    """Sets ChatML on a tokenizer without a chat template, if rows need one; returns the notice to print, else None."""
    if tokenizer.chat_template or not is_needed():
        return None
    tokenizer.chat_template = BUILT_IN["chatml"]
    end = tokenizer.eos_token or "<|im_end|>"
    return f"chat template: the tokenizer has none, so ChatML (answers end with {end}); it is saved with the tokenizer"


def named_template(value: str) -> str:
    """The chat template of --chat_template: a built-in one by its name, or a file's. Raises PlanError."""
    if value in BUILT_IN:
        return BUILT_IN[value]
    said = f"--chat_template {value}"
    file = Path(value).expanduser()
    if not file.is_file():
        raise PlanError(
            f"{said}: is neither a file nor a built-in template. Use {', '.join(BUILT_IN)}, or a Jinja file."
        )
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{said}: cannot be read ({first_line(error)}). Give a Jinja file.") from None
    if not text.strip() or len(text) > MAX_TEMPLATE_CHARS:
        raise PlanError(f"{said}: has {len(text)} characters, must have 1 to {MAX_TEMPLATE_CHARS}. Give a Jinja file.")
    return text


def today() -> str:
    """The day that a template which prints the date prints, as 2026-01-31: the run's, or this one."""
    return os.environ.get(DAY) or str(date.today())


def day_of(saved: dict) -> str:
    """The day of a saved run, by its settled plan; this one for a run that has none."""
    try:
        return str(date.fromisoformat(saved["day"]))
    except (KeyError, TypeError, ValueError):
        return today()


@contextlib.contextmanager
def on_day(day: str):
    """A context in which templates print this day, in the processes that are started too: the rows of a run stay the
    same when it is resumed on another day.
    """
    before = os.environ.get(DAY)
    os.environ[DAY] = day
    try:
        yield
    finally:
        os.environ.pop(DAY, None)  # code of the user may have emptied it
        os.environ |= {DAY: before} if before else {}


def stop_ids(tokenizer: FullTokenizer, folder: Path | None = None, marks: AnswerMarks | None = None) -> set[int]:
    """The tokens that end an answer: EOS, those of the model's generation_config.json, and the chat template's.

    `marks`: the template's, if they are known.
    """
    texts = (marks or marks_of(tokenizer)).stops()
    return end_ids(tokenizer, folder) | {tokenizer.convert_tokens_to_ids(text) for text in texts}


# ------ rendering


@dataclass(frozen=True)
class Rendering:
    """The texts of a request. `unread`: (message, field) of what its messages have and the template has not read,
    (None, number) of such tools, and (number, None) of tools of which it has not read the parameters.
    """

    texts: list[str]
    unread: list[tuple]


class TemplateRenderer:
    """Renders conversations by a tokenizer's chat template. A context: the child process ends with it.

    The child starts with the first rendering and serves all that follow. What a template does beyond the limits of
    finetune/data/render_process.py is a PlanError.
    """

    def __init__(self, tokenizer: Tokenizer, said: str | None = None):
        self.said = said or f"chat template of {tokenizer.name_or_path or 'the tokenizer'}"
        self.start = {"templates": templates_of(tokenizer, self.said), "variables": text_variables(tokenizer)}
        self.specials = special_texts(tokenizer)
        self.child: Child | None = None

    def __enter__(self):
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @cached_property
    def marks(self) -> AnswerMarks:
        """The marks of the template around an answer."""
        return answer_marks(self, self.specials)

    def render_each(self, chats: list[tuple], variables: dict | None = None) -> list[list[str] | PlanError]:
        """The texts of chats that no row has: (messages, tools, upto) each, see `request_of`."""
        source = "a plain chat"
        requests = [request_of(messages, tools, upto, source, variables) for messages, tools, upto in chats]
        found = self.render(requests, [source] * len(chats))
        return [rendering.texts if isinstance(rendering, Rendering) else rendering for rendering in found]

    def render(self, requests: list[bytes], sources: list[str]) -> list[Rendering | PlanError]:
        """The rendering of each request (see `request_of`), or the error of a row that the template rejects."""
        found = []
        start = 0
        while start < len(requests):
            end = start
            size = 0
            while end < len(requests) and (end == start or size + len(requests[end]) <= BATCH_BYTES):
                size += len(requests[end])
                end += 1
            found += self._exchange(requests[start:end], sources[start:end])
            start = end
        return found

    def _exchange(self, requests: list[bytes], sources: list[str]) -> list[Rendering | PlanError]:
        if self.child is None:
            module = "finetune.data.render_process"
            self.child = Child(module, json.dumps(self.start).encode(), stderr=subprocess.DEVNULL)
        self.child.send(*requests)
        found: list[Rendering | PlanError] = []
        for source in sources:
            try:
                content = json.loads(self.child.receive()[0])
            except ChildEnded as ended:
                content = {"fault": end_of_renderer(ended)}
            if "fault" in content:
                self.close()
                raise PlanError(f"{self.said}: {content['fault']}, at {source}. Use a template you trust.")
            if "rejects" in content:
                fact = content["rejects"]
                found.append(PlanError(f"{source}: the chat template rejects this row ({fact}). Change the row."))
            else:
                found.append(Rendering(content["texts"], content["unread"]))
        return found

    def close(self) -> None:
        if self.child is not None:
            self.child.close()
            self.child = None


def end_of_renderer(ended: ChildEnded) -> str:
    """The message for a template whose process ended."""
    if ended.status == -signal.SIGPROF:
        return f"does not render within {BURST_S:g} s of processor time"
    return f"ends the process that renders it ({ended})"


def marks_of(tokenizer: Tokenizer) -> AnswerMarks:
    """The marks of the tokenizer's chat template around an answer; empty ones without a template."""
    with shared_renderer(tokenizer) as renderer:
        if renderer:
            return renderer.marks
        return AnswerMarks()


def shared_renderer(tokenizer: Tokenizer) -> contextlib.AbstractContextManager["TemplateRenderer | None"]:
    """A context: the renderer of a tokenizer with a chat template, None of another."""
    if tokenizer.chat_template:
        return TemplateRenderer(tokenizer)
    return contextlib.nullcontext()


def request_of(
    messages: list[dict],
    tools: list[dict] | None,
    upto: list[tuple[int, bool]],
    source: str,
    variables: dict | None = None,
    marks: bool = True,
) -> bytes:
    """A request to render the first messages, once for each (number of messages, add_generation_prompt) in `upto`.

    `variables`: the template's own switches, such as enable_thinking, and their values. `marks`: the marks in messages
    are images; False: they are characters like others. What JSON has no word for, such
    as a date of a Parquet file, becomes the name of its type, as in transformers.
    """
    content: dict = {"messages": messages, "tools": tools or None, "upto": upto, "variables": variables or {}}
    if marks:
        content["marks"] = True
    try:
        return json.dumps(content, default=lambda value: f"<{type(value).__name__}>").encode()
    except (ValueError, RecursionError) as error:
        if isinstance(error, RecursionError):
            fact = "nested too deeply"
        else:
            fact = str(error)[:200]
        raise PlanError(f"{source}: cannot be rendered ({fact}). Change the row.") from None


def templates_of(tokenizer: Tokenizer, said: str) -> dict[str, str]:
    """{"default": template, "tools": that for rows with tools, if the tokenizer has one}. Raises PlanError."""
    given = tokenizer.chat_template
    if isinstance(given, dict):
        named = given
    else:
        named = {"default": given}
    uses = {"default": "default", "tools": "tool_use"}
    found = {use: named[name] for use, name in uses.items() if named.get(name) is not None}
    if "default" not in found:
        names = ", ".join(map(str, named))[:80]
        raise PlanError(f"{said}: none of its templates ({names}) is the default. Use a tokenizer with one template.")
    for template in found.values():
        if not isinstance(template, str) or len(template) > MAX_TEMPLATE_CHARS:
            if isinstance(template, str):
                kind = f"{len(template)} characters"
            else:
                kind = type(template).__name__
            raise PlanError(f"{said}: is {kind}, must be at most {MAX_TEMPLATE_CHARS} characters of text.")
    return found


def text_variables(tokenizer: Tokenizer) -> dict:
    """Names and texts of the special tokens, as templates read them."""
    named = tokenizer.special_tokens_map
    return {name: list(map(str, v)) if isinstance(v, list | tuple) else str(v) for name, v in named.items()}
