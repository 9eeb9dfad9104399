"""What a user can fix is one line on stderr and the exit code of the README's table, before the model loads."""

import os
import shutil
import subprocess

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import export
import generate
import score
import train
from finetune.checkpoint.lock import Lock
from finetune.checkpoint.store import steps_of, verify_checkpoint
from finetune.errors import NonFiniteError, PlanError
from tests.support import ranks, tiny
from tests.support.cells import but_slow
from tests.support.commands import PYTHON, ROOT, TORCHRUN, by_hand, command, finish, free_port, words
from tests.support.rows import json_lines
from tests.support.runs import read_events

ROW = {"prompt": "a", "completion": "b"}
FULL = json_lines(*[ROW] * 8)
BAD_DATA = {
    "empty": (b"", "has no rows"),
    "newlines": (b"\n\n\n", "has no rows"),
    "broken row": (FULL + b'{"prompt": "a", \n', "bad.jsonl:9: "),
    "list": (FULL + b"[1]\n", "bad.jsonl:9: "),
    "missing field": (FULL + json_lines({"prompt": "a"}), "bad.jsonl:9: field 'completion' is missing"),
    "wrong type": (
        FULL + json_lines({"prompt": "a", "completion": 5.5}),
        "bad.jsonl:9: field 'completion' is a number",
    ),
    "null": (FULL + json_lines({"prompt": None, "completion": "b"}), "bad.jsonl:9: field 'prompt' is"),
    "duplicate key": (FULL + b'{"prompt": "a", "prompt": "b", "completion": "c"}\n', "bad.jsonl:9: "),
    "NUL": (FULL + b'{"prompt": "a\x00", "completion": "c"}\n', "bad.jsonl:9"),
    "long line": (FULL + b'{"prompt": "' + b"a" * (17 * 2**20) + b'"}\n', "bad.jsonl:9: "),
    "not UTF-8": (FULL + '{"prompt": "ä", "completion": "c"}\n'.encode("latin-1"), "bad.jsonl:9:"),
    "no target": (json_lines(*[{"prompt": "a", "completion": ""}] * 8), "none of its 8 rows has an answer"),
    "no format": (json_lines(*[{"foo": "a"}] * 8), "columns foo match no format"),
}

MADE_BY_A_RUN = '{"requested": {}, "settled": {}}'


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_rows_are_one_line_and_the_run_that_was_there_is_not_lost(flags, tmp_path, case, capsys):
    content, message = BAD_DATA[case]
    (tmp_path / "bad.jsonl").write_bytes(content)
    kept = tmp_path / "out" / "run_plan.json"
    kept.parent.mkdir()
    kept.write_text(MADE_BY_A_RUN)
    with pytest.raises(PlanError) as error:
        train.main(words(flags, dataset=tmp_path / "bad.jsonl", overwrite="true"))
    assert message in str(error.value) and "\n" not in str(error.value) and error.value.exit_code == 2
    assert "trainable parameters" not in capsys.readouterr().out
    assert kept.read_text() == MADE_BY_A_RUN


def test_bad_input_leaves_no_output_folder_behind(flags, tmp_path):
    (tmp_path / "bad.jsonl").write_text("")
    with pytest.raises(PlanError):
        train.main(words(flags, dataset=tmp_path / "bad.jsonl"))
    assert not (tmp_path / "out").exists()


BAD_FLAGS = {
    "missing model": ({"model_name": "no/such/model"}, "--model_name no/such/model: "),
    "missing data": ({"dataset": "nowhere.jsonl"}, "--dataset nowhere.jsonl: "),
    "folder without data": ({"dataset": str(ROOT / "runs")}, "--dataset "),
    "context": ({"context_length": 100_000}, "--context_length 100000: exceeds this model's limit of 256"),
    "backend": ({"backend": "cuda"}, "--backend cuda: Backend 'cuda' is not available"),
    "pair": (
        {"train_type": "qlora", "quantization_backend": "quanto", "n_bits": "3"},
        "--n_bits 3: quanto supports 2/4/8 bits",
    ),
    "bits": ({"train_type": "qlora", "n_bits": 7}, "--n_bits 7: nf4 supports 4 bits"),
    "groups": (
        {"train_type": "qlora", "n_bits": 3},
        "--group_size 64: does not divide the 96 columns of model.layers.0.mlp.down_proj",
    ),
    "targets": ({"lora_target_modules": "nope"}, "--lora_target_modules nope: no weight of this model has that name"),
    "config": ({"config": "nowhere.yaml"}, "--config nowhere.yaml: no such file"),
    "resume": ({"resume": "nowhere"}, "--resume nowhere: no such folder"),
    "validation": ({"validation_dataset": "nowhere.jsonl"}, "--validation_dataset nowhere.jsonl: "),
    "wandb": ({"log_to": "wandb"}, "--log_to wandb: wandb is not installed"),
}


