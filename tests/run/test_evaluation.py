"""Evaluation during a run."""

import json
import os
import signal
import sys

import pytest
from safetensors.torch import load_file, save_file

from finetune.errors import NonFiniteError
from finetune.run import samples
from tests.support.commands import command, finish
from tests.support.model_folders import with_config
from tests.support.runs import PLAIN, read_events
from train import fine_tune


def test_an_evaluation_that_is_not_finite_ends_the_run(plain_run, rows_file, tmp_path):
    with pytest.raises(NonFiniteError):
        plain_run(lr=1e30, validation_dataset=str(rows_file), max_steps=1, apply_gradient_clipping=False)
    assert read_events(tmp_path / "out", "end")[-1]["exit_code"] == 65


@pytest.mark.parametrize("validated", [False, True])
def test_a_model_that_computes_nan_is_not_blamed_on_the_rate(validated, plain_run, rows_file, tiny_model, tmp_path):
    folder = with_config(tiny_model, tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    embedding[: len(embedding) // 4] = float("nan")  # letters; the checks of a loaded model ask tokens after them
    save_file(tensors, file, {"format": "pt"})
    held_out = {"validation_dataset": str(rows_file)} if validated else {}
    with pytest.raises(
        NonFiniteError, match=r"step [01]: .*is nan.*Nothing was learned yet: look at the model's"
    ) as error:
        plain_run(max_steps=1, model_name=str(folder), **held_out)
    assert "--lr" not in str(error.value)


@pytest.mark.slow
def test_a_pattern_that_finds_no_end_on_an_answer_ends_no_run_and_is_said_alike_on_two_ranks(tiny_model, tmp_path):
    rows = [{"prompt": f"{i}?", "completion": "1" * 60 + "x" if i == 2 else str(i)} for i in range(8)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = PLAIN | dict(batch_size=2, max_steps=2, world_size=2, eval_every=1, score_max_new_tokens=4)
    flags |= dict(model_name=tiny_model, dataset=file, score_dataset=file, score_metric="regex")
    ended = finish(command(flags, score_pattern=r"(?:1|11)+$|\w+", output_dir=tmp_path / "out"), timeout_s=120)
    assert ended.returncode == 0, ended.stderr
    evals = read_events(tmp_path / "out", "eval")
    assert len(evals) == 3 and all(2 not in one["right"]["regex"] for one in evals)
    assert ended.stdout.count("finds no end on row 3, counted as wrong.") == 3
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("flag", ["validation_dataset", "score_dataset"])
def test_a_resumed_run_says_that_the_rows_it_is_measured_by_have_changed(flag, plain_run, tmp_path, capsys):
    """The best step, and the end of --early_stopping, are found by comparing losses."""
    file = tmp_path / "held_out.jsonl"
    for steps_in_all, answer in ((1, "four"), (2, "four"), (3, "five")):
        file.write_text(json.dumps({"prompt": "What is 2 plus 2? ", "completion": answer}) + "\n")
        plain_run(**{flag: str(file)}, max_steps=steps_in_all, save_every=1, eval_every=1, resume="auto")
        said = f"note: the rows of --{flag} have changed since: what was measured before is of other rows"
        assert (said in capsys.readouterr().out) == (answer == "five")


def test_an_evaluation_whose_answers_a_signal_ends_is_taken_again(flags, rows_file, tmp_path):
    """It was logged and not taken again, so that its step had no samples."""
    folder = tmp_path / "out"
    run = flags | dict(max_steps=4, eval_every=2, eval_samples=2, validation_dataset=str(rows_file))

    def send(frame, kind, of):
        if frame.f_code is samples.answers_to.__code__:
            sys.setprofile(None)
            os.kill(os.getpid(), signal.SIGTERM)

    def at(event):
        if event["step"] == 2:
            sys.setprofile(send)

    state = fine_tune(**run, on_step=at)
    assert (state.status, state.step) == ("stopped", 2)
    fine_tune(resume="auto", output_dir=str(folder))
    evaluated = [event["step"] for event in read_events(folder, "eval")]
    assert evaluated == [0, 2, 4]
    assert [line["step"] for line in samples.read(folder)] == [0, 0, 2, 2, 4, 4]


def test_a_split_of_less_than_a_row_holds_one_out_and_says_so(plain_run, tmp_path, capsys):
    rows = tmp_path / "few.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}?", "completion": "yes"}) + "\n" for i in range(2)))
    line = "note: --validation_split: 1 of 2 rows is held out, as one at least is"
    for fraction in (0.1, 0.5):
        plain_run(dataset=str(rows), validation_split=fraction, max_steps=1, overwrite=True)
        assert (line in capsys.readouterr().out) == (fraction == 0.1)
