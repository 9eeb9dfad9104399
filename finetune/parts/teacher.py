"""The model that a run learns from."""

from dataclasses import dataclass
from pathlib import Path

from finetune.parts.fields import Settings


@dataclass(frozen=True)
class TeacherPlan:
    """`model`: an ID, a folder or a checkpoint; `top_k`: tokens kept at each target; `bits`: of its weights, None: as
    it was trained; `offload`: where its layers are, see --base_offload; `cache`: the folder that keeps what it gave,
    None: the user's. `stays`: it judges answers of the model's own, and keeps nothing.
    """

    model: str
    top_k: int
    bits: int | None
    offload: str
    cache: Path | None
    stays: bool

    @property
    def is_served(self) -> bool:
        """True for the address of a server, which is asked over the network."""
        return is_address(self.model)

    @classmethod
    def of(cls, settings: Settings) -> "TeacherPlan | None":
        if settings.teacher is None:
            return None
        cache = None
        if settings.teacher_cache != "auto":
            cache = Path(settings.teacher_cache).expanduser().absolute()
        return cls(
            settings.teacher,
            settings.teacher_top_k,
            settings.teacher_bits,
            settings.teacher_offload,
            cache,
            settings.on_policy_fraction > 0,
        )


def is_address(model: str | None) -> bool:
    return model is not None and model.lower().startswith(("http://", "https://"))
