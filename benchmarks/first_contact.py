"""The first minutes on a card: one JSON of facts, eighteen questions in numbers, a comparison, and the suite's result.

    python benchmarks/first_contact.py --out found.json    at most eight minutes; again: what is missing there
    python benchmarks/first_contact.py --quick             at most two
    python benchmarks/first_contact.py --device cpu        in small, anywhere
    ... --only small_steps,large_rows --parts questions    some of it
    ... --site peft=DIR --site unsloth=DIR                 another program from a folder of its own

Nothing is downloaded: models are Llama's and Mistral's dimensions with random weights, rows are random. Each question
runs in a child process with a time limit; what fails or takes too long is a line of the JSON, and the next one goes on.
A file of another device, or of --quick, is put aside as FILE.old.
PEFT with Liger's kernels, TRL and Unsloth are compared where they are installed (requirements-bench.txt), or from
folders that `pip install --target DIR` has filled elsewhere.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import contact_steps  # noqa: E402
from benchmarks.contact_setup import (  # noqa: E402
    STEP_ROWS,
    TINY,
    Setup,
    batches_of,
    child_of,
    command,
    emptied,
    engine_of,
    environment,
    fastest,
    in_group,
    last_line,
    log_normal_lengths,
    peak_of,
    run_in_group,
    seconds,
    settings_of,
    spread,
    synchronize,
    write_folder,
)

LIMIT_S, QUICK_LIMIT_S = 480, 120
PACKAGES = ("torch", "triton", "transformers", "peft", "trl", "unsloth", "bitsandbytes", "liger-kernel", "flash-attn")
COMPETITORS = ("ours", "trl", "unsloth")


# ---- the questions: each returns what it found


def facts(setup: Setup) -> dict:
    """The machine, what is installed, and what is tried on the device: kernels, products, copies."""
    import torch

    from finetune.torch_engine.attention import varlen
    from finetune.torch_engine.device import DTYPES, rounds_to_tf32
    from finetune.torch_engine.experts import grouped
    from finetune.torch_engine.kernels import ops

    device, versions = torch.device(setup.device), {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    found: dict = {"python": sys.version.split()[0], "packages": versions, "compiler": shutil.which("gcc")}
    found["environment"] = {
        k: v for k, v in os.environ.items() if k.startswith(("PYTORCH_", "TORCH_", "CUDA_", "NCCL"))
    }
    if device.type != "cpu":
        module = torch.get_device_module(device)
        found |= {"card": module.get_device_name(), "devices": module.device_count(), "runtime": torch.version.cuda}
        if hasattr(module, "get_device_capability"):
            found["capability"] = module.get_device_capability()
        if hasattr(module, "mem_get_info"):
            found["free_bytes"], found["bytes"] = module.mem_get_info()
    tried = {}
    for word, dtype in DTYPES.items():
        tried[word] = {
            "nf4": nf4_error(device, dtype),
            "norms, SwiGLU, RoPE": ops.error_on(device, dtype) if device.type != "cpu" else "not on a CPU",
            "experts in groups": None if grouped.works(device, dtype) else "not here",
            "products_tflops": products_tflops(setup, dtype),
        }
        for name, kernel in varlen.KERNELS.items():
            if name != "flash-attention 3 of kernels" and device.type != "cpu" and dtype in kernel.dtypes:
                for windowed in (False, True):
                    key = f"attention: {name}{', window' * windowed}"
                    tried[word][key] = varlen.trial(kernel.load, device, dtype, 128, 4, windowed)
    x = torch.randn(512, 512).to(device)
    off = ((x @ x).cpu().double() - x.cpu().double() @ x.cpu().double()).abs().max().item()
    return found | {"tried": tried, "fp32_product_error": off, "tf32": rounds_to_tf32(device)}


def nf4_error(device, dtype) -> str | None:
    from finetune.quantizers import nf4

    return nf4.triton_error(device, dtype) if device.type != "cpu" else nf4.kernel_of("cpu")


def products_tflops(setup: Setup, dtype) -> float:
    import torch

    size = 128 if setup.small else 4096
    x = torch.randn(size, size, dtype=dtype, device=setup.device)
    seconds(setup, lambda: x @ x)
    return round(2 * size**3 / min(seconds(setup, lambda: x @ x) for _ in range(3)) / 1e12, 3)


def plans_per_shape(setup: Setup) -> dict:
    """1. Attention of equal and of new lengths, forward and backward: is the worst step far above the median?"""
    import torch

    from finetune.parts.attention import AttentionPlan
    from finetune.torch_engine.attention import per_document
    from finetune.torch_engine.attention.varlen import Attention

    device = torch.device(setup.device)
    heads, kv, size, dtype = (4, 2, 16, torch.float32) if setup.small else (32, 8, 128, torch.bfloat16)
    ways = {"groups": (Attention(), False)}
    if device.type != "cpu":
        ways |= {"groups, cuDNN": (Attention(), True), "varlen": (Attention(AttentionPlan("auto", ("varlen",))), False)}
    found = {}
    for name, (attention, cudnn) in ways.items():
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        for kind in ("equal", "new"):
            times = []
            for step in range(min(setup.steps, 25)):
                lengths = log_normal_lengths(setup, step if kind == "new" else 0)
                positions = torch.cat([torch.arange(n) for n in lengths])
                q, k, v = (
                    torch.randn(1, n, len(positions), size, dtype=dtype, device=device, requires_grad=True)
                    for n in (heads, kv, kv)
                )
                documents = per_document.documents_of(positions, device, attention)

                def work(q=q, k=k, v=v, documents=documents):
                    out, _ = per_document.document_attention(None, q, k, v, None, documents=documents)
                    out.float().sum().backward()

                times.append(seconds(setup, work))
            found[f"{name}, {kind} lengths"] = spread(times[1:])
    return found


def waits(setup: Setup) -> dict:
    """2. Reads of the device and uploads that wait, in a step of several microbatches of qlora: one read is allowed."""
    import warnings

    import torch

    from tests.support.host_waits import HostWaits

    if setup.small:
        return {"not_run": "a CPU waits for nothing; tests/torch_engine/test_host_waits.py counts on a stand-in device"}
    engine = engine_of(setup, setup.llama, settings_of(setup, "qlora"))
    batches = batches_of(setup.llama, log_normal_lengths(setup, 0), setup.tokens // 4)
    engine.train_step(batches[:1], 1e-4)
    with HostWaits(setup.device) as counted:
        engine.train_step(batches, 1e-4)
    found = {"microbatches": len(batches), "reads": len(counted.reads), "waiting_uploads": len(counted.uploads)}
    module = torch.get_device_module(setup.device)
    if hasattr(module, "set_sync_debug_mode"):  # what torch's kernels wait for inside
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module.set_sync_debug_mode("warn")
            engine.train_step(batches, 1e-4)
            module.set_sync_debug_mode("default")
        found["synchronizing_calls"] = sum("synchroniz" in str(w.message) for w in caught)
    return found


def without_compiler(setup: Setup) -> dict:
    """3. NF4 where Triton finds neither compiler nor its cache."""
    if setup.small:
        return {"not_run": "a CPU needs no Triton; tests/quantizers/test_nf4.py has a Triton without a compiler"}
    code = (
        "import torch; from finetune.quantizers import nf4\n"
        f"print(nf4.kernel_of({setup.device!r}))\n"
        "from finetune.torch_engine.kernels import ops\n"
        f"print(ops.error_on(torch.device({setup.device!r}), torch.float32))"
    )
    with tempfile.TemporaryDirectory() as empty:
        env = {k: v for k, v in os.environ.items() if k not in ("CC", "CXX")}
        env |= {"PATH": empty, "TRITON_CACHE_DIR": empty, "PYTHONPATH": environment()["PYTHONPATH"]}
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=env, capture_output=True, text=True)
    return {"exit_code": done.returncode, "says": done.stdout.splitlines() or done.stderr.splitlines()[-1:]}


def precision(setup: Setup) -> dict:
    """4. What --precision auto chooses here, and why."""
    from backend_manager import Backend, BackendManager, auto_precision

    capabilities = BackendManager(setup.device, verbose=False).capabilities
    chosen = auto_precision(Backend(setup.device), capabilities.supports_bfloat16)
    return {"auto": chosen, "reasons": {k: str(v) for k, v in capabilities.reasons.items()}}


def window_peak(setup: Setup) -> dict:
    """5. One step of a Mistral shape with a window: peak against prediction."""
    return step_peak(setup, setup.mistral, settings_of(setup, use_gradient_checkpointing="true"))


def step_peak(setup: Setup, config: dict, settings) -> dict:
    """Peak of the second step, as every later one, against the estimate without what the process itself takes."""
    from finetune.estimate import memory
    from finetune.estimate.model_cost import MicrobatchShape
    from finetune.estimate.model_shape import ModelShape
    from finetune.parts.parts import Parts

    engine = engine_of(setup, config, settings)
    (batch,) = batches_of(config, [setup.tokens // 2, setup.tokens // 3, setup.tokens // 6])
    engine.train_step([batch], 1e-4)
    peak = peak_of(setup, lambda: engine.train_step([batch], 1e-4))
    shape = MicrobatchShape(tuple(int(n) for n in document_lengths(batch)), batch.num_targets)
    items = memory.estimate(Parts(settings), ModelShape.from_config(config), shape, setup.device)["items"]
    predicted = sum(items.values()) - items.get("libraries", 0)
    return {"predicted_bytes": predicted, "peak_bytes": peak, "ratio": peak and round(predicted / peak, 3)}


def document_lengths(batch) -> list[int]:
    import numpy as np

    return np.unique(batch.document_ids_BS[batch.document_ids_BS >= 0], return_counts=True)[1].tolist()


def offload(setup: Setup) -> dict:
    """6. --use_activation_cpu_offload without recomputation: bytes copied to the host, of activations only."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Copied(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.copy_.default and args[0].device.type == "cpu" and args[0].ndim:
                Copied.bytes += args[0].nbytes
            return func(*args, **(kwargs or {}))

    engine = engine_of(setup, setup.llama, settings_of(setup, use_activation_cpu_offload=True))
    (batch,) = batches_of(setup.llama, [setup.tokens])
    engine.train_step([batch], 1e-4)
    weights = sum(p.nbytes for p in engine.model.parameters())
    with Copied() as copied:
        peak = peak_of(setup, lambda: engine.train_step([batch], 1e-4))
    return {"copied_bytes": copied.bytes, "weights_bytes": weights, "peak_bytes": peak}


