"""A look at the data before anything is loaded: what rows become, how long they are, and what is odd about them.

It reads every row as the run will, with the model's tokenizer but without transformers.
"""

import hashlib
import json
import sys
from functools import partial
from pathlib import Path

import numpy as np

from finetune.data.fit_template import prepare_template
from finetune.data.prepare import (
    DATASETS,
    check_mismatches,
    cut_of,
    images_of,
    named_sources,
    read_datasets,
    rows_of,
    tokenized_once,
)
from finetune.data.reading.first_rows import NotReadError
from finetune.data.reading.sources import is_local
from finetune.data.settled_by_rows import Changes, settled_by_rows, settled_lines
from finetune.data.tokens.overlong import CUTS
from finetune.data.tokens.tokenize import DESIRABLE, LABEL, Limits, TokenizedDataset, joined_datasets, render_row
from finetune.errors import PlanError
from finetune.estimate.model_shape import ModelShape
from finetune.model_files.files import ModelFiles
from finetune.model_files.hub import hub_unreachable
from finetune.model_files.plain_tokenizer import PlainTokenizer, tokenizer_of_folder
from finetune.model_files.tokenizer import FullTokenizer, Tokenizer, load_tokenizer, unknown_id
from finetune.model_files.vocabulary import add_tokens
from finetune.parts.data import DataPlan
from finetune.parts.objectives import GENERATE
from finetune.parts.rows import implementation
from finetune.system.files import replace
from finetune.system.json_files import JsonFileError, read_json
from finetune.system.terminal import clean, columns_of, say

NOTE = "  note: "
SAMPLES = 3
BINS = 10
BAR = 40
BESIDE_BAR = 22  # columns of its length and number
REMEDIES = {
    "dropped_empty": "fill in the answers, or remove the rows",
    "duplicates": "remove all but one of each",
    "contradictory": "keep the answer that is right, unless several are meant",
    "in validation": "remove them from the training rows, or the validation loss shows memory",
    "in score": "remove them from the training rows, or exact match shows memory",
    "no end": "answers without an end token never stop; use a tokenizer with an EOS token",
    "double BOS": "remove the BOS text from the rows or the template",
    "unknown": "what is learned there is the unknown token; use a model whose tokenizer has these letters",
    **dict.fromkeys(CUTS, "raise --context_length, or choose another --overlong"),
}
WORDS = {
    **CUTS,
    "dropped_empty": "rows without an answer to learn",
    "duplicates": "rows that repeat an earlier one, token for token",
    "contradictory": "rows whose prompt has another answer in an earlier row",
    "in validation": "training rows that are validation rows too",
    "in score": "training rows that are scored too",
    "no end": "rows whose last target is not an end token",
    "double BOS": "rows that begin with two BOS tokens",
    "unknown": "rows with text that the tokenizer has no token for",
}


def lines_of(
    plan: DataPlan, files: ModelFiles, tokenizer_folder: Path | None = None, report: str | None = None
) -> list[str]:
    """The preview, cleaned; written to --data_report as JSON too. `tokenizer_folder`: of the run's, if that is not the
    model's. Raises PlanError for what a run would refuse.
    """
    names = [s.name for name, _ in DATASETS.values() if getattr(plan, name) for s in named_sources(plan, name)]
    remote = [name for name in names if not is_local(name)]
    if remote and (problem := hub_unreachable()):
        return [f"data: {remote[0]} is not read by a dry run, as it is not on this disk ({problem})"]
    if report:
        _check_report(Path(report))
    folder = tokenizer_folder or files.tokenizer_folder
    tokenizer: PlainTokenizer | FullTokenizer | None
    if plan.images:  # whose processor is transformers'
        tokenizer = load_tokenizer(folder)
    else:
        tokenizer = tokenizer_of_folder(folder)
    if tokenizer is None:
        return [f"data: not read, as {folder} has no tokenizer"]
    add_tokens(tokenizer, plan.new_tokens)
    try:
        content = preview(plan, tokenizer, files)
    except NotReadError as error:
        return [f"data: not read by a dry run, as {error}"]
    if report:
        _write(Path(report), content)
    return [clean(line) for line in text_of(content)]


