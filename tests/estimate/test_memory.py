"""The memory plan against the real engine: every countable item, the decisions made of it, and what it says of large models."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from backend_manager import Backend, BackendManager
from finetune.cli import parse_value
from finetune.config import TrainConfig
from finetune.data.collate import largest_microbatch, microbatches
from finetune.data.sampler import Cursor, step_rows
from finetune.distributed.parallel_dims import ParallelDims, check_settings
from finetune.errors import PlanError
from finetune.estimate import activations, budget, memory
from finetune.estimate.model_cost import DEFAULT_TARGETS, GROUP_WASTE, MicrobatchShape
from finetune.estimate.model_shape import ModelShape, read_headers
from finetune.metrics import read_events
from finetune.plan.draft import Facts
from finetune.plan.resolve import resolve_plan
from finetune.plan.resume import inherited_from_checkpoint, merge_saved
from finetune.torch_engine import attention, loss
from finetune.torch_engine.engine import TorchEngine
from finetune.torch_engine.load import load_model
from finetune.torch_engine.lora.layers import features
from finetune.torch_engine.lora.targets import DEFAULT_TARGETS, linear_names
from tests.plan.test_resolve import NOW, capabilities, plan_of
from tests.support import tiny

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
GIB = 2**30
LENGTHS = (40, 37, 12, 30, 44, 9)
MIXED = dict(hidden_size=96, intermediate_size=160, num_hidden_layers=3)


def settings_of(kind, precision="fp32", **changes):
    quantized = (
        dict(quantization_backend="nf4", quant_type="nf4") if kind == "qlora" else dict(quantization_backend="none")
    )
    values = dict(use_gradient_checkpointing="false", cache_dequantized="false", lr=1e-4, microbatch_tokens=4096)
    return replace(TrainConfig(), train_type=kind, precision=precision, **{**quantized, **values, **changes})


def engine_of(architecture, settings, folder, **sizes):
    tiny.build(architecture, **sizes).save_pretrained(folder)
    engine = TorchEngine(load_model(folder, settings, CPU), settings, CPU)
    layout = engine.verify(settings.batch_layout)["batch_layout"][0]
    return engine, layout


def counted(architecture, settings, folder, lengths=LENGTHS, **sizes):
    """(predicted, measured) items of one real step."""
    engine, layout = engine_of(architecture, settings, folder, **sizes)
    rows = tiny.dataset(lengths)
    batch = microbatches(rows, range(len(lengths)), layout, len(lengths), 4096, 0)[0]
    engine.begin_memory(0)
    engine.train_step([batch], 1e-4)
    measured = engine.memory().items
    shape = ModelShape.from_config(
        json.loads((folder / "config.json").read_text()), read_headers(folder.glob("*.safetensors"))
    )
    load = MicrobatchShape(tuple(int(rows.lengths[r]) for r in batch.rows), batch.num_targets, layout)
    return memory.estimate(settings, shape, load)["items"], measured


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


def test_long_documents_run_through_fused_attention_and_are_counted_so(tmp_path):
    settings = settings_of("lora", context_length=600)
    predicted, measured = counted("llama", settings, tmp_path, (400, 300), max_position_embeddings=600)
    assert predicted["activations"] == pytest.approx(measured["activations"], rel=0.01)


@pytest.mark.parametrize(
    "architecture", sorted(set(tiny.ARCHITECTURES) - {"gpt_neox", "falcon", "olmo2", "cohere", "gpt_oss"})
)
def test_a_config_alone_gives_the_sizes_of_the_real_model(architecture, tmp_path):
    model = tiny.build(architecture)
    shape = ModelShape.from_config(model.config.to_dict())
    assert shape.num_weights == sum(p.numel() for p in model.parameters())
    assert sorted(name for name, _, _ in shape.linears) == sorted(linear_names(model))
    assert shape.expert_weights == sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)


@pytest.mark.parametrize("architecture", sorted(tiny.ARCHITECTURES))
def test_headers_give_the_sizes_of_any_model(architecture, tmp_path):
    model = tiny.build(architecture)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    shape = ModelShape.from_config(config, read_headers(tmp_path.glob("*.safetensors")))
    assert shape.exact and shape.num_weights == sum(p.numel() for p in model.parameters())
    modules = dict(model.named_modules())
    for name, rows, columns in shape.linears:
        assert features(modules[name]) == (columns, rows)
    assert {n for n, _, _ in shape.linears} == set(linear_names(model))


def test_constants_that_the_plan_repeats_are_the_engines():
    assert memory.LOGITS_CHUNK_BYTES == loss.CHUNK_BYTES and GROUP_WASTE == attention.GROUP_WASTE
    assert DEFAULT_TARGETS == DEFAULT_TARGETS
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2), (torch.float16, 2)):
        assert attention.DENSE_UP_TO["cpu", dtype] == activations.DENSE_UP_TO[size]


def test_documents_are_grouped_as_attention_groups_them():
    lengths = (96, 60, 33, 90, 20, 90)
    positions = torch.cat([torch.arange(n) for n in lengths])
    real = [(g.num_documents, g.length) for g in attention.documents_of(positions, CPU).groups]
    assert MicrobatchShape(lengths, 10).groups() == real


def test_weights_are_counted_once_and_not_at_every_step(tmp_path):
    engine, layout = engine_of("llama", settings_of("lora"), tmp_path)
    rows = tiny.dataset()
    batches = microbatches(rows, range(4), layout, 4, 4096, 0)
    engine.train_step(batches, 1e-4)
    first, standing = engine.memory().items, engine.counter.standing
    engine.train_step(batches, 1e-4)
    second = engine.memory().items
    assert engine.counter.standing is standing
    names = ("base", "trainable", "gradients", "optimizer", "activations")
    assert [first[n] for n in names] == [second[n] for n in names]


@pytest.mark.parametrize("layout", ["padding_free", "padded"])
def test_the_largest_microbatch_is_the_largest_that_the_loop_will_make(layout):
    rows, cursor, sizes = tiny.dataset(tuple(range(3, 60))), Cursor(), []
    for _ in range(12):
        chosen, cursor = step_rows(len(rows), 10, 7, cursor)
        sizes += [b.input_ids_BS.size for b in microbatches(rows, chosen, layout, 5, 120, 0)]
    found = largest_microbatch(rows, 10, 7, layout, 5, 120, 0, 12)
    assert found.input_ids_BS.size == max(sizes)


# ---- one step tried and undone


def test_a_tried_step_leaves_no_trace(tmp_path):
    """Weights, moments and random state are as before, and so are the losses of the steps after it, dropout included."""
    losses = []
    for tried in (False, True):
        engine, layout = engine_of("llama", settings_of("lora", lora_dropout=0.2), tmp_path)
        rows = tiny.dataset()
        if tried:
            before = {n: p.clone() for n, p in engine.named.items()}
            state = engine.rng_state()["host"].copy()
            engine.try_step(microbatches(rows, range(8), layout, 8, 4096, 0)[0], several=True)
            assert all(torch.equal(p, before[n]) for n, p in engine.named.items())
            assert not engine.optimizer.state and (engine.rng_state()["host"] == state).all()
            assert all(p.grad is None for p in engine.named.values())
        steps = [microbatches(rows, range(i, i + 4), layout, 4, 4096, 0) for i in (0, 4, 2)]
        losses.append([engine.train_step(b, 1e-3).nll for b in steps])
    assert losses[0] == losses[1]


TRY_ROWS = """
import resource, sys
from dataclasses import asdict, replace
from pathlib import Path
import torch
from finetune.data.collate import microbatches
from finetune.data.prepare import Data
from finetune.plan.finalize import probe_batch_size
from finetune.plan.run_plan import RunPlan
from tests.support import tiny
from tests.estimate.test_memory import engine_of, settings_of

