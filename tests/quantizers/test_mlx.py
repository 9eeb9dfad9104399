"""The affine format against MLX."""

import pytest
import torch

from finetune.quantizers import mlx, packing
from finetune.quantizers.linear import Format


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_affine_format_has_the_bits_of_mx_quantize(bits, group, dtype):
    import mlx.core as mx
    import numpy as np

    weight = torch.randn(64, 256).to(dtype)
    weight[0], weight[1], weight[2], weight[3] = 0, 1, weight[2].abs(), -weight[3].abs()
    weight[4, 5], weight[5], weight[6] = 1e4, 1e-9, weight[6].round()
    theirs = mx.array(weight.float().numpy()).astype(
        {torch.float32: mx.float32, torch.bfloat16: mx.bfloat16, torch.float16: mx.float16}[dtype]
    )
    packed, scales, biases = mx.quantize(theirs, group_size=group, bits=bits)
    fmt = Format(bits, group, "affine", False, dtype)
    ours = mlx.quantize(weight, fmt)
    assert np.array_equal(np.array(packed).view(np.int32), ours["packed"].view(torch.int32).numpy())
    for name, wanted in (("scales", scales), ("biases", biases)):
        found = packing.as_scales(ours[name], dtype).float().numpy()
        assert np.array_equal(found, np.array(wanted.astype(mx.float32)))
    back = mx.dequantize(packed, scales, biases, group_size=group, bits=bits)
    mine = mlx.dequantize(ours, dtype, weight.shape, fmt).float().numpy()
    assert np.array_equal(mine, np.array(back.astype(mx.float32)))
