"""The plan of MLX: each fact is in the plan or an error, before anything loads."""

import json
from dataclasses import replace

import pytest

from backend_manager import CAPABILITIES, Backend, BackendManager
from finetune.errors import PlanError
from finetune.plan.backend import select_backend
from finetune.plan.facts import Facts
from finetune.plan.mlx import CPU_MICROBATCH_TOKENS
from finetune.plan.resolve import resolve_plan
from tests.support.planned import shape_of

needs_cpu = pytest.mark.skipif(BackendManager._mlx_has_gpu(), reason="MLX has a GPU here")


def plan_of(backend=Backend.MLX, inherited=None, prequantized=None, **flags):
    facts = Facts(backend, CAPABILITIES[backend], inherited=inherited, prequantized=prequantized)
    return resolve_plan(flags, facts)


def reason(plan, setting: str) -> str:
    return next(str(a) for a in plan.adjustments if a.setting == setting)


@needs_cpu
def test_open_settings_are_settled_for_a_processor():
    plan = plan_of()
    s = plan.settings
    assert (plan.engine, s.precision, s.quantization_backend, s.quant_type) == ("mlx", "fp32", "mlx", "affine")
    assert (
        s.microbatch_tokens == CPU_MICROBATCH_TOKENS and plan_of(microbatch_tokens=99).settings.microbatch_tokens == 99
    )
    assert "no BLAS for 16 bits" in reason(plan, "precision") and "MLX's own format" in reason(
        plan, "quantization_backend"
    )
    assert plan_of(precision="bf16").settings.precision == "bf16"
    assert plan_of(precision="bf16", train_type="full").settings.precision == "bf16_autocast"
    saved = plan.to_json()["settled"]
    assert (saved["backend"], saved["backend_type"]) == ("mlx", "mlx")


@pytest.mark.parametrize(("kind", "bits", "group"), [("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)])
def test_formats_of_mlx_have_their_own_groups(kind, bits, group):
    plan = plan_of(quant_type=kind, n_bits=bits)
    assert plan.settings.group_size == group and any("cannot move to torch" in n for n in plan.notices)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (dict(quantization_backend="nf4"), "--quantization_backend nf4: on MLX there is mlx only"),
        (dict(quant_type="mxfp8"), "--quant_type mxfp8: has 8 bits, not --n_bits 4"),
        (dict(quant_type="nf4"), "--quant_type nf4: MLX has affine, mxfp4, nvfp4, mxfp8"),
        (dict(n_bits=7), "--n_bits 7: mlx supports 2/3/4/5/6/8 bits"),
        (dict(group_size=16), "--group_size 16: mlx supports powers of two from 32 to 128"),
        (dict(double_quant=True), "--double_quant true: MLX's formats do not"),
        (dict(init_lora_weights="pissa"), "--init_lora_weights pissa: the MLX engine has default and gaussian"),
        (dict(optimizer="muon"), "--optimizer muon: "),
        (dict(batch_layout="padding_free"), "--batch_layout padding_free: mlx-lm's models do not support document"),
        (dict(parallel_backend="accelerate"), "--parallel_backend accelerate: is for torch"),
        (dict(llama_pro_path="x", train_type="lora"), "--llama_pro_path x: the MLX engine trains adapters"),
        (dict(dp_degree=2), "--dp_degree 2: is more than this run's one process"),
        (dict(prequantized=dict(quantization_backend="bnb", n_bits=4)), "is stored quantized by bnb, which MLX"),
        (dict(mlx_config="/nowhere.json"), "--mlx_config /nowhere.json: no such file"),
    ],
)
def test_what_mlx_does_not_do_is_one_line(flags, message):
    with pytest.raises(PlanError) as error:
        plan_of(**flags)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("word", "used"), [("paged_adamw_8bit", "adamw_8bit"), ("paged_adamw_32bit", "adamw")])
def test_paged_moments_are_plain_ones(word, used):
    assert plan_of(optimizer=word).steps.optimizer == used


def test_experts_are_refused_where_they_would_be_quantized_or_adapted():
    facts = Facts(Backend.MLX, CAPABILITIES[Backend.MLX], shape=shape_of("mixtral-8x22b"))
    other = replace(facts, shape=replace(facts.shape, model_type="another_moe"))
    said = "experts per layer, which the MLX engine does not quantize, and adapts in mixtral, qwen3_moe"
    for flags, those in (
        (dict(train_type="qlora", lora_target_modules="q_proj"), facts),
        (dict(train_type="lora"), other),
    ):
        with pytest.raises(PlanError, match=said):
            resolve_plan(flags, those)
    resolve_plan(dict(train_type="lora"), facts)
    resolve_plan(dict(train_type="lora", lora_target_modules="q_proj,v_proj"), other)


def test_a_resumed_run_takes_mlxs_quantizer_where_its_own_is_not_there():
    plan = plan_of(inherited={}, quantization_backend="nf4")
    assert plan.settings.quantization_backend == "mlx" and "nf4 -> mlx" in reason(plan, "quantization_backend")


@pytest.mark.promise("CLI_15")
def test_settings_of_mlx_are_ignored_elsewhere_with_a_line(tmp_path):
    file = tmp_path / "mlx.json"
    file.write_text(json.dumps({"compile": "true"}))
    plan = plan_of(Backend.CPU, mlx_config=str(file))
    assert plan.settings.mlx_config is None and "only the MLX engine reads it" in reason(plan, "mlx_config")
    assert plan_of(mlx_config=str(file)).settings.mlx_config == str(file)


def test_settings_without_meaning_on_mlx_go_back_to_their_defaults():
    plan = plan_of(profile=True, use_activation_cpu_offload=True)
    assert not plan.settings.profile and "it is torch's profiler" in reason(plan, "profile")


@needs_cpu
def test_ranks_that_are_assumed_hold_replicas_as_those_of_mlx_launch_do():
    plan = plan_of(dry_run=True, assume_world_size=8, assume_memory="80GiB")
    assert (plan.dims.dp_replicate, plan.dims.dp_shard) == (8, 1)


def test_auto_never_chooses_mlx_without_a_gpu():
    manager, skipped = select_backend("auto")
    assert manager.backend is not Backend.MLX and skipped is None
    assert select_backend("mlx")[0].backend is Backend.MLX
