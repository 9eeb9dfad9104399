"""Opens a trained checkpoint, or any model, for inference: shared by generate.py, score.py and export.py."""

import contextlib
import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from backend_manager import Backend, BackendManager, auto_cpu_matmul, package_version
from finetune.checkpoint.output_dir import MOMENTS
from finetune.checkpoint.store import steps_of
from finetune.cli import Parser
from finetune.config import AUTO_BOOL
from finetune.data.chat_template import stop_ids
from finetune.distributed import over_ranks
from finetune.distributed.env import RankEnv, check_devices, local_ranks, rank_env
from finetune.distributed.over_ranks import Ranks
from finetune.engine import Engine, FineTuningEngine
from finetune.errors import PlanError
from finetune.estimate.budget import gib
from finetune.estimate.inference import Work, predicted
from finetune.estimate.model_shape import ModelShape, planned_shape
from finetune.model_files.files import (
    ModelFiles,
    find_base,
    find_model,
    lacks_tokenizer,
    started_in_of,
    tokenizer_folder,
)
from finetune.model_files.processor import sees_images
from finetune.model_files.published import check_is_latest, verify_texts
from finetune.model_files.tokenizer import FullTokenizer, generation_ends, load_tokenizer, pad_id
from finetune.parts.memory import OFFLOADS
from finetune.parts.parts import Parts
from finetune.parts.trains import AllWeights, trains_of
from finetune.safetensors_io import INDEX
from finetune.system.terminal import say
from finetune.system.untrusted import untrusted
from finetune.trained_base import TrainedBase, settings_of_run, trained_base


def add_flags(parser: Parser) -> None:
    parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="DIR|ID",
        help="an output_dir, a step-N folder, or any adapter or model folder",
    )
    parser.add_argument(
        "--device", default=None, help="auto, cuda, mps, mlx, cpu, xpu (default: FSDP_BACKEND, else auto)"
    )
    parser.add_argument(
        "--precision", default="auto", choices=("auto", "fp32", "bf16", "fp16"), help="(default: as it was trained)"
    )
    parser.add_argument(
        "--n_bits",
        type=int,
        default=None,
        choices=(2, 3, 4, 5, 6, 8, 16),
        help="bits of the base's weights; 16: dense (default: as it was trained, by its run_plan.json)",
    )
    parser.number("world_size", 1, "ranks that this command starts here, over which the weights are sharded")
    parser.add_argument(
        "--gather_weights",
        default="auto",
        choices=AUTO_BOOL,
        help="of several ranks: true: each gathers all weights and answers alone; false: each keeps its shard, and one "
        "layer at a time is gathered, for each token; auto: true if they fit (default: auto)",
    )
    parser.add_argument(
        "--base_offload",
        default="auto",
        choices=("auto", "none", *OFFLOADS),
        help="where the base's layers are: none: on the device; host, disk: there, and two pass through the device for "
        "each forward, so for each token of an answer; auto: as it was trained (default: auto)",
    )


@dataclass(frozen=True)
class Found:
    """A checkpoint that is ready to be opened: its base's files, and how they are opened on which backend."""

    checkpoint: str
    files: ModelFiles
    manager: BackendManager
    base: TrainedBase


