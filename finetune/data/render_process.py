"""The child process that renders chat templates, other people's programs, within limits; chat_template.py starts it.

Its first message holds the templates and variables. Then come batches of requests, each with an answer of its own: a
message of all of them would not say which row is at fault. The environment is that of transformers'
apply_chat_template.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

from finetune.data.images.marks import IMAGE_MARK
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
USUAL = {"role", "content", "tool_calls", *REASONING}  # fields of messages of which the texts are compared
PROBE = "c0ntent"
USER = "user"
SYSTEM = "system"
OTHER_ROLES = (SYSTEM, "assistant", "tool")
IMAGE_PART = {"type": "image"}
LIST_SIGNS = ("{'type'", '{"type"', "'type':", '"type":')  # of a list that is written, not read


class Fault(Exception):
    """A fault of a template, whatever the row."""


def answers(messages: Iterator[list[bytes]]) -> Iterator[tuple[bytes]]:
    """The answer to each request of each message, as JSON; a fault is the last one."""
    given = json.loads(next(messages)[0])
    limit_memory(MAX_BYTES + PYTHON_BYTES)
    limit_time(BURST_S)
    try:
        templates = compiled(given["templates"])
        with_parts = {use: roles_with_parts(template, given["variables"]) for use, template in templates.items()}
        with_images: dict[str, str] = {}
        for requests in messages:
            for request in requests:
                texts = rendered(templates, with_parts, given["variables"], request, with_images=with_images)
                yield (json.dumps(texts).encode(),)
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
        if isinstance(value, ObservedTools):  # of which json.dumps would not see that they are read
            value = list(value)
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


def roles_with_parts(template: Any, variables: dict) -> set[str]:
    """The roles whose contents a template reads as lists of parts only, as those of vision-language models do. A role
    that it takes in neither form is as the user's.
    """
    found = {USER} if wants_parts(template, variables) else set()
    asked = {"role": USER, "content": parts_of("question") if found else "question"}
    for role in OTHER_ROLES:
        as_text = probed(template, variables, PROBE, role, asked)
        as_parts = probed(template, variables, parts_of(PROBE), role, asked)
        if PROBE not in as_text and (PROBE in as_parts and not writes_list(as_parts) or found):
            found.add(role)
    return found


def wants_parts(template: Any, variables: dict) -> bool:
    """True for a template that reads a user's contents as lists of parts only."""
    return PROBE not in probed(template, variables, PROBE) and PROBE in probed(template, variables, parts_of(PROBE))


def writes_list(text: str) -> bool:
    return any(sign in text for sign in LIST_SIGNS)


def probed(template: Any, variables: dict, content: Any, role: str = USER, asked: dict | None = None) -> str:
    """The text of a message with this content, beside what is asked; empty if the template rejects it."""
    messages = [{"role": role, "content": content}]
    if asked:
        messages.insert(1 if role == SYSTEM else 0, asked)
    values = dict(messages=messages, tools=None, add_generation_prompt=messages[-1]["role"] == USER)
    try:
        return text_of(template.generate(**{**variables, **values}), len(PROBE))
    except rejections():
        return ""


def parts_of(text: str) -> list[dict]:
    return [{"type": "text", "text": text}]


# How a template writes a content with images.
AS_TEXT = "text"
AS_PARTS = "parts"
AS_PARTS_OF_TEXT = "parts of text"


def image_form(template: Any, variables: dict, wants: bool) -> str:
    """AS_PARTS for a template that renders parts and has something for an image among them, more than white space; of
    another AS_TEXT, or AS_PARTS_OF_TEXT if it reads nothing but parts. A text of Python's or JSON's braces shows a
    list, not its parts.
    """
    plain = probed(template, variables, parts_of(PROBE))
    pictured = probed(template, variables, [IMAGE_PART, *parts_of(PROBE)])
    has_more = "".join(pictured.split()) != "".join(plain.split())
    if PROBE in pictured and has_more and not writes_list(pictured):
        return AS_PARTS
    return AS_PARTS_OF_TEXT if wants else AS_TEXT


def in_form(content: str, form: str, wants: bool) -> Any:
    """A message's content as the template reads it: with its images as parts if it has a mark. `wants`: of parts."""
    if IMAGE_MARK in content and form == AS_PARTS:
        pieces = re.split(f"({IMAGE_MARK})", content)
        return [IMAGE_PART if piece == IMAGE_MARK else parts_of(piece)[0] for piece in pieces if piece]
    if wants:
        return parts_of(content)
    return content


