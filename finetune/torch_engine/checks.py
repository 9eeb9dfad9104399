"""Checks on the loaded model: it is causal, and packed documents see only themselves.
The chunked head and a distributed model reproduce its logits.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from finetune.adapters.patterns import refuse_zero_rows
from finetune.engine import IGNORE_INDEX, Batch, ShowingImages
from finetune.errors import MODEL_ERRORS, CheckpointDamagedError, PlanError, is_out_of_memory
from finetune.objectives import LossOf
from finetune.torch_engine import loss
from finetune.torch_engine.attention import per_document
from finetune.torch_engine.attention.varlen import Attention
from finetune.torch_engine.device import TF32_EPS, random_states, rounds_to_tf32
from finetune.torch_engine.forward import (
    PADDED_INPUTS,
    Layout,
    ModelForward,
    OwnLogits,
    base_model,
    document_bounds,
    no_autocast,
    padded_logits,
)
from finetune.torch_engine.layerwise import probe, starts_at_zero
from finetune.torch_engine.parallel import context
from finetune.torch_engine.parallel.parallelism import Parallelism
from finetune.torch_engine.parallel.placement import local_shard
from finetune.torch_engine.parallel.process_groups import is_peer_failure
from finetune.torch_engine.weights.load import weights_dtype
from finetune.torch_engine.weights.vocabulary import rows_of


@dataclass(frozen=True)
class Check:
    """Result of a check on the loaded model, and the sentence that reports it."""

    holds: bool
    reason: str


# ---- of a run


def verify(
    forward: ModelForward, parallel: Parallelism, batch_layout: str, showing: ShowingImages | None = None
) -> dict:
    """{"batch_layout": (used, reason)}, on a GPU with "attention": runs the checks and gives the forward its layout.
    `showing`: rows by which packing is checked, in a run that sees images.

    PlanError if the model is not causal, padding_free was asked for and does not hold, or a distributed model computes
    other logits than the full one. Collective.
    """
    cp = forward.groups.dims.cp
    if not forward.recorded and (forward.reference or cp > 1):
        record_reference(forward, batch_layout, parallel)
    if forward.recorded:
        layout = forward.recorded[0]
    else:
        layout = check_model(forward, batch_layout, parallel, showing)
    if cp > 1:
        if not layout.padding_free:
            raise PlanError(
                f"--cp_degree {cp}: shards padding-free rows, and {layout.reason}. Use --dp_shards instead."
            )
        context.register()
        forward.shards_sequences = True
    forward.use(layout)
    if forward.recorded:
        check_parallel_logits(forward, parallel)
    used = None
    if layout.padding_free and forward.device.type != "cpu":
        used = forward.attention.used()
    return {"batch_layout": (layout.name, layout.reason)} | ({"attention": used} if used else {})


def check_model(
    forward: ModelForward, batch_layout: str, parallel: Parallelism | None = None, showing: ShowingImages | None = None
) -> Layout:
    """Batch layout for this model. Raises PlanError as `verify` does.

    Leaves the model in evaluation mode, with the layout's attention.
    """
    model = forward.model
    run = OwnLogits(forward.model, forward.device, forward.pipeline)
    call = partial(_call, parallel)
    implementation = per_document.own_implementation(model)
    model.eval()
    per_document.use(model, implementation)  # it may have been checked before, and then has the layout's
    refuse_zero_rows(forward.groups.all_gather_object(_zero_rows(model)))
    call(check_causal, model, forward.autocast, run)
    call(check_sparse_attention, model, forward.autocast, forward.context_length, run)
    if forward.sees_images and showing is not None:
        call(check_sees, forward, showing, run)
    packed = Check(False, "requested")
    bounds = False
    if batch_layout != "padded":
        packed = call(
            check_padding_free,
            model,
            forward.autocast,
            forward.context_length,
            forward.row_length,
            False,
            forward.attention,
            run,
        )
        if not packed.holds and forward.groups.dims.cp == 1:
            told = call(
                check_padding_free,
                model,
                forward.autocast,
                forward.context_length,
                forward.row_length,
                True,
                forward.attention,
                run,
            )
            bounds = told.holds
            if told.reason.split("(")[0] == packed.reason.split("(")[0]:
                more = ""
            else:
                more = f"; {told.reason}"
            if told.holds:
                packed = told
            else:
                packed = Check(False, packed.reason + more)
        if packed.holds and forward.sees_images:
            packed = call(check_packed_images, forward, showing, bounds, run)
    if batch_layout == "padding_free" and not packed.holds:
        raise PlanError(f"--batch_layout padding_free: {packed.reason}. Use auto or padded.")
    layout = Layout(packed.holds, packed.reason, passes_bounds=bounds)
    if not layout.padding_free:
        words: tuple[str, ...] = PADDED_INPUTS
        if forward.sees_images:  # whose positions the model finds itself
            words = ("mask",)
        inputs = call(choose_padded_inputs, model, forward.autocast, forward.pad_id, run, words)
        layout = replace(layout, padded_inputs=inputs)
    per_document.use(model, per_document.NAME if packed.holds else implementation)
    dims = forward.groups.dims
    if packed.holds and not bounds and dims.cp == 1 and dims.pp == 1 and forward.may_share_prompts:
        shares = call(check_shared_prompts, model, forward.autocast, forward.attention, run)
        layout = replace(layout, shares_prompts=shares.holds)
    head = call(
        check_head,
        model,
        layout.name,
        forward.autocast,
        layout.passes_bounds,
        forward.attention,
        run,
        forward.vocabulary,
    )
    layout = replace(layout, chunked_head=head.holds)
    if forward.vocabulary is not None and forward.vocabulary.exchanges_positions:
        _refuse_own_loss(layout, head)
    return layout


def _refuse_own_loss(layout: Layout, head: Check) -> None:
    """Raises PlanError if the loss is computed from the model's own logits, which --vocab_parallel does not shard."""
    alone = not layout.padding_free and layout.padded_inputs == "rows"
    if alone or not head.holds:
        if alone:
            reason = "its rows go through the model one by one"
        else:
            reason = head.reason
        raise PlanError(f"--vocab_parallel true: {reason}. Use false.")


