"""Sampling many answers to each of several prompts: the policy of training, drawn from.

Prompts go through the layers once, packed end to end, whatever the number of answers to each; as many at a time as a
microbatch has tokens. An answer's keys and values are its own, a prompt's are those of all its answers. Rows leave the
batch when they have ended.

P prompts of at most S tokens, G answers to each at most, B answers under way, H heads, K key/value heads, D head size,
V vocabulary.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface, LogitsProcessor, PreTrainedModel

from finetune.generation import Sampled, Sampling
from finetune.parts.engine_limits import FIRST_TOKENS
from finetune.quantizers.linear import autocasts
from finetune.torch_engine.attention.blocks import Scoring
from finetune.torch_engine.attention.per_document import Documents, document_attention, documents_of, scoring_of
from finetune.torch_engine.attention.varlen import Attention
from finetune.torch_engine.generation.sampling import restrict

NAME = "decoding"
COMPACTED_AT = 0.75  # of the rows under way: below it, those that ended leave the batch
SCORED_TOGETHER = 16  # tokens of an answer
BLOCK = 256  # probabilities whose sums are searched first


@dataclass
class LayerCache:
    """Keys and values of one layer: of prompts [P, K, S, D], and of answers [B, K, room, D]."""

    prompt_keys: torch.Tensor
    prompt_values: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


@dataclass
class Cache:
    """Keys and values of all layers, and which rows are under way.

    `lengths_P`: of the prompts, `longest` of them; `prompt_B`: each row's prompt; `length`: tokens that every row has
    beside its prompt. `prefilled`: the documents of a forward over prompts, and the number of the first of them.
    """

    lengths_P: torch.Tensor
    longest: int
    prompt_B: torch.Tensor
    layers: dict[int, LayerCache] = field(default_factory=dict)
    length: int = 0
    prefilled: tuple[Documents, int] | None = None
    groups: "Groups | None" = None
    biases: dict = field(default_factory=dict)  # by window, of the present token

    def attend(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring, **given: Any
    ):
        """[B, 1, H, D], or of the prompts [1, T, H, D]."""
        if autocasts(q):
            q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
        if self.prefilled is not None:
            documents, first = self.prefilled
            self._keep_prompts(id(module), k, v, documents, first)
            return document_attention(module, q, k, v, None, documents=documents, **given)[0]
        layer = self.layers[id(module)]
        self._append(layer, k, v)
        return self._attend(layer, q, scoring)

    def _keep_prompts(self, layer: int, k: torch.Tensor, v: torch.Tensor, documents: Documents, first: int) -> None:
        """Keeps keys and values of the flat row, a padded prompt each."""
        if layer not in self.layers:
            prompts = [x.new_zeros(len(self.lengths_P), x.shape[1], self.longest, x.shape[3]) for x in (k, v)]
            own = [x.new_zeros(len(self.prompt_B), x.shape[1], FIRST_TOKENS, x.shape[3]) for x in (k, v)]
            self.layers[layer] = LayerCache(*prompts, *own)
        kept = self.layers[layer]
        for i, (start, length) in enumerate(zip(documents.starts, documents.lengths, strict=True)):
            kept.prompt_keys[first + i, :, :length] = k[0, :, start : start + length]
            kept.prompt_values[first + i, :, :length] = v[0, :, start : start + length]

    def _append(self, layer: LayerCache, k: torch.Tensor, v: torch.Tensor) -> None:
        if self.length == layer.keys.shape[2]:
            layer.keys = torch.cat([layer.keys, torch.zeros_like(layer.keys)], 2)
            layer.values = torch.cat([layer.values, torch.zeros_like(layer.values)], 2)
        layer.keys[:, :, self.length] = k[:, :, 0]
        layer.values[:, :, self.length] = v[:, :, 0]

    def _attend(self, layer: LayerCache, q: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """Attention of each row's token to its prompt and its own tokens."""
        assert self.groups is not None, "prefilled before"
        rows, heads, _, size = q.shape
        kv = layer.keys.shape[1]
        per = heads // kv
        own = min(self.seen, layer.keys.shape[2])
        grouped = self.groups.grouped(q.view(rows, kv, per, size))  # [P, G, K, per, D]
        prompts, most = grouped.shape[:2]
        q_PKND = grouped.transpose(1, 2).reshape(prompts * kv, most * per, size)
        k_PKSD = layer.prompt_keys.flatten(0, 1)
        to_prompt = torch.bmm(q_PKND, k_PKSD.transpose(1, 2)).view(prompts, kv, most, per, -1).transpose(1, 2)
        to_prompt = self.groups.rows(to_prompt)  # [B, K, per, S]
        to_own = torch.matmul(q.view(rows, kv, per, size), layer.keys[:, :, :own].transpose(2, 3))
        scores = torch.cat([to_prompt, to_own], -1).float() * scoring.scaling
        if scoring.softcap is not None:
            scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
        scores = scores + self._bias(scoring.window, to_prompt.shape[-1], own, q.device)
        if scoring.sinks_H is not None:
            sinks = scoring.sinks_H.float().view(1, kv, per, 1).expand(rows, -1, -1, -1)
            probs = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1].to(q.dtype)
        else:
            probs = torch.softmax(scores, -1).to(q.dtype)
        of_prompt, of_own = probs.split([to_prompt.shape[-1], own], -1)
        grouped = self.groups.grouped(of_prompt).transpose(1, 2).reshape(prompts * kv, most * per, -1)
        out = torch.bmm(grouped, layer.prompt_values.flatten(0, 1)).view(prompts, kv, most, per, -1).transpose(1, 2)
        out = self.groups.rows(out) + torch.matmul(of_own, layer.values[:, :, :own])
        return out.reshape(rows, 1, heads, -1)

    @property
    def seen(self) -> int:
        """Tokens of the answers that scores are computed of, those to come among them: their number changes with every
        token, and code is generated for each number.
        """
        return self.length + 1 + -(self.length + 1) % SCORED_TOGETHER

    def _bias(self, window: int | None, longest: int, own: int, device: torch.device) -> torch.Tensor:
        """[B, 1, 1, S + own]: 0 at keys that a row's token sees, else -inf."""
        if window not in self.biases:
            lengths_B1 = self.lengths_P[self.prompt_B].unsqueeze(1)
            column_S = torch.arange(longest, device=device)
            column_L = torch.arange(own, device=device)
            seen_S = column_S < lengths_B1
            seen_L = (column_L <= self.length).expand(len(lengths_B1), -1)
            if window is not None:
                at_B1 = lengths_B1 + self.length
                seen_S = seen_S & (at_B1 - column_S < window)
                seen_L = seen_L & (self.length - column_L < window)
            seen = torch.cat([seen_S, seen_L], 1)
            bias = torch.zeros(seen.shape, device=device).masked_fill_(~seen, float("-inf"))
            self.biases[window] = bias[:, None, None]
        return self.biases[window]

    def next_token(self) -> None:
        """Every row has one token more."""
        self.length += 1
        self.biases.clear()

    def keep(self, rows: torch.Tensor) -> None:
        """Drops the other rows, and prompts that have none left."""
        self.prompt_B = self.prompt_B[rows]
        kept, self.prompt_B = torch.unique(self.prompt_B, return_inverse=True)
        self.lengths_P = self.lengths_P[kept]
        own = self.length
        for layer in self.layers.values():
            layer.keys, layer.values = (
                torch.cat([x[rows, :, :own], x.new_zeros(len(rows), x.shape[1], FIRST_TOKENS, x.shape[3])], 2)
                for x in (layer.keys, layer.values)
            )
            if len(kept) < len(layer.prompt_keys):
                layer.prompt_keys = layer.prompt_keys[kept]
                layer.prompt_values = layer.prompt_values[kept]
        self.groups = Groups.of(self.prompt_B)
        self.biases.clear()


