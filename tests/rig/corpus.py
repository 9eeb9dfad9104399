"""Mutants that once failed, kept as files: `python -m tests.rig.corpus REPORT` adds those of a report to the corpus.

A line per mutant: its kind and seed, how it failed, and the bytes themselves, since a seed gives another mutant once a
mutator has changed. One mutant is kept for each way to fail.
"""

import json
import re
import sys
from pathlib import Path

FILE = Path(__file__).with_name("corpus") / "mutants.jsonl"
LARGEST_BYTES = 12_000  # of a line


def entries(file: Path = FILE) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def way_to_fail(entry: dict) -> tuple:
    """What two mutants that found the same fault have in common: kind, class, and the text up to its details."""
    what, text = entry["failures"][0]
    text = re.sub(r"[^ ]*/[^ ]*|'[^']*'|\d+", "#", text)
    return entry["kind"], what, text[:50]


def add(report: Path) -> int:
    """Appends the report's new failures, the smallest mutant of each; how many."""
    found = entries()
    known = {way_to_fail(entry) for entry in found}
    lines = [line for line in report.read_text().splitlines() if len(line) <= LARGEST_BYTES]
    new = [e for e in map(json.loads, sorted(lines, key=len)) if e["kept"] and "files" in e["kept"]]
    before = len(found)
    for entry in new:
        if way_to_fail(entry) not in known and entry["failures"][0][0] != "rig":
            known.add(way_to_fail(entry))
            found.append(entry)
    found.sort(key=lambda e: (e["kind"], e["seed"]))
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text("".join(json.dumps(entry, sort_keys=True) + "\n" for entry in found))
    return len(found) - before


if __name__ == "__main__":
    print(f"{add(Path(sys.argv[1]))} added, {len(entries())} in {FILE.name}")
