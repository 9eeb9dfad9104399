"""Losses, gradients and metrics of preference training against TRL's trainers on the same rows, where trl is installed.

TRL's log-probabilities of full models go to our losses; of adapters, our engine's own step is compared: with PEFT's on
the same base, for qlora the one that our nf4 weights dequantize to, as TRL's quantizer is another.
"""

import copy
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from finetune.config import TrainConfig
from finetune.data.collate import microbatches
from finetune.data.mismatched import DataWithMismatches, mismatched_documents
from finetune.data.run_data import Data
from finetune.data.tokens.tokenize import TokenizedDataset, joined_parts, labels_of
from finetune.objectives import Totals
from finetune.parts.parts import Parts
from finetune.quantizers.linear import QuantizedLinear
from finetune.torch_engine import preference
from finetune.torch_engine.lora.peft_format import disk_name
from finetune.torch_engine.passes import Passes
from tests.support import tiny
from tests.support.cells import each_alone
from tests.support.engine_access import trainable_params
from tests.support.engines import assert_same, engine

LAYOUTS = ("padding_free", "padded")
METHODS = ("dpo", "orpo", "simpo", "kto")
PROMPTS = ("the cat", "a dog sat", "it", "the hat of")
ANSWERS = ("sat on the mat", "ran", "is a long story of a cat and a dog", "no")
WEIGHTS = dict(desirable_weight=1.5, undesirable_weight=0.5)
GAMMA = 0.4


@pytest.fixture
def settings(tmp_path):
    """Of trainers of 4 rows."""
    pytest.importorskip("trl")
    return dict(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        beta=0.3,
    )


def trainer_of(method, model, ref, tokenizer, settings, **options):
    """(TRL's trainer, its batch)."""
    import datasets
    import trl
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    rows = dict(prompt=PROMPTS, chosen=ANSWERS, rejected=ANSWERS[::-1])
    if method == "kto":
        rows = dict(prompt=PROMPTS, completion=ANSWERS, label=[True, False, True, True])
    options |= dict(train_dataset=datasets.Dataset.from_dict(rows), processing_class=tokenizer)
    if method == "orpo":
        args = ORPOConfig(**settings, max_length=128, remove_unused_columns=False)
        trainer = ORPOTrainer(model, args=args, **options)
    elif method == "simpo":  # CPO's loss without its nll
        own = dict(loss_type="simpo", simpo_gamma=GAMMA, cpo_alpha=0.0, max_length=128, remove_unused_columns=False)
        trainer = CPOTrainer(model, args=CPOConfig(**settings, **own), **options)
    elif method == "dpo":
        trainer = trl.DPOTrainer(model, ref, args=trl.DPOConfig(**settings), **options)
    else:
        trainer = trl.KTOTrainer(model, ref, args=trl.KTOConfig(**settings, **WEIGHTS), **options)
    return trainer, next(iter(trainer.get_train_dataloader()))


def documents_of(method, batch) -> list:
    """(token ids, is_target) of the batch's documents: of pairs, the chosen ones first."""
    if method in ("orpo", "simpo"):
        names = [(f"{name}_input_ids", f"{name}_labels") for name in ("chosen", "rejected")]
        return [d for ids, labels in names for d in without_padding(batch[ids], batch[labels] != -100)]
    return without_padding(batch["input_ids"], batch["completion_mask"])


def without_padding(ids_BS, mask_BS) -> list:
    found = []
    for ids, mask in zip(ids_BS.numpy(), mask_BS.numpy().astype(bool), strict=True):
        end = mask.nonzero()[0].max() + 1
        found.append((ids[:end], mask[:end]))
    return found


def dataset_of(documents, **facts) -> TokenizedDataset:
    return TokenizedDataset(**joined_parts(documents), sources=("",) * len(documents), counts={}, **facts)


def log_probs_of(built, documents):
    (batch,) = microbatches(dataset_of(documents), range(len(documents)), built.layout, len(documents), 10**6, pad_id=0)
    found = built.forward.document_log_probs(batch)
    return found[torch.tensor(batch.rows).argsort()], torch.tensor([int(mask.sum()) for _, mask in documents])


def nll_of_all_tokens(built, documents):
    """TRL's ORPO learns prompts too, as with --train_on_prompt, but for the first token, which nothing predicts."""
    log_probs, num_targets = log_probs_of(built, [(ids, np.arange(len(ids)) > 0) for ids, _ in documents])
    return -log_probs.sum() / num_targets.sum()


def assert_trains_like(trainer, batch, mine, parameters):
    """Losses and gradients are equal to 1e-5, ours in fp32. `parameters`: ours, by TRL's names.

    TRL's are computed in fp64: what DPO's gradients of both answers have in common cancels, so that two roundings of
    them would differ by up to 1e-5 themselves.
    """
    trainer.model.eval().double()
    if getattr(trainer, "ref_model", None) is not None:
        trainer.ref_model.double()
    theirs = trainer.compute_loss(trainer.model, batch)
    assert mine.item() == pytest.approx(theirs.item(), rel=1e-5)
    mine.backward(), theirs.backward()
    wanted = {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}
    assert_same({n: p.grad for n, p in parameters.items()}, wanted, 1e-5)


