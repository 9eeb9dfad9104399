"""report.html: one page of a run, or of several beside one another, made from the files in their folders alone.

No script, no request to any other place: it can be sent to somebody, printed, and opened years later.
"""

import json
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from finetune.checkpoint.saved_run import PLAN, PLAN_SCHEMA, checked_plan
from finetune.checkpoint.signed import is_as_signed, signed
from finetune.config import DEFAULTS, FIELDS
from finetune.errors import PlanError
from finetune.estimate.budget import GIB
from finetune.parts.objectives import CLASSIFY, GENERATE, OBJECTIVES
from finetune.parts.plan_base import format_value
from finetune.run import charts, samples
from finetune.run.charts import POINTS, Chart, Line, Table, number, thinned
from finetune.run.diagnostics import HELD_OUT, SCORED, Finding, by_rows, findings, of_new_answers
from finetune.run.intervals import number_behind, with_interval
from finetune.run.metrics import events_in, memory_rows
from finetune.run.outcome import Outcome, best_title, outcome, with_loss
from finetune.system.files import replace
from finetune.system.json_files import JsonFileError, read_json
from finetune.system.owned_files import kind_of
from finetune.system.program import started_as
from finetune.system.progress import duration
from finetune.system.terminal import clean
from finetune.system.untrusted import untrusted

PAGE = "report.html"
TEMPLATE = "report.html.jinja"
REFRESH_S = 5  # of a live page
SCORES = ("exact_match", "contains", "numeric", "json", "regex", "choice")
FRACTIONS = (*SCORES, "targets_right", "rows_right", "accuracy", "macro_f1", "recall_at_1")
# What is measured on the rows of each digest of the start event, and what differs where digests do.
ROWS_OF = {
    "held_out_sha256": ("the losses of held-out rows", "lists of tokens (other rows, order, template or tokenizer)"),
    "scored_sha256": ("the scores", "lists of rows (other rows, or another order)"),
}
# Settings by which an answer is scored, of the score of this name; None: of all.
SCORED_BY = {"score_pattern": "regex", "score_max_new_tokens": None}
# Measures of a run from rewards: its result, and those with charts of their own.
REWARDS = ("reward", "frac_reward_zero_std", "completions/")
SAMPLED = ("reward", "reward_best", "entropy")  # of these, what runs are compared by
COMPLETIONS = "completions/"
MOST_PROMPTS = 8
MOST_REWARDED = 10  # steps whose sampled answers are shown
PICTURE = "data:image/png;base64,"  # how the pictures of samples.jsonl begin
MOST_WRONG = 64
MOST_TEXT = 700


@dataclass
class Run:
    """A run as the files of its folder say it. `by_kind`: its events; `last`: the last start or end in the log's order,
    as a clock may be set back between a start and a resume; `losses`: its evaluations, apart by the rows held out;
    `scores`: also by the rows scored.
    """

    folder: Path
    name: str
    by_kind: dict[str, list[dict]]
    plan: dict
    samples: list[dict]
    last: dict
    losses: list[list[dict]] = field(default_factory=lambda: [[]])
    scores: list[list[dict]] = field(default_factory=lambda: [[]])
    findings: list[Finding] = field(default_factory=list)

    @property
    def measured(self) -> list[dict]:
        """The evaluations of the rows held out last."""
        return self.losses[-1]

    @property
    def settled(self) -> dict:
        return self.plan.get("settled", {})

    @property
    def start(self) -> dict:
        if self.of("start"):
            return self.of("start")[-1]
        return {}

    @property
    def end(self) -> dict:
        """The last end event, unless the run went on after it."""
        if self.last.get("event") == "end":
            return self.last
        return {}

    @property
    def outcome(self) -> Outcome:
        return outcome(self.end, self.of("start"), self.of("step"), self.measured, self.settled, self.findings)

    def of(self, kind: str) -> list[dict]:
        return self.by_kind.get(kind, [])

    def points(self, kind: str, value: str | Callable[[dict], float | None]) -> list[tuple[float, float]]:
        """(step, value) of the events of a kind that have it, and are of this step's weights; of evaluations, those on
        the rows of the last.
        """
        if kind != "eval" or not isinstance(value, str):
            return points_in(self.of(kind), value)
        return points_in((self.losses if is_loss(value) else self.scores)[-1], value)

    def evaluated_lines(self, label: str, name: str) -> list[Line]:
        """A line of dots of an evaluated value for each set of rows that it was measured on."""
        *others, last = self.losses if is_loss(name) else self.scores
        lines = [
            Line(f"{counted(label, name, events)}, other rows before", points_in(events, name), dots=True)
            for events in others
        ]
        lines.append(Line(counted(label, name, last), points_in(last, name), dots=True))
        return [line for line in lines if line.points]

    def evaluated(self) -> list[dict]:
        """The eval events, but for that of weights of an earlier step, which were put back."""
        return [event for event in self.of("eval") if "of_step" not in event]

    def published(self) -> dict:
        """The last eval event, if it is of weights of an earlier step, which were published; {} else."""
        for event in self.of("eval")[-1:]:
            if "of_step" in event:
                return event
        return {}

    def best(self) -> dict | None:
        """The evaluation with the lowest loss after the first step, if there are several."""
        after = [e for e in with_loss(self.measured) if e.get("step")]
        if len(after) > 1:
            return min(after, key=lambda e: e["loss"])
        return None

    def best_weights(self) -> Path | None:
        """The folder of the best evaluation's weights."""
        folder = self.folder / "best"
        return folder if self.best() and folder.is_dir() else None

    def duration(self) -> list[str]:
        """The run's wall time, as a list of one, or of none if it has not ended."""
        wall_s = self.end.get("wall_s")
        if isinstance(wall_s, int | float):
            return [duration(wall_s)]
        return []


