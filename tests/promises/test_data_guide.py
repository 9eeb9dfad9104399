"""Every example of docs/data.md is run: its files are written, its commands run, and the lines shown are printed."""

import re
import shutil

import pytest

from finetune.cli import parse_overrides
from tests.support import tiny
from tests.support.commands import ROOT
from tests.support.templates import QWEN25
from tests.support.tiny import train_tokenizer
from train import build_parser, fine_tune

PAGE = (ROOT / "docs/data.md").read_text()
BLOCKS = re.findall(r"^```(\S+) ?([^\n]*)\n(.*?)^```$", PAGE, re.M | re.S)
FILES = {name: text for _, name, text in BLOCKS if name}
QWEN = "Qwen/Qwen2.5-0.5B-Instruct"


def examples():
    """(commands, the lines shown below them) of each block of commands."""
    found = []
    for (language, _, text), (after, _, shown) in zip(BLOCKS, [*BLOCKS[1:], ("", "", "")], strict=True):
        if language == "bash":
            commands = [line.split()[2:] for line in text.splitlines()]
            found.append((commands, shown.splitlines() if after == "text" else []))
    return found


@pytest.fixture(scope="module")
def models(chat_model, tmp_path_factory):
    """{name on the page: a tiny model with such a chat template}."""
    folder = tmp_path_factory.mktemp("qwen") / "tiny"
    tokenizer = train_tokenizer(folder, bos=False, chat_template=QWEN25)
    tiny.build("llama", vocab_size=len(tokenizer), eos_token_id=2).save_pretrained(folder)
    return {None: str(chat_model), QWEN: str(folder)}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    shutil.rmtree(tmp_path / "data")


@pytest.mark.parametrize(("commands", "shown"), examples(), ids=[" ".join(e[0][0][:4]) for e in examples()])
def test_an_example_of_the_guide_does_what_the_guide_shows(commands, shown, models, folder, capsys):
    for argv in commands:
        overrides = parse_overrides(argv, build_parser())
        model = models[overrides.pop("model_name", None)]
        tiny_run = dict(model_name=model, backend="cpu", train_type="lora", lora_rank=2, precision="fp32")
        state = fine_tune(**tiny_run | overrides, output_dir=str(folder / "out"), log_to="stdout")
        assert state.exit_code == 0
    out = capsys.readouterr().out
    for line in shown:
        assert line in out, f"{line!r} is not in\n{out}"


def test_the_guide_has_an_example_for_every_format():
    shown = "\n".join(line for _, lines in examples() for line in lines)
    for fmt in ("chat", "qna", "prompt_completion", "tokens", "text"):
        assert f"{fmt}: " in shown
    assert len(examples()) >= 12 and all(lines for _, lines in examples())
