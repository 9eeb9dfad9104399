"""Data sets, runs and plans of pretrain.py for tests: tiny, in a folder that looks like a checkout."""

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

from backend_manager import Backend, BackendManager
from finetune.errors import EXPECTED
from tests.support.commands import ROOT, Finished

PROGRAMS = ("pretrain.py", "generate.py", "dataset", "examples", "finetune", "recursive", "config")
PROGRAMS += ("backend_manager.py", "quantization_wrapper.py")
TINY = "arch.hidden_size=32 arch.num_heads=2 arch.L_layers=1 arch.expansion=2 log_every_n_steps=1".split()
QUESTIONS = [(f"What is {a} plus {b}?", f"It is {a + b}.") for a in range(4) for b in range(4)]


def checkout(folder: Path) -> Path:
    """A folder with links to this repository's programs, so that data/ and checkpoints/ are written there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PROGRAMS:
        (folder / name).symlink_to(ROOT / name)
    return folder


def run(folder: Path, *argv, timeout_s=240, stdin: str | None = None, **environment) -> Finished:
    """A python command in `folder`; what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, argv)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        input=stdin,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def call(folder: Path, program: str, *argv, stdin: str = "") -> Finished:
    """The same in this process, where torch is imported already: `program` is a module with a `main`."""
    printed, here, given = io.StringIO(), os.getcwd(), sys.stdin
    main = importlib.import_module(program).main
    try:
        os.chdir(folder)
        sys.stdin = io.StringIO(stdin)
        with contextlib.redirect_stdout(printed):
            return Finished(main(list(map(str, argv))), printed.getvalue(), "")
    except EXPECTED as error:
        return Finished(error.exit_code, printed.getvalue(), str(error))
    finally:
        sys.stdin = given
        os.chdir(here)


def write_questions(file: Path, pairs=QUESTIONS) -> Path:
    rows = [{"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]} for q, a in pairs]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(rows))
    return file


def build_chat(folder: Path, name: str = "data/tiny", *flags) -> Path:
    """A chat data set under `folder`, built in this process."""
    from dataset.build_chat_dataset import main

    source = write_questions(folder / "questions.json")
    argv = ["--input-file", source, "--output-dir", folder / name, "--tokenizer", "bpe:300", "--max-length", "48"]
    assert main([*map(str, argv), "--train-split", "0.8", *flags]) == 0
    return folder / name


def build_sudoku(folder: Path, count: int = 12) -> Path:
    from dataset.build_puzzle_dataset import main

    argv = ["--kind", "sudoku", "--size", "4", "--count", count, "--test-count", 4, "--output-dir", folder / "sudoku"]
    assert main(list(map(str, argv))) == 0
    return folder / "sudoku"


def manager_of(backend: str, **changes) -> BackendManager:
    """A BackendManager of another machine."""

    class Elsewhere(BackendManager):
        def _detect_available_backends(self):
            return [Backend(backend), Backend.CPU]

    manager = Elsewhere(verbose=False)
    assert str(manager.backend) == backend
    return manager
