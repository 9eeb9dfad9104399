"""Files that the program needs while it runs: in the repository's folders, or in the installed package."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def shipped(folder: str, installed: str | None = None) -> Path:
    """A folder of the repository; in an installed package it lies within finetune/, as `installed`."""
    inside = PACKAGE / (installed or folder)
    if inside.is_dir():
        return inside
    return PACKAGE.parent / folder
