"""Batched generation with mlx-lm's KV caches: greedy or sampling, with per-row stopping."""

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from finetune.generation import NewTokens, Sampling, together_as_alone
from finetune.mlx_engine.mlx_lm_internals import BatchKVCache, KVCache, make_prompt_cache
from finetune.parts.engine_limits import PREFILL_TOKENS

TOGETHER = 3e-2  # of the largest logit: 16 bits round sums of other lengths otherwise; another mask is far above it


def restrict(logits_BV: mx.array, how: Sampling) -> mx.array:
    """The logits divided by the temperature, -inf for the tokens that top_k and top_p exclude."""
    logits_BV = logits_BV / how.temperature
    if 0 < how.top_k < logits_BV.shape[-1]:
        least = mx.sort(logits_BV, axis=-1)[:, -how.top_k, None]
        logits_BV = mx.where(logits_BV < least, -mx.inf, logits_BV)
    if how.top_p < 1:
        order = mx.argsort(-logits_BV, axis=-1)
        share = mx.softmax(mx.take_along_axis(logits_BV, order, axis=-1), axis=-1)
        excluded = mx.cumsum(share, axis=-1) - share >= how.top_p
        excluded[:, 0] = False
        excluded = mx.put_along_axis(mx.zeros(logits_BV.shape, mx.bool_), order, excluded, axis=-1)
        logits_BV = mx.where(excluded, -mx.inf, logits_BV)
    return logits_BV


def choose(logits_BV: mx.array, how: Sampling, keys: Callable[[], mx.array]) -> mx.array:
    """The next token of each row. `keys()`: a new random key, taken only where one is drawn with."""
    if how.temperature <= 0:
        return mx.argmax(logits_BV, axis=-1)
    return mx.random.categorical(restrict(logits_BV, how), key=keys())


def answers_together(model: Any, pad_id: int, vocab_size: int, limit: int | None) -> bool:
    """True if left-padded prompts of unequal length get the same logits in a batch as alone. Other kinds of caches than
    KVCache have no mask for padding; some mlx-lm classes (Gemma 2) apply the row mask to heads.
    """
    if any(type(cache) is not KVCache for cache in make_prompt_cache(model)):
        return False
    return together_as_alone(partial(_first_logits, model, pad_id), vocab_size, limit, TOGETHER)


def _first_logits(model: Any, pad_id: int, prompts: list[list[int]]) -> np.ndarray:
    ids, cache = _padded(model, prompts, pad_id)
    return np.array(model(ids, cache=cache)[:, -1].astype(mx.float32))


def _padded(model: Any, prompts: list[list[int]], pad_id: int) -> tuple[mx.array, list]:
    """(ids padded on the left, a cache that knows of it)."""
    width = max(map(len, prompts))
    padding = [width - len(p) for p in prompts]
    cache = make_prompt_cache(model)
    if len(prompts) > 1:
        cache = [BatchKVCache(padding) for _ in cache]
    ids = np.array([[pad_id] * n + list(p) for n, p in zip(padding, prompts, strict=True)], np.int32)
    return mx.array(ids), cache


def generate(
    model: Any,
    prompts: list[list[int]],
    max_new_tokens: int,
    eos_ids: set[int],
    pad_id: int,
    stop_row: Callable[[int, list[int]], bool] | None,
    on_token: Callable[[list[int]], None] | None,
    how: Sampling,
    keys: Callable[[], mx.array],
) -> list[list]:
    """New token ids per prompt, without the stop token. `keys()`: a new random key.

    Prompts of unequal length are padded on the left: see `answers_together`.
    """
    ids, cache = _padded(model, prompts, pad_id)
    step = max(1, PREFILL_TOKENS // len(prompts))
    while ids.shape[1] > step:
        model(ids[:, :step], cache=cache)
        mx.eval([c.state for c in cache])
        ids = ids[:, step:]
    new = NewTokens(len(prompts), eos_ids, stop_row, on_token)
    for _ in range(max_new_tokens):
        tokens = choose(model(ids, cache=cache)[:, -1].astype(mx.float32), how, keys)
        ids_of_rows: Any = tokens.tolist()
        if new.add(ids_of_rows):
            break
        ids = tokens[:, None]
    return new.ids
