"""Text of --help: one screen of everyday flags; `--help all` every flag; `--help FLAG` a paragraph and its page.

Everything here is text and config.py: it is answered before numpy or a framework is imported.
"""

import argparse
import sys
import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

from finetune.config import FIELDS, GROUPS, NAMES, value_type
from finetune.errors import OutputClosedError
from finetune.flag_values import nearest
from finetune.names.entries import ByValue, Computed, Entry, Instead, LeftOut
from finetune.names.tables import PROGRAMS
from finetune.names.translate import known
from finetune.parts.objectives import preferences
from finetune.system.program import started_as
from finetune.system.terminal import columns_of, say

WIDTH = 100
EXAMPLES = (
    "--dataset my.jsonl",
    "--dataset my.jsonl --model_name Qwen/Qwen2.5-0.5B-Instruct --dry_run",
    "--dataset my.jsonl --train_type lora --num_epochs 3 --output_dir out",
)
# The flags of the first screen, in the words that fit on a line.
EVERYDAY: dict[str, dict[str, str]] = {
    "Model and data": {
        "model_name": "Hub ID or folder of the model",
        "dataset": "file, folder or Hub name; several times for several",
        "train_type": "lora, qlora: on a quantized base, or full: all weights",
        "adapter": "continue from this trained adapter",
        "columns": "which columns are the prompt, the answer, ...: prompt=query",
        "validation_split": "fraction of the rows held out for the validation loss",
        "score_dataset": "rows answered before and after training, and compared",
        "preference": f"learn from chosen and rejected answers: {', '.join(preferences())}",
        "reward": "learn from a score of sampled answers: exact, numeric, mine.py:f",
    },
    "Training length and learning rate": {
        "num_epochs": "passes over the rows",
        "max_steps": "or a number of optimizer steps",
        "lr": "peak learning rate",
        "batch_size": "rows per step and device",
        "gradient_accumulation_steps": "batches per step",
        "lr_scheduler": "how the learning rate falls",
        "context_length": "longest row in tokens",
        "seed": "random seed (shuffling, dropout, adapter initialization)",
    },
    "Adapter": {
        "lora_rank": "size of the adapter",
        "lora_alpha": "its scale is alpha / rank",
        "lora_dropout": "dropout on its inputs",
        "lora_target_modules": "layers that have one: all, or names",
        "use_dora": "use DoRA (weight-decomposed LoRA)",
    },
    "Memory and machine": {
        "backend": "cuda, mps, mlx, xpu, cpu or auto",
        "precision": "bf16, fp16, fp32 or auto",
        "n_bits": "bits of the quantized base",
        "use_gradient_checkpointing": "less memory, slower",
        "world_size": "processes; with several the model is sharded",
    },
    "Results": {
        "output_dir": "folder of checkpoints, metrics and the result",
        "save_every": "checkpoint every N steps",
        "eval_every": "evaluate every N steps",
        "resume": "auto: continue a run after a crash or Ctrl-C",
        "push_to_hub": "upload the result to this repository",
        "log_to": "progress line, plain lines, trackers",
    },
    "Check before training": {
        "dry_run": "the plan, its memory and three rows; loads nothing",
        "config": "YAML file of flags; Axolotl's and LLaMA-Factory's too",
        "doctor": "what this machine can do",
    },
}
# The page of a group of flags, and of flags that have a better one.
PAGES = {
    "model": "docs/models.md",
    "data": "docs/data.md",
    "images": "docs/images.md",
    "rewards": "docs/rewards.md",
    "teacher": "docs/distillation.md",
    "steps": "docs/choosing.md",
    "adapter": "docs/choosing.md",
    "memory": "docs/memory.md",
    "machine": "docs/parallelism.md",
    "output": "docs/checkpoint_format.md",
    "logging": "docs/monitoring.md",
    "profile": "docs/getting_started.md",
    "ask": "docs/getting_started.md",
    **dict.fromkeys(
        ("train_type", "lr", "num_epochs", "batch_size", "lora_rank", "early_stopping"), "docs/defaults.md"
    ),
    **dict.fromkeys(
        ("quantization_backend", "n_bits", "group_size", "quant_type", "double_quant"), "docs/quantization.md"
    ),
    **dict.fromkeys(("backend", "precision"), "docs/backends.md"),
    **dict.fromkeys(("push_to_hub",), "docs/export.md"),
    **dict.fromkeys(("router_aux_loss_coef", "ep_degree"), "docs/experts.md"),
    **dict.fromkeys(("mlx_config",), "docs/mlx.md"),
    **dict.fromkeys(("task", "class_names", "hard_negatives"), "docs/heads.md"),
    **dict.fromkeys(("config",), "docs/migration.md"),
    **dict.fromkeys(("new_tokens", "modules_to_save"), "docs/models.md"),
    **dict.fromkeys(("optimizer", "lr_scheduler", "wsd_decay_ratio", "wsd_decay_type"), "docs/optimizers.md"),
    **dict.fromkeys(("label_smoothing", "neftune_noise_alpha", "data_seed", "num_layers"), "docs/optimizers.md"),
    **dict.fromkeys(("layers_to_transform", "adam_beta1", "adam_beta2", "adam_epsilon"), "docs/optimizers.md"),
}
# What to know of a flag beside its line in the table.
ADVICE = {
    "lora_rank": (
        "Small data needs no large rank: 8 to 32 is usual. Weights and optimizer state of the adapter grow with "
        "it, in proportion; with --lora_alpha unchanged, a larger rank also lowers the scale alpha / rank. "
        "--use_rslora scales by alpha / sqrt(rank) instead, for ranks from about 64 on."
    ),
    "lora_alpha": (
        "The adapter's output is multiplied by alpha / rank, so doubling alpha is much like doubling --lr. Twice "
        "the rank is a usual choice."
    ),
    "lora_target_modules": (
        "all is every linear layer and expert but the head. Fewer layers, such as q_proj,v_proj, train a little "
        "faster and learn less. A regex chooses layers: '.*layers\\.[0-3]\\..*'."
    ),
    "lr": (
        "An adapter takes about ten times the rate of full fine-tuning, a wide model less than a narrow one. If "
        "the loss does not fall, try three times as much; if it jumps or becomes nan, a third; or let search try."
    ),
    "num_epochs": (
        "A few hundred rows give few steps per pass, and few steps teach little; too many passes memorize the rows. "
        "--validation_split shows it, and --early_stopping ends the run there."
    ),
    "batch_size": (
        "Rows per step are batch_size x gradient_accumulation_steps x data ranks. How they are cut into forwards "
        "(--microbatch_tokens) changes speed and memory, not the result."
    ),
    "train_type": (
        "lora trains adapters on the base as it is; qlora quantizes the base to --n_bits first, a quarter of its "
        "memory or less, at some cost in quality and, on a CPU, in speed; full trains all weights, and takes "
        "several times the memory for gradients and optimizer state."
    ),
    "context_length": (
        "auto is long enough for 99 % of the rows. Memory grows with it, where a forward has few rows. --overlong "
        "says what happens to longer rows."
    ),
    "dataset": (
        "Formats are detected by the columns: messages, prompt and completion, instruction and output, question "
        "and answer, text. --dry_run shows three rows as the model would learn them."
    ),
    "output_dir": (
        "At its top is the adapter in PEFT's format (or the model of a full run), with tokenizer and model card; "
        "checkpoints/, best/, metrics.jsonl and run_plan.json lie beside it."
    ),
    "resume": ("A resumed run gives the same numbers, bit for bit, as one that was never interrupted."),
    "dry_run": (
        "Prints every setting that was chosen with its reason, the memory by item, and what the data teaches. "
        "Exit code 2 if the run does not fit."
    ),
    "precision": (
        "bf16 holds frozen weights and products in bf16 and what is trained in fp32. A GPU without bf16 takes "
        "fp16, with a scaled loss."
    ),
    "use_gradient_checkpointing": (
        "Recomputes each layer's activations in the backward pass: about a third more time, and much less memory "
        "with long rows. auto does so only where the run does not fit without."
    ),
    "preference": (
        f"{preferences()[0]} is the usual one. The learning rate is lower than for answers, and a few steps change "
        "little."
    ),
    "reward": (
        "Start from an adapter that can do some of it (--adapter): rewards sharpen what a model does now and then. A "
        "function is called as f(prompts, answers, rows), three lists of the same length, and returns a list of one "
        "number per answer."
    ),
    "world_size": ("Starts so many processes here. Under torchrun or srun leave it out."),
}


