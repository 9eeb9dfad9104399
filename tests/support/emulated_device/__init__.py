"""The device `emulated`: a stand-in for an Apple GPU that computes on the CPU. See device.cpp.

Its module offers what `torch.mps` offers and no more, so that what FSDP2 misses on MPS is missing here too; with
`streams` what a device needs too that copies beside its work, as CUDA does.
"""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import ClassVar

import torch

from finetune.model_files.demo_model import locked
from finetune.system.files import cache_folder

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


class Stream:
    """Stand-in for torch.cuda.Stream: here all work has ended when it was asked for. `waits`: (stream, event) of each
    wait of the device, `host_waits`: threads whose host waited.
    """

    waits: ClassVar[list] = []
    host_waits: ClassVar[list] = []

    def __init__(self, device=None):
        self.device = device

    def wait_event(self, event: Event) -> None:
        assert event.recorded
        self.waits.append((self, event))


class EventOfStreams(Event):
    def record(self, stream: Stream | None = None) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        Stream.host_waits.append(threading.current_thread())


def missing() -> str | None:
    """Why the device cannot be built here; None if it can."""
    if sys.platform != "linux":
        return "the emulated device is built on Linux only"
    if not shutil.which(os.environ.get("CXX", "g++")):
        return "no C++ compiler: apt-get install g++"
    return None


def load(refuses_resize: bool = True, streams: bool = False):
    """The built extension, with torch.device('emulated') usable after it. Compiled once, see `built`. `streams`: the
    device has them, from its first load on.
    """
    device = sys.modules.get("emulated_device") or _imported(built())
    sys.modules["emulated_device"] = device
    if not hasattr(torch, NAME):
        torch.utils.rename_privateuse1_backend(NAME)
        module = _module(device)
        if streams:
            _offer_streams(module)
        torch._register_device_module(NAME, module)
        torch.utils.generate_methods_for_privateuse1_backend(unsupported_dtype=[])
    device.refuse_resize(refuses_resize)
    return device


def built() -> Path:
    """The compiled extension in the user's cache folder: the first process that asks compiles it, others wait."""
    source = Path(__file__).with_name("device.cpp").read_bytes()
    built_from = repr((source, torch.__version__, sys.version, os.environ.get("CXX")))
    key = hashlib.sha256(built_from.encode()).hexdigest()[:16]
    folder = cache_folder("tests") / f"emulated_device-{key}"
    library = folder / "emulated_device.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / "lock"):
            if not library.exists():
                _compile(source, library)
    return library


def _compile(source: bytes, library: Path) -> None:
    """Compiles beside `library` and renames, so that no process finds an incomplete file."""
    folder = library.parent / ".tmp-build"
    folder.mkdir()
    (folder / "device.cpp").write_bytes(source)
    # torch imports what it builds, from this folder: not in this process, which imports it from the other.
    code = (
        "from torch.utils.cpp_extension import load\n"
        f"load({library.stem!r}, ['device.cpp'], build_directory='.', extra_cflags=['-O1'])"
    )
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # ninja is there
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=os.environ | {"PATH": path}, check=True)
    (folder / library.name).rename(library)
    shutil.rmtree(folder)


def _imported(library: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(library.stem, library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def _offer_streams(module: types.ModuleType) -> None:
    default = Stream()
    module.Stream = Stream
    module.Event = EventOfStreams
    module.current_stream = lambda device=None: default
    module.stream = contextlib.nullcontext


def environment() -> dict:
    """Environment of a process that imports the device and the project from anywhere."""
    root = str(Path(__file__).parents[3])
    return {**os.environ, "PYTHONPATH": root, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
