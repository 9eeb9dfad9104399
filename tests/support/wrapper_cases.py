"""What ranks run to try the FSDP wrapper on modules of a user's own: see tests/test_mps_fsdp_wrapper.py."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from mps_fsdp_wrapper import MPSFSDPConfig, MPSFSDPWrapper
from tests.support import ranks

STEPS, BATCH = 3, 4


class Net(nn.Module):
    """Two layers of each size, a tied weight, a buffer, a scalar parameter."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.inner, self.outer = nn.Linear(16, 8), nn.Linear(8, 16, bias=False)
        self.outer.weight = nn.Parameter(self.inner.weight.t().contiguous().clone())
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("shift", torch.linspace(0, 1, 16))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.outer(self.inner(x + self.shift)) * self.scale


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def wrapper(**config) -> MPSFSDPWrapper:
    return MPSFSDPWrapper(MPSFSDPConfig(use_mixed_precision=False, **config), ranks.compute_device().type)


def rows(step: int, size: int) -> torch.Tensor:
    return torch.randn(size, BATCH, 16, generator=torch.Generator().manual_seed(step))


def train(model, optimizer, rank: int, size: int, steps=range(STEPS)) -> list[float]:
    losses = []
    for step in steps:
        loss = model(rows(step, size)[rank]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(steps=range(STEPS), size: int = 2):
    """The same training in one process: the mean of the ranks' losses; the trained model."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in steps:
        torch.stack([model(x).square().mean() for x in rows(step, size)]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def strategies(rank: int, size: int) -> dict:
    """{strategy: largest difference of any weight from one process's after some steps}."""
    found = {}
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        for policy in ({nn.Linear}, None):
            wrapped = wrapper(sharding_strategy=strategy, min_num_params=200)
            # Rank 0's weights reach the others.
            model = wrapped.wrap_model(net(seed=rank), policy)
            train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), rank, size)
            oracle, worst = dict(whole(size=size).named_parameters()), 0.0
            for name, parameter in model.named_parameters():
                full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
                worst = max(worst, (full.detach().cpu() - oracle[name]).abs().max().item())
            found[f"{strategy} {'by class' if policy else 'by size'}"] = worst
    return found


def saved(rank: int, size: int, path: str) -> dict:
    """Trains, saves, trains on; the losses after the save, and what save_checkpoint refuses."""
    wrapped = wrapper(min_num_params=200)
    model = wrapped.wrap_model(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, rank, size)
    wrapped.save_checkpoint(model, path, optimizer, epoch=3, best_loss=0.25, tags=["a"])
    after, refused = train(model, optimizer, rank, size, range(STEPS, 2 * STEPS)), []
    for metadata in ({"thing": Path("x")}, {"model_state_dict": 1}):
        try:
            wrapped.save_checkpoint(model, path + ".other", optimizer, **metadata)
        except ValueError as error:
            refused.append(str(error))
    return {"after": after, "refused": refused}


def resumed(rank: int, size: int, path: str, same_world: bool) -> dict:
    """Loads what `saved` wrote; its metadata, the losses after it, how far its weights are from one process's."""
    wrapped = wrapper(min_num_params=200)
    model = wrapped.wrap_model(net(seed=7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-1)
    metadata = wrapped.load_checkpoint(model, path, optimizer)
    weights, oracle = {}, dict(whole().named_parameters())
    for name, parameter in model.named_parameters():
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        weights[name] = (full.detach().cpu() - oracle[name]).abs().max().item()
    after = train(model, optimizer, rank, size, range(STEPS, 2 * STEPS)) if same_world else None
    problem = ""
    try:
        other = wrapped.wrap_model(nn.Sequential(nn.Linear(3, 3)))
        wrapped.load_checkpoint(other, path)
    except ValueError as error:
        problem = str(error)
    return {"metadata": metadata, "after": after, "off": max(weights.values()), "problem": problem}


def refused(rank: int, size: int, folder: str) -> dict:
    """{case: what each rank is told} for checkpoints that cannot be written or do not fit; nothing hangs or changes."""
    wrapped, said, path = wrapper(min_num_params=200), {}, f"{folder}/good.pt"
    early = net()
    before = torch.optim.AdamW(early.parameters(), lr=1e-2)
    model = wrapped.wrap_model(early)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, rank, size, range(1))
    wrapped.save_checkpoint(model, path, optimizer)
    if rank == 0:
        content = torch.load(path, weights_only=True)
        torch.save(
            {**content, "model_state_dict": dict.fromkeys(content["model_state_dict"], [1])}, f"{folder}/list.pt"
        )
        torch.save({**content, "optimizer_state_dict": [1]}, f"{folder}/optimizer.pt")
    first, *others = model.parameters()
    groups = torch.optim.AdamW([{"params": [first]}, {"params": others}])
    for case, call in {
        "no folder": lambda: wrapped.save_checkpoint(model, f"{folder}/no/such/x.pt", optimizer),
        "metadata of rank 0": lambda: wrapped.save_checkpoint(model, path, None, x=print if rank == 0 else 1),
        "optimizer from before": lambda: wrapped.save_checkpoint(model, path, before),
        "its load": lambda: wrapped.load_checkpoint(model, path, before),
        "groups": lambda: wrapped.load_checkpoint(model, path, groups),
        "SGD": lambda: wrapped.load_checkpoint(model, path, torch.optim.SGD(model.parameters(), lr=1.0)),
        "not tensors": lambda: wrapped.load_checkpoint(model, f"{folder}/list.pt", optimizer),
        "no optimizer": lambda: wrapped.load_checkpoint(model, f"{folder}/optimizer.pt", optimizer),
    }.items():
        try:
            call()
        except (ValueError, OSError) as error:
            said[case] = f"{type(error).__name__}: {error}"
    return said


