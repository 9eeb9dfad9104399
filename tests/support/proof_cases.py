"""Faults in a distributed model, each of which the comparison with the full model's logits has to find.

A fault is either in the code that slices (`patch`, a context around loading and building) or in what a rank then holds
or computes (`corrupt`, called with the engine on every rank).
"""

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist

from finetune.config import TrainConfig
from finetune.distributed.env import RankEnv
from finetune.errors import PlanError
from finetune.parts.parallel_dims import ParallelDims
from finetune.parts.parts import Parts
from finetune.torch_engine import loss
from finetune.torch_engine.loss import VocabularyShard
from finetune.torch_engine.parallel import expert, ring, tensor, vocabulary
from finetune.torch_engine.parallel.fsdp import decoder_layers
from finetune.torch_engine.parallel.placement import Placement, local_shard
from finetune.torch_engine.parallel.process_groups import ProcessGroups
from finetune.torch_engine.parallel.slices import Slice
from finetune.torch_engine.weights.local_shards import LocalShards
from tests.support import cases
from tests.support.build import load_model, torch_engine
from tests.support.ranks import each_in_groups_of_its_own

CPU = cases.DEVICE
LAYER = "model.layers.1."
ATTENTION, MLP = LAYER + "self_attn.", LAYER + "mlp."


@dataclass(frozen=True)
class Fault:
    """On a layout of cases.LAYOUTS, in a tiny model of this architecture, trained this way."""

    layout: str
    corrupt: Callable | None = None
    patch: Callable | None = None
    architecture: str = "llama"
    kind: str = "lora"

    @property
    def settings(self) -> TrainConfig:
        method = self.kind if self.kind in ("nf4", "hqq", "mlx") else None
        quantized = dict(quantization_backend=method, group_size=32, quant_type=None) if method else {}
        return dataclasses.replace(
            TrainConfig(),
            train_type="qlora" if method else "full" if self.kind == "full" else "lora",
            use_dora=self.kind == "dora",
            precision="fp32",
            lora_rank=4,
            cache_dequantized="false",
            use_gradient_checkpointing="false",
            **quantized,
        )


# ---- what a rank holds


def _value(engine, name: str) -> torch.Tensor:
    return local_shard(dict(engine.model.named_parameters(remove_duplicate=False))[name].detach())


def _others(engine, value: torch.Tensor, group: str) -> torch.Tensor:
    """The same tensor of the next rank of a group."""
    index, size = engine.groups.place(group)
    return engine.groups.all_gather_group(value.contiguous(), group)[(index + 1) % size]


def wrong_half(name: str, group: str = "tp"):
    """Each rank holds the slice of the next one."""

    def corrupt(engine):
        value = _value(engine, name)
        value.copy_(_others(engine, value, group))

    return corrupt


def changed(name: str, change: Callable):
    """On the ranks that have it, the value is `change(value)`."""

    def corrupt(engine):
        named = dict(engine.model.named_parameters(remove_duplicate=False))
        if not named[name].is_meta:
            value = local_shard(named[name].detach())
            value.copy_(change(value.clone()))

    return corrupt


def transposed(name: str):
    return changed(name, lambda value: value.t().reshape(value.shape))


def shifted(name: str):
    return changed(name, lambda value: value.roll(1, 0))


