"""Norms, SwiGLU and RoPE as one operation each: the same numbers, fewer launches, and a trial on the device."""

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from finetune.data.collate import microbatches
from finetune.torch_engine.kernels import formulas, fuse, ops
from finetune.torch_engine.lora.layers import LoRAProduct, Products, cast_once, layers, multiplies_to_fp32
from tests.support import launches, tiny
from tests.support.engines import ROWS, assert_same, engine, gradients

# What of each architecture is replaced: norms, MLPs, the rotation of its file.
REPLACED = {
    "llama": (5, 2, True),
    "qwen2": (5, 2, True),
    "qwen3": (9, 2, True),
    "mistral": (5, 2, True),
    "gemma2": (9, 0, True),  # its MLP has a GELU
    "gemma3": (13, 0, True),
    "mixtral": (5, 0, True),
    "qwen3_moe": (9, 0, True),
    "olmo2": (0, 2, True),  # its norm rounds once
    "granite": (5, 2, True),
    "cohere": (0, 2, False),  # LayerNorm; pairs of neighbours
    "phi3": (5, 0, True),
    "gpt2": (0, 0, False),
}


@pytest.mark.parametrize("architecture", REPLACED)
def test_a_model_with_them_gives_the_losses_and_gradients_of_its_own_code(architecture, own_rope):
    """Forward bit for bit; backward is a formula of its own, in fp32 products of another order."""
    built = engine(architecture)
    parts = microbatches(ROWS, np.arange(8), built.layout, 8, 70, 0)
    losses, wanted = [built.forward.nll(batch).item() for batch in parts], gradients(built, parts)
    found = fuse.replace(built.model)
    assert (found["RMSNorm"], found["SwiGLU"], bool(found["RoPE"])) == REPLACED[architecture]
    assert [built.forward.nll(batch).item() for batch in parts] == losses
    assert_same(gradients(built, parts), wanted, 2e-6)


def test_a_norm_that_trains_and_a_class_that_computes_something_else_stay_as_they_are(own_rope):
    assert fuse.replace(tiny.build("llama"))["RMSNorm"] == 0  # every weight trains

    class OtherRMSNorm(torch.nn.Module):
        def forward(self, x):
            return self.weight * x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps).to(x.dtype) * 1.01

    class OtherMLP(torch.nn.Module):
        def forward(self, x):
            return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))

    assert fuse.norm_offset(OtherRMSNorm) is None and not fuse.is_swiglu(OtherMLP)


def test_qlora_with_recomputation_launches_at_most_half_of_what_it_did():
    """285 per layer, forward and backward, before adapters were cast once and these were one operation each."""
    forward, backward, _ = launches.per_layer(quantized=True, recomputed=True)
    assert sum(forward.values()) + sum(backward.values()) <= 142, (forward, backward)
    assert forward["aten::_to_copy"] == backward["aten::_to_copy"] == 0  # nothing is cast in a microbatch
    assert forward["finetune::nf4_dequantize"] == 7 and forward["torch_attn::_varlen_attn"] == 1
    before = launches.per_layer(quantized=True, recomputed=True, fused=False)
    assert sum(map(sum, (before[0].values(), before[1].values()))) > 200


def test_lora_launches_at_most_60_kernels_per_layer_behind_at_most_20_nodes():
    """75 and 42 before q, k and v, and gate and up, were computed together, and gradients added in place."""
    forward, backward, nodes = launches.per_layer(quantized=False, recomputed=False)
    assert sum(forward.values()) + sum(backward.values()) <= 60, (forward, backward)
    assert sum(nodes.values()) <= 20 and not nodes["AccumulateGrad"], nodes


def test_a_layer_whose_sums_are_not_the_norms_stays_as_it_is():
    """Granite scales what it adds; Gemma's layers have four norms."""
    wanted = {"llama": True, "qwen3": True, "mixtral": True, "granite": False, "gemma2": False}
    assert {name: fuse.is_layer(type(tiny.build(name).model.layers[0])) for name in wanted} == wanted


def test_a_norm_with_a_hook_is_called(own_rope):
    built = engine("llama")
    fuse.replace(built.model)
    called = []
    layer = built.model.model.layers[0]
    for norm in (layer.input_layernorm, layer.post_attention_layernorm):
        hook = norm.register_forward_hook(lambda module, *rest: called.append(module))
        built.forward.nll(microbatches(ROWS, np.arange(8), built.layout, 8, 70, 0)[0])
        hook.remove()
    assert called == [layer.input_layernorm, layer.post_attention_layernorm]


# ---- adapters cast once


