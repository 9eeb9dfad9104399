"""The same weights, proved: MLX's logits of a few tokens against transformers', before a run spends time on them.

A config field that mlx-lm does not read, such as transformers 5's `rope_parameters`, changes what a model computes
without an error. A large model is compared by its first layers, in a temporary folder of both.
"""

import contextlib
import hashlib
import importlib.util
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from backend_manager import package_version
from finetune import safetensors_io
from finetune.errors import CheckpointDamagedError, PlanError, first_line, is_out_of_memory
from finetune.mlx_engine import model as models
from finetune.mlx_engine.config import translated, unread_fields
from finetune.mlx_engine.mlx_lm_internals import model_classes
from finetune.mlx_options import MLXOptions
from finetune.model_files.files import ModelFiles
from finetune.system.files import cache_folder


class Words(NamedTuple):
    """Wording of an error: the name of the model, the harm in training it, and the remedy."""

    flag: str
    harm: str
    remedy: str


TRAINING = Words("--model_name", "it would train another model", "Use --backend cpu")
ANSWERING = Words("--checkpoint", "another model would answer", "Use --device cpu")
LIMIT = 1e-4  # of the largest logit, fp32: mlx-lm rounds gelu and RoPE otherwise in places; 1e-5 is usual
WHOLE_BYTES = 2**30  # weight files up to this size are compared in full
TOKENS = 24
OPENED_TOKENS = 1024  # attention windows up to this are compared before a model answers


def check_opened(files: ModelFiles, reference: Callable[[Path, np.ndarray], np.ndarray]) -> None:
    """`check` before a model answers, by its first layers, and once for a config and these versions of the libraries:
    what passed is kept in the cache. Raises PlanError.
    """
    versions = [f"{name} {package_version(name)}" for name in ("mlx", "mlx-lm", "transformers", "torch")]
    known = hashlib.sha256("\n".join([json.dumps(files.config, sort_keys=True), *versions]).encode()).hexdigest()
    entry = cache_folder("logits") / known[:24]
    if entry.is_file():
        return
    check(files, MLXOptions(), OPENED_TOKENS, reference, ANSWERING, whole_bytes=0)
    with contextlib.suppress(OSError):  # then it is checked again
        entry.parent.mkdir(parents=True, exist_ok=True)
        entry.touch()


def check(
    files: ModelFiles,
    options: MLXOptions,
    context_length: int,
    reference: Callable[[Path, np.ndarray], np.ndarray],
    words: Words = TRAINING,
    whole_bytes: int = WHOLE_BYTES,
) -> float | None:
    """The largest difference, relative to the largest logit. Raises PlanError above LIMIT.

    `reference(folder, ids)`: transformers' logits. Without torch, a check of the config's fields takes their place.
    """
    if not options.fingerprint:
        return None
    unreadable = any(path.suffix == ".npz" for path in files.weight_files)  # by torch
    if unreadable or importlib.util.find_spec("torch") is None:
        check_fields(files, words)
        return None
    size = sum(path.stat().st_size for path in files.weight_files)
    ids = tokens(files.config, context_length)
    if size <= whole_bytes:
        return _compare(files.folder, files.config, ids, files.name, reference, words)
    with tempfile.TemporaryDirectory() as beside:
        config = first_layers(files, Path(beside))
        return _compare(Path(beside), config, ids, files.name, reference, words)


def tokens(config: dict, context_length: int) -> np.ndarray:
    """Random token ids, more than the model's attention window if the run's rows may be longer than it."""
    text = config.get("text_config") or config
    window = text.get("sliding_window") or 0
    vocab = min(text.get("vocab_size") or 1000, 1000)
    if TOKENS - 8 < window < context_length:
        size = window + 8
    else:
        size = TOKENS
    return 3 + np.random.default_rng(0).integers(max(1, vocab - 3), size=min(size, context_length))


