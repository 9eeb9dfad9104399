"""Keys of LLaMA-Factory's YAML and command line, 0.9.5. It has HF's too."""

import json
from pathlib import Path

from finetune.older.names.entries import ByValue, Computed, Instead, LeftOut, Names, instead, left_out, same
from finetune.older.names.hf import HELD_OUT, HF
from finetune.older.names.trl import DTYPES, PACKED, TRL

MAX_INFO_BYTES = 2**20
NOT_AN_OPTIMIZER = "{} is not here: AdamW whose moments have 8 bits keeps less memory too"
NO_FP8 = "Products are computed in --precision: bf16, where fp8 asks for less."
COLUMNS = {  # of dataset_info.json -> of ours, by its formatting
    "alpaca": {
        "prompt": "instruction",
        "query": "input",
        "response": "output",
        "system": "system",
        "history": "history",
    },
    "sharegpt": {"messages": "messages", "system": "system", "tools": "tools"},
}
STANDARD_TAGS = {
    "role_tag": ("role", "from"),
    "content_tag": ("content", "value"),
    "user_tag": ("user", "human"),
    "assistant_tag": ("assistant", "gpt"),
    "system_tag": ("system",),
    "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call", "function"),
}


def datasets(names, folder=None, beside: Path = Path()) -> tuple[list[dict] | Instead, str]:
    """(entries of our --dataset, what to say) for names in `folder`/dataset_info.json, searched for here and in the
    folders above `beside`. Names that are files stay what they are, and so do all where there is no such file: then
    reading finds a file or a Hub dataset of that name, or says that there is none.
    """
    listed = [n.strip() for n in (names.split(",") if isinstance(names, str) else names)]
    if str(folder).upper() == "ONLINE":
        return [{"name": name} for name in listed], ""
    place = Path(str(folder or "data"))
    files = [parent / place / "dataset_info.json" for parent in (Path(), beside, *beside.absolute().parents)]
    file = next((f for f in files if f.is_file()), None)
    if file is None:
        if all(Path(name).exists() for name in listed):
            return [{"name": name} for name in listed], ""
        return [{"name": name} for name in listed], f", as {place}/dataset_info.json is not here: files or Hub names"
    try:
        with open(file, "rb") as opened:
            known = json.loads(opened.read(MAX_INFO_BYTES))
    except (OSError, ValueError, RecursionError):
        known = None
    found = []
    for name in listed:
        entry = known.get(name) if isinstance(known, dict) else None
        if entry is None and Path(name).exists():
            found.append({"name": name})
        elif not isinstance(entry, dict):
            return Instead(f"{name} is no name in {file}. Give dataset: FILE or a Hub name, or one that is."), ""
        else:
            ours = of_info(entry, file.parent)
            if isinstance(ours, Instead):
                return Instead(f"{file}: {name}: {ours.what}"), ""
            found.append(ours)
    return found, ""


def of_info(entry: dict, folder: Path) -> dict | Instead:
    """Our entry for one of dataset_info.json."""
    source = str(folder / entry["file_name"]) if entry.get("file_name") else entry.get("hf_hub_url")
    if not isinstance(source, str):
        return Instead("it has neither file_name nor hf_hub_url. Give dataset: FILE or a Hub name.")
    tags = {**(entry.get("tags") or {})}
    for tag, value in tags.items():
        if value not in STANDARD_TAGS.get(tag, ()):
            return Instead(
                f"its tag {tag} is {value!r}. Rename it in the rows to "
                f"{' or '.join(STANDARD_TAGS.get(tag, ('role',)))}."
            )
    columns = {}
    for theirs, column in (entry.get("columns") or {}).items():
        ours = (
            theirs
            if theirs in ("chosen", "rejected")
            else COLUMNS.get(entry.get("formatting", "alpaca"), {}).get(theirs)
        )
        if ours is None:
            return Instead(f"its column {theirs} has no counterpart. Name the columns with --columns.")
        if column and column != ours:
            columns[ours] = column
    found = {"name": source + (f":{entry['subset']}" if entry.get("subset") else ""), "split": entry.get("split")}
    return {k: v for k, v in {**found, "columns": columns or None}.items() if v is not None}


def quantized(value) -> str | Instead:
    return {"4": "--train_type qlora --n_bits 4", "8": "--train_type qlora --n_bits 8"}.get(
        str(value), "--train_type qlora --n_bits {}"
    )


