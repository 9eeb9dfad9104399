"""Chunked cross-entropy, summed over target positions; the full logits are never materialized.
T target positions, H hidden size, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from finetune.model_files.logit_scaling import logit_scaling
from finetune.parts.engine_limits import CACHED_LOGITS, logits_rows
from finetune.quantizers.linear import compute_dtype, without_autocast
from finetune.torch_engine.lora.layers import LoRALinear
from finetune.torch_engine.parallel.process_groups import REDUCE_SCATTER, ProcessGroups
from finetune.torch_engine.parallel.slices import Slice, locate

LOG_OF_SMALL = -69.0  # log(1e-30), far above the smallest normal fp32 number


@dataclass(frozen=True)
class VocabularyShard:
    """The rows `start` to `stop` of a vocabulary of `size`, which this rank has; no other has more than `longest`.

    `over`: groups whose ranks have the others. Those of a tensor-parallel group compute the same positions, those of a
    shard group each have their own and exchange them.
    """

    start: int
    stop: int
    size: int
    longest: int
    groups: ProcessGroups
    over: tuple[str, ...] = ("tp",)

    @property
    def exchanges_positions(self) -> bool:
        return "shard" in self.over

    def all_gather(self, logits_TV: torch.Tensor) -> torch.Tensor:
        """Of all ranks. Collective."""
        return Slice(logits_TV.ndim - 1, size=self.size).all_gather(logits_TV, self.groups)

    def maximum(self, tensor: torch.Tensor) -> torch.Tensor:
        """In place. Collective."""
        for group in self.over:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.groups.process_groups[group])
        return tensor

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """In place. Collective."""
        for group in self.over:
            self.groups.all_reduce(tensor, group)
        return tensor

    # ---- over a shard group

    def local(self, parameter, device: torch.device) -> torch.Tensor:
        """This rank's rows of a sharded parameter, differentiable, on the device that computes."""
        return parameter.to_local().to(device)

    def most(self, count: int) -> int:
        """The largest count of the shard group. Collective."""
        most = torch.tensor([count])  # on the host, which then waits for the other hosts only, not for the device
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.groups.process_groups["shard"])
        return int(most.item())

    def all_gather_positions(self, part_T: torch.Tensor) -> torch.Tensor:
        """The parts of all ranks, which have as many positions, one after the other. Collective."""
        return torch.cat(self.groups.all_gather_group(part_T, "shard"))

    def reduce_scatter(self, partial_NT: torch.Tensor) -> torch.Tensor:
        """The sums of this rank's positions, of partial sums of all ranks' positions. Collective."""
        out_T = partial_NT.new_empty(len(partial_NT) // self.groups.dims.shards, *partial_NT.shape[1:])
        REDUCE_SCATTER(out_T, partial_NT.contiguous(), group=self.groups.process_groups["shard"])
        return out_T


@dataclass(frozen=True)
class Head:
    """The LM head, with the logit scaling and softcapping of the config: softcap * tanh(x * scale / softcap).
    `shard`: the rows that this rank has, if not all.
    """

    linear: torch.nn.Linear
    scale: float
    softcap: float | None
    adapter: LoRALinear | None = None
    shard: VocabularyShard | None = None

    @classmethod
    def of(cls, model, shard: VocabularyShard | None = None) -> "Head | None":
        """The head of a transformers model; None if it is not a linear, or has DoRA or dropout."""
        linear, adapter = model.get_output_embeddings(), None
        if isinstance(linear, LoRALinear) and not linear.dropout and linear.lora_magnitude_vector is None:
            linear, adapter = linear.base, linear
        if not isinstance(linear, torch.nn.Linear):
            return None
        scale, softcap = logit_scaling(model.config.get_text_config().to_dict())
        return cls(linear, scale, softcap, adapter, shard)

    def logits(self, hidden_TH) -> torch.Tensor:
        if self.shard is not None and self.shard.exchanges_positions:
            logits_TV = self.linear(hidden_TH)
        else:
            logits_TV = F.linear(hidden_TH, self.linear.weight.to(hidden_TH.dtype), self.linear.bias)
        if self.adapter is not None:
            a, b = (p.to(hidden_TH.dtype) for p in (self.adapter.lora_A, self.adapter.lora_B))
            logits_TV = logits_TV + (hidden_TH @ a.t()) @ b.t() * self.adapter.scaling
        logits_TV = logits_TV * self.scale
        if self.softcap is not None:
            logits_TV = torch.tanh(logits_TV / self.softcap) * self.softcap
        here = self.shard is None or self.shard.exchanges_positions
        return logits_TV if here else self.shard.all_gather(logits_TV)

    def nll(self, hidden_TH, labels_T, copy=None, smoothing: float = 0.0) -> torch.Tensor:
        """Summed NLL over T: -log p(label), fp32 scalar, differentiable in hidden states and in a trainable head.

        `copy`: applied to each weight if several ranks compute the logits of some positions each. `smoothing`: the
        target's weight that is spread over the vocabulary (label smoothing, Szegedy et al. 2016).
        """
        if self.shard is not None and self.shard.exchanges_positions:
            weights = [None if p is None else self.shard.local(p, hidden_TH.device) for p in self._weights()]
            how = self.scale, self.softcap, torch.is_grad_enabled(), self.shard, smoothing
            return RowsNLL.apply(hidden_TH, *weights, labels_T, *how)
        arguments = self._arguments(labels_T, self.adapter, copy or (lambda weight: weight))
        return _ChunkedNLL.apply(hidden_TH, *arguments, self.shard, smoothing)

    def log_probs(self, hidden_TH, labels_T) -> torch.Tensor:
        """log p(label) of each position [T], fp32 or wider, differentiable in what `nll` is."""
        adapter = None if self.adapter is not None and self.adapter.off else self.adapter
        arguments = self._arguments(labels_T, adapter, lambda weight: weight)
        return _ChunkedLogProbs.apply(hidden_TH, *arguments, self.shard)

    def _weights(self) -> tuple:
        return self.linear.weight, self.linear.bias

    def _arguments(self, labels_T, adapter: LoRALinear | None, copy) -> tuple:
        """What both functions below take after the hidden states."""
        lora = (None, None, 0.0)
        if adapter is not None:
            lora = (copy(adapter.lora_A), copy(adapter.lora_B), adapter.scaling)
        learning = torch.is_grad_enabled()  # always False inside a Function
        return *map(copy, self._weights()), labels_T, self.scale, self.softcap, learning, *lora


class _ChunkedNLL(torch.autograd.Function):
    """Computes gradients in forward, from each chunk's logits, so that no chunk of logits is kept for backward."""

    @staticmethod
    def forward(
        ctx, hidden_TH, weight_VH, bias_V, labels_T, scale, softcap, learning, a_RH, b_VR, lora_scale, shard, smoothing
    ):
        dtype = compute_dtype(hidden_TH)
        with without_autocast(hidden_TH):
            weight, hidden = weight_VH.to(dtype), hidden_TH.to(dtype)
            need_hidden, need_weight, need_bias = (learning and need for need in ctx.needs_input_grad[:3])
            grad_hidden = torch.empty_like(hidden) if need_hidden else None
            grad_weight = torch.zeros_like(weight_VH, dtype=torch.float32) if need_weight else None
            grad_bias = torch.zeros_like(bias_V, dtype=torch.float32) if need_bias else None
            adapted = a_RH is not None
            learn_a = adapted and learning and ctx.needs_input_grad[7]
            a, b = (a_RH.to(dtype), b_VR.to(dtype)) if adapted else (None, None)
            grad_a = torch.zeros_like(a_RH, dtype=torch.float32) if learn_a else None
            grad_b = torch.zeros_like(b_VR, dtype=torch.float32) if learn_a else None
            total = torch.zeros((), dtype=torch.float32, device=hidden.device)
            bias = None if bias_V is None else bias_V.to(dtype)
            learns = need_hidden or need_weight or need_bias or learn_a
            rows = _rows_at_once(weight, labels_T, shard)
            buffer = torch.empty(rows, weight.shape[0], dtype=dtype, device=hidden.device)
            for start in range(0, len(labels_T), rows):
                part, labels_T1 = hidden[start : start + rows], labels_T[start : start + rows].unsqueeze(1)
                logits = torch.mm(part, weight.t(), out=buffer[: len(part)])
                if bias is not None:
                    logits += bias
                if adapted:
                    low_R = part @ a.t()
                    logits.addmm_(low_R, b.t(), alpha=lora_scale)
                more = dict(smoothing=smoothing, shard=shard)
                total += _logits_to_grad(logits, labels_T1, scale, softcap, learns, grad_bias, **more)
                grad_low = logits
                if need_hidden:
                    torch.mm(grad_low, weight, out=grad_hidden[start : start + rows])
                if adapted and (need_hidden or learn_a):
                    grad_low_R = (grad_low @ b) * lora_scale
                    if need_hidden:
                        grad_hidden[start : start + rows] += grad_low_R @ a
                    if learn_a:
                        grad_a += (grad_low_R.t() @ part).float()
                        grad_b += (grad_low.t() @ low_R).float() * lora_scale
                if need_weight:
                    grad_weight += (grad_low.t() @ part).float()
        ctx.hidden_dtype, ctx.weight_dtype = hidden_TH.dtype, weight_VH.dtype
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias, grad_a, grad_b)
        return total

    @staticmethod
    def backward(ctx, upstream):
        hidden, weight, bias, a, b = ctx.saved_tensors
        return (
            None if hidden is None else (hidden.float() * upstream).to(ctx.hidden_dtype),
            None if weight is None else (weight * upstream).to(ctx.weight_dtype),
            None if bias is None else (bias * upstream).to(ctx.weight_dtype),
            None,
            None,
            None,
            None,
            None if a is None else a * upstream,
            None if b is None else b * upstream,
            None,
            None,
            None,
        )