def read_run(folder: Path) -> Run:
    """A run's files, damaged lines left out. Raises PlanError if there is no log."""
    folder = Path(folder)
    if not (folder / "metrics.jsonl").is_file():
        raise PlanError(f"{folder}: has no metrics.jsonl. Give the --output_dir of a run.")
    events = events_in(folder)
    try:
        plan = read_json(folder / PLAN, PLAN_SCHEMA)
        if "arch.hidden_size" not in plan["settled"]:  # of pretrain.py, which has settings of its own
            plan = checked_plan(plan, folder / PLAN)
    except (FileNotFoundError, JsonFileError, PlanError):
        plan = {}
    by_kind: dict[str, list[dict]] = {}
    for event in events:
        by_kind.setdefault(str(event["event"]), []).append(event)
    last: dict = next((event for event in reversed(events) if event["event"] in ("start", "end")), {})
    losses, scores = by_rows(events, HELD_OUT), by_rows(events, SCORED)
    answered = samples.read(folder)
    if len(scores) > 1 and scores[-1]:  # of the rows before, samples.jsonl has the answers
        answered = [sample for sample in answered if sample["step"] >= scores[-1][0]["step"]]
    run = Run(folder, folder.resolve().name, by_kind, plan, answered, last, losses, scores)
    best = folder / "best"
    run.findings = findings(events, run.samples, run.settled, str(best) if best.is_dir() else None)
    return run


def page_of(folders: list[Path], live: bool = False, *, file: Path | None = None) -> str:
    """The page of the runs in these folders. `file`: where it will be, so that a comparison links to the runs' pages.
    Raises PlanError for files that no run wrote so.
    """
    said = ", ".join(map(str, folders))
    with untrusted(
        f"{said}: contains files changed since the run wrote them", "Restore them, or leave the folder out."
    ):
        return page([read_run(folder) for folder in folders], live, file=file)


def words_of(text: str) -> list[str]:
    """The words of a sentence: a browser would break a flag after one of its hyphens."""
    return text.split(" ")


@cache
def template() -> Any:
    """The page's jinja2 template, compiled once: a live page is written again every few seconds."""
    import jinja2

    folder = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=folder, autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    environment.globals |= {**globals(), "charts": charts}  # whose functions the template calls
    return environment.get_template(TEMPLATE)


def page(runs: list[Run], live: bool = False, *, file: Path | None = None) -> str:
    """The page of a run, or the comparison of several. `live`: it asks for itself again until the runs have ended.
    `file`: see page_of.
    """
    is_going_on = live and any(not run.end for run in runs)
    return clean(
        template().render(
            named=list(zip(labels(runs), runs, strict=True)),
            links=links_to(runs, file),
            refresh_s=REFRESH_S if is_going_on else None,
            made=utc(datetime.now(timezone.utc)),
        )
    )


