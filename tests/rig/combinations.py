"""Command lines of random valid flags: the models and rows they are of, and how they are drawn."""

import json
import random
from pathlib import Path

from tests.rig.children import Child
from tests.rig.materials import Place
from tests.support import tiny

SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=3)
MODELS = {
    "llama": SIZES,
    "llama_tied": SIZES,
    "qwen3": SIZES,
    "gemma2": SIZES,
    "gpt2": dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "mixtral": SIZES,
    "llama_uneven": dict(hidden_size=48, num_hidden_layers=2),  # no group size divides its 96 columns but 32 and 16
}
NUM_ROWS = 10
LONG = "the capital of France is Paris and two plus three is five " * 3
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def made(place: Place) -> Path:
    """The folder of models and rows."""
    return place.once("combinations", make)


def make(folder: Path) -> None:
    def models() -> int:
        for name, sizes in MODELS.items():
            tokenizer = tiny.train_tokenizer(folder / name, bos=name != "qwen3", chat_template=tiny.CHATML)
            tiny.build(name, **sizes | dict(vocab_size=len(tokenizer))).save_pretrained(folder / name)
        return 0

    ended = Child(folder).start(models).end(120)
    assert ended.code == 0, ended.err
    for name, rows in rows_by_kind().items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "prose.txt").write_text("\n\n".join(f"Paragraph {i}. {LONG}" for i in range(4)))
    (folder / "template.jinja").write_text(TEMPLATE)


def rows_by_kind() -> dict[str, list[dict]]:
    """{kind of rows: rows}, of uneven lengths; one of each is long."""
    numbers = range(NUM_ROWS)
    asked = [f"{i} plus {i}?{' ' + LONG if i == 3 else ''}" for i in numbers]
    right = [f"{2 * i}{'.' * (i % 5)}" for i in numbers]
    wrong = ["no " * (1 + i % 3) for i in numbers]
    pairs = list(zip(asked, right, strict=True))
    chats = [[message("user", ask), message("assistant", answer)] for ask, answer in pairs]
    two_turns = [[*chat, message("user", "and so?"), message("assistant", "so it is")] for chat in chats]
    thoughts = [f"<think>{i} twice</think>{answer}" for i, answer in enumerate(right)]
    triples = list(zip(asked, right, wrong, strict=True))
    return {
        "chat": [{"messages": chat} for chat in two_turns],
        "system": [{"messages": [message("system", "Be short."), *chat]} for chat in chats],
        "thoughts": [
            {"messages": [message("user", ask), message("assistant", thought)]}
            for ask, thought in zip(asked, thoughts, strict=True)
        ],
        "completion": [{"prompt": ask, "completion": answer} for ask, answer in pairs],
        "question": [{"question": ask, "answer": answer} for ask, answer in pairs],
        "alpaca": [{"instruction": ask, "input": "", "output": answer} for ask, answer in pairs],
        "text": [{"text": f"{ask} {answer}"} for ask, answer in pairs],
        "tokens": [{"input_ids": [5 + (i * k) % 60 for k in range(4 + 3 * i)]} for i in numbers],
        "pairs": [{"prompt": ask, "chosen": one, "rejected": other} for ask, one, other in triples],
        "pairs_chat": [
            {
                "prompt": [message("user", ask)],
                "chosen": [message("assistant", one)],
                "rejected": [message("assistant", other)],
            }
            for ask, one, other in triples
        ],
        "labels": [
            {"prompt": ask, "completion": (one, other)[i % 2], "label": not i % 2}
            for i, (ask, one, other) in enumerate(triples)
        ],
    }


def message(role: str, content: str) -> dict:
    return {"role": role, "content": content}


