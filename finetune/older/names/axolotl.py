"""Keys of Axolotl's YAML, 0.19. Nested keys are joined by dots."""

import shlex
from pathlib import Path

from finetune.older.names.entries import ByValue, Computed, Instead, LeftOut, Names, instead, left_out, same
from finetune.older.names.hf import (
    HELD_OUT,
    HF,
    NAME_THEM,
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
from finetune.older.names.peft import ALL_LAYERS, INITS, PEFT
from finetune.older.names.trl import ATTENTION, DTYPES, NO_CODE, PACKING

HF_DPO = Instead("The loss is that of --preference, as in its paper. Omit it.")
EVERY_END = "The end of each answer is learned."
ROUTER_LOSS = ByValue(
    {"true": "| --router_aux_loss_coef 0.001", "false": ""}, {"true": "there the coefficient is that of config.json"}
)
RUNS = {"project_name": "project_name", "run_name": "name", "experiment_name": "project_name"}
KERNELS = "Kernels are chosen for the device. --attention and --compile choose them by hand."
FORMATS = {"alpaca": "alpaca", "chat_template": "chat", "sharegpt": "chat", "completion": "text", "pretrain": "text"}
# Formats of rows that are known by their columns, whatever the template: chosen and rejected, prompt and completion.
BY_COLUMNS = (
    *("chatml", "llama3", "zephyr", "passthrough", "user_defined", "alpaca_chat", "alpaca_w_system", "gpteacher"),
    *("oasst", "context_qa", "alpacaqa"),
)
# Settings of an entry that change nothing, or that ask for what is done.
IGNORED_ENTRY_KEYS = ("ds_type", "conversation", "trust_remote_code", "template_thinking_key", "preprocess_shards")
ENTRY_COLUMNS = {
    "field_messages": "messages",
    "field": "text",
    "field_tools": "tools",
    "field_system": "system",
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "output",
    "field_prompt": "prompt",
    "field_completion": "completion",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
    "field_label": "label",
}
# Settings of an entry whose values are what is read here, and what to do about any other.
STANDARD_ENTRY = {
    "message_field_role": ("role", "from"),
    "message_field_content": ("content", "value"),
    "message_field_training": ("train", "weight"),
    "field_thinking": ("reasoning_content", "thinking", "reasoning"),
    **dict.fromkeys(("train_on_eos", "train_on_eot"), ("turn",)),
    "roles_to_train": ("assistant", "gpt", "model"),
    "drop_system_message": (),
    "shards": (),
    "shards_idx": (),
    "revision": (),
    "chat_template": ("tokenizer_default",),
}
SAYINGS = {
    **dict.fromkeys(("train_on_eos", "train_on_eot"), "the end of each answer is learned"),
    "roles_to_train": "the assistant's turns are learned, or all with --train_on_prompt",
    "drop_system_message": "system messages are read. Remove them from the rows",
    "shards": "every row is read. Name a part: split: train[:10%]",
    "shards_idx": "every row is read. Name a part: split: train[:10%]",
    "revision": "the newest rows are read. Download them and give a file",
}
ROLE_WORDS = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "chatgpt"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function"), "tool"),
    **dict.fromkeys(("system", "developer"), "system"),
}
PROPERTIES = {"role": ("role", "from"), "content": ("content", "value")}


def datasets(value) -> list[dict] | Instead:
    """Entries of our --dataset from Axolotl's: names, splits, formats, columns."""
    entries, found = value if isinstance(value, list) else [value], []
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
            return Instead("Here dataset is a list of names, or of entries with name, split, format and columns.")
        refused = unknown_settings(entry)
        kind = format_of(entry)
        if refused:
            return refused
        if isinstance(kind, Instead):
            return kind
        names = entry.get("data_files") or entry["path"] + (f":{entry['name']}" if entry.get("name") else "")
        is_file = entry.get("data_files") or entry.get("ds_type") or Path(entry["path"]).suffix in (".json", ".jsonl")
        columns = {**{ENTRY_COLUMNS[k]: entry.get(k) for k in ENTRY_COLUMNS}, **columns_of_type(entry.get("type"))}
        for name in names if isinstance(names, list) else [names]:
            split = None if is_file and entry.get("split") == "train" else entry.get("split")
            ours = {"name": name, "split": split, "format": kind}
            ours["columns"] = {k: v for k, v in columns.items() if v and v != k and (k, v) not in KNOWN_COLUMNS} or None
            found.append({k: v for k, v in ours.items() if v is not None})
    return found


