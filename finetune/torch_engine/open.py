"""One rank of a torch run: it joins the others, loads its part of the model, and builds the engine around it."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedModel

from finetune.distributed.env import RankEnv
from finetune.engine import Batch
from finetune.memory_advice import memory_advice, on_loading
from finetune.model_files.files import ModelFiles
from finetune.model_files.vocabulary import Vocabulary
from finetune.parts.parts import Parts
from finetune.plan.run_plan import RunPlan
from finetune.system.terminal import say
from finetune.torch_engine.base_offload import BaseOffload
from finetune.torch_engine.device import device_of, prepare_attention, set_num_threads, set_onednn
from finetune.torch_engine.engine import TorchEngine
from finetune.torch_engine.memory_stats import current_resident_bytes
from finetune.torch_engine.parallel.process_groups import ProcessGroups
from finetune.torch_engine.weights import load
from finetune.torch_engine.weights.local_shards import LocalShards


def load_model(
    folder: Path | str,
    plan: Parts,
    groups: ProcessGroups,
    local_shards: LocalShards | None = None,
    batches: list[Batch] | None = None,
    initial_adapter: dict | None = None,
    log: Callable = say,
    vocabulary: Vocabulary | None = None,
    files: ModelFiles | None = None,
):
    """Model with its base frozen: built on meta, weights streamed in and quantized one by one, adapters added.

    `local_shards`: this rank's rows, if it keeps only those. `batches`: for --init_lora_weights eva; `initial_adapter`:
    a checkpoint's, for inits that change the base; `vocabulary`: with new tokens; `files`: of the folder, for a packed
    base. Code in the folder is never run. Raises PlanError, OutOfMemoryError.
    """
    device = groups.device
    with memory_advice(on_loading(folder, plan)):
        balancing = plan.objective.load_balancing
        model = load.build_on_meta(folder, plan.precision, plan.parallel, balancing, vocabulary, plan.data.images)
        layers = load.layers_of(model, folder, plan.trains)
        residual = load.residual_init(model, layers, plan, device, initial_adapter)
        offload = None
        if plan.memory.base_offload:
            offload = BaseOffload(plan.memory.base_offload, plan.memory.recompute)
        packed = load.packed_layers(model, files, layers, plan, device, offload)
        for notice in load.load_and_quantize(model, folder, layers, plan, device, local_shards, residual, packed):
            log(f"  note: {notice}")
        starts: dict | None
        if residual:
            starts = residual.starts
        else:
            starts = load.init_from_data(model, layers, plan, device, batches)
        present = offload.present if offload else contextlib.nullcontext
        load.make_trainable(model, layers, plan, device, starts, local_shards, present)
        if offload:
            offload.attach(model)
    return model


class TorchRank:
    """This rank among the others: joined here. `baseline`: memory of the process after its imports.

    `wrap(model, plan, groups, local_shards, pad_id)`: the model distributed as the plan says, a Parallelism.
    """

    def __init__(self, plan: RunPlan, env: RankEnv, wrap: Callable):
        set_num_threads(env.local_size)
        set_onednn(plan.precision.onednn)
        self.plan = plan
        self.wrap = wrap
        self.baseline = current_resident_bytes()
        device = device_of(plan.backend, env.local_rank if env.size > 1 else None)
        prepare_attention(device)
        self.groups = ProcessGroups.of(env, plan.dims, device)
        if plan.parallel.distribution == "ptd":
            self.local_shards = LocalShards.of(self.groups, plan)
        else:
            self.local_shards = None

    @property
    def loads_own_shards(self) -> bool:
        """True if it reads only its rows of the weights."""
        return self.local_shards is not None

    def load(self, batches: list[Batch] | None = None, initial_adapter: dict | None = None):
        files = self.plan.model
        return load_model(
            files.folder,
            self.plan,
            self.groups,
            self.local_shards,
            batches,
            initial_adapter,
            vocabulary=files.vocabulary,
            files=files,
        )

    def build(self, model: PreTrainedModel, pad_id: int) -> TorchEngine:
        parallel = self.wrap(model, self.plan, self.groups, self.local_shards, pad_id)
        return TorchEngine(parallel, self.plan, self.plan.model.config)
