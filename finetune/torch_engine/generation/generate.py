"""Batched generation with a KV cache: greedy or sampling, with per-row stopping."""

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from finetune.errors import MODEL_ERRORS, PlanError, first_line, is_out_of_memory
from finetune.generation import GREEDY, Prompt, Sampling, answered_within, together_as_alone
from finetune.parts.engine_limits import MOST_PACKED_BYTES
from finetune.quantizers.linear import QuantizedLinear, can_pack, packed
from finetune.torch_engine.attention.per_document import own_implementation, use
from finetune.torch_engine.device import FREE_FOR_WEIGHTS
from finetune.torch_engine.experts import fused
from finetune.torch_engine.generation.over_stages import has_counted_cache, over_stages
from finetune.torch_engine.generation.sampling import Restricted
from finetune.torch_engine.lora.layers import LoRALinear
from finetune.torch_engine.parallel.pipeline import SingleStage, Stage
from finetune.torch_engine.parallel.process_groups import ProcessGroups
from finetune.torch_engine.weights.load import weights_dtype


class _RowsDone(StoppingCriteria):
    """Stops rows for which `stop_row` is true, and streams tokens through `on_token`."""

    def __init__(
        self,
        start: int,
        stop_row: Callable[[int, list[int]], bool] | None,
        on_token: Callable[[list[int]], None] | None,
    ):
        self.start = start
        self.stop_row = stop_row
        self.on_token = on_token
        self.called = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any):
        self.called = True
        new = input_ids[:, self.start :].tolist()
        if self.on_token:
            self.on_token(new[0])
        done = [bool(self.stop_row and self.stop_row(row, ids)) for row, ids in enumerate(new)]
        return torch.tensor(done, device=input_ids.device)


DONE, TOGETHER, ALONE = range(3)
SINGLE_STAGE = SingleStage()


class Turns:
    """Rounds of answers for ranks that need one another in every forward pass, to gather weights or to compute experts.

    In a round all answer that can, and the others take part with a token of their own until the last is done. Rows that
    reach the model's last position may not go on while others do: they are answered by one rank at a time.
    """

    def __init__(self, groups: ProcessGroups):
        dims = groups.dims
        self.groups = groups
        self.place = groups.data_rank * dims.cp + groups.coordinate("cp")

    def wait(self, wants: int, take_part: Callable[[], None]) -> None:
        """Returns when it is this rank's turn, or when all are DONE. Collective."""
        while True:
            every = self.groups.all_gather_scalars([wants, self.place]).astype(int).tolist()
            if wants == TOGETHER or all(want == DONE for want, _ in every):
                return
            if wants == ALONE and not any(want == TOGETHER for want, _ in every):
                if self.place == min(place for want, place in every if want == ALONE):
                    return
            take_part()


def generate(
    model: PreTrainedModel,
    prompts: list[list[int]],
    max_new_tokens: int,
    eos_ids: set[int],
    pad_id: int,
    stop_row: Callable[[int, list[int]], bool] | None = None,
    on_token: Callable[[list[int]], None] | None = None,
    how: Sampling = GREEDY,
    turns: Turns | None = None,
    stage: SingleStage | Stage = SINGLE_STAGE,
) -> list[list[int]]:
    """New token ids per prompt, without the stop token. Prompts are left-padded to one length, for models that answer
    them so as each alone; others answer one at a time.

    `turns`: of ranks that run forwards together, see Turns; one without prompts takes part too. `stage`: of a pipeline,
    whose stages all generate with the same prompts.

    Switches the model to its default attention during the call, as flat attention has no KV
    cache.
    """
    assert stage.count == 1 or how == GREEDY, "the stages of a pipeline choose the likeliest token"

    def answer(
        prompts: list[list[int]],
        max_new_tokens: int,
        stop_row: Callable[[int, list[int]], bool] | None,
        on_token: Callable[[list[int]], None] | None,
    ):
        if turns:
            longest = max(map(len, prompts))
            turns.wait(ALONE if limit and longest + asked > limit else TOGETHER, idle)
        return _answered(model, prompts, max_new_tokens, eos_ids, pad_id, stop_row, on_token, how, turns is not None)

    idle = partial(one_token, model, eos_ids, pad_id)
    limit = context_limit(model)
    asked = max_new_tokens
    several = turns is not None or len(prompts) > 1  # ranks with shards compute as many forwards as the others
    with over_stages(model, stage):
        shows = any(isinstance(prompt, Prompt) for prompt in prompts)
        together = not shows and (not several or _sees_past_padding(model, pad_id, stage))
        new = []
        if prompts:
            new = answered_within(limit, prompts, max_new_tokens, stop_row, on_token, answer, together)
        if turns:
            turns.wait(DONE, idle)
    return new


