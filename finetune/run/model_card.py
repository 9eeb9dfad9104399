"""The model card of what a run or an export wrote (README.md): base, data, plan, command, scores and limits.

It is made from the files of the run's folder alone, so that an export says the same of it. Folders of this machine are
named by their last part: a card is published. The metadata are huggingface_hub's ModelCardData.
"""

import json
import shlex
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.adapters.saved import CONFIG
from finetune.checkpoint.saved_run import PLAN, PLAN_SCHEMA, STATE, checked_plan, is_as_written
from finetune.config import DEFAULTS, FIELDS
from finetune.errors import PlanError
from finetune.model_files.hub import looks_like_hub_id
from finetune.model_files.manifest import MANIFEST
from finetune.parts.objectives import CLASSIFY, EMBED, GENERATE, REWARD_MODEL
from finetune.run.evaluation import EXACT, SCORE_NAMES
from finetune.run.metrics import events_in
from finetune.system.json_files import JsonFileError, read_json
from finetune.system.program import started_as

README = "README.md"
BASE_FILES = ("base_model.json", CONFIG, "trained_blocks.json")
# Settings whose values the card shows where they are not the default; all are in run_plan.json.
SHOWN = (
    *("num_epochs", "max_steps", "batch_size", "gradient_accumulation_steps", "lr", "lr_scheduler", "optimizer"),
    *("context_length", "precision", "quantization_backend", "n_bits", "group_size", "quant_type", "double_quant"),
    *(
        "lora_rank",
        "lora_alpha",
        "lora_dropout",
        "lora_target_modules",
        "use_dora",
        "use_rslora",
        "task",
        "preference",
        "seed",
    ),
    *("teacher", "distill_loss", "distill_alpha"),
)
ALWAYS = ("lr", "precision", "context_length")
QUANTIZED_ONLY = ("quantization_backend", "n_bits", "group_size", "quant_type", "double_quant")


@dataclass(frozen=True)
class Facts:
    """Facts of a run. Empty where its folder does not say. `digest`: the base's; `data`: of the start event."""

    base: str = ""
    revision: str | None = None
    digest: str | None = None
    requested: dict = field(default_factory=dict)
    settled: dict = field(default_factory=dict)
    data: dict = field(default_factory=dict)
    step: int | None = None
    published_step: int | None = None
    before: dict = field(default_factory=dict)
    after: dict = field(default_factory=dict)
    dense: dict = field(default_factory=dict)


def facts_of(folder: Path, state: dict | None = None) -> Facts:
    """The facts in a run's folder, or in that of any adapter. `state`: of a run that has not written its own yet."""
    plan = _plan_in(folder / PLAN)
    settled = plan.get("settled", {})
    requested = plan.get("requested", {})
    state = state or _read(folder / STATE, {})
    scores = state.get("scores")
    if not isinstance(scores, dict):
        scores = {}
    found = [_read(folder / name, {}) for name in BASE_FILES]
    named = [c.get("base_model_name_or_path") or c.get("name") for c in found]
    digests = [c.get("digest") or c.get("base_digest") for c in found]
    start: dict = {}
    if (folder / "metrics.jsonl").is_file():
        with suppress(OSError):
            start = next((e for e in reversed(events_in(folder)) if e["event"] == "start"), {})
    base = next((n for n in named if isinstance(n, str)), settled.get("model_name") or "")
    step = state.get("step")
    return Facts(
        base=str(base),
        revision=next((c["revision"] for c in found if isinstance(c.get("revision"), str)), settled.get("revision")),
        digest=next((d for d in digests if isinstance(d, str)), None),
        requested=requested,
        settled=settled,
        data=start["data"] if isinstance(start.get("data"), dict) else {},
        step=step if type(step) is int else None,
        published_step=_read(folder / MANIFEST, {"step": int}).get("step"),
        **{name: _numbers(scores.get(name)) for name in ("before", "after", "dense")},
    )


def _plan_in(file: Path) -> dict:
    content = _read(file, PLAN_SCHEMA)
    try:
        if content and is_as_written(content):
            return checked_plan(content, file)
        return {}
    except PlanError:
        return {}


def _read(file: Path, schema: Any) -> dict:
    """A JSON file of the folder; empty if there is none, or none that can be read: a card says what is known."""
    try:
        return read_json(file, schema)
    except (FileNotFoundError, JsonFileError):
        return {}


