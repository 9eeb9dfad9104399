"""Names of transformers' TrainingArguments, 5.23, and of older versions that are still typed."""

import json
import re
from pathlib import Path

from finetune.config import SCHEDULES as SCHEDULE_WORDS
from finetune.older.names.entries import ByValue, Computed, Instead, LeftOut, Names, instead, left_out, same
from finetune.parts.optimizers import OPTIMIZERS as OPTIMIZER_WORDS

IN_THE_FILE = LeftOut("metrics.jsonl in --output_dir has them in any case.")
ADAMW = ("adamw", "adamw_torch", "adamw_hf", "adamw_torch_fused", "adamw_apex_fused", "adamw_torch_npu_fused")
FEWER_BITS = ("adamw_torch_4bit", "ao_adamw_4bit", "ao_adamw_fp8")
PROJECTED = (
    *(f"{name}{end}" for name in ("galore_adamw", "galore_adamw_8bit", "apollo_adamw") for end in ("", "_layerwise")),
    *("galore_adafactor", "galore_adafactor_layerwise", "q_galore_adamw8bit", "adam_mini"),
)
OPTIMIZERS = ByValue(
    {
        **dict.fromkeys((*ADAMW, "adamw_torch_xla"), "--optimizer adamw"),
        **dict.fromkeys(("adamw_bnb_8bit", "adamw_torch_8bit", "ao_adamw_8bit"), "--optimizer adamw_8bit"),
        **dict.fromkeys(FEWER_BITS, "--optimizer adamw_8bit"),
        **dict.fromkeys(("adamw_anyprecision", "optimi_adamw"), "--optimizer adamw"),
        **dict.fromkeys(PROJECTED, "--optimizer adamw_8bit"),
        "paged_adamw": "--optimizer paged_adamw_32bit",
        **dict.fromkeys(("lion_32bit", "lion_pytorch"), "--optimizer lion"),
        **dict.fromkeys(("lion_8bit", "paged_lion_32bit", "paged_lion_8bit"), "--optimizer lion"),
        **{name: f"--optimizer {name}" for name in OPTIMIZER_WORDS},
        "*": Instead(f"There are {', '.join(OPTIMIZER_WORDS)}."),
    },
    {
        **dict.fromkeys(FEWER_BITS, "its moments have 8 bits here"),
        **dict.fromkeys(("adamw_anyprecision", "optimi_adamw"), "its moments are fp32 here"),
        **dict.fromkeys(
            PROJECTED, "gradients are not projected here: AdamW whose moments have 8 bits keeps less memory too"
        ),
        "lion_8bit": "its moment is fp32 here",
        "paged_lion_8bit": "its moment is fp32 here, and is not paged",
        "paged_lion_32bit": "its moment is not paged",
    },
)
SCHEDULES = ByValue(
    {
        **{name: f"--lr_scheduler {name}" for name in ("linear", "constant")},
        "cosine": "--lr_scheduler cosine | --cosine_min_lr_ratio 0",
        "constant_with_warmup": "--lr_scheduler constant",
        "cosine_with_restarts": "--lr_scheduler cosine_with_restarts | --cosine_min_lr_ratio 0",
        "polynomial": Instead("Here polynomial falls with the square to 0: --lr_scheduler polynomial, or linear."),
        "cosine_with_min_lr": "--lr_scheduler cosine",
        "inverse_sqrt": "--lr_scheduler inverse_sqrt",
        **dict.fromkeys(("warmup_stable_decay", "wsd"), "--lr_scheduler wsd"),
        "*": Instead(f"There are {', '.join(SCHEDULE_WORDS)}."),
    },
    {
        "cosine": "there it falls to 0",
        "cosine_with_restarts": "it has two cycles here",
        "cosine_with_min_lr": "--cosine_min_lr_ratio says how far it falls",
        "constant_with_warmup": "with --warmup_steps",
        **dict.fromkeys(("warmup_stable_decay", "wsd"), "--wsd_decay_ratio says how long it decays"),
    },
)
LOGGED = ("tensorboard", "wandb", "mlflow", "trackio")
NAME_THEM = Instead("There are tensorboard, wandb, mlflow, trackio and csv: --log_to NAME,NAME.")


