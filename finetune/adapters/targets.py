"""Which of a model's layers get an adapter, by their names: what --lora_target_modules means, on every engine."""

import re

from finetune.errors import PlanError
from finetune.estimate.engine_limits import DEFAULT_TARGETS


def default_targets(linears: list[str]) -> list[str]:
    """The query and value projections. Raises PlanError if the model's are not known."""
    for leaves in DEFAULT_TARGETS:
        found = [n for n in linears if n.rpartition(".")[2] in leaves]
        if found:
            return found
    raise PlanError(
        "--lora_target_modules default: the query and value projections of this model are unknown. Use all."
    )


def named_targets(names: list[str], targets: str, unknown: str) -> list[str]:
    """Those of `names` that comma-separated names or suffixes mean, or a regex on full names.
    Raises PlanError; `unknown`: the fact it states about a name that is not there.
    """
    if re.fullmatch(r"[\w.,\s]+", targets):
        endings = [e.strip() for e in targets.split(",") if e.strip()]
        if not endings:
            raise PlanError(f"--lora_target_modules {targets!r}: names nothing. Name layers, or use all.")
        chosen = [n for n in names if any(n == e or n.endswith("." + e) for e in endings)]
        missing = [e for e in endings if not any(n == e or n.endswith("." + e) for n in names)]
    else:
        try:
            chosen = [n for n in names if re.fullmatch(targets, n)]
        except re.error as error:
            raise PlanError(
                f"--lora_target_modules {targets}: not a valid regex ({error}). Give names, or a regex."
            ) from None
        missing = [] if chosen else [targets]
    if missing:
        leaves = ", ".join(sorted({n.rpartition(".")[2] for n in names}))
        raise PlanError(f"--lora_target_modules {missing[0]}: {unknown}. Choose from {leaves}, or use all.")
    return chosen