def fragmentation(setup: Setup) -> dict:
    """7. Steps of log-normal lengths: what the allocator reserves beyond what was allocated, with growing segments and
    without."""
    if setup.small:
        return {"a heap without segments": fragmentation_here(setup)}
    found = {}
    for name, value in (("expandable", "True"), ("as torch ships it", "False")):
        env = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{value}"}
        found[name] = child_of(setup, "fragmentation_here", setup.short_s / 2 - 1, env)
    return found


def fragmentation_here(setup: Setup) -> dict:
    import torch

    engine = engine_of(setup, setup.llama, settings_of(setup, "qlora"))
    engine.train_step(batches_of(setup.llama, log_normal_lengths(setup, 0)), 1e-4)
    times = []
    for step in range(1, setup.steps):
        batches = batches_of(setup.llama, log_normal_lengths(setup, step))
        times.append(seconds(setup, lambda batches=batches: engine.train_step(batches, 1e-4)))
    module, found = torch.get_device_module(setup.device), spread(times)
    if hasattr(module, "max_memory_reserved"):
        found |= {"reserved_bytes": module.max_memory_reserved(), "allocated_bytes": module.max_memory_allocated()}
    return found


def several_devices(setup: Setup) -> dict:
    """8. Two ranks, FSDP2: losses and gradients against one process, the root gathered once per step."""
    import torch

    from tests.support import cases, ranks

    number = 1 if setup.small else torch.get_device_module(setup.device).device_count()
    if number < 2:
        return {"not_run": f"needs two devices; this machine has {number}"}
    wanted = [("FSDP2 2", "nf4", "llama")]
    with tempfile.TemporaryDirectory() as folder:
        figures = ranks.run(
            2, cases.matrix, Path(folder), device=setup.device, timeout_s=setup.short_s - 8, wanted=wanted
        )
    return {"figures": figures[0][0]}


