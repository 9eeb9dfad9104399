"""Functions of a value, by the names that entries of the tables have for them: its outcome here."""

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from finetune.names.entries import Instead, LeftOut, Outcome, sections_of

LOGGED = ("tensorboard", "wandb", "mlflow", "trackio")
IN_THE_FILE = LeftOut("metrics.jsonl in --output_dir has them in any case.")
NAME_THEM = Instead("There are tensorboard, wandb, mlflow, trackio and csv: --log_to NAME,NAME.")
NO_BETAS = Instead("There are --adam_beta1 and --adam_beta2.")
NO_IMAGES = Instead("Models that see images are transformers' classes: give --model_name and rows with images.")
NO_REWARDS = Instead("For rewards, PPO and GRPO use a tool such as TRL.")
FORMATS_ARE_DETECTED = LeftOut("Formats are detected from the columns.")
COLUMNS_OF_ALL = Instead("--validation_dataset takes files and names, with the columns of --dataset. Omit others.")
LONGEST_TIMEOUT_S = 2_592_000  # a month, the maximum of --rank_timeout
MAX_INFO_BYTES = 2**20
FILE_TYPES = ("json", "csv", "parquet", "text", "arrow")
COMPONENT = "_component_"


def lookup(program: str, name: str):
    """A list of words, or a mapping, that a program's file has for these functions."""
    text = sections_of(program)["lookups"][name]
    if isinstance(text, str):
        return text.split()
    return text


def as_list(value: Any) -> list | tuple:
    if isinstance(value, list | tuple):
        return value
    return [value]


def last_part(value: Any) -> str:
    """The name of a class, of its path."""
    return str(value).rsplit(".", 1)[-1]


def without_none(entry: dict) -> dict:
    return {k: v for k, v in entry.items() if v is not None}


def number_of(value: Any) -> float | None:
    """A value as a number; None for one that is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def json_in(path: str | Path) -> dict | None:
    """The JSON object in a file; None if there is no such file, or it holds something else."""
    try:
        with open(path, "rb") as opened:
            content = json.loads(opened.read(MAX_INFO_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


# ---- transformers, TRL


def trackers(value: Any) -> Outcome:
    """One tracker or several, as text or a list."""
    names = " ".join(map(str, as_list(value))).replace(",", " ").lower().split()
    if names in ([], ["none"]):
        return IN_THE_FILE
    if set(names) <= set(LOGGED):
        return f"--log_to {','.join(names)}"
    return NAME_THEM


def warmup(value: Any) -> str:
    """transformers reads a number below 1 as a fraction of the steps."""
    number = number_of(value)
    if number is None:
        return "--warmup_steps {}"
    if 0 < number < 1:
        return "--warmup_ratio {}"
    return f"--warmup_steps {number:g}"


def share_of_rows(value: Any) -> Outcome:
    """A fraction held out for validation; other programs read a number from 1 on as a number of rows."""
    number = number_of(value)
    if number is not None and number >= 1:
        return Instead("Here it is a fraction: --validation_split F, with F below 1, or --validation_dataset FILE.")
    return "--validation_split {}"


def reentrant(value: Any) -> Outcome:
    """The one setting of gradient checkpointing's keyword arguments that changes anything."""
    text = re.sub("[\"' ]", "", str(value).lower())
    outcomes = {"{use_reentrant:true}": "--reentrant_checkpointing true", "{use_reentrant:false}": ""}
    return outcomes.get(text, Instead("There is --reentrant_checkpointing."))


def betas(value: Any) -> Outcome:
    """Adam's two, as a list or text."""
    numbers = re.findall(r"[\d.]+(?:e-?\d+)?", str(value))
    if len(numbers) == 2:
        return f"--adam_beta1 {numbers[0]} --adam_beta2 {numbers[1]}"
    return NO_BETAS


def timeout(value: Any) -> str:
    """Seconds, of which --rank_timeout takes a month: what is larger means that nothing is waited for less long."""
    longer = (number_of(value) or 0) > LONGEST_TIMEOUT_S
    if longer:
        return f"--rank_timeout {LONGEST_TIMEOUT_S}"
    return "--rank_timeout {}"


def rope_scaling(value: Any) -> Outcome:
    """A word, or a mapping of rope_type (or type) and factor."""
    word = value
    factor = None
    if isinstance(value, dict):
        word = value.get("rope_type", value.get("type"))
        factor = number_of(value.get("factor"))
    return f"--rope_scaling {str(word).lower()}" + (f" --rope_factor {factor:g}" if factor else "")


