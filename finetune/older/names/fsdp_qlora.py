"""Flags of fsdp_qlora and its multi-backend descendant that are not flags here, and words that many people type."""

from finetune.older.names.axolotl import PREFERENCES
from finetune.older.names.entries import ByValue, Instead, LeftOut, Names, instead

FSDP_QLORA: Names = {
    "use_ddp": ByValue({"true": "--sharding_strategy ddp", "false": ""}),
    "q_bits": "n_bits",
    "warmup_epochs": Instead("--warmup_ratio W, the number of warmup epochs divided by --num_epochs."),
    "profiling_outputs": "profiling_output",
    **instead(
        "The schedule cosine_with_restarts has two cycles, and their number cannot be set. Omit it.", "cosine_cycles"
    ),
    **instead("Every decoder layer is a unit of its own, on any architecture. Omit it.", "wrapping_policy"),
}

TRAINERS = ByValue(
    {
        **dict.fromkeys(("sft", "cpt", "pt"), LeftOut("What is learned follows from the rows.")),
        **{name: words for name, words in PREFERENCES.words.items() if name},
    }
)
# Of no program in particular.
TYPED: Names = {
    "trainer": TRAINERS,
    "trainer_type": TRAINERS,
    "rlhf_type": TRAINERS,
    "train_on_eot": ByValue(
        {
            "turn": LeftOut("The end of each answer is learned."),
            "*": Instead("The end of each answer is learned. Omit it."),
        }
    ),
    "train_on_eos_token": LeftOut("The end of each answer is learned."),
    "random_state": "seed",
    "full_finetuning": ByValue({"true": "--train_type full", "false": ""}),
    "load_in_16bit": ByValue({"true": "--train_type lora", "false": ""}),
    "epochs": "num_epochs",
    "rank": "lora_rank",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "steps": "max_steps",
    "max_seq_len": "context_length",
    "seq_len": "context_length",
    "seq_length": "context_length",
    "sequence_length": "context_length",
    "block_size": "context_length",
    "max_tokens": "context_length",
    "model_id": "model_name",
    "model_path": "model_name",
    "pretrained_model_name_or_path": "model_name",
    "train_file": "dataset",
    "train_data": "dataset",
    "data_path": "dataset",
    "dataset_path": "dataset",
    "validation_file": "validation_dataset",
    "val_data": "validation_dataset",
    "valid_data": "validation_dataset",
    "test_data": "score_dataset",
    "grad_accum": "gradient_accumulation_steps",
    "grad_accum_steps": "gradient_accumulation_steps",
    "accumulation_steps": "gradient_accumulation_steps",
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "train_batch_size": "batch_size",
    "mini_batch_size": "batch_size",
    "warmup": ByValue({"*": Instead("--warmup_steps N, or --warmup_ratio F of all steps.")}),
    "scheduler": "lr_scheduler",
    "grad_clip": "grad_norm",
    "clip_grad": "grad_norm",
    "gradient_clip_val": "grad_norm",
    "max_norm": "grad_norm",
    "save_dir": "output_dir",
    "out": "output_dir",
    "output": "output_dir",
    "output_path": "output_dir",
    "random_seed": "seed",
    "device": "backend",
    "gpus": "world_size",
    "num_gpus": "world_size",
    "nproc_per_node": "world_size",
    "cpu": ByValue({"true": "--backend cpu", "false": ""}),
    "qlora": ByValue({"true": "--train_type qlora", "false": ""}),
    "use_lora": ByValue({"true": "| --train_type lora", "false": ""}),
    "use_qlora": ByValue({"true": "--train_type qlora", "false": ""}),
    "lora": ByValue({"true": "--train_type lora", "false": ""}),
    "full": ByValue({"true": "--train_type full", "false": ""}),
    "dora": ByValue({"true": "--use_dora true", "false": ""}),
    "rslora": ByValue({"true": "--use_rslora true", "false": ""}),
    "wandb": ByValue({"true": "--log_to wandb", "false": "", "*": "--log_to wandb --project_name {}"}),
    "hub_repo": "push_to_hub",
    "repo_id": "push_to_hub",
    "checkpoint": Instead("--resume auto continues a run, --adapter DIR an adapter on other data."),
    "resume_from": "resume",
    "quantization": Instead("--train_type qlora quantizes the base: --n_bits, --quant_type, --quantization_backend."),
    "quantize": Instead("--train_type qlora quantizes the base: --n_bits, --quant_type, --quantization_backend."),
    "bits": "n_bits",
    "liger": Instead("Logits are computed at target positions, in chunks. Omit it."),
    "flash_attn": Instead("--attention chooses the kernel by a trial on the device."),
    "merge": Instead("export.py --checkpoint RUN --output_dir DIR merges an adapter into its base."),
    "merge_and_unload": Instead("export.py --checkpoint RUN --output_dir DIR merges an adapter into its base."),
    "tokenizer": Instead("The model's own tokenizer is used. Omit it."),
    "tokenizer_name": Instead("The model's own tokenizer is used. Omit it."),
    "patience": "early_stopping",
    "prompt_template": Instead(
        "Rows of chats use the tokenizer's template, others stand as they are: see docs/data.md."
    ),
    "system_prompt": Instead("Write it as the system message of the rows."),
    "prompt": Instead("generate.py --checkpoint RUN --prompt TEXT asks a trained model."),
    "temperature": Instead("generate.py has it."),
    "num_workers": Instead("Rows are prepared while the device computes. Omit it."),
    "fsdp": Instead("Ranks shard the model by default (FSDP2). See --dp_shards."),
    "zero_stage": Instead("For DeepSpeed write an accelerate config and use --parallel_backend accelerate."),
}
