"""The public surface of mps_fsdp_wrapper, and modules of a user's own sharded by it."""

import dataclasses
import logging
import os
import re
import resource
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy
from torch.torch_version import TorchVersion

import mps_fsdp_wrapper
from finetune.errors import StorageError
from finetune.torch_engine.parallel import wrapper_checkpoint
from mps_fsdp_wrapper import (
    MPSFSDPConfig,
    MPSFSDPWrapper,
    MPSOperatorFallback,
    UnifiedMemoryOptimizer,
    check_mps_fsdp_compatibility,
    create_mps_fsdp_wrapper,
    units_of,
)
from tests.support import emulated_device, ranks, wrapper_cases
from tests.support.commands import ROOT

needs_device = pytest.mark.skipif(emulated_device.missing() is not None, reason=str(emulated_device.missing()))
ON = dict(device=emulated_device.NAME)
GIB = 2**30


@pytest.mark.promise("FS_02")
def test_config_has_the_guides_fields_and_defaults():
    config = MPSFSDPConfig()
    documented = dict(
        sharding_strategy=mps_fsdp_wrapper.ShardingStrategy.FULL_SHARD,
        min_num_params=1e6,
        use_mixed_precision=True,
        compute_dtype=torch.float16,
        reduce_dtype=torch.float32,
        buffer_dtype=torch.float16,
        cpu_offload=False,
        backward_prefetch=mps_fsdp_wrapper.BackwardPrefetch.BACKWARD_PRE,
        forward_prefetch=True,
        limit_all_gathers=True,
        backend="gloo",
        world_size=1,
        rank=0,
        sync_module_states=True,
        use_orig_params=True,
        unified_memory_pool_size=None,
        aggressive_memory_optimization=False,
        debug_mode=False,
        profile_memory=False,
    )
    names = [f.name for f in dataclasses.fields(config)]
    assert names == [*documented, "fallback_to_cpu_ops"]
    assert {name: getattr(config, name) for name in documented} == documented


@pytest.mark.promise("FS_03", "FS_04")
def test_names_strings_and_torchs_own_enums_are_accepted_also_after_construction():
    config = MPSFSDPConfig(sharding_strategy="NO_SHARD", backward_prefetch="BACKWARD_POST", min_num_params=2.5e3)
    assert config.sharding_strategy is mps_fsdp_wrapper.ShardingStrategy.NO_SHARD and config.min_num_params == 2500
    config.sharding_strategy = ShardingStrategy.SHARD_GRAD_OP
    config.backward_prefetch = BackwardPrefetch.BACKWARD_PRE
    assert MPSFSDPWrapper(config, "cpu").config is config  # what is changed later has its effect
    assert config.sharding_strategy.name == "SHARD_GRAD_OP" and config.backward_prefetch.name == "BACKWARD_PRE"
    with pytest.raises(ValueError, match="HYBRID: unknown. Use one of FULL_SHARD, SHARD_GRAD_OP, NO_SHARD"):
        config.sharding_strategy = "HYBRID"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("compute_dtype", "floaty"),
        ("world_size", "2"),
        ("rank", None),
        ("cpu_offload", "no"),
        ("unified_memory_pool_size", "16GB"),
        ("unified_memory_pool_size", -5),
        ("min_num_params", "abc"),
        ("min_num_params", float("inf")),
    ],
)
def test_a_value_that_a_field_cannot_have_is_refused_by_its_name(name, value):
    with pytest.raises(ValueError, match=f"{name} .*(must be|is not a)"):
        MPSFSDPConfig(**{name: value})
    with pytest.raises(AttributeError, match="no field shard_strategy. It has sharding_strategy"):
        MPSFSDPConfig().shard_strategy = "NO_SHARD"


@pytest.mark.promise("FS_06")
def test_another_backend_is_switched_to_gloo_with_a_warning():
    with pytest.warns(UserWarning, match="only supports Gloo"):
        config = MPSFSDPConfig(backend="nccl")
    assert config.backend == "gloo"


