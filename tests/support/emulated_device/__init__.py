"""The device `emulated`: a stand-in for an Apple GPU that computes on the CPU. See device.cpp.

Its module offers what `torch.mps` offers and no more, so that what FSDP2 misses on MPS is missing here too.
"""

import hashlib
import os
import shutil
import sys
import types
from pathlib import Path

import torch

NAME = "emulated"
MEMORY_BYTES = 8 * 2**30


class Event:
    """As torch.mps.Event: it records in the default stream, and record() returns nothing."""

    def __init__(self, enable_timing: bool = False):
        self.recorded = False

    def record(self) -> None:
        self.recorded = True

    def wait(self) -> None: ...

    def query(self) -> bool:
        return self.recorded

    def synchronize(self) -> None: ...


def missing() -> str | None:
    """Why the device cannot be built here; None if it can."""
    if sys.platform != "linux":
        return "the emulated device is built on Linux only"
    if not shutil.which(os.environ.get("CXX", "g++")):
        return "no C++ compiler: apt-get install g++"
    return None


def load(refuses_resize: bool = True):
    """The built extension, with torch.device('emulated') usable after it. Takes 30 s the first time, then 1 s."""
    from torch.utils.cpp_extension import load as build

    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # ninja is there
    source = Path(__file__).with_name("device.cpp")
    # One build for each checkout and version of the source: two at work must not build over one another.
    name = f"emulated_device_{hashlib.sha256(bytes(source) + source.read_bytes()).hexdigest()[:12]}"
    device = build(name, [str(source)], extra_cflags=["-O1"])
    sys.modules["emulated_device"] = device
    if not hasattr(torch, NAME):
        torch.utils.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, _module(device))
        torch.utils.generate_methods_for_privateuse1_backend(unsupported_dtype=[])
    device.refuse_resize(refuses_resize)
    return device


def extension():
    """The extension, once it is loaded."""
    return sys.modules["emulated_device"]


def _module(device) -> types.ModuleType:
    module, seeds = types.ModuleType(f"torch.{NAME}"), torch.Generator()
    module._is_in_bad_fork = lambda: False
    module.manual_seed = module.manual_seed_all = seeds.manual_seed
    module.get_rng_state = lambda device=NAME: seeds.get_state()
    module.set_rng_state = lambda state, device=NAME: seeds.set_state(state)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]  # what autocast asks of a PrivateUse1
    module.is_available = lambda: True
    module.device_count = lambda: 1
    module.synchronize = module.empty_cache = lambda: None
    module.set_per_process_memory_fraction = lambda fraction: None
    module.current_allocated_memory = device.live_bytes
    module.driver_allocated_memory = device.live_bytes
    module.recommended_max_memory = lambda: MEMORY_BYTES
    module.Event = Event
    return module


def environment() -> dict:
    """Environment of a process that imports the device and the project from anywhere."""
    root = str(Path(__file__).parents[3])
    return {**os.environ, "PYTHONPATH": root, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
