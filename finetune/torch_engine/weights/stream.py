"""Streams weights from safetensors into a model built on the meta device, casting and quantizing a few at a time.

transformers' conversion mapping determines which tensors in the files form which parameter. At most `workers` weights
are in memory unquantized at any time.
"""

import contextlib
import hashlib
import re
import threading
from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

import quantization_wrapper
from finetune.adapters.heads import HeadRecord
from finetune.errors import PlanError
from finetune.model_files import mtp
from finetune.model_files.files import dtype_in
from finetune.model_files.published import verified
from finetune.model_files.vocabulary import Vocabulary
from finetune.parts.engine_limits import MAX_LOADING_WORKERS
from finetune.quantizers.linear import QuantizedLinear
from finetune.system.progress import Progress
from finetune.system.threads import Pool
from finetune.system.untrusted import untrusted
from finetune.torch_engine import heads, memory_stats, transformers_internals
from finetune.torch_engine.experts import fused
from finetune.torch_engine.weights import modalities, prequantized
from finetune.torch_engine.weights.files import DTYPES as STORED_KINDS
from finetune.torch_engine.weights.files import PLAIN_KINDS, WeightFiles, files_of, open_weights
from finetune.torch_engine.weights.interfaces import LoadedShards, PackedLayers
from finetune.torch_engine.weights.vocabulary import grow, set_vocabulary
from quantization_wrapper import QuantizationConfig

_building = threading.Lock()
PARAMETER_BYTES = 1 << 28  # at least so large an uninitialized tensor is a parameter: no class fills such a buffer


class _LargeOnMeta(TorchFunctionMode):
    """Puts large uninitialized tensors on meta as they are made.

    The experts of a layer of DeepSeek-V3 are one tensor of 30 GB in fp32, which a machine with less memory refuses.
    """

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None):
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None and kwargs.get("out") is None:
            made = func(*args, **(kwargs | {"device": "meta", "pin_memory": False}))
            if made.nbytes >= PARAMETER_BYTES:
                return made
        return func(*args, **kwargs)


@contextlib.contextmanager
def _parameters_on_meta():
    """Context in which this thread builds modules with parameters on meta.

    Buffers are real, so computed ones survive.

    torch has no hook for it, so nn.Module's own method is replaced meanwhile. accelerate's init_empty_weights does so
    for every thread, and modules that others build while weights stream in would have none.
    """
    with _building:
        register = nn.Module.register_parameter
        builder = threading.get_ident()

        def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None):
            if parameter is not None and threading.get_ident() == builder:
                parameter = nn.Parameter(parameter.data.to("meta"), requires_grad=parameter.requires_grad)
            register(module, name, parameter)

        module_class: Any = nn.Module
        module_class.register_parameter = register_on_meta
        try:
            with _LargeOnMeta():
                yield
        finally:
            module_class.register_parameter = register


def empty_model(
    folder: Path | str, dtype: torch.dtype, vocabulary: Vocabulary | None = None, sees_images: bool = False
):
    """Builds the folder's model with parameters on the meta device. Remote code is never run. Raises PlanError.
    `vocabulary`: its embeddings and head have rows for these tokens. `sees_images`: with its towers for images.
    """
    transformers.logging.set_verbosity_error()
    fact = f"--model_name {folder}: its config.json is not that of a causal language model"
    with untrusted(fact, "Give another model, or a newer transformers."):
        try:
            model = _built(folder, dtype, vocabulary, attn_implementation="sdpa")
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error) and "sdpa" not in str(error).lower():
                raise
            model = _built(folder, dtype, vocabulary)
    modalities.leave_out_towers(model, sees_images)
    model.name_or_path = str(folder)
    model.vocabulary = vocabulary
    heads.add_empty(model, HeadRecord.read(Path(folder)))
    return model.eval().requires_grad_(False)


def _built(folder: Path | str, dtype: torch.dtype, vocabulary: Vocabulary | None, **options: Any):
    config = transformers.AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    set_vocabulary(config, vocabulary)
    # Prequantized formats are read by prequantized.py, not by transformers.
    modalities.forget_quantization(config)
    with _parameters_on_meta():
        return modalities.auto_class(config).from_config(config, dtype=dtype, trust_remote_code=False, **options)


