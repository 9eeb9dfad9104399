"""What the plan decided, as typed parts: functions take the part they need, and no flag is read after the plan.

Each part is made from the settled settings in one place, so a changed setting changes its part. A part's class says
what is so (`trains` is an Adapter), its fields say how much; a flag's words are compared here.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import quantization_wrapper
from finetune.config import RESIDUAL_INITS, TrainConfig
from finetune.distributed.parallel_dims import KEEPS_GATHERED, ParallelDims
from finetune.distributed.pipeline_schedule import CHUNKS
from finetune.objectives import OBJECTIVES, ObjectiveFacts
from finetune.schedule import Schedule, warmup_steps

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def _part(cls, settings: TrainConfig, **renamed):
    """A part whose fields are settings of the same names, but for those `renamed`."""
    return cls(**{n: getattr(settings, n) for n in cls.__dataclass_fields__ if n not in renamed}, **renamed)


@dataclass(frozen=True)
class Precision:
    """Types by group of tensors: `weights` that are frozen, `compute` of products; trainable ones are fp32.

    `autocast`: what operations cast to, None without. `casts_buffers`: buffers too are in 16 bits. `onednn`: it
    computes fp32 products on a CPU.
    """

    word: str
    weights: str
    compute: str
    autocast: str | None
    casts_buffers: bool = False
    onednn: bool = False

    @property
    def weight_bytes(self) -> int:
        return BYTES[self.weights]

    @property
    def compute_bytes(self) -> int:
        return BYTES[self.compute]

    @property
    def casts_weights(self) -> bool:
        """True if weights are wider than products, so that each use of one casts it."""
        return self.weights != self.compute

    @property
    def scales_loss(self) -> bool:
        """True in fp16, whose gradients would underflow."""
        return self.compute == "fp16"

    @classmethod
    def of(cls, settings: TrainConfig) -> "Precision":
        word = settings.precision
        compute = word.partition("_")[0]
        weights = "fp32" if word.endswith("autocast") else compute
        # Added layers, and modules that train beside an adapter, are in fp32 between frozen ones in 16 bits.
        in_full = settings.llama_pro_path or settings.modules_to_save or settings.new_tokens
        mixed = weights != compute or (in_full and compute != "fp32")
        buffers = word == "bf16_buffers_autocast"
        return cls(word, weights, compute, compute if mixed else None, buffers, settings.cpu_matmul == "onednn")


@dataclass(frozen=True)
class Quantization:
    """How the frozen base is quantized; `method`: a row of quantization_wrapper.METHODS, or MLX's own modes."""

    method: str
    bits: int
    group_size: int
    quant_type: str | None
    double_quant: bool

    def __str__(self) -> str:
        return f"{self.method} {self.bits} bits"

    @cached_property
    def config(self) -> quantization_wrapper.QuantizationConfig:
        return quantization_wrapper.config_for(
            self.method, self.bits, self.quant_type, self.group_size, self.double_quant
        )

    @property
    def needs_full_matrix(self) -> bool:
        return self.bits in quantization_wrapper.METHODS[self.method].needs_full_matrix

    def weight_bytes(self, rows: int, columns: int, scale_bytes: int, ranks: int = 1) -> int:
        """See quantization_wrapper.weight_bytes."""
        how = self.method, self.bits, self.group_size, self.double_quant
        return quantization_wrapper.weight_bytes(*how, rows, columns, scale_bytes, ranks)

    @classmethod
    def of(cls, settings: TrainConfig) -> "Quantization | None":
        s = settings
        if s.train_type != "qlora":
            return None
        return cls(s.quantization_backend, s.n_bits, s.group_size, s.quant_type, s.double_quant)


@dataclass(frozen=True)
class AdapterInit:
    """How adapters start: a word of config.INITS, and the seed that random numbers are drawn from."""

    word: str = "default"
    seed: int = 42

    @property
    def changes_base(self) -> bool:
        """True if the initial B @ A is subtracted from the base weights, so the base is a residual."""
        return self.word in RESIDUAL_INITS

    @property
    def needs_data(self) -> bool:
        return self.word == "eva"

    @property
    def needs_full_base(self) -> bool:
        """True if it starts from unquantized weights, or from what flows through them."""
        return self.changes_base or self.needs_data

    @property
    def is_gaussian(self) -> bool:
        return self.word == "gaussian"

    @property
    def peft_word(self) -> bool | str:
        """PEFT's `init_lora_weights`; of a changed base that of the plain adapter that is saved."""
        return True if self.changes_base or self.word == "default" else self.word


