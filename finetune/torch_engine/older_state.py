"""State dicts of the older scripts, read into PEFT's layout or a full model; and a run as a plain checkpoint.

The older scripts saved trained tensors under their modules' names: `lora_AB.0` and `lora_AB.1`, PEFT's
`lora_A.default`, or `dora_layer` with `magnitude_layer`. Shapes: R rank, O and I of the adapted weight.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from finetune.adapters.config import PEFT_VERSION, shortest_targets
from finetune.adapters.saved import read_adapter
from finetune.checkpoint.store import newest_checkpoint
from finetune.config import TrainConfig
from finetune.errors import PlanError
from finetune.estimate.model_shape import read_headers
from finetune.model_files.files import ModelFiles
from finetune.parts.parts import Parts
from finetune.system.files import replace
from finetune.system.untrusted import untrusted
from finetune.torch_engine import optim
from finetune.torch_engine.lora.peft_format import PREFIX
from finetune.torch_engine.weights.save import write_model_folder
from finetune.torch_engine.weights.stream import config_dtype, load_dense

# Words of module wrappers within the older names.
WRAPPERS = re.compile(
    r"(^|\.)(_fsdp_wrapped_module|_checkpoint_wrapped_module|_offload_wrapped_module|_orig_mod|module)(?=\.)"
)
# An adapter tensor's older name -> (its name in PEFT's layout, True for the older DoRA layers).
ADAPTER_NAMES = (
    (re.compile(r"\.lora_AB\.0\.weight$"), ".lora_A.weight", False),
    (re.compile(r"\.lora_AB\.1\.weight$"), ".lora_B.weight", False),
    (re.compile(r"\.dora_layer\.lora_(A|B)\.weight$"), r".lora_\1.weight", True),
    (re.compile(r"\.magnitude_layer\.magnitude$"), ".lora_magnitude_vector", True),
    (re.compile(r"\.lora_(A|B)(\.default)?\.weight$"), r".lora_\1.weight", False),
    (re.compile(r"\.lora_magnitude_vector(\.default)?(\.weight)?$"), ".lora_magnitude_vector", False),
)
PLAIN_KEYS = ("model_state_dict", "optimizer_state_dict", "backend", "precision", "quantization")
OLDER_ALPHA = 16.0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class OlderState:
    """Tensors by their clean names, and what a user should know of how they were read."""

    file: Path
    tensors: dict
    notices: tuple[str, ...]
    adapter_config: dict  # of a plain checkpoint that --plain wrote
    backend: str | None = None  # where it will run


def read_state(file: Path, backend: str | None = None) -> OlderState:
    """A state dict from safetensors or from a pickle read with weights_only, for use on `backend`. Raises PlanError.
    A plain checkpoint's weights in bf16 become fp16 for mps.
    """
    label = f"--from_older {file}"
    if re.search(r"-\d{5}-of-\d{5}\.", file.name):
        raise PlanError(f"{label}: is one shard of several. Merge them into one file first.")
    if not file.is_file():
        raise PlanError(f"{label}: no such file. Give the older run's model_state_dict.safetensors, or a .pt file.")
    with untrusted(
        f"{label}: cannot be read", "Give a state dict in safetensors, or one that torch.load reads safely."
    ):
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            content = load_file(file)
        else:
            content = torch.load(file, map_location="cpu", weights_only=True)
    plain = isinstance(content, dict) and isinstance(content.get("model_state_dict"), dict)
    facts, tensors = (content, content["model_state_dict"]) if plain else ({}, content)
    if not isinstance(tensors, dict) or not tensors or not all(map(_is_named_tensor, tensors.items())):
        raise PlanError(f"{label}: is not a state dict of tensors. Give the older run's model_state_dict.")
    clean = {WRAPPERS.sub("", name).lstrip("."): t for name, t in tensors.items()}
    notices = []
    if len(clean) < len(tensors):
        raise PlanError(f"{label}: has one weight under two names. Give the state dict of one model.")
    tensors = clean
    in_bf16 = {name for name, t in tensors.items() if t.dtype == torch.bfloat16}
    if backend == "mps" and in_bf16:
        tensors = {n: t.half() if n in in_bf16 else t for n, t in tensors.items()}
        over = [n for n in sorted(in_bf16) if not tensors[n].isfinite().all()]
        if over:
            raise PlanError(f"{label}: {over[0]} exceeds fp16's 65504. Omit --for_backend mps.")
        notices.append("Converting bf16 to fp16 for MPS")
    if backend == "mlx":
        notices.append("Direct loading not supported, conversion required: the folder written here is the conversion")
    config = facts.get("adapter_config")
    return OlderState(file, tensors, tuple(notices), config if isinstance(config, dict) else {}, backend)


def _is_named_tensor(item: tuple) -> bool:
    return isinstance(item[0], str) and torch.is_tensor(item[1])


def adapter_of(state: OlderState) -> tuple[dict[str, torch.Tensor], bool]:
    """({PEFT key: tensor}, True for the older DoRA layers) of a state dict; ({}, False) if it has no adapter."""
    found = {}
    dora = False
    for name, tensor in state.tensors.items():
        for pattern, ours, is_dora in ADAPTER_NAMES:
            owner, count = pattern.subn(ours, name)
            if count:
                found[PREFIX + owner.removeprefix(PREFIX)] = tensor
                dora = dora or is_dora
                break
    return found, dora


def write_adapter(state: OlderState, base: ModelFiles, folder: Path, lora_alpha: float | None = None) -> str:
    """Writes PEFT's adapter of this state on `base` (ModelFiles), and says what it is. Raises PlanError.

    `lora_alpha` None: what the file says, else 16 as there; the older DoRA layers did not scale B @ A, so the rank.
    """
    from safetensors.torch import save_file

    label, (tensors, unscaled) = f"--from_older {state.file}", adapter_of(state)
    other = next((n for n in state.tensors if ".lora_embedding_" in n), None)
    if other:
        raise PlanError(f"{label}: {other} is of an embedding, which this form does not hold. Use export.py --to peft.")
    dora = unscaled or any(name.endswith("lora_magnitude_vector") for name in tensors)
    odd = [n for n, t in tensors.items() if not _is_factor(n, t)]
    if odd:
        raise PlanError(f"{label}: {odd[0]} is not a matrix of finite numbers. Give a complete file.")
    shapes = read_headers(base.weight_files)
    owners = sorted({re.sub(r"\.lora_(A\.weight|B\.weight|magnitude_vector)$", "", n) for n in tensors})
    rank = next((t.shape[0] for n, t in tensors.items() if n.endswith("lora_A.weight")), 0)
    for owner in owners:
        module = owner.removeprefix(PREFIX)
        pair = [tensors.get(f"{owner}.lora_{side}.weight") for side in "AB"]
        weight = shapes.get(f"{module}.weight")
        if weight is None and any(name.startswith(f"{module}.") for name in shapes):
            raise PlanError(f"{label}: {module} are experts, which this form does not hold. Use export.py --to peft.")
        if weight is None or len(weight) != 2:
            raise PlanError(
                f"{label}: adapts {module}, which {base.name} does not have. Give the base it was trained on."
            )
        there = [t for t in pair if t is not None]
        if [tuple(t.shape) for t in there] != [(rank, weight[1]), (weight[0], rank)]:
            found = [list(t.shape) for t in there]
            raise PlanError(
                f"{label}: {module} has factors {found}, and {base.name} needs rank {rank} for {list(weight)}. Give "
                "the base it was trained on."
            )
        magnitude = tensors.get(f"{owner}.lora_magnitude_vector")
        if dora and (magnitude is None or magnitude.numel() != weight[0]):
            many = "none"
            if magnitude is not None:
                many = str(magnitude.numel())
            raise PlanError(f"{label}: {module} needs {weight[0]} DoRA magnitudes, found {many}. Give a complete file.")
    adapted = [owner.removeprefix(PREFIX) for owner in owners]
    modules = [n.removesuffix(".weight") for n in shapes]
    tensors = {n: t.reshape(-1) if n.endswith("magnitude_vector") else t for n, t in tensors.items()}
    alpha = state.adapter_config.get("lora_alpha", float(rank) if unscaled else OLDER_ALPHA)
    alpha = alpha if lora_alpha is None else lora_alpha
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < float("inf"):
        raise PlanError(f"{label}: lora_alpha is {alpha!r}, not a positive number. Give --lora_alpha.")
    config = {
        "peft_type": "LORA",
        "peft_version": PEFT_VERSION,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.name,
        "revision": base.revision,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": shortest_targets(adapted, modules),
        "use_dora": dora,
        "use_rslora": bool(state.adapter_config.get("use_rslora")),
        "bias": "none",
        "inference_mode": True,
    }
    copies = {n: t.clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}  # none shares memory
    save_file(copies, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    (folder / "base_model.json").write_text(json.dumps({"name": base.name, "digest": base.digest}, indent=1) + "\n")
    kind = "DoRA" if dora else "LoRA"
    rest = len(state.tensors) - len(tensors)
    unused = ""
    if rest:
        unused = f"; {rest} other tensors of the file are not used"
    return f"{kind} adapter of rank {rank}, alpha {alpha:g}, on {len(owners)} layers of {base.name}{unused}"


def _is_factor(name: str, tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.isfinite().all()) and (".lora_m" in name or tensor.dim() == 2)


@torch.no_grad()
def write_model(state: OlderState, base: ModelFiles, folder: Path, dtype: str) -> str:
    """Writes `base` with this state's weights in place of its own, and says what it is. Raises PlanError."""
    if dtype == "auto":
        target = config_dtype(base.config)
    else:
        target = DTYPES[dtype]
    if state.backend == "mps" and target == torch.bfloat16:
        target = torch.float16
    model = load_dense(base.folder, target)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    label = f"--from_older {state.file}"
    replaced = 0
    for name, tensor in state.tensors.items():
        if name not in parameters or parameters[name].shape != tensor.shape:
            held = "not there"
            if name in parameters:
                held = str(list(parameters[name].shape))
            raise PlanError(
                f"{label}: contains {name} {list(tensor.shape)}, which in {base.name} is {held}. Give the base it was "
                "trained on."
            )
        parameters[name].copy_(tensor)
        replaced += 1
    write_model_folder(model, folder, target)
    return f"model with {replaced} of {len(parameters)} weights from the file, the others {base.name}'s"


