"""A made-up head of classes trains in every layout and on every kind of ranks, resumes, and is one that PEFT reads."""

import copy
import json
from dataclasses import replace

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import save_file

from finetune.config import TrainConfig
from finetune.data.run_data import Data
from finetune.distributed.env import RankEnv
from finetune.parts.heads import HEADS
from finetune.parts.objectives import OBJECTIVES
from finetune.parts.parts import Parts
from finetune.torch_engine.parallel.process_groups import SINGLE_PROCESS, ProcessGroups
from finetune.torch_engine.weights.load import add_head
from tests.support import cases, class_head, ranks, tiny
from tests.support.build import torch_engine
from tests.support.engine_access import process_groups

LABELS = 3
LAYOUTS = ("DDP 2", "FSDP2 2", "TP 2", "CP 2", "PP 2")


@pytest.fixture(autouse=True)
def rows(monkeypatch):
    monkeypatch.setitem(HEADS, class_head.WORD, class_head.HEAD)
    monkeypatch.setitem(OBJECTIVES, class_head.WORD, class_head.ROW)


def engine_of(groups=SINGLE_PROCESS, layout: str = "auto"):
    settings = replace(
        TrainConfig(),
        train_type="lora",
        precision="fp32",
        lora_rank=4,
        lr=1e-3,
        preference=class_head.WORD,
        preference_beta=float(LABELS),
        use_gradient_checkpointing="true",
    )
    model = tiny.build("llama", intermediate_size=128)
    model.requires_grad_(False)
    cases.add_frozen_base_and_adapters(model, cases.CASES["lora"], settings, cases.CPU)
    add_head(model, Parts(settings).objective, settings.seed, None)
    built = torch_engine(model, settings, ranks=groups)
    built.verify(layout)
    return built


def steps(built, number: int = 3, tokens: int = 20) -> list[list[float]]:
    """[loss, norm, accuracy] of each step, and of an evaluation at the end."""
    dataset = class_head.labelled(cases.DATA, LABELS)
    data = Data(None, set(), dataset, None, [], None, None)
    groups = process_groups(built)
    plan = Parts(replace(built.plan.settings, batch_layout=built.layout, microbatch_tokens=tokens))
    mine = slice(groups.data_rank, None, groups.dims.data_ranks)
    found = []
    for step in range(number):
        batches = data.microbatches(dataset, range(step * 5, step * 5 + 5), mine, plan, 0, 8)
        result = built.train_step(batches, 1e-2)
        found.append([result.loss, result.grad_norm, result.metrics["accuracy"]])
    result = built.evaluate(data.microbatches(dataset, range(10), slice(None), plan, 0, 8))
    return [*found, [result.loss, result.num_rows, result.metrics["accuracy"]]]


@pytest.fixture(scope="module")
def whole():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(HEADS, class_head.WORD, class_head.HEAD)
        patch.setitem(OBJECTIVES, class_head.WORD, class_head.ROW)
        found = steps(engine_of())
    assert found[2][0] != found[0][0] and found[-1][1] == 10
    return found


def test_a_head_of_classes_trains_alike_packed_padded_and_in_one_microbatch(whole):
    for found in (steps(engine_of(layout="padded")), steps(engine_of(), tokens=1000)):
        np.testing.assert_allclose(found, whole, rtol=1e-4, atol=1e-5)  # fp32, through Adam


def test_a_resumed_head_of_classes_is_bitwise_the_uninterrupted_one():
    first = engine_of()
    steps(first, 2)
    kept = copy.deepcopy((first.trainable_state(), *first.optimizer_state(), first.rng_state()))
    assert "base_model.model.score.weight" in kept[0]
    second = engine_of()
    second.load_state(*kept)
    assert steps(second, 2) == steps(first, 2)


def test_peft_reads_a_trained_head_of_classes(tmp_path):
    built = engine_of()
    steps(built, 2)
    config = built.describe_weights("base", "digest")["adapter_config.json"]
    assert config["task_type"] == "SEQ_CLS" and config["modules_to_save"] == ["score"]
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    arrays = {name: torch.from_numpy(array) for name, array in built.trainable_state().items()}
    save_file(arrays, tmp_path / "adapter_model.safetensors", metadata={"format": "pt"})
    causal = tiny.build("llama", intermediate_size=128)
    base = transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(**causal.config.to_dict() | {"num_labels": LABELS})
    )
    base.model.load_state_dict(causal.model.state_dict())
    theirs = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    dataset = class_head.labelled(cases.DATA, LABELS)
    data = Data(None, set(), dataset, None, [], None, None)
    plan = Parts(replace(built.plan.settings, batch_layout=built.layout, microbatch_tokens=1000))
    (batch,) = data.microbatches(dataset, range(3), slice(None), plan, 0, 8)
    built.model.eval()
    with torch.no_grad():
        own = built.forward.document_outputs(batch)
        ids = [torch.from_numpy(dataset.document(row)[0].astype(np.int64))[None] for row in batch.rows]
        wanted = torch.cat([theirs(input_ids=each).logits for each in ids])
    torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-5)  # fp32


def classes_on_ranks(rank: int, size: int, layouts: list[str]) -> list[list]:
    """The steps on each layout of the ranks."""
    class_head.add_rows()
    return [steps(engine_of(ProcessGroups.of(RankEnv(rank, size), cases.LAYOUTS[n], cases.DEVICE))) for n in layouts]


@pytest.mark.slow
def test_a_head_of_classes_on_two_ranks_trains_as_on_one(whole, tmp_path):
    for of_rank in ranks.run(2, classes_on_ranks, tmp_path, layouts=LAYOUTS):
        for layout, found in zip(LAYOUTS, of_rank, strict=True):
            # Sums over ranks in another order, through two steps of Adam; fp32.
            np.testing.assert_allclose(found, whole, rtol=1e-4, atol=1e-5, err_msg=layout)
