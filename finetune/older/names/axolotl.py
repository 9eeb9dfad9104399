"""Keys of Axolotl's YAML, 0.19. Nested keys are joined by dots."""

import shlex

from finetune.older.names.entries import ByValue, Computed, Instead, LeftOut, Names, instead, left_out, same
from finetune.older.names.hf import (
    HELD_OUT,
    HF,
    OPTIMIZERS,
    PRECISION_OF_BF16,
    PRECISION_OF_FP16,
    REENTRANT,
    RESUME,
    SCHEDULES,
    WARMUP,
    WHEN_EVALUATED,
    WHEN_SAVED,
)
from finetune.older.names.peft import ALL_LAYERS, INITS
from finetune.older.names.trl import ATTENTION, PACKING

KERNELS = "Kernels are chosen for the device. --attention and --compile choose them by hand."
FORMATS = {"alpaca": "alpaca", "chat_template": "chat", "sharegpt": "chat", "completion": "text", "pretrain": "text"}
# What a dataset's entry may say, and what it changes nothing to say.
ENTRY_KEYS = ("path", "type", "split", "name", "data_files", "field_messages", "field")
IGNORED_ENTRY_KEYS = ("ds_type", "conversation", "chat_template", "trust_remote_code", "message_property_mappings")


def datasets(value) -> list[dict] | Instead:
    """Entries of our --dataset from Axolotl's: names, splits, formats, columns."""
    entries, found = value if isinstance(value, list) else [value], []
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
            return Instead("Here dataset is a list of names, or of entries with name, split, format and columns.")
        unknown = [k for k, v in entry.items() if k not in (*ENTRY_KEYS, *IGNORED_ENTRY_KEYS) and v is not None]
        if unknown:
            return Instead(f"An entry's {unknown[0]} is not here: change the rows, or --columns, or omit it.")
        kind = entry.get("type")
        if kind is not None and (not isinstance(kind, str) or kind.split(".")[0] not in FORMATS):
            return Instead(
                f"An entry's type is {kind if isinstance(kind, str) else 'a mapping'}, not one of "
                f"{', '.join(FORMATS)}: formats are detected from the columns, which --columns renames."
            )
        names = entry.get("data_files") or entry["path"] + (f":{entry['name']}" if entry.get("name") else "")
        for name in names if isinstance(names, list) else [names]:
            ours = {"name": name, "split": entry.get("split"), "format": FORMATS[kind.split(".")[0]] if kind else None}
            columns = {"messages": entry.get("field_messages"), "text": entry.get("field")}
            ours["columns"] = {k: v for k, v in columns.items() if v and v != k and (k, v) not in KNOWN_COLUMNS} or None
            found.append({k: v for k, v in ours.items() if v is not None})
    return found


def one_name(entries) -> str | Instead:
    """The words of --validation_dataset, which takes one name and its split."""
    if isinstance(entries, Instead):
        return entries
    (first, *more) = entries
    if more or set(first) - {"name", "split", "format"}:
        return Instead("--validation_dataset takes one file or name, with the columns of --dataset. Give one.")
    name = first["name"] + (f"@{first['split']}" if first.get("split") else "")
    return f"--validation_dataset {shlex.quote(name)}"


KNOWN_COLUMNS = {("messages", "conversations"), ("messages", "conversation")}
ADAPTER = ByValue(
    {
        "lora": "| --train_type lora",
        "qlora": "--train_type qlora",
        **dict.fromkeys(("", "none", "null"), "| --train_type full"),
        "*": Instead("There are lora, qlora and none, which trains all weights."),
    }
)
PREFERENCES = ByValue(
    {
        **{name: f"--preference {name}" for name in ("dpo", "orpo", "kto", "simpo")},
        **dict.fromkeys(("", "none", "null"), ""),
        "*": Instead("There are dpo, orpo, simpo and kto; for GRPO and PPO use a tool such as TRL."),
    }
)

