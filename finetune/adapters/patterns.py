"""PEFT's rank_pattern and alpha_pattern: an adapter whose layers differ in rank or scale, as one of one rank and scale.

Rows of zeros pad A and columns of zeros B up to the largest rank, and B takes up the scale: the same s B A, and so the
same DoRA, for every reader. R rank, I in_features, O out_features, E experts.
"""

import math
import re
from collections.abc import Iterable, Mapping

import numpy as np

from finetune.errors import PlanError
from finetune.parts.by_layer import LARGEST_RANK, LARGEST_SCALE, of_names
from finetune.safetensors_io import FloatTensors
from finetune.system.patterns import ended_in_time

PREFIX = "base_model.model."
LEAF = re.compile(r"\.lora_((A|B)\.weight|embedding_(A|B)|magnitude_vector)$")
OF_A = ("lora_A.weight", "lora_embedding_A")
LAST_OF_EXPERTS = "down_proj"  # of the two parameters of a module of experts
REMEDY = "Give a complete adapter."


def refuse_zero_rows(by_rank: list[list[str]]) -> None:
    """Raises PlanError if a module that DoRA adapts has rows of zeros: it divides by their norm, as PEFT does.
    `by_rank`: names of such modules.
    """
    names = sorted({name for names in by_rank for name in names})
    if names:
        leaf = names[0].rpartition(".")[2]
        raise PlanError(
            f"--use_dora: {names[0]} has rows of zeros, as those of padding tokens, and DoRA divides by the norm of "
            f"each row. Leave {leaf} out of --lora_target_modules, or train without --use_dora."
        )


def scaling_of(rank: int, alpha: float, rslora: bool) -> float:
    if rslora:
        return alpha / math.sqrt(rank)
    return alpha / rank


def parameter_of(module: str, parameters: Iterable[str]) -> str:
    """The name of what a pair in this module adapts: one of its `parameters`, by target_parameters, or else the module.
    PEFT wraps the two of a module of experts one around the other.
    """
    owner = module.removesuffix(".base_layer")
    held = [name for name in parameters if re.match(rf"(.*\.)?{re.escape(name.rpartition('.')[0])}$", owner)]
    leaves = sorted((name.rpartition(".")[2] for name in held), key=lambda leaf: leaf == LAST_OF_EXPERTS)
    if not leaves:
        return module
    return f"{owner}.{leaves[0] if module != owner else leaves[-1]}"


class Patterns:
    """Rank and alpha of each layer, by an adapter_config.json. Raises PlanError for patterns that are none."""

    def __init__(self, config: dict, said: str):
        self.said = said
        self.rslora = bool(config.get("use_rslora"))
        self.rank = config["r"]
        self.alpha = config["lora_alpha"]
        self.parameters = tuple(config.get("target_parameters") or ())
        self.ranks, self.alphas = (self._pattern(config, key) for key in ("rank_pattern", "alpha_pattern"))
        ranks = [self.rank, *(r for r, _ in self.ranks.values())]
        alphas = [self.alpha, *(a for a, _ in self.alphas.values())]
        odd = [r for r in ranks if type(r) is not int or not 0 < r < LARGEST_RANK]
        odd += [a for a in alphas if type(a) not in (int, float) or not abs(a) <= LARGEST_SCALE]
        if odd:
            raise PlanError(f"{said}: has the rank or alpha {str(odd[0])[:80]}. {REMEDY}")
        self.largest = max(ranks)
        self.scale = scaling_of(self.rank, self.alpha, self.rslora) or 1.0

    def _pattern(self, config: dict, key: str) -> dict:
        found = config.get(key) or {}
        try:
            return {name: (value, of_names(name)) for name, value in found.items()}
        except (AttributeError, re.error) as error:
            raise PlanError(f"{self.said}: {key} does not map names to numbers ({error}). {REMEDY}") from None

    @classmethod
    def of_config(cls, config: dict, said: str) -> "Patterns | None":
        """None for an adapter without patterns."""
        if config.get("rank_pattern") or config.get("alpha_pattern"):
            return cls(config, said)
        return None

    def of(self, module: str) -> tuple[int, float]:
        """(rank, scale) of a layer, as PEFT's get_pattern_key finds them."""
        name = parameter_of(module, self.parameters)
        rank = self._first(self.ranks, name, self.rank)
        alpha = self._first(self.alphas, name, self.alpha)
        return rank, scaling_of(rank, float(alpha), self.rslora)

    def _first(self, pattern: dict, name: str, default: float):
        with ended_in_time(f"{self.said}: rank_pattern and alpha_pattern on {name}"):
            return next((value for value, regex in pattern.values() if regex.match(name)), default)

    def uniform(self, config: dict) -> dict:
        """The config of the same adapter with one rank, of one scale."""
        alpha = self.scale * (math.sqrt(self.largest) if self.rslora else self.largest)
        return config | {"r": self.largest, "lora_alpha": alpha, "rank_pattern": {}, "alpha_pattern": {}}


