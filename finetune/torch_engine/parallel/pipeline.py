"""Pipeline parallelism: each stage holds some decoder layers.

Hidden states are sent forward, their gradients backward.

The model keeps its own code: layers of other stages are skipped, and their weights are on meta. A stage before the last
stops the model after its last layer. Schedules: GPipe (Huang et al. 2019), and 1F1B (Narayanan et al. 2019), under
which at most as many microbatches are in flight as stages follow.
"""

from collections import deque

import torch
import torch.distributed as dist
from torch import nn

from finetune.distributed.parallel_dims import stage_layers
from finetune.errors import MODEL_ERRORS, PlanError, first_line, is_out_of_memory
from finetune.estimate.model_shape import ModelShape
from finetune.torch_engine.parallel.fsdp import decoder_layers
from finetune.torch_engine.parallel.process_groups import DTYPES, HEADER_SIZE, ProcessGroups, is_peer_failure


class SingleStage:
    """No pipeline: the full model on this rank, one microbatch after another. The interface of Stage."""

    number, count, first, last = 0, 1, True, True

    def stage_of(self, name: str) -> int:
        return 0

    def is_shared(self, name: str) -> bool:
        return False

    def inputs(self, inputs: dict) -> dict:
        return inputs

    def run(self, parallel, forwards: list, shapes: list, contexts) -> None:
        for i, forward in enumerate(forwards):
            with parallel.accumulating(last=i == len(forwards) - 1):
                with contexts.forward(i):
                    loss = parallel.call(forward)
                with contexts.backward(i):
                    parallel.backward(loss)

    def forward_only(self, call, work, shape: tuple):
        return call(work)

    def everywhere(self, work, inputs: dict):
        return work(**inputs)

    def set_hidden_dtype(self, call, work) -> None:
        pass

    def of_last(self, number: int) -> int:
        return number


class _StageOutput(Exception):  # noqa: N818  carries the hidden states out of the model's loop over layers
    def __init__(self, hidden):
        super().__init__()
        self.hidden = hidden


class _Attempt:
    """work() of a stage; zeros in place of its hidden states if its layers raise, so that no other stage waits for
    them. `failed`: what they raised.
    """

    def __init__(self, stage: "Stage", work, shape):
        self.stage, self.work, self.shape, self.failed = stage, work, shape, None

    def __call__(self):
        try:
            return self.work()
        except MODEL_ERRORS as error:
            if isinstance(error, PlanError) or is_out_of_memory(error) or is_peer_failure(error):
                raise
            self.failed = first_line(error)
        width = self.stage.model.config.get_text_config().hidden_size
        empty = torch.zeros(*self.shape, width, dtype=self.stage.dtype, device=self.stage.device)
        if self.stage.last:
            return empty
        raise _StageOutput(empty)