def block_swapped(name: str, dim: int):
    """The two blocks of a slice, of gate and up, in the other order."""
    return changed(name, lambda value: value.roll(value.shape[dim] // 2, dim))


def zeroed_on_last_rank(name: str, group: str = "tp"):
    def corrupt(engine):
        index, size = engine.groups.place(group)
        if index == size - 1:
            _value(engine, name).zero_()

    return corrupt


# ---- what a rank computes


def without_reduce(name: str):
    """The partial outputs of a row-parallel layer are not summed."""

    def corrupt(engine):
        layer = engine.model.get_submodule(name)
        layer.forward = partial(type(layer).forward, layer)

    return corrupt


def reduced_twice(name: str):
    def corrupt(engine):
        layer, group = engine.model.get_submodule(name), engine.groups.process_groups["tp"]
        forward = layer.forward

        def twice(*args):
            out = forward(*args).clone()
            dist.all_reduce(out, group=group)
            return out

        layer.forward = twice

    return corrupt


def gathered_in_other_order(name: str):
    def corrupt(engine):
        layer = engine.model.get_submodule(name)
        forward = layer.forward
        layer.forward = lambda x: forward(x).roll(1, -1)

    return corrupt


def layers_swapped(engine):
    """This stage runs its layers in the other order."""
    stage, layers = engine.groups.coordinate("pp"), decoder_layers(engine.model)
    each = len(layers) // engine.groups.dims.pp
    first, second = layers[stage * each], layers[stage * each + 1]
    first.forward, second.forward = partial(type(first).forward, second), partial(type(second).forward, first)


def layer_skipped(engine):
    """The last stage leaves out its last layer."""
    if engine.groups.coordinate("pp") == engine.groups.dims.pp - 1:
        decoder_layers(engine.model)[-1].forward = lambda hidden, *args, **kwargs: hidden


def layer_twice(engine):
    layer = decoder_layers(engine.model)[0]
    if engine.groups.coordinate("pp") == 0:
        forward = layer.forward
        layer.forward = lambda hidden, *args, **kwargs: forward(forward(hidden, *args, **kwargs), *args, **kwargs)


def hidden_rounded(engine):
    """Hidden states reach the next stage with half of their digits."""
    stage = engine.forward.pipeline
    received = stage._take_received
    stage._take_received = lambda: received().bfloat16().float()


def no_final_norm(engine):
    engine.model.model.norm.forward = lambda hidden: hidden


def no_scale(name: str, factor: float):
    """An adapter that is scaled by another factor than in one process."""

    def corrupt(engine):
        engine.model.get_submodule(name).scaling *= factor

    return corrupt


# ---- the code that slices


@contextlib.contextmanager
def patched(owner, name: str, value):
    """`owner.name` is `value(what it was)` meanwhile."""
    before = vars(owner)[name] if isinstance(owner, type) else getattr(owner, name)
    setattr(owner, name, value(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def _other_slices(before):
    def slices(self, size, groups):
        index, count = groups.place(self.group)
        each = size // self.blocks // count
        return [slice(s.start + each * (count - 1 - 2 * index), s.stop + each * (count - 1 - 2 * index))
                for s in before(self, size, groups)]  # fmt: skip

    return slices


def _other_take(before):
    def take(self, tensor, groups):
        index, count = groups.place(self.group)
        return tensor.unflatten(self.dim, (self.blocks, count, -1)).select(self.dim + 1, count - 1 - index).flatten(
            self.dim, self.dim + 1
        ).clone()  # fmt: skip

    return take


def _without_blocks(before):
    def take(self, tensor, groups):
        return before(dataclasses.replace(self, blocks=1), tensor, groups)

    return take


def _first_rows(before):
    def local_rows(self, num_rows, group="shard"):
        rows = before(self, num_rows, group)
        return slice(0, rows.stop - rows.start)

    return local_rows


@contextlib.contextmanager
def first_rows():
    with patched(ProcessGroups, "local_rows", _first_rows):
        yield


@contextlib.contextmanager
def other_half_is_set():
    """What is taken from a full trainable tensor, of a checkpoint or of the comparison, belongs to another rank."""

    def local_slices(before):
        def slices(self, name):
            cut, found = self.slices.get(name), before(self, name)
            if cut is None:
                return found
            index, count = self.groups.place(cut.group)
            each = self.full_shape(name)[cut.dim] // count
            moved = slice((count - 1 - index) * each, (count - index) * each)
            return [(*part[: cut.dim], moved, *part[cut.dim + 1 :]) for part in found]

        return slices

    with patched(Placement, "local_slices", local_slices):
        yield


def in_slices(change) -> Callable:
    return partial(patched, Slice, "slices", change)


def in_take(change) -> Callable:
    return partial(patched, Slice, "take", change)


def in_files() -> Callable:
    """Of the ranks' own reading: the reference reads through another object."""

    @contextlib.contextmanager
    def reading():
        from finetune.torch_engine.weights import stream

        with patched(stream.WeightLoader, "read_blocks", _blocks_of_next_layer):
            yield

    return reading


def _blocks_of_next_layer(before):
    def read_blocks(self, weight, index):
        other = dataclasses.replace(weight, names=[weight.names[0].replace(".layers.2.", ".layers.1.")])
        return before(self, other, index)

    return read_blocks


def applied(owner, name: str, apply: Callable):
    """`apply` in place of what the autograd function of this name computes."""
    return patched(owner, name, lambda _: SimpleNamespace(apply=apply))


def experts_not_reduced():
    return applied(tensor, "_ReduceFromTensorParallelRegion", lambda x, group: x)


def outputs_not_gathered():
    return applied(tensor, "_GatherFromTensorParallelRegion", lambda out, groups: torch.cat([out] * groups.dims.tp, -1))


def inputs_not_scattered():
    def first(x, groups):
        return x[..., : x.shape[-1] // groups.dims.tp].contiguous()

    return applied(tensor, "_ScatterToTensorParallelRegion", first)


def embeddings_not_reduced():
    return patched(vocabulary, "reduce_from_region", lambda _: lambda tensor, groups: tensor)


def not_exchanged(name: str) -> Callable:
    """Ranks keep their own of what the loss exchanges."""
    return partial(patched, VocabularyShard, name, lambda _: lambda self, tensor: tensor)


def labels_a_row_further():
    return patched(loss, "locate", lambda before: lambda labels, rows: before((labels - 1).clamp_min(0), rows))


@contextlib.contextmanager
def experts_in_other_order():
    def by_expert(before):
        def order(counts):
            found, _ = before(counts)
            return found, found  # not the inverse

        return order

    with patched(expert, "_by_expert", by_expert):
        yield


def _around(seen: Callable):
    """The ring, of which `seen` says what a rank takes for (a rank, its keys and values)."""

    def around(before):
        def passed(kv_KLD, context):
            for source, arrived_KLD in before(kv_KLD, context):
                yield seen(source, arrived_KLD, context.rank, kv_KLD)

        return passed

    return patched(ring, "around", around)


def keys_not_passed_on():
    return _around(lambda source, arrived, rank, own: (source, own))


def keys_taken_for_own():
    return _around(lambda source, arrived, rank, own: (rank, arrived))


FAULTS = {
    # Weights of column-parallel layers.
    "q_proj holds the other half": Fault("TP 2", wrong_half(ATTENTION + "q_proj.base.weight")),
    "k_proj holds the other half": Fault("TP 2", wrong_half(ATTENTION + "k_proj.base.weight")),
    "v_proj holds the other half": Fault("TP 2", wrong_half(ATTENTION + "v_proj.base.weight")),
    "gate_proj holds the other half": Fault("TP 2", wrong_half(MLP + "gate_proj.base.weight")),
    "up_proj holds the other half": Fault("TP 2", wrong_half(MLP + "up_proj.base.weight")),
    "q_proj is transposed": Fault("TP 2", transposed(ATTENTION + "q_proj.base.weight")),
    "gate_proj is a row further": Fault("TP 2", shifted(MLP + "gate_proj.base.weight")),
    "a bias holds the other half": Fault(
        "TP 2", wrong_half(ATTENTION + "q_proj.base.bias"), architecture="qwen2_biased"
    ),
    # Weights of row-parallel layers.
    "o_proj holds the other half": Fault("TP 2", wrong_half(ATTENTION + "o_proj.base.weight")),
    "down_proj holds the other half": Fault("TP 2", wrong_half(MLP + "down_proj.base.weight")),
    "o_proj is transposed": Fault("TP 2", transposed(ATTENTION + "o_proj.base.weight")),
    "down_proj is missing on a rank": Fault("TP 2", zeroed_on_last_rank(MLP + "down_proj.base.weight")),
    # What ranks exchange.
    "o_proj is not reduced": Fault("TP 2", without_reduce(ATTENTION + "o_proj")),
    "down_proj is not reduced": Fault("TP 2", without_reduce(MLP + "down_proj")),
    "down_proj is reduced twice": Fault("TP 2", reduced_twice(MLP + "down_proj")),
    "outputs are not gathered": Fault("TP 2", patch=outputs_not_gathered, architecture="phi3"),
    "inputs are not scattered": Fault("TP 2", patch=inputs_not_scattered, architecture="phi3"),
    "outputs are gathered in another order": Fault(
        "TP 2", gathered_in_other_order(ATTENTION + "qkv_proj"), architecture="phi3"
    ),
    # Rows of the vocabulary.
    "the embedding holds the other half": Fault("TP 2", wrong_half("model.embed_tokens.weight")),
    "the embedding is a row further on a rank": Fault("TP 2", shifted("model.embed_tokens.weight")),
    "the embedding is not reduced": Fault("TP 2", patch=embeddings_not_reduced),
    "the head holds the other half": Fault("TP 2", wrong_half("lm_head.weight")),
    "the head is missing on a rank": Fault("TP 2", zeroed_on_last_rank("lm_head.weight")),
    "a tied table holds the other half": Fault("TP 2", wrong_half("model.embed_tokens.weight"), architecture="tied"),
    "rows of unequal shards are a row further": Fault(
        "TP 2", shifted("model.embed_tokens.weight"), architecture="uneven", kind="full"
    ),
    "logits are gathered in another order": Fault("TP 2", gathered_in_other_order("lm_head")),
    "the loss's sums are not reduced": Fault("TP 2", patch=not_exchanged("sum")),
    "the loss's maxima are not reduced": Fault("TP 2", patch=not_exchanged("maximum")),
    "labels are looked up a row further": Fault("TP 2", patch=labels_a_row_further),
    "rows of a stage's head are the other half": Fault("PP 2 x TP 2", wrong_half("lm_head.weight"), kind="lora"),
    "rows of the embedding are another shard's": Fault(
        "FSDP2 2 x TP 2", wrong_half("model.embed_tokens.weight", "shard"), kind="lora"
    ),
    # Codes and scales.
    "packed rows are the other half": Fault("TP 2", wrong_half(ATTENTION + "q_proj.base.packed"), kind="nf4"),
    "packed columns are the other half": Fault("TP 2", wrong_half(ATTENTION + "o_proj.base.packed"), kind="nf4"),
    "scales are the other half": Fault("TP 2", wrong_half(MLP + "down_proj.base.absmax"), kind="nf4"),
    "zeros are the other half": Fault("TP 2", wrong_half(MLP + "up_proj.base.zero"), kind="hqq"),
    "scales are a row further": Fault("TP 2", shifted(MLP + "gate_proj.base.scales"), kind="mlx"),
    # Adapters, whose second factor is zero at first.
    "lora_B is set to the other half": Fault("TP 2", patch=other_half_is_set),
    "lora_A of a row holds the other half": Fault("TP 2", wrong_half(ATTENTION + "o_proj.lora_A")),
    "lora_A differs between ranks": Fault("TP 2", zeroed_on_last_rank(ATTENTION + "v_proj.lora_A")),
    "an adapter has another scale": Fault("TP 2", no_scale(MLP + "up_proj", 1.1)),
    "magnitudes are the other half": Fault("TP 2", wrong_half(ATTENTION + "q_proj.lora_magnitude_vector"), kind="dora"),
    # The code that slices.
    "ranges are another rank's": Fault("TP 2", patch=in_slices(_other_slices)),
    "ranges are another rank's, of packed weights": Fault("TP 2", patch=in_slices(_other_slices), kind="nf4"),
    "copies are another rank's": Fault("TP 2", patch=in_take(_other_take)),
    "copies are another rank's, of full matrices": Fault("TP 2", patch=in_take(_other_take), kind="hqq"),
    "a layer is read as the one before": Fault("TP 2", patch=in_files(), architecture="llama_deep"),
    # Mixtures of experts.
    "gate and up are one block": Fault("TP 2", patch=in_take(_without_blocks), architecture="mixtral"),
    "experts are not reduced": Fault("TP 2", patch=experts_not_reduced, architecture="mixtral"),
    "experts' down_proj holds the other half": Fault(
        "TP 2", wrong_half(MLP + "experts.base.down_proj"), architecture="mixtral"
    ),
    "experts' gate and up are swapped": Fault(
        "TP 2", block_swapped(MLP + "experts.base.gate_up_proj", 1), architecture="mixtral"
    ),
    "experts are another rank's": Fault(
        "EP 2", wrong_half(MLP + "experts.base.gate_up_proj", "ep"), architecture="mixtral"
    ),
    "experts are in another order": Fault("EP 2", shifted(MLP + "experts.base.down_proj"), architecture="mixtral"),
    "experts' adapters are another rank's": Fault(
        "EP 2", wrong_half(MLP + "experts.lora_A", "ep"), architecture="mixtral"
    ),
    "tokens return in another order": Fault("EP 2", patch=experts_in_other_order, architecture="mixtral"),
    "packed experts are another rank's": Fault(
        "EP 2", wrong_half(MLP + "experts.base.gate_up_proj.parts.0.packed", "ep"), architecture="mixtral", kind="nf4"
    ),
    # Stages of a pipeline.
    "layers of a stage are swapped": Fault("PP 2", layers_swapped, architecture="llama_deep"),
    "the last layer is left out": Fault("PP 2", layer_skipped),
    "a layer runs twice": Fault("PP 2", layer_twice),
    "hidden states lose digits": Fault("PP 2", hidden_rounded),
    "the final norm is left out": Fault("PP 2", no_final_norm),
    "the embedding is a row further": Fault("PP 2", shifted("model.embed_tokens.weight")),
    "the head is a row further": Fault("PP 2", shifted("lm_head.weight")),
    "a layer of the last stage is read as the one before": Fault(
        "PP 2", patch=in_files(), architecture="llama_deep", kind="full"
    ),
    # Several axes of ranks.
    "rows are another shard's": Fault(
        "FSDP2 2 x TP 2", wrong_half(ATTENTION + "k_proj.base.weight", "shard"), kind="lora"
    ),
    "packed rows are another shard's": Fault(
        "FSDP2 2 x TP 2", wrong_half(MLP + "down_proj.base.packed", "shard"), kind="nf4"
    ),
    "all shards have the first rows": Fault("FSDP2 2 x TP 2", patch=first_rows),
    "a slice of a stage is the other half": Fault("PP 2 x TP 2", wrong_half(MLP + "up_proj.base.weight"), kind="lora"),
    # Slices of a sequence.
    "keys of other ranks do not arrive": Fault("CP 2", patch=keys_not_passed_on),
    "keys of other ranks are taken for one's own": Fault("CP 2", patch=keys_taken_for_own),
}
CONTROLS = {
    f"{fault.layout}, {fault.architecture}, {fault.kind}": dataclasses.replace(fault, corrupt=None, patch=None)
    for fault in FAULTS.values()
}


def compare(rank: int, size: int, wanted: list[str], folders: dict[str, str]) -> dict:
    """{name of a fault or a control: what the comparison says, None if it finds nothing}; called in every rank."""
    known, found = FAULTS | CONTROLS, {}
    for name in each_in_groups_of_its_own(rank, size, wanted):
        fault = known[name]
        dims: ParallelDims = cases.LAYOUTS[fault.layout]
        groups, settings = ProcessGroups.of(RankEnv(rank, size), dims, CPU), fault.settings
        share = LocalShards.of(groups, Parts(settings))
        try:
            with fault.patch() if fault.patch else contextlib.nullcontext():
                model = load_model(folders[fault.architecture], settings, CPU, share=share, say=lambda line: None)
                engine = torch_engine(model, settings, CPU, ranks=groups, share=share)
                if fault.corrupt:
                    with torch.no_grad():
                        fault.corrupt(engine)
                engine.verify("auto")
            found[name] = None
        except PlanError as error:
            found[name] = str(error)
    return found
