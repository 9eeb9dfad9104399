import pytest
import torch
from transformers import get_inverse_sqrt_schedule, get_wsd_schedule

from finetune.config import SCHEDULES, WSD_DECAYS
from finetune.errors import PlanError
from finetune.schedule import Schedule, warmup_steps
from tests.support.plans import plan_of


@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_schedule_warms_up_peaks_and_never_rises_above_its_peak(kind):
    schedule = Schedule(kind, 1.0, total_steps=100, warmup_steps=10)
    rates = [schedule.lr_at(step) for step in range(1, 101)]
    assert rates[:10] == sorted(rates[:10]) and rates[0] > 0
    assert rates[10] == max(rates) == 1.0
    assert all(0 <= r <= 1.0 for r in rates)


def test_schedules_end_at_their_documented_rates():
    assert Schedule("constant", 2.0, 10, 0).lr_at(10) == 2.0
    assert Schedule("linear", 1.0, 10, 0).lr_at(10) == pytest.approx(0.1)
    assert Schedule("cosine", 1.0, 1000, 0, 0.1).lr_at(1000) == pytest.approx(0.1, abs=1e-4)
    assert Schedule("exponential", 1.0, 1000, 0).lr_at(1000) == pytest.approx(0.01, rel=0.01)
    restarts = Schedule("cosine_with_restarts", 1.0, 100, 0, 0.0)
    assert restarts.lr_at(51) == pytest.approx(1.0) and restarts.lr_at(50) < 0.01


def test_a_schedule_is_a_function_of_the_step_alone():
    schedule = Schedule("cosine", 1e-3, 50, 5)
    assert [schedule.lr_at(s) for s in (30, 3, 30)] == [schedule.lr_at(30), schedule.lr_at(3), schedule.lr_at(30)]


def test_warm_up_is_given_in_steps_or_as_a_part():
    assert warmup_steps(100, None, 0.05) == 5
    assert warmup_steps(100, 7, 0.0) == 7
    assert warmup_steps(3, 10, 0.0) == 10  # which the run does not reach the end of
    assert warmup_steps(100, None, 0.0) == 0


def test_a_warmup_longer_than_the_run_is_the_one_that_was_asked_for():
    rates = [Schedule("cosine", 1.0, 3, 100).lr_at(step) for step in (1, 2, 3)]
    assert rates == pytest.approx([1 / 101, 2 / 101, 3 / 101])


def rates_of_transformers(schedule, number, *args, **kwargs):
    """The first rates of a LambdaLR at a peak of 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    rates, found = schedule(optimizer, *args, **kwargs), []
    for _ in range(number):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        rates.step()
    return found


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize("decay", WSD_DECAYS)
def test_wsd_is_transformers_schedule_after_the_warmup(decay, warmup):
    """The warmup is that of every schedule here: its first step has a rate, where transformers' has none."""
    theirs = rates_of_transformers(get_wsd_schedule, 100, warmup, 30, num_training_steps=100, decay_type=decay)
    mine = Schedule("wsd", 1.0, 100, warmup, decay_ratio=0.3, decay_type=decay)
    assert [mine.lr_at(step) for step in range(warmup + 1, 101)] == pytest.approx(theirs[warmup:], abs=1e-6)
    assert mine.lr_at(warmup + 1) == mine.lr_at(70) == 1.0 > mine.lr_at(72)


@pytest.mark.parametrize("warmup", [0, 7])
def test_the_inverse_square_root_is_transformers_schedule_after_the_warmup(warmup):
    theirs = rates_of_transformers(get_inverse_sqrt_schedule, 100, warmup)
    mine = Schedule("inverse_sqrt", 1.0, 100, warmup)
    assert [mine.lr_at(step) for step in range(warmup + 1, 101)] == pytest.approx(theirs[warmup:], abs=1e-6)
    assert mine.lr_at(100) < 1.0


def test_a_decay_as_long_as_the_run_starts_after_the_warmup():
    rates = [Schedule("wsd", 1.0, 10, 4, decay_ratio=1.0).lr_at(step) for step in range(1, 11)]
    assert rates[4] == 1.0 and rates[4:] == sorted(rates[4:], reverse=True) and rates[-1] < 0.1


def test_the_decay_of_wsd_is_refused_with_another_schedule():
    plan = plan_of(lr_scheduler="wsd", wsd_decay_ratio=0.25, wsd_decay_type="1-sqrt")
    assert plan.steps.schedule(100).lr_at(76) == plan.steps.lr > plan.steps.schedule(100).lr_at(77)
    with pytest.raises(PlanError, match="--wsd_decay_ratio 0.25: is of --lr_scheduler wsd"):
        plan_of(wsd_decay_ratio=0.25)
