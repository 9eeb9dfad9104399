"""JSON objects that hold a table: as pandas and others write one, by rows, by columns or with its names apart."""

from collections.abc import Callable

from finetune.data.reading.rows import check_no_repeated


def rows_of_table(value: dict, where: str) -> list[dict] | None:
    """The rows of an object that holds a table; None if it is none. Raises PlanError for two columns of one name."""
    if _split(value) is not None:
        check_no_repeated(value["columns"], where)
    return next((rows for read in FORMS if (rows := read(value)) is not None), None)


def _split(value: dict) -> list[dict] | None:
    """{"columns": [...], "data": [[...], ...]}"""
    names = value.get("columns")
    rows = value.get("data")
    if not isinstance(names, list) or not isinstance(rows, list) or not set(value) <= {"columns", "data", "index"}:
        return None
    if not all(isinstance(row, list) and len(row) == len(names) for row in rows):
        return None
    return [dict(zip(map(str, names), row, strict=True)) for row in rows]


def _by_label(value: dict) -> list[dict] | None:
    """{"question": {"0": ...}, "answer": {"0": ...}} or {"0": {"question": ..., "answer": ...}}"""
    inner = list(value.values())
    if not inner or not all(isinstance(part, dict) and part.keys() == inner[0].keys() for part in inner):
        return None
    if inner[0] and all(map(str.isdigit, inner[0])):
        return [{name: part[label] for name, part in value.items()} for label in inner[0]]
    return inner if all(map(str.isdigit, value)) else None


def _by_list(value: dict) -> list[dict] | None:
    """{"question": [...], "answer": [...]}, of texts: other lists are a row's."""
    lists = list(value.values())
    if len(lists) < 2 or not all(isinstance(part, list) and len(part) == len(lists[0]) > 1 for part in lists):
        return None
    if not all(isinstance(cell, str) for part in lists for cell in part):
        return None
    return [dict(zip(value, row, strict=True)) for row in zip(*lists, strict=True)]


FORMS: tuple[Callable[[dict], list[dict] | None], ...] = (_split, _by_label, _by_list)
