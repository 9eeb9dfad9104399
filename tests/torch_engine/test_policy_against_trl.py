"""Losses and gradients of rewarded answers against TRL's GRPOTrainer and RLOOTrainer on the same tokens, advantages and
log-probabilities, where trl is installed. Adapters are compared with PEFT's on the same base, for qlora the one that
our nf4 weights dequantize to.
"""

import copy

import numpy as np
import pytest
import torch

from finetune.arrays import Named, Per
from finetune.data.collate import microbatches
from finetune.data.tokens.tokenize import TokenizedDataset, joined_parts
from finetune.objectives import Totals
from finetune.parts.objectives import OBJECTIVES, reward_losses
from finetune.quantizers.linear import QuantizedLinear
from finetune.rewards import rollouts
from finetune.rewards.advantages import Lengths, advantages, token_weights
from finetune.torch_engine.lora.peft_format import disk_name
from tests.support import tiny
from tests.support.cells import each_alone
from tests.support.engine_access import trainable_params
from tests.support.engines import assert_same, engine

LAYOUTS = ("padding_free", "padded")
MOST = 6  # tokens of an answer
GROUP = 4
# TRL's settings of a loss.
THEIRS = {
    "grpo": dict(loss_type="grpo"),
    "dr_grpo": dict(loss_type="dr_grpo"),
    "dapo": dict(loss_type="dapo"),
    "gspo": dict(loss_type="grpo", importance_sampling_level="sequence"),
    "rloo": {},
}
SETTINGS = dict(clip_low=0.2, clip_high=0.3)


def answers(vocab: int):
    """(prompt ids, answer ids) of two groups of answers."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, vocab, n).tolist() for n in (5, 3)]
    lengths = (2, 6, 1, 4, 3, 3, 5, 2)
    return [(prompts[i // GROUP], rng.integers(3, vocab, n).tolist()) for i, n in enumerate(lengths)]


def theirs_of(rows, tokenizer, found, tmp_path, model, loss, beta, **options):
    """(TRL's trainer, its inputs)."""
    import datasets
    import trl

    settings = dict(
        output_dir=str(tmp_path),
        per_device_train_batch_size=len(rows),
        num_generations=GROUP,
        max_completion_length=MOST,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        beta=beta,
        epsilon=SETTINGS["clip_low"],
        epsilon_high=SETTINGS["clip_high"],
        **THEIRS[loss],
    )
    kind, config = (trl.RLOOTrainer, trl.RLOOConfig) if loss == "rloo" else (trl.GRPOTrainer, trl.GRPOConfig)
    trainer = kind(
        model,
        reward_funcs=lambda completions, **rest: [0.0] * len(completions),
        args=config(**settings),
        train_dataset=datasets.Dataset.from_dict(dict(prompt=["the cat"] * 8)),
        processing_class=tokenizer,
        **options,
    )
    trainer.current_gradient_accumulation_steps = 1
    longest = max(len(prompt) for prompt, _ in rows)
    inputs = dict(
        prompt_ids=torch.tensor([[0] * (longest - len(p)) + p for p, _ in rows]),
        prompt_mask=torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p, _ in rows]),
        completion_ids=torch.tensor([a + [0] * (MOST - len(a)) for _, a in rows]),
        completion_mask=torch.tensor([[1] * len(a) + [0] * (MOST - len(a)) for _, a in rows]),
        advantages=torch.tensor(found["advantages"]).double(),
        num_items_in_batch=torch.tensor(float(sum(len(a) for _, a in rows))),
    )
    for name, key in (("sampled", "old_per_token_logps"), ("reference", "ref_per_token_logps")):
        inputs[key] = torch.tensor([x.tolist() + [0.0] * (MOST - len(x)) for x in found[name]]).double()
    if loss == "rloo":
        inputs["old_logps"] = inputs.pop("old_per_token_logps").sum(1)
    return trainer, inputs


def batch_of(rows, found, loss, layout):
    weights = token_weights(Lengths(np.array([len(a) for _, a in rows]), MOST), OBJECTIVES[loss].rewarded)
    parts = [(np.array(p + a), np.arange(len(p) + len(a)) >= len(p)) for p, a in rows]
    prompts = [p for p, _ in rows]
    arrays = {
        rollouts.ADVANTAGE: Named(found["advantages"], Per.DOCUMENT),
        rollouts.WEIGHT: Named(weights, Per.DOCUMENT),
        rollouts.SAMPLED_LOG_PROB: rollouts._of_tokens(prompts, found["sampled"]),
        rollouts.REFERENCE_LOG_PROB: rollouts._of_tokens(prompts, found["reference"]),
    }
    dataset = TokenizedDataset(**joined_parts(parts), sources=("",) * len(rows), counts={}, arrays=arrays)
    (batch,) = microbatches(dataset, range(len(rows)), layout, len(rows), 10**6, pad_id=0)
    return batch


