"""Rows scored by loss, perplexity and metrics of answers: for score.py and for the result of fine_tune."""

import math
from argparse import Namespace
from functools import partial

from finetune.data.held_out import too_long
from finetune.data.images.inputs import ImageInputs
from finetune.data.prepare import DatasetSource, cut_of, images_of, with_text_options
from finetune.data.reading.mixture import Source
from finetune.engine import FineTuningEngine
from finetune.errors import PlanError
from finetune.estimate.inference import Work
from finetune.model_files.tokenizer import FullTokenizer
from finetune.open_checkpoint import base_of
from finetune.parts import answer_metrics
from finetune.run import evaluation, heads, scoring
from finetune.trained_base import TrainedBase


def score_rows(
    engine: FineTuningEngine, tokenizer: FullTokenizer, ends: set[int], base: TrainedBase, args: Namespace
) -> tuple:
    """(figures by name, lines that say them, answers, the Work that it was) of the rows of --dataset. Collective.

    `args`: score.py's flags, with `raw`, `options` and `metrics` that are read of them.
    """
    if args.options.has_head:
        return heads.scored(engine, tokenizer, base, args)
    files = base_of(args.checkpoint) if base.plan.data.images else None
    with images_of(base.plan.data, files, tokenizer) as images:
        return _scored(engine, tokenizer, ends=ends, base=base, args=args, images=images)


def _scored(
    engine: FineTuningEngine,
    tokenizer: FullTokenizer,
    ends: set[int],
    base: TrainedBase,
    args: Namespace,
    images: ImageInputs | None,
) -> tuple:
    """Result of `score_rows`. `images`: of a model that sees those of rows."""
    raw = args.raw
    options = with_text_options(args.options, base.plan.data)
    metrics = args.metrics
    cut = cut_of(base.plan.data, "score").of_length(args.context_length or base.context_length)
    read = DatasetSource.of(raw, options, Source(args.dataset))
    rows, questions, result = scoring.evaluated(engine, tokenizer, [read], cut, images)
    match = None  # of text, which asks nothing
    notes: list[str] = []
    answers = []
    asked = [name for name in metrics if name in answer_metrics.OF_ANSWERS]
    wanted = next((name for name in metrics if args.metric and name != "perplexity"), None)
    if not questions and (wanted or args.predictions):
        if args.predictions:
            said = f"--predictions {args.predictions}"
        else:
            said = f"--metric {wanted}"
        raise PlanError(f"{said}: the rows of {args.dataset} are text, which asks nothing. Use --metric perplexity.")
    if questions and (asked or args.show or args.predictions):
        whole = bool(args.show or args.predictions) or asked != ["exact"]
        match, texts = evaluation.exact_match(
            engine, tokenizer, questions, args.max_new_tokens, ends, args.batch_size, whole=whole
        )
        answers = scoring.judged(questions, texts, asked, args.pattern, tokenizer.decode)
        notes = scoring.endless_lines(answers, "pattern", args.pattern)
        notes += scoring.unreachable_lines(answers, asked, "metric", args.pattern)
        long = too_long(questions, asked, tokenizer, args.max_new_tokens, "max_new_tokens")
        notes += [f"note: {line}" for line in long]
    scores = {name: sum(answer.right[name] for answer in answers) / len(answers) for name in asked if answers}
    if "choice" in metrics and questions:
        log_prob = partial(scoring.log_prob_of, engine, tokenizer, end=scoring.end_of(rows, ends))
        scores["choice"] = scoring.choice(questions, scoring.choices_of(questions), log_prob)
    loss = result.loss
    figures = {
        "rows": len(rows),
        "num_targets": result.num_targets,
        "loss": loss,
        "perplexity": math.exp(min(loss, 700)),
        "exact_match": match,
        "scores": scores,
    }
    named = [("exact match" if name == "exact" else name, value) for name, value in scores.items()]
    matched = "".join(f" | {name} {value:.1%} of {len(questions)}" for name, value in named)
    line = f"loss {loss:.4f} | perplexity {figures['perplexity']:.3f}{matched}"
    asked_at_once = 0
    if match is not None:
        asked_at_once = min(args.batch_size, len(questions))
    prompt = max((len(ids) for ids, _, _ in questions), default=0)
    scored = min(scoring.FORWARD_TOKENS, int(rows.lengths.sum()))
    work = Work(asked_at_once, prompt, args.max_new_tokens, scored, min(scored, result.num_targets))
    notes += [f"note: {line}" for line in rows.notices]
    if notes:
        figures["notes"] = notes
    return figures, [*notes, rows.describe(), line], answers, work
