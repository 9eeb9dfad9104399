"""The rate of the disk that a streamed base is read from."""

import os
from pathlib import Path

import pytest

from backend_manager import Backend
from finetune.backend.disk import LEAST_BYTES, disk_rate
from finetune.estimate.rates import Rates
from finetune.plan.facts import Facts
from finetune.plan.machine import with_disk
from finetune.plan.resolve import resolve_plan
from tests.support.planned import GIB, SMALL
from tests.support.plans import NOW, capabilities

SETTINGS = dict(output_dir="o", train_type="qlora", context_length=256, max_steps=10)
RATES = dict(product_rates={"fp32": 5e10, "bf16": 1e11}, memory_rate=1e10, operator_seconds=1e-5)


def written(folder: Path, size: int, name: str = "model.safetensors") -> Path:
    file = folder / name
    file.write_bytes(os.urandom(2**20) * (size // 2**20))
    return file


def test_a_rate_is_that_of_the_largest_file_and_none_where_it_cannot_be_told(tmp_path):
    small = written(tmp_path, 2**20, "a.safetensors")
    large = written(tmp_path, 2 * LEAST_BYTES)
    assert disk_rate((small,)) is None
    assert disk_rate(()) is None
    assert disk_rate((tmp_path / "missing",)) is None
    rate = disk_rate((small, large))
    assert rate is not None and 1e6 < rate < 1e12
    assert disk_rate((small, large)) == rate  # timed once


@pytest.mark.parametrize("word, timed", [("disk", True), ("none", False)])
def test_a_plan_times_the_disk_if_the_base_streams_from_there(tmp_path, word, timed):
    weights = (written(tmp_path, LEAST_BYTES),)
    caps = capabilities(Backend.CPU, memory_bytes=64 * GIB, **RATES)
    facts = Facts(Backend.CPU, caps, SMALL, weight_files=weights)
    before = disk_rate.cache_info().misses
    resolve_plan(SETTINGS | dict(base_offload=word), facts, NOW)
    assert disk_rate.cache_info().misses - before == timed
    assert with_disk(Rates(), weights).disk == disk_rate(weights)
    assert with_disk(Rates(), ()).disk == Rates().disk