class HelpAction(argparse.Action):
    """--help, --help all and --help FLAG: prints and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str = argparse.SUPPRESS, **kwargs: Any):
        super().__init__(option_strings, dest, nargs="?", const="", default=argparse.SUPPRESS, **kwargs)

    def __call__(self, parser: ArgumentParser, namespace: Namespace, value: Any, option_string: str | None = None):
        try:
            say(text_of(value or "", parser), in_words=True)
        except OutputClosedError as error:
            parser.exit(error.exit_code)
        parser.exit()


def text_of(word: str, parser: ArgumentParser) -> str:
    """Text of --help WORD."""
    if not word:
        return screen(parser.prog)
    if word == "all":
        return argparse.ArgumentParser.format_help(parser).rstrip()
    name = word.lstrip("-").replace("-", "_")
    if name in NAMES:
        return paragraph(NAMES[name])
    entry = known(name)
    if entry is not None:
        return elsewhere(name, entry)
    near = nearest(f"--{name}", parser._option_string_actions)
    return f"--{name}: no such flag.{near} --help all lists every flag."


def screen(prog: str) -> str:
    """The first screen."""
    lines = [
        "Fine-tunes any Hugging Face causal language model on your rows: LoRA, QLoRA, DoRA or all weights.",
        "What you leave open is chosen for the model, the rows and the machine, and printed with its reason.",
        "",
        *(f"  {started_as(prog)} {flags}" for flags in EXAMPLES),
    ]
    for title, flags in EVERYDAY.items():
        lines += ["", title]
        lines += [f"  --{name:<28}{text}{default_of(name, len(text))}" for name, text in flags.items()]
    lines += ["", "[default]    --help all: every flag    --help lora_rank: more about one, or about a name of TRL"]
    return "\n".join(lines)


def default_of(name: str, used: int) -> str:
    field = FIELDS[name]
    default = field.metadata["unset"] or field.default
    if default is None or isinstance(default, bool) or default in ("none", "false", -1, 0, 0.0):
        return ""
    if isinstance(default, float):
        text = f" [{default:g}]"
    else:
        text = f" [{default}]"
    return text if 32 + used + len(text) <= WIDTH else ""


def paragraph(name: str) -> str:
    """A flag in full: what it is, what to know, its values, who else has it, and where to read on."""
    field = FIELDS[name]
    meta = field.metadata
    kind = {int: "a whole number", float: "a number", bool: "true or false"}.get(value_type(field), "text")
    values = ", ".join(c for c in meta["choices"] or () if c) or kind + (", or auto" if meta["auto"] else "")
    bounds = []
    if meta["minimum"] is not None:
        bounds = [f"at least {meta['minimum']}"]
    bounds += [f"above {meta['above']:g}"] if meta["above"] is not None else []
    bounds += [f"at most {meta['maximum']}"] if meta["maximum"] is not None else []
    default = meta["unset"] or field.default
    if default is None:
        unset = "unset"
    elif isinstance(default, bool):
        unset = str(default).lower()
    else:
        unset = str(default)
    facts = [f"Values: {values}" + (f" ({', '.join(bounds)})" if bounds else "") + f". Default: {unset}."]
    if meta["repeatable"] or meta["comma_separated"]:
        facts.append("Takes several values.")
    if meta["resumable"]:
        facts.append("A resumed run may change it.")
    there = called_elsewhere(name)
    also = ", ".join(f"--{alias}" for alias in meta["aliases"])
    parts = [
        f"--{name}" + (f" (also {also})" if also else "") + f"    {GROUPS[meta['group']]}",
        sentence(meta["help"], meta["choices"] or ()) + (f" {ADVICE[name]}" if name in ADVICE else ""),
        " ".join(facts),
        f"Elsewhere: {there}." if there else "",
        f"Read on: {PAGES.get(name, PAGES[meta['group']])}",
    ]
    width = min(WIDTH, columns_of(sys.stdout) or WIDTH)
    return "\n".join(textwrap.fill(p, width, break_on_hyphens=False, break_long_words=False) for p in parts if p)


def sentence(text: str, words: tuple[str, ...] = ()) -> str:
    """The text with a capital, unless it begins with one of a flag's `words`, and a period."""
    if text.split(maxsplit=1)[0].rstrip(":,;") not in words:
        text = text[0].upper() + text[1:]
    return text.removesuffix(".") + "."


