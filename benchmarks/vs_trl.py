"""Tokens per CPU second, memory and first step against TRL's SFTTrainer, on the same samples, losses shown equal.

    pip install -r requirements-bench.txt
    python benchmarks/vs_trl.py --precision fp32 --rounds 3

Each figure is one process; the competitors take turns, so that a machine whose speed drifts treats all alike. TRL runs
as shipped (padded rows) and tuned (padding_free, a heap that is not trimmed). --workload demo trains the demo's rows on
its model with all cores and reports the seconds to a loss of 0.05.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
W1_SHAPE = dict(
    vocab_size=32000,
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=12,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
)
KEPT_HEAP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "2147483647"}


def w1_samples():
    """512 documents of 30 to 500 tokens (median 129, log-normal), the first third of each a prompt."""
    import numpy as np

    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(np.log(129), 0.75, 512)), 30, 500).astype(int)
    ids = [rng.integers(5, W1_SHAPE["vocab_size"], n) for n in lengths]
    return ids, [np.arange(len(i)) >= round(0.37 * len(i)) for i in ids]


def demo_samples(folder):
    from finetune.data.reading.sources import read_rows
    from finetune.data.sampler import epoch_order
    from finetune.data.tokens.tokenize import tokenize
    from finetune.model_files.tokenizer import load_tokenizer
    from finetune.plan.demo import DEMO_DATASET

    rows = tokenize(read_rows(DEMO_DATASET), "chat", load_tokenizer(Path(folder)), 512)
    order = epoch_order(len(rows), 42, 0)
    return [list(map(list, part)) for part in zip(*(rows.document(i) for i in order), strict=True)]


def samples_of(args):
    return w1_samples() if args.workload == "w1" else demo_samples(args.model)


def make_model(folder: Path):
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**W1_SHAPE)).save_pretrained(folder)


# ---- one competitor in its own process: prints one JSON object


def ours(args, begin):
    import dataclasses

    import numpy as np
    import torch

    from backend_manager import BackendManager, auto_cpu_matmul
    from finetune.config import TrainConfig
    from finetune.data.collate import microbatches
    from finetune.data.tokens.tokenize import TokenizedDataset
    from finetune.system.process import prepare_environment
    from finetune.torch_engine.device import set_onednn
    from finetune.torch_engine.memory_stats import current_resident_bytes, peak_resident_bytes
    from tests.support.build import load_model, torch_engine

    prepare_environment()
    settings = dataclasses.replace(
        TrainConfig(),
        train_type="qlora" if args.quant else "lora",
        quantization_backend="nf4",
        quant_type="nf4",
        double_quant=True,
        precision=args.precision,
        lora_rank=16,
        lora_alpha=32.0,
        lr=args.lr,
        use_gradient_checkpointing="false",
        cache_dequantized="false",
    )
    set_onednn(auto_cpu_matmul(BackendManager("cpu", verbose=False).capabilities.onednn_speed) == "onednn")
    baseline = current_resident_bytes()
    ids, targets = samples_of(args)
    offsets = np.concatenate([[0], np.cumsum([len(i) for i in ids])])
    targets = [np.asarray(t) & (np.arange(len(t)) > 0) for t in targets]
    rows = TokenizedDataset(
        np.concatenate(ids).astype(np.int32), np.concatenate(targets), offsets, ("",) * len(ids), {}
    )
    engine = torch_engine(load_model(args.model, settings, torch.device("cpu")), settings, torch.device("cpu"))
    engine.verify("auto")
    engine.begin_memory(baseline)
    for step in range(args.steps):
        part = range(step * args.batch, (step + 1) * args.batch)
        tokens = sum(len(ids[i]) for i in part)
        start = time.process_time(), time.perf_counter()
        result = engine.train_step(microbatches(rows, part, engine.layout, args.batch, 4096, 0), args.lr)
        yield record(begin, start, result.nll / result.num_targets, tokens)
    peak = peak_resident_bytes() - baseline
    yield {"peak_bytes": peak, "gemm_seconds_per_step": gemm_seconds(engine.model, args, ids, targets)}


def gemm_seconds(model, args, ids, targets) -> float:
    """CPU seconds that the frozen weights' products of a mean step take here at their shapes: y = x W^T, dx = dy W.

    4 operations per token and weight; the head only at target positions. Adapters and attention come on top.
    """
    import torch

    from finetune.torch_engine.lora.layers import LoRALinear

    steps = [range(s * args.batch, (s + 1) * args.batch) for s in range(1, args.steps)]
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.precision]
    rows = round(sum(len(ids[i]) for step in steps for i in step) / len(steps))
    head_rows = round(sum(int(sum(targets[i])) for step in steps for i in step) / len(steps))
    shapes = {}
    for module in model.modules():
        if isinstance(module, LoRALinear):
            shape = (rows, module.in_features, module.out_features)
            shapes[shape] = shapes.get(shape, 0) + 1
    vocab, hidden = model.get_output_embeddings().weight.shape
    shapes[head_rows, hidden, vocab] = 1
    total = 0.0
    for (m, k, n), count in shapes.items():
        x, w, grad = (torch.randn(*size).to(dtype) for size in ((m, k), (n, k), (m, n)))
        times = []
        for _ in range(5):
            start = time.process_time()
            x @ w.t()
            grad @ w
            times.append(time.process_time() - start)
        total += count * min(times)
    return total


def trl(args, begin):
    import datasets
    import peft
    import torch
    import transformers
    import trl as trl_package

    from finetune.torch_engine.memory_stats import current_resident_bytes, peak_resident_bytes, reset_peak

    torch.set_num_threads(args.threads)
    tuned = args.child == "trl-tuned"
    ids, targets = samples_of(args)
    dataset = datasets.Dataset.from_dict(
        {"input_ids": [list(map(int, i)) for i in ids], "completion_mask": [[int(x) for x in t] for t in targets]}
    )
    baseline = current_resident_bytes()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.precision]
    quant = None
    if args.quant:
        quant = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        )
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, quantization_config=quant)
    reset_peak()
    records, clock = [], {}

    class Steps(transformers.TrainerCallback):
        def on_step_begin(self, trainer_args, state, control, **kwargs):
            clock["start"] = time.process_time(), time.perf_counter()

        def on_step_end(self, trainer_args, state, control, **kwargs):
            step = state.global_step - 1
            tokens = sum(len(i) for i in ids[step * args.batch : (step + 1) * args.batch])
            records.append(record(begin, clock["start"], None, tokens))

    class InOrder(trl_package.SFTTrainer):
        def _get_train_sampler(self, *args, **kwargs):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    folder = tempfile.mkdtemp()
    trainer = InOrder(
        model=model,
        args=trl_package.SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=args.batch,
            learning_rate=args.lr,
            max_steps=args.steps,
            logging_steps=1,
            report_to="none",
            use_cpu=True,
            bf16=False,
            padding_free=tuned,
            max_length=None,
            save_strategy="no",
            lr_scheduler_type="constant",
            warmup_steps=0,
            max_grad_norm=1.0,
            weight_decay=0.0,
            completion_only_loss=True,
            disable_tqdm=True,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
        ),
        train_dataset=dataset,
        peft_config=peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        processing_class=tokenizer_of(args),
        callbacks=[Steps()],
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    for entry, loss in zip(records, losses, strict=True):
        yield entry | {"loss": loss}
    yield {"peak_bytes": peak_resident_bytes() - baseline}


def tokenizer_of(args):
    """TRL wants a tokenizer even for rows that are tokens already."""
    import transformers
    from tokenizers import Tokenizer, models

    if (Path(args.model) / "tokenizer.json").is_file():
        return transformers.AutoTokenizer.from_pretrained(args.model)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def record(begin, start, loss, tokens):
    cpu, wall = time.process_time() - start[0], time.perf_counter() - start[1]
    return {"loss": loss, "tokens": tokens, "cpu_s": cpu, "wall_s": wall, "since_start_s": time.time() - begin}


# ---- the rounds


def run_child(args, child: str, model: str) -> dict:
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "TRANSFORMERS_VERBOSITY": "error"}
    environment |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"} | (KEPT_HEAP if child == "trl-tuned" else {})
    command = [
        sys.executable,
        "-W",
        "ignore",
        __file__,
        *sys.argv[1:],
        "--child",
        child,
        "--model",
        model,
        "--begin",
        str(time.time()),
    ]
    out = subprocess.run(command, env=environment, capture_output=True, text=True)
    if out.returncode:
        sys.exit(f"{child} failed:\n{out.stderr[-3000:]}")
    lines = [json.loads(line) for line in out.stdout.splitlines() if line.startswith('{"')]
    steps, memory = lines[:-1], lines[-1]
    measured = steps[1:]  # the first warms up
    reached = next((i for i, s in enumerate(steps) if s["loss"] <= 0.05), None)
    return {
        "tokens_per_cpu_s": sum(s["tokens"] for s in measured) / sum(s["cpu_s"] for s in measured),
        "tokens_per_s": sum(s["tokens"] for s in measured) / sum(s["wall_s"] for s in measured),
        "first_step_s": steps[0]["since_start_s"],
        "peak_MiB": memory["peak_bytes"] / 2**20,
        "gemm_share": memory.get("gemm_seconds_per_step", 0) * len(measured) / sum(s["cpu_s"] for s in measured),
        "to_loss_s": sum(s["wall_s"] for s in steps[: reached + 1]) if reached is not None else None,
        "to_loss_steps": None if reached is None else reached + 1,
        "losses": [s["loss"] for s in steps],
    }


def shown(values) -> str:
    values = [v for v in values if v is not None]
    if not values:
        return "-"
    return f"{statistics.median(values):.1f} [{min(values):.1f}..{max(values):.1f}]"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=("w1", "demo"), default="w1")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--quant", action="store_true", help="an NF4 base with double quantization")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="the first is a warm-up")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--competitors", default="ours,trl-tuned,trl-shipped")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--begin", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        for line in (ours if args.child == "ours" else trl)(args, args.begin):
            print(json.dumps(line), flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        if args.workload == "w1":
            make_model(Path(folder))
        else:
            from finetune.model_files.demo_model import DEMO_MODEL
            from finetune.model_files.files import find_model

            folder = str(find_model(DEMO_MODEL).folder)
        names = args.competitors.split(",")
        results = {name: [] for name in names}
        for number in range(args.rounds):
            for name in names:
                results[name].append(run_child(args, name, folder))
                print(f"round {number + 1} {name}: {json.dumps(results[name][-1])}", file=sys.stderr, flush=True)
    print(
        f"{args.workload} {args.precision}{' nf4' if args.quant else ''}, {args.threads} thread(s), n = {args.rounds}, "
        "median [min..max]"
    )
    for figure in ("tokens_per_cpu_s", "tokens_per_s", "first_step_s", "peak_MiB", "to_loss_s"):
        print(f"  {figure:18}" + "  ".join(f"{n} {shown([r[figure] for r in results[n]])}" for n in names))
    shares = [100 * r["gemm_share"] for r in results["ours"]]
    print(f"  frozen products at this processor's rate / all of our CPU time: {shown(shares)} %")
    for name in names[1:]:
        for figure in ("tokens_per_cpu_s", "peak_MiB", "first_step_s", "to_loss_s"):
            pairs = [(a[figure], b[figure]) for a, b in zip(results["ours"], results[name], strict=True)]
            ratios = [a / b for a, b in pairs if a and b]
            if ratios:
                spread = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}..{max(ratios):.2f}]"
                print(f"  {figure}: ours / {name} = {spread}")
    for name in names:
        print(f"  losses {name}: {[round(x, 5) for x in results[name][0]['losses'][:4]]}")


if __name__ == "__main__":
    main()
