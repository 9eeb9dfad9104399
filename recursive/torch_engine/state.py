"""The recursive engine's state in and out: weights, moments, averages, and the slots with their y and z.
Ranks are replicas, so that only the slots differ; every function is collective.
"""

from collections.abc import Iterable

import numpy as np
import torch

from finetune.errors import PlanError
from finetune.torch_engine import optim
from finetune.torch_engine.host_copies import HostCopies
from finetune.torch_engine.parallel.process_groups import ProcessGroups
from finetune.torch_engine.state import check_rng
from recursive.data.carry import Carry
from recursive.torch_engine.model import RecursiveModel
from recursive.torch_engine.optim import Average
from recursive.torch_engine.weights import load_weights


class RecursiveState:
    """`dense`: {name: parameter} of the optimizer, None if all of those are frozen. `states`: y and z of this rank's
    slots, None if no row is carried.
    """

    def __init__(
        self,
        model: RecursiveModel,
        groups: ProcessGroups,
        carry: Carry,
        states: list[torch.Tensor] | None,
        dense: dict,
        optimizer: torch.optim.Optimizer | None,
        average: Average | None,
    ):
        self.model = model
        self.groups = groups
        self.carry = carry
        self.states = states
        self.dense = dense
        self.optimizer = optimizer
        self.average: Average | None = average
        self.copies = HostCopies()

    def prepare_snapshot(self) -> None:
        """Makes room for a snapshot beside the steps. Called after the first."""
        sizes = {name: (t.shape, torch.float32) for name, t in self.model.state_dict().items()}
        moments: Iterable = ()
        if self.optimizer:
            moments = optim.moments(self.optimizer, self.dense)
        sizes |= {key: (moment.shape, moment.dtype) for key, moment in moments}
        averages = {}
        if self.average:
            averages = self.average.shadow
        self.copies.prepare(sizes | {f"{name}.ema": (t.shape, t.dtype) for name, t in averages.items()})

    def trainable_state(self) -> dict[str, np.ndarray]:
        """Every weight, frozen ones and the start of y and z too: a checkpoint is the model."""
        weights = self.model.state_dict()
        return {name: self.copies.of(name, t, torch.float32).numpy() for name, t in weights.items()}

    def optimizer_state(self) -> tuple[dict[str, np.ndarray], dict]:
        """Moments, '<name>.ema' of the average, and the slots: carry.rows, carry.y and so on."""
        tensors = {f"carry.{name}": array for name, array in self.carry.state().items()}
        if self.optimizer:
            moments = optim.moments(self.optimizer, self.dense)
            tensors |= {key: self.copies.of(key, moment).numpy() for key, moment in moments}
        if self.average:
            averages = ((f"{name}.ema", t) for name, t in self.average.shadow.items())
            tensors |= {key: self.copies.of(key, t).numpy() for key, t in averages}
        if self.states is not None:
            for name, kept in zip("yz", self.states, strict=True):
                parts = self.groups.all_gather(kept.float().cpu())
                tensors[f"carry.{name}"] = torch.stack(parts, 1).flatten(0, 1)[: len(self.carry.rows)].numpy()
        return tensors, self.optimizer_values()

    def optimizer_values(self) -> dict:
        counts = {}
        if self.optimizer:
            counts = optim.counts(self.optimizer, self.dense)
        counts["ema.updates"] = float(self.average.updates) if self.average else 0.0
        return {"counts": counts, "scale": None, "clean_steps": 0}

    def rng_state(self) -> dict[str, np.ndarray]:
        """Nothing is drawn while training but by counters; the host's state is kept for generation."""
        return {"host": torch.get_rng_state().numpy()}

    def load_state(self, trainable: dict, optimizer: dict, values: dict, rng: dict) -> None:
        self.load_weights(trainable, "resume")
        tensors = {k: np.asarray(v[...]) for k, v in optimizer.items()}
        counts = dict(values["counts"])
        slots = {k.removeprefix("carry."): tensors.pop(k) for k in list(tensors) if k.startswith("carry.")}
        averages = {k.removesuffix(".ema"): tensors.pop(k) for k in list(tensors) if k.endswith(".ema")}
        wanted = {"rows", "epochs", "steps", *("yz" if self.states is not None else "")}
        if set(slots) != wanted or bool(averages) != bool(self.average) or len(slots["rows"]) != len(self.carry.rows):
            raise PlanError("resume: the checkpoint has other slots or no EMA. Resume with the saved settings.")
        updates = counts.pop("ema.updates", 0.0)
        if self.average:
            self.average.load(averages, int(updates))
        if self.optimizer:
            optim.load_state(self.optimizer, self.dense, tensors, counts)
        self.carry.load(slots)
        if self.states is not None:
            mine = slice(self.groups.data_rank, None, self.groups.dims.data_ranks)
            for name, kept in zip("yz", self.states, strict=True):
                part = torch.from_numpy(slots[name][mine]).to(kept)
                kept[: len(part)] = part
        host = torch.get_rng_state()
        check_rng({"host": rng.get("host")}, host)
        torch.set_rng_state(torch.from_numpy(np.array(rng["host"])))

    def load_weights(self, weights: dict, said: str) -> None:
        load_weights(self.model, {name: np.asarray(t[...]) for name, t in weights.items()}, said)
        if self.average:
            self.average.restart()
