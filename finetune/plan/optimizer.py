"""The optimizer in the plan: what its device and package allow, warmup, an objective's own defaults."""

from backend_manager import Backend, package_version
from finetune.errors import PlanError
from finetune.parts.objectives import OBJECTIVES
from finetune.parts.optimizers import OPTIMIZERS
from finetune.plan.asked import Asked, Change, Notice, Said
from finetune.plan.facts import Facts


def optimizer(asked: Asked, facts: Facts) -> Said:
    """The optimizer, where its moments can be paged and its package is here; what it decides beside."""
    used = asked.optimizer
    unpaged = OPTIMIZERS[used].unpaged
    if unpaged and facts.backend is not Backend.CUDA and not asked.assumes_cuda:
        used = unpaged
        yield Change("optimizer", used, "moments are paged from a CUDA device's memory only")
    package = OPTIMIZERS[used].package
    if package and facts.backend is not Backend.MLX and package_version(package) is None:
        missing = f"{package} is not installed. pip install {package}."
        if not asked.dry_run:
            raise PlanError(f"--optimizer {asked.optimizer}: {missing}")
        yield Notice(f"optimizer {asked.optimizer}: {missing}")
    yield from schedule(asked, used)
    if asked.label_smoothing:
        yield Notice(
            f"label_smoothing {asked.label_smoothing:g}: the training loss is smoothed, the validation loss is not"
        )


def schedule(asked: Asked, optimizer: str) -> Said:
    """Warmup given in steps, none before a constant rate unless asked for; defaults of objective and optimizer."""
    warms_up = asked.given("warmup_ratio") or "warmup_ratio" in (asked.inherited or {})
    if asked.lr_scheduler == "constant" and not warms_up:
        yield Change("warmup_ratio", 0.0, "--lr_scheduler constant warms up only if asked to")
    for flag, value in OBJECTIVES[asked.preference].defaults.items():
        if not asked.given(flag):
            yield Change(flag, value, f"the default of --preference {asked.preference}")
    if asked.warmup_steps or (asked.given("warmup_steps") and not asked.given("warmup_ratio")):
        yield Change("warmup_ratio", 0.0)
    for flag, (default, why) in OPTIMIZERS[optimizer].defaults.items():
        if not asked.given(flag):
            yield Change(flag, default, why)
