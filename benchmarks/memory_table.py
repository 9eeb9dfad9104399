"""Predicted beside measured memory: each cell a fresh `python train.py` on a randomly initialised model of its shape.

    pip install -r requirements-test.txt
    python benchmarks/memory_table.py          72 cells, about 20 minutes on two cores; --write: into docs/memory.md
    python benchmarks/memory_table.py --fit    the cells that constants of finetune/estimate/memory.py were fitted to
    python benchmarks/memory_table.py --odd    models whose layers are traced: state spaces, latent attention, experts
    python benchmarks/memory_table.py --draw 1 30 cells drawn at random from architectures, widths, kinds and precisions
    python benchmarks/memory_table.py --rewards 1 24 cells of runs that sample answers
    python benchmarks/memory_table.py --mlx 1     18 cells of what the MLX engine trains
    python benchmarks/memory_table.py --others 1  39 cells: teachers, long and uneven rows, tokens, heads, optimizers

Predicted is the start event's predicted_memory_bytes, measured the end event's peak_memory_bytes of the same run.
"""

import argparse
import json
import platform
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
SHAPES = {
    "A": (
        "llama",
        dict(
            vocab_size=16000,
            hidden_size=448,
            intermediate_size=1024,
            num_hidden_layers=8,
            num_attention_heads=7,
            num_key_value_heads=7,
            tie_word_embeddings=True,
        ),
    ),
    "B": (
        "qwen2",
        dict(
            vocab_size=32000,
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=2,
            tie_word_embeddings=False,
        ),
    ),
    "C": (
        "qwen3",
        dict(
            vocab_size=24000,
            hidden_size=640,
            intermediate_size=1728,
            num_hidden_layers=12,
            num_attention_heads=10,
            num_key_value_heads=5,
            head_dim=64,
            tie_word_embeddings=True,
        ),
    ),
}
FIT_SHAPES = {
    "D": (
        "llama",
        dict(
            vocab_size=8000,
            hidden_size=384,
            intermediate_size=1152,
            num_hidden_layers=10,
            num_attention_heads=6,
            num_key_value_heads=3,
            tie_word_embeddings=False,
        ),
    ),
    "E": (
        "mistral",
        dict(
            vocab_size=40000,
            hidden_size=768,
            intermediate_size=2048,
            num_hidden_layers=4,
            num_attention_heads=12,
            num_key_value_heads=12,
            tie_word_embeddings=True,
            sliding_window=None,
        ),
    ),
}
# Changes to the small configuration that tests/support/architectures.py makes of each class's own.
WIDE = dict(hidden_size=384, intermediate_size=1024, num_hidden_layers=6, vocab_size=16000)
HEADS = dict(num_attention_heads=6, num_key_value_heads=3, head_dim=64)
STATES = dict(num_heads=12, head_dim=64, state_size=64, chunk_size=64, expand=2, n_groups=1)
MAMBA = dict(mamba_n_heads=12, mamba_d_head=64, mamba_d_state=64, mamba_chunk_size=64, mamba_expand=2, mamba_n_groups=1)
GATED = dict(linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=48, linear_value_head_dim=48)
LATENT = dict(q_lora_rank=192, kv_lora_rank=128, qk_rope_head_dim=32, qk_nope_head_dim=64, v_head_dim=64)
LATENT |= dict(num_attention_heads=6, num_key_value_heads=6, head_dim=32, qk_head_dim=96)
EXPERTS = dict(num_experts=8, num_local_experts=8, n_routed_experts=8, moe_intermediate_size=256, num_experts_per_tok=2)
ODD_SHAPES = {
    "mamba2": STATES,
    "falcon_h1": HEADS | MAMBA | dict(mamba_d_ssm=768),
    "bamba": HEADS | MAMBA,
    "granitemoehybrid": HEADS
    | MAMBA
    | EXPERTS
    | dict(shared_intermediate_size=512, layer_types=["mamba", "attention"] * 3),
    "qwen3_next": HEADS
    | GATED
    | EXPERTS
    | dict(shared_expert_intermediate_size=256, layer_types=["linear_attention", "full_attention"] * 3),
    "deepseek_v3": LATENT | EXPERTS,
    "deepseek_v2": LATENT | EXPERTS,
    "minicpm3": LATENT,
    "gemma3n_text": HEADS
    | dict(vocab_size_per_layer_input=16000, hidden_size_per_layer_input=64, activation_sparsity_pattern=[0.0] * 6)
    | dict(layer_types=["sliding_attention", "full_attention"] * 3),
    "bloom": dict(n_layer=6, n_head=6),
    "gpt_oss": HEADS | EXPERTS | dict(intermediate_size=256, layer_types=["sliding_attention", "full_attention"] * 3),
    "olmoe": HEADS | EXPERTS | dict(intermediate_size=256),
    "phimoe": HEADS | EXPERTS | dict(intermediate_size=256),
    # Their code loops over the positions: minutes each.
    "mamba": dict(state_size=16, expand=2, time_step_rank=24),
    "jamba": HEADS | EXPERTS | dict(mamba_d_state=16, mamba_expand=2, mamba_dt_rank=24),
    "recurrent_gemma": HEADS | dict(lru_width=384, attention_window_size=128),
    "rwkv": dict(attention_hidden_size=384),
}
# Of --draw: each class with its own configuration, in sizes that no constant was fitted on.
DRAWN_KINDS = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "olmo2", "phi3", "granite", "mixtral")
WIDTHS = (256, 320, 448, 512, 640, 832)
DRAWN_EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
NUM_DRAWN = 30
NF4 = {"quantization_backend": "nf4", "cache_dequantized": "false"}
FLAGS = {
    "full": {"train_type": "full"},
    "lora": {"train_type": "lora"},
    "qlora": {"train_type": "qlora", **NF4},
    "recomputed": {"train_type": "lora", "use_gradient_checkpointing": "true"},
    "dpo": {"train_type": "lora", "preference": "dpo", "dataset": "pairs.jsonl"},
    "adamw_8bit": {"train_type": "full", "optimizer": "adamw_8bit"},
    "2 ranks": {"train_type": "full", "world_size": 2, "parallel": "fsdp"},
}
MLX = {"backend": "mlx"}
MLX_FLAGS = {
    "mlx_full": {"train_type": "full", **MLX},
    "mlx_lora": {"train_type": "lora", **MLX},
    "mlx_qlora": {"train_type": "qlora", "quantization_backend": "mlx", **MLX},
    "mlx_dpo": {"train_type": "lora", "preference": "dpo", "dataset": "pairs.jsonl", **MLX},
    "mlx_orpo": {"train_type": "lora", "preference": "orpo", "dataset": "pairs.jsonl", **MLX},
    "mlx_kto": {"train_type": "lora", "preference": "kto", "dataset": "labels.jsonl", **MLX},
    "mlx_8bit": {"train_type": "full", "optimizer": "adamw_8bit", **MLX},
    "mlx_saved": {"train_type": "lora", "modules_to_save": "lm_head", **MLX},
    "mlx_noise": {"train_type": "lora", "neftune_noise_alpha": 5, **MLX},
    "mlx_last": {"train_type": "full", "num_layers": 2, **MLX},
}
FLAGS |= MLX_FLAGS
NUM_MLX = 18
NEW_TOKENS = "<|tool|>,<|call|>"
# Of --others: a teacher's folder is that of the cell's model and a word.
OTHER_FLAGS = {
    "teacher": {"train_type": "lora", "teacher": "teacher", "teacher_top_k": 64},
    "teacher_all": {"train_type": "lora", "teacher": "teacher", "teacher_top_k": 32000},
    "teacher_full": {"train_type": "full", "teacher": "teacher", "teacher_top_k": 64},
    "long": {"train_type": "lora", "dataset": "long.jsonl", "context_length": 1024},
    "long_full": {"train_type": "full", "dataset": "long.jsonl", "context_length": 1024},
    "new_tokens": {"train_type": "lora", "new_tokens": NEW_TOKENS},
    "last": {"train_type": "full", "num_layers": 2},
    "uneven": {"train_type": "lora", "dataset": "uneven.jsonl", "context_length": 512, "max_steps": 24},
    "embed": {"train_type": "lora", "task": "embed", "dataset": "near.jsonl", "batch_size": 32},
    "embed_full": {"train_type": "full", "task": "embed", "dataset": "near.jsonl", "batch_size": 32},
    "classify": {"train_type": "lora", "task": "classify", "dataset": "classes.jsonl", "batch_size": 32},
    "adafactor": {"train_type": "full", "optimizer": "adafactor"},
    "lion": {"train_type": "full", "optimizer": "lion"},
}
FLAGS |= OTHER_FLAGS
NUM_OTHERS = 3 * len(OTHER_FLAGS)
# Of --rewards: answers to each prompt differ, so that all are learned from.
REWARD = """
def even(prompts, answers, rows):
    return [float(i % 2) for i in range(len(answers))]
"""
NUM_REWARDED = 24
KINDS = ("full", "lora", "qlora")
BATCHES = (2, 6)
PRECISIONS = ("fp32", "bf16")  # full fine-tuning in bf16 is bf16_autocast
CONTEXT, STEPS, NUM_ROWS = 160, 3, 48
COUNTED = ("base", "trainable", "gradients", "optimizer", "activations")
MIB = 2**20


