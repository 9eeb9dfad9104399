"""Layers that predict several tokens ahead (MTP): no program here computes them, and results keep them as they are."""

import re

NAMED = re.compile(r"(^|[._])mtp|nextn|\.(eh_proj|enorm|hnorm|shared_head)\.")
LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")


def is_mtp(name: str, num_layers: int | None) -> bool:
    """Whether a tensor is of such a layer: by its name, or in a layer after the model's last."""
    at = LAYER.search(name)
    return bool(NAMED.search(name)) or bool(at and num_layers and int(at[2]) >= num_layers)
