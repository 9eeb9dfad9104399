"""The destinations that --log_to names: the console in one of two forms, and trackers."""

from finetune.backend.machine import package_version
from finetune.errors import PlanError

CONSOLE = ("tqdm", "stdout")
# Tracker: the packages of which one is needed, the one to install first.
PACKAGES: dict[str, tuple[str, ...]] = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "trackio": ("trackio",),
    "csv": (),
}
NAMES = (*CONSOLE, *PACKAGES)


def names_of(words: str, flag: str = "--log_to ") -> tuple[str, ...]:
    """The destinations in the value of --log_to. Raises PlanError for an unknown one, or one that is not installed."""
    names = tuple(dict.fromkeys(word.strip() for word in str(words).split(",") if word.strip()))
    unknown = next((name for name in names if name not in (*NAMES, "auto")), None)
    if unknown or not names:
        raise PlanError(f"{flag}{unknown or words}: is not one. Use {', '.join(NAMES)}, comma-separated.")
    if {"tqdm", "stdout"} <= set(names):
        raise PlanError(f"{flag}{words}: tqdm draws a live line and stdout prints lines. Use one of them.")
    for name in names:
        packages = PACKAGES.get(name, ())
        if packages and not any(package_version(package) for package in packages):
            raise PlanError(f"{flag}{name}: {name} is not installed. pip install {packages[0]}, or use {flag}stdout.")
    return names


def tracking(words: str) -> tuple[str, ...]:
    """The trackers among the destinations."""
    return tuple(name for name in names_of(words) if name in PACKAGES)


def names_trackers(words: str) -> bool:
    """True if there is a tracker among the destinations, installed or not."""
    return any(word.strip() in PACKAGES for word in words.split(","))