@dataclass(frozen=True)
class Groups:
    """Places of rows, ordered by prompt, in a table of P prompts with as many rows each.

    `slots`: of each row; None: every prompt has as many, so that the rows are the table.
    """

    num_prompts: int
    most: int
    slots: torch.Tensor | None

    @classmethod
    def of(cls, prompt_B: torch.Tensor) -> "Groups":
        counts = torch.bincount(prompt_B)
        most = int(counts.max())
        if bool((counts == most).all()):
            return cls(len(counts), most, None)
        starts = counts.cumsum(0) - counts
        within = torch.arange(len(prompt_B), device=prompt_B.device) - starts[prompt_B]
        return cls(len(counts), most, prompt_B * most + within)

    def grouped(self, x: torch.Tensor) -> torch.Tensor:
        """[B, ...] -> [P, most, ...], zeros where a prompt has fewer."""
        if self.slots is None:
            return x.view(self.num_prompts, self.most, *x.shape[1:])
        table = x.new_zeros(self.num_prompts * self.most, *x.shape[1:])
        return table.index_copy_(0, self.slots, x).view(self.num_prompts, self.most, *x.shape[1:])

    def rows(self, table: torch.Tensor) -> torch.Tensor:
        """[P, most, ...] -> [B, ...]."""
        flat = table.flatten(0, 1)
        if self.slots is None:
            return flat
        return flat.index_select(0, self.slots)


