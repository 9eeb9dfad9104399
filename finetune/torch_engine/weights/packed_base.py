"""The packed base on disk: the frozen weights of each decoder layer as they are in memory, one file per layer.

A second start reads it instead of quantizing again, and a base that is larger than memory is read from it while it
trains (torch_engine/base_offload.py). An entry is found by everything that decides it: every byte of the model, the
method with its settings, the dtype, the names that stay outside, and the code and packages that quantize. Each file is
verified by its digest.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

import quantization_wrapper
from finetune.backend.machine import package_version
from finetune.errors import CheckpointDamagedError, first_line
from finetune.model_files.files import ModelFiles
from finetune.parts.parts import Parts
from finetune.quantizers.linear import Format, QuantizedLinear
from finetune.safetensors_io import TensorShard, read_header_and_start, write_file
from finetune.system.files import cache_folder, locked, locked_in_cache, open_file
from finetune.system.files import replace as replace_file
from finetune.system.json_files import JsonFileError, read_json
from finetune.system.terminal import say
from finetune.system.threads import Pool
from finetune.system.untrusted import untrusted
from finetune.torch_engine.experts.fused import QuantizedExperts
from finetune.torch_engine.weights.files import DTYPES as KINDS

META = "packed.json"
EMBEDDING = "embedding"  # beside it, where they are outside the device too: files of the embedding,
HEAD = "head"  # and of a head that has a weight of its own
FORMAT = 1
LEAVES_FREE = 2 * 2**30  # bytes of a disk that a new entry leaves
LEAST_BYTES = 32 * 2**20  # of the weights; fewer are quantized in about the time that reading them takes
LAYER_PATIENCE_S = 600  # for one layer of another process that packs
KIND_OF = {dtype: kind for kind, dtype in KINDS.items()}
OUTER_SCHEMA = {"sha256": str, "size": int, "start": int, "tensor": list, "digest": str}
META_SCHEMA = {"format": int, "layers": [dict], "sha256": str}
REMEDY = "Remove the folder: the next start makes it again."
FORMAT_FIELDS = tuple(field.name for field in fields(Format))


@dataclass(frozen=True)
class LayerFile:
    """One decoder layer's file. `tensors`: {name in the model: (dtype, shape)} in the order of the file; `linears`:
    {path: facts of a QuantizedLinear}; `experts`: {path: shape [E, O, I]} of quantized experts.
    """

    prefix: str
    path: Path
    size: int
    sha256: str
    start: int  # of the tensors' bytes in the file
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    linears: dict[str, dict]
    experts: dict[str, list[int]]

    @property
    def num_bytes(self) -> int:
        return sum(map(bytes_of, self.tensors.values()))


def bytes_of(entry: tuple[torch.dtype, tuple[int, ...]]) -> int:
    dtype, shape = entry
    number = 1
    for size in shape:
        number *= size
    return number * dtype.itemsize


@dataclass(frozen=True)
class PackedCache:
    """The place of a run's packed base, there or not yet. `folder`: of the entry; `asked`: the user named it."""

    root: Path
    folder: Path
    asked: bool = False

    @classmethod
    def of(cls, files: ModelFiles, plan: Parts, saved: Iterable[str], content: list) -> "PackedCache":
        """`saved`: modules that train in full, which stay outside; `content`: what else decides the entry's: the device
        that quantizes, and each parameter of the layers as this version of transformers has it.
        """
        where = plan.memory.packed_cache
        root = cache_folder("packed")
        if where not in ("auto", "none"):
            root = Path(where).expanduser().absolute()
        what: list[Any] = [FORMAT, files.digest, plan.precision.weights, sorted(saved), content]
        what += [package_version(name) for name in ("torch", "transformers")]  # of whose code names and layouts are
        what.append(files.vocabulary and files.vocabulary.size)
        if plan.quantization is not None:
            config = plan.quantization.config
            row = quantization_wrapper.METHODS[config.backend]
            names = ("bits", "group_size", "quant_type", "double_quant", "compute_dtype")
            settings = {name: getattr(config, name) for name in names} | {"method": config.backend}
            package = row.package and package_version(row.package.replace(".", "-"))
            what += [settings, package, _code_digest()]
        key = hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:32]
        folder = root / key
        if os.path.exists(folder) and not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            folder = root / f"{key}-{os.getuid()}"  # beside that of another user, which could not be made again
        return cls(root, folder, where not in ("auto", "none"))

    def open(self) -> "PackedBase | None":
        """The entry, None without one. One that is not as it was written is set aside, with a line."""
        try:
            found = PackedBase.of(self.folder)
        except FileNotFoundError:
            if not self.folder.exists():
                return None
            fact = "a file is missing"
        except (JsonFileError, OSError, ValueError) as error:
            fact = first_line(error)
        else:
            with contextlib.suppress(OSError):
                os.utime(self.folder / META)
            return found
        self.set_aside(fact)
        return None

    def set_aside(self, fact: str, then: str = "it is made again") -> None:
        """Makes way for a new entry where this one is damaged."""
        say(f"  note: the packed base in {self.folder} is not as it was written ({fact}): {then}")
        shutil.rmtree(self.folder, ignore_errors=True)

    def locked(self) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """A context in which no other process makes this entry. It yields a function to call after each layer, so that
        other processes go on waiting.
        """
        return locked_in_cache(self.folder.with_suffix(".lock"), patience_s=LAYER_PATIENCE_S)

    def why_not(self, num_bytes: int) -> str | None:
        """The reason why an entry of this size is not kept; on a full disk the least recently used ones go first."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            others = sorted(self.root.glob(f"*/{META}"), key=lambda meta: meta.stat().st_mtime)
            while not self.asked and others and free_bytes(self.root) < num_bytes + LEAVES_FREE:
                _remove_unless_used(others.pop(0).parent)
            free = free_bytes(self.root)
        except OSError as error:
            return f"{self.root} cannot be written ({error.strerror})"
        if free < num_bytes + LEAVES_FREE:
            return f"{self.root} has {free / 2**30:.1f} GiB free, it needs {(num_bytes + LEAVES_FREE) / 2**30:.1f}"
        return None


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _remove_unless_used(entry: Path) -> None:
    """Removes an entry that no run reads its layers from, see PackedBase.keep."""
    with contextlib.suppress(OSError), locked(entry, wait=False):
        shutil.rmtree(entry, ignore_errors=True)


def _code_digest() -> str:
    """Digest of the code that quantizes: another version of it makes its own entries."""
    folder = Path(quantization_wrapper.__file__).parent / "finetune" / "quantizers"
    files = [Path(quantization_wrapper.__file__), *sorted(folder.glob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


# ---- reading


class PackedBase:
    """An entry on disk. `layers`: in the order of the model."""

    def __init__(self, folder: Path, layers: list[LayerFile]):
        self.folder = folder
        self.layers = layers

    @classmethod
    def of(cls, folder: Path) -> "PackedBase":
        """Raises FileNotFoundError, JsonFileError, OSError, ValueError for what is no entry."""
        content = read_json(folder / META, META_SCHEMA)
        digest = content.pop("sha256")
        if digest != digest_of_content(content):
            raise ValueError(f"{META}: its content has changed")
        if content["format"] != FORMAT:
            raise ValueError(f"{META}: format {content['format']}, this version reads {FORMAT}")
        layers = []
        for entry in content["layers"]:
            path = folder / entry["file"]
            if path.stat().st_size != entry["size"]:
                raise ValueError(f"{entry['file']}: {path.stat().st_size} bytes, {entry['size']} were written")
            tensors = {name: (KINDS[kind], tuple(shape)) for name, (kind, shape) in entry["tensors"].items()}
            kept = {name: entry[name] for name in ("prefix", "size", "sha256", "start", "linears", "experts")}
            layers.append(LayerFile(path=path, tensors=tensors, **kept))
        return cls(folder, layers)

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self.layers)

    def keep(self, user: object) -> None:
        """Marks the entry as one that is read from while `user` lives: no other process removes it for its room."""
        with contextlib.suppress(OSError):
            handle = os.open(self.folder, os.O_RDONLY)
            weakref.finalize(user, os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def outer(self, role: str, name: str) -> LayerFile | None:
        """The file of the embedding or the head `name`, verified; None if there is none as it was written."""
        try:
            entry = read_json(self.folder / f"{role}.json", OUTER_SCHEMA)
            if entry.pop("digest") != digest_of_content(entry):
                return None
            found = _outer_file(self.folder, role, name, entry)
            verify(found)
        except (JsonFileError, OSError, CheckpointDamagedError):
            return None
        return found

    def read(self, layer: LayerFile) -> dict[str, torch.Tensor]:
        """The layer's tensors, in memory of their own. Raises CheckpointDamagedError."""
        found = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in layer.tensors.items()}
        parts = [t.reshape(-1).view(torch.uint8).numpy().data for t in found.values() if t.numel()]
        read_verified(layer, parts)
        return found

    def load(self, model: PreTrainedModel, device: torch.device, cache: PackedCache) -> set[str]:
        """Reads every layer into the model; the names as `install` gives them. Without those from the first damaged
        file on, where there is one: the entry is then set aside.
        """
        given: set[str] = set()
        with Pool(2) as pool:
            waiting = deque(pool.submit(self.read, layer) for layer in self.layers)
            for layer in self.layers:
                try:
                    tensors = waiting.popleft().result()
                except CheckpointDamagedError as error:
                    cache.set_aside(str(error).partition(". Remove")[0], "the next start makes it again")
                    for future in waiting:
                        future.cancel()
                    return given
                given |= self._installed(model, layer, {n: t.to(device) for n, t in tensors.items()})
        return given

    def install(
        self, model: PreTrainedModel, tensors_of: Callable[[LayerFile], Mapping[str, torch.Tensor]]
    ) -> set[str]:
        """Puts every layer's tensors into the model; the names of the parameters that they are, as the files of the
        model name them.
        """
        given: set[str] = set()
        for layer in self.layers:
            given |= self._installed(model, layer, dict(tensors_of(layer)))
        return given

    def _installed(self, model: PreTrainedModel, layer: LayerFile, tensors: dict[str, torch.Tensor]) -> set[str]:
        with untrusted(f"{self.folder / META}: does not fit the model", REMEDY):
            return _install_layer(model, layer, tensors)


