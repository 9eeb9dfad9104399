"""Peak memory of loading a large checkpoint: ours (streamed to 4 bits) beside from_pretrained followed by quantization.

python benchmarks/loading.py                          a 1.1B Llama shape in 8 files, random bf16 weights, made if
missing python benchmarks/loading.py --shape 7b --folder DIR  a 7B shape (13 GB of disk) python benchmarks/loading.py
--ranks 2                each of two FSDP2 ranks, that reads its rows, or cuts a whole load

Each way runs in a process of its own; RssAnon is read every 2 ms, above the process after its imports.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from finetune import process  # noqa: E402

GIB = 2**30
SHAPES = {
    "tiny": dict(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=8000,
    ),
    "1b": dict(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
    ),
    "7b": dict(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=32000,
    ),
}
WAYS = ("spawned", "ours-low-memory", "ours-bf16", "transformers")
WAYS_OF_RANKS = ("ours-bf16", "spawned", "ours-bf16-whole", "ours-whole")


def make(folder: Path, shape: str, files: int = 8) -> None:
    """A Llama folder of that shape with random bf16 weights in `files` shards, written a shard at a time."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=2048, tie_word_embeddings=False, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    h, f, v = config.hidden_size, config.intermediate_size, config.vocab_size
    kv = h // config.num_attention_heads * config.num_key_value_heads
    shapes = {"model.embed_tokens.weight": (v, h)}
    for i in range(config.num_hidden_layers):
        at = f"model.layers.{i}."
        shapes |= {
            at + f"self_attn.{n}_proj.weight": s
            for n, s in (("q", (h, h)), ("k", (kv, h)), ("v", (kv, h)), ("o", (h, h)))
        }
        shapes |= {at + f"mlp.{n}_proj.weight": s for n, s in (("gate", (f, h)), ("up", (f, h)), ("down", (h, f)))}
        shapes |= {at + n + ".weight": (h,) for n in ("input_layernorm", "post_attention_layernorm")}
    shapes |= {"model.norm.weight": (h,), "lm_head.weight": (v, h)}
    folder.mkdir(parents=True, exist_ok=True)
    generator, names, index = torch.Generator().manual_seed(0), list(shapes), {}
    each = -(-len(names) // files)
    for k in range(files):
        name = f"model-{k + 1:05d}-of-{files:05d}.safetensors"
        part = {
            n: torch.empty(shapes[n], dtype=torch.bfloat16).normal_(std=0.02, generator=generator)
            if len(shapes[n]) > 1
            else torch.ones(shapes[n], dtype=torch.bfloat16)
            for n in names[k * each : (k + 1) * each]
        }
        save_file(part, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(part, name)
    total = sum(2 * (s[0] * (s[1] if len(s) > 1 else 1)) for s in shapes.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )
    config.save_pretrained(folder)


class Watch(threading.Thread):
    """The largest RssAnon since it began, read every 2 ms."""

    def __init__(self):
        super().__init__(daemon=True)
        self.base = self.peak = anonymous_bytes()
        self.done = False
        self.start()

    def run(self):
        while not self.done:
            self.peak = max(self.peak, anonymous_bytes())
            time.sleep(0.002)


def anonymous_bytes() -> int:
    return int(re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)[1]) * 1024


def one_way(way: str, folder: Path) -> dict:
    """{'peak', 'stored', 'two_layers', 'seconds'} of one way, in this process."""
    import torch

    import quantization_wrapper
    from finetune.config import TrainConfig
    from finetune.torch_engine.lora.targets import linear_names
    from tests.support.build import load_model

    config = json.loads((folder / "config.json").read_text())
    h, f = config["hidden_size"], config["intermediate_size"]
    kv = h // config["num_attention_heads"] * config["num_key_value_heads"]
    layer = 2 * h * h + 2 * h * kv + 3 * h * f
    precision = "fp32" if way == "ours-fp32" else "bf16"
    torch.set_num_threads(2)
    if way == "transformers":
        from transformers import AutoModelForCausalLM
    watch, began = Watch(), time.perf_counter()
    if way == "transformers":
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.bfloat16)
        quantization_wrapper.quantize_model(model, quantization_wrapper.config_for("nf4"), linear_names(model))
    else:
        settings = TrainConfig(
            train_type="lora" if way == "ours-bf16" else "qlora",
            quantization_backend="nf4",
            quant_type="nf4",
            precision=precision,
            cache_dequantized="false",
            low_memory=way == "ours-low-memory",
            lora_rank=1,
        )
        model = load_model(folder, settings, torch.device("cpu"))
    seconds = time.perf_counter() - began
    watch.done = True
    stored = sum(p.nbytes for p in model.parameters())
    return {"peak": watch.peak - watch.base, "stored": stored, "two_layers": 2 * 2 * layer, "seconds": seconds}