torch.set_num_threads(1)
folder = Path(sys.argv[1])
s = settings_of("lora", batch_size=64, microbatch_tokens=64 * 100, batch_layout="padding_free", context_length=100, low_memory=True)
engine, layout = engine_of("llama", s, folder, hidden_size=256, intermediate_size=768)
engine.begin_memory(0)
rows = tiny.dataset((100,) * 64)
plan = RunPlan(s, {"batch_size": "auto"}, (), (), "cpu", "torch")
data = Data(None, set(), rows, None, [], ())
engine.try_step(microbatches(rows, range(4), layout, 4, 6400, 0)[0], several=False)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 96 * 2**20,) * 2)
plan = probe_batch_size(plan, data, engine, print)
print(plan.settings.batch_size, plan.settings.microbatch_tokens)
print(plan.adjustments[0])
"""


def test_rows_are_halved_where_memory_really_runs_out(tmp_path):
    """A limit on the process's address space is the failing allocation: 64 rows take some 190 MiB, 96 are left."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TRY_ROWS, str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    *told, settled, adjustment = done.stdout.splitlines()
    rows, tokens = map(int, settled.split())
    assert rows in (8, 16, 32) and tokens == rows * 100
    assert "batch_size: 64 -> 32 (memory ran out on a step of --batch_size 64)" in adjustment
    assert told[0] == "batch_size: 32 (memory ran out on a step of --batch_size 64)"


