"""--router_aux_loss_coef on MLX: the torch engine's loss of the same routers."""

import pytest

from finetune.data.collate import microbatches
from finetune.errors import PlanError
from tests.mlx_engine.test_runs import flags_of
from tests.support import tiny
from tests.support.cells import slow
from tests.support.mlx_engines import is_torch_s_moves_and_resumes, mlx_engine, save, torch_engine_of
from tests.support.runs import read_events
from train import fine_tune

ROWS = tiny.dataset()
ATTENTION = dict(lora_target_modules="q_proj,k_proj,v_proj,o_proj", router_aux_loss_coef=0.5)


def stepped(engine, count: int, tokens: int = 64) -> list:
    batches = [
        microbatches(ROWS, [(3 * n + i) % len(ROWS) for i in range(4)], "padded", 4, tokens, 0) for n in range(count)
    ]
    return [engine.train_step(batch, 2e-3) for batch in batches]


def assert_alike(mine: list, theirs: list) -> None:
    for name in ("nll", "aux_loss"):
        assert [getattr(r, name) for r in mine] == pytest.approx([getattr(r, name) for r in theirs], rel=1e-5)
    assert [r.grad_norm for r in mine] == pytest.approx([r.grad_norm for r in theirs], rel=1e-3)


@pytest.mark.parametrize("architecture", ["mixtral", *slow("qwen3_moe", "qwen2_moe")])
@pytest.mark.parametrize("more", [{}, *slow({"modules_to_save": "gate"})])
def test_losses_are_torch_s_however_a_step_is_cut(tmp_path, architecture, more):
    folder = save(tmp_path, architecture)
    count = 3 if architecture == "mixtral" and not more else 20
    found = {tokens: stepped(mlx_engine(folder, **ATTENTION, **more), count, tokens) for tokens in (64, 10**6)}
    assert_alike(found[64], stepped(torch_engine_of(folder, **ATTENTION, **more), count))
    assert_alike(found[10**6], found[64])
    without = stepped(mlx_engine(folder, **ATTENTION | {"router_aux_loss_coef": 0.0}, **more), count)
    assert without[0].aux_loss is None and without[1].nll != pytest.approx(found[64][1].nll, rel=1e-6)


def test_recomputed_blocks_and_padding_give_the_same_loss(tmp_path):
    folder = save(tmp_path / "model", "mixtral")
    config = tmp_path / "mlx.json"
    config.write_text('{"length_multiple": 16}')
    how = dict(use_gradient_checkpointing="true", mlx_config=str(config))
    assert_alike(stepped(mlx_engine(folder, **ATTENTION, **how), 3), stepped(mlx_engine(folder, **ATTENTION), 3))


def test_dropout_of_the_count_is_that_of_the_step(tmp_path):
    folder = save(tmp_path, "mixtral")
    how = dict(ATTENTION, lora_dropout=0.3)
    engine, other = (mlx_engine(folder, **how | {"router_aux_loss_coef": coef}) for coef in (1e-9, 0.0))
    assert [r.nll for r in stepped(engine, 2)] == pytest.approx([r.nll for r in stepped(other, 2)], rel=1e-5)


def test_a_model_without_such_routers_is_one_line(tmp_path):
    with pytest.raises(PlanError, match="--router_aux_loss_coef 0.5: mlx-lm's llama has no router"):
        mlx_engine(save(tmp_path), **ATTENTION)


@pytest.mark.slow
def test_a_run_is_torch_s_moves_and_resumes_bitwise(rows_file, tmp_path):
    tokenizer = tiny.train_tokenizer(tmp_path / "model")
    model = save(tmp_path / "model", "mixtral", vocab_size=len(tokenizer))
    more = dict(ATTENTION, max_steps=20, save_every=5, keep_last=9, num_epochs=9)
    for backend in ("mlx", "cpu"):
        fine_tune(**flags_of(model, rows_file, tmp_path / backend, **more, backend=backend))
    assert all("aux_loss" in event for event in read_events(tmp_path / "mlx", "step"))
    is_torch_s_moves_and_resumes(tmp_path)
