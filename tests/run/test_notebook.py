"""fine_tune in a real notebook kernel: a live curve with the time left and the speed, then the page."""

import html
import re

import pytest

from backend_manager import package_version
from tests.support.commands import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(package_version("nbclient") is None, reason="nbclient is not installed"),
    pytest.mark.skipif(package_version("ipykernel") is None, reason="ipykernel is not installed"),
]


def test_a_kernel_shows_the_curve_with_time_left_and_speed_and_then_the_page(tiny_model, rows_file, tmp_path):
    import nbformat
    from nbclient import NotebookClient

    flags = dict(model_name=str(tiny_model), dataset=str(rows_file), validation_dataset=str(rows_file))
    flags |= dict(output_dir=str(tmp_path / "out"), max_steps=6, eval_every=3, batch_size=2, context_length=64)
    flags |= dict(backend="cpu", train_type="lora", precision="fp32")
    cell = nbformat.v4.new_code_cell(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom train import fine_tune\nfine_tune(**{flags!r}).step"
    )
    book = nbformat.v4.new_notebook(cells=[cell])
    NotebookClient(book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = book.cells[0].outputs
    shown = [o["data"] for o in outputs if o["output_type"] == "display_data"]
    curve, frame = shown
    assert re.search(r"\d+:\d\d left 6/6 [\d,]+ tok/s", curve["text/plain"])
    assert ("<svg" in curve["text/html"]) == (package_version("pygal") is not None)
    (inside,) = re.findall(r'srcdoc="([^"]*)"', frame["text/html"])
    assert html.unescape(inside).startswith("<!DOCTYPE html>") and 'sandbox=""' in frame["text/html"]
    said = "".join(o["text"] for o in outputs if o["output_type"] == "stream" and o["name"] == "stdout")
    assert said.count("\nstep ") == 1 and "eval  step 3" in said
    assert next(o for o in outputs if o["output_type"] == "execute_result")["data"]["text/plain"] == "6"