def generation_peak(setup: Setup) -> dict:
    """9. Generation on a packed base: its peak beside the weights."""
    engine = engine_of(setup, setup.llama, settings_of(setup, "qlora"))
    weights = sum(p.nbytes for p in engine.model.parameters())

    def generate():
        with engine.full_weights():
            engine.generate([[3, 4, 5]] * 4, 8, set())

    taken = seconds(setup, generate)
    return {"weights_bytes": weights, "peak_bytes": peak_of(setup, generate), "first_s": round(taken, 3)}


def loading(setup: Setup) -> dict:
    """10. Quantizing the largest weight of a layer in blocks of a device's size and of a CPU's."""
    import torch

    from finetune.quantizers import nf4, packing
    from finetune.quantizers.linear import Format

    weight = torch.randn(256, 256) if setup.small else torch.randn(14336, 4096, dtype=torch.bfloat16)
    weight, fmt, found = weight.to(setup.device), Format(4, 64, "nf4", False, torch.float32), {}
    for name, block in (("device blocks", packing.DEVICE_BLOCK), ("CPU blocks", packing.CPU_BLOCK)):
        before = packing.block_of
        packing.block_of = lambda device, block=block: block
        try:
            times = [seconds(setup, lambda: nf4.quantize(weight, fmt)) for _ in range(2)]
        finally:
            packing.block_of = before
        found[f"{name}_s"] = round(min(times), 4)
    return found


