"""Training sharded on a device that Gloo and FSDP2 cannot serve alone, against one process on the CPU."""

import json
from pathlib import Path

import pytest
import torch

from finetune.errors import PlanError
from finetune.torch_engine.parallel import device_shims
from tests.support import cases, emulated_device, ranks

pytestmark = pytest.mark.skipif(emulated_device.missing() is not None, reason=str(emulated_device.missing()))
DEVICE = emulated_device.NAME
PRECISIONS = ("fp32", "fp16", "bf16")
MATRIX = [(s, p, k) for s in cases.STRATEGIES for p in PRECISIONS for k in cases.KINDS_OF_TRAINING]
FAST = [("FULL_SHARD", "fp32", "full")]


def check(found: list) -> None:
    for rank in found:
        for figures in rank:
            cases.check_strategy(figures)


@pytest.mark.slow
def test_strategies_train_as_one_process_does_and_as_gloo_does_on_the_cpu(tmp_path):
    staged = ranks.run(2, cases.strategies, tmp_path / "staged", device=DEVICE, wanted=FAST)
    check(staged)
    plain = ranks.run(2, cases.strategies, tmp_path / "plain", wanted=FAST[:1])
    mine, other = staged[0][0], plain[0][0]
    # The same products and sums in fp32, until AdamW, which is fused on a CPU only. A CPU takes the loss from
    # probabilities and another device from their logarithms: one rounding apart.
    for name in ("losses", "norms of steps"):
        assert mine[name][0] == pytest.approx(other[name][0], rel=3e-7)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_strategy_precision_and_kind_trains_as_one_process_does(size, tmp_path):
    check(ranks.run(size, cases.strategies, tmp_path, device=DEVICE, wanted=MATRIX, timeout_s=1200))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["HSDP 2x2", "TP 2", "CP 2", "PP 2", "FSDP2 2 x TP 2", "PP 2 x FSDP2 2"])
def test_other_degrees_train_as_one_process_does(layout, tmp_path):
    wanted = [(layout, kind, "llama") for kind in ("full", "lora", "nf4")]
    for rank in ranks.run(cases.LAYOUTS[layout].world_size, cases.matrix, tmp_path, device=DEVICE, wanted=wanted)[:1]:
        for figures in rank:
            cases.check(figures, cases.LAYOUTS[layout])


KINDS = [pytest.param(k, marks=[] if k == "full" else pytest.mark.slow) for k in ("full", "lora", "nf4")]


@pytest.mark.promise("FS_21")
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_a_step_are_those_of_a_device_that_resizes(kind, tmp_path):
    """Exact: the allocator of the device counts."""
    refusing, resizing = (
        ranks.run(2, cases.bytes_of_a_step, tmp_path / device, device=device, recomputed=True, kind=kind)
        for device in (DEVICE, f"{DEVICE}+resize")
    )
    for mine, other in zip(refusing, resizing, strict=True):
        assert mine == other
        for between, _ in mine["live"][1:]:
            assert between == mine["held"] + mine["moments"]  # its shard, and nothing of what was gathered
        assert mine["held"] < 0.51 * mine["full"]


@pytest.mark.slow
def test_without_checkpointing_autograd_keeps_gathered_weights(tmp_path):
    """Why the plan turns it on: what autograd saved keeps its storage where storages cannot be resized."""
    kept, freed = (
        ranks.run(2, cases.bytes_of_a_step, tmp_path / device, device=device, recomputed=False, kind="full")[0]
        for device in (DEVICE, f"{DEVICE}+resize")
    )
    assert kept["live"][-1][1] > freed["live"][-1][1] + kept["unit"]
    assert kept["live"][-1][0] == freed["live"][-1][0]


@pytest.fixture(scope="module")
def completed(tmp_path_factory):
    return ranks.run(1, cases.completed_device, tmp_path_factory.mktemp("completed"))[0]


def test_the_device_is_as_bare_as_an_apple_gpu(completed):
    """What torch.mps lacks in torch's source is what the shims supply, and what the emulated device lacks too."""
    names = set(device_shims.pieces(torch.mps))
    assert {name for name in names if not hasattr(torch.mps, name)} == names
    assert set(completed["missing"]) == names and completed["again"] == []
    assert completed["installed"][0].startswith(f"torch.{DEVICE}: Stream")
    assert "resizing" in completed["installed"][-1]


def test_operators_of_fsdp2_are_registered_for_mps_where_they_are_missing(completed):
    assert completed["operators"] == [list(device_shims.OPERATORS), []]


def test_checkpointing_restores_the_random_state_of_the_device(completed):
    """Without the pieces torch skips it on a device that has no `_initialized`, and dropout differs when recomputed."""
    assert completed["restores random state"] == [False, True]


def test_private_names_of_torch_are_as_the_shims_expect(monkeypatch):
    device_shims.check_private_names()
    monkeypatch.setitem(device_shims.EXPECTED, "FSDPParam.free_unsharded_param", ("self", "handle"))
    with pytest.raises(PlanError, match=r"FSDP2's FSDPParam.free_unsharded_param\('self',\) is not .* 2.11 to 2.13"):
        device_shims.check_private_names()


def test_the_oldest_supported_torch_has_the_same_names():
    """Recorded from the wheel of torch 2.11.0."""
    recorded = json.loads(Path(__file__).with_name("torch_2_11.json").read_text())
    for name, expected in device_shims.EXPECTED.items():
        assert tuple(recorded["fsdp2"][name][: len(expected)]) == expected, name
    assert set(device_shims.pieces(torch.mps)).isdisjoint(recorded["torch.mps"])


@pytest.mark.parametrize("name", ["current_allocated_memory", "driver_allocated_memory", "recommended_max_memory"])
def test_what_is_called_of_torch_mps_is_in_its_source(name):
    recorded = json.loads(Path(__file__).with_name("torch_2_11.json").read_text())
    assert name in torch.mps.__all__ and name in recorded["torch.mps"]
