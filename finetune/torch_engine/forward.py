"""Batches through the model: its inputs in either layout, its logits, and the summed nll at target positions."""

import contextlib
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from finetune.arrays import Arrays, Named, Per
from finetune.data.collate import share_prompts
from finetune.engine import IGNORE_INDEX, Batch, num_documents
from finetune.objectives import LossOf
from finetune.parts.engine_limits import logits_rows
from finetune.parts.parts import Parts
from finetune.torch_engine import loss
from finetune.torch_engine.attention import per_document
from finetune.torch_engine.attention.varlen import Attention
from finetune.torch_engine.device import DTYPES, indices_to_device, to_device
from finetune.torch_engine.divergence import Teacher, top_log_probs
from finetune.torch_engine.experts.load_balancing import LoadBalancing
from finetune.torch_engine.heads import heads_of
from finetune.torch_engine.image_positions import packed_positions
from finetune.torch_engine.neftune import Noise
from finetune.torch_engine.parallel import context
from finetune.torch_engine.parallel.pipeline import EMBEDDED, SingleStage, Stage
from finetune.torch_engine.parallel.process_groups import ProcessGroups
from finetune.torch_engine.parallel.tensor import copy_to_region, reduce_from_region
from finetune.torch_engine.weights.stream import parameter_counts


def no_autocast():
    """Takes the place of torch.autocast in precisions without it."""
    return contextlib.nullcontext()


def document_bounds(positions_T: torch.Tensor, device: torch.device) -> dict:
    """transformers' arguments that say where packed documents begin, for state-space, linear and convolution layers.
    Those reset their state there, where their kernels can (causal_conv1d, flash-linear-attention: on CUDA).
    """
    starts = (positions_T == 0).nonzero().flatten()
    bounds = torch.cat([starts, torch.tensor([len(positions_T)])]).to(torch.int32)
    longest = int(bounds.diff().max())
    index = torch.repeat_interleave(torch.arange(len(starts), dtype=torch.int32), bounds.diff())
    index = to_device(index[None], device)
    bounds = to_device(bounds, device)
    of_documents = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    return {"seq_idx": index, **of_documents, "max_length_q": longest, "max_length_k": longest}


# How rows of a padded batch are given to the model, the first that gives each row the logits it has alone: with
# positions; without, as RoBERTa counts its own from the padding id; row by row, as ProphetNet mixes rows of a batch.
PADDED_INPUTS = ("positions", "mask", "rows")

TOP_ROWS = 64  # of logits that the model computed, whose likeliest tokens are found at once
ENDS = "ends"  # an array of positions: 1 + the document that ends there, else 0


# Names that configs have for the dropout of attention's probabilities.
ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")


class OwnLogits:
    """The model's own logits [B, S, V] for its keyword arguments, on every rank of a pipeline; collective there."""

    def __init__(
        self, model: PreTrainedModel, device: torch.device | None = None, pipeline: SingleStage | Stage | None = None
    ):
        self.model = model
        self.device = device or model.device
        self.pipeline = pipeline or SingleStage()

    def __call__(self, **inputs: Any) -> torch.Tensor:
        return self.by(lambda **given: self.model(**given).logits, **inputs)

    def by(self, work: Callable, **inputs: Any) -> torch.Tensor:
        """Result of `work(**inputs)`, computed with the model."""
        return self.pipeline.everywhere(work, inputs)


def padded_logits(
    run: OwnLogits, word: str, ids: torch.Tensor, positions: torch.Tensor | None, real: torch.Tensor, lengths: list[int]
) -> Any:
    """[B, S, V], or a list of B tensors [S of the row, V]: a padded batch, given as a word of PADDED_INPUTS says.
    `lengths`: of the rows, which `real` marks the tokens of.
    """
    if word == "rows":
        return [run(input_ids=row[None, :n], use_cache=False)[0] for row, n in zip(ids, lengths, strict=True)]
    known = {}
    if word == "positions":
        known = {"position_ids": positions}
    return run(input_ids=ids, attention_mask=real, use_cache=False, **known)