def cells(shapes) -> list[tuple]:
    """(shape, train_type, batch_size, checkpointing, precision) of each run."""
    ways = [(s, k, b, c) for s in shapes for k in KINDS for b in BATCHES for c in ("false", "true")]
    return [(*way, precision) for precision in PRECISIONS for way in ways]


def odd_cells() -> list[tuple]:
    """Of each odd class LoRA, with and without recomputation by turns, and some in full."""
    found = [(name, "lora", 6, ("false", "true")[i % 2], "fp32") for i, name in enumerate(ODD_SHAPES)]
    return found + [(name, "full", 2, "false", "fp32") for name in [*ODD_SHAPES][::3]]


def drawn_shape(draw: random.Random) -> tuple[str, tuple]:
    """(name, (kind, sizes)) of a model."""
    kind = draw.choice(DRAWN_KINDS)
    width = draw.choice(WIDTHS)
    heads = width // 64
    sizes = dict(
        vocab_size=draw.choice((8000, 20000, 32000)),
        hidden_size=width,
        intermediate_size=64 * round(width * draw.uniform(2.2, 3.5) / 64),
        num_hidden_layers=draw.randint(4, 12),
        num_attention_heads=heads,
        num_key_value_heads=draw.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        head_dim=64,
        tie_word_embeddings=draw.random() < 0.5,
    )
    sizes |= DRAWN_EXPERTS if kind == "mixtral" else {}
    sizes |= dict(pad_token_id=0) if kind == "phi3" else {}
    return f"{kind} {width}", (kind, sizes)


