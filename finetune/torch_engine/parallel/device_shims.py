"""Shims for features of a device that FSDP2 and DeviceMesh need and Apple GPUs lack, each installed after a test.

Three shims: pieces of the device's module (streams, current device), three operators of FSDP2, and freeing and
refilling gathered weights without resizing their storage, which MPS refuses. Private names of torch that they replace
are checked first: see EXPECTED.
"""

import contextlib
import functools
import inspect
import types
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param

from finetune.errors import PlanError

OPERATORS = {
    "all_gather_copy_in": "all_gather_copy_in_cuda",
    "split_with_sizes_copy": "split_with_sizes_copy",
    "chunk_cat": "chunk_cat",
}
# {name in torch's FSDP2: the first parameters it must have}, the same from torch 2.11 to 2.13.
EXPECTED = {
    "FSDPParam.init_all_gather_outputs": (
        "self",
        "all_gather_input_numels",
        "all_gather_input_dtypes",
        "world_size",
        "device",
    ),
    "FSDPParam.init_unsharded_param": ("self",),
    "FSDPParam.free_unsharded_param": ("self",),
    "all_gather_copy_in_cuda": (
        "all_gather_inputs",
        "all_gather_output",
        "inp_split_sizes",
        "all_gather_input_numel",
        "rank",
    ),
    "split_with_sizes_copy": ("all_gather_output", "all_gather_input_split_sizes", "dim", "out"),
    "chunk_cat": ("tensors", "dim", "num_chunks", "out"),
}


class InOrderStream:
    """The one queue of a device whose work runs in the order it was submitted: waiting for it is nothing to do."""

    def __init__(self, event: Any = None, priority: int = 0):
        self.event = event

    def record_event(self, event: Any = None):
        """An event of the device, recorded now; FSDP2 expects one."""
        event = event or self.event()
        event.record()
        return event

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: "InOrderStream") -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None: ...


def pieces(module: types.ModuleType) -> dict:
    """{name: value} that FSDP2, DeviceMesh and activation checkpointing look up on a device's module.

    `device` and `_initialized` let checkpointing restore the device's random state: without them dropout differs when
    a layer is recomputed, and gradients are wrong in silence.
    """
    event = getattr(module, "Event", torch.Event)
    stream = functools.partial(InOrderStream, event)
    current = stream()
    return {
        "Stream": stream,
        "current_stream": lambda device=None: current,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "is_initialized": lambda: True,
        "_initialized": True,
        "device": lambda device: contextlib.nullcontext(),
    }


def missing_pieces(device_type: str) -> list[str]:
    """Names of `pieces` that the device's module lacks."""
    module = torch.get_device_module(device_type)
    return [name for name in pieces(module) if not hasattr(module, name)]


def missing_operators(key: str) -> list[str]:
    """FSDP2's operators without a kernel under a dispatch key."""
    return [op for op in OPERATORS if not torch._C._dispatch_has_kernel_for_dispatch_key(f"fsdp::{op}", key)]


def refuses_resize(device_type: str) -> bool:
    """True if storages of the device cannot be resized. Tries it."""
    storage = torch.ones(16, device=device_type).untyped_storage()
    try:
        storage.resize_(0)
        storage.resize_(64)
    except (RuntimeError, NotImplementedError):
        return True
    return False


def check_private_names() -> None:
    """Raises PlanError if this torch's FSDP2 is not one that the shims fit."""
    for name, expected in EXPECTED.items():
        owner, _, method = name.rpartition(".")
        found = getattr(getattr(_fsdp_param, owner) if owner else _fsdp_collectives, method, None)
        found = getattr(found, "__wrapped__", found)
        parameters: tuple[str, ...] = ()
        if found:
            parameters = tuple(inspect.signature(found).parameters)
        if parameters[: len(expected)] != expected:
            raise PlanError(
                f"torch {torch.__version__}: FSDP2's {name}{parameters} is not the {name}{expected} that sharding on "
                "this device replaces. Use torch 2.11 to 2.13, or one process (--world_size 1)."
            )


