"""Cases of parallel training: a few steps on several ranks against the same steps in one process."""

import dataclasses
import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import quantization_wrapper
from finetune.config import TrainConfig
from finetune.data.collate import microbatches
from finetune.data.mismatched import DataWithMismatches
from finetune.data.run_data import Data
from finetune.data.tokens.tokenize import labels_of
from finetune.distributed import pipeline_schedule
from finetune.distributed.env import RankEnv
from finetune.engine import Engine
from finetune.errors import PlanError
from finetune.estimate import communication, model_shape
from finetune.parts.objectives import OBJECTIVES
from finetune.parts.parallel_dims import ParallelDims
from finetune.parts.parts import Parts
from finetune.parts.trains import Adapter
from finetune.torch_engine.experts import fused
from finetune.torch_engine.lora.adapters import add_adapters
from finetune.torch_engine.lora.layers import adapter_parameters, layers
from finetune.torch_engine.lora.targets import linear_names, target_names
from finetune.torch_engine.parallel import fsdp, pipeline, placement, process_groups
from tests.support import devices, engine_access, ranks, tiny
from tests.support.build import torch_engine

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
    "PP 3": ParallelDims(pp=3),  # four layers: 1, 2, 1
    "PP 4": ParallelDims(pp=4),
    "FSDP2 2 x TP 2": ParallelDims(dp_shard=2, tp=2),
    "FSDP2 2 x CP 2": ParallelDims(dp_shard=2, cp=2),
    "CP 2 x TP 2": ParallelDims(cp=2, tp=2),
    "CP 2 x PP 2": ParallelDims(cp=2, pp=2),
    "PP 2 x FSDP2 2": ParallelDims(pp=2, dp_shard=2),
    "PP 2 x TP 2": ParallelDims(pp=2, tp=2),
    "DDP 2 x TP 2": ParallelDims(dp_replicate=2, tp=2),
}
# For mixtures of experts only: expert parallelism takes its ranks from the data ranks.
EXPERT_LAYOUTS = {
    "EP 2": ParallelDims(dp_shard=2, ep=2),
    "EP 2 x FSDP2 2": ParallelDims(dp_shard=4, ep=2),
    "DDP 2 x EP 2": ParallelDims(dp_replicate=2, dp_shard=2, ep=2),
    "EP 4": ParallelDims(dp_shard=4, ep=4),
    "EP 2 x PP 2": ParallelDims(pp=2, dp_shard=2, ep=2),
    "EP 2 x CP 2": ParallelDims(cp=2, dp_shard=2, ep=2),
}
DENSE_LAYOUTS = LAYOUTS
LAYOUTS = DENSE_LAYOUTS | EXPERT_LAYOUTS
MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss", "qwen2_moe")


@dataclass(frozen=True)
class Case:
    """One kind of training: what trains, how the frozen base is stored, and how the engine runs it."""

    train_type: str = "qlora"
    method: str | None = None
    double_quant: bool = False
    # Blocks of 128 values span rows of the tiny model, whose rows have 64.
    group_size: int = 32
    use_dora: bool = False
    # Dtype of the base, and of products in full fine-tuning, whose weights stay fp32: fp32, bf16 or fp16.
    precision: str = "fp32"
    # Packed codes viewed as bf16, as for a torch that shards no integers.
    view_bf16: bool = False
    no_sync: bool = False
    recomputed: bool = False
    # Gathered weights are kept from forward to backward.
    kept: bool = False
    # Weight of the routers' load-balancing loss.
    aux: float = 0.0
    # Embedding and head are not gathered.
    rows: bool = False
    # Hidden states are split between the blocks of tensor-parallel layers.
    split: bool = False
    schedule: str = "1f1b"
    optimizer: str = "adamw"
    # What is learned of pairs, or of rows with labels: a word of --preference.
    preference: str = "none"

    @property
    def id(self) -> str:
        words = [self.method or ("dora" if self.use_dora else self.train_type)]
        words += ["double"] * self.double_quant + ["across rows"] * (self.group_size == 128)
        words += [self.precision] * (self.precision != "fp32")
        words += ["as bf16"] * self.view_bf16 + ["no_sync"] * self.no_sync + ["recomputed"] * self.recomputed
        words += [self.optimizer] * (self.optimizer != "adamw") + [self.preference] * (self.preference != "none")
        words += [self.schedule] * (self.schedule != "1f1b")
        return " ".join(
            words + ["kept"] * self.kept + ["aux"] * bool(self.aux) + ["rows"] * self.rows + ["split"] * self.split
        )


DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def by_id(*cases: Case) -> dict[str, Case]:
    return {case.id: case for case in cases}


QUANTIZED = by_id(*(Case(method=method) for method in ("nf4", "bnb", "hqq", "quanto", "mlx")))
# On every layout.
MATRIX = by_id(
    Case("full"),
    Case("lora"),
    Case("lora", use_dora=True),
    *QUANTIZED.values(),
    Case(method="nf4", double_quant=True),
    Case(method="bnb", double_quant=True),
    Case(method="bnb", group_size=128),
    Case(method="nf4", view_bf16=True),
    Case(method="bnb", double_quant=True, view_bf16=True),
    Case(method="mlx", view_bf16=True),
    Case("full", no_sync=True),
    Case("lora", no_sync=True),
    Case("lora", recomputed=True),
    Case(method="nf4", recomputed=True),
    Case("full", kept=True),
    Case(method="nf4", kept=True),
    Case("full", optimizer="adamw_8bit"),
    Case("lora", optimizer="adamw_8bit"),
)
# Of layouts with shards.
OF_ROWS = by_id(Case("full", rows=True), Case("lora", rows=True), Case(method="nf4", recomputed=True, rows=True))
# Large enough to be seen in the gradients.
BALANCED = by_id(Case("full", aux=0.3), Case("lora", aux=0.3), Case("lora", recomputed=True, aux=0.3))
# Of layouts with tensor parallelism.
SPLIT = by_id(
    Case("full", split=True),
    Case("lora", split=True),
    Case("lora", use_dora=True, split=True),
    Case(method="nf4", recomputed=True, split=True),
    Case("full", recomputed=True, split=True),
)
AUTOCAST = by_id(
    Case("full", precision="bf16"),
    Case("full", precision="bf16", recomputed=True),
    Case("full", precision="bf16", rows=True),
    Case("full", precision="bf16", split=True),
)
# The reference of dpo and kto is the base: these train adapters only.
PREFERENCES = by_id(
    *(Case("lora", preference=method) for method in ("dpo", "kto", "orpo", "simpo")),
    *(Case("full", preference=method) for method in ("orpo", "simpo")),
    Case(method="nf4", preference="dpo"),
    Case("lora", use_dora=True, preference="dpo"),
    Case("lora", recomputed=True, preference="kto"),
    Case("lora", split=True, preference="dpo"),
)
# Of layouts with stages.
SCHEDULES = by_id(
    *(Case(kind, schedule="interleaved1f1b") for kind in ("full", "lora")),
    Case(method="nf4", recomputed=True, schedule="interleaved1f1b"),
    Case("lora", preference="kto", schedule="interleaved1f1b"),
)
OTHERS = by_id(Case(method="nf4", precision="bf16"), Case("full", recomputed=True))
CASES = MATRIX | BALANCED | OF_ROWS | SPLIT | AUTOCAST | PREFERENCES | SCHEDULES | OTHERS
# (layout, case) of the default suite.
FAST = {
    ("FSDP2 2", "full"),
    ("FSDP2 2", "nf4"),
    ("HSDP 2x2", "nf4"),
    ("TP 2", "lora"),
    ("CP 2", "full"),
    ("PP 2", "nf4"),
    ("FSDP2 2 x TP 2", "nf4"),
    ("TP 2", "lora dpo"),
    ("PP 2", "lora kto"),
}
STEPS, ROWS_PER_STEP = 6, 7
# A rank sums other terms than one process: fp32 rounding of a mean over some hundred targets.
LOSS = 1e-6
DEVICE, CPU = ranks.compute_device(), torch.device("cpu")
# Six documents per rank have unequal targets; 7 rows per step never divide evenly.
LENGTHS = tuple(3 + (7 * i) % 40 for i in range(2 * STEPS * ROWS_PER_STEP))
DATA = tiny.dataset(lengths=LENGTHS[: STEPS * ROWS_PER_STEP])
PAIRS = dataclasses.replace(tiny.dataset(lengths=LENGTHS), documents_per_row=2)
LABELLED = dataclasses.replace(DATA, arrays=labels_of(np.arange(DATA.num_rows) % 3 == 0))


