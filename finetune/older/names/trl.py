"""Names of TRL 1.16: SFTConfig, DPOConfig, KTOConfig, ORPOConfig, ScriptArguments, ModelConfig. They have HF's too."""

from finetune.older.names.entries import ByValue, Computed, Instead, LeftOut, Names, instead, left_out, same
from finetune.older.names.hf import HELD_OUT, HF

NO_CODE = LeftOut(
    "The code of a model folder is never run: transformers' own class opens the model, and one that it has none for is "
    "refused."
)
GENERATES = (
    "use_vllm",
    "vllm_mode",
    "vllm_server_host",
    "num_generations",
    "reward_funcs",
    "reward_model_name_or_path",
)
TEACHES = ("teacher_model", "teacher_model_name_or_path", "lmbda", "seq_kd")
CLASSIFIES = ("num_labels", "center_rewards_coefficient")
PACKED = "Documents are packed end to end if a check on the model passes (--batch_layout auto)."
PACKING = ByValue({"true": LeftOut(PACKED), "false": ""})
DTYPES = ByValue(
    {
        **dict.fromkeys(("auto", "none"), "--precision auto"),
        **dict.fromkeys(("bfloat16", "bf16"), "--precision bf16"),
        **dict.fromkeys(("float16", "fp16", "half"), "--precision fp16"),
        **dict.fromkeys(("float32", "fp32", "float"), "--precision fp32"),
        "*": Instead("There are auto, fp32, bf16 and fp16."),
    }
)
ATTENTION = ByValue(
    {
        **dict.fromkeys(("flash_attention_2", "flash_attention_3"), "--attention flash"),
        "flash_attention_torch": "--attention varlen",
        "sdpa": "--attention sdpa",
        "auto": "--attention auto",
        "*": LeftOut("--attention chooses by a trial on the device."),
    }
)
LOSSES = ByValue(
    {
        **dict.fromkeys(("sigmoid", "chunked_nll", "nll", "kto"), LeftOut("This is the loss here.")),
        "simpo": "--preference simpo",
        "dft": Instead("Every target has the same weight. Omit it."),
        "*": Instead("--preference is dpo, orpo, simpo or kto, each with the loss of its paper."),
    }
)
OVERLONG = ByValue({"keep_start": "--overlong keep_start", "keep_end": "--overlong keep_end"})


def only_answers(value) -> str | LeftOut:
    return (
        "--train_on_prompt true" if str(value).lower() == "false" else LeftOut("Only answers are learned by default.")
    )


ONLY_ANSWERS = Computed(only_answers, "the default; false is `--train_on_prompt true`")

