"""A dry run prints the plan and imports no framework."""

import subprocess
import sys

from tests.support.commands import ROOT, words


def test_a_dry_run_prints_the_plan_without_importing_a_framework(flags):
    argv = words(flags, "--dry_run", precision="auto")
    code = (
        f"import sys; sys.argv = {['train.py', *argv]!r}; import runpy\n"
        "code = runpy.run_path('train.py', run_name='train')['main']()\n"
        "assert not {'torch', 'mlx', 'transformers'} & set(sys.modules); sys.exit(code)"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert "rows per step: 4" in out.stdout and "precision: auto ->" in out.stdout
