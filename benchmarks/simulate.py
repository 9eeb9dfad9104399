"""A step of one rank of many, simulated: the engine's own load, wrap and step on tensors without values.

    python benchmarks/simulate.py llama-70b --train_type qlora --ranks 8
    python benchmarks/simulate.py deepseek-v3 --train_type lora --ranks 64
    python benchmarks/simulate.py llama-8b --ranks 8 --cp 8 --length 131072
    python benchmarks/simulate.py --table                    every cell of CELLS beside the estimate, each a process
    python benchmarks/simulate.py --planned llama-70b --train_type qlora --device rtx4090 --ranks 2

torch's fake process group answers for the other ranks, and fake tensors on a device that no machine has stand for the
GPU's: torch built for CPUs has no device guard for CUDA, and one for a device defined in Python. On it kernels count
as working, as they do on meta. Weights are those of the config; each rank's part is found and quantized by the code
that reads files. The optimizer steps, by torch's fused kernel; gradients are not clipped: the host reads their norm.

Per cell: peak bytes of a step after the first one, by item; bytes passed to each collective; operations that a GPU
would launch; times that the host waits for the device. Routers are balanced.

What does not run on tensors without values: --pp_degree (a stage learns from the others which type hidden states have),
--ep_degree (how many tokens arrive from which rank is a value), the layouts' checks before step 1, gradient clipping,
generation.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
GIB = 2**30

LLAMA = dict(
    model_type="llama", vocab_size=128256, num_key_value_heads=8, max_position_embeddings=8192, rms_norm_eps=1e-5
)
MODELS = {
    "llama-8b": LLAMA
    | dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32)
    | dict(tie_word_embeddings=False),
    "llama-70b": LLAMA
    | dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64)
    | dict(tie_word_embeddings=False),
    "llama-405b": LLAMA
    | dict(hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128)
    | dict(tie_word_embeddings=False),
    "qwen3-235b": dict(
        model_type="qwen3_moe",
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        moe_intermediate_size=1536,
        num_experts=128,
        num_experts_per_tok=8,
        num_hidden_layers=94,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        tie_word_embeddings=False,
        max_position_embeddings=40960,
    ),
    "mixtral-8x22b": dict(
        model_type="mixtral",
        vocab_size=32768,
        hidden_size=6144,
        intermediate_size=16384,
        num_local_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=56,
        num_attention_heads=48,
        num_key_value_heads=8,
        sliding_window=None,
        tie_word_embeddings=False,
        max_position_embeddings=65536,
    ),
    "deepseek-v3": dict(
        model_type="deepseek_v3",
        vocab_size=129280,
        hidden_size=7168,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        num_hidden_layers=61,
        num_attention_heads=128,
        num_key_value_heads=128,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        first_k_dense_replace=3,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        tie_word_embeddings=False,
        max_position_embeddings=4096,
    ),
    "mamba2-7b": dict(
        model_type="mamba2",
        vocab_size=32768,
        hidden_size=4096,
        num_hidden_layers=64,
        state_size=128,
        num_heads=128,
        head_dim=64,
        n_groups=8,
        chunk_size=256,
        tie_word_embeddings=False,
    ),
    "jamba-mini": dict(
        model_type="jamba",
        vocab_size=65536,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_experts=16,
        num_experts_per_tok=2,
        attn_layer_period=8,
        attn_layer_offset=4,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=16,
        tie_word_embeddings=False,
    ),
}
DENSE = ("llama-8b", "llama-70b", "llama-405b")
LIMITS = {True: 0.05, False: 0.10}  # of the simulated peak, for dense models and for the others


@dataclasses.dataclass(frozen=True)
class Cell:
    """`length` tokens of each of `rows` rows per forward; degrees as ParallelDims has them."""

    model: str
    train_type: str
    ranks: int = 1
    tp: int = 1
    ep: int = 1
    cp: int = 1
    replicas: int = 1
    rows: int = 1
    length: int = 2048
    recompute: bool = True

    def __str__(self) -> str:
        degrees = [f"{n} {getattr(self, n)}" for n in ("tp", "ep", "cp", "replicas") if getattr(self, n) > 1]
        kept = "" if self.recompute else "no recomputation"
        tokens = f"{self.rows} x {self.length}"
        return ", ".join(filter(None, [self.model, self.train_type, f"{self.ranks} ranks", *degrees, tokens, kept]))

    @property
    def shards(self) -> int:
        return self.ranks // self.tp // self.cp // self.replicas


def cells() -> list[Cell]:
    found = [Cell("llama-8b", k, n) for k in ("full", "lora", "qlora") for n in (1, 2, 8, 64)]
    found += [Cell("llama-8b", k, n, recompute=False) for k in ("full", "lora", "qlora") for n in (1, 8)]
    found += [Cell("llama-70b", "qlora", n) for n in (1, 2, 8)]
    found += [Cell("llama-70b", k, n) for k in ("full", "lora") for n in (8, 64, 1024)]
    found += [Cell("llama-70b", k, 16, tp=4) for k in ("full", "lora", "qlora")]
    found += [Cell("llama-70b", "lora", 64, tp=8), Cell("llama-70b", "full", 1024, tp=8, replicas=2)]
    found += [Cell("llama-405b", "qlora", n) for n in (8, 64)] + [Cell("llama-405b", "lora", n) for n in (64, 1024)]
    found += [Cell("llama-405b", "full", 1024), Cell("llama-405b", "qlora", 64, tp=8)]
    for name in ("qwen3-235b", "mixtral-8x22b", "deepseek-v3"):
        found += [Cell(name, k, n) for k in ("lora", "qlora") for n in (16, 64)]
        found += [Cell(name, "full", 256)]
    found += [Cell("mamba2-7b", k, n) for k in ("full", "lora", "qlora") for n in (1, 8)]
    found += [Cell("llama-8b", "lora", 8, cp=8, length=131072), Cell("llama-8b", "qlora", 8, cp=4, length=65536)]
    found += [Cell("llama-70b", "qlora", 16, cp=8, tp=2, length=131072)]
    found += [Cell("jamba-mini", k, n, length=256) for k in ("lora", "qlora") for n in (8, 64)]
    return found


def settings_of(cell: Cell):
    """TrainConfig of a cell."""
    from finetune.config import TrainConfig

    quantized = dict(quantization_backend="nf4", quant_type="nf4") if cell.train_type == "qlora" else {}
    return dataclasses.replace(
        TrainConfig(quantization_backend="none"),
        train_type=cell.train_type,
        precision="bf16_autocast" if cell.train_type == "full" else "bf16",
        use_gradient_checkpointing="true" if cell.recompute else "false",
        cache_dequantized="false",
        batch_size=cell.rows,
        microbatch_tokens=cell.rows * cell.length,
        context_length=cell.length,
        dp_degree=cell.replicas,
        dp_shards=cell.shards,
        tp_degree=cell.tp,
        ep_degree=cell.ep,
        cp_degree=cell.cp,
        optimizer="adamw",
        lr=1e-4,
        **quantized,
    )


def dims_of(cell: Cell):
    from finetune.parts.parallel_dims import ParallelDims

    return ParallelDims(cell.replicas, cell.shards, cell.cp, cell.tp, 1, cell.ep)


def predicted(cell: Cell) -> dict:
    """What the estimate says: {"total", "items"}, without what a process holds beside its tensors."""
    from finetune.estimate import budget, communication
    from finetune.estimate.model_shape import ModelShape
    from finetune.estimate.traced import Tracer
    from finetune.parts.parallel_dims import ParallelDims
    from finetune.parts.parts import Parts

    shape = ModelShape.from_config(MODELS[cell.model])
    plan = Parts(settings_of(cell), dims_of(cell))
    if shape.outside or not shape.linears:
        folder = Path(tempfile.gettempdir()) / "simulated" / cell.model
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(MODELS[cell.model]))
        shape = dataclasses.replace(shape, tracer=Tracer(str(folder)))
    dims: ParallelDims = dims_of(cell)
    room = budget.MemoryBudget(0, "cuda", dims.shards, dims)
    microbatch = budget.full_microbatch(plan)
    assert shape.known is not None, (cell, shape.tracer and shape.tracer.error)
    found = budget.predicted(plan, shape.known, room, microbatch)
    items = {name: n for name, n in found["items"].items() if name not in ("libraries", "snapshot")}
    sent = communication.bytes_per_step(dims, communication.traffic_of(plan, shape.known, dims, microbatch))
    return {"total": sum(items.values()), "items": items, "collectives": sent}


def simulated(cell: Cell, config: dict | None = None) -> dict:
    """The result of a process of its own. `config`: of the model, if it is not that of MODELS."""
    words = [json.dumps(vars(cell)), json.dumps(config or MODELS[cell.model])]
    argv = [sys.executable, "-W", "ignore", "-m", "benchmarks.simulated_rank", *words]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["?"])[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])


def line(cell: Cell, found: dict, said: dict) -> str:
    if "error" in found:
        return f"{cell}: {found['error']}"
    off = said["total"] / found["peak"] - 1
    mark = "" if abs(off) <= LIMITS[cell.model in DENSE] else "  <-- outside"
    sent = {n: round(size / 2**20) for n, size in found["collectives"].items()}
    ours = {n: round(size / 2**20) for n, size in said["collectives"].items()}
    items = " ".join(f"{n} {said['items'].get(n, 0) / GIB:.2f}/{size / GIB:.2f}" for n, size in found["items"].items())
    totals = f"{said['total'] / GIB:.2f}/{found['peak'] / GIB:.2f} GiB {off:+.1%}{mark}"
    return (
        f"{cell}: {totals} | {items} | MiB {ours}/{sent} | "
        f"{found['launches']:,} launches, {found['waits']} waits, {found['seconds']:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", choices=[*MODELS])
    for name, default in (("train_type", "lora"),):
        parser.add_argument(f"--{name}", default=default)
    for name in ("ranks", "tp", "ep", "cp", "replicas", "rows"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--no_recompute", action="store_true")
    parser.add_argument("--table", action="store_true", help="every cell")
    parser.add_argument("--only", default="", help="cells whose name holds this text")
    parser.add_argument("--out", type=Path, default=Path("simulate.jsonl"), help="results of --table, kept")
    args = parser.parse_args()
    if not args.table:
        how = {n: getattr(args, n) for n in ("train_type", "ranks", "tp", "ep", "cp", "replicas", "rows", "length")}
        cell = Cell(args.model, **how, recompute=not args.no_recompute)
        print(line(cell, simulated(cell), predicted(cell)))
        return
    known = {}
    if args.out.exists():
        known = {json.dumps(c): found for c, found in map(json.loads, args.out.read_text().splitlines())}
    for cell in cells():
        if args.only in str(cell):
            key = json.dumps(vars(cell))
            if key not in known or "error" in known[key]:
                known[key] = simulated(cell)
                with args.out.open("a") as file:
                    file.write(json.dumps([vars(cell), known[key]]) + "\n")
            print(line(cell, known[key], predicted(cell)), flush=True)


if __name__ == "__main__":
    main()
