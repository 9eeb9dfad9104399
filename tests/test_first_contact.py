"""benchmarks/first_contact.py: in small on a CPU, one JSON whatever happens to a question."""

import json
import subprocess
import sys
import time

import pytest

from benchmarks import contact_setup, contact_steps, first_contact
from finetune.torch_engine.graphs.replay import Graphs
from tests.support import varlen_reference
from tests.support.commands import ROOT
from tests.support.dry_capture import DryCapture

CHEAP = "facts,head_rows"
STEPS = "small_steps,large_rows,run_lora,run_dpo,in_24_gib,pretraining,two_ranks"


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
    assert answers["run_lora"]["memory, predicted by measured"] > 0.5
    assert answers["two_ranks"]["losses_differ_by"] < 1e-3  # of losses written with four digits


def test_what_was_answered_is_not_asked_again(tmp_path):
    out = tmp_path / "found.json"
    known = {"facts": {"kept": 1}, "head_rows": {"seen": 1, "part": {"failed": "no memory"}}}
    out.write_text(json.dumps({"device": "cpu", "quick": False, "questions": known}))
    code, found, err = contact("--parts", "questions", "--only", "facts", "--out", str(out))
    assert code == 0 and found["questions"] == known, err
    assert json.loads(out.read_text()) == found


def test_a_file_of_another_device_or_a_torn_one_is_put_aside(tmp_path, capsys):
    out = tmp_path / "found.json"
    for text in ('{"device": "cuda", "quick": false, "questions": {}}', '{"device": "cpu", "qui', "[]", "{}"):
        out.write_text(text)
        assert first_contact.kept_in(out, {"device": "cpu", "quick": False}) == {"device": "cpu", "quick": False}
        assert not out.exists() and (tmp_path / "found.json.old").read_text() == text
        assert "Starts afresh" in capsys.readouterr().err
    assert first_contact.kept_in(None, {"device": "cpu"}) == {"device": "cpu"}


def test_a_new_failure_does_not_replace_figures():
    partly = {"ours": {"tokens_per_s": 9}, "peft": {"failed": "no memory"}}
    assert not first_contact.is_answer(partly) and first_contact.is_answer({"kept": 1})
    for worse in ({"failed": "no answer in 60 s"}, {"not_run": "no time left"}):
        assert first_contact.merged({"large_rows": partly}, {"large_rows": worse}) == {"large_rows": partly}
        assert first_contact.merged({}, {"large_rows": worse}) == {"large_rows": worse}
        assert first_contact.merged({"large_rows": worse}, {"large_rows": partly}) == {"large_rows": partly}
    again = partly | {"peft": {"tokens_per_s": 3}}
    assert first_contact.merged({"large_rows": partly}, {"large_rows": again}) == {"large_rows": again}


SAYS = """
import json, sys, time
for line in json.loads(sys.argv[1]):
    time.sleep(line) if isinstance(line, float) else print(line, flush=True)
"""


def said_by(*lines, limits):
    """Answers of a child that prints these lines and sleeps the numbers."""
    argv = [sys.executable, "-S", "-c", SAYS, json.dumps(lines)]
    with contact_setup.in_group(argv, stdout=subprocess.PIPE) as child:
        return [name for name, _ in first_contact.answers(child, first_contact.Clock(30), limits)]


def test_a_limit_is_that_of_a_question_whatever_else_it_prints():
    first, second = (json.dumps({"asked": name, "found": {}, "seconds": 0}) for name in ("first", "second"))
    stray = ["a line"] * 5
    assert said_by(*stray, 0.3, first, *stray, second, limits=[20, 20]) == ["first", "second"]
    assert said_by(first, second, 20.0, limits=[20, 20, 0.1]) == ["first", "second"]  # two in one read
    assert said_by(*["a line", 0.1] * 50, first, limits=[0.5]) == []


def test_what_a_question_started_ends_with_it():
    """What it started holds its stdout, which ends with the last of them."""
    code = "import subprocess; subprocess.Popen(['sleep', '60']); print('started', flush=True); input()"
    began = time.monotonic()
    argv = [sys.executable, "-S", "-c", code]
    with contact_setup.in_group(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == "started\n"
    assert child.stdout.read() == "" and time.monotonic() - began < 30


def test_a_run_that_takes_too_long_is_a_failure_of_its_own(tmp_path):
    """Of one process, of two ranks, and of what leads a group."""
    argv = [sys.executable, "-S", "-c", "import time; print('begun', flush=True); time.sleep(60)"]
    for run in (contact_setup.run_limited, contact_setup.run_in_group):
        done = run(argv, 0.3)
        assert done.returncode == 124 and "not finished in 0 s" in done.stderr
    setup = first_contact.Setup("cpu", quick=True, folder=str(tmp_path))
    for launch in (lambda argv, limit_s: contact_setup.run_limited(argv, 0.1), late_ranks):
        found = contact_steps.run_of(setup, tmp_path, tmp_path, [], launch=launch)
        assert found["failed"].startswith("exit 124: not finished"), found


def late_ranks(argv, limit_s):
    return contact_steps.launched(argv, 0.1)


def test_limits_of_commands_are_within_those_of_their_questions():
    limits = contact_steps.LONG
    assert set(contact_steps.OF_RUNS) < set(limits) < set(first_contact.QUESTIONS)
    assert all(limits[name] > contact_steps.WRITE_S + contact_steps.RUN_S for name in contact_steps.OF_RUNS)
    assert limits["two_ranks"] > contact_steps.WRITE_S + 2 * contact_steps.RUN_S
    assert limits["pretraining"] > contact_steps.DATA_S + contact_steps.RUN_S
    assert max(limits.values()) < first_contact.LIMIT_S


def test_steps_that_are_timed_with_graphs_are_replays():
    """Captured dryly, with a reference of a kernel that takes bounds: what no CPU has."""
    config = contact_setup.TINY
    setup = first_contact.Setup("cpu", quick=True)
    engine = contact_setup.engine_of(setup, config, contact_setup.settings_of(setup))
    engine.forward.attention = varlen_reference.attention(varlen_reference.by_bounds)
    trained = [p for p in engine.parallel.local_params.values() if p is not None]
    engine.graphs = Graphs(engine.forward, engine.objective, trained, DryCapture())
    steps = [contact_setup.batches_of(config, contact_setup.log_normal_lengths(setup, step)) for step in range(3)]
    contact_steps.warm_up(engine, steps)
    buckets = contact_steps.buckets_of(engine.graphs)
    assert 1 < buckets["buckets"] == buckets["captured_buckets"]
    captures = len(engine.graphs.capture.recorders)
    replays = engine.graphs.capture.replays
    for batches in steps:
        engine.train_step(batches, 1e-4)
    assert len(engine.graphs.capture.recorders) == captures
    assert engine.graphs.capture.replays == replays + len(steps)
