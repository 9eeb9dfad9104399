"""The scale and the soft cap of a head, read from the configs of the families that have them."""

import pytest

from finetune.model_files.logit_scaling import logit_scaling


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (1.0, None)),
        ({"logits_scaling": 8.0, "logit_scale": None}, (0.125, None)),
        ({"logit_scale": 0.25}, (0.25, None)),
        ({"final_logit_softcapping": 30.0}, (1.0, 30.0)),
        ({"final_logit_softcapping": None, "logits_soft_cap": 20.0}, (1.0, 20.0)),
        ({"output_logit_soft_cap": 10.0}, (1.0, 10.0)),
    ],
)
def test_what_a_config_asks_of_its_logits(config, expected):
    assert logit_scaling(config) == expected