def unknown_settings(entry: dict) -> Instead | None:
    """The line for a setting of an entry that is not here, None if there is none."""
    for name, value in entry.items():
        words = value if isinstance(value, list) else [value]
        if (
            value in (None, False)
            or (value == [] and name != "roles_to_train")
            or name in IGNORED_ENTRY_KEYS
            or name in ENTRY_COLUMNS
        ):
            continue
        if name in ("path", "type", "split", "name", "data_files"):
            continue
        if name == "roles" and isinstance(value, dict):
            strange = [
                w for role, named in value.items() for w in named if ROLE_WORDS.get(w) != ROLE_WORDS.get(role, role)
            ]
            if strange:
                return Instead(
                    f"An entry's roles has {strange[0]}. Rename it in the rows, to one of {', '.join(ROLE_WORDS)}."
                )
            continue
        if name == "message_property_mappings" and isinstance(value, dict):
            strange = [f"{k}: {v}" for k, v in value.items() if v != k and v not in PROPERTIES.get(k, ())]
            if strange:
                return Instead(f"An entry's message_property_mappings has {strange[0]}. Rename the field in the rows.")
            continue
        if name == "chat_template" and value != "jinja":
            continue
        if name not in STANDARD_ENTRY or not words or set(map(str, words)) - set(STANDARD_ENTRY[name]):
            said = SAYINGS.get(name) or (
                f"use one of {', '.join(STANDARD_ENTRY[name])} in the rows" if name in STANDARD_ENTRY else None
            )
            what = f"An entry's {name} is not here"
            return Instead(f"{what}: {said}." if said else f"{what}: change the rows, or --columns, or omit it.")
    return None


def format_of(entry: dict) -> str | Instead | None:
    """Our format of an entry's type; None where the columns say it."""
    kind = entry.get("type")
    if isinstance(kind, dict):
        shown = str(kind.get("format") or "{instruction}").strip()
        if kind.get("system_prompt") or shown not in ("{instruction}", "{instruction} {input}"):
            return Instead("An entry's type formats rows by a text of its own. Write rows with prompt and completion.")
        return None
    if kind is None:
        return None
    word, _, variant = str(kind).replace(":", ".").partition(".")
    if word in BY_COLUMNS or (word == "chat_template" and variant):
        return None
    if word not in FORMATS:
        return Instead(
            f"An entry's type is {kind}, not one of {', '.join(FORMATS)}: formats are detected from the columns, which "
            "--columns renames."
        )
    return FORMATS[word]


def columns_of_type(kind) -> dict:
    """Columns that a type which is a mapping names."""
    return {ENTRY_COLUMNS[k]: v for k, v in kind.items() if k in ENTRY_COLUMNS} if isinstance(kind, dict) else {}


def one_name(entries) -> str | Instead:
    """The words of --validation_dataset, which takes one name and its split."""
    if isinstance(entries, Instead):
        return entries
    (first, *more) = entries
    if more or set(first) - {"name", "split", "format"}:
        return Instead("--validation_dataset takes one file or name, with the columns of --dataset. Give one.")
    name = first["name"] + (f"@{first['split']}" if first.get("split") else "")
    return f"--validation_dataset {shlex.quote(name)}"


KNOWN_COLUMNS = {("messages", "conversations"), ("messages", "conversation"), ("system", "system_prompt")}
# What a plugin brings that is done here in any case.
FUSES = ("cut_cross_entropy", "liger", "kernels", "expert_parallel")
TO_DO = {
    "spectrum": "--layers_to_transform and --lora_target_modules choose what is trained",
    "kd": "for distillation use a tool such as TRL",
    "swanlab": "there are tensorboard, wandb, mlflow, trackio and csv: --log_to NAME,NAME",
    "lm_eval": "score.py scores a trained model",
    "llm_compressor": "export.py quantizes a trained model",
}


