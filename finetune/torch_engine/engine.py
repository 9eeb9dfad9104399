"""TorchEngine: one optimizer step on any torch device, for any transformers model. See finetune/engine.py for the seam."""

import contextlib
import os
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from finetune.engine import IGNORE_INDEX, Batch, MemoryStats, StepResult
from finetune.errors import NonFiniteError, OutOfMemoryError, PlanError
from finetune.quantizers.linear import QuantizedLinear
from finetune.safetensors_io import FROM_NUMPY, TensorShard
from finetune.torch_engine import attention, experts, loss, memory_stats, optim
from finetune.torch_engine.checks import Check, base_model, check_causal, check_head, check_padding_free, no_autocast
from finetune.torch_engine.load import autocast_dtype, out_of_memory, weights_dtype
from finetune.torch_engine.lora.layers import LoRALinear
from finetune.torch_engine.lora.peft_format import disk_name, from_disk, peft_config, to_disk
from finetune.torch_engine.parallel import accelerate, fsdp, pipeline
from finetune.torch_engine.parallel import context as context_parallel
from finetune.torch_engine.parallel import tensor as tensor_parallel
from finetune.torch_engine.parallel.process_groups import SINGLE_PROCESS, ProcessGroups
from finetune.torch_engine.save import StreamedSave
from finetune.torch_engine.weights import config_dtype

SCALE_START, SCALE_GROWS_EVERY = (2.0**15, 2000)  # fp16: torch.amp.GradScaler's own constants, growth 2, backoff 1/2


