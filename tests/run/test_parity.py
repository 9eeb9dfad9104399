"""--parity: two backends take the same steps, and the verdict is written."""

import json
import xml.etree.ElementTree as xml

import numpy as np
import pytest

import train
from finetune.errors import PlanError
from finetune.run import parity
from tests.support.cells import slow
from tests.support.rows import jsonl
from tests.support.small_runs import model_in


def certificate(folder) -> dict:
    return json.loads((folder / "parity.json").read_text())


@pytest.mark.parametrize("train_type", [pytest.param("lora", marks=pytest.mark.slow), "qlora"])
def test_torch_and_mlx_are_the_same_run_here(tiny_model, rows_file, tmp_path, capsys, train_type):
    flags = f"--model_name {tiny_model} --dataset {rows_file} --output_dir {tmp_path} --train_type {train_type}"
    group = " --group_size 32" if train_type == "qlora" else ""
    code = train.main(f"{flags}{group} --parity torch,mlx --batch_size 4 --max_steps 8 --lora_rank 4".split())
    found, text = certificate(tmp_path), capsys.readouterr().out
    assert code == 0 and found["same"] and "cpu and mlx: the same run in fp32 over 8 steps" in text
    # fp32 products of two libraries: 3e-7 here.
    assert found["largest_loss_difference"] < 1e-5 and found["steps"] == len(found["curves"][0]["losses"]) == 8
    lines = xml.parse(tmp_path / "parity.svg").getroot().findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.get("points").split()) for line in lines] == [8, 8]


def test_runs_that_differ_are_told_so():
    one, other = (
        parity.Track(name, [2.0, 1.0 + off], [1.0, 1.0], 1.0, {"w": np.full(2, off)})
        for name, off in (("cpu", 0.0), ("mlx", 0.01))
    )
    found = parity.compare(one, other, "fp32")
    assert not found["same"] and found["largest_weight_difference"] == 0.01
    assert "NOT the same run in fp32 over 2 steps" in parity.report(found)[-1]
    assert parity.compare(one, other, "fp16")["same"]


def test_runs_that_sample_other_answers_are_told_so():
    """Their losses are near zero whatever they sample."""
    one, other = (
        parity.Track(name, [0.0], [1.0], 1.0, {"w": np.ones(2)}, [[3, 4], [5, n]]) for n, name in enumerate("ab")
    )
    found = parity.compare(one, other, "fp32")
    assert not found["same"] and "sampled answers: 1 of 2 are the same tokens" in parity.report(found)
    assert parity.compare(one, one, "fp32")["same"]


@pytest.mark.parametrize("more", [slow({"updates_per_rollout": 2, "kl_beta": 0.05})[0], {}])
def test_runs_by_rewards_are_the_same_here(tmp_path, more):
    """Each step has answers of its own, or as many steps as it should."""
    (tmp_path / "mine.py").write_text("def length(prompts, answers, rows):\n    return [len(a) for a in answers]\n")
    rows = jsonl(tmp_path / "rows.jsonl", [{"prompt": f"{i} + {i} = "} for i in range(6)])
    flags = dict(dataset=rows, reward=f"{tmp_path / 'mine.py'}:length", num_generations=3, max_completion_length=6)
    flags |= dict(model_name=model_in(tmp_path / "model", 1, 2), batch_size=2, max_steps=4, mask_truncated="false")
    flags |= dict(train_type="lora", lr=5e-3, context_length=64, output_dir=tmp_path / "out", parity="cpu,mlx")
    assert train.main([word for name, value in (flags | more).items() for word in (f"--{name}", str(value))]) == 0
    found = certificate(tmp_path / "out")
    assert found["same_answers"] == found["answers"] == 24 // more.get("updates_per_rollout", 1)
    assert found["same"] and found["largest_loss_difference"] < 1e-5 and found["largest_grad_norm_difference"] < 1e-4


def test_a_loss_near_zero_is_compared_as_the_difference_of_logits_that_it_is():
    assert parity.difference(2.0, 2.5) == pytest.approx(0.2)
    assert parity.difference(0.003, 0.004) == pytest.approx(0.001)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mlx", "--parity mlx: must name two different backends"),
        ("mlx,mlx", "must name two different backends"),
        ("cpu,torch", "both are cpu here"),
        ("torch,jax", "'jax' is not a backend"),
    ],
)
def test_backends_to_compare_are_checked(text, message):
    with pytest.raises(PlanError, match=message):
        parity.backends(text)


def test_dropout_cannot_be_compared(tiny_model, rows_file):
    with pytest.raises(PlanError, match="--lora_dropout 0.1: backends draw other random numbers"):
        train.main(f"--model_name {tiny_model} --dataset {rows_file} --parity torch,mlx --lora_dropout 0.1".split())


def test_a_file_of_the_user_s_own_stays(tmp_path):
    (tmp_path / "parity.json").write_text("mine")
    with pytest.raises(PlanError, match="--output_dir .*: holds parity.json, which is not of a run"):
        parity.write({}, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["parity.json"] and (tmp_path / "parity.json").read_text() == "mine"
