"""Generation over the stages of a pipeline: each runs transformers' generate, with a key-value cache of its own layers.

A forward receives hidden states from the stage before and sends its own to the next; the last stage chooses the token
of each row and gives it to all. So every stage's generate sees the same tokens, and ends rows alike.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from finetune.torch_engine.parallel.pipeline import Attempt, SingleStage, Stage, directly
from finetune.torch_engine.weights.vocabulary import rows_of

# What the model and its output call the cache: transformers 5.24 renamed it.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
# Kinds of cached layers whose length alone says what the masks and positions of other stages need to know.
COUNTED = (DynamicLayer, DynamicSlidingWindowLayer)


@contextlib.contextmanager
def over_stages(model: Any, stage: SingleStage | Stage):
    """Context in which the model's forward, as transformers' generate calls it, runs over all stages, with greedy
    choice. Every stage of a pipeline generates in it, with the same arguments.
    """
    if isinstance(stage, SingleStage):
        yield
        return
    own = model.forward
    caches: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
    model.forward = functools.wraps(own)(functools.partial(_forward, model, stage, own, caches))
    if stage.device.type == "cpu":  # whose experts transformers would compute another way than a single process
        model._optimize_model_for_decode = contextlib.nullcontext
    try:
        yield
    finally:
        del model.forward
        vars(model).pop("_optimize_model_for_decode", None)


def has_counted_cache(model: PreTrainedModel) -> bool:
    """False if the model's cache holds recurrent states too, which only the stages that compute them have."""
    return all(type(layer) in COUNTED for layer in DynamicCache(config=model.config).layers)


def _forward(
    model: PreTrainedModel, stage: Stage, own: Callable, caches: MutableMapping, **inputs: Any
) -> CausalLMOutputWithPast:
    """The model's output of the last stage, on the others one with its tokens. RuntimeError if any stage's layers
    raise. Collective over the stages.
    """
    shape = inputs["input_ids"].shape
    cache = inputs.get(CACHE)
    inputs = {n: v.to(stage.device) if torch.is_tensor(v) else v for n, v in inputs.items()}
    of_chunks = [None] * stage.chunks
    if cache is not None:  # one per chunk: a forward of one may not see what the one before has added
        others = [DynamicCache(config=model.config) for _ in range(stage.chunks - 1)]
        of_chunks = [cache, *caches.setdefault(cache, others)]

    def run():
        given = stage.inputs(inputs | {CACHE: of_chunks[stage.chunk]})
        return own(**given).logits

    attempt = Attempt(stage, run, shape)
    logits = stage.forward_only(directly, attempt, shape)
    for own_cache, layers in zip(of_chunks, stage.runs, strict=True):
        if own_cache is not None:
            _count_other_layers(own_cache, layers, shape)
    tokens_B = torch.zeros(shape[0] + 1, dtype=torch.int64)
    tokens_B[-1] = attempt.failed is not None
    if stage.last:
        tokens_B[:-1] = logits[:, -1].float().argmax(-1)
    dist.all_reduce(tokens_B, group=stage.groups.process_groups["pp"])
    if tokens_B[-1]:
        raise RuntimeError(attempt.failed or "the layers of another stage of the pipeline failed")
    if not stage.last:
        logits = torch.zeros(shape[0], 1, rows_of(model)).scatter_(2, tokens_B[:-1, None, None], 1.0)
    return CausalLMOutputWithPast(logits=logits, **{CACHE: cache})


def _count_other_layers(cache: Any, layers: range, shape: Sequence[int]) -> None:
    """Lets the cache of these layers know the positions that the others have seen: masks and positions are made from
    the lengths of the first layers of a kind, whichever stage computes them.
    """
    seen = torch.zeros(shape[0], 1, shape[1], 1)
    for i, layer in enumerate(cache.layers):
        if i not in layers:
            layer.update(seen, seen)
