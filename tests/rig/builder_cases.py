"""Odd input files and output folders of the two builders: a data set that pretrain.py can read, or one line."""

import csv
import io
import random
from dataclasses import dataclass
from pathlib import Path

from dataset import build_chat_dataset, build_puzzle_dataset
from recursive.data.arrays import read_split
from recursive.data.puzzles import generate_sudoku, sudoku_of
from tests.rig import mutate
from tests.rig.batch import Finding, Mutant
from tests.rig.materials import Place

CHATS = [
    {"conversations": [{"from": "human", "value": f"hi {i}"}, {"from": "gpt", "value": "yes " * (i + 1)}], "id": i}
    for i in range(5)
]
MESSAGES = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 3
MINE = ("notes.txt", "train/notes.txt", "train/dataset.json", "config.json", "tokenizer/mine", "test", ".data.new/mine")


@dataclass
class BuilderBatch:
    """files: the input, and files of others below the output folder; argv: the builder, then its words."""

    variants: tuple = ()

    def prepare(self, place: Place) -> Place:
        return place

    def mutant(self, rng: random.Random, place: Place) -> Mutant:
        builder = rng.choice(("chat", "chat", "puzzle"))
        files = {} if rng.random() < 0.6 else {f"data/{rng.choice(MINE)}": rng.choice((b"", b"mine", b"{}"))}
        files = {name.removeprefix("data/") if ".new" in name else name: data for name, data in files.items()}
        again = ("again",) if not files and rng.random() < 0.3 else ()
        data, words = (_chats if builder == "chat" else _puzzles)(rng)
        return Mutant({"input": data, **files}, (builder, *again, *words))

    def check(self, mutant: Mutant, folder: Path, place: Place) -> None:
        builder, *words = mutant.argv
        main = (build_chat_dataset if builder == "chat" else build_puzzle_dataset).main
        name = "input.jsonl" if "jsonl" in words else "input.json" if builder == "chat" else "input.csv"
        (folder / "input").rename(folder / name)
        if "again" in words:  # onto a data set of the same builder
            small = ["--kind", "sudoku", "--size", "4", "--count", "2", "--test_count", "1"]
            build_puzzle_dataset.main([*small, "--output_dir", str(folder / "data")])
        argv = [word for word in words if word not in ("again", "jsonl")]
        argv = [*argv, "--output_dir", str(folder / "data"), "--input_file", str(folder / name)]
        try:
            main(argv)
            rows = read_split(str(folder / "data"), "train")
            if not len(rows):
                raise Finding("wrong_code", "a data set without a row was written, exit code 0")
            read_split(str(folder / "data"), "test")
        finally:
            self._nothing_lost(mutant, folder, name)

    @staticmethod
    def _nothing_lost(mutant: Mutant, folder: Path, name: str) -> None:
        for other, data in mutant.files.items():
            file = folder / (name if other == "input" else other)
            if not file.is_file() or file.read_bytes() != data:
                raise Finding("payload_or_escape", f"{other} was replaced or removed")
        left = [p.name for p in folder.iterdir() if p.name not in (name, "data", ".data.new")]
        left += [p.name for p in folder.glob(".data.new*") if f"{p.name}/mine" not in mutant.files]
        if left:
            raise Finding("payload_or_escape", f"left beside the data set: {left}")


def _chats(rng: random.Random) -> tuple[bytes, list[str]]:
    rows = mutate.mutated_json(rng, rng.choice((CHATS, CHATS, MESSAGES)))
    words = ["--tokenizer", rng.choice(("bpe:300", "bpe:262", "bpe:280"))]
    words += ["--max_length", rng.choice(("4", "16", "64", "5"))] if rng.random() < 0.5 else []
    words += ["--train_split", rng.choice(("0.5", "1", "0.95", "0.1"))] if rng.random() < 0.5 else []
    words += ["--subsample_size", rng.choice(("1", "3", "9"))] if rng.random() < 0.3 else []
    words += ["--train_on", "all"] if rng.random() < 0.3 else []
    if rng.random() < 0.4 and isinstance(rows, list):
        data, words = b"\n".join(mutate.json_text(rng, row) for row in rows), [*words, "jsonl"]
    else:
        data = mutate.json_text(rng, rows)
    return mutate.mutated_bytes(rng, data) if rng.random() < 0.2 else data, words


def _puzzles(rng: random.Random) -> tuple[bytes, list[str]]:
    asked, answers = generate_sudoku(sudoku_of(4), 6, rng.randrange(99))
    lines = [["".join(map(str, row.ravel())) for row in pair] for pair in zip(asked - 1, answers - 1, strict=True)]
    lines.insert(0, ["puzzle", "solution"])
    for _ in range(rng.randrange(4)):
        line = rng.choice(lines)
        at = rng.randrange(len(line)) if line else 0
        line[at:at] = [] if line else ["x"]
        if line:
            line[at % len(line)] = rng.choice(("", "1" * 16, "0" * 16, "5" * 16, "é" * 16, line[0][:-1], line[0] + "1"))
    text = io.StringIO()
    csv.writer(text).writerows(lines)
    data = text.getvalue().encode()
    words = ["--count", rng.choice(("1", "3", "100")), "--test_count", rng.choice(("0", "1", "100"))]
    return mutate.mutated_bytes(rng, data) if rng.random() < 0.5 else data, words


BUILDERS = BuilderBatch()
