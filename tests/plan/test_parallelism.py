"""The plan of several ranks, and of accelerate's."""

import importlib.util
from dataclasses import replace

import pytest

from backend_manager import CAPABILITIES, Backend
from finetune.distributed.env import RankEnv
from finetune.errors import PlanError
from finetune.estimate.model_shape import ModelShape
from finetune.plan.facts import Facts
from finetune.plan.resolve import resolve_plan
from finetune.plan.run_plan import RunPlan
from finetune.run import report
from tests.support.accelerated import FSDP2, ZERO2, ZERO3, needs_deepspeed
from tests.support.commands import command, finish
from tests.support.plans import plan_of


@pytest.mark.promise("FT_08")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (dict(tp_degree=4, world_size=4), "does not divide num_key_value_heads 2. Use one of 1, 2."),
        (dict(pp_degree=3, world_size=3), "the model has 2 layers. Use at most as many stages."),
        (
            dict(pp_degree=2, world_size=2, pp_schedule="interleaved1f1b"),
            "the model has 2 layers, and --pp_schedule interleaved1f1b takes 2 per stage. Use 1f1b, or fewer stages.",
        ),
        (
            dict(pp_degree=2, world_size=4, dp_shards=2, pp_schedule="interleaved1f1b", no_sync=True),
            "interleaved stage are not complete at the same time. Use --pp_schedule 1f1b.",
        ),
        (
            dict(cp_degree=2, world_size=2, batch_layout="padded"),
            "contradicts --cp_degree 2, which splits only padding-free rows",
        ),
        (dict(tp_degree=2, world_size=3), "--tp_degree 2: the product of the degrees is 2, but the world size is 3"),
    ],
)
def test_degrees_that_do_not_divide_are_refused_in_the_plan(base, tmp_path, flags, message):
    code, _, err = finish(command(base, flags, output_dir=tmp_path / "out"))
    assert code == 2 and message in err, err


@pytest.mark.promise("CLI_07", "MSG_04")
def test_mlx_with_two_processes_gives_the_documented_text():
    with pytest.raises(PlanError, match="MLX backend doesn't support distributed training"):
        plan_of(Backend.MLX, caps=CAPABILITIES[Backend.MLX], world_size=2)


def settled(environment=None, world_size=2, backend=Backend.CPU, num_devices=1, **overrides):
    requested = {"world_size": world_size, **overrides}
    facts = Facts(backend, CAPABILITIES[backend], environment=environment or {}, num_devices=num_devices)
    return resolve_plan(requested, facts)


def test_ranks_beyond_the_devices_are_refused_but_in_a_dry_run():
    with pytest.raises(PlanError, match="--world_size 8: this machine has 2 devices for 8 ranks"):
        settled(world_size=8, backend=Backend.CUDA, num_devices=2)
    assert settled(world_size=8, backend=Backend.CUDA, num_devices=2, dry_run=True).dims.world_size == 8
    assert settled(world_size=8).dims.world_size == 8  # on a CPU


def test_accelerate_alone_means_replicas_and_one_process_needs_none():
    found = settled(parallel_backend="accelerate")
    assert (found.distribution, found.dims.dp_replicate, found.dims.dp_shard) == ("ddp", 2, 1)
    assert "by accelerate: DDP" in report.plan_lines(found)[1]
    assert RunPlan.deserialize(found.serialize()).distribution == "ddp"
    one = settled(parallel_backend="accelerate", world_size=1)
    assert one.distribution == "ptd" and any(a.setting == "parallel_backend" for a in one.adjustments)


def test_a_config_file_for_fsdp2_shards_on_cuda_and_is_followed_only_if_requested():
    asked = settled(FSDP2, backend=Backend.CUDA, num_devices=2, parallel_backend="accelerate")
    assert (asked.distribution, asked.dims.dp_shard) == ("fsdp2", 2)
    default = settled(FSDP2)
    assert default.distribution == "ptd"
    assert any(n.startswith("parallel_backend ptd: built-in FSDP2 and DDP run") for n in default.notices)


