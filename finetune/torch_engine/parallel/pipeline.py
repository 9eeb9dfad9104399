"""Pipeline parallelism: each stage holds one run of decoder layers or, interleaved, several: its chunks.

Hidden states are sent forward, their gradients backward, in the order of distributed/pipeline_schedule.py.

The model keeps its own code: layers of other stages and of the stage's other chunks are skipped, and weights of other
stages are on meta. All but the last chunk of the last stage stop the model after their last layer.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from finetune.distributed.pipeline_schedule import order_of_stage
from finetune.errors import MODEL_ERRORS, PlanError, first_line, is_out_of_memory
from finetune.estimate.model_shape import ModelShape
from finetune.parts.parallel import CHUNKS
from finetune.parts.parallel_dims import check_num_layers, stage_layers
from finetune.torch_engine.heads import heads_of
from finetune.torch_engine.parallel.fsdp import decoder_layers, decoder_stacks
from finetune.torch_engine.parallel.process_groups import DTYPES, HEADER_SIZE, ProcessGroups, is_peer_failure

EMBEDDED = ("input_ids",)  # inputs of a model that only its first stage takes


class SingleStage:
    """No pipeline: the full model on this rank. The interface of Stage, but for `run`."""

    number = 0
    count = 1
    first = True
    last = True
    idle: tuple[list, bool] = ([], False)

    def stage_of(self, name: str) -> int:
        return 0

    def is_shared(self, name: str) -> bool:
        return False

    def inputs(self, inputs: dict, embedded: Collection[str] = EMBEDDED) -> dict:
        return inputs

    def forward_only(self, call: Callable, work: Callable, shape: tuple):
        return call(work)

    def everywhere(self, work: Callable, inputs: dict):
        return work(**inputs)

    def set_hidden_dtype(self, call: Callable, work: Callable) -> None:
        pass

    def of_last(self, number: int) -> int:
        return number


class _StageOutput(Exception):  # noqa: N818  carries the hidden states out of the model's loop over layers
    def __init__(self, hidden: torch.Tensor):
        super().__init__()
        self.hidden = hidden


class Attempt:
    """work() of a stage, for Stage.forward_only; zeros in place of its hidden states if its layers raise, so that no
    other stage waits for them. `failed`: what they raised.
    """

    def __init__(self, stage: "Stage", work: Callable, shape: tuple):
        self.stage = stage
        self.work = work
        self.shape = shape
        self.failed: str | None = None

    def __call__(self):
        try:
            return self.work()
        except MODEL_ERRORS as error:
            if isinstance(error, PlanError) or is_out_of_memory(error) or is_peer_failure(error):
                raise
            self.failed = first_line(error)
        width = self.stage.model.config.get_text_config().hidden_size
        empty = torch.zeros(*self.shape, width, dtype=self.stage.dtype, device=self.stage.device)
        if self.stage.ends:
            return empty
        raise _StageOutput(empty)


class _Skipped(nn.Module):
    """Takes a layer's place in the model while another chunk runs: outside of the layer's hooks, such as FSDP's.
    Attributes are the layer's.
    """

    def __init__(self, layer: nn.Module, forward: Callable):
        super().__init__()
        self.__dict__.update(layer=layer, forward=forward)  # not a submodule

    def __getattr__(self, name: str):
        return getattr(self.layer, name)


class Stage:
    """This rank's stage. Splits the loaded model in place; raises PlanError if its config has no pipeline plan.

    `first`, `last`: this stage is the pipeline's first or last; `begins`, `ends`: the chunk that runs is.
    """

    def __init__(self, model: PreTrainedModel, groups: ProcessGroups, schedule: str):
        self.model = model
        self.groups = groups
        self.schedule = schedule
        self.chunks = CHUNKS[schedule]
        self.number = groups.coordinate("pp")
        self.count = groups.dims.pp
        self.first = self.number == 0
        self.last = self.number == self.count - 1
        self.received: torch.Tensor | None = None
        self.dtype: torch.dtype | None = None
        self.sent: deque = deque()
        group = groups.dims.group(groups.rank, "pp")
        self.prev_rank = group[self.number - 1]
        self.next_rank = group[(self.number + 1) % self.count]
        self.stages = stages_of(model, self.count, self.chunks)
        self.chunk = 0
        self.runs = layers_of_chunks(model, self.count, self.chunks)[self.number]
        self._drop_other_stages()
        self.skipped = self._skipped_layers()

    @property
    def begins(self) -> bool:
        return self.first and self.chunk == 0

    @property
    def ends(self) -> bool:
        return self.last and self.chunk == self.chunks - 1

    def _drop_other_stages(self):
        for i, layer in enumerate(decoder_layers(self.model)):
            if not any(i in run for run in self.runs):
                layer.forward = partial(self._skip, i)
        named = self.model.named_parameters(remove_duplicate=False)
        kept = {id(p) for n, p in named if self.number in self.stages[n]}
        empty = {}  # tied parameters stay tied
        for module in self.model.modules():
            for leaf, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if id(parameter) not in kept:
                    if parameter not in empty:
                        empty[parameter] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                    setattr(module, leaf, empty[parameter])
            for derived in ("cached", "row_square_O"):
                present = getattr(module, derived, None) is not None
                if present and all(p.is_meta for p in module.parameters()):
                    setattr(module, derived, None)

    def _skip(self, i: int, hidden: torch.Tensor, *args: Any, **kwargs: Any):
        """Stands in for layer `i`, which is not in the running chunk."""
        if i < self.runs[self.chunk].start:
            return self._take_received()
        raise _StageOutput(hidden)

    def _take_received(self):
        return self.received

    def _skipped_layers(self) -> list[list[tuple]]:
        """(module list, index, layer, its stand-in) of the stage's layers in other chunks, for each chunk."""
        stacks = decoder_stacks(self.model)
        places = [(stack, at) for stack in stacks for at in range(len(stack))]
        found = []
        for run in self.runs:
            others = [i for other in self.runs if other is not run for i in other]
            found.append([(*places[i], _Skipped(places[i][0][places[i][1]], partial(self._skip, i))) for i in others])
        return found

    @property
    def idle(self) -> tuple[list, bool]:
        """(layers of the stage that are not of the chunk that runs, whether nothing outside of the layers is)."""
        return [skipped.layer for _, _, skipped in self.skipped[self.chunk]], not (self.begins or self.ends)

    @contextlib.contextmanager
    def _only_this_chunk(self):
        places = self.skipped[self.chunk]
        for stack, at, skipped in places:
            stack[at] = skipped
        try:
            yield
        finally:
            for stack, at, skipped in places:
                stack[at] = skipped.layer

    def stage_of(self, name: str) -> int:
        """The stage that owns a parameter; tied embedding and head belong to stage 0."""
        return self.stages[name][0]

    def is_shared(self, name: str) -> bool:
        """True for a tied embedding and head, which the first and the last stage hold."""
        return len(self.stages[name]) > 1

    # ---- forward and backward of one microbatch

    def forward(self, work: Callable, shape: tuple, chunk: int = 0):
        """work() on the last chunk of the last stage; on the others the hidden states after this chunk's last layer.
        `work` calls the model. `shape`: (rows, positions) of the microbatch on this rank.
        """
        self.chunk = chunk
        self.received = None
        if not self.begins:
            width = self.model.config.get_text_config().hidden_size
            received = torch.empty(*shape, width, dtype=self.dtype, device=self.device)
            dist.recv(received, self.prev_rank, group=self._channel("pp", wraps=self.first))
            self.received = received.requires_grad_(torch.is_grad_enabled())
        try:
            with self._only_this_chunk():
                out = work()
            assert self.ends, "a chunk before the last went through the full model"
        except _StageOutput as stage_output:
            out = stage_output.hidden
        return out

    @property
    def device(self):
        return next(p.device for p in self.model.parameters() if not p.is_meta)

    def _channel(self, name: str, wraps: bool):
        """The process group of messages between neighbours, or between the last stage and the first one: of two stages
        each is both of the other.
        """
        return self.groups.process_groups[name.replace("pp", "pp wrap") if wraps else name]

    def _post(self, tensor: torch.Tensor, rank: int, group: dist.ProcessGroup | None):
        """Sends without waiting; the tensor is kept until the end of the step."""
        tensor = tensor.detach().contiguous()
        self.sent.append((dist.isend(tensor, rank, group=group), tensor))

    def _wait_for_sends(self) -> None:
        for sending, _ in self.sent:
            sending.wait()
        self.received = None

    def inputs(self, inputs: dict, embedded: Collection[str] = EMBEDDED) -> dict:
        """The model's inputs of the chunk that runs: only the first one takes those that are embedded."""
        if self.begins:
            return inputs
        ids = inputs["input_ids"]
        width = self.model.config.get_text_config().hidden_size
        empty = torch.zeros(*ids.shape, width, dtype=self.dtype or self.model.dtype, device=ids.device)
        return {k: v for k, v in inputs.items() if k not in embedded} | {"inputs_embeds": empty}

    def run(self, parallel: Any, forwards: list, shapes: list, contexts: Any) -> None:
        """One step: every microbatch forward and backward, in the schedule's order. Collective over the stages.

        `forwards[i]()`: this stage's work on microbatch i, on the last stage its loss. `contexts.forward(i)` and
        `contexts.backward(i)` surround the i-th of each.
        """
        self.sent = deque()
        in_flight: dict[tuple[int, int], tuple] = {}
        order = order_of_stage(self.schedule, self.count, self.number, len(forwards))

        def forward(i: int, chunk: int):
            with contexts.forward(i):
                out = parallel.call(self.forward, forwards[i], shapes[i], chunk)
            in_flight[i, chunk] = self.received, out
            if not self.ends:
                self._post(out, self.next_rank, self._channel("pp", wraps=self.last))

        def backward(i: int, chunk: int, is_last: bool):
            self.chunk = chunk
            grad = None
            received, out = in_flight.pop((i, chunk))
            if not self.ends:
                grad = torch.empty_like(out)
                dist.recv(grad, self.next_rank, group=self._channel("pp backward", wraps=self.last))
            with parallel.accumulating(last=is_last), contexts.backward(i):
                parallel.backward(out, grad)
            if not self.begins:
                self._post(received.grad, self.prev_rank, self._channel("pp backward", wraps=self.first))

        for number, (is_forward, i, chunk) in enumerate(order):
            if is_forward:
                forward(i, chunk)
            else:
                backward(i, chunk, number == len(order) - 1)
        self._wait_for_sends()

    @torch.no_grad()
    def forward_only(self, call: Callable, work: Callable, shape: tuple):
        """work() of the last stage, after all stages before it; None on those. Collective over the stages."""
        self.sent = deque()
        out = None
        for chunk in range(self.chunks):
            out = call(self.forward, work, shape, chunk)
            if not self.ends:
                self._post(out, self.next_rank, self._channel("pp", wraps=self.last))
        self._wait_for_sends()
        return out if self.last else None

    @torch.no_grad()
    def everywhere(self, work: Callable, inputs: dict) -> torch.Tensor:
        """work(**inputs), which calls the model, of the last stage, after all stages before it; given to every stage.
        What one stage's layers raise is raised on all, as RuntimeError. Collective over all ranks.
        """
        shape = inputs["input_ids"].shape
        attempt = Attempt(self, lambda: work(**self.inputs(inputs)), shape)
        if self.dtype is None:
            self.set_hidden_dtype(directly, attempt)
        out = self.forward_only(directly, attempt, shape)
        failures = [said for said in self.groups.all_gather_object(attempt.failed) if said is not None]
        if failures:
            raise RuntimeError(failures[0])
        last = self.groups.dims.group(self.groups.rank, "pp")[-1]
        group = self.groups.process_groups["pp"]
        header = torch.zeros(HEADER_SIZE, dtype=torch.int64)
        if self.last:
            header[: out.ndim + 2] = torch.tensor([DTYPES.index(out.dtype), out.ndim, *out.shape])
        dist.broadcast(header, last, group=group)
        dtype, ndim, *shape = header.tolist()
        if not self.last:
            out = torch.empty(shape[:ndim], dtype=DTYPES[dtype], device=self.device)
        out = out.contiguous()
        dist.broadcast(out, last, group=group)
        return out

    def of_last(self, number: int) -> int:
        """The last stage's number. Collective over the stages."""
        found = torch.tensor([number if self.last else 0])
        dist.all_reduce(found, group=self.groups.process_groups["pp"])
        return int(found)

    def set_hidden_dtype(self, call: Callable, work: Callable) -> None:
        """Takes the dtype of hidden states from the first stage's work(). Collective over all ranks."""
        with torch.no_grad():
            dtype = None
            if self.first:
                dtype = DTYPES.index(call(self.forward, work, (1, 1)).dtype)
        self.dtype = DTYPES[self.groups.broadcast_object(dtype)]


