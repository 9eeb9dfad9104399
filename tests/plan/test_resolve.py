"""Wishes and facts settled to a plan, or refused in one line."""

import dataclasses

import pytest

from backend_manager import CAPABILITIES, Backend
from finetune.backend.capabilities import merged
from finetune.backend.probes import FACTS
from finetune.config import DEPRECATED_TRAIN_TYPES
from finetune.errors import PlanError
from finetune.estimate.model_shape import ModelShape
from finetune.plan.facts import Facts
from finetune.plan.resolve import resolve_plan
from tests.support.plans import NOW, PASSED, adjustment, capabilities, plan_of


def test_every_adjustment_carries_a_reason():
    plan = plan_of()
    assert plan.adjustments and all(a.reason for a in plan.adjustments)


def test_auto_precision_follows_the_probe():
    assert plan_of().settings.precision == "fp32"
    fast = capabilities(supports_bfloat16=True, bfloat16_speed=2.0)
    assert plan_of(caps=fast).settings.precision == "bf16"
    assert "2.00 x" in adjustment(plan_of(caps=fast), "precision").reason


def test_bf16_requested_on_a_cpu_without_it_is_kept_and_noted_with_the_measured_ratio():
    caps = capabilities(reasons={"bf16": "bf16 products have 0.30 x the speed of fp32 here, measured"})
    plan = plan_of(caps=caps, precision="bf16")
    assert plan.settings.precision == "bf16" and any("0.30 x" in n for n in plan.notices)


@pytest.mark.promise("MSG_01")
@pytest.mark.parametrize(("word", "used"), [("bf16", "fp16"), ("bf16_autocast", "fp16_autocast")])
def test_mps_without_bf16_gets_fp16_with_the_documented_text(word, used):
    plan = plan_of(Backend.MPS, caps=capabilities(Backend.MPS, reasons={}), precision=word)
    assert plan.settings.precision == used
    assert "MPS backend doesn't support bfloat16" in adjustment(plan, "precision").reason


@pytest.mark.promise("MSG_01")
def test_mps_with_working_bf16_keeps_it():
    plan = plan_of(
        Backend.MPS, caps=capabilities(Backend.MPS, supports_bfloat16=True, bfloat16_speed=1.0), precision="bf16"
    )
    assert plan.settings.precision == "bf16"


def test_full_fine_tuning_keeps_its_weights_in_fp32():
    plan = plan_of(train_type="full", precision="bf16")
    assert plan.settings.precision == "bf16_autocast"


def test_onednn_multiplies_in_fp32_where_the_probe_found_it_exact_and_faster():
    assert plan_of(caps=capabilities(onednn_speed=2.2)).settings.cpu_matmul == "onednn"
    assert "2.20 x" in adjustment(plan_of(caps=capabilities(onednn_speed=2.2)), "cpu_matmul").reason
    assert plan_of(caps=capabilities(onednn_speed=1.05)).settings.cpu_matmul == "blas"
    wrong = capabilities(reasons={"cpu_matmul": "not exact in fp32 on this processor: error 2.0e-03"})
    assert "2.0e-03" in adjustment(plan_of(caps=wrong), "cpu_matmul").reason
    with pytest.raises(PlanError, match="--cpu_matmul onednn: not exact in fp32"):
        plan_of(caps=wrong, cpu_matmul="onednn")
    assert plan_of(Backend.MPS, cpu_matmul="onednn").settings.cpu_matmul == "auto"


@pytest.mark.promise("CLI_05")
@pytest.mark.parametrize("word", ["fp32", "bf16", "fp16", "bf16_autocast", "fp16_autocast", "bf16_buffers_autocast"])
def test_every_precision_word_settles(word):
    assert plan_of(train_type="lora", precision=word).settings.precision == word


@pytest.mark.promise("MSG_05")
def test_cpu_warns_once_of_speed_and_once_of_quantization():
    notices = plan_of().notices
    assert sum("training on a CPU is slow" in n for n in notices) == 1
    assert sum("quantization on a CPU" in n for n in notices) == 1


def test_what_quantization_costs_on_a_cpu_is_not_said_of_dense_copies():
    notices = plan_of(cache_dequantized="true").notices
    assert not any("quantization on a CPU" in n for n in notices)