@dataclass(frozen=True)
class AllWeights:
    """Full fine-tuning: of the last `last_layers` decoder layers or of the `layers` of these numbers, if either is
    given; then all else is frozen.
    """

    last_layers: int | None = None
    layers: tuple[int, ...] | None = None

    @property
    def freezes(self) -> bool:
        """True if some layers train only."""
        return self.last_layers is not None or self.layers is not None


@dataclass(frozen=True)
class AddedLayers:
    """LLaMA-Pro: the layers that expand.py added to the model in `folder`."""

    folder: str


@dataclass(frozen=True)
class Adapter:
    """LoRA on frozen layers. `targets`: which, in the words of --lora_target_modules; of them those in the last
    `last_layers` decoder layers, or in the `layers` of these numbers, if either is given.

    `modules`: endings of the names of modules that train in full and are saved with the adapter; `grows`: so do
    embeddings and head, which have rows for new tokens.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: str = "all"
    dora: bool = False
    rslora: bool = False
    lr_ratio: float = 1.0
    init: AdapterInit = AdapterInit()
    last_layers: int | None = None
    layers: tuple[int, ...] | None = None
    modules: tuple[str, ...] = ()
    grows: bool = False

    @property
    def trains_modules(self) -> bool:
        """True if weights of the base itself train, so that the base without its adapters is not as it was."""
        return bool(self.modules) or self.grows

    @classmethod
    def of(cls, settings: TrainConfig) -> "Adapter":
        s = settings
        rank = cls.rank if s.lora_rank == "auto" else int(s.lora_rank)  # auto only while it is planned
        how = rank, s.lora_alpha, s.lora_dropout, s.lora_target_modules, s.use_dora, s.use_rslora
        modules = tuple(name.strip() for name in (s.modules_to_save or "").split(",") if name.strip())
        init = AdapterInit(s.init_lora_weights, s.seed)
        return cls(*how, s.loraplus_lr_ratio, init, *_layers_of(s), modules, bool(s.new_tokens))


def _layers_of(s: TrainConfig) -> tuple[int | None, tuple[int, ...] | None]:
    """(the last N decoder layers, the layers of these numbers): None of what is not limited."""
    layers = None if s.layers_to_transform is None else tuple(map(int, s.layers_to_transform.split(",")))
    return None if s.num_layers == -1 else s.num_layers, layers


Trains = AllWeights | AddedLayers | Adapter


def trains_of(settings: TrainConfig) -> Trains:
    if settings.train_type == "full":
        return AllWeights(*_layers_of(settings))
    return AddedLayers(settings.llama_pro_path) if settings.llama_pro_path else Adapter.of(settings)


@dataclass(frozen=True)
class ObjectivePlan:
    """What a step minimizes. `facts`: its row of OBJECTIVES; `arguments`: of its class.

    `load_balancing`: the routers' loss is added with this weight. `precomputes_reference`: the reference's
    log-probabilities are computed once; None until the number of rows is known. `reference_is_adapter`: it is the base
    with the adapter that the run continues from. `label_smoothing` and `neftune_noise_alpha`: of training, never of an
    evaluation.
    """

    name: str = "none"
    facts: ObjectiveFacts = OBJECTIVES["none"]
    arguments: dict[str, float] = field(default_factory=dict)
    load_balancing: float = 0.0
    precomputes_reference: bool | None = None
    reference_is_adapter: bool = False
    label_smoothing: float = 0.0
    neftune_noise_alpha: float = 0.0

    def described(self, what: str) -> str:
        """What trains, by which objective if it is not the next token."""
        return f"{self.name} with {what}" if self.facts.is_preference else what

    @classmethod
    def of(cls, settings: TrainConfig) -> "ObjectivePlan":
        s, facts = settings, OBJECTIVES[settings.preference]
        arguments = {argument: getattr(s, flag) for argument, flag in facts.arguments.items()}
        once = None if s.precompute_ref_log_probs == "auto" else s.precompute_ref_log_probs == "true"
        continues = s.adapter is not None and not s.adapter_merge
        regularized = s.label_smoothing, s.neftune_noise_alpha
        return cls(s.preference, facts, arguments, s.router_aux_loss_coef, once, continues, *regularized)


@dataclass(frozen=True)
class DataPlan:
    """Which rows are read, and how they become microbatches. `row_length`: the most tokens of a row. `first_rows`: of a
    dataset on the Hub those only, as a dry run does.
    """

    dataset: str | list | None
    validation_dataset: str | None
    score_dataset: str | None
    dataset_samples: int
    score_samples: int
    score_max_new_tokens: int
    score_metric: str
    score_pattern: str | None
    validation_split: float
    format: str
    columns: str | None
    ignore_columns: str | None
    text_unit: str
    special_tokens_in_text: str
    skip_bad_rows: int
    context_length: int
    overlong: str
    window_overlap: int
    train_on_prompt: bool
    train_on_last_turn: bool
    mask_reasoning: bool
    chat_template: str | None
    eos_token: str | None
    streaming: bool
    shuffle_buffer: int
    layout: str
    seed: int
    pairs: bool
    labels: bool
    mismatches: bool
    first_rows: bool
    new_tokens: str | None

    @property
    def documents_per_row(self) -> int:
        """2 if a row is a pair of a chosen and a rejected answer."""
        return 2 if self.pairs else 1

    @property
    def unit(self) -> str:
        """What batch_size counts."""
        return "pairs" if self.pairs else "rows"

    @property
    def row_length(self) -> int:
        return self.documents_per_row * self.context_length

    @classmethod
    def of(cls, settings: TrainConfig) -> "DataPlan":
        s, facts = settings, OBJECTIVES[settings.preference]
        seed = s.seed if s.data_seed is None else s.data_seed
        renamed = dict(format=s.dataset_format, layout=s.batch_layout, seed=seed, first_rows=s.dry_run)
        renamed |= {name: getattr(facts, name) for name in ("pairs", "labels", "mismatches")}
        return _part(cls, s, **renamed)


@dataclass(frozen=True)
class StepsPlan:
    """Rows, tokens and updates of a step, and their number. `clip`: of the global gradient norm; None: not clipped."""

    batch_size: int
    accumulation: int
    microbatch_tokens: int
    num_epochs: int
    max_steps: int
    optimizer: str
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    lr: float
    wd: float
    lr_scheduler: str
    warmup_steps: int | None
    warmup_ratio: float
    cosine_min_lr_ratio: float
    wsd_decay_ratio: float
    wsd_decay_type: str
    clip: float | None
    seed: int

    def schedule(self, total_steps: int) -> Schedule:
        warmup = warmup_steps(total_steps, self.warmup_steps, self.warmup_ratio)
        decay = self.wsd_decay_ratio, self.wsd_decay_type
        return Schedule(self.lr_scheduler, self.lr, total_steps, warmup, self.cosine_min_lr_ratio, *decay)

    @property
    def length_flag(self) -> str:
        """What sets the number of steps, as it is written."""
        return f"--max_steps {self.max_steps}" if self.max_steps > 0 else f"--num_epochs {self.num_epochs}"

    @property
    def moments_are_8_bit(self) -> bool:
        return self.optimizer in ("adamw_8bit", "paged_adamw_8bit")

    @property
    def averages_weights(self) -> bool:
        """True if what is saved and evaluated is an average of the weights that train."""
        return self.optimizer == "schedule_free_adamw"

    @property
    def tells_matrices(self) -> bool:
        """True if the weights of linear layers have an optimizer of their own."""
        return self.optimizer == "muon"

    @classmethod
    def of(cls, settings: TrainConfig) -> "StepsPlan":
        s = settings
        renamed = dict(
            accumulation=s.gradient_accumulation_steps, clip=s.grad_norm if s.apply_gradient_clipping else None
        )
        return _part(cls, s, **renamed)


@dataclass(frozen=True)
class ParallelPlan:
    """How ranks share the work. `distribution`: who shards and all-reduces, a key of accelerate_config.NAMES.

    `reshard_after_forward`: a layer's gathered weights are freed between its forward and its backward.
    `vocab_parallel`: under FSDP2 no rank gathers embedding and head. `sequence_parallel`: between the blocks of
    tensor-parallel layers each rank has its share of the positions.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp_shards: int = 1
    reshard_after_forward: bool = True
    no_sync: bool = False
    pp_schedule: str = "1f1b"
    rank_timeout: float = 600.0
    distribution: str = "ptd"
    cp: int = 1
    vocab_parallel: bool = False
    sequence_parallel: bool = False

    @property
    def pp_chunks(self) -> int:
        """Runs of layers that each stage of a pipeline holds."""
        return CHUNKS[self.pp_schedule]

    @classmethod
    def of(cls, settings: TrainConfig, distribution: str) -> "ParallelPlan":
        s = settings
        degrees = s.tp_degree, s.pp_degree, s.ep_degree, s.dp_shards
        reshards = s.sharding_strategy not in KEEPS_GATHERED
        shared = s.cp_degree, s.vocab_parallel == "true", s.sequence_parallel
        return cls(*degrees, reshards, s.no_sync, s.pp_schedule, s.rank_timeout, distribution, *shared)


