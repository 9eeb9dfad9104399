"""Checks on the loaded model: that it is causal, that packed documents do not see each other, that our chunked head gives its logits."""

from dataclasses import dataclass

import torch

from finetune.errors import PlanError
from finetune.torch_engine import attention, loss
from finetune.torch_engine.load import weights_dtype


@dataclass(frozen=True)
class Check:
    """What was shown on the loaded model, and the sentence that says it."""

    holds: bool
    reason: str


@torch.no_grad()
def check_causal(model, autocast) -> None:
    """Raises PlanError where the loaded model does not run as it is, or lets a token see those after it.

    Bitwise in every type: with other tokens after it, a causal model's products keep their shapes and what is masked adds zeros.
    """
    ids = torch.arange(3, 16)[None].to(model.device) % model.get_input_embeddings().weight.shape[0]
    middle, name = 6, type(model).__name__
    other_end, other_start = ids.clone(), ids.clone()
    other_end[0, middle + 1 :] = 2
    other_start[0, :middle] = 2

    try:
        with autocast():
            # Always three: a forward over shards is a collective, and ranks need not agree on what is equal.
            own, leaked, seen = (
                model(input_ids=i, use_cache=False).logits[0, : middle + 1].float()
                for i in (ids, other_end, other_start)
            )
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError) as error:
        first = str(error).splitlines()[0][:150]
        raise PlanError(
            f"--model_name: {name} does not run with these adapters and types ({first}). "
            "Use --train_type full, or another model."
        ) from error
    if torch.equal(own, leaked):
        return
    # A mixture's expert multiplies as many rows as were routed to it, and rounding may depend on their number: 3e-7 of the
    # logits in fp32. Later tokens that are seen move logits as far as earlier ones do, in any type: 0.5 to 2 times as far.
    moved = (own - leaked).abs().max().item() / max((own - seen)[middle].abs().max().item(), 1e-30)
    exact = autocast is no_autocast and weights_dtype(model) == torch.float32
    if not moved <= (1e-4 if exact else 0.1):
        raise PlanError(
            f"--model_name: {name} lets a token see those after it (they move logits {moved:.1e} times as far as "
            "those before it), so it is no causal language model. Give another."
        )


@torch.no_grad()
def check_padding_free(model, autocast, context_length: int = 0) -> Check:
    """Two short documents flat must equal the same two alone under the model's own attention, and the second must not
    change with the first.
    """
    attention.register()
    vocab = min(model.get_input_embeddings().weight.shape[0], 1000)
    generator = torch.Generator().manual_seed(0)
    # Longer than the attention window, where rows can be: a window that is only in the model's mask would not be seen.
    window = attention_window(model)
    first_length = window + 8 if window and window < context_length else 13
    lengths = (first_length, first_length, 9)
    one, other, two = (torch.randint(3, max(4, vocab), (n,), generator=generator) for n in lengths)
    try:
        with autocast():
            alone = torch.cat([model(input_ids=d[None].to(model.device)).logits[0].float() for d in (one, two)])
            model.set_attn_implementation(attention.NAME)
            flat, changed = (_packed_logits(model, [first, two]) for first in (one, other))
    except (ValueError, RuntimeError, TypeError, AttributeError, KeyError) as error:
        return Check(False, f"this model does not take flat rows: {str(error).splitlines()[0][:120]}")
    size = alone.abs().max().item()
    leak = (flat[first_length:] - changed[first_length:]).abs().max().item() / size
    off = (flat - alone).abs().max().item() / size
    dtype = torch.get_autocast_dtype(flat.device.type) if autocast is not no_autocast else weights_dtype(model)
    exact = dtype == torch.float32
    allowed = 1e-4 if exact else 5e-2
    if leak > (1e-5 if exact else 1e-2):
        return Check(False, f"a document flat sees the one before it (logits move by {leak:.1e})")
    if not off <= allowed:
        return Check(False, f"two documents flat are not the same two alone (logits off by {off:.1e})")
    return Check(True, f"two documents flat equal the same two alone (logits within {off:.0e})")


def attention_window(model) -> int | None:
    """Tokens a token sees back in the layers that see least, where the config says."""
    config = model.config.get_text_config()
    found = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return min((n for n in found if isinstance(n, int) and n > 0), default=None)


def no_autocast():
    import contextlib

    return contextlib.nullcontext()


def packed_inputs(documents, device):
    positions = torch.cat([torch.arange(len(d)) for d in documents])
    return {
        "input_ids": torch.cat(documents).unsqueeze(0).to(device),
        "position_ids": positions.unsqueeze(0).to(device),
        "documents": attention.documents_of(positions, device),
        "use_cache": False,
    }


def _packed_logits(model, documents):
    return model(**packed_inputs(documents, model.device)).logits[0].float()


@torch.no_grad()
def check_head(model, layout, autocast) -> Check:
    """Whether our chunked head gives the model's own logits; where not, the model makes them at target positions."""
    head = loss.Head.of(model)
    if head is None or base_model(model) is model:
        return Check(False, "the head is no plain linear behind one decoder")
    inputs = packed_inputs([torch.arange(3, 12)], model.device)
    if layout == "padded":
        inputs.pop("documents")
    with autocast():
        own = head.logits(base_model(model)(**inputs).last_hidden_state[0]).float()
        theirs = model(**inputs).logits[0].float()
    off = (own - theirs).abs().max().item() / theirs.abs().max().item()
    if not off <= (1e-4 if weights_dtype(model) == torch.float32 else 2e-2):
        return Check(False, f"the model does more to its logits than its config says (off by {off:.1e})")
    return Check(True, "logits made in chunks equal the model's own")


def base_model(model):
    """The model without its head: what gives last_hidden_state."""
    parts = (getattr(model, model.base_model_prefix, None), model.get_decoder(), getattr(model, "model", None))
    return next((part for part in parts if part is not None and part is not model), model)
