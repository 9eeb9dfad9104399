"""Each quantizer's step beside NF4's: speed and memory of qlora on one Llama shape, every method and width.

python benchmarks/methods.py                     all pairs, 3 rounds, interleaved
python benchmarks/methods.py --pairs nf4/4,hqq/4 --rounds 5

Each run is a process of its own; a ratio compares runs of the same round. Time is CPU seconds of a step.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import quantization_wrapper  # noqa: E402
from finetune.parts.trains import Adapter
from finetune.system import process  # noqa: E402

SHAPE = dict(
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=8000,
    max_position_embeddings=1024,
)
TOKENS, STEPS = 1024, 4


def one(pair: str, threads: int) -> dict:
    """{'seconds' a step after the first, 'first', 'base' bytes, 'loss' of the first step} in this process."""
    import numpy as np
    import torch
    import transformers

    from finetune.config import TrainConfig
    from finetune.data.collate import microbatches
    from finetune.data.tokens.tokenize import TokenizedDataset
    from finetune.torch_engine.lora.adapters import add_adapters
    from finetune.torch_engine.lora.targets import linear_names
    from tests.support.build import torch_engine

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    name, bits = pair.split("/")
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SHAPE)).requires_grad_(False)
    names = linear_names(model)
    began = time.process_time()
    quantization_wrapper.quantize_model(model, quantization_wrapper.config_for(name, int(bits)), names)
    quantizing = time.process_time() - began
    base = sum(p.nbytes for p in model.parameters())
    settings = replace(
        TrainConfig(),
        precision="fp32",
        quantization_backend=name,
        use_gradient_checkpointing="false",
        cache_dequantized="false",
        microbatch_tokens=TOKENS,
        lr=1e-4,
    )
    add_adapters(model, names, Adapter.of(settings))
    engine = torch_engine(model, settings, torch.device("cpu"))
    engine.verify("padding_free")
    rng = np.random.default_rng(0)
    lengths = [128] * (TOKENS // 128)
    tokens = rng.integers(3, SHAPE["vocab_size"], sum(lengths)).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    rows = TokenizedDataset(tokens, np.ones(len(tokens), bool), offsets, tuple(map(str, range(len(lengths)))), {})
    batches = microbatches(rows, range(len(rows)), "padding_free", len(rows), TOKENS, 0)
    seconds, losses = [], []
    for _ in range(STEPS):
        began = time.process_time()
        result = engine.train_step(batches, 1e-4)
        seconds.append(time.process_time() - began)
        losses.append(result.nll / result.num_targets)
    return {"seconds": statistics.median(seconds[1:]), "quantizing": quantizing, "base": base, "loss": losses[0]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", default=",".join(f"{n}/{b}" for n, b in quantization_wrapper.pairs()))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    process.prepare_environment()
    if args.one:
        print(json.dumps(one(args.one, args.threads)))
        return
    pairs = args.pairs.split(",")
    results = {pair: [] for pair in ["nf4/4", *(p for p in pairs if p != "nf4/4")]}
    for _ in range(args.rounds):
        for pair, found in results.items():
            command = [sys.executable, __file__, "--one", pair, "--threads", str(args.threads)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    print(
        f"n = {args.rounds}, {args.threads} thread(s): ratio to nf4 at 4 bits in the same round, median [least..most]"
    )
    print("method/bits   speed                base memory   quantizing, CPU s   first loss")
    for pair, found in results.items():
        ratios = [ours["seconds"] / r["seconds"] for ours, r in zip(results["nf4/4"], found, strict=True)]
        print(
            f"{pair:12} {statistics.median(ratios):6.2f} [{min(ratios):.2f}..{max(ratios):.2f}] "
            f"{found[0]['base'] / results['nf4/4'][0]['base']:12.2f} "
            f"{statistics.median(r['quantizing'] for r in found):16.2f} "
            f"{found[0]['loss']:18.5f}"
        )


if __name__ == "__main__":
    main()
