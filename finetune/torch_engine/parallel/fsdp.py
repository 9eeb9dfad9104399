"""FSDP2 over a loaded model: one group per decoder layer, the rest in the root's.

Frozen parameters of any dtype, packed integers among them, share a group with trainable ones. Gradients are summed,
never averaged: the loss is already divided by the targets of all ranks.
"""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from finetune.errors import PlanError
from finetune.quantizers.linear import QuantizedLinear
from finetune.torch_engine.device import FREE_FOR_WEIGHTS, WITHOUT_VALUES, free_bytes, pins_memory
from finetune.torch_engine.llama_pro import layer_stacks
from finetune.torch_engine.lora.layers import weight_norm
from finetune.torch_engine.parallel.parallelism import Forward, Local, all_reduce_gradients
from finetune.torch_engine.parallel.placement import Placement, local_shard
from finetune.torch_engine.parallel.process_groups import ProcessGroups
from finetune.torch_engine.parallel.vocabulary_rows import VocabularyRows
from finetune.torch_engine.weights.interfaces import HeldShards
from finetune.torch_engine.weights.modalities import vision_prefixes


class FSDPRoot(nn.Module):
    """Calls any work on the model while the parameters outside the layers (embeddings, norms, head) are gathered."""

    def __init__(self, model: nn.Module, reshard_after_forward: bool, rows: VocabularyRows | None = None):
        super().__init__()
        self.model = model
        self.reshard_after_forward = reshard_after_forward
        self.rows = rows

    def forward(self, work: Callable, *args: Any):
        return work(*args)


class FSDP2(Local):
    """Weights, gradients and optimizer state sharded by rows; HSDP if there are replicas of the shards."""

    shards_weights = True

    def __init__(self, forward: Forward, placement: Placement, root: FSDPRoot, no_sync: bool):
        super().__init__(forward, placement)
        self.root: Any = root  # with the methods of FSDPModule too
        self.no_sync = no_sync
        seeing = vision_prefixes(root.model)
        self.seeing = [name for name in self.local_params if name.startswith(seeing)]  # what trains of towers

    def call(self, work: Callable, *args: Any):
        return self.root(work, *args)

    def accumulating(self, last: bool):
        self.root.set_requires_gradient_sync(last or not self.no_sync)
        idle_layers, idle_ends = self.forward.pipeline.idle  # FSDP2 would reduce zeros for them
        for layer in idle_layers:
            layer.set_requires_gradient_sync(False)
        if idle_ends:
            self.root.set_requires_gradient_sync(False, recurse=False)
        # Embedding and head stay gathered until the step's last backward: nothing changes them before.
        self.root.set_reshard_after_backward(last, recurse=False)
        return contextlib.nullcontext()

    def reduce_gradients(self) -> dict:
        params = super().reduce_gradients()
        if self.root.rows is not None:  # of the other shards they are complete
            names = self.placement.names_of(self.root.rows.parameters)
            all_reduce_gradients([params[n] for n in names if n in params], self.groups, "replicate")
        self._drop_unseen(params)
        return params

    def _drop_unseen(self, params: dict) -> None:
        """Drops the gradients of towers in a step without images. FSDP2 makes them zeros, by which the optimizer would
        move them: on one rank it does not. Collective where towers train.
        """
        if not self.seeing:
            return
        shown = [params[name] for name in self.seeing if name in params and params[name].grad is not None]
        has_any = bool(shown) and bool(torch.stack([p.grad.any() for p in shown]).any())
        if not self.groups.all_reduce_max(has_any):
            for p in shown:
                p.grad = None

    def reshard(self) -> None:
        if not self.summon_depth or not self.in_full:
            for module in fsdp_modules(self.root):
                module.reshard()

    def _gathers_all(self) -> bool:
        """The same on all ranks: as `gathers_all` says, else if the weights fit beside what each device holds."""
        if self.gathers_all is not None:
            return self.gathers_all
        free = free_bytes(self.groups.device)
        fits = free is None or missing_bytes(self.root, self.groups.device) <= FREE_FOR_WEIGHTS * free
        return not self.groups.all_reduce_max(not fits)

    def _unsharded(self):
        return unsharded(self.root)


