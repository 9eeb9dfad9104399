"""The outcome of a run by its log: the badge at the top of its page."""

import signal
from dataclasses import dataclass

from finetune.errors import (
    CheckpointDamagedError,
    DivergedError,
    NonFiniteError,
    OutOfMemoryError,
    RankLostError,
    StorageError,
)
from finetune.run.charts import number
from finetune.run.diagnostics import Finding

FAILURES = {
    NonFiniteError.exit_code: "loss not finite",
    DivergedError.exit_code: "diverged",
    OutOfMemoryError.exit_code: "out of memory",
    RankLostError.exit_code: "a rank was lost",
    StorageError.exit_code: "a write failed",
    CheckpointDamagedError.exit_code: "checkpoint damaged",
}
SIGNALLED = 128  # an exit code above it is of a signal
# Findings that are the outcome; others are something to look at beside it.
DIVERGED_KINDS = ("loss above its start", "gradients exploded")


@dataclass(frozen=True)
class Outcome:
    """`kind`: good, careful, bad or running, which is its color; `reason`: what the log shows of it."""

    word: str
    kind: str
    reason: str = ""


def outcome(
    end: dict, starts: list[dict], steps: list[dict], evaluations: list[dict], settled: dict, found: list[Finding]
) -> Outcome:
    """The outcome of a run. `end`: its last end event, {} before it; `found`: see diagnostics.findings."""
    if not end:
        return Outcome("running", "running", "or killed: its log has no end")
    code = end.get("exit_code", 0)
    status = end.get("status")
    at = f"step {end.get('step')}"
    if status == "stopped" or SIGNALLED + signal.SIGINT == code:
        return Outcome("interrupted", "bad", f"by {signal_of(code)} at {at}")
    if status != "finished":
        return Outcome(FAILURES.get(code, "failed"), "bad", f"after {at}, exit code {code}")
    if steps and steps[-1].get("loss") is None and not steps[-1].get("skipped"):
        return Outcome("loss not finite", "bad", f"at {at}")
    kinds = [finding.kind for finding in found]
    rise = rise_of(evaluations)
    if any(kind in DIVERGED_KINDS for kind in kinds):
        return Outcome("diverged", "bad", rise)
    if "validation rose" in kinds:
        if best_of(evaluations).get("step") == 0:
            return Outcome("worse than before training", "bad", rise)
        return Outcome("over-fitted", "bad", rise)
    if has_steps_left(end, starts) and ended_early(evaluations, settled):
        best = best_of(evaluations)
        reason = f"no better validation loss than {number(best['loss'])}, of step {best['step']}"
        return Outcome("stopped early", "careful", reason)
    if found:
        return Outcome("finished", "careful", ", ".join(filter(None, ["with something to look at", rise])))
    return Outcome("finished", "good", rise)


def signal_of(code: object) -> str:
    """The name of the signal behind an exit code."""
    if isinstance(code, int) and code - SIGNALLED in {each.value for each in signal.Signals}:
        return signal.Signals(code - SIGNALLED).name
    return "a signal"


def with_loss(evaluations: list[dict]) -> list[dict]:
    """The evaluations with a loss, of the weights of their own step."""
    return [e for e in evaluations if isinstance(e.get("loss"), int | float) and "of_step" not in e]


def best_of(evaluations: list[dict]) -> dict:
    """The evaluation with the lowest loss; {} of none."""
    return min(with_loss(evaluations), key=lambda e: e["loss"], default={})


def best_title(best: dict, before: dict) -> str:
    """Title of the best evaluation after step 0, beside the one before training, whose loss may be lower."""
    first = before.get("loss")
    word = "best trained" if isinstance(first, int | float) and first < best["loss"] else "best"
    return f"{word} (step {best['step']})"


def rise_of(evaluations: list[dict]) -> str:
    """The rise of the validation loss from its lowest to its last value, in words; "" if it did not rise, or the
    weights of the lowest were put back.
    """
    measured = with_loss(evaluations)
    best = best_of(evaluations)
    if not measured or "of_step" in evaluations[-1] or best["loss"] <= 0 or measured[-1]["loss"] <= best["loss"]:
        return ""
    last = measured[-1]
    rise = last["loss"] / best["loss"] - 1
    return (
        f"validation loss {rise:.1%} above its best: {number(best['loss'])} at step {best['step']}, "
        f"{number(last['loss'])} at step {last['step']}"
    )


def has_steps_left(end: dict, starts: list[dict]) -> bool:
    """False if the run took all the steps that its last start announced."""
    total = starts[-1].get("total_steps") if starts else None
    return not isinstance(total, int) or end.get("step") != total


def ended_early(evaluations: list[dict], settled: dict) -> bool:
    """True if the last evaluations were no better, as many as --early_stopping ends a run after."""
    patience = settled.get("early_stopping")
    after = [e for e in with_loss(evaluations) if e["step"]]
    if not isinstance(patience, int) or patience < 1 or not after:
        return False
    best_step = best_of(after)["step"]
    return len({e["step"] for e in after if e["step"] > best_step}) >= patience
