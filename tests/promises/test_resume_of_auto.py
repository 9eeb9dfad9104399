"""The same command with --resume auto goes on bitwise, whatever of it was left to the plan."""

import subprocess
import time

import pytest

from finetune.checkpoint.store import newest_checkpoint, steps_of
from finetune.config import FIELDS, is_left_open
from tests.support.commands import command
from tests.support.rows import json_lines
from tests.support.runs import copy_up_to, same_files, steps
from train import fine_tune

EVERY_AUTO = {name: "auto" for name in FIELDS if is_left_open(name, "auto")} | {"backend": "cpu"}
SAVED = {"save_every": 1, "keep_last": 99, "backend": "cpu", "log_to": "stdout", "eval_samples": 0}
SHORT = {"max_steps": 3}
VALIDATED = {"validation_split": 0.25, "eval_every": "auto"}
# What is asked for beside model, rows and output; the rest is the plan's.
COMMANDS = {
    "nothing": {"gradient_accumulation_steps": 2, **SHORT},
    "length": {"batch_size": "auto", "num_epochs": "auto", "gradient_accumulation_steps": 4, "dataset_samples": 5},
    "lora": {**EVERY_AUTO, **SHORT},
    "full": {**EVERY_AUTO, **SHORT, "train_type": "full", "gradient_accumulation_steps": 2},
    "qlora": {**EVERY_AUTO, **SHORT, "train_type": "qlora"},
    "search": {**EVERY_AUTO, **SHORT, **VALIDATED, "lr": "search", "lora_rank": 4},
    "streaming": {**EVERY_AUTO, **SHORT, "streaming": True},
    "preference": {**EVERY_AUTO, **SHORT, **VALIDATED, "preference": "dpo"},
}
WEIGHTS = {"full": "model.safetensors"}


@pytest.fixture(scope="module")
def asked(tiny_model, rows_file, tmp_path_factory):
    """{name: flags of a command, without its output folder}."""
    pairs = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    pairs.write_bytes(json_lines(*({"prompt": f"{i}?", "chosen": "yes", "rejected": "no"} for i in range(12))))
    files = {name: pairs if "preference" in flags else rows_file for name, flags in COMMANDS.items()}
    return {
        name: {"model_name": str(tiny_model), "dataset": str(files[name]), **SAVED, **flags}
        for name, flags in COMMANDS.items()
    }


def same_run(name, folder, whole):
    """One run's losses and last checkpoint are bitwise the other's."""
    assert steps(folder) == steps(whole)
    one, other = (newest_checkpoint(f)[0].folder for f in (folder, whole))
    assert one.name == other.name
    weights = WEIGHTS.get(name, "adapter_model.safetensors")
    same_files(one, other, [weights, "optimizer.safetensors", "rng.safetensors"])


QUICK = ("lora",)
EACH = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in COMMANDS]


@pytest.mark.parametrize("name", EACH)
def test_the_same_command_goes_on_from_its_first_and_its_last_step(asked, tmp_path, name):
    whole = tmp_path / "whole"
    fine_tune(**asked[name], output_dir=str(whole))
    done = [int(folder.name.removeprefix("step-")) for folder in steps_of(whole)]
    assert len(done) > 1
    for step in {1, max(done) - 1}:
        folder = copy_up_to(whole, step, tmp_path / f"step-{step}")
        fine_tune(**asked[name], output_dir=str(folder), resume="auto")
        same_run(name, folder, whole)


def killed_after(argv, folder, step) -> int | None:
    """Exit code of the command, None if it was killed once the checkpoint of `step` was complete."""
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while process.poll() is None:
        if any(int(f.name.removeprefix("step-")) >= step for f in steps_of(folder)):
            process.kill()
            break
        time.sleep(0.002)
    output = process.communicate()[0]
    assert process.returncode in (0, -9), output
    return process.returncode if process.returncode == 0 else None


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_the_same_command_killed_after_each_step_gives_the_same_run(asked, tmp_path, name):
    whole, folder = tmp_path / "whole", tmp_path / "out"
    assert killed_after(command(asked[name], "--resume auto", output_dir=whole), whole, 10**9) == 0
    kills = 0
    for step in range(1, 100):
        if killed_after(command(asked[name], "--resume auto", output_dir=folder), folder, step) == 0:
            break
        kills += 1
    assert kills > 1
    same_run(name, folder, whole)
