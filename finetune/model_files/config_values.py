"""Values of a config.json that would make transformers fail, or build something far larger than the files."""

import json

from finetune.errors import PlanError

AGAIN = "Download or save the model again."
MAX_LAYERS = 10_000
# Keys of config.json that must be positive integers, those that may be null too, and all that must be numbers.
SIZES = ("vocab_size", "hidden_size", "n_embd", "num_hidden_layers", "n_layer")
LAYERS = ("num_hidden_layers", "n_layer")
OPTIONAL_SIZES = (
    "num_attention_heads",
    "n_head",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "n_inner",
    "moe_intermediate_size",
)
# Of these, times the width of the model, no weight has more numbers than a multiple of what the files hold.
OF_WEIGHTS = (
    "vocab_size",
    "n_positions",
    "intermediate_size",
    "n_inner",
    "moe_intermediate_size",
    "num_attention_heads",
    "n_head",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
)
PACKED = 64  # numbers of the model for one in its files: 2 bits in a 32-bit word, with room for tied weights
NUMBERS = (
    *SIZES,
    *OPTIONAL_SIZES,
    "max_position_embeddings",
    "n_positions",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "rope_theta",
    "initializer_range",
    "attention_dropout",
    "attn_pdrop",
    "sliding_window",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
BOOLEANS = ("use_cache", "tie_word_embeddings", "attention_bias", "mlp_bias")
LISTS = ("mlp_only_layers", "layer_types")
INTEGERS = ("decoder_sparse_step", "shared_expert_intermediate_size")
KINDS = ((bool, BOOLEANS, "true or false"), (list, LISTS, "a list"), (int, INTEGERS, "an integer"))
# What transformers computes RoPE's frequencies from, by rope_type: keys that it requires.
ROPE_KEYS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
# The other values of rope_type that transformers or mlx-lm know, `su` and `mrope` under older names of their models.
OTHER_ROPES = ("default", "proportional", "axial", "mrope", "xdrope", "su", "deepseek_yarn", "telechat3-yarn")
ROPE_NUMBERS = (
    *("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow", "partial_rotary_factor"),
)
ROPE_LISTS = ("short_factor", "long_factor")
DTYPES = (
    "auto",
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "double",
    "float",
    "half",
    "float8_e4m3fn",
    "float8_e5m2",
)


def check_values(config: dict, said: str) -> None:
    """Raises PlanError for config values that would make transformers fail while loading."""
    text = config.get("text_config")
    if text is not None and not isinstance(text, dict):
        raise PlanError(f"{said}: config.json's text_config is {json.dumps(text)[:80]}, must be an object. {AGAIN}")
    for part in (config, text or {}):
        for key in NUMBERS:
            value = part.get(key)
            if isinstance(value, str | bool | dict):
                raise PlanError(f"{said}: config.json's {key} is {json.dumps(value)[:80]}, must be a number. {AGAIN}")
            if isinstance(value, int | float) and not abs(value) < 2.0**63:
                raise PlanError(f"{said}: config.json's {key} is {shown(value)}, must be below 2**63. {AGAIN}")
        for key in (*SIZES, *OPTIONAL_SIZES):
            value = part.get(key)
            if isinstance(value, int | float) and (isinstance(value, float) or value < 1):
                raise PlanError(f"{said}: config.json's {key} is {value}, must be a positive integer. {AGAIN}")
        for key in SIZES:
            if not isinstance(part.get(key), int | float | None):
                kind = type(part[key]).__name__
                raise PlanError(f"{said}: config.json's {key} is {kind}, must be a positive integer. {AGAIN}")
        for key in LAYERS:
            if (part.get(key) or 0) > MAX_LAYERS:
                raise PlanError(f"{said}: config.json's {key} is {part[key]}, the maximum is {MAX_LAYERS}. {AGAIN}")
        for key, value in part.items():
            if "drop" in key and isinstance(value, int | float) and not 0 <= value <= 1:
                raise PlanError(f"{said}: config.json's {key} is {shown(value)}, must be 0 to 1. {AGAIN}")
        for wanted, keys, name in KINDS:
            for key in keys:
                value = part.get(key)
                if value is not None and type(value) is not wanted:
                    shortly = json.dumps(value)[:80]
                    raise PlanError(f"{said}: config.json's {key} is {shortly}, must be {name}. {AGAIN}")
        for key in ("rope_parameters", "rope_scaling"):
            check_rope(part.get(key), key, said)
        if isinstance(part.get("rope_theta"), int | float) and part["rope_theta"] <= 0:
            raise PlanError(f"{said}: config.json's rope_theta is {part['rope_theta']}, must be above 0. {AGAIN}")
        for key in ("dtype", "torch_dtype"):
            value = part.get(key)
            if value is not None and str(value).removeprefix("torch.") not in DTYPES:
                raise PlanError(
                    f"{said}: config.json's {key} is {json.dumps(value)[:80]}, which is not a weight dtype. "
                    "Use float32, float16 or bfloat16."
                )


def check_rope(rope: object, key: str, said: str) -> None:
    """Raises PlanError for RoPE settings, of all layers or by layer type, that no frequencies follow from."""
    if rope is None:
        return
    if not isinstance(rope, dict):
        raise PlanError(f"{said}: config.json's {key} is {json.dumps(rope)[:80]}, must be an object. {AGAIN}")
    for name, value in rope.items():
        if isinstance(value, dict):
            check_rope(value, f"{key}.{name}", said)
    kind = rope.get("rope_type", rope.get("type"))
    if not isinstance(kind, str | None):
        raise PlanError(f"{said}: config.json's {key} has rope_type {json.dumps(kind)[:80]}, must be text. {AGAIN}")
    if kind is not None and kind not in (*ROPE_KEYS, *OTHER_ROPES):
        raise PlanError(f"{said}: config.json's {key} has rope_type {json.dumps(kind)[:80]}, which is unknown. {AGAIN}")
    missing = [name for name in ROPE_KEYS.get(kind or "default", ()) if rope.get(name) is None]
    if missing:
        raise PlanError(f"{said}: config.json's {key} is of rope_type {kind} and has no {missing[0]}. {AGAIN}")
    for name in ROPE_NUMBERS:
        value = rope.get(name)
        if value is not None and not is_above_0(value):
            raise PlanError(
                f"{said}: config.json's {key} has {name} {json.dumps(value)[:80]}, must be a number above 0. {AGAIN}"
            )
    for name in ROPE_LISTS:
        value = rope.get(name)
        if value is not None and not (isinstance(value, list) and all(map(is_above_0, value))):
            raise PlanError(f"{said}: config.json's {key} has a {name} that is no list of numbers above 0. {AGAIN}")


def is_above_0(value: object) -> bool:
    """True for a number, other than a boolean, that is above 0 and below 2**63."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 2.0**63


def check_sizes(config: dict, numbers: int, said: str) -> None:
    """Raises PlanError for a config of a model far larger than the `numbers` in its files: it is never built."""
    for part in (config, config.get("text_config") or {}):
        width = part.get("hidden_size") or part.get("n_embd") or 1
        for key in (*LAYERS, *OF_WEIGHTS):
            value = part.get(key)
            if isinstance(value, int) and value * width > PACKED * numbers:
                raise PlanError(
                    f"{said}: config.json's {key} {value} and width {width} are those of a model far larger than its "
                    f"weight files, which hold {numbers:,} numbers. {AGAIN}"
                )


def shown(value: object) -> str:
    if not isinstance(value, int) or abs(value) < 10**40:
        text = repr(value)
    else:
        text = f"an integer of {value.bit_length()} bits"
    return text[:80]
