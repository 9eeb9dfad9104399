"""The settings that the user asked for, and the plan while its functions settle them."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from backend_manager import Backend
from finetune.config import DEFAULTS, TrainConfig, settings_asked
from finetune.data.lengths import DataSample
from finetune.estimate.rates import is_apple
from finetune.parts.parallel_dims import ParallelDims
from finetune.parts.parts import Parts
from finetune.parts.plan_base import Adjustment
from finetune.plan.demo import demo_defaults
from finetune.plan.facts import Facts


class Settings(TrainConfig):
    """A value per flag while a plan is settled: read as a TrainConfig is, and cheap to change."""

    def __init__(self, **values: Any):
        vars(self).update(values)

    def changed(self, **changes: Any) -> "Settings":
        return Settings(**(vars(self) | changes))


@dataclass(frozen=True)
class Change:
    """A setting's value. With a reason it is an Adjustment of the plan; without, what the open setting means here."""

    setting: str
    value: object
    reason: str = ""


def first_obstacle(obstacles: Iterable[tuple[bool, str]]) -> str | None:
    """The fact of the first obstacle that holds, of (it holds, its fact); None if none does."""
    return next((why for holds, why in obstacles if holds), None)


@dataclass(frozen=True)
class Notice:
    """A line that the user should know."""

    text: str


@dataclass(frozen=True)
class Ranks:
    """Number of ranks, the division of the work over them, and the library that shards and reduces.

    `local`: ranks on this machine. `distribution`: a key of accelerate_config.NAMES.
    """

    dims: ParallelDims = ParallelDims()
    local: int = 1
    distribution: str = "ptd"


# By a function of the plan, in the order in which the plan prints it.
Said = Iterator[Change | Notice | Ranks]
Sample = Callable[[], DataSample | None]  # some rows of the data, read when they are first asked for


@dataclass(frozen=True)
class Asked:
    """Settings asked for: `asked.lr` is a flag's value, of defaults < demo < saved run < user, older words translated.

    A function of the plan reads flags that it settles, and flags that nothing settles; what others settled it takes as
    an argument. `first`: the values before anything was settled. `words`: what the user set. `demo`, `inherited`: what
    the demo and a saved run settled.
    """

    settings: Settings
    first: Settings
    requested: dict
    words: dict
    demo: dict
    inherited: dict | None
    continues: bool
    device: Backend

    @classmethod
    def of(cls, requested: dict, facts: Facts) -> "Asked":
        """The user's settings over those that the demo and a saved run settled."""
        words = settings_asked(requested)
        demo = demo_defaults(words)
        inherited = dict(facts.inherited or {})
        inherited.pop("rows_per_step", None)
        # What a run found by a word that is not the default, a resumed one does not find again.
        found = {flag: value for flag, value in inherited.items() if words.get(flag) in ("auto", "search")}
        settings = Settings(**DEFAULTS | demo | inherited | words | found | facts.degrees)
        given = {flag: value for flag, value in requested.items() if value is not None}
        return cls(settings, settings, given, words, demo, facts.inherited, facts.adapter is not None, facts.backend)

    def __getattr__(self, flag: str) -> Any:
        return getattr(self.settings, flag)

    def given(self, flag: str) -> bool:
        """True if the user set it; the word auto, where it is the default, sets nothing."""
        return flag in self.words

    def typed(self, flag: str) -> Any:
        """The value before anything was settled: of the user, the saved run, the demo, or the default."""
        return getattr(self.first, flag)

    def is_open(self, flag: str) -> bool:
        """True if neither the user, the demo nor the run that is resumed settled it."""
        if self.typed(flag) == "auto":
            return True
        return not (flag in self.words or flag in self.demo or flag in (self.inherited or {}))

    def changed(self, **changes: Any) -> "Asked":
        return replace(self, settings=self.settings.changed(**changes))

    @property
    def is_resumed(self) -> bool:
        """True if a saved run continues, which has settled what was open."""
        return self.inherited is not None

    @property
    def continues_adapter(self) -> bool:
        """True if --adapter's own weights train on, whose rank it has."""
        return self.continues and not self.settings.adapter_merge

    @property
    def assumes_accelerator(self) -> bool:
        """True if the plan is for an accelerator that this machine does not have."""
        return bool(self.settings.assume_memory) and not self.given("backend")

    @property
    def assumes_cuda(self) -> bool:
        """True if that accelerator is not an Apple chip."""
        return self.assumes_accelerator and not is_apple(self.settings.assume_device)

    @property
    def on_cpu(self) -> bool:
        """True if the run is planned for this machine's CPU, not for an assumed device."""
        return self.device is Backend.CPU and not self.assumes_accelerator

    @property
    def trains_in_full(self) -> bool:
        """True if all weights train, which is never chosen for the user."""
        return self.settings.train_type == "full"


@dataclass(frozen=True)
class Standing:
    """A plan while it is settled: what is asked for and settled so far, with its reasons."""

    asked: Asked
    facts: Facts
    ranks: Ranks = Ranks()
    adjustments: tuple[Adjustment, ...] = ()
    notices: tuple[str, ...] = ()

    @classmethod
    def of(cls, requested: dict, facts: Facts) -> "Standing":
        """The plan before anything is settled."""
        return cls(Asked.of(requested, facts), facts)

    def after(self, said: Change | Notice | Ranks) -> "Standing":
        """The plan once a function of it has said this."""
        if isinstance(said, Notice):
            return replace(self, notices=(*self.notices, said.text))
        if isinstance(said, Ranks):
            return replace(self, ranks=said)
        before = getattr(self.asked, said.setting)
        if said.value == before:
            return self
        adjustments = self.adjustments
        if said.reason:
            adjustments = (*adjustments, Adjustment(said.setting, before, said.value, said.reason))
        return replace(self, asked=self.asked.changed(**{said.setting: said.value}), adjustments=adjustments)

    @property
    def parts(self) -> Parts:
        """The typed parts of what is settled so far and of what is asked for otherwise."""
        return Parts(self.asked.settings, self.ranks.dims, self.ranks.distribution)
