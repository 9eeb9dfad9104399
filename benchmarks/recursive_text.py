"""What recursion buys on text, at equal CPU seconds: plain, plain at equal FLOPs, loop and TRM; and what a step costs.

The text is pydoc_data.topics of one CPython version (PSF licence), pinned by its digest; every tenth block of 4,096
characters is held out. One thread; CPU seconds are the clock and the schedule; learning rates are swept per model.

python benchmarks/recursive_text.py run loop --seconds 90 --seed 0 --lr 2e-3 >> results.jsonl
python benchmarks/recursive_text.py draw results.jsonl --output docs/recursive_text.svg
python benchmarks/recursive_text.py speed
"""

import argparse
import hashlib
import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from finetune.schedule import SHAPES  # noqa: E402
from recursive.config import ArchConfig, PretrainConfig  # noqa: E402

DIGEST = "37d06970fc926e60c16dff401e441b84752446a36b6b64516c229fdec77e992c"
BLOCK, LENGTH, BATCH, WARMUP = 4096, 256, 16, 100
BASE = ArchConfig(hidden_size=128, num_heads=4, L_layers=2, expansion=4, pos_encodings="rope", causal=True)
MODELS = {
    "plain": replace(BASE, plain=True),
    "plain, equal FLOPs": replace(BASE, plain=True, L_layers=6),
    "loop": replace(BASE, L_cycles=2),
    "TRM": replace(BASE, L_cycles=2, halt_max_steps=2),
}


def text() -> tuple[np.ndarray, np.ndarray, int]:
    """(training characters, held-out characters, vocabulary) as numbers."""
    from pydoc_data.topics import topics

    whole = "".join(topics[name] for name in sorted(topics))
    digest = hashlib.sha256(whole.encode()).hexdigest()
    if digest != DIGEST:
        raise SystemExit(f"pydoc_data.topics of this Python has sha256 {digest}, the figures are of {DIGEST}")
    known = {character: i for i, character in enumerate(sorted(set(whole)))}
    ids = np.array([known[character] for character in whole], np.int64)
    blocks = [ids[i : i + BLOCK] for i in range(0, len(ids), BLOCK)]
    held_out = [block for i, block in enumerate(blocks) if i % 10 == 9]
    return np.concatenate([b for i, b in enumerate(blocks) if i % 10 != 9]), np.concatenate(held_out), len(known)