def load_dense(folder: Path | str, dtype: torch.dtype, device: torch.device | str = "cpu"):
    """Loads the folder's model with dense weights in `dtype`, in eval mode. Missing weights are an error."""
    model = empty_model(folder, dtype)
    load_weights(model, folder, dtype, torch.device(device), {})
    return model.requires_grad_(True)


def config_dtype(config: dict) -> torch.dtype:
    """The dtype in the config of a model's files (ModelFiles.config); fp32 without one."""
    return getattr(torch, dtype_in(config) or "float32")


@dataclass
class _WeightTask:
    """One or more parameters loaded together: by name, or by a conversion of several tensors."""

    target: str
    names: list = field(default_factory=list)
    mapping: Any = None  # transformers' WeightConverter, with its source tensors collected


def load_weights(
    model: PreTrainedModel,
    folder: Path | str,
    dtype: torch.dtype,
    device: torch.device,
    quantized: dict,
    workers: int = -1,
    hold: Callable | None = None,
    local_shards: LoadedShards | None = None,
    residual: Any = None,
    packed: PackedLayers | None = None,
) -> list[str]:
    """Loads every parameter of `model` (on meta) from the folder's files onto `device`; returns warnings to print.

    `local_shards`: this rank's part of each tensor; the parameters then stay on meta. None: the full model.
    `residual`: subtracts initial adapters from full matrices before they are quantized, see lora.init. `packed`: gives
    the layers, or is given each as it is loaded, see packed_base.

    `quantized`: {parameter name: QuantizationConfig} of weights to quantize. `hold(module, name, tensor, config)`
    stores those that are not weights of linears. `workers`: weights in flight; -1: by the number of cores. Raises
    PlanError for weights that are missing, of another shape, or in an unsupported format.
    """
    checkpoint = open_weights(folder)
    wanted = model.state_dict()
    weights, extra = assign_tensors(model, checkpoint, wanted)
    grow(model, checkpoint, weights)
    label = f"--model_name {model.name_or_path}"
    check_tensors(label, checkpoint, weights, wanted)
    place = WeightLoader(model, checkpoint, dtype, device, quantized, hold, label, local_shards, residual)
    place.compare_tied(weights)
    provided = {t for w in weights for t in place.targets_of(w)}
    missing = set(wanted) - provided
    with verified(Path(folder), files_of(folder)):
        # One at a time where random numbers are drawn, in the order of the layers.
        wanted_here = [w for w in weights if place.wants(w)]
        given = _run_with_layers(place, wanted_here, 1 if residual else workers, packed)
    provided |= given
    missing |= {name for name, p in model.named_parameters() if place.lacks(name, p, provided)}
    tied = set(model.all_tied_weights_keys)
    missing |= place.same_tied()
    missing -= _share_quantized(model)
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    apart = sorted(tied - set(model.all_tied_weights_keys))
    lost = sorted(name for name, p in model.named_parameters() if place.lacks(name, p, provided))
    if lost:
        raise PlanError(
            f"{label}: lacks {len(lost)} weights that its config requires, such as {lost[0]}. "
            "Give a folder whose weights fit its config.json."
        )
    for module in model.modules():
        module._buffers |= {n: b if b is None else b.to(device) for n, b in module._buffers.items()}
    if local_shards is not None:
        local_shards.forget_all_but(model.parameters())
    return leave_in_files(model, extra, checkpoint, apart)


