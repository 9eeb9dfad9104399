"""Loading of a trainable model from a folder: built on meta, weights streamed in and quantized, adapters added.

No list of model classes: layers are found by type and name, and torch_engine/checks.py tests the loaded model.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

import quantization_wrapper
from finetune.adapters.heads import HeadRecord
from finetune.adapters.modules import inside
from finetune.adapters.targets import in_layers, is_in_layers
from finetune.config import TrainConfig
from finetune.engine import Batch
from finetune.errors import PlanError
from finetune.model_files import llama_pro as llama_pro_files
from finetune.model_files.files import ModelFiles
from finetune.model_files.vocabulary import Vocabulary
from finetune.parts.heads import HEADS
from finetune.parts.objective import ObjectivePlan
from finetune.parts.parallel import ParallelPlan
from finetune.parts.parts import Parts
from finetune.parts.precision import Precision
from finetune.parts.trains import Adapter, AddedLayers, AllWeights, Trains
from finetune.quantizers.linear import QuantizedLinear
from finetune.system.untrusted import untrusted
from finetune.torch_engine import llama_pro, memory_stats
from finetune.torch_engine.device import DTYPES
from finetune.torch_engine.experts import fused, load_balancing
from finetune.torch_engine.heads import add_empty, set_record, without_gradient
from finetune.torch_engine.lora import frozen_fp8, saved_modules
from finetune.torch_engine.lora.adapters import add_adapters, attach_adapter
from finetune.torch_engine.lora.init import ResidualInit, assign, eva_init, sampled
from finetune.torch_engine.lora.layers import adapter_parameters
from finetune.torch_engine.lora.targets import linear_names, read_by_code, target_names
from finetune.torch_engine.parallel import expert as expert_parallel
from finetune.torch_engine.parallel import pipeline
from finetune.torch_engine.parallel import tensor as tensor_parallel
from finetune.torch_engine.weights import packed_base, packing
from finetune.torch_engine.weights.interfaces import GivenValues
from finetune.torch_engine.weights.local_shards import LocalShards
from finetune.torch_engine.weights.modalities import language_prefix, vision_names, vision_prefixes
from finetune.torch_engine.weights.packing import Outside, PackedLayers
from finetune.torch_engine.weights.stream import empty_model, load_weights

NEW_HEAD_DEVIATION = 0.02  # of a new head's weights, as transformers initializes it


@dataclass(frozen=True)
class Layers:
    """A model's layers by name: new blocks, linears and experts that qlora quantizes, layers that get an adapter.

    `quantize_last`: adapters start from what flows through unquantized weights, so the base is quantized only after it
    was loaded in full. `saved`: modules that train in full beside the adapters.
    """

    new_blocks: list
    linears: list
    experts: list
    adapted: list
    quantize_last: bool
    saved: tuple[str, ...] = ()


def build_on_meta(
    folder: Path | str,
    precision: Precision,
    parallel: ParallelPlan,
    load_balancing_loss: float = 0.0,
    vocabulary: Vocabulary | None = None,
    sees_images: bool = False,
):
    """The model of a folder's config, its parameters on meta. `vocabulary`, `sees_images`: see empty_model.

    PlanError if its class has no plan for TP or PP, no experts for EP, or no router for a load-balancing loss.
    """
    model = empty_model(folder, DTYPES[precision.weights], vocabulary, sees_images)
    if parallel.tp > 1:
        tensor_parallel.plan_of(model, f"--tp_degree {parallel.tp}")
    if parallel.ep > 1:
        expert_parallel.reachable_experts(model, f"--ep_degree {parallel.ep}")
    if parallel.pp > 1:
        pipeline.stages_of(model, parallel.pp, parallel.pp_chunks)
    if load_balancing_loss:
        load_balancing.routers_of(model, f"--router_aux_loss_coef {load_balancing_loss:g}")
    return model


def layers_of(model: PreTrainedModel, folder: Path | str, trains: Trains) -> Layers:
    """Names of the layers that are quantized, adapted or new. Raises PlanError for names that match nothing."""
    new = new_blocks(model, folder, trains)
    linears = [n for n in linear_names(model) if not llama_pro.inside_blocks(n, new)]
    moe = [n for n in fused.reachable(model) if not llama_pro.inside_blocks(n, new)]
    if not isinstance(trains, Adapter):
        return Layers(new, linears, moe, [], False)
    adapted = target_names(model, trains.targets, trains.dora, sees=trains.vision == "lora")
    seeing = [name for name in adapted if name.startswith(vision_prefixes(model))]  # whose layers have other numbers
    spoken = [name for name in adapted if name not in seeing]
    adapted = in_layers(spoken, linears, trains.last_layers, trains.layers) + seeing
    saved = []
    if trains.trains_modules:
        saved = saved_modules.named(model, trains)
        linears, moe, adapted = ([n for n in names if not inside(n, saved)] for names in (linears, moe, adapted))
    trains.check_names(adapted)
    return Layers(new, linears, moe, adapted, bool(adapted) and trains.init.needs_data, tuple(saved))


def load_and_quantize(
    model: PreTrainedModel,
    folder: Path | str,
    layers: Layers,
    plan: Parts,
    device: torch.device,
    local_shards: LocalShards | None = None,
    residual: ResidualInit | None = None,
    packed: PackedLayers | None = None,
) -> list[str]:
    """Streams the weights in, each quantized as it arrives; notices to print.

    Raises PlanError if they do not fit the config.

    `local_shards`: keeps this rank's part only, and the parameters stay on meta. `residual`: see residual_init;
    `packed`: see packed_layers.
    """
    dtype = DTYPES[plan.precision.weights]
    memory = plan.memory
    config = plan.quantization and plan.quantization.config
    # What is read and dropped leaves no holes between the weights that stay. Quantizers' blocks are smaller: mapping
    # those too, each faulted in anew, takes three times as long.
    memory_stats.map_blocks_from(2**18 if memory.low_memory else 2**20 + 2**18)
    if local_shards is not None:
        local_shards.prepare(model)
        local_shards.source = (folder, residual.saved if residual else None)
    if layers.quantize_last:
        quantized = {}
    else:
        quantized = quantized_weights(model, layers, plan)
    if memory.low_memory:
        workers = 1
    else:
        workers = memory.loading_workers
    notices = load_weights(model, folder, dtype, device, quantized, workers, fused.hold, local_shards, residual, packed)
    if residual is not None:
        residual.check_ties()
    if config and not layers.quantize_last:
        for name in layers.experts:
            fused.wrapped(model, name)
    if config and quantization_wrapper.METHODS[config.backend].cuda_kernel and device.type != "cpu":
        error = quantization_wrapper.module_of(config.backend).triton_error(device, DTYPES[plan.precision.compute])
        if error:
            notices.append(f"{config.backend}: plain torch dequantizes, slower than our Triton kernel ({error})")
    if plan.all_weights:
        read = {}
    else:
        read = read_by_code(model)
    if read:
        first = next(iter(read))
        notices.append(
            f"{len(read)} linears, such as {first}, stay as they are, without adapter or quantization: "
            f"{read[first]}'s code computes with their weight itself"
        )
    return notices


def quantized_weights(model: PreTrainedModel, layers: Layers, plan: Parts) -> dict:
    """{parameter: QuantizationConfig} of the weights that the plan quantizes."""
    config = plan.quantization and plan.quantization.config
    if not config:
        return {}
    in_experts = [n for n in fused.parameter_names(model) if n.rpartition(".")[0] in layers.experts]
    return dict.fromkeys([*(f"{n}.weight" for n in layers.linears), *in_experts], config)


def packed_layers(
    model: PreTrainedModel,
    files: ModelFiles | None,
    layers: Layers,
    plan: Parts,
    device: torch.device,
    outside: Outside | None = None,
) -> PackedLayers | None:
    """The packed base of a run, if it keeps or reads one. `outside`: keeps the layers, if the device does not."""
    memory = plan.memory
    if files is None or (outside is None and (plan.quantization is None or memory.packed_cache == "none")):
        return None
    quantized = quantized_weights(model, layers, plan)
    width = DTYPES[plan.precision.weights].itemsize
    num_bytes = 0
    parameters = []
    prefixes = tuple(f"{name}." for name in packing.layer_names(model))
    if not prefixes:
        if outside is None:
            return None
        raise PlanError(
            f"--base_offload {plan.memory.base_offload}: {type(model).__name__} has no stack of layers as deep as its "
            "config says. Use none."
        )
    for name, parameter in model.named_parameters():
        if name.startswith(prefixes):
            parameters.append((name, tuple(parameter.shape), name in quantized))
            columns = parameter.shape[-1] if parameter.ndim else 1
            rows = parameter.numel() // max(1, columns)
            if name in quantized and plan.quantization:
                num_bytes += plan.quantization.weight_bytes(rows, columns, width)
            else:
                num_bytes += width * parameter.numel()
    if outside is None and num_bytes < packed_base.LEAST_BYTES and memory.packed_cache == "auto":
        return None
    cache = packed_base.PackedCache.of(files, plan, layers.saved, [device.type, parameters])
    outer = {}
    if outside is not None:
        _refuse_shared(model, prefixes, plan)
        outer = outer_in_files(model, layers)
    return PackedLayers(cache, num_bytes, layers.saved, outside, outer)


def _refuse_shared(model: PreTrainedModel, prefixes: tuple[str, ...], plan: Parts) -> None:
    """Raises PlanError for layers that share weights with others."""
    for pair in model.all_tied_weights_keys.items():
        if any(name.startswith(prefixes) for name in pair):
            raise PlanError(
                f"--base_offload {plan.memory.base_offload}: {type(model).__name__} shares {pair[0]} with {pair[1]}, "
                "and layers pass one by one. Use none."
            )


def outer_in_files(model: PreTrainedModel, layers: Layers) -> dict[str, str]:
    """{role: name} of the embedding and the head whose weights may be left in files: frozen, without an adapter, and
    shared at most with each other, by a head without a bias. Of two that share theirs, the embedding alone.
    """
    names = {module: name for name, module in model.named_modules()}
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    found = {}
    if isinstance(embedding, nn.Embedding):
        found[packed_base.EMBEDDING] = names[embedding]
    if type(head) is nn.Linear:
        found[packed_base.HEAD] = names[head]
    ends = {f"{name}.weight" for name in found.values()}
    pairs = [{target, source} for target, source in model.all_tied_weights_keys.items() if ends & {target, source}]
    tied = ends in pairs
    if any(pair != ends for pair in pairs):
        return {}
    stay = {role for role, name in found.items() if inside(name, layers.saved) or name in layers.adapted}
    if tied and (stay or getattr(head, "bias", None) is not None):  # transformers cuts it to the rows of the embedding
        return {}
    if tied:
        stay = {packed_base.HEAD}
    return {role: name for role, name in found.items() if role not in stay}


def residual_init(
    model: PreTrainedModel, layers: Layers, plan: Parts, device: torch.device, initial_adapter: dict | None = None
) -> ResidualInit | None:
    """Maker of residual weights while they are read; None for inits that leave the base unchanged. `initial_adapter`: a
    checkpoint's.
    """
    trains = plan.trains
    if not (layers.adapted and isinstance(trains, Adapter) and trains.init.changes_base):
        return None
    config = None
    if plan.quantization:
        config = plan.quantization.config
    return ResidualInit(model, layers.adapted, trains, config, initial_adapter, device)


def init_from_data(
    model: PreTrainedModel, layers: Layers, plan: Parts, device: torch.device, batches: list[Batch] | None = None
) -> dict | None:
    """{layer: A} of adapters that start from the first `batches` of the data, by eva; quantizes the base afterwards.
    None for other inits.
    """
    if not layers.quantize_last:
        return None
    config = plan.quantization and plan.quantization.config
    adapter = plan.trains
    assert isinstance(adapter, Adapter) and batches is not None, adapter
    linears = [n for n in layers.adapted if n in layers.linears]
    starts = eva_init(model, linears, adapter.rank, [padded_inputs(batch) for batch in batches])
    if config:
        quantization_wrapper.quantize_model(model, config, layers.linears, device=device)
        fused.quantize(model, config, layers.experts, device)
    return starts


def make_trainable(
    model: PreTrainedModel,
    layers: Layers,
    plan: Parts,
    device: torch.device,
    starts: dict | None = None,
    local_shards: GivenValues | None = None,
    present: Callable[[str], AbstractContextManager] = contextlib.nullcontext,
) -> None:
    """Unfreezes what trains: every weight, the new blocks, or adapters that are added here.
    Moves the model to `device`. `present(name)`: a context in which a module's weights are there.
    """
    if isinstance(plan.trains, AllWeights):
        seeing = vision_prefixes(model)
        trained = vision_names(model, plan.trains.vision)
        for name, parameter in model.named_parameters():
            trains = is_in_layers(name, num_layers_of(model), plan.trains.last_layers, plan.trains.layers)
            if name.startswith(seeing):
                trains = inside(name, trained)
            parameter.requires_grad_(trains)
        if plan.objective.facts.has_head:
            without_gradient(model)
        if local_shards is None:
            whole: nn.Module = model
            whole.to(device)
        add_head(model, plan.objective, plan.steps.seed, local_shards)
        return
    if local_shards is None:
        module: nn.Module = model
        module.to(device)
    if plan.memory.cache_dequantized and local_shards is None:
        cache_dequantized(model, DTYPES[plan.precision.compute])
    if layers.new_blocks:
        llama_pro.unfreeze_blocks(model, layers.new_blocks, local_shards)
    else:
        assert isinstance(plan.trains, Adapter), plan.trains
        add_adapters(model, layers.adapted, plan.trains, starts, local_shards, present)
        if plan.precision.in_fp8:
            frozen_fp8.use(model)
        saved_modules.unfreeze(model, layers.saved, DTYPES[plan.precision.weights], local_shards)
        add_head(model, plan.objective, plan.steps.seed, local_shards)
    if plan.precision.casts_buffers:
        cast_buffers(model)


def add_head(model: PreTrainedModel, objective: ObjectivePlan, seed: int, local_shards: GivenValues | None) -> None:
    """Puts the objective's head beside the model's own, if it has one: a linear over hidden states that trains in full,
    in fp32, with weights that follow from the seed.
    """
    facts = HEADS[objective.facts.head]
    outputs = objective.outputs
    if objective.facts.has_head:
        set_record(model, HeadRecord(objective.name, objective.labels, outputs, pad_token_id=0))
    if not facts.module:
        return
    shape = (outputs, model.config.get_text_config().hidden_size)
    parameter = next(model.parameters())
    head = nn.Linear(shape[1], shape[0], bias=False, dtype=torch.float32, device=parameter.device)

    def start() -> torch.Tensor:
        return NEW_HEAD_DEVIATION * sampled(facts.module, shape, "normal", seed)

    weight = head.get_parameter("weight")
    with torch.no_grad():
        assign(local_shards, f"{facts.module}.weight", weight, start)
    model.add_module(facts.module, head)


def num_layers_of(model: PreTrainedModel) -> int:
    return model.config.get_text_config().num_hidden_layers


def cast_buffers(model: PreTrainedModel) -> None:
    """Floating-point buffers in bf16."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(torch.bfloat16))