def record_reference(forward: ModelForward, batch_layout: str, parallel: Parallelism | None = None) -> None:
    """Runs the checks, and records the logits of the full model that its shards must give: while each rank computes the
    full model, or layer by layer from the files of a model that is distributed already. Collective.
    """
    forward.layout = layout = check_model(forward, batch_layout, parallel)
    batch = _reference_batch(forward)
    if forward.reference is not None:
        forward.recorded = layout, forward.reference.logits(layout, batch, forward.groups, forward.pad_id)
        return
    with _probed(forward.model, parallel):
        forward.recorded = layout, _call(parallel, forward.logits, batch)


@contextlib.contextmanager
@torch.no_grad()
def _probed(model: PreTrainedModel, parallel: Parallelism | None = None):
    """Context in which adapters' zero factors have the values of layerwise.probe: otherwise no slice of an adapter
    would show in the logits.
    """
    names = starts_at_zero(model)
    held = {}
    if parallel is None:
        parameters = dict(model.named_parameters())
        held = {name: parameters[name].clone() for name in names}
        for name in names:
            parameters[name].copy_(probe(name, held[name].shape))
    else:
        place = parallel.placement
        held = {name: place.local_shard(name).clone() for name in names if name in place.of_stage}
        for name in held:
            parallel.copy_weight(name, probe(name, place.full_shape(name)).numpy())
    try:
        yield
    finally:
        for name, before in held.items():
            (parameters[name] if parallel is None else parallel.placement.local_shard(name)).copy_(before)


def _call(parallel: Parallelism | None, work: Callable, *args: Any):
    """work(*args); of a distributed model, what the forward gathered is freed, and a check holds if it does on every
    rank: slices that are wrong may give each rank logits of its own.
    """
    if parallel is None:
        return work(*args)
    try:
        found = parallel.call(work, *args)
    finally:
        parallel.reshard()
    if isinstance(found, Check):
        holds = not parallel.forward.groups.all_reduce_max(not found.holds)
        if holds == found.holds:
            return found
        return Check(holds, "it does not hold on another rank")
    return found


def _reference_batch(forward: ModelForward) -> Batch:
    """Two short documents, or one if rows are padded."""
    assert forward.layout is not None, "the layout is decided first"
    if forward.layout.padding_free:
        lengths = [13, 9]
    else:
        lengths = [13]
    ids = probe_ids(forward.model, (sum(lengths),)).numpy()
    positions = np.concatenate([np.arange(n) for n in lengths])
    documents = np.repeat(np.arange(len(lengths)), lengths)
    return Batch(ids[None], np.full((1, len(ids)), IGNORE_INDEX), positions[None], documents[None], ())


