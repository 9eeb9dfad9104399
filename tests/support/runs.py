"""Runs of the tiny model: their flags, and what their output folders hold."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from finetune.checkpoint.store import newest_checkpoint, steps_of
from finetune.model_files.manifest import MANIFEST
from finetune.safetensors_io import digest_of
from tests.support.cases import LOSS

# With dropout, accumulation, shuffling and warm-up; 24 rows in steps of 4 over two epochs are 12 steps.
RUN = dict(
    batch_size=2,
    gradient_accumulation_steps=2,
    num_epochs=2,
    lr=5e-3,
    lora_rank=4,
    lora_dropout=0.1,
    train_type="lora",
    backend="cpu",
    log_to="stdout",
    context_length=64,
    precision="fp32",
)
PLAIN = dict(
    train_type="lora",
    lora_rank=4,
    batch_size=4,
    context_length=64,
    backend="cpu",
    log_to="stdout",
    lr=1e-3,
    precision="fp32",
)
WHOLE_STATE = ("adapter_model.safetensors", "optimizer.safetensors", "rng.safetensors")


def read_events(output_dir, kind: str | None = None) -> list[dict]:
    """Events of metrics.jsonl, each line of which is whole."""
    lines = (Path(output_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    return [e for e in events if kind in (None, e["event"])]


def losses(folder: Path) -> list[float]:
    return [e["loss"] for e in read_events(folder, "step")]


def steps(folder: Path) -> list[dict]:
    """What each logged step computed, without its timings."""
    keep = ("step", "loss", "lr", "grad_norm", "num_tokens", "num_targets")
    return [{k: e[k] for k in keep} for e in read_events(folder, "step")]


def count_steps(folder: Path) -> int:
    """Steps logged so far; the last line may be incomplete."""
    file = Path(folder) / "metrics.jsonl"
    return file.read_bytes().count(b'"event": "step"') if file.exists() else 0


def same_files(one: Path, two: Path, names) -> None:
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


def copy_up_to(folder: Path, step: int, target: Path) -> Path:
    """The folder as a crash right after `step` leaves it: no later checkpoints, the log running on."""
    shutil.copytree(folder, target)
    for later in steps_of(target):
        if int(later.name[5:]) > step:
            shutil.rmtree(later)
    for name in ("train_state.json", "adapter_model.safetensors", "model.safetensors", MANIFEST):
        (target / name).unlink(missing_ok=True)
    return target


def assert_same_run(folder: Path, alone: Path) -> None:
    """Losses and adapter of a run on several ranks are those of one process."""
    assert losses(folder) == pytest.approx(losses(alone), rel=LOSS)
    one, many = (load_file(f / "adapter_model.safetensors") for f in (alone, folder))
    assert one.keys() == many.keys()
    for name in one:  # 12 steps of AdamW at 5e-3: rounding where second moments are tiny
        np.testing.assert_allclose(many[name], one[name], atol=1e-4)


def assert_same_moments(one: Path, other: Path) -> None:
    """The optimizer's tensors in the newest checkpoints of two runs."""
    one, other = (load_file(newest_checkpoint(f)[0].folder / "optimizer.safetensors") for f in (one, other))
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(other[name], one[name], atol=1e-4 * np.abs(one[name]).max())


def rewrite_json(step_folder: Path, name: str, edit) -> None:
    """Changes a JSON file of a checkpoint by edit(content), with its new size and digest in the manifest."""
    file = step_folder / name
    content = json.loads(file.read_text())
    edited = edit(content)
    file.write_text(json.dumps(content if edited is None else edited))
    resign(step_folder, name)


def resign(step_folder: Path, *names: str) -> None:
    """Enters the size and digest of changed files into the manifest, so that only their content is odd."""
    file = step_folder / MANIFEST
    manifest = json.loads(file.read_text())
    for name in names:
        path = step_folder / name
        manifest["files"][name] = {"size": path.stat().st_size, "sha256": digest_of(path)}
    file.write_text(json.dumps(manifest))
