"""Command lines of the older scripts: each flag with its effect here, and the answers to what is not a flag."""

import gzip
import json
import shutil

import pytest

from backend_manager import Backend, BackendManager
from finetune.cli import parse_overrides
from finetune.config import FIELDS
from finetune.distributed.env import rank_env
from finetune.engine import MemoryStats, StepResult
from finetune.errors import PlanError
from finetune.model_files.files import find_model_of
from finetune.parts.train_state import TrainState
from finetune.plan import log_to
from finetune.plan.backend import selection
from finetune.plan.facts import Facts
from finetune.plan.resolve import resolve_plan
from finetune.run.metrics import Metrics
from tests.support import tiny
from tests.support.commands import command, finish
from tests.support.plans import NOW, adjustment, capabilities, plan_of
from train import build_parser, fine_tune, make_plan

QLORA_BNB = dict(train_type="qlora", quantization_backend="bnb")
QLORA_HQQ = dict(train_type="qlora", quantization_backend="hqq")
# Flag -> (what a user of the older scripts writes, what the plan settles on); {} is the older default itself.
OLDER_FLAGS = {
    "world_size": [("-1", {"world_size": 1}), ("2", {"world_size": 2, "dp_shards": 2})],
    "model_name": [("meta-llama/Llama-2-7b-hf", {"model_name": "meta-llama/Llama-2-7b-hf"})],
    "train_type": [
        ("full", dict(train_type="full", quantization_backend="none")),
        ("lora", dict(train_type="lora", quantization_backend="none")),
        ("qlora", dict(train_type="qlora", quantization_backend="nf4")),
        ("custom_lora", dict(train_type="lora")),
        ("custom_qlora", QLORA_BNB),
        ("hqq_lora", QLORA_HQQ),
        ("hqq_dora", QLORA_HQQ | {"use_dora": True}),
        ("bnb_dora", QLORA_BNB | {"use_dora": True}),
        ("bnb_llama_pro --llama_pro_path blk_exp-32-35", QLORA_BNB | {"model_name": "blk_exp-32-35"}),
        ("hqq_llama_pro --llama_pro_path blk_exp-32-35", QLORA_HQQ | {"llama_pro_path": "blk_exp-32-35"}),
    ],
    "llama_pro_path": [("blk_exp-32-35", {"llama_pro_path": "blk_exp-32-35"})],
    "batch_size": [("1", {"batch_size": 1})],
    "context_length": [("512", {"context_length": 512})],
    "gradient_accumulation_steps": [("4", {"gradient_accumulation_steps": 4})],
    "num_epochs": [("3", {"num_epochs": 3})],
    "max_steps": [("-1", {"max_steps": -1}), ("10", {"max_steps": 10})],
    "dataset": [
        (word, {"dataset": word}) for word in ("alpaca", "alpaca_sample", "dummy", "guanaco", "sql", "orca_math")
    ],
    "dataset_samples": [("512", {"dataset_samples": 512})],
    "sharding_strategy": [
        ("full_shard --world_size 2", dict(dp_shards=2, dp_degree=1)),
        ("shard_grad_op --world_size 2", dict(dp_shards=2, dp_degree=1)),
        ("ddp --world_size 2", dict(dp_shards=1, dp_degree=2)),
        ("hybrid_full_shard --world_size 4 --dp_degree 2", dict(dp_shards=2, dp_degree=2)),
        ("hybrid_shard_grad_op --world_size 4 --dp_degree 2", dict(dp_shards=2, dp_degree=2)),
        ("full_shard", dict(dp_shards=1, dp_degree=1)),
    ],
    "use_gradient_checkpointing": [("True", {"use_gradient_checkpointing": "true"}), ("False", {})],
    "reentrant_checkpointing": [("True", {"reentrant_checkpointing": True}), ("False", {})],
    "use_cpu_offload": [("True --world_size 2", {"use_cpu_offload": True}), ("True", {"use_cpu_offload": False})],
    "use_activation_cpu_offload": [("False", {"use_activation_cpu_offload": False})],
    "low_memory": [("True", {"low_memory": True}), ("False", {"low_memory": False})],
    "no_sync": [("True --world_size 2", {"no_sync": True}), ("False --world_size 2", {"no_sync": False})],
    "loading_workers": [("-1", {"loading_workers": -1}), ("8", {"loading_workers": 8})],
    "precision": [
        (f"{word} --train_type lora", {"precision": word})
        for word in ("fp32", "bf16", "fp16_autocast", "bf16_autocast", "bf16_buffers_autocast")
    ]
    + [
        (f"mp_{word} --train_type lora", {"precision": word})
        for word in ("fp16_autocast", "bf16_autocast", "bf16_buffers_autocast")
    ],
    "n_bits": [("4", {"n_bits": 4}), ("8 --quantization_backend bnb", {"n_bits": 8})],
    "hqq_group_size": [("128 --train_type hqq_lora", {"group_size": 128})],
    "save_model": [("True", {"save_model": True}), ("False", {"save_model": False})],
    "output_dir": [("output", {"output_dir": "output"})],
    "lora_rank": [("64", {"lora_rank": 64})],
    "lora_alpha": [("16", {"lora_alpha": 16.0})],
    "lora_dropout": [("0.1", {"lora_dropout": 0.1})],
    "lora_target_modules": [("all", {"lora_target_modules": "all"}), ("default", {"lora_target_modules": "default"})]
    + [("none", {"lora_target_modules": "default"}), ("all-linear", {"lora_target_modules": "all"})],
    "lr": [("1e-5", {"lr": 1e-5})],
    "apply_gradient_clipping": [("True", {"apply_gradient_clipping": True})],
    "grad_norm": [("0.3", {"grad_norm": 0.3})],
    "wd": [("0.1", {"wd": 0.1})],
    "optimizer": [
        ("adamw", {"optimizer": "adamw"}),
        ("adam", {"optimizer": "adam"}),
        ("sgd", {"optimizer": "sgd"}),
        ("adadelta", {"optimizer": "adadelta"}),
        ("fused_adam", {"optimizer": "adam"}),
        ("fused_adamw", {"optimizer": "adamw"}),
    ],
    "lr_scheduler": [
        ("constant", {"lr_scheduler": "constant", "warmup_ratio": 0.0}),
        ("constant --warmup_ratio 0.1", {"warmup_ratio": 0.1}),
        ("constant --warmup_steps 7", {"warmup_steps": 7, "warmup_ratio": 0.0}),
    ]
    + [
        (word, {"lr_scheduler": word, "warmup_ratio": 0.05})
        for word in ("linear", "cosine", "cosine_with_restarts", "polynomial", "exponential")
    ],
    "warmup_steps": [("1000", {"warmup_steps": 1000, "warmup_ratio": 0.0})],
    "warmup_ratio": [("0.2", {"warmup_ratio": 0.2})],
    "cosine_min_lr_ratio": [("0.05", {"cosine_min_lr_ratio": 0.05})],
    "log_to": [("tqdm", {"log_to": "tqdm"}), ("wandb", {"log_to": "wandb"}), ("stdout", {"log_to": "stdout"})],
    "log_every_n_steps": [("10", {"log_every_n_steps": 10})],
    "verbose": [("false", {"verbose": False})],
    "project_name": [("fsdp_qlora", {"project_name": "fsdp_qlora"})],
    "name": [("run", {"name": "run"})],
    "group": [("g", {"group": "g"})],
    "entity": [("e", {"entity": "e"})],
    "master_addr": [("localhost", {"master_addr": "localhost"})],
    "master_port": [("12355", {"master_port": 12355}), ("12356", {"master_port": 12355})],
    "seed": [("42", {"seed": 42})],
    "profile": [("true", {"profile": True})],
    "profiling_output": [("llama-test", {"profiling_output": "llama-test"})],
    "with_stack": [("true", {"with_stack": True})],
    "with_shapes": [("true", {"with_shapes": True})],
    "export_trace": [("true", {"export_trace": True})],
    "export_memory_timeline": [("true", {"export_memory_timeline": True})],
    "wait_steps": [("0", {"wait_steps": 0})],
    "profiler_warmup_steps": [("1", {"profiler_warmup_steps": 1})],
    "active_steps": [("5", {"active_steps": 5})],
    "repeat": [("1", {"repeat": 1})],
    "profiling_frequency": [("5", {"profiling_frequency": 5})],
    "profile_memory": [("true", {"profile_memory": True})],
}
CASES = [(flag, words, effect) for flag, cases in OLDER_FLAGS.items() for words, effect in cases]


