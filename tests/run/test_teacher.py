"""A student of a teacher: its loss is that of both models at once, and what the teacher gave is read once."""

import json
import os
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from finetune.checkpoint.store import newest_checkpoint
from finetune.data.taught_rows import PART_ROWS, TaughtRows
from finetune.errors import PlanError, StorageError
from finetune.objectives import TEACHER_TOKENS
from finetune.run.opened_teacher import found_of
from tests.support import tiny
from tests.support.cells import but_slow
from tests.support.commands import command, finish
from tests.support.processor import need_cpu_matmul
from tests.support.rows import jsonl
from tests.support.runs import RUN, WHOLE_STATE, copy_up_to, losses, read_events, same_files
from tests.support.small_runs import THREE_STEPS, model_in
from tests.torch_engine.test_divergence import full_divergence
from train import fine_tune, make_plan

ROWS = [{"prompt": f"{i} plus {i}? ", "completion": f"It is {2 * i}, said {'so ' * (i % 4)}."} for i in range(14)]


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    root = tmp_path_factory.mktemp("teaching")
    return (
        RUN
        | THREE_STEPS
        | dict(
            model_name=str(model_in(root / "student", 1, 2)),
            teacher=str(model_in(root / "teacher", 2, 3)),
            teacher_cache=str(root / "cache"),
            dataset=str(jsonl(root / "rows.jsonl", ROWS)),
            train_type="lora",
        )
    )


def said(capsys) -> str:
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "loss, beta", but_slow([("forward_kl", 0.0), ("reverse_kl", 1.0), ("jsd", 0.3)], [("forward_kl", 0.0)])
)
def test_the_first_loss_is_that_of_both_models_at_once(flags, tmp_path, loss, beta):
    changes = dict(output_dir=str(tmp_path / "o"), distill_loss=loss, distill_alpha=0.7, teacher_top_k=10**6)
    changes |= dict(max_steps=1, batch_size=len(ROWS)) | ({"distill_beta": beta} if loss == "jsd" else {})
    tokenizer = transformers.AutoTokenizer.from_pretrained(flags["model_name"])
    asked = [tokenizer(row["prompt"]).input_ids for row in ROWS]
    answers = [[*tokenizer(row["completion"]).input_ids, tokenizer.eos_token_id] for row in ROWS]
    both = list(zip(asked, answers, strict=True))
    rows = [{"input_ids": a + b, "labels": [-100] * len(a) + b} for a, b in both]
    fine_tune(**flags | changes | dict(dataset=str(jsonl(tmp_path / "rows.jsonl", rows))))
    names = ("model_name", "teacher")
    models = [transformers.AutoModelForCausalLM.from_pretrained(flags[name], dtype=torch.float32) for name in names]
    total = count = 0.0
    for prompt, answer in both:
        ids = torch.tensor([prompt + answer])
        own, its = (model(ids).logits[0, len(prompt) - 1 : -1] for model in models)
        nll = torch.nn.functional.cross_entropy(own, torch.tensor(answer), reduction="sum")
        total += float(0.7 * full_divergence(own, its, beta).sum() + 0.3 * nll)
        count += len(answer)
    (step,) = [event for event in read_events(tmp_path / "o") if event["event"] == "step"]
    assert step["loss"] == pytest.approx(total / count, rel=1e-6)
    assert step["loss"] == pytest.approx(0.7 * step["loss/divergence"] + 0.3 * step["loss/nll"], rel=1e-5)


def test_a_teacher_reads_the_rows_once_and_what_is_damaged_again(flags, tmp_path, capsys):
    changes = dict(teacher_cache=str(tmp_path / "cache"))
    fine_tune(**flags | changes | dict(output_dir=str(tmp_path / "one")))
    out = said(capsys)
    assert "reads 14 rows" in out and " meanwhile" in out
    fine_tune(**flags | changes | dict(output_dir=str(tmp_path / "two")))
    assert "reads 14 rows" not in said(capsys)
    (part,) = (tmp_path / "cache").rglob("*.safetensors")
    content = bytearray(part.read_bytes())
    content[-5] ^= 1
    part.write_bytes(content)
    fine_tune(**flags | changes | dict(output_dir=str(tmp_path / "three")))
    assert "reads 14 rows" in said(capsys)
    assert losses(tmp_path / "one") == losses(tmp_path / "two") == losses(tmp_path / "three")


def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(flags, tmp_path, capsys):
    saved = flags | dict(save_every=1, lora_dropout=0.1)
    fine_tune(**saved | dict(output_dir=str(tmp_path / "whole")))
    stopped = copy_up_to(tmp_path / "whole", 2, tmp_path / "stopped")
    fine_tune(**saved | dict(output_dir=str(stopped), resume="auto"))
    assert "resumed from" in said(capsys)
    assert losses(stopped) == losses(tmp_path / "whole")
    last = [newest_checkpoint(folder)[0].folder for folder in (stopped, tmp_path / "whole")]
    same_files(*last, WHOLE_STATE)