@dataclass(frozen=True)
class Targets:
    """The positions of a microbatch that have a target, in row-major order, found on the host.

    `at_T`: index in the flattened batch; `labels_T`: the tokens to predict there, which is the next
    token (labels come shifted); both on the device. `rows_T`,
    `columns_T`: the same positions, on the host; `documents_T`: whose they are. `arrays`: of this rank's positions.
    """

    at_T: torch.Tensor
    labels_T: torch.Tensor
    rows_T: np.ndarray
    columns_T: np.ndarray
    documents_T: np.ndarray
    arrays: Arrays

    def of(self, x_BS: torch.Tensor) -> torch.Tensor:
        """x [B, S, ...] at these positions."""
        return x_BS.flatten(0, 1).index_select(0, self.at_T)

    def every(self, start: int, step: int) -> "Targets":
        """Every `step`-th, from `start` on."""
        part = slice(start, None, step)
        return Targets(
            self.at_T[part],
            self.labels_T[part],
            self.rows_T[part],
            self.columns_T[part],
            self.documents_T[part],
            self.arrays,
        )

    def values(self, name: str) -> torch.Tensor:
        """[T, ...] on the device: an array per target, or the value of each target's document."""
        array = self.arrays[name]
        assert array.per in (Per.DOCUMENT, Per.POSITION, Per.TARGET), f"{name} is per {array.per.value}"
        if array.per is Per.DOCUMENT:
            found = array.values[self.documents_T]
        else:
            found = array.values[self.rows_T, self.columns_T]
        return to_device(torch.as_tensor(found), self.at_T.device)


@dataclass(frozen=True)
class Layout:
    """Batch layout chosen by checks on the loaded model; set once, see checks.verify.

    `padding_free`: documents packed in one row, else one padded row each, given as `padded_inputs` says (a word of
    PADDED_INPUTS). `passes_bounds`: the model gets the bounds of packed documents. `chunked_head`: our chunked head
    gives the model's logits. `shares_prompts`: answers to one prompt have it once. `reason`: why this layout.
    """

    padding_free: bool
    reason: str
    padded_inputs: str = "positions"
    passes_bounds: bool = False
    chunked_head: bool = False
    shares_prompts: bool = False

    @property
    def name(self) -> str:
        return "padding_free" if self.padding_free else "padded"