def one_token(model: PreTrainedModel, eos_ids: set[int], pad_id: int) -> None:
    """Part that a rank without a prompt takes in a round of others."""
    _answered(model, [[0]], 1, eos_ids, pad_id, None, None, GREEDY, True)


_PADDED: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model: what _sees_past_padding found
# of the largest logit; another text is far above it
SAME_FP32 = 1e-4
SAME_16_BITS = 3e-2


def _sees_past_padding(model: PreTrainedModel, pad_id: int, stage: SingleStage | Stage) -> bool:
    """True if, in a trial, left-padded prompts of unequal length get the same logits in a batch as alone. Recurrent
    states that run over padding (RecurrentGemma, RWKV) and positions that count it (BERT, Whisper) change them.
    """
    if model not in _PADDED:
        vocab_size = model.config.get_text_config().vocab_size
        limit = context_limit(model)
        tolerance = SAME_FP32 if _computes_in_fp32(model) else SAME_16_BITS
        same = together_as_alone(partial(_first_logits, model, pad_id), vocab_size, limit, tolerance)
        _PADDED[model] = bool(stage.of_last(int(same)))
    return _PADDED[model]


def _device(model: PreTrainedModel) -> torch.device:
    """Device of the model's forward pass. Parameters on meta belong to other pipeline stages."""
    return next(p.device for p in model.parameters() if not p.is_meta)


def _computes_in_fp32(model: PreTrainedModel) -> bool:
    return weights_dtype(model) == torch.float32 and not torch.is_autocast_enabled(_device(model).type)


def _first_logits(model: PreTrainedModel, pad_id: int, prompts: list[list[int]]) -> np.ndarray:
    """fp32 logits [B, V] of the token after each prompt."""
    found = _continued(model, prompts, 1, (), pad_id, None, None, GREEDY, False, output_logits=True)
    return found.logits[0].float().cpu().numpy()


def _answered(
    model: PreTrainedModel,
    prompts: list[list[int]],
    max_new_tokens: int,
    eos_ids: set[int],
    pad_id: int,
    stop_row: Callable[[int, list[int]], bool] | None,
    on_token: Callable[[list[int]], None] | None,
    how: Sampling,
    synced: bool = False,
) -> list[list[int]]:
    found = _continued(model, prompts, max_new_tokens, eos_ids, pad_id, stop_row, on_token, how, synced)
    new = found.sequences[:, max(map(len, prompts)) :].tolist()
    return [_until_end(row, eos_ids, pad_id) for row in new]


@dataclass(frozen=True)
class Rounds:
    """Rounds of sampled answers of ranks that run forwards together, the longest of `most` tokens."""

    turns: Turns
    most: int


def drawn(
    model: PreTrainedModel,
    pad_id: int,
    eos_ids: set[int],
    rounds: Rounds | None,
    prompts: list[list[int]],
    max_new_tokens: int,
    processor: LogitsProcessor,
) -> list[list[int]]:
    """New tokens of prompts of one length, with those after the end, as `processor` leaves them possible."""
    synced = rounds is not None
    if rounds is not None:
        limit = context_limit(model)
        wants = TOGETHER
        if limit and len(prompts[0]) + rounds.most > limit:
            wants = ALONE
        rounds.turns.wait(wants, partial(one_token, model, eos_ids, pad_id))
    found = _continued(
        model, prompts, max_new_tokens, eos_ids, pad_id, None, None, GREEDY, synced, processors=(processor,)
    )
    return found.sequences[:, len(prompts[0]) :].tolist()


