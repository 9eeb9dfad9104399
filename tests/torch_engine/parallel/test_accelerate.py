"""--parallel_backend accelerate: what the plan refuses, DDP and DeepSpeed's ZeRO on real ranks against one process, real launches."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from backend_manager import CAPABILITIES, Backend
from finetune import report
from finetune.checkpoint.store import newest_checkpoint
from finetune.distributed import accelerate_config
from finetune.errors import PlanError
from finetune.metrics import read_events
from finetune.plan.draft import Facts
from finetune.plan.resolve import resolve_plan
from finetune.plan.run_plan import RunPlan
from tests.promises.test_parallel_equals_one_process import LOSS, alone, base, check, command, finish, losses  # noqa: F401  fixtures too
from tests.support import ranks

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "examples" / "accelerate"
LAUNCH = [sys.executable, "-W", "ignore", "-m", "accelerate.commands.launch"]
TORCHRUN = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
ZERO3 = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
ZERO2 = ZERO3 | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: requirements-deepspeed.txt"
)


def settled(environment=None, world_size=2, backend=Backend.CPU, **overrides):
    requested = {"world_size": world_size, **overrides}
    return resolve_plan(requested, Facts(backend, CAPABILITIES[backend], environment=environment or {}))


# ---- the plan


def test_accelerate_alone_means_replicas_and_one_process_needs_none():
    found = settled(parallel_backend="accelerate")
    assert (found.distribution, found.dims.dp_replicate, found.dims.dp_shard) == ("ddp", 2, 1)
    assert "by accelerate: DDP" in report.plan_lines(found)[1]
    assert RunPlan.deserialize(found.serialize()).distribution == "ddp"
    one = settled(parallel_backend="accelerate", world_size=1)
    assert one.distribution == "ptd" and any(a.setting == "parallel_backend" for a in one.adjustments)


def test_a_config_file_for_fsdp2_shards_on_cuda_and_is_followed_only_where_asked():
    asked = settled(FSDP2, backend=Backend.CUDA, parallel_backend="accelerate")
    assert (asked.distribution, asked.dims.dp_shard) == ("fsdp2", 2)
    default = settled(FSDP2)
    assert default.distribution == "ptd"
    assert any(n.startswith("parallel_backend ptd: built-in FSDP2 and DDP run") for n in default.notices)


REFUSED = [
    (dict(tp_degree=2), {}, "--tp_degree 2:"),
    (dict(dp_shards=2), {}, "--dp_shards 2: accelerate's config file says who shards, and asks for DDP"),
    (dict(sharding_strategy="full_shard"), {}, "--sharding_strategy full_shard: accelerate's config"),
    (dict(world_size=4, dp_degree=2), {}, "--dp_degree 2: accelerate's config"),
    (dict(reentrant_checkpointing=True), {}, "--reentrant_checkpointing true:"),
    (
        {},
        FSDP2,
        "--parallel_backend accelerate: its FSDP2 is for GPUs, and on cpu it would wrap DDP without a word. Use "
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
def test_what_accelerate_does_not_do_is_one_line_with_the_remedy(overrides, environment, line):
    with pytest.raises(PlanError) as error:
        settled(environment, **{"parallel_backend": "accelerate", **overrides})
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


def test_several_processes_asked_of_accelerate_launch_on_a_cpu_are_not_dropped_in_silence():
    left = {"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with pytest.raises(PlanError, match="starts one process"):
        settled(left, world_size=-1)
    assert settled(left, parallel_backend="accelerate").dims.world_size == 2


def test_zero_without_deepspeed_says_how_to_get_it():
    if importlib.util.find_spec("deepspeed"):
        pytest.skip("DeepSpeed is installed")
    with pytest.raises(PlanError, match="requirements-deepspeed.txt"):
        settled(ZERO3)


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


def test_every_shipped_config_file_is_one_that_the_plan_knows():
    from accelerate.commands.config.config_args import ClusterConfig

    for file in sorted(CONFIGS.glob("*.yaml")):
        words = yaml.safe_load(file.read_text())
        ClusterConfig.from_yaml_file(file)  # accelerate refuses keys it does not know
        assert words["mixed_precision"] == "no" and file.stem in accelerate_config.NAMES, file


# ---- the step


def against_one_process(method, kinds, folder, architecture="llama"):
    arguments = {"method": method, "kinds": kinds, "architecture": architecture}
    found = ranks.run(2, "tests.support.cases:accelerated", arguments, folder)
    for figures in found[0]:
        check(figures, figures["kind"])


def test_ddp_through_accelerate_trains_as_one_process_does(tmp_path):
    against_one_process("ddp", ["full", "nf4"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_ddp_through_accelerate_trains_every_kind(architecture, tmp_path):
    kinds = (
        ["lora", "dora", "full recomputed", "nf4 recomputed", "bnb"] if architecture == "llama" else ["lora", "full"]
    )
    against_one_process("ddp", kinds, tmp_path, architecture)


@needs_deepspeed
@pytest.mark.slow
def test_zero2_trains_as_one_process_does(tmp_path):
    against_one_process("zero2", ["full", "lora", "dora", "nf4", "nf4 recomputed"], tmp_path)


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "lora", "dora", "nf4", "mlx", "nf4 recomputed"])
def test_zero3_trains_as_one_process_does(kind, tmp_path):
    against_one_process("zero3", [kind], tmp_path)


# ---- the program


def same_run(folder, alone):  # noqa: F811
    assert losses(folder) == pytest.approx(losses(alone), rel=LOSS)
    one, many = (load_file(f / "adapter_model.safetensors") for f in (alone, folder))
    assert one.keys() == many.keys()
    for name in one:
        np.testing.assert_allclose(many[name], one[name], atol=1e-4)


def same_moments(one, other):
    one, other = (load_file(newest_checkpoint(f)[0].folder / "optimizer.safetensors") for f in (one, other))
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(other[name], one[name], atol=1e-4 * np.abs(one[name]).max())


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[*LAUNCH, "--cpu", "--num_processes", "2"], [sys.executable, "-W", "ignore"]])
def test_accelerate_launch_and_world_size_run_ddp(base, alone, launcher, tmp_path):  # noqa: F811
    flags = ["--batch_size", 2, "--world_size", 2, "--parallel_backend", "accelerate"]
    code, out, err = finish([*launcher, ROOT / "train.py", *base, *flags, "--output_dir", tmp_path / "out"])
    assert code == 0 and "by accelerate: DDP" in out and out.count("step    12/12") == 1, err
    same_run(tmp_path / "out", alone)
    same_moments(tmp_path / "out", alone)


@pytest.mark.slow
def test_torchrun_runs_ddp(base, alone, tmp_path):  # noqa: F811
    flags = ["--batch_size", 2, "--parallel_backend", "accelerate"]
    code, out, err = finish([*TORCHRUN, ROOT / "train.py", *base, *flags, "--output_dir", tmp_path / "out"])
    assert code == 0 and "by accelerate: DDP" in out, err
    same_run(tmp_path / "out", alone)


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("train_type", ["lora", "full"])
def test_a_run_under_zero_goes_on_in_one_process_and_back(base, tmp_path, stage, train_type):  # noqa: F811
    """2 ranks under ZeRO, then 1 process, then 2 ranks again: losses, weights and moments of one process."""
    flags = [f for f in base if f != 4 and f != "--lora_rank"] if train_type == "full" else base
    flags = [*flags, "--train_type", train_type, "--lr", "1e-3", "--save_every", 3, "--batch_size", 4]
    launch = [*LAUNCH, "--config_file", CONFIGS / f"zero{stage}.yaml"]
    for epochs in (1, 2, 3):
        for name in ("one", "many"):
            more = ["--num_epochs", epochs, "--output_dir", tmp_path / name]
            more += ["--resume", "auto"] if epochs > 1 else []
            if name == "many" and epochs != 2:
                argv = [*launch, *command(flags, *more, "--batch_size", 2)[3:]]
            else:
                argv = command(flags, *more)
            code, out, err = finish(argv, timeout_s=200, DS_ACCELERATOR="cpu")
            assert code == 0 and (name == "one" or epochs == 2 or f"ZeRO-{stage}" in out), err[-3000:]
    assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one"), rel=LOSS)
    assert len(read_events(tmp_path / "many", "step")) == 18
    same_moments(tmp_path / "one", tmp_path / "many")