class TorchEngine:
    """Holds the model or this rank's part of it, its optimizer and its random state. `verify` must run once before the first step.

    With several `ranks` every method that touches weights is called by all of them at the same point; state and files
    come from the first.
    """

    def __init__(
        self,
        model,
        settings,
        device,
        pad_id: int = 0,
        base_config: dict | None = None,
        ranks: ProcessGroups = SINGLE_PROCESS,
        reshard_after_forward: bool = True,
        share=None,
        distribution: str = "ptd",
    ):
        self.saved_dtype = config_dtype(base_config or {})
        self.model, self.settings, self.device, self.pad_id = model, settings, device, pad_id
        self.ranks, self.reseeded = ranks, False
        dtype = autocast_dtype(settings)
        self.autocast = partial(torch.autocast, device.type, dtype=dtype) if dtype else no_autocast
        self.root, self.stage, self.pieces = None, None, tensor_parallel.TPShards()
        self.foreign, self.partitioned = (None, False)  # accelerate's DDP, or DeepSpeed's ZeRO, around the model
        self.head, self.layout, self.head_is_shared, self.in_parts = None, None, False, False
        self.whole_now = 0  # how many callers need every weight whole
        self.counts, self.proofs, self.reference = _parameter_counts(model), None, None
        self._cut(reshard_after_forward, share, distribution)
        self.in_parts = True
        # What trains on all ranks, what of it stands here, and what of that the optimizer updates: of sharded weights, some rows.
        self.trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.named = {n: p for n, p in self.trained.items() if not p.is_meta}
        self.held = fsdp.local_params(self.named)
        held = {n: p for n, p in self.held.items() if p is not None}
        if self.stage and not self.named:
            raise PlanError(
                f"--pp_degree {ranks.dims.pp}: nothing trains on stage {self.stage.number}. Use a smaller degree."
            )
        self.optimizer = optim.build(held, settings, device) if self.named else None
        self.scale = SCALE_START if settings.precision.startswith("fp16") else None
        self.clean_steps = 0
        self.limit = settings.grad_norm if settings.apply_gradient_clipping else None
        self.counter = memory_stats.MemoryCounter(model, held, device)
        if distribution not in ("ptd", "fsdp2") and not ranks.alone:
            self.foreign = accelerate.wrap_model(distribution, model, self.optimizer, ranks, device, self.limit)
            self.partitioned = self.foreign.partitioned
        self.seed(settings.seed)
        if settings.use_gradient_checkpointing == "true":
            self._checkpoint_activations()

    # ---- before the first step

    def _cut(self, reshard_after_forward: bool, share, distribution: str) -> None:
        """Leaves this rank its part of the model. What only a whole model can show is shown before."""
        dims = self.ranks.dims
        if dims.tp * dims.pp > 1:
            self._refer()
        self.pieces = tensor_parallel.shard_layers(self.model, self.ranks)
        if dims.pp > 1:
            self.stage = pipeline.Stage(self.model, self.ranks, self.settings.pp_schedule)
        if self.ranks.sharded and distribution == "fsdp2":
            self.root = accelerate.shard_with_accelerate(self.model, self.ranks, self.device)
        elif self.ranks.sharded:
            offload = self.settings.use_cpu_offload
            self.root = fsdp.shard(self.model, self.ranks, reshard_after_forward, share, offload)
        if share is not None and self.settings.use_dora:
            fsdp.init_dora_magnitudes(self.root, self.ranks)
        if dims.cp > 1 and self.reference is None:
            self._refer()

    def _refer(self) -> None:
        """The proofs of the model while each rank runs all of it, and the logits that its parts must give."""
        self.proofs = self._prove(self.settings.batch_layout)
        self.reference = self._try(self._logits, self._proof_batch())

    def verify(self, wished: str) -> dict:
        """{'batch_layout': (used, reason)} after the proofs on the loaded model; PlanError where flat was asked for and fails."""
        proof, head = self.proofs or self._prove(wished)
        self.layout = "padding_free" if proof.holds else "padded"
        if self.ranks.dims.cp > 1:
            if not proof.holds:
                raise PlanError(
                    f"--cp_degree {self.ranks.dims.cp}: cuts flat rows, and {proof.reason}. Use --dp_shards instead."
                )
            context_parallel.register()
        self.head = loss.Head.of(self.model) if head.holds and (self.stage is None or self.stage.last) else None
        self.head_is_shared = head.holds and self.ranks.dims.tp > 1
        self._set_attention()
        if self.reference is not None:
            self._prove_cut()
        return {"batch_layout": (self.layout, proof.reason)}

    def _prove(self, wished: str) -> tuple[Check, Check]:
        """(that flat rows are right, that our head is). Raises PlanError where the model is none to train, or not flat as asked."""
        self.model.eval()
        self._try(check_causal, self.model, self.autocast)
        proof = Check(False, "asked for")
        if wished != "padded":
            proof = self._try(check_padding_free, self.model, self.autocast, self.settings.context_length)
        if wished == "padding_free" and not proof.holds:
            raise PlanError(f"--batch_layout flat: {proof.reason}. Use auto or padded.")
        self.layout = "padding_free" if proof.holds else "padded"
        self.model.set_attn_implementation(attention.NAME if proof.holds else attention.own_implementation(self.model))
        return proof, self._try(check_head, self.model, self.layout, self.autocast)

    def _set_attention(self) -> None:
        """The attention that training runs through."""
        flat = context_parallel.NAME if self.ranks.dims.cp > 1 else attention.NAME
        self.model.set_attn_implementation(
            flat if self.layout == "padding_free" else attention.own_implementation(self.model)
        )

    def _proof_batch(self) -> Batch:
        """Two short documents, or one where rows are padded."""
        lengths = (13, 9) if self.layout == "padding_free" else (13,)
        vocab = min(self.model.get_input_embeddings().weight.shape[0], 1000)
        ids = 3 + np.random.default_rng(0).integers(max(1, vocab - 3), size=sum(lengths))
        positions = np.concatenate([np.arange(n) for n in lengths])
        documents = np.repeat(np.arange(len(lengths)), lengths)
        return Batch(ids[None], np.full((1, len(ids)), IGNORE_INDEX), positions[None], documents[None], ())

    @torch.no_grad()
    def _logits(self, batch: Batch) -> torch.Tensor:
        """[positions here, V], fp32; on the last stage of a pipeline."""
        with self.autocast():
            return self.model(**self._inputs(batch)[0]).logits.flatten(0, 1).float()

    @torch.no_grad()
    def _prove_cut(self) -> None:
        """The model in parts must give the logits that the whole one gave."""
        batch, wanted = self._proof_batch(), self.reference
        work = partial(self._logits, batch)
        if self.stage:
            self.stage.settle_dtype(self._on_model, work)
            logits = self.stage.chained(self._on_model, work, self._shape(batch))
            self._reshard()
        else:
            logits = self._try(work)
        off = 0.0
        if logits is not None:
            real = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
            if self.ranks.dims.cp > 1:
                places = context_parallel.rank_token_indices(
                    len(logits) * self.ranks.dims.cp, self.ranks.coordinate("cp"), self.ranks.dims.cp
                )
                real = torch.from_numpy(places < len(wanted)).to(logits.device)
                wanted = wanted[torch.from_numpy(places[places < len(wanted)]).to(logits.device)]
            if len(wanted):
                off = ((logits[real] - wanted).abs().max() / self.reference.abs().max()).item()
        off, self.reference = self.ranks.all_reduce_max(off), None
        exact = self.autocast is no_autocast and weights_dtype(self.model) == torch.float32
        if not off <= (1e-4 if exact else 5e-2):
            raise PlanError(
                f"{self.ranks.dims}: the model in parts does not give the logits of the whole one (off by {off:.1e}). "
                "Use --dp_shards instead."
            )

    def _on_model(self, work, *args):
        """work(*args), with the weights outside the layers gathered where they are sharded."""
        around = self.foreign or self.root
        return work(*args) if around is None else around(work, *args)

    def _try(self, work, *args):
        """The same for forwards that no backward follows: what they gathered is let go."""
        try:
            return self._on_model(work, *args)
        finally:
            self._reshard()

    def _reshard(self):
        if self.root is not None and not self.whole_now:
            for module in fsdp.fsdp_modules(self.root):
                module.reshard()

    def _checkpoint_activations(self):
        if not self.model.supports_gradient_checkpointing:
            kind = type(self.model).__name__
            raise PlanError(f"--use_gradient_checkpointing true: {kind} has none. Use false.")
        reentrant = self.settings.reentrant_checkpointing
        # transformers 5.23 renamed it; the older name still works, with a warning.
        enable = getattr(self.model, "activation_checkpointing_enable", self.model.gradient_checkpointing_enable)
        enable({"use_reentrant": reentrant})
        if reentrant:  # the older kind needs an input that asks for a gradient
            self.model.enable_input_require_grads()
        else:  # transformers asks for it in any case, and the first layer would make a gradient that nothing reads
            self.model.disable_input_require_grads()

    # ---- the step

    def train_step(self, microbatches: list[Batch], lr: float) -> StepResult:
        """One optimizer step over the microbatches' targets together. NonFiniteError leaves weights and moments as they were."""
        self.model.train()
        counted = microbatches if self.ranks.is_data_leader else []  # once of those that share their rows
        mine = [sum(b.num_targets for b in counted), sum(b.num_tokens for b in counted), len(microbatches)]
        table = self.ranks.all_gather_scalars(mine)
        num_targets, num_tokens = (int(n) for n in table[:, :2].sum(0))
        assert num_targets > 0, "a step without a target: data.tokenize drops such rows"
        # Ranks exchange weights and gradients in every microbatch: those with fewer go along with empty ones.
        microbatches = microbatches + [self._empty_batch()] * int(table[:, 2].max() - len(microbatches))
        total = self._accumulate(microbatches, (self.scale or 1.0) / num_targets)
        parameters = self._settle_gradients()
        self.counter.count_gradients()
        if self.scale:
            for p in parameters.values():
                if p.grad is not None:
                    p.grad /= self.scale
        norm = self._clip(parameters)
        nll = float(self.ranks.all_gather_scalars([total.item()]).sum())
        result = partial(StepResult, nll, num_targets, num_tokens, norm)
        if not np.isfinite(norm) or not np.isfinite(nll):
            self._drop_gradients()
            if self.scale and np.isfinite(nll) and self.scale > 1:
                self.scale, self.clean_steps = self.scale / 2, 0
                return result(skipped=True)
            what = "loss" if not np.isfinite(nll) else "gradient"
            raise NonFiniteError(f"{what} is {nll if what == 'loss' else norm}")
        optim.set_lr(self.optimizer, lr)
        first = not self.optimizer.state
        with self._memory_advice(microbatches[0]):  # the first step makes the moments
            self.foreign.step() if self.partitioned else self.optimizer.step()
        self._drop_gradients()
        if first:  # they took holes that the next forward would have used, and it makes the heap grow beside the rest
            trim_heap()
        if self.scale:
            self.clean_steps += 1
            if self.clean_steps % SCALE_GROWS_EVERY == 0:
                self.scale *= 2
        return result()

    def _accumulate(self, microbatches: list[Batch], scale: float) -> torch.Tensor:
        """Forward and backward of all; this rank's part of the summed nll, fp64."""
        total = torch.zeros((), dtype=torch.float64, device="cpu" if self.device.type == "mps" else self.device)
        scale = scale if self.foreign is None else scale * self.foreign.factor

        def forward(batch):
            nonlocal total
            nll = self.nll(batch)
            total += nll.detach().to(total.device, torch.float64) * self._counted
            return nll * scale

        def backward(i, work):
            last = i == len(microbatches) - 1
            if self.root is not None:
                self.root.set_requires_gradient_sync(last or not self.settings.no_sync)
            with self._memory_advice(microbatches[i]):
                work()

        if self.stage:
            forwards = [partial(forward, batch) for batch in microbatches]
            self.stage.run(self._on_model, forwards, [self._shape(b) for b in microbatches], backward)
            return total
        for i, batch in enumerate(microbatches):
            with self._accumulating(i == len(microbatches) - 1):
                with self._memory_advice(batch), self._offload(), self.counter.kept_by(batch):
                    loss = self._on_model(forward, batch)
                backward(i, loss.backward if self.foreign is None else partial(self.foreign.backward, loss))
        return total

    @property
    def _counted(self) -> float:
        """What part of the nll that this rank computes is its own, where a tensor-parallel group computes it together."""
        return 1.0 if self.head_is_shared else 1.0 / self.ranks.dims.tp

    def _accumulating(self, last: bool):
        return self.foreign.accumulating(last) if self.foreign else contextlib.nullcontext()

    def _clip(self, parameters: dict) -> float:
        """The norm of all gradients; they are scaled down to the limit, by ZeRO within its own step."""
        if self.partitioned:
            return self.foreign.norm()
        return optim.clip(parameters, self.limit, self.ranks, self._owned())

    def _settle_gradients(self) -> dict:
        """What the optimizer updates, by name, each with the gradient of all ranks. FSDP, DDP and ZeRO have summed theirs."""
        fsdp.move_gradients(self.named, self.held)
        if self.foreign is None:
            replicated = [p for n, p in self.named.items() if self.held[n] is p]
            fsdp.all_reduce_gradients(replicated, self.ranks, "data")
        held = {n: p for n, p in self.held.items() if p is not None}
        partly = [p for n, p in held.items() if n in self.pieces.partial]
        fsdp.all_reduce_gradients(partly, self.ranks, "tp")
        if self.stage:
            shared = [p for n, p in held.items() if self.stage.shared(n)]
            fsdp.all_reduce_gradients(shared, self.ranks, "ends")
        return held

    def _owned(self) -> dict[str, tuple]:
        """{parameter: groups of ranks that hold parts of it}, of those that this rank counts in the norm."""
        out = {}
        for name, parameter in self.held.items():
            if self.stage and self.stage.stage_of(name) != self.stage.number:
                continue
            cut, split = parameter is not self.named[name], name in self.pieces.dims
            out[name] = ("shard",) * cut + ("tp",) * split
        return out

    def _drop_gradients(self):
        if self.partitioned:
            self.foreign.drop()
        for p in (*self.named.values(), *self.held.values()):
            if p is not None:
                p.grad = None

    def _empty_batch(self) -> Batch:
        """Two tokens and no target: adds nothing to loss and gradients."""
        ids, zeros = np.full((1, 2), self.pad_id, np.int64), np.zeros((1, 2), np.int64)
        return Batch(ids, np.full((1, 2), IGNORE_INDEX, np.int64), np.arange(2)[None], zeros, ())

    def _shape(self, batch: Batch) -> tuple[int, int]:
        """(rows, positions) of the batch as this rank computes it."""
        if self.ranks.dims.cp == 1:
            return batch.input_ids_BS.shape
        return 1, 2 * -(-batch.input_ids_BS.size // (2 * self.ranks.dims.cp))

    def _inputs(self, batch: Batch) -> tuple[dict, torch.Tensor]:
        """The model's keyword arguments for the batch, or for this rank's part of it; and that part's labels."""
        context = None
        if self.in_parts and self.ranks.dims.cp > 1:
            batch, context = context_parallel.shard_batch(batch, self.ranks, self.pad_id, self.device)
        labels = torch.from_numpy(batch.labels_BS).to(self.device)
        inputs = {
            "input_ids": torch.from_numpy(batch.input_ids_BS).to(self.device),
            "position_ids": torch.from_numpy(batch.position_ids_BS).to(self.device),
            "use_cache": False,
        }
        if self.layout == "padding_free":
            inputs["documents"] = context or attention.documents_of(batch.position_ids_BS, self.device)
        else:
            real = torch.from_numpy((batch.document_ids_BS >= 0).astype(np.int64))
            inputs["attention_mask"] = real.to(self.device)
        return (inputs if self.stage is None else self.stage.inputs(inputs)), labels

    def nll(self, batch: Batch) -> torch.Tensor:
        """Summed nll of one microbatch's targets, differentiable; of several ranks that share the batch, this one's part.

        In a pipeline the last stage has it.
        """
        inputs, labels = self._inputs(batch)
        at = (labels != IGNORE_INDEX).nonzero(as_tuple=True)
        with self.autocast():
            if self.head is None and not self.head_is_shared:
                return loss.nll_of_logits(self._logits_at(inputs, at), labels[at])
            hidden = base_model(self.model)(**inputs).last_hidden_state
            share = None
            if self.head_is_shared:  # each rank of a tensor-parallel group makes the logits of some positions
                share = partial(tensor_parallel.copy_to_region, ranks=self.ranks)
                hidden = share(hidden)
                at = tuple(index[self.ranks.coordinate("tp") :: self.ranks.dims.tp] for index in at)
            return self.head.nll(hidden[at], labels[at], share)

    def _logits_at(self, inputs, at):
        if self.layout == "padding_free":  # one row: an index tensor picks its target positions
            return self.model(**inputs, logits_to_keep=at[1]).logits[0]
        return self.model(**inputs).logits[at]

    def _offload(self):
        if self.settings.use_activation_cpu_offload:
            return torch.autograd.graph.save_on_cpu(pin_memory=self.device.type == "cuda")
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def _memory_advice(self, batch: Batch):
        """An allocation that fails becomes one line that says what to lower, with what it is now."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            s, size = self.settings, "x".join(map(str, batch.input_ids_BS.shape))
            raise OutOfMemoryError(
                f"{self.device.type} ran out of memory on a microbatch of {size} tokens. Lower --microbatch_tokens "
                f"{s.microbatch_tokens}, --batch_size {s.batch_size} or --context_length {s.context_length}, or turn on "
                f"--use_gradient_checkpointing (now {s.use_gradient_checkpointing}) or --low_memory (now {s.low_memory})."
            ) from error

    @torch.no_grad()
    def evaluate(self, microbatches: list[Batch], stop=None) -> tuple[float, int]:
        """Each rank takes its share of the microbatches; the sums are over all."""
        self.model.eval()
        ranks, total, count = self.ranks.dims.data_ranks, 0.0, 0
        mine = microbatches[self.ranks.data_rank :: ranks]
        mine += [self._empty_batch()] * (-(-len(microbatches) // ranks) - len(mine))
        for batch in mine:
            if stop and stop():
                break
            with self._memory_advice(batch):
                if self.stage:
                    nll = self.stage.chained(self._on_model, partial(self.nll, batch), self._shape(batch))
                else:
                    nll = self._on_model(self.nll, batch)
            total += 0.0 if nll is None else nll.item() * self._counted
            count += batch.num_targets if self.ranks.is_data_leader else 0
        self._reshard()
        total, count = self.ranks.all_gather_scalars([total, count]).sum(0)
        return float(total), int(count)

    @contextlib.contextmanager
    def full_weights(self):
        """Every weight gathered, as packed as it is stored, so that ranks may generate each at its own pace. Collective."""
        if self.root is None and not self.partitioned:
            yield
            return
        self.whole_now += 1
        gathered = self.foreign.whole if self.partitioned else partial(fsdp.unsharded, self.root)
        try:
            with gathered() if self.whole_now == 1 else contextlib.nullcontext():
                yield
        finally:
            self.whole_now -= 1

    @torch.no_grad()
    def generate(self, prompts, max_new_tokens, eos_ids, stop_row=None, **sampling) -> list[list[int]]:
        """New token ids for each prompt, greedy unless `sampling` says otherwise. `stop_row(row, ids)` ends a row early."""
        from finetune.torch_engine.generate import generate

        self.model.eval()
        # Dense copies of every weight are what sharding is there to avoid.
        sharded = self.root is not None or self.partitioned
        dense = contextlib.nullcontext() if sharded else dense_weights(self.model)
        with self.autocast(), self.full_weights(), dense:
            new = generate(self.model, prompts, max_new_tokens, eos_ids, self.pad_id, stop_row, **sampling)
        trim_heap()
        return new

    def all_reduce_max(self, number: int) -> int:
        """The largest of all ranks' numbers."""
        return int(self.ranks.all_reduce_max(number))

    def all_reduce_sum(self, number: float) -> float:
        """The sum of all ranks' numbers, once of those that answer together."""
        return float(self.ranks.all_gather_scalars([number if self.ranks.coordinate("tp") == 0 else 0.0]).sum())

    def shard_list(self, items: list) -> list:
        """Which of these this rank answers, with the others of its tensor-parallel group."""
        dims = self.ranks.dims
        return items[self.ranks.data_rank * dims.cp + self.ranks.coordinate("cp") :: dims.data_ranks * dims.cp]

    def broadcast_object(self, value):
        """The first rank's JSON value."""
        return self.ranks.broadcast_object(value)

    def all_gather_object(self, value) -> list:
        """Every rank's JSON value, in their order."""
        return self.ranks.all_gather_object(value)

    # ---- state

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def data_rank(self) -> int:
        return self.ranks.data_rank

    @property
    def writes_parts(self) -> bool:
        """Whether each rank can save its own parts of what trains: whole weights, cut in ways that have a place in the whole."""
        dims = self.ranks.dims
        return self.settings.train_type == "full" and dims.shards * dims.tp * dims.pp > 1 and not self.partitioned

    @property
    def first(self) -> bool:
        """Whether this rank is the one that hands out state."""
        return self.ranks.rank == 0

    def _gathered(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The whole of a tensor that is cut as the parameter `name` is, on the CPU. Collective over those that hold parts of it."""
        parameter = self.model.get_parameter(name)
        part = part.detach().cpu()
        if fsdp.is_sharded(parameter):
            part = self.ranks.all_gather_rows(part, parameter.shape[0])
        dim = self.pieces.dims.get(name)
        return part if dim is None else self.ranks.tp_all_gather(part, dim)

    def _is_cut(self, name: str) -> bool:
        return name in self.pieces.dims or fsdp.is_sharded(self.named[name])

    def _region(self, name: str) -> tuple[slice, ...]:
        """Which part of the whole tensor `name` stands here: a slice of each dimension."""
        shape, dim = self._whole_shape(name), self.pieces.dims.get(name)
        region = [slice(0, n) for n in shape]
        if dim is not None:
            region[dim] = self.ranks.tp_slice(shape[dim])
        if fsdp.is_sharded(self.named[name]):
            piece = region[0]
            rows = self.ranks.local_rows(piece.stop - piece.start)
            region[0] = slice(piece.start + rows.start, piece.start + rows.stop)
        return tuple(region)

    def _part(self, name: str, whole):
        """The contrary of _gathered: what this rank holds of it."""
        return whole[self._region(name)] if self._is_cut(name) else whole[...]

    def _owns(self, name: str) -> bool:
        """Whether this rank writes what stands here of `name`: it is the first of those that hold the same."""
        at, cut = self.ranks.dims.coordinates(self.rank), fsdp.is_sharded(self.named[name])
        return (
            at["dp_replicate"] == 0
            and (cut or self.ranks.dims.shard_rank(self.rank) == 0)
            and (name in self.pieces.dims or at["tp"] == 0)
            and (self.stage is None or self.stage.stage_of(name) == self.stage.number)
        )

    def parts(self) -> tuple[list[TensorShard], list[TensorShard]]:
        """(weights in fp32, moments) that this rank writes, each read when it is written."""
        owned = {n: p for n, p in self.held.items() if p is not None and self._owns(n)}
        weights = [self._as_part(n, n, self._here(n), torch.float32) for n in owned]
        moments = [
            self._as_part(key.rpartition(".")[0], key, tensor, tensor.dtype)
            for key, tensor in optim.moments(self.optimizer, owned)
        ]
        return weights, moments

    def _here(self, name: str) -> torch.Tensor:
        return fsdp.local_shard(self.named[name].detach())

    def _as_part(self, name: str, key: str, tensor: torch.Tensor, dtype: torch.dtype) -> TensorShard:
        """`tensor` is cut as the parameter `name` is."""
        region = self._region(name)
        shape = tuple(r.stop - r.start for r in region)
        assert shape == tuple(tensor.shape), (key, shape, tensor.shape)
        word = FROM_NUMPY[str(dtype).removeprefix("torch.")]
        return TensorShard(
            key,
            word,
            shape,
            lambda: tensor.to("cpu", dtype).contiguous().numpy(),
            tuple(r.start for r in region),
            self._whole_shape(name),
        )

    def _collected(self, name: str, part: torch.Tensor | None) -> torch.Tensor | None:
        """On the first rank the whole tensor, from whichever stage has it. `part`: this rank's, where it has one. Collective."""
        if self.stage is None:
            return self._gathered(name, part)
        owner = self.stage.stage_of(name)
        whole = self._gathered(name, part) if self.stage.number == owner else None
        return self.ranks.send_to_rank0(whole, owner)

    def trainable_state(self) -> dict[str, np.ndarray]:
        """Of several ranks, the first's is the state, gathered a tensor at a time; the others' is empty."""
        whole = {}
        for name in self.trained:
            mine = self.named.get(name)
            if self.partitioned:
                tensor = self.foreign.weight(mine).float()
            else:
                part = None if mine is None else fsdp.local_shard(mine.detach()).float()
                tensor = self._collected(name, part)
            whole |= {name: tensor} if self.first else {}
        if not self.first:
            return {}
        if self._whole():
            return {name: tensor.numpy() for name, tensor in whole.items()}
        tensors = to_disk(self.model, whole, self.settings)
        return {name: tensor.numpy() for name, tensor in tensors.items()}

    def optimizer_state(self) -> tuple[dict[str, np.ndarray], dict]:
        if self.partitioned:
            parts, numbers = self.foreign.moments(self.named)
        else:
            parts, numbers = optim.state(self.optimizer, self.held)
        tensors, kinds = {}, {}
        for found in self.ranks.all_gather_object([[k, str(v.dtype)] for k, v in parts.items()]):
            kinds |= {k: kind for k, kind in found if k not in kinds}
        for key, kind in kinds.items():
            name, _, moment = key.rpartition(".")
            part = None
            if name in self.named:
                none = np.zeros((0, *self.named[name].shape[1:]), kind)  # where this rank holds no row
                part = torch.from_numpy(parts.get(key, none))
            whole = self._collected(name, part)
            tensors |= {f"{self._disk(name)}.{moment}": whole.numpy()} if self.first else {}
        return tensors, self._values(numbers)

    def optimizer_values(self) -> dict:
        """optimizer_state's JSON values alone. Collective."""
        return self._values(optim.counts(self.optimizer, self.held))

    def _values(self, numbers: dict) -> dict:
        counts = {}
        for found in self.ranks.all_gather_object(numbers):
            for key, number in found.items():
                name, _, moment = key.rpartition(".")
                counts.setdefault(f"{self._disk(name)}.{moment}", number)
        return {"counts": counts, "scale": self.scale, "clean_steps": self.clean_steps}

    def rng_state(self) -> dict[str, np.ndarray]:
        """Random state of every rank: the first's under plain names, rank 1's under rank1.* and so on."""
        out = {}
        for name, state in self._own_rng_state().items():
            for rank, tensor in enumerate(self.ranks.all_gather(state)):
                out[name if rank == 0 else f"rank{rank}.{name}"] = tensor.numpy()
        return out if self.first else {}

    def _own_rng_state(self) -> dict[str, torch.Tensor]:
        state = {"host": torch.get_rng_state()}
        if self.device.type != "cpu":
            state[self.device.type] = torch.get_device_module(self.device).get_rng_state()
        return state

    def load_state(self, trainable, optimizer, values, rng) -> None:
        """Takes up a checkpoint, a tensor at a time where its tensors are read by slices. Raises PlanError where they are not the
        ones that train here.

        Saved by another number of ranks, random states fit nobody: each rank then draws anew, from the first's state and its
        own number, and `reseeded` is set.
        """
        self.load_trainable(trainable)
        held = {self._disk(n): p for n, p in self.held.items()}
        names = {self._disk(n): n for n in self.trained}
        tensors, counts = {}, {}
        for found, given in ((tensors, optimizer), (counts, values["counts"])):
            for key, value in given.items():
                name = names.get(key.rpartition(".")[0])
                if name is None:
                    found[key] = value  # refused below
                elif self.held.get(name) is not None:
                    found[key] = value if found is counts else _Later(self._part, name, value)
        if self.partitioned:
            self.foreign.set_moments(held, tensors, counts)
        else:
            optim.load_state(self.optimizer, held, tensors, counts)
        self.scale, self.clean_steps = values["scale"], values["clean_steps"]
        saved_ranks = 1 + sum(name.startswith("rank") and name.endswith(".host") for name in rng)
        if saved_ranks == self.ranks.dims.world_size:
            prefix = f"rank{self.ranks.rank}." if self.ranks.rank else ""
            self._set_rng_state({name: rng[prefix + name] for name in self._own_rng_state() if prefix + name in rng})
        else:
            self.reseeded = True
            self.seed(zlib.crc32(np.asarray(rng["host"]).tobytes()))

    def _set_rng_state(self, rng) -> None:
        torch.set_rng_state(torch.from_numpy(np.array(rng["host"])))
        if self.device.type in rng:
            torch.get_device_module(self.device).set_rng_state(torch.from_numpy(np.array(rng[self.device.type])))

    @torch.no_grad()
    def load_trainable(self, trainable) -> None:
        names = {self._disk(n): n for n in self.trained}
        if not self._whole():
            trainable = from_disk(self.model, self.trained, trainable, self.settings)
        if set(names) != set(trainable):
            odd = sorted(set(names) ^ set(trainable))[0]
            raise PlanError(f"--resume: the checkpoint and this run differ in what trains, such as {odd}.")
        for key, name in names.items():
            value, shape = trainable[key], self._whole_shape(name)
            if shape != tuple(value.shape):
                raise PlanError(f"--resume: {key} is {tuple(value.shape)} on disk, {shape} here.")
            if self.partitioned:
                self.foreign.set_weight(self.named[name], torch.from_numpy(np.array(value[...])))
            elif name in self.named:
                self._here(name).copy_(torch.from_numpy(np.asarray(self._part(name, value))))

    def _whole_shape(self, name: str) -> tuple:
        shape, dim = list(fsdp.full_shape(self.trained[name])), self.pieces.dims.get(name)
        if dim is not None:
            shape[dim] *= self.ranks.dims.tp
        return tuple(shape)

    def _disk(self, name) -> str:
        return name if self._whole() else disk_name(name)

    def _whole(self) -> bool:
        """Whether weights of the model itself train, not adapters."""
        return self.settings.train_type == "full" or self.settings.llama_pro_path is not None

    def seed(self, seed: int) -> None:
        """Each rank draws its own dropout, those of one tensor-parallel group the same; the first as one process would."""
        at, dims = self.ranks.dims.coordinates(self.ranks.rank), self.ranks.dims
        place = (at["pp"] * dims.data_ranks + self.ranks.data_rank) * dims.cp + at["cp"]
        torch.manual_seed(seed + 1_000_003 * place)

    # ---- what is saved

    def context_limit(self) -> int | None:
        """Positions the model has, where its config says."""
        from finetune.torch_engine.generate import context_limit

        return context_limit(self.model)

    def parameter_counts(self) -> tuple[int, int]:
        """(trainable, all) weights of the whole model, packed ones counted as what they stand for."""
        return self.counts

    def describe_weights(self, base_name: str, base_digest: str) -> dict[str, dict]:
        """{file: JSON} that stands beside the weights so that others can load them."""
        if self.settings.train_type == "full":
            self.model.config.dtype = self.saved_dtype
            return {"config.json": self.model.config.to_dict()}
        if self.settings.llama_pro_path:
            trained = {"base_model_name_or_path": base_name, "base_digest": base_digest}
            return {"trained_blocks.json": {**trained, "tensors": sorted(self.named)}}
        return {
            "adapter_config.json": peft_config(self.model, self.settings, base_name),
            "base_model.json": {
                "name": base_name,
                "digest": base_digest,
            },  # a file of its own: PEFT warns of keys it lacks
        }

    def notices(self) -> list[str]:
        """What a reader of the run should know of the loaded model."""
        left = [] if self.settings.train_type == "full" else experts.unreached(self.model)
        if not left:
            return []
        return [
            f"{len(left)} expert weights such as {left[0]} stay frozen and unquantized: transformers has no "
            "interface to them"
        ]

    def write_model(self, folder) -> None:
        """A whole model folder in the dtype of its config, as transformers loads it; gathered and written a tensor at a time."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        with self.full_weights() if self.partitioned else contextlib.nullcontext():
            state = self.model.state_dict(keep_vars=True)

            def read(name):
                tensor = state[name]
                part = None if tensor.is_meta else fsdp.local_shard(tensor.detach())
                return self._collected(name, part) if name in parameters else part.cpu()

            shapes = {n: self._whole_shape(n) if n in self.trained else tuple(t.shape) for n, t in state.items()}
            saving = StreamedSave.of(self.model, shapes, self.saved_dtype)
            if self.first:
                saving.write(Path(folder), read)
                return
            for turn in saving.turns:
                for name in turn:
                    read(name)

    def profiler(self, written: list):
        from finetune.torch_engine import profiling

        settings = self.settings if self.first else replace(self.settings, profile=False)
        return profiling.profiler(settings, self.device, written)

    # ---- memory

    def begin_memory(self, baseline: int) -> int:
        """Peak bytes of loading above `baseline`, which is the process after its imports; counts the training from here on."""
        settle_heap(self.settings.low_memory)
        return self.counter.begin(baseline)

    def memory(self) -> MemoryStats:
        """Peak bytes since the last call above the process after its imports, and what torch can count of it by item."""
        return self.counter.stats(self.optimizer)

    def reset_memory(self) -> int:
        """Peak bytes since the last count, which starts anew: what evaluation took is not training's."""
        return self.counter.peak()

    def try_step(self, batch: Batch, several: bool) -> None:
        """One whole step on `batch` before the first, undone: weights, moments and random state are exactly as before.

        Learning rate 0 leaves the weights; moments are made first, as they stand in every later step, and dropped at the end.
        `several`: gradients stand too, as they do between the microbatches of one step. Raises OutOfMemoryError.
        """
        assert not self.optimizer.state and self.ranks.alone, "try_step comes before the first step of one process"
        before = {name: state.numpy() for name, state in self._own_rng_state().items()}
        try:
            with self._memory_advice(batch):
                for p in self.named.values():
                    p.grad = torch.zeros_like(p)
                optim.set_lr(self.optimizer, 0.0)
                self.optimizer.step()
                if not several:
                    self.optimizer.zero_grad(set_to_none=True)
                self.model.train()
                with self._offload():
                    nll = self.nll(batch)
                (nll / max(1, batch.num_targets)).backward()
        finally:
            self.optimizer.zero_grad(set_to_none=True)
            self.optimizer.state.clear()
            self._set_rng_state(before)
            trim_heap()


class _Later:
    """An array that is made when numpy asks for it."""

    def __init__(self, make, *args):
        self.make = partial(make, *args)

    def __array__(self, dtype=None, copy=None):
        return np.array(self.make(), dtype, copy=copy)


def _parameter_counts(model) -> tuple[int, int]:
    packed = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
    held = {id(p) for m in packed for p in m.stored()}
    dense = [p for p in model.parameters() if id(p) not in held]
    trainable = sum(p.numel() for p in dense if p.requires_grad)
    return trainable, sum(p.numel() for p in dense) + sum(m.out_features * m.in_features for m in packed)


@contextlib.contextmanager
def dense_weights(model):
    """Keeps dense weights while many small forwards run, as in generation, and gives the memory back after.

    In fp32 the adapters are merged into them; in 16 bits that would round the adapter away, so it stays apart.
    """
    dtype = weights_dtype(model)
    merging = dtype == torch.float32 and not torch.is_autocast_enabled(model.device.type)
    merged = [m for m in model.modules() if isinstance(m, LoRALinear)] if merging else []
    # Of experts a token meets few: theirs stay packed, and one is dequantized at a time.
    inside = {id(layer.base) for layer in merged} | {id(part) for part in experts.quantized_parts(model)}
    cached = [m for m in model.modules() if isinstance(m, QuantizedLinear) and m.cached is None and id(m) not in inside]
    try:
        for layer in merged:
            layer.merged = layer.merged_weight()
        for layer in cached:
            layer.cache(dtype)
        yield
    finally:
        for layer in merged:
            layer.merged = None
        for layer in cached:
            layer.cached = None


def device_of(backend: str, local_rank: int | None = None) -> torch.device:
    """The device of a backend; of several ranks on one machine each has its own where there are several."""
    if local_rank is None or backend in ("cpu", "mps"):
        return torch.device(backend)
    return torch.device(backend, local_rank)


def settle_threads(ranks_here: int = 1) -> None:
    """As many compute threads as this process may use cores, where the user has not said otherwise; ranks share them."""
    said = {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & set(os.environ)
    if said and not (
        ranks_here > 1 and "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1"
    ):
        return  # torchrun sets 1 where the user said nothing
    if hasattr(os, "sched_getaffinity"):
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks_here))


def trim_heap() -> None:
    """Gives freed memory back to the system now, where the heap is kept otherwise."""
    libc = memory_stats.glibc()
    if libc is not None:
        libc.malloc_trim(0)


def settle_heap(low_memory: bool) -> None:
    """Call it once the weights are loaded: glibc gives each step's big blocks back and takes them anew, which costs up to a third of the time in page faults.

    Keeps the heap instead, but for blocks of 32 MiB and more: those are mapped each by itself, since a hole that such a
    block leaves is filled by small ones, and the next one makes the heap grow. With `low_memory` from 1 MiB on.
    """
    libc = memory_stats.glibc()
    if libc is None:
        return
    libc.malloc_trim(0)
    memory_stats.map_blocks_from(2**20 if low_memory else 2**25)  # 2**25 is the most glibc takes
    if not low_memory:
        trim_threshold = -1  # M_TRIM_THRESHOLD of malloc.h
        libc.mallopt(trim_threshold, 2**31 - 1)
