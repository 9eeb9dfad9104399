"""Tokens per CPU second and peak memory against mlx_lm.lora's trainer: same model, documents and BLAS, losses shown.

    python benchmarks/vs_mlx_lm.py --steps 24 --rounds 3

Each figure is one process; the competitors take turns. mlx-lm's trainer pads each batch to its longest row, rounded up
to 32, and trains one pad token per row: only real tokens are counted, for both. Both have AdamW with bias correction,
no clipping, LoRA of rank 16 on every linear layer, one thread. Held-out loss is computed by the same few
lines on both models.
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

from finetune.parts.parts import Parts  # noqa: E402

SHAPE = dict(vocab_size=4096, hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=4)
SHAPE |= dict(num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True)
ROWS, RANK, SCALE, LR = 8, 16, 2.0, 1e-3


def documents(seed: int, count: int):
    """(ids, first target) of documents of 20 to 200 tokens (median 60, log-normal), a third of each a prompt."""
    import numpy as np

    rng = np.random.default_rng(seed)
    lengths = np.clip(np.exp(rng.normal(np.log(60), 0.75, count)), 20, 200).astype(int)
    ranks = np.arange(1, SHAPE["vocab_size"] - 4)
    chances = 1 / ranks / (1 / ranks).sum()  # Zipf: there is something to learn
    return [(5 + rng.choice(len(ranks), n, p=chances), round(0.37 * n)) for n in lengths]


def make_model(folder: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SHAPE)).save_pretrained(folder)


def held_out(model) -> float:
    """Mean nll of documents that neither has seen."""
    import mlx.core as mx
    import mlx.nn as nn

    total, count = 0.0, 0
    for ids, first in documents(1, 12):
        logits = model(mx.array(ids[None, :-1]))[0, first - 1 :]
        total += nn.losses.cross_entropy(logits, mx.array(ids[first:]), reduction="sum").item()
        count += len(ids) - first
    return total / count


def ours(args) -> dict:
    import mlx.core as mx
    import numpy as np

    from finetune.config import TrainConfig
    from finetune.data.collate import microbatches
    from finetune.data.tokens.tokenize import TokenizedDataset
    from finetune.mlx_engine.load import build_engine, load_model
    from finetune.plan.mlx import CPU_MICROBATCH_TOKENS

    config = json.loads((Path(args.model) / "config.json").read_text())
    settings = TrainConfig(
        train_type="qlora" if args.bits else "lora",
        precision="fp32",
        lora_rank=RANK,
        lora_alpha=SCALE * RANK,
        lr=LR,
        n_bits=args.bits or 4,
        quant_type="affine",
        cache_dequantized="false",
        use_gradient_checkpointing="false",
        apply_gradient_clipping=False,
    )
    docs = documents(0, ROWS * args.steps)
    offsets = np.concatenate([[0], np.cumsum([len(ids) for ids, _ in docs])])
    targets = np.concatenate([np.arange(len(ids)) >= first for ids, first in docs])
    counts = dict.fromkeys(("rows", "tokens", "targets", "skipped"), 0)
    counts |= dict.fromkeys(("dropped_empty", "prompt_truncated", "answer_truncated"), 0)
    tokens = np.concatenate([ids for ids, _ in docs]).astype(np.int32)
    data = TokenizedDataset(tokens, targets, offsets, ("",) * len(docs), counts)
    engine = build_engine(*load_model(args.model, config, Parts(settings)), Parts(settings), 0, config)
    engine.verify("auto")
    return measured(
        lambda step: engine.train_step(
            microbatches(data, range(step * ROWS, (step + 1) * ROWS), "padded", ROWS, CPU_MICROBATCH_TOKENS, 0), LR
        ),
        args.steps,
        docs,
        mx,
        lambda: held_out(engine.model),
    )


def measured(step, steps: int, docs, mx, loss) -> dict:
    step(0)  # what is compiled or allocated once
    mx.reset_peak_memory()
    began, wall = time.process_time(), time.perf_counter()
    for i in range(1, steps):
        step(i)
    cpu, wall, peak = time.process_time() - began, time.perf_counter() - wall, mx.get_peak_memory()
    tokens = sum(len(ids) for ids, _ in docs[ROWS:])
    return {"tokens_per_cpu_s": tokens / cpu, "tokens_per_s": tokens / wall, "peak_bytes": peak, "loss": loss()}


def mlx_lm(args) -> dict:
    import mlx.core as mx
    import mlx.nn as nn
    import mlx.optimizers as optim
    from mlx_lm.tuner.trainer import TrainingArgs, TrainingCallback, train
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    mx.random.seed(0)
    model, _ = load_model(Path(args.model))
    if args.bits:
        nn.quantize(model, 64, args.bits, class_predicate=lambda p, m: isinstance(m, nn.Linear))
    model.freeze()
    linear_to_lora_layers(model, len(model.layers), {"rank": RANK, "scale": SCALE, "dropout": 0.0})
    model.train()
    docs = documents(0, ROWS * args.steps)
    rows, found = [(ids.tolist(), first) for ids, first in docs], {}
    for ids, _ in rows:
        ids.append(0)  # its loss trains the position after the last: the end of a text

    class Clock(TrainingCallback):
        def on_train_loss_report(self, info):
            now = time.process_time(), time.perf_counter(), mx.get_peak_memory(), info["trained_tokens"]
            found.setdefault("first", now)
            found["last"] = now

    options = TrainingArgs(
        batch_size=ROWS,
        iters=args.steps,
        val_batches=0,
        steps_per_report=1,
        steps_per_eval=10**9,
        steps_per_save=10**9,
        max_seq_length=1024,
        adapter_file=os.devnull,
    )
    optimizer = optim.AdamW(learning_rate=LR, weight_decay=0.0, bias_correction=True)
    train(model, optimizer, rows, None, args=options, training_callback=Clock())
    model.eval()
    (cpu, wall, *_), (cpu_end, wall_end, peak, _) = found["first"], found["last"]
    tokens = sum(len(ids) for ids, _ in docs) * (args.steps - 1) / args.steps
    speed = {"tokens_per_cpu_s": tokens / (cpu_end - cpu), "tokens_per_s": tokens / (wall_end - wall)}
    return {**speed, "peak_bytes": peak, "loss": held_out(model)}


COMPETITORS = {"ours": ours, "mlx_lm": mlx_lm}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bits", type=int, default=0, help="affine bits of a quantized base; 0: lora")
    parser.add_argument("--model", help="folder of the model; default: a random Llama of 5 M")
    parser.add_argument("--competitor", choices=COMPETITORS)
    args = parser.parse_args()
    if args.competitor:
        from finetune.fast_blas import open_before_mlx

        open_before_mlx()  # both have the same
        import finetune.mlx_engine  # noqa: F401

        print("RESULT " + json.dumps(COMPETITORS[args.competitor](args)), flush=True)
        os._exit(0)
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            make_model(Path(folder))
            args.model = folder
        results = {name: [] for name in COMPETITORS}
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        for _ in range(args.rounds):
            for name, found in results.items():
                command = [sys.executable, "-W", "ignore", __file__, "--competitor", name, "--steps", str(args.steps)]
                command += ["--bits", str(args.bits), "--model", args.model]
                out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout
                found.append(json.loads(out.rpartition("RESULT ")[2].splitlines()[0]))
                print(name, json.dumps(found[-1]), flush=True)
    middle = {n: {k: statistics.median(r[k] for r in found) for k in found[0]} for n, found in results.items()}
    for name, m in middle.items():
        print(
            f"{name:>7}: {m['tokens_per_cpu_s']:.0f} tokens per CPU second, {m['tokens_per_s']:.0f} tok/s, "
            f"{m['peak_bytes'] / 2**20:.0f} MiB, held-out loss {m['loss']:.4f}"
        )
    one, other = middle["ours"], middle["mlx_lm"]
    print(
        f"ratio: {one['tokens_per_cpu_s'] / other['tokens_per_cpu_s']:.2f} x per CPU second, "
        f"{one['peak_bytes'] / other['peak_bytes']:.2f} x the memory"
    )


if __name__ == "__main__":
    main()
