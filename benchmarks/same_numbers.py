"""The numbers of a fixed matrix of tiny runs, to the last bit: what a refactoring must not change.

python benchmarks/same_numbers.py --record FILE            run every cell, write what came out
python benchmarks/same_numbers.py --compare FILE           run them again: bitwise equal, or what differs first
python benchmarks/same_numbers.py --compare FILE --only "FSDP2 2"

Each cell is `python train.py ...` on a tiny random model, or `pretrain.py`. Kept are the numbers of every step and
evaluation and the digest of every tensor that the run wrote, moments and random state included. They depend on the
processor and on torch, so a record is compared only where it was made. Only flags and file formats of the project are
used, none of its code.
"""

import argparse
import hashlib
import json
import math
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEPS, STOPPED_AT, ROWS_PER_STEP = 6, 3, 8
PACKAGES = (
    *("torch", "transformers", "safetensors", "numpy", "bitsandbytes", "hqq", "optimum-quanto"),
    *("mlx", "mlx-lm", "accelerate"),
)
STEP_FIELDS = ("step", "loss", "grad_norm", "lr", "num_tokens", "num_targets")
EVAL_FIELDS = ("step", "loss", "num_targets", "exact_match", "num_rows", "perplexity", "targets_right", "rows_right")
# Of preference rows; an event without them has none.
REWARD_FIELDS = (*(f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")), "kl", "num_rows")
# What a run would otherwise settle by the machine's memory or speed is given.
COMMON = dict(
    backend="cpu",
    log_to="stdout",
    max_steps=STEPS,
    lr=3e-3,
    lr_scheduler="cosine",
    context_length=96,
    microbatch_tokens=300,
    batch_layout="flat",
    precision="fp32",
    use_gradient_checkpointing="false",
    seed=7,
)
ADAPTER = dict(train_type="lora", lora_rank=4)
NF4 = dict(ADAPTER, train_type="qlora", quantization_backend="nf4", group_size=32, cache_dequantized="false")
KINDS = {"full": dict(train_type="full"), "lora": ADAPTER, "nf4": NF4}
BF16, AUTOCAST, PADDED = dict(precision="bf16"), dict(precision="bf16_autocast"), dict(batch_layout="padded")
ACCUMULATED = dict(batch_size=2, gradient_accumulation_steps=4)
DROPOUT, DORA = dict(lora_dropout=0.2), dict(use_dora="true")
RECOMPUTED = dict(use_gradient_checkpointing="true")
VALIDATED = dict(validation_dataset="validation.jsonl", eval_every=2)
WIDTHS = {"bnb": (4, 8), "hqq": (4, 8, 3, 2), "quanto": (4, 8, 2), "mlx": (4, 8, 6, 5, 3, 2)}
LAYOUTS = {
    "DDP 2": dict(dp_degree=2, dp_shards=1),
    "FSDP2 2": dict(dp_shards=2),
    "TP 2": dict(tp_degree=2),
    "CP 2": dict(cp_degree=2),
    "PP 2": dict(pp_degree=2),
    "FSDP2 4": dict(dp_shards=4),
    "HSDP 2x2": dict(dp_degree=2, dp_shards=2),
    "FSDP2 2 x TP 2": dict(dp_shards=2, tp_degree=2),
}
EXPERT_LAYOUTS = {"EP 2": dict(dp_shards=2, ep_degree=2)}
PAIRS, LABELS = dict(dataset="pairs.jsonl"), dict(dataset="labels.jsonl")
PAIRS_VALIDATED = dict(validation_dataset="pairs_validation.jsonl", eval_every=2)
PREFERENCES = {
    "dpo": PAIRS | dict(preference="dpo"),
    "orpo": PAIRS | dict(preference="orpo", preference_beta=0.2),
    "kto": LABELS | dict(preference="kto", desirable_weight=1.5),
    "kto of pairs": PAIRS | dict(preference="kto"),
}
STREAMED = dict(streaming="true", shuffle_buffer=16)
MLX = dict(backend="mlx", batch_layout="padded")  # mlx-lm's models take no document boundaries
# Keys of pretrain.py.
RECURSIVE = {
    **{"arch.hidden_size": 32, "arch.num_heads": 2, "arch.L_layers": 1, "arch.expansion": 2},
    **{"arch.forward_dtype": "float32", "log_every_n_steps": 1, "device": "cpu", "seed": 7},
    **{"epochs": 2, "eval_interval": 1, "global_batch_size": 8, "gradient_accumulation_steps": 1},
    **{"lr_warmup_steps": 2, "lr": 3e-3},
}
LLAMA = dict(
    vocab_size=260,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=None,
    bos_token_id=1,
    eos_token_id=2,
)
MODELS = {
    "llama": ("LlamaConfig", LLAMA),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        LLAMA | dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    ),
    "gemma2": ("Gemma2Config", LLAMA | dict(head_dim=16, sliding_window=16, num_hidden_layers=2)),
    "gpt2": (
        "GPT2Config",
        dict(vocab_size=260, n_embd=64, n_layer=2, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2),
    ),
}


@dataclass(frozen=True)
class Cell:
    """One run. `resumed`: it then loses all that followed step STOPPED_AT, and is resumed.

    `recipe`: of pretrain.py, whose keys the flags then are; else the run is train.py's.
    """

    flags: dict
    world_size: int = 1
    resumed: bool = False
    recipe: str | None = None


def quantized(method: str, bits: int = 4) -> dict:
    return NF4 | dict(quantization_backend=method, n_bits=bits)


def of_ranks(layout: str, flags: dict, resumed: bool = False) -> Cell:
    degrees = (LAYOUTS | EXPERT_LAYOUTS)[layout]
    size = math.prod(n for name, n in degrees.items() if name != "ep_degree")
    data_ranks = degrees.get("dp_degree", 1) * degrees.get("dp_shards", 1)
    placed = dict(world_size=size, batch_size=ROWS_PER_STEP // data_ranks) | {"dp_shards": 1} | degrees
    return Cell(placed | flags, size, resumed)


def matrix() -> dict[str, Cell]:
    """{name: cell}."""
    full, lora, nf4 = KINDS.values()
    chat, expanded = dict(dataset="chat.jsonl", train_on_prompt="true"), dict(llama_pro_path="expanded")
    cells = {
        "full": full,
        "full bf16": full | BF16,
        "full recomputed": full | RECOMPUTED,
        "full accumulated padded": full | ACCUMULATED | PADDED,
        "full bf16_autocast": full | AUTOCAST,
        "lora": lora,
        "lora fp16": lora | dict(precision="fp16"),
        "lora accumulated dropout bf16": lora | ACCUMULATED | DROPOUT | BF16,
        "lora dropout recomputed padded": lora | DROPOUT | RECOMPUTED | PADDED,
        "lora dropout validated": lora | DROPOUT | VALIDATED,
        "lora chat": lora | chat,
        "lora rslora loraplus": lora | dict(use_rslora="true", loraplus_lr_ratio=4.0, lr_scheduler="linear"),
        "lora pissa": lora | dict(init_lora_weights="pissa"),
        "lora eva": lora | dict(init_lora_weights="eva"),
        "dora": lora | DORA,
        "dora bf16 dropout": lora | BF16 | DORA | DROPOUT,
        "nf4": nf4,
        "nf4 bf16": nf4 | BF16,
        "nf4 double": nf4 | dict(double_quant="true"),
        "nf4 accumulated dropout recomputed": nf4 | ACCUMULATED | DROPOUT | RECOMPUTED,
        "nf4 dequantized once": nf4 | dict(cache_dequantized="true"),
        "nf4 dora padded": nf4 | DORA | PADDED,
        "nf4 loftq": nf4 | dict(init_lora_weights="loftq"),
        "bnb fp4 double": quantized("bnb") | dict(quant_type="fp4", double_quant="true"),
        "llama_pro": expanded,
        "llama_pro nf4": {k: v for k, v in nf4.items() if k != "lora_rank"} | expanded,
        "qwen3_moe full": full | dict(model_name="qwen3_moe"),
        "qwen3_moe nf4": nf4 | dict(model_name="qwen3_moe"),
        "gemma2 lora": lora | dict(model_name="gemma2"),
        "gpt2 full": full | dict(model_name="gpt2"),
    }
    for name, flags in PREFERENCES.items():
        cells |= {f"{name} {kind}": KINDS[kind] | flags for kind in ("lora", "nf4")}
    cells |= {
        "orpo full": full | PREFERENCES["orpo"],
        "dpo validated accumulated dropout": lora | PREFERENCES["dpo"] | ACCUMULATED | DROPOUT | PAIRS_VALIDATED,
        "dpo precomputed padded": lora | PREFERENCES["dpo"] | PADDED | dict(precompute_ref_log_probs="true"),
        "kto accumulated": lora | PREFERENCES["kto"] | ACCUMULATED,
        "streamed": lora | STREAMED,
        "streamed mixture": lora | STREAMED | dict(dataset=["rows.jsonl:2", "chat.jsonl:1"], train_on_prompt="true"),
        "mixture": lora | dict(dataset=["rows.jsonl:2", "chat.jsonl:1"]),
        "windows of text": full | dict(dataset="text.txt", context_length=24, window_overlap=4),
        "scored": lora | dict(score_dataset="validation.jsonl", score_samples=4, score_max_new_tokens=8),
        "adamw_8bit": full | dict(optimizer="adamw_8bit"),
        "qwen3_moe load-balanced": full | ACCUMULATED | dict(model_name="qwen3_moe", router_aux_loss_coef=0.05),
        "mlx full": full | MLX,
        "mlx lora accumulated dropout": lora | MLX | ACCUMULATED | DROPOUT,
        "mlx dora validated": lora | MLX | DORA | VALIDATED,
        "mlx qlora": ADAPTER | MLX | dict(train_type="qlora", group_size=32, quantization_backend="mlx"),
        "mlx recomputed padded": lora | MLX | RECOMPUTED | PADDED,
    }
    for method, widths in WIDTHS.items():
        cells |= {f"{method}/{bits}": quantized(method, bits) | (BF16 if bits != 4 else {}) for bits in widths}
    cells = {name: Cell(dict(batch_size=ROWS_PER_STEP) | flags) for name, flags in cells.items()}
    cells["full resumed"] = Cell(full | ACCUMULATED, resumed=True)
    cells["nf4 resumed"] = Cell(nf4 | ACCUMULATED | DROPOUT, resumed=True)
    cells |= {f"{layout} {kind}": of_ranks(layout, KINDS[kind]) for layout in LAYOUTS for kind in ("full", "nf4")}
    cells |= {f"{layout} lora": of_ranks(layout, lora) for layout in ("TP 2", "FSDP2 2 x TP 2")}
    cells["FSDP2 2 lora dropout accumulated"] = of_ranks("FSDP2 2", lora | ACCUMULATED | DROPOUT)
    cells["FSDP2 2 full resumed"] = of_ranks("FSDP2 2", full, resumed=True)
    cells["FSDP2 2 dpo nf4"] = of_ranks("FSDP2 2", nf4 | PREFERENCES["dpo"])
    cells["FSDP2 2 kto lora resumed"] = of_ranks("FSDP2 2", lora | PREFERENCES["kto"], resumed=True)
    cells["DDP 2 orpo lora accumulated"] = of_ranks("DDP 2", lora | PREFERENCES["orpo"] | ACCUMULATED)
    cells["DDP 2 streamed"] = of_ranks("DDP 2", lora | STREAMED)
    cells |= {f"EP 2 {kind}": of_ranks("EP 2", KINDS[kind] | dict(model_name="qwen3_moe")) for kind in ("full", "nf4")}
    cells["accelerate DDP 2 lora"] = of_ranks("DDP 2", lora | dict(parallel_backend="accelerate"))
    cells |= {
        "recursive": Cell(RECURSIVE | {"arch.L_cycles": 2, "arch.H_cycles": 2}, recipe="cfg_chat_recursive"),
        "recursive plain": Cell(RECURSIVE | {"arch.plain": "true"}, recipe="cfg_chat_recursive"),
        "recursive ema supervised": Cell(RECURSIVE | {"ema": "true", "arch.halt_max_steps": 3}, recipe="cfg_chat"),
        "recursive ranks 2": Cell(RECURSIVE, 2, recipe="cfg_chat"),
    }
    return cells


# ---- what the runs are given


def write_data(folder: Path) -> None:
    """Rows of uneven length as prompt/completion and as chat, and some to validate on; the same on every machine."""
    generator = random.Random(0)
    words = "red green blue seven eleven river stone paper copper window".split()

    def text(most: int) -> str:
        return " ".join(generator.choice(words) for _ in range(generator.randint(1, most)))

    rows = [{"prompt": f"{text(6)}: ", "completion": text(1 + 3 * (i % 4))} for i in range(60)]
    chats = [
        {"messages": [{"role": r, "content": text(3)} for r in ("user", "assistant") * (1 + i % 2)]} for i in range(60)
    ]
    pairs = [{"prompt": f"{text(5)}: ", "chosen": text(4), "rejected": f"{text(4)} no"} for _ in range(60)]
    labels = [{"prompt": f"{text(5)}: ", "completion": text(4), "label": i % 3 > 0} for i in range(50)]
    for name, kept in (
        *(("rows", rows[:50]), ("validation", rows[50:]), ("chat", chats)),
        *(("pairs", pairs[:50]), ("pairs_validation", pairs[50:]), ("labels", labels)),
    ):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    (folder / "text.txt").write_text(" ".join(f"{text(9)}." for _ in range(120)))
    turns = [{"conversations": [{"from": w, "value": text(3)} for w in ("human", "gpt")]} for _ in range(32)]
    (folder / "turns.json").write_text(json.dumps(turns))


def write_models(folder: Path) -> None:
    """A folder per model, with a tokenizer of single bytes."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    transformers.utils.logging.disable_progress_bar()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", "<unused>", *letters])}
    made = Tokenizer(models.BPE(vocab, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    for name, (config, sizes) in MODELS.items():
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**sizes))
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for failed in (
        command("expand.py", flags_of(dict(model_name="llama", output_dir="expanded", num_new_blocks=2)), folder),
        command(
            "dataset/build_chat_dataset.py",
            *[["--input-file", "turns.json", "--output-dir", "turns", "--tokenizer", "bpe:300", "--max-length", "96"]],
            folder,
        ),
    ):
        assert not failed, failed


# ---- one cell


def flags_of(flags: dict) -> list[str]:
    return [part for k, values in flags.items() for v in ensure_list(values) for part in (f"--{k}", str(v))]


def ensure_list(value) -> list:
    return value if isinstance(value, list) else [value]


def command(script: str, argv: list[str], folder: Path, ranks: int = 1) -> str | None:
    """Runs a script of the project in `folder`, under torchrun if `ranks` says so; None, or how it failed."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "FSDP_BACKEND")
    env = {k: v for k, v in os.environ.items() if k not in ours}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    program = [str(ROOT / script)]
    if script.startswith("dataset/"):
        program = ["-m", script.removesuffix(".py").replace("/", ".")]
        env["PYTHONPATH"] = str(ROOT)
    argv = [sys.executable, "-W", "ignore", *torchrun, *program, *argv]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=folder, env=env)
    if done.returncode:
        return f"exit code {done.returncode}: " + " | ".join((done.stdout + done.stderr).splitlines()[-3:])
    return None


def run_cell(name: str, cell: Cell, folder: Path) -> dict:
    """What the cell's run wrote: steps, evals, tensors; or how it failed."""
    out = folder / name.replace(" ", "_").replace("/", "-")
    if cell.recipe:
        keys = cell.flags | dict(data_paths="[turns]", checkpoint_path=out.name)
        argv = ["--config-name", cell.recipe, *(f"{k}={v}" for k, v in keys.items())]
        return kept_of(out, command("pretrain.py", argv, folder, cell.world_size))
    flags = COMMON | dict(model_name="llama", dataset="rows.jsonl", output_dir=out.name) | cell.flags
    if "llama_pro_path" in flags:
        del flags["model_name"]
    if cell.resumed:
        flags |= dict(save_every=1, keep_last=STEPS)
    failed = command("train.py", flags_of(flags), folder)
    if cell.resumed and not failed:
        for step in range(STOPPED_AT + 1, STEPS + 1):
            shutil.rmtree(out / "checkpoints" / f"step-{step}")
        for written in (out / "train_state.json", *out.glob("*.safetensors")):
            written.unlink()
        failed = command("train.py", ["--resume", out.name], folder)
    return kept_of(out, failed)


def kept_of(out: Path, failed: str | None) -> dict:
    """What a run's folder holds, which is then removed; or how it failed."""
    found = {"failed": failed} if failed else read_run(out)
    shutil.rmtree(out, ignore_errors=True)
    return found


def read_run(out: Path) -> dict:
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    kept = {
        kind: [
            {k: e.get(k) for k in names} | {k: e[k] for k in REWARD_FIELDS if k in e}
            for e in events
            if e["event"] == kind
        ]
        for kind, names in (("step", STEP_FIELDS), ("eval", EVAL_FIELDS))
    }
    steps = [*(out / "checkpoints").glob("step-*"), *out.glob("step_*")]
    last = max(steps, key=lambda p: int(p.name[5:]))
    tensors = {}
    for place in (out, out / "best", last):
        for file in sorted(place.rglob("*.safetensors") if place == last else place.glob("*.safetensors")):
            tensors |= {f"{file.relative_to(out)}: {k}": v for k, v in tensors_of(file).items()}
    return kept | {"tensors": tensors}


def tensors_of(file: Path) -> dict[str, str]:
    """{tensor: its dtype, shape and sha256}, read from the format itself."""
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        digest = hashlib.sha256(data[begin + start : begin + end]).hexdigest()
        found[name] = f"{entry['dtype']} {entry['shape']} {digest}"
    return found


# ---- the record


def machine() -> dict:
    """What the numbers depend on besides the code."""
    import torch

    found = {"cpu": platform.processor(), "capability": torch.backends.cpu.get_cpu_capability()}
    if Path("/proc/cpuinfo").exists():
        pairs = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
        lines = {key.strip(): value.strip() for key, _, value in pairs}
        keys = ("model name", "cpu family", "model")
        found["cpu"] = " ".join(f"{key} {lines[key]}" for key in keys if key in lines)
    found["bf16 products"] = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def differences(old: dict, new: dict) -> list[str]:
    """What differs between two results of a cell: the first step and evaluation, and the tensors."""
    if "failed" in old or "failed" in new:
        return [f"failed: {r['failed']}" for r in (old, new) if "failed" in r]
    found = []
    for kind in ("step", "eval"):
        if len(old[kind]) != len(new[kind]):
            found.append(f"{len(old[kind])} -> {len(new[kind])} {kind} events")
        for a, b in zip(old[kind], new[kind], strict=False):
            if a != b:
                found += [f"{kind} {a['step']}: {n} {a[n]!r} -> {b[n]!r}" for n in a if a[n] != b[n]]
                break
    a, b = old["tensors"], new["tensors"]
    names = [n for n in a if n in b and a[n] != b[n]]
    if names:
        dtype = [n for n in names if a[n].rsplit(" ", 1)[0] != b[n].rsplit(" ", 1)[0]]
        what = f", {len(dtype)} in dtype or shape" if dtype else ""
        found.append(f"{len(names)} of {len(a)} tensors differ{what}, first {names[0]}")
    for what, rest in (("missing", a.keys() - b.keys()), ("new", b.keys() - a.keys())):
        if rest:
            found.append(f"{len(rest)} tensors are {what}, first {min(rest)}")
    return found


def run_all(cells: dict[str, Cell], show) -> dict:
    """{name: result}: runs of one process two at once, the others one by one. Calls show(name, result, seconds)."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        write_data(folder)
        write_models(folder)
        results = {}

        def run(name: str) -> None:
            began = time.perf_counter()
            results[name] = run_cell(name, cells[name], folder)
            show(name, results[name], time.perf_counter() - began)

        for at_once, wanted in (
            (2, [n for n in cells if cells[n].world_size == 1]),
            (1, [n for n in cells if cells[n].world_size > 1]),
        ):
            with ThreadPoolExecutor(at_once) as pool:
                list(pool.map(run, wanted))
    return {name: results[name] for name in cells}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", metavar="FILE", type=Path, help="write what came out")
    parser.add_argument("--compare", metavar="FILE", type=Path, help="compare with a record; both may be given")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="cells whose name contains it")
    args = parser.parse_args()
    if not (args.record or args.compare):
        parser.error("give --record FILE, --compare FILE, or both")
    cells, here, began = {n: c for n, c in matrix().items() if args.only in n}, machine(), time.perf_counter()
    known = json.loads(args.compare.read_text()) if args.compare else None
    if known and known["machine"] != here:
        there = known["machine"]
        other = ", ".join(f"{k} {there.get(k)} -> {v}" for k, v in here.items() if there.get(k) != v)
        print(f"--compare {args.compare}: was recorded on another machine ({other}). Use --record here.")
        return 2
    bad = []

    def show(name: str, result: dict, seconds: float) -> None:
        if known is None:
            lines = [f"failed: {result['failed']}"] if "failed" in result else []
        else:
            old = known["cells"].get(name)
            lines = differences(old, result) if old else ["not in the record"]
        bad.extend([name] * bool(lines))
        said = "recorded" if known is None else "bitwise equal"
        print(f"{name:36} {seconds:5.1f} s  " + ("; ".join(lines) or said), flush=True)

    results = run_all(cells, show)
    gone = [n for n in known["cells"] if args.only in n and n not in cells] if known else []
    for name in gone:
        print(f"{name:36} is in the record and no longer a cell")
    if args.record:
        args.record.write_text(json.dumps({"machine": here, "cells": results}, indent=1, sort_keys=True))
    good, seconds = len(cells) - len(set(bad)), time.perf_counter() - began
    word = "bitwise equal" if known else "recorded"
    print(f"{good} of {len(cells)} cells are {word}, {seconds:.0f} s")
    for file in filter(None, (args.compare, args.record)):
        print(f"sha256 of {file}: {hashlib.sha256(file.read_bytes()).hexdigest()}")
    return 1 if bad or gone else 0


if __name__ == "__main__":
    sys.exit(main())
