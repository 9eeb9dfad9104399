"""Printed reports: the plan before the first step, the closing table after the last, and the next command to run."""

import shlex

from finetune.checkpoint.store import newest_checkpoint
from finetune.data.formats import chat_messages
from finetune.distributed.accelerate_config import NAMES
from finetune.metrics import GIB, table


def plan_lines(plan) -> list[str]:
    """Lines that print the final plan, and every adjustment with its reason."""
    s = plan.settings
    where = "an assumed accelerator" if s.assume_memory and plan.room.device != plan.backend else plan.backend
    base = f", base in {s.quantization_backend} {s.n_bits} bits" if s.train_type == "qlora" else ""
    what = f"added layers ({s.train_type})" if s.llama_pro_path else s.train_type
    return [
        f"{what} of {s.model_name} on {where} in {s.precision}{base}",
        *ranks_line(plan),
        f"rows per step: {plan.rows_per_step} (batch_size {s.batch_size} x accumulation "
        f"{s.gradient_accumulation_steps} "
        f"x data ranks {plan.data_ranks}), at most {s.microbatch_tokens} tokens per forward",
        *(f"  {adjustment}" for adjustment in plan.adjustments),
        *(f"  note: {notice}" for notice in plan.notices),
        f"output: {s.output_dir}",
    ]


def ranks_line(plan) -> list[str]:
    """The line on world size and distributed implementation; nothing for a single rank."""
    if plan.dims.world_size == 1:
        return []
    by = "" if plan.distribution == "ptd" else f", by accelerate: {NAMES[plan.distribution]}"
    return [f"ranks: {plan.dims.world_size} ({plan.dims}{by})"]


def not_finite(error, step: int, sources: list[str], root, lr: float) -> str:
    """The error line of a diverged run: step, rows, and the checkpoint to resume from."""
    shown = ", ".join(sources[:4]) + (f" and {len(sources) - 4} more" if len(sources) > 4 else "")
    good, _ = newest_checkpoint(root)
    kept = f"last good checkpoint: {good.folder}" if good else "no checkpoint exists yet"
    return f"step {step}: {error}; rows {shown}; {kept}. Lower --lr {lr}, or look at these rows."


def ask_command(output_dir: str, form: str, row: dict) -> str:
    """The generate.py command that asks the trained model a row's question."""
    command = ["python", "generate.py", "--checkpoint", output_dir]
    if form == "chat":
        messages = chat_messages(row, "")
        system = next((m["content"] for m in messages if m["role"] == "system"), None)
        command += ["--system", system] if system else []
        command += ["--prompt", next((m["content"] for m in messages if m["role"] == "user"), "...")]
    elif form == "prompt_completion":
        command += ["--raw", "--prompt", row["prompt"]]
    else:
        command += ["--prompt", row.get("instruction") or row.get("question") or "..."]
    return shlex.join(command)


# Predicted items that are measured only in the total; the table shows their sum in one row.
UNCOUNTED = ("logits", "workspace", "overlap", "libraries", "allocator", "gathered")


def memory_table(predicted: dict, measured: dict) -> str:
    """Predicted and measured bytes per item: directly measured items first, then those measured only in the total."""
    rows = [("memory", "predicted", "measured", "error")]

    def add(name, one, other):
        off = f"{one / other - 1:+.1%}" if other > 0 else ""
        rows.append((name, f"{one / 2**20:,.1f} MiB", f"{other / 2**20:,.1f} MiB", off))

    one, other = predicted["items"], measured["items"]
    beside = ("loading", "evaluating")
    for name in dict.fromkeys((*one, *other)):
        if name not in UNCOUNTED + beside:
            add(name, one.get(name, 0), other.get(name, 0))
    add("workspace", *(sum(items.get(name, 0) for name in UNCOUNTED) for items in (one, other)))
    add("total", predicted["total"], measured["total"])
    if other.get("loading"):
        add("loading", one.get("loading", 0), other["loading"])
    return table(rows)


def closing_lines(run, code: int) -> list[str]:
    """The closing report: metrics before and after, phase times, peak memory, output location. `run` is train.Run."""
    s, r, state = run.plan.settings, run.results, run.state
    lines, before, after = [""], r.get("before"), r.get("after")
    if after and code == 0:
        rows = [("", "before", "after"), ("loss", f"{before['loss']:.4f}", f"{after['loss']:.4f}")]
        if "exact_match" in after:
            name = f"exact match of {len(run.questions)}"
            rows.append((name, f"{before['exact_match']:.1%}", f"{after['exact_match']:.1%}"))
        lines += [table(rows), ""]
    if "sample after" in r:
        asked, wanted, source = r["sample"]
        lines += [f"scored example ({source}):", asked, f"expected: {wanted}"]
        lines += [f"before: {r.get('sample before', '(resumed)')}", f"after:  {r['sample after']}", ""]
    tokens = state.num_tokens - r.get("tokens before", 0)
    rate = tokens / run.seconds["training"] if run.seconds.get("training") else 0
    peak = r.get("peak", {"total": 0})["total"] / GIB
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in run.seconds.items())
    lines += [
        f"time: {phases}; {rate:,.0f} tokens/s in training",
        f"memory above imports: {peak:.2f} GiB in training, {r.get('loading', 0) / GIB:.2f} GiB while loading",
    ]
    if r.get("peak") and r.get("predicted", {}).get("total"):
        lines += ["", memory_table(r["predicted"], r["peak"]), ""]
    if code and not (s.save_model and state.step):
        return lines + [f"stopped by a signal at step {state.step}; nothing was saved"]
    if code:
        return lines + [
            f"stopped by a signal, saved to {s.output_dir}/checkpoints/step-{state.step}; "
            f"continue with --resume {s.output_dir}"
        ]
    return lines + ([f"saved: {s.output_dir}", f"try it: {r['command']}"] if s.save_model else [])
