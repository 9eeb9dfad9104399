"""accelerate's environment and config files."""

import importlib.util

import pytest

from tests.support.commands import ROOT

CONFIGS = ROOT / "examples" / "accelerate"
ZERO3 = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
ZERO2 = ZERO3 | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: requirements-deepspeed.txt"
)
