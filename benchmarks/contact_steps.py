"""Questions of first_contact.py about whole steps: tokens per second, kernels, memory, each beside its prediction.

Large rows and small steps, this program beside transformers + PEFT with Liger's kernels; runs of train.py and
pretrain.py from the command line; a base in less memory than the card has; two ranks on one card.
"""

import contextlib
import dataclasses
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.contact_setup import (
    ROOT,
    Setup,
    batches_of,
    child_of,
    emptied,
    engine_of,
    log_normal_lengths,
    not_finished,
    peak_of,
    random_model,
    run_limited,
    seconds,
    settings_of,
    synchronize,
    write_folder,
)

GIB = 2**30
WAYS = (("lora", "eager"), ("lora", "compiled"), ("lora", "graphs"), ("qlora", "eager"), ("qlora", "graphs"))
WARM = 5  # steps before those that are timed: kernels are tried, layers compiled, graphs captured
RUNS = {
    "lora": ["--train_type", "lora"],
    "qlora": ["--train_type", "qlora"],
    "full": ["--train_type", "full"],
    "dpo": ["--train_type", "lora", "--preference", "dpo"],
    "recomputed": ["--train_type", "lora", "--use_gradient_checkpointing", "true"],
    "offload": ["--train_type", "lora", "--base_offload", "host"],
    "graphs": ["--train_type", "lora", "--cuda_graphs", "true"],
}
RUN_S = 90  # what a command may take: its imports, its load and its steps
WRITE_S = 15  # of a folder with random weights and rows
DATA_S = 20  # of building puzzles
PEFT_S = 70  # of the peer of large rows
# Seconds that a long question may take, those of its commands included.
LONG = {
    "small_steps": 150,
    "large_rows": 95 + PEFT_S,
    "in_24_gib": 90,
    "pretraining": DATA_S + RUN_S + 5,
    "two_ranks": WRITE_S + 2 * RUN_S + 5,
} | {f"run_{kind}": WRITE_S + RUN_S + 5 for kind in RUNS}


# ---- small steps, where the host is in the way


def small_steps(setup: Setup) -> dict:
    """13. Steps of eight documents: eager, compiled, replayed; the step's time, and the device's with its kernels."""
    return {f"{kind} {way}": _steps_of(setup, kind, way) for kind, way in WAYS}


def _steps_of(setup: Setup, kind: str, way: str) -> dict:
    import torch

    from finetune.torch_engine.compile import compile_layers

    engine = engine_of(setup, setup.llama_1b, settings_of(setup, kind))
    lengths = [log_normal_lengths(setup, step) for step in range(WARM + setup.few)]
    steps = [batches_of(setup.llama_1b, of_step) for of_step in lengths]
    found = {}
    if way == "compiled":
        compile_layers(engine.model, backend="aot_eager" if setup.small else "inductor")
    if way == "graphs":
        used, why = engine.capture_if_it_pays(steps[0][0], asked=True, microbatches=1)
        found["captured"] = f"{used} ({why})"
    warm_up(engine, steps)
    times = [seconds(setup, lambda batches=batches: engine.train_step(batches, 1e-4)) for batches in steps[WARM:]]
    found |= {
        "median_ms": round(1e3 * statistics.median(times), 2),
        "tokens_per_s": round(sum(sum(of_step) for of_step in lengths[WARM:]) / sum(times)),
        "n": len(times),
    }
    found |= _on_the_device(setup, lambda: engine.train_step(steps[WARM], 1e-4))
    if engine.graphs is not None:
        found |= buckets_of(engine.graphs)
    torch.compiler.reset()
    return found


def warm_up(engine, steps: list) -> None:
    """Trains what comes before the steps that are timed. The first microbatch of a size runs as it is, the second is
    captured: with graphs all are trained twice, so that further ones are replays.
    """
    for batches in steps[:WARM] if engine.graphs is None else steps * 2:
        engine.train_step(batches, 1e-4)


