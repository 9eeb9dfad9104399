"""Layers that predict several tokens ahead (MTP): no program here computes them, and results keep them as they are."""

import re

UNTRAINED = "not trained; full folders that are saved keep them as they are"
NAMED = re.compile(r"(^|[._])mtp|nextn|\.(eh_proj|enorm|hnorm|shared_head)\.")
LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")


def is_mtp(name: str, num_layers: int | None) -> bool:
    """True if a tensor belongs to such a layer: by its name, or by a layer number past the model's last."""
    at = LAYER.search(name)
    return bool(NAMED.search(name)) or bool(at and num_layers and int(at[2]) >= num_layers)


def lines_of(mtp: list[str], others: list[str]) -> list[str]:
    """Lines that say which tensors of the files are not part of the loaded model."""
    lines = []
    if mtp:
        whose = "MTP layers" if any(map(NAMED.search, mtp)) else "layers past the last that config.json counts"
        lines.append(f"{len(mtp)} tensors of {whose}, such as {mtp[0]}: {UNTRAINED}")
    if others:
        lines.append(f"{len(others)} tensors in its files are not part of the model, such as {others[0]}: {UNTRAINED}")
    return lines
