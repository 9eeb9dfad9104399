"""Construction of an MLX model from a model folder: mlx-lm's class, weights as on disk, linears quantized one by one.

Names are those on disk, as in transformers: a weight that mlx-lm renames or rebuilds has no name here and does not
train.
"""

import zipfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from finetune.adapters.modules import inside
from finetune.adapters.targets import ROUTERS
from finetune.errors import PlanError, first_line
from finetune.mlx_engine.config import translated
from finetune.mlx_engine.experts import experts_of
from finetune.mlx_engine.layers import AffineLinear, as_bits, as_numpy, leaves
from finetune.mlx_engine.mlx_lm_internals import QuantizedSwitchLinear, SwitchLinear, model_classes
from finetune.mlx_engine.names import check_names, names_on_disk
from finetune.mlx_engine.vocabulary import config_with, grow
from finetune.model_files.config_values import AGAIN
from finetune.model_files.files import weight_files
from finetune.model_files.vocabulary import Vocabulary
from finetune.quantizers import affine
from finetune.safetensors_io import SliceReader, TensorShard
from finetune.system.untrusted import untrusted

STORED = {mx.float32: "F32", mx.bfloat16: "BF16", mx.float16: "F16", mx.bool_: "BOOL"}
STORED |= {
    getattr(mx, f"{kind}{bits}"): f"{kind[0].upper()}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)
}
DTYPES = {"fp32": mx.float32, "bf16": mx.bfloat16, "fp16": mx.float16}


@dataclass
class MLXModel:
    """A loaded model. `names`: {path of a parameter in the MLX model: its name on disk}, without those that changed.

    `base` returns hidden states for token ids; `head` is the output layer, None if the embedding is tied to it.
    `saved`: names of the modules that train in full beside adapters.
    """

    model: nn.Module
    config: dict
    names: dict[str, str]
    folder: Path
    saved: tuple[str, ...] = ()

    @property
    def _inner(self):
        """The language model of a multimodal one."""
        return getattr(self.model, "language_model", self.model)

    @property
    def base(self):
        return getattr(self._inner, "model", None)

    @property
    def head(self):
        return getattr(self._inner, "lm_head", None)

    @property
    def embedding(self):
        """The input embeddings: those with a row per token, where there are others."""
        found = [m for _, m in self.model.named_modules() if isinstance(m, nn.Embedding | nn.QuantizedEmbedding)]
        rows = (self.config.get("text_config") or self.config).get("vocab_size")
        return next((m for m in found if len(m.weight) == rows), found[0])

    @property
    def hidden_size(self) -> int:
        """Numbers that the input embeddings give of a token."""
        return (self.config.get("text_config") or self.config).get("hidden_size") or self.embedding.weight.shape[1]

    @property
    def layers(self) -> list:
        return self.model.layers

    @property
    def has_experts(self) -> bool:
        return any(isinstance(m, SwitchLinear | QuantizedSwitchLinear) for _, m in self.model.named_modules())

    def linears(self) -> dict[str, str]:
        """{name on disk: path} of the linears that can be quantized and adapted: not the head, routers or gates."""
        routed = self.has_experts
        found = {}
        for path, module in self.model.named_modules():
            name = self.names.get(f"{path}.weight", "").removesuffix(".weight")
            if not isinstance(module, nn.Linear | nn.QuantizedLinear) or module is self.head or not name:
                continue
            if module.weight.shape[0] > 1 and not (routed and ROUTERS & set(name.split(".")[-2:])):
                found[name] = path
        return found

    def experts(self) -> dict[str, str]:
        """{name of a fused weight of experts, as transformers has it: path of its experts}, see experts_of."""
        return experts_of(self.model, self.model.model_type)

    def shapes_of_ends(self) -> dict[str, tuple]:
        """{path: shape} of the weights with a row per token: of the input embeddings, and the head."""
        found: dict[str, tuple] = {}
        for module in [self.embedding, *([] if self.head is None else [self.head])]:
            path = self.path_of(module)
            found |= {f"{path}.{leaf}": module[leaf].shape for leaf in ("weight", "bias") if leaf in module}
        return found

    def replace(self, path: str, module: nn.Module) -> None:
        self.model.update_modules(tree_unflatten([(path, module)]))

    def path_of(self, module: nn.Module) -> str:
        return next(path for path, own in self.model.named_modules() if own is module)

    def is_of(self, module: nn.Module, path: str) -> bool:
        """True if a parameter is the module's."""
        return path.rpartition(".")[0] == self.path_of(module)

    def name_of(self, module: nn.Module) -> str:
        """The module's name on disk. Raises PlanError if it has none."""
        path = self.path_of(module)
        name = self.names.get(f"{path}.weight")
        if name is None:
            raise PlanError(
                f"--model_name: mlx-lm rebuilds {path} while loading, so a checkpoint could not name it. Use --backend "
                "cpu."
            )
        return name.removesuffix(".weight")

    def module(self, path: str):
        return dict(self.model.named_modules())[path]


