"""Weights of the recursive model on disk: our step_N folders and published runs, and the fork's step_N files."""

from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import torch

from finetune.checkpoint.store import PRETRAINED, VerifiedCheckpoint, verify_checkpoint
from finetune.errors import CheckpointDamagedError, PlanError
from finetune.model_files.manifest import read_manifest
from finetune.model_files.published import is_checkpoint, verified
from finetune.system.json_files import JsonFileError, read_json
from finetune.system.untrusted import untrusted
from recursive.config import ArchConfig
from recursive.recipe import arch_of_yaml
from recursive.torch_engine.model import RecursiveModel

MODEL = "model.safetensors"
MOMENTS = "optimizer.safetensors"
CONFIG = "config.json"
CONFIG_SCHEMA = {"model_type": str, "vocab_size": int, "seq_len": int, "num_puzzles": int, "arch": {str: object}}
FORK_SEQ_LEN = 512  # its generate.py's window: the file does not say what it was trained on
# The fork's names of what the two models share, after its prefix.
FORK_NAMES = {
    "embed_tokens.embedding_weight": "embed.weight",
    "embed_pos.embedding_weight": "embed_pos.weight",
    "puzzle_emb.weights": "puzzle_emb.weight",
    "lm_head.weight": "head.weight",
    "H_init": "y0_D",
    "L_init": "z0_D",
    "self_attn.qkv_proj.weight": "qkv.weight",
    "self_attn.o_proj.weight": "out.weight",
    "mlp_t.gate_up_proj.weight": "gate_up_t.weight",
    "mlp_t.down_proj.weight": "down_t.weight",
    "mlp.gate_up_proj.weight": "gate_up.weight",
    "mlp.down_proj.weight": "down.weight",
}


def open_model(checkpoint: Path, raw: bool, dtype: str, device: torch.device | str) -> RecursiveModel:
    """The model of a step_N folder, a published run or a fork's step_N file, in eval mode.
    `raw`: the weights themselves and not their average. Raises PlanError, CheckpointDamagedError.
    """
    if checkpoint.is_file():
        model, weights = _open_fork(checkpoint, dtype)
    else:
        config = read_config(checkpoint)
        arch = replace(arch_of(config["arch"], checkpoint / CONFIG), forward_dtype=dtype)
        model = RecursiveModel(arch, config["vocab_size"], config["seq_len"], config["num_puzzles"])
        weights = read_folder(checkpoint, raw)
    load_weights(model, weights, f"--checkpoint {checkpoint}")
    return model.to(device).eval()


def read_config(folder: Path) -> dict:
    try:
        return read_json(folder / CONFIG, CONFIG_SCHEMA)
    except FileNotFoundError:
        raise PlanError(f"--checkpoint {folder}: has no {CONFIG}. Give a step_N of pretrain.py.") from None
    except JsonFileError as error:
        raise CheckpointDamagedError(str(error)) from None


def arch_of(values: dict, where: Path) -> ArchConfig:
    known = {f.name for f in fields(ArchConfig)}
    odd = sorted(set(values) - known)
    if odd:
        raise PlanError(f"{where}: arch has {odd[0]}, which this version does not know. Use the version that wrote it.")
    return ArchConfig(**values)


def read_weights(checkpoint: Path) -> dict:
    """{name: array} of a checkpoint; of a folder, its average. Raises PlanError."""
    if checkpoint.is_file():
        return fork_tensors(checkpoint)
    return read_folder(checkpoint, raw=False)


def read_folder(folder: Path, raw: bool) -> dict:
    """Weights of a step_N, its average unless `raw`, each file under its digest; or those of a published run."""
    if is_checkpoint(folder):
        saved = verify_checkpoint(folder, (MODEL, CONFIG))
        weights = saved.tensors(MODEL)
        if raw:
            return weights
        return weights | averages_of(saved)
    if raw:
        raise PlanError(f"--raw-weights: {folder} holds the published weights only. Give one of its step_N.")
    if not (folder / MODEL).is_file():
        raise PlanError(f"--checkpoint {folder}: has no {MODEL}. Give a step_N of pretrain.py.")
    with verified(folder, (folder / CONFIG, folder / MODEL)):
        return VerifiedCheckpoint(folder, 0, {}).tensors(MODEL)