class RowsNLL(torch.autograd.Function):
    """_ChunkedNLL of a head whose rows stay on the ranks of a shard group: each computes the logits of its rows for a
    chunk of every rank's positions, and a reduce-scatter sums the gradients of their hidden states.

    The loss is that of this rank's positions. The gradient of its rows is that of all ranks' losses, whose upstream
    gradients are equal.
    """

    @staticmethod
    def forward(ctx, hidden_TH, weight_VH, bias_V, labels_T, scale, softcap, learning, shard, smoothing):
        dtype, count = compute_dtype(hidden_TH), len(labels_T)
        need_hidden, need_weight, need_bias = (learning and need for need in ctx.needs_input_grad[:3])
        with without_autocast(hidden_TH):
            weight, hidden = weight_VH.to(dtype), hidden_TH.to(dtype)
            bias = None if bias_V is None else bias_V.to(dtype)
            grad_hidden = torch.empty_like(hidden) if need_hidden else None
            grad_weight = torch.zeros_like(weight_VH, dtype=torch.float32) if need_weight else None
            grad_bias = torch.zeros_like(bias_V, dtype=torch.float32) if need_bias else None
            total, most = torch.zeros((), dtype=torch.float32, device=hidden.device), shard.most(count)
            rows = max(1, min(logits_rows(shard.longest * shard.groups.dims.shards, hidden.device.type == "cpu"), most))
            for start in range(0, most, rows):
                size, at = min(rows, most - start), slice(start, min(start + rows, count))
                part = shard.all_gather_positions(filled(hidden[at], size, 0))
                labels = shard.all_gather_positions(filled(labels_T[at], size, -1))
                logits = part @ weight.t() if bias is None else torch.addmm(bias, part, weight.t())
                log_probs, upstream = logits.new_empty(len(part), dtype=torch.float32), -(labels >= 0).float()
                more = dict(smoothing=smoothing, shard=shard)
                learns = need_hidden or need_weight or need_bias
                positions = labels.unsqueeze(1), scale, softcap, learns, grad_bias, log_probs, upstream
                _logits_to_grad(logits, *positions, **more)
                first = shard.groups.place("shard")[0] * size
                total -= log_probs[first : first + max(0, at.stop - start)].sum()
                if need_hidden:
                    own = shard.reduce_scatter(logits @ weight)
                    grad_hidden[at] = own[: max(0, at.stop - start)]
                if need_weight:
                    grad_weight += (logits.t() @ part).float()
        ctx.dtypes = hidden_TH.dtype, weight_VH.dtype, None if bias_V is None else bias_V.dtype
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return total

    @staticmethod
    def backward(ctx, upstream):
        grads = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(None if grad is None else (grad.float() * upstream).to(dtype) for grad, dtype in grads), *[None] * 6


