"""Mutants that once ended in a traceback, a hang or a wrong code, tried again in every run of the tests."""

import sys

import pytest

from tests.rig.corpus import entries
from tests.rig.kinds import KINDS

ENTRIES = {}
for one in entries():
    ENTRIES.setdefault(one["kind"], []).append(one)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: /proc and pidfd")
@pytest.mark.parametrize("name", ENTRIES)
def test_a_mutant_that_once_failed_does_not_fail_again(name, pool):
    answers = pool.run(KINDS[name], ENTRIES[name])
    assert len(answers) == len(ENTRIES[name])
    failed = [f"{name}:{a['seed']}: {what}: {text}" for a in answers for what, text in a["failures"]]
    assert not failed, f"{len(failed)} of {len(answers)}\n" + "\n".join(failed)
