"""What this machine can do: detection, probes, and the documented extension point."""

import shutil
import subprocess
import sys

import pytest

from backend_manager import (
    CAPABILITIES,
    PRECISION_MAP,
    QUANTIZATION_MAP,
    Backend,
    BackendManager,
    allowed,
    detect_backend,
    environment_error,
    get_backend_manager,
    rows_that_fit,
    torch_build,
)
from tests.support.commands import ROOT
from tests.support.llama_like import llama_like, predicted_rows
from tests.support.terminals import drawn

HERE = BackendManager(verbose=False)


class Only(BackendManager):
    """The documented extension point: detection is overridden, nothing else."""

    found = [Backend.CPU]

    def _detect_available_backends(self):
        super()._detect_available_backends()
        return list(self.found)


@pytest.mark.promise("BM_02")
def test_names_and_values_are_the_documented_ones():
    assert [str(b) for b in (Backend.CUDA, Backend.MPS, Backend.MLX, Backend.CPU)] == ["cuda", "mps", "mlx", "cpu"]
    assert f"{Backend.MPS}" == "mps"


@pytest.mark.promise("BM_03", "BM_04")
@pytest.mark.parametrize("word", [None, "auto", "AUTO"])
def test_auto_and_none_choose_the_same(word):
    assert BackendManager(word, verbose=False).backend is HERE.backend
    assert isinstance(HERE.backend, Backend) and HERE.backend in HERE.available


@pytest.mark.promise("BM_05")
@pytest.mark.parametrize("word", ["cpu", "CPU", Backend.CPU])
def test_a_backend_is_given_as_text_or_enum(word):
    assert BackendManager(word, verbose=False).backend is Backend.CPU


@pytest.mark.promise("BM_05")
def test_an_unknown_word_names_the_valid_ones():
    with pytest.raises(ValueError, match="'gpu' is unknown. Use one of auto, cuda, mps, mlx, cpu"):
        BackendManager("gpu", verbose=False)


@pytest.mark.promise("BM_08", "TR_17")
def test_an_unavailable_backend_says_so_with_what_is_available():
    class OnlyCPU(Only):
        pass

    with pytest.raises(ValueError, match="Backend 'cuda' is not available.*Available here: cpu"):
        OnlyCPU("cuda", verbose=False)


@pytest.mark.promise("BM_07")
def test_auto_takes_the_first_available_in_the_documented_order():
    left = [Backend.CUDA, Backend.MLX, Backend.MPS, Backend.CPU]
    while left:

        class Some(Only):
            found = list(reversed(left))
            _mlx_has_gpu = staticmethod(lambda: True)

        assert Some(verbose=False).backend is left[0]
        left = left[1:]


@pytest.mark.promise("BM_07")
def test_mlx_that_has_only_a_processor_is_available_by_name_and_never_picked():
    class Both(Only):
        found = [Backend.MLX, Backend.CPU]

    if BackendManager._mlx_has_gpu():
        pytest.skip("this machine's MLX has a GPU")
    assert Both(verbose=False).backend is Backend.CPU
    assert Both("mlx", verbose=False).backend is Backend.MLX


@pytest.mark.promise("BM_01")
def test_constructing_one_imports_no_framework():
    code = (
        "import sys; from backend_manager import BackendManager; BackendManager(verbose=False)\n"
        "assert not {'torch', 'mlx', 'transformers', 'numpy'} & set(sys.modules), 'a framework was imported'"
    )
    subprocess.check_call([sys.executable, "-c", code], cwd=ROOT)


@pytest.mark.promise("BM_14")
@pytest.mark.parametrize(("value", "expected"), [("cpu", Backend.CPU), ("auto", HERE.backend), (None, HERE.backend)])
def test_the_environment_names_a_backend(monkeypatch, value, expected):
    monkeypatch.delenv("FSDP_BACKEND", raising=False)
    if value:
        monkeypatch.setenv("FSDP_BACKEND", value)
    assert BackendManager.from_env(verbose=False).backend is expected
    assert get_backend_manager().backend is expected


@pytest.mark.promise("BM_14")
def test_junk_in_the_environment_is_an_error(monkeypatch):
    monkeypatch.setenv("FSDP_BACKEND", "junk")
    with pytest.raises(ValueError, match="'junk' is unknown"):
        BackendManager.from_env(verbose=False)


