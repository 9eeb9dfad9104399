"""The CUDA kernel against the torch path. Without a GPU it runs in triton's interpreter, if triton is installed."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

CODE = """
import torch
from finetune.quantizers import nf4, nf4_triton
from finetune.quantizers.linear import Format

device = "cuda" if torch.cuda.is_available() else "cpu"
dtypes = [torch.float32, torch.float16] + [torch.bfloat16] * (device == "cuda")  # the interpreter cuts bf16 off
for rows, columns in ((3, 64), (5, 100), (4, 4096), (2, 17000), (1, 1)):
    for double in (False, True):
        for dtype in dtypes:
            fmt = Format(4, 64, "nf4", double, torch.float32)
            weight = torch.randn(rows, columns)
            stored = nf4.quantize(weight, fmt)
            wanted = nf4.dequantize(stored, dtype, weight.shape, fmt)
            levels = torch.tensor(nf4.LEVELS, device=device)
            found = nf4_triton.dequantize({k: v.to(device) for k, v in stored.items()}, levels, columns, 64, dtype)
            assert torch.equal(found.cpu(), wanted), (rows, columns, double, dtype)
# A trial of its own: right in fp32 and fp16, and in bf16 where the device computes it.
tried = {dtype: nf4.triton_error(torch.device(device), dtype) for dtype in nf4.DTYPES}
assert tried[torch.float32] is None and tried[torch.float16] is None, tried
assert (tried[torch.bfloat16] is None) == (device == "cuda"), tried
print("equal")
"""


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which comes with CUDA builds of torch"
)
def test_the_kernel_gives_the_torch_paths_numbers_bit_for_bit():
    interpret = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], env={**os.environ, **interpret}, capture_output=True, text=True)
    assert done.stdout.strip() == "equal", done.stderr[-2000:]
