"""Settings and random states of torch in a process that is not this program's alone."""

import contextlib
import functools
import random
from collections.abc import Callable, Iterator

import numpy as np
import torch
import transformers

from finetune.errors import PlanError
from finetune.system.mlx_of_caller import callers_random_state, mlx_of_caller, present_random_state
from finetune.system.process import restorer_of_folder
from finetune.torch_engine import memory_stats
from finetune.torch_engine.device import (
    compute_alone,
    compute_alone_after_fork,
    enable_every_attention,
    kept_settings,
    restorers_of_kernels,
)


class CallersRandomStates:
    """The caller's random states of torch, MLX, numpy and Python, and the caller's working directory. A run has its
    own: its relative paths are from where it was started.
    """

    def __init__(self) -> None:
        self.callers = restorers()

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """A context in which the caller's functions draw from the caller's states; the run's are as before."""
        of_run = restorers()
        for restore in callers_random_state():  # as of before the call, unless it was kept since
            restore()
        self.restore()
        try:
            yield
        finally:
            self.callers = restorers()
            for restore in of_run:
                restore()

    def restore(self) -> None:
        for restore in self.callers:
            restore()


def _set_default_device(device: torch.device) -> None:
    if torch.get_default_device() != device:  # otherwise it may be that of a context
        torch.set_default_device(device)


def restorers() -> list[Callable[[], object]]:
    """Functions that restore the present random states of torch on its devices, MLX, numpy and Python, the working
    folder, and the modes of torch.
    """
    found: list[Callable[[], object]] = [
        restorer_of_folder(),
        *present_random_state(),
        *_modes(),
        functools.partial(random.setstate, random.getstate()),
        functools.partial(np.random.set_state, np.random.get_state()),
        functools.partial(torch.set_rng_state, torch.get_rng_state()),
    ]
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return found
    module = torch.get_device_module(accelerator)
    starts_late = hasattr(module, "is_initialized")
    if starts_late and not module.is_initialized():
        # Nothing was drawn there, and asking would start it: its seed is the CPU's.
        return [*found, lambda: module.manual_seed_all(torch.initial_seed())]
    if not starts_late and not module.is_available():
        return found
    if module.device_count() == 1:  # MPS takes no device
        return [*found, functools.partial(module.set_rng_state, module.get_rng_state())]
    for number in range(module.device_count()):
        where = torch.device(accelerator.type, number)
        found.append(functools.partial(module.set_rng_state, module.get_rng_state(where), where))
    return found


def _modes() -> list[Callable[[], object]]:
    """Functions that restore the present modes of torch and numpy, as far as a run computes by them."""
    found: list[Callable[[], object]] = [
        functools.partial(torch.set_grad_enabled, torch.is_grad_enabled()),
        functools.partial(torch.set_default_dtype, torch.get_default_dtype()),
        functools.partial(_set_default_device, torch.get_default_device()),
        functools.partial(torch.set_num_threads, torch.get_num_threads()),
        functools.partial(torch.set_anomaly_enabled, torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        functools.partial(
            torch.use_deterministic_algorithms,
            torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        functools.partial(np.seterr, **np.geterr()),
    ]
    for device in _devices():
        found.append(functools.partial(torch.set_autocast_enabled, device, torch.is_autocast_enabled(device)))
        found.append(functools.partial(torch.set_autocast_dtype, device, torch.get_autocast_dtype(device)))
    return [*found, *restorers_of_kernels()]


def _devices() -> set[str]:
    """The types of this machine's devices."""
    accelerator = torch.accelerator.current_accelerator()
    return {"cpu", accelerator.type if accelerator else "cpu"}


@contextlib.contextmanager
def drawing_apart(seed: int) -> Iterator[None]:
    """A context whose random numbers follow from `seed` (32 bits); at its end the random states are as before."""
    before = restorers()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        for restore in before:
            restore()


def check_autograd() -> None:
    """Raises PlanError in a context of the caller's that changes what autograd saves of a forward."""
    graph = torch.autograd.graph
    try:
        with graph.disable_saved_tensors_hooks("fails inside of such hooks"):
            pass
        with graph.saved_tensors_hooks(_as_it_is, _as_it_is):
            pass
    except RuntimeError:
        raise PlanError(
            "torch.autograd.graph: the call is inside of saved_tensors_hooks, save_on_cpu or "
            "disable_saved_tensors_hooks, which would change the run's gradients. Make it outside."
        ) from None


def check_tensors() -> None:
    """Raises PlanError in a mode of the caller's that makes tensors of another class, such as FakeTensorMode."""
    kind = type(torch.empty(0))
    if kind is not torch.Tensor:
        raise PlanError(f"torch: the call is inside of a mode in which tensors are {kind.__name__}s. Make it outside.")


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@contextlib.contextmanager
def own_modes() -> Iterator[None]:
    """A context with gradients, without autocast, with fp32 and the CPU as defaults and every kernel of attention,
    whatever the caller has set. `restorers` and `kept_settings` restore what it sets.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in _devices():
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        torch.set_default_dtype(torch.float32)
        enable_every_attention()
        yield


@contextlib.contextmanager
def callers_settings(trains: bool = False, alone: bool = False) -> Iterator[CallersRandomStates]:
    """A context with a run's own modes, whose end restores settings of torch and transformers that a run changes, and
    the random states. `alone`: with one thread. Raises PlanError, see `check_tensors` and, if the call `trains`,
    `check_autograd`.
    """
    check_tensors()
    if trains:
        check_autograd()
    compute_alone_after_fork()
    states = CallersRandomStates()
    verbosity = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    specializes = torch._dynamo.config.specialize_float
    transformers.logging.set_verbosity_error()
    try:
        with mlx_of_caller(), kept_settings(), memory_stats.kept_heap_limits(), own_modes():
            if alone:
                compute_alone()
            yield states
    finally:
        states.restore()
        torch._dynamo.config.specialize_float = specializes
        transformers.logging.set_verbosity(verbosity)
        if bars:
            transformers.logging.enable_progress_bar()
