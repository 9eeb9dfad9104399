"""The rate of --lr auto beside a sweep on models of other widths, each trained from random weights here.

    python benchmarks/widths.py --widths 256,1024 --out widths.jsonl
    python benchmarks/widths.py --table widths.jsonl

A model of four layers learns seven of the tasks of benchmarks/tasks.py with all its weights; adapters at multiples of
the rule's rate then learn the eighth. What is in --out is not run again.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
MULTIPLES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
WORDS = ["<pad>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BASE = {"train_type": "full", "num_epochs": 2, "batch_size": 8, "precision": "fp32", "seed": 7}
# A plain run: of one rate, judged by its last weights.
PLAIN = {"early_stopping": 0, "eval_every": 0, "load_best": "false", "precision": "fp32", "train_type": "lora"}


def mixed_rows(left_out: str, each: int) -> list[dict]:
    from tasks import TASKS

    rng = random.Random(0)
    rows = [{"messages": task.make(rng)} for name, task in TASKS.items() if name != left_out for _ in range(each)]
    rng.shuffle(rows)
    return rows


def random_model(width: int, texts: list[str], folder: Path) -> None:
    """A Llama of four layers with random weights and a tokenizer made of these texts."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=1024, special_tokens=WORDS, initial_alphabet=alphabet)
    )
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=WORDS[0], eos_token=WORDS[2])
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)
    heads = width // 64
    config = transformers.LlamaConfig(
        vocab_size=len(made), hidden_size=width, intermediate_size=width * 8 // 3 // 64 * 64, num_hidden_layers=4,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=512, tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(width)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def train(flags: dict, out: Path) -> dict:
    """The last evaluation and the rate of a run of train.py."""
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, ROOT / "train.py", "--log_to", "stdout", "--run_page", "false", "--output_dir", out]
    done = subprocess.run([*map(str, command), *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-500:])
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    settled = json.loads((out / "run_plan.json").read_text())["settled"]
    losses = [event["loss"] for event in events if event["event"] == "eval"]
    return {"loss": losses[-1] if losses else None, "lr": settled["lr"], "steps": events[-1]["step"]}


def measure(args) -> None:
    from tasks import write_splits

    done = {json.loads(line)["cell"] for line in args.out.read_text().splitlines()} if args.out.exists() else set()
    for width in args.widths:
        folder = Path(tempfile.gettempdir()) / f"widths-{width}-{args.task}"
        if not (folder / "base" / "config.json").exists():
            rows = mixed_rows(args.task, args.base_rows)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            random_model(width, [m["content"] for row in rows for m in row["messages"]], folder / "random")
            flags = BASE | {
                "model_name": folder / "random",
                "dataset": folder / "mixed.jsonl",
                "lr": args.base_lr / width,
            }
            train(flags, folder / "base")
        for seed in args.seeds:
            write_splits(args.task, seed, folder / f"rows{seed}", args.rows)
            data = {
                f: folder / f"rows{seed}" / f"{s}.jsonl"
                for f, s in (("dataset", "train"), ("validation_dataset", "validation"))
            }
            rule = None
            for multiple in (1.0, *(m for m in MULTIPLES if m != 1.0)):
                flags = PLAIN | data | {"model_name": folder / "base", "seed": 42 + seed}
                cell = f"{args.task} {width} {seed} {multiple}"
                if cell in done:
                    known = [json.loads(line) for line in args.out.read_text().splitlines()]
                    rule = rule or next(line["lr"] / line["multiple"] for line in known if line["cell"] == cell)
                    continue
                if multiple != 1.0:
                    flags["lr"] = rule * multiple
                with tempfile.TemporaryDirectory() as out:
                    found = train(flags, Path(out) / "run")
                rule = rule or found["lr"]
                line = {"cell": cell, "task": args.task, "width": width, "seed": seed, "multiple": multiple, **found}
                print(json.dumps(line), flush=True)
                with args.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")


def table(file: Path) -> str:
    """Median loss over seeds by width and multiple of the rule's rate."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    rows = ["| task | width | the rule's rate | " + " | ".join(f"x {m:g}" for m in MULTIPLES) + " | n |"]
    rows.append("|---" * (len(MULTIPLES) + 4) + "|")
    for task, width in dict.fromkeys((line["task"], line["width"]) for line in lines):
        of = [line for line in lines if (line["task"], line["width"]) == (task, width)]
        rate = next(line["lr"] for line in of if line["multiple"] == 1.0)
        losses = [[line["loss"] for line in of if line["multiple"] == m] for m in MULTIPLES]
        shown = " | ".join(f"{statistics.median(found):.4f}" if found else "" for found in losses)
        rows.append(f"| {task} | {width:,} | {rate:.2g} | {shown} | {min(map(len, losses))} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(word) for word in text.split(",")]  # noqa: E731
    parser.add_argument("--widths", type=numbers, default=[256, 1024])
    parser.add_argument("--seeds", type=numbers, default=[0])
    parser.add_argument("--task", default="sql")
    parser.add_argument("--rows", type=int, default=160)
    parser.add_argument("--base_rows", type=int, default=200, help="rows of each task that the base learns")
    parser.add_argument("--base_lr", type=float, default=0.5, help="times 1 / width: the base's rate")
    parser.add_argument("--out", type=Path, default=Path("widths.jsonl"))
    parser.add_argument("--table", type=Path, help="print the table of a file, and run nothing")
    args = parser.parse_args()
    if args.table:
        print(table(args.table))
    else:
        measure(args)


if __name__ == "__main__":
    main()