def write_outer(folder: Path, role: str, name: str, weight: torch.Tensor) -> None:
    """Writes the file of an embedding or a head `name`. Raises OSError."""
    file = folder / f"{role}.safetensors"
    shape = list(weight.shape)
    kind = KIND_OF[weight.dtype]
    beside = file.with_suffix(".new")
    part = TensorShard(f"{name}.weight", kind, tuple(shape), partial(bytes_as_array, weight))
    written = write_file(beside, [part], durable=False)
    beside.replace(file)
    content = {**written, "start": read_header_and_start(file)[1], "tensor": [kind, shape]}
    with replace_file(folder / f"{role}.json") as out:
        out.write(json.dumps(content | {"digest": digest_of_content(content)}).encode())


def _outer_file(folder: Path, role: str, name: str, entry: dict) -> LayerFile:
    kind, shape = entry["tensor"]
    tensors = {f"{name}.weight": (KINDS[kind], tuple(shape))}
    path = folder / f"{role}.safetensors"
    return LayerFile(name, path, entry["size"], entry["sha256"], entry["start"], tensors, {}, {})


def _install_layer(model: PreTrainedModel, layer: LayerFile, tensors: dict[str, torch.Tensor]) -> set[str]:
    given = set()
    for path, (experts, rows, columns) in layer.experts.items():
        owner, _, leaf = path.rpartition(".")
        module: Any = model.get_submodule(owner)
        delattr(module, leaf)
        parts = [p for p in layer.linears if p.startswith(f"{path}.parts.")]
        setattr(module, leaf, QuantizedExperts.of_parts(experts, rows, columns, len(parts)))
        given.add(path)
    for path, facts in layer.linears.items():
        own = {name: tensors.pop(f"{path}.{name}") for name in facts["names"]}
        linear = linear_of(own, facts)
        model.set_submodule(path, linear.eval())
        given.add(f"{path}.weight")
    for name, tensor in tensors.items():
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        setattr(module, leaf, nn.Parameter(tensor, requires_grad=False))
        given.add(name)
    return given


