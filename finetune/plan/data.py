"""The plan's rules for data: what can be refused of its flags before a file is read."""

from finetune.data.columns import parse_columns, parse_names
from finetune.errors import PlanError
from finetune.plan.draft import Draft


def data_flags(draft: Draft) -> None:
    """Flags about columns and long rows that contradict themselves."""
    values = draft.values
    columns, ignored = parse_columns(values["columns"]), parse_names(values["ignore_columns"])
    both = [column for column in columns.values() if column.casefold() in ignored]
    if both:
        raise PlanError(f"--ignore_columns {both[0]}: --columns uses it. Give it to one of them.")
    overlap, length = values["window_overlap"], values["context_length"]
    if overlap and values["overlong"] not in ("auto", "split"):
        raise PlanError(
            f"--window_overlap {overlap}: --overlong {values['overlong']} makes no windows. Omit one of them."
        )
    if overlap > length // 2:
        raise PlanError(
            f"--window_overlap {overlap}: must be at most half of --context_length {length}. Use {length // 2} or less."
        )
