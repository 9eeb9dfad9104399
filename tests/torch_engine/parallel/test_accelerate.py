"""--parallel_backend accelerate: DDP and DeepSpeed's ZeRO on real ranks against one process."""

import pytest

from finetune.parts.parallel_dims import ParallelDims
from tests.support import cases, ranks
from tests.support.accelerated import CONFIGS, needs_deepspeed
from tests.support.cases import LOSS
from tests.support.commands import ACCELERATE, PYTHON, ROOT, TORCHRUN, finish, words
from tests.support.runs import assert_same_moments, assert_same_run, losses, read_events


def against_one_process(method, kinds, folder, architecture="llama"):
    found = ranks.run(2, cases.accelerated, folder, method=method, kinds=kinds, architecture=architecture)
    for figures in found[0]:
        cases.check(figures, ParallelDims(dp_replicate=2))


@pytest.mark.slow
def test_ddp_through_accelerate_trains_as_one_process_does(tmp_path):
    against_one_process("ddp", ["full", "nf4"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_ddp_through_accelerate_trains_every_kind(architecture, tmp_path):
    kinds = {"llama": ["lora", "dora", "full recomputed", "nf4 recomputed", "bnb"], "mixtral": ["lora", "full"]}
    against_one_process("ddp", kinds[architecture], tmp_path, architecture)


@needs_deepspeed
@pytest.mark.slow
def test_zero2_trains_as_one_process_does(tmp_path):
    against_one_process("zero2", ["full", "lora", "dora", "nf4", "nf4 recomputed"], tmp_path)


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "lora", "dora", "nf4", "mlx", "nf4 recomputed"])
def test_zero3_trains_as_one_process_does(kind, tmp_path):
    against_one_process("zero3", [kind], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[*ACCELERATE, "--cpu", "--num_processes", "2"], PYTHON, TORCHRUN])
def test_each_launcher_and_world_size_run_ddp(base, alone, launcher, tmp_path):
    flags = "--batch_size 2 --parallel_backend accelerate" + (" --world_size 2" if launcher != TORCHRUN else "")
    code, out, err = finish([*launcher, ROOT / "train.py", *words(base, flags, output_dir=tmp_path / "out")])
    assert code == 0 and "by accelerate: DDP" in out and out.count("step    12/12") == 1, err
    assert_same_run(tmp_path / "out", alone)
    assert_same_moments(tmp_path / "out", alone)


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("train_type", ["lora", "full"])
def test_a_run_under_zero_resumes_in_one_process_and_back(base, tmp_path, stage, train_type):
    """2 ranks under ZeRO, then 1 process, then 2 ranks again: losses, weights and moments of one process."""
    base = {name: value for name, value in base.items() if train_type == "lora" or name != "lora_rank"}
    flags = f"--train_type {train_type} --lr 1e-3 --save_every 3 --batch_size 4"
    launch = [*ACCELERATE, "--config_file", CONFIGS / f"zero{stage}.yaml"]
    for epochs in (1, 2, 3):
        for name in ("one", "many"):
            resume = "--resume auto" if epochs > 1 else ""
            under_zero = name == "many" and epochs != 2
            rows = "--batch_size 2" if under_zero else ""
            more = words(base, flags, f"--num_epochs {epochs}", resume, rows, output_dir=tmp_path / name)
            argv = [*(launch if under_zero else PYTHON), ROOT / "train.py", *more]
            code, out, err = finish(argv, timeout_s=200, DS_ACCELERATOR="cpu")
            assert code == 0 and (name == "one" or epochs == 2 or f"ZeRO-{stage}" in out), err[-3000:]
    assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one"), rel=LOSS)
    assert len(read_events(tmp_path / "many", "step")) == 18
    assert_same_moments(tmp_path / "one", tmp_path / "many")
