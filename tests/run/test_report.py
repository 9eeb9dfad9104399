"""What a run prints around its steps."""

import shlex

import pytest

from finetune.data.columns import RowOptions, RowReader
from finetune.estimate.step_time import StepTime
from finetune.model_files.tokenizer import opened_ids
from finetune.run.metrics import Summary
from finetune.run.report import ask_command, memory_lines, step_lines
from tests.support.runs import read_events
from train import fine_tune

MIB = 2**20


def test_verbose_prints_the_machine_and_the_closing_lines_say_how_to_ask(run, capsys, rows_file):
    run(max_steps=1, verbose=True, log_every_n_steps=5, score_dataset=str(rows_file), score_samples=2)
    said = capsys.readouterr().out
    assert "Selected backend: cpu" in said and "exact match of 2" in said
    assert "workspace" in said and " predicted" in said and "tokens trained on" in said
    assert "try it: python generate.py --checkpoint" in said and "--raw --prompt 'What is 0 plus 0? '" in said


def test_a_resumed_run_shows_what_was_before_and_its_own_speed(plain_run, tmp_path, rows_file):
    plain_run(max_steps=2, validation_dataset=str(rows_file))
    state = fine_tune(resume="auto", output_dir=str(tmp_path / "out"), max_steps=4)
    first = read_events(tmp_path / "out", "eval")[0]["loss"]
    assert state.scores["before"]["loss"] == first != state.scores["after"]["loss"]


def test_a_resumed_run_may_score_what_the_run_before_did_not(plain_run, tmp_path, rows_file, capsys):
    plain_run(max_steps=1, validation_split=0.2)
    plain_run(max_steps=2, validation_split=0.2, resume="auto", score_dataset=str(rows_file), score_samples=2)
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("exact match of"))
    assert row.split()[-2] == "-"


def test_memory_is_one_line_unless_asked_or_far_off():
    def lines(predicted, verbose=False):
        items = {"base": 60, "workspace": 40}
        peak = {"total": 100 * 2**20, "items": {k: v * 2**20 for k, v in items.items()}}
        summary = Summary(peak=peak, predicted={"total": predicted * 2**20, "items": peak["items"]})
        return memory_lines(summary, verbose)

    assert len(lines(105)) == 1 and "+5.0%" in lines(105)[0]
    assert "workspace" in "".join(lines(89)) and "workspace" in "".join(lines(105, verbose=True))


def test_a_scored_answer_ends_after_as_many_tokens_as_allowed(plain_run, capsys, rows_file, tmp_path):
    answers = []
    for number in (1, 8):
        plain_run(
            max_steps=1,
            score_dataset=str(rows_file),
            score_max_new_tokens=number,
            output_dir=str(tmp_path / f"{number}"),
        )
        answers.append(capsys.readouterr().out.partition("\nafter:    ")[2].partition("\n")[0])
    assert answers[1].startswith(answers[0]) and len(answers[1]) > len(answers[0])


def test_the_time_of_a_step_is_said_of_three_steps_and_more():
    """Of two the median is half the first one, which warms up."""
    said = [step_lines(Summary(predicted_step=StepTime({"products": 1.0}), step_seconds=[2.0] * n)) for n in (2, 3)]
    assert said == [[], ["time of a step: 2 s, the median (1 predicted, -50%)"]]


def test_a_step_beside_other_processes_names_them_and_no_percentage():
    slow = Summary(predicted_step=StepTime({"products": 1.0}), step_seconds=[2.0] * 3, other_processes=[1.8, 2.1, 9.0])
    named = ["time of a step: 2 s, the median (1 predicted; about 2 other processes were running)"]
    assert step_lines(slow) == named
    assert "-50%" in step_lines(slow, alone=False)[0]
    for seconds in (1.1, 0.9):
        slow.step_seconds = [seconds] * 3
        assert "about 2 other processes were running)" in step_lines(slow)[0] and "%" not in step_lines(slow)[0]
    slow.other_processes = [0.0, 0.3, 1.0]
    assert "+11%" in step_lines(slow)[0]


def test_a_run_that_took_no_step_has_no_memory_of_training():
    line = "memory above imports: 1.00 GiB while loading"
    assert memory_lines(Summary(loading_bytes=2**30), verbose=True) == [line]


def test_the_command_to_try_asks_the_last_question_with_its_history(chat_tokenizer, plain_tokenizer):
    first = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "yes"}]
    last = [{"role": "user", "content": "two"}, {"role": "assistant", "content": "no"}]
    row = RowReader(RowOptions()).read({"messages": first + last}, "rows.jsonl:1")
    assert shlex.split(ask_command("out", row, chat_tokenizer))[-2:] == ["--prompt", "one"]
    for tokenizer in (chat_tokenizer, plain_tokenizer):  # the second puts BOS before a text
        text = "one\nyes\ntwo\n"
        words = shlex.split(ask_command("out", row, tokenizer, opened_ids(tokenizer, text)))
        assert words[-3:] == ["--raw", "--prompt", text]


@pytest.mark.parametrize(
    ("peak", "sampled", "said"),
    [
        (100 * MIB, [], "0.10 GiB in training (0.10 predicted, +5.0%)"),
        (100 * MIB, [(30.0, 16.0)], "(0.10 predicted for answers of full length that all teach, +5.0%)"),
        (MIB // 100, [], "0.00 GiB in training (0.10 predicted),"),  # of a second run in a process
    ],
)
def test_a_peak_is_compared_with_what_was_predicted_where_there_is_one(peak, sampled, said):
    summary = Summary(peak={"total": peak, "items": {}}, predicted={"total": 105 * MIB, "items": {}}, sampled=sampled)
    (line,) = memory_lines(summary, verbose=False)
    assert said in line