def run(args) -> dict:
    """Trains one model; held-out nats per character after each supervision step."""
    import torch

    from recursive.torch_engine.model import RecursiveModel, token_losses
    from recursive.torch_engine.optim import build_optimizer

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    train, held_out, vocab = text()
    arch = replace(MODELS[args.model], forward_dtype=args.dtype)
    model = RecursiveModel(arch, vocab, LENGTH)
    settings = PretrainConfig(lr=args.lr, weight_decay=0.1)
    optimizer = build_optimizer(dict(model.named_parameters()), settings, torch.device("cpu"))
    train, held_out = torch.from_numpy(train), torch.from_numpy(held_out)
    generator = torch.Generator().manual_seed(args.seed)

    def nll(y, labels):
        return token_losses(model.logits(y).flatten(0, 1), labels.flatten(), arch.loss_type)

    @torch.no_grad()
    def evaluate():
        rows = held_out[: len(held_out) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
        sums = np.zeros(arch.supervision_steps)
        for part in rows.split(32):
            y, z = model.start(len(part), LENGTH)
            for i in range(arch.supervision_steps):
                y, z = model(part[:, :-1], y, z)
                sums[i] += nll(y, part[:, 1:]).double().sum().item()
        return [round(float(s), 5) for s in sums / (rows.shape[0] * LENGTH)]

    curve, points, evaluating, updates, tokens = [], list(np.linspace(args.seconds / 4, args.seconds, 4)), 0.0, 0, 0
    began, left = time.process_time(), 0
    while points:
        spent = time.process_time() - began - evaluating
        if spent >= points[0]:
            points.pop(0)
            at = time.process_time()
            curve.append({"seconds": round(spent, 1), "updates": updates, "tokens": tokens, "loss": evaluate()})
            print(args.model, args.lr, curve[-1], file=sys.stderr, flush=True)
            evaluating += time.process_time() - at
            continue
        if not left:
            at = torch.randint(len(train) - LENGTH - 1, (BATCH, 1), generator=generator)
            rows = train[at + torch.arange(LENGTH + 1)]
            (y, z), left = model.start(BATCH, LENGTH), arch.supervision_steps
            tokens += BATCH * LENGTH
        factor = min(1.0, (updates + 1) / WARMUP) * SHAPES["cosine"](min(1.0, spent / args.seconds), 0.1)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * factor
        y, z = model(rows[:, :-1], y, z)
        loss = nll(y, rows[:, 1:]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        y, z, left, updates = y.detach(), z.detach(), left - 1, updates + 1
    parameters = sum(p.numel() for p in model.parameters())
    facts = {"lr": args.lr, "seed": args.seed, "seconds": args.seconds, "dtype": args.dtype, "parameters": parameters}
    return {"model": args.model, **facts, "curve": curve}


def draw(args) -> None:
    """The table as Markdown on stdout, the curves as SVG. Of each model, the learning rate with most seeds."""
    from benchmarks.line_chart import line_chart

    results, lines = [json.loads(line) for line in args.results.read_text().splitlines()], {}
    print("| model | parameters | seconds | lr (swept) | seeds | nats per character | updates | tokens seen |")
    print("|---|---|---|---|---|---|---|---|")
    for seconds in sorted({r["seconds"] for r in results}):
        for model in MODELS:
            of = [r for r in results if (r["model"], r["seconds"]) == (model, seconds)]
            if not of:
                continue
            rates = sorted({r["lr"] for r in of})
            best = min(rates, key=lambda lr, of=of: min(r["curve"][-1]["loss"][0] for r in of if r["lr"] == lr))
            of = [r for r in of if r["lr"] == best]
            last = [r["curve"][-1] for r in of]
            steps = ", then ".join(_spread([p["loss"][i] for p in last]) for i in range(len(last[0]["loss"])))
            swept = f"{best:g} ({', '.join(f'{lr:g}' for lr in rates)})"
            counts = f"{np.mean([p['updates'] for p in last]):.0f} | {np.mean([p['tokens'] for p in last]) / 1e6:.2f} M"
            print(f"| {model} | {of[0]['parameters']:,} | {seconds:g} | {swept} | {len(of)} | {steps} | {counts} |")
            if seconds == args.drawn:
                lines[model] = [[(p["seconds"], p["loss"][0]) for p in r["curve"]] for r in of]
    if lines:
        chart = line_chart(lines, "CPU seconds, one thread", "held-out nats per character", (1.0, 4.0))
        args.output.write_text(chart)


def _spread(numbers: list[float]) -> str:
    if len(numbers) == 1:
        return f"{numbers[0]:.3f}"
    return f"{np.mean(numbers):.3f} ({min(numbers):.3f} to {max(numbers):.3f})"


# ---- speed


def speed(args) -> None:
    """Tokens per CPU second of one training step: ours in fp32 and bf16, the prototype's step beside it, in turn."""
    import torch

    from finetune.torch_engine.device import set_onednn

    torch.set_num_threads(1)
    for name, arch in (("plain", MODELS["plain"]), ("loop", MODELS["loop"])):
        arch = replace(arch, expansion=4)
        steps = {
            "prototype fp32": prototype_step(arch),
            "ours fp32": our_step(replace(arch, forward_dtype="float32")),
            "ours fp32, oneDNN": our_step(replace(arch, forward_dtype="float32")),
            "ours bf16": our_step(replace(arch, forward_dtype="bfloat16")),
        }
        times = {kind: [] for kind in steps}
        for _ in range(args.rounds):
            for kind, step in steps.items():
                set_onednn("oneDNN" in kind)
                began = time.process_time()
                for _ in range(4):
                    step()
                times[kind].append((time.process_time() - began) / 4)
        rates = {kind: BATCH * LENGTH / float(np.median(seconds)) for kind, seconds in times.items()}
        ratios = {kind: round(rate / rates["prototype fp32"], 2) for kind, rate in rates.items()}
        shown = {kind: round(rate) for kind, rate in rates.items()}
        print(json.dumps({"model": name, "rounds": args.rounds, "tokens_per_s": shown, "ratio": ratios}))
    recursion_cost(args.rounds)


def our_step(arch: ArchConfig):
    import torch

    from recursive.torch_engine.model import RecursiveModel, token_losses
    from recursive.torch_engine.optim import build_optimizer

    torch.manual_seed(0)
    model, ids = RecursiveModel(arch, 103, LENGTH), torch.randint(0, 103, (BATCH, LENGTH))
    optimizer = build_optimizer(dict(model.named_parameters()), PretrainConfig(), torch.device("cpu"))

    def step():
        y, z = model.start(BATCH, LENGTH)
        y, z = model(ids, y, z)
        token_losses(model.logits(y).flatten(0, 1), ids.flatten(), arch.loss_type).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def prototype_step(arch: ArchConfig):
    """The same step as it is first written down: modules, autograd's own norm and SwiGLU, AdamW's default loop."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    torch.manual_seed(0)
    size, heads, width = arch.hidden_size, arch.num_heads, arch.swiglu_width
    head_dim = size // heads
    angles = torch.outer(torch.arange(LENGTH).float(), 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim))
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)

    def norm(h):
        return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5)

    def rotated(t):
        first, second = t.chunk(2, -1)
        return t * cos + torch.cat([-second, first], -1) * sin

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(size, 3 * size, bias=False), nn.Linear(size, size, bias=False)
            self.gate, self.up = nn.Linear(size, width, bias=False), nn.Linear(size, width, bias=False)
            self.down = nn.Linear(width, size, bias=False)

        def forward(self, h):
            q, k, v = (t.view(BATCH, LENGTH, heads, head_dim).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
            mixed = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
            h = norm(h + self.out(mixed.transpose(1, 2).reshape(BATCH, LENGTH, size)))
            return norm(h + self.down(F.silu(self.gate(h)) * self.up(h)))

    layers = nn.ModuleList(Layer() for _ in range(arch.L_layers))
    embed, head = nn.Embedding(103, size), nn.Linear(size, 103, bias=False)
    parameters = [*layers.parameters(), *embed.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    ids, y0, z0 = torch.randint(0, 103, (BATCH, LENGTH)), torch.randn(size), torch.randn(size)

    def net(h):
        for layer in layers:
            h = layer(h)
        return h

    def step():
        x = math.sqrt(size) * embed(ids)
        if arch.plain:
            y = net(x)
        else:
            y, z = y0.expand(BATCH, LENGTH, -1), z0.expand(BATCH, LENGTH, -1)
            for _ in range(arch.L_cycles):
                z = net(z + y + x)
            y = net(y + z)
        F.cross_entropy(head(y).flatten(0, 1), ids.flatten()).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def recursion_cost(rounds: int) -> None:
    """CPU seconds of a step of the loop (6 applied layers) over those of 6 layers of their own, per applied layer."""
    steps = {name: our_step(replace(MODELS[name], forward_dtype="float32")) for name in ("loop", "plain, equal FLOPs")}
    times = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            began = time.process_time()
            step()
            times[name].append(time.process_time() - began)
    loop, plain = (float(np.median(times[name])) for name in steps)
    print(json.dumps({"loop_s": round(loop, 3), "six_layers_s": round(plain, 3), "ratio": round(loop / plain, 3)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run")
    one.add_argument("model", choices=MODELS)
    one.add_argument("--seconds", type=float, default=90)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--lr", type=float, default=2e-3)
    one.add_argument("--dtype", default="bfloat16")
    one.set_defaults(go=lambda args: print(json.dumps(run(args)), flush=True))
    other = commands.add_parser("draw")
    other.add_argument("results", type=Path)
    other.add_argument("--output", type=Path, default=ROOT / "docs/recursive_text.svg")
    other.add_argument("--drawn", type=float, default=90, help="seconds of the runs in the picture")
    other.set_defaults(go=draw)
    quick = commands.add_parser("speed")
    quick.add_argument("--rounds", type=int, default=10)
    quick.set_defaults(go=speed)
    args = parser.parse_args()
    args.go(args)


if __name__ == "__main__":
    main()
