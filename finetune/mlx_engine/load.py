"""Construction of an MLXEngine from the plan: weights quantized, adapters added, blocks set to recompute."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from finetune.adapters import saved
from finetune.adapters.modules import check_words, own_weights
from finetune.adapters.patterns import LEAF
from finetune.adapters.saved import CONFIG
from finetune.errors import PlanError
from finetune.memory_advice import memory_advice, on_loading
from finetune.mlx_engine import model as models
from finetune.mlx_engine import saved_modules
from finetune.mlx_engine.engine import MLXEngine
from finetune.mlx_engine.experts import WEIGHTS
from finetune.mlx_engine.layers import AffineLinear
from finetune.mlx_engine.lora import DropoutKeys
from finetune.mlx_engine.memory import MEMORY_REFUSED
from finetune.mlx_engine.model import MLXModel
from finetune.mlx_engine.names import adapted_names
from finetune.mlx_engine.ranks import Ranks
from finetune.mlx_engine.state import trainable_paths
from finetune.mlx_engine.targets import add_adapters, set_recomputation
from finetune.mlx_options import MLXOptions
from finetune.model_files.files import ModelFiles
from finetune.model_files.published import verified
from finetune.model_files.vocabulary import Vocabulary
from finetune.parts.parts import Parts
from finetune.parts.trains import Adapter
from finetune.system.mlx_of_caller import keep_mlx
from finetune.system.terminal import log_error


def load_model(
    folder: Path, config: dict, plan: Parts, vocabulary: Vocabulary | None = None
) -> tuple[models.MLXModel, DropoutKeys | None]:
    """(the model in memory as planned, the keys of its adapters' dropout). `vocabulary`: with new tokens. Raises
    PlanError.
    """
    quantization = plan.quantization
    dtype = models.DTYPES[plan.precision.compute]
    dequantizes = mx.default_device().type == mx.DeviceType.cpu
    folder = Path(folder)
    with memory_advice(on_loading(folder, plan), MEMORY_REFUSED), verified(folder, folder.glob("*.safetensors")):
        loaded = models.load(folder, config, dtype, dequantizes, vocabulary)
        keys = None
        if isinstance(plan.trains, Adapter) and plan.trains.trains_modules:
            loaded.saved = tuple(saved_modules.named(loaded, plan.trains))
        if quantization:
            models.quantize(
                loaded, quantization.bits, quantization.group_size, quantization.quant_type or "affine", dequantizes
            )
        if isinstance(plan.trains, Adapter):
            keys = add_adapters(loaded, plan.trains)
        for path in trainable_paths(loaded, plan.trains).values():
            owner, _, leaf = path.rpartition(".")
            loaded.module(owner).unfreeze(recurse=False, keys=[leaf])
        if plan.memory.cache_dequantized:
            for module in loaded.model.modules():
                if isinstance(module, AffineLinear):
                    module.cache(dtype)
        mx.eval(loaded.model.parameters())
    if plan.memory.recompute:
        set_recomputation(loaded)
    return loaded, keys


def build_engine(
    loaded: MLXModel, keys: DropoutKeys | None, plan: Parts, pad_id: int, base_config: dict, world_size: int = 1
) -> MLXEngine:
    """The engine of a loaded model; collective over the ranks of mlx.launch."""
    ranks = Ranks.of(world_size)
    if world_size > 1:
        ranks.watch(plan.parallel.rank_timeout, log_error)
    return MLXEngine(loaded, plan, keys, ranks, pad_id, base_config, MLXOptions.read(plan.settings.mlx_config))


def open_trained(checkpoint: Path, files: ModelFiles, plan: Parts, pad_id: int) -> MLXEngine:
    """An engine for inference: the folder's own weights, or `files` with the PEFT adapter of `checkpoint` on them.

    In the plan's precision, and quantized as it says.
    """
    keep_mlx()
    adapter = None
    words = None
    tensors: dict[str, Any] = {}
    if (checkpoint / "trained_blocks.json").is_file():
        raise PlanError(f"--checkpoint {checkpoint}: added layers are for torch. Use --device cpu, or export.py first.")
    if (checkpoint / CONFIG).is_file():
        adapter, tensors, words = read_adapter(checkpoint)
    dequantizes = mx.default_device().type == mx.DeviceType.cpu
    with verified(files.folder, files.weight_files):
        dtype = models.DTYPES[plan.precision.compute]
        loaded = models.load(files.folder, files.config, dtype, dequantizes)
        own = own_weights(tensors)
        if own or words:
            vocabulary = vocabulary_of(loaded, own)
            if vocabulary:  # nothing was read yet
                loaded = models.load(files.folder, files.config, dtype, dequantizes, vocabulary)
            loaded.saved = saved_in(checkpoint, loaded, own, words)
        if plan.quantization:
            how = plan.quantization
            models.quantize(loaded, how.bits, how.group_size, how.quant_type or "affine", dequantizes)
        keys = None
        if adapter:
            keys = add_adapters(loaded, adapter)
        mx.eval(loaded.model.parameters())
    engine = MLXEngine(loaded, plan, keys, Ranks(), pad_id, files.config)
    if tensors:
        engine.load_trainable(tensors)
    return engine


def read_adapter(folder: Path) -> tuple[Adapter, dict, object]:
    """(adapter of a PEFT folder, its tensors, its modules_to_save). Raises PlanError for what MLX does not apply."""
    config, tensors = saved.read_adapter(folder)
    parameters = config.get("target_parameters") or []
    layers = adapted_names(name for name in tensors if LEAF.search(name))
    owners = tuple({name.rpartition(".")[0] for name in parameters if name.endswith(WEIGHTS)})
    linears = [name for name in layers if not (owners and name.removesuffix(".base_layer").endswith(owners))]
    experts = [name for name in parameters if name.endswith(WEIGHTS)]
    adapter = Adapter(
        config["r"],
        config["lora_alpha"],
        targets=",".join([*linears, *experts]),
        dora=bool(config.get("use_dora")),
        rslora=bool(config.get("use_rslora")),
    )
    return adapter, tensors, config.get("modules_to_save")


def vocabulary_of(loaded: MLXModel, own: Mapping) -> Vocabulary | None:
    """The rows of an adapter's `own` embeddings and head, if those are more than the base's."""
    rows = len(loaded.embedding.weight)
    sizes = [len(own[f"{end}.weight"]) for end in saved_modules.ends_of(loaded) if f"{end}.weight" in own]
    if sizes and max(sizes) > rows:
        return Vocabulary(rows, max(sizes))
    return None


def saved_in(checkpoint: Path, loaded: MLXModel, own: Mapping, words: object) -> tuple[str, ...]:
    """Names of the modules whose weights an adapter has of its `own`. Raises PlanError for what no MLX model has."""
    embedding, head = saved_modules.ends_of(loaded)
    both = [own[name] for name in (f"{embedding}.weight", f"{head}.weight") if name in own]
    if loaded.head is None and both and not (len(both) == 2 and np.array_equal(*both)):
        raise PlanError(
            f"--checkpoint {checkpoint}: was trained with a head of its own, and mlx-lm's {loaded.model.model_type} "
            "has its embeddings for one. Use --device cpu."
        )
    check_words(saved_modules.modules_of(loaded), words, own, checkpoint / CONFIG)
    modules = dict.fromkeys(name.rpartition(".")[0] for name in own)
    known = {name.rpartition(".")[0] for name in loaded.names.values()}
    odd = [name for name in modules if name not in known and not (loaded.head is None and name == head)]
    if odd:
        raise PlanError(
            f"--checkpoint {checkpoint}: holds {odd[0]}, which mlx-lm's {loaded.model.model_type} has not under this "
            "name. Use --device cpu."
        )
    return tuple(name for name in modules if name in known)
