"""Names of LitGPT's finetune, 0.5: its flags, which are also the nested keys of its YAML, joined by dots."""

from finetune.older.names.entries import ByValue, Computed, Instead, LeftOut, Names, instead, left_out, same
from finetune.older.names.hf import BETAS, OPTIMIZERS, RESUME


def optimizer_of(value) -> str | LeftOut | Instead:
    word = str(value).rsplit(".", 1)[-1].lower()
    return OPTIMIZERS.words.get(word, OPTIMIZERS.words["*"])


OPTIMIZER = Computed(optimizer_of, "`--optimizer`")
# A data class -> the Hub name of its rows.
ROWS = {
    "alpaca": "yahma/alpaca-cleaned",
    "alpaca2k": "mhenrichsen/alpaca_2k_test",
    "alpacagpt4": "vicgalle/alpaca-gpt4",
    "deita": "HuggingFaceH4/deita-10k-v0-sft",
    "dolly": "databricks/databricks-dolly-15k",
    "lima": "GAIR/lima",
}
# Which linears have an adapter: those of Llama, for the names of other models see --lora_target_modules.
TARGETS = {
    "lora_query": ("q_proj",),
    "lora_key": ("k_proj",),
    "lora_value": ("v_proj",),
    "lora_projection": ("o_proj",),
    "lora_mlp": ("gate_proj", "up_proj", "down_proj"),
    "lora_head": (),
}


def rows_of(value) -> str | LeftOut | Instead:
    """The rows of a data class."""
    word = str(value).rsplit(".", 1)[-1].lower()
    if word == "json":
        return LeftOut("Formats are detected from the columns.")
    if word not in ROWS:
        return Instead("Give the rows themselves: --dataset FILE or a Hub name.")
    return f"--dataset {ROWS[word]}"


def targets(chosen: dict[str, bool]) -> tuple[str, str]:
    """(--lora_target_modules, what differs) of lora_query and its like; "" if none is chosen."""
    on = {name for name, value in chosen.items() if value}
    head = "the head is not among them: --modules_to_save lm_head trains it in full" if "lora_head" in on else ""
    on -= {"lora_head"}
    if on == {"lora_query", "lora_value"}:
        return "default", head or "queries and values"
    if on == TARGETS.keys() - {"lora_head"}:
        return "all", head
    return ",".join(leaf for name in TARGETS if name in on for leaf in TARGETS[name]), head or "as Llama names them"


