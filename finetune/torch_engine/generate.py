"""Batched generation with a key/value cache: greedy or sampled, rows ended one by one."""

import torch
from transformers import StoppingCriteria, StoppingCriteriaList


class _RowsDone(StoppingCriteria):
    """Ends the rows whose text can no longer become what is wanted, and calls `on_token` for a live view."""

    def __init__(self, start, hopeless, on_token):
        self.start, self.hopeless, self.on_token = start, hopeless, on_token

    def __call__(self, input_ids, scores, **kwargs):
        new = input_ids[:, self.start :].tolist()
        if self.on_token:
            self.on_token(new[0])
        done = [bool(self.hopeless and self.hopeless(row, ids)) for row, ids in enumerate(new)]
        return torch.tensor(done, device=input_ids.device)


def generate(
    model,
    prompts,
    max_new_tokens,
    eos_ids,
    pad_id,
    hopeless=None,
    on_token=None,
    temperature=0.0,
    top_k=0,
    top_p=1.0,
):
    """New token ids of each prompt, without the end token. Prompts are padded on the left to one rectangle.

    temperature 0 is greedy. The model's attention is set to its own for the time of the call: a cache is no flat row.
    """
    own = model.config._attn_implementation
    model.set_attn_implementation("sdpa" if getattr(model, "_supports_sdpa", False) else "eager")
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (longest - len(p)) + list(p) for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    sampled = {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    # A chat model's own generation settings (repetition penalty, sampling) would not be greedy: all are given here.
    plain = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    try:
        out = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, pad_token_id=pad_id,
            eos_token_id=sorted(eos_ids) or None, repetition_penalty=1.0, num_beams=1, use_cache=True,
            stopping_criteria=StoppingCriteriaList([_RowsDone(longest, hopeless, on_token)]),
            **(sampled if temperature > 0 else plain),
        )  # fmt: skip
    finally:
        model.set_attn_implementation(own)
    return [_until_end(row, eos_ids, pad_id) for row in out[:, longest:].tolist()]


def _until_end(ids, eos_ids, pad_id):
    for i, token in enumerate(ids):
        if token in eos_ids:
            return ids[:i]
    while ids and ids[-1] == pad_id:
        ids = ids[:-1]
    return ids
