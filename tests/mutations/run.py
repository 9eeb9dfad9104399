"""Shows for each promise of the guides that a test of the default suite notices a break of it.

    python -m tests.mutations.run [ID ...] [--workers N] [--write]

Copies the working tree, applies one mutation at a time and runs the tests that are marked with its promise, the fastest
first, until one fails. Ends with 1 if a mutation was not noticed. `--write` updates dev/mutations.md.
"""

import argparse
import contextlib
import importlib
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from tests.mutations.mutation import Mutation
from tests.mutations.table import MUTATIONS
from tests.support.promises import shown_by
from tests.support.tiers import read

ROOT = Path(__file__).parents[2]
# What all tests import: each try is a fork of this process.
LIBRARIES = ("torch.distributed.fsdp", "torch.utils.checkpoint", "transformers.models.llama.modeling_llama", "datasets")
LIST, MISSED = ROOT / "dev" / "mutations.md", "NOT NOTICED"


@dataclass(frozen=True)
class Result:
    """`noticed_by`: the test that failed; None: none did, and `why` says what happened instead."""

    mutation: Mutation
    noticed_by: str | None
    why: str
    seconds: float


def main(argv=None) -> int:
    args = parsed(argv)
    chosen = [m for m in MUTATIONS if not args.ids or m.promise in args.ids]
    for library in LIBRARIES:  # not what of this tree uses them: torch takes a namespace of kernels once per process
        importlib.import_module(library)
    with copies(args.workers) as roots:
        tests = marked_tests({m.promise for m in chosen})
        if args.baseline and (failed := failure_without_mutation(tests, roots[0])):
            print(f"without a mutation: {failed}")
            return 1
        results = []
        for result in tried(chosen, tests, roots, args.limit):
            results.append(result)
            print(line_of(result), flush=True)
            if args.write:
                before = LIST.read_text(encoding="utf-8") if LIST.exists() else ""
                LIST.write_text(page_of([result], rows_of(before)), encoding="utf-8")
    print(summary_of({(r.mutation.promise, r.mutation.what): row_of(r) for r in results}))
    return int(any(result.noticed_by is None for result in results))


def parsed(argv):
    parser = argparse.ArgumentParser(prog="python -m tests.mutations.run", description=__doc__.partition("\n")[0])
    parser.add_argument("ids", nargs="*", metavar="ID", type=lambda word: word.upper().replace("-", "_"))
    parser.add_argument("--workers", type=int, default=2, help="mutations tried at a time (default: 2)")
    parser.add_argument("--limit", type=float, default=300, help="seconds per mutation (default: 300)")
    parser.add_argument("--baseline", action="store_true", help="first run the same tests without a mutation")
    parser.add_argument("--write", action="store_true", help="update dev/mutations.md")
    args = parser.parse_args(argv)
    if unknown := set(args.ids) - {m.promise for m in MUTATIONS}:
        parser.error(f"no mutation of {', '.join(sorted(unknown))}")
    return args


def marked_tests(promises: set[str]) -> dict[str, list[str]]:
    """{id: its tests of the default suite, the fastest first}, by the times in tiers.txt."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    shown = shown_by({str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files})
    seconds = {name: cost for (kind, name), (cost, _) in read().items() if kind == "test"}
    return {name: sorted(dict.fromkeys(shown[name]), key=lambda test: seconds.get(test, 0.0)) for name in promises}


@contextlib.contextmanager
def copies(number: int) -> Iterator[list[Path]]:
    """That many copies of the working tree, with its changes and without what git ignores."""
    listed = subprocess.check_output(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, text=True)
    names = [name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        roots = [Path(folder) / str(i) for i in range(number)]
        for root in roots:
            for name in names:
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name)
            if (ROOT / ".venv").exists():
                (root / ".venv").symlink_to((ROOT / ".venv").resolve())
        yield roots


def failure_without_mutation(tests: dict[str, list[str]], root: Path) -> str | None:
    every = sorted({test for found in tests.values() for test in found})
    process, output = start(root, [*every, "-k", " or ".join(sorted(tests))])
    process.join()
    printed = output.read_text(encoding="utf-8")
    return None if process.exitcode == 0 else failures(printed)[0] or printed[-2000:]


def tried(mutations: list[Mutation], tests: dict, roots: list[Path], limit_s: float) -> Iterator[Result]:
    """Runs the tests of each mutation's promise on a copy that has it; results as they come."""
    waiting, free, running = list(mutations), list(roots), {}
    try:
        while waiting or running:
            while waiting and free:
                mutation, root = waiting.pop(0), free.pop()
                before = mutation.apply(root)
                process, output = start(root, [*tests[mutation.promise], "-k", mutation.promise])
                running[process] = (mutation, root, before, output, time.monotonic())
            wait([process.sentinel for process in running], timeout=1.0)
            for process, (mutation, root, before, output, began) in list(running.items()):
                seconds, late = time.monotonic() - began, process.is_alive()
                if late and seconds < limit_s:
                    continue
                end(process)
                del running[process]
                mutation.undo(root, before)
                free.append(root)
                noticed_by, error = failures(output.read_text(encoding="utf-8", errors="replace"))
                why = f"no end after {limit_s:.0f} s" if late else error or f"pytest ended with {process.exitcode}"
                yield Result(mutation, None if late else noticed_by, why, seconds)
    finally:
        for process in running:
            end(process)


