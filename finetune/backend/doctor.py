"""Probe results as text and JSON: --doctor."""

import json
from collections.abc import Callable

from finetune.backend.report import Manager


def examine(manager: Manager, device_facts: Callable[[], list] = list) -> dict:
    """Capabilities of this machine and probe results of every (quantizer, bits) pair on its device.

    `manager`: a BackendManager. `device_facts`: the engine's, see torch_engine/device_facts.py. Probes what is not
    cached: about ten seconds the first time.
    """
    pairs = manager.probe_all_quantizers()
    manager.capabilities  # noqa: B018  probed, so that describe() has them
    return manager.describe() | {"quantization": pairs, "device": device_facts()}


def report(manager: Manager, doctor: str, advice: list[str], device_facts: Callable[[], list]) -> list[str]:
    """Text of --doctor (false, true or json), with the lines of --recommend, if any."""
    if doctor == "false":
        return advice
    found = examine(manager, device_facts)
    if doctor == "json":
        return [as_json(found | ({"recommend": advice} if advice else {}))]
    return [*lines(manager, found), *advice]


def lines(manager: Manager, found: dict) -> list[str]:
    """The probe results as lines of text."""
    text = [*manager.summary_lines(), "", *table(found["quantization"])]
    failed = {pair: p["error"] for pair, p in found["quantization"].items() if p["error"]}
    text += [f"  {pair} fails here: {why}" for pair, why in failed.items()]
    if not found["device"]:
        return text
    facts = [(f["what"], "yes" if f["works"] else "no", f["why"]) for f in found["device"]]
    return [*text, "", *aligned([("on the device", "works", "how, or why not"), *facts])]


HEAD = ("method", "bits", "passes", "bits/weight", "weight error", "product error", "layer time")


def rows(pairs: dict) -> list[tuple[str, ...]]:
    """One table row per probed pair, in HEAD's columns."""
    out: list[tuple[str, ...]] = []
    for pair, p in pairs.items():
        name, bits = pair.split("/")
        if p["error"]:
            out.append((name, bits, "no", "-", "-", "-", "-"))
        else:
            figures = f"{p['bits_per_weight']:.2f}", f"{p['weight_error']:.2%}", f"{p['product_error']:.0e}"
            out.append((name, bits, "yes", *figures, f"{p['slowdown']:.2f} x"))
    return out


def table(pairs: dict) -> list[str]:
    """HEAD and rows as aligned lines."""
    if not pairs:
        return ["quantizers: this backend has its own, which are not probed"]
    return aligned([HEAD, *rows(pairs)])


def aligned(body: list[tuple[str, ...]]) -> list[str]:
    """Rows with their columns aligned."""
    widths = [max(len(row[i]) for row in body) for i in range(len(body[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in body]


def as_json(found: dict) -> str:
    return json.dumps(found, indent=1, default=str)