def _numbers(values: Any) -> dict:
    if isinstance(values, dict):
        return {k: v for k, v in values.items() if isinstance(v, int | float)}
    return {}


def card(
    facts: Facts, name: str, kind: str, scores: dict[str, dict] | None = None, note: str = "", library: str = ""
) -> str:
    """The text of a README.md. `kind`: adapter or model; `scores`: {what was scored: values by name} beside the run's;
    `note`: how it was made from the run; `library`: that opens it, if not peft or transformers.
    """
    scored = scores_of(facts) | (scores or {})
    head = f"---\n{metadata(facts, name, kind, scored, library)}\n---\n\n# {name}\n"
    parts = [head, _summary(facts, kind, note), _training(facts)]
    return "\n".join([*parts, _command(facts), _scores(facts, scored), _limits(facts, kind)]).rstrip() + "\n"


def scores_of(facts: Facts) -> dict[str, dict]:
    """{dataset of the score: its values} of a run."""
    on = _quantized(facts)
    found = {"before training": facts.before, f"after training{', base in ' + on if on else ''}": facts.after}
    if facts.dense:
        found["the same adapter, dense base"] = facts.dense
    return {what: values for what, values in found.items() if values}


# The Hub's names of what models of --task do.
PIPELINES = {CLASSIFY: "text-classification", REWARD_MODEL: "text-classification", EMBED: "sentence-similarity"}


def metadata(facts: Facts, name: str, kind: str, scored: dict[str, dict], library: str = "") -> str:
    """The YAML at the top of the card."""
    from huggingface_hub import EvalResult, ModelCardData

    how = facts.settled.get("train_type")
    preference = facts.settled.get("preference")
    tags = [how if how != "full" else "full-fine-tuning", preference if preference != "none" else None]
    base = None
    if is_hub_id(facts.base):
        base = facts.base
    last = {}
    if scored:
        last = list(scored.values())[-1]
    file = Path(str(facts.settled.get("score_dataset") or "")).name
    task = "image-text-to-text" if facts.settled.get("images") == "true" else "text-generation"
    task = PIPELINES.get(str(facts.settled.get("task")), task)
    results = [
        EvalResult(
            task_type=task,
            task_name=task.replace("-", " ").capitalize(),
            dataset_type=file,
            dataset_name=file,
            metric_type=metric,
            metric_value=round(float(value), 6),
        )
        for metric, value in last.items()
        if metric in SCORE_NAMES and file
    ]
    data = ModelCardData(
        library_name=library or ("peft" if kind == "adapter" else "transformers"),
        pipeline_tag=task,
        tags=[tag for tag in tags if tag],
        datasets=[n for n in datasets_of(facts) if is_hub_id(n) and "/" in n] or None,
        eval_results=results or None,
        model_name=name if results else None,
        base_model=base,
        base_model_relation=base and ("adapter" if kind == "adapter" else "finetune"),
    )
    return data.to_yaml()


def is_hub_id(name: str) -> bool:
    """True for the name of a Hub repository that is not a folder here."""
    return bool(name) and looks_like_hub_id(name) and not Path(name).exists()


def datasets_of(facts: Facts) -> list[str]:
    """The names of the training data, weights and splits left out."""
    given = facts.settled.get("dataset")
    if isinstance(given, list):
        entries = given
    else:
        entries = [given]
    return [str(e.get("name") or e.get("path") or "") if isinstance(e, dict) else str(e) for e in entries if e]


def _quantized(facts: Facts) -> str:
    s = facts.settled
    if s.get("train_type") == "qlora":
        return f"{s.get('quantization_backend')} {s.get('n_bits')} bits"
    return ""


def _public(value: Any) -> str:
    """A value as the card shows it: of a path that begins at the root or the home, the last part."""
    if isinstance(value, bool):
        text = str(value).lower()
    else:
        text = str(value)
    if text.startswith(("/", "~")):
        return Path(text).name
    return text


def _summary(facts: Facts, kind: str, note: str) -> str:
    base = "a base that is not known here"
    if facts.base:
        base = f"`{_public(facts.base)}`"
    what = "An adapter for" if kind == "adapter" else "A model fine-tuned from"
    return f"{what} {base}.{' ' + note if note else ''}\n"


