"""The plan's rule for --adapter: what a run that continues from a trained adapter takes from it."""

from finetune.errors import PlanError
from finetune.plan import conflicts
from finetune.plan.draft import Draft
from finetune.plan.plan_base import format_value


def saved_adapter(draft: Draft) -> None:
    """Settles what --adapter decides. A resumed run inherits it (see resume.OF_ADAPTER) and reads no folder."""
    conflicts.check(draft, conflicts.SAVED_ADAPTER)
    saved, values = draft.facts.adapter, draft.values
    if saved is None or not draft.continues_adapter:
        return
    why = f"as {values['adapter']} was trained"
    for name, own in (("use_dora", saved.dora), ("use_rslora", saved.rslora)):
        if draft.given(name) and values[name] != own:
            raise PlanError(
                f"--{name} {format_value(values[name])}: {values['adapter']} was trained otherwise. Omit it."
            )
        draft.adjust(name, own, why)
    if draft.given("lora_rank") and values["lora_rank"] < saved.rank:
        raise PlanError(
            f"--lora_rank {values['lora_rank']}: is less than the {saved.rank} of --adapter {values['adapter']}. Use "
            f"{saved.rank} or more."
        )
    if not draft.given("lora_rank"):
        draft.adjust("lora_rank", saved.rank, why)
    if not draft.given("lora_alpha"):
        draft.adjust("lora_alpha", saved.alpha_at(values["lora_rank"]), f"the scale {saved.scaling:g}, {why}")
    if not draft.given("lora_target_modules"):
        draft.adjust("lora_target_modules", saved.targets, why)
    if not draft.given("modules_to_save"):
        draft.adjust("modules_to_save", saved.modules, why)
    draft.adjust("new_tokens", saved.new_tokens, why)
    if values["preference"] == "dpo":
        draft.adjust("precompute_ref_log_probs", "true", "the reference is --adapter, which training changes")