def head_rows(setup: Setup) -> dict:
    """11. The head's loss in chunks of 128 rows and of more."""
    import torch

    from finetune.parts import engine_limits
    from finetune.torch_engine import loss

    vocab, hidden, rows = (1000, 64, 300) if setup.small else (128256, 4096, 2048)
    linear = torch.nn.Linear(hidden, vocab, bias=False, device=setup.device).requires_grad_(False)
    linear.to(torch.float32 if setup.small else torch.bfloat16)
    x = torch.randn(rows, hidden, device=setup.device, dtype=linear.weight.dtype, requires_grad=True)
    labels, found = torch.randint(0, vocab, (rows,)).to(setup.device), {}
    for number in (128, 512, 1024):
        names = ("LOGITS_CHUNK_BYTES", "DEVICE_LOGITS_CHUNK_BYTES")
        before = [getattr(engine_limits, name) for name in names]
        for name in names:
            setattr(engine_limits, name, 4 * vocab * number)

        def work():
            loss.Head(linear, 1.0, None).nll(x, labels).backward()

        work()
        found[f"{number} rows_s"] = round(min(seconds(setup, work) for _ in range(3)), 5)
        for name, value in zip(names, before, strict=True):
            setattr(engine_limits, name, value)
    return found


def launches_and_graphs(setup: Setup) -> dict:
    """12. Operations of a layer's forward and backward; compiled: the first step, and graphs after the third of the
    steps."""
    import torch
    from torch._dynamo.utils import counters

    from finetune.torch_engine.compile import compile_layers
    from tests.support import launches

    counts = launches.per_layer(quantized=True, recomputed=True)
    of_what = zip(("forward", "backward", "autograd nodes"), counts, strict=True)
    found = {"qlora recomputed, per layer": {name: sum(counted.values()) for name, counted in of_what}}
    engine = engine_of(setup, setup.llama, settings_of(setup))
    batches = [batches_of(setup.llama, log_normal_lengths(setup, step)) for step in range(min(setup.steps, 50))]
    eager = [seconds(setup, lambda b=b: engine.train_step(b, 1e-4)) for b in batches]
    counters.clear()
    compile_layers(engine.model, backend="aot_eager" if setup.small else "inductor")
    graphs, times = [], []
    for b in batches:
        times.append(seconds(setup, lambda b=b: engine.train_step(b, 1e-4)))
        graphs.append(int(counters["stats"]["unique_graphs"]))
    torch.compiler.reset()
    found |= {"eager": spread(eager[1:]), "compiled": spread(times[3:]), "first_compiled_step_s": round(times[0], 3)}
    breaks = sum(counters["graph_break"].values())
    return found | {"graphs": graphs[-1], "graphs_after_the_third": graphs[-1] - graphs[2], "breaks": breaks}