# Kernels that a word of --attention allows. What `kernels` fetches from the Hub is used only where it is asked for.
ATTENTION_KERNELS = {
    "auto": ("flash-attention 3", "varlen", "flash-attention 2"),
    "varlen": ("varlen",),
    "flash": ("flash-attention 3", "flash-attention 3 of kernels", "flash-attention 2"),
}


@dataclass(frozen=True)
class MemoryPlan:
    """What trades speed for memory or time to start. `loading_workers`: -1: as many as the machine takes. `compiles`:
    each decoder layer; None: if a timed microbatch says that it pays.
    """

    recompute: bool = False
    reentrant: bool = False
    offload: bool = False
    offload_activations: bool = False
    cache_dequantized: bool = False
    low_memory: bool = False
    loading_workers: int = -1
    compiles: bool | None = False

    @classmethod
    def of(cls, settings: TrainConfig) -> "MemoryPlan":
        s = settings
        return cls(
            s.use_gradient_checkpointing == "true",
            s.reentrant_checkpointing,
            s.use_cpu_offload,
            s.use_activation_cpu_offload,
            s.cache_dequantized == "true",
            s.low_memory,
            s.loading_workers,
            {"true": True, "false": False}.get(s.compile),
        )


@dataclass(frozen=True)
class AttentionPlan:
    """How packed documents attend. `kernels`: tried in this order, names of attention.varlen.KERNELS.

    `required`: without one of them the run ends. `own_products`: a CPU may multiply matrices where SDPA is slower.
    """

    word: str = "auto"
    kernels: tuple[str, ...] = ()
    required: bool = False
    own_products: bool = True

    @classmethod
    def of(cls, settings: TrainConfig) -> "AttentionPlan":
        word = settings.attention
        return cls(word, ATTENTION_KERNELS.get(word, ()), word in ("varlen", "flash"), word != "sdpa")


