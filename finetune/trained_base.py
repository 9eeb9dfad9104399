"""The base that an adapter is opened on: by default as it was trained, which the run's own plan says.

A number that a run printed was computed on that base. On another one, dense or of other bits, the same adapter answers
otherwise, so whatever differs is a line.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import quantization_wrapper
from backend_manager import Backend, BackendManager
from finetune import cli
from finetune.checkpoint.saved_run import PLAN, PLAN_SCHEMA
from finetune.config import FIELDS, TrainConfig
from finetune.errors import PlanError
from finetune.plan.parts import Adapter, Parts
from finetune.system.json_files import JsonFileError, read_json

DENSE = 16


@dataclass(frozen=True)
class TrainedBase:
    """How a checkpoint is opened. `plan`: precision, quantization and memory of its engine; `lines`: what to say.

    `settings`: the run's, or None where no plan is beside the checkpoint.
    """

    plan: Parts
    settings: TrainConfig | None
    lines: tuple[str, ...]

    @property
    def said(self) -> str:
        return str(self.plan.quantization or "dense")


def trained_base(checkpoint: Path, manager: BackendManager, precision: str = "auto", n_bits=None) -> TrainedBase:
    """The base of a checkpoint on this machine: `precision` and `n_bits` (16: dense) as trained, unless they are given.
    Raises PlanError.
    """
    trained = settings_of_run(checkpoint)
    word, why = _precision(trained, manager, precision)
    settings = replace(trained or TrainConfig(), train_type="lora", precision=word, llama_pro_path=None)
    settings = replace(settings, world_size=1, use_cpu_offload=False, use_gradient_checkpointing="false")
    settings = replace(settings, cpu_matmul=_cpu_matmul(trained, manager, word))
    lines = [why] if why else []
    changes, reason = _quantization(checkpoint, trained, manager, n_bits)
    if changes:
        settings = replace(settings, train_type="qlora", **changes)
    base = TrainedBase(Parts(settings), trained, ())
    if reason or base.plan.quantization:
        lines.append(f"base: {base.said}" + (f", {reason}" if reason else ", as trained"))
    return replace(base, lines=tuple(lines))


def settings_of_run(checkpoint: Path) -> TrainConfig | None:
    """The settled settings of the run that wrote a checkpoint; None if no plan is beside it. Raises PlanError."""
    folders = [checkpoint, *([checkpoint.resolve().parent] if checkpoint.name == "best" else [])]
    file = next((folder / PLAN for folder in folders if (folder / PLAN).is_file()), None)
    if file is None:
        return None
    try:
        settled = read_json(file, PLAN_SCHEMA)["settled"]
    except JsonFileError as error:
        raise PlanError(f"{error}. Restore the file, or remove it to open the adapter on a dense base.") from None
    known = {name: value for name, value in settled.items() if name in FIELDS}
    return TrainConfig(**{k: cli.parse_value(k, v, f"{file}: settled {k}") for k, v in known.items()})


def _precision(trained: TrainConfig | None, manager: BackendManager, asked: str) -> tuple[str, str]:
    """(the word, a line if it is not the run's)."""
    own = "bf16" if manager.capabilities.supports_bfloat16 else "fp32"
    if asked != "auto" or trained is None:
        return (own if asked == "auto" else asked), ""
    if trained.precision.partition("_")[0] in manager.capabilities.precisions:
        return trained.precision, ""
    return own, f"precision: {own}, as {manager.backend} has no {trained.precision}, which it was trained in"


def _cpu_matmul(trained: TrainConfig | None, manager: BackendManager, precision: str) -> str:
    if manager.backend is not Backend.CPU:
        return "blas"
    if trained and trained.precision == precision and trained.cpu_matmul in ("blas", "onednn"):
        return trained.cpu_matmul
    from backend_manager import auto_cpu_matmul

    return auto_cpu_matmul(manager.capabilities.onednn_speed)


def _quantization(checkpoint: Path, trained: TrainConfig | None, manager: BackendManager, n_bits) -> tuple[dict, str]:
    """(settings of the quantizer, empty for a dense base; why it is not the run's)."""
    was = Parts(trained).quantization if trained else None
    on_mlx = manager.backend is Backend.MLX
    if n_bits == DENSE or (n_bits is None and was is None):
        return {}, f"asked for; it was trained on {was}" if was else ""
    if n_bits is not None and not (was and n_bits == was.bits):
        names = ("mlx",) if on_mlx else (*((was.method,) if was else ()), *quantization_wrapper.AUTO_ORDER)
        name = next((n for n in names if n_bits in quantization_wrapper.METHODS[n].bits), None)
        if name is None:
            raise PlanError(f"--n_bits {n_bits}: no quantizer of {manager.backend} has it. Use 4, 8 or 16.")
        changes = dict(quantization_backend=name, n_bits=n_bits, quant_type=None, group_size=64, double_quant=False)
        return changes, "asked for" + (f"; it was trained on {was}" if was else "")
    assert was is not None and trained is not None
    dense = f"as it was trained on {was}"
    if on_mlx and was.method != "mlx":
        return {}, f"{dense}, which MLX lacks"
    if (checkpoint / "trained_blocks.json").is_file():
        return {}, f"{dense} around new layers, which are opened on a dense base only"
    trains = Parts(trained).trains
    if isinstance(trains, Adapter) and trains.init.changes_base:
        return {}, f"{dense} less the adapter's start ({trains.init.word}); the saved adapter is for the whole base"
    missing = quantization_wrapper.not_installed(was.method)
    if missing:
        return {}, f"{dense}; {missing}"
    names = ("quantization_backend", "n_bits", "quant_type", "group_size", "double_quant", "cache_dequantized")
    return {name: getattr(trained, name) for name in names}, ""
