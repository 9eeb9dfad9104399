"""What a model's generation_config.json says, its stop tokens and sampling, goes on with every form of its weights."""

import argparse
import json
import shutil

import pytest

import export
from finetune.open_checkpoint import open_engine

# As an instruction model has it: more stop tokens than config.json, and words that transformers would refuse to save.
OWN = {"eos_token_id": [2, 7], "do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1}


@pytest.fixture
def base(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "base")
    (folder / "generation_config.json").write_text(json.dumps(OWN))
    return folder


def found(folder) -> dict:
    return json.loads((folder / "generation_config.json").read_text())


@pytest.mark.parametrize("backend", ["cpu", pytest.param("mlx", marks=pytest.mark.slow)])
def test_of_a_full_run(base, plain_run, tmp_path, backend):
    full = dict(train_type="full", lora_rank=None, backend=backend)
    plain_run(model_name=str(base), max_steps=2, save_every=2, **full)
    step = tmp_path / "out" / "checkpoints" / "step-2"
    assert found(tmp_path / "out") == found(step) == OWN
    for folder in (tmp_path / "out", step):
        _, _, ends, _ = open_engine(export_args(folder))
        assert {2, 7} <= ends


def export_args(folder):
    return argparse.Namespace(checkpoint=str(folder), device="cpu", precision="auto", n_bits=None)


@pytest.mark.parametrize("to", ["hf", pytest.param("mlx", marks=pytest.mark.slow)])
def test_of_an_export(base, plain_run, tmp_path, to):
    plain_run(model_name=str(base), max_steps=1)
    argv = ["--checkpoint", str(tmp_path / "out"), "--to", to, "--output_dir", str(tmp_path / "merged")]
    assert export.main(argv) == 0
    assert found(tmp_path / "merged") == OWN