@dataclass(frozen=True)
class OutputPlan:
    """Where a run writes, and when. `async_save`: steps go on while a checkpoint is written. `early_stopping`:
    evaluations in a row without a better loss that end it; 0: none does. `load_best`: the best weights are published
    instead of the last.
    """

    output_dir: str | None
    save_model: bool
    save_every: int
    async_save: bool
    keep_last: int
    eval_every: int
    overwrite: bool
    push_to_hub: str | None = None
    early_stopping: int = 0
    load_best: bool = False

    @property
    def takes_snapshots(self) -> bool:
        """True if steps follow saves, which are written beside them."""
        return self.async_save and self.save_model and self.save_every > 0

    @property
    def folder(self) -> Path:
        assert self.output_dir is not None, "the plan names it"
        return Path(self.output_dir)

    @classmethod
    def of(cls, settings: TrainConfig) -> "OutputPlan":
        s = settings
        return _part(cls, s, load_best=s.load_best == "true", async_save=s.async_save == "true")


@dataclass(frozen=True)
class ProfilePlan:
    """What --profile records and writes."""

    profile: bool
    profiling_output: str
    with_stack: bool
    with_shapes: bool
    export_trace: bool
    export_memory_timeline: bool
    profile_memory: bool
    wait_steps: int
    profiler_warmup_steps: int
    active_steps: int
    repeat: int
    profiling_frequency: int


@dataclass(frozen=True)
class Parts:
    """The settled settings and the parts made from them.

    A part is made when it is first read, as plans are compared by the hundred.
    """

    settings: TrainConfig
    dims: ParallelDims = ParallelDims()
    distribution: str = "ptd"

    precision = cached_property(lambda self: Precision.of(self.settings))
    quantization = cached_property(lambda self: Quantization.of(self.settings))
    trains = cached_property(lambda self: trains_of(self.settings))
    objective = cached_property(lambda self: ObjectivePlan.of(self.settings))
    data = cached_property(lambda self: DataPlan.of(self.settings))
    steps = cached_property(lambda self: StepsPlan.of(self.settings))
    parallel = cached_property(lambda self: ParallelPlan.of(self.settings, self.distribution))
    memory = cached_property(lambda self: MemoryPlan.of(self.settings))
    attention = cached_property(lambda self: AttentionPlan.of(self.settings))
    output = cached_property(lambda self: OutputPlan.of(self.settings))
    profile = cached_property(lambda self: _part(ProfilePlan, self.settings))

    @property
    def all_weights(self) -> bool:
        return isinstance(self.trains, AllWeights)

    def with_settings(self, **changes):
        """The same with other settings, and the parts that follow from them."""
        return replace(self, settings=replace(self.settings, **changes))


def loads_full_model(plan: Parts) -> str | None:
    """Why each rank loads the full model before sharding it; None if each rank reads only its own shard."""
    if isinstance(plan.trains, Adapter) and plan.trains.init.needs_data:
        return "eva initializes from activations of the unquantized model"
    return None
