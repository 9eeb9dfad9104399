"""The live curve of a run in a Jupyter notebook, and its page below it when it has ended."""

import html
import sys
import time
from typing import Any

from finetune.run.charts import Chart, Line, can_draw, svg

REDRAW_S = 1.0
COLORS = "--ink:currentColor;--line:#8886;--c0:#3b82c4;--c1:#d0642a"  # that show on light and dark notebooks


def in_notebook() -> bool:
    """True if this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = None
    if ipython:
        shell = ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


class NotebookCurve:
    """One output of the cell, drawn again at most once in REDRAW_S: the losses so far, above the last step."""

    def __init__(self):
        from IPython.display import display

        self.training = Line("training", [])
        self.held_out = Line("held-out rows", [], dots=True)
        self.text = ""
        self.drawn_at = 0.0
        self.handle: Any = display({"text/plain": ""}, raw=True, display_id=True)

    def step(self, step: int, loss: float | None, text: str) -> None:
        if loss is not None:
            self.training.points.append((step, loss))
        self.text = text
        if time.monotonic() - self.drawn_at > REDRAW_S:
            self.draw()

    def evaluated(self, step: int, loss: float | None) -> None:
        if loss is not None:
            self.held_out.points.append((step, loss))

    def draw(self) -> None:
        self.drawn_at = time.monotonic()
        lines = [line for line in (self.training, self.held_out) if line.points]
        picture = ""
        if lines and can_draw():
            picture = svg(Chart("Loss", lines, can_be_logarithmic=True))
        said = f'<div style="max-width:640px;{COLORS}">{picture}<code>{html.escape(self.text)}</code></div>'
        self.handle.update({"text/html": said, "text/plain": self.text}, raw=True)

    def show_page(self, page: str) -> None:
        """The page of the run, in a frame of its own that may run nothing."""
        from IPython.display import display

        frame = f'<iframe sandbox="" title="report of the run" srcdoc="{html.escape(page, quote=True)}" '
        frame += 'style="width:100%;height:640px;border:1px solid #8886"></iframe>'
        display({"text/html": frame, "text/plain": "report.html"}, raw=True)
