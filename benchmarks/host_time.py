"""The host's microseconds per decoder layer, forward and backward, and what each layer gives a GPU to do.

    python benchmarks/host_time.py
    python benchmarks/host_time.py --before ../another_checkout --rounds 4

A Llama of tiny tensors on the CPU, whose products take no time, with norms, SwiGLU, RoPE, NF4 and attention as the
operations that a GPU has, which here only allocate: the least of --repeats microbatches of a deep model less that of a
shallow one, per layer between them. With --before another checkout is measured in turns with this one, each in a
process of its own. Launches (operators that are no views), dispatched operators and autograd nodes are counted on meta
tensors in bf16, as a GPU would get them.
"""

import argparse
import collections
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CHECKOUT = "HOST_TIME_CHECKOUT"  # in the environment of a process that measures
sys.path.insert(0, os.environ.get(CHECKOUT, str(ROOT)))
DEPTHS = (2, 8)
KINDS = ("lora", "nf4")


# ---- one checkout, in a process of its own: a line of JSON for each line it is sent


def serve(kind: str, compiled: bool, repeats: int) -> None:
    found: dict[str, Any]
    counted = counts(kind)
    engines = [engine_of(kind, depth) for depth in DEPTHS]
    stub_kernels()
    models = [microbatch_of(engine, compiled) for engine in engines]
    for request in sys.stdin:
        if request.strip() == "count":
            found = counted
        else:
            took = [[run() for run in models] for _ in range(repeats)]
            shallow, deep = zip(*took, strict=True)
            layers = DEPTHS[1] - DEPTHS[0]
            found = {of.__name__: (of(deep) - of(shallow)) / layers for of in (min, statistics.median)}
        print(json.dumps(found), flush=True)


def stub_kernels() -> None:
    """Kernels of a GPU as operations that allocate their results."""
    import torch

    from finetune.quantizers import nf4
    from finetune.torch_engine.kernels import ops

    kernels = torch.library.Library("finetune_kernels", "IMPL")
    for name in ops.SCHEMAS:
        kernels.impl(name, ops.FAKES[name], "CPU")
    if hasattr(ops, "KERNELS"):
        ops.KERNELS |= ops.FAKES
    packed = torch.library.Library("finetune", "IMPL")
    packed.impl("nf4_dequantize", nf4._nf4_dequantize_on_meta, "CPU")
    nf4._dequantize = torch.ops.finetune.nf4_dequantize
    KEPT.extend((kernels, packed, attention_library()))


KEPT: list = []  # libraries live as long as someone holds them


def attention_library():
    """An attention kernel that takes bounds, as one operation."""
    import torch

    library = torch.library.Library("host_time", "DEF")
    arguments = "Tensor q, Tensor k, Tensor v, Tensor bounds, SymInt longest"
    library.define(f"attention({arguments}) -> Tensor")
    library.define(f"attention_backward(Tensor grad, {arguments}) -> (Tensor, Tensor, Tensor)")

    def forward(q, k, v, bounds, longest):
        return q.new_empty(q.shape)

    def backward(grad, q, k, v, bounds, longest):
        return tuple(x.new_empty(x.shape) for x in (q, k, v))

    for name, function in (("attention", forward), ("attention_backward", backward)):
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"host_time::{name}", function, lib=library)

    def keep(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:4])
        ctx.longest = inputs[4]

    def differentiate(ctx, grad):
        return *torch.ops.host_time.attention_backward(grad, *ctx.saved_tensors, ctx.longest), None, None

    torch.library.register_autograd("host_time::attention", differentiate, setup_context=keep, lib=library)
    return library


def attention_kernel(q, k, v, bounds_q, bounds_k, longest_q, longest_k, **scoring):
    import torch

    return torch.ops.host_time.attention(q, k, v, bounds_q, longest_q)


def engine_of(kind: str, depth: int):
    """The engine of a model of this depth, with the kernels that a GPU has."""
    import torch

    from finetune.parts.attention import AttentionPlan
    from finetune.torch_engine.attention import varlen
    from finetune.torch_engine.kernels import fuse
    from tests.support import engines, tiny

    train_type = "qlora" if kind == "nf4" else kind
    built = engines.engine(train_type=train_type, model=tiny.build("llama", num_hidden_layers=depth))
    fuse.replace(built.model)
    step_of(built.model)
    varlen.trial = lambda *asked: None
    kernels = {"stub": varlen.Kernel(lambda: attention_kernel, (torch.float32, torch.bfloat16), on_cpu=True)}
    built.forward.attention = varlen.Attention(AttentionPlan("auto", ("stub",)), kernels)
    return built


