"""Modules of the base that train in full beside adapters and are saved with them, by their names, on every engine."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from finetune.adapters.patterns import PREFIX
from finetune.adapters.saved import PEFT_FILE
from finetune.errors import PlanError


def inside(name: str, modules: Collection[str]) -> bool:
    """True if a module or parameter is one of `modules`, or in one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def outermost(names: Iterable[str]) -> list[str]:
    """The names that are in no other one."""
    chosen = list(names)
    return [name for name in chosen if not inside(name, set(chosen) - {name})]


def ending_in(names: Iterable[str], words: Iterable[str]) -> list[str]:
    """The modules whose names end as asked, as PEFT reads it. Raises PlanError for a word that no name ends with."""
    names = list(names)
    words = list(words)
    for word in words:
        if not any(name.endswith(word) for name in names):
            leaves = ", ".join(sorted({n.rpartition(".")[2] for n in names if not n.rpartition(".")[2].isdecimal()}))
            raise PlanError(f"--modules_to_save {word}: no module of this model is named so. Choose from {leaves}.")
    return [name for name in names if any(name.endswith(word) for word in words)]


def with_ends(words: Iterable[str], ends: Iterable[str]) -> list[str]:
    """The words of adapter_config.json, and the embeddings and head that none of them names."""
    found = list(words)
    return found + [end for end in ends if not any(end.endswith(word) for word in found)]


def check_words(modules: Iterable[str], words: object, own: Collection[str], file: Path) -> None:
    """Raises PlanError if a module that an adapter's config says is saved with it has no weight there. `modules`: those
    of the base that have weights; `own`: names of the base's own weights that are saved; `file`: the config.
    """
    if not isinstance(words, list):
        return
    for name in modules:
        word = next((word for word in words if isinstance(word, str) and name.endswith(word)), None)
        if word and not any(inside(weight, (name,)) for weight in own):
            raise PlanError(
                f"{file}: modules_to_save has {word}, and {PEFT_FILE} no weight of {name}. Give a complete adapter."
            )


def own_weights(tensors: Mapping) -> dict:
    """{name in the base: tensor} of the base's own weights among an adapter's tensors."""
    found = {key: value for key, value in tensors.items() if ".lora_" not in key and key.startswith(PREFIX)}
    return {key.removeprefix(PREFIX).replace(".base_layer.", "."): value for key, value in found.items()}
