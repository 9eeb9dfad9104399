"""The container file, the development container and the notebook: read by parsers, and the notebook executed."""

import ast
import json
import re
import shlex
from pathlib import Path

import pytest

from backend_manager import package_version
from tests.support.commands import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
NOTEBOOK = json.loads((ROOT / "examples/colab.ipynb").read_text())
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def instructions() -> list[tuple[str, str]]:
    """(instruction, its text) of the Dockerfile, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE, flags=re.M).replace("\\\n", " ")
    return [tuple(line.split(" ", 1)) for line in text.splitlines() if line.strip()]


def test_the_dockerfile_copies_what_there_is_and_does_not_run_as_root():
    names = [name for name, _ in instructions()]
    assert names[0] == "FROM" and ":" in instructions()[0][1] and "latest" not in instructions()[0][1]
    at = names.index("USER")
    assert at > max(i for i, name in enumerate(names) if name == "RUN") and instructions()[at][1] != "root"
    for name, text in instructions():
        if name == "COPY":
            assert all((ROOT / source).exists() for source in text.split()[:-1])
        if name == "RUN" and "apt-get install" in text:
            assert (
                "apt-get update" in text and "rm -rf /var/lib/apt/lists" in text and "--no-install-recommends" in text
            )
        if name == "RUN":
            assert text.count("pip install") == text.count("pip install --no-cache-dir")
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "outputs"} <= set(ignored)


def test_the_build_argument_chooses_the_wheel_of_torch_and_refuses_others(tmp_path):
    """The shell of that layer, with a pip that prints what it is asked."""
    import subprocess

    layer = next(text for name, text in instructions() if name == "RUN" and "case" in text)
    (tmp_path / "pip").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "pip").chmod(0o755)
    for device, index, code in (("cpu", "whl/cpu", 0), ("cuda", "pypi.org/simple", 0), ("tpu", "", 2)):
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "DEVICE": device}
        done = subprocess.run(["sh", "-c", layer], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == code and index in done.stdout, (device, done)
        if code == 0:
            first, second = done.stdout.splitlines()
            assert first.endswith("torch>=2.11,<2.15") and second.endswith("-r requirements.txt")
    assert "DEVICE tpu: is neither cpu nor cuda." in done.stderr


def test_a_parser_of_dockerfiles_reads_it(tmp_path):
    parser = pytest.importorskip("dockerfile_parse", reason="dockerfile-parse is not installed").DockerfileParser
    read = parser(path=str(tmp_path))
    read.content = DOCKERFILE
    known = "FROM ARG RUN WORKDIR COPY USER ENV VOLUME CMD COMMENT".split()
    assert {part["instruction"] for part in read.structure} <= set(known)
    assert read.baseimage == instructions()[0][1] and json.loads(read.cmd) == ["finetune", "--help"]


def test_the_development_container_sets_up_what_the_makefile_has():
    config = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    program, target = shlex.split(config["postCreateCommand"])
    assert program == "make" and re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)
    interpreter = config["customizations"]["vscode"]["settings"]["python.defaultInterpreterPath"]
    assert interpreter == "${containerWorkspaceFolder}/.venv/bin/python"


# ---- the notebook


def test_the_notebook_has_no_outputs_and_its_cells_are_python():
    for cell in NOTEBOOK["cells"]:
        assert not cell.get("outputs") and not cell.get("execution_count")
    for text in CODE:
        ast.parse(re.sub(r"^(\s*)%pip .*", r"\1pass", text, flags=re.M))
    assert sum("fine_tune(" in text for text in CODE) == 2


@pytest.mark.slow
@pytest.mark.skipif(package_version("nbclient") is None, reason="nbclient is not installed")
@pytest.mark.skipif(package_version("ipykernel") is None, reason="ipykernel is not installed")
def test_the_notebook_is_executed_on_a_tiny_model(tiny_model, tmp_path: Path):
    """As it is, but for the cell of settings: a tiny model and two steps on the CPU."""
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(ROOT / "examples/colab.ipynb", as_version=4)
    at = next(i for i, cell in enumerate(book.cells) if "parameters" in cell.metadata.get("tags", ()))
    small = dict(output_dir="dates", backend="cpu", train_type="lora", precision="fp32", max_steps=2, batch_size=2)
    book.cells[at].source = f"MODEL = {str(tiny_model)!r}\nSETTINGS = {small!r}"
    book.cells.insert(0, nbformat.v4.new_code_cell(f"import sys\nsys.path.insert(0, {str(ROOT)!r})"))
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(book, timeout=300, kernel_name="python3", resources=resources).execute()
    shown = [
        "".join(str(out.get("text") or out.get("data", {}).get("text/plain", "")) for out in cell.outputs)
        for cell in book.cells
        if cell.cell_type == "code"
    ]
    assert "check: no problems found" in shown[4] and "('finished'" in shown[5]
    assert "'rows': 40" in shown[7] and (tmp_path / "dates.zip").is_file()