class ModelForward:
    """One microbatch through a transformers model, or through this rank's part of it.

    `layout` is None until `use` was called; `head`: our chunked head, None where the model's own computes logits.
    `vocabulary`: this rank's rows of embedding and head, if it does not have all.
    `recorded`: the layout and logits of the full model, see checks.record_reference; `reference`: computes them
    from the model's files (layerwise.Reference), where no rank holds it. `shards_sequences`: context parallelism, once
    these are known. `parameter_counts`: (trainable, all) of the full model. `not_fused`:
    why norms, SwiGLU and RoPE are transformers' own operations, see kernels.fuse; None if what could be is one each.
    """

    def __init__(self, model: PreTrainedModel, plan: Parts, groups: ProcessGroups, pad_id: int):
        self.model = model
        self.groups = groups
        self.pad_id = pad_id
        self.context_length = plan.data.context_length
        self.row_length = max(plan.steps.microbatch_tokens or 0, plan.data.row_length)
        self.device = groups.device
        self.pipeline: SingleStage | Stage = SingleStage()
        self.shards_sequences = False
        dtype = plan.precision.autocast and DTYPES[plan.precision.autocast]
        if dtype:
            self.autocast: Callable[[], AbstractContextManager] = partial(torch.autocast, self.device.type, dtype=dtype)
        else:
            self.autocast = no_autocast
        self.casts = dtype is not None
        self.weights = DTYPES[plan.precision.weights]
        self.sees_images = plan.data.images
        self.layout: Layout | None = None
        self.head: loss.Head | None = None
        self.vocabulary: loss.VocabularyShard | None = None
        self.recorded: tuple[Layout, torch.Tensor] | None = None
        self.reference: Any = None
        self.noise: Noise | None = None
        alpha = plan.objective.neftune_noise_alpha
        if alpha:
            self.noise = Noise(model, alpha, plan.steps.seed)
        self.label_smoothing = plan.objective.label_smoothing
        self.temperature = plan.objective.temperature
        self.balance: LoadBalancing | None = None
        coefficient = plan.objective.load_balancing
        if coefficient:
            self.balance = LoadBalancing(model, coefficient, groups)
        self.attention = Attention(plan.attention)
        self.not_fused: str | None = None
        self.layouts: deque = deque(maxlen=8)  # a compiled graph's backward knows its layout by number only
        self.parameter_counts = parameter_counts(model)

    def use(self, layout: Layout) -> None:
        """Rows go through the model like this from now on, and through the attention that it needs."""
        self.layout = layout
        own_head = layout.chunked_head and self.pipeline.last
        if own_head:
            self.head = loss.Head.of(self.model, self.vocabulary)
        else:
            self.head = None
        if layout.padding_free:
            if self.groups.dims.cp > 1:
                name = context.NAME
            else:
                name = per_document.NAME
        else:
            name = per_document.own_implementation(self.model)
        per_document.use(self.model, name)

    @property
    def may_share_prompts(self) -> bool:
        """True if nothing in the step is random or counted per token of a prompt, nor an image of one document."""
        config = self.model.config.get_text_config()
        drops = any(getattr(config, name, None) for name in ATTENTION_DROPOUT)
        return self.noise is None and self.balance is None and not drops and not self.sees_images

    @property
    def head_is_shared(self) -> bool:
        """True if each rank of a tensor-parallel group has the full head and computes the logits of some positions."""
        assert self.layout is not None, "`use` comes first"
        return self.layout.chunked_head and self.groups.dims.tp > 1 and self.vocabulary is None

    def fraction_of(self, computed: LossOf) -> float:
        """This rank's share of a loss that a tp or cp group computes together: the shares sum to one."""
        dims = self.groups.dims
        if computed is LossOf.DOCUMENTS:  # each has the sums
            return 1.0 / (dims.tp * dims.cp)
        if computed is LossOf.NLL and self.head_is_shared:  # each has some positions
            return 1.0
        return 1.0 / dims.tp

    def empty_batch(self, arrays: Arrays | None = None) -> Batch:
        """Two tokens and no target: adds nothing to loss and gradients."""
        ids = np.full((1, 2), self.pad_id, np.int64)
        zeros = np.zeros((1, 2), np.int64)
        return Batch(ids, np.full((1, 2), IGNORE_INDEX, np.int64), np.arange(2)[None], zeros, (), arrays=arrays or {})

    def filled(self, microbatches: list[Batch], by_rank: np.ndarray) -> list[Batch]:
        """Appends empty microbatches until every rank has as many; they have the arrays of the others.

        `by_rank`: [ranks, 2], `fill_counts` of each. Collective where these differ.
        """
        counts = by_rank[:, 0]
        most = int(counts.max())
        if counts.min() == most:
            return microbatches
        arrays: dict[str, Named] = {}
        if by_rank[:, 1].max():
            for of_rank in self.groups.all_gather_object(_described(microbatches)):
                arrays |= {name: _empty(facts) for name, facts in of_rank.items()}
        return microbatches + [self.empty_batch(arrays)] * (most - len(microbatches))

    def share(self, microbatches: list[Batch]) -> list[Batch]:
        """This data rank's share of microbatches that every rank has: as many as each other rank's."""
        data_ranks = self.groups.dims.data_ranks
        mine = microbatches[self.groups.data_rank :: data_ranks]
        arrays = {name: array.empty() for batch in microbatches for name, array in batch.arrays.items()}
        return mine + [self.empty_batch(arrays)] * (-(-len(microbatches) // data_ranks) - len(mine))

    def shape(self, batch: Batch) -> tuple[int, int]:
        """(rows, positions) of the batch as this rank computes it."""
        cp = self.groups.dims.cp
        if cp == 1:
            return batch.input_ids_BS.shape
        return (1, 2 * -(-batch.input_ids_BS.size // (2 * cp)))

    def inputs(self, batch: Batch) -> tuple[dict, Targets]:
        """(the model's keyword arguments, its targets) for the batch, or for this rank's shard of its sequence."""
        shard_context = None
        assert self.layout is not None, "`use` comes first"
        if self.layout.shares_prompts:
            batch = share_prompts(batch)
        full = batch
        if self.shards_sequences:
            batch, shard_context = context.shard_batch(batch, self.groups, self.pad_id, self.attention)
        if self.noise is not None:
            self.noise.begin(full, batch)
        if self.balance is not None:
            real = (batch.document_ids_BS >= 0) & bool(batch.rows)  # an empty batch has no rows
            self.balance.use_rows(np.flatnonzero(real), real.size, self.device)
        rows_T, columns_T = np.nonzero(batch.labels_BS != IGNORE_INDEX)
        at = rows_T * batch.labels_BS.shape[1] + columns_T
        given = (batch.input_ids_BS, batch.position_ids_BS, at, batch.labels_BS[rows_T, columns_T])
        on_device = indices_to_device([torch.from_numpy(index).long() for index in given], self.device)
        ids_BS, positions_BS, at_T, labels_T = on_device
        documents_T = batch.document_ids_BS[rows_T, columns_T]
        targets = Targets(at_T, labels_T, rows_T, columns_T, documents_T, batch.arrays)
        inputs = {"input_ids": ids_BS, "position_ids": positions_BS, "use_cache": False}
        embedded = self._inputs_beside(batch.arrays, inputs)
        if self.layout.padding_free:
            inputs["documents"] = shard_context
            if shard_context is None:
                inputs["documents"] = per_document.documents_of(batch.position_ids_BS, self.device, self.attention)
                self.layouts.append(inputs["documents"])
            of_images = packed_positions(base_model(self.model), batch)
            if of_images is not None:
                inputs["position_ids"] = to_device(of_images, self.device)
            if self.layout.passes_bounds:
                inputs |= document_bounds(torch.from_numpy(batch.position_ids_BS).flatten(), self.device)
        else:
            mask = torch.from_numpy((batch.document_ids_BS >= 0).astype(np.int64))
            inputs["attention_mask"] = to_device(mask, self.device)
            if self.layout.padded_inputs != "positions":
                inputs.pop("position_ids")
        return self.pipeline.inputs(inputs, embedded), targets

    def _inputs_beside(self, arrays: Arrays, inputs: dict) -> set[str]:
        """Adds the arrays that the model takes by their names; returns the names that only a first stage takes.
        Positions of several dimensions are [P, B, S] to a model.
        """
        for name, array in arrays.items():
            if array.is_input and not (array.per is Per.IMAGE and not len(array.values)):
                values = to_device(torch.as_tensor(array.values), self.device)
                if array.per is Per.IMAGE and values.is_floating_point():
                    values = values.to(self.weights)
                if name == "position_ids" and values.dim() == 3:
                    values = values.permute(2, 0, 1)
                inputs[name] = values
        return {*EMBEDDED, *(name for name, array in arrays.items() if array.is_input and array.per is Per.IMAGE)}

    @torch.no_grad()
    def logits(self, batch: Batch) -> torch.Tensor:
        """[positions on this rank, V], fp32; on the last stage of a pipeline."""
        with self.autocast():
            return self.model(**self.inputs(batch)[0]).logits.flatten(0, 1).float()

    def nll(self, batch: Batch) -> torch.Tensor:
        """Summed nll of one microbatch's targets, differentiable; on the last stage of a pipeline. In training with
        smoothed labels. If ranks share the batch, this rank's share.
        """
        smoothing = 0.0
        if self.model.training:
            smoothing = self.label_smoothing
        inputs, targets = self.inputs(batch)
        with self.autocast():
            if self._row_by_row or (self.head is None and not self.head_is_shared):
                return loss.nll_of_logits(self._logits_at(inputs, targets, batch), targets.labels_T, smoothing)
            hidden = self._hidden(inputs)
            copy = None
            if self.head_is_shared:  # each rank of a tensor-parallel group computes the logits of some positions
                copy = partial(copy_to_region, groups=self.groups)
                hidden = copy(hidden)
                targets = targets.every(self.groups.coordinate("tp"), self.groups.dims.tp)
            assert self.head is not None, "a shared head is ours"
            return self.head.nll(targets.of(hidden), targets.labels_T, copy, smoothing)

    def distilled(
        self, batch: Batch, teacher: Callable[[Targets], Teacher]
    ) -> tuple[torch.Tensor, torch.Tensor, Targets]:
        """(summed loss of one microbatch's targets beside what `teacher` gives at them, log p of each, the targets)."""
        inputs, targets = self.inputs(batch)
        of_teacher = teacher(targets)
        with self.autocast():
            if self._row_by_row or self.head is None:
                logits_TV = self._logits_at(inputs, targets, batch)
                log_probs_T = loss.log_probs_of_logits(logits_TV, targets.labels_T)
                divergence_T = of_teacher.of_logits(logits_TV)
                total = of_teacher.alpha * divergence_T.sum() - (of_teacher.own * log_probs_T[:, None]).sum()
                return total, log_probs_T.detach(), targets
            found = self.head.distilled(targets.of(self._hidden(inputs)), targets.labels_T, of_teacher)
        return *found, targets

    def top_log_probs(
        self, batch: Batch, count: int, tokens_V: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest tokens at each target and log-probabilities, see divergence.top_log_probs; among `tokens_V`,
        if they are given, in whose order they are numbered.
        """
        inputs, targets = self.inputs(batch)
        with self.autocast():
            if self._row_by_row or self.head is None:
                parts = self._logits_at(inputs, targets, batch).split(TOP_ROWS)
                found = [top_log_probs(logits_TV, count, tokens_V) for logits_TV in parts]
            else:
                hidden_TH = targets.of(self._hidden(inputs))
                rows = logits_rows(len(self.head.linear.weight), self.device.type == "cpu")
                found = [top_log_probs(self.head.logits(part), count, tokens_V) for part in hidden_TH.split(rows)]
        return torch.cat([tokens for tokens, _ in found]), torch.cat([log_probs for _, log_probs in found])

    @torch.no_grad()
    def route(self, batch: Batch) -> None:
        """Runs the decoder only, for what hooks record of it."""
        inputs, _ = self.inputs(batch)
        with self.autocast():
            base_model(self.model)(**inputs)

    def target_log_probs(self, batch: Batch) -> tuple[torch.Tensor, Targets]:
        """Log-probability of each target at this rank's positions, in row-major order; differentiable; on the last
        stage of a pipeline. The ranks of a tensor-parallel group all have the same. Logits are divided by the
        temperature at which answers are sampled.
        """
        inputs, targets = self.inputs(batch)
        with self.autocast():
            if self._row_by_row or self.head is None:
                logits = self._logits_at(inputs, targets, batch) / self.temperature
                return loss.log_probs_of_logits(logits, targets.labels_T), targets
            hidden = self._hidden(inputs)
            return self.head.log_probs(targets.of(hidden), targets.labels_T, self.temperature), targets

    def document_log_probs(self, batch: Batch) -> torch.Tensor:
        """Summed log-probabilities of each document's targets, in the batch's order; differentiable; on the last stage
        of a pipeline. Ranks that share the batch all have the sums, and the gradients of their own positions.
        """
        log_probs_T, targets = self.target_log_probs(batch)
        log_probs_D, _ = document_sums(log_probs_T, targets, batch)
        if self.shards_sequences:
            return reduce_from_region(log_probs_D, self.groups, "cp")
        return log_probs_D

    def document_outputs(self, batch: Batch) -> torch.Tensor:
        """[D, width] fp32: what the objective's head gives of each document's last token; differentiable; on the last
        stage of a pipeline. Ranks that share the batch all have them, and the gradients of their own positions.
        """
        ids_BS = batch.document_ids_BS
        is_last = (ids_BS >= 0) & (np.roll(ids_BS, -1, 1) != ids_BS)
        is_last[:, -1] = ids_BS[:, -1] >= 0
        ends_BS = np.where(is_last, 1 + ids_BS, 0)
        inputs, targets = self.inputs(batch.with_array(ENDS, Named(ends_BS, Per.POSITION)))
        ends = targets.arrays[ENDS].values.flatten()
        at = np.flatnonzero(ends)
        at_E, documents_E = indices_to_device([torch.from_numpy(at), torch.from_numpy(ends[at] - 1)], self.device)
        with self.autocast():
            hidden = base_model(self.model)(**inputs).last_hidden_state.flatten(0, 1)
        outputs_E = hidden.index_select(0, at_E).float()
        for head in heads_of(self.model):
            outputs_E = head(outputs_E)
        out = outputs_E.new_zeros(num_documents(batch), outputs_E.shape[1])
        out = out.index_copy(0, documents_E, outputs_E)
        if self.shards_sequences:
            return reduce_from_region(out, self.groups, "cp")
        return out

    def hidden_of(self, ids_BS: torch.Tensor, positions_BS: torch.Tensor) -> torch.Tensor:
        """Last hidden states [B, S, h] of tokens at these positions, by the attention that the model has now."""
        return base_model(self.model)(input_ids=ids_BS, position_ids=positions_BS, use_cache=False).last_hidden_state

    def _hidden(self, inputs: dict) -> torch.Tensor:
        """Hidden states as our head takes them: where ranks have rows of it, their gradients are summed."""
        hidden = base_model(self.model)(**inputs).last_hidden_state
        if self.vocabulary is None or "tp" not in self.vocabulary.over:
            return hidden
        return copy_to_region(hidden, self.groups)

    @property
    def _row_by_row(self) -> bool:
        assert self.layout is not None, "`use` comes first"
        return self.layout.padded_inputs == "rows" and not self.layout.padding_free

    def _logits_at(self, inputs: dict, targets: Targets, batch: Batch):
        if self._row_by_row:
            lengths = (batch.document_ids_BS >= 0).sum(1).tolist()
            own = OwnLogits(self.model, self.device)
            logits = padded_logits(own, "rows", inputs["input_ids"], None, inputs["attention_mask"], lengths)
            columns = [torch.from_numpy(targets.columns_T[targets.rows_T == i]) for i in range(len(lengths))]
            columns = indices_to_device(columns, self.device)
            return torch.cat([row.index_select(0, index) for row, index in zip(logits, columns, strict=True)])
        assert self.layout is not None, "`use` comes first"
        if self.layout.padding_free:  # one row: an index tensor picks its target positions
            return self.model(**inputs, logits_to_keep=targets.at_T).logits[0]
        return targets.of(self.model(**inputs).logits)


def fill_counts(microbatches: list[Batch]) -> list[int]:
    """[number of microbatches, most arrays of one], of which ModelForward.filled needs every rank's."""
    return [len(microbatches), max((len(batch.arrays) for batch in microbatches), default=0)]


def _described(microbatches: list[Batch]) -> dict[str, dict]:
    """{name: facts of an empty batch's array} of the arrays of microbatches, as JSON values."""
    found = {}
    for batch in microbatches:
        for name, array in batch.arrays.items():
            empty = array.empty()
            facts = {"per": empty.per.value, "is_input": empty.is_input}
            found[name] = facts | {"shape": list(empty.values.shape), "dtype": str(empty.values.dtype)}
    return found


def _empty(facts: dict) -> Named:
    return Named(np.zeros(facts["shape"], facts["dtype"]), Per(facts["per"]), is_input=facts["is_input"])


def document_sums(values_T: torch.Tensor, targets: Targets, batch: Batch) -> tuple[torch.Tensor, np.ndarray]:
    """(sums over each document's targets [D], their numbers [D]).

    In both layouts and in every shard the documents' targets follow one another; sums in a fixed order are the same at
    every run, which index_add on a GPU is not.
    """
    counts_D = np.bincount(targets.documents_T, minlength=num_documents(batch))
    return torch.stack([part.sum() for part in values_T.split(counts_D.tolist())]), counts_D


def base_model(model: PreTrainedModel):
    """The model without its head: what returns last_hidden_state."""
    candidates = (getattr(model, model.base_model_prefix, None), model.get_decoder(), getattr(model, "model", None))
    return next((m for m in candidates if m is not None and m is not model), model)