@pytest.mark.parametrize("word", ["blas", "onednn"])
def test_a_teacher_is_opened_by_the_library_that_the_run_multiplies_by(flags, tmp_path, word):
    """torch has one setting for all models of a process: that of the teacher was the run's from then on."""
    need_cpu_matmul(word)
    plan = make_plan(flags | dict(output_dir=str(tmp_path / "o"), cpu_matmul=word))
    assert found_of(plan).base.plan.precision.onednn == plan.precision.onednn == (word == "onednn")


@pytest.mark.slow
@pytest.mark.parametrize("word", ["blas", "onednn"])
def test_the_start_in_which_the_teacher_reads_computes_as_the_others(flags, tmp_path, word):
    need_cpu_matmul(word)
    found = []
    for start in ("reads", "finds"):
        changes = dict(teacher_cache=str(tmp_path / "cache"), output_dir=str(tmp_path / start), cpu_matmul=word)
        fine_tune(**flags | changes)
        found.append([(event["loss"], event["grad_norm"]) for event in read_events(tmp_path / start, "step")])
    assert found[0] == found[1]


def test_a_resumed_run_refuses_another_teacher_in_the_same_place(flags, tmp_path):
    teacher = model_in(tmp_path / "teacher", 2, 3)
    saved = flags | dict(save_every=1, teacher=str(teacher))
    fine_tune(**saved | dict(output_dir=str(tmp_path / "whole")))
    stopped = copy_up_to(tmp_path / "whole", 2, tmp_path / "stopped")
    for file in model_in(tmp_path / "other", 5, 3).iterdir():
        shutil.copy(file, teacher / file.name)
    with pytest.raises(PlanError, match="teacher"):
        fine_tune(**saved | dict(output_dir=str(stopped), resume="auto"))


def test_ranks_share_the_parts_whatever_another_has_made_meanwhile(tmp_path):
    """They look at the folder one after the other: a share of what was missing then left parts to nobody."""
    dataset = tiny.dataset((5,) * (4 * PART_ROWS))
    first, second = (TaughtRows(tmp_path / "rows", dataset, 3, is_full=False) for _ in range(2))
    found = first.share(0, 2)
    for part in found:
        counts = [int(dataset.is_target[slice(*dataset.offsets[i : i + 2])].sum()) for i in first.rows_of(part)]
        first.write(part, [(np.zeros((n, 3), np.int64), np.zeros((n, 4), np.float32)) for n in counts])
    assert sorted([*found, *second.share(1, 2)]) == [0, 1, 2, 3]
    assert second.missing() == [1, 3]


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc/self/smaps")
def test_pages_of_what_a_teacher_gave_leave_the_process_once_they_were_read(tmp_path):
    """They added up to the files, in what a run's memory is measured by."""
    dataset = tiny.dataset((40,) * 64)
    taught = TaughtRows(tmp_path / "rows", dataset, 500, is_full=True)
    counts = [int(dataset.is_target[slice(*dataset.offsets[i : i + 2])].sum()) for i in range(64)]
    given = [(np.full((n, 500), i, np.int64), np.full((n, 500), -i, np.float32)) for i, n in enumerate(counts)]
    taught.write(0, given)
    values = taught.arrays()[TEACHER_TOKENS].values
    rows = [values[dataset.offsets[i] : dataset.offsets[i + 1]] for i in range(64)]
    assert all((row[row > 0] == i).all() for i, row in enumerate(rows))
    mapped = Path("/proc/self/smaps").read_text().split(str(tmp_path))[1:]
    resident = [int(part.split("Rss:")[1].split()[0]) for part in mapped]
    assert resident and max(resident) <= 64, resident