def _continued(
    model: Any,
    prompts: list[list[int]],
    max_new_tokens: int,
    eos_ids: Collection[int],
    pad_id: int,
    stop_row: Callable[[int, list[int]], bool] | None,
    on_token: Callable[[list[int]], None] | None,
    how: Sampling,
    synced: bool,
    output_logits: bool = False,
    processors: tuple[LogitsProcessor, ...] = (),
):
    """Output of transformers' generate for prompts padded on the left, or for one that shows images."""
    own = model.config._attn_implementation
    own_settings = model.generation_config
    # The folder's generation config (penalties, banned tokens, sampling) would change greedy decoding.
    model.generation_config = GenerationConfig()
    use(model, own_implementation(model))
    longest = max(map(len, prompts))
    # transformers takes the first parameter's device for the model's, which is meta where another stage embeds. So the
    # tokens of a pipeline are on the CPU, on every stage, as ranks tell each other by them whether they are done.
    is_stage = any(p.is_meta for p in model.parameters())
    if is_stage:
        device = torch.device("cpu")
    else:
        device = model.device
    ids = torch.tensor([[pad_id] * (longest - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    shown = {}
    if isinstance(prompts[0], Prompt):
        shown = _on_device(prompts[0].inputs(), device, weights_dtype(model))
    rows_done = _RowsDone(longest, stop_row, on_token)
    samples = how.temperature > 0
    head = model.get_output_embeddings()
    if head is None:
        hook = None
    else:
        hook = head.register_forward_pre_hook(_copied)

    def continued(use_cache: bool):
        return model.generate(
            input_ids=ids,
            attention_mask=mask,
            **shown,
            max_new_tokens=max_new_tokens,
            pad_token_id=pad_id,
            eos_token_id=sorted(eos_ids) or None,
            use_cache=use_cache,
            synced_gpus=synced,  # None would all-reduce at each token under FSDP, even if weights are in full
            stopping_criteria=StoppingCriteriaList([rows_done]),
            return_dict_in_generate=True,
            output_logits=output_logits,
            do_sample=samples,
            logits_processor=LogitsProcessorList([Restricted(how)] if samples else [*processors]),
            **(dict(temperature=1.0, top_k=0, top_p=1.0) if samples else {}),  # Restricted applies them
        )

    try:
        if not shown and _counts_positions(model, ids, mask):
            model.prepare_inputs_for_generation = partial(_without_positions, model.prepare_inputs_for_generation)
            try:
                return continued(False)
            finally:
                del model.prepare_inputs_for_generation
        if is_stage and not has_counted_cache(model):
            return continued(False)
        return _with_or_without_cache(continued, rows_done, model)
    finally:
        if hook is not None:
            hook.remove()
        use(model, own)
        model.generation_config = own_settings


def _on_device(arrays: dict[str, np.ndarray], device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    found = {name: torch.as_tensor(values, device=device) for name, values in arrays.items()}
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in found.items()}


def _copied(head: Any, inputs: tuple) -> tuple | None:
    """A forward pre-hook of the head: its input in a tensor of its own.

    The last positions of the prompts are a slice of [B, S, h]. For the strides of such a slice, even of one row,
    torch's matmul on a CPU copies the head's weights once per row.
    """
    if inputs:
        return (inputs[0].clone(memory_format=torch.contiguous_format), *inputs[1:])
    return None


def _with_or_without_cache(continued: Callable, rows_done: _RowsDone, model: PreTrainedModel):
    """continued(True); continued(False) if that fails before the first token.

    transformers cannot make the cache of every model from its config (BLT), or in every dtype (xLSTM).
    """
    try:
        return continued(True)
    except MODEL_ERRORS as error:
        if rows_done.called or is_out_of_memory(error):
            raise
    try:
        return continued(False)
    except MODEL_ERRORS as error:
        if is_out_of_memory(error):
            raise
        raise PlanError(
            f"--precision: {type(model).__name__} does not generate in {weights_dtype(model)} ({first_line(error)}). "
            "Try --precision fp32."
        ) from error


def _counts_positions(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor) -> bool:
    """True if an encoder used as a decoder counts positions itself, as RoBERTa does from its padding id. transformers'
    generate passes it positions from 0.
    """
    if not getattr(model.config, "is_decoder", False):
        return False
    given = {"position_ids": (mask.cumsum(1) - 1).clamp_min(0)}
    with torch.no_grad():
        own, other = (
            model(input_ids=ids, attention_mask=mask, use_cache=False, **more).logits[:, -1] for more in ({}, given)
        )
    return (own - other).abs().max().item() > 1e-3 * own.abs().max().item()


def _without_positions(prepare: Callable, *args: Any, **kwargs: Any) -> dict:
    return {name: value for name, value in prepare(*args, **kwargs).items() if name != "position_ids"}


def context_limit(model: PreTrainedModel) -> int | None:
    """Maximum context length of the model, if its config gives it."""
    config = model.config.get_text_config()
    found = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions"))
    return next((n for n in found if isinstance(n, int) and n > 1), None)


def _until_end(ids: list[int], eos_ids: set[int], pad_id: int):
    for i, token in enumerate(ids):
        if token in eos_ids:
            return ids[:i]
    while ids and ids[-1] == pad_id:
        ids = ids[:-1]
    return ids


def dense_bytes(layers: Iterable[LoRALinear | QuantizedLinear], dtype: torch.dtype) -> int:
    return sum(layer.in_features * layer.out_features for layer in layers) * dtype.itemsize


def _packable(modules: list[nn.Module]) -> list[LoRALinear]:
    """Adapted linears whose base is dense and has an order of oneDNN's; none if they are too many for a second copy."""
    layers = [m for m in modules if isinstance(m, LoRALinear) and type(m.base) is nn.Linear]
    found = [m for m in layers if can_pack(m.base.weight)]
    if dense_bytes(found, torch.bfloat16) > MOST_PACKED_BYTES:
        return []
    return found


@contextlib.contextmanager
def dense_weights(model: PreTrainedModel, free: int | None = None):
    """Keeps dense weights while many small forwards run, as in generation, and frees them afterwards. Where they would
    take most of the `free` bytes, each layer's are dequantized when it runs.

    In fp32 the adapters are merged into them; in 16 bits that would round the adapter away, so it stays separate, and
    weights are in oneDNN's order, of which a product of few rows reads no more than their bytes.
    """
    dtype = weights_dtype(model)
    here = [m for m in model.modules() if not any(p.is_meta for p in m.parameters(recurse=False))]
    merged: list[LoRALinear] = []
    if _computes_in_fp32(model):
        merged = [m for m in here if isinstance(m, LoRALinear)]
    # Few experts are routed to per token: theirs stay packed, and are dequantized one at a time.
    skipped = {id(layer.base) for layer in merged} | {id(part) for part in fused.quantized_parts(model)}
    stored = [m for m in here if isinstance(m, QuantizedLinear) and m.cached is None]
    cached = [m for m in stored if id(m) not in skipped]
    if free is not None and dense_bytes([*merged, *cached], dtype) > FREE_FOR_WEIGHTS * free:
        merged = []
        cached = []
    reordered = _packable(here)
    try:
        for layer in merged:
            layer.merged = layer.merged_weight()
        for linear in cached:
            linear.cache(dtype)
            if linear.cached is not None and can_pack(linear.cached):
                linear.cached = packed(linear.cached)
        for layer in reordered:
            layer.packed = packed(layer.base.weight)
        yield
    finally:
        for layer in reordered:
            layer.packed = None
        for layer in merged:
            layer.merged = None
        for linear in cached:
            linear.cached = None
