"""Reads a saved adapter, PEFT's or mlx-lm's: the one function for programs that apply, merge or convert one.

What it returns is consistent: ranks, scales, pairs and finite numbers. Whether it fits a base is the engine's question.
R rank, E experts held as one parameter.
"""

import hashlib
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from finetune.adapters.patterns import LEAF, PREFIX, Patterns, Uniform
from finetune.adapters.targets import layer_of
from finetune.errors import PlanError
from finetune.model_files.entries import check_entries
from finetune.model_files.published import verified
from finetune.parts.by_layer import LARGEST_SCALE
from finetune.safetensors_io import FloatTensors, digest_of, read_tensors
from finetune.system.files import check_inside
from finetune.system.json_files import NUMBER, check, read_json
from finetune.system.patterns import Pattern, ended_in_time

PEFT_FILE = "adapter_model.safetensors"
MLX_LM_FILE = "adapters.safetensors"
CONFIG = "adapter_config.json"
PEFT_SCHEMA = {"r": int, "lora_alpha": NUMBER, "use_dora?": (bool, type(None)), "use_rslora?": (bool, type(None))}
MLX_LM_SCHEMA = {"lora_parameters": {"rank": int, "scale": NUMBER}}
AGAIN = "Give a complete adapter."
# Settings of PEFT with which an adapter is more than B A beside its base, and what they do.
CHANGES_BASE = "changes the base when peft loads it"
BASE_CHANGING = (
    "pissa",
    "olora",
    "corda",
    "loftq",
    "lora_ga",
    "lora-ga",
)  # words of init_lora_weights, or their starts
UNREAD = {
    "bias": "trains biases",
    "layer_replication": "repeats layers",
    "trainable_token_indices": "trains rows of the embedding",
    "alora_invocation_tokens": "acts from some tokens on only",
    "lora_bias": "has biases",
    "use_qalora": "pools its inputs",
    "use_bdlora": "has blocks on the diagonal",
    "arrow_config": "routes between adapters",
    "kasa_config": "has singular values of its own",
    "monteclora_config": "samples its weights",
    "velora_config": "compresses its activations",
}
EXPERTS = "experts"  # the module whose parameters PEFT names without it
COPY = re.compile(r"\.(modules_to_save|original_module)\.(?=\w+$)")  # of a module: as it trains, and as it was
MAGNITUDE = "lora_magnitude_vector"
# Names of a pair's A and B, the axis of each that has the rank in a matrix, and in a stack of experts' matrices.
PAIRS = (
    ("lora_A.weight", "lora_B.weight", (0, 1), None),
    ("lora_embedding_A", "lora_embedding_B", (0, 1), None),
    ("lora_a", "lora_b", (1, 0), (1, 2)),
)


def is_mlx_lm(folder: Path) -> bool:
    """True for a folder with an adapter of mlx-lm."""
    return (folder / MLX_LM_FILE).is_file() and not (folder / PEFT_FILE).is_file()


