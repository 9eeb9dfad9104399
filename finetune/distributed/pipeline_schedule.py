"""The order of forwards and backwards on each stage of a pipeline, without a framework.

GPipe (Huang et al. 2019) runs all forwards first. 1F1B (Narayanan et al. 2019) lets at most as many microbatches be in
flight as stages follow. Interleaved 1F1B (Narayanan et al. 2021) gives each stage several runs of layers, chunks, so
that a microbatch passes every stage several times and a stage waits for shorter ones at the start and end of a step.

Zero-bubble schedules (Qi et al. 2023) are not here. They compute gradients of inputs, which the stage before awaits,
apart from gradients of weights, with which they fill the bubble. Our backwards of products, attention and the head give
both in one pass (LoRAProduct, GroupedProduct, the chunked head), recomputed layers would be recomputed for each, and
FSDP2 reduces a layer's gradients at its backward. Of adapters on frozen weights, where the most is to be gained by
pipelines, the gradients of weights are too small a part to fill a bubble with.
"""

from itertools import pairwise
from typing import NamedTuple

from finetune.parts.parallel import CHUNKS


class Pass(NamedTuple):
    """A forward, or a backward, of one microbatch through one chunk of a stage."""

    is_forward: bool
    microbatch: int
    chunk: int


def order_of_stage(schedule: str, stages: int, stage: int, num_microbatches: int) -> list[Pass]:
    """All passes of one step on a stage. Microbatches go through the chunks in groups of as many as there are stages,
    or a few more; so messages between two stages are sent in the order in which they are awaited.
    """
    chunks = CHUNKS[schedule]
    groups = groups_of(num_microbatches, stages)
    forwards = [Pass(True, i, chunk) for group in groups for chunk in range(chunks) for i in group]
    backwards = [Pass(False, i, chunk) for group in groups for chunk in reversed(range(chunks)) for i in group]
    warmup = num_before_backward(schedule, stages, stage, num_microbatches)
    found = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        found += [forward, backward]
    return found + backwards[len(forwards) - warmup :]


def groups_of(num_microbatches: int, stages: int) -> list[range]:
    """Runs of at least as many microbatches as there are stages; one run if there are fewer."""
    count = max(1, num_microbatches // stages)
    bounds = [-(-num_microbatches * i // count) for i in range(count + 1)]
    return [range(*pair) for pair in pairwise(bounds)]


def num_before_backward(schedule: str, stages: int, stage: int, num_microbatches: int) -> int:
    """Forwards that a stage runs before forwards and backwards alternate."""
    chunks = CHUNKS[schedule]
    following = stages - stage - 1
    total = num_microbatches * chunks
    if schedule == "gpipe":
        return total
    if chunks == 1:
        return min(total, following)
    return min(total, 2 * following + (chunks - 1) * max(map(len, groups_of(num_microbatches, stages))))


def most_in_flight(schedule: str, stages: int) -> int:
    """Microbatches whose activations the first stage keeps at once, of all its layers, if two per stage are run."""
    chunks = CHUNKS[schedule]
    count = 2 * stages
    passes = min(chunks * count, num_before_backward(schedule, stages, 0, count) + 1)
    if stages == 1:
        return 1
    return -(-passes // chunks)
