"""What the plan decides from predicted memory."""

import json

import pytest

from backend_manager import Backend
from finetune.errors import PlanError
from finetune.estimate import budget, remedies
from finetune.estimate.model_shape import ModelShape, read_headers
from finetune.flag_values import parse_value
from finetune.plan.facts import Facts
from finetune.plan.make import make_plan
from finetune.plan.memory import combinations
from finetune.plan.resolve import resolve_plan
from finetune.plan.resume import inherited_from_checkpoint, merge_saved
from tests.support import tiny
from tests.support.commands import ROOT
from tests.support.planned import GIB, SMALL, dry_run, planned, why
from tests.support.plans import NOW, capabilities, plan_of


def test_checkpointing_is_off_if_the_plan_fits_and_on_if_it_does_not_with_both_numbers():
    roomy, tight = planned(64), planned(7, microbatch_tokens=2048)
    assert roomy.settings.use_gradient_checkpointing == "false"
    assert tight.settings.use_gradient_checkpointing == "true"
    for settled in (roomy, tight):
        assert why(settled, "use_gradient_checkpointing").count("GiB") == 3


def test_smaller_microbatches_come_before_recomputation():
    settled = planned(8)
    assert settled.settings.microbatch_tokens < 2048 and settled.settings.use_gradient_checkpointing == "false"
    assert "2048 tokens per forward would take" in why(settled, "microbatch_tokens")


def test_batch_size_auto_stays_requested_and_is_settled_as_a_number():
    assert parse_value("batch_size", "AUTO") == "auto" and parse_value("batch_size", "4") == 4
    settled = planned(24, batch_size="auto")
    rows = settled.settings.batch_size
    assert rows == 8  # of rows that are not counted
    saved = settled.to_json()
    assert saved["requested"]["batch_size"] == "auto" and saved["settled"]["batch_size"] == rows
    facts = Facts(
        Backend.CPU, capabilities(memory_bytes=500 * GIB), SMALL, inherited=inherited_from_checkpoint(saved, "cpu")
    )
    again = resolve_plan(merge_saved({}, saved), facts, NOW)
    assert again.settings.batch_size == rows and again.settings.microbatch_tokens == settled.settings.microbatch_tokens
    with pytest.raises(PlanError, match="--batch_size many: not an integer"):
        parse_value("batch_size", "many")


def test_assuming_another_machine_is_for_a_dry_run():
    with pytest.raises(PlanError, match="--assume_memory 24GiB: plans for another machine. Add --dry_run"):
        plan_of(assume_memory="24GiB")
    with pytest.raises(PlanError, match="--assume_world_size 2: plans for another machine"):
        plan_of(assume_world_size=2)


