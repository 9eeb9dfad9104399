"""generate.py and score.py over ranks that share the weights: answers and scores of one process, and how ranks end."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

import generate
import score
from finetune.errors import PlanError
from tests.support import ranks, tiny
from tests.support.commands import ROOT
from tests.support.rows import ROWS, jsonl

KINDS = {
    "lora": {},
    "dora on nf4": dict(train_type="qlora", quantization_backend="nf4", use_dora=True),
    "double": dict(train_type="qlora", quantization_backend="nf4", double_quant=True),
    "bnb 8": dict(train_type="qlora", quantization_backend="bnb", n_bits=8),
    "hqq 3": dict(train_type="qlora", quantization_backend="hqq", n_bits=3, group_size=32),
    "rslora": dict(use_rslora=True),
    "embeddings too": dict(lora_target_modules="q_proj,embed_tokens"),
    "full": dict(train_type="full", lora_rank=None, lora_dropout=None),
}
FEW = ["--device", "cpu", "--max_new_tokens", "6"]
TORCHRUN = (sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc_per_node=2")


@pytest.fixture(scope="module")
def tiny_model(chat_model):
    return chat_model


def finish(*argv, stdin: str | None = None) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command in a session of its own."""
    process = ranks.start(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(stdin, timeout=180)
    finally:
        ranks.kill_session(process)
    return process.returncode, out, err


def script(name: str, *argv, launched: bool = False, stdin: str | None = None) -> tuple[int, str, str]:
    """The same of generate.py or score.py, which torchrun starts if `launched`."""
    return finish(*(TORCHRUN if launched else (sys.executable,)), ROOT / name, *argv, stdin=stdin)


def scores_of(folder, rows, file, capsys, *more) -> tuple[dict, str]:
    capsys.readouterr()
    argv = ["--checkpoint", str(folder), "--dataset", rows, "--json", "--predictions", str(file), *FEW, *more]
    assert score.main(argv) == 0
    return json.loads(capsys.readouterr().out), file.read_text()


@pytest.mark.promise("AT_09")
def test_ranks_score_as_one_process_does_and_only_the_first_speaks(run, tmp_path, capsys):
    """The second rank has a row less, and waits for the last one of the first."""
    run(**KINDS["dora on nf4"], num_epochs=1)
    rows = jsonl(tmp_path / "rows.jsonl", ROWS[:3])
    one, answers = scores_of(tmp_path / "out", rows, tmp_path / "one", capsys, "--batch_size", "1")
    argv = ["--checkpoint", tmp_path / "out", "--dataset", rows, "--json", "--predictions", tmp_path / "two", *FEW]
    more = ["--world_size", "2", "--gather_weights", "false", "--batch_size", "1", "--show", "1"]
    code, out, err = script("score.py", *argv, *more)
    assert code == 0, err
    two = json.loads(out)  # one object: the other rank says nothing
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-6) and two["exact_match"] == one["exact_match"]
    assert (tmp_path / "two").read_text() == answers and len(two["memory_bytes"]["by_rank"]) == 2
    assert one["exact_match"] < 1
    assert re.fullmatch(r"base: nf4 4 bits, as trained\n\S+rows.jsonl:\d\n  expected .*\n  got .*\n", err)


@pytest.mark.slow
@pytest.mark.parametrize("gather", ["true", "false"])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_and_scores_over_ranks_are_those_of_one_process(kind, gather, run, tmp_path, capsys):
    """Three prompts on two ranks in batches of one: a rank runs out first."""
    run(**KINDS[kind], num_epochs=4)
    rows = jsonl(tmp_path / "rows.jsonl", ROWS[:5])
    one, answers = scores_of(tmp_path / "out", rows, tmp_path / "one", capsys)
    argv = ["--checkpoint", tmp_path / "out", "--dataset", rows, "--json", "--predictions", tmp_path / "two", *FEW]
    code, out, err = script("score.py", *argv, "--gather_weights", gather, launched=True)
    assert code == 0, err
    two = json.loads(out)
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-6) and two["exact_match"] == one["exact_match"]
    assert (tmp_path / "two").read_text() == answers
    asked = jsonl(tmp_path / "prompts.jsonl", [{"prompt": row["prompt"]} for row in ROWS[3:6]])
    argv = ["--checkpoint", str(tmp_path / "out"), "--prompts", asked, "--batch_size", "1", *FEW]
    assert generate.main(argv) == 0
    alone = capsys.readouterr().out
    code, out, err = script("generate.py", *argv, "--gather_weights", gather, launched=True)
    assert code == 0 and out == alone, err


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--use_cpu_offload", "true"), ("--tp_degree", "2"), ("--sharding_strategy", "ddp")])
def test_a_run_of_ranks_is_opened_by_ranks_whatever_its_degrees(flags, run, tmp_path, tiny_model, rows_file, capsys):
    """Its degrees are forgotten, its offload is kept."""
    train = "--train_type lora --precision fp32 --max_steps 3 --context_length 64 --batch_size 2 --backend cpu".split()
    train += ["--model_name", tiny_model, "--dataset", rows_file, "--output_dir", tmp_path / "out", "--world_size", "2"]
    code, _, err = script("train.py", *train, *flags)
    assert code == 0, err
    argv = ["--checkpoint", str(tmp_path / "out"), "--prompt", "What is 2? ", *FEW]
    assert generate.main(argv) == 0
    alone = capsys.readouterr().out
    code, out, err = script("generate.py", *argv, "--world_size", "2", "--gather_weights", "false", "--verbose")
    assert code == 0 and out == alone and " on 2 ranks (" in err, err


