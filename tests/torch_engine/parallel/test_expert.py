"""Experts over ranks from the command line: the run and the adapter of one process, and what is refused."""

import dataclasses
import json

import pytest
import torch
from safetensors.numpy import load_file

from finetune.errors import PlanError
from finetune.estimate.model_shape import ModelShape
from finetune.torch_engine.parallel.slices import Slice
from tests.support import tiny
from tests.support.cases import LOSS
from tests.support.commands import command, finish, refused
from tests.support.plans import plan_of
from tests.support.runs import assert_same_moments, assert_same_run, losses, read_events

ONE = "--batch_size 4 --lr_scheduler constant --max_steps"


@pytest.fixture(scope="module")
def mixture(base, tmp_path_factory):
    """Flags of a run of a tiny Mixtral with 4 experts."""
    folder = tmp_path_factory.mktemp("models") / "mixtral"
    tokenizer = tiny.train_tokenizer(folder, bos=False)
    tiny.build("mixtral", vocab_size=len(tokenizer)).save_pretrained(folder)
    return base | {"model_name": folder}


def train(*flags, output_dir) -> str:
    code, out, err = finish(command(*flags, output_dir=output_dir))
    assert code == 0, err
    return out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "qlora --quantization_backend nf4", "full --router_aux_loss_coef 0.1"])
def test_a_run_over_experts_is_that_of_one_process(mixture, kind, tmp_path):
    flags = mixture | {"train_type": kind.split()[0], "lr": "5e-3" if "lora" in kind else "1e-3"}
    flags = {k: v for k, v in flags.items() if "lora" in kind or k != "lora_rank"}
    more = " ".join(kind.split()[1:])
    train(flags, more, ONE, "6", output_dir=tmp_path / "one")
    out = train(
        flags,
        more,
        "--batch_size 2 --lr_scheduler constant --max_steps 6 --world_size 2 --ep_degree 2",
        output_dir=tmp_path / "two",
    )
    assert "ranks: 2 (dp_shards 2 x ep_degree 2)" in out
    if "lora" not in kind:
        assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=LOSS)
        one, two = ([e["aux_loss"] for e in read_events(tmp_path / n, "step")] for n in ("one", "two"))
        assert two == pytest.approx(one, rel=1e-5)  # router probabilities after AdamW's steps
        assert all(f.exists() for f in (tmp_path / "two" / n for n in ("model.safetensors", "config.json")))
        return
    assert_same_run(tmp_path / "two", tmp_path / "one")
    shapes = (
        {k: v.shape for k, v in load_file(tmp_path / n / "adapter_model.safetensors").items()} for n in ("one", "two")
    )
    assert next(shapes) == next(shapes)
    config, other = (json.loads((tmp_path / n / "adapter_config.json").read_text()) for n in ("one", "two"))
    assert config == other


@pytest.mark.slow
def test_a_run_over_experts_resumes_on_other_degrees(mixture, tmp_path):
    legs = ({}, dict(ep_degree=2), dict(tp_degree=2), dict(ep_degree=2, dp_shards=4), dict(dp_shards=2), {})
    for i, degrees in enumerate(legs):
        world = degrees.get("dp_shards", 2 if degrees else 1)
        batch = 4 if degrees.get("tp_degree") else 4 // world
        flags = f"--batch_size {batch} --world_size {world} --lr_scheduler constant --max_steps {2 * (i + 1)}"
        train(mixture, degrees, flags, "--resume auto" if i else "", output_dir=tmp_path / "out")
    train(mixture, ONE, "12", output_dir=tmp_path / "one")
    # 2e-6: a tensor-parallel rank sums other terms in every layer.
    assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "one"), rel=2e-6)
    assert_same_moments(tmp_path / "one", tmp_path / "out")


SHAPE = ModelShape.from_config({"num_local_experts": 4, "moe_intermediate_size": 64, "num_attention_heads": 4})
AUX = dict(router_aux_loss_coef=0.1)
REFUSED = [
    (dict(ep_degree=3), "--ep_degree 3: takes its ranks from --dp_shards 2, and does not divide it. Use one of 1, 2"),
    (dict(dp_degree=2, ep_degree=2), "--ep_degree 2: takes its ranks from --dp_shards 1"),
    (
        dict(world_size=4, tp_degree=2, ep_degree=2),
        "--ep_degree 2: contradicts --tp_degree 2, which slices every expert already. Use --ep_degree 4 without "
        "--tp_degree, or --tp_degree without --ep_degree.",
    ),
    (dict(world_size=8, ep_degree=8), "--ep_degree 8: does not divide the number of experts 4. Use one of 1, 2, 4."),
    (dict(ep_degree=2, use_cpu_offload=True), "--use_cpu_offload true: contradicts --ep_degree 2"),
    (dict(ep_degree=2, parallel_backend="accelerate"), "--ep_degree 2: accelerate runs data parallelism only here"),
    (AUX | dict(pp_degree=2), "--router_aux_loss_coef 0.1: contradicts --pp_degree 2"),
    (AUX | dict(reentrant_checkpointing=True), "--router_aux_loss_coef 0.1: contradicts --reentrant_checkpointing"),
    (AUX | dict(parallel_backend="accelerate"), "--router_aux_loss_coef 0.1: contradicts --parallel_backend"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_what_does_not_work_is_one_line_of_the_plan(flags, message):
    with pytest.raises(PlanError) as refusal:
        plan_of(shape=SHAPE, **{"world_size": 2} | flags)
    assert str(refusal.value).startswith(message)


def test_a_size_of_experts_that_tensor_parallelism_does_not_divide_is_refused():
    with pytest.raises(PlanError, match="--tp_degree 4: does not divide size of an expert 6. Use one of 1, 2."):
        plan_of(shape=dataclasses.replace(SHAPE, expert_size=6), world_size=4, tp_degree=4)


def test_a_model_without_experts_is_refused(flags):
    assert (
        refused(flags, world_size=2, ep_degree=2) == "--ep_degree 2: the model has no experts. Use --dp_shards instead."
    )


class TwoRanks:
    """Two places of a group, without processes."""

    def __init__(self, index: int):
        self.index = index

    def place(self, group: str) -> tuple[int, int]:
        return self.index, 2


@pytest.mark.parametrize(("dim", "blocks"), [(0, 1), (0, 2), (1, 1), (1, 3)])
def test_slices_of_blocks_are_where_they_say_they_are(dim, blocks):
    full, cut = torch.arange(12 * 12).view(12, 12), Slice(dim, blocks)
    for index in range(2):
        places = [(slice(None),) * dim + (part,) for part in cut.slices(12, TwoRanks(index))]
        assert torch.equal(cut.take(full, TwoRanks(index)), torch.cat([full[p] for p in places], dim))
