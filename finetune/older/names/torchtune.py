"""Keys of torchtune's recipes, 0.6. Nested keys are joined by dots; `_component_` is left out of the names."""

from finetune.config import OPTIMIZERS, SCHEDULES
from finetune.older.names.entries import ByValue, Computed, Instead, LeftOut, Names, instead, left_out, same
from finetune.older.names.trl import DTYPES

COMPONENT = "_component_"


def model_of(value) -> str:
    """The train type that a model's builder names."""
    word = str(value).rsplit(".", 1)[-1]
    return (
        "--train_type qlora"
        if word.startswith("qlora")
        else "--train_type lora"
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
    **dict.fromkeys(("alpaca_dataset",), "tatsu-lab/alpaca"),
    "alpaca_cleaned_dataset": "yahma/alpaca-cleaned",
    "slimorca_dataset": "Open-Orca/SlimOrca-Dedup",
    "samsum_dataset": "Samsung/samsum",
    "stack_exchange_paired_dataset": "lvwerra/stack-exchange-paired",
    "grammar_dataset": "liweili/c4_200m",
    "wikitext_dataset": "EleutherAI/wikitext_document_level",
}


def dataset_of(value) -> str | LeftOut:
    """The Hub's name of a builder's rows; of a builder that takes a source, that is the dataset."""
    word = str(value).rsplit(".", 1)[-1]
    return f"| --dataset {DATASETS[word]}" if word in DATASETS else LeftOut("Formats are detected from the columns.")


TORCHTUNE: Names = {
    **same("output_dir", "batch_size", "seed", "gradient_accumulation_steps", "log_every_n_steps", "compile"),
    f"model.{COMPONENT}": Computed(model_of, "`--train_type`, by the builder's name"),
    "model.lora_rank": "lora_rank",
    "model.lora_alpha": "lora_alpha",
    "model.lora_dropout": "lora_dropout",
    "model.use_dora": "use_dora",
    "model.lora_attn_modules": Instead("Names of layers are --lora_target_modules q_proj,v_proj; all by default."),
    "model.apply_lora_to_mlp": LeftOut("--lora_target_modules all has every linear layer but the head."),
    "model.apply_lora_to_output": Instead("Name the head too: --lora_target_modules all, then the name of the head."),
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
    **instead("The optimizer steps after the backward pass. Omit it.", "optimizer_in_bwd"),
    **instead("Training computes in fp32, bf16 or fp16. Omit it.", "quantizer", "enable_fp8_training"),
    **left_out(
        "The kind of model and tokenizer is read from its folder.",
        *("tokenizer.path", f"tokenizer.{COMPONENT}", "tokenizer.merges_file", "tokenizer.prompt_template"),
        *(f"checkpointer.{COMPONENT}", "checkpointer.checkpoint_files", "checkpointer.recipe_checkpoint"),
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
