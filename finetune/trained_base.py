"""The base that an adapter is opened on: by default as it was trained, which the run's own plan says.

A number that a run printed was computed on that base. On another one, dense or of other bits, the same adapter answers
otherwise, so whatever differs is a line.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import quantization_wrapper
from backend_manager import Backend, BackendManager, auto_cpu_matmul
from finetune.checkpoint.saved_run import PLAN, PLAN_SCHEMA, is_as_written, parse_settled
from finetune.config import FIELDS, TrainConfig
from finetune.errors import PlanError
from finetune.estimate.model_shape import ModelShape
from finetune.parts.degrees import DEGREES
from finetune.parts.memory import OFFLOADS
from finetune.parts.parallel_dims import ParallelDims
from finetune.parts.parts import Parts
from finetune.parts.quantization import Quantization
from finetune.parts.trains import Adapter
from finetune.system.files import check_inside
from finetune.system.json_files import JsonFileError, read_json
from quantization_wrapper import AUTO_ORDER, FIRST_METHOD, METHODS

DENSE = 16
TRAINED_BLOCKS = "trained_blocks.json"
REMEDY = "Restore the file, or remove it to open the adapter on a dense base."
UNTRAINED_LENGTH = 512  # of a checkpoint whose run is not known


@dataclass(frozen=True)
class TrainedBase:
    """Settings for opening a checkpoint. `plan`: precision, quantization and memory of its engine; `lines`: notices.

    `settings`: the run's, or None where no plan is beside the checkpoint. `loading_bytes`: the peak while it was
    opened, above the process after its imports; 0 where that is not measured.
    """

    plan: Parts
    settings: TrainConfig | None
    lines: tuple[str, ...]
    shape: ModelShape | None = None
    device: str = "cpu"
    loading_bytes: int = 0

    def seeing_images(self) -> "TrainedBase":
        """The same, with what of the base sees images."""
        return replace(self, plan=self.plan.with_settings(images="true", batch_layout="padded"))

    def multiplying_by(self, cpu_matmul: str) -> "TrainedBase":
        """The same, as a process that multiplies by this library opens it: torch has one setting for all its models."""
        return replace(self, plan=self.plan.with_settings(cpu_matmul=cpu_matmul))

    @property
    def context_length(self) -> int:
        """Tokens of a row: the run's, or UNTRAINED_LENGTH of a checkpoint whose run is not known."""
        return self.plan.data.context_length if self.settings else UNTRAINED_LENGTH

    @property
    def said(self) -> str:
        return str(self.plan.quantization or "dense")


def trained_base(
    checkpoint: Path,
    shape: ModelShape,
    manager: BackendManager,
    precision: str = "auto",
    n_bits: int | None = None,
    ranks: int = 1,
    base_offload: str = "auto",
) -> TrainedBase:
    """The base of a checkpoint on this machine: `precision`, `n_bits` (16: dense) and `base_offload` as trained, unless
    they are given. `shape`: the base's. `ranks`: its weights are sharded over so many, whatever the run's degrees were,
    and stay in host memory if the run's did. Raises PlanError.
    """
    trained = settings_of_run(checkpoint)
    word, why = _precision(trained, manager, precision)
    settings = replace(trained or TrainConfig(), train_type="lora", precision=word, llama_pro_path=None)
    settings = replace(settings, use_gradient_checkpointing="false", **_degrees(trained, manager, ranks))
    settings = replace(settings, cpu_matmul=_cpu_matmul(trained, manager, word))
    # Dense copies are the same numbers: generation makes them while it runs, and scoring can do without.
    settings = replace(settings, cache_dequantized="false")
    settings = replace(
        settings, preference="none", reward=None, router_aux_loss_coef=0.0
    )  # rows are scored by their next tokens
    lines = []
    if why:
        lines = [why]
    changes, reason = _quantization(checkpoint, shape, trained, manager, n_bits)
    if changes:
        settings = replace(settings, train_type="qlora", **changes)
    place = _place(checkpoint, trained, manager, ranks, base_offload)
    if place in OFFLOADS:
        cache = settings.packed_cache if settings.packed_cache != "none" else "auto"
        settings = replace(settings, base_offload=place, packed_cache=cache)
        lines.append(f"base_offload {place}: all layers are read for each forward, so for each token of an answer")
    base = TrainedBase(Parts(settings, dims=ParallelDims(dp_shard=ranks)), trained, ())
    if reason or base.plan.quantization:
        lines.append(f"base: {base.said}" + (f", {reason}" if reason else ", as trained"))
    return replace(base, lines=tuple(lines))


def _degrees(trained: TrainConfig | None, manager: BackendManager, ranks: int) -> dict:
    """Settings of ranks that share a model's weights and train nothing; a start of adapters is theirs no more."""
    one = dict.fromkeys(DEGREES, 1)
    offload = ranks > 1 and trained is not None and trained.use_cpu_offload and manager.backend is not Backend.MPS
    sharded = dict(world_size=ranks, dp_shards=ranks, use_cpu_offload=offload, base_offload="none")
    if ranks > 1 and manager.backend is Backend.CPU:  # each gather of a layer leaves holes in a heap that is kept
        sharded["low_memory"] = True
    return one | sharded | dict(sharding_strategy=None, parallel_backend="ptd", init_lora_weights="default")


