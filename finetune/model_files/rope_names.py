"""RoPE settings of a config.json under the names of transformers 4 too.

transformers 5 writes `rope_parameters` alone. A reader of the older names (mlx-lm, programs on transformers 4) takes
its default base instead, without a word, and computes another model. transformers 5 reads the same from both.
"""

import json
from pathlib import Path


def with_older_names(config: dict) -> dict:
    """The config with rope_theta, partial_rotary_factor and rope_scaling beside `rope_parameters`, if it has one for
    all layers: there are no older names for one per layer type.
    """
    config = dict(config)
    if isinstance(config.get("text_config"), dict):
        config["text_config"] = with_older_names(config["text_config"])
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        return config
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in rope:
            config.setdefault(name, rope[name])
    if rope.get("rope_type", "default") != "default":
        config.setdefault("rope_scaling", dict(rope))
    return config


def add_older_names(file: Path) -> None:
    """Rewrites a config.json with them."""
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(with_older_names(config), indent=2, sort_keys=True) + "\n", encoding="utf-8")
