"""Which trained folders are opened again: runs in bf16, merged, read by generate.py, score.py and export.py's scoring.

python benchmarks/trained_folders.py --seeds 5 --demo 10
"""

import argparse
import contextlib
import io
import json
import tempfile
from pathlib import Path

import export
import generate
import score
from finetune.errors import PlanError
from finetune.model_files.demo_model import DEMO_MODEL
from tests.support import architectures
from train import fine_tune

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
    run, merged = folder / "run", folder / "merged"
    flags = dict(model_name=model, dataset=str(rows), backend="cpu", precision="bf16", max_steps=steps, batch_size=8)
    fine_tune(**flags, **kind, seed=seed, output_dir=str(run), eval_samples=0, log_to="stdout")
    asked = ["--prompt", "question 3", "--raw", "--max_new_tokens", "4"]
    calls = [(generate.main, ["--checkpoint", str(run), *asked])]
    calls += [(score.main, ["--checkpoint", str(run), "--dataset", str(rows)])]
    if kind["train_type"] != "full":
        to = ["--output_dir", str(merged), "--score_dataset", str(rows)]
        calls += [(export.main, ["--checkpoint", str(run), *to])]
        calls += [(generate.main, ["--checkpoint", str(merged), *asked, "--precision", "bf16"])]
        calls += [(score.main, ["--checkpoint", str(merged), "--dataset", str(rows), "--precision", "bf16"])]
    refused = []
    for call, argv in calls:
        try:
            call(argv)
        except PlanError as error:
            refused.append(f"{call.__module__}: {error}")
    return refused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--demo", type=int, default=10, help="runs of the demo's model")
    args = parser.parse_args()
    cases = [(DEMO_MODEL, "lora", seed, 3) for seed in range(args.demo)]
    cases += [(name, kind, seed, 24) for seed in range(args.seeds) for name in TINY for kind in KINDS]
    lines, runs = [], 0
    for name, kind, seed, steps in cases:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            model = name
            if name in TINY:
                model = str(Path(folder) / "base")
                architectures.write_model(name, Path(model))
            refused = opened(model, Path(folder), seed, KINDS[kind], steps)
        runs += 1
        lines += [f"{name} {kind} seed {seed}: {line}" for line in refused]
        print(f"{runs}/{len(cases)} {name} {kind} seed {seed}: {len(refused)} refused", flush=True)
    print(*lines, sep="\n")
    print(f"{runs} trained folders: {len(lines)} refusals")


if __name__ == "__main__":
    main()
