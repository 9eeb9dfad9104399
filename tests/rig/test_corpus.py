"""Cases that once ended in a traceback, a hang, a wrong code or differing bits, tried again: mutants in every run."""

import sys

import pytest

from tests.rig.corpus import MUTANTS, RUNS, entries
from tests.rig.kinds import KINDS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: /proc and pidfd")


def by_kind(file) -> dict[str, list]:
    found = {}
    for entry in entries(file):
        found.setdefault(entry["kind"], []).append(entry)
    return found


def failures(answers: list[dict]) -> str:
    return "\n".join(f"{a['kind']}:{a['seed']}: {what}: {text}" for a in answers for what, text in a["failures"])


@pytest.mark.slow
@pytest.mark.parametrize("name", by_kind(MUTANTS))
def test_a_mutant_that_once_failed_does_not_fail_again(name, pool):
    kept = by_kind(MUTANTS)[name]
    answers = pool.run(KINDS[name], kept)
    assert len(answers) == len(kept)
    assert not failures(answers), failures(answers)


@pytest.mark.rig
@pytest.mark.parametrize("name", by_kind(RUNS))
def test_a_run_that_once_failed_does_not_fail_again(name, pool):
    answers = pool.run(KINDS[name], [entry["seed"] for entry in by_kind(RUNS)[name]])
    assert not failures(answers), failures(answers)
