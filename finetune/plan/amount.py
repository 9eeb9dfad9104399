"""Amount of training: rows per step, epochs and LoRA rank, where they were left open; and notices about the number of
steps.

Small sets are read up to three times, in steps small enough to make about a hundred of them, and the smallest as often
as a hundred steps take: a shorter run ends before it has learned (docs/defaults.md has the measurements). Large batches
hurt adapters more than full fine-tuning ("LoRA Without Regret", Schulman et al. 2025), so only datasets of many steps
get larger ones.
"""

import math
from dataclasses import dataclass

from finetune.config import DEFAULTS
from finetune.data.lengths import DataSample
from finetune.data.sampler import Mix, num_held_out, total_steps
from finetune.errors import PlanError
from finetune.estimate.budget import MemoryBudget
from finetune.estimate.step_time import Machine, seconds_per_step
from finetune.parts.objectives import EMBED
from finetune.parts.parts import Parts
from finetune.parts.trains import Adapter, Trains
from finetune.plan.asked import Asked, Change, Notice, Ranks, Said, Sample
from finetune.plan.facts import Facts

ENOUGH_STEPS = 100
MOST_EPOCHS = 3
MOST_WITH_VALIDATION = 5
PATIENCE = 2
ROWS = 8  # per step
MOST_ROWS = 16  # per step, where a pass has MANY_STEPS of them
MANY_STEPS = 1000
FEW_STEPS = 10
SLOW_S = 1800.0  # of all steps: below it a CPU does
FEW_ROWS = 32  # below it rows are memorized, in about ENOUGH_STEPS: 8 rows are answered after 96 and not after 24
LEAST_RANK = 16
MOST_RANK = 64
TOKENS_PER_WEIGHT = 2  # a weight holds about 2 bits, and a token teaches about one (the same source)
HELD_OUT = 0.1
LEAST_HELD_OUT = 16
MOST_HELD_OUT = 200
ENOUGH_ROWS = 160


@dataclass(frozen=True)
class Length:
    """Training length: rows per step over all ranks, passes over the rows, the most steps (-1: no limit), and how many
    steps learn from the same rows' sampled answers.
    """

    rows_per_step: int
    num_epochs: int
    max_steps: int
    updates: int = 1

    @classmethod
    def of(cls, plan: Parts) -> "Length":
        updates = 1
        if plan.data.reward is not None:
            updates = plan.data.reward.updates_per_rollout
        return cls(plan.rows_per_step, plan.steps.num_epochs, plan.steps.max_steps, updates)

    def steps_of_pass(self, rows: int) -> int:
        """Optimizer steps of one pass over so many rows."""
        return self.updates * total_steps(rows, self.rows_per_step, num_epochs=1, max_steps=-1)

    def steps(self, rows: int) -> int:
        """Optimizer steps of the run, with so many rows a pass."""
        if self.max_steps > 0:
            return self.max_steps
        return self.num_epochs * self.steps_of_pass(rows)


def held_out(asked: Asked, sample: Sample) -> Said:
    """--validation_split auto: rows for the validation loss, where there are enough."""
    split = asked.validation_split
    searches = asked.typed("lr") == "search" and not asked.is_resumed
    if searches and not (asked.validation_dataset or asked.given("validation_split")):
        split = "auto"
        yield Change("validation_split", split)
    if split != "auto":
        return
    found = sample()
    rows = None
    if found:
        rows = found.num_rows
    if rows is None or rows < ENOUGH_ROWS:
        fact = f"{rows} rows are too few to hold some out"
        if rows is None:
            fact = "rows are not counted before training"
        yield Change("validation_split", 0.0, fact)
        return
    number = min(MOST_HELD_OUT, max(LEAST_HELD_OUT, round(HELD_OUT * rows)))
    fraction = round(number / rows, 6)
    yield Change("validation_split", fraction, f"{number} of {rows:,} rows, for the validation loss")


