"""Every flag of train.py, one dataclass field each: default, help, choices, older spellings.

The parser, the YAML reader, `fine_tune(...)` and the table in docs/flags.md are all made from these fields.
"""

from dataclasses import dataclass, field, fields

TRAIN_TYPES = ("full", "lora", "qlora")
# What users of the older scripts type: their product names, in the three words and the options they stand for.
DEPRECATED_TRAIN_TYPES = {
    "custom_lora": {"train_type": "lora"},
    "custom_qlora": {"train_type": "qlora", "quantization_backend": "bnb"},
    "bnb_lora": {"train_type": "qlora", "quantization_backend": "bnb"},
    "bnb_dora": {"train_type": "qlora", "quantization_backend": "bnb", "use_dora": True},
    "hqq_lora": {"train_type": "qlora", "quantization_backend": "hqq"},
    "hqq_dora": {"train_type": "qlora", "quantization_backend": "hqq", "use_dora": True},
    "bnb_llama_pro": {"train_type": "qlora", "quantization_backend": "bnb", "llama_pro_path": "required"},
    "hqq_llama_pro": {"train_type": "qlora", "quantization_backend": "hqq", "llama_pro_path": "required"},
}
RESIDUAL_INITS = ("pissa", "olora", "loftq")  # starts of an adapter whose product is taken out of the base
PRECISIONS = ("fp32", "bf16", "fp16", "bf16_autocast", "fp16_autocast", "bf16_buffers_autocast")
OPTIMIZERS = ("adamw", "adam", "sgd", "adadelta", "adamw_8bit")
DEPRECATED_OPTIMIZERS = {"fused_adam": "adam", "fused_adamw": "adamw", "adamw8bit": "adamw_8bit"}
SCHEDULES = ("constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "exponential")
DATASET_FORMATS = ("auto", "chat", "alpaca", "prompt_completion", "qna", "text")
SHARDING_STRATEGIES = ("full_shard", "shard_grad_op", "ddp", "hybrid_full_shard", "hybrid_shard_grad_op")
GROUPS = {
    "model": "What is trained",
    "data": "Data",
    "steps": "Steps and schedule",
    "adapter": "Adapter",
    "memory": "Precision, quantization and memory",
    "machine": "Machine and parallelism",
    "output": "Saving and resuming",
    "logging": "Logging",
    "profile": "Profiling",
    "ask": "Ask instead of train",
}


def flag(
    default, group, text, choices=None, aliases=(), minimum=None, above=None, nonzero=False, auto=False, metavar=None
):
    """A field of TrainConfig. `auto`: the word auto is a value too. `minimum`: >=; `above`: >; `nonzero`: 0 is refused."""
    return field(
        default=default,
        metadata=dict(
            group=group,
            help=text,
            choices=choices,
            aliases=tuple(aliases),
            minimum=minimum,
            above=above,
            nonzero=nonzero,
            auto=auto,
            metavar=metavar,
        ),
    )


@dataclass(frozen=True)
class TrainConfig:
    """The overrides: every flag's value. None where the plan decides and says why."""

    # model
    model_name: str = flag(None, "model", "hub id or local folder; default: the demo model", metavar="ID|DIR")
    revision: str = flag(None, "model", "branch, tag or commit of a hub model")
    train_type: str = flag(
        "qlora",
        "model",
        "full: every weight; lora: adapters; qlora: adapters on a quantized base",
        choices=TRAIN_TYPES + tuple(DEPRECATED_TRAIN_TYPES),
    )
    llama_pro_path: str = flag(None, "model", "folder that expand.py made: train its new layers only", metavar="DIR")
    # data
    dataset: str = flag(
        None,
        "data",
        "file, folder, hub name or one of alpaca, alpaca_sample, guanaco, sql, orca_math, "
        "dummy; default: the demo's orders",
        metavar="FILE|NAME",
    )
    dataset_format: str = flag("auto", "data", "auto: recognised from the columns", choices=DATASET_FORMATS)
    dataset_samples: int = flag(-1, "data", "use the first N rows; -1: all", minimum=-1, nonzero=True)
    context_length: int = flag(
        512, "data", "longest row in tokens; longer ones lose the front of their prompt", minimum=2
    )
    train_on_prompt: bool = flag(False, "data", "loss on every token, not on answers only")
    skip_bad_rows: int = flag(0, "data", "skip and list up to N broken rows instead of refusing the file", minimum=0)
    validation_dataset: str = flag(
        None, "data", "rows whose loss is watched; of a folder or hub name, its split validation", metavar="FILE|NAME"
    )
    validation_split: float = flag(0.0, "data", "part of the training rows to hold out for that", minimum=0.0)
    score_dataset: str = flag(
        None,
        "data",
        "rows scored by exact match, before and after; of a folder or hub name, its split test",
        metavar="FILE|NAME",
    )
    score_samples: int = flag(32, "data", "score the first N rows of it; -1: all", minimum=-1, nonzero=True)
    score_max_new_tokens: int = flag(128, "data", "longest answer generated when scoring", minimum=1)
    # steps
    batch_size: int = flag(
        8,
        "steps",
        "rows for one data rank and one accumulation; auto: the most that fit, 64 at most",
        minimum=1,
        auto=True,
        metavar="N|auto",
    )
    gradient_accumulation_steps: int = flag(1, "steps", "batches summed into one optimizer step", minimum=1)
    microbatch_tokens: int = flag(None, "steps", "most tokens in one forward; changes speed and memory only", minimum=1)
    batch_layout: str = flag(
        "auto",
        "steps",
        "flat: documents one after another, no padding; padded: one document a row",
        choices=("auto", "padding_free", "padded"),
    )
    num_epochs: int = flag(1, "steps", "passes over the data", minimum=1)
    max_steps: int = flag(-1, "steps", "total optimizer steps; overrides --num_epochs; -1: by epochs", minimum=-1)
    optimizer: str = flag(
        "adamw", "steps", "adamw_8bit needs bitsandbytes", choices=OPTIMIZERS + tuple(DEPRECATED_OPTIMIZERS)
    )
    lr: float = flag(
        None,
        "steps",
        "peak learning rate; default: 2e-4 for adapters, 2e-5 for full",
        above=0.0,
        aliases=("learning_rate",),
    )
    wd: float = flag(0.0, "steps", "weight decay", minimum=0.0, aliases=("weight_decay",))
    lr_scheduler: str = flag("cosine", "steps", "shape of the learning rate after warm-up", choices=SCHEDULES)
    warmup_steps: int = flag(None, "steps", "steps of linear warm-up", minimum=0)
    warmup_ratio: float = flag(0.05, "steps", "the same as a part of all steps", minimum=0.0)
    cosine_min_lr_ratio: float = flag(0.1, "steps", "where cosine ends, as a part of --lr", minimum=0.0)
    apply_gradient_clipping: bool = flag(True, "steps", "scale gradients down to --grad_norm")
    grad_norm: float = flag(1.0, "steps", "largest norm of the whole gradient", above=0.0, aliases=("max_grad_norm",))
    seed: int = flag(42, "steps", "of row order, dropout and adapter initialisation", minimum=0)
    # adapter
    lora_rank: int = flag(16, "adapter", "rank of each adapter", minimum=1, aliases=("lora_r",))
    lora_alpha: float = flag(32.0, "adapter", "an adapter's output is scaled by alpha/rank", above=0.0)
    lora_dropout: float = flag(0.0, "adapter", "dropout on an adapter's input", minimum=0.0)
    lora_target_modules: str = flag(
        "all",
        "adapter",
        "all linears and experts but the head, default (q_proj and v_proj, or their "
        "names in this model), a comma list of names (embeddings and head too), or a regex",
    )
    use_dora: bool = flag(False, "adapter", "learn each row's magnitude apart from its direction")
    use_rslora: bool = flag(False, "adapter", "scale by alpha/sqrt(rank)")
    loraplus_lr_ratio: float = flag(1.0, "adapter", "LoRA+: learning rate of B as a multiple of A's", above=0.0)
    init_lora_weights: str = flag(
        "default",
        "adapter",
        "default (Kaiming A, zero B), gaussian; eva from the data; pissa, "
        "olora and loftq from the base weights, saved as LoRA of twice the rank",
        choices=("default", "gaussian", "eva", "pissa", "olora", "loftq"),
    )
    # memory
    precision: str = flag(
        "auto",
        "memory",
        "auto: bf16 where this machine's products are faster in it, else fp32",
        choices=("auto",) + PRECISIONS,
    )
    quantization_backend: str = flag(
        "auto", "memory", "how a qlora base is stored", choices=("auto", "nf4", "bnb", "hqq", "quanto", "mlx", "none")
    )
    n_bits: int = flag(4, "memory", "bits of a quantized weight", minimum=1)
    group_size: int = flag(64, "memory", "weights that share a scale", minimum=1, aliases=("hqq_group_size",))
    quant_type: str = flag(
        None, "memory", "code book of 4-bit weights", choices=("nf4", "fp4", "affine", "mxfp4", "nvfp4", "mxfp8")
    )
    double_quant: bool = flag(False, "memory", "store the scales in 8 bits too")
    cache_dequantized: str = flag(
        "auto",
        "memory",
        "keep dequantized weights: faster, but as large as unquantized",
        choices=("auto", "true", "false"),
    )
    use_gradient_checkpointing: str = flag(
        "auto", "memory", "recompute activations in backward: less memory, slower", choices=("auto", "true", "false")
    )
    reentrant_checkpointing: bool = flag(False, "memory", "the older kind of checkpointing")
    low_memory: bool = flag(False, "memory", "give freed memory back to the system at once: least memory, slower")
    loading_workers: int = flag(-1, "memory", "tensors read at once while loading; -1: by the machine", minimum=-1)
    use_cpu_offload: bool = flag(
        False, "memory", "keep sharded weights, gradients and moments in host memory, and update them there"
    )
    use_activation_cpu_offload: bool = flag(False, "memory", "keep saved activations in host memory")
    use_flash_attention: bool = flag(False, "memory", "flash attention kernels where the machine has them")
    # machine
    backend: str = flag(None, "machine", "auto, cuda, mps, mlx, cpu or xpu; default: FSDP_BACKEND, else auto")
    world_size: int = flag(
        -1,
        "machine",
        "processes; -1: one a CUDA device, else one, or what the launcher started",
        minimum=-1,
        nonzero=True,
    )
    parallel_backend: str = flag(
        "ptd",
        "machine",
        "who sums and shards: ptd is our own FSDP2 and DDP; accelerate its DDP, "
        "or FSDP2 and DeepSpeed by its config file",
        choices=("ptd", "accelerate"),
    )
    dp_degree: int = flag(1, "machine", "replicas", minimum=1)
    dp_shards: int = flag(
        -1, "machine", "ranks that share one copy of the weights; -1: the rest", minimum=-1, nonzero=True
    )
    tp_degree: int = flag(1, "machine", "ranks that split each layer", minimum=1)
    cp_degree: int = flag(1, "machine", "ranks that split each sequence", minimum=1)
    pp_degree: int = flag(1, "machine", "ranks that split the stack of layers", minimum=1)
    pp_schedule: str = flag("1f1b", "machine", "order of a pipeline's microbatches", choices=("1f1b", "gpipe"))
    sharding_strategy: str = flag(None, "machine", "the older script's word for degrees", choices=SHARDING_STRATEGIES)
    no_sync: bool = flag(False, "machine", "exchange gradients once a step, not once a microbatch")
    rank_timeout: float = flag(600.0, "machine", "seconds a silent rank is waited for", above=0.0)
    master_addr: str = flag("localhost", "machine", "where rank 0 listens")
    master_port: int = flag(12355, "machine", "and its port", minimum=1)
    mlx_config: str = flag(None, "machine", "JSON of settings for the MLX engine", metavar="FILE")
    # output
    output_dir: str = flag(None, "output", "default: outputs/<date-time>-<model>", metavar="DIR")
    save_model: bool = flag(True, "output", "write the trained weights at the end")
    save_every: int = flag(0, "output", "checkpoint every N steps; 0: at the end only", minimum=0)
    keep_last: int = flag(2, "output", "checkpoints kept", minimum=1)
    resume: str = flag(None, "output", "auto: the newest checkpoint that verifies; or a folder", metavar="auto|DIR")
    overwrite: bool = flag(False, "output", "replace the run that is in --output_dir")
    eval_every: int = flag(0, "output", "evaluate every N steps; 0: before and after", minimum=0)
    # logging
    log_to: str = flag(
        "tqdm", "logging", "a live line, plain lines, or Weights & Biases", choices=("tqdm", "stdout", "wandb")
    )
    log_every_n_steps: int = flag(1, "logging", "steps a printed line", minimum=1)
    verbose: bool = flag(False, "logging", "print what was found out about the machine")
    project_name: str = flag(None, "logging", "of the Weights & Biases run")
    name: str = flag(None, "logging", "of the run")
    group: str = flag(None, "logging", "of the run")
    entity: str = flag(None, "logging", "of the run")
    # profile
    profile: bool = flag(False, "profile", "write traces")
    profiling_output: str = flag("profiles", "profile", "where to", metavar="DIR")
    with_stack: bool = flag(False, "profile", "record source lines")
    with_shapes: bool = flag(False, "profile", "record shapes")
    export_trace: bool = flag(True, "profile", "write chrome traces")
    export_memory_timeline: bool = flag(False, "profile", "write a memory timeline")
    profile_memory: bool = flag(False, "profile", "record allocations")
    wait_steps: int = flag(0, "profile", "steps before each cycle", minimum=0)
    profiler_warmup_steps: int = flag(1, "profile", "steps traced and thrown away", minimum=0)
    active_steps: int = flag(2, "profile", "steps traced", minimum=1)
    repeat: int = flag(0, "profile", "cycles; 0: to the end", minimum=0)
    profiling_frequency: int = flag(10, "profile", "steps a cycle", minimum=1)
    # ask
    config: str = flag(None, "ask", "YAML of any flags, or a run_plan.json; the command line wins", metavar="FILE")
    dry_run: bool = flag(False, "ask", "print the plan with its reasons, load nothing")
    doctor: str = flag(
        "false",
        "ask",
        "probe this machine, every quantizer included, and print what was found; json: as JSON",
        choices=("false", "true", "json"),
    )
    recommend: bool = flag(False, "ask", "walk the decision tree for this machine")
    assume_memory: str = flag(None, "ask", "plan for a device of this size, such as 24GiB")
    assume_world_size: int = flag(None, "ask", "plan for this many devices", minimum=1)


FIELDS = {f.name: f for f in fields(TrainConfig)}
DEFAULTS = {name: f.default for name, f in FIELDS.items()}
NAMES = {alias: name for name, f in FIELDS.items() for alias in (name, *f.metadata["aliases"])}
# Flags that say how to ask, not what to train: never part of a saved plan.
NOT_SAVED = ("config", "dry_run", "doctor", "recommend", "resume", "overwrite", "assume_memory", "assume_world_size")
