"""The tiny recursive model (Jolicoeur-Martineau 2025, arXiv:2510.04871): one small network, applied again and again.

State per position: x, the embedded input, scaled by sqrt(D); y, the current answer; z, the scratch state.
net(a, b): h = a + b; per layer h = rms(h + mix(h)), h = rms(h + swiglu(h)). Post-norm, no gains, no biases.
Latent recursion: z <- net(z, y + x) n times, then y <- net(y, z). Deep recursion: T of those, gradients through the
last one only. Deep supervision: N_sup of those, each with a loss and an update; y and z are carried detached.

Shapes: B rows, S positions (with the puzzle embedding's), D hidden_size, H heads, K head size, I SwiGLU width,
V vocabulary.
"""

import contextlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from recursive.config import ArchConfig, swiglu_width

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class AddNorm(torch.autograd.Function):
    """rms(h + r) in at least fp32, saving only its result and one number per position."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, r: torch.Tensor, eps: float):
        if h.dtype == torch.float64:
            wide = h + r
        else:
            wide = torch.add(h.float(), r)
        rstd = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        out = wide.mul_(rstd).to(h.dtype)
        ctx.save_for_backward(out, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        out, rstd = ctx.saved_tensors
        dot = (grad * out).mean(-1, keepdim=True, dtype=rstd.dtype)
        grad = torch.addcmul(grad, out, dot.to(grad.dtype), value=-1).mul_(rstd.to(grad.dtype))
        return grad, grad, None


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up of their concatenation, which is all it saves; the gradient is written in one buffer."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor):
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        out = torch.empty_like(gate_up)
        grad_gate, grad_up = out.chunk(2, -1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward(grad * up, gate, grad_input=grad_gate)
        return out


class Rotary(torch.autograd.Function):
    """Splits qkv [B, S, 3, H, K] into q, k, v [B, H, S, K] with rotary positions on q and k; one gradient buffer."""

    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):
        ctx.save_for_backward(cos, sin)
        turned = torch.empty_like(qkv[:, :, :2])
        _rotate(qkv[:, :, :2], cos, sin, turned)
        q, k = turned.unbind(2)
        # The copy keeps the large product from living as long as its third part.
        return q.transpose(1, 2), k.transpose(1, 2), qkv[:, :, 2].clone().transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad_q: torch.Tensor, grad_k: torch.Tensor, grad_v: torch.Tensor):
        cos, sin = ctx.saved_tensors
        grads = torch.stack([g.transpose(1, 2) for g in (grad_q, grad_k, grad_v)], 2)
        turned = torch.empty_like(grads)
        _rotate(grads[:, :, :2], cos, -sin, turned[:, :, :2])
        turned[:, :, 2] = grads[:, :, 2]
        return turned, None, None


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    """Rotates pairs (i, i + K/2), as GPT-NeoX does. cos, sin: [B or 1, S, 1, 1, K/2]."""
    half = x.shape[-1] // 2
    first = x[..., :half]
    second = x[..., half:]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)


# A compiler writes these kernels itself, from the formulas; eager, it is the functions above that save memory and time.


def add_norm(h: torch.Tensor, r: torch.Tensor, eps: float):
    if not torch.compiler.is_compiling():
        return AddNorm.apply(h, r, eps)
    wide = h.float() + r.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(h.dtype)


def swiglu(gate_up: torch.Tensor):
    if not torch.compiler.is_compiling():
        return SwiGLU.apply(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def rotary(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):
    if not torch.compiler.is_compiling():
        return Rotary.apply(qkv, cos, sin)
    (first, second), v = qkv[:, :, :2].chunk(2, -1), qkv[:, :, 2]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return *(t.transpose(1, 2) for t in turned.unbind(2)), v.transpose(1, 2)


class Context:
    """Inputs of one pass over positions: rotary tables, a mask or causality, and the KV caches of generation.

    `caches`: one (k, v) per application and layer, in the order of the calls; None outside of generation.
    """

    def __init__(
        self,
        rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
        causal: bool = True,
        mask: torch.Tensor | None = None,
        caches: list | None = None,
    ):
        self.rotary = rotary
        self.causal = causal
        self.mask = mask
        self.caches = caches
        self.calls = 0

    def extended(self, k: torch.Tensor, v: torch.Tensor):
        """Keys and values with those of the tokens before, for the application that calls."""
        if self.caches is None:
            return k, v
        if self.calls == len(self.caches):
            self.caches.append((k, v))
        else:
            before = self.caches[self.calls]
            self.caches[self.calls] = k, v = torch.cat([before[0], k], 2), torch.cat([before[1], v], 2)
        self.calls += 1
        return k, v


class Layer(nn.Module):
    """Mixing (attention, or a SwiGLU across positions) and a SwiGLU, each followed by its norm."""

    def __init__(self, arch: ArchConfig, num_positions: int):
        super().__init__()
        self.num_heads = arch.num_heads
        self.head_dim = arch.head_dim
        self.eps = arch.rms_norm_eps
        self.mlp_t = arch.mlp_t
        size = arch.hidden_size
        width = arch.swiglu_width
        if arch.mlp_t:
            across = swiglu_width(num_positions, arch.expansion)
            self.gate_up_t = linear(num_positions, 2 * across)
            self.down_t = linear(across, num_positions)
        else:
            inner = self.num_heads * self.head_dim
            self.qkv = linear(size, 3 * inner)
            self.out = linear(inner, size)
        self.gate_up = linear(size, 2 * width)
        self.down = linear(width, size)

    def forward(self, h_BSD: torch.Tensor, context: Context):
        if self.mlp_t:  # the norm of this half is across positions too, as in the paper's code
            h_BDS = h_BSD.transpose(1, 2)
            mixed = self.down_t(swiglu(self.gate_up_t(h_BDS)))
            h_BSD = add_norm(h_BDS, mixed, self.eps).transpose(1, 2)
        else:
            h_BSD = add_norm(h_BSD, self.attention(h_BSD, context), self.eps)
        return add_norm(h_BSD, self.down(swiglu(self.gate_up(h_BSD))), self.eps)

    def attention(self, h_BSD: torch.Tensor, context: Context):
        qkv = self.qkv(h_BSD).unflatten(-1, (3, self.num_heads, self.head_dim))
        if context.rotary:
            q, k, v = rotary(qkv, *context.rotary)
        else:
            q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
        k, v = context.extended(k, v)
        causal = context.causal and context.mask is None and q.shape[2] > 1
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=context.mask, is_causal=causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class RecursiveModel(nn.Module):
    """Embedding, the network, two heads, and the fixed start of y and z (buffers, never trained)."""

    y0_D: torch.Tensor
    z0_D: torch.Tensor

    def __init__(self, arch: ArchConfig, vocab_size: int, seq_len: int, num_puzzles: int = 0):
        super().__init__()
        self.arch = arch
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self.num_puzzles = num_puzzles
        size = arch.hidden_size
        positions = seq_len + arch.prefix_len
        self.embed = nn.Embedding(vocab_size, size)
        self.layers = nn.ModuleList(Layer(arch, positions) for _ in range(arch.L_layers))
        self.head = linear(size, vocab_size)
        self.q_head = nn.Linear(size, 1)
        if arch.pos_encodings == "learned":
            self.embed_pos = nn.Embedding(positions, size)
        if arch.puzzle_emb_ndim:
            self.puzzle_emb = nn.Embedding(num_puzzles, arch.puzzle_emb_ndim)
        self.register_buffer("y0_D", torch.empty(size))
        self.register_buffer("z0_D", torch.empty(size))
        self.dtype = DTYPES[arch.forward_dtype]
        self.network = self.apply_layers  # compiled where that pays
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Initial weights: truncated normal of std 1/sqrt(inputs); q starts at -5, so that nothing halts at first."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                truncated_normal(module.weight, module.in_features**-0.5)
        truncated_normal(self.embed.weight, self.arch.hidden_size**-0.5)
        if self.arch.pos_encodings == "learned":
            truncated_normal(self.embed_pos.weight, self.arch.hidden_size**-0.5)
        truncated_normal(self.y0_D, 1.0)
        truncated_normal(self.z0_D, 1.0)
        self.q_head.weight.zero_()
        self.q_head.bias.fill_(-5.0)
        if self.arch.puzzle_emb_ndim:
            self.puzzle_emb.weight.zero_()

    # ---- the equations

    def input_embedding(
        self, ids_BS: torch.Tensor, positions_BS: torch.Tensor | None = None, puzzle_ids_B: torch.Tensor | None = None
    ):
        """x: tokens, after the puzzle embedding if there is one, times sqrt(D)."""
        arch = self.arch
        x = self.embed(ids_BS)
        if arch.puzzle_emb_ndim and puzzle_ids_B is not None:
            flat = self.puzzle_emb(puzzle_ids_B)
            flat = F.pad(flat, (0, arch.prefix_len * arch.hidden_size - flat.shape[-1]))
            x = torch.cat([flat.unflatten(-1, (arch.prefix_len, arch.hidden_size)), x], 1)
        if arch.pos_encodings == "learned":
            if positions_BS is None:
                at = torch.arange(x.shape[1], device=x.device)
            else:
                at = positions_BS
            x = math.sqrt(0.5) * (x + self.embed_pos(at))
        return (math.sqrt(arch.hidden_size) * x).to(self.dtype)

    def start(self, batch: int, length: int):
        """(y, z) of fresh rows, `length` positions of tokens."""
        shape = batch, length + self.arch.prefix_len, -1
        return self.y0_D.to(self.dtype).expand(shape), self.z0_D.to(self.dtype).expand(shape)

    def apply_layers(self, h_BSD: torch.Tensor, context: Context):
        for layer in self.layers:
            h_BSD = layer(h_BSD, context)
        return h_BSD

    def latent_recursion(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, context: Context):
        """n times z <- net(z, y + x), then y <- net(y, z)."""
        last = self.arch.L_cycles - 1
        for i in range(self.arch.L_cycles):
            with self.no_gradient(self.arch.one_step_gradient and i < last):
                z = self.network(z + (y + x), context)
        return self.network(y + z, context), z

    def deep_recursion(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, context: Context):
        """T latent recursions, all but the last without gradient."""
        if self.arch.plain:
            return self.network(x, context), z
        for cycle in range(self.arch.H_cycles):
            with self.no_gradient(cycle < self.arch.H_cycles - 1):
                y, z = self.latent_recursion(x, y, z, context)
        return y, z

    @staticmethod
    def no_gradient(wanted: bool):
        if wanted:
            return torch.no_grad()
        return contextlib.nullcontext()

    def context(
        self,
        length: int,
        positions_BS: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        caches: list | None = None,
    ) -> Context:
        """The Context of `length` token positions, or of `positions_BS`."""
        rotary = None
        if self.arch.pos_encodings == "rope" and not self.arch.mlp_t:
            rotary = self.rotary(length, positions_BS)
        return Context(rotary, self.arch.causal, mask, caches)

    def rotary(self, length: int, positions_BS: torch.Tensor | None = None):
        half = self.arch.head_dim // 2
        device = self.y0_D.device
        if self.dtype == torch.float64:
            wide = torch.float64
        else:
            wide = torch.float32
        inverse = self.arch.rope_theta ** (-torch.arange(half, dtype=wide, device=device) / half)
        if positions_BS is None:
            positions_BS = torch.arange(length + self.arch.prefix_len, device=device)[None]
        angles = (positions_BS.to(wide)[..., None] * inverse)[:, :, None, None]
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def forward(
        self,
        ids_BS: torch.Tensor,
        y: torch.Tensor,
        z: torch.Tensor,
        puzzle_ids_B: torch.Tensor | None = None,
        context: Context | None = None,
        positions_BS: torch.Tensor | None = None,
    ):
        """(y, z) after one deep recursion on rows whose state is (y, z)."""
        x = self.input_embedding(ids_BS, positions_BS, puzzle_ids_B)
        with self.casting():
            return self.deep_recursion(x, y, z, context or self.context(ids_BS.shape[1]))

    def casting(self):
        """Products in forward_dtype; each weight is cast once per forward."""
        if self.dtype != torch.bfloat16:
            return contextlib.nullcontext()
        return torch.autocast(self.y0_D.device.type, torch.bfloat16)

    def tokens_of(self, y_BSD: torch.Tensor):
        """y without the positions of the puzzle embedding."""
        return y_BSD[:, self.arch.prefix_len :]

    def logits(self, y: torch.Tensor):
        with self.casting():
            return self.head(y)

    def halt_logit(self, y_BSD: torch.Tensor):
        """q: above 0 where a row should halt, read at the first position."""
        return self.q_head(y_BSD[:, 0].to(self.q_head.weight.dtype))[:, 0]


# ---- losses


def log_stablemax(logits_NV: torch.Tensor) -> torch.Tensor:
    """log of s / sum s with s(a) = a + 1 for a >= 0, else 1 / (1 - a) (Prieto et al. 2025)."""
    grown = torch.where(logits_NV >= 0, logits_NV.clamp(min=0) + 1, 1 / (1 - logits_NV.clamp(max=0)))
    return torch.log(grown) - torch.log(grown.sum(-1, keepdim=True))


def token_losses(logits_NV: torch.Tensor, labels_N: torch.Tensor, loss_type: str) -> torch.Tensor:
    """The nll of each label. Logits in at least fp32: MPS has no float64."""
    if logits_NV.dtype != torch.float64:
        logits_NV = logits_NV.float()
    if loss_type == "stablemax_cross_entropy":
        return F.nll_loss(log_stablemax(logits_NV), labels_N, reduction="none")
    return F.cross_entropy(logits_NV, labels_N, reduction="none")


def halting_loss(q_B: torch.Tensor, right_B: torch.Tensor) -> torch.Tensor:
    """0.5 * BCE(q, [all targets of the row are right]), summed over rows."""
    return 0.5 * F.binary_cross_entropy_with_logits(q_B, right_B.to(q_B.dtype), reduction="sum")


# ---- parts


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def truncated_normal(tensor: torch.Tensor, std: float) -> None:
    """Normal numbers cut at two standard deviations, scaled so that `std` is what they have."""
    nn.init.trunc_normal_(tensor, 0.0, 1.0, -2.0, 2.0)
    tensor.mul_(std / 0.8796256610342398)  # the std of a standard normal cut at +-2