def load(
    folder: Path, config: dict, dtype: mx.Dtype, dequantizes: bool, vocabulary: Vocabulary | None = None
) -> MLXModel:
    """The model of a folder in `dtype`, frozen, its quantized linears as AffineLinear. Raises PlanError.

    `dequantizes`: see AffineLinear; `vocabulary`: with new tokens. The weights are read lazily: none is in memory until
    it is evaluated.
    """
    said = f"--model_name {folder}"
    config = config_with(translated(config), vocabulary)
    try:
        model_class, args_class = model_classes(config)
    except ValueError:
        raise PlanError(
            f"{said}: mlx-lm has no model of type {config['model_type']}. Use --backend cpu, or a newer mlx-lm."
        ) from None
    except TypeError as error:  # mlx-lm looks names up without a look at their type
        raise PlanError(
            f"{said}/config.json: mlx-lm does not take it ({first_line(error)}). Get the model's files again."
        ) from error
    try:
        model = model_class(args_class.from_dict(config))
    except (ValueError, TypeError, KeyError, AssertionError) as error:
        raise PlanError(
            f"{said}: mlx-lm's {config['model_type']} does not take this config.json ({first_line(error)}). "
            "Use --backend cpu."
        ) from error
    read = read_weights(Path(folder))
    if hasattr(model, "sanitize"):
        weights = model.sanitize(dict(read))
    else:
        weights = dict(read)
    if config.get("quantization"):
        quantize_as_stored(model, weights, config["quantization"])
    loaded = MLXModel(model, config, names_on_disk(read, weights), Path(folder))
    if vocabulary:
        grow(weights, loaded.shapes_of_ends(), vocabulary, said)
    check_names(model, weights, said)
    model.eval()
    model.load_weights(list(weights.items()), strict=True)
    _cast(loaded, dtype, dequantizes)
    model.freeze()
    _evaluate_constants(model)
    return loaded


def _evaluate_constants(model: nn.Module) -> None:
    """Evaluates what a model computes of its config alone, such as RoPE's frequencies: as long as it is lazy it belongs
    to the stream of the thread that loads, and steps run in another.
    """
    constants = [value for module in model.modules() for name, value in module.items() if name.startswith("_")]
    mx.eval([value for value in constants if isinstance(value, mx.array)])


def read_weights(folder: Path) -> dict[str, mx.array]:
    """{name on disk: array, read when it is evaluated}, of the files that the digest is of. Raises PlanError."""
    weights: dict[str, mx.array] = {}
    said = f"--model_name {folder}"
    for file in weight_files(folder, said):
        with untrusted(f"{said}: {file.name} is damaged", AGAIN):
            if file.suffix == ".npz":  # MLX reads on evaluation, where a wrong checksum is an error of its own
                with zipfile.ZipFile(file) as archive:
                    if bad := archive.testzip():
                        raise ValueError(f"the checksum of {bad} differs")
            held: Any = mx.load(str(file))
        weights |= held
    return weights


