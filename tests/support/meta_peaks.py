"""Peak bytes of a training step on a GPU, counted on meta tensors, beside what the estimate predicts of them.

The program's own layers, kernels' shapes and step; only numbers are missing. The optimizer's moments are there, as in
every step but the first; its fused step has no temporaries.
"""

import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from finetune.data.collate import microbatches
from finetune.estimate import inference, memory
from finetune.estimate.inference import Work
from finetune.estimate.model_cost import MicrobatchShape
from finetune.estimate.model_shape import ModelShape
from finetune.parts.attention import AttentionPlan
from finetune.parts.parts import Parts
from finetune.quantizers.linear import QuantizedLinear
from finetune.torch_engine.attention import per_document
from finetune.torch_engine.attention.varlen import Attention
from finetune.torch_engine.base_offload import BaseOffload, HeadInFile
from finetune.torch_engine.device import DTYPES
from finetune.torch_engine.experts import fused
from finetune.torch_engine.forward import Layout
from finetune.torch_engine.lora.flat import in_step
from finetune.torch_engine.weights import packed_base, packing
from finetune.torch_engine.weights.packed_base import LayerFile, PackedBase
from tests.support import large, tiny
from tests.support.build import torch_engine

META = torch.device("meta")
BLOCK = 512  # bytes that CUDA's allocator gives at a time


