"""A chat template made to ask as the rows answer: its generation prompt is what stands before their answers.

The generation prompt of many templates opens a thought, or closes an empty one, which a plain answer lacks: a model
trained on such answers would be asked in another way than it was trained. The template's own switch is set, or the
surplus is cut from its generation prompt. The changed template is saved with the tokenizer, so that generate.py,
score.py, the exports and every other program ask as in training.
"""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from finetune.data.answer_marks import ASKED, MARK, THOUGHT, answer, chat
from finetune.data.built_in_templates import BUILT_IN
from finetune.data.chat_template import TemplateRenderer, ensure_chat_template, named_template
from finetune.data.columns import OF_TASKS, Row
from finetune.data.conversation import Conversation, after_thought_of_prompt, thought_of
from finetune.data.formats import needs_template, uses_template
from finetune.data.messages import TemplateWords, template_variables
from finetune.errors import PlanError
from finetune.model_files.tokenizer import Tokenizer, set_eos_token
from finetune.parts.data import DataPlan

CONTROL = re.compile(r"<\|\w+\|>|<(?:start|end)_of_turn>")
TAG = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]")
SWITCH = re.compile(r"(?<![\w.'\"])(\w*(?:think|reason)\w*)(?![\w'\"])")
CHATS = {False: chat(answer()), True: chat(answer(reasoning_content=THOUGHT))}


def prepare_template(tokenizer: Tokenizer, how: DataPlan, rows: Callable[..., Iterable[Row]]) -> list[str]:
    """Gives the tokenizer the EOS token and the chat template of the run; returns the notices to print.

    `rows`: the run's rows, all or those of one use, called only where they decide: what is validated and scored is
    asked as the training rows are. Raises PlanError.
    """
    notices: list[str | None] = []
    if how.eos_token:
        set_eos_token(tokenizer, how.eos_token)
    if how.chat_template:
        notices += _given_template(tokenizer, how.chat_template)
    notices.append(ensure_chat_template(tokenizer, lambda: any(map(needs_template, rows()))))
    notices.append(
        fit_template(tokenizer, lambda: rows("train"), are_learned=how.reward is None, are_all=not how.streaming)
    )
    if how.eos_token and isinstance(tokenizer.chat_template, str) and any(map(needs_template, rows())):
        notices.append(_ends_otherwise(tokenizer, how.eos_token))
    return [notice for notice in notices if notice]


def _ends_otherwise(tokenizer: Tokenizer, eos_token: str) -> str | None:
    """The notice of a chat template that ends answers with another token than --eos_token."""
    with contextlib.suppress(PlanError), TemplateRenderer(tokenizer) as renderer:
        texts = _rendered(renderer, False)
        end = (texts or ["", ""])[1].rpartition(MARK)[2].strip()
        if end and eos_token not in end:
            return (
                f"--eos_token {eos_token}: the chat template ends answers with {end}, which is what conversations "
                "learn; give --chat_template chatml to end them with the token"
            )
    return None


def _given_template(tokenizer: Tokenizer, value: str) -> list[str]:
    """Sets the chat template of --chat_template; the notices of it. Raises PlanError for one that renders no chat."""
    tokenizer.chat_template = named_template(value)
    said = f"--chat_template {value}"
    with TemplateRenderer(tokenizer, said) as renderer:
        texts = _rendered(renderer, False)
        if texts is None or MARK not in texts[1] or ASKED not in texts[1]:
            raise PlanError(f"{said}: does not render a question and its answer. Give a chat template.")
    found = [f"chat template: {value} instead of the tokenizer's; it is saved with the tokenizer"]
    known = tokenizer.get_vocab()
    unknown = sorted({text for text in CONTROL.findall(tokenizer.chat_template) if text not in known})
    if unknown and value in BUILT_IN and value != "chatml":
        found.append(f"chat template: {', '.join(unknown)} are plain text to this tokenizer, which has no such tokens")
    return found


