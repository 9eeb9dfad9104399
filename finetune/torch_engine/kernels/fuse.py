"""Replaces a loaded model's RMSNorms, SwiGLU and RoPE by one operation each, where they compute what ours do.

No list of model classes: a class's own code is run on a few numbers on the CPU and must give the formula's bits.
"""

import copy
import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import nn

from finetune.errors import MODEL_ERRORS
from finetune.torch_engine.kernels import formulas, ops

EPS = ("variance_epsilon", "eps")
SIZE = 16


def fuse(model: nn.Module, device: torch.device, dtype: torch.dtype) -> str | None:
    """Replaces modules by their fused kernels. Returns the reason if none was replaced; None otherwise. Replaces none
    on a CPU, whose own operations are as fast.
    """
    if device.type in ("cpu", "mps"):
        return f"none for {device.type}"
    error = ops.error_on(device, dtype)
    if error is None:
        replace(model)
    return error


def replace(model: nn.Module) -> dict[str, int]:
    """{kind of function: number replaced}. A module gets a subclass of its own class, the same one for all of its kind,
    so that torch.compile sees layers of one code.
    """
    found = {"RMSNorm": 0, "SwiGLU": 0, "RoPE": 0, "layer": 0}
    module: Any
    for module in model.modules():
        kind: Any = type(module)
        if hasattr(kind, "fused"):
            continue
        if (offset := norm_offset(kind)) is not None and not module.weight.requires_grad:
            module.__class__ = _fused_norm(kind, next(name for name in EPS if hasattr(module, name)), offset)
            found["RMSNorm"] += 1
        elif is_swiglu(kind) and _takes_swiglu(module):
            module.__class__ = _fused_mlp(kind)
            found["SwiGLU"] += 1
        elif is_layer(kind) and _takes_sums(module):
            module.__class__ = _fused_layer(kind)
            found["layer"] += 1
        found["RoPE"] += _replace_rope(sys.modules[kind.__module__])
    return found


@cache
def _fused_norm(kind: Any, eps: str, offset: bool) -> type:
    def forward(self: Any, x: torch.Tensor):
        if x.dtype != self.weight.dtype:
            return kind.forward(self, x)
        return ops.RMSNorm.apply(x, self.weight, getattr(self, eps), offset)

    return _subclass(kind, forward, epsilon=property(lambda self: getattr(self, eps)), offset=offset)


@cache
def _fused_mlp(kind: Any) -> type:
    def forward(self: Any, x: torch.Tensor):
        together = self.__dict__.get("together")
        if together is not None and together.runs():
            return together.apply(x)
        return self.down_proj(ops.SwiGLU.apply(self.gate_proj(x), self.up_proj(x)))

    return _subclass(kind, forward, takes_together=True)


@cache
def _fused_layer(kind: Any) -> type:
    def forward(self: Any, hidden_states: torch.Tensor, **given: Any):
        first = self.input_layernorm
        second = self.post_attention_layernorm
        if not (_is_alone(first) and _is_alone(second) and hidden_states.dtype == first.weight.dtype):
            return kind.forward(self, hidden_states, **given)
        hidden_states, normed = _sum_and_norm(first, hidden_states, None)
        attended, _ = self.self_attn(hidden_states=normed, **given)
        hidden_states, normed = _sum_and_norm(second, hidden_states, attended)
        return hidden_states + self.mlp(normed)

    return _subclass(kind, forward)


def _sum_and_norm(norm: Any, x: torch.Tensor, y: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.SumRMSNorm.apply(x, y, norm.weight, norm.epsilon, norm.offset)


def _is_alone(norm: Any) -> bool:
    """True if calling a norm computes what its class does, and no more."""
    own = norm.__dict__
    return not (own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own)


def _subclass(kind: Any, forward: Callable, **more: Any) -> type:
    """The class with this forward, under its own name: model code and configs look for modules by it."""
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__, "fused": True, **more})


def _fused_rope(own: Callable) -> Callable:
    @wraps(own)
    def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any, **named: Any):
        plain = not rest and not named and q.ndim == 4 and q.shape[0] == 1 and cos.shape == (1, q.shape[2], q.shape[3])
        if plain and q.dtype == k.dtype == cos.dtype == sin.dtype:
            return ops.RoPE.apply(q, k, cos, sin)
        return own(q, k, cos, sin, *rest, **named)

    rope.__dict__["fused"] = True
    return rope


# ---- what a class computes, by its own code on the CPU


