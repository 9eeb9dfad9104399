"""Merges an adapter into its base one tensor at a time, and checks what was written against base + adapter.

Each tensor is read, changed a few rows at a time and written; nothing else of the model is in memory. Formulas as in
lora/layers.py and experts/fused.py.

R rank, I in_features, O out_features, V vocabulary, H hidden size, N rows and M columns of a tensor as it is stored.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from finetune.adapters.heads import HeadRecord
from finetune.adapters.modules import own_weights
from finetune.adapters.patterns import PREFIX, Uniform
from finetune.adapters.saved import CONFIG, open_adapter
from finetune.errors import PlanError
from finetune.model_files.files import ModelFiles
from finetune.model_files.llama_pro import TRAINED
from finetune.model_files.published import verified
from finetune.safetensors_io import FloatTensors
from finetune.system.progress import Progress, each
from finetune.system.untrusted import untrusted
from finetune.torch_engine.experts import fused
from finetune.torch_engine.heads import add_empty
from finetune.torch_engine.lora.adapters import attach_tensors, remove_adapters, untie_if_different
from finetune.torch_engine.lora.layers import LoRAEmbedding, LoRALinear
from finetune.torch_engine.lora.peft_format import disk_name
from finetune.torch_engine.lora.saved_modules import in_file, vocabulary_of
from finetune.torch_engine.weights.files import files_of
from finetune.torch_engine.weights.lazy import AT_ONCE, LazyWeights, row_blocks, slices_of
from finetune.torch_engine.weights.load import DENSE_FP32, load_trained
from finetune.torch_engine.weights.save import StreamedSave
from finetune.torch_engine.weights.stream import empty_model, load_dense
from finetune.torch_engine.weights.vocabulary import ends_of

NUM_INPUTS = 4  # random vectors that a layer is checked with
# fp32 sums of thousands of products in two orders; a type's rounding is at most half its eps of each weight.
LEAST_TOLERANCE = 1e-5
AGAIN = "Give another checkpoint."


@dataclass(frozen=True)
class LowRank:
    """An adapter's change of one stored matrix [N, M]: scaling * left [N, R] @ right [R, M]."""

    left: torch.Tensor
    right: torch.Tensor
    scaling: float