def left_in_files(loaded: MLXModel, trained: Collection[str] | None = None) -> dict[str, TensorShard]:
    """{tensor of the files that is no part of a model whose every weight has a name: it, as stored}. With `trained`:
    that is none of these.

    A head tied to the embedding is none: what is trained is the embedding.
    """
    found = {
        tensor.name: tensor for file in weight_files(loaded.folder, str(loaded.folder)) for tensor in _stored_in(file)
    }
    part = set(loaded.names.values() if trained is None else trained)
    if loaded.head is None:
        part |= {name for name in found if name.split(".")[-2:-1] == ["lm_head"]}
    return {name: tensor for name, tensor in found.items() if name not in part}


def _stored_in(file: Path) -> Iterator[TensorShard]:
    """The tensors of a file as it holds them, each read once it is asked for."""
    if file.suffix == ".npz":
        held: Any = mx.load(str(file))
        for name, array in held.items():
            yield TensorShard(name, STORED[array.dtype], tuple(array.shape), partial(as_bits, array))
        return
    reader = SliceReader(file)
    for name, entry in reader.header.items():
        if name != "__metadata__":
            yield TensorShard(name, entry["dtype"], tuple(entry["shape"]), partial(_whole, reader, name))


def _whole(reader: SliceReader, name: str) -> np.ndarray:
    return reader.read(name, ())[0]


def quantize_as_stored(model: Any, weights: dict, stored: dict) -> None:
    """Gives the layers that are stored quantized the classes that hold such weights."""

    def predicate(path: str, module: nn.Module):
        if path in stored:
            return stored[path]
        return hasattr(module, "to_quantized") and f"{path}.scales" in weights

    nn.quantize(
        model, stored["group_size"], stored["bits"], mode=stored.get("mode", "affine"), class_predicate=predicate
    )


def _cast(loaded: MLXModel, dtype: mx.Dtype, dequantizes: bool) -> None:
    """Casts plain floating weights to `dtype`; packed ones stay as stored, in layers of our own."""
    for path, module in list(loaded.model.named_modules()):
        if isinstance(module, nn.QuantizedLinear):
            own = AffineLinear.of(
                module.weight,
                module.scales,
                module.get("biases"),
                module.get("bias"),
                module.group_size,
                module.bits,
                module.mode,
                dequantizes,
            )
            loaded.replace(path, own)
    packed = {p for p, m in loaded.model.named_modules() if "scales" in m}
    plain = [
        (path, array.astype(dtype))
        for path, array in leaves(loaded.model.parameters())
        if mx.issubdtype(array.dtype, mx.floating) and path.rpartition(".")[0] not in packed
    ]
    loaded.model.update(tree_unflatten(plain))


def quantize(loaded: MLXModel, bits: int, group_size: int, mode: str, dequantizes: bool) -> None:
    """Quantizes the linears one by one; affine codes come from quantizers/affine.py, as the torch engine's do."""
    for name, path in loaded.linears().items():
        if inside(name, loaded.saved):
            continue
        linear = loaded.module(path)
        if isinstance(linear, nn.QuantizedLinear):
            continue
        if mode == "affine":
            try:
                codes = affine.quantize(as_numpy(linear.weight), bits, group_size)
            except ValueError as error:
                raise PlanError(f"--quantization_backend mlx: {name}: {error}. Use --group_size 32.") from None
            words = mx.array(codes[0])
            scales, biases = (mx.array(each).astype(linear.weight.dtype) for each in codes[1:])
        else:  # formats without biases give two arrays
            words, scales, biases = (*mx.quantize(linear.weight, group_size, bits, mode=mode), None)[:3]
        bias = linear.get("bias")
        own = AffineLinear.of(words, scales, biases, bias, group_size, bits, mode, dequantizes)
        mx.eval(own.parameters())
        loaded.replace(path, own)


def parameter_count(module: nn.Module) -> int:
    """Parameters of a model; a packed weight counts as those it represents."""
    total = 0
    for _, m in module.named_modules():
        for name, value in m.items():
            if (
                isinstance(value, mx.array)
                and not name.startswith("_")
                and not ("scales" in m and name in ("scales", "biases"))
            ):
                total += value.size * 32 // m.bits if "scales" in m and name == "weight" else value.size
    return total