@torch.no_grad()
def check_parallel_logits(forward: ModelForward, parallel: Parallelism) -> None:
    """Raises PlanError unless the distributed model gives the logits of the full one, and where ranks compute those of
    some tokens each, its loss. Collective.
    """
    groups = forward.groups
    batch = _reference_batch(forward)
    assert forward.recorded is not None, "record_reference comes first"
    recorded = forward.recorded[1]
    expected = recorded
    work = partial(forward.logits, batch)
    shape = forward.shape(batch)
    eps = _dtype_eps(forward.model, forward.autocast, forward.device)
    forward.pipeline.set_hidden_dtype(parallel.call, work)
    with _probed(forward.model, parallel):
        logits = forward.pipeline.forward_only(parallel.call, work, shape)
        with _nudged(forward.model, eps):
            nudged = forward.pipeline.forward_only(parallel.call, work, shape)
        if forward.vocabulary is None:
            off = 0.0
        else:
            off = _loss_off(forward, parallel, batch)
    parallel.reshard()
    rounding = 0.0
    if logits is not None:
        rounding = ((nudged - logits).abs().max() / recorded.abs().max()).item()
        real = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        if groups.dims.cp > 1:
            cp = groups.dims.cp
            indices = context.rank_token_indices(len(logits) * cp, groups.coordinate("cp"), cp)
            real = torch.from_numpy(indices < len(expected)).to(logits.device)
            expected = expected[torch.from_numpy(indices[indices < len(expected)]).to(logits.device)]
        if len(expected):
            difference = (logits[real] - expected).abs().max() / recorded.abs().max()
            off = float(np.maximum(off, difference.item()))  # NaN stays
    off = groups.all_reduce_max(off)
    rounding = groups.all_reduce_max(rounding)
    forward.recorded = None
    exact = _is_exact(forward.model, forward.autocast, forward.device)
    if not off <= max(1e-4 if exact else 5e-2, ROUNDING_FACTOR * rounding):
        raise PlanError(
            f"{groups.dims}: the distributed model does not give the logits of the full one (max diff {off:.1e}). "
            "Use --dp_shards instead."
        )


def _loss_off(forward: ModelForward, parallel: Parallelism, batch: Batch) -> float:
    """Relative difference between the batch's summed next-token loss and that of the recorded logits. Collective."""
    labels_BS = np.roll(batch.input_ids_BS, -1, 1)
    last_BS = np.roll(batch.document_ids_BS, -1, 1) != batch.document_ids_BS
    last_BS[:, -1] = True
    batch = replace(batch, labels_BS=np.where(last_BS, IGNORE_INDEX, labels_BS))
    nll = forward.pipeline.forward_only(parallel.call, partial(forward.nll, batch), forward.shape(batch))
    if nll is None:  # a stage before the last
        return 0.0
    summed = nll.double() * forward.fraction_of(LossOf.NLL)
    for group in ("cp", "tp"):
        summed = forward.groups.all_reduce(summed, group)
    labels_T = torch.from_numpy(batch.labels_BS.flatten()).to(summed.device)
    targets = labels_T != IGNORE_INDEX
    assert forward.recorded is not None, "record_reference comes first"
    expected = loss.nll_of_logits(forward.recorded[1][targets], labels_T[targets])
    return (summed / expected - 1).abs().item()


# ---- of a model


def _zero_rows(model: nn.Module) -> list[str]:
    """Names of modules on this rank whose DoRA magnitudes are zero in a row."""
    end = ".lora_magnitude_vector"
    magnitudes = {name.removesuffix(end): p for name, p in model.named_parameters() if name.endswith(end)}
    return [name for name, p in magnitudes.items() if not p.is_meta and (local_shard(p) == 0).any()]


def _reraise_if_not_the_models(error: Exception) -> None:
    """Lets exhausted memory, lost ranks and damaged files through: they say nothing about the model."""
    if isinstance(error, (PlanError, CheckpointDamagedError)) or is_out_of_memory(error) or is_peer_failure(error):
        raise error


def _is_exact(model: PreTrainedModel, autocast: Callable, device: torch.device | None = None) -> bool:
    """True if products are fp32's: not cast by autocast, nor rounded to TF32. `device`: None: the model's."""
    in_fp32 = autocast is no_autocast and weights_dtype(model) == torch.float32
    return in_fp32 and not rounds_to_tf32(device or model.device)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:150]


