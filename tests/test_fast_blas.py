"""A fast BLAS is opened before MLX, and the line says which."""

import ctypes.util
import subprocess
import sys
from pathlib import Path

import pytest

from finetune.fast_blas import MKL_NAMES
from tests.support.commands import ROOT

MKL = [Path(sys.prefix) / "lib" / name for name in MKL_NAMES if (Path(sys.prefix) / "lib" / name).is_file()]


def said(code: str) -> str:
    start = "from finetune.fast_blas import open_before_mlx\n"
    return subprocess.run([sys.executable, "-c", start + code], cwd=ROOT, capture_output=True, text=True).stdout.strip()


@pytest.mark.skipif(not MKL or sys.platform != "linux", reason="needs MKL: pip install mkl")
def test_mkl_takes_the_place_of_mlxs_own_blas():
    code = "print(open_before_mlx())\nimport ctypes\nprint(bool(ctypes.CDLL(None).MKL_Get_Max_Threads()))"
    assert said(code).splitlines() == [f"BLAS: MKL ({MKL[0].name})", "True"]


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has Accelerate")
def test_without_one_the_line_has_the_remedy():
    code = "import sys; sys.prefix = '/nowhere'; print(open_before_mlx())"
    found = said(code)
    if ctypes.util.find_library("openblas"):
        assert found.startswith("BLAS: OpenBLAS")
    else:
        assert "20 times slower" in found and "pip install mkl" in found
    assert "before a fast BLAS could be opened" in said("import mlx.core; print(open_before_mlx())")
