"""The predicted time of a step, and what the plan chooses by it."""

import re
from dataclasses import replace

import pytest

from finetune.errors import PlanError
from finetune.estimate import budget, rates, step_time
from finetune.estimate.communication import traffic_of
from finetune.estimate.model_cost import MicrobatchShape, ModelCost
from finetune.estimate.model_shape import ModelShape
from finetune.parts.parallel_dims import ParallelDims
from finetune.plan.degrees import layouts
from finetune.plan.memory import WORTH, best_of, combinations
from tests.support import large
from tests.support.planned import GIB, dry_run, plan_of_kind, shape_of

H100 = step_time.Machine(rates.documented("h100"), rates.links_of(None, "h100"))
SHAPE = "qwen3-32b"


def time_of(dims=ParallelDims(), tokens=2048, count=1, machine=H100, **settings):  # noqa: B008  frozen
    settings = dict(use_gradient_checkpointing="false") | settings
    plan = replace(plan_of_kind("lora", "bf16", **settings), dims=dims)
    microbatch = MicrobatchShape.full_rows(tokens // 512, 512)
    return step_time.step_time(plan, shape_of(SHAPE), dims, microbatch, count, machine)


def test_the_total_is_the_items_less_what_is_hidden():
    found = time_of(ParallelDims(dp_shard=8))
    assert found.total == pytest.approx(sum(found.items.values()) - found.hidden) and 0 < found.hidden


def test_products_are_four_flop_per_weight_and_token_at_the_rate_of_the_device():
    plain = time_of(tokens=8192)
    weights, shape = shape_of(SHAPE).linear_weights, shape_of(SHAPE)
    flop = 4 * 8192 * (weights + shape.vocab_size * shape.hidden_size)
    assert plain.items["products"] == pytest.approx(flop / H100.rates.flops("bf16"))
    assert time_of(tokens=4096, count=2).items["products"] == pytest.approx(plain.items["products"])
    more = time_of(tokens=8192, use_gradient_checkpointing="true").items["recomputation"]
    assert more == pytest.approx(plain.items["products"] / 2, rel=0.1)  # without the head, with attention


def test_a_gather_is_a_ring_over_the_slowest_link():
    near, far = (time_of(ParallelDims(dp_shard=n)).items["gathers"] for n in (8, 16))
    assert far / near == pytest.approx(15 / 14 * H100.links.near / H100.links.far, rel=0.1)


def test_forwards_before_a_step_take_what_its_own_forwards_take():
    name = "forwards before the step"
    simpo, dpo, kto = (time_of(preference=word).items for word in ("simpo", "dpo", "kto"))
    assert name not in simpo and name not in time_of(preference="dpo", precompute_ref_log_probs="true").items
    assert kto[name] == pytest.approx(3 * dpo[name])  # the reference's, and of mismatched answers the model's and its
    assert {n: s for n, s in dpo.items() if n != name} == simpo
    recomputed = time_of(preference="simpo", use_gradient_checkpointing="true").items["recomputation"]
    assert dpo[name] > recomputed  # the layers' forward, beside the head's


def test_a_step_of_pairs_has_the_tokens_of_both_documents():
    plan = plan_of_kind("lora", "bf16", preference="dpo", batch_size=4, context_length=512)
    microbatch, count = step_time.average_microbatch(plan, row_tokens=60.0)
    assert count * microbatch.num_tokens == 4 * 2 * 60
    full, count = step_time.average_microbatch(plan)
    assert count * full.num_tokens == 4 * 2 * 512


def test_an_update_of_8_bit_moments_takes_longer_on_a_cpu_alone():
    cpu = step_time.Machine(rates.of_cpu({"fp32": 8e10, "bf16": 2e11}, 1e10, 4e-6, 1))
    of = {name: time_of(machine=cpu, optimizer=name).items["optimizer"] for name in ("adamw", "adamw_8bit")}
    assert of["adamw_8bit"] > 5 * of["adamw"]
    of = {name: time_of(optimizer=name).items["optimizer"] for name in ("adamw", "adamw_8bit")}
    assert of["adamw_8bit"] == of["adamw"]


def test_the_host_of_an_accelerator_starts_more_for_weights_that_every_pass_makes_dense():
    """Milliseconds of a step on an H200 that the host bounds (LoRA, QLoRA) or the card does, within 10 %."""
    here = step_time.Machine(rates.of_accelerator({"fp32": 51e12, "bf16": 796e12}, 3.08e12, 6.85e-6))
    shape = ModelShape.from_config(large.LLAMA_1B)
    for kind, lengths, measured in (("lora", (1224,), 59.9), ("qlora", (1224,), 89.0), ("lora", (2000,) * 4, 123.6)):
        microbatch = MicrobatchShape(lengths, sum(lengths) - len(lengths))
        found = step_time.step_time(plan_of_kind(kind, "bf16"), shape, ParallelDims(), microbatch, 1, here)
        assert 1000 * found.total == pytest.approx(measured, rel=0.1)


def test_a_replayed_step_takes_the_devices_time():
    """The host starts a graph; the reference's log-probabilities before a step of pairs are no part of it."""
    here = rates.of_accelerator({"fp32": 51e12, "bf16": 796e12}, 3.08e12, 6.85e-6)
    shape = ModelShape.from_config(large.LLAMA_1B)

    def host_seconds(kind="lora", **settings):
        cost = ModelCost(shape, plan_of_kind(kind, "bf16", **settings))
        return step_time.launch_seconds(step_time.Work(cost, MicrobatchShape((1224,), 1223), 1), here)

    for kind in ("lora", "qlora"):
        assert host_seconds(kind, cuda_graphs="true") < 0.02 * host_seconds(kind)
    pairs = {"preference": "dpo"}
    assert 0.1 < host_seconds(cuda_graphs="true", **pairs) / host_seconds(cuda_graphs="false", **pairs) < 0.5


def test_ranks_of_a_cpu_take_time_for_each_tensor_that_they_gather():
    """QLoRA has more tensors than LoRA for fewer bytes: two for each weight."""
    here = rates.of_cpu({"fp32": 1e11}, 1e10, 1e-6, 1, 2, 2, 2)
    machine = step_time.Machine(here, rates.gloo_links(1.0))

    def operators(kind="lora", dims=ParallelDims(dp_shard=2)):  # noqa: B008  frozen
        plan = replace(plan_of_kind(kind, "bf16"), dims=dims)
        microbatch = MicrobatchShape.full_rows(4, 512)
        return step_time.step_time(plan, shape_of(SHAPE), dims, microbatch, 1, machine).items["operators"]

    layers, linears, each = 64, 7 * 64, step_time.OPERATORS_PER_SHARDED_TENSOR * here.launch
    more = 3 * 2 * linears + 2 * (linears + 2 * layers)  # adapters, gathered twice and reduced; weights and norms twice
    assert operators() - operators(dims=ParallelDims(dp_replicate=2)) == pytest.approx(more * each)
    assert operators("qlora") - operators() == pytest.approx(2 * linears * each)


def test_threads_add_speed_up_to_the_physical_cores_and_share_it_among_ranks():
    one, two, second = (rates.of_cpu({"fp32": 1e11}, 1e10, 1e-6, n, 1, 2, p) for n, p in ((1, 2), (2, 2), (2, 1)))
    assert two.flops("fp32") == pytest.approx(2 * one.flops("fp32"))
    assert one.flops("fp32") < second.flops("fp32") < 1.5 * one.flops("fp32")
    ranks = rates.of_cpu({"fp32": 1e11}, 1e10, 1e-6, 1, 4, 2, 2)  # four processes on two cores
    assert ranks.flops("fp32") == pytest.approx(one.flops("fp32") / 2) and ranks.launch == 2 * one.launch
    assert ranks.between("bf16") < ranks.between("fp32") == pytest.approx(one.between("fp32") / 2)
    assert one.contention == 1 and ranks.contention == 2
    assert rates.gloo_links(2.0).near == pytest.approx(rates.gloo_links(1.0).near / 2)  # cores copy what ranks send


def test_a_stage_that_waits_leaves_its_core_to_others():
    own = rates.of_cpu({"fp32": 1e11}, 1e10, 1e-6, 1, 2, 2, 2)
    shared = rates.of_cpu({"fp32": 1e11}, 1e10, 1e-6, 1, 4, 2, 2)
    links, dims = rates.gloo_links(1.0), ParallelDims(pp=2)
    alone, waits = (time_of(dims, count=2, machine=step_time.Machine(of, links)).items for of in (own, shared))
    computed = sum(alone.values()) - sum(alone.get(name, 0) for name in ("bubble", "optimizer", "pipeline"))
    assert alone["bubble"] == pytest.approx(computed / 2) and "bubble" not in waits  # two ranks share each core


def test_the_fastest_combination_that_fits_is_taken():
    shape, room = shape_of(SHAPE), budget.MemoryBudget(24 * GIB, "cuda", 4, ParallelDims(dp_shard=4))
    plan = replace(plan_of_kind("qlora", "bf16", use_gradient_checkpointing="auto", batch_size=16), dims=room.dims)
    plan = plan.with_settings(microbatch_tokens=None)
    ways = combinations(plan, room, set(), timed=True)
    tried = [plan.with_settings(**way) for way in ways]
    seconds = [
        step_time.seconds_per_step(t, shape, room, H100).total
        for t in tried
        if budget.predicted_bytes(t, shape, room) <= room.usable
    ]
    assert 1 < len(seconds) < len(tried)
    assert best_of(plan, ways, shape, room, H100).time.total <= min(seconds) / 0.98


@pytest.mark.parametrize("shape_name", [SHAPE, "mixtral-8x22b"])
@pytest.mark.parametrize("gpu_gib", [16, 24, 80])
@pytest.mark.parametrize(
    "dims",
    [ParallelDims(dp_shard=4), ParallelDims(2, 2), ParallelDims(dp_shard=2, pp=4), ParallelDims(dp_shard=2, tp=4)],
)
def test_what_is_not_tried_would_not_be_taken(shape_name, gpu_gib, dims):
    """With each combination evaluated, in the same order and by the same margin, the result is the same."""
    shape = shape_of(shape_name)
    room = budget.MemoryBudget(gpu_gib * GIB, "cuda", dims.shards, dims)
    plan = replace(plan_of_kind("lora", "bf16", use_gradient_checkpointing="auto", batch_size=16), dims=dims)
    plan = plan.with_settings(microbatch_tokens=None)
    ways, taken = combinations(plan, room, set(), timed=True), None
    for way in ways:
        one = plan.with_settings(**way)
        if budget.predicted_bytes(one, shape, room) <= room.usable:
            seconds = step_time.seconds_per_step(one, shape, room, H100).total
            taken = (seconds, way) if taken is None or seconds < WORTH * taken[0] else taken
    found = best_of(plan, ways, shape, room, H100)
    if taken is None:
        assert found.time is None
    else:
        assert (found.time.total, found.plan.settings) == (taken[0], plan.with_settings(**taken[1]).settings)


@pytest.mark.parametrize("shape_name", [SHAPE, "mixtral-8x22b"])
def test_traffic_is_of_the_microbatches_that_a_step_has(shape_name):
    plan, microbatch = plan_of_kind("lora", "bf16", batch_size=16), MicrobatchShape.full_rows(1, 512)
    assert traffic_of(plan, shape_of(shape_name), ParallelDims(dp_shard=2), microbatch, count=3).tokens == (512,) * 3


def test_layouts_multiply_to_the_world_size_and_divide_the_model():
    shape = shape_of("mixtral-8x22b")
    found = layouts(16, shape, 4096, 8)
    assert found[0] == ParallelDims(dp_shard=16) and len(set(found)) == len(found) > 20
    assert all(dims.world_size == 16 and shape.num_kv_heads % dims.tp == 0 for dims in found)
    assert {dims.ep for dims in found} == {1, 2, 4, 8} and {dims.cp for dims in found} == {1}
    assert {dims.cp for dims in layouts(16, shape, 131072, 8)} == {1, 2, 4, 8, 16}


@pytest.mark.parametrize(
    "flags",
    [
        f"{SHAPE} --assume_device h100",
        f"{SHAPE} --assume_device h100 --dataset alpaca_sample --train_type lora",
        f"{SHAPE} --assume_device h100 --batch_size 4",
        "llama-3-70b --assume_device rtx4090",  # lora has room where stages and slices divide the base
        "mixtral-8x22b --assume_device rtx4090",
    ],
)
def test_what_is_compared_is_what_would_run(flags):
    """The first layout's bytes and seconds are those of the plan that is printed."""
    code, out, err = dry_run(f"--model_name examples/configs/{flags} --assume_world_size 64")
    assert code == 0, err
    first = out.partition("layouts of 64 ranks, the fastest predicted first:\n")[2].splitlines()[0]
    total = re.search(r"\n  total +([\d.]+ GiB)", out)[1]
    assert total in first and re.search(r"predicted ([\d.]+ s per step): ", out)[1] in first


def test_a_dry_run_chooses_the_degrees_of_assumed_ranks_and_no_others():
    flags = f"--model_name examples/configs/{SHAPE} --assume_device h100 --assume_world_size 8 --train_type lora"
    code, out, err = dry_run(flags)
    assert code == 0, err
    assert "layouts of 8 ranks, the fastest predicted first:" in out and re.search(
        r"predicted [\d.]+ s per step: ", out
    )
    assert "dp_degree: 1 -> " in out and "the memory of h100" in out
    code, out, err = dry_run(f"{flags} --dp_shards 8")
    assert code == 0 and "layouts of" not in out and "ranks: 8 (dp_shards 8)" in out


@pytest.mark.parametrize(
    ("flags", "fact"),
    [
        ("--assume_device abacus --assume_world_size 2", "--assume_device abacus: not known. Use one of t4, "),
        ("--assume_memory 24GiB --assume_interconnect string", "--assume_interconnect string: not known. Use one of "),
    ],
)
def test_an_unknown_device_or_link_is_one_line(flags, fact):
    code, _, err = dry_run(f"--model_name examples/configs/{SHAPE} {flags}")
    assert code == 2 and fact in err and len(err.splitlines()) == 1


def test_a_rate_of_links_in_bytes_is_of_both():
    links = rates.links_of("25GB", "h100")
    assert links.near == links.far == 25e9
    with pytest.raises(PlanError, match="--assume_interconnect 1"):
        rates.links_of("1", "h100")


def test_an_assumed_device_has_the_memory_that_its_driver_reports():
    """torch's own out-of-memory lines, of cards whose memory keeps its error correction and of others."""
    reported = {"t4": 14.56, "l4": 22.0, "A10": 22.0, "L40S": 44.4, "RTX 4090": 23.6, "a100": 79.2, "A100_80GB": 79.2}
    for name, gib in reported.items():
        assert rates.assumed_memory(name) / 2**30 == pytest.approx(gib, rel=0.01), name
    assert rates.assumed_memory("M4 Max") == rates.assumed_memory("m4-max") == 128 * 2**30


@pytest.mark.parametrize(
    ("flags", "gpu_gib"),
    [
        ("--assume_device m4-max --assume_memory 64GiB", 48),
        ("--assume_memory 64GiB --backend mlx", 48),
        ("--assume_device m3-pro --train_type lora", 27),
        ("--assume_device m2-pro --train_type lora", 32 * 2 / 3),
        ("--assume_memory 64GiB", 64),
    ],
)
def test_of_a_macs_memory_its_gpu_takes_a_part(flags, gpu_gib):
    pytest.importorskip("mlx.core")
    code, out, err = dry_run(f"--model_name examples/configs/llama-3.1-8b {flags}")
    assert code == 0, err
    assert float(re.search(r"of ([\d.]+) GiB usable", out)[1]) == pytest.approx(budget.USABLE_PART * gpu_gib, abs=0.01)
    if "m4-max" in flags:
        assert "M4-MAX, as documented" in out
