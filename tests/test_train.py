"""The loop of train.py, through fine_tune."""

import json
import shutil

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from finetune.errors import PlanError
from tests.support.runs import losses, steps


@pytest.mark.promise("CLI_06")
def test_an_epoch_takes_each_row_once_and_its_last_step_the_rows_that_remain(run, tmp_path):
    run(batch_size=5, gradient_accumulation_steps=1, num_epochs=2)
    per_step = [s["num_targets"] for s in steps(tmp_path / "out")]
    assert len(per_step) == 10
    assert sum(per_step[:5]) == sum(per_step[5:])


@pytest.mark.parametrize("layout", ["padded", "padding_free"])
def test_a_step_of_more_rows_than_there_are_takes_all_of_them(run, tmp_path, layout, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i} =", "completion": f" {i * 7}"}) + "\n" for i in range(3)))
    flags = dict(dataset=str(rows), lora_dropout=0.0, max_steps=4, batch_layout=layout)
    run(batch_size=3, gradient_accumulation_steps=1, output_dir=str(tmp_path / "a"), **flags)
    capsys.readouterr()
    run(batch_size=2, gradient_accumulation_steps=3, output_dir=str(tmp_path / "b"), **flags)
    assert "3 rows are fewer than the 6 of a step: each step takes all of them" in capsys.readouterr().out
    assert [s["num_targets"] for s in steps(tmp_path / "b")] == [s["num_targets"] for s in steps(tmp_path / "a")]
    np.testing.assert_allclose(losses(tmp_path / "b"), losses(tmp_path / "a"), rtol=1e-5)  # sums of other parts


@pytest.mark.promise("CLI_14")
def test_accumulation_changes_nothing_in_the_curve(run, tmp_path):
    flags = dict(lora_dropout=0.0, max_steps=8)
    run(batch_size=1, gradient_accumulation_steps=4, output_dir=str(tmp_path / "a"), **flags)
    run(batch_size=4, gradient_accumulation_steps=1, output_dir=str(tmp_path / "b"), **flags)
    np.testing.assert_allclose(losses(tmp_path / "a"), losses(tmp_path / "b"), rtol=1e-5)


@pytest.mark.promise("CLI_03")
def test_the_base_folder_is_never_written_to(run, tiny_model):
    before = {p.name: p.read_bytes() for p in tiny_model.iterdir()}
    run(max_steps=1)
    assert {p.name: p.read_bytes() for p in tiny_model.iterdir()} == before


def test_what_trades_memory_for_speed_changes_no_loss(run, tmp_path):
    same = dict(train_type="qlora", max_steps=4, lora_dropout=0.0)
    trades = dict(low_memory=True, cache_dequantized="false", microbatch_tokens=20, use_gradient_checkpointing="true")
    run(output_dir=str(tmp_path / "plain"), **same)
    for name, value in trades.items():
        run(output_dir=str(tmp_path / name), **same, **{name: value})
        # Sums over a batch are split differently.
        np.testing.assert_allclose(losses(tmp_path / name), losses(tmp_path / "plain"), rtol=1e-6, err_msg=name)


def test_python_reads_config_and_dry_run_as_the_command_line_does(plain_run, tmp_path):
    (tmp_path / "c.yaml").write_text("lora_rank: 2\n")
    assert plain_run(dry_run=True, config=str(tmp_path / "c.yaml")).status == "planned"
    assert not (tmp_path / "out").exists()
    with pytest.raises(PlanError, match="no such file"):
        plain_run(config="/nope.yaml")


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_a_row_of_zeros_under_dora_is_named_with_its_module(plain_run, tiny_model, tmp_path, backend):
    folder = tmp_path / "base"
    shutil.copytree(tiny_model, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"][3] = 0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    line = "--use_dora: .*q_proj has rows of zeros, .*Leave q_proj out of --lora_target_modules"
    with pytest.raises(PlanError, match=line):
        plain_run(model_name=str(folder), backend=backend, use_dora=True, lora_target_modules="q_proj", max_steps=1)
