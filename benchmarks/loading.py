"""Peak host memory of loading a large checkpoint: every method and bit width, quantized as it is read.

python benchmarks/loading.py                          a 1.1B Llama shape in 8 files of random bf16 weights
python benchmarks/loading.py --ways bf16,hqq/4,nf4/4-low-memory,transformers
python benchmarks/loading.py --shape 7b --folder DIR  a 7B shape (13 GB of disk)
python benchmarks/loading.py --dp_shards 2            each of two FSDP2 ranks, that reads its rows
python benchmarks/loading.py --tp 2 --pp 2            each of four ranks, that reads its slices of its stage's layers
python benchmarks/loading.py --shape moe --dp_shards 2 --ep 2

Each way runs in a process of its own; RssAnon is read every 2 ms, above the process after its imports. `predicted` is
the plan's figure for loading without the code it pages in, which is not anonymous. `proof`: what the comparison with
the full model's logits, before the first step, has in memory above the rank's own part, and whether that is at most a
decoder layer as it is stored and what two workers have in flight.
"""

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from finetune.parts.parallel_dims import ParallelDims
from finetune.parts.parts import Parts
from finetune.system import process  # noqa: E402

GIB = 2**30
MIXTURE = dict(num_local_experts=8, num_experts_per_tok=2)


def sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict[str, int]:
    """Of a decoder, as transformers' configurations name them."""
    return dict(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
    )


SHAPES = {
    "moe": sizes(1024, 1792, 8, 16, 4, 32000) | MIXTURE,
    "tiny": sizes(512, 1408, 4, 8, 2, 8000),
    "300m": sizes(1024, 2816, 20, 16, 4, 16000),
    "1b": sizes(2048, 5632, 22, 32, 4, 32000),
    "7b": sizes(4096, 11008, 32, 32, 32, 32000),
}
LIMIT = 1.15  # of what is stored, with two slices in flight beside it; of one process with two unquantized layers
DEGREES = {"dp_shards": "dp_shard", "tp": "tp", "pp": "pp", "ep": "ep"}


