"""Codes of 2 to 8 bits packed and unpacked."""

import pytest
import torch

from finetune.quantizers import packing


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_codes_come_back_from_their_bits(bits):
    codes = torch.randint(0, 2**bits, (5, 64), dtype=torch.uint8)
    packed = packing.pack(codes, bits)
    assert packed.shape == (5, 8 * bits) and torch.equal(packing.unpack(packed, bits), codes)