# ---- what the plan decides of it


def shape_of(name) -> ModelShape:
    return ModelShape.from_config(json.loads((ROOT / "examples/configs" / name / "config.json").read_text()))


SMALL = ModelShape.from_config(
    dict(
        model_type="llama",
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        max_position_embeddings=4096,
    )
)


def planned(gib, **overrides):
    caps = capabilities(memory_bytes=int(gib * GIB))
    return resolve_plan({"output_dir": "o", **overrides}, Facts(Backend.CPU, caps, SMALL), NOW)


def why(settled, setting) -> str:
    return next(a.reason for a in settled.adjustments if a.setting == setting)


def test_checkpointing_is_off_where_the_plan_fits_and_on_where_it_does_not_with_both_numbers():
    roomy, tight = planned(64), planned(7, microbatch_tokens=2048)
    assert roomy.settings.use_gradient_checkpointing == "false"
    assert tight.settings.use_gradient_checkpointing == "true"
    for settled in (roomy, tight):
        assert why(settled, "use_gradient_checkpointing").count("GiB") == 3


def test_smaller_microbatches_come_before_recomputation():
    settled = planned(8)
    assert settled.settings.microbatch_tokens < 2048 and settled.settings.use_gradient_checkpointing == "false"
    assert "2048 tokens per forward would take" in why(settled, "microbatch_tokens")


def test_batch_size_auto_stays_a_wish_and_is_settled_as_a_number():
    assert parse_value("batch_size", "AUTO") == "auto" and parse_value("batch_size", "4") == 4
    settled = planned(24, batch_size="auto")
    rows = settled.settings.batch_size
    assert 1 < rows <= budget.MOST_AUTO_ROWS and rows & (rows - 1) == 0
    assert settled.settings.microbatch_tokens == rows * settled.settings.context_length
    saved = settled.to_json()
    assert saved["requested"]["batch_size"] == "auto" and saved["settled"]["batch_size"] == rows
    facts = Facts(
        Backend.CPU, capabilities(memory_bytes=500 * GIB), SMALL, inherited=inherited_from_checkpoint(saved, "cpu")
    )
    again = resolve_plan(merge_saved({}, saved), facts, NOW)
    assert again.settings.batch_size == rows and again.settings.microbatch_tokens == settled.settings.microbatch_tokens
    assert planned(500, batch_size="auto").settings.batch_size == 64
    with pytest.raises(PlanError, match="--batch_size many: not an integer"):
        parse_value("batch_size", "many")


def test_rows_left_to_the_plan_leave_an_epoch_its_steps():
    assert budget.rows_for_data(64, 10_000) == (64, None)
    rows, reason = budget.rows_for_data(64, 100)
    assert rows == 8 and "100 rows of data" in reason
    assert budget.rows_for_data(64, 3)[0] == 1


def test_the_largest_batch_fits_and_one_row_more_does_not():
    room, settings = budget.MemoryBudget(24 * GIB), settings_of("qlora")
    rows = budget.largest_rows(settings, SMALL, room)
    assert budget.fits(settings, SMALL, room, budget.full_microbatch(settings, rows))
    assert not budget.fits(settings, SMALL, room, budget.full_microbatch(settings, rows + 1))


