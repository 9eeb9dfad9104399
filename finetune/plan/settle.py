"""The plan as a fold over ordered functions: a signature names the inputs, the result names what was settled.

A function reads from `asked` only flags that it settles itself or that nothing settles; earlier results come as
arguments. No function reads the result of a later one (tests/plan/test_settle.py).
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

from finetune.data.lengths import DataSample
from finetune.estimate.step_time import Machine
from finetune.model_files.demo_model import DEMO_MODEL
from finetune.plan import (
    amount,
    base_offload,
    conflicts,
    context_length,
    cuda_graphs,
    experts,
    images,
    learning_rate,
    memory,
    mlx,
    optimizer,
    output,
    parallelism,
    precision,
    quantization,
    rope,
    train_type,
    words,
)
from finetune.plan.asked import Asked, Change, Said, Standing
from finetune.plan.facts import Facts
from finetune.plan.machine import machine_of, room_of


@dataclass(frozen=True)
class Step:
    """A function of the plan, and the tables of conflicts that are checked before and after it."""

    function: Callable[..., Said | None]
    before: tuple[conflicts.Conflict, ...] = ()
    after: tuple[conflicts.Conflict, ...] = ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the function's parameters."""
        return tuple(inspect.signature(self.function).parameters)


def demo_model(asked: Asked) -> Said:
    """The demo's model where none is named."""
    if asked.model_name is None:
        yield Change("model_name", DEMO_MODEL)


STEPS = (
    # Words of the command line, as they are meant.
    Step(words.older_words),
    Step(words.rewards, before=conflicts.REWARDS),
    Step(words.scored_rows),
    Step(words.stored_quantized),
    Step(train_type.train_type_asked),
    Step(words.assumed_device, before=conflicts.SETTINGS),
    Step(words.saved_adapter, before=conflicts.SAVED_ADAPTER),
    Step(rope.rope_factor),
    Step(words.datasets),
    Step(words.columns, before=conflicts.DATA),
    Step(words.model, before=(*conflicts.PREFERENCE, *conflicts.TRAIN_TYPE)),
    Step(mlx.mlx_started),
    Step(mlx.mlx_replaces, before=conflicts.MLX),
    # The machine, and how its ranks share the work.
    Step(parallelism.world, after=conflicts.PARALLELISM),
    Step(parallelism.shared_work, after=(*conflicts.REPLICATED, *conflicts.SHARDED)),
    Step(precision.machine),
    Step(precision.precision),
    Step(precision.cpu_matmul),
    Step(parallelism.by_accelerate, after=(*conflicts.ACCELERATE, *conflicts.PREFERENCE_PARALLELISM)),
    # What trains, on which base, by which steps.
    Step(train_type.train_type),
    Step(quantization.quantization),
    Step(memory.recompute_on_apple_gpus),
    Step(optimizer.optimizer, before=conflicts.OPTIMIZER),
    Step(demo_model),
    Step(parallelism.degrees_of_the_model),
    Step(experts.load_balancing, before=conflicts.MODEL),
    Step(parallelism.plans_of_transformers),
    # Data, and how much of them.
    Step(images.images, after=(*conflicts.IMAGES, *conflicts.TEACHER, *conflicts.TASK)),
    Step(context_length.context_length),
    Step(amount.held_out),
    Step(amount.amount, after=conflicts.VALIDATION),
    Step(amount.best_weights),
    # Memory, which all of the above take.
    Step(memory.activation_offload),
    Step(base_offload.base_offload),
    Step(base_offload.memory_of_base),
    Step(base_offload.packed_cache),
    Step(memory.dense_copies),
    Step(memory.attention),
    Step(precision.frozen_products),
    Step(memory.compiling),
    Step(memory.vocabulary),
    Step(memory.memory),
    Step(cuda_graphs.cuda_graphs),
    Step(experts.experts),
    Step(learning_rate.adam_beta2),
    Step(learning_rate.learning_rate, before=conflicts.LR_SEARCH),
    Step(amount.slow_on_cpu),
    Step(amount.amount_said),
    Step(quantization.on_cpu_costs, after=conflicts.SAVING),
    Step(output.async_save),
    Step(output.profiling),
    Step(output.unread),
)
# Arguments that are typed parts of a plan, as settled so far.
PARTS = ("precision", "quantization", "trains", "objective", "memory")


class Fold:
    """The plan of a command line, settled once or again with other facts. The rows are read once."""

    def __init__(self, requested: dict):
        self.requested = requested
        self.samples: list[DataSample | None] = []

    def settle(self, facts: Facts, **words: str) -> Standing:
        """The plan after all steps, with these words in place of what was asked for. Raises PlanError."""
        plan = Standing.of(self.requested | words, facts)
        for step in STEPS:
            conflicts.check(plan, step.before)
            for said in self.said_by(step, plan):
                plan = plan.after(said)
            conflicts.check(plan, step.after)
        return plan

    def said_by(self, step: Step, plan: Standing) -> Said:
        """Changes, notices and ranks that a step's function settles in this plan."""
        arguments = {name: self.argument(name, plan) for name in step.names}
        yield from step.function(**arguments) or ()

    def argument(self, name: str, plan: Standing):
        """The value of a parameter of a step's function."""
        if name in PARTS:
            return getattr(plan.parts, name)
        return ARGUMENTS[name](self, plan)

    def sample(self, plan: Standing) -> DataSample | None:
        """Some rows of the data, read once; None if they cannot be read now."""
        if plan.facts.sample is None:
            return None
        if not self.samples:
            self.samples.append(plan.facts.sample(plan.parts.data))
        return self.samples[0]

    def rows(self, plan: Standing) -> int | None:
        """Rows of a pass, about; None if they are not known."""
        if plan.asked.is_resumed:
            return None
        return amount.training_rows(plan.asked, self.sample(plan))

    def steps(self, plan: Standing) -> int | None:
        """Optimizer steps of the run; None if they are not known."""
        rows = self.rows(plan)
        if rows is None and plan.asked.max_steps <= 0:
            return None
        return amount.Length.of(plan.parts).steps(rows or 1)

    def machine(self, plan: Standing) -> Machine | None:
        """The devices for which the time of a step is predicted; None where nothing was probed or assumed."""
        return machine_of(plan.asked, plan.facts, plan.ranks, partial(self.sample, plan))


# Arguments of the steps' functions, by name.
ARGUMENTS: dict[str, Callable[[Fold, Standing], object]] = {
    "asked": lambda fold, plan: plan.asked,
    "facts": lambda fold, plan: plan.facts,
    "ranks": lambda fold, plan: plan.ranks,
    "room": lambda fold, plan: room_of(plan.asked, plan.facts, plan.ranks),
    "machine": Fold.machine,
    "sample": lambda fold, plan: partial(fold.sample, plan),
    "rows": Fold.rows,
    "steps": Fold.steps,
    "length": lambda fold, plan: amount.Length.of(plan.parts),
    "trial": lambda fold, plan: plan.parts,
    "quantizes": lambda fold, plan: plan.asked.train_type == "qlora",
}