def fit_template(
    tokenizer: Tokenizer, rows: Callable[[], Iterable[Row]], are_learned: bool = True, are_all: bool = True
) -> str | None:
    """Changes the tokenizer's chat template to one that asks as `rows` answer; returns the notice to print, else None.

    All of `rows` are read only for a template whose generation prompt differs from what stands before some answer, or
    if every row sets its switches. `are_learned`: the rows' answers; a run that samples its own is asked as the model
    was, where rows can be read so. `are_all`: False of a stream, whose later rows may have thoughts or set switches.
    Of several templates, that for tools is fitted to the rows with tools, and the default one to the others.
    """
    named = tokenizer.chat_template
    if not isinstance(named, dict):
        if named:
            return _fit_one(tokenizer, rows, are_learned, are_all)
        return None
    notices = []
    has_both = {"default", "tool_use"} <= named.keys()
    for name in ("default", "tool_use"):
        if isinstance(named.get(name), str):
            tokenizer.chat_template = named[name]
            of_name = partial(_rows_of_template, rows, name) if has_both else rows
            notices.append(_fit_one(tokenizer, of_name, are_learned, are_all))
            named = {**named, name: tokenizer.chat_template}
    tokenizer.chat_template = named
    return "; ".join(dict.fromkeys(filter(None, notices))) or None


def _rows_of_template(rows: Callable[[], Iterable[Row]], name: str) -> Iterator[Row]:
    """The rows that one of two named templates renders."""
    return (row for row in rows() if bool(row.get("tools")) is (name == "tool_use"))


def _fit_one(tokenizer: Tokenizer, rows: Callable[[], Iterable[Row]], are_learned: bool, are_all: bool) -> str | None:
    """Does what `fit_template` does, for a tokenizer with one template."""
    notices = []
    if said := _set_by_every_row(tokenizer, rows()):
        if are_all:
            notices = _with_defaults(tokenizer, said)
        else:
            notices = ["chat template: the first rows set its switches, and the saved one does not: ask with the same"]
    if fitted := _fitted(tokenizer, rows, are_learned, are_all):
        notices.append(fitted)
    return "; ".join(notices) or None


def _with_answers(rows: Iterable[Row]) -> Iterator[Row]:
    """The rows that the template renders; those of a head have no answers."""
    return (row for row in rows if row.format not in OF_TASKS and uses_template(row, has_template=True))


def _set_by_every_row(tokenizer: Tokenizer, rows: Iterable[Row]) -> dict:
    """The values that every row sets of the template's switches, where it renders a chat otherwise with them: programs
    that set none would ask otherwise than all rows answer. Reads to the first row that sets none, or others.
    """
    words = TemplateWords.of(tokenizer)
    said: dict = {}
    for row in _with_answers(rows):
        try:
            given = template_variables(row, words)
        except PlanError:  # named where the row is tokenized
            return {}
        given = {name: value for name, value in given.items() if name in words.switches}
        if not given or (said and given != said):
            return {}
        said = given
    return said if said and _changes_a_chat(tokenizer, said) else {}


def _with_defaults(tokenizer: Tokenizer, said: dict) -> list[str]:
    """Gives the template's switches these values where a program sets none. Returns the notices."""
    literals = {name: _literal(value) for name, value in sorted(said.items())}
    settings = [
        f"{{% if {name} is not defined %}}{{% set {name} = {text} %}}{{% endif %}}"
        for name, text in literals.items()
        if text
    ]
    tokenizer.chat_template = "".join(settings) + tokenizer.chat_template
    kept = ", ".join(f"{name} is {json.dumps(value)}" for name, value in said.items() if literals[name])
    lines = []
    if kept:
        lines = [f"chat template: {kept} where a program does not say, as in every row; it is saved with the tokenizer"]
    for name in (name for name, text in literals.items() if not text):
        lines.append(f"chat template: every row sets {name}, which is not saved with it: ask with the same")
    return lines


def _literal(value: object) -> str:
    """A value of JSON as templates write it, without the characters that begin or end their code; empty of others."""
    if isinstance(value, bool | int | float | str):
        return re.sub(r"[{}%#]", lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value))
    return ""


