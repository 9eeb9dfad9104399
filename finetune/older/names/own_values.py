"""Values of our own flags in the words of other programs. Looked up only where a value is not one of the flag's own."""

from finetune.older.names.axolotl import ADAPTER, PREFERENCES
from finetune.older.names.entries import ByValue, Entry, Instead
from finetune.older.names.hf import IN_THE_FILE, NAME_THEM, OPTIMIZERS, RESUME, SCHEDULES, WARMUP
from finetune.older.names.peft import INITS
from finetune.older.names.trl import ATTENTION, DTYPES

NO_CLIPPING = "--apply_gradient_clipping false"
OWN_VALUES: dict[str, Entry] = {
    "train_type": ByValue(
        {
            "dora": "--train_type lora --use_dora true",
            "qdora": "--train_type qlora --use_dora true",
            **dict.fromkeys(("none", "fft", "full_finetune"), "--train_type full"),
        }
    ),
    "optimizer": OPTIMIZERS,
    "lr_scheduler": SCHEDULES,
    "precision": DTYPES,
    "attention": ATTENTION,
    "log_to": ByValue({"none": IN_THE_FILE, "all": NAME_THEM}),
    "init_lora_weights": INITS,
    "preference": PREFERENCES,
    "warmup_steps": WARMUP,
    "grad_norm": ByValue({"0": NO_CLIPPING, "0.0": NO_CLIPPING}, {"0": "0 clips nothing there"}),
    "quantization_backend": ByValue({"bitsandbytes": "--quantization_backend bnb"}),
    "resume": ByValue({k: v for k, v in RESUME.words.items() if k != "*"}),
    "adapter": ByValue({k: v for k, v in ADAPTER.words.items() if k in ("lora", "qlora", "none")}),
    "use_gradient_checkpointing": ByValue({"unsloth": "--use_gradient_checkpointing true"}),
    "push_to_hub": ByValue({"true": Instead("It takes the repository: --push_to_hub your-name/model."), "false": ""}),
}