def one_rank(way: str, folder: Path, rank: int, ranks: int, store: str) -> dict:
    """{'peak', 'own', 'slice', 'seconds'} of one of several ranks, in this process: the engine built, nothing run."""
    import os

    import torch
    import torch.distributed as dist
    import transformers.models.llama.modeling_llama  # noqa: F401  part of the process, not of the model

    from finetune.config import TrainConfig
    from finetune.distributed.env import RankEnv
    from finetune.distributed.parallel_dims import ParallelDims
    from finetune.torch_engine.local_shards import LocalShards
    from finetune.torch_engine.parallel.placement import local_shard
    from finetune.torch_engine.parallel.process_groups import ProcessGroups
    from tests.support.build import load_model, torch_engine

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    cpu = torch.device("cpu")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    here = ProcessGroups.of(RankEnv(rank, ranks), ParallelDims(dp_shard=ranks), cpu)
    settings = TrainConfig(
        train_type="lora" if "bf16" in way else "qlora",
        quantization_backend="nf4",
        quant_type="nf4",
        lora_rank=1,
        precision="bf16",
        cache_dequantized="false",
        use_gradient_checkpointing="false",
        lr=1e-4,
    )
    share = None if way.endswith("whole") else LocalShards.of(here, settings)
    dist.barrier()
    watch, began = Watch(), time.perf_counter()
    model = load_model(folder, settings, cpu, share=share)
    torch_engine(model, settings, cpu, ranks=here, share=share)
    seconds = time.perf_counter() - began
    watch.done = True
    own = sum(local_shard(p).nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    rows = max(-(-p.shape[0] // ranks) * p.shape[1:].numel() * 2 for p in model.parameters())
    dist.barrier()
    return {"peak": watch.peak - watch.base, "own": own, "slice": rows, "seconds": seconds}


def over_ranks(args, folder: Path) -> None:
    """Prints the rank of the highest peak of each way."""
    print("way                  own GiB   peak GiB   peak / own   1.05 x own + two slices   seconds")
    for _ in range(args.rounds):
        for way in args.ways.split(",") if args.ways else WAYS_OF_RANKS:
            with tempfile.TemporaryDirectory() as meeting:
                command = [
                    sys.executable,
                    "-W",
                    "ignore",
                    __file__,
                    "--way",
                    way,
                    "--folder",
                    str(folder),
                    "--ranks",
                    str(args.ranks),
                    "--store",
                    f"{meeting}/store",
                ]
                started = [
                    subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True)
                    for rank in range(args.ranks)
                ]
                said = [process.communicate()[0] for process in started]
            if any(process.returncode for process in started):
                print(f"{way:18} failed")
                continue
            r = max((json.loads(text.splitlines()[-1]) for text in said), key=lambda r: r["peak"])
            allowed = 1.05 * r["own"] + 2 * r["slice"]
            print(
                f"{way:18} {r['own'] / GIB:9.3f} {r['peak'] / GIB:10.3f} {r['peak'] / r['own']:12.2f} "
                f"{allowed / GIB:17.3f} "
                f"{'met' if r['peak'] <= allowed else 'not met':>8} {r['seconds']:9.1f}",
                flush=True,
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--ways", default=None)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    for hidden in ("--way", "--store", "--rank"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    process.prepare_environment()  # as train.py does
    folder = args.folder or Path.home() / ".cache" / "finetune" / "benchmarks" / f"llama-{args.shape}"
    if args.way and args.rank is not None:
        print(json.dumps(one_rank(args.way, folder, int(args.rank), args.ranks, args.store)))
        return
    if args.way:
        print(json.dumps(one_way(args.way, folder)))
        return
    if not (folder / "config.json").is_file():
        print(f"making {folder}", flush=True)
        make(folder, args.shape)
    if args.ranks > 1:
        over_ranks(args, folder)
        return
    print("way                stored GiB   peak GiB   peak / stored   1.1 x stored + two layers   seconds")
    for _ in range(args.rounds):
        for way in args.ways.split(",") if args.ways else WAYS:
            command = [sys.executable, __file__, "--way", way, "--folder", str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{way:18} failed: {done.stderr.strip().splitlines()[-1]}")
                continue
            r = json.loads(done.stdout.splitlines()[-1])
            allowed = 1.1 * r["stored"] + r["two_layers"]
            print(
                f"{way:18} {r['stored'] / GIB:10.3f} {r['peak'] / GIB:10.3f} {r['peak'] / r['stored']:15.2f} "
                f"{allowed / GIB:20.3f} {'met' if r['peak'] <= allowed else 'not met':>8} {r['seconds']:9.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