def labels(runs: list[Run]) -> list[str]:
    """The runs' folder names, with as much of their paths as tells them apart."""
    paths = [run.folder.resolve() for run in runs]
    for many in range(1, 20):
        names = ["/".join(path.parts[-many:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{path.name} ({i + 1})" for i, path in enumerate(paths)]


def links_to(runs: list[Run], file: Path | None) -> dict[str, str]:
    """{label: address of the run's own page, from that of `file`}, of runs that have one."""
    if file is None:
        return {}
    from_folder = file.resolve().parent
    found = {}
    for label, run in zip(labels(runs), runs, strict=True):
        own = run.folder.resolve() / PAGE
        if own.is_file():
            found[label] = quote(os.path.relpath(own, from_folder))
    return found


def write(file: Path, content: str, flag: str) -> None:
    """Writes a page, signed. Raises PlanError for a file that is no page of ours, or was edited."""
    try:
        if kind_of(file) and (kind_of(file) != "a file" or not is_as_signed(file)):
            raise PlanError(f"{flag} {file}: exists and is not an unmodified report. Give another file.")
        with replace(file) as out:
            out.write(signed(content).encode("utf-8", "replace"))
    except OSError as error:
        raise PlanError(f"{flag} {file}: cannot be written ({error.strerror}). Give another file.") from None


# ---- one run


def headline_facts(run: Run) -> list[str]:
    """Model, data, length and duration of the run."""
    facts = []
    model = run.settled.get("model_name")
    if model:
        facts.append(f"{objective_of(run)}{run.settled.get('train_type', '')} of {model}".strip())
    if run.of("step"):
        facts.append(f"step {run.of('step')[-1].get('step')}")
    return facts + run.duration()


def objective_of(run: Run) -> str:
    """The objective's name and "with", or nothing for next-token."""
    if run.settled.get("task", GENERATE) != GENERATE:
        name = run.settled["task"]
    elif run.settled.get("reward"):
        name = run.settled.get("reward_loss")
    else:
        name = run.settled.get("preference")
    if name in (None, "none"):
        return ""
    return f"{name} with "


def evaluations(run: Run) -> Table:
    """Evaluations before, best and after; of a run that did not finish, or published earlier weights, the last, and
    that of these weights.
    """
    found = run.of("eval")
    own = [event for event in run.scores[-1] if "of_step" not in event] or run.evaluated() or found
    best = run.best()
    published = run.published()
    first = "before"
    if own[0].get("step"):  # a resumed run had no rows before, or others
        first = f"first (step {own[0]['step']})"
    columns = {first: own[0]}
    if best in own:
        columns[best_title(best, own[0])] = best
    last = "after"
    if published or run.end.get("status") != "finished":
        last = f"last (step {own[-1].get('step')})"
    columns[last] = own[-1]
    if published:
        columns[f"published (weights of step {published['of_step']})"] = published
    rows = [[said_name(n), *(shown(n, values, found) for values in columns.values())] for n in numbers_in(found)]
    return Table(["measure", *columns], rows, captioned("Evaluations", numbers_in(found)))


def captioned(caption: str, names: list[str]) -> str:
    """The caption of a table of these measures."""
    if any(name.endswith("macro_f1") for name in names):
        return f"{caption}. In parentheses: the 95 % interval for this number of rows (Wilson; of F1 by resampled rows)"
    if any(map(is_fraction, names)):
        return f"{caption}. In parentheses: the 95 % interval for this number of rows (Wilson)"
    return caption


def confusions(run: Run) -> Table:
    """The labels that the last evaluation took for others, the most frequent first; of a run without labels empty."""
    rows = []
    for event in run.of("eval")[-1:]:
        for prefix, which in (("score_", ", scored rows"), ("", "")):
            for label, found, count, of in event.get(f"{prefix}confusions") or []:
                rows.append([f"{label}{which}", str(found), with_interval("", count / of, [{"num_scored": of}])])
    caption = "Confusions at the last evaluation, the largest first: of the rows of a label, those found to be another"
    return Table(["label", "found", "rows of the label"], rows, f"{caption} (95 % interval, Wilson)")


def trained(run: Run) -> Table:
    """Means over the first and the last steps, of a run from rewards or without evaluations: one step says little."""
    steps = [e for e in run.of("step") if isinstance(e.get("loss"), int | float)]
    events = of_new_answers(steps)
    many = max(1, len(events) // 10)
    parts = {"first": events[:many], "last": events[-many:]}
    if is_rewarded(run):
        names = [name for name in numbers_in(events) if name.startswith(REWARDS)]
        caption = "Rewards of the answers that the run sampled"
    else:
        names = [name for name in numbers_in(events) if name == "loss" or "/" in name]
        caption = "No rows are held out: these are of training rows, which say little about others"
    rows = [[said_name(name), *(mean_of(name, part) for part in parts.values())] for name in names]
    unit = "step" if len(events) == len(steps) else "rollout"
    head = ["training rows, mean", *(f"{which} {many:,} {unit}{'s' * (many > 1)}" for which in parts)]
    return Table(head, rows, caption)


def is_rewarded(run: Run) -> bool:
    return any("reward" in event for event in run.of("step"))


def mean_of(name: str, events: list[dict]) -> str:
    """A measure's mean over the answers or rows of these step events; over their targets if neither is counted."""
    having = [e for e in events if isinstance(e.get(name), int | float)]
    values = [(e[name], e.get("num_answers") or e.get("num_rows") or e.get("num_targets") or 1) for e in having]
    total = sum(weight for _, weight in values)
    mean = sum(value * weight for value, weight in values) / max(1, total)
    if is_fraction(name):
        return f"{mean:.1%} of {total:,}"
    return number(mean)


def numbers_in(events: list[dict]) -> list[str]:
    """Names of the numbers in these events, but for counts."""
    found = dict.fromkeys(
        n for e in events for n, v in e.items() if isinstance(v, int | float) and not isinstance(v, bool)
    )
    counts = ("num_targets", "num_rows", "num_scored", "num_tokens")
    return [n for n in found if n not in ("step", "of_step", "time", *counts)]


def said_name(name: str) -> str:
    return name.replace("_", " ")


def shown(name: str, event: dict, others: list[dict]) -> str:
    """A measure of an eval event, with its number of rows and interval if it is a fraction. `others`: events that may
    know the number of rows.
    """
    value = event.get(name)
    if not isinstance(value, int | float):
        return "–"
    if is_fraction(name):
        return with_interval(name, value, [event, *others], event.get(f"{name}_interval"))
    return number(value)


def is_loss(name: str) -> bool:
    """True for what is measured on the held-out rows whether any are scored or not."""
    return name not in SCORES and not name.startswith("score_")


def points_in(events: list[dict], value: str | Callable[[dict], float | None]) -> list[tuple[float, float]]:
    """(step, value) of the events that have it, and are of this step's weights."""
    read = value if callable(value) else lambda event: event.get(value)
    found = ((event.get("step"), read(event)) for event in events if "of_step" not in event)
    return [(s, v) for s, v in found if isinstance(s, int) and isinstance(v, int | float) and v == v]


def counted(label: str, name: str, events: list[dict]) -> str:
    """The label of a fraction's line, with the number of rows that it is of."""
    many = number_behind(name, events)
    if not is_fraction(name) or many is None:
        return label
    return f"{label}, n = {many:,}"


def is_fraction(name: str) -> bool:
    return name.removeprefix("score_") in FRACTIONS or name.endswith("/accuracies")


def charts_of(run: Run) -> list[Chart]:
    """Every curve of a run, in the order in which one asks for them."""
    predicted = (run.start.get("predicted_memory_bytes") or {}).get("total")
    memory = run.points("step", memory_total)
    lines = [Line("training", run.points("step", "loss")), *run.evaluated_lines("held-out rows", "loss")]
    expected = []
    if predicted:
        expected = [(s, predicted / GIB) for s, _ in (memory[:1] + memory[-1:])]
    unit = ""
    if is_rewarded(run):
        unit = "near 0 by its definition: only its gradient counts"
    found = [*reward_charts(run), Chart("Loss", [line for line in lines if line.points], unit, can_be_logarithmic=True)]
    scores = [n for n in numbers_in(run.of("eval")) if n != "loss" and "/" not in n]
    fractions = [line for n in scores if is_fraction(n) for line in run.evaluated_lines(said_name(n), n)]
    found.append(Chart("Scores", fractions, "fraction right"))
    found += [Chart(said_name(n).capitalize(), run.evaluated_lines(n, n)) for n in scores if not is_fraction(n)]
    found += grouped(run)
    found += [
        Chart("Learning rate", [Line("learning rate", run.points("step", "lr"))]),
        Chart("Gradient norm", [Line("gradient norm", run.points("step", "grad_norm"))], "before clipping"),
        Chart("Load-balancing loss", [Line("auxiliary loss", run.points("step", "aux_loss"))]),
        Chart("Speed", [Line("tokens per second", run.points("step", "tokens_per_s"))], "tokens/s"),
        Chart(
            "Memory", [x for x in (Line("peak of each step", memory), Line("predicted", expected)) if x.points], "GiB"
        ),
        *system_charts(run),
    ]
    return [chart for chart in found if chart]


def reward_charts(run: Run) -> list[Chart]:
    """Curves of a run that learns from rewards: what is rewarded, and the signs that it goes wrong."""
    charts = {
        ("Reward", ""): {"reward": "mean", "reward_best": "best of each group"},
        ("Groups that taught nothing", "fraction of all"): {"frac_reward_zero_std": "answers with one reward"},
        ("Length of the answers", "tokens"): {"completions/mean_length": "mean"},
        ("Answers cut off", "fraction of all"): {"completions/clipped_ratio": "without an end"},
        ("Entropy", "per sampled token"): {"entropy": "of the sampled tokens"},
        ("Divergence from the model before", "per token"): {"kl": "per token"},
    }
    found = []
    for (title, unit), names in charts.items():
        lines = [Line(label, run.points("step", name)) for name, label in names.items()]
        found.append(Chart(title, [line for line in lines if line.points], unit))
    return found


def memory_total(event: dict) -> float | None:
    total = (event.get("memory_bytes") or {}).get("total")
    if isinstance(total, int | float):
        return total / GIB
    return None


def grouped(run: Run) -> list[Chart]:
    """Rewards, log-probabilities and other groups that preferences log as group/name, of training and held-out pairs.
    Accuracies and margins have charts of their own.
    """
    groups: dict[str, list[str]] = {}
    for name in numbers_in([*run.of("eval"), *run.of("step")]):
        group, _, rest = name.partition("/")
        if name.startswith(COMPLETIONS):
            continue
        if rest in ("accuracies", "margins"):
            groups.setdefault(f"{group}: {rest}", []).append(name)
        elif rest:
            groups.setdefault(group, []).append(name)
    found = []
    for key, names in groups.items():
        lines = []
        for name in names:
            label = name.partition("/")[2]
            lines.append(Line(f"{label}, training", run.points("step", name)))
            lines += run.evaluated_lines(f"{label}, held-out", name)
        title = "Parts of the loss" if key == "loss" else key.capitalize()
        found.append(Chart(title, [line for line in lines if line.points]))
    found.sort(key=lambda chart: ":" not in chart.title)
    return found


def system_charts(run: Run) -> list[Chart]:
    def gib(name: str):
        return lambda event: event[name] / GIB if isinstance(event.get(name), int | float) else None

    load = [("cores busy, this process", "cores_busy"), ("load average, the machine", "load_average")]
    memory = [("this process", "resident_bytes"), ("available", "available_bytes")]
    lines = [Line(label, run.points("system", name)) for label, name in load]
    of_memory = [Line(label, run.points("system", gib(name))) for label, name in memory]
    return [
        Chart("Processor", [line for line in lines if len(line.points) > 1], "cores"),
        Chart("Host memory", [line for line in of_memory if len(line.points) > 1], "GiB"),
    ]


def prompts(run: Run) -> list[dict]:
    """Each sampled prompt with its answers, evaluation by evaluation: MOST_WRONG at most that end wrong, then right
    ones up to MOST_PROMPTS in all.
    """
    by_prompt: dict[tuple[str, str], list[dict]] = {}
    for sample in run.samples:
        by_prompt.setdefault((sample["source"], sample["prompt"]), []).append(sample)
    wrong = [item for item in by_prompt.items() if is_wrong(item[1][-1])]
    right = [item for item in by_prompt.items() if not is_wrong(item[1][-1])]
    found = []
    for (source, prompt), taken in [*wrong[:MOST_WRONG], *right[: max(0, MOST_PROMPTS - len(wrong))]]:
        if len(taken) <= 12:
            frames = taken
        else:
            frames = [*taken[:1], *taken[1:-1][:: -(-len(taken) // 10)], taken[-1]]
        frames = [{"word": judgement(s), "at": at_step(s), "answer": s["answer"]} for s in frames]
        shown = taken[-1].get("images")
        pictures = [str(uri) for uri in shown if str(uri).startswith(PICTURE)] if isinstance(shown, list) else []
        expected = taken[-1]["expected"]
        found.append({"source": source, "prompt": prompt, "expected": expected, "frames": frames, "pictures": pictures})
    return found


def judgement(sample: dict) -> str:
    """A sample's answer in a word."""
    if is_wrong(sample):
        return "not as expected"
    return "right" if sample["right"] else "as expected as far as it was sampled"


def is_wrong(sample: dict) -> bool:
    right = sample.get("right", False)
    return right is not None and not right


def at_step(sample: dict) -> str:
    """The step of a sample, and of the weights if they are of another."""
    if "of_step" in sample:
        return f"step {sample['step']}, weights of step {sample['of_step']}"
    return f"step {sample['step']}"


def sampled_answers(run: Run) -> Table:
    """The answers of a step that had the least and the largest reward, of MOST_REWARDED steps over the run."""
    steps = [event for event in of_new_answers(run.of("step")) if event.get("answers")]
    every = max(1, -(-len(steps) // (MOST_REWARDED - 1)))
    chosen = steps[:-1][::every] + steps[-1:]
    rows = []
    for event in chosen:
        for word, answer in zip(("worst", "best"), event["answers"], strict=True):
            texts = [shortened(str(answer[name])) for name in ("prompt", "answer")]
            rows.append([f"{event['step']}, {word}", f"{answer['reward']:.4g}", *texts])
    head = ["step", "reward", "end of the prompt", "answer"]
    return Table(head, rows, "Sampled answers: the worst and the best of a step")


def prompts_line(run: Run) -> str:
    """The line above the samples: how many there are, and how many of the scored rows are wrong."""
    last: dict[tuple[str, str], bool] = {(s["source"], s["prompt"]): is_wrong(s) for s in run.samples}
    wrong = sum(last.values())
    line = f"{len(last)} held-out prompts were answered, {wrong} of them not as expected at the end (shown first)."
    if wrong > MOST_WRONG:
        line += f" {MOST_WRONG} of these are here, all in samples.jsonl."
    scored = [(name, event) for event in run.of("eval")[-1:] for name in event if name in SCORES]
    for name, event in scored:
        line += f" {said_name(name).capitalize()} of the scored rows: {shown(name, event, run.of('eval'))}."
    return line


def shortened(words: str) -> str:
    """Text of models and data without its middle."""
    if len(words) <= MOST_TEXT:
        return words
    return f"{words[: MOST_TEXT // 2]} … {words[-MOST_TEXT // 2 :]}"


def training_rows(run: Run) -> Table:
    counts = run.start.get("data") or {}
    names = run.settled.get("dataset") or run.settled.get("data_paths") or "the demo's"
    rows = [["dataset", ", ".join(map(str, names if isinstance(names, list) else [names]))]]
    rows += [[said_name(name), f"{n:,}"] for name, n in counts.items() if isinstance(n, int) and n]
    return Table(["fact", "training rows"], rows)


def percentiles(lengths: dict) -> str:
    return ", ".join(f"{name} {lengths[name]:,}" for name in ("p50", "p95", "p99", "max") if name in lengths)


def lengths(lengths: dict) -> Chart:
    bars = [(f"≤ {edge}", float(n)) for edge, n in lengths["bins"]]
    return Chart("Rows by length", bars=bars, unit="tokens")


def decisions(run: Run) -> Table:
    """Every setting that the plan decided, with its reason."""
    rows = [
        [str(a["setting"]), format_value(a["requested"]), format_value(a["used"]), str(a["reason"])]
        for a in run.plan["adjustments"]
    ]
    return Table(["setting", "asked for", "used", "reason"], rows, "What the plan decided")


def other_settings(run: Run) -> Table:
    asked = run.plan.get("requested", {})
    rows = []
    for name, value in run.settled.items():
        default = "–"
        if name in DEFAULTS:
            default = format_value(DEFAULTS[name])
        if name in asked:
            rows.append([name, format_value(value), default, "you"])
        elif name in DEFAULTS and value != DEFAULTS[name]:
            rows.append([name, format_value(value), default, "the plan"])
    rows.sort(key=lambda row: row[-1] != "you")
    return Table(["setting", "value", "default", "set by"], rows, "Settings that you gave or the plan changed")


def memory_items(run: Run) -> Table:
    """Predicted and measured bytes, item by item; "–" for all of a part that the log does not have."""
    nothing = {"items": {}, "total": 0}
    predicted = {**nothing, **(run.start.get("predicted_memory_bytes") or {})}
    peak = {**nothing, **(run.end.get("peak_memory_bytes") or {})}

    def mib(part: dict, value: float) -> str:
        if part == nothing:
            return "–"
        return f"{value / 2**20:,.1f}"

    rows = []
    if predicted["items"] or peak["items"]:
        found = memory_rows(predicted, peak)
        rows = [[said_name(name), mib(predicted, one), mib(peak, other)] for name, one, other in found]
    return Table(["item", "predicted, MiB", "measured, MiB"], rows, "Memory above the process after its imports")


def environment_facts(run: Run) -> Table:
    when = run.start.get("time")
    rows = [["folder", str(run.folder)]]
    if isinstance(when, int | float):
        rows.append(["started", utc(datetime.fromtimestamp(when, timezone.utc))])
    rows += [["machine", said_machine(run.start["machine"])]] if run.start.get("machine") else []
    rows += [["backend", str(run.settled["backend"])]] if run.settled.get("backend") else []
    rows += [[name, str(version)] for name, version in (run.start.get("versions") or {}).items() if version]
    rows += [["duration", wall] for wall in run.duration()]
    return Table(["what", "value"], rows, "Environment")


def utc(when: datetime) -> str:
    return when.strftime("%Y-%m-%d %H:%M UTC")


def said_machine(machine: Any) -> str:
    """The processor that the start event describes."""
    if not isinstance(machine, dict):
        return str(machine)
    flags = machine.get("flags")
    more = ""
    if isinstance(flags, list) and flags:
        more = f" ({', '.join(map(str, flags))})"
    return f"{machine.get('model')}, {machine.get('cores')} cores{more}"


def command(run: Run) -> str:
    """The command that starts this run, as run_plan.json has it."""
    asked = run.plan.get("requested", {})
    if not asked:
        return ""
    if "arch.hidden_size" in run.settled:
        return shlex.join([*started_as("pretrain.py").split(), *(f"{name}={_written(v)}" for name, v in asked.items())])
    words = started_as("train.py").split()
    for name, value in asked.items():
        if name in FIELDS and value is not None:
            for one in value if isinstance(value, list) else [value]:
                words += [f"--{name}", json.dumps(one) if isinstance(one, dict) else format_value(one)]
    return shlex.join(words)


def _written(value: Any) -> str:
    if isinstance(value, list):
        return json.dumps(value).replace(" ", "")
    return format_value(value)


# ---- several runs


def results(named: list[tuple[str, Run]], links: dict[str, str]) -> Table:
    names = numbers_in([e for _, run in named for e in run.of("eval")])
    caption = captioned("Results, by the last evaluation", names)
    ends = {"last training loss": "loss"}
    if any(is_rewarded(run) for _, run in named):
        ends["last training reward"] = "reward"
    head = ["run", "outcome", "steps", "duration", *ends, *(said_name(n) for n in names)]
    rows = []
    for label, run in named:
        last = {}
        if run.evaluated():
            last = run.evaluated()[-1]
        rows.append(
            [
                label,
                run.outcome.word,
                str(run.of("step")[-1].get("step", 0) if run.of("step") else 0),
                *(run.duration() or ["–"]),
                *(_last(run, measure) for measure in ends.values()),
                *(shown(n, last, run.of("eval")) for n in names),
            ]
        )
        published = run.published()
        if published:
            cells = [shown(n, published, run.of("eval")) for n in names]
            rows.append([f"{label}, as published: of step {published['of_step']}", *["–"] * (3 + len(ends)), *cells])
    return Table(head, rows, caption, links=links)


def _last(run: Run, measure: str) -> str:
    """A measure's mean over the last tenth of the steps that have it."""
    points = thinned(run.points("step", measure), 10)
    return number(points[-1][1]) if points else "–"


def rows_compared(named: list[tuple[str, Run]]) -> list[str]:
    """Lines on which runs were evaluated on other rows than others, or by another measure."""
    lines = []
    for key, (what, kind) in ROWS_OF.items():
        by_digest: dict[str, list[str]] = {}
        unknown = []
        for label, run in named:
            if not any(is_measured(key, event) for event in run.of("eval")):
                continue
            digest = (run.start.get("facts") or {}).get(key)
            if isinstance(digest, str):
                by_digest.setdefault(digest, []).append(label)
            else:
                unknown.append(label)
        if len(by_digest) > 1:
            sets = "; ".join(", ".join(together) for together in by_digest.values())
            lines.append(f"Not comparable: {what} are of {len(by_digest)} different {kind}, one each for {sets}.")
        if unknown and len(by_digest) + len(unknown) > 1:
            lines.append(f"Which rows {what} are of is not in the log of {', '.join(unknown)}: compare with care.")
    losses = {label: _loss_of(run) for label, run in named if run.of("eval")}
    if len(set(filter(None, losses.values()))) > 1:
        each = "; ".join(f"{label}: {value}" for label, value in losses.items() if value)
        lines.append(f"Not comparable: the losses of held-out rows are other functions of their answers ({each}).")
    for setting, score in SCORED_BY.items():
        scored = [(label, run) for label, run in named if _is_scored(run, score)]
        values = {label: format_value(run.settled.get(setting)) for label, run in scored}
        if len(set(values.values())) > 1:
            each = "; ".join(f"{label}: {value}" for label, value in values.items())
            lines.append(f"Not comparable: {score or 'the scores'} by different --{setting} ({each}).")
    return lines


def _loss_of(run: Run) -> str:
    """The loss of a run from preferences, with its settings and what it is compared with, or of a classifier, with its
    classes; empty for any other run.
    """
    if run.settled.get("task") == CLASSIFY:
        return f"classes {run.settled.get('class_names')}"
    facts = OBJECTIVES.get(str(run.settled.get("preference")))
    if facts is None or not (facts.pairs or facts.labels):
        return ""
    settings = [f"--{name} {format_value(run.settled.get(name))}" for name in facts.arguments.values()]
    if facts.needs_reference:
        settings.append(f"against {format_value(run.settled.get('adapter') or run.settled.get('model_name'))}")
    return " ".join([str(run.settled["preference"]), *settings])


def _is_scored(run: Run, score: str | None) -> bool:
    """True if a run's answers have this score; None: any."""
    return any(is_measured("scored_sha256", event) and (score is None or score in event) for event in run.of("eval"))


def is_measured(key: str, event: dict) -> bool:
    """True if an eval event has what the rows of this digest are measured by."""
    if key == "held_out_sha256":
        return isinstance(event.get("loss"), int | float)
    return any(name in SCORES or name.startswith("score_") for name in event)


def compared_charts(named: list[tuple[str, Run]]) -> list[Chart]:
    """One chart per number, a line per run."""

    def of(
        title: str, kind: str, value: str | Callable[[dict], float | None], unit: str = "", dots: bool = False
    ) -> Chart:
        lines = []
        for label, run in named:
            if isinstance(value, str) and kind == "eval":
                label = counted(label, value, run.of("eval"))
            lines.append(Line(label, run.points(kind, value), dots))
        return Chart(title, [line for line in lines if line.points], unit, can_be_logarithmic="loss" in title.lower())

    scores = [n for n in numbers_in([e for _, run in named for e in run.of("eval")]) if n != "loss"]
    groups = [n for n in numbers_in([e for _, run in named for e in run.of("step")]) if "/" in n or n in SAMPLED]
    found = [
        of("Training loss", "step", "loss"),
        of("Loss of held-out rows", "eval", "loss", dots=True),
        *(of(said_name(n).capitalize(), "eval", n, dots=True) for n in scores if "/" not in n),
        *(of(f"{said_name(n).capitalize()}, held-out", "eval", n, dots=True) for n in scores if "/" in n),
        *(of(f"{said_name(n).capitalize()}, training", "step", n) for n in groups),
        of("Learning rate", "step", "lr"),
        of("Gradient norm", "step", "grad_norm", "before clipping"),
        of("Speed", "step", "tokens_per_s", "tokens/s"),
        of("Memory", "step", memory_total, "GiB"),
    ]
    return [chart for chart in found if chart]


def differences(named: list[tuple[str, Run]]) -> Table:
    """Settings that are not the same in all runs."""
    names = dict.fromkeys(name for _, run in named for name in run.settled)
    written = {name: [format_value(run.settled.get(name)) for _, run in named] for name in names}
    rows = [[name, *values] for name, values in written.items() if len(set(values)) > 1 and name != "day"]
    return Table(["setting", *(label for label, _ in named)], rows)


def are_thinned(drawn: list[Chart]) -> bool:
    return any(len(line.points) > POINTS for chart in drawn for line in chart.lines)
