"""Scaling and capping of logits in a config, under the names that families give them."""

SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")  # Gemma, RecurrentGemma, xLSTM


def logit_scaling(config: dict) -> tuple[float, float | None]:
    """(scale, soft cap or None) of a text model's config: its logits are cap * tanh(x * scale / cap)."""
    scale = 1.0
    if config.get("logits_scaling"):  # Granite divides
        scale /= config["logits_scaling"]
    if config.get("logit_scale"):  # Cohere multiplies
        scale *= config["logit_scale"]
    return scale, next((config[name] for name in SOFT_CAPS if config.get(name)), None)
