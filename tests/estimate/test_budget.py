"""Largest batches, remedies and sizes within a memory budget."""

import json
import re
from dataclasses import asdict, replace

import pytest

from backend_manager import CAPABILITIES, Backend
from finetune.errors import PlanError
from finetune.estimate import budget, memory, remedies
from finetune.parts.degrees import FLAGS
from finetune.parts.parallel_dims import ParallelDims
from finetune.plan import conflicts
from finetune.plan.asked import Standing
from finetune.plan.facts import Facts
from tests.support.planned import GIB, SMALL, dry_run, plan_of_kind, shape_of


def test_the_largest_batch_fits_and_one_row_more_does_not():
    room, plan = budget.MemoryBudget(24 * GIB), plan_of_kind("qlora")
    rows = budget.largest_rows(plan, SMALL, room)
    assert budget.fits(plan, SMALL, room, budget.full_microbatch(plan, rows))
    assert not budget.fits(plan, SMALL, room, budget.full_microbatch(plan, rows + 1))


def test_each_thing_that_takes_less_is_predicted_to():
    def total(**changes):
        plan = plan_of_kind(changes.pop("train_type", "lora"), changes.pop("precision", "bf16"), **changes)
        return budget.predicted_bytes(plan, SMALL, budget.MemoryBudget(24 * GIB, "cuda"))

    assert total(precision="fp32") > total() > total(train_type="qlora") > total(train_type="qlora", double_quant=True)
    assert total() > total(use_gradient_checkpointing="true") and total() > total(optimizer="adamw_8bit")
    assert total(lora_rank=64) > total() > total(lora_target_modules="default")
    assert total(train_type="qlora", cache_dequantized="true") > total(train_type="qlora")
    assert total(train_type="full", precision="fp32") > 16 * SMALL.num_weights


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 * GIB), ("24", 24 * GIB), ("80GB", 80 * 10**9), ("512 MiB", GIB // 2), ("1.5g", 1.5e9)],
)
def test_sizes_are_read(text, size):
    assert budget.parse_size(text) == size


@pytest.mark.parametrize("text", ["banana", "", "-1GiB", "0", "24XB", "1e9GiB", "9999999999GiB", "GiB", "24GiB!"])
def test_what_is_not_a_size_is_one_line(text):
    with pytest.raises(PlanError, match="--assume_memory") as error:
        budget.parse_size(text)
    assert "\n" not in str(error.value)


def test_a_70b_that_does_not_fit_two_devices_is_kept_in_host_memory():
    flags = ("--model_name", "examples/configs/llama-3-70b", "--assume_memory", "24GiB", "--assume_world_size", "2")
    code, out, _ = dry_run(*flags, "--use_cpu_offload", "false")
    assert code == 2 and "--use_cpu_offload true: -" in out and "GiB of host memory per rank" in out
    code, out, _ = dry_run(*flags)
    assert "use_cpu_offload: false -> true" in out and "use_gradient_checkpointing: auto -> true" in out
    assert code == 0 and "of host memory per rank, during training" in out and "  base " not in out
    plan, shape = plan_of_kind("qlora", "bf16"), shape_of("llama-3-70b")
    kept, moved = (
        memory.estimate(plan.with_settings(use_cpu_offload=o), shape, budget.full_microbatch(plan), "cuda", 2)
        for o in (False, True)
    )
    assert kept["total"] - moved["total"] == moved["host"] and "host" not in kept
    alone = memory.estimate(plan.with_settings(use_cpu_offload=True), shape, budget.full_microbatch(plan), "cuda", 1)
    assert "host" not in alone  # one process shards nothing


def test_what_would_make_it_fit_fits():
    room, shape = budget.MemoryBudget(24 * GIB, "cuda"), shape_of("qwen3-32b")
    plan = plan_of_kind("lora", "bf16", use_gradient_checkpointing="true", microbatch_tokens=2048)
    assert not budget.fits(plan, shape, room)
    enough = [c for c in remedies.options(plan, shape, room) if c.fits]
    assert all(budget.fits(c.plan, shape, room) and c.price for c in enough)
    steps = remedies.cheapest_combination(plan, shape, room)
    assert enough or steps[-1].fits
    ranks = remedies.fewest_devices(plan, shape, room)
    assert budget.fits(plan, shape, replace(room, ranks=ranks)) and not budget.fits(
        plan, shape, replace(room, ranks=ranks - 1)
    )


def test_the_devices_that_a_plan_of_several_ranks_needs_are_named():
    """One rank shards no vocabulary; of several, the plan chooses it where they fit by it alone."""
    room, shape = budget.MemoryBudget(24 * GIB, "cuda"), shape_of("llama-3.1-8b")
    plan = plan_of_kind("full", "bf16", use_gradient_checkpointing="true", optimizer="adamw_8bit", context_length=4096)
    (line,) = [line for line in remedies.remedy_lines(plan, shape, room) if line.startswith("with these settings")]
    named = re.fullmatch(r"with these settings you need (\d+) such devices, or (\d+) with --vocab_parallel true", line)
    many, few = map(int, named.groups())
    assert few < many
    for ranks, is_enough in ((few, True), (few - 1, False)):
        sharded = plan.with_settings(vocab_parallel="true", dp_shards=ranks)
        assert budget.fits(sharded, shape, replace(room, ranks=ranks)) is is_enough
    assert not budget.fits(plan, shape, replace(room, ranks=few))


