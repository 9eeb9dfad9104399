"""The names of labels, which are settled when the rows were read and before anything is loaded."""

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


def with_labels(plan: RunPlan, datasets: dict[str, list[DatasetSource]], say: Callable[[str], object]) -> RunPlan:
    """The plan with the names of the labels in the training rows, which the datasets are read with from here on. Every
    row's label is checked. Raises PlanError.
    """
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