def _compare(
    folder: Path,
    config: dict,
    ids: np.ndarray,
    name: str,
    reference: Callable[[Path, np.ndarray], np.ndarray],
    words: Words,
) -> float:
    said = f"{words.flag} {name}"
    model_type = config["model_type"]
    with _one_line(f"{said}: mlx-lm's {model_type} does not run", words.remedy):
        ours = logits(folder, config, ids)
    judge = f"{said}: transformers' {model_type} does not run, and MLX's logits are judged by its"
    with _one_line(judge, "Correct its config.json"):
        theirs = reference(folder, ids)
    same_shape = ours.shape == theirs.shape
    if same_shape:
        off = float(np.abs(ours - theirs).max() / max(np.abs(theirs).max(), 1e-30))
    else:
        off = float("inf")
    if not off <= LIMIT:
        unread = unread_fields(config, _fields_read(config))
        why = ""
        if unread:
            why = f"; it does not read {', '.join(unread)}"
        raise PlanError(
            f"{words.flag} {name}: mlx-lm's {config['model_type']} gives other logits than transformers on {len(ids)} "
            f"tokens (off by {off:.1e} of the largest, the limit is {LIMIT:.0e}{why}), so {words.harm}. {words.remedy}."
        )
    return off


@contextlib.contextmanager
def _one_line(fact: str, remedy: str):
    """Converts what a model raises into a PlanError."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError, AttributeError, LookupError) as error:
        if isinstance(error, PlanError | CheckpointDamagedError) or is_out_of_memory(error):
            raise
        raise PlanError(f"{fact} ({first_line(error)}). {remedy}.") from error


def logits(folder: Path, config: dict, ids: np.ndarray) -> np.ndarray:
    """MLX's fp32 logits [S, V] of token ids [S]."""
    loaded = models.load(folder, config, mx.float32, dequantizes=True)
    return np.array(loaded.model(mx.array(ids[None].astype(np.int32)))[0].astype(mx.float32))


def _fields_read(config: dict) -> set[str]:
    _, args_class = model_classes(translated(config))
    return set(args_class.__dataclass_fields__)


def check_fields(files: ModelFiles, words: Words = TRAINING) -> None:
    """Raises PlanError if mlx-lm's class does not read a field that decides what the model computes."""
    unread = unread_fields(translated(files.config), _fields_read(files.config))
    if unread:
        raise PlanError(
            f"{words.flag} {files.name}: mlx-lm's {files.config['model_type']} does not read {', '.join(unread)} of "
            "config.json, and its logits cannot be compared with transformers' (.npz weights, or no torch). "
            + ("Set fingerprint to false in --mlx_config." if words is TRAINING else "Install torch to compare them.")
        )


def first_layers(files: ModelFiles, target: Path) -> dict:
    """Writes a folder of the model's first layers, one of each kind at least; returns its config."""
    config = json.loads(json.dumps(files.config))
    text = config.get("text_config") or config
    field = next((name for name in ("num_hidden_layers", "n_layer", "num_layers") if name in text), None)
    if field is None:
        raise PlanError(f"--model_name {files.name}: config.json names no number of layers. Use --backend cpu.")
    total = text[field]
    kinds = text.get("layer_types") or []
    kept = max([kinds.index(kind) + 1 for kind in set(kinds)], default=1)
    kept = min(total, max(2, kept))
    text[field] = kept
    for key, value in text.items():
        if isinstance(value, list) and len(value) == total:
            text[key] = value[:kept]
    (target / "config.json").write_text(json.dumps(config))
    for path in files.weight_files:
        header, start = safetensors_io.read_header_and_start(path)
        names = [n for n in header if n != "__metadata__" and _layer(n) < kept]
        shards = [_shard(path, start, n, header[n]) for n in names]
        if shards:
            safetensors_io.write_file(target / path.name, shards)
    if len(files.weight_files) > 1:
        headers = {p.name: safetensors_io.read_header(p) for p in target.glob("*.safetensors")}
        index = {n: file for file, header in headers.items() for n in header if n != "__metadata__"}
        (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return config


def _layer(name: str) -> int:
    """The number of the block a weight belongs to; -1 outside of the blocks."""
    return next((int(part) for part in name.split(".") if part.isdigit()), -1)


def _shard(path: Path, start: int, name: str, entry: dict) -> safetensors_io.TensorShard:
    first, last = entry["data_offsets"]

    def read() -> np.ndarray:
        return np.fromfile(path, np.uint8, last - first, offset=start + first)

    return safetensors_io.TensorShard(name, entry["dtype"], tuple(entry["shape"]), read)