@pytest.mark.parametrize("kind", ["full", "lora", "qlora"])
def test_of_changes_that_fit_together_none_can_be_left_out(kind):
    shape, plan = shape_of("qwen3-32b"), plan_of_kind(kind, "bf16", use_gradient_checkpointing="false")
    plan, several = plan.with_settings(microbatch_tokens=4096, context_length=2048), 0
    for gigabytes in range(14, 120, 6):
        room = budget.MemoryBudget(gigabytes * GIB, "cuda")
        steps = [] if budget.fits(plan, shape, room) else remedies.cheapest_combination(plan, shape, room)
        if steps and steps[-1].fits:
            several += len(steps) > 1
            assert budget.fits(steps[-1].plan, shape, room) and all(one.saved > 0 for one in steps)
            for one in steps:
                without = plan
                for other in (c for c in steps if c is not one):
                    without = without.with_settings(**other.changes)
                assert not budget.fits(without, shape, room), (gigabytes, one.text, [c.text for c in steps])
    assert several and remedies.cheapest_combination(plan, shape, budget.MemoryBudget(24 * GIB, "cuda"))[-1].fits


def test_what_a_run_that_fits_nowhere_here_needs_of_more_devices_is_no_more_than_it_needs():
    plan, shape = plan_of_kind("lora", "bf16", use_gradient_checkpointing="false"), shape_of("llama-3-70b")
    room = budget.MemoryBudget(16 * GIB, "cuda")
    (line,) = [line for line in remedies.remedy_lines(plan, shape, room) if " such devices are enough with " in line]
    assert "--quantization_backend hqq" in line and "adamw_8bit" not in line and len(line.split(", ")) < 6


@pytest.mark.parametrize(
    "dims", [dict(pp=2), dict(tp=2), dict(tp=2, pp=2), dict(cp=2), dict(dp_replicate=2, dp_shard=2)], ids=str
)
def test_devices_that_are_enough_are_counted_with_every_degree_and_no_remedy_is_refused_there(dims):
    dims, shape = ParallelDims(**dims), shape_of("qwen3-32b")
    plan = plan_of_kind("lora", "bf16", use_gradient_checkpointing="true", microbatch_tokens=2048)
    room = budget.MemoryBudget(12 * GIB, "cuda", dims.shards, dims)
    assert not budget.fits(plan, shape, room)
    devices = remedies.fewest_devices(plan, shape, room)
    other = ParallelDims(dims.dp_replicate, devices // (dims.world_size // dims.dp_shard), dims.cp, dims.tp, dims.pp)
    assert other.world_size == devices > dims.world_size
    assert budget.fits(plan, shape, budget.MemoryBudget(12 * GIB, "cuda", other.shards, other))
    (line,) = [line for line in remedies.remedy_lines(plan, shape, room) if line.startswith("with these settings")]
    assert line.startswith(f"with these settings you need {devices} such devices")
    for change in remedies.options(plan, shape, room):
        degrees = {flag: getattr(dims, axis) for axis, flag in FLAGS.items() if axis in ("cp", "tp", "pp")}
        facts = Facts(Backend.CUDA, CAPABILITIES[Backend.CUDA])
        asked = Standing.of(asdict(change.plan.settings) | degrees, facts)
        conflicts.check(asked, conflicts.PARALLELISM)


def test_small_sizes_are_printed_in_mib():
    assert (budget.gib(3 * 2**20), budget.gib(GIB)) == ("3.0 MiB", "1.00 GiB")


OFFERED = re.compile(r"^ +(--.*?): -[\d.]+ \w+;", re.M)


@pytest.mark.parametrize(
    "words",
    [
        "--backend mlx --train_type lora --batch_size 64 --context_length 512 --assume_memory 700MiB",
        "--backend mlx --train_type lora --batch_size 64 --context_length 512 --assume_memory 500MiB",
        "--assume_device a100 --train_type full --optimizer muon --context_length 2048 --assume_memory 2GiB",
        "--assume_device a100 --train_type full --optimizer muon --context_length 2048 --assume_memory 1GiB",
        "--assume_device a100 --train_type qlora --cache_dequantized true --context_length 2048 --assume_memory 1GiB",
    ],
)
def test_what_is_offered_fits_as_it_is_written(words, tmp_path):
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "vocab_size": 49152}
    config |= {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    flags = f"--model_name {tmp_path} {words}"
    code, out, err = dry_run(flags)
    assert code == 2, err
    offered = OFFERED.findall(out)
    together = [" ".join(offered)] if "these changes together make it fit" in out else offered
    assert together and not ("mlx" in words and "such devices" in out)  # whose ranks are replicas
    for change in together:
        code, _, err = dry_run(f"{flags} {change}")
        assert code == 0, (change, err)
