"""Which tests are fast: those that start no process and take under a second, by what `--write-tiers` measured.

tiers.txt lists the others, and fixtures that start a process or take long. It is written, not edited: `make tiers`.
A new test counts as fast until it is measured. slow_cells.txt lists what is slow although other cells, or other tests
of the same file, run by default; a test of minutes has its mark at its place.
"""

import sys
import time
from pathlib import Path

import pytest

ROOT, FILE = Path(__file__).parents[2], Path(__file__).with_name("tiers.txt")
SLOW_CELLS = Path(__file__).with_name("slow_cells.txt")
TEST_S, FIXTURE_S = 1.0, 5.0
STARTS = ("subprocess.Popen", "os.fork", "os.posix_spawn")
PROPERTY = "cost"
HEADER = "# Tests and fixtures that are not fast: kind, name, seconds, whether they start a process. By `make tiers`."


def pytest_addoption(parser):
    parser.addoption("--write-tiers", action="store_true", help="measure the tests that run, update tiers.txt")


def pytest_configure(config):
    config.stash[STOPWATCH] = None
    if config.getoption("--write-tiers"):
        config.stash[STOPWATCH] = Stopwatch()
        sys.addaudithook(config.stash[STOPWATCH].hear)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    listed = set(read())
    slow_cells = set(read_slow_cells())
    for item in items:
        if item.nodeid in slow_cells:
            item.add_marker(pytest.mark.slow)
        names = {("test", name_of(item.nodeid)), *(("fixture", name) for name in item.fixturenames)}
        slow = item.get_closest_marker("slow") or item.get_closest_marker("rig")
        if not slow and not names & listed:
            item.add_marker(pytest.mark.fast)


@pytest.hookimpl(hookwrapper=True)
def pytest_fixture_setup(fixturedef, request):
    stopwatch = request.config.stash[STOPWATCH]
    before = stopwatch and stopwatch.read()
    yield
    if stopwatch:
        entry = ("fixture", fixturedef.argname, *stopwatch.since(before))
        request.node.session.config.stash.setdefault(FIXTURES, []).append(entry)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    stopwatch = item.config.stash[STOPWATCH]
    before = stopwatch and stopwatch.read()
    yield
    if stopwatch:
        fixtures = item.config.stash.get(FIXTURES, [])
        item.user_properties.append((PROPERTY, [("test", name_of(item.nodeid), *stopwatch.since(before)), *fixtures]))
        item.config.stash[FIXTURES] = []


def pytest_terminal_summary(terminalreporter, config):
    """In the first process only, which has the reports of all workers."""
    if not config.getoption("--write-tiers"):
        return
    costs, measured = read(), {}
    for report in terminalreporter.getreports("passed"):
        for kind, name, seconds, starts in dict(report.user_properties).get(PROPERTY, ()):
            most, any_start = measured.get((kind, name), (0.0, False))
            measured[kind, name] = (max(most, seconds), any_start or starts)
    for (kind, name), (seconds, starts) in measured.items():
        costs.pop((kind, name), None)
        if starts or seconds > (TEST_S if kind == "test" else FIXTURE_S):
            costs[kind, name] = (seconds, starts)
    lines = [
        f"{kind} {name} {seconds:.1f} {'process' if starts else '-'}"
        for (kind, name), (seconds, starts) in costs.items()
        if kind == "fixture" or exists(name)
    ]
    FILE.write_text("\n".join([HEADER, *sorted(lines)]) + "\n")


def exists(name: str) -> bool:
    file, _, function = name.rpartition("::")
    return (ROOT / file).exists() and f"def {function}(" in (ROOT / file).read_text()


def read() -> dict[tuple[str, str], tuple[float, bool]]:
    """{(kind, name): (seconds, whether it starts a process)} of what is not fast."""
    lines = [line.split() for line in FILE.read_text().splitlines() if not line.startswith("#")]
    return {(kind, name): (float(seconds), starts == "process") for kind, name, seconds, starts in lines}


def read_slow_cells() -> list[str]:
    """The ids of slow cells."""
    return [line for line in SLOW_CELLS.read_text().splitlines() if not line.startswith("#")]


def name_of(nodeid: str) -> str:
    """A test function, whatever its parameters."""
    return nodeid.partition("[")[0]


class Stopwatch:
    """Seconds and started processes of this process."""

    def __init__(self):
        self.starts = 0

    def hear(self, event: str, arguments) -> None:
        self.starts += event in STARTS

    def read(self) -> tuple[float, int]:
        return time.perf_counter(), self.starts

    def since(self, before: tuple[float, int]) -> tuple[float, bool]:
        return time.perf_counter() - before[0], self.starts > before[1]


STOPWATCH = pytest.StashKey[Stopwatch | None]()
FIXTURES = pytest.StashKey[list]()
