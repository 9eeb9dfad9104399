"""Sharded training on Apple GPUs: FSDP2 over collectives that are staged through host memory.

    model = MPSFSDPWrapper(MPSFSDPConfig(sharding_strategy="FULL_SHARD")).wrap_model(model)

Usable alone on any nn.Module, in one process or under torchrun; train.py --backend mps uses it too. `device_type` lets
the same code run on another device. It was not run on an Apple GPU yet: see docs/hardware.md.
"""

import contextlib
import logging
import os
import platform
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from finetune.backend.machine import GIB
from finetune.config import DEFAULTS
from finetune.errors import PlanError, first_line
from finetune.older.mps_fsdp import BackwardPrefetch, MPSOperatorFallback, ShardingStrategy, UnifiedMemoryOptimizer
from finetune.parts.parts import Parts
from finetune.torch_engine.memory_stats import current_resident_bytes
from finetune.torch_engine.parallel import device_shims, fsdp, self_test, staged_gloo, wrapper_checkpoint
from finetune.torch_engine.parallel.parallelize import parallelize
from finetune.torch_engine.parallel.process_groups import ProcessGroups, prepare_device
from finetune.torch_engine.parallel.wrapper_checkpoint_checks import MAKE_AFTER

logger = logging.getLogger("mps_fsdp_wrapper")


def _gloo(name: str) -> str:
    if str(name).lower() != "gloo":
        warnings.warn(f"MPS only supports Gloo: backend {name} becomes gloo, staged through host memory", stacklevel=4)
    return "gloo"


def _dtype(value: Any) -> torch.dtype:
    if isinstance(value, str):
        dtype = getattr(torch, value, None)
    else:
        dtype = value
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(
            f"{value!r}: is not a floating-point dtype. Use torch.float16, torch.bfloat16 or torch.float32"
        )
    return dtype


def _number(smallest: int) -> Callable:
    def checked(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int | float) or not smallest <= value < 2**63:
            raise ValueError(f"{value!r}: must be a number of at least {smallest}")
        return int(value)

    return checked


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r}: must be True or False")
    return value


def _or_none(coerce: Callable) -> Callable:
    return lambda value: None if value is None else coerce(value)


# What a field's value must be, and becomes; the rest are flags.
COERCED = {
    "sharding_strategy": ShardingStrategy.of,
    "backward_prefetch": _or_none(BackwardPrefetch.of),
    "min_num_params": _number(0),
    **dict.fromkeys(("compute_dtype", "reduce_dtype", "buffer_dtype"), _dtype),
    "backend": _gloo,
    "world_size": _number(1),
    "rank": _number(0),
    "unified_memory_pool_size": _or_none(_number(1)),
    "fallback_to_cpu_ops": set,
}


@dataclass
class MPSFSDPConfig:
    """Fields may be changed after construction; the next wrap or use sees them. `counterparts` says which of them
    FSDP2 has no counterpart for.
    `unified_memory_pool_size`: bytes. `compute_dtype`, `reduce_dtype`, `buffer_dtype`: of mixed precision.
    """

    sharding_strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    min_num_params: float = int(1e6)
    use_mixed_precision: bool = True
    compute_dtype: torch.dtype = torch.float16
    reduce_dtype: torch.dtype = torch.float32
    buffer_dtype: torch.dtype = torch.float16
    cpu_offload: bool = False
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    forward_prefetch: bool = True
    limit_all_gathers: bool = True
    backend: str = "gloo"
    world_size: int = 1
    rank: int = 0
    sync_module_states: bool = True
    use_orig_params: bool = True
    unified_memory_pool_size: int | None = None
    aggressive_memory_optimization: bool = False
    debug_mode: bool = False
    profile_memory: bool = False
    fallback_to_cpu_ops: set = field(default_factory=lambda: {"aten::_fused_adam", "aten::_foreach_addcdiv_"})

    def __setattr__(self, name: str, value: Any):
        if name not in self.__dataclass_fields__:
            raise AttributeError(f"MPSFSDPConfig has no field {name}. It has {', '.join(self.__dataclass_fields__)}.")
        try:
            super().__setattr__(name, COERCED.get(name, _flag)(value))
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None

    def counterparts(self) -> list[str]:
        """A line for each value that FSDP2 cannot follow, with what happens instead."""
        lines = []
        if not self.use_orig_params:
            lines.append("use_orig_params False: FSDP2 always keeps the model's own parameters")
        if not self.limit_all_gathers:
            lines.append("limit_all_gathers False: FSDP2 always limits them, to two units in flight")
        if self.backward_prefetch is not BackwardPrefetch.BACKWARD_PRE:
            name = getattr(self.backward_prefetch, "name", None)
            lines.append(f"backward_prefetch {name}: FSDP2 always gathers the next unit before the present backward")
        return lines


