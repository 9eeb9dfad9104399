"""One cell of the matrix of parallel training: a few steps on several ranks against the same steps in one process."""

import dataclasses
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import quantization_wrapper
from finetune.config import TrainConfig
from finetune.data.collate import microbatches
from finetune.data.sampler import rank_rows
from finetune.distributed.env import RankEnv
from finetune.distributed.parallel_dims import ParallelDims
from finetune.errors import PlanError
from finetune.estimate import communication
from finetune.torch_engine import experts
from finetune.torch_engine.engine import TorchEngine
from finetune.torch_engine.lora.adapters import add_adapters
from finetune.torch_engine.lora.layers import adapter_parameters, layers
from finetune.torch_engine.lora.targets import linear_names, target_names
from finetune.torch_engine.parallel import fsdp, process_groups
from tests.support import tiny

LAYOUTS = {
    "DDP 2": ParallelDims(dp_replicate=2),
    "FSDP2 2": ParallelDims(dp_shard=2),
    "FSDP2 3": ParallelDims(dp_shard=3),
    "FSDP2 4": ParallelDims(dp_shard=4),
    "HSDP 2x2": ParallelDims(dp_replicate=2, dp_shard=2),
    "TP 2": ParallelDims(tp=2),
    "CP 2": ParallelDims(cp=2),
    "CP 4": ParallelDims(cp=4),
    "PP 2": ParallelDims(pp=2),
    "PP 4": ParallelDims(pp=4),
    "FSDP2 2 x TP 2": ParallelDims(dp_shard=2, tp=2),
    "FSDP2 2 x CP 2": ParallelDims(dp_shard=2, cp=2),
    "CP 2 x TP 2": ParallelDims(cp=2, tp=2),
    "CP 2 x PP 2": ParallelDims(cp=2, pp=2),
    "PP 2 x FSDP2 2": ParallelDims(pp=2, dp_shard=2),
    "PP 2 x TP 2": ParallelDims(pp=2, tp=2),
    "DDP 2 x TP 2": ParallelDims(dp_replicate=2, tp=2),
}
QUANTIZERS = ("nf4", "bnb", "hqq", "quanto", "mlx")
KINDS = (
    "full",
    "lora",
    "dora",
    *QUANTIZERS,
    "nf4 double",
    "bnb double",
    "bnb across rows",
    "nf4 bf16",
    "nf4 as bf16",
    "bnb double as bf16",
    "mlx as bf16",
    "full no_sync",
    "lora no_sync",
    "lora recomputed",
    "nf4 recomputed",
    "full kept",
    "nf4 kept",
)
STEPS, ROWS_A_STEP = 6, 7
CPU = torch.device("cpu")
# Six documents a rank are of unequal targets; 7 rows a step never divide evenly.
DATA = tiny.dataset(lengths=tuple(3 + (7 * i) % 40 for i in range(STEPS * ROWS_A_STEP)))


def build(
    kind: str,
    ranks=process_groups.SINGLE_PROCESS,
    architecture: str = "llama",
    deep: bool = False,
    distribution: str = "ptd",
    **changes,
) -> TorchEngine:
    """The engine of a tiny model; the same weights for every number of ranks."""
    # Wide enough that half a row is whole blocks of scales.
    model = tiny.build(
        architecture, intermediate_size=128, **({"num_hidden_layers": 4} if ranks.dims.pp > 2 or deep else {})
    )
    as_bf16, kind = (kind.endswith(" as bf16"), kind.removesuffix(" as bf16"))  # as for a torch that shards no integers
    bf16, kept = kind.endswith("bf16"), kind.endswith("kept")
    changes |= {"no_sync": kind.endswith("no_sync")}
    changes |= {"use_gradient_checkpointing": "true" if kind.endswith("recomputed") else "false"}
    kind = kind.removesuffix(" no_sync").removesuffix(" recomputed").removesuffix(" kept")
    full = kind == "full"
    settings = dataclasses.replace(
        TrainConfig(),
        precision="bf16" if bf16 else "fp32",
        lr=1e-3,
        grad_norm=0.5,
        lora_rank=4,
        use_dora=kind == "dora",
        train_type="full" if full else "lora" if kind in ("lora", "dora") else "qlora",
        **changes,
    )
    model.requires_grad_(full)
    if not full:
        model.to(torch.bfloat16 if bf16 else torch.float32)
        if kind not in ("lora", "dora"):
            group = 128 if kind.endswith("across rows") else 32
            config = quantization_wrapper.config_for(kind.split()[0], group_size=group, double_quant="double" in kind)
            quantization_wrapper.quantize_model(model, config, linear_names(model))
            experts.quantize(model, config, list(experts.reachable(model)))
        add_adapters(model, target_names(model, "all", settings.use_dora), settings)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in adapter_parameters(model).items():
                if name.endswith("lora_B"):
                    parameter.normal_(std=0.05, generator=generator)
    if as_bf16:
        fsdp.view_as_bf16(model)
    engine = TorchEngine(model, settings, CPU, ranks=ranks, reshard_after_forward=not kept, distribution=distribution)
    engine.verify("auto")
    return engine


