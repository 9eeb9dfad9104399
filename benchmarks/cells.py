"""Runs of train.py whose results are kept in a file, a JSON line per cell: what is there is not run again."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


def trained(flags: dict, out: Path) -> tuple[list[dict], dict]:
    """(events, settled plan) of train.py with these flags, in a process of its own; RuntimeError if it failed."""
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, str(ROOT / "train.py"), "--output_dir", str(out), "--log_to", "stdout", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-300:])
    from finetune.run.metrics import events_in

    return events_in(out), json.loads((out / "run_plan.json").read_text())["settled"]


def kept_in(file: Path) -> dict[str, dict]:
    """{cell: its line} of a file; empty if there is none."""
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {line["cell"]: line for line in lines}


def keep(file: Path, line: dict) -> None:
    """Prints the line of a cell and appends it to the file."""
    print(json.dumps(line), flush=True)
    with file.open("a") as opened:
        opened.write(json.dumps(line) + "\n")


def numbers(text: str) -> list[int]:
    """Of a flag: 1,2,3."""
    return [int(word) for word in text.split(",")]


def main(parser: argparse.ArgumentParser, measure: Callable, table: Callable, out: str) -> None:
    """Measures, or with --table prints the table of what was measured."""
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--table", type=Path, help="print the table of a file, and run nothing")
    args = parser.parse_args()
    if args.table:
        print(table(args.table))
    else:
        measure(args)
