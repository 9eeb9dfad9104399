"""Weights that train: an adapter, added layers, or all of them."""

from dataclasses import dataclass, replace

from finetune.parts.by_layer import ALPHAS, RANKS, ByLayer
from finetune.parts.fields import Settings
from finetune.parts.inits import DEFAULT_INIT, INITS, InitFacts


@dataclass(frozen=True)
class AdapterInit:
    """Initialization of adapters: a word of INITS, and the seed of its random numbers."""

    word: str = DEFAULT_INIT
    seed: int = 42

    @property
    def facts(self) -> InitFacts:
        return INITS[self.word]

    @property
    def changes_base(self) -> bool:
        """True if the initial B @ A is subtracted from the base weights, so the base is a residual."""
        return self.facts.factors is not None

    @property
    def needs_data(self) -> bool:
        return self.facts.needs_data

    @property
    def reads_base(self) -> bool:
        """True if adapters start from the full unquantized base, by its weights or by what flows through it."""
        return self.changes_base or self.needs_data


@dataclass(frozen=True)
class AllWeights:
    """Full fine-tuning: of the last `last_layers` decoder layers or of the `layers` of these numbers, if either is
    given; then all else is frozen. `vision`: what trains of the part that sees images, a word of --train_vision;
    `vision_ratio`: the learning rate of what does in full, divided by that of the run.
    """

    last_layers: int | None = None
    layers: tuple[int, ...] | None = None
    vision: str = "none"
    vision_ratio: float = 1.0

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

    `ranks`, `alphas`: of the layers that differ in rank or alpha, see `at`. `modules`: endings of the names of modules
    that train in full and are saved with the adapter; `grows`: so do embeddings and head, which have rows for new
    tokens. `vision`, `vision_ratio`: as of AllWeights; lora: the tower's linears get adapters too.
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
    vision: str = "none"
    # LLaVA's LoRA recipe trains its projector at a tenth of the adapters' rate
    vision_ratio: float = 0.1
    ranks: ByLayer = ByLayer(RANKS)
    alphas: ByLayer = ByLayer(ALPHAS)

    @property
    def trains_modules(self) -> bool:
        """True if weights of the base itself train, so that the base without its adapters is not as it was."""
        return bool(self.modules) or self.grows or self.vision in ("projector", "full")

    @property
    def differs(self) -> bool:
        """True if layers may differ in rank or alpha."""
        return bool(self.ranks.entries or self.alphas.entries)

    def at(self, layer: str) -> "Adapter":
        """The adapter of the layer of this name, with its rank and alpha."""
        if not self.differs:
            return self
        rank = int(self.ranks.of(layer, self.rank))
        alpha = self.alphas.of(layer, self.alpha)
        return replace(self, rank=rank, alpha=alpha, ranks=ByLayer(RANKS), alphas=ByLayer(ALPHAS))

    def check_names(self, layers: list[str], words_only: bool = False) -> None:
        """Raises PlanError if a rank or an alpha is for none of these adapted layers, see ByLayer.check."""
        for by_layer in (self.ranks, self.alphas):
            by_layer.check(layers, words_only)

    def patterns(self, factor: float = 1, alpha_factor: float = 1, weights: bool = False) -> dict:
        """PEFT's rank_pattern and alpha_pattern, see ByLayer.as_peft."""
        return {
            "rank_pattern": self.ranks.as_peft(factor, weights),
            "alpha_pattern": self.alphas.as_peft(alpha_factor, weights),
        }

    @classmethod
    def of(cls, settings: Settings) -> "Adapter":
        s = settings
        # auto only while it is planned
        if s.lora_rank == "auto":
            rank = cls.rank
        else:
            rank = int(s.lora_rank)
        modules = tuple(name.strip() for name in (s.modules_to_save or "").split(",") if name.strip())
        init = AdapterInit(s.init_lora_weights, s.seed)
        return cls(
            rank,
            s.lora_alpha,
            s.lora_dropout,
            s.lora_target_modules,
            s.use_dora,
            s.use_rslora,
            s.loraplus_lr_ratio,
            init,
            *_layers_of(s),
            modules,
            bool(s.new_tokens),
            s.train_vision,
            s.vision_lr_ratio or cls.vision_ratio,
            ByLayer.read(s.lora_rank_pattern, RANKS),
            ByLayer.read(s.lora_alpha_pattern, ALPHAS),
        )


def _layers_of(s: Settings) -> tuple[int | None, tuple[int, ...] | None]:
    """(the last N decoder layers, the layers of these numbers): None of what is not limited."""
    if s.layers_to_transform is None:
        layers = None
    else:
        layers = tuple(map(int, s.layers_to_transform.split(",")))
    return None if s.num_layers == -1 else s.num_layers, layers


Trains = AllWeights | AddedLayers | Adapter


def trains_of(settings: Settings) -> Trains:
    if settings.train_type == "full":
        ratio = settings.vision_lr_ratio or AllWeights.vision_ratio
        return AllWeights(*_layers_of(settings), settings.train_vision, ratio)
    if settings.llama_pro_path:
        return AddedLayers(settings.llama_pro_path)
    return Adapter.of(settings)
