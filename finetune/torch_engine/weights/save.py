"""Saves a full model as transformers' save_pretrained would, one tensor at a time."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from finetune import safetensors_io
from finetune.model_files.files import GENERATION, PROCESSOR_FILES, generation_config_of
from finetune.model_files.rope_names import add_older_names
from finetune.torch_engine import heads, transformers_internals
from finetune.torch_engine.weights.files import DTYPES, PLAIN_KINDS, WeightFiles, open_weights
from finetune.torch_engine.weights.modalities import forget_quantization

SHARD_SIZE = "50GB"  # save_pretrained's own


def write_model_folder(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """config.json and model.safetensors (sharded when large) in `dtype`, each renamed when complete."""
    state = model.state_dict()
    saving = StreamedSave.of(model, {n: tuple(t.shape) for n, t in state.items()}, dtype)
    saving.write(folder, lambda name: state[name].detach().cpu())


@dataclass(frozen=True)
class StreamedSave:
    """Tensors of a model as transformers' save_pretrained writes them: names settled before any weight is read, values
    streamed one at a time.

    `on_disk`: {name: tensor on meta}; `turns`: names in the model's state converted together, mostly one at a time;
    `stacks`: names split into one tensor or more per expert.
    """

    model: PreTrainedModel
    dtype: torch.dtype
    on_disk: dict
    turns: list
    stacks: frozenset[str]
    left: WeightFiles | None  # the base's files, for what was not loaded

    @classmethod
    def of(cls, model: PreTrainedModel, shapes: dict, dtype: torch.dtype) -> "StreamedSave":
        """`shapes`: of the model's full state."""
        state = {}
        for name, shape in shapes.items():
            own = model.get_parameter_or_buffer(name).dtype
            state[name] = torch.empty(shape, dtype=dtype if own.is_floating_point else own, device="meta")
        for name in model._keys_to_ignore_on_save or ():
            state.pop(name, None)
        state = transformers_internals.remove_tied_weights_from_state_dict(state, model)
        mapping = transformers_internals.get_model_conversion_mapping(model, add_legacy=False)
        converters: list[Any] = [
            m.reverse_transform() for m in reversed(mapping) if isinstance(m, transformers_internals.WeightConverter)
        ]
        turns: dict[tuple, list[str]] = {}
        stacks = set()
        for name in state:
            made, pattern = transformers_internals.apply_converters(name, converters)
            if pattern and _splits_experts(next(c for c in converters if pattern in c.source_patterns)):
                stacks.add(name)
            turns.setdefault((made, True) if pattern else (name, False), []).append(name)
        on_disk = dict(transformers_internals.revert_weight_conversion(model, state))
        left = getattr(model, "left_in_files", {})
        files = None
        if left:
            files = open_weights(str(model.name_or_path))
        for name, of_tower in left.items():
            assert files is not None, name
            if of_tower and files.kind(name) in PLAIN_KINDS:
                kept = dtype
            else:
                kept = DTYPES[files.kind(name)]
            on_disk[name] = torch.empty(files.shape(name), dtype=kept, device="meta")
        return cls(model, dtype, on_disk, list(turns.values()), frozenset(stacks), files)

    def write(self, folder: Path, read: Callable[[str], torch.Tensor]) -> None:
        """Writes the folder's files beside their places, then puts them there.

        `read(name)`: a full tensor of the model's state, asked for once each, in the order of `turns`.
        """
        with tempfile.TemporaryDirectory(dir=folder, prefix=".tmp-") as made:
            beside = Path(made)
            self._write_configs(beside)
            from huggingface_hub import split_torch_state_dict_into_shards

            split = split_torch_state_dict_into_shards(
                self.on_disk, filename_pattern="model{suffix}.safetensors", max_shard_size=SHARD_SIZE
            )
            with contextlib.ExitStack() as open_files:
                places: dict[str, tuple] = {}
                files = []
                for name, tensors in split.filename_to_tensors.items():
                    file = open_files.enter_context(open(beside / name, "wb"))
                    header, starts = safetensors_io.header_of([_as_part(n, self.on_disk[n]) for n in tensors])
                    file.write(header)
                    files.append(file)
                    places |= {n: (file, starts[n]) for n in tensors}
                for turn in self.turns:
                    self._write_turn({n: read(n) for n in turn}, places)
                for name in getattr(self.model, "left_in_files", {}):
                    assert self.left is not None, name
                    self._write_tensor(name, self.left.read(name).to(self.on_disk[name].dtype), places)
                assert not places, f"{len(places)} tensors were not written, such as {next(iter(places))}"
                for file in files:
                    file.flush()
                    os.fsync(file.fileno())
            if split.is_sharded:
                metadata = {"total_parameters": sum(t.numel() for t in self.on_disk.values()), **split.metadata}
                index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
                text = json.dumps(index, indent=2, sort_keys=True) + "\n"
                (beside / "model.safetensors.index.json").write_text(text)
            for written in sorted(beside.iterdir()):
                written.replace(folder / written.name)

    def _write_configs(self, folder: Path) -> None:
        config = self.model.config
        if self.model.name_or_path:
            published = transformers.AutoConfig.from_pretrained(self.model.name_or_path)
        else:
            published = config
        if type(published) is not type(config):  # a class made of a multimodal model's text part: Llama4ForCausalLM
            config = published
            forget_quantization(config)
        config.dtype = self.dtype
        config.architectures = [type(self.model).__name__]
        heads.describe(config, self.model)
        config.save_pretrained(folder)
        add_older_names(folder / "config.json")
        record = heads.record_of(self.model)
        if record is not None:
            record.write(folder)
        generation = None
        if self.model.name_or_path:
            generation = generation_config_of(Path(self.model.name_or_path))
        if generation is not None:  # as it is: a model made from config.json does not know its stop tokens
            (folder / GENERATION).write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
        elif self.model.can_generate():
            self.model.generation_config.save_pretrained(folder)
        for name in PROCESSOR_FILES if getattr(self.model, "towers", ()) else ():
            if (Path(str(self.model.name_or_path)) / name).is_file():
                shutil.copyfile(Path(str(self.model.name_or_path)) / name, folder / name)

    def _write_turn(self, state: dict, places: dict) -> None:
        state = {n: t.to(self.dtype) if t.is_floating_point() else t for n, t in state.items()}
        if len(state) == 1 and next(iter(state)) in self.stacks:
            self._write_stack(*state.popitem(), places)
            return
        made = transformers_internals.revert_weight_conversion(self.model, state)
        for name in list(made):
            self._write_tensor(name, made.pop(name), places)

    def _write_stack(self, name: str, stack: torch.Tensor, places: dict) -> None:
        """Writes experts that files hold one by one: one at a time, as a conversion of all would copy them."""
        for expert in range(len(stack)):
            made = transformers_internals.revert_weight_conversion(self.model, {name: stack[expert : expert + 1]})
            for first, tensor in made.items():
                head, _, tail = first.rpartition(".0.")
                self._write_tensor(f"{head}.{expert}.{tail}", tensor, places)

    def _write_tensor(self, name: str, tensor: torch.Tensor, places: dict) -> None:
        expected = self.on_disk[name]
        assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype), (name, tensor.shape)
        file, start = places.pop(name)
        file.seek(start)
        file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def _splits_experts(converter: Any) -> bool:
    """True if the conversion makes each expert's tensors from that expert's slice alone."""
    *before, last = converter.operations
    alone = all(isinstance(op, transformers_internals.Chunk) and op.dim == 1 for op in before)
    return alone and isinstance(last, transformers_internals.SplitModulelist) and last.dim == 0


def _as_part(name: str, tensor: torch.Tensor) -> safetensors_io.TensorShard:
    """Header entry of a tensor whose values are written elsewhere."""
    word = str(tensor.dtype).removeprefix("torch.")
    dtype = {"bfloat16": "BF16"}.get(word) or safetensors_io.FROM_NUMPY[word]
    return safetensors_io.TensorShard(name, dtype, tuple(tensor.shape), tensor.numpy)
