"""Files that a run writes, in the plan: checkpoints beside steps, profiles."""

from collections.abc import Callable

from backend_manager import package_version, system_memory
from finetune.config import DEFAULTS
from finetune.estimate import budget
from finetune.estimate.budget import UNIFIED, MemoryBudget, gib
from finetune.parts.log_to import names_trackers
from finetune.parts.parts import Parts
from finetune.plan.asked import Asked, Change, Notice, Ranks, Said
from finetune.plan.facts import Facts

HOST_FRACTION = 0.5  # of the host's memory: the most that copies of what is saved take there, beside a device


def async_save(asked: Asked, facts: Facts, ranks: Ranks, trial: Parts, room: MemoryBudget | None) -> Said:
    """async_save: on if what is saved fits in host memory a second time. The plan's other choices come first."""
    if asked.async_save != "auto":
        return
    plan = trial.with_settings(async_save="true")
    if not plan.output.takes_snapshots:  # what is saved at the end delays no step
        yield Change("async_save", "false")
        return
    shape = facts.known_shape
    if not (shape and room):
        yield Change("async_save", "false", "it is not predicted how much memory a copy of what is saved takes")
        return
    copy = budget.snapshot_bytes(plan, shape, room)
    found = budget.predicted(plan, shape, room, budget.full_microbatch(plan))
    usable = room.usable
    if room.device == "cpu":
        needed = found["total"]
    elif room.device in UNIFIED:
        needed = found["total"] + copy
    else:
        needed = found["host"] * ranks.local
        usable = int(HOST_FRACTION * system_memory()[0])
    fact = f"a copy of what is saved takes {gib(copy)} of host memory"
    if needed <= usable or asked.assumes_accelerator:
        yield Change("async_save", "true", f"{fact}, which fits")
    else:
        yield Change("async_save", "false", f"{fact}, and {gib(needed)} do not fit in {gib(usable)}")


def _evaluates(asked: Asked) -> bool:
    return bool(asked.validation_dataset or asked.validation_split or asked.score_dataset)


OF_PROFILES = ("wait_steps", "profiler_warmup_steps", "active_steps", "repeat", "profiling_frequency", "export_trace")
EVALUATES = "rows that are held out (--validation_split, --validation_dataset) or scored (--score_dataset)"
# Flags that a run reads only beside another, in words, and whether it does.
READ_BESIDE: tuple[tuple[tuple[str, ...], str, Callable[[Asked], object]], ...] = (
    (("score_samples", "score_metric"), "--score_dataset", lambda asked: asked.score_dataset),
    (("shuffle_buffer",), "--streaming", lambda asked: asked.streaming),
    (("search_budget",), "--lr search", lambda asked: asked.requested.get("lr") == "search"),
    (("image_max_pixels", "image_root", "allow_urls"), "rows that show images", lambda asked: asked.images == "true"),
    (("project_name", "name", "group", "entity"), "a tracker in --log_to", lambda asked: names_trackers(asked.log_to)),
    (("eval_every", "eval_samples", "score_max_new_tokens"), EVALUATES, _evaluates),
    (("cosine_min_lr_ratio",), "--lr_scheduler cosine", lambda asked: asked.lr_scheduler.startswith("cosine")),
    (("grad_norm",), "--apply_gradient_clipping true", lambda asked: asked.apply_gradient_clipping),
    (("pp_schedule",), "--pp_degree", lambda asked: asked.pp_degree > 1),
    (("keep_last", "async_save"), "--save_model true", lambda asked: asked.save_model),
    (OF_PROFILES, "--profile", lambda asked: asked.profile),
)


def unread(asked: Asked) -> Said:
    """Notices of flags that the user set and nothing reads in this run."""
    for names, beside, is_read in READ_BESIDE:
        given = [n for n in names if asked.given(n) and getattr(asked, n) not in ("", DEFAULTS[n])]
        if given and not is_read(asked):
            yield Notice(f"{', '.join(given)}: not read without {beside}")


def profiling(asked: Asked) -> Said:
    """Notices of what the profiler will not write as asked."""
    if not asked.profile:
        names = ("export_memory_timeline", "profile_memory", "with_stack", "with_shapes")
        given = [name for name in names if getattr(asked, name)]
        if given:
            yield Notice(f"{', '.join(given)}: nothing is recorded without --profile")
    elif asked.export_memory_timeline and package_version("matplotlib") is None:
        yield Notice(
            "export_memory_timeline: matplotlib is not installed, so each timeline is written as numbers "
            "(memory-step-N.json.gz) and not drawn (pip install matplotlib)"
        )