def sharded(value: Any) -> Outcome:
    """Words of --fsdp: a strategy, offload, and what is done in any case."""
    known = lookup("transformers", "strategies")
    words = set(" ".join(map(str, as_list(value))).lower().replace(",", " ").split())
    strategies = [known[w] for w in sorted(words) if w in known]
    if words <= {"false", "none", "[]"}:
        return ""
    if words - known.keys() - {"auto_wrap", "offload", "true"} or len(strategies) > 1:
        return Instead("Ranks shard the model by default (FSDP2). See --dp_shards and --use_cpu_offload.")
    flags = f"--sharding_strategy {strategies[0] if strategies else 'full_shard'}"
    return flags + (" --use_cpu_offload true" if "offload" in words else "")


def zero_stage(value: Any) -> Outcome:
    """A file of DeepSpeed's settings, or its name, as what FSDP2 does of it."""
    asked: dict | None
    if isinstance(value, dict):
        asked = value
    else:
        asked = json_in(str(value))
    if asked is None:
        name = Path(str(value)).name.lower()
        named = re.search(r"(?:z|zero|stage)_?([0-3])(?!\d)", name)
        stage = ""
        if named:
            stage = named[1]
        offloads = "offload" in name
    else:
        zero = asked.get("zero_optimization") or {}
        stage = str(zero.get("stage", 0))
        devices = [(zero.get(n) or {}).get("device") for n in ("offload_param", "offload_optimizer")]
        offloads = any(d not in (None, "none") for d in devices)
    strategies = lookup("transformers", "zero stages")
    if stage not in strategies:
        return Instead(sections_of("transformers")["lookups"]["deepspeed"])
    return f"--sharding_strategy {strategies[stage]}" + (" --use_cpu_offload true" if offloads and stage != "0" else "")


def only_answers(value: Any) -> Outcome:
    is_off = str(value).lower() == "false"
    if is_off:
        return "--train_on_prompt true"
    return LeftOut("Only answers are learned by default.")


# ---- Axolotl


def axolotl_datasets(value: Any) -> list[dict] | Instead:
    """Entries of our --dataset from Axolotl's: names, splits, formats, columns."""
    datasets = []
    for entry in value if isinstance(value, list) else [value]:
        if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
            return Instead("Here dataset is a list of names, or of entries with name, split, format and columns.")
        kind = _unknown_setting(entry) or _format_of(entry)
        if isinstance(kind, Instead):
            return kind
        names = entry.get("data_files") or entry["path"] + (f":{entry['name']}" if entry.get("name") else "")
        is_file = entry.get("data_files") or entry.get("ds_type") or Path(entry["path"]).suffix in (".json", ".jsonl")
        if is_file and entry.get("split") == "train":
            split = None
        else:
            split = entry.get("split")
        columns = _columns_of(entry) or None
        for name in names if isinstance(names, list) else [names]:
            datasets.append(without_none({"name": name, "split": split, "format": kind, "columns": columns}))
    return datasets


def _columns_of(entry: dict) -> dict:
    """{our column: theirs}, where it differs and would not be found by its name."""
    ours = lookup("Axolotl", "columns")
    of_type = {}
    if isinstance(entry.get("type"), dict):
        of_type = entry["type"]
    columns = {**{ours[k]: entry.get(k) for k in ours}, **{ours[k]: v for k, v in of_type.items() if k in ours}}
    found_by_name = {("messages", "conversations"), ("messages", "conversation"), ("system", "system_prompt")}
    return {k: v for k, v in columns.items() if v and v != k and (k, v) not in found_by_name}


def _unknown_setting(entry: dict) -> Instead | None:
    """The line for a setting of an entry that is not here, None if there is none."""
    known = {*lookup("Axolotl", "ignored settings"), *lookup("Axolotl", "columns")}
    for name, value in entry.items():
        asks_nothing = value in (None, False) or (value == [] and name != "roles_to_train")
        if asks_nothing or name in known:
            continue
        if name == "roles" and isinstance(value, dict):
            roles = lookup("Axolotl", "roles")
            strange = [
                word for role, named in value.items() for word in named if roles.get(word) != roles.get(role, role)
            ]
            if strange:
                return Instead(
                    f"An entry's roles has {strange[0]}. Rename it in the rows, to one of {', '.join(roles)}."
                )
        elif name == "message_property_mappings" and isinstance(value, dict):
            names = lookup("Axolotl", "properties")
            strange = [f"{k}: {v}" for k, v in value.items() if v != k and v not in names.get(k, "").split()]
            if strange:
                return Instead(f"An entry's message_property_mappings has {strange[0]}. Rename the field in the rows.")
        elif refused := _not_standard(name, as_list(value)):
            return refused
    return None


