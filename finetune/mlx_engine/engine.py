"""MLXEngine: one optimizer step with MLX, on Metal, on CUDA or on a CPU, for any model that mlx-lm has.

See finetune/engine.py for the protocol. Autograd is functional: a step builds one graph over all its microbatches, the
clipping and the update, and one mx.eval runs it. Rows are padded: see `verify`.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_unflatten

from finetune import objectives
from finetune.adapters.patterns import refuse_zero_rows
from finetune.arrays import Named, Per
from finetune.engine import IGNORE_INDEX, Batch, MemoryStats, ShowingImages, StepResult, document_targets, num_documents
from finetune.errors import NonFiniteError, PlanError, first_line, is_out_of_memory
from finetune.generation import Sampled, Sampling, answered_within, uniforms
from finetune.memory_advice import memory_advice, on_microbatch, on_sampling
from finetune.mlx_engine import generate, sampling, state
from finetune.mlx_engine.head import Head, log_probs_of_logits, log_sum_exp, smoothed_nll
from finetune.mlx_engine.layers import as_numpy, leaves, sum_of_squares
from finetune.mlx_engine.load_balancing import LoadBalancing, real_positions
from finetune.mlx_engine.lora import DropoutKeys
from finetune.mlx_engine.memory import MEMORY_REFUSED, Memory
from finetune.mlx_engine.model import DTYPES, MLXModel, left_in_files, parameter_count
from finetune.mlx_engine.names import adapted_experts
from finetune.mlx_engine.neftune import Noise
from finetune.mlx_engine.optim import Optimizer, groups_by_size
from finetune.mlx_engine.passes import Passes
from finetune.mlx_engine.ranks import Ranks
from finetune.mlx_engine.vocabulary import leave_padding
from finetune.mlx_options import MLXOptions
from finetune.model_files.mtp import is_mtp, lines_of
from finetune.objectives import LossOf, Totals
from finetune.optimizer_state import LossScaler
from finetune.parts.engine_limits import MLX_UPDATED_BYTES
from finetune.parts.parts import Parts
from finetune.parts.trains import Adapter
from finetune.preference import REFERENCE

Inputs = dict[str, mx.array]  # of a microbatch, see MLXEngine._inputs
WHY_PADDED = (
    "rows of similar length: packing gains 10 % on a CPU, and mlx-lm's models do not support document boundaries"
)


class MLXEngine:
    """A loaded model with its adapters, its optimizer and its random state.

    `params`: {name on disk: array} of what trains, fp32; `paths`: where each is in the model.
    """

    shard_writer = None
    keeps_shards = False
    base_reads = None
    shares_prompts = False
    layout: str  # from `verify` on
    key: mx.array

    def __init__(
        self,
        loaded: MLXModel,
        plan: Parts,
        keys: DropoutKeys | None,
        ranks: Ranks,
        pad_id: int,
        base_config: dict,
        options: MLXOptions | None = None,
    ):
        self.loaded = loaded
        self.model = loaded.model
        self.plan = plan
        self.keys: Any = keys  # a DropoutKeys where has_dropout
        self.ranks = ranks
        self.pad_id = pad_id
        self.base_config = base_config
        self.rank = self.data_rank = ranks.rank
        self.options = options or MLXOptions()
        self.dtype = DTYPES[plan.precision.compute]
        adapter = None
        if isinstance(plan.trains, Adapter):
            adapter = plan.trains
        self.noise: Noise | None = None
        if plan.objective.neftune_noise_alpha:
            self.noise = Noise(loaded, plan.objective.neftune_noise_alpha, plan.steps.seed, self.dtype)
        self.balance: LoadBalancing | None = None
        if plan.objective.load_balancing:
            self.balance = LoadBalancing(loaded, plan.objective.load_balancing)
        self.has_dropout = bool(adapter and adapter.dropout)
        self.on_gpu = mx.default_device().type != mx.DeviceType.cpu
        self.paths = state.trainable_paths(loaded, plan.trains)
        if any(loaded.is_of(loaded.embedding, path) and "embed_tokens" in path for path in self.paths.values()):
            leave_padding(loaded.embedding, base_config)
        layer = loaded.embedding if loaded.head is None else loaded.head
        self.trained_of_head = {p.rpartition(".")[2] for p in self.paths.values() if loaded.is_of(layer, p)}
        arrays = dict(leaves(loaded.model.parameters()))
        self.params = {name: arrays[path].astype(mx.float32) for name, path in self.paths.items()}
        self._put(self.params)
        self.optimizer = Optimizer(plan.steps, adapter.lr_ratio if adapter else 1.0)
        self.scaler = LossScaler(plan.precision.scales_loss)
        self.counter = Memory(self)
        self.objective = objectives.build(plan.objective.name, plan.objective.arguments, mlx=True)
        self.head: Head | None = None
        self.reseeded = False
        self.foreign_rng: dict[str, np.ndarray] = {}
        self.seed(plan.steps.seed)
        self._gradients = self._build_gradients()

    # ---- before the first step

    def verify(self, batch_layout: str, showing: ShowingImages | None = None) -> dict:
        """Padded rows, and the chunked head where it gives the model's own logits. Raises PlanError.

        Rows of a microbatch have similar lengths, and causal attention needs no mask for padding on the right. Packed
        rows would need a dense mask over the full row, passed through each of mlx-lm's model files, and are 1.1
        times as fast on a CPU (docs/mlx.md).
        """
        if batch_layout == "padding_free":
            raise PlanError(
                "--batch_layout padding_free: mlx-lm's models do not support document boundaries. Use auto or padded."
            )
        self.layout = "padded"
        adapted = {name: m for name, m in self.model.named_modules() if "lora_magnitude_vector" in m}
        refuse_zero_rows([[name for name, m in adapted.items() if (m.lora_magnitude_vector == 0).any()]])
        self._check_runs()
        self.head = self._checked_head()
        return {"batch_layout": ("padded", "requested" if batch_layout == "padded" else WHY_PADDED)}

    def _check_runs(self) -> None:
        """Raises PlanError if the model does not run or gives logits that are not finite."""
        ids = mx.arange(3, 16)[None] % self.vocab_size()
        try:
            logits = self.model(ids).astype(mx.float32)
            finite = bool(mx.isfinite(logits).all())
        except (ValueError, TypeError, RuntimeError, AttributeError, IndexError) as error:
            if is_out_of_memory(error):
                raise
            raise PlanError(
                f"--model_name: mlx-lm's {self.model.model_type} does not run ({first_line(error)}). Use --backend cpu."
            ) from error
        if not finite:
            raise PlanError(
                f"--model_name: mlx-lm's {self.model.model_type} gives logits that are not finite before any training. "
                "Try --precision fp32, or give another model."
            )

    def _checked_head(self) -> Head | None:
        """The chunked head if it gives the model's logits; None if the model must compute them itself."""
        if self.loaded.base is None:
            return None
        if self.loaded.head is None:
            layer = self.loaded.embedding
        else:
            layer = self.loaded.head
        if "bias" in self.trained_of_head:  # the chunked head has no gradient for it
            return None
        head = Head.of(layer, self.loaded.config)
        ids = mx.arange(3, 12)[None] % self.vocab_size()
        theirs = self.model(ids)[0].astype(mx.float32)
        try:
            own = head.logits(self.loaded.base(ids)[0])
        except TypeError:  # its blocks do not run without a cache (StableLM)
            return None
        off: Any = (mx.abs(own - theirs).max() / mx.maximum(mx.abs(theirs).max(), 1e-9)).item()
        return head if off <= (1e-4 if self.dtype == mx.float32 else 2e-2) else None

    def parameter_counts(self) -> tuple[int, int]:
        return sum(p.size for p in self.params.values()), parameter_count(self.model)

    def notices(self) -> list[str]:
        from finetune.mlx_engine import BLAS

        if self.on_gpu or BLAS is None:
            found = []
        else:
            found = [BLAS]
        if self.loaded.has_experts and not self.plan.all_weights and not adapted_experts(self.loaded):
            found.append("experts stay frozen and unquantized: no target names them")
        if self.plan.all_weights:
            num_layers = (self.base_config.get("text_config") or self.base_config).get("num_hidden_layers")
            left = sorted(left_in_files(self.loaded))
            of_mtp = [name for name in left if is_mtp(name, num_layers)]
            found += lines_of(of_mtp, [name for name in left if name not in of_mtp])
        return found

    def compile_if_it_pays(self, batch: Batch, steps: int) -> tuple[str, str]:
        return "false", "--mlx_config says whether mx.compile is used"

    def prove_fp8(self, batch: Batch, before: str | None) -> tuple[str, str]:
        return "exact", "fp8 products are torch's"

    def capture_if_it_pays(self, batch: Batch, asked: bool, microbatches: int) -> tuple[str, str]:
        return "false", "CUDA graphs are torch's"

    @contextlib.contextmanager
    def undone(self):
        """Restores weights, moments, loss scale and random state on exit."""
        params = self.params
        key = self.key
        scale = self.scaler.values()
        try:
            yield
        finally:
            self.params = params
            self.key = key
            self._put(params)
            self.optimizer.load({}, {})
            self.scaler.load(scale)

    def try_step(self, batch: Batch, several: bool) -> None:
        """Forward and backward of one batch, without an update; random state is as before."""
        key = self.key
        with self._memory_advice(batch):
            kept = None
            if several:
                kept = {n: mx.zeros_like(p) for n, p in self.params.items()}
            if self.objective.loss_of is LossOf.DOCUMENTS and REFERENCE not in batch.arrays:
                unknown = np.zeros(num_documents(batch), np.float32)
                batch = batch.with_array(REFERENCE, Named(unknown, Per.DOCUMENT, is_data=False))
            totals = Totals(self.objective.count(batch), {"kl": 0.0})
            nll, _, grads = self._microbatch(batch, totals, 1.0, kept)
            mx.eval(nll, grads)
        self.key = key

    # ---- the step

    def train_step(self, microbatches: list[Batch], lr: float) -> StepResult:
        """One optimizer step over the microbatches' targets together.
        NonFiniteError leaves weights and moments unchanged.
        """
        microbatches, statistics = self.objective.prepare(Passes(self), microbatches)
        num_targets, num_tokens, *counted = (int(n) for n in self.ranks.sum_numbers(*self._counts(microbatches)))
        totals = Totals(tuple(counted), statistics)
        assert totals.count > 0, "a step without a target: data.tokenize drops such rows"
        scale = self.scaler.factor / totals.count
        nll = mx.zeros(())
        grads = None
        observed = []
        routes = self._counted_routes(microbatches, totals)
        with self._memory_advice(microbatches[0] if microbatches else None):
            for batch in microbatches:
                of_batch, seen, grads = self._microbatch(batch, totals, scale, grads, routes)
                nll = nll + of_batch
                observed.append(seen)
            if grads is None:
                grads = {n: mx.zeros_like(p) for n, p in self.params.items()}
            nll, grads = self.ranks.sum_in_order(nll, grads)
            grads = {n: g / self.scaler.factor for n, g in grads.items()}
            squares: Any = sum(sum_of_squares(g) for g in grads.values())
            norm = mx.sqrt(squares)
            with self.ranks.waiting():
                mx.eval(nll, norm, grads, self.key, observed)
        summed: Any = nll.item()
        size: Any = norm.item()
        result = StepResult(summed, num_targets, num_tokens, size, **self._of_rows(observed, totals))
        if not np.isfinite(result.grad_norm) or not np.isfinite(result.nll):
            if np.isfinite(result.nll) and self.scaler.lower():
                return replace(result, skipped=True)
            if np.isfinite(result.nll):
                what = f"gradient is {result.grad_norm}"
            else:
                what = f"loss is {result.nll}"
            raise NonFiniteError(what)
        with self._memory_advice(microbatches[0] if microbatches else None):
            self._update(grads, norm, mx.array(lr))
        self.scaler.step()
        return result

    def _update(self, grads: dict, norm: mx.array, lr: mx.array) -> None:
        """Replaces weights and moments by those after a step, a few at a time: all of both would stand beside the old
        ones. `grads` is emptied.
        """
        clip = self.plan.steps.clip
        factor = None
        if clip is not None:
            factor = mx.minimum(clip / (norm + 1e-6), 1.0)
        for names in list(groups_by_size(grads, MLX_UPDATED_BYTES)):
            mine = {n: grads.pop(n) for n in names}
            if factor is not None:
                mine = {n: g * factor for n, g in mine.items()}
            params, moments = self.optimizer.step({n: self.params[n] for n in names}, mine, lr)
            del mine
            mx.eval(params, moments)
            self.params = self.params | params
            self.optimizer.applied(params, moments)
            self._put(params)

    def _counted_routes(self, microbatches: list[Batch], totals: Totals) -> mx.array | None:
        """Tokens per expert of a step of several microbatches or ranks, by forwards with the dropout of those that
        follow; None where there is nothing to count.
        """
        if self.balance is None or (self.ranks.size == 1 and len(microbatches) == 1):
            return None
        key = self.key
        counts = np.zeros(self.balance.num_experts + 1)
        for batch in microbatches:
            inputs = self._inputs(batch, totals)
            if self.noise:
                inputs |= self.noise.of(batch, inputs["ids"].shape, self.loaded.hidden_size)
            self.balance.begin()
            with self._memory_advice(batch):
                self._at_targets(self.params, inputs, self._next_key())
                probs = self.balance.probs(inputs["ids"].size)
                counts += np.array(self.balance.counts(probs, real_positions(batch, inputs["ids"].shape[1])))
        self.key = key
        self._put(self.params)
        return mx.array(self.ranks.sum_numbers(*counts.tolist()))

    @property
    def _by_document(self) -> bool:
        """True if the loss is of log-probabilities, and needs to know whose they are."""
        return self.objective.loss_of is not LossOf.NLL

    def _counts(self, microbatches: list[Batch]) -> list[int]:
        """Targets, tokens, and what the objective counts."""
        counts = [(b.num_targets, b.num_tokens, *self.objective.count(b)) for b in microbatches]
        nothing = (0,) * (2 + self.objective.num_counts)
        return [sum(column) for column in zip(*counts or [nothing], strict=True)]

    def _of_rows(self, observed: list, totals: Totals) -> dict:
        """StepResult's `num_rows` and `metrics`, of what the objective observed of this rank's microbatches."""
        if self.balance:
            return {"aux_loss": self.ranks.sum_numbers(sum(np.array(seen).item() for seen in observed))[0]}
        if not self.objective.sums:
            return {}
        sums = dict.fromkeys(self.objective.sums, 0.0)
        for seen in observed:
            for name, number in self.objective.sums_of(np.array(seen, np.float64)).items():
                sums[name] += number
        summed = self.ranks.sum_numbers(*sums.values())
        num_rows = totals.count if self.objective.counts_rows else None
        return {"num_rows": num_rows, "metrics": self.objective.means(dict(zip(sums, summed, strict=True)), totals)}

    def _microbatch(
        self, batch: Batch, totals: Totals, scale: float, kept: dict | None, routes: mx.array | None = None
    ):
        """(summed loss, what the objective observed, gradients of loss * scale plus those `kept`), to be evaluated.
        What is observed of next tokens is the load-balancing loss. `routes`: the step's counts, for that.
        """
        inputs = self._inputs(batch, totals)
        if self.noise:
            inputs |= self.noise.of(batch, inputs["ids"].shape, self.loaded.hidden_size)
        if self.balance:
            inputs["real"] = real_positions(batch, inputs["ids"].shape[1])
            inputs["balancing"] = mx.array(self.balance.coefficient * self.scaler.factor)
            if routes is not None:
                inputs["routes"] = routes
        if kept:  # one microbatch after another: the activations of two never exist together
            (inputs["ids"],) = mx.depends([inputs["ids"]], list(kept.values()))
        loss, seen, grads = self._gradients(self.params, inputs, mx.array(scale), self._next_key())
        return loss, seen, grads if kept is None else {n: g + kept[n] for n, g in grads.items()}

    def _build_gradients(self):
        """(loss, observed, gradients) of one microbatch as a function of arrays only, compiled where that pays."""

        def loss(params: dict, inputs: Inputs, scale: mx.array, key: mx.array | None):
            summed, seen = self._loss(params, inputs, key)
            minimized = summed * scale
            if self.balance:
                minimized = minimized + seen * inputs["balancing"]
            return minimized, summed, seen

        def gradients(*arrays: Any):
            try:
                (_, summed, seen), grads = mx.value_and_grad(loss)(*arrays)
            finally:
                self._put(self.params)
            return summed, seen, grads

        if self._compiles():
            return mx.compile(gradients)
        return gradients

    def _compiles(self) -> bool:
        """True if the step is compiled. auto compiles on GPUs only: CPU matmuls are BLAS calls, which compiling cannot
        speed up, and the C++ compiler costs seconds per shape.
        """
        if self.options.compile == "auto":
            return self.on_gpu
        return self.options.compile == "true"

    def _loss(
        self, params: dict, inputs: Inputs, key: mx.array | None, learning: bool = True
    ) -> tuple[mx.array, mx.array]:
        """(summed loss of the objective, what it observed). `key` None: without dropout; `learning`: with smoothed
        labels.
        """
        if self.objective.loss_of is LossOf.DOCUMENTS:
            return self.objective.loss_of_documents(self._log_probs(params, inputs, key), inputs)
        if self.objective.loss_of is LossOf.TARGETS:
            if learning:
                return self.objective.loss_of_targets(self._values_of_targets(params, inputs, key), inputs)
            nll = self._nll(params, inputs, key, learning, 0.0)  # without a teacher
            return nll, mx.stack([mx.zeros(()), nll])
        smoothing = 0.0
        if learning:
            smoothing = self.plan.objective.label_smoothing
        if self.balance is None or not learning:
            nothing = mx.zeros(1).reshape(())  # compiling makes one of a plain zero and those inside, and loses it
            return self._nll(params, inputs, key, learning, smoothing), nothing
        self.balance.begin()
        nll = self._nll(params, inputs, key, learning, smoothing)
        probs = self.balance.probs(inputs["ids"].size)
        counts = inputs.get("routes")
        if counts is None:  # its own forward counts them
            counts = self.balance.counts(probs, inputs["real"])
        return nll, self.balance.loss(probs, inputs["real"], counts)

    def _log_probs(self, params: dict, inputs: Inputs, key: mx.array | None) -> mx.array:
        """Summed log-probabilities of each document's targets [D]; see _loss."""
        log_probs_T = self._log_probs_of_targets(params, inputs, key)
        return mx.zeros(len(inputs["ids"])).at[inputs["documents"]].add(log_probs_T)

    def _values_of_targets(self, params: dict, inputs: Inputs, key: mx.array | None) -> mx.array:
        """Values of each target for the objective's loss, 0 where one only fills the shape: log p, or those of its
        `of_chunk`.
        """
        if not self.objective.of_logits:
            return self._log_probs_of_targets(params, inputs, key)
        at_T = self._at_targets(params, inputs, key)
        arrays = [inputs["labels"][:, None], *(inputs[name] for name in self.objective.of_logits)]
        if self.head is None:
            found = self.objective.of_chunk(at_T, *arrays)
        else:
            trains = "weight" in self.trained_of_head
            found = self.head.of_logits(self.objective.of_chunk, at_T, arrays, trains=trains)
        return found * inputs["weights"][:, None] if "weights" in inputs else found

    def _log_probs_of_targets(self, params: dict, inputs: Inputs, key: mx.array | None) -> mx.array:
        """log p of each target [T], 0 where one only fills the shape; see _loss."""
        at_T = self._at_targets(params, inputs, key)
        temperature = self.plan.objective.temperature
        if self.head is None:
            log_probs_T = log_probs_of_logits(at_T, inputs["labels"][:, None], temperature)
        else:
            trains = "weight" in self.trained_of_head
            log_probs_T = self.head.log_probs(at_T, inputs["labels"], trains=trains, temperature=temperature)
        return log_probs_T * inputs["weights"] if "weights" in inputs else log_probs_T

    def _nll(self, params: dict, inputs: Inputs, key: mx.array | None, learning: bool, smoothing: float) -> mx.array:
        """Summed nll of the targets; see _loss."""
        at_T = self._at_targets(params, inputs, key)
        weights = inputs.get("weights")
        if self.head is not None:
            trains = "weight" in self.trained_of_head
            return self.head.nll(at_T, inputs["labels"], weights, trains, learning, smoothing)
        nll = smoothed_nll(at_T, log_sum_exp(at_T), inputs["labels"][:, None], smoothing)
        return (nll if weights is None else nll * weights).sum()

    def _at_targets(self, params: dict, inputs: Inputs, key: mx.array | None) -> mx.array:
        """Hidden states of the target positions, or without a head of ours the model's logits in fp32."""
        self._put(params)
        if self.has_dropout:
            self.keys.begin(key)
        if self.noise:
            self.noise.added = inputs.get("noise")
        if self.head is None:
            out = self.model(inputs["ids"])
        else:
            out = self.loaded.base(inputs["ids"])
        if self.noise:
            self.noise.added = self.noise.given = None
        at_T = out.reshape(-1, out.shape[-1])[inputs["at"]]
        return at_T.astype(mx.float32) if self.head is None else at_T

    def document_log_probs(self, batch: Batch, off: bool) -> np.ndarray:
        """[D], fp32, without dropout; `off`: of the base without adapters."""
        with self._memory_advice(batch), self._adapters(off):
            found = self._log_probs(self.params, self._inputs(batch), None)
            mx.eval(found)
        self._put(self.params)
        return np.array(found)

    def target_log_probs(self, microbatches: list[Batch], before_training: bool) -> list[list[float]]:
        """Log-probabilities of each document's targets, as the protocol says."""
        answers: list[list[float]] = []
        for batch in microbatches:
            with self._memory_advice(batch), self._adapters(before_training):
                found = self._log_probs_of_targets(self.params, self._inputs(batch), None)
                mx.eval(found)
            ends = np.cumsum(document_targets(batch))
            answers += [part.tolist() for part in np.split(np.array(found)[: ends[-1]], ends[:-1])]
        self._put(self.params)
        return answers

    @contextlib.contextmanager
    def _adapters(self, off: bool):
        """The context of a forward in which adapters are off, if asked for."""
        if self.keys is None:
            yield
            return
        self.keys.off = off
        try:
            yield
        finally:
            self.keys.off = False

    def _inputs(self, batch: Batch, totals: Totals | None = None) -> Inputs:
        """ids [B, S], flat target positions `at`, their labels, `weights`, which are 0 at positions that only fill the
        shape and missing if there are none; of a loss of documents, those of the targets, and of a step's `totals` what
        the objective takes beside.
        """
        ids = batch.input_ids_BS
        labels = batch.labels_BS
        multiple = self.options.length_multiple
        extra = -ids.shape[1] % multiple
        if extra:
            ids = np.pad(ids, ((0, 0), (0, extra)), constant_values=self.pad_id)
            labels = np.pad(labels, ((0, 0), (0, extra)), constant_values=IGNORE_INDEX)
        at = np.flatnonzero(labels != IGNORE_INDEX)
        if multiple > 1:
            fill = -len(at) % multiple
        else:
            fill = int(len(at) == 0)
        filled = np.concatenate([np.ones(len(at), np.float32), np.zeros(fill, np.float32)])
        at = np.concatenate([at, np.zeros(fill, at.dtype)])
        wanted = np.maximum(labels.reshape(-1)[at], 0)
        found = {"ids": ids.astype(np.int32), "at": at, "labels": wanted.astype(np.int32)}
        if fill or self._compiles():
            found["weights"] = filled
        if self._by_document:  # one row each
            found["documents"] = at // ids.shape[1]
        if self._by_document and totals:
            found |= self.objective.beside(batch, totals)
        if self.objective.loss_of is LossOf.TARGETS and totals:
            found |= self._arrays_of_targets(batch, at // ids.shape[1], at % ids.shape[1], filled)
        return {name: mx.array(value) for name, value in found.items()}

    def _arrays_of_targets(
        self, batch: Batch, rows_T: np.ndarray, columns_T: np.ndarray, filled_T: np.ndarray
    ) -> dict[str, np.ndarray]:
        """The arrays of the batch that the objective takes at each target, 0 where one only fills the shape."""
        found = {}
        for name in self.objective.of_targets:
            if name in batch.arrays:
                array = batch.arrays[name]
                at_T = np.asarray(array.values)[rows_T if array.per is Per.DOCUMENT else (rows_T, columns_T)]
                at_T = at_T * filled_T.reshape(-1, *[1] * (at_T.ndim - 1)).astype(at_T.dtype)
                found[name] = at_T if at_T.dtype == np.int32 else at_T.astype(np.float32)
        return found

    def evaluate(self, microbatches: list[Batch], stop: Callable[[], bool] | None = None) -> StepResult:
        """The objective's loss and metrics without a step, over all ranks, each of which takes its share."""
        mine, statistics = self.objective.prepare(Passes(self, everywhere=True, stop=stop), microbatches)
        counted = tuple(int(n) for n in self.ranks.sum_numbers(*self._counts(mine))[2:])
        totals = Totals(counted, statistics)
        total = 0.0
        done = []
        observed = []
        for batch in mine:
            if stop and stop():
                break
            with self._memory_advice(batch):
                loss, seen = self._loss(self.params, self._inputs(batch, totals), None, learning=False)
                summed: Any = loss.item()
                total += summed
            self._put(self.params)
            done.append(batch)
            observed.append(seen)
        nll, targets, tokens, *counted_now = self.ranks.sum_numbers(total, *self._counts(done))
        now = replace(totals, counts=(max(1, int(counted_now[0])), *map(int, counted_now[1:])))
        seen_of = {} if self.balance else self._of_rows(observed, now)
        return StepResult(nll, int(targets), int(tokens), 0.0, **seen_of)

    def next_token_loss(self, microbatches: list[Batch], stop: Callable[[], bool] | None = None) -> StepResult:
        own = self.objective
        self.objective = objectives.NextToken()
        try:
            return self.evaluate(microbatches, stop)
        finally:
            self.objective = own

    def log_probs_before_training(
        self, microbatches: list[Batch], stop: Callable[[], bool] | None = None
    ) -> dict[int, float]:
        """{document: its log-probability under the reference}; every rank computes its share."""
        passes = Passes(self, everywhere=True, stop=stop)
        mine = passes.share(microbatches)
        log_probs: list = []
        for batch, log_probs_D in zip(mine, passes.log_probs_before_training(mine), strict=False):
            log_probs += zip(batch.rows, log_probs_D.tolist(), strict=True)
        return {row: value for part in self.ranks.gather_object(log_probs) for row, value in part}

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
        if self.has_dropout:
            self.keys.begin(None)
        how = Sampling(**sampling)
        if not prompts:
            return []

        def answer(
            prompts: list[list[int]],
            max_new_tokens: int,
            stop_row: Callable[[int, list[int]], bool] | None,
            on_token: Callable[[list[int]], None] | None,
        ):
            return generate.generate(
                self.model, prompts, max_new_tokens, eos_ids, self.pad_id, stop_row, on_token, how, self._next_key
            )

        together = len(prompts) == 1 or self._answers_together
        return answered_within(self.context_limit(), prompts, max_new_tokens, stop_row, on_token, answer, together)

    def sample(
        self,
        prompts: list[list[int]],
        seeds: list[list[tuple[int, ...]]],
        max_new_tokens: list[int],
        eos_ids: set[int],
        how: Sampling,
    ) -> list[list[Sampled]]:
        """Answers to each prompt, as the protocol says."""
        if not prompts:
            return []
        if self.has_dropout:
            self.keys.begin(None)
        with memory_advice(on_sampling("MLX", sum(map(len, seeds)), self.plan), MEMORY_REFUSED):
            policy = sampling.Policy(self.model, self.pad_id, self.context_limit(), self._answers_together)
            asked = [
                sampling.Asked(prompt, uniforms(of_prompt, most), most)
                for prompt, of_prompt, most in zip(prompts, seeds, max_new_tokens, strict=True)
            ]
            return sampling.sample(policy, asked, eos_ids, how)

    def drawing_apart(self, seed: int) -> contextlib.AbstractContextManager[None]:
        """The context of `sampling.drawing_apart`."""
        return sampling.drawing_apart(seed)

    @cached_property
    def _answers_together(self) -> bool:
        return generate.answers_together(self.model, self.pad_id, self.vocab_size(), self.context_limit())

    def full_weights(self):
        return contextlib.nullcontext()

    def _put(self, params: dict) -> None:
        """Puts weights into the model: adapters in fp32, the base's own in the dtype of its products."""
        computed = [(self.paths[n], p if ".lora_" in n else p.astype(self.dtype)) for n, p in params.items()]
        self.model.update(tree_unflatten(computed))

    def _memory_advice(self, batch: Batch | None):
        size = "0"
        if batch:
            size = batch.size
        message = on_microbatch("MLX", size, self.plan, "use_gradient_checkpointing")
        return memory_advice(message, MEMORY_REFUSED)

    # ---- randomness and collectives

    def seed(self, seed: int) -> None:
        self.key = mx.random.key(seed + 1_000_003 * self.rank)

    def _next_key(self) -> mx.array:
        self.key, key = mx.random.split(self.key)
        return key

    def all_reduce_max(self, number: int) -> int:
        return max(self.ranks.gather_object(int(number)))

    def all_gather_object(self, value: Any) -> list:
        return self.ranks.gather_object(value)

    def broadcast_object(self, value: Any):
        return self.ranks.gather_object(value)[0]

    def shard_list(self, items: list) -> list:
        return items[self.data_rank :: self.ranks.size]

    def call_before_exit(self, call: Callable[[int], object]) -> None:
        self.ranks.before_exit = call

    # ---- state: see mlx_engine/state.py

    def prepare_snapshot(self) -> None:
        pass

    def snapshot(self):
        return contextlib.nullcontext()  # as_numpy copies

    def trainable_state(self) -> dict[str, np.ndarray]:
        if self.rank:
            return {}
        return self.trainable_state_of_all_ranks()

    def trainable_state_of_all_ranks(self) -> dict[str, np.ndarray]:
        """Every rank has all of them."""
        found = {name: as_numpy(p) for name, p in self.params.items()}
        return found | {name: found[same] for name, same in state.tied_names(self).items()}

    def optimizer_state(self) -> tuple[dict[str, np.ndarray], dict]:
        if self.rank:
            moments = {}
        else:
            moments = {key: np.array(m) for key, m in self.optimizer.moments.items()}
        return moments, self.optimizer_values()

    def optimizer_values(self) -> dict:
        return state.values(self)

    def rng_state(self) -> dict[str, np.ndarray]:
        return state.rng(self)

    def load_state(self, trainable: Mapping, optimizer: Mapping, values: dict, rng: Mapping) -> None:
        state.load(self, trainable, optimizer, values, rng)

    def load_trainable(self, trainable: dict) -> None:
        state.load_trainable(self, trainable)

    def describe_weights(self, base_name: str, base_digest: str) -> dict[str, dict]:
        return state.describe(self, base_name, base_digest)

    def write_model(self, folder: Path) -> None:
        state.write_model(self, Path(folder))

    # ---- facts, memory and profiling

    def vocab_size(self) -> int:
        return self.loaded.embedding.weight.shape[0]

    def context_limit(self) -> int | None:
        config = self.base_config.get("text_config") or self.base_config
        return config.get("max_position_embeddings")

    def begin_memory(self, baseline: int) -> int:
        return self.counter.begin(self.options)

    def memory(self) -> MemoryStats:
        return self.counter.stats()

    def reset_memory(self) -> int:
        return self.counter.peak()

    def profiler(self, written: list):
        return contextlib.nullcontext(lambda: None)
