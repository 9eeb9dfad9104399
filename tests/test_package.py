"""The wheel and the sdist: built, installed into an empty environment, and used from another directory."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from finetune import __version__
from finetune.commands import COMMANDS
from finetune.shipped import shipped
from tests.promises.test_docs_are_true import blocks, commands
from tests.support.commands import ROOT

BUILD = "import sys; to = sys.argv[1]; from setuptools import build_meta as b; b.build_wheel(to); b.build_sdist(to)"
README = [words for _, text in blocks(ROOT / "README.md", "bash") for words in commands(text)]


def run(argv: list, **options) -> subprocess.CompletedProcess:
    done = subprocess.run([str(part) for part in argv], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{argv}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


def test_rows_and_recipes_are_found_in_the_repository():
    assert (shipped("examples") / "orders_train.jsonl").is_file() and (
        shipped("config", "recipes") / "cfg_chat.yaml"
    ).is_file()
    assert all((ROOT / f"{command.module.replace('.', '/')}.py").is_file() for command in COMMANDS.values())


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the wheel and the sdist, built from a copy of what git tracks."""
    folder = tmp_path_factory.mktemp("built")
    listed = run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT).stdout.splitlines()
    for name in listed:
        if (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "source" / name)
    run([sys.executable, "-c", BUILD, folder], cwd=folder / "source")
    return folder


@pytest.fixture(scope="module")
def bin_folder(built) -> Path:
    """The bin of an environment that has the wheel, and this environment's packages below it, but no repository."""
    environment = built / "environment"
    run([sys.executable, "-m", "venv", "--without-pip", environment])
    site = next((environment / "lib").glob("python*/site-packages"))
    wheel = next(built.glob("*.whl"))
    run([sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install", "--no-deps", wheel])
    (site / "below.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return environment / "bin"


@pytest.mark.slow
def test_the_wheel_has_every_module_and_what_it_reads(built):
    wheel = next(built.glob(f"finetune-{__version__}-py3-none-any.whl"))
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = [
        *ROOT.glob("*.py"),
        *(p for name in ("finetune", "recursive", "dataset") for p in (ROOT / name).rglob("*.py")),
    ]
    read = [file for kind in ("yaml", "jinja", "css") for file in (ROOT / "finetune").rglob(f"*.{kind}")]
    assert {str(m.relative_to(ROOT)) for m in (*modules, *read) if m.name != "setup.py"} <= names
    assert {"finetune/py.typed", "finetune/examples/orders_train.jsonl", "finetune/recipes/arch/trm_chat.yaml"} <= names
    assert not any(name.startswith(("tests/", "docs/", "benchmarks/", "examples/", "config/")) for name in names)
    text = zipfile.ZipFile(wheel).read(f"finetune-{__version__}.dist-info/METADATA").decode()
    required = {
        re.match(r"[\w-]+", line)[0] for line in (ROOT / "requirements.txt").read_text().splitlines() if line[0] != "#"
    }
    assert required <= set(re.findall(r"^Requires-Dist: ([\w-]+)", text, re.M))
    assert {"cuda", "mac", "deepspeed", "eval", "trackers", "gguf"} <= set(
        re.findall(r"^Provides-Extra: (\S+)", text, re.M)
    )


@pytest.mark.slow
def test_the_sdist_builds_the_same_wheel(built, tmp_path):
    shutil.unpack_archive(next(built.glob("*.tar.gz")), tmp_path)
    run([sys.executable, "-c", BUILD, tmp_path], cwd=tmp_path / f"finetune-{__version__}")
    of_sdist, of_source = (set(zipfile.ZipFile(next(f.glob("*.whl"))).namelist()) for f in (tmp_path, built))
    assert of_sdist == of_source


@pytest.mark.slow
def test_the_commands_of_the_readme_work_through_the_installed_command_from_another_directory(
    bin_folder, tiny_model, tmp_path
):
    """On a tiny model and a few steps: of a flag given twice the last one counts."""
    (tmp_path / "examples").mkdir()
    for name in ("chat.jsonl", "completion.jsonl"):
        shutil.copy(ROOT / "examples" / name, tmp_path / "examples" / name)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    small = ["--max_steps", "2", "--backend", "cpu"]
    outputs = []
    for words in README:
        if words[0] != "python":
            continue
        word, rest = words[1].removesuffix(".py"), list(words[2:])
        if word == "train":
            rest += small + ([] if "--adapter" in rest else ["--model_name", str(tiny_model)])
            rest += ["--output_dir", "outputs/sharded"] if "--world_size" in rest else []
        outputs.append(run([bin_folder / "finetune", word, *rest], cwd=tmp_path, env=environment).stdout)
    assert len(outputs) >= 7 and (tmp_path / "outputs/shop/adapter_model.safetensors").is_file()
    assert (
        "try it: finetune generate --checkpoint outputs/shop" in outputs[0] and "python generate.py" not in outputs[0]
    )
    tried = shlex.split(re.search(r"try it: (.*)", outputs[0])[1])
    run([bin_folder / tried[0], *tried[1:]], cwd=tmp_path, env=environment)


@pytest.mark.slow
def test_the_demo_s_rows_the_recipes_and_the_doctor_work_where_it_is_installed(bin_folder, tiny_model, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    finetune = bin_folder / "finetune"

    def said(*argv) -> str:
        return run([finetune, *argv], cwd=tmp_path, env=environment).stdout

    planned = said("train", "--model_name", tiny_model, "--dry_run", "--backend", "cpu")
    assert "finetune/examples/orders_train.jsonl" in planned and str(ROOT) not in planned
    assert "cfg_chat_recursive" in said("pretrain", "--help")
    assert "cpu" in said("doctor") and said("--version") == f"finetune {__version__}\n"
    code = "import train, finetune; print(train.__file__); print(train.fine_tune.__name__)"
    found = run([bin_folder / "python", "-c", code], cwd=tmp_path, env=environment).stdout
    assert str(bin_folder.parent) in found and found.endswith("fine_tune\n")
