"""Sizes that every memory formula reads: the largest microbatch of a run, and a model's weights under the run's
settings.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from typing import Any

from finetune.adapters.targets import is_in_layers, layer_of
from finetune.estimate.model_shape import KnownShape
from finetune.parts.engine_limits import DEFAULT_TARGETS, GROUP_WASTE
from finetune.parts.parts import Parts
from finetune.parts.trains import Adapter, AllWeights
from finetune.system.patterns import Pattern, ended_in_time

OUTER_NAMES = ("model.embed_tokens", "lm_head")  # their names in most models


@dataclass(frozen=True)
class MicrobatchShape:
    """The largest microbatch of a run: row lengths, number of target tokens, and layout.

    `several`: gradient accumulation, so gradients are live during the next forward. `shares_prompts`: documents may
    continue a prompt that is there once, so that their attention keeps no scores, see torch_engine/attention/shared.py.
    """

    lengths: tuple[int, ...]
    num_targets: int
    layout: str = "padding_free"
    several: bool = False
    shares_prompts: bool = False

    @classmethod
    def full_rows(
        cls, rows: int, context_length: int, layout: str = "padding_free", several: bool = False
    ) -> "MicrobatchShape":
        """`rows` rows of context_length tokens, all of them targets: the upper bound over any data."""
        return cls((context_length,) * rows, rows * context_length, layout, several)

    @property
    def num_tokens(self) -> int:
        if self.layout == "padding_free":
            return sum(self.lengths)
        return len(self.lengths) * max(self.lengths)

    def groups(self) -> list[tuple[int, int]]:
        """(documents, padded length) of each attention batch, grouped as in attention.documents_of."""
        if self.layout == "padded":
            return [(len(self.lengths), max(self.lengths))]
        left = sorted(self.lengths, reverse=True)
        groups = []
        while left:
            members = [n for n in left if n * GROUP_WASTE >= left[0]]
            groups.append((len(members), left[0]))
            left = left[len(members) :]
        return groups

    @property
    def even(self) -> bool:
        return len(set(self.lengths)) == 1


@dataclass(frozen=True)
class ModelCost:
    """Model dimensions and the plan's parts as the formulas use them."""

    shape: KnownShape
    plan: Parts
    device: str = "cpu"
    adapted: tuple = field(init=False)
    saved: tuple = field(init=False)  # (name, rows, columns) of what trains in full beside adapters
    known: dict = field(init=False, repr=False, compare=False)  # results of the functions that are `remembered`

    def __post_init__(self):
        plan = self.plan
        # All that is the same for any recomputation, offload and number of tokens.
        head = (plan.objective.facts.head, plan.objective.outputs)
        known = results_of(
            self.shape, plan.trains, plan.data.images, plan.quantization, plan.precision, self.device, head
        )
        object.__setattr__(self, "known", known)
        object.__setattr__(self, "saved", () if self.full else saved_of(self.shape, self.adapter))
        object.__setattr__(self, "adapted", adapted_of(self.shape, None if self.full else self.adapter))

    @property
    def adapter(self) -> Adapter:
        """The adapter that is counted per layer, also of added layers, which have none."""
        if isinstance(self.plan.trains, Adapter):
            return self.plan.trains
        return Adapter()

    def in_its_layers(self, name: str) -> bool:
        """True if a module of this name is in the decoder layers that train."""
        trains: AllWeights | Adapter = self.adapter
        if isinstance(self.plan.trains, AllWeights):
            trains = self.plan.trains
        return is_in_layers(name, self.shape.num_layers, trains.last_layers, trains.layers)

    @property
    def freezes(self) -> bool:
        """True if some layers of the model train in full and all else is frozen."""
        return isinstance(self.plan.trains, AllWeights) and self.plan.trains.freezes

    @property
    def trained_layers(self) -> list[int]:
        """Numbers of the decoder layers that training is limited to."""
        return [i for i in range(self.shape.num_layers) if self.in_its_layers(f"layers.{i}.")]

    @property
    def num_full_layers(self) -> int:
        """Number of the decoder layers that full fine-tuning trains."""
        if self.freezes:
            return len(self.trained_layers)
        return self.shape.num_layers

    @property
    def learning_layers(self) -> int:
        """Decoder layers from the first one on that learns: those before it keep nothing for a backward pass."""
        if self.freezes:
            return self.shape.num_layers - min(self.trained_layers, default=0)
        if self.full or self.trains_outer(0):
            return self.shape.num_layers
        return self.shape.num_layers - first_layer(self.shape, self.adapter)

    def trains_outer(self, end: int) -> bool:
        """True if the embeddings (0) or the head (1) train in full next to adapters."""
        names = {name for name, _, _ in self.saved}
        return OUTER_NAMES[end] in names or bool(self.shape.tied and names & set(OUTER_NAMES))

    @property
    def trains_head(self) -> bool:
        return (self.full and not self.freezes or self.trains_outer(1)) and not self.has_head

    @property
    def has_head(self) -> bool:
        """True if a head beside the model's own is trained, which nothing of the vocabulary's size is computed for."""
        return self.plan.objective.facts.has_head

    @property
    def frozen_head(self) -> int:
        """Weights of the model's own head, where full fine-tuning leaves it frozen beside another."""
        if self.has_head and self.full and not self.freezes and not self.shape.tied:
            return self.shape.vocab_size * self.shape.hidden_size
        return 0

    @property
    def outer_trained(self) -> int:
        """Weights of embeddings and head that train in full beside adapters."""
        return sum(rows * columns for name, rows, columns in self.saved if name in OUTER_NAMES)

    @property
    def outer_full(self) -> int:
        """Weights of embeddings and head that full fine-tuning trains."""
        if self.full and not self.freezes:
            return self.shape.outer_weights - self.frozen_head
        return 0

    @property
    def weight(self) -> int:
        """Bytes per unquantized weight."""
        return self.plan.precision.weight_bytes

    @property
    def compute(self) -> int:
        return self.plan.precision.compute_bytes

    @property
    def full(self) -> bool:
        return isinstance(self.plan.trains, AllWeights)

    @property
    def autocast(self) -> bool:
        return self.plan.precision.casts_weights

    @property
    def fuses(self) -> bool:
        """True where norms, SwiGLU and RoPE are a kernel each, which saves its inputs only: torch_engine/kernels."""
        return self.device == "cuda"

    @property
    def flattens(self) -> bool:
        """True where adapters and their gradients are in one buffer each, and linears with one input are computed
        together: torch_engine/lora/flat.py.
        """
        parallel = self.plan.parallel
        shards = parallel.dp_shards > 1 or parallel.distribution != "ptd"
        return isinstance(self.plan.trains, Adapter) and not shards

    @property
    def q(self) -> int:
        return self.shape.num_heads * self.shape.head_dim

    @property
    def k(self) -> int:
        return self.shape.num_kv_heads * self.shape.head_dim


