"""Computes loss, perplexity and exact match of a model or an adapter on a dataset.

python score.py --checkpoint outputs/my-run --dataset test.jsonl
"""

import json
import math
import sys
import time
from pathlib import Path

if str(Path(__file__).resolve().parent) not in sys.path:  # PYTHONSAFEPATH leaves it out
    sys.path.insert(0, str(Path(__file__).resolve().parent))

from finetune.cli import Parser
from finetune.errors import PlanError
from finetune.system import process
from finetune.system.terminal import say


def build_parser() -> Parser:
    from finetune import open_checkpoint
    from finetune.config import DATASET_FORMATS

    parser = Parser(prog="score.py", description=__doc__)
    open_checkpoint.add_flags(parser)
    parser.add_argument("--dataset", required=True, metavar="FILE|NAME", help="rows with answers")
    parser.add_argument(
        "--dataset_format", default="auto", choices=DATASET_FORMATS, help="(default: auto, from the columns)"
    )
    parser.add_argument(
        "--split", default="test", metavar="NAME", help="split of a folder or Hub dataset (default: test)"
    )
    parser.add_argument("--samples", type=int, default=-1, metavar="N", help="score the first N rows (default: all)")
    parser.add_argument(
        "--context_length", type=int, default=None, metavar="N", help="tokens of a row (default: the run's, else 512)"
    )
    parser.number("max_new_tokens", 128, "maximum new tokens per answer")
    parser.number("batch_size", 32, "answers generated per batch")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print the first N wrong answers")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object")
    return parser


def main(argv=None) -> int:
    process.prepare_environment()
    args = build_parser().parse_args(argv)
    from finetune import open_checkpoint
    from finetune.data.chat_template import ensure_chat_template, shared_renderer
    from finetune.data.collate import microbatches
    from finetune.data.columns import RowOptions
    from finetune.data.prepare import DatasetSource, check_columns, needs_chat_template
    from finetune.data.reading.mixture import Source
    from finetune.data.reading.sources import read_rows
    from finetune.data.tokens.tokenize import generation_examples, tokenize
    from finetune.run import evaluation

    for name in ("context_length", "max_new_tokens", "batch_size"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise PlanError(f"--{name} {getattr(args, name)}: must be >= 1.")
    if args.samples == 0 or args.samples < -1:
        raise PlanError(f"--samples {args.samples}: must be -1 for all rows, or at least 1.")
    raw = read_rows(args.dataset, samples=args.samples, split=args.split)
    options = RowOptions(args.dataset_format)
    check_columns(raw, options, f"--dataset {args.dataset}")
    began = time.perf_counter()
    engine, tokenizer, ends, base = open_checkpoint.open_engine(args)
    read = DatasetSource.of(raw, options, Source(args.dataset))
    ensure_chat_template(tokenizer, lambda: needs_chat_template({"score": [read]}))
    length = args.context_length or (base.settings.context_length if base.settings else 512)
    length = min(length, engine.context_limit() or length)
    with shared_renderer(tokenizer) as renderer:
        rows = tokenize(raw, options, tokenizer, length, False, engine.vocab_size(), renderer)
        questions = generation_examples(raw, options, tokenizer, renderer)
    batches = microbatches(rows, range(len(rows)), engine.layout, len(rows), 2048, engine.pad_id)
    result = engine.evaluate(batches)
    match, answers = None, []  # of text, which asks nothing
    if questions:
        match, answers = evaluation.exact_match(
            engine, tokenizer, questions, args.max_new_tokens, ends, args.batch_size
        )
    loss = result.loss
    figures = {
        "rows": len(rows),
        "num_targets": result.num_targets,
        "loss": loss,
        "perplexity": math.exp(min(loss, 700)),
        "exact_match": match,
        "base": base.said,
        "wall_s": round(time.perf_counter() - began, 1),
    }
    if args.json:
        say(json.dumps(figures))
    else:
        matched = f"exact match {match:.1%} of {len(questions)} | " if questions else ""
        say(
            f"{rows.describe()}\nloss {loss:.4f} | perplexity {figures['perplexity']:.3f} | {matched}"
            f"{figures['wall_s']} s"
        )
    wrong = [(q, a) for q, a in zip(questions, answers, strict=True) if a.strip() != q[1].strip()]
    for (_, wanted, source), got in wrong[: args.show]:
        say(f"{source}\n  expected {wanted}\n  got      {got}")
    return 0


if __name__ == "__main__":
    process.exit_with(main)
