"""A transformers config.json as mlx-lm's model classes read it.

transformers 5 writes RoPE settings as `rope_parameters`; most of mlx-lm's classes read `rope_theta` and `rope_scaling`
and would use their defaults without a word. What this translation misses, the logit fingerprint finds.
"""

from finetune.errors import PlanError

BY_LAYER_TYPE = {"full_attention", "sliding_attention"}
# Names that mlx-lm reads: what transformers 5 writes instead.
OLDER_NAMES = {"num_experts": "num_local_experts", "n_ctx": "n_positions"}
# Fields that decide what a model computes, by prefix or name: one that a model class does not read may change it.
COMPUTES = ("rope", "sliding", "layer_types", "attention_", "partial_rotary", "logit", "head_dim", "tie_word")


def translated(config: dict) -> dict:
    """The config with the names that mlx-lm reads beside its own. PlanError for RoPE settings of no known form."""
    config = dict(config)
    if isinstance(config.get("text_config"), dict):
        config["text_config"] = translated(config["text_config"])
    for name, older in OLDER_NAMES.items():
        if name not in config and older in config:
            config[name] = config[older]
    rope = config.get("rope_parameters")
    if not rope:
        return config
    if BY_LAYER_TYPE & set(rope):
        if not set(rope) <= BY_LAYER_TYPE or "full_attention" not in rope:
            raise PlanError(
                f"--backend mlx: config.json's rope_parameters are for {', '.join(sorted(rope))}, and mlx-lm's models "
                "have full and sliding attention only. Use --backend cpu."
            )
        local = rope.get("sliding_attention")
        if local:
            config["rope_local_base_freq"] = local["rope_theta"]
        rope = rope["full_attention"]
    elif any(isinstance(value, dict) for value in rope.values()):
        raise PlanError(
            f"--backend mlx: config.json's rope_parameters are nested under {', '.join(sorted(rope))}, a form that is "
            "not translated for mlx-lm. Use --backend cpu."
        )
    config |= _flat(rope)
    layer_types = config.get("layer_types") or []
    if "full_attention" in layer_types and "sliding_attention" in layer_types:
        config.setdefault("sliding_window_pattern", layer_types.index("full_attention") + 1)
    return config


def _flat(rope: dict) -> dict:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    found = {}
    if "rope_theta" in rope:
        found["rope_theta"] = found["rotary_emb_base"] = rope["rope_theta"]
    if "partial_rotary_factor" in rope:
        found["partial_rotary_factor"] = found["rotary_pct"] = rope["partial_rotary_factor"]
    found["rope_scaling"] = None if kind == "default" else {**rope, "type": kind, "rope_type": kind}
    return found


def unread_fields(config: dict, reads: set[str]) -> list[str]:
    """Config fields that change the computation but are not read by the model's mlx-lm class."""
    inner = config.get("text_config") or config
    known = {"rope_parameters", "attention_dropout", "head_dim"} | reads
    return sorted(name for name, value in inner.items() if value and name.startswith(COMPUTES) and name not in known)
