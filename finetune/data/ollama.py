"""Ollama's Modelfile of a model: its chat template as a Go template, its stop texts and its sampling parameters.

A template that is a sequence of turns is found by rendering marked messages; a longer conversation, rendered by both,
must then be the same text.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from finetune.data.chat_template import TemplateRenderer, on_day, request_of
from finetune.errors import PlanError
from finetune.model_files.tokenizer import FullTokenizer
from finetune.system.untrusted import untrusted

S, U, A, V, B, W = (f"{word}TEXT" for word in ("SYSTEM", "USER", "ANSWER", "SECOND", "REPLY", "THIRD"))
# generation_config.json's name of each parameter that Ollama has.
PARAMETERS = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
PARAMETERS |= {"repetition_penalty": "repeat_penalty"}
RAW = "{{ .Prompt }}"
NO_TURNS = "is not a sequence of turns"
OTHER_DAY = "2001-02-03"
Render = Callable[[list[dict], bool], str]


@dataclass(frozen=True)
class Turns:
    """A template's text around each role's; `default`: the system message of a chat that has none."""

    system: tuple[str, str] | None
    user: tuple[str, str]
    assistant: tuple[str, str]
    default: str = ""

    def text(self, messages: list[dict]) -> str:
        """The messages and the beginning of an answer, as Ollama renders `go`."""
        if self.default and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.default}, *messages]
        around = {"system": self.system, "user": self.user, "assistant": self.assistant}
        parts = [(around[m["role"]] or ("", "")) for m in messages]
        turns = [before + m["content"] + after for m, (before, after) in zip(messages, parts, strict=True)]
        return "".join(turns) + self.assistant[0]

    def go(self) -> str:
        """The Go template."""
        roles = {"system": self.system, "user": self.user, "assistant": self.assistant}
        branches = [
            f'if eq .Role "{role}" }}}}{around[0]}{{{{ .Content }}}}{around[1]}'
            for role, around in roles.items()
            if around
        ]
        return "{{ range .Messages }}{{ " + "{{ else ".join(branches) + "{{ end }}{{ end }}" + self.assistant[0]


def model_name(checkpoint: Path, written: Path) -> str:
    """A name for `ollama create`: the run's, or that of the folder written if the checkpoint's says nothing of it."""
    checkpoint = checkpoint.resolve()
    if checkpoint.name == "best":
        run = checkpoint.parent
    else:
        run = checkpoint
    if run.parent.name == "checkpoints":
        run = run.parent.parent
    for name in (run.name, written.resolve().name):
        if found := re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("._-")[:80]:
            return found
    return "finetuned"


def modelfile(folder: Path, tokenizer: FullTokenizer, stops: list[str], weights: str) -> tuple[str, str | None]:
    """(Modelfile for `weights`, a line if it has no template, or one that differs). `folder`: of the model, for
    generation_config.json.
    """
    lines = [f"FROM ./{weights}"]
    notice = None
    if not tokenizer.chat_template:
        lines.append(f'TEMPLATE """{RAW}"""')
    else:
        turns, why = turns_of(tokenizer)
        if turns is None:
            notice = (
                f"note: the chat template {why}, so the Modelfile has no TEMPLATE; Ollama takes the GGUF file's if it "
                "knows it"
            )
        else:
            if why:
                notice = f"note: the chat template {why}, and Ollama's does not"
            lines.append(f'TEMPLATE """{turns.go()}"""')
            lines += [f'SYSTEM """{turns.default}"""'] if turns.default else []
    lines += [f"PARAMETER stop {json.dumps(text, ensure_ascii=False)}" for text in stops]
    lines += [f"PARAMETER {name} {value}" for name, value in _sampling(folder).items()]
    return "\n".join(lines) + "\n", notice


def turns_of(tokenizer: FullTokenizer) -> tuple[Turns | None, str]:
    """(the turns of a tokenizer's chat template, what it does beside them); None if it is not a sequence of them."""
    adds_bos = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    # which llama.cpp adds too
    bos = ""
    if adds_bos and tokenizer.bos_token:
        bos = tokenizer.bos_token
    try:
        with _rendering(tokenizer, bos) as render:
            turns, why = _compared(render)
        if turns is not None:
            with on_day(OTHER_DAY), _rendering(tokenizer, bos) as render:
                if _probe(render) != turns:
                    return None, "prints the day"
    except PlanError:  # the template rejects one of these conversations
        return None, NO_TURNS
    if turns is None:
        return None, why
    texts = [text for around in (turns.system, turns.user, turns.assistant) for text in around or ()]
    texts.append(turns.default)
    ends = (turns.assistant[0], turns.default)  # of TEMPLATE and SYSTEM, before the marks that close them
    if any(mark in text for text in texts for mark in ("{{", "}}", '"""')) or any(end.endswith('"') for end in ends):
        return None, "has text that a Modelfile cannot hold"
    return turns, why


@contextlib.contextmanager
def _rendering(tokenizer: FullTokenizer, bos: str) -> Iterator[Render]:
    """A context with what renders messages, without BOS. That raises PlanError for what the template rejects."""
    with TemplateRenderer(tokenizer) as renderer:

        def render(messages: list[dict], begins_answer: bool) -> str:
            request = request_of(messages, None, [(len(messages), begins_answer)], "Modelfile")
            (rendering,) = renderer.render([request], ["Modelfile"])
            if isinstance(rendering, PlanError):
                raise rendering
            return rendering.texts[0].removeprefix(bos)

        yield render


def _compared(render: Render) -> tuple[Turns | None, str]:
    """The same as `turns_of`, as rendered messages show it. Raises PlanError."""
    turns = _probe(render)
    if turns is None:
        return None, NO_TURNS

    def is_same(chat: list[dict]) -> bool:
        assert turns is not None, "which is returned above"
        return turns.text(chat) == render(chat, True)

    asked = _messages(("user", U), ("assistant", A), ("user", V), ("assistant", B), ("user", W))
    chats = [asked, asked[:-1] * 4 + asked[-1:]]
    if turns.system:
        chats.append(_messages(("system", S)) + asked)
    if not all(map(is_same, chats)):
        return None, NO_TURNS
    thought = _messages(("user", U), ("assistant", f"<think>\n{B}\n</think>\n\n{A}"), ("user", V))
    if not is_same(thought):
        return None, "changes or drops earlier reasoning"
    spaced = _messages(("user", f" {U} "), ("assistant", f" {A} "), ("user", f" {V} "))
    if not is_same(spaced):
        return turns, "takes spaces off the ends of messages"
    return turns, ""


def _messages(*turns: tuple[str, str]) -> list[dict]:
    return [{"role": role, "content": text} for role, text in turns]


def _probe(render: Render) -> Turns | None:
    chat = render(_messages(("user", U), ("assistant", A), ("user", V)), False)
    answered = render(_messages(("user", U), ("assistant", A)), False)
    if not all(chat.count(mark) == 1 for mark in (U, A, V)) or answered.count(A) != 1:
        return None
    after_user = chat.partition(V)[2]
    before_answer = chat.partition(U)[2].partition(A)[0]
    after_answer = answered.partition(A)[2]
    before_user = chat.partition(A)[2].partition(V)[0]
    if not before_answer.startswith(after_user) or not before_user.startswith(after_answer):
        return None
    user = (before_user.removeprefix(after_answer), after_user)
    assistant = (before_answer.removeprefix(after_user), after_answer)
    head = chat.partition(U)[0]
    if not head.endswith(user[0]):
        return None
    head = head.removesuffix(user[0])
    system = _system(render, user)
    if not head:
        return Turns(system, user, assistant)
    if system is None or not (head.startswith(system[0]) and head.endswith(system[1])):
        return None
    return Turns(system, user, assistant, head.removeprefix(system[0]).removesuffix(system[1]))


def _system(render: Render, user: tuple[str, str]) -> tuple[str, str] | None:
    """The text around a system message; None where the template has none. PlanError where it is inside a turn."""
    try:
        text = render(_messages(("system", S), ("user", U)), False)
    except PlanError:
        return None
    before, _, rest = text.partition(S)
    after = rest.partition(U)[0]
    if S in text and not after.endswith(user[0]):
        raise PlanError("Modelfile: the chat template puts a system message inside the user's turn.")
    if S in text:
        return (before, after.removesuffix(user[0]))
    return None


def _sampling(folder: Path) -> dict[str, float]:
    file = folder / "generation_config.json"
    if not file.is_file():
        return {}
    with untrusted(f"{file}: cannot be read", "Fix or remove it."):
        content = dict(json.loads(file.read_text(encoding="utf-8")))
    found = ((ollama, content.get(name)) for name, ollama in PARAMETERS.items())
    return {name: value for name, value in found if isinstance(value, int | float) and not isinstance(value, bool)}
