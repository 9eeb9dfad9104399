"""Full and sharded tensors in safetensors files: streamed writes, one tensor at a time, and reads by slice.

The header of each rank's file gives the offset of its shards in the full tensors; `parts.json` collects these
headers for readers. No file is ever fully in memory. See docs/checkpoint_format.md.

Not torch.distributed.checkpoint's HuggingFace writer: it takes offsets from DTensors, and tensor-parallel and pipeline
shards are plain tensors here; and runs without torch must read the same files.
"""

import hashlib
import json
import os
import re
import struct
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from finetune.errors import NonFiniteError, PlanError
from finetune.system.files import check_inside, is_plain_name, outside
from finetune.system.json_files import JsonFileError, read_json
from finetune.system.untrusted import untrusted

INDEX = "parts.json"
INDEX_SCHEMA = {
    "files": {str: {"size": int, "sha256": str}},
    "tensors": {str: {str: {"dtype": str, "shape": [int], "parts": [{"file": str, "offset": [int], "shape": [int]}]}}},
}
BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
FROM_NUMPY = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
HASHED_AT_ONCE = 2**24
RANK = re.compile(r"-rank\d+(?=\.safetensors$)")


@dataclass(frozen=True)
class TensorShard:
    """A shard: `shape` at `offset` of a full tensor of shape `whole`. `read()` returns its array, freed once written.
    `dtype` is the safetensors name.
    """

    name: str
    dtype: str
    shape: tuple
    read: Callable[[], np.ndarray]
    offset: tuple | None = None
    whole: tuple | None = None

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * BYTES[self.dtype]


def shards_of_arrays(arrays: dict) -> list[TensorShard]:
    return [
        TensorShard(name, FROM_NUMPY[str(a.dtype)], tuple(a.shape), partial(np.ascontiguousarray, a))
        for name, a in arrays.items()
    ]


def file_of_rank(file: str, rank: int) -> str:
    """Name of a rank's shard file that replaces the single file `file`."""
    return f"{file.removesuffix('.safetensors')}-rank{rank:05d}.safetensors"


# ---- writing


def header_of(parts: list[TensorShard]) -> tuple[bytes, dict[str, int]]:
    """(safetensors header bytes, file offset of each tensor). Sorted by dtype width, so that all are aligned."""
    metadata = {"format": "pt"}
    header: dict[str, dict] = {"__metadata__": metadata}
    at = 0
    cut = {p.name: [p.offset, p.whole] for p in parts if p.whole is not None}
    if cut:
        metadata["parts"] = json.dumps(cut)
    for p in _in_order(parts):
        header[p.name] = {"dtype": p.dtype, "shape": list(p.shape), "data_offsets": [at, at + p.num_bytes]}
        at += p.num_bytes
    encoded = encode_header(header)
    starts = {name: len(encoded) + e["data_offsets"][0] for name, e in header.items() if name != "__metadata__"}
    return encoded, starts


def _in_order(parts: list[TensorShard]) -> list[TensorShard]:
    return sorted(parts, key=lambda p: (-BYTES[p.dtype], p.name))


def write_file(path: Path, parts: list[TensorShard], durable: bool = True) -> dict:
    """Writes the file one tensor at a time; {"size", "sha256"}. `durable`: fsyncs it.
    NonFiniteError if a tensor is not finite.
    """
    digest = hashlib.sha256()
    size = 0
    with open(path, "wb") as file:

        def put(data: memoryview) -> None:
            nonlocal size
            for start in range(0, len(data), HASHED_AT_ONCE):
                piece = data[start : start + HASHED_AT_ONCE]
                digest.update(piece)
                file.write(piece)
            size += len(data)

        put(memoryview(header_of(parts)[0]))
        for p in _in_order(parts):
            array = p.read()
            assert array.nbytes == p.num_bytes, (p.name, array.shape, p.shape)
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise NonFiniteError(f"{path.name}: tensor {p.name} is not finite; nothing was saved")
            if array.size:
                put(array.reshape(-1).view(np.uint8).data)
            del array
        file.flush()
        if durable:
            os.fsync(file.fileno())
    return {"size": size, "sha256": digest.hexdigest()}


