"""The MLX engine. Its import opens a fast BLAS first, and keeps the limit of open files, which mlx-lm's import lowers.
A process without privileges could not raise its hard limit again afterwards.
"""

import resource

from finetune.fast_blas import open_before_mlx

BLAS = open_before_mlx()


def _import_mlx_lm() -> None:
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda *ignored: None
    try:
        import mlx_lm.utils  # noqa: F401
    finally:
        resource.setrlimit = setrlimit


_import_mlx_lm()
