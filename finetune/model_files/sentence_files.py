"""Files by which sentence-transformers opens a model folder: the last token's hidden state, of unit length."""

import json
from pathlib import Path

MODULES = "modules.json"
POOLING = "1_Pooling"
NORMALIZE = "2_Normalize"
SENTENCE_SETTINGS = ("sentence_bert_config.json", "config_sentence_transformers.json")
KINDS = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


def write_sentence_files(folder: Path, width: int | None, length: int | str | None) -> None:
    """Writes them. `width`: of hidden states; `length`: tokens of a text, after which it is cut; None: as the tokenizer
    says.
    """
    modules = [("", "Transformer"), (POOLING, "Pooling"), (NORMALIZE, "Normalize")]
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (path, name) in enumerate(modules)
    ]
    pooling = {"word_embedding_dimension": width, **{f"pooling_mode_{kind}": kind == KINDS[-1] for kind in KINDS}}
    for path, _ in modules[1:]:
        (folder / path).mkdir()
    contents = {
        folder / MODULES: listed,
        folder / POOLING / "config.json": pooling,
        folder / NORMALIZE / "config.json": {},
        folder / SENTENCE_SETTINGS[0]: {"max_seq_length": length, "do_lower_case": False},
        folder / SENTENCE_SETTINGS[1]: {"similarity_fn_name": "cosine"},
    }
    for file, content in contents.items():
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
