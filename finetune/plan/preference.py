"""The plan's rules for --preference: what it needs of the data and the model, and what it cannot be combined with."""

from backend_manager import Backend
from finetune.config import DEFAULTS, REFERENCED, RESIDUAL_INITS
from finetune.distributed.accelerate_config import NAMES
from finetune.errors import PlanError
from finetune.plan.draft import Draft
from finetune.plan.run_plan import format_value

# Flags that mean something to some methods only.
OF_METHODS = {
    "preference_beta": ("dpo", "orpo", "kto"),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
    "precompute_ref_log_probs": REFERENCED,
}


def preference_limits(draft: Draft) -> None:
    """Refuses what a method of preference training cannot be combined with."""
    values, method = draft.values, draft.values["preference"]
    for name, methods in OF_METHODS.items():
        if draft.given(name) and method not in methods and values[name] != DEFAULTS[name]:
            raise PlanError(
                f"--{name} {format_value(values[name])}: is for --preference {' and '.join(methods)}, and this run has "
                f"--preference {method}. Omit one of them."
            )
    if method == "none":
        return
    if draft.demo:
        raise PlanError(f"--preference {method}: the demo's rows have no preferences. Add --dataset.")
    if draft.backend is Backend.MLX:
        raise PlanError(f"--preference {method}: the MLX engine has no preference losses. Use --backend cpu.")
    for name, refused, why in (
        ("train_on_prompt", True, "a preference is of answers, so prompts are no targets"),
        ("streaming", True, "the steps of preferences are made of all rows"),
        ("overlong", "split", "an answer is preferred as a whole, not a window of it"),
    ):
        if values[name] == refused:
            raise PlanError(f"--{name} {format_value(refused)}: with --preference {method}, {why}. Omit it.")
    if method == "kto" and not values["desirable_weight"] + values["undesirable_weight"]:
        raise PlanError(
            "--desirable_weight 0: nothing is learned, as --undesirable_weight is 0 too. Raise one of them."
        )
    if method in REFERENCED:
        _check_reference(draft, method)


def _check_reference(draft: Draft, method: str) -> None:
    """The reference is the frozen base with its adapters off: it must be there, and be what training starts from."""
    values, why = draft.values, f"--preference {method} compares with the model before training"
    orpo = "or --preference orpo, which compares with nothing"
    if values["train_type"] == "full":
        raise PlanError(
            f"--train_type full: {why}, which full fine-tuning does not keep. Use --train_type lora or qlora, {orpo}."
        )
    if values["llama_pro_path"]:
        raise PlanError(
            f"--llama_pro_path {values['llama_pro_path']}: {why}, which its trained layers replace. Omit it to train "
            f"an adapter, {orpo}."
        )
    if values["init_lora_weights"] in RESIDUAL_INITS:
        raise PlanError(
            f"--init_lora_weights {values['init_lora_weights']}: {why}, and this changes the base at the start. Use "
            f"default, gaussian or eva, {orpo}."
        )


def preference_parallelism(draft: Draft) -> None:
    """Refuses degrees by which no rank has a document's full log-probability."""
    values, method = draft.values, draft.values["preference"]
    if method == "none":
        return
    for name in ("tp_degree", "cp_degree", "pp_degree"):
        if values[name] > 1:
            raise PlanError(
                f"--{name} {values[name]}: --preference {method} needs documents that one rank computes in full. Use "
                "--dp_shards or --dp_degree."
            )
    if draft.distribution.startswith("zero"):
        raise PlanError(
            f"--parallel_backend accelerate: --preference {method} is untested under {NAMES[draft.distribution]}. Use "
            "--parallel_backend ptd."
        )
    rows = draft.dims.data_ranks * values["gradient_accumulation_steps"]
    if method == "kto" and values["batch_size"] == 1 and rows == 1:
        raise PlanError(
            "--batch_size 1: --preference kto pairs each prompt of a step with another row's answer. Use 2 or more."
        )
