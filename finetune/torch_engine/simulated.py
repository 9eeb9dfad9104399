"""Tensors without values that the engine's own code runs on: their live bytes are counted, nothing is computed.

Torch's fake tensors, without its mode: what the host makes stays real, as the engine lays out documents with it, and
what is on the device, or computed with it, is fake. `device`: the CPU, or the name of a device that no machine has,
for which kernels are assumed to work (device.WITHOUT_VALUES).
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from finetune.torch_engine.device import SIMULATED

BLOCK = 512  # bytes that CUDA's allocator gives at a time


class Event:
    """Event of a device on which everything completes at once."""

    def record(self, stream: object = None) -> None: ...

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class SimulatedModule(_DummyBackendModule):
    """Functions of a device's module that autocast and random states need and torch's own stand-in lacks."""

    Event = Event

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: object, device: object = None) -> None: ...

    def synchronize(self, device: object = None) -> None: ...


# What CUDA's autocast computes in 16 bits, and in 32 (torch/docs, "Autocast Op Reference"): those that models call.
IN_16_BITS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv1d", "scaled_dot_product_attention")
IN_32_BITS = ("softmax.int", "layer_norm", "pow.Tensor_Scalar", "rsqrt", "exp", "log")
AUTOCAST = "AutocastPrivateUse1"


def register() -> torch.device:
    """The device without values; torch knows its name from the first call on."""
    if not hasattr(torch, SIMULATED):
        module: Any = SimulatedModule()
        _setup_privateuseone_for_python_backend(SIMULATED, backend_module=module)
        module.libraries = [torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")]
        module.libraries[0].fallback(torch.library.fallthrough_kernel, AUTOCAST)
        for names, dtype in ((IN_16_BITS, None), (IN_32_BITS, torch.float32)):
            for name in names:
                module.libraries[1].impl(name, _cast_around(name, dtype), AUTOCAST)
    return torch.device(SIMULATED, 0)


def _cast_around(name: str, dtype: torch.dtype | None):
    """The operator with its floating-point arguments in `dtype`; None: in autocast's."""
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    keys: Any = torch._C.DispatchKey
    key = torch._C.DispatchKeySet(keys.AutocastPrivateUse1)

    def run(*args: Any, **kwargs: Any):
        with torch._C._ExcludeDispatchKeyGuard(key):
            to = dtype or torch.get_autocast_dtype(SIMULATED)
            cast = [x.to(to) if torch.is_tensor(x) and x.dtype.is_floating_point else x for x in args]
            return operator(*cast, **kwargs)

    return run


class Simulated(TorchDispatchMode):
    """A context in which operations on `device` make tensors without values. `live`: bytes of the storages on it now,
    rounded as CUDA's allocator rounds; `peak`: the most there were; `calls`: operations so far.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.live = 0
        self.peak = 0
        self.calls = 0
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None):
        kwargs = kwargs or {}
        self.calls = self.calls + 1
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            out = self._grouped_product(*args, **kwargs)
            self.add([out])
            return out
        at = kwargs.get("device")
        if at is not None and torch.device(at).type == SIMULATED:
            if func is torch.ops.aten._to_copy.default and not isinstance(args[0], FakeTensor):
                return self.empty(args[0], kwargs.get("dtype"))
            with self.fake:
                out = func(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        self.add(tree_leaves(out))
        return out

    def add(self, tensors: Iterable) -> None:
        """Counts the storages of these tensors that are on the device."""
        for tensor in tensors:
            if not torch.is_tensor(tensor) or is_traceable_wrapper_subclass(tensor):  # a DTensor has no storage
                continue
            if tensor.device.type == self.device.type:
                storage = tensor.untyped_storage()
                if storage not in self.known:
                    self.known[storage] = size = [0]
                    weakref.finalize(storage, self._freed, size)
                    self.resized(storage)
        self.peak = max(self.peak, self.live)

    def resized(self, storage: Any) -> None:
        """Counts a known storage as it is now."""
        size = self.known[storage]
        self.live -= size[0]
        size[0] = -(-storage.nbytes() // BLOCK) * BLOCK
        self.live += size[0]
        self.peak = max(self.peak, self.live)

    def _grouped_product(
        self,
        left: torch.Tensor,
        right: torch.Tensor,
        offs: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ):
        """Empty result of a grouped product in dtypes that torch computes but has no shape rule for."""
        shape = (*left.shape[:-1], right.shape[-1])
        if left.ndim == right.ndim == 2:
            assert offs is not None, "both of two dimensions are grouped by their offsets"
            shape = (len(offs), *shape)
        return left.new_empty(shape, dtype=out_dtype)

    def _freed(self, size: list[int]) -> None:
        self.live -= size[0]

    def empty(self, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor without values of this shape, and its type or `dtype`, on the device."""
        with self.fake:
            made = torch.empty(like.shape, dtype=dtype or like.dtype, device=self.device)
        self.add([made])
        return made

    def place(self, model: nn.Module) -> None:
        """Moves a model on meta to the device; tied parameters stay tied. Its bytes are not counted."""
        made: dict = {}
        for module in model.modules():
            for name, p in module._parameters.items():
                if p is not None:
                    if p not in made:
                        made[p] = nn.Parameter(self.empty(p), requires_grad=p.requires_grad)
                    module._parameters[name] = made[p]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = self.empty(buffer)


class WithoutValues:
    """Takes the place of local shards where adapters are added to a model whose weights have no values."""

    magnitudes_are_known = False

    def has(self, parameter: nn.Parameter) -> bool:
        return True

    def give(self, name: str, parameter: nn.Parameter, drawn: Callable) -> None: ...
    def cast(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None: ...
