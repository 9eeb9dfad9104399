"""Edits of what programs read: shards, adapters, published files, quantized tensors: refused, or without effect."""

import json
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

import export
import generate
from finetune.adapters.saved import read_adapter
from finetune.errors import CheckpointDamagedError
from finetune.model_files.manifest import MANIFEST, PUBLISHED
from finetune.safetensors_io import INDEX
from finetune.torch_engine.weights.stream import load_dense
from tests.rig import mutate
from tests.rig.batch import Finding, Mutant
from tests.rig.materials import NUM_STEPS, Place
from tests.support.decoded_folders import METHODS, stored

WEIGHTS, ADAPTER, CONFIG = "model.safetensors", "adapter_model.safetensors", "adapter_config.json"
STEP = f"run/checkpoints/step-{NUM_STEPS}"


def opened(folder: Path) -> None:
    generate.main(["--checkpoint", str(folder), "--prompt", "1 plus", "--max_new_tokens", "2", "--device", "cpu"])


def copied(whole: Path, folder: Path, *without: str) -> None:
    """The files of `whole` that the mutant does not bring itself."""
    for file in whole.iterdir():
        if file.is_file() and file.name not in (".lock", *without) and not (folder / file.name).exists():
            shutil.copy(file, folder)


@dataclass
class ReaderBatch:
    """argv: what is edited, and of an adapter the format it is exported to."""

    variants: tuple = ("lora", "full-2")
    weights: dict = field(default_factory=dict)  # of the intact folders

    def prepare(self, place: Place) -> Place:
        return place

    def mutant(self, rng: random.Random, place: Place) -> Mutant:
        kind = rng.choice(("parts", "adapter", "adapter", "published"))
        run = place.whole("lora") / "run"
        if kind == "parts":
            tree = json.loads((place.whole("full-2") / STEP / INDEX).read_text())
            return Mutant({INDEX: mutate.json_text(rng, _edited_parts(rng, tree))}, (kind,))
        if kind == "adapter":
            config = json.loads((run / CONFIG).read_text())
            odd = (float("nan"), float("inf"), 10**400, 1e308, 0, -1, 3, 10**12, None, "x", {}, [], True, 4.5)
            config[rng.choice(("r", "lora_alpha", "use_dora", "use_rslora"))] = rng.choice(odd)
            found = config if rng.random() < 0.7 else mutate.mutated_json(rng, config)
            return Mutant({CONFIG: mutate.json_text(rng, found)}, (kind, rng.choice(("hf", "peft", "mlx-lm"))))
        name = rng.choice([f.name for pattern in PUBLISHED for f in sorted(run.glob(pattern))])
        data = (run / name).read_bytes()
        changed = bytearray(data)
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return Mutant({name: bytes(changed) if rng.random() < 0.8 else mutate.mutated_bytes(rng, data)}, (kind, name))

    def check(self, mutant: Mutant, folder: Path, place: Place) -> None:
        kind, *more = mutant.argv
        if kind == "parts":
            self.check_parts(folder, place)
        elif kind == "adapter":
            check_adapter(folder, place, *more)
        else:
            check_published(mutant, folder, place, *more)

    def check_parts(self, folder: Path, place: Place) -> None:
        whole = place.whole("full-2") / STEP
        copied(whole, folder, MANIFEST)
        copied(whole.parents[1], folder, MANIFEST, WEIGHTS)
        opened(folder)
        self.compare("parts", whole, folder)

    def compare(self, key: str, whole: Path, folder: Path) -> None:
        """Raises Finding unless the folder's weights are those of the intact one."""
        if key not in self.weights:
            self.weights[key] = load_dense(whole, torch.float32).state_dict()
        for name, tensor in load_dense(folder, torch.float32).state_dict().items():
            if not torch.equal(tensor, self.weights[key][name]):
                raise Finding("differing_bits", f"{name} is read as another weight")


