"""Predicted bytes by item against the real engine."""

from dataclasses import replace

import pytest
import torch

from benchmarks import simulate
from benchmarks.simulate import Cell
from finetune.data.collate import microbatches
from finetune.estimate import activations, memory, process_memory
from finetune.estimate.model_cost import MicrobatchShape, ModelCost
from finetune.estimate.model_shape import ModelShape
from finetune.parts.parallel_dims import ParallelDims
from finetune.parts.parts import Parts
from finetune.plan.machine import accumulates
from finetune.torch_engine.attention.dense import Group, index_of
from tests.support import cases, ranks, sharded_loading_cases, tiny
from tests.support.planned import MIXED, SMALL, counted, plan_of_kind, settings_of, shape_of

CASES = {
    "full": ("llama", "full", "fp32", {}, {}),
    "full, autocast": ("llama", "full", "bf16_autocast", {}, {}),
    "full, recomputed": ("llama", "full", "fp32", dict(use_gradient_checkpointing="true"), {}),
    "full, 8 bits less": ("llama", "full", "fp32", dict(optimizer="sgd"), {}),
    "lora": ("llama", "lora", "fp32", {}, {}),
    "lora, bf16": ("llama", "lora", "bf16", {}, {}),
    "lora, autocast": ("llama", "lora", "bf16_autocast", {}, {}),
    "lora, recomputed": ("llama", "lora", "bf16", dict(use_gradient_checkpointing="true"), {}),
    "lora, two targets": ("llama", "lora", "fp32", dict(lora_target_modules="default"), {}),
    "dora": ("llama", "lora", "bf16", dict(use_dora=True), {}),
    "ranks by layer": (
        "llama",
        "lora",
        "bf16",
        dict(lora_rank_pattern=r".*layers\.0\..*=64,q_proj=32,down_proj=2"),
        {},
    ),
    "dropout": ("llama", "lora", "bf16", dict(lora_dropout=0.1), {}),
    "qlora": ("llama", "qlora", "bf16", {}, {}),
    "qlora, double": ("llama", "qlora", "fp32", dict(double_quant=True), {}),
    "qlora, cached": ("llama", "qlora", "fp32", dict(cache_dequantized="true"), {}),
    "padded": ("llama", "lora", "fp32", dict(batch_layout="padded"), {}),
    "tied": ("llama_tied", "full", "fp32", {}, {}),
    "biases": ("qwen2", "qlora", "fp32", {}, MIXED),
    "head norms": ("qwen3", "lora", "bf16", {}, {}),
    "four norms": ("gemma3", "lora", "bf16", {}, {}),
    "fused": ("phi3", "lora", "fp32", {}, {}),
    "fused, bf16": ("phi3", "lora", "bf16", {}, {}),
    "last layers": ("llama", "full", "fp32", dict(num_layers=1), dict(num_hidden_layers=4)),
    "ungated": ("gpt_neox", "lora", "fp32", {}, {}),
    "conv": ("gpt2", "lora", "fp32", {}, {}),
    "experts": ("mixtral", "lora", "fp32", {}, {}),
    "small experts": ("qwen3_moe", "qlora", "fp32", {}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_countable_items_are_what_the_engine_counts(case, tmp_path):
    """Within 5 %, most of them to the byte: the rest are index tensors and a mask."""
    architecture, kind, precision, changes, sizes = CASES[case]
    predicted, measured = counted(architecture, settings_of(kind, precision, **changes), tmp_path, **sizes)
    for name in ("base", "trainable", "gradients", "optimizer", "dequantized", "activations"):
        one, other = predicted.get(name, 0), measured.get(name, 0)
        assert abs(one - other) <= max(0.05 * other, 2048), f"{name}: {one} predicted, {other} measured"


def test_bitsandbytes_counts_where_a_cpu_needs_it():
    """Its import takes 43 MiB, as measured on 2026-11-27."""

    def libraries(device="cpu", kind="lora", **changes):
        m = ModelCost(SMALL, plan_of_kind(kind, "bf16", **changes), device)
        return process_memory.library_bytes(m) - process_memory.LIBRARY_BYTES[device]

    assert libraries(kind="qlora") == libraries(optimizer="adamw_8bit") == process_memory.BITSANDBYTES_BYTES
    assert libraries() == libraries("cuda", "qlora") == libraries(kind="qlora", quantization_backend="hqq") == 0


def test_a_rank_accumulates_where_its_own_part_of_a_step_has_several_microbatches(tmp_path):
    rows = tiny.dataset((20, 30))
    (whole,) = microbatches(rows, range(2), "padding_free", 2, 4096, 0)
    (part,) = microbatches(rows, range(1), "padding_free", 1, 4096, 0)
    for ways in (1, 2):
        plan = replace(plan_of_kind("full", batch_size=2), dims=ParallelDims(dp_shard=ways))
        assert not accumulates(plan, whole) and accumulates(plan, part)


def test_long_documents_run_through_fused_attention_and_are_counted_so(tmp_path):
    settings = settings_of("lora", context_length=600)
    predicted, measured = counted("llama", settings, tmp_path, (400, 300), max_position_embeddings=600)
    assert predicted["activations"] == pytest.approx(measured["activations"], rel=0.01)


def test_a_sharded_rank_holds_its_shard_and_two_gathered_layers_and_the_root():
    one, four = (
        memory.estimate(plan_of_kind("full"), SMALL, MicrobatchShape.full_rows(4, 512), "cuda", n)["items"]
        for n in (1, 4)
    )
    for name in ("trainable", "gradients", "optimizer"):
        assert four[name] == pytest.approx(one[name] / 4, abs=1)
    assert four["activations"] == one["activations"]
    layer = 4 * SMALL.linear_weights / SMALL.num_layers
    root = 2 * 4 * 32000 * 2048
    assert four["gathered"] == pytest.approx(2 * layer + root, rel=0.01) and "staged" not in four
    on_macs = memory.estimate(plan_of_kind("full"), SMALL, MicrobatchShape.full_rows(4, 512), "mps", 4)["items"]
    assert on_macs["staged"] == pytest.approx(max(layer, root) * 1.25 + 2**26, rel=0.01)


def test_a_70b_base_in_nf4_is_what_arithmetic_says():
    """80 layers of 855,638,016 linear weights at 4.5 bits, 2 x 128256 x 8192 at 16 bits, halved over two ranks."""
    settings, shape = settings_of("qlora", "bf16"), shape_of("llama-3-70b")
    linear = 80 * (2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 28672 * 8192)
    rest = 2 * 128256 * 8192 + (2 * 80 + 1) * 8192
    assert (shape.linear_weights, shape.num_weights) == (linear, linear + rest)
    items = memory.estimate(Parts(settings), shape, MicrobatchShape.full_rows(1, 512), "cuda", 2)["items"]
    assert items["base"] == pytest.approx((linear * 4.5 / 8 + rest * 2) / 2, abs=1)
    adapters_of_a_layer = 16 * (2 * (8192 + 8192) + 2 * (8192 + 1024) + 3 * (8192 + 28672))
    assert items["trainable"] == 4 * 80 * adapters_of_a_layer / 2


@pytest.mark.parametrize("wish", ["down_proj", "embed_tokens,lm_head", "all", r".*q_proj|.*experts\.gate_up_proj"])
def test_adapters_on_named_experts_embeddings_and_heads_are_counted(wish, tmp_path):
    settings = settings_of("qlora", lora_target_modules=wish)
    predicted, measured = counted("mixtral", settings, tmp_path)
    assert predicted["trainable"] == measured["trainable"] and predicted["optimizer"] <= measured["optimizer"]


def test_dense_copies_of_experts_are_counted(tmp_path):
    predicted, measured = counted("mixtral", settings_of("qlora", cache_dequantized="true"), tmp_path)
    assert predicted["dequantized"] == pytest.approx(measured["dequantized"], rel=0.05)


@pytest.mark.promise("FS_21")
@pytest.mark.parametrize("layout", ["FSDP2 2", pytest.param("FSDP2 3", marks=pytest.mark.slow)])
def test_a_ranks_own_bytes_are_predicted_to_the_byte(layout, bf16_folders, tmp_path):
    """The first rank has ceil(rows / N) of everything; the last ones less if N does not divide rows."""
    size = cases.LAYOUTS[layout].world_size
    kinds = [k for k in sharded_loading_cases.CASES if size == 3 or k in ("full", "nf4 double")]
    wanted = [(layout, kind, bf16_folders["llama"]) for kind in kinds]
    if size == 3:
        names = ("llama_tied", "qwen2", "gpt2", "gemma3", "mixtral")
        wanted += [(layout, kind, bf16_folders[n]) for n in names for kind in ("full", "lora", "nf4", "hqq")]
    found = ranks.run(size, sharded_loading_cases.own_bytes, tmp_path, wanted=wanted)
    different = [r for r in found[0] if r["predicted"] != r["measured"]]
    assert not different, different
    for results in found[1:]:
        for result in results:
            for name, size_bytes in result["measured"].items():
                assert size_bytes <= result["predicted"][name], result


def test_experts_fewer_than_ranks_are_gathered_with_the_rows_that_fill_shards_up():
    """Eight experts are the eight rows of one tensor: 32 ranks send four times as many."""
    shape, sizes = shape_of("mixtral-8x22b"), {}
    for count in (8, 32):
        plan = replace(plan_of_kind("lora", "bf16"), dims=ParallelDims(dp_shard=count))
        sizes[count] = memory.units(ModelCost(shape, plan)).largest
    experts = sum(rows * columns for rows, columns in shape.expert_matrices()) * 2 / shape.num_layers
    assert sizes[32] - sizes[8] == pytest.approx(3 * experts, rel=0.02)  # and the rows of their adapters


def test_of_layers_with_and_without_experts_the_largest_and_the_one_beside_it_are_gathered():
    """Every second layer of four has experts: a layer with them and one without are gathered, together half of all."""
    experts = dict(num_experts=8, moe_intermediate_size=512, num_experts_per_tok=2, head_dim=32)
    sizes = dict(model_type="qwen3_moe", hidden_size=256, intermediate_size=512, num_hidden_layers=4, vocab_size=1000)
    sizes |= dict(num_attention_heads=8, num_key_value_heads=8, mlp_only_layers=[0, 2], **experts)
    m = ModelCost(ModelShape.from_config(sizes).known, plan_of_kind("full", "bf16"))
    unit = memory.units(m)
    one = 4 * sum(rows * columns for rows, columns in m.shape.expert_matrices()) / 2
    assert memory.layers_with_experts(m) == 2 and unit.largest - unit.beside == pytest.approx(one)
    assert unit.beside == unit.smallest and unit.largest + unit.beside == pytest.approx(unit.layers / 2)


def test_the_gradients_of_a_layer_that_is_reduced_are_those_of_a_layer_that_trains():
    """With its copy; all layers have the same size, and where few train, embeddings and head have no gradients."""
    shape = ModelShape.from_config(simulate.MODELS["llama-8b"]).known
    costs = {n: ModelCost(shape, Parts(settings_of("full", "bf16_autocast", num_layers=n)), "cuda") for n in (1, 4)}
    in_one = 8 * (shape.linear_weights // shape.num_layers + 2 * shape.hidden_size)
    assert [memory.reduced_bytes(m) for m in costs.values()] == [(in_one, 0)] * 2


def test_a_split_heads_gradient_is_there_until_the_end_of_backward():
    cell = Cell("llama-8b", "full", 8)
    dims = simulate.dims_of(cell)
    plan = Parts(replace(simulate.settings_of(cell), vocab_parallel="true"), dims)
    m = ModelCost(ModelShape.from_config(simulate.MODELS["llama-8b"]).known, plan, "cuda")
    assert m.plan.parallel.vocab_parallel
    one = MicrobatchShape((16,), 16)  # so few that layers keep next to nothing
    total = memory.step_bytes(m, one, memory.activation_bytes(m, one), 8)["total"]
    layer = 4 * m.shape.linear_weights // m.shape.num_layers
    head = 4 * m.shape.vocab_size * m.shape.hidden_size // 8
    others = 4 * m.shape.linear_weights // 8 * 31 // 32
    assert total >= others + head + 2 * layer


def heap_of(kind: str, tokens: int, **changes) -> int:
    """Predicted growth of the heap beside a fixed part of the activations."""
    m = ModelCost(SMALL, plan_of_kind(kind, **changes), "cpu")
    return process_memory.allocator_bytes(m, MicrobatchShape((tokens,), tokens), 2**22, spare=0)


def test_biases_and_scores_of_attention_by_products_are_predicted():
    """To the byte of the tensors that dense.py makes: a bias of P * L x L numbers, and four such in backward."""
    m = ModelCost(SMALL, plan_of_kind("lora", "bf16"))
    at_once = 8 * 1024 * 1024 * 2  # 32 heads, 4 of keys
    assert activations.dense_attention_sizes(m, MicrobatchShape((1024, 1024), 2048)) == (at_once, 4 * at_once)
    assert activations.dense_attention_sizes(m, MicrobatchShape((1025,), 1025)) == (0, 0)
    assert activations.dense_attention_sizes(ModelCost(SMALL, m.plan, "cuda"), MicrobatchShape((99,), 99)) == (0, 0)
    index = index_of((Group(1024, None, None, None, 2),), 2048, 32, 4, None, torch.bfloat16)
    assert index.groups[0].bias_QL.nbytes == at_once


def test_what_a_teacher_gave_is_counted_for_the_rows_of_a_step_and_within_the_loss():
    batch = MicrobatchShape((100, 60), 50)
    plain = plan_of_kind("lora", batch_size=4)
    taught = plan_of_kind("lora", batch_size=4, teacher="t", distill_loss="forward_kl", teacher_top_k=64)
    m = ModelCost(SMALL, taught)
    assert memory.taught_bytes(ModelCost(SMALL, plain), batch) == (0, 0)
    assert memory.taught_bytes(m, batch) == (2 * 160 * 64 * 8, 50 * 64 * 12 + 16 * 64 * 32)
    items = memory.estimate(taught, SMALL, batch)["items"]
    assert items["taught"] == 2 * 160 * 64 * 8
    every = replace(taught, settings=replace(taught.settings, teacher_top_k=10**6))
    assert memory.taught_bytes(ModelCost(SMALL, every), batch)[0] == 2 * 160 * 32000 * 8


def test_holes_of_dequantized_weights_and_of_few_tokens_are_predicted():
    """Drawn cells took up to 31 % more than predicted without them."""
    many = 4096
    plain = heap_of("lora", many)
    assert heap_of("qlora", many, cache_dequantized="true") == plain < heap_of("qlora", many)
    assert heap_of("full", many) == plain < heap_of("full", 8)
    assert heap_of("lora", 8) == plain