@lru_cache(maxsize=256)
def results_of(*fixed: object) -> dict:
    """{(function, arguments): result} of the functions that are `remembered`, for models that agree in `fixed`."""
    return {}


def remembered(function: Callable) -> Callable:
    """A function of a ModelCost that reads of its plan only what `results_of` is given: computed once, as plans are
    compared by the hundred.
    """

    @wraps(function)
    def found(m: ModelCost, *args: Any) -> Any:
        key = (function, *args)
        if key not in m.known:
            m.known[key] = function(m, *args)
        return m.known[key]

    return found


@lru_cache(maxsize=256)
def adapted_of(shape: KnownShape, adapter: Adapter | None) -> tuple[tuple[str, int, int], ...]:
    """Linears that train or get an adapter, in the layers that it is limited to; None: all, of full training."""
    if adapter is None:
        return shape.linears
    last = adapter.last_layers
    layers = adapter.layers
    count = shape.num_layers
    chosen = (i for i in adapted_linears(shape, adapter.targets) if is_in_layers(i[0], count, last, layers))
    return tuple(i for i in chosen if i[0] not in {name for name, _, _ in saved_of(shape, adapter)})


NORMS = ("input_layernorm", "post_attention_layernorm")  # their names in most models' layers


@lru_cache(maxsize=256)
def saved_of(shape: KnownShape, adapter: Adapter) -> tuple[tuple[str, int, int], ...]:
    """(name, rows, columns) of what --modules_to_save and --new_tokens train in full; a tied head once."""
    if not adapter.trains_modules:
        return ()
    h = shape.hidden_size
    outer = [(name, shape.vocab_size, shape.hidden_size) for name in OUTER_NAMES]
    norms = [(f"model.layers.{i}.{leaf}", h, 1) for i in range(shape.num_layers) for leaf in NORMS]
    named = [i for i in (*shape.linears, *norms, ("model.norm", h, 1)) if _ends_so(i[0], adapter.modules)]
    ends = [i for i in outer if adapter.grows or _ends_so(i[0], adapter.modules)]
    return (*named, *(ends[:1] if shape.tied else ends))