@pytest.mark.slow
def test_a_signal_while_the_teacher_reads_ends_the_run_and_what_was_read_is_kept(flags, tmp_path):
    rows = [{"prompt": f"{i}? ", "completion": f"It is {i}. " * 8} for i in range(6000)]
    dataset = str(jsonl(tmp_path / "rows.jsonl", rows))
    changes = dict(dataset=dataset, context_length=256, teacher_cache=str(tmp_path / "cache"), batch_size="auto")
    process = subprocess.Popen(
        command(flags | changes, output_dir=str(tmp_path / "o")), stdout=subprocess.PIPE, text=True
    )
    while not list((tmp_path / "cache").rglob("part-000001-*")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    parts = list((tmp_path / "cache").rglob("part-*"))
    assert 2 <= len(parts) < -(-len(rows) // 512)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [dict(world_size=2), dict(world_size=2, dp_shards=2)])
def test_two_ranks_are_one_and_share_the_reading(flags, tmp_path, changes):
    one = dict(output_dir=str(tmp_path / "one"), batch_size=4, teacher_cache=str(tmp_path / "a"))
    two = dict(output_dir=str(tmp_path / "two"), batch_size=2, teacher_cache=str(tmp_path / "b")) | changes
    for some in (one, two):
        done = finish(command(flags | some))
        assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), atol=1e-5)
    more = {"max_steps": 9, "resume": "auto"}
    done = finish(command(flags | two | more | {"output_dir": str(tmp_path / "one")}))
    assert done.returncode == 0 and len(losses(tmp_path / "one")) == 9, done.stderr


@pytest.mark.slow
def test_rows_in_any_layout_and_of_a_quantized_student_learn_the_same(flags, tmp_path):
    layouts = {"packed": {}, "padded": dict(batch_layout="padded"), "small": dict(microbatch_tokens=70)}
    for name, changes in layouts.items():
        fine_tune(**flags | changes | dict(output_dir=str(tmp_path / name)))
    np.testing.assert_allclose(losses(tmp_path / "padded"), losses(tmp_path / "packed"), rtol=1e-6)
    np.testing.assert_allclose(losses(tmp_path / "small"), losses(tmp_path / "packed"), rtol=1e-6)
    fine_tune(**flags | dict(train_type="qlora", output_dir=str(tmp_path / "q"), teacher_bits=4))
    assert np.isfinite(losses(tmp_path / "q")).all()


def test_a_student_moves_towards_its_teacher(flags, tmp_path):
    changes = dict(max_steps=40, distill_alpha=1.0, batch_size=14, lora_rank=32)
    fine_tune(**flags | changes | dict(output_dir=str(tmp_path / "o")))
    found = [event["loss/divergence"] for event in read_events(tmp_path / "o") if event["event"] == "step"]
    assert found[-1] < 0.5 * found[0]
    assert "Parts of the loss" in (tmp_path / "o" / "report.html").read_text()