def test_a_config_that_lacks_sizes_is_reported_and_the_dry_run_succeeds(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    code, out, _ = dry_run("--model_name", str(tmp_path))
    assert code == 0 and "memory: not predicted, config.json lacks some of its dimensions" in out


FULL = dict(save_every=10, train_type="full", precision="fp32", use_gradient_checkpointing="true")


def test_saves_are_written_beside_steps_if_the_copy_fits():
    roomy, shape = planned(64, **FULL), SMALL.known
    assert roomy.async_save and "of host memory, which fits" in why(roomy, "async_save")
    without = roomy.with_settings(async_save="false")
    copy = budget.snapshot_bytes(roomy, shape, roomy.memory_budget)
    assert copy == 12 * shape.num_weights  # a weight and two moments in fp32
    least = budget.predicted_bytes(without, shape, roomy.memory_budget)
    assert budget.predicted_bytes(roomy, shape, roomy.memory_budget) == least + copy
    tokens = dict(microbatch_tokens=roomy.settings.microbatch_tokens)
    short = ((least + copy / 2) / budget.USABLE_PART + GIB) / GIB
    tight = planned(short, **FULL, **tokens)
    assert not tight.async_save and "do not fit in" in why(tight, "async_save")
    given = planned(short, **FULL, **tokens, async_save="true")
    assert given.async_save
    (offered,) = (o for o in remedies.options(given, shape, given.memory_budget) if "async_save" in o.text)
    assert offered.saved == copy and offered.fits


def test_nothing_is_copied_where_no_step_follows_a_save():
    for flags in (dict(), dict(async_save="true"), dict(save_every=10, async_save="false")):
        settled = planned(64, **flags)
        found = budget.predicted(settled, SMALL.known, settled.memory_budget, budget.full_microbatch(settled))
        assert not settled.async_save and "snapshot" not in found["items"]
        assert not any(a.setting == "async_save" for a in settled.adjustments)


def test_beside_a_device_the_copy_takes_memory_of_the_host():
    caps = capabilities(Backend.CUDA, memory_bytes=80 * GIB)
    settled = plan_of(Backend.CUDA, SMALL, caps, save_every=10, train_type="lora", output_dir="o")
    found = budget.predicted(settled, SMALL.known, settled.memory_budget, budget.full_microbatch(settled))
    copy = budget.snapshot_bytes(settled, SMALL.known, settled.memory_budget)
    assert (
        settled.async_save and found["host"] == copy == 12 * sum(lora_weights(16)) and "snapshot" not in found["items"]
    )


def lora_weights(rank: int) -> list[int]:
    return [rank * (rows + columns) for _, rows, columns in SMALL.known.linears]


def test_dense_copies_are_given_up_if_the_run_does_not_fit_with_them(tmp_path):
    tiny.build("llama", hidden_size=512, intermediate_size=1024, num_hidden_layers=8).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    shape = ModelShape.from_config(config, read_headers(tmp_path.glob("*.safetensors")))
    dense = plan_of(shape=shape, caps=capabilities(memory_bytes=64 * GIB), train_type="qlora")
    assert dense.settings.cache_dequantized == "true"
    room = budget.MemoryBudget(64 * GIB, "cpu")
    least = budget.predicted_bytes(dense.with_settings(cache_dequantized="false"), shape, room)
    more = budget.predicted_bytes(dense, shape, room) - least
    short = int((least + 0.3 * more) / budget.USABLE_PART) + GIB // 2
    plan_short = plan_of(shape=shape, caps=capabilities(memory_bytes=short), train_type="qlora")
    assert plan_short.settings.cache_dequantized == "false"


def dry_plan(model, **flags):
    folder = ROOT / "examples" / "configs" / model
    return make_plan({"model_name": str(folder), "dry_run": True, "output_dir": "outputs/none", **flags})


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_where_nothing_fits_no_other_settings_need_less(kind, ranks):
    plan = dry_plan("llama-3-70b", train_type=kind, assume_memory="2GiB", assume_world_size=ranks, parallel="fsdp")
    shape, room = plan.shape.known, plan.memory_budget
    least = budget.predicted_bytes(plan, shape, room)
    assert least > room.usable
    open_settings = dict(
        use_gradient_checkpointing="auto",
        microbatch_tokens=None,
        use_cpu_offload=False,
        sharding_strategy=None,
        vocab_parallel="auto",
    )
    ways = combinations(plan.with_settings(**open_settings), room, set(), timed=True)
    assert len(ways) > 1
    assert least == min(budget.predicted_bytes(plan.with_settings(**way), shape, room) for way in ways)
    assert "fits in" not in why(plan, "use_gradient_checkpointing")


def test_a_70b_that_fits_no_4_small_devices_is_sharded_and_its_remedies_are_named():
    flags = "--model_name examples/configs/llama-3-70b --train_type full --parallel fsdp".split()
    code, out, _ = dry_run(*flags, "--assume_memory", "8GiB", "--assume_world_size", "4")
    assert code == 2 and "sharding_strategy" not in out and "total           11.5" in out
    assert "any one of these changes makes it fit" in out and "--train_type lora: -" in out


@pytest.mark.parametrize("ranks", [8, 64])
def test_what_decides_between_lora_and_qlora_is_predicted_for_the_ranks_of_the_run(ranks):
    """Every rank gathers a layer's experts, whatever the number of ranks."""
    flags = dict(assume_memory="80GB", assume_world_size=ranks, parallel="fsdp", microbatch_tokens=512)
    chosen = dry_plan("mixtral-8x22b", **flags)
    sparing = dict(context_length=2048, batch_size=1, use_gradient_checkpointing="true", microbatch_tokens=None)
    lora = dry_plan("mixtral-8x22b", train_type="lora", **flags).with_settings(
        **sparing, use_cpu_offload=False, sharding_strategy=None, vocab_parallel="false"
    )
    needed = budget.predicted_bytes(lora, lora.shape.known, lora.memory_budget)
    assert budget.gib(needed) in why(chosen, "train_type")
    assert chosen.settings.train_type == ("lora" if needed <= 0.8 * lora.memory_budget.usable else "qlora")
    assert budget.fits(chosen, chosen.shape.known, chosen.memory_budget)


def test_layouts_are_compared_at_the_length_of_the_plan_that_is_chosen():
    """A length that fits no rank that shards with all others may fit where layers are split."""
    plan = dry_plan("mixtral-8x22b", train_type="full", assume_memory="80GB", assume_world_size=64)
    needed = budget.predicted_bytes(plan, plan.shape.known, plan.memory_budget)
    assert plan.data.context_length == 512
    assert str(plan.dims) in plan.layouts[1] and budget.gib(needed) in plan.layouts[1]


def test_a_row_is_as_long_as_memory_allows_where_embedding_and_head_are_not_gathered():
    plan = dry_plan("llama-3.1-8b", train_type="full", assume_memory="8GiB", assume_world_size=4, parallel="fsdp")
    assert plan.data.context_length == 512 and plan.parallel.vocab_parallel
    assert budget.fits(plan, plan.shape.known, plan.memory_budget)
