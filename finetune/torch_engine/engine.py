"""TorchEngine: one optimizer step on any torch device, for any transformers model. See finetune/engine.py for the seam."""

import contextlib
import ctypes
import os
import platform
from functools import partial
from pathlib import Path

import numpy as np
import torch

from finetune.engine import IGNORE_INDEX, Batch, MemoryStats, StepResult
from finetune.errors import NonFiniteError, OutOfMemoryError, PlanError
from finetune.quantizers.linear import QuantizedLinear
from finetune.torch_engine import adapters, attention, experts, hf_model, loading, loss, memory_count, optim

SCALE_START, SCALE_GROWS_EVERY = (
    2.0**15,
    2000,
)  # fp16: torch.amp.GradScaler's own constants, growth 2, backoff 1/2


class TorchEngine:
    """Holds the model, its optimizer and its random state. `settle_layout` must run once before the first step."""

    def __init__(self, model, settings, device, pad_id: int = 0, base_config: dict | None = None):
        self.saved_dtype = loading.config_dtype(base_config or {})
        self.model, self.settings, self.device, self.pad_id = model, settings, device, pad_id
        self.named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.optimizer = optim.build(self.named, settings, device) if self.named else None
        dtype = hf_model.autocast_dtype(settings)
        self.autocast = partial(torch.autocast, device.type, dtype=dtype) if dtype else hf_model._no_autocast
        self.scale = SCALE_START if settings.precision.startswith("fp16") else None
        self.clean_steps = 0
        self.head, self.layout = None, None
        self.counter = memory_count.Counter(model, self.named, device)
        self.seed(settings.seed)
        if settings.use_gradient_checkpointing == "true":
            self._checkpoint_activations()

    # ---- before the first step

    def settle_layout(self, wished: str) -> dict:
        """{'batch_layout': (used, reason)} after the proofs on the loaded model; PlanError where flat was asked for and fails."""
        self.model.eval()
        hf_model.prove_causal(self.model, self.autocast)
        proof = hf_model.Proof(False, "asked for")
        if wished != "padded":
            proof = hf_model.prove_flat(self.model, self.autocast, self.settings.context_length)
        if wished == "flat" and not proof.holds:
            raise PlanError(f"--batch_layout flat: {proof.reason}. Use auto or padded.")
        self.layout = "flat" if proof.holds else "padded"
        self.model.set_attn_implementation(
            attention.NAME if proof.holds else attention.own_implementation(self.model)
        )
        head = hf_model.prove_head(self.model, self.layout, self.autocast)
        self.head = loss.Head.of(self.model) if head.holds else None
        return {"batch_layout": (self.layout, proof.reason)}

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
        num_targets = sum(b.num_targets for b in microbatches)
        assert num_targets > 0, "a step without a target: data.tokenize drops such rows"
        total = torch.zeros(
            (), dtype=torch.float64, device="cpu" if self.device.type == "mps" else self.device
        )
        for batch in microbatches:
            with self._memory_advice(batch):
                with self._offload(), self.counter.kept_by(batch):
                    nll = self.nll(batch)
                (nll * ((self.scale or 1.0) / num_targets)).backward()
            total += nll.detach().to(total.device, torch.float64)
        parameters = list(self.named.values())
        self.counter.count_gradients()
        if self.scale:
            for p in parameters:
                if p.grad is not None:
                    p.grad /= self.scale
        limit = self.settings.grad_norm if self.settings.apply_gradient_clipping else None
        norm = optim.clip(parameters, limit)
        nll = total.item()
        result = partial(StepResult, nll, num_targets, sum(b.num_tokens for b in microbatches), norm)
        if not np.isfinite(norm) or not np.isfinite(nll):
            self.optimizer.zero_grad(set_to_none=True)
            if self.scale and np.isfinite(nll) and self.scale > 1:
                self.scale, self.clean_steps = self.scale / 2, 0
                return result(skipped=True)
            what = "loss" if not np.isfinite(nll) else "gradient"
            raise NonFiniteError(f"{what} is {nll if what == 'loss' else norm}")
        optim.set_lr(self.optimizer, lr)
        first = not self.optimizer.state
        with self._memory_advice(microbatches[0]):  # the first step makes the moments
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if first:  # they took holes that the next forward would have used, and it makes the heap grow beside the rest
            trim_heap()
        if self.scale:
            self.clean_steps += 1
            if self.clean_steps % SCALE_GROWS_EVERY == 0:
                self.scale *= 2
        return result()

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
        self.model.eval()
        total, count = 0.0, 0
        for batch in microbatches:
            if stop and stop():
                break
            with self._memory_advice(batch):
                total += self.nll(batch).item()
            count += batch.num_targets
        return total, count

    @torch.no_grad()
    def generate(self, prompts, max_new_tokens, eos_ids, hopeless=None, **sampling) -> list[list[int]]:
        """New token ids for each prompt, greedy unless `sampling` says otherwise. `hopeless(row, ids)` ends a row early."""
        from finetune.torch_engine.generate import generate

        self.model.eval()
        with self.autocast(), dense_weights(self.model):
            new = generate(self.model, prompts, max_new_tokens, eos_ids, self.pad_id, hopeless, **sampling)
        trim_heap()
        return new

    # ---- state

    def trainable_state(self) -> dict[str, np.ndarray]:
        if self._whole():
            return {n: p.detach().float().cpu().numpy() for n, p in self.named.items()}
        tensors = adapters.to_disk(self.model, self.named, self.settings)
        return {name: tensor.numpy() for name, tensor in tensors.items()}

    def optimizer_state(self) -> tuple[dict[str, np.ndarray], dict]:
        tensors, numbers = optim.state(self.optimizer, {self._disk(n): p for n, p in self.named.items()})
        return tensors, {"counts": numbers, "scale": self.scale, "clean_steps": self.clean_steps}

    def rng_state(self) -> dict[str, np.ndarray]:
        state = {"host": torch.get_rng_state().numpy()}
        if self.device.type != "cpu":
            state[self.device.type] = torch.get_device_module(self.device).get_rng_state().numpy()
        return state

    def load_state(self, trainable, optimizer, values, rng) -> None:
        """Takes up a checkpoint. Raises PlanError where its tensors are not the ones that train here."""
        self.load_trainable(trainable)
        named = {self._disk(n): p for n, p in self.named.items()}
        optim.load_state(self.optimizer, named, optimizer, values["counts"])
        self.scale, self.clean_steps = values["scale"], values["clean_steps"]
        self._set_rng_state(rng)

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
            if tuple(parameter.shape) != tuple(trainable[name].shape):
                raise PlanError(
                    f"--resume: {name} is {trainable[name].shape} on disk, {tuple(parameter.shape)} here."
                )
            parameter.copy_(torch.from_numpy(np.array(trainable[name])))

    def _disk(self, name) -> str:
        return name if self._whole() else adapters.disk_name(name)

    def _whole(self) -> bool:
        """Whether weights of the model itself train, not adapters."""
        return self.settings.train_type == "full" or self.settings.llama_pro_path is not None

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    # ---- what is saved

    def context_limit(self) -> int | None:
        """Positions the model has, where its config says."""
        from finetune.torch_engine.generate import context_limit

        return context_limit(self.model)

    def parameter_counts(self) -> tuple[int, int]:
        """(trainable, all) weights, packed ones counted as what they stand for."""
        packed = [m for m in self.model.modules() if isinstance(m, QuantizedLinear)]
        held = {id(p) for m in packed for p in m.stored()}
        dense = sum(p.numel() for p in self.model.parameters() if id(p) not in held)
        trainable = sum(p.numel() for p in self.named.values())
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
        hf_model.write_folder(self.model, Path(folder), self.saved_dtype)

    def profiler(self, written: list):
        from finetune.torch_engine import profiling

        return profiling.profiler(self.settings, self.device, written)

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
        assert not self.optimizer.state, "try_step comes before the first step"
        before = self.rng_state()
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


def device_of(backend: str) -> torch.device:
    return torch.device(backend)


def settle_threads() -> None:
    """As many compute threads as this process may use cores, where the user has not said otherwise."""
    if not {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & set(os.environ) and hasattr(os, "sched_getaffinity"):
        torch.set_num_threads(len(os.sched_getaffinity(0)))


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