def trackers(value) -> str | LeftOut | Instead:
    """One tracker or several, as text or a list."""
    text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    names = text.replace(",", " ").lower().split()
    if names in ([], ["none"]):
        return IN_THE_FILE
    return f"--log_to {','.join(names)}" if set(names) <= set(LOGGED) else NAME_THEM


LONGEST_TIMEOUT_S = 2_592_000  # a month, the maximum of --rank_timeout
STRATEGIES = {"full_shard": "full_shard", "shard_grad_op": "shard_grad_op", "no_shard": "ddp"}
STRATEGIES |= {"hybrid_shard": "hybrid_full_shard", "hybrid_shard_zero2": "hybrid_shard_grad_op"}
ZERO = {0: "ddp", 1: "shard_grad_op", 2: "shard_grad_op", 3: "full_shard"}
SHARDED: dict[str, str | LeftOut | Instead] = {
    name: f"| --sharding_strategy {ours}" for name, ours in STRATEGIES.items()
}
DEEPSPEED = Instead(
    "Sharding, offload and DDP are built in: --dp_shards, --use_cpu_offload, --dp_degree. For DeepSpeed write an "
    "accelerate config and use --parallel_backend accelerate."
)
TRACKERS = Computed(trackers, "`--log_to`; `none`: metrics.jsonl has every number; `all`: name them")
PRECISION_OF_BF16 = ByValue(
    {"true": "--precision bf16", "false": "", "auto": "| --precision auto", "full": "--precision bf16"}
)
PRECISION_OF_FP16 = ByValue({"true": "--precision fp16", "false": ""})
WHEN_EVALUATED = ByValue(
    {
        "no": LeftOut("Validation rows are evaluated before and after training, if there are any."),
        "steps": LeftOut("--eval_every N says after how many steps."),
        "epoch": "--eval_every auto",
        "*": Instead("--eval_every N evaluates every N steps."),
    }
)
WHEN_SAVED = ByValue(
    {
        "no": "--save_every 0",
        "steps": LeftOut("--save_every N says after how many steps."),
        "epoch": LeftOut("The last step is saved, and every --save_every N steps."),
        "best": LeftOut("best/ in --output_dir has the weights of the lowest validation loss."),
        "*": Instead("--save_every N saves every N steps."),
    }
)
RESUME = ByValue({"true": "--resume auto", "false": "", "*": "--resume {}"})


def warmup(value) -> str | Instead:
    """transformers reads a number below 1 as a fraction of the steps."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return "--warmup_steps {}"
    return "--warmup_ratio {}" if 0 < number < 1 else f"--warmup_steps {number:g}"


def share_of_rows(value) -> str | Instead:
    """A fraction held out for validation; other programs read a number from 1 on as a number of rows."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return "--validation_split {}"
    if number < 1:
        return "--validation_split {}"
    return Instead("Here it is a fraction: --validation_split F, with F below 1, or --validation_dataset FILE.")


def reentrant(value) -> str | Instead:
    """The one setting of gradient checkpointing's keyword arguments that changes anything."""
    text = str(value).lower().replace('"', "").replace("'", "").replace(" ", "")
    found = {"{use_reentrant:true}": "--reentrant_checkpointing true", "{use_reentrant:false}": ""}
    return found.get(text, Instead("There is --reentrant_checkpointing."))


def betas(value) -> str | Instead:
    """Adam's two, as a list or text."""
    numbers = re.findall(r"[\d.]+(?:e-?\d+)?", str(value))
    return f"--adam_beta1 {numbers[0]} --adam_beta2 {numbers[1]}" if len(numbers) == 2 else NO_BETAS


def timeout(value) -> str:
    """Seconds, of which --rank_timeout takes a month: what is larger means that nothing is waited for less long."""
    try:
        longer = float(value) > LONGEST_TIMEOUT_S
    except (TypeError, ValueError):
        longer = False
    return f"--rank_timeout {LONGEST_TIMEOUT_S}" if longer else "--rank_timeout {}"