def test_each_thing_that_takes_less_is_predicted_to():
    def total(**changes):
        settings = settings_of(changes.pop("train_type", "lora"), changes.pop("precision", "bf16"), **changes)
        return budget.predicted_bytes(settings, SMALL, budget.MemoryBudget(24 * GIB, "cuda"))

    assert total(precision="fp32") > total() > total(train_type="qlora") > total(train_type="qlora", double_quant=True)
    assert total() > total(use_gradient_checkpointing="true") and total() > total(optimizer="adamw_8bit")
    assert total(lora_rank=64) > total() > total(lora_target_modules="default")
    assert total(train_type="qlora", cache_dequantized="true") > total(train_type="qlora")
    assert total(train_type="full", precision="fp32") > 16 * SMALL.num_weights


def test_a_sharded_rank_holds_its_part_and_two_layers_and_the_root_gathered():
    one, four = (
        memory.estimate(settings_of("full"), SMALL, MicrobatchShape.full_rows(4, 512), "cuda", n)["items"]
        for n in (1, 4)
    )
    for name in ("trainable", "gradients", "optimizer"):
        assert four[name] == pytest.approx(one[name] / 4, abs=1)
    assert four["activations"] == one["activations"]
    layer = 4 * SMALL.linear_weights / SMALL.num_layers
    assert four["gathered"] == pytest.approx(2 * layer + 2 * 4 * 32000 * 2048, rel=0.01)


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 * GIB), ("24", 24 * GIB), ("80GB", 80 * 10**9), ("512 MiB", GIB // 2), ("1.5g", 1.5e9)],
)
def test_sizes_are_read(text, size):
    assert budget.parse_size(text) == size


@pytest.mark.parametrize("text", ["banana", "", "-1GiB", "0", "24XB", "1e9GiB", "9999999999GiB", "GiB", "24GiB!"])
def test_what_is_no_size_is_one_line(text):
    with pytest.raises(PlanError, match="--assume_memory") as error:
        budget.parse_size(text)
    assert "\n" not in str(error.value)


def test_assuming_another_machine_is_for_a_dry_run():
    with pytest.raises(PlanError, match="--assume_memory 24GiB: plans for another machine. Add --dry_run"):
        plan_of(assume_memory="24GiB")
    with pytest.raises(PlanError, match="--assume_world_size 2: plans for another machine"):
        plan_of(assume_world_size=2)


# ---- large models, from their configs alone


def dry_run(*argv):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "train.py", "--dry_run", *argv], cwd=ROOT, capture_output=True, text=True
    )
    times = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    imported = {line.rpartition("|")[2].strip() for line in times}
    assert "numpy" in imported and not {"torch", "mlx", "transformers"} & imported
    err = "".join(f"{line}\n" for line in done.stderr.splitlines() if line not in set(times))
    return done.returncode, done.stdout, err


@pytest.mark.parametrize(
    ("name", "weights", "code"),
    [("llama-3-70b", 70.554e9, 2), ("qwen3-32b", 32.762e9, 0), ("mixtral-8x22b", 140.63e9, 2)],
)
def test_two_devices_of_24_gib_and_the_shipped_configs(name, weights, code):
    assert shape_of(name).num_weights == pytest.approx(weights, rel=1e-4)
    found, out, err = dry_run(
        "--model_name", f"examples/configs/{name}", "--assume_memory", "24GiB", "--assume_world_size", "2"
    )
    assert found == code, err
    assert "total" in out and ("fits" if code == 0 else "does not fit, by") in out
    if code:
        assert "devices of this size suffice" in out
    else:
        assert "largest batch that fits in one forward: --batch_size" in out


def test_a_70b_base_in_nf4_is_what_arithmetic_says():
    """80 layers of 855,638,016 linear weights at 4.5 bits, 2 x 128256 x 8192 at 16 bits, halved over two ranks."""
    settings, shape = settings_of("qlora", "bf16"), shape_of("llama-3-70b")
    linear = 80 * (2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 28672 * 8192)
    rest = 2 * 128256 * 8192 + (2 * 80 + 1) * 8192
    assert (shape.linear_weights, shape.num_weights) == (linear, linear + rest)
    items = memory.estimate(settings, shape, MicrobatchShape.full_rows(1, 512), "cuda", 2)["items"]
    assert items["base"] == pytest.approx((linear * 4.5 / 8 + rest * 2) / 2, abs=1)
    adapters_of_a_layer = 16 * (2 * (8192 + 8192) + 2 * (8192 + 1024) + 3 * (8192 + 28672))
    assert items["trainable"] == 4 * 80 * adapters_of_a_layer / 2


