"""Chunked cross-entropy, summed over target positions; the full logits are never materialized.
T target positions, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import PreTrainedModel

from finetune.model_files.logit_scaling import logit_scaling
from finetune.parts.engine_limits import CACHED_LOGITS, logits_rows
from finetune.quantizers.linear import compute_dtype, without_autocast
from finetune.torch_engine.divergence import Teacher
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
        """Logits of the full vocabulary, gathered from all ranks. Collective."""
        return Slice(logits_TV.ndim - 1, size=self.size).all_gather(logits_TV, self.groups)

    def maximum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Maximum over ranks, in place. Collective."""
        for group in self.over:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.groups.process_groups[group])
        return tensor

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place. Collective."""
        for group in self.over:
            self.groups.all_reduce(tensor, group)
        return tensor

    # ---- over a shard group

    def local(self, parameter: Any, device: torch.device) -> torch.Tensor:
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
    def of(cls, model: PreTrainedModel, shard: VocabularyShard | None = None) -> "Head | None":
        """The head of a transformers model; None if it is not a linear, or has DoRA or dropout."""
        linear = model.get_output_embeddings()
        adapter = None
        if isinstance(linear, LoRALinear) and not linear.dropout and linear.lora_magnitude_vector is None:
            linear, adapter = linear.base, linear
        if not isinstance(linear, torch.nn.Linear):
            return None
        scale, softcap = logit_scaling(model.config.get_text_config().to_dict())
        return cls(linear, scale, softcap, adapter, shard)

    def logits(self, hidden_TH: torch.Tensor) -> torch.Tensor:
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
        if here:
            return logits_TV
        assert self.shard is not None, "ranks that have all rows have them here"
        return self.shard.all_gather(logits_TV)

    def nll(
        self,
        hidden_TH: torch.Tensor,
        labels_T: torch.Tensor,
        copy: Callable[[torch.Tensor], torch.Tensor] | None = None,
        smoothing: float = 0.0,
        has_padding: bool = False,
    ) -> torch.Tensor:
        """Summed NLL over T: -log p(label), fp32 scalar, differentiable in hidden states and in a trainable head. Never
        asked with adapters off.

        `copy`: applied to each weight if several ranks compute the logits of some positions each. `smoothing`: the
        target's weight that is spread over the vocabulary (label smoothing, Szegedy et al. 2016). `has_padding`: labels
        of -1 are padding, and add nothing.
        """
        copy = copy or (lambda weight: weight)
        if self.shard is not None and self.shard.exchanges_positions:
            copy = partial(self.shard.local, device=hidden_TH.device)
        return self._in_chunks(hidden_TH, labels_T, self.adapter, copy, smoothing=smoothing, has_padding=has_padding)

    def distilled(
        self, hidden_TH: torch.Tensor, labels_T: torch.Tensor, teacher: Teacher
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(summed loss over T: alpha times the divergence from a teacher and its own weight times the NLL,
        differentiable in what `nll` is; log p(label) of each position).
        """
        return self._in_chunks(hidden_TH, labels_T, self.adapter, lambda weight: weight, teacher=teacher)

    def log_probs(
        self, hidden_TH: torch.Tensor, labels_T: torch.Tensor, temperature: float = 1.0, has_padding: bool = False
    ) -> torch.Tensor:
        """log p(label) of each position [T], fp32 or wider, differentiable in what `nll` is; of logits divided by
        `temperature`. `has_padding`: 0 where a label is -1.
        """
        if self.adapter is not None and self.adapter.off:
            adapter = None
        else:
            adapter = self.adapter
        return self._in_chunks(
            hidden_TH,
            labels_T,
            adapter,
            lambda weight: weight,
            per_position=True,
            temperature=temperature,
            has_padding=has_padding,
        )

    def _in_chunks(
        self,
        hidden_TH: torch.Tensor,
        labels_T: torch.Tensor,
        adapter: LoRALinear | None,
        copy: Callable[[torch.Tensor], torch.Tensor],
        **settings: Any,
    ) -> Any:
        weights = [self.linear.weight, self.linear.bias, None, None]
        if adapter is not None:
            weights[2:] = [adapter.lora_A, adapter.lora_B]
            settings["lora_scale"] = adapter.scaling
        weights = [None if weight is None else copy(weight) for weight in weights]
        learning = torch.is_grad_enabled()  # always False inside a Function
        chunking = Chunking(self.scale, self.softcap, learning=learning, shard=self.shard, **settings)
        return ChunkedLogProbs.apply(hidden_TH, *weights, labels_T, chunking)


