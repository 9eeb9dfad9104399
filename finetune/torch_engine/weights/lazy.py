"""The weights of a model folder, each read when it is asked for: what export.py merges, writes and checks."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from finetune.errors import PlanError
from finetune.model_files.vocabulary import Vocabulary
from finetune.torch_engine import transformers_internals
from finetune.torch_engine.weights import prequantized
from finetune.torch_engine.weights.files import open_weights
from finetune.torch_engine.weights.stream import (
    WeightLoader,
    _WeightTask,
    assign_tensors,
    check_tensors,
    empty_model,
    leave_in_files,
)
from finetune.torch_engine.weights.vocabulary import grow

AT_ONCE = 2**22  # numbers of a tensor that are read or computed with at a time


def slices_of(shape: tuple) -> Iterator[slice]:
    """Slices of a tensor's rows, of at most AT_ONCE numbers each."""
    size = max(1, AT_ONCE // max(1, math.prod(shape[1:])))
    return (slice(at, min(at + size, shape[0])) for at in range(0, shape[0], size))


def row_blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor, some rows at a time."""
    if tensor.ndim:
        return (tensor[rows] for rows in slices_of(tensor.shape))
    return iter([tensor])


class LazyWeights:
    """The state of a folder's model, whose parameters stay on meta. `read(name)` holds one tensor, in the stored dtype,
    or what one conversion makes. `lines`: what to say of the folder, as load_weights returns it.
    """

    def __init__(self, folder: Path, vocabulary: Vocabulary | None = None, sees_images: bool = False):
        """Raises PlanError for weights that are missing, of another shape, or in an unsupported format.
        `vocabulary`, `sees_images`: see empty_model.
        """
        self.model = empty_model(folder, torch.float32, vocabulary, sees_images)
        self._files = open_weights(folder)
        files = self._files
        wanted = self.model.state_dict()
        tasks, extra = assign_tensors(self.model, files, wanted)
        grow(self.model, files, tasks)
        said = f"--model_name {self.model.name_or_path}"
        check_tensors(said, files, tasks, wanted)
        self._reader = _Reader(self.model, files, None, torch.device("cpu"), {}, None, said)
        self._tasks = {target: task for task in tasks for target in self._reader.targets_of(task)}
        self._source: dict[str, str] = {}  # until ties are known, each name is its own
        self._computed: dict[str, torch.Tensor] = {}
        tied = set(self.model.all_tied_weights_keys)
        missing = (set(wanted) - set(self._tasks)) | self._equal_pairs()
        self.model.tie_weights(missing_keys=missing, recompute_mapping=False)
        apart = sorted(tied - set(self.model.all_tied_weights_keys))
        held = {id(self.model.get_parameter_or_buffer(name)): name for name in self._tasks}
        # A tied name is read as the one that the files hold.
        self._source = {n: held[id(p)] for n, p in self.model.named_parameters(remove_duplicate=False) if id(p) in held}
        lost = sorted(set(dict(self.model.named_parameters(remove_duplicate=False))) - set(self._source))
        if lost:
            raise PlanError(
                f"{said}: lacks {len(lost)} weights that its config requires, such as {lost[0]}. "
                "Give a folder whose weights fit its config.json."
            )
        self._computed = {n: b for n, b in self.model.named_buffers() if n not in self._tasks}
        self.lines = leave_in_files(self.model, extra, files, apart)

    def _equal_pairs(self) -> set[str]:
        """The second name of each pair that config.json ties and the files hold twice, equal. Pairs that differ are no
        longer tied.
        """
        same = set()
        for target, source in list(self.model.all_tied_weights_keys.items()):
            if target in self._tasks and source in self._tasks:
                pairs = itertools.zip_longest(self.blocks(target), self.blocks(source))
                if all(torch.equal(one, other) for one, other in pairs):
                    same.add(target)
                else:
                    self.model.all_tied_weights_keys.pop(target)
        return same

    def read(self, name: str) -> torch.Tensor:
        """The full tensor of a name of the model's state; the caller may change it."""
        if name in self._computed:
            return self._computed[name].clone()
        return self._read(self._source.get(name, name))

    def blocks(self, name: str) -> Iterator[torch.Tensor]:
        """`read`, some rows at a time; a tensor that must be converted or decoded is read in full."""
        task = self._tasks.get(self._source.get(name, name))
        files = self._files
        alone = task is not None and task.mapping is None and len(task.names) == 1
        if task is None or not alone or task.names[0] in files.decoded or prequantized.parts(task.names[0], files):
            yield from row_blocks(self.read(name))
        elif not files.shape(task.names[0]):
            yield files.read(task.names[0])
        else:
            for rows in slices_of(files.shape(task.names[0])):
                yield files.read(task.names[0], (rows,))

    def _read(self, name: str) -> torch.Tensor:
        if name not in self._reader.held:
            self._reader(self._tasks[name])
        return self._reader.held.pop(name)


class _Reader(WeightLoader):
    """Keeps what it reads in `held` instead of putting it into the model."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.held: dict[str, torch.Tensor] = {}

    def __call__(self, weight: _WeightTask) -> None:
        count = experts_stacked(weight.mapping)
        if not count:
            super().__call__(weight)
            for name in self.targets_of(weight):
                self.check_shape(name, self.held[name])
            return
        # A stack of experts is filled one expert at a time: a conversion of all holds them once more.
        collected = {pattern: list(tensors) for pattern, tensors in weight.mapping.collected_tensors.items()}
        stack = None
        for expert in range(count):
            for pattern, tensors in collected.items():
                weight.mapping.collected_tensors[pattern] = [tensors[expert]]
            super().__call__(weight)
            ((name, one),) = self.held.items()
            self.held.clear()
            if stack is None:
                stack = torch.empty((count, *one.shape[1:]), dtype=one.dtype)
            stack[expert] = one[0]
        assert stack is not None, "a stack has one expert or more"
        self.check_shape(name, stack)
        self.held[name] = stack

    def put(self, name: str, tensor: torch.Tensor, part: bool = False) -> None:
        self.held[name] = tensor


def experts_stacked(converter: Any) -> int:
    """Number of experts that a conversion stacks, each converted without the others; 0 for other conversions."""
    if converter is None or len(converter.target_patterns) != 1:
        return 0
    first, *then = converter.operations
    alone = all(isinstance(op, transformers_internals.Concatenate) and op.dim == 1 for op in then)
    counts = {len(tensors) for tensors in converter.collected_tensors.values()}
    stacks = isinstance(first, transformers_internals.MergeModulelist) and first.dim == 0
    if stacks and alone and len(counts) == 1:
        return counts.pop()
    return 0
