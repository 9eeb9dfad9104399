"""Two backends side by side, --parity torch,mlx: the same steps from the same seed, and a verdict anyone can check.

A run that moves between the two backends on this machine will see the same differences.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from backend_manager import CAPABILITIES, Backend, BackendManager, versions
from finetune.data.fit_template import prepare_template
from finetune.data.prepare import load_data, read_datasets, rows_of
from finetune.data.run_data import Data
from finetune.distributed.env import RankEnv
from finetune.engine import Engine
from finetune.errors import PlanError
from finetune.model_files.tokenizer import load_tokenizer, pad_id
from finetune.model_files.vocabulary import add_tokens
from finetune.parts.plan_base import format_value
from finetune.parts.train_state import TrainState
from finetune.plan.finalize import finalize
from finetune.plan.run_plan import RunPlan
from finetune.rewards.rollouts import Rollouts
from finetune.run.report import plan_lines
from finetune.run.reward_models import open_reward_models
from finetune.system.owned_files import OwnedFiles

WRITTEN = ("parity.json", "parity.svg")

STEPS = 20
# Largest difference in loss at any step that counts as the same run, see `difference`. fp32: products in another order;
# 16 bits: products rounded in other places, which steps accumulate.
TOLERANCES = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 2e-2}
LEAST_NORM = 1e-6  # that a difference is relative to: without an advantage a step's gradient is zero
WIDTH = 640
HEIGHT = 320
MARGIN = 48
HIDDEN = ("weights", "answers")  # of a track, in the certificate
COLORS = ("#1f77b4", "#d62728")


@dataclass
class Track:
    """Results of one backend: per step, and its trained weights at the end. `answers`: tokens of what it sampled."""

    backend: str
    losses: list = field(default_factory=list)
    grad_norms: list = field(default_factory=list)
    seconds: float = 0.0
    weights: dict = field(default_factory=dict)
    answers: list = field(default_factory=list)


def run(overrides: dict, make_plan: Callable, open_engine: Callable, say: Callable) -> TrainState:
    """Takes the same steps on both backends of --parity; prints, writes and returns the verdict.

    `make_plan(overrides)`; `open_engine(plan, env)`: the plan's engine, as train.py opens it.
    """
    both = backends(overrides.pop("parity"))
    tracks: list[Track] = []
    for name, alone in (("resume", None), ("world_size", 1)):
        if overrides.get(name) not in (None, alone):
            raise PlanError(f"--{name} {overrides[name]}: --parity starts two runs in one process. Omit it.")
    for flag in ("rope_scaling", "adapter_merge"):
        if overrides.get(flag) not in (None, "none", False):
            raise PlanError(f"--{flag} {format_value(overrides[flag])}: --parity makes no base of its own. Omit it.")
    for backend in both:
        plan = make_plan(overrides_of(overrides, backend, both))
        say("\n".join(plan_lines(plan)))
        _owned(plan.output.folder).check(WRITTEN)
        if overrides.get("dry_run"):
            continue
        tokenizer = load_tokenizer(plan.files.tokenizer_folder)
        raw_datasets = read_datasets(plan.data)
        add_tokens(tokenizer, plan.data.new_tokens)
        prepare_template(tokenizer, plan.data, partial(rows_of, raw_datasets))
        data = load_data(plan.data, raw_datasets, tokenizer, plan.files)
        rank = open_engine(plan, RankEnv())
        engine = rank.build(rank.load(), pad_id(tokenizer))
        open_reward_models(plan, data, raw_datasets["train"], RankEnv(), say)
        tracks.append(follow(engine, data, finalize(plan, data, engine, say), say))
        del engine
    if overrides.get("dry_run"):
        return TrainState(status="planned", output_dir=plan.output.output_dir)
    one, other = tracks
    verdict = compare(one, other, plan.precision.word)
    folder = plan.output.folder
    write(verdict, folder)
    say("\n".join([*report(verdict), f"written: {folder}/parity.json, {folder}/parity.svg"]))
    if verdict["same"]:
        exit_code = 0
    else:
        exit_code = PlanError.exit_code
    return TrainState(status="compared", output_dir=str(folder), exit_code=exit_code)


def backends(text: str) -> tuple[str, str]:
    """The two backends of --parity; torch means the first available one that runs through torch. Raises PlanError."""
    words = [word.strip().lower() for word in text.split(",")]
    if len(words) != 2 or words[0] == words[1]:
        raise PlanError(f"--parity {text}: must name two different backends, such as torch,mlx.")
    manager = BackendManager("cpu", verbose=False)
    torch = next(str(b) for b in manager.available if CAPABILITIES[b].engine == "torch")
    one, other = (torch if word == "torch" else word for word in words)
    backends = one, other
    for word, name in zip(words, backends, strict=True):
        if name not in [str(b) for b in Backend]:
            known = ", ".join(["torch", *map(str, manager.available)])
            raise PlanError(f"--parity {text}: '{word}' is not a backend. Available here: {known}.")
    if backends[0] == backends[1]:
        raise PlanError(f"--parity {text}: both are {backends[0]} here. Name two different backends.")
    return backends


def overrides_of(overrides: dict, backend: str, both: tuple[str, str]) -> dict:
    """The overrides of one of the two runs: precision and quantizer are those that both have."""
    same = {"precision": "fp32", "max_steps": STEPS, "save_model": False, "log_to": "stdout"}
    if "mlx" in both:
        same["quantization_backend"] = "mlx"
    if overrides.get("train_type", "qlora") != "qlora":
        same.pop("quantization_backend", None)
    if overrides.get("lora_dropout"):
        raise PlanError(
            f"--lora_dropout {overrides['lora_dropout']}: backends draw other random numbers. Omit it with --parity."
        )
    return {**same, **{k: v for k, v in overrides.items() if v is not None}, "backend": backend, "score_dataset": None}


def follow(engine: Engine, data: Data, plan: RunPlan, say: Callable[[str], object]) -> Track:
    """Takes the plan's steps on an engine that is ready for the first; a line per step."""
    track = Track(plan.backend)
    state = TrainState(total_steps=data.total_steps(plan))
    began = time.perf_counter()
    schedule = plan.schedule(state.total_steps)
    while state.step < state.total_steps:
        microbatches, _, cursor = data.step(plan, state, engine)
        if isinstance(data, Rollouts) and not data.now[0].used:
            track.answers += [answer.ids for answer in data.now[0].answers]
        result = engine.train_step(microbatches, schedule.lr_at(state.step + 1))
        data.count_step(state)
        state.advance(result, cursor)
        track.losses.append(state.loss)
        track.grad_norms.append(result.grad_norm)
        say(f"{plan.backend:>5}  step {state.step:>4}/{state.total_steps} | loss {state.loss:.6f}")
    track.seconds = time.perf_counter() - began
    track.weights = {name: np.array(array) for name, array in engine.trainable_state().items()}
    return track