def parsed(*argv: str) -> dict:
    return parse_overrides(list(argv), build_parser())


@pytest.mark.promise("CLI_13")
@pytest.mark.parametrize(("flag", "words", "effect"), CASES, ids=[f"{flag} {words}" for flag, words, _ in CASES])
def test_an_older_flag_has_its_effect_in_the_plan(flag, words, effect):
    value, *more = words.split()
    for argv in ([f"--{flag}", value, *more], [f"--{flag.replace('_', '-')}={value}", *more]):
        plan = plan_of(**({"dataset": "rows.jsonl"} | parsed(*argv)))
        assert {name: getattr(plan.settings, name) for name in effect} == effect


def test_every_choice_of_an_older_flag_is_a_choice_here():
    older = {
        "precision": "fp32 bf16 fp16_autocast bf16_autocast bf16_buffers_autocast",
        "optimizer": "adamw adam sgd adadelta fused_adam fused_adamw",
        "lr_scheduler": "constant linear cosine cosine_with_restarts polynomial exponential",
        "log_to": "tqdm wandb stdout",
        "sharding_strategy": "full_shard shard_grad_op ddp hybrid_full_shard hybrid_shard_grad_op",
        "train_type": "full lora qlora custom_qlora custom_lora hqq_lora hqq_dora bnb_dora bnb_llama_pro hqq_llama_pro",
    }
    for flag, words in older.items():
        assert set(words.split()) <= set(FIELDS[flag].metadata["choices"] or log_to.NAMES), flag