def test_values_without_a_counterpart_are_answered_with_a_line():
    assert MPSFSDPConfig().counterparts() == []
    config = MPSFSDPConfig(use_orig_params=False, limit_all_gathers=False, backward_prefetch="BACKWARD_POST")
    assert [line.split()[0] for line in config.counterparts()] == [
        "use_orig_params",
        "limit_all_gathers",
        "backward_prefetch",
    ]


@pytest.mark.promise("FS_01", "FS_05", "FS_18", "FS_23")
def test_without_mps_the_wrapper_says_so_and_the_check_never_raises():
    if torch.backends.mps.is_available():
        pytest.skip("this machine has an Apple GPU")
    with pytest.raises(RuntimeError, match=r"MPS backend is not available \(torch .*\)"):
        MPSFSDPWrapper()
    for name in ("MPSFSDPConfig", "create_mps_fsdp_wrapper", "wrap_model_for_mps", "check_mps_fsdp_compatibility"):
        assert callable(getattr(mps_fsdp_wrapper, name))
    info = check_mps_fsdp_compatibility()
    assert info["mps_available"] is False and info["pytorch_version"] == torch.__version__ and info["warnings"]
    assert check_mps_fsdp_compatibility("nonsense")["warnings"]
    assert check_mps_fsdp_compatibility("cpu")["warnings"] == []  # this torch is new enough: 2.13 > 2.7


@pytest.mark.promise("FS_16")
def test_helpers_pass_fields_to_the_config():
    wrapper = create_mps_fsdp_wrapper(
        sharding_strategy="SHARD_GRAD_OP", mixed_precision=False, min_num_params=1e4, device_type="cpu"
    )
    assert wrapper.config.min_num_params == 10_000 and not wrapper.config.use_mixed_precision
    with pytest.raises(TypeError, match="min_params"):
        create_mps_fsdp_wrapper(min_params=1, device_type="cpu")


@pytest.mark.promise("FS_09")
def test_units_by_size_by_class_and_by_a_function_of_fsdp1s_form():
    model = wrapper_cases.net()
    layers, inner = list(model.layers), [model.inner, model.outer]
    assert units_of(model, mps_fsdp_wrapper.by_size(200)) == layers
    assert units_of(model, {nn.Linear}) == layers + inner
    nested = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), nn.Linear(2, 2))
    assert units_of(nested, {nn.Sequential, nn.Linear}) == [nested[0][0], nested[0], nested[1]]  # inner ones first
    assert units_of(model, lambda module, recurse, nonwrapped_numel: recurse or module is model.inner) == [model.inner]


@pytest.mark.promise("FS_14", "FS_15")
def test_a_larger_model_is_never_sharded_less_and_the_pool_is_obeyed():
    optimizer = UnifiedMemoryOptimizer(MPSFSDPConfig(), "cpu")
    chosen = [optimizer.optimize_sharding_strategy(size * GIB, 32 * GIB).value for size in range(1, 80)]
    named = [optimizer.optimize_sharding_strategy(size * GIB, 32 * GIB).name for size in (7, 8, 25, 26)]
    assert chosen == sorted(chosen, key=lambda value: {3: 0, 2: 1, 1: 2}[value])
    assert named == ["NO_SHARD", "SHARD_GRAD_OP", "SHARD_GRAD_OP", "FULL_SHARD"]
    optimizer.config.unified_memory_pool_size = 8 * GIB
    assert optimizer.optimize_sharding_strategy(7 * GIB, 32 * GIB).name == "FULL_SHARD"
    assert optimizer.reason == "FULL_SHARD: the model is 88% of 8.0 GiB of the pool"
    assert optimizer.get_optimal_bucket_size() == 50_000_000 and optimizer.setup_memory_pool() == 8 * GIB