def by_name(*functions: Callable) -> dict[str, Callable]:
    return {function.__name__: function for function in functions}


# What was not asked of a card yet comes first.
QUESTIONS = (
    by_name(facts, contact_steps.small_steps, contact_steps.large_rows)
    | contact_steps.OF_RUNS
    | by_name(
        contact_steps.in_24_gib,
        contact_steps.pretraining,
        contact_steps.two_ranks,
        plans_per_shape,
        waits,
        without_compiler,
        precision,
        window_peak,
        offload,
        fragmentation,
        several_devices,
        generation_peak,
        loading,
        head_rows,
        launches_and_graphs,
    )
)
PARTS = QUESTIONS | by_name(fragmentation_here, contact_steps.large_rows_of_peft)  # the last two in children


# ---- against others: each in its own process, on one folder


def competitor(args) -> None:
    """Prints {'first_step_s', 'tokens_per_s', 'peak_bytes'} of one competitor on a folder."""
    begin, setup = args.begin, Setup(args.device, args.quick)
    train = {"ours": train_ours, "trl": train_trl, "unsloth": train_unsloth}[args.competitor]
    times, tokens, peak = train(setup, args)
    rest = times[1:] or times
    per_step = sum(tokens[1 : len(rest) + 1]) if times[1:] else tokens[0]
    rate = per_step / sum(end - start for start, end in rest)
    print(
        json.dumps({"first_step_s": times[0][1] - begin, "tokens_per_s": rate, "steps": len(times), "peak_bytes": peak})
    )


def steps_to_compare(setup: Setup) -> list[list[int]]:
    return [log_normal_lengths(setup, step) for step in range(3 if setup.small else 12 if setup.quick else 25)]


def train_ours(setup: Setup, args) -> tuple[list, list, int | None]:
    import torch

    from finetune.system.process import prepare_environment
    from finetune.torch_engine.device import prepare_attention
    from tests.support.build import load_model, torch_engine

    prepare_environment()
    device, settings = torch.device(setup.device), settings_of(setup, args.kind)
    prepare_attention(device)
    engine = torch_engine(load_model(Path(args.folder), settings, device, say=lambda *_: None), settings, device)
    engine.verify("auto")
    engine.begin_memory(0)
    times, tokens, config = [], [], json.loads((Path(args.folder) / "config.json").read_text())
    for lengths in steps_to_compare(setup):
        batches = batches_of(config, lengths, all_targets=True)
        start = time.time()
        engine.train_step(batches, 1e-4)
        synchronize(device)
        times.append((start, time.time()))
        tokens.append(sum(lengths))
    return times, tokens, engine.memory().total


def rows_for_trainers(setup: Setup, config: dict):
    import datasets
    import numpy as np

    rng, rows = np.random.default_rng(0), []
    for lengths in steps_to_compare(setup):
        rows += [rng.integers(3, config["vocab_size"], n).tolist() for n in lengths]
    return datasets.Dataset.from_dict({"input_ids": rows})


def trainer_steps(setup: Setup, args, model, peft_config):
    """TRL's trainer, packed and in order, on the rows of `ours`."""
    import torch
    import transformers
    import trl

    from benchmarks.vs_trl import tokenizer_of

    times, config, started = [], json.loads((Path(args.folder) / "config.json").read_text()), {}

    class Steps(transformers.TrainerCallback):
        def on_step_begin(self, trainer_args, state, control, **kwargs):
            started["at"] = time.time()

        def on_step_end(self, trainer_args, state, control, **kwargs):
            synchronize(setup.device)
            times.append((started["at"], time.time()))

    class InOrder(trl.SFTTrainer):
        def _get_train_sampler(self, *args, **kwargs):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    args.model = args.folder  # as vs_trl names it
    options = dict(report_to="none", save_strategy="no", lr_scheduler_type="constant", disable_tqdm=True)
    options |= dict(max_length=None, padding_free=True, bf16=not setup.small, use_cpu=setup.small, warmup_steps=0)
    lengths = steps_to_compare(setup)
    trainer = InOrder(
        model=model,
        args=trl.SFTConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=STEP_ROWS,
            max_steps=len(lengths),
            learning_rate=1e-4,
            gradient_checkpointing=False,
            **options,
        ),
        train_dataset=rows_for_trainers(setup, config),
        peft_config=peft_config,
        processing_class=tokenizer_of(args),
        callbacks=[Steps()],
    )
    peak = peak_of(setup, trainer.train)
    return times, [sum(n) for n in lengths], peak