# Whole command lines as the older pages and scripts have them, each with what the plan makes of it.
COMMAND_LINES = [
    (
        "--model_name meta-llama/Llama-2-70b-hf --batch_size 2 --context_length 512 --precision bf16 "
        "--train_type qlora --use_gradient_checkpointing true --use_cpu_offload true --dataset alpaca "
        "--reentrant_checkpointing true",
        dict(batch_size=2, reentrant_checkpointing=True, use_gradient_checkpointing="true"),
    ),
    (
        "--world_size 2 --master_port 12356 --model_name meta-llama/Llama-2-7b-hf "
        "--gradient_accumulation_steps 4 --batch_size 8 --context_length 512 --precision bf16 --train_type "
        "full --use_gradient_checkpointing true --use_cpu_offload false --use_activation_cpu_offload false "
        "--log_to wandb --dataset alpaca",
        dict(world_size=2, precision="bf16_autocast", log_to="wandb"),
    ),
    (
        "--world_size 4 --master_port 12356 --model_name meta-llama/Llama-2-7b-hf "
        "--gradient_accumulation_steps 4 --batch_size 2 --context_length 512 --precision "
        "bf16_buffers_autocast --train_type custom_qlora --use_gradient_checkpointing true "
        "--reentrant_checkpointing true --use_cpu_offload false --log_to stdout --dataset alpaca",
        dict(world_size=4, quantization_backend="bnb", precision="bf16_buffers_autocast"),
    ),
    (
        "--world_size 2 --model_name meta-llama/Llama-2-7b-hf --gradient_accumulation_steps 2 --batch_size 1 "
        "--context_length 4096 --precision bf16_buffers_autocast --train_type hqq_dora "
        "--use_gradient_checkpointing true --reentrant_checkpointing false --use_activation_cpu_offload false "
        "--use_cpu_offload true --log_to stdout --dataset dummy --verbose true",
        dict(use_dora=True, use_cpu_offload=True, quantization_backend="hqq", context_length=4096),
    ),
    (
        "--train_type qlora --dataset guanaco --batch_size 8 --lr_scheduler cosine --log_to wandb "
        "--save_model True --output_dir guanaco_7B --gradient_accumulation_steps 2 --lr 2e-4",
        dict(output_dir="guanaco_7B", lr=0.0002, warmup_ratio=0.05),
    ),
    (
        "--context_length 256 --model_name codellama/CodeLlama-34b-hf --train_type qlora --batch_size 4 "
        "--gradient_accumulation_steps 4 --dataset sql --save_model True --output_dir sql_model_qlora "
        "--apply_gradient_clipping True --project_name fsdp_qlora_sql --precision bf16_buffers_autocast "
        "--log_to wandb",
        dict(project_name="fsdp_qlora_sql", dataset="sql"),
    ),
    (
        "--model_name meta-llama/Llama-2-7b-hf --gradient_accumulation_steps 2 --batch_size 1 "
        "--context_length 256 --num_epochs 1 --sharding_strategy full_shard --precision bf16 --train_type "
        "qlora --use_gradient_checkpointing false --use_cpu_offload false --log_to stdout --dataset dummy "
        "--profile true --export_trace true --export_memory_timeline true --with_stack true --max_steps 20 "
        "--repeat 0 --warmup_steps 4 --active_steps 1 --profiling_frequency 5 --profiling_output p",
        dict(profile=True, active_steps=1, profiling_frequency=5, warmup_steps=4, max_steps=20),
    ),
    (
        "--world_size=16 --master_addr=localhost --master_port=12342 --model_name meta-llama/Llama-2-7b-hf "
        "--dataset dummy --batch_size 4 --train_type hqq_lora --sharding_strategy full_shard "
        "--use_gradient_checkpointing true --use_activation_cpu_offload false --log_to wandb --verbose true",
        dict(world_size=16, dp_shards=16),
    ),
    (
        "--model_name meta-llama/Llama-2-7b-hf --lr_scheduler cosine --lr 5e-5 --warmup_ratio 0.1 "
        "--cosine_min_lr_ratio 0.05 --dataset alpaca",
        dict(cosine_min_lr_ratio=0.05, warmup_ratio=0.1),
    ),
    (
        "--model_name meta-llama/Llama-2-7b-hf --train_type qlora --batch_size 1 "
        "--gradient_accumulation_steps 4 --precision fp32 --dataset alpaca --quantization_backend hqq "
        "--n_bits 4 --group_size 128 --profile true --profiling_output ./profile_results",
        dict(group_size=128, quantization_backend="hqq", profiling_output="./profile_results"),
    ),
]


