"""Names and values of other programs as ours, by the tables of finetune/older/names: a command line, a file, keywords.

`Translation.given` is what was asked for; `otherwise` is set unless something else sets it; `line` says what differs.
"""

import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field

from finetune.config import FIELDS, NAMES, value_type
from finetune.errors import PlanError
from finetune.older.names import axolotl, llama_factory
from finetune.older.names.axolotl import AXOLOTL
from finetune.older.names.entries import ByValue, Computed, Entry, Instead, LeftOut, Names
from finetune.older.names.fsdp_qlora import FSDP_QLORA, TYPED
from finetune.older.names.hf import HF
from finetune.older.names.litgpt import LITGPT
from finetune.older.names.llama_factory import LLAMA_FACTORY
from finetune.older.names.mlx_lm import MLX_LM
from finetune.older.names.own_values import OWN_VALUES
from finetune.older.names.peft import PEFT
from finetune.older.names.torchtune import TORCHTUNE
from finetune.older.names.trl import TRL

# In the order in which a name that several have is looked up.
PROGRAMS: dict[str, Names] = {
    "transformers": HF,
    "TRL": TRL,
    "PEFT": PEFT,
    "Axolotl": AXOLOTL,
    "LLaMA-Factory": LLAMA_FACTORY,
    "mlx-lm": MLX_LM,
    "torchtune": TORCHTUNE,
    "LitGPT": LITGPT,
    "fsdp_qlora": FSDP_QLORA,
    "other programs": TYPED,
}
# Whose files are recognised, the likelier first where a file fits several.
WITH_FILES = ("Axolotl", "LLaMA-Factory", "TRL", "mlx-lm", "torchtune", "LitGPT", "transformers")
# What a file that does not say it trains there: (the keys that say it, the train type, in words).
UNSAID = {
    "Axolotl": (("adapter", "load_in_4bit", "load_in_8bit"), "full", "has no adapter, which trains all weights there"),
    "LLaMA-Factory": (("finetuning_type",), "lora", "has no finetuning_type, which is lora there"),
    "TRL": (("use_peft", "load_in_4bit"), "full", "has no use_peft, which trains all weights there"),
    "mlx-lm": (("fine_tune_type",), "lora", "has no fine_tune_type, which is lora there"),
}
NOT_SET = LeftOut("It asks for nothing.")


@dataclass(frozen=True)
class Translation:
    """Our flags with raw values for one name, or for several together."""

    given: dict = field(default_factory=dict)
    otherwise: dict = field(default_factory=dict)
    line: str | None = None


def known(name: str, program: str | None = None) -> Entry | None:
    """The entry of a name: the program's if one is given, else the first program's that has it."""
    tables = [PROGRAMS[program]] if program else PROGRAMS.values()
    return next((table[name] for table in tables if name in table), None)


def translated(entry: Entry, value, where: str, always_said: bool = False) -> Translation:
    """What an entry makes of a value. `where` begins the line and the PlanError of what is not here.

    `always_said`: a line for a mere alias too.
    """
    if value is None:
        return Translation()
    if isinstance(entry, str):
        value = _whole(entry, value)
        return Translation({entry: value}, line=f"{where} -> --{entry}" if always_said else None)
    word = word_of(value)
    outcome, why = _outcome(entry, value, word, where)
    if isinstance(outcome, Instead):
        if outcome.asks_for_nothing(word):
            outcome = NOT_SET
        else:
            raise PlanError(f"{where}: {outcome.what}")
    if isinstance(outcome, LeftOut):
        return Translation(line=f"{where}: left out. {outcome.why}")
    if isinstance(outcome, list):  # datasets
        return Translation({"dataset": outcome}, line=f"{where} -> --dataset {', '.join(d['name'] for d in outcome)}")
    if not outcome:
        return Translation()
    given, _, otherwise = outcome.partition("|")
    flags = _flags(given, value), _flags(otherwise, value)
    shown = [" ".join(f"--{name} {words_of(v)}" for name, v in part.items()) for part in flags]
    line = shown[0] + (", unless it is set: " if shown[0] and shown[1] else "") + shown[1]
    line += ", unless it is set otherwise" if not shown[0] else ""
    return Translation(*flags, line=f"{where} -> {line}" + (f" ({why})" if why else ""))


