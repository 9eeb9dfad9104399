"""Computes loss, perplexity and exact match of a model or an adapter on a dataset.

python score.py --checkpoint outputs/my-run --dataset test.jsonl
torchrun --nproc_per_node=2 score.py --checkpoint outputs/my-run --dataset test.jsonl      weights sharded over 2 GPUs
"""

import json
import sys
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

if str(Path(__file__).resolve().parent) not in sys.path:  # PYTHONSAFEPATH leaves it out
    sys.path.insert(0, str(Path(__file__).resolve().parent))

from finetune.system import process

if __name__ == "__main__":  # one line instead of the traceback of the imports below
    process.require_installed()

from finetune.callers_process import callers_process
from finetune.checkpoint.store import storage
from finetune.cli import Parser, check_amounts
from finetune.distributed.over_ranks import Ranks
from finetune.errors import PlanError
from finetune.parts import answer_metrics
from finetune.system.files import check_writable
from finetune.system.terminal import say


def build_parser() -> Parser:
    from finetune import open_checkpoint
    from finetune.config import DATASET_FORMATS

    parser = Parser(prog="score.py", description=__doc__)
    open_checkpoint.add_flags(parser)
    parser.add_argument("--dataset", metavar="FILE|NAME", help="rows with answers")
    parser.add_argument(
        "--lm_eval",
        metavar="TASK,...",
        help="tasks of lm-evaluation-harness, or YAML files of tasks, in the place of --dataset or beside it",
    )
    parser.add_argument(
        "--dataset_format", default="auto", choices=DATASET_FORMATS, help="(default: auto, from the columns)"
    )
    parser.add_argument(
        "--columns",
        metavar="FIELD=COLUMN,...",
        help="which of your columns to use, as in training: question=Q,answer=A",
    )
    parser.add_argument("--ignore_columns", metavar="NAME,...", help="columns and message fields to leave out")
    parser.add_argument(
        "--image_root", metavar="DIR", help="folder that paths of images in rows begin in (default: the file's)"
    )
    parser.add_argument("--allow_urls", action="store_true", help="read images in rows that are URLs, of https only")
    parser.add_argument(
        "--split", default="test", metavar="NAME", help="split of a folder or Hub dataset (default: test)"
    )
    parser.add_argument("--samples", type=int, default=-1, metavar="N", help="score the first N rows (default: all)")
    parser.add_argument(
        "--context_length", type=int, default=None, metavar="N", help="tokens of a row (default: the run's, else 512)"
    )
    parser.number("max_new_tokens", 128, "maximum new tokens per answer")
    parser.number("batch_size", 32, "answers generated per batch")
    parser.add_argument(
        "--metric",
        default=None,
        metavar="NAME,...",
        help="of exact, contains (the expected text is in the answer), numeric (the last numbers are equal), json, "
        "regex (--pattern finds the same in both), choice (the likeliest of the answers that the rows have), "
        "perplexity (default: exact and perplexity)",
    )
    parser.add_argument("--pattern", metavar="REGEX", help="of --metric regex: its first group, or its match")
    parser.add_argument("--predictions", metavar="FILE", help="write every full answer as JSON lines, wrong ones first")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print the first N wrong answers")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object")
    return parser


def check(args: Namespace) -> None:
    """Raises PlanError for flags that contradict themselves, before anything is loaded."""
    check_amounts(args)
    if args.predictions:
        file = Path(args.predictions)
        if file.exists():
            raise PlanError(f"--predictions {file}: exists. Give another file.")
        if not file.parent.is_dir():
            raise PlanError(f"--predictions {file}: there is no folder {file.parent}. Make it, or give another file.")
        check_writable(file.parent, "--predictions")
    if args.lm_eval is not None:
        from finetune.run.lm_eval_tasks import check_lm_eval

        check_lm_eval(args.lm_eval)
    if args.dataset is None:
        of_rows = ("metric", "pattern", "predictions", "show", "columns", "ignore_columns")
        given = next((n for n in of_rows if getattr(args, n)), None)
        if args.lm_eval is None or given:
            what = "--dataset: is required, or --lm_eval"
            if given:
                what = f"--{given}: is of rows, and there are none"
            raise PlanError(f"{what}. See --help.")


def parsed(argv: list[str] | None):
    args = build_parser().parse_args(argv)
    check(args)
    return args


