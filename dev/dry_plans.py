"""Plans of 192 dry runs as JSON lines, to compare before and after a change of the plan.

python dev/dry_plans.py > before.jsonl

Four models, four devices, three numbers of ranks, four ways to train. A line has the command, the settled settings,
adjustments, notices and layouts, or the error.
"""

import itertools
import json
import os
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from finetune.cli import parse_overrides  # noqa: E402
from finetune.errors import PlanError  # noqa: E402
from finetune.plan.make import make_plan  # noqa: E402
from train import build_parser  # noqa: E402

PAIRS = ROOT / "dry_plans_pairs.jsonl"
MODELS = ("llama-3-70b", "llama-3.1-8b", "mixtral-8x22b", "qwen3-32b")
DEVICES = ("", "--assume_device rtx4090", "--assume_device h100", "--assume_memory 8GiB")
RANKS = ("", "--assume_world_size 8", "--assume_world_size 64")
WAYS = ("", "--train_type full", "--train_type qlora --preference dpo", "--train_type lora --preference orpo")


def commands() -> list[str]:
    """The arguments of each dry run."""
    found = []
    for model, device, ranks, way in itertools.product(MODELS, DEVICES, RANKS, WAYS):
        words = ["--dry_run", f"--model_name examples/configs/{model}", device, ranks, way, "--output_dir out"]
        if "preference" in way:
            words.append(f"--dataset {PAIRS.name}")
        found.append(" ".join(word for word in words if word))
    return found


def write_pairs() -> None:
    """Rows for the runs with a preference, of several lengths."""
    rows = [
        {"prompt": f"What is {n} + {n}?", "chosen": f"It is {2 * n}. " * (n % 40 + 1), "rejected": "I do not know."}
        for n in range(400)
    ]
    PAIRS.write_text("".join(json.dumps(row) + "\n" for row in rows))


def planned(command: str) -> dict:
    """The plan of a command, or its error."""
    try:
        plan = make_plan(parse_overrides(shlex.split(command), build_parser()))
    except PlanError as error:
        return {"error": str(error)}
    return plan.to_json() | {"notices": plan.notices, "layouts": plan.layouts}


def main() -> None:
    os.chdir(ROOT)
    write_pairs()
    for command in commands():
        print(json.dumps({"command": command} | planned(command), default=str), flush=True)
    PAIRS.unlink()


if __name__ == "__main__":
    main()
