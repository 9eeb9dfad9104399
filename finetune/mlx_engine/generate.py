"""Batched generation with mlx-lm's KV caches: greedy or sampling, with per-row stopping."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from finetune.mlx_engine.mlx_lm_internals import BatchKVCache, KVCache, make_prompt_cache

PREFILL_TOKENS = 2048


@dataclass(frozen=True)
class Sampling:
    """Sampling settings; temperature 0 is greedy; top_k 0 and top_p 1 leave all tokens."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def next(self, logits_BV, key) -> mx.array:
        """Token ids [B]."""
        if self.temperature <= 0:
            return mx.argmax(logits_BV, axis=-1)
        logits = logits_BV / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            least = mx.sort(logits, axis=-1)[:, -self.top_k, None]
            logits = mx.where(logits < least, -mx.inf, logits)
        if self.top_p < 1:
            order = mx.argsort(-logits, axis=-1)
            sorted_probs = mx.softmax(mx.take_along_axis(logits, order, axis=-1), axis=-1)
            before = mx.cumsum(sorted_probs, axis=-1) - sorted_probs  # of the tokens before it: the first always stays
            drop = mx.put_along_axis(mx.zeros(logits.shape, mx.bool_), order, before >= self.top_p, axis=-1)
            logits = mx.where(drop, -mx.inf, logits)
        return mx.random.categorical(logits, key=key)


def generate(model, prompts, max_new_tokens, eos_ids, pad_id, stop_row, on_token, how: Sampling, keys) -> list[list]:
    """New token ids per prompt, without the stop token. `keys()`: a new random key.

    Prompts of unequal length are padded on the left where the model's caches support it; otherwise one at a time.
    """
    one_at_a_time = any(type(cache) is not KVCache for cache in make_prompt_cache(model))
    new = []
    for rows in [[i] for i in range(len(prompts))] if one_at_a_time else [list(range(len(prompts)))]:
        stop = None if stop_row is None else (lambda row, ids, rows=rows: stop_row(rows[row], ids))
        new += _generate_rows(
            model, [prompts[i] for i in rows], max_new_tokens, eos_ids, pad_id, stop, on_token, how, keys
        )
        on_token = None  # of the first row only
    return new


def _generate_rows(model, prompts, max_new_tokens, eos_ids, pad_id, stop_row, on_token, how, keys) -> list[list]:
    width = max(map(len, prompts))
    padding = [width - len(p) for p in prompts]
    cache = make_prompt_cache(model)
    if len(prompts) > 1:
        cache = [BatchKVCache(padding) for _ in cache]
    ids = mx.array(np.array([[pad_id] * n + list(p) for n, p in zip(padding, prompts, strict=True)], np.int32))
    step = max(1, PREFILL_TOKENS // len(prompts))
    while ids.shape[1] > step:
        model(ids[:, :step], cache=cache)
        mx.eval([c.state for c in cache])
        ids = ids[:, step:]
    new, done = [[] for _ in prompts], [False] * len(prompts)
    for _ in range(max_new_tokens):
        logits = model(ids, cache=cache)[:, -1].astype(mx.float32)
        tokens = how.next(logits, keys())
        for row, token in enumerate(tokens.tolist()):
            if done[row]:
                continue
            if token in eos_ids:
                done[row] = True
                continue
            new[row].append(token)
            if row == 0 and on_token:
                on_token(new[0])
            done[row] = bool(stop_row and stop_row(row, new[row]))
        if all(done):
            break
        ids = tokens[:, None]
    return new
