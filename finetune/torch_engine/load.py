"""Any Hugging Face causal LM from a folder to a model ready to train: dtype, quantized base, adapters, proofs.

No list of model classes: layers are found by what they are, and what a model does is proved on the loaded model.
"""

from pathlib import Path

import torch

import quantization_wrapper
from finetune.config import RESIDUAL_INITS, TrainConfig
from finetune.errors import OutOfMemoryError
from finetune.model_files import llama_pro as llama_pro_files
from finetune.quantizers.linear import QuantizedLinear
from finetune.torch_engine import experts, llama_pro, memory_stats
from finetune.torch_engine.lora.adapters import add_adapters, attach_adapter
from finetune.torch_engine.lora.init import eva_init, residual_init
from finetune.torch_engine.lora.layers import adapter_parameters
from finetune.torch_engine.lora.targets import linear_names, target_names
from finetune.torch_engine.parallel import pipeline
from finetune.torch_engine.parallel import tensor as tensor_parallel
from finetune.torch_engine.weights import empty_model, load_dense, load_weights

WEIGHT_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "bf16_autocast": torch.float32,
    "fp16_autocast": torch.float32,
    "bf16_buffers_autocast": torch.float32,
}
AUTOCAST_DTYPES = {
    "bf16_autocast": torch.bfloat16,
    "fp16_autocast": torch.float16,
    "bf16_buffers_autocast": torch.bfloat16,
}


def load_model(folder, settings: TrainConfig, device, batches=None, saved=None, say=print, share=None):
    """The model in evaluation mode on `device`: frozen weights in their type, base quantized, adapters on, the rest in fp32.

    `batches`: the first ones of the data, which --init_lora_weights eva starts from; `saved`: a checkpoint's tensors, which hold
    the start of one that changes the base; `say` is called with lines worth telling. Code in the model's folder is never run.
    `share`: what this rank keeps of it; the parameters then stay on meta, for parallelize.shard.
    Raises PlanError for weights that do not fit the config, OutOfMemoryError.
    """
    try:
        return _load(folder, settings, device, batches, saved, say, share)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"--model_name {folder}: loading it took more memory than there is. Use --train_type qlora "
            f"(now {settings.train_type}), --cache_dequantized false (now {settings.cache_dequantized}) or a smaller model."
        ) from error


def out_of_memory(error) -> bool:
    """Whether it is torch's or Python's word for memory that is not there; the CPU allocator raises a plain RuntimeError."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)


def _load(folder, settings, device, batches, saved, say, share):
    dtype, config = WEIGHT_DTYPES[settings.precision], quantization_config(settings)
    if share is not None:  # what is read and let go leaves no holes between the rows that stay
        memory_stats.map_blocks_from(2**20)
    model = empty_model(folder, dtype)
    if settings.tp_degree > 1:  # what its class cannot do is said before weights are read
        tensor_parallel.plan_of(model, f"--tp_degree {settings.tp_degree}")
    if settings.pp_degree > 1:
        pipeline.stages_of(model, settings.pp_degree)
    new = new_blocks(model, folder, settings)
    linears = [n for n in linear_names(model) if not llama_pro.inside_blocks(n, new)]
    moe = [n for n in experts.reachable(model) if not llama_pro.inside_blocks(n, new)]
    targets = None
    if settings.train_type != "full" and not new:
        targets = target_names(model, settings.lora_target_modules, settings.use_dora)
    # These starts look at unquantized weights, or at what flows into them: such a base is quantized after it was whole.
    whole_first = bool(targets) and (
        settings.init_lora_weights == "eva" or settings.init_lora_weights in RESIDUAL_INITS
    )
    quantized = {}
    if config and not whole_first:
        quantized = {f"{n}.weight": config for n in linears}
        quantized |= {name: config for name in experts.parameter_names(model) if name.rpartition(".")[0] in moe}
    workers = 1 if settings.low_memory else settings.loading_workers
    for line in load_weights(model, folder, dtype, device, quantized, workers, experts.hold, share):
        say(f"  note: {line}")
    if settings.train_type == "full":
        model.requires_grad_(True)
        return model
    starts = None
    if settings.init_lora_weights == "eva" and whole_first:
        linear = [n for n in targets if n in linears]
        starts = eva_init(model, linear, settings, [padded_inputs(b) for b in batches])
    elif whole_first:
        starts = residual_init(model, targets, settings, config, saved, device)
    if config and whole_first:
        quantization_wrapper.quantize_model(model, config, linears, device=device)
        experts.quantize(model, config, moe, device)
    elif config:
        for name in moe:
            experts.wrapped(model, name)
    if share is None:
        model.to(device)
    if settings.cache_dequantized == "true":
        cache_dequantized(model, autocast_dtype(settings) or dtype)
    if new:
        llama_pro.unfreeze_blocks(model, new)
    else:
        add_adapters(model, targets, settings, starts, share)
    if settings.precision == "bf16_buffers_autocast":
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    setattr(module, name, buffer.to(torch.bfloat16))
    return model


def new_blocks(model, folder, settings) -> list[str]:
    """Names of the layers that expand.py added, where the run trains those; else none."""
    if not settings.llama_pro_path:
        return []
    said = f"--llama_pro_path {settings.llama_pro_path}"
    return llama_pro.new_blocks(model, llama_pro_files.read_record(Path(folder), said), said)


def cache_dequantized(model, dtype) -> None:
    """Keeps a dense copy of every quantized weight."""
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear):
            layer.cache(dtype)


def quantization_config(settings):
    """How a qlora run stores its base; None for the other train types."""
    if settings.train_type != "qlora":
        return None
    return quantization_wrapper.config_for(
        settings.quantization_backend, settings.n_bits, settings.quant_type, settings.group_size, settings.double_quant
    )


def autocast_dtype(settings):
    """What products are cast to: with new layers in fp32 between frozen ones in 16 bits, the type of the frozen ones."""
    dtype = AUTOCAST_DTYPES.get(settings.precision)
    if settings.llama_pro_path and settings.precision in ("bf16", "fp16"):
        return WEIGHT_DTYPES[settings.precision]
    return dtype


def padded_inputs(batch) -> dict:
    """A padded microbatch as the keyword arguments of a transformers model."""
    return {
        "input_ids": torch.from_numpy(batch.input_ids_BS),
        "attention_mask": torch.from_numpy((batch.document_ids_BS >= 0).astype("int64")),
    }


def load_trained(checkpoint, files, device, dtype):
    """A model to use, not to train: a folder of weights, or `files` as the base with the adapter of `checkpoint` on it."""
    model = load_dense(files.folder, dtype, device).requires_grad_(False)
    if (Path(checkpoint) / "adapter_config.json").is_file():
        attach_adapter(model, checkpoint)
    elif (Path(checkpoint) / "trained_blocks.json").is_file():
        llama_pro.attach_blocks(model, checkpoint)
    return model


def weights_dtype(model) -> torch.dtype:
    """The type of the model's own weights. `model.dtype` is that of its first parameter, which may be an adapter's: fp32."""
    trained = adapter_parameters(model)
    return next(p.dtype for n, p in model.named_parameters() if p.is_floating_point() and n not in trained)
