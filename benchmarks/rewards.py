"""Sampling and learning from rewards beside transformers and TRL: the demo's model, the same prompts and answers.

    pip install -r requirements-bench.txt
    python benchmarks/rewards.py --part sampling --answers 64 --rounds 3
    python benchmarks/rewards.py --part step --rounds 3

sampling: tokens per CPU second, greedy, answers of one length, an adapter beside the weights. shared: CPU seconds of a
step on 8 answers of 64 tokens to a prompt of 512, computed once or with each answer. step: whole steps, sampling and
training, and their peak memory, beside TRL's GRPOTrainer. Each figure is a process of its own, in turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
GROUP = 8
ANSWER = 64
LONG_PROMPT = 512
PARTS = {"sampling": ("ours", "transformers"), "shared": ("shared", "repeated"), "step": ("ours", "trl")}
REWARD = """
def even(prompts, answers, rows):
    return [float(sum(map(ord, answer)) % 2) for answer in answers]
"""


def model_folder() -> str:
    from finetune.model_files.demo_model import DEMO_MODEL
    from finetune.model_files.files import find_model

    return str(find_model(DEMO_MODEL).folder)


def prompts_of(number: int, length: int) -> list[list[int]]:
    import numpy as np

    rng = np.random.default_rng(0)
    return [rng.integers(100, 40_000, length).tolist() for _ in range(number)]


def questions() -> list[str]:
    """Prompts whose answers have all lengths."""
    return [f"Write a sentence about the number {i}." for i in range(64)]


# ---- one competitor in its own process: prints one JSON object


def engine_of(args):
    import dataclasses

    import torch

    from finetune.config import TrainConfig
    from finetune.system.process import prepare_environment
    from tests.support.build import load_model, torch_engine

    prepare_environment()
    settings = dataclasses.replace(
        TrainConfig(),
        train_type="qlora" if args.quant else "lora",
        quantization_backend="nf4",
        quant_type="nf4",
        precision=args.precision,
        reward="exact",
        use_gradient_checkpointing="false",
        cache_dequantized="false",
    )
    device = torch.device("cpu")
    engine = torch_engine(load_model(model_folder(), settings, device), settings, device)
    engine.verify("auto")
    return engine


def timed(work) -> tuple[float, object]:
    """(CPU seconds of the faster of two calls, the result)."""
    seconds = []
    for _ in range(2):
        start = time.process_time()
        result = work()
        seconds.append(time.process_time() - start)
    return min(seconds), result


def sampling_ours(args) -> dict:
    from finetune.generation import Sampling

    engine = engine_of(args)
    prompts = prompts_of(args.answers // GROUP, 48)
    seeds = [[(row, sample) for sample in range(GROUP)] for row in range(len(prompts))]
    lengths = [ANSWER] * len(prompts)
    seconds, found = timed(lambda: engine.sample(prompts, seeds, lengths, set(), Sampling(0.0)))
    return {"tokens_per_cpu_s": args.answers * ANSWER / seconds, "first": [group[0].ids[:16] for group in found]}


def their_model(args):
    import torch
    import transformers

    torch.set_num_threads(args.threads)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.precision]
    quant = None
    if args.quant:
        quant = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    return transformers.AutoModelForCausalLM.from_pretrained(model_folder(), dtype=dtype, quantization_config=quant)


def sampling_transformers(args) -> dict:
    import peft
    import torch

    model = their_model(args)
    model = peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")).eval()
    prompts = prompts_of(args.answers // GROUP, 48)
    ids = torch.tensor([prompt for prompt in prompts for _ in range(GROUP)])
    how = dict(max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=False, pad_token_id=0)
    seconds, found = timed(lambda: model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **how))
    first = found[::GROUP, ids.shape[1] :][:, :16].tolist()
    return {"tokens_per_cpu_s": args.answers * ANSWER / seconds, "first": first}


def shared(args) -> dict:
    import numpy as np

    from finetune.arrays import Named, Per
    from finetune.data.collate import microbatches, shared_microbatches
    from finetune.data.tokens.tokenize import TokenizedDataset, joined_parts
    from finetune.rewards.rollouts import ADVANTAGE, WEIGHT

    engine = engine_of(args)
    (prompt,) = prompts_of(1, LONG_PROMPT)
    rng = np.random.default_rng(1)
    parts = [
        (np.array([*prompt, *rng.integers(100, 40_000, ANSWER)]), np.arange(LONG_PROMPT + ANSWER) >= LONG_PROMPT)
        for _ in range(GROUP)
    ]
    arrays = {name: Named(np.ones(GROUP, np.float32), Per.DOCUMENT) for name in (ADVANTAGE, WEIGHT)}
    dataset = TokenizedDataset(**joined_parts(parts), sources=("",) * GROUP, counts={}, arrays=arrays)
    if args.child == "shared":
        batches = shared_microbatches(dataset, [range(GROUP)], [LONG_PROMPT], 8192)
    else:
        engine.forward.use(engine.forward.layout.__class__(**vars(engine.forward.layout) | {"shares_prompts": False}))
        batches = microbatches(dataset, range(GROUP), "padding_free", GROUP, 8192, 0)
    seconds, result = timed(lambda: engine.train_step(batches, 1e-5))
    computed = LONG_PROMPT - 1 + GROUP * (ANSWER + 1)
    if args.child == "repeated":
        computed = GROUP * (LONG_PROMPT + ANSWER)
    return {"cpu_s": seconds, "tokens": computed, "norm": result.grad_norm}


def steps_ours(args) -> Iterator[dict]:
    from finetune.torch_engine.memory_stats import current_resident_bytes, peak_resident_bytes
    from train import fine_tune

    folder = Path(tempfile.mkdtemp())
    (folder / "mine.py").write_text(REWARD)
    rows = [{"messages": [{"role": "user", "content": text}]} for text in questions()]
    clock = [time.process_time()]
    records: list[dict] = []

    def on_step(event: dict) -> None:
        now = time.process_time()
        tokens = event["completions/mean_length"] * event["num_answers"]
        records.append({"tokens": tokens, "cpu_s": now - clock[0]})
        clock[0] = now

    baseline = current_resident_bytes()
    fine_tune(
        model_name=model_folder(), dataset=rows, reward=f"{folder / 'mine.py'}:even", output_dir=str(folder / "out"),
        train_type="qlora" if args.quant else "lora", precision=args.precision, max_steps=args.steps, batch_size=4,
        num_generations=GROUP, max_completion_length=ANSWER, mask_truncated=False, lr=1e-5, log_to="none",
        eval_samples=0, on_step=on_step, save_model=False,
    )  # fmt: skip
    yield from records
    yield {"peak_bytes": peak_resident_bytes() - baseline}


def steps_trl(args) -> Iterator[dict]:
    import datasets
    import peft
    import transformers
    import trl

    from finetune.torch_engine.memory_stats import current_resident_bytes, peak_resident_bytes

    baseline = current_resident_bytes()
    model = their_model(args)
    seen = [0]

    def even(completions, completion_ids, **rest):
        seen[0] += sum(map(len, completion_ids))
        return [float(sum(map(ord, c[0]["content"])) % 2) for c in completions]

    clock = [0.0]
    records: list[dict] = []

    class Steps(transformers.TrainerCallback):
        def on_train_begin(self, trainer_args, state, control, **kwargs):
            clock[0] = time.process_time()

        def on_step_end(self, trainer_args, state, control, **kwargs):
            now = time.process_time()
            records.append({"tokens": seen[0], "cpu_s": now - clock[0]})
            clock[0] = now
            seen[0] = 0

    rows = [{"prompt": [{"role": "user", "content": text}]} for text in questions()]
    trainer = trl.GRPOTrainer(
        model,
        reward_funcs=even,
        args=trl.GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=4 * GROUP,
            num_generations=GROUP,
            max_completion_length=ANSWER,
            max_steps=args.steps,
            learning_rate=1e-5,
            loss_type="grpo",
            beta=0.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(model_folder()),
        peft_config=peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        callbacks=[Steps()],
    )
    trainer.train()
    yield from records
    yield {"peak_bytes": peak_resident_bytes() - baseline}


def steps(args) -> dict:
    *records, memory = (steps_ours if args.child == "ours" else steps_trl)(args)
    measured = records[1:]  # the first warms up
    tokens = sum(r["tokens"] for r in measured)
    return {"tokens_per_cpu_s": tokens / sum(r["cpu_s"] for r in measured), "peak_MiB": memory["peak_bytes"] / 2**20}


def of_child(args) -> dict:
    if args.part == "shared":
        return shared(args)
    if args.part == "step":
        return steps(args)
    if args.child == "ours":
        return sampling_ours(args)
    return sampling_transformers(args)


# ---- the rounds


def run_child(args, child: str) -> dict:
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "TRANSFORMERS_VERBOSITY": "error"}
    environment |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:], "--child", child]
    out = subprocess.run(command, env=environment, capture_output=True, text=True)
    if out.returncode:
        sys.exit(f"{child} failed:\n{out.stderr[-3000:]}")
    return json.loads([line for line in out.stdout.splitlines() if line.startswith('{"')][-1])


def shown(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} [{min(values):.2f}..{max(values):.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=tuple(PARTS), default="step")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--quant", action="store_true", help="an NF4 base")
    parser.add_argument("--answers", type=int, default=64, help=f"of sampling, {GROUP} to each prompt")
    parser.add_argument("--steps", type=int, default=4, help="the first is a warm-up")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(of_child(args)), flush=True)
        return
    results: dict[str, list[dict]] = {name: [] for name in PARTS[args.part]}
    for number in range(args.rounds):
        for name, found in results.items():
            found.append(run_child(args, name))
            print(f"round {number + 1} {name}: {json.dumps(found[-1])[:300]}", file=sys.stderr, flush=True)
    one, other = results.values()
    for figure in ("tokens_per_cpu_s", "cpu_s", "peak_MiB", "tokens", "norm"):
        if figure in one[0]:
            each = "  ".join(f"{name} {shown([r[figure] for r in found])}" for name, found in results.items())
            ratio = shown([a[figure] / b[figure] for a, b in zip(one, other, strict=True)])
            print(f"  {figure:18}{each}  ratio {ratio}")
    if "first" in one[0]:
        print(f"  greedy answers equal: {one[0]['first'] == other[0]['first']}")


if __name__ == "__main__":
    main()
