"""The engine's state in and out: trainable weights, optimizer moments and random state, full or as this rank's shards.

Names are those on disk (PEFT's for adapters), arrays are numpy. Every function is collective.
"""

import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from finetune.eight_bit import BESIDE_CODES
from finetune.errors import CheckpointDamagedError, first_line
from finetune.optimizer_state import LossScaler, check_known, check_moments, check_trainable
from finetune.parts.parts import Parts
from finetune.parts.trains import Adapter
from finetune.safetensors_io import FROM_NUMPY, TensorShard
from finetune.torch_engine import eight_bit, optim
from finetune.torch_engine.host_copies import HostCopies
from finetune.torch_engine.lora.peft_format import disk_name, from_disk, to_disk
from finetune.torch_engine.parallel.parallelism import Parallelism
from finetune.torch_engine.parallel.placement import local_shard
from finetune.torch_engine.weights.save import StreamedSave


class EngineState:
    """`reseeded`: set if a checkpoint of another world size was loaded, so that each rank draws new random numbers."""

    def __init__(
        self,
        model: PreTrainedModel,
        parallel: Parallelism,
        optimizer: torch.optim.Optimizer | None,
        scaler: LossScaler,
        plan: Parts,
    ):
        self.model = model
        self.parallel = parallel
        self.place = parallel.placement
        self.groups = self.place.groups
        self.optimizer = optimizer
        self.scaler = scaler
        self.plan = plan
        self.is_rank0 = self.groups.rank == 0
        self.reseeded = False
        self.foreign_rng: dict[str, np.ndarray] = {}  # of the MLX engine, which a move back takes up again
        self.copies = HostCopies()
        # Weights of the model itself train, not adapters.
        self.trains_base_weights = not isinstance(plan.trains, Adapter)

    def checkpoint_key(self, name: str) -> str:
        if self.trains_base_weights:
            return name
        return disk_name(name)

    @property
    def trains_by(self) -> torch.optim.Optimizer:
        """The optimizer, which each rank of a run has."""
        assert self.optimizer is not None, "nothing trains here"
        return self.optimizer

    # ---- out

    def prepare_snapshot(self) -> None:
        """Makes room for a snapshot beside the steps, where ranks copy what they hold. Called after the first step."""
        if self.groups.single_process or self.writes_shards():
            owned = self._owned()
            sizes = {name: (self.place.local_shard(name).shape, torch.float32) for name in owned}
            self.copies.prepare(sizes | {key: (m.shape, m.dtype) for key, m in optim.moments(self.trains_by, owned)})

    def _owned(self) -> dict:
        """{name: what the optimizer updates} of the shards that this rank writes."""
        params = self.parallel.local_params
        return {n: p for n, p in params.items() if p is not None and self.place.is_writer(n)}

    def trainable_state(self) -> dict[str, np.ndarray]:
        """The trainable weights on rank 0, gathered one tensor at a time; empty on other ranks."""
        full = {}
        with optim.averaged(self.optimizer) as changes_back:
            for name in self.place.trainable:
                alone = self.groups.single_process
                tensor: torch.Tensor | None
                if alone:
                    tensor = self.place.local_shard(name).float()
                else:
                    tensor = self.parallel.gather(name)
                if self.is_rank0:
                    assert tensor is not None, name
                    on_host = self.copies.of(name, tensor)
                    full[name] = on_host.clone() if changes_back and not self.copies.taking else on_host
        if not self.is_rank0:
            return {}
        if not self.trains_base_weights:
            assert isinstance(self.plan.trains, Adapter), self.plan.trains
            full = to_disk(self.model, full, self.plan.trains)
        return {name: tensor.numpy() for name, tensor in full.items()}

    def optimizer_state(self) -> tuple[dict[str, np.ndarray], dict]:
        """({'<name>.<moment>': array} on rank 0, JSON values)."""
        if self.groups.single_process:
            named = self.parallel.local_params
            moments = {self._moment_key(key): self.copies.of(key, m) for key, m in optim.moments(self.trains_by, named)}
            return {key: moment.numpy() for key, moment in moments.items()}, self.optimizer_values()
        shards, counts = self.parallel.moments()
        dtypes: dict[str, str] = {}
        for keys in self.groups.all_gather_object([[k, str(v.dtype)] for k, v in shards.items()]):
            dtypes |= {key: dtype for key, dtype in keys if key not in dtypes}
        tensors = {}
        beside = self._scales(shards)
        for key, dtype in dtypes.items():
            name, _, moment = key.rpartition(".")
            if beside and moment in BESIDE_CODES:
                continue
            shard = None
            if name in self.place.of_stage:
                no_rows = np.zeros((0, *self.place.of_stage[name].shape[1:]), dtype)
                shard = torch.from_numpy(shards.get(key, no_rows))
            full = self.place.gather(name, shard)
            if self.is_rank0:
                assert full is not None, key
                tensors[self._moment_key(key)] = self.copies.of(key, full).numpy()
        for key, array in beside.items() if self.is_rank0 else ():
            tensors[self._moment_key(key)] = self.copies.of(key, torch.from_numpy(array)).numpy()
        return tensors, self._values(counts)

    def _scales(self, moments: dict) -> dict:
        """{key: array} of the scales of 8-bit moments over all ranks; empty if there are none. `moments`: {key: this
        rank's}.
        """
        if not self.plan.steps.moments_are_8_bit:
            return {}
        return self._layout_of_8_bits(moments).gathered(moments)

    def _layout_of_8_bits(self, moments: Mapping) -> eight_bit.Layout:
        return eight_bit.Layout(self.place, [k.removesuffix(".absmax1") for k in moments if k.endswith(".absmax1")])

    def _moment_key(self, key: str) -> str:
        """'<name on disk>.<moment>' of '<name>.<moment>'."""
        name, _, moment = key.rpartition(".")
        return f"{self.checkpoint_key(name)}.{moment}"

    def optimizer_values(self) -> dict:
        """optimizer_state's JSON values only."""
        return self._values(optim.counts(self.trains_by, self.parallel.local_params))

    def _values(self, local_counts: dict) -> dict:
        counts: dict[str, float] = {}
        for of_rank in self.groups.all_gather_object(local_counts):
            for key, count in of_rank.items():
                counts.setdefault(self._moment_key(key), count)
        return {"counts": counts, **self.scaler.values(), "degrees": list(self.groups.dims.mesh_shape)}

    def writes_shards(self) -> bool:
        """True if each rank can save its own shards: base weights train as they are saved, and each shard is one slice
        of the full tensor.
        """
        if self.plan.steps.averages_weights:
            return False
        dims = self.groups.dims
        sharded = dims.shards * dims.tp * dims.pp > 1
        one_slice = all(cut.blocks == 1 for cut in self.place.slices.values())
        return self.plan.all_weights and sharded and one_slice and self.parallel.holds_slices

    def gather_beside_steps(self, value: Any) -> list:
        """Every rank's JSON value, see ShardWriter."""
        return self.groups.all_gather_object(value, "saving")

    def state_shards(self) -> tuple[list[TensorShard], list[TensorShard]]:
        """(fp32 weights, moments) that this rank writes, each read when it is written; of a snapshot at once."""
        owned = self._owned()
        weights = [self._shard(n, n, self.place.local_shard(n), torch.float32) for n in owned]
        held = dict(optim.moments(self.trains_by, owned))
        layout = None
        if self.plan.steps.moments_are_8_bit:
            layout = self._layout_of_8_bits(held)
        if layout is None:
            moments = []
        else:
            moments = layout.piece_shards()
        for key, tensor in held.items():
            name, _, moment = key.rpartition(".")
            if layout is not None and moment in BESIDE_CODES:
                read = partial(self._on_host, self.copies.of(key, tensor) if self.copies.taking else tensor)
                moments += [shard for shard in [layout.tensor_shard(key, tensor, read)] if shard is not None]
            else:
                moments.append(self._shard(name, key, tensor, tensor.dtype))
        return weights, moments

    @staticmethod
    def _on_host(tensor: torch.Tensor) -> np.ndarray:
        return tensor.cpu().contiguous().numpy()

    def _shard(self, name: str, key: str, tensor: torch.Tensor, dtype: torch.dtype) -> TensorShard:
        """`tensor` is placed as the parameter `name` is."""
        (slices,) = self.place.local_slices(name)
        shape = tuple(s.stop - s.start for s in slices)
        assert shape == tuple(tensor.shape), (key, shape, tensor.shape)
        word = FROM_NUMPY[str(dtype).removeprefix("torch.")]
        offsets = tuple(s.start for s in slices)
        full_shape = self.place.full_shape(name)
        if self.copies.taking:
            tensor = self.copies.of(key, tensor, dtype)
        return TensorShard(key, word, shape, lambda: tensor.to("cpu", dtype).contiguous().numpy(), offsets, full_shape)

    def rng_state(self) -> dict[str, np.ndarray]:
        """Random state of every rank on rank 0: its own under plain names, rank 1's under rank1.* and so on."""
        states = {}
        for name, state in self.local_rng_state().items():
            for rank, tensor in enumerate(self.groups.all_gather(state)):
                states[name if rank == 0 else f"rank{rank}.{name}"] = tensor.numpy()
        if self.is_rank0:
            return {**self.foreign_rng, **states}
        return {}

    def local_rng_state(self) -> dict[str, torch.Tensor]:
        device = self.groups.device
        state = {"host": torch.get_rng_state()}
        if device.type != "cpu":
            state[device.type] = torch.get_device_module(device).get_rng_state()
        return state

    def write_model(self, folder: Path, dtype: torch.dtype) -> None:
        """A full model folder in `dtype`, as transformers loads it; gathered and written one tensor at a time."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        with self.parallel.gathered_for_saving(), optim.averaged(self.optimizer):
            state = self.model.state_dict(keep_vars=True)

            def read(name: str):
                tensor = state[name]
                if tensor.is_meta:
                    shard = None
                else:
                    shard = local_shard(tensor.detach())
                if name in parameters:
                    return self.place.gather(name, shard)
                assert shard is not None, name
                return shard.cpu()

            shapes = {n: self.place.full_shape(n) if n in parameters else tuple(t.shape) for n, t in state.items()}
            saving = StreamedSave.of(self.model, shapes, dtype)
            if self.is_rank0:
                saving.write(Path(folder), read)
                return
            for group in saving.turns:
                for name in group:
                    read(name)

    # ---- in

    def load_state(self, trainable: dict, optimizer: dict, values: dict, rng: dict) -> None:
        """Loads a checkpoint, one tensor at a time if its tensors are read by slices.

        Raises PlanError if they do not match, CheckpointDamagedError if no run can have saved them so.

        Random state of another world size or other degrees fits no rank: each is then seeded from rank 0's state and
        its own rank, and `reseeded` is set.
        """
        self.load_trainable(trainable)
        names = {self.checkpoint_key(n): n for n in self.place.trainable}
        shapes = {key: self.place.full_shape(name) for key, name in names.items()}
        check_known((*optimizer, *values["counts"]), names)
        fp16 = values["scale"] is not None
        check_moments(optimizer, values["counts"], shapes, self.plan.steps.optimizer, may_be_empty=fp16)
        self.parallel.load_moments(names, optimizer, values["counts"])
        self.scaler.load(values)
        self._load_rng(values, rng)

    def _load_rng(self, values: dict, rng: dict) -> None:
        self.foreign_rng = {name: state for name, state in rng.items() if name.rpartition(".")[2] == "mlx"}
        if self.foreign_rng and "host" not in rng:
            self.reseeded = True
            self.seed(zlib.crc32(np.asarray(self.foreign_rng["mlx"]).tobytes()))
            return
        saved_ranks = 1 + sum(name.startswith("rank") and name.endswith(".host") for name in rng)
        degrees = list(self.groups.dims.mesh_shape)
        # Earlier checkpoints do not record their degrees.
        if saved_ranks == self.groups.dims.world_size and values.get("degrees", degrees) == degrees:
            prefix = ""
            if self.groups.rank:
                prefix = f"rank{self.groups.rank}."
            local = self.local_rng_state()
            check_rng({name: rng.get(name) for name in ("host", prefix + "host")}, local["host"])
            self.set_rng_state({name: rng[prefix + name] for name in local if prefix + name in rng})
        else:
            check_rng({"host": rng.get("host")}, self.local_rng_state()["host"])
            self.reseeded = True
            self.seed(zlib.crc32(np.asarray(rng["host"]).tobytes()))

    def load_trainable(self, trainable: dict) -> None:
        names = {self.checkpoint_key(n): n for n in self.place.trainable}
        if not self.trains_base_weights:
            assert isinstance(self.plan.trains, Adapter), self.plan.trains
            trainable = from_disk(self.model, self.place.trainable, trainable, self.plan.trains)
        check_trainable({key: self.place.full_shape(name) for key, name in names.items()}, trainable)
        for key, name in names.items():
            self.parallel.copy_weight(name, trainable[key])

    def set_rng_state(self, rng: Mapping[str, np.ndarray]) -> None:
        try:
            torch.set_rng_state(torch.from_numpy(np.array(rng["host"])))
        except RuntimeError as error:
            raise CheckpointDamagedError(f"rng.safetensors: {first_line(error)}") from None
        device = self.groups.device
        if device.type in rng:
            state = torch.from_numpy(np.array(rng[device.type]))
            torch.get_device_module(device).set_rng_state(state)

    def seed(self, seed: int) -> None:
        """Seeds this rank's dropout: the same within a tensor-parallel group; on rank 0, as in a single process."""
        groups = self.groups
        dims = self.groups.dims
        at = dims.coordinates(groups.rank)
        index = (at["pp"] * dims.data_ranks + groups.data_rank) * dims.cp + at["cp"]
        torch.manual_seed(seed + 1_000_003 * index)


def check_rng(saved: dict, own: torch.Tensor) -> None:
    """Raises CheckpointDamagedError for a saved random state that is not of the kind of this process's `own`."""
    for name, state in saved.items():
        if state is None or state.dtype != np.uint8 or state.shape != tuple(own.shape):
            if state is None:
                fact = "is missing"
            else:
                fact = f"is {state.dtype} {state.shape}, must be uint8 {tuple(own.shape)}"
            raise CheckpointDamagedError(f"rng.safetensors: {name} {fact}")