def new_blocks(model: PreTrainedModel, folder: Path | str, trains: Trains) -> list[str]:
    """Names of the layers that expand.py added, if the run trains those; else none."""
    if not isinstance(trains, AddedLayers):
        return []
    flag = f"--llama_pro_path {trains.folder}"
    return llama_pro.new_blocks(model, llama_pro_files.read_record(Path(folder), flag), flag)


def cache_dequantized(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Keeps a dense copy of every quantized weight."""
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear):
            layer.cache(dtype)


def padded_inputs(batch: Batch) -> dict:
    """A padded microbatch as the keyword arguments of a transformers model."""
    return {
        "input_ids": torch.from_numpy(batch.input_ids_BS),
        "attention_mask": torch.from_numpy((batch.document_ids_BS >= 0).astype("int64")),
    }


DENSE_FP32 = Parts(TrainConfig(train_type="lora", precision="fp32"))  # the base that export.py merges into


def load_trained(
    checkpoint: Path | str,
    files: ModelFiles,
    device: torch.device,
    plan: Parts,
    local_shards: LocalShards | None = None,
    outside: Outside | None = None,
):
    """A model for inference: a folder of weights, or `files` as the base with the adapter of `checkpoint` on it.

    In the plan's precision, and quantized as it says. `local_shards`: see load_and_quantize; `outside`: see
    packed_layers.
    """
    seeing = plan.data.images
    model = build_on_meta(files.folder, plan.precision, plan.parallel, sees_images=seeing)
    record = None
    if (Path(checkpoint) / "adapter_config.json").is_file():
        record = HeadRecord.read(Path(checkpoint))
    own = saved_modules.in_file(Path(checkpoint))
    if record is not None:
        own = {name: shape for name, shape in own.items() if name.partition(".")[0] != record.facts.module}
    vocabulary = saved_modules.vocabulary_of(model, own)
    if vocabulary is not None:
        model = build_on_meta(files.folder, plan.precision, plan.parallel, vocabulary=vocabulary, sees_images=seeing)
    layers = layers_of(model, files.folder, AllWeights())
    saved = {name.rpartition(".")[0] for name in own}
    linears, experts = ([n for n in names if not inside(n, saved)] for names in (layers.linears, layers.experts))
    adapted = saved_modules.adapted_in_file(Path(checkpoint))
    layers = replace(layers, linears=linears, experts=experts, adapted=adapted, saved=tuple(saved))
    packed = None
    if local_shards is None:
        packed = packed_layers(model, files, layers, plan, device, outside)
    load_and_quantize(model, files.folder, layers, plan, device, local_shards, packed=packed)
    model.requires_grad_(False)
    if record is not None:
        add_empty(model, record, "meta" if local_shards else device)
    if local_shards is None:
        module: nn.Module = model
        module.to(device)
    if plan.memory.cache_dequantized:
        cache_dequantized(model, DTYPES[plan.precision.compute])
    with untrusted(f"--checkpoint {checkpoint}: is damaged, or does not fit its base", "Give a complete checkpoint."):
        if (Path(checkpoint) / "adapter_config.json").is_file():
            present = outside.present if outside else contextlib.nullcontext
            in_fp32 = plan.precision.autocast is not None
            attach_adapter(model, checkpoint, local_shards=local_shards, as_trained=in_fp32, present=present)
        elif (Path(checkpoint) / "trained_blocks.json").is_file():
            llama_pro.attach_blocks(model, checkpoint, local_shards)
    return model


def weights_dtype(model: PreTrainedModel) -> torch.dtype:
    """The dtype of the model's own weights.
    `model.dtype` is that of its first parameter, which may be an adapter's or a trained tower's: fp32.
    """
    trained = adapter_parameters(model)
    language = language_prefix(model)
    own = (p.dtype for n, p in model.named_parameters() if n.startswith(language) and n not in trained)
    return next(dtype for dtype in own if dtype.is_floating_point)