def microbatch_of(built: Any, compiled: bool) -> Callable[[], float]:
    """A function that runs a microbatch in the context of a step, and returns its microseconds."""
    from finetune.torch_engine.compile import compile_layers
    from tests.support import engines

    if compiled:
        compile_layers(built.model)
    built.model.train()
    (batch,) = engines.batches(batch_size=2, rows=range(2))
    context = contextlib.ExitStack()
    context.enter_context(built._weights_cast_once())

    def run() -> float:
        built.parallel.drop_gradients()
        start = time.process_time()  # not what others take of the processor meanwhile
        built.parallel.backward(built.forward.nll(batch))
        return (time.process_time() - start) * 1e6

    KEPT.append(context)
    for _ in range(10):
        run()
    return run


# ---- what a layer is on a GPU


def counts(kind: str) -> dict[str, Any]:
    """{what: number per layer}, on meta tensors."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from finetune.parts.attention import AttentionPlan
    from finetune.torch_engine import checks
    from finetune.torch_engine.attention.varlen import Attention
    from finetune.torch_engine.kernels import fuse
    from tests.support import launches

    class Operators(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += 1
            return func(*args, **(kwargs or {}))

    found = []
    for depth in (1, *DEPTHS):  # the first pays for what is tried once
        model = launches.llama(depth, kind == "nf4", recomputed=False)
        fuse.replace(model)
        in_step = step_of(model)
        attention = Attention(AttentionPlan("auto", ("varlen",)))
        inputs = checks.packed_inputs([torch.arange(40), torch.arange(17)], launches.META, attention=attention)
        with in_step(model, torch.bfloat16), Operators() as operators, launches.Launches() as launched:
            out = model.model(**inputs).last_hidden_state
            nodes = nodes_of(out)
            out.sum().backward()
        found.append({"operators": operators.count, "launches": sum(launched.counts.values())})
        found[-1] |= {"nodes": sum(nodes.values()), **nodes}
    layers = DEPTHS[1] - DEPTHS[0]
    _, shallow, deep = found
    return {name: (deep[name] - shallow.get(name, 0)) / layers for name in deep}


def step_of(model: Any) -> Callable:
    """The context of a step in this checkout."""
    try:
        from finetune.torch_engine.lora import flat
    except ImportError:
        from finetune.torch_engine.lora.layers import cast_once

        return cast_once
    flat.flatten(model)
    return flat.in_step


def nodes_of(out) -> collections.Counter:
    """{name: number} of the autograd nodes behind a tensor."""
    seen = set()
    left = [out.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [before for before, _ in node.next_functions]
    return collections.Counter(type(node).__name__ for node in seen)


# ---- checkouts in turns


class Served:
    def __init__(self, root: Path, kind: str, compiled: bool, repeats: int):
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", "--kinds", kind]
        command += ["--repeats", str(repeats), "--ways", "compiled" if compiled else "eager"]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        environment = os.environ | {CHECKOUT: str(root), "OMP_NUM_THREADS": "1"}
        self.process: Any = subprocess.Popen(command, env=environment, cwd=root, **pipes)

    def ask(self, word: str) -> dict:
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def measure(args) -> None:
    roots = {"here": ROOT}
    if args.before:
        roots["before"] = args.before.resolve()
    for kind in args.kinds:
        for way in args.ways:
            served = {name: Served(root, kind, way == "compiled", args.repeats) for name, root in roots.items()}
            found: dict = {name: [] for name in roots}
            for _ in range(args.rounds):
                for name, process in served.items():
                    found[name].append(process.ask("time"))
            for name, times in found.items():
                least, median = min(each["min"] for each in times), statistics.median(each["median"] for each in times)
                print(f"{kind:4} {way:8} {name:6} least {least:6.0f} us, median {median:6.0f} us", end=" ", flush=True)
                print({what: round(number, 1) for what, number in served[name].ask("count").items() if number})
            for process in served.values():
                process.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="folder of another checkout, measured in turns with this one")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS))
    parser.add_argument("--ways", type=lambda text: text.split(","), default=["eager", "compiled"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=150)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.kinds[0], args.ways[0] == "compiled", args.repeats)
    else:
        measure(args)


if __name__ == "__main__":
    main()