_NOW: list[Cache] = []  # of the forward that runs: not every model passes keyword arguments on to attention


def decoding_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **given: Any,
):
    """transformers' attention interface over the present cache."""
    if mask is not None:
        raise ValueError("the model adds a mask of its own to attention")
    given.pop("documents", None)
    return _NOW[-1].attend(module, query, key, value, scoring_of(query, **given), **given), None


AttentionInterface.register(NAME, decoding_attention)


@contextmanager
def decoding(model: PreTrainedModel, cache: Cache) -> Iterator[None]:
    """Context in which the model's attention is over the cache."""
    own = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    _NOW.append(cache)
    try:
        yield
    finally:
        _NOW.pop()
        model.set_attn_implementation(own)


@dataclass(frozen=True)
class Policy:
    """Source of samples. `hidden(ids, positions)`: the last hidden states [B, S, h]; `logits`: of [B, h]."""

    model: PreTrainedModel
    hidden: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    logits: Callable[[torch.Tensor], torch.Tensor]
    device: torch.device


def prefills(lengths: list[int], most: int) -> list[slice]:
    """Prompts of these lengths in order, as many at a time as have `most` tokens, one at least."""
    found = []
    start = 0
    tokens = 0
    for i, length in enumerate(lengths):
        if tokens and tokens + length > most:
            found.append(slice(start, i))
            start = i
            tokens = 0
        tokens += length
    return [*found, slice(start, len(lengths))]


def prefill(
    policy: Policy, cache: Cache, prompts: list[list[int]], most: int, going: Callable[[bool], bool]
) -> torch.Tensor:
    """[P, h]: the hidden states of each prompt's last token; keys and values are in the cache. `going`: see sample."""
    device = policy.device
    parts = prefills([len(prompt) for prompt in prompts], most)
    found = []
    for number in itertools.count():
        part = parts[min(number, len(parts) - 1)]  # where others go on, the last again
        positions = np.concatenate([np.arange(len(prompt)) for prompt in prompts[part]])
        flat = torch.tensor([[i for prompt in prompts[part] for i in prompt]], device=device)
        cache.prefilled = documents_of(positions, device, Attention()), part.start
        hidden = policy.hidden(flat, torch.from_numpy(positions)[None].to(device))[0]
        found.append(hidden[cache.lengths_P[part].cumsum(0) - 1])
        if not going(number + 1 < len(parts)):
            break
    cache.prefilled = None
    cache.groups = Groups.of(cache.prompt_B)
    return torch.cat(found[: len(parts)])


