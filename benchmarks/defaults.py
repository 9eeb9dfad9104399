"""What the defaults reach on eight small tasks, beside the best of a sweep, a search, older defaults, and TRL's.

    python benchmarks/defaults.py --tasks dates,units --seeds 0,1,2 --out defaults.jsonl
    python benchmarks/defaults.py --table defaults.jsonl

Each cell is one run of train.py in a process of its own, on rows of benchmarks/tasks.py; what is in --out already is
not run again, whatever its --precision was (`settled` says). A cell's loss is of 64 rows that no other split has, its
exact match of 50 others. The sweep varies rate and passes; its runs at the defaults' number of steps are what the
defaults are compared with. `trl` needs trl.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import cells
from tasks import TASKS, write_pairs, write_splits

RATES = (5e-4, 8e-4, 1.5e-3, 3e-3)
PLAIN = {"early_stopping": 0, "eval_every": 0, "load_best": "false"}  # a swept run is judged by its last weights
LONG = {"adam_beta2": 0.999}  # Adam averages over all of the run
EARLIER = {"train_type": "qlora", "lr": 2e-4, "num_epochs": 1, "batch_size": 8, **LONG, **PLAIN}  # defaults of 2026-11
PREFERENCES = ("dpo", "orpo", "simpo", "kto")
KINDS = {
    "defaults": [{}],
    "sweep": [{"lr": rate, "num_epochs": 3, **PLAIN} for rate in RATES],
    "passes": [{"lr": rate, "num_epochs": epochs, **PLAIN} for epochs in (1, 2) for rate in RATES],
    "search": [{"lr": "search"}],
    "earlier": [EARLIER],
    "long_memory": [
        LONG,
        {"lr": "search", **LONG},
        *({"lr": rate, "num_epochs": 3, **LONG, **PLAIN} for rate in (5e-4, 1.25e-3, 3e-3, 6e-3)),
    ],
    "betas": [{"lr": 1.5e-3, "num_epochs": 3, "adam_beta2": beta, **PLAIN} for beta in (0.95, 0.98)],
    "rates": [{"lr": rate, **PLAIN} for rate in (6.5e-4, 1.3e-3, 2.6e-3)],  # of 320 rows: the rule's, half, twice
    "schedules": [{"lr_scheduler": "wsd", "wsd_decay_ratio": 0.3, "wsd_decay_type": "linear", **LONG}],
    **{kind: [{}, *({"lr": rate, **PLAIN} for rate in (3e-5, 1e-4, 3e-4, 1e-3))] for kind in PREFERENCES},
}
SWEPT = ("sweep", "passes")


def run_cell(folder: Path, flags: dict, scored: bool, precision: str) -> dict:
    """The last evaluation of a run of train.py with these flags; its seconds, and what it said went wrong."""
    from finetune.run.diagnostics import findings
    from finetune.run.samples import read as read_samples

    files = {"dataset": folder / "train.jsonl", "validation_dataset": folder / "validation.jsonl"}
    files |= {"score_dataset": folder / "test.jsonl", "score_max_new_tokens": 40} if scored else {}
    with tempfile.TemporaryDirectory() as out:
        run, began = Path(out) / "run", time.perf_counter()
        try:
            events, settled = cells.trained(files | flags | {"precision": precision}, run)
        except RuntimeError as error:
            return {"error": str(error), "seconds": time.perf_counter() - began}
        seconds = time.perf_counter() - began
        said = [finding.text for finding in findings(events, read_samples(run), settled)]
    names = ("train_type", "lr", "adam_beta2", "num_epochs", "batch_size", "lora_rank", "precision")
    chosen = {name: settled[name] for name in names}
    last = [event for event in events if event["event"] == "eval"][-1]
    kept = ("step", "loss", "exact_match", "rewards/accuracies", "rewards/margins")
    return {**{k: last[k] for k in kept if k in last}, "seconds": seconds, "said": said, "settled": chosen}


TRL = """
import json, sys
from pathlib import Path
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

model, folder, out, epochs = sys.argv[1:]
read = lambda name: Dataset.from_list([json.loads(line) for line in (Path(folder) / name).read_text().splitlines()])
config = SFTConfig(output_dir=out, num_train_epochs=float(epochs), report_to=[], bf16=False, save_strategy="no",
                   assistant_only_loss=False, completion_only_loss=True, gradient_checkpointing=False)
as_pairs = lambda row: {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]}
data = {name: read(f"{name}.jsonl").map(as_pairs, remove_columns="messages") for name in ("train", "validation")}
trainer = SFTTrainer(model=AutoModelForCausalLM.from_pretrained(model), args=config, train_dataset=data["train"],
                     eval_dataset=data["validation"], processing_class=AutoTokenizer.from_pretrained(model),
                     peft_config=LoraConfig(target_modules="all-linear"))
