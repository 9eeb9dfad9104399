"""What programs written for the older scripts import and call, as those scripts documented it."""

import dataclasses
import importlib
import re
import subprocess
import sys

import pytest
import torch
from torch.distributed import fsdp

import backend_manager
import quantization_wrapper
from backend_manager import (
    Backend,
    BackendCapabilities,
    BackendManager,
    detect_backend,
    get_backend_manager,
    get_device,
)
from finetune.backend import detect
from finetune.config import NAMES
from finetune.quantizers.linear import QuantizedLinear
from mps_fsdp_wrapper import BackwardPrefetch, MPSOperatorFallback, ShardingStrategy, UnifiedMemoryOptimizer
from quantization_wrapper import (
    BitsAndBytesAdapter,
    HQQAdapter,
    MLXAdapter,
    QuantizationConfig,
    QuantizationMethod,
    QuantoAdapter,
    create_quantization_adapter,
    get_recommended_config,
    replace_linear_with_quantized,
    validate_quantization_config,
)
from tests.support.commands import ROOT
from tests.test_older_scripts import SETTLED

CPU = BackendManager("cpu", verbose=False)


def test_a_device_is_a_function_a_property_and_a_method():
    assert get_device("cpu") == get_device(Backend.CPU) == CPU.device == CPU.get_device() == torch.device("cpu")
    assert get_device() == get_backend_manager().device


@pytest.mark.promise("BM_09")
def test_a_manager_has_the_older_attributes():
    assert BackendManager.CAPABILITIES is backend_manager.CAPABILITIES
    assert CPU._available_backends == CPU.available and Backend.CPU in CPU._available_backends
    assert BackendCapabilities().max_model_size is None and CPU.CAPABILITIES[Backend.CPU].max_model_size == 7
    info = CPU.get_memory_info()
    for older, name in (
        ("total", "total"),
        ("free", "available"),
        ("allocated", "allocated"),
        ("reserved", "reserved"),
    ):
        assert info[f"{older}_memory"] == info[name]
    assert CPU.get_optimal_batch_size(7, sequence_length=64) >= CPU.get_optimal_batch_size(7, sequence_length=4096)


def test_a_model_that_does_not_fit_is_refused_with_both_numbers_and_can_be_asked_about():
    assert CPU.validate_model_size(0.1) is True and CPU.fits_model_size(0.1) is True
    assert CPU.fits_model_size(1000) is False
    with pytest.raises(ValueError, match=r"model of 1000 B parameters: exceeds the recommended limit of \d+\.\d B"):
        CPU.validate_model_size(1000)


@pytest.mark.promise("BM_13")
def test_a_subclass_may_return_a_list_and_nothing_else():
    class Mine(BackendManager):
        def _detect_available_backends(self):
            return [Backend.CPU]

    assert Mine(verbose=False).backend is Backend.CPU
    with pytest.raises(ValueError, match="Backend 'cuda' is not available. Available here: cpu"):
        Mine("cuda", verbose=False)


@pytest.mark.promise("BM_01")
def test_the_package_installed_as_it_is_needs_neither_torch_nor_mlx_to_be_imported():
    code = "import sys, backend_manager, quantization_wrapper; assert not {'torch', 'mlx'} & set(sys.modules)"
    subprocess.check_call([sys.executable, "-c", code], cwd=ROOT)


@pytest.mark.promise("BM_07")
@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"cuda": True}, Backend.CUDA),
        ({"mps": True}, Backend.MPS),
        ({"cuda": True, "mps": True}, Backend.CUDA),
        ({}, None),
    ],
)
def test_an_imported_torch_is_asked(monkeypatch, answers, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: answers.get("cuda", False))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: answers.get("mps", False))
    monkeypatch.setattr(BackendManager, "_mlx_has_gpu", staticmethod(lambda: False))
    assert detect_backend() is (expected or Backend.CPU)
    manager = BackendManager(verbose=False)
    assert (Backend.CUDA in manager.unavailable) is ("cuda" not in answers)


def test_a_driver_that_torch_cannot_use_is_a_reason(monkeypatch):
    def broken():
        raise RuntimeError("driver too old\nmore")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    monkeypatch.setattr(detect, "torch_build", lambda: {"version": "2", "cuda": "12", "hip": None, "xpu": None})
    manager = BackendManager(verbose=False)
    assert manager.unavailable[Backend.CUDA] == "torch 2 cannot use it: driver too old"