def _edited_parts(rng: random.Random, tree: dict):
    """An index with a part, a shape or a file changed, or any nodes."""
    if rng.random() < 0.5:
        return mutate.mutated_json(rng, tree)
    entry = rng.choice(list(tree["tensors"][WEIGHTS].values()))
    part = rng.choice(entry["parts"])
    kind = rng.randrange(5)
    if kind == 0:
        entry["parts"].remove(part)
    elif kind == 1:
        part[rng.choice(("offset", "shape"))] = [rng.randrange(-2, 40) for _ in entry["shape"]]
    elif kind == 2:
        part["file"] = rng.choice((f"../{part['file']}", f"/{part['file']}", "x", "", "..", WEIGHTS))
    elif kind == 3:
        entry["dtype"] = rng.choice(("F16", "BF16", "I32", "F64", "x"))
    else:
        entry["parts"].append(rng.choice(entry["parts"]))
    return tree


def check_adapter(folder: Path, place: Place, to: str) -> None:
    """What is exported of an adapter without a manifest is finite, and consistent in itself."""
    copied(place.whole("lora") / "run", folder, MANIFEST)
    out = folder / "out"
    export.main(["--checkpoint", str(folder), "--output_dir", str(out), "--to", to])
    if to == "hf":
        tensors = {name: t.float().numpy() for name, t in load_file(out / WEIGHTS).items()}
    else:
        _, tensors = read_adapter(out)
    if not all(np.isfinite(t).all() for t in tensors.values()):
        raise Finding("differing_bits", f"--to {to} wrote numbers that are not finite")


def check_published(mutant: Mutant, folder: Path, place: Place, name: str) -> None:
    """A file that is not as its manifest says is never used."""
    whole = place.whole("lora") / "run"
    copied(whole, folder)
    if mutant.files[name] == (whole / name).read_bytes():
        return
    try:
        opened(folder)
    except CheckpointDamagedError:
        return
    raise Finding("differing_bits", f"{name} was used though its manifest names another")


@dataclass
class StoredBatch(ReaderBatch):
    """argv: the method, and the edit of one tensor of its folder."""

    variants: tuple = ()

    def mutant(self, rng: random.Random, place: Place) -> Mutant:
        method = rng.choice(METHODS)
        return Mutant({}, (method, str(rng.randrange(2**31))))

    def check(self, mutant: Mutant, folder: Path, place: Place) -> None:
        method, seed = mutant.argv
        whole = place.once(f"stored-{method.replace(' ', '-')}", lambda made: stored(made, method))
        tensors = load_file(whole / WEIGHTS)
        edit_tensor(random.Random(int(seed)), tensors)
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / WEIGHTS)
        copied(whole, folder)
        self.compare(method, whole, folder)


PARTS = ("qweight", "qzeros", "scales", "g_idx", "packed", "scale", "scale_inv", "zero_point", "shape", "blocks")
DTYPES = (torch.int32, torch.int16, torch.uint8, torch.int8, torch.int64, torch.float64, torch.float8_e5m2)


def edit_tensor(rng: random.Random, tensors: dict) -> None:
    """Deletes, cuts, grows, turns or casts one stored tensor of a quantized weight, or makes a number not finite."""
    name = rng.choice([n for n in sorted(tensors) if n.endswith(PARTS)])
    tensor = tensors.pop(name)
    kind = rng.randrange(6)
    if kind == 1:
        axis = rng.randrange(tensor.ndim)
        tensors[name] = tensor.narrow(axis, 0, rng.randrange(1, tensor.shape[axis] + 1))
    elif kind == 2:
        axis = rng.randrange(tensor.ndim)
        tensors[name] = tensor.repeat_interleave(rng.choice((2, 3)), axis)
    elif kind == 3:
        tensors[name] = tensor.transpose(0, -1) if tensor.shape[0] != tensor.shape[-1] else tensor[:1]
    elif kind == 4:
        tensors[name] = tensor.to(rng.choice([d for d in DTYPES if d != tensor.dtype]))
    elif kind == 5:
        flat = tensor.flatten()
        odd = (float("nan"), float("inf")) if tensor.is_floating_point() else (10**6,)
        if tensor.is_floating_point() or name.endswith(("g_idx", "shape")):
            flat[rng.randrange(len(flat))] = rng.choice(odd)
        tensors[name] = flat.reshape(tensor.shape)


READERS = ReaderBatch()
STORED = StoredBatch()
