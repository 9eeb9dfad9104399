"""MLX in the plan: what its engine does not do, its quantizer, its precision without a GPU."""

from backend_manager import Backend, BackendManager, package_version
from finetune.config import DEFAULTS
from finetune.errors import PlanError
from finetune.mlx_options import MLXOptions
from finetune.plan.asked import Asked, Change, Notice, Said
from finetune.plan.facts import Facts

# Formats of MLX beside affine: (bits, group size). Torch cannot read them.
MLX_MODES = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}
REPLACED = {
    "use_activation_cpu_offload": "MLX's memory is unified, or the processor's own",
    "base_offload": "MLX's memory is unified, or the processor's own",
    "use_cpu_offload": "MLX's memory is unified, or the processor's own",
    "reentrant_checkpointing": "it is a variant of torch's",
    "profile": "it is torch's profiler",
    "attention": "MLX has a kernel of its own",
    "frozen_products": "fp8 products are torch's, on NVIDIA cards",
    "compile": "--mlx_config says whether mx.compile is used",
}
# On a CPU the padding of a forward costs as much as its tokens, and small products are as fast as large ones: 1.6 times
# the speed of 2048 on rows of 20 to 200 tokens (benchmarks/vs_mlx_lm.py).
CPU_MICROBATCH_TOKENS = 256


def on_cpu() -> bool:
    """True if MLX computes on this machine's processor."""
    return not BackendManager._mlx_has_gpu()


def mlx_started(asked: Asked, facts: Facts) -> Said:
    """Checks packages and ranks for MLX; drops --mlx_config on other backends."""
    launcher = None
    if facts.env:
        launcher = facts.env.launcher
    if facts.backend is not Backend.MLX:
        if launcher == "mlx.launch":
            raise PlanError(
                f"--backend {facts.backend}: mlx.launch starts ranks of MLX. Use --backend mlx or torchrun."
            )
        why = f"only the MLX engine reads it, and this run is on {facts.backend}"
        yield Change("mlx_config", None, why)
        return
    if package_version("mlx-lm") is None:
        raise PlanError("--backend mlx: mlx-lm is not installed. pip install mlx-lm.")
    MLXOptions.read(asked.mlx_config)
    world_size = _world_size(asked, facts)
    if world_size > 1 and launcher != "mlx.launch":
        by = "without its launcher"
        if launcher:
            by = f"under {launcher}"
        raise PlanError(
            f"--world_size {world_size}: MLX backend doesn't support distributed training {by}. Start the ranks with "
            f"mlx.launch -n {world_size} --backend ring, or use --world_size 1."
        )


def mlx_replaces(asked: Asked, facts: Facts) -> Said:
    """Replaces torch settings for MLX, sets CPU microbatches, and makes ranks replicas."""
    if facts.backend is not Backend.MLX:
        return
    for name, why in REPLACED.items():
        yield Change(name, DEFAULTS[name], why)
    if on_cpu() and asked.microbatch_tokens is None and not asked.assume_memory:
        yield Change("microbatch_tokens", CPU_MICROBATCH_TOKENS)
    world_size = asked.assume_world_size or _world_size(asked, facts)
    if world_size <= 1:
        for name in ("dp_degree", "dp_shards"):
            value = asked.typed(name)
            if value > 1:
                raise PlanError(f"--{name} {value}: is more than this run's one process. Omit it.")
        return
    for name, fine in (("sharding_strategy", (None, "ddp")), ("dp_shards", (-1, 1))):
        value = asked.typed(name)
        if value not in fine:
            raise PlanError(
                f"--{name} {value}: MLX's ring has no sum_scatter, which sharded weights need. Omit it: each rank "
                "holds a replica."
            )
    yield Change("dp_shards", 1)
    yield Change("dp_degree", world_size)


def _world_size(asked: Asked, facts: Facts) -> int:
    if facts.env:
        return facts.env.size
    return asked.typed("world_size")


def mlx_quantization(asked: Asked) -> Said:
    """The quantizer of a qlora run on MLX: its own formats."""
    name = asked.quantization_backend
    mode = asked.quant_type
    if name not in ("auto", "mlx"):
        if not asked.is_resumed:
            raise PlanError(f"--quantization_backend {name}: on MLX there is mlx only. Use mlx, or auto.")
        mode = None
    yield Change("quantization_backend", "mlx", "MLX's own format")
    if mode in MLX_MODES:
        bits, group_size = MLX_MODES[mode]
        if asked.n_bits != bits:
            raise PlanError(f"--quant_type {mode}: has {bits} bits, not --n_bits {asked.n_bits}.")
        yield Change("group_size", group_size, f"{mode} has groups of this size")
        yield Notice(f"quant_type {mode}: only the MLX engine reads it, so this run cannot move to torch")
        return
    if mode not in (None, "affine"):
        raise PlanError(f"--quant_type {mode}: MLX has affine, {', '.join(MLX_MODES)}. Use one of them.")
    yield Change("quant_type", "affine")
