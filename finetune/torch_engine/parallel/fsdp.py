"""FSDP2 over a loaded model: each decoder layer a group, the rest the root's; and what trains, as the rows this rank holds.

Frozen parameters of any dtype, packed integers among them, share a group with what trains. Gradients are summed, never
averaged: the loss is already divided by the targets of all ranks.
"""

import contextlib

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from finetune.quantizers.linear import QuantizedLinear
from finetune.torch_engine.llama_pro import layer_stacks
from finetune.torch_engine.parallel.process_groups import ProcessGroups

BUCKET_BYTES = 32 * 2**20


class FSDPRoot(nn.Module):
    """Calls any work on the model while the parameters outside the layers (embeddings, norms, head) are gathered."""

    def __init__(self, model, reshard_after_forward: bool):
        super().__init__()
        self.model, self.reshard_after_forward = model, reshard_after_forward

    def forward(self, work, *args):
        return work(*args)


def shard(model, ranks: ProcessGroups, reshard_after_forward: bool, share=None, offload: bool = False) -> FSDPRoot:
    """Cuts every parameter of `model`, the same on all ranks, by rows; each rank keeps its own. Layer by layer.

    `share`: holds this rank's rows already, and the parameters are on meta. `offload`: rows and gradients are in host memory.
    Scalars stay whole on every rank. Where this torch shards no integer parameters, packed ones are held as bf16 of the same bytes.
    """
    if not supports_integer_params(ranks):
        view_as_bf16(model)
    mesh = ranks.mesh["dp_replicate", "shard"] if ranks.dims.dp_replicate > 1 else ranks.mesh["shard"]
    another = share is None  # on meta: another pipeline stage's
    whole = {p for p in model.parameters() if p.ndim == 0 or p.is_meta and another}
    root = FSDPRoot(model, reshard_after_forward)
    policy = CPUOffloadPolicy(pin_memory=ranks.mesh.device_type == "cuda") if offload else OffloadPolicy()
    layers = decoder_layers(model)
    if share is None:  # else all are on meta
        layers = [layer for layer in layers if not any(p.is_meta for p in layer.parameters())]
    for module in (*layers, root):
        before = list(module.named_parameters(remove_duplicate=False)) if share is not None else []
        again = reshard_after_forward and module is not root  # backward begins with what the root gathered
        fully_shard(module, mesh=mesh, reshard_after_forward=again, ignored_params=whole, offload_policy=policy)
        _put_rows(module, before, share)
    sum_gradients_not_average(root)
    return root


def sum_gradients_not_average(root) -> None:
    for module in fsdp_modules(root):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_reduce_scatter_unused_params(True)  # an expert that no token of this rank met


def _put_rows(module, before: list, share) -> None:
    """Gives the parameters of `module`, just cut on meta, this rank's rows, which stand under what they were before: one at a
    time, since rows that do not fill a rank are copied into memory that does.
    """
    names = {}
    for name, parameter in before:
        if parameter.is_meta and not isinstance(parameter, DTensor):
            names.setdefault(parameter, []).append(name)
    for parameter, tied in names.items():
        cut = module.get_parameter(tied[0])
        # As FSDP makes it: from_local would move rows that are kept in host memory to the mesh's device.
        rows = DTensor(share.take(parameter), cut._spec, requires_grad=False)
        new = nn.Parameter(rows, requires_grad=parameter.requires_grad)
        module.load_state_dict(dict.fromkeys(tied, new), strict=False, assign=True)


@torch.no_grad()
def init_dora_magnitudes(root, ranks: ProcessGroups) -> None:
    """Makes DoRA's magnitudes, |w| of whole rows, where each rank loaded its own rows: a gathered layer at a time. Collective."""
    rows = {
        m: local_shard(m.lora_magnitude_vector.detach())
        for m in root.modules()
        if getattr(m, "lora_magnitude_vector", None) is not None
    }

    def start(module):
        if module in rows:
            norm = module.weight_norm()
            rows.pop(module).copy_(norm[ranks.local_rows(len(norm))])

    def start_all():
        for layer in decoder_layers(root.model):
            layer.unshard()
            layer.apply(start)
            layer.reshard()
        root.apply(start)

    root(start_all)
    root.reshard()