def train_trl(setup: Setup, args):
    import peft
    import torch
    import transformers

    dtype, quantization = torch.float32 if setup.small else torch.bfloat16, None
    if args.kind == "qlora":
        quantization = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    where = {"device_map": {"": 0}} if not setup.small else {}
    attention = {"attn_implementation": "flash_attention_2"} if importlib.util.find_spec("flash_attn") else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.folder, dtype=dtype, quantization_config=quantization, **where, **attention
    )
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return trainer_steps(setup, args, model, config)


def train_unsloth(setup: Setup, args):
    from unsloth import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(args.folder, max_seq_length=1024, load_in_4bit=args.kind == "qlora")
    names = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
    model = FastLanguageModel.get_peft_model(
        model, r=16, lora_alpha=32, lora_dropout=0, target_modules=names, use_gradient_checkpointing=False
    )
    return trainer_steps(setup, args, model, None)


def shapes(setup: Setup) -> dict[str, dict]:
    from tests.support import large

    if setup.small:
        return {"tiny": TINY}
    both = {"1.2B": large.LLAMA_1B, "8B": large.LLAMA_8B}
    return {"1.2B": both["1.2B"]} if setup.quick else both


def missing(name: str) -> str | None:
    """Why a competitor cannot run."""
    needs = {"ours": (), "trl": ("trl", "peft", "datasets"), "unsloth": ("unsloth", "trl")}[name]
    lacks = [package for package in needs if not importlib.util.find_spec(package)]
    return f"{', '.join(lacks)} not installed" if lacks else None


# ---- the parent: children with limits, one JSON


class Clock:
    def __init__(self, limit_s: float):
        self.end = time.monotonic() + limit_s

    def left(self) -> float:
        return self.end - time.monotonic()


def asked(
    setup: Setup, names: list[str], clock: Clock, each_s: float, keep: Callable[[dict], object] = lambda found: None
) -> dict:
    """{question: what it found, with its seconds}. One child answers them in turn; a new one goes on where it ended.
    `keep(found)`: called after each, with what is new.
    """
    found: dict = {}
    left = list(names)
    with tempfile.TemporaryDirectory(dir=fastest(), ignore_cleanup_errors=True) as folder:
        while left and clock.left() > 5:
            answered, reason = asked_of_a_child(setup, left, clock, each_s, keep, folder)
            found |= answered
            left = left[len(answered) :]
            if left:  # the question on which it ended
                found[left.pop(0)] = {"failed": reason}
                keep(found)
    return found | {name: {"not_run": "no time left"} for name in left}


def asked_of_a_child(
    setup: Setup, names: list[str], clock: Clock, each_s: float, keep: Callable[[dict], object], folder: str
) -> tuple[dict, str]:
    """(answers of a child until it ended or took too long, why it did). All that it started ends with it."""
    answered: dict = {}
    argv = command(setup, "--ask", ",".join(names), "--folder", folder)
    limits = [contact_steps.LONG.get(name, each_s) for name in names]
    with tempfile.TemporaryFile("w+") as errors:
        with in_group(argv, env=environment(), stdout=subprocess.PIPE, stderr=errors) as child:
            began = time.monotonic()
            for name, found in answers(child, clock, limits):
                answered[name] = found
                began = time.monotonic()
                keep(answered)
            ended = child.poll()
        errors.seek(0)
        said = last_line(errors.read())
    if ended is None:
        return answered, f"no answer in {time.monotonic() - began:.0f} s"
    return answered, f"exit code {ended}: {said}"