def shard(
    model: PreTrainedModel,
    groups: ProcessGroups,
    reshard_after_forward: bool,
    local_shards: HeldShards | None = None,
    offload: bool = False,
    experts: Sequence[str] = (),
    rows: VocabularyRows | None = None,
) -> FSDPRoot:
    """Shards every parameter of `model`, the same on all ranks, by rows, layer by layer.

    `local_shards`: holds this rank's rows already, and the parameters are on meta. `offload`: shards and gradients stay
    in host memory. `experts`: names of the modules whose weights only some of the ranks hold: sharded over those, whole
    if there is one. `rows`: embedding and head, which are not gathered. Scalars are replicated. If this torch shards no
    integer parameters, packed ones are viewed as bf16.
    """
    assert groups.mesh is not None, "one process shards nothing"
    if not supports_integer_params(groups.mesh["shard"]):
        view_packed_as(model, torch.bfloat16)
    mesh = _mesh(groups, groups.mesh, "shard")

    def elsewhere(p: nn.Parameter) -> bool:  # what is on meta without a value belongs to other pipeline stages
        return p.is_meta and (local_shards is None or not local_shards.has(p))

    ignored = {p for p in model.parameters() if p.ndim == 0 or elsewhere(p)}
    if rows is not None:
        rows.place(mesh, local_shards)
        ignored |= set(rows.parameters)
    root = FSDPRoot(model, reshard_after_forward, rows)
    policy: OffloadPolicy
    if offload:
        policy = CPUOffloadPolicy(pin_memory=pins_memory(groups.device))
    else:
        policy = OffloadPolicy()
    layers = [layer for layer in decoder_layers(model) if not any(elsewhere(p) for p in layer.parameters())]
    refuse_shared(layers)
    options = dict(mesh=mesh, ignored_params=ignored, offload_policy=policy)
    for name in experts:
        module = model.get_submodule(name)
        if any(elsewhere(p) for p in module.parameters()):
            continue
        if local_shards is None:
            before = []
        else:
            before = list(module.named_parameters())
        if groups.dims.expert_shards > 1:
            assert groups.expert_mesh is not None, groups.dims
            own = options | {"mesh": _mesh(groups, groups.expert_mesh, "expert_shard")}
            fully_shard(module, reshard_after_forward=reshard_after_forward, **own)
            _assign_local_rows(module, before, local_shards)
            continue
        for leaf, parameter in before:
            assert local_shards is not None, leaf
            new = nn.Parameter(local_shards.take(parameter), requires_grad=parameter.requires_grad)
            module.load_state_dict({leaf: new}, strict=False, assign=True)
        ignored |= set(module.parameters())
    for module, shard_module in units(root, layers, reshard_after_forward, **options):
        if local_shards is None:
            before = []
        else:
            before = list(module.named_parameters(remove_duplicate=False))
        shard_module()
        _assign_local_rows(module, before, local_shards)
    sum_gradients_not_average(root)
    seeing = vision_prefixes(model)
    if any(p.requires_grad for name, p in model.named_parameters() if name.startswith(seeing)):
        model.get_input_embeddings().register_forward_hook(_with_gradient)
    return root


