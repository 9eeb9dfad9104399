"""Opens a trained checkpoint, or any model, for inference: shared by generate.py, score.py and export.py."""

import json
import sys
from dataclasses import replace
from pathlib import Path

from backend_manager import Backend, BackendManager, auto_cpu_matmul, package_version
from finetune.checkpoint.published import verify_texts
from finetune.checkpoint.store import steps_of
from finetune.errors import PlanError
from finetune.estimate.inference import Work, predicted
from finetune.estimate.model_shape import ModelShape, planned_shape
from finetune.model_files.files import ModelFiles, find_model
from finetune.model_files.tokenizer import end_ids, load_tokenizer, pad_id
from finetune.plan.parts import Parts
from finetune.system.terminal import say
from finetune.system.untrusted import untrusted
from finetune.trained_base import TrainedBase, trained_base


def add_flags(parser) -> None:
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


def base_of(checkpoint: str) -> ModelFiles:
    """Files of the full model: the checkpoint itself, or the base model named by its adapter.

    Raises PlanError; CheckpointDamagedError for a folder whose files are not those that its manifest names.
    """
    folder = Path(checkpoint)
    if folder.is_dir():
        verify_texts(folder)
    config, weights = folder / "adapter_config.json", "adapter_model.safetensors"
    if (folder / "trained_blocks.json").is_file():
        config, weights = folder / "trained_blocks.json", "trained_blocks.safetensors"
    if not config.is_file():
        steps = [] if (folder / "config.json").is_file() else steps_of(folder)
        if steps:
            raise PlanError(f"--checkpoint {checkpoint}: the run did not finish. Give {steps[0]}.")
        if folder.is_dir() and not (folder / "config.json").is_file():
            raise PlanError(
                f"--checkpoint {checkpoint}: has no config.json and no adapter_config.json. Give an output_dir."
            )
        return find_model(checkpoint, None, flag="--checkpoint")
    if not (folder / weights).is_file():
        raise PlanError(f"--checkpoint {checkpoint}: has {config.name} but no {weights}.")
    with untrusted(f"{config}: has no base_model_name_or_path", "Give a complete adapter."):
        content = json.loads(config.read_text(encoding="utf-8"))
        base, revision = content["base_model_name_or_path"], content.get("revision")
        if not isinstance(base, str) or not isinstance(revision, str | None):
            raise TypeError(f"it is {json.dumps(base)[:80]} at revision {json.dumps(revision)[:80]}, must be text")
    files = find_model(base, revision, flag=f"{config}: base_model_name_or_path")
    beside, digest = folder / "base_model.json", content.get("base_digest")
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


def is_recursive(checkpoint: str) -> bool:
    """True for what pretrain.py wrote: a step_N or a run's folder, or a file that TinyRecursiveModels wrote."""
    path = Path(checkpoint)
    if path.is_file():
        return path.name.startswith("step_")
    config = path / "config.json"
    return config.is_file() and '"tiny_recursive"' in config.read_text(encoding="utf-8", errors="replace")[:200]


def open_recursive(args):
    """(the model of a pretraining checkpoint as a `RecursiveGenerator`, its tokenizer, stop token ids)."""
    from finetune.data.pretraining.chat_tokens import ChatTokenizer
    from finetune.plan.pretrain import select_device
    from finetune.torch_engine.device import device_of
    from finetune.torch_engine.recursive.generate import RecursiveGenerator
    from finetune.torch_engine.recursive.weights import open_model

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


def prepare_torch(onednn: bool) -> None:
    """This process's compute threads, and whether oneDNN computes its fp32 products."""
    from finetune.torch_engine.device import set_num_threads, set_onednn

    set_num_threads()
    set_onednn(onednn)


def open_engine(args):
    """(engine for evaluation and generation, tokenizer, stop token ids, the base as it is opened)."""
    files = base_of(args.checkpoint)
    try:
        manager = BackendManager(args.device, verbose=False) if args.device else BackendManager.from_env(verbose=False)
    except ValueError as error:
        raise PlanError(f"--device {args.device}: {error}") from None
    shape = ModelShape.from_config(files.config)
    base = trained_base(Path(args.checkpoint), shape, manager, args.precision, args.n_bits)
    for line in base.lines if not getattr(args, "quiet", False) else ():
        say(line, file=sys.stderr)
    tokenizer = load_tokenizer(tokenizer_folder(Path(args.checkpoint), files))
    open_on = _open_mlx if manager.backend is Backend.MLX else _open_torch
    engine, loading_bytes = open_on(args.checkpoint, files, str(manager.backend), base.plan, pad_id(tokenizer))
    engine.verify("auto")
    shape = planned_shape(files, None)
    base = replace(base, shape=shape, device=str(manager.backend), loading_bytes=loading_bytes)
    return engine, tokenizer, end_ids(tokenizer, files.folder), base


def memory_of(engine, checkpoint: str, base: TrainedBase, work: Work) -> dict | None:
    """{"predicted", "peak"} in bytes above the process after its imports, of what was done since it was opened; None
    where one of them is not known.
    """
    shape = base.shape.known if base.shape else None
    if shape is None or not base.loading_bytes:
        return None
    adapted = (Path(checkpoint) / "adapter_config.json").is_file()
    found = predicted(base.plan, shape, base.device, work, adapted)
    return {"predicted": found["total"], "peak": max(base.loading_bytes, engine.reset_memory())}


def _open_mlx(checkpoint: str, files: ModelFiles, device: str, plan: Parts, pad: int):
    if package_version("mlx-lm") is None:
        raise PlanError("--device mlx: mlx-lm is not installed. pip install mlx-lm.")
    from finetune.mlx_engine import load, logit_check

    def reference(folder, ids):
        from finetune.torch_engine.transformers_logits import logits

        return logits(folder, ids)

    logit_check.check_opened(files, reference)
    return load.open_trained(Path(checkpoint), files, plan, pad), 0


def _open_torch(checkpoint: str, files: ModelFiles, device: str, plan: Parts, pad: int):
    from finetune.torch_engine.device import device_of
    from finetune.torch_engine.engine import TorchEngine
    from finetune.torch_engine.memory_stats import current_resident_bytes
    from finetune.torch_engine.parallel.parallelize import parallelize
    from finetune.torch_engine.parallel.process_groups import ProcessGroups
    from finetune.torch_engine.weights.load import load_trained

    prepare_torch(plan.precision.onednn)
    where, baseline = device_of(device), current_resident_bytes()
    model = load_trained(checkpoint, files, where, plan)
    engine = TorchEngine(parallelize(model, plan, ProcessGroups(device=where), pad_id=pad), plan)
    return engine, engine.begin_memory(baseline)


def tokenizer_folder(checkpoint: Path, files: ModelFiles) -> Path:
    """Folder of the tokenizer: the checkpoint itself, the run of its step-N or best folder, or the base."""
    for folder in (checkpoint, checkpoint.resolve().parent, checkpoint.resolve().parent.parent):
        run = folder == checkpoint or (folder / "run_plan.json").is_file()
        if run and (folder / "tokenizer_config.json").is_file():
            return folder
    return files.folder
