"""Microseconds that the host takes for one decoder layer, forward and backward: least of many on tensors so small that
products take nothing, with a GPU's kernels stubbed by operations that only allocate.

    python benchmarks/host_per_layer.py                         this checkout
    python benchmarks/host_per_layer.py --against ../before     in turns with another one

Counts too: nodes of autograd's graph, and operations that a GPU would be given, forward and backward.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, os.environ.get("MEASURED_CHECKOUT", str(ROOT)))
KINDS = ("frozen", "lora", "nf4", "lora compiled", "nf4 compiled")
REPETITIONS = 150
LENGTHS = (5, 3)
LIBRARIES: list = []  # stubs are gone with theirs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, which is measured in turns with this one")
    parser.add_argument("--kinds", default=",".join(KINDS), help="some of these")
    parser.add_argument("--rounds", type=int, default=3, help="processes per checkout")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        return print(json.dumps(measured(args.measure)))
    checkouts = [path.resolve() for path in (args.against, ROOT) if path is not None]
    for kind in args.kinds.split(","):
        found: dict = {path: [] for path in checkouts}
        for _ in range(args.rounds):
            for path in checkouts:
                found[path].append(in_child(path, kind))
        for path, results in found.items():
            least = min(result["us"] for result in results)
            median = statistics.median(result["us"] for result in results)
            counts = {name: number for name, number in results[0].items() if name != "us"}
            print(
                f"{kind:14} {path.name:12} {least:7.0f} us (median of {len(results)}: {median:.0f})  {counts}",
                flush=True,
            )


def in_child(checkout: Path, kind: str) -> dict:
    argv = [sys.executable, "-W", "ignore", __file__, "--measure", kind]
    env = os.environ | {"MEASURED_CHECKOUT": str(checkout), "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(argv, env=env, cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def measured(kind: str) -> dict:
    """{"us", "launches", "operators", "nodes"} of one layer."""
    import torch

    from finetune.torch_engine.compile import compile_layers

    torch.set_num_threads(1)
    stub_kernels()
    model = model_of(kind)
    layer = model.model.layers[1]
    hidden, arguments = inputs_of(model)
    found = {}
    with casts_of(model, kind):
        if "compiled" in kind:
            compile_layers(model)
        else:
            found = counted(kind, layer, hidden, arguments)
        times = []
        gc.disable()
        for _ in range(REPETITIONS + 10):
            for parameter in model.parameters():
                parameter.grad = None
            start = time.perf_counter()
            out = output_of(layer(hidden, **arguments))
            torch.autograd.backward(out, hidden)
            times.append(time.perf_counter() - start)
            hidden.grad = None
    return {"us": round(1e6 * min(times[10:]), 1)} | found


def output_of(out):
    return out[0] if isinstance(out, tuple) else out


def casts_of(model, kind: str):
    import torch

    from finetune.torch_engine.lora.layers import cast_once

    return contextlib.nullcontext() if kind == "frozen" else cast_once(model, torch.float32)


def counted(kind: str, layer, hidden, arguments: dict) -> dict:
    from tests.support import launches

    nodes = nodes_of(output_of(layer(hidden, **arguments)).grad_fn)
    found = {"nodes": sum(nodes.values()), "by name": dict(nodes.most_common(4))}
    if kind == "frozen":
        return found
    forward, backward = launches.per_layer(quantized=kind == "nf4", recomputed=False)
    return found | {"launches": [sum(forward.values()), sum(backward.values())]}


def nodes_of(root) -> Counter:
    seen: set = set()
    found: Counter = Counter()
    left = [root]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found[node.name().removesuffix("Backward")] += 1
        left += [following for following, _ in node.next_functions]
    return found


def model_of(kind: str):
    """Two layers of a tiny Llama in bf16, with adapters on all linears, as a run on a GPU has them."""
    import torch
    import transformers

    import quantization_wrapper
    from finetune.config import TrainConfig
    from finetune.parts.trains import Adapter
    from finetune.torch_engine.attention import per_document
    from finetune.torch_engine.kernels import fuse
    from finetune.torch_engine.lora.adapters import add_adapters
    from finetune.torch_engine.lora.targets import linear_names, target_names

    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2)
    config = transformers.LlamaConfig(num_hidden_layers=2, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.float32).requires_grad_(False)
    if kind.startswith("nf4"):
        quantization_wrapper.quantize_model(model, quantization_wrapper.config_for("nf4"), linear_names(model))
    if kind != "frozen":
        settings = dataclasses.replace(TrainConfig(), lora_rank=8)
        add_adapters(model, target_names(model, "all", False), Adapter.of(settings))
    per_document.register()
    model.set_attn_implementation(per_document.NAME)
    fuse.replace(model)
    find_shared_inputs(model)
    return model.train()


def find_shared_inputs(model) -> None:
    """What an engine's checks learn of the model before a run, if this checkout's do."""
    import torch

    try:
        from finetune.torch_engine.lora.shared_input import joined_by
    except ImportError:
        return
    hidden, arguments = inputs_of(model)
    with joined_by(model), torch.no_grad():
        for layer in model.model.layers:
            layer(hidden, **arguments)


def inputs_of(model) -> tuple:
    import torch

    from finetune.parts.attention import AttentionPlan
    from finetune.torch_engine.attention import per_document
    from finetune.torch_engine.attention.varlen import Attention

    attention = Attention(AttentionPlan("auto", ("varlen",)))
    attention.takes_bounds = lambda device: True
    kernel = stubbed_varlen()
    attention.kernel = lambda *rest, **more: kernel
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    hidden = torch.randn(1, sum(LENGTHS), 64, dtype=torch.float32, requires_grad=True)
    embeddings = model.model.rotary_emb(hidden, positions)
    documents = per_document.documents_of(positions, torch.device("cpu"), attention)
    return hidden, {"position_embeddings": embeddings, "position_ids": positions, "documents": documents}


# ---- stubs: the operations of a GPU, which here only allocate


def stub_kernels() -> None:
    import torch
    import torch.nn.attention.varlen

    from finetune.quantizers import nf4
    from finetune.torch_engine.kernels import ops

    def attention(q, k, v, *rest, **more):
        return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32), q.new_empty(2)

    def attention_backward(grad, q, k, v, *rest, **more):
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    def dequantize(packed, absmax, absmax_range, columns, block, dtype):
        return packed.new_empty(packed.shape[0], columns, dtype=dtype)

    stubs = {"finetune_kernels": ops.FAKES, "finetune": {"nf4_dequantize": dequantize}}
    stubs["torch_attn"] = {"_varlen_attn": attention, "_varlen_attn_backward": attention_backward}
    for namespace, functions in stubs.items():
        library = torch.library.Library(namespace, "IMPL")
        LIBRARIES.append(library)
        for name, function in functions.items():
            library.impl(name, function, "CPU")
    nf4._dequantize = torch.ops.finetune.nf4_dequantize


def stubbed_varlen():
    from finetune.torch_engine.attention import varlen

    return varlen.KERNELS["varlen"].load()


if __name__ == "__main__":
    main()