def is_read_as_parts(message: dict, roles: set[str]) -> bool:
    """True if a message's content is given as parts; a role of no template's is as the user's."""
    role = message.get("role")
    return (role if role in OTHER_ROLES else USER) in roles


def rendered(
    templates: dict, with_parts: dict[str, set[str]], variables: dict, line: bytes, with_images: dict[str, str]
) -> dict:
    """The answer to one request: its texts, or why the template rejects it. `with_images`: {template's use: its form of
    contents with images}, which is found with the first one. Raises Fault.
    """
    import jinja2.sandbox

    limit_memory(MAX_BYTES + PYTHON_BYTES + BYTES_PER_BYTE * len(line))
    request = json.loads(line)
    limit_time(len(request["upto"]) * (GRANT_S + GRANT_S_PER_BYTE * len(line)), kept_s=BURST_S)
    messages = [with_reasoning(m) for m in request["messages"]]
    tools = request["tools"]
    use = "tools" if tools and "tools" in templates else "default"
    template = templates[use]
    texts = []
    roles = with_parts[use]
    if request.get("marks") and any(IMAGE_MARK in str(message.get("content")) for message in messages):
        if use not in with_images:
            with_images[use] = image_form(template, variables, USER in roles)
        form = with_images[use]
        messages = [{**m, "content": in_form(m["content"], form, is_read_as_parts(m, roles))} for m in messages]
    elif roles:
        messages = [{**m, "content": in_form(m["content"], AS_TEXT, is_read_as_parts(m, roles))} for m in messages]
    messages = [Observed(message) if message.keys() - USUAL else message for message in messages]
    listed = [ObservedTool(tool) for tool in tools or ()]
    tools = ObservedTools(listed) if listed else tools
    try:
        for number, prompt in request["upto"]:
            values = dict(messages=messages[:number], tools=tools, documents=None, add_generation_prompt=prompt)
            texts.append(text_of(template.generate(**{**variables, **request["variables"], **values}), len(line)))
    except jinja2.sandbox.SecurityError as error:
        raise Fault(f"accesses attributes outside the sandbox ({str(error)[:200]})") from None
    except rejections() as error:
        return {"rejects": " ".join(str(error).split())[:200] or type(error).__name__}
    last = max((number for number, _ in request["upto"]), default=0)
    shown = [(i, message) for i, message in enumerate(messages[:last]) if isinstance(message, Observed)]
    unread: list[tuple] = [(i, name) for i, message in shown for name in message.unread()]
    unread += [(None, i) for i, tool in enumerate(listed) if not tool.is_read]
    unread += [(i, None) for i, tool in enumerate(listed) if tool.is_read and tool.lacks_parameters]
    return {"texts": texts, "unread": unread}


class ObservedTools(list):
    """Tools that a template reads one by one, however it asks for them: to count them is no reading."""

    def __iter__(self):
        for tool in range(len(self)):
            yield self[tool]

    def __repr__(self):
        return repr([dict(tool.items()) for tool in self])


class Observed(dict):
    """A message that keeps the names of its fields that a template reads, where no template reaches them."""

    def __init__(self, message: dict):
        super().__init__(message)
        self._read: set = set()

    @property
    def is_read(self) -> bool:
        return bool(self._read)

    def unread(self) -> list[str]:
        return [name for name in dict.keys(self) if name not in self._read and name not in USUAL]

    def __getitem__(self, name: Any):
        self._read.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object):
        self._read.add(name)
        return super().__contains__(name)

    def get(self, name: Any, default: Any = None):
        return self[name] if name in self else default

    def items(self):
        self._read.update(super().keys())
        return super().items()

    def keys(self):
        return dict(self.items()).keys()

    def values(self):
        return dict(self.items()).values()

    def __iter__(self):
        return iter(self.keys())

    def __repr__(self):
        return repr(dict(self.items()))


class ObservedTool(Observed):
    """A tool, of which it is also known whether its function is read, and that with its parameters."""

    def __init__(self, tool: dict):
        self._function = Observed(tool["function"]) if isinstance(tool.get("function"), dict) else None
        super().__init__(tool if self._function is None else {**tool, "function": self._function})

    @property
    def is_read(self) -> bool:
        return bool(self._read) and (self._function is None or self._function.is_read)

    @property
    def lacks_parameters(self) -> bool:
        function = self._function
        return function is not None and bool(dict.get(function, "parameters")) and "parameters" in function.unread()


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