def difference(loss: Any, other: Any):
    """Difference of two losses: relative, and absolute below 1 nat.

    A loss is a difference of logits, and keeps their rounding however small it becomes.
    """
    return np.abs(loss - other) / np.maximum(1.0, np.abs(other))


def compare(one: Track, other: Track, precision: str) -> dict:
    """The certificate as JSON: curves, largest differences, verdict."""
    losses, norms = (np.array([getattr(t, n) for t in (one, other)]) for n in ("losses", "grad_norms"))
    word = precision.partition("_")[0]
    weights = {}
    if one.weights.keys() != other.weights.keys():
        odd = sorted(one.weights.keys() ^ other.weights.keys())[0]
        raise PlanError(f"--parity: the backends train different tensors, such as {odd}. Name --lora_target_modules.")
    for name, array in one.weights.items():
        weights[name] = float(np.abs(array - other.weights[name]).max())
    largest = max(float(np.abs(a).max()) for a in one.weights.values())
    off = float(difference(*losses).max())
    alike = sum(mine == theirs for mine, theirs in zip(one.answers, other.answers, strict=True))
    return {
        "backends": [one.backend, other.backend],
        "precision": precision,
        "steps": len(one.losses),
        "tolerance": TOLERANCES[word],
        "largest_loss_difference": off,
        "largest_grad_norm_difference": float((np.abs(norms[0] - norms[1]) / np.maximum(norms[1], LEAST_NORM)).max()),
        "largest_weight_difference": max(weights.values()),
        "largest_weight": largest,
        "answers": len(one.answers),
        "same_answers": alike,
        "same": bool(off <= TOLERANCES[word]) and alike == len(one.answers),
        "curves": [{k: v for k, v in asdict(track).items() if k not in HIDDEN} for track in (one, other)],
        "versions": versions(),
    }


