"""One cell of loading by several ranks: each reads its own rows, against the same model loaded whole and cut after."""

import dataclasses
import json
from pathlib import Path

import torch

from finetune.config import TrainConfig
from finetune.distributed.env import RankEnv
from finetune.estimate import memory
from finetune.estimate.model_cost import MicrobatchShape
from finetune.estimate.model_shape import ModelShape, read_headers
from finetune.model_files.files import find_model
from finetune.torch_engine import memory_stats
from finetune.torch_engine.engine import TorchEngine
from finetune.torch_engine.load import load_model
from finetune.torch_engine.local_shards import LocalShards
from finetune.torch_engine.parallel import fsdp, process_groups
from tests.support import cases as cells

CPU = cells.CPU
QUANTIZED = {
    "nf4": dict(quantization_backend="nf4"),
    "nf4 double": dict(quantization_backend="nf4", double_quant=True),
    "bnb": dict(quantization_backend="bnb"),
    "bnb double": dict(quantization_backend="bnb", double_quant=True),
    "bnb across rows": dict(quantization_backend="bnb", group_size=128),
    "bnb 8": dict(quantization_backend="bnb", n_bits=8),
    "hqq": dict(quantization_backend="hqq"),
    "quanto": dict(quantization_backend="quanto"),
    "quanto 8": dict(quantization_backend="quanto", n_bits=8),
    "mlx": dict(quantization_backend="mlx"),
    "mlx 3": dict(quantization_backend="mlx", n_bits=3),
}
KINDS = ("full", "lora", "dora", *QUANTIZED, "dora hqq", "dora bnb across rows", "lora embedding", "lora bf16")
OFFLOADED = (  # against the same on the device
    "full offloaded",
    "dora offloaded",
    "nf4 offloaded",
    "nf4 offloaded whole",
)


def settings_of(kind: str, folder) -> TrainConfig:
    words = dict(lr=1e-3, grad_norm=0.5, lora_rank=4, cache_dequantized="false", lora_target_modules="all")
    words |= dict(precision="bf16" if kind.endswith("bf16") else "fp32", use_gradient_checkpointing="false")
    words |= dict(use_dora=kind.startswith("dora"), group_size=32, train_type="qlora", quant_type=None)
    method = kind.removeprefix("dora ")
    if kind == "stored":
        words |= find_model(str(folder)).stored
    elif method in QUANTIZED:
        words |= QUANTIZED[method]
    else:
        words |= dict(train_type="full" if kind == "full" else "lora")
    if kind == "lora embedding":
        words |= dict(lora_target_modules="embed_tokens,q_proj", use_dora=True)
    return dataclasses.replace(TrainConfig(), **words)


def bits(tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def loading(rank: int, size: int, wanted: list) -> list[dict]:
    """{layout, kind, folder, and whether each thing is equal} of each (layout, kind, folder); called in every rank."""
    found = []
    for layout, kind, folder in wanted:
        ranks = process_groups.ProcessGroups.of(RankEnv(rank, size), cells.LAYOUTS[layout], CPU)
        offloaded, read_whole = "offloaded" in kind, kind.endswith("whole")
        settings = settings_of(kind.partition(" offloaded")[0], folder)
        model = load_model(folder, settings, CPU, say=lambda line: None)
        whole = TorchEngine(model, settings, CPU, ranks=ranks)
        settings = dataclasses.replace(settings, use_cpu_offload=offloaded)
        share = None if read_whole else LocalShards.of(ranks, settings, CPU)
        model = load_model(folder, settings, CPU, share=share, say=lambda line: None)
        on_meta = read_whole or all(p.is_meta or p.ndim == 0 for p in model.parameters())
        kept = sum(t.nbytes for t in share.kept.values()) if share else None
        own = TorchEngine(model, settings, CPU, ranks=ranks, share=share)
        assert share is None or not share.kept
        result = {"cell": f"{layout}, {kind}, {Path(folder).name}", "on meta": on_meta}
        one, two = (dict(e.model.named_parameters(remove_duplicate=False)) for e in (whole, own))
        result["names"] = list(one) == list(two)
        different = []
        for name, theirs in one.items():
            mine = two[name]
            same = (mine.dtype, mine.shape, mine.requires_grad) == (theirs.dtype, theirs.shape, theirs.requires_grad)
            rows, others = fsdp.local_shard(mine), fsdp.local_shard(theirs)
            if not (same and rows.shape == others.shape and torch.equal(bits(rows), bits(others))):
                different.append(name)
        result["different"] = different
        result["tied"] = len(set(one.values())) == len(set(two.values()))
        one, two = (dict(e.model.named_buffers()) for e in (whole, own))
        result["buffers"] = one.keys() == two.keys() and all(torch.equal(bits(two[n]), bits(one[n])) for n in one)
        engines = [whole, own]
        held = {n: fsdp.local_shard(p.detach()).nbytes for n, p in own.model.named_parameters() if p.ndim}
        result["bytes"] = read_whole or kept == sum(held.values())
        trained = []
        for engine in engines:
            torch.manual_seed(rank)
            engine.verify("auto")
            trained.append(cells.train(engine, 2))
        result["losses"] = trained[0]["losses"] == trained[1]["losses"]
        result["norms"] = trained[0]["norms"] == trained[1]["norms"]
        one, two = (trained[i]["gradients"] for i in (0, 1))
        result["gradients"] = all(torch.equal(one[n], two[n]) for n in one)
        found.append(result)
    return found


def own_bytes(rank: int, size: int, wanted: list) -> list[dict]:
    """{kind, predicted, measured} bytes by item after one step, of each (layout, kind, folder); called in every rank."""
    found = []
    for layout, kind, folder in wanted:
        dims = cells.LAYOUTS[layout]
        ranks, settings = process_groups.ProcessGroups.of(RankEnv(rank, size), dims, CPU), settings_of(kind, folder)
        share = LocalShards.of(ranks, settings, CPU)
        model = load_model(folder, settings, CPU, share=share, say=lambda line: None)
        engine = TorchEngine(model, settings, CPU, ranks=ranks, share=share)
        engine.verify("auto")
        cells.train(engine, 1)
        measured = engine.memory().items
        measured["base"] = measured.get("base", 0) - memory_stats.storage_bytes(model.buffers())
        measured["optimizer"] -= sum(state["step"].nbytes for state in engine.optimizer.state.values())
        config = json.loads((Path(folder) / "config.json").read_text())
        shape = ModelShape.from_config(config, read_headers(sorted(Path(folder).glob("*.safetensors"))))
        load = MicrobatchShape.full_rows(1, 64)
        predicted = memory.estimate(settings, shape, load, ranks=dims.dp_shard)["items"]
        items = ("base", "trainable", "gradients", "optimizer")
        one, two = ({name: i.get(name, 0) for name in items} for i in (predicted, measured))
        found.append({"cell": f"{kind}, {Path(folder).name}", "predicted": one, "measured": two})
    return found
