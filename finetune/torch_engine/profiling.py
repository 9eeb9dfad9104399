"""--profile: the torch profiler over a few steps per cycle, writing Chrome traces to a folder."""

import contextlib
from pathlib import Path

from torch.profiler import ProfilerAction, ProfilerActivity, profile

from backend_manager import package_version


@contextlib.contextmanager
def profiler(settings, device, written: list):
    """Returns a function to call after each optimizer step; it appends the files it writes to `written`."""
    if not settings.profile:
        yield lambda: None
        return
    folder, drawn = Path(settings.profiling_output), package_version("matplotlib") is not None
    folder.mkdir(parents=True, exist_ok=True)

    def on_trace_ready(prof):
        number, asked = prof.step_num, []
        if settings.export_trace:
            asked.append(folder / f"trace-step-{number}.json")
            prof.export_chrome_trace(str(asked[-1]))
        if settings.export_memory_timeline:
            asked.append(folder / f"memory-step-{number}{'.html' if drawn else '.json.gz'}")
            prof.export_memory_timeline(str(asked[-1]), device=str(device))
        written.extend(file for file in asked if file.is_file())

    activities = [ProfilerActivity.CPU]
    if device.type in ("cuda", "xpu"):
        activities.append(getattr(ProfilerActivity, device.type.upper()))
    memory = settings.profile_memory or settings.export_memory_timeline
    with profile(
        activities=activities,
        schedule=_phase(settings),
        on_trace_ready=on_trace_ready,
        profile_memory=memory,
        record_shapes=settings.with_shapes or memory,
        with_stack=settings.with_stack or memory,
    ) as prof:
        yield prof.step


def _phase(settings):
    """Profiler schedule: cycles of --profiling_frequency steps, warmup then active; the first after --wait_steps."""
    warmup, active = settings.profiler_warmup_steps, settings.active_steps
    cycle_steps = max(settings.profiling_frequency, warmup + active)

    def phase(step: int):
        cycle, position = divmod(step - settings.wait_steps, cycle_steps)
        if cycle < 0 or (settings.repeat and cycle >= settings.repeat) or position >= warmup + active:
            return ProfilerAction.NONE
        if position < warmup:
            return ProfilerAction.WARMUP
        return ProfilerAction.RECORD_AND_SAVE if position == warmup + active - 1 else ProfilerAction.RECORD

    return phase
