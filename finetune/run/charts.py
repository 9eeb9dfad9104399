"""Line and bar charts as SVG for a page without scripts, drawn by pygal: they take the page's own colors."""

import math
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from backend_manager import package_version
from finetune.system.terminal import clean

POINTS = 240  # of a line; more are averaged
TABLE_ROWS = 60
COLORS = 8  # of the page's stylesheet, --c0 on
NO_AXIS = 100  # added to logarithms, as pygal draws an axis at position 0
WIDTH = 480
HEIGHT = 270
DASHES = ("", "7, 3", "2, 3", "9, 3, 2, 3")


@dataclass(frozen=True)
class Line:
    """`points`: (step, value). `dots`: each is drawn, as of evaluations, between which nothing is measured."""

    name: str
    points: list[tuple[float, float]]
    dots: bool = False

    @property
    def is_joined(self) -> bool:
        """False for one or two evaluations: a line between them would look like a curve."""
        return len(self.points) > 2 or not self.dots


@dataclass(frozen=True)
class Chart:
    """A figure with its numbers as a table. `bars`: (label, value) in the place of lines. `can_be_logarithmic`: where
    the values are positive and span more than a decade, the axis is.
    """

    title: str
    lines: list[Line] = field(default_factory=list)
    unit: str = ""
    bars: list[tuple[str, float]] = field(default_factory=list)
    can_be_logarithmic: bool = False

    @cached_property
    def is_logarithmic(self) -> bool:
        values = [value for line in self.lines for _, value in line.points]
        return self.can_be_logarithmic and bool(values) and min(values) > 0 and max(values) > 10 * min(values)

    def __bool__(self) -> bool:
        return bool(self.bars) or any(line.points for line in self.lines)


@dataclass(frozen=True)
class Table:
    """Rows that begin with a header each. `links`: {such a header: the address that it links to}."""

    head: list[str]
    rows: list[list[str]]
    caption: str = ""
    links: dict[str, str] = field(default_factory=dict)


def can_draw() -> bool:
    return package_version("pygal") is not None


def dashes(index: int) -> str:
    """Dashes of the line with this number, as SVG has them."""
    return DASHES[index % len(DASHES)]


def svg(chart: Chart) -> str:
    """The SVG element. Its text is in the page's font and colors; it has no script."""
    import pygal
    from pygal.style import Style

    names = [f"var(--c{i % COLORS})" for i in range(max(1, len(chart.lines)))]
    style = Style(
        background="transparent",
        plot_background="transparent",
        foreground="var(--ink)",
        foreground_strong="var(--ink)",
        foreground_subtle="var(--line)",
        guide_stroke_color="var(--line)",
        major_guide_stroke_color="var(--line)",
        colors=tuple(names),
        value_colors=("var(--ink)",) * len(names),
        font_family="inherit",
        label_font_size=14,
        major_label_font_size=14,
        opacity="1",
        stroke_opacity="1",
        stroke_width="2",
        transition="none",
    )
    size = dict(width=WIDTH, height=HEIGHT, margin=6, margin_right=14, style=style, js=[], print_values=False)
    if chart.bars:
        drawn = pygal.Bar(**size, show_legend=False, x_label_rotation=0, truncate_label=-1)
        drawn.x_labels = [label for label, _ in chart.bars]
        drawn.y_labels = axis_labels([0.0, *(value for _, value in chart.bars)])
        drawn.add(chart.title, [value for _, value in chart.bars])
    else:
        drawn = pygal.XY(
            **size,
            show_legend=False,
            show_x_guides=False,
            dots_size=3,
            x_value_formatter=lambda x: f"{x:,.0f}",
            value_formatter=lambda y: number(_unscaled(y, chart)),
        )
        points = [[(x, _scaled(y, chart)) for x, y in thinned(line.points)] for line in chart.lines]
        drawn.x_labels = axis_labels([x for line in points for x, _ in line])
        drawn.y_labels = axis_labels([y for line in points for _, y in line], chart.is_logarithmic)
        for i, line in enumerate(chart.lines):
            if dashes(i):
                stroke = {"width": 2, "dasharray": dashes(i)}
            else:
                stroke = {"width": 2}
            has_dots = line.dots or len(line.points) == 1
            drawn.add(line.name, points[i], show_dots=has_dots, stroke=line.is_joined, stroke_style=stroke)
    drawn.add_xml_filter(lambda root: _plain(root, _said(chart)))
    text = drawn.render(is_unicode=True, disable_xml_declaration=True)
    return re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)  # which HTML knows itself


