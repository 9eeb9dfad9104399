"""Device features that training needs, each tried on the device: the rows of --doctor below the capabilities."""

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from finetune.errors import first_line
from finetune.torch_engine.device import TF32_EPS, rounds_to_tf32
from finetune.torch_engine.parallel import device_shims, process_groups, self_test

FAILURES = (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError, ImportError, AssertionError)
SWITCHES = ("PYTORCH_ENABLE_MPS_FALLBACK", "PYTORCH_MPS_HIGH_WATERMARK_RATIO", "PYTORCH_MPS_LOW_WATERMARK_RATIO")


def examine(device: torch.device) -> list[dict]:
    """[{'what', 'works', 'why'}]; `why` says how, or what failed. Takes a second or two."""
    return [_tried(what, probe, device) for what, probe in PROBES.items()]


def _tried(what: str, probe: Callable, device: torch.device) -> dict:
    try:
        return {"what": what, "works": True, "why": probe(device)}
    except FAILURES as error:
        return {"what": what, "works": False, "why": first_line(error)}


def _product(device: torch.device, dtype: torch.dtype) -> str:
    x, w = (torch.linspace(-1, 1, 64 * 64).view(64, 64).roll(i, 0).to(dtype) for i in (0, 7))
    right = x.double() @ w.double()
    size = (x.double().abs() @ w.double().abs()).max()
    error = ((x.to(device) @ w.to(device)).cpu().double() - right).abs().max() / size
    if dtype == torch.float32 and rounds_to_tf32(device):
        eps = TF32_EPS
    else:
        eps = torch.finfo(dtype).eps
    allowed = 4 * eps  # of a sum of 64 terms whose signs cancel
    assert error <= allowed, f"off by {error:.1e}, more than rounding explains ({allowed:.1e})"
    return f"off by {error:.1e} of the terms' sum{', in TF32' if eps == TF32_EPS else ''}"


def _loss_scaling(device: torch.device) -> str:
    """An overflow in fp16 must become inf, and be seen."""
    half = torch.full((8,), 60000.0, dtype=torch.float16, device=device)
    assert not torch.isfinite(half + half).any().item(), "an overflow in fp16 stays finite"
    assert torch.isfinite(half / 2).all().item(), "finite numbers are taken for infinite ones"
    return "overflow is seen"


def _optimizer(device: torch.device, **options: Any) -> str:
    start = torch.linspace(-1, 1, 257)
    mine, oracle = (torch.nn.Parameter(start.to(d).clone()) for d in (device, "cpu"))
    for parameter, how in ((mine, options), (oracle, {"foreach": False})):
        optimizer = torch.optim.AdamW([parameter], lr=1e-2, **how)
        for _ in range(2):
            parameter.grad = parameter.detach().sin()
            optimizer.step()
    error = (mine.detach().cpu() - oracle.detach()).abs().max().item()
    assert error < 1e-5, f"off by {error:.1e} after two steps"
    return f"off by {error:.1e} after two steps"


def _attention(device: torch.device, **options: Any) -> str:
    q, k, v = (torch.linspace(-2, 2, 2 * heads * 16 * 32).sin().view(2, heads, 16, 32) for heads in (4, 2, 2))
    if options.pop("masked", False):
        options["attn_mask"] = torch.ones(16, 16, dtype=torch.bool).tril()
    on: dict[str, Any] = {name: o.to(device) if torch.is_tensor(o) else o for name, o in options.items()}
    mine = F.scaled_dot_product_attention(q.to(device), k.to(device), v.to(device), enable_gqa=True, **on)
    right = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), enable_gqa=True, **options)
    error = (mine.cpu().double() - right).abs().max().item()
    assert error < 1e-4, f"off by {error:.1e}"
    return f"off by {error:.1e}"


def _memory_counters(device: torch.device) -> str:
    if device.type == "cpu":
        return "resident memory of the process"
    module = torch.get_device_module(device)
    names = [n for n in ("current_allocated_memory", "driver_allocated_memory", "recommended_max_memory")]
    if not hasattr(module, names[0]):
        names = ["memory_allocated", "memory_reserved", "mem_get_info"]
    return ", ".join(f"{name} {getattr(module, name)()}" for name in names)


def _collectives(device: torch.device) -> str:
    """A process group of one rank answers the self-test."""
    own = not dist.is_initialized()
    backend = process_groups.prepare_device(device)
    if own:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    began = time.perf_counter()
    try:
        world = dist.group.WORLD
        assert world is not None, "it was just opened"
        self_test.check(device, world)
    finally:
        if own:
            dist.destroy_process_group()
    return f"{backend}: known answers right in {time.perf_counter() - began:.1f} s"


def _shims(device: torch.device) -> str:
    """Functions that FSDP2 needs, the device lacks, and device_shims supplies."""
    if device.type in process_groups.COMMUNICATION:
        return "nothing is missing"
    return "; ".join(device_shims.install(device.type)) or "installed already"


def _resizing(device: torch.device) -> str:
    refused = device_shims.refuses_resize(device.type)
    return "no: gathered weights are let go of instead" if refused else "storages can be resized"


def _switches(device: torch.device) -> str:
    return ", ".join(f"{name}={os.environ[name]}" for name in SWITCHES if name in os.environ) or "none set"


PROBES = {
    "fp32 products": lambda device: _product(device, torch.float32),
    "bf16 products": lambda device: _product(device, torch.bfloat16),
    "fp16 products": lambda device: _product(device, torch.float16),
    "fp16 loss scaling": _loss_scaling,
    "fused AdamW": lambda device: _optimizer(device, fused=True),
    "foreach AdamW": lambda device: _optimizer(device, foreach=True),
    "causal attention": lambda device: _attention(device, is_causal=True),
    "masked attention": lambda device: _attention(device, masked=True),
    "memory counters": _memory_counters,
    "FSDP2 resizes": _resizing,
    "FSDP2 shims": _shims,
    "collectives": _collectives,
    "MPS switches": _switches,
}
