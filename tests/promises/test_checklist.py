"""What the source guides promise: thin tests of the promises that no other test shows, and the list of all of them."""

import dataclasses
import re
import subprocess
import sys

import pytest
import torch
from safetensors.numpy import load_file

import quantization_wrapper
from backend_manager import CAPABILITIES, Backend, BackendManager, environment, memory_lines, merged
from finetune.backend.probes import FACTS
from finetune.cli import parse_overrides
from finetune.config import PRECISIONS, TrainConfig
from finetune.errors import PlanError
from finetune.estimate.memory import LOADING_BYTES, base_bytes, loading_bytes
from finetune.estimate.model_cost import ModelCost
from finetune.parts.parts import Parts
from finetune.run.report import plan_lines
from finetune.torch_engine.device import device_of
from quantization_wrapper import QuantizationConfig, QuantizationMethod, pairs
from tests.support.build import load_model
from tests.support.commands import ROOT
from tests.support.planned import SMALL
from tests.support.plans import plan_of
from tests.support.promises import shown_by
from tests.support.tiers import exists, name_of, read_slow_cells
from train import build_parser, fine_tune, make_plan

CPU = torch.device("cpu")
NUMBERS = {"BM": 15, "CLI": 17, "ENV": 8, "MSG": 7, "TAB": 4, "Q": 5, "FT": 12, "CK": 4, "FS": 24, "TR": 17, "AT": 10}


def test_every_promise_has_a_test_that_runs_by_default():
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    shown = shown_by({str(file.relative_to(ROOT)): file.read_text() for file in files})
    slow = read_slow_cells()
    assert all(exists(name_of(cell)) for cell in slow), "a test was renamed"
    shown = {name: left for name, tests in shown.items() if (left := set(tests) - set(slow))}
    assert set(shown) == {f"{kind}_{i:02}" for kind, last in NUMBERS.items() for i in range(1, last + 1)}


@pytest.mark.parametrize(
    "source",
    [
        "def test_a(): ...",
        "@pytest.mark.slow\n@pytest.mark.promise('BM_01')\ndef test_a(): ...",
        "pytestmark = [pytest.mark.rig]\n@pytest.mark.promise('BM_01')\ndef test_a(): ...",
        "@pytest.mark.parametrize('n', [2, pytest.param(4, marks=[pytest.mark.slow, pytest.mark.promise('BM_01')])])\n"
        "def test_a(n): ...",
    ],
)
def test_a_promise_without_a_mark_in_the_default_suite_is_not_shown(source):
    assert shown_by({"a.py": source}) == {}
    shown = "@pytest.mark.parametrize('n', [pytest.param(2, marks=pytest.mark.promise('BM_01'))])\ndef test_b(n): ..."
    assert shown_by({"a.py": source, "b.py": shown}) == {"BM_01": ["b.py::test_b"]}


@pytest.mark.slow
def test_a_test_is_selected_by_the_promise_it_shows():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-k", "TAB_04 or FT_05"]
    files = ["tests/plan/test_recommend.py", "tests/promises/test_parallel_equals_one_process.py"]
    listed = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = [line.partition("::")[2] for line in listed.splitlines() if "::" in line]
    assert found == ["test_the_tree_ends_in_flags_that_parse", "test_ranks_train_as_one_process_does[2]"]


# ---- BackendManager


@pytest.mark.promise("BM_12")
def test_the_guides_snippet_on_flash_attention_runs():
    config = {"context_length": 4096, "use_flash_attention": False}
    if BackendManager("cpu", verbose=False).capabilities.supports_flash_attention:
        config["use_flash_attention"] = True
    else:
        config["context_length"] = min(config["context_length"], 2048)
    assert config == {"context_length": 2048, "use_flash_attention": False}


# ---- flags


@pytest.mark.promise("CLI_01")
@pytest.mark.parametrize("word", ["auto", "cuda", "mps", "mlx", "cpu"])
def test_each_backend_word_parses_and_an_unavailable_one_ends_before_a_model_is_looked_for(word):
    assert parse_overrides(["--backend", word], build_parser()) == {"backend": word}
    here = {"auto", *map(str, BackendManager(verbose=False).available)}
    missing = {"backend": word, "model_name": "/nowhere/model", "dry_run": True}
    with pytest.raises(PlanError) as error:
        make_plan(missing)
    asked = "no such folder" if word in here else f"Backend '{word}' is not available"
    assert asked in str(error.value)


def run_flags(tiny_model, rows_file, folder, **changes) -> dict:
    flags = dict(model_name=str(tiny_model), dataset=str(rows_file), output_dir=str(folder), backend="cpu", lr=1e-2)
    return flags | dict(batch_size=2, context_length=32, max_steps=2, log_to="stdout", lora_rank=4) | changes


