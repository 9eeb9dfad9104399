"""Factors that start from the weight."""

import torch

import quantization_wrapper
from finetune.torch_engine.lora import factors
from tests.support import tiny


def test_loftq_loses_less_than_pissa_and_than_quantization_alone():
    weight = tiny.build().model.layers[0].mlp.up_proj.weight.detach()
    config = quantization_wrapper.config_for("nf4")

    def stored(w):
        layer = quantization_wrapper.quantized_linear(w, None, config)
        return layer.weight_of(layer.stored(), torch.float32)

    def lost(init, scaling=2.0):
        a, b = init(weight, factors.Start(8, scaling, seed=0, name="x"), stored)
        product = scaling * (b @ a)
        return (stored(weight - product) + product - weight).norm()

    assert lost(factors.loftq) < (stored(weight) - weight).norm() and lost(factors.loftq) < lost(factors.pissa)