def sharded(value) -> str | LeftOut | Instead:
    """Words of --fsdp: a strategy, offload, and what is done in any case."""
    words = set(
        str(" ".join(map(str, value)) if isinstance(value, list | tuple) else value).lower().replace(",", " ").split()
    )
    strategies = [STRATEGIES[w] for w in sorted(words) if w in STRATEGIES]
    if words <= {"false", "none", "[]"}:
        return ""
    if words - STRATEGIES.keys() - {"auto_wrap", "offload", "true"} or len(strategies) > 1:
        return Instead("Ranks shard the model by default (FSDP2). See --dp_shards and --use_cpu_offload.")
    flags = [f"--sharding_strategy {strategies[0] if strategies else 'full_shard'}"]
    return " ".join(flags + (["--use_cpu_offload true"] if "offload" in words else []))


def zero_stage(value) -> str | Instead:
    """A file of DeepSpeed's settings, or its name, as what FSDP2 does of it."""
    asked = value if isinstance(value, dict) else _read(str(value))
    if asked is None:
        name = Path(str(value)).name.lower()
        named = re.search(r"(?:z|zero|stage)_?([0-3])(?!\d)", name)
        stage, offloads = int(named[1]) if named else None, "offload" in name
    else:
        zero = asked.get("zero_optimization") or {}
        stage = zero.get("stage", 0)
        devices = [(zero.get(n) or {}).get("device") for n in ("offload_param", "offload_optimizer")]
        offloads = any(d not in (None, "none") for d in devices)
    if stage not in ZERO:
        return DEEPSPEED
    return f"--sharding_strategy {ZERO[stage]}" + (" --use_cpu_offload true" if offloads and stage else "")


def _read(path: str) -> dict | None:
    """The JSON object in a file; None if there is no such file, or it holds something else."""
    try:
        with open(path, "rb") as opened:
            found = json.loads(opened.read(2**20))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


NO_BETAS = Instead("There are --adam_beta1 and --adam_beta2.")
BETAS = Computed(betas, "`--adam_beta1` and `--adam_beta2`")
WARMUP = Computed(warmup, "`--warmup_steps`; a number below 1 is `--warmup_ratio`")
HELD_OUT = Computed(share_of_rows, "`--validation_split`; a number of rows is refused")
REENTRANT = Computed(reentrant, "`--reentrant_checkpointing`")