def leave_in_files(model: Any, extra: dict[str, str], checkpoint: WeightFiles, apart: list[str]) -> list[str]:
    """Records in `model.left_in_files` {tensor of the files that is no part of the loaded model: whether it is of a
    tower}, which full folders keep; what to say of a folder's tensors.
    `extra`: {unused tensor: the name it would have}; `apart`: names that config.json ties to others, and files do not.
    """
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    towers = tuple(f"{name}." for name in model.left_out)
    kept = [n for n in extra if checkpoint.kind(n) in STORED_KINDS and prequantized.parts(n, checkpoint) is None]
    model.left_in_files = {name: bool(towers) and extra[name].startswith(towers) for name in kept}
    num_layers = getattr(modalities.text_config(model.config), "num_hidden_layers", None)
    in_towers = [name for name, of_tower in model.left_in_files.items() if of_tower]
    of_mtp = [name for name, of_tower in model.left_in_files.items() if not of_tower and mtp.is_mtp(name, num_layers)]
    others = [n for n in extra if n not in (*in_towers, *of_mtp) and not any(re.search(p, n) for p in ignored)]
    lines = []
    if checkpoint.decoded:
        count = len(checkpoint.decoded)
        lines.append(f"{count} weights stored as {checkpoint.method} are decoded to 16 bits as they are read")
    lines += [
        f"{name} differs in its files from the weight that config.json ties it to: both are kept" for name in apart
    ]
    if in_towers:
        lines.append(
            f"{', '.join(model.left_out)}: {len(in_towers)} tensors not loaded; text does not use them, and full "
            "folders that are saved keep them"
        )
    return [*lines, *mtp.lines_of(of_mtp, others)]


def _share_quantized(model: PreTrainedModel) -> set[str]:
    """Ties linears whose source was quantized to its codes, as Zamba's shared blocks are; the names so tied."""
    done = set()
    for target, source in list(model.all_tied_weights_keys.items()):
        layer, (owner, _, leaf) = model.get_submodule(source.rpartition(".")[0]), target.rpartition(".")
        if leaf == "weight" and isinstance(layer, QuantizedLinear):
            twin = copy(layer)  # a layer of its own, for an adapter of its own; the parameters are the same
            twin._parameters = dict(layer._parameters)
            if layer.bias is not None:
                other: Any = model.get_submodule(owner)
                twin.bias = other.bias
            model.set_submodule(owner, twin)
            model.all_tied_weights_keys.pop(target)
            done.add(target)
    return done


def _run_with_layers(
    place: "WeightLoader", weights: list[_WeightTask], workers: int, packed: PackedLayers | None
) -> set[str]:
    """Loads the weights that `packed` does not give; the names of those that it gives."""
    if packed is None:
        _run(place, [weights], workers)
        return set()
    targets = {target for weight in weights for target in place.targets_of(weight)}
    if any(targets.issuperset(pair) for pair in place.model.all_tied_weights_keys.items()):
        packed.outer = {}  # both are compared when they are there
    with packed.loading(place.model, place.device) as (given, awaited):
        left = [w for w in weights if not given.issuperset(place.targets_of(w))]
        groups: dict[str, list[_WeightTask]] = {"": [], **{prefix: [] for prefix in awaited}}
        for weight in left:
            groups[next((p for p in awaited if weight.target.startswith(f"{p}.")), "")].append(weight)
        _run(place, list(groups.values()), workers, [None, *(partial(packed.take, prefix) for prefix in awaited)])
    return given


