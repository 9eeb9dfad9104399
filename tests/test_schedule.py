import pytest

from finetune.config import SCHEDULES
from finetune.schedule import Schedule, warmup_steps


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
    assert warmup_steps(3, 10, 0.0) == 3
    assert warmup_steps(100, None, 0.0) == 0
