"""Optimizers by name, their state as named arrays that any run or framework can load, and gradient clipping."""

from functools import partial

import numpy as np
import torch

from finetune.errors import PlanError
from finetune.optimizer_state import check_known
from finetune.plan.parts import StepsPlan
from finetune.quantizers import bnb
from finetune.torch_engine.device import fused_optimizer, to_host

# Groups over which a parameter may be sharded.
SHARDED_OVER = ((), ("shard",), ("tp",), ("shard", "tp"), ("ep",), ("expert_shard", "ep"))


def build(named: dict, steps: StepsPlan, device, lr_ratio: float = 1.0):
    """The optimizer over {name: parameter}. `lr_ratio`: lr of B divided by that of A, for LoRA+ (Hayou et al. 2024)."""
    decayed = [p for n, p in named.items() if p.ndim >= 2 and not n.endswith("lora_B")]
    flat = [p for n, p in named.items() if p.ndim < 2]
    b_side = [p for n, p in named.items() if p.ndim >= 2 and n.endswith("lora_B")]
    groups = [
        {"params": decayed, "weight_decay": steps.wd, "ratio": 1.0},
        {"params": b_side, "weight_decay": steps.wd, "ratio": lr_ratio},
        {"params": flat, "weight_decay": 0.0, "ratio": 1.0},
    ]
    groups = [g for g in groups if g["params"]]
    fused, adam = fused_optimizer(device), dict(betas=(steps.adam_beta1, steps.adam_beta2), eps=steps.adam_epsilon)
    match steps.optimizer:
        case "adamw":
            return torch.optim.AdamW(groups, lr=steps.lr, **adam, **fused)
        case "adam":
            return torch.optim.Adam(groups, lr=steps.lr, **adam, **fused)
        case "sgd":
            return torch.optim.SGD(groups, lr=steps.lr, momentum=0.9)
        case "adadelta":
            return torch.optim.Adadelta(groups, lr=steps.lr)
        case "adamw_8bit":
            try:
                bnb.functional()
                import bitsandbytes
            except ImportError as error:
                raise PlanError("--optimizer adamw_8bit: bitsandbytes is missing. pip install bitsandbytes.") from error
            return bitsandbytes.optim.AdamW8bit(groups, lr=steps.lr, **adam)
    raise AssertionError(steps.optimizer)


def set_lr(optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["ratio"]


def moments(optimizer, named: dict):
    """Yields ('<name>.<moment>', tensor in place) for all optimizer state tensors."""
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
    """Loads the result of `state`. Unknown parameters are an error, so that nothing is dropped silently."""
    found = {}
    for key, value in {**tensors, **numbers}.items():
        name, _, moment = key.rpartition(".")
        found.setdefault(name, {})[moment] = value
    check_known((*tensors, *numbers), named)
    eight_bit = type(optimizer).__module__.startswith("bitsandbytes")
    fused = any(group.get("fused") for group in optimizer.param_groups)  # their step counters are on the device
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


class LazyArray:
    """An array that is read when numpy asks for it."""

    def __init__(self, read, *args):
        self.read = partial(read, *args)

    def __array__(self, dtype=None, copy=None):
        return np.array(self.read(), dtype, copy=copy)


def unscale(parameters: dict, scale: float | None) -> None:
    """Divides the gradients by the loss scale, if there is one."""
    if scale:
        for parameter in parameters.values():
            if parameter.grad is not None:
                parameter.grad /= scale


def clip(parameters: dict, limit: float | None, groups, owned: dict, beside=()) -> tuple[float, list[torch.Tensor]]:
    """(global gradient norm over all ranks, fp32; `beside` on the host, in fp64). Clips the gradients to `limit` if
    given and exceeded. Collective.

    `owned`: {name: process groups over which it is sharded, one of SHARDED_OVER}; a missing name is counted by another
    rank. `beside`: tensors that are read together with the norms.
    """
    grads = {
        over: [p.grad for n, p in parameters.items() if owned.get(n) == over and p.grad is not None]
        for over in SHARDED_OVER
    }
    # Norms in fp32 per tensor, summed in fp64: the same result however the tensors are distributed over ranks.
    norms = {over: torch.stack(torch._foreach_norm(held)) for over, held in grads.items() if held}
    on_host = to_host([*norms.values(), *beside])
    squares, norms = {}, dict(zip(norms, on_host, strict=False))
    for over in SHARDED_OVER:
        square = norms[over].square().sum() if over in norms else torch.zeros((), dtype=torch.float64)
        for group in over:
            square = groups.all_reduce(square, group)
        squares[over] = square
    norm = groups.all_reduce(sum(squares.values()), "pp").sqrt().float()
    if limit is not None and torch.isfinite(norm):
        torch.nn.utils.clip_grads_with_norm_(parameters.values(), limit, norm)
    return norm.item(), on_host[len(norms) :]
