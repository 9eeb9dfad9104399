"""MLX engines of tiny models, and the torch engines that they are compared with: the same folder, adapters and rows."""

import dataclasses
import json

import pytest
import torch

from finetune.config import TrainConfig
from finetune.mlx_engine.load import build_engine, load_model
from finetune.parts.parts import Parts
from tests.support import tiny
from tests.support.build import load_model as load_torch
from tests.support.build import torch_engine
from tests.support.runs import copy_up_to, losses, steps
from train import fine_tune

CPU = torch.device("cpu")


def settings_of(**changes) -> TrainConfig:
    base = dict(precision="fp32", lr=1e-2, train_type="lora", lora_rank=4, cache_dequantized="false")
    return dataclasses.replace(TrainConfig(), **{**base, "use_gradient_checkpointing": "false", **changes})


def save(folder, architecture="llama", dtype=torch.float32, **changes):
    """A tiny model's folder as transformers 5 writes it."""
    tiny.build(architecture, **changes).to(dtype).save_pretrained(folder)
    return folder


def config_of(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


def mlx_engine(folder, verify=True, **changes):
    settings, config = settings_of(**changes), config_of(folder)
    engine = build_engine(*load_model(folder, config, Parts(settings)), Parts(settings), 0, config)
    if verify:
        engine.verify("auto")
    return engine


def torch_engine_of(folder, layout="padded", **changes):
    settings = settings_of(**changes)
    engine = torch_engine(load_torch(folder, settings, CPU), settings, CPU, base_config=config_of(folder))
    engine.verify(layout)
    return engine


def is_torch_s_moves_and_resumes(root, moves=(("cpu", "mlx"),)) -> None:
    """Shows that root/mlx, a run of 20 steps that saved every fifth, has the losses of root/cpu, goes on from step 5 to
    the same bits, and from step 10 on the other engine. `moves`: from one to the other.
    """
    assert losses(root / "mlx") == pytest.approx(losses(root / "cpu"), rel=1e-5)
    folder = copy_up_to(root / "mlx", 5, root / "again")
    assert fine_tune(resume="auto", output_dir=str(folder)).step == 20
    assert steps(folder) == steps(root / "mlx")
    for source, backend in moves:
        moved = copy_up_to(root / source, 10, root / f"moved-to-{backend}")
        assert fine_tune(resume=str(moved), backend=backend).step == 20
        assert losses(moved) == pytest.approx(losses(root / "cpu"), rel=1e-5)
