"""Probe results as text and JSON (--doctor), and recommended settings for this machine (--recommend)."""

import json
from collections.abc import Callable

import quantization_wrapper
from backend_manager import CAPABILITIES, GIB, BackendManager
from finetune.plan.draft import Facts
from finetune.plan.resolve import resolve_plan

OOM_ADVICE = {
    "cuda": "--use_gradient_checkpointing, a smaller --microbatch_tokens, --train_type qlora",
    "mps": "close other programs, PYTORCH_MPS_HIGH_WATERMARK_RATIO, --quantization_backend quanto or nf4, "
    "shorter --context_length",
    "mlx": "--use_gradient_checkpointing, a smaller --microbatch_tokens, shorter --context_length",
    "xpu": "--use_gradient_checkpointing, a smaller --microbatch_tokens, --train_type qlora",
    "cpu": "--low_memory, a smaller --microbatch_tokens, --use_gradient_checkpointing, a smaller model",
}
LARGE_GIB = 24  # above this, guide S1's decision tree trains without quantization


def examine(manager: BackendManager, device_facts: Callable[[], list]) -> dict:
    """Capabilities of this machine and probe results of every (quantizer, bits) pair on its device.

    `device_facts`: the engine's, see torch_engine/device_facts.py. Probes what is not cached: about ten seconds the
    first time.
    """
    pairs = {}
    if CAPABILITIES[manager.backend].engine == "torch":
        pairs = {f"{n}/{b}": manager.probe_quantization(n, b) for n, b in quantization_wrapper.pairs()}
    manager.capabilities  # noqa: B018  probed, so that describe() has them
    return manager.describe() | {"quantization": pairs, "device": device_facts()}


def report(
    manager: BackendManager, doctor: str, with_recommendation: bool, device_facts: Callable[[], list] = list
) -> list[str]:
    """What --doctor (false, true or json) and --recommend print."""
    advice = recommend(manager) if with_recommendation else []
    if doctor == "false":
        return advice
    found = examine(manager, device_facts)
    if doctor == "json":
        return [as_json(found | ({"recommend": advice} if advice else {}))]
    return [*lines(manager, found), *advice]


def lines(manager: BackendManager, found: dict) -> list[str]:
    """The probe results as lines of text."""
    text = [*manager.summary_lines(), "", *table(found["quantization"])]
    failed = {pair: p["error"] for pair, p in found["quantization"].items() if p["error"]}
    text += [f"  {pair} fails here: {why}" for pair, why in failed.items()]
    if not found["device"]:
        return text
    facts = [(f["what"], "yes" if f["works"] else "no", f["why"]) for f in found["device"]]
    return [*text, "", *aligned([("on the device", "works", "how, or why not"), *facts])]


HEAD = ("method", "bits", "passes", "bits/weight", "weight error", "product error", "layer time")


def rows(pairs: dict) -> list[tuple[str, ...]]:
    """One table row per probed pair, in HEAD's columns."""
    out = []
    for pair, p in pairs.items():
        name, bits = pair.split("/")
        if p["error"]:
            out.append((name, bits, "no", "-", "-", "-", "-"))
        else:
            figures = f"{p['bits_per_weight']:.2f}", f"{p['weight_error']:.2%}", f"{p['product_error']:.0e}"
            out.append((name, bits, "yes", *figures, f"{p['slowdown']:.2f} x"))
    return out


def table(pairs: dict) -> list[str]:
    """HEAD and rows as aligned lines."""
    if not pairs:
        return ["quantizers: this backend has its own, which are not probed"]
    return aligned([HEAD, *rows(pairs)])


def aligned(body: list[tuple[str, ...]]) -> list[str]:
    """Rows with their columns aligned."""
    widths = [max(len(row[i]) for row in body) for i in range(len(body[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in body]


def as_json(found: dict) -> str:
    return json.dumps(found, indent=1, default=str)


def recommend(manager: BackendManager) -> list[str]:
    """Guide S1's decision tree for this machine: each question with its answer, then the flags."""
    available, why_not = ({str(b) for b in manager.available}, {str(b): w for b, w in manager.unavailable.items()})
    memory = manager.get_memory_info()["total"] / GIB
    backend, caps = str(manager.backend), manager.capabilities

    def answer(name):
        return "yes" if name in available else f"no ({why_not.get(name, 'not detected')})"

    text = [
        f"NVIDIA or AMD GPU? {answer('cuda')}",
        f"Apple silicon? {'yes' if 'mps' in available else 'no'}",
        f"MLX? {answer('mlx')}",
        f"so: --backend {backend}, {memory:.0f} GiB",
    ]
    train_type = "lora" if memory > LARGE_GIB and backend != "cpu" else "qlora"
    why = {
        "lora": f"more than {LARGE_GIB} GiB: the base need not be quantized; --dry_run shows whether your model fits",
        "qlora": "a quantized base leaves more memory for activations and longer rows",
    }[train_type]
    plan = resolve_plan({"backend": backend, "train_type": train_type}, Facts(manager.backend, caps))
    reasons, precision = {a.setting: a.reason for a in plan.adjustments}, plan.settings.precision
    text.append(f"  --precision {precision}: {reasons['precision']}")
    text.append(f"  --train_type {train_type}: {why}")
    if train_type == "qlora" and backend == "mlx":
        text.append(f"  --quantization_backend mlx: {reasons['quantization_backend']}")
    elif train_type == "qlora":
        text.append("  --quantization_backend auto: the first that passes its probe; --doctor lists all")
    if backend == "mps":
        text.append("  MLX is faster on Apple silicon; use MPS if you need torch")
    if backend == "cpu":
        text.append(
            "  for experiments: these flags; for real work: set OMP_NUM_THREADS to the number of cores and use a "
            "small model"
        )
    text.append(f"if memory runs out on {backend}: {OOM_ADVICE[backend]}")
    text.append(f"python train.py --backend {backend} --train_type {train_type} --precision {precision} --dry_run")
    return text