def training_rows(asked: Asked, sample: DataSample | None) -> int | None:
    """Rows of a pass, about: bad ones count. None if they are not known, or were to the run that is resumed."""
    if asked.is_resumed or sample is None or not sample.is_all and asked.streaming:
        return None
    pieces = 1.0
    if not asked.reward:  # prompts are never split
        pieces = sample.pieces(asked.context_length, asked.overlong)
    rows = max(1, round(sample.num_rows * pieces))
    return rows - num_held_out(rows, asked.validation_split)


def amount(asked: Asked, facts: Facts, ranks: Ranks, sample: Sample, rows: int | None) -> Said:
    """--batch_size, --num_epochs and --lora_rank that were left open, by the number of rows; when it is validated."""
    open_ones = [name for name in ("batch_size", "num_epochs") if asked.is_open(name)]
    if asked.is_open("lora_rank") and not asked.continues_adapter:
        open_ones.append("lora_rank")
    if rows is None:
        for name in open_ones:
            if getattr(asked, name) == "auto":
                yield Change(name, DEFAULTS[name])
                asked = asked.changed(**{name: DEFAULTS[name]})
    else:
        for name in open_ones:
            yield Change(name, "auto")
            asked = asked.changed(**{name: "auto"})
        if "batch_size" in open_ones:
            batch_size, reason = rows_per_batch(asked, rows, ranks.dims.data_ranks)
            yield Change("batch_size", batch_size, reason)
            asked = asked.changed(batch_size=batch_size)
        if "num_epochs" in open_ones:
            num_epochs, reason = _epochs(asked, rows, ranks)
            yield Change("num_epochs", num_epochs, reason)
            asked = asked.changed(num_epochs=num_epochs)
        if "lora_rank" in open_ones:
            rank, reason = _rank(asked, facts, rows, sample())
            yield Change("lora_rank", rank, reason)
    several = "num_epochs" in open_ones and asked.num_epochs > 1
    yield from _validation(asked, ranks, rows, several)


def _steps_of_pass(asked: Asked, ranks: Ranks, rows: int) -> int:
    """Optimizer steps of one pass over so many rows."""
    rows_per_step = asked.batch_size * asked.gradient_accumulation_steps * ranks.dims.data_ranks
    updates = asked.updates_per_rollout if asked.reward else 1
    return Length(rows_per_step, num_epochs=1, max_steps=-1, updates=updates).steps_of_pass(rows)


def _validation(asked: Asked, ranks: Ranks, rows: int | None, several: bool) -> Said:
    """--early_stopping and --eval_every that were left open; `several`: passes, of a number that the plan chose."""
    patience = asked.early_stopping
    if asked.is_open("early_stopping"):
        patience = 0
        yield Change("early_stopping", "auto")
        if several and (asked.validation_dataset or asked.validation_split):
            patience = PATIENCE
        reason = "there is validation, and --num_epochs is auto"
        yield Change("early_stopping", patience, reason if patience else "")
    if asked.eval_every == "auto" or patience and asked.is_open("eval_every"):
        yield Change("eval_every", "auto")
        if rows is None:
            yield Change("eval_every", 0, "the number of rows is not known before training")
        else:
            yield Change("eval_every", _steps_of_pass(asked, ranks, rows), "once a pass over the rows")


def best_weights(asked: Asked, trains: Trains) -> Said:
    """--load_best auto: where early stopping keeps an adapter's."""
    if asked.load_best == "auto":
        kept = asked.early_stopping and asked.save_model and isinstance(trains, Adapter)
        yield Change("load_best", "true" if kept else "false")


