"""Which trained folders are opened again: runs in bf16, merged, read by generate.py, score.py and export.py's scoring.

python benchmarks/trained_folders.py --seeds 5 --demo 10 --results results.jsonl  # goes on where it was stopped
"""

import argparse
import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import export  # noqa: E402
import generate  # noqa: E402
import score  # noqa: E402
from finetune.errors import PlanError  # noqa: E402
from finetune.model_files.demo_model import DEMO_MODEL  # noqa: E402
from tests.support import architectures  # noqa: E402
from train import fine_tune  # noqa: E402

KINDS = {
    "lora": dict(train_type="lora"),
    "dora": dict(train_type="lora", use_dora=True, lora_target_modules="default"),
    "full": dict(train_type="full"),
}
TINY = ("llama", "qwen3", "gemma3_text", "gpt2", "mixtral", "olmo2")
ROWS = [{"prompt": f"question {i}", "completion": f" answer {i * i}"} for i in range(16)]


def opened(model: str, folder: Path, seed: int, kind: dict, steps: int) -> list[str]:
    """The lines with which a program refuses what a run wrote, or what export.py made of it."""
    rows = folder / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, ROWS)))
    run, exported = folder / "run", folder / "exported"
    flags = dict(model_name=model, dataset=str(rows), backend="cpu", precision="bf16", max_steps=steps, batch_size=8)
    fine_tune(**flags, **kind, seed=seed, output_dir=str(run), eval_samples=0, log_to="stdout")
    calls = reads(run, rows)
    if is_merged(kind):
        to = ["--output_dir", str(exported), "--score_dataset", str(rows)]
        calls += [(export.main, ["--checkpoint", str(run), *to]), *reads(exported, rows)]
    refused = []
    for call, argv in calls:
        try:
            call(argv)
        except PlanError as error:
            refused.append(f"{call.__module__}: {error}")
    return refused


def is_merged(kind: dict) -> bool:
    return kind["train_type"] != "full"


def reads(folder: Path, rows: Path) -> list[tuple]:
    asked = ["--prompt", "question 3", "--raw", "--max_new_tokens", "4"]
    of = ["--checkpoint", str(folder), "--precision", "bf16"]
    return [(generate.main, [*of, *asked]), (score.main, [*of, "--dataset", str(rows)])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--demo", type=int, default=10, help="runs of the demo's model")
    parser.add_argument("--results", type=Path, required=True, help="one line of JSON per run; those in it are not run")
    args = parser.parse_args()
    cases = [(name, kind, seed, 24) for seed in range(args.seeds) for name in TINY for kind in KINDS]
    cases += [(DEMO_MODEL, "lora", seed, 3) for seed in range(args.demo)]
    done = [json.loads(line) for line in args.results.read_text().splitlines()] if args.results.exists() else []
    refusals = {(one["model"], one["kind"], one["seed"]): one["refused"] for one in done}
    for name, kind, seed, steps in cases:
        if (name, kind, seed) in refusals:
            continue
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            model = name
            if name in TINY:
                model = str(Path(folder) / "base")
                architectures.write_model(name, Path(model))
            refused = opened(model, Path(folder), seed, KINDS[kind], steps)
        refusals[(name, kind, seed)] = refused
        with args.results.open("a") as file:
            file.write(json.dumps(dict(model=name, kind=kind, seed=seed, refused=refused)) + "\n")
        print(f"{len(refusals)}/{len(cases)} {name} {kind} seed {seed}: {len(refused)} refused", flush=True)
    for case, lines in refusals.items():
        for line in lines:
            print(*case, line)
    merged = sum(is_merged(KINDS[kind]) for _, kind, _ in refusals)
    count = sum(map(len, refusals.values()))
    print(f"{len(refusals)} runs and {merged} merged folders: {count} refusals")


if __name__ == "__main__":
    main()