def called_elsewhere(name: str) -> str:
    """The names that other programs have for a flag: `r (PEFT), lora_r (TRL)`."""
    found: dict[str, list[str]] = {}
    for program, names in PROGRAMS.items():
        for theirs, entry in names.items():
            if isinstance(entry, str) and NAMES[entry] == name and theirs != name and program != "other programs":
                found.setdefault(theirs, []).append(program)
    return ", ".join(f"{theirs} ({', '.join(programs)})" for theirs, programs in found.items())


def elsewhere(name: str, entry: Entry) -> str:
    """Our answer to a name of another program."""
    programs = ", ".join(program for program, names in PROGRAMS.items() if names.get(name) == entry)
    head = f"--{name} is a name of {programs}. "
    if isinstance(entry, str):
        return f"{head}Here it is --{NAMES[entry]}:\n\n{paragraph(NAMES[entry])}"
    if isinstance(entry, LeftOut):
        return f"{head}It is left out: {entry.why}"
    if isinstance(entry, Instead):
        return f"{head}{entry.what}"
    if isinstance(entry, Computed):
        return f"{head}Here it is {entry.text.replace('`', '')}."
    assert isinstance(entry, ByValue)
    words = [f"  {value}: {_said(outcome)}" for value, outcome in entry.words.items()]
    return "\n".join([head.strip(), *words])


def _said(outcome: str | LeftOut | Instead) -> str:
    if isinstance(outcome, LeftOut):
        return f"left out. {outcome.why}"
    if isinstance(outcome, Instead):
        return outcome.what
    return outcome.replace("|", "unless it is set:").replace("{}", "VALUE").strip() or "nothing"