def _scaled(value: float, chart: Chart) -> float:
    """Position of a value on its axis. pygal's own logarithmic scale is for both axes, and steps begin at 0."""
    if chart.is_logarithmic:
        return math.log10(value) + NO_AXIS
    return value


def _unscaled(position: float, chart: Chart) -> float:
    if chart.is_logarithmic:
        return 10 ** (position - NO_AXIS)
    return position


def axis_labels(positions: list[float], logarithmic: bool = False) -> list[float]:
    """Positions of an axis's labels: both ends, and round values between them where there is room. `logarithmic`: the
    positions are logarithms.
    """
    low = min(positions)
    high = max(positions)
    if low == high:
        return [low]
    if logarithmic:
        exponents = range(math.floor(low), math.ceil(high) + 1)
        between = [float(exponent) for exponent in exponents]
        if high - low < 2:
            between = [exponent + math.log10(digit) for exponent in exponents for digit in (1, 2, 5)]
    else:
        rough = (high - low) / 5
        size = 10.0 ** math.floor(math.log10(rough))
        every = next(size * digit for digit in (1, 2, 5, 10) if size * digit >= rough)
        between = [every * i for i in range(math.ceil(low / every), math.floor(high / every) + 1)]
    room = 0.09 * (high - low)
    return [low, *(position for position in between if low + room < position < high - room), high]


def _plain(root: Any, label: str):
    """The element without scripts, with a label; values become the titles that browsers show over a dot."""
    root.set("role", "img")
    root.set("aria-label", clean(label))
    for parent in root.iter():
        for child in list(parent):
            if callable(child.tag) or child.tag.endswith("script"):  # a comment's tag is what made it
                parent.remove(child)
    for group in root.iter():
        if "dots" in (group.get("class") or "").split():
            value = next((d.text for d in group if str(d.tag).endswith("desc") and d.get("class") == "value"), None)
            title = group.makeelement("title", {})
            title.text = value or ""
            group.insert(0, title)
    return root


def _said(chart: Chart) -> str:
    """The chart in words: where each line begins and ends."""
    if chart.bars:
        return f"{chart.title}: a bar chart, as a table below"
    scale = ""
    if chart.is_logarithmic:
        scale = ", on a logarithmic axis"
    parts = [
        f"{line.name} from {number(line.points[0][1])} at step {line.points[0][0]:g} "
        f"to {number(line.points[-1][1])} at step {line.points[-1][0]:g}"
        for line in chart.lines
        if line.points
    ]
    return f"{chart.title}{scale}: {'; '.join(parts)}. As a table below"


def thinned(points: list[tuple[float, float]], most: int = POINTS) -> list[tuple[float, float]]:
    """The points, averaged in equal groups of neighbours down to at most `most`."""
    if len(points) <= most:
        return points
    edges = [round(i * len(points) / most) for i in range(most + 1)]
    groups = [points[a:b] for a, b in zip(edges[:-1], edges[1:], strict=True)]
    return [(group[-1][0], sum(v for _, v in group) / len(group)) for group in groups]


def chart_table(chart: Chart) -> Table:
    """The numbers: of long lines every n-th, and the last."""
    if chart.bars:
        return Table([chart.unit or "bar", "number"], [[label, number(value)] for label, value in chart.bars])
    steps = sorted({step for line in chart.lines for step, _ in line.points})
    every = -(-len(steps) // TABLE_ROWS)
    shown = sorted({*steps[::every], *steps[-1:]})
    values = [dict(line.points) for line in chart.lines]
    body = [[f"{step:,.0f}", *(number(v[step]) if step in v else "" for v in values)] for step in shown]
    return Table(["step", *(line.name for line in chart.lines)], body)


def number(value: float) -> str:
    """A number in few digits."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-4:
        return f"{value:.2e}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