trainer.train()
trainer.save_model(out)
print("TRL", json.dumps(trainer.evaluate()))
"""


def run_trl(folder: Path, epochs: int) -> dict:
    """TRL's SFTTrainer with its own defaults; scored by score.py on the adapter it saved."""
    from finetune.model_files.demo_model import demo_model_folder

    model = demo_model_folder(fetch=True)
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-c", TRL, str(model), str(folder), out, str(epochs)]
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True)
        seconds = time.perf_counter() - began
        if done.returncode:
            return {"error": done.stderr.strip()[-300:], "seconds": seconds}
        found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("TRL "))[4:])
        score = [sys.executable, cells.ROOT / "score.py", "--checkpoint", out, "--dataset", folder / "test.jsonl"]
        scored = subprocess.run([*map(str, score), "--max_new_tokens", "40", "--json"], capture_output=True, text=True)
    return {"loss": found["eval_loss"], "seconds": seconds, "exact_match": json.loads(scored.stdout)["exact_match"]}


def measure(args) -> None:
    done = cells.kept_in(args.out)
    for seed in args.seeds:
        for task in args.tasks or TASKS:
            for kind in args.kinds:
                folder = Path(tempfile.gettempdir()) / f"defaults-{task}-{seed}-{args.rows}"
                write_splits(task, seed, folder, args.rows)
                for flags in KINDS.get(kind, [{}]):
                    cell = f"{task} {seed} {args.rows} {kind} {json.dumps(flags)}"
                    if cell in done:
                        continue
                    if kind == "trl":
                        found = run_trl(folder, epochs=3)
                    elif kind in PREFERENCES:
                        write_pairs(task, seed, folder, labels=kind == "kto")
                        found = run_cell(folder, {**flags, "preference": kind}, False, args.precision)
                    else:
                        scored = kind not in SWEPT or args.scored
                        found = run_cell(folder, {**flags, "seed": 42 + seed}, scored, args.precision)
                    line = {"cell": cell, "task": task, "seed": seed, "kind": kind, "flags": flags, **found}
                    cells.keep(args.out, line)


def table(file: Path) -> str:
    """Medians over the seeds of one precision and number of rows: loss and exact match of each kind and its flags, and
    the loss over that of the best of the sweep at the defaults' number of steps.
    """
    lines = [line for line in cells.kept_in(file).values() if "loss" in line]
    named = [f"{line['task']}, {line['cell'].split()[2]} rows, {_precision(line)}" for line in lines]
    rows = ["| task | kind | loss | exact match | n | to the best of the sweep |", "|---|---|---|---|---|---|"]
    for task in dict.fromkeys(named):
        of = [line for line, name in zip(lines, named, strict=True) if name == task]
        steps = {line["step"] for line in of if line["kind"] == "defaults"}
        swept: dict[str, list[float]] = {}
        seeds = {line["seed"] for line in of if line["kind"] in SWEPT}
        for line in of:
            if line["kind"] in SWEPT and line["step"] in steps:
                swept.setdefault(json.dumps(line["flags"]), []).append(line["loss"])
        best = min(map(statistics.median, swept.values()), default=None)
        others: dict[str, list[dict]] = {}
        for line in of:
            if line["kind"] not in SWEPT:
                others.setdefault(f"{line['kind']} {json.dumps(line['flags'])}", []).append(line)
        for kind, found in others.items():
            loss = statistics.median(line["loss"] for line in found)
            exact = [line["exact_match"] for line in found if "exact_match" in line]
            shown = f"{statistics.median(exact):.0%}" if exact else ""
            same = [line["loss"] for line in found if line["seed"] in seeds]
            ratio = f"{statistics.median(same) / best:.2f}" if best and same else ""
            rows.append(f"| {task} | {kind} | {loss:.2g} | {shown} | {len(found)} | {ratio} |")
        for flags, losses in swept.items():
            rows.append(f"| {task} | {flags} | {statistics.median(losses):.2g} | | {len(losses)} | |")
    return "\n".join(rows)


def _precision(line: dict) -> str:
    return line["settled"]["precision"] if "settled" in line else "fp32"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--tasks", type=words)
    parser.add_argument("--seeds", type=cells.numbers, default=[0])
    parser.add_argument("--kinds", type=words, default=["defaults", *SWEPT, "search", "earlier"])
    parser.add_argument("--rows", type=int, default=320)
    parser.add_argument("--precision", default="auto", help="of train.py; TRL's cells are fp32")
    parser.add_argument("--scored", action="store_true", help="exact match of the sweep's cells too")
    cells.main(parser, measure, table, "defaults.jsonl")


if __name__ == "__main__":
    main()