@dataclass(frozen=True)
class Change:
    """The adapter of one tensor. `parts()` reads its factors: one, or one for each expert of a stack.

    `magnitude()`: DoRA's, or None; `gain_axis`: the axis of the stored matrix that it is for. `turned`: inputs are
    along the rows of the stored matrix, as in Conv1D; `table`: an embedding, whose inputs are rows.
    """

    parts: Callable[[], list[LowRank]]
    magnitude: Callable[[], torch.Tensor | None]
    gain_axis: int
    turned: bool
    table: bool = False

    def apply(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The merged tensor in `dtype`, computed in fp32 and rounded once; `weight` may become it."""
        if weight.dtype == dtype:
            out = weight
        else:
            out = torch.empty(weight.shape, dtype=dtype)
        stacked = weight.ndim == 3
        magnitude = self.magnitude()
        for i, part in enumerate(self.parts()):
            one, into = (weight[i], out[i]) if stacked else (weight, out)
            if magnitude is None:
                gain = None
            else:
                gain = self._gain(one, part, magnitude)
            for rows in slices_of(one.shape):
                block = _added(one, part, rows)
                if gain is not None:
                    block *= gain[rows].unsqueeze(1) if self.gain_axis == 0 else gain
                into[rows] = block.to(dtype)
        return out

    def _gain(self, weight: torch.Tensor, part: LowRank, magnitude: torch.Tensor) -> torch.Tensor:
        """m / |W + s B A|, one for each output."""
        square = torch.zeros(weight.shape[self.gain_axis], dtype=torch.float32)
        for rows in slices_of(weight.shape):
            squares = _added(weight, part, rows).square_()
            if self.gain_axis == 0:
                square[rows] = squares.sum(1)
            else:
                square += squares.sum(0)
        return magnitude / square.sqrt()

    @property
    def forward(self) -> bool:
        """True if the stored matrix has inputs along its rows: x W, not x W^T."""
        return self.turned or self.table

    def product(
        self, weight: torch.Tensor, part: LowRank, magnitude: torch.Tensor | None, x: torch.Tensor
    ) -> torch.Tensor:
        """x [K, inputs] through base and adapter, each alone, as training computes it: fp32, one row per vector."""
        forward = self.forward
        if forward:
            low = x @ part.left
        else:
            low = x @ part.right.t()
        added = low @ (part.right if forward else part.left.t())
        out = _times(weight, x, forward) + part.scaling * added
        if magnitude is not None:
            out *= magnitude / self._expanded_norm(weight, part)
        return out

    def _expanded_norm(self, weight: torch.Tensor, part: LowRank) -> torch.Tensor:
        """|W + s B A| without the sum: |w|^2 + 2 s b.(A w) + s^2 |b A|^2 (lora/layers.py's weight_norm)."""
        left = part.left
        right = part.right
        s = part.scaling
        if self.gain_axis == 0:
            square = torch.cat([weight[r].float().square().sum(1) for r in slices_of(weight.shape)])
            cross = (torch.cat([weight[r].float() @ right.t() for r in slices_of(weight.shape)]) * left).sum(1)
            return (square + 2 * s * cross + s * s * ((left @ (right @ right.t())) * left).sum(1)).sqrt()
        square = reduce(torch.add, (weight[r].float().square().sum(0) for r in slices_of(weight.shape)))
        cross = (sum(left[r].t() @ weight[r].float() for r in slices_of(weight.shape)) * right).sum(0)
        return (square + 2 * s * cross + s * s * (((left.t() @ left) @ right) * right).sum(0)).sqrt()


def _changes_towers(checkpoint: Path, model: PreTrainedModel) -> bool:
    """True if an adapter has tensors of towers, which the model leaves out."""
    towers: Any = model.left_out
    if not towers or not (checkpoint / CONFIG).is_file():
        return False
    _, tensors = open_adapter(checkpoint)
    return any(name.removeprefix(PREFIX).startswith(tuple(f"{n}." for n in towers)) for name in tensors.shapes)


def _added(weight: torch.Tensor, part: LowRank, rows: slice) -> torch.Tensor:
    if weight.dtype != torch.float32:
        block = weight[rows].float()
    else:
        block = weight[rows].clone()
    return block.addmm_(part.left[rows], part.right, alpha=part.scaling)


def _times(weight: torch.Tensor, x: torch.Tensor, forward: bool) -> torch.Tensor:
    """x W [K, M], or x W^T [K, N], in fp32."""
    if forward:
        return reduce(torch.add, (x[:, rows] @ weight[rows].float() for rows in slices_of(weight.shape)))
    return torch.cat([x @ weight[rows].float().t() for rows in slices_of(weight.shape)], 1)


@dataclass(frozen=True)
class Merge:
    """Base and adapter of a checkpoint: `read(name, dtype)` is one merged tensor of the model's state.

    `replaced`: tensors that the checkpoint has in place of the base's.
    """

    checkpoint: Path
    base: LazyWeights
    changes: Mapping[str, Change]
    replaced: Mapping[str, Callable[[], torch.Tensor]]

    @classmethod
    def of(cls, checkpoint: Path, folder: Path) -> "Merge":
        """Raises PlanError unless the checkpoint's adapter, or its added layers, fit the base in `folder`."""
        plain = empty_model(folder, torch.float32)
        base = LazyWeights(folder, vocabulary_of(plain, in_file(checkpoint)), _changes_towers(checkpoint, plain))
        add_empty(base.model, HeadRecord.read(checkpoint))
        with untrusted(
            f"--checkpoint {checkpoint}: is damaged, or does not fit its base", "Give a complete checkpoint."
        ):
            if (checkpoint / CONFIG).is_file():
                config, tensors = open_adapter(checkpoint)
                changes, replaced = _attached(base.model, config, tensors, checkpoint / CONFIG)
            else:
                changes = {}
                replaced = _blocks_of(base.model, checkpoint)
        return cls(checkpoint, base, changes, replaced)

    @property
    def fp32_bytes(self) -> int:
        """Memory of the full model in fp32."""
        return sum(4 * tensor.numel() for tensor in self.base.model.state_dict().values())

    def original(self, name: str) -> torch.Tensor:
        """The base's tensor, or what the checkpoint has in its place."""
        if name in self.replaced:
            return self.replaced[name]().to(torch.float32)
        return self.base.read(name)

    def blocks(self, name: str) -> Iterator[torch.Tensor]:
        """`original`, some rows at a time."""
        if name in self.replaced:
            return row_blocks(self.replaced[name]())
        return self.base.blocks(name)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        tensor = self.original(name)
        if not tensor.is_floating_point():
            return tensor
        change = self.changes.get(name)
        if change:
            merged = change.apply(tensor, dtype)
        else:
            merged = tensor.to(dtype)
        if not _all_finite(merged):
            remedy = "Use --dtype bf16." if dtype == torch.float16 else AGAIN
            raise PlanError(
                f"--checkpoint {self.checkpoint}: {name} of base and adapter has numbers that are not finite in "
                f"{str(dtype).removeprefix('torch.')}. {remedy}"
            )
        return merged

    def write(self, folder: Path, dtype: torch.dtype) -> None:
        """Writes the merged model into an empty folder, as save_pretrained would, with what else the base's has."""
        model = self.base.model
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        progress = Progress("merging", len(shapes), "tensors")
        with verified(Path(model.name_or_path), files_of(model.name_or_path)), progress:
            StreamedSave.of(model, shapes, dtype).write(folder, progress.counting(lambda name: self.read(name, dtype)))


def _all_finite(tensor: torch.Tensor) -> bool:
    flat = tensor.reshape(-1)
    return all(flat[at : at + AT_ONCE].isfinite().all() for at in range(0, len(flat), AT_ONCE))


def _attached(model: PreTrainedModel, config: dict, tensors: FloatTensors | Uniform, file: Path) -> tuple[dict, dict]:
    """(changes, replaced) of an adapter. Leaves the model as transformers has it, with tied ends untied if adapted."""
    sharing: dict[int, set[str]] = {}
    for name, module in model.named_modules():
        sharing.setdefault(id(getattr(module, "weight", module)), set()).add(name)
    replaced = {name: _of(tensors, key) for name, key in own_weights({key: key for key in tensors}).items()}
    ends = [f"{name}.weight" for name in ends_of(model)]
    untie_if_different(model, {name: replaced[name]() for name in ends if name in replaced})
    attach_tensors(model, config, {n: torch.empty(s, device="meta") for n, s in tensors.shapes.items()}, file)

    def reader(name: str):
        return lambda: torch.from_numpy(tensors[disk_name(name)])

    changes: dict[str, Change] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, LoRALinear | LoRAEmbedding):
            changes[f"{name}.weight"] = _change(name, layer, reader)
        elif isinstance(layer, fused.Experts):
            for weight, pair in layer.pairs().items():
                if pair is not layer:
                    inner = f"{name}.base_layer"
                else:
                    inner = name
                changes[f"{name}.{weight}"] = _experts_change(inner, pair, layer, reader)
    adapted = {n.removesuffix(".weight") for n in changes}
    _refuse_shared(model, [names for names in sharing.values() if len(names) > 1], adapted, file)
    remove_adapters(model)
    return changes, replaced


def _change(name: str, layer: Any, reader: Callable) -> Change:
    magnitude = layer.lora_magnitude_vector
    read_magnitude = (lambda: None) if magnitude is None else reader(f"{name}.lora_magnitude_vector")
    if isinstance(layer, LoRAEmbedding):
        a = reader(f"{name}.lora_embedding_A")
        b = reader(f"{name}.lora_embedding_B")
        return Change(lambda: [LowRank(a().t(), b().t(), layer.scaling)], read_magnitude, 1, False, table=True)
    a = reader(f"{name}.lora_A")
    b = reader(f"{name}.lora_B")
    if not isinstance(layer.base, nn.Linear):  # Conv1D stores [I, O]
        return Change(lambda: [LowRank(a().t(), b().t(), layer.scaling)], read_magnitude, 1, True)
    return Change(lambda: [LowRank(b(), a(), layer.scaling)], read_magnitude, 0, False)


def _experts_change(name: str, pair: Any, layer: Any, reader: Callable) -> Change:
    a = reader(f"{name}.lora_A")
    b = reader(f"{name}.lora_B")
    turned = layer.base.is_transposed
    scaling = layer.scaling

    def parts() -> list[LowRank]:
        """A [E * R, I], B [O, R * E] with the expert varying fastest, as ExpertsPair.factors splits them."""
        a_ERI = a().unflatten(0, (pair.num_experts, -1))
        b_EOR = b().unflatten(1, (-1, pair.num_experts)).permute(2, 0, 1)
        if turned:
            return [LowRank(a.t(), b.t(), scaling) for a, b in zip(a_ERI, b_EOR, strict=True)]
        return [LowRank(b, a, scaling) for a, b in zip(a_ERI, b_EOR, strict=True)]

    return Change(parts, lambda: None, 0, turned)


def _refuse_shared(model: PreTrainedModel, sharing: list[set[str]], adapted: set[str], file: Path) -> None:
    """Raises PlanError where layers share a weight and not the adapter; embedding and head are untied instead."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    for names in sharing:
        if names & adapted and not all(any(model.get_submodule(n) is end for end in ends) for n in names):
            first, second = sorted(names)[:2]
            raise PlanError(
                f"{file}: {first} and {second} share one weight and not the adapter, so they cannot be merged. "
                "Serve the adapter beside its base."
            )


def _blocks_of(model: PreTrainedModel, checkpoint: Path) -> dict[str, Callable[[], torch.Tensor]]:
    file = checkpoint / TRAINED
    with verified(checkpoint, [file]):
        tensors = FloatTensors(file)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for name, shape in tensors.shapes.items():
        if shapes.get(name) != shape:
            raise PlanError(
                f"--checkpoint {checkpoint}: contains {name} {list(shape)}, which its base does not have. "
                "Give its base."
            )
    return {name: _of(tensors, name) for name in tensors}


def _of(tensors: FloatTensors | Uniform, name: str) -> Callable[[], torch.Tensor]:
    return lambda: torch.from_numpy(tensors[name])


# ---- checking what was written


@dataclass(frozen=True)
class Checked:
    """`off`: the largest difference of a layer's outputs, relative to its largest output, and of which tensor."""

    layers: int
    copied: int
    off: float
    worst: str

    def __str__(self) -> str:
        layers = ""
        if self.layers:
            layers = f"{self.layers} layers within {self.off:.1e} of base + adapter"
        return ", ".join(filter(None, [layers, f"{self.copied} other tensors equal to their source"]))


@torch.no_grad()
def check_written(checkpoint: Path, folder: Path, target: Path, dtype: torch.dtype) -> Checked:
    """Compares each tensor in `target` with base and adapter, read again: adapted ones by products with random inputs.
    Raises PlanError naming the tensor that differs by more than the rounding of `dtype`.
    """
    expected = Merge.of(checkpoint, folder)
    found = LazyWeights(target, sees_images=not expected.base.model.left_out)
    tolerance = max(LEAST_TOLERANCE, torch.finfo(dtype).eps)
    generator = torch.Generator().manual_seed(0)
    layers = 0
    copied = 0
    worst = (0.0, "")
    for name in each("comparing the merged weights", list(found.model.state_dict()), "tensors"):
        change = expected.changes.get(name)
        if change is None:
            if _equal(found.blocks(name), expected.blocks(name), dtype):
                off = 0.0
            else:
                off = math.inf
            copied = copied + 1
        else:
            off = _off(change, expected.original(name), found.read(name), generator)
            layers = layers + 1
        if not off <= tolerance:
            raise PlanError(
                f"--output_dir {target}: {name} gives other products than base + adapter (off by {off:.1e} of the "
                f"largest, at most {tolerance:.1e}). Check the disk, then export again."
            )
        worst = max(worst, (off, name))
    largest, where = worst
    return Checked(layers, copied, largest, where)


def _equal(written: Iterator, originals: Iterator, dtype: torch.dtype) -> bool:
    """True if blocks of rows equal the source's, rounded to `dtype`."""
    for block, original in itertools.zip_longest(written, originals):
        if block is None or original is None or block.shape != original.shape:
            return False
        if not torch.equal(block, original.to(dtype) if original.is_floating_point() else original):
            return False
    return True


def _off(change: Change, original: torch.Tensor, written: torch.Tensor, generator: torch.Generator) -> float:
    """The largest difference of outputs for random inputs, relative to the largest output."""
    off = 0.0
    stacked = original.ndim == 3
    magnitude = change.magnitude()
    for i, part in enumerate(change.parts()):
        base, merged = (original[i], written[i]) if stacked else (original, written)
        x = torch.randn(NUM_INPUTS, merged.shape[0 if change.forward else 1], generator=generator)
        reference = change.product(base, part, magnitude, x)
        difference = (_times(merged, x, change.forward) - reference).abs().max()
        relative = (difference / reference.abs().max().clamp_min(1e-30)).item()
        if math.isfinite(relative):
            off = max(off, relative)
        else:
            off = math.inf
    return off


@torch.no_grad()
def compare_logits(checkpoint: Path, files: ModelFiles, target: Path) -> float:
    """The largest difference of a row's logits in fp32, relative to the largest: base + adapter, and what was written.
    Raises PlanError where they are not finite.
    """
    model = load_trained(checkpoint, files, torch.device("cpu"), DENSE_FP32)
    vocab = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, vocab, (1, 24), generator=torch.Generator().manual_seed(0))
    before = model(input_ids=ids).logits
    del model
    after = load_dense(target, torch.float32)(input_ids=ids).logits
    off = ((after - before).abs().max() / before.abs().max()).item()
    if not math.isfinite(off):
        raise PlanError(f"--checkpoint {checkpoint}: base and adapter give logits that are not finite. {AGAIN}")
    return off
