"""TorchEngine: one optimizer step on any torch device, for any transformers model. See finetune/engine.py for the seam."""

import contextlib
import ctypes
import os
import platform
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from finetune.engine import IGNORE_INDEX, Batch, MemoryStats, StepResult
from finetune.errors import NonFiniteError, OutOfMemoryError, PlanError
from finetune.quantizers.linear import QuantizedLinear
from finetune.torch_engine import (
    accelerated,
    adapters,
    attention,
    experts,
    hf_model,
    loading,
    loss,
    memory_count,
    optim,
    parallelize,
)
from finetune.torch_engine.mesh import ALONE, Ranks

SCALE_START, SCALE_GROWS_EVERY = (
    2.0**15,
    2000,
)  # fp16: torch.amp.GradScaler's own constants, growth 2, backoff 1/2


class TorchEngine:
    """Holds the model, its optimizer and its random state. `settle_layout` must run once before the first step.

    With several `ranks` every method that touches weights is called by all of them at the same point; state and files
    come from the first.
    """

    def __init__(
        self, model, settings, device, pad_id: int = 0, base_config: dict | None = None, ranks: Ranks = ALONE,
        reshard_after_forward: bool = True, distribution: str = "ptd",
    ):  # fmt: skip
        self.saved_dtype = loading.config_dtype(base_config or {})
        self.model, self.settings, self.device, self.pad_id = model, settings, device, pad_id
        self.ranks, self.reseeded = ranks, False
        self.root = None
        if ranks.sharded:
            ours = distribution == "ptd"
            self.root = (
                parallelize.shard(model, ranks, reshard_after_forward)
                if ours
                else accelerated.shard(model, ranks, device)
            )
        self.whole_now = 0  # how many callers need every weight whole
        self.named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.held = parallelize.held(
            self.named
        )  # what the optimizer updates: of sharded weights, this rank's rows
        held = {n: p for n, p in self.held.items() if p is not None}
        self.optimizer = optim.build(held, settings, device) if self.named else None
        self.limit = settings.grad_norm if settings.apply_gradient_clipping else None
        self.counter = memory_count.Counter(model, held, device)
        self.foreign = None  # accelerate's DDP, or DeepSpeed's ZeRO, around the model
        if distribution not in ("ptd", "fsdp2") and not ranks.alone:
            self.foreign = accelerated.wrap(distribution, model, self.optimizer, ranks, device, self.limit)
        self.partitioned = self.foreign is not None and self.foreign.partitioned
        dtype = hf_model.autocast_dtype(settings)
        self.autocast = partial(torch.autocast, device.type, dtype=dtype) if dtype else hf_model._no_autocast
        self.scale = SCALE_START if settings.precision.startswith("fp16") else None
        self.clean_steps = 0
        self.head, self.layout = None, None
        self.seed(settings.seed)
        if settings.use_gradient_checkpointing == "true":
            self._checkpoint_activations()

    # ---- before the first step

    def settle_layout(self, wished: str) -> dict:
        """{'batch_layout': (used, reason)} after the proofs on the loaded model; PlanError where flat was asked for and fails."""
        self.model.eval()
        self._try(hf_model.prove_causal, self.model, self.autocast)
        proof = hf_model.Proof(False, "asked for")
        if wished != "padded":
            proof = self._try(hf_model.prove_flat, self.model, self.autocast, self.settings.context_length)
        if wished == "flat" and not proof.holds:
            raise PlanError(f"--batch_layout flat: {proof.reason}. Use auto or padded.")
        self.layout = "flat" if proof.holds else "padded"
        self.model.set_attn_implementation(
            attention.NAME if proof.holds else attention.own_implementation(self.model)
        )
        head = self._try(hf_model.prove_head, self.model, self.layout, self.autocast)
        self.head = loss.Head.of(self.model) if head.holds else None
        return {"batch_layout": (self.layout, proof.reason)}

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
            for module in parallelize.fsdp_modules(self.root):
                module.reshard()

    def _checkpoint_activations(self):
        if not self.model.supports_gradient_checkpointing:
            kind = type(self.model).__name__
            raise PlanError(f"--use_gradient_checkpointing true: {kind} has none. Use false.")
        reentrant = self.settings.reentrant_checkpointing
        # transformers 5.23 renamed it; the older name still works, with a warning.
        enable = getattr(
            self.model, "activation_checkpointing_enable", self.model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": reentrant})
        if reentrant:  # the older kind needs an input that asks for a gradient
            self.model.enable_input_require_grads()

    # ---- the step

    def train_step(self, microbatches: list[Batch], lr: float) -> StepResult:
        """One optimizer step over the microbatches' targets together. NonFiniteError leaves weights and moments as they were."""
        self.model.train()
        mine = (
            sum(b.num_targets for b in microbatches),
            sum(b.num_tokens for b in microbatches),
            len(microbatches),
        )
        table = self.ranks.table(list(mine))
        num_targets, num_tokens = (int(n) for n in table[:, :2].sum(0))
        assert num_targets > 0, "a step without a target: data.tokenize drops such rows"
        # Ranks exchange weights and gradients in every microbatch: those with fewer go along with empty ones.
        microbatches = microbatches + [self._empty_batch()] * int(table[:, 2].max() - len(microbatches))
        total = torch.zeros(
            (), dtype=torch.float64, device="cpu" if self.device.type == "mps" else self.device
        )
        for i, batch in enumerate(microbatches):
            if self.root is not None:
                last = i == len(microbatches) - 1
                self.root.set_requires_gradient_sync(last or not self.settings.no_sync)
            with self._memory_advice(batch), self._accumulating(i == len(microbatches) - 1):
                with self._offload(), self.counter.kept_by(batch):
                    nll = self._on_model(self.nll, batch)
                self._backward(nll, num_targets)
            total += nll.detach().to(total.device, torch.float64)
        parameters = self._settle_gradients()
        self.counter.count_gradients()
        if self.scale:
            for p in parameters:
                if p.grad is not None:
                    p.grad /= self.scale
        norm = self._clip(parameters)
        self.ranks.sum(total)
        nll = total.item()
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

    def _accumulating(self, last: bool):
        return self.foreign.accumulating(last) if self.foreign else contextlib.nullcontext()

    def _backward(self, nll, num_targets: int):
        scale = (self.scale or 1.0) / num_targets
        if self.foreign:
            self.foreign.backward(nll * (scale * self.foreign.factor))
        else:
            (nll * scale).backward()

    def _clip(self, parameters: list) -> float:
        """The norm of all gradients; they are scaled down to the limit, by ZeRO within its own step."""
        if self.partitioned:
            return self.foreign.norm()
        cut = [p for n, p in self.held.items() if p is not self.named[n]]
        return optim.clip(
            parameters, self.limit, cut, self.ranks.sum_over_shards if self.ranks.sharded else None
        )

    def _settle_gradients(self) -> list:
        """What the optimizer updates, each with the gradient of all ranks. FSDP, DDP and ZeRO have summed theirs."""
        parallelize.take_gradients(self.named, self.held)
        if not self.foreign:
            replicated = [p for n, p in self.named.items() if self.held[n] is p]
            parallelize.sum_gradients(replicated, self.ranks)
        return [p for p in self.held.values() if p is not None]

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

    def nll(self, batch: Batch) -> torch.Tensor:
        """Summed nll of one microbatch's targets, differentiable."""
        labels = torch.from_numpy(batch.labels_BS).to(self.device)
        at = (labels != IGNORE_INDEX).nonzero(as_tuple=True)
        inputs = {
            "input_ids": torch.from_numpy(batch.input_ids_BS).to(self.device),
            "position_ids": torch.from_numpy(batch.position_ids_BS).to(self.device),
            "use_cache": False,
        }
        if self.layout == "flat":
            inputs["documents"] = attention.documents_of(batch.position_ids_BS, self.device)
        else:
            inputs["attention_mask"] = torch.from_numpy((batch.document_ids_BS >= 0).astype(np.int64)).to(
                self.device
            )
        with self.autocast():
            if self.head is None:
                return loss.nll_of_logits(self._logits_at(inputs, at), labels[at])
            hidden = hf_model.base_model(self.model)(**inputs).last_hidden_state
            return self.head.nll(hidden[at], labels[at])

    def _logits_at(self, inputs, at):
        if self.layout == "flat":  # one row: an index tensor picks its target positions
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
            if not hf_model.out_of_memory(error):
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
                total += self._on_model(self.nll, batch).item()
            count += batch.num_targets
        self._reshard()
        total, count = self.ranks.table([total, count]).sum(0)
        return float(total), int(count)

    @contextlib.contextmanager
    def whole_weights(self):
        """Every weight gathered, as packed as it is stored, so that ranks may generate each at its own pace. Collective."""
        if self.root is None and not self.partitioned:
            yield
            return
        self.whole_now += 1
        gathered = self.foreign.whole if self.partitioned else partial(parallelize.gathered, self.root)
        try:
            with gathered() if self.whole_now == 1 else contextlib.nullcontext():
                yield
        finally:
            self.whole_now -= 1

    @torch.no_grad()
    def generate(self, prompts, max_new_tokens, eos_ids, hopeless=None, **sampling) -> list[list[int]]:
        """New token ids for each prompt, greedy unless `sampling` says otherwise. `hopeless(row, ids)` ends a row early."""
        from finetune.torch_engine.generate import generate

        self.model.eval()
        # Dense copies of every weight are what sharding is there to avoid.
        sharded = self.root is not None or self.partitioned
        dense = contextlib.nullcontext() if sharded else dense_weights(self.model)
        with self.autocast(), self.whole_weights(), dense:
            new = generate(self.model, prompts, max_new_tokens, eos_ids, self.pad_id, hopeless, **sampling)
        trim_heap()
        return new

    def agree(self, number: int) -> int:
        """The largest of all ranks' numbers."""
        return int(self.ranks.largest(number))

    def total(self, number: float) -> float:
        """The sum of all ranks' numbers."""
        return float(self.ranks.table([number]).sum())

    # ---- state

    @property
    def first(self) -> bool:
        """Whether this rank is the one that hands out state."""
        return self.ranks.rank == 0

    def _gathered(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The whole of a tensor that is cut as the parameter `name` is."""
        if self.held[name] is self.named[name]:
            return part.detach().cpu()
        return self.ranks.whole(part, self.named[name].shape[0])

    def trainable_state(self) -> dict[str, np.ndarray]:
        """Of several ranks, the first's is the state, gathered a tensor at a time; the others' is empty."""
        whole = {}
        for name, parameter in self.named.items():
            if self.partitioned:
                tensor = self.foreign.weight(parameter).float()
            else:
                tensor = self._gathered(name, parallelize.local(parameter.detach()).float())
            whole |= {name: tensor} if self.first else {}
        if not self.first:
            return {}
        if self._whole():
            return {name: tensor.numpy() for name, tensor in whole.items()}
        tensors = adapters.to_disk(self.model, whole, self.settings)
        return {name: tensor.numpy() for name, tensor in tensors.items()}

    def optimizer_state(self) -> tuple[dict[str, np.ndarray], dict]:
        if self.partitioned:
            parts, numbers = self.foreign.moments(self.named)
        else:
            parts, numbers = optim.state(self.optimizer, self.held)
        tensors = {}
        for key, kind in self.ranks.of_first([(k, str(v.dtype)) for k, v in parts.items()]):
            name, _, moment = key.rpartition(".")
            none = np.zeros((0, *self.named[name].shape[1:]), kind)  # where this rank holds no row
            whole = self._gathered(name, torch.from_numpy(parts.get(key, none))).numpy()
            tensors |= {f"{self._disk(name)}.{moment}": whole} if self.first else {}
        counts = {}
        for key, number in numbers.items():
            name, _, moment = key.rpartition(".")
            counts[f"{self._disk(name)}.{moment}"] = number
        return tensors, {"counts": counts, "scale": self.scale, "clean_steps": self.clean_steps}

    def rng_state(self) -> dict[str, np.ndarray]:
        """Random state of every rank: the first's under plain names, rank 1's under rank1.* and so on."""
        out = {}
        for name, state in self._own_rng_state().items():
            for rank, tensor in enumerate(self.ranks.gather(state)):
                out[name if rank == 0 else f"rank{rank}.{name}"] = tensor.numpy()
        return out if self.first else {}

    def _own_rng_state(self) -> dict[str, torch.Tensor]:
        state = {"host": torch.get_rng_state()}
        if self.device.type != "cpu":
            state[self.device.type] = torch.get_device_module(self.device).get_rng_state()
        return state

    def load_state(self, trainable, optimizer, values, rng) -> None:
        """Takes up a checkpoint. Raises PlanError where its tensors are not the ones that train here.

        Saved by another number of ranks, random states fit nobody: each rank then draws anew, from the first's state and its
        own number, and `reseeded` is set.
        """
        self.load_trainable(trainable)
        held = {self._disk(n): p for n, p in self.held.items()}
        names = {self._disk(n): n for n in self.named}
        tensors, counts = {}, {}
        for found, given in ((tensors, optimizer), (counts, values["counts"])):
            for key, value in given.items():
                name = names.get(key.rpartition(".")[0])
                if name is None or self.held[name] is self.named[name]:
                    found[key] = value  # unknown ones are refused below
                elif self.held[name] is not None:
                    found[key] = value if found is counts else value[self.ranks.rows_of(len(value))]
        if self.partitioned:
            self.foreign.set_moments(held, tensors, counts)
        else:
            optim.load_state(self.optimizer, held, tensors, counts)
        self.scale, self.clean_steps = values["scale"], values["clean_steps"]
        saved_ranks = 1 + sum(name.startswith("rank") and name.endswith(".host") for name in rng)
        if saved_ranks == self.ranks.dims.world_size:
            prefix = f"rank{self.ranks.rank}." if self.ranks.rank else ""
            self._set_rng_state(
                {name: rng[prefix + name] for name in self._own_rng_state() if prefix + name in rng}
            )
        else:
            self.reseeded = True
            self.seed(zlib.crc32(np.asarray(rng["host"]).tobytes()))

    def _set_rng_state(self, rng) -> None:
        torch.set_rng_state(torch.from_numpy(np.array(rng["host"])))
        if self.device.type in rng:
            torch.get_device_module(self.device).set_rng_state(
                torch.from_numpy(np.array(rng[self.device.type]))
            )

    @torch.no_grad()
    def load_trainable(self, trainable) -> None:
        named = {self._disk(n): p for n, p in self.named.items()}
        if not self._whole():
            trainable = adapters.from_disk(self.model, self.named, trainable, self.settings)
        if set(named) != set(trainable):
            odd = sorted(set(named) ^ set(trainable))[0]
            raise PlanError(f"--resume: the checkpoint and this run differ in what trains, such as {odd}.")
        for name, parameter in named.items():
            value = torch.from_numpy(np.array(trainable[name]))
            shape = parallelize.whole_shape(parameter)
            if tuple(shape) != tuple(value.shape):
                raise PlanError(f"--resume: {name} is {tuple(value.shape)} on disk, {tuple(shape)} here.")
            if self.partitioned:
                self.foreign.set_weight(parameter, value)
                continue
            rows = parallelize.local(parameter.detach())
            rows.copy_(value if rows.shape == value.shape else value[self.ranks.rows_of(len(value))])

    def _disk(self, name) -> str:
        return name if self._whole() else adapters.disk_name(name)

    def _whole(self) -> bool:
        """Whether weights of the model itself train, not adapters."""
        return self.settings.train_type == "full" or self.settings.llama_pro_path is not None

    def seed(self, seed: int) -> None:
        """Each rank draws its own dropout; the first as one process would."""
        torch.manual_seed(seed + 1_000_003 * self.ranks.rank)

    # ---- what is saved

    def context_limit(self) -> int | None:
        """Positions the model has, where its config says."""
        from finetune.torch_engine.generate import context_limit

        return context_limit(self.model)

    def parameter_counts(self) -> tuple[int, int]:
        """(trainable, all) weights, packed ones counted as what they stand for."""
        packed = [m for m in self.model.modules() if isinstance(m, QuantizedLinear)]
        held = {id(p) for m in packed for p in m.stored()}
        dense = sum(parallelize.whole_shape(p).numel() for p in self.model.parameters() if id(p) not in held)
        trainable = sum(parallelize.whole_shape(p).numel() for p in self.named.values())
        return trainable, dense + sum(m.out_features * m.in_features for m in packed)

    def describe_weights(self, base_name: str, base_digest: str) -> dict[str, dict]:
        """{file: JSON} that stands beside the weights so that others can load them."""
        if self.settings.train_type == "full":
            self.model.config.dtype = self.saved_dtype
            return {"config.json": self.model.config.to_dict()}
        if self.settings.llama_pro_path:
            trained = {"base_model_name_or_path": base_name, "base_digest": base_digest}
            return {"trained_blocks.json": {**trained, "tensors": sorted(self.named)}}
        return {
            "adapter_config.json": adapters.peft_config(self.model, self.settings, base_name),
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
        return [f"{len(left)} expert weights such as {left[0]} stay frozen and unquantized: transformers has no "
                "interface to them"]  # fmt: skip

    def write_model(self, folder) -> None:
        """A whole model folder in the dtype of its config, as transformers loads it."""
        with self.whole_weights() if self.partitioned else contextlib.nullcontext():
            whole, state = {}, {}
            for name, tensor in self.model.state_dict(keep_vars=True).items():
                if id(tensor) not in whole:  # tied weights stay one tensor
                    part, cut = parallelize.local(tensor.detach()), parallelize.local(tensor) is not tensor
                    value = self.ranks.whole(part, tensor.shape[0]) if cut else part
                    whole[id(tensor)] = value if self.first else None
                state[name] = whole[id(tensor)]
            if self.first:
                hf_model.write_folder(self.model, Path(folder), self.saved_dtype, state)

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
        assert not self.optimizer.state and self.ranks.alone, (
            "try_step comes before the first step of one process"
        )
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


@contextlib.contextmanager
def dense_weights(model):
    """Keeps dense weights while many small forwards run, as in generation, and gives the memory back after.

    In fp32 the adapters are merged into them; in 16 bits that would round the adapter away, so it stays apart.
    """
    merging = model.dtype == torch.float32 and not torch.is_autocast_enabled(model.device.type)
    merged = [m for m in model.modules() if isinstance(m, adapters.LoRALinear)] if merging else []
    # Of experts a token meets few: theirs stay packed, and one is dequantized at a time.
    inside = {id(layer.base) for layer in merged} | {id(part) for part in experts.quantized_parts(model)}
    cached = [
        m
        for m in model.modules()
        if isinstance(m, QuantizedLinear) and m.cached is None and id(m) not in inside
    ]
    try:
        for layer in merged:
            layer.merged = layer.merged_weight()
        for layer in cached:
            layer.cache(model.dtype)
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


def _glibc():
    return ctypes.CDLL(None) if platform.system() == "Linux" and platform.libc_ver()[0] == "glibc" else None


def trim_heap() -> None:
    """Gives freed memory back to the system now, where the heap is kept otherwise."""
    if _glibc():
        _glibc().malloc_trim(0)


def settle_heap(low_memory: bool) -> None:
    """Call it once the weights are loaded: glibc gives each step's big blocks back and takes them anew, which costs up to a third of the time in page faults.

    Keeps the heap instead, but for blocks of 32 MiB and more: those are mapped each by itself, since a hole that such a
    block leaves is filled by small ones, and the next one makes the heap grow. With `low_memory` from 1 MiB on.
    """
    libc = _glibc()
    if libc is None:
        return
    libc.malloc_trim(0)
    trim_threshold, mmap_threshold = -1, -3  # M_* of malloc.h
    libc.mallopt(mmap_threshold, 2**20 if low_memory else 2**25)  # 2**25 is the most glibc takes
    if not low_memory:
        libc.mallopt(trim_threshold, 2**31 - 1)
