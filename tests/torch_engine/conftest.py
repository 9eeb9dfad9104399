"""The bf16 folder that prequantized ones are made of; transformers' own functions after a test that replaces them."""

import sys

import pytest
import torch

from tests.support import tiny


@pytest.fixture(scope="session")
def dense_folder(tmp_path_factory, make_tokenizer):
    folder = tmp_path_factory.mktemp("stored") / "dense"
    tokenizer = make_tokenizer(folder, bos=False)
    tiny.build("llama", vocab_size=len(tokenizer)).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def own_rope():
    """transformers' own functions before and afterwards."""
    _give_back_rope()
    yield
    _give_back_rope()


def _give_back_rope() -> None:
    for module in list(sys.modules.values()):
        found = getattr(module, "__dict__", {}).get("apply_rotary_pos_emb")
        if "fused" in getattr(found, "__dict__", {}):
            module.apply_rotary_pos_emb = found.__wrapped__
