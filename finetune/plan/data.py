"""The plan's rules for data: what can be refused of its flags before a file is read."""

import numpy as np

from finetune.data.columns import parse_columns, parse_names
from finetune.data.reading.mixture import sources_of
from finetune.errors import PlanError
from finetune.estimate import budget
from finetune.plan import conflicts
from finetune.plan.conflicts import check
from finetune.plan.draft import Draft
from finetune.plan.memory import may_shard_vocabulary
from finetune.run.scoring import metrics_of

MULTIPLE = 64  # lengths are rounded up to these
SHORT = 512  # rows up to this length are never cut
UNKNOWN = 512  # if no row can be read


def data_flags(draft: Draft) -> None:
    """Flags about columns and long rows that contradict themselves."""
    values = draft.values
    if values["dataset"]:
        sources_of(values["dataset"])
    check(draft, conflicts.DATA)
    metrics_of(values["score_metric"], values["score_pattern"], "score_metric", "score_pattern")
    columns, ignored = parse_columns(values["columns"]), parse_names(values["ignore_columns"])
    both = [column for column in columns.values() if column.casefold() in ignored]
    if both:
        raise PlanError(f"--ignore_columns {both[0]}: --columns uses it. Give it to one of them.")


def context_length(draft: Draft) -> None:
    """auto: the least of what the rows need, the model can and the memory allows. A number: within the model's."""
    values, limit = draft.values, draft.shape.context_limit if draft.shape else None
    is_open = draft.is_open("context_length")
    if is_open and draft.facts.sample:
        values["context_length"] = "auto"
    if values["context_length"] == "auto" or (is_open and limit and limit < values["context_length"]):
        _auto_length(draft)
    elif limit and values["context_length"] > limit:
        raise PlanError(
            f"--context_length {values['context_length']}: exceeds this model's limit of {limit}. Use at most {limit}."
        )
    length, overlap = values["context_length"], values["window_overlap"]
    if overlap > length // 2:
        raise PlanError(
            f"--window_overlap {overlap}: must be at most half of --context_length {length}. Use {length // 2} or less."
        )


def _auto_length(draft: Draft) -> None:
    used, reason = wanted_length(draft)
    allowed = _allowed_by_memory(draft, used)
    if allowed < used:
        used, reason = allowed, f"what memory allows for one row; {reason}"
    draft.adjust("context_length", used, reason)


def wanted_length(draft: Draft) -> tuple[int, str]:
    """(context length that the rows need and the model allows, why)."""
    sample, limit = draft.data_sample(), draft.shape.context_limit if draft.shape else None
    lengths = sample and sample.lengths
    if lengths:
        needed, share = int(np.percentile(lengths, 99, method="higher")), "99 %"
        if max(lengths) <= max(SHORT, needed * 1.25):  # a few tokens more keep all of them
            needed, share = max(lengths), "all"
        used = max(MULTIPLE, -(-needed // MULTIPLE) * MULTIPLE)
        reason = (
            f"{share} of {len(lengths):,} rows read for this have at most {needed:,} tokens; a multiple of {MULTIPLE}"
        )
    else:
        used, reason = UNKNOWN, "the rows are not read yet"
    if limit and limit < used:
        used, reason = limit, f"this model's limit; {reason}"
    return used, reason


def _allowed_by_memory(draft: Draft, length: int) -> int:
    """The length, halved until one row of it fits with recomputation; as it is if the memory is not known."""
    memory_budget, least = draft.memory_budget(), min(length, MULTIPLE)
    shape = draft.shape.known if draft.shape else None
    if memory_budget is None or shape is None:
        return length
    sparing: dict = dict(use_gradient_checkpointing="true", batch_size=1, microbatch_tokens=None)
    if draft.values["cache_dequantized"] == "auto":
        sparing["cache_dequantized"] = "false"
    if draft.may_offload:
        sparing["use_cpu_offload"] = True
    if may_shard_vocabulary(draft, shape):
        sparing["vocab_parallel"] = "true"
    while length > least:
        plan = draft.parts(**sparing, context_length=length)
        if budget.fits(plan, shape, memory_budget, budget.full_microbatch(plan, 1)):
            break
        length = max(least, length // 2)
    return length