def answers(child: subprocess.Popen, clock: Clock, limits: list[float]) -> Iterator[tuple[str, dict]]:
    """(question, what it found) as the child prints them, until it ends or one takes longer than its limit. Other lines
    of the child are no answers and give no time.
    """
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=put_lines, args=(child.stdout, lines), daemon=True).start()
    for limit in limits:
        end = Clock(min(limit, clock.left()))
        line = "\n"
        while not line.startswith('{"asked"'):
            try:
                line = lines.get(timeout=max(0.0, end.left()))
            except queue.Empty:
                return
            if not line:
                child.wait()
                return
        answer = json.loads(line)
        print(line.strip(), file=sys.stderr, flush=True)
        yield answer["asked"], answer["found"] | {"seconds": answer["seconds"]}


def put_lines(stream, lines: queue.Queue) -> None:
    for line in stream:
        lines.put(line)
    lines.put("")


def answer(setup: Setup, names: list[str]) -> None:
    for name in names:
        emptied(setup)  # of the engines of questions before
        start = time.perf_counter()
        found = PARTS[name](setup)
        said = {"asked": name, "found": found, "seconds": round(time.perf_counter() - start, 2)}
        print("\n" + json.dumps(said), flush=True)  # behind what else stands on the line


def suite(setup: Setup, limit_s: float) -> dict:
    """What `make test-gpu` runs: passed, failed with their names, skipped, deselected."""
    argv = [sys.executable, "-W", "ignore", "-m", "pytest", "--device", setup.device, "-q", "-n", "0", "--tb=line"]
    start = time.monotonic()
    done = run_in_group(argv, limit_s, environment())
    said = done.stdout
    if done.returncode == 124:
        return {"not_finished": f"in {limit_s:.0f} s", "passed_until_then": said.count(".")}
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|deselected|error)", said)}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.M)
    return counts | {"seconds": round(time.monotonic() - start), "names_of_failed": failed}


def compared(setup: Setup, clock: Clock, known: dict, keep: Callable[[dict], object]) -> dict:
    """{model and kind: figures of each competitor, ratios}: those of `known`, and what they lack."""
    found = dict(known)
    for size, config in shapes(setup).items():
        wanted = {}
        for kind in ("qlora", "lora"):
            figures = found.get(f"{size} {kind}", {})
            wanted[kind] = [name for name in COMPETITORS if can_run(setup, name) and not is_answer(figures.get(name))]
        if not any(wanted.values()) or clock.left() < 5:
            continue
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            needed = 20 * 2**30 if size == "8B" else 4 * 2**30
            if not setup.small and shutil.disk_usage(folder).free < needed:
                found[size] = {"not_run": f"needs {needed / 2**30:.0f} GiB in {tempfile.gettempdir()}"}
                continue
            found.pop(size, None)
            write_folder(setup, config, Path(folder))
            emptied(setup)
            for kind, names in wanted.items():
                figures = {name: {"not_run": missing(name)} for name in COMPETITORS if not can_run(setup, name)}
                figures = merged(figures, found.get(f"{size} {kind}", {}))
                for name in names:
                    figures = merged(figures, {name: one_competitor(setup, name, kind, folder, clock)})
                    found[f"{size} {kind}"] = figures | {"ratios": ratios(figures)}
                    keep(found)
                print(f"{size} {kind}: {json.dumps(figures)}", file=sys.stderr, flush=True)
    return found


def can_run(setup: Setup, name: str) -> bool:
    return setup.has_site(name) or missing(name) is None


def one_competitor(setup: Setup, name: str, kind: str, folder: str, clock: Clock) -> dict:
    limit = min(120.0, clock.left())
    if limit < 5:
        return {"not_run": "no time left"}
    more = "--competitor", name, "--kind", kind, "--folder", folder, "--begin", time.time()
    done = run_in_group(command(setup, *more), limit, setup.site(name))
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"first_step_s"')]
    return json.loads(lines[-1]) if lines else {"failed": last_line(done.stderr)}


def ratios(figures: dict) -> dict:
    """Ours by each other's: tokens per second, peak, seconds to the end of the first step."""
    mine, found = figures["ours"], {}
    for name, other in figures.items():
        if name != "ours" and "tokens_per_s" in other and "tokens_per_s" in mine:
            keys = [k for k in ("tokens_per_s", "peak_bytes", "first_step_s") if mine.get(k) and other.get(k)]
            found[name] = {key: round(mine[key] / other[key], 3) for key in keys}
    return found


