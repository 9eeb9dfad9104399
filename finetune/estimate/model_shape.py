"""A model's dimensions without its weights: from config.json, and exact tensor shapes if there are safetensors headers.

`linears` equals torch_engine/lora/targets.linear_names of the loaded model: every linear except head, routers and
experts.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from finetune import safetensors_io
from finetune.adapters.targets import ROUTERS
from finetune.errors import PlanError
from finetune.model_files.files import ModelFiles
from finetune.model_files.llama_pro import read_record
from finetune.parts.engine_limits import PROJECTORS, TOWER
from finetune.system.untrusted import untrusted

# Linears per decoder layer as (leaf name, rows, columns): GATED (separate q, k, v and a gated MLP), and the families
# that differ. h hidden, q and k widths of query and KV heads, f intermediate.
GATED = (
    ("self_attn.q_proj", "q", "h"),
    ("self_attn.k_proj", "k", "h"),
    ("self_attn.v_proj", "k", "h"),
    ("self_attn.o_proj", "h", "q"),
    ("mlp.gate_proj", "f", "h"),
    ("mlp.up_proj", "f", "h"),
    ("mlp.down_proj", "h", "f"),
)
BLOCKS = {
    "phi3": (
        ("self_attn.qkv_proj", "q+2k", "h"),
        ("self_attn.o_proj", "h", "q"),
        ("mlp.gate_up_proj", "2f", "h"),
        ("mlp.down_proj", "h", "f"),
    ),
    "gpt2": (("attn.c_attn", "q+2k", "h"), ("attn.c_proj", "h", "q"), ("mlp.c_fc", "f", "h"), ("mlp.c_proj", "h", "f")),
    "gpt_neox": (
        ("attention.query_key_value", "q+2k", "h"),
        ("attention.dense", "h", "q"),
        ("mlp.dense_h_to_4h", "f", "h"),
        ("mlp.dense_4h_to_h", "h", "f"),
    ),
    "falcon": (
        ("self_attention.query_key_value", "q+2k", "h"),
        ("self_attention.dense", "h", "q"),
        ("mlp.dense_h_to_4h", "f", "h"),
        ("mlp.dense_4h_to_h", "h", "f"),
    ),
}
PREFIXES = {"gpt2": "transformer.h", "gpt_neox": "gpt_neox.layers", "falcon": "transformer.h"}
STORED_TRANSPOSED = ("gpt2", "imagegpt", "openai-gpt")  # Conv1D stores [in, out]
BIASED = ("gpt2", "gpt_neox")
QKV_BIASED = ("qwen2", "qwen2_moe")
EMBEDDINGS = ("embed_tokens", "wte", "wpe", "embed_in", "word_embeddings", "embed_positions", "token_embedding")
HEADS = ("lm_head", "embed_out")
SOUND = re.compile(r"(^|\.)audio_(tower|encoder)\.")
PROJECTOR = re.compile(rf"({'|'.join(PROJECTORS)})\.")
OF_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.(.+)\.weight$")
OF_VOCABULARY = ("embed_tokens.weight", "wte.weight", "lm_head.weight")
FITTING = "Give a folder whose weights fit its config.json."
# Model types whose heads have the hidden size divided by their number, where the config does not say.
HEADS_DIVIDE = ("gpt2", "llama", "mistral", "mixtral", "phi3", "qwen2")
OTHER_LAYERS = re.compile(r"mamba_|ssm_|state_size|time_step|linear_(key|num|head|conv)|altup_|lru_|conv_L|kda_|hc_")
# Text model types whose activations the formulas give: within 6 % of those traced in fp32, 10 % in 16 bits
# (tests/estimate/test_traced.py). Models of all other types are traced.
BY_FORMULA = (
    *("cwm", "ernie4_5", "gemma", "gemma2", "gemma3", "glm", "gpt2", "gpt_oss", "granite", "granitemoe"),
    *("granitemoeshared", "helium", "internlm3", "iquestcoder", "llama", "ministral", "ministral3", "mistral"),
    *("mixtral", "olmo2", "phi3", "phimoe", "qwen2", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "vaultgemma"),
)
EAGER_ATTENTION = ("bloom", "codegen", "gpt_neo", "gptj", "mpt", "xlstm")
LEARNED_POSITIONS = ("gpt2",)
# Mixtures without a tensor-parallel plan in transformers: experts are sliced, all else is replicated.
WITHOUT_TP_PLAN = ("gpt_oss",)
FUSED_EXPERTS = 3  # matrices of one expert: gate, up, down


class LayerTracer(Protocol):
    """Counts bytes of models that no formula describes. `error`: why it cannot, once it was asked."""

    error: str | None

    def shape(self, shape: "ModelShape") -> "KnownShape | None": ...

    def give_up(self, failed: Exception) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class ModelShape:
    """Model dimensions and limits; None, and no linears, if config.json does not give them.

    0 in `num_experts`, `expert_size` and `intermediate_size`: without experts, without a dense MLP, or not given.
    """

    model_type: str | None
    vocab_size: int | None
    context_limit: int | None
    num_layers: int | None
    hidden_size: int | None
    num_experts: int
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int = 0
    tied: bool = False
    num_weights: int | None = None
    linears: tuple[tuple[str, int, int], ...] = ()  # (name, rows, columns)
    # (rows, columns) of all tensors that are not weights of linears or experts
    others: tuple[tuple[int, int], ...] = ()
    expert_weights: int = 0
    expert_size: int = 0  # an expert's intermediate size
    experts_per_token: int = 0
    activation: str = "silu"
    window: int | None = None
    softcap: bool = False
    dropout: float = 0.0  # of attention probabilities
    exact: bool = False  # read from safetensors headers
    stored_bytes: int | None = None
    new_layers: int = 0  # layers added by expand.py
    outside: str | None = None  # the key of its config that says the memory formulas do not describe its layers
    experts: tuple[tuple[int, int], ...] | None = None  # see expert_matrices; None: by the sizes above
    text_type: str | None = None  # the model type of its text part, without the suffix that says so
    # (rows, columns) of the tensors that see images, of towers and of what joins them; a run on text loads no tower
    towers: tuple[tuple[int, int], ...] = ()
    projector: tuple[tuple[int, int], ...] = ()
    latent: bool = False  # keys and values are projected from a latent vector, whose width is neither heads' nor hidden
    # Counts what its layers keep, where no formula does: estimate/traced.py
    tracer: "LayerTracer | None" = field(default=None, compare=False, repr=False)

    @classmethod
    def from_config(cls, config: dict, tensors: dict | None = None, stored_bytes: int | None = None) -> "ModelShape":
        """Builds a shape from transformers' standard keys, GPT-2's spellings of them, and a nested text_config.

        `tensors`, {name: shape} of the weight files, override the values computed from the config.
        """
        nested = config.get("text_config")
        text = {**config, **(nested if isinstance(nested, dict) else {})}

        def first(*keys: str) -> int | None:
            return next((text[k] for k in keys if isinstance(text.get(k), int) and text[k] > 0), None)

        hidden = first("hidden_size", "n_embd", "d_model")
        heads = first("num_attention_heads", "n_head")
        head_dim = first("head_dim") or (hidden // heads if hidden and heads else None)
        if isinstance(nested, dict):
            model_type = text.get("model_type")
        else:
            model_type = config.get("model_type")
        kind = str(model_type or "").removesuffix("_text")
        inner = first("intermediate_size", "n_inner", "ffn_hidden_size") or (
            4 * hidden if hidden and kind in BLOCKS else None
        )
        experts = first("num_local_experts", "num_experts", "n_routed_experts") or 0
        known: dict[str, Any] = dict(
            model_type=config.get("model_type"),
            vocab_size=first("vocab_size"),
            context_limit=first("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"),
            num_layers=first("num_hidden_layers", "n_layer", "num_layers"),
            hidden_size=hidden,
            num_experts=experts,
            num_heads=heads,
            num_kv_heads=first("num_key_value_heads", "num_kv_heads") or heads,
            head_dim=head_dim,
            intermediate_size=inner or 0,
            tied=bool(text.get("tie_word_embeddings", kind in ("gpt2", "gemma", "gemma2", "gemma3"))),
            expert_size=(first("moe_intermediate_size") or inner or 0) if experts else 0,
            experts_per_token=(first("num_experts_per_tok") or 2) if experts else 0,
            activation=str(
                text.get("hidden_activation")
                or text.get("hidden_act")
                or text.get("activation_function")
                or ("gelu_new" if kind == "gpt2" else "silu")
            ),
            window=first("sliding_window", "attention_chunk_size") if text.get("use_sliding_window", True) else None,
            softcap=bool(text.get("attn_logit_softcapping")),
            dropout=float(text.get("attn_pdrop", 0.1 if kind == "gpt2" else 0.0) or 0.0),
            stored_bytes=stored_bytes,
            outside=_outside(text, kind),
            text_type=kind,
            latent=bool(text.get("kv_lora_rank")),
        )
        if tensors:
            counted = _from_tensors(tensors, kind, known["tied"], bool(experts))
        else:
            counted = _computed(known, text)
        return cls(**known, **counted, exact=bool(tensors))

    def with_vocabulary(self, files: ModelFiles) -> "ModelShape":
        """The shape with rows of embeddings and head for the new tokens of a model's files."""
        old = self.vocab_size or 0
        new = 0
        if files.vocabulary:
            new = files.vocabulary.size
        if not old or new <= old:
            return self
        grown = tuple((new, columns) if rows == old else (rows, columns) for rows, columns in self.others)
        more = sum(columns for rows, columns in self.others if rows == old) * (new - old)
        return replace(self, vocab_size=new, others=grown, num_weights=self.num_weights and self.num_weights + more)

    @property
    def kind(self) -> str:
        """The model type without the suffix that marks the text part of a multimodal model."""
        return str(self.model_type or "").removesuffix("_text")

    @property
    def unlike(self) -> str | None:
        """Key of its config.json, or its model type, for which no formula says what layers keep; None without one."""
        if self.outside or self.latent:
            return self.outside or "kv_lora_rank"
        other = next((name for name in (self.text_type, self.kind) if name not in BY_FORMULA), None)
        if other is not None:
            return f"model_type {other}"
        return None

    @property
    def is_timed(self) -> bool:
        """True if estimate.step_time describes its layers: attention with heads of one size, and an MLP or experts."""
        return not (self.outside or self.latent) and bool(self.num_heads and self.head_dim)

    @property
    def known(self) -> "KnownShape | None":
        """Dimensions that memory is predicted from; None if a dimension is missing, or if the formulas do not describe
        the layers and they cannot be traced.
        """
        if self.tracer is None:
            return self._by_formula
        return self.tracer.shape(self)

    @cached_property
    def _by_formula(self) -> "KnownShape | None":
        if self.outside or not self.linears:
            return None
        counted = self.num_weights and self.num_layers and self.hidden_size and self.vocab_size
        if not (counted and self.num_heads and self.num_kv_heads and self.head_dim):
            return None
        return KnownShape(**{f.name: getattr(self, f.name) for f in fields(ModelShape)})

    @property
    def head_in_layers(self) -> float:
        """Products of the head in those of a decoder layer, if half of the tokens are targets; 0 if unknown."""
        active = 0.0
        if self.num_experts:
            active = self.experts_per_token / self.num_experts
        layers = self.linear_weights + active * self.expert_weights
        if not (layers and self.num_layers and self.vocab_size and self.hidden_size):
            return 0.0
        return 0.5 * self.vocab_size * self.hidden_size * self.num_layers / layers

    def is_of_vocabulary(self, shape: tuple[int, ...]) -> bool:
        """True for the shape of embeddings or of a head, maybe with rows for more tokens."""
        return len(shape) == 2 and shape[0] >= (self.vocab_size or 0) and shape[1] == self.hidden_size

    @property
    def outer_weights(self) -> int:
        """Number of weights of embeddings and head."""
        return (self.vocab_size or 0) * (self.hidden_size or 0) * (1 if self.tied else 2)

    @cached_property
    def linear_weights(self) -> int:
        return sum(rows * columns for _, rows, columns in self.linears)

    @cached_property
    def linear_sizes(self) -> dict[tuple[int, int], int]:
        """{(rows, columns): how many linears have them}."""
        return dict(Counter((rows, columns) for _, rows, columns in self.linears))

    def expert_matrices(self) -> list[tuple[int, int]]:
        """(rows, columns) of each fused expert parameter: gate_up and down, over all experts of a layer."""
        if self.experts is not None:
            return list(self.experts)
        if not (self.num_experts and self.expert_size and self.expert_weights and self.hidden_size):
            return []
        one = FUSED_EXPERTS * self.hidden_size * self.expert_size
        layers = self.expert_weights // (self.num_experts * one)
        rows = self.num_experts * 2 * self.expert_size, self.num_experts * self.hidden_size
        return [(rows[0], self.hidden_size), (rows[1], self.expert_size)] * layers

    @cached_property
    def largest_linear(self) -> int:
        """Number of weights in the largest matrix that is dequantized at once; experts are dequantized one by one."""
        sizes = [rows * columns for _, rows, columns in self.linears]
        if self.experts and self.num_experts:
            sizes += [rows // self.num_experts * columns for rows, columns in self.experts]
        elif self.num_experts and self.expert_size and self.hidden_size:
            sizes.append(2 * self.hidden_size * self.expert_size)
        return max(sizes, default=0)


@dataclass(frozen=True)
class KnownShape(ModelShape):
    """A shape with every dimension that the formulas of memory and communication need. Made by ModelShape.known."""

    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_weights: int = 0

    def __hash__(self):  # cheap, as formulas are remembered by shape; equality compares all
        return hash((self.model_type, self.num_weights, self.num_layers, self.hidden_size, len(self.linears)))


def _outside(text: dict, kind: str) -> str | None:
    """The key of a config that says its layers are not those of the memory formulas, if there is one.

    State-space and linear attention, AltUp, and families whose attention keeps every probability.
    """
    if kind in EAGER_ATTENTION:
        return "model_type"
    return next((key for key in sorted(text) if OTHER_LAYERS.match(key) and text[key]), None)


def read_headers(weight_files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """{tensor name: shape} from safetensors headers, or from the index of a sharded checkpoint."""
    weight_files = list(weight_files)
    shapes = safetensors_io.shapes_of(weight_files)
    if shapes:
        return shapes
    for path in weight_files:
        header = safetensors_io.read_header(path)
        shapes |= {name: tuple(t["shape"]) for name, t in header.items() if name != "__metadata__"}
    return shapes


def _from_tensors(tensors: dict, kind: str, tied: bool, experts: bool) -> dict:
    """Linears and weight counts from exact tensor shapes; a tied head that is also stored is counted once."""
    linears = []
    others = []
    total = 0
    in_experts = 0
    for name, shape in tensors.items():
        module, _, last = name.rpartition(".")
        leaf = module.rpartition(".")[2]
        if leaf in HEADS and tied and last == "weight":
            continue
        total += math.prod(shape)
        if ".experts." in name:
            in_experts += math.prod(shape)
            continue
        routed = experts and leaf in ROUTERS
        plain = len(shape) == 2 and last == "weight" and leaf not in EMBEDDINGS + HEADS and not routed
        rows, columns = reversed(shape) if plain and kind in STORED_TRANSPOSED else (*shape, 0, 0)[:2]
        if plain and rows > 1:
            linears.append((module, rows, columns))
        else:
            others.append((math.prod(shape[:1]), math.prod(shape[1:])))
    counted = {"linears": tuple(sorted(linears)), "others": tuple(others)}
    return counted | {"num_weights": total, "expert_weights": in_experts}


def _computed(known: dict, text: dict) -> dict:
    """Linears and weight counts from config dimensions, for GATED decoder layers or a family in BLOCKS."""
    h, layers, vocab, f = (known[k] for k in ("hidden_size", "num_layers", "vocab_size", "intermediate_size"))
    kind = str(text.get("model_type") or "").removesuffix("_text")
    if not (h and layers and vocab and known["num_heads"] and (f or known["expert_size"])):
        return {}
    if text.get("kv_lora_rank"):  # MLA has different projections
        return {}
    q, k = (known["head_dim"] * known[n] for n in ("num_heads", "num_kv_heads"))
    sizes = {"h": h, "q": q, "k": k, "q+2k": q + 2 * k, "f": f or 0, "2f": 2 * (f or 0)}
    block = BLOCKS.get(kind, GATED)
    experts = known["num_experts"]
    dense_layers = text.get("mlp_only_layers") or []
    step = text.get("decoder_sparse_step") or 1
    linears = []
    in_experts = 0
    others = []
    for layer in range(layers):
        routed = experts and layer not in dense_layers and (layer + 1) % step == 0
        for leaf, rows, columns in block:
            if routed and leaf.startswith("mlp."):
                continue
            name = f"{PREFIXES.get(kind, 'model.layers')}.{layer}.{leaf}"
            linears.append((name, sizes[rows], sizes[columns]))
            biased = kind in BIASED or (kind in QKV_BIASED and leaf[-6:] in ("q_proj", "k_proj", "v_proj"))
            if biased or (text.get("attention_bias") and "attn" in leaf):
                others.append((sizes[rows], 1))
        if routed:
            in_experts += FUSED_EXPERTS * experts * h * known["expert_size"]
            shared = text.get("shared_expert_intermediate_size") or 0
            others += [(experts, h)] + [(shared, h)] * (FUSED_EXPERTS if shared else 0)
    norm = 2 if kind in ("gpt2", "gpt_neox") else 1  # weight and bias
    others += [(h, 1)] * (layers * norm * (4 if kind.startswith(("gemma2", "gemma3")) else 2) + norm)
    if kind.startswith(("qwen3", "gemma3")):
        others += [(known["head_dim"], 1)] * (2 * layers)
    others += [(vocab, h)] * (1 if known["tied"] else 2)
    if kind in LEARNED_POSITIONS and known["context_limit"]:
        others.append((known["context_limit"], h))
    total = sum(rows * columns for _, rows, columns in linears) + in_experts + sum(r * c for r, c in others)
    counted = {"linears": tuple(linears), "others": tuple(others)}
    return counted | {"num_weights": total, "expert_weights": in_experts}


def check_tensors(config: dict, tensors: dict[str, tuple[int, ...]], said: str) -> None:
    """Raises PlanError for files whose matrices have other sizes than their config gives, or that lack a layer.

    Of model types whose layers are known; sizes that a config leaves to its class are not compared.
    """
    nested = config.get("text_config")
    text = {**config, **(nested if isinstance(nested, dict) else {})}
    kind = str(text.get("model_type") or "").removesuffix("_text")
    if kind not in BY_FORMULA or text.get("kv_lora_rank") or _outside(text, kind):
        return
    stored: dict[tuple[str, str], list[str]] = {}
    for name in tensors:
        if found := OF_LAYER.search(name):
            stored.setdefault((found[1], found[2]), []).append(name)
    layers = {number for number, _ in stored}
    sizes = _given_sizes(text, kind)
    missing = next((n for n in range(sizes["layers"] or 0) if str(n) not in layers), None)
    if layers and missing is not None:
        raise PlanError(
            f"{said}: has no weights of layer {missing}, counted from 0, and {sizes['layers']} layers by its config. "
            f"{FITTING}"
        )
    expected = []
    for (_, leaf), names in stored.items():
        rows, columns = next(((r, c) for known, r, c in BLOCKS.get(kind, GATED) if known == leaf), ("", ""))
        if len(names) == 1 and rows and not (leaf.startswith("mlp.") and sizes["experts"]):
            expected.append((names[0], [sizes[rows], sizes[columns]]))
    for name in tensors:
        if name.endswith(OF_VOCABULARY):
            expected.append((name, [sizes["vocab"], sizes["h"]]))
    for name, by_config in expected:
        shape = list(tensors[name])
        if kind in STORED_TRANSPOSED and OF_LAYER.search(name):
            by_config.reverse()
        if len(shape) == 2 and any(size not in (None, n) for size, n in zip(by_config, shape, strict=True)):
            whole = [n if size is None else size for size, n in zip(by_config, shape, strict=True)]
            raise PlanError(f"{said}: {name} is {shape} in its files, {whole} by its config. {FITTING}")


def _given_sizes(text: dict, kind: str) -> dict[str, int | None]:
    """Sizes by the letters of GATED and BLOCKS, as far as a config gives them itself: each class has defaults of its
    own.
    """

    def given(*keys: str) -> int | None:
        return next((text[key] for key in keys if isinstance(text.get(key), int) and text[key] > 0), None)

    h = given("hidden_size", "n_embd")
    heads = given("num_attention_heads", "n_head")
    f = given("intermediate_size", "n_inner")
    head_dim = given("head_dim")
    if head_dim is None and h and heads and kind in HEADS_DIVIDE:
        head_dim = h // heads
    kv_heads = given("num_key_value_heads")
    if kind == "gpt2":
        kv_heads = heads
    q = head_dim * heads if head_dim and heads else None
    k = head_dim * kv_heads if head_dim and kv_heads else None
    both = q + 2 * k if q and k else None
    experts = given("num_local_experts", "num_experts", "n_routed_experts")
    sizes = {"h": h, "q": q, "k": k, "q+2k": both, "f": f, "2f": f and 2 * f, "experts": experts}
    return sizes | {"vocab": given("vocab_size"), "layers": given("num_hidden_layers", "n_layer")}


def shape_of_files(files: ModelFiles) -> ModelShape:
    """The shape of a checked model folder (model_files.files.ModelFiles): from its safetensors headers, else from its
    config.

    Prequantized files hold packed codes, whose shapes say little, so the config is used.
    """
    size = sum(Path(f).stat().st_size for f in files.weight_files)
    text = files.config.get("text_config")
    parts = (files.config, text if isinstance(text, dict) else {})
    plain = not files.stored and not any(part.get("quantization_config") for part in parts)
    exact = plain and all(Path(f).suffix != ".npz" for f in files.weight_files)
    tensors = None
    if exact:
        tensors = read_headers(files.weight_files)
    towers: list[tuple[int, int]] = []
    projector: list[tuple[int, int]] = []
    if tensors and isinstance(text, dict):  # towers are not loaded for text: see torch_engine/modalities
        text = {name: shape for name, shape in tensors.items() if not TOWER.search(name)}
        size = size * sum(map(math.prod, text.values())) // max(1, sum(map(math.prod, tensors.values())))
        for name, found in tensors.items():
            matrix = (found[0], math.prod(found[1:])) if found else (1, 1)
            if PROJECTOR.search(name):
                projector.append(matrix)
            elif name not in text and not SOUND.search(name):
                towers.append(matrix)
        tensors = text
    if tensors:
        check_tensors(files.config, tensors, f"--model_name {files.name}")
    with untrusted(f"--model_name {files.name}: its config.json is not that of a model", "Save the model again."):
        shape = ModelShape.from_config(files.config, tensors, size or None)
    return replace(shape, towers=tuple(towers), projector=tuple(projector))


def planned_shape(files: ModelFiles, llama_pro_path: str | None) -> ModelShape:
    """The shape of a model folder, with the number of added layers if a run trains only those. Raises PlanError."""
    shape = shape_of_files(files).with_vocabulary(files)
    if not llama_pro_path:
        return shape
    record = read_record(files.folder, f"--llama_pro_path {llama_pro_path}")
    return replace(shape, new_layers=len(record["new_layers"]))
