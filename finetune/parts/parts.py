"""A run's settings as typed parts: functions take the part they need, and no flag is read after the plan.

Each part is made from the settled settings in one place, so a changed setting changes its part. A part's class says
what is so (`trains` is an Adapter), its fields say how much; a flag's words are compared here.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from finetune.parts.attention import ATTENTIONS
from finetune.parts.data import DataPlan
from finetune.parts.fields import Settings, part_of
from finetune.parts.memory import MemoryPlan
from finetune.parts.objective import ObjectivePlan
from finetune.parts.output import LogPlan, OutputPlan, ProfilePlan
from finetune.parts.parallel import ParallelPlan
from finetune.parts.parallel_dims import ParallelDims
from finetune.parts.precision import Precision
from finetune.parts.quantization import Quantization
from finetune.parts.reward import RewardPlan
from finetune.parts.sampled import SampledPlan
from finetune.parts.steps import StepsPlan
from finetune.parts.teacher import TeacherPlan
from finetune.parts.trains import Adapter, AllWeights, trains_of


@dataclass(frozen=True)
class Parts:
    """The settled settings and the parts made from them.

    A part is made when it is first read, as plans are compared by the hundred.
    """

    settings: Settings
    dims: ParallelDims = ParallelDims()
    distribution: str = "ptd"

    precision = cached_property(lambda self: Precision.of(self.settings))
    quantization = cached_property(lambda self: Quantization.of(self.settings))
    trains = cached_property(lambda self: trains_of(self.settings))
    objective = cached_property(lambda self: ObjectivePlan.of(self.settings))
    data = cached_property(lambda self: DataPlan.of(self.settings))
    reward = cached_property(lambda self: RewardPlan.of(self.settings))
    teacher = cached_property(lambda self: TeacherPlan.of(self.settings))
    sampled = cached_property(lambda self: SampledPlan.of(self.settings))
    steps = cached_property(lambda self: StepsPlan.of(self.settings))
    parallel = cached_property(lambda self: ParallelPlan.of(self.settings, self.distribution))
    memory = cached_property(lambda self: MemoryPlan.of(self.settings))
    attention = cached_property(lambda self: ATTENTIONS[self.settings.attention])
    output = cached_property(lambda self: OutputPlan.of(self.settings))
    logs = cached_property(lambda self: LogPlan.of(self.settings))
    profile = cached_property(lambda self: part_of(ProfilePlan, self.settings))

    @property
    def all_weights(self) -> bool:
        return isinstance(self.trains, AllWeights)

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimizer step over all data ranks."""
        return self.steps.batch_size * self.steps.accumulation * self.dims.data_ranks

    def with_settings(self, **changes: object):
        """The same with other settings, and the parts that follow from them."""
        return replace(self, settings=self.settings.changed(**changes))


def loads_full_model(plan: Parts) -> str | None:
    """Reason that each rank loads the full model before sharding it; None if each rank reads only its own shard."""
    if isinstance(plan.trains, Adapter) and plan.trains.init.needs_data:
        return f"{plan.trains.init.word} initializes from activations of the unquantized model"
    return None
