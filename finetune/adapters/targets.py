"""Layers of a model that get an adapter, by their names: the meaning of --lora_target_modules on every engine."""

import re
from collections.abc import Collection

from finetune.errors import PlanError
from finetune.parts.by_layer import ALPHAS, RANKS
from finetune.parts.engine_limits import DEFAULT_TARGETS
from finetune.parts.trains import Adapter
from finetune.system.patterns import Pattern, ended_in_time

# What PEFT reads as experts of transformers 4, in models whose experts transformers 5 fuses.
PEFT_EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj", "gate", "w1", "w2", "w3")

ROUTERS = frozenset({"gate", "router"})  # last words of their names


def default_targets(linears: list[str]) -> list[str]:
    """The query and value projections. Raises PlanError if the model's are not known."""
    for leaves in DEFAULT_TARGETS:
        found = [n for n in linears if n.rpartition(".")[2] in leaves]
        if found:
            return found
    raise PlanError(
        "--lora_target_modules default: the query and value projections of this model are unknown. Use all."
    )


def layer_of(name: str) -> int | None:
    """Number of the decoder layer that a module of this name is in; None if it is in none."""
    found = re.search(r"\.(\d+)\.", f".{name}.")
    if found:
        return int(found[1])
    return None


def is_in_layers(name: str, count: int, last: int | None, layers: tuple[int, ...] | None) -> bool:
    """True if a module is in the last `last` of `count` decoder layers, or in `layers`, or if both are None."""
    if last is None and layers is None:
        return True
    at = layer_of(name)
    return at is not None and (at >= count - last if last is not None else at in (layers or ()))


def in_layers(names: list[str], every: list[str], last: int | None, layers: tuple[int, ...] | None) -> list[str]:
    """Names within the chosen layers; `every`: names of all layers, which say how many there are. Raises PlanError
    if none is left.
    """
    if last is None and layers is None:
        return names
    count = 1 + max((at for n in every if (at := layer_of(n)) is not None), default=-1)
    found = [n for n in names if is_in_layers(n, count, last, layers)]
    if not found:
        if layers:
            flag = "layers_to_transform " + ",".join(map(str, layers))
        else:
            flag = f"num_layers {last}"
        raise PlanError(f"--{flag}: no layer with an adapter is among them: the model has layers 0 to {count - 1}.")
    return found


def regex_of(targets: str) -> Pattern:
    """--lora_target_modules as a regex on full names. Raises PlanError if it is none."""
    try:
        return Pattern(targets)
    except re.error as error:
        raise PlanError(
            f"--lora_target_modules {targets}: not a valid regex ({error}). Give names, or a regex."
        ) from None


def named_targets(names: list[str], targets: str, unknown: str) -> list[str]:
    """Names matched by comma-separated names or suffixes, or by a regex on full names.
    Raises PlanError; `unknown`: the fact it states about a name that is not there.
    """
    if re.fullmatch(r"[\w.,\s]+", targets):
        endings = [e.strip() for e in targets.split(",") if e.strip()]
        if not endings:
            raise PlanError(f"--lora_target_modules {targets!r}: names nothing. Name layers, or use all.")
        chosen = [n for n in names if any(n == e or n.endswith("." + e) for e in endings)]
        missing = [e for e in endings if not any(n == e or n.endswith("." + e) for n in names)]
    else:
        pattern = regex_of(targets)
        with ended_in_time(f"--lora_target_modules {targets}"):
            chosen = [n for n in names if pattern.fullmatch(n)]
        if chosen:
            missing = []
        else:
            missing = [targets]
    if missing:
        leaves = ", ".join(sorted({n.rpartition(".")[2] for n in names}))
        raise PlanError(f"--lora_target_modules {missing[0]}: {unknown}. Choose from {leaves}, or use all.")
    return chosen


def without_dora(names: list[str], refused: Collection[str], targets: str) -> list[str]:
    """The names without those that PEFT has no DoRA for. Raises PlanError where `targets` names one."""
    held = [name for name in names if name in refused]
    if held and targets != "all":
        raise PlanError(
            f"--use_dora true: PEFT has no DoRA for fused experts, nor for linears it takes for experts, such as "
            f"{held[0]}. Name other layers in --lora_target_modules, or omit --use_dora."
        )
    return [name for name in names if name not in held]


def one_for_experts(adapter: Adapter, owner: str, weights: list[str]) -> Adapter:
    """The adapter of a module's experts, whose weights have one rank and alpha. Raises PlanError."""
    found = [adapter.at(f"{owner}.{weight}") for weight in weights]
    if any(each != found[0] for each in found):
        raise PlanError(
            f"--{RANKS}, --{ALPHAS}: give {' and '.join(weights)} of {owner} different ranks or alphas, and experts of "
            "one module share theirs. Name the module, such as experts\\..*=8."
        )
    return found[0]
