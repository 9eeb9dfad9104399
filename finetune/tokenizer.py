"""A model's tokenizer from its folder, and the tokens that end an answer."""

import json
from pathlib import Path

from finetune.errors import PlanError


def load_tokenizer(folder: Path):
    """transformers' tokenizer of a model folder; code in the folder is never run. Raises PlanError."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        first = str(error).splitlines()[0][:200]
        raise PlanError(
            f"{folder}: its tokenizer does not load ({first}). Put the tokenizer's files beside the weights."
        ) from None
    if not tokenizer.is_fast:
        raise PlanError(
            f"{folder}: has a slow tokenizer only, which gives no character offsets. Save a tokenizer.json beside it."
        )
    return tokenizer


def end_ids(tokenizer, folder: Path | None = None) -> set[int]:
    """Ids that end an answer: the tokenizer's, what its generation_config.json names, and the chat template's end of turn."""
    ids = {tokenizer.eos_token_id} - {None}
    file = Path(folder or tokenizer.name_or_path) / "generation_config.json"
    if file.is_file():
        named = json.loads(file.read_text()).get("eos_token_id")
        ids |= set(named if isinstance(named, list) else [named]) - {None}
    known = tokenizer.get_vocab()
    return ids | {
        known[t] for t in ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|return|>") if t in known
    }


def pad_id(tokenizer) -> int:
    """The padding id; where there is none, the end's: padding never is a target."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    return 0