def test_only_who_named_the_cpu_is_told_of_backend_auto():
    for requested, told in (({}, False), ({"backend": "auto"}, False), ({"backend": "cpu"}, True)):
        notices = resolve_plan(requested, Facts(Backend.CPU, capabilities())).notices
        assert any("--backend auto uses a GPU" in n for n in notices) is told


def test_quantizer_auto_is_the_first_that_passed():
    assert plan_of().settings.quantization_backend == "nf4"
    failed = capabilities(quantizers=PASSED | {"nf4/4": {"error": "failed on cpu: no kernel"}})
    plan = plan_of(caps=failed)
    assert plan.settings.quantization_backend == "bnb"
    assert "nf4 failed on cpu: no kernel" in adjustment(plan, "quantization_backend").reason
    assert plan_of(n_bits=3).settings.quantization_backend == "hqq"
    unknown = plan_of(caps=capabilities(quantizers={}))
    assert "not probed" in adjustment(unknown, "quantization_backend").reason


@pytest.mark.promise("CLI_03")
@pytest.mark.parametrize("word", sorted(DEPRECATED_TRAIN_TYPES))
def test_older_product_names_map_or_say_what_is_missing(word):
    if word.endswith("pro"):
        with pytest.raises(PlanError):
            plan_of(train_type=word)
        return
    plan = plan_of(train_type=word)
    assert plan.settings.train_type in ("lora", "qlora")
    assert plan.settings.use_dora == word.endswith("dora")
    assert adjustment(plan, "train_type").requested == word


REFUSED = [
    (dict(tp_degree=2), "--tp_degree 2: the product of the degrees is 2, but the world size is 1"),
    (dict(tp_degree=2, world_size=2, optimizer="adafactor"), "--optimizer adafactor: contradicts --tp_degree 2"),
    (dict(dp_degree=2), "--dp_degree 2: the product of the degrees is 2, but the world size is 1"),
    (dict(world_size=3, dp_shards=2), "--dp_shards 2: the product of the degrees is 2, but the world size is 3"),
    (dict(world_size=4, dp_degree=2, dp_shards=3), "--dp_degree 2 x --dp_shards 3: the product of the degrees is 6"),
    (dict(world_size=2, cache_dequantized="true"), "--cache_dequantized true: keeps every weight dense"),
    (
        dict(world_size=4, sharding_strategy="hybrid_full_shard"),
        "--sharding_strategy hybrid_full_shard: replicates across",
    ),
    (dict(world_size=4, sharding_strategy="full_shard", dp_degree=2), "--dp_degree 2: contradicts --sharding_strategy"),
    (
        dict(world_size=2, dp_degree=2, use_cpu_offload=True),
        "--use_cpu_offload true: keeps sharded weights in host memory",
    ),
    (dict(n_bits=7), "--n_bits 7: nf4 supports 4 bits. Available: nf4 at 4 bits; bnb at 4/8 bits; hqq at 2/3/4/8 bits"),
    (dict(quantization_backend="bnb", n_bits=2), "--n_bits 2: bnb supports 4/8 bits"),
    (dict(quantization_backend="nf4", quant_type="affine"), "--quant_type affine: nf4 at 4 bits supports nf4"),
    (dict(quantization_backend="bnb", n_bits=8, quant_type="nf4"), "--quant_type nf4: bnb at 8 bits has no choice"),
    (dict(quant_type="mxfp4"), "--quant_type mxfp4: only --backend mlx has it. Use one of affine, fp4, nf4"),
    (dict(loading_workers=0), "--loading_workers 0: must be at least 1"),
    (dict(lora_target_modules=" , "), "--lora_target_modules ' , ': names nothing"),
    (dict(group_size=60), "--group_size 60: nf4 supports powers of two from 16 to 4096"),
    (dict(quantization_backend="mlx", group_size=16), "--group_size 16: mlx supports powers of two from 32 to 128"),
    (
        dict(quantization_backend="hqq", double_quant=True),
        "--double_quant true: not supported by hqq at 4 bits, only by nf4 and bnb",
    ),
    (dict(train_type="lora", n_bits=4), "--n_bits 4: nothing is quantized with --train_type lora"),
    (dict(train_type="full", quantization_backend="nf4"), "--quantization_backend nf4: --train_type full keeps"),
    (dict(train_type="qlora", quantization_backend="none"), "--quantization_backend none: qlora quantizes its base"),
    (dict(train_type="full", use_dora=True), "--use_dora true: full fine-tuning has no adapter"),
    (dict(warmup_steps=5, warmup_ratio=0.1), "--warmup_steps 5: contradicts --warmup_ratio 0.1"),
    (dict(resume="auto", overwrite=True), "--resume auto: contradicts --overwrite true"),
    (
        dict(reentrant_checkpointing=True, use_gradient_checkpointing="false"),
        "--reentrant_checkpointing true: contradicts",
    ),
    (dict(validation_split=1.5), "--validation_split 1.5: must be below 1"),
    (dict(max_steps=0), "--max_steps 0: trains nothing"),
    (dict(init_lora_weights="loftq", train_type="lora"), "--init_lora_weights loftq: starts from what quantization"),
    (dict(llama_pro_path="x", train_type="full"), "--llama_pro_path x:"),
    (dict(cache_dequantized="true", train_type="lora"), "--cache_dequantized true:"),
    (dict(save_model=False, save_every=5), "--save_model false: contradicts --save_every 5"),
    (
        dict(train_type="bnb_dora", quantization_backend="nf4"),
        "--train_type bnb_dora: means --quantization_backend bnb",
    ),
]


