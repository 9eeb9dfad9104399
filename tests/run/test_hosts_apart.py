"""Ranks that do not see each other's files, each in a folder of its own, as on hosts without a shared file system."""

import shutil
import subprocess

import pytest
from safetensors.numpy import load_file

from tests.run.test_best_of_continued import EASY, HARD, best_step
from tests.support import ranks
from tests.support.commands import command, free_port
from tests.support.rows import json_lines
from tests.support.runs import read_events


@pytest.fixture
def run(flags, tmp_path):
    """A run of two ranks, whose held-out rows are worse with each step; the folder of rank 0."""
    for name, rows in (("rows", EASY * 2), ("hard", HARD)):
        (tmp_path / f"{name}.jsonl").write_bytes(json_lines(*rows))
    hosts = [tmp_path / "host0", tmp_path / "host1"]
    for host in hosts:
        host.mkdir()
    flags |= dict(dataset=tmp_path / "rows.jsonl", validation_dataset=tmp_path / "hard.jsonl", output_dir="out")
    flags |= dict(batch_size=2, lr=0.02, eval_every=1, save_every=1, keep_last=9, eval_samples=0)
    flags |= dict(lr_scheduler="constant", warmup_steps=0)

    def of_both(**more):
        argv = command(flags | more, master_port=free_port())
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        places = [{"RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
        processes = [ranks.start(argv, place, cwd=hosts[int(place["RANK"])], **pipes) for place in places]
        try:
            said = [process.communicate(timeout=120)[0] for process in processes]
        finally:
            [ranks.kill_session(process) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], said
        return hosts[0] / "out"

    return of_both


def test_the_best_weights_are_those_of_rank_0_whose_folder_has_them(run, tmp_path):
    folder = run(max_steps=4, load_best="true")
    assert best_step(folder) < 4
    best, top = (load_file(folder / at / "adapter_model.safetensors") for at in ("best", "."))
    assert best.keys() == top.keys() and all((best[name] == top[name]).all() for name in best)
    assert not (tmp_path / "host1" / "out" / "best").exists()


def test_a_resumed_run_has_rank_0s_best_on_all_ranks(run, tmp_path):
    """Rank 1 has a copy of the checkpoints alone, and found none; it published where rank 0 did not."""
    folder = run(max_steps=4, load_best="false")
    assert best_step(folder) < 4
    there = tmp_path / "host1" / "out"
    shutil.copytree(folder / "checkpoints", there / "checkpoints")
    shutil.copy(folder / "run_plan.json", there)
    run(max_steps=9, load_best="false", early_stopping=3, resume="auto")
    evaluated = {event["step"]: event["loss"] for event in read_events(folder, "eval") if event["step"]}
    better = min(evaluated, key=lambda step: evaluated[step])
    assert best_step(folder) == better and max(evaluated) == better + 3
