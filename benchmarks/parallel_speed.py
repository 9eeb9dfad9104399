"""Time of a step on several ranks against one process, and against accelerate on the same work, interleaved in one run.

    python benchmarks/parallel_speed.py              2 ranks: DDP, FSDP2, tensor, context, pipeline; accelerate's DDP
    python benchmarks/parallel_speed.py --ranks 4    the growth to 4
    python benchmarks/parallel_speed.py --paper      steps on 8 GPUs and 16 hosts from the bytes that ranks send

The work: LoRA on a Llama of 6 layers x 512 in fp32, 16 rows of 128 tokens per step, one compute thread per rank. Each
method has its own processes, which take turns step by step, so that what else runs on the machine falls on all alike.
speed: the median over rounds of one process's seconds over the method's, with the least and the most; n rounds.
accelerate's is the loop that its own examples write: prepare a peft model and AdamW, mean loss of the padded batch,
accelerator.backward. accelerate has no FSDP on a CPU.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from finetune.parts.parts import Parts  # noqa: E402
from finetune.parts.trains import Adapter  # noqa: E402

ROWS, LENGTH, VOCAB = 16, 128, 2048
MODEL = dict(
    vocab_size=VOCAB,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=512,
    pad_token_id=0,
)
METHODS = {
    "one process": (1, {}),
    "DDP": (0, dict(dp_replicate=0)),
    "FSDP2": (0, dict(dp_shard=0)),
    "FSDP2 nf4": (0, dict(dp_shard=0)),
    "tensor": (0, dict(tp=0)),
    "context": (0, dict(cp=0)),
    "pipeline": (0, dict(pp=0)),
    "accelerate DDP": (0, {}),
    "one process nf4": (1, {}),
}


def build(rank: int, size: int, method: str):
    """step(): one optimizer step of the method on this rank."""
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODEL))
    if method == "accelerate DDP":
        return with_accelerate(model, rank, size)
    import dataclasses

    import quantization_wrapper
    from finetune.config import TrainConfig
    from finetune.data.collate import microbatches
    from finetune.data.sampler import rank_rows
    from finetune.distributed.env import RankEnv
    from finetune.parts.parallel_dims import ParallelDims
    from finetune.torch_engine.lora.adapters import add_adapters
    from finetune.torch_engine.lora.targets import linear_names, target_names
    from finetune.torch_engine.parallel import process_groups
    from tests.support import tiny
    from tests.support.build import torch_engine

    settings = dataclasses.replace(TrainConfig(), precision="fp32", train_type="lora", lora_rank=16, lr=1e-4)
    model.requires_grad_(False)
    if method.endswith("nf4"):
        config = quantization_wrapper.config_for("nf4", group_size=64)
        quantization_wrapper.quantize_model(model, config, linear_names(model))
    add_adapters(model, target_names(model, "all"), Adapter.of(settings))
    dims = ParallelDims(**{axis: n or size for axis, n in METHODS[method][1].items()})
    ranks = process_groups.ProcessGroups.of(RankEnv(rank, size), dims, torch.device("cpu"))
    engine = torch_engine(model, settings, torch.device("cpu"), ranks=ranks)
    engine.verify("auto")
    rows = rank_rows(torch.arange(ROWS).numpy(), ranks.data_rank, dims.data_ranks)
    parts = 2 * dims.pp if dims.pp > 1 else 1
    dataset = tiny.dataset(lengths=(LENGTH,) * ROWS, vocab=VOCAB)
    batches = microbatches(dataset, rows, engine.layout, ROWS, ROWS * LENGTH // parts, 0)
    return lambda: engine.train_step(batches, 1e-4)


def with_accelerate(model, rank: int, size: int):
    import peft
    import torch
    from accelerate import Accelerator

    config = peft.LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    accelerator = Accelerator(cpu=True)
    model = peft.get_peft_model(model, config).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))[rank::size]

    def step():
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()

    return step


def serve(rank: int, size: int, method: str, folder: str) -> None:
    """A rank: one step for each line it reads, the seconds it took as a line of its own."""
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if size > 1:
        store = dist.FileStore(f"{folder}/store", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    step = build(rank, size, method)
    for _ in range(2):
        step()
    print("ready", flush=True)
    for _ in sys.stdin:
        if size > 1:
            dist.barrier()
        began = time.perf_counter()
        step()
        print(time.perf_counter() - began, flush=True)


def compare(size: int, rounds: int, names: list[str]) -> list[tuple]:
    groups = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name in names:
                count = METHODS[name][0] or size
                own = Path(folder) / name.replace(" ", "-")
                own.mkdir()
                port = free_port()
                groups[name] = [start(rank, count, name, own, port) for rank in range(count)]
                for process in groups[name]:
                    assert process.stdout.readline().strip() == "ready", name
            seconds = {name: [] for name in names}
            for _ in range(rounds):
                for name, processes in groups.items():
                    for process in processes:
                        process.stdin.write("step\n")
                        process.stdin.flush()
                    seconds[name].append(max(float(p.stdout.readline()) for p in processes))
    finally:
        for process in [p for group in groups.values() for p in group]:
            process.kill()
            process.wait()
    rows = [("method", "ranks", "speed", "least", "most")]
    for name in names:
        base = seconds["one process nf4" if name.endswith("nf4") else "one process"]
        ratios = sorted(b / s for b, s in zip(base, seconds[name], strict=True))
        shown = (f"{r:.2f}" for r in (statistics.median(ratios), ratios[0], ratios[-1]))
        rows.append((name, str(METHODS[name][0] or size), *shown))
    return rows


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(rank: int, size: int, name: str, folder: Path, port: int) -> subprocess.Popen:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    if name == "accelerate DDP" and size > 1:
        env |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    argv = [sys.executable, "-W", "ignore", __file__, "--serve", json.dumps([rank, size, name, str(folder)])]
    return subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def on_paper() -> list[tuple]:
    """Bytes a rank sends a step, by the formula, of a Llama-3-70B under qlora; seconds at the links' own rates."""
    from dataclasses import replace

    from finetune.config import TrainConfig
    from finetune.estimate import communication
    from finetune.estimate.model_cost import MicrobatchShape
    from finetune.estimate.model_shape import shape_of_files
    from finetune.model_files.files import find_model
    from finetune.parts.parallel_dims import ParallelDims

    sizes = shape_of_files(find_model(str(ROOT / "examples/configs/llama-3-70b"), fetch=False, weights=False))
    settings = replace(
        TrainConfig(),
        train_type="qlora",
        precision="bf16",
        quantization_backend="nf4",
        batch_size=4,
        context_length=4096,
        microbatch_tokens=16384,
        use_gradient_checkpointing="true",
        no_sync=True,
    )
    load = MicrobatchShape.full_rows(4, 4096)
    rows = [("degrees", "ranks", "GiB sent a step", "seconds at 50 GB/s", "at 400 GB/s")]
    for dims in (
        ParallelDims(dp_shard=8),
        ParallelDims(dp_replicate=8),
        ParallelDims(dp_shard=4, tp=2),
        ParallelDims(dp_shard=128),
        ParallelDims(dp_replicate=16, dp_shard=8),
    ):
        found = communication.bytes_per_step(dims, communication.traffic_of(Parts(settings), sizes, dims, load))
        # A ring passes (N - 1) times what a rank puts into a gather, (N - 1)/N of what it puts into the others, twice
        # for sums.
        n = max(dims.shards, dims.tp, dims.dp_replicate)
        ring = {
            "all_gather": dims.shards - 1,
            "reduce_scatter": (dims.shards - 1) / max(1, dims.shards),
            "all_reduce": 2 * (n - 1) / n,
        }
        size = sum(found.get(kind, 0) * times for kind, times in ring.items())
        rows.append(
            (str(dims), str(dims.world_size), f"{size / 2**30:.2f}", f"{size / 50e9:.2f}", f"{size / 400e9:.3f}")
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--methods", default=",".join(METHODS), help="comma list")
    parser.add_argument("--paper", action="store_true", help="from the formula alone")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(*json.loads(args.serve))
    from finetune.run.metrics import table

    print(table(on_paper() if args.paper else compare(args.ranks, args.rounds, args.methods.split(","))))


if __name__ == "__main__":
    main()
