"""Findings on a run, from its log and its sampled answers: a line for each fault, none for a good run.

Every limit is far from what good runs of the same kind show, so that a line is worth reading.
"""

import math
import re
from dataclasses import dataclass
from statistics import median

from finetune.parts.answer_metrics import OF_ANSWERS
from finetune.parts.objectives import GENERATE, OBJECTIVES

ROSE = 1.05, 0.02  # validation loss over its lowest: the factor, and nats
WORSE = 1.1, 0.1  # training loss at the end over its start
FEWEST_STEPS = 4
# gradient norm at the end over that at the start
EXPLODED = 30.0
VANISHED = 1e-3
SKIPPED = 0.2  # of the steps, by overflow in fp16
OVERLAP = 0.1  # of the held-out rows that are training rows
BY_FREQUENCY = 0.9  # of the entropy of the answers, which a model that ignores prompts reaches
FEWEST_ROWS = 4
LONG = 12  # words of an answer that can repeat itself
PERIODIC = 0.35  # distinct word triples below which it does
WINDOW = 5  # steps whose mean loss is compared while a run goes on
DIVERGED = 1.5, 0.5  # over the start: the factor, and nats
MOSTLY = 0.8  # of the groups of a rollout
RISES = 0.02  # of a reward, over a run
GROWN = 1.5  # length of answers
MANY_ANSWERS = 64
CUT = 0.95  # of the sampled answers


# Of each kind of finding: when it is printed, and what to look at first. docs/make_trouble.py writes them to a page.
KINDS = {
    "rows alike": (
        "up to one distinct text in twenty training rows; said at the start and at the end",
        "the file, and `--columns`: another column may be the text",
    ),
    "answers alike": (
        "all training rows have one answer; said at the start and at the end",
        "the file, and `--columns`: another column may be the answer",
    ),
    "positives alike": (
        "with `--task embed`, more than a tenth of the rows share their positive; said at the start and at the end",
        "one row per positive, or more rows: in one step two such rows are negatives of each other",
    ),
    "held-out rows in training": (
        "more than a tenth of the validation or scored rows are training rows; said at the start and at the end",
        "hold other rows out, or let `--validation_split auto` do it",
    ),
    "answers of one token": (
        "each answer is one token, and the loss is no better than by how often each occurs",
        "whether the prompts tell the answers apart; then more steps",
    ),
    "validation rose": (
        "the validation loss ends 5 % and 0.02 nats over its lowest; names the step and the folder `best/`",
        "`--early_stopping 2`, more rows, or a lower `--lr` if step 0 was the best",
    ),
    "loss above its start": (
        "the training loss ends 10 % and 0.1 nats above its start, and the validation loss, if any, is no better",
        "a lower `--lr`",
    ),
    "gradients exploded": ("at the end, over thirty times the norm of the start", "a lower `--lr`"),
    "gradients vanished": (
        "at the end, under a thousandth of the norm of the start while the loss stays; or zero in every step",
        "the rows, then a lower `--lr`",
    ),
    "steps skipped": ("more than a fifth of the steps, as fp16 gradients overflowed", "`--precision bf16` or fp32"),
    "reward did not rise": (
        "the mean reward of the last steps is no higher than that of the first",
        "`--refill true`, a lower `--lr`, more answers to each prompt, other rows",
    ),
    "reward rose and the score did not": (
        "the reward rose, and the score of held-out rows did not",
        "more prompts, or a reward that only the answer earns",
    ),
    "answers grew": (
        "answers became half as long again without more reward",
        "another `--reward_loss`, see docs/rewards.md",
    ),
    "answers were cut": (
        "nearly all sampled answers reached `--max_completion_length` without an end",
        "a larger `--max_completion_length`, or SFT first, which teaches the end",
    ),
    "answers repeat themselves": (
        "half of the sampled answers go round in loops that the expected ones do not have, or all are the same",
        "fewer steps, or a lower `--lr`",
    ),
}
# Facts of a start event that tell the rows of its evaluations.
HELD_OUT = ("held_out_sha256",)
SCORED = (*HELD_OUT, "scored_sha256")


@dataclass(frozen=True)
class Finding:
    """`kind`: one of KINDS; `text`: the line."""

    kind: str
    text: str