REFUSED = [
    (dict(tp_degree=2), {}, "--tp_degree 2:"),
    (dict(dp_shards=2), {}, "--dp_shards 2: accelerate's config file decides what is sharded, and asks for DDP"),
    (dict(sharding_strategy="full_shard"), {}, "--sharding_strategy full_shard: accelerate's config"),
    (dict(world_size=4, dp_degree=2), {}, "--dp_degree 2: accelerate's config"),
    (dict(reentrant_checkpointing=True), {}, "--reentrant_checkpointing true:"),
    (
        {},
        FSDP2,
        "--parallel_backend accelerate: its FSDP2 is for GPUs, and on cpu it would silently wrap DDP. Use "
        "--parallel_backend ptd",
    ),
    ({}, FSDP2 | {"FSDP_VERSION": "1"}, "--parallel_backend accelerate: its config file asks for fsdp1"),
    (
        {},
        ZERO3 | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"},
        "--parallel_backend accelerate: its config file asks for zero1",
    ),
    ({}, {"ACCELERATE_USE_MEGATRON_LM": "true"}, "--parallel_backend accelerate: its config file asks for megatron"),
    (
        {},
        {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"},
        "--parallel_backend accelerate: its config file sets dynamo_backend",
    ),
]


@pytest.mark.parametrize(("overrides", "environment", "line"), REFUSED)
def test_what_accelerate_cannot_do_is_one_line_with_the_remedy(overrides, environment, line):
    with pytest.raises(PlanError) as error:
        settled(environment, **{"parallel_backend": "accelerate", **overrides})
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


def test_several_processes_requested_of_accelerate_launch_on_a_cpu_are_not_dropped_silently():
    left = {"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with pytest.raises(PlanError, match="starts one process"):
        settled(left, world_size=-1)
    assert settled(left, parallel_backend="accelerate").dims.world_size == 2


def test_zero_without_deepspeed_says_how_to_get_it():
    if importlib.util.find_spec("deepspeed"):
        pytest.skip("DeepSpeed is installed")
    with pytest.raises(PlanError, match="requirements-deepspeed.txt"):
        settled(ZERO3)


@pytest.mark.slow
@needs_deepspeed
def test_a_config_file_for_zero_is_followed_unless_ptd_is_given():
    found = settled(ZERO3)
    assert (found.distribution, found.dims.dp_replicate) == ("zero3", 2)
    assert [str(a) for a in found.adjustments if a.setting == "parallel_backend"] == [
        "parallel_backend: ptd -> accelerate (accelerate's config file asks for DeepSpeed ZeRO-3)"
    ]
    assert settled(ZERO3, parallel_backend="ptd").distribution == "ptd"
    for overrides in (dict(optimizer="adamw_8bit"), dict(no_sync=True), dict(precision="fp16")):
        with pytest.raises(PlanError, match="DeepSpeed ZeRO-2"):
            settled(ZERO2, **overrides)
    offload = ZERO2 | {"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu"}
    with pytest.raises(PlanError, match="offload_param_device cpu"):
        settled(offload)


def test_a_rendezvous_address_that_ranks_started_here_do_not_use_is_an_adjustment():
    plan = plan_of(world_size=2, master_port=29500)
    said = [str(a) for a in plan.adjustments if a.setting == "master_port"]
    assert said == ["master_port: 29500 -> 12355 (ranks started here meet over loopback, on a free port)"]


def on_macs(environment=None, env=None, **overrides):
    """The plan of several ranks on Apple GPUs."""
    facts = Facts(
        Backend.MPS, replace(CAPABILITIES[Backend.MPS], memory_bytes=64 * 2**30), env=env, environment=environment or {}
    )
    return resolve_plan({"model_name": "m", "dataset": "d", "output_dir": "o", **overrides}, facts)


def test_sharding_on_apple_gpus_recomputes_unquantized_weights_and_says_why():
    plan = on_macs(world_size=2, train_type="lora")
    (reason,) = [a.reason for a in plan.adjustments if a.setting == "use_gradient_checkpointing"]
    assert plan.settings.use_gradient_checkpointing == "true" and "cannot resize storages" in reason
    assert on_macs(world_size=2, train_type="qlora").settings.use_gradient_checkpointing == "false"
    chosen = on_macs(world_size=2, train_type="lora", use_gradient_checkpointing="false")
    assert chosen.settings.use_gradient_checkpointing == "false"


def test_several_processes_on_one_mac_are_told_what_they_share():
    (said,) = [n for n in on_macs(world_size=2, train_type="lora").notices if "share this Mac" in n]
    assert "2 processes" in said and "32.0 GiB each, 64.0 in all" in said and "several Macs" in said
    two_macs = on_macs(env=RankEnv(0, 2, 0, 1), train_type="lora")
    assert not any("share this Mac" in n for n in two_macs.notices)


def test_the_cpu_fallback_of_mps_is_refused_with_several_ranks():
    with pytest.raises(PlanError, match=r"PYTORCH_ENABLE_MPS_FALLBACK=1: .*\(pytorch#173808\). Unset it"):
        on_macs({"PYTORCH_ENABLE_MPS_FALLBACK": "1"}, world_size=2)
    on_macs({"PYTORCH_ENABLE_MPS_FALLBACK": "1"}, world_size=1)


@pytest.mark.parametrize("degree", ["tp_degree", "pp_degree", "ep_degree"])
def test_scored_rows_and_samples_are_kept_whatever_the_degrees(degree):
    experts = {"num_local_experts": 4, "moe_intermediate_size": 64}
    shape = ModelShape.from_config({"num_hidden_layers": 2, "num_attention_heads": 4} | experts)
    rows = dict(validation_dataset="v.jsonl", score_dataset="s.jsonl")
    settings = plan_of(shape=shape, world_size=2, **{degree: 2}, **rows).settings
    assert (settings.score_dataset, settings.eval_samples) == ("s.jsonl", 4)
