"""Layers that predict several tokens (MTP) are no part of the loaded model: full and merged folders keep them."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.torch_engine.weights.merge import Merge
from finetune.torch_engine.weights.save import write_model_folder
from finetune.torch_engine.weights.stream import load_dense
from tests.support import architectures
from tests.support.adapters import adapted, write

# Where the published files of these families have them.
FAMILIES = {
    "qwen3_5_text": "mtp.layers.0.",
    "qwen3_next": "mtp.layers.0.",
    "deepseek_v3": "model.layers.2.",
    "deepseek_v32": "model.layers.2.",
    "deepseek_v4": "mtp.0.",
    "glm4_moe": "model.layers.2.",
    "glm4_moe_lite": "model.layers.2.",
    "glm_moe_dsa": "model.layers.2.",
    "ernie4_5_moe": "model.mtp_block.0.",
    "exaone_moe": "mtp.layers.0.",
    "nemotron_h": "mtp.layers.0.",
    "mimo_v2_flash": "model.mtp.layers.0.",
    "longcat_flash": "model.mtp.layers.0.",
    "hy_v3": "model.layers.2.",
    "mellum": "mtp.layers.0.",
    "olmo_hybrid": "mtp.layers.0.",
}


@pytest.mark.parametrize(
    "model_type", [pytest.param(n, marks=[pytest.mark.slow] * (i > 2)) for i, n in enumerate(FAMILIES)]
)
def test_full_and_merged_folders_have_the_base_s_tensors(model_type, tmp_path):
    base = tmp_path / "base"
    architectures.build(model_type).save_pretrained(base)
    published = load_file(base / "model.safetensors")
    mtp = {FAMILIES[model_type] + "eh_proj.weight": torch.randn(8, 4).bfloat16()}
    mtp |= {FAMILIES[model_type] + "mlp.gate.e_score_correction_bias": torch.randn(8)}
    save_file(published | mtp, base / "model.safetensors", {"format": "pt"})

    (tmp_path / "full").mkdir()
    model = load_dense(base, torch.bfloat16)
    write_model_folder(model, tmp_path / "full", torch.bfloat16)
    model, settings = adapted(model=load_dense(base, torch.float32))
    write(model, settings, tmp_path / "adapter")
    (tmp_path / "merged").mkdir()
    merging = Merge.of(tmp_path / "adapter", base)
    merging.write(tmp_path / "merged", torch.bfloat16)

    assert "2 tensors of MTP layers" in " ".join(merging.base.lines)
    for written in ("full", "merged"):
        found = load_file(tmp_path / written / "model.safetensors")
        assert found.keys() == published.keys() | mtp.keys()
        assert all(found[n].dtype == t.dtype and torch.equal(found[n], t) for n, t in mtp.items())
