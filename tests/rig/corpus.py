"""Cases that once failed, kept in corpus/: `python -m tests.rig.corpus REPORT` adds those of a report.

A line per case. Of a mutant it holds the bytes themselves, since its seed gives another one once a mutator has changed;
of a run that was disturbed, the seed. One case is kept for each way to fail.
"""

import json
import re
import sys
from pathlib import Path

from tests.rig.kinds import KINDS

FOLDER = Path(__file__).with_name("corpus")
MUTANTS, RUNS = FOLDER / "mutants.jsonl", FOLDER / "runs.jsonl"
LARGEST_BYTES = 12_000  # of a line


def entries(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def way_to_fail(entry: dict) -> tuple:
    """What two cases that found the same fault have in common: kind, class, and the text up to its details."""
    what, text = entry["failures"][0]
    text = re.sub(r"[^ ]*/[^ ]*|'[^']*'|\d+", "#", text)
    return entry["kind"], what, text[:50]


def add(report: Path, file: Path, mutants: bool) -> int:
    """Appends the report's new failures, the smallest of each; how many."""
    found = entries(file)
    known, before = {tuple(entry["way"]) for entry in found}, len(found)
    for entry in map(json.loads, sorted(report.read_text().splitlines(), key=len)):
        fits = len(json.dumps(entry)) <= LARGEST_BYTES and entry["failures"][0][0] != "rig"
        kept = "files" in (entry["kept"] or {})
        if fits and kept == KINDS[entry["kind"]].batched == mutants and way_to_fail(entry) not in known:
            entry["way"] = way_to_fail(entry)
            known.add(entry["way"])
            entry["failures"] = [
                [what, re.sub(r"(?<![^ \"'])/[^ ]*/", "", text)[:160]] for what, text in entry["failures"][:1]
            ]
            found.append(entry)
    found.sort(key=lambda e: (e["kind"], e["seed"]))
    file.write_text("".join(json.dumps(entry, sort_keys=True) + "\n" for entry in found))
    return len(found) - before


def main(report: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    for file in (MUTANTS, RUNS):
        print(f"{file.name}: {add(Path(report), file, file == MUTANTS)} added, {len(entries(file))} in all")


if __name__ == "__main__":
    main(sys.argv[1])
