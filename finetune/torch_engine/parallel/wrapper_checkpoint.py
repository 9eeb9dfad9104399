"""A sharded model's weights and optimizer state in one file, in full, for any number of ranks.
For modules that the wrapper shards alone; runs of train.py keep safetensors checkpoints (finetune/checkpoint).
"""

import hashlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from finetune.errors import PlanError, StorageError, first_line
from finetune.quantizers.linear import QuantizedLinear
from finetune.system.files import open_file, replace
from finetune.system.untrusted import untrusted
from finetune.torch_engine.parallel.placement import local_shard
from finetune.torch_engine.parallel.wrapper_checkpoint_checks import MAKE_AFTER, MODEL, OPTIMIZER, misfit


def save(model: nn.Module, path: Path | str, optimizer: torch.optim.Optimizer | None, metadata: dict) -> None:
    """Writes `path` on rank 0, which appears when it is complete. Collective; a failure raises on every rank.

    Raises StorageError, and PlanError if `optimizer` is not one of this model, or if `metadata` is more than numbers,
    text, lists, dicts and tensors: it could not be read again without running pickled code.
    """
    path = Path(path)
    _raise_everywhere(_problem_of(_check_metadata, metadata), PlanError)
    content = {MODEL: {name: _full(t) for name, t in _named_tensors(model).items()}, **metadata}
    if optimizer is not None:
        content[OPTIMIZER] = _full_optimizer(model, optimizer)
    _raise_everywhere(_problem_of(_write, path, content), StorageError)


def _write(path: Path, content: dict) -> None:
    try:
        with replace(path, durable=True) as file:
            torch.save(content, file)
            _seal(file)
    except (OSError, RuntimeError) as error:  # torch's zip writer raises RuntimeError if the disk is full
        reason = getattr(error, "strerror", None) or first_line(error)
        raise StorageError(f"{path}: cannot be written ({reason}). Use an existing folder with free space.") from error


# At the end of the zip file that torch.save writes, as its comment: 2 bytes of length, the mark, the digest.
MARK = b"finetune sha256 "
DIGEST_BYTES = 64
END_OF_ZIP = b"PK\x05\x06"
END_BYTES = 22  # of a file without a comment


def _seal(file: BinaryIO) -> None:
    """Appends the digest of everything before it."""
    file.flush()
    file.seek(-2, os.SEEK_END)
    file.write((len(MARK) + DIGEST_BYTES).to_bytes(2, "little") + MARK)
    file.flush()
    file.write(_digest_before(Path(file.name), file.tell()).encode())


def _check_seal(file: BinaryIO) -> bool:
    """True if the file carries its digest; False for one written before there were any. Raises ValueError."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - DIGEST_BYTES - len(MARK)))
    end = file.read()
    file.seek(0)
    if end[-END_BYTES:].startswith(END_OF_ZIP):
        return False
    if not end.startswith(MARK) or end[len(MARK) :].decode(errors="replace") != _digest_before(
        Path(file.name), size - DIGEST_BYTES
    ):
        raise ValueError("its content has changed: the digest at its end differs")
    return True


def _digest_before(path: Path, size: int) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while size and (block := file.read(min(size, 2**20))):
            found.update(block)
            size -= len(block)
    return found.hexdigest()


def _problem_of(function: Callable, *arguments: Any) -> str | None:
    """Message of the error that `function` raises on rank 0; None if it succeeds, and on other ranks, which do not call
    it.
    """
    if _rank() == 0:
        try:
            function(*arguments)
        except (PlanError, StorageError) as error:
            return str(error)
    return None


def _raise_everywhere(problem: str | None, kind: type[Exception]) -> None:
    """Raises rank 0's problem, if it has one, on every rank. Collective."""
    problem = _broadcast_plain({"problem": problem})["problem"]
    if problem:
        raise kind(problem)


def load(model: nn.Module, path: Path | str, optimizer: torch.optim.Optimizer | None) -> dict:
    """Restores what `save` wrote; the metadata. Rank 0 reads and sends each tensor. Collective.

    Raises PlanError on every rank if the file does not fit the model; nothing is changed then.
    """
    content = None
    problem = None
    rest = None
    sealed = False
    if _rank() == 0:
        try:
            with untrusted(f"{path}: cannot be read with weights_only", "Use a file that save_checkpoint wrote."):
                with open_file(Path(path).resolve(), "rb") as file:
                    sealed = _check_seal(file)
                    content = torch.load(file, map_location="cpu", weights_only=True)
            with untrusted(f"{path}: is not a checkpoint of this wrapper", "Use a file that save_checkpoint wrote."):
                found = misfit(
                    content, _named_tensors(model), _names(model), optimizer, sealed=sealed, views=_views(model)
                )
                if not found:
                    states = content.get(OPTIMIZER, {})
                    rest = {
                        "metadata": {k: v for k, v in content.items() if k not in (MODEL, OPTIMIZER)},
                        "groups": states.get("param_groups"),
                        "entries": _entries(states),
                    }
            problem = None
            if found:
                problem = f"{path}: {found}. Use the model and optimizer that it was saved from."
        except PlanError as error:
            problem = str(error)
    message = _broadcast_plain({"problem": problem, "rest": rest})
    if message["problem"]:
        raise PlanError(message["problem"])
    rest = message["rest"]
    with torch.no_grad():
        for name, tensor in _named_tensors(model).items():
            if content:
                full = content[MODEL][name]
            else:
                full = torch.empty(tensor.shape, dtype=tensor.dtype)
            local_shard(tensor).copy_(_local_slice(_broadcast(full), tensor))
        if optimizer is not None:
            _load_optimizer(model, optimizer, content, rest)
    return rest["metadata"]