def buckets_of(graphs) -> dict:
    """Sizes of microbatches that were met, and those that are replayed."""
    captured = [held for held in graphs.held.values() if held.replay is not None]
    return {"buckets": len(graphs.held), "captured_buckets": len(captured)}


def _on_the_device(setup: Setup, work: Callable) -> dict:
    """Kernels of one step, and what they take together. On a CPU operators, and their own time."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if setup.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiled:
        work()
        synchronize(setup.device)
    if setup.small:
        averages = profiled.key_averages()
        own_us = sum(each.self_cpu_time_total for each in averages)
        return {"operators": sum(each.count for each in averages), "operators_ms": round(own_us / 1e3, 2)}
    kernels = [event for event in profiled.events() if event.device_type != torch.autograd.DeviceType.CPU]
    return {"kernels": len(kernels), "device_ms": round(sum(event.device_time for event in kernels) / 1e3, 2)}


# ---- large rows, where the device is


def large_rows(setup: Setup) -> dict:
    """14. An 8B's LoRA on rows of 4,096, two per forward: kernels of attention in turn, fp8; PEFT and Liger."""
    found = {}
    best = "groups" if setup.small else "varlen"
    for word, products in dict.fromkeys(((best, "exact"), ("groups", "exact"), (best, "fp8"))):
        engine = engine_of(setup, setup.llama_8b, settings_of(setup, attention=word, frozen_products=products))
        batches = batches_of(setup.llama_8b, [setup.long_row] * 4, tokens=2 * setup.long_row, all_targets=True)
        name = f"ours, {word}"
        proof = {}
        if products == "fp8":
            name = f"{name}, fp8"
            proof["proof"] = "{} ({})".format(*engine.prove_fp8(batches[0], before=None))
        measured = _rate(setup, lambda engine=engine, batches=batches: engine.train_step(batches, 1e-4))
        found[name] = measured | proof
        del engine
        emptied(setup)
    found["peft and liger"] = child_of(setup, "large_rows_of_peft", PEFT_S, setup.site("peft"))
    exact = [each for name, each in found.items() if name.startswith("ours") and not name.endswith("fp8")]
    mine = max(each["tokens_per_s"] for each in exact)
    theirs = found["peft and liger"].get("tokens_per_s")
    return found | {"ours by theirs": round(mine / theirs, 3) if theirs else None}


def _rate(setup: Setup, step: Callable) -> dict:
    """Tokens per second and peak of steps of four long rows."""
    for _ in range(2):
        step()
    times: list[float] = []

    def timed() -> None:
        for _ in range(setup.few_large):
            times.append(seconds(setup, step))

    peak = peak_of(setup, timed)
    return {
        "tokens_per_s": round(4 * setup.long_row / statistics.median(times)),
        "median_s": round(statistics.median(times), 4),
        "n": len(times),
        "peak_gib": peak and round(peak / GIB, 2),
    }