def base_of(checkpoint: str) -> ModelFiles:
    """Files of the full model: the checkpoint itself, or the base model named by its adapter.

    Raises PlanError; CheckpointDamagedError if the folder's files do not match its manifest.
    """
    folder = Path(checkpoint)
    if folder.is_dir():
        verify_texts(folder)
    if any((folder / name).is_file() for name in ("adapter_config.json", "trained_blocks.json")):
        check_is_latest(folder, f"--checkpoint {checkpoint}")
    config = folder / "adapter_config.json"
    weights = "adapter_model.safetensors"
    if (folder / "trained_blocks.json").is_file():
        config = folder / "trained_blocks.json"
        weights = "trained_blocks.safetensors"
    if not config.is_file():
        if (folder / "config.json").is_file():
            steps = []
        else:
            steps = steps_of(folder)
        if steps:
            raise PlanError(f"--checkpoint {checkpoint}: the run did not finish. Give {steps[0]}.")
        if folder.is_dir() and not (folder / "config.json").is_file():
            raise PlanError(
                f"--checkpoint {checkpoint}: has no config.json and no adapter_config.json. Give an output_dir."
            )
        check_is_whole(folder)
        return find_model(checkpoint, None, flag="--checkpoint")
    if not (folder / weights).is_file():
        raise PlanError(f"--checkpoint {checkpoint}: has {config.name} but no {weights}.")
    with untrusted(f"{config}: has no base_model_name_or_path", "Give a complete adapter."):
        content = json.loads(config.read_text(encoding="utf-8"))
        base = content["base_model_name_or_path"]
        revision = content.get("revision")
        if not isinstance(base, str) or not isinstance(revision, str | None):
            raise TypeError(f"it is {json.dumps(base)[:80]} at revision {json.dumps(revision)[:80]}, must be text")
    started_in = started_in_of(folder, content)
    files = find_base(base, revision, started_in, flag=f"{config}: base_model_name_or_path")
    beside = folder / "base_model.json"
    digest = content.get("base_digest")
    if digest is None and beside.is_file():
        with untrusted(f"{beside}: cannot be read", "Remove it."):
            digest = json.loads(beside.read_text(encoding="utf-8")).get("digest")
    if digest is not None and not files.matches(str(digest)):
        holder = beside if content.get("base_digest") is None else config
        raise PlanError(
            f"--checkpoint {checkpoint}: its base {base} is not the one it was trained on (sha256 differs). Put that "
            f"one there, or remove the digest from {holder}, to use this one."
        )
    return files


def check_is_whole(folder: Path) -> None:
    """Raises PlanError for a step-N folder of a run that trains some layers of a model: the others are not in it."""
    settings = None
    if (folder / MOMENTS).is_file() or (folder / INDEX).is_file():
        settings = settings_of_run(folder)
    trains = None
    if settings:
        trains = trains_of(settings)
    if isinstance(trains, AllWeights) and trains.freezes:
        raise PlanError(
            f"--checkpoint {folder}: holds the layers that train, and not the rest of the model. Give the --output_dir "
            "of the run, once it is finished."
        )


def is_recursive(checkpoint: str) -> bool:
    """True for what pretrain.py wrote: a step_N or a run's folder, or a file that TinyRecursiveModels wrote."""
    path = Path(checkpoint)
    if path.is_file():
        return path.name.startswith("step_")
    config = path / "config.json"
    return config.is_file() and '"tiny_recursive"' in config.read_text(encoding="utf-8", errors="replace")[:200]


def open_recursive(args: Namespace):
    """(the model of a pretraining checkpoint as a `RecursiveGenerator`, its tokenizer, stop token ids)."""
    from finetune.torch_engine.device import device_of
    from recursive.data.chat_tokens import ChatTokenizer
    from recursive.plan import select_device
    from recursive.torch_engine.generate import RecursiveGenerator
    from recursive.torch_engine.weights import open_model

    manager = select_device(args.device or "auto")
    say(f"Using device: {manager.backend}")
    if args.precision == "fp16":
        raise PlanError("--precision fp16: a recursive model computes in fp32 or bf16. Use one of them.")
    bf16 = args.precision == "bf16" and manager.capabilities.supports_bfloat16
    if args.precision == "bf16" and not bf16:
        say(f"--precision bf16: fp32 is used: {manager.capabilities.reasons.get('bf16', 'no bf16 here')}")
    on_cpu = manager.backend is Backend.CPU
    prepare_torch(on_cpu and auto_cpu_matmul(manager.capabilities.onednn_speed) == "onednn")
    checkpoint = Path(args.checkpoint)
    dtype = "bfloat16" if bf16 else "float32"
    model = open_model(checkpoint, args.raw_weights, dtype, device_of(str(manager.backend)))
    if not model.arch.causal:
        raise PlanError(f"--checkpoint {checkpoint}: was trained on puzzles (arch.causal=false). Give a chat model.")
    tokenizer = ChatTokenizer.load(Path(args.tokenizer) if args.tokenizer else _tokenizer_beside(checkpoint))
    if tokenizer.vocab_size > model.vocab_size:
        raise PlanError(
            f"--tokenizer: has {tokenizer.vocab_size} tokens, the model {model.vocab_size}. Give its data set's."
        )
    return RecursiveGenerator(model, tokenizer.pad_id), tokenizer, tokenizer.stop_ids


