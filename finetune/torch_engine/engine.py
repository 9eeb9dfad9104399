"""TorchEngine: one optimizer step on any torch device, for any transformers model.

See finetune/engine.py for the protocol.
"""

import contextlib
import copy
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from finetune import objectives
from finetune.adapters.config import base_record
from finetune.adapters.heads import FILE
from finetune.engine import Batch, MemoryStats, ShowingImages, StepResult, document_targets
from finetune.errors import MODEL_ERRORS, NonFiniteError, PlanError, first_line, is_out_of_memory
from finetune.generation import Sampled, Sampling, uniforms
from finetune.memory_advice import memory_advice, on_microbatch
from finetune.model_files.files import STARTED_IN
from finetune.model_files.rope_names import with_older_names
from finetune.objectives import Totals
from finetune.optimizer_state import LossScaler
from finetune.parts.parts import Parts
from finetune.parts.trains import Adapter, AddedLayers
from finetune.torch_engine import base_offload, checks, heads, memory_stats, optim, profiling
from finetune.torch_engine.callers_settings import drawing_apart
from finetune.torch_engine.compile import cannot_pay, choose, compile_layers, stop_compiling
from finetune.torch_engine.device import DTYPES, free_bytes, pins_memory, to_device, to_host
from finetune.torch_engine.engine_base import EngineBase
from finetune.torch_engine.experts import fused
from finetune.torch_engine.experts.load_balancing import LoadBalancing
from finetune.torch_engine.forward import ModelForward, fill_counts
from finetune.torch_engine.generation import decode, generate
from finetune.torch_engine.generation.generate import Rounds
from finetune.torch_engine.graphs.replay import Capture, DeviceCapture, Graphs, NotCapturedError
from finetune.torch_engine.kernels import fp8
from finetune.torch_engine.lora import frozen_fp8
from finetune.torch_engine.lora.adapters import adapters_off
from finetune.torch_engine.lora.flat import in_step
from finetune.torch_engine.lora.layers import adapter_parameters, adapters_in_fp32, cast_once
from finetune.torch_engine.lora.peft_format import peft_config
from finetune.torch_engine.lora.targets import linear_names
from finetune.torch_engine.parallel.parallelism import Parallelism
from finetune.torch_engine.parallel.pipeline import Stage
from finetune.torch_engine.passes import Passes
from finetune.torch_engine.state import EngineState
from finetune.torch_engine.weights.modalities import vision_names
from finetune.torch_engine.weights.stream import config_dtype
from finetune.torch_engine.weights.vocabulary import rows_of

Answers = TypeVar("Answers")  # to one prompt
# What torch.compile raises where a layer cannot be traced, or a compiler is missing.
COMPILE_FAILURES = (*MODEL_ERRORS, OSError, ImportError, subprocess.SubprocessError)
WORTH = 0.97  # of the time of a microbatch: what a replay takes at most
BUCKETS = 16  # of a run whose microbatches have any lengths, about; each takes less than the check of one


