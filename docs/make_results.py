"""Draws docs/results.svg from the table of docs/results.md: `python docs/make_results.py`. The test suite checks that
it was run.
"""

import re
from pathlib import Path
from xml.sax.saxutils import escape

DOCS = Path(__file__).parent
PAGE, PICTURE = DOCS / "results.md", DOCS / "results.svg"
CELL = re.compile(r"([\d.]+) \[([\d.]+)\.\.([\d.]+)\]")
# Per column of the table: its heading in the picture, the largest ratio drawn, and the colour.
PANELS = (
    ("speed, higher is better", 2.5, "#1f77b4"),
    ("peak memory, lower is better", 1.25, "#2ca02c"),
    ("time to first step, lower is better", 1.25, "#9467bd"),
)
LABELS, PANEL, GAP, TOP, ROW, BAR = 130, 190, 24, 34, 30, 16


def rows() -> list[tuple[str, list[tuple[float, float, float]]]]:
    """(name, (median, least, most) of each column) of each row of the table."""
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [tuple(map(float, cell)) for cell in CELL.findall(line)]
        if line.startswith("| ") and len(cells) == len(PANELS):
            found.append((line.split("|")[1].strip().removesuffix(", TRL with bitsandbytes"), cells))
    return found


def picture() -> str:
    """The SVG: a panel per column, a bar per row, its range as a thin line, and a line at 1, which is TRL."""
    table = rows()
    width = LABELS + len(PANELS) * (PANEL + GAP)
    height = TOP + ROW * len(table) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11" role="img">',
        "<title>Ratios to TRL 1.16 on the same rows, on a CPU</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    parts += [text(LABELS - 10, TOP + ROW * i + 15, name, "end") for i, (name, _) in enumerate(table)]
    for column, (heading, largest, colour) in enumerate(PANELS):
        parts += panel(LABELS + column * (PANEL + GAP), heading, largest, colour, [cells[column] for _, cells in table])
    note = "1 is TRL 1.16; medians of three runs with their range, one thread of an AMD EPYC"
    return "\n".join([*parts, text(LABELS, height - 6, note, "start"), "</svg>"]) + "\n"


def panel(left: int, heading: str, largest: float, colour: str, cells: list[tuple[float, float, float]]) -> list[str]:
    def at(ratio: float) -> float:
        return left + PANEL * ratio / largest

    parts = [text(left, 18, heading, "start")]
    for i, (median, least, most) in enumerate(cells):
        y = TOP + ROW * i
        length = at(median) - left
        parts.append(f'<rect x="{left}" y="{y + 3}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>')
        parts.append(line(at(least), y + 11, at(most), y + 11, "#222"))
        parts.append(text(left + 5, y + 15, f"{median:.2f}", "start", "white"))
    bottom = TOP + ROW * len(cells)
    return [
        *parts,
        line(at(1), TOP - 6, at(1), bottom, "#d62728"),
        text(at(1), bottom + 11, "TRL", "middle", "#d62728"),
    ]


def text(x: float, y: float, words: str, anchor: str, colour: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'


def line(x: float, y: float, to_x: float, to_y: float, colour: str) -> str:
    return f'<line x1="{x:.1f}" y1="{y}" x2="{to_x:.1f}" y2="{to_y}" stroke="{colour}"/>'


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