@pytest.mark.promise("BM_09", "TAB_02", "TAB_03")
def test_the_baseline_has_every_documented_field_for_every_backend():
    for backend in Backend:
        caps = CAPABILITIES[backend]
        assert caps.quantization_bits and caps.notes and caps.precisions
        assert bool(caps.distributed_backend) is caps.supports_distributed
    assert CAPABILITIES[Backend.CUDA].quantization_bits == (4, 8, 16)
    assert CAPABILITIES[Backend.MPS].quantization_bits == (8, 16)
    assert CAPABILITIES[Backend.CPU].quantization_bits == (8, 16)
    collectives = {str(backend): CAPABILITIES[backend].distributed_backend for backend in Backend}
    assert collectives == {"cuda": "nccl", "mps": "gloo", "mlx": None, "cpu": "gloo", "xpu": "xccl"}
    flash = [str(backend) for backend in Backend if CAPABILITIES[backend].supports_flash_attention]
    assert flash == ["cuda"] and not CAPABILITIES[Backend.MLX].supports_fsdp
    assert PRECISION_MAP == {
        "cuda": ["fp32", "fp16", "bf16"],
        "mps": ["fp32", "fp16"],
        "mlx": ["fp32", "fp16"],
        "cpu": ["fp32"],
    }
    assert QUANTIZATION_MAP == {
        "cuda": ["bnb", "hqq", "quanto"],
        "mps": ["mlx", "quanto"],
        "mlx": ["mlx"],
        "cpu": ["hqq"],
    }
    with pytest.raises(ValueError, match="it has fp32"):
        allowed(PRECISION_MAP, "cpu", "bf16")
    assert allowed(QUANTIZATION_MAP, "cuda", "bnb") == "bnb"


@pytest.mark.promise("BM_10")
def test_capabilities_are_probed_and_each_difference_carries_its_reason():
    caps = BackendManager("cpu", verbose=False).capabilities
    assert caps.probed and caps.bfloat16_speed > 0
    assert caps.quantization_bits == CAPABILITIES[Backend.CPU].quantization_bits or "quantization_bits" in caps.reasons
    assert caps.supports_bfloat16 or "bf16" in caps.reasons
    assert (caps.onednn_speed is None) == ("cpu_matmul" in caps.reasons)
    assert isinstance(caps.supports_flash_attention, bool)


