"""The demo's model on MLX: its logits, its score, and its adapter in plain PEFT."""

import numpy as np
import pytest

from finetune.mlx_engine import logit_check
from finetune.model_files.demo_model import DEMO_MODEL
from finetune.model_files.files import find_model
from finetune.torch_engine import transformers_logits
from tests.promises.test_demo import assert_answers_elsewhere
from tests.support.commands import command, finish
from tests.support.runs import read_events


@pytest.mark.slow
def test_the_demo_models_logits_are_transformers(tmp_path):
    files, ids = find_model(DEMO_MODEL), np.arange(100, 140)
    theirs = transformers_logits.logits(files.folder, ids)
    config = dict(files.config)
    theta = (config.get("rope_parameters") or config)["rope_theta"]
    new = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}  # as transformers 5 writes it
    # fp32 products of two libraries over 30 layers, on logits of up to 30.
    assert np.abs(logit_check.logits(files.folder, new, ids) - theirs).max() < 1e-3
    untranslated = {k: v for k, v in new.items() if k != "rope_parameters"}
    assert np.abs(logit_check.logits(files.folder, untranslated, ids) - theirs).max() > 1


@pytest.mark.slow
@pytest.mark.parametrize("train_type", ["lora", "qlora"])
def test_the_demo_reaches_its_score_on_mlx(tmp_path, train_type):
    out = finish(command(output_dir=tmp_path / "demo", backend="mlx", train_type=train_type), timeout_s=3600)
    assert out.returncode == 0, out.stderr
    before, after = read_events(tmp_path / "demo", "eval")
    assert before["exact_match"] < 0.05 and after["exact_match"] > 0.85
    if train_type == "lora":  # the base there is this one, not one of 4 bits
        assert_answers_elsewhere(tmp_path, find_model(DEMO_MODEL).folder)