def tolerances(dims: ParallelDims, case: Case, architecture: str) -> dict[str, float]:
    """Largest relative differences from one process that rounding in fp32 explains.

    A rank sums other terms, under tensor parallelism in every layer. fp32 gradients of this model are themselves
    off by 2.1e-6 from those in fp64 (k_proj's, differences of probabilities), which attention over other chunks
    shows, and two orders of sums are up to 3.7e-6 apart on an AMD EPYC. After the first step AdamW amplifies rounding:
    in full where second moments are tiny, as in full fine-tuning, and more where scales have 8 bits, or norms follow
    norms as in Gemma 3. Preferences take differences of documents' log-probabilities, sums of a hundred or more, to
    log-ratios of about one.
    """
    if case.optimizer == "adamw_8bit" and case.train_type == "full":
        # Blocks of other numbers have other scales, and a number that rounding moves takes another code.
        return {"loss": 5e-5, "gradients": 5e-6, "norm": 1e-6, "norms": 1e-3}
    several_axes = sum(degree > 1 for degree in dataclasses.astuple(dims)) > 1
    prefers = case.preference != "none"
    amplified = (case.double_quant and not case.view_bf16) or architecture != "llama" or prefers
    # Of an expert that few tokens reach, second moments are as small in adapters.
    tiny_moments = case.train_type == "full" or architecture in MIXTURES
    gradients = 5e-6 if several_axes else 4e-6
    return {
        "loss": 2e-6 if dims.tp > 1 else LOSS,
        "gradients": 1e-5 if prefers else gradients,
        "norm": 1e-6,
        # Interleaved stages need twice the layers, which amplify as much under 1F1B: to the same digits.
        "norms": 1e-4 if case.schedule != "1f1b" else 2e-5 if tiny_moments else 5e-6 if amplified else 1e-6,
    }


def is_refused(dims: ParallelDims, case: Case, architecture: str) -> bool:
    """Whether ranks refuse the case: blocks of scales that two tensor-parallel shards would share, experts of a dense
    model.
    """
    return (dims.tp > 1 and case.group_size == 128) or (dims.ep > 1 and architecture not in MIXTURES)


def check(figures: dict, dims: ParallelDims, device: torch.device = CPU) -> None:
    """The figures of one case are within the tolerances of its layout, or it is refused as it has to be."""
    case, architecture = CASES[figures["kind"]], figures["architecture"]
    assert ("refused" in figures) == is_refused(dims, case, architecture), figures
    if "refused" in figures:
        return
    allowed = tolerances(dims, case, architecture)
    for name, limit in allowed.items():
        assert figures[name] <= devices.tolerance(device, limit), (name, figures)