def test_tokens_of_a_teacher_that_numbers_them_otherwise_are_mapped(flags, tmp_path):
    """A teacher with two tokens exchanged, in its vocabulary and in its weights, gives what it gave before."""
    other = tmp_path / "teacher"
    model = transformers.AutoModelForCausalLM.from_pretrained(flags["teacher"], dtype=torch.float32)
    tokenizer = json.loads((Path(flags["teacher"]) / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = (word for word, number in vocabulary.items() if number in (300, 301))
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    order = torch.arange(model.config.vocab_size)
    order[[300, 301]] = order[[301, 300]]
    with torch.no_grad():
        for weight in {id(w): w for w in (model.get_input_embeddings().weight, model.lm_head.weight)}.values():
            weight.copy_(weight[order].clone())
    model.save_pretrained(other)
    for file in Path(flags["teacher"]).glob("tokenizer*"):
        (other / file.name).write_bytes(file.read_bytes())
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    fine_tune(**flags | dict(output_dir=str(tmp_path / "one")))
    fine_tune(**flags | dict(output_dir=str(tmp_path / "two"), teacher=str(other)))
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-5)


def padded(folder, name: str, out, rows: int) -> str:
    """A copy of the model whose embedding and head have more rows than it has tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    own = model.config.vocab_size
    model.resize_token_embeddings(own + rows, mean_resizing=False)
    with torch.no_grad():  # the rows that are no tokens are the likeliest of all
        model.lm_head.weight[own:] = 3 * model.lm_head.weight[:rows]
    model.save_pretrained(out / name)
    for file in Path(folder).glob("*token*"):
        (out / name / file.name).write_bytes(file.read_bytes())
    return str(out / name)


@pytest.mark.parametrize("backend", [pytest.param("cpu"), pytest.param("mlx", marks=pytest.mark.slow)])
def test_rows_of_a_head_that_are_no_tokens_do_not_matter(flags, tmp_path, backend):
    """Heads of teacher and student have different numbers of them; own answers end before one."""
    changes = dict(distill_alpha=1.0, teacher_top_k=10**6, max_steps=1, backend=backend)
    fine_tune(**flags | changes | dict(output_dir=str(tmp_path / "one")))
    changes |= dict(teacher=padded(flags["teacher"], "teacher", tmp_path, 9))
    fine_tune(**flags | changes | dict(output_dir=str(tmp_path / "two")))
    changes |= dict(model_name=padded(flags["model_name"], "student", tmp_path, 16))
    fine_tune(**flags | changes | dict(output_dir=str(tmp_path / "three")))
    for name in ("two", "three"):
        np.testing.assert_allclose(losses(tmp_path / name), losses(tmp_path / "one"), rtol=1e-5)
    del changes["teacher"], changes["teacher_top_k"]
    fine_tune(
        **{k: v for k, v in (flags | changes).items() if k != "teacher_cache"}
        | dict(on_policy_fraction=1.0, max_completion_length=6, output_dir=str(tmp_path / "four"))
    )
    (step,) = read_events(tmp_path / "four", "step")
    assert step["own_answers"] and np.isfinite(step["loss"])


@pytest.mark.parametrize(
    "changes, fact",
    [
        (dict(preference="dpo"), "contradicts --preference dpo"),
        (dict(streaming=True, max_steps=3), "reads all rows before the first step"),
        (dict(distill_beta=0.2), "is of --distill_loss jsd"),
        (dict(distill_loss="jsd", distill_beta=1.0), "must be below 1"),
        (dict(tp_degree=2, world_size=2), "logits on one rank"),
        (dict(label_smoothing=0.1), "contradicts --label_smoothing"),
        (dict(teacher=None, teacher_top_k=3), "there is no teacher"),
        (dict(teacher="/nowhere/at/all"), "--teacher /nowhere/at/all: no such folder"),
        (dict(teacher_cache=f"{__file__}/cache"), f"--teacher_cache {__file__}/cache: is a file, or is inside one"),
        (dict(teacher_bits=7), "7"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(flags, tmp_path, changes, fact):
    for dry_run in (True, False):
        with pytest.raises(PlanError, match=fact):
            fine_tune(**flags | dict(output_dir=str(tmp_path / "o"), dry_run=dry_run) | changes)


@pytest.mark.parametrize("architecture, sizes", [("llama", "max_position_embeddings"), ("gpt2", "n_positions")])
def test_a_teacher_of_shorter_rows_is_refused(flags, tmp_path, architecture, sizes):
    """A Llama's positions went on past those that it had learned, without a word; GPT-2's ended in an IndexError."""
    other = model_in(tmp_path / "other", 3, 2)
    size = len(transformers.AutoTokenizer.from_pretrained(other))
    tiny.build(architecture, **{"vocab_size": size, sizes: 32}).save_pretrained(other)
    for dry_run in (True, False):
        with pytest.raises(PlanError, match="reads rows of at most 32 tokens, and --context_length is 64"):
            fine_tune(**flags | dict(output_dir=str(tmp_path / "o"), teacher=str(other), dry_run=dry_run))
    how = dict(output_dir=str(tmp_path / "o"), teacher=str(other), context_length=32, max_steps=1)
    assert np.isfinite(losses(Path(fine_tune(**flags | how).output_dir))).all()


def test_what_is_wrong_with_a_teacher_is_said_of_it(flags, tmp_path):
    other = model_in(tmp_path / "other", 3, 2)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][:] = np.nan
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PlanError, match=f"--teacher {other}: LlamaForCausalLM gives logits that are not finite"):
        fine_tune(**flags | dict(output_dir=str(tmp_path / "o"), teacher=str(other)))
    with pytest.raises(StorageError, match="--teacher_cache /proc/none: .* Give a folder that can be written"):
        fine_tune(**flags | dict(output_dir=str(tmp_path / "p"), teacher_cache="/proc/none"))


def test_what_a_killed_writer_left_of_a_part_goes_with_the_next(tmp_path):
    dataset = tiny.dataset((5,) * 4)
    rows = TaughtRows(tmp_path / "rows", dataset, 3, is_full=False)
    given = [
        (np.zeros((int(dataset.document(i)[1].sum()), 3)), np.zeros((int(dataset.document(i)[1].sum()), 4)))
        for i in range(4)
    ]
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # which kills it within the part
        rows.write(0, given)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGXFSZ
    assert len(list((tmp_path / "rows").iterdir())) == 1
    rows.write(0, given)
    assert [path.suffix for path in (tmp_path / "rows").iterdir()] == [".safetensors"]


def test_a_teacher_with_other_tokens_is_refused_before_anything_is_read(flags, tmp_path):
    other = model_in(tmp_path / "other", 3, 2)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    word = next(word for word, number in vocabulary.items() if number == 300)
    vocabulary["xyzzy"] = vocabulary.pop(word)
    tokenizer["model"]["merges"] = [pair for pair in tokenizer["model"]["merges"] if word not in ("".join(pair), *pair)]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    for dry_run in (True, False):
        with pytest.raises(PlanError, match="lacks 1 of the model's"):
            fine_tune(**flags | dict(output_dir=str(tmp_path / "o"), teacher=str(other), dry_run=dry_run))