def rewarded(seed: int) -> tuple[dict, list[tuple]]:
    """(shapes, cells) of --rewards: a cell's kind has tokens of prompts, answers to each, and tokens of an answer."""
    draw = random.Random(seed)
    shapes = {}
    found = []
    while len(found) < NUM_REWARDED:
        name, (architecture, sizes) = drawn_shape(draw)
        shape = architecture, sizes | dict(num_hidden_layers=draw.randint(3, 6), vocab_size=draw.choice((8000, 16000)))
        prompt = draw.choice((30, 120, 300))
        group = draw.choice((4, 8, 16))
        kind = f"{draw.choice(KINDS)} {prompt} {group} {draw.choice((16, 48, 80))}"
        cell = (name, kind, draw.choice((2, 4)), "false", draw.choice(PRECISIONS))
        if cell not in found:
            found.append(cell)
            shapes.setdefault(name, shape)
    return shapes, found


def on_mlx(seed: int) -> tuple[dict, list[tuple]]:
    """(shapes, cells) of --mlx: each kind once, and runs by rewards, of drawn models."""
    draw = random.Random(seed)
    shapes = {}
    found = []
    while len(found) < NUM_MLX:
        name, (architecture, sizes) = drawn_shape(draw)
        shapes.setdefault(name, (architecture, sizes | dict(num_hidden_layers=draw.randint(3, 6))))
        if len(found) < len(MLX_FLAGS):
            kind = [*MLX_FLAGS][len(found)]
        else:
            train_type = draw.choice(("mlx_full", "mlx_lora", "mlx_qlora"))
            kind = f"{train_type} {draw.choice((30, 120))} {draw.choice((4, 8, 16))} {draw.choice((16, 48))}"
        found.append((name, kind, draw.choice((2, 4, 6)), "false", "fp32"))
    return shapes, found


