"""Chat templates: checked in a sandboxed subprocess before use, and applied to messages."""

import functools
import json
import subprocess
import sys

from finetune.errors import PlanError

# Assistant turns end with the tokenizer's EOS token: without a chat template, <|im_end|> is rarely in the vocabulary.
CHATML_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{{ (eos_token if message['role'] == 'assistant' and eos_token else '<|im_end|>') + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PROBE_SECONDS = 3
PROBE_BYTES = 256 * 2**20


def ensure_chat_template(tokenizer) -> str | None:
    """Sets ChatML on a tokenizer without a chat template; returns the notice to print, else None."""
    if tokenizer.chat_template:
        return None
    tokenizer.chat_template = CHATML_TEMPLATE
    end = tokenizer.eos_token or "<|im_end|>"
    return f"chat template: the tokenizer has none, so ChatML (answers end with {end}); it is saved with the tokenizer"


def split_end_of_turn(answer: str, specials: tuple[str, ...]) -> tuple[str, str]:
    """(answer, its end-of-turn token if any), without the whitespace that a template appends."""
    stripped = answer.rstrip()
    end = max((text for text in specials if stripped.endswith(text)), key=len, default="")
    return (stripped.removesuffix(end), end) if end else (answer, "")


def special_texts(tokenizer) -> tuple[str, ...]:
    """Texts of the tokens that can end a turn."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return tuple(text for text in {*added, *tokenizer.all_special_tokens} if text)


def apply_template(messages: list[dict], tools, source: str, tokenizer, add_generation_prompt: bool) -> str:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools or None, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except (
        TemplateError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        fact = " ".join(str(error).split())[:200] or type(error).__name__
        raise PlanError(f"{source}: the chat template rejects this row ({fact}). Change the row.") from error


# ------ third-party chat templates


def check_chat_template(tokenizer):
    """Raises PlanError if the chat template takes over 3 s or 256 MiB in a child process, or leaves its sandbox."""
    assert tokenizer.chat_template, "ensure_chat_template must come first"
    template = tokenizer.get_chat_template()
    if template != CHATML_TEMPLATE:
        fact = _probe_template(template, tokenizer.bos_token or "", tokenizer.eos_token or "")
        if fact:
            raise PlanError(
                f"chat template of {tokenizer.name_or_path or 'the tokenizer'}: {fact}. Use a tokenizer you trust."
            )


@functools.lru_cache(maxsize=8)
def _probe_template(template: str, bos_token: str, eos_token: str) -> str:
    """The fault of the template, or "". Rejecting the probe's messages is not a fault."""
    given = json.dumps({"template": template, "bos_token": bos_token, "eos_token": eos_token, "max_bytes": PROBE_BYTES})
    command = [sys.executable, "-c", PROBE]
    try:
        result = subprocess.run(command, input=given, capture_output=True, text=True, timeout=PROBE_SECONDS, cwd="/")
    except subprocess.TimeoutExpired:
        return f"does not render two messages within {PROBE_SECONDS} s"
    if result.returncode == 0:
        return result.stdout.strip()
    last = (result.stderr.strip().splitlines() or [f"exit {result.returncode}"])[-1][:200]
    return f"crashes the process that renders it ({last})"


PROBE = r"""
import json, sys
from datetime import datetime
import jinja2, jinja2.ext, jinja2.sandbox
given = json.load(sys.stdin)
try:
    import resource
    size = given["max_bytes"] + 2**26  # Python itself maps about 40 MiB
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
except (ImportError, ValueError, OSError):
    pass  # macOS rejects an address space limit; the parent's timeout still applies

class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)

def raise_exception(message):
    raise jinja2.TemplateError(message)

environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
environment.filters["tojson"] = lambda value, indent=None, **_: json.dumps(value, ensure_ascii=False, indent=indent)
environment.globals["raise_exception"] = raise_exception
environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
system, user, answer = [{"role": r, "content": "probe " + r} for r in ("system", "user", "assistant")]
cases = [([user], True), ([user, answer], False), ([system, user, answer, user, answer], False)]
try:
    template = environment.from_string(given["template"])
    for messages, prompt in cases:
        size = 0
        try:
            for piece in template.generate(messages=messages, add_generation_prompt=prompt, tools=None, documents=None,
                                           bos_token=given["bos_token"], eos_token=given["eos_token"]):
                size += len(piece)
                if size > 2**20:
                    sys.exit(print("renders two messages to over 1 MiB of text"))
        except jinja2.sandbox.SecurityError as error:
            sys.exit(print("accesses attributes outside the sandbox (%s)" % str(error)[:200]))
        except jinja2.TemplateSyntaxError:
            raise
        except MemoryError:
            raise
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError):
            pass  # the template rejects these messages; the rows decide
except jinja2.TemplateSyntaxError as error:
    print("is not a valid template (%s)" % str(error)[:200])
except MemoryError:
    print("needs over %d MiB" % (given["max_bytes"] >> 20))
except RecursionError:
    print("recurses endlessly")
"""
