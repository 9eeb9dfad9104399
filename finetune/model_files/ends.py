"""Ends of a model's answers: as its files name them, and as a result's files name them after a training.

transformers and mlx-lm stop at generation_config.json's eos_token_id, without it at config.json's; vLLM, llama.cpp and
Ollama at the tokenizer's EOS token too. A base whose turns end otherwise would never stop in any of them.
"""

import copy
import json
from collections import Counter
from pathlib import Path

import numpy as np

from finetune.model_files.files import GENERATION, generation_config_of
from finetune.model_files.tokenizer import FullTokenizer, Tokenizer, end_ids, model_ends


def learned_ends(tokens: np.ndarray, is_target: np.ndarray, offsets: np.ndarray, tokenizer: Tokenizer) -> Counter[int]:
    """{id: how often} of the control tokens that end what is learned of documents."""
    next_is_target = np.append(is_target[1:], False)
    next_is_target[offsets[1:] - 1] = False
    ids, counts = np.unique(tokens[is_target & ~next_is_target], return_counts=True)
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | {tokenizer.eos_token_id}
    return Counter({int(i): int(n) for i, n in zip(ids, counts, strict=True) if int(i) in special})


def with_learned_end(tokenizer: FullTokenizer, ends: Counter[int], folder: Path) -> FullTokenizer:
    """The tokenizer of the result: its EOS token is the most usual of the learned `ends` where none of the files in the
    model's `folder` names that one, and no row ends with the EOS token that it has.
    """
    usual: int | None
    if ends:
        usual = ends.most_common(1)[0][0]
    else:
        usual = tokenizer.eos_token_id
    if usual is None or tokenizer.eos_token_id in ends or usual in end_ids(tokenizer, folder):
        return tokenizer
    found = copy.deepcopy(tokenizer)
    found.add_special_tokens({"eos_token": tokenizer.convert_ids_to_tokens(usual)})
    return found


def generation_config(base: dict | None, config: dict, ends: set[int]) -> dict | None:
    """The content of generation_config.json that stops at `ends`: the base's own where that does; None without one."""
    given = (base or config).get("eos_token_id")
    if isinstance(given, list):
        named = given
    elif given is None:
        named = []
    else:
        named = [given]
    if ends <= set(named):
        return base
    kept = {name: config[name] for name in ("bos_token_id", "pad_token_id") if type(config.get(name)) is int}
    return {**(kept if base is None else base), "eos_token_id": sorted(ends - set(named)) + named}


def write_ends(folder: Path, ends: set[int], tokenizer: FullTokenizer) -> str | None:
    """Makes a model's folder stop at `ends`; returns the line on what was written, if it did not before."""
    line = ends_line(ends, folder, tokenizer)
    if line:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        content = generation_config(generation_config_of(folder), config, ends)
        (folder / GENERATION).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return line


def ends_line(ends: set[int], folder: Path, tokenizer: FullTokenizer) -> str | None:
    """Line on the ends that the result's files name, if the files in the model's `folder` do not say it."""
    before = model_ends(folder)
    if ends <= before:
        return None
    new, old = (", ".join(map(str, tokenizer.convert_ids_to_tokens(sorted(ids)))) for ids in (ends - before, before))
    return f"answers end with {new}, the model's own with {old or 'no token'}: {GENERATION} of the result names both"
