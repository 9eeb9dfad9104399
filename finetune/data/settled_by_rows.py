"""Settings of a head that the rows settle before anything is loaded: names of labels, and if texts have negatives."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from finetune.data.columns import Row, RowReader
from finetune.data.head_rows import texts_of
from finetune.data.labels import are_numbers, checked_names, label_of, notes_on, shown
from finetune.data.prepare import DatasetSource
from finetune.data.reading.mixture import dataset_words
from finetune.data.sampler import num_held_out
from finetune.errors import PlanError
from finetune.parts.data import DataPlan
from finetune.parts.objective import names_in
from finetune.parts.objectives import CLASSIFY, EMBED

Label = TypeVar("Label", str, int)
Changes = dict[str, tuple[Any, str]]  # {setting: (value, reason)}


def counted(reads: Iterable[DatasetSource], work: Callable[[Row], Label]) -> Counter[Label]:
    """Counts what `work` gives of each row. Rows that it refuses are left out where --skip_bad_rows allows some, and
    named where they are tokenized. Raises PlanError.
    """
    found: Counter[Label] = Counter()
    for read in reads:
        reader = RowReader(read.options, read.raw.columns)
        for row, source in zip(read.raw.rows, read.raw.sources, strict=True):
            try:
                found[work(reader.read(row, source))] += 1
            except PlanError:
                if not read.raw.skip_bad_rows:
                    raise
    return found


def checked_number(row: Row) -> int:
    """The number of a row's label, of a row that has a text too. Raises PlanError."""
    ((_, number),) = texts_of(row)
    return number


def has_negative(row: Row) -> int:
    """1 for a row with a negative text, else 0."""
    return int(row.get("negative") is not None)


def settled_by_rows(plan: DataPlan, datasets: dict[str, list[DatasetSource]]) -> Changes:
    """Settings that the rows settle of a head: names of the labels in the training rows, or if texts have negatives.
    The datasets are read with it from here on, and every row is checked. Raises PlanError.
    """
    if plan.task == EMBED:
        return _negatives(plan, datasets)
    if plan.task == CLASSIFY:
        return _labels(plan, datasets)
    return {}


def _labels(plan: DataPlan, datasets: dict[str, list[DatasetSource]]) -> Changes:
    found: Changes = {}
    names = names_in(plan.class_names)
    if not names:
        names = checked_names(counted(datasets["train"], label_of), f"--dataset {dataset_words(plan.dataset)}")
        order = "sorted as numbers" if are_numbers(names) else "sorted"
        found["class_names"] = (list(names), f"the {len(names):,} labels of the training rows, {order}")
    for reads in datasets.values():
        for read in reads:
            read.options = replace(read.options, class_names=names)
        counted(reads, checked_number)
    return found


def _negatives(plan: DataPlan, datasets: dict[str, list[DatasetSource]]) -> Changes:
    found: Changes = {}
    word = plan.hard_negatives
    if word == "auto":
        having = counted(datasets["train"], has_negative)
        if having[0] and having[1]:
            raise PlanError(
                f"--dataset {dataset_words(plan.dataset)}: {having[1]:,} of {having.total():,} rows have a negative. "
                "Give each row one, or --hard_negatives false."
            )
        word = "true" if having[1] else "false"
        found["hard_negatives"] = (word, "each training row has one" if having[1] else "no training row has one")
    num_rows = {}
    for use, reads in datasets.items():
        for read in reads:
            read.options = replace(read.options, negatives=word == "true")
        positives = counted(reads, _positive)
        num_rows[use] = positives.total()
        if word == "false" and use != "train" and len(positives) == 1 and num_rows[use] > 1:
            raise PlanError(
                f"--{use}_dataset: all of its {num_rows[use]} pairs have one positive, so the loss stays, whatever "
                "is learned. Give pairs with others."
            )
    if word == "false":
        _check_held_out(plan, num_rows)
    return found


def _positive(row: Row) -> int:
    """A number of the positive of a row, whose texts are checked."""
    _, (positive, _), *_ = texts_of(row)
    return hash(str(positive.values))


def _check_held_out(plan: DataPlan, num_rows: dict[str, int]) -> None:
    """Raises PlanError for one pair that is held out: its loss is 0 and its recall 1, whatever the model is."""
    held_out = {f"--{use}_dataset": num_rows[use] for use in ("validation", "score") if use in num_rows}
    if plan.validation_split and "validation" not in num_rows:
        held_out[f"--validation_split {plan.validation_split:g}"] = num_held_out(
            num_rows["train"], plan.validation_split
        )
    for flag, rows in held_out.items():
        if rows == 1:
            raise PlanError(
                f"{flag}: is 1 pair, whose positive is told from no other: its loss is 0 whatever is learned. Hold "
                "out two or more, or none."
            )


def settled_lines(changes: Changes) -> list[str]:
    """The changes as a run prints them, and what is to be noted of them."""
    found = []
    for name, (used, why) in changes.items():
        if isinstance(used, list):
            found += [f"{name}: {shown(used)} ({why})", *(f"  note: {note}" for note in notes_on(used))]
        else:
            found.append(f"{name}: {used} ({why})")
    return found
