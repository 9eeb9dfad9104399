"""Construction of an MLXEngine from the plan: weights quantized, adapters added, blocks set to recompute."""

from pathlib import Path
from typing import Any

import mlx.core as mx

from finetune.adapters import saved
from finetune.adapters.saved import CONFIG
from finetune.errors import PlanError
from finetune.memory_advice import memory_advice, on_loading
from finetune.mlx_engine import model as models
from finetune.mlx_engine.engine import MLXEngine
from finetune.mlx_engine.layers import AffineLinear
from finetune.mlx_engine.lora import DropoutKeys
from finetune.mlx_engine.memory import MEMORY_REFUSED
from finetune.mlx_engine.model import MLXModel
from finetune.mlx_engine.names import adapted_names
from finetune.mlx_engine.ranks import Ranks
from finetune.mlx_engine.targets import add_adapters, set_recomputation
from finetune.mlx_options import MLXOptions
from finetune.model_files.files import ModelFiles
from finetune.model_files.published import verified
from finetune.parts.parts import Parts
from finetune.parts.trains import Adapter
from finetune.system.terminal import log_error

# Of adapter_config.json: what trains or replaces more than pairs of matrices of one rank.
UNSUPPORTED = ("modules_to_save", "target_parameters")


def load_model(folder: Path, config: dict, plan: Parts) -> tuple[models.MLXModel, DropoutKeys | None]:
    """(the model in memory as planned, the keys of its adapters' dropout). Raises PlanError."""
    quantization = plan.quantization
    dtype = models.DTYPES[plan.precision.compute]
    dequantizes = mx.default_device().type == mx.DeviceType.cpu
    folder = Path(folder)
    with memory_advice(on_loading(folder, plan), MEMORY_REFUSED), verified(folder, folder.glob("*.safetensors")):
        loaded = models.load(folder, config, dtype, dequantizes)
        keys = None
        if quantization:
            models.quantize(
                loaded, quantization.bits, quantization.group_size, quantization.quant_type or "affine", dequantizes
            )
        if isinstance(plan.trains, Adapter):
            keys = add_adapters(loaded, plan.trains)
        else:
            loaded.model.unfreeze()
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
    adapter = None
    tensors: dict[str, Any] = {}
    if (checkpoint / "trained_blocks.json").is_file():
        raise PlanError(f"--checkpoint {checkpoint}: added layers are for torch. Use --device cpu, or export.py first.")
    if (checkpoint / CONFIG).is_file():
        adapter, tensors = read_adapter(checkpoint)
    dequantizes = mx.default_device().type == mx.DeviceType.cpu
    with verified(files.folder, files.weight_files):
        loaded = models.load(files.folder, files.config, models.DTYPES[plan.precision.compute], dequantizes)
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


def read_adapter(folder: Path) -> tuple[Adapter, dict]:
    """(adapter of a PEFT folder, its tensors). Raises PlanError for what the MLX engine does not apply."""
    file = folder / CONFIG
    config, tensors = saved.read_adapter(folder)
    for key in UNSUPPORTED:
        if config.get(key):
            raise PlanError(f"{file}: {key} {str(config[key])[:80]} is not supported on MLX. Use --device cpu.")
    adapter = Adapter(
        config["r"],
        config["lora_alpha"],
        targets=",".join(adapted_names(tensors)),
        dora=bool(config.get("use_dora")),
        rslora=bool(config.get("use_rslora")),
    )
    return adapter, tensors