def _changes_a_chat(tokenizer: Tokenizer, variables: dict) -> bool:
    """True if the template renders a chat otherwise with these variables than without."""
    with contextlib.suppress(PlanError), TemplateRenderer(tokenizer) as renderer:
        return any(_rendered(renderer, thinks, variables) != _rendered(renderer, thinks) for thinks in CHATS)
    return False


def _fitted(tokenizer: Tokenizer, rows: Callable[[], Iterable[Row]], are_learned: bool, are_all: bool) -> str | None:
    """Makes the template ask as answers begin, where a switch does in tokens too. Returns the notice. Of a stream,
    later rows may begin in another way than the first.
    """
    with contextlib.suppress(PlanError), TemplateRenderer(tokenizer) as renderer:  # named where a row is rendered
        rendered = {thinks: _rendered(renderer, thinks) for thinks in CHATS}
        in_text: dict[bool, Callable[[list[str] | None], bool]] = {False: _fits, True: _fits}
        best = in_text
        if are_learned and are_all:
            best = dict.fromkeys(CHATS, partial(_fits_in_tokens, tokenizer))
        if all(best[thinks](texts) for thinks, texts in rendered.items()):
            return None
        kinds, is_fixed = kinds_of_answers(tokenizer, rows())
        if not are_learned and kinds == {False}:
            best = {False: _is_asked}
        both = {thinks: texts for thinks, texts in rendered.items() if texts}
        wanted = {thinks: both[thinks] for thinks in kinds & both.keys()}
        for fits in (best, in_text):
            if all(fits[thinks](rendered[thinks]) for thinks in kinds):
                if are_all or not (are_learned and kinds):
                    return None
                return _without_surplus(tokenizer, both, is_fixed, of_whitespace=True)
            if notice := _switched(tokenizer, renderer, fits, wanted=wanted, is_fixed=is_fixed):
                return notice
        return _without_surplus(tokenizer, wanted, is_fixed)
    return None


def _switched(
    tokenizer: Tokenizer,
    renderer: TemplateRenderer,
    fits: dict[bool, Callable[[list[str] | None], bool]],
    wanted: dict[bool, list[str]],
    is_fixed: bool,
) -> str | None:
    """Sets the switch that says whether answers begin with a thought, if the template has one and all do or none does.
    Returns the notice. `fits`: {whether an answer thinks: says of a chat whether it follows its prompt}.
    """
    if len(wanted) != 1:
        return None
    (thinks,) = wanted
    for name in _switches(tokenizer.chat_template):
        texts = _rendered(renderer, thinks, {name: thinks})
        if texts and fits[thinks](texts):
            tokenizer.chat_template = _with_switch(tokenizer.chat_template, name, thinks, is_fixed)
            word, have = ("true", "thoughts") if thinks else ("false", "no thoughts")
            return f"chat template: {name} is {word}, as the answers have {have}; it is saved with the tokenizer"
    return None


def _with_switch(template: str, name: str, value: bool, is_fixed: bool) -> str:
    """The template with a switch set: whatever a program asks for if `is_fixed`, as mlx-lm asks every model that knows
    thoughts for one; else where it does not say.
    """
    setting = f"{{% set {name} = {str(value).lower()} %}}"
    return (setting if is_fixed else f"{{% if {name} is not defined %}}{setting}{{% endif %}}") + template


def _without_surplus(
    tokenizer: Tokenizer, wanted: dict[bool, list[str]], is_fixed: bool, of_whitespace: bool = False
) -> str | None:
    """Cuts the end of the generation prompt that the answers lack. Returns the notice. `of_whitespace`: no other is."""
    template = tokenizer.chat_template
    for candidate, surplus in _candidates(template, list(wanted.values())):
        if of_whitespace and not surplus.isspace():
            break
        tokenizer.chat_template = candidate
        with TemplateRenderer(tokenizer) as renderer:
            found = {thinks: _rendered(renderer, thinks) for thinks in wanted}
            if all(texts and _fits(texts) and texts[1] == wanted[thinks][1] for thinks, texts in found.items()):
                if True in wanted:
                    name = None
                else:
                    name = _switch_that_is_off(renderer, candidate, found[False])
                if name:
                    tokenizer.chat_template = _with_switch(candidate, name, False, is_fixed)
                shown = json.dumps(surplus, ensure_ascii=False)
                return (
                    f"chat template: its generation prompt ends with {shown}, which the answers lack, so that is left "
                    "out; it is saved with the tokenizer"
                )
    tokenizer.chat_template = template
    return None


