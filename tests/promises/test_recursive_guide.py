"""Every command of the guide to tiny recursive models runs as written, on CPU: tests/support/recursive_guide.md."""

import json
import re
import shlex
import subprocess
import sys

import pytest

from examples import make_questions
from recursive.recipe import of_flat, read_arguments, read_recipe
from tests.support import pretraining
from tests.support.commands import ROOT
from tests.support.runs import read_events

GUIDE = ROOT / "tests/support/recursive_guide.md"
# Commands of other programs: the guide shows how to watch memory, move data, update torch.
FOREIGN = ("activity", "top", "pip", "mv", "cd", "for", "echo", "done", "while", "import", "if", "print", "sleep", '"')


def commands() -> list[list[str]]:
    """The guide's python commands as words. A comment behind a backslash is what it is to a reader: a comment."""
    text = "\n".join(re.findall(r"^```bash\n(.*?)^```$", GUIDE.read_text(), re.M | re.S))
    text = re.sub(r"\\[ \t]*(#[^\n]*)?\n\s*", " ", text)
    found = []
    for line in text.splitlines():
        line = line.strip().removesuffix("|| break").strip()
        words = shlex.split(line, comments=True) if line.count('"') % 2 == 0 else []
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words.pop(0)
        if words and words[0] in ("python", "torchrun", "cd"):
            found.append(words)
        else:
            assert not words or words[0].startswith(FOREIGN), line
    return found


PRETRAIN = [w for w in commands() if w[:2] == ["python", "pretrain.py"]]
ARGUMENTS = sorted({tuple(a.replace("$bs", "4") for a in w[2:] if a != "...") for w in PRETRAIN})
GENERATE = sorted({tuple(w[2:]) for w in commands() if w[:2] == ["python", "generate.py"]})
BUILD = sorted({tuple(w[3:]) for w in commands() if w[:3] == ["python", "-m", "dataset.build_chat_dataset"]})


def test_every_command_of_the_guide_is_one_of_these():
    assert len(ARGUMENTS) == 14 and len(GENERATE) == 4 and len(BUILD) == 2
    others = [w for w in commands() if w[0] == "python" and w[1] not in ("pretrain.py", "generate.py", "-m")]
    assert [w[1] for w in others] == ["-c"]
    assert [w for w in commands() if w[0] == "cd"] == [["cd", "examples", "&&", "./prepare_example_chat_dataset.sh"]]
    assert [w[:3] for w in commands() if w[0] == "torchrun"] == [["torchrun", "--nproc-per-node", "2"]]


@pytest.mark.promise("TR_02")
@pytest.mark.parametrize("argv", ARGUMENTS, ids=" ".join)
def test_every_training_command_reads_as_a_recipe(argv):
    name, overrides = read_arguments(list(argv))
    settings = of_flat(read_recipe(name) | overrides)
    assert name == "cfg_chat" and settings.epochs and settings.arch.L_layers in (2, 4)


@pytest.fixture(scope="module")
def guide(tmp_path_factory):
    """A checkout with the data sets of the guide, tiny, made by the guide's own builder command."""
    folder = pretraining.checkout(tmp_path_factory.mktemp("guide"))
    pretraining.write_questions(folder / "data/conversations.json")
    (full,) = [b for b in BUILD if "--input-file" in b]
    done = pretraining.call(folder, "dataset.build_chat_dataset", *full)
    assert done.returncode == 0, done.stderr
    # The hub is not reachable in tests: the reason is printed.
    assert "--tokenizer gpt2 is not reachable" in done.stdout and "0 truncated" in done.stdout
    names = {a for argv in ARGUMENTS for a in argv if a.startswith("data_paths=")}
    for name in sorted({"data/alpaca-512"} | {n.split("[")[1].rstrip("]") for n in names}):
        if not (folder / name).exists():
            (folder / name).symlink_to(folder / "data/chat-mps")
    return folder


def train(folder, argv) -> object:
    """One command of the guide, for two steps."""
    done = pretraining.call(folder, "pretrain", *argv, "max_steps=2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "Using device: cpu"
    step = sorted(folder.glob("checkpoints/*/*/step_2"))[-1]
    assert [e["event"] for e in read_events(step.parent)].count("step") == 2
    return step


@pytest.mark.promise("TR_09")
def test_the_guides_example_trains_and_answers(guide):
    """The builder, one training command and every generation command of the guide."""
    step = train(guide, next(a for a in ARGUMENTS if "arch.hidden_size=384" in a))
    for argv in GENERATE:
        words = [str(step) if a.startswith("checkpoints/...") else "cpu" if a == "mps" else a for a in argv]
        if "--prompt" not in words and "--interactive" not in words:
            words += ["--prompt", "Hello!"]
        done = pretraining.call(guide, "generate", *words, "--max-new-tokens", "3", stdin="Hello\n\n")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("Using device: cpu\n")


@pytest.mark.slow
@pytest.mark.parametrize("argv", ARGUMENTS, ids=" ".join)
def test_every_training_command_of_the_guide_trains(guide, argv):
    train(guide, argv)


def test_the_example_questions_are_those_of_their_script():
    turns = make_questions.conversations()
    rows = json.loads((ROOT / "examples/questions.json").read_text())
    assert [[turn["value"] for turn in row["conversations"]] for row in rows] == turns
    texts = [" ".join(row) for row in turns]
    assert len(set(texts)) == len(texts) and not set(texts[-20:]) & set(texts[:-20])


@pytest.mark.promise("TR_11")
def test_the_guides_example_script_works_offline(tmp_path):
    folder = pretraining.checkout(tmp_path / "here")
    done = subprocess.run(
        ["bash", "-c", "cd examples && ./prepare_example_chat_dataset.sh"],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "train: 334 conversations" in done.stdout and "0 truncated" in done.stdout
    assert "note:" not in done.stdout  # no Hub is asked
    assert (folder / "data/example-chat-dataset/tokenizer/tokenizer.json").is_file()