def train(engine: TorchEngine, steps: int = STEPS) -> dict:
    """Losses, norms and the first step's gradients, gathered; this rank's bytes between steps."""
    gradients = {}

    def keep(*_):
        if gradients:
            return
        for name in engine.trained:
            parameter, grad = engine.held.get(name), None
            if name in engine.named:
                empty = parameter is None or parameter.grad is None
                grad = torch.zeros_like(fsdp.local_shard(engine.named[name])) if empty else parameter.grad
            whole = engine._collected(name, grad)
            gradients[name] = None if whole is None else whole.clone()

    if not engine.partitioned:
        engine.optimizer.register_step_pre_hook(keep)
    ranks, losses, norms = engine.ranks, [], []
    for step in range(steps):
        rows = torch.arange(step * ROWS_A_STEP, (step + 1) * ROWS_A_STEP).numpy()
        mine = rank_rows(rows, ranks.data_rank, ranks.dims.data_ranks)
        result = engine.train_step(microbatches(DATA, mine, engine.layout, 8, 60, 0), 1e-3)
        if engine.partitioned and step == 0:  # AdamW's first moment is then (1 - 0.9) x the gradient
            moments, _ = engine.foreign.moments(engine.named)
            gradients |= {n: torch.from_numpy(moments[f"{n}.exp_avg"]) / 0.1 for n in engine.named}
        losses.append(result.nll / result.num_targets)
        norms.append(result.grad_norm)
    here = {n: p for n, p in engine.model.named_parameters() if not p.is_meta}
    held = {n: fsdp.local_shard(p.detach()) for n, p in here.items()}
    return dict(
        losses=losses,
        norms=norms,
        gradients=gradients,
        bytes={n: t.nbytes for n, t in held.items()},
        shapes={n: (tuple(p.shape), p.element_size()) for n, p in here.items()},
    )


def packed_in_forward(rank: int, size: int, kind: str) -> dict:
    """{'layers': how many, 'different': those whose codes or scales, as a forward over ranks sees them, are not the whole model's}."""
    ranks = process_groups.ProcessGroups.of(RankEnv(rank, size), ParallelDims(dp_shard=size), CPU)
    engine, seen = build(kind, ranks), {}
    for name, layer in layers(engine.model).items():
        keep = partial(seen.setdefault, name)
        layer.register_forward_pre_hook(
            lambda module, _, keep=keep: keep([t.clone() for t in module.stored()]) and None
        )
    engine.train_step(microbatches(DATA, range(4), engine.layout, 8, 60, 0), 1e-3)
    whole = {name: layer.stored() for name, layer in layers(build(kind).model).items()}
    different = [
        name
        for name, parts in whole.items()
        if not all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(parts, seen[name], strict=True))
    ]
    return {"layers": len(seen), "different": different}


class Counted(TorchDispatchMode):
    """Counts bytes that this rank puts into each kind of collective; fp64 and integers that ranks tell each other are left out."""

    KINDS = {
        "allgather": "all_gather",
        "all_gather": "all_gather",
        "reduce_scatter": "reduce_scatter",
        "allreduce": "all_reduce",
        "send": "send",
    }

    def __init__(self):
        super().__init__()
        self.bytes = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            name = function._opname.lstrip("_")
            kind = next((k for word, k in self.KINDS.items() if name.startswith(word)), None)
            if kind:
                given = args[0] if kind in ("all_reduce", "send") else args[1]
                given = (
                    [given]
                    if torch.is_tensor(given)
                    else [t for g in given for t in (g if isinstance(g, list) else [g])]
                )
                told = (torch.float64, torch.int64, torch.bool)
                size = sum(t.nbytes for t in given if t.dtype not in told)
                self.bytes[kind] = self.bytes.get(kind, 0) + size
        return function(*args, **(kwargs or {}))