@pytest.mark.slow
@pytest.mark.parametrize("launched", [True, False], ids=["torchrun", "world_size"])
def test_a_conversation_over_ranks_is_that_of_one_process(launched, run, tmp_path, monkeypatch, capsys):
    run(num_epochs=2)
    lines = "What is 2?\nAnd 3?\n/system Be brief.\nAnd 4?\n/save {}\n/nothing\n\n"
    argv = ["--checkpoint", str(tmp_path / "out"), "--interactive", *FEW]
    code, alone, err = script("generate.py", *argv, stdin=lines.format(tmp_path / "a"))
    assert code == 0, err
    more = ["--gather_weights", "false"] + ([] if launched else ["--world_size", "2"])
    code, out, err = script("generate.py", *argv, *more, launched=launched, stdin=lines.format(tmp_path / "b"))
    assert code == 0 and out.replace(str(tmp_path / "b"), str(tmp_path / "a")) == alone, err
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()


@pytest.fixture
def refuses_two(run, tmp_path):
    """A run whose chat template rejects a word: the prompt that has it is the second rank's."""
    run(num_epochs=1)
    template = tmp_path / "out" / "chat_template.jinja"
    rejects = "{% for m in messages %}{% if 'two' in m.content %}{{ raise_exception('no two') }}{% endif %}{% endfor %}"
    template.write_text(rejects + template.read_text())
    (tmp_path / "out" / "manifest.json").unlink()
    (tmp_path / "prompts.txt").write_text("one\ntwo\nthree\n")
    return ["--checkpoint", str(tmp_path / "out"), "--prompts", str(tmp_path / "prompts.txt"), *FEW]


@pytest.mark.slow
@pytest.mark.parametrize("gather", ["true", "false"])
@pytest.mark.parametrize("launched", [True, False], ids=["torchrun", "world_size"])
def test_a_rank_that_fails_ends_the_others_with_one_line(launched, gather, refuses_two):
    more = [] if launched else ["--world_size", "2"]
    code, out, err = script("generate.py", *refuses_two, "--gather_weights", gather, *more, launched=launched)
    assert code != 0 and out == ""
    (said,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "the chat template rejects this row (no two)" in said
    assert launched or "Traceback" not in err  # torchrun prints its own


@pytest.mark.slow
@pytest.mark.parametrize(("which", "code"), [("kill", 69), ("interrupt", 130)])
def test_a_killed_rank_and_ctrl_c_end_a_conversation(which, code, run, tmp_path):
    run(num_epochs=1)
    argv = [sys.executable, ROOT / "generate.py", "--checkpoint", tmp_path / "out", "--interactive", *FEW]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = ranks.start([*argv, "--world_size", "2"], **pipes)
    try:
        process.stdin.write("What is 2?\n")
        process.stdin.flush()
        process.stdout.readline()
        children = [int(n) for n in open(f"/proc/{process.pid}/task/{process.pid}/children").read().split()]
        os.kill(children[1] if which == "kill" else process.pid, signal.SIGKILL if which == "kill" else signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        ranks.kill_session(process)
    assert process.returncode == code, err
    if which == "kill":
        assert err == "error: rank 1 of 2 was killed by SIGKILL; the others were stopped. Start it again.\n"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--world_size", "0"], "--world_size 0: must be >= 1"),
        (["--world_size", "2", "--device", "mlx"], "--world_size 2: MLX answers in one process"),
        (["--world_size", "2", "--checkpoint", "nowhere"], "--checkpoint nowhere: no such folder"),
    ],
)
def test_what_ranks_cannot_do_is_said_before_one_is_started(flags, said, tiny_model):
    with pytest.raises(PlanError, match=said):
        generate.main(["--checkpoint", str(tiny_model), "--prompt", "a", "--device", "cpu", *flags])


def test_a_launcher_s_number_of_ranks_is_not_another_one(tiny_model, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PlanError, match="--world_size 3: RANK and WORLD_SIZE started 2 ranks. Omit --world_size."):
        generate.main(["--checkpoint", str(tiny_model), "--prompt", "a", "--world_size", "3"])


@pytest.mark.slow
def test_rows_that_end_at_the_model_s_last_position_end_there_over_ranks_too(make_tokenizer, tmp_path, capsys):
    """GPT-2 has no position after it: a rank that is done must not be taken past it by one that goes on."""
    tokenizer = make_tokenizer(tmp_path / "model", bos=False)
    tiny.build("gpt2", vocab_size=len(tokenizer), n_positions=24).save_pretrained(tmp_path / "model")
    prompts = ["What is 1 plus 1? " * n for n in (9, 1, 2, 9, 1)]
    asked = jsonl(tmp_path / "prompts.jsonl", [{"prompt": prompt} for prompt in prompts])
    argv = ["--checkpoint", str(tmp_path / "model"), "--prompts", asked, "--device", "cpu", "--max_new_tokens", "16"]
    assert generate.main([*argv, "--raw"]) == 0
    alone = capsys.readouterr().out
    code, out, err = script("generate.py", *argv, "--raw", "--world_size", "2", "--gather_weights", "false")
    assert code == 0 and out == alone, err