@pytest.mark.promise("FS_19")
def test_the_fallback_switch_is_set_for_children_and_restored(monkeypatch):
    monkeypatch.delenv("PYTORCH_ENABLE_MPS_FALLBACK", raising=False)
    fallback = MPSOperatorFallback(MPSFSDPConfig())
    with pytest.warns(UserWarning, match="before torch is imported"):
        assert "aten::_fused_adam" in fallback.patch_unsupported_ops()
    with pytest.warns(UserWarning, match="unrelated"), fallback.fallback_context():
        import warnings

        assert os.environ["PYTORCH_ENABLE_MPS_FALLBACK"] == "1"
        # torch's text, in aten/src/ATen/mps/MPSFallback.mm
        said = "The operator 'aten::nonzero' is not currently supported on the MPS backend and will fall back to run on"
        warnings.warn(f"{said} the CPU.", stacklevel=1)
        warnings.warn("unrelated", stacklevel=1)
    assert "PYTORCH_ENABLE_MPS_FALLBACK" not in os.environ and fallback.fell_back == ["aten::nonzero"]


SHARDS_INTEGERS = TorchVersion(torch.__version__) >= "2.12"  # FSDP2, as frozen parameters
SCRIPT = """
import logging, sys
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from finetune.errors import PlanError
from mps_fsdp_wrapper import MPSFSDPConfig, MPSFSDPWrapper, wrap_model_for_mps
from quantization_wrapper import QuantizationConfig, quantize_model
logging.basicConfig(level=logging.DEBUG, format="%(name)s %(levelname)s %(message)s", stream=sys.stdout)
logging.getLogger("mps_fsdp_wrapper").setLevel(logging.INFO)
def net():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
def units(model):
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule) and name]
for debug in (False, True):
    print("debug", debug)
    config = MPSFSDPConfig(debug_mode=debug, use_mixed_precision=False, forward_prefetch=not debug)
    wrapper = MPSFSDPWrapper(config, "cpu")
    model = wrapper.wrap_model(net(), {nn.Linear})
    wrapper.config.profile_memory = debug
    with wrapper.profile_memory():
        model(torch.ones(2, 8)).sum().backward()
    print({name: f"{value:.2f}" for name, value in wrapper.get_memory_stats().items()})
    print("grad", model[0].weight.grad.full_tensor().shape)
print("by class", units(wrap_model_for_mps(net(), transformer_layer_cls=nn.Linear, device_type="cpu")))
print("by size", units(wrap_model_for_mps(net(), min_num_params=50, device_type="cpu")))
config = QuantizationConfig(method="nf4", group_size=32, compute_dtype=torch.bfloat16)
model = quantize_model(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), config, ["0"])
model = MPSFSDPWrapper(MPSFSDPConfig(), "cpu").wrap_model(model, {nn.Linear}, param_dtype=config.compute_dtype)
out = model(torch.ones(2, 64))
out.sum().backward()
grad = model[1].weight.grad.full_tensor()
print("quantized", [str(p.dtype) for name, p in model[0].named_parameters() if name != "bias"])
print("computed in", out.dtype, bool(grad.isfinite().all() and grad.any()))
equal = []
for dtype in (torch.float16, torch.bfloat16, torch.float32):
    config = QuantizationConfig(method="nf4", group_size=32, double_quant=True, compute_dtype=dtype)
    model = quantize_model(nn.Sequential(nn.Linear(96, 64), nn.Linear(64, 8)), config, ["0"])
    for parameter in model[1].parameters():
        parameter.data = parameter.to(dtype)
    batch = torch.ones(2, 96, dtype=dtype)
    expected = model(batch)
    wrapper = MPSFSDPWrapper(MPSFSDPConfig(buffer_dtype=dtype), "cpu")
    model = wrapper.wrap_model(model, {nn.Linear}, param_dtype=dtype)
    wrapper.save_checkpoint(model, sys.argv[1])
    wrapper.load_checkpoint(model, sys.argv[1])
    equal.append(torch.equal(model(batch), expected))
print("equal", *equal)
model = net()
model[0].codes = nn.Parameter(torch.ones(4, dtype=torch.int64), requires_grad=False)
try:
    MPSFSDPWrapper(MPSFSDPConfig(), "cpu").wrap_model(model)
except PlanError as error:
    print("refused", error)
"""


