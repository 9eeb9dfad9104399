"""Optimizers: one row per word of --optimizer, with its implementations, its state, its defaults and its limits.

The plan, the conflicts page, the memory prediction, the checkpoint's check and --help read the rows. A new optimizer is
a row here and a function in an engine.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from finetune.parts.rows import Limit, sharing

TORCH = "finetune.torch_engine.optim"
MLX = "finetune.mlx_engine.optim"
EIGHT_BIT_FROM = 4096  # numbers of a weight, before FSDP's shards, from which its moments have 8 bits; fp32 below
EIGHT_BIT_BLOCK = 256  # numbers that share a scale, as bitsandbytes' kernels take them


class Trained(Protocol):
    """The weights that train, as the memory prediction counts them; with row-wise sharding over `ranks`, `weights` are
    one rank's. `sizes`: number of tensors per (rows, columns) as they are sharded. `linears`: (rows, columns) of
    linears' matrices. `matrices`: (number, rows, columns) of tensors as they are stepped, each expert's its own;
    `share`: the part of them that trains.
    """

    @property
    def ranks(self) -> int: ...
    @property
    def weights(self) -> int: ...
    @property
    def sizes(self) -> Counter[tuple[int, int]]: ...
    @property
    def linears(self) -> list[tuple[int, int]]: ...
    @property
    def matrices(self) -> list[tuple[int, int, int]]: ...
    @property
    def share(self) -> float: ...


def eight_bit_bytes(trained: Trained) -> int:
    """Two moments of a byte per number, each with one scale per block; those of a small tensor are in fp32."""
    total = 0
    for (rows, columns), count in trained.sizes.items():
        own = -(-rows // trained.ranks) * columns
        is_small = rows * columns < EIGHT_BIT_FROM
        total += count * (8 * own if is_small else 2 * (own + 4 * -(-own // EIGHT_BIT_BLOCK)))
    return total


def factored_bytes(trained: Trained) -> int:
    """A row's and a column's sums per matrix, a number per weight of a vector."""
    numbers = sum(n * (rows + columns) if columns > 1 else n * rows for n, rows, columns in trained.matrices)
    return int(4 * trained.share * numbers)


def muon_bytes(trained: Trained) -> int:
    """One moment of a linear's matrix, AdamW's two of the rest."""
    return 8 * trained.weights - 4 * sum(rows * columns for rows, columns in trained.linears)


def muon_update_bytes(trained: Trained) -> int:
    """Most bytes that torch's Muon has beside gradients and moments while it updates one linear's matrix: the update in
    fp32, two copies of it in bf16, and two products of it with itself, of the shorter side squared.
    """
    return max((8 * rows * columns + 4 * min(rows, columns) ** 2 for rows, columns in trained.linears), default=0)


def three_copies(trained: Trained) -> int:
    """The largest tensor three times, as an update makes it that computes one tensor after the other, not in place."""
    return max((12 * -(-rows // trained.ranks) * columns for rows, columns in trained.sizes), default=0)


def three_full_copies(trained: Trained) -> int:
    """The same of a full tensor, whatever its shards."""
    return max((12 * rows * columns for rows, columns in trained.sizes), default=0)


def copy_of_all(trained: Trained) -> int:
    """All weights once, as an update of all tensors at a time makes them."""
    return 4 * trained.weights


BETAS = ("adam_beta1", "adam_beta2")


@dataclass(frozen=True)
class OptimizerFacts:
    """A row of OPTIMIZERS. `torch`, `mlx`: what implements it in each engine; no `mlx`: the MLX engine lacks it.

    `help`: what --help says of it. `aliases`: older words for it. `package`: must be importable. `unpaged`: the word
    for it off CUDA. `reads`: the flags of Adam that it has. `defaults`: {flag: (value where the user gave none, why)}.
    `rate`: its learning rate divided by AdamW's. `fits_beta2`: the plan fits adam_beta2 to the number of steps.

    `moments`: its state tensors per weight, in fp32 and of the weight's shape; None if they are not, which is not
    checked. `count`: of steps, per weight; None without one. `bytes_per_weight`: of state, where `state_bytes` does not
    compute it. `update_bytes`: most bytes that the update of one tensor takes beside its state, where they count; of
    bitsandbytes', whose kernels take none, on a CPU. `offered`: the price at which it is offered to a run without room.

    `code_bytes`: of its modules and of those that they import, beside the run's own.

    `eight_bit`: moments are stored in 8 bits. `takes_matrices`: its update takes full matrices. `tells_matrices`:
    weights of linears have an optimizer of their own. `averages_weights`: an average of the weights is evaluated and
    saved. `under_zero`: DeepSpeed's ZeRO steps it.
    """

    torch: str
    mlx: str | None = None
    help: str = ""
    aliases: tuple[str, ...] = ()
    package: str | None = None
    unpaged: str | None = None
    reads: tuple[str, ...] = (*BETAS, "adam_epsilon")
    defaults: dict[str, tuple[float | str, str]] = field(default_factory=dict)
    rate: float = 1.0
    fits_beta2: bool = False
    moments: frozenset[str] | None = None
    count: str | None = "step"
    bytes_per_weight: int = 8
    state_bytes: Callable[[Trained], int] | None = None
    update_bytes: Callable[[Trained], int] | None = None
    offered: str = ""
    code_bytes: int = 0
    eight_bit: bool = False
    takes_matrices: bool = False
    tells_matrices: bool = False
    averages_weights: bool = False
    under_zero: bool = False
    limits: tuple[Limit, ...] = ()


ADAM_MOMENTS = frozenset({"exp_avg", "exp_avg_sq"})
BITSANDBYTES = (
    "adamw_8bit, the paged ones (CUDA: moments move to host memory where a device is full) and lion need bitsandbytes"
)
OPTIMIZERS = {
    "adamw": OptimizerFacts(
        f"{TORCH}.adamw",
        f"{MLX}.adamw",
        aliases=("fused_adamw",),
        fits_beta2=True,
        moments=ADAM_MOMENTS,
        under_zero=True,
    ),
    "adam": OptimizerFacts(
        f"{TORCH}.adam", f"{MLX}.adam", aliases=("fused_adam",), moments=ADAM_MOMENTS, under_zero=True
    ),
    "sgd": OptimizerFacts(
        f"{TORCH}.sgd",
        f"{MLX}.sgd",
        reads=(),
        moments=frozenset({"momentum_buffer"}),
        count=None,
        bytes_per_weight=4,
        under_zero=True,
    ),
    "adadelta": OptimizerFacts(
        f"{TORCH}.adadelta",
        f"{MLX}.adadelta",
        reads=(),
        moments=frozenset({"square_avg", "acc_delta"}),
        update_bytes=three_copies,
        under_zero=True,
    ),
    "adamw_8bit": OptimizerFacts(
        f"{TORCH}.adamw_8bit",
        f"{MLX}.adamw_8bit",
        help=BITSANDBYTES,
        aliases=("adamw8bit",),
        package="bitsandbytes",
        fits_beta2=True,
        bytes_per_weight=2,
        state_bytes=eight_bit_bytes,
        offered="moments rounded to 8 bits; needs bitsandbytes",
        eight_bit=True,
    ),
    "paged_adamw_8bit": OptimizerFacts(
        f"{TORCH}.paged_adamw_8bit",
        help=BITSANDBYTES,
        package="bitsandbytes",
        unpaged="adamw_8bit",
        fits_beta2=True,
        bytes_per_weight=2,
        state_bytes=eight_bit_bytes,
        eight_bit=True,
    ),
    "paged_adamw_32bit": OptimizerFacts(
        f"{TORCH}.paged_adamw_32bit",
        help=BITSANDBYTES,
        package="bitsandbytes",
        unpaged="adamw",
        fits_beta2=True,
        moments=frozenset({"state1", "state2"}),
    ),
    "adafactor": OptimizerFacts(
        f"{TORCH}.adafactor",
        help="adafactor is transformers', at the rate given",
        reads=(),
        bytes_per_weight=0,
        state_bytes=factored_bytes,
        update_bytes=three_full_copies,
        code_bytes=90 * 2**20,  # transformers' trainer, and peft: measured on a CPU
        takes_matrices=True,
        limits=(Limit("pp_degree", "gathers moments in the shapes of their weights, which Adafactor's do not have"),),
    ),
    "lion": OptimizerFacts(
        f"{TORCH}.lion",
        f"{MLX}.lion",
        help=BITSANDBYTES,
        package="bitsandbytes",
        reads=BETAS,
        # Of the paper (Chen et al. 2023), as is the rate: its update is a sign.
        defaults={"adam_beta2": (0.99, "Lion's own")},
        rate=0.1,
        moments=frozenset({"exp_avg"}),
        bytes_per_weight=4,
        update_bytes=three_copies,
    ),
    "schedule_free_adamw": OptimizerFacts(
        f"{TORCH}.schedule_free_adamw",
        help="schedule_free_adamw needs schedulefree and takes a constant rate",
        package="schedulefree",
        defaults={"lr_scheduler": ("constant", "schedule_free_adamw averages weights in place of a falling rate")},
        moments=frozenset({"z", "exp_avg_sq", "y"}),
        update_bytes=copy_of_all,
        count="k",
        averages_weights=True,
    ),
    "muon": OptimizerFacts(
        f"{TORCH}.adamw",  # of what is no matrix
        help="muon: with --train_type full, matrices by torch's Muon, the rest by AdamW",
        state_bytes=muon_bytes,
        update_bytes=muon_update_bytes,
        takes_matrices=True,
        tells_matrices=True,
        limits=(
            Limit(
                "adapters",
                "makes the update of a weight matrix orthogonal, and an adapter's A and B are only factors of one",
                "Use --train_type full, or adamw",
            ),
            Limit(
                "accelerate",
                "is two optimizers in one, which accelerate does not prepare",
                "Use --parallel_backend ptd",
            ),
        ),
    ),
}
DEFAULT_OPTIMIZER = "adamw"


def optimizer_help() -> str:
    """The help of --optimizer: each row's, once."""
    return "; ".join(sharing(OPTIMIZERS, lambda facts: facts.help))
