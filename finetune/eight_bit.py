"""8-bit moments in a checkpoint, as every engine reads them: codes, and a scale per block of BLOCK consecutive numbers.

Blocks begin anew with each shard, so a checkpoint says with the scales which shards they are of: `pieces`, one row of
starts and stops per slice, the shard's number first; none if one shard is the full weight.
"""

from collections.abc import Mapping

import numpy as np

from finetune.parts.optimizers import EIGHT_BIT_BLOCK as BLOCK

SCALES = ("absmax1", "absmax2")
MAPS = ("qmap1", "qmap2")
PIECES = "pieces"
BESIDE_CODES = (*SCALES, *MAPS)  # what has not the shape of the weight


def num_blocks(shard: list) -> int:
    return -(-sum(int(np.prod([stop - start for start, stop in part])) for part in shard) // BLOCK)


def to_rows(shards: list) -> np.ndarray:
    """`pieces` of shards, in the order of their scales."""
    rows = [[i, *np.ravel(part).tolist()] for i, shard in enumerate(shards) for part in shard]
    return np.array(rows, np.int64)


def from_rows(rows: np.ndarray) -> list:
    shards: list = []
    for number, *ends in rows.tolist():
        if number == len(shards):
            shards.append([])
        shards[number].append(np.reshape(ends, (-1, 2)).tolist())
    return shards


def saved_shards(saved: Mapping) -> list:
    if PIECES in saved:
        return from_rows(read(saved[PIECES]))
    return [[[[0, n] for n in saved["state1"].shape]]]


def read(saved: np.ndarray) -> np.ndarray:
    """All of a saved tensor, which may be on disk."""
    return np.asarray(saved[...])


def _slices(part: list) -> tuple:
    return tuple(slice(start, stop) for start, stop in part)


def by_name(tensors: Mapping) -> dict[str, dict]:
    """{name: {moment: saved}} of the weights with 8-bit moments in a checkpoint."""
    names = {key.removesuffix(".absmax1") for key in tensors if key.endswith(".absmax1")}
    found: dict[str, dict] = {name: {} for name in names}
    for key, value in tensors.items():
        name, _, moment = key.rpartition(".")
        if name in found:
            found[name][moment] = value
    return found


def dequantized(saved: dict, number: str, shards: list, levels: np.ndarray) -> np.ndarray:
    """The full moment in fp32."""
    codes = saved[f"state{number}"]
    scales = read(saved[f"absmax{number}"])
    at = 0
    full = np.empty(tuple(codes.shape), np.float32)
    for shard in shards:
        parts = [np.asarray(codes[_slices(part)]) for part in shard]
        # Slices of one shard differ in one dimension, in which they are one after the other.
        dim = next((d for d in range(len(shard[0])) if len(shard) > 1 and shard[0][d] != shard[1][d]), 0)
        joined = np.concatenate(parts, dim)
        count = num_blocks(shard)
        each = np.repeat(scales[at : at + count], BLOCK)[: joined.size].reshape(joined.shape)
        values = levels[joined] * each
        sizes = np.cumsum([part.shape[dim] for part in parts])[:-1]
        for part, some in zip(shard, np.split(values, sizes, dim), strict=True):
            full[_slices(part)] = some
        at += count
    return full


def quantized(values: np.ndarray, levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(codes of the values' shape, a scale per block): the nearest of the ascending `levels` times the scale."""
    flat = np.pad(values.reshape(-1), (0, -values.size % BLOCK)).reshape(-1, BLOCK)
    scales = np.abs(flat).max(1).astype(np.float32)
    normalized = flat / np.where(scales, scales, 1)[:, None]
    codes = np.searchsorted((levels[1:] + levels[:-1]) / 2, normalized).astype(np.uint8)
    return codes.reshape(-1)[: values.size].reshape(values.shape), scales


def of_one_shard(saved: dict) -> dict:
    """{moment: array} of a weight in one shard: as saved, or quantized again where it was saved in several."""
    if PIECES not in saved:
        return {moment: read(value) for moment, value in saved.items()}
    shards = saved_shards(saved)
    found = {moment: read(saved[moment]) for moment in MAPS}
    for number in "12":
        levels = found[f"qmap{number}"]
        full = dequantized(saved, number, shards, levels)
        found[f"state{number}"], found[f"absmax{number}"] = quantized(full, levels)
    return found


def dynamic_map(signed: bool) -> np.ndarray:
    """The 256 ascending levels of a moment, fp32: a dynamic exponent, and as many bits of a fraction as that leaves
    (Dettmers 2015, arXiv:1511.04561), to the bit as bitsandbytes has them.
    """
    levels = [0.0, 1.0]
    for exponent in range(7):
        count = 2**exponent if signed else 2 ** (exponent + 1)
        steps = np.arange(count + 1, dtype=np.float64)
        size = np.float64(np.float32(np.float32(1) - np.float32(0.1)) / np.float32(count))
        rising = np.float32(0.1) + size * steps
        falling = 1 - size * (count - steps)
        ends = np.where(steps < (count + 1) // 2, rising, falling).astype(np.float32)
        means = (ends[:-1] + ends[1:]) / np.float32(2)
        scaled = (np.float32(10.0 ** (exponent - 6)) * means).tolist()
        levels += scaled
        if signed:
            levels += [-level for level in scaled]
    return np.sort(np.array(levels, np.float32))
