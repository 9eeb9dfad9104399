"""Values of our own flags in the words of other programs. Looked up only where a value is not one of the flag's own.

An entry may be the name of one of another program, as in the tables.
"""

from finetune.names.entries import ByValue, Computed, Instead
from finetune.names.values import IN_THE_FILE, NAME_THEM, warmup

NO_CLIPPING = "--apply_gradient_clipping false"
OWN_VALUES: dict[str, str | ByValue | Computed] = {
    "train_type": ByValue(
        {
            "dora": "--train_type lora --use_dora true",
            "qdora": "--train_type qlora --use_dora true",
            **dict.fromkeys(("none", "fft", "full_finetune"), "--train_type full"),
        }
    ),
    "optimizer": "transformers:optim",
    "lr_scheduler": "transformers:lr_scheduler_type",
    "precision": "TRL:dtype",
    "attention": "TRL:attn_implementation",
    "log_to": ByValue({"none": IN_THE_FILE, "all": NAME_THEM}),
    "init_lora_weights": "PEFT:init_lora_weights",
    "preference": "Axolotl:rl",
    "warmup_steps": Computed(warmup, "`--warmup_steps`; a number below 1 is `--warmup_ratio`"),
    "grad_norm": ByValue({"0": NO_CLIPPING, "0.0": NO_CLIPPING}, {"0": "0 clips nothing there"}),
    "quantization_backend": ByValue({"bitsandbytes": "--quantization_backend bnb"}),
    "resume": ByValue({"true": "--resume auto", "false": ""}),
    "adapter": ByValue({"lora": "| --train_type lora", "qlora": "--train_type qlora", "none": "| --train_type full"}),
    "use_gradient_checkpointing": ByValue({"unsloth": "--use_gradient_checkpointing true"}),
    "push_to_hub": ByValue({"true": Instead("It takes the repository: --push_to_hub your-name/model."), "false": ""}),
}
