"""Names of PEFT's LoraConfig, 0.21."""

from finetune.older.names.entries import ByValue, Instead, Names, instead, left_out, same

# What --init_lora_weights is called there, and what has no name here.
INITS = ByValue(
    {
        "true": "--init_lora_weights default",
        **{name: f"--init_lora_weights {name}" for name in ("default", "gaussian", "eva", "pissa", "olora", "loftq")},
        "pissa_niter_16": "--init_lora_weights pissa",
        "*": Instead("There are default, gaussian, eva, pissa, olora and loftq."),
    },
    {"pissa_niter_16": "computed exactly"},
)
ALL_LAYERS = (
    "--num_layers and --layers_to_transform choose layers; --lora_target_modules takes a regex on names, such as "
    "'.*layers\\.[0-3]\\..*proj'."
)

PEFT: Names = {
    **same("lora_alpha", "lora_dropout", "use_rslora", "use_dora"),
    "init_lora_weights": INITS,
    "r": "lora_rank",
    "target_modules": "lora_target_modules",
    "layers_to_transform": "layers_to_transform",
    **instead(ALL_LAYERS, "layers_pattern", "exclude_modules"),
    **instead(
        "Layers of a new adapter share one rank and alpha; --adapter reads patterns. Omit it.",
        "rank_pattern",
        "alpha_pattern",
    ),
    **same("modules_to_save"),
    **instead("--new_tokens and --modules_to_save train all rows of embeddings and head.", "trainable_token_indices"),
    **instead("Biases are not trained with adapters. Omit it.", "bias", "lora_bias"),
    **instead("Experts are targets of --lora_target_modules all. Omit it.", "target_parameters"),
    **instead(
        "Of PEFT's variants there are DoRA, rsLoRA, LoRA+, EVA, PiSSA, OLoRA and LoftQ. Omit it.",
        *("corda_config", "lora_ga_config", "velora_config", "alora_invocation_tokens", "use_qalora"),
        *("monteclora_config", "layer_replication", "use_bdlora", "arrow_config", "kasa_config"),
    ),
    **left_out("LoftQ and EVA have no settings here.", "loftq_config", "eva_config", "qalora_group_size"),
    **left_out(
        "Layers are found by their type.", "fan_in_fan_out", "megatron_config", "megatron_core", "runtime_config"
    ),
    **left_out("Tied weights stay tied.", "ensure_weight_tying"),
    **left_out("It is a causal language model.", "task_type", "peft_type", "inference_mode"),
}
