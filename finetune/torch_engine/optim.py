"""Optimizers by name, and their state as named arrays that another run, or another framework, can take up."""

import numpy as np
import torch

from finetune.errors import PlanError


def build(named: dict, settings, device):
    """The optimizer over {name: parameter}. LoRA+ (Hayou et al. 2024): B learns `loraplus_lr_ratio` times as fast as A."""
    decayed = [p for n, p in named.items() if p.ndim >= 2 and not n.endswith("lora_B")]
    flat = [p for n, p in named.items() if p.ndim < 2]
    b_side = [p for n, p in named.items() if p.ndim >= 2 and n.endswith("lora_B")]
    groups = [
        {"params": decayed, "weight_decay": settings.wd, "ratio": 1.0},
        {"params": b_side, "weight_decay": settings.wd, "ratio": settings.loraplus_lr_ratio},
        {"params": flat, "weight_decay": 0.0, "ratio": 1.0},
    ]
    groups = [g for g in groups if g["params"]]
    fused = {"fused": True} if device.type in ("cpu", "cuda", "mps", "xpu") else {}
    match settings.optimizer:
        case "adamw":
            return torch.optim.AdamW(groups, lr=settings.lr, **fused)
        case "adam":
            return torch.optim.Adam(groups, lr=settings.lr, **fused)
        case "sgd":
            return torch.optim.SGD(groups, lr=settings.lr, momentum=0.9)
        case "adadelta":
            return torch.optim.Adadelta(groups, lr=settings.lr)
        case "adamw_8bit":
            try:
                import bitsandbytes
            except ImportError as error:
                raise PlanError("--optimizer adamw_8bit: bitsandbytes is missing. pip install bitsandbytes.") from error
            return bitsandbytes.optim.AdamW8bit(groups, lr=settings.lr)
    raise AssertionError(settings.optimizer)


def set_lr(optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["ratio"]


def moments(optimizer, named: dict):
    """('<name>.<moment>', tensor where it stands) of each."""
    for name, parameter in named.items():
        for key, value in (optimizer.state.get(parameter, {}) if parameter is not None else {}).items():
            if key != "step" and torch.is_tensor(value):
                yield f"{name}.{key}", value.detach()


def counts(optimizer, named: dict) -> dict:
    """{'<name>.step': number}."""
    states = {n: optimizer.state.get(p, {}) for n, p in named.items() if p is not None}
    return {f"{name}.step": float(state["step"]) for name, state in states.items() if "step" in state}


def state(optimizer, named: dict) -> tuple[dict[str, np.ndarray], dict]:
    """({'<name>.<moment>': array}, {'<name>.<count>': number})."""
    tensors = {key: value.cpu().numpy() for key, value in moments(optimizer, named)}
    return tensors, counts(optimizer, named)


def load_state(optimizer, named: dict, tensors: dict, numbers: dict) -> None:
    """Puts back what `state` gave. Keys of unknown parameters are an error, so that nothing is dropped in silence."""
    found = {}
    for key, value in {**tensors, **numbers}.items():
        name, _, moment = key.rpartition(".")
        found.setdefault(name, {})[moment] = value
    unknown = sorted(set(found) - set(named))
    if unknown:
        raise PlanError(f"--resume: the checkpoint holds optimizer state of {unknown[0]}, which does not train here.")
    eight_bit = type(optimizer).__module__.startswith("bitsandbytes")
    fused = any(group.get("fused") for group in optimizer.param_groups)  # whose step counters live on the device
    for name, moments in found.items():
        parameter = named[name]
        restored = {}
        for moment, value in moments.items():
            if moment == "step":
                device = parameter.device if fused else "cpu"
                restored["step"] = int(value) if eight_bit else torch.tensor(value, dtype=torch.float32, device=device)
            else:
                restored[moment] = torch.from_numpy(np.array(value)).to(parameter.device)
        optimizer.state[parameter] = restored


def clip(parameters: dict, limit: float | None, ranks, owned: dict) -> float:
    """The norm of all gradients of all ranks together, fp32; scales them down to `limit` where it is given and passed.

    `owned`: {name: the groups of ranks that hold parts of it, "shard" and "tp" among them}; a name that is missing is counted
    by another rank.
    """
    squares = {}
    for over in ((), ("shard",), ("tp",), ("shard", "tp")):
        grads = [p.grad for n, p in parameters.items() if owned.get(n) == over and p.grad is not None]
        # Each tensor's norm in fp32, their sum in fp64: the same number whichever ranks the tensors are on.
        square = torch.zeros((), dtype=torch.float64)
        if grads:
            square = torch.stack(torch._foreach_norm(grads)).cpu().double().square().sum()
        for group in over:
            square = ranks.all_reduce(square, group)
        squares[over] = square
    norm = ranks.all_reduce(sum(squares.values()), "pp").sqrt().float()
    if limit is not None and torch.isfinite(norm):
        torch.nn.utils.clip_grads_with_norm_(parameters.values(), limit, norm)
    return norm.item()