def _outcome(entry: Entry, value, word: str, where: str):
    """(words, a list of datasets, LeftOut or Instead; what differs)."""
    if isinstance(entry, LeftOut | Instead):
        return entry, ""
    if isinstance(entry, Computed):
        return entry.words_of(value), ""
    assert isinstance(entry, ByValue)
    boolean = {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}.get(word.lower())
    for key in (word, word.lower(), boolean):
        if key in entry.words:
            return entry.words[key], entry.why.get(key, "")
    if word.lower() in ("", "none", "null"):
        return NOT_SET, ""
    if "*" in entry.words:
        return entry.words["*"], entry.why.get("*", "")
    raise PlanError(f"{where}: not one of {', '.join(k for k in entry.words if k)}. Use one of them.")


def _flags(words: str, value) -> dict:
    parts = shlex.split(words)
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return {flag[2:]: value if v == "{}" else v.replace("{}", word_of(value)) for flag, v in pairs}


def _whole(flag: str, value):
    """3.0 as 3, for a flag that is an integer: TrainingArguments' numbers are written so."""
    whole = isinstance(value, str) and re.fullmatch(r"\d+\.0*", value)
    return value.partition(".")[0] if whole and value_type(FIELDS[NAMES[flag]]) is int else value


def word_of(value) -> str:
    """A value as the tables have it."""
    if isinstance(value, list | tuple):
        return " ".join(map(word_of, value)) if value else "[]"
    return str(value).strip().lower() if isinstance(value, bool) or value is None else str(value).strip()


def words_of(value) -> str:
    """A value as a line shows it."""
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else word_of(value)
    return text if len(text) <= 80 else text[:80] + "..."


def own_value(flag: str, value, where: str) -> Translation | None:
    """Our flag's value in another program's words; None if it is one of ours, or nobody's."""
    entry, meta = OWN_VALUES.get(flag), FIELDS[flag].metadata
    if entry is None or value is None or (flag == "adapter" and os.path.exists(str(value))):
        return None
    word = word_of(value)
    if word.lower() in {*(meta["choices"] or ()), *meta["value_aliases"], *(["auto"] if meta["auto"] else [])}:
        return None
    if isinstance(entry, Computed):
        outcome = entry.words_of(value)
        return None if outcome in ("--warmup_steps {}", f"--warmup_steps {word}") else translated(entry, value, where)
    assert isinstance(entry, ByValue)
    if {word, word.lower()} & set(entry.words):
        return translated(entry, value, where)
    return None


# ---- several names together


def joined(given: dict, program: str | None = None, where: Callable[[str], str] = lambda name: f"--{name}"):
    """(names that are settled, [their Translations]) of names that mean something only together."""
    found = [_trl_dataset(given, where), _mlx_scale(given, where), _litgpt_batch(given, where)]
    if program == "LLaMA-Factory":
        found += [_listed_dataset(given, key, where) for key in ("dataset", "eval_dataset")]
    found = [entry for entry in found if entry]
    return {name for names, _ in found for name in names}, [translation for _, translation in found]


def _trl_dataset(given: dict, where):
    extra = [n for n in ("dataset_config", "dataset_train_split") if given.get(n)]
    if not given.get("dataset_name") or not extra:
        return None
    name = f"{given['dataset_name']}" + (f":{given['dataset_config']}" if given.get("dataset_config") else "")
    name += f"@{given['dataset_train_split']}" if given.get("dataset_train_split") else ""
    line = f"{where('dataset_name')} with {', '.join(extra)} -> --dataset {name}"
    return ("dataset_name", *extra), Translation({"dataset": name}, line=line)


def _mlx_scale(given: dict, where):
    names = ("lora_parameters.rank", "lora_parameters.scale")
    try:
        rank, scale = (float(given[name]) for name in names)
    except (KeyError, TypeError, ValueError):
        return None
    flags = {"lora_rank": int(rank), "lora_alpha": scale * rank}
    line = f"{where('lora_parameters')} -> --lora_rank {rank:g} --lora_alpha {scale * rank:g} (alpha is scale x rank)"
    return names, Translation(flags, line=line)