def build(
    case: Case,
    groups=process_groups.SINGLE_PROCESS,
    architecture: str = "llama",
    stages: int = 1,
    distribution: str = "ptd",
) -> Engine:
    """The engine of a tiny model, of two layers or enough for `stages`; the same weights for every world size."""
    chunks = max(stages, groups.dims.pp) * pipeline_schedule.CHUNKS[case.schedule]
    # Wide enough that half a row is a multiple of a block of scales.
    sizes = {"num_hidden_layers": max(4, chunks)} if chunks > 2 else {}
    if architecture in ("qwen2_moe", "qwen3_moe"):
        sizes["moe_intermediate_size"] = 64
    model = tiny.build(architecture, intermediate_size=128, **sizes)
    settings = dataclasses.replace(
        TrainConfig(),
        precision=case.precision + "_autocast" * (case.train_type == "full" and case.precision != "fp32"),
        lr=1e-3,
        grad_norm=0.5,
        lora_rank=4,
        use_dora=case.use_dora,
        train_type=case.train_type,
        no_sync=case.no_sync,
        router_aux_loss_coef=case.aux,
        optimizer=case.optimizer,
        use_gradient_checkpointing="true" if case.recomputed else "false",
        sharding_strategy="shard_grad_op" if case.kept else None,
        vocab_parallel="true" if case.rows else "false",
        sequence_parallel=case.split,
        preference=case.preference,
        pp_schedule=case.schedule,
    )
    model.requires_grad_(case.train_type == "full")
    if case.train_type != "full":
        add_frozen_base_and_adapters(model, case, settings, groups.device)
    if case.view_bf16:
        fsdp.view_packed_as(model, torch.bfloat16)
    model.to(groups.device)
    engine = torch_engine(model, settings, ranks=groups, distribution=distribution)
    engine.verify("auto")
    return engine


def add_frozen_base_and_adapters(model, case: Case, settings: TrainConfig, device: torch.device) -> None:
    model.to(DTYPES[case.precision])
    if case.method:
        config = quantization_wrapper.config_for(
            case.method, group_size=case.group_size, double_quant=case.double_quant
        )
        quantization_wrapper.quantize_model(model, config, linear_names(model))
        fused.quantize(model, config, list(fused.reachable(model)))
    model.to(device)
    add_adapters(model, target_names(model, "all", settings.use_dora), Adapter.of(settings))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapter_parameters(model).items():
            if name.endswith("lora_B"):
                parameter.copy_(torch.empty(parameter.shape).normal_(std=0.05, generator=generator))


def rank_batches(engine: Engine, rows) -> list:
    """This rank's microbatches of a step on these rows."""
    groups, settings = engine_access.process_groups(engine), engine.plan.settings
    mine = slice(groups.data_rank, None, groups.dims.data_ranks)
    facts = OBJECTIVES[settings.preference]
    rows_of, dataset = Data, PAIRS if facts.pairs else DATA
    if facts.labels:
        rows_of, dataset = DataWithMismatches, LABELLED
    plan = Parts(dataclasses.replace(settings, batch_layout=engine.layout, microbatch_tokens=60))
    return rows_of(None, set(), dataset, None, [], None, None).microbatches(dataset, rows, mine, plan, 0, 8)


def rows_of_step(step: int):
    return torch.arange(step * ROWS_PER_STEP, (step + 1) * ROWS_PER_STEP).numpy()


def gradients_of_next_step(engine: Engine) -> dict:
    """{parameter: gradient, gathered}, which the next optimizer step fills; None of it on ranks but the first."""
    gradients = {}

    def keep(*_):
        if gradients:
            return
        held, trainable = engine_access.local_params(engine), engine_access.trainable_params(engine)
        for name in engine_access.trainable_names(engine):
            parameter, grad = held.get(name), None
            if name in trainable:
                empty = parameter is None or parameter.grad is None
                grad = torch.zeros_like(placement.local_shard(trainable[name])) if empty else parameter.grad
            full = engine_access.gather_full(engine, name, grad)
            gradients[name] = None if full is None else full.clone()

    engine_access.optimizer(engine).register_step_pre_hook(keep)
    return gradients


