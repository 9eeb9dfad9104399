"""Keys of torchtune's recipes, 0.6. Nested keys are joined by dots; `_component_` is left out of the names."""

from finetune.config import SCHEDULES
from finetune.older.names.entries import ByValue, Computed, Instead, LeftOut, Names, instead, left_out, same
from finetune.older.names.hf import BETAS
from finetune.older.names.trl import DTYPES
from finetune.parts.optimizers import OPTIMIZERS

COMPONENT = "_component_"


def model_of(value) -> str | Instead:
    """The train type that a model's builder names."""
    word = str(value).rsplit(".", 1)[-1]
    if any(kind in str(value) for kind in ("vision", "clip", "flamingo", "early_fusion")):
        return NO_IMAGES
    if "classifier" in word:
        return NO_REWARDS
    return (
        "--train_type qlora"
        if word.startswith("qlora")
        else "| --train_type lora"
        if word.startswith("lora")
        else "--train_type full"
    )


def optimizer_of(value) -> str | Instead:
    word = str(value).rsplit(".", 1)[-1].lower()
    known = {
        **{name: name for name in ("adamw", "adam", "sgd", "adadelta", "adafactor", "muon")},
        **{"adamw8bit": "adamw_8bit", "pagedadamw8bit": "paged_adamw_8bit", "pagedadamw32bit": "paged_adamw_32bit"},
        **{"pagedadamw": "paged_adamw_32bit", "lion": "lion", "adamwschedulefree": "schedule_free_adamw"},
    }
    if word not in known:
        return Instead(f"There are {', '.join(OPTIMIZERS)}.")
    return f"--optimizer {known[word]}"


def schedule_of(value) -> str | Instead:
    if str(value).endswith("get_cosine_schedule_with_warmup"):
        return "--lr_scheduler cosine --cosine_min_lr_ratio 0"
    return Instead(f"There are {', '.join(SCHEDULES)}.")


def loss_of(value) -> str | LeftOut | Instead:
    word = str(value).rsplit(".", 1)[-1]
    if "CrossEntropy" in word or word.startswith("CE") or word == "LinearCrossEntropyLoss":
        return LeftOut("It is the loss here: the next token's, with logits in chunks.")
    if word == "DPOLoss":
        return "--preference dpo"
    return Instead("There are next-token training and --preference dpo, orpo, simpo and kto.")


DATASETS = {
    "alpaca_dataset": "tatsu-lab/alpaca",
    "alpaca_cleaned_dataset": "yahma/alpaca-cleaned",
    "slimorca_dataset": "Open-Orca/SlimOrca-Dedup",
    "samsum_dataset": "Samsung/samsum",
    "stack_exchange_paired_dataset": "lvwerra/stack-exchange-paired",
    "hh_rlhf_helpful_dataset": "RLHFlow/HH-RLHF-Helpful-standard",
    "grammar_dataset": "liweili/c4_200m",
    "cnn_dailymail_articles_dataset": "ccdv/cnn_dailymail:3.0.0",
    "wikitext_dataset": "EleutherAI/wikitext_document_level",
}
LEARN_PROMPTS = ("alpaca_dataset", "alpaca_cleaned_dataset")  # their builders, unless train_on_input is false
COLUMNS = {"input": "question", "output": "answer", "column": "text", "conversation_column": "messages"}
FILE_TYPES = ("json", "csv", "parquet", "text", "arrow")
NO_IMAGES = Instead("This trains text: there are no images. Use a tool such as torchtune itself.")
NO_TEACHER = Instead("There is no teacher: for distillation use a tool such as torchtune itself.")
NO_REWARDS = Instead("For rewards, PPO and GRPO use a tool such as TRL.")


def dataset_of(value) -> str | LeftOut:
    """The Hub's name of a builder's rows; of a builder that takes a source, that is the dataset."""
    word = str(value).rsplit(".", 1)[-1]
    return f"| --dataset {DATASETS[word]}" if word in DATASETS else LeftOut("Formats are detected from the columns.")