def _switch_that_is_off(renderer: TemplateRenderer, template: str, texts: list[str] | None) -> str | None:
    """The name of a switch without which a plain chat is rendered as with false."""
    names = _switches(template)
    return next((name for name in names if _rendered(renderer, False, {name: False}) == texts), None)


def kinds_of_answers(tokenizer: Tokenizer, rows: Iterable[Row]) -> tuple[set[bool], bool]:
    """({True, False}: some learned answers begin with a thought, others do not; True if rows set no switch)."""
    words = TemplateWords.of(tokenizer)
    found: set[bool] = set()
    is_fixed = True
    for row in _with_answers(rows):
        try:
            conversation = Conversation.of(row, words)
        except PlanError:  # named where the row is tokenized
            continue
        if words.switches & conversation.variables.keys():  # others are not read
            is_fixed = False
        else:
            found |= {bool(thought_of(conversation.messages[i])) for i in conversation.learned}
        if len(found) == 2:
            break
    return found, is_fixed


def _rendered(renderer: TemplateRenderer, thinks: bool, variables: dict | None = None) -> list[str] | None:
    """[a question with the generation prompt, the question with its answer]; None if the template rejects them."""
    (texts,) = renderer.render_each([(CHATS[thinks], None, [(1, True), (2, False)])], variables)
    return None if isinstance(texts, PlanError) else texts


def _fits(texts: list[str] | None) -> bool:
    """True if the answer follows the generation prompt, or if the template rejects the chat."""
    return texts is None or (texts[1].startswith(texts[0]) and MARK in texts[1][len(texts[0]) :])


def _is_asked(texts: list[str] | None) -> bool:
    """True if an answer follows the generation prompt, or would but for a thought at the prompt's end."""
    return texts is None or _fits(texts) or after_thought_of_prompt(*texts) is not None


def _fits_in_tokens(tokenizer: Tokenizer, texts: list[str] | None) -> bool:
    """True if that holds of the tokens too: of <think> and a line break before a closed thought it often does not, as
    two line breaks are one token.
    """
    if texts is None or not _fits(texts):
        return texts is None
    prompt, whole = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False).encodings
    return whole.ids[: len(prompt.ids)] == prompt.ids


def _switches(template: str) -> list[str]:
    """Names in the template's source that may switch thoughts on, the usual ones first."""
    found = dict.fromkeys(("enable_thinking", "thinking", *SWITCH.findall(template)))
    return [name for name in found if re.search(rf"\b{name}\b", template)]


def _common(prompt: str, answered: str) -> int:
    """The number of characters with which both begin, of whole marks: <think> and </think> share nothing."""
    size = len(os.path.commonprefix([prompt, answered]))
    return next((mark.start() for mark in TAG.finditer(prompt) if mark.start() < size < mark.end()), size)


def _candidates(template: str, pairs: list[list[str]]) -> Iterator[tuple[str, str]]:
    """(template, what is cut) of templates without the end of the generation prompt that the answers lack."""
    kept = [_common(prompt, answered.partition(MARK)[0]) for prompt, answered in pairs]
    prompt = ""
    if pairs:
        prompt = pairs[0][0]
    if not pairs or min(kept) < prompt.find(ASKED) + len(ASKED):  # the prompt's question is no surplus
        return
    surplus = prompt[min(kept) :]
    for written in dict.fromkeys((surplus.replace("\n", "\\n"), surplus)):
        for match in reversed(list(re.finditer(re.escape(written), template))):
            yield template[: match.start()] + template[match.end() :], surplus
    ending = json.dumps(surplus, ensure_ascii=False)
    yield (
        "{%- set whole_chat %}" + template + "{%- endset %}{{- whole_chat[:-" + str(len(surplus)) + "] "
        "if add_generation_prompt and whole_chat.endswith(" + ending + ") else whole_chat }}",
        surplus,
    )