def _tokenizer_beside(checkpoint: Path) -> Path:
    for folder in (checkpoint, checkpoint.resolve().parent):
        if (folder / "tokenizer.json").is_file():
            return folder
    raise PlanError(f"--checkpoint {checkpoint}: has no tokenizer.json beside it. Give --tokenizer DIR.")


def prepare_torch(onednn: bool, local_ranks: int = 1) -> None:
    """This process's compute threads beside the other ranks of this host, and whether oneDNN computes its fp32
    products.
    """
    from finetune.torch_engine.device import set_num_threads, set_onednn

    set_num_threads(local_ranks)
    set_onednn(onednn)


def prepare_again(base: TrainedBase) -> None:
    """Settings of torch as they were when one process opened `base`."""
    if base.device == "mlx":
        return
    from finetune.torch_engine.device import device_of, prepare_attention

    prepare_torch(base.plan.precision.onednn)
    prepare_attention(device_of(base.device))


def run_over_ranks(
    program: Path,
    argv: list[str] | None,
    parsed: Callable[[list[str] | None], Namespace],
    prepared: Callable[[Namespace, int], str],
    work: Callable[[Namespace, Ranks], int],
) -> int:
    """The exit code of generate.py and score.py: see over_ranks.run."""

    def on_rank(*how: Any) -> int:
        from finetune.torch_engine.parallel.rank_process import answer_on_rank

        return answer_on_rank(*how)

    return over_ranks.run(program, argv, parsed, prepared, work, on_rank)


def find(args: Namespace, ranks: int = 1) -> Found:
    """The checkpoint of the arguments, to be opened by so many ranks; downloads its base. Raises PlanError."""
    files = base_of(args.checkpoint)
    try:
        if args.device:
            manager = BackendManager(args.device, verbose=False)
        else:
            manager = BackendManager.from_env(verbose=False)
    except ValueError as error:
        raise PlanError(f"--device {args.device}: {error}") from None
    shape = ModelShape.from_config(files.config)
    if ranks > 1:
        check_ranks(manager, ranks)
    offload = getattr(args, "base_offload", "auto")
    base = trained_base(Path(args.checkpoint), shape, manager, args.precision, args.n_bits, ranks, offload)
    beside = getattr(args, "cpu_matmul", "auto")
    if beside != "auto":
        base = base.multiplying_by(beside)
    return Found(args.checkpoint, files, manager, base)


def seeing_images(found: Found, flag: str) -> Found:
    """The same, opened with what of the base sees images. Raises PlanError if nothing does; `flag`: that shows some."""
    if not sees_images(found.files.folder, found.files.config):
        raise PlanError(
            f"{flag}: {found.files.name} has no tower for images, or its folder no preprocessor_config.json. Give a "
            "checkpoint of a model that sees images."
        )
    if found.manager.backend is Backend.MLX:
        raise PlanError(f"{flag}: images are seen by torch's engine only. Use --device cpu or mps.")
    return replace(found, base=found.base.seeing_images())


def check_ranks(manager: BackendManager, ranks: int) -> None:
    """Raises PlanError if several ranks do not share a model on this backend, or this machine has too few devices."""
    if manager.backend is Backend.MLX:
        raise PlanError(f"--world_size {ranks}: MLX answers in one process. Use --device mps or cpu, or one rank.")
    env = rank_env(os.environ)
    devices = manager.num_devices
    if manager.backend is Backend.CUDA:
        check_devices(ranks, env, devices, os.environ)
    elif manager.backend is not Backend.CPU and local_ranks(ranks, env) > devices:
        raise PlanError(f"--world_size {ranks}: ranks of {manager.backend} share one device. Use --world_size 1.")


