"""Predicted and measured seconds of a step, over layouts, recomputation and tokens per forward, on this machine's CPU.

    python benchmarks/step_time.py --out step_time.jsonl
    python benchmarks/step_time.py --table step_time.jsonl

Each cell is a run of train.py with one thread per rank on a Llama with random weights, of --width and --layers. The
prediction is the one that the run prints; the measurement is its median step. What is in --out is not run again.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
from pathlib import Path

import cells

from tests.support import tiny

LAYOUTS = {
    "1": [{}],
    "2": [{}, {"dp_degree": 2}, {"tp_degree": 2}, {"pp_degree": 2}, {"cp_degree": 2}],
    "4": [{}, {"dp_degree": 4}, {"dp_degree": 2}, {"tp_degree": 2}, {"pp_degree": 2}, {"tp_degree": 2, "pp_degree": 2}],
}
MEMORY = [
    {"use_gradient_checkpointing": "false", "microbatch_tokens": 2048},
    {"use_gradient_checkpointing": "true", "microbatch_tokens": 2048},
    {"use_gradient_checkpointing": "false", "microbatch_tokens": 512},
]
KINDS = {
    "lora": {"train_type": "lora"},
    "nf4": {"train_type": "qlora", "quantization_backend": "nf4", "cache_dequantized": "false"},
    "full": {"train_type": "full"},
}
PLAIN = {
    "precision": "fp32",
    "max_steps": 6,
    "lr": 1e-4,
    "run_page": "false",
    "save_model": "false",
    "log_to": "stdout",
}


def rows(folder: Path, count: int, words: int) -> Path:
    """Rows of plain text, nearly as long as one another."""
    rng, file = random.Random(0), folder / "rows.jsonl"
    texts = (" ".join(rng.choice(WORDS) for _ in range(words)) for _ in range(count))
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


WORDS = "a red bird sings in the old tree while rain falls on green hills and we walk home".split()


def model(folder: Path, args) -> Path:
    """A Llama with random weights and a tokenizer of the words."""
    sizes = dict(
        hidden_size=args.width, intermediate_size=args.width * 11 // 4 // 64 * 64, num_hidden_layers=args.layers
    )
    heads = dict(num_attention_heads=args.width // 64, num_key_value_heads=args.width // 64, vocab_size=2048)
    tiny.build("llama", **sizes, **heads, max_position_embeddings=2048).save_pretrained(folder)
    tiny.train_tokenizer(folder)
    return folder


def measure(args) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    done = cells.kept_in(args.out)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = {"model_name": model(folder / "model", args), "dataset": rows(folder, 64, args.words)}
        for ranks in args.ranks:
            for layout in LAYOUTS[str(ranks)]:
                for memory in MEMORY:
                    for kind in args.kinds:
                        flags = {"world_size": ranks, "batch_size": 16 // data_ranks(ranks, layout), **layout, **memory}
                        cell = f"{args.width} {args.layers} {kind} {json.dumps(flags)}"
                        if cell not in done:
                            keep(args, cell, files | PLAIN | KINDS[kind] | flags, folder / "run")


def keep(args, cell: str, flags: dict, out: Path) -> None:
    try:
        events, _ = cells.trained({**flags, "overwrite": "true"}, out)
    except RuntimeError as error:
        cells.keep(args.out, {"cell": cell, "error": str(error)})
        return
    predicted = next(e["predicted_seconds_per_step"] for e in events if e["event"] == "start")
    steps = [e["num_tokens"] / e["tokens_per_s"] for e in events if e["event"] == "step"]
    line = {"cell": cell, "measured": statistics.median(steps[1:]), "predicted": predicted["total"]}
    cells.keep(args.out, line | {"items": predicted["items"], "hidden": predicted["hidden"]})


def data_ranks(ranks: int, layout: dict) -> int:
    return ranks // layout.get("tp_degree", 1) // layout.get("pp_degree", 1) // layout.get("cp_degree", 1)


def table(file: Path) -> str:
    """A line per cell, how many of them are within 25 %, and what the choice by prediction costs."""
    lines = [line for line in cells.kept_in(file).values() if "predicted" in line]
    rows = ["| cell | measured, s | predicted, s | off |", "|---|---|---|---|"]
    off = [line["predicted"] / line["measured"] - 1 for line in lines]
    for line, part in zip(lines, off, strict=True):
        rows.append(f"| {line['cell']} | {line['measured']:.3f} | {line['predicted']:.3f} | {part:+.0%} |")
    within = sum(abs(part) <= 0.25 for part in off)
    rows += [f"{within} of {len(off)} within 25 %", "the fastest predicted over the fastest measured, of each case:"]
    cases: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        width, layers, kind, flags = line["cell"].split(" ", 3)
        case = f"{width} x {layers}, {kind}, {json.loads(flags)['world_size']} ranks"
        cases.setdefault(case, []).append((line["predicted"], line["measured"]))
    return "\n".join([*rows, *(f"  {case}: {min(of)[1] / min(m for _, m in of):.2f}" for case, of in cases.items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--words", type=int, default=200)
    parser.add_argument("--ranks", type=cells.numbers, default=[1, 2, 4])
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=["lora", "nf4", "full"])
    cells.main(parser, measure, table, "step_time.jsonl")


if __name__ == "__main__":
    main()
