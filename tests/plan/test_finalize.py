"""The batch size tried on the real model."""

import pytest

from tests.support.commands import PYTHON, finish

TRY_ROWS = """
import resource, sys
from pathlib import Path
import torch
from finetune.data.collate import microbatches
from finetune.data.prepare import Data
from finetune.plan.finalize import probe_batch_size
from finetune.plan.run_plan import RunPlan
from tests.support import tiny
from tests.support.planned import engine_of, settings_of

torch.set_num_threads(1)
folder = Path(sys.argv[1])
changes = dict(batch_size=64, microbatch_tokens=64 * 100, batch_layout="padding_free", context_length=100)
s = settings_of("lora", low_memory=True, **changes)
engine, layout = engine_of("llama", s, folder, hidden_size=256, intermediate_size=768)
engine.begin_memory(0)
rows = tiny.dataset((100,) * 64)
plan = RunPlan(s, {"batch_size": "auto"}, (), (), "cpu", "torch")
data = Data(None, set(), rows, None, [], ())
engine.try_step(microbatches(rows, range(4), layout, 4, 6400, 0)[0], several=False)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 96 * 2**20,) * 2)
plan = probe_batch_size(plan, data, engine, print)
print(plan.settings.batch_size, plan.settings.microbatch_tokens)
print(plan.adjustments[0])
"""


@pytest.mark.slow
def test_rows_are_halved_if_memory_runs_out(tmp_path):
    """A limit on the process's address space is the failing allocation: 64 rows take some 190 MiB, 96 are left."""
    done = finish([*PYTHON, "-c", TRY_ROWS, tmp_path])
    assert done.returncode == 0, done.stderr
    *printed, settled, adjustment = done.stdout.splitlines()
    rows, tokens = map(int, settled.split())
    assert rows in (8, 16, 32) and tokens == rows * 100
    assert "batch_size: 64 -> 32 (memory ran out on a step of --batch_size 64)" in adjustment
    assert printed[0] == "batch_size: 32 (memory ran out on a step of --batch_size 64)"
