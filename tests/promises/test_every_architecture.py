"""Any causal LM that transformers loads: each class of its mapping equals transformers + PEFT, or is refused."""

import json

import pytest
from huggingface_hub.errors import StrictDataclassError

from finetune.errors import PlanError
from tests.support import architectures
from tests.support.commands import command, finish
from tests.support.runs import losses
from train import fine_tune

# One of each cause: a weight read by a kernel, by its dtype, and in place of the layer; positions and masks of the
# model's own; shared blocks; a linear that is none; linear attention; image and text; an output changed in place.
ONE_PER_CAUSE = ("mamba2", "deepseek_v32", "gemma3n_text", "roberta", "doge", "zamba", "deepseek_v4", "qwen3_next")
ONE_PER_CAUSE += ("gemma3", "mistral3", "roc_bert", "jamba")
REFUSED = {
    "cpmant": "is not a causal language model",
    "prophetnet": "lets a token see those after it",
    "reformer": "has to be a multiple of",
    "xlnet": "is not a causal language model",
}
# transformers does not make them from a config: parts of other models, and one that needs timm.
NOT_BUILT = ("gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "musicgen", "musicgen_melody")
KINDS = {"full": {}, "lora": {}, "qlora": {}, "dora": {"use_dora": True}}


def assert_equal(model_type: str, kind: str, folder) -> None:
    """fp32. 1e-5 of the mean loss, and of each gradient's largest number: observed are 2e-7 and 8e-6."""
    found = architectures.compare(model_type, "lora" if kind == "dora" else kind, folder / "model", **KINDS[kind])
    assert found.loss <= 1e-5, found
    assert found.gradient <= 1e-5, found
    assert found.generates, "greedy text with the cache differs from whole forwards"


@pytest.mark.parametrize("model_type", ONE_PER_CAUSE)
def test_adapters_give_the_loss_and_gradients_of_transformers_and_peft(model_type, tmp_path):
    assert_equal(model_type, "lora", tmp_path)


@pytest.mark.parametrize("model_type", sorted(REFUSED))
def test_what_is_no_causal_model_is_refused_with_the_reason(model_type, tmp_path):
    with pytest.raises(PlanError, match=REFUSED[model_type]):
        architectures.compare(model_type, "lora", tmp_path / "model")


TRAINED = [t for t in architectures.model_types() if t not in (*REFUSED, *NOT_BUILT)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", TRAINED)
def test_every_class_gives_the_loss_and_gradients_of_transformers_and_peft(model_type, kind, tmp_path):
    assert_equal(model_type, kind, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TRAINED)
def test_every_class_trains_resumes_and_answers_from_a_folder(model_type, tmp_path):
    found = architectures.trains_resumes_and_answers(model_type, "lora", tmp_path)
    assert found["resumed"] and found["answered"], found


@pytest.mark.parametrize("model_type", NOT_BUILT)
def test_what_is_left_out_transformers_does_not_build(model_type):
    with pytest.raises((AttributeError, ImportError, ValueError, StrictDataclassError)):
        architectures.build(model_type)


# Newly running ones: hybrids, mixtures of experts, shared blocks, image and text.
SHARDED = ("mamba2", "bamba", "jamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2", "qwen3_next")
SHARDED += ("deepseek_v32", "gemma3", "mistral3")


@pytest.mark.slow
@pytest.mark.parametrize("train_type", ["full", "lora", "qlora"])
@pytest.mark.parametrize("model_type", SHARDED)
def test_two_ranks_of_fsdp2_train_as_one_process(model_type, train_type, tmp_path):
    """1e-5 of the loss: ranks sum in another order, and Adam's first steps move by the sign of small gradients."""
    architectures.write_model(model_type, tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, architectures.QUESTIONS)))
    flags = dict(model_name=str(tmp_path / "model"), dataset=str(tmp_path / "rows.jsonl"), train_type=train_type)
    flags |= dict(backend="cpu", context_length=64, precision="fp32", lr=1e-4, max_steps=3, log_to="stdout")
    flags |= dict(lora_target_modules="all", lora_rank=4, lora_dropout=0.0) if train_type != "full" else {}
    fine_tune(**flags, batch_size=4, output_dir=str(tmp_path / "one"))
    fine_tune(**flags, batch_size=2, world_size=2, output_dir=str(tmp_path / "two"))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.slow
def test_layers_that_share_weights_are_not_sharded(tmp_path):
    architectures.write_model("zamba", tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, architectures.QUESTIONS)))
    flags = dict(model_name=str(tmp_path / "model"), dataset=str(tmp_path / "rows.jsonl"), backend="cpu")
    done = finish(command(**flags, world_size=2, max_steps=1, batch_size=2))
    assert done.returncode == 2 and "Use --sharding_strategy ddp" in done.stderr
