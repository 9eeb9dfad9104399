"""Trials of the device, made once and cached on disk: matmuls in bf16 and through oneDNN, and quantizers."""

import contextlib
import hashlib
import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from finetune.backend.capabilities import Backend
from finetune.backend.machine import cpu_facts, environment, versions
from finetune.errors import first_line
from finetune.system.files import cache_folder, replace
from finetune.system.json_files import NUMBER, OPTIONAL_NUMBER, JsonFileError, check, read_json

# What torch raises where a device, its driver or a kernel is missing.
# SubprocessError: a compiler that a kernel needs when it first runs.
PROBE_FAILURES = (
    *(RuntimeError, AssertionError, ImportError, AttributeError, OSError, TypeError, ValueError),
    subprocess.SubprocessError,
)
# What is cached of a device, and of each pair of a quantizer and its bits that passed.
FACTS = {
    "device_name": str,
    "bfloat16_speed": OPTIONAL_NUMBER,
    "bfloat16_error": (str, type(None)),
    "onednn_speed": OPTIONAL_NUMBER,
    "onednn_error": (str, type(None)),
    "flash": bool,
    "capability": [int],
    "memory": (int, type(None)),
    "product_rates?": {str: NUMBER},
    "memory_rate?": OPTIONAL_NUMBER,
    "operator_seconds?": OPTIONAL_NUMBER,
    "host_link_rate?": OPTIONAL_NUMBER,
    "busy?": NUMBER,
}
DECISIVE = ("bfloat16_speed", "bfloat16_error", "onednn_speed", "onednn_error")  # of the numbers that a run computes
BUSY = 0.5  # from here on other work slows memory, and with it all rates
PASSED = dict.fromkeys(("weight_error", "product_error", "slowdown", "bits_per_weight"), NUMBER)


def busy() -> float:
    """Processes per core that computed in the last minute; 0 where the system does not say."""
    try:
        return round(os.getloadavg()[0] / cpu_facts()["cores"], 2)
    except (AttributeError, OSError):
        return 0.0


def _digest(facts: dict) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class ProbeCache:
    """Probe results on disk, keyed by backend, library versions, CPU and the source of all that probes and decides."""

    def __init__(self, backend: Backend):
        self.backend = str(backend)
        package = Path(__file__).parents[1]
        probed = [package.parent / "quantization_wrapper.py", *package.glob("backend/*.py")]
        probed += package.glob("quantizers/*.py")
        key = [
            str(backend),
            versions(),
            cpu_facts(),
            environment().get("CUDA_VISIBLE_DEVICES"),
            [file.read_text(encoding="utf-8") for file in sorted(probed)],
        ]
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
        self.file = cache_folder("probes") / f"{backend}-{name}.json"

    def read(self) -> dict:
        """Cached results; {} if there are none or the file is not as `add` wrote it: it is then written again. What
        decides the numbers of a run is not taken from a file that a disk changed.
        """
        where = str(self.file)
        try:
            kept = read_json(self.file, {"facts": dict, "sha256": str})
            facts = kept["facts"]
            if kept["sha256"] != _digest(facts):
                return {}
            check(facts, {"quantizers?": {str: {"error": (str, type(None))}}}, where)
            if set(facts) - {"quantizers"}:
                check(facts, FACTS, where)
            for pair, found in facts.get("quantizers", {}).items():
                check(found, {} if found["error"] else PASSED, where)
                if not re.fullmatch(r"\w+/\d{1,2}", pair):
                    return {}
        except (JsonFileError, FileNotFoundError):
            return {}
        return facts

    @staticmethod
    def is_missing(facts: dict) -> bool:
        """True if the device needs a probe: it was never probed, or only while the machine was busy, which it no longer
        is.
        """
        return "bfloat16_speed" not in facts or facts.get("busy", 0.0) > BUSY >= busy()

    def add(self, facts: dict) -> dict:
        """Merges `facts` into the cache and returns all; a read-only home directory only costs time."""
        facts = self.read() | facts
        with contextlib.suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with replace(self.file) as file:
                file.write(json.dumps({"facts": facts, "sha256": _digest(facts)}, indent=1).encode())
        return facts

    def add_probed(self, facts: dict) -> dict:
        """`add`, but what decides a run's numbers stays as it was found first: the same command gives the same bits.
        Probing again changes rates only.
        """
        return self.add(facts | {name: found for name, found in self.read().items() if name in DECISIVE})

    def quantizer(self, method: str, bits: int, probe: Callable | None = None) -> dict | None:
        """The probe result of one pair: cached, else that of `probe(method, bits, device)`; None without either."""
        pair = f"{method}/{bits}"
        known = self.read().get("quantizers", {})
        if pair not in known and probe is not None:
            found = probe(method, bits, self.backend)
            if "is not installed" not in (found["error"] or ""):  # it may be installed before the next start
                self.add({"quantizers": known | {pair: found}})
            return found
        return known.get(pair)


def probe_torch(device: str) -> dict:
    """Runs all probes but those of quantizers: {'bfloat16_speed', 'bfloat16_error', 'flash', 'capability', ...}."""
    import torch

    known = {name: None for name in FACTS if not name.endswith("?")}
    facts = known | {"device_name": device, "flash": False, "capability": [], "busy": busy()}
    if device == "cuda":
        facts["device_name"] = torch.cuda.get_device_name()
        facts["capability"] = capability = torch.cuda.get_device_capability()
        facts["flash"] = torch.backends.cuda.is_flash_attention_available() and capability >= (8, 0)
    if device in ("cuda", "xpu"):
        facts["memory"] = torch.get_device_module(device).mem_get_info()[1]
    return facts | _matmul_speeds(device) | _rates(device)


ONEDNN_ERROR = 3e-6  # of the largest element: rounding in fp32 gives 1e-7 to 1e-6 here, bf16 arithmetic 1e-3


