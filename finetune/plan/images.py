"""Images in the plan: whether rows show some that the model sees."""

from finetune.errors import PlanError
from finetune.plan.asked import Asked, Change, Said, Sample
from finetune.plan.facts import Facts


def images(asked: Asked, facts: Facts, sample: Sample) -> Said:
    """auto: if the rows that were read show images and the model sees them."""
    shown = asked.images
    if asked.is_open("images"):
        shown = "auto"
        yield Change("images", shown)
    if shown == "true" and facts.shape and not facts.sees_images:
        raise PlanError(
            f"--images true: {asked.model_name} has no tower for images, or its folder no preprocessor_config.json. "
            "Give a model that sees images."
        )
    if shown == "auto":
        found = None
        if facts.sees_images:
            found = sample()
        shown = "false"
        reason = ""
        if found and found.showing:
            shown = "true"
            reason = f"{found.showing:,} of the rows read show images"
        elif found is None and asked.train_vision != "none" and (facts.sees_images or not facts.shape):
            shown = "true"
            reason = f"--train_vision {asked.train_vision} needs some, and the rows are not read yet"
        yield Change("images", shown, reason)
    if shown == "false" and asked.continues_adapter and facts.adapter is not None and facts.adapter.of_towers:
        raise PlanError(
            f"--adapter {asked.adapter}: trained the tower for images, which a run whose rows show none does not load. "
            "Give rows that show images, or merge the adapter first: export.py."
        )
    if asked.vision_lr_ratio is not None and asked.train_vision in ("none", "lora"):
        raise PlanError(
            f"--vision_lr_ratio {asked.vision_lr_ratio:g}: --train_vision {asked.train_vision} trains nothing in full "
            "that sees images. Omit it, or give --train_vision projector or full."
        )
    if shown == "false" and asked.train_vision != "none":
        raise PlanError(
            f"--train_vision {asked.train_vision}: the rows show no images, from which it would learn. Omit it."
        )
