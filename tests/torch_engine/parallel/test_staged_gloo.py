"""Staged collectives against Gloo's own on the CPU, on a device that Gloo refuses."""

import pytest
import torch

from tests.support import emulated_device, ranks, staged_cases

pytestmark = pytest.mark.skipif(emulated_device.missing() is not None, reason=str(emulated_device.missing()))


@pytest.mark.slow
def test_gloo_itself_refuses_the_device(tmp_path):
    assert ranks.run(2, staged_cases.plain_gloo, tmp_path) == ["RuntimeError", "RuntimeError"]


@pytest.mark.slow
def test_random_operations_equal_gloo_on_the_cpu(tmp_path):
    for seen in ranks.run(2, staged_cases.random_operations, tmp_path, count=300, seed=1):
        assert seen == dict.fromkeys(staged_cases.OPERATIONS, 25)


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 4])
def test_a_thousand_random_operations_equal_gloo_on_the_cpu(size, tmp_path):
    for seen in ranks.run(size, staged_cases.random_operations, tmp_path, count=1008, seed=size):
        assert sum(seen.values()) == 1008


@pytest.mark.slow
def test_tensors_of_many_chunks_equal_gloo_and_buffers_are_reused(tmp_path):
    for rank in ranks.run(3, staged_cases.large_tensors, tmp_path):
        assert max(rank) <= 16  # of one operation's chunks; 8 operations of up to 12 chunks ran


@pytest.mark.slow
def test_messages_of_one_source_and_tag_arrive_in_the_order_of_their_receives(tmp_path):
    assert ranks.run(2, staged_cases.messages_of_one_tag, tmp_path, rounds=30, count=20) == [0, 0]


DISAGREEMENTS = {
    "shape": "rank 0: all_reduce number 1 (SUM) of 10 float32; rank 1: all_reduce number 1 (SUM) of 12 float32",
    "dtype": "rank 1: all_reduce number 1 (SUM) of 10 float16",
    "reduction": "rank 1: all_reduce number 1 (MAX) of 10 float32",
    "operation": "rank 1: broadcast number 1 of 10 float32 with root 0",
    "output": "rank 1: all_gather number 1 with inputs and outputs of sizes that do not belong together",
    "splits": "rank 1: all_to_all number 1 sending [7, 3], expecting [3, 7]",
}


def test_ranks_that_disagree_all_raise_at_once_and_name_the_rank(tmp_path):
    for found in ranks.run(2, staged_cases.disagreeing, tmp_path, cases=list(DISAGREEMENTS), folder=str(tmp_path)):
        for case, said in DISAGREEMENTS.items():
            raised = found[case]
            assert raised["error"] == "CollectiveError" and said in raised["text"], found


@pytest.mark.slow
def test_a_message_of_another_shape_raises_on_both_ranks(tmp_path):
    found = ranks.run(2, staged_cases.failing, tmp_path, case="message", folder=str(tmp_path), timeout_s=60)
    assert "recv of 5 float32 from rank 0: it sent 10 float32" in found[1]["text"]
    assert found[0]["text"].endswith("rank 1 failed in recv of 5 float32 from rank 0")


@pytest.mark.slow
def test_a_dead_rank_is_named_and_nothing_hangs(tmp_path):
    found = ranks.run(3, staged_cases.failing, tmp_path, case="dead", folder=str(tmp_path), timeout_s=60)
    for rank in (found[0], found[2]):
        assert rank["error"] == "CollectiveError" and "rank 1 does not answer" in rank["text"], rank


@pytest.mark.slow
def test_a_rank_that_is_late_beyond_the_timeout_raises_on_every_rank(tmp_path):
    found = ranks.run(2, staged_cases.failing, tmp_path, case="late", folder=str(tmp_path), timeout_s=60)
    assert "Timed out" in found[0]["text"] and {rank["error"] for rank in found} == {"CollectiveError"}


def test_the_device_counts_what_lives_on_it_and_refuses_what_mps_refuses():
    device = emulated_device.load()
    before = device.live_bytes()
    tensor = torch.ones(1000, device=emulated_device.NAME)
    assert device.live_bytes() - before == 4000
    with pytest.raises(RuntimeError, match="unexpected device type"):
        tensor.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="float64"):
        tensor.double()
    with pytest.raises(RuntimeError, match="float64"):
        tensor.to("cpu", torch.float64)
    del tensor
    assert device.live_bytes() == before
