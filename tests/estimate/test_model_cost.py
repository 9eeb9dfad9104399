"""Documents grouped by the estimate as by attention; what sees images counted whatever was computed before."""

from dataclasses import replace

import pytest
import torch

from finetune.estimate.memory import base_bytes, trainable_weights
from finetune.estimate.model_cost import MicrobatchShape, ModelCost
from finetune.estimate.model_shape import ModelShape
from finetune.estimate.traced import traceable_shape
from finetune.model_files.files import find_model
from finetune.torch_engine.attention import per_document
from tests.support import tiny
from tests.support.engines import CPU
from tests.support.planned import plan_of_kind


def test_documents_are_grouped_as_attention_groups_them():
    lengths = (96, 60, 33, 90, 20, 90)
    positions = torch.cat([torch.arange(n) for n in lengths])
    real = [(g.num_documents, g.length) for g in per_document.documents_of(positions, CPU).groups]
    assert MicrobatchShape(lengths, 10).groups() == real


def test_a_tower_counts_though_the_plan_was_computed_without_images_before():
    """Towers count with --images auto, which is settled after --train_type auto has compared the memory of methods."""
    shape = ModelShape.from_config(tiny.build().config.to_dict())
    shape = replace(shape.known, towers=((8, 6), (5, 3)), projector=((4, 7),))
    costs = {
        (word, images): ModelCost(shape, plan_of_kind("lora", train_vision=word, images=str(images).lower()))
        for word in ("projector", "full")
        for images in (False, True)
    }
    trained = {key: trainable_weights(cost) for key, cost in costs.items()}
    assert trained["projector", True] - trained["projector", False] == 4 * 7
    assert trained["full", True] - trained["full", False] == 8 * 6 + 5 * 3 + 4 * 7
    frozen = {key: base_bytes(cost) for key, cost in costs.items()}
    assert frozen["projector", True] - frozen["projector", False] == 4 * (8 * 6 + 5 * 3)
    assert frozen["full", True] == frozen["full", False]


@pytest.mark.parametrize("architecture", ["qwen2_moe", "qwen3_moe", "mixtral"])
def test_layers_of_experts_that_train_in_full_are_counted(architecture, tmp_path):
    """Also where the experts' matrices were read from headers."""
    model = tiny.build(architecture)
    model.save_pretrained(tmp_path)
    shape = traceable_shape(find_model(str(tmp_path)), None, said=True).known
    assert shape is not None
    last = model.config.num_hidden_layers - 1
    cost = ModelCost(shape, plan_of_kind("full", num_layers=1))
    layer = sum(p.numel() for name, p in model.named_parameters() if f"layers.{last}." in name)
    assert trainable_weights(cost) == layer