@pytest.mark.parametrize(("overrides", "text"), REFUSED, ids=[t.split(":")[0][2:] for _, t in REFUSED])
def test_what_cannot_be_done_is_one_line_that_names_the_flag(overrides, text):
    with pytest.raises(PlanError) as error:
        plan_of(**overrides)
    assert str(error.value).startswith(text) and "\n" not in str(error.value)


@pytest.mark.promise("CLI_11")
def test_a_quantizer_that_failed_its_probe_is_refused_with_the_ones_that_passed():
    results = {"nf4/4": {"error": None}, "bnb/4": {"error": "bitsandbytes is not installed"}}
    with pytest.raises(PlanError, match="bitsandbytes is not installed. These pass their probes on cpu: nf4 at 4 bits"):
        plan_of(caps=capabilities(quantizers=results), quantization_backend="bnb")
    with pytest.raises(PlanError, match="no quantizer passed its probe on cpu .hqq broken; mlx broken"):
        plan_of(caps=capabilities(quantizers={f"{m}/3": {"error": "broken"} for m in ("hqq", "mlx")}), n_bits=3)


@pytest.mark.promise("CLI_10")
def test_flash_attention_without_kernels_says_what_is_used_instead():
    plan = plan_of(use_flash_attention=True)
    assert plan.settings.use_flash_attention is False
    assert "per document" in adjustment(plan, "use_flash_attention").reason


def test_a_gpu_before_capability_8_computes_in_fp16():
    facts = dict.fromkeys(FACTS) | {"device_name": "Tesla T4", "bfloat16_speed": 0.4, "flash": False}
    for capability, word, why in (
        ((7, 5), "fp16", "Tesla T4 has CUDA capability 7.5, and emulates bf16"),
        ((8, 0), "bf16", "bf16 matmuls: 0.40 x the speed"),
    ):
        caps = merged(Backend.CUDA, CAPABILITIES[Backend.CUDA], facts | {"capability": list(capability)})
        plan = plan_of(Backend.CUDA, caps=caps, dataset="x", train_type="lora")
        assert plan.settings.precision == word and why in adjustment(plan, "precision").reason
        asked = plan_of(Backend.CUDA, caps=caps, dataset="x", train_type="lora", precision="bf16")
        assert asked.settings.precision == word


def test_tf32_that_the_environment_forces_is_said():
    environment = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    for backend, precision, count in ((Backend.CUDA, "fp32", 1), (Backend.CUDA, "bf16", 0), (Backend.CPU, "fp32", 0)):
        facts = Facts(backend, capabilities(backend), environment=environment)
        plan = resolve_plan({"dataset": "x", "train_type": "lora", "precision": precision}, facts, NOW)
        assert sum("TF32" in notice for notice in plan.notices) == count


