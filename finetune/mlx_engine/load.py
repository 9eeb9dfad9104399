"""From the plan's settings to an MLXEngine: the weights quantized, adapters on, blocks set to recompute."""

import json
from dataclasses import replace

import mlx.core as mx
import numpy as np

from finetune.config import TrainConfig
from finetune.errors import OutOfMemoryError, PlanError, is_out_of_memory
from finetune.mlx_engine import model as models
from finetune.mlx_engine.engine import MLXEngine
from finetune.mlx_engine.layers import AffineLinear
from finetune.mlx_engine.lora import DropoutKeys
from finetune.mlx_engine.names import adapted_names
from finetune.mlx_engine.ranks import Ranks
from finetune.mlx_engine.targets import add_adapters, set_recomputation
from finetune.mlx_options import MLXOptions
from finetune.system.terminal import log_error
from finetune.system.untrusted import untrusted

ADAPTER = "adapter_model.safetensors"


def load_model(folder, config: dict, settings) -> tuple[models.MLXModel, DropoutKeys | None]:
    """(the model in memory as the settings ask for, the keys of its adapters' dropout). Raises PlanError."""
    s, dtype = settings, models.compute_dtype(settings.precision)
    dequantizes = mx.default_device().type == mx.DeviceType.cpu
    try:
        loaded, keys = models.load(folder, config, dtype, dequantizes), None
        if s.train_type == "qlora":
            models.quantize(loaded, s.n_bits, s.group_size, s.quant_type or "affine", dequantizes)
        if s.train_type == "full":
            loaded.model.unfreeze()
        else:
            keys = add_adapters(loaded, s)
        if s.cache_dequantized == "true":
            for module in loaded.model.modules():
                if isinstance(module, AffineLinear):
                    module.cache(dtype)
        mx.eval(loaded.model.parameters())
    except (MemoryError, RuntimeError) as error:
        if not (is_out_of_memory(error) or "malloc" in str(error)):
            raise
        raise OutOfMemoryError(
            f"--model_name {folder}: loading it took more memory than there is. Use --train_type qlora (now "
            f"{s.train_type}), --cache_dequantized false (now {s.cache_dequantized}) or a smaller model."
        ) from error
    if s.use_gradient_checkpointing == "true":
        set_recomputation(loaded)
    return loaded, keys


def build_engine(loaded, keys, settings, pad_id: int, base_config: dict, world_size: int = 1) -> MLXEngine:
    """The engine of a loaded model; collective over the ranks of mlx.launch."""
    ranks = Ranks.of(world_size)
    if world_size > 1:
        ranks.watch(settings.rank_timeout, log_error)
    return MLXEngine(loaded, settings, keys, ranks, pad_id, base_config, MLXOptions.read(settings.mlx_config))


def open_trained(checkpoint, files, precision: str, pad_id: int) -> MLXEngine:
    """An engine for inference: the folder's own weights, or `files` with the PEFT adapter of `checkpoint` on them."""
    settings, tensors = replace(TrainConfig(), train_type="lora", precision=precision), {}
    if (checkpoint / "trained_blocks.json").is_file():
        raise PlanError(f"--checkpoint {checkpoint}: added layers are for torch. Use --device cpu, or export.py first.")
    if (checkpoint / "adapter_config.json").is_file():
        settings, tensors = read_adapter(checkpoint, settings)
    loaded = models.load(
        files.folder, files.config, models.compute_dtype(precision), mx.default_device().type == mx.DeviceType.cpu
    )
    keys = None if not tensors else add_adapters(loaded, settings)
    mx.eval(loaded.model.parameters())
    engine = MLXEngine(loaded, settings, keys, Ranks(), pad_id, files.config)
    if tensors:
        engine.load_trainable(tensors)
    return engine


def read_adapter(folder, settings) -> tuple[TrainConfig, dict]:
    """(the settings of a PEFT adapter, its tensors). Raises PlanError for what the MLX engine does not apply."""
    file = folder / "adapter_config.json"
    with untrusted(f"{file}: cannot be read", "Give a complete adapter."):
        config = json.loads(file.read_text(encoding="utf-8"))
        tensors = {k: np.array(v.astype(mx.float32)) for k, v in mx.load(str(folder / ADAPTER)).items()}
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    for key in ("rank_pattern", "alpha_pattern", "modules_to_save", "target_parameters", "layer_replication"):
        if config.get(key):
            raise PlanError(f"{file}: {key} {str(config[key])[:80]} is not supported on MLX. Use --device cpu.")
    return replace(
        settings,
        lora_rank=rank,
        lora_alpha=alpha,
        use_dora=bool(config.get("use_dora")),
        use_rslora=bool(config.get("use_rslora")),
        lora_target_modules=",".join(adapted_names(tensors)),
    ), tensors
