"""The plan's rules for how much is trained: rows per step, passes over the rows and the adapters' rank, where they were
left open; and what a user should know of so many steps.

Small sets are read up to three times, in steps small enough that there are about a hundred: below that a run ends
before it has learned (docs/defaults.md has the measurements). Adapters lose more by large batches than full fine-tuning
does ("LoRA Without Regret", Schulman et al. 2025), so larger steps are for data that have many of them.
"""

import math

from finetune.config import DEFAULTS
from finetune.plan import conflicts
from finetune.plan.draft import Draft
from finetune.plan.learning_rate import rows_per_step, steps_of, steps_of_pass

ENOUGH_STEPS = 100
MOST_EPOCHS, MOST_WITH_VALIDATION, PATIENCE = 3, 5, 2
ROWS, MOST_ROWS, MANY_STEPS = 8, 16, 1000  # per step; MOST_ROWS where a pass has MANY_STEPS of them
FEW_STEPS, FEW_ROWS = 10, 32
ENOUGH_PASSES = 12  # over FEW_ROWS or fewer: three leave questions without their answers
LEAST_RANK, MOST_RANK = 16, 64
TOKENS_PER_WEIGHT = 2  # a weight holds about 2 bits, and a token teaches about one (the same source)
HELD_OUT, LEAST_HELD_OUT, MOST_HELD_OUT, ENOUGH_ROWS = 0.1, 16, 200, 160


def amount(draft: Draft) -> None:
    """--batch_size, --num_epochs and --lora_rank that were left open, by the number of rows; validation beside them."""
    values = draft.values
    searches = values["lr"] == "search" and not draft.is_resumed
    if searches and not (values["validation_dataset"] or draft.given("validation_split")):
        values["validation_split"] = "auto"
    if values["validation_split"] == "auto":
        sample = draft.data_sample()
        _hold_out(draft, sample.num_rows if sample else None)
    named = ("batch_size", "num_epochs") if draft.continues_adapter else ("batch_size", "num_epochs", "lora_rank")
    open_ones = [name for name in named if draft.is_open(name)]
    rows = training_rows(draft)
    for name in open_ones:
        if rows is not None:
            values[name] = "auto"
        elif values[name] == "auto":
            values[name] = DEFAULTS[name]
    if rows is not None:
        if "batch_size" in open_ones:
            draft.adjust("batch_size", *rows_per_batch(draft, rows, draft.dims.data_ranks))
        if "num_epochs" in open_ones:
            draft.adjust("num_epochs", *_epochs(draft, rows))
        if "lora_rank" in open_ones:
            _rank(draft, rows)
    _validation(draft, rows, several="num_epochs" in open_ones and values["num_epochs"] > 1)


def _validation(draft: Draft, rows: int | None, several: bool) -> None:
    """--early_stopping, --eval_every and --load_best that were left open; `several`: of epochs that the plan chose."""
    values = draft.values
    if draft.is_open("early_stopping"):
        values["early_stopping"] = "auto"
        if several and (values["validation_dataset"] or values["validation_split"]):
            draft.adjust("early_stopping", PATIENCE, "there is validation, and --num_epochs is auto")
        else:
            values["early_stopping"] = 0
    if values["eval_every"] == "auto" or values["early_stopping"] and draft.is_open("eval_every"):
        values["eval_every"] = "auto"
        if rows is None:
            draft.adjust("eval_every", 0, "the number of rows is not known before training")
        else:
            draft.adjust("eval_every", steps_of_pass(draft, rows), "once a pass over the rows")
    conflicts.check(draft, conflicts.VALIDATION)
    if values["load_best"] == "auto":
        kept = values["early_stopping"] and values["save_model"]
        trains_adapter = values["train_type"] != "full" and not values["llama_pro_path"]
        values["load_best"] = "true" if kept and trains_adapter else "false"


def training_rows(draft: Draft) -> int | None:
    """Rows of a pass, about: bad ones count. None if they are not known, or were to the run that is resumed."""
    sample, values = None if draft.is_resumed else draft.data_sample(), draft.values
    if sample is None or not sample.is_all and values["streaming"]:
        return None
    pieces = sample.windows(values["context_length"]) if values["overlong"] in ("split", "auto") else 1.0
    return max(1, round(sample.num_rows * pieces * (1 - values["validation_split"])))


