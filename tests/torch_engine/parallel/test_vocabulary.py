"""Embedding and head over ranks that each have some rows of the vocabulary."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support import cases, ranks, vocabulary_cases
from tests.support.commands import command, finish
from tests.support.rows import jsonl
from tests.support.runs import losses

HEADS = [
    dict(vocab=60_001),
    dict(vocab=1001, scale=0.25),
    dict(vocab=1001, softcap=3.0),
    dict(vocab=1001, bias=True, smoothing=0.1),
    dict(vocab=1001, adapted=True, softcap=5.0, smoothing=0.2),
    dict(vocab=1001, what="log_probs", bias=True, adapted=True),
    dict(vocab=5, what="log_probs"),
]


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_loss_and_gradients_of_sharded_heads_are_those_of_one_process(size, tmp_path):
    """Sums in another order: a few units of fp32's last digit."""
    for off in ranks.run(size, vocabulary_cases.heads, tmp_path, wanted=HEADS):
        assert max(off) < 2e-6, dict(zip(map(str, HEADS), off, strict=True))


def test_a_sharded_embedding_and_its_gradients_are_those_of_one_process(tmp_path):
    assert ranks.run(2, vocabulary_cases.embeddings, tmp_path) == [0.0, 0.0]


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_vocabularies_that_no_degree_divides_train_as_in_one_process(size, tmp_path):
    layouts = [n for n, dims in cases.DENSE_LAYOUTS.items() if dims.tp > 1 and dims.world_size == size]
    wanted = [(n, kind, model) for n in layouts for kind in ("full", "lora") for model in UNEVEN]
    for figures in ranks.run(size, cases.matrix, tmp_path, wanted=wanted)[0]:
        cases.check(figures, cases.LAYOUTS[figures["layout"]])


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_fsdp2_trains_as_one_process_without_gathering_embedding_and_head(size, tmp_path):
    layouts = [n for n, dims in cases.DENSE_LAYOUTS.items() if dims.shards > 1 and dims.world_size == size]
    layouts = ["FSDP2 2"] if size == 2 else layouts
    kinds = ["full rows"] if size == 2 else list(cases.OF_ROWS)
    models = ["llama_uneven_tied"] if size == 2 else ["gemma3", *UNEVEN]
    wanted = [(n, kind, model) for n in layouts for kind in kinds for model in models]
    for figures in ranks.run(size, cases.matrix, tmp_path, wanted=wanted)[0]:
        cases.check(figures, cases.LAYOUTS[figures["layout"]])


UNEVEN = ("llama_uneven", "llama_uneven_tied")
TRAINED_ENDS = {
    "full": ("--train_type full", "model.safetensors"),
    "adapters": ("--lora_target_modules q_proj,embed_tokens,lm_head", "adapter_model.safetensors"),
    "adapters with magnitudes": (
        "--lora_target_modules q_proj,embed_tokens,lm_head --use_dora",
        "adapter_model.safetensors",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAINED_ENDS)
def test_whatever_trains_of_embedding_and_head_is_saved_as_by_one_process(kind, base, tmp_path):
    flags, file = TRAINED_ENDS[kind]
    base = {name: value for name, value in base.items() if kind != "full" or not name.startswith("lora")}
    for name, more in (("one", "--batch_size 4"), ("two", "--batch_size 4 --world_size 2 --tp_degree 2")):
        code, _, err = finish(command(base, flags, "--max_steps 3", more, output_dir=tmp_path / name))
        assert code == 0, err
    same_weights(tmp_path / "one", tmp_path / "two", file)


def same_weights(one, two, file: str) -> None:
    assert losses(two) == pytest.approx(losses(one), rel=cases.LOSS)
    saved, found = load_file(one / file), load_file(two / file)
    assert saved.keys() == found.keys()
    for name, tensor in saved.items():
        np.testing.assert_allclose(found[name], tensor, atol=1e-4)


OF_ROWS = {
    "full": ("--train_type full", "model.safetensors"),
    "lora": ("", "adapter_model.safetensors"),
    "new tokens": ("--new_tokens <a>,<b>,<c>", "adapter_model.safetensors"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OF_ROWS)
def test_a_run_that_gathers_no_vocabulary_is_that_of_one_process(kind, base, tmp_path):
    """It is resumed by one process, and scored beside its steps."""
    flags, file = OF_ROWS[kind]
    base = {name: value for name, value in base.items() if kind != "full" or not name.startswith("lora")}
    scored = jsonl(tmp_path / "scored.jsonl", [{"prompt": "the cat", "completion": "sat"}] * 3)
    common = f"{flags} --save_every 2 --score_dataset {scored} --score_max_new_tokens 4"
    ranked = "--batch_size 2 --world_size 2 --vocab_parallel true"
    for name, more in (("one", "--batch_size 4"), ("two", ranked)):
        for steps, again in ((2, more), (4, "--resume auto --world_size 1")):
            code, _, err = finish(command(base, common, f"--max_steps {steps}", again, output_dir=tmp_path / name))
            assert code == 0, err
    same_weights(tmp_path / "one", tmp_path / "two", file)
