"""8-bit moments of sharded weights: codes, and a scale per block of BLOCK consecutive numbers of what a rank holds.

Blocks begin anew with each shard, so a checkpoint says with the scales which shards they are of: `pieces`, one row of
starts and stops per slice, the shard's number first; none if one shard is the full weight. A rank that holds a shard as
it was saved takes its codes and scales as they are. Any other requantizes: a number moves by at most half of the
largest distance between two codes, times the largest number of its new block.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from finetune.eight_bit import (
    BESIDE_CODES,
    MAPS,
    PIECES,
    SCALES,
    dequantized,
    num_blocks,
    quantized,
    read,
    saved_shards,
    to_rows,
)
from finetune.parts.optimizers import EIGHT_BIT_BLOCK as BLOCK
from finetune.quantizers import bnb
from finetune.safetensors_io import FROM_NUMPY, TensorShard
from finetune.torch_engine.parallel.placement import Placement

# ---- step


CHUNK = 512 * BLOCK  # numbers that are in fp32 at a time, whose temporaries stay in a core's cache


@torch.no_grad()
def update_in_chunks(optimizer: Any, update_step: Callable, group: dict, p: torch.Tensor, g: int, index: int) -> None:
    """bitsandbytes' step of one parameter on a CPU, whose kernel takes moments, gradient and weight of all that it is
    given to fp32 at once: here of a chunk of blocks, with the same bits. `update_step`: its own.
    """
    state = optimizer.state[p]
    if state["state1"].dtype != torch.uint8:
        update_step(group, p, g, index)
        return
    p.data = p.data.contiguous()
    assert p.grad is not None, "bitsandbytes steps parameters with gradients only"
    config = optimizer.get_config(g, index, group)
    state["step"] += 1
    weights = p.data.view(-1)
    numbers = [p.grad.contiguous().view(-1), weights, state["state1"].view(-1), state["state2"].view(-1)]
    for start in range(0, len(weights), CHUNK):
        gradient, weight, first, second = (tensor[start : start + CHUNK] for tensor in numbers)
        blocks = slice(start // BLOCK, (start + CHUNK) // BLOCK)
        bnb.functional().optimizer_update_8bit_blockwise(
            optimizer.optimizer_name,
            g=gradient,
            p=weight,
            state1=first,
            state2=second,
            beta1=config["betas"][0],
            beta2=config["betas"][1],
            beta3=0.0,
            alpha=0.0,
            eps=config["eps"],
            step=state["step"],
            lr=config["lr"],
            qmap1=state["qmap1"],
            qmap2=state["qmap2"],
            absmax1=state["absmax1"][blocks],
            absmax2=state["absmax2"][blocks],
            weight_decay=config["weight_decay"],
            skip_zeros=config["skip_zeros"],
        )


# ---- shards


def shard_of(place: Placement, name: str) -> list[list[list[int]]]:
    """Starts and stops, per dimension, of each slice of the full weight that this rank holds."""
    return [[[part.start, part.stop] for part in slices] for slices in place.local_slices(name)]


# ---- out


class Layout:
    """The shards of every weight with 8-bit moments, by the ranks that write them. Collective: every rank makes one.
    `names`: of such weights of this rank.
    """

    def __init__(self, place: Placement, names: list[str]):
        self.place = place
        self.groups = place.groups
        mine = {name: shard_of(place, name) for name in names if place.is_writer(name)}
        self.by_rank = self.groups.all_gather_object(mine)
        self.names = sorted({name for held in self.by_rank for name in held})

    def shards(self, name: str) -> list:
        return [held[name] for held in self.by_rank if name in held]

    def pieces(self, name: str) -> dict[str, np.ndarray]:
        """{key: rows} if the weight has several shards."""
        shards = self.shards(name)
        if len(shards) > 1:
            return {f"{name}.{PIECES}": to_rows(shards)}
        return {}

    def gathered(self, local: dict) -> dict[str, np.ndarray]:
        """{key: array} on every rank of what is beside the codes, from each rank's own. Collective."""
        import torch

        found = {}
        for name in self.names:
            counts = [num_blocks(held[name]) if name in held else 0 for held in self.by_rank]
            for moment in BESIDE_CODES:
                size = 256
                if moment in SCALES:
                    size = max(counts)
                mine = np.zeros(size, np.float32)
                key = f"{name}.{moment}"
                if counts[self.groups.rank]:
                    mine[: len(local[key])] = local[key]
                parts = [part.numpy() for part in self.groups.all_gather(torch.from_numpy(mine))]
                first = next(i for i, count in enumerate(counts) if count)
                own = [part[:count] for part, count in zip(parts, counts, strict=True)]
                found[key] = np.concatenate(own) if moment in SCALES else parts[first]
            found |= self.pieces(name)
        return found

    def tensor_shard(self, key: str, tensor: torch.Tensor, read: Callable) -> TensorShard | None:
        """This rank's shard of scales or a map; None if another rank writes it. `read`: returns the array."""
        name, _, moment = key.rpartition(".")
        before = [num_blocks(held[name]) for held in self.by_rank[: self.groups.rank] if name in held]
        word = FROM_NUMPY["float32"]
        shape = tuple(tensor.shape)
        if moment in MAPS:
            if before:
                return None
            return TensorShard(key, word, shape, read, (0,), shape)
        total = sum(num_blocks(shard) for shard in self.shards(name))
        return TensorShard(key, word, shape, read, (sum(before),), (total,))

    def piece_shards(self) -> list[TensorShard]:
        """This rank's shards of `pieces`: for the weights whose first shard it has."""
        found = []
        for name in self.names:
            first = next(i for i, held in enumerate(self.by_rank) if name in held)
            for key, rows in self.pieces(name).items() if first == self.groups.rank else ():
                read = rows.copy
                found.append(TensorShard(key, FROM_NUMPY["int64"], rows.shape, read, (0, 0), rows.shape))
        return found


# ---- in


def local_moment(place: Placement, name: str, saved: dict, moment: str) -> np.ndarray:
    """This rank's codes, scales or map, as saved where it holds a shard as it was, else quantized again."""
    if moment in MAPS:
        return read(saved[moment])
    number = moment[-1]
    is_scale = moment in SCALES
    mine = shard_of(place, name)
    at = 0
    shards = saved_shards(saved)
    for shard in shards:
        count = num_blocks(shard)
        if shard == mine:
            if is_scale:
                return read(saved[moment])[at : at + count]
            return place.take_local(name, saved[moment])
        at += count
    levels = read(saved[f"qmap{number}"])
    full = dequantized(saved, number, shards, levels)
    codes, scales = quantized(place.take_local(name, full), levels)
    return scales if is_scale else codes