@pytest.mark.parametrize(("method", "layout"), each_alone(METHODS, LAYOUTS))
def test_losses_are_those_of_trls_trainer(method, layout, plain_tokenizer, settings):
    size = len(plain_tokenizer)
    model, ref = tiny.build(vocab_size=size), tiny.build(vocab_size=size, seed=7)
    built, frozen = (engine(model=copy.deepcopy(m), train_type="full", layout=layout) for m in (model, ref))
    trainer, batch = trainer_of(method, model, ref, plain_tokenizer, settings)
    documents = documents_of(method, batch)
    policy, counts = log_probs_of(built, documents)
    with torch.no_grad():
        reference, _ = log_probs_of(frozen, documents)
    if method == "dpo":
        mine = preference.dpo(*policy.chunk(2), *reference.chunk(2), beta=0.3).loss_P.mean()
    elif method == "orpo":
        mine = preference.orpo(*policy.chunk(2), *counts.chunk(2), beta=0.3).loss_P.mean()
        mine = mine + nll_of_all_tokens(built, documents[:4])
    elif method == "simpo":
        mine = preference.simpo(*policy.chunk(2), *counts.chunk(2), beta=0.3, gamma=GAMMA).loss_P.mean()
    else:
        others = without_padding(batch["KL_input_ids"], batch["KL_completion_mask"])
        with torch.no_grad():
            point = (log_probs_of(built, others)[0] - log_probs_of(frozen, others)[0]).mean().clamp_min(0).item()
        mine = preference.kto(policy, reference, batch["label"].bool(), point, 0.3, 1.5, 0.5).loss_D.mean()
    assert_trains_like(trainer, batch, mine, trainable_params(built))


@pytest.mark.parametrize(("method", "layout", "train_type"), each_alone(METHODS, LAYOUTS, ["lora", "qlora"]))
def test_a_step_of_adapters_is_that_of_trls_trainer(method, train_type, layout, plain_tokenizer, settings):
    import peft

    model = tiny.build(vocab_size=len(plain_tokenizer))
    own = dict(preference=method, preference_beta=0.3, simpo_gamma=GAMMA, **WEIGHTS)
    built = engine(model=copy.deepcopy(model), train_type=train_type, layout=layout, **own)
    bases = {n: m.base for n, m in built.model.named_modules() if isinstance(getattr(m, "base", None), torch.nn.Module)}
    for name, base in bases.items():
        if isinstance(base, QuantizedLinear):
            model.get_submodule(name).weight.data = base.weight_of(base.stored(), torch.float32).clone()
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules=list(bases), init_lora_weights=True)
    trainer, batch = trainer_of(method, model, None, plain_tokenizer, settings, peft_config=config)
    if method == "kto":  # towards mismatched answers, so that the reference point is above zero
        others = without_padding(batch["KL_input_ids"], batch["KL_completion_mask"])
        log_probs_of(built, others)[0].sum().backward()
        for parameter in trainable_params(built).values():
            parameter.data += 0.01 * parameter.grad
            parameter.grad = None
    weights = {name: torch.from_numpy(value) for name, value in built.trainable_state().items()}
    left = peft.set_peft_model_state_dict(trainer.model, weights)
    assert not left.unexpected_keys

    documents = documents_of(method, batch)
    if method == "kto":
        dataset = dataset_of(documents, arrays=labels_of(batch["label"].bool().numpy()))
        mine = mismatched_documents(dataset, range(4), slice(None), 512, dataset)
        for i, (ids, is_target) in enumerate(others):
            assert all(map(np.array_equal, mine.document(i), (ids, is_target)))
    else:
        dataset = dataset_of([documents[i + 4 * k] for i in range(4) for k in (0, 1)], documents_per_row=2)
    plan = Parts(TrainConfig(batch_layout=layout, microbatch_tokens=10**6, **own))
    objective, kind = built.objective, DataWithMismatches if method == "kto" else Data
    data = kind(None, set(), dataset, None, [], None, None)
    made = data.microbatches(dataset, range(4), slice(None), plan, 0, 4)
    (one,), statistics = objective.prepare(Passes(built.parallel, nullcontext), made)
    totals = Totals(objective.count(one), statistics)
    mine, observed = objective.loss(built.forward, one, totals)
    mine = mine / totals.count
    assert totals.count == 4 and (method != "kto" or statistics["kl"] > 0)
    if method == "orpo":
        chosen, num_targets = log_probs_of(built, documents[:4])
        mine = mine + chosen.sum() / num_targets.sum() + nll_of_all_tokens(built, documents[:4])
    names = {n: disk_name(n).replace(".weight", ".default.weight") for n in trainable_params(built)}
    assert_trains_like(trainer, batch, mine, {names[n]: p for n, p in trainable_params(built).items()})
    logged = trainer._stored_metrics["train"] if method in ("orpo", "simpo") else trainer._metrics["eval"]
    shown = {name: values[-1] for name, values in logged.items() if name.startswith("rewards/") or name == "kl"}
    means = objective.means(objective.sums_of(observed), totals)
    if method == "kto":
        del means["rewards/accuracies"]  # TRL has none
    assert means == pytest.approx(shown, rel=1e-4, abs=1e-5)  # sums of log-probabilities of 60
