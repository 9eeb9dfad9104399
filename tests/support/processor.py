"""pytest --processor fp32|bf16: tests see that kind of machine, by the probe results that BackendManager finds cached.

torch computes bf16 on any processor, only slowly where it has no instructions for it.
"""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from backend_manager import BackendManager, ProbeCache, probe_torch
from finetune.torch_engine.device import set_onednn

# What probing found on a Xeon of 2.50 GHz, which emulates bf16, and on an EPYC with avx512_bf16.
FOUND = {
    "fp32": {"bfloat16_speed": 0.3, "bfloat16_error": None, "onednn_speed": 1.0, "onednn_error": None},
    "bf16": {"bfloat16_speed": 2.0, "bfloat16_error": None, "onednn_speed": 2.2, "onednn_error": None},
}


def add_option(parser) -> None:
    parser.addoption(
        "--processor",
        choices=("own", "other", *FOUND),
        default="own",
        help="the kind of processor that tests believe in; other: the one that this machine is not",
    )


def believe_in(kind: str) -> None:
    """This process and those it starts find these probe results; everything else in the cache folder stays."""
    if kind == "own" or "PYTEST_XDIST_WORKER" in os.environ:  # a worker has the environment of the first process
        return
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    facts = ProbeCache("cpu").read()
    facts = facts if "bfloat16_speed" in facts else probe_torch("cpu")
    if kind == "other":
        kind = "fp32" if (facts["bfloat16_speed"] or 0) >= 1.1 else "bf16"
    other = Path(tempfile.mkdtemp(prefix="processor-"))
    atexit.register(shutil.rmtree, other, ignore_errors=True)
    (other / "finetune").mkdir()
    for folder, kept in ((own, "finetune"), (own / "finetune", "probes")):
        for entry in folder.iterdir() if folder.is_dir() else ():
            if entry.name != kept:
                (other / entry.relative_to(own)).symlink_to(entry)
    os.environ["XDG_CACHE_HOME"] = str(other)
    ProbeCache("cpu").add(facts | FOUND[kind] | {"busy": 0.0})


def use_exact_onednn() -> None:
    """Lets oneDNN multiply fp32 matrices in this test, which is skipped where that rounds them to bf16."""
    import torch

    set_onednn(True)
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))  # small ones are exact in torch 2.11
    exact = (x.double() @ x.double().t()).float()
    if not torch.allclose(x @ x.t(), exact, atol=1e-3):
        pytest.skip("this processor has bf16 instructions by which oneDNN rounds fp32 products")


def need_cpu_matmul(word: str) -> None:
    """Skips a test with --cpu_matmul onednn where that is refused."""
    reasons = BackendManager("cpu", verbose=False).capabilities.reasons
    if word == "onednn" and "cpu_matmul" in reasons:
        pytest.skip(f"--cpu_matmul onednn: {reasons['cpu_matmul']}")
