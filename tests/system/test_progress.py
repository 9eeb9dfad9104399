"""What a run shows while it works: on terminals of any width, in a pipe, and where nothing is known but the time."""

import re
import sys
import time

import pytest

from finetune.system import progress
from finetune.system.progress import Progress, each
from tests.support.commands import command
from tests.support.terminals import drawn

RUN = "--batch_size 2 --context_length 64 --backend cpu --train_type lora --precision fp32 --max_steps 4 --eval_every 2"


@pytest.mark.parametrize(
    "columns", [40, pytest.param(80, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.slow)]
)
def test_a_terminal_of_any_width_shows_time_left_step_and_speed(tiny_model, rows_file, tmp_path, columns):
    files = dict(model_name=tiny_model, dataset=rows_file, validation_dataset=rows_file, output_dir=tmp_path / "out")
    code, lines = drawn(command(RUN, files), columns)
    live = [line for line in lines if re.match(r"\d+:\d\d left ", line)]
    assert code == 0 and len(live) >= 4
    for line in live:
        assert re.match(r"\d+:\d\d left [1-4]/4 [\d,]+ tok/s", line) and len(line) <= columns, line
    assert ("GiB |" in live[0]) == (columns == 200)
    said = [line for line in lines if line not in live and "python " not in line]
    assert all(len(line.rstrip()) <= columns or " " not in line.strip() for line in said)
    last_eval = next(i for i, line in enumerate(lines) if line.startswith("eval  step 2"))
    assert any(line in live for line in lines[last_eval + 1 :]), "the live line is drawn again below the evaluation"


BELOW_ANOTHER = """
from finetune.system.progress import Progress
from finetune.system.terminal import say
with Progress("outer") as outer:
    outer.drawn()
    with Progress("inner", describe=lambda: "inner" * 40, pinned=True):
        outer._hide()
    say("step 4/4")
"""


def test_a_line_after_a_bar_below_another_begins_in_the_first_column():
    code, lines = drawn([sys.executable, "-c", BELOW_ANOTHER], 60)
    assert code == 0 and any(line.startswith("step 4/4") for line in lines), lines


def test_a_pipe_gets_a_line_per_interval_with_its_time_left(plain_run, capsys):
    plain_run(max_steps=4, log_every_n_steps=2)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [re.match(r"step +(\d)/4 \| \d+:\d\d left \| loss [\d.]+ \|", line)[1] for line in lines] == ["2", "4"]
    assert all(" tok/s" in line for line in lines)


def test_what_takes_long_says_so_in_lines_and_only_the_innermost_speaks(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SILENCE_S", 0.2)
    with Progress("scoring"):
        time.sleep(0.7)
        for _ in each("answering", range(4), "rows"):
            time.sleep(0.3)
    said = capsys.readouterr().out.splitlines()
    first_inner = next(i for i, line in enumerate(said) if line.startswith("answering"))
    assert first_inner >= 2 and all(line.startswith("scoring 0:0") for line in said[:first_inner])
    assert all(re.match(r"answering [0-3]/4 rows, 0:0\d", line) for line in said[first_inner:])
    assert any(line.endswith(" left") for line in said[first_inner:])


def test_what_is_quick_says_nothing(capsys):
    with Progress("saving"):
        pass
    assert capsys.readouterr().out == ""


WIDE_TABLE = """
from finetune.run.metrics import table
from finetune.system.terminal import log_error, say
head = ("", "before", "best (step 12)", "after")
say(table([head, ("loss", "5.9396", "5.1496", ""), ("exact match of 24", "0", "1", "2")]))
log_error("--columns foo=bar: 'foo' is not a field of any format. Use messages, system, tools or text.")
"""


def test_a_narrow_terminal_gets_a_table_s_cells_one_below_another_and_errors_between_words():
    argv = [sys.executable, "-c", WIDE_TABLE]
    code, lines = drawn(argv, 40)
    assert code == 0 and lines[:3] == ["loss", "  before: 5.9396", "  best (step 12): 5.1496"]
    assert lines[3:7] == ["exact match of 24", "  before: 0", "  best (step 12): 1", "  after: 2"]
    assert lines[7:] == [
        "error: --columns foo=bar: 'foo' is not a",
        "  field of any format. Use messages,",
        "  system, tools or text.",
    ]
    _, lines = drawn(argv, 120)
    assert [len(line.split("  ")) > 1 for line in lines] == [True, False, True, True, False]


@pytest.mark.parametrize("program", ["train.py --help", "train.py --help lora_rank", "report.py --help"])
def test_help_on_a_narrow_terminal_ends_lines_between_words(program):
    code, lines = drawn([sys.executable, *program.split()], 40)
    assert code == 0 and len(lines) > 10
    assert all(len(line.rstrip()) <= 40 or "python " in line for line in lines)


def test_bars_of_a_dry_run_fit_a_narrow_terminal(tiny_model, rows_file):
    code, lines = drawn(command("--dry_run --backend cpu", dict(model_name=tiny_model, dataset=rows_file)), 40)
    bars = [line for line in lines if re.match(r"  to +\d+ #", line)]
    assert code == 0 and max(line.count("#") for line in bars) == 18
    assert all(len(line) <= 40 and line.split()[-1].isdigit() for line in bars)
