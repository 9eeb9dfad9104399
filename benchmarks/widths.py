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
import tempfile
from pathlib import Path

import cells
from tasks import TASKS, write_splits

MULTIPLES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
WORDS = ["<pad>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHAPE = dict(num_hidden_layers=4, max_position_embeddings=512, tie_word_embeddings=True)
SHAPE |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
BASE = {"run_page": "false", "train_type": "full", "num_epochs": 2, "batch_size": 8, "precision": "fp32", "seed": 7}
# A plain run: of one rate, judged by its last weights.
PLAIN = {"early_stopping": 0, "eval_every": 0, "load_best": "false", "precision": "fp32", "train_type": "lora"}
PLAIN |= {"run_page": "false"}


def mixed_rows(left_out: str, each: int) -> list[dict]:
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
    sizes = dict(hidden_size=width, intermediate_size=width * 8 // 3 // 64 * 64, vocab_size=len(made))
    config = transformers.LlamaConfig(num_attention_heads=heads, num_key_value_heads=heads, **sizes, **SHAPE)
    torch.manual_seed(width)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def made_base(args, width: int) -> Path:
    """The folder of a model of this width that was trained on the other tasks, by an earlier call or now."""
    folder = Path(tempfile.gettempdir()) / f"widths-{width}-{args.task}"
    if not (folder / "base" / "config.json").exists():
        rows = mixed_rows(args.task, args.base_rows)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        random_model(width, [m["content"] for row in rows for m in row["messages"]], folder / "random")
        files = {"model_name": folder / "random", "dataset": folder / "mixed.jsonl"}
        cells.trained(BASE | files | {"lr": args.base_lr / width}, folder / "base")
    return folder / "base"


def measure(args) -> None:
    for width in args.widths:
        base = made_base(args, width)
        for seed in args.seeds:
            rows = base.parent / f"rows{seed}"
            write_splits(args.task, seed, rows, args.rows)
            files = {"dataset": rows / "train.jsonl", "validation_dataset": rows / "validation.jsonl"}
            sweep(args, width, seed, PLAIN | files | {"model_name": base, "seed": 42 + seed})


def sweep(args, width: int, seed: int, flags: dict) -> None:
    """The rule's rate first, as its multiples are of it."""
    known, rule = cells.kept_in(args.out), None
    for multiple in (1.0, *(m for m in MULTIPLES if m != 1.0)):
        cell = f"{args.task} {width} {seed} {multiple}"
        line = known.get(cell)
        if line is None:
            with tempfile.TemporaryDirectory() as out:
                events, settled = cells.trained(flags | ({"lr": rule * multiple} if rule else {}), Path(out) / "run")
            last = [event for event in events if event["event"] == "eval"][-1]
            line = {"cell": cell, "task": args.task, "width": width, "seed": seed, "multiple": multiple}
            line |= {"loss": last["loss"], "lr": settled["lr"], "steps": last["step"]}
            cells.keep(args.out, line)
        rule = rule or line["lr"]


def table(file: Path) -> str:
    """Median loss over seeds by width and multiple of the rule's rate."""
    lines = cells.kept_in(file).values()
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
    parser.add_argument("--widths", type=cells.numbers, default=[256, 1024])
    parser.add_argument("--seeds", type=cells.numbers, default=[0])
    parser.add_argument("--task", default="sql")
    parser.add_argument("--rows", type=int, default=160)
    parser.add_argument("--base_rows", type=int, default=200, help="rows of each task that the base learns")
    parser.add_argument("--base_lr", type=float, default=0.5, help="times 1 / width: the base's rate")
    cells.main(parser, measure, table, "widths.jsonl")


if __name__ == "__main__":
    main()
