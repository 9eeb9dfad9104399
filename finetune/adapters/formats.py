"""Adapters between PEFT's format, which is ours, and mlx-lm's. Numpy only; the one place where anything is transposed.

PEFT: A [R, I], B [O, R], scale alpha/R. mlx-lm: lora_a [I, R], lora_b [R, O], a literal `scale`, layers named by their
path. E experts share A [E * R, I] and B [O, R * E] in PEFT; mlx-lm has [E, R, I] and [E, O, R], gate and up apart.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from finetune import safetensors_io
from finetune.adapters.config import PEFT_VERSION
from finetune.adapters.patterns import parameter_of, scaling_of
from finetune.adapters.saved import CONFIG, MLX_LM_FILE
from finetune.adapters.targets import ROUTERS
from finetune.errors import PlanError

PREFIX = "base_model.model."
LEAVES = {"lora_A.weight": "lora_a", "lora_B.weight": "lora_b", "lora_magnitude_vector": "m"}
# Where mlx-lm keeps the experts that transformers 5 holds as mlp.experts.
EXPERTS = {"mixtral": "block_sparse_moe.switch_mlp", "qwen3_moe": "mlp.switch_mlp", "qwen2_moe": "mlp.switch_mlp"}
LAYER = re.compile(r"(.*\blayers\.)(\d+)\.(.*)")
NOT_CONVERTED = {"modules_to_save": "full modules", "fan_in_fan_out": "transposed layers"}


def base_name(config: dict, said: str) -> str:
    """The base model an adapter names, in either format. Raises PlanError."""
    name = config.get("base_model_name_or_path") or config.get("model")
    if not isinstance(name, str):
        raise PlanError(f"{said}: its {CONFIG} names no base model. Give a complete adapter.")
    return name


def linear_names(weight_files: Iterable[Path]) -> set[str]:
    """Names of the layers with a matrix in a model's files."""
    found = set()
    for path in weight_files:
        header = safetensors_io.read_header(path)
        found |= {n.removesuffix(".weight") for n, e in header.items() if n != "__metadata__" and len(e["shape"]) == 2}
    return found


# ---- PEFT -> mlx-lm


def to_mlx_lm(tensors: dict, config: dict, model_config: dict) -> tuple[dict, dict]:
    """(tensors, adapter_config.json) as mlx-lm reads them. Raises PlanError for what it has no place for."""
    for key, what in NOT_CONVERTED.items():
        if config.get(key):
            raise PlanError(
                f"--to mlx-lm: this adapter has {what} ({key}), which mlx-lm does not support. Use --to hf."
            )
    rank = config["r"]
    alpha = config["lora_alpha"]
    scale = scaling_of(rank, alpha, bool(config.get("use_rslora")))
    out: dict[str, np.ndarray] = {}
    num_experts = model_config.get("num_local_experts") or model_config.get("num_experts")
    for key, array in tensors.items():
        name = key.removeprefix(PREFIX)
        leaf = next((leaf for leaf in LEAVES if name.endswith("." + leaf)), None)
        if leaf:
            module = name.removesuffix(f".{leaf}")
        else:
            module = name
        if leaf is None or (module.endswith("base_layer") and "experts" not in module):
            raise PlanError(f"--to mlx-lm: {name} adapts embeddings or a head, which is not converted. Use --to hf.")
        if re.search(r"\.experts(\.base_layer)?$", module):
            adapted = parameter_of(module, config.get("target_parameters") or ())
            out |= _experts(adapted, leaf, array, num_experts, model_config["model_type"])
        else:
            out[f"{module}.{LEAVES[leaf]}"] = np.ascontiguousarray(array.T)
    dora = bool(config.get("use_dora"))
    paths = sorted({name.rpartition(".")[0] for name in out})
    layers = len({at[2] for path in paths if (at := LAYER.match(path))})
    text = model_config.get("text_config") or model_config
    # mlx-lm counts layers from the end: of other layers it needs the full paths.
    if layers == text.get("num_hidden_layers"):
        keys = _keys(paths)
    else:
        keys = paths
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0, "keys": keys}
    return out, {
        "fine_tune_type": "dora" if dora else "lora",
        "model": config.get("base_model_name_or_path"),
        "num_layers": layers,
        "lora_parameters": parameters,
    }


def _experts(parameter: str, leaf: str, array: np.ndarray, num_experts: int | None, model_type: str) -> dict:
    """mlx-lm's tensors of the pair that adapts one parameter of experts."""
    if model_type not in EXPERTS or num_experts is None:
        raise PlanError(f"--to mlx-lm: where mlx-lm has the experts of {model_type} is not known. Use --to hf.")
    module, _, name = parameter.rpartition(".")
    block = re.sub(r"mlp\.experts$", EXPERTS[model_type], module)
    names = [name]
    if name == "gate_up_proj":
        names = ["gate_proj", "up_proj"]
    if leaf == "lora_A.weight":
        parts = [array.reshape(num_experts, -1, array.shape[1])] * len(names)
    else:
        parts = np.split(array.reshape(array.shape[0], -1, num_experts).transpose(2, 0, 1), len(names), axis=1)
    return {f"{block}.{n}.{LEAVES[leaf]}": np.ascontiguousarray(p) for n, p in zip(names, parts, strict=True)}


def _keys(paths: list[str]) -> list[str]:
    """The layers' paths inside a block if every block has the same, else their full paths: mlx-lm matches both."""
    found = [at for path in paths if (at := LAYER.match(path))]
    if len(found) == len(paths):
        inside = {m[3] for m in found}
        if len(inside) * len({m[2] for m in found}) == len(paths):
            return sorted(inside)
    return paths


# ---- mlx-lm -> PEFT


def to_peft(tensors: dict, config: dict, layers: set[str]) -> tuple[dict, dict]:
    """(tensors, adapter_config.json) as PEFT reads them. Raises PlanError.

    `layers`: names of the base's linears. Names carry the block's number, so `num_layers`, which mlx-lm counts from the
    end, needs no translation.
    """
    back = {ours: leaf for leaf, ours in LEAVES.items()}
    out = {}
    kind = config.get("fine_tune_type", "lora")
    parameters = config["lora_parameters"]
    rank = parameters["rank"]
    scale = float(parameters["scale"])
    if kind not in ("lora", "dora"):
        raise PlanError(f"--to peft: mlx-lm's fine_tune_type {kind} is not an adapter. Use mlx_lm.fuse.")
    for name, array in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf not in back or array.ndim > 2 or "embed" in module:
            raise PlanError(f"--to peft: {name} {list(array.shape)} is not of a linear layer. Use mlx_lm.fuse.")
        out[f"{PREFIX}{module}.{back[leaf]}"] = np.ascontiguousarray(array.T)
    modules = {name.rpartition(".")[0] for name in tensors}
    missing = sorted(modules - layers)
    if not modules or missing:
        fact = "holds no tensor"
        if modules:
            fact = f"adapts {missing[0]}, which this base does not have"
        raise PlanError(f"--to peft: {MLX_LM_FILE} {fact}. Give the base it was trained on.")
    if routers := sorted(module for module in modules if module.rpartition(".")[2] in ROUTERS):
        raise PlanError(f"--to peft: {routers[0]} is a router, no linear layer in transformers. Use mlx_lm.fuse.")
    return out, {
        "peft_type": "LORA",
        "peft_version": PEFT_VERSION,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.get("model"),
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": 0.0,
        "target_modules": sorted(modules),
        "use_dora": kind == "dora",
        "use_rslora": False,
        "fan_in_fan_out": False,
        "bias": "none",
        "modules_to_save": None,
        "inference_mode": True,
    }
