"""A fast BLAS for MLX on a Linux CPU: its wheel ships the reference BLAS, 16 to 33 times slower than MKL or OpenBLAS.

A library that is opened globally precedes MLX's own in symbol lookup, so it must be opened before mlx is imported.
"""

import ctypes
import os
import platform
import sys
from pathlib import Path

MKL_NAMES = ("libmkl_rt.so.3", "libmkl_rt.so.2")
OPENBLAS_NAMES = ("libopenblas.so.0", "libopenblas.so")
REMEDY = "pip install mkl, or install the system's libopenblas0"


def open_before_mlx() -> str | None:
    """Notice on the BLAS that MLX will use; None where it needs none (macOS, MLX on a GPU)."""
    if sys.platform != "linux":
        return None
    if "mlx.core" in sys.modules:
        return "BLAS: mlx was imported before a fast BLAS could be opened"
    if platform.machine() in ("x86_64", "AMD64"):
        os.environ.setdefault("MKL_THREADING_LAYER", "GNU")
        folder = Path(sys.prefix) / "lib"
        for path in (str(folder / name) for name in MKL_NAMES if (folder / name).is_file()):
            if _opens(path):
                return f"BLAS: MKL ({Path(path).name})"
    for name in OPENBLAS_NAMES:
        if _opens(name):
            return f"BLAS: OpenBLAS ({name})"
    return f"BLAS: MLX's own reference implementation, some 20 times slower than a fast one: {REMEDY}"


def _opens(path: str) -> bool:
    try:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True
