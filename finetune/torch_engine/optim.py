"""Optimizers by name, their state as named arrays that any run or framework can load, and gradient clipping."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np
import torch

from finetune.errors import PlanError
from finetune.optimizer_state import check_known
from finetune.parts.optimizers import EIGHT_BIT_FROM, OPTIMIZERS
from finetune.parts.rows import implementation
from finetune.parts.steps import StepsPlan
from finetune.parts.trains import Adapter, AddedLayers, Trains
from finetune.quantizers import bnb
from finetune.torch_engine import eight_bit
from finetune.torch_engine.device import fused_optimizer, to_host
from finetune.torch_engine.parallel.process_groups import ProcessGroups

# Groups over which a parameter may be sharded.
SHARDED_OVER = ((), ("shard",), ("tp",), ("shard", "tp"), ("ep",), ("expert_shard", "ep"))


def build(
    named: dict,
    steps: StepsPlan,
    device: torch.device,
    ratios: Mapping[str, float] | None = None,
    matrices: frozenset = frozenset(),
    sizes: dict | None = None,
):
    """The optimizer over {name: parameter}. `ratios`: {name: its learning rate divided by the run's}, 1 of those not in
    it. `matrices`: names of the weights of linear layers, which Muon updates. `sizes`: {name: numbers of the weight
    that `named` has rows of}, by which moments have 8 bits or 32, the same on every rank.
    """
    kind = implementation(OPTIMIZERS[steps.optimizer].torch)
    taken = {n: p for n, p in named.items() if steps.tells_matrices and n in matrices and p.ndim == 2}
    left = {n: p for n, p in named.items() if n not in taken}
    decayed = {n: p for n, p in left.items() if p.ndim >= 2 and not n.endswith("lora_B")}
    flat = {n: p for n, p in left.items() if p.ndim < 2}
    b_side = {n: p for n, p in left.items() if p.ndim >= 2 and n.endswith("lora_B")}
    groups = [
        *_by_ratio(decayed, ratios, steps.wd),
        *_by_ratio(b_side, ratios, steps.wd),
        *_by_ratio(flat, ratios, 0.0),
    ]
    if taken:
        rest = None
        if groups:
            rest = kind(groups, steps, device)
        return Muon(_by_ratio(taken, ratios, steps.wd), rest, steps.lr)
    built = kind(groups, steps, device)
    if sizes is not None and steps.moments_are_8_bit:
        small = {id(p) for name, p in named.items() if sizes[name] < EIGHT_BIT_FROM}
        built.get_config = partial(_config_by_size, built, built.get_config, small)
    return built


def ratios_of(trains: Trains, names: Iterable[str], seeing: Iterable[str]) -> dict[str, float]:
    """{name: learning rate of a parameter divided by the run's}, where it is not 1. `seeing`: names of the modules that
    see images and train in full. LoRA+ has a ratio for B (Hayou et al. 2024).
    """
    if isinstance(trains, AddedLayers):
        return {}
    prefixes = tuple(f"{name}." for name in seeing)
    found = {}
    for name in names:
        if name.startswith(prefixes):
            found[name] = trains.vision_ratio
        elif isinstance(trains, Adapter) and name.endswith("lora_B"):
            found[name] = trains.lr_ratio
    return found


def _by_ratio(named: dict, ratios: Mapping[str, float] | None, wd: float) -> list[dict]:
    """Groups of the optimizer over {name: parameter}, one for each ratio of a rate."""
    found: dict[float, list] = {}
    for name, parameter in named.items():
        found.setdefault((ratios or {}).get(name, 1.0), []).append(parameter)
    return [{"params": of, "weight_decay": wd, "ratio": ratio} for ratio, of in found.items()]


def _config_by_size(
    optimizer: Any, get_config: Callable, small: set[int], group: int, index: int, values: dict
) -> dict:
    """bitsandbytes' settings of a parameter, with 32 bits for the ids in `small` and 8 for others of any size."""
    is_small = id(optimizer.param_groups[group]["params"][index]) in small
    return get_config(group, index, values) | {"optim_bits": 32 if is_small else 8, "min_8bit_size": 0}


def _betas(steps: StepsPlan) -> tuple[float, float]:
    return steps.adam_beta1, steps.adam_beta2


def _adam_settings(steps: StepsPlan) -> dict:
    return dict(lr=steps.lr, betas=_betas(steps), eps=steps.adam_epsilon)


def adamw(groups: list[dict], steps: StepsPlan, device: torch.device):
    return torch.optim.AdamW(groups, **_adam_settings(steps), **fused_optimizer(device))


def adam(groups: list[dict], steps: StepsPlan, device: torch.device):
    return torch.optim.Adam(groups, **_adam_settings(steps), **fused_optimizer(device))


def sgd(groups: list[dict], steps: StepsPlan, device: torch.device):
    return torch.optim.SGD(groups, lr=steps.lr, momentum=0.9)


def adadelta(groups: list[dict], steps: StepsPlan, device: torch.device):
    return torch.optim.Adadelta(groups, lr=steps.lr)


def adafactor(groups: list[dict], steps: StepsPlan, device: torch.device):
    """transformers', as its Trainer uses it: at the schedule's rate, not at one that follows from the weights' scale,
    which of an adapter's B is zero.
    """
    from transformers.optimization import Adafactor

    return Adafactor(groups, lr=steps.lr, scale_parameter=False, relative_step=False)


def schedule_free_adamw(groups: list[dict], steps: StepsPlan, device: torch.device):
    try:
        from schedulefree import AdamWScheduleFree
    except ImportError as error:
        raise PlanError(f"--optimizer {steps.optimizer}: schedulefree is missing. pip install schedulefree.") from error
    optimizer = AdamWScheduleFree(groups, **_adam_settings(steps))
    optimizer.train()
    optimizer.state.clear()  # train() leaves an empty entry per parameter
    return optimizer


def _of_bitsandbytes(name: str):
    """A builder of an optimizer of bitsandbytes."""

    def build(groups: list[dict], steps: StepsPlan, device: torch.device):
        try:
            bnb.functional()
            import bitsandbytes
        except ImportError as error:
            missing = f"--optimizer {steps.optimizer}: bitsandbytes is missing. pip install bitsandbytes."
            raise PlanError(missing) from error
        kind = getattr(bitsandbytes.optim, name)
        if name == "Lion":
            return kind(groups, lr=steps.lr, betas=_betas(steps))
        built = kind(groups, **_adam_settings(steps))
        if device.type == "cpu" and steps.moments_are_8_bit:
            built.update_step = partial(eight_bit.update_in_chunks, built, built.update_step)
        return built

    return build


adamw_8bit = _of_bitsandbytes("AdamW8bit")
paged_adamw_8bit = _of_bitsandbytes("PagedAdamW8bit")
paged_adamw_32bit = _of_bitsandbytes("PagedAdamW32bit")
lion = _of_bitsandbytes("Lion")


class Muon:
    """torch.optim.Muon of matrices and AdamW of the rest, as one optimizer: Muon's update has AdamW's size (Liu et al.
    2025, "Muon is scalable for LLM training"), so both take the same rate.
    """

    def __init__(self, groups: list[dict], rest: torch.optim.Optimizer | None, lr: float):
        muon = torch.optim.Muon(groups, lr=lr, adjust_lr_fn="match_rms_adamw")
        self.parts: list[torch.optim.Optimizer] = [muon]
        if rest is not None:
            self.parts.append(rest)
        self.state = muon.state
        for part in self.parts:
            part.state = self.state

    @property
    def param_groups(self) -> list[dict]:
        return [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["ratio"]


def reset(optimizer: torch.optim.Optimizer) -> None:
    """Drops all state, as before the first step."""
    optimizer.state.clear()
    if _is_schedule_free(optimizer):
        for group in optimizer.param_groups:
            group |= SCHEDULE_FREE_START


# ---- schedule-free: weights that train, and their average, which is evaluated and saved

# What AdamWScheduleFree counts per group, and where it starts.
SCHEDULE_FREE_START = {"k": 0, "weight_sum": 0.0, "lr_max": -1.0}
TRAINS = "y"  # the moment under which a checkpoint has the weights that train, beside their average


def _is_schedule_free(optimizer: torch.optim.Optimizer | None) -> bool:
    return type(optimizer).__module__.startswith("schedulefree")


@contextlib.contextmanager
def averaged(optimizer: Any):
    """Switches a schedule-free optimizer to its averaged weights, for evaluation and saving; yields True if it did.
    Afterwards the training weights are bitwise as before; the optimizer's own eval() and train() would round them.
    """
    if optimizer is None or not _is_schedule_free(optimizer) or not optimizer.param_groups[0]["train_mode"]:
        yield False
        return
    weights = [p for group in optimizer.param_groups for p in group["params"] if "z" in optimizer.state.get(p, {})]
    kept = [p.detach().clone() for p in weights]
    optimizer.eval()
    try:
        yield True
    finally:
        with torch.no_grad():
            for parameter, before in zip(weights, kept, strict=True):
                parameter.copy_(before)
        for group in optimizer.param_groups:
            group["train_mode"] = True


def take_as_average(optimizer: torch.optim.Optimizer) -> None:
    """The weights were replaced by those of an earlier evaluation, and no step follows."""
    if optimizer is not None and _is_schedule_free(optimizer) and optimizer.state:
        for group in optimizer.param_groups:
            group["train_mode"] = False


# ---- state

# bitsandbytes' names that have another one on disk, by class.
RENAMED = {"Lion": {"state1": "exp_avg"}}
DERIVED = ("step", "RMS")  # not moments: a count, and what Adafactor computes anew in each step


def moments(optimizer: torch.optim.Optimizer, named: dict):
    """Yields ('<name>.<moment>', tensor in place) for all optimizer state tensors."""
    renamed = RENAMED.get(type(optimizer).__name__, {})
    for name, parameter in named.items():
        found = {}
        if parameter is not None:
            found = optimizer.state.get(parameter, {})
        for key, value in found.items():
            if key not in DERIVED and torch.is_tensor(value):
                yield f"{name}.{renamed.get(key, key)}", value.detach()
        if _is_schedule_free(optimizer) and "z" in found:
            yield f"{name}.{TRAINS}", parameter.detach()


def counts(optimizer: torch.optim.Optimizer, named: dict) -> dict:
    """{'<name>.<count>': number}."""
    if _is_schedule_free(optimizer):
        group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        held = {n: group_of[id(p)] for n, p in named.items() if p is not None and "z" in optimizer.state.get(p, {})}
        return {f"{n}.{key}": float(group[key]) for n, group in held.items() for key in SCHEDULE_FREE_START}
    states = {n: optimizer.state.get(p, {}) for n, p in named.items() if p is not None}
    return {f"{name}.step": float(state["step"]) for name, state in states.items() if "step" in state}


def state(optimizer: torch.optim.Optimizer, named: dict) -> tuple[dict[str, np.ndarray], dict]:
    """({'<name>.<moment>': array}, {'<name>.<count>': number})."""
    tensors = {key: value.cpu().numpy() for key, value in moments(optimizer, named)}
    return tensors, counts(optimizer, named)


def load_state(optimizer: torch.optim.Optimizer, named: dict, tensors: dict, numbers: dict) -> None:
    """Loads the result of `state`. Unknown parameters are an error, so that nothing is dropped silently."""
    found: dict[str, dict] = {}
    for key, value in {**tensors, **numbers}.items():
        name, _, moment = key.rpartition(".")
        found.setdefault(name, {})[moment] = value
    check_known((*tensors, *numbers), named)
    own = {disk: key for key, disk in RENAMED.get(type(optimizer).__name__, {}).items()}
    counts_in_int = type(optimizer).__module__.startswith("bitsandbytes") or type(optimizer).__name__ == "Adafactor"
    fused = any(group.get("fused") for group in optimizer.param_groups)  # their step counters are on the device
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, moments in found.items():
        parameter = named[name]
        restored = {}
        for moment, value in moments.items():
            if moment == "step":
                device = "cpu"
                if fused:
                    device = parameter.device
                restored["step"] = (
                    int(value) if counts_in_int else torch.tensor(value, dtype=torch.float32, device=device)
                )
            elif _is_schedule_free(optimizer) and moment in SCHEDULE_FREE_START:
                group_of[id(parameter)][moment] = type(SCHEDULE_FREE_START[moment])(value)
            else:
                restored[own.get(moment, moment)] = _restored(optimizer, parameter, moment, np.array(value))
        if TRAINS in restored:
            with torch.no_grad():
                parameter.copy_(restored.pop(TRAINS))
        optimizer.state[parameter] = restored


def _restored(optimizer: Any, parameter: torch.Tensor, moment: str, array: np.ndarray) -> torch.Tensor:
    value = torch.from_numpy(array).to(parameter.device)
    if getattr(optimizer, "is_paged", False) and moment in ("state1", "state2"):
        return optimizer.get_state_buffer(parameter, dtype=value.dtype).copy_(value)  # paged again
    return value


class LazyArray:
    """An array that is read when numpy asks for it."""

    def __init__(self, read: Callable[..., np.ndarray], *args: Any):
        self.read = partial(read, *args)

    def __array__(self, dtype: Any = None, copy: bool | None = None):
        return np.array(self.read(), dtype, copy=copy)


def unscale(parameters: dict, scale: float | None) -> None:
    """Divides the gradients by the loss scale, if there is one."""
    if scale:
        for parameter in parameters.values():
            if parameter.grad is not None:
                parameter.grad /= scale


def clip(
    parameters: dict, limit: float | None, groups: ProcessGroups, owned: dict, beside: Sequence[torch.Tensor] = ()
) -> tuple[float, list[torch.Tensor]]:
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
    squares = {}
    norms = dict(zip(norms, on_host, strict=False))
    for over in SHARDED_OVER:
        if over in norms:
            square = norms[over].square().sum()
        else:
            square = torch.zeros((), dtype=torch.float64)
        for group in over:
            square = groups.all_reduce(square, group)
        squares[over] = square
    norm = groups.all_reduce(reduce(torch.add, squares.values()), "pp").sqrt().float()
    if limit is not None and torch.isfinite(norm):
        # A number, not a tensor of the host, which a device would wait for.
        factor = torch.clamp(limit / (norm + 1e-6), max=1.0).item()
        held = [p.grad for p in parameters.values() if p.grad is not None]
        if held and factor < 1:
            torch._foreach_mul_(held, factor)
    return norm.item(), on_host[len(norms) :]
