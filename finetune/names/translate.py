"""Names and values of other programs as ours, by the tables of finetune/names: a command line, a file, keywords.

`Translation.given` is what was asked for; `otherwise` is set unless something else sets it; `line` says what differs.
"""

import difflib
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from finetune.config import FIELDS, NAMES, value_type
from finetune.errors import PlanError
from finetune.names.entries import ByValue, Computed, Entry, Instead, LeftOut, sections_of
from finetune.names.own_values import OWN_VALUES
from finetune.names.tables import PROGRAMS, entry_of
from finetune.names.values import (
    listed_datasets,
    litgpt_targets,
    torchtune_datasets,
    torchtune_targets,
    validation_words,
)

# Whose files are recognised, the likelier first where a file fits several.
WITH_FILES = ("Axolotl", "LLaMA-Factory", "TRL", "mlx-lm", "torchtune", "LitGPT", "transformers")
HERE = Path()
NOT_SET = LeftOut("The value disables it.")
REFERENCE = re.compile(r"\$\{([\w.]+)\}")  # OmegaConf's, in torchtune's files


@dataclass(frozen=True)
class Translation:
    """Our flags with raw values for one name, or for several together: `names`, where errors are to have them."""

    given: dict = field(default_factory=dict)
    otherwise: dict = field(default_factory=dict)
    line: str | None = None
    names: tuple[str, ...] = ()


def known(name: str, program: str | None = None) -> Entry | None:
    """The entry of a name: the program's if one is given, else the first program's that has it. An entry `a.*` is that
    of every nested key of `a` without one of its own.
    """
    if program:
        programs = [program]
    else:
        programs = list(PROGRAMS)
    names = [name, *(f"{name[:at]}.*" for at in reversed([m.start() for m in re.finditer(r"\.", name)]))]
    return next((PROGRAMS[p][n] for p in programs for n in names if n in PROGRAMS[p]), None)


def entry_named(name: str) -> Entry:
    """The entry of a name that some program has."""
    entry = known(name)
    assert entry is not None, name
    return entry


def translated(entry: Entry, value: Any, where: str, always_said: bool = False) -> Translation:
    """Translation of a value by its entry. `where` begins the line and the PlanError of what is not here.

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
    always = _flags(given, value)
    if_unset = _flags(otherwise, value)
    shown = [" ".join(f"--{name} {words_of(v)}" for name, v in part.items()) for part in (always, if_unset)]
    line = shown[0] + (", unless it is set: " if shown[0] and shown[1] else "") + shown[1]
    line += ", unless it is set otherwise" if not shown[0] else ""
    return Translation(always, if_unset, line=f"{where} -> {line}" + (f" ({why})" if why else ""))


def _outcome(entry: Entry, value: Any, word: str, where: str):
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


def _flags(words: str, value: Any) -> dict:
    parts = shlex.split(words)
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return {flag[2:]: value if v == "{}" else v.replace("{}", word_of(value)) for flag, v in pairs}


def _whole(flag: str, value: Any):
    """3.0 as 3, for a flag that is an integer: TrainingArguments' numbers are written so."""
    whole = isinstance(value, str) and re.fullmatch(r"\d+\.0*", value)
    if whole and value_type(FIELDS[NAMES[flag]]) is int:
        return value.partition(".")[0]
    return value


def word_of(value: Any) -> str:
    """A value as the tables have it."""
    if isinstance(value, list | tuple):
        if value:
            return " ".join(map(word_of, value))
        return "[]"
    if isinstance(value, bool) or value is None:
        return str(value).strip().lower()
    return str(value).strip()


def words_of(value: Any) -> str:
    """A value as a line shows it."""
    if isinstance(value, list | tuple):
        text = ",".join(map(str, value))
    else:
        text = word_of(value)
    text = text.replace("\n", "\\n")
    if len(text) <= 80:
        return text
    return text[:80] + "..."


