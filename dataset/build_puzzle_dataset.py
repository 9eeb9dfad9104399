"""Puzzles to the arrays that pretrain.py reads: Sudoku generated or from csv, and mazes.

python -m dataset.build_puzzle_dataset --kind sudoku --size 4 --output-dir data/sudoku-4
python -m dataset.build_puzzle_dataset --kind sudoku --input-file puzzles.csv --output-dir data/mine
"""

import json
import sys
from argparse import Namespace
from pathlib import Path

if str(Path(__file__).resolve().parents[1]) not in sys.path:  # python dataset/NAME.py puts this folder there instead
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from finetune.system import process

if __name__ == "__main__":  # one line instead of the traceback of the imports below
    process.require_installed()

from finetune.cli import Parser, check_ranges
from finetune.errors import PlanError
from finetune.system.terminal import say
from recursive.data import puzzles
from recursive.data.arrays import check_output, new_dataset, write_rows

LARGEST_MAZE = 63


def build_parser() -> Parser:
    parser = Parser(prog="python -m dataset.build_puzzle_dataset", description=__doc__)
    parser.add_argument("--kind", choices=("sudoku", "maze"), default="sudoku", help="(default: sudoku)")
    parser.add_argument("--output_dir", required=True, metavar="DIR", help="folder to write; its data set is replaced")
    parser.add_argument("--input_file", default=None, metavar="CSV", help="read puzzles instead of generating them")
    parser.add_argument("--size", type=int, default=4, metavar="N", help="Sudoku 4, 6 or 9; cells per side of a maze")
    parser.add_argument("--count", type=int, default=1000, metavar="N", help="training puzzles (default: 1000)")
    parser.add_argument("--test_count", type=int, default=500, metavar="N", help="held-out puzzles (default: 500)")
    parser.add_argument("--clues", type=int, default=0, metavar="N", help="clues left at least; 0: minimal puzzles")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(default: 0)")
    return parser


def generate(args: Namespace):
    """(puzzles, solutions, vocabulary), training puzzles first; no two are equal."""
    wanted = args.count + args.test_count
    if args.input_file:
        if args.kind != "sudoku":
            raise PlanError("--input-file: is read for --kind sudoku only. Omit it.")
        if not Path(args.input_file).is_file():
            raise PlanError(f"--input-file {args.input_file}: no such file. Check the path.")
        *found, repeated = puzzles.read_sudoku_csv(Path(args.input_file), wanted)
        if repeated:
            say(f"note: {repeated} repeated rows are left out")
        return *found, int(found[0].shape[1] ** 0.5) + 2
    if args.kind == "maze":
        if args.size > LARGEST_MAZE:
            raise PlanError(f"--size {args.size}: mazes have at most {LARGEST_MAZE} cells per side.")
        return *puzzles.generate_mazes(args.size, wanted, args.seed), puzzles.MAZE_TOKENS
    sudoku = puzzles.sudoku_of(args.size)
    return *puzzles.generate_sudoku(sudoku, wanted, args.seed, args.clues), sudoku.vocab_size


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    least = {"count": 1, "test_count": 0, "clues": 0, "seed": 0}
    check_ranges(args, {name: (low, 10**7) for name, low in least.items()})
    check_output(Path(args.output_dir), args.input_file)
    asked, answers, vocab_size = generate(args)
    count = min(args.count, len(asked))
    with new_dataset(Path(args.output_dir)) as beside:
        for split, rows in (("train", slice(0, count)), ("test", slice(count, None))):
            write_rows(beside / split, asked[rows], answers[rows], 0, vocab_size, symmetries=args.kind)
        (beside / "config.json").write_text(json.dumps(vars(args), indent=1) + "\n", encoding="utf-8")
    say(f"{count} puzzles to train on, {len(asked) - count} held out, {asked.shape[1]} cells")
    say(f"written: {args.output_dir}")
    return 0


if __name__ == "__main__":
    process.exit_with(main)
