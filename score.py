"""Computes loss, perplexity and exact match of a model or an adapter on a dataset.

python score.py --checkpoint outputs/my-run --dataset test.jsonl
"""

import json
import math
import sys
import time
from functools import partial
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


def metrics_of(args) -> list[str]:
    """The names of --metric. Raises PlanError."""
    from finetune.run.scoring import METRICS, judges

    names = [name.strip() for name in (args.metric or "exact,perplexity").split(",") if name.strip()]
    unknown = next((name for name in names if name not in METRICS), None)
    if unknown or not names:
        raise PlanError(f"--metric {unknown or args.metric}: is not one. Use {', '.join(METRICS)}.")
    judges(names, args.pattern)
    if args.pattern and "regex" not in names:
        raise PlanError(f"--pattern {args.pattern}: is for --metric regex. Add it, or omit the pattern.")
    if args.predictions and Path(args.predictions).exists():
        raise PlanError(f"--predictions {args.predictions}: exists. Give another file.")
    return list(dict.fromkeys(names))


def log_prob_of(engine, tokenizer, prompt: list[int], text: str) -> float:
    """Log-probability of a text after a prompt, summed over its tokens."""
    import numpy as np

    from finetune.data.collate import microbatches
    from finetune.data.tokens.tokenize import TokenizedDataset, joined_parts

    ids = tokenizer(text, add_special_tokens=False).input_ids
    row = np.array([*prompt, *ids], np.int64), np.arange(len(prompt) + len(ids)) >= len(prompt)
    counts = dict(rows=1, tokens=len(row[0]), targets=len(ids), skipped=0, dropped_empty=0)
    counts |= dict(prompt_truncated=0, answer_truncated=0)
    document = TokenizedDataset(**joined_parts([row]), sources=("choice",), counts=counts)
    result = engine.evaluate(microbatches(document, range(1), engine.layout, 1, len(row[0]), engine.pad_id))
    return -result.loss * result.num_targets


def main(argv=None) -> int:
    process.prepare_environment()
    args = build_parser().parse_args(argv)
    from finetune import open_checkpoint
    from finetune.data.columns import RowOptions
    from finetune.data.prepare import check_columns
    from finetune.data.reading.sources import read_rows
    from finetune.run import evaluation, scoring

    for name in ("context_length", "max_new_tokens", "batch_size"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise PlanError(f"--{name} {getattr(args, name)}: must be >= 1.")
    if args.samples == 0 or args.samples < -1:
        raise PlanError(f"--samples {args.samples}: must be -1 for all rows, or at least 1.")
    metrics = metrics_of(args)
    raw = read_rows(args.dataset, samples=args.samples, split=args.split)
    options = RowOptions(args.dataset_format)
    check_columns(raw, options, f"--dataset {args.dataset}")
    began = time.perf_counter()
    engine, tokenizer, ends, base = open_checkpoint.open_engine(args)
    length = args.context_length or (base.settings.context_length if base.settings else 512)
    rows, questions, result = scoring.evaluated(engine, tokenizer, raw, options, args.dataset, length)
    match, answers = None, []  # of text, which asks nothing
    asked = [name for name in metrics if name in scoring.OF_ANSWERS]
    if questions and (asked or args.show or args.predictions):
        whole = bool(args.show or args.predictions) or asked != ["exact"]
        match, texts = evaluation.exact_match(
            engine, tokenizer, questions, args.max_new_tokens, ends, args.batch_size, whole=whole
        )
        answers = scoring.judged(questions, texts, asked, args.pattern, tokenizer.decode)
    scores = {name: sum(answer.right[name] for answer in answers) / len(answers) for name in asked if answers}
    if "choice" in metrics and questions:
        log_prob = partial(log_prob_of, engine, tokenizer)
        scores["choice"] = scoring.choice(questions, scoring.choices_of(questions), log_prob)
    if args.predictions:
        scoring.write_predictions(Path(args.predictions), answers)
    loss = result.loss
    figures = {
        "rows": len(rows),
        "num_targets": result.num_targets,
        "loss": loss,
        "perplexity": math.exp(min(loss, 700)),
        "exact_match": match,
        "scores": scores,
        "base": base.said,
        "wall_s": round(time.perf_counter() - began, 1),
    }
    if args.json:
        say(json.dumps(figures))
    else:
        named = [("exact match" if name == "exact" else name, value) for name, value in scores.items()]
        matched = "".join(f"{name} {value:.1%} of {len(questions)} | " for name, value in named)
        say(
            f"{rows.describe()}\nloss {loss:.4f} | perplexity {figures['perplexity']:.3f} | {matched}"
            f"{figures['wall_s']} s"
        )
    for row in [answer for answer in answers if answer.wrong][: args.show]:
        say(f"{row.source}\n  expected {row.expected}\n  got      {row.answer}")
    return 0


if __name__ == "__main__":
    process.exit_with(main)
