"""What a program's imports leave out."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = """
import sys
from finetune.system import process

def main():
    from finetune.torch_engine import engine
    import transformers.utils
    print("torch._inductor.compile_fx" in sys.modules, "hqq" in sys.modules, transformers.utils.is_hqq_available())
    return 0

{}
"""


WITH_IT = pytest.param("main()", True, marks=pytest.mark.slow)


@pytest.mark.parametrize(("end", "imported"), [("process.exit_with(main)", False), WITH_IT])
def test_a_program_imports_the_engine_without_the_compiler_that_hqq_would_bring(end, imported):
    pytest.importorskip("hqq", reason="hqq is not installed")
    done = subprocess.run([sys.executable, "-c", CODE.format(end)], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == [str(imported), str(imported), "True"], done.stderr
