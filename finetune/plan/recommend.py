"""Recommended settings for this machine: --recommend."""

from backend_manager import GIB, BackendManager
from finetune.backend.machine import memory_info
from finetune.plan.facts import Facts
from finetune.plan.resolve import resolve_plan
from finetune.system.program import started_as

OOM_ADVICE = {
    "cuda": "--use_gradient_checkpointing, a smaller --microbatch_tokens, --train_type qlora",
    "mps": "close other programs, PYTORCH_MPS_HIGH_WATERMARK_RATIO, --quantization_backend quanto or nf4, "
    "shorter --context_length",
    "mlx": "--use_gradient_checkpointing, a smaller --microbatch_tokens, shorter --context_length",
    "xpu": "--use_gradient_checkpointing, a smaller --microbatch_tokens, --train_type qlora",
    "cpu": "--low_memory, a smaller --microbatch_tokens, --use_gradient_checkpointing, a smaller model",
}
LARGE_GIB = 24  # above this, guide S1's decision tree trains without quantization


def recommend(manager: BackendManager) -> list[str]:
    """Guide S1's decision tree for this machine: each question with its answer, then the flags."""
    available = {str(b) for b in manager.available}
    why_not = {str(b): w for b, w in manager.unavailable.items()}
    memory = memory_info(manager.backend)["total"] / GIB
    backend = str(manager.backend)
    caps = manager.capabilities

    def answer(name: str):
        if name in available:
            return "yes"
        return f"no ({why_not.get(name, 'not detected')})"

    text = [
        f"NVIDIA or AMD GPU? {answer('cuda')}",
        f"Apple silicon? {'yes' if 'mps' in available else 'no'}",
        f"MLX? {answer('mlx')}",
        f"so: --backend {backend}, {memory:.0f} GiB",
    ]
    train_type = "lora" if memory > LARGE_GIB and backend != "cpu" else "qlora"
    why = {
        "lora": f"more than {LARGE_GIB} GiB: the base need not be quantized; --dry_run shows whether your model fits",
        "qlora": "a quantized base leaves more memory for activations and longer rows",
    }[train_type]
    plan = resolve_plan({"backend": backend, "train_type": train_type}, Facts(manager.backend, caps))
    reasons = {a.setting: a.reason for a in plan.adjustments}
    precision = plan.settings.precision
    text.append(f"  --precision {precision}: {reasons['precision']}")
    text.append(f"  --train_type {train_type}: {why}")
    if train_type == "qlora" and backend == "mlx":
        text.append(f"  --quantization_backend mlx: {reasons['quantization_backend']}")
    elif train_type == "qlora":
        text.append("  --quantization_backend auto: the first that passes its probe; --doctor lists all")
    if backend == "mps":
        text.append("  MLX is faster on Apple silicon; use MPS if you need torch")
    if backend == "cpu":
        text.append(
            "  for experiments: these flags; for real work: set OMP_NUM_THREADS to the number of cores and use a "
            "small model"
        )
    text.append(f"if memory runs out on {backend}: {OOM_ADVICE[backend]}")
    start = started_as("train.py")
    text.append(f"{start} --backend {backend} --train_type {train_type} --precision {precision} --dry_run")
    return text
