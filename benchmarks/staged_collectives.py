"""What staging costs: a sharded training step over staged collectives against the same step over plain Gloo.

python benchmarks/staged_collectives.py                       2 ranks, 15 rounds: full, LoRA, NF4 + LoRA
python benchmarks/staged_collectives.py --ranks 4 --rounds 7

Both engines live in the same processes and take turns step by step. The staged group copies CPU tensors too, as it
copies a device's; on an Apple GPU the copies are of the same kind, since host and device share one memory. The work:
FSDP2 on a Llama of 6 layers x 512 in fp32, 8 rows of up to 128 tokens per rank and step, one compute thread per rank.
ratio: the median over rounds of staged seconds over plain seconds, with the least and the most.
"""

import argparse
import importlib
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from finetune.run.metrics import table
from tests.support import ranks

KINDS = ("full", "lora", "nf4")
SIZES = dict(vocab_size=2048, hidden_size=512, intermediate_size=1408, num_hidden_layers=6, num_attention_heads=8)


def engine_over(group, rank: int, size: int, kind: str):
    """An engine whose collectives all go through `group`."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from finetune.config import TrainConfig
    from finetune.distributed.parallel_dims import ParallelDims
    from finetune.torch_engine.parallel.process_groups import ProcessGroups
    from tests.support import cases, tiny
    from tests.support.build import torch_engine

    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
    groups = ProcessGroups(
        rank, ParallelDims(dp_shard=size), torch.device("cpu"), mesh, dict.fromkeys(("data", "shard"), group)
    )
    model = tiny.build("llama", num_key_value_heads=8, **SIZES)
    train_type = {"nf4": "qlora"}.get(kind, kind)
    settings = replace(TrainConfig(), precision="fp32", lr=1e-3, lora_rank=16, train_type=train_type)
    model.requires_grad_(kind == "full")
    if kind != "full":
        case = cases.Case(train_type, method="nf4" if kind == "nf4" else None)
        cases.add_frozen_base_and_adapters(model, case, settings, torch.device("cpu"))
    engine = torch_engine(model, settings, ranks=groups)
    engine.verify("auto")
    return engine


def measure(rank: int, size: int, kind: str, rounds: int) -> list:
    """[[plain seconds, staged seconds] per round], and whether both saw the same losses."""
    import torch.distributed as dist

    from finetune.data.collate import microbatches
    from finetune.torch_engine.parallel import staged_gloo
    from tests.support import tiny

    staged_gloo.register("cpu", copies_cpu=True)
    engines = [engine_over(dist.new_group(backend=name), rank, size, kind) for name in ("gloo", staged_gloo.NAME)]
    lengths = tuple(64 + (37 * i) % 65 for i in range(8 * size))
    data = tiny.dataset(lengths=lengths, vocab=SIZES["vocab_size"])
    batches = microbatches(data, range(rank, len(lengths), size), engines[0].layout, 8, 4096, 0)
    seconds, same = [], True
    for turn in range(rounds + 2):  # two to warm up
        times, losses = [], []
        for engine in engines:
            dist.barrier()
            began = time.perf_counter()
            losses.append(engine.train_step(batches, 1e-3).nll)
            dist.barrier()
            times.append(time.perf_counter() - began)
        same = same and losses[0] == losses[1]
        if turn >= 2:
            seconds.append(times)
    return [seconds, same]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kinds", default=",".join(KINDS))
    args = parser.parse_args()
    rows = [("kind", "plain Gloo", "staged", "ratio", "range", "n", "losses")]
    for kind in args.kinds.split(","):
        with tempfile.TemporaryDirectory() as folder:
            here = importlib.import_module("benchmarks.staged_collectives")  # the name that ranks import it by
            seconds, same = ranks.run(args.ranks, here.measure, Path(folder), kind=kind, rounds=args.rounds)[0]
        ratios = sorted(staged / plain for plain, staged in seconds)
        plain, staged = (statistics.median(column) for column in zip(*seconds, strict=True))
        spread = f"{ratios[0]:.2f}..{ratios[-1]:.2f}"
        ratio = f"{statistics.median(ratios):.2f} x"
        said = "bit-equal" if same else "DIFFERENT"
        rows.append((kind, f"{1e3 * plain:.0f} ms", f"{1e3 * staged:.0f} ms", ratio, spread, str(len(ratios)), said))
    print(table(rows))


if __name__ == "__main__":
    main()
