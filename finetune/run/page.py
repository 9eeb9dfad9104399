"""report.html: one page of a run, or of several beside one another, made from the files in their folders alone.

No script, no request to any other place: it can be sent to somebody, printed, and opened years later.
"""

import html
import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from finetune.checkpoint.output_dir import is_as_signed, signed
from finetune.checkpoint.saved_run import PLAN, PLAN_SCHEMA, checked_plan
from finetune.config import DEFAULTS, FIELDS
from finetune.errors import PlanError
from finetune.estimate.budget import GIB
from finetune.plan.plan_base import format_value
from finetune.run import samples
from finetune.run.charts import Chart, Line, can_draw, figure, number, rows_table, thinned
from finetune.run.diagnostics import Finding, findings
from finetune.run.metrics import events_in
from finetune.system.files import replace
from finetune.system.json_files import JsonFileError, read_json
from finetune.system.owned_files import kind_of
from finetune.system.progress import duration
from finetune.system.terminal import clean
from finetune.system.untrusted import untrusted

PAGE = "report.html"
MARK = '<meta name="generator" content="finetune report">'
REFRESH_S = 5  # of a live page
FRACTIONS = ("exact_match", "contains", "numeric", "json", "regex", "choice", "targets_right", "rows_right", "accuracy")
OWN_CHARTS = {
    "loss",
    "lr",
    "grad_norm",
    "tokens_per_s",
    "step",
    "time",
    "num_tokens",
    "num_targets",
    "num_rows",
    "aux_loss",
}
MOST_PROMPTS, MOST_TEXT = 8, 700
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


@dataclass
class Run:
    """What the files of a run's folder say. `by_kind`: its events."""

    folder: Path
    name: str
    by_kind: dict[str, list[dict]]
    plan: dict
    samples: list[dict]
    findings: list[Finding] = field(default_factory=list)

    @property
    def settled(self) -> dict:
        return self.plan.get("settled", {})

    @property
    def start(self) -> dict:
        return self.of("start")[-1] if self.of("start") else {}

    @property
    def end(self) -> dict:
        """The last end event, unless the run went on after it."""
        events = [e for kind in ("start", "end") for e in self.of(kind)]
        last = max(events, key=lambda e: e.get("time", 0), default={})
        return last if last.get("event") == "end" else {}

    def of(self, kind: str) -> list[dict]:
        return self.by_kind.get(kind, [])

    def points(self, kind: str, value: str | Callable[[dict], float | None]) -> list[tuple[float, float]]:
        """(step, value) of the events of a kind that have it."""
        read = value if callable(value) else lambda event: event.get(value)
        found = ((event.get("step"), read(event)) for event in self.of(kind))
        return [(s, v) for s, v in found if isinstance(s, int) and isinstance(v, int | float) and v == v]

    def best(self) -> dict | None:
        """The evaluation with the lowest loss after the first step, if there are several."""
        after = [e for e in self.of("eval") if e.get("step") and isinstance(e.get("loss"), int | float)]
        return min(after, key=lambda e: e["loss"]) if len(after) > 1 else None


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
    run = Run(folder, folder.resolve().name, by_kind, plan, samples.read(folder))
    best = folder / "best"
    run.findings = findings(events, run.samples, run.settled, str(best) if best.is_dir() else None)
    return run


def page_of(folders: list[Path], live: bool = False) -> str:
    """The page of the runs in these folders. Raises PlanError for files that no run wrote so."""
    said = ", ".join(map(str, folders))
    with untrusted(f"{said}: holds files that are not as a run wrote them", "Restore them, or leave the folder out."):
        return page([read_run(folder) for folder in folders], live)


def page(runs: list[Run], live: bool = False) -> str:
    """The page of a run, or the comparison of several. `live`: it asks for itself again until the runs have ended."""
    one = len(runs) == 1
    title = runs[0].name if one else "Comparison of " + ", ".join(run.name for run in runs)
    going = live and any(not run.end for run in runs)
    refresh = f'<meta http-equiv="refresh" content="{REFRESH_S}">' if going else ""
    body = single(runs[0]) if one else comparison(runs)
    made = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return clean(
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">{MARK}'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark">{refresh}<title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body>{body}</main>\n"
        f"<footer><p>Made {made} from the files of the run. Nothing on this page is loaded from elsewhere.</p></footer>"
        "</body></html>\n"
    )