def test_a_quantizer_that_is_wrong_in_the_runs_type_is_passed_over_or_refused():
    results = {"nf4/4": {"error": None, "failed": {"bf16": "product error 3.0e-01"}}, "bnb/4": {"error": None}}
    caps = capabilities(quantizers=results)
    assert plan_of(caps=caps, precision="bf16").settings.quantization_backend == "bnb"
    assert plan_of(caps=caps, precision="fp32").settings.quantization_backend == "nf4"
    with pytest.raises(PlanError, match="--quantization_backend nf4: is wrong in bf16 on cpu: product error"):
        plan_of(caps=caps, precision="bf16", quantization_backend="nf4")


def test_layers_are_compiled_where_that_may_pay_and_nobody_forbids_it():
    def word(backend=Backend.CUDA, environment=None, **overrides):
        caps = capabilities(backend, supports_bfloat16=True)
        facts = Facts(backend, caps, environment=environment or {}, num_devices=overrides.pop("num_devices", 1))
        plan = resolve_plan({"dataset": "x", "train_type": "lora", **overrides}, facts, NOW)
        return plan.settings.compile, plan.memory.compiles

    assert word() == ("auto", None) and word(Backend.CPU) == ("false", False)
    assert word(Backend.CPU, compile="true") == ("true", True) and word(Backend.MPS, compile="true") == ("false", False)
    assert word(environment={"DISABLE_COMPILE": "1"}, compile="true") == ("false", False)
    assert word(num_devices=2) == ("false", False) and word(num_devices=2, compile="true") == ("true", True)
    assert word(num_devices=2, cp_degree=2, compile="true") == ("false", False)


def test_attention_kernels_that_are_not_here_are_refused_with_what_is():
    for word in ("varlen", "flash"):
        with pytest.raises(PlanError, match=f"--attention {word}: no flash attention kernels on cpu. Use auto, groups"):
            plan_of(attention=word)
        with pytest.raises(PlanError, match=f"--attention {word}: its kernels compute in 16 bits only"):
            plan_of(caps=capabilities(supports_flash_attention=True), attention=word, precision="fp32")
        plan = plan_of(caps=capabilities(supports_flash_attention=True), attention=word, precision="bf16")
        assert plan.attention.required and plan.attention.kernels
    assert not plan_of(attention="sdpa").attention.own_products
    assert plan_of(attention="groups").attention.kernels == () and "varlen" in plan_of().attention.kernels


def test_context_over_the_models_limit_is_refused_when_asked_for_and_adjusted_when_not():
    shape = ModelShape.from_config({"model_type": "llama", "max_position_embeddings": 256})
    with pytest.raises(PlanError, match="--context_length 1000: exceeds this model's limit of 256"):
        plan_of(shape=shape, context_length=1000)
    assert plan_of(shape=shape).settings.context_length == 256


def test_a_group_size_that_does_not_divide_an_experts_columns_is_refused():
    shape = ModelShape.from_config({"num_local_experts": 4, "hidden_size": 64, "intermediate_size": 96})
    shape = dataclasses.replace(shape, expert_weights=4 * 3 * 64 * 96)
    with pytest.raises(PlanError, match="--group_size 64: does not divide the 96 columns of an expert, as hqq needs"):
        plan_of(shape=shape, quantization_backend="hqq", group_size=64)


def test_the_plan_says_how_experts_are_trained():
    shape = ModelShape.from_config({"num_local_experts": 8})

    def notice(**overrides):
        return next(n for n in plan_of(shape=shape, **overrides).notices if "experts" in n)

    assert notice() == "8 experts per layer are quantized, and dequantized one at a time; get adapters of their own"
    assert "get no adapter: PEFT has no DoRA" in notice(use_dora=True)
    assert "without dropout" in notice(lora_dropout=0.1)
    assert notice(train_type="lora", lora_target_modules="q_proj") == "8 experts per layer stay frozen"


def test_an_assumed_card_before_ampere_does_not_multiply_bf16():
    for device, wanted in (("t4", "fp16"), ("V100", "fp16"), ("a100", "bf16")):
        for asked in ("auto", "bf16"):
            plan = plan_of(assume_device=device, precision=asked, dry_run=True)
            assert plan.settings.precision == wanted, (device, asked)
    assert "t4 does not multiply bf16" in str(adjustment(plan_of(assume_device="t4", dry_run=True), "precision"))