@pytest.mark.promise("CLI_03")
def test_a_qlora_run_prints_what_it_trains_and_leaves_its_base_as_it_was(tiny_model, rows_file, tmp_path, capsys):
    before = {file.name: file.read_bytes() for file in tiny_model.iterdir()}
    fine_tune(**run_flags(tiny_model, rows_file, tmp_path / "out", train_type="qlora", quantization_backend="nf4"))
    saved = load_file(tmp_path / "out/adapter_model.safetensors")
    adapters = sum(tensor.size for name, tensor in saved.items() if ".lora_" in name)
    (printed,) = re.findall(r"trainable parameters: ([\d,]+) of [\d,]+ \(\d+\.\d+%\)", capsys.readouterr().out)
    assert int(printed.replace(",", "")) == adapters  # nothing of the base
    assert before == {file.name: file.read_bytes() for file in tiny_model.iterdir()}


@pytest.mark.promise("CLI_04")
def test_the_effective_batch_is_printed_as_its_three_factors():
    plan = plan_of(batch_size=4, gradient_accumulation_steps=3, world_size=2, dataset="x")
    assert any("rows per step: 24 (batch_size 4 x accumulation 3 x data ranks 2)" in s for s in plan_lines(plan))


WEIGHTS = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp16_autocast": torch.float32,
    "bf16_autocast": torch.float32,
    "bf16_buffers_autocast": torch.float32,
}


@pytest.mark.promise("CLI_05")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_parameters_have_the_dtype_that_the_precision_says(precision, tiny_model):
    settings = dataclasses.replace(TrainConfig(), train_type="lora", precision=precision, lora_rank=2)
    named = dict(load_model(tiny_model, settings, CPU).named_parameters())
    frozen = {p.dtype for p in named.values() if not p.requires_grad}
    trained = {p.dtype for p in named.values() if p.requires_grad}
    assert frozen == {WEIGHTS[precision]} and trained == {torch.float32}


@pytest.mark.promise("CLI_09")
@pytest.mark.parametrize(("name", "bits"), pairs())
def test_loading_is_predicted_within_what_is_stored_and_two_layers(name, bits):
    """Of the 1.1 B shape; benchmarks/loading.py measures it."""
    settings = TrainConfig(precision="bf16", quantization_backend=name, n_bits=bits, cache_dequantized="false")
    layer = sum(rows * columns for layer, rows, columns in SMALL.linears if ".layers.0." in layer) * 2
    expected = loading_bytes(Parts(settings), SMALL) - LOADING_BYTES
    assert layer > 0 and expected <= 1.15 * base_bytes(ModelCost(SMALL, Parts(settings))) + 2 * layer


@pytest.mark.promise("CLI_12")
@pytest.mark.parametrize(("name", "bits"), pairs())
def test_the_quantized_base_has_its_bits_and_little_more(name, bits):
    """Within 10 % of bits / 16 of the 16-bit weight and the scales: 64 bits per group of 64, or 32 per row."""
    rows, columns = 512, 1024
    stored = quantization_wrapper.weight_bytes(name, bits, 64, False, rows, columns)
    scales = 4 * rows if quantization_wrapper.per_channel(name, bits) else 8 * rows * columns // 64
    assert rows * columns * bits / 8 <= stored <= 1.1 * rows * columns * bits / 8 + scales


# ---- launch and environment


@pytest.mark.promise("ENV_01")
def test_the_flag_beats_the_environment_beats_the_default(monkeypatch):
    monkeypatch.setenv("FSDP_BACKEND", "nonsense")
    assert make_plan({"backend": "cpu", "dry_run": True}).backend == "cpu"
    with pytest.raises(PlanError, match="FSDP_BACKEND=nonsense: Backend 'nonsense' is unknown"):
        make_plan({"dry_run": True})
    monkeypatch.delenv("FSDP_BACKEND")
    assert make_plan({"dry_run": True}).backend in map(str, Backend)


