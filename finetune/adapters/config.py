"""adapter_config.json as PEFT reads it, whichever engine trained the adapter."""

from collections.abc import Iterable
from pathlib import Path

from finetune.model_files.files import STARTED_IN
from finetune.parts.trains import Adapter

# The PEFT version whose config this is: the first that knows all of these keys (target_parameters).
PEFT_VERSION = "0.17.0"


def adapter_config(
    adapter: Adapter, base_name: str, revision: str | None, target_modules: list[str], **changes: object
) -> dict:
    """The content for these LoRA adapters; `changes` replace fields."""
    return {
        "peft_type": "LORA",
        "peft_version": PEFT_VERSION,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "target_modules": target_modules,
        "target_parameters": None,
        "use_dora": adapter.dora,
        "use_rslora": adapter.rslora,
        "init_lora_weights": adapter.init.facts.peft_word,
        "fan_in_fan_out": False,
        "bias": "none",
        "modules_to_save": None,
        "inference_mode": True,
        "revision": revision,
        **adapter.patterns(),
        **changes,
    }


def base_record(name: str, digest: str) -> dict[str, str]:
    """base_model.json: the base's name and digest, and of a folder that was given by a relative path from where."""
    relative = not Path(name).expanduser().is_absolute() and Path(name).is_dir()
    return {"name": name, "digest": digest} | ({STARTED_IN: str(Path.cwd())} if relative else {})


def shortest_targets(adapted: list[str], modules: Iterable[str]) -> list[str]:
    """target_modules for these layers: their last names if those name no other module, else their full names."""
    leaves = sorted({n.rpartition(".")[2] for n in adapted})
    if {n for n in modules if n.rpartition(".")[2] in leaves} == set(adapted):
        return leaves
    return sorted(adapted)