def linear_of(tensors: dict[str, torch.Tensor], facts: dict) -> QuantizedLinear:
    """The quantized linear of these stored tensors. `facts`: see facts_of."""
    fmt = Format(**{n: facts["fmt"][n] for n in FORMAT_FIELDS[:-1]}, scale_dtype=KINDS[facts["fmt"]["scale_dtype"]])
    shape = (int(facts["shape"][0]), int(facts["shape"][1]))
    module = quantization_wrapper.module_of(facts["method"])
    dequantize = partial(module.dequantize, shape=shape, fmt=fmt)
    return QuantizedLinear(tensors, shape, dequantize, fan_in_fan_out=facts["fan_in_fan_out"])


def facts_of(linear: QuantizedLinear) -> dict:
    """Facts of a quantized linear that a file has beside its tensors."""
    words = linear.dequantize.keywords
    methods = {row.module: word for word, row in quantization_wrapper.METHODS.items()}
    fmt = asdict(words["fmt"]) | {"scale_dtype": KIND_OF[words["fmt"].scale_dtype]}
    return {
        "method": methods[linear.dequantize.func.__module__],
        "shape": [linear.out_features, linear.in_features],
        "fmt": fmt,
        "names": list(linear.names),
        "fan_in_fan_out": linear.fan_in_fan_out,
    }