def make(folder: Path, shape: str, files: int = 8) -> None:
    """A Llama folder of that shape with random bf16 weights in `files` shards, written a shard at a time."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, MixtralConfig

    experts = SHAPES[shape].get("num_local_experts", 0)
    kind, name = (MixtralConfig, "MixtralForCausalLM") if experts else (LlamaConfig, "LlamaForCausalLM")
    config = kind(**SHAPES[shape], max_position_embeddings=2048, tie_word_embeddings=False, dtype="bfloat16")
    config.architectures = [name]
    h, f, v = config.hidden_size, config.intermediate_size, config.vocab_size
    kv = h // config.num_attention_heads * config.num_key_value_heads
    shapes = {"model.embed_tokens.weight": (v, h)}
    for i in range(config.num_hidden_layers):
        at = f"model.layers.{i}."
        shapes |= {
            at + f"self_attn.{n}_proj.weight": s
            for n, s in (("q", (h, h)), ("k", (kv, h)), ("v", (kv, h)), ("o", (h, h)))
        }
        for e in range(experts):
            here = at + f"block_sparse_moe.experts.{e}."
            shapes |= {here + f"{n}.weight": s for n, s in (("w1", (f, h)), ("w3", (f, h)), ("w2", (h, f)))}
        if experts:
            shapes[at + "block_sparse_moe.gate.weight"] = (experts, h)
        else:
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


def ways_of_all() -> list[str]:
    import quantization_wrapper

    return ["bf16", *(f"{name}/{bits}" for name, bits in quantization_wrapper.pairs())]


def settings_of(way: str):
    """TrainConfig of a way: method/bits, such as bnb/8, or bf16 for lora; -low-memory after it."""
    import quantization_wrapper
    from finetune.config import TrainConfig

    name, _, bits = way.removesuffix("-low-memory").partition("/")
    quantizer = {"quantization_backend": "none"}
    if bits:
        books = quantization_wrapper.METHODS[name].quant_types[int(bits)]
        quantizer = dict(quantization_backend=name, n_bits=int(bits), quant_type=books[0] if books else None)
    return TrainConfig(
        **quantizer,
        train_type="qlora" if bits else "lora",
        precision="bf16",
        cache_dequantized="false",
        use_gradient_checkpointing="false",
        low_memory=way.endswith("low-memory"),
        lora_rank=1,
        lr=1e-4,
    )


def predicted(settings, folder: Path, dims=None) -> int:
    from finetune.estimate import memory
    from finetune.estimate.model_shape import ModelShape, read_headers

    headers = read_headers(sorted(folder.glob("*.safetensors")))
    shape = ModelShape.from_config(json.loads((folder / "config.json").read_text()), headers)
    dims = dims or memory.ONE_RANK
    return memory.loading_bytes(Parts(settings), shape, dims.shards, dims) - memory.LOADING_BYTES


def one_layer(folder: Path) -> int:
    """Bytes of an unquantized decoder layer."""
    config = json.loads((folder / "config.json").read_text())
    h, f = config["hidden_size"], config["intermediate_size"]
    kv = h // config["num_attention_heads"] * config["num_key_value_heads"]
    return 2 * (2 * h * h + 2 * h * kv + 3 * h * f * config.get("num_local_experts", 1))


def in_flight(settings, folder: Path, dims) -> int:
    """Bytes of the two largest slices that a rank reads, unquantized; of full matrices where a method needs them."""
    import quantization_wrapper

    config, quantization = json.loads((folder / "config.json").read_text()), Parts(settings).quantization
    h, f, experts = config["hidden_size"], config["intermediate_size"], config.get("num_local_experts", 0)
    # Experts are stored one by one: what transformers concatenates is in memory in full, once as pieces.
    largest = 2 * h * f * 2 * experts * 2 if experts else 2 * h * f
    divided = dims.dp_shard * dims.tp
    if experts or quantization and (quantization.needs_full_matrix or quantization.double_quant):
        divided = 1
    if dims.tp > 1 and quantization and quantization_wrapper.per_channel(quantization.method, quantization.bits):
        divided = dims.dp_shard  # scales of full rows, of which a rank keeps columns
    return 2 * largest // divided


def one_way(way: str, folder: Path) -> dict:
    """{'peak', 'stored', 'predicted', 'seconds'} of one way, in this process."""
    import torch

    import quantization_wrapper
    from finetune.torch_engine.lora.targets import linear_names
    from tests.support.build import load_model

    torch.set_num_threads(2)
    quantizers_imported(way)
    if way == "transformers":
        from transformers import AutoModelForCausalLM
    watch, began = Watch(), time.perf_counter()
    if way == "transformers":
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.bfloat16)
        quantization_wrapper.quantize_model(model, quantization_wrapper.config_for("nf4"), linear_names(model))
        expected = 0
    else:
        model = load_model(folder, settings_of(way), torch.device("cpu"))
        expected = predicted(settings_of(way), folder)
    seconds = time.perf_counter() - began
    watch.done = True
    stored = sum(p.nbytes for p in model.parameters())
    return {"peak": watch.peak - watch.base, "stored": stored, "predicted": expected, "seconds": seconds}


def quantizers_imported(way: str) -> None:
    """A library's own code is part of the process, not of the model: tens of MiB of it are anonymous."""
    import importlib

    import quantization_wrapper

    package = getattr(quantization_wrapper.METHODS.get(way.partition("/")[0]), "package", None)
    for name in (package, "bitsandbytes.functional" if package == "bitsandbytes" else package):
        if name:
            importlib.import_module("hqq.core.quantize" if name == "hqq" else name)


def one_rank(way: str, folder: Path, rank: int, dims, store: str) -> dict:
    """As one_way's, and 'proof', of one of several ranks: its engine built, and then its logits compared."""
    import os

    import torch
    import torch.distributed as dist
    import transformers.models.llama.modeling_llama
    import transformers.models.mixtral.modeling_mixtral  # noqa: F401  part of the process, not of the model

    from finetune.distributed.env import RankEnv
    from finetune.torch_engine.memory_stats import trim_heap
    from finetune.torch_engine.parallel.placement import local_shard
    from finetune.torch_engine.parallel.process_groups import ProcessGroups
    from finetune.torch_engine.weights.local_shards import LocalShards
    from tests.support.build import load_model, torch_engine

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    cpu, ranks = torch.device("cpu"), dims.world_size
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    quantizers_imported(way)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    here, settings = ProcessGroups.of(RankEnv(rank, ranks), dims, cpu), settings_of(way)
    share = LocalShards.of(here, Parts(settings))
    dist.barrier()
    watch, began = Watch(), time.perf_counter()
    model = load_model(folder, settings, cpu, share=share)
    engine = torch_engine(model, settings, cpu, ranks=here, share=share)
    seconds = time.perf_counter() - began
    dist.barrier()
    peak = watch.peak
    here = [p for p in model.parameters() if not p.is_meta]
    own = sum(local_shard(p).nbytes for p in here) + sum(b.nbytes for b in model.buffers())
    trim_heap()
    watch.done, proof = True, 0
    if engine.forward.reference is not None:  # a forward's own workspace is not the proof's
        with peak_of(engine.forward.reference) as peaks:
            engine.verify("auto")
        (proof,) = peaks
    dist.barrier()
    expected = predicted(settings, folder, dims)
    found = {"peak": peak - watch.base, "stored": own, "predicted": expected, "seconds": seconds}
    return found | {"proof": proof}


