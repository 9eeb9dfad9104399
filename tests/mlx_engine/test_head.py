"""The sums of MLX's cross-entropy at the widths of real vocabularies, against fp64."""

import mlx.core as mx
import numpy as np
import pytest

from finetune.mlx_engine.head import log_sum_exp
from tests.support.mlx_engines import mlx_engine, save


@pytest.mark.parametrize("columns", [260, 1_000, 32_000, 49_152, 50_257, 128_256, 262_144])
def test_log_sums_and_their_gradients_are_fp64s_at_every_width(columns):
    logits = np.random.default_rng(0).normal(size=(4, columns)).astype(np.float32) * 3
    exact = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    found = np.array(log_sum_exp(mx.array(logits)))
    assert found.shape == (4, 1)
    # fp32 rounds a sum near 15 to 1e-6; summed at once, 32,000 columns are off by 2.6e-5.
    assert np.abs(found[:, 0] - exact).max() <= 2e-6
    grads = np.array(mx.grad(lambda x: log_sum_exp(x).sum())(mx.array(logits)))
    np.testing.assert_allclose(grads, np.exp(logits - exact[:, None]), rtol=1e-5, atol=1e-9)


def test_log_sums_below_a_high_logit_are_not_all_too_small():
    """As a trained model's: one column far above the rest, whose exponentials a plain sum would lose one by one."""
    logits = np.random.default_rng(1).normal(size=(64, 49_152)).astype(np.float32) * 3
    logits[:, 7] = 25
    exact = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    off = np.array(log_sum_exp(mx.array(logits)))[:, 0] - exact
    assert abs(off.mean()) <= 3e-7 and np.abs(off).max() <= 4e-6  # half a unit in the last place of 25 is 1e-6


def test_the_soft_cap_of_the_config_is_in_the_chunked_head(tmp_path):
    engine = mlx_engine(save(tmp_path / "model", "gemma2", final_logit_softcapping=0.05))
    assert engine.head is not None and engine.head.softcap == 0.05
