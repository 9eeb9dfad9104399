"""Macro F1 of --task classify against the same rows as text: 12 skewed labels whose names say what is meant.

    python benchmarks/labels.py --seeds 1,2,3

A row is a short message about one of 12 topics, as frequent as Zipf's law has it; a third of them deny a second topic
first. Rows that are trained on begin with one of each label. The text's answer is the label, one of 12 or wrong. Each
seed draws other rows and other initial weights.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from finetune.run.head_scores import Confusions  # noqa: E402 after the path

TOPICS = {
    "billing": ("a charge that I do not know", "the invoice of last month", "the amount on my card"),
    "shipping": ("the parcel that has not arrived", "the courier's tracking number", "the date of delivery"),
    "returns": ("sending the shoes back", "a refund for a lamp", "an exchange for another size"),
    "password": ("a forgotten password", "the link to reset my login", "the code that never came by mail"),
    "subscription": ("the monthly plan", "ending my membership", "the renewal in May"),
    "warranty": ("a repair under guarantee", "the broken hinge after a year", "the guarantee card"),
    "privacy": ("the data you keep about me", "deleting my records", "who may see my address"),
    "outage": ("the site that is down", "the server error since noon", "the app that does not load"),
    "jobs": ("an open position", "my application as a driver", "an internship in summer"),
    "press": ("an interview for our paper", "pictures for an article", "a statement for the radio"),
    "partnership": ("selling your goods in our shop", "a joint offer", "becoming a reseller"),
    "accessibility": ("reading the page with a screen reader", "larger letters", "captions for the films"),
}
OPENINGS = ("I am writing about {}.", "Could you help me with {}?", "My question is about {}.", "It concerns {}.")
DENIED = ("This is not about {}. ", "I no longer ask about {}. ", "Forget {}, that is settled. ")


def rows_of(draw: random.Random, count: int, first: list[str]) -> list[tuple[str, str]]:
    """(message, label) of each row, of the labels `first` and of drawn ones."""
    names = list(TOPICS)
    found = []
    drawn = draw.choices(names, [1 / (place + 1) for place in range(len(names))], k=count - len(first))
    for label in first + drawn:
        text = draw.choice(OPENINGS).format(draw.choice(TOPICS[label]))
        if draw.random() < 1 / 3:
            other = draw.choice([name for name in names if name != label])
            text = draw.choice(DENIED).format(draw.choice(TOPICS[other])) + text
        found.append((text, label))
    return found


def write(file: Path, rows: list[tuple[str, str]], names: tuple[str, str]) -> Path:
    file.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return file


def confusions(answers: list[tuple[str, str]]) -> Confusions:
    """Counts of (label, answer); an answer that is not a label is of a thirteenth class."""
    names = list(TOPICS)
    counts_CC = np.zeros((len(names) + 1, len(names) + 1), np.int64)
    for label, answer in answers:
        counts_CC[names.index(label), names.index(answer) if answer in names else len(names)] += 1
    return Confusions(counts_CC)


def run(program: str, *words: object) -> str:
    done = subprocess.run([sys.executable, ROOT / program, *map(str, words)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{program} {' '.join(map(str, words))} ended with {done.returncode}: {done.stdout[-2000:]}")
    return done.stdout


def macro_f1(folder: Path, args: argparse.Namespace, seed: int) -> dict[str, float]:
    """{"head", "text"}: macro F1 over the labels of the held-out rows."""
    draw = random.Random(seed)
    parts = {"train": rows_of(draw, args.rows, list(TOPICS)), "test": rows_of(draw, args.held_out, [])}
    common = ["--batch_size", 16, "--epochs", args.epochs, "--seed", seed, "--precision", "fp32", *args.flags]
    found = {}
    for kind, names in (("head", ("text", "label")), ("text", ("prompt", "completion"))):
        files = {part: write(folder / f"{kind}_{part}.jsonl", rows, names) for part, rows in parts.items()}
        task = ["--task", "classify"] if kind == "head" else []
        run("train.py", "--dataset", files["train"], "--output_dir", folder / kind, *task, *common)
        if kind == "head":
            printed = run("score.py", "--checkpoint", folder / kind, "--dataset", files["test"], "--json")
            found[kind] = json.loads(printed.splitlines()[-1])["macro_f1"]
        else:
            told = folder / "told.jsonl"
            words = ("--checkpoint", folder / kind, "--dataset", files["test"], "--max_new_tokens", 8)
            run("score.py", *words, "--predictions", told)
            answers = [json.loads(line) for line in told.read_text().splitlines()]
            found[kind] = confusions([(a["expected"].strip(), a["answer"].strip()) for a in answers]).macro_f1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--rows", type=int, default=360)
    parser.add_argument("--held_out", type=int, default=240)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("flags", nargs="*", help="of train.py, after --")
    args = parser.parse_args()
    differences = []
    for seed in map(int, args.seeds.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            found = macro_f1(Path(folder), args, seed)
        differences.append(found["head"] - found["text"])
        print(f"seed {seed}: macro F1 by the head {found['head']:.1%}, as text {found['text']:.1%}", flush=True)
    middle = statistics.median(differences)
    print(
        f"head less text: median {middle:+.1%} [{min(differences):+.1%}..{max(differences):+.1%}], n={len(differences)}"
    )


if __name__ == "__main__":
    main()
