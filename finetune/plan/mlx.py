"""The plan's rules for MLX: what its engine does not do, its quantizer, its precision without a GPU."""

from backend_manager import Backend, BackendManager, package_version
from finetune.config import DEFAULTS
from finetune.errors import PlanError
from finetune.mlx_options import MLXOptions
from finetune.plan import conflicts
from finetune.plan.conflicts import check
from finetune.plan.draft import Draft

# Formats of MLX beside affine: (bits, group size). Torch cannot read them.
MLX_MODES = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}
REPLACED = {
    "use_activation_cpu_offload": "MLX's memory is unified, or the processor's own",
    "use_cpu_offload": "MLX's memory is unified, or the processor's own",
    "reentrant_checkpointing": "it is a variant of torch's",
    "profile": "it is torch's profiler",
    "attention": "MLX has a kernel of its own",
    "compile": "--mlx_config says whether mx.compile is used",
}
# On a CPU the padding of a forward costs as much as its tokens, and small products are as fast as large ones: 1.6 times
# the speed of 2048 on rows of 20 to 200 tokens (benchmarks/vs_mlx_lm.py).
CPU_MICROBATCH_TOKENS = 256


def mlx_limits(draft: Draft) -> None:
    """On MLX, what its engine does not do; elsewhere, --mlx_config is ignored."""
    values = draft.values
    launcher = draft.facts.env.launcher if draft.facts.env else None
    if draft.backend is not Backend.MLX:
        if launcher == "mlx.launch":
            raise PlanError(
                f"--backend {draft.backend}: mlx.launch starts ranks of MLX. Use --backend mlx or torchrun."
            )
        if values["mlx_config"] is not None:
            draft.adjust("mlx_config", None, f"only the MLX engine reads it, and this run is on {draft.backend}")
        return
    if package_version("mlx-lm") is None:
        raise PlanError("--backend mlx: mlx-lm is not installed. pip install mlx-lm.")
    MLXOptions.read(values["mlx_config"])
    world_size = draft.facts.env.size if draft.facts.env else values["world_size"]
    if world_size > 1 and launcher != "mlx.launch":
        by = f"under {launcher}" if launcher else "without its launcher"
        raise PlanError(
            f"--world_size {world_size}: MLX backend doesn't support distributed training {by}. Start the ranks with "
            f"mlx.launch -n {world_size} --backend ring, or use --world_size 1."
        )
    check(draft, conflicts.MLX)
    for name, why in REPLACED.items():
        draft.adjust(name, DEFAULTS[name], why)
    if on_cpu() and values["microbatch_tokens"] is None and not values["assume_memory"]:
        values["microbatch_tokens"] = CPU_MICROBATCH_TOKENS
    if world_size > 1:
        _replicas(draft, world_size)
    else:
        for name in ("dp_degree", "dp_shards"):
            if values[name] > 1:
                raise PlanError(f"--{name} {values[name]}: is more than this run's one process. Omit it.")


def _replicas(draft: Draft, world_size: int) -> None:
    """Ranks of mlx.launch are replicas."""
    values = draft.values
    if values["dp_shards"] > 1 or values["sharding_strategy"] not in (None, "ddp"):
        name = "sharding_strategy" if values["sharding_strategy"] not in (None, "ddp") else "dp_shards"
        raise PlanError(
            f"--{name} {values[name]}: MLX's ring has no sum_scatter, which sharded weights need. Omit it: each rank "
            "holds a replica."
        )
    values["dp_shards"], values["dp_degree"] = 1, world_size


def on_cpu() -> bool:
    """True if MLX computes on this machine's processor."""
    return not BackendManager._mlx_has_gpu()


def mlx_quantization(draft: Draft) -> None:
    """The quantizer of a qlora run on MLX: its own formats."""
    values, resumed = draft.values, draft.facts.inherited is not None
    name, mode, bits = values["quantization_backend"], values["quant_type"], values["n_bits"]
    if name not in ("auto", "mlx"):
        if not resumed:
            raise PlanError(f"--quantization_backend {name}: on MLX there is mlx only. Use mlx, or auto.")
        mode = None
    draft.adjust("quantization_backend", "mlx", "MLX's own format")
    if mode in MLX_MODES:
        if bits != MLX_MODES[mode][0]:
            raise PlanError(f"--quant_type {mode}: has {MLX_MODES[mode][0]} bits, not --n_bits {bits}.")
        draft.adjust("group_size", MLX_MODES[mode][1], f"{mode} has groups of this size")
        draft.notices.append(f"quant_type {mode}: only the MLX engine reads it, so this run cannot move to torch")
        return
    if mode not in (None, "affine"):
        raise PlanError(f"--quant_type {mode}: MLX has affine, {', '.join(MLX_MODES)}. Use one of them.")
    values["quant_type"] = "affine"
