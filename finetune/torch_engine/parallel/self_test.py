"""Known answers asked of a device and its collectives before a run trusts them with gradients.

MPS has had operators that return wrong numbers without an error (pytorch#173808); a run that trains on them ends with
weights that nobody can explain.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from finetune.errors import PlanError
from finetune.torch_engine.parallel.process_groups import ALL_GATHER, REDUCE_SCATTER

STEP_TOLERANCE = 1e-4  # of the largest gradient; fp32 sums of 64 terms in any order differ by some 1e-6


class SelfTestError(PlanError, RuntimeError):
    """A device or its collectives gave a wrong answer."""


def check(device: torch.device, group: dist.ProcessGroup | None, mesh: DeviceMesh | None = None) -> None:
    """Raises SelfTestError if a collective or one sharded step is wrong on `device`. Collective; takes under a second.

    `group`: the process group, None for a single process, whose step is then not sharded.
    """
    if group is None:
        answers = {}
    else:
        answers = wrong_collectives(device, group)
    answers |= {"step": step_error(device, mesh)}
    wrong = {name: error for name, error in answers.items() if not error <= STEP_TOLERANCE}  # NaN is wrong too
    if wrong:
        found = ", ".join(f"{name} off by {error:.1e}" for name, error in wrong.items())
        raise SelfTestError(
            f"{device.type}: wrong answers in the self-test ({found}). Nothing was trained. Use --backend cpu, or "
            "another torch."
        )


def wrong_collectives(device: torch.device, group: dist.ProcessGroup) -> dict[str, float]:
    """{collective: largest error} for answers that follow from the ranks' numbers."""
    rank = dist.get_rank(group)
    size = dist.get_world_size(group)
    # Views into the middle of a buffer, as FSDP2 passes them.
    mine = torch.arange(96, dtype=torch.float32, device=device)[32:] + 100 * rank
    every = torch.cat([torch.arange(32, 96, dtype=torch.float32) + 100 * r for r in range(size)])
    reduced = mine.clone()
    dist.all_reduce(reduced, group=group)
    gathered = torch.empty(64 * size, device=device)
    ALL_GATHER(gathered, mine, group=group)
    told = torch.full((96,), float(rank), device=device)[32:]
    dist.broadcast(told, group_src=size - 1, group=group)
    scattered = torch.empty(64, device=device)
    REDUCE_SCATTER(scattered, gathered.clone(), group=group)
    expected = {
        "all_reduce": (reduced, every.view(size, 64).sum(0)),
        "all_gather": (gathered, every),
        "broadcast": (told, torch.full((64,), size - 1.0)),
        "reduce_scatter": (scattered, size * every.view(size, 64)[rank]),
    }
    return {name: (found.cpu() - right).abs().max().item() for name, (found, right) in expected.items()}


def step_error(device: torch.device, mesh: DeviceMesh | None) -> float:
    """Largest relative difference of a two-layer network's gradients, sharded on `device`, from one process in fp64."""
    size = 1
    rank = 0
    if mesh is not None:
        size = mesh.size()
        for length, coordinate in zip(mesh.shape, mesh.get_coordinate() or (), strict=True):
            rank = rank * length + coordinate
    inputs = torch.linspace(-1, 1, size * 4 * 64).view(size, 4, 64).sin()

    def network():
        layers = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32))
        for i, parameter in enumerate(layers.parameters()):
            values = torch.linspace(-0.3, 0.3, parameter.numel(), dtype=torch.float64) * (7 + i)
            parameter.data = values.sin().view(parameter.shape).float() / 8
        return layers

    whole = network().double()
    sharded = network().to(device)
    whole(inputs.double()).square().mean((1, 2)).mean().backward()
    if mesh is not None:
        for module in (sharded[0], sharded[2], sharded):
            fully_shard(module, mesh=mesh)
    sharded(inputs[rank].to(device)).square().mean().backward()
    errors = []
    for mine, right in zip(sharded.parameters(), whole.parameters(), strict=True):
        if mesh is None:
            full = mine.grad
        else:
            full = mine.grad.full_tensor()
        errors.append(((full.cpu().double() - right.grad).abs().max() / right.grad.abs().max()).item())
    return max(errors)
