"""Proofs on the loaded model: that it is causal, and that packed documents do not see each other."""

import contextlib

import numpy as np
import pytest
import torch
import transformers

from finetune.errors import PlanError
from finetune.torch_engine import checks
from finetune.torch_engine.attention import per_document
from finetune.torch_engine.checks import (
    check_causal,
    check_head,
    check_padding_free,
    check_sparse_attention,
    no_autocast,
    table_of_positions,
)
from finetune.torch_engine.device import rounds_to_tf32
from tests.support import architectures, tiny
from tests.support.build import load_model, torch_engine
from tests.support.cells import each_alone
from tests.support.engines import CPU, batches, engine
from tests.support.planned import settings_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BOUNDED = [name for name in tiny.ARCHITECTURES if name not in tiny.PADDED]


@pytest.mark.parametrize(("architecture", "dtype"), each_alone(tiny.ARCHITECTURES, DTYPES), ids=str)
def test_every_causal_model_passes_its_proof_in_every_type(architecture, dtype, device):
    check_causal(tiny.build(architecture).to(device, dtype), no_autocast)


@pytest.mark.parametrize(
    ("architecture", "dtype"), each_alone(["llama", "gpt2", "mixtral", "qwen3_moe"], DTYPES), ids=str
)
def test_the_same_model_with_an_open_mask_fails_it_in_every_type(architecture, dtype, device):
    model = tiny.build(architecture).to(device, dtype)

    def open_mask(module, args, kwargs):
        length = kwargs["input_ids"].shape[1]
        return args, kwargs | {"attention_mask": torch.zeros(1, 1, length, length, dtype=dtype, device=device)}

    model.register_forward_pre_hook(open_mask, with_kwargs=True)
    with pytest.raises(PlanError, match="lets a token see those after it"):
        check_causal(model, no_autocast)


def test_places_of_experts_rows_that_a_sort_leaves_open_are_rounding():
    """A product of the same shape by transformers' own experts rounds otherwise on one thread."""
    model = tiny.build("qwen2_moe")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        check_causal(model, no_autocast)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mask_that_leaks_one_token_fails_it_in_every_type(dtype, device):
    model = tiny.build("llama").to(device, dtype)

    def leaking_mask(module, args, kwargs):
        length = kwargs["input_ids"].shape[1]
        seen = torch.ones(length, length, dtype=torch.bool, device=device).tril(1)
        mask = torch.zeros(length, length, dtype=dtype, device=device).masked_fill(~seen, torch.finfo(dtype).min)
        return args, kwargs | {"attention_mask": mask[None, None]}

    model.register_forward_pre_hook(leaking_mask, with_kwargs=True)
    with pytest.raises(PlanError, match="lets a token see those after it"):
        check_causal(model, no_autocast)


@pytest.mark.parametrize("tokens", [[3], range(7)], ids=["rounding of one token", "all tokens"])
def test_only_a_model_that_reads_the_length_is_refused_for_it(tokens, device):
    """In bf16, kernels for other numbers of rows move single tokens far: of SmolLM2-135M one by 0.14 of the scale."""
    model = tiny.build("llama").to(device, torch.bfloat16)

    def reads_the_length(module, args, logits):
        if logits.shape[1] == 7:
            logits[:, list(tokens)] += 0.2 * logits.abs().max()
        return logits

    model.lm_head.register_forward_hook(reads_the_length)
    refused = pytest.raises(PlanError, match="logits of its tokens change with the number of tokens after them")
    with refused if len(tokens) > 1 else contextlib.nullcontext():
        check_causal(model, no_autocast)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_that_a_model_amplifies_is_no_reason_to_refuse_it(dtype, device):
    """Kernels for other numbers of rows round otherwise, and a trained model may make any difference of it."""
    model = tiny.build("llama").to(device, dtype)

    def rounds_by_the_length(module, args, hidden):
        return hidden * (1 + torch.finfo(dtype).eps) if hidden.shape[1] == 7 else hidden

    def amplifies(module, args):
        return (torch.sin(args[0].float() * 1e4).to(dtype),)

    model.model.embed_tokens.register_forward_hook(rounds_by_the_length)
    model.lm_head.register_forward_pre_hook(amplifies)
    check_causal(model, no_autocast)


@pytest.mark.parametrize("model_type", ["ernie4_5_moe", "jetmoe", "minimax_m2"])
def test_other_tokens_after_it_move_no_bit_though_experts_get_other_numbers_of_rows(model_type, device):
    """With other tokens in one row these experts' products have other shapes, and fp32 rounds otherwise."""
    check_causal(architectures.build(model_type).to(device), no_autocast)