@dataclass(frozen=True)
class Chunking:
    """Settings of ChunkedLogProbs: see Head for `scale`, `softcap`, `shard`, `smoothing` and `temperature`.

    `learning`: with gradients. `per_position`: returns each position's, else their negative sum; with a `teacher` the
    loss beside it, and each position's. `has_padding`: labels of -1 add nothing, and the host reads none.
    """

    scale: float
    softcap: float | None
    learning: bool
    shard: VocabularyShard | None
    lora_scale: float = 0.0
    smoothing: float = 0.0
    per_position: bool = False
    temperature: float = 1.0
    teacher: Teacher | None = None
    has_padding: bool = False

    @property
    def gathers(self) -> VocabularyShard | None:
        """The shard, if its ranks exchange positions."""
        if self.shard is not None and self.shard.exchanges_positions:
            return self.shard
        return None


class ChunkedLogProbs(torch.autograd.Function):
    """Summed NLL, or log p(label) of each position, from chunks of logits that are dropped one after the other.

    Forward computes the loss and the gradients of each chunk; backward scales them by the upstream gradient. Only if
    the loss is per position and the head itself learns does backward compute the logits again: its gradient needs the
    upstream of each position.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        a_RH: torch.Tensor | None,
        b_VR: torch.Tensor | None,
        labels_T: torch.Tensor,
        chunking: Chunking,
    ):
        inputs = (hidden_TH, weight_VH, bias_V, a_RH, b_VR)
        need = [chunking.learning and needed for needed in ctx.needs_input_grad[:5]]
        ctx.chunking = chunking
        ctx.dtype = compute_dtype(hidden_TH)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in inputs]
        ctx.computes_again = chunking.per_position and any(need[1:])
        upstream_T = None
        if ctx.computes_again:
            need = [False] * 5
        elif chunking.per_position and need[0]:
            upstream_T = torch.ones_like(labels_T, dtype=torch.float32)
        with without_autocast(hidden_TH):
            nll, log_probs_T, grads = _chunks(chunking, ctx.dtype, inputs, labels_T, upstream_T, need)
        ctx.save_for_backward(*((*inputs, labels_T) if ctx.computes_again else grads))
        if chunking.teacher is not None:
            ctx.mark_non_differentiable(log_probs_T)
            return nll, log_probs_T
        return log_probs_T if chunking.per_position else nll

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor, *_: Any):
        if ctx.computes_again:
            *inputs, labels_T = ctx.saved_tensors
            with without_autocast(upstream):
                grads = _chunks(ctx.chunking, ctx.dtype, inputs, labels_T, upstream, ctx.needs_input_grad[:5])[2]
        else:
            if ctx.chunking.per_position:
                weights = upstream[:, None]
            else:
                weights = upstream
            exact = torch.promote_types(ctx.dtype, torch.float32)
            grads = [None if grad is None else grad.to(exact) * weights for grad in ctx.saved_tensors]
        grads = [None if g is None else g.to(dtype) for g, dtype in zip(grads, ctx.dtypes, strict=True)]
        return *grads, None, None


def _chunks(
    chunking: Chunking,
    dtype: torch.dtype,
    inputs: Sequence[torch.Tensor | None],
    labels_T: torch.Tensor,
    upstream_T: torch.Tensor | None,
    need: Sequence[bool],
) -> tuple:
    """(summed NLL, fp32; log-probabilities [T]; gradients of hidden, weight, bias, A and B as `need` says).

    `upstream_T`: gradients are those of the log-probabilities' sum with these weights, else of the NLL. If the head's
    rows stay sharded over a group, each rank computes the logits of its rows for a chunk of every rank's positions, and
    a reduce-scatter sums the gradients of their hidden states. The NLL then covers this rank's positions; the gradient
    of its rows covers all ranks' losses, with equal upstream gradients.
    """
    exact = torch.promote_types(dtype, torch.float32)
    shard = chunking.gathers
    count = len(labels_T)
    cast: list[Any] = [None if tensor is None else tensor.to(dtype) for tensor in inputs]
    hidden, weight, bias, a, b = cast
    grads: list[Any] = [None] * len(cast)
    for i, tensor in enumerate(inputs):
        if need[i]:
            assert tensor is not None, i
            grads[i] = torch.zeros_like(tensor, dtype=exact)
    if need[0]:
        grads[0] = torch.empty_like(hidden)
    nll = torch.zeros((), dtype=torch.float32, device=hidden.device)
    log_probs_T = torch.empty(count, dtype=exact, device=hidden.device)
    if shard is None:
        most = count
        rows = _rows_at_once(weight, labels_T, chunking.shard)
        buffer = torch.empty(rows, weight.shape[0], dtype=dtype, device=hidden.device)
    else:
        most = shard.most(count)
        rows = max(1, min(logits_rows(shard.longest * shard.groups.dims.shards, hidden.device.type == "cpu"), most))
    for start in range(0, most, rows):
        at = slice(start, min(start + rows, count))
        part = hidden[at]
        labels = labels_T[at]
        if upstream_T is None:
            upstream = None
        else:
            upstream = upstream_T[at]
        if shard is None:
            logits = torch.mm(part, weight.t(), out=buffer[: len(part)])
            if bias is not None:
                logits += bias
        else:
            size = min(rows, most - start)
            part = shard.all_gather_positions(filled(part, size, 0))
            labels = shard.all_gather_positions(filled(labels, size, -1))
            upstream = -(labels >= 0).float()
            if bias is None:
                logits = part @ weight.t()
            else:
                logits = torch.addmm(bias, part, weight.t())
        is_target = None
        if chunking.has_padding:
            is_target = (labels >= 0).to(exact)
            labels = labels.clamp_min(0)
            upstream = -is_target if upstream is None else upstream * is_target
        if a is not None:
            low_R = part @ a.t()
            logits.addmm_(low_R, b.t(), alpha=chunking.lora_scale)
        found = logits.new_empty(len(part), dtype=exact)
        of_part = chunking
        if chunking.teacher is not None:
            of_part = replace(chunking, teacher=chunking.teacher.at(at))
        total = _logits_to_grad(logits, labels.unsqueeze(1), of_part, any(need), grads[2], found, upstream)
        if shard is not None:
            first = shard.groups.place("shard")[0] * size
            found = found[first : first + max(0, at.stop - start)]
            total = -found.sum()
        if is_target is not None:
            found *= is_target
            total = -found.sum()
        nll += total
        log_probs_T[at] = found
        if need[0] and shard is None:
            torch.mm(logits, weight, out=grads[0][at])
        elif need[0]:
            assert shard is not None, need
            grads[0][at] = shard.reduce_scatter(logits @ weight)[: max(0, at.stop - start)]
        if a is not None and (need[0] or need[3]):
            grad_low_R = (logits @ b) * chunking.lora_scale
            if need[0]:
                grads[0][at] += grad_low_R @ a
            if need[3]:
                grads[3] += grad_low_R.t() @ part
                grad_b_VR = logits.t() @ low_R
                if not chunking.per_position:
                    grad_b_VR = grad_b_VR.to(exact)  # which is scaled in fp32; per position, as it was multiplied
                grads[4] += grad_b_VR * chunking.lora_scale
        if need[1]:
            grads[1] += logits.t() @ part
    return nll, log_probs_T, grads


def filled(tensor: torch.Tensor, length: int, value: int) -> torch.Tensor:
    """[length, ...], filled up with `value`."""
    return torch.cat([tensor, tensor.new_full((length - len(tensor), *tensor.shape[1:]), value)])


def _rows_at_once(weight_VH: torch.Tensor, labels_T: torch.Tensor, shard: VocabularyShard | None) -> int:
    """Positions of a chunk, the same on all ranks that compute it."""
    if shard is None:
        vocab = len(weight_VH)
    else:
        vocab = shard.longest
    return min(logits_rows(vocab, weight_VH.device.type == "cpu"), max(1, len(labels_T)))


def _logits_to_grad(
    logits_TV: torch.Tensor,
    labels_T1: torch.Tensor,
    chunking: Chunking,
    learns: bool,
    grad_bias_V: torch.Tensor | None,
    log_probs_T: torch.Tensor,
    upstream_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """Summed NLL, or the loss beside a teacher, fp32; if `learns`, the logits become its gradient in place, and the
    bias's gradient is added.

    Computed in fp32 or wider, on a CPU a few rows at a time: they stay in its cache from one operation to the next.
    `log_probs_T` receives each position's, of smoothed labels; `upstream_T`: the gradient is that of the
    log-probabilities' sum with these weights. With a shard all are computed at once, as ranks exchange their sums.
    """
    scale = chunking.scale
    shard = chunking.shard
    smoothing = chunking.smoothing
    total = torch.zeros((), dtype=torch.float32, device=logits_TV.device)
    num_rows, vocab = logits_TV.shape
    in_blocks = logits_TV.device.type == "cpu" and shard is None
    if in_blocks:
        rows = min(num_rows, max(1, CACHED_LOGITS // vocab))
    else:
        rows = num_rows
    exact = torch.promote_types(logits_TV.dtype, torch.float32)
    probs_buffer = torch.empty(rows, vocab, dtype=exact, device=logits_TV.device)
    if logits_TV.dtype == exact:
        exact_buffer = probs_buffer
    else:
        exact_buffer = torch.empty_like(probs_buffer)
    for start in range(0, num_rows, max(1, rows)):
        part = logits_TV[start : start + rows]
        labels = labels_T1[start : start + rows]
        if part.dtype == exact:
            logits = part
        else:
            logits = exact_buffer[: len(part)].copy_(part)
        if scale != 1.0:
            logits *= scale
        bent = None
        if chunking.softcap is not None:
            bent = torch.tanh(logits / chunking.softcap)
            logits = bent * chunking.softcap
        if chunking.temperature != 1.0:
            logits /= chunking.temperature
        if shard is None:
            reads = logits.device.type == "cpu" and not chunking.has_padding
            probs, sums_T1, log_probs_T1 = _softmax(logits, labels, probs_buffer[: len(part)], reads)
            above_mean_T1 = None
            if smoothing:
                above_mean_T1 = logits.gather(1, labels) - logits.mean(1, keepdim=True)
            size = vocab
            minus_onehot = torch.full_like(labels, smoothing - 1, dtype=probs.dtype)
        else:
            size, (labels, elsewhere) = shard.size, locate(labels, slice(shard.start, shard.stop))
            found = _softmax_over_ranks(logits, labels, elsewhere, probs_buffer[: len(part)], shard, bool(smoothing))
            probs, sums_T1, log_probs_T1, above_mean_T1 = found
            minus_onehot = torch.full_like(labels, smoothing - 1, dtype=probs.dtype).masked_fill(elsewhere, 0)
        teacher = None
        own: float | torch.Tensor = 1.0  # weight of the labels' nll
        if chunking.teacher is not None:
            teacher = chunking.teacher.at(slice(start, start + rows))
            own = teacher.own
            # Before the logits become probabilities.
            log_p_TK = logits.gather(1, teacher.tokens_TK) - (logits.gather(1, labels) - log_probs_T1)
        total -= (own * log_probs_T1).sum()
        if (
            above_mean_T1 is not None
        ):  # the mean of -log p over the vocabulary is above the label's by their difference in logits
            total += smoothing * above_mean_T1.sum()
        log_probs_T[start : start + rows] = log_probs_T1.flatten()
        if above_mean_T1 is not None:
            log_probs_T[start : start + rows] -= smoothing * above_mean_T1.flatten()
        if not (learns or teacher):
            continue
        if sums_T1 is not None:
            probs = torch.div(probs, sums_T1, out=part if part.dtype == exact else probs)
        if teacher is not None:
            total += teacher.alpha * teacher.to_gradient(probs, log_p_TK).sum()
            minus_onehot *= own
        # From here `probs` becomes the gradient of the NLL in the logits: p - (1 - smoothing) onehot - smoothing / V.
        if vocab:  # a rank of a small vocabulary may have no row
            probs.scatter_add_(1, labels, minus_onehot)
        if smoothing:
            probs -= smoothing / size
        if upstream_T is not None:
            probs *= -upstream_T[start : start + rows, None]
        if chunking.temperature != 1.0:
            probs /= chunking.temperature
        if bent is not None:
            probs *= 1 - bent * bent
        if scale != 1.0:
            probs *= scale
        if grad_bias_V is not None:
            grad_bias_V += probs.sum(0)
        if probs is not part:
            part.copy_(probs)
    return total


def _softmax(
    logits_TV: torch.Tensor, labels_T1: torch.Tensor, out_TV: torch.Tensor | None, reads: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(probabilities, in `out_TV`; what to divide them by [T, 1]; log-probabilities of the labels [T, 1]), fp32.

    Beside a large logit torch's sum on a CPU loses up to 1e-5, always to one side, which loss and gradient would have.
    The probabilities' own sum, made in pairs, says how much. `reads`: the host looks at it, which a device would make
    it wait for.
    """
    if not reads:  # a fused kernel, and no waiting for what a branch depends on
        log_probs_TV = torch.log_softmax(logits_TV, -1, out=out_TV)
        log_probs_T1 = log_probs_TV.gather(1, labels_T1)
        return log_probs_TV.exp_(), None, log_probs_T1
    probs_TV = torch.softmax(logits_TV, -1, out=out_TV)  # one exponential per number
    sums_T1 = probs_TV.sum(-1, keepdim=True)
    log_probs_T1 = probs_TV.gather(1, labels_T1).log() - sums_T1.log()
    # Below, log(p) would lose digits or be -inf: few rows, if any.
    small = (log_probs_T1 < LOG_OF_SMALL).flatten()
    if small.any():
        rows = logits_TV[small]
        log_probs_T1[small] = rows.gather(1, labels_T1[small]) - torch.logsumexp(rows, -1, keepdim=True)
    return probs_TV, sums_T1, log_probs_T1


