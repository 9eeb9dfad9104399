"""Cases of loading by several ranks: each reads its rows, against the model loaded in full and then sharded."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from finetune.config import TrainConfig
from finetune.distributed.env import RankEnv
from finetune.estimate import memory
from finetune.estimate.model_cost import MicrobatchShape
from finetune.estimate.model_shape import ModelShape, read_headers
from finetune.model_files.files import find_model
from finetune.parts.parts import Parts
from finetune.quantizers.linear import QuantizedLinear
from finetune.torch_engine import memory_stats
from finetune.torch_engine.parallel import placement, process_groups
from finetune.torch_engine.weights.local_shards import LocalShards
from tests.support import cases, engine_access
from tests.support.build import load_model, torch_engine
from tests.support.ranks import each_in_groups_of_its_own

CPU = cases.DEVICE


@dataclass(frozen=True)
class LoadingCase:
    """What trains, how its base is stored, and where weights are kept."""

    train_type: str = "qlora"
    method: str | None = None
    n_bits: int | None = None
    double_quant: bool = False
    group_size: int = 32
    use_dora: bool = False
    embedding: bool = False
    bf16: bool = False
    # The folder is already quantized; the method is the one its config.json names.
    stored: bool = False
    # Weights kept in host memory, against the same on the device.
    offloaded: bool = False
    # Offloaded weights that every rank reads in full.
    read_full: bool = False
    # How adapters start: a word of --init_lora_weights.
    init: str = "default"

    @property
    def id(self) -> str:
        words = ["stored"] if self.stored else ["dora"] * self.use_dora * (not self.embedding)
        if not self.stored and (self.method or not self.use_dora or self.embedding):
            words += [self.method or self.train_type]
        words += [str(self.n_bits)] * bool(self.n_bits) + ["double"] * self.double_quant
        words += ["across rows"] * (self.group_size == 128) + ["embedding"] * self.embedding + ["bf16"] * self.bf16
        words += [self.init] * (self.init != "default")
        return " ".join(words + ["offloaded"] * self.offloaded + ["whole"] * self.read_full)

    def settings(self, folder: Path) -> TrainConfig:
        quantized = dict(quantization_backend=self.method, double_quant=self.double_quant, n_bits=self.n_bits)
        found = dict(
            lr=1e-3,
            grad_norm=0.5,
            lora_rank=4,
            cache_dequantized="false",
            lora_target_modules="embed_tokens,q_proj" if self.embedding else "all",
            precision="bf16" if self.bf16 else "fp32",
            use_gradient_checkpointing="false",
            use_dora=self.use_dora,
            group_size=self.group_size,
            train_type=self.train_type,
            quant_type=None,
            init_lora_weights=self.init,
        )
        found |= {name: value for name, value in quantized.items() if value}
        return dataclasses.replace(TrainConfig(), **(found | find_model(str(folder)).stored if self.stored else found))


def by_id(*cases: LoadingCase) -> dict[str, LoadingCase]:
    return {case.id: case for case in cases}


CASES = by_id(
    LoadingCase("full"),
    LoadingCase("lora"),
    LoadingCase("lora", use_dora=True),
    LoadingCase(method="nf4"),
    LoadingCase(method="nf4", double_quant=True),
    LoadingCase(method="bnb"),
    LoadingCase(method="bnb", double_quant=True),
    LoadingCase(method="bnb", group_size=128),
    LoadingCase(method="bnb", n_bits=8),
    LoadingCase(method="hqq"),
    LoadingCase(method="quanto"),
    LoadingCase(method="quanto", n_bits=8),
    LoadingCase(method="mlx"),
    LoadingCase(method="mlx", n_bits=3),
    LoadingCase(method="hqq", use_dora=True),
    LoadingCase(method="bnb", group_size=128, use_dora=True),
    LoadingCase("lora", use_dora=True, embedding=True),
    LoadingCase("lora", bf16=True),
)
OFFLOADED = by_id(
    LoadingCase("full", offloaded=True),
    LoadingCase("lora", use_dora=True, offloaded=True),
    LoadingCase(method="nf4", offloaded=True),
    LoadingCase(method="nf4", offloaded=True, read_full=True),
)
STORED = LoadingCase(stored=True)
# Adapters whose product is subtracted from full matrices before those are quantized.
RESIDUAL = by_id(
    LoadingCase("lora", init="pissa"),
    LoadingCase("lora", use_dora=True, init="olora"),
    LoadingCase(method="nf4", init="pissa"),
    LoadingCase(method="hqq", init="olora"),
    LoadingCase(method="nf4", init="loftq"),
)
BY_ID = CASES | OFFLOADED | RESIDUAL | by_id(STORED)


def bits(tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def loading(rank: int, size: int, wanted: list) -> list[dict]:
    """{case, and by name whether it is equal} of each (layout, case, folder); called in every rank."""
    found = []
    for layout, kind, folder in each_in_groups_of_its_own(rank, size, wanted):
        case = BY_ID[kind]
        ranks = process_groups.ProcessGroups.of(RankEnv(rank, size), cases.LAYOUTS[layout], CPU)
        settings = case.settings(folder)
        model = load_model(folder, settings, CPU, say=lambda line: None)
        full = torch_engine(model, settings, CPU, ranks=ranks)
        settings = dataclasses.replace(settings, use_cpu_offload=case.offloaded)
        share = None if case.read_full else LocalShards.of(ranks, Parts(settings))
        model = load_model(folder, settings, CPU, share=share, say=lambda line: None)
        on_meta = case.read_full or all(p.is_meta or p.ndim == 0 for p in model.parameters())
        kept = sum(t.nbytes for t in share.kept.values()) if share else None
        own = torch_engine(model, settings, CPU, ranks=ranks, share=share)
        assert share is None or not share.kept and not share.made
        result = {"case": f"{layout}, {kind}, {Path(folder).name}", "on_meta": on_meta}
        one, two = (trained_or_here(engine.model) for engine in (full, own))
        result["names"] = list(one) == list(two)
        result["different"] = different_parameters(one, two)
        result["tied"] = len(set(one.values())) == len(set(two.values()))
        one, two = (dict(e.model.named_buffers()) for e in (full, own))
        result["buffers"] = one.keys() == two.keys() and all(torch.equal(bits(two[n]), bits(one[n])) for n in one)
        base = {n: p for n, p in own.model.named_parameters() if p.ndim and ".lora_" not in n and not p.is_meta}
        held = {n: placement.local_shard(p.detach()).nbytes for n, p in base.items()}  # adapters are made when taken
        result["bytes"] = case.read_full or kept == sum(held.values())
        trained = []
        for engine in (full, own):
            torch.manual_seed(rank)
            engine.verify("auto")
            trained.append(cases.train(engine, 2))
        result["losses"] = trained[0]["losses"] == trained[1]["losses"]
        result["norms"] = trained[0]["norms"] == trained[1]["norms"]
        one, two = (trained[i]["gradients"] for i in (0, 1))
        result["gradients"] = all(torch.equal(one[n], two[n]) for n in one if one[n] is not None)
        found.append(result)
    return found


def trained_or_here(model) -> dict:
    """{name: parameter} of those that train, and of those that this rank's pipeline stage holds."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: p for name, p in named if p.requires_grad or not p.is_meta}


