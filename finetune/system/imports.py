"""Imports left out: those of a library for parts of it that no program here uses."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType


class WithoutHqq(importlib.abc.MetaPathFinder):
    """Lets `transformers.cache_utils` be imported as if hqq were not installed.

    transformers would import hqq, and through it torch's compiler, for a cache of quantized keys and values: 1.4 s of
    each start, a fifth of it. For programs only: a notebook may want that cache.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "transformers.cache_utils":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            vars(spec.loader)["exec_module"] = partial(_imported, spec.loader.exec_module)
        return spec


def _imported(exec_module: Callable[[ModuleType], None], module: ModuleType) -> None:
    import transformers.utils as utils

    available = utils.is_hqq_available
    utils.is_hqq_available = lambda *_: False
    try:
        exec_module(module)
    finally:
        utils.is_hqq_available = available


def lighten() -> None:
    """Makes the later import of transformers lighter. Call it before anything imports transformers; it has no effect
    afterwards.
    """
    if "transformers.cache_utils" not in sys.modules:
        sys.meta_path.insert(0, WithoutHqq())
