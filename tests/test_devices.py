"""pytest --device: device-aware tests on the stand-in of a GPU, which refuses operands of two devices."""

import subprocess
import sys

import pytest

from tests.support import devices, emulated_device
from tests.support.commands import ROOT

needs_compiler = pytest.mark.skipif(bool(emulated_device.missing()), reason=str(emulated_device.missing()))
# A step and its state, the head's loss, attention, a quantized base; all the others are slow.
FEW = (
    "tests/torch_engine/test_state.py",
    "tests/torch_engine/test_loss.py::test_a_layers_loss_with_softcap_scale_and_bias_is_cross_entropy",
    "tests/torch_engine/attention/test_per_document.py::test_document_attention_is_plain_attention_in_each_document[lengths1-None-blas]",
    "tests/quantizers/test_linear.py::test_a_cached_layer_gives_the_same_numbers",
)
WRONG = """
import pytest, torch

@pytest.mark.parametrize("operation", [
    lambda x: x + torch.ones(2),
    lambda x: x[torch.tensor([0])],
    lambda x: torch.cat([x, torch.ones(1)]),
    lambda x: x.normal_(generator=torch.Generator()),
    lambda x: x.numpy(),
])
def test_it(device, operation):
    operation(torch.ones(2, device=device))

def test_of_no_device():
    raise AssertionError("left out")
"""


def pytest_on(device: str, *arguments) -> tuple[int, str]:
    argv = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    done = subprocess.run([*argv, "--device", device, *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@needs_compiler
@pytest.mark.slow
def test_some_of_each_kind_pass_on_the_stand_in():
    code, said = pytest_on(emulated_device.NAME, *FEW)
    assert code == 0 and f"{len(FEW)} passed" in said, said


@needs_compiler
@pytest.mark.slow
def test_every_device_aware_test_passes_on_the_stand_in():
    """What `make test-gpu` runs on a card."""
    code, said = pytest_on(emulated_device.NAME)
    assert code == 0, said[-5000:]


@needs_compiler
@pytest.mark.slow
def test_a_tensor_on_the_wrong_device_fails():
    file = ROOT / "tests" / "test_wrong_device_of_a_moment.py"
    file.write_text(WRONG)
    try:
        code, said = pytest_on(emulated_device.NAME, str(file))
    finally:
        file.unlink()
    assert code == 1 and "5 failed, 1 deselected" in said, said


@pytest.mark.slow
def test_a_device_that_this_machine_lacks_is_refused_in_one_line():
    name = next(n for n in ("mps", "cuda", "xpu") if devices.unavailable(n))
    code, said = pytest_on(name, "tests/torch_engine/test_state.py")
    assert code == 4 and f"--device {name}: not on this machine" in said and "emulated" in said, said