def _training(facts: Facts) -> str:
    rows = [("base", _public(facts.base) + (f" at revision {facts.revision}" if facts.revision else ""))]
    if facts.digest:
        rows.append(("base, digest", facts.digest))
    if facts.settled.get("adapter"):
        merged = ", merged into the base first" if facts.settled.get("adapter_merge") else ""
        rows.append(("continues from", _public(facts.settled["adapter"]) + merged))
    rows.append(("data", ", ".join(_public(name) for name in datasets_of(facts)) or "not known"))
    counts = [f"{facts.data[n]:,} {n}" for n in ("rows", "tokens", "targets") if isinstance(facts.data.get(n), int)]
    rows += [("data, size", ", ".join(counts))] if counts else []
    rows += [("data, digest", f"sha256:{facts.data['sha256']}")] if facts.data.get("sha256") else []
    rows += [("training", str(facts.settled["train_type"]))] if facts.settled.get("train_type") else []
    if facts.step is not None:
        of = ""
        if facts.published_step not in (None, facts.step):
            of = f"; these weights are those of step {facts.published_step:,}"
        rows.append(("steps", f"{facts.step:,}{of}"))
    full = facts.settled.get("train_type") == "full"
    quantized = bool(_quantized(facts))
    for setting in SHOWN:
        value = facts.settled.get(setting)
        left_out = (full and FIELDS[setting].metadata["adapter_only"]) or (setting in QUANTIZED_ONLY and not quantized)
        changed = setting in ALWAYS or setting in QUANTIZED_ONLY or value != DEFAULTS[setting]
        if value is not None and changed and not left_out:
            rows.append((setting, _public(value)))
    lines = [f"| {name} | {value.replace('|', chr(92) + '|')} |" for name, value in rows]
    return "\n".join(["## Training", "", "| | |", "|---|---|", *lines, ""])


def _command(facts: Facts) -> str:
    """The command with which it was trained, as far as run_plan.json says."""
    if not facts.settled:
        return ""
    words = started_as("train.py").split()
    for name in FIELDS:
        value = facts.requested.get(name)
        if value is None or FIELDS[name].metadata["group"] in ("machine", "logging", "profile", "ask"):
            continue
        for one in value if isinstance(value, list) else [value]:
            words += [f"--{name}", json.dumps(one) if isinstance(one, dict) else _public(one)]
    return f"```bash\n{shlex.join(words)}\n```\n"


def _scores(facts: Facts, scored: dict[str, dict]) -> str:
    if not scored:
        return "## Scores\n\nNone: no rows were held out.\n"
    names = [
        n for n in dict.fromkeys(n for values in scored.values() for n in values) if n == "loss" or n in SCORE_NAMES
    ]
    rows = [[what, *(_shown(n, values[n]) if n in values else "" for n in names)] for what, values in scored.items()]
    head = ["", *(n.replace("_", " ") for n in names)]
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    file = facts.settled.get("score_dataset")
    many = facts.settled.get("score_samples")
    if many and many > 0:
        on = f"On the first {many} rows of `{_public(file)}`"
    else:
        on = f"On `{_public(file)}`"
    words = "On the validation rows."
    if file and facts.settled.get("task", GENERATE) != GENERATE:
        words = f"{on}."
    elif file:
        words = f"{on}, by greedy decoding."
    return "\n".join(["## Scores", "", words, "", *lines, ""])


def _shown(name: str, value: float) -> str:
    if name in ("loss", "perplexity"):
        return f"{value:.4f}"
    return f"{value:.1%}"


def _limits(facts: Facts, kind: str) -> str:
    on = _quantized(facts)
    lines = ["It has the limits and the licence of its base, and learned nothing but the data above."]
    if not any(name in facts.after for name in SCORE_NAMES):
        lines.append("Its answers were not scored.")
    elif EXACT in facts.after:
        lines.append("The scores are of the rows named above alone; other questions were not tried.")
    if on and kind == "adapter":
        lines.append(f"It was trained on a base in {on}. On a dense base it answers somewhat differently.")
    elif on:
        lines.append(f"The adapter was trained on a base in {on}, and merged into the dense one.")
    return "\n".join(["## Limits", "", *(f"- {line}" for line in lines)])
