"""Logits of a full model that no rank holds, computed from its files with one decoder layer in memory at a time.

The ranks take turns: each reads and quantizes the layers that are its turn, adds their adapters, computes them, and
sends on the hidden states. Nothing here knows of slices, rows or stages, so that it can be compared with what does.
"""

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from finetune.engine import Batch
from finetune.parts.engine_limits import HEAD_BYTES
from finetune.parts.parallel import ParallelPlan
from finetune.parts.parts import Parts
from finetune.parts.trains import Adapter
from finetune.system.progress import Progress
from finetune.torch_engine import memory_stats
from finetune.torch_engine.device import DTYPES
from finetune.torch_engine.experts import fused
from finetune.torch_engine.forward import Layout, ModelForward
from finetune.torch_engine.lora.adapters import add_adapters
from finetune.torch_engine.lora.init import sampled
from finetune.torch_engine.lora.layers import adapter_parameters
from finetune.torch_engine.parallel.fsdp import decoder_layers
from finetune.torch_engine.parallel.process_groups import ProcessGroups
from finetune.torch_engine.weights import load, stream
from finetune.torch_engine.weights.files import open_weights

PROBE_STD = 0.02  # of adapters' zero factors while logits are compared


def probe(name: str, shape: Sequence[int]) -> torch.Tensor:
    """Values of an adapter's factor that starts at zero, by which its slices show in the logits."""
    return sampled(f"{name} probe", shape, "normal", 0) * PROBE_STD


def starts_at_zero(model: PreTrainedModel) -> list[str]:
    """Names of the adapters' factors that `probe` is for: of adapters that change the output only once they train."""
    found = []
    for name in adapter_parameters(model):
        owner, _, leaf = name.rpartition(".")
        if leaf in ("lora_B", "lora_embedding_A") and model.get_submodule(owner).start is None:
            found.append(name)
    return found


class Reference:
    """The full model of a run in its model folder. `initial_adapter`: see weights.load.residual_init."""

    def __init__(self, plan: Parts, folder: Path | str, initial_adapter: dict | None = None):
        self.folder = folder
        self.plan = plan
        self.initial_adapter = initial_adapter

    def logits(self, layout: Layout, batch: Batch, groups: ProcessGroups, pad_id: int) -> torch.Tensor:
        """[positions, V], fp32, of `batch`, with adapters' zero factors as `probe` gives them. Collective."""
        model = _LayerwiseModel(self.folder, self.plan, self.initial_adapter, groups)
        model.hold_outer(batch)
        forward = ModelForward(model.model, self.plan, ProcessGroups(device=groups.device), pad_id)
        forward.use(layout)
        with model.bar:
            found = forward.logits(batch).contiguous()
        dist.broadcast(found, 0)
        memory_stats.trim_heap()
        return found