def read_verified(layer: LayerFile, parts: list[memoryview]) -> None:
    """Reads the bytes of the layer's tensors into `parts`, in their order. Raises CheckpointDamagedError if they are
    not those that were written.
    """
    digest = hashlib.sha256()
    try:
        with open_file(layer.path, "rb", buffering=0) as file:
            digest.update(_exactly(file, bytearray(layer.start)))
            for part in parts:
                for at in range(0, len(part), 2**24):
                    digest.update(_exactly(file, part[at : at + 2**24]))
            is_longer = bool(file.read(1))
    except OSError as error:
        raise unreadable(layer, error.strerror or first_line(error)) from None
    if is_longer or digest.hexdigest() != layer.sha256:
        raise unreadable(layer, "its content has changed (sha256 differs)")


def verify(layer: LayerFile) -> None:
    """Raises CheckpointDamagedError if the file is not as it was written."""
    block = memoryview(bytearray(2**24))
    size = layer.num_bytes
    read_verified(layer, [block[: min(len(block), size - at)] for at in range(0, size, len(block))])


def _exactly(file: Any, out: Any) -> Any:
    """`out`, filled from the file. OSError where the file ends before."""
    view = memoryview(out)
    at = 0
    while at < len(view):
        count = file.readinto(view[at:])
        if not count:
            raise OSError(0, "is cut")
        at += count
    return out


def unreadable(layer: LayerFile, fact: str) -> CheckpointDamagedError:
    return CheckpointDamagedError(f"{layer.path}: {fact}. Remove {layer.path.parent}: the next start makes it again.")


def discard(layer: LayerFile) -> None:
    """Lets the next start make the entry of a damaged file again, whose files stay for who reads them."""
    with contextlib.suppress(OSError):
        (layer.path.parent / META).unlink()


def bytes_as_array(tensor: torch.Tensor) -> Any:
    """The tensor's bytes in host memory, a numpy array."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def digest_of_content(content: dict) -> str:
    """The digest that an entry's JSON has of its own content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