class Uniform(Mapping):
    """The tensors of `Patterns.uniform`'s config; `shapes` and reading as FloatTensors has them."""

    def __init__(self, tensors: FloatTensors, patterns: Patterns):
        self.tensors = tensors
        self.patterns = patterns
        self.shapes = {name: self._shape(name) for name in tensors.shapes}

    def __getitem__(self, name: str) -> np.ndarray:
        array, rank = self.own(name)
        return padded(name, array, np.zeros(self.shapes[name], np.float32), rank, self.patterns.largest)

    def own(self, name: str) -> tuple[np.ndarray, int]:
        """(the tensor in the uniform scale, the rank that its layer has)."""
        rank, scale = self._layer(name)
        array = self.tensors[name]
        if rank is not None and not name.endswith((*OF_A, "magnitude_vector")):
            array = array * np.float32(scale / self.patterns.scale)
        return array, rank or self.patterns.largest

    def __iter__(self):
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def _layer(self, name: str) -> tuple[int | None, float]:
        if not LEAF.search(name):
            return None, 1.0
        return self.patterns.of(LEAF.sub("", name.removeprefix(PREFIX)))

    def _shape(self, name: str) -> tuple[int, ...]:
        (rank, _), shape = self._layer(name), self.tensors.shapes[name]
        if rank is None or name.endswith("magnitude_vector"):
            return shape
        axis = 0 if name.endswith(OF_A) else 1
        if len(shape) != 2 or shape[axis] % rank or (shape[axis] != rank and not self.patterns.parameters):
            layer = LEAF.sub("", name.removeprefix(PREFIX))
            fact = f"rank_pattern gives {layer} the rank {rank}, which its weights do not have"
            raise PlanError(f"{self.patterns.said}: {fact}: {name} is {list(shape)}. {REMEDY}")
        grown = shape[axis] // rank * self.patterns.largest
        if axis == 0:
            return (grown, shape[1])
        return (shape[0], grown)


def padded(name: str, array: np.ndarray, start: np.ndarray, rank: int, more: int) -> np.ndarray:
    """The first ranks from `array`, the rest from `start`. E experts: A [E * R, I], B [O, R * E], E varying fastest."""
    if name.endswith("magnitude_vector") or rank == more:
        return array
    if name.endswith(OF_A):
        if array.shape[0] * more != start.shape[0] * rank or array.shape[1:] != start.shape[1:]:
            return array
        out = start.reshape(-1, more, start.shape[1]).copy()
        out[:, :rank] = array.reshape(-1, rank, array.shape[1])
        return out.reshape(start.shape)
    if array.shape[0] != start.shape[0] or array.shape[1] * more != start.shape[1] * rank:
        return array
    out = start.reshape(len(start), more, -1).copy()
    out[:, :rank] = array.reshape(len(array), rank, -1)
    return out.reshape(start.shape)