def test_a_probe_that_fails_is_a_reason_and_not_an_exception(monkeypatch, tmp_path):
    """As where a driver is there and torch was built without CUDA: an AssertionError."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    class Claims(BackendManager):
        def _detect_available_backends(self):
            return [Backend.CUDA, Backend.CPU]

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    capabilities = Claims("cuda", verbose=False).capabilities
    assert not capabilities.probed and capabilities.reasons["probes"].startswith("failed here: ")
    assert Claims("cuda", verbose=False).probe_quantization("nf4", 4)["error"].startswith("failed on cuda: ")


def test_a_backend_is_exported_by_the_quantization_wrapper_too():
    assert quantization_wrapper.Backend is Backend


ADAPTERS = {"bnb_nf4": BitsAndBytesAdapter, "hqq": HQQAdapter, "mlx": MLXAdapter, "quanto": QuantoAdapter}


@pytest.mark.promise("Q_01")
@pytest.mark.parametrize("method", ADAPTERS)
def test_an_adapter_is_made_in_both_forms_and_quantizes(method):
    config = QuantizationConfig(method=method)
    for adapter in (create_quantization_adapter(config), create_quantization_adapter(Backend.CPU, config)):
        assert type(adapter) is ADAPTERS[method] and adapter.config is config
    assert adapter.backend is Backend.CPU and create_quantization_adapter(config).backend is None
    assert create_quantization_adapter("cpu", config=config).backend is Backend.CPU
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(64, 64), "lm_head": torch.nn.Linear(64, 64)})
    replace_linear_with_quantized(model, adapter)
    assert isinstance(model["a"], QuantizedLinear) and isinstance(model["lm_head"], torch.nn.Linear)
    assert isinstance(adapter.quantize_linear(torch.nn.Linear(64, 64)), QuantizedLinear)


def test_an_adapter_of_another_method_and_arguments_of_other_types_are_refused():
    with pytest.raises(ValueError, match="HQQAdapter: is for hqq, not for bnb"):
        HQQAdapter(QuantizationConfig(method="bnb_nf4"))
    with pytest.raises(ValueError, match="8 is neither a QuantizationConfig nor a backend"):
        create_quantization_adapter(Backend.CPU, 8)
    with pytest.raises(ValueError, match="has no QuantizationConfig"):
        create_quantization_adapter(Backend.CPU)


@pytest.mark.parametrize("method", ADAPTERS)
def test_an_adapter_s_class_takes_the_older_order(method):
    config = QuantizationConfig(method=method)
    for adapter in (ADAPTERS[method](Backend.CPU, config), ADAPTERS[method](config, Backend.CPU)):
        assert adapter.config is config and adapter.backend is Backend.CPU
    with pytest.raises(ValueError, match="use `python train.py --model_name a/b"):
        adapter.load_quantized_model("a/b", {"bits": 4})
    with pytest.raises(ValueError, match="^HQQAdapter: 7 is neither a QuantizationConfig nor a backend"):
        HQQAdapter(Backend.CPU, 7)


def test_our_enumerations_equal_torch_s():
    for ours, torchs in ((ShardingStrategy, fsdp.ShardingStrategy), (BackwardPrefetch, fsdp.BackwardPrefetch)):
        for member in ours:
            theirs = torchs[member.name]
            assert member == theirs and theirs == member and hash(member) == hash(theirs)
    assert ShardingStrategy.FULL_SHARD != fsdp.ShardingStrategy.NO_SHARD
    assert ShardingStrategy.FULL_SHARD != ShardingStrategy.NO_SHARD


def test_helpers_of_the_older_wrapper_take_its_arguments():
    assert UnifiedMemoryOptimizer.get_optimal_bucket_size(2**36) == 200e6
    assert UnifiedMemoryOptimizer.get_optimal_bucket_size(2**30) == 50e6
    fallback = MPSOperatorFallback(["aten::b", "aten::a"])
    with pytest.warns(UserWarning, match="PYTORCH_ENABLE_MPS_FALLBACK is not set"):
        assert fallback.patch_unsupported_ops() == ["aten::a", "aten::b"]
    assert fallback.fallback_ops == ["aten::b", "aten::a"]


def test_the_memory_of_a_backend_that_torch_lacks_is_one_line():
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    manager = BackendManager(verbose=False)
    manager.backend = Backend.CUDA
    for ask in (manager.get_memory_info, lambda: manager.get_optimal_batch_size(7)):
        with pytest.raises(
            RuntimeError, match="^backend cuda: its memory cannot be read .(Torch not compiled|Found no)"
        ):
            ask()


def test_loading_a_quantized_model_names_the_command_that_does_it():
    adapter = create_quantization_adapter("cpu", QuantizationConfig(method="hqq"))
    with pytest.raises(ValueError, match="train.py --model_name a/b --train_type qlora --quantization_backend hqq"):
        adapter.load_quantized_model("a/b")


def test_a_config_is_validated_in_both_forms():
    config = QuantizationConfig(method="hqq", bits=4)
    assert validate_quantization_config(config) is None and validate_quantization_config(config, Backend.CPU) == []
    config.bits = 5
    assert validate_quantization_config(config, "cpu") == ["bits 5: hqq has 4, 8, 3, 2."]
    with pytest.raises(ValueError, match="bits 5: hqq has"):
        validate_quantization_config(config)
    assert validate_quantization_config(QuantizationConfig(method="nf4"), "mlx") == [
        "method nf4: backend mlx has mlx only."
    ]
    assert validate_quantization_config(QuantizationConfig(method="none"), "cuda") == []


@pytest.mark.parametrize(("size", "memory", "bits"), [(8, 24, 16), (8, 16, 8), (8, 8, 4), (70, 48, 4)])
def test_a_config_is_recommended_for_a_size_and_a_memory(size, memory, bits):
    config = get_recommended_config(Backend.CUDA, size, memory)
    assert config.bits == bits and (config.method is QuantizationMethod.NONE) == (bits == 16)
    assert get_recommended_config(Backend.CUDA, model_size_b=size, available_memory_gb=memory) == config


def test_a_number_that_may_be_a_size_or_bits_is_refused():
    with pytest.raises(ValueError, match="is that a size or bits"):
        get_recommended_config(Backend.CUDA, 8)
    assert get_recommended_config(Backend.CUDA, bits=8).bits == 8 and get_recommended_config().bits == 4
    with pytest.raises(ValueError, match="contradicts"):
        get_recommended_config("cuda", 8, 24, bits=4)


def test_modules_are_skipped_by_any_part_of_their_name():
    model = torch.nn.ModuleDict({n: torch.nn.Linear(64, 64) for n in ("lm_head", "q_proj")})
    quantization_wrapper.quantize_model(model, QuantizationConfig(skip_modules=["head"]))
    assert isinstance(model["lm_head"], torch.nn.Linear) and isinstance(model["q_proj"], QuantizedLinear)


def rows_of_names() -> list[tuple[str, list[str]]]:
    """(module, names) of each row of the table of names in docs/migration.md."""
    page = (ROOT / "docs/migration.md").read_text(encoding="utf-8")
    table = page[page.index("Every name of the older scripts") : page.index("## TRL")]
    rows = re.findall(r"^\| (?:`([\w.]+)`)?([^|]*) \| (`.+`) \|$", table, re.M)
    return [(module or kind.strip(), re.findall(r"`([^`]+)`", names)) for module, kind, names in rows]


@pytest.mark.parametrize(("where", "names"), rows_of_names(), ids=[f"{w}-{n[0]}" for w, n in rows_of_names()])
def test_every_older_name_of_the_migration_page_is_one_here(where, names):
    assert names
    for name in names:
        if where == "train.py":
            assert NAMES.get(name.removeprefix("--")), name
        elif where == "environment":
            read = (ROOT / "finetune/distributed/env.py").read_text() + (ROOT / "backend_manager.py").read_text()
            assert f'"{name}"' in read, name
        else:
            module, _, kind = where.partition(".")
            owner = importlib.import_module(module)
            owner = getattr(owner, kind) if kind else owner
            fields = {f.name for f in dataclasses.fields(owner)} if dataclasses.is_dataclass(owner) else set()
            assert hasattr(owner, name) or name in fields, f"{where}: {name}"


def test_the_page_has_every_older_flag():
    flags = {name for where, names in rows_of_names() if where == "train.py" for name in names}
    assert flags >= {words.split()[0] for words, _ in SETTLED if "=" not in words.split()[0]}