def digest_of(path: Path) -> str:
    """sha256 of a file, as write_file returns it."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(2**20))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def index_of(folder: Path, written: dict[str, dict]) -> dict:
    """Content of parts.json for the shard files in `folder`, from their headers. `written`: {file: size and digest}."""
    files: dict[str, dict] = {}
    for name in sorted(written):
        header = read_header(folder / name)
        places = json.loads(header.pop("__metadata__")["parts"])
        tensors = files.setdefault(RANK.sub("", name), {})
        for tensor, entry in header.items():
            offset, whole = places[tensor]
            tensor_entry = tensors.setdefault(tensor, {"dtype": entry["dtype"], "shape": whole, "parts": []})
            assert (tensor_entry["dtype"], tensor_entry["shape"]) == (entry["dtype"], whole), (tensor, name)
            tensor_entry["parts"].append({"file": name, "offset": offset, "shape": entry["shape"]})
    for tensors in files.values():
        for tensor, entry in tensors.items():
            held = sum(prod(part["shape"]) for part in entry["parts"])
            assert held == prod(entry["shape"]), f"{tensor}: {held} numbers of {entry['shape']}"
    return {"files": written, "tensors": files}


def read_header(path: Path) -> dict:
    """{tensor: {"dtype", "shape", "data_offsets"}} and "__metadata__" of a safetensors file."""
    return read_header_and_start(path)[0]


def read_header_and_start(path: Path) -> tuple[dict, int]:
    """(header, byte at which the tensors' data begins)."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length)), 8 + length


def encode_header(header: dict) -> bytes:
    """Length and JSON of a header, padded so that the data after it is aligned."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


# ---- reading


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """{name: fp32 array} of a file of floats, as adapters are. PlanError if it is damaged, or a number not finite."""
    from safetensors import deserialize

    check_inside(path)
    with untrusted(f"{path}: is damaged", "Give a complete checkpoint."):
        arrays = {name: _widened(entry) for name, entry in deserialize(path.read_bytes())}
    return {name: _finite(array, name, path) for name, array in arrays.items()}


class SliceReader:
    """Reads slices of a file's tensors, and no other bytes of it: safetensors' own slices of a file that is not mapped
    read the full tensor first. The header must have been checked, as safe_open does.
    """

    def __init__(self, path: Path):
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)
        self.header, self.start = read_header_and_start(path)

    def read(self, name: str, index: tuple[slice, ...]) -> tuple[np.ndarray, list[int]]:
        """(bytes, shape) of what `index`, of slices without steps, selects of a tensor.
        ValueError if the file ends before.
        """
        entry = self.header[name]
        shape = entry["shape"]
        width = BYTES[entry["dtype"]]
        spans = [range(*s.indices(n)) for s, n in zip(index, shape, strict=False)]
        spans += [range(n) for n in shape[len(spans) :]]
        partly = [i for i, (span, n) in enumerate(zip(spans, shape, strict=True)) if len(span) < n]
        # each run of bytes is a span of this dimension
        outer = 0
        if partly:
            outer = partly[-1]
        strides = [width * prod(shape[i + 1 :]) for i in range(len(shape))]
        out = np.empty(prod(map(len, spans)) * width, np.uint8)
        length = len(spans[outer]) * strides[outer]
        at = 0
        first = self.start + entry["data_offsets"][0] + spans[outer].start * strides[outer]
        for place in product(*spans[:outer]):
            self._fill(out[at : at + length], first + sum(i * n for i, n in zip(place, strides, strict=False)))
            at += length
        return out, list(map(len, spans))

    def _fill(self, out: np.ndarray, offset: int) -> None:
        done = 0
        view = out.data
        while done < len(out):
            read = os.preadv(self.descriptor, [view[done:]], offset + done)
            if not read:
                raise ValueError(f"{self.path.name} ends before its tensors do")
            done += read


class FloatTensors(Mapping):
    """{name: fp32 array} of a file of floats, each read when it is asked for. PlanError as of `read_tensors`."""

    def __init__(self, path: Path):
        from safetensors import safe_open

        check_inside(path)
        self.path = path
        with untrusted(f"{path}: is damaged", "Give a complete checkpoint."):
            with safe_open(path, framework="numpy"):  # checks the offsets
                self.header, self.start = read_header_and_start(path)
            self.header.pop("__metadata__", None)
            for entry in self.header.values():
                if entry["dtype"] not in ("F64", "F32", "F16", "BF16"):
                    raise ValueError(f"it holds {entry['dtype']}, must hold floats")
        self.shapes = {name: tuple(entry["shape"]) for name, entry in self.header.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        entry = self.header[name]
        start, end = entry["data_offsets"]
        with open(self.path, "rb") as file:
            file.seek(self.start + start)
            data = file.read(end - start)
        with untrusted(f"{self.path}: is damaged", "Give a complete checkpoint."):
            array = _widened({"dtype": entry["dtype"], "shape": entry["shape"], "data": data})
        return _finite(array, name, self.path)

    def __iter__(self):
        return iter(self.header)

    def __len__(self) -> int:
        return len(self.header)


def _finite(array: np.ndarray, name: str, path: Path) -> np.ndarray:
    if not np.isfinite(array).all():
        raise PlanError(f"{path}: {name[:200]} has numbers that are not finite. Give a complete checkpoint.")
    return array


def _widened(entry: dict) -> np.ndarray:
    if entry["dtype"] == "BF16":
        wide = np.frombuffer(entry["data"], np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).reshape(entry["shape"])
    if entry["dtype"] not in ("F64", "F32", "F16"):
        raise ValueError(f"it holds {entry['dtype']}, must hold floats")
    array = np.frombuffer(entry["data"], NUMPY[entry["dtype"]]).reshape(entry["shape"])
    if array.dtype == np.float32 and array.flags.writeable:
        return array
    return array.astype(np.float32)


class StoredTensor:
    """A lazy tensor on disk with numpy's `shape` and slicing: reads only the requested region."""

    def __init__(self, shape: tuple, dtype: str, places: list):
        self.shape = tuple(shape)
        self.dtype = dtype
        self.places = places  # [(open file, name, offset, shape)]

    def __getitem__(self, region: Any) -> np.ndarray:
        if region is Ellipsis:
            region = ()
        elif not isinstance(region, tuple):
            region = (region,)
        region += (slice(None),) * (len(self.shape) - len(region))
        spans = [s.indices(n)[:2] for s, n in zip(region, self.shape, strict=True)]
        whole = None
        for file, name, offset, shape in self.places:
            # Intersection of this shard and the requested region, in coordinates of the full tensor.
            ends = [(max(a, o), min(b, o + n)) for (a, b), o, n in zip(spans, offset, shape, strict=True)]
            if any(a >= b for a, b in ends):
                continue
            part = _read(file, name, [slice(a - o, b - o) for (a, b), o in zip(ends, offset, strict=True)])
            if ends == spans:
                return part
            if whole is None:
                whole = np.empty([b - a for a, b in spans], part.dtype)
            whole[tuple(slice(a - s, b - s) for (a, b), (s, _) in zip(ends, spans, strict=True))] = part
        if whole is None:  # an empty region
            whole = np.empty([max(0, b - a) for a, b in spans], NUMPY[self.dtype])
        return whole


NUMPY = {word: name for name, word in FROM_NUMPY.items()}


def _read(file: Any, name: str, region: list) -> np.ndarray:
    if region:
        return file.get_slice(name)[tuple(region)]
    return file.get_tensor(name)


class CheckpointTensors(Mapping):
    """{name: Stored} for the tensors of `file` in a checkpoint: in that single file or in the shards of parts.json."""

    def __init__(self, folder: Path, file: str):
        from safetensors import safe_open

        if (folder / file).is_file():
            one = safe_open(folder / file, framework="numpy")
            header = read_header(folder / file)
            header.pop("__metadata__", None)
            self.tensors = {
                name: StoredTensor(e["shape"], e["dtype"], [(one, name, (0,) * len(e["shape"]), e["shape"])])
                for name, e in header.items()
            }
            return
        tensors = read_index(folder, file)["tensors"].get(file, {})
        opened = {}
        for name in sorted({p["file"] for entry in tensors.values() for p in entry["parts"]}):
            opened[name] = safe_open(folder / name, framework="numpy")
        self.tensors = {
            name: StoredTensor(
                e["shape"], e["dtype"], [(opened[p["file"]], name, p["offset"], p["shape"]) for p in e["parts"]]
            )
            for name, e in tensors.items()
        }

    def __getitem__(self, name: str) -> StoredTensor:
        return self.tensors[name]

    def __iter__(self):
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def read_index(folder: Path, only: str | None = None) -> dict:
    """Content of parts.json, see index_of: each tensor's numbers are given once, by shards as their files hold them.
    Raises JsonFileError naming file and tensor. `only`: the single file whose tensors are read.
    """
    index = read_json(folder / INDEX, INDEX_SCHEMA)
    for file, tensors in index["tensors"].items():
        if only not in (None, file):
            continue
        shards: dict[str, dict] = {}
        for tensor, entry in tensors.items():
            label = f"{folder / INDEX}: {file}'s {tensor[:80]}"
            _check_tiling(entry, label)
            for part in entry["parts"]:
                place = entry["dtype"], part["shape"], part["offset"], entry["shape"]
                shards.setdefault(part["file"], {})[tensor] = place
        for name, held in shards.items():
            _check_shards(folder, name, held)
    return index


def _check_tiling(entry: dict, label: str) -> None:
    """Raises JsonFileError unless the shards are a grid over the full tensor: all of it, and nothing twice."""
    shape = entry["shape"]
    parts = entry["parts"]
    for part in parts:
        if not len(part["offset"]) == len(part["shape"]) == len(shape):
            raise JsonFileError(f"{label}: a shard of {part['shape']} at {part['offset']} is not one of {shape}")
    held = [part for part in parts if prod(part["shape"])]
    axes = [sorted({(p["offset"][i], p["offset"][i] + p["shape"][i]) for p in held}) for i in range(len(shape))]
    joined = all(
        [*(start for start, _ in spans), size] == [0, *(end for _, end in spans)]
        for spans, size in zip(axes, shape, strict=True)
    )
    distinct = len({tuple(part["offset"]) for part in held})
    if prod(shape) and not (joined and len(held) == distinct == prod(map(len, axes))):
        numbers = sum(prod(part["shape"]) for part in held)
        fact = "as many numbers, but not each once"
        if numbers != prod(shape):
            fact = f"{numbers} numbers"
        raise JsonFileError(f"{label}: its shards give {fact} of {shape}")


def _check_shards(folder: Path, name: str, tensors: dict[str, tuple]) -> None:
    """Raises JsonFileError unless the file is in the folder and its header has these shards.
    `tensors`: {name: (dtype, shape, offset, full shape)}.
    """
    from safetensors import safe_open

    path = folder / name[:255]
    label = f"{folder / INDEX}: names {name[:80]!r}"
    if not is_plain_name(name):
        raise JsonFileError(f"{label}, which is not a plain file name")
    if not path.is_file():
        raise JsonFileError(f"{label}, which is missing")
    if target := outside(path):
        raise JsonFileError(f"{label}, which links to {target}, outside the folder")
    with untrusted(f"{path}: cannot be read", "Give another checkpoint."), safe_open(path, framework="numpy") as file:
        names = set(file.keys())
        places = json.loads((file.metadata() or {}).get("parts", "{}"))
        for tensor, wanted in tensors.items():
            stored = None
            if tensor in names:
                stored = file.get_slice(tensor)
            held = stored and (stored.get_dtype(), stored.get_shape(), *places.get(tensor, (None, None)))
            if held != wanted:
                fact = "it is not there"
                if held:
                    fact = f"it is {_place(*held)}"
                raise JsonFileError(f"{label} for {tensor[:80]} {_place(*wanted)}: {fact}")


def _place(dtype: str, shape: list, offset: list, whole: list) -> str:
    return f"{dtype} {shape} at {offset} of {whole}"


def files_of(folder: Path, file: str) -> list[Path]:
    """The shard files that hold the tensors of `file`; empty without a parts.json."""
    if not (folder / INDEX).is_file():
        return []
    tensors = read_index(folder, file)["tensors"].get(file, {})
    return sorted({folder / p["file"] for entry in tensors.values() for p in entry["parts"]})


def sharded_file_of(path: Path) -> str | None:
    """The single file that this rank's shard file replaces; None for any other file."""
    file = RANK.sub("", path.name)
    return file if file != path.name and (path.parent / INDEX).is_file() else None


def shapes_of(files: Sequence[Path]) -> dict[str, tuple[int, ...]]:
    """{tensor: full shape} if the files are shards, else {}."""
    file = None
    if files:
        file = sharded_file_of(Path(files[0]))
    if file is None:
        return {}
    tensors = read_index(Path(files[0]).parent, file)["tensors"][file]
    return {name: tuple(entry["shape"]) for name, entry in tensors.items()}
