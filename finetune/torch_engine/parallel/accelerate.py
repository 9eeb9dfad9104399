"""Hugging Face accelerate as the distributed implementation: DDP, FSDP2 or DeepSpeed's ZeRO around a loaded model.

DDP and ZeRO average gradients, and the loss is already divided by the targets of all ranks: `averaging_factor`, the
world size, makes sums of them again. accelerate and DeepSpeed are imported inside functions: a run without them pays
nothing.
"""

import contextlib
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from finetune.errors import PlanError
from finetune.torch_engine import optim
from finetune.torch_engine.device import to_host
from finetune.torch_engine.forward import ModelForward
from finetune.torch_engine.parallel.fsdp import FSDPRoot, sum_gradients_not_average
from finetune.torch_engine.parallel.parallelism import Local
from finetune.torch_engine.parallel.placement import Placement, unsharded_shape
from finetune.torch_engine.parallel.process_groups import ProcessGroups


def shard_with_accelerate(model: PreTrainedModel, groups: ProcessGroups) -> FSDPRoot:
    """FSDP2 as accelerate's config file describes it, with gradients summed: what fsdp.shard returns."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin()  # reads the environment that `accelerate launch` set
    root: Any = FSDPRoot(model, bool(plugin.reshard_after_forward))
    root._no_split_modules = model._no_split_modules  # the layers that accelerate makes groups of
    # prepare() wants an optimizer beside the model.
    unused = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    root, _ = _accelerator(groups, fsdp_plugin=plugin).prepare(root, unused)
    wrapped = isinstance(root, FSDPModule)
    assert wrapped, f"accelerate wrapped {type(root).__name__}, not FSDP2"
    sum_gradients_not_average(root)
    return root


def _accelerator(groups: ProcessGroups, **plugins: Any):
    from accelerate import Accelerator, InitProcessGroupKwargs

    # What accelerate reads if neither it nor torchrun started the ranks. The group exists: the address is not used.
    device = groups.device
    size = groups.dims.world_size
    if device.index is None:
        local_rank = groups.rank
    else:
        local_rank = device.index
    variables = {"RANK": groups.rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": size}
    for name, value in {**variables, "MASTER_ADDR": "localhost"}.items():
        os.environ.setdefault(name, str(value))
    handlers = list(plugins.pop("handlers", ()))
    on_cpu = device.type == "cpu" and "deepspeed_plugin" not in plugins
    if device.type == "cpu":
        handlers.append(InitProcessGroupKwargs(backend="gloo"))
    # Precision is --precision's: autocast surrounds the work itself.
    return Accelerator(cpu=on_cpu, mixed_precision="no", kwargs_handlers=handlers, **plugins)


class AccelerateDDP(Local):
    """DDP: each rank holds everything; gradients are averaged in the last microbatch's backward."""

    def __init__(self, forward: ModelForward, placement: Placement):
        from accelerate import DistributedDataParallelKwargs

        super().__init__(forward, placement)
        # An expert that no token of this rank was routed to has no gradient here; buffers never change.
        options = DistributedDataParallelKwargs(
            find_unused_parameters=True, broadcast_buffers=False, gradient_as_bucket_view=True
        )
        self.model = placement.model
        self.averaging_factor = self.groups.dims.world_size
        self.ddp = _accelerator(self.groups, handlers=[options]).prepare(FSDPRoot(self.model, True))
        kind = type(self.ddp).__name__
        assert isinstance(self.ddp, torch.nn.parallel.DistributedDataParallel), f"accelerate wrapped {kind}"

    def call(self, work: Callable, *args: Any):
        training = self.model.training and torch.is_grad_enabled()
        if training:
            return self.ddp(work, *args)
        return work(*args)

    def accumulating(self, last: bool):
        if last:
            return contextlib.nullcontext()
        return self.ddp.no_sync()

    def _reduce_replicated(self, parameters: list) -> None:
        pass  # DDP has


