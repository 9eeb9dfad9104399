"""The backend of a run: --backend, else FSDP_BACKEND, else the first detected that has an engine here."""

import os

from backend_manager import CAPABILITIES, Backend, BackendManager, auto_cpu_matmul, environment_error
from finetune.backend.capabilities import BackendCapabilities
from finetune.config import DEFAULTS
from finetune.errors import PlanError
from finetune.parts.log_to import names_of
from finetune.parts.plan_base import Adjustment

ENGINES = ("torch", "mlx")


def select_backend(name: str | None) -> tuple[BackendManager, Backend | None]:
    """(manager, the backend that detection preferred but no engine here runs, or None). Raises PlanError."""
    named_by = "--backend " if name else "FSDP_BACKEND="
    name = name or os.environ.get("FSDP_BACKEND") or None
    try:
        manager = BackendManager(name, verbose=False)
        if manager.requested is None and CAPABILITIES[manager.backend].engine not in ENGINES:
            rest = [b for b in manager.available if CAPABILITIES[b].engine in ENGINES]
            return BackendManager(rest[0], verbose=False), manager.backend
    except ValueError as error:
        raise PlanError(f"{named_by}{name}: {error}") from None
    return manager, None


def selection(name: str | None, manager: BackendManager, skipped: Backend | None) -> Adjustment | None:
    """The selected backend and why, if --backend did not name it."""
    if name and name.lower() != "auto":
        return None
    variable = None
    if not name:
        variable = os.environ.get("FSDP_BACKEND")
    if variable and variable.lower() != "auto":
        return Adjustment("backend", None, str(manager.backend), f"FSDP_BACKEND={variable}")
    why = manager.why_selected
    if skipped:
        why = f"auto found {skipped}, and this version has no engine for it"
    elif manager.backend is Backend.CPU:
        why = "no GPU found; --doctor says why"
    return Adjustment("backend", "auto", str(manager.backend), why)


def check_environment(overrides: dict) -> None:
    """Raises PlanError for what no setting can fix: environment variables, a missing package."""
    problem = environment_error()
    if problem:
        raise PlanError(problem)
    names_of(overrides.get("log_to", DEFAULTS["log_to"]))


def choose_cpu_matmul(word: str, capabilities: BackendCapabilities) -> tuple[str, str]:
    """(library of fp32 products on this CPU, why), by the probe; oneDNN is left where it was not found exact."""
    speed = capabilities.onednn_speed
    why = capabilities.reasons.get("cpu_matmul", "not probed")
    if word == "auto":
        measured = ""
        if speed:
            measured = f"oneDNN's fp32 products: {speed:.2f} x the speed of torch's BLAS, measured"
        return auto_cpu_matmul(speed), measured or f"oneDNN: {why}"
    if word == "onednn" and speed is None:
        return ("blas", why)
    return (word, "")