@pytest.mark.parametrize(("line", "effect"), COMMAND_LINES, ids=range(len(COMMAND_LINES)))
def test_a_whole_command_line_of_the_older_pages_settles(line, effect):
    settings = plan_of(**parsed(*line.split())).settings
    assert {name: getattr(settings, name) for name in effect} == effect


# What the older documentation printed and is refused here -> the line that says what to write.
ANSWERED = [
    ("--cosine_cycles 3", "--cosine_cycles 3: The schedule cosine_with_restarts has two cycles"),
    ("--warmup_epochs 2", "--warmup_epochs 2: --warmup_ratio W"),
    ("--wrapping_policy size", "--wrapping_policy size: Every decoder layer is a unit of its own"),
    ("--sharding_strategy hybrid_full_shard --world_size 2", "replicates across nodes, and there is only one. Give"),
    ("--backend cuda", "--backend cuda: Backend 'cuda' is not available"),
    ("--backend mps", "--backend mps: Backend 'mps' is not available"),
    ("--world_size 2 \\ #optional", "not a flag, and this command takes no positional arguments"),
    ("--train_type bnb_llama_pro", "--train_type bnb_llama_pro: needs --llama_pro_path"),
    ("--train_type lora --n_bits 4", "--n_bits 4: nothing is quantized with --train_type lora. Use --train_type qlora"),
    ("--train_type full --lora_rank 64", "--lora_rank 64: full fine-tuning has no adapter. Use --train_type lora"),
    ("--reentrant_checkpointing true --use_gradient_checkpointing false", "contradicts --use_gradient_checkpointing"),
    ("--warmup_steps 5 --warmup_ratio 0.1", "--warmup_steps 5: contradicts --warmup_ratio 0.1. Omit one of them."),
    ("--llama_pro_path /nowhere/blk_exp-32-35", "--llama_pro_path /nowhere/blk_exp-32-35: no such folder"),
    ("--n_bits 3 --train_type custom_qlora", "--n_bits 3: bnb supports 4/8 bits"),
    ("--sharding_strategy ddp --use_cpu_offload true --world_size 2", "--use_cpu_offload true: keeps sharded weights"),
]


@pytest.mark.promise("CLI_01")
@pytest.mark.parametrize(("words", "line"), ANSWERED, ids=[words for words, _ in ANSWERED])
def test_an_older_command_line_that_is_refused_is_answered(words, line, monkeypatch):
    monkeypatch.delenv("FSDP_BACKEND", raising=False)
    if words in ("--backend cuda", "--backend mps") and str(BackendManager(verbose=False).backend) in words:
        pytest.skip(f"this machine has {words.split()[1]}")
    with pytest.raises(PlanError) as error:
        make_plan(parsed("--dry_run", *words.split()))
    assert line in str(error.value) and "\n" not in str(error.value)


