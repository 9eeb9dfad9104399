"""Pipeline parallelism: each rank of a group holds some of the decoder's layers; hidden states go forward, their gradients back.

The model stays in its own code: layers of other stages are passed over, their weights are on the meta device. A stage before
the last stops the model after its last layer. Any shape of microbatch will do, since every stage knows them all.
Schedules: GPipe (Huang et al. 2019), and 1F1B (Narayanan et al. 2019), which keeps at most as many forwards as stages follow.
"""

from collections import deque

import torch
import torch.distributed as dist
from torch import nn

from finetune.errors import PlanError
from finetune.torch_engine.parallel import fsdp
from finetune.torch_engine.parallel.process_groups import DTYPES, ProcessGroups


class _StageOutput(Exception):  # noqa: N818  carries the hidden states out of the model's loop over layers
    def __init__(self, hidden):
        super().__init__()
        self.hidden = hidden


class Stage:
    """This rank's part of the pipeline. Cuts the loaded model in place; raises PlanError where its config has no pipeline plan."""

    def __init__(self, model, ranks: ProcessGroups, schedule: str):
        self.model, self.ranks, self.schedule = model, ranks, schedule
        self.number, self.count = ranks.coordinate("pp"), ranks.dims.pp
        self.first, self.last = self.number == 0, self.number == self.count - 1
        self.received, self.dtype, self.sent = None, None, deque()
        group = ranks.dims.group(ranks.rank, "pp")
        self.before = None if self.first else group[self.number - 1]
        self.after = None if self.last else group[self.number + 1]
        self.stages = stages_of(model, self.count)
        self._leave_others()

    def _leave_others(self):
        layers = fsdp.decoder_layers(self.model)
        each = len(layers) // self.count
        mine = range(self.number * each, (self.number + 1) * each)
        for i, layer in enumerate(layers):
            if i not in mine:
                layer.forward = self._hand_in if i < mine.start else self._hand_on
        kept = {id(p) for n, p in self.model.named_parameters(remove_duplicate=False) if self.number in self.stages[n]}
        empty = {}  # tied ones stay one
        for module in self.model.modules():
            for leaf, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if id(parameter) not in kept:
                    if parameter not in empty:
                        empty[parameter] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                    setattr(module, leaf, empty[parameter])
            if getattr(module, "cached", None) is not None and all(p.is_meta for p in module.parameters()):
                module.cached = None
            if getattr(module, "row_square_O", None) is not None and all(p.is_meta for p in module.parameters()):
                module.row_square_O = None

    def _hand_in(self, *args, **kwargs):
        return self.received

    def _hand_on(self, hidden, *args, **kwargs):
        raise _StageOutput(hidden)

    def stage_of(self, name: str) -> int:
        """The stage that answers for a parameter: of a table that is the embedding and the head, the first."""
        return self.stages[name][0]

    def shared(self, name: str) -> bool:
        return len(self.stages[name]) > 1

    # ---- forward and backward of one microbatch

    def forward(self, work, shape: tuple):
        """What `work()` returns on the last stage; before it, the hidden states of this stage's last layer, which are sent on.

        `work` calls the model. `shape`: (rows, positions) of the microbatch here.
        """
        if not self.first:
            self.received = torch.empty(
                *shape, self.model.config.get_text_config().hidden_size, dtype=self.dtype, device=self.device
            )
            dist.recv(self.received, self.before, group=self.ranks.groups["pp"])
            self.received.requires_grad_(torch.is_grad_enabled())
        try:
            out = work()
            assert self.last, "a stage before the last went through the whole model"
        except _StageOutput as handed:
            out = handed.hidden
        return out

    @property
    def device(self):
        return next(p.device for p in self.model.parameters() if not p.is_meta)

    def send(self, hidden) -> None:
        """Hands the hidden states to the next stage, without waiting for it."""
        self.sent.append(self._post(hidden, self.after, "pp"))

    def _post(self, tensor, rank: int, group: str):
        tensor = tensor.detach().contiguous()
        return dist.isend(tensor, rank, group=self.ranks.groups[group]), tensor  # kept until it is gone

    def inputs(self, inputs: dict) -> dict:
        """The model's inputs on this stage: behind the first, embeddings are never looked at."""
        if self.first:
            return inputs
        ids = inputs["input_ids"]
        width = self.model.config.get_text_config().hidden_size
        empty = torch.zeros(*ids.shape, width, dtype=self.dtype or self.model.dtype, device=ids.device)
        return {k: v for k, v in inputs.items() if k != "input_ids"} | {"inputs_embeds": empty}

    def run(self, call, forwards: list, shapes: list, backward) -> None:
        """One step: every microbatch forward and backward, in the schedule's order. Collective over the group.

        `forwards[i]()` is the stage's work on microbatch i; on the last stage it returns the loss. `call(work, *args)` and
        `backward(i, work)` call the work, the latter the i-th backward of this step.
        """
        self.sent, flying, total, done = deque(), deque(), len(forwards), 0
        ahead = total if self.schedule == "gpipe" else min(total, self.count - self.number - 1)

        def go_forward(i):
            out = call(self.forward, forwards[i], shapes[i])
            flying.append((self.received, out))
            if not self.last:
                self.send(out)

        def go_back():
            nonlocal done
            received, out = flying.popleft()
            grad = None
            if not self.last:
                grad = torch.empty_like(out)
                dist.recv(grad, self.after, group=self.ranks.groups["pp back"])
            backward(done, lambda: torch.autograd.backward(out, grad))
            done += 1
            if not self.first:
                self.sent.append(self._post(received.grad, self.before, "pp back"))

        for i in range(total):
            go_forward(i)
            if i >= ahead:
                go_back()
        while flying:
            go_back()
        for work, _ in self.sent:
            work.wait()
        self.received = None

    @torch.no_grad()
    def chained(self, call, work, shape: tuple):
        """`work()` of the last stage, after all before it; None on those. Collective over the group, without gradients."""
        self.sent = deque()
        out = call(self.forward, work, shape)
        if not self.last:
            self.send(out)
            out = None
        for sending, _ in self.sent:
            sending.wait()
        self.received = None
        return out

    def settle_dtype(self, call, work) -> None:
        """Finds the dtype of hidden states by the first stage's `work()`. Collective over all ranks."""
        with torch.no_grad():
            found = DTYPES.index(call(self.forward, work, (1, 1)).dtype) if self.first else None
        self.dtype = DTYPES[self.ranks.broadcast_object(found)]