@pytest.mark.parametrize(("architecture", "dtype"), each_alone(["llama", "gpt2", "qwen3_moe"], DTYPES), ids=str)
def test_a_packed_document_that_sees_one_token_of_another_is_found_in_every_type(architecture, dtype, device):
    model = tiny.build(architecture).to(device, dtype)

    def one_token_early(module, args, kwargs):
        if "documents" in kwargs:
            first, second = 12, kwargs["input_ids"].shape[1] - 12
            positions = torch.cat([torch.arange(first), torch.arange(second)])
            kwargs["documents"] = per_document.documents_of(positions, device)
        return args, kwargs

    model.register_forward_pre_hook(one_token_early, with_kwargs=True)
    proof = check_padding_free(model, no_autocast)
    assert not proof.holds and "sees the one before it" in proof.reason


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_positions_that_count_on_across_documents_are_found_in_every_type(dtype, device):
    """GPT-2 has learned positions; a model with rotary ones computes the same, as they are relative."""
    model = tiny.build("gpt2").to(device, dtype)

    def counting_on(module, args, kwargs):
        if "documents" in kwargs:
            kwargs["position_ids"] = torch.arange(kwargs["input_ids"].shape[1], device=device)[None]
        return args, kwargs

    model.register_forward_pre_hook(counting_on, with_kwargs=True)
    proof = check_padding_free(model, no_autocast)
    assert not proof.holds and "other logits than separate ones" in proof.reason


@pytest.mark.parametrize(("architecture", "dtype"), each_alone(BOUNDED, DTYPES), ids=str)
def test_packed_documents_pass_in_every_type_of_every_architecture(architecture, dtype, device):
    assert check_padding_free(tiny.build(architecture).to(device, dtype), no_autocast, 64).holds


@pytest.mark.parametrize("architecture", tiny.PADDED)
def test_a_model_whose_attention_cannot_be_bounded_gets_padded_rows_and_the_reason(architecture):
    built = engine(architecture)
    assert built.layout == "padded"
    result = built.train_step(batches("padded"), 1e-2)
    assert np.isfinite(result.nll)
    with pytest.raises(PlanError, match="--batch_layout padding_free: a packed document"):
        engine(architecture, layout="padding_free")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """The folder of a tiny BERT."""
    folder = tmp_path_factory.mktemp("models") / "bert"
    tokenizer = tiny.train_tokenizer(folder, bos=False)
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    config = transformers.BertConfig(vocab_size=len(tokenizer), **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16_autocast"])
def test_an_encoder_is_not_a_causal_model(encoder, precision):
    settings = settings_of("lora", precision)
    built = torch_engine(load_model(encoder, settings, CPU), settings, CPU)
    with pytest.raises(PlanError, match="lets a token see those after it"):
        built.verify("auto")


@pytest.mark.slow
def test_a_run_of_an_encoder_is_refused(encoder, plain_run):
    with pytest.raises(PlanError, match="lets a token see those after it"):
        plain_run(model_name=str(encoder), max_steps=1)


def test_a_window_that_only_the_models_own_mask_knows_is_seen():
    config = transformers.PhimoeConfig(
        **{**tiny.COMMON, "num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": 16, "hidden_size": 32}
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    proof = check_padding_free(model, no_autocast, context_length=64)
    assert not proof.holds and "other logits than separate ones" in proof.reason


def test_weights_that_are_not_finite_are_not_called_a_leak():
    model = tiny.build("llama")
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(PlanError, match="gives logits that are not finite before any training"):
        check_causal(model, no_autocast)


def test_a_model_of_zeros_passes_without_a_division():
    model = tiny.build("llama")
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    assert check_padding_free(model, no_autocast, 64).holds
    assert check_head(model, "padding_free", no_autocast).holds


def test_a_row_longer_than_a_mask_in_the_model_is_padded():
    """GPT-Neo's mask of 64 tokens: two short documents fit, 73 tokens do not."""
    model = architectures.build("gpt_neo", max_position_embeddings=64)
    assert table_of_positions(model) == 64
    assert check_padding_free(model, no_autocast, 32, 64).holds
    found = check_padding_free(model, no_autocast, 32, 65)
    assert not found.holds and "does not support packed documents" in found.reason


def test_positions_that_are_computed_are_no_table():
    model = architectures.build("llama", max_position_embeddings=64)
    assert table_of_positions(model) is None
    assert check_padding_free(model, no_autocast, 32, 200).holds


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_an_attention_that_picks_by_the_row_s_length_is_refused_beyond_what_it_picks(model_type):
    model = architectures.build(model_type, index_topk=8)
    check_sparse_attention(model, no_autocast, 8)
    with pytest.raises(PlanError, match="picks 8 tokens by its sparse attention.* Add --context_length 8."):
        check_sparse_attention(model, no_autocast, 9)


def test_proofs_in_fp32_take_tf32_for_what_it_is(monkeypatch):
    """NVIDIA's containers force it; products then have 10 bits."""
    cuda = torch.device("cuda")
    monkeypatch.delenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", raising=False)
    assert not rounds_to_tf32(cuda)
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
    assert rounds_to_tf32(cuda) and not rounds_to_tf32(CPU)
    model = tiny.build("llama")
    assert checks._is_exact(model, no_autocast) and not checks._is_exact(OnDevice(model, cuda), no_autocast)
    assert checks._dtype_eps(OnDevice(model, cuda), no_autocast) == 2.0**-10


class OnDevice:
    """A model as if on another device."""

    def __init__(self, model, device):
        self.parameters, self.named_parameters, self.modules = model.parameters, model.named_parameters, model.modules
        self.device = device