def test_a_70b_that_two_devices_do_not_hold_is_told_of_host_memory():
    flags = ("--model_name", "examples/configs/llama-3-70b", "--assume_memory", "24GiB", "--assume_world_size", "2")
    code, out, _ = dry_run(*flags)
    assert code == 2 and "--use_cpu_offload true: -" in out and "GiB of host memory per rank" in out
    code, out, _ = dry_run(*flags, "--use_cpu_offload", "true")
    assert code == 0 and "of host memory per rank, during training" in out and "  base " not in out
    settings, shape = settings_of("qlora", "bf16"), shape_of("llama-3-70b")
    kept, moved = (
        memory.estimate(replace(settings, use_cpu_offload=o), shape, budget.full_microbatch(settings), "cuda", 2)
        for o in (False, True)
    )
    assert kept["total"] - moved["total"] == moved["host"] and "host" not in kept
    alone = memory.estimate(replace(settings, use_cpu_offload=True), shape, budget.full_microbatch(settings), "cuda", 1)
    assert "host" not in alone  # one process shards nothing


def test_what_would_make_it_fit_fits():
    room, shape = budget.MemoryBudget(24 * GIB, "cuda"), shape_of("qwen3-32b")
    settings = settings_of("lora", "bf16", use_gradient_checkpointing="true", microbatch_tokens=2048)
    assert not budget.fits(settings, shape, room)
    enough = [c for c in budget.options(settings, shape, room) if c.fits]
    assert all(budget.fits(c.settings, shape, room) and c.price for c in enough)
    steps = budget.cheapest_combination(settings, shape, room)
    assert enough or steps[-1].fits
    ranks = budget.fewest_devices(settings, shape, room)
    assert budget.fits(settings, shape, replace(room, ranks=ranks)) and not budget.fits(
        settings, shape, replace(room, ranks=ranks - 1)
    )


