"""A teacher judges answers of the model's own: the loss is TRL's, on any ranks, and after a restart to the bit."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from trl.experimental.gkd import GKDTrainer

from finetune.checkpoint.store import newest_checkpoint
from finetune.errors import PlanError
from finetune.generation import Sampled
from finetune.rewards.own_answers import within
from finetune.torch_engine.distillation import sampled_kl
from tests.support.cells import but_slow
from tests.support.commands import command, finish
from tests.support.rows import jsonl
from tests.support.runs import RUN, WHOLE_STATE, copy_up_to, losses, read_events, same_files
from tests.support.small_runs import THREE_STEPS, TWO_RANKS, model_in, without_lora
from train import fine_tune

MOST = 6
GREEDY = dict(temperature=1e-4)  # below the distance of any two logits
ALONE = dict(on_policy_fraction=1.0, distill_alpha=1.0)


def token_rows(tokenizer, count: int = 14) -> list[dict]:
    rows = []
    for i in range(count):
        prompt = tokenizer(f"{i} plus {i}? ").input_ids
        answer = [*tokenizer(f"It is {2 * i}, said {'so ' * (i % 4)}.").input_ids, tokenizer.eos_token_id]
        rows.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    return rows


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    root = tmp_path_factory.mktemp("judging")
    student = model_in(root / "student", 1, 2)
    rows = token_rows(transformers.AutoTokenizer.from_pretrained(student))
    return (
        RUN
        | THREE_STEPS
        | dict(
            model_name=str(student),
            teacher=str(model_in(root / "teacher", 2, 3, initializer_range=0.3)),  # sharp
            dataset=str(jsonl(root / "rows.jsonl", rows)),
            train_type="lora",
            on_policy_fraction=0.5,
            max_completion_length=MOST,
        )
    )


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory):
    """A run of three steps with dropout, each of which is saved."""
    folder = tmp_path_factory.mktemp("whole") / "o"
    fine_tune(**flags | dict(save_every=1, lora_dropout=0.1, output_dir=str(folder)))
    return folder


def steps_in(folder: Path) -> list[dict]:
    return read_events(folder, "step")


def greedy_answer(model, prompt: list[int], ends: set[int]) -> list[int]:
    """The likeliest tokens one after the other, each by a forward of its own."""
    found: list[int] = []
    while len(found) < MOST and not (found and found[-1] in ends):
        found.append(int(model(torch.tensor([prompt + found])).logits[0, -1].argmax()))
    return found


@pytest.mark.parametrize(
    "loss, beta", but_slow([("forward_kl", 0.0), ("reverse_kl", 1.0), ("jsd", 0.3)], [("jsd", 0.3)])
)
def test_the_loss_of_own_answers_is_trl_s_on_the_same_answers(flags, tmp_path, loss, beta):
    changes = ALONE | GREEDY | dict(distill_loss=loss, teacher_top_k=10**6, max_steps=1, batch_size=14)
    if loss == "jsd":
        changes["distill_beta"] = beta
    fine_tune(**flags | changes | dict(output_dir=str(tmp_path / "o")))
    names = ("model_name", "teacher")
    models = [transformers.AutoModelForCausalLM.from_pretrained(flags[name], dtype=torch.float32) for name in names]
    tokenizer = transformers.AutoTokenizer.from_pretrained(flags["model_name"])
    ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
    total = count = 0.0
    for row in map(json.loads, Path(flags["dataset"]).read_text().splitlines()):
        prompt = row["input_ids"][: row["labels"].count(-100)]
        with torch.no_grad():
            answer = greedy_answer(models[0], prompt, ends)
            logits = [model(torch.tensor([prompt + answer])).logits[:, len(prompt) - 1 : -1] for model in models]
        labels = torch.tensor([answer])
        total += float(GKDTrainer.generalized_jsd_loss(*logits, labels=labels, beta=beta, reduction="sum"))
        count += len(answer)
    (step,) = steps_in(tmp_path / "o")
    assert step["own_answers"] == 14
    assert step["num_targets"] == count
    assert step["completions/mean_length"] == pytest.approx(count / 14)
    assert step["loss"] == pytest.approx(total / count, rel=1e-6)
    assert step["loss"] == pytest.approx(step["loss/divergence"], rel=1e-6)
    assert "loss/nll" not in step


def test_an_answer_ends_before_an_id_that_is_no_token():
    answer = Sampled([5, 6, 9, 7], [-0.1, -0.2, -0.3, -0.4], ended=False)
    assert within(answer, 10, 2) is answer
    assert within(answer, 9, 2) == Sampled([5, 6, 2], [-0.1, -0.2, -0.3], ended=True)
    assert within(answer, 9, None) == Sampled([5, 6], [-0.1, -0.2], ended=False)


def test_a_fraction_of_the_rows_is_answered_and_the_others_are_learned_with_their_targets(flags, tmp_path):
    """Each step draws other rows, about as many as the fraction says; none of them has an NLL."""
    changes = dict(batch_size=14, max_steps=12, max_completion_length=1, distill_alpha=0.4, lr=1e-9)
    fine_tune(**flags | changes | dict(output_dir=str(tmp_path / "o")))
    found = [step["own_answers"] for step in steps_in(tmp_path / "o")]
    assert len(set(found)) > 3 and 0.35 < sum(found) / (12 * 14) < 0.65
    for step in steps_in(tmp_path / "o"):  # an answer of its own is one target
        of_rows = step["num_targets"] - step["own_answers"]
        whole = 0.4 * step["loss/divergence"] * step["num_targets"] + 0.6 * step["loss/nll"] * of_rows
        assert step["loss"] * step["num_targets"] == pytest.approx(whole, rel=1e-5)


def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(whole, flags, tmp_path):
    stopped = copy_up_to(whole, 2, tmp_path / "stopped")
    fine_tune(**flags | dict(save_every=1, lora_dropout=0.1, output_dir=str(stopped), resume="auto"))
    assert losses(stopped) == losses(whole)
    last = [newest_checkpoint(folder)[0].folder for folder in (stopped, whole)]
    same_files(*last, WHOLE_STATE)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [*TWO_RANKS, dict(world_size=2, dp_shards=2, distill_loss="sampled_kl")])
def test_two_ranks_are_one(flags, tmp_path, changes):
    one = dict(output_dir=str(tmp_path / "one"), batch_size=4, distill_loss=changes.get("distill_loss", "jsd"))
    two = dict(output_dir=str(tmp_path / "two"), batch_size=2, distill_loss="jsd") | changes
    for some in (one, two):
        done = finish(command(flags | some))
        assert done.returncode == 0, done.stderr
    counts = [[step["own_answers"] for step in steps_in(tmp_path / name)] for name in ("one", "two")]
    assert counts[0] == counts[1]
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    but_slow(
        [
            dict(batch_layout="padded"),
            dict(microbatch_tokens=70),
            dict(batch_size=1, gradient_accumulation_steps=5),
            dict(teacher_offload="disk"),
            dict(batch_layout="padded", distill_loss="sampled_kl"),
        ],
        [dict(batch_layout="padded")],
    ),
)
def test_layouts_and_places_of_the_teacher_change_nothing(flags, tmp_path, changes):
    loss = {name: word for name, word in changes.items() if name == "distill_loss"}
    fine_tune(**flags | loss | dict(output_dir=str(tmp_path / "one")))
    fine_tune(**flags | changes | dict(output_dir=str(tmp_path / "two")))
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=2e-6)


def test_a_sampled_token_s_expected_gradient_is_that_of_the_reverse_kl():
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(2, 50, generator=generator)
    logits_V = drawn[0].requires_grad_()
    log_p_V, log_q_V = logits_V.log_softmax(-1), drawn[1].log_softmax(-1)
    whole = (log_p_V.exp() * (log_p_V - log_q_V)).sum()
    (wanted,) = torch.autograd.grad(whole, logits_V, retain_graph=True)
    expected = (log_p_V.detach().exp() * sampled_kl(log_p_V, log_q_V)).sum()  # over all tokens that may be sampled
    (found,) = torch.autograd.grad(expected, logits_V)
    assert float(expected) == pytest.approx(float(whole), rel=1e-6)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def test_the_divergence_of_sampled_tokens_is_that_of_both_models_at_them(flags, tmp_path):
    changes = dict(distill_loss="sampled_kl", distill_alpha=0.3, max_steps=1, batch_size=14, max_completion_length=40)
    fine_tune(**flags | changes | dict(output_dir=str(tmp_path / "one")))
    changes |= dict(distill_loss="reverse_kl", teacher_top_k=10**6)
    fine_tune(**flags | changes | dict(output_dir=str(tmp_path / "all")))
    (one,), (of_all,) = steps_in(tmp_path / "one"), steps_in(tmp_path / "all")
    assert [one[name] for name in ("own_answers", "num_targets")] == [
        of_all[name] for name in ("own_answers", "num_targets")
    ]
    assert one["loss/nll"] == pytest.approx(of_all["loss/nll"], rel=1e-6)
    # The mean over some 250 sampled tokens, whose log-ratios deviate by about 1.3.
    assert one["loss/divergence"] == pytest.approx(of_all["loss/divergence"], abs=0.35)
    assert one["loss/divergence"] != of_all["loss/divergence"]


@pytest.mark.slow
def test_a_student_moves_towards_its_teacher_on_what_it_says_itself(flags, tmp_path):
    teacher = str(model_in(tmp_path / "teacher", 2, 3, initializer_range=0.1))
    changes = ALONE | dict(teacher=teacher, train_type="full", max_steps=30, batch_size=14, distill_loss="reverse_kl")
    fine_tune(**without_lora(flags) | changes | dict(output_dir=str(tmp_path / "o")))
    found = [step["loss/divergence"] for step in steps_in(tmp_path / "o")]
    assert np.mean(found[-5:]) < 0.6 * np.mean(found[:5])


def test_rows_that_ask_nothing_are_learned_as_they_are_and_said(flags, tmp_path, capsys):
    rows = [json.loads(line) for line in Path(flags["dataset"]).read_text().splitlines()]
    for row in rows[:3]:
        row["labels"] = row["input_ids"]
    mixed = str(jsonl(tmp_path / "mixed.jsonl", rows))
    fine_tune(**flags | dict(dataset=mixed, output_dir=str(tmp_path / "o"), max_steps=1, batch_size=14, **ALONE))
    assert "3 rows without a prompt" in capsys.readouterr().out
    assert steps_in(tmp_path / "o")[0]["own_answers"] == 11
    nothing = str(jsonl(tmp_path / "nothing.jsonl", rows[:3]))
    with pytest.raises(PlanError, match="--on_policy_fraction: no row has a prompt that leaves an answer"):
        fine_tune(**flags | dict(dataset=nothing, output_dir=str(tmp_path / "p")))


@pytest.mark.parametrize(
    "changes, fact",
    [
        (dict(teacher=None, max_completion_length=256), "--on_policy_fraction 0.5: there is no teacher"),
        (dict(on_policy_fraction=0.0), "--max_completion_length 6: is for answers that are sampled"),
        (dict(teacher_cache="/tmp/cache"), "what it gives of sampled answers is not kept"),
        (
            dict(distill_loss="sampled_kl", on_policy_fraction=0.0, max_completion_length=256),
            "is of answers that the model samples",
        ),
        (dict(distill_loss="sampled_kl", temperature=0.5), "contradicts --temperature 0.5"),
        (dict(train_on_prompt=True), "contradicts --train_on_prompt true: prompts are answered"),
        (dict(on_policy_fraction=1.5), "on_policy_fraction"),
        (dict(teacher_offload="host"), "--teacher_offload host: .* have one memory. Use disk"),
        (dict(num_generations=4), "--num_generations 4: is for --reward"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(flags, tmp_path, changes, fact):
    for dry_run in (True, False):
        with pytest.raises(PlanError, match=fact):
            fine_tune(**flags | dict(output_dir=str(tmp_path / "o"), dry_run=dry_run) | changes)