def own_value(flag: str, value: Any, where: str) -> Translation | None:
    """Our flag's value in another program's words; None if it is one of ours, or nobody's."""
    meta = FIELDS[flag].metadata
    if flag not in OWN_VALUES or value is None or (flag == "adapter" and os.path.exists(str(value))):
        return None
    word = word_of(value)
    if word.lower() in {*(meta["choices"] or ()), *meta["value_aliases"], *(["auto"] if meta["auto"] else [])}:
        return None
    entry = entry_of(OWN_VALUES[flag])
    if isinstance(entry, Computed):
        outcome = entry.words_of(value)
        if outcome in ("--warmup_steps {}", f"--warmup_steps {word}"):
            return None
        return translated(entry, value, where)
    assert isinstance(entry, ByValue)
    if {word, word.lower()} & set(entry.words):
        return translated(entry, value, where)
    return None


def words_elsewhere(flag: str) -> tuple[str, ...]:
    """The words of other programs that a flag of ours takes as values."""
    entry = None
    if flag in OWN_VALUES:
        entry = entry_of(OWN_VALUES[flag])
    if isinstance(entry, ByValue):
        return tuple(entry.words)
    return ()


# ---- several names together


def joined(
    given: dict,
    program: str | None = None,
    where: Callable[[str], str] = lambda name: f"--{name}",
    folder: Path = HERE,
    rewarded: bool = False,
):
    """(names that are settled, [their Translations]) of names that mean something only together.

    `folder`: where the file that has them is. `rewarded`: --reward is given beside them.
    """
    translations = [_trl_dataset(given, where), _mlx_scale(given, where), _litgpt_batch(given, where)]
    if rewarded or given.get("reward_funcs") or given.get("reward"):
        translations += [_beta_of_rewards(given, where)]
    if program == "LLaMA-Factory":
        _refuse_what_trains_nothing(given, where)
        translations += [_alpha_of_rank(given, where), _added_layers(given, where)]
        translations += [_listed_dataset(given, key, where, folder) for key in ("dataset", "eval_dataset")]
    if program == "Axolotl":
        translations += [_all_linear(given, where) or _experts_too(given, where), _final_rate(given, where)]
    if program == "torchtune":
        translations += [_torchtune_targets(given, where), _steps_of_epochs(given, where)]
        translations += [_torchtune_dataset(given, key, where) for key in ("dataset", "dataset_val")]
    if program == "LitGPT":
        translations += [_litgpt_targets(given, where)]
    translations = [(tuple(names), translation) for names, translation in filter(None, translations)]
    together = [replace(t, names=tuple(n for n in names if given.get(n) is not None)) for names, t in translations]
    return {name for names, _ in translations for name in names}, together


def _trl_dataset(given: dict, where: Callable[[str], str]):
    extra = [n for n in ("dataset_config", "dataset_train_split") if given.get(n)]
    if not given.get("dataset_name") or not extra:
        return None
    name = f"{given['dataset_name']}" + (f":{given['dataset_config']}" if given.get("dataset_config") else "")
    name += f"@{given['dataset_train_split']}" if given.get("dataset_train_split") else ""
    line = f"{where('dataset_name')} with {', '.join(extra)} -> --dataset {name}"
    return ("dataset_name", *extra), Translation({"dataset": name}, line=line)


def _beta_of_rewards(given: dict, where: Callable[[str], str]):
    """TRL's beta, with rewards the weight of the divergence: it is preference_beta elsewhere."""
    if given.get("beta") is None:
        return None
    line = f"{where('beta')} {words_of(given['beta'])} -> --kl_beta {words_of(given['beta'])}, as with rewards"
    return ("beta",), Translation({"kl_beta": given["beta"]}, line=line)


def _mlx_scale(given: dict, where: Callable[[str], str]):
    names = ("lora_parameters.rank", "lora_parameters.scale")
    try:
        rank, scale = (float(given[name]) for name in names)
    except (KeyError, TypeError, ValueError):
        return None
    flags = {"lora_rank": int(rank), "lora_alpha": scale * rank}
    line = f"{where('lora_parameters')} -> --lora_rank {rank:g} --lora_alpha {scale * rank:g} (alpha is scale x rank)"
    return names, Translation(flags, line=line)


def _litgpt_batch(given: dict, where: Callable[[str], str]):
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