def filled(tensor, length: int, value) -> torch.Tensor:
    """[length, ...], filled up with `value`."""
    return torch.cat([tensor, tensor.new_full((length - len(tensor), *tensor.shape[1:]), value)])


class _ChunkedLogProbs(torch.autograd.Function):
    """Log-probabilities whose gradient is weighted per position, once all of them are known.

    Of a frozen head, the gradient of the hidden states is linear in these weights and computed in forward; a head that
    learns computes each chunk's logits again in backward.
    """

    @staticmethod
    def forward(ctx, hidden_TH, weight_VH, bias_V, labels_T, scale, softcap, learning, a_RH, b_VR, lora_scale, shard):
        ctx.dtype, ctx.shard = compute_dtype(hidden_TH), shard
        ctx.scale, ctx.softcap, ctx.lora_scale = scale, softcap, lora_scale
        ctx.head_learns = any(ctx.needs_input_grad[i] for i in (1, 2, 7, 8))
        inputs = hidden_TH, weight_VH, bias_V, labels_T, a_RH, b_VR
        with without_autocast(hidden_TH):
            upstream_T = None
            if learning and ctx.needs_input_grad[0] and not ctx.head_learns:
                upstream_T = torch.ones_like(labels_T, dtype=torch.float32)
            log_probs_T, grads = _ChunkedLogProbs.run(ctx, *inputs, upstream_T, (upstream_T is not None, *[False] * 4))
        ctx.hidden_dtype = hidden_TH.dtype
        ctx.save_for_backward(*(inputs if learning and ctx.head_learns else grads[:1]))
        return log_probs_T

    @staticmethod
    def backward(ctx, upstream_T):
        if not ctx.head_learns:
            (grad_TH,) = ctx.saved_tensors
            grad_TH = None if grad_TH is None else (grad_TH * upstream_T[:, None]).to(ctx.hidden_dtype)
            return grad_TH, *[None] * 10
        need = [ctx.needs_input_grad[i] for i in (0, 1, 2, 7, 8)]
        with without_autocast(upstream_T):
            grads = _ChunkedLogProbs.run(ctx, *ctx.saved_tensors, upstream_T, need)[1]
        return *grads[:3], *[None] * 4, *grads[3:], None, None

    @staticmethod
    def run(ctx, hidden_TH, weight_VH, bias_V, labels_T, a_RH, b_VR, upstream_T, need):
        """(log-probabilities [T], gradients of hidden, weight, bias, A and B as `need` says)."""
        exact = torch.promote_types(ctx.dtype, torch.float32)
        inputs = hidden_TH, weight_VH, bias_V, a_RH, b_VR
        hidden, weight, bias, a, b = (None if t is None else t.to(ctx.dtype) for t in inputs)
        grads = [torch.zeros_like(t, dtype=exact) if n else None for t, n in zip(inputs, need, strict=True)]
        log_probs_T = torch.empty(len(labels_T), dtype=exact, device=hidden.device)
        rows = _rows_at_once(weight, labels_T, ctx.shard)
        buffer = torch.empty(rows, weight.shape[0], dtype=ctx.dtype, device=hidden.device)
        for at in (slice(start, start + rows) for start in range(0, len(labels_T), rows)):
            part, upstream = hidden[at], None if upstream_T is None else upstream_T[at]
            logits = torch.mm(part, weight.t(), out=buffer[: len(part)])
            if bias is not None:
                logits += bias
            low_R = None if a is None else part @ a.t()
            if a is not None:
                logits.addmm_(low_R, b.t(), alpha=ctx.lora_scale)
            _logits_to_grad(
                logits,
                labels_T[at].unsqueeze(1),
                ctx.scale,
                ctx.softcap,
                any(need),
                grads[2],
                log_probs_T[at],
                upstream,
                shard=ctx.shard,
            )
            grad_low_R = None if a is None else (logits @ b) * ctx.lora_scale
            if need[0]:
                grads[0][at] = logits @ weight if a is None else logits @ weight + grad_low_R @ a
            if need[1]:
                grads[1] += logits.t() @ part
            if need[3]:
                grads[3] += grad_low_R.t() @ part
            if need[4]:
                grads[4] += (logits.t() @ low_R) * ctx.lora_scale
        return log_probs_T, [None if g is None else g.to(t.dtype) for g, t in zip(grads, inputs, strict=True)]