def findings(events: list[dict], samples: list[dict], settled: dict, best: str | None = None) -> list[Finding]:
    """Faults of a run, most telling first. `events`: of metrics.jsonl; `samples`: of samples.jsonl; `settled`: the
    plan's settings; `best`: the folder with the weights of the lowest validation loss.
    """
    starts = [e for e in events if e["event"] == "start"]
    steps = [e for e in events if e["event"] == "step" and e.get("loss") is not None]
    evaluations = of_present_rows(events)
    facts: dict = {}
    if starts:
        facts = starts[-1].get("facts") or {}
    found: list[Finding | None] = [*data_findings(facts)]
    compares = settled.get("preference", "none") != "none" or settled.get("task", GENERATE) != GENERATE
    if not (compares or settled.get("reward") or settled.get("teacher")):  # their loss is not the answers' per token
        found.append(_learned_nothing(facts, steps))
    found.append(_validation_rose(evaluations, best))
    if not settled.get("reward") and not OBJECTIVES[settled.get("preference", "none")].below_zero:
        found.append(_loss_rose(steps, evaluations))
    found += [_gradients(steps, settled), _skipped(steps), _repeats(samples)]
    sampled = of_new_answers(steps)
    found += [_reward_did_not_rise(sampled), _reward_alone_rose(sampled, evaluations), _answers_grew(sampled)]
    found.append(_answers_cut(sampled, settled))
    return [finding for finding in found if finding]


def of_present_rows(events: list[dict]) -> list[dict]:
    """The eval events of the rows that the last start event holds out: a resumed run may have others than before."""
    return by_rows(events, HELD_OUT)[-1]


def by_rows(events: list[dict], names: tuple[str, ...]) -> list[list[dict]]:
    """The eval events, apart for each set of rows: `names` are the facts of a start event that tell it."""
    found: list[list[dict]] = [[]]
    rows: dict[str, str] = {}
    for event in events:
        if event["event"] == "start":
            facts = event.get("facts") or {}
            now = {name: facts[name] for name in names if facts.get(name)}
            if found[-1] and any(rows.get(name, digest) != digest for name, digest in now.items()):
                found.append([])
            rows |= now
        elif event["event"] == "eval":
            found[-1].append(event)
    return found


def of_new_answers(steps: list[dict]) -> list[dict]:
    """The step events without those of further steps on the same sampled answers, whose measures they repeat."""
    return [event for event in steps if event.get("num_answers") != 0]


