"""Mutators: bytes, JSON trees and text, from a seeded random source."""

import json
import random

HUGE = (2**31, 2**63, 2**64, 10**30, -1, -(2**63), 0, 1e308, 5e-324)
ODD_TEXT = (
    "",
    "\0",
    "a" * 300,
    "../../etc/passwd",
    "/dev/zero",
    "é\u202e\ud83d\ude00",
    "\x1b]0;title\x07",
    "nan",
    "{{7*7}}",
)
ODD_NAMES = (
    "",
    "__class__",
    "auto_map",
    "_attn_implementation_internal",
    "trust_remote_code",
    "a" * 300,
    "0",
    "\u0000",
)


def mutated_bytes(rng: random.Random, data: bytes, most: int = 4) -> bytes:
    """A few bits flipped, bytes deleted, inserted, cut off or repeated."""
    found = bytearray(data)
    for _ in range(rng.randint(1, most)):
        at, kind = rng.randrange(len(found) + 1), rng.randrange(7)
        length = min(rng.choice((1, 1, 2, 4, 8, 64, 1024)), len(found))
        if kind <= 1 and found:
            found[at % len(found)] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del found[at : at + length]
        elif kind == 3:
            found[at:at] = rng.choice((rng.randbytes(length), bytes(length), b"\xff" * length, b"\n", b'"', b"{", b","))
        elif kind == 4:
            del found[at:]
        elif kind == 5:
            found[at:at] = found[at : at + length] * rng.choice((1, 2, 50))
        elif found:
            start = rng.randrange(len(found))
            found[at : at + length] = found[start : start + length]
    return bytes(found)


def mutated_json(rng: random.Random, tree, most: int = 3):
    """A JSON value with some nodes swapped, removed, renamed, repeated, or replaced by a value of another type."""
    tree = json.loads(json.dumps(tree))
    for _ in range(rng.randint(1, most)):
        by_depth = {}
        for depth, *place in _places(tree):
            by_depth.setdefault(depth, []).append(place)
        if not by_depth:
            return odd_value(rng, tree)
        places = by_depth[rng.choice(list(by_depth))]
        parent, key = rng.choice(places)
        kind = rng.randrange(8)
        if kind <= 3:
            parent[key] = odd_value(rng, parent[key])
        elif kind == 4:
            del parent[key]
        elif kind == 5:
            other, from_key = rng.choice(places)
            parent[key] = json.loads(json.dumps(other[from_key])) if _holds(other, from_key) else None
        elif kind == 6 and isinstance(parent, dict):
            parent[rng.choice(ODD_NAMES)] = odd_value(rng, parent.pop(key))
        elif isinstance(parent, list):
            parent[key:key] = [parent[key]] * rng.choice((1, 3, 1000))
        else:
            parent[key] = [parent[key]]
    return tree if rng.randrange(40) else odd_value(rng, tree)


def odd_value(rng: random.Random, value):
    """Another value in the place of this one: of another type, or far outside its range."""
    choices = [None, True, False, 0, 1, -1, 1.5, float("nan"), float("inf"), [], {}, [[]], {"a": {}}]
    choices += [rng.choice(HUGE), rng.choice(ODD_TEXT), [value], {"a": value}, [None, 1, "a", {}], deep(rng)]
    if isinstance(value, bool):
        choices += [not value] * 4
    elif isinstance(value, (int, float)):
        choices += [
            value + 1,
            value - 1,
            -value,
            value * 2,
            str(value),
            value * 1000,
            value + 0.5 if abs(value) < 1e9 else 0,
        ]
    elif isinstance(value, str):
        choices += [
            value * 2,
            value[:-1],
            value.upper(),
            value + "\n",
            [*value[:50]],
            value.encode(errors="replace").hex(),
        ]
    elif isinstance(value, list):
        choices += [value[:-1], value + value[:1], value[::-1], dict(enumerate(map(str, value[:9])))]
    elif isinstance(value, dict):
        choices += [list(value.items())[:9], list(value)[:9], dict(list(value.items())[:-1])]
    return rng.choice(choices)


def deep(rng: random.Random):
    """A deeply nested list or object, still within what json can write."""
    value = 1
    for _ in range(rng.choice((10, 100, 400))):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def json_text(rng: random.Random, tree) -> bytes:
    """The tree as JSON; sometimes with bytes changed as well, or nested beyond every parser's limit."""
    data = json.dumps(tree, ensure_ascii=rng.random() < 0.7).encode(errors="surrogatepass")
    kind = rng.randrange(20)
    if kind == 0:
        return mutated_bytes(rng, data)
    if kind == 1:
        depth = rng.choice((900, 990, 5000, 100_000))
        at = rng.choice([i for i, c in enumerate(data) if c == ord(":")] or [len(data) - 1]) + 1
        return data[:at] + b"[" * depth + b"]" * depth + b"," + data[at:]
    if kind == 2:
        return data.replace(b"1", b"1" + b"0" * rng.choice((400, 5000)), 1)
    return data


def _places(tree):
    """(depth, parent, key) of every node below the root."""
    waiting = [(1, tree)] if isinstance(tree, (dict, list)) else []
    while waiting:
        depth, parent = waiting.pop()
        keys = list(parent) if isinstance(parent, dict) else range(len(parent))
        for key in keys:
            yield depth, parent, key
            if isinstance(parent[key], (dict, list)):
                waiting.append((depth + 1, parent[key]))


def _holds(parent, key) -> bool:
    return key in parent if isinstance(parent, dict) else key < len(parent)