def _listed_dataset(given: dict, key: str, where: Callable[[str], str], folder: Path):
    if not given.get(key):
        return None
    datasets, why = listed_datasets(given[key], given.get("dataset_dir"), folder)
    if isinstance(datasets, Instead):
        raise PlanError(f"{where(key)}: {datasets.what}")
    names = ("dataset_dir", key)
    if key == "dataset":
        shown = ", ".join(d["name"] for d in datasets)
        return names, Translation({"dataset": datasets}, line=f"{where(key)} -> --dataset {shown}{why}")
    name = validation_words(datasets)
    if isinstance(name, Instead):
        raise PlanError(f"{where(key)}: {name.what}")
    return names, translated(Computed(lambda value: name, ""), given[key], where(key))


def _alpha_of_rank(given: dict, where: Callable[[str], str]):
    """LLaMA-Factory's default of lora_alpha is twice the rank."""
    if given.get("lora_alpha") is not None or not str(given.get("lora_rank")).isdigit():
        return None
    rank = int(given["lora_rank"])
    line = f"{where('lora_rank')} {rank} without lora_alpha -> --lora_rank {rank} --lora_alpha {2 * rank}, as there"
    return ("lora_rank", "lora_alpha"), Translation({"lora_rank": rank}, {"lora_alpha": 2 * rank}, line)


def _refuse_what_trains_nothing(given: dict, where: Callable[[str], str]) -> None:
    """Raises PlanError for a file of LLaMA-Factory that predicts or asks."""
    if word_of(given.get("do_train", False)) == "true":
        return
    if word_of(given.get("do_predict", False)) == "true":
        raise PlanError(
            f"{where('do_predict')}: trains nothing. score.py --checkpoint RUN --dataset FILE scores a model."
        )
    if given.get("dataset") or given.get("export_dir") or given.get("tokenized_path"):
        return
    name = next((n for n in ("infer_backend", "eval_dataset", "task") if given.get(n)), "dataset")
    raise PlanError(f"{where(name)}: the file trains on nothing. generate.py --checkpoint RUN asks a trained model.")


def _added_layers(given: dict, where: Callable[[str], str]):
    """LLaMA-Pro: only the added layers train."""
    if word_of(given.get("use_llama_pro", False)) != "true" or not given.get("model_name_or_path"):
        return None
    folder = given["model_name_or_path"]
    names = ("use_llama_pro", "model_name_or_path", "finetuning_type", "freeze_trainable_layers")
    line = (
        f"{where('use_llama_pro')} -> --llama_pro_path {folder}, a folder that expand.py writes: its added layers train"
    )
    return (*names, "freeze_trainable_modules"), Translation(
        {"llama_pro_path": folder, "train_type": "lora"}, line=line
    )


def _all_linear(given: dict, where: Callable[[str], str]):
    """Axolotl trains the union of both."""
    names = ("lora_target_linear", "lora_target_modules", "lora_target_parameters")
    listed = given.get("lora_target_modules")
    if word_of(given.get("lora_target_linear", False)) != "true" or not listed:
        return None
    beyond = [n for n in (listed if isinstance(listed, list) else [listed]) if n in ("lm_head", "embed_tokens")]
    if beyond:
        raise PlanError(
            f"{where('lora_target_modules')}: {beyond[0]} is no part of all linear layers. Add it alone: "
            f"--modules_to_save {beyond[0]} trains it in full."
        )
    line = f"{where(names[0])} with {names[1]} -> --lora_target_modules all, which has those too"
    return names, Translation({"lora_target_modules": "all"}, line=line)


def _experts_too(given: dict, where: Callable[[str], str]):
    """Parameters of experts are targets as linear layers are."""
    parameters = given.get("lora_target_parameters")
    listed = given.get("lora_target_modules")
    if not isinstance(parameters, list) or not parameters:
        return None
    if isinstance(listed, str) and not re.fullmatch(r"[\w.,\s]+", listed):
        targets = f"{listed}|.*({'|'.join(map(re.escape, parameters))})"
    else:
        targets = ",".join([*(listed.split(",") if isinstance(listed, str) else listed or ()), *parameters])
    line = f"{where('lora_target_parameters')} with lora_target_modules -> --lora_target_modules {words_of(targets)}"
    return ("lora_target_parameters", "lora_target_modules"), Translation({"lora_target_modules": targets}, line=line)