@torch.no_grad()
def check_causal(model: PreTrainedModel, autocast: Callable, run: OwnLogits | None = None) -> None:
    """Raises PlanError if the loaded model does not run, or if a token sees later ones.

    Two rows that differ in their last tokens, in either order: each expert is then routed as many rows in both, so that
    every product has the same shape. Bitwise in 16 bits, to rounding in fp32, where a sort of experts that is not
    stable gives rows other places in a product. `run`, here and below: what computes the logits of a distributed model.
    """
    run = run or OwnLogits(model)
    name = type(model).__name__
    length = 13
    seen = 7
    rows = probe_ids(model, (2, length)).to(run.device)
    rows[1, :seen] = rows[0, :seen]
    try:
        with autocast():
            # Always five: a forward over shards is collective, and ranks need not agree on what is equal.
            original, swapped, short = (run(input_ids=i, use_cache=False) for i in (rows, rows.flip(0), rows[:, :seen]))
            with _nudged(run.model, _dtype_eps(model, autocast, run.device)):
                nudged = run(input_ids=rows, use_cache=False)
            _run_in_training_mode(run, rows[:1])
    except MODEL_ERRORS as error:
        _reraise_if_not_the_models(error)
        raise PlanError(
            f"--model_name: {name} does not run with these adapters and dtypes ({_first_line(error)}). "
            "Use another --train_type, or another model."
        ) from error
    if original.shape[:2] != rows.shape or short.shape[1] != seen:
        raise PlanError(
            f"--model_name: {name} does not give a row of logits for each token, so it is not a causal language model. "
            "Give another."
        )
    original, swapped, short, nudged = (logits[0, :seen].float() for logits in (original, swapped, short, nudged))
    _check_finite(original, name)
    least = 0.0
    if _dtype_eps(model, autocast, run.device) == torch.finfo(torch.float32).eps:
        least = ROUNDING_FACTOR * torch.finfo(torch.float32).eps
    if not _largest_difference(swapped, original) <= least:
        raise PlanError(
            f"--model_name: {name} lets a token see those after it, or another row of its batch (they move its logits "
            f"by {_largest_difference(swapped, original):.1e}), so it is not a causal language model. "
            f"{_decoder_remedy(model)}"
        )
    # Kernels for other shapes round otherwise, which single tokens of a trained model amplify to any size; a model that
    # reads the length moves all of them. The medians of 170 classes, in fp32 and bf16: 1.3 times the rounding at most.
    moved, rounding = (_differences(logits, original).median().item() for logits in (short, nudged))
    if not moved <= ROUNDING_FACTOR * max(rounding, _dtype_eps(model, autocast, run.device)):
        raise PlanError(
            f"--model_name: {name} is not a causal language model: the logits of its tokens change with the number of "
            "tokens after them. Give another."
        )


def probe_ids(model: PreTrainedModel, shape: tuple[int, ...]) -> torch.Tensor:
    """Random ids of ordinary tokens: reserved and control tokens, whose embeddings no training has moved, are at the
    ends of a vocabulary.
    """
    first = rows_of(model) // 4
    return torch.randint(first, max(first + 1, 3 * first), shape, generator=torch.Generator().manual_seed(0))


@contextlib.contextmanager
def _nudged(model: PreTrainedModel, eps: float):
    """Context in which the output of the embeddings is off by one unit in its last place: what that moves of the
    logits is rounding, measured on this model, whichever kernels compute.
    """
    embeddings = model.get_input_embeddings()
    if embeddings is None:  # of a stage of a pipeline after the first
        yield
        return

    handle = embeddings.register_forward_hook(lambda module, args, out: _nudge(out, eps))
    try:
        yield
    finally:
        handle.remove()


def _nudge(values: torch.Tensor, eps: float) -> torch.Tensor:
    """Values that are off by `eps` of themselves, to either side in turn."""
    signs_H = 1 - 2 * (torch.arange(values.shape[-1], device=values.device) % 2)
    return (values.float() * (1 + eps * signs_H)).to(values.dtype)