MODEL, STATE = "model_state_dict", "optimizer_state_dict"
FIRST = "layers.0.weight"


def odd_contents() -> dict:
    """{case: edit of a saved content} that must be refused before anything changes."""

    def moment(name, change):
        def edit(c):
            values = c[STATE]["state"][FIRST]
            values[name] = change(values[name])

        return edit

    def group(**values):
        return lambda c: c[STATE]["param_groups"][0].update(values)

    return {
        "NaN weight": lambda c: c[MODEL][FIRST].view(-1)[3:4].fill_(float("nan")),
        "infinite weight": lambda c: c[MODEL][FIRST].view(-1)[3:4].fill_(float("inf")),
        "infinite buffer": lambda c: c[MODEL]["shift"][3:4].fill_(float("inf")),
        "sparse weight": lambda c: c[MODEL].update({FIRST: c[MODEL][FIRST].to_sparse()}),
        "meta weight": lambda c: c[MODEL].update({"scale": c[MODEL]["scale"].to("meta")}),
        "NaN moment": moment("exp_avg", lambda t: t * float("nan")),
        "negative square": moment("exp_avg_sq", lambda t: t - 1),
        "moment of another shape": moment("exp_avg", lambda t: t[:3]),
        "float64 moment": moment("exp_avg", lambda t: t.double()),
        "int64 moment": moment("exp_avg", lambda t: t.long()),
        "complex moment": moment("exp_avg", lambda t: t.to(torch.complex64)),
        "text as moment": moment("exp_avg", lambda t: "a"),
        "sparse moment": moment("exp_avg", lambda t: t.to_sparse()),
        "meta moment": moment("exp_avg", lambda t: t.to("meta")),
        "three steps": moment("step", lambda t: torch.ones(3)),
        "negative step": moment("step", lambda t: t - 9),
        "text as step": moment("step", lambda t: "a"),
        "no exp_avg_sq": lambda c: c[STATE]["state"][FIRST].pop("exp_avg_sq"),
        "no state": lambda c: c[STATE]["state"].pop(FIRST),
        "empty state": lambda c: c[STATE]["state"][FIRST].clear(),
        "lr NaN": group(lr=float("nan")),
        "lr -1": group(lr=-1.0),
        "lr text": group(lr="fast"),
        "lr in a list": group(lr=[0.01]),
        "eps infinite": group(eps=float("inf")),
        "three betas": group(betas=(0.9, 0.99, 0.999)),
        "beta of 2": group(betas=(0.9, 2.0)),
        "one beta": group(betas=0.9),
        "text as weight_decay": group(weight_decay="x"),
        "no weight_decay": group(weight_decay=None),
        "a number as switch": group(maximize=2),
        "amsgrad": group(amsgrad=True),
        "capturable": group(capturable=True),
        "no moment": moment("exp_avg", lambda t: None),
        "Adam": group(decoupled_weight_decay=False),
    }