def _litgpt_batch(given: dict, where):
    names = ("train.global_batch_size", "train.micro_batch_size")
    try:
        total, rows = (int(given[name]) for name in names)
        devices = int(given.get("devices", 1)) * int(given.get("num_nodes", 1))
    except (KeyError, TypeError, ValueError):
        return None
    if min(total, rows, devices) < 1 or total % (rows * devices):
        raise PlanError(
            f"{where(names[0])} {total}: is not a multiple of {rows} rows on {devices} devices. Change one."
        )
    flags = {"batch_size": rows, "gradient_accumulation_steps": total // (rows * devices)}
    line = f"{where(names[0])} {total} -> " + " ".join(f"--{n} {v}" for n, v in flags.items())
    return names, Translation(flags, line=line)


def _listed_dataset(given: dict, key: str, where):
    if not given.get(key):
        return None
    found = llama_factory.datasets(given[key], given.get("dataset_dir"))
    if isinstance(found, Instead):
        raise PlanError(f"{where(key)}: {found.what}")
    shown = ", ".join(d["name"] for d in found)
    if key == "dataset":
        return (key, "dataset_dir"), Translation({"dataset": found}, line=f"{where(key)} -> --dataset {shown}")
    name = axolotl.one_name(found)
    if isinstance(name, Instead):
        raise PlanError(f"{where(key)}: {name.what}")
    return (key, "dataset_dir"), translated(Computed(lambda value: name, ""), given[key], where(key))


# ---- files


def flattened(content: dict, program: str) -> dict:
    """{name: value} with nested keys joined by dots, where the program's table has no entry for the whole."""
    found: dict = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if isinstance(value, dict) and value and name not in PROGRAMS[program] and name not in NAMES:
            inner = flattened({f"{name}.{k}": v for k, v in value.items()}, program)
            found.update(inner)
        elif isinstance(value, dict) and any(n.startswith(f"{name}.") for n in PROGRAMS[program]):
            found.update(flattened({f"{name}.{k}": v for k, v in value.items()}, program))
        else:
            found[name] = value
    return found


def recognised(content: dict) -> str | None:
    """The program whose file this is: most of its keys are that program's, at least two of them not ours."""
    best, most = None, 1
    for program in WITH_FILES:
        names = flattened(content, program)
        table = PROGRAMS[program]
        foreign = sum(name in table and name not in NAMES for name in names)
        ours = sum(name in NAMES and name not in table for name in names)
        if foreign > most and foreign > ours:
            best, most = program, foreign
    return best


def of_file(content: dict, program: str, path: str) -> tuple[dict, list[str]]:
    """({our flag: raw value}, a line per key) of a program's file. Raises PlanError for what is not here."""
    names = flattened(content, program)
    names = {k: v for k, v in names.items() if v is not None}
    lines = [f"{path}: read as a file of {program}; what it leaves open has this program's defaults"]

    def where(name: str) -> str:
        return f"{path}: {name}"

    settled, found = joined(names, program, where)
    refused: list[tuple[str, str]] = []
    for name, value in names.items():
        if name in settled:
            continue
        entry = known(name, program) or (name if name in NAMES else None) or known(name)
        if entry is None:
            raise PlanError(f"{path}: '{name}' is not known here. Remove it, or see docs/migration.md.")
        try:
            found.append(translated(entry, value, f"{where(name)} {words_of(value)}", always_said=True))
        except PlanError as error:
            refused.append((name, str(error)))
    if refused:
        more = ", ".join(name for name, _ in refused[1:])
        raise PlanError(refused[0][1] + (f" Nor are these here as they are: {more}." if more else ""))
    keys, train_type, why = UNSAID.get(program, ((), "", ""))
    if keys and not any(names.get(key) for key in keys):
        found.append(
            Translation(otherwise={"train_type": train_type}, line=f"{path}: {why} -> --train_type {train_type}")
        )
    given = merged(found)
    return given, lines + [t.line for t in found if t.line]


def merged(found: list[Translation]) -> dict:
    """The flags of several translations; what is set otherwise comes in where nothing else sets it."""
    given: dict = {}
    for translation in found:
        for name, value in translation.given.items():
            ours = NAMES[name]
            if ours in given and ours != "dataset" and word_of(given[ours]) != word_of(value):
                raise PlanError(f"--{ours}: is both {words_of(given[ours])} and {words_of(value)}. Give one of them.")
            given[ours] = value
    for translation in found:
        for name, value in translation.otherwise.items():
            given.setdefault(NAMES[name], value)
    return given