def _with_gradient(_: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
    """A forward hook of the embedding: its output with a gradient, as images have one where what sees them trains. The
    layers' backward is then the same, and in the same order, on ranks whose rows show images and on others.
    """
    if output.requires_grad or not torch.is_grad_enabled():
        return output
    return output.detach().requires_grad_().clone()


def refuse_shared(layers: Sequence[nn.Module]) -> None:
    """Raises PlanError if layers share a weight, as Zamba's blocks do: FSDP shards each layer's weights once."""
    owner: dict[nn.Parameter, nn.Module] = {}
    for layer in layers:
        for name, parameter in layer.named_parameters():
            if owner.setdefault(parameter, layer) is not layer:
                raise PlanError(
                    f"--sharding_strategy: layers of this model share weights, such as {name}, which FSDP2 does not "
                    "shard. Use --sharding_strategy ddp."
                )


def _mesh(groups: ProcessGroups, mesh: DeviceMesh, axis: str):
    if groups.dims.dp_replicate > 1:
        return mesh["dp_replicate", axis]
    return mesh[axis]


def units(root: nn.Module, modules: Sequence[nn.Module], reshard_after_forward: bool, **options: Any):
    """(module, what shards it) for each of `modules`, inner ones first, then for the root that holds the rest."""
    for module in (*modules, root):
        # Backward begins with what the root gathered.
        reshard = reshard_after_forward and module is not root
        yield module, partial(fully_shard, module, reshard_after_forward=reshard, **options)


def sum_gradients_not_average(root: nn.Module) -> None:
    for module in fsdp_modules(root):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if hasattr(module, "set_reduce_scatter_unused_params"):  # from torch 2.13
            # An expert that no token of this rank was routed to. Held as one parameter, all have a gradient.
            module.set_reduce_scatter_unused_params(True)


def _assign_local_rows(module: nn.Module, before: list, local_shards: HeldShards | None) -> None:
    """Gives the parameters of `module`, just sharded on meta, this rank's rows, kept under the parameters they had
    before.

    One at a time, since rows that do not fill a rank are copied into padded memory.
    """
    if local_shards is None:
        return
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in before:
        if local_shards.has(parameter):
            names.setdefault(parameter, []).append(name)
    for parameter, tied in names.items():
        sharded: Any = module.get_parameter(tied[0])
        # As FSDP makes it: from_local would move rows that are kept in host memory to the mesh's device.
        rows = DTensor(local_shards.take(parameter), sharded._spec, requires_grad=False)
        new = nn.Parameter(rows, requires_grad=parameter.requires_grad)
        module.load_state_dict(dict.fromkeys(tied, new), strict=False, assign=True)


@torch.no_grad()
def init_dora_magnitudes(model: PreTrainedModel, groups: ProcessGroups, slices: dict, root: Any = None) -> None:
    """Computes DoRA's magnitudes, |w| of full rows, if each rank loaded its own part: of one layer at a time, gathered
    over the shards of `root`, and of one matrix at a time, gathered over the tensor-parallel group. Collective.
    `slices`: {parameter: its Slice}.
    """
    names = {module: name for name, module in model.named_modules()}
    modules: list[Any] = list(model.modules())
    rows = {
        m: local_shard(m.lora_magnitude_vector.detach())
        for m in modules
        if getattr(m, "lora_magnitude_vector", None) is not None and not m.lora_magnitude_vector.is_meta
    }

    def init(module: Any):
        if module in rows:
            norm = _full_norm(module, names[module], slices, groups)
            rows.pop(module).copy_(norm[groups.local_rows(len(norm))])

    def init_all():
        for layer in decoder_layers(model):
            if isinstance(layer, FSDPModule):
                layer.unshard()
                layer.apply(init)
                layer.reshard()
        model.apply(init)

    if root is None:
        init_all()
    else:
        root(init_all)
        root.reshard()


def _full_norm(module: Any, name: str, slices: dict, groups: ProcessGroups) -> torch.Tensor:
    """|w| of the full rows of this rank's slice: computed as one process does, so that the bits are the same."""
    by_rows = slices.get(f"{name}.lora_B")
    by_columns = slices.get(f"{name}.lora_A")
    if by_rows is None and by_columns is None:
        return module.weight_norm()
    weight_OI = module.exact_weight()
    a = module.lora_A
    b = module.lora_B
    if by_columns is not None:
        weight_OI = by_columns.all_gather(weight_OI, groups)
        a = by_columns.all_gather(a, groups)
    else:
        assert by_rows is not None, name
        weight_OI = by_rows.all_gather(weight_OI, groups)
        b = by_rows.all_gather(b, groups)
    norm_O = weight_norm(weight_OI, a, b, module.scaling, weight_OI.square().sum(1))
    if by_rows is None:
        return norm_O
    return by_rows.take(norm_O, groups)


def decoder_stacks(model: PreTrainedModel) -> list[nn.ModuleList]:
    """Every stack of layers as deep as the model; of nested ones, the outer."""
    stacks = layer_stacks(model)
    outer = [n for n in stacks if not any(n.startswith(other + ".") for other in stacks)]
    found = [model.get_submodule(name) for name in outer]
    return [stack for stack in found if isinstance(stack, nn.ModuleList)]


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers of all stacks."""
    return [layer for stack in decoder_stacks(model) for layer in stack]


def fsdp_modules(root: nn.Module) -> list[FSDPModule]:
    return [m for m in root.modules() if isinstance(m, FSDPModule)]


def supports_integer_params(mesh: DeviceMesh) -> bool:
    """Probes it: shards and gathers one packed parameter; torch supports integer ones from 2.12. Collective."""
    if mesh.device_type in WITHOUT_VALUES:
        return True
    module: Any = nn.Linear(2, 2 * mesh.size(), bias=False).to(mesh.device_type)
    codes = torch.arange(6 * mesh.size(), dtype=torch.uint8).view(-1, 3)
    module.packed = nn.Parameter(codes.to(mesh.device_type), requires_grad=False)
    try:
        fully_shard(module, mesh=mesh)
        module.unshard()
        return torch.equal(module.packed.cpu(), codes)
    except (RuntimeError, ValueError, TypeError):
        return False


def view_packed_as(model: nn.Module, dtype: torch.dtype) -> None:
    """Views every packed weight as this dtype of the same bytes, once."""
    for module in model.modules():
        if isinstance(module, QuantizedLinear) and not module.viewed:
            module.hold_as(dtype)


def missing_bytes(root: nn.Module, device: torch.device) -> int:
    """Bytes that a rank's device would hold more if every weight were gathered."""
    sharded = [p for p in root.parameters() if isinstance(p, DTensor)]
    held = sum(rows.nbytes for p in sharded if (rows := p.to_local()).device.type == device.type)
    return sum(p.numel() * p.element_size() for p in sharded) - held


@contextlib.contextmanager
def unsharded(root: Any):
    """Every parameter in full on every rank, so that forwards communicate nothing. Collective at entry."""
    modules = fsdp_modules(root)
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    if root.rows is not None:
        root.rows.gather()
    try:
        yield
    finally:
        if root.rows is not None:
            root.rows.free()
        for module in modules:
            # FSDP keeps the root's own parameters until backward, which needs them first.
            module.set_reshard_after_forward(root.reshard_after_forward and module is not root, recurse=False)
            module.reshard()
            _forget_forwards(module)


def _forget_forwards(module: FSDPModule) -> None:
    """Drops the order of past forwards, by which the next backward gathers ahead.

    A rank that had nothing to generate has made none: it would not take part in what another gathers.
    """
    state = module._get_fsdp_state()
    state._comm_ctx.post_forward_order.clear()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    for group in groups:
        if group is not None:  # a module without parameters of its own
            group._post_forward_indices.clear()