def plugins(value) -> LeftOut | Instead:
    """Plugins that only fuse kernels change nothing here."""
    names = [
        str(name).removeprefix("axolotl.integrations.") for name in (value if isinstance(value, list) else [value])
    ]
    other = [name.partition(".")[0] for name in names if name.partition(".")[0] not in FUSES]
    if other:
        return Instead(f"{other[0]} is not here: {TO_DO.get(other[0], 'plugins are not run. Omit it')}.")
    return LeftOut("Logits are computed at target positions, in chunks, and kernels are chosen for the device.")


def template(value) -> str | LeftOut:
    """Axolotl's names of templates are those that models come with."""
    if str(value).startswith("tokenizer_default_fallback_") or str(value) in ("tokenizer_default", "jinja"):
        return LeftOut("The tokenizer's own template; else ChatML.")
    if str(value) == "chatml":
        return "--chat_template chatml"
    return LeftOut("The tokenizer's own template is used, which --dry_run shows on three rows; else ChatML.")


def template_file(value) -> str | Instead:
    if "{" in str(value):
        return Instead("Write the template into a file: --chat_template FILE.")
    return "--chat_template {}"


def model_type(value) -> LeftOut | Instead:
    word = str(value)
    if "Classification" in word or "Reward" in word:
        return CLASSIFIES
    return LeftOut("The kind of model and tokenizer is read from its folder.")


