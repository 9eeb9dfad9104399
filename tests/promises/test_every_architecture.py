"""Any causal LM that transformers loads: each class of its mapping equals transformers + PEFT, or is refused."""

import pytest
from huggingface_hub.errors import StrictDataclassError

from finetune.errors import PlanError
from tests.support import architectures

# One of each cause: a weight read by a kernel, by its dtype, and in place of the layer; positions and masks of the
# model's own; shared blocks; a linear that is none; linear attention; image and text; an output changed in place.
ONE_PER_CAUSE = ("mamba2", "deepseek_v32", "gemma3n_text", "roberta", "doge", "zamba", "deepseek_v4", "qwen3_next")
ONE_PER_CAUSE += ("gemma3", "mistral3", "roc_bert", "jamba")
REFUSED = {
    "cpmant": "is not a causal language model",
    "prophetnet": "gives a token other logits when other numbers of tokens follow",
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
