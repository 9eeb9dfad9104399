"""Loads a model's tokenizer, and finds its end-of-answer and padding tokens."""

import json
from pathlib import Path

from finetune.errors import PlanError


def load_tokenizer(folder: Path):
    """Loads the transformers tokenizer of a model folder, never running code from it. Raises PlanError."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        first = str(error).splitlines()[0][:200]
        raise PlanError(
            f"{folder}: its tokenizer does not load ({first}). Put the tokenizer files next to the weights."
        ) from None
    if not tokenizer.is_fast:
        raise PlanError(
            f"{folder}: has only a slow tokenizer, without character offsets. Save a tokenizer.json next to it."
        )
    generation_ends(folder)  # used only after training; report errors in it now
    return tokenizer


def end_ids(tokenizer, folder: Path | None = None) -> set[int]:
    """Stop token ids: the tokenizer's EOS, those in generation_config.json, and the chat template's end of turn."""
    ids = {tokenizer.eos_token_id} - {None}
    ids |= generation_ends(Path(folder or tokenizer.name_or_path))
    known = tokenizer.get_vocab()
    return ids | {
        known[t] for t in ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|return|>") if t in known
    }


def generation_ends(folder: Path) -> set[int]:
    """EOS ids from the folder's generation_config.json; empty without such a file. Raises PlanError."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return set()
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{file}: is not JSON ({str(error)[:200]}). Fix or remove it.") from None
    if not isinstance(content, dict):
        raise PlanError(f"{file}: contains {type(content).__name__}, must contain an object. Fix or remove it.")
    named = content.get("eos_token_id")
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if not all(type(i) is int for i in ids):
        raise PlanError(
            f"{file}: eos_token_id is {json.dumps(named)[:80]}, must be a token id or a list of them. Fix or remove it."
        )
    return set(ids)


def pad_id(tokenizer) -> int:
    """Padding token id, or EOS if there is none: padding is never a target."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    return 0