AXOLOTL: Names = {
    **{k: HF[k] for k in ("adam_beta1", "adam_beta2", "adam_epsilon", "neftune_noise_alpha", "optim_args", "tf32")},
    **{
        k: HF[k]
        for k in ("save_total_limit", "save_steps", "eval_steps", "logging_steps", "torch_compile", "deepspeed")
    },
    **{k: HF[k] for k in ("lr_scheduler_kwargs", "optim_target_modules", "group_by_length", "auto_find_batch_size")},
    **{
        k: HF[k]
        for k in (
            "load_best_model_at_end",
            "metric_for_best_model",
            "early_stopping_patience",
            "greater_is_better",
            "save_only_model",
        )
    },
    **{k: HF[k] for k in ("dataloader_pin_memory", "dataloader_num_workers", "dataloader_prefetch_factor")},
    **{k: HF[k] for k in ("dataloader_drop_last", "remove_unused_columns", "accelerator_config", "hub_model_id")},
    **{k: HF[k] for k in ("hub_strategy", "hub_revision", "save_safetensors", "ddp_timeout", "ddp_bucket_cap_mb")},
    **{
        k: HF[k] for k in ("ddp_find_unused_parameters", "ddp_broadcast_buffers", "torch_compile_backend", "local_rank")
    },
    **{k: HF[k] for k in ("torch_compile_mode", "torch_empty_cache_steps", "fsdp", "fsdp_config")},
    **same(
        "output_dir", "max_steps", "num_epochs", "learning_rate", "weight_decay", "max_grad_norm", "seed", "world_size"
    ),
    **same(
        "gradient_accumulation_steps", "warmup_ratio", "cosine_min_lr_ratio", "lora_r", "lora_alpha", "lora_dropout"
    ),
    **same("lora_target_modules", "loraplus_lr_ratio", "streaming", "precompute_ref_log_probs", "simpo_gamma"),
    "base_model": "model_name",
    "revision_of_model": "revision",
    "adapter": ADAPTER,
    "load_in_4bit": ByValue({"true": "--train_type qlora --n_bits 4", "false": ""}),
    "load_in_8bit": ByValue({"true": "--train_type qlora --n_bits 8", "false": ""}),
    "lora_model_dir": "adapter",
    "datasets": Computed(datasets, "`dataset`, a list of entries with name, split, format and columns"),
    "test_datasets": Computed(lambda value: one_name(datasets(value)), "`--validation_dataset`, one file or name"),
    "pretraining_dataset": "dataset",
    "train_on_inputs": "train_on_prompt",
    "sequence_len": "context_length",
    "excess_length_strategy": ByValue(
        {"drop": "--overlong drop", "truncate": "--overlong keep_start", "raise": "--overlong error"}
    ),
    "sample_packing": PACKING,
    "micro_batch_size": "batch_size",
    "batch_size": Instead("There it is micro_batch_size x accumulation: give micro_batch_size (here batch_size)."),
    "lr_scheduler": SCHEDULES,
    "optimizer": OPTIMIZERS,
    "warmup_steps": WARMUP,
    "lora_target_linear": ByValue({"true": "--lora_target_modules all", "false": ""}),
    "peft_use_dora": "use_dora",
    "peft_use_rslora": "use_rslora",
    "peft_init_lora_weights": INITS,
    "bf16": PRECISION_OF_BF16,
    "bfloat16": PRECISION_OF_BF16,
    "fp16": PRECISION_OF_FP16,
    "float16": PRECISION_OF_FP16,
    "float32": ByValue({"true": "--precision fp32", "false": ""}),
    "gradient_checkpointing": ByValue(
        {
            "true": "--use_gradient_checkpointing true",
            "false": "--use_gradient_checkpointing false",
            **dict.fromkeys(("offload", "offload_disk"), "--use_activation_cpu_offload true"),
        }
    ),
    "gradient_checkpointing_kwargs": REENTRANT,
    "activation_offloading": "use_activation_cpu_offload",
    "val_set_size": HELD_OUT,
    "eval_strategy": WHEN_EVALUATED,
    "save_strategy": WHEN_SAVED,
    "resume_from_checkpoint": RESUME,
    "auto_resume_from_checkpoints": ByValue({"true": "--resume auto", "false": ""}),
    "attn_implementation": ATTENTION,
    "flash_attention": ByValue({"true": LeftOut(KERNELS), "false": ""}),
    "rl": PREFERENCES,
    "rl_beta": "preference_beta",
    "dpo_beta": "preference_beta",
    "orpo_alpha": "preference_beta",
    "trl.beta": "preference_beta",
    "kto_desirable_weight": "desirable_weight",
    "kto_undesirable_weight": "undesirable_weight",
    "use_wandb": ByValue({"true": "--log_to wandb", "false": ""}),
    "wandb_project": ByValue({"": "", "*": "--log_to wandb --project_name {}"}),
    "wandb_entity": "entity",
    "wandb_name": "name",
    "dp_shard_size": "dp_shards",
    "dp_replicate_size": "dp_degree",
    "tensor_parallel_size": "tp_degree",
    "context_parallel_size": "cp_degree",
    "sequence_parallel_degree": "cp_degree",
    "max_prompt_len": LeftOut("--context_length counts a prompt with its answer."),
    "special_tokens": ByValue({"*": LeftOut("The tokenizer's own tokens are used; the end of an answer is learned.")}),
    "chat_template": ByValue(
        {
            **dict.fromkeys(("tokenizer_default", "chatml"), LeftOut("The tokenizer's own template; else ChatML.")),
            "*": LeftOut("The tokenizer's own template is used, which --dry_run shows on three rows; else ChatML."),
        }
    ),
    "bnb_config_kwargs": ByValue({"*": Instead("There are --quant_type, --double_quant and --n_bits.")}),
    "evals_per_epoch": ByValue({"1": "--eval_every auto", "*": LeftOut("--eval_every N evaluates every N steps.")}),
    "saves_per_epoch": LeftOut("--save_every N saves every N steps; the last step is saved."),
    "peft_layers_to_transform": "layers_to_transform",
    **instead(ALL_LAYERS, "peft_layers_pattern", "unfrozen_parameters", "lisa_n_layers"),
    **instead("Every layer has the same rank and alpha. Omit it.", "lora_rank_pattern", "lora_alpha_pattern"),
    "lora_modules_to_save": "modules_to_save",
    "tokens": "new_tokens",
    **instead(
        "--new_tokens and --modules_to_save train all rows of embeddings and head.", "peft_trainable_token_indices"
    ),
    **instead(
        "Every weight has the same rate, but for --loraplus_lr_ratio. Omit it.",
        *("embedding_lr", "embedding_lr_scale", "loraplus_lr_embedding"),
    ),
    **instead("Tokens are added and none is renamed: --new_tokens.", "added_tokens_overrides"),
    **left_out("Embeddings have a row for each token, and no more.", "resize_token_embeddings_to_32x"),
    **instead("A tokenizer's own template is used; edit its chat_template.jinja.", "chat_template_jinja"),
    **instead("Write it as the system message of the rows.", "default_system_message"),
    **instead("The code of a model folder is never run. Omit it.", "trust_remote_code"),
    **instead("The base is not changed before training. Omit it.", "rope_scaling", "reinit_weights"),
    **instead("ReLoRA is not here. Omit it.", "relora", "jagged_restart_steps"),
    **instead(
        "There are LoRA, DoRA, rsLoRA, LoRA+ and five initializations.", "loftq_config", "peft_layer_replication"
    ),
    **instead("Training computes in fp32, bf16 or fp16. Omit it.", "fp8", "qat", "quantization"),
    **instead("For rewards, GRPO and PPO use a tool such as TRL.", "reward_model", "process_reward_model", "vllm"),
    **instead("Plugins are not run. What they bring may be here: see docs/flags.md.", "plugins"),
    **instead("Axolotl's PoSE is not here. Omit it.", "use_pose"),
    **instead("Rows are shuffled. Omit it.", "curriculum_sampling"),
    **instead("--assume_memory plans for a device with less memory.", "gpu_memory_limit", "max_memory"),
    **{f"use_{n}": ByValue({"true": f"--log_to {n}", "false": ""}) for n in ("mlflow", "trackio", "tensorboard")},
    **instead("There are tensorboard, wandb, mlflow, trackio and csv: --log_to NAME,NAME.", "use_comet"),
    **instead(
        "Every row is read. Change the file, or use --dataset_samples.", "dataset_shard_num", "dataset_shard_idx"
    ),
    **instead("A full upload is --push_to_hub, of the model.", "push_dataset_to_hub"),
    **left_out(
        KERNELS,
        *("xformers_attention", "sdp_attention", "flex_attention", "sage_attention", "eager_attention", "s2_attention"),
        *("flash_attn_cross_entropy", "flash_attn_fuse_mlp", "flash_attn_rms_norm", "lora_mlp_kernel"),
        *("lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel", "experts_implementation", "use_kernels"),
    ),
    **left_out(
        "Logits are computed at target positions, in chunks.",
        *("chunked_cross_entropy", "chunked_cross_entropy_num_chunks", "tiled_mlp", "liger_rope", "liger_rms_norm"),
        *("liger_glu_activation", "liger_layer_norm", "liger_fused_linear_cross_entropy", "cut_cross_entropy"),
    ),
    **left_out(
        "Documents are packed end to end if a check on the model passes (--batch_layout auto).",
        *("eval_sample_packing", "pad_to_sequence_len", "sample_packing_group_size", "sample_packing_bin_size"),
        *("multipack_real_batches", "batch_flattening", "sample_packing_sequentially", "pad_to_multiple_of"),
        *("pretrain_multipack_buffer_size", "pretraining_sample_concatenation", "min_sample_len"),
    ),
    **left_out(
        "Rows are read and tokenized once and kept, on all cores.",
        *("dataset_prepared_path", "dataset_processes", "dataset_num_proc", "dataset_keep_in_memory"),
        *("skip_prepare_dataset", "shuffle_merged_datasets", "shuffle_before_merging_datasets"),
    ),
    **left_out(
        "The kind of model and tokenizer is read from its folder.",
        *("model_type", "type_of_model", "tokenizer_type", "tokenizer_config", "base_model_config", "processor_type"),
        *("tokenizer_use_fast", "tokenizer_legacy", "is_llama_derived_model", "is_mistral_derived_model"),
        *("is_qwen_derived_model", "is_falcon_derived_model", "tokenizer_use_mistral_common"),
    ),
    **left_out(
        "Evaluation is cut into forwards as training is.",
        *("eval_batch_size", "eval_sequence_len", "eval_table_size", "eval_max_new_tokens", "do_bench_eval"),
        *("do_causal_lm_eval", "eval_causal_lm_metrics"),
    ),
    **left_out(
        "--score_dataset scores answers before and after training.", "generate_samples", "num_generation_samples"
    ),
    **left_out(
        "Weights stream in, a tensor at a time.", "low_cpu_mem_usage", "qlora_sharded_model_loading", "lora_on_cpu"
    ),
    **left_out("Set by the launcher and the plan.", "device", "device_map", "ddp", "fsdp_version", "use_ray"),
    **left_out(
        "A run whose loss is not finite ends with exit code 65.", "loss_watchdog_threshold", "loss_watchdog_patience"
    ),
    **left_out("Freed memory: see --low_memory.", "gc_steps", "gc_collect_steps"),
    **left_out(
        "wandb reads its own environment variables.", "wandb_watch", "wandb_log_model", "wandb_run_id", "wandb_mode"
    ),
    **left_out("HF_TOKEN is read from the environment.", "hf_use_auth_token"),
    **left_out("Malformed rows are an error, or --skip_bad_rows N.", "strict"),
    **left_out("An answer's end is learned, and by default no prompt.", "eot_tokens", "fix_untrained_tokens"),
    **left_out(
        "Adapter weights are fp32.", "peft_autocast_adapter_dtype", "embeddings_skip_upcast", "lora_fan_in_fan_out"
    ),
    **left_out("metrics.jsonl has them.", "include_tokens_per_second", "include_tkps", "profiler_steps"),
}