def _not_standard(name: str, words: Sequence) -> Instead | None:
    """The line for a setting with other values than those that are read here."""
    standard = lookup("Axolotl", "standard settings").get(name)
    if standard is not None and words and set(map(str, words)) <= set(standard.split()):
        return None
    what = f"An entry's {name} is not here"
    advice = lookup("Axolotl", "advice").get(name)
    if advice is None and standard is not None:
        advice = f"use one of {', '.join(standard.split())} in the rows"
    return Instead(f"{what}: {advice}." if advice else f"{what}: change the rows, or --columns, or omit it.")


def _format_of(entry: dict) -> str | Instead | None:
    """Our format of an entry's type; None where the columns say it."""
    kind = entry.get("type")
    if isinstance(kind, dict):
        shown = str(kind.get("format") or "{instruction}").strip()
        if kind.get("system_prompt") or shown not in ("{instruction}", "{instruction} {input}"):
            return Instead("An entry's type formats rows by a text of its own. Write rows with prompt and completion.")
        return None
    if kind is None:
        return None
    formats = lookup("Axolotl", "formats")
    word, _, variant = str(kind).replace(":", ".").partition(".")
    if word in lookup("Axolotl", "formats by columns") or (word == "chat_template" and variant):
        return None
    return formats.get(word) or Instead(
        f"An entry's type is {kind}, not one of {', '.join(formats)}: formats are detected from the columns, which "
        "--columns renames."
    )


def validation_words(entries: list[dict] | Instead) -> str | Instead:
    """The words of --validation_dataset, which takes names with their splits."""
    if isinstance(entries, Instead):
        return entries
    if any(set(entry) - {"name", "split", "format"} for entry in entries):
        return COLUMNS_OF_ALL
    names = [entry["name"] + (f"@{entry['split']}" if entry.get("split") else "") for entry in entries]
    return " ".join(f"--validation_dataset {shlex.quote(name)}" for name in names)


def axolotl_validation_dataset(value: Any) -> Outcome:
    return validation_words(axolotl_datasets(value))


def axolotl_pretraining_dataset(value: Any) -> Outcome:
    if isinstance(value, str):
        return [{"name": name} for name in [value.strip()] if name]
    return axolotl_datasets(value)


def axolotl_plugins(value: Any) -> Outcome:
    """Plugins that only fuse kernels change nothing here."""
    names = [str(name).removeprefix("axolotl.integrations.").partition(".")[0] for name in as_list(value)]
    for name in names:
        if name not in lookup("Axolotl", "plugins that fuse"):
            advice = lookup("Axolotl", "plugins").get(name, "plugins are not run. Omit it")
            return Instead(f"{name} is not here: {advice}.")
    return LeftOut("Logits are computed at target positions, in chunks, and kernels are chosen for the device.")


def named_template(value: Any) -> Outcome:
    """Axolotl's names of templates are those that models come with."""
    if str(value).startswith("tokenizer_default_fallback_") or str(value) in ("tokenizer_default", "jinja"):
        return LeftOut("The tokenizer's own template; else ChatML.")
    if str(value) == "chatml":
        return "--chat_template chatml"
    return LeftOut("The tokenizer's own template is used, which --dry_run shows on three rows; else ChatML.")


def template_file(value: Any) -> Outcome:
    if "{" in str(value):
        return Instead("Write the template into a file: --chat_template FILE.")
    return "--chat_template {}"


def kind_of_model(value: Any) -> Outcome:
    if "Classification" in str(value) or "Reward" in str(value):
        return Instead("This trains language models. For a classifier or a reward model use a tool such as TRL.")
    return LeftOut("The kind of model and tokenizer is read from its folder.")


# ---- LLaMA-Factory


def llama_factory_datasets(value: Any) -> list[dict] | Instead:
    return listed_datasets(value)[0]