def write_plain(run: Path, file: Path, dtype: str) -> str:
    """Writes a run's newest checkpoint as one pickle of PLAIN_KEYS that torch.load reads safely. Raises PlanError."""
    from safetensors.torch import load_file

    label = f"--checkpoint {run}"
    saved, _ = newest_checkpoint(run)
    if saved:
        folder = saved.folder
    else:
        folder = run
    weights = [n for n in ("adapter_model", "trained_blocks", "model") if (folder / f"{n}.safetensors").is_file()]
    needed = [folder / name for name in ("run_plan.json", "train_state.json", "optimizer.safetensors")]
    if not weights or not all(path.is_file() for path in needed):
        raise PlanError(
            f"{label}: has no checkpoint with one file of weights and one of moments. Give a run's output_dir."
        )
    with untrusted(f"{folder}: cannot be read", "Give a complete checkpoint."):
        settled = json.loads(needed[0].read_text(encoding="utf-8"))["settled"]
        counts = json.loads(needed[1].read_text(encoding="utf-8"))["engine"]["counts"]
        tensors = load_file(folder / f"{weights[0]}.safetensors")
        moments = load_file(needed[2])
        plan = Parts(TrainConfig(**{k: v for k, v in settled.items() if k in TrainConfig.__dataclass_fields__}))
        named = {name: nn.Parameter(tensor) for name, tensor in tensors.items()}
        ratios = optim.ratios_of(plan.trains, named, seeing=())
        optimizer = optim.build(named, plan.steps, torch.device("cpu"), ratios)
        optim.load_state(optimizer, named, {n: np.asarray(t) for n, t in moments.items()}, counts)
    quantization = plan.quantization
    to = DTYPES.get(dtype)
    content = {
        "model_state_dict": {n: t if to is None else t.to(to) for n, t in tensors.items()},
        "optimizer_state_dict": optimizer.state_dict(),
        "backend": settled["backend"],
        "precision": plan.precision.word if to is None else dtype,
        "quantization": f"{quantization.method}-{quantization.bits}bit" if quantization else "none",
    }
    if weights[0] == "adapter_model":
        config, _ = read_adapter(folder)
        content["adapter_config"] = {name: config.get(name) for name in ("r", "lora_alpha", "use_dora", "use_rslora")}
    with replace(file) as opened:
        torch.save(content, opened)
    return f"{len(tensors)} tensors of {folder}, {content['quantization']}, from {content['backend']}"