@torch.no_grad()
def check_sparse_attention(
    model: PreTrainedModel, autocast: Callable, context_length: int, run: OwnLogits | None = None
) -> None:
    """Raises PlanError if an attention that picks tokens picks others when more tokens follow a document.

    Among scores that are equal, as ReLU makes them, top-k picks by the length of the row. Documents are longer than
    what is picked, and as many as show it: of 16 with 24 tokens where 8 are picked, 1 to 6 do, by the class.
    """
    picked = limit_of(model, SPARSE)
    if not picked or picked >= context_length:
        return
    run = run or OwnLogits(model)
    length = 3 * picked
    ids = probe_ids(model, (max(1, min(16, 2**10 // picked)), 2 * length)).to(run.device)

    def logits(n: int) -> torch.Tensor:
        return run(input_ids=ids[:, :n], use_cache=False)[:, :length].flatten(0, 1).float()

    with autocast():
        longer, alone, again = (logits(n) for n in (2 * length, length, length + 1))
        with _nudged(model, _dtype_eps(model, autocast, run.device)):
            rounding = _largest_difference(logits(length), alone)
    off = max(_largest_difference(longer, alone), _largest_difference(again, alone))
    if not off <= max(1e-4 if _is_exact(model, autocast, run.device) else 5e-2, ROUNDING_FACTOR * rounding):
        raise PlanError(
            f"--model_name: {type(model).__name__} picks {picked} tokens by its sparse attention, and of longer "
            f"documents it picks others when more tokens follow (logits move by {off:.0e}). Add --context_length "
            f"{picked}."
        )


def _decoder_remedy(model: PreTrainedModel) -> str:
    if getattr(model.config, "is_decoder", None) is False:
        return 'Set "is_decoder": true in its config.json, if it is to be one.'
    return "Give another."


def _run_in_training_mode(run: OwnLogits, ids: torch.Tensor) -> None:
    """Raises what the model raises only while it trains, as Reformer does of lengths; random numbers are not spent."""
    with torch.random.fork_rng(random_states(run.device)):
        run.model.train()
        try:
            run(input_ids=ids, use_cache=False)
        finally:
            run.model.eval()


@torch.no_grad()
def check_padding_free(
    model: PreTrainedModel,
    autocast: Callable,
    context_length: int = 0,
    row_length: int = 0,
    passes_bounds: bool = False,
    attention: Attention | None = None,
    run: OwnLogits | None = None,
) -> Check:
    """Two packed documents give the logits of the same two alone, by the model's own attention.

    The second ignores the first. `passes_bounds`: the model is told where documents begin, for layers that are no
    attention. `attention`: the kernels that may be used. Rows of `row_length` tokens may be longer than a table of
    positions in the model: then one is tried.
    """
    per_document.register()
    run = run or OwnLogits(model)
    # Longer than the attention window, if rows can be: a window that is only in the model's mask would not be seen.
    window = limit_of(model, WINDOWS)
    first_length = 13
    if window and window < context_length:
        first_length = window + 8
    lengths = (first_length, first_length, 9)
    one, other, two = probe_ids(model, (sum(lengths),)).split(lengths)
    try:
        with autocast():
            alone, rounding = _logits_and_rounding(model, autocast, run, [one, two])
            per_document.use(model, per_document.NAME)
            packed, changed = (_packed_logits(run, [first, two], passes_bounds, attention) for first in (one, other))
            positions = table_of_positions(model) or row_length
            last = packed[-len(two) :]
            if positions < row_length:  # as many tokens as the table has room for, and some more
                documents = [*[one] * -(-positions // len(one)), two]
                last = _packed_logits(run, documents, passes_bounds, attention)[-len(two) :]
    except MODEL_ERRORS as error:
        _reraise_if_not_the_models(error)
        return Check(False, f"this model does not support packed documents: {_first_line(error)}")
    leak = _largest_difference(changed[first_length:], packed[first_length:])
    off = max(_largest_difference(packed, alone), _largest_difference(last, alone[-len(two) :]))
    # Equal shapes round equally, except of experts, which multiply as many rows as were routed to them.
    if leak > (ROUNDING_FACTOR * rounding if _has_experts(model) else 0.0):
        return Check(False, f"a packed document sees the one before it (logits move by {leak:.1e})")
    if not off <= ROUNDING_FACTOR * rounding:
        apart = f"{off:.1e} apart, {rounding:.1e} is rounding"
        return Check(False, f"packed documents give other logits than separate ones ({apart})")
    return Check(True, f"rows are packed: checked, the same logits as of separate rows (to {off:.0e}, rounding)")


@torch.no_grad()
def check_sees(forward: ModelForward, showing: ShowingImages, run: OwnLogits) -> None:
    """Raises PlanError if the model does not run on what its folder's processor makes of a row with images."""
    layout = forward.layout
    try:
        with forward.autocast():
            _hidden_with_images(forward, run, Layout(False, "", padded_inputs="mask"), showing.alone[0])
    except MODEL_ERRORS as error:
        _reraise_if_not_the_models(error)
        raise PlanError(
            f"--model_name: {type(forward.model).__name__} does not run on what the processor of its folder makes of "
            f"an image ({_first_line(error)}). Take preprocessor_config.json and processor_config.json from where the "
            "model was published."
        ) from error
    finally:
        forward.layout = layout


@torch.no_grad()
def check_packed_images(
    forward: ModelForward, showing: ShowingImages | None, passes_bounds: bool, run: OwnLogits
) -> Check:
    """Check that two packed documents with images get the hidden states of each alone in a padded row. Positions and
    mask of that are the model's own.

    Bitwise in every dtype: a token sees none after it, within an image neither, and the second document does not see
    the first.
    """
    model = forward.model
    if showing is None:
        return Check(False, "no row with images was there to check that they can be packed")
    layout = forward.layout
    hidden = partial(_hidden_with_images, forward, run)
    alone = Layout(False, "", padded_inputs="mask")
    together = Layout(True, "", passes_bounds=passes_bounds)
    eps = _dtype_eps(model, forward.autocast, run.device)
    first_length = showing.alone[0].num_tokens
    at = showing.image_token
    try:
        with forward.autocast():
            separate = torch.cat([hidden(alone, batch) for batch in showing.alone])
            nudged = torch.cat([hidden(alone, batch, partial(_nudge, eps=eps), eps) for batch in showing.alone])
            rounding = max(_largest_difference(nudged, separate), eps)
            later = hidden(alone, showing.alone[0], partial(_moved, at=at))
            packed = hidden(together, showing.packed)
            changed = hidden(together, _with_other_answer(showing.packed, model))
    except MODEL_ERRORS as error:
        _reraise_if_not_the_models(error)
        return Check(False, f"this model does not support packed documents with images: {_first_line(error)}")
    finally:
        forward.layout = layout
    limit = ROUNDING_FACTOR * rounding if _has_experts(model) else 0.0
    seen = _largest_difference(later[:at], separate[:at])
    if seen > limit:
        return Check(False, f"tokens of an image see those after them (moved by {seen:.1e}): packed rows are causal")
    leak = _largest_difference(changed[first_length:], packed[first_length:])
    off = _largest_difference(packed, separate)
    if leak > limit:
        return Check(False, f"a packed document with images sees the one before it (moved by {leak:.1e})")
    if not off <= ROUNDING_FACTOR * rounding:
        apart = f"{off:.1e} apart, {rounding:.1e} is rounding"
        return Check(False, f"packed documents with images give other hidden states than separate ones ({apart})")
    return Check(True, f"rows are packed: checked with images, the same as separate rows (to {off:.0e}, rounding)")


def _hidden_with_images(
    forward: ModelForward,
    run: OwnLogits,
    layout: Layout,
    batch: Batch,
    change: Callable[[torch.Tensor], torch.Tensor] | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """[positions, h] fp32, of a batch through the decoder in this layout. `change`: of the embeddings, those of images
    included; images are off by `eps`.
    """
    model = forward.model
    forward.layout = layout
    per_document.use(model, per_document.NAME if layout.padding_free else per_document.own_implementation(model))
    inputs, _ = forward.inputs(batch)
    if eps:
        inputs = {
            name: _nudge(value, eps) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for name, value in inputs.items()
        }

    def changed(module: nn.Module, args: Any, kwargs: dict):
        assert change is not None, "hooked only where something changes"
        if "inputs_embeds" not in kwargs:
            raise ValueError("the language model is not given the embeddings of images")
        return args, kwargs | {"inputs_embeds": change(kwargs["inputs_embeds"])}

    hook = None
    if change is not None:
        hook = model.get_decoder().register_forward_pre_hook(changed, with_kwargs=True)
    try:
        return run.by(lambda **given: base_model(model)(**given).last_hidden_state, **inputs).flatten(0, 1).float()
    finally:
        if hook is not None:
            hook.remove()


def _moved(embeddings_BSH: torch.Tensor, at: int) -> torch.Tensor:
    """Embeddings of which those at one position are others."""
    moved = embeddings_BSH.clone()
    moved[:, at] += 1
    return moved


def _with_other_answer(packed: Batch, model: PreTrainedModel) -> Batch:
    """The batch with other tokens as the targets of its first document."""
    ids_BS = packed.input_ids_BS.copy()
    places = 1 + np.flatnonzero((packed.labels_BS[0] != IGNORE_INDEX) & (packed.document_ids_BS[0] == 0))
    ids_BS[0, places] = probe_ids(model, (len(places),)).numpy()
    return replace(packed, input_ids_BS=ids_BS)


@torch.no_grad()
def check_shared_prompts(
    model: PreTrainedModel, autocast: Callable, attention: Attention | None = None, run: OwnLogits | None = None
) -> Check:
    """Check that an answer to a shared prompt gets the logits of the same answer to a copy of the prompt."""
    run = run or OwnLogits(model)
    window = limit_of(model, WINDOWS)
    shared = 13
    if window and window < MOST_SHARED:
        shared = window + 3
    one, two = probe_ids(model, (shared + 6 + 9,)).split((shared + 6, 9))
    positions = torch.cat([torch.arange(len(one)), torch.arange(shared, shared + len(two))])
    try:
        with autocast():
            per_document.use(model, per_document.own_implementation(model))
            alone, rounding = _logits_and_rounding(model, autocast, run, [torch.cat([one[:shared], two])])
            per_document.use(model, per_document.NAME)
            inputs = packed_inputs([one, two], run.device, attention=attention)
            inputs["position_ids"] = positions[None].to(run.device)
            inputs["documents"] = per_document.documents_of(positions, run.device, attention)
            found = run(**inputs)[0].float()
    except MODEL_ERRORS as error:
        _reraise_if_not_the_models(error)
        return Check(False, f"prompts are not shared: {_first_line(error)}")
    off = _largest_difference(found[len(one) :], alone[shared:])
    if not off <= ROUNDING_FACTOR * rounding:
        return Check(False, f"shared prompts give other logits than repeated ones ({off:.1e} apart)")
    return Check(True, "prompts that several answers share are computed once")


# Of two sums in another order, one may round to either side at each layer; a model that sees another document, or
# counts positions on from it, is off by tenths.
ROUNDING_FACTOR = 8


def _logits(run: OwnLogits, ids: torch.Tensor) -> torch.Tensor:
    return run(input_ids=ids[None].to(run.device), use_cache=False)[0].float()


def _differences(logits_TV: torch.Tensor, expected_TV: torch.Tensor) -> torch.Tensor:
    """[T], each token's difference of logits, relative to their norm."""
    norms_T = expected_TV.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return (logits_TV - expected_TV).norm(dim=-1) / norms_T


def _largest_difference(logits_TV: torch.Tensor, expected_TV: torch.Tensor) -> float:
    """The largest of `_differences`; nan if any is not finite."""
    return _differences(logits_TV, expected_TV).max().item()


def _dtype_eps(model: PreTrainedModel, autocast: Callable, device: torch.device | None = None) -> float:
    """The rounding of one product's inputs."""
    device = device or model.device
    if autocast is no_autocast:
        dtype = weights_dtype(model)
    else:
        dtype = torch.get_autocast_dtype(device.type)
    in_tf32 = dtype == torch.float32 and rounds_to_tf32(device)
    if in_tf32:
        return TF32_EPS
    return torch.finfo(dtype).eps


def _check_finite(logits: torch.Tensor, name: str) -> None:
    if not logits.isfinite().all():
        raise PlanError(
            f"--model_name: {name} gives logits that are not finite before any training: its weights hold NaN or "
            "infinity, or overflow in this dtype. Try --precision fp32, or give another model."
        )


def _logits_and_rounding(
    model: PreTrainedModel, autocast: Callable, run: OwnLogits, documents: list[torch.Tensor]
) -> tuple[torch.Tensor, float]:
    """(logits of documents alone, how far rounding moves them at most: measured on this model, in this dtype)."""
    eps = _dtype_eps(model, autocast, run.device)
    alone_TV = torch.cat([_logits(run, document) for document in documents])
    _check_finite(alone_TV, type(model).__name__)
    with _nudged(run.model, eps):
        nudged_TV = torch.cat([_logits(run, document) for document in documents])
    return alone_TV, max(_largest_difference(nudged_TV, alone_TV), eps)


def _has_experts(model: PreTrainedModel) -> bool:
    return any("expert" in name for name, _ in model.named_modules())


# What configs call the number of tokens that a layer's attention sees at most, or picks.
MOST_SHARED = 512  # longer windows are not filled by a check
WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "attention_window_size", "sliding_window_size")
SPARSE = ("index_topk", "indexer_budget")
POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len", "n_ctx")


def limit_of(model: PreTrainedModel, names: tuple[str, ...]) -> int | None:
    """The smallest positive number that the model's config has under one of these names."""
    config = model.config.get_text_config()
    found = [getattr(config, name, None) for name in names]
    return min((n for n in found if isinstance(n, int) and n > 0), default=None)


def table_of_positions(model: PreTrainedModel) -> int | None:
    """The tokens that a mask or a table of positions in the model has room for; None if it has none."""
    limit = limit_of(model, POSITIONS) or -1
    masks = any(limit in buffer.shape for buffer in model.buffers() if buffer.dim() > 1)
    # Some tables begin with rows for padding.
    rows = (m.num_embeddings for m in model.modules() if isinstance(m, torch.nn.Embedding))
    return limit if masks or any(limit <= n <= limit + 2 for n in rows) else None


def packed_inputs(
    documents: list[torch.Tensor], device: torch.device, passes_bounds: bool = False, attention: Attention | None = None
):
    """The model's keyword arguments for documents packed into one row."""
    positions = torch.cat([torch.arange(len(d)) for d in documents])
    return {
        **(document_bounds(positions, device) if passes_bounds else {}),
        "input_ids": torch.cat(documents).unsqueeze(0).to(device),
        "position_ids": positions.unsqueeze(0).to(device),
        "documents": per_document.documents_of(positions, device, attention),
        "use_cache": False,
    }


def _packed_logits(run: OwnLogits, documents: list[torch.Tensor], passes_bounds: bool, attention: Attention | None):
    return run(**packed_inputs(documents, run.device, passes_bounds, attention))[0].float()


@torch.no_grad()
def choose_padded_inputs(
    model: PreTrainedModel,
    autocast: Callable,
    pad_id: int,
    run: OwnLogits | None = None,
    words: tuple[str, ...] = PADDED_INPUTS,
) -> str:
    """Word of `words`: the inputs with which each row of a padded batch gets the same logits as alone. Raises
    PlanError if none of them do.
    """
    run = run or OwnLogits(model)
    per_document.use(model, per_document.own_implementation(model))
    ids = probe_ids(model, (2, 17))
    lengths = (17, 9)
    off: dict[str, float | str] = {}
    positions = torch.arange(17).expand(2, -1)
    real = positions < torch.tensor(lengths)[:, None]
    ids = torch.where(real, ids, pad_id)
    with autocast():
        documents = [row[:n] for row, n in zip(ids, lengths, strict=True)]
        alone, rounding = _logits_and_rounding(model, autocast, run, documents)
        for word in words:
            try:
                given = {"ids": ids, "positions": positions, "real": real.long()}
                given = {name: tensor.to(run.device) for name, tensor in given.items()}
                rows = padded_logits(run, word, **given, lengths=list(lengths))
            except MODEL_ERRORS as error:
                _reraise_if_not_the_models(error)
                off[word] = _first_line(error)
                continue
            found = torch.cat([row[:n].float() for row, n in zip(rows, lengths, strict=True)])
            difference = _largest_difference(found, alone)
            off[word] = difference
            if difference <= ROUNDING_FACTOR * rounding:
                return word
    raise PlanError(
        f"--model_name: {type(model).__name__} gives a row of a padded batch other logits than the row alone ({off}, "
        f"{rounding:.1e} is rounding). Use another model."
    )


@torch.no_grad()
def check_head(
    model: PreTrainedModel,
    layout: str,
    autocast: Callable,
    passes_bounds: bool = False,
    attention: Attention | None = None,
    run: OwnLogits | None = None,
    vocabulary: loss.VocabularyShard | None = None,
) -> Check:
    """Our chunked head gives the model's own logits; if not, the model computes them at target positions."""
    head = loss.Head.of(model, vocabulary)
    if head is None or base_model(model) is model:
        return Check(False, "the head is not a plain linear after one decoder")
    run = run or OwnLogits(model)
    inputs = packed_inputs([probe_ids(model, (9,))], run.device, passes_bounds, attention)
    if layout == "padded":
        inputs = {n: v for n, v in inputs.items() if n not in ("documents", "position_ids")}
    try:
        with autocast():
            ours = run.by(lambda **given: head.logits(base_model(model)(**given).last_hidden_state), **inputs)
            ours = ours[0].float()
            theirs = run(**inputs)[0].float()
    except MODEL_ERRORS as error:
        _reraise_if_not_the_models(error)
        return Check(False, f"the decoder does not run without the model around it ({_first_line(error)})")
    if ours.shape != theirs.shape:
        return Check(False, "the decoder gives other hidden states than the head takes")
    off = (ours - theirs).abs().max().item() / (theirs.abs().max().item() or 1.0)
    if not off <= (1e-4 if _is_exact(model, no_autocast, run.device) else 2e-2):
        return Check(False, f"the model does more to its logits than its config says (max diff {off:.1e})")
    return Check(True, "logits computed in chunks equal the model's own")