def open_engine(
    args: Namespace, ranks: Ranks | None = None, found: Found | None = None
) -> tuple[FineTuningEngine, FullTokenizer, set[int], TrainedBase]:
    """(engine for evaluation and generation, tokenizer, stop token ids, the base as it is opened).

    With several `ranks` collective, and each gives what `find` found.
    """
    ranks = ranks or Ranks()
    found = found or find(args, ranks.size)
    checkpoint = found.checkpoint
    files = found.files
    manager = found.manager
    base = found.base
    lines = (lacks_tokenizer(Path(checkpoint), files), *base.lines)
    for line in filter(None, lines) if ranks.is_first and not getattr(args, "quiet", False) else ():
        say(line, file=sys.stderr)
    tokenizer = load_tokenizer(tokenizer_folder(Path(checkpoint), files))
    if manager.backend is Backend.MLX:
        engine, loading_bytes = _open_mlx(checkpoint, files, base.plan, pad_id(tokenizer))
    else:
        device = str(manager.backend)
        gathers_all = {"true": True, "false": False}.get(getattr(args, "gather_weights", "auto"))
        engine, loading_bytes = _open_torch(
            checkpoint, files, device, base.plan, pad_id(tokenizer), ranks.env, gathers_all
        )
    engine.verify("padded" if base.plan.data.images else "auto")
    shape = planned_shape(files, None)
    base = replace(base, shape=shape, device=str(manager.backend), loading_bytes=loading_bytes)
    return engine, tokenizer, stop_ids(tokenizer, files.folder) | generation_ends(Path(checkpoint)), base


def memory_of(engine: Engine, checkpoint: str, base: TrainedBase, work: Work) -> dict | None:
    """{"predicted", "peak", "by_rank"} in bytes above the process after its imports, of what was done since it was
    opened; None where one of them is not known. Collective. `work`: of all ranks; `peak`: the largest of theirs.
    """
    shape = None
    if base.shape:
        shape = base.shape.known
    peaks = [max(pair) for pair in engine.all_gather_object([base.loading_bytes, engine.reset_memory()])]
    if shape is None or not base.loading_bytes:
        return None
    adapted = (Path(checkpoint) / "adapter_config.json").is_file()
    ranks = len(peaks)
    keeps_shards = ranks > 1 and engine.keeps_shards
    work = replace(work, rows=-(-work.rows // ranks))
    found = predicted(base.plan, shape, base.device, work, adapted, ranks, keeps_shards)
    return {"predicted": found["total"], "peak": max(peaks), "by_rank": peaks}


def said_memory(used: dict) -> str:
    """The line of `memory_of`."""
    peaks = ", ".join(map(gib, used["by_rank"]))
    of = ""
    if len(used["by_rank"]) > 1:
        of = f" on {len(used['by_rank'])} ranks"
    return f"memory above imports: {peaks}{of} ({gib(used['predicted'])} predicted)"


def _open_mlx(checkpoint: str, files: ModelFiles, plan: Parts, pad: int) -> tuple[FineTuningEngine, int]:
    if package_version("mlx-lm") is None:
        raise PlanError("--device mlx: mlx-lm is not installed. pip install mlx-lm.")
    from finetune.mlx_engine import load, logit_check

    def reference(folder: Path, ids: np.ndarray):
        from finetune.torch_engine.transformers_logits import logits

        return logits(folder, ids)

    engine = load.open_trained(Path(checkpoint), files, plan, pad)  # which verifies the files
    logit_check.check_opened(files, reference)
    return engine, 0


def _open_torch(
    checkpoint: str, files: ModelFiles, device: str, plan: Parts, pad: int, env: RankEnv, gathers_all: bool | None
) -> tuple[FineTuningEngine, int]:
    from finetune.torch_engine.base_offload import BaseOffload
    from finetune.torch_engine.device import device_of, prepare_attention
    from finetune.torch_engine.engine import TorchEngine
    from finetune.torch_engine.memory_stats import current_resident_bytes
    from finetune.torch_engine.parallel.parallelize import parallelize
    from finetune.torch_engine.parallel.process_groups import ProcessGroups
    from finetune.torch_engine.weights.load import load_trained
    from finetune.torch_engine.weights.local_shards import LocalShards

    prepare_torch(plan.precision.onednn, env.local_size)
    where = device_of(device, env.local_rank if env.size > 1 else None)
    baseline = current_resident_bytes()
    prepare_attention(where)
    groups = ProcessGroups.of(env, plan.dims, where)
    local_shards = LocalShards.of(groups, plan)
    offload = None
    if plan.memory.base_offload:
        offload = BaseOffload(plan.memory.base_offload, recomputes=False)
    with contextlib.redirect_stdout(sys.stderr):  # which has answers alone
        model = load_trained(checkpoint, files, where, plan, local_shards, offload)
    if offload:
        offload.attach(model)
    parallel = parallelize(model, plan, groups, local_shards, pad)
    parallel.gathers_all = gathers_all
    engine = TorchEngine(parallel, plan)
    return engine, engine.begin_memory(baseline)
