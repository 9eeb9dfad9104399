"""TorchEngine: one optimizer step on any torch device, for any transformers model.

See finetune/engine.py for the protocol.
"""

import contextlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from finetune.engine import Batch, MemoryStats, StepResult
from finetune.errors import NonFiniteError, OutOfMemoryError, is_out_of_memory
from finetune.generation import Sampling
from finetune.optimizer_state import LossScaler
from finetune.safetensors_io import TensorShard
from finetune.torch_engine import checks, experts, generate, memory_stats, optim, preference, profiling
from finetune.torch_engine.device import fp64_device
from finetune.torch_engine.engine_base import EngineBase
from finetune.torch_engine.lora.peft_format import peft_config
from finetune.torch_engine.parallel.parallelism import Parallelism
from finetune.torch_engine.state import EngineState
from finetune.torch_engine.weights.stream import config_dtype


class TorchEngine(EngineBase):
    """A model, however it is distributed, its optimizer and its random state.

    `verify` must run once before the first step.

    Every method that touches weights is collective; state and files come from rank 0. `base_config`: the model's
    config.json. `objective`: what a step minimizes.
    """

    def __init__(self, parallel: Parallelism, settings, base_config: dict | None = None):
        self.objective = preference.objective_of(settings)
        self.parallel, self.forward, self.settings = parallel, parallel.forward, settings
        self.model, self.groups, self.device = self.forward.model, self.forward.groups, self.forward.device
        self.saved_dtype = config_dtype(base_config or {})
        local = {n: p for n, p in parallel.local_params.items() if p is not None}
        self.optimizer = optim.build(local, settings, self.device) if parallel.placement.trains_here else None
        self.scaler = LossScaler(settings.precision)
        self.counter = memory_stats.MemoryCounter(self.model, local, self.device)
        parallel.attach(self.optimizer, settings.grad_norm if settings.apply_gradient_clipping else None)
        self.state = EngineState(self.model, parallel, self.optimizer, self.scaler, settings)
        self.seed(settings.seed)

    # ---- before the first step

    def verify(self, batch_layout: str) -> dict:
        return checks.verify(self.forward, self.parallel, batch_layout)

    def parameter_counts(self) -> tuple[int, int]:
        return self.forward.parameter_counts

    def notices(self) -> list[str]:
        left = [] if self.settings.train_type == "full" else experts.unreached(self.model)
        if not left:
            return []
        return [
            f"{len(left)} expert weights such as {left[0]} stay frozen and unquantized: transformers has no "
            "interface to them"
        ]

    def try_step(self, batch: Batch, several: bool) -> None:
        """One step on `batch`, undone: weights, moments and random state are exactly as before.

        Raises OutOfMemoryError.

        Learning rate 0 keeps the weights; moments are allocated first, as they are in every later step, and dropped at
        the end. `several`: gradients are allocated too, as they are between the microbatches of one step.
        """
        assert not self.optimizer.state and self.groups.single_process, "only before a single process's first step"
        before = {name: state.numpy() for name, state in self.state.local_rng_state().items()}
        try:
            with self._memory_advice(batch):
                for p in self.parallel.local_params.values():
                    p.grad = torch.zeros_like(p)
                optim.set_lr(self.optimizer, 0.0)
                self.optimizer.step()
                if not several:
                    self.optimizer.zero_grad(set_to_none=True)
                (batch,) = self._compared([batch])
                self.model.train()
                with self._offload():
                    loss, _ = self.objective.loss(self.forward, batch, 1.0)
                (loss / max(1, self.objective.count(batch))).backward()
        finally:
            self.optimizer.zero_grad(set_to_none=True)
            self.optimizer.state.clear()
            self.state.set_rng_state(before)
            memory_stats.trim_heap()

    # ---- the step

    def train_step(self, microbatches: list[Batch], lr: float) -> StepResult:
        """One optimizer step over the microbatches' targets, or preference rows, together.

        NonFiniteError leaves weights and moments unchanged.
        """
        ahead, microbatches = self.objective.split(microbatches)
        ahead = self._sums_ahead(ahead)
        # Ranks that share their rows count them once.
        counts = preference.counts_of(self.objective, microbatches if self.groups.is_data_leader else [])
        has_reference = any(b.reference_D is not None for b in microbatches)
        by_rank = self.groups.all_gather_scalars([*counts, len(microbatches), has_reference])
        count, num_targets, num_tokens, nll_targets = (int(n) for n in by_rank[:, :4].sum(0))
        assert count > 0, "a step without a target: data.tokenize drops such rows"
        # Ranks communicate in every microbatch: those with fewer take part with empty ones.
        most, has_reference = by_rank[:, 4:].max(0)
        microbatches = self._compared(self.forward.filled(microbatches, int(most), bool(has_reference)))
        self.model.train()
        known = self.objective.known(count, nll_targets, ahead)
        total, metrics = self._accumulate(microbatches, self.scaler.factor / count, known)
        parameters = self.parallel.reduce_gradients()
        self.counter.count_gradients()
        optim.unscale(parameters, self.scaler.scale)
        norm = self.parallel.clip(parameters)
        sums = [total.item(), self._aux_loss(), *metrics.values()]
        nll, aux_loss, *sums = self.groups.all_gather_scalars(sums).sum(0).tolist()
        means = self.objective.means(dict(zip(metrics, sums, strict=True)), count, known)
        result = StepResult(
            nll,
            num_targets,
            num_tokens,
            norm,
            aux_loss if self.forward.balance else None,
            num_rows=count if self.objective.per_row else None,
            metrics=means,
        )
        if not np.isfinite(norm) or not np.isfinite(nll):
            self.parallel.drop_gradients()
            if np.isfinite(nll) and self.scaler.lower():
                return replace(result, skipped=True)
            what = f"gradient is {norm}" if np.isfinite(nll) else f"loss is {nll}"
            raise NonFiniteError(what)
        optim.set_lr(self.optimizer, lr)
        allocates_moments = not self.optimizer.state
        with self._memory_advice(microbatches[0]):
            self.parallel.step()
        self.parallel.drop_gradients()
        if allocates_moments:  # they took holes that the next forward would have used, and it grows the heap elsewhere
            memory_stats.trim_heap()
        self.scaler.step()
        return result

    def _sums_ahead(self, microbatches: list[Batch], stop=None) -> list[float]:
        return preference.sums_ahead(self.objective, self.parallel, microbatches, self._memory_advice, stop)

    def _compared(self, microbatches: list[Batch]) -> list[Batch]:
        return preference.compared(self.objective, self.parallel, microbatches, self._memory_advice)

    @torch.no_grad()
    def reference_log_probs(self, microbatches: list[Batch], stop=None) -> dict[int, float]:
        """{document: its log-probability under the model before training}; every rank computes its share."""
        self.model.eval()
        found = []
        for batch in self.forward.share(microbatches):
            if stop and stop():
                break
            (batch,) = self._compared([batch])
            found += zip(batch.rows, batch.reference_D.tolist(), strict=False)  # an empty batch is of no row
        return {row: value for part in self.groups.all_gather_object(found) for row, value in part}

    def _accumulate(self, microbatches: list[Batch], scale: float, known: float) -> tuple[torch.Tensor, dict]:
        """Forward and backward of all; this rank's part of the summed loss, fp64, and of each metric."""
        metrics = dict.fromkeys(self.objective.sums, 0.0)
        total = torch.zeros((), dtype=torch.float64, device=fp64_device(self.device))
        scale, fraction = scale * self.parallel.loss_scale, self.forward.nll_fraction()
        balance = self.forward.balance
        if balance:
            self._count_routes(microbatches)

        def forward(batch):
            nonlocal total
            if balance:
                balance.recording = True
            loss, found = self.objective.loss(self.forward, batch, known)
            total += loss.detach().to(total.device).double() * fraction
            for name in found:
                metrics[name] += found[name]
            if balance:
                factor = balance.coefficient * self.scaler.factor * self.parallel.loss_scale
                return loss * scale + balance.loss() * factor
            return loss * scale

        forwards = [partial(forward, batch) for batch in microbatches]
        shapes = [self.forward.shape(batch) for batch in microbatches]
        self.forward.pipeline.run(self.parallel, forwards, shapes, _StepContexts(self, microbatches))
        return total, metrics

    def evaluate(self, microbatches: list[Batch], stop=None) -> tuple[float, int]:
        """(summed loss, targets or preference rows), see `measure`."""
        found = self.measure(microbatches, stop)
        return found.nll, found.num_targets if found.num_rows is None else found.num_rows

    def _count_routes(self, microbatches: list[Batch]) -> None:
        """Counts the tokens per expert of a step of several microbatches, by forwards with the dropout of those that
        follow.
        """
        balance = self.forward.balance
        balance.begin()
        if len(microbatches) == 1:  # its own forward says it
            return
        before = {name: state.numpy() for name, state in self.state.local_rng_state().items()}
        for batch in microbatches:
            with self._memory_advice(batch):
                balance.recording = True
                self.parallel.call(partial(self.forward.route, batch))
            balance.count()
        self.parallel.reshard()
        balance.finish_counting()
        self.state.set_rng_state(before)

    def _aux_loss(self) -> float:
        """This rank's part of the step's load-balancing loss: the ranks of a tensor-parallel group compute the same."""
        return self.forward.balance.total / self.groups.dims.tp if self.forward.balance else 0.0

    @torch.no_grad()
    def measure(self, microbatches: list[Batch], stop=None) -> StepResult:
        """Loss and metrics without a step, over all ranks, each of which takes its share of the microbatches."""
        self.model.eval()
        ahead, microbatches = self.objective.split(microbatches)
        count, _, _, nll_targets = preference.counts_of(self.objective, microbatches)
        known = self.objective.known(count, nll_targets, self._sums_ahead(self.forward.share(ahead), stop))
        total, counts, metrics = 0.0, np.zeros(4), dict.fromkeys(self.objective.sums, 0.0)
        for batch in self.forward.share(microbatches):
            if stop and stop():
                break
            with self._memory_advice(batch):
                (batch,) = self._compared([batch])
                shape, work = self.forward.shape(batch), partial(self._measured, batch, known, metrics)
                loss = self.forward.pipeline.forward_only(self.parallel.call, work, shape)
            total += 0.0 if loss is None else loss.item() * self.forward.nll_fraction()
            counts += preference.counts_of(self.objective, [batch]) if self.groups.is_data_leader else 0
        self.parallel.reshard()
        total, *found = self.groups.all_gather_scalars([total, *counts, *metrics.values()]).sum(0).tolist()
        count, num_targets, num_tokens, _ = map(int, found[:4])
        means = self.objective.means(dict(zip(metrics, found[4:], strict=True)), max(1, count), known)
        return StepResult(
            total, num_targets, num_tokens, 0.0, num_rows=count if self.objective.per_row else None, metrics=means
        )

    def _measured(self, batch: Batch, known: float, metrics: dict) -> torch.Tensor:
        """The microbatch's loss; adds to the metrics."""
        loss, found = self.objective.loss(self.forward, batch, known)
        for name in found:
            metrics[name] += found[name]
        return loss

    @torch.no_grad()
    def generate(self, prompts, max_new_tokens, eos_ids, stop_row=None, on_token=None, **sampling) -> list[list[int]]:
        """New token ids per prompt, greedy unless `sampling` says otherwise. `stop_row(row, ids)` ends a row early."""
        self.model.eval()
        dense = contextlib.nullcontext() if self.parallel.shards_weights else generate.dense_weights(self.model)
        with self.forward.autocast(), self.full_weights(), dense:
            how = Sampling(**sampling)
            pad_id = self.forward.pad_id
            new = generate.generate(self.model, prompts, max_new_tokens, eos_ids, pad_id, stop_row, on_token, how)
        memory_stats.trim_heap()
        return new

    def full_weights(self):
        return self.parallel.full_weights()

    def _offload(self):
        if self.settings.use_activation_cpu_offload:
            return torch.autograd.graph.save_on_cpu(pin_memory=self.device.type == "cuda")
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def _memory_advice(self, batch: Batch):
        """Turns a failed allocation into one line that says what to lower, with the present values."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            s, size = self.settings, "x".join(map(str, batch.input_ids_BS.shape))
            raise OutOfMemoryError(
                f"{self.device.type} ran out of memory on a microbatch of {size} tokens. Lower --microbatch_tokens "
                f"{s.microbatch_tokens}, --batch_size {s.batch_size} or --context_length {s.context_length}, or "
                f"turn on --use_gradient_checkpointing (now {s.use_gradient_checkpointing}) or --low_memory "
                f"(now {s.low_memory})."
            ) from error

    # ---- state: see torch_engine/state.py

    @property
    def reseeded(self) -> bool:
        return self.state.reseeded

    @property
    def writes_shards(self) -> bool:
        return self.state.writes_shards()

    def state_shards(self) -> tuple[list[TensorShard], list[TensorShard]]:
        return self.state.state_shards()

    def load_trainable(self, trainable: dict) -> None:
        self.state.load_trainable(trainable)

    def seed(self, seed: int) -> None:
        self.state.seed(seed)

    # ---- what is saved and used

    @property
    def pad_id(self) -> int:
        return self.forward.pad_id

    @property
    def layout(self) -> str:
        return self.forward.layout

    def context_limit(self) -> int | None:
        return generate.context_limit(self.model)

    def vocab_size(self) -> int:
        return self.model.get_input_embeddings().weight.shape[0]

    def describe_weights(self, base_name: str, base_digest: str) -> dict[str, dict]:
        """{file: JSON} beside the weights, so that others can load them."""
        if self.settings.train_type == "full":
            self.model.config.dtype = self.saved_dtype
            return {"config.json": self.model.config.to_dict()}
        if self.settings.llama_pro_path:
            tensors = sorted(self.parallel.placement.trainable)
            trained = {"base_model_name_or_path": base_name, "base_digest": base_digest, "tensors": tensors}
            return {"trained_blocks.json": trained}
        # A file of its own: PEFT warns of keys it lacks.
        base = {"name": base_name, "digest": base_digest}
        return {"adapter_config.json": peft_config(self.model, self.settings, base_name), "base_model.json": base}

    def write_model(self, folder: Path) -> None:
        self.state.write_model(folder, self.saved_dtype)

    def profiler(self, written: list):
        settings = self.settings if self.rank == 0 else replace(self.settings, profile=False)
        return profiling.profiler(settings, self.device, written)

    # ---- memory

    def begin_memory(self, baseline: int) -> int:
        """Peak bytes of loading above `baseline`, the process after its imports; counts training from now on."""
        memory_stats.keep_heap(self.settings.low_memory)
        return self.counter.begin(baseline)

    def memory(self) -> MemoryStats:
        return self.counter.stats(self.optimizer)


class _StepContexts:
    """What surrounds the i-th forward and the i-th backward of a step."""

    def __init__(self, engine: TorchEngine, microbatches: list[Batch]):
        self.engine, self.microbatches = engine, microbatches

    @contextlib.contextmanager
    def forward(self, i: int):
        engine, batch = self.engine, self.microbatches[i]
        with engine._memory_advice(batch), engine._offload(), engine.counter.kept_by(batch):
            yield

    def backward(self, i: int):
        return self.engine._memory_advice(self.microbatches[i])