def _rank() -> int:
    if dist.is_initialized():
        return dist.get_rank()
    return 0


def _named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, by name; tied ones once for each name."""
    return {name: t for name, t in model.state_dict(keep_vars=True).items() if torch.is_tensor(t)}


def _views(model: nn.Module) -> set[str]:
    """Names of packed weights that are viewed as floats."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    return {f"{name}.{leaf}".lstrip(".") for name, module in layers.items() for leaf in module.viewed}


def _full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().clone()


def _local_slice(full: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of `full`, sharded as `tensor` is."""
    if not isinstance(tensor, DTensor):
        return full
    shape, offset = compute_local_shape_and_global_offset(full.shape, tensor.device_mesh, tensor.placements)
    return full[tuple(slice(start, start + n) for start, n in zip(offset, shape, strict=True))]


def _names(model: nn.Module) -> dict:
    return {parameter: name for name, parameter in model.named_parameters()}


def _full_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    names = _names(model)
    foreign = sum(p not in names for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise PlanError(f"optimizer: the model does not have {foreign} of its parameters. {MAKE_AFTER}")
    # Also of parameters without any: one that is missing on load was lost.
    state = {
        names[p]: {key: _full(v) if torch.is_tensor(v) else v for key, v in optimizer.state.get(p, {}).items()}
        for group in optimizer.param_groups
        for p in group["params"]
    }
    groups = [{**g, "params": [names[p] for p in g["params"]]} for g in optimizer.param_groups]
    return {"state": state, "param_groups": groups}


def _entries(states: dict) -> list:
    """[(parameter, key, shape, dtype or None for a number, number)] of an optimizer's state, in order."""
    return [
        (name, key, list(v.shape), str(v.dtype), None) if torch.is_tensor(v) else (name, key, [], None, v)
        for name, values in states.get("state", {}).items()
        for key, v in values.items()
    ]


def _load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, content: Any, rest: dict) -> None:
    parameters = {name: p for p, name in _names(model).items()}
    optimizer.state.clear()
    for name, key, shape, dtype, number in rest["entries"]:
        p = parameters[name]
        value = number
        if dtype is not None:
            dtype = getattr(torch, dtype.removeprefix("torch."))
            full = _broadcast(content[OPTIMIZER]["state"][name][key] if content else torch.empty(shape, dtype=dtype))
            # torch counts steps on the CPU.
            if key != "step" and list(shape) == list(p.shape):
                value = _like(full, p)
            else:
                value = full
        optimizer.state[p][key] = value
    for group, saved in zip(optimizer.param_groups, rest["groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})


def _like(full: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """`full` on the device of `parameter` and sharded like it."""
    local = _local_slice(full, parameter).to(local_shard(parameter).device, copy=True).contiguous()
    if not isinstance(parameter, DTensor):
        return local
    mesh = parameter.device_mesh
    placements = parameter.placements
    stride = torch.empty(full.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=stride)


def _check_metadata(metadata: dict) -> None:
    reserved = sorted({MODEL, OPTIMIZER} & set(metadata))
    if reserved:
        raise PlanError(f"{reserved[0]}: is the name of what the checkpoint holds. Give the metadata another.")
    file = io.BytesIO()
    with untrusted(f"metadata {', '.join(metadata)}: cannot be saved", "Give numbers, text, lists, dicts, tensors."):
        torch.save(metadata, file)
        file.seek(0)
        torch.load(file, weights_only=True)


def _broadcast(tensor: torch.Tensor) -> torch.Tensor:
    """Rank 0's CPU tensor, on every rank."""
    if dist.is_initialized() and dist.get_world_size() > 1 and tensor.numel():
        tensor = tensor.contiguous()
        dist.broadcast(tensor, 0)
    return tensor


def _broadcast_plain(content: dict) -> dict:
    """Rank 0's numbers, text, lists and tensors, on every rank, read with weights_only."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return content
    file = io.BytesIO()
    torch.save(content, file)
    data = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    size = _broadcast(torch.tensor([len(data)]))
    if _rank() != 0:
        data = torch.empty(int(size), dtype=torch.uint8)
    return torch.load(io.BytesIO(_broadcast(data).numpy().tobytes()), weights_only=True)