def single(run: Run) -> str:
    sections = [
        ("Result", result(run)),
        ("Curves", curves(run)),
        ("Samples", film(run)),
        ("Data", data_of(run)),
        ("Plan", plan_of(run)),
        ("Memory", memory_of(run)),
        ("Command and environment", environment(run)),
    ]
    return header(run.name, headline(run), sections) + "".join(section(*s) for s in sections if s[1])


def comparison(runs: list[Run]) -> str:
    named = [(label, run) for label, run in zip(labels(runs), runs, strict=True)]
    sections = [
        ("Results", results(named)),
        ("Curves", charts_section(compared_charts(named))),
        ("Settings that differ", differences(named)),
        ("What to look at", "".join(findings_list(run.findings, label) for label, run in named)),
    ]
    lead = f"<p>{len(runs)} runs.</p>"
    return header("Comparison", lead, sections) + "".join(section(*s) for s in sections if s[1])


def labels(runs: list[Run]) -> list[str]:
    """The runs' folder names, with as much of their paths as tells them apart."""
    paths = [run.folder.resolve() for run in runs]
    for many in range(1, 20):
        names = ["/".join(path.parts[-many:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{path.name} ({i + 1})" for i, path in enumerate(paths)]


def header(name: str, lead: str, sections: list[tuple[str, str]]) -> str:
    links = "".join(f'<li><a href="#{anchor(title)}">{html.escape(title)}</a></li>' for title, body in sections if body)
    return f'<header><h1>{html.escape(name)}</h1>{lead}<nav aria-label="Sections"><ul>{links}</ul></nav></header><main>'


def section(title: str, body: str) -> str:
    return f'\n<section id="{anchor(title)}"><h2>{html.escape(title)}</h2>{body}</section>'


def anchor(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower())


def write(file: Path, content: str, flag: str) -> None:
    """Writes a page, signed. Raises PlanError for a file that is no page of ours, or was edited."""
    try:
        if kind_of(file) and (kind_of(file) != "a file" or not is_as_signed(file)):
            raise PlanError(f"{flag} {file}: exists, and is no report as it was written. Give another file.")
        with replace(file) as out:
            out.write(signed(content).encode("utf-8", "replace"))
    except OSError as error:
        raise PlanError(f"{flag} {file}: cannot be written ({error.strerror}). Give another file.") from None


# ---- one run


def headline(run: Run) -> str:
    """Status, what was trained, how long it took; then what went wrong."""
    end, steps = run.end, run.of("step")
    status = end.get("status", "running")
    code = f" (exit code {end['exit_code']})" if end.get("exit_code") else ""
    facts = [f'<strong class="status {html.escape(status)}">{html.escape(status)}{code}</strong>']
    model = run.settled.get("model_name")
    if model:
        facts.append(html.escape(f"{run.settled.get('train_type', '')} of {model}".strip()))
    if steps:
        facts.append(f"step {steps[-1].get('step')}")
    if isinstance(end.get("wall_s"), int | float):
        facts.append(duration(end["wall_s"]))
    return f"<p>{' · '.join(facts)}</p>{findings_list(run.findings)}"


def findings_list(found: list[Finding], label: str = "") -> str:
    if not found:
        return f"<p>{html.escape(label)}: nothing found.</p>" if label else ""
    items = "".join(f"<li>{html.escape(finding.text)}</li>" for finding in found)
    head = f"<h3>{html.escape(label)}</h3>" if label else '<h2 class="quiet">Look at this</h2>'
    return f'<div class="findings">{head}<ul>{items}</ul></div>'


def result(run: Run) -> str:
    """Evaluations before, best and after; of a run without any, the training loss."""
    evaluations = run.of("eval")
    if not evaluations:
        losses = run.points("step", "loss")
        if not losses:
            return "<p>No step is logged yet.</p>"
        return (
            f"<p>Training loss {number(losses[0][1])} at step 1, {number(losses[-1][1])} at step {losses[-1][0]}.</p>"
        )
    columns = {"before": evaluations[0], "after": evaluations[-1]}
    best = run.best()
    if best:
        columns = {"before": evaluations[0], f"best (step {best['step']})": best, "after": evaluations[-1]}
    names = numbers_in(evaluations)
    rows = [[said_name(n), *(shown(n, values.get(n)) for values in columns.values())] for n in names]
    kept = run.folder / "best"
    where = (
        f"<p>The weights of step {best['step']} are in <code>{html.escape(str(kept))}</code>.</p>"
        if best and kept.is_dir()
        else ""
    )
    return rows_table(["measure", *columns], rows, "Evaluations") + where


def numbers_in(events: list[dict]) -> list[str]:
    """Names of the numbers in these events, but for counts."""
    found = dict.fromkeys(
        n for e in events for n, v in e.items() if isinstance(v, int | float) and not isinstance(v, bool)
    )
    return [n for n in found if n not in ("step", "time", "num_targets", "num_rows", "num_tokens")]


def said_name(name: str) -> str:
    return name.replace("_", " ")


def shown(name: str, value) -> str:
    if not isinstance(value, int | float):
        return "–"
    return f"{value:.1%}" if is_fraction(name) else number(value)


def is_fraction(name: str) -> bool:
    return name.endswith((*FRACTIONS, "accuracies"))


def curves(run: Run) -> str:
    return charts_section(charts_of(run))


def charts_section(charts: list[Chart]) -> str:
    drawn = [figure(chart) for chart in charts if chart]
    if not drawn:
        return ""
    missing = "" if can_draw() else "<p>Charts need pygal (<code>pip install pygal</code>); here are their numbers.</p>"
    note = '<p class="quiet">Lines of more than 240 steps are means of neighbouring steps.</p>' if can_draw() else ""
    return f'{missing}{note}<div class="charts">{"".join(drawn)}</div>'


def charts_of(run: Run) -> list[Chart]:
    """Every curve of a run, in the order in which one asks for them."""
    predicted = (run.start.get("predicted_memory_bytes") or {}).get("total")
    memory = run.points("step", memory_total)
    lines = [Line("training", run.points("step", "loss")), Line("held-out rows", run.points("eval", "loss"), dots=True)]
    expected = [(s, predicted / GIB) for s, _ in (memory[:1] + memory[-1:])] if predicted else []
    found = [Chart("Loss", [line for line in lines if line.points])]
    scores = [n for n in numbers_in(run.of("eval")) if n != "loss" and "/" not in n]
    fractions = [Line(said_name(n), run.points("eval", n), dots=True) for n in scores if is_fraction(n)]
    found.append(Chart("Scores", fractions, "fraction right"))
    found += [
        Chart(said_name(n).capitalize(), [Line(n, run.points("eval", n), dots=True)])
        for n in scores
        if not is_fraction(n)
    ]
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
    return found


def memory_total(event: dict) -> float | None:
    total = (event.get("memory_bytes") or {}).get("total")
    return total / GIB if isinstance(total, int | float) else None


def grouped(run: Run) -> list[Chart]:
    """Rewards, log-probabilities and other groups that preferences log as group/name."""
    groups: dict[str, list[str]] = {}
    for name in numbers_in(run.of("step")):
        if "/" in name:
            key = f"{name.partition('/')[0]}: fraction right" if is_fraction(name) else name.partition("/")[0]
            groups.setdefault(key, []).append(name)
    return [
        Chart(key.capitalize(), [Line(n.partition("/")[2], run.points("step", n)) for n in names])
        for key, names in groups.items()
    ]


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


def film(run: Run) -> str:
    """Each sampled prompt with its answers, evaluation by evaluation; those that end wrong first."""
    by_prompt: dict[tuple[str, str], list[dict]] = {}
    for sample in run.samples:
        by_prompt.setdefault((sample["source"], sample["prompt"]), []).append(sample)
    if not by_prompt:
        return ""
    ordered = sorted(by_prompt.items(), key=lambda item: bool(item[1][-1].get("right")))[:MOST_PROMPTS]
    parts = []
    for (source, prompt), taken in ordered:
        frames = taken if len(taken) <= 12 else [*taken[:1], *taken[1:-1][:: -(-len(taken) // 10)], taken[-1]]
        cells = "".join(
            f'<li class="{"right" if s.get("right") else "wrong"}"><p class="quiet">step {s["step"]}: '
            f"{'right' if s.get('right') else 'not as expected'}</p><pre>{text(s['answer'])}</pre></li>"
            for s in frames
        )
        parts.append(
            f'<article><h3>{html.escape(source)}</h3><pre class="prompt">{text(prompt)}</pre>'
            f'<p><span class="quiet">expected:</span> <q>{text(taken[-1]["expected"])}</q></p>'
            f'<ol class="film" tabindex="0" aria-label="Answers to {html.escape(source, quote=True)}">{cells}</ol>'
            "</article>"
        )
    return f"<p>Held-out prompts, answered at each evaluation; those that end wrong come first.</p>{''.join(parts)}"


def text(words: str) -> str:
    """Text of models and data, escaped and shortened in its middle."""
    words = words if len(words) <= MOST_TEXT else f"{words[: MOST_TEXT // 2]} … {words[-MOST_TEXT // 2 :]}"
    return html.escape(words) or "<em>(empty)</em>"


def data_of(run: Run) -> str:
    counts, facts = run.start.get("data") or {}, run.start.get("facts") or {}
    rows = [[said_name(name), f"{n:,}"] for name, n in counts.items() if isinstance(n, int) and n]
    names = run.settled.get("dataset") or run.settled.get("data_paths")
    rows.insert(0, ["dataset", ", ".join(map(str, names if isinstance(names, list) else [names or "the demo's"]))])
    parts = [rows_table(["fact", "training rows"], rows, "Training rows")]
    lengths = facts.get("lengths")
    if lengths:
        said = ", ".join(f"{name} {lengths[name]:,}" for name in ("p50", "p95", "p99", "max") if name in lengths)
        bars = [(f"≤ {edge}", float(n)) for edge, n in lengths["bins"]]
        parts.append(f"<p>Tokens per row: {said}.</p>")
        parts.append(
            charts_section([Chart("Rows by length", bars=bars, unit="tokens")]).replace(
                '<p class="quiet">Lines of more than 240 steps are means of neighbouring steps.</p>', ""
            )
        )
    checks = facts.get("checks") or []
    items = "".join(
        "<li>" + html.escape("{what} ({count:,}), first {first}: {remedy}".format(**check)) + "</li>"
        for check in checks
    )
    if facts:
        parts.append(
            f"<p>Checks of the rows:</p><ul>{items}</ul>" if items else "<p>Checks of the rows: no problems found.</p>"
        )
    return "".join(parts)


def plan_of(run: Run) -> str:
    """Every setting that the plan decided, with its reason; then all settings that are not the default."""
    if not run.plan:
        return "<p>run_plan.json is missing or not as it was written.</p>"
    reasons = [
        [str(a["setting"]), format_value(a["requested"]), format_value(a["used"]), str(a["reason"])]
        for a in run.plan.get("adjustments", [])
    ]
    asked = run.plan.get("requested", {})
    others = [
        [name, format_value(value), "yes" if name in asked else "no"]
        for name, value in run.settled.items()
        if name in asked or (name in DEFAULTS and value != DEFAULTS[name])
    ]
    parts = (
        [rows_table(["setting", "asked for", "used", "reason"], reasons, "What the plan decided")] if reasons else []
    )
    return "".join(parts) + rows_table(["setting", "value", "asked for"], others, "Settings that are not the default")


def memory_of(run: Run) -> str:
    """Predicted and measured bytes, item by item."""
    predicted, peak = run.start.get("predicted_memory_bytes") or {}, run.end.get("peak_memory_bytes") or {}
    items = {**predicted.get("items", {}), **peak.get("items", {})}
    if not items:
        return ""

    def mib(part: dict, name: str) -> str:
        value = part.get("total") if name == "total" else part.get("items", {}).get(name)
        return f"{value / 2**20:,.1f}" if isinstance(value, int | float) else "–"

    rows = [[said_name(name), mib(predicted, name), mib(peak, name)] for name in [*items, "total"]]
    return rows_table(["item", "predicted, MiB", "measured, MiB"], rows, "Memory above the process after its imports")


def environment(run: Run) -> str:
    start, end = run.start, run.end
    when = start.get("time")
    rows = [["folder", str(run.folder)]]
    if isinstance(when, int | float):
        rows.append(["started", datetime.fromtimestamp(when, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")])
    rows += [["machine", said_machine(start["machine"])]] if start.get("machine") else []
    rows += [["backend", str(run.settled["backend"])]] if run.settled.get("backend") else []
    rows += [[name, str(version)] for name, version in (start.get("versions") or {}).items() if version]
    if isinstance(end.get("wall_s"), int | float):
        rows.append(["duration", duration(end["wall_s"])])
    said = command(run)
    return (f"<pre>{html.escape(said)}</pre>" if said else "") + rows_table(["what", "value"], rows, "Environment")


def said_machine(machine) -> str:
    """The processor that the start event describes."""
    if not isinstance(machine, dict):
        return str(machine)
    flags = machine.get("flags")
    more = f" ({', '.join(map(str, flags))})" if isinstance(flags, list) and flags else ""
    return f"{machine.get('model')}, {machine.get('cores')} cores{more}"


def command(run: Run) -> str:
    """The command that starts this run, as run_plan.json has it."""
    asked = run.plan.get("requested", {})
    if not asked:
        return ""
    if "arch.hidden_size" in run.settled:
        return shlex.join(["python", "pretrain.py", *(f"{name}={_written(v)}" for name, v in asked.items())])
    words = ["python", "train.py"]
    for name, value in asked.items():
        if name in FIELDS and value is not None:
            for one in value if isinstance(value, list) else [value]:
                words += [f"--{name}", json.dumps(one) if isinstance(one, dict) else format_value(one)]
    return shlex.join(words)


def _written(value) -> str:
    return json.dumps(value).replace(" ", "") if isinstance(value, list) else format_value(value)


# ---- several runs


def results(named: list[tuple[str, Run]]) -> str:
    events = [e for _, run in named for e in run.of("eval")]
    names = numbers_in(events)
    head = ["run", "status", "steps", "duration", "last training loss", *(said_name(n) for n in names)]
    rows = []
    for label, run in named:
        last = run.of("eval")[-1] if run.of("eval") else {}
        losses, wall = thinned(run.points("step", "loss"), 10), run.end.get("wall_s")
        rows.append(
            [
                label,
                str(run.end.get("status", "running")),
                str(run.of("step")[-1].get("step", 0) if run.of("step") else 0),
                duration(wall) if isinstance(wall, int | float) else "–",
                number(losses[-1][1]) if losses else "–",
                *(shown(n, last.get(n)) for n in names),
            ]
        )
    return rows_table(head, rows, "Results, by the last evaluation")


def compared_charts(named: list[tuple[str, Run]]) -> list[Chart]:
    """One chart per number, a line per run."""

    def of(title: str, kind: str, value, unit: str = "", dots: bool = False) -> Chart:
        lines = [Line(label, run.points(kind, value), dots) for label, run in named]
        return Chart(title, [line for line in lines if line.points], unit)

    scores = [n for n in numbers_in([e for _, run in named for e in run.of("eval")]) if n != "loss"]
    groups = [n for n in numbers_in([e for _, run in named for e in run.of("step")]) if "/" in n]
    return [
        of("Training loss", "step", "loss"),
        of("Loss of held-out rows", "eval", "loss", dots=True),
        *(of(said_name(n).capitalize(), "eval", n, dots=True) for n in scores if "/" not in n),
        *(of(said_name(n).capitalize(), "step", n) for n in groups),
        of("Learning rate", "step", "lr"),
        of("Gradient norm", "step", "grad_norm", "before clipping"),
        of("Speed", "step", "tokens_per_s", "tokens/s"),
        of("Memory", "step", memory_total, "GiB"),
    ]


def differences(named: list[tuple[str, Run]]) -> str:
    """Settings that are not the same in all runs."""
    names = dict.fromkeys(name for _, run in named for name in run.settled)
    written = {name: [format_value(run.settled.get(name)) for _, run in named] for name in names}
    rows = [[name, *values] for name, values in written.items() if len(set(values)) > 1 and name != "day"]
    if not rows:
        return "<p>None.</p>"
    return rows_table(["setting", *(label for label, _ in named)], rows, "Settings that differ")


STYLE = """
:root{--ink:#1b1f24;--quiet:#57606a;--line:#c9d1d9;--paper:#fff;--card:#f6f8fa;--good:#1a7f37;--bad:#b42318;
--c0:#0b5cad;--c1:#b3430b;--c2:#1a7f37;--c3:#7a3fb0;--c4:#7a5c00;--c5:#0e7c86;--c6:#ad1a6b;--c7:#444c56}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--quiet:#a3adb8;--line:#3d444d;--paper:#0d1117;--card:#161b22;
--good:#56d364;--bad:#ff7b72;--c0:#79b8ff;--c1:#ffa066;--c2:#6fd6a0;--c3:#c9a0ff;--c4:#e6c84f;--c5:#6fd3dd;--c6:#ff8ac4;
--c7:#c9d1d9}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1480px;padding:1rem;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif;overflow-wrap:anywhere}
h1{font-size:1.6rem;margin:.2rem 0;line-height:1.2}h2{font-size:1.25rem;margin:1.6rem 0 .5rem}
h3{font-size:1rem;margin:1rem 0 .3rem}
h2.quiet{font-size:1rem;margin:.6rem 0 .2rem}
nav ul{display:flex;flex-wrap:wrap;gap:.3rem 1rem;padding:0;list-style:none}a{color:var(--c0)}
.quiet,footer{color:var(--quiet)}.status{padding:.1rem .5rem;border:2px solid;border-radius:.4rem}
.status.finished{color:var(--good)}.status.failed,.status.stopped{color:var(--bad)}
.findings{border-left:4px solid var(--bad);padding:.1rem .8rem;background:var(--card)}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,400px),1fr));gap:1rem}
figure{margin:0;padding:.6rem;border:1px solid var(--line);border-radius:.5rem;min-width:0}
figcaption{font-weight:600}svg{display:block;width:100%;height:auto}
.legend{display:flex;flex-wrap:wrap;gap:0 1rem;list-style:none;margin:.2rem 0;padding:0;font-size:.88rem}
.legend i{display:inline-block;width:1.6rem;margin-right:.4rem;vertical-align:middle}
.scroll{overflow-x:auto;max-width:100%}details .scroll{max-height:20rem;overflow-y:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.92rem}
caption{text-align:left;color:var(--quiet);padding:.3rem 0}
th,td{border-bottom:1px solid var(--line);padding:.25rem .8rem .25rem 0;text-align:left;vertical-align:top}
th,td{overflow-wrap:normal}td{min-width:4rem}td:last-child{min-width:9rem;overflow-wrap:break-word}
thead th{white-space:nowrap}
pre{white-space:pre-wrap;background:var(--card);padding:.5rem;border-radius:.4rem;margin:.3rem 0;font-size:.88rem}
code{font-size:.92em}
.film{display:flex;gap:.6rem;overflow-x:auto;list-style:none;margin:.3rem 0 1.2rem;padding:.2rem;
scroll-snap-type:x proximity}
.film li{flex:0 0 min(16rem,80vw);scroll-snap-align:start;border:1px solid var(--line);border-left:4px solid var(--bad);
border-radius:.4rem;padding:.3rem .5rem}.film li.right{border-left-color:var(--good)}.film p{margin:0}
:focus-visible{outline:3px solid var(--c0);outline-offset:2px}
@media print{body{max-width:none;padding:0;font-size:10pt}nav,details{display:none}
.charts{grid-template-columns:1fr 1fr}
figure,article,tr{break-inside:avoid}.film{flex-wrap:wrap}.scroll{overflow:visible}}
"""