def _matmul_speeds(device: str) -> dict:
    """Speeds and errors of matmuls in bf16, relative to fp32's fastest, and of oneDNN's in fp32, relative to BLAS's.

    256x1024 times 1024x1024, as in a small microbatch; each the best of 8, in turns; on a CPU, the processor time of
    one thread, which other load changes least. oneDNN takes an fp32 matmul only if bf16 arithmetic is allowed in it;
    where the processor has instructions for that, products are not fp32's, and the error shows it.
    """
    import torch

    x, w = (torch.randn(n, 1024, device=device) for n in (256, 1024))
    ways = {"fp32": (torch.float32, "none"), "bf16": (torch.bfloat16, "none")}
    facts: dict[str, Any] = dict.fromkeys(("bfloat16_speed", "bfloat16_error", "onednn_speed", "onednn_error"))
    if device == "cpu" and torch.backends.mkldnn.is_available():
        ways["onednn"] = (torch.float32, "bf16")
    elif device == "cpu":
        facts["onednn_error"] = "this torch was built without oneDNN"
    times: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    with _one_thread(device):
        for _ in range(9):
            for name, (dtype, allowed) in ways.items():
                if name not in failed:
                    try:
                        seconds, off = _timed_matmul(x.to(dtype), w.to(dtype), allowed, check=name not in times)
                        times.setdefault(name, []).append(seconds)
                        limit = ONEDNN_ERROR if name == "onednn" else 0.02
                        failed |= {name: f"error {off:.1e} on {device}"} if not off <= limit else {}
                    except (RuntimeError, TypeError) as error:
                        failed[name] = first_line(error)
    best = {name: min(found[1:]) for name, found in times.items() if name not in failed}
    if device == "cpu":
        facts["product_rates"] = {name: _rounded(2 * x.numel() * len(w) / found) for name, found in best.items()}
    if "onednn" in ways:
        facts["onednn_error"] = failed.get("onednn") and f"oneDNN's fp32 products fail here: {failed['onednn']}"
        both = "onednn" in best and "fp32" in best
        facts["onednn_speed"] = round(best["fp32"] / best["onednn"], 3) if both else None
        facts["onednn_error"] = facts["onednn_error"] or (None if both else f"fp32 matmuls: {failed.get('fp32')}")
    wrong = failed.get("fp32") or failed.get("bf16")
    facts["bfloat16_error"] = wrong and f"matmuls fail: {wrong}"
    if not facts["bfloat16_error"]:
        facts["bfloat16_speed"] = round(min(best["fp32"], best.get("onednn", best["fp32"])) / best["bf16"], 3)
    return facts


COPIED_BYTES = 2**26
ACCELERATOR_SIZE = 4096
OPERATORS = 200


def _rates(device: str) -> dict:
    """Rates for estimate.rates: FLOP/s of large products on an accelerator (a CPU's are of _matmul_speeds),
    bytes/s that a copy reads and writes, seconds to start an operator that autograd records, bytes/s from pinned
    memory to CUDA. Each the best of 5; on a CPU of one thread, by its processor time.
    """
    import torch

    cpu = device == "cpu"
    found: dict[str, Any] = {}
    if cpu:
        clock = time.thread_time
    else:
        clock = time.perf_counter
    wait = torch.get_device_module(device).synchronize

    def best(work: Callable) -> float:
        taken = []
        for _ in range(6):
            wait()
            start = clock()
            work()
            wait()
            taken.append(clock() - start)
        return max(min(taken[1:]), 1e-9)

    try:
        with _one_thread(device):
            source = torch.ones(COPIED_BYTES // 4, device=device)
            target = torch.empty_like(source)
            found["memory_rate"] = _rounded(2 * COPIED_BYTES / best(lambda: target.copy_(source)))
            small = torch.ones(8, device=device, requires_grad=True)
            found["operator_seconds"] = _rounded(best(lambda: [small + small for _ in range(OPERATORS)]) / OPERATORS)
        if not cpu:
            found["product_rates"] = {}
            for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
                x = torch.ones(ACCELERATOR_SIZE, ACCELERATOR_SIZE, device=device, dtype=dtype)
                found["product_rates"][name] = _rounded(2 * ACCELERATOR_SIZE**3 / best(lambda x=x: x @ x))
        if device == "cuda":
            pinned = torch.ones(COPIED_BYTES // 4, pin_memory=True)
            found["host_link_rate"] = _rounded(COPIED_BYTES / best(lambda: target.copy_(pinned, non_blocking=True)))
    except (RuntimeError, TypeError):
        return {}  # nothing is predicted from them then; what fails is reported by the products above
    return found


@contextlib.contextmanager
def _one_thread(device: str):
    """Context in which torch computes with one thread, on a CPU: other load changes its processor time least."""
    import torch

    threads = torch.get_num_threads()
    try:
        if device == "cpu":
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _timed_matmul(x: Any, w: Any, allowed: str, check: bool) -> tuple[float, float]:
    """(seconds of one product, its error relative to the largest element; 0.0 without `check`)."""
    import torch

    matmul = cast(Any, torch.backends.mkldnn).matmul  # an attribute that torch's types do not name
    before = matmul.fp32_precision
    matmul.fp32_precision = allowed
    if x.device.type == "cpu":
        clock = time.thread_time
    else:
        clock = time.perf_counter
    try:
        start = clock()
        product = x @ w.T
        torch.get_device_module(x.device).synchronize()
        seconds = clock() - start
    finally:
        matmul.fp32_precision = before
    if not check:
        return seconds, 0.0
    exact = x.double().cpu() @ w.double().cpu().T
    return seconds, ((product.double().cpu() - exact).abs().max() / exact.abs().max()).item()
