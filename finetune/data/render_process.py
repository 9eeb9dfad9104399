"""The child process that renders chat templates, other people's programs, within limits; chat_template.py starts it.

Its first message holds the templates and variables. Then come batches of requests, each with an answer of its own: a
message of all of them would not say which row is at fault. The environment is that of transformers'
apply_chat_template.
"""

import json
import os
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

from finetune.system.child import limit_memory, limit_time, serve

DAY = "FINETUNE_DAY"  # of the environment: the day that templates print in the place of this one
BURST_S = 2.0  # of processor time that one rendering may take beyond its grant
# added for each rendering: ten times what an honest template takes
GRANT_S = 0.02
GRANT_S_PER_BYTE = 2e-6
MAX_BYTES = 256 * 2**20  # of memory, and
BYTES_PER_BYTE = 16  # for each byte of a request
PYTHON_BYTES = 2**26  # of memory that Python itself takes
# characters of a rendering: a template's own, and for each byte of the request
MAX_TEXT = 2**16
TEXT_PER_BYTE = 16
REASONING = ("reasoning_content", "thinking", "reasoning")
PROBE = "c0ntent"


class Fault(Exception):
    """A fault of a template, whatever the row."""


def answers(messages: Iterator[list[bytes]]) -> Iterator[tuple[bytes]]:
    """The answer to each request of each message, as JSON; a fault is the last one."""
    given = json.loads(next(messages)[0])
    limit_memory(MAX_BYTES + PYTHON_BYTES)
    limit_time(BURST_S)
    try:
        templates = compiled(given["templates"])
        with_parts = {use for use, template in templates.items() if wants_parts(template, given["variables"])}
        for requests in messages:
            for request in requests:
                yield (json.dumps(rendered(templates, with_parts, given["variables"], request)).encode(),)
    except Fault as error:
        yield (json.dumps({"fault": str(error)}).encode(),)
    except MemoryError:
        yield (json.dumps({"fault": f"needs over {MAX_BYTES >> 20} MiB"}).encode(),)
    except RecursionError:
        yield (json.dumps({"fault": "recurses endlessly"}).encode(),)


def compiled(templates: dict) -> dict:
    """{use: jinja2 template}. Raises Fault."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}

        def parse(self, parser: Any):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Namespace(jinja2.utils.Namespace):
        def __init__(*args: Any, **values: Any):
            for name in (values := dict(*args[1:], **values)):
                Namespace.check(name)
            jinja2.utils.Namespace.__init__(args[0], values)

        def __setitem__(self, name: str, value: Any):
            Namespace.check(name)
            super().__setitem__(name, value)

        @staticmethod
        def check(name: str) -> None:
            if isinstance(name, str) and name.startswith("_"):
                raise jinja2.sandbox.SecurityError(f"namespace attribute {name!r}")

    day = os.environ.get(DAY)

    def raise_exception(message: str):
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: (datetime.fromisoformat(day) if day else datetime.now()).strftime(form),
        "namespace": Namespace,
    }
    try:
        return {use: environment.from_string(template) for use, template in templates.items()}
    except jinja2.TemplateSyntaxError as error:
        raise Fault(f"is not a valid template ({str(error)[:200]})") from None
    except rejections() as error:
        raise Fault(f"does not compile ({str(error)[:200]})") from None


def rejections() -> tuple[type[Exception], ...]:
    """The errors that a template raises for messages that it does not take."""
    import jinja2

    return jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError


def wants_parts(template: Any, variables: dict) -> bool:
    """True for a template that reads contents as lists of parts only, as those of vision-language models do."""

    def has_content(content: Any) -> bool:
        values = dict(messages=[{"role": "user", "content": content}], tools=None, add_generation_prompt=True)
        try:
            return PROBE in text_of(template.generate(**{**variables, **values}), len(PROBE))
        except rejections():
            return False

    return not has_content(PROBE) and has_content(parts_of(PROBE))


def parts_of(text: str) -> list[dict]:
    return [{"type": "text", "text": text}]


def rendered(templates: dict, with_parts: set, variables: dict, line: bytes) -> dict:
    """The answer to one request: its texts, or why the template rejects it. Raises Fault."""
    import jinja2.sandbox

    limit_memory(MAX_BYTES + PYTHON_BYTES + BYTES_PER_BYTE * len(line))
    request = json.loads(line)
    limit_time(len(request["upto"]) * (GRANT_S + GRANT_S_PER_BYTE * len(line)), kept_s=BURST_S)
    messages = [with_reasoning(m) for m in request["messages"]]
    tools = request["tools"]
    use = "tools" if tools and "tools" in templates else "default"
    template = templates[use]
    texts = []
    if use in with_parts:
        messages = [{**message, "content": parts_of(message["content"])} for message in messages]
    try:
        for number, prompt in request["upto"]:
            values = dict(messages=messages[:number], tools=tools, documents=None, add_generation_prompt=prompt)
            texts.append(text_of(template.generate(**{**variables, **request["variables"], **values}), len(line)))
    except jinja2.sandbox.SecurityError as error:
        raise Fault(f"accesses attributes outside the sandbox ({str(error)[:200]})") from None
    except rejections() as error:
        return {"rejects": " ".join(str(error).split())[:200] or type(error).__name__}
    return {"texts": texts}


def text_of(pieces: Iterable[str], num_bytes: int) -> str:
    """The pieces joined. Raises Fault once they are out of all proportion to the request."""
    limit = MAX_TEXT + TEXT_PER_BYTE * num_bytes
    size = 0
    out = []
    for piece in pieces:
        size += len(piece)
        if size > limit:
            raise Fault(f"renders a row of {num_bytes} bytes to over {limit} characters")
        out.append(piece)
    return "".join(out)


def with_reasoning(message: dict) -> dict:
    """A message with its reasoning under the names that templates read, whatever the row calls it."""
    message = {key: value for key, value in message.items() if value is not None}
    text = next((message[name] for name in REASONING if name in message), None)
    if text is None:
        return message
    return {"thinking": text, **message, "reasoning_content": text}


if __name__ == "__main__":
    serve(answers)
