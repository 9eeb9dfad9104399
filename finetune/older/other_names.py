"""Flags of the older scripts and of other programs that are not flags here, each with what to write instead.

docs/migration.md lists them by program. Where the value has another meaning too, the answer is a sentence.
"""

OTHER_NAMES = {
    # fsdp_qlora and its multi-backend descendant
    "use_ddp": "--sharding_strategy ddp",
    "q_bits": "--n_bits",
    "cosine_cycles": "The schedule cosine_with_restarts has two cycles, and their number cannot be set. Omit it.",
    "warmup_epochs": "--warmup_ratio W, the number of warmup epochs divided by --num_epochs",
    "profiling_outputs": "--profiling_output",
    "wrapping_policy": "Every decoder layer is a unit of its own, on any architecture. Omit it.",
    # TRL, PEFT and transformers
    "model": "--model_name",
    "model_name_or_path": "--model_name",
    "model_revision": "--revision",
    "dataset_name": "--dataset",
    "use_peft": "--train_type lora",
    "load_in_4bit": "--train_type qlora",
    "load_in_8bit": "--train_type qlora --n_bits 8",
    "use_bnb_nested_quant": "--double_quant",
    "per_device_train_batch_size": "--batch_size",
    "num_train_epochs": "--num_epochs",
    "max_length": "--context_length",
    "max_seq_length": "--context_length",
    "packing": "--batch_layout, auto by default: documents are packed if a check on the model passes",
    "padding_free": "--batch_layout, auto by default: documents are packed if a check on the model passes",
    "completion_only_loss": "the default; --train_on_prompt is the opposite",
    "assistant_only_loss": "the default; --train_on_prompt is the opposite",
    "lr_scheduler_type": "--lr_scheduler",
    "optim": "--optimizer",
    "bf16": "--precision bf16",
    "fp16": "--precision fp16",
    "dtype": "--precision",
    "torch_dtype": "--precision",
    "gradient_checkpointing": "--use_gradient_checkpointing",
    "save_steps": "--save_every",
    "save_total_limit": "--keep_last",
    "eval_steps": "--eval_every",
    "logging_steps": "--log_every_n_steps",
    "resume_from_checkpoint": "--resume auto, or a folder",
    "report_to": "--log_to",
    "beta": "--preference_beta",
    "loss_type": "--preference dpo, orpo or kto, each with the loss of its paper",
    "max_prompt_length": "--context_length, of a prompt with its answer; a prompt is truncated at its start",
    "device": "--backend",
    # Axolotl
    "base_model": "--model_name",
    "sequence_len": "--context_length",
    "sample_packing": "--batch_layout, auto by default: documents are packed if a check on the model passes",
    "micro_batch_size": "--batch_size",
    "lora_target_linear": "--lora_target_modules all",
    "peft_use_dora": "--use_dora",
    "peft_use_rslora": "--use_rslora",
    "val_set_size": "--validation_split",
    "train_on_inputs": "--train_on_prompt",
    "auto_resume_from_checkpoints": "--resume auto",
    "rl": "--preference",
    "rl_beta": "--preference_beta",
    "kto_desirable_weight": "--desirable_weight",
    "kto_undesirable_weight": "--undesirable_weight",
    "wandb_project": "--project_name",
    "wandb_entity": "--entity",
    "wandb_name": "--name",
    # mlx-lm
    "data": "--dataset",
    "fine_tune_type": "--train_type",
    "mask_prompt": "the default; --train_on_prompt is the opposite",
    "iters": "--max_steps",
    "grad_checkpoint": "--use_gradient_checkpointing",
    "steps_per_eval": "--eval_every",
    "steps_per_report": "--log_every_n_steps",
    "adapter_path": "--output_dir",
    "resume_adapter_file": "--adapter",
}


def answer(name: str) -> str | None:
    """What to write instead of a flag that is not one; None if it is not known from elsewhere."""
    found = OTHER_NAMES.get(name.lstrip("-").replace("-", "_"))
    if found is None:
        return None
    return f" Here it is {found}." if found[0] in "-t" else f" {found}"