def _final_rate(given: dict, where: Callable[[str], str]):
    try:
        ratio = float(given["eta_min"]) / float(given["learning_rate"])
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    line = f"{where('eta_min')} {given['eta_min']} -> --cosine_min_lr_ratio {ratio:.4g}, of learning_rate"
    return ("eta_min",), Translation({"cosine_min_lr_ratio": float(f"{ratio:.4g}")}, line=line)


def _torchtune_targets(given: dict, where: Callable[[str], str]):
    names = ("model.lora_attn_modules", "model.apply_lora_to_mlp", "model.apply_lora_to_output")
    if not isinstance(given.get(names[0]), list):
        return None
    model = str(given.get("model._component_"))
    targets = torchtune_targets(given[names[0]], given.get(names[1]), given.get(names[2]), model)
    line = f"{where(names[0])} {words_of(given[names[0]])}"
    line += "".join(f", {n.partition('.')[2]}" for n in names[1:] if word_of(given.get(n, False)) == "true")
    return names, Translation({"lora_target_modules": targets}, line=f"{line} -> --lora_target_modules {targets}")


def _steps_of_epochs(given: dict, where: Callable[[str], str]):
    try:
        steps = int(given["max_steps_per_epoch"])
        epochs = int(given.get("epochs", 1))
    except (KeyError, TypeError, ValueError):
        return None
    line = f"{where('max_steps_per_epoch')} {steps} x epochs {epochs} -> --max_steps {steps * epochs}"
    return ("max_steps_per_epoch", "epochs"), Translation({"max_steps": steps * epochs}, line=line)


def _torchtune_dataset(given: dict, key: str, where: Callable[[str], str]):
    """A builder with what it is given, as one entry of --dataset, or the name of --validation_dataset."""
    parts = {n.partition(".")[2]: v for n, v in given.items() if n.startswith(f"{key}.") and v is not None}
    if not parts and isinstance(given.get(key), list):
        parts = given[key]
    if not parts:
        return None
    entries, unknown = torchtune_datasets(parts)
    if isinstance(entries, Instead):
        raise PlanError(f"{where(key)}: {entries.what}")
    names = {n for n in given if n.startswith(f"{key}.") and n.partition(".")[2] not in unknown} | {key}
    if not entries:
        return None
    learns_prompts = [e.pop("train_on_prompt", False) for e in entries]
    if key == "dataset_val":
        name = validation_words(entries)
        if isinstance(name, Instead):
            raise PlanError(f"{where(key)}: {name.what}")
        return names, translated(Computed(lambda value: name, ""), parts, where(key))
    prompts = any(learns_prompts)
    shown = ", ".join(e["name"] + (f"@{e['split']}" if e.get("split") else "") for e in entries)
    line = f"{where(key)} -> --dataset {shown}" + (", and --train_on_prompt, as its builder does" if prompts else "")
    return names, Translation({"dataset": entries}, {"train_on_prompt": True} if prompts else {}, line)


def _litgpt_targets(given: dict, where: Callable[[str], str]):
    kinds = [k for k in sections_of("LitGPT")["lookups"]["targets"] if given.get(k) is not None]
    if not kinds:
        return None
    targets, why = litgpt_targets({k: word_of(given[k]) == "true" for k in kinds})
    if not targets:
        return kinds, Translation()
    line = f"{where(', '.join(kinds))} -> --lora_target_modules {targets}" + (f" ({why})" if why else "")
    return kinds, Translation({"lora_target_modules": targets}, line=line)


# ---- files


def flattened(content: dict, program: str) -> dict:
    """{name: value} with nested keys joined by dots, where the program's table has no entry for the whole."""
    flat: dict = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if isinstance(value, dict) and value and name not in PROGRAMS[program] and name not in NAMES:
            inner = flattened({f"{name}.{k}": v for k, v in value.items()}, program)
            flat.update(inner)
        elif isinstance(value, dict) and any(n.startswith(f"{name}.") for n in PROGRAMS[program]):
            flat.update(flattened({f"{name}.{k}": v for k, v in value.items()}, program))
        else:
            flat[name] = value
    return flat


