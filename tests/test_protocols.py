"""The two protocols: every implementation passes the same check. The third seam, train(), has both engines' runs."""

import pytest

from tests.support import conformance, emulated_device, ranks, tiny
from tests.support.accelerated import needs_deepspeed
from tests.support.engines import engine

DATASET = tiny.dataset()
KINDS = ["lora", "nf4"]


@pytest.mark.parametrize(
    "changes", [{}, {"train_type": "qlora"}, {"layout": "padded"}], ids=["lora", "qlora", "padded"]
)
def test_the_torch_engine_is_an_engine(changes, tmp_path, device):
    conformance.check_engine(lambda: engine(**changes, device=device), DATASET, tmp_path)


def check(reports: list, implementation: str) -> None:
    for found in (report for of_rank in reports for report in of_rank):
        assert found["implementation"] == implementation and not found["missing"], found
        # fp32 sums in another order, over ranks: as in the matrix of layouts.
        assert found["loss"] <= 2e-6 and found["norm"] <= 5e-6 and found["continues"] <= 2e-6, found
        for name in ("targets", "weights come back", "moments come back", "values come back"):
            assert found[name], (name, found)
        assert not found["gradients left"], found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layouts", "implementation"), [(["DDP 2", "TP 2", "PP 2"], "Local"), (["FSDP2 2", "CP 2"], "FSDP2")]
)
def test_two_ranks_are_one_process(layouts, implementation, tmp_path):
    arguments = dict(layouts=layouts, distribution="ptd", kinds=KINDS)
    check(ranks.run(2, conformance.parallelism, tmp_path, **arguments), implementation)


@pytest.mark.slow
def test_replicas_of_accelerate_are_one_process(tmp_path):
    arguments = dict(layouts=["DDP 2"], distribution="ddp", kinds=KINDS)
    check(ranks.run(2, conformance.parallelism, tmp_path, **arguments), "AccelerateDDP")


@pytest.mark.slow
@pytest.mark.skipif(emulated_device.missing() is not None, reason=str(emulated_device.missing()))
def test_two_ranks_on_a_device_without_collectives_are_one_process(tmp_path):
    """Through MPSFSDPWrapper, as on Apple GPUs."""
    arguments = dict(layouts=["FSDP2 2"], distribution="ptd", kinds=["nf4"], device=emulated_device.NAME)
    check(ranks.run(2, conformance.parallelism, tmp_path, **arguments), "FSDP2")


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("stage", [2, 3])
def test_zero_is_one_process(stage, tmp_path):
    arguments = dict(layouts=["DDP 2"], distribution=f"zero{stage}", kinds=["lora"])
    check(ranks.run(2, conformance.parallelism, tmp_path, **arguments), "DeepSpeedZero")


@pytest.mark.slow
def test_four_ranks_are_one_process(tmp_path):
    arguments = dict(distribution="ptd", kinds=KINDS)
    sharded = ["HSDP 2x2", "FSDP2 2 x TP 2", "FSDP2 2 x CP 2", "PP 2 x FSDP2 2"]
    check(ranks.run(4, conformance.parallelism, tmp_path / "1", layouts=sharded, **arguments), "FSDP2")
    check(ranks.run(4, conformance.parallelism, tmp_path / "2", layouts=["PP 4", "DDP 2 x TP 2"], **arguments), "Local")


def test_the_recursive_engine_is_an_engine():
    conformance.check_recursive_engine()
