"""8-bit moments on MLX, in the blocks and levels of bitsandbytes, as the torch engine stores them."""

import mlx.core as mx

from finetune.eight_bit import BLOCK, dynamic_map
from finetune.parts.optimizers import EIGHT_BIT_FROM

TABLE = 2**16


def start(weight: mx.array) -> dict[str, mx.array]:
    """The state of a weight before its first step."""
    if weight.size < EIGHT_BIT_FROM:
        return {"state1": mx.zeros_like(weight), "state2": mx.zeros_like(weight)}
    found = {}
    for number, signed in (("1", True), ("2", False)):
        found[f"state{number}"] = mx.zeros(weight.shape, mx.uint8)
        found[f"absmax{number}"] = mx.zeros(-(-weight.size // BLOCK))
        found[f"qmap{number}"] = mx.array(dynamic_map(signed))
    return found


def moments_of(state: dict[str, mx.array], shape: tuple) -> tuple[mx.array, mx.array]:
    """(first moment, second moment) in fp32, of the weight's shape."""
    if "qmap1" not in state:
        return state["state1"], state["state2"]
    one, two = (_dequantized(state[f"state{n}"], state[f"absmax{n}"], state[f"qmap{n}"]) for n in "12")
    return one.reshape(shape), two.reshape(shape)


def stored(first: mx.array, second: mx.array, state: dict[str, mx.array]) -> dict[str, mx.array]:
    """The state with these moments, in as many bits as `state` has."""
    if "qmap1" not in state:
        return {"state1": first, "state2": second}
    found = dict(state)
    for number, moment in (("1", first), ("2", second)):
        codes, scales = quantized(moment, state[f"qmap{number}"])
        found |= {f"state{number}": codes, f"absmax{number}": scales}
    return found


def sliced(state: dict[str, mx.array], start: int, size: int) -> dict[str, mx.array]:
    """The state of the weights [start, start + size) of the flattened ones, both multiples of BLOCK."""
    found = dict(state)
    for number in "12":
        found[f"state{number}"] = state[f"state{number}"].reshape(-1)[start : start + size]
        found[f"absmax{number}"] = state[f"absmax{number}"][start // BLOCK : (start + size) // BLOCK]
    return found


def joined(states: list[dict[str, mx.array]], shape: tuple) -> dict[str, mx.array]:
    """The state of a weight of this shape from those of its slices, in order."""
    found = dict(states[0])
    for number in "12":
        found[f"state{number}"] = mx.concatenate([of[f"state{number}"] for of in states]).reshape(shape)
        found[f"absmax{number}"] = mx.concatenate([of[f"absmax{number}"] for of in states])
    return found


def _dequantized(codes: mx.array, scales: mx.array, levels: mx.array) -> mx.array:
    flat = levels[codes.reshape(-1)]
    padded = mx.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)
    return (padded * scales[:, None]).reshape(-1)[: flat.size]


def quantized(moment: mx.array, levels: mx.array) -> tuple[mx.array, mx.array]:
    """(codes of the moment's shape, a scale per block). The code is that of the nearest level, of the number rounded to
    one of TABLE between -1 and 1, as bitsandbytes' kernel for processors has it.
    """
    padded = mx.pad(moment.reshape(-1), (0, -moment.size % BLOCK)).reshape(-1, BLOCK)
    scales = mx.abs(padded).max(1)
    normalized = padded * (1 / mx.where(scales == 0, 1, scales))[:, None]
    places = ((normalized + 1) * (0.5 * (TABLE - 1)) + 0.5).astype(mx.int32)
    rounded = mx.arange(TABLE) * (2 / (TABLE - 1)) - 1
    table = mx.searchsorted((levels[1:] + levels[:-1]) / 2, rounded).astype(mx.uint8)
    codes = mx.where(scales[:, None] == 0, 0, table[places]).astype(mx.uint8)
    return codes.reshape(-1)[: moment.size].reshape(moment.shape), scales