def data_findings(facts: dict) -> list[Finding]:
    """Faults of the rows, known before the first step. `facts`: see data.facts."""
    found = []
    same = facts.get("alike")
    held_out = facts.get("held_out")
    if same and same["rows"] >= FEWEST_ROWS:
        if same["distinct_rows"] <= max(1, same["rows"] // 20):
            if same["distinct_rows"] == 1:
                number = "one text"
            else:
                number = f"{same['distinct_rows']} texts"
            text = f"the {same['rows']:,} training rows are all alike: {number}. Look at the file."
            found.append(Finding("rows alike", text))
        elif same["distinct_answers"] == 1 and not facts.get("only_asks"):
            text = f"the {same['rows']:,} training rows all have the same answer: nothing is learned of the prompts."
            found.append(Finding("answers alike", text))
    positives = facts.get("positives")
    if positives and positives["shared"] > OVERLAP * positives["rows"]:
        text = (
            f"{positives['shared']:,} of the {positives['rows']:,} training rows have a positive that another has "
            "too: where a step has both, each learns that the other's is wrong. Keep one row of each positive."
        )
        found.append(Finding("positives alike", text))
    if held_out and held_out["in_training"] > OVERLAP * held_out["rows"]:
        name = held_out["of"]
        shared = held_out["in_training"]
        rows = held_out["rows"]
        if shared == rows:
            which = "is the training set"
        else:
            which = f"has {shared:,} of its {rows:,} rows in the training set"
        text = f"the {name} set {which}: its numbers show memory, not what new rows would get. Hold other rows out."
        found.append(Finding("held-out rows in training", text))
    return found


def _learned_nothing(facts: dict, steps: list[dict]) -> Finding | None:
    same = facts.get("alike")
    if not (same and same["answers_of_one_token"] and same["distinct_answers"] > 1 and len(steps) >= FEWEST_STEPS):
        return None
    loss = mean_loss(steps[-_part(steps) :])
    by_frequency = same["entropy_per_target"]
    if loss < BY_FREQUENCY * by_frequency:
        return None
    return Finding(
        "answers of one token",
        f"every answer is a single token, and the model gives them no better than by how often each occurs (loss "
        f"{loss:.4f}, by frequency {by_frequency:.4f}): prompts say nothing about them, or more steps are needed.",
    )


def _validation_rose(evaluations: list[dict], best: str | None) -> Finding | None:
    losses = [(e["step"], e["loss"]) for e in evaluations if e.get("loss") is not None]
    if len(losses) < 2:
        return None
    (step, lowest), (last_step, last) = min(losses, key=lambda pair: pair[1]), losses[-1]
    if last <= lowest * ROSE[0] or last - lowest <= ROSE[1]:
        return None
    head = f"validation loss rose from {lowest:.4f} at step {step} to {last:.4f} at step {last_step}"
    if step == 0:
        return Finding("validation rose", f"{head}: the model is worse than before. Lower --lr, or look at the rows.")
    kept = ""
    if best:
        kept = f" The weights of step {step} are in {best}."
    return Finding("validation rose", f"{head}: over-fitting.{kept} Use --early_stopping 2, or more rows.")


def _loss_rose(steps: list[dict], evaluations: list[dict]) -> Finding | None:
    held_out = [e["loss"] for e in evaluations if e.get("loss") is not None]
    if len(steps) < FEWEST_STEPS or (len(held_out) > 1 and held_out[-1] < held_out[0]):
        return None
    start = start_loss([e["loss"] for e in steps])
    end = mean_loss(steps[-_part(steps) :])
    if end <= start * WORSE[0] or end - start <= WORSE[1]:
        return None
    text = f"training loss ended at {end:.4f}, above its start of {start:.4f}: the run diverged. Lower --lr."
    return Finding("loss above its start", text)


def start_loss(losses: list[float]) -> float:
    """The highest of the first WINDOW losses that is no more than twice the first: what is beyond has diverged."""
    return max(loss for loss in losses[:WINDOW] if loss <= max(2 * losses[0], losses[0] + DIVERGED[1]))


def _gradients(steps: list[dict], settled: dict) -> Finding | None:
    norms = [e["grad_norm"] for e in steps if isinstance(e.get("grad_norm"), int | float) and not e.get("skipped")]
    if len(norms) < FEWEST_STEPS:
        return None
    part = max(1, len(norms) // 5)
    # Of a rate far too high the second step is beyond already: the start is what is like the first.
    start = median([norm for norm in norms[:part] if norm <= EXPLODED * norms[0]])
    end = median(norms[-part:])
    steps_end = mean_loss(steps[-part:])
    steps_start = mean_loss(steps[:part])
    if max(norms) == 0:
        return Finding(
            "gradients vanished", "the gradient was zero in every step: nothing was learned. Look at the rows."
        )
    limit = max(EXPLODED * start, EXPLODED * (settled.get("grad_norm") or 1.0) / 3)
    if end > limit:
        return Finding(
            "gradients exploded", f"the gradient norm grew from {start:.3g} to {end:.3g}: it exploded. Lower --lr."
        )
    if end < VANISHED * start and steps_end > 0.5 * steps_start:
        text = f"the gradient norm fell from {start:.3g} to {end:.3g} and the loss did not: it vanished. Lower --lr."
        return Finding("gradients vanished", text)
    return None


def _skipped(steps: list[dict]) -> Finding | None:
    many = sum(bool(e.get("skipped")) for e in steps)
    if len(steps) < FEWEST_STEPS * 5 or many <= SKIPPED * len(steps):
        return None
    text = f"{many} of {len(steps)} steps were skipped, as fp16 gradients overflowed. Use --precision bf16 or fp32."
    return Finding("steps skipped", text)


def _repeats(samples: list[dict]) -> Finding | None:
    """Repetitions in the answers after the last evaluation: loops within them, or the same one to every prompt."""
    at_end = []
    if samples and samples[-1]["step"]:
        # Those that were picked as wrong say nothing about how many do.
        at_end = [s for s in samples if s["step"] == samples[-1]["step"] and not s.get("picked")]
    last = list({(s["source"], s["prompt"]): s for s in at_end}.values())  # with --load_best there are two of each
    loops = [s for s in last if repeats_itself(s["answer"]) and not repeats_itself(s["expected"])]
    if last and len(loops) * 2 >= len(last):
        head = f"{len(loops)} of {len(last)} sampled answers repeat themselves"
        text = f"{head}: {_short(loops[0]['answer'])}. Fewer steps or a lower --lr may help."
        return Finding("answers repeat themselves", text)
    answers = {s["answer"].strip() for s in last}
    if len(last) >= 3 and len(answers) == 1 and len({s["expected"].strip() for s in last}) == len(last):
        text = f"all {len(last)} sampled prompts get the same answer: {_short(last[0]['answer'])}. Prompts are ignored."
        return Finding("answers repeat themselves", text)
    return None


def _of_both_ends(steps: list[dict], name: str) -> tuple[float, float] | None:
    """Means of a measure over the first and the last steps; None where there are too few."""
    values = [e[name] for e in steps if isinstance(e.get(name), int | float)]
    part = min(len(values) // 2, max(WINDOW, len(values) // 5))
    if len(values) < FEWEST_STEPS or not part:
        return None
    return sum(values[:part]) / part, sum(values[-part:]) / part


def _reward_did_not_rise(steps: list[dict]) -> Finding | None:
    ends = _of_both_ends(steps, "reward")
    alike = _of_both_ends(steps, "frac_reward_zero_std")
    if ends is None or alike is None or ends[1] > ends[0]:
        return None
    text = f"the reward did not rise: {ends[0]:.3g} in the first steps, {ends[1]:.3g} in the last."
    if alike[0] > MOSTLY:
        text += (
            f" {alike[0]:.0%} of the groups had answers of one reward, which teach nothing: --refill true, other rows"
        )
        return Finding("reward did not rise", f"{text}, or a higher --temperature.")
    return Finding("reward did not rise", f"{text} Lower --lr, or raise --batch_size or --num_generations.")


def _reward_alone_rose(steps: list[dict], evaluations: list[dict]) -> Finding | None:
    ends = _of_both_ends(steps, "reward")
    names = [n for n in (*OF_ANSWERS, "exact_match") if evaluations and n in evaluations[0] and n in evaluations[-1]]
    if ends is None or ends[1] <= ends[0] + RISES or not names:
        return None
    before = evaluations[0][names[0]]
    after = evaluations[-1][names[0]]
    if after > before:
        return None
    return Finding(
        "reward rose and the score did not",
        f"the reward rose from {ends[0]:.3g} to {ends[1]:.3g}, and {names[0].replace('_', ' ')} of held-out rows "
        f"went from {before:.1%} to {after:.1%}: too few prompts, or a reward that is had without the answer.",
    )


def _answers_grew(steps: list[dict]) -> Finding | None:
    ends = _of_both_ends(steps, "reward")
    lengths = _of_both_ends(steps, "completions/mean_length")
    if ends is None or lengths is None or lengths[1] <= GROWN * lengths[0] or ends[1] > ends[0] + RISES:
        return None
    text = (
        f"answers grew from {lengths[0]:.0f} to {lengths[1]:.0f} tokens, and the reward did not: another --reward_loss"
    )
    return Finding("answers grew", f"{text} does not favour length, see docs/rewards.md.")


def _answers_cut(steps: list[dict], settled: dict) -> Finding | None:
    shares = [e["completions/clipped_ratio"] for e in steps if "completions/clipped_ratio" in e]
    if not shares or sum(shares) < CUT * len(shares):
        return None
    text = (
        f"{sum(shares) / len(shares):.0%} of the answers reached --max_completion_length "
        f"{settled.get('max_completion_length')} without an end"
    )
    if settled.get("reward") and settled.get("mask_truncated"):
        text += ", and taught nothing (--mask_truncated)"
    return Finding("answers were cut", f"{text}: raise it, or start from an adapter that has learned to end.")


def repeats_itself(text: str) -> bool:
    """True if a text of at least LONG words (or 4 * LONG characters, if words are fewer) repeats itself in a loop."""
    words = re.findall(r"\w+|[^\w\s]", text)
    if len(words) < LONG:
        words = []
        if len(text.strip()) >= 4 * LONG:
            words = list(text.strip())
    if len(words) < LONG:
        return False
    triples = [tuple(words[i : i + 3]) for i in range(len(words) - 2)]
    return len(set(triples)) < PERIODIC * len(triples)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= 60 else text[:57] + "...")


def mean_loss(steps: list[dict]) -> float:
    """Mean over targets, or over rows where the loss is of rows."""
    weights = [e.get("num_rows") or e.get("num_targets") or 1 for e in steps]
    return sum(e["loss"] * w for e, w in zip(steps, weights, strict=True)) / sum(weights)


def _part(steps: list[dict]) -> int:
    """Number of last steps that stand for the end of a run."""
    return min(len(steps) // 2, max(WINDOW, len(steps) // 10))


class RewardWatch:
    """Notices that nothing was ever rewarded."""

    def __init__(self):
        self.answers = 0
        self.said = False

    def line(self, metrics: dict) -> str | None:
        """Line once MANY_ANSWERS answers all had the least reward, and none differed from the others of its group."""
        if metrics.get("reward") or metrics.get("reward_std"):
            self.said = True
        self.answers += metrics.get("num_answers", 0)
        if self.said or self.answers < MANY_ANSWERS:
            return None
        self.said = True
        return (
            f"no answer of the first {self.answers} was right, so nothing was learned: start from an adapter that can "
            "do some (--adapter), or make the rows easier"
        )


class DivergenceWatch:
    """The mean loss of the last WINDOW steps against the start."""

    def __init__(self):
        self.first: list[float] = []
        self.last: list[float] = []

    def add(self, loss: float) -> None:
        if len(self.first) < WINDOW:
            self.first.append(loss)
        self.last = [*self.last[-WINDOW + 1 :], loss]

    def diverged(self) -> str | None:
        """Line on a loss that is far above its start, if it is."""
        if len(self.first) < WINDOW:
            return None
        start = start_loss(self.first)
        now = math.fsum(self.last) / WINDOW
        if now <= start * DIVERGED[0] or now - start <= DIVERGED[1]:
            return None
        return f"the mean loss of the last {WINDOW} steps is {now:.4f}, and was {start:.4f} at the start"
