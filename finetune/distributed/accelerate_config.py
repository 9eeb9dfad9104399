"""Reads the configuration of `accelerate launch` from the environment variables it sets. No framework here."""

from collections.abc import Mapping

NAMES = {"ptd": "built-in", "ddp": "DDP", "fsdp2": "FSDP2", "zero2": "DeepSpeed ZeRO-2", "zero3": "DeepSpeed ZeRO-3"}
STATE_KEPT = {  # accelerate settings that offload state or change the optimizer step, and their config keys
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "offload_optimizer_device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "offload_param_device",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "deepspeed_config_file",
    "ACCELERATE_DYNAMO_BACKEND": "dynamo_backend",
    "FSDP_OFFLOAD_PARAMS": "fsdp_offload_params",
    "FSDP_ACTIVATION_CHECKPOINTING": "fsdp_activation_checkpointing",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "fsdp_cpu_ram_efficient_loading",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config",
}


def method_of(environment: Mapping[str, str]) -> str:
    """The wrapper accelerate would use: ddp, fsdp1, fsdp2, zero with its stage, or megatron."""
    if _true(environment, "ACCELERATE_USE_DEEPSPEED"):
        return "zero" + environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    if _true(environment, "ACCELERATE_USE_FSDP"):
        return "fsdp" + environment.get("FSDP_VERSION", "1")
    return "megatron" if _true(environment, "ACCELERATE_USE_MEGATRON_LM") else "ddp"


def unsupported(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """(key, value) of the first unsupported setting in accelerate's config, or None."""
    for variable, key in STATE_KEPT.items():
        value = environment.get(variable, "none")
        if value.lower() not in ("none", "no", "false", ""):
            return key, value
    return None


def launched_one_process(environment: Mapping[str, str]) -> bool:
    """True if `accelerate launch --cpu` was given several processes: it starts one and does not pass on the number."""
    started = {"RANK", "WORLD_SIZE"} & set(environment)
    return _true(environment, "ACCELERATE_USE_CPU") and "MASTER_PORT" in environment and not started


def mixed_precision(environment: Mapping[str, str]) -> str | None:
    """Precision set by accelerate's config, or None."""
    word = environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    return None if word == "no" else word


def _true(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "false").lower() in ("true", "1", "yes")
