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
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.contact_setup import (
    ROOT,
    Setup,
    batches_of,
    child_of,
    engine_of,
    log_normal_lengths,
    peak_of,
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
        used, why = engine.capture_if_it_pays(steps[0][0], True)
        found["captured"] = f"{used} ({why})"
    for batches in steps[:WARM]:
        engine.train_step(batches, 1e-4)
    times = [seconds(setup, lambda batches=batches: engine.train_step(batches, 1e-4)) for batches in steps[WARM:]]
    found |= {
        "median_ms": round(1e3 * statistics.median(times), 2),
        "tokens_per_s": round(sum(sum(of_step) for of_step in lengths[WARM:]) / sum(times)),
        "n": len(times),
    }
    found |= _on_the_device(setup, lambda: engine.train_step(steps[WARM], 1e-4))
    if engine.graphs is not None:
        found["buckets"] = len(engine.graphs.held)
    torch.compiler.reset()
    return found


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
    """14. An 8B's LoRA on rows of 4,096, two per forward: kernels of attention in turn, then PEFT with Liger."""
    found = {}
    for word in ("varlen", "groups") if not setup.small else ("groups",):
        engine = engine_of(setup, setup.llama_8b, settings_of(setup, attention=word))
        batches = batches_of(setup.llama_8b, [setup.long_row] * 4, tokens=2 * setup.long_row, all_targets=True)
        found[f"ours, {word}"] = _rate(setup, lambda engine=engine, batches=batches: engine.train_step(batches, 1e-4))
        del engine
        _emptied(setup)
    found["peft and liger"] = child_of(setup, "large_rows_of_peft", setup.site("peft"))
    mine = max(each["tokens_per_s"] for name, each in found.items() if name.startswith("ours"))
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
    import transformers

    config = setup.llama_8b
    values = {k: v for k, v in config.items() if k != "model_type"}
    of_type = transformers.AutoConfig.for_model(config["model_type"], **values)
    with torch.device(setup.device):
        dtype = torch.float32 if setup.small else torch.bfloat16
        model = transformers.AutoModelForCausalLM.from_config(of_type, dtype=dtype)
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


def _emptied(setup: Setup) -> None:
    import gc

    import torch

    gc.collect()
    module = torch.get_device_module(setup.device)
    if hasattr(module, "empty_cache"):
        module.empty_cache()


# ---- a base in less memory than the card has


def in_24_gib(setup: Setup) -> dict:
    """15. An 8B's QLoRA where torch may take 24 GiB of the card: rows of 2,048, recomputed."""
    import torch

    module = torch.get_device_module(setup.device)
    if hasattr(module, "set_per_process_memory_fraction"):
        module.set_per_process_memory_fraction(min(1.0, 24 * GIB / module.mem_get_info()[1]))
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


@contextlib.contextmanager
def folder_with_rows(setup: Setup) -> Iterator[tuple[Path, Path, Path]]:
    """(a folder of random weights with a tokenizer, rows of prompts and completions, rows of pairs)."""
    with tempfile.TemporaryDirectory(dir=_fastest()) as name:
        folder = Path(name)
        write_folder(setup, setup.llama_1b, folder / "model")
        drawn = random.Random(0)
        said = [" ".join(_words(drawn)) for _ in range(256)]
        rows = [{"prompt": text[: len(text) // 3], "completion": text[len(text) // 3 :]} for text in said]
        pairs = [
            {"prompt": row["prompt"], "chosen": row["completion"], "rejected": other["completion"]}
            for row, other in zip(rows, reversed(rows), strict=True)
        ]
        for path, content in (("rows.jsonl", rows), ("pairs.jsonl", pairs)):
            (folder / path).write_text("".join(json.dumps(row) + "\n" for row in content))
        yield folder / "model", folder / "rows.jsonl", folder / "pairs.jsonl"


def _words(drawn: random.Random) -> list[str]:
    count = min(400, max(8, round(drawn.lognormvariate(3.6, 0.75))))
    return ["".join(drawn.choice("abcdefghijklmnop") for _ in range(drawn.randint(2, 7))) for _ in range(count)]


def _fastest() -> str | None:
    """Memory as a disk, if there is any."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def runs(setup: Setup) -> dict:
    """16. Runs of train.py on files, a kind each: tokens per second; step and memory measured and predicted."""
    with folder_with_rows(setup) as (model, rows, pairs):
        found = {}
        for kind in RUNS if not setup.small else ("lora", "dpo"):
            data = pairs if kind == "dpo" else rows
            found[kind] = run_of(setup, model, data, RUNS[kind])
        return found


def run_of(
    setup: Setup, model: Path, data: Path, flags: list[str], launch: Callable | None = None, each: int = 8
) -> dict:
    """What a run of some steps left in its log. `each`: rows of a step on each rank."""
    with tempfile.TemporaryDirectory() as out:
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
        words += ["--max_steps", setup.few, "--validation_split", 0, "--batch_size", each, *flags]
        argv = [sys.executable, "-W", "ignore", "train.py", *map(str, words)]
        done = (launch or _run)(argv)
        log = Path(out) / "metrics.jsonl"
        if done.returncode or not log.is_file():
            return {"failed": f"exit {done.returncode}: {(done.stderr or done.stdout)[-400:]}"}
        return figures_of([json.loads(line) for line in log.read_text().splitlines()])


def _run(argv: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120)


def figures_of(events: list[dict]) -> dict:
    """Figures of a run from the events of its log: medians over the steps but the first."""
    start = next(event for event in events if event["event"] == "start")
    end = next(event for event in events if event["event"] == "end")
    steps = [event for event in events if event["event"] == "step"]
    taken = [each["num_tokens"] / each["tokens_per_s"] for each in steps[1:]]
    found = {
        "tokens_per_s": round(statistics.median(each["tokens_per_s"] for each in steps[1:])),
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
    with tempfile.TemporaryDirectory() as name:
        data, out = f"{name}/sudoku", f"{name}/out"
        build = [sys.executable, "-m", "dataset.build_puzzle_dataset", "--size", "4", "--output-dir", data]
        made = _run([*build, "--count", "200", "--test_count", "20"])
        if made.returncode:
            return {"failed": made.stderr[-300:]}
        words = ["--config-name", "cfg_puzzle", f"data_paths=[{data}]", f"checkpoint_path={out}"]
        words += [f"max_steps={setup.few}", f"device={setup.device}"]
        if setup.small:
            words += ["arch.hidden_size=64", "arch.num_heads=4"]
        done = _run([sys.executable, "-W", "ignore", "pretrain.py", *words])
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
    with folder_with_rows(dataclasses.replace(setup, tiny=True)) as (model, rows, _):
        flags = ["--train_type", "lora", "--precision", "fp32"]
        alone = run_of(setup, model, rows, flags)
        both = run_of(setup, model, rows, [*flags, "--dp_shards", "2"], _launched, each=4)
        found = {"one": alone, "two": both}
        if "loss" in alone and "loss" in both:
            found["losses_differ_by"] = max(abs(a - b) for a, b in zip(alone["loss"], both["loss"], strict=True))
        return found


def _launched(argv: list[str]) -> subprocess.CompletedProcess:
    """Two ranks of this command, as torchrun starts them; the result of the first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [argv[0], "-W", "ignore", "-c", STAGED, *argv[4:]]
    ranks = []
    for rank in range(2):
        env = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(
            subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    try:
        said = [each.communicate(timeout=150) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    code = max(abs(each.returncode) for each in ranks)
    return subprocess.CompletedProcess(argv, code, said[0][0], said[0][1] + said[1][1])
