"""The cache of probe results: what makes an entry another one."""

import shutil
import subprocess
import sys

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