def test_casts_of_a_step_give_what_casts_at_each_use_give(device):
    built = engine("llama", device=device)
    built.model.to(torch.bfloat16)
    for parameter in built.parallel.local_params.values():
        parameter.data = parameter.data.float()
    parts = microbatches(ROWS, np.arange(8), built.layout, 8, 70, 0)
    wanted = gradients(built, parts)
    with cast_once(built.model, torch.bfloat16):
        found = gradients(built, parts)
        assert all(set(layer.casts) == {"lora_A", "lora_B"} for layer in layers(built.model).values())
    assert all(layer.casts is None for layer in layers(built.model).values())
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("scaling", [2.0, 0.37])
def test_the_product_with_an_adapter_is_autograds(scaling):
    generator = torch.Generator().manual_seed(0)
    shapes = ((9, 16), (4, 16), (12, 4), (12, 16))
    x, a, b, weight = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    inputs = [t.requires_grad_() for t in (x, a, b)]
    of = Products((lambda stored, dtype: stored[0],), ((weight,),), (None,), scaling=scaling, a=a, bs=(b,))
    outs = (LoRAProduct.apply(x, None, of, a, b, weight), x @ weight.t() + scaling * (x @ a.t()) @ b.t())
    mine, right = ([out, *torch.autograd.grad(out.sin().sum(), inputs)] for out in outs)
    for one, other in zip(mine, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_fp32_results_of_16_bit_products_are_tried_on_the_device():
    assert multiplies_to_fp32(torch.device("meta"), torch.bfloat16)


# ---- kernels


def test_formulas_backward_are_autograds():
    generator = torch.Generator().manual_seed(0)
    x, weight, grad, gate, up = (torch.randn(5, 24, generator=generator, dtype=torch.float64) for _ in range(5))
    weight, cos = weight[0], torch.rand(1, 5, 12, generator=generator, dtype=torch.float64).repeat(1, 1, 2)
    x, gate, up = (t.requires_grad_() for t in (x, gate, up))
    for offset in (False, True):
        out = ops.RMSNorm.apply(x.float(), weight.float(), 1e-6, offset)
        plain = formulas.rms_norm(x, weight, 1e-6, offset)[0]
        found, wanted = (torch.autograd.grad(y.double(), x, grad)[0] for y in (out, plain))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        for y in (None, up):
            both = ops.SumRMSNorm.apply(x.float(), None if y is None else y.float(), weight.float(), 1e-6, offset)
            total = x if y is None else x + y
            plain = (total, formulas.rms_norm(total, weight, 1e-6, offset)[0])
            learn = [x] if y is None else [x, up]
            losses = [(one.double().sin() + other.double() * grad).sum() for one, other in (both, plain)]
            found, wanted = (torch.autograd.grad(loss, learn) for loss in losses)
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    pairs = [torch.autograd.grad(y, (gate, up), grad) for y in (ops.SwiGLU.apply(gate, up), formulas.swiglu(gate, up))]
    torch.testing.assert_close(*pairs, rtol=1e-6, atol=1e-6)  # its sigmoid is fp32
    q, k = (torch.randn(1, heads, 5, 24, generator=generator, dtype=torch.float64) for heads in (4, 2))
    q, k, sin = q.requires_grad_(), k.requires_grad_(), (1 - cos**2).sqrt()
    pairs = [
        torch.autograd.grad([y.sin().sum() for y in turned], (q, k))
        for turned in (ops.RoPE.apply(q, k, cos, sin), formulas.rope(q, k, cos, sin, 1.0))
    ]
    torch.testing.assert_close(*pairs)


CODE = """
import torch
from finetune.torch_engine.kernels import ops
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
dtypes = [torch.float32, torch.float16] + [torch.bfloat16] * (device.type == "cuda")  # the interpreter cuts bf16 off
assert [ops.error_on(device, dtype) for dtype in dtypes] == [None] * len(dtypes), [
    ops.error_on(device, dtype) for dtype in dtypes]
from finetune.torch_engine.kernels import triton_kernels
right = triton_kernels.swiglu
triton_kernels.swiglu = lambda gate, up: right(up, gate)
ops.error_on.cache_clear()
assert "swiglu is off by" in ops.error_on(device, torch.float32)
print("right")
"""


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which comes with CUDA builds of torch"
)
def test_the_kernels_give_the_formulas_numbers_and_their_trial_finds_a_wrong_one():
    interpret = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], env={**os.environ, **interpret}, capture_output=True, text=True)
    assert done.stdout.strip() == "right", done.stderr[-2000:]
