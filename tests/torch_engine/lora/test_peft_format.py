"""Our adapter files, read by PEFT."""

import peft
import pytest
import torch

from finetune.torch_engine.lora.adapters import attach_adapter
from tests.support import tiny
from tests.support.adapters import IDS, KINDS, adapted, write
from tests.support.cells import each_alone

INNER = ("llama", "gpt2", "phi3", "mixtral", "gpt_neox", "qwen3", "gpt_oss")


@pytest.mark.parametrize(("architecture", "kind"), each_alone(INNER, KINDS))
def test_peft_reloads_our_adapter_to_the_same_logits(architecture, kind, tmp_path):
    model, settings = adapted(architecture, **KINDS[kind])
    write(model, settings, tmp_path / "a")
    theirs = peft.PeftModel.from_pretrained(tiny.build(architecture), tmp_path / "a").eval()
    with torch.no_grad():
        # 1e-5: PEFT adds the adapter's product in another order.
        torch.testing.assert_close(theirs(input_ids=IDS).logits, model(input_ids=IDS).logits, rtol=1e-5, atol=1e-5)
        assert (tiny.build(architecture)(input_ids=IDS).logits - model(input_ids=IDS).logits).abs().max() > 1e-3


OUTER = {
    "llama": "embed_tokens,lm_head,q_proj",
    "llama_tied": "embed_tokens",
    "gemma3": "embed_tokens,v_proj",  # multiplies in the embedding's own forward
    "gpt2": "wte,c_attn",
}


@pytest.mark.parametrize(("architecture", "kind"), each_alone(OUTER, KINDS))
def test_peft_reloads_adapted_embeddings_and_heads_to_the_same_logits(architecture, kind, tmp_path):
    model, settings = adapted(architecture, OUTER[architecture], **KINDS[kind])
    write(model, settings, tmp_path / "a")
    theirs = peft.PeftModel.from_pretrained(tiny.build(architecture), tmp_path / "a").eval()
    other = tiny.build(architecture)
    attach_adapter(other, tmp_path / "a")
    with torch.no_grad():
        mine = model(input_ids=IDS).logits
        assert (tiny.build(architecture)(input_ids=IDS).logits - mine).abs().max() > 1e-3
        torch.testing.assert_close(theirs(input_ids=IDS).logits, mine, rtol=1e-5, atol=1e-5)
        assert torch.equal(other(input_ids=IDS).logits, mine)
