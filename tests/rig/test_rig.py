"""Each kind of case, tried as often as the options say; one table at the end. See docs/reliability.md."""

import sys

import pytest

from tests.rig import intercept
from tests.rig.kinds import KINDS
from tests.rig.options import add_result, seeds_of
from tests.rig.pool import timed

pytestmark = [
    pytest.mark.rig,
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: /proc, pidfd and LD_PRELOAD"),
]
NEED_COMPILER = ("call-kills", "rank-call-kills", "save-kills", "io-faults", "signals", "owners", "disk-full")
NEED_COMPILER += ("packed-faults",)


@pytest.mark.parametrize("name", KINDS)
def test_no_case_of_this_kind_fails(name, pool, request):
    kind = KINDS[name]
    seeds = seeds_of(request.config, kind)
    if not seeds:
        pytest.skip("no case asked for")
    if name in NEED_COMPILER and intercept.build(pool.root) is None:
        pytest.skip("needs a C compiler, for the library that fails system calls")
    answers, seconds = timed(pool, kind, seeds)
    failed = add_result(request.config, kind, answers, seconds)
    shown = [f"{kind.name}:{a['seed']}: {what}: {text}" for a in failed for what, text in a["failures"]]
    assert not failed, f"{len(failed)} of {len(answers)}\n" + "\n".join(shown[:20])
