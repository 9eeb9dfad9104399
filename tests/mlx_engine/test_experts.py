"""Adapters of experts on MLX: losses, files and states of the torch engine."""

import json

import numpy as np
import pytest

import score
from finetune.errors import PlanError
from tests.mlx_engine.test_load_balancing import assert_alike, stepped
from tests.mlx_engine.test_runs import flags_of
from tests.support import tiny
from tests.support.cells import slow
from tests.support.mlx_engines import is_torch_s_moves_and_resumes, mlx_engine, save, torch_engine_of
from train import fine_tune

HOW = {
    "all": {},
    "down": dict(lora_target_modules="q_proj,experts.down_proj"),
    "gate and up": dict(lora_target_modules="gate_up_proj", use_rslora=True),
    "ranks": dict(lora_rank_pattern=r"experts\..*=2,o_proj=6", init_lora_weights="gaussian"),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("architecture", ["mixtral", *slow("qwen3_moe", "qwen2_moe")])
def test_losses_and_states_are_torch_s_however_many_tokens_a_microbatch_has(tmp_path, architecture, how):
    """Microbatches below and above the number of pairs from which mlx-lm sorts them by expert."""
    folder = save(tmp_path, architecture)
    count = 3 if architecture == "mixtral" else 20
    changes = dict(router_aux_loss_coef=0.1) | HOW[how]
    torch = torch_engine_of(folder, **changes)
    start = {name: array.copy() for name, array in torch.trainable_state().items()}
    theirs = stepped(torch, count)
    for tokens in (30, 10**6):
        mlx = mlx_engine(folder, **changes)
        mine = mlx.trainable_state()
        assert mine.keys() == start.keys() and any("experts" in name for name in mine)
        for name in mine:  # a logarithm and a cosine of two libraries, in the gaussian ones
            np.testing.assert_allclose(mine[name], start[name], rtol=1e-5 if how == "ranks" else 0, atol=0)
        assert_alike(stepped(mlx, count, tokens), theirs)
    learned, wanted = mlx.trainable_state(), torch.trainable_state()
    assert all(np.abs(learned[name] - wanted[name]).max() < 1e-4 for name in learned)
    ours, config = (e.describe_weights("base", "digest")["adapter_config.json"] for e in (mlx, torch))
    assert ours == config


@pytest.mark.slow
def test_a_run_is_torch_s_resumes_moves_and_is_opened_by_both(rows_file, tmp_path, capsys):
    tokenizer = tiny.train_tokenizer(tmp_path / "model", bos=False)
    model = save(tmp_path / "model", "mixtral", vocab_size=len(tokenizer))
    more = dict(max_steps=20, save_every=5, keep_last=9, num_epochs=9)
    for backend in ("cpu", "mlx"):
        fine_tune(**flags_of(model, rows_file, tmp_path / backend, backend=backend) | more)
    is_torch_s_moves_and_resumes(tmp_path, (("cpu", "mlx"), ("mlx", "cpu")))
    capsys.readouterr()
    scores = []
    for device in ("cpu", "mlx"):
        score.main(["--checkpoint", str(tmp_path / "mlx"), "--dataset", str(rows_file), "--device", device, "--json"])
        scores.append(json.loads(capsys.readouterr().out.splitlines()[-1])["loss"])
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)


def test_what_has_no_place_is_one_line(tmp_path):
    folder = save(tmp_path, "mixtral")
    with pytest.raises(PlanError, match="--use_dora true: PEFT has no DoRA for fused experts"):
        mlx_engine(folder, use_dora=True, lora_target_modules="down_proj")
    assert not any("experts" in name for name in mlx_engine(folder, use_dora=True).trainable_state())