LITGPT: Names = {
    **same("seed", "lora_alpha", "lora_dropout"),
    "lora_r": ByValue({"*": "--lora_rank {} | --train_type lora"}),
    "checkpoint_dir": "model_name",
    "out_dir": "output_dir",
    "precision": ByValue(
        {
            "bf16-true": "--precision bf16",
            "bf16-mixed": "--precision bf16_autocast",
            "16-true": "--precision fp16",
            "16-mixed": "--precision fp16_autocast",
            "32-true": "--precision fp32",
            "*": Instead("There are auto, fp32, bf16, fp16, bf16_autocast and fp16_autocast."),
        }
    ),
    "quantize": ByValue(
        {
            "bnb.nf4": "--train_type qlora --quant_type nf4",
            "bnb.nf4-dq": "--train_type qlora --quant_type nf4 --double_quant true",
            "bnb.fp4": "--train_type qlora --quantization_backend bnb --quant_type fp4",
            "bnb.fp4-dq": "--train_type qlora --quantization_backend bnb --quant_type fp4 --double_quant true",
            "bnb.int8-training": "--train_type qlora --n_bits 8",
            **dict.fromkeys(("none", "null", ""), ""),
            "*": Instead("There are nf4, fp4 and 8 bits: --quant_type, --n_bits."),
        }
    ),
    "devices": ByValue({"auto": "", "1": "", "*": "--world_size {}"}),
    "num_nodes": ByValue({"1": "", "*": Instead("Start the ranks with torchrun or srun.")}),
    "data": Computed(rows_of, "`--dataset`, if the class has rows of its own"),
    "data.json_path": "dataset",
    "data.class_path": Computed(rows_of, "`--dataset`, if the class has rows of its own"),
    "data.init_args.json_path": "dataset",
    "data.val_split_fraction": "validation_split",
    "data.init_args.val_split_fraction": "validation_split",
    "data.mask_prompt": ByValue(
        {"true": LeftOut("Only answers are learned by default."), "false": "--train_on_prompt true"}
    ),
    "data.init_args.mask_prompt": ByValue(
        {"true": LeftOut("Only answers are learned by default."), "false": "--train_on_prompt true"}
    ),
    "data.prompt_style": LeftOut("The tokenizer's own chat template is used."),
    "data.init_args.prompt_style": LeftOut("The tokenizer's own chat template is used."),
    "train.epochs": "num_epochs",
    "train.max_steps": "max_steps",
    "train.micro_batch_size": "batch_size",
    "train.global_batch_size": ByValue(
        {"*": Instead("It is --batch_size x --gradient_accumulation_steps x data ranks. Give those.")}, {}
    ),
    "train.lr_warmup_steps": "warmup_steps",
    "train.lr_warmup_fraction": ByValue({"*": Instead("There it is of an epoch; --warmup_ratio is of all steps.")}),
    "train.max_seq_length": "context_length",
    "train.max_norm": "grad_norm",
    "train.min_lr": ByValue(
        {"*": "| --lr_scheduler cosine --cosine_min_lr_ratio 0"}, {"*": "finetuning falls to 0 there"}
    ),
    "train.save_interval": "save_every",
    "train.log_interval": "log_every_n_steps",
    "eval.interval": "eval_every",
    "eval.max_new_tokens": "score_max_new_tokens",
    "optimizer": OPTIMIZER,
    "optimizer.class_path": OPTIMIZER,
    "optimizer.init_args.lr": "lr",
    "optimizer.init_args.weight_decay": "wd",
    "logger_name": ByValue(
        {"wandb": "--log_to wandb", "*": LeftOut("metrics.jsonl in --output_dir has every number.")}
    ),
    "log.project": "project_name",
    "log.run": "name",
    "log.group": "group",
    "access_token": Instead("A Hub token belongs into the environment: HF_TOKEN. Omit it."),
    **{
        name: ByValue(
            {"true": Instead("Names of layers are --lora_target_modules q_proj,v_proj; all by default."), "false": ""}
        )
        for name in TARGETS
    },
    **instead("There are --num_epochs and --max_steps.", "train.max_tokens", "train.max_time"),
    "optimizer.init_args.betas": BETAS,
    "optimizer.init_args.eps": "adam_epsilon",
    "optimizer.init_args.fused": LeftOut("Fused if the device has the kernels."),
    **left_out("Only answers are learned by default.", *(f"data.{n}ignore_index" for n in ("", "init_args."))),
    **{f"data.{n}max_seq_length": "context_length" for n in ("", "init_args.")},
    **left_out(
        "The rows are those of the Hub.",
        *(f"data.init_args.{n}" for n in ("repo_id", "file_url", "file_name", "access_token", "subsets", "url")),
    ),
    **left_out("All turns of a chat are read.", "data.init_args.include_multiturn_conversations"),
    **instead("GaLore is not here; --optimizer adamw_8bit keeps less memory too.", "galore_r", "galore_alpha"),
    "optimizer.init_args.*": Instead("The optimizer has no such setting here. Omit it."),
    **instead(
        "The attention of the model is trained as it is. Omit it.", "longlora_n_groups", "longlora_context_length"
    ),
    **instead("This trains a model that exists: checkpoint_dir. Omit it.", "initial_checkpoint_dir", "model_config"),
    "tokenizer_dir": LeftOut("The kind of model and tokenizer is read from its folder."),
    **left_out("HF_HOME is where downloads are kept.", *(f"data.{n}download_dir" for n in ("", "init_args."))),
    "resume": RESUME,
    **left_out("Tied weights stay tied.", "train.tie_embeddings"),
    **left_out("The model is evaluated before and after training.", "eval.initial_validation", "eval.final_validation"),
    **left_out("All validation rows are evaluated.", "eval.max_iters", "eval.evaluate_example"),
    **left_out("Rows are prepared while the device computes.", "data.num_workers", "data.init_args.num_workers"),
    "data.seed": "data_seed",
    "data.init_args.seed": "data_seed",
}
