"""What a run prints around its steps."""

from finetune.estimate.step_time import StepTime
from finetune.run.metrics import Summary
from finetune.run.report import memory_lines, step_lines
from tests.support.runs import read_events
from train import fine_tune


def test_verbose_prints_the_machine_and_the_closing_lines_say_how_to_ask(run, capsys, rows_file):
    run(max_steps=1, verbose=True, log_every_n_steps=5, score_dataset=str(rows_file), score_samples=2)
    said = capsys.readouterr().out
    assert "Selected backend: cpu" in said and "exact match of 2" in said
    assert "workspace" in said and " predicted, " in said and "tokens trained on" in said
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
        answers.append(capsys.readouterr().out.partition("\nafter:  ")[2].partition("\n")[0])
    assert answers[1].startswith(answers[0]) and len(answers[1]) > len(answers[0])


def test_the_time_of_a_step_is_said_of_three_steps_and_more():
    """Of two the median is half the first one, which warms up."""
    said = [step_lines(Summary(predicted_step=StepTime({"products": 1.0}), step_seconds=[2.0] * n)) for n in (2, 3)]
    assert said == [[], ["time of a step: 2 s, the median (1 predicted, -50%)"]]