class Stage:
    """This rank's stage. Splits the loaded model in place; raises PlanError if its config has no pipeline plan."""

    def __init__(self, model, groups: ProcessGroups, schedule: str):
        self.model, self.groups, self.schedule = model, groups, schedule
        self.number, self.count = groups.coordinate("pp"), groups.dims.pp
        self.first, self.last = self.number == 0, self.number == self.count - 1
        self.received, self.dtype, self.sent = None, None, deque()
        group = groups.dims.group(groups.rank, "pp")
        self.prev_rank = None if self.first else group[self.number - 1]
        self.next_rank = None if self.last else group[self.number + 1]
        self.stages = stages_of(model, self.count)
        self.layers = layers_of_stages(model, self.count)[self.number]
        self._drop_other_stages()

    def _drop_other_stages(self):
        layers = decoder_layers(self.model)
        for i, layer in enumerate(layers):
            if i not in self.layers:
                layer.forward = self._return_received if i < self.layers.start else self._leave_model
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

    def _return_received(self, *args, **kwargs):
        return self.received

    def _leave_model(self, hidden, *args, **kwargs):
        raise _StageOutput(hidden)

    def stage_of(self, name: str) -> int:
        """The stage that owns a parameter; tied embedding and head belong to stage 0."""
        return self.stages[name][0]

    def is_shared(self, name: str) -> bool:
        """True for a tied embedding and head, which the first and the last stage hold."""
        return len(self.stages[name]) > 1

    # ---- forward and backward of one microbatch

    def forward(self, work, shape: tuple):
        """work() on the last stage; on the others the hidden states after this stage's last layer.
        `work` calls the model. `shape`: (rows, positions) of the microbatch on this rank.
        """
        if not self.first:
            width = self.model.config.get_text_config().hidden_size
            self.received = torch.empty(*shape, width, dtype=self.dtype, device=self.device)
            dist.recv(self.received, self.prev_rank, group=self.groups.process_groups["pp"])
            self.received.requires_grad_(torch.is_grad_enabled())
        try:
            out = work()
            assert self.last, "a stage before the last went through the full model"
        except _StageOutput as stage_output:
            out = stage_output.hidden
        return out

    @property
    def device(self):
        return next(p.device for p in self.model.parameters() if not p.is_meta)

    def _post(self, tensor, rank: int, group: str):
        """Sends without waiting; the tensor is kept until the end of the step."""
        tensor = tensor.detach().contiguous()
        self.sent.append((dist.isend(tensor, rank, group=self.groups.process_groups[group]), tensor))

    def _wait_for_sends(self) -> None:
        for sending, _ in self.sent:
            sending.wait()
        self.received = None

    def inputs(self, inputs: dict) -> dict:
        """The model's inputs on this stage: only the first one embeds tokens."""
        if self.first:
            return inputs
        ids = inputs["input_ids"]
        width = self.model.config.get_text_config().hidden_size
        empty = torch.zeros(*ids.shape, width, dtype=self.dtype or self.model.dtype, device=ids.device)
        return {k: v for k, v in inputs.items() if k != "input_ids"} | {"inputs_embeds": empty}

    def run(self, parallel, forwards: list, shapes: list, contexts) -> None:
        """One step: every microbatch forward and backward, in the schedule's order. Collective over the stages.

        `forwards[i]()`: this stage's work on microbatch i, on the last stage its loss. `contexts.forward(i)` and
        `contexts.backward(i)` surround the i-th of each.
        """
        self.sent, in_flight, total, done = deque(), deque(), len(forwards), 0
        warmup = total if self.schedule == "gpipe" else min(total, self.count - self.number - 1)

        def forward(i):
            with contexts.forward(i):
                out = parallel.call(self.forward, forwards[i], shapes[i])
            in_flight.append((self.received, out))
            if not self.last:
                self._post(out, self.next_rank, "pp")

        def backward():
            nonlocal done
            received, out = in_flight.popleft()
            grad = None
            if not self.last:
                grad = torch.empty_like(out)
                dist.recv(grad, self.next_rank, group=self.groups.process_groups["pp backward"])
            with parallel.accumulating(last=done == total - 1), contexts.backward(done):
                parallel.backward(out, grad)
            done += 1
            if not self.first:
                self._post(received.grad, self.prev_rank, "pp backward")

        for i in range(total):
            forward(i)
            if i >= warmup:
                backward()
        while in_flight:
            backward()
        self._wait_for_sends()

    @torch.no_grad()
    def forward_only(self, call, work, shape: tuple):
        """work() of the last stage, after all stages before it; None on those. Collective over the stages."""
        self.sent = deque()
        out = call(self.forward, work, shape)
        if not self.last:
            self._post(out, self.next_rank, "pp")
            out = None
        self._wait_for_sends()
        return out

    @torch.no_grad()
    def everywhere(self, work, inputs: dict) -> torch.Tensor:
        """work(**inputs), which calls the model, of the last stage, after all stages before it; given to every stage.
        What one stage's layers raise is raised on all, as RuntimeError. Collective over all ranks.
        """
        shape = inputs["input_ids"].shape
        attempt = self.attempt(lambda: work(**self.inputs(inputs)), shape)
        if self.dtype is None:
            self.set_hidden_dtype(_directly, attempt)
        out = self.forward_only(_directly, attempt, shape)
        failures = [said for said in self.groups.all_gather_object(attempt.failed) if said is not None]
        if failures:
            raise RuntimeError(failures[0])
        last, group = self.groups.dims.group(self.groups.rank, "pp")[-1], self.groups.process_groups["pp"]
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

    def attempt(self, work, shape) -> _Attempt:
        """`work` for forward_only, such that what this stage's layers raise does not hold up the others."""
        return _Attempt(self, work, shape)

    def of_last(self, number: int) -> int:
        """The last stage's number. Collective over the stages."""
        found = torch.tensor([number if self.last else 0])
        dist.all_reduce(found, group=self.groups.process_groups["pp"])
        return int(found)

    def set_hidden_dtype(self, call, work) -> None:
        """Takes the dtype of hidden states from the first stage's work(). Collective over all ranks."""
        with torch.no_grad():
            dtype = DTYPES.index(call(self.forward, work, (1, 1)).dtype) if self.first else None
        self.dtype = DTYPES[self.groups.broadcast_object(dtype)]


def _directly(work, *args):
    return work(*args)


def layers_of_stages(model, count: int) -> list[range]:
    """Numbers of the decoder layers of each stage, by the model's config alone: all of its parts agree on it."""
    head = ModelShape.from_config(model.config.to_dict()).head_in_layers
    return stage_layers(len(decoder_layers(model)), count, head)


def stages_of(model, count: int) -> dict[str, tuple]:
    """{parameter: stages that hold it}: runs of layers in the config's module order.

    What precedes the layers is on the first stage, what follows on the last; a tied embedding and head is on both.
    PlanError if the config has no pipeline plan, or fewer layers than stages.
    """
    config, flag = model.config.get_text_config(), f"--pp_degree {count}"
    plan = getattr(config, "base_model_pp_plan", None)
    layers = decoder_layers(model)
    if not plan or "layers" not in plan:
        raise PlanError(f"{flag}: transformers has no pipeline plan for {config.model_type}. Use --dp_shards instead.")
    if len(layers) < count:
        raise PlanError(f"{flag}: the model has {len(layers)} layers. Use at most as many stages.")
    stage_of_layer = {}
    for stage, run in enumerate(layers_of_stages(model, count)):
        stage_of_layer |= {id(p): stage for i in run for p in layers[i].parameters()}
    decoder, order = model.get_decoder(), list(plan)
    at = order.index("layers")

    def parameters_of(names) -> set:
        modules = [getattr(decoder, name) for name in names if hasattr(decoder, name)]
        return {id(p) for module in modules for p in module.parameters()}

    early, late = parameters_of(order[:at]), parameters_of(order[at + 1 :])
    late |= {id(p) for p in model.get_output_embeddings().parameters()}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        key = id(parameter)
        stages = [stage_of_layer[key]] if key in stage_of_layer else []
        stages += [0] if key in early else []
        stages += [count - 1] if key in late else []
        if not stages:
            raise PlanError(
                f"{flag}: transformers' pipeline plan for {config.model_type} does not cover {name}. "
                "Use --dp_shards instead."
            )
        found[name] = tuple(sorted(set(stages)))
    return found