def _place(
    checkpoint: Path, trained: TrainConfig | None, manager: BackendManager, ranks: int, asked: str
) -> str | None:
    """The place of the base's layers. Raises PlanError for what cannot be."""
    obstacle = None
    if ranks > 1:
        obstacle = "ranks divide the weights among them. Use one rank, or omit it"
    elif manager.backend is Backend.MLX:
        obstacle = "MLX keeps the base in memory. Use --device mps or cpu, or omit it"
    elif (checkpoint / TRAINED_BLOCKS).is_file():
        obstacle = f"{TRAINED_BLOCKS} has layers that are not the base's. Omit it"
    elif asked == "host" and manager.backend in (Backend.CPU, Backend.MPS):
        obstacle = f"{manager.backend} and its host have one memory. Use disk"
    if asked == "auto":
        return None if obstacle or trained is None else trained.base_offload
    if asked in OFFLOADS and obstacle:
        raise PlanError(f"--base_offload {asked}: {obstacle}.")
    return asked


def settings_of_run(checkpoint: Path) -> TrainConfig | None:
    """The settled settings of the run that wrote a checkpoint; None if no plan is beside it. Raises PlanError."""
    place = checkpoint.resolve()  # a link may have any name, and "." has none
    folders = [checkpoint, *([place.parent] if place.name == "best" else [])]
    file = next((folder / PLAN for folder in folders if (folder / PLAN).is_file()), None)
    if file is None:
        return None
    check_inside(file)
    try:
        plan = read_json(file, PLAN_SCHEMA)
    except JsonFileError as error:
        raise PlanError(f"{error}. {REMEDY}") from None
    if not is_as_written(plan):
        raise PlanError(f"{file}: is not as it was written (sha256 differs). {REMEDY}")
    return TrainConfig(**{name: value for name, value in parse_settled(plan, file).items() if name in FIELDS})


def text_unit_of(checkpoint: Path) -> str:
    """--text_unit of the run that wrote a checkpoint; auto if it is not known. Raises PlanError."""
    run = settings_of_run(checkpoint)
    return run.text_unit if run else "auto"


def quantization_of(trained: TrainConfig | None) -> Quantization | None:
    """Quantization of a run's base; None for a dense one, or for an unknown run."""
    if trained:
        return Parts(trained).quantization
    return None


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
    return auto_cpu_matmul(manager.capabilities.onednn_speed)


def _quantization(
    checkpoint: Path, shape: ModelShape, trained: TrainConfig | None, manager: BackendManager, n_bits: int | None
) -> tuple[dict, str]:
    """(settings of the quantizer, empty for a dense base; why it is not the run's)."""
    was = quantization_of(trained)
    told = ""
    if was:
        told = f"; it was trained on {was}"
    if n_bits == DENSE:
        return {}, f"asked for{told}" if was else ""
    obstacle = _obstacle(checkpoint, trained, manager)
    if n_bits is None and (was is None or obstacle):
        return {}, f"as it was trained on {was}{obstacle}" if was else ""
    if was and n_bits in (None, was.bits) and not obstacle:
        names = ("quantization_backend", "n_bits", "quant_type", "group_size", "double_quant")
        return {name: getattr(trained, name) for name in names}, ""
    if (checkpoint / TRAINED_BLOCKS).is_file():
        raise PlanError(f"--n_bits {n_bits}: new layers ({TRAINED_BLOCKS}) are opened on a dense base only. Omit it.")
    assert n_bits is not None  # else it is as trained, or dense
    name = _quantizer_with(n_bits, was.method if was else None, manager)
    changes = dict(quantization_backend=name, n_bits=n_bits, quant_type=None, double_quant=False)
    return changes | {"group_size": _group_size(name, n_bits, shape)}, f"asked for{told}"


def _group_size(method: str, bits: int, shape: ModelShape) -> int:
    """The default one, or the largest below it that divides every row, if the method needs that and there is one."""
    default = TrainConfig().group_size
    columns = [columns for _, _, columns in shape.linears] + [columns for _, columns in shape.expert_matrices()]
    sizes = sorted((size for size in METHODS[method].group_sizes if size <= default), reverse=True)
    fits = (s for s in sizes if not any(quantization_wrapper.group_mismatch(method, bits, s, c) for c in columns))
    return next(fits, default)


def _quantizer_with(bits: int, trained_by: str | None, manager: BackendManager) -> str:
    """The quantizer for these bits on this machine, first the one trained by. Raises PlanError if it has none."""
    tried = dict.fromkeys((trained_by or FIRST_METHOD, *AUTO_ORDER))
    names = [n for n in (["mlx"] if manager.backend is Backend.MLX else tried) if bits in METHODS[n].bits]
    missing = {name: quantization_wrapper.not_installed(name) for name in names}
    found = next((name for name in names if not missing[name]), None)
    if found is None:
        if names:
            fact = missing[names[0]]
        else:
            fact = f"no quantizer of {manager.backend} has it"
        raise PlanError(f"--n_bits {bits}: {fact}. Use {DENSE}, or omit it.")
    return found


def _obstacle(checkpoint: Path, trained: TrainConfig | None, manager: BackendManager) -> str:
    """Reason that a quantized base cannot be had as it was trained: the end of a line, empty if it can."""
    was = quantization_of(trained)
    if was is None or trained is None:
        return ""
    on_mlx = manager.backend is Backend.MLX
    if on_mlx and was.method != "mlx":
        return ", which MLX lacks"
    if not on_mlx and quantization_wrapper.unsupported(was.method, was.bits, trained.quant_type, was.group_size):
        return f" ({trained.quant_type}), which is MLX's own"
    if (checkpoint / TRAINED_BLOCKS).is_file():
        return " around new layers, which are opened on a dense base only"
    trains = Parts(trained).trains
    if isinstance(trains, Adapter) and trains.init.changes_base:
        return f" less the adapter's start ({trains.init.word}); the saved adapter is for the whole base"
    missing = quantization_wrapper.not_installed(was.method)
    if missing:
        return f"; {missing}"
    return ""
