"""Curves as an SVG, without a plotting library."""

from xml.sax.saxutils import escape

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 400, 60, 210, 20, 50
TICKS = 5


def line_chart(lines: dict[str, list[list[tuple]]], x_label: str, y_label: str, y_range: tuple | None = None) -> str:
    """`lines`: {name: curves of (x, y)}; the curves of one name share a colour, one per seed."""
    points = [p for curves in lines.values() for curve in curves for p in curve]
    largest = max(x for x, _ in points)
    low, high = y_range or (min(y for _, y in points), max(y for _, y in points))

    def at(x, y):
        across = LEFT + (WIDTH - LEFT - RIGHT) * x / largest
        return f"{across:.1f},{TOP + (HEIGHT - TOP - BOTTOM) * (high - min(max(y, low), high)) / (high - low):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    ]
    for i in range(TICKS + 1):
        x, y = largest * i / TICKS, low + (high - low) * i / TICKS
        across, up = at(x, low).split(",")[0], at(0, y).split(",")[1]
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up}" y2="{up}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{float(up) + 4:.1f}" text-anchor="end">{y:.4g}</text>')
        parts.append(f'<text x="{across}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x:.0f}</text>')
    for i, (name, curves) in enumerate(lines.items()):
        colour = COLOURS[i % len(COLOURS)]
        for curve in curves:
            path = " ".join(at(*point) for point in curve)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        y = TOP + 14 + 18 * i
        parts.append(f'<rect x="{WIDTH - RIGHT + 12}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 28}" y="{y}">{escape(name)}</text>')
    middle = (WIDTH - RIGHT + LEFT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(f'<text x="14" y="{HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 14 {HEIGHT / 2})">')
    return "\n".join([*parts, f"{escape(y_label)}</text></svg>"]) + "\n"