def test_probes_are_cached_and_read_without_a_framework(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    unprobed = BackendManager("cpu", verbose=False).documented_or_cached()
    assert not unprobed.probed and "not probed" in unprobed.reasons["probes"]
    manager = BackendManager("cpu", verbose=False)
    assert manager.known_quantization("nf4", 4) is None
    found = manager.probe_quantization("nf4", 4)
    assert found["error"] is None and manager.known_quantization("nf4", 4) == found
    probed = manager.capabilities
    assert list(probed.quantizers) == ["nf4/4"] and 4 in probed.quantization_bits
    assert BackendManager("cpu", verbose=False).documented_or_cached() == probed
    file = next((tmp_path / "finetune" / "probes").iterdir())
    written = file.read_text()
    for changed in ("{", written.replace('"cpu"', '"cpx"')):  # truncated, or changed: probed again
        file.write_text(changed)
        assert not BackendManager("cpu", verbose=False).documented_or_cached().probed
    assert BackendManager("cpu", verbose=False).capabilities.probed


OF_ANOTHER_SHAPE = (
    *("[" * 100_000, "5", "[]", '{"quantizers": 5}', '{"quantizers": {"nf4/4": 5}}', '{"quantizers": {"nf4": {}}}'),
    *('{"quantizers": {"nf4/4": {"error": null}}}', '{"bfloat16_speed": "x"}', '{"bfloat16_speed": 1.0}', "\x00\xff"),
)


def test_a_cache_of_another_shape_is_ignored_and_written_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = BackendManager("cpu", verbose=False).cache.file
    file.parent.mkdir(parents=True)
    for text in OF_ANOTHER_SHAPE:
        file.write_text(text)
        manager = BackendManager("cpu", verbose=False)
        assert not manager.documented_or_cached().probed, text[:80]
        assert manager.known_quantization("nf4", 4) is None, text[:80]
    assert manager.capabilities.probed
    assert BackendManager("cpu", verbose=False).documented_or_cached().probed


@pytest.mark.promise("BM_10")
def test_widths_are_supported_where_a_method_has_them_and_passes():
    manager = BackendManager("cpu", verbose=False)
    assert all(manager.supports_quantization(bits) for bits in (16, 8, 4))
    assert not manager.supports_quantization(7)
    with pytest.raises(ValueError, match="hqq supports 2/3/4/8 bits"):
        manager.probe_quantization("hqq", 5)


@pytest.mark.promise("BM_11")
@pytest.mark.parametrize("size", [0.001, 0.135, 7, 70, 1000])
def test_a_batch_size_is_given_for_any_model_size(size):
    assert BackendManager("cpu", verbose=False).get_optimal_batch_size(size) >= 1


@pytest.mark.promise("MSG_06")
def test_memory_is_real_numbers():
    info = BackendManager("cpu", verbose=False).get_memory_info()
    assert 2**28 < info["available"] <= info["total"] and info["allocated"] > 2**20


@pytest.mark.promise("BM_06")
def test_the_summary_names_everything_and_quiet_prints_nothing(capsys):
    BackendManager("cpu", verbose=False)
    assert capsys.readouterr().out == ""
    BackendManager("cpu")
    shown = capsys.readouterr().out
    for word in (
        "Selected backend: cpu",
        "Available backends",
        "Device",
        "Quantization bits",
        "Distributed",
        "FSDP",
        "bf16",
        "Flash attention",
        "Total memory",
        "GiB",
    ):
        assert word in shown


def test_the_device_dtype_and_collectives_of_a_cpu():
    import torch

    manager = BackendManager("cpu", verbose=False)
    assert manager.get_device() == torch.device("cpu")
    assert manager.get_dtype(prefer_bfloat16=False) is torch.float32
    assert manager.get_distributed_backend() == "gloo"
    assert BackendManager("cpu", verbose=False).validate_model_size(0.1)
    assert detect_backend() is HERE.backend


def test_the_build_of_torch_is_read_without_importing_it():
    import torch

    build = torch_build()
    # The wheel's metadata leave out +cu130, which its module has.
    assert build["version"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert bool(build["cuda"]) == (torch.version.cuda is not None)


@pytest.mark.promise("ENV_05")
def test_watermarks_the_wrong_way_round_are_refused(monkeypatch):
    monkeypatch.setenv("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "0.7")
    monkeypatch.setenv("PYTORCH_MPS_LOW_WATERMARK_RATIO", "0.5")
    assert environment_error() is None
    monkeypatch.setenv("PYTORCH_MPS_LOW_WATERMARK_RATIO", "0.9")
    assert "LOW_WATERMARK_RATIO=0.9: exceeds" in environment_error()


@pytest.mark.promise("BM_15")
def test_a_backend_is_added_in_a_few_lines(tmp_path):
    """The documented recipe: enum, CAPABILITIES, detection."""
    for name in ("backend_manager.py", "quantization_wrapper.py"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "finetune", tmp_path / "finetune")
    steps = (
        ("capabilities.py", '    XPU = "xpu"\n', '    XPU = "xpu"\n    TPU = "tpu"\n'),
        (
            "capabilities.py",
            "CAPABILITIES = {\n",
            "CAPABILITIES = {\n    Backend.TPU: BackendCapabilities(notes='new'),\n",
        ),
        ("detect.py", "AUTO_ORDER = (", "AUTO_ORDER = (Backend.TPU, "),
        ("detect.py", "Backend.CPU: None}", "Backend.CPU: None, Backend.TPU: None}"),
    )
    for name, before, after in steps:
        file = tmp_path / "finetune" / "backend" / name
        text = file.read_text()
        assert text.count(before) == 1
        file.write_text(text.replace(before, after))
    code = (
        "from backend_manager import *; m = BackendManager(verbose=False); print(m.backend, m.backend is Backend.TPU)"
    )
    out = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, text=True)
    assert out.split() == ["tpu", "True"]


def test_batch_and_model_sizes_have_sensible_bounds():
    manager = BackendManager("cpu", verbose=False)
    sizes = [0.001, 0.1, 1, 7, 70, 1000]
    rows = [manager.get_optimal_batch_size(size) for size in sizes]
    assert all(type(n) is int and n >= 1 for n in rows) and rows == sorted(rows, reverse=True)
    assert manager.fits_model_size(0.1) is True and manager.fits_model_size(1000) is False
    for size in (0.01, 0.1, 1, 7, 70, 1000):
        assert llama_like(size * 1e9).num_weights == pytest.approx(size * 1e9, rel=0.2)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("gib", [8, 24, 80])
@pytest.mark.parametrize("context_length", [512, 4096])
def test_rows_of_a_size_are_those_of_the_plans_memory_prediction(device, gib, context_length):
    """Within one row or a quarter: the closed form knows no exact shapes, and adds up peaks of different moments."""
    for size in (0.1, 0.5, 1, 3, 7, 13, 30, 70):
        rows = rows_that_fit(size, context_length, gib * 2**30, device)
        expected = predicted_rows(size, context_length, gib * 2**30, device)
        assert abs(rows - expected) <= max(1, expected // 4), (size, rows, expected)


def test_a_summary_ends_its_lines_between_words_on_a_narrow_terminal():
    code = "from backend_manager import BackendManager; BackendManager('cpu', verbose=False).print_summary()"
    status, lines = drawn([sys.executable, "-c", code], 40)
    assert status == 0 and len(lines) > 5
    long = [line for line in lines if len(line) > 40 and " " in line.strip()]
    assert all("pip install" in line for line in long), long  # commands are left to the terminal
