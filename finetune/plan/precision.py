"""Precision in the plan, and which library multiplies fp32 matrices on a CPU."""

from backend_manager import Backend, auto_precision
from finetune.errors import PlanError
from finetune.estimate.rates import has_bf16
from finetune.parts.parts import Parts
from finetune.parts.trains import Adapter
from finetune.plan.asked import Asked, Change, Notice, Ranks, Said, first_obstacle
from finetune.plan.backend import choose_cpu_matmul
from finetune.plan.facts import Facts
from finetune.plan.mlx import on_cpu as mlx_on_cpu


def machine(asked: Asked, facts: Facts) -> Said:
    """The backend, and what probing found that a user should know."""
    yield Change("backend", str(facts.backend))
    for name, why in facts.capabilities.reasons.items():
        if name in ("probes", "capability"):
            yield Notice(f"{name}: {why}")


def precision(asked: Asked, facts: Facts) -> Said:
    """auto, and precisions that this device does not support."""
    word = asked.precision
    capabilities = facts.capabilities
    why = capabilities.reasons.get("bf16", "")
    used = word
    reason = ""
    if word == "auto":
        used, reason = _auto(asked, facts, why)
    elif word.startswith("bf16") and _lacks_bf16(asked):
        used = word.replace("bf16", "fp16")
        reason = f"--assume_device {asked.assume_device} does not multiply bf16"
    elif word.startswith("bf16") and not (capabilities.supports_bfloat16 or asked.assumes_accelerator):
        if facts.backend is Backend.CPU:
            fact = why or "this processor may lack bf16 matmuls"
            yield Notice(f"precision {word}: {fact}; fp32 is faster")
        else:
            if facts.backend is Backend.MPS:
                label = "MPS"
            else:
                label = str(facts.backend)
            used = "fp16" if word == "bf16" else "fp16_autocast"
            reason = f"{label} backend doesn't support bfloat16: {why or 'documented'}"
    yield Change("precision", used, reason)
    forced = facts.environment.get("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE") == "1"
    if forced and facts.backend is Backend.CUDA and used.startswith("fp32"):
        yield Notice(
            f"precision {used}: TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 rounds products to TF32, 10 bits; unset it for fp32"
        )
    if asked.trains_in_full and used in ("bf16", "fp16"):
        reason = "full fine-tuning trains every weight, and trainable weights are kept in fp32"
        yield Change("precision", f"{used}_autocast", reason)


def _lacks_bf16(asked: Asked) -> bool:
    """True for an assumed device that is known to have no products in bf16."""
    return asked.assumes_accelerator and not has_bf16(asked.assume_device)


def _auto(asked: Asked, facts: Facts, why: str) -> tuple[str, str]:
    """(precision, reason) of the word auto. `why`: bf16 is slow or missing here."""
    if facts.backend is Backend.MLX and mlx_on_cpu() and not asked.assume_memory:
        return "fp32", "MLX has no BLAS for 16 bits on a CPU"
    if _lacks_bf16(asked):
        return "fp16", f"--assume_device {asked.assume_device} does not multiply bf16"
    if asked.assumes_accelerator:
        return "bf16", "a device with bf16 matmuls is assumed"
    speed = facts.capabilities.bfloat16_speed
    measured = "documented"
    if speed:
        measured = f"{speed:.2f} x the speed of fp32, measured"
    reasons = {
        "bf16": f"bf16 matmuls: {measured}",
        "fp32": why or "the documented choice for a CPU",
        "fp16": why or "no bf16 here",
    }
    word = auto_precision(facts.backend, facts.capabilities.supports_bfloat16)
    return word, reasons[word]


def frozen_products(asked: Asked, facts: Facts, ranks: Ranks, trial: Parts) -> Said:
    """--frozen_products fp8, where nothing is multiplied so; what is left is proved on the loaded model."""
    if asked.frozen_products == "exact":
        return
    device = Backend.CUDA if asked.assumes_cuda else facts.backend
    objective = trial.objective.facts
    dims = ranks.dims
    obstacles = (
        (device not in (Backend.CUDA, Backend.CPU), f"fp8 products are of NVIDIA cards, not of {device}"),
        (not isinstance(trial.trains, Adapter), "it is of frozen weights with adapters, and there are none"),
        (trial.precision.compute != "bf16", f"rows in {trial.precision.compute} are multiplied exactly; use bf16"),
        (objective.needs_reference or objective.rewarded is not None, "this loss compares with exact products"),
        (dims.shards * dims.tp * dims.pp * dims.ep * dims.cp > 1, "ranks share a microbatch, or its weights"),
        (ranks.distribution != "ptd", f"{ranks.distribution} is accelerate's"),
    )
    why = first_obstacle(obstacles)
    if why is not None:
        yield Change("frozen_products", "exact", why)


def cpu_matmul(asked: Asked, facts: Facts) -> Said:
    """oneDNN or torch's BLAS for fp32 products on this CPU, by the probe."""
    if not asked.on_cpu:
        if asked.assumes_accelerator:
            where = "an assumed accelerator"
        else:
            where = facts.backend
        yield Change("cpu_matmul", "auto", f"it is for --backend cpu, and this run is on {where}")
        return
    used, why = choose_cpu_matmul(asked.cpu_matmul, facts.capabilities)
    if asked.cpu_matmul == "onednn" != used and asked.given("cpu_matmul"):
        raise PlanError(f"--cpu_matmul onednn: {why}. Use auto or blas.")
    yield Change("cpu_matmul", used, why)