def train(engine: Engine, steps: int = STEPS) -> dict:
    """Losses, norms and the first step's gradients, gathered; this rank's bytes between steps."""
    partitioned = engine_access.is_partitioned(engine)
    gradients = {} if partitioned else gradients_of_next_step(engine)
    losses, norms = [], []
    for step in range(steps):
        result = engine.train_step(rank_batches(engine, rows_of_step(step)), 1e-3)
        if partitioned and step == 0:  # AdamW's first moment is then (1 - 0.9) x the gradient
            moments = engine_access.partitioned_moments(engine)
            names = engine_access.trainable_params(engine)
            gradients |= {n: torch.from_numpy(moments[f"{n}.exp_avg"]) / 0.1 for n in names}
        losses.append(result.loss)
        norms.append(result.grad_norm)
    here = {n: p for n, p in engine.model.named_parameters() if not p.is_meta}
    held = {n: placement.local_shard(p.detach()) for n, p in here.items()}
    return dict(
        losses=losses,
        norms=norms,
        gradients=gradients,
        bytes={n: t.nbytes for n, t in held.items()},
        shapes={n: (tuple(p.shape), p.element_size()) for n, p in here.items()},
    )


def packed_in_forward(rank: int, size: int, kind: str) -> dict:
    """{'layers': number, 'different': names of those whose codes or scales differ from one process's}, in a forward."""
    groups = process_groups.ProcessGroups.of(RankEnv(rank, size), ParallelDims(dp_shard=size), DEVICE)
    engine, seen = build(CASES[kind], groups), {}
    for name, layer in layers(engine.model).items():
        keep = partial(seen.setdefault, name)
        layer.register_forward_pre_hook(
            lambda module, _, keep=keep: keep([t.clone() for t in module.stored()]) and None
        )
    engine.train_step(microbatches(DATA, range(4), engine.layout, 8, 60, 0), 1e-3)
    full = {name: layer.stored() for name, layer in layers(build(CASES[kind]).model).items()}
    different = [
        name
        for name, parts in full.items()
        if not all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(parts, seen[name], strict=True))
    ]
    return {"layers": len(seen), "different": different}


class CollectiveBytes(TorchDispatchMode):
    """Bytes that this rank puts into each kind of collective; fp64 and integers, control messages, are not counted."""

    KINDS = {
        "allgather": "all_gather",
        "all_gather": "all_gather",
        "reduce_scatter": "reduce_scatter",
        "allreduce": "all_reduce",
        "alltoall": "all_to_all",
        "all_to_all": "all_to_all",
        "send": "send",
    }
    CONTROL = (torch.float64, torch.int64, torch.bool)

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
                size = sum(t.nbytes for t in given if t.dtype not in self.CONTROL)
                self.bytes[kind] = self.bytes.get(kind, 0) + size
        return function(*args, **(kwargs or {}))


class RoutedTokens:
    """Counts the (token, expert) pairs of each expert, by hooks on the experts of a model."""

    def __init__(self, engine: Engine):
        self.modules, self.counts, self.hooks = fused.reachable(engine.model).values(), 0, []

    def __enter__(self):
        self.hooks = [module.register_forward_pre_hook(self.count) for module in self.modules]
        return self

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()

    def count(self, module, args):
        number = getattr(module, "base", module).num_experts
        self.counts = self.counts + torch.bincount(args[1].flatten(), minlength=number).double()

    def of_ranks(self, groups, runs: int) -> tuple[int, int]:
        """(pairs of this rank's tokens, pairs of all tokens of its group with this rank's experts)."""
        if not self.modules:
            return 0, 0
        index, size = groups.place("ep")
        counts = groups.all_gather_group(self.counts / runs, "ep")
        return int(counts[index].sum()), int(sum(c.chunk(size)[index].sum() for c in counts))