def report(result: dict) -> list[str]:
    """The certificate as text."""
    one, other = result["backends"]
    lines = [f"{'step':>6}  {one + ' loss':>12}  {other + ' loss':>12}  difference"]
    for step, pair in enumerate(zip(*(c["losses"] for c in result["curves"]), strict=True), 1):
        lines.append(f"{step:>6}  {pair[0]:>12.6f}  {pair[1]:>12.6f}  {difference(*pair):.1e}")
    verdict = "the same run" if result["same"] else "NOT the same run"
    sampled = []
    if result["answers"]:
        sampled = [f"sampled answers: {result['same_answers']} of {result['answers']} are the same tokens"]
    return lines + [
        "",
        *sampled,
        f"largest difference: loss {result['largest_loss_difference']:.1e}, gradient norm "
        f"{result['largest_grad_norm_difference']:.1e} (relative), weights {result['largest_weight_difference']:.1e} "
        f"of {result['largest_weight']:.1e}",
        f"{one} and {other}: {verdict} in {result['precision']} over {result['steps']} steps (tolerance "
        f"{result['tolerance']:.0e} of the loss, absolute below 1)",
    ]


def _owned(folder: Path) -> OwnedFiles:
    return OwnedFiles(folder, f"--output_dir {folder}")


def write(result: dict, folder: Path) -> None:
    """parity.json and parity.svg. Raises PlanError for such files of the user's own."""
    folder.mkdir(parents=True, exist_ok=True)
    _owned(folder).claim(*WRITTEN)
    (folder / "parity.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "parity.svg").write_text(picture(result))


def picture(result: dict) -> str:
    """SVG of both loss curves: the second is dashed, so that the first is seen below it."""
    curves = [c["losses"] for c in result["curves"]]
    low = min(map(min, curves))
    high = max(map(max, curves))
    span = (high - low) or 1.0
    steps = max(2, result["steps"])

    def point(step: int, loss: float) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * step / (steps - 1)
        y = MARGIN + (HEIGHT - 2 * MARGIN) * (1 - (loss - low) / span)
        return f"{x:.1f},{y:.1f}"

    title = f"{result['backends'][0]} and {result['backends'][1]}, {result['precision']}: loss differs by at most "
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{MARGIN}" y="24">{title}{result["largest_loss_difference"]:.1e} of it</text>',
        f'<text x="4" y="{MARGIN}">{high:.3f}</text><text x="4" y="{HEIGHT - MARGIN}">{low:.3f}</text>',
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 16}" text-anchor="end">step {result["steps"]}</text>',
    ]
    for i, (losses, color) in enumerate(zip(curves, COLORS, strict=True)):
        points = " ".join(point(step, loss) for step, loss in enumerate(losses))
        dash = ' stroke-dasharray="6 6"' if i else ""
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"{dash}/>')
        parts.append(f'<text x="{MARGIN + 90 * i}" y="{HEIGHT - 16}" fill="{color}">{result["backends"][i]}</text>')
    return "\n".join([*parts, "</svg>", ""])