def traffic_of(rank: int, size: int, layout: str, kind: str, architecture: str) -> list:
    """[bytes counted, bytes by the formula] of one step on this rank, from the sizes of its parameters."""
    dims = LAYOUTS[layout]
    ranks = process_groups.ProcessGroups.of(RankEnv(rank, size), dims, CPU)
    engine = build(kind, ranks, architecture)
    rows = rank_rows(torch.arange(ROWS_A_STEP + 1).numpy(), ranks.data_rank, dims.data_ranks)
    batches = microbatches(DATA, rows, engine.layout, 8, 60, 0)
    count = int(max(ranks.all_gather_scalars([len(batches)])[:, 0]))
    batches += [engine._empty_batch()] * (count - len(batches))
    with Counted() as counted:
        engine.train_step(batches, 1e-3)
    config, inside, full = engine.model.config, ".layers.", kind.startswith("full")

    def whole(parameters):  # padded to rows that divide
        total = 0
        for p in parameters:
            rows = -(-p.shape[0] // dims.shards) * dims.shards if fsdp.is_sharded(p) else p.shape[0]
            total += rows * (p.numel() // p.shape[0]) * p.element_size()
        return total

    here = {n: p for n, p in engine.model.named_parameters() if not p.is_meta}
    named, pieces = engine.named, engine.pieces.partial
    work = communication.StepTraffic(
        layers=whole(p for n, p in here.items() if inside in n),
        outside=whole(p for n, p in here.items() if inside not in n),
        trained=whole(named.values()),
        tokens=tuple(dims.cp * engine._shape(b)[1] for b in batches),
        num_layers=config.num_hidden_layers // dims.pp,
        hidden_size=config.hidden_size,
        key_value_width=2 * config.num_key_value_heads * config.hidden_size // config.num_attention_heads,
        partial=whole(p for n, p in named.items() if n in pieces),
        head=4 * config.vocab_size * config.hidden_size if full else 0,
        first_is_frozen=not full,
        no_sync=engine.settings.no_sync,
        keeps_gathered=kind.endswith("kept"),
        recomputed=kind.endswith("recomputed"),
    )
    return [
        {k: n for k, n in counted.bytes.items() if n},
        communication.bytes_per_step(dims, work, ranks.coordinate("pp")),
    ]


def compare(one: dict, many: dict) -> dict:
    """Largest relative differences: of losses, norms after the first step, the first step's norm and gradients."""
    norms = [abs(a - b) / a for a, b in zip(one["norms"], many["norms"], strict=True)]
    grads = max(
        ((many["gradients"][n] - g).abs().max() / g.abs().max().clamp_min(1e-12)).item()
        for n, g in one["gradients"].items()
    )
    losses = [abs(a - b) / a for a, b in zip(one["losses"], many["losses"], strict=True)]
    return {"loss": max(losses), "gradients": grads, "norm": norms[0], "norms": max(norms)}


def expected_bytes(result: dict, ranks) -> dict:
    """What this rank may hold of each parameter: its ceil(rows / N) of the rows."""
    out = {}
    for name, (shape, size) in result["shapes"].items():
        rows = ranks.local_rows(shape[0])
        out[name] = (rows.stop - rows.start) * size * torch.Size(shape[1:]).numel()
    return out


def accelerated(rank: int, size: int, method: str, kinds: list, architecture: str = "llama") -> list[dict]:
    """Figures of each kind with accelerate's `method`; called in every rank."""
    from accelerate.state import AcceleratorState

    figures = []
    for kind in kinds:
        AcceleratorState._reset_state(reset_partial_state=True)  # accelerate allows one way a process
        # First, as ZeRO-3 changes how later models of the process are built.
        one = train(build(kind, architecture=architecture)) if rank == 0 else None
        ranks = process_groups.ProcessGroups.of(RankEnv(rank, size), ParallelDims(dp_replicate=size), CPU)
        many = train(build(kind, ranks, architecture, distribution=method))
        found = {"layout": method, "kind": kind, "architecture": architecture}
        if rank == 0:
            found |= compare(one, many)
        figures.append(found)
    return figures


def matrix(rank: int, size: int, cells: list) -> list[dict]:
    """Figures of each (layout, kind, architecture); called in every rank. One process's steps are run by the first alone."""
    figures = []
    for layout, kind, architecture in cells:
        dims = LAYOUTS[layout]
        ranks = process_groups.ProcessGroups.of(RankEnv(rank, size), dims, CPU)
        try:
            many = train(build(kind, ranks, architecture))
        except PlanError as error:  # on every rank
            figures.append({"layout": layout, "kind": kind, "architecture": architecture, "refused": str(error)})
            continue
        found = {"layout": layout, "kind": kind, "architecture": architecture}
        found["bytes"] = many["bytes"] == expected_bytes(many, ranks)
        found["held"] = sum(many["bytes"].values())
        if rank == 0:
            one = build(kind, architecture=architecture, deep=dims.pp > 2)
            found |= compare(train(one), many)
        figures.append(found)
    return figures