def _ends_so(name: str, words: tuple[str, ...]) -> bool:
    """True if the name of a module, or of one that contains it, ends with one of these words, as PEFT matches them."""
    parts = name.split(".")
    return any(".".join(parts[: i + 1]).endswith(word) for i in range(len(parts)) for word in words)


@lru_cache(maxsize=256)
def first_layer(shape: KnownShape, adapter: Adapter) -> int:
    """Number of the first decoder layer with an adapter; 0 if no name says so."""
    return min((at for name, _, _ in adapted_of(shape, adapter) if (at := layer_of(name)) is not None), default=0)


def named(targets: str, name: str) -> bool:
    """True if `targets`, a list of names or suffixes or a regex on full names, matches this layer."""
    if re.fullmatch(r"[\w.,\s]+", targets):
        return any(f".{name}".endswith(f".{end.strip()}") for end in targets.split(",") if end.strip())
    try:
        with ended_in_time(f"--lora_target_modules {targets}"):
            return bool(Pattern(targets).fullmatch(name))
    except re.error:  # reported once the model is loaded
        return False


def adapted_linears(shape: KnownShape, targets: str | None) -> list[tuple[str, int, int]]:
    """Linears that get an adapter, including embeddings and head if named; `targets` None: all, of full training."""
    if targets is None or targets == "all":
        return list(shape.linears)
    if targets == "default":
        leaves = {name.rpartition(".")[2] for name, _, _ in shape.linears}
        chosen = next((t for t in DEFAULT_TARGETS if leaves & set(t)), ())
        return [item for item in shape.linears if item[0].rpartition(".")[2] in chosen]
    outer = [(name, shape.vocab_size, shape.hidden_size) for name in OUTER_NAMES]
    return [item for item in (*shape.linears, *outer) if named(targets, item[0])]


@remembered
def adapted_experts(m: ModelCost) -> list[tuple[int, int]]:
    """(rows, columns) of the fused expert parameters that get an adapter."""
    targets = m.adapter.targets
    matrices = m.shape.expert_matrices()
    if m.full or m.shape.new_layers or m.adapter.dora:
        return []
    names = [f"model.layers.{i // 2}.mlp.experts.{('gate_up_proj', 'down_proj')[i % 2]}" for i in range(len(matrices))]
    return [
        matrix
        for matrix, name in zip(matrices, names, strict=True)
        if (targets == "all" or named(targets, name)) and m.in_its_layers(name)
    ]


@remembered
def expert_rank(m: ModelCost) -> int:
    """The rank of experts' adapters, where layers differ that of the first layer's."""
    return m.adapter.at("model.layers.0.mlp.experts.gate_up_proj").rank


def shards_ends(plan: Parts, shape: KnownShape) -> bool:
    """True if --vocab_parallel goes with what trains: no adapter on embedding or head, and no preferences."""
    adapted = {name for name, _, _ in ModelCost(shape, plan).adapted} & set(OUTER_NAMES)
    return not adapted and plan.parallel.distribution == "ptd" and plan.objective.name == "none"