@torch.no_grad()
def sample(
    policy: Policy,
    prompts: list[list[int]],
    uniforms_GL: list[np.ndarray],
    max_new_tokens: list[int],
    eos_ids: set[int],
    how: Sampling,
    prefill_tokens: int,
    going: Callable[[bool], bool] = lambda mine: mine,
) -> list[list[Sampled]]:
    """Answers to each prompt, as many as its `uniforms_GL` has rows: a number of [0, 1) decides each token.

    `prefill_tokens`: of prompts in one forward. `going(mine)`: whether any rank goes on, asked after each forward; this
    one does if `mine`, and else takes part.
    """
    device = policy.device
    counts = [len(each) for each in uniforms_GL]
    prompt_B = torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor(counts)).to(device)
    lengths_P = torch.tensor([len(prompt) for prompt in prompts], device=device)
    cache = Cache(lengths_P, max(map(len, prompts)), prompt_B)
    steps = max(max_new_tokens)
    uniforms_BL = torch.from_numpy(np.concatenate([_padded(each, steps) for each in uniforms_GL])).to(device)
    most_B = torch.repeat_interleave(torch.tensor(max_new_tokens), torch.tensor(counts)).tolist()
    ends = torch.tensor(sorted(eos_ids), device=device)
    num_rows = len(prompt_B)
    ids: list[list[int]] = [[] for _ in range(num_rows)]
    log_probs: list[list[float]] = [[] for _ in range(num_rows)]
    ended = [False] * num_rows
    with decoding(policy.model, cache):
        logits_BV = policy.logits(prefill(policy, cache, prompts, prefill_tokens, going))[prompt_B]
        rows = list(range(num_rows))  # of those under way
        active = [True] * num_rows
        index_B = torch.arange(num_rows, device=device)
        while True:
            tokens_B, log_probs_B = draw(logits_BV, how, uniforms_BL[index_B, min(cache.length, steps - 1)])
            is_end_B = torch.isin(tokens_B, ends)
            found = zip(tokens_B.tolist(), log_probs_B.tolist(), is_end_B.tolist(), strict=True)
            for i, (token, log_prob, is_end) in enumerate(found):
                row = rows[i]
                if not active[i]:
                    continue
                ids[row].append(token)
                log_probs[row].append(log_prob)
                ended[row] = is_end
                active[i] = not is_end and len(ids[row]) < most_B[row]
            kept = [i for i, on in enumerate(active) if on]
            if kept and len(kept) <= COMPACTED_AT * len(rows):
                at = torch.tensor(kept, device=device)
                cache.keep(at)
                tokens_B = tokens_B[at]
                index_B = index_B[at]
                rows = [rows[i] for i in kept]
                active = [True] * len(rows)
            if not going(any(active)):  # where others go on, rows that have ended do too
                break
            # A row that has ended stays at its last position, which the model has.
            own_B = torch.tensor([min(cache.length, most_B[row] - 1) for row in rows], device=device)
            positions_B1 = (cache.lengths_P[cache.prompt_B] + own_B).unsqueeze(1)
            logits_BV = policy.logits(policy.hidden(tokens_B.unsqueeze(1), positions_B1)[:, 0])
            cache.next_token()
    answers = map(Sampled, ids, log_probs, ended)
    return [[next(answers) for _ in range(count)] for count in counts]


def sample_apart(
    answer: Callable[[list[list[int]], int, LogitsProcessor], list[list[int]]],
    prompts: list[list[int]],
    uniforms_GL: list[np.ndarray],
    max_new_tokens: list[int],
    eos_ids: set[int],
    how: Sampling,
) -> list[list[Sampled]]:
    """The same by transformers' generate, for models whose attention does not take packed prompts.

    `answer(prompts, max_new_tokens, processor)`: new tokens of each prompt, see generate.drawn.
    """
    found = []
    for prompt, numbers_GL, most in zip(prompts, uniforms_GL, max_new_tokens, strict=True):
        drawn = Drawn(len(prompt), how, torch.from_numpy(numbers_GL))
        new_GL = answer([prompt] * len(numbers_GL), most, drawn)
        answers = []
        for ids, log_probs in zip(new_GL, drawn.log_probs(), strict=True):
            end = next((i for i, token in enumerate(ids) if token in eos_ids), None)
            length = min(len(ids), most) if end is None else end + 1
            answers.append(Sampled(ids[:length], log_probs[:length], end is not None))
        found.append(answers)
    return found


