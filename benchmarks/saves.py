"""What a save every 10 steps costs them, written beside the steps or waited for. Runs save every 20 steps: ten steps
with a save at their start and the ten after them, without one, are a pair: what else the machine does falls on both.

python benchmarks/saves.py --rounds 5 --kind full
python benchmarks/saves.py --kind lora
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from cells import keep, kept_in, main, trained

WINDOW = 10
VARIANTS = {"beside steps": "true", "waited for": "false"}  # --async_save
SIZES = dict(
    hidden_size=192, intermediate_size=576, num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=512
)


def made(folder: Path) -> tuple[Path, Path]:
    """(a Llama of 2.7 M weights, rows of one length)."""
    from tests.support import tiny

    tokenizer = tiny.train_tokenizer(folder / "model", bos=False)
    sizes = SIZES | dict(vocab_size=max(2048, len(tokenizer)))
    tiny.build("llama", eos_token_id=2, pad_token_id=None, bos_token_id=1, **sizes).save_pretrained(folder / "model")
    rows = [{"prompt": f"{i}: " + "a b c d " * 12, "completion": "e f g h " * 4} for i in range(64)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "model", folder / "rows.jsonl"


def pairs(events: list[dict]) -> list[list[float]]:
    """[seconds of ten steps with a save, of the ten after them, of the save until it is logged] of each save."""
    steps = {event["step"]: event["time"] for event in events if event["event"] == "step"}
    found = []
    for event in events:
        at = event.get("step", 0)
        if event["event"] == "save" and at + 2 * WINDOW in steps:
            times = [steps[at + i * WINDOW] for i in range(3)]
            found.append([times[1] - times[0], times[2] - times[1], event["time"] - times[0]])
    return found


def measure(args) -> None:
    done = kept_in(args.out)
    with tempfile.TemporaryDirectory() as name:
        model, rows = made(Path(name))
        flags = dict(model_name=model, dataset=rows, backend="cpu", train_type=args.kind, precision="fp32", lr=1e-4)
        flags |= dict(max_steps=args.steps, batch_size=args.batch_size, context_length=256, keep_last=1)
        flags |= dict(run_page="false", save_every=2 * WINDOW)
        for number in range(args.rounds):
            for variant in list(VARIANTS)[:: 1 if number % 2 else -1]:
                cell = f"{args.kind} {args.batch_size} {variant} {number}"
                if cell not in done:
                    out = Path(name) / cell.replace(" ", "-")
                    events, _ = trained(flags | {"async_save": VARIANTS[variant]}, out)
                    keep(args.out, dict(cell=cell, pairs=pairs(events)))
    print(table(args.out))


def table(file: Path) -> str:
    """Of the pairs: median, quartiles, number."""
    found: dict[tuple, list] = {}
    for cell, line in kept_in(file).items():
        kind, rows, *variant, _ = cell.split(" ")
        found.setdefault((kind, rows, " ".join(variant)), []).extend(line["pairs"])
    lines = ["| run | saves | steps per second, of those without a save | written after | n |", "|---|---|---|---|---|"]
    for (kind, rows, variant), of in sorted(found.items()):
        ratios = [without / with_save for with_save, without, _ in of]
        low, middle, high = statistics.quantiles(ratios, n=4)
        after = statistics.median(WINDOW * seconds / without for _, without, seconds in of)
        shown = f"{middle:.3f} [quartiles {low:.3f}, {high:.3f}]"
        lines.append(f"| {kind}, {rows} rows per step | {variant} | {shown} | {after:.1f} steps | {len(of)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("full", "lora"), default="full")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=401)
    parser.add_argument("--batch_size", type=int, default=8)
    main(parser, measure, table, "outputs/saves.jsonl")