def _hold_out(draft: Draft, rows: int | None) -> None:
    if rows is None or rows < ENOUGH_ROWS:
        fact = "rows are not counted before training" if rows is None else f"{rows} rows are too few to hold some out"
        draft.adjust("validation_split", 0.0, fact)
        return
    held_out = min(MOST_HELD_OUT, max(LEAST_HELD_OUT, round(HELD_OUT * rows)))
    draft.adjust("validation_split", round(held_out / rows, 6), f"{held_out} of {rows:,} rows, for the validation loss")


def rows_per_batch(draft: Draft, rows: int, data_ranks: int) -> tuple[int, str]:
    """(batch_size, why): a power of two rows per step over all ranks, where the other flags allow it."""
    values, batches = draft.values, draft.values["gradient_accumulation_steps"] * data_ranks
    if rows / MOST_ROWS >= MANY_STEPS:
        per_step, why = MOST_ROWS, f"{rows:,} rows give {MANY_STEPS} steps and more"
    elif values["max_steps"] > 0:
        per_step = min(ROWS, 2 ** int(math.log2(rows)))
        why = f"--max_steps {values['max_steps']} decides how many steps there are"
    else:
        passes = MOST_EPOCHS if values["num_epochs"] == "auto" else int(values["num_epochs"])
        per_step = min(ROWS, 2 ** int(math.log2(max(1, passes * rows // ENOUGH_STEPS))))
        in_passes = f"{passes} passes" if passes > 1 else "one pass"
        why = f"{rows} rows give about {ENOUGH_STEPS} steps in {in_passes}"
        if per_step == ROWS:
            why = "small steps teach adapters more than large ones"
    shared = f" over {batches} batches" if batches > 1 else ""
    return max(1, per_step // batches), why + shared


def _epochs(draft: Draft, rows: int) -> tuple[int, str]:
    values = draft.values
    if values["max_steps"] > 0:
        return 1, f"--max_steps {values['max_steps']} decides"
    validated = values["validation_dataset"] or values["validation_split"]
    most = MOST_WITH_VALIDATION if validated else MOST_EPOCHS
    a_pass = steps_of_pass(draft, rows)
    used = min(most, -(-ENOUGH_STEPS // a_pass))
    fact = f"{rows:,} rows are {a_pass:,} step{'s' * (a_pass > 1)} a pass"
    if used == 1:
        return used, fact
    return used, f"{fact}; about {ENOUGH_STEPS} steps are wanted, in at most {most} passes"


def _rank(draft: Draft, rows: int) -> None:
    """A rank whose weights can hold what the tokens teach, at least LEAST_RANK."""
    sample, shape, values = draft.data_sample(), draft.shape, draft.values
    used, reason = LEAST_RANK, ""
    linears = shape.linears if shape else ()
    if sample and sample.lengths and linears and values["lora_target_modules"] == "all":
        tokens = rows * min(sum(sample.lengths) / len(sample.lengths), values["context_length"])
        weights = sum(out + inner for _, out, inner in linears)  # of rank 1
        while used < MOST_RANK and TOKENS_PER_WEIGHT * used * weights < tokens:
            used *= 2
        reason = f"about {tokens:,.0f} tokens, and a rank of {used // 2} holds {used * weights:,}"
    if used == LEAST_RANK:
        values["lora_rank"] = used
    else:
        draft.adjust("lora_rank", used, reason)


def amount_said(draft: Draft) -> None:
    """Notices: how many steps and passes there are, and what they are too few for."""
    rows = training_rows(draft)
    sample = None if rows is None else draft.data_sample()
    if sample is None or rows is None:
        return
    steps = steps_of(draft, rows)
    passes = steps * rows_per_step(draft) / rows
    times = "once" if round(passes, 1) == 1 else f"{passes:.1f} times".replace(".0", "")
    about = "about" if sample.is_all else "at least"
    draft.notices.append(f"{about} {steps:,} step{'s' * (steps > 1)}; each of {rows:,} rows is read {times}")
    if steps < FEW_STEPS:
        change = "1 step changes" if steps == 1 else f"{steps} steps change"
        draft.notices.append(
            f"{change} a model little: answers may stay as they were. --num_epochs, --max_steps or more rows give more"
        )
    if rows < FEW_ROWS and passes >= 2:
        draft.notices.append(
            f"{rows} rows are few: the model will memorize them and generalize little{_too_few(passes)}"
        )


def _too_few(passes: float) -> str:
    """What a few passes leave of few rows."""
    if passes >= ENOUGH_PASSES:
        return ""
    return f". {passes:.0f} passes may be too few even for that: --num_epochs {ENOUGH_PASSES} reads them more often"
