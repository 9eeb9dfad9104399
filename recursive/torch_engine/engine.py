"""RecursiveEngine: one optimizer step of the recursive model, with carried y and z, halting and EMA.

See finetune/engine.py for the protocol. Ranks are replicas; gradients are summed over them once per step.
"""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finetune.checkpoint.store import replace_tensors, replace_text
from finetune.engine import IGNORE_INDEX, MemoryStats, StepResult
from finetune.errors import NonFiniteError, PlanError
from finetune.generation import Sampling
from finetune.memory_advice import memory_advice
from finetune.torch_engine import memory_stats, optim
from finetune.torch_engine.device import fp64_device
from finetune.torch_engine.engine_base import EngineBase
from finetune.torch_engine.parallel.parallelism import all_reduce_gradients
from finetune.torch_engine.parallel.process_groups import ProcessGroups
from recursive.config import PretrainConfig
from recursive.data.arrays import Rows
from recursive.data.carry import Carry, SlotBatch
from recursive.torch_engine import generate
from recursive.torch_engine.model import RecursiveModel, halting_loss, token_losses
from recursive.torch_engine.optim import Average, SignSGD, build_optimizer
from recursive.torch_engine.state import RecursiveState
from recursive.torch_engine.weights import CONFIG, MODEL, model_config

TARGETS = 64  # logits are computed for a multiple of it