class Drawn(LogitsProcessor):
    """Leaves the drawn token alone possible, for transformers' greedy choice; remembers its log-probability."""

    def __init__(self, start: int, how: Sampling, uniforms_GL: torch.Tensor):
        self.start = start
        self.how = how
        self.uniforms_GL = uniforms_GL
        self.log_probs_L: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        numbers_B = self.uniforms_GL[:, input_ids.shape[1] - self.start].to(scores.device)
        tokens_B, log_probs_B = draw(scores, self.how, numbers_B)
        self.log_probs_L.append(log_probs_B)
        return torch.full_like(scores, float("-inf")).scatter_(1, tokens_B[:, None], 0.0)

    def log_probs(self) -> list[list[float]]:
        return torch.stack(self.log_probs_L, 1).tolist()


def _padded(uniforms_GL: np.ndarray, length: int) -> np.ndarray:
    return np.pad(uniforms_GL, ((0, 0), (0, length - uniforms_GL.shape[1])))


def draw(logits_BV: torch.Tensor, how: Sampling, uniform_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(a token of each row, its log-probability before top_k and top_p). The first whose cumulated probability is above
    the row's number; greedy at temperature 0.

    Sums of blocks are searched first: a cumulated sum of all V would take longer than the logits.
    """
    logits_BV = logits_BV.float()
    if how.temperature <= 0:
        tokens_B = logits_BV.argmax(-1)
        return tokens_B, torch.log_softmax(logits_BV, -1).gather(1, tokens_B[:, None])[:, 0]
    whole_BV = logits_BV / how.temperature if how.temperature != 1 else logits_BV
    drawn_BV = whole_BV
    if how.top_k or how.top_p < 1:
        drawn_BV = restrict(logits_BV, how)
    largest_B1 = whole_BV.amax(-1, keepdim=True)
    parts_BV = (drawn_BV - largest_B1).exp_()
    rest = -parts_BV.shape[1] % BLOCK
    if rest:
        parts_BV = torch.nn.functional.pad(parts_BV, (0, rest))
    blocks_BNC = parts_BV.unflatten(1, (-1, BLOCK))
    sums_BN = blocks_BNC.sum(-1).double()
    cumulated_BN = sums_BN.cumsum(-1)
    total_B = cumulated_BN[:, -1]
    wanted_B = uniform_B * total_B
    block_B = torch.searchsorted(cumulated_BN, wanted_B[:, None], right=True)[:, 0].clamp_max(cumulated_BN.shape[1] - 1)
    at = torch.arange(len(block_B), device=block_B.device)
    before_B = cumulated_BN[at, block_B] - sums_BN[at, block_B]
    within_BC = blocks_BNC[at, block_B].double().cumsum(-1)
    place_B = torch.searchsorted(within_BC, (wanted_B - before_B)[:, None], right=True)[:, 0]
    # Rounding may leave the last number beyond the block's sum: the last token with a probability is meant.
    last_B = (blocks_BNC[at, block_B] > 0).long().mul(torch.arange(1, BLOCK + 1, device=at.device)).amax(-1) - 1
    tokens_B = block_B * BLOCK + torch.minimum(place_B, last_B)
    whole_B = total_B.log()
    if drawn_BV is not whole_BV:
        whole_B = (whole_BV - largest_B1).exp().double().sum(-1).log()
    log_probs_B = (whole_BV.gather(1, tokens_B[:, None])[:, 0] - largest_B1[:, 0]).double() - whole_B
    return tokens_B, log_probs_B.float()