def directly(work: Callable, *args: Any):
    """Calls `work` without a wrapper, in place of a Parallelism's call."""
    return work(*args)


def layers_of_chunks(model: PreTrainedModel, count: int, chunks: int = 1) -> list[list[range]]:
    """Numbers of the decoder layers of each stage, by chunk, by the model's config alone: all of its parts agree on it.
    The chunks of a microbatch's way are on the stages in turn.
    """
    head = ModelShape.from_config(model.config.to_dict()).head_in_layers
    runs = stage_layers(len(decoder_layers(model)), count * chunks, head)
    return [runs[stage::count] for stage in range(count)]


def stages_of(model: PreTrainedModel, count: int, chunks: int = 1) -> dict[str, tuple]:
    """{parameter: stages that hold it}: runs of layers in the config's module order.

    What precedes the layers is on the first stage, what follows on the last; a tied embedding and head is on both.
    PlanError if the config has no pipeline plan, or fewer layers than chunks.
    """
    config = model.config.get_text_config()
    flag = f"--pp_degree {count}"
    plan = getattr(config, "base_model_pp_plan", None)
    layers = decoder_layers(model)
    if not plan or "layers" not in plan:
        raise PlanError(f"{flag}: transformers has no pipeline plan for {config.model_type}. Use --dp_shards instead.")
    check_num_layers(len(layers), count, chunks)
    stage_of_layer: dict[int, int] = {}
    for stage, runs in enumerate(layers_of_chunks(model, count, chunks)):
        stage_of_layer |= {id(p): stage for run in runs for i in run for p in layers[i].parameters()}
    decoder = model.get_decoder()
    order = list(plan)
    at = order.index("layers")

    def parameters_of(names: list[str]) -> set:
        modules = [getattr(decoder, name) for name in names if hasattr(decoder, name)]
        return {id(p) for module in modules for p in module.parameters()}

    early = parameters_of(order[:at])
    late = parameters_of(order[at + 1 :])
    late |= {id(p) for p in model.get_output_embeddings().parameters()}
    late |= {id(p) for head in heads_of(model) for p in head.parameters()}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        key = id(parameter)
        stages = []
        if key in stage_of_layer:
            stages = [stage_of_layer[key]]
        stages += [0] if key in early else []
        stages += [count - 1] if key in late else []
        if not stages:
            raise PlanError(
                f"{flag}: transformers' pipeline plan for {config.model_type} does not cover {name}. "
                "Use --dp_shards instead."
            )
        found[name] = tuple(sorted(set(stages)))
    return found