def preview(plan: DataPlan, tokenizer: Tokenizer, files: ModelFiles) -> dict:
    """The preview as JSON."""
    vocab_size = ModelShape.from_config(files.config).with_vocabulary(files).vocab_size
    raw_datasets = read_datasets(plan)
    settled: Changes = {}
    if all(read.raw.about is None for reads in raw_datasets.values() for read in reads):  # not the first rows alone
        settled = settled_by_rows(plan, raw_datasets)
    templates = prepare_template(tokenizer, plan, partial(rows_of, raw_datasets))
    found = {}
    with images_of(plan, files, tokenizer) as images:
        for use, reads in raw_datasets.items():
            limits = Limits(cut_of(plan, use), plan.train_on_prompt and use == "train", vocab_size)
            datasets = [tokenized_once(read, tokenizer, limits, say=say, images=images) for read in reads]
            found[use] = joined_datasets(datasets, [(str(r.source), r.source.weight) for r in reads]), datasets, reads
    train = found["train"][0]
    learned = train
    if plan.validation_split and "validation" not in found and not plan.streaming:
        learned = train.select(train.split(plan.validation_split, plan.seed)[0])
    check_mismatches(plan, learned)
    notices = implementation(plan.source).check_rows(plan, learned, tokenizer, special_ids(tokenizer))
    return {
        "datasets": [
            {
                "use": use,
                "name": str(read.source),
                "weight": read.source.weight,
                "description": dataset.description,
                **{name: int(n) for name, n in dataset.counts.items()},
                "notices": list(dataset.notices),
                "skipped": list(dataset.skipped),
            }
            for use, (_, datasets, reads) in found.items()
            for dataset, read in zip(datasets, reads, strict=True)
        ],
        "templates": [*settled_lines(settled), *templates, *notices],
        "samples": [
            {"source": train.row_source(i), "text": render_row(train, i, tokenizer, color=False)}
            for i in range(min(SAMPLES, train.num_rows))
        ],
        "lengths": {"of": "answer with its prompt" if train.documents_per_row == 2 else "row"}
        | histogram(train.full_lengths),
        "lost": train.lost(),
        "lint": lint(tokenizer, {use: joined for use, (joined, _, _) in found.items()}),
    }


def histogram(lengths: np.ndarray) -> dict:
    """Quantiles of the documents' lengths, and how many are in each of at most BINS equal bins."""
    most = max(1, int(lengths.max()))
    counts, edges = np.histogram(lengths, min(BINS, most), (0, most))
    quantiles = {f"p{q}": int(np.percentile(lengths, q)) for q in (50, 95, 99)}
    return quantiles | {
        "max": int(lengths.max()),
        "bins": [[int(np.ceil(e)), int(n)] for e, n in zip(edges[1:], counts, strict=True)],
    }


def lint(tokenizer: Tokenizer, datasets: dict[str, TokenizedDataset]) -> list[dict]:
    """Oddities of the rows: each with its number, first place and remedy."""
    train = datasets["train"]
    found = []

    def add(check: str, count: int, first: str) -> None:
        found.append({"check": check, "what": WORDS[check], "count": count, "first": first, "remedy": REMEDIES[check]})

    for check in ("dropped_empty", *CUTS):
        if train.counts[check] and check != "split":
            add(check, train.counts[check], train.first.get(check, train.sources[0]))
    digests = [row_digest(train, i) for i in range(train.num_rows)]
    seen = set()
    again = []
    labels = [train.arrays[name].values for name in (LABEL, DESIRABLE) if name in train.arrays]
    for i, digest in enumerate(digests):
        row = (digest, *(int(of_rows[i]) for of_rows in labels))
        if row in seen:
            again.append(i)
        seen.add(row)
    rows_where = {"duplicates": again}
    if train.task == GENERATE:
        rows_where |= {"contradictory": _answered_before(train)}
    elif LABEL in train.arrays:
        rows_where |= {"contradictory": _labelled_before(train, digests)}
    for use in ("validation", "score"):
        if use in datasets:
            other = {row_digest(datasets[use], i) for i in range(datasets[use].num_rows)}
            rows_where[f"in {use}"] = [i for i, digest in enumerate(digests) if digest in other]
    if train.task == GENERATE:
        rows_where |= _odd_ends(train, tokenizer)
    rows_where |= {"unknown": _unknown(train, tokenizer)}
    for check, rows in rows_where.items():
        if rows:
            add(check, len(rows), train.row_source(rows[0]))
    for text, count in train.noted.items():
        if "by the chat template" in text:
            remedy = "look at the sample; another model's template may render it"
            found.append(dict(check="template", what=text, count=count, first=train.first[text], remedy=remedy))
    return found


def _labelled_before(train: TokenizedDataset, digests: list[bytes]) -> list[int]:
    """Rows with a text that has another label before."""
    first: dict[bytes, int] = {}
    labels = train.arrays[LABEL].values
    return [i for i, digest in enumerate(digests) if first.setdefault(digest, int(labels[i])) != labels[i]]


