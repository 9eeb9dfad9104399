"""Names of mlx_lm.lora, 0.32: its flags and the keys of its YAML. Nested keys are joined by dots."""

from finetune.config import SCHEDULES
from finetune.older.names.entries import ByValue, Computed, Instead, LeftOut, Names, left_out, same
from finetune.older.names.hf import BETAS, OPTIMIZERS, TRACKERS
from finetune.older.names.trl import NO_CODE

ADAMS = ("adam", "adamw")
ADAM_SETTINGS: Names = {
    "betas": BETAS,
    "eps": "adam_epsilon",
    "weight_decay": "wd",
    "bias_correction": ByValue({"true": LeftOut("Adam corrects its bias."), "*": Instead("Adam corrects its bias.")}),
}


def hub_dataset(value) -> list[dict] | Instead:
    """Entries of our --dataset from mlx-lm's hf_dataset, one or a list."""
    found = []
    for entry in value if isinstance(value, list) else [value]:
        name = entry.get("path", entry.get("name")) if isinstance(entry, dict) else None
        if not isinstance(name, str):
            return Instead("An entry has path. Give dataset: FILE or a Hub name.")
        config = (entry.get("config") or {}).get("name")
        columns = {ours: entry.get(f"{theirs}_feature") for theirs, ours in FEATURES.items()}
        ours = {"name": name + (f":{config}" if config else ""), "split": entry.get("train_split")}
        ours["columns"] = {k: v for k, v in columns.items() if v and v != k} or None
        found.append({k: v for k, v in ours.items() if v is not None})
    return found


FEATURES = {"prompt": "prompt", "completion": "completion", "text": "text", "chat": "messages"}

MLX_LM: Names = {
    **same("batch_size", "learning_rate", "seed", "save_every", "project_name"),
    "model": "model_name",
    "data": "dataset",
    "fine_tune_type": ByValue(
        {
            "lora": "| --train_type lora",
            "dora": "--use_dora true | --train_type lora",
            "full": "--train_type full",
            "*": Instead("There are lora, dora (--use_dora) and full."),
        }
    ),
    "optimizer": OPTIMIZERS,
    "mask_prompt": ByValue(
        {"true": LeftOut("Only answers are learned by default."), "false": "--train_on_prompt true"}
    ),
    "num_layers": "num_layers",
    "lora_layers": "num_layers",
    "iters": ByValue({"*": "--max_steps {}"}, {"*": "here they are optimizer steps"}),
    "steps_per_report": "log_every_n_steps",
    "steps_per_eval": "eval_every",
    "grad_checkpoint": "use_gradient_checkpointing",
    "grad_accumulation_steps": "gradient_accumulation_steps",
    "max_seq_length": "context_length",
    "adapter_path": "output_dir",
    "resume_adapter_file": "adapter",
    "report_to": TRACKERS,
    "wandb": ByValue({"": "", "*": "--log_to wandb --project_name {}"}),
    "lora_parameters.rank": "lora_rank",
    "lora_parameters.dropout": "lora_dropout",
    "lora_parameters.scale": ByValue(
        {"*": Instead("Here it is --lora_alpha A, which is scale x rank.")},
        {"*": "Both together in a file are translated."},
    ),
    "lora_parameters.alpha": "lora_alpha",
    "lora_parameters.keys": "lora_target_modules",
    "lr_schedule.name": ByValue(
        {
            "cosine_decay": "--lr_scheduler cosine | --cosine_min_lr_ratio 0",
            "linear_schedule": "--lr_scheduler linear",
            "exponential_decay": "--lr_scheduler exponential",
            "*": Instead(f"There are {', '.join(SCHEDULES)}."),
        }
    ),
    "lr_schedule.warmup": "warmup_steps",
    **{f"optimizer_config.{name}.{key}": entry for name in ADAMS for key, entry in ADAM_SETTINGS.items()},
    "optimizer_config.*": Instead("There are --adam_beta1, --adam_beta2, --adam_epsilon and --wd."),
    "hf_dataset": Computed(hub_dataset, "`dataset`, with its configuration, splits and columns"),
    "trust_remote_code": NO_CODE,
    **left_out("A schedule goes over the whole run, from --lr, with linear warmup from 0.", "lr_schedule.arguments"),
    **left_out("A schedule goes over the whole run, from --lr, with linear warmup from 0.", "lr_schedule.warmup_init"),
    **left_out("This is what train.py does.", "train"),
    **left_out("All validation rows are evaluated, see --validation_dataset.", "val_batches"),
    **left_out("--score_dataset scores rows before and after training.", "test", "test_batches"),
    **left_out("--low_memory returns freed memory immediately.", "clear_cache_threshold"),
}
