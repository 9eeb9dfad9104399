"""The MLX step: recomputation, compilation and microbatches change nothing, precisions and optimizers are torch's."""

import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import convert

from finetune.data.collate import microbatches
from finetune.errors import PlanError
from finetune.mlx_engine.layers import AffineLinear, sum_of_squares
from finetune.mlx_options import MLXOptions
from tests.support import tiny
from tests.support.cells import slow
from tests.support.mlx_engines import mlx_engine, save, torch_engine_of

ROWS = tiny.dataset()
STEPS, LR = 8, 2e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model"))


def losses(engine, tokens=10**6) -> list[float]:
    found = []
    for step in range(STEPS):
        rows = [(step * 3 + i) % len(ROWS) for i in range(4)]
        found.append(engine.train_step(microbatches(ROWS, rows, engine.layout, 4, tokens, 0), LR).nll)
    return found


def on_one_batch(engine) -> list[float]:
    batch = microbatches(ROWS, range(8), "padded", 8, 10**6, 0)
    return [engine.train_step(batch, 5e-3).nll for _ in range(5)]


def test_recomputed_blocks_draw_the_same_dropout_again(folder):
    changes = dict(lora_dropout=0.3)
    kept = losses(mlx_engine(folder, **changes))
    again = losses(mlx_engine(folder, use_gradient_checkpointing="true", **changes))
    assert kept == pytest.approx(again, rel=1e-6) and kept != losses(mlx_engine(folder))


def test_a_compiled_step_is_the_same_step(folder, tmp_path):
    file = tmp_path / "mlx.json"
    file.write_text(json.dumps({"compile": "true", "length_multiple": 16}))
    compiled = mlx_engine(folder, mlx_config=str(file), lora_dropout=0.1)
    assert compiled._compiles() and not mlx_engine(folder)._compiles()
    padded = tmp_path / "padded.json"  # dropout's mask has the shape of the padded rows
    padded.write_text(json.dumps({"length_multiple": 16}))
    assert losses(compiled) == pytest.approx(
        losses(mlx_engine(folder, mlx_config=str(padded), lora_dropout=0.1)), rel=1e-5
    )


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "adadelta"])
def test_every_optimizer_is_torchs(folder, optimizer):
    changes = dict(optimizer=optimizer, wd=0.1, loraplus_lr_ratio=4.0, use_rslora=True)
    assert losses(mlx_engine(folder, **changes)) == pytest.approx(losses(torch_engine_of(folder, **changes)), rel=1e-5)


# Both engines round products to 16 bits, in other places: relative to the loss, over 8 steps.
@pytest.mark.parametrize(("precision", "off"), [("bf16", 1e-2), ("fp16", 2e-3), ("fp16_autocast", 2e-3)])
def test_sixteen_bits_train_as_torch_trains(folder, precision, off):
    mine, theirs = (build(folder, precision=precision) for build in (mlx_engine, torch_engine_of))
    assert losses(mine) == pytest.approx(losses(theirs), rel=off)
    assert mine.optimizer_values()["scale"] == theirs.optimizer_values()["scale"]


