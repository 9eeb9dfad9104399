"""Settings of a head that the rows settle before anything is loaded: names of labels, and if texts have negatives."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from finetune.data.columns import Row, RowReader
from finetune.data.head_rows import texts_of
from finetune.data.labels import are_numbers, checked_names, label_of, shown
from finetune.data.prepare import DatasetSource
from finetune.data.reading.mixture import dataset_words
from finetune.errors import PlanError
from finetune.parts.objectives import EMBED
from finetune.plan.run_plan import RunPlan

Label = TypeVar("Label", str, int)


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


def settled_by_rows(plan: RunPlan, datasets: dict[str, list[DatasetSource]], say: Callable[[str], object]) -> RunPlan:
    """The plan with what the rows settle of a head: of --task classify the names of the labels in the training rows.
    The datasets are read with it from here on, and every row is checked. Raises PlanError.
    """
    if plan.data.task == EMBED:
        return with_negatives(plan, datasets, say)
    if plan.data.task != "classify":
        return plan
    names = plan.objective.labels
    if not names:
        names = checked_names(counted(datasets["train"], label_of), f"--dataset {dataset_words(plan.data.dataset)}")
        order = "sorted as numbers" if are_numbers(names) else "sorted"
        reason = f"the {len(names):,} labels of the training rows, {order}"
        say(f"label_names: {shown(names)} ({reason})")
        plan = plan.changed({"label_names": (list(names), reason)})
    for reads in datasets.values():
        for read in reads:
            read.options = replace(read.options, label_names=names)
        counted(reads, checked_number)
    return plan


def with_negatives(plan: RunPlan, datasets: dict[str, list[DatasetSource]], say: Callable[[str], object]) -> RunPlan:
    """The plan with --hard_negatives as the rows of --task embed have some. Raises PlanError where only some have."""
    word = plan.data.hard_negatives
    if word == "auto":
        having = counted(datasets["train"], lambda row: int(row.get("negative") is not None))
        word = "true" if having[1] and not having[0] else "false"
        if having[0] and having[1]:
            raise PlanError(
                f"--dataset {dataset_words(plan.data.dataset)}: {having[1]:,} of {having.total():,} rows have a "
                "negative. Give each row one, or --hard_negatives false."
            )
        reason = "each training row has one" if word == "true" else "no training row has one"
        plan = plan.changed({"hard_negatives": (word, reason)})
        say(f"hard_negatives: {word} ({reason})")
    for reads in datasets.values():
        for read in reads:
            read.options = replace(read.options, negatives=word == "true")
        counted(reads, lambda row: len(texts_of(row)))
    return plan