def read_adapter(folder: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """(adapter_config.json, {name: fp32 array}) of an adapter in either format. Raises PlanError naming file and
    fact; CheckpointDamagedError for files that are not those of the folder's manifest.
    """
    file = _file_of(folder)
    with verified(folder, (folder / CONFIG, file)):
        config = _config(folder, file)
        if file.name == PEFT_FILE and (patterns := Patterns.of_config(config, str(folder / CONFIG))):
            return patterns.uniform(config), dict(_checked(Uniform(SavedTensors(file), patterns), config, file))
        tensors = read_tensors(file)
        for name in copies_in(tensors):
            del tensors[name]
        check_ranks(config, tensors, file)
        return config, tensors


def open_adapter(folder: Path) -> tuple[dict, FloatTensors | Uniform]:
    """The result of `read_adapter` for PEFT's format, each tensor read when it is asked for."""
    file = _file_of(folder)
    if is_mlx_lm(folder):
        raise PlanError(f"{folder}: is an adapter of mlx-lm. Convert it with export.py --to peft first.")
    with verified(folder, (folder / CONFIG, file)):
        config = _config(folder, file)
        tensors = SavedTensors(file)
        if patterns := Patterns.of_config(config, str(folder / CONFIG)):
            return patterns.uniform(config), _checked(Uniform(tensors, patterns), config, file)
        return config, _checked(tensors, config, file)


class SavedTensors(FloatTensors):
    """The tensors of PEFT's file, without copies."""

    def __init__(self, path: Path):
        super().__init__(path)
        for name in copies_in(self.header):
            del self.header[name], self.shapes[name]


def copies_in(names: Collection[str]) -> list[str]:
    """The names under which PEFT saves modules once more, as with embeddings of another size than the base's."""
    return [name for name in names if COPY.search(name) and COPY.sub(".", name) in names]


def adapter_digest(folder: Path) -> str:
    """Digest of a PEFT adapter's weights and config."""
    return hashlib.sha256("".join(digest_of(folder / name) for name in (PEFT_FILE, CONFIG)).encode()).hexdigest()


Lazy = TypeVar("Lazy", FloatTensors, Uniform)


def _checked(tensors: Lazy, config: dict, file: Path) -> Lazy:
    """The tensors, of which only the headers were read, once check_ranks has passed."""
    if isinstance(tensors, Uniform):
        config = tensors.patterns.uniform(config)
    check_ranks(config, {n: np.broadcast_to(np.float32(0), s) for n, s in tensors.shapes.items()}, file)
    return tensors


def _file_of(folder: Path) -> Path:
    check_entries(folder)
    file = folder / (MLX_LM_FILE if is_mlx_lm(folder) else PEFT_FILE)
    for path in (folder / CONFIG, file):
        if not path.is_file():
            raise PlanError(f"{folder}: has no {path.name}. {AGAIN}")
        check_inside(path)
    return file


def _config(folder: Path, file: Path) -> dict:
    config = read_json(folder / CONFIG, {})
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise PlanError(f"{folder / CONFIG}: peft_type {str(kind)[:80]} is not supported. Merge it with peft first.")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(BASE_CHANGING):
        said = f"init_lora_weights {init[:80]} {CHANGES_BASE}, which is not supported"
        raise PlanError(f"{folder / CONFIG}: {said}. Save it with peft's path_initial_model_for_weight_conversion.")
    odd = next((name for name in UNREAD if config.get(name) not in (None, False, {}, [], "none")), None)
    if odd:
        raise PlanError(f"{folder / CONFIG}: {odd}: it {UNREAD[odd]}, which is not supported. Use it with peft.")
    check(config, MLX_LM_SCHEMA if file.name == MLX_LM_FILE else PEFT_SCHEMA, str(folder / CONFIG))
    if parameters := config.get("target_parameters"):
        if not (isinstance(parameters, list) and all(isinstance(name, str) for name in parameters)):
            raise PlanError(
                f"{folder / CONFIG}: target_parameters is {str(parameters)[:80]}, must be a list of names. {AGAIN}"
            )
        config["target_parameters"] = [name if "." in name else f"{EXPERTS}.{name}" for name in parameters]
    return config


def check_ranks(config: dict, tensors: dict[str, np.ndarray], file: Path) -> None:
    """Raises PlanError unless the scale is a number in range, every pair has the rank, and no tensor is left unread."""
    said = file.parent / CONFIG
    mlx_lm = file.name == MLX_LM_FILE
    how = config
    words = ("r", "lora_alpha")
    if mlx_lm:
        how = config["lora_parameters"]
        words = ("rank", "scale")
    rank, scale = (how[word] for word in words)
    if not abs(scale) <= LARGEST_SCALE:
        raise PlanError(f"{said}: {words[1]} is {str(scale)[:80]}, must be a number up to {LARGEST_SCALE:g}. {AGAIN}")
    if not any(n.endswith(tuple(f".{leaf}" for pair in PAIRS for leaf in pair[:2])) for n in tensors):
        raise PlanError(f"{file}: has no pair of adapter matrices. {AGAIN}")
    unread = (name for name in tensors if not name.startswith(PREFIX) or ".lora_" in name and not LEAF.search(name))
    if not mlx_lm and (odd := next(unread, None)):
        raise PlanError(f"{file}: holds {odd[:120]}, which is neither an adapter's nor its base's. {AGAIN}")
    targets = Targets({} if mlx_lm else config)
    for one, other, axes, stacked in PAIRS:
        for name in (n for n in tensors if n.endswith((f".{one}", f".{other}"))):
            module = name.removesuffix(one).removesuffix(other)
            pair = [tensors[module + leaf] for leaf in (one, other) if module + leaf in tensors]
            if len(pair) < 2:
                raise PlanError(f"{file}: {name} is without its pair. {AGAIN}")
            path = module.removeprefix(PREFIX).rstrip(".").removesuffix(".base_layer")
            if not mlx_lm and path not in targets:
                raise PlanError(f"{file}: has a pair of {path[:120]}, which {CONFIG} leaves out, as peft does. {AGAIN}")
            if config.get("use_dora") and f"{module}{MAGNITUDE}" not in tensors:
                raise PlanError(f"{said}: use_dora, and {module}{MAGNITUDE} is not in {file.name}. {AGAIN}")
            found = _ranks_of(pair, axes, stacked)
            if found is None or not _has(found, rank, config):
                shapes = " and ".join(str(list(t.shape)) for t in pair)
                fact = f"{words[0]} is {str(rank)[:80]}, which its weights do not have"
                raise PlanError(f"{said}: {fact}: those of {module.rstrip('.')} are {shapes}. {AGAIN}")


class Targets:
    """The modules named by a config of PEFT's for adapters, and those of its parameters. Raises PlanError."""

    def __init__(self, config: dict):
        named = config.get("target_modules")
        self.names_all = named in (None, "all-linear")
        self.of_parameters = _Names([name.rpartition(".")[0] for name in config.get("target_parameters") or ()])
        self.named = _Names(named)
        self.excluded = _Names(config.get("exclude_modules"))
        layers = config.get("layers_to_transform")
        self.layers = layers if isinstance(layers, list | None) else [layers]
        if not self.layers:
            self.layers = None
        blocks = config.get("layers_pattern") or r"[^.]*"
        names = blocks if isinstance(blocks, list) else [blocks]
        # A block's number is the first in a name; of earlier versions the last.
        self.blocks = [_pattern(rf"{start}{name}\.(\d+)\..*") for name in names for start in (r"(?:.*?\.)?", r".*\.")]
        self.ties = bool(config.get("ensure_weight_tying"))

    def __contains__(self, module: str) -> bool:
        if module in self.of_parameters:
            return True
        if self.layers is not None and module not in self.named.names:  # whole names are of any layer
            found = [at for block in self.blocks if (at := _fullmatch(block, module))]
            if not any(int(at[1]) in self.layers for at in found):
                return False
        if module in self.excluded:
            return False
        is_tied = self.ties and layer_of(module) is None  # embeddings, or the head that is tied to them
        return self.names_all or is_tied or module in self.named


class _Names:
    """Names of modules, which others end in after a point, or a regex of whole names."""

    def __init__(self, given: object):
        self.pattern = _pattern(given) if isinstance(given, str) else None
        self.names = frozenset(name for name in (given if isinstance(given, list) else ()) if isinstance(name, str))

    def __contains__(self, module: str) -> bool:
        if self.pattern is not None:
            return _fullmatch(self.pattern, module) is not None
        parts = module.split(".")
        return any(".".join(parts[i:]) in self.names for i in range(len(parts)))


def _pattern(text: str) -> Pattern:
    """A regex of an adapter's config. Raises PlanError."""
    try:
        return Pattern(text)
    except re.error as error:
        raise PlanError(f"{CONFIG}: {text[:120]} is no regex ({error}). {AGAIN}") from None


def _fullmatch(pattern: Pattern, module: str) -> Any:
    with ended_in_time(f"{CONFIG}: its regex, on {module[:120]}"):
        return pattern.fullmatch(module)


def _ranks_of(pair: list, axes: tuple, stacked: tuple | None) -> tuple[int, int] | None:
    """Sizes at the place of a pair's rank; None if these are not two matrices, or two stacks of them."""
    if pair[0].ndim != pair[1].ndim:
        return None
    chosen = {2: axes, 3: stacked}.get(pair[0].ndim)
    return chosen and (pair[0].shape[chosen[0]], pair[1].shape[chosen[1]])


def _has(found: tuple[int, int], rank: float, config: dict) -> bool:
    """True if both factors have the rank, or E times it where experts of one parameter are adapted."""
    if found[0] != found[1] or rank < 1:
        return False
    return found[0] == rank or bool(config.get("target_parameters")) and found[0] % rank == 0