@contextlib.contextmanager
def peak_of(reference):
    """Context that appends the peak of each computation of the full model's logits to the list it gives."""
    compute, peaks = reference.logits, []

    def logits(*args):
        watch = Watch()
        found = compute(*args)
        watch.done = True
        peaks.append(watch.peak - watch.base)
        return found

    reference.logits = logits
    yield peaks
    reference.logits = compute


def measured(way: str, folder: Path, dims) -> dict | None:
    """The result of one way; over ranks, that of the rank with the highest peak above what it stores, and the largest
    of their proofs. None: it failed, and was said.
    """
    ranks = dims.world_size
    with tempfile.TemporaryDirectory() as meeting:
        command = [sys.executable, "-W", "ignore", __file__, "--way", way, "--folder", str(folder)]
        degrees = [word for name in DEGREES for word in (f"--{name}", str(getattr(dims, DEGREES[name])))]
        own = [["--rank", str(r), *degrees, "--store", f"{meeting}/store"] for r in range(ranks)]
        started = [
            subprocess.Popen(
                [*command, *(more if ranks > 1 else [])], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for more in own
        ]
        said = [process.communicate() for process in started]
    if any(process.returncode for process in started):
        print(f"{way:18} failed: {' '.join(err for _, err in said).strip().splitlines()[-1]}")
        return None
    found = [json.loads(out.splitlines()[-1]) for out, _ in said]
    proof = max(result.get("proof", 0) for result in found)
    return max(found, key=lambda result: result["peak"] - LIMIT * result["stored"]) | {"proof": proof}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--ways", default=None)
    for name in DEGREES:
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    for hidden in ("--way", "--store", "--rank"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    dims = ParallelDims(**{field: getattr(args, name) for name, field in DEGREES.items()})
    process.prepare_environment()  # as train.py does
    folder = args.folder or Path.home() / ".cache" / "finetune" / "benchmarks" / f"llama-{args.shape}"
    if args.way and args.rank is not None:
        print(json.dumps(one_rank(args.way, folder, int(args.rank), dims, args.store)))
        return
    if args.way:
        print(json.dumps(one_way(args.way, folder)))
        return
    if not (folder / "config.json").is_file():
        print(f"making {folder}", flush=True)
        make(folder, args.shape)
    print(
        "way              stored GiB  peak GiB  peak/stored  1.15 x stored + two slices  predicted GiB  error  "
        "proof GiB  a layer  seconds"
    )
    for way in [w for _ in range(args.rounds) for w in (args.ways.split(",") if args.ways else ways_of_all())]:
        r = measured(way, folder, dims)
        if r is None:
            continue
        slices = in_flight(settings_of(way), folder, dims) if way != "transformers" else 0
        allowed = LIMIT * r["stored"] + (slices if dims.world_size > 1 else 2 * one_layer(folder))
        highest = max(r["peak"], r["stored"] + r.get("proof", 0))
        error = f"{r['predicted'] / highest - 1:+.0%}" if r["predicted"] else "-"
        verdict = "met" if r["peak"] <= allowed else "not met"
        proof, layer = r.get("proof", 0), one_layer(folder)
        print(
            f"{way:16} {r['stored'] / GIB:10.3f} {r['peak'] / GIB:9.3f} {r['peak'] / r['stored']:12.2f} "
            f"{allowed / GIB:17.3f} {verdict:>9} {r['predicted'] / GIB:14.3f} {error:>6} "
            f"{proof / GIB:10.3f} {layer / GIB:8.3f} {r['seconds']:8.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