def said_by(call) -> str:
    try:
        call()
    except (ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def hostile(rank: int, size: int, folder: str) -> dict:
    """{case: what is said}, and whether weights and state were as before after all of them."""
    import os

    wrapped, path, said = wrapper(min_num_params=200), f"{folder}/good.pt", {}
    model = wrapped.wrap_model(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, rank, size, range(1))
    wrapped.save_checkpoint(model, path, optimizer)
    good = Path(path).read_bytes()
    before = wrapper_state(model, optimizer)
    for case, edit in odd_contents().items():
        content = torch.load(path, weights_only=True)
        edit(content)
        torch.save(content, f"{folder}/odd.pt")
        said[case] = said_by(lambda: wrapped.load_checkpoint(model, f"{folder}/odd.pt", optimizer))
    generator = torch.Generator().manual_seed(0)
    for i in torch.randint(0, len(good), (40,), generator=generator).tolist() + [len(good) - 1, len(good) - 70]:
        Path(f"{folder}/odd.pt").write_bytes(good[:i] + bytes([good[i] ^ 4]) + good[i + 1 :])
        said[f"flip of byte {i}"] = said_by(lambda: wrapped.load_checkpoint(model, f"{folder}/odd.pt", optimizer))
    os.mkfifo(f"{folder}/pipe")
    os.symlink("good.pt", f"{folder}/link")
    said["load a pipe"] = said_by(lambda: wrapped.load_checkpoint(model, f"{folder}/pipe", optimizer))
    for name in ("pipe", "link", "/dev/full"):
        said[f"save onto {name}"] = said_by(lambda n=name: wrapped.save_checkpoint(model, Path(folder, n), optimizer))
    said["wrap twice"] = said_by(lambda: wrapped.wrap_model(model))
    said["a part wrapped"] = said_by(lambda: wrapped.wrap_model(nn.Sequential(nn.Linear(2, 2), model)))
    said["on meta"] = said_by(
        lambda: wrapped.wrap_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))
    )
    said["a list"] = said_by(lambda: wrapped.wrap_model(nn.ModuleList([nn.Linear(2, 2)])))
    assert os.path.islink(f"{folder}/link") and not os.path.isfile("/dev/full") and Path(path).read_bytes() == good
    early = net()
    optimizer_before = torch.optim.AdamW(early.parameters())
    wrapped.wrap_model(early, {nn.Linear})
    said["optimizer from before"] = said_by(optimizer_before.step)
    same = wrapper_state(model, optimizer)
    unchanged = before.keys() == same.keys() and all(torch.equal(before[k], same[k]) for k in before)
    wrapped.load_checkpoint(model, f"{folder}/link", optimizer)
    content = torch.load(path, weights_only=True)
    torch.save(content, f"{folder}/older.pt")  # as before there were digests
    wrapped.load_checkpoint(model, f"{folder}/older.pt", optimizer)
    train(model, optimizer, rank, size, range(1))
    return {"said": said, "unchanged": unchanged}


def wrapper_state(model, optimizer) -> dict:
    """Copies of this rank's weights and moments."""
    from finetune.torch_engine.parallel.placement import local_shard

    found = {name: local_shard(p.detach()).clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        found |= {f"{name} {key}": local_shard(v).clone() for key, v in optimizer.state[p].items()}
    return found


class Tied(nn.Module):
    """An embedding whose weight is also the output layer's."""

    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Embedding(32, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.layer(self.embed(tokens))))


def tied(rank: int, size: int) -> dict:
    """{policy: largest difference of any weight from one process's}; None if the weights are no longer one."""
    found = {}
    for name, policy in {"by size": None, "by class": {nn.Linear, nn.Embedding}}.items():
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(Tied())
        models[1] = wrapper(min_num_params=200).wrap_model(models[1], policy)
        for model in models:
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            for step in range(STEPS):
                tokens = torch.randint(0, 32, (BATCH, 6), generator=torch.Generator().manual_seed(step))
                model(tokens).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        pairs = zip(*(model.parameters() for model in models), strict=True)
        worst = max((mine.full_tensor().cpu() - whole).abs().max().item() for whole, mine in pairs)
        found[name] = worst if models[1].head.weight is models[1].embed.weight else None
    return found


def wrong_answers(rank: int, size: int) -> str | None:
    """What is said where copies from the device read the wrong bytes, as MPS has done."""
    from tests.support import emulated_device

    emulated_device.extension().ignore_offsets(True)
    try:
        wrapper().wrap_model(net())
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return None


def converted(rank: int, size: int) -> dict:
    """Dtypes after wrapping on a device without bf16, and the warnings."""
    import warnings

    from tests.support import emulated_device

    emulated_device.extension().refuse_bfloat16(True)
    model = net().bfloat16()
    model.layers[0].float()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped = MPSFSDPWrapper(MPSFSDPConfig(use_mixed_precision=False), "emulated")
        model = wrapped.wrap_model(model, {nn.Linear}, param_dtype=torch.bfloat16)
        out = model(rows(0, 1)[0].half())
        out.float().square().mean().backward()
    said = [str(w.message) for w in caught if "bfloat16" in str(w.message)]
    dtypes = {n: str(p.dtype) for n, p in (*model.named_parameters(), *model.named_buffers())}
    return {"dtypes": dtypes, "out": str(out.dtype), "said": said, "world": dist.get_world_size()}


def facts(rank: int, size: int) -> list[dict]:
    """The device's facts, on one without bf16."""
    from finetune.torch_engine import device_facts
    from tests.support import emulated_device

    emulated_device.extension().refuse_bfloat16(True)
    return device_facts.examine(ranks.compute_device())