def recognised(content: dict) -> str | None:
    """The program whose file this is: most of its keys are that program's, at least two of them not ours."""
    best = None
    most = 1
    if not any(isinstance(value, dict) or key not in NAMES for key, value in content.items()):
        return None
    for program in WITH_FILES:
        names = flattened(content, program)
        table = PROGRAMS[program]
        foreign = sum(name in table and name not in NAMES for name in names)
        ours = sum(name in NAMES and name not in table for name in names)
        if foreign > most and foreign > ours:
            best = program
            most = foreign
    return best


def of_file(content: dict, program: str, path: str) -> tuple[dict, list[str], dict]:
    """({our flag: raw value}, a line per key, {our flag: the key it is from}) of a program's file. Raises PlanError for
    what is not here.
    """
    names = with_references(flattened(content, program), path)
    names = {k: v for k, v in names.items() if v is not None}
    lines = [f"{path}: read as a file of {program}; what it leaves open has this program's defaults"]

    def where(name: str) -> str:
        return f"{path}: {name}"

    settled, translations = joined(names, program, where, Path(path).parent)
    refused: list[tuple[str, str]] = []
    for name, value in names.items():
        if name in settled:
            continue
        entry = known(name, program) or (name if name in NAMES else None) or known(name)
        if entry is None:
            near = difflib.get_close_matches(name, [*PROGRAMS[program], *NAMES], n=1, cutoff=0.85)
            hint = ""
            if near:
                hint = f" Nearest: {near[0]}."
            refused.append((name, f"{path}: '{name}' is not known here.{hint} Remove it, or see docs/migration.md."))
            continue
        try:
            translation = translated(entry, value, f"{where(name)} {words_of(value)}", always_said=True)
            translations.append(replace(translation, names=(name,)))
        except PlanError as error:
            refused.append((name, str(error)))
    if refused:
        table = PROGRAMS[program]
        shown = dict.fromkeys(n if n in table else n.partition(".")[0] for n, _ in refused)
        more = ", ".join(list(shown)[1:])
        raise PlanError(refused[0][1] + (f" Also unsupported: {more}." if more else ""))
    unsaid = sections_of(program).get("unsaid")
    if unsaid and not any(names.get(key) for key in unsaid["keys"].split()):
        train_type = unsaid["train_type"]
        line = f"{path}: {unsaid['why']} -> --train_type {train_type}"
        translations.append(Translation(otherwise={"train_type": train_type}, line=line))
    given = merged(translations, where)
    names_of = {NAMES[flag]: ", ".join(t.names) for t in translations for flag in (*t.otherwise, *t.given) if t.names}
    return given, lines + [t.line for t in translations if t.line], names_of


def with_references(names: dict, path: str) -> dict:
    """`names` with ${name} replaced by the value of that name. Raises PlanError for one that has none."""

    def value_of(text: str, depth: int = 0):
        whole = REFERENCE.fullmatch(text)
        for name in REFERENCE.findall(text):
            if names.get(name) is None or depth > 9:
                raise PlanError(f"{path}: ${{{name}}}: has no value here. Write the value out.")
        if whole:
            value = names[whole[1]]
        else:
            value = REFERENCE.sub(lambda m: str(names[m[1]]), text)
        if isinstance(value, str) and REFERENCE.search(value):
            return value_of(value, depth + 1)
        return value

    return {k: value_of(v) if isinstance(v, str) and REFERENCE.search(v) else v for k, v in names.items()}


def merged(translations: list[Translation], where: Callable[[str], str] | None = None) -> dict:
    """The flags of several translations; what is set otherwise comes in where nothing else sets it. `where`: how an
    error begins that is about names of a file.
    """
    given: dict = {}
    names: dict = {}
    for translation in translations:
        for name, value in translation.given.items():
            ours = NAMES[name]
            if ours in given and ours != "dataset" and word_of(given[ours]) != word_of(value):
                keys = ", ".join(dict.fromkeys(names[ours] + translation.names))
                if where:
                    said = f"{where(keys)}: --{ours}"
                else:
                    said = f"--{ours}:"
                raise PlanError(f"{said} is both {words_of(given[ours])} and {words_of(value)}. Give one of them.")
            given[ours] = value
            names[ours] = names.get(ours, ()) + translation.names
    for translation in translations:
        for name, value in translation.otherwise.items():
            given.setdefault(NAMES[name], value)
    return given