def averages_of(saved: VerifiedCheckpoint) -> dict:
    """{name: averaged weight} of a checkpoint; empty if the run had no EMA."""
    if MOMENTS not in read_manifest(saved.folder)["files"]:
        return {}
    stored = saved.slices(MOMENTS)
    return {name.removesuffix(".ema"): stored[name][...] for name in stored if name.endswith(".ema")}


def _open_fork(file: Path, dtype: str):
    beside = file.parent / PRETRAINED
    if not beside.is_file():
        raise PlanError(
            f"--checkpoint {file}: has no {PRETRAINED} beside it, which describes the model. Copy it there."
        )
    arch = replace(arch_of_yaml(beside), forward_dtype=dtype)
    tensors = fork_tensors(file)
    if "embed.weight" not in tensors:
        raise PlanError(f"--checkpoint {file}: is not a state dict of TinyRecursiveModels. Give its step_N file.")
    size = FORK_SEQ_LEN + arch.prefix_len
    if "embed_pos.weight" in tensors:
        size = tensors["embed_pos.weight"].shape[0]
    if arch.mlp_t:
        size = tensors["layers.0.down_t.weight"].shape[0]
    puzzles = 0
    if "puzzle_emb.weight" in tensors:
        puzzles = tensors["puzzle_emb.weight"].shape[0]
    model = RecursiveModel(arch, tensors["embed.weight"].shape[0], size - arch.prefix_len, puzzles)
    return model, tensors


def fork_tensors(file: Path) -> dict[str, np.ndarray]:
    """{our name: array} of a state dict that the fork has saved. Code in it is not run. Raises PlanError."""
    with untrusted(f"{file}: is not a state dict that torch can load without running code", "Give a step_N file."):
        state = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or not all(isinstance(t, torch.Tensor) for t in state.values()):
            raise TypeError("it does not hold a dict of tensors")
    found = {}
    for name, tensor in state.items():
        if ".rotary_emb." in name:  # tables, which are computed
            continue
        name = name.removeprefix("_orig_mod.").removeprefix("model.").removeprefix("_orig_mod.").removeprefix("inner.")
        array = tensor.float().numpy()
        if name.startswith("L_level.layers."):
            layer, _, inner = name.removeprefix("L_level.layers.").partition(".")
            found[f"layers.{layer}.{FORK_NAMES.get(inner, inner)}"] = array
        elif name.startswith("q_head."):  # the second output was HRM's Q-continue
            found[name] = array[:1]
        else:
            found[str(FORK_NAMES.get(name, name))] = array
    return found


def model_config(model: RecursiveModel) -> dict:
    """Config from which the model is rebuilt."""
    sizes = {"vocab_size": model.vocab_size, "seq_len": model.seq_len, "num_puzzles": model.num_puzzles}
    return {"model_type": "tiny_recursive", **sizes, "arch": asdict(model.arch)}


def load_weights(model: RecursiveModel, weights: dict, said: str) -> None:
    """Copies weights by name. Raises PlanError if names or shapes differ."""
    own = model.state_dict()
    odd = sorted(set(own) ^ set(weights))
    if odd:
        raise PlanError(
            f"{said}: the checkpoint and this model have different tensors, such as {odd[0]}. Use its arch."
        )
    for name, tensor in own.items():
        if tuple(tensor.shape) != tuple(weights[name].shape):
            shapes = f"{tuple(weights[name].shape)} in the checkpoint, {tuple(tensor.shape)} here"
            raise PlanError(f"{said}: {name} is {shapes}. Use the settings of its run.")
        tensor.copy_(torch.from_numpy(np.array(weights[name])))
