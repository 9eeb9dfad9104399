"""Kinds of entries in the tables of other programs' names, and the YAML files that hold them, one per program.

An entry that is a string is the flag of the same meaning here. Words such as "--precision bf16" are flags with their
values; "{}" stands for the value that was given, and what follows "|" is set unless something else sets it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

# In the order in which a name that several have is looked up.
FILES = {
    "transformers": "transformers.yaml",
    "TRL": "trl.yaml",
    "PEFT": "peft.yaml",
    "Axolotl": "axolotl.yaml",
    "LLaMA-Factory": "llama_factory.yaml",
    "mlx-lm": "mlx_lm.yaml",
    "torchtune": "torchtune.yaml",
    "LitGPT": "litgpt.yaml",
    "fsdp_qlora": "fsdp_qlora.yaml",
    "other programs": "other_programs.yaml",
}
UNSET = ("", "none", "null", "false", "no", "off", "0", "0.0", "[]", "{}")


@dataclass(frozen=True)
class LeftOut:
    """Accepted, and without effect: `why` is what happens here in any case."""

    why: str


@dataclass(frozen=True)
class Instead:
    """Refused: `what` to write or to know instead. Values that ask for nothing (`unless`, and UNSET) are left out."""

    what: str
    unless: tuple[str, ...] = ()

    def asks_for_nothing(self, word: str) -> bool:
        return word.lower() in (*UNSET, *self.unless)


Outcome = str | list[dict] | LeftOut | Instead


@dataclass(frozen=True)
class ByValue:
    """The words of each value, "*" those of any other. `why`: what differs, for the line that says so, by value."""

    words: dict[str, str | LeftOut | Instead]
    why: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Computed:
    """`words_of(value)` -> words, entries of --dataset, LeftOut or Instead; `text` says what it does."""

    words_of: Callable[[Any], Outcome]
    text: str


Entry = str | LeftOut | Instead | ByValue | Computed
Names = dict[str, Entry]


@cache
def sections_of(program: str) -> dict:
    """The sections of a program's file; every scalar is text, and one that is left empty is ""."""
    import yaml

    loader: type[yaml.BaseLoader | yaml.CBaseLoader]
    if yaml.__with_libyaml__:
        loader = yaml.CBaseLoader
    else:
        loader = yaml.BaseLoader
    return yaml.load((Path(__file__).parent / FILES[program]).read_bytes(), loader)
