"""The table of docs/reliability.md from a rig run: `python -m tests.rig.report outputs/rig.json` writes both."""

import json
import shutil
import sys
from pathlib import Path

from tests.rig.kinds import KINDS
from tests.rig.options import bound

PAGE = Path(__file__).parents[2] / "docs/reliability.md"
LAST_RUN = Path(__file__).with_name("last_run.json")
BEGIN, END = "<!-- table: tests/rig/report.py -->", "<!-- end of table -->"
HEADER = "| kind | what is tried | tried | cases that failed | of these | 95 % bound |"
CLASSES = {
    "traceback": "tracebacks",
    "hang": "hangs",
    "wrong_code": "wrong exit codes or messages",
    "differing_bits": "differing bits",
    "payload_or_escape": "payloads run, escapes, open ports",
    "failed_restart": "failed restarts",
    "rig": "faults of the rig",
}


def table(run: dict) -> str:
    """The run's rows as a table of the page. `run`: what --rig-json wrote."""
    lines = [HEADER, "|---|---|---:|---:|---|---:|"]
    rows = {row["kind"]: row for row in run["rows"]}
    for kind in KINDS.values():
        row = rows.get(kind.name)
        if row is None:
            lines.append(f"| {kind.name} | {kind.what} | - | - | | |")
            continue
        found = ", ".join(f"{row[c]} {text}" for c, text in CLASSES.items() if row[c])
        found = "; ".join(part for part in (found, row.get("facts")) if part)
        lines.append(f"| {kind.name} | {kind.what} | {row['tried']:,} | {row['failed']} | {found} | {bound(row)} |")
    return "\n".join([BEGIN, *lines, END])


def with_table(page: str, run: dict) -> str:
    """The page with the run's table in its place."""
    before, _, rest = page.partition(BEGIN)
    return before + table(run) + rest.partition(END)[2]


def main(file: str) -> None:
    if Path(file).resolve() != LAST_RUN:
        shutil.copy(file, LAST_RUN)
    PAGE.write_text(with_table(PAGE.read_text(), json.loads(LAST_RUN.read_text())))


if __name__ == "__main__":
    main(sys.argv[1])
