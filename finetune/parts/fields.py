"""Parts whose fields are settings of the same names."""

from typing import Any

Settings = Any  # a value per flag, as a TrainConfig has


def part_of(cls, settings: Settings, **renamed: object):
    """A part whose fields are settings of the same names, but for those `renamed`."""
    return cls(**{n: getattr(settings, n) for n in cls.__dataclass_fields__ if n not in renamed}, **renamed)
