"""Memory is predicted before a run and printed next to what the run measured."""

import json

import pytest

from tests.support.commands import ROOT, command, finish
from tests.support.planned import dry_run, shape_of
from tests.support.runs import read_events
from train import fine_tune


@pytest.mark.parametrize(
    ("name", "weights", "code"),
    [("llama-3-70b", 70.554e9, 0), ("qwen3-32b", 32.762e9, 0), ("mixtral-8x22b", 140.63e9, 0)],
)
def test_two_devices_of_24_gib_and_the_shipped_configs(name, weights, code):
    assert shape_of(name).num_weights == pytest.approx(weights, rel=1e-4)
    found, out, err = dry_run(f"--model_name examples/configs/{name} --assume_memory 24GiB --assume_world_size 2")
    assert found == code, err
    assert "total" in out and ("fits" if code == 0 else "does not fit, by") in out
    if code:
        assert "such devices" in out
    else:
        assert "largest batch that fits in one forward: --batch_size" in out


def test_weights_are_needed_for_a_run_and_not_for_a_dry_run(tmp_path):
    (tmp_path / "config.json").write_text((ROOT / "examples/configs/qwen3-32b/config.json").read_text())
    code, out, _ = dry_run("--assume_memory 80GiB", model_name=tmp_path)
    assert code == 0 and "(read from config.json)" in out
    done = finish(command(model_name=tmp_path))
    assert done.returncode == 2 and "has no model.safetensors" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_run_prints_predicted_beside_measured_and_writes_the_same_items(tiny_model, rows_file, tmp_path, capsys):
    fine_tune(
        model_name=str(tiny_model),
        dataset=str(rows_file),
        output_dir=str(tmp_path / "out"),
        train_type="lora",
        backend="cpu",
        batch_size="auto",
        context_length=64,
        max_steps=2,
        log_to="stdout",
        precision="fp32",
        verbose=True,
    )
    start, *_, end = read_events(tmp_path / "out")
    predicted, measured = start["predicted_memory_bytes"], end["peak_memory_bytes"]
    for name in ("base", "trainable", "gradients", "optimizer", "activations"):
        assert predicted["items"][name] == pytest.approx(measured["items"][name], rel=0.05), name
    assert sum(n for k, n in predicted["items"].items() if k != "loading") == predicted["total"]
    beside = {"loading", "evaluating"}
    assert sum(n for k, n in measured["items"].items() if k not in beside) == measured["total"]
    saved = json.loads((tmp_path / "out" / "run_plan.json").read_text())
    assert saved["requested"]["batch_size"] == "auto" and saved["settled"]["batch_size"] == 8
    out = capsys.readouterr().out
    assert "predicted" in out and "measured" in out and "error" in out
    resumed = fine_tune(resume=str(tmp_path / "out"), max_steps=4)
    assert resumed.step == 4
