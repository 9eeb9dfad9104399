"""Command lines of the older scripts: each flag with its effect here, and the answers to what is not a flag."""

import gzip
import json
import re
import shutil

import pytest

from backend_manager import Backend, BackendManager
from finetune.cli import parse_overrides
from finetune.distributed.env import rank_env
from finetune.engine import MemoryStats, StepResult
from finetune.errors import PlanError
from finetune.model_files.files import find_model_of
from finetune.parts.train_state import TrainState
from finetune.plan.backend import selection
from finetune.plan.facts import Facts
from finetune.plan.resolve import resolve_plan
from finetune.run.metrics import Metrics
from tests.support import tiny
from tests.support.commands import ROOT, command, finish
from tests.support.plans import NOW, adjustment, capabilities, plan_of
from train import build_parser, fine_tune, make_plan

TABLE = (ROOT / "tests/support/older_command_lines.txt").read_text().splitlines()
SETTLED = [tuple(line.split(" ->")) for line in TABLE if " ->" in line and line[0] != "#"]
REFUSED = [tuple(line.split(" => ")) for line in TABLE if " => " in line and line[0] != "#"]


def parsed(*argv: str) -> dict:
    return parse_overrides(list(argv), build_parser())


@pytest.mark.promise("CLI_13")
@pytest.mark.parametrize(("words", "effect"), SETTLED, ids=[words for words, _ in SETTLED])
def test_an_older_command_line_has_its_effect_in_the_plan(words, effect):
    with_dashes = re.sub(r"(--\w+) ", lambda found: found[1].replace("_", "-") + "=", words)
    for argv in (words.split(), with_dashes.split()):
        settings = plan_of(**({"dataset": "rows.jsonl"} | parsed(*argv))).settings
        assert effect.split() == [f"{name}={getattr(settings, name)}" for name in re.findall(r"(\w+)=", effect)]


@pytest.mark.promise("CLI_01")
@pytest.mark.parametrize(("words", "line"), REFUSED, ids=[words for words, _ in REFUSED])
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
