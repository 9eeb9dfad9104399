"""pytest --device cuda: the tests that take the fixture `device` run there; the others are left out.

`emulated` is the stand-in of tests/support/emulated_device: it computes on the CPU, in memory of its own, and refuses
operands of two devices, as a GPU does. Without --device everything runs, device-aware tests on the CPU.
"""

import os

import pytest
import torch

from tests.support import emulated_device

# How far sums of the same numbers in another order may be from each other, relative to the largest of a tensor. A GPU
# takes other kernels, tiles and splits of a sum for other shapes, and adds some with atomics, in no order.
ROUNDINGS = {"cpu": 1.0, emulated_device.NAME: 1.0}
ROUNDINGS_OF_A_GPU = 10.0
# The rounding of sums in fp32 that tests of tiny models state for a CPU, and what a type adds to it.
SUMS = {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="run the device-aware tests there: cuda, mps, xpu or emulated")


def pytest_configure(config):
    name = config.getoption("--device")
    if name == emulated_device.NAME:
        reason = emulated_device.missing()
        if reason is None:
            emulated_device.load()  # autograd must meet the device before its first backward
    else:
        reason = unavailable(name)
    if reason is not None:
        raise pytest.UsageError(f"--device {name}: not on this machine ({reason}). Use --device emulated.")
    if name != "cpu":  # NVIDIA's containers set it: fp32 products would have 10 bits
        os.environ["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"] = "0"


def pytest_collection_modifyitems(config, items):
    if config.getoption("--device") == "cpu":
        return
    left_out = [item for item in items if "device" not in item.fixturenames]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if "device" in item.fixturenames]


def pytest_report_header(config):
    name = config.getoption("--device")
    return None if name == "cpu" else f"device: {name}, tests that take the fixture `device` only"


@pytest.fixture(scope="session")
def device(pytestconfig) -> torch.device:
    """Where device-aware tests compute."""
    return torch.device(pytestconfig.getoption("--device"))


@pytest.fixture
def needs_gpu(device) -> torch.device:
    """The device of a test that only a GPU's own kernels can show something to."""
    if device.type in ROUNDINGS:
        pytest.skip(f"needs a GPU: pytest --device cuda (this is {device.type})")
    return device


def unavailable(name: str) -> str | None:
    """Why this torch has no such device; None if it has."""
    if name == "cpu":
        return None
    try:
        available = torch.get_device_module(name).is_available()
    except (RuntimeError, AttributeError) as error:
        return str(error).partition("\n")[0]
    return None if available else f"torch {torch.__version__} sees no {name} device"


def num_devices(device: torch.device) -> int:
    """How many ranks can have a device of their own; on a CPU and on its stand-in, any number."""
    return 2**10 if device.type in ROUNDINGS else torch.get_device_module(device).device_count()


def tolerance(device: torch.device, on_cpu: float | None = None, dtype: torch.dtype = torch.float32) -> float:
    """A relative tolerance on `device`; `on_cpu`: the one that a CPU's orders of sums need, by default the type's."""
    wanted = SUMS[dtype] if on_cpu is None else on_cpu
    return wanted * ROUNDINGS.get(device.type, ROUNDINGS_OF_A_GPU)
