"""A made-up source of steps, arrays and objective compose with layouts, accumulation, ranks and resume as they are."""

import copy
from dataclasses import replace

import numpy as np
import pytest

from finetune.distributed.env import RankEnv
from finetune.parts.parts import Parts
from finetune.parts.train_state import TrainState
from finetune.torch_engine.parallel.process_groups import SINGLE_PROCESS, ProcessGroups
from tests.support import cases, ranks
from tests.support.engine_access import process_groups
from tests.support.sampled_answers import PolicyGradient, SampledAnswers

ROWS = 6  # of a step
LAYOUTS = ("DDP 2", "FSDP2 2", "TP 2", "CP 2", "PP 2")


def engine_of(groups=SINGLE_PROCESS, layout: str = "auto", kind: str = "lora recomputed"):
    """An engine that learns by the made-up objective."""
    built = cases.build(cases.CASES[kind], groups)
    built.objective = PolicyGradient()
    if layout != "auto":
        built.verify(layout)
    return built


def steps(built, number: int = 3, state=None, temperature: float = 0.0, **settings) -> list[list[float]]:
    """[loss, norm, reward] of each of the steps on rows of the made-up source."""
    dims = process_groups(built).dims
    own = {"batch_layout": built.layout, "microbatch_tokens": 20, "batch_size": ROWS // dims.data_ranks}
    plan = Parts(replace(built.plan.settings, **own | settings), dims=dims)
    source = SampledAnswers(None, set(), cases.DATA, None, [], None, None, temperature=temperature)
    state = state or TrainState(total_steps=number, index=len(cases.DATA) - 3)  # of two ranks one has fewer rows
    found = []
    for _ in range(number):
        microbatches, _, cursor = source.step(plan, state, built)
        result = built.train_step(microbatches, 1e-3)
        source.count_step(state)
        state.advance(result, cursor)
        found.append([result.loss, result.grad_norm, result.metrics["reward"], result.metrics["deviation"]])
    return found


@pytest.fixture(scope="module")
def whole() -> list[list[float]]:
    """The steps of one process in one batch each."""
    found = steps(engine_of())
    assert len({reward for _, _, reward, _ in found}) > 1 and all(deviation for *_, deviation in found)
    return found


def test_sampled_steps_are_the_same_in_one_microbatch_or_accumulated(whole):
    found = steps(engine_of(), microbatch_tokens=1000)
    np.testing.assert_allclose(found, whole, rtol=1e-4, atol=1e-6)  # fp32, through Adam
    found = steps(engine_of(), batch_size=1, gradient_accumulation_steps=ROWS)
    np.testing.assert_allclose(found, whole, rtol=1e-4, atol=1e-6)


def test_sampled_steps_are_the_same_padded_as_packed(whole):
    np.testing.assert_allclose(steps(engine_of(layout="padded")), whole, rtol=1e-4, atol=1e-6)  # fp32, through Adam


def test_recomputed_sampled_steps_are_those_that_keep_activations(whole):
    np.testing.assert_allclose(steps(engine_of(kind="lora")), whole, rtol=1e-6)


def test_resumed_sampled_steps_are_bitwise_the_uninterrupted_ones():
    first = engine_of()
    state = TrainState(total_steps=4)
    steps(first, 2, state, temperature=1.0)
    kept = copy.deepcopy((first.trainable_state(), *first.optimizer_state(), first.rng_state())), copy.deepcopy(state)
    wanted = steps(first, 2, state, temperature=1.0)
    second = engine_of()
    second.load_state(*kept[0])
    assert steps(second, 2, kept[1], temperature=1.0) == wanted
    third = engine_of()
    assert steps(third, 2, copy.deepcopy(kept[1]), temperature=1.0) != wanted


def sampled_on_ranks(rank: int, size: int, layouts: list[str]) -> list[list]:
    """The steps on each layout of the ranks."""
    return [steps(engine_of(ProcessGroups.of(RankEnv(rank, size), cases.LAYOUTS[n], cases.DEVICE))) for n in layouts]


def test_sampled_steps_on_two_ranks_are_those_of_one(whole, tmp_path):
    for of_rank in ranks.run(2, sampled_on_ranks, tmp_path, layouts=LAYOUTS):
        for layout, found in zip(LAYOUTS, of_rank, strict=True):
            # Sums over ranks in another order, through two steps of Adam; fp32.
            np.testing.assert_allclose(found, whole, rtol=1e-4, atol=1e-6, err_msg=layout)
