"""Recipes of pretrain.py: YAML files in config/ and dotted `key=value` overrides, checked against PretrainConfig.

A recipe is written as for Hydra: `defaults: [{arch: NAME}, _self_]` names a file in config/arch/.
"""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from finetune.errors import PlanError
from finetune.flag_values import FALSE, MAX_YAML_BYTES, TRUE, nearest, read_yaml, shown
from finetune.shipped import shipped
from recursive.config import CHOICES, RANGES, ArchConfig, PretrainConfig

CONFIGS = shipped("config", "recipes")
IGNORED = ("name", "loss.name")  # of an arch file: the classes of the fork
ALIASES = {"loss.loss_type": "loss_type"}
RUN_TYPES = get_type_hints(PretrainConfig)
ARCH_TYPES = get_type_hints(ArchConfig)
KEYS = {
    **{f.name: RUN_TYPES[f.name] for f in fields(PretrainConfig) if f.name != "arch"},
    **{f"arch.{f.name}": ARCH_TYPES[f.name] for f in fields(ArchConfig)},
}


def usage() -> str:
    """The help text: every key with its default."""
    lines = [f"  {key}={_written(value)}" for key, value in defaults().items()]
    return f"--config-name NAME: a file of config/ ({_recipes()})\nkeys and their defaults:\n" + "\n".join(lines)


def defaults() -> dict:
    return flat(PretrainConfig())


def flat(config: PretrainConfig) -> dict:
    """{dotted key: value}."""
    values = {name: getattr(config, name) for name in RUN_TYPES if name != "arch"}
    return values | {f"arch.{name}": getattr(config.arch, name) for name in ARCH_TYPES}


def of_flat(values: dict) -> PretrainConfig:
    """The inverse of `flat`; keys that are missing have their defaults."""
    arch = {key.removeprefix("arch."): value for key, value in values.items() if key.startswith("arch.")}
    run = {key: value for key, value in values.items() if not key.startswith("arch.")}
    return replace(PretrainConfig(), arch=replace(ArchConfig(), **arch), **run)


def read_arguments(argv: list[str]) -> tuple[str | None, dict]:
    """(--config-name, {key: value} of the overrides). Raises PlanError with the nearest name of an unknown key."""
    name = None
    overrides = {}
    left = list(argv)
    while left:
        word = left.pop(0)
        if word.replace("_", "-").split("=")[0] in ("--config-name", "-cn"):
            _, equals, name = word.partition("=")
            if not equals:
                name = ""
                if left:
                    name = left.pop(0)
            if not name:
                raise PlanError(f"{word}: has no name after it. Use one of {_recipes()}.")
            continue
        if not word.strip():
            continue  # a continued line with a comment behind its backslash
        key, equals, value = word.partition("=")
        if word.startswith("-"):
            raise PlanError(f"{shown(word)}: unknown flag. Settings are written key=value; see --help.")
        if not equals:
            raise PlanError(f"{shown(word)}: is not key=value. Write, for example, epochs=10.")
        overrides[key.lstrip("+")] = value
    arch = overrides.pop("arch", None)
    if arch is None:
        values = {}
    else:
        values = read_arch(arch, "arch=")
    return name, values | {key_of(k, k): parse(key_of(k, k), v, f"{k}={v}") for k, v in overrides.items()}


def read_recipe(name: str) -> dict:
    """{key: value} of config/NAME.yaml and the arch file that it names."""
    path = _file(CONFIGS, name, "--config-name", _recipes())
    content = _mapping(path)
    values: dict = {}
    entries = content.pop("defaults", None) or []
    if not isinstance(entries, list):
        raise PlanError(f"{path}: defaults: {shown(str(entries))} is not a list. Write [{{arch: NAME}}, _self_].")
    for entry in entries:
        if isinstance(entry, dict) and list(entry) == ["arch"]:
            values |= read_arch(str(entry["arch"]), f"{path}: defaults: arch ")
        elif entry != "_self_":
            raise PlanError(f"{path}: defaults: {shown(entry)} is not 'arch: NAME' or _self_. Remove it.")
    content.pop("hydra", None)
    return values | _parsed(content, f"{path}: ")


def read_arch(name: str, where: str) -> dict:
    folder = CONFIGS / "arch"
    path = _file(folder, name, where.rstrip("= "), ", ".join(p.stem for p in folder.glob("*.yaml")))
    return _parsed(_mapping(path), f"{path}: ", "arch.")


def _parsed(content: dict, where: str, prefix: str = "") -> dict:
    """{key: value} of nested settings, of the run or with `prefix` of the model. Raises PlanError."""
    values = {}
    for key, value in _dotted(content).items():
        if not prefix or key not in IGNORED:
            known = key_of(prefix + key, where + key)
            values[known] = parse(known, value, where + key)
    return values


