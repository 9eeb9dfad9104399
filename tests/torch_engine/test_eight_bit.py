"""8-bit moments of sharded weights: resumed bitwise over the same ranks, within a bound over others."""

from functools import partial

import numpy as np
import pytest
import torch

from finetune.eight_bit import BLOCK, quantized
from finetune.torch_engine import eight_bit
from tests.support import cases, eight_bit_cases, ranks
from tests.support.commands import command, finish
from tests.support.runs import losses

bitsandbytes = pytest.importorskip("bitsandbytes")
# fp32 rounding of a bound that is met exactly between two codes.
ROUNDING = 1e-4


def run(layout: str, function, tmp_path, folder):
    size = cases.LAYOUTS[layout].world_size if layout else 1
    return ranks.run(size, function, tmp_path / (layout or "one"), layout=layout, folder=str(folder))


@pytest.mark.parametrize(
    "layout",
    [
        "FSDP2 3",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("FSDP2 2", "FSDP2 4", "TP 2", "PP 2", "FSDP2 2 x TP 2")),
    ],
)
def test_moments_are_saved_and_loaded_bitwise_over_the_same_ranks(layout, tmp_path):
    """Also where a block of a rank's rows is none of the full weight, and in the predicted number of bytes."""
    found = run(layout, eight_bit_cases.save, tmp_path, tmp_path)
    assert all(f["bitwise"] and f["next"] for f in found), found
    if "PP" not in layout:  # the last ranks may have fewer rows
        assert max(f["held"] for f in found) == found[0]["predicted"], found


def test_a_step_in_chunks_has_the_bits_of_one_of_the_whole_weight():
    torch.manual_seed(0)
    start = torch.randn(3, eight_bit.CHUNK // 2 + 40)
    gradients = torch.randn(2, *start.shape)
    ends = []
    for in_chunks in (False, True):
        p = torch.nn.Parameter(start.clone())
        optimizer = bitsandbytes.optim.AdamW8bit([p], lr=1e-2, weight_decay=0.1)
        if in_chunks:
            optimizer.update_step = partial(eight_bit.update_in_chunks, optimizer, optimizer.update_step)
        for gradient in gradients:
            p.grad = gradient.clone()
            optimizer.step()
        ends.append([p.data, *(optimizer.state[p][name] for name in ("state1", "state2", "absmax1", "absmax2"))])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "then"),
    [("FSDP2 3", "FSDP2 2"), ("FSDP2 2 x TP 2", "FSDP2 3"), ("TP 2", ""), ("", "TP 2"), ("FSDP2 2", "FSDP2 4")],
)
def test_other_ranks_load_moments_within_the_bound(saved, then, tmp_path):
    run(saved, eight_bit_cases.save, tmp_path, tmp_path)
    found = run(then, eight_bit_cases.loaded, tmp_path / "then", tmp_path)
    assert all(f["worst"] <= 1 + ROUNDING and f["weights"] and f["finite"] for f in found), found
    # Two and four shards of this model have the same blocks, which are requantized to themselves, or nearly.
    assert any(f["moved"] for f in found) or (saved, then) == ("FSDP2 2", "FSDP2 4")


def test_quantizing_again_takes_the_nearest_level():
    levels = np.array([-0.99, -0.5, 0.0, 0.25, 1.0], np.float32)
    values = np.random.default_rng(0).normal(size=(7, 100)).astype(np.float32)
    codes, scales = quantized(values, levels)
    assert codes.shape == values.shape and len(scales) == 3
    each = np.repeat(scales, BLOCK)[: values.size]
    nearest = np.abs(values.reshape(-1, 1) - levels * each[:, None]).min(1)
    np.testing.assert_allclose(np.abs(levels[codes.reshape(-1)] * each - values.reshape(-1)), nearest, atol=1e-6)
    zeros = quantized(np.zeros(300, np.float32), levels)
    assert not levels[zeros[0]].any() and not zeros[1].any()


FULL = "--train_type full --optimizer adamw_8bit --lr 1e-3 --lr_scheduler constant --save_every 4 --keep_last 9"


@pytest.mark.slow
def test_a_sharded_run_resumes_bitwise_and_on_other_ranks(base, tmp_path):
    base = {k: v for k, v in base.items() if k not in ("train_type", "lora_rank", "lr")}
    two = "--world_size 2 --batch_size 2"
    for name, flags in (("one", "--batch_size 4"), ("two", two), ("cut", f"{two} --max_steps 4")):
        code, _, err = finish(command(base, FULL, flags, output_dir=tmp_path / name))
        assert code == 0, err
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=2e-3)
    code, _, err = finish(command(base, FULL, two, "--max_steps 12 --resume auto", output_dir=tmp_path / "cut"))
    assert code == 0, err
    assert losses(tmp_path / "cut") == losses(tmp_path / "two")
    more = "--max_steps 16 --num_epochs 4 --resume auto --world_size 4 --tp_degree 2 --batch_size 2"
    code, _, err = finish(command(base, FULL, more, output_dir=tmp_path / "cut"))
    assert code == 0, err
    code, _, err = finish(
        command(base, FULL, "--max_steps 16 --num_epochs 4 --batch_size 4", output_dir=tmp_path / "all")
    )
    assert code == 0, err
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "all"), rel=5e-3)