@pytest.mark.parametrize(
    "dims", [dict(pp=2), dict(tp=2), dict(tp=2, pp=2), dict(cp=2), dict(dp_replicate=2, dp_shard=2)], ids=str
)
def test_devices_that_are_enough_are_counted_with_every_degree_and_no_remedy_is_refused_there(dims):
    dims, shape = ParallelDims(**dims), shape_of("qwen3-32b")
    settings = settings_of("lora", "bf16", use_gradient_checkpointing="true", microbatch_tokens=2048)
    room = budget.MemoryBudget(12 * GIB, "cuda", dims.shards, dims)
    assert not budget.fits(settings, shape, room)
    devices = budget.fewest_devices(settings, shape, room)
    other = ParallelDims(dims.dp_replicate, devices // (dims.world_size // dims.dp_shard), dims.cp, dims.tp, dims.pp)
    assert other.world_size == devices > dims.world_size
    assert budget.fits(settings, shape, budget.MemoryBudget(12 * GIB, "cuda", other.shards, other))
    assert f"unchanged, {devices} devices of this size suffice" in budget.remedy_lines(settings, shape, room)
    for change in budget.options(settings, shape, room):
        check_settings(dims, asdict(change.settings))


def test_weights_are_needed_for_a_run_and_not_for_a_dry_run(tmp_path):
    (tmp_path / "config.json").write_text((ROOT / "examples/configs/qwen3-32b/config.json").read_text())
    code, out, _ = dry_run("--model_name", str(tmp_path), "--assume_memory", "80GiB")
    assert code == 0 and "sizes from config.json" in out
    done = subprocess.run(
        [sys.executable, "train.py", "--model_name", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and "has no model.safetensors" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_config_that_says_too_little_is_told_and_fits(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    code, out, _ = dry_run("--model_name", str(tmp_path))
    assert code == 0 and "memory: not predicted, config.json lacks some of its dimensions" in out


# ---- the managers' two questions


def test_batch_and_model_sizes_answer_from_the_same_plan():
    manager = BackendManager("cpu", verbose=False)
    sizes = [0.001, 0.1, 1, 7, 70, 1000]
    rows = [manager.get_optimal_batch_size(size) for size in sizes]
    assert all(type(n) is int and n >= 1 for n in rows) and rows == sorted(rows, reverse=True)
    assert manager.validate_model_size(0.1) is True and manager.validate_model_size(1000) is False
    for size in (0.01, 0.1, 1, 7, 70, 1000):
        assert budget.llama_like(size * 1e9).num_weights == pytest.approx(size * 1e9, rel=0.2)


# ---- a run prints both


def test_a_run_prints_predicted_beside_measured_and_writes_the_same_items(tiny_model, rows_file, tmp_path, capsys):
    from train import fine_tune

    fine_tune(
        model_name=str(tiny_model),
        dataset=str(rows_file),
        output_dir=str(tmp_path / "out"),
        train_type="lora",
        backend="cpu",
        batch_size="auto",
        context_length=64,
        max_steps=2,
        log_to="stdout",
        precision="fp32",
    )
    start, *_, end = read_events(tmp_path / "out")
    predicted, measured = start["predicted_memory_bytes"], end["peak_memory_bytes"]
    for name in ("base", "trainable", "gradients", "optimizer", "activations"):
        assert predicted["items"][name] == pytest.approx(measured["items"][name], rel=0.05), name
    assert sum(n for k, n in predicted["items"].items() if k != "loading") == predicted["total"]
    beside = {"loading", "evaluating"}
    assert sum(n for k, n in measured["items"].items() if k not in beside) == measured["total"]
    saved = json.loads((tmp_path / "out" / "run_plan.json").read_text())
    assert (
        saved["requested"]["batch_size"] == "auto" and saved["settled"]["batch_size"] == 2
    )  # 24 rows, 8 steps an epoch
    out = capsys.readouterr().out
    assert "predicted" in out and "measured" in out and "error" in out
    resumed = fine_tune(resume=str(tmp_path / "out"), max_steps=4)
    assert resumed.step == 4


# ---- named targets, dense copies, small figures


@pytest.mark.parametrize("wish", ["down_proj", "embed_tokens,lm_head", "all", r".*q_proj|.*experts\.gate_up_proj"])
def test_adapters_on_named_experts_embeddings_and_heads_are_counted(wish, tmp_path):
    settings = settings_of("qlora", lora_target_modules=wish)
    predicted, measured = counted("mixtral", settings, tmp_path)
    assert predicted["trainable"] == measured["trainable"] and predicted["optimizer"] <= measured["optimizer"]


def test_dense_copies_of_experts_are_counted(tmp_path):
    predicted, measured = counted("mixtral", settings_of("qlora", cache_dequantized="true"), tmp_path)
    assert predicted["dequantized"] == pytest.approx(measured["dequantized"], rel=0.05)


def test_dense_copies_are_given_up_where_the_run_does_not_fit_with_them(tmp_path):
    tiny.build("llama", hidden_size=512, intermediate_size=1024, num_hidden_layers=8).save_pretrained(tmp_path)
    shape = ModelShape.from_config(
        json.loads((tmp_path / "config.json").read_text()), read_headers(tmp_path.glob("*.safetensors"))
    )
    dense = plan_of(shape=shape, caps=capabilities(memory_bytes=64 * GIB))
    assert dense.settings.cache_dequantized == "true"
    least = budget.predicted_bytes(
        replace(dense.settings, cache_dequantized="false"), shape, budget.MemoryBudget(64 * GIB, "cpu")
    )
    short = (
        int(
            (
                least
                + 0.3 * (budget.predicted_bytes(dense.settings, shape, budget.MemoryBudget(64 * GIB, "cpu")) - least)
            )
            / budget.USABLE_PART
        )
        + GIB // 2
    )
    plan_short = plan_of(shape=shape, caps=capabilities(memory_bytes=short))
    assert plan_short.settings.cache_dequantized == "false"


def test_small_sizes_are_told_in_mib():
    assert (budget.gib(3 * 2**20), budget.gib(GIB)) == ("3.0 MiB", "1.00 GiB")