@pytest.mark.promise("ENV_07")
def test_wandb_without_the_package_is_answered():
    from backend_manager import package_version

    if package_version("wandb"):
        pytest.skip("wandb is installed")
    with pytest.raises(PlanError, match="--log_to wandb: wandb is not installed. pip install wandb, or use --log_to"):
        make_plan(parsed("--dry_run", "--log_to", "wandb"))


# ---- what was picked, and why


def test_auto_says_what_was_picked_and_why(monkeypatch, tmp_path):
    monkeypatch.delenv("FSDP_BACKEND", raising=False)
    for requested in ({}, {"backend": "auto"}):
        plan = make_plan({"dry_run": True, "output_dir": str(tmp_path / "o"), **requested})
        line, manager = str(adjustment(plan, "backend")), BackendManager(verbose=False)
        why = "no GPU found; --doctor says why" if plan.backend == "cpu" else manager.why_selected
        assert line == f"backend: auto -> {plan.backend} ({why})" and "cuda, mlx, mps, xpu, cpu" in manager.why_selected
        for other, why in manager.unavailable.items():
            assert f"{other}: {why.partition(': pip')[0]}" in manager.why_selected
    with pytest.raises(StopIteration):
        adjustment(make_plan({"dry_run": True, "backend": "cpu"}), "backend")


@pytest.mark.promise("ENV_01")
def test_the_environment_variable_is_named(monkeypatch):
    monkeypatch.setenv("FSDP_BACKEND", "cpu")
    assert str(adjustment(make_plan({"dry_run": True}), "backend")) == "backend: unset -> cpu (FSDP_BACKEND=cpu)"
    manager = BackendManager("cpu", verbose=False)
    monkeypatch.setenv("FSDP_BACKEND", "auto")
    assert "auto -> cpu" in str(selection(None, manager, None))
    assert selection("cpu", manager, None) is None
    assert "auto found mlx" in selection("auto", manager, Backend.MLX).reason
    if "cuda" not in map(str, manager.available):
        monkeypatch.setenv("FSDP_BACKEND", "cuda")
        with pytest.raises(PlanError, match="^FSDP_BACKEND=cuda: Backend 'cuda' is not available"):
            make_plan({"dry_run": True})


def test_a_constant_rate_without_warmup_resumes(run):
    """Resumed, the saved run's warmup is kept: also that of a run from before constant had none."""
    run(max_steps=2, lr_scheduler="constant", lr=1e-3, save_every=1)
    state = run(max_steps=3, lr_scheduler="constant", lr=1e-3, resume="auto", save_every=1)
    assert state.step == 3
    facts = Facts(Backend.CPU, capabilities(), inherited={"warmup_ratio": 0.05})
    assert resolve_plan({"lr_scheduler": "constant"}, facts, NOW).settings.warmup_ratio == 0.05


def test_the_older_slurm_form_is_answered_with_the_command():
    older = {"WORLD_SIZE": "16", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "2"}
    with pytest.raises(PlanError, match="WORLD_SIZE=16: .* each task is one rank.*srun --ntasks-per-node=8 python"):
        rank_env(older)
    env = rank_env({k: v for k, v in older.items() if k != "WORLD_SIZE"} | {"SLURM_TASKS_PER_NODE": "1(x2)"})
    with pytest.raises(PlanError, match="--world_size 16: srun started 2 ranks.* set --ntasks-per-node"):
        resolve_plan({"world_size": 16}, Facts(Backend.CPU, capabilities(), env=env), NOW)


# ---- Weights & Biases, the profiler


class Recorder:
    """Stands for a W&B run, which needs an account: keeps what it is given."""

    def __init__(self):
        self.logged = []

    def log(self, event, numbers):
        self.logged.append((event["step"], numbers))

    def finish(self, status):
        pass


def test_wandb_gets_the_older_keys_beside_ours(tmp_path):
    with Metrics(plan_of(log_to="stdout")) as log:
        log.open(tmp_path, TrainState(step=3, loss=1.5, total_steps=9, status="finished"))
        log.trackers.open["wandb"] = recorder = Recorder()
        memory = MemoryStats(100, {"base": 60, "activations": 20, "workspace": 20})
        log.step(StepResult(3.0, 2, 10, 0.5), 1e-3, 2.0, memory)
    ((step, numbers),) = [entry for entry in recorder.logged if "step/loss" in entry[1]]
    older = {"loss": 1.5, "lr": 1e-3, "time_taken": 2.0, "memory/allocated": 80, "memory/reserved": 100}
    older["memory/peak"] = 100
    assert step == 3 and numbers.items() >= older.items()
    assert numbers["step/loss"] == 1.5 and numbers["step/tokens_per_s"] == 5.0
    assert "tracked" not in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.promise("CLI_16")
