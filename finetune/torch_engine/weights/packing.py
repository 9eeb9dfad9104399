"""The packed base while weights stream in: an entry gives the layers, or each is written as it is loaded."""

import contextlib
import copy
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from finetune.adapters.modules import inside
from finetune.errors import CheckpointDamagedError, PlanError, StorageError, first_line
from finetune.quantizers.linear import QuantizedLinear
from finetune.safetensors_io import TensorShard, read_header_and_start, write_file
from finetune.system.files import new_folder, sync_folder
from finetune.system.terminal import say
from finetune.torch_engine.experts.fused import QuantizedExperts
from finetune.torch_engine.parallel.fsdp import decoder_layers
from finetune.torch_engine.weights.packed_base import (
    FORMAT,
    KIND_OF,
    META,
    LayerFile,
    PackedBase,
    PackedCache,
    bytes_as_array,
    digest_of_content,
    facts_of,
    write_outer,
)


class _NotWritten(Exception):
    """The entry could not be written."""


class Packer:
    """Writes an entry layer by layer while a model is loaded. A disk that is full costs the entry; if the run reads its
    base from it (`needed`), the run.

    `saved`: modules that stay outside; with `needed`, each layer is on meta again once it is written.
    """

    def __init__(self, cache: PackedCache, model: PreTrainedModel, saved: Iterable[str] = (), needed: bool = False):
        self.cache = cache
        self.model = model
        self.saved = tuple(saved)
        self.needed = needed
        self.entries: list[dict] = []
        self.failed: OSError | None = None
        self.beside: Path | None = None
        self.prefixes = layer_names(model)
        configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
        self.blank: dict[str, nn.Module] = {}
        if needed:
            self.blank = {n: copy.deepcopy(model.get_submodule(n), dict(configs)) for n in self.prefixes}

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """The context of the loading, at whose end the entry is complete, or is not there."""
        loaded = False
        try:
            with contextlib.ExitStack() as stack:
                try:
                    self.beside = stack.enter_context(new_folder(self.cache.folder))
                except OSError as error:
                    self._fail(error)
                yield
                loaded = True
                if self.failed:
                    raise _NotWritten
                self._write_meta()
        except _NotWritten:
            pass
        except OSError as error:
            if not loaded:
                raise
            # Where locks are not kept, another process may have made the same entry meanwhile.
            if self.failed or not (self.cache.folder / META).is_file():
                self._fail(error)
        if self.failed:
            why = self.failed.strerror or first_line(self.failed)
            say(f"  note: the packed base is not kept: {self.cache.folder}: {why}")

    def layer(self, prefix: str) -> None:
        """Writes a layer whose weights are loaded."""
        if self.beside is not None and self.failed is None:
            try:
                self._write_layer(prefix, self.beside)
            except OSError as error:
                self._fail(error)
        if self.needed and not inside(prefix, self.saved):
            blank = self.blank.pop(prefix)
            layer = self.model.get_submodule(prefix)
            for name, parameter in layer.named_parameters(recurse=False):
                setattr(blank, name, parameter)
            for name in self.saved:
                if inside(name, (prefix,)):
                    below = name.removeprefix(f"{prefix}.")
                    blank.set_submodule(below, layer.get_submodule(below))
            self.model.set_submodule(prefix, blank)

    def _write_layer(self, prefix: str, folder: Path) -> None:
        tensors: dict[str, torch.Tensor] = {}
        linears: dict[str, dict] = {}
        experts: dict[str, list[int]] = {}
        for below, module in self.model.get_submodule(prefix).named_modules():
            path = f"{prefix}.{below}" if below else prefix
            if inside(path, self.saved):
                continue
            own: tuple[str, ...] = ()
            if isinstance(module, QuantizedExperts):
                experts[path] = [module.num_experts, module.out_features, module.in_features]
            elif isinstance(module, QuantizedLinear):
                linears[path] = facts_of(module)
                own = module.names
                tensors |= {f"{path}.{n}": t for n, t in zip(own, module.stored(), strict=True)}
            for name, parameter in module.named_parameters(recurse=False):
                # On meta are those that will be tied to others. A layer's own few stay outside.
                if below and name not in own and not parameter.is_meta:
                    tensors[f"{path}.{name}"] = parameter
        name = f"layer-{len(self.entries):05d}.safetensors"
        parts = [
            TensorShard(n, KIND_OF[t.dtype], tuple(t.shape), partial(bytes_as_array, t)) for n, t in tensors.items()
        ]
        written = write_file(folder / name, parts, durable=False)
        header, start = read_header_and_start(folder / name)
        header.pop("__metadata__", None)
        in_order = sorted(header, key=lambda n: header[n]["data_offsets"])
        self.entries.append(
            {
                "prefix": prefix,
                "file": name,
                **written,
                "start": start,
                "tensors": {n: [header[n]["dtype"], header[n]["shape"]] for n in in_order},
                "linears": linears,
                "experts": experts,
            }
        )

    def _write_meta(self) -> None:
        assert self.beside is not None
        content = {"format": FORMAT, "layers": self.entries}
        (self.beside / META).write_text(json.dumps(content | {"sha256": digest_of_content(content)}), encoding="utf-8")
        sync_folder(self.beside)

    def _fail(self, error: OSError) -> None:
        self.failed = error
        if self.needed:
            raise _unwritable(self.cache.folder, error) from None


