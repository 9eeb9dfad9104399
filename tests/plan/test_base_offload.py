"""Where the plan puts the frozen layers, and where it keeps them packed."""

import re

import pytest

from backend_manager import Backend
from finetune.errors import PlanError
from finetune.estimate import memory, remedies
from finetune.estimate.budget import full_microbatch
from finetune.estimate.model_cost import ModelCost
from finetune.plan.facts import Facts
from finetune.plan.resolve import resolve_plan
from tests.support.planned import GIB, SMALL, planned, why
from tests.support.plans import NOW, capabilities

ONE_ROW = dict(train_type="qlora", context_length=256, lora_target_modules="q_proj,v_proj")


def on_a_gpu(gib: float, **overrides):
    caps = capabilities(Backend.CUDA, memory_bytes=int(gib * GIB), supports_bfloat16=True)
    return resolve_plan({"output_dir": "o", **overrides}, Facts(Backend.CUDA, caps, SMALL), NOW)


def test_auto_leaves_the_base_on_the_device_if_it_fits_and_takes_the_first_way_that_does():
    assert planned(8, **ONE_ROW).settings.base_offload == "none"
    tight = planned(2.0, **ONE_ROW)
    assert tight.settings.base_offload == "disk"
    assert why(tight, "base_offload").count("GiB") == 3
    assert any("are read for every forward" in notice for notice in tight.notices)
    gpu = on_a_gpu(0.8, **ONE_ROW)
    assert gpu.settings.base_offload == "host" and gpu.memory.base_offload == "host"
    assert planned(1.0, **ONE_ROW).settings.base_offload == "none"  # with it neither


def test_memory_holds_two_layers_in_place_of_all_and_embedding_and_head_only_while_they_are_used():
    with_all, with_two = (planned(64, base_offload=word, **ONE_ROW) for word in ("none", "disk"))
    costs = [ModelCost(SMALL.known, plan) for plan in (with_all, with_two)]
    layers = memory.layers_bytes(costs[0])
    saved = memory.held_base_bytes(costs[0]) - memory.held_base_bytes(costs[1])
    end = 4 * 32000 * 2048
    assert saved == pytest.approx(layers * (1 - 2 / 22) + 2 * end, rel=1e-6)
    host = on_a_gpu(24, base_offload="host", **ONE_ROW)
    in_bf16 = memory.layers_bytes(ModelCost(SMALL.known, host))
    assert memory.estimate(host, SMALL.known, full_microbatch(host), "cuda")["host"] == in_bf16 + end // 2


def test_a_single_process_that_asks_for_cpu_offload_has_its_base_in_host_memory():
    plan = on_a_gpu(24, use_cpu_offload=True, **ONE_ROW)
    assert plan.settings.base_offload == "host" and not plan.settings.use_cpu_offload
    assert why(plan, "base_offload") == "--use_cpu_offload in one process"
    full = on_a_gpu(80, use_cpu_offload=True, train_type="full")
    assert full.settings.base_offload == "none"
    on_cpu = planned(64, use_cpu_offload=True, **ONE_ROW)
    assert on_cpu.settings.base_offload == "none"


def test_host_and_device_of_one_memory():
    plan = planned(64, base_offload="host", **ONE_ROW)
    assert plan.settings.base_offload == "none" and "have one memory" in why(plan, "base_offload")


@pytest.mark.parametrize(
    "settings, fact",
    (
        (dict(train_type="full"), "weights of the base train"),
        (dict(train_type="lora", init_lora_weights="pissa"), "computes with the whole unquantized base"),
        (dict(train_type="qlora", world_size=2), "ranks divide the weights among them"),
        (dict(train_type="qlora", compile="true"), "--compile true traces layers"),
        (dict(train_type="qlora", cache_dequantized="true"), "--cache_dequantized true keeps dense copies"),
        (dict(train_type="qlora", packed_cache="none"), "reads the base from there"),
    ),
)
def test_what_cannot_be_beside_it_is_refused(settings, fact):
    with pytest.raises(PlanError, match=fact):
        planned(64, base_offload="disk", **settings)


def test_the_packed_base_is_kept_where_one_process_quantizes_it_and_its_size_is_said():
    said = [n for n in planned(64, **ONE_ROW).notices if "packed base takes" in n]
    assert len(said) == 1 and "GiB of disk" in said[0]
    assert not [n for n in planned(64, **ONE_ROW, packed_cache="none").notices if "packed base" in n]
    (beside,) = [n for n in planned(64, **ONE_ROW, base_offload="disk").notices if "packed base takes" in n]
    sizes = [float(re.search("takes ([0-9.]+) GiB", line)[1]) for line in (beside, said[0])]
    outer = 2 * SMALL.vocab_size * SMALL.hidden_size * 4 / GIB  # embedding and head, in files of their own
    assert abs(sizes[0] - sizes[1] - outer) < 0.02
    for changes in (dict(train_type="lora"), dict(train_type="qlora", world_size=2)):
        assert planned(64, **changes).settings.packed_cache == "none"
    given = planned(64, train_type="lora", packed_cache="/somewhere")
    assert "has nothing quantized" in why(given, "packed_cache")


def test_a_cache_that_cannot_be_is_refused_by_the_plan(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(PlanError, match="--packed_cache .*file: is a file"):
        planned(64, **ONE_ROW, packed_cache=str(tmp_path / "file"))


def test_a_run_that_does_not_fit_is_offered_it():
    plan = planned(1.9, base_offload="none", **ONE_ROW)
    lines, ok = remedies.report_lines(plan, plan.shape, plan.memory_budget)
    assert not ok and any("--base_offload disk" in line for line in lines)
