"""The plan's rules for --preference: what it needs of the data and the model, and what it cannot be combined with."""

from finetune.plan import conflicts
from finetune.plan.draft import Draft


def preference_limits(draft: Draft) -> None:
    """Refuses what a method of preference training cannot be combined with.

    The reference is the frozen base with its adapters off: it must be there, and be what training starts from.
    """
    conflicts.check(draft, conflicts.PREFERENCE)


def preference_parallelism(draft: Draft) -> None:
    """Refuses ranks, and rows per step, that a method of preference training cannot be combined with."""
    conflicts.check(draft, conflicts.PREFERENCE_PARALLELISM)