def chosen_device(word: str) -> str:
    from backend_manager import BackendManager

    return BackendManager(None if word == "auto" else word, verbose=False).backend.value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cuda, xpu, mps or cpu")
    parser.add_argument("--quick", action="store_true", help="two minutes: no 8B, fewer steps, no suite")
    parser.add_argument("--parts", default="questions,compare,suite", help="some of these")
    parser.add_argument("--only", help="some of the questions: " + ", ".join(QUESTIONS))
    parser.add_argument(
        "--out", type=Path, help="write the JSON there, after each answer; what is there is not asked again"
    )
    parser.add_argument("--site", action="append", default=[], metavar="NAME=DIR", help="where peft, trl or unsloth is")
    for hidden in ("--ask", "--competitor", "--kind", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--begin", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ask or args.competitor:
        setup = Setup(args.device, args.quick, tuple(args.site), folder=args.folder)
        return answer(setup, args.ask.split(",")) if args.ask else competitor(args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # children are ended and folders removed
    parts = args.parts.split(",")
    names = args.only.split(",") if args.only else list(QUESTIONS)
    if args.quick and not args.only:
        names = [name for name in names if name not in contact_steps.LONG]
    unknown = set(names) - set(QUESTIONS)
    if unknown:
        parser.error(f"--only {args.only}: no question {', '.join(sorted(unknown))}. There are {', '.join(QUESTIONS)}")
    limit = QUICK_LIMIT_S if args.quick else LIMIT_S
    clock = Clock(limit - 5)
    setup = Setup(chosen_device(args.device), args.quick, tuple(args.site))
    found = kept_in(args.out, {"device": setup.device, "quick": args.quick})
    known = found.get("questions", {})

    def keep(part: str, answered: dict) -> None:
        found[part] = merged(found.get(part, {}), answered)
        if args.out:
            write_whole(args.out, json.dumps(found, indent=1) + "\n")

    if "questions" in parts:
        share = Clock(min(clock.left(), limit * (0.75 if {"compare", "suite"} & set(parts) else 1)))
        wanted = [name for name in names if not is_answer(known.get(name))]
        keep("questions", asked(setup, wanted, share, setup.short_s, lambda new: keep("questions", new)))
    if "compare" in parts:
        keep("compared", compared(setup, clock, found.get("compared", {}), lambda new: keep("compared", new)))
    if "suite" in parts and "passed" not in found.get("suite", {}):
        left = clock.left()
        if args.quick or left < 10:
            new = {"not_run": "with --quick" if args.quick else "no time left"}
        else:
            new = suite(setup, left)
        found |= merged({"suite": found["suite"]} if "suite" in found else {}, {"suite": new})
        keep("questions", {})
    print(json.dumps(found, indent=1))


def kept_in(out: Path | None, of: dict) -> dict:
    """Findings of an earlier start, if it was one `of` this device; otherwise `of`, and the file is put aside."""
    if out is None or not out.is_file():
        return of
    try:
        kept = json.loads(out.read_text())
    except ValueError:
        kept = None
    if isinstance(kept, dict) and {key: kept.get(key) for key in of} == of:
        return kept
    aside = out.with_name(out.name + ".old")
    os.replace(out, aside)
    what = {key: kept.get(key) for key in of} if isinstance(kept, dict) else "no whole JSON"
    print(f"--out {out}: {what}, not {of}. Starts afresh; what was there is in {aside}.", file=sys.stderr, flush=True)
    return of


def write_whole(path: Path, text: str) -> None:
    """The file is the old one or the new one, whenever this ends."""
    writing = path.with_name(path.name + ".writing")
    writing.write_text(text)
    os.replace(writing, path)


def merged(known: dict, new: dict) -> dict:
    """The new answers, except where the known one says more."""
    return known | {name: found for name, found in new.items() if says(found) >= says(known.get(name))}


def says(found: dict | None) -> int:
    """Nothing, why it was not run, why it failed, figures."""
    if not found:
        return 0
    return 1 if "not_run" in found else 2 if "failed" in found else 3


def is_answer(found: dict | None) -> bool:
    """True if nothing of it failed or was left for want of time."""
    return bool(found) and not re.search(r'"(failed|not_run)"', json.dumps(found))


if __name__ == "__main__":
    main()
