"""--optimizer adamw_8bit on MLX: bitsandbytes' levels, blocks and step, and a state that moves to torch and back."""

import bitsandbytes.functional
import mlx.core as mx
import numpy as np
import pytest
import torch

from finetune.data.collate import microbatches
from finetune.eight_bit import dynamic_map, quantized, to_rows
from finetune.mlx_engine import eight_bit, optim
from finetune.parts.engine_limits import MLX_UPDATED_BYTES
from tests.mlx_engine.test_runs import flags_of
from tests.support import tiny
from tests.support.cells import slow
from tests.support.mlx_engines import is_torch_s_moves_and_resumes, mlx_engine, save, torch_engine_of
from train import fine_tune

ROWS = tiny.dataset()
HOW = dict(optimizer="adamw_8bit", wd=0.1, lora_rank=64, loraplus_lr_ratio=2.0)


@pytest.mark.parametrize("signed", [True, False])
def test_levels_are_those_of_bitsandbytes(signed):
    assert np.array_equal(dynamic_map(signed), bitsandbytes.functional.create_dynamic_map(signed=signed).numpy())


@pytest.mark.parametrize("signed", [True, False])
def test_codes_and_scales_are_those_of_bitsandbytes(signed):
    """On a CPU of the tests, all; a kernel that rounds a product otherwise may move one of a thousand by a level."""
    values = torch.randn(3, 700, generator=torch.Generator().manual_seed(1)) ** 3
    values[0, :256] = 0
    values = values if signed else values.abs()
    codes, scales = eight_bit.quantized(mx.array(values.numpy()), mx.array(dynamic_map(signed)))
    levels = torch.from_numpy(dynamic_map(signed))
    theirs, absmax = torch.ops.bitsandbytes.quantize_blockwise(values, levels, 256)
    assert np.array_equal(np.array(scales), absmax.numpy())
    off = np.array(codes).astype(int) - theirs.numpy().astype(int)
    assert (off != 0).mean() < 1e-3 and abs(off).max() <= 1


def test_a_large_weight_updated_in_slices_is_the_one_updated_whole():
    """Two steps of 4.4 million weights, of which the last block is not full."""
    rng = np.random.default_rng(0)
    weights = [mx.array(rng.normal(size=(2101, 2100)).astype(np.float32))] * 2
    states = [eight_bit.start(weights[0])] * 2
    assert 4 * weights[0].size > MLX_UPDATED_BYTES
    for count in (1, 2):
        grad = mx.array(rng.normal(size=weights[0].shape).astype(np.float32))
        for i, update in enumerate((optim.adamw_8bit, optim._adamw_8bit)):
            how = dict(lr=mx.array(1e-3), decay=0.1, count=count, adam=(0.9, 0.999, 1e-8))
            weights[i], states[i] = update(optim.Update(weights[i], grad, state=states[i], **how))
    assert np.array_equal(weights[0], weights[1]) and states[0].keys() == states[1].keys()
    assert all(np.array_equal(states[0][name], array) for name, array in states[1].items())


def stepped(engine, count: int, first: int = 0) -> list[float]:
    found = []
    for n in range(first, first + count):
        rows = [(3 * n + i) % len(ROWS) for i in range(4)]
        found.append(engine.train_step(microbatches(ROWS, rows, "padded", 4, 64, 0), 1e-3).nll)
    return found


@pytest.mark.parametrize("changes", [{}, *slow({"train_type": "full"}, {"modules_to_save": "embed_tokens"})])
def test_losses_are_torch_s_and_state_moves_bitwise(tmp_path, changes):
    folder = save(tmp_path)
    how = HOW | changes
    if changes.get("train_type") == "full":
        how = {name: value for name, value in how.items() if not name.startswith("lora")}
    mine, theirs = mlx_engine(folder, **how), torch_engine_of(folder, **how)
    count = 20 if changes else 5
    assert stepped(mine, count) == pytest.approx(stepped(theirs, count), rel=1e-5)
    kinds = {key.rpartition(".")[2] for key in mine.optimizer_state()[0]}
    assert kinds == {"state1", "state2", "absmax1", "absmax2", "qmap1", "qmap2"}
    for first, build in ((theirs, mlx_engine), (mine, torch_engine_of)):
        engine = build(folder, **how)
        state = first.trainable_state(), *first.optimizer_state()
        state = ({k: v.copy() for k, v in state[0].items()}, {k: v.copy() for k, v in state[1].items()}, state[2])
        engine.load_state(*state, engine.rng_state())
        moments, values = engine.optimizer_state()
        assert moments.keys() == state[1].keys() and values["counts"] == state[2]["counts"]
        assert all(np.array_equal(moments[k], v) and moments[k].dtype == v.dtype for k, v in state[1].items())
        assert stepped(engine, 1, count) == pytest.approx(stepped(first, 1, count), rel=1e-5)


def test_moments_of_several_shards_are_quantized_again(tmp_path):
    engine = mlx_engine(save(tmp_path), **HOW)
    stepped(engine, 2)
    weights, moments, values = engine.trainable_state(), *engine.optimizer_state()
    name = next(key.removesuffix(".qmap1") for key in moments if key.endswith(".qmap1"))
    rows, columns = moments[f"{name}.state1"].shape
    halves = [[[[0, rows // 2 + 1], [0, columns]]], [[[rows // 2 + 1, rows], [0, columns]]]]
    saved = moments | {f"{name}.pieces": to_rows(halves)}
    for number in "12":
        levels = moments[f"{name}.qmap{number}"]
        full = levels[moments[f"{name}.state{number}"]] * 0.5
        parts = [quantized(full[slice(*half[0][0])], levels) for half in halves]
        saved[f"{name}.state{number}"] = np.concatenate([codes for codes, _ in parts])
        saved[f"{name}.absmax{number}"] = np.concatenate([scales for _, scales in parts])
    engine.load_state(weights, saved, values, engine.rng_state())
    assert f"{name}.pieces" not in engine.optimizer_state()[0]
    assert len(engine.optimizer.moments[f"{name}.absmax1"]) == -(-rows * columns // 256)
    assert np.isfinite(stepped(engine, 1)[0])


@pytest.mark.slow
def test_a_run_is_torch_s_moves_and_resumes_bitwise(tiny_model, rows_file, tmp_path):
    more = dict(HOW, max_steps=20, save_every=5, keep_last=9, num_epochs=9, lora_dropout=0.0)
    for backend in ("mlx", "cpu"):
        fine_tune(**flags_of(tiny_model, rows_file, tmp_path / backend, backend=backend) | more)
    is_torch_s_moves_and_resumes(tmp_path, (("cpu", "mlx"), ("mlx", "cpu")))