@pytest.mark.promise("ENV_05")
def test_watermarks_are_left_alone_and_reported(monkeypatch, capsys):
    values = {"PYTORCH_MPS_HIGH_WATERMARK_RATIO": "0.7", "PYTORCH_MPS_LOW_WATERMARK_RATIO": "0.5"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    make_plan({"dry_run": True})
    assert environment().items() >= values.items()
    BackendManager("cpu", verbose=True)
    out = capsys.readouterr().out
    assert all(f"{name}={value}" in out for name, value in values.items())
    monkeypatch.setenv("PYTORCH_MPS_LOW_WATERMARK_RATIO", "0.9")
    with pytest.raises(PlanError, match="PYTORCH_MPS_LOW_WATERMARK_RATIO=0.9: exceeds"):
        make_plan({"dry_run": True})


@pytest.mark.promise("ENV_08")
def test_an_old_device_is_a_notice_and_no_error():
    facts = dict.fromkeys(FACTS) | {"device_name": "GTX 1080", "bfloat16_speed": 0.1, "flash": False}
    for capability, notices in (((6, 1), 1), ((7, 0), 0)):
        caps = merged(Backend.CUDA, CAPABILITIES[Backend.CUDA], facts | {"capability": capability})
        why = f"capability: GTX 1080 has CUDA capability {capability}, 7.0 is the documented minimum"
        assert plan_of(Backend.CUDA, caps=caps, dataset="x", train_type="lora").notices.count(why) == notices


# ---- messages and tables


@pytest.mark.promise("MSG_02")
def test_four_bits_on_mps_are_one_notice():
    notices = plan_of(Backend.MPS, dataset="x").notices
    assert len([n for n in notices if "4-bit weights on MPS" in n and "slower" in n]) == 1


@pytest.mark.promise("MSG_03")
def test_ranks_of_mps_meet_over_gloo():
    class Mac(BackendManager):
        def _detect_available_backends(self):
            return [Backend.MPS, Backend.CPU]

    manager = Mac(verbose=False)
    assert manager.backend is Backend.MPS and manager.get_distributed_backend() == "gloo"


@pytest.mark.promise("MSG_04")
@pytest.mark.parametrize("backend", [Backend.CPU, Backend.CUDA, Backend.MLX])
def test_the_saved_plan_has_the_backend_type(backend):
    if backend is Backend.MLX:
        pytest.importorskip("mlx_lm")
    plan = plan_of(backend, dataset="x")
    assert plan.to_json()["settled"]["backend_type"] == str(backend)


@pytest.mark.promise("MSG_06")
def test_memory_is_reported_in_gib_for_every_kind_of_backend():
    memory = dict(total=64 * 2**30, available=32 * 2**30, allocated=4.5 * 2**30, reserved=6.2 * 2**30)
    device = memory_lines("cuda", memory | {"unified": False})
    assert device[:2] == ["Memory allocated: 4.5 GiB", "Memory reserved: 6.2 GiB"]
    shared = memory_lines("mlx", memory | {"unified": True})
    assert shared[:2] == ["Total memory: 64.0 GiB", "Available memory: 32.0 GiB"]
    assert "Allocated on the device: 4.5 GiB" in memory_lines("mps", memory | {"unified": True})


@pytest.mark.promise("TAB_01", "FS_22")
def test_speeds_of_the_guides_are_not_repeated():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for claim in (r"50-100", r"30-50 tok", r"A100\)? *\|", r"M3 Ultra\)? *\|", r"M2 Ultra *\|"):
            assert not re.search(claim, text), (page.name, claim)


@pytest.mark.promise("Q_02")
def test_hqq_4bit_is_hqq_with_four_bits():
    config = QuantizationConfig(method=QuantizationMethod.HQQ_4BIT)
    plain = QuantizationConfig(method=QuantizationMethod.HQQ, bits=4)
    assert (config.backend, config.bits, config.quant_type) == (plain.backend, plain.bits, plain.quant_type)


@pytest.mark.promise("Q_05")
def test_another_quantizer_starts_from_the_base_weights(tiny_model, rows_file, tmp_path, capsys):
    flags = run_flags(tiny_model, rows_file, tmp_path / "out", quantization_backend="bnb", group_size=32)
    fine_tune(**flags)
    for method in ("hqq", "mlx"):
        steps = flags["max_steps"] = flags["max_steps"] + 1
        state = fine_tune(**flags | {"quantization_backend": method, "resume": "auto"})
        assert state.step == steps
        assert "the base is quantized again from its own weights" in capsys.readouterr().out


# ---- parallelism


@pytest.mark.promise("FT_01")
@pytest.mark.parametrize("word", ["ptd", "accelerate"])
def test_the_two_parallel_backends_parse_and_others_do_not(word):
    assert parse_overrides(["--parallel_backend", word], build_parser()) == {"parallel_backend": word}
    with pytest.raises(PlanError, match="--parallel_backend nanotron: not one of ptd, accelerate"):
        parse_overrides(["--parallel_backend", "nanotron"], build_parser())


@pytest.mark.promise("FT_09")
def test_docs_start_torchrun_with_flags_that_it_has():
    from torch.distributed.run import get_args_parser

    known, found = set(get_args_parser()._option_string_actions), []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "runs").glob("*.sh"))):
        for command in re.findall(r"^torchrun (.*?) train\.py", page.read_text(encoding="utf-8"), re.M):
            found += [word.partition("=")[0] for word in command.split() if word.startswith("--")]
    assert found and {word.replace("-", "_") for word in found} <= {word.replace("-", "_") for word in known}


@pytest.mark.promise("FT_10")
def test_a_rank_takes_the_visible_device_of_its_local_rank():
    """CUDA numbers the visible devices from 0: four of them are 0 to 3, whichever they are."""
    numbers = [0] * 4 if torch.cuda.device_count() == 1 else range(4)  # one that a launcher shows each rank
    assert [device_of("cuda", rank) for rank in range(4)] == [torch.device("cuda", i) for i in numbers]
    assert device_of("cuda") == torch.device("cuda") and device_of("cpu", 3) == CPU