def dispatch_key(device_type: str) -> str:
    """torch's dispatch key of a device type."""
    private = torch._C._get_privateuse1_backend_name()
    if device_type == private:
        return "PrivateUse1"
    return device_type.upper()


def install(device_type: str) -> list[str]:
    """Supplies what is missing on the device; one line for each shim installed. Raises PlanError."""
    check_private_names()
    installed = []
    missing = install_pieces(device_type)
    if missing:
        installed.append(f"torch.{device_type}: {', '.join(missing)}")
    operators = install_operators(torch.get_device_module(device_type), dispatch_key(device_type))
    if operators:
        installed.append(f"FSDP2 operators: {', '.join(operators)}")
    if refuses_resize(device_type):
        free_without_resize(device_type)
        installed.append("weights are freed and refilled without resizing their storage, which the device refuses")
    return installed


def install_pieces(device_type: str) -> list[str]:
    """Completes the device's module; the names that were missing."""
    module = torch.get_device_module(device_type)
    missing = missing_pieces(device_type)
    for name, value in pieces(module).items():
        if name in missing:
            setattr(module, name, value)
    return missing


def install_operators(module: Any, key: str) -> list[str]:
    """Registers torch's own implementations of FSDP2's operators where a dispatch key has none; their names.
    The device's module keeps their Library, without which they would be unregistered.
    """
    missing = missing_operators(key)
    if missing:
        module._fsdp_library = library = torch.library.Library("fsdp", "FRAGMENT")
        for op in missing:
            library.impl(op, getattr(_fsdp_collectives, OPERATORS[op]), key)
    return missing


def free_without_resize(device_type: str) -> None:
    """FSDP2's parameters on this device type give up their gathered memory by letting go of it.

    Freed tensors become empty, and a later gather fills new memory. What autograd has saved keeps the old: memory falls
    only with activation checkpointing, or where the saved tensors are packed ones.
    """
    cls: Any = _fsdp_param.FSDPParam  # which gets one more attribute, and other methods
    if device_type in getattr(cls, "_freed_by_letting_go", ()):
        return
    cls._freed_by_letting_go = (*getattr(cls, "_freed_by_letting_go", ()), device_type)
    if len(cls._freed_by_letting_go) > 1:
        return  # the methods ask each parameter for its device
    init_outputs = cls.init_all_gather_outputs
    init_param = cls.init_unsharded_param
    free = cls.free_unsharded_param

    @functools.wraps(init_outputs)
    def init_all_gather_outputs(
        self,
        numels: list[int],
        dtypes: list[torch.dtype],
        world_size: int,
        device: torch.device,
        *rest: Any,
        **options: Any,
    ):
        init_outputs(self, numels, dtypes, world_size, device, *rest, **options)
        if device.type in cls._freed_by_letting_go:
            for tensor, numel in zip(self.all_gather_outputs, numels, strict=True):
                if tensor.numel() != numel * world_size:
                    tensor.data = tensor.new_empty(numel * world_size)

    @functools.wraps(init_param)
    def init_unsharded_param(self):
        init_param(self)
        gathered = self.all_gather_outputs[0]
        local = _local(self._unsharded_param)
        if gathered.device.type in cls._freed_by_letting_go and local.data_ptr() != gathered.data_ptr():
            local.data = torch.as_strided(gathered, self._orig_size, self._contiguous_orig_stride, 0)

    @functools.wraps(free)
    def free_unsharded_param(self):
        if self.device.type not in cls._freed_by_letting_go:
            return free(self)
        for tensor in self.all_gather_outputs:
            tensor.data = tensor.new_empty(0)
        if hasattr(self, "_unsharded_param"):
            local = _local(self._unsharded_param)
            local.data = local.new_empty(0)

    cls.init_all_gather_outputs = init_all_gather_outputs
    cls.init_unsharded_param = init_unsharded_param
    cls.free_unsharded_param = free_unsharded_param


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """The tensor that holds a parameter's values; under tensor parallelism the parameter is a DTensor around it."""
    return getattr(parameter, "_local_tensor", parameter)