@pytest.mark.slow
def test_a_timeline_without_matplotlib_is_said_before_the_run_and_counted_truly(tiny_model, rows_file, tmp_path):
    from backend_manager import package_version

    folder, drawn = tmp_path / "profiles", package_version("matplotlib") is not None
    argv = command(
        "--max_steps 4 --batch_size 2 --context_length 32 --backend cpu --train_type lora --precision fp32",
        "--profile true --export_memory_timeline true --active_steps 1 --profiling_frequency 2",
        model_name=tiny_model,
        dataset=rows_file,
        profiling_output=folder,
        output_dir=tmp_path / "out",
    )
    done = finish(argv)
    assert done.returncode == 0, done.stderr
    files = sorted(file.name for file in folder.iterdir())
    assert f"profile: {len(files)} files in {folder}" in done.stdout
    assert len([name for name in files if name.startswith("memory-")]) == 2
    if not drawn:
        said = "export_memory_timeline: matplotlib is not installed"
        assert done.stdout.index(said) < done.stdout.index("trainable parameters")
        with gzip.open(folder / next(n for n in files if n.startswith("memory-")), "rt") as file:
            times, sizes = json.load(file)
        assert len(times) == len(sizes) > 0


def test_profiler_flags_without_profile_are_a_notice():
    assert any("with_stack: nothing is recorded without --profile" in n for n in plan_of(with_stack=True).notices)


# ---- LLaMA-Pro's older folders


@pytest.fixture
def older_folder(tiny_model, expanded_model, tmp_path):
    """What the older block expansion writes: shards under the base's file names, in a folder named by the layers."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "meta" / "tiny_blk_exp-2-3"
    folder.mkdir(parents=True)
    tensors = load_file(expanded_model / "model.safetensors")
    names = sorted(tensors)
    for i, part in enumerate((names[:9], names[9:])):
        save_file({n: tensors[n] for n in part}, folder / f"model-0000{i + 1}-of-00002.safetensors")
    return folder


def test_an_older_expanded_folder_trains_with_its_base_given(older_folder, tiny_model, rows_file, tmp_path):
    flags = {"llama_pro_path": str(older_folder), "model_name": str(tiny_model), "train_type": "hqq_llama_pro"}
    flags["group_size"] = 32
    planned = make_plan(flags | {"dry_run": True, "dataset": str(rows_file), "backend": "cpu"})
    assert planned.shape.new_layers == 1 and not (older_folder / "config.json").exists()
    flags |= {"train_type": "bnb_llama_pro", "max_steps": 2, "batch_size": 2, "context_length": 32, "backend": "cpu"}
    state = fine_tune(**flags, dataset=str(rows_file), output_dir=str(tmp_path / "out"), precision="fp32", lr=1e-3)
    assert state.step == 2
    assert json.loads((older_folder / "config.json").read_text())["num_hidden_layers"] == 3
    assert (tmp_path / "out" / "trained_blocks.safetensors").is_file()
    assert find_model_of({"llama_pro_path": str(older_folder)}).config["num_hidden_layers"] == 3


def test_an_older_expanded_folder_is_refused_without_its_base_or_with_another(older_folder, tiny_model, tmp_path):
    with pytest.raises(PlanError, match="has weights and no config.json.* Add --model_name"):
        find_model_of({"llama_pro_path": str(older_folder)})
    tiny.build(num_hidden_layers=3).save_pretrained(tmp_path / "other")
    with pytest.raises(PlanError, match="its files have 3 layers, --model_name 3 and its name adds 1"):
        find_model_of({"llama_pro_path": str(older_folder), "model_name": str(tmp_path / "other")})
    wrong = older_folder.with_name("tiny_expanded")
    shutil.copytree(older_folder, wrong)
    with pytest.raises(PlanError, match="not an expanded model"):
        find_model_of({"llama_pro_path": str(wrong), "model_name": str(tiny_model)})
