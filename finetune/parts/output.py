"""Files that a run writes, and when."""

from dataclasses import dataclass
from pathlib import Path

from finetune.parts.fields import Settings, part_of


@dataclass(frozen=True)
class OutputPlan:
    """Files of a run, and when they are written. `async_save`: steps go on while a checkpoint is written.
    `early_stopping`: evaluations in a row without a better loss that end it; 0: none does. `load_best`: the best
    weights are published instead of the last; `keeps_best`: they are kept in best/. `eval_samples`: prompts that each
    evaluation answers.
    """

    output_dir: str | None
    save_model: bool
    save_every: int
    async_save: bool
    keep_last: int
    eval_every: int
    overwrite: bool
    push_to_hub: str | None = None
    early_stopping: int = 0
    load_best: bool = False
    keeps_best: bool = False
    run_page: bool = True
    eval_samples: int = 0
    score_max_new_tokens: int = 64
    stop_on_divergence: bool = False

    @property
    def takes_snapshots(self) -> bool:
        """True if steps follow saves, which are written beside them."""
        return self.async_save and self.save_model and self.save_every > 0

    @property
    def folder(self) -> Path:
        assert self.output_dir is not None, "the plan names it"
        return Path(self.output_dir)

    @classmethod
    def of(cls, settings: Settings) -> "OutputPlan":
        s = settings
        words = dict(load_best=s.load_best == "true", async_save=s.async_save == "true")
        validates = bool(s.validation_dataset or s.validation_split)
        return part_of(cls, s, keeps_best=s.save_model and validates, **words)


@dataclass(frozen=True)
class LogPlan:
    """Destinations of the log, and its names there. `every`: steps between printed lines."""

    log_to: str
    every: int
    project_name: str | None = None
    name: str | None = None
    group: str | None = None
    entity: str | None = None

    @classmethod
    def of(cls, settings: Settings) -> "LogPlan":
        return part_of(cls, settings, every=settings.log_every_n_steps)


@dataclass(frozen=True)
class ProfilePlan:
    """Records that --profile takes, and where it writes them."""

    profile: bool
    profiling_output: str
    with_stack: bool
    with_shapes: bool
    export_trace: bool
    export_memory_timeline: bool
    profile_memory: bool
    wait_steps: int
    profiler_warmup_steps: int
    active_steps: int
    repeat: int
    profiling_frequency: int