def layer_names(model: PreTrainedModel) -> list[str]:
    """Names of the decoder layers; not of bare linears, of which a model may have as many, and which stay outside."""
    names = {module: name for name, module in model.named_modules()}
    return [names[layer] for layer in decoder_layers(model) if any(True for _ in layer.children())]


class Outside(Protocol):
    """A keeper of layers outside the device's memory: torch_engine/base_offload.py."""

    def hold(self, base: PackedBase, device: torch.device, /) -> None: ...
    def hold_outer(self, role: str, file: LayerFile, model: PreTrainedModel, /) -> None: ...
    def tensors_of(self, layer: LayerFile, /) -> Mapping[str, torch.Tensor]: ...
    def present(self, name: str, /) -> contextlib.AbstractContextManager: ...


def _unwritable(folder: Path, error: OSError) -> StorageError:
    return StorageError(
        f"--base_offload: the packed base cannot be written: {folder}: {error.strerror or first_line(error)}. Free the "
        "space, or give another folder by --packed_cache."
    )


class PackedLayers:
    """The packed base as weights stream in: an entry gives the layers, and without one they are kept as they come.

    `saved`: modules that stay outside; `outside`: keeps the layers, if the device does not, and needs the entry;
    `outer`: {role: name} of the embedding and the head, where it keeps those too.
    """

    def __init__(
        self,
        cache: PackedCache,
        num_bytes: int,
        saved: Iterable[str] = (),
        outside: Outside | None = None,
        outer: Mapping[str, str] | None = None,
    ):
        self.outer: Mapping[str, str] = outer or {}
        self.cache = cache
        self.num_bytes = num_bytes
        self.saved = tuple(saved)
        self.outside = outside
        self.packer: Packer | None = None
        self.base: PackedBase | None = None

    @contextlib.contextmanager
    def loading(self, model: PreTrainedModel, device: torch.device) -> Iterator[tuple[set[str], list[str]]]:
        """The context in which the rest is loaded: (names of the parameters that are given, prefixes of the modules
        that `take` is called for, each after its weights). The names are complete at its end.
        """
        self.model = model
        roles = {name: role for role, name in self.outer.items()}
        with self.cache.locked() as self.progress:
            self.base = self.cache.open()
            given = set()
            if self.base is not None:
                given = self._given(self.base, device)
                there = {name for name, role in roles.items() if self._outer_given(self.base, role, name)}
                given |= {f"{name}.weight" for name in there}
                yield given, [name for name in roles if name not in there]
                given |= {f"{name}.weight" for name in roles}
                return
            self.packer = self._packer(model)
            if self.packer is None:
                yield given, []
                return
            with self.packer.writing():
                yield given, [*roles, *self.packer.prefixes]
            if self.outside is not None:
                base = PackedBase.of(self.cache.folder)
                given |= self._given(base, device)
                for name, role in roles.items():
                    self._outer_must_be_given(base, role, name)
                    given.add(f"{name}.weight")

    def _outer_given(self, base: PackedBase, role: str, name: str) -> bool:
        """True if the weight is in its file, from which it is then read."""
        file = base.outer(role, name)
        if file is None:
            return False
        assert self.outside is not None, "nothing else keeps it"
        self.outside.hold_outer(role, file, self.model)
        return True

    def _outer_must_be_given(self, base: PackedBase, role: str, name: str) -> None:
        """Gives a weight whose file this process wrote. Raises CheckpointDamagedError."""
        if not self._outer_given(base, role, name):
            raise CheckpointDamagedError(
                f"{base.folder}: {role}.safetensors is not as it was just written. Start again: it is made anew."
            )

    def take(self, prefix: str) -> None:
        """Keeps a module whose weights are loaded."""
        self.progress()
        for role, name in self.outer.items():
            if name == prefix:
                self._take_outer(role, name)
                return
        assert self.packer is not None, "only in the context that asked for it"
        self.packer.layer(prefix)

    def _take_outer(self, role: str, name: str) -> None:
        """Writes an embedding or a head, and drops it until it is given."""
        module: Any = self.model.get_submodule(name)
        folder = None
        if self.base is not None:
            folder = self.base.folder
        elif self.packer is not None:
            folder = self.packer.beside
        assert folder is not None, "a packer that cannot write ends the run"
        try:
            write_outer(folder, role, name, module.weight)
        except OSError as error:
            raise _unwritable(folder, error) from None
        module.weight = nn.Parameter(module.weight.new_empty(0, module.weight.shape[1]), requires_grad=False)
        if self.base is not None:
            self._outer_must_be_given(self.base, role, name)

    def _given(self, base: PackedBase, device: torch.device) -> set[str]:
        if self.outside is not None:
            self.outside.hold(base, device)
            return base.install(self.model, self.outside.tensors_of)
        say(f"  packed base: read from {base.folder} ({base.num_bytes / 2**30:.1f} GiB)")
        return base.load(self.model, device, self.cache)

    def _packer(self, model: PreTrainedModel) -> Packer | None:
        """A writer of the entry; None if it is not kept. Raises PlanError if it must be."""
        why = self.cache.why_not(self.num_bytes)
        if why is None:
            return Packer(self.cache, model, self.saved, self.outside is not None)
        if self.outside is not None:
            raise PlanError(f"--base_offload: {why}. Free the space, or give another folder by --packed_cache.")
        say(f"  note: the packed base is not kept: {why}")
        return None