def trainable_layers(value) -> str | LeftOut | Instead:
    if str(value).startswith("-"):
        return Instead("--layers_to_transform names layers by number: the first two are 0,1.")
    return (
        LeftOut("It is what --num_layers is with finetuning_type freeze.") if str(value) == "2" else "--num_layers {}"
    )


LLAMA_FACTORY: Names = {
    **{name: entry for name, entry in HF.items()},
    "use_muon": ByValue({"true": "--optimizer muon", "false": ""}),
    **same("lora_rank", "lora_alpha", "lora_dropout", "loraplus_lr_ratio", "use_rslora", "use_dora", "streaming"),
    **same("train_on_prompt", "simpo_gamma", "master_addr", "master_port", "profiler_warmup_steps"),
    "model_name_or_path": "model_name",
    "model_revision": "revision",
    "adapter_name_or_path": "adapter",
    "stage": ByValue(
        {
            **dict.fromkeys(("sft", "pt"), LeftOut("What is learned follows from the rows.")),
            **{name: f"| --preference {name}" for name in ("dpo", "kto")},
            "*": Instead("There are next-token training and --preference; for rm and ppo use a tool such as TRL."),
        }
    ),
    "finetuning_type": ByValue(
        {
            "lora": "| --train_type lora",
            "full": "--train_type full",
            "freeze": "--train_type full | --num_layers 2",
            "oft": Instead("OFT is not here. --train_type lora trains adapters too, and has DoRA and PiSSA."),
            "*": Instead("There are lora, qlora and full."),
        }
    ),
    "quantization_bit": Computed(quantized, "`--train_type qlora --n_bits N`"),
    "quantization_method": ByValue(
        {
            **dict.fromkeys(("bnb", "hqq"), "--quantization_backend {}"),
            **dict.fromkeys(("bitsandbytes",), "--quantization_backend bnb"),
            **dict.fromkeys(
                ("awq", "gptq", "aqlm", "eetq"), LeftOut("A base that is quantized opens as its files say.")
            ),
            "*": Instead("There are nf4, bnb, hqq, quanto and mlx."),
        }
    ),
    "quantization_type": "quant_type",
    "double_quantization": "double_quant",
    "lora_target": "lora_target_modules",
    "dataset": Computed(lambda value: datasets(value)[0], "`dataset`, looked up in dataset_info.json"),
    "eval_dataset": "validation_dataset",
    "val_size": HELD_OUT,
    "cutoff_len": "context_length",
    "template": ByValue({"*": LeftOut("The tokenizer's own template is used, which --dry_run shows on three rows.")}),
    "max_samples": "dataset_samples",
    "buffer_size": "shuffle_buffer",
    "neat_packing": ByValue({"true": LeftOut(PACKED), "false": ""}),
    "packing": ByValue({"true": LeftOut(PACKED), "false": ""}),
    "pissa_init": ByValue({"true": "--init_lora_weights pissa", "false": ""}, {"true": "computed exactly"}),
    "pref_beta": "preference_beta",
    "pref_loss": ByValue(
        {
            "sigmoid": "--preference dpo",
            "kto_pair": Instead("--preference kto reads pairs too."),
            **{name: f"--preference {name}" for name in ("orpo", "simpo")},
            "*": Instead("There are dpo, orpo, simpo and kto, each with the loss of its paper."),
        }
    ),
    "kto_chosen_weight": "desirable_weight",
    "kto_rejected_weight": "undesirable_weight",
    "moe_aux_loss_coef": "router_aux_loss_coef",
    "flash_attn": ByValue(
        {
            "auto": "--attention auto",
            "sdpa": "--attention sdpa",
            **dict.fromkeys(("fa2", "fa3"), "--attention flash"),
            "*": LeftOut("--attention chooses by a trial on the device."),
        }
    ),
    "disable_gradient_checkpointing": ByValue({"true": "--use_gradient_checkpointing false", "false": ""}),
    "use_reentrant_gc": "reentrant_checkpointing",
    "pure_bf16": ByValue({"true": "--precision bf16", "false": ""}, {"true": "what is trained stays in fp32"}),
    "compute_dtype": DTYPES,
    "infer_dtype": LeftOut("generate.py has --precision."),
    "export_dir": Instead("export.py --checkpoint RUN --output_dir DIR merges and exports."),
    "enable_torch_profiler": "profile",
    "profiler_output_dir": "profiling_output",
    "profiler_wait_steps": "wait_steps",
    "profiler_active_steps": "active_steps",
    "profiler_repeat": "repeat",
    "profiler_record_shapes": "with_shapes",
    "profiler_profile_memory": "profile_memory",
    "profiler_with_stack": "with_stack",
    "enable_liger_kernel": TRL["use_liger_kernel"],
    "trust_remote_code": TRL["trust_remote_code"],
    "early_stopping_steps": "early_stopping",
    "use_llama_pro": Instead("expand.py adds layers, and --llama_pro_path trains them."),
    "mix_strategy": ByValue(
        {
            "concat": LeftOut("Every row of each dataset is read once per epoch."),
            "*": Instead("Weights mix datasets: --dataset NAME:WEIGHT, several times."),
        }
    ),
    "interleave_probs": Instead("Weights mix datasets: --dataset NAME:WEIGHT, several times."),
    "additional_target": "modules_to_save",
    "dataset_dir": LeftOut("It is where dataset_info.json is, in which names of datasets are looked up."),
    "create_new_adapter": ByValue({"true": "--adapter_merge true", "false": ""}),
    "default_system": Instead("Write it as the system message of the rows."),
    "plot_loss": ByValue({"true": LeftOut("report.html in --output_dir has the curves."), "false": ""}),
    "enable_thinking": LeftOut("The template decides, by the row's chat_template_kwargs."),
    **left_out(
        "Unsloth is not used here: kernels and checkpointing are chosen for the device.",
        "use_unsloth",
        "use_unsloth_gc",
    ),
    **instead("The attention of the model is trained as it is. Omit it.", "shift_attn"),
    **instead("Every token passes through every layer. Omit it.", "mixture_of_depths"),
    "add_tokens": "new_tokens",
    "add_special_tokens": "new_tokens",
    "resize_vocab": LeftOut("--new_tokens gives embeddings and head their rows."),
    **{
        f"use_{name.lower().replace('-', '_')}": ByValue(
            {"true": "--optimizer adamw_8bit", "false": ""}, {"true": NOT_AN_OPTIMIZER.format(name)}
        )
        for name in ("GaLore", "APOLLO", "Adam-mini", "BAdam")
    },
    **left_out(
        "A setting of an optimizer that is not here.",
        *(f"galore_{n}" for n in ("target", "rank", "update_interval", "scale", "proj_type", "layerwise")),
        *(f"apollo_{n}" for n in ("target", "rank", "update_interval", "scale", "proj", "proj_type", "scale_type")),
        *("apollo_layerwise", "apollo_scale_front"),
        *(f"badam_{n}" for n in ("mode", "start_block", "switch_mode", "switch_interval", "update_ratio", "mask_mode")),
        "badam_verbose",
    ),
    **instead(
        "There are LoRA, DoRA, rsLoRA and LoRA+. Omit it.",
        *("module_dropout", "oft_rank", "oft_target", "oft_block_size", "coft"),
    ),
    **instead(
        "The loss is DPO's own, with the model before training as its reference. Omit it.",
        *("pref_ftx", "pref_bco_weight", "dpo_label_smoothing", "ld_alpha", "ref_model", "ref_model_adapters"),
    ),
    **instead(
        "The loss is the next token's, over all targets, each with the same weight. Omit it.",
        *("use_dft_loss", "use_asft_loss", "use_eaft_loss", "asft_alpha", "eaft_alpha"),
    ),
    **instead(
        "For rewards and PPO use a tool such as TRL.", "reward_model", "ppo_epochs", "ppo_target", "ppo_buffer_size"
    ),
    **left_out(NO_FP8, "fp8", "fp8_backend", "fp8_enable_fsdp_float8_all_gather"),
    **left_out("Norms and the loss compute in fp32.", "upcast_layernorm", "upcast_lmhead_output"),
    **instead("Weights are trained from those of the folder. Omit it.", "train_from_scratch", "rope_scaling"),
    "mask_history": "train_on_last_turn",
    **instead("Rows are shuffled. Omit it.", "disable_shuffling"),
    "freeze_trainable_modules": ByValue(
        {"all": LeftOut("All modules of the layers train."), "*": Instead("All modules of the layers train. Omit it.")}
    ),
    "freeze_extra_modules": "modules_to_save",
    "new_special_tokens_config": Instead("--new_tokens takes words, or a file of one per line."),
    **instead(
        "Every weight has the same rate, but for --loraplus_lr_ratio. Omit it.",
        "loraplus_lr_embedding",
        unless=("1e-06", "1e-6"),
    ),
    **instead("This trains text: the weights of a projector of images are not here.", "train_mm_proj_only"),
    "init_special_tokens": LeftOut("--new_tokens gives embeddings and head their rows."),
    **dict.fromkeys(("sequence_parallel_size", "sp_degree"), "cp_degree"),
    **instead(
        "For rewards and PPO use a tool such as TRL.",
        *("reward_model_adapters", "reward_model_quantization_bit", "ppo_score_norm", "ppo_whiten_rewards"),
    ),
    **left_out(
        "A setting of a tracker that is not here.",
        *(f"swanlab_{n}" for n in ("workspace", "run_name", "mode", "logdir", "lark_webhook_url", "lark_secret")),
    ),
    **left_out(
        "export.py has flags of its own.",
        *(f"export_{n}" for n in ("size", "device", "quantization_bit", "quantization_dataset", "legacy_format")),
        *("export_hub_model_id", "export_quantization_nsamples", "export_quantization_maxlen"),
    ),
    **left_out(
        "The launcher starts the ranks.", "ray_storage_path", "ray_storage_filesystem", "resources_per_worker.*"
    ),
    **left_out("Kernels are chosen for the device.", "use_v1_kernels"),
    **left_out("metrics.jsonl has tokens per second.", "include_mfu"),
    **instead("Weights are averaged by no rule. Omit it.", "use_ema", "ema_decay"),
    **instead("KTransformers and Megatron are not used here. Omit it.", "use_kt", "use_mca", "use_hyper_parallel"),
    **instead(
        "There are tensorboard, wandb, mlflow, trackio and csv: --log_to NAME,NAME.",
        "use_swanlab",
        "swanlab_project",
        "swanlab_run_name",
    ),
    "freeze_trainable_layers": Computed(trainable_layers, "`--num_layers N`"),
    **instead(
        "A Hub token belongs into the environment: HF_TOKEN. Omit it.", "hf_hub_token", "ms_hub_token", "om_hub_token"
    ),
    **left_out(
        "Rows are read and tokenized once and kept, on all cores.",
        *("overwrite_cache", "preprocessing_num_workers", "preprocessing_batch_size", "tokenized_path"),
        *("data_shared_file_system", "media_dir", "tool_format"),
    ),
    **left_out(
        "generate.py and score.py have their own flags.",
        *("temperature", "top_p", "top_k", "num_beams", "max_new_tokens", "do_sample", "repetition_penalty"),
        *("max_length", "length_penalty", "skip_special_tokens", "eval_num_beams", "generation_max_length"),
        *("infer_backend", "predict_with_generate", "compute_accuracy", "use_kv_cache"),
    ),
    **left_out(
        "The kind of model and tokenizer is read from its folder.",
        *("use_fast_tokenizer", "split_special_tokens", "cache_dir", "low_cpu_mem_usage", "device_map"),
        *("model_max_length", "adapter_folder", "offload_folder", "quantization_device_map"),
    ),
    **left_out("metrics.jsonl in --output_dir has them.", "include_effective_tokens_per_second", "print_param_status"),
    **left_out("Padding is never a target.", "ignore_pad_token_for_loss"),
    **left_out("A document attends to itself alone.", "block_diag_attn"),
    **instead("--validation_dataset takes one file or name. Give one.", "eval_on_each_dataset"),
    **left_out("pissa is saved as LoRA of twice the rank.", "pissa_convert", "pissa_iter"),
    **left_out(
        "This trains text: a row with an image, audio or video is refused as it is read.",
        *("freeze_vision_tower", "freeze_multi_modal_projector", "image_do_pan_and_scan", "crop_to_patches"),
        *(f"{kind}_{end}_pixels" for kind in ("image", "video") for end in ("max", "min")),
        *("video_fps", "video_maxlen", "audio_sampling_rate", "use_audio_in_video"),
    ),
    **left_out("The launcher starts the ranks.", "ray_run_name", "ray_num_workers", "ray_init_kwargs"),
    **left_out("Set by the launcher and the plan.", "use_ray", "resources_per_worker", "placement_strategy"),
    **left_out(
        "generate.py has flags of its own.",
        *(f"vllm_{n}" for n in ("maxlen", "gpu_util", "enforce_eager", "max_lora_rank", "config")),
        *(f"sglang_{n}" for n in ("maxlen", "mem_fraction", "tp_size", "config", "lora_backend")),
    ),
    "freeze_language_model": Instead("--lora_target_modules says what is trained."),
}