@cache
def norm_offset(kind: Any) -> bool | None:
    """True if an RMSNorm class adds 1 to its weight; None if it is not an RMSNorm, or computes something else."""
    if not kind.__name__.endswith("RMSNorm") or kind.__module__.startswith("torch."):
        return None
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator).to(torch.bfloat16) for shape in ((5, SIZE), (SIZE,)))
    twin = kind.__new__(kind)
    nn.Module.__init__(twin)
    twin.weight = nn.Parameter(weight, requires_grad=False)
    for name in EPS:
        setattr(twin, name, 1e-3)
    try:
        own = kind.forward(twin, x)
    except MODEL_ERRORS:
        return None
    same = [offset for offset in (False, True) if torch.equal(own, formulas.rms_norm(x, weight, 1e-3, offset)[0])]
    if same:
        return same[0]
    return None


@cache
def is_swiglu(kind: Any) -> bool:
    """True if a class's forward is down_proj(act_fn(gate_proj(x)) * up_proj(x))."""
    if not kind.__name__.endswith("MLP") or kind.__module__.startswith("torch."):
        return False
    twin = kind.__new__(kind)
    nn.Module.__init__(twin)
    torch_state = torch.Generator().manual_seed(0)
    for name in ("gate_proj", "up_proj", "down_proj"):
        linear = nn.Linear(SIZE, SIZE, bias=False, device="meta").to_empty(device="cpu")
        linear.weight = nn.Parameter(torch.randn(SIZE, SIZE, generator=torch_state), requires_grad=False)
        setattr(twin, name, linear)
    twin.act_fn = nn.SiLU()
    x = torch.randn(3, SIZE, generator=torch_state)
    try:
        own = kind.forward(twin, x)
    except MODEL_ERRORS:
        return False
    return torch.equal(own, twin.down_proj(formulas.swiglu(twin.gate_proj(x), twin.up_proj(x))))


@cache
def is_layer(kind: Any) -> bool:
    """True if a class's forward is h + mlp(norm(h)), h = x + attention(norm(x)), and attention gets all it is given."""
    if not kind.__name__.endswith("DecoderLayer") or kind.__module__.startswith("torch."):
        return False
    twin = kind.__new__(kind)
    nn.Module.__init__(twin)
    asked: list[dict] = []

    def attention(hidden_states: torch.Tensor, **given: Any):
        asked.append(given)
        return hidden_states.exp(), None

    twin.input_layernorm = _Stub(lambda x: x.sin())
    twin.post_attention_layernorm = _Stub(lambda x: x.cos())
    twin.mlp = _Stub(torch.tanh)
    twin.self_attn = _Stub(attention)
    x = torch.randn(1, 3, SIZE, generator=torch.Generator().manual_seed(0))
    given = {name: object() for name in ("attention_mask", "position_ids", "past_key_values", "position_embeddings")}
    given |= {"use_cache": False, "documents": object()}
    try:
        own = kind.forward(twin, x, **given)
    except MODEL_ERRORS:
        return False
    middle = x + x.sin().exp()
    return torch.is_tensor(own) and torch.equal(own, middle + middle.cos().tanh()) and asked == [given]


class _Stub(nn.Module):
    """A module that computes a function."""

    def __init__(self, function: Callable):
        super().__init__()
        self.forward = function


def _takes_sums(module: Any) -> bool:
    """True if a layer's norms, which are replaced after it, are RMSNorms that do not train."""
    norms: list[Any] = [module.input_layernorm, module.post_attention_layernorm]
    kinds: list[Any] = [type(norm) for norm in norms]
    return all(norm_offset(kind) is not None for kind in kinds) and not any(n.weight.requires_grad for n in norms)


def _takes_swiglu(module: Any) -> bool:
    return type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")


def _replace_rope(code: Any) -> int:
    """1 if the module's function apply_rotary_pos_emb was replaced: it turns halves of a head, as Llama's does."""
    own = getattr(code, "apply_rotary_pos_emb", None)
    if own is None or hasattr(own, "fused") or not _turns_halves(own):
        return 0
    code.apply_rotary_pos_emb = _fused_rope(own)
    return 1


@cache
def _turns_halves(own: Callable) -> bool:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 5, SIZE, generator=generator).to(torch.bfloat16) for heads in (4, 2))
    angles = torch.rand(1, 5, SIZE // 2, generator=generator).repeat(1, 1, 2)
    cos = angles.cos().to(torch.bfloat16)
    sin = angles.sin().to(torch.bfloat16)
    try:
        found = own(copy.copy(q), copy.copy(k), cos, sin)
        return all(torch.equal(a, b) for a, b in zip(found, formulas.rope(q, k, cos, sin, 1.0), strict=True))
    except MODEL_ERRORS:
        return False
