"""Names of LitGPT's finetune, 0.5: its flags, which are also the nested keys of its YAML, joined by dots."""

from finetune.older.names.entries import ByValue, Computed, Instead, LeftOut, Names, instead, left_out, same
from finetune.older.names.hf import OPTIMIZERS


def optimizer_of(value) -> str | LeftOut | Instead:
    word = str(value).rsplit(".", 1)[-1].lower()
    return OPTIMIZERS.words.get(word, OPTIMIZERS.words["*"])


OPTIMIZER = Computed(optimizer_of, "`--optimizer`")
LITGPT: Names = {
    **same("seed", "lora_r", "lora_alpha", "lora_dropout"),
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
    "data": ByValue({"*": Instead("Give the rows themselves: --dataset FILE or a Hub name.")}),
    "data.json_path": "dataset",
    "data.class_path": LeftOut("Formats are detected from the columns."),
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
    "train.min_lr": LeftOut("--cosine_min_lr_ratio says how far cosine falls."),
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
    **instead(
        "Names of layers are --lora_target_modules q_proj,v_proj; all by default.",
        *("lora_query", "lora_key", "lora_value", "lora_projection", "lora_mlp", "lora_head"),
    ),
    **instead("There are --num_epochs and --max_steps.", "train.max_tokens", "train.max_time"),
    **instead("There are --adam_beta1, --adam_beta2 and --adam_epsilon.", "optimizer.init_args.betas"),
    **instead(
        "There are --adam_beta1, --adam_beta2 and --adam_epsilon.", "optimizer.init_args.eps", unless=("1e-08", "1e-8")
    ),
    **left_out("Tied weights stay tied.", "train.tie_embeddings"),
    **left_out("The model is evaluated before and after training.", "eval.initial_validation", "eval.final_validation"),
    **left_out("All validation rows are evaluated.", "eval.max_iters", "eval.evaluate_example"),
    **left_out("Rows are prepared while the device computes.", "data.num_workers", "data.init_args.num_workers"),
    "data.seed": "data_seed",
    "data.init_args.seed": "data_seed",
}
