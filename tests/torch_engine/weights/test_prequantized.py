"""Folders stored quantized by mlx-lm or bitsandbytes."""

import json

import pytest
import torch

from finetune.config import TrainConfig
from finetune.errors import PlanError
from finetune.quantizers.linear import QuantizedLinear
from finetune.torch_engine.weights.load import DENSE_FP32, load_trained
from tests.support.build import load_model
from tests.support.cells import but_slow
from tests.support.engines import CPU
from tests.support.stored_quantized import BNB, edited, stored_folder, theirs_of


@pytest.mark.parametrize("kind", but_slow([*BNB, "mlx 4", "mlx 3", "mlx 8"], ("bnb nf4 double", "bnb int8", "mlx 4")))
def test_a_folder_stored_quantized_is_trained_on_as_it_is(kind, dense_folder, rows_file, tmp_path):
    from finetune.model_files.files import find_model
    from train import fine_tune

    folder = stored_folder(kind, dense_folder, tmp_path / "stored")
    files = find_model(str(folder))
    assert files.stored["quantization_backend"] == kind.split()[0]
    model = load_model(
        folder, TrainConfig(train_type="qlora", precision="fp32", cache_dequantized="false", **files.stored), CPU
    )
    layer = model.model.layers[0].self_attn.q_proj.base
    assert isinstance(layer, QuantizedLinear)
    ours = layer.weight_of(layer.stored(), torch.float32)
    if kind.startswith("mlx"):
        import mlx.core as mx
        import numpy as np
        from mlx_lm import load

        q = load(str(folder))[0].model.layers[0].self_attn.q_proj
        found = mx.dequantize(q.weight, q.scales, q.biases, group_size=q.group_size, bits=q.bits)
        theirs = torch.from_numpy(np.array(found.astype(mx.float32)))
    else:
        q = theirs_of(folder, torch.float32).model.layers[0].self_attn.q_proj
        import bitsandbytes.functional as F

        state = getattr(q.weight, "quant_state", None)
        theirs = (
            F.dequantize_4bit(q.weight.data, state) if state else F.int8_vectorwise_dequant(q.weight.data, q.weight.SCB)
        )
        theirs = theirs.float()
    # bitsandbytes dequantizes to the type it was quantized from, bf16 here; ours to the type asked for
    assert (ours - theirs).abs().max() <= (0 if kind.startswith("mlx") else 2**-8) * theirs.abs().max()

    state = fine_tune(
        model_name=str(folder),
        dataset=str(rows_file),
        max_steps=3,
        precision="fp32",
        output_dir=str(tmp_path / "out"),
        lr=1e-3,
    )
    assert state.status == "finished" and state.loss > 0
    settled = json.loads((tmp_path / "out" / "run_plan.json").read_text())["settled"]
    assert (settled["train_type"], settled["quantization_backend"]) == ("qlora", kind.split()[0])

    import export

    export.main(["--checkpoint", str(tmp_path / "out"), "--output_dir", str(tmp_path / "merged")])
    merged = theirs_of(tmp_path / "merged", torch.float32)
    used = load_trained(tmp_path / "out", files, CPU, DENSE_FP32)
    ids = torch.arange(3, 20)[None]
    # merged into weights of the config's type, bf16
    torch.testing.assert_close(merged(input_ids=ids).logits, used(input_ids=ids).logits, rtol=0, atol=0.02)


ATTENTION = "model.layers.0.self_attn.q_proj"
DAMAGED = {  # what is done to a tensor of a prequantized folder, and the error
    ("bnb nf4", "weight.absmax", None): "weight.absmax is missing next to the weight",
    ("bnb nf4", "weight.quant_state.bitsandbytes__nf4", None): "bitsandbytes__nf4 is missing next to",
    ("bnb nf4 double", "weight.nested_absmax", None): "cannot be converted from its files",
    ("bnb nf4", "weight.absmax", 3): "it has 3 scales, but its shape",
    ("bnb nf4", "weight", 100): "its codes have 100 bytes, but its shape",
    ("bnb int8", "SCB", None): "has dtype I8 but no scales|SCB is missing next to",
    ("bnb int8", "SCB", 3): "it has 3 scales for 64 rows",
    ("mlx 4", "scales", None): "scales is missing next to the weight",
    ("mlx 4", "biases", None): "biases is missing next to the weight",
    ("mlx 4", "scales", 3): "its codes have 64 rows, its scales",
}


@pytest.mark.parametrize("case", DAMAGED, ids=[f"{k}-{p}-{n}" for k, p, n in DAMAGED])
def test_a_prequantized_folder_with_a_tensor_missing_or_truncated_is_one_line(case, dense_folder, tmp_path):
    from finetune.model_files.files import find_model

    kind, part, rows = case
    folder, name = stored_folder(kind, dense_folder, tmp_path / "stored"), f"{ATTENTION}.{part}"
    edited(folder, lambda t: t.pop(name) if rows is None else t.update({name: t[name][:rows].clone()}))
    how = find_model(str(folder)).stored
    settings = TrainConfig(train_type="qlora", precision="fp32", cache_dequantized="false", **how)
    with pytest.raises(PlanError, match=DAMAGED[case]) as error:
        load_model(folder, settings, CPU)
    assert "\n" not in str(error.value) and str(error.value).endswith(("save the model again.", "its config.json."))


def test_a_config_that_claims_what_the_files_are_not_is_refused(dense_folder, tmp_path):
    import shutil

    from finetune.model_files.files import find_model

    folder = tmp_path / "claimed"
    shutil.copytree(dense_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    for claim, said in (
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "but its files hold plain ones"),
        ({"bits": "4", "group_size": 64}, "has bits '4' and group_size 64; MLX's affine format has"),
        ({"bits": 4, "group_size": 0}, "has bits 4 and group_size 0; MLX's"),
    ):
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": claim}))
        with pytest.raises(PlanError, match=said):
            find_model(str(folder))


def test_blocks_of_another_size_than_stored_are_refused(dense_folder, rows_file, tmp_path):
    from train import fine_tune

    folder = stored_folder("bnb nf4", dense_folder, tmp_path / "stored")
    with pytest.raises(PlanError, match="--group_size 128: .* quantizing again would lose more"):
        fine_tune(model_name=str(folder), dataset=str(rows_file), group_size=128, dry_run=True)


def test_a_prequantized_base_is_not_expanded(dense_folder, tmp_path):
    import expand

    folder = stored_folder("bnb fp4", dense_folder, tmp_path / "stored")
    with pytest.raises(PlanError, match="is prequantized .bnb at 4 bits., but layers can be copied only unquantized"):
        expand.main(["--model_name", str(folder), "--output_dir", str(tmp_path / "out"), "--num_new_blocks", "1"])


def test_what_cannot_be_done_with_a_prequantized_base_is_refused(dense_folder, rows_file, tmp_path):
    from train import fine_tune

    folder = stored_folder("bnb nf4", dense_folder, tmp_path / "stored")
    flags = dict(model_name=str(folder), dataset=str(rows_file), dry_run=True)
    with pytest.raises(PlanError, match="--train_type full: .* only adapters train"):
        fine_tune(**flags, train_type="full")
    with pytest.raises(PlanError, match="--quantization_backend hqq: .* quantizing again would lose more"):
        fine_tune(**flags, quantization_backend="hqq")
    with pytest.raises(PlanError, match="--init_lora_weights eva: needs unquantized weights"):
        fine_tune(**flags, init_lora_weights="eva")
