"""benchmarks/first_contact.py: in small on a CPU, one JSON whatever happens to a question."""

import json
import subprocess
import sys

import pytest

from benchmarks import first_contact
from tests.support.commands import ROOT

CHEAP = "facts,head_rows"
STEPS = "small_steps,large_rows,in_24_gib,runs,pretraining,two_ranks"


def contact(*flags) -> tuple[int, dict | None, str]:
    argv = [sys.executable, "-W", "ignore", "benchmarks/first_contact.py", "--device", "cpu", *flags]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


@pytest.mark.slow
def test_questions_are_answered_with_numbers_on_a_cpu(tmp_path):
    code, found, err = contact("--parts", "questions", "--only", CHEAP, "--out", str(tmp_path / "found.json"))
    assert code == 0 and json.loads((tmp_path / "found.json").read_text()) == found, err
    answers = found["questions"]
    assert list(answers) == CHEAP.split(",") and not any("failed" in answer for answer in answers.values()), answers
    assert answers["facts"]["packages"]["torch"] and answers["facts"]["tried"]["fp32"]["products_tflops"] > 0
    assert answers["head_rows"]["128 rows_s"] > 0


def test_a_question_that_does_not_exist_is_refused():
    code, _, err = contact("--only", "facts,speed")
    assert code == 2 and "no question speed. There are facts" in err


@pytest.mark.slow
def test_a_question_that_ends_its_process_is_a_line_and_the_next_goes_on():
    """`die` is no question of the child, which ends on it as on a crash of a driver."""
    setup = first_contact.Setup("cpu", quick=True)
    found = first_contact.asked(setup, ["die", "several_devices"], first_contact.Clock(300), 250)
    assert "exit code 1" in found["die"]["failed"] and "KeyError" in found["die"]["failed"]
    assert found["several_devices"]["not_run"].startswith("needs two devices")


@pytest.mark.slow
def test_everything_is_answered_and_ours_is_timed_on_a_cpu():
    code, found, err = contact("--parts", "questions,compare")
    assert code == 0, err
    assert list(found["questions"]) == list(first_contact.QUESTIONS)
    assert not any("failed" in answer for answer in found["questions"].values()), found["questions"]
    assert found["questions"]["plans_per_shape"]["groups, new lengths"]["worst_s"] > 0
    assert found["questions"]["window_peak"]["predicted_bytes"] > 0
    offload = found["questions"]["offload"]
    assert 0 < offload["copied_bytes"]
    graphs = found["questions"]["launches_and_graphs"]
    assert graphs["graphs_after_the_third"] == graphs["breaks"] == 0
    for kind in ("qlora", "lora"):
        figures = found["compared"][f"tiny {kind}"]
        assert figures["ours"]["tokens_per_s"] > 0 and figures["ours"]["first_step_s"] > 0, figures
        assert "not installed" in figures["unsloth"].get("not_run", "not installed")


@pytest.mark.slow
def test_steps_of_every_kind_are_beside_their_predictions(tmp_path):
    """In small: the same engines, command lines, peers and ranks as on a card."""
    out = tmp_path / "found.json"
    code, found, err = contact("--parts", "questions", "--only", STEPS, "--out", str(out))
    assert code == 0, err
    answers = found["questions"]
    assert list(answers) == STEPS.split(",") and first_contact.is_answer(answers), answers
    assert {kind: each["tokens_per_s"] > 0 for kind, each in answers["small_steps"].items() if kind != "seconds"}
    assert "no kernel of attention" in answers["small_steps"]["lora graphs"]["captured"]  # which a CPU lacks
    assert answers["large_rows"]["ours by theirs"] > 0
    assert answers["runs"]["lora"]["memory, predicted by measured"] > 0.5
    assert answers["two_ranks"]["losses_differ_by"] < 1e-3  # of losses written with four digits


def test_what_was_answered_is_not_asked_again(tmp_path):
    out = tmp_path / "found.json"
    out.write_text(json.dumps({"questions": {"facts": {"kept": 1}, "head_rows": {"failed": "no memory"}}}))
    assert first_contact.kept_in(out)["questions"]["facts"] == {"kept": 1} and first_contact.kept_in(None) == {}
    assert first_contact.is_answer({"kept": 1}) and not first_contact.is_answer({"x": {"failed": "no memory"}})
    code, found, err = contact("--parts", "questions", "--only", "facts", "--out", str(out))
    assert code == 0 and found["questions"]["facts"] == {"kept": 1}, err