def filled_up(engine: Engine, batches: list) -> list:
    """With empty ones, up to the number of the rank that has most."""
    most = int(max(engine_access.process_groups(engine).all_gather_scalars([len(batches)])[:, 0]))
    return batches + [engine_access.empty_batch(engine)] * (most - len(batches))


def traffic_of(rank: int, size: int, layout: str, kind: str, architecture: str) -> list:
    """[bytes counted, bytes by the formula] of one step on this rank, from the sizes of its parameters."""
    dims, case = LAYOUTS[layout], CASES[kind]
    groups = process_groups.ProcessGroups.of(RankEnv(rank, size), dims, DEVICE)
    engine = build(case, groups, architecture)
    found = rank_batches(engine, torch.arange(ROWS_PER_STEP + 1).numpy())
    batches, facts = filled_up(engine, [b for b in found if not b.mismatched]), OBJECTIVES[case.preference]
    mismatched = [b for b in found if b.mismatched]
    runs = [filled_up(engine, mismatched)] * 2 * facts.mismatches + [batches] * facts.needs_reference
    with CollectiveBytes() as counted, RoutedTokens(engine) as routed:
        engine.train_step(mismatched + batches, 1e-3)
    config, inside, full = engine.model.config, ".layers.", case.train_type == "full"
    chunks = pipeline_schedule.CHUNKS[case.schedule]

    def padded_bytes(parameters):  # padded to rows that divide
        total = 0
        for p in parameters:
            shards = p.device_mesh.size(-1) if placement.is_sharded(p) else 1
            rows = -(-p.shape[0] // shards) * shards
            total += rows * (p.numel() // p.shape[0]) * p.element_size()
        return total

    here = {n: p for n, p in engine.model.named_parameters() if not p.is_meta}
    trainable, partial_names = engine_access.trainable_params(engine), engine_access.tp_partial(engine)
    in_experts = {n for n in here if dims.ep > 1 and ".experts." in n}
    ends = {n: p for n, p in here.items() if case.rows and ("embed_tokens" in n or "lm_head" in n)}

    def most(counts):  # of all ranks of the shard group, per microbatch
        return int(groups.all_gather_scalars(counts)[dims.group(rank, "dp_shard", "cp")].max(0).sum())

    def tokens_of(parts):
        return tuple(dims.cp * engine_access.microbatch_shape(engine, b)[1] for b in parts)

    def targets_of(parts):
        return sum(engine_access.num_targets(engine, b) for b in parts)

    routed, arrived = routed.of_ranks(groups, 2 if case.recomputed else 1)
    work = communication.StepTraffic(
        layers=padded_bytes(p for n, p in here.items() if inside in n and n not in in_experts),
        experts=padded_bytes(here[n] for n in in_experts),
        trained_experts=padded_bytes(trainable[n] for n in in_experts if n in trainable),
        routed=routed,
        arrived=arrived,
        shared_experts=sum(n.endswith("shared_expert") for n, _ in engine.model.named_modules()),
        attention_is_sliced=config.model_type not in model_shape.WITHOUT_TP_PLAN,
        outside=padded_bytes(p for n, p in here.items() if inside not in n and n not in ends),
        trained=padded_bytes(p for n, p in trainable.items() if n not in in_experts and n not in ends),
        tokens=tokens_of(batches),
        num_layers=sum(map(len, pipeline.layers_of_chunks(engine.model, dims.pp, chunks)[groups.coordinate("pp")])),
        chunks=chunks,
        hidden_size=config.hidden_size,
        key_value_width=2 * config.num_key_value_heads * config.hidden_size // config.num_attention_heads,
        partial=padded_bytes(p for n, p in trainable.items() if n in partial_names),
        targets=targets_of(batches),
        passes=communication.Passes(tuple(map(tokens_of, runs)), sum(map(targets_of, runs))),
        documents=facts.is_preference * sum(max(1, len(b.rows)) for part in (batches, *runs) for b in part),
        logits_twice=facts.is_preference and full,
        tied=4 * config.hidden_size * len(engine.model.lm_head.weight) if full and config.tie_word_embeddings else 0,
        element=2 if case.precision == "bf16" else 4,
        residual=2 if case.precision == "bf16" and not full else 4,
        sequence_parallel=case.split,
        vocab_parallel=case.rows,
        trained_ends=padded_bytes(ends.values()) if full else 0,
        most_positions=most([math.prod(engine_access.microbatch_shape(engine, b)) for b in batches]) * case.rows,
        most_targets=most([engine_access.num_targets(engine, b) for b in batches]) * case.rows,
        first_is_frozen=not full,
        no_sync=case.no_sync,
        keeps_gathered=case.kept,
        recomputed=case.recomputed,
    )
    return [
        {k: n for k, n in counted.bytes.items() if n},
        communication.bytes_per_step(dims, work, groups.coordinate("pp")),
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
    """Bytes this rank may hold of each parameter: those of its ceil(rows / N) rows."""
    out = {}
    for name, (shape, size) in result["shapes"].items():
        rows = ranks.local_rows(shape[0], "expert_shard" if ranks.dims.ep > 1 and ".experts." in name else "shard")
        out[name] = (rows.stop - rows.start) * size * torch.Size(shape[1:]).numel()
    return out


def accelerated(rank: int, size: int, method: str, kinds: list, architecture: str = "llama") -> list[dict]:
    """Figures of each case with accelerate's `method`; called in every rank."""
    from accelerate.state import AcceleratorState

    figures = []
    for kind in kinds:
        AcceleratorState._reset_state(reset_partial_state=True)  # accelerate allows one way per process
        # First, as ZeRO-3 changes how later models of the process are built.
        one = train(build(CASES[kind], architecture=architecture)) if rank == 0 else None
        groups = process_groups.ProcessGroups.of(RankEnv(rank, size), ParallelDims(dp_replicate=size), DEVICE)
        many = train(build(CASES[kind], groups, architecture, distribution=method))
        found = {"layout": method, "kind": kind, "architecture": architecture}
        if rank == 0:
            found |= compare(one, many)
        figures.append(found)
    return figures


def matrix(rank: int, size: int, wanted: list) -> list[dict]:
    """Figures of each (layout, case, architecture); called in every rank. The first alone runs one process's steps."""
    figures = []
    for layout, kind, architecture in ranks.each_in_groups_of_its_own(rank, size, wanted):
        dims = LAYOUTS[layout]
        groups = process_groups.ProcessGroups.of(RankEnv(rank, size), dims, DEVICE)
        found = {"layout": layout, "kind": kind, "architecture": architecture}
        try:
            many = train(build(CASES[kind], groups, architecture))
        except PlanError as error:  # on every rank
            figures.append(found | {"refused": str(error)})
            continue
        found["bytes"] = many["bytes"] == expected_bytes(many, groups)
        found["held"] = sum(many["bytes"].values())
        if rank == 0:
            one = build(CASES[kind], architecture=architecture, stages=dims.pp)
            alone = train(one)
            found |= compare(alone, many) | {"share": found["held"] / sum(alone["bytes"].values())}
        figures.append(found)
    return figures


STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
KINDS_OF_TRAINING = {
    "full": Case("full"),
    "lora": Case("lora"),
    "affine": Case(method="mlx"),
    "nf4": Case(method="nf4"),
}


def strategies(rank: int, size: int, wanted: list) -> list[dict]:
    """Figures of each (strategy, precision, kind) on the ranks' device against one process on the CPU."""
    figures = []
    for strategy, precision, kind in ranks.each_in_groups_of_its_own(rank, size, wanted):
        case = dataclasses.replace(KINDS_OF_TRAINING[kind], precision=precision, kept=strategy == "SHARD_GRAD_OP")
        dims = ParallelDims(dp_replicate=size) if strategy == "NO_SHARD" else ParallelDims(dp_shard=size)
        groups = process_groups.ProcessGroups(device=DEVICE)
        if size > 1:
            groups = process_groups.ProcessGroups.of(RankEnv(rank, size), dims, DEVICE)
        many, found = train(build(case, groups)), {"cell": [strategy, precision, kind]}
        found["losses"], found["norms of steps"] = many["losses"], many["norms"]
        found["bytes"] = size == 1 or many["bytes"] == expected_bytes(many, groups)
        figures.append(found | (compare(train(build(case)), many) if rank == 0 else {}))
    return figures


def check_strategy(figures: dict) -> None:
    """fp32 as every layout of ranks. In 16 bits a rank's microbatches have other shapes than one process's, so products
    round elsewhere: to 2^-11 in fp16, and eight times that in bf16.
    """
    assert figures["bytes"], figures
    if "loss" not in figures:
        return
    loss, gradients, norm = {"fp32": (LOSS, 2e-6, 1e-6), "fp16": (1e-4, 2e-2, 2e-3), "bf16": (8e-4, 0.16, 3e-2)}[
        figures["cell"][1]
    ]
    assert figures["loss"] <= loss and figures["gradients"] <= gradients and figures["norm"] <= norm, figures


def bytes_of_a_step(rank: int, size: int, recomputed: bool, kind: str) -> dict:
    """Exact bytes on the emulated device: [live after a step, peak in it] per step; what this rank holds of the model,
    its moments, the full model, its largest unit.
    """
    import gc

    from tests.support import emulated_device

    device = emulated_device.extension()
    before = device.live_bytes()
    groups = process_groups.ProcessGroups.of(RankEnv(rank, size), ParallelDims(dp_shard=size), DEVICE)
    case = dataclasses.replace(KINDS_OF_TRAINING[kind], recomputed=recomputed)
    engine = build(case, groups, stages=4)
    live = []
    batches = rank_batches(engine, torch.arange(size).numpy())  # one row per rank: activations are small
    for _ in range(3):
        gc.collect()
        device.reset_peak()
        engine.train_step(batches, 1e-3)
        gc.collect()
        live.append([device.live_bytes() - before, device.peak_bytes() - before])
    held = sum(placement.local_shard(p.detach()).nbytes for p in engine.model.parameters())
    moments = sum(t.nbytes for s in engine_access.optimizer(engine).state.values() for t in s.values() if t.dim())
    full = sum(p.numel() * p.element_size() for p in engine.model.parameters())
    buffers = sum(b.nbytes for b in engine.model.buffers())
    unit = max(
        sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in fsdp.decoder_layers(engine.model)
    )
    return {"live": live, "held": held + buffers, "moments": moments, "full": full, "unit": unit}


def completed_device(rank: int, size: int) -> dict:
    """What the emulated device lacks, what was installed, what a second installation adds; MPS's operators before and
    after; whether checkpointing asks the device for its random state, without the pieces and with them.
    """
    from torch.utils.checkpoint import checkpoint

    from finetune.torch_engine.parallel import device_shims
    from tests.support import emulated_device

    emulated_device.load()
    module, asked, restores = torch.get_device_module(emulated_device.NAME), [], []
    state = module.get_rng_state
    module.get_rng_state = lambda *a, **k: asked.append(True) or state()
    x = torch.ones(4, device=emulated_device.NAME, requires_grad=True)
    found = {"missing": device_shims.missing_pieces(emulated_device.NAME)}
    for install in (list, lambda: device_shims.install(emulated_device.NAME)):
        found["installed"] = install()
        asked.clear()
        checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
        restores.append(bool(asked))
    found |= {"again": device_shims.install_pieces(emulated_device.NAME), "restores random state": restores}
    operators = [device_shims.install_operators(torch.mps, "MPS"), device_shims.missing_operators("MPS")]
    return found | {"operators": operators}