BY_LENGTH = LeftOut("Rows are shuffled; those of a step that are of similar length share a forward.")
FSDP_SETTINGS: Names = {
    "fsdp_config": DEEPSPEED,
    **{
        f"fsdp_config.{prefix}{name}": entry
        for prefix in ("", "fsdp_")
        for name, entry in {
            "activation_checkpointing": ByValue({"true": "--use_gradient_checkpointing true", "false": ""}),
            "offload_params": ByValue({"true": "--use_cpu_offload true", "false": ""}),
            "reshard_after_forward": ByValue(
                {"true": "| --sharding_strategy full_shard", "false": "| --sharding_strategy shard_grad_op", **SHARDED}
            ),
            "sharding_strategy": ByValue({**SHARDED, **dict(zip("1234", list(SHARDED.values())[:4], strict=True))}),
            "cpu_ram_efficient_loading": LeftOut("Weights stream in, a tensor at a time, each rank its own part."),
            **left_out("Every decoder layer is a unit.", "auto_wrap_policy", "transformer_layer_cls_to_wrap"),
            **left_out("A checkpoint is of any number of ranks.", "state_dict_type", "sync_module_states"),
            **left_out(
                "FSDP2 gathers the next layer while one computes, and trains any mix of weights.",
                *("version", "limit_all_gathers", "use_orig_params", "forward_prefetch", "backward_prefetch"),
                *("min_num_params", "mixed_precision_policy", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"),
            ),
        }.items()
    },
}

HF: Names = {
    **same("output_dir", "max_steps", "learning_rate", "weight_decay", "max_grad_norm", "gradient_accumulation_steps"),
    **same("seed", "data_seed", "neftune_noise_alpha", "warmup_ratio", "adam_beta1", "adam_beta2", "adam_epsilon"),
    "warmup_steps": WARMUP,
    "per_device_train_batch_size": "batch_size",
    "per_gpu_train_batch_size": "batch_size",
    "num_train_epochs": "num_epochs",
    "lr_scheduler_type": SCHEDULES,
    "optim": OPTIMIZERS,
    "label_smoothing_factor": "label_smoothing",
    "bf16": PRECISION_OF_BF16,
    "fp16": PRECISION_OF_FP16,
    "gradient_checkpointing": "use_gradient_checkpointing",
    "activation_checkpointing": "use_gradient_checkpointing",
    "gradient_checkpointing_kwargs": REENTRANT,
    "activation_checkpointing_kwargs": REENTRANT,
    "torch_compile": "compile",
    "auto_find_batch_size": ByValue(
        {"true": "--batch_size auto", "false": ""},
        {"true": "by the number of rows; memory limits the tokens of a forward"},
    ),
    "early_stopping_patience": "early_stopping",
    "metric_for_best_model": ByValue(
        {
            **dict.fromkeys(("loss", "eval_loss"), LeftOut("The best weights are those of the least validation loss.")),
            "*": Instead("The best weights are those of the least validation loss. Omit it."),
        }
    ),
    "logging_steps": "log_every_n_steps",
    "disable_tqdm": ByValue({"true": "--log_to stdout", "false": ""}),
    "report_to": TRACKERS,
    "run_name": "name",
    "project": "project_name",
    "eval_strategy": WHEN_EVALUATED,
    "evaluation_strategy": WHEN_EVALUATED,
    "eval_steps": "eval_every",
    "save_strategy": WHEN_SAVED,
    "save_steps": "save_every",
    "save_total_limit": "keep_last",
    "hub_model_id": "push_to_hub",
    "resume_from_checkpoint": RESUME,
    "overwrite_output_dir": "overwrite",
    "use_cpu": ByValue({"true": "--backend cpu", "false": ""}),
    "no_cuda": ByValue({"true": "--backend cpu", "false": ""}),
    "use_mps_device": ByValue({"true": "--backend mps", "false": ""}),
    "ddp_timeout": Computed(timeout, "`--rank_timeout`, seconds without a heartbeat of a rank, at most a month"),
    "fsdp": Computed(sharded, "`--sharding_strategy`, and `--use_cpu_offload true` for offload"),
    "deepspeed": Computed(
        zero_stage, "`--sharding_strategy` of its ZeRO stage, by FSDP2, and `--use_cpu_offload true`"
    ),
    **FSDP_SETTINGS,
    "push_to_hub": ByValue({"true": LeftOut("hub_model_id names the repository to push to."), "false": ""}),
    "hub_private_repo": ByValue(
        {"true": LeftOut("--push_to_hub makes a private repository."), "*": Instead("Make it public on the Hub.")}
    ),
    # What is asked for by these is not here.
    **instead("There are --adam_beta1, --adam_beta2 and --adam_epsilon.", "optim_args"),
    **instead("GaLore and APOLLO are not here; --train_type lora trains few weights. Omit it.", "optim_target_modules"),
    **instead(
        "A schedule has --warmup_steps, --warmup_ratio, --cosine_min_lr_ratio, --wsd_decay_ratio and --wsd_decay_type. "
        "Omit it.",
        "lr_scheduler_kwargs",
    ),
    "group_by_length": BY_LENGTH,
    "train_sampling_strategy": ByValue(
        {
            "random": LeftOut("Rows are shuffled, by --seed."),
            "group_by_length": BY_LENGTH,
            "*": Instead("Rows are shuffled. Omit it."),
        }
    ),
    **instead("An epoch's last step has the rows that remain. Omit it.", "dataloader_drop_last"),
    **instead("A resumed run goes on at its next row. Omit it.", "ignore_data_skip"),
    **instead("The first evaluation is before training. Omit it.", "eval_delay"),
    **instead("A Hub token belongs into the environment: HF_TOKEN. Omit it.", "hub_token", "push_to_hub_token"),
    **instead("--push_to_hub uploads to the main branch. Omit it.", "hub_revision", unless=("main",)),
    **left_out("Every decoder layer is a unit.", "fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap"),
    **dict.fromkeys(("accelerator_config.*", "accelerator_config", "parallelism_config"), DEEPSPEED),
    **left_out(
        "A step's gradients are reduced once.", "accelerator_config.gradient_accumulation_kwargs.sync_each_batch"
    ),
    **left_out("The compiler is inductor, in its default mode.", "torch_compile_backend", "torch_compile_mode"),
    **instead("Labels are the tokens of the answers, see --train_on_prompt. Omit it.", "label_names"),
    **instead(
        "--log_to trackio logs to this machine's folder of Trackio.",
        *("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
    ),
    # These change nothing, or are the case here.
    **left_out("The loss is divided once by the targets of all ranks.", "average_tokens_across_devices"),
    **left_out("Evaluation computes in the precision of training.", "bf16_full_eval", "fp16_full_eval"),
    **left_out("fp32 is as torch is set to compute it; --precision bf16 is the fast way.", "tf32"),
    **left_out("Logits are computed at target positions, in chunks.", "use_liger_kernel", "liger_kernel_config"),
    **left_out("Training keeps no cache of keys and values.", "use_cache"),
    **left_out("--low_memory returns freed memory immediately.", "torch_empty_cache_steps"),
    **left_out("A line per --log_every_n_steps steps, from the first.", "logging_strategy", "logging_first_step"),
    **left_out("Rank 0 alone logs.", "log_on_each_node", "log_level", "log_level_replica", "logging_nan_inf_filter"),
    **left_out("metrics.jsonl in --output_dir has them.", "logging_dir", "include_num_input_tokens_seen"),
    **left_out("metrics.jsonl in --output_dir has them.", "include_tokens_per_second", "skip_memory_metrics"),
    **left_out(
        "Evaluation is cut into forwards as training is, see --microbatch_tokens.",
        *("per_device_eval_batch_size", "per_gpu_eval_batch_size", "eval_accumulation_steps", "prediction_loss_only"),
        *("eval_do_concat_batches", "eval_use_gather_object", "include_for_metrics", "batch_eval_metrics"),
    ),
    **left_out("The model is evaluated before and after training.", "eval_on_start", "do_eval", "do_predict"),
    **left_out("This is what train.py does.", "do_train"),
    **left_out("A checkpoint has everything that resuming needs.", "save_only_model", "save_safetensors"),
    **left_out("Rank 0 writes, on one host.", "save_on_each_node"),
    **left_out("SIGTERM saves at the next step and ends the run.", "enable_jit_checkpoint"),
    **left_out("The upload is after training.", "hub_strategy", "hub_always_push"),
    **left_out(
        "The best weights are those of the least validation loss.", *("greater_is_better", "early_stopping_threshold")
    ),
    "load_best_model_at_end": "load_best",
    **left_out("A resumed run is the uninterrupted one.", "restore_callback_states_from_checkpoint"),
    **left_out("The order of rows and every draw follow --seed.", "full_determinism"),
    **left_out(
        "Rows are prepared while the device computes.",
        *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
        *("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order"),
    ),
    **left_out("Columns that no format uses are counted and left out.", "remove_unused_columns"),
    **left_out("Lengths are those of the tokens.", "length_column_name"),
    **left_out(
        "Data parallelism has no such setting here.",
        *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
        "ddp_backend",
    ),
    **left_out("The launcher says which rank this is.", "local_rank"),
    **left_out("--profile runs the profiler.", "debug"),
    **left_out("Mixed precision is torch's own.", "half_precision_backend", "fp16_backend", "fp16_opt_level"),
}