class _LayerwiseModel:
    """A model on meta whose decoder layers get their weights for the time of their forward."""

    def __init__(self, folder: Path | str, plan: Parts, initial_adapter: dict | None, groups: ProcessGroups):
        self.plan = plan
        self.groups = groups
        self.device = groups.device
        self.model = model = load.build_on_meta(folder, plan.precision, ParallelPlan())
        self.layers = load.layers_of(model, folder, plan.trains)
        self.residual = load.residual_init(model, self.layers, plan, self.device, initial_adapter)
        self.checkpoint = open_weights(folder)
        wanted = model.state_dict()
        self.place = stream.WeightLoader(
            model,
            self.checkpoint,
            DTYPES[plan.precision.weights],
            self.device,
            load.quantized_weights(model, self.layers, plan),
            fused.hold,
            f"--model_name {model.name_or_path}",
            residual=self.residual,
        )
        self.tasks: dict[str, Any] = {}
        for task in stream.assign_tensors(model, self.checkpoint, wanted)[0]:
            self.tasks |= dict.fromkeys(self.place.targets_of(task), task)
        configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
        names = {module: name for name, module in model.named_modules()}
        self.prefixes = []
        self.blank: list[Any] = []
        for number, layer in enumerate(decoder_layers(model)):
            self.prefixes.append(names[layer])
            self.blank.append(copy.deepcopy(layer, dict(configs)))  # the attention is chosen in the shared config
            layer.forward = partial(self._layer, number)
        self.bar = Progress("comparing", len(self.prefixes), "layers")

    # ---- outside the layers

    def hold_outer(self, batch: Batch) -> None:
        """Loads what is outside the layers: of the embedding the rows of these tokens, of the head nothing yet."""
        embedding = self.model.get_input_embeddings()
        head = self.model.get_output_embeddings()
        names = {module: name for name, module in self.model.named_modules()}
        apart = set()
        if self._has_plain_rows(embedding, names[embedding], nn.Embedding):
            self._hold_rows(embedding, f"{names[embedding]}.weight", batch)
            apart.add(f"{names[embedding]}.weight")
        if self._has_plain_rows(head, names[head], nn.Linear):
            head.forward = partial(self._head, f"{names[head]}.weight", head)
            apart.add(f"{names[head]}.weight")
        inside = tuple(f"{prefix}." for prefix in self.prefixes)
        outer = [n for n in self.model.state_dict() if not n.startswith(inside) and n not in apart]
        self._load(outer)
        adapted = [n for n in self.layers.adapted if not n.startswith(inside)]
        self._adapt(self.model, adapted)
        for module in self.model.modules():
            module._buffers |= {n: b if b is None else b.to(self.device) for n, b in module._buffers.items()}
        self._cast_buffers(self.model)

    def _task_of(self, name: str):
        """Task that provides a parameter: for a tied one that the files store once, the task of the other."""
        source = self.model.all_tied_weights_keys.get(name)
        return self.tasks.get(name) or self.tasks.get(source)

    def _has_plain_rows(self, module: nn.Module, name: str, kind: type) -> bool:
        """True if rows of the module's weight can be read alone, and are all that it computes with."""
        task = None
        if isinstance(module, kind):
            task = self._task_of(f"{name}.weight")
        adapted = name in self.layers.adapted or f"{name}.weight" in self.place.quantized
        return task is not None and self.place.reads_rows(task) and not adapted

    def _rows(self, name: str, rows: slice) -> torch.Tensor:
        read = self.checkpoint.read(self._task_of(name).names[0], (rows,))
        return self.place.cast(name, read).to(self.device)

    def _hold_rows(self, embedding: Any, name: str, batch: Batch) -> None:
        ids = torch.from_numpy(batch.input_ids_BS).unique()
        rows = torch.cat([self._rows(name, slice(i, i + 1)) for i in ids.tolist()])
        embedding.weight = nn.Parameter(rows, requires_grad=False)
        embedding.padding_idx = None
        known = ids.to(self.device)
        embedding.register_forward_pre_hook(lambda module, args: (torch.searchsorted(known, args[0]), *args[1:]))

    def _head(self, name: str, head: Any, hidden: torch.Tensor) -> torch.Tensor:
        """The head's output, of some rows after the others; computed by rank 0."""
        num_rows, width = head.weight.shape
        out = hidden.new_zeros(*hidden.shape[:-1], num_rows)
        if self.groups.rank == 0:
            step = max(1, HEAD_BYTES // (width * head.weight.element_size()))
            for start in range(0, num_rows, step):
                rows = slice(start, min(start + step, num_rows))
                weight = self._rows(name, rows)
                if not torch.is_autocast_enabled(hidden.device.type):
                    weight = weight.to(hidden.dtype)
                if head.bias is None:
                    bias = None
                else:
                    bias = head.bias[rows]
                out[..., rows] = F.linear(hidden, weight, bias)
        return out

    # ---- a layer

    def _layer(self, number: int, *args: Any, **kwargs: Any):
        # What a layer leaves in a dict for later ones, such as shared keys and values, stays on one rank.
        hands_on = any(isinstance(value, dict) for value in kwargs.values())
        if hands_on:
            owner = 0
        else:
            owner = number % self.groups.dims.world_size
        out = None
        if self.groups.rank == owner:
            out = self._compute(number, *args, **kwargs)
        self.bar.update()
        return self._shared(out, owner)

    def _compute(self, number: int, *args: Any, **kwargs: Any):
        prefix = self.prefixes[number]
        waiting = self.model.get_submodule(prefix)
        try:
            return self._loaded(number)(*args, **kwargs)
        finally:
            self.model.set_submodule(prefix, waiting)
            memory_stats.trim_heap()

    def _loaded(self, number: int) -> nn.Module:
        """The layer with its weights and adapters."""
        prefix = self.prefixes[number]
        layer = self.blank[number]
        self.model.set_submodule(prefix, layer)
        self._load([f"{prefix}.{name}" for name in layer.state_dict()])
        layer = self.model.get_submodule(prefix)
        inside = f"{prefix}."
        if self.place.quantized:
            for name in self.layers.experts:
                if name.startswith(inside):
                    fused.wrapped(self.model, name)
        if prefix in self.layers.new_blocks:
            layer.to(torch.float32)
        layer.to(self.device)
        self._adapt(layer, [name for name in self.layers.adapted if name.startswith(inside)])
        self._cast_buffers(layer)
        self.blank[number] = None  # it is computed once
        return layer

    def _load(self, names: list[str]) -> None:
        tasks = {id(task): task for name in names if (task := self._task_of(name)) is not None}
        for task in tasks.values():
            self.place(task)

    @torch.no_grad()
    def _adapt(self, module: nn.Module, names: list[str]) -> None:
        """Adds the run's adapters to the named layers; the factors in `module` that start at zero get their probe."""
        if not names:
            return
        assert isinstance(self.plan.trains, Adapter)
        starts = None
        if self.residual:
            starts = self.residual.starts
        add_adapters(self.model, names, self.plan.trains, starts)
        wanted = set(starts_at_zero(self.model))
        parameters = adapter_parameters(self.model)
        inside = {id(parameter) for parameter in module.parameters()}
        for name in wanted:
            if id(parameters[name]) in inside:
                parameters[name].copy_(probe(name, parameters[name].shape))

    def _cast_buffers(self, module: Any) -> None:
        if self.plan.precision.casts_buffers:
            load.cast_buffers(module)

    def _shared(self, out: torch.Tensor | None, owner: int):
        """A layer's output on every rank: a tensor, or a tuple of tensors and of None."""
        if isinstance(out, tuple):
            values = list(out)
        else:
            values = [out]
        assert all(value is None or torch.is_tensor(value) for value in values), "a layer's output that is no tensor"
        said = [value if value is None else [str(value.dtype).removeprefix("torch."), *value.shape] for value in values]
        in_tuple, said = self.groups.broadcast_object([isinstance(out, tuple), said], owner)
        found: list[torch.Tensor | None] = []
        for i, what in enumerate(said):
            if what is None:
                found.append(None)
                continue
            mine = self.groups.rank == owner
            dtype, *shape = what
            if mine:
                own = values[i]
                assert own is not None, what
                value = own.contiguous()
            else:
                value = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            dist.broadcast(value, owner)
            found.append(value)
        if in_tuple:
            return tuple(found)
        return found[0]
