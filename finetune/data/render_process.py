"""The child process that renders chat templates, other people's programs, within limits; chat_template.py starts it.

Its first line of input holds the templates and variables. Then come batches: a line with a number, and that many lines
with a request each; one line answers each. The kernel ends the process when its processor time is used up: a template
may be inside one operation that no exception interrupts. The environment is that of transformers' apply_chat_template.
"""

import contextlib
import json
import os
import signal
import sys
from datetime import datetime

BURST_S = 2.0  # of processor time that one rendering may take beyond its grant
GRANT_S, GRANT_S_PER_BYTE = 0.02, 2e-6  # added for each rendering: ten times what an honest template takes
MAX_BYTES = 256 * 2**20  # of memory, and
BYTES_PER_BYTE = 16  # for each byte of a request
MAX_TEXT, TEXT_PER_BYTE = 2**16, 16  # characters of a rendering: a template's own, and for each byte of the request
REASONING = ("reasoning_content", "thinking", "reasoning")


class Fault(Exception):
    """What is wrong with a template whatever the row."""


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent's, which stops when it has saved
        signal.signal(number, signal.SIG_IGN)
    requests = sys.stdin.buffer
    given = json.loads(requests.readline())
    limit_memory(0)
    signal.setitimer(signal.ITIMER_PROF, BURST_S)
    try:
        templates = compiled(given["templates"])
        while line := requests.readline():
            for request in [requests.readline() for _ in range(int(line))]:
                answer(rendered(templates, given["variables"], request))
    except Fault as error:
        answer({"fault": str(error)})
    except MemoryError:
        answer({"fault": f"needs over {MAX_BYTES >> 20} MiB"})
    except RecursionError:
        answer({"fault": "recurses endlessly"})


def answer(content: dict) -> None:
    left = memoryview(json.dumps(content).encode() + b"\n")
    while left:
        left = left[os.write(1, left) :]


def limit_memory(num_bytes: int) -> None:
    """Limits the address space to MAX_BYTES more than Python's own 64 MiB, and a multiple of the request's bytes."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # macOS rejects the limit; that of time still applies
        import resource

        limit = MAX_BYTES + 2**26 + BYTES_PER_BYTE * num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def compiled(templates: dict) -> dict:
    """{use: jinja2 template}. Raises Fault."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Namespace(jinja2.utils.Namespace):
        def __init__(*args, **values):
            for name in (values := dict(*args[1:], **values)):
                Namespace.check(name)
            jinja2.utils.Namespace.__init__(args[0], values)

        def __setitem__(self, name, value):
            Namespace.check(name)
            super().__setitem__(name, value)

        @staticmethod
        def check(name) -> None:
            if isinstance(name, str) and name.startswith("_"):
                raise jinja2.sandbox.SecurityError(f"namespace attribute {name!r}")

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        options = dict(indent=indent, separators=separators, sort_keys=sort_keys)
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": Namespace,
    }
    try:
        return {use: environment.from_string(template) for use, template in templates.items()}
    except jinja2.TemplateSyntaxError as error:
        raise Fault(f"is not a valid template ({str(error)[:200]})") from None
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise Fault(f"does not compile ({str(error)[:200]})") from None


def rendered(templates: dict, variables: dict, line: bytes) -> dict:
    """The answer to one request: its texts, or why the template rejects it. Raises Fault."""
    import jinja2
    import jinja2.sandbox

    limit_memory(len(line))
    request = json.loads(line)
    left = signal.getitimer(signal.ITIMER_PROF)[0]
    grant = len(request["upto"]) * (GRANT_S + GRANT_S_PER_BYTE * len(line))
    signal.setitimer(signal.ITIMER_PROF, min(left, BURST_S) + grant)
    messages, tools = [with_reasoning(m) for m in request["messages"]], request["tools"]
    template = templates["tools" if tools and "tools" in templates else "default"]
    texts = []
    try:
        for number, prompt in request["upto"]:
            values = dict(messages=messages[:number], tools=tools, documents=None, add_generation_prompt=prompt)
            texts.append(text_of(template.generate(**{**variables, **values}), len(line)))
    except jinja2.sandbox.SecurityError as error:
        raise Fault(f"accesses attributes outside the sandbox ({str(error)[:200]})") from None
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        return {"rejects": " ".join(str(error).split())[:200] or type(error).__name__}
    return {"texts": texts}


def text_of(pieces, num_bytes: int) -> str:
    """The pieces joined. Raises Fault once they are out of all proportion to the request."""
    limit, size, out = MAX_TEXT + TEXT_PER_BYTE * num_bytes, 0, []
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
    return message if text is None else {"thinking": text, **message, "reasoning_content": text}


if __name__ == "__main__":
    main()