def listed_datasets(
    names: str | list[str], folder: object = None, beside: Path = Path()
) -> tuple[list[dict] | Instead, str]:
    """(entries of our --dataset, what to say) for names in `folder`/dataset_info.json, searched for here and in the
    folders above `beside`. Names that are files stay what they are, and so do all where there is no such file: then
    reading finds a file or a Hub dataset of that name, or says that there is none.
    """
    listed = [n.strip() for n in (names.split(",") if isinstance(names, str) else names)]
    as_they_are = [{"name": name} for name in listed]
    if str(folder).upper() == "ONLINE":
        return as_they_are, ""
    place = Path(str(folder or "data"))
    files = [parent / place / "dataset_info.json" for parent in (Path(), beside, *beside.absolute().parents)]
    file = next((f for f in files if f.is_file()), None)
    if file is None:
        if all(Path(name).exists() for name in listed):
            return as_they_are, ""
        return as_they_are, f", as {place}/dataset_info.json is not here: files or Hub names"
    known = json_in(file) or {}
    datasets = []
    for name in listed:
        entry = known.get(name)
        if entry is None and Path(name).exists():
            datasets.append({"name": name})
        elif not isinstance(entry, dict):
            return Instead(f"{name} is no name in {file}. Give dataset: FILE or a Hub name, or one that is."), ""
        else:
            ours = _of_info(entry, file.parent)
            if isinstance(ours, Instead):
                return Instead(f"{file}: {name}: {ours.what}"), ""
            datasets.append(ours)
    return datasets, ""


def _of_info(entry: dict, folder: Path) -> dict | Instead:
    """Our entry for one of dataset_info.json."""
    source: str | None
    if entry.get("file_name"):
        source = str(folder / entry["file_name"])
    else:
        source = entry.get("hf_hub_url")
    if not isinstance(source, str):
        return Instead("it has neither file_name nor hf_hub_url. Give dataset: FILE or a Hub name.")
    names = lookup("LLaMA-Factory", "tags")
    for tag, value in (entry.get("tags") or {}).items():
        if value not in names.get(tag, "").split():
            known = " or ".join(names.get(tag, "role").split())
            return Instead(f"its tag {tag} is {value!r}. Rename it in the rows to {known}.")
    formatting = lookup("LLaMA-Factory", "columns").get(entry.get("formatting", "alpaca"), {})
    columns = {}
    for theirs, column in (entry.get("columns") or {}).items():
        if theirs in ("chosen", "rejected"):
            ours = theirs
        else:
            ours = formatting.get(theirs)
        if ours is None:
            return Instead(f"its column {theirs} has no counterpart. Name the columns with --columns.")
        if column and column != ours:
            columns[ours] = column
    name = source + (f":{entry['subset']}" if entry.get("subset") else "")
    return without_none({"name": name, "split": entry.get("split"), "columns": columns or None})


def quantized(value: Any) -> str:
    return f"--train_type qlora --n_bits {value if str(value) in ('4', '8') else '{}'}"


def trainable_layers(value: Any) -> Outcome:
    if str(value).startswith("-"):
        return Instead("--layers_to_transform names layers by number: the first two are 0,1.")
    if str(value) == "2":
        return LeftOut("It is what --num_layers is with finetuning_type freeze.")
    return "--num_layers {}"


# ---- mlx-lm


def mlx_lm_datasets(value: Any) -> list[dict] | Instead:
    """Entries of our --dataset from mlx-lm's hf_dataset, one or a list."""
    datasets = []
    for entry in value if isinstance(value, list) else [value]:
        name = None
        if isinstance(entry, dict):
            name = entry.get("path", entry.get("name"))
        if not isinstance(name, str):
            return Instead("An entry has path. Give dataset: FILE or a Hub name.")
        config = (entry.get("config") or {}).get("name")
        columns = {ours: entry.get(theirs) for theirs, ours in lookup("mlx-lm", "columns").items()}
        columns = {k: v for k, v in columns.items() if v and v != k}
        name += f":{config}" if config else ""
        datasets.append(without_none({"name": name, "split": entry.get("train_split"), "columns": columns or None}))
    return datasets


# ---- torchtune


def torchtune_model(value: Any) -> Outcome:
    """The train type that a model's builder names."""
    if any(kind in str(value) for kind in ("vision", "clip", "flamingo", "early_fusion")):
        return NO_IMAGES
    word = last_part(value)
    if "classifier" in word:
        return NO_REWARDS
    if word.startswith("qlora"):
        return "--train_type qlora"
    return "| --train_type lora" if word.startswith("lora") else "--train_type full"


