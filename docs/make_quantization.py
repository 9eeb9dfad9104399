"""Writes the tables of docs/quantization.md: the methods, and the result of each pair's probe on this machine.

python docs/make_quantization.py
"""

import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import quantization_wrapper  # noqa: E402
from backend_manager import BackendManager  # noqa: E402
from finetune.backend import doctor  # noqa: E402

PAGE = ROOT / "docs" / "quantization.md"
BEGIN, END = "<!-- {}: written by docs/make_quantization.py -->", "<!-- end of {} -->"


def between(page: str, name: str, lines: list[str]) -> str:
    """The page with these lines in the section marked `name`."""
    begin, end = BEGIN.format(name), END.format(name)
    head, rest = page.split(begin)
    return head + "\n".join([begin, "", *lines, "", end]) + rest.split(end)[1]


def methods() -> list[str]:
    """The table of METHODS as Markdown lines."""
    flags = ("quantization_backend", "n_bits", "quant_type", "group_size", "double_quant")
    head = [*(f"`--{flag}`" for flag in flags), "needs", "what it is"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, m in quantization_wrapper.METHODS.items():
        books = sorted({book for books in m.quant_types.values() for book in books})
        groups = f"{m.group_sizes[0]} to {m.group_sizes[-1]}"
        double = ", ".join(map(str, m.double_quant)) + " bits" if m.double_quant else "no"
        bits, types = ", ".join(map(str, sorted(m.bits))), ", ".join(f"`{b}`" for b in books)
        row = (f"`{name}`", bits, types, groups, double, m.package or "torch alone", m.summary)
        lines.append("| " + " | ".join(row) + " |")
    return lines


def probed() -> list[str]:
    """The result of every (method, bits) pair's probe as Markdown lines; failures are listed below the table."""
    manager = BackendManager(verbose=False) if len(sys.argv) < 2 else BackendManager(sys.argv[1], verbose=False)
    found = doctor.examine(manager)
    torch, cpu = found["versions"]["torch"], found["cpu"]["model"]
    where = cpu if found["backend"] == "cpu" else found["backend"]
    lines = [f"Probed {date.today()} on {found['backend']} ({where}), torch {torch}:", ""]
    lines += ["| " + " | ".join(doctor.HEAD) + " |", "|" + "---|" * len(doctor.HEAD)]
    lines += ["| " + " | ".join(row) + " |" for row in doctor.rows(found["quantization"])]
    failed = {pair: p["error"] for pair, p in found["quantization"].items() if p["error"]}
    return lines + [""] * bool(failed) + [f"- `{pair}` fails: {why}" for pair, why in failed.items()]


if __name__ == "__main__":
    page = between(PAGE.read_text(), "methods", methods())
    PAGE.write_text(between(page, "probed", probed()))
    print(f"wrote {PAGE}")