def others(seed: int) -> tuple[dict, list[tuple]]:
    """(shapes, cells) of --others: each kind by turns, of drawn models."""
    draw = random.Random(seed)
    shapes = {}
    found = []
    while len(found) < NUM_OTHERS:
        name, shape = drawn_shape(draw)
        shapes.setdefault(name, shape)
        kind = [*OTHER_FLAGS][len(found) % len(OTHER_FLAGS)]
        found.append((name, kind, draw.choice((2, 4, 6)), "false", draw.choice(PRECISIONS)))
    return shapes, found


def teacher_of(shape: tuple[str, dict]) -> tuple[str, dict]:
    """(kind, sizes) of a teacher: the student's, with half as many layers again."""
    kind, sizes = shape
    return kind, sizes | dict(num_hidden_layers=sizes["num_hidden_layers"] * 3 // 2)


def drawn(seed: int) -> tuple[dict, list[tuple]]:
    """(shapes, cells) of --draw."""
    draw = random.Random(seed)
    kinds = [kind for kind in FLAGS if kind not in (*MLX_FLAGS, *OTHER_FLAGS)]
    shapes = {}
    found = []
    while len(found) < NUM_DRAWN:
        name, shape = drawn_shape(draw)
        shapes.setdefault(name, shape)
        cell = (name, draw.choice(kinds), draw.choice((2, 4, 6)), "false", draw.choice(PRECISIONS))
        if cell not in found:
            found.append(cell)
    return shapes, found


def make_model(folder: Path, kind: str, sizes: dict, odd: bool = False) -> None:
    import torch
    import transformers

    from tests.support.tiny import CHATML, train_tokenizer

    train_tokenizer(folder, bos=False, chat_template=CHATML)
    if odd:
        from tests.support import architectures

        config = architectures.tiny_config(kind, max_position_embeddings=2048, sliding_window=256, **WIDE | sizes)
    else:
        config = transformers.AutoConfig.for_model(kind, max_position_embeddings=2048, **sizes)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def make_rows(folder: Path) -> None:
    """Rows of uneven length, prompts and answers of random words, and pairs of answers."""
    draw = random.Random(0)
    words = ["capital", "France", "Paris", "plus", "hello", "there", "Human", "Assistant", "spaces", "return"]
    rows = []
    for _ in range(NUM_ROWS):
        text = [draw.choice(words) for _ in range(draw.randint(70, 160))]
        cut = len(text) // 3
        rows.append({"prompt": " ".join(text[:cut]), "completion": " " + " ".join(text[cut:])})
    write_json_lines(folder / "rows.jsonl", rows)
    others = [*rows[1:], rows[0]]
    pairs = [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": other["completion"]}
        for row, other in zip(rows, others, strict=True)
    ]
    write_json_lines(folder / "pairs.jsonl", pairs)
    write_json_lines(folder / "labels.jsonl", [row | {"label": i % 2 == 0} for i, row in enumerate(rows)])
    (folder / "reward.py").write_text(REWARD)
    near = [{"anchor": row["prompt"], "positive": row["completion"]} for row in rows]
    write_json_lines(folder / "near.jsonl", near)
    write_json_lines(
        folder / "classes.jsonl", [{"text": row["completion"], "label": "ab"[i % 2]} for i, row in enumerate(rows)]
    )
    for name, least, most in (("long", 300, 900), ("uneven", 10, 400)):
        texts = [" ".join(draw.choices(words, k=draw.randint(least, most))) for _ in range(2 * NUM_ROWS)]
        write_json_lines(folder / f"{name}.jsonl", [{"text": text} for text in texts])


def of_rewards(folder: Path, kind: str) -> dict:
    """Flags of a cell that samples answers; its prompts are of about the kind's length."""
    train_type, *numbers = kind.split()
    prompt, group, answer = map(int, numbers)
    draw = random.Random(1)
    words = ["capital", "France", "Paris", "plus", "hello", "there", "Human", "Assistant", "spaces", "return"]
    rows = []
    for _ in range(NUM_ROWS):
        text = [draw.choice(words) for _ in range(draw.randint(prompt * 3 // 4, prompt))]
        rows.append({"prompt": " ".join(text)})
    write_json_lines(folder / "prompts.jsonl", rows)
    flags = dict(
        dataset="prompts.jsonl", reward=f"{folder}/reward.py:even", mask_truncated="false", **FLAGS[train_type]
    )
    return flags | dict(num_generations=group, max_completion_length=answer, context_length=1024)


def write_json_lines(file: Path, rows: list[dict]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(folder: Path, cell: tuple, extra=()) -> dict:
    """{'predicted', 'measured'} of one cell's run."""
    shape, kind, batch, checkpointing, precision = cell
    out = folder / "out"
    flags = {
        "model_name": folder / shape,
        "dataset": "rows.jsonl",
        "batch_size": batch,
        "precision": precision,
        "use_gradient_checkpointing": checkpointing,
        "context_length": CONTEXT,
        "max_steps": STEPS,
        "backend": "cpu",
        "log_to": "stdout",
        "save_model": "false",
        "output_dir": out,
        **(of_rewards(folder, kind) if kind not in FLAGS else FLAGS[kind]),
    }
    flags["dataset"] = folder / flags["dataset"]
    if "teacher" in flags:
        flags |= {"teacher": folder / f"{shape} teacher", "teacher_cache": out.parent / "given"}
        shutil.rmtree(flags["teacher_cache"], ignore_errors=True)
    command = [sys.executable, "-W", "ignore", str(ROOT / "train.py"), "--overwrite"]
    command += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command += extra
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found = {"predicted": events[0]["predicted_memory_bytes"], "measured": events[-1]["peak_memory_bytes"]}
    said = STEP_LINE.search(done.stdout)
    if said:
        found["step"] = {"measured_s": float(said[1]), "predicted_s": float(said[2]), "beside": "process" in said[3]}
    return found


def step_cell(result: dict) -> str:
    """Predicted beside measured seconds of a step; of one beside other processes no error."""
    step = result.get("step")
    if step is None:
        return ""
    if step["beside"]:
        error = "beside others"
    else:
        error = f"{step['predicted_s'] / step['measured_s'] - 1:+.0%}"
    return f"{step['predicted_s']:.2g}/{step['measured_s']:.2g} s {error}"


def off(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.1%}" if measured > MIB else ""


def row(cell: tuple, result: dict) -> list[str]:
    """A line of the table: name, total and each counted item as `predicted/measured error`."""
    predicted, measured = result["predicted"], result["measured"]
    shape, kind, batch, checkpointing, precision = cell
    name = f"{shape} {kind}{' ' + precision if precision != 'fp32' else ''}, {batch} rows"
    name += ", ckpt" if checkpointing == "true" else ""
    pairs = [(predicted["total"], measured["total"])]
    pairs += [(predicted["items"].get(n, 0), measured["items"].get(n, 0)) for n in COUNTED]
    pairs += [(rest(predicted), rest(measured)), *((r["items"].get("loading", 0) for r in (predicted, measured)),)]
    return (
        [name]
        + [
            f"{p / MIB:.0f}/{m / MIB:.0f} {off(p, m)}" if i < 6 else f"{p / MIB:.0f}/{m / MIB:.0f}"
            for i, (p, m) in enumerate(map(tuple, pairs))
        ]
        + [step_cell(result)]
    )


def rest(stats: dict) -> int:
    """Bytes of no counted item: logits, temporaries, libraries, the allocator's reserve."""
    return stats["total"] - sum(stats["items"].get(n, 0) for n in COUNTED)


HEAD = ["cell", "total", *COUNTED, "rest", "loading", "step"]
STEP_LINE = re.compile(r"time of a step: ([\d.e+-]+) s, the median \(([\d.e+-]+) predicted(.*)\)")
STEP_LIMIT = 0.25


def errors(results: dict) -> dict[str, list[float]]:
    """{item: |predicted / measured - 1| of every cell that has it}."""
    found = {}
    for result in results.values():
        predicted, measured = result["predicted"], result["measured"]
        found.setdefault("total", []).append(abs(predicted["total"] / measured["total"] - 1))
        for n in COUNTED:
            if measured["items"].get(n, 0) > MIB:
                error = abs(predicted["items"].get(n, 0) / measured["items"][n] - 1)
                found.setdefault(n, []).append(error)
    return found


def summary(results: dict) -> list[str]:
    lines = []
    for name, values in errors(results).items():
        limit = 0.10 if name == "total" else 0.05
        inside = sum(v <= limit for v in values)
        values = sorted(values)
        lines.append(
            f"{name}: {inside} of {len(values)} cells within {limit:.0%}, median {values[len(values) // 2]:.1%}, "
            f"largest {values[-1]:.1%}"
        )
    steps = [result["step"] for result in results.values() if "step" in result]
    alone = [step["predicted_s"] / step["measured_s"] - 1 for step in steps if not step["beside"]]
    inside = sum(abs(error) <= STEP_LIMIT for error in alone)
    lines.append(
        f"time of a step: {inside} of {len(alone)} cells within {STEP_LIMIT:.0%}; {len(steps) - len(alone)} more ran "
        "beside other processes"
    )
    return lines


def write_page(results: dict, seconds: float) -> None:
    """Puts table and summary between the two marks of docs/memory.md."""
    from backend_manager import cpu_facts, versions

    page = ROOT / "docs" / "memory.md"
    begin, end = "<!-- table: python benchmarks/memory_table.py --write -->", "<!-- end of table -->"
    head, _, rest_of_page = page.read_text().partition(begin)
    tail = rest_of_page.partition(end)[2]
    facts = cpu_facts()
    found = {k: v for k, v in versions().items() if k in ("torch", "transformers")}
    said = f"{platform.system()}, {facts['model']} x {facts['cores']}, " + ", ".join(
        f"{k} {v}" for k, v in found.items()
    )
    table = ["| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|"]
    table += ["| " + " | ".join(row(cell, result)) + " |" for cell, result in results.items()]
    body = [begin, "", f"{said}; {len(results)} runs in {seconds / 60:.0f} minutes. MiB, predicted/measured.", ""]
    body += [f"- {line}" for line in summary(results)] + ["", *table, ""]
    page.write_text(head + "\n".join(body) + end + tail)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="the shapes that constants are fitted to")
    parser.add_argument("--odd", action="store_true", help="models whose layers are traced")
    parser.add_argument("--draw", type=int, metavar="SEED", help=f"{NUM_DRAWN} cells drawn at random")
    parser.add_argument("--rewards", type=int, metavar="SEED", help=f"{NUM_REWARDED} cells that sample answers")
    parser.add_argument("--mlx", type=int, metavar="SEED", help=f"{NUM_MLX} cells on MLX")
    parser.add_argument("--others", type=int, metavar="SEED", help=f"{NUM_OTHERS} cells of {', '.join(OTHER_FLAGS)}")
    parser.add_argument("--only", help="cells whose name holds this text")
    parser.add_argument(
        "--low_memory", action="store_true", help="maps each block by itself: resident memory follows tensors"
    )
    parser.add_argument("--json", help="also write all figures to this file, after each cell")
    parser.add_argument("--write", action="store_true", help="put the table into docs/memory.md")
    args = parser.parse_args()
    shapes, results, began = FIT_SHAPES if args.fit else SHAPES, {}, time.perf_counter()
    if args.odd:
        shapes = {name: (name, sizes) for name, sizes in ODD_SHAPES.items()}
    chosen = odd_cells() if args.odd else cells(shapes)
    if args.draw is not None:
        shapes, chosen = drawn(args.draw)
    if args.rewards is not None:
        shapes, chosen = rewarded(args.rewards)
    if args.others is not None:
        shapes, chosen = others(args.others)
    if args.mlx is not None:
        shapes, chosen = on_mlx(args.mlx)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        make_rows(folder)
        print(" | ".join(HEAD))
        for cell in chosen:
            name = " ".join(map(str, cell))
            if args.only and args.only not in name:
                continue
            if not (folder / cell[0]).is_dir():
                make_model(folder / cell[0], *shapes[cell[0]], args.odd)
            if "teacher" in FLAGS.get(cell[1], {}) and not (folder / f"{cell[0]} teacher").is_dir():
                make_model(folder / f"{cell[0]} teacher", *teacher_of(shapes[cell[0]]))
            results[cell] = run(folder, cell, ["--low_memory"] if args.low_memory else [])
            print(" | ".join(row(cell, results[cell])), flush=True)
            if args.json:
                Path(args.json).write_text(json.dumps([[list(c), r] for c, r in results.items()]))
    print("\n".join(summary(results)))
    if args.write:
        write_page(results, time.perf_counter() - began)


if __name__ == "__main__":
    main()
