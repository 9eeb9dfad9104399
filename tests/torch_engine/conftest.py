"""The bf16 folder that prequantized ones are made of."""

import pytest
import torch

from tests.support import tiny


@pytest.fixture(scope="session")
def dense_folder(tmp_path_factory, make_tokenizer):
    folder = tmp_path_factory.mktemp("stored") / "dense"
    tokenizer = make_tokenizer(folder, bos=False)
    tiny.build("llama", vocab_size=len(tokenizer)).to(torch.bfloat16).save_pretrained(folder)
    return folder
