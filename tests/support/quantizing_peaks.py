"""Prints {method/bits: [peak bytes while a matrix is quantized, bytes of the result, weights]} as JSON."""

import json

import torch

from finetune.torch_engine.memory_stats import (
    current_resident_bytes,
    map_blocks_from,
    peak_resident_bytes,
    reset_peak,
    trim_heap,
)
from quantization_wrapper import config_for, pairs, quantized_linear


def main():
    map_blocks_from(2**20 + 2**18)  # as while weights are loaded
    torch.set_num_threads(2)
    weight, small, found = torch.randn(2048, 1024).bfloat16(), torch.randn(256, 512), {}
    for name, bits in pairs():
        quantized_linear(small, None, config_for(name, bits))  # libraries and their code are part of the process
        trim_heap()
        before = current_resident_bytes()
        reset_peak()
        layer = quantized_linear(weight, None, config_for(name, bits))
        stored = sum(p.nbytes for p in layer.parameters())
        found[f"{name}/{bits}"] = [peak_resident_bytes() - before, stored, weight.numel()]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