def _run(
    place: "WeightLoader",
    groups: list[list[_WeightTask]],
    workers: int,
    after: Sequence[Callable[[], None] | None] = (None,),
) -> None:
    """Calls `place` for each weight, with `workers` threads that share the CPU cores, one group after the other.
    `after`: what is called after each.
    """
    threads = torch.get_num_threads()
    if workers < 1:
        workers = min(MAX_LOADING_WORKERS, threads)
    each = max(1, threads // workers)
    total = sum(map(len, groups))
    bar = Progress("quantizing" if place.quantized else "loading", total, "weights")

    def place_with_its_share(weight: _WeightTask):
        torch.set_num_threads(each)  # of the thread that calls it
        place(weight)

    try:
        with bar, Pool(workers) as pool:
            for weights, done in zip(groups, after, strict=True):
                for _ in pool.map(place_with_its_share, weights):
                    bar.update()
                if done is not None:
                    done()
    finally:
        torch.set_num_threads(threads)


def assign_tensors(
    model: PreTrainedModel, checkpoint: WeightFiles, wanted: dict[str, torch.Tensor]
) -> tuple[list[_WeightTask], dict[str, str]]:
    """File tensors to parameters, in layer order, by transformers' conversion mapping.
    And {unused tensor: the name it would have}.
    """
    mapping = transformers_internals.get_model_conversion_mapping(model)
    renamings = [m for m in mapping if isinstance(m, transformers_internals.WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, transformers_internals.WeightConverter)]
    by_pattern = {p: c for c in converters for p in c.source_patterns}
    weights: dict[str, _WeightTask] = {}
    extra = {}
    prefix = model.base_model_prefix
    for name in sorted(checkpoint.file_of, key=transformers_internals.dot_natural_key):
        whole, part = prequantized.owner(name, checkpoint)  # scales go with their prequantized weight
        if part:
            continue
        target, pattern = transformers_internals.rename_source_key(whole, renamings, converters, prefix, wanted)
        if target not in wanted and whole in wanted:
            target, pattern = transformers_internals.rename_source_key(whole, [], [], prefix, wanted)
        if target not in wanted:
            extra[name] = target
            continue
        weight = weights.setdefault(target, _WeightTask(target))
        weight.names.append(whole)
        if pattern is not None:
            weight.mapping = weight.mapping or deepcopy(by_pattern[pattern])
            weight.mapping.add_tensor(target, whole, pattern, partial(checkpoint.read, whole))
    return list(weights.values()), extra


def check_tensors(
    label: str, checkpoint: WeightFiles, weights: list[_WeightTask], wanted: dict[str, torch.Tensor]
) -> None:
    """Raises PlanError, from the file headers, for a weight of the wrong shape or of a non-weight dtype, and for one
    under two names.
    """
    for weight in weights:
        expected = wanted[weight.target]
        if weight.mapping is None and len(set(weight.names)) > 1:
            raise PlanError(
                f"{label}: {weight.names[0]} and {weight.names[1]} are both the weight {weight.target}. Remove one, or "
                "download or save the model again."
            )
        for name in weight.names:
            kind = checkpoint.kind(name)
            plain = prequantized.parts(name, checkpoint) is None
            if plain and expected.is_floating_point() and kind not in PLAIN_KINDS:
                raise PlanError(
                    f"{label}: {name} has dtype {kind} but no scales; supported weight dtypes are "
                    f"{', '.join(PLAIN_KINDS)}. Download or save the model again."
                )
            stored = checkpoint.shape(name)
            if plain and weight.mapping is None and stored != tuple(expected.shape):
                raise PlanError(
                    f"{label}: {weight.target} is {list(stored)} in its files, {list(expected.shape)} by its config. "
                    "Give a folder whose weights fit its config.json."
                )


class WeightLoader:
    """Loads one _Weight per call, from several threads: reads it and puts the result into the model."""

    def __init__(
        self,
        model: PreTrainedModel,
        checkpoint: WeightFiles,
        dtype: torch.dtype | None,
        device: torch.device,
        quantized: dict,
        hold: Callable | None,
        label: str,
        local_shards: LoadedShards | None = None,
        residual: Any = None,
    ):
        self.local_shards = local_shards
        self.residual = residual
        self.digests: dict[str, bytes] = {}  # of full, possibly tied weights: ranks see only their rows
        self.model = model
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device
        self.label = label
        self.quantized = quantized
        self.hold = hold
        self.lock = threading.Lock()
        # A prequantized folder determines itself which layers are quantized.
        self.all_stored = any(prequantized.parts(name, checkpoint) for name in checkpoint.file_of)
        strict = model._keep_in_fp32_modules_strict or ()
        kept = [*strict, *((model._keep_in_fp32_modules or ()) if dtype == torch.float16 else ())]
        kept += heads.saved_words(model)[0]  # which compute in fp32
        self.fp32: re.Pattern[str] | None = None
        if kept:
            self.fp32 = re.compile("|".join(rf"(^|\.){re.escape(k)}(\.|$)" for k in kept))

    def targets_of(self, weight: _WeightTask) -> list[str]:
        """Parameter names that this weight provides. A conversion may split one tensor into several."""
        if weight.mapping is None:
            return [weight.target]
        first = weight.mapping.target_patterns[0]
        return [weight.target.replace(first, other) for other in weight.mapping.target_patterns]

    @torch.no_grad()
    def __call__(self, weight: _WeightTask) -> None:
        try:
            if weight.mapping is not None:
                made = weight.mapping.convert(weight.target, model=self.model, config=self.model.config)
                made = {name: t[0] if isinstance(t, list) else t for name, t in made.items()}
            elif prequantized.parts(weight.names[0], self.checkpoint):
                parts = prequantized.read(weight.names[0], self.checkpoint, self.shape_of(weight.target))
                if weight.target in self.quantized:
                    self.put_layer(weight.target, prequantized.layer(*parts))
                    return
                made = {weight.target: prequantized.dense(*parts)}
            else:
                index = self.local_index(weight.target)
                if index is None:
                    made = {weight.target: self.checkpoint.read(weight.names[0])}
                else:
                    self.put(weight.target, self.read_blocks(weight, index), part=True)
                    made = {}
        except (ValueError, KeyError, IndexError) as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise PlanError(
                f"{self.label}: {weight.target} cannot be converted from its files: {first}. "
                "Download or save the model again."
            ) from error
        for target in list(made):  # `made` drops its tensor, which `put` frees once it is quantized
            self.put(target, made.pop(target))
        if weight.target in self.quantized:  # quantizers' freed blocks lie between the weights that stay
            memory_stats.trim_heap()

    def is_here(self, name: str) -> bool:
        return self.local_shards is None or self.local_shards.is_here(name)

    def wants(self, weight: _WeightTask) -> bool:
        """True unless other pipeline stages hold all that this weight provides, and no rank compares it in full."""
        return any(self.is_here(name) or name in self.digests for name in self.targets_of(weight))

    def lacks(self, name: str, parameter: nn.Parameter, provided: set[str]) -> bool:
        """True if nothing was read for a parameter. `provided`: what the files provide, for other stages too."""
        if not parameter.is_meta or self.local_shards is None:
            return parameter.is_meta
        return not self.local_shards.has(parameter) and (self.is_here(name) or name not in provided)

    def local_index(self, name: str) -> list[tuple[slice, ...]] | None:
        """This rank's part of a dense weight, see LocalShards.index; None if the full weight is needed."""
        parent, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(parent)
        shape = self.shape_of(name)
        if self.local_shards is None or leaf in module._buffers or name in self.digests or not shape:
            return None
        if self.residual is not None and self.residual.changes(name):
            return None
        config = self.config_of(name)
        linear = config is None or isinstance(module, nn.Linear)
        if not linear or not self.local_shards.reads_part(name, shape, config):
            return None
        return self.local_shards.index(name, shape)

    def read_blocks(self, weight: _WeightTask, index: list[tuple[slice, ...]]) -> torch.Tensor:
        blocks = [self.checkpoint.read(weight.names[0], block) for block in index]
        if len(blocks) == 1:
            return blocks[0]
        return torch.cat(blocks, len(index[0]) - 1)

    def compare_tied(self, weights: list[_WeightTask]) -> None:
        """Records digests of full weights that the config ties but the files hold twice, if this rank keeps shards
        only.
        """
        if self.local_shards is not None:
            full = {w.target for w in weights}
        else:
            full = set()
        for pair in self.model.all_tied_weights_keys.items():
            self.digests |= dict.fromkeys(pair) if full.issuperset(pair) else {}

    def same_tied(self) -> set[str]:
        """The second name of each such pair with equal weights. Pairs that differ are no longer tied."""
        same = set()
        for target, source in list(self.model.all_tied_weights_keys.items()):
            if target in self.digests and self.digests[target] == self.digests[source]:
                same.add(target)
            elif target in self.digests:
                self.model.all_tied_weights_keys.pop(target)
        return same

    def config_of(self, name: str):
        if self.all_stored:
            return None
        return self.quantized.get(name)

    def shape_of(self, name: str) -> tuple:
        parent, _, leaf = name.rpartition(".")
        return tuple(getattr(self.model.get_submodule(parent), leaf).shape)

    def check_shape(self, name: str, tensor: torch.Tensor) -> None:
        """Raises PlanError unless the tensor has the shape of its place in the model."""
        expected = self.shape_of(name)
        if expected != tuple(tensor.shape):
            raise PlanError(
                f"{self.label}: {name} is {list(tensor.shape)} in its files, {list(expected)} by its config. "
                "Give a folder whose weights fit its config.json."
            )

    def put(self, name: str, tensor: torch.Tensor, part: bool = False) -> None:
        """Sets a parameter, quantizing it if configured. `part`: the tensor holds only what `local_index` is."""
        parent, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(parent)
        old = getattr(module, leaf)
        if not part:
            self.check_shape(name, tensor)
        tensor = self.cast(name, tensor)
        if name in self.digests:
            self.digests[name] = hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().data).digest()
        if not self.is_here(name):
            return
        if self.residual is not None and self.residual.changes(name):
            self.residual.subtract(name, tensor)
        config = self.config_of(name)
        if (
            config is not None
            and leaf == "weight"
            and (isinstance(module, nn.Linear) or quantization_wrapper.is_conv1d(module))
        ):
            layer = self.quantize(name, tensor, config, quantization_wrapper.is_conv1d(module), part)
            del tensor  # a layer of which a rank keeps columns is yet to be sliced
            self.put_layer(name, layer, part)
        elif config is not None and self.local_shards is not None:
            self.local_shards.hold_experts(name, module, leaf, tensor.to(self.device), config, self.hold)
        elif config is not None:
            assert self.hold is not None, "experts are quantized only where what holds them is given"
            self.hold(module, leaf, tensor.to(self.device), config)
        else:
            buffer = leaf in module._buffers
            if self.local_shards is not None and not buffer and old.ndim:
                parameter = self.local_shards.parameter(name, tensor, old.shape if part else None)
            else:
                tensor = tensor.to(self.device)
                if buffer:
                    parameter = None
                else:
                    parameter = nn.Parameter(tensor, requires_grad=False)
            with self.lock:
                if buffer:
                    module._buffers[leaf] = tensor
                else:
                    # The linear may have been replaced by a quantized one meanwhile.
                    setattr(self.model.get_submodule(parent), leaf, parameter)

    def cast(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A weight in the dtype in which it stays, or is quantized."""
        if not tensor.is_floating_point():
            return tensor
        low = self.fp32 is None or not self.fp32.search(name)
        return tensor.to(self.dtype if low else torch.float32)

    def reads_rows(self, weight: _WeightTask) -> bool:
        """True if the weight is one tensor in the files, as it is in the model."""
        return weight.mapping is None and not prequantized.parts(weight.names[0], self.checkpoint)

    def quantize(self, name: str, tensor: torch.Tensor, config: QuantizationConfig, conv1d: bool, part: bool):
        weight_OI = (tensor.t().contiguous() if conv1d else tensor).to(self.device)
        try:
            rows = None
            if self.local_shards is not None and not conv1d:  # `tensor` may be some rows of this rank's slice
                rows = self.local_shards.num_rows(name, self.shape_of(name)[0], part)
            return quantization_wrapper.quantized_linear(weight_OI, None, config, conv1d, rows)
        except ValueError as error:
            raise PlanError(
                f"--quantization_backend {config.backend}: {name}: {error}. "
                f"Use another --group_size, or {quantization_wrapper.FIRST_METHOD}, which takes any width."
            ) from error

    def put_layer(self, name: str, layer: Any, part: bool = False) -> None:
        """Replaces the linear whose weight is `name`, keeping its bias, whether already loaded or not."""
        path = name.rpartition(".")[0]
        if self.local_shards is not None:
            self.local_shards.linear(name, layer, self.shape_of(name)[0] if part else None)
        with self.lock:
            layer.bias = self.model.get_submodule(path).bias
            self.model.set_submodule(path, layer.eval())


def parameter_counts(model: PreTrainedModel) -> tuple[int, int]:
    """(trainable, all) parameters; a packed weight counts as the parameters it represents."""
    experts = [m for m in model.modules() if isinstance(m, fused.QuantizedExperts)]
    parts = {part for m in experts for part in m.parts}
    packed = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
    stored = {id(p) for m in packed for p in m.stored()}
    dense = [p for p in model.parameters() if id(p) not in stored]
    trainable = sum(p.numel() for p in dense if p.requires_grad)
    represented = sum(m.out_features * m.in_features for m in packed if m not in parts)
    represented += sum(m.num_experts * m.out_features * m.in_features for m in experts)
    offload = getattr(model, "base_offload", None)
    if offload is not None:
        represented += sum(weight.count for weight in offload.outer.values())
        if offload.reads_rows:
            dense = [p for p in dense if p is not model.get_input_embeddings().weight]
    return trainable, sum(p.numel() for p in dense) + represented