def decoder_layers(model) -> list[nn.Module]:
    """The layers of every stack as deep as the model; in a nested stack, the outer one's."""
    stacks = layer_stacks(model)
    outer = [n for n in stacks if not any(n.startswith(other + ".") for other in stacks)]
    return [layer for name in outer for layer in model.get_submodule(name)]


def fsdp_modules(root) -> list[FSDPModule]:
    return [m for m in root.modules() if isinstance(m, FSDPModule)]


def supports_integer_params(ranks: ProcessGroups) -> bool:
    """Shards and gathers one packed parameter: torch takes integer ones since 2026 only. Collective."""
    module = nn.Linear(2, 2 * ranks.dims.shards, bias=False).to(ranks.mesh.device_type)
    codes = torch.arange(6 * ranks.dims.shards, dtype=torch.uint8).view(-1, 3)
    module.packed = nn.Parameter(codes.to(ranks.mesh.device_type), requires_grad=False)
    try:
        fully_shard(module, mesh=ranks.mesh["shard"])
        module.unshard()
        return torch.equal(module.packed.cpu(), codes)
    except (RuntimeError, ValueError, TypeError):
        return False


def view_as_bf16(model) -> None:
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.hold_as_bf16()


@contextlib.contextmanager
def unsharded(root):
    """Every parameter whole on every rank, so that any code may read it and forwards exchange nothing. Collective at entry."""
    modules = fsdp_modules(root)
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in modules:  # the root's own are needed again at once by backward, so FSDP keeps them between
            module.set_reshard_after_forward(root.reshard_after_forward and module is not root, recurse=False)
            module.reshard()


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of a parameter that this rank holds, on the same memory; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_sharded(parameter) -> bool:
    """Whether ranks hold its rows apart."""
    return isinstance(parameter, DTensor)


def full_shape(parameter) -> torch.Size:
    """A parameter's own shape; under DeepSpeed's ZeRO-3 the parameter itself has none between forwards."""
    return getattr(parameter, "ds_shape", parameter.shape)


def local_params(named: dict) -> dict:
    """{name: what the optimizer updates}: the parameter itself, or this rank's rows of it. None where it has no row."""
    out = {}
    for name, parameter in named.items():
        if isinstance(parameter, DTensor):
            rows = local_shard(parameter.detach())
            out[name] = nn.Parameter(rows) if rows.numel() else None
        else:
            out[name] = parameter
    return out


def move_gradients(named: dict, held: dict) -> None:
    """Hands each sharded gradient to the rows that the optimizer updates."""
    for name, parameter in named.items():
        if held[name] is not None and held[name] is not parameter:
            held[name].grad = None if parameter.grad is None else local_shard(parameter.grad)


@torch.no_grad()
def all_reduce_gradients(parameters: list, ranks: ProcessGroups, over: str) -> None:
    """Adds up the gradients of these parameters over a group of ranks, in buckets. A gradient that a rank lacks is zero there."""
    if over not in ranks.groups or not parameters:
        return
    present = ranks.all_reduce(torch.tensor([float(p.grad is not None) for p in parameters], dtype=torch.float64), over)
    parameters = [p for p, some in zip(parameters, present.tolist(), strict=True) if some]
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    bucket, size = [], 0
    for i, p in enumerate(parameters):
        bucket.append(p.grad)
        size += p.grad.nbytes
        if size >= BUCKET_BYTES or i == len(parameters) - 1 or parameters[i + 1].grad.dtype != p.grad.dtype:
            flat = ranks.all_reduce(torch.cat([g.reshape(-1) for g in bucket]), over)
            for g, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                g.copy_(part.view_as(g))
            bucket, size = [], 0