def different_parameters(one: dict, two: dict) -> list[str]:
    """Names of parameters whose type, shape or local shard differs."""
    different = []
    for name, theirs in one.items():
        mine = two[name]
        same = (mine.dtype, mine.shape, mine.requires_grad) == (theirs.dtype, theirs.shape, theirs.requires_grad)
        if mine.is_meta and theirs.is_meta:
            continue
        rows, others = placement.local_shard(mine), placement.local_shard(theirs)
        if not (same and rows.shape == others.shape and torch.equal(bits(rows), bits(others))):
            different.append(name)
    return different


def filling_of_views(model) -> int:
    """Bytes that fill up this rank's odd rows where torch shards no integers, so that they are viewed as bf16:
    0 from torch 2.12.
    """
    total = 0
    for module in model.modules():
        for name, (_, width) in module.viewed.items() if isinstance(module, QuantizedLinear) else ():
            rows = placement.local_shard(getattr(module, name))
            total += rows.nbytes - rows[..., 0].numel() * width
    return total


def own_bytes(rank: int, size: int, wanted: list) -> list[dict]:
    """{case, predicted, measured} bytes by item after one step of each (layout, case, folder); called in every rank."""
    found = []
    for layout, kind, folder in each_in_groups_of_its_own(rank, size, wanted):
        dims = cases.LAYOUTS[layout]
        ranks, settings = process_groups.ProcessGroups.of(RankEnv(rank, size), dims, CPU), BY_ID[kind].settings(folder)
        share = LocalShards.of(ranks, Parts(settings))
        model = load_model(folder, settings, CPU, share=share, say=lambda line: None)
        engine = torch_engine(model, settings, CPU, ranks=ranks, share=share)
        engine.verify("auto")
        cases.train(engine, 1)
        measured = engine.memory().items
        measured["base"] = measured.get("base", 0) - memory_stats.storage_bytes(model.buffers())
        measured["base"] -= filling_of_views(model)
        measured["optimizer"] -= sum(state["step"].nbytes for state in engine_access.optimizer(engine).state.values())
        config = json.loads((Path(folder) / "config.json").read_text())
        shape = ModelShape.from_config(config, read_headers(sorted(Path(folder).glob("*.safetensors"))))
        load = MicrobatchShape.full_rows(1, 64)
        predicted = memory.estimate(Parts(settings), shape, load, ranks=dims.dp_shard)["items"]
        items = ("base", "trainable", "gradients", "optimizer")
        one, two = ({name: i.get(name, 0) for name in items} for i in (predicted, measured))
        found.append({"case": f"{kind}, {Path(folder).name}", "predicted": one, "measured": two})
    return found