@pytest.mark.promise("FS_04", "FS_07", "FS_12", "FS_13", "FS_17", "FS_24", "Q_04")
def test_one_process_needs_no_launcher_and_logs_details_on_request_only(tmp_path):
    """On the CPU, with the staged group as its only one."""
    argv = [sys.executable, "-c", SCRIPT, tmp_path / "quantized.pt"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    plain, _, rest = done.stdout.partition("debug True")
    debug, _, rest = rest.partition("by class")
    for part, detailed in ((plain, False), (debug, True)):
        assert "grad torch.Size([8, 8])" in part
        for name in ("allocated_gb", "reserved_gb", "process_memory_gb"):
            assert re.search(rf"'{name}': '\d+\.\d\d'", part), part
        own = [line for line in part.splitlines() if line.startswith("mps_fsdp_wrapper")]
        assert any("DEBUG unit 0: Linear" in line for line in own) == detailed
        assert any("DEBUG" in line for line in own) == any("INFO memory: +" in line for line in own) == detailed
    assert rest.splitlines()[0].strip() == "['0', '1']" and "by size ['0']" in rest
    stored = ["torch.uint8", "torch.int32"] if SHARDS_INTEGERS else ["torch.bfloat16", "torch.bfloat16"]
    assert f"quantized {stored}" in rest and "computed in torch.bfloat16 True" in rest
    assert "equal True True True\n" in rest, rest
    # The codes of a module that is not QuantizedLinear: their views could not be read.
    assert ("refused 0.codes: is torch.int64, and torch " in rest) != SHARDS_INTEGERS


@pytest.mark.promise("FS_07")
@pytest.mark.slow
@needs_device
def test_every_strategy_equals_one_process_with_averaged_gradients(tmp_path):
    for found in ranks.run(2, wrapper_cases.strategies, tmp_path, **ON):
        assert len(found) == 6
        # fp32 weights near 1 after three AdamW steps of 1e-2, which sums in another order move by some 1e-7.
        assert max(found.values()) < 2e-6, found


@pytest.mark.promise("FS_10", "FS_11")
@needs_device
@pytest.mark.parametrize("other", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_checkpoint_resumes_bitwise_and_on_another_number_of_ranks(other, tmp_path):
    path = str(tmp_path / "model.pt")
    two = ranks.run(2, wrapper_cases.saved, tmp_path / "saved", path=path, **ON)
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["model.pt"]
    assert "metadata thing: cannot be saved" in two[0]["refused"][0]
    assert "model_state_dict: is the name" in two[0]["refused"][1]
    again = ranks.run(2, wrapper_cases.resumed, tmp_path / "same", path=path, same_world=True, **ON)
    for first, second in zip(two, again, strict=True):
        assert first["after"] == second["after"]
        assert second["metadata"] == {"epoch": 3, "best_loss": 0.25, "tags": ["a"]}
        assert "is in" in second["problem"] and "only" in second["problem"]
    for rank in ranks.run(other, wrapper_cases.resumed, tmp_path / "other", path=path, same_world=False, **ON):
        assert rank["off"] < 2e-6  # the tolerance above
    content = torch.load(path, weights_only=True)
    assert content["epoch"] == 3 and content["model_state_dict"]["layers.0.weight"].shape == (16, 16)


@pytest.mark.promise("FS_10")
def test_a_checkpoint_that_does_not_fit_on_the_disk_leaves_the_one_before(tmp_path):
    path, model = tmp_path / "model.pt", nn.Linear(64, 64)
    wrapper_checkpoint.save(model, path, None, {"epoch": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size // 2, limits[1]))
    try:
        with pytest.raises(StorageError, match="model.pt: cannot be written"):
            wrapper_checkpoint.save(model, path, None, {"epoch": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert torch.load(path, weights_only=True)["epoch"] == 1 and list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
@needs_device
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_wrong_answers_of_a_device_end_the_run_before_it_trains(size, tmp_path):
    for said in ranks.run(size, wrapper_cases.wrong_answers, tmp_path, **ON):
        assert said.startswith("SelfTestError: emulated: wrong answers in the self-test"), said
        assert "Nothing was trained. Use --backend cpu" in said


@pytest.mark.slow
@needs_device
def test_a_checkpoint_that_cannot_be_written_or_does_not_fit_is_one_line_on_every_rank(tmp_path):
    told = ranks.run(2, wrapper_cases.refused, tmp_path / "ranks", folder=str(tmp_path), timeout_s=60, **ON)
    for said in told:
        assert "x.pt: cannot be written (No such file or directory)" in said["no folder"]
        assert "metadata x: cannot be saved" in said["metadata of rank 0"]
        assert "optimizer: the model does not have 12 of its parameters" in said["optimizer from before"]
        assert "Create the optimizer after wrap_model" in said["its load"]
        assert "the parameter groups differ" in said["groups"]
        assert "SGD has no amsgrad, betas" in said["SGD"]
        assert "is not a tensor" in said["not tensors"]
        assert "is not a checkpoint of this wrapper" in said["no optimizer"]


@pytest.mark.slow
def test_what_is_damaged_or_no_model_to_wrap_is_one_line_and_changes_nothing(tmp_path):
    (tmp_path / "files").mkdir()
    found = ranks.run(1, wrapper_cases.hostile, tmp_path / "ranks", folder=str(tmp_path / "files"))[0]
    said = found["said"]
    for case, line in said.items():
        assert line.startswith(("PlanError: ", "StorageError: ")) and "\n" not in line, (case, line)
    assert found["unchanged"] and len(said) > 70
    facts = {
        "NaN weight": "layers.0.weight is not finite",
        "infinite buffer": "shift is not finite",
        "sparse weight": "is a sparse_coo tensor",
        "negative square": "exp_avg_sq of layers.0.weight has negative numbers",
        "no state": "the optimizer state of layers.0.weight is missing",
        "lr -1": "lr is -1.0",
        "lr in a list": "lr is [0.01], must be as 0.01 is",
        "three betas": "betas is (0.9, 0.99, 0.999), must be as (0.9, 0.999) is",
        "amsgrad": "amsgrad is True in the checkpoint and False in the optimizer",
        "no moment": "the optimizer state of layers.0.weight has no exp_avg",
        "Adam": "does not decay weights as",
        "load a pipe": "is not a regular file",
        "save onto /dev/full": "is not a regular file",
        "wrap twice": "is wrapped already",
        "on meta": "1.weight: is on meta",
        "a list": "ModuleList: has no forward",
        "optimizer from before": "Create the optimizer after wrap_model",
    }
    for case, fact in facts.items():
        assert fact in said[case], (case, said[case])


@needs_device
@pytest.mark.slow
def test_tied_weights_stay_one_and_train_as_in_one_process(tmp_path):
    for device in ("emulated", "cpu"):
        for found in ranks.run(2, wrapper_cases.tied, tmp_path / device, device=device):
            # fp32 sums of two ranks in another order.
            assert all(off is not None and off < 1e-5 for off in found.values()), (device, found)


@pytest.mark.promise("FS_08")
@needs_device
def test_bfloat16_becomes_float16_where_the_device_has_none(tmp_path):
    (found,) = ranks.run(1, wrapper_cases.converted, tmp_path, **ON)
    dtypes = found["dtypes"]
    assert dtypes.pop("layers.0.weight") == dtypes.pop("layers.0.bias") == "torch.float32"
    assert set(dtypes.values()) == {"torch.float16"} and found["out"] == "torch.float16"
    assert found["said"] and all("float16 is used" in line for line in found["said"])


def test_the_module_logs_under_its_name():
    assert mps_fsdp_wrapper.logger is logging.getLogger("mps_fsdp_wrapper")