def view_integers(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Views packed weights as `dtype` if this torch shards no integer parameters. Collective. Raises PlanError for
    integers of other modules.
    """
    if all(differentiable(p) for p in model.parameters()):
        return
    with torch.random.fork_rng(devices=[]):  # the probe draws weights
        if fsdp.supports_integer_params(mesh):
            return
    fsdp.view_packed_as(model, dtype)
    for name, parameter in model.named_parameters():
        if parameter.ndim and not differentiable(parameter):
            raise PlanError(
                f"{name}: is {parameter.dtype}, and torch {torch.__version__} shards no integer parameters. Use torch "
                "2.12 or newer, or register it as a buffer."
            )


def differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def unavailable(device_type: str) -> str | None:
    """Reason that this torch cannot use the device now; None if it can."""
    if device_type == "mps":
        if torch.backends.mps.is_available():
            return None
        built = "macOS is older than 13, or there is no Apple GPU" if torch.backends.mps.is_built() else "not built in"
        return f"torch {torch.__version__}: {built}"
    try:
        if torch.get_device_module(device_type).is_available():
            return None
        return f"torch sees no {device_type} device"
    except (RuntimeError, AttributeError) as error:
        return first_line(error)


class MPSFSDPWrapper:
    """Shards models over the ranks that were launched. Raises RuntimeError where the device is not available."""

    def __init__(self, config: MPSFSDPConfig | None = None, device_type: str = "mps"):
        reason = unavailable(device_type)
        if reason:
            name = "MPS" if device_type == "mps" else device_type
            raise RuntimeError(f"{name} backend is not available ({reason}).")
        self.config = config or MPSFSDPConfig()
        self.device = torch.device(device_type)
        self.memory_optimizer = UnifiedMemoryOptimizer(self.config, device_type)
        self.operator_fallback = MPSOperatorFallback(self.config)

    # ---- a model of the user's own

    def wrap_model(
        self, model: nn.Module, auto_wrap_policy: Callable | set | None = None, param_dtype: torch.dtype | None = None
    ) -> nn.Module:
        """The model on the device, sharded in place; gradients are averaged over the ranks.

        `auto_wrap_policy`: which modules are gathered as one unit: a set of classes, or a function of FSDP1's form
        (module, recurse, nonwrapped_numel); by default those of `min_num_params` parameters. `param_dtype`: computes in
        it, in place of the configured dtype. Collective. Raises PlanError, SelfTestError, CollectiveError.
        """
        _check_unwrapped(model)
        replaced = WeakIdKeyDictionary(dict.fromkeys(model.parameters()))
        with self._debug_log():
            for line in self.config.counterparts():
                logger.warning(line)
            compute_dtype = self._convert_dtype(param_dtype or self.config.compute_dtype)
            mesh, group = self._mesh()
            self_test.check(self.device, group, mesh)
            self._move(model, param_dtype is not None)
            if self.config.sync_module_states and dist.get_world_size() > 1:
                for tensor in (*model.parameters(), *model.buffers()):
                    dist.broadcast(tensor.detach(), 0, group=group)
            modules = units_of(model, auto_wrap_policy or by_size(self.config.min_num_params))
            self._shard(model, modules, mesh, group, compute_dtype, param_dtype is not None)
        _refuse_optimizers_of(replaced, set(model.parameters()))
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True, prepend=True)
        return model

    def wrap_transformer(self, model: nn.Module, transformer_layer_cls: Any) -> nn.Module:
        """`wrap_model` with each module of this class (or of one of these) as a unit. Raises ValueError if none is."""
        if isinstance(transformer_layer_cls, set | tuple | list):
            classes = transformer_layer_cls
        else:
            classes = (transformer_layer_cls,)
        if not any(isinstance(module, tuple(classes)) for module in model.modules()):
            names = ", ".join(c.__name__ for c in classes)
            lists = {type(child).__name__ for m in model.modules() if isinstance(m, nn.ModuleList) for child in m}
            raise ValueError(f"{names}: the model has no such module. It repeats {', '.join(sorted(lists)) or 'none'}.")
        return self.wrap_model(model, set(classes))

    def _shard(
        self,
        model: nn.Module,
        modules: list,
        mesh: DeviceMesh,
        group: dist.ProcessGroup | None,
        compute_dtype: torch.dtype | None,
        cast: bool,
    ) -> None:
        config = self.config
        precision = MixedPrecisionPolicy()
        if config.use_mixed_precision or cast:
            precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=config.reduce_dtype)
        # A view of the dtype that is computed in is cast by no policy.
        view_integers(model, mesh["shard"], dtype=precision.param_dtype or torch.bfloat16)
        scalars = {p for p in model.parameters() if p.ndim == 0}
        options = dict(
            mesh=mesh,
            mp_policy=precision,
            ignored_params=scalars,
            offload_policy=CPUOffloadPolicy(pin_memory=False) if config.cpu_offload else OffloadPolicy(),
        )
        full = config.sharding_strategy is ShardingStrategy.FULL_SHARD
        names = {module: name or "the model" for name, module in model.named_modules()}
        for module, shard_module in fsdp.units(model, modules, full, **options):
            logger.debug("unit %s: %s", names[module], type(module).__name__)
            shard_module()
        for unit, following in zip(modules, modules[1:], strict=False):
            unit.set_modules_to_forward_prefetch([following] if config.forward_prefetch else [])
        for scalar in scalars:  # FSDP2 shards none
            if scalar.requires_grad:
                scalar.register_post_accumulate_grad_hook(lambda p: _average(p.grad, group))

    def _move(self, model: nn.Module, cast: bool) -> None:
        """Puts the model on the device in dtypes that it has; buffers in the configured dtype of mixed precision."""
        in_bf16 = [t for t in (*model.parameters(), *model.buffers()) if t.dtype is torch.bfloat16]
        dtype = None
        if in_bf16:
            dtype = self._convert_dtype(torch.bfloat16)
        for tensor in in_bf16:
            tensor.data = tensor.data.to(dtype)
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        model.to(self.device)
        for first, *others in names.values():
            for name in others:  # a device whose tensors cannot take the place of the CPU's unties weights
                owner, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(owner), leaf, model.get_parameter(first))
        if self.config.use_mixed_precision or cast:
            dtype = self._convert_dtype(self.config.buffer_dtype)
            for buffer in model.buffers():
                if buffer.is_floating_point():
                    buffer.data = buffer.data.to(dtype)

    def _before_forward(self, model: nn.Module, args: Any, kwargs: Any):
        """FSDP2 does not move inputs to a device that it knows no streams of."""
        if self.config.aggressive_memory_optimization:
            getattr(torch.get_device_module(self.device.type), "empty_cache", lambda: None)()
        return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(self.device), (args, kwargs))

    def _convert_dtype(self, dtype: Any, older_dtype: torch.dtype | None = None):
        """float16 for bfloat16 where the device cannot compute with it, which a probe decides; others unchanged.

        With (model, dtype), as in the older scripts: the model in that dtype.
        """
        if older_dtype is not None:
            return dtype.to(self._convert_dtype(older_dtype))
        if dtype is torch.bfloat16 and not computes_bfloat16(self.device):
            warnings.warn(f"{self.device.type} does not support bfloat16 here: float16 is used", stacklevel=3)
            return torch.float16
        return dtype

    def _mesh(self) -> tuple[DeviceMesh, dist.ProcessGroup]:
        """The ranks' mesh and a staged group of all. Collective."""
        prepare_device(self.device)
        staged_gloo.register(self.device.type)
        self._join()
        size = dist.get_world_size()
        rank = dist.get_rank()
        group: dist.ProcessGroup | None
        if staged_gloo.is_staged(dist.group.WORLD):
            group = dist.group.WORLD
        else:
            group = dist.new_group(backend=staged_gloo.NAME)
        assert group is not None, "_join made the group of all"
        if self.config.sharding_strategy is not ShardingStrategy.NO_SHARD:
            return DeviceMesh.from_group(group, self.device.type, mesh_dim_names=("shard",)), group
        alone = [dist.new_group([r], backend=staged_gloo.NAME) for r in range(size)][rank]
        ranks = torch.arange(size).view(size, 1)
        names = ("dp_replicate", "shard")
        return DeviceMesh.from_group([group, alone], self.device.type, ranks, mesh_dim_names=names), group

    def _join(self) -> None:
        """The default process group: the user's, else that of the launcher's environment, else one of one rank."""
        config = self.config
        if not dist.is_initialized():
            size = int(os.environ.get("WORLD_SIZE", config.world_size))
            rank = int(os.environ.get("RANK", config.rank))
            if size == 1:
                dist.init_process_group(staged_gloo.NAME, store=dist.HashStore(), rank=0, world_size=1)
            else:
                os.environ.setdefault("MASTER_ADDR", "localhost")
                os.environ.setdefault("MASTER_PORT", str(DEFAULTS["master_port"]))
                dist.init_process_group(staged_gloo.NAME, rank=rank, world_size=size)
        if config.world_size not in (1, dist.get_world_size()):
            raise ValueError(f"world_size {config.world_size}: the process group has {dist.get_world_size()} ranks.")

    # ---- a run of train.py

    def distribute(self, model: Any, plan: Parts, groups: ProcessGroups, local_shards: Any, pad_id: int):
        """The model distributed as the plan says, after the self-test: a Parallelism. Collective."""
        if groups.single_process:
            device_shims.install_pieces(self.device.type)
        if groups.single_process:
            group = None
        else:
            group = dist.group.WORLD
        mesh = None
        if groups.sharded:
            assert groups.mesh is not None, "ranks that shard have a mesh"
            mesh = groups.mesh["shard"]
        self_test.check(self.device, group, mesh)
        return parallelize(model, plan, groups, local_shards, pad_id)

    # ---- checkpoints, memory

    def save_checkpoint(
        self,
        model: nn.Module,
        checkpoint_path: Path | str,
        optimizer: torch.optim.Optimizer | None = None,
        **metadata: Any,
    ) -> None:
        """Writes weights, buffers, optimizer state and metadata in full; see wrapper_checkpoint.save. Collective."""
        wrapper_checkpoint.save(model, checkpoint_path, optimizer, metadata)

    def load_checkpoint(
        self, model: nn.Module, checkpoint_path: Path | str, optimizer: torch.optim.Optimizer | None = None
    ) -> dict:
        """Restores what save_checkpoint wrote, on any number of ranks; the metadata. Collective. Raises PlanError."""
        return wrapper_checkpoint.load(model, checkpoint_path, optimizer)

    def get_memory_stats(self) -> dict[str, float]:
        """GiB: allocated_gb by tensors, reserved_gb by the driver, process_memory_gb resident, limit_gb to be used."""
        module = torch.get_device_module(self.device.type)
        allocated = getattr(module, "current_allocated_memory", getattr(module, "memory_allocated", lambda: 0))()
        reserved = getattr(module, "driver_allocated_memory", getattr(module, "memory_reserved", lambda: allocated))()
        stats = {"allocated": allocated, "reserved": reserved, "process_memory": current_resident_bytes()}
        return {f"{k}_gb": v / GIB for k, v in (stats | {"limit": self.memory_optimizer.available_bytes()}).items()}

    @contextlib.contextmanager
    def profile_memory(self):
        """Logs what the block adds to memory, if `config.profile_memory`."""
        if not self.config.profile_memory:
            yield
            return
        before = self.get_memory_stats()
        try:
            yield
        finally:
            after = self.get_memory_stats()
            logger.info(
                "memory: %+.3f GiB allocated, now %.3f; %.3f GiB reserved",
                after["allocated_gb"] - before["allocated_gb"],
                after["allocated_gb"],
                after["reserved_gb"],
            )

    @contextlib.contextmanager
    def _debug_log(self):
        before = logger.level
        if self.config.debug_mode:
            logger.setLevel(logging.DEBUG)
        try:
            logger.debug("config: %s", {f.name: getattr(self.config, f.name) for f in fields(self.config)})
            yield
        finally:
            logger.setLevel(before)


def _check_unwrapped(model: nn.Module) -> None:
    """Raises PlanError for what FSDP2 cannot wrap, before it has wrapped a part."""
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        raise PlanError(f"{type(model).__name__}: has no forward. Wrap the module that holds it.")
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise PlanError(f"{name or 'the model'}: is wrapped already. Call wrap_model once.")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise PlanError(f"{name}: is on meta and has no numbers. Load the weights, then call wrap_model.")


def _refuse_optimizers_of(replaced: WeakIdKeyDictionary, present: set) -> None:
    """Raises at the first step of an optimizer of parameters that wrap_model has replaced: it would train nothing."""
    for parameter in present:
        replaced.pop(parameter, None)

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        number = len(replaced) and sum(p in replaced for group in optimizer.param_groups for p in group["params"])
        if number:
            raise PlanError(f"optimizer: wrap_model has replaced {number} of its parameters. {MAKE_AFTER}")

    if replaced:
        register_optimizer_step_pre_hook(before_step)  # it cannot be removed by itself, while torch goes through all


def _average(grad: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    dist.all_reduce(grad, group=group)
    grad /= dist.get_world_size(group)


def computes_bfloat16(device: torch.device) -> bool:
    """True if a bfloat16 product on the device is right. Tries it."""
    try:
        x = torch.eye(8, dtype=torch.bfloat16, device=device)
        return torch.equal((x @ (3 * x)).float().cpu(), 3 * torch.eye(8))
    except (RuntimeError, TypeError):
        return False


def by_size(min_num_params: float) -> Callable:
    """FSDP1's size-based policy: a module is a unit if its parameters outside inner units are this many."""

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return nonwrapped_numel >= min_num_params

    return policy


def by_class(classes: tuple) -> Callable:
    """FSDP1's policy of layers: each module of these classes is a unit."""

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return recurse or isinstance(module, classes)

    return policy


def units_of(model: nn.Module, policy: Any) -> list[nn.Module]:
    """The modules that a policy makes units, inner ones first, the model itself left out.

    A module with a weight that is tied to one outside it is not a unit: FSDP2 keeps a tied weight in one group.
    """
    if isinstance(policy, set | tuple | list):
        policy = by_class(tuple(policy))
    modules = []
    taken = set()
    users: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(parameter, set()).add(module)

    def is_tied_outside(module: nn.Module) -> bool:
        inside = set(module.modules())
        return any(not users[p] <= inside for p in module.parameters())

    def visit(module: nn.Module):
        inside = [p for p in module.parameters() if p not in taken]
        if not policy(module=module, recurse=True, nonwrapped_numel=sum(p.numel() for p in inside)):
            return
        for child in module.children():
            visit(child)
        rest = [p for p in module.parameters() if p not in taken]
        is_container = isinstance(module, nn.ModuleList | nn.ModuleDict)  # has no forward of its own
        if module is model or is_container or not rest or is_tied_outside(module):
            return
        if policy(module=module, recurse=False, nonwrapped_numel=sum(p.numel() for p in rest)):
            modules.append(module)
            taken.update(rest)

    visit(model)
    return modules


def create_mps_fsdp_wrapper(
    world_size: int = 1,
    rank: int = 0,
    sharding_strategy: Any = "FULL_SHARD",
    mixed_precision: bool = True,
    cpu_offload: bool = False,
    device_type: str = "mps",
    **config: Any,
) -> MPSFSDPWrapper:
    """A wrapper; `config`: more fields of MPSFSDPConfig."""
    named = {"sharding_strategy": sharding_strategy, "use_mixed_precision": mixed_precision, "cpu_offload": cpu_offload}
    return MPSFSDPWrapper(MPSFSDPConfig(world_size=world_size, rank=rank, **named, **config), device_type)


def wrap_model_for_mps(
    model: nn.Module,
    min_num_params: float = 1e6,
    transformer_layer_cls: Any = None,
    device_type: str = "mps",
    **config: Any,
) -> nn.Module:
    """The model wrapped by layers of a class, or by size."""
    wrapper = MPSFSDPWrapper(MPSFSDPConfig(min_num_params=min_num_params, **config), device_type)
    if transformer_layer_cls is not None:
        return wrapper.wrap_transformer(model, transformer_layer_cls)
    return wrapper.wrap_model(model)


def check_mps_fsdp_compatibility(device_type: str = "mps") -> dict:
    """Requirements of sharding on Apple GPUs and whether they are met; `warnings`: those that are not. Never raises."""
    report: dict[str, Any] = {
        "mps_available": torch.backends.mps.is_available(),
        "mps_built": torch.backends.mps.is_built(),
        "pytorch_version": torch.__version__,
        "fsdp_available": dist.is_available(),
        "gloo_available": dist.is_available() and dist.is_gloo_available(),
        "macos_version": platform.mac_ver()[0] or None,
        "warnings": [],
    }
    reason = unavailable(device_type)
    if reason:
        report["warnings"].append(f"{device_type}: {reason}")
        return report
    device = torch.device(device_type)
    try:
        half = torch.ones(2, dtype=torch.float16, device=device)
        report["float16_supported"] = (half + half).sum().item() == 4
        report["bfloat16_supported"] = computes_bfloat16(device)
        device_shims.check_private_names()
    except (RuntimeError, TypeError, PlanError) as error:
        report["fsdp_available"] = report["fsdp_available"] and not isinstance(error, PlanError)
        report["warnings"].append(first_line(error))
    version = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])
    if report["macos_version"] and int(report["macos_version"].split(".")[0]) < 13:
        report["warnings"].append(f"macOS {report['macos_version']}: MPS needs 13 or later")
    if version < (2, 11):
        report["warnings"].append(f"torch {torch.__version__}: 2.11 is the oldest that this was written for")
    return report