class TorchEngine(EngineBase):
    """A model, however it is distributed, its optimizer and its random state.

    `verify` must run once before the first step.

    Every method that touches weights is collective; state and files come from rank 0. `base_config`: the model's
    config.json. `objective`: what a step minimizes.
    """

    def __init__(self, parallel: Parallelism, plan: Parts, base_config: dict | None = None):
        self.objective = objectives.build(plan.objective.name, plan.objective.arguments)
        self.parallel = parallel
        assert isinstance(parallel.forward, ModelForward), parallel.forward
        self.forward = parallel.forward
        self.plan = plan
        self.model = self.forward.model
        self.groups = self.forward.groups
        self.device = self.forward.device
        self.saved_dtype = config_dtype(base_config or {})
        record = heads.record_of(self.model)
        if record is not None:
            heads.set_record(self.model, replace(record, pad_token_id=self.forward.pad_id))
        local = {n: p for n, p in parallel.local_params.items() if p is not None}
        seeing: list[str] = []
        if plan.data.images and not isinstance(plan.trains, AddedLayers):
            seeing = vision_names(self.model, plan.trains.vision)
        ratios = optim.ratios_of(plan.trains, local, seeing)
        trains_here = parallel.placement.trains_here
        linears = []
        if plan.steps.tells_matrices:
            linears = linear_names(self.model)
        matrices = frozenset(f"{name}.weight" for name in linears)
        sizes = {name: parameter.numel() for name, parameter in parallel.placement.of_stage.items()}
        if trains_here:
            self.optimizer = optim.build(local, plan.steps, self.device, ratios, matrices, sizes)
        else:
            self.optimizer = None
        self.scaler = LossScaler(plan.precision.scales_loss)
        offload = base_offload.of_model(self.model)
        if offload is not None:
            self.base_reads = offload.counters
        self.counter = memory_stats.MemoryCounter(self.model, local, self.device)
        parallel.attach(self.optimizer, plan.steps.clip)
        self.graphs: Graphs | None = None
        self.state = EngineState(self.model, parallel, self.optimizer, self.scaler, plan)
        self.seed(plan.steps.seed)

    # ---- before the first step

    def verify(self, batch_layout: str, showing: ShowingImages | None = None) -> dict:
        return checks.verify(self.forward, self.parallel, batch_layout, showing)

    def parameter_counts(self) -> tuple[int, int]:
        return self.forward.parameter_counts

    def notices(self) -> list[str]:
        found = []
        if self.plan.all_weights:
            left = []
        else:
            left = fused.unreached(self.model)
        if left:
            found.append(
                f"{len(left)} expert weights such as {left[0]} stay frozen and unquantized: transformers has no "
                "interface to them"
            )
        if self.forward.not_fused and self.device.type not in ("cpu", "mps"):
            found.append(f"norms, SwiGLU and RoPE in several launches each: no Triton ({self.forward.not_fused})")
        return found

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
                (batch,), statistics = self.objective.prepare(self._passes(), [batch])
                totals = Totals(self.objective.count(batch), statistics)
                self.model.train()
                with self._weights_cast_once():
                    with self._offload():
                        loss, _ = self.objective.loss(self.forward, batch, totals)
                    (loss / max(1, totals.count)).backward()
        finally:
            self.optimizer.zero_grad(set_to_none=True)
            optim.reset(self.optimizer)
            self.state.set_rng_state(before)
            memory_stats.trim_heap()

    @contextlib.contextmanager
    def undone(self):
        """Restores weights, moments, loss scale and random state on exit."""
        assert not self.optimizer.state and self.groups.single_process, "only before a single process's first step"
        weights = {name: p.detach().clone() for name, p in self.parallel.local_params.items()}
        scale = self.scaler.values()
        rng = {name: s.numpy() for name, s in self.state.local_rng_state().items()}
        try:
            yield
        finally:
            with torch.no_grad():
                for name, p in self.parallel.local_params.items():
                    p.copy_(weights[name])
            self.optimizer.zero_grad(set_to_none=True)
            optim.reset(self.optimizer)
            self.scaler.load(scale)
            self.state.set_rng_state(rng)

    def prove_fp8(self, batch: Batch, before: str | None) -> tuple[str, str]:
        """Multiplies frozen weights in fp8 from here on if loss and gradients stay near, see Engine."""
        used, why = self._proven_fp8(batch, before)
        if not self._on_all_ranks(used == "fp8") and used == "fp8":
            used = "exact"
            why = "another rank is exact"
        if used == "exact":
            frozen_fp8.turn_off(self.model)
        return used, why

    def _proven_fp8(self, batch: Batch, before: str | None) -> tuple[str, str]:
        switch = frozen_fp8.switch_of(self.model)
        if switch is None:
            return "exact", f"no linear with an adapter has sizes in multiples of {fp8.MULTIPLE}"
        why = fp8.product_error(self.device)
        if why is not None:
            return "exact", f"no fp8 products here: {why}"
        if before is not None:
            return before, "as the run began"
        switch.on = False
        exact = self._learned(batch)
        switch.on = True
        of_loss, of_gradients = frozen_fp8.compared(exact, self._learned(batch))
        if of_loss == of_gradients == 0:
            return "exact", "none of these linears' products is of its frozen weight, loss and gradients are the same"
        fact = f"the loss is off by {of_loss:.2%}, gradients by {of_gradients:.1%} of their norm"
        if of_loss <= frozen_fp8.LOSS and of_gradients <= frozen_fp8.GRADIENT:
            return "fp8", fact
        return "exact", f"{fact}, more than {frozen_fp8.LOSS:.0%} or {frozen_fp8.GRADIENT:.0%}"

    def _learned(self, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(loss, adapters' gradients) of one forward and backward, with the random state of now, which stays."""
        self.parallel.drop_gradients()
        with self._only_tried():
            loss = self._forward_and_backward(batch)
            adapters = adapter_parameters(self.model).keys()
            trained = [self.parallel.local_params.get(name) for name in adapters]
            return loss, [p.grad.clone() for p in trained if p is not None and p.grad is not None]

    def compile_if_it_pays(self, batch: Batch, microbatches: int) -> tuple[str, str]:
        """Compiles the step from here on if that pays off, see Engine."""
        try:
            with self._only_tried():
                eager_s = min(self._seconds(batch) for _ in range(3))
                used = "false"
                reason = cannot_pay(eager_s, microbatches)
                if reason is None:
                    used, reason = self._compiled(batch, eager_s, microbatches)
        except COMPILE_FAILURES as error:
            if is_out_of_memory(error):
                raise
            used = "false"
            reason = f"compiling fails here: {first_line(error)}"
        if used == "false":
            stop_compiling(self.model)
        return used, reason

    @contextlib.contextmanager
    def _only_tried(self) -> Iterator[None]:
        """A context of microbatches that leave no gradients and no random state."""
        before = {name: state.numpy() for name, state in self.state.local_rng_state().items()}
        try:
            yield
        finally:
            self.parallel.drop_gradients()
            self.state.set_rng_state(before)

    def capture_if_it_pays(
        self, batch: Batch, asked: bool, microbatches: int, capture: Callable[[torch.device], Capture] = DeviceCapture
    ) -> tuple[str, str]:
        """Replays the step's microbatches from here on if that pays off, see Engine. `capture`: how. Collective."""
        used, why = self._captured(batch, asked, microbatches, capture)
        if not self._on_all_ranks(used == "true") and used == "true":
            used = "false"
            why = "another rank does not"
        if used == "false":
            self.graphs = None
        return used, why

    def _captured(
        self, batch: Batch, asked: bool, microbatches: int, capture: Callable[[torch.device], Capture]
    ) -> tuple[str, str]:
        why = self._not_captured()
        if why is not None:
            return "false", why
        try:
            with self._only_tried():
                eager_s = min(self._seconds(batch) for _ in range(3))
                trained = [p for p in self.parallel.local_params.values() if p is not None]
                self.graphs = Graphs(self.forward, self.objective, trained, capture(self.device))
                return self._replayed(self.graphs, batch, eager_s=eager_s, asked=asked, microbatches=microbatches)
        except (*COMPILE_FAILURES, MemoryError) as error:
            if not is_out_of_memory(error):
                return "false", f"capturing fails here: {first_line(error)}"
            if asked:
                raise
            return "false", "no memory for a graph's activations beside a microbatch's"

    def _replayed(
        self, graphs: Graphs, batch: Batch, *, eager_s: float, asked: bool, microbatches: int
    ) -> tuple[str, str]:
        """(word of --cuda_graphs, why), once replays were compared and timed. A bucket's first microbatch runs as it
        is, and capturing its second takes longer than running it.
        """
        (of_step,), statistics = self.objective.prepare(self._passes(), [batch])
        totals = Totals(self.objective.count(of_step), statistics)
        self.parallel.drop_gradients()
        self.model.train()
        start = time.perf_counter()
        with self._weights_cast_once(), self._memory_advice(batch):
            differs = graphs.check(of_step, totals, lambda: self._around_forward(batch))
        checking_s = time.perf_counter() - start
        if differs is not None:
            return "false", differs
        replayed_s = min(self._seconds(batch) for _ in range(3))
        fact = f"{eager_s:.3g} s per microbatch, {replayed_s:.3g} s replayed, measured"
        if asked:
            return "true", fact
        saved_s = (eager_s - replayed_s) * microbatches
        if replayed_s > WORTH * eager_s or saved_s < BUCKETS * checking_s:
            return "false", f"{fact}: would not pay in {microbatches:,} of them"
        return "true", f"{fact}: pays in {microbatches:,} of them"

    def _not_captured(self) -> str | None:
        """The fact by which the loaded model's microbatches are not captured; None if they are to be tried."""
        layout = self.forward.layout
        assert layout is not None, "`verify` comes first"
        if not layout.padding_free:
            return "padded rows have the length of their batch"
        if layout.passes_bounds:
            return "layers of this model take bounds of documents on the host"
        if self.forward.head is None:
            return "the model computes its own logits"
        return None

    def _compiled(self, batch: Batch, eager_s: float, microbatches: int) -> tuple[str, str]:
        compile_layers(self.model)
        first = self._seconds(batch)
        compiled_s = min(self._seconds(batch) for _ in range(2))
        return choose(eager_s, compiled_s, first - compiled_s, microbatches)

    def _seconds(self, batch: Batch) -> float:
        """Seconds of one forward and backward, which leave gradients only."""
        synchronize = torch.get_device_module(self.device).synchronize
        self.parallel.drop_gradients()
        synchronize()
        start = time.perf_counter()
        self._forward_and_backward(batch)
        synchronize()
        return time.perf_counter() - start

    def _forward_and_backward(self, batch: Batch) -> torch.Tensor:
        """The summed loss of a microbatch, whose gradients are left where they are."""
        (batch,), statistics = self.objective.prepare(self._passes(), [batch])
        self.model.train()
        step = _Step([batch], Totals(self.objective.count(batch), statistics))
        with self._weights_cast_once():
            if self.graphs is not None:
                self._replay(self.graphs, step)
                return step.losses[0]
            with self._memory_advice(batch), self._offload():
                loss, _ = self.objective.loss(self.forward, batch, step.totals)
                loss.backward()
                return loss.detach()

    # ---- the step

    def train_step(self, microbatches: list[Batch], lr: float) -> StepResult:
        """One optimizer step. The loss is summed over all microbatches and divided once, by the number of targets or of
        preference rows.

        NonFiniteError leaves weights and moments unchanged. In one process `parallel` only passes on: `call` calls,
        `backward` is loss.backward(), `reduce_gradients` names the parameters, `clip` is optim.clip, `step` the
        optimizer's, and `averaging_factor` 1. The scaler's factor is 1 and `unscale` does nothing unless in fp16.
        """
        step = self._agreed_step(microbatches)
        self.model.train()
        with self._weights_cast_once():
            if self.forward.pipeline.count > 1:
                self._through_stages(step)
            elif self.graphs is not None:
                self._replay(self.graphs, step)
            else:
                for batch, is_last in step.each():
                    with self.parallel.accumulating(is_last):
                        with self._around_forward(batch):
                            loss = self.parallel.call(partial(self._loss_to_minimize, batch, step))
                        with self._memory_advice(batch):
                            self.parallel.backward(loss)
        parameters = self.parallel.reduce_gradients()
        self.counter.count_gradients()
        optim.unscale(parameters, self.scaler.scale)
        # The losses are copied to the host in the norm's wait.
        norm, on_host = self.parallel.clip(parameters, step.to_read())
        result = self._result_of(step, norm, on_host)
        if not (np.isfinite(result.grad_norm) and np.isfinite(result.nll)):
            return self._without_step(result)
        optim.set_lr(self.optimizer, lr)
        with self._trimmed_after_first_step(), self._memory_advice(step.microbatches[0]):
            self.parallel.step()
            self.parallel.drop_gradients()
        self.scaler.step()
        return result

    def _replay(self, graphs: Graphs, step: "_Step") -> None:
        """Runs forward and backward of every microbatch, captured or replayed."""
        graphs.begin()
        for batch in step.microbatches:
            try:
                with self._memory_advice(batch):
                    learned = graphs.learn(batch, self._factor(step), self._around_forward(batch))
            except NotCapturedError as error:
                raise PlanError(
                    f"--cuda_graphs: a microbatch of {batch.input_ids_BS.size:,} tokens cannot be captured ({error}); "
                    "start again with --cuda_graphs false: the run goes on from its last checkpoint"
                ) from error
            step.losses.append(learned.loss)
            if learned.observed is not None:
                step.observed.append(learned.observed)
        graphs.end()
        self.counter.idle = graphs.idle_bytes

    def _factor(self, step: "_Step") -> float:
        """Factor that makes a summed loss the step's mean, times fp16's loss scale and averaging, undone later."""
        return self.scaler.factor / step.totals.count * self.parallel.averaging_factor

    def _loss_to_minimize(self, batch: Batch, step: "_Step") -> torch.Tensor:
        """The microbatch's part of the mean loss, see `_factor`."""
        scale = self._factor(step)
        balance = self.forward.balance
        if balance is None:
            return self._loss(batch, step) * scale
        balance.recording = True
        loss = self._loss(batch, step) * scale
        return loss + balance.loss() * (balance.coefficient * self.scaler.factor * self.parallel.averaging_factor)

    def _loss(self, batch: Batch, step: "_Step") -> torch.Tensor:
        """The microbatch's summed loss. The step keeps it, and what the objective observed. Of next tokens it is
        `forward.nll(batch)`, and `totals.count` the number of targets of the step.
        """
        loss, observed = self.objective.loss(self.forward, batch, step.totals)
        step.losses.append(loss.detach())
        if observed is not None:
            step.observed.append(observed)
        return loss

    # ---- around the step: what several ranks, stages and experts need, and what the host learns of it

    def _agreed_step(self, microbatches: list[Batch]) -> "_Step":
        """The step of all ranks: counts are summed over them, and each gets the same number of microbatches, as they
        communicate in every one. Collective.
        """
        microbatches, statistics = self.objective.prepare(self._passes(), microbatches)
        # Ranks that share their rows count them once.
        counts = self._counts(microbatches if self.groups.is_data_leader else [])
        of_rank = [*counts, *fill_counts(microbatches)]
        by_rank = self.groups.all_gather_scalars(of_rank)
        num_targets, num_tokens, *totals = (int(n) for n in by_rank[:, :-2].sum(0))
        assert totals[0] > 0, "a step without a target: data.tokenize drops such rows"
        microbatches = self.forward.filled(microbatches, by_rank[:, -2:])
        if self.forward.balance:
            self._count_routes(microbatches)
        return _Step(microbatches, Totals(tuple(totals), statistics), num_targets, num_tokens, self.forward.balance)

    def _through_stages(self, step: "_Step") -> None:
        """Forward and backward of every microbatch, in the order of the pipeline's schedule."""
        forwards = [partial(self._loss_to_minimize, batch, step) for batch in step.microbatches]
        shapes = [self.forward.shape(batch) for batch in step.microbatches]
        pipeline = self.forward.pipeline
        assert isinstance(pipeline, Stage), pipeline
        pipeline.run(self.parallel, forwards, shapes, _StepContexts(self, step.microbatches))

    def _weights_cast_once(self) -> AbstractContextManager:
        """A context in which an adapter is cast to the dtype of its products once. On a CPU nothing is kept: casting
        again is cheaper than a copy.
        """
        dtype = None
        # A graph reads where it was captured: only adapters in one buffer are cast to the same place in each step.
        stays = self.graphs is None or self.graphs.flat is not None
        if self.device.type != "cpu" and stays:
            dtype = DTYPES[self.plan.precision.compute]
        return in_step(self.model, dtype)

    @contextlib.contextmanager
    def _around_forward(self, batch: Batch) -> Iterator[None]:
        """The context of a microbatch's forward: memory is counted, advised on, and activations may be offloaded."""
        with self._memory_advice(batch), self.counter.kept_by(batch), self._offload():
            yield

    @contextlib.contextmanager
    def _trimmed_after_first_step(self) -> Iterator[None]:
        """The context of the update, after the first of which the heap is trimmed: moments took freed heap that the
        next forward would have used, and that forward would grow it.
        """
        is_first = not self.optimizer.state
        yield
        if is_first:
            memory_stats.trim_heap()

    def _result_of(self, step: "_Step", norm: float, on_host: list) -> StepResult:
        """The result over all ranks, from what `step.to_read` gave on the host. Collective."""
        losses, aux_losses, observed = step.split(on_host)
        # The ranks of a tensor-parallel group compute the same load-balancing loss.
        aux_loss = sum(loss.item() for loss in aux_losses) / self.groups.dims.tp
        nll, aux_loss, *sums = self._summed(self._total(losses), aux_loss, *self._sums(observed))
        return StepResult(
            nll,
            step.num_targets,
            step.num_tokens,
            norm,
            aux_loss if self.forward.balance else None,
            num_rows=step.totals.count if self.objective.counts_rows else None,
            metrics=self._means(sums, step.totals),
        )

    def _without_step(self, result: StepResult) -> StepResult:
        """Lowers fp16's loss scale and skips the update. Raises NonFiniteError if the scale is not the cause."""
        self.parallel.drop_gradients()
        if not np.isfinite(result.nll):
            raise NonFiniteError(f"loss is {result.nll}")
        if not self.scaler.lower():
            raise NonFiniteError(f"gradient is {result.grad_norm}")
        return replace(result, skipped=True)

    def _passes(self, everywhere: bool = False, stop: Callable[[], bool] | None = None) -> Passes:
        return Passes(self.parallel, self._memory_advice, everywhere, stop)

    def _counts(self, microbatches: list[Batch]) -> list[int]:
        """Targets, tokens, and what the objective counts; empty microbatches are not counted."""
        counts = [(b.num_targets, b.num_tokens, *self.objective.count(b)) for b in microbatches if b.rows]
        width = 2 + len(self.objective.count(self.forward.empty_batch()))
        return [sum(column) for column in zip(*counts or [(0,) * width], strict=True)]

    def _summed(self, *numbers: float) -> list[float]:
        return self.groups.sum_scalars(list(numbers)).tolist()

    def _means(self, sums: list[float], totals: Totals) -> dict[str, float]:
        return self.objective.means(dict(zip(self.objective.sums, sums, strict=True)), totals)

    def _total(self, losses: list) -> float:
        """This rank's part of the summed loss, from each microbatch's on the host."""
        fraction = self.forward.fraction_of(self.objective.loss_of)
        return sum((loss.item() * fraction for loss in losses), 0.0)

    def _sums(self, observed: list) -> list[float]:
        """The objective's sums, from what it observed of each microbatch, on the host."""
        sums = dict.fromkeys(self.objective.sums, 0.0)
        for found in observed:
            for name, number in self.objective.sums_of(found).items():
                sums[name] += number
        fraction = self.forward.fraction_of(self.objective.loss_of)
        return [total * fraction for total in sums.values()]

    def _count_routes(self, microbatches: list[Batch]) -> None:
        """Counts the tokens per expert of a step of several microbatches, by forwards with the dropout of those that
        follow.
        """
        balance = self.forward.balance
        assert balance is not None, "asked only where the loss is balanced"
        balance.begin()
        if len(microbatches) == 1:  # its own forward counts them
            return
        self.model.train()
        before = {name: state.numpy() for name, state in self.state.local_rng_state().items()}
        for batch in microbatches:
            with self._memory_advice(batch):
                balance.recording = True
                self.parallel.call(partial(self.forward.route, batch))
            balance.count()
        self.parallel.reshard()
        balance.finish_counting()
        self.state.set_rng_state(before)

    # ---- without a step

    @torch.no_grad()
    def evaluate(self, microbatches: list[Batch], stop: Callable[[], bool] | None = None) -> StepResult:
        """The objective's loss and metrics without a step; each rank takes its share of the microbatches."""
        mine, statistics = self.objective.prepare(self._passes(True, stop), microbatches)
        _, _, *totals = self._summed(*self._counts(mine if self.groups.is_data_leader else []))
        step = _Step(mine, Totals(tuple(map(int, totals)), statistics))
        self.model.eval()
        done = []
        with optim.averaged(self.optimizer):
            for batch in mine:
                if stop and stop():
                    break
                with self._memory_advice(batch):
                    work = partial(self._loss, batch, step)
                    self.forward.pipeline.forward_only(self.parallel.call, work, self.forward.shape(batch))
                done.append(batch)
            self.parallel.reshard()
        counts = self._counts(done if self.groups.is_data_leader else [])
        losses, _, observed = step.split(to_host(step.to_read()))
        total, num_targets, num_tokens, *rest = self._summed(self._total(losses), *counts, *self._sums(observed))
        width = len(step.totals.counts)
        done_counts = tuple(map(int, rest[:width]))
        totals_done = replace(step.totals, counts=(max(1, done_counts[0]), *done_counts[1:]))
        return StepResult(
            total,
            int(num_targets),
            int(num_tokens),
            0.0,
            num_rows=done_counts[0] if self.objective.counts_rows else None,
            metrics=self._means(rest[width:], totals_done),
        )

    def next_token_loss(self, microbatches: list[Batch], stop: Callable[[], bool] | None = None) -> StepResult:
        own = self.objective
        self.objective = objectives.NextToken()
        try:
            return self.evaluate(microbatches, stop)
        finally:
            self.objective = own

    def trainable_state_of_all_ranks(self) -> dict[str, np.ndarray]:
        return self.groups.broadcast_arrays(self.trainable_state())

    def log_probs_before_training(
        self, microbatches: list[Batch], stop: Callable[[], bool] | None = None
    ) -> dict[int, float]:
        """{document: its log-probability under the base without adapters, or with the one that the run continues from};
        every rank computes its share.
        """
        passes = replace(self._passes(True, stop), adapters_on=self.plan.objective.reference_is_adapter)
        log_probs: list = []
        mine = passes.share(microbatches)
        for batch, log_probs_D in zip(mine, to_host(passes.log_probs_before_training(mine)), strict=False):
            log_probs += zip(batch.rows, log_probs_D.tolist(), strict=False)  # an empty batch is of no row
        return {row: value for part in self.groups.all_gather_object(log_probs) for row, value in part}

    @torch.no_grad()
    def generate(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        eos_ids: set[int],
        stop_row: Callable[[int, list[int]], bool] | None = None,
        on_token: Callable[[list[int]], None] | None = None,
        **sampling: Any,
    ) -> list[list[int]]:
        """New token ids per prompt, as the protocol says."""
        self.model.eval()
        answer = partial(
            generate.generate,
            self.model,
            prompts,
            max_new_tokens,
            eos_ids,
            self.forward.pad_id,
            stop_row,
            on_token,
            Sampling(**sampling),
            stage=self.forward.pipeline,
        )
        with self.forward.autocast(), optim.averaged(self.optimizer), self.full_weights() as in_full:
            if not in_full:
                new = self.parallel.call(partial(answer, turns=generate.Turns(self.groups)))
                self.parallel.reshard()
            else:
                new = []
                if prompts:
                    new = self._generate_alone(answer)
        memory_stats.trim_heap()
        return new

    def _generate_alone(self, answer: Callable[[], list[Answers]]) -> list[Answers]:
        if self.graphs is not None:
            self.graphs.drop()
        dense: AbstractContextManager = contextlib.nullcontext()
        if not self.parallel.shards_weights and base_offload.of_model(self.model) is None:
            dense = generate.dense_weights(self.model, free_bytes(self.device))
        with dense:
            return answer()

    @torch.no_grad()
    def sample(
        self,
        prompts: list[list[int]],
        seeds: list[list[tuple[int, ...]]],
        max_new_tokens: list[int],
        eos_ids: set[int],
        how: Sampling,
    ) -> list[list[Sampled]]:
        """Answers to each prompt, as the protocol says, by the forward that trains."""
        self.model.eval()
        memory_stats.trim_heap()  # of what training freed
        drawn = [uniforms(each, most) for each, most in zip(seeds, max_new_tokens, strict=True)]
        compute = DTYPES[self.plan.precision.compute]
        cast: AbstractContextManager = cast_once(self.model, compute)  # many small forwards
        if self.device.type == "cpu" and compute.itemsize == 2:
            cast = adapters_in_fp32(self.model)
        with self.forward.autocast(), cast, optim.averaged(self.optimizer), self.full_weights() as in_full:
            if in_full:
                found = []
                if prompts:
                    draw = partial(self._sampler(eos_ids), prompts, drawn, max_new_tokens, eos_ids, how)
                    found = self._generate_alone(draw)
            else:
                work = partial(self._sampled_together, prompts, drawn, max_new_tokens, eos_ids, how)
                found = self.parallel.call(work)
                self.parallel.reshard()
        memory_stats.trim_heap()
        return found

    def drawing_apart(self, seed: int) -> AbstractContextManager[None]:
        """The context of `callers_settings.drawing_apart`."""
        return drawing_apart(seed)

    def _sampler(self, eos_ids: set[int], rounds: Rounds | None = None) -> Callable[..., list[list[Sampled]]]:
        """`decode.sample`, or for models that are trained in padded rows transformers' generate."""
        if self.layout == "padding_free":
            return partial(decode.sample, self._policy(), prefill_tokens=self.forward.row_length)
        return partial(decode.sample_apart, partial(generate.drawn, self.model, self.pad_id, eos_ids, rounds))

    def _sampled_together(
        self,
        prompts: list[list[int]],
        drawn: list[np.ndarray],
        max_new_tokens: list[int],
        eos_ids: set[int],
        how: Sampling,
    ) -> list[list[Sampled]]:
        """The same where every forward gathers weights, so that all ranks run as many. Collective."""
        if self.layout == "padding_free":
            asked = prompts
            numbers = drawn
            lengths = max_new_tokens
            if not prompts:  # one of its own
                asked = [[0]]
                numbers = [uniforms([(0,)], 1)]
                lengths = [1]
            return self._sampler(eos_ids)(asked, numbers, lengths, eos_ids, how, going=self._any_goes_on)[
                : len(prompts)
            ]
        turns = generate.Turns(self.groups)
        most = int(self.groups.all_gather_scalars([max(max_new_tokens, default=0)]).max())
        sampler = self._sampler(eos_ids, Rounds(turns, most))
        found = sampler(prompts, drawn, max_new_tokens, eos_ids, how)
        turns.wait(generate.DONE, partial(generate.one_token, self.model, eos_ids, self.pad_id))
        return found

    def _policy(self) -> decode.Policy:
        logits = self.model.get_output_embeddings()
        if self.forward.head is not None:
            logits = self.forward.head.logits
        return decode.Policy(self.model, self.forward.hidden_of, logits, self.device)

    def _on_all_ranks(self, mine: bool) -> bool:
        """True if it holds on every rank. Collective."""
        return bool(self.groups.all_gather_scalars([int(mine)]).min())

    def _any_goes_on(self, mine: bool) -> bool:
        return bool(self.groups.all_gather_scalars([int(mine)]).max())

    def document_outputs(
        self, microbatches: list[Batch], stop: Callable[[], bool] | None = None
    ) -> dict[int, np.ndarray]:
        """{document: what the head gives of it}, see FineTuningEngine."""
        passes = self._passes(True, stop)
        mine = passes.share(microbatches)
        found: list = []
        with optim.averaged(self.optimizer):
            outputs = to_host(passes.map(_document_outputs, mine))
        for batch, outputs_DC in zip(mine, outputs, strict=False):
            found += zip(batch.rows, outputs_DC.tolist(), strict=False)  # an empty batch is of no row
        by_rank = self.groups.all_gather_object(found)
        return {row: np.array(values, np.float64) for part in by_rank for row, values in part}

    def target_log_probs(self, microbatches: list[Batch], before_training: bool) -> list[list[float]]:
        """Log-probabilities of each document's targets, as the protocol says."""
        passes = self._passes()
        filled = passes.filled(microbatches)
        found = passes.map(partial(_target_log_probs, before_training=before_training), filled)
        answers = []
        for batch, log_probs_T in zip(microbatches, to_host(found), strict=False):
            answers += [part.tolist() for part in log_probs_T.split(document_targets(batch).tolist())]
        return answers

    def top_log_probs(
        self, microbatches: list[Batch], count: int, tokens: np.ndarray | None
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """The likeliest tokens at each target, as the protocol says."""
        tokens_V = None
        if tokens is not None:
            tokens_V = to_device(tokens, self.device)
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        for batch in microbatches:
            (pair,) = self._passes().map(partial(_top_log_probs, count=count, tokens_V=tokens_V), [batch])
            counts = document_targets(batch).tolist()
            found += zip(*(each.cpu().split(counts) for each in pair), strict=True)
        return [(tokens_TK.numpy(), log_probs_TB.numpy()) for tokens_TK, log_probs_TB in found]

    @property
    def keeps_shards(self) -> bool:
        """True if the last generation gathered one layer at a time."""
        return not self.parallel.in_full

    def full_weights(self):
        return self.parallel.full_weights()

    def _offload(self):
        if self.plan.memory.offload_activations:
            return memory_stats.offloaded(self.model, pinned=pins_memory(self.device))
        return contextlib.nullcontext()

    def _memory_advice(self, batch: Batch):
        return memory_advice(
            on_microbatch(self.device.type, batch.size, self.plan, "use_gradient_checkpointing", "low_memory")
        )

    # ---- state: see torch_engine/state.py

    @property
    def reseeded(self) -> bool:
        return self.state.reseeded

    @property
    def shard_writer(self) -> EngineState | None:
        if self.state.writes_shards():
            return self.state
        return None

    def load_trainable(self, trainable: dict) -> None:
        self.state.load_trainable(trainable)
        optim.take_as_average(self.optimizer)

    def seed(self, seed: int) -> None:
        self.state.seed(seed)

    # ---- what is saved and used

    @property
    def pad_id(self) -> int:
        return self.forward.pad_id

    @property
    def layout(self) -> str:
        assert self.forward.layout is not None, "`verify` comes first"
        return self.forward.layout.name

    @property
    def shares_prompts(self) -> bool:
        assert self.forward.layout is not None, "`verify` comes first"
        return self.forward.layout.shares_prompts

    def context_limit(self) -> int | None:
        return generate.context_limit(self.model)

    def vocab_size(self) -> int:
        return rows_of(self.model)

    def describe_weights(self, base_name: str, base_digest: str) -> dict[str, dict]:
        """{file: JSON} beside the weights, so that others can load them."""
        record = heads.record_of(self.model)
        of_head = {}
        if record is not None:
            of_head = {FILE: record.to_json()}
        if self.plan.all_weights:
            written = copy.deepcopy(self.model.config)
            written.dtype = self.saved_dtype
            heads.describe(written, self.model)
            return {"config.json": with_older_names(written.to_dict()), **of_head}
        base = base_record(base_name, base_digest)  # a file of its own: PEFT warns of keys it lacks
        if isinstance(self.plan.trains, AddedLayers):
            tensors = sorted(self.parallel.placement.trainable)
            trained = {"base_model_name_or_path": base_name, "base_digest": base_digest, "tensors": tensors}
            trained |= {STARTED_IN: base[STARTED_IN]} if STARTED_IN in base else {}
            return {"trained_blocks.json": trained}
        assert isinstance(self.plan.trains, Adapter), self.plan.trains
        config = peft_config(self.model, self.plan.trains, base_name, self.plan.settings.revision)
        return {"adapter_config.json": config, "base_model.json": base, **of_head}

    def write_model(self, folder: Path) -> None:
        self.state.write_model(folder, self.saved_dtype)

    def profiler(self, written: list):
        if self.rank == 0:
            profile = self.plan.profile
        else:
            profile = replace(self.plan.profile, profile=False)
        return profiling.profiler(profile, self.device, written)

    # ---- memory

    def begin_memory(self, baseline: int) -> int:
        """Peak bytes of loading above `baseline`, the process after its imports; counts training from now on."""
        memory_stats.keep_heap(self.plan.memory.low_memory, sharded=self.plan.parallel.dp_shards > 1)
        return self.counter.begin(baseline)

    def memory(self) -> MemoryStats:
        return self.counter.stats(self.optimizer, self.state.copies.num_bytes)


def _document_outputs(forward: ModelForward, batch: Batch) -> torch.Tensor:
    return forward.document_outputs(batch)


def _target_log_probs(forward: ModelForward, batch: Batch, before_training: bool) -> torch.Tensor:
    """Log-probability of each target of a microbatch."""
    off: AbstractContextManager = contextlib.nullcontext()
    if before_training:
        off = adapters_off(forward.model)
    with off:
        return forward.target_log_probs(batch)[0]


def _top_log_probs(
    forward: ModelForward, batch: Batch, count: int, tokens_V: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return forward.top_log_probs(batch, count, tokens_V)


@dataclass(frozen=True)
class _Step:
    """A step of all ranks, and what it leaves on the device until its end. `balance`: the load-balancing loss.

    `losses`, `observed`: of the microbatches that went through; the host reads them where it waits for the device
    anyway, at the norm of the gradients.
    """

    microbatches: list[Batch]
    totals: Totals
    num_targets: int = 0
    num_tokens: int = 0
    balance: LoadBalancing | None = None
    losses: list[torch.Tensor] = field(default_factory=list)
    observed: list[torch.Tensor] = field(default_factory=list)

    def each(self) -> Iterator[tuple[Batch, bool]]:
        """(microbatch, whether it is the last)."""
        for i, batch in enumerate(self.microbatches):
            yield batch, i == len(self.microbatches) - 1

    def to_read(self) -> list[torch.Tensor]:
        """Tensors that the host reads with the norm."""
        return [*self.losses, *self._aux_losses(), *self.observed]

    def split(self, on_host: list) -> tuple[list, list, list]:
        """(losses, load-balancing losses, what was observed), from `to_read` on the host."""
        first = len(self.losses)
        second = first + len(self._aux_losses())
        return on_host[:first], on_host[first:second], on_host[second:]

    def _aux_losses(self) -> list[torch.Tensor]:
        return self.balance.losses if self.balance else []


class _StepContexts:
    """Contexts around the i-th forward and the i-th backward of a step."""

    def __init__(self, engine: TorchEngine, microbatches: list[Batch]):
        self.engine = engine
        self.microbatches = microbatches

    def forward(self, i: int):
        return self.engine._around_forward(self.microbatches[i])

    def backward(self, i: int):
        return self.engine._memory_advice(self.microbatches[i])