CHATS = ("chat", "system", "thoughts")
PREFERENCES = {"dpo": ("pairs", "pairs_chat"), "orpo": ("pairs", "pairs_chat"), "simpo": ("pairs",)}
PREFERENCES |= {"kto": ("labels", "pairs", "pairs_chat")}
ROWS = (*CHATS, "completion", "question", "alpaca", "text", "tokens", "prose")
BITS = {"nf4": (4,), "bnb": (4, 8), "hqq": (1, 2, 3, 4, 8), "quanto": (2, 4, 8), "mlx": (2, 3, 4, 6, 8)}
# {flag: (share of the command lines that have it, its values)} of flags that need no other.
ANY = {
    "precision": (0.6, ("fp32", "fp32", "bf16", "fp16", "bf16_autocast", "fp16_autocast", "bf16_buffers_autocast")),
    "batch_layout": (0.4, ("auto", "padding_free", "padded")),
    "batch_size": (0.9, ("1", "2", "3", "4", "auto")),
    "gradient_accumulation_steps": (0.4, ("1", "2", "3")),
    "microbatch_tokens": (0.2, ("64", "100", "200")),
    "context_length": (0.6, ("32", "48", "64", "auto")),
    "overlong": (0.3, ("auto", "keep_end", "keep_start", "split", "drop")),
    "window_overlap": (0.1, ("4",)),
    "optimizer": (
        0.6,
        ("adamw", "adam", "sgd", "adadelta", "adamw_8bit", "adafactor", "lion", "schedule_free_adamw", "muon")
        + ("fused_adamw", "paged_adamw_32bit"),
    ),
    "lr": (0.5, ("1e-3", "1e-4", "auto")),
    "wd": (0.2, ("0.01",)),
    "lr_scheduler": (
        0.5,
        ("constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "exponential", "inverse_sqrt", "wsd"),
    ),
    "warmup_steps": (0.2, ("0", "2", "100")),
    "warmup_ratio": (0.1, ("0", "0.3")),
    "wsd_decay_ratio": (0.05, ("0.5",)),
    "wsd_decay_type": (0.05, ("linear", "1-sqrt")),
    "cosine_min_lr_ratio": (0.05, ("0",)),
    "adam_beta1": (0.1, ("0.8",)),
    "adam_beta2": (0.1, ("0.95",)),
    "apply_gradient_clipping": (0.2, ("true", "false")),
    "grad_norm": (0.1, ("0.1",)),
    "label_smoothing": (0.1, ("0.1",)),
    "neftune_noise_alpha": (0.1, ("5",)),
    "router_aux_loss_coef": (0.1, ("0.01",)),
    "stop_on_divergence": (0.1, ("true",)),
    "seed": (0.2, ("7",)),
    "data_seed": (0.1, ("3",)),
    "train_on_prompt": (0.2, ("true",)),
    "skip_bad_rows": (0.1, ("2",)),
    "dataset_samples": (0.1, ("7",)),
    "validation_split": (0.3, ("0.2", "auto")),
    "early_stopping": (0.15, ("1", "auto")),
    "load_best": (0.15, ("true", "false")),
    "eval_every": (0.4, ("1", "2", "auto")),
    "eval_samples": (0.2, ("0", "2")),
    "num_layers": (0.1, ("1", "2")),
    "layers_to_transform": (0.1, ("0", "0,2")),
    "use_gradient_checkpointing": (0.3, ("true", "false")),
    "reentrant_checkpointing": (0.1, ("true",)),
    "low_memory": (0.1, ("true",)),
    "loading_workers": (0.1, ("1", "3")),
    "use_cpu_offload": (0.05, ("true",)),
    "use_activation_cpu_offload": (0.1, ("true",)),
    "attention": (0.3, ("auto", "sdpa", "groups", "varlen")),
    "compile": (0.03, ("true",)),
    "cpu_matmul": (0.1, ("blas", "onednn")),
    "save_every": (0.4, ("1", "2", "3")),
    "async_save": (0.2, ("true", "false")),
    "keep_last": (0.2, ("1", "3")),
    "save_model": (0.05, ("false",)),
    "run_page": (0.2, ("false",)),
    "log_to": (0.9, ("stdout", "stdout", "tqdm", "csv")),
    "log_every_n_steps": (0.1, ("2",)),
    "verbose": (0.1, ("true",)),
    "profile": (0.04, ("true",)),
    "new_tokens": (0.1, ("<|tool|>,<|end|>",)),
}
ADAPTER = {
    "lora_rank": (0.7, ("1", "4", "8", "auto")),
    "lora_alpha": (0.3, ("8", "64")),
    "lora_dropout": (0.3, ("0.1",)),
    "lora_target_modules": (0.4, ("all", "default", "q_proj,v_proj", ".*(q_proj|down_proj)", "lm_head,q_proj")),
    "modules_to_save": (0.1, ("lm_head", "embed_tokens", "embed_tokens,lm_head")),
    "use_dora": (0.2, ("true",)),
    "use_rslora": (0.2, ("true",)),
    "loraplus_lr_ratio": (0.2, ("4",)),
    "frozen_products": (0.15, ("fp8",)),
    "init_lora_weights": (0.3, ("gaussian", "eva", "pissa", "olora", "loftq")),
}
CHAT = {
    "train_on_last_turn": (0.2, ("true",)),
    "mask_reasoning": (0.2, ("true",)),
    "chat_template": (0.2, ("template.jinja", "chatml")),
    "special_tokens_in_text": (0.1, ("keep", "error")),
}
FILES = ("chat_template", "dataset", "validation_dataset", "score_dataset", "model_name")
# What draws random numbers by microbatch or rank, or counts microbatches: not the same on two ranks or in two layouts.
RANDOM = ("lora_dropout", "neftune_noise_alpha", "init_lora_weights", "microbatch_tokens", "batch_size", "compile")
RANDOM += ("profile", "streaming", "max_steps", "gradient_accumulation_steps", "stop_on_divergence", "load_best")


def drawn(rng: random.Random, folder: Path) -> dict[str, str]:
    """Random flags of one run. Some are refused together."""
    found = {"model_name": rng.choice([*MODELS, "llama"]), "backend": rng.choice(("cpu",) * 5 + ("mlx",))}
    kind = rng.choice(ROWS)
    if rng.random() < 0.25:
        found["preference"] = rng.choice([*PREFERENCES])
        kind = rng.choice(PREFERENCES[found["preference"]])
        found |= taken(rng, {"precompute_ref_log_probs": (0.4, ("true", "false")), "preference_beta": (0.3, ("0.5",))})
    suffix = ".txt" if kind == "prose" else ".jsonl"
    found["dataset"] = f"{kind}{suffix}"
    if rng.random() < 0.3:
        found |= {"validation_dataset": found["dataset"]}
    if rng.random() < 0.3 and kind not in ("text", "tokens", "prose"):
        metric = rng.choice(("exact", "contains", "numeric", "json", "regex", "exact,contains"))
        found |= {"score_dataset": "completion.jsonl", "score_metric": metric, "score_samples": "4"}
        found |= {"score_max_new_tokens": "8"} | ({"score_pattern": r"(\d+)"} if metric == "regex" else {})
    found["train_type"] = rng.choice(("full", "full", "lora", "lora", "lora", "qlora", "qlora", "auto"))
    if found["train_type"] == "qlora":
        method = "mlx" if found["backend"] == "mlx" else rng.choice(("nf4", "bnb", "hqq", "quanto"))
        found |= {"quantization_backend": method, "n_bits": str(rng.choice(BITS[method]))}
        found |= taken(
            rng,
            {
                "group_size": (0.5, ("16", "32", "64")),
                "double_quant": (0.3, ("true",)),
                "cache_dequantized": (0.4, ("true", "false")),
                "quant_type": (0.1, ("nf4", "fp4")),
            },
        )
    if found["train_type"] != "full":
        found |= taken(rng, ADAPTER)
    if kind in CHATS or kind == "pairs_chat":
        found |= taken(rng, CHAT)
    found |= taken(rng, ANY)
    steps = rng.choice(({"num_epochs": "1"}, {"num_epochs": "2"}, {"max_steps": "5"}, {"max_steps": "3"}))
    if rng.random() < 0.1:
        steps = {"streaming": "true", "max_steps": "4", "shuffle_buffer": rng.choice(("3", "100"))}
    return with_paths(found | steps, folder)


def with_paths(flags: dict[str, str], folder: Path) -> dict[str, str]:
    return {
        name: str(folder / value) if name in FILES and value != "chatml" else value for name, value in flags.items()
    }


def taken(rng: random.Random, table: dict) -> dict[str, str]:
    """Some flags of a table, each with one of its values."""
    return {name: rng.choice(values) for name, (share, values) in table.items() if rng.random() < share}
