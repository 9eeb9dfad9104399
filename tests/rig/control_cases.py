"""Resumes that lose a part of the state on purpose: the oracle must notice every one, or its zeros mean nothing."""

from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from tests.rig.children import start_run
from tests.rig.damage_cases import DAMAGED_STEP, crashed_run
from tests.rig.materials import ONE_RANK, Place
from tests.rig.oracle import Outcome, differences
from tests.support.runs import resign

LOST = ("rng.safetensors", "optimizer.safetensors")


def control(seed: int, place: Place) -> Outcome:
    """The random state, or the moments, of the checkpoint are replaced, and the manifest is made to fit."""
    variant, lost, outcome = ONE_RANK[seed // len(LOST) % len(ONE_RANK)], LOST[seed % len(LOST)], Outcome()
    place.empty()
    run = crashed_run(place, variant)
    forget(run / f"checkpoints/step-{DAMAGED_STEP}", lost)
    ended = start_run(place.flags(variant, run), run.parent).end()
    outcome.judge(ended, (0,), f"{variant} without {lost}")
    if not differences(run, place.whole(variant)):
        outcome.fail("rig", f"a resume of {variant} without {lost} is not noticed")
    return outcome


def forget(step: Path, name: str) -> None:
    """Zeroes the moments, or puts another seed's random state in; the checkpoint is signed again and verifies."""
    arrays = load_file(step / name)
    if name.startswith("rng"):
        other = torch.Generator().manual_seed(1).get_state().numpy()
        arrays = {key: other for key in arrays}
    else:
        arrays = {key: np.zeros_like(array) for key, array in arrays.items()}
    save_file(arrays, step / name)
    resign(step, name)
