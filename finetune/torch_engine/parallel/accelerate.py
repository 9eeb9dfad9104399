"""accelerate in the place of parallelize.py: DDP, FSDP2 or DeepSpeed's ZeRO around a loaded model, so that the engine keeps its one step.

DDP and ZeRO average gradients, and the loss is already divided by the targets of all ranks: `factor`, the number of ranks, makes
sums of them again. accelerate and DeepSpeed are imported inside functions: a run without them pays nothing.
"""

import contextlib
import logging
import os
import warnings

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from finetune.errors import PlanError
from finetune.torch_engine.parallel import fsdp
from finetune.torch_engine.parallel.process_groups import ProcessGroups


def wrap_model(method: str, model, optimizer, ranks: ProcessGroups, device, limit: float | None):
    """The model and its optimizer in accelerate's hands: Replicas or Zero. `limit`: the gradients' norm, None for no clipping."""
    if method == "ddp":
        return AccelerateDDP(model, ranks, device)
    return DeepSpeedZero(int(method.removeprefix("zero")), model, optimizer, ranks, device, limit)


def shard_with_accelerate(model, ranks: ProcessGroups, device) -> fsdp.FSDPRoot:
    """FSDP2 as accelerate's config file describes it, with gradients summed: what parallelize.shard gives."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin()  # reads the environment that `accelerate launch` set
    root = fsdp.FSDPRoot(model, bool(plugin.reshard_after_forward))
    root._no_split_modules = model._no_split_modules  # the layers that accelerate makes groups of
    nothing = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.0
    )  # it wants one beside the model
    root, _ = _accelerator(ranks, device, fsdp_plugin=plugin).prepare(root, nothing)
    assert isinstance(root, FSDPModule), f"accelerate wrapped {type(root).__name__}, not FSDP2"
    fsdp.sum_gradients_not_average(root)
    return root


def _accelerator(ranks: ProcessGroups, device, **plugins):
    from accelerate import Accelerator, InitProcessGroupKwargs

    # What accelerate looks for where neither it nor torchrun started the ranks. The group is there: nobody calls the address.
    size, local = ranks.dims.world_size, ranks.rank if device.index is None else device.index
    for name, value in (
        ("RANK", ranks.rank),
        ("WORLD_SIZE", size),
        ("LOCAL_RANK", local),
        ("LOCAL_WORLD_SIZE", size),
        ("MASTER_ADDR", "localhost"),
    ):
        os.environ.setdefault(name, str(value))
    handlers = list(plugins.pop("handlers", ()))
    on_cpu = device.type == "cpu" and "deepspeed_plugin" not in plugins
    if device.type == "cpu":
        handlers.append(InitProcessGroupKwargs(backend="gloo"))
    # Precision is --precision's: autocast stands around the work itself.
    return Accelerator(cpu=on_cpu, mixed_precision="no", kwargs_handlers=handlers, **plugins)


class AccelerateDDP:
    """DDP: each rank holds everything; gradients are averaged in the last microbatch's backward."""

    partitioned = False

    def __init__(self, model, ranks: ProcessGroups, device):
        from accelerate import DistributedDataParallelKwargs

        # An expert that no token of this rank met has no gradient here; documents' buffers never change.
        how = DistributedDataParallelKwargs(
            find_unused_parameters=True, broadcast_buffers=False, gradient_as_bucket_view=True
        )
        self.model, self.factor = model, ranks.dims.world_size
        self.prepared = _accelerator(ranks, device, handlers=[how]).prepare(fsdp.FSDPRoot(model, True))
        kind = type(self.prepared).__name__
        assert isinstance(self.prepared, torch.nn.parallel.DistributedDataParallel), f"accelerate wrapped {kind}"

    def __call__(self, work, *args):
        learning = self.model.training and torch.is_grad_enabled()
        return self.prepared(work, *args) if learning else work(*args)

    def accumulating(self, last: bool):
        return contextlib.nullcontext() if last else self.prepared.no_sync()

    def backward(self, loss) -> None:
        loss.backward()