class LiveBytes(TorchDispatchMode):
    """Bytes of live storages on a device, rounded as CUDA's allocator rounds; `peak`: the most there were."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device, self.live, self.peak = device.type, 0, 0
        self.known = weakref.WeakKeyDictionary()  # {storage: its bytes, in a list}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.add(tree_leaves(out))
        return out

    def add(self, tensors) -> None:
        for tensor in tensors:
            if torch.is_tensor(tensor) and tensor.device.type == self.device:
                storage = tensor.untyped_storage()
                if storage not in self.known:
                    self.known[storage] = [_rounded(storage)]
                    self.live += self.known[storage][0]
                    weakref.finalize(storage, self._freed, self.known[storage])
        self.peak = max(self.peak, self.live)

    def changed(self) -> None:
        """Counts storages anew that were resized."""
        for storage, size in list(self.known.items()):
            self.live += _rounded(storage) - size[0]
            size[0] = _rounded(storage)
        self.peak = max(self.peak, self.live)

    def _freed(self, size: list[int]) -> None:
        self.live -= size[0]


def _rounded(storage: torch.UntypedStorage) -> int:
    return -(-storage.nbytes() // BLOCK) * BLOCK


class WithoutNumbers(BaseOffload):
    """Layers of a model on meta that pass through buffers there: their bytes are counted, and nothing is read."""

    def __init__(self, plan: Parts, bytes_: LiveBytes):
        super().__init__(plan.memory.base_offload, plan.memory.recompute)
        self.bytes_ = bytes_

    def take(self, model) -> None:
        self.make_buffers([_layer_of(model, name) for name in packing.layer_names(model)], META)
        PackedBase(Path(), self.layers).install(model, self.tensors_of)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        shape = embedding.weight.shape
        dtype = embedding.weight.dtype
        embedding.register_forward_pre_hook(partial(self._rows, shape[1], dtype))
        del head.weight, embedding.weight
        head.__class__ = HeadInFile
        head.outside = SimpleNamespace(full=partial(self._head, shape, dtype))
        self.head_follows = True

    def _head(self, shape, dtype: torch.dtype) -> torch.Tensor:
        self.make_room()
        self.bytes_.changed()
        return torch.empty(shape, dtype=dtype, device=META)

    def _rows(self, width: int, dtype: torch.dtype, embedding, args: tuple) -> None:
        embedding.weight = torch.nn.Parameter(torch.empty(args[0].numel(), width, dtype=dtype, device=META), False)

    def _read(self, number: int, content: torch.Tensor, used) -> tuple:
        self.bytes_.changed()
        return None, 0.0


def _layer_of(model, prefix: str) -> LayerFile:
    tensors = {}
    linears = {}
    for below, module in model.get_submodule(prefix).named_modules():
        path = f"{prefix}.{below}"
        if isinstance(module, QuantizedLinear):
            linears[path] = packed_base.facts_of(module)
            tensors |= {f"{path}.{n}": t for n, t in zip(module.names, module.stored(), strict=True)}
        elif below:
            tensors |= {f"{path}.{n}": p for n, p in module.named_parameters(recurse=False)}
    kinds = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    return LayerFile(prefix, Path(), 0, "", 0, kinds, linears, {})


def counted(config: dict, settings, lengths) -> tuple[int, int, dict]:
    """(predicted, counted, predicted items) peak bytes of one microbatch of documents of these lengths."""
    plan = Parts(settings)
    bytes_ = LiveBytes(META)
    if plan.memory.base_offload:
        offload = WithoutNumbers(plan, bytes_)
        model = large.model(config, settings, META, packed=offload.take)
        offload.attach(model)
    else:
        model = large.model(config, settings, META)
    engine = torch_engine(model, settings, META)
    per_document.register()
    engine.forward.use(Layout(True, "", chunked_head=True))
    engine.forward.attention = Attention(AttentionPlan("auto", ("varlen",)))
    rows = tiny.dataset(lengths, vocab=config["vocab_size"])
    (batch,) = microbatches(rows, range(len(lengths)), "padding_free", len(lengths), 10**9, 0)
    trained = [p for p in model.parameters() if p.requires_grad]
    moments = [torch.zeros_like(p) for p in trained for _ in range(2)]
    with bytes_:
        bytes_.add([*model.parameters(), *model.buffers(), *moments])
        for _ in range(2):
            with in_step(model, DTYPES[Parts(settings).precision.compute]):
                model.train()
                loss = engine.forward.nll(batch)
                (loss / batch.num_targets).backward()
            del loss
            for p in trained:
                p.grad = None
    shape = ModelShape.from_config(config)
    load = MicrobatchShape(tuple(lengths), batch.num_targets, "padding_free")
    found = memory.estimate(Parts(settings), shape, load, "cuda")
    items = {name: n for name, n in found["items"].items() if name != "libraries"}
    return sum(items.values()), bytes_.peak, items


def answering(config: dict, settings, work: Work) -> tuple[int, int, dict]:
    """(predicted, counted, predicted items) peak bytes of greedy answers: the forward of the prompts, then one a token.

    transformers' `generate` reads values, which meta tensors have not: its steps are repeated here.
    """
    model = large.model(config, settings, META).eval()
    model.set_attn_implementation(_masked_kernel())
    ids = torch.zeros((work.rows, work.prompt), dtype=torch.int64, device=META)
    with LiveBytes(META) as bytes_, torch.no_grad():
        bytes_.add([*model.parameters(), *model.buffers()])
        # What dense_weights does, but for which layers on meta are those of other stages.
        parts = {id(part) for part in fused.quantized_parts(model)}
        for layer in model.modules():
            if isinstance(layer, QuantizedLinear) and id(layer) not in parts:
                layer.cache(torch.bfloat16)
        cache = transformers.DynamicCache(config=model.config)
        for _ in range(work.new):
            logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            ids = logits.to(torch.float32, copy=True).argmax(-1, keepdim=True)
            del logits
    plan = Parts(settings)
    found = inference.predicted(plan, ModelShape.from_config(config), "cuda", work)
    items = {name: n for name, n in found["items"].items() if name not in ("libraries", "loading")}
    return sum(items.values()), bytes_.peak, items


def _masked_kernel() -> str:
    """The name of the attention that torch runs on CUDA for left-padded prompts: its memory-efficient kernel."""

    def attend(module, query, key, value, mask, scaling=None, **kwargs):
        groups = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(groups, 1) if groups > 1 else t for t in (key, value))
        out = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, None, False, scale=scaling)[0]
        return out.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("masked_kernel", attend)
    return "masked_kernel"