def end(process) -> None:
    """Ends it with what its tests started in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def start(root: Path, arguments: list[str]) -> tuple:
    """(a process that runs these tests of the copy in `root`, the file of what it prints)."""
    output = root.with_suffix(".txt")
    process = multiprocessing.get_context("fork").Process(target=run_pytest, args=(root, arguments, output))
    process.start()
    return process, output


def run_pytest(root: Path, arguments: list[str], output: Path) -> None:
    """In a fork: forgets what was imported of this tree, so that the copy's is, and keeps the libraries."""
    os.setsid()
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
        if name != "__main__" and file and Path(file).is_relative_to(ROOT) and ".venv" not in file:
            del sys.modules[name]
    sys.path[:] = [str(root) if Path(path or ".").resolve() == ROOT else path for path in sys.path]
    os.chdir(root)
    os.environ["COLUMNS"] = "400"
    sys.exit(pytest.main(["-q", "-x", "--tb=no", "-rfE", "-p", "no:cacheprovider", *arguments]))


def failures(printed: str) -> tuple[str | None, str | None]:
    """(the test that failed, what ended in an error outside of a test); None for what did not happen."""
    failed = re.search(r"^FAILED (\S+::\S.*?)(?: - |$)", printed, re.M)
    error = re.search(r"^ERROR .*$", printed, re.M)
    return failed and failed[1], error and error[0]


def line_of(result: Result) -> str:
    verdict = f"noticed by {result.noticed_by}" if result.noticed_by else f"{MISSED} ({result.why})"
    return f"{result.mutation.promise}  {result.seconds:5.1f} s  {verdict}: {result.mutation.what}"


def page_of(results: list[Result], before: dict[tuple[str, str], str]) -> str:
    """The list with these results, and with the rows `before` of mutations that were not tried now."""
    rows = before | {(r.mutation.promise, r.mutation.what): row_of(r) for r in results}
    rows = {(m.promise, m.what): rows[m.promise, m.what] for m in MUTATIONS if (m.promise, m.what) in rows}
    head = [
        "# Mutations",
        "",
        "What breaks each promise of the guides, and the first test of the default suite that notices it. Written by",
        "`python -m tests.mutations.run --write`.",
        "",
        summary_of(rows),
        "",
        "| promise | mutation | noticed by | s |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *rows.values()]) + "\n"


def row_of(r: Result) -> str:
    noticed_by = f"`{r.noticed_by}`" if r.noticed_by else f"{MISSED}: {r.why}"
    cells = [r.mutation.promise.replace("_", "-"), r.mutation.what, noticed_by, f"{r.seconds:.0f}"]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def rows_of(page: str) -> dict[tuple[str, str], str]:
    """{(id, the break in words): row} of a list."""
    found = re.findall(r"^(\| ([A-Z]+-\d\d) \| (.+?) \| .*)$", page, re.M)
    return {(name.replace("-", "_"), what.replace("\\|", "|")): row for row, name, what in found}


def summary_of(rows: dict[tuple[str, str], str]) -> str:
    promises = {name for name, _ in rows}
    missed = sorted({name.replace("_", "-") for (name, _), row in rows.items() if MISSED in row})
    minutes = sum(int(row.split("|")[-2]) for row in rows.values()) / 60
    rest = f"; not: {', '.join(missed)}" if missed else ""
    noticed = f"{len(promises) - len(missed)} of {len(promises)} promises noticed"
    return f"{noticed}{rest}. {len(rows)} mutations, {minutes:.0f} min in all."


if __name__ == "__main__":
    sys.exit(main())