CLASSIFIES = Instead("This trains language models. For a classifier or a reward model use a tool such as TRL.")
IMAGES = Instead("This trains text: there are no images and no audio. Omit it, and train on rows of text.")
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
    **{k: HF[k] for k in ("torch_compile_mode", "torch_empty_cache_steps", "fsdp")},
    **{k: entry for k, entry in HF.items() if k.startswith(("fsdp_config", "accelerator_config."))},
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
    "pretraining_dataset": Computed(
        lambda value: value if isinstance(value, str) else datasets(value), "`dataset`, a name or a list of entries"
    ),
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
            "false": "| --use_gradient_checkpointing false",
            **dict.fromkeys(("offload", "offload_disk"), "--use_activation_cpu_offload true"),
        }
    ),
    "gradient_checkpointing_kwargs": REENTRANT,
    "activation_offloading": ByValue(
        {**dict.fromkeys(("true", "legacy", "disk", "hidden_states"), "--use_activation_cpu_offload true"), "false": ""}
    ),
    "layer_offloading": ByValue({"true": "--use_cpu_offload true", "false": ""}),
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
    "special_tokens.eos_token": "eos_token",
    "special_tokens.additional_special_tokens": "new_tokens",
    "special_tokens.*": LeftOut("The tokenizer's own tokens are used, and padding is no target."),
    "chat_template": Computed(template, "the tokenizer's own; `chatml`: `--chat_template chatml`"),
    "chat_template_jinja": Computed(template_file, "`--chat_template`, if it is a file"),
    "train_on_eos": ByValue({"turn": LeftOut(EVERY_END), "*": Instead(f"{EVERY_END} Omit it.")}),
    "roles_to_train": ByValue(
        {
            **dict.fromkeys(("assistant", "gpt", "model"), LeftOut("Only answers are learned by default.")),
            "*": Instead("The assistant's turns are learned, or all with --train_on_prompt."),
        }
    ),
    "bnb_config_kwargs.bnb_4bit_use_double_quant": "double_quant",
    "bnb_config_kwargs.bnb_4bit_quant_type": "quant_type",
    "bnb_config_kwargs.bnb_4bit_compute_dtype": DTYPES,
    "bnb_config_kwargs.*": LeftOut("It is not needed here."),
    "bnb_config_kwargs": ByValue({"*": Instead("There are --quant_type, --double_quant and --n_bits.")}),
    "evals_per_epoch": ByValue({"1": "--eval_every auto", "*": LeftOut("--eval_every N evaluates every N steps.")}),
    "saves_per_epoch": LeftOut("--save_every N saves every N steps; the last step is saved."),
    "peft_layers_to_transform": "layers_to_transform",
    **instead(ALL_LAYERS, "peft_layers_pattern", "unfrozen_parameters", "lisa_n_layers"),
    **instead(
        "Layers of a new adapter share one rank and alpha; --adapter reads patterns. Omit it.",
        "lora_rank_pattern",
        "lora_alpha_pattern",
    ),
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
    **left_out(
        "Embeddings have a row for each token, and no more.",
        *("resize_token_embeddings_to_32x", "mean_resizing_embeddings", "shrink_embeddings"),
    ),
    **instead("Write it as the system message of the rows.", "default_system_message"),
    "trust_remote_code": NO_CODE,
    **instead("The base is not changed before training. Omit it.", "rope_scaling", "reinit_weights"),
    **instead("ReLoRA is not here. Omit it.", "relora", "relora_prune_ratio", "jagged_restart_steps"),
    **instead("ReLoRA is not here. Omit it.", "jagged_restart_warmup_steps", "jagged_restart_anneal_steps"),
    **instead(
        "There are LoRA, DoRA, rsLoRA, LoRA+ and five initializations.", "loftq_config", "peft_layer_replication"
    ),
    **left_out("Products are computed in --precision, where fp8 asks for less.", "fp8"),
    "fp8_enable_fsdp_float8_all_gather": LeftOut("Weights are gathered in --precision."),
    **instead(
        "Quantization-aware training is not here. export.py quantizes what was trained.",
        *("qat.*", "quantization.*", "nvfp4_merge_aware", "use_onebitllms"),
    ),
    **dict.fromkeys(("reward_model", "process_reward_model", "num_labels"), CLASSIFIES),
    **instead("For rewards, GRPO and PPO use a tool such as TRL.", "vllm.*", "trl.*", "ebft.*", "rl_adapter_ref_model"),
    **instead("For distillation use a tool such as TRL.", "kd_trainer", "kd_ce_alpha", "kd_alpha", "kd_temperature"),
    "plugins": Computed(plugins, "left out, where it fuses kernels; else refused"),
    "model_type": Computed(model_type, "left out: the kind of model is read from its folder; refused: a classifier"),
    "type_of_model": Computed(model_type, "left out: the kind of model is read from its folder; refused: a classifier"),
    "processor_type": IMAGES,
    **dict.fromkeys(("image_size", "image_resize_algorithm", "is_multimodal"), IMAGES),
    "expert_parallel_size": "ep_degree",
    **left_out("Tokens travel to the ranks that hold their experts.", "expert_parallel_num_nvl_bytes"),
    **left_out("Tokens travel to the ranks that hold their experts.", "expert_parallel_token_capacity"),
    "quantize_moe_experts": LeftOut("Experts are quantized as every other linear layer is."),
    "lora_target_parameters": PEFT["target_parameters"],
    "full_finetune": ByValue({"true": "--train_type full", "false": ""}),
    "torch_dtype": DTYPES,
    "adam_eps": "adam_epsilon",
    "model_config.output_router_logits": ROUTER_LOSS,
    "model_config.*": Instead("The model opens with its own config.json. Omit it."),
    **dict.fromkeys(
        ("overrides_of_model_config.*", "overrides_of_model_kwargs.*"),
        Instead("The model opens with its own config.json. Omit it."),
    ),
    "model_quantization_config": ByValue(
        {
            "Mxfp4Config": LeftOut("A base in MXFP4 is dequantized as it is read."),
            "*": Instead("A base opens as its files say. --train_type qlora quantizes it."),
        }
    ),
    "model_quantization_config_kwargs.*": LeftOut("A base in MXFP4 is dequantized as it is read."),
    **instead("Give learning_rate too: --cosine_min_lr_ratio F is the final rate, as a fraction of it.", "eta_min"),
    "peft.loftq_config.loftq_bits": ByValue(
        {"4": "--init_lora_weights loftq", "*": Instead("--init_lora_weights loftq is of the bits of --n_bits.")},
        {"4": "for a base of --n_bits, with --train_type qlora"},
    ),
    **instead("A schedule has linear warmup. Omit it.", "lr_quadratic_warmup"),
    **instead("Cosine falls over the whole run, to --cosine_min_lr_ratio.", "cosine_constant_lr_ratio"),
    **instead("Repeated rows are kept, and --dry_run counts them. Omit it.", "dataset_exact_deduplication"),
    "gptq": LeftOut("A base that is quantized opens as its files say."),
    **instead("--layers_to_transform and --num_layers choose layers.", "lisa_step_interval", "lisa_layers_attribute"),
    **instead(
        "Axolotl's PoSE is not here. Omit it.",
        *("use_pose", "pose_split_on_token_ids", "pose_max_context_len", "pose_num_chunks"),
    ),
    "dpo_label_smoothing": HF_DPO,
    **dict.fromkeys(("dpo_use_weighting", "dpo_norm_loss", "rpo_alpha", "cpo_alpha"), HF_DPO),
    **instead("Adam has --adam_beta1, --adam_beta2 and --adam_epsilon. Omit it.", "adam_epsilon2", "adam_beta3"),
    **instead("Every weight has the same rate, but for --loraplus_lr_ratio. Omit it.", "lr_groups"),
    **instead(
        "The optimizer is not here; --optimizer has muon and others. Omit it.",
        *("dion_lr", "dion_momentum", "dion_rank_fraction", "dion_rank_multiple_of"),
    ),
    **instead("Diffusion models are not trained here.", "diffusion.*", "noise_scheduler"),
    **instead("The attention of the model is trained as it is. Omit it.", "xpos_rope", "landmark_attention"),
    "chat_template_kwargs": Instead("A row's chat_template_kwargs say it, row by row."),
    "merge_lora": Instead("export.py --checkpoint RUN --output_dir DIR merges an adapter into its base."),
    "max_packed_sequence_len": "context_length",
    "noisy_embedding_alpha": "neftune_noise_alpha",
    "evaluation_strategy": WHEN_EVALUATED,
    "label_smoothing_factor": "label_smoothing",
    "hub_token": HF["hub_token"],
    **instead("Schedules have no such setting. Omit it.", "lr_div_factor"),
    **instead("Rows are shuffled. Omit it.", "curriculum_sampling"),
    **instead("--assume_memory plans for a device with less memory.", "gpu_memory_limit", "max_memory"),
    **{f"use_{n}": ByValue({"true": f"--log_to {n}", "false": ""}) for n in ("mlflow", "trackio", "tensorboard")},
    **{f"{n}_{end}": flag for n in ("trackio", "mlflow") for end, flag in RUNS.items()},
    "trackio_space_id": HF["trackio_space_id"],
    "mlflow_tracking_uri": LeftOut("MLflow reads its own environment variables."),
    "hf_mlflow_log_artifacts": LeftOut("--output_dir has every file."),
    **dict.fromkeys(("use_comet", "use_swanlab"), NAME_THEM),
    **left_out(
        "A setting of a tracker that is not here.",
        *(f"swanlab_{n}" for n in ("project", "experiment_name", "description", "mode", "workspace", "log_model")),
        *(f"swanlab_{n}" for n in ("log_completions", "completion_log_interval", "completion_max_buffer", "run_name")),
        *(f"comet_{n}" for n in ("workspace", "project_name", "experiment_key", "mode", "online")),
    ),
    **left_out("metrics.jsonl has every number.", "use_otel_metrics", "otel_metrics_host", "otel_metrics_port"),
    **instead(
        "Every row is read. Change the file, or use --dataset_samples.", "dataset_shard_num", "dataset_shard_idx"
    ),
    **instead("A full upload is --push_to_hub, of the model.", "push_dataset_to_hub"),
    **left_out(
        KERNELS,
        *(
            "use_scattermoe",
            "use_sonicmoe",
            "llama4_linearized_experts",
            "gemma4_hybrid_attn_impl",
            "fused_attn_kernel",
        ),
        *(
            "use_glm_dsa_kernels",
            "flex_attn_compile_kwargs.*",
            "gptq_disable_exllama",
            "flash_optimum",
            "torchdistx_path",
        ),
        *(
            "deepcompile",
            "heads_k_stride",
            "ring_attn_func",
            "bettertransformer",
            "flash_attn_fuse_qkv",
            "dsv4_fp4_grouped_mode",
            "experimental_skip_move_to_device",
        ),
        *("xformers_attention", "sdp_attention", "flex_attention", "sage_attention", "eager_attention", "s2_attention"),
        *("flash_attn_cross_entropy", "flash_attn_fuse_mlp", "flash_attn_rms_norm", "lora_mlp_kernel"),
        *(f"unsloth_{n}" for n in ("cross_entropy_loss", "lora_mlp", "lora_qkv", "lora_o", "rms_norm", "rope")),
        *("lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel", "experts_implementation", "use_kernels"),
    ),
    **left_out(
        "Logits are computed at target positions, in chunks.",
        *("chunked_cross_entropy", "chunked_cross_entropy_num_chunks", "tiled_mlp", "liger_rope", "liger_rms_norm"),
        *("liger_glu_activation", "liger_layer_norm", "liger_fused_linear_cross_entropy", "cut_cross_entropy"),
        *("liger_rms_norm_gated", "liger_cross_entropy", "liger_use_token_scaling", "tiled_mlp_num_shards"),
        *("tiled_mlp_use_original_mlp", "dpo_use_logits_to_keep"),
    ),
    **left_out(
        "Documents are packed end to end if a check on the model passes (--batch_layout auto).",
        *("eval_sample_packing", "pad_to_sequence_len", "sample_packing_group_size", "sample_packing_bin_size"),
        *("multipack_real_batches", "batch_flattening", "sample_packing_sequentially", "pad_to_multiple_of"),
        *("pretrain_multipack_attn", "streaming_multipack_buffer_size", "sample_packing_mp_start_method"),
        *(
            "sample_packing_eff_est",
            "dpo_padding_free",
            "pretrain_multipack_buffer_size",
            "pretraining_sample_concatenation",
            "min_sample_len",
        ),
    ),
    **left_out(
        "Rows are read and tokenized once and kept, on all cores.",
        *("dataset_prepared_path", "dataset_processes", "dataset_num_proc", "dataset_keep_in_memory"),
        *("skip_prepare_dataset", "shuffle_merged_datasets", "shuffle_before_merging_datasets"),
    ),
    **left_out(
        "The kind of model and tokenizer is read from its folder.",
        *("tokenizer_type", "tokenizer_config", "base_model_config", "cls_model_config", "tokenizer_save_jinja_files"),
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
    **left_out(
        "Axolotl counts or records it by itself.", "is_preprocess", "total_num_tokens", "total_supervised_tokens"
    ),
    **left_out("A checkpoint is of any number of ranks.", "fsdp_final_state_dict_type"),
    **left_out("A line per --log_every_n_steps steps, from the first.", "logging_first_step"),
    **left_out(
        "--save_every N saves every N steps; the last step is saved.", "save_first_step", "dynamic_checkpoint.*"
    ),
    **left_out("score.py scores a trained model.", "bench_dataset", "bench_split", "gradio_title", "gradio_share"),
    **left_out("The launcher starts the ranks.", "ray_run_name", "ray_num_workers", "resources_per_worker.*"),
    **left_out("Tied weights stay tied.", "peft_ensure_weight_tying"),
    **left_out("HF_TOKEN is read from the environment.", "hf_use_auth_token"),
    **left_out("Malformed rows are an error, or --skip_bad_rows N.", "strict"),
    **left_out("An answer's end is learned, and by default no prompt.", "eot_tokens", "fix_untrained_tokens"),
    **left_out(
        "Adapter weights are fp32.", "peft_autocast_adapter_dtype", "embeddings_skip_upcast", "lora_fan_in_fan_out"
    ),
    **left_out("metrics.jsonl has them.", "include_tokens_per_second", "include_tkps"),
    **left_out("--profile runs the profiler.", "profiler_steps", "profiler_steps_start"),
}
