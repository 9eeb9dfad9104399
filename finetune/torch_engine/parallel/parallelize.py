"""Distributes a model over the ranks: TP, EP, PP, recomputation, compiled layers, then FSDP2, DDP or ZeRO, then CP."""

from transformers import PreTrainedModel

from finetune.errors import PlanError
from finetune.parts.parallel import ParallelPlan
from finetune.parts.parts import Parts
from finetune.parts.trains import Adapter
from finetune.torch_engine import checks
from finetune.torch_engine.compile import compile_layers
from finetune.torch_engine.device import DTYPES
from finetune.torch_engine.forward import ModelForward
from finetune.torch_engine.kernels import fuse
from finetune.torch_engine.layerwise import Reference
from finetune.torch_engine.lora import flat
from finetune.torch_engine.parallel import expert as expert_parallel
from finetune.torch_engine.parallel import fsdp
from finetune.torch_engine.parallel import tensor as tensor_parallel
from finetune.torch_engine.parallel import vocabulary as vocabulary_parallel
from finetune.torch_engine.parallel.accelerate import AccelerateDDP, DeepSpeedZero, shard_with_accelerate
from finetune.torch_engine.parallel.fsdp import FSDPRoot
from finetune.torch_engine.parallel.parallelism import Local, Parallelism
from finetune.torch_engine.parallel.pipeline import Stage, layers_of_chunks, stages_of
from finetune.torch_engine.parallel.placement import Placement
from finetune.torch_engine.parallel.process_groups import SINGLE_PROCESS, ProcessGroups
from finetune.torch_engine.parallel.sequence import SequenceRegion, shard_sequences
from finetune.torch_engine.parallel.vocabulary_rows import VocabularyRows
from finetune.torch_engine.weights.load import cache_dequantized
from finetune.torch_engine.weights.local_shards import LocalShards


def parallelize(
    model: PreTrainedModel,
    plan: Parts,
    groups: ProcessGroups = SINGLE_PROCESS,
    local_shards: LocalShards | None = None,
    pad_id: int = 0,
) -> Parallelism:
    """The model distributed over the ranks of `groups`. Collective; raises PlanError if the model cannot be.
    `local_shards`: this rank's rows, if it loaded only those.
    """
    how = plan.parallel
    memory = plan.memory
    layout = plan.data.layout
    dims = groups.dims
    forward = ModelForward(model, plan, groups, pad_id)
    forward.not_fused = fuse.fuse(model, groups.device, DTYPES[plan.precision.compute])

    # Only a full model can show what its shards must compute: where each rank has loaded it, it is asked here.
    divided = dims.tp * dims.pp * dims.ep > 1
    if divided and local_shards is None:
        checks.record_reference(forward, layout)
    if local_shards is not None and dims.pp > 1 and isinstance(plan.trains, Adapter) and plan.trains.init.changes_base:
        local_shards.share_starts(model, stages_of(model, dims.pp, how.pp_chunks))

    region = None
    if how.sequence_parallel and dims.tp > 1:
        region = SequenceRegion()
    slices = tensor_parallel.shard_layers(model, groups, local_shards, region)
    forward.vocabulary = vocabulary_parallel.shard_ends(model, groups, slices)
    expert_parallel.shard_layers(model, groups, slices)
    if dims.pp > 1:
        forward.pipeline = Stage(model, groups, how.pp_schedule)
    if region is not None:
        (run,) = layers_of_chunks(model, dims.pp)[forward.pipeline.number]
        shard_sequences(model, groups, region, slices, run)
    if memory.recompute:
        checkpoint_activations(model, memory.reentrant)
    if memory.compiles:
        compile_layers(model)
    root = None
    rows = None
    if how.vocab_parallel and groups.sharded:
        rows = VocabularyRows(model, groups, forward.vocabulary)
        forward.vocabulary = rows.shard
    if groups.sharded and how.distribution == "fsdp2":
        root = shard_with_accelerate(model, groups)
    elif groups.sharded:
        reshards = how.reshard_after_forward
        root = fsdp.shard(model, groups, reshards, local_shards, memory.offload, slices.experts, rows)
    elif local_shards is not None:
        local_shards.assign(model)
    if local_shards is not None:
        if not local_shards.magnitudes_are_known:
            fsdp.init_dora_magnitudes(model, groups, slices.slices, root)
        if memory.cache_dequantized:
            cache_dequantized(model, DTYPES[plan.precision.compute])

    placement = Placement(model, groups, slices, forward.pipeline)
    if not placement.of_stage and dims.pp > 1:
        raise PlanError(
            f"--pp_degree {dims.pp}: nothing trains on stage {forward.pipeline.number}. Use a smaller degree."
        )
    parallel = _around(forward, placement, root, how)
    if divided and local_shards is not None:
        assert local_shards.source is not None, "the weights have been loaded"
        folder, adapter = local_shards.source
        forward.reference = Reference(plan, folder, adapter)
    return parallel


def _around(forward: ModelForward, placement: Placement, root: FSDPRoot | None, how: ParallelPlan) -> Parallelism:
    if root is not None:
        return fsdp.FSDP2(forward, placement, root, how.no_sync)
    if how.distribution == "ddp" and not placement.groups.single_process:
        return AccelerateDDP(forward, placement)
    if how.distribution.startswith("zero") and not placement.groups.single_process:
        return DeepSpeedZero(forward, placement, int(how.distribution.removeprefix("zero")))
    flat.flatten(forward.model)
    return Local(forward, placement)


def checkpoint_activations(model: PreTrainedModel, reentrant: bool) -> None:
    """Recomputes each layer's activations in backward, by transformers' own checkpointing.
    Raises PlanError if it has none.
    """
    if not model.supports_gradient_checkpointing:
        raise PlanError(f"--use_gradient_checkpointing true: {type(model).__name__} does not support it. Use false.")
    # transformers 5.23 renamed it; the older name still works, with a warning.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    if reentrant:  # reentrant checkpointing needs an input that requires a gradient
        model.enable_input_require_grads()
    else:  # transformers makes the input require one in any case, and the first layer would compute it for nothing
        model.disable_input_require_grads()
