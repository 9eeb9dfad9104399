"""The cache of probe results: what makes an entry another one, and when a device is probed again."""

import os
import shutil
import subprocess
import sys

from backend_manager import BackendManager
from finetune.backend.machine import cpu_facts
from tests.support.commands import ROOT


def entry_of(checkout) -> str:
    code = "from backend_manager import ProbeCache; print(ProbeCache('cpu').file.name)"
    return subprocess.check_output([sys.executable, "-c", code], cwd=checkout, text=True).strip()


def test_results_are_forgotten_when_the_code_that_probes_or_decides_changes(tmp_path):
    for name in ("backend_manager.py", "quantization_wrapper.py"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "finetune", tmp_path / "finetune")
    entries = [entry_of(tmp_path)]
    assert entries == [entry_of(ROOT)]
    for changed in ("finetune/backend/capabilities.py", "quantization_wrapper.py", "finetune/quantizers/nf4.py"):
        with open(tmp_path / changed, "a") as file:
            file.write("# changed\n")
        entries.append(entry_of(tmp_path))
    assert len(set(entries)) == 4


def test_what_was_probed_beside_other_work_is_probed_again_once_it_has_ended(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load = [4.0 * cpu_facts()["cores"]]
    monkeypatch.setattr(os, "getloadavg", lambda: (load[0],) * 3)

    def rate_found(kept=None):
        manager = BackendManager("cpu", verbose=False)
        if kept:
            manager.cache.add({"memory_rate": kept})
        return manager.capabilities.memory_rate

    def choice():
        caps = BackendManager("cpu", verbose=False).capabilities
        return caps.onednn_speed, caps.supports_bfloat16, caps.reasons.get("bf16")

    slow = 1.0  # bytes per second
    assert rate_found() != slow
    assert rate_found(kept=slow) == slow  # the other work goes on
    BackendManager("cpu", verbose=False).cache.add({"onednn_speed": 1.234, "bfloat16_speed": 1.567})
    decided = choice()
    load[0] = 0.0
    assert BackendManager("cpu", verbose=False).documented_or_cached().memory_rate == slow
    assert rate_found() != slow
    assert rate_found(kept=slow) == slow  # as it was alone
    assert choice() == decided  # of the numbers that a run computes
