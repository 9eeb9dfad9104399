"""Constants of the estimate against the engine's."""

import torch

from finetune.estimate import activations, memory
from finetune.estimate.model_cost import GROUP_WASTE
from finetune.torch_engine import attention, loss
from finetune.torch_engine.lora.targets import DEFAULT_TARGETS


def test_constants_that_the_plan_repeats_are_the_engines():
    assert memory.LOGITS_CHUNK_BYTES == loss.LOGITS_CHUNK_BYTES and GROUP_WASTE == engine_limits.GROUP_WASTE
    assert DEFAULT_TARGETS == DEFAULT_TARGETS
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2), (torch.float16, 2)):
        assert attention.DENSE_UP_TO["cpu", dtype] == activations.DENSE_UP_TO[size]
