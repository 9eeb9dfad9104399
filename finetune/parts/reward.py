"""Rewards of sampled answers: which, how answers are sampled, and how often they are learned from."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from finetune.errors import PlanError
from finetune.parts.answer_metrics import CHOICE, OF_ANSWERS
from finetune.parts.fields import Settings, part_of
from finetune.parts.objectives import REWARD_MODEL
from finetune.safetensors_io import digest_of

REWARDS = (*OF_ANSWERS, CHOICE)
REWARDED = "rewarded rows"  # name of the digest of the rows as functions get them, with columns that no prompt has
PYTHON = "<python>.py"  # stands for the file of a function that a Python program gave
MOST_REWARD = 1e9  # of a reward and of a weight: beyond it means and deviations lose their digits


@dataclass(frozen=True)
class RewardSource:
    """One of --reward: a metric's name, a function of a Python file, or the folder of a reward model, with the weight
    of its values. `label`: its name in messages and in the log, with that of its file where several have one name.
    """

    name: str
    weight: float = 1.0
    file: str | None = None
    label: str = ""
    is_model: bool = False

    @property
    def is_metric(self) -> bool:
        return self.file is None and not self.is_model

    @property
    def is_function(self) -> bool:
        return self.file is not None

    @property
    def folder(self) -> Path:
        """The folder of a reward model."""
        return Path(self.name).expanduser()

    def check_file(self) -> None:
        """Raises PlanError if it names a file or a folder that is not there."""
        if self.is_model and not self.folder.is_dir():
            raise PlanError(
                f"--reward {self.name}: there is no such folder. Give a checkpoint of --task {REWARD_MODEL}, "
                f"FILE.py:FUNCTION, or one of {', '.join(REWARDS)}."
            )
        if self.file not in (None, PYTHON) and not Path(self.file).expanduser().is_file():
            raise PlanError(f"--reward {self.file}:{self.name}: there is no such file. Check the path.")


def parse_rewards(given: str | list[str] | None) -> tuple[RewardSource, ...]:
    """The rewards that --reward names. Raises PlanError."""
    if given is None:
        return ()
    if isinstance(given, str):
        words = given.split(",")
    else:
        words = [word for part in given for word in part.split(",")]
    found = [_parse(word.strip()) for word in words if word.strip()]
    if not found:
        raise PlanError("--reward: is empty. Name a metric, such as exact, or FILE.py:FUNCTION.")
    for i, source in enumerate(found):
        if (source.name, source.file) in [(other.name, other.file) for other in found[:i]]:
            raise PlanError(f"--reward {source.name}: is given twice. Give it once, with a weight.")
    if not any(source.weight for source in found):
        raise PlanError("--reward: all weights are 0, so nothing is learned. Give one another weight.")
    return labelled(found)


def labelled(sources: list[RewardSource]) -> tuple[RewardSource, ...]:
    """The sources, each with a label of its own."""
    names = [source.name for source in sources]
    labels: list[str] = []
    for source in sources:
        label = source.name
        if source.is_model:
            label = PurePath(source.name).name.replace("/", "_") or "model"
            if label in labels or names.count(label):
                label = f"{label}_{len(labels) + 1}"
        if source.file is not None and names.count(source.name) > 1:
            label = f"{PurePath(source.file).stem}.{source.name}"
            if label in labels:
                label = f"{label}_{len(labels) + 1}"
        labels.append(label)
    return tuple(replace(source, label=label) for source, label in zip(sources, labels, strict=True))


def _parse(word: str) -> RewardSource:
    parts = word.split(":")
    weight = 1.0
    number = _number(parts[-1])
    if len(parts) > 1 and number is not None:
        weight = number
        parts = parts[:-1]
    if len(parts) == 1:
        name = parts[0]
        if name.endswith(".py"):
            raise PlanError(f"--reward {word}: names no function of the file. Use {name}:FUNCTION.")
        if name not in REWARDS and ("/" in name or Path(name).is_dir()):
            return RewardSource(name, weight, is_model=True)
        if name not in REWARDS:
            raise PlanError(
                f"--reward {word}: is no reward. Use {', '.join(REWARDS)}, FILE.py:FUNCTION, or the "
                "folder of a reward model."
            )
        return RewardSource(name, weight)
    file = ":".join(parts[:-1])
    name = parts[-1]
    if not file.endswith(".py") or not name.isidentifier():
        raise PlanError(
            f"--reward {word}: is neither NAME:WEIGHT nor FILE.py:FUNCTION:WEIGHT. Write it as one of them."
        )
    return RewardSource(name, weight, file)


def _number(text: str) -> float | None:
    try:
        found = float(text)
    except ValueError:
        return None
    if not abs(found) <= MOST_REWARD:
        raise PlanError(f"--reward: {text} is no weight. Use a finite number, up to {MOST_REWARD:g}.")
    return found


@dataclass(frozen=True)
class RewardPlan:
    """`reward_loss`: a row of OBJECTIVES that is rewarded. `num_generations`: answers to each prompt."""

    reward: str | list | None
    reward_loss: str
    num_generations: int
    max_completion_length: int
    temperature: float
    top_p: float
    scale_rewards: str
    kl_beta: float
    updates_per_rollout: int
    mask_truncated: bool
    refill: bool
    reward_timeout: float
    score_pattern: str | None

    @property
    def sources(self) -> tuple[RewardSource, ...]:
        return parse_rewards(self.reward)

    def digest(self) -> str:
        """SHA-256 of the functions' files and of the models' weights. Code that they import is not in it, nor functions
        from Python.
        """
        found = hashlib.sha256()
        for source in self.sources:
            if source.file not in (None, PYTHON):
                found.update(Path(str(source.file)).expanduser().read_bytes())
            if source.is_model:
                found.update(_digest_of_model(source.folder))
        return found.hexdigest()

    @property
    def by_functions(self) -> bool:
        """True if a function is among them, which is given the columns that no format reads."""
        return any(not source.is_metric and not source.is_model for source in self.sources)

    @classmethod
    def of(cls, settings: Settings) -> "RewardPlan":
        return part_of(cls, settings)


def _digest_of_model(folder: Path) -> bytes:
    """Digest of a model's weights and of what says how they are read."""
    found = hashlib.sha256()
    for pattern in ("*.safetensors", "adapter_config.json", "head.json"):
        for file in sorted(folder.glob(pattern)):
            found.update(digest_of(file).encode())
    return found.digest()