def torchtune_loss(value: Any) -> Outcome:
    word = last_part(value)
    if "CrossEntropy" in word or word.startswith("CE"):
        return LeftOut("It is the loss here: the next token's, with logits in chunks.")
    if word == "DPOLoss":
        return "--preference dpo"
    return Instead("There are next-token training and --preference dpo, orpo, simpo and kto.")


def torchtune_dataset(value: Any) -> Outcome:
    """The Hub's name of a builder's rows; of a builder that takes a source, that is the dataset."""
    rows = lookup("torchtune", "rows").get(last_part(value))
    if rows:
        return f"| --dataset {rows}"
    return FORMATS_ARE_DETECTED


def torchtune_datasets(parts: dict | list[dict]) -> tuple[list[dict] | Instead, set[str]]:
    """(entries of our --dataset, settings that are not settled by them) of a builder's settings, or a list of them.
    An entry has train_on_prompt where its builder learns prompts unless it is told not to.
    """
    if isinstance(parts, list):
        return _several([torchtune_datasets(part) for part in parts]), set()
    builder = str(parts.get(COMPONENT, ""))
    if "multimodal" in builder:
        return NO_IMAGES, set()
    name = parts.get("source") or lookup("torchtune", "rows").get(last_part(builder))
    split = parts.get("split")
    if name in FILE_TYPES:
        name = parts.get("data_files")
        split = None if split == "train" else split
    if not isinstance(name, str):
        return [], set(parts)
    kind = parts.get("name") or parts.get("subset")
    name += f":{kind}" if kind else ""
    settled = {COMPONENT, "source", "split", "data_files", "name", "subset", "conversation_style"}
    columns = {}
    for key, column in parts.items():
        if key in ("column", "conversation_column") or key.startswith("column_map."):
            settled.add(key)
            theirs = last_part(key)
            ours = lookup("torchtune", "columns").get(theirs, theirs)
            if ours != column:
                columns[ours] = column
    learns_prompts = last_part(builder) in lookup("torchtune", "rows with prompts")
    prompts = True if learns_prompts and parts.get("train_on_input") is None else None
    entry = {"name": name, "split": split, "columns": columns or None, "train_on_prompt": prompts}
    return [without_none(entry)], parts.keys() - settled


def _several(every: list[tuple[list[dict] | Instead, set[str]]]) -> list[dict] | Instead:
    """The entries of all of several datasets, or why one is refused."""
    entries: list[dict] = []
    for datasets, _ in every:
        if isinstance(datasets, Instead):
            return datasets
        entries += datasets
    left = sorted({name for _, names in every for name in names} - {"packed", "train_on_input"})
    if left:
        return Instead(f"{left[0]} of one of several datasets is not here. Omit it.")
    return entries


def torchtune_attention_targets(value: Any) -> Outcome:
    names = as_list(value)
    if not all(isinstance(name, str) for name in names):
        return Instead("Names of projections are expected, such as q_proj. Here it is --lora_target_modules NAME,NAME.")
    return f"--lora_target_modules {shlex.quote(torchtune_targets(names, False, False, ''))}"


def torchtune_targets(attention: Iterable[str], mlp: object, output: object, model: str) -> str:
    """--lora_target_modules of what a builder of LoRA is given, by the names that transformers has for them."""
    names = lookup("torchtune", "modules")
    is_phi = ".phi" in model
    leaves = ["qkv_proj" if is_phi and n[:2] in ("q_", "k_", "v_") else names.get(n, n) for n in map(str, attention)]
    if str(mlp).lower() == "true":
        leaves += ["gate_up_proj", "down_proj"] if is_phi else ["gate_proj", "up_proj", "down_proj"]
    return ",".join(dict.fromkeys(leaves + (["lm_head"] if str(output).lower() == "true" else [])))


# ---- LitGPT


def litgpt_targets(chosen: dict[str, bool]) -> tuple[str, str]:
    """(--lora_target_modules, what differs) of lora_query and its like; "" if none is chosen."""
    layers = lookup("LitGPT", "targets")
    on = [name for name in layers if chosen.get(name) and name != "lora_head"]
    head = "the head is not among them: --modules_to_save lm_head trains it in full" if chosen.get("lora_head") else ""
    if on == ["lora_query", "lora_value"]:
        return "default", head or "queries and values"
    if len(on) == len(layers) - 1:
        return "all", head
    return ",".join(leaf for name in on for leaf in layers[name].split()), head or "as Llama names them"