def _rows_at_once(weight_VH, labels_T, shard: VocabularyShard | None) -> int:
    """Positions of a chunk, the same on all ranks that compute it."""
    vocab = len(weight_VH) if shard is None else shard.longest
    return min(logits_rows(vocab, weight_VH.device.type == "cpu"), max(1, len(labels_T)))


def _logits_to_grad(
    logits_TV,
    labels_T1,
    scale,
    softcap,
    learns: bool,
    grad_bias_V,
    log_probs_T=None,
    upstream_T=None,
    smoothing=0.0,
    shard: VocabularyShard | None = None,
) -> torch.Tensor:
    """Summed NLL, fp32; if `learns`, the logits become its gradient in place, and the bias's gradient is added.

    Computed in fp32 or wider, on a CPU a few rows at a time: they stay in its cache from one operation to the next.
    `log_probs_T` receives each position's, of smoothed labels; `upstream_T`: the gradient is that of the
    log-probabilities' sum with these weights. `smoothing`: see Head.nll. `shard`: the logits are those of its rows, and
    all are computed at once, as ranks exchange their sums.
    """
    total = torch.zeros((), dtype=torch.float32, device=logits_TV.device)
    num_rows, vocab = logits_TV.shape
    in_blocks = logits_TV.device.type == "cpu" and shard is None
    rows = min(num_rows, max(1, CACHED_LOGITS // vocab)) if in_blocks else num_rows
    exact = torch.promote_types(logits_TV.dtype, torch.float32)
    probs_buffer = torch.empty(rows, vocab, dtype=exact, device=logits_TV.device)
    exact_buffer = probs_buffer if logits_TV.dtype == exact else torch.empty_like(probs_buffer)
    for start in range(0, num_rows, max(1, rows)):
        part, labels = logits_TV[start : start + rows], labels_T1[start : start + rows]
        logits = part if part.dtype == exact else exact_buffer[: len(part)].copy_(part)
        if scale != 1.0:
            logits *= scale
        bent = None
        if softcap is not None:
            bent = torch.tanh(logits / softcap)
            logits = bent * softcap
        if shard is None:
            probs, sums_T1, log_probs_T1 = _softmax(logits, labels, probs_buffer[: len(part)])
            above_mean_T1 = logits.gather(1, labels) - logits.mean(1, keepdim=True) if smoothing else None
            size, less = vocab, torch.full_like(labels, smoothing - 1, dtype=probs.dtype)
        else:
            size, (labels, elsewhere) = shard.size, locate(labels, slice(shard.start, shard.stop))
            found = _softmax_over_ranks(logits, labels, elsewhere, probs_buffer[: len(part)], shard, bool(smoothing))
            probs, sums_T1, log_probs_T1, above_mean_T1 = found
            less = torch.full_like(labels, smoothing - 1, dtype=probs.dtype).masked_fill(elsewhere, 0)
        total -= log_probs_T1.sum()
        if smoothing:  # the mean of -log p over the vocabulary is above the label's by their difference in logits
            total += smoothing * above_mean_T1.sum()
        if log_probs_T is not None:
            log_probs_T[start : start + rows] = log_probs_T1.flatten()
            if smoothing:
                log_probs_T[start : start + rows] -= smoothing * above_mean_T1.flatten()
        if not learns:
            continue
        if sums_T1 is not None:
            probs = torch.div(probs, sums_T1, out=part if part.dtype == exact else probs)
        if vocab:  # a rank of a small vocabulary may have no row
            probs.scatter_add_(1, labels, less)
        if smoothing:
            probs -= smoothing / size
        if upstream_T is not None:
            probs *= -upstream_T[start : start + rows, None]
        if bent is not None:
            probs *= 1 - bent * bent
        if scale != 1.0:
            probs *= scale
        if grad_bias_V is not None:
            grad_bias_V += probs.sum(0)
        if probs is not part:
            part.copy_(probs)
    return total


def _softmax(logits_TV, labels_T1, out_TV) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(probabilities, in `out_TV`; what to divide them by [T, 1]; log-probabilities of the labels [T, 1]), fp32.

    Beside a large logit torch's sum on a CPU loses up to 1e-5, always to one side, which loss and gradient would have.
    The probabilities' own sum, made in pairs, says how much.
    """
    if logits_TV.device.type != "cpu":  # a fused kernel, and no waiting for what a branch depends on
        log_probs_TV = torch.log_softmax(logits_TV, -1, out=out_TV)
        log_probs_T1 = log_probs_TV.gather(1, labels_T1)
        return log_probs_TV.exp_(), None, log_probs_T1
    torch.softmax(logits_TV, -1, out=out_TV)  # one exponential per number
    sums_T1 = out_TV.sum(-1, keepdim=True)
    log_probs_T1 = out_TV.gather(1, labels_T1).log() - sums_T1.log()
    # Below, log(p) would lose digits or be -inf: few rows, if any.
    small = (log_probs_T1 < LOG_OF_SMALL).flatten()
    if small.any():
        rows = logits_TV[small]
        log_probs_T1[small] = rows.gather(1, labels_T1[small]) - torch.logsumexp(rows, -1, keepdim=True)
    return out_TV, sums_T1, log_probs_T1


def _softmax_over_ranks(logits_TV, labels_T1, elsewhere_T1, out_TV, shard: VocabularyShard, means: bool) -> tuple:
    """What `_softmax` returns, of logits of this rank's rows of the vocabulary, and with `means` how far the labels'
    logits are above the vocabulary's mean [T, 1]. `labels_T1`, `elsewhere_T1`: see slices.locate. Collective.
    """
    if logits_TV.shape[1]:
        own_T1, label_T1 = logits_TV.amax(-1, keepdim=True), logits_TV.gather(1, labels_T1).masked_fill(elsewhere_T1, 0)
    else:
        own_T1, label_T1 = (logits_TV.new_full((len(logits_TV), 1), value) for value in (float("-inf"), 0.0))
    largest_T1 = shard.maximum(own_T1)
    torch.sub(logits_TV, largest_T1, out=out_TV).exp_()
    sums = [out_TV.sum(-1, keepdim=True), label_T1, *([logits_TV.sum(-1, keepdim=True)] if means else [])]
    sums_T1, label_T1, *logits_T1 = shard.sum(torch.cat(sums, 1)).split(1, 1)
    log_probs_T1 = label_T1 - largest_T1 - sums_T1.log()
    return out_TV, sums_T1, log_probs_T1, label_T1 - logits_T1[0] / shard.size if means else None


def log_probs_of_logits(logits_TV, labels_T) -> torch.Tensor:
    """log p(label) of each position, from logits computed by the model."""
    exact = torch.promote_types(logits_TV.dtype, torch.float32)
    return torch.log_softmax(logits_TV.to(exact), -1).gather(1, labels_T.unsqueeze(1)).squeeze(1)


def nll_of_logits(logits_TV, labels_T, smoothing: float = 0.0) -> torch.Tensor:
    """Summed NLL from logits computed by the model. `smoothing`: see Head.nll."""
    return F.cross_entropy(logits_TV.float(), labels_T, reduction="sum", label_smoothing=smoothing)