def rows_per_batch(asked: Asked, rows: int, data_ranks: int) -> tuple[int, str]:
    """(batch_size, why): a power of two rows per step over all ranks, where the other flags allow it."""
    batches = asked.gradient_accumulation_steps * data_ranks
    if rows / MOST_ROWS >= MANY_STEPS:
        per_step = MOST_ROWS
        why = f"{rows:,} rows give {MANY_STEPS} steps and more"
    elif asked.max_steps > 0:
        per_step = min(ROWS, 2 ** int(math.log2(rows)))
        why = f"{per_step} row{'s' * (per_step > 1)} per step"
        if asked.given("max_steps"):
            why += f"; --max_steps {asked.max_steps} decides how many steps there are"
    else:
        passes = MOST_EPOCHS
        if asked.num_epochs != "auto":
            passes = int(asked.num_epochs)
        per_step = min(ROWS, 2 ** int(math.log2(max(1, passes * rows // ENOUGH_STEPS))))
        in_passes = "one pass"
        if passes > 1:
            in_passes = f"{passes} passes"
        why = f"{rows} rows give about {ENOUGH_STEPS} steps in {in_passes}"
        if rows < FEW_ROWS and asked.num_epochs == "auto":
            why = f"{rows} row{'s' * (rows > 1)}: the fewest per step make the most steps"
        if per_step == ROWS:
            why = f"leaves about {max(1, passes * rows // per_step):,} steps in {in_passes}"
    if asked.task == EMBED and asked.hard_negatives != "true" and per_step < min(ROWS, rows):
        per_step = min(ROWS, 2 ** int(math.log2(rows)))
        why = f"a positive is told from those of the step's other rows, of {rows:,}"
    if batches > 1:
        why += f" over {batches} batches"
    return max(1, per_step // batches), why


def _epochs(asked: Asked, rows: int, ranks: Ranks) -> tuple[int, str]:
    if asked.max_steps > 0:
        return 1, f"--max_steps {asked.max_steps} decides"
    most = MOST_EPOCHS
    if asked.validation_dataset or asked.validation_split:
        most = MOST_WITH_VALIDATION
    a_pass = _steps_of_pass(asked, ranks, rows)
    wanted = -(-ENOUGH_STEPS // a_pass)
    used = min(most, wanted)
    are = "row is" if rows == 1 else "rows are"
    fact = f"{rows:,} {are} {a_pass:,} step{'s' * (a_pass > 1)} a pass"
    if rows < FEW_ROWS:
        return wanted, f"{fact}; about {ENOUGH_STEPS} steps are needed to memorize so few"
    if used == 1:
        return used, fact
    return used, f"{fact}; about {ENOUGH_STEPS} steps are wanted, in at most {most} passes"


def _rank(asked: Asked, facts: Facts, rows: int, sample: DataSample | None) -> tuple[int, str]:
    """(rank, why): one whose weights can hold what the tokens teach, at least LEAST_RANK."""
    linears = facts.shape and facts.shape.linears
    if not (sample and sample.lengths and linears) or asked.lora_target_modules != "all":
        return LEAST_RANK, ""
    used = LEAST_RANK
    tokens = rows * min(sum(sample.lengths) / len(sample.lengths), asked.context_length)
    weights = sum(out + inner for _, out, inner in linears)  # of rank 1
    while used < MOST_RANK and TOKENS_PER_WEIGHT * used * weights < tokens:
        used *= 2
    if used == LEAST_RANK:
        return used, ""
    return used, f"about {tokens:,.0f} tokens, and a rank of {used // 2} holds {used * weights:,}"


def slow_on_cpu(
    asked: Asked, facts: Facts, machine: Machine | None, room: MemoryBudget | None, trial: Parts, steps: int | None
) -> Said:
    """Notice that a CPU is slow, unless the run is predicted to take minutes."""
    if not asked.on_cpu:
        return
    shape = facts.known_shape
    if steps and machine and room and shape and shape.is_timed:
        seconds = steps * seconds_per_step(trial, shape, room, machine).total
        if seconds < SLOW_S:
            return
    hint = ""
    if asked.requested.get("backend", "auto") != "auto":
        hint = "; --backend auto uses a GPU where there is one"
    yield Notice(f"training on a CPU is slow{hint}")


def amount_said(sample: Sample, rows: int | None, trial: Parts) -> Said:
    """Notices: how many steps and passes there are, and what they are too few for."""
    if rows is None:
        return
    found = sample()
    if found is None:
        return
    length = Length.of(trial)
    if trial.data.task == EMBED and trial.data.hard_negatives != "true" and min(rows, length.rows_per_step) == 1:
        raise PlanError(
            f"--task {EMBED}: a step of 1 row has no other row to tell its positive from, and nothing is learned. "
            "Use a larger --batch_size, more rows, or --hard_negatives true where each row has one."
        )
    if trial.data.task == EMBED and trial.data.hard_negatives != "true" and rows % length.rows_per_step == 1:
        yield Notice(
            "the last step of a pass has 1 row, whose positive is told from no other: it teaches nothing. Another "
            "--batch_size, or a row more or less, avoids it"
        )
    steps = length.steps(rows)
    a_pass = length.steps_of_pass(rows)
    passes = steps / a_pass
    times = f"{passes:.1f} times".replace(".0", "")
    if round(passes, 1) == 1:
        times = "once"
    about = "about" if found.is_all else "at least"
    unit = trial.data.unit.removesuffix("s")
    each = f"each of {rows:,} {unit}s"
    there = f"{rows:,} {unit}s are"
    if rows == 1:
        each = f"1 {unit}"
        there = f"1 {unit} is"
    how_often = f"{each} is read {times}"
    if len(found.weighted) > 1:
        how_often = f"by their weights, {_by_weights(found, passes)}"
    yield Notice(f"{about} {steps:,} step{'s' * (steps > 1)}; {how_often}")
    if rows < length.rows_per_step:
        yield Notice(f"{there} fewer than the {length.rows_per_step:,} of a step: each step takes all of them")
    if steps < FEW_STEPS:
        if steps == 1:
            change = "1 step changes"
        else:
            change = f"{steps} steps change"
        yield Notice(
            f"{change} a model little: answers may stay as they were. --num_epochs, --max_steps or more rows give more"
        )
    yield from _warmup_said(trial, steps)
    if rows < FEW_ROWS and passes >= 2:
        counted = f"{rows} {unit}{'s' * (rows > 1)}"
        wanted = -(-ENOUGH_STEPS // a_pass)
        if passes < 0.9 * wanted:
            flag = f"--num_epochs {wanted}"
            if length.max_steps > 0:
                flag = f"--max_steps {ENOUGH_STEPS}"
            yield Notice(
                f"{counted}: about {ENOUGH_STEPS} steps are needed to memorize so few, and this run makes {steps}. "
                f"{flag} makes them"
            )
        else:
            yield Notice(f"{counted}: the model will memorize so few, and generalize little")


def _by_weights(sample: DataSample, passes: float) -> str:
    """Words for how often a row of each dataset is read in so many passes."""
    names, sizes, weights = zip(*sample.weighted, strict=True)
    said = []
    for name, size, draws in zip(names, sizes, Mix(sizes, weights).draws(), strict=True):
        said.append(f"a row of {name} is read {passes * draws / size:.1f} times".replace(".0 ", " "))
    return ", ".join(said)


def _warmup_said(trial: Parts, steps: int) -> Said:
    """Notice of a warmup that leaves no step at the full rate, or too few for the decay of wsd."""
    schedule = trial.steps.schedule(steps)
    after = steps - schedule.warmup_steps
    if after <= 0:
        reached = schedule.lr_at(steps) / schedule.lr
        yield Notice(f"all {steps} steps warm up, of {schedule.warmup_steps:,}: the rate ends at {reached:.0%} of --lr")
    elif schedule.kind == "wsd" and (wanted := math.ceil(schedule.decay_ratio * steps)) > after:
        yield Notice(f"the decay of wsd takes {wanted} of {steps} steps, and the warmup leaves {after}: it takes those")
