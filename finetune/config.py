"""Every flag of train.py, one dataclass field per flag: default, help, choices, deprecated spellings.

The parser, the YAML reader, `fine_tune(...)` and the table in docs/flags.md are all generated from these fields.
"""

from dataclasses import dataclass, field, fields
from typing import get_args

from finetune.objectives import OBJECTIVES

TRAIN_TYPES = ("full", "lora", "qlora")
# Deprecated --train_type values of the older scripts, and the settings each is an alias for.
DEPRECATED_TRAIN_TYPES: dict[str, dict[str, str | bool]] = {
    "custom_lora": {"train_type": "lora"},
    "custom_qlora": {"train_type": "qlora", "quantization_backend": "bnb"},
    "bnb_lora": {"train_type": "qlora", "quantization_backend": "bnb"},
    "bnb_dora": {"train_type": "qlora", "quantization_backend": "bnb", "use_dora": True},
    "hqq_lora": {"train_type": "qlora", "quantization_backend": "hqq"},
    "hqq_dora": {"train_type": "qlora", "quantization_backend": "hqq", "use_dora": True},
    "bnb_llama_pro": {"train_type": "qlora", "quantization_backend": "bnb", "llama_pro_path": "required"},
    "hqq_llama_pro": {"train_type": "qlora", "quantization_backend": "hqq", "llama_pro_path": "required"},
}
# Adapter initializations that subtract B @ A from the base weights, so the base is a residual.
RESIDUAL_INITS = ("pissa", "olora", "loftq")
PRECISIONS = ("fp32", "bf16", "fp16", "bf16_autocast", "fp16_autocast", "bf16_buffers_autocast")
OPTIMIZERS = ("adamw", "adam", "sgd", "adadelta", "adamw_8bit")
DEPRECATED_OPTIMIZERS = {"fused_adam": "adam", "fused_adamw": "adamw", "adamw8bit": "adamw_8bit"}
DEPRECATED_TARGETS = {"none": "default", "all-linear": "all"}
SCHEDULES = ("constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "exponential")
BATCH_LAYOUTS = ("auto", "padding_free", "padded")
QUANTIZERS = ("auto", "nf4", "bnb", "hqq", "quanto", "mlx", "none")
QUANT_TYPES = ("nf4", "fp4", "affine", "mxfp4", "nvfp4", "mxfp8")
INITS = ("default", "gaussian", "eva", "pissa", "olora", "loftq")
AUTO_BOOL = ("auto", "true", "false")
DATASET_FORMATS = ("auto", "chat", "alpaca", "prompt_completion", "qna", "tokens", "text")
OVERLONG = ("auto", "keep_end", "keep_start", "split", "drop", "error")
TEXT_UNITS = ("auto", "document", "line")
SHARDING_STRATEGIES = ("full_shard", "shard_grad_op", "ddp", "hybrid_full_shard", "hybrid_shard_grad_op")
GROUPS = {
    "model": "Model and training type",
    "data": "Data",
    "steps": "Steps and schedule",
    "adapter": "Adapter",
    "memory": "Precision, quantization and memory",
    "machine": "Machine and parallelism",
    "output": "Saving and resuming",
    "logging": "Logging",
    "profile": "Profiling",
    "ask": "Inspect instead of train",
}


# Facts of a flag beside its default, group and help, each with the value it has unless the field says otherwise.
FACTS: dict[str, object] = {
    "choices": None,  # the words it accepts
    "value_aliases": {},  # {older word: the choice it means}
    "aliases": (),  # other spellings of the flag
    "minimum": None,  # >=
    "maximum": None,  # <=
    "above": None,  # >
    "nonzero": False,  # rejects 0
    "auto": False,  # also accepts "auto"
    "nonempty": False,  # rejects an empty string
    "repeatable": False,  # may be given several times, or as a list: then its value is a list
    "metavar": None,  # how --help shows its value
    "unset": None,  # what it is if it is not given, where that is not the default of the field
    "adapter_only": False,  # has no meaning without an adapter
    "saved": True,  # part of run_plan.json; False for flags of one invocation, not of the training
    "resumable": False,  # a resumed run may change it
}


def flag(default, group: str, text: str, **facts):
    """A field of TrainConfig with its FACTS as metadata."""
    unknown = set(facts) - set(FACTS)
    assert not unknown, unknown
    path = {"DIR", "FILE"} & set((facts.get("metavar") or "").split("|"))
    return field(default=default, metadata={"group": group, "help": text, "path": bool(path), **FACTS, **facts})


@dataclass(frozen=True)
class TrainConfig:
    """Requested value of every flag; None leaves the choice to the plan, which records its reason."""

    # model
    model_name: str | None = flag(
        None, "model", "Hub ID or folder; default: the demo model", metavar="ID|DIR", nonempty=True
    )
    revision: str | None = flag(None, "model", "branch, tag or commit of a Hub model")
    train_type: str = flag(
        "qlora",
        "model",
        "full: all weights; lora: adapters on a frozen base; qlora: adapters on a quantized base",
        choices=TRAIN_TYPES + tuple(DEPRECATED_TRAIN_TYPES),
    )
    llama_pro_path: str | None = flag(
        None, "model", "folder written by expand.py; trains only its added layers", metavar="DIR"
    )
    # data
    dataset: str | list[str] | None = flag(
        None,
        "data",
        "file, folder, Hub name, or one of alpaca, alpaca_sample, guanaco, sql, orca_math, "
        "dummy; as NAME[:weight][@split], and several times to train on all of them; default: the demo data",
        metavar="FILE|NAME",
        nonempty=True,
        repeatable=True,
    )
    dataset_format: str = flag("auto", "data", "row format; auto: detected from the columns", choices=DATASET_FORMATS)
    columns: str | None = flag(
        None,
        "data",
        "which of your columns to use for each field of a format, such as prompt=query,completion=reply",
        metavar="FIELD=COLUMN,...",
        nonempty=True,
    )
    ignore_columns: str | None = flag(
        None, "data", "columns and message fields to leave out, comma-separated", metavar="NAME,...", nonempty=True
    )
    text_unit: str = flag(
        "auto",
        "data",
        "treat a .txt or .md file as one document or as one row per line; auto: a document if it is prose",
        choices=TEXT_UNITS,
    )
    dataset_samples: int = flag(-1, "data", "train on the first N rows; -1: all", minimum=-1, nonzero=True)
    context_length: int | str = flag(
        512,  # where nothing is planned, such as tests of an engine
        "data",
        "maximum sequence length in tokens; longer rows are treated as --overlong says. auto: what 99 % of the rows "
        "fit in, if the model and the memory allow it",
        minimum=2,
        auto=True,
        metavar="N|auto",
        unset="auto",
    )
    streaming: bool = flag(
        False,
        "data",
        "read rows while training, shuffled within blocks of --shuffle_buffer rows: memory stays bounded for files of "
        "any size; needs --max_steps",
    )
    shuffle_buffer: int = flag(1000, "data", "rows per block in which --streaming shuffles", minimum=1)
    overlong: str = flag(
        "auto",
        "data",
        "rows over --context_length. auto: text is split, a chat loses its oldest messages, other rows the start of "
        "their prompt; keep_end, keep_start: truncated; split: windows; drop: left out; error: refused",
        choices=OVERLONG,
    )
    window_overlap: int = flag(
        0, "data", "overlap between windows, in tokens; the repeated tokens are context only", minimum=0
    )
    preference: str = flag(
        "none",
        "data",
        "learn which answers are preferred. dpo, orpo, simpo: from pairs, rows with chosen and rejected "
        "(--batch_size then counts pairs); kto: from rows with a label, or from both halves of pairs",
        choices=tuple(OBJECTIVES),
    )
    preference_beta: float = flag(
        0.1,
        "data",
        "with --preference: how strongly dpo and kto hold to the model before training; weight of orpo's odds ratio; "
        "scale of simpo's log-probabilities (there 2.0 by default)",
        above=0.0,
    )
    simpo_gamma: float = flag(
        0.5, "data", "with --preference simpo: the margin by which the chosen answer must lead", minimum=0.0
    )
    desirable_weight: float = flag(
        1.0, "data", "with --preference kto: weight of rows whose label is true", minimum=0.0
    )
    undesirable_weight: float = flag(
        1.0, "data", "with --preference kto: weight of rows whose label is false", minimum=0.0
    )
    precompute_ref_log_probs: str = flag(
        "auto",
        "data",
        "with --preference dpo or kto: compute the reference model's log-probabilities once, before training, instead "
        "of in every step, and keep them in --output_dir; auto: if rows are read more than once",
        choices=AUTO_BOOL,
    )
    train_on_prompt: bool = flag(False, "data", "compute the loss on all tokens, not only on answers")
    skip_bad_rows: int = flag(
        0, "data", "skip and list up to N malformed rows; with more, the file is rejected", minimum=0
    )
    validation_dataset: str | None = flag(
        None,
        "data",
        "rows for the validation loss; for a folder or Hub name, its validation split",
        metavar="FILE|NAME",
        resumable=True,
    )
    validation_split: float = flag(0.0, "data", "fraction of the training rows held out for validation", minimum=0.0)
    score_dataset: str | None = flag(
        None,
        "data",
        "rows scored by exact match before and after training; for a folder or Hub name, its test split",
        metavar="FILE|NAME",
        resumable=True,
    )
    score_samples: int = flag(
        32, "data", "score the first N rows of --score_dataset; -1: all", minimum=-1, nonzero=True, resumable=True
    )
    score_max_new_tokens: int = flag(
        128, "data", "maximum tokens generated per answer when scoring", minimum=1, resumable=True
    )
    # steps
    batch_size: int | str = flag(
        8,
        "steps",
        "rows per data rank and accumulation step; auto: the largest that fits, at most 64",
        minimum=1,
        auto=True,
        metavar="N|auto",
    )
    gradient_accumulation_steps: int = flag(1, "steps", "batches accumulated per optimizer step", minimum=1)
    microbatch_tokens: int | None = flag(
        None, "steps", "maximum tokens per forward; affects speed and memory, not the result", minimum=1, resumable=True
    )
    batch_layout: str = flag(
        "auto",
        "steps",
        "padding_free: documents packed end to end; padded: one per row",
        choices=BATCH_LAYOUTS,
        value_aliases={"flat": "padding_free"},
    )
    num_epochs: int = flag(1, "steps", "epochs: passes over the training data", minimum=1, resumable=True)
    max_steps: int = flag(
        -1, "steps", "total optimizer steps, overriding --num_epochs; -1: use --num_epochs", minimum=-1, resumable=True
    )
    optimizer: str = flag(
        "adamw", "steps", "adamw_8bit needs bitsandbytes", choices=OPTIMIZERS + tuple(DEPRECATED_OPTIMIZERS)
    )
    lr: float | None = flag(
        None,
        "steps",
        "peak learning rate; default: 2e-4, 2e-5 for full; with --preference 1e-5, 1e-6 for full",
        above=0.0,
        aliases=("learning_rate",),
    )
    wd: float = flag(0.0, "steps", "weight decay", minimum=0.0, aliases=("weight_decay",))
    lr_scheduler: str = flag("cosine", "steps", "learning rate schedule after warmup", choices=SCHEDULES)
    warmup_steps: int | None = flag(None, "steps", "linear warmup, in optimizer steps", minimum=0)
    warmup_ratio: float = flag(
        0.05,
        "steps",
        "linear warmup as a fraction of all steps, if --warmup_steps is unset; with constant, only if set",
        minimum=0.0,
    )
    cosine_min_lr_ratio: float = flag(0.1, "steps", "final learning rate of cosine, as a fraction of --lr", minimum=0.0)
    apply_gradient_clipping: bool = flag(True, "steps", "clip the global gradient norm to --grad_norm")
    grad_norm: float = flag(1.0, "steps", "maximum global gradient norm", above=0.0, aliases=("max_grad_norm",))
    router_aux_loss_coef: float = flag(
        0.0, "steps", "weight of a mixture's load-balancing loss over the tokens of a step; 0: off", minimum=0.0
    )
    seed: int = flag(42, "steps", "random seed for shuffling, dropout and adapter initialization", minimum=0)
    # adapter
    lora_rank: int = flag(16, "adapter", "LoRA rank", minimum=1, aliases=("lora_r",), adapter_only=True)
    lora_alpha: float = flag(
        32.0, "adapter", "LoRA alpha; adapter outputs are scaled by alpha/rank", above=0.0, adapter_only=True
    )
    lora_dropout: float = flag(0.0, "adapter", "dropout probability on adapter inputs", minimum=0.0, adapter_only=True)
    lora_target_modules: str = flag(
        "all",
        "adapter",
        "all (every linear layer and expert except the head), default (q_proj and v_proj, or "
        "this model's equivalents), comma-separated names (may include embeddings and head), or a regex",
        adapter_only=True,
    )
    use_dora: bool = flag(
        False,
        "adapter",
        "DoRA: learn the magnitude of each weight row separately from its direction",
        adapter_only=True,
    )
    use_rslora: bool = flag(False, "adapter", "rsLoRA: scale by alpha/sqrt(rank)", adapter_only=True)
    loraplus_lr_ratio: float = flag(
        1.0, "adapter", "LoRA+: learning rate of B divided by that of A", above=0.0, adapter_only=True
    )
    init_lora_weights: str = flag(
        "default",
        "adapter",
        "default: Kaiming A, zero B; gaussian: normal A, zero B; eva: from activations on the data; "
        "pissa, olora, loftq: from the base weights, saved as LoRA of twice the rank",
        choices=INITS,
        adapter_only=True,
    )
    # memory
    precision: str = flag(
        "auto",
        "memory",
        "auto: bf16 if matmuls are faster in it on this machine, else fp32",
        choices=("auto",) + PRECISIONS,
        value_aliases={f"mp_{word}": word for word in PRECISIONS if word.endswith("autocast")},
    )
    cpu_matmul: str = flag(
        "auto",
        "memory",
        "library of fp32 matrix products on a CPU: torch's BLAS, or oneDNN where it is faster and as exact",
        choices=("auto", "blas", "onednn"),
        resumable=True,
    )
    quantization_backend: str = flag(
        "auto", "memory", "quantizer for the qlora base", choices=QUANTIZERS, resumable=True
    )
    n_bits: int = flag(4, "memory", "bits per quantized weight", minimum=1)
    group_size: int = flag(
        64, "memory", "weights per quantization group (per scale)", minimum=1, aliases=("hqq_group_size",)
    )
    quant_type: str | None = flag(None, "memory", "4-bit data type (codebook)", choices=QUANT_TYPES)
    double_quant: bool = flag(False, "memory", "also quantize the scales to 8 bits")
    cache_dequantized: str = flag(
        "auto",
        "memory",
        "keep dequantized weights in memory: faster, but as large as the unquantized model",
        choices=AUTO_BOOL,
        resumable=True,
    )
    use_gradient_checkpointing: str = flag(
        "auto",
        "memory",
        "activation checkpointing: recompute activations in the backward pass; less memory, slower",
        choices=AUTO_BOOL,
    )
    reentrant_checkpointing: bool = flag(False, "memory", "use the reentrant variant of activation checkpointing")
    low_memory: bool = flag(
        False, "memory", "return freed memory to the system immediately: least memory, slower", resumable=True
    )
    loading_workers: int = flag(
        -1, "memory", "tensors read in parallel while loading; -1: chosen for this machine", minimum=-1, resumable=True
    )
    use_cpu_offload: bool = flag(
        False,
        "memory",
        "keep sharded weights, gradients and optimizer state in host memory, and step the optimizer there",
        resumable=True,
    )
    use_activation_cpu_offload: bool = flag(
        False, "memory", "offload activations saved for backward to host memory", resumable=True
    )
    use_flash_attention: bool = flag(False, "memory", "use flash attention kernels if available")
    # machine
    backend: str | None = flag(
        None,
        "machine",
        "auto, cuda, mps, mlx, cpu or xpu; default: environment variable FSDP_BACKEND, else auto",
        resumable=True,
    )
    world_size: int = flag(
        -1,
        "machine",
        "number of ranks (processes); -1: as launched, else one per CUDA device, else 1",
        minimum=-1,
        nonzero=True,
        resumable=True,
    )
    parallel_backend: str = flag(
        "ptd",
        "machine",
        "distributed implementation. ptd: built-in FSDP2/DDP; accelerate: its DDP, "
        "or FSDP2/DeepSpeed per its config file",
        choices=("ptd", "accelerate"),
        resumable=True,
    )
    dp_degree: int = flag(1, "machine", "data-parallel replicas", minimum=1, resumable=True)
    dp_shards: int = flag(
        -1,
        "machine",
        "FSDP degree: ranks that shard one replica; -1: the remaining ranks",
        minimum=-1,
        nonzero=True,
        resumable=True,
    )
    tp_degree: int = flag(1, "machine", "tensor parallelism: ranks that split each layer", minimum=1, resumable=True)
    cp_degree: int = flag(
        1, "machine", "context parallelism: ranks that split each sequence", minimum=1, resumable=True
    )
    pp_degree: int = flag(1, "machine", "pipeline parallelism: number of stages", minimum=1, resumable=True)
    ep_degree: int = flag(
        1, "machine", "expert parallelism: ranks of --dp_shards that hold different experts", minimum=1, resumable=True
    )
    pp_schedule: str = flag("1f1b", "machine", "pipeline schedule", choices=("1f1b", "gpipe"), resumable=True)
    sharding_strategy: str | None = flag(
        None, "machine", "older spelling of --dp_degree and --dp_shards", choices=SHARDING_STRATEGIES, resumable=True
    )
    no_sync: bool = flag(
        False, "machine", "reduce gradients once per step instead of once per microbatch", resumable=True
    )
    rank_timeout: float = flag(
        600.0,
        "machine",
        "seconds without a heartbeat before a rank counts as lost",
        above=0.0,
        maximum=2_592_000.0,
        resumable=True,
    )
    master_addr: str = flag("localhost", "machine", "host of rank 0 for the rendezvous", resumable=True)
    master_port: int = flag(
        12355, "machine", "port of rank 0 for the rendezvous", minimum=1, maximum=65535, resumable=True
    )
    mlx_config: str | None = flag(None, "machine", "JSON file of MLX engine settings", metavar="FILE")
    # output
    output_dir: str | None = flag(
        None,
        "output",
        "folder for checkpoints, metrics and final weights; default: outputs/<date-time>-<model>",
        metavar="DIR",
        resumable=True,
        nonempty=True,
    )
    save_model: bool = flag(True, "output", "write the trained weights at the end", resumable=True)
    save_every: int = flag(
        0, "output", "save a checkpoint every N steps; 0: only at the end", minimum=0, resumable=True
    )
    keep_last: int = flag(2, "output", "number of checkpoints to keep", minimum=1, resumable=True)
    resume: str | None = flag(
        None,
        "output",
        "auto: resume from the newest valid checkpoint, if any; or a run or checkpoint folder",
        metavar="auto|DIR",
        saved=False,
    )
    overwrite: bool = flag(False, "output", "replace an existing run in --output_dir", saved=False)
    eval_every: int = flag(
        0, "output", "evaluate every N steps; 0: only before and after training", minimum=0, resumable=True
    )
    # logging
    log_to: str = flag(
        "tqdm",
        "logging",
        "tqdm: live progress line; stdout: plain lines; wandb: also Weights & Biases",
        choices=("tqdm", "stdout", "wandb"),
        resumable=True,
    )
    log_every_n_steps: int = flag(1, "logging", "print every N steps", minimum=1, resumable=True)
    verbose: bool = flag(False, "logging", "print the detected hardware, and memory item by item", resumable=True)
    project_name: str | None = flag(None, "logging", "Weights & Biases project", resumable=True)
    name: str | None = flag(None, "logging", "Weights & Biases run name", resumable=True)
    group: str | None = flag(None, "logging", "Weights & Biases run group", resumable=True)
    entity: str | None = flag(None, "logging", "Weights & Biases entity (user or team)", resumable=True)
    # profile
    profile: bool = flag(False, "profile", "run the torch profiler", resumable=True)
    profiling_output: str = flag("profiles", "profile", "folder for profiler output", metavar="DIR", resumable=True)
    with_stack: bool = flag(False, "profile", "record call stacks", resumable=True)
    with_shapes: bool = flag(False, "profile", "record input shapes", resumable=True)
    export_trace: bool = flag(True, "profile", "write Chrome traces", resumable=True)
    export_memory_timeline: bool = flag(False, "profile", "write a memory timeline", resumable=True)
    profile_memory: bool = flag(False, "profile", "record allocations", resumable=True)
    wait_steps: int = flag(0, "profile", "idle steps before each cycle", minimum=0, resumable=True)
    profiler_warmup_steps: int = flag(
        1, "profile", "warmup steps per cycle, traced and discarded", minimum=0, resumable=True
    )
    active_steps: int = flag(2, "profile", "steps recorded per cycle", minimum=1, resumable=True)
    repeat: int = flag(0, "profile", "number of cycles; 0: until training ends", minimum=0, resumable=True)
    profiling_frequency: int = flag(10, "profile", "steps per cycle", minimum=1, resumable=True)
    # ask
    config: str | None = flag(
        None,
        "ask",
        "YAML file of flags, or a run_plan.json; command-line flags override it",
        metavar="FILE",
        saved=False,
    )
    dry_run: bool = flag(
        False, "ask", "print the plan with its reasons and a preview of the data; load nothing", saved=False
    )
    data_report: str | None = flag(
        None, "ask", "with --dry_run: write the preview of the data as JSON", metavar="FILE", saved=False, nonempty=True
    )
    doctor: str = flag(
        "false",
        "ask",
        "probe the hardware and every quantizer and print a report; json: as JSON",
        choices=("false", "true", "json"),
        saved=False,
    )
    parity: str | None = flag(
        None,
        "ask",
        "take the same steps on two backends, such as torch,mlx, and compare losses, gradients and weights",
        metavar="NAME,NAME",
        saved=False,
    )
    recommend: bool = flag(False, "ask", "print recommended settings for this machine", saved=False)
    assume_memory: str | None = flag(None, "ask", "plan for a device with this much memory, such as 24GiB", saved=False)
    assume_world_size: int | None = flag(None, "ask", "plan for this many ranks", minimum=1, saved=False)


def value_type(field) -> type:
    """str, int, float or bool: what a flag's value is if it is given and not a word such as auto."""
    return (get_args(field.type) or (field.type,))[0]


FIELDS = {f.name: f for f in fields(TrainConfig)}
DEFAULTS = {name: f.default for name, f in FIELDS.items()}
NAMES = {alias: name for name, f in FIELDS.items() for alias in (name, *f.metadata["aliases"])}