class DeepSpeedZero:
    """DeepSpeed's ZeRO: stage 2 cuts gradients and moments over the ranks, stage 3 the weights too, each as one flat run of numbers.

    Weights and moments by name come whole from DeepSpeed's own accessors, and go back through them.
    """

    partitioned = True

    def __init__(self, stage: int, model, optimizer, ranks: ProcessGroups, device, limit: float | None):
        if device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        try:
            import deepspeed
        except ImportError as error:
            raise PlanError(
                f"--parallel_backend accelerate: DeepSpeed cannot be imported ({error}). See requirements-deepspeed.txt."
            ) from error
        from accelerate import DeepSpeedPlugin

        deepspeed.utils.logger.setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        # Its shared-memory sums are compiled at first start, and a build that was interrupted leaves a lock on which every later
        # run waits without end. Gloo does without.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        if not deepspeed.comm.is_initialized():  # takes up the group that the ranks joined
            deepspeed.init_distributed(
                dist_backend="gloo" if device.type == "cpu" else "nccl", auto_mpi_discovery=False, verbose=False
            )
        # accelerate wants one source for these words; the launcher's are in the plan, and so in this configuration.
        words = ("ACCELERATE_DEEPSPEED_", "ACCELERATE_GRADIENT_", "ACCELERATE_CONFIG_DS_FIELDS")
        for name in [n for n in os.environ if n.startswith(words)]:
            del os.environ[name]
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        self.deepspeed, self.stage, self.factor, self.model = deepspeed, stage, ranks.dims.world_size, model
        config = {
            "train_micro_batch_size_per_gpu": 1,  # of DeepSpeed's own bookkeeping only: the engine cuts microbatches
            "gradient_accumulation_steps": 1,
            "gradient_clipping": limit or 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        plugin = DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=False)  # the model is loaded already
        accelerator = _accelerator(ranks, device, deepspeed_plugin=plugin)
        self.engine, _ = accelerator.prepare(fsdp.FSDPRoot(model, True), optimizer)
        assert isinstance(self.engine, deepspeed.DeepSpeedEngine), type(self.engine).__name__
        self.optimizer, self.zero = optimizer, self.engine.optimizer

    def __call__(self, work, *args):
        return self.engine(work, *args)

    def accumulating(self, last: bool):
        self.engine.set_gradient_accumulation_boundary(last)
        return contextlib.nullcontext()

    def backward(self, loss) -> None:
        self.engine.backward(loss)

    def norm(self) -> float:
        """The norm of all ranks' summed gradients; inf where a number among them is not finite."""
        from deepspeed.runtime.utils import get_global_norm

        if self.stage == 2:
            found = self.zero.scaled_global_norm()
        else:
            found = get_global_norm(norm_list=self.zero._get_norm_groups())
        found = float(found)
        return found if found >= 0 else float("inf")  # -1 is DeepSpeed's word for it

    def step(self) -> None:
        self.engine.step()

    def drop(self) -> None:
        """Forgets the gradients of a step that is not taken."""
        self.zero.zero_grad(set_to_none=True)
        for key in self.zero.averaged_gradients:
            self.zero.averaged_gradients[key] = None

    # ---- whole tensors

    @contextlib.contextmanager
    def whole(self):
        """Every weight whole on every rank, and no forward exchanges anything. Collective at entry and exit."""
        if self.stage == 2:
            yield
            return
        offload = self.zero.parameter_offload
        with self.deepspeed.zero.GatheredParameters(list(self.model.parameters())):
            offload._remove_module_hooks()
            try:
                yield
            finally:
                offload.forward_hooks, offload.backward_hooks = [], []
                offload.setup_zero_stage3_hooks()

    def weight(self, parameter) -> torch.Tensor:
        """A trainable weight, whole, on the CPU. Collective."""
        if self.stage == 2:
            return parameter.detach().cpu()
        return self.deepspeed.utils.safe_get_full_fp32_param(parameter).view(parameter.ds_shape).cpu()

    def set_weight(self, parameter, value: torch.Tensor) -> None:
        with self._writable(parameter):
            parameter.copy_(value)
        self.deepspeed.utils.safe_set_full_fp32_param(parameter, value.to(parameter.device, torch.float32))

    def _writable(self, parameter):
        if self.stage == 2:
            return contextlib.nullcontext()
        return self.deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)

    def _flat(self) -> list:
        """The runs of numbers that the optimizer updates."""
        return self.zero.single_partition_of_fp32_groups if self.stage == 2 else self.zero.fp32_partitioned_groups_flat

    def _link_moments(self) -> None:
        """ZeRO-2 ties moments to parameters after its first group's first step, when those of later groups are not there yet."""
        if self.stage == 2:
            for parameters, flat in zip(self.zero.bit16_groups, self._flat(), strict=True):
                self.deepspeed.utils.lazy_init_hp_params_optimizer_state(parameters, flat, self.optimizer.state)

    def moments(self, named: dict) -> tuple[dict, dict]:
        """What optim.state gives, whole on every rank. Collective."""
        states = [self.optimizer.state[flat] for flat in self._flat() if flat in self.optimizer.state]
        if not states:
            return {}, {}
        self._link_moments()
        names = [k for k, v in states[0].items() if k != "step" and torch.is_tensor(v)]
        tensors, numbers = {}, {}
        for name, parameter in named.items():
            for moment in names:
                whole = self.deepspeed.utils.safe_get_full_optimizer_state(parameter, moment)
                tensors[f"{name}.{moment}"] = whole.view(fsdp.full_shape(parameter)).cpu().numpy()
            if "step" in states[0]:
                numbers[f"{name}.step"] = float(states[0]["step"])
        return tensors, numbers

    def set_moments(self, named: dict, tensors: dict, numbers: dict) -> None:
        """Puts back what `moments` gave, or any other run's state of the same optimizer."""
        unknown = sorted({key.rpartition(".")[0] for key in (*tensors, *numbers)} - set(named))
        if unknown:
            raise PlanError(
                f"--resume: the checkpoint holds optimizer state of {unknown[0]}, which does not train here."
            )
        names = sorted({key.rpartition(".")[2] for key in tensors})
        fused = any(group.get("fused") for group in self.optimizer.param_groups)
        for flat in self._flat():
            state = {moment: torch.zeros_like(flat) for moment in names}
            if numbers:  # ZeRO counts steps once for all of a run of numbers
                state["step"] = torch.tensor(max(numbers.values()), device=flat.device if fused else "cpu")
            self.optimizer.state[flat] = state
        self._link_moments()
        for key, value in tensors.items():
            name, _, moment = key.rpartition(".")
            value = torch.tensor(np.array(value), device=self._flat()[0].device)
            self.deepspeed.utils.safe_set_full_optimizer_state(named[name], value, moment)
