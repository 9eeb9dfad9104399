"""LLaMA-Pro on any decoder: finds the tensors of a copied layer that must be zero, and trains the added blocks.

Architecture-independent: a randomly initialized layer of the model's class is zeroed into an identity, then each tensor
that need not be zero is restored. The rest write to the residual stream (output projections and their biases).
"""

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from finetune.errors import PlanError
from finetune.model_files.llama_pro import TRAINED
from finetune.model_files.published import verified
from finetune.safetensors_io import read_tensors
from finetune.system.untrusted import untrusted
from finetune.torch_engine.lora.init import assign
from finetune.torch_engine.weights.interfaces import GivenValues
from finetune.torch_engine.weights.modalities import vision_prefixes
from finetune.torch_engine.weights.stream import config_dtype, load_dense


def full_config(folder: Path) -> tuple[dict, str]:
    """(config with all keys that its class derives, such as layer_types; the key for the number of layers)."""
    with untrusted(f"--model_name {folder}: its config.json does not load", "Give another model."):
        config = transformers.AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        text = config.get_text_config()
        key = text.attribute_map.get("num_hidden_layers", "num_hidden_layers")
        return json.loads(config.to_json_string(use_diff=False)), key


def residual_writers(config: dict, layers: str, layer: int, stored: dict, label: str) -> set[str]:
    """Patterns of the tensors on disk that must be zero for `layer` to be an identity; PlanError if there are none.

    `stored`: {name within the layer: (pattern, shape)}. Memory: a random fp32 model truncated after `layer`.
    """
    patterns = sorted({pattern for pattern, _ in stored.values()})
    assert len(patterns) < 256, "marks are integers that bf16 represents exactly"
    with tempfile.TemporaryDirectory() as folder:
        marks = {
            f"{layers}.{layer}.{name}": torch.full(shape, patterns.index(pattern) + 1, dtype=torch.bfloat16)
            for name, (pattern, shape) in stored.items()
        }
        model = _load_marked(Path(folder), config, marks, label)
    block = layer_list(model, layers, label)[layer]
    # Maps parameters to tensors on disk: the loader may concatenate or transpose them, as it does for experts.
    made_of = {n: {int(v) for v in p.detach().unique()} for n, p in block.named_parameters()}
    for name, marks_in in made_of.items():
        if not marks_in <= set(range(1, len(patterns) + 1)):
            raise PlanError(f"{label}: {name} of its layers is not in its files. Expand another model.")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.05, generator=generator)
        needed = _needed_zeros(model, block, label)
    return {patterns[mark - 1] for name in needed for mark in made_of[name]}


def _load_marked(folder: Path, config: dict, marks: dict, label: str):
    from safetensors.torch import save_file

    save_file(marks, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with untrusted(f"{label}: the model does not load with fewer layers", "Expand another model."):
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32, trust_remote_code=False, output_loading_info=True, local_files_only=True
        )
        model, info = loaded
    if info.get("unexpected_keys"):
        first = sorted(map(str, info["unexpected_keys"]))[0]
        raise PlanError(f"{label}: its files contain {first}, which its class does not use. Expand another model.")
    return model.eval()


def layer_stacks(model: PreTrainedModel) -> list[str]:
    """Names of the module lists whose length is the config's number of layers; none where it does not say it (BLT).
    A tower for images may be as deep as the language model: its layers are others.
    """
    depth = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    towers = vision_prefixes(model)
    found = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    return [name for name in found if not name.startswith(towers)]


def layer_list(model: PreTrainedModel, layers: str | None, label: str) -> nn.ModuleList:
    """The decoder's layer list, whose name is a suffix of `layers` (from the files)."""
    found = model.get_submodule(layer_list_name(model, layers, label))
    assert isinstance(found, nn.ModuleList), found
    return found


def layer_list_name(model: PreTrainedModel, layers: str | None, label: str) -> str:
    found = [n for n in layer_stacks(model) if layers is None or n.rpartition(".")[2] == layers.rpartition(".")[2]]
    if len(found) != 1:
        count = model.config.get_text_config().num_hidden_layers
        raise PlanError(f"{label}: {type(model).__name__} has {len(found)} stacks of {count} layers instead of one.")
    return found[0]


