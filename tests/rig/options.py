"""The rig's options and its one table: tests/conftest.py takes its hooks from here."""

import json
from pathlib import Path

from backend_manager import versions
from tests.rig.kinds import KINDS
from tests.rig.oracle import CLASSES

RESULTS = []  # a row per kind that ran in this session
COLUMNS = ("kind", "tried", "tracebacks", "hangs", "wrong codes", "differing bits", "escapes", "failed restarts")
COUNTED = CLASSES[:-1]


def pytest_addoption(parser):
    group = parser.getgroup("rig", "reliability rig: pytest -m rig")
    group.addoption("--rig-scale", choices=("quick", "full"), default="quick", help="how many cases of each kind")
    group.addoption("--rig-kills", type=int, help="kills in all, half of them at system calls")
    group.addoption("--rig-count", action="append", default=[], metavar="KIND=N", help="cases of one kind")
    group.addoption("--rig-soak", type=int, metavar="STEPS", help="steps of the long run")
    group.addoption("--rig-json", metavar="FILE", help="write the table as JSON")
    group.addoption("--rig-report", metavar="FILE", help="append a JSON line per case that failed")
    group.addoption("--rig-replay", action="append", default=[], metavar="KIND:SEED", help="only this case")
    group.addoption("--rig-first", type=int, default=0, metavar="SEED", help="seed of each kind's first case")
    group.addoption("--rig-folder", metavar="DIR", help="folder for the runs, kept afterwards")


def seeds_of(config, kind) -> list[int]:
    """Seeds of the kind's cases in this session."""
    replayed = [one.rpartition(":") for one in config.getoption("--rig-replay")]
    if replayed:
        return [int(seed) for name, _, seed in replayed if name == kind.name]
    count = kind.full if config.getoption("--rig-scale") == "full" else kind.quick
    kills = config.getoption("--rig-kills")
    if kills is not None and kind.name in ("kills", "call-kills", "rank-call-kills"):
        count = -(-kills * kind.full // 1000)
    for name, _, number in (one.partition("=") for one in config.getoption("--rig-count")):
        assert name in KINDS, f"--rig-count {name}: not a kind. Use one of {', '.join(KINDS)}."
        count = int(number) if name == kind.name else count
    first = config.getoption("--rig-first")
    return list(range(first, first + count))


def worker_environment(config) -> dict[str, str]:
    """What the cases in the workers take from the options."""
    full = config.getoption("--rig-scale") == "full"
    steps = config.getoption("--rig-soak") or (10_000 if full else 300)
    return {"RIG_SOAK": str(steps), "RIG_FLOOD_BYTES": str(300 * 10**6 if full else 20 * 10**6)}


def add_result(config, kind, answers: list[dict], seconds: float) -> list[dict]:
    """Adds the kind's row to the table and its failures to the report; the failures."""
    failed = [answer for answer in answers if answer["failures"]]
    row = dict(kind=kind.name, what=kind.what, cases=len(answers), tried=sum(a["tried"] for a in answers))
    for name in CLASSES:
        row[name] = sum(any(f[0] == name for f in answer["failures"]) for answer in failed)
    row |= dict(failed=len(failed), seconds=round(seconds, 1))
    facts = [a["kept"]["facts"] for a in answers if a["kept"] and "facts" in a["kept"]]
    row |= dict(facts="; ".join(facts)) if facts else {}
    RESULTS.append(row)
    report = config.getoption("--rig-report")
    if report and failed:
        with open(report, "a") as file:
            for answer in failed:
                file.write(json.dumps({k: answer[k] for k in ("kind", "seed", "failures", "kept")}) + "\n")
    return failed


def bound(row: dict) -> str:
    """The 95 % bound of the failure rate where none was seen: 3/n."""
    few = row["cases"] < 3 or not row["tried"]
    return "" if row["failed"] or few else f"{3 / row['tried']:.2%}"


def table_lines(rows: list[dict]) -> list[str]:
    header = (*COLUMNS, "rig", "seconds", "95 % bound")
    cells = [header, *((r["kind"], r["tried"], *(r[c] for c in CLASSES), r["seconds"], bound(r)) for r in rows)]
    cells = [[str(c) for c in row] for row in cells]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return [
        "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True)))
        for r in cells
    ]


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    if not RESULTS:
        return
    terminalreporter.section("rig")
    for line in (*table_lines(RESULTS), *(f"{row['kind']}: {row['facts']}" for row in RESULTS if "facts" in row)):
        terminalreporter.write_line(line)
    file = config.getoption("--rig-json")
    if file:
        facts = dict(
            scale=config.getoption("--rig-scale"), versions=versions(), seconds=sum(r["seconds"] for r in RESULTS)
        )
        Path(file).write_text(json.dumps(dict(facts, rows=RESULTS), indent=1) + "\n")