def _unknown(train: TokenizedDataset, tokenizer: Tokenizer) -> list[int]:
    """Rows with text that the tokenizer has no token for."""
    places = np.flatnonzero(train.tokens == unknown_id(tokenizer))
    documents = np.searchsorted(train.offsets, places, side="right") - 1
    return list(dict.fromkeys((documents // train.documents_per_row).tolist()))


def special_ids(tokenizer: Tokenizer) -> set[int]:
    """The tokenizer's special tokens."""
    named = {tokenizer.backend_tokenizer.token_to_id(text) for text in tokenizer.all_special_tokens}
    return named | {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}


def _odd_ends(train: TokenizedDataset, tokenizer: Tokenizer) -> dict[str, list[int]]:
    """Documents with a doubled BOS, and documents whose last target is not an end token."""
    special = special_ids(tokenizer)
    bos = tokenizer.bos_token_id
    double = []
    unended = []
    each = train.documents_per_row
    cut = train.counts["answer_truncated"] + train.counts["end_truncated"] + train.counts["split"]
    for i in range(len(train)):
        ids, is_target = train.document(i)
        if bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
            double.append(i // each)
        if not cut and int(ids[np.flatnonzero(is_target)[-1]]) not in special:
            unended.append(i // each)
    return {name: list(dict.fromkeys(rows)) for name, rows in {"double BOS": double, "no end": unended}.items()}


def _answered_before(dataset: TokenizedDataset) -> list[int]:
    """Rows whose first prompt an earlier row has with another answer. Preference pairs, of two documents, have none."""
    if dataset.documents_per_row > 1:
        return []
    answers: dict[bytes, np.ndarray] = {}
    again = []
    for i in range(dataset.num_rows):
        ids, is_target = dataset.document(i)
        start = int(np.argmax(is_target))
        end = start + int(np.argmin(np.append(is_target[start:], False)))
        if start > 1:  # a text's first token is no prompt, only predicted by nothing
            prompt = hashlib.blake2b(ids[:start].tobytes() + dataset.images_of(i).tobytes(), digest_size=16).digest()
            if not np.array_equal(answers.setdefault(prompt, ids[start:end]), ids[start:end]):
                again.append(i)
    return again


def row_digest(dataset: TokenizedDataset, row: int) -> bytes:
    """A digest that rows of the same tokens, targets and images have."""
    each = dataset.documents_per_row
    hasher = hashlib.blake2b(digest_size=16)
    for i in range(row * each, (row + 1) * each):
        for array in (*dataset.document(i), dataset.images_of(i)):
            hasher.update(array.tobytes())
    return hasher.digest()


# ------ as text


def text_of(content: dict) -> list[str]:
    """The lines of the preview."""
    lines = [""]
    for d in content["datasets"]:
        weight = ""
        if d["weight"]:
            weight = f" (weight {d['weight']:g})"
        rows = f"{d['rows']:,} row{'s' * (d['rows'] != 1)}"
        counts = f"{rows}, {d['tokens']:,} tokens, {d['targets']:,} targets"
        lines.append(f"data, {d['use']}{weight}: {d['description']}: {counts}")
        lines += [NOTE + line for line in d["notices"]] + [f"  skipped: {line}" for line in d["skipped"][:10]]
    said = [line for line in (*content["templates"], content["lost"]) if line]
    lines += [line if line.startswith(NOTE) else NOTE + line for line in said]
    lengths = content["lengths"]
    lines.append(
        f"tokens per {lengths['of']}: p50 {lengths['p50']:,}, p95 {lengths['p95']:,}, p99 {lengths['p99']:,}, max "
        f"{lengths['max']:,}"
    )
    most = max(n for _, n in lengths["bins"])
    bar = min(BAR, max(1, (columns_of(sys.stdout) or 80) - BESIDE_BAR))
    lines += [f"  to {edge:>7,} {'#' * -(-bar * n // most)} {n:,}" for edge, n in lengths["bins"]]
    for sample in content["samples"]:
        lines += [f"{sample['source']}:", *sample["text"].splitlines()]
    for entry in content["lint"]:
        lines.append(f"check: {entry['what']} ({entry['count']:,}), first {entry['first']}: {entry['remedy']}")
    if content["lint"]:
        return lines
    noted = sum(len(d["notices"]) for d in content["datasets"])
    beside = f" beside the note{'s' * (noted > 1)} above" if noted else ""
    return [*lines, f"check: no problems found{beside}"]


def _check_report(path: Path) -> None:
    """Raises PlanError for a file that no dry run wrote: only a report is replaced."""
    try:
        read_json(path, {"datasets": [dict], "samples": [dict], "lint": [dict]})
    except FileNotFoundError:
        return
    except JsonFileError:
        raise PlanError(f"--data_report {path}: exists and is no such report. Give another file.") from None


def _write(path: Path, content: dict) -> None:
    try:
        with replace(path) as file:
            file.write((json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "replace"))
    except OSError as error:
        raise PlanError(f"--data_report {path}: cannot be written ({error.strerror}). Give another file.") from None
