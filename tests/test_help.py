"""--help: one screen of everyday flags, every flag on request, and a paragraph for each of them."""

import importlib.util
import re
import subprocess
import sys

import pytest

from finetune.commands import COMMANDS
from finetune.config import FIELDS, GROUPS, NAMES
from finetune.help import ADVICE, EVERYDAY, EXAMPLES, PAGES, WIDTH, elsewhere, paragraph, screen
from finetune.names.tables import PROGRAMS
from finetune.names.translate import known
from tests.support.commands import ROOT, command, finish
from train import build_parser

EVERYDAY_FLAGS = [name for flags in EVERYDAY.values() for name in flags]


def test_help_is_one_screen_of_everyday_flags_with_three_examples():
    lines = finish(command("--help")).stdout.rstrip().splitlines()
    assert lines == screen("train.py").splitlines() and len(lines) <= 56 and max(map(len, lines)) <= WIDTH
    assert 30 <= len(EVERYDAY_FLAGS) <= 40 and set(EVERYDAY_FLAGS) <= FIELDS.keys() and len(EXAMPLES) == 3
    for example in EXAMPLES:
        assert f"  python train.py {example}" in lines and build_parser().parse_args(example.split())
    assert all(any(line.startswith(f"  --{name} ") for line in lines) for name in EVERYDAY_FLAGS)


def test_help_all_has_every_flag_with_its_default():
    text = finish(command("--help all")).stdout
    for name, field in FIELDS.items():
        assert f"--{name}" in text
        if field.default not in (None, False, True):
            value = field.metadata["unset"] or field.default
            shown = f"(default: {value})" in text.replace("\n", " ").replace("  ", " ")
            assert shown or str(value) in text


def test_each_flag_has_a_paragraph_and_a_page():
    flags = (ROOT / "docs/flags.md").read_text()
    for name in FIELDS:
        text = paragraph(name)
        page = re.search(r"Read on: (\S+)$", text)[1]
        assert text.startswith(f"--{name}") and (ROOT / page).is_file() and f"`--{name}`" in flags
        assert all(len(line) <= WIDTH or " " not in line for line in text.splitlines()), name
        assert set(re.findall(r"--(\w+)", text)) <= set(NAMES), name
    assert ADVICE.keys() <= FIELDS.keys() and set(PAGES) <= FIELDS.keys() | GROUPS.keys()


def test_a_paragraph_that_begins_with_a_word_of_the_flag_keeps_it():
    assert "\nadamw_8bit" in paragraph("optimizer") and "\nfull: " in paragraph("train_type")
    assert "\nPeak learning rate" in paragraph("lr")


ASKED = ("--help lora_rank", "--help --lora-rank", "--help=lora_rank", "-h lora_rank", "--lr 1 --help lora_r")


@pytest.mark.parametrize("words", ASKED)
def test_help_of_a_flag_is_asked_in_several_ways(words):
    done = finish(command(words))
    assert done.returncode == 0 and done.stdout.rstrip() == paragraph("lora_rank")
    assert "r (PEFT)" in done.stdout and "At least 1" not in done.stdout and "(at least 1)" in done.stdout


def test_help_of_other_names():
    assert "Here it is --num_epochs:" in finish(command("--help num_train_epochs")).stdout
    assert "Nearest: --lora_rank" in finish(command("--help lora_rnk")).stdout
    for program, names in PROGRAMS.items():
        for name in names:
            assert program in PROGRAMS and elsewhere(name, known(name)).startswith(f"--{name} is a name of "), name


def test_a_closed_pipe_is_no_traceback():
    argv = [sys.executable, "train.py", "--help"]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()


# ---- the installed command


def finetune(*argv: str) -> subprocess.CompletedProcess:
    """`python -m finetune`, which is what the console script runs."""
    return subprocess.run([sys.executable, "-m", "finetune", *argv], cwd=ROOT, capture_output=True, text=True)


def test_the_command_lists_its_words_and_runs_them():
    listed = finetune().stdout
    assert all(f"finetune {word} " in listed for word in COMMANDS)
    assert finetune("--version").stdout.startswith("finetune ")
    shown = finetune("train", "--help").stdout
    assert f"  finetune train {EXAMPLES[0]}" in shown and "python train.py" not in shown
    wrong = finetune("trian")
    assert wrong.returncode == 2 and "finetune trian: no such command. Nearest: train." in wrong.stderr
    assert finetune("train", "--lora_rnk", "3").returncode == 2


def test_a_completion_script_completes_flags_and_values(tmp_path):
    if importlib.util.find_spec("shtab") is None:
        assert "shtab is not installed. pip install shtab" in finetune("completion", "bash").stderr
        pytest.skip("shtab is not installed")
    done = finetune("completion", "bash")
    assert done.returncode == 0, done.stderr
    (tmp_path / "completion.bash").write_text(done.stdout)

    def completed(*words: str) -> set[str]:
        typed = " ".join(f"'{w}'" for w in ("finetune", *words))
        function = re.search(r"complete .*-F (\S+) finetune", done.stdout)[1]
        lines = [f"source {tmp_path}/completion.bash", f"COMP_WORDS=({typed})", f"COMP_CWORD={len(words)}", function]
        asked = "; ".join([*lines, 'printf "%s\\n" "${COMPREPLY[@]}"'])
        return set(subprocess.run(["bash", "-c", asked], capture_output=True, text=True).stdout.split())

    assert {"train", "generate", "score", "export", "pretrain", "doctor"} <= completed("")
    assert {"--lora_rank", "--lora_alpha"} <= completed("train", "--lora")
    assert completed("train", "--train_type", "ql") == {"qlora"}
    assert "--checkpoint" in completed("generate", "--che")