def datasets(parts) -> tuple[list[dict] | Instead, set[str]]:
    """(entries of our --dataset, settings that are not settled by them) of a builder's settings, or a list of them.
    An entry has train_on_prompt where its builder learns prompts unless it is told not to.
    """
    if isinstance(parts, list):
        every = [datasets(part) for part in parts]
        refused = next((found for found, _ in every if isinstance(found, Instead)), None)
        left = sorted({name for _, names in every for name in names} - {"packed", "train_on_input"})
        if left:
            refused = refused or Instead(f"{left[0]} of one of several datasets is not here. Omit it.")
        return refused or [entry for found, _ in every if isinstance(found, list) for entry in found], set()
    word = str(parts.get(COMPONENT, "")).rsplit(".", 1)[-1]
    if "multimodal" in str(parts.get(COMPONENT, "")):
        return NO_IMAGES, set()
    name, split = parts.get("source") or DATASETS.get(word), parts.get("split")
    if name in FILE_TYPES:
        name, split = parts.get("data_files"), None if split == "train" else split
    if not isinstance(name, str):
        return [], set(parts)
    kind = parts.get("name") or parts.get("subset")
    columns = {COLUMNS.get(k.rpartition(".")[2], k.rpartition(".")[2]): v for k, v in parts.items() if _is_column(k)}
    columns = {ours: column for ours, column in columns.items() if ours != column}
    ours = {"name": name + (f":{kind}" if kind else ""), "split": split, "columns": columns or None}
    if word in LEARN_PROMPTS and parts.get("train_on_input") is None:
        ours["train_on_prompt"] = True
    settled = {COMPONENT, "source", "split", "data_files", "name", "subset", "conversation_style"}
    return [{k: v for k, v in ours.items() if v is not None}], {
        k for k in parts if k not in settled and not _is_column(k)
    }


def _is_column(name: str) -> bool:
    return name in ("column", "conversation_column") or name.startswith("column_map.")


def targets(attention: list, mlp, output, model: str) -> str:
    """--lora_target_modules of what a builder of LoRA is given, by the names that transformers has for them."""
    is_phi = ".phi" in model
    leaves = ["qkv_proj" if is_phi and n[:2] in ("q_", "k_", "v_") else NAMES.get(n, n) for n in map(str, attention)]
    if str(mlp).lower() == "true":
        leaves += ["gate_up_proj", "down_proj"] if is_phi else ["gate_proj", "up_proj", "down_proj"]
    return ",".join(dict.fromkeys(leaves + (["lm_head"] if str(output).lower() == "true" else [])))


NAMES = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}