def key_of(key: str, where: str) -> str:
    """The key of the config that `key` names."""
    inner = key.removeprefix("arch.")
    if key != inner and inner in ALIASES:
        key = f"arch.{ALIASES[inner]}"
    if key not in KEYS:
        raise PlanError(f"{shown(where)}: unknown key.{nearest(key, KEYS)} See --help.")
    return key


def parse(key: str, value: Any, where: str):
    """`value`, text or a YAML value, as the key's type. Raises PlanError."""
    kind = KEYS[key]
    optional = type(None) in get_args(KEYS[key])
    if optional:
        if value is None or str(value).lower() in ("none", "null", ""):
            return None
        kind = next(k for k in get_args(kind) if k is not type(None))
    if kind == tuple[str, ...]:
        return _list(value, where)
    if isinstance(value, (list, dict)) or value is None:
        raise PlanError(f"{shown(where)}: is not a single value. Give one, such as {_written(defaults()[key])}.")
    if kind is bool:
        word = str(value).lower()
        if word not in TRUE + FALSE:
            raise PlanError(f"{shown(where)}: not a boolean. Use true or false.")
        return word in TRUE
    if kind is str:
        return _choice(key, str(value).lower() if isinstance(value, bool) else str(value), where)
    try:
        # YAML 1.1 reads 3e-4 as text
        if kind is float:
            number = float(value)
        else:
            number = int(str(value))
    except ValueError:
        what = "an integer" if kind is int else "a number"
        raise PlanError(f"{shown(where)}: not {what}. Give one, such as {_written(defaults()[key])}.") from None
    low, high = RANGES[key]
    if not low <= number <= high:
        raise PlanError(f"{shown(where)}: must be {low:g} to {high:g}.")
    return number


def _list(value: Any, where: str) -> tuple[str, ...]:
    if isinstance(value, str):
        text = value.strip()
        if text.startswith("[") and text.endswith("]"):
            inner = text[1:-1]
        else:
            inner = text
        value = [part.strip().strip("'\"") for part in inner.split(",") if part.strip()]
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
        raise PlanError(f"{shown(where)}: is not a list of names. Write [one,other].")
    return tuple(value)


def _choice(key: str, value: str, where: str) -> str:
    valid = CHOICES.get(key)
    if valid and value not in valid:
        raise PlanError(f"{shown(where)}: not one of {', '.join(valid)}.{nearest(value, valid)}")
    return value


def _dotted(content: dict, prefix: str = "") -> dict:
    found: dict = {}
    for key, value in content.items():
        if isinstance(value, dict):
            found |= _dotted(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _mapping(path: Path) -> dict:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: cannot be read ({error}). Save it as UTF-8.") from None
    if len(text) > MAX_YAML_BYTES:
        raise PlanError(f"{path}: has over {MAX_YAML_BYTES >> 10} KiB, which no recipe needs. Shorten it.")
    content = read_yaml(str(path), text)
    if not isinstance(content, dict):
        raise PlanError(f"{path}: contains {type(content).__name__}, must contain `key: value` lines.")
    return content


def _file(folder: Path, name: str, where: str, valid: str) -> Path:
    if name.endswith(".yaml"):
        path = Path(name)
    else:
        path = folder / f"{name}.yaml"
    if not path.is_file():
        raise PlanError(f"{where} {shown(name)}: no such recipe. Use one of {valid}, or a .yaml file.")
    return path


def _recipes() -> str:
    return ", ".join(sorted(path.stem for path in CONFIGS.glob("*.yaml")))


def _written(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, tuple):
        return "[" + ",".join(value) + "]"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def as_yaml(config: PretrainConfig) -> str:
    """all_config.yaml: every setting, nested as the fork writes it."""
    import yaml

    values = {k: list(v) if isinstance(v, tuple) else v for k, v in flat(config).items()}
    arch = {k.removeprefix("arch."): v for k, v in values.items() if k.startswith("arch.")}
    return yaml.safe_dump({**{k: v for k, v in values.items() if not k.startswith("arch.")}, "arch": arch})


def arch_of_yaml(file: Path) -> ArchConfig:
    """The arch in an all_config.yaml, ours or the fork's. Raises PlanError."""
    arch = _mapping(file).get("arch")
    if not isinstance(arch, dict):
        raise PlanError(f"{file}: has no arch. Give the all_config.yaml of a run.")
    return of_flat(_parsed(arch, f"{file}: arch.", "arch.")).arch
