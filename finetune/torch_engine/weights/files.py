"""A model folder's weight files: tensors by name, plain, sharded, or decoded as they are read."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open

from finetune import safetensors_io
from finetune.errors import PlanError
from finetune.model_files.files import DECODED
from finetune.model_files.vocabulary import Vocabulary
from finetune.system.untrusted import untrusted
from finetune.torch_engine.weights import decoded
from finetune.torch_engine.weights.vocabulary import GrownTensor

GIVE_ANOTHER = "Download the model again, or give the unquantized model it was made from."
PLAIN_KINDS = ("F32", "BF16", "F16", "F64")
# Of tensors that are read by slice: weights that are stored as they are.
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
DTYPES |= {"I8": torch.int8, "U8": torch.uint8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64}
DTYPES |= {"BOOL": torch.bool}


def open_weights(folder: Path | str) -> "WeightFiles":
    """The weight files of a folder already checked by finetune.model_files.files."""
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    how = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config") or {}
    decoding = how if how.get("quant_method") in DECODED else None
    return WeightFiles(files_of(folder), config.get("quantization"), decoding)


def files_of(folder: Path | str) -> list[Path]:
    """The weight files of a folder already checked by finetune.model_files.files."""
    folder = Path(folder)
    whole = folder / "model.safetensors"
    if whole.is_file():
        return [whole]
    if (folder / safetensors_io.INDEX).is_file():
        return safetensors_io.files_of(folder, whole.name)
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    return [folder / name for name in sorted(set(index["weight_map"].values()))]


class WeightFiles:
    """Tensors in a folder's safetensors files, each copied into its own memory when read (nothing stays mmapped)."""

    def __init__(self, files: Sequence[Path], quantization: dict | None = None, decoding: dict | None = None):
        """`quantization`: an MLX folder's; `decoding`: the quantization_config of weights to decode."""
        self.file_of = {}
        self._open = {}
        self._sliced = {}
        self.quantization = quantization or {}
        self.decoded = {}
        self.method = (decoding or {}).get("quant_method")
        self.cut: Mapping = {}  # tensors of sharded checkpoints
        self.grown: dict[str, GrownTensor] = {}  # tensors that are given with more rows
        if safetensors_io.shapes_of(files):
            whole = safetensors_io.sharded_file_of(files[0])
            assert whole is not None, files
            self.cut = safetensors_io.CheckpointTensors(files[0].parent, whole)
            self.file_of = dict.fromkeys(self.cut, files[0])
            return
        for file in files:
            self._open[file] = safe_open(file, framework="pt", backend="pread")
            self._sliced[file] = safetensors_io.SliceReader(file)
            for name in self._open[file].keys():
                if name in self.file_of:
                    raise PlanError(
                        f"{file.parent}: {name} is in {self.file_of[name].name} and in {file.name}. "
                        "Download or save the model again."
                    )
                self.file_of[name] = file
        if decoding:
            stored = {name: (self.kind(name), self.shape(name)) for name in self.file_of}
            with untrusted(f"{files[0].parent}: its quantized tensors do not fit config.json", GIVE_ANOTHER):
                self.decoded = decoded.decoded(stored, decoding)
            self.stored_in = dict(self.file_of)
            self.file_of |= {n: self.stored_in[next(iter(one.parts.values()))] for n, one in self.decoded.items()}
            for part in decoded.parts_of(self.decoded, stored):
                del self.file_of[part]

    def grow(self, name: str, num_rows: int, vocabulary: Vocabulary) -> None:
        """Gives a tensor with rows for the tokens of `vocabulary` from now on."""
        self.grown[name] = GrownTensor(partial(self._stored, name), self.shape(name), num_rows, vocabulary)

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> torch.Tensor:
        """The tensor, or what `index` is of it, reading only that (of a decoded one: all of it)."""
        if name in self.grown:
            return self.grown[name].read(index)
        return self._stored(name, index)

    def _stored(self, name: str, index: tuple[slice, ...] | None = None) -> torch.Tensor:
        if name in self.decoded:
            one = self.decoded[name]
            tensors = {a: self._open[self.stored_in[part]].get_tensor(part) for a, part in one.parts.items()}
            with untrusted(f"{name} cannot be decoded", GIVE_ANOTHER):
                weight = one.formula(**tensors).to(decoded.DTYPE)
                if not weight.isfinite().all():
                    odd = [a for a, t in tensors.items() if t.is_floating_point() and not t.float().isfinite().all()]
                    raise ValueError(f"{one.parts[odd[0]] if odd else name} has numbers that are not finite")
            if index is None:
                return weight.contiguous()
            return weight[index].contiguous()
        if name in self.cut:
            return torch.from_numpy(self.cut[name][... if index is None else index])
        file = self.file_of[name]
        if index is None:
            return self._open[file].get_tensor(name)
        found, shape = self._sliced[file].read(name, index)
        dtype = DTYPES[self.kind(name)]
        if len(found):
            return torch.from_numpy(found).view(dtype).view(shape)
        return torch.empty(shape, dtype=dtype)

    def mlx_format(self, layer: str) -> tuple[int, int]:
        """(bits, group_size) of a layer in an MLX folder, from config.json's `quantization`: its own or the default."""
        own = self.quantization.get(layer)
        if isinstance(own, dict):
            chosen = own
        else:
            chosen = self.quantization
        return chosen["bits"], chosen["group_size"]

    def kind(self, name: str) -> str:
        """The safetensors dtype of a tensor: F32, BF16, U8, ..."""
        if name in self.decoded:
            return "BF16"
        if name in self.cut:
            return self.cut[name].dtype
        return self._open[self.file_of[name]].get_slice(name).get_dtype()

    def shape(self, name: str) -> tuple:
        if name in self.grown:
            return self.grown[name].shape
        if name in self.decoded:
            return self.decoded[name].shape
        if name in self.cut:
            return self.cut[name].shape
        return tuple(self._open[self.file_of[name]].get_slice(name).get_shape())
