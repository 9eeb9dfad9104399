"""Settings of pretrain.py: every key with its default, valid values and range; no framework.

`arch` is the model, the rest is the run. Names and defaults are those of TinyRecursiveModels' chat configs.
Files in config/ and `key=value` overrides are read by recursive/recipe.py.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ArchConfig:
    """The model. H_cycles: T of the paper, L_cycles: n, halt_max_steps: N_sup. `plain`: the layers once, no recursion.
    `seq_len` 0 is the dataset's. `forward_dtype`: of products and activations; weights are fp32.
    """

    hidden_size: int = 384
    num_heads: int = 12
    L_layers: int = 4
    H_layers: int = 0  # ignored, as in the fork
    expansion: float = 4.0
    H_cycles: int = 1
    L_cycles: int = 1
    halt_max_steps: int = 1
    halt_exploration_prob: float = 0.0
    halting: bool = False
    no_ACT_continue: bool = True  # the Q-continue loss of HRM does not exist here
    one_step_gradient: bool = False
    plain: bool = False
    causal: bool = True
    mlp_t: bool = False
    pos_encodings: str = "rope"
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    forward_dtype: str = "bfloat16"
    loss_type: str = "softmax_cross_entropy"
    puzzle_emb_ndim: int = 0
    puzzle_emb_len: int = 0
    seq_len: int = 0

    @property
    def prefix_len(self) -> int:
        """Positions of the puzzle embedding before the tokens."""
        if not self.puzzle_emb_ndim:
            return 0
        return self.puzzle_emb_len or -(-self.puzzle_emb_ndim // self.hidden_size)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def swiglu_width(self) -> int:
        return swiglu_width(self.hidden_size, self.expansion)

    @property
    def applications(self) -> int:
        """Calls of the network in one supervision step."""
        if self.plain:
            return 1
        return self.H_cycles * (self.L_cycles + 1)

    @property
    def applications_with_gradient(self) -> int:
        if self.plain:
            return 1
        if self.one_step_gradient:
            return 2
        return self.L_cycles + 1

    @property
    def supervision_steps(self) -> int:
        if self.plain:
            return 1
        return self.halt_max_steps


def swiglu_width(size: int, expansion: float) -> int:
    """round(expansion * size * 2/3), rounded up to a multiple of 256."""
    return -(-round(expansion * size * 2 / 3) // 256) * 256


@dataclass(frozen=True)
class PretrainConfig:
    """A run. `epochs` counts passes over the rows, `eval_interval` epochs; 0 evaluates at the end only.

    `checkpoint_path`: the run's folder, in which step_N are; None is checkpoints/<data>/<run_name or time>.
    `cpu_matmul`: library of fp32 products on a CPU, blas is torch's. `async_save`: what is saved is copied, and written
    while steps go on.
    `eval_samples`: test prompts of conversations that are answered at each evaluation. `stop_on_divergence`: a run ends
    whose loss is far above its start, as train.py's does. `max_steps`, if not 0, is the total of optimizer steps,
    whatever `epochs` says.
    """

    arch: ArchConfig = field(default_factory=ArchConfig)
    data_paths: tuple[str, ...] = ("data/alpaca-512",)
    data_paths_test: tuple[str, ...] = ()
    dataset_type: str = "chat"
    evaluators: tuple[str, ...] = ()
    global_batch_size: int = 4
    gradient_accumulation_steps: int = 8
    epochs: int = 10
    max_steps: int = 0
    eval_interval: int = 1
    checkpoint_every_eval: bool = True
    min_eval_interval: int = 0
    lr: float = 3e-4
    lr_min_ratio: float = 0.1
    lr_warmup_steps: int = 1000
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    grad_clip_norm: float | None = None
    optimizer: str = "adamw"
    puzzle_emb_lr: float = 1e-2
    puzzle_emb_weight_decay: float = 0.1
    ema: bool = True
    ema_rate: float = 0.999
    freeze_weights: bool = False
    seed: int = 0
    symmetries: bool = True
    device: str = "auto"
    compile: str = "auto"
    cpu_matmul: str = "auto"
    load_checkpoint: str | None = None
    checkpoint_path: str | None = None
    resume: str | None = None
    overwrite: bool = False
    keep_last: int = 2
    checkpoint_every: int = 0
    async_save: bool = True
    run_name: str | None = None
    project_name: str | None = None
    eval_save_outputs: tuple[str, ...] = ()
    eval_samples: int = 4
    stop_on_divergence: bool = False
    log_every_n_steps: int = 10
    log_to: str = "auto"
    rank_timeout: float = 600.0
    dry_run: bool = False

    @property
    def takes_snapshots(self) -> bool:
        """True if steps follow saves, which are written beside them."""
        return self.async_save and bool(self.checkpoint_every or (self.checkpoint_every_eval and self.eval_interval))


CHOICES = {
    "dataset_type": ("chat", "puzzle"),
    "optimizer": ("adamw", "adam_atan2"),
    "device": ("auto", "cuda", "mps", "cpu", "xpu"),
    "compile": ("auto", "true", "false"),
    "cpu_matmul": ("auto", "blas", "onednn"),
    "arch.pos_encodings": ("rope", "learned", "none"),
    "arch.forward_dtype": ("float32", "bfloat16"),
    "arch.loss_type": ("softmax_cross_entropy", "stablemax_cross_entropy"),
}
# Key: (smallest, largest value).
RANGES = {
    "global_batch_size": (1, 2**20),
    "gradient_accumulation_steps": (1, 2**20),
    "epochs": (1, 2**31),
    "max_steps": (0, 2**31),
    "eval_interval": (0, 2**31),
    "min_eval_interval": (0, 2**31),
    "lr": (0.0, 10.0),
    "lr_min_ratio": (0.0, 1.0),
    "lr_warmup_steps": (0, 2**31),
    "beta1": (0.0, 0.999999),
    "beta2": (0.0, 0.999999),
    "weight_decay": (0.0, 100.0),
    "grad_clip_norm": (1e-9, 1e9),
    "puzzle_emb_lr": (0.0, 10.0),
    "puzzle_emb_weight_decay": (0.0, 100.0),
    "ema_rate": (0.0, 0.999999),
    "seed": (0, 2**31),
    "keep_last": (1, 2**31),
    "checkpoint_every": (0, 2**31),
    "eval_samples": (0, 2**31),
    "log_every_n_steps": (1, 2**31),
    "rank_timeout": (1.0, 1e9),
    "arch.hidden_size": (2, 2**16),
    "arch.num_heads": (1, 2**10),
    "arch.L_layers": (1, 2**10),
    "arch.H_layers": (0, 2**10),
    "arch.expansion": (0.01, 64.0),
    "arch.H_cycles": (1, 2**10),
    "arch.L_cycles": (1, 2**10),
    "arch.halt_max_steps": (1, 2**10),
    "arch.halt_exploration_prob": (0.0, 1.0),
    "arch.rope_theta": (1.0, 1e9),
    "arch.rms_norm_eps": (1e-12, 1.0),
    "arch.puzzle_emb_ndim": (0, 2**16),
    "arch.puzzle_emb_len": (0, 2**10),
    "arch.seq_len": (0, 2**20),
}