def _needed_zeros(model: PreTrainedModel, block: nn.Module, label: str) -> set[str]:
    """Names of the parameters that must be zero to make the block an identity; restores vectors before matrices."""
    ran = []
    owners = [m for m in block.modules() if any(True for _ in m.parameters(recurse=False))]
    hooks = [m.register_forward_pre_hook(lambda module, _: ran.append(module)) for m in owners]
    _is_identity(model, block)
    for hook in hooks:
        hook.remove()
    turn = {id(m): i for i, m in reversed(list(enumerate(ran)))}
    names = {id(p): n for n, p in block.named_parameters()}
    ordered = sorted(owners, key=lambda m: turn.get(id(m), len(ran)))
    every = [p for m in ordered for p in m.parameters(recurse=False)]
    every = [p for p in every if p.ndim < 2] + [p for p in every if p.ndim >= 2]
    kept = [p.clone() for p in every]
    for parameter in every:
        parameter.zero_()
    if not _is_identity(model, block):
        raise PlanError(
            f"{label}: a zeroed layer changes its input, so a copy cannot start as an identity. Expand another model."
        )
    needed = set()
    for parameter, value in zip(every, kept, strict=True):
        parameter.copy_(value)
        if not _is_identity(model, block):
            parameter.zero_()
            needed.add(names[id(parameter)])
    return needed


@torch.no_grad()
def _is_identity(model: PreTrainedModel, block: nn.Module) -> bool:
    seen = {}

    def look(module: nn.Module, args: Any, kwargs: Any, out: torch.Tensor):
        seen["in"] = (args[0] if args else kwargs["hidden_states"]).clone()
        seen["out"] = out[0] if isinstance(out, tuple) else out

    hook = block.register_forward_hook(look, with_kwargs=True)
    embeddings: Any = model.get_input_embeddings()
    vocab = embeddings.weight.shape[0]
    model(input_ids=(torch.arange(3, 11) % vocab)[None], use_cache=False)
    hook.remove()
    return torch.equal(seen["in"], seen["out"])


@torch.no_grad()
def logits_of(files: list[Path], config: dict, label: str) -> torch.Tensor:
    """Logits of the weights in `files` under `config`, in their stored dtype; ignores layers beyond the config."""
    with tempfile.TemporaryDirectory() as folder:
        for file in files:
            (Path(folder) / file.name).symlink_to(file.resolve())
        (Path(folder) / "config.json").write_text(json.dumps(config))
        try:
            model = load_dense(folder, config_dtype(config))
        except PlanError as error:  # it names the temporary folder
            raise PlanError(str(error).replace(f"--model_name {folder}", label)) from error
        embeddings: Any = model.get_input_embeddings()
        vocab = embeddings.weight.shape[0]
        ids = torch.randint(0, vocab, (2, 24), generator=torch.Generator().manual_seed(0))
        return model(input_ids=ids, use_cache=False).logits.float()


# ---- training and inference


def new_blocks(model: PreTrainedModel, record: dict, label: str) -> list[str]:
    """Module names of the added layers. Raises PlanError if the record does not match the model."""
    name = layer_list_name(model, record["layers"], label)
    count = len(layer_list(model, record["layers"], label))
    if max(record["new_layers"]) >= count or len(record["new_layers"]) >= count:
        raise PlanError(
            f"{label}: added layers {record['new_layers']} are out of range for its {count} layers. Expand it again."
        )
    return [f"{name}.{i}" for i in record["new_layers"]]


def inside_blocks(name: str, blocks: list[str]) -> bool:
    return any(name.startswith(block + ".") for block in blocks)


def unfreeze_blocks(model: PreTrainedModel, blocks: list[str], local_shards: GivenValues | None = None) -> None:
    """Makes the added blocks trainable, in fp32. `local_shards`: this rank's part of a model on meta."""
    for name in blocks:
        block = model.get_submodule(name).to(torch.float32).requires_grad_(True)
        if local_shards is not None:
            local_shards.cast(block.parameters(), torch.float32)


@torch.no_grad()
def attach_blocks(model: PreTrainedModel, folder: Path | str, local_shards: GivenValues | None = None) -> None:
    """Loads trained blocks into the expanded model they belong to. `local_shards`: this rank's rows of it."""
    with verified(Path(folder), [Path(folder) / TRAINED]):
        tensors = read_tensors(Path(folder) / TRAINED)
    parameters = dict(model.named_parameters())
    for name, array in tensors.items():
        tensor = torch.from_numpy(array)
        if name not in parameters or parameters[name].shape != tensor.shape:
            raise PlanError(
                f"--checkpoint {folder}: contains {name} {list(tensor.shape)}, which its base does not have. Give "
                "its base."
            )
        assign(local_shards, name, parameters[name], partial(torch.from_numpy, array))
