"""Edits of the MPS wrapper's checkpoints: refused with everything as before, or loaded and trained on."""

import io
import math
import random
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.rig import mutate
from tests.rig.batch import Finding, Mutant
from tests.rig.materials import Place
from tests.support.wrapper_cases import MODEL, STATE, net, train, wrapper

DTYPES = (torch.float64, torch.bfloat16, torch.int64, torch.complex64, torch.bool)

LARGEST = 1e3  # of a setting: no reader can know that a learning rate of 1e308 is not meant


@dataclass
class WrapperBatch:
    """argv: "bytes" if the file itself was edited, "content" if what it holds was and it was saved without a digest."""

    variants: tuple = ()

    def prepare(self, place: Place):
        wrapped, file = wrapper(min_num_params=200), place.own / "good.pt"
        model = wrapped.wrap_model(net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        train(model, optimizer, 0, 1, range(1))
        wrapped.save_checkpoint(model, file, optimizer, epoch=3)
        return wrapped, model, optimizer, file

    def mutant(self, rng: random.Random, context) -> Mutant:
        *_, file = context
        data = file.read_bytes()
        if rng.random() < 0.3:
            changed = bytearray(data)
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            return Mutant({"odd.pt": rng.choice((bytes(changed), mutate.mutated_bytes(rng, data)))}, ("bytes",))
        content, out = torch.load(io.BytesIO(data), weights_only=True), io.BytesIO()
        for _ in range(rng.randint(1, 2)):
            edit(rng, content)
        torch.save(content, out)
        return Mutant({"odd.pt": out.getvalue()}, ("content",))

    def check(self, mutant: Mutant, folder: Path, context) -> None:
        wrapped, model, optimizer, file = context
        wrapped.load_checkpoint(model, file, optimizer)
        before = _state(model, optimizer)
        loaded = False
        try:
            wrapped.load_checkpoint(model, folder / "odd.pt", optimizer)
            loaded = True
        finally:
            if not loaded and not _same(before, _state(model, optimizer)):
                raise Finding("differing_bits", "refused, and something was changed")
        if mutant.argv[0] == "bytes" and not _same(before, _state(model, optimizer)):
            raise Finding("differing_bits", "a damaged file was loaded")
        found = train(model, optimizer, 0, 1, range(2))
        if not all(map(math.isfinite, found)):
            raise Finding("differing_bits", f"losses after the load: {found}")


def edit(rng: random.Random, content: dict) -> None:
    """Replaces, removes or renames a node of a checkpoint's content, tensors among them."""
    where = rng.choice((MODEL, STATE, STATE, "groups", "top"))
    tree = content if where == "top" or where not in content else content[where]
    if where == STATE and isinstance(tree, dict) and isinstance(tree.get("state"), dict) and tree["state"]:
        tree = tree["state"]
        if rng.random() < 0.8:
            tree = tree[rng.choice(sorted(tree, key=str))]
    elif where == "groups" and isinstance(content.get(STATE), dict) and content[STATE].get("param_groups"):
        tree = content[STATE]["param_groups"][0]
    if not isinstance(tree, dict) or not tree:
        return
    key = rng.choice(sorted(tree, key=str))
    value, kind = tree[key], rng.randrange(6)
    if kind == 0:
        del tree[key]
    elif kind == 1:
        tree[rng.choice(("other", 5, "", "step", "lr"))] = tree.pop(key)
    elif torch.is_tensor(value):
        tree[key] = _odd_tensor(rng, value)
    else:
        odd = mutate.odd_value(rng, value if not isinstance(value, dict) else 1)
        tree[key] = 0.5 if isinstance(odd, float | int) and abs(odd) > LARGEST else odd


def _odd_tensor(rng: random.Random, tensor: torch.Tensor):
    kind, flat = rng.randrange(8), tensor.clone().flatten()
    if kind == 0:
        return tensor.to(rng.choice(DTYPES))
    if kind == 1:
        return rng.choice((flat[:-1], flat[None], tensor.t() if tensor.ndim == 2 else tensor[None], flat[:0]))
    if kind == 2:
        return rng.choice((1.5, None, [1.0], "x", float("nan")))
    if kind == 3:
        return rng.choice(
            (tensor.to_sparse(), torch.empty(tensor.shape, device="meta"), tensor.expand(2, *tensor.shape))
        )
    if len(flat):
        flat[rng.randrange(len(flat))] = rng.choice((math.nan, math.inf, -1.0))
    return flat.reshape(tensor.shape)


def _state(model, optimizer) -> list:
    """Clones of every weight and of the optimizer's state, in order, and the groups' settings."""
    weights = [p.detach().clone() for p in (*model.parameters(), *model.buffers())]
    found = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    moments = [(k, v.clone() if torch.is_tensor(v) else v) for state in found for k, v in sorted(state.items())]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return [weights, [k for k, _ in moments], [v for _, v in moments], groups]


def _same(one: list, other: list) -> bool:
    def local(value):
        return value.to_local() if hasattr(value, "to_local") else value

    def equal(a, b):
        return torch.equal(local(a), local(b)) if torch.is_tensor(a) and torch.is_tensor(b) else a == b

    pairs = [(a, b) for i in (0, 2) for a, b in zip(one[i], other[i], strict=False)]
    sizes = [len(part) for part in one] == [len(part) for part in other]
    return sizes and all(equal(a, b) for a, b in pairs) and one[1] == other[1] and one[3] == other[3]


WRAPPER = WrapperBatch()
