"""Checks that a file of the MPS wrapper fits a model and its optimizer, before anything is changed."""

import math
from typing import Any

import torch

MAKE_AFTER = "Create the optimizer after wrap_model, which replaces the parameters."
MODEL = "model_state_dict"
OPTIMIZER = "optimizer_state_dict"
# Keys of an optimizer's state that are shaped as the parameter; those of squares are never negative.
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "exp_inf", "sum")
SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "exp_inf", "sum")
STATE_DEPENDS_ON = ("amsgrad", "capturable")  # switches of an optimizer that decide what its state is
NEEDS = {torch.optim.Adam: ("step", "exp_avg", "exp_avg_sq"), torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq")}


def misfit(
    content: Any, tensors: dict, names: dict, optimizer: torch.optim.Optimizer | None, sealed: bool, views: set
) -> str | None:
    """Reason that a loaded file does not fit; None if it does. `tensors`: {name: tensor of the model}, `names`:
    {parameter: name}. `sealed`: the file is unmodified. `views`: names of tensors whose bytes are not numbers.
    """
    if not isinstance(content, dict) or not isinstance(content.get(MODEL), dict):
        return f"no {MODEL} in it: not a checkpoint of this wrapper"
    for name in sorted(set(tensors) ^ set(content[MODEL])):
        return f"{name} is in {'the model' if name in tensors else 'the checkpoint'} only"
    parameters = set(names.values())
    for name, tensor in tensors.items():
        saved = content[MODEL][name]
        fact = _unusable(saved)
        if fact:
            return f"{name} {fact}"
        if saved.shape != tensor.shape or saved.dtype != tensor.dtype:
            found, own = (f"{tuple(t.shape)} {t.dtype}" for t in (saved, tensor))
            return f"{name} is {found} in the checkpoint and {own} in the model"
        if name in views:
            continue
        odd = ~saved.isfinite()
        if name not in parameters:  # a mask holds -inf, in the model too
            odd &= saved.isnan() | tensor.detach().cpu().isfinite()
        if odd.any():
            return f"{name} is not finite"
    if optimizer is None:
        return None
    return _misfit_of_optimizer(content, names, optimizer, sealed)


def _unusable(value: Any) -> str | None:
    if not torch.is_tensor(value):
        return "is not a tensor"
    if value.is_meta or value.layout is not torch.strided:
        return f"is a {'meta' if value.is_meta else str(value.layout).removeprefix('torch.')} tensor"
    return None


def _misfit_of_optimizer(content: dict, names: dict, optimizer: torch.optim.Optimizer, sealed: bool) -> str | None:
    if OPTIMIZER not in content:
        return "it was saved without an optimizer"
    state = content[OPTIMIZER]["state"]
    unknown = set(state) - set(names.values())
    if unknown:
        return f"optimizer state of {min(unknown)}, which the model lacks"
    saved = content[OPTIMIZER]["param_groups"]
    own = optimizer.param_groups
    if any(p not in names for group in own for p in group["params"]):
        return f"the optimizer has parameters that the model does not. {MAKE_AFTER.rstrip('.')}"
    if [sorted(g["params"]) for g in saved] != [sorted(names[p] for p in g["params"]) for g in own]:
        sizes = " and ".join(str([len(g["params"]) for g in groups]) for groups in (saved, own))
        return f"the parameter groups differ: {sizes} parameters in the checkpoint and in the optimizer"
    options = sorted({key for old, new in zip(saved, own, strict=True) for key in set(old) - set(new)})
    if options:
        return f"{type(optimizer).__name__} has no {', '.join(options)}: another optimizer was saved"
    for old, new in zip(saved, own, strict=True):
        fact = _misfit_of_group(old, new, type(optimizer).__name__)
        if fact:
            return fact
    return _misfit_of_state(state, names, optimizer, sealed)


def _misfit_of_group(saved: dict, own: dict, kind: str) -> str | None:
    if saved.get("decoupled_weight_decay") != own.get("decoupled_weight_decay"):
        return f"{kind} does not decay weights as the optimizer that was saved"
    for key in sorted(saved.keys() - {"params"}):
        value = saved[key]
        mine = own[key]
        values, expected = (v if isinstance(v, tuple | list) else (v,) for v in (value, mine))
        alike = isinstance(value, tuple | list) == isinstance(mine, tuple | list) and len(values) == len(expected)
        if not alike or any(_kind(v) != _kind(m) for v, m in zip(values, expected, strict=True)):
            return f"{key} is {value!r:.80}, must be as {mine!r} is"
        if key in STATE_DEPENDS_ON and value != mine:
            return f"{key} is {value!r} in the checkpoint and {mine!r} in the optimizer"
        for number in map(_number, values):
            if isinstance(number, int | float) and not (math.isfinite(number) and number >= 0):
                return f"{key} is {number}, must be finite and not negative"
            if key == "betas" and number >= 1:
                return f"betas is {value!r}, must be below 1"
    return None


def _number(value: Any):
    if torch.is_tensor(value) and not _unusable(value) and value.numel() == 1:
        return value.item()
    return value


def _kind(value: Any) -> type:
    """bool for a switch, which may be None (torch decides), float for a number."""
    number = _number(value)
    if number is None or isinstance(number, bool):
        return bool
    if isinstance(number, int | float):
        return float
    return type(number)


def _misfit_of_state(state: dict, names: dict, optimizer: torch.optim.Optimizer, sealed: bool) -> str | None:
    needed = NEEDS.get(type(optimizer), ())
    kept = {name for name, values in state.items() if values}
    keys = set().union(*(state[name] for name in kept))
    parameters = {names[p]: p for group in optimizer.param_groups for p in group["params"]}
    for name, p in parameters.items():
        if sealed:
            lost = name not in state
        else:
            lost = bool(kept) and p.requires_grad and not state.get(name)
        if lost:
            return f"the optimizer state of {name} is missing"
        for key in (*needed, *sorted(keys)) if name in kept else ():
            if key not in state[name] or (key in needed and state[name][key] is None):
                return f"the optimizer state of {name} has no {key}"
            fact = _misfit_of_value(key, state[name][key], p)
            if fact:
                return f"{key} of {name} {fact}"
    return None


def _misfit_of_value(key: str, value: Any, p: torch.Tensor) -> str | None:
    if key == "step" or (value is not None and not torch.is_tensor(value) and key not in MOMENTS):
        if torch.is_tensor(value) and (_unusable(value) or value.numel() != 1 or not value.is_floating_point()):
            return f"is {tuple(value.shape)} {value.dtype}, must be one number"
        if torch.is_tensor(value):
            number = value.item()
        else:
            number = value
        is_number = isinstance(number, int | float) and math.isfinite(number)
        if is_number and (key != "step" or number >= 0):
            return None
        return f"is {number!r}, must be a number"
    if value is None:  # SGD's before its first step
        return None
    fact = _unusable(value)
    if fact:
        return fact
    if key in MOMENTS and (value.shape != p.shape or value.dtype != p.dtype):
        return f"is {tuple(value.shape)} {value.dtype}, the parameter {tuple(p.shape)} {p.dtype}"
    if not value.isfinite().all():
        return "is not finite"
    return "has negative numbers" if key in SQUARES and (value < 0).any() else None