CELLS = each_alone(reward_losses(), LAYOUTS, ["lora", "qlora", "full"])


@pytest.mark.parametrize(("loss", "layout", "train_type"), CELLS)
def test_a_loss_and_its_gradients_are_those_of_trls_trainer(loss, layout, train_type, plain_tokenizer, tmp_path):
    pytest.importorskip("trl")
    import peft

    beta = 0.05 if loss != "rloo" and train_type != "full" else 0.0
    model = tiny.build(vocab_size=len(plain_tokenizer))
    own = dict(preference=loss, kl_beta=beta, **SETTINGS)
    built = engine(model=copy.deepcopy(model), train_type=train_type, layout=layout, **own)
    rows = answers(len(plain_tokenizer))
    rng = np.random.default_rng(5)
    rewards = rng.integers(0, 3, len(rows)).astype(float)
    scale = "none" if loss in ("dr_grpo", "rloo") else "group"
    found = {"advantages": advantages(rewards, GROUP, scale, loss == "rloo")}
    # Policies that sampled and that are the reference: not far from this one, and partly beyond the clip.
    empty = {"sampled": [np.zeros(len(a)) for _, a in rows], "reference": [np.zeros(len(a)) for _, a in rows]}
    with torch.no_grad():
        batch = batch_of(rows, found | empty, loss, "padding_free")
        now = built.forward.target_log_probs(batch)[0] if layout == "padding_free" else None
    if now is None:
        now = engine(model=copy.deepcopy(model), train_type=train_type, layout="padding_free", **own)
        now = now.forward.target_log_probs(batch)[0].detach()
    each = dict(zip(batch.rows, now.split([len(rows[row][1]) for row in batch.rows]), strict=True))
    each = [each[row].numpy().astype(float) for row in range(len(rows))]
    for name in ("sampled", "reference"):
        found[name] = [x + rng.normal(0, 0.3, len(x)) for x in each]

    options = {}
    if train_type != "full":
        bases = {
            n: m.base for n, m in built.model.named_modules() if isinstance(getattr(m, "base", None), torch.nn.Module)
        }
        for name, base in bases.items():
            if isinstance(base, QuantizedLinear):
                model.get_submodule(name).weight.data = base.weight_of(base.stored(), torch.float32).clone()
        options["peft_config"] = peft.LoraConfig(r=16, lora_alpha=32, target_modules=list(bases))
    trainer, inputs = theirs_of(rows, plain_tokenizer, found, tmp_path, model, loss, beta, **options)
    names = {n: n for n in trainable_params(built)}
    if train_type != "full":
        weights = {name: torch.from_numpy(value) for name, value in built.trainable_state().items()}
        assert not peft.set_peft_model_state_dict(trainer.model, weights).unexpected_keys
        names = {n: disk_name(n).replace(".weight", ".default.weight") for n in trainable_params(built)}
    batch = batch_of(rows, found, loss, layout)
    totals = Totals(built.objective.count(batch))
    mine, observed = built.objective.loss(built.forward, batch, totals)
    mine = mine / totals.count
    trainer.model.train().double()
    theirs = trainer._compute_loss(trainer.model, inputs)
    assert mine.item() == pytest.approx(theirs.item(), rel=1e-5, abs=1e-6)
    mine.backward()
    theirs.backward()
    wanted = {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}
    assert_same({names[n]: p.grad for n, p in trainable_params(built).items()}, wanted, 1e-5)
    means = built.objective.means(built.objective.sums_of(observed), totals)
    if loss in ("grpo", "dr_grpo", "dapo"):
        logged = trainer._metrics["train"]
        assert means["clip_ratio"] == pytest.approx(logged["clip_ratio/region_mean"][-1], abs=1e-6)
        if beta:
            assert means["kl"] == pytest.approx(logged["kl"][-1], rel=1e-4)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_those_of_trls_trainer(scale):
    trainer = pytest.importorskip("trl.trainer.grpo_trainer")
    rewards = torch.tensor([0.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    grouped = rewards.view(-1, GROUP)
    # Its lines on scale_rewards, whose function also samples.
    theirs = rewards - grouped.mean(1).repeat_interleave(GROUP)
    if scale != "none":
        std = trainer.nanstd(grouped, dim=1).repeat_interleave(GROUP) if scale == "group" else trainer.nanstd(rewards)
        theirs = theirs / (std + 1e-4)
    assert advantages(rewards.numpy(), GROUP, scale, False) == pytest.approx(
        theirs.numpy(), abs=1e-6
    )  # theirs are in fp32