class RecursiveEngine(EngineBase):
    """A RecursiveModel, its optimizers, its moving average, and the state of every slot of `carry`."""

    layout = "padded"
    shard_writer = None
    keeps_shards = False

    def __init__(
        self, model: RecursiveModel, settings: PretrainConfig, groups: ProcessGroups, pad_id: int, carry: Carry
    ):
        self.model = model
        self.settings = settings
        self.groups = groups
        self.pad_id = pad_id
        self.carry = carry
        self.device = groups.device
        self.arch = settings.arch
        self.reseeded = False
        # The network first: what is frozen or sparse is not AdamW's.
        self.weights = dict(model.named_parameters())
        if settings.freeze_weights:
            for name, parameter in self.weights.items():
                parameter.requires_grad_(name.startswith("puzzle_emb"))
        self.trained = {n: p for n, p in self.weights.items() if p.requires_grad}
        dense = {n: p for n, p in self.trained.items() if not n.startswith("puzzle_emb")}
        if dense:
            self.optimizer = build_optimizer(dense, settings, self.device)
        else:
            self.optimizer = None
        sparse = [p for n, p in self.trained.items() if n.startswith("puzzle_emb")]
        self.puzzle_optimizer = SignSGD(sparse, settings.puzzle_emb_lr, settings.puzzle_emb_weight_decay)
        self.average: Average | None = None
        if settings.ema:
            self.average = Average(self.trained, settings.ema_rate)
        self.counter = memory_stats.MemoryCounter(model, self.trained, self.device)
        self.states: list[torch.Tensor] | None = None
        if settings.arch.supervision_steps > 1:
            shape = -(-len(carry.rows) // groups.dims.data_ranks), model.seq_len + self.arch.prefix_len, -1
            self.states = [t.to(model.dtype).expand(shape).clone() for t in (model.y0_D, model.z0_D)]
        self.state = RecursiveState(model, groups, carry, self.states, dense, self.optimizer, self.average)
        self.seed(settings.seed)

    # ---- before the first step

    def verify(self, batch_layout: str) -> dict:
        """Changing what follows a token must not change its logits, bit for bit, if the model is causal."""
        if self.arch.causal:
            check_causal(self.model)
        return {"batch_layout": (self.layout, "rows of a step have slots of their own")}

    def parameter_counts(self) -> tuple[int, int]:
        return sum(p.numel() for p in self.trained.values()), sum(p.numel() for p in self.weights.values())

    def notices(self) -> list[str]:
        total = self.parameter_counts()[1]
        outer = sum(p.numel() for n, p in self.weights.items() if n.startswith(("embed", "head", "puzzle_emb")))
        return [
            f"{total:,} parameters: {total - outer:,} in the network, {outer:,} in embedding and head "
            f"({outer / total:.0%}) of a vocabulary of {self.model.vocab_size:,}"
        ]

    # ---- the step

    def train_step(self, microbatches: list[SlotBatch], lr: float) -> StepResult:
        """One optimizer step on the rows in their slots; the slots move on by one supervision step.
        NonFiniteError leaves weights and moments unchanged.
        """
        self.model.train()
        counts = [sum(b.num_targets for b in microbatches), sum(b.num_tokens for b in microbatches)]
        counts.append(sum(len(b.rows) for b in microbatches))
        num_targets, num_tokens, num_rows = (int(n) for n in self.groups.sum_scalars(counts))
        total = torch.zeros((), dtype=torch.float64, device=fp64_device(self.device))
        halted = np.zeros(len(self.carry.rows))
        states = []
        for batch in microbatches:
            with self._memory_advice(batch):
                with self.counter.kept_by(batch):
                    y, z = self._forward(batch)
                    nll, right, _ = self._nll(y, batch, wants_right=self.arch.halting)
                    loss = nll / num_targets
                    if self.arch.halting:
                        q_B = self.model.halt_logit(y)
                        loss = loss + halting_loss(q_B, right) / num_rows
                        halted[self._global_slots(batch)] = self._halts(q_B, batch)
                loss.backward()
            total += nll.detach().to(total.device).double()
            if self.states is not None:
                states.append((batch, y.detach(), z.detach()))
        all_reduce_gradients(list(self.trained.values()), self.groups, "data")
        self.counter.count_gradients()
        nll = float(self.groups.all_gather_scalars([total.item()]).sum())
        norm = self._clip()
        if not np.isfinite(norm) or not np.isfinite(nll):
            self._drop_gradients()
            raise NonFiniteError(f"gradient is {norm}" if np.isfinite(nll) else f"loss is {nll}")
        self._update(lr)
        for batch, y, z in states:
            self._keep(batch, y, z)
        if self.arch.halting:
            halted = self.groups.sum_scalars(list(halted))
        self.carry.advance(halted > 0)
        return StepResult(nll, num_targets, num_tokens, norm)

    def _forward(self, batch: SlotBatch):
        """(y, z) after one deep recursion, from the slots' states."""
        ids = torch.from_numpy(batch.input_ids_BS).to(self.device)
        y, z = self.model.start(*ids.shape)
        if self.states is not None and not batch.fresh_B.all():
            at = torch.from_numpy(batch.slots).to(self.device)
            length = y.shape[1]
            fresh = torch.from_numpy(batch.fresh_B).to(self.device)[:, None, None]
            y, z = (torch.where(fresh, t, kept[at, :length]) for t, kept in zip((y, z), self.states, strict=True))
        return self.model(ids, y, z, self._puzzle_ids(batch))

    def _puzzle_ids(self, batch: SlotBatch):
        if self.arch.puzzle_emb_ndim:
            return torch.from_numpy(batch.puzzle_ids_B).to(self.device)
        return None

    def _nll(self, y: torch.Tensor, batch: SlotBatch, wants_right: bool):
        """(summed nll of the targets, rows answered right or None, logits of the targets)."""
        labels_BS = torch.from_numpy(batch.labels_BS).to(self.device)
        is_target = labels_BS != IGNORE_INDEX
        at = is_target.flatten().nonzero()[:, 0]
        num = len(at)
        at = torch.cat([at, at.new_zeros(-num % TARGETS)])  # few shapes, see data.pretrain.WIDTHS
        logits_NV = self.model.logits(self.model.tokens_of(y).flatten(0, 1)[at])[:num]
        labels_N = labels_BS.flatten()[at[:num]]
        nll = token_losses(logits_NV, labels_N, self.arch.loss_type).sum()
        if not wants_right:
            return nll, None, logits_NV
        wrong_BS = torch.zeros_like(is_target)
        wrong_BS[is_target] = logits_NV.detach().argmax(-1) != labels_N
        return nll, ~wrong_BS.any(1), logits_NV

    def _halts(self, q_B: torch.Tensor, batch: SlotBatch) -> np.ndarray:
        steps = self.carry.steps[self._global_slots(batch)] + 1
        return (q_B.detach() > 0).cpu().numpy() & (steps >= batch.earliest_B)

    def _global_slots(self, batch: SlotBatch) -> np.ndarray:
        return batch.slots * self.groups.dims.data_ranks + self.data_rank

    def _keep(self, batch: SlotBatch, y: torch.Tensor, z: torch.Tensor) -> None:
        assert self.states is not None, "only several supervision steps carry states"
        at = torch.from_numpy(batch.slots).to(self.device)
        for kept, new in zip(self.states, (y, z), strict=True):
            kept[at, : new.shape[1]] = new

    def _clip(self) -> float:
        grads = [p.grad for p in self.trained.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        if self.settings.grad_clip_norm is not None and torch.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(self.trained.values(), self.settings.grad_clip_norm, norm)
        return norm.item()

    def _update(self, lr: float) -> None:
        if self.optimizer:
            optim.set_lr(self.optimizer, lr)
            self.optimizer.step()
        self.puzzle_optimizer.step(lr / self.settings.lr if self.settings.lr else 0.0)
        if self.average:
            self.average.update()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for parameter in self.weights.values():
            parameter.grad = None

    @torch.no_grad()
    def evaluate(self, microbatches: list[SlotBatch], stop: Callable[[], bool] | None = None) -> StepResult:
        """Result after N_sup steps, with averaged weights if there are any; metrics: the numbers of targets and of rows
        right.
        """
        self.model.eval()
        sums = np.zeros(5)
        with self.averaged():
            for batch in microbatches[self.data_rank :: self.groups.dims.data_ranks]:
                if stop and stop():
                    break
                with self._memory_advice(batch):
                    ids = torch.from_numpy(batch.input_ids_BS).to(self.device)
                    y, z = self.model.start(*ids.shape)
                    for _ in range(self.arch.supervision_steps):
                        y, z = self.model(ids, y, z, self._puzzle_ids(batch))
                    nll, right_B, logits_NV = self._nll(y, batch, wants_right=True)
                labels = torch.from_numpy(batch.labels_BS[batch.labels_BS != IGNORE_INDEX]).to(self.device)
                cells = int((logits_NV.argmax(-1) == labels).sum())
                sums += nll.item(), batch.num_targets, batch.num_tokens, cells, int(right_B.sum())
        nll, *numbers = self.groups.sum_scalars(list(sums))
        num_targets, num_tokens, targets_right, rows_right = map(int, numbers)
        metrics = {"targets_right": targets_right, "rows_right": rows_right}
        return StepResult(float(nll), num_targets, num_tokens, 0.0, metrics=metrics)

    def averaged(self):
        if self.average:
            return self.average.applied()
        return contextlib.nullcontext()

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
        self.model.eval()
        if not prompts:  # of a rank that has none
            return []
        with self.averaged():
            return generate.generate(
                self.model, prompts, max_new_tokens, eos_ids, self.pad_id, stop_row, on_token, Sampling(**sampling)
            )

    def full_weights(self):
        return contextlib.nullcontext()

    def _memory_advice(self, batch: SlotBatch):
        if self.device.type == "mps":
            said = "MPS backend out of memory"
        else:
            said = f"{self.device.type} ran out of memory"
        return memory_advice(
            f"{said} on a microbatch of {batch.size} tokens. Lower "
            f"global_batch_size={self.settings.global_batch_size}, "
            f"arch.hidden_size={self.arch.hidden_size} or arch.seq_len={self.model.seq_len}."
        )

    # ---- state

    def load_trainable(self, trainable: dict) -> None:
        """Weights of `load_checkpoint`, to begin with."""
        self.state.load_weights(trainable, "load_checkpoint")

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    # ---- what is saved and used

    def vocab_size(self) -> int:
        return self.model.vocab_size

    def context_limit(self) -> int | None:
        """Learned and mixed positions end with the rows; rotary ones do not, but none beyond was trained."""
        return self.model.seq_len

    def describe_weights(self, base_name: str, base_digest: str) -> dict[str, dict]:
        return {CONFIG: model_config(self.model)}

    def write_model(self, folder: Path) -> None:
        """config.json and model.safetensors: the averaged weights, as they were evaluated."""
        if self.rank:
            return
        with self.averaged():
            replace_tensors(Path(folder) / MODEL, self.trainable_state())
        replace_text(Path(folder) / CONFIG, json.dumps(model_config(self.model), indent=1) + "\n")

    def profiler(self, written: list):
        return contextlib.nullcontext(lambda: None)

    # ---- memory

    def begin_memory(self, baseline: int) -> int:
        memory_stats.keep_heap(low_memory=False)
        return self.counter.begin(baseline)

    def memory(self) -> MemoryStats:
        optimizer = self.optimizer or torch.optim.SGD(self.weights.values())
        stats = self.counter.stats(optimizer, self.state.copies.num_bytes)
        beside = {"ema": memory_stats.storage_bytes(self.average.shadow.values()) if self.average else 0}
        beside["carry"] = memory_stats.storage_bytes(self.states or [])
        items = dict(stats.items)
        items["workspace"] = items.get("workspace", 0) - sum(beside.values())
        return MemoryStats(stats.total, items | {name: size for name, size in beside.items() if size})


@torch.no_grad()
def check_causal(model: RecursiveModel) -> None:
    """Raises PlanError if the logits of a token depend on those that follow, after N_sup supervision steps."""
    length = min(8, model.seq_len)
    first = torch.arange(length, device=model.y0_D.device)[None] % model.vocab_size
    other = first.clone()
    other[0, length // 2 :] = (other[0, length // 2 :] + 1) % model.vocab_size
    found = []
    for ids in (first, other):
        y, z = model.start(1, length)
        for _ in range(model.arch.supervision_steps):
            y, z = model(ids, y, z)
        found.append(model.logits(y)[0, : length // 2])
    if not torch.equal(*found):
        raise PlanError(
            "arch.causal=true: logits depend on later tokens on this device. Use arch.forward_dtype=float32."
        )


def build(settings: PretrainConfig, rows: Rows, groups: ProcessGroups, carry: Carry) -> RecursiveEngine:
    """The engine of a run on `rows` (data.arrays.Rows): weights drawn from the seed, compiled if asked."""
    torch.manual_seed(settings.seed)
    if settings.arch.mlp_t:
        seq_len = rows.seq_len
    else:
        seq_len = max(rows.seq_len, settings.arch.seq_len)
    model = RecursiveModel(settings.arch, rows.vocab_size, seq_len, rows.num_puzzles).to(groups.device)
    if settings.compile == "true":
        model.network = torch.compile(model.apply_layers)
    return RecursiveEngine(model, settings, groups, rows.pad_id, carry)
