"""A made-up parallel degree: its row with the field that it names, and its flag, added to a copy of the program.

`python made_up_degree.py` in the copy prints as JSON what the program says of it.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.commands import ROOT

ROW = """DEGREES = {
    "made_up_degree": DegreeFacts(
        "made_up",
        "made up: ranks that make up each sequence",
        place=5,
        exchanges="made_up_degree.exchanges",
        item="making up",
        splits_positions=True,
        divided=lambda shape: {"hidden_size": shape.hidden_size},
        excluded=(Excluded("batch_layout", "padded", "makes up rows"),),
    ),
"""
FIELDS = "    ep: int = 1\n"
FLAGS = '    ep_degree: int = degree_flag("ep_degree")\n'
EDITS = (
    ("finetune/parts/degrees.py", "DEGREES = {\n", ROW),
    ("finetune/parts/parallel_dims.py", FIELDS, f"{FIELDS}    made_up: int = 1\n"),
    ("finetune/config.py", FLAGS, f'{FLAGS}    made_up_degree: int = degree_flag("made_up_degree")\n'),
)


def exchanges(dims, work, stage) -> list:
    """Exchanges of the made-up degree: the tokens of a step, once."""
    from finetune.estimate.communication import Exchange

    return [Exchange("send", ("made_up",), sum(work.tokens) * (dims.made_up - 1), 1)]


def copied_to(folder: Path) -> Path:
    """A copy of the program that has the degree."""
    for name in ("finetune", "recursive", "docs", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.md"))
    for script in ROOT.glob("*.py"):
        shutil.copy(script, folder)
    for name, old, new in EDITS:
        text = (folder / name).read_text()
        assert text.count(old) == 1, (name, old)
        (folder / name).write_text(text.replace(old, new))
    text = Path(__file__).read_text().replace("from tests.support.commands import ROOT\n", "ROOT = Path()\n")
    (folder / "made_up_degree.py").write_text(text)
    return folder


def said_in(folder: Path) -> dict:
    """Answers of a copy of the program."""
    how = [sys.executable, "made_up_degree.py"]
    done = subprocess.run(how, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def said() -> dict:
    """Help, conflicts page, plan, memory and time of this copy on the degree."""
    from docs.make_conflicts import page
    from finetune.cli import parse_overrides
    from finetune.errors import PlanError
    from finetune.estimate.budget import full_microbatch
    from finetune.estimate.memory import per_rank
    from finetune.estimate.rates import Links
    from finetune.estimate.step_time import exchange_seconds
    from finetune.help import text_of
    from finetune.plan.make import make_plan
    from train import build_parser

    common = (
        "--dry_run --model_name examples/configs/llama-3.1-8b --train_type lora --assume_device h100 --output_dir o"
    )

    def planned(flags: str):
        words = f"{common} --assume_world_size 4 {flags}".split()
        return make_plan(parse_overrides(words, build_parser(), print))

    def refusal(flags: str) -> str:
        try:
            planned(flags)
        except PlanError as error:
            return str(error)
        return ""

    plan = planned("--made_up_degree 2")
    microbatch = full_microbatch(plan)
    _, of_a_rank = per_rank(plan.shape.known, microbatch, plan.dims)
    links = Links(near=1e9, far=1e9, latency=1e-6, per_host=8)
    seconds, _ = exchange_seconds(plan, plan.shape.known, plan.dims, microbatch, 1, links)
    return {
        "seconds": sorted(seconds),
        "help": text_of("made_up_degree", build_parser()),
        "conflicts": page(),
        "dims": str(plan.dims),
        "settled": {name: getattr(plan.settings, name) for name in ("dp_shards", "made_up_degree")},
        "tokens": [microbatch.num_tokens, of_a_rank.num_tokens],
        "product": refusal("--made_up_degree 8"),
        "divides": refusal("--made_up_degree 3 --assume_world_size 3"),
        "padded": refusal("--made_up_degree 2 --batch_layout padded"),
        "accelerate": refusal("--made_up_degree 2 --parallel_backend accelerate"),
    }


if __name__ == "__main__":
    print(json.dumps(said()))
