"""The tutorial of the site, to the letter: its blocks run in order in an empty folder, and end with an answer."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import generate
import score
from finetune.cli import parse_overrides
from finetune.model_files.demo_model import DEMO_MODEL
from tests.promises.test_data_guide import FILES
from tests.promises.test_docs_are_true import blocks, commands, files_of
from tests.support.commands import ROOT, TORCHRUN
from tests.test_package import bin_folder, built  # noqa: F401
from train import build_parser, fine_tune

PAGE = ROOT / "docs/tutorial.md"
BLOCKS = blocks(PAGE, "bash", "python", "text")
RECIPES = [words for _, text in blocks(ROOT / "docs/recipes.md", "bash") for words in commands(text)]


def test_the_tutorial_installs_what_the_test_installs_and_ends_with_an_answer_and_its_score():
    assert BLOCKS[0][0] == "bash install" and "pip install .\n" in BLOCKS[0][1]
    words = [line.split()[1] for info, text in BLOCKS[1:] if info == "bash" for line in text.splitlines()]
    assert words == ["rows.py", "train", "train", "generate", "score"]
    assert files_of(PAGE) == {"rows.py"}


@pytest.mark.slow
def test_the_tutorial_to_the_letter_ends_with_an_answer_of_the_user_s_own_model(bin_folder, tmp_path):  # noqa: F811
    """A wheel of a copy of the repository, on the model of the page; the fixture does what the install block says."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["PATH"] = f"{bin_folder}{os.pathsep}{environment['PATH']}"
    said = ""
    for info, text in BLOCKS[1:]:
        if info == "bash":
            done = subprocess.run(["bash", "-ec", text], cwd=tmp_path, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            said = done.stdout
        elif info == "text":
            for line in text.splitlines():
                assert similar(line) in similar(said), f"{line!r} is not in\n{said}"
        else:
            (tmp_path / info.split()[1]).write_text(text)
    right = float(re.search(r"exact match ([\d.]+)% of 40", said)[1])
    assert right >= 90, said


def similar(text: str) -> str:
    """Without the numbers of a measurement, which rounding changes on another processor."""
    return re.sub(r"exact match [\d.]+%|loss [\d.]+|perplexity [\d.]+", "", text)


# ---- recipes


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """A folder with the files that the recipes name."""
    (tmp_path / "data/manuals").mkdir(parents=True)
    for name in ("data/tools.jsonl", "data/pairs.jsonl", "data/labels.jsonl"):
        (tmp_path / name).write_text(FILES[name] * 8)
    (tmp_path / "data/manuals/lamp.md").write_text("A lamp of forty centimetres.\nIt is switched on at its foot.\n")
    for name in ("faq", "faq_test"):
        (tmp_path / f"data/{name}.csv").write_text(
            "Frage,Antwort\n" + "".join(f"Was ist {i}?,{i}\n" for i in range(20))
        )
    (tmp_path / "run.yaml").write_text(blocks(ROOT / "docs/recipes.md", "yaml")[0][1])
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def with_tools(folder: Path) -> str:
    """A tiny model with a chat template that renders tools."""
    from tests.support import tiny
    from tests.support.templates import QWEN25

    tokenizer = tiny.train_tokenizer(folder, bos=False, chat_template=QWEN25)
    tiny.build("llama", vocab_size=len(tokenizer), eos_token_id=2, max_position_embeddings=4096).save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
def test_every_recipe_is_planned_on_rows_of_its_kind(shop, capsys):
    """Dry runs in this process, on a tiny model; what continues another recipe's adapter starts without it."""
    model, planned = with_tools(shop / "tiny"), 0
    for words in RECIPES:
        if "train.py" not in words:
            continue
        given = parse_overrides(words[words.index("train.py") + 1 :], build_parser())
        if "axolotl" in str(given.get("config")):
            continue
        given.pop("adapter", None)
        state = fine_tune(**given | {"model_name": model, "backend": "cpu", "dry_run": True})
        assert (state.status, state.exit_code) == ("planned", 0), words
        planned += 1
    shown = capsys.readouterr().out
    assert planned >= 12 and "⟦<tool_call>" in shown and "rejected: Hi: " in shown and "⟦It is switched" not in shown


@pytest.mark.slow
def test_every_recipe_runs_in_order(shop, capsys, monkeypatch):
    """Two steps on a tiny model, in the folder that the ones before have left; in this process, but for ranks."""
    model, small = with_tools(shop / "tiny"), "--max_steps 2 --backend cpu --precision fp32".split()
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n\n"))
    ran = []
    for words in RECIPES:
        if words[0] not in ("python", "torchrun") or "ollama" in words or "examples/axolotl.yaml" in words:
            continue
        at = next(i for i, word in enumerate(words) if word.endswith(".py"))
        rest = words[at + 1 :]
        if words[at] == "train.py":
            rest += small + ([] if "--adapter" in rest else ["--model_name", model])
        if words[0] == "torchrun":
            subprocess.run([*TORCHRUN, str(ROOT / "train.py"), *rest], cwd=shop, check=True)
        elif words[at] == "train.py":
            assert fine_tune(**parse_overrides(rest, build_parser())).exit_code == 0, words
        else:
            main = {"score.py": score.main, "generate.py": generate.main}[words[at]]
            assert not main([*rest, "--device", "cpu"]), words
        ran.append(words[at])
    assert set(ran) == {"train.py", "score.py", "generate.py"} and len(ran) >= 15
    assert (shop / "outputs/better/adapter_model.safetensors").is_file()


def test_the_tutorial_s_model_is_the_one_that_it_names():
    assert DEMO_MODEL.split("/")[1] in PAGE.read_text()