def _softmax_over_ranks(
    logits_TV: torch.Tensor,
    labels_T1: torch.Tensor,
    elsewhere_T1: torch.Tensor,
    out_TV: torch.Tensor,
    shard: VocabularyShard,
    means: bool,
) -> tuple:
    """Results of `_softmax` from logits of this rank's rows of the vocabulary; with `means`, also the labels' logits
    minus the vocabulary's mean [T, 1]. `labels_T1`, `elsewhere_T1`: see slices.locate. Collective.
    """
    if logits_TV.shape[1]:
        own_T1 = logits_TV.amax(-1, keepdim=True)
        label_T1 = logits_TV.gather(1, labels_T1).masked_fill(elsewhere_T1, 0)
    else:
        own_T1, label_T1 = (logits_TV.new_full((len(logits_TV), 1), value) for value in (float("-inf"), 0.0))
    largest_T1 = shard.maximum(own_T1)
    probs_TV = torch.sub(logits_TV, largest_T1, out=out_TV).exp_()
    sums = [probs_TV.sum(-1, keepdim=True), label_T1, *([logits_TV.sum(-1, keepdim=True)] if means else [])]
    sums_T1, label_T1, *logits_T1 = shard.sum(torch.cat(sums, 1)).split(1, 1)
    log_probs_T1 = label_T1 - largest_T1 - sums_T1.log()
    return probs_TV, sums_T1, log_probs_T1, label_T1 - logits_T1[0] / shard.size if means else None


def log_probs_of_logits(logits_TV: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
    """log p(label) of each position, from logits computed by the model."""
    exact = torch.promote_types(logits_TV.dtype, torch.float32)
    return torch.log_softmax(logits_TV.to(exact), -1).gather(1, labels_T.unsqueeze(1)).squeeze(1)


def nll_of_logits(logits_TV: torch.Tensor, labels_T: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    """Summed NLL from logits computed by the model. `smoothing`: see Head.nll."""
    return F.cross_entropy(logits_TV.float(), labels_T, reduction="sum", label_smoothing=smoothing)
