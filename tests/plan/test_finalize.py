"""What the data decides: the batch size tried on the real model, and when a reference is computed once."""

from dataclasses import replace

import numpy as np
import pytest

from finetune.config import TrainConfig
from finetune.data.prepare import Data
from finetune.plan.finalize import reference_choice
from finetune.plan.run_plan import RunPlan
from tests.support import tiny
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
plan = RunPlan(settings=s, requested={"batch_size": "auto"}, adjustments=(), notices=(), backend="cpu", engine="torch")
data = Data(None, set(), rows, None, [], (), None)
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


@pytest.mark.parametrize(
    ("flags", "validated", "said"),
    [
        ({}, False, ("false", "reads 6 training rows, and there are 6")),
        ({"num_epochs": 2}, False, ("true", "reads 12 training rows, and there are 6")),
        ({"max_steps": 3}, False, ("false", "reads 6 training rows")),
        ({"max_steps": 4}, False, ("true", "reads 8 training rows")),
        ({}, True, ("true", "reads 10 training and validation rows, and there are 8")),
        ({"max_steps": 1, "eval_every": 1}, True, ("false", "reads 6 training and validation rows")),
        ({"max_steps": 3, "eval_every": 1}, True, ("true", "reads 14 training and validation rows")),
    ],
)
def test_a_reference_is_computed_once_where_rows_are_read_again(flags, validated, said):
    rows = replace(tiny.dataset((5,) * 16), documents_per_row=2)
    train, validation = rows.select(np.arange(6)), rows.select([6, 7])
    data = Data(None, set(), train, validation if validated else None, [], None, None)
    settings = TrainConfig(preference="dpo", batch_size=2, **flags)
    facts = dict(adjustments=(), notices=(), backend="cpu", engine="torch")
    plan = RunPlan(settings=settings, requested={}, **facts)
    used, reason = reference_choice(plan, data)["precompute_ref_log_probs"]
    assert used == said[0] and said[1] in reason
    for changes in ({"preference": "orpo"}, {"preference": "none"}, {"precompute_ref_log_probs": "true"}):
        assert reference_choice(replace(plan, settings=replace(plan.settings, **changes)), data) == {}