@pytest.mark.promise("CLI_02")
@pytest.mark.parametrize("case", BAD_FLAGS)
def test_bad_flags_are_one_line_that_names_the_flag(flags, case, monkeypatch):
    changes, message = BAD_FLAGS[case]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(PlanError) as error:
        train.main(words(flags, **changes))
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_token_ids_beyond_the_embedding_name_the_row(flags, make_tokenizer, tmp_path):
    folder = tmp_path / "model"
    make_tokenizer(folder, bos=False)
    tiny.build("llama", vocab_size=128).save_pretrained(folder)
    with pytest.raises(
        PlanError, match=r"rows.jsonl:1: token id \d+ is out of range for the model's 128 embedding rows"
    ):
        train.main(words(flags, model_name=folder))


@pytest.mark.parametrize(
    ("script", "argv", "message"),
    [
        (generate, "--checkpoint nowhere --prompt x".split(), "--checkpoint nowhere"),
        (generate, "--checkpoint x".split(), "--prompt: none given"),
        (generate, "--checkpoint x --prompt a --top-p 7".split(), "--top_p 7.0: must be 0 to 1"),
        (score, f"--checkpoint nowhere --dataset {ROOT}/examples/orders_test.jsonl".split(), "--checkpoint nowhere"),
        (export, "--checkpoint nowhere --output_dir x".split(), "--checkpoint nowhere: has no adapter_config.json"),
    ],
)
def test_the_small_scripts_say_what_is_missing(script, argv, message, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(PlanError) as error:
        script.main(argv)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_a_bad_command_leaves_one_line_on_stderr_and_code_2():
    out = finish(command("--lora_rnk 4"))
    assert out.returncode == 2 and out.stdout == ""
    assert out.stderr == "error: --lora_rnk: unknown flag. Nearest: --lora_rank. See --help.\n"


@pytest.mark.parametrize("script", but_slow(["generate.py", "score.py", "export.py"], ["generate.py"]))
def test_a_flag_that_a_script_lacks_is_one_line_and_code_2(script):
    out = finish(command("--nope", script=script))
    assert out.returncode == 2 and len(out.stderr.splitlines()) == 1


def test_a_second_process_in_one_folder_exits_75_and_names_the_first(flags, tmp_path):
    lock = Lock(tmp_path / "out")
    out = finish(command(flags))
    lock.release()
    assert out.returncode == 75 and f"in use by pid {os.getpid()}" in out.stderr and len(out.stderr.splitlines()) == 1


def test_a_diverging_run_exits_65(flags):
    out = finish(command(flags, "--lr 1e30"))
    assert out.returncode == 65 and out.stderr.startswith("error: step ") and len(out.stderr.splitlines()) == 1


@pytest.mark.slow
def test_what_the_user_can_fix_is_one_line_and_code_2_in_every_rank(base, tmp_path):
    (tmp_path / "bad.jsonl").write_bytes(FULL + b"[1]\n")
    values = dict(dataset=tmp_path / "bad.jsonl", output_dir=tmp_path / "out")
    code, out, err = finish(command(base, "--world_size 2", **values))
    assert code == 2 and err.count("error:") == 1 and "bad.jsonl:9: " in err
    processes = by_hand(base, tmp_path / "out", "--lora_target_modules nope")
    try:
        said = [p.communicate(timeout=120) for p in processes]
    finally:
        [ranks.kill_session(p) for p in processes]
    assert [p.returncode for p in processes] == [2, 2], said
    assert "".join(err for _, err in said).count("error: --lora_target_modules nope") == 1


@pytest.mark.parametrize(
    "what",
    [
        pytest.param("dataset", marks=pytest.mark.slow),
        pytest.param("model_name", marks=pytest.mark.slow),
        pytest.param("validation_dataset", marks=pytest.mark.slow),
        pytest.param("score_dataset", marks=pytest.mark.slow),
        pytest.param("adapter", marks=pytest.mark.slow),
    ],
)
def test_ranks_whose_paths_lead_to_other_files_are_refused(what, base, tiny_model, rows_file, tmp_path, run):
    """Each rank in a folder of its own, as on hosts without a shared file system."""
    if what == "adapter":
        run(max_steps=1, output_dir=str(tmp_path / "adapter"))
    more = [] if what in ("dataset", "model_name", "adapter") else [what]
    for rank in range(2):
        folder = tmp_path / str(rank)
        shutil.copytree(tiny_model, folder / "model_name")
        for name in ("dataset", *more):
            shutil.copy(rows_file, folder / f"{name}.jsonl")
        if what == "adapter":
            shutil.copytree(tmp_path / "adapter", folder / "adapter")
    there = tmp_path / "1" / what
    if what in ("model_name", "adapter"):
        weights = there / ("model.safetensors" if what == "model_name" else "adapter_model.safetensors")
        save_file({name: t + 1 for name, t in load_file(weights).items()}, weights, {"format": "pt"})
        (there / "manifest.json").unlink(missing_ok=True)
        said = f"--{what} {what}: rank 1 reads other files than rank 0"
    else:
        rows = there.with_suffix(".jsonl")
        rows.write_text(rows.read_text().replace("It is", "It was"))
        said = f"--{what}: rank 1 reads other files than rank 0"
    flags = base | dict(dataset="dataset.jsonl", output_dir=tmp_path / "out", master_port=free_port())
    flags |= dict(model_name="model_name") if what != "adapter" else dict(adapter="adapter")
    flags |= {name: f"{name}.jsonl" for name in more}
    argv = command(flags, "--batch_size 2 --max_steps 1")
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    environment = [{"RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
    processes = [ranks.start(argv, env, cwd=tmp_path / env["RANK"], **pipes) for env in environment]
    try:
        found = [p.communicate(timeout=120) for p in processes]
    finally:
        [ranks.kill_session(p) for p in processes]
    assert [p.returncode for p in processes] == [2, 2] and said in "".join(err for _, err in found), found
    assert not (tmp_path / "out").exists()


def test_an_infinite_learning_rate_stops_with_65_names_step_and_rows_and_saves_nothing_bad(run, tmp_path):
    with pytest.raises(NonFiniteError, match=r"step \d+: .*rows .*rows.jsonl:\d+.*checkpoint") as error:
        run(lr=1e30, save_every=1)
    assert error.value.exit_code == 65
    end = read_events(tmp_path / "out", "end")[-1]
    assert (end["status"], end["exit_code"]) == ("failed", 65)
    for folder in steps_of(tmp_path / "out"):
        saved = verify_checkpoint(folder)
        for name in ("adapter_model.safetensors", "optimizer.safetensors"):
            assert all(np.isfinite(a).all() for a in saved.tensors(name).values())


def with_closed_pipe(argv) -> tuple[int, str]:
    """(exit code, stderr) of a command whose output nobody reads."""
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run(argv, stdout=write, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(write)
    return ended.returncode, ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("launched", ["world_size", "torchrun"])
def test_ranks_whose_output_nobody_reads_end_with_the_pipes_code(flags, launched):
    """Not as if a rank were lost, which another try would mend."""
    argv = command(flags, batch_size=2, world_size=2)
    if launched == "torchrun":
        argv = [*TORCHRUN, *command(flags, batch_size=2)[len(PYTHON) :]]
    code, said = with_closed_pipe(argv)
    assert "stopped responding" not in said
    assert code == 141 if launched == "world_size" else "exitcode  : 141" in said, said


def test_a_closed_pipe_is_not_a_success(flags):
    argv = command(flags)
    assert with_closed_pipe(argv) == (141, "")
    with open("/dev/full", "w") as full:
        out = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        both = subprocess.run(argv, stdout=full, stderr=full, cwd=ROOT)
    assert out.returncode == 74 and out.stderr.startswith("error: ")
    assert both.returncode == 74