def stages_of(model, count: int) -> dict[str, tuple]:
    """{parameter: stages that hold it}: layers in equal runs; what is before them with the first, what follows with the last.

    By the config's own plan of what comes in which order. A table that is both embedding and head is held by both. PlanError
    where the config has no plan, or the layers do not divide.
    """
    config, said = model.config.get_text_config(), f"--pp_degree {count}"
    plan = getattr(config, "base_model_pp_plan", None)
    layers = fsdp.decoder_layers(model)
    if not plan or "layers" not in plan:
        raise PlanError(f"{said}: transformers has no pipeline plan for {config.model_type}. Use --dp_shards instead.")
    if len(layers) % count:
        raise PlanError(f"{said}: {len(layers)} layers are no multiple of it. Use a degree that divides them.")
    each, stage_of_layer = len(layers) // count, {}
    for i, layer in enumerate(layers):
        stage_of_layer |= {id(p): i // each for p in layer.parameters()}
    decoder, order = model.get_decoder(), list(plan)
    early = [getattr(decoder, n) for n in order[: order.index("layers")] if hasattr(decoder, n)]
    early = {id(p) for m in early for p in m.parameters()}
    late = {id(p) for p in model.get_output_embeddings().parameters()}
    late |= {
        id(p)
        for n in order[order.index("layers") + 1 :]
        if hasattr(decoder, n)
        for p in getattr(decoder, n).parameters()
    }
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        key = id(parameter)
        stages = [stage_of_layer[key]] if key in stage_of_layer else []
        stages += [0] if key in early else []
        stages += [count - 1] if key in late else []
        if not stages:
            raise PlanError(
                f"{said}: transformers' pipeline plan of {config.model_type} has no place for {name}. "
                "Use --dp_shards instead."
            )
        found[name] = tuple(sorted(set(stages)))
    return found
