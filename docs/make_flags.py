"""Writes docs/flags.md from finetune/settings.py: `python docs/make_flags.py`. tests/test_docs.py checks that it was run."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from finetune.config import (
    DEPRECATED_TRAIN_TYPES,
    FIELDS,
    GROUPS,  # noqa: E402  the path comes first
)

PAGE = ROOT / "docs" / "flags.md"
HEAD = """# Flags of train.py

<!-- Made by docs/make_flags.py from finetune/settings.py. Change that file, then run it again. -->

Dashes and underscores are the same. A boolean stands bare (true) or with `true|false|1|0|yes|no|on|off`. The same names
are the keys of a `--config` YAML file and the arguments of `fine_tune(...)`. `unset` means none, or that the plan decides;
what the plan changes is printed with its reason before anything loads. An unknown flag is answered with the nearest known
one. A flag whose feature this version lacks is refused with a line that says so.
"""


def page() -> str:
    """The text of docs/flags.md."""
    parts = [HEAD]
    for key, title in GROUPS.items():
        rows = [row(name, f) for name, f in FIELDS.items() if f.metadata["group"] == key]
        parts.append("\n".join([f"## {title}", "", "| flag | default | meaning |", "|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def row(name: str, field) -> str:
    meta = field.metadata
    names = ", ".join(f"`--{n}`" for n in (name, *meta["aliases"]))
    choices = [c for c in meta["choices"] or () if c not in DEPRECATED_TRAIN_TYPES]
    text = meta["help"] + (". One of " + ", ".join(f"`{c}`" for c in choices) if choices else "")
    if name == "train_type":
        text += ". The [older product names](migration.md) are accepted"
    return f"| {names} | {default(field)} | {text} |"


def default(field) -> str:
    if field.default is None:
        return "unset"
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
