"""The files of a tokenizer beside what a run or an export writes: the base's, and in them what the run changed.

transformers writes two of them, tokenizer.json and a tokenizer_config.json that its fourth version does not open. Other
programs read the others: llama.cpp's converter takes the scores of tokenizer.model.
"""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from finetune.errors import PlanError
from finetune.model_files.tokenizer import NAMED, FullTokenizer, loaded_by_transformers
from finetune.system.files import check_inside
from finetune.system.json_files import read_json
from finetune.system.terminal import say
from finetune.system.untrusted import untrusted

NEWER_CLASS = "TokenizersBackend"
AS_IT_IS = "PreTrainedTokenizerFast"  # takes tokenizer.json as it is, by the name that both versions know
TRIED = "Hello there,\n 1234 it's."
CONFIG = "tokenizer_config.json"
SPECIALS = "special_tokens_map.json"
ADDED = "added_tokens.json"
# Names under which the tokenizers of transformers and of Mistral keep their files; code is none of them.
STEMS = "tokenizer special_tokens_map added_tokens chat_template vocab merges spiece spm sentencepiece source target"
STEMS += (
    " tekken bpe dict emoji normalizer target_vocab entity_vocab word_pronunciation word_shape byte_maps prophetnet"
)
SUFFIXES = r"json|txt|jinja|model|tiktoken|spm|codes|tokenizer"
TOKENIZER_FILE = re.compile(
    rf"({'|'.join(STEMS.split())})([._-][\w.-]+)?\.({SUFFIXES})|[\w.-]+\.(tiktoken|model\.v\w+)"
)


def is_tokenizer_file(name: str) -> bool:
    """True if a file of this name in a model folder belongs to the tokenizer."""
    return TOKENIZER_FILE.fullmatch(name) is not None


def files_in(folder: Path) -> tuple[Path, ...]:
    """The tokenizer's files of a folder."""
    return tuple(file for file in sorted(folder.iterdir()) if is_tokenizer_file(file.name) and file.is_file())


def has_vocabulary(folder: Path) -> bool:
    """True if a folder has a file of the tokenizer's that holds its tokens, not only what is said of them."""
    said = (CONFIG, SPECIALS, ADDED)
    return any(file.name not in said and not file.name.startswith("chat_template") for file in files_in(Path(folder)))


def save_tokenizer(tokenizer: FullTokenizer, folder: Path, base: Path) -> None:
    """Writes the tokenizer into `folder`; `base`: the folder of its base's, which it may have been changed from.

    What says which tokens there are is written from the tokenizer; other files are copied, its own folder's first.
    """
    tokenizer.save_pretrained(folder)
    published = {}
    if (base / CONFIG).is_file():
        published = read_json(base / CONFIG, {})
    config = config_for_all(read_json(folder / CONFIG, {}), published, tokenizer)
    new = _new_tokens(tokenizer, base)
    if new:  # classes that transformers builds from a vocabulary take these for all that were ever added
        listed = config.get("added_tokens_decoder") or {}
        config["added_tokens_decoder"] = _described(tokenizer.added_tokens_decoder) | listed | new
    _write(folder / CONFIG, config)
    _carry(base, folder, SPECIALS, {name: config[name] for name in NAMED if config.get(name) is not None})
    _carry(base, folder, ADDED, {token["content"]: int(index) for index, token in new.items()})
    _carry(base, folder, "chat_template.json", {"chat_template": tokenizer.chat_template})
    for file in (*_others(Path(tokenizer.name_or_path)), *_others(base)):
        if not (folder / file.name).exists():
            check_inside(file)
            shutil.copyfile(file, folder / file.name)
    if not _opens_as(tokenizer, folder):
        _write(folder / CONFIG, config | {"tokenizer_class": AS_IT_IS})
        if not _opens_as(tokenizer, folder):
            say("note: transformers makes other tokens by the saved tokenizer than the run", file=sys.stderr)


def _opens_as(tokenizer: FullTokenizer, folder: Path) -> bool:
    """True if the folder's tokenizer makes the same tokens of a text with every added token. One that encodes no such
    text is not compared.
    """
    text = TRIED.join(token.content for token in tokenizer.added_tokens_decoder.values()) + TRIED
    try:
        expected = _ids_of(tokenizer, text)
    except PlanError:
        return True
    try:
        return _ids_of(loaded_by_transformers(folder), text) == expected
    except PlanError:
        return False


def _ids_of(tokenizer: FullTokenizer, text: str) -> list[int]:
    with untrusted("the tokenizer encodes no text", "Use another.", reads=False):
        return tokenizer(text, verbose=False).input_ids


def config_for_all(saved: dict, published: dict, tokenizer: FullTokenizer) -> dict:
    """tokenizer_config.json that transformers 4 opens too: the base's, `published`, with what differs in the one that
    transformers 5 `saved`.
    """
    config = {name: value for name, value in (published or saved).items() if name not in ("backend", "auto_map")}
    config |= {name: saved.get(name) for name in NAMED if _text_of(saved.get(name)) != _text_of(config.get(name))}
    class_name = saved.get("tokenizer_class", NEWER_CLASS)
    config["tokenizer_class"] = AS_IT_IS if class_name == NEWER_CLASS else class_name
    lists = ("extra_special_tokens", "additional_special_tokens")
    config = {name: value for name, value in config.items() if name not in lists or isinstance(value, dict)}
    if listed := next((saved[name] for name in lists if isinstance(saved.get(name), list) and saved[name]), None):
        config["additional_special_tokens"] = listed
    if "chat_template" in config:
        template = tokenizer.chat_template
        named = isinstance(template, dict)
        config["chat_template"] = [{"name": n, "template": t} for n, t in template.items()] if named else template
    return config


def _new_tokens(tokenizer: FullTokenizer, base: Path) -> dict[str, dict]:
    """Tokens that were added to the base's, as tokenizer_config.json lists them: programs that read tokenizer.model
    know no others. The base's own are listed as it lists them.
    """
    if not (base / "tokenizer.json").is_file():
        return {}
    listed = json.loads((base / "tokenizer.json").read_text(encoding="utf-8")).get("added_tokens") or []
    known = {token["content"] for token in listed}
    return _described({i: t for i, t in tokenizer.added_tokens_decoder.items() if t.content not in known})


def _described(added: dict[int, Any]) -> dict[str, dict]:
    """Added tokens as tokenizer_config.json lists them."""
    parts = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    return {str(index): {part: getattr(token, part) for part in parts} for index, token in added.items()}


def _text_of(token: Any) -> str | None:
    if isinstance(token, dict):
        return token.get("content")
    return token


def _others(folder: Path) -> list[Path]:
    """The tokenizer's files that no tokenizer is written to."""
    written = (CONFIG, SPECIALS, ADDED, "tokenizer.json")
    files: tuple[Path, ...] = ()
    if folder.is_dir():
        files = files_in(folder)
    return [file for file in files if file.name not in written and not file.name.startswith("chat_template")]


def _carry(base: Path, folder: Path, name: str, changes: dict) -> None:
    """Writes a file of the base's that holds an object, with these changes, unless transformers has written it."""
    if (base / name).is_file() and not (folder / name).exists():
        _write(folder / name, read_json(base / name, {}) | changes)


def _write(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
