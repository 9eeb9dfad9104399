"""Does recursion pay where it should? Generated Sudoku, the recursive model against its plain twin at equal CPU time.

1,000 training grids with their symmetries, 500 held out. One thread; CPU seconds are the clock and the schedule.

python benchmarks/recursive_sudoku.py run --size 6 --seconds 360 --seed 0 [key=value ...] >> results.jsonl
python benchmarks/recursive_sudoku.py draw results.jsonl --output docs/recursive_sudoku.svg
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from finetune import recipe  # noqa: E402
from finetune.data.pretraining import puzzles  # noqa: E402
from finetune.data.pretraining.arrays import Rows  # noqa: E402
from finetune.data.pretraining.carry import Carry  # noqa: E402
from finetune.data.pretraining.data import NoTokenizer, PretrainData  # noqa: E402
from finetune.parts.train_state import Cursor  # noqa: E402
from finetune.schedule import SHAPES  # noqa: E402

TRAIN, TEST = 1000, 500
WARMUP = 100
# The same for both models: d 128, two layers that mix across cells, AdamW 1e-3, batch 64.
COMMON = ["arch.expansion=4", "lr=1e-3", "grad_clip_norm=1.0", "weight_decay=0.1", "arch.halt_exploration_prob=0.1"]
RECURSIVE = ["arch.H_cycles=1", "arch.L_cycles=3", "arch.halt_max_steps=8", "arch.halting=true"]


def data_of(size: int, settings, seed: int) -> PretrainData:
    """The same puzzles for every seed of the model."""
    sudoku = puzzles.sudoku_of(size)
    asked, answers = puzzles.generate_sudoku(sudoku, TRAIN + TEST, 0)

    def rows(at: slice) -> Rows:
        count = len(asked[at])
        shared = np.zeros(count, np.int32), 0, sudoku.vocab_size, 1, "sudoku", {"generated": 0}
        return Rows(asked[at], answers[at].astype(np.int64), *shared)

    carry = Carry(settings.global_batch_size, settings.arch.supervision_steps, settings.arch.halting)
    train, test = rows(slice(0, TRAIN)), rows(slice(TRAIN, None))
    return PretrainData(replace(settings, seed=seed), train, {"generated": test}, NoTokenizer(), carry)


class State:
    cursor = Cursor()


def run(args) -> dict:
    """Trains for `seconds` CPU seconds; the curve, with exact grids by the average and by the raw weights."""
    import torch

    from finetune.torch_engine.parallel.process_groups import SINGLE_PROCESS
    from finetune.torch_engine.recursive.engine import build

    torch.set_num_threads(1)
    values = recipe.read_recipe("cfg_puzzle") | recipe.read_arguments([*COMMON, *RECURSIVE, *args.overrides])[1]
    if values["arch.plain"] if "arch.plain" in values else False:
        values["arch.halting"] = False
    settings = replace(recipe.of_flat(values), seed=args.seed)
    data = data_of(args.size, settings, args.seed)
    engine = build(settings, data.train, SINGLE_PROCESS, data.carry)
    plan, curve, steps, evaluating, rows_seen = type("Plan", (), {"data_ranks": 1}), [], 0, 0.0, 0
    began = time.process_time()
    state, points = State(), list(np.linspace(args.seconds / 8, args.seconds, 8))
    while points:
        spent = time.process_time() - began - evaluating
        if spent >= points[0]:
            points.pop(0)
            at = time.process_time()
            curve.append({"seconds": round(spent, 1), "steps": steps, **grids(engine, data)})
            print(curve[-1], file=sys.stderr, flush=True)
            evaluating += time.process_time() - at
            continue
        batches, rows, state.cursor = data.step(plan, state, 0, 0)
        rows_seen += sum(int(batch.fresh_B.sum()) for batch in batches)
        factor = min(1.0, (steps + 1) / WARMUP) * SHAPES["cosine"](min(1.0, spent / args.seconds), 0.1)
        engine.train_step(batches, settings.lr * factor)
        steps += 1
    kind = "plain" if settings.arch.plain else "one-step gradient" if settings.arch.one_step_gradient else "recursive"
    name = args.name or kind
    parameters = engine.parameter_counts()[1]
    facts = {
        "size": args.size,
        "seed": args.seed,
        "parameters": parameters,
        "rows": rows_seen,
        "overrides": args.overrides,
    }
    return {"name": name, **facts, "overrides": args.overrides, "curve": curve}


def grids(engine, data: PretrainData) -> dict:
    """Share of held-out grids solved exactly, by EMA and raw weights."""
    batches, found = data.test_batches(data.tests["generated"], 100), {}
    found["ema"] = engine.evaluate(batches).metrics["rows_right"] / TEST
    average, engine.average = engine.average, None
    found["raw"] = engine.evaluate(batches).metrics["rows_right"] / TEST
    engine.average = average
    return found


def draw(args) -> None:
    """The curves as SVG, and the table as Markdown on stdout."""
    from benchmarks.line_chart import line_chart

    results = [json.loads(line) for line in args.results.read_text().splitlines()]
    names = sorted({(r["size"], r["name"]) for r in results})
    print("| grid | model | parameters | seeds | CPU seconds | exact, EMA | exact, raw | updates |")
    print("|---|---|---|---|---|---|---|---|")
    lines = {}
    for size, name in names:
        of = [r for r in results if (r["size"], r["name"]) == (size, name)]
        last = [r["curve"][-1] for r in of]

        def spread(key, last=last):
            numbers = [100 * point[key] for point in last]
            return f"{np.mean(numbers):.1f} % ({min(numbers):.1f} to {max(numbers):.1f})"

        updates = ", ".join(str(point["steps"]) for point in last)
        seconds = last[0]["seconds"]
        counts = f"{of[0]['parameters']:,} | {len(of)} | {seconds:.0f}"
        print(f"| {size}x{size} | {name} | {counts} | {spread('ema')} | {spread('raw')} | {updates} |")
        for r in of:
            points = [(p["seconds"], 100 * p["ema"]) for p in r["curve"]]
            lines.setdefault(f"{size}x{size} {name}", []).append(points)
    args.output.write_text(line_chart(lines, "CPU seconds, one thread", "held-out grids solved exactly, %", (0, 100)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run")
    one.add_argument("--size", type=int, default=6)
    one.add_argument("--seconds", type=float, default=360)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--name")
    one.add_argument("overrides", nargs="*")
    one.set_defaults(go=lambda args: print(json.dumps(run(args)), flush=True))
    other = commands.add_parser("draw")
    other.add_argument("results", type=Path)
    other.add_argument("--output", type=Path, default=ROOT / "docs/recursive_sudoku.svg")
    other.set_defaults(go=draw)
    args = parser.parse_args()
    args.go(args)


if __name__ == "__main__":
    main()
