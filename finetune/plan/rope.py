"""--rope_scaling and --rope_factor: a base for rows longer than it was trained on."""

from finetune.errors import PlanError
from finetune.model_files.files import ModelFiles
from finetune.model_files.rope_scaling import rope_of, scaled
from finetune.parts.rope_scaling import MOST, NONE
from finetune.plan.asked import Change, Said
from finetune.plan.facts import Facts


def with_rope_scaling(files: ModelFiles, flags: dict) -> tuple[ModelFiles, float | None]:
    """(the files with the config that --rope_scaling, --rope_factor and --context_length ask for, its factor). Raises
    PlanError for a model without such positions, and for rows that it takes as it is.
    """
    word = flags.get("rope_scaling") or NONE
    if word == NONE:
        return files, None
    said = f"--rope_scaling {word}"
    factor = flags.get("rope_factor")
    if factor is None:
        factor = _factor(flags.get("context_length"), rope_of(files, said)[1], said)
    return scaled(files, word, factor, said), factor


def _factor(length: object, limit: int, said: str) -> float:
    """The positions that rows of this length need, divided by the base's. Raises PlanError."""
    if not isinstance(length, int):
        raise PlanError(f"{said}: how much longer rows get is not said. Give --rope_factor, or --context_length.")
    if length <= limit:
        raise PlanError(f"{said}: --context_length {length} is within the {limit} positions of the base. Omit it.")
    if length > MOST * limit:
        most = int(MOST * limit)
        raise PlanError(
            f"{said}: --context_length {length} is over {MOST:g} times the {limit} of the base. Use {most}."
        )
    return length / limit


def rope_factor(facts: Facts) -> Said:
    """--rope_factor, where --context_length says it."""
    if facts.rope_factor is not None:
        yield Change("rope_factor", facts.rope_factor, "--context_length divided by the base's longest row")