class DeepSpeedZero(Local):
    """DeepSpeed's ZeRO: stage 2 shards gradients and optimizer state, stage 3 the weights too, each as one flat buffer.

    Weights and moments come full and by name from DeepSpeed's own accessors, and go back through them.
    """

    shards_weights = True
    holds_slices = False

    def __init__(self, forward: ModelForward, placement: Placement, stage: int):
        super().__init__(forward, placement)
        self.deepspeed = _import_deepspeed(self.groups.device)
        self.stage = stage
        self.model = placement.model
        self.averaging_factor = self.groups.dims.world_size

    def attach(self, optimizer: torch.optim.Optimizer | None, max_grad_norm: float | None) -> None:
        from accelerate import DeepSpeedPlugin

        super().attach(optimizer, max_grad_norm)
        config = {
            "train_micro_batch_size_per_gpu": 1,  # of DeepSpeed's own bookkeeping only: the engine makes microbatches
            "gradient_accumulation_steps": 1,
            "gradient_clipping": max_grad_norm or 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": self.stage, "stage3_param_persistence_threshold": 0},
        }
        plugin = DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=False)  # the model is loaded already
        accelerator = _accelerator(self.groups, deepspeed_plugin=plugin)
        self.engine, _ = accelerator.prepare(FSDPRoot(self.model, True), optimizer)
        assert isinstance(self.engine, self.deepspeed.DeepSpeedEngine), type(self.engine).__name__
        self.zero = self.engine.optimizer

    def call(self, work: Callable, *args: Any):
        return self.engine(work, *args)

    def accumulating(self, last: bool):
        self.engine.set_gradient_accumulation_boundary(last)
        return contextlib.nullcontext()

    def backward(self, out: torch.Tensor, grad: torch.Tensor | None = None) -> None:
        self.engine.backward(out)

    def _reduce_replicated(self, parameters: list) -> None:
        pass  # ZeRO has

    def clip(self, parameters: dict, beside: list) -> tuple[float, list]:
        """Clips the gradients summed over all ranks, see Parallelism.clip; the norm is inf if one is not finite. ZeRO
        clips in its own step.
        """
        from deepspeed.runtime.utils import get_global_norm

        if self.stage == 2:
            norm = float(self.zero.scaled_global_norm())
        else:
            norm = float(get_global_norm(norm_list=self.zero._get_norm_groups()))
        return norm if norm >= 0 else float("inf"), to_host(beside)  # DeepSpeed returns -1

    def step(self) -> None:
        self.engine.step()

    def drop_gradients(self) -> None:
        self.zero.zero_grad(set_to_none=True)
        for key in self.zero.averaged_gradients:
            self.zero.averaged_gradients[key] = None
        super().drop_gradients()

    # ---- full tensors

    @contextlib.contextmanager
    def _unsharded(self):
        """Every weight in full on every rank, without ZeRO's hooks. Collective at entry and exit."""
        if self.stage == 2:
            yield
            return
        offload = self.zero.parameter_offload
        with self.deepspeed.zero.GatheredParameters(list(self.model.parameters())):
            offload._remove_module_hooks()
            try:
                yield
            finally:
                offload.forward_hooks = []
                offload.backward_hooks = []
                offload.setup_zero_stage3_hooks()

    def gathered_for_saving(self):
        return self.full_weights()

    def gather(self, name: str) -> torch.Tensor:
        parameter: Any = self.placement.of_stage[name]
        if self.stage == 2:
            return parameter.detach().cpu().float()
        return self.deepspeed.utils.safe_get_full_fp32_param(parameter).view(parameter.ds_shape).cpu().float()

    @torch.no_grad()
    def copy_weight(self, name: str, full: np.ndarray) -> None:
        parameter = self.placement.of_stage[name]
        value = torch.from_numpy(np.array(full[...]))
        writable = contextlib.nullcontext()
        if self.stage == 3:
            writable = self.deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)
        with writable:
            parameter.copy_(value)
        self.deepspeed.utils.safe_set_full_fp32_param(parameter, value.to(parameter.device, torch.float32))

    def _flat_buffers(self) -> list:
        """The flat fp32 buffers that the optimizer updates."""
        if self.stage == 2:
            return self.zero.single_partition_of_fp32_groups
        return self.zero.fp32_partitioned_groups_flat

    def _link_moments(self) -> None:
        """ZeRO-2 links moments to parameters after its first group's first step, before those of later groups exist."""
        if self.stage == 2:
            assert self.optimizer is not None, "DeepSpeed trains something on every rank"
            for parameters, flat in zip(self.zero.bit16_groups, self._flat_buffers(), strict=True):
                self.deepspeed.utils.lazy_init_hp_params_optimizer_state(parameters, flat, self.optimizer.state)

    def moments(self) -> tuple[dict, dict]:
        """Optimizer state as in Parallelism.moments, but full on every rank. Collective."""
        assert self.optimizer is not None, "DeepSpeed trains something on every rank"
        states = [self.optimizer.state[flat] for flat in self._flat_buffers() if flat in self.optimizer.state]
        if not states:
            return {}, {}
        self._link_moments()
        names = [k for k, v in states[0].items() if k != "step" and torch.is_tensor(v)]
        tensors = {}
        counts = {}
        for name, parameter in self.placement.of_stage.items():
            for moment in names:
                full = self.deepspeed.utils.safe_get_full_optimizer_state(parameter, moment)
                tensors[f"{name}.{moment}"] = full.view(unsharded_shape(parameter)).cpu().numpy()
            if "step" in states[0]:
                counts[f"{name}.step"] = float(states[0]["step"])
        return tensors, counts

    def load_moments(self, names: dict, tensors: dict, counts: dict) -> None:
        """Restores what `moments` gave, or another run's state of the same optimizer."""
        optim.check_known((*tensors, *counts), names)
        moments = sorted({key.rpartition(".")[2] for key in tensors})
        assert self.optimizer is not None, "DeepSpeed trains something on every rank"
        fused = any(group.get("fused") for group in self.optimizer.param_groups)
        for flat in self._flat_buffers():
            state = {moment: torch.zeros_like(flat) for moment in moments}
            if counts:  # ZeRO counts steps once per flat buffer
                state["step"] = torch.tensor(max(counts.values()), device=flat.device if fused else "cpu")
            self.optimizer.state[flat] = state
        self._link_moments()
        for key, value in tensors.items():
            name, _, moment = key.rpartition(".")
            value = torch.tensor(np.array(value[...]), device=self._flat_buffers()[0].device)
            parameter = self.placement.of_stage[names[name]]
            self.deepspeed.utils.safe_set_full_optimizer_state(parameter, value, moment)


def _import_deepspeed(device: torch.device):
    """DeepSpeed, quiet and on the process group that the ranks joined. Raises PlanError if it cannot be imported."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    try:
        import deepspeed
    except ImportError as error:
        raise PlanError(
            f"--parallel_backend accelerate: DeepSpeed cannot be imported ({error}). See requirements-deepspeed.txt."
        ) from error
    deepspeed.utils.logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    # Its shared-memory all-reduce is compiled at first start, and an interrupted build leaves a lock on which every
    # later run waits forever. Gloo does without.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not deepspeed.comm.is_initialized():
        backend = "gloo" if device.type == "cpu" else "nccl"
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    # accelerate wants one source for these words; the launcher's are in the plan, and so in our configuration.
    words = ("ACCELERATE_DEEPSPEED_", "ACCELERATE_GRADIENT_", "ACCELERATE_CONFIG_DS_FIELDS")
    for name in [n for n in os.environ if n.startswith(words)]:
        del os.environ[name]
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    return deepspeed
