"""Embedding and head under FSDP2 whose rows stay on their ranks: no rank gathers either of them.

What travels is what is computed with them. Ranks look up all tokens of their shard group in the rows that they have,
and a reduce-scatter gives each rank its own tokens' sums. In the loss (loss.py) chunks of hidden states travel in the
same way. Gradients of the rows are complete where the rows are. Only those who ask the model itself for logits
gather the head, a few rows at a time.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from transformers import PreTrainedModel

from finetune.errors import PlanError
from finetune.parts.engine_limits import HEAD_BYTES
from finetune.torch_engine.loss import VocabularyShard, filled
from finetune.torch_engine.parallel.process_groups import ProcessGroups
from finetune.torch_engine.parallel.slices import Slice, locate
from finetune.torch_engine.parallel.tensor import copy_to_region, reduce_from_region
from finetune.torch_engine.parallel.vocabulary import GatherVocabulary
from finetune.torch_engine.weights.interfaces import HeldShards


class _ReduceScatterPositions(torch.autograd.Function):
    """Sums over the shard group, each rank its own positions; all-gather in backward."""

    @staticmethod
    def forward(ctx: Any, partial_NTH: torch.Tensor, shard: VocabularyShard):
        ctx.shard = shard
        return shard.reduce_scatter(partial_NTH)

    @staticmethod
    def backward(ctx: Any, grad_TH: torch.Tensor):
        return ctx.shard.all_gather_positions(grad_TH), None


class VocabularyRows:
    """The parameters of embedding and head that FSDP2 leaves to their ranks. `shard`: the rows of this rank.

    `full`: {parameter's name: gathered rows} while answers are generated from gathered weights.
    """

    def __init__(self, model: PreTrainedModel, groups: ProcessGroups, tp_shard: VocabularyShard | None):
        self.groups = groups
        embedding: Any = model.get_input_embeddings()
        head: Any = model.get_output_embeddings()
        self.embedding = embedding
        self.head = head
        self._refuse_others(model)
        self.padding: int | None = embedding.padding_idx
        rows = len(embedding.weight)
        first, size = (0, rows) if tp_shard is None else (tp_shard.start, tp_shard.size)
        own = groups.local_rows(rows)
        shards = groups.dims.shards
        if tp_shard is None:
            over: tuple[str, ...] = ("shard",)
        else:
            over = ("shard", "tp")
        longest = -(-(rows if tp_shard is None else tp_shard.longest) // shards)
        self.shard = VocabularyShard(first + own.start, first + own.stop, size, longest, groups, over)
        self.of_slice = slice(first, first + rows)
        self.full: dict[str, torch.Tensor] = {}
        self.embedding.forward = self.embed
        self.head.forward = self.logits

    def _refuse_others(self, model: PreTrainedModel) -> None:
        embedding = self.embedding
        head = self.head
        scaled = isinstance(embedding, nn.Embedding) and getattr(embedding, "embed_scale", None) is not None
        plain = (type(embedding) is nn.Embedding or scaled) and type(head) is nn.Linear
        if not plain or len(embedding.weight) != len(head.weight):
            raise PlanError(
                f"--vocab_parallel true: the embedding or the head of {type(model).__name__} is not a plain one, or "
                "has an adapter. Use false."
            )

    @property
    def parameters(self) -> list[nn.Parameter]:
        found = [self.embedding.weight, self.head.weight, self.head.bias]
        return list({id(p): p for p in found if p is not None}.values())

    def place(self, mesh: DeviceMesh, local_shards: HeldShards | None = None) -> None:
        """Gives the parameters that this stage has their rows, as DTensors over `mesh`."""
        placements = (Replicate(),) * (mesh.ndim - 1) + (Shard(0),)
        placed: dict[nn.Parameter, nn.Parameter] = {}
        for module, leaf in ((self.embedding, "weight"), (self.head, "weight"), (self.head, "bias")):
            old = getattr(module, leaf)
            given = None
            if local_shards is not None and old is not None and local_shards.has(old):
                given = local_shards
            if old is None or (old.is_meta and not given and old not in placed):  # on meta: of another stage
                continue
            if old not in placed:
                own = self.groups.local_rows(len(old))
                if given is not None:
                    rows = given.take(old)
                else:
                    rows = old.detach()[own].clone()
                spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(old.shape, old.stride(), old.dtype))
                placed[old] = nn.Parameter(DTensor(rows, spec, requires_grad=False), requires_grad=old.requires_grad)
            setattr(module, leaf, placed[old])

    # ---- forwards

    def embed(self, ids: torch.Tensor):
        full = self.full.get("embedding")
        flat_T = ids.flatten()
        if full is None:
            found_TH = self._embed_everywhere(flat_T)
        else:
            found_TH = self._look_up(full, self.of_slice, flat_T)
        if "tp" in self.shard.over:
            found_TH = reduce_from_region(found_TH, self.groups)
        scale = getattr(self.embedding, "embed_scale", None)
        out = found_TH.view(*ids.shape, -1)
        if scale is None:
            return out
        return out * torch.as_tensor(scale, device=out.device).to(out.dtype)

    def _embed_everywhere(self, ids_T: torch.Tensor):
        """Embeddings of this rank's tokens, looked up in chunks together with the other ranks' tokens."""
        weight = self.shard.local(self.embedding.weight, ids_T.device)
        most = self.shard.most(len(ids_T))
        step = max(1, 4 * HEAD_BYTES // (weight.shape[1] * weight.element_size() * self.groups.dims.shards))
        found = []
        rows = slice(self.shard.start, self.shard.stop)
        for start in range(0, most, step):
            part_T = filled(ids_T[start : start + step], min(step, most - start), -1)
            every_T = self.shard.all_gather_positions(part_T)
            found.append(_ReduceScatterPositions.apply(self._look_up(weight, rows, every_T), self.shard))
        return torch.cat(found)[: len(ids_T)]

    def _look_up(self, weight_VH: torch.Tensor, rows: slice, ids_T: torch.Tensor):
        """The tokens' rows of `weight_VH`, which has these of the vocabulary; zeros for other tokens."""
        if not len(weight_VH):
            return weight_VH.new_zeros(len(ids_T), weight_VH.shape[1]) + weight_VH.sum()
        at_T, elsewhere_T = locate(ids_T, rows)
        if self.padding is None:
            padding = None
        else:
            padding = self.padding + self.of_slice.start - rows.start
        padding = padding if padding is not None and 0 <= padding < len(weight_VH) else None
        return F.embedding(at_T, weight_VH, padding).masked_fill(elsewhere_T[:, None], 0.0)

    def logits(self, hidden: torch.Tensor):
        """The model's own, outside the loss, which has no gradient from here."""
        if "tp" in self.shard.over:
            hidden = copy_to_region(hidden, self.groups)
        if self.full:
            logits = F.linear(hidden, self.full["head"].to(hidden.dtype), self.full.get("bias"))
        else:
            assert not torch.is_grad_enabled(), "the loss has its own way"
            logits = self._logits_by_rows(hidden)
        if "tp" not in self.shard.over:
            return logits
        return GatherVocabulary.apply(logits, Slice(-1, size=self.shard.size), self.groups)

    def _logits_by_rows(self, hidden: torch.Tensor):
        weight = self.shard.local(self.head.weight, hidden.device)
        if self.head.bias is None:
            bias = None
        else:
            bias = self.shard.local(self.head.bias, hidden.device)
        every = self.of_slice.stop - self.of_slice.start
        shards = self.groups.dims.shards
        longest = -(-every // shards)
        out = hidden.new_empty(*hidden.shape[:-1], every)
        step = max(1, HEAD_BYTES // (weight.shape[1] * weight.element_size()))
        for start in range(0, longest, step):
            size = min(step, longest - start)
            parts = [t for t in (weight, bias) if t is not None]
            gathered = [self.shard.all_gather_positions(filled(t[start : start + size], size, 0)) for t in parts]
            gathered = [t.to(hidden.dtype).split(size) for t in gathered]
            for rank, (rows, *biases) in enumerate(zip(*gathered, strict=True)):
                at = rank * longest + start
                count = min(size, longest - start, max(0, every - at))
                if count:
                    out[..., at : at + count] = F.linear(hidden, rows[:count], *(b[:count] for b in biases))
        return out

    # ---- for generation from gathered weights

    def gather(self) -> None:
        """Every row on every rank. Collective."""
        leaves = {"embedding": self.embedding.weight, "head": self.head.weight, "bias": self.head.bias}
        made: dict[int, torch.Tensor] = {}
        for name, parameter in leaves.items():
            if parameter is not None and not parameter.is_meta:
                if id(parameter) not in made:
                    made[id(parameter)] = parameter.detach().full_tensor()
                self.full[name] = made[id(parameter)].to(self.groups.device)

    def free(self) -> None:
        self.full = {}
