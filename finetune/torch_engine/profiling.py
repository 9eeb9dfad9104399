"""--profile: the torch profiler over a few steps per cycle, writing Chrome traces to a folder."""

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from backend_manager import package_version
from finetune.parts.output import ProfilePlan
from finetune.torch_engine.device import counts_peaks


@contextlib.contextmanager
def profiler(plan: ProfilePlan, device: torch.device, written: list):
    """Returns a function to call after each optimizer step; it appends the files it writes to `written`."""
    if not plan.profile:
        yield lambda: None
        return
    folder = Path(plan.profiling_output)
    drawn = package_version("matplotlib") is not None
    folder.mkdir(parents=True, exist_ok=True)

    def on_trace_ready(prof: Any):
        number = prof.step_num
        asked = []
        if plan.export_trace:
            asked.append(folder / f"trace-step-{number}.json")
            prof.export_chrome_trace(str(asked[-1]))
        if plan.export_memory_timeline:
            asked.append(folder / f"memory-step-{number}{'.html' if drawn else '.json.gz'}")
            prof.export_memory_timeline(str(asked[-1]), device=str(device))
        written.extend(file for file in asked if file.is_file())

    activities = [ProfilerActivity.CPU]
    if counts_peaks(device):  # and has its own events
        activities.append(getattr(ProfilerActivity, device.type.upper()))
    memory = plan.profile_memory or plan.export_memory_timeline
    with profile(
        activities=activities,
        schedule=_phase(plan),
        on_trace_ready=on_trace_ready,
        profile_memory=memory,
        record_shapes=plan.with_shapes or memory,
        with_stack=plan.with_stack or memory,
    ) as prof:
        yield prof.step


def _phase(plan: ProfilePlan):
    """Profiler schedule: cycles of --profiling_frequency steps, warmup then active; the first after --wait_steps."""
    warmup = plan.profiler_warmup_steps
    active = plan.active_steps
    cycle_steps = max(plan.profiling_frequency, warmup + active)

    def phase(step: int):
        cycle, position = divmod(step - plan.wait_steps, cycle_steps)
        if cycle < 0 or (plan.repeat and cycle >= plan.repeat) or position >= warmup + active:
            return ProfilerAction.NONE
        if position < warmup:
            return ProfilerAction.WARMUP
        if position == warmup + active - 1:
            return ProfilerAction.RECORD_AND_SAVE
        return ProfilerAction.RECORD

    return phase
