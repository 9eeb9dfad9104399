"""Tables of other programs' names, made from their YAML files when a name or a file of the program is met.

Sections of a file: `as in`: names whose entries are another program's; `same`: flags of the same name here; `names`:
a flag, `program:name` for the entry of another program, outcomes by value, `computed` by a function of values.py or
`by class`, the last part of a class's path; `left out` and `instead`: a sentence and the names that it answers;
`unsaid`: the train type of a file that names none; `lookups`: for functions of values.py. Names and values are
separated by spaces; "{optimizer}" stands for the values of that flag here.
"""

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

from finetune.config import NAMES, SCHEDULES
from finetune.names import values
from finetune.names.entries import FILES, ByValue, Computed, Entry, Instead, LeftOut, Names, sections_of
from finetune.parts.optimizers import OPTIMIZERS

OURS = re.compile(r"\{(\w+)\}")
CHOICES = {"optimizer": OPTIMIZERS, "lr_scheduler": SCHEDULES}
SECTIONS = {"as in", "same", "names", "left out", "instead", "unsaid", "lookups"}
KINDS = ({"flags"}, {"left out"}, {"instead"})


class Tables(Mapping[str, Names]):
    """{program: its table}; a table is read when it is asked for."""

    def __getitem__(self, program: str) -> Names:
        return table(program)

    def __iter__(self) -> Iterator[str]:
        return iter(FILES)

    def __len__(self) -> int:
        return len(FILES)


PROGRAMS = Tables()


@cache
def table(program: str) -> Names:
    """{name: entry} of a program, in the order of its file."""
    sections = sections_of(program)
    assert sections.keys() <= SECTIONS, f"{FILES[program]}: {sections.keys() - SECTIONS}"
    found: Names = {}
    for other, patterns in sections.get("as in", {}).items():
        for pattern in patterns.split():
            found.update({name: entry for name, entry in table(other).items() if fnmatchcase(name, pattern)})
    own: Names = {}
    for names, entry in groups(sections):
        for name in names.split():
            assert name not in own, f"{FILES[program]}: {name} has two entries"
            own[name] = name if entry == "same" else entry
            assert not isinstance(own[name], str) or own[name] in NAMES, f"{FILES[program]}: {name}: {own[name]}"
    return found | own


def groups(sections: dict) -> Iterator[tuple[str, Entry]]:
    """(names, their entry) of a file's sections."""
    yield sections.get("same", ""), "same"
    for names, raw in sections.get("names", {}).items():
        yield names, entry_of(raw)
    for why, names in sections.get("left out", {}).items():
        yield names, LeftOut(why)
    for what, raw in sections.get("instead", {}).items():
        if isinstance(raw, str):
            yield raw, Instead(what)
        else:
            yield raw["names"], Instead(what, tuple(raw["unless"].split()))


def entry_of(raw: Any) -> Entry:
    """The entry that a file's words mean; an entry itself is returned as it is."""
    if isinstance(raw, ByValue | Computed):
        return raw
    if isinstance(raw, str):
        program, colon, name = raw.partition(":")
        if colon:
            return table(program)[name]
        return raw
    if "computed" in raw:
        return Computed(getattr(values, raw["computed"]), raw["text"])
    if "by class" in raw:
        words = entry_of(raw["by class"])
        assert isinstance(words, ByValue) and "*" in words.words, raw
        return Computed(partial(by_class, words), raw["text"])
    return by_value(raw)


def by_value(raw: dict) -> ByValue:
    words: dict[str, str | LeftOut | Instead] = {}
    why = {}
    for key, outcome in raw.items():
        place = OURS.fullmatch(key)
        for value in CHOICES[place[1]] if place else key.split() or [""]:
            words[value] = outcome_of(outcome, value if place else None)
            if isinstance(outcome, dict) and "why" in outcome:
                why[value] = outcome["why"]
    return ByValue(words, why)


def outcome_of(raw: Any, value: str | None) -> str | LeftOut | Instead:
    """Flags, LeftOut or Instead. `value`: of our flag that stands in braces, else all of them are listed."""
    if isinstance(raw, str):
        return OURS.sub(lambda found: value or ", ".join(CHOICES[found[1]]), raw)
    assert raw.keys() - {"why"} in KINDS, raw
    ((kind, text),) = ((kind, text) for kind, text in raw.items() if kind != "why")
    text = outcome_of(text, value)
    return {"flags": str, "left out": LeftOut, "instead": Instead}[kind](text)


def by_class(words: ByValue, value: object) -> str | LeftOut | Instead:
    """The outcome of the last part of a class's path, in any case of letters."""
    return words.words.get(values.last_part(value).lower(), words.words["*"])
