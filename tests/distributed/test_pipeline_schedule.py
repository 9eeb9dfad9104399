"""Orders of forwards and backwards on the stages of a pipeline, run against each other without processes."""

from itertools import product

import pytest

from finetune.distributed.pipeline_schedule import Pass, most_in_flight, order_of_stage
from finetune.parts.parallel import CHUNKS

CASES = [(stages, count) for stages, count in product(range(1, 7), range(1, 20))]


def awaited(one: Pass, stage: int, stages: int, chunks: int) -> tuple | None:
    """What (is_forward, microbatch, place on its way) a pass waits for; None if nothing."""
    place, last = one.chunk * stages + stage, chunks * stages - 1
    if one.is_forward:
        return (True, one.microbatch, place - 1) if place else None
    return (False, one.microbatch, place + 1) if place < last else (True, one.microbatch, last)


def run(schedule: str, stages: int, count: int) -> tuple[int, int]:
    """(rounds in which each stage does one pass or waits, the most microbatches x chunks in flight on the first)."""
    chunks = CHUNKS[schedule]
    left = [order_of_stage(schedule, stages, stage, count) for stage in range(stages)]
    done, rounds, in_flight, most = set(), 0, 0, 0
    while any(left):
        ready = [o and (w := awaited(o[0], s, stages, chunks)) is None or o and w in done for s, o in enumerate(left)]
        assert any(ready), f"every stage of {stages} waits, with {count} microbatches"
        for stage in [s for s, goes in enumerate(ready) if goes]:
            one = left[stage].pop(0)
            done.add((one.is_forward, one.microbatch, one.chunk * stages + stage))
            if stage == 0:
                in_flight += 1 if one.is_forward else -1
                most = max(most, in_flight)
        rounds += 1
    assert len(done) == 2 * count * stages * chunks
    return rounds, most


@pytest.mark.parametrize("schedule", CHUNKS)
def test_no_stage_waits_for_ever_whatever_the_number_of_microbatches(schedule):
    for stages, count in CASES:
        run(schedule, stages, count)


@pytest.mark.parametrize("schedule", CHUNKS)
def test_messages_between_two_stages_are_sent_in_the_order_in_which_they_are_awaited(schedule):
    chunks = CHUNKS[schedule]
    for stages, count in CASES:
        orders = [order_of_stage(schedule, stages, stage, count) for stage in range(stages)]
        for stage, is_forward in product(range(stages), (True, False)):
            step = 1 if is_forward else -1
            other = (stage + step) % stages
            places = [
                (p.microbatch, p.chunk * stages + stage + step) for p in orders[stage] if p.is_forward is is_forward
            ]
            sent = [(i, place) for i, place in places if 0 <= place < stages * chunks]
            taken = [(p.microbatch, p.chunk * stages + other) for p in orders[other] if p.is_forward is is_forward]
            kept = set(sent)
            assert [one for one in taken if one in kept] == sent


def test_interleaved_stages_wait_half_as_long():
    """In passes of half as many layers, of two stages per microbatch: 2 x 2 M of work, and the wait."""
    for stages, count in ((2, 8), (4, 8), (4, 16)):
        plain, interleaved = (run(schedule, stages, count)[0] for schedule in ("1f1b", "interleaved1f1b"))
        assert plain - 2 * count == 2 * (stages - 1)
        assert interleaved - 4 * count == 2 * (stages - 1)  # of half the length


@pytest.mark.parametrize("schedule", CHUNKS)
def test_the_most_in_flight_is_what_the_plan_counts(schedule):
    for stages in range(2, 7):
        most = run(schedule, stages, 2 * stages)[1]
        assert most_in_flight(schedule, stages) == -(-most // CHUNKS[schedule])