def prepared(args: Namespace, ranks: int) -> str:
    """Finds what the arguments name, for that many ranks, and adds it to them; the backend. Raises PlanError."""
    from finetune import open_checkpoint
    from finetune.adapters.heads import HeadRecord
    from finetune.data.columns import RowOptions, parse_columns, parse_names
    from finetune.data.images.references import ImageOptions, image_root_of
    from finetune.data.prepare import check_columns, rows_showing_images
    from finetune.data.reading.sources import read_rows
    from finetune.model_files.hub_adapter import fetched
    from finetune.model_files.processor import sees_images
    from finetune.run import heads
    from finetune.trained_base import text_unit_of

    with process.result_on_stdout(args.json):
        args.metrics = answer_metrics.metrics_of(args.metric or "exact,perplexity", args.pattern)
        if args.show and not set(args.metrics) & set(answer_metrics.OF_ANSWERS):
            raise PlanError(
                f"--show {args.show}: shows wrong answers, and --metric {args.metric} reads none. Add exact."
            )
        columns = parse_columns(args.columns)
        ignored = parse_names(args.ignore_columns)
        args.raw, args.options = None, RowOptions(args.dataset_format, columns, ignored)
        args.checkpoint = fetched(args.checkpoint)
        if args.dataset is not None:  # before the base is fetched
            unit = text_unit_of(Path(args.checkpoint))
            args.raw = read_rows(args.dataset, samples=args.samples, split=args.split, text_unit=unit)
        args.found = found = open_checkpoint.find(args, ranks)
        record = HeadRecord.read(Path(args.checkpoint))
        heads.refuse_unread(record, args, ("metric", "pattern", "predictions", "show", "lm_eval"))
        if record is not None:
            args.options = heads.options_for(record, args.options)
        if args.raw is not None:
            said = f"--dataset {args.dataset}"
            if sees_images(found.files.folder, found.files.config):
                root = image_root_of(args.dataset, args.image_root)
                args.options = replace(args.options, images=ImageOptions(root, args.allow_urls))
            check_columns(args.raw, args.options, said)
            if args.options.images and any(rows_showing_images(args.raw, args.options)):
                args.found = open_checkpoint.seeing_images(found, said)
        return str(args.found.manager.backend)


def scored(args: Namespace, ranks: Ranks) -> int:
    """Scores, and prints what was found; the exit code."""
    with process.result_on_stdout(args.json):
        figures, lines, answers = found_by(args, ranks)
    if args.json:
        say(json.dumps(figures))
    else:
        say("\n".join(lines) + f" | {figures['wall_s']} s", in_words=True)
    if not ranks.is_first:
        return 0
    if args.predictions:
        from finetune.run import scoring

        with storage(Path(args.predictions)):
            scoring.write_predictions(Path(args.predictions), answers)
    with process.result_on_stdout(args.json):
        for row in [answer for answer in answers if answer.wrong][: args.show]:
            say(f"{row.source}\n  expected {row.expected}\n  got      {row.answer}")
    return 0


def found_by(args: Namespace, ranks: Ranks) -> tuple[dict, list[str], list]:
    """(figures by name, lines that say them, every answer). Collective."""
    from finetune import open_checkpoint
    from finetune.estimate.inference import Work

    began = time.perf_counter()
    engine, tokenizer, ends, base = open_checkpoint.open_engine(args, ranks, args.found)
    figures = {}
    lines = []
    answers = []
    work = Work()
    if args.raw is not None:
        from finetune.run.scored_rows import score_rows

        figures, lines, answers, work = score_rows(engine, tokenizer, ends, base, args)
    if args.lm_eval is not None:
        from finetune.run.lm_eval_tasks import run_tasks

        found = run_tasks(engine, tokenizer, ends, args.lm_eval, None if args.samples < 0 else args.samples)
        figures["lm_eval"] = found
        for task, values in found.items():
            lines.append(f"{task}: " + ", ".join(f"{name} {value:.4f}" for name, value in values.items()))
    used = None
    if args.raw is not None:
        used = open_checkpoint.memory_of(engine, args.checkpoint, base, work)
    if used:
        figures["memory_bytes"] = used
        lines.append(open_checkpoint.said_memory(used))
    figures |= {"base": base.said, "wall_s": round(time.perf_counter() - began, 1)}
    return figures, lines, answers


@callers_process()
def main(argv: list[str] | None = None) -> int:
    from finetune import open_checkpoint

    return open_checkpoint.run_over_ranks(Path(__file__), argv, parsed, prepared, scored)


if __name__ == "__main__":
    process.exit_with(main)
