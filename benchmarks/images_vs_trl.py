"""CPU seconds of a step on rows with images, and peak memory, against TRL's SFTTrainer on the same rows and model.

    pip install -r requirements-bench.txt
    python examples/shapes/make_shapes.py outputs/shapes
    python benchmarks/images_vs_trl.py outputs/shapes --rounds 3

Adapters on the language model; tower and projector in full. Each figure is two processes, of few and of more steps,
whose difference has no start in it; what child processes compute is counted. The competitors take turns. TRL learns
from all tokens of a row, ours from answers alone.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
FEW = 4
PEAK = "peak above imports: "


def resident(word: str) -> int:
    """Bytes of VmRSS or VmHWM of this process."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(word))
    return int(line.split()[1]) * 1024


def train_by_trl(args: argparse.Namespace) -> None:
    import datasets
    import torch
    import transformers
    from peft import LoraConfig
    from PIL import Image
    from trl import SFTConfig, SFTTrainer

    baseline = resident("VmRSS")
    lines = (args.folder / "train.jsonl").read_text().splitlines()[: args.batch * args.steps]
    rows = [json.loads(line) for line in lines]
    shown = []
    for row in rows:
        files = [
            p["image"] for m in row["messages"] if m["role"] == "user" for p in m["content"] if p["type"] == "image"
        ]
        texts = [
            {"role": m["role"], "content": m["content"] if isinstance(m["content"], str) else m["content"][-1]["text"]}
            for m in row["messages"]
        ]
        shown.append({"messages": texts, "images": [Image.open(args.folder / file) for file in files]})
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.precision]
    model = transformers.AutoModelForImageTextToText.from_pretrained(args.folder / "model", dtype=dtype)
    linears = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
    adapters = LoraConfig(
        r=16,
        lora_alpha=32,
        target_modules=rf".*language_model.*({'|'.join(linears)})",
        modules_to_save=["vision_tower", "multi_modal_projector"],
    )
    config = SFTConfig(
        output_dir=str(args.output / "trl"),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        learning_rate=1e-3,
        max_length=None,
        bf16=args.precision == "bf16",
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        seed=0,
    )
    data = datasets.Dataset.from_list(shown)
    processor = transformers.AutoProcessor.from_pretrained(args.folder / "model")
    SFTTrainer(model, config, train_dataset=data, processing_class=processor, peft_config=adapters).train()
    print(f"{PEAK}{resident('VmHWM') - baseline}")


def command(args: argparse.Namespace, who: str, steps: int) -> list[str]:
    if who == "trl":
        given = dict(batch=args.batch, precision=args.precision, steps=steps, output=args.output)
        return [__file__, str(args.folder), "--one", *(str(x) for n, v in given.items() for x in (f"--{n}", v))]
    flags = dict(
        model_name=args.folder / "model",
        dataset=args.folder / "train.jsonl",
        output_dir=args.output / f"ours-{steps}",
        batch_size=args.batch,
        max_steps=steps,
        precision=args.precision,
        train_type="lora",
        train_vision="full",
        use_gradient_checkpointing="false",
        save_every=0,
    )
    return ["train.py", *(str(x) for name, value in flags.items() for x in (f"--{name}", value)), "--overwrite"]


def run(args: argparse.Namespace, who: str, steps: int) -> tuple[float, int]:
    """(CPU seconds of the process and its children, peak bytes above imports)."""
    before = os.times()
    done = subprocess.run([sys.executable, *command(args, who, steps)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{who}: {done.stderr[-3000:]}")
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    if who == "trl":
        return seconds, int(done.stdout.rpartition(PEAK)[2])
    events = [json.loads(x) for x in (args.output / f"ours-{steps}" / "metrics.jsonl").read_text().splitlines()]
    return seconds, events[-1]["peak_memory_bytes"]["total"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what make_shapes.py wrote")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--output", type=Path, default=Path("outputs/images-vs-trl"))
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.folder = args.folder.absolute()
    args.output = args.output.absolute()
    if args.one:
        return train_by_trl(args)
    found = []
    for number in range(args.rounds):
        seconds = {}
        peaks = {}
        for who in ("ours", "trl"):
            few, _ = run(args, who, FEW)
            more, peaks[who] = run(args, who, args.steps)
            seconds[who] = (more - few) / (args.steps - FEW)
        found.append((seconds["trl"] / seconds["ours"], peaks["ours"] / peaks["trl"]))
        print(
            f"round {number + 1}: CPU seconds of a step: ours {seconds['ours']:.2f}, TRL {seconds['trl']:.2f}: "
            f"{found[-1][0]:.2f} x; peak {peaks['ours'] / 2**30:.2f} and {peaks['trl'] / 2**30:.2f} GiB: "
            f"{found[-1][1]:.2f}",
            flush=True,
        )
    speed, peak = (statistics.median(values) for values in zip(*found, strict=True))
    print(f"median: {speed:.2f} x the speed per CPU second at {peak:.2f} of the peak, n = {args.rounds}")


if __name__ == "__main__":
    main()