TORCHTUNE: Names = {
    **same("output_dir", "batch_size", "seed", "gradient_accumulation_steps", "log_every_n_steps", "compile"),
    f"model.{COMPONENT}": Computed(model_of, "`--train_type`, by the builder's name"),
    "model.lora_rank": "lora_rank",
    "model.lora_alpha": "lora_alpha",
    "model.lora_dropout": "lora_dropout",
    "model.use_dora": "use_dora",
    **instead("Give lora_attn_modules too.", "model.apply_lora_to_mlp", "model.apply_lora_to_output"),
    "model.lora_attn_modules": Computed(
        lambda value: f"--lora_target_modules {targets(value, False, False, '')}",
        "`--lora_target_modules`, with apply_lora_to_mlp and apply_lora_to_output",
    ),
    **dict.fromkeys(("model.image_size", "collate_fn"), NO_IMAGES),
    "model.decoder_trainable": ByValue(
        {**dict.fromkeys(("lora", "true"), LeftOut("What reads text trains.")), "*": NO_IMAGES}
    ),
    **dict.fromkeys(
        ("model.encoder_trainable", "model.fusion_trainable"),
        ByValue({**dict.fromkeys(("frozen", "false"), LeftOut("What reads images does not train.")), "*": NO_IMAGES}),
    ),
    **dict.fromkeys(("teacher_model.*", "teacher_checkpointer.*", "kd_loss.*", "kd_ratio"), NO_TEACHER),
    **dict.fromkeys(
        (
            *("policy_model.*", "reward_and_value_model.*", "ref_policy_checkpointer.*", "value_checkpointer.*"),
            *("reward_checkpointer.*", "ppo_epochs", "ppo_batch_size", "num_steps", "gamma", "lmbda", "kl_coeff"),
            *("forward_batch_size", "penalise_no_eos", "whiten_rewards", "min_response_length", "reward_penalty"),
            *("grpo_samples", "max_generated_tokens", "stop_token_ids", "loss.epsilon", "loss.kl_coeff"),
            *("loss.value_clip_range", "loss.value_coeff"),
        ),
        NO_REWARDS,
    ),
    "base_model_path": NO_REWARDS,
    "ref_checkpointer.*": LeftOut("--preference dpo has the model before training as its reference."),
    **left_out("generate.py has its own flags.", "temperature", "top_k", "enable_kv_cache"),
    "model.quantize_base": ByValue({"true": "--train_type qlora", "false": ""}),
    "checkpointer.checkpoint_dir": "model_name",
    "checkpointer.output_dir": LeftOut("--output_dir has everything that a run writes."),
    "tokenizer.max_seq_len": "context_length",
    f"dataset.{COMPONENT}": Computed(dataset_of, "`--dataset`, if the builder has its own rows"),
    "dataset.source": "dataset",
    "dataset.data_files": "dataset",
    "dataset.packed": LeftOut("Documents are packed end to end if a check on the model passes (--batch_layout auto)."),
    "dataset.train_on_input": "train_on_prompt",
    "dataset.split": Instead("Write it into the name: --dataset NAME@SPLIT."),
    "dataset.max_seq_len": "context_length",
    "dataset.add_eos": ByValue({"true": LeftOut("A text's end is learned."), "*": Instead("A text's end is learned.")}),
    "dataset.masking_strategy": ByValue(
        {
            "train_on_all": "--train_on_prompt true",
            "train_on_assistant": LeftOut("Only answers are learned by default."),
            "train_on_last": "--train_on_last_turn true",
        }
    ),
    "dataset.new_system_prompt": Instead("Write it as the system message of the rows."),
    "dataset.filter_fn": Instead("Every row is read. Change the file, or use --dataset_samples."),
    "dataset_val.*": LeftOut("Validation rows are read as --dataset's are."),
    "batch_size_val": LeftOut("Evaluation is cut into forwards as training is."),
    "run_val_every_n_steps": "eval_every",
    "save_every_n_steps": "save_every",
    "save_every_n_epochs": LeftOut("--save_every N saves every N steps; the last step is saved."),
    "epochs": "num_epochs",
    "max_steps_per_epoch": Instead("There is a total: --max_steps N."),
    f"optimizer.{COMPONENT}": Computed(optimizer_of, "`--optimizer`"),
    "optimizer.lr": "lr",
    "optimizer.weight_decay": "wd",
    "optimizer.eps": "adam_epsilon",
    f"lr_scheduler.{COMPONENT}": Computed(schedule_of, "`--lr_scheduler cosine --cosine_min_lr_ratio 0`"),
    "lr_scheduler.num_warmup_steps": "warmup_steps",
    f"loss.{COMPONENT}": Computed(loss_of, "`--preference dpo` for its loss"),
    "loss.beta": "preference_beta",
    "clip_grad_norm": "grad_norm",
    "dtype": DTYPES,
    "device": ByValue({**{w: f"--backend {w}" for w in ("cuda", "cpu", "mps", "xpu")}, "*": Instead("See --backend.")}),
    "enable_activation_checkpointing": "use_gradient_checkpointing",
    "enable_activation_offloading": "use_activation_cpu_offload",
    "fsdp_cpu_offload": "use_cpu_offload",
    "tensor_parallel_dim": "tp_degree",
    "data_parallel_shard_dim": "dp_shards",
    "data_parallel_replicate_dim": "dp_degree",
    "context_parallel_dim": "cp_degree",
    "resume_from_checkpoint": ByValue({"true": "--resume auto", "false": ""}),
    f"metric_logger.{COMPONENT}": ByValue(
        {
            "torchtune.training.metric_logging.WandBLogger": "--log_to wandb",
            "*": LeftOut("metrics.jsonl in --output_dir has every number."),
        }
    ),
    "metric_logger.project": "project_name",
    "profiler.enabled": "profile",
    "profiler.with_stack": "with_stack",
    "profiler.record_shapes": "with_shapes",
    "profiler.profile_memory": "profile_memory",
    "loss.label_smoothing": "label_smoothing",
    "expert_parallel_dim": "ep_degree",
    **dict.fromkeys(("cpu_offload", "offload_ops_to_cpu"), "use_cpu_offload"),
    "metric_logger.entity": "entity",
    "metric_logger.name": "name",
    "metric_logger.group": "group",
    "metric_logger.*": LeftOut("metrics.jsonl in --output_dir has every number."),
    **dict.fromkeys(("compile.model", "compile.loss"), ByValue({"true": "| --compile true", "false": ""})),
    "compile.*": LeftOut("Layers are compiled, and the optimizer has kernels of its own."),
    **left_out(
        "It is the loss here, with logits in chunks.",
        "loss.ignore_index",
        "loss.num_output_chunks",
        "num_output_chunks",
    ),
    **instead("The optimizer has no such setting here. Omit it.", "optimizer.*"),
    **instead("A schedule has no such setting here. Omit it.", "lr_scheduler.*", unless=("0.5",)),
    **instead("Give the rows themselves: --dataset FILE or a Hub name.", "dataset.*"),
    **instead("The model opens with its own config.json. Omit it.", "model.*"),
    **left_out("All validation rows are evaluated.", "max_validation_batches"),
    **left_out(
        "It has no counterpart here, and changes no result.",
        *("context_parallel_rotate_method", "cudnn_deterministic_mode", "save_last_epoch_only"),
        *("activation_offloading_use_streams", "dist_backend", "fsdp_sharding_strategy"),
    ),
    "keep_last_n_checkpoints": "keep_last",
    "checkpointer.keep_last_n_checkpoints": "keep_last",
    "fsdp.cpu_offload": "use_cpu_offload",
    "optimizer.betas": BETAS,
    "optimizer_in_bwd": ByValue(
        {"true": LeftOut("The optimizer steps after the backward pass: the same steps, of more memory."), "false": ""}
    ),
    **instead("Quantization-aware training is not here. export.py quantizes what was trained.", "quantizer.*"),
    **left_out(
        "Products are computed in --precision, where fp8 asks for less.", "enable_fp8_training", "fp8_recipe_name"
    ),
    **left_out("Weights stream in, a tensor at a time.", "low_cpu_ram"),
    **left_out("Every decoder layer is a unit of FSDP2.", "memory_efficient_fsdp_wrap", "fsdp_reshard_after_forward"),
    **left_out("Every layer recomputes its activations, or none does.", "ac_mode", "ac_option"),
    **left_out("Each layer's plan follows from its kind.", "tensor_parallel_plan.*", "parallelize_plan.*"),
    "dataloader.shuffle": LeftOut("Rows are shuffled, by --seed."),
    "dataloader.*": LeftOut("Rows are prepared while the device computes."),
    **left_out(
        "The kind of model and tokenizer is read from its folder.",
        *("tokenizer.path", f"tokenizer.{COMPONENT}", "tokenizer.merges_file", "tokenizer.prompt_template"),
        *("tokenizer.merges_path", "tokenizer.vocab_path", "tokenizer.special_tokens_path", "tokenizer.*"),
        *(f"checkpointer.{COMPONENT}", "checkpointer.checkpoint_files", "checkpointer.recipe_checkpoint"),
        *("checkpointer.checkpoint_files.*", "checkpointer.safe_serialization", "checkpointer.*"),
        *("checkpointer.model_type", "checkpointer.adapter_checkpoint", "custom_sharded_layers"),
    ),
    **left_out("Fused if the device has the kernels.", "optimizer.fused"),
    **left_out(
        "metrics.jsonl has memory and every number.", "log_peak_memory_stats", "metric_logger.log_dir", "log_level"
    ),
    **left_out("Rows are shuffled, by --seed.", "shuffle"),
    **left_out(
        "A checkpoint has everything that resuming needs.", "save_adapter_weights_only", "enable_async_checkpointing"
    ),
    **left_out(
        "The profiler has --wait_steps, --profiler_warmup_steps, --active_steps and --repeat.",
        *(f"profiler.{COMPONENT}", "profiler.output_dir", "profiler.cpu", "profiler.cuda", "profiler.with_flops"),
        *("profiler.wait_steps", "profiler.warmup_steps", "profiler.active_steps", "profiler.num_cycles"),
    ),
}
