"""--task reward_model: loss and gradients are those of TRL's RewardTrainer, and results open as transformers' class."""

import json

import numpy as np
import peft
import pytest
import torch
import transformers

import export
import score
from finetune.errors import PlanError
from finetune.run.head_scores import of_pairs
from tests.run.test_classify import opened
from tests.support.runs import WHOLE_STATE, read_events
from tests.support.small_runs import (
    TWO_RANKS,
    head_flags,
    learns_the_same_in_all_layouts,
    one_and_two_ranks,
    resumes_bitwise,
    without_lora,
)
from train import fine_tune

ROWS = [
    {"prompt": f"What is {i}? ", "chosen": f"It is {i}, {'so ' * (i % 4)}yes", "rejected": f"No {'idea ' * (i % 3)}{i}"}
    for i in range(14)
]


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return head_flags(tmp_path_factory.mktemp("rewards"), "reward_model", ROWS, num_held_out=5)


@pytest.fixture(scope="module")
def trained(flags, tmp_path_factory):
    return fine_tune(**flags | dict(output_dir=str(tmp_path_factory.mktemp("trained") / "o")))


def scores_by(model, folder) -> np.ndarray:
    """Scores of chosen and rejected answers of the held-out rows, in one padded batch."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="right")
    texts = [row["prompt"] + row[name] + tokenizer.eos_token for row in ROWS[:5] for name in ("chosen", "rejected")]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        return model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits[:, 0].numpy()


def test_loss_and_gradients_are_those_of_trl(flags, tmp_path):
    """All weights train, at a rate so small that the saved ones are the first."""
    trl = pytest.importorskip("trl")
    import datasets

    changes = dict(train_type="full", lr=1e-12, max_steps=1, batch_size=len(ROWS), output_dir=str(tmp_path / "o"))
    fine_tune(**without_lora(flags) | changes)
    (step,) = read_events(tmp_path / "o", "step")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "o")
    args = trl.RewardConfig(
        output_dir=str(tmp_path / "trl"),
        per_device_train_batch_size=len(ROWS),
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    trainer = trl.RewardTrainer(
        opened(tmp_path / "o"), args=args, train_dataset=datasets.Dataset.from_list(ROWS), processing_class=tokenizer
    )
    batch = next(iter(trainer.get_train_dataloader()))
    loss, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    chosen, rejected = outputs.logits[:, 0].chunk(2)
    loss.backward()
    grads = [p.grad.norm() for p in trainer.model.parameters() if p.grad is not None]
    assert step["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert step["grad_norm"] == pytest.approx(torch.stack(grads).norm().item(), rel=1e-5)
    assert step["rewards/margins"] == pytest.approx((chosen - rejected).mean().item(), abs=1e-6)


def test_peft_transformers_and_score_read_the_adapter_and_what_is_merged(trained, flags, tmp_path, capsys):
    last = read_events(trained.folder, "eval")[-1]
    head = json.loads(open(f"{trained.folder}/head.json").read())
    base = opened(flags["model_name"], num_labels=1, pad_token_id=head["pad_token_id"])
    export.main(["--checkpoint", trained.folder, "--output_dir", str(tmp_path / "merged")])
    models = [peft.PeftModel.from_pretrained(base, trained.folder).eval(), opened(tmp_path / "merged")]
    for model in models:
        found = of_pairs(scores_by(model, trained.folder))
        assert found == pytest.approx({name: last[name] for name in found}, rel=1e-4, abs=1e-5)
    args = ["--device", "cpu", "--precision", "fp32", "--dataset", flags["validation_dataset"], "--json"]
    for folder in (trained.folder, str(tmp_path / "merged")):
        capsys.readouterr()
        assert score.main(["--checkpoint", folder, *args]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["rewards/accuracies"] == last["rewards/accuracies"]
        assert found["loss"] == pytest.approx(last["loss"], rel=1e-5)
    page = open(f"{trained.folder}/report.html").read()
    assert f"{last['rewards/accuracies']:.1%} of 5 (" in page


@pytest.mark.slow
def test_packed_padded_small_and_accumulated_pairs_learn_the_same(flags, tmp_path):
    unseen = flags | dict(validation_dataset=None)
    learns_the_same_in_all_layouts(unseen, tmp_path, "rewards/margins", small=60, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(flags, tmp_path):
    resumes_bitwise(flags | dict(lora_dropout=0.1), tmp_path, WHOLE_STATE)


def test_what_was_preferred_is_scored_higher_afterwards(flags, tmp_path):
    changes = dict(max_steps=25, batch_size=14, output_dir=str(tmp_path / "o"))
    result = fine_tune(**flags | changes)
    last = read_events(tmp_path / "o", "eval")[-1]
    assert last["rewards/accuracies"] == 1.0 and last["rewards/margins"] > 1.0
    with pytest.raises(PlanError, match="answers nothing"):
        result.generate("What is 1?")


@pytest.mark.parametrize(
    "changes, fact",
    [
        (dict(dataset=[{"prompt": "a", "completion": "b"}]), "--task reward_model needs columns chosen and rejected"),
        (dict(preference="dpo"), "contradicts --preference"),
        (dict(class_names=["a", "b"]), "labels of --task classify"),
        (dict(train_on_prompt=True), "--task reward_model"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(flags, tmp_path, changes, fact):
    with pytest.raises(PlanError, match=fact) as error:
        fine_tune(**flags | dict(output_dir=str(tmp_path / "o")) | changes)
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("changes", TWO_RANKS)
def test_two_ranks_are_one(flags, tmp_path, changes):
    first, second = one_and_two_ranks(flags, tmp_path, changes)
    assert second["rewards/margins"] == pytest.approx(first["rewards/margins"], rel=1e-3)


def test_pairs_in_another_form_than_those_learned_are_said(trained):
    rows = [
        {"prompt": [{"role": "user", "content": row["prompt"]}]}
        | {name: [{"role": "assistant", "content": row[name]}] for name in ("chosen", "rejected")}
        for row in ROWS[:5]
    ]
    (line,) = [line for line in trained.score(rows)["notes"] if "another form" in line]
    assert line.startswith(
        "note: 5 of the 5 rows are messages, rendered by the chat template, and the run learned texts"
    )
    assert not [line for line in trained.score(ROWS).get("notes", []) if "another form" in line]
