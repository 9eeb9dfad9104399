"""--context_length in the plan: the least of what the rows need, the model can and the memory allows."""

from dataclasses import replace

import numpy as np

from finetune.data.lengths import DataSample
from finetune.errors import PlanError
from finetune.estimate import budget
from finetune.estimate.budget import MemoryBudget
from finetune.parts.parts import Parts
from finetune.plan.asked import Asked, Change, Ranks, Said, Sample
from finetune.plan.base_offload import may_pass_through
from finetune.plan.facts import Facts
from finetune.plan.memory import may_offload, may_shard_vocabulary

MULTIPLE = 64  # lengths are rounded up to these
SHORT = 512  # rows up to this length are never cut
UNKNOWN = 512  # if no row can be read


def context_length(
    asked: Asked, facts: Facts, ranks: Ranks, trial: Parts, room: MemoryBudget | None, sample: Sample
) -> Said:
    """auto: the least of what the rows need, the model can and the memory allows. A number: within the model's."""
    limit = facts.context_limit
    length = asked.context_length
    is_open = asked.is_open("context_length")
    if is_open and facts.sample:
        length = "auto"
        yield Change("context_length", length)
    if length == "auto" or (is_open and limit and limit < length):
        length, reason = wanted_length(
            with_own_answers(sample(), trial), limit, trial.data.pairs, trial.data.answer_room
        )
        allowed = _allowed_by_memory(asked, facts, ranks, trial, room, length)
        if allowed < length:
            length = allowed
            reason = f"what memory allows for one row; {reason}"
        yield Change("context_length", length, reason)
    elif limit and length > limit:
        raise PlanError(f"--context_length {length}: exceeds this model's limit of {limit}. Use at most {limit}.")
    overlap = asked.window_overlap
    if overlap > length // 2:
        raise PlanError(
            f"--window_overlap {overlap}: must be at most half of --context_length {length}. Use {length // 2} or less."
        )


def with_own_answers(sample: DataSample | None, trial: Parts) -> DataSample | None:
    """The sample, with documents as long as the answers that the model may sample to them, where a teacher judges
    those.
    """
    if sample is None or trial.sampled is None or trial.data.reward is not None:
        return sample
    most = trial.sampled.most
    asked = zip(sample.lengths, sample.prompts, strict=True)
    return replace(sample, lengths=tuple(max(n, prompt + most) if prompt > 1 else n for n, prompt in asked))


def wanted_length(
    sample: DataSample | None, limit: int | None, pairs: bool = False, answer_room: int = 0
) -> tuple[int, str]:
    """(context length that the rows need and the model allows, why). `pairs`: lengths are of both answers of a row.
    `answer_room`: tokens of an answer that is sampled after them.
    """
    lengths = sample and sample.lengths
    used = UNKNOWN
    reason = "the rows are not read yet"
    if lengths:
        needed = int(np.percentile(lengths, 99, method="higher"))
        share = "99 %"
        if max(lengths) <= max(SHORT, needed * 1.25):  # a few tokens more keep all of them
            needed = max(lengths)
            share = "all"
        used = max(MULTIPLE, -(-(needed + answer_room) // MULTIPLE) * MULTIPLE)
        rows = f"the {len(lengths):,} rows read have"
        if pairs:
            rows = f"the {len(lengths) // 2:,} pairs read ({len(lengths):,} answers) have"
        elif len(lengths) == 1:
            rows = "the 1 row read has"
        reason = f"{share} of {rows} at most {needed:,} tokens; a multiple of {MULTIPLE}"
        if answer_room:
            reason += f", with {answer_room:,} for an answer"
    if limit and limit < used:
        return limit, f"this model's limit; {reason}"
    return used, reason


def _allowed_by_memory(
    asked: Asked, facts: Facts, ranks: Ranks, trial: Parts, room: MemoryBudget | None, length: int
) -> int:
    """The length, halved until one row of it fits with recomputation; as it is if the memory is not known."""
    shape = facts.known_shape
    if room is None or shape is None:
        return length
    least = min(length, MULTIPLE)
    sparing = trial.with_settings(use_gradient_checkpointing="true", batch_size=1, microbatch_tokens=None)
    if trial.settings.cache_dequantized == "auto":
        sparing = sparing.with_settings(cache_dequantized="false")
    if may_offload(asked, facts, ranks):
        sparing = sparing.with_settings(use_cpu_offload=True)
    if may_shard_vocabulary(facts, trial, shape):
        sparing = sparing.with_settings(vocab_parallel="true")
    if trial.settings.base_offload == "auto" and may_pass_through(facts, ranks, trial.trains):
        sparing = sparing.with_settings(base_offload="disk")
    while length > least:
        plan = sparing.with_settings(context_length=length)
        if budget.fits(plan, shape, room, budget.full_microbatch(plan, 1)):
            break
        length = max(least, length // 2)
    return length