def test_an_overflow_of_fp16_is_skipped_and_lowers_the_scale(folder):
    engine = mlx_engine(folder, precision="fp16")
    engine.scaler.scale = 2.0**40
    before = engine.trainable_state()
    batch = microbatches(ROWS, range(4), "padded", 4, 10**6, 0)
    assert engine.train_step(batch, LR).skipped and engine.scaler.scale == 2.0**39
    assert all(np.array_equal(before[k], v) for k, v in engine.trainable_state().items())


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_every_affine_width_has_torchs_base(folder, bits):
    changes = dict(train_type="qlora", quantization_backend="mlx", n_bits=bits, group_size=32)
    batch = microbatches(ROWS, range(4), "padded", 4, 10**6, 0)
    mine, theirs = (build(folder, **changes).evaluate(batch).nll for build in (mlx_engine, torch_engine_of))
    assert mine == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize(("mode", "bits", "group"), [("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)])
def test_the_float_formats_of_mlx_train(folder, mode, bits, group):
    engine = mlx_engine(folder, train_type="qlora", quant_type=mode, n_bits=bits, group_size=group)
    linear = engine.loaded.model.layers[0].self_attn.q_proj.base
    assert isinstance(linear, AffineLinear) and linear.mode == mode
    found = on_one_batch(engine)
    assert found[-1] < found[0]


@pytest.mark.promise("CK_03")
@pytest.mark.parametrize("bits", [None, 4])
def test_a_folder_that_mlx_lm_wrote_trains_as_it_is_stored(tiny_model, tmp_path, bits):
    quantize = {} if bits is None else dict(quantize=True, q_bits=bits, q_group_size=32)
    convert(str(tiny_model), mlx_path=str(tmp_path / "mlx"), dtype="float32", **quantize)
    changes = {} if bits is None else dict(train_type="qlora", quantization_backend="mlx", group_size=32)
    stored, ours = mlx_engine(tmp_path / "mlx", **changes), mlx_engine(tiny_model, **changes)
    linears = [e.loaded.model.layers[0].mlp.up_proj.base for e in (stored, ours)]
    assert mx.array_equal(linears[0].weight, linears[1].weight)
    found = on_one_batch(stored)
    assert found[-1] < found[0]


def test_a_batch_of_prompts_is_answered_as_each_alone(folder):
    engine = mlx_engine(folder)
    prompts = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12]]
    together = engine.generate(prompts, 6, set())
    assert together == [engine.generate([prompt], 6, set())[0] for prompt in prompts]
    assert together == torch_engine_of(folder).generate(prompts, 6, set())


def test_a_packed_layout_is_refused(folder):
    with pytest.raises(
        PlanError, match="--batch_layout padding_free: mlx-lm's models do not support document boundaries"
    ):
        mlx_engine(folder, verify=False).verify("padding_free")


@pytest.mark.promise("CLI_15")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"compiled": true}', "has no setting 'compiled'. Use compile, length_multiple"),
        ('{"compile": "yes"}', "compile is 'yes'. Use auto, true or false"),
        ('{"length_multiple": 0}', "length_multiple is 0"),
        ("{", "is not JSON"),
    ],
)
def test_settings_of_mlx_are_checked(tmp_path, content, message):
    file = tmp_path / "mlx.json"
    file.write_text(content)
    with pytest.raises(PlanError, match=message):
        MLXOptions.read(str(file))


@pytest.mark.slow
def test_the_limit_of_open_files_is_kept():
    import subprocess
    import sys

    code = (
        "import resource; before = resource.getrlimit(resource.RLIMIT_NOFILE); import finetune.mlx_engine.load\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == before, before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_class_of_mlx_is_changed_by_an_engine(folder):
    import mlx.nn as nn
    from mlx_lm.models import llama

    before = [c.__call__ for c in (nn.Linear, nn.QuantizedLinear, llama.TransformerBlock, llama.Model)]
    engine = mlx_engine(folder, use_gradient_checkpointing="true", **dict(train_type="qlora", group_size=32))
    losses(engine)
    assert before == [c.__call__ for c in (nn.Linear, nn.QuantizedLinear, llama.TransformerBlock, llama.Model)]


def test_the_norm_of_a_large_gradient_is_that_of_its_numbers():
    """MLX sums one number after the other on a CPU: a million squares at once lose 4e-4."""
    array = np.random.default_rng(0).normal(size=1_000_003).astype(np.float32)
    found = sum_of_squares(mx.array(array)).item()
    assert found == pytest.approx(np.square(array.astype(np.float64)).sum(), rel=1e-6)
    assert sum_of_squares(mx.array([3.0, 4.0])).item() == 25


@pytest.mark.parametrize("architecture", ["llama", *slow("llama_tied")])
def test_the_embedding_of_the_padding_token_learns_nothing_from_where_it_is_read(tmp_path, architecture):
    """The embedding's padding_idx in torch. Prompts may have the token, and sampled answers."""
    folder = save(tmp_path, architecture)  # pad_token_id 0
    ids = np.array([[5, 0, 7, 0, 9, 11, 0, 13]])
    batch = replace(microbatches(ROWS, [0], "padded", 1, 10**6, 0)[0], input_ids_BS=ids)
    everywhere = np.zeros_like(ids)
    batch = replace(batch, labels_BS=ids[:, ::-1], position_ids_BS=np.arange(8)[None], document_ids_BS=everywhere)
    found = []
    for engine in (mlx_engine(folder, train_type="full"), torch_engine_of(folder, train_type="full")):
        found.append([engine.train_step([batch], LR).grad_norm, engine.trainable_state()])
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    name = "model.embed_tokens.weight"
    np.testing.assert_allclose(found[0][1][name], found[1][1][name], atol=1e-5)


def test_a_step_takes_no_more_memory_for_more_microbatches(folder):
    """The activations of two never exist together: each begins when every gradient of the last one is summed."""
    engine = mlx_engine(folder)
    batch = microbatches(ROWS, range(8), "padded", 8, 10**6, 0)
    peaks = []
    for count in (2, 2, 16):  # the first makes the moments
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        engine.train_step(batch * count, LR)
        peaks.append(mx.get_peak_memory() - before)
    assert peaks[2] < 1.2 * peaks[1]
