"""Scalings of rotary positions (RoPE) for rows longer than a base was trained on."""

NONE = "none"
# Linear interpolation (Chen et al. 2023, arXiv 2306.15595) and YaRN (Peng et al. 2023, arXiv 2309.00071).
SCALINGS = ("linear", "yarn")
MOST = 128.0  # times the longest row of the base
