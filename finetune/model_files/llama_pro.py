"""LLaMA-Pro block expansion of a model folder (Wu et al. 2024, section 3.2): which layers are copied, and the copying.

Tensors are streamed from safetensors to safetensors as bytes, 16 MiB at a time, without a framework.
finetune/torch_engine/llama_pro.py finds which tensors of a copied layer must be zero.
"""

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from finetune import safetensors_io
from finetune.errors import PlanError
from finetune.system.untrusted import untrusted

RECORD = "llama_pro.json"  # in an expanded folder: lists the added layers
TRAINED = "trained_blocks.safetensors"  # written by a run
SHARD_BYTES = 4 * 2**30
PIECE_BYTES = 16 * 2**20


@dataclass(frozen=True)
class TensorSource:
    """One tensor in a safetensors file; `path` None: zeros."""

    name: str
    dtype: str
    shape: tuple
    path: Path | None
    start: int
    num_bytes: int


def new_positions(num_layers: int, num_new: int) -> list[int]:
    """Layers followed by a copy: the last of each of `num_new` groups of near-equal size."""
    return [(j + 1) * num_layers // num_new - 1 for j in range(num_new)]


def order_of(num_layers: int, copied: list[int]) -> tuple[list[int], list[int]]:
    """(source layer of each layer of the expanded model, indices of the added layers)."""
    order = []
    new = []
    for i in range(num_layers):
        order.append(i)
        if i in copied:
            new.append(len(order))
            order.append(i)
    return order, new


def read_sources(weight_files: Iterable[Path]) -> list[TensorSource]:
    """All tensors of the files, in file order."""
    found = []
    for path in weight_files:
        header, data_start = safetensors_io.read_header_and_start(path)
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                shape = tuple(entry["shape"])
                found.append(TensorSource(name, entry["dtype"], shape, path, data_start + begin, end - begin))
    return found


def layers_prefix(names: Iterable[str], num_layers: int) -> str | None:
    """The tensor name prefix before the layer number; None if no unique prefix counts the layers."""
    numbers: dict[str, set[int]] = {}
    for name in names:
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if at:
            numbers.setdefault(".".join(parts[:at]), set()).add(int(parts[at]))
    found = [prefix for prefix, seen in numbers.items() if seen == set(range(num_layers))]
    if len(found) == 1:
        return found[0]
    return None


def split(name: str, prefix: str) -> tuple[int, str] | None:
    """(layer, rest) of a tensor name; None outside the layers."""
    match = re.match(rf"{re.escape(prefix)}\.(\d+)\.(.+)$", name)
    if match:
        return (int(match[1]), match[2])
    return None


def pattern_of(rest: str) -> str:
    """A tensor's name within its layer, with expert numbers replaced by a wildcard."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", rest)


def expanded(
    tensors: list[TensorSource], prefix: str, order: list[int], new: list[int], zero: Callable[[int, str], bool]
) -> list[TensorSource]:
    """The tensors of the expanded model.
    `zero(source layer, pattern)`: whether that tensor is zero in the added layer.
    """
    inside: dict[int, list[tuple[str, TensorSource]]] = {}
    out = []
    for tensor in tensors:
        at = split(tensor.name, prefix)
        if at is None:
            out.append(tensor)
        else:
            inside.setdefault(at[0], []).append((at[1], tensor))
    for index, source in enumerate(order):
        for rest, t in inside[source]:
            empty = index in new and zero(source, pattern_of(rest))
            if empty:
                path = None
            else:
                path = t.path
            out.append(TensorSource(f"{prefix}.{index}.{rest}", t.dtype, t.shape, path, t.start, t.num_bytes))
    return out


def write(tensors: list[TensorSource], folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes model.safetensors, or shards with an index, from the tensors' source files."""
    shards: list[list[TensorSource]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    if len(shards) == 1:
        _write_file(folder / "model.safetensors", shards[0])
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / name, shard)
        weight_map |= {tensor.name: name for tensor in shard}
    total = sum(t.num_bytes for t in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def _write_file(path: Path, tensors: list[TensorSource]) -> None:
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for t in tensors:
        header[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [offset, offset + t.num_bytes]}
        offset += t.num_bytes
    with open(path, "wb") as out:
        out.write(safetensors_io.encode_header(header))
        for t in tensors:
            left = t.num_bytes
            if t.path is None:
                while left:
                    left -= out.write(bytes(min(left, PIECE_BYTES)))
                continue
            with open(t.path, "rb") as source:
                source.seek(t.start)
                while left:
                    piece = source.read(min(left, PIECE_BYTES))
                    assert piece, f"{t.path} ends inside {t.name}"
                    left -= out.write(piece)


def resized(config: dict, count_key: str, order: list[int]) -> dict:
    """Config of a model with the layers of `order`: updates their number, and every list with one entry per layer."""
    out = json.loads(json.dumps(config))
    if count_key not in out and isinstance(out.get("text_config"), dict):
        text = out["text_config"]
    else:
        text = out
    count = text[count_key]
    for key, value in text.items():
        a_layer = isinstance(value, list) or (isinstance(value, str) and "pattern" in key)
        if a_layer and len(value) == count and key != "architectures" and "token" not in key:
            chosen = [value[i] for i in order]
            text[key] = chosen if isinstance(value, list) else "".join(chosen)
    text[count_key] = len(order)
    return out


def entries_of(config: dict, count_key: str, layer: int) -> str:
    """The config's per-layer entries for one layer."""
    return json.dumps(resized(config, count_key, [layer]), sort_keys=True)


def read_record(folder: Path, said: str) -> dict:
    """{'layers': name prefix, 'new_layers': [...]} of a folder expanded by expand.py or the older script.
    Raises PlanError.
    """
    file = folder / RECORD
    if file.is_file():
        with untrusted(f"{said}: {RECORD} cannot be read", "Expand the model again."):
            record = json.loads(file.read_text(encoding="utf-8"))
            numbers = record["new_layers"]
            plain = isinstance(numbers, list) and all(type(i) is int and i >= 0 for i in numbers)
            if not plain or not numbers or len(set(numbers)) < len(numbers):
                raise ValueError(f"new_layers is {numbers!r}, must be distinct integers >= 0")
            return {**record, "layers": str(record["layers"]), "new_layers": numbers}
    match = re.search(r"blk_exp-(\d+)-(\d+)$", folder.name)
    if match and int(match[2]) > int(match[1]) > 0:
        # The older script added a copy after every `every` layers, and its trainer derived them from the folder name.
        added = int(match[2]) - int(match[1])
        every = int(match[1]) // added
        return {"layers": None, "new_layers": [every + (every + 1) * n for n in range(added)]}
    raise PlanError(
        f"{said}: not an expanded model: it has no {RECORD}, and its name has no blk_exp-<old>-<new>. "
        "Make one with expand.py."
    )


def num_new_blocks(num_layers: int, rate: float) -> int:
    return max(1, math.floor(num_layers * rate))