def large_rows_of_peft(setup: Setup) -> dict:
    """A loop of ten lines: transformers, PEFT, and Liger's kernels where they are installed."""
    import peft
    import torch

    config = setup.llama_8b
    model = random_model(setup, config)
    versions = {"liger": "not installed"}
    with contextlib.suppress(ImportError):
        import liger_kernel
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(model=model)
        versions["liger"] = getattr(liger_kernel, "__version__", "installed")
    adapters = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, adapters).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(3, config["vocab_size"], (4, setup.long_row), generator=generator).to(setup.device)

    def step() -> None:
        for part in rows.split(2):
            (model(input_ids=part, labels=part).loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return _rate(setup, step) | versions


# ---- a base in less memory than the card has


def in_24_gib(setup: Setup) -> dict:
    """15. An 8B's QLoRA where torch may take 24 GiB of the card: rows of 2,048, recomputed."""
    import torch

    module = torch.get_device_module(setup.device)
    if not hasattr(module, "set_per_process_memory_fraction"):
        return _in_what_there_is(setup)
    emptied(setup)
    module.set_per_process_memory_fraction(min(1.0, 24 * GIB / module.mem_get_info()[1]))
    try:
        return _in_what_there_is(setup)
    finally:
        module.set_per_process_memory_fraction(1.0)


def _in_what_there_is(setup: Setup) -> dict:
    settings = settings_of(setup, "qlora", use_gradient_checkpointing="true")
    engine = engine_of(setup, setup.llama_8b, settings)
    lengths = [setup.long_row // 2] * 4
    batches = batches_of(setup.llama_8b, lengths, tokens=setup.long_row, all_targets=True)
    engine.train_step(batches, 1e-4)
    times: list[float] = []

    def timed() -> None:
        for _ in range(3):
            times.append(seconds(setup, lambda: engine.train_step(batches, 1e-4)))

    peak = peak_of(setup, timed)
    rate = round(sum(lengths) / statistics.median(times))
    return {"tokens_per_s": rate, "peak_gib": peak and round(peak / GIB, 2), "n": len(times)}


# ---- the command line


def files_of(setup: Setup) -> tuple[Path, Path, Path]:
    """(a folder of random weights with a tokenizer, rows of prompts and completions, rows of pairs), written once."""
    assert setup.folder is not None, "--folder"
    folder = Path(setup.folder) / ("tiny" if setup.small else "1.2B")
    if not folder.is_dir():
        writing = Path(tempfile.mkdtemp(dir=setup.folder))
        write_folder(setup, setup.llama_1b, writing / "model")
        _write_rows(writing)
        writing.rename(folder)
    return folder / "model", folder / "rows.jsonl", folder / "pairs.jsonl"


def _write_rows(folder: Path) -> None:
    drawn = random.Random(0)
    said = [" ".join(_words(drawn)) for _ in range(256)]
    rows = [{"prompt": text[: len(text) // 3], "completion": text[len(text) // 3 :]} for text in said]
    pairs = [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": other["completion"]}
        for row, other in zip(rows, reversed(rows), strict=True)
    ]
    for path, content in (("rows.jsonl", rows), ("pairs.jsonl", pairs)):
        (folder / path).write_text("".join(json.dumps(row) + "\n" for row in content))


def _words(drawn: random.Random) -> list[str]:
    count = min(400, max(8, round(drawn.lognormvariate(3.6, 0.75))))
    return ["".join(drawn.choice("abcdefghijklmnop") for _ in range(drawn.randint(2, 7))) for _ in range(count)]


def run_kind(setup: Setup, kind: str) -> dict:
    """16. A run of train.py on files: tokens per second; step and memory measured and predicted."""
    if setup.small and kind not in ("lora", "dpo"):
        return {"not_run": "in small these are lora and dpo"}
    model, rows, pairs = files_of(setup)
    data = pairs if kind == "dpo" else rows
    if kind == "graphs":
        return run_of(setup, model, data, RUNS[kind], replayed=setup.many)
    return run_of(setup, model, data, RUNS[kind])


OF_RUNS = {f"run_{kind}": partial(run_kind, kind=kind) for kind in RUNS}


def run_of(
    setup: Setup,
    model: Path,
    data: Path,
    flags: list[str],
    launch: Callable | None = None,
    each: int = 8,
    replayed: int = 0,
) -> dict:
    """Figures that a run of some steps left in its log. `each`: rows of a step on each rank. `replayed`: so many steps,
    of which the last eighth counts.
    """
    with tempfile.TemporaryDirectory(dir=setup.folder) as out:
        words = [
            "--model_name",
            model,
            "--dataset",
            data,
            "--output_dir",
            out,
            "--overwrite",
            "--backend",
            setup.device,
        ]
        words += ["--max_steps", replayed or setup.few, "--validation_split", 0, "--batch_size", each, *flags]
        argv = [sys.executable, "-W", "ignore", "train.py", *map(str, words)]
        done = (launch or run_limited)(argv, RUN_S)
        log = Path(out) / "metrics.jsonl"
        if done.returncode or not log.is_file():
            return {"failed": f"exit {done.returncode}: {(done.stderr or done.stdout)[-400:]}"}
        return figures_of([json.loads(line) for line in log.read_text().splitlines()], replayed // 8)


def figures_of(events: list[dict], last: int = 0) -> dict:
    """Figures of a run from the events of its log: medians over the steps but the first, or over the `last` ones."""
    start = next(event for event in events if event["event"] == "start")
    end = next(event for event in events if event["event"] == "end")
    steps = [event for event in events if event["event"] == "step"]
    counted = steps[-last:] if last else steps[1:]
    taken = [each["num_tokens"] / each["tokens_per_s"] for each in counted]
    found = {
        "tokens_per_s": round(statistics.median(each["tokens_per_s"] for each in counted)),
        "step_s": round(statistics.median(taken), 4),
        "loss": [round(each["loss"], 4) for each in (steps[0], steps[-1])],
        "peak_gib": round(end["peak_memory_bytes"]["total"] / GIB, 2),
        "n": len(taken),
    }
    predicted = start.get("predicted_memory_bytes")
    if predicted:
        found["memory, predicted by measured"] = round(predicted["total"] / end["peak_memory_bytes"]["total"], 3)
    time = start.get("predicted_seconds_per_step")
    if time:
        found["step, predicted by measured"] = round(time["total"] / found["step_s"], 3)
    return found


def pretraining(setup: Setup) -> dict:
    """17. pretrain.py on puzzles: that it runs on the card, and its last lines."""
    with tempfile.TemporaryDirectory(dir=setup.folder) as name:
        data = f"{name}/sudoku"
        out = f"{name}/out"
        build = [sys.executable, "-m", "dataset.build_puzzle_dataset", "--size", "4", "--output-dir", data]
        made = run_limited([*build, "--count", "200", "--test_count", "20"], DATA_S)
        if made.returncode:
            return {"failed": f"exit {made.returncode}: {made.stderr[-300:]}"}
        words = ["--config-name", "cfg_puzzle", f"data_paths=[{data}]", f"checkpoint_path={out}"]
        words += [f"max_steps={setup.few}", f"device={setup.device}"]
        if setup.small:
            words += ["arch.hidden_size=64", "arch.num_heads=4"]
        done = run_limited([sys.executable, "-W", "ignore", "pretrain.py", *words], RUN_S)
        if done.returncode:
            return {"failed": f"exit {done.returncode}: {(done.stderr or done.stdout)[-400:]}"}
        return {"said": done.stdout.strip().splitlines()[-2:]}


# ---- two ranks on one card

STAGED = """
import train
from finetune.system import process
from finetune.torch_engine.parallel import process_groups
process_groups.COMMUNICATION.pop("cuda", None)  # NCCL takes one rank per card; Gloo's collectives are staged
process.exit_with(train.main)
"""


def two_ranks(setup: Setup) -> dict:
    """18. FSDP2 over two ranks on one device, their collectives staged through Gloo, beside one process."""
    model, rows, _ = files_of(dataclasses.replace(setup, tiny=True))
    flags = ["--train_type", "lora", "--precision", "fp32"]
    alone = run_of(setup, model, rows, flags)
    both = run_of(setup, model, rows, [*flags, "--dp_shards", "2"], launch=launched, each=4)
    found = {"one": alone, "two": both}
    if "loss" in alone and "loss" in both:
        found["losses_differ_by"] = max(abs(a - b) for a, b in zip(alone["loss"], both["loss"], strict=True))
    return found


def launched(argv: list[str], limit_s: float) -> subprocess.CompletedProcess:
    """Two ranks of this command, as torchrun starts them; the result of the first. Both end with the slower's limit."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [argv[0], "-W", "ignore", "-c", STAGED, *argv[4:]]
    end = time.monotonic() + limit_s
    ranks = []
    for rank in range(2):
        env = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(
            subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    try:
        said = [each.communicate(timeout=max(0.0, end - time.monotonic())) for each in ranks]
    except subprocess.TimeoutExpired:
        return not_finished(argv, limit_s)
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    code = max(abs(each.returncode) for each in ranks)
    return subprocess.CompletedProcess(argv, code, said[0][0], said[0][1] + said[1][1])
