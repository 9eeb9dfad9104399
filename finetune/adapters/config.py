"""adapter_config.json as PEFT reads it, whichever engine trained the adapter."""


def adapter_config(settings, base_name: str, target_modules: list[str], **changes) -> dict:
    """The content for LoRA adapters of the settings' rank and alpha; `changes` replace fields."""
    s = settings
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": s.lora_rank,
        "lora_alpha": s.lora_alpha,
        "lora_dropout": s.lora_dropout,
        "target_modules": target_modules,
        "target_parameters": None,
        "use_dora": s.use_dora,
        "use_rslora": s.use_rslora,
        "init_lora_weights": True if s.init_lora_weights == "default" else s.init_lora_weights,
        "fan_in_fan_out": False,
        "bias": "none",
        "modules_to_save": None,
        "inference_mode": True,
        "revision": s.revision,
        "rank_pattern": {},
        "alpha_pattern": {},
        **changes,
    }


def shortest_targets(adapted: list[str], modules) -> list[str]:
    """target_modules for these layers: their last names if those name no other module, else their full names."""
    leaves = sorted({n.rpartition(".")[2] for n in adapted})
    return leaves if {n for n in modules if n.rpartition(".")[2] in leaves} == set(adapted) else sorted(adapted)
