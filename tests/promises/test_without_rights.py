"""A user who is not root: a run needs no home and no right outside its folder; what may not be opened is one line."""

import gzip
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.support import nobody
from tests.support.commands import command, finish


@pytest.fixture(scope="module")
def place(tiny_model, rows_file):
    """A folder that anyone may read, with a model, rows, and "own", which nobody owns."""
    with tempfile.TemporaryDirectory() as name:  # tmp_path is closed to other users
        folder = Path(name)
        folder.chmod(0o755)
        for file in shutil.copytree(tiny_model, folder / "model").iterdir():
            file.chmod(0o644)
        shutil.copy(rows_file, folder / "rows.jsonl")
        (folder / "own").mkdir()
        if os.geteuid() == 0:
            os.chown(folder / "own", nobody.NOBODY, nobody.NOBODY)
        yield folder


@pytest.fixture(scope="module")
def ask(place):
    """What a command of a user without rights prints, and its exit code."""
    words = nobody.prefix()

    def asked(*parts, script="train.py", **values):
        changed = {"HOME": "/nonexistent", "XDG_CACHE_HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
        return finish([*words, *command(*parts, script=script, **values)], **changed)

    return asked


@pytest.fixture(scope="module")
def flags(place):
    model, rows = place / "model", place / "rows.jsonl"
    return dict(
        model_name=model, dataset=rows, backend="cpu", train_type="lora", lora_rank=4, batch_size=4, max_steps=2
    )


@pytest.fixture(scope="module")
def run(place, ask, flags):
    """A run of that user, without a home to keep anything in."""
    code, out, err = ask(flags, output_dir=place / "own/run")
    assert code == 0 and "saved:" in out, err
    return place / "own/run"


def is_refused(finished, *texts):
    """One line on stderr, code 2."""
    code, _, err = finished
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    for text in texts:
        assert text in err


@pytest.mark.skipif(os.geteuid() != 0, reason="the user of the tests owns these folders")
def test_a_folder_that_may_not_be_written_is_refused_before_anything_is_loaded(place, ask, flags):
    is_refused(ask(flags, output_dir=place / "new"), f"--output_dir {place}/new: no permission to write to {place}.")
    assert not (place / "new").exists()


def test_rows_that_may_not_be_read_are_refused(place, ask, flags):
    file = nobody.closed(Path(shutil.copy(place / "rows.jsonl", place / "closed.jsonl")))
    is_refused(ask(flags, dataset=file, output_dir=place / "own/new"), f"--dataset {file}: permission denied")


def test_a_folder_of_rows_with_a_closed_part_is_not_read_without_it(place, ask, flags):
    """pathlib takes a folder that may not be listed for an empty one."""
    folder = place / "parts"
    for part in ("train", "data", "other"):
        (folder / part).mkdir(parents=True)
        shutil.copy(place / "rows.jsonl", folder / part / f"{part}.jsonl")
    nobody.closed(folder / "other")
    code, out, _ = ask("--dry_run", flags, dataset=folder, output_dir=place / "own/parts")
    assert code == 0 and "permission denied, not read: other/" in out
    nobody.closed(folder / "data")
    is_refused(ask("--dry_run", flags, dataset=folder), f"{folder / 'data'}: permission denied")


def test_checkpoints_that_may_not_be_listed_are_not_taken_for_none(place, run, ask, flags):
    """The run went on and was stopped: its weights are of before, and its steps are where they were."""
    folder = Path(shutil.copytree(run, place / "went-on"))
    for name in ("train_state.json", "manifest.json"):
        (folder / name).unlink()
    if os.geteuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, nobody.NOBODY, nobody.NOBODY)
    (folder / "checkpoints").chmod(0o300)
    said = f"{folder / 'checkpoints'}: permission denied"
    is_refused(ask(script="score.py", checkpoint=folder, dataset=place / "rows.jsonl"), said)
    is_refused(ask(flags, resume="auto", output_dir=folder), said)
    (folder / "checkpoints").chmod(0o700)


@pytest.mark.slow
def test_a_tokenizer_that_may_not_be_read_is_not_called_broken(place, ask, flags):
    folder = Path(shutil.copytree(place / "model", place / "closed-tokenizer"))
    file = nobody.closed(folder / "tokenizer.json")
    refused = ask(flags, model_name=folder, output_dir=place / "own/new")
    is_refused(refused, f"{file}: permission denied. Change its permissions.")


def test_a_run_s_log_that_may_not_be_read_is_not_called_changed(place, ask, run):
    folder = Path(shutil.copytree(run, place / "closed-log"))
    file = nobody.closed(folder / "metrics.jsonl")
    code, _, err = ask(str(folder), script="report.py")
    assert (code, err) == (2, f"error: {file}: permission denied. Change its permissions.\n")


def test_a_cache_that_is_another_user_s_is_named_with_what_to_set(place, ask, flags):
    file = place / "rows.jsonl.gz"
    file.write_bytes(gzip.compress((place / "rows.jsonl").read_bytes()))
    refused = ask(flags, dataset=file, output_dir=place / "own/new")  # its home cannot be made
    is_refused(refused, f"{file}: cannot be unpacked into /nonexistent/", "Set XDG_CACHE_HOME.")


@pytest.mark.slow
@pytest.mark.parametrize("script", ["generate.py", "score.py"])
def test_weights_that_may_not_be_read_are_not_called_damaged(place, ask, run, script):
    folder = Path(shutil.copytree(run, place / f"of-others-{script}"))
    file = nobody.closed(folder / "adapter_model.safetensors")
    more = {"generate.py": {"prompt": "Hi"}, "score.py": {"dataset": place / "rows.jsonl"}}[script]
    is_refused(ask(more, checkpoint=folder, script=script), f"{file}: permission denied. Change its permissions.")


@pytest.mark.parametrize(
    ("script", "flag"),
    [
        ("generate.py", "checkpoint"),
        *[pytest.param("train.py", flag, marks=pytest.mark.slow) for flag in ("resume", "adapter", "model_name")],
        pytest.param("export.py", "checkpoint", marks=pytest.mark.slow),
    ],
)
def test_a_folder_that_may_not_be_entered_is_one_line(place, ask, flags, script, flag):
    folder = nobody.closed(Path(shutil.copytree(place / "model", place / f"closed-{script}-{flag}")))
    more = {"train.py": {} if flag == "resume" else flags | {"output_dir": place / "own/new"}}.get(script, {})
    more |= {"output_dir": place / "own/exported"} if script == "export.py" else {}
    more |= {"prompt": "Hi"} if script == "generate.py" else {}
    is_refused(ask(more, script=script, **{flag: folder}), "permission denied" if flag != "model_name" else "")