TRL: Names = {
    **HF,
    **same("lora_alpha", "lora_dropout", "lora_target_modules", "use_rslora", "use_dora", "lora_r", "streaming"),
    **same("router_aux_loss_coef", "precompute_ref_log_probs", "desirable_weight", "undesirable_weight", "simpo_gamma"),
    "model_name_or_path": "model_name",
    "model": "model_name",
    "model_revision": "revision",
    "dataset_name": "dataset",
    "dataset_streaming": "streaming",
    "use_peft": ByValue({"true": "| --train_type lora", "false": "| --train_type full"}),
    "load_in_4bit": ByValue({"true": "--train_type qlora --n_bits 4", "false": ""}),
    "load_in_8bit": ByValue({"true": "--train_type qlora --n_bits 8", "false": ""}),
    "use_bnb_nested_quant": "double_quant",
    "bnb_4bit_quant_type": "quant_type",
    "dtype": DTYPES,
    "torch_dtype": DTYPES,
    "attn_implementation": ATTENTION,
    "max_length": "context_length",
    "max_seq_length": "context_length",
    "truncation_mode": OVERLONG,
    "packing": PACKING,
    "padding_free": PACKING,
    "completion_only_loss": ONLY_ANSWERS,
    "assistant_only_loss": ONLY_ANSWERS,
    "activation_offloading": "use_activation_cpu_offload",
    "beta": "preference_beta",
    "loss_type": LOSSES,
    "test_split_size": HELD_OUT,
    "dataset_text_field": ByValue({"text": LeftOut("A column text is found by its name."), "*": "--columns text={}"}),
    "disable_dropout": LeftOut("--lora_dropout is 0 by default."),
    **instead("Write it into the name: --dataset NAME:CONFIGURATION.", "dataset_config", unless=("default",)),
    **instead("Write it into the name: --dataset NAME@SPLIT.", "dataset_train_split", unless=("train",)),
    **instead("Write it into the name: --validation_dataset NAME@SPLIT.", "dataset_test_split", unless=("test",)),
    **instead("In a --config file dataset is a list of names, each with weight, split and columns.", "datasets"),
    "chat_template_path": "chat_template",
    **same("chat_template", "eos_token"),
    **left_out("Padding is no target, whichever token it is.", "pad_token"),
    "trust_remote_code": NO_CODE,
    **instead(
        "Start the ranks with torchrun, or with accelerate launch and --parallel_backend accelerate.",
        *("accelerate_config", "config_file"),
    ),
    "num_processes": "world_size",
    **instead("Answers are read, not generated. For GRPO, RLOO and vLLM use a tool such as TRL.", *GENERATES),
    **instead("There is no teacher: for distillation and GKD use a tool such as TRL.", *TEACHES),
    **instead(
        "This trains a language model, next token by next token. For a classifier or reward model use TRL.", *CLASSIFIES
    ),
    **instead("The model opens with its own config.json. Omit it.", "model_init_kwargs"),
    **instead("Experts are targets of --lora_target_modules all. Omit it.", "lora_target_parameters"),
    "lora_modules_to_save": "modules_to_save",
    **instead(
        "The loss is DPO's own, with the model before training as its reference. Omit it.",
        *("loss_weights", "ld_alpha", "f_divergence_type", "f_alpha_divergence_coef", "label_smoothing", "rpo_alpha"),
        *("use_weighting", "discopop_tau", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"),
        *("ref_model", "reference_free"),
        unless=("reverse_kl", "0.5", "0.05", "0.6", "512"),
    ),
    **instead("It counts a prompt with its answer: --context_length.", "max_prompt_length", "max_completion_length"),
    # The arguments of SFTTrainer and its like, for fine_tune(...).
    "train_dataset": "dataset",
    "eval_dataset": "validation_dataset",
    **instead("Give its fields as keywords of their own, such as learning_rate=2e-5.", "args"),
    **instead("Give its fields as keywords of their own, such as lora_r=16, lora_alpha=32.", "peft_config"),
    **instead("Give its fields as keywords of their own, such as load_in_4bit=True.", "quantization_config"),
    **instead("The tokenizer is the one in the model's folder: save yours there.", "processing_class", "tokenizer"),
    **instead("Rows are formatted by their columns. Give columns=, or rows that are formatted.", "formatting_func"),
    **instead("Give on_step, on_eval or on_save.", "callbacks"),
    **instead("Give score_metric.", "compute_metrics", "preprocess_logits_for_metrics"),
    **instead("Give optimizer, lr and lr_scheduler.", "optimizers", "optimizer_cls_and_kwargs"),
    **instead("Rows are batched by their tokens. Omit it.", "data_collator"),
    **left_out(PACKED, "packing_strategy", "eval_packing", "pad_to_multiple_of"),
    **left_out("Rows are shuffled, by --seed.", "shuffle_dataset"),
    **left_out("Rows are tokenized once and kept, on all cores.", "dataset_kwargs", "dataset_num_proc"),
    **left_out("See --microbatch_tokens.", "precompute_ref_batch_size"),
    **left_out("It is not needed here.", "ignore_bias_buffers", "lora_task_type", "bnb_4bit_quant_storage"),
}
