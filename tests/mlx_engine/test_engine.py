"""MLXEngine passes the engine's conformance check."""

import json

import mlx.core as mx
import pytest

from finetune.errors import PlanError
from finetune.mlx_engine.model import load
from tests.support import conformance, tiny
from tests.support.mlx_engines import mlx_engine, save

DATASET = tiny.dataset()
CHANGES = {
    "lora": {},
    "dora": {"use_dora": True},
    "qlora": {"train_type": "qlora", "group_size": 32},
    "recomputed": {"use_gradient_checkpointing": "true"},
    "fp16": {"precision": "fp16"},
}
SLOW = ("dora", "recomputed", "fp16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CHANGES])
def test_the_mlx_engine_is_an_engine(folder, name, tmp_path):
    conformance.check_engine(lambda: mlx_engine(folder, verify=False, **CHANGES[name]), DATASET, tmp_path)


@pytest.mark.parametrize("architectures", [float("nan"), [["LlamaForCausalLM"]]])
def test_a_config_whose_architectures_are_no_names_is_one_line(folder, architectures):
    config = json.loads((folder / "config.json").read_text()) | {"architectures": architectures}
    with pytest.raises(PlanError, match=r"config\.json: mlx-lm does not take it"):
        load(folder, config, mx.float32, dequantizes=False)
