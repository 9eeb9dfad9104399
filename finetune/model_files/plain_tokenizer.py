"""A tokenizer without transformers, whose import takes seconds: for the plan, and for processes that only tokenize.

It has what the data room asks of transformers' tokenizers, over the same library. `of` copies a loaded one exactly;
`from_folder` reads the files, for the lengths and the preview of a plan.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from finetune.model_files.tokenizer import (
    MAX_CONFIG_BYTES,
    NAMED,
    REMEDY,
    FullTokenizer,
    Tokenizer,
    TokenizerTrial,
    load_tokenizer,
    tokenizer_config_of,
    without_dropout,
)
from finetune.model_files.tokenizer_files import has_vocabulary
from finetune.system.files import is_regular
from finetune.system.untrusted import untrusted


class PlainTokenizer:
    """`backend`: of the tokenizers library. `specials`: {name: text} of the special tokens."""

    is_fast = True

    def __init__(self, backend: Any, specials: dict[str, str], chat_template: Any, name: str):
        self.backend_tokenizer = backend
        self.special_tokens_map = specials
        self.chat_template = chat_template
        self.name_or_path = name
        backend.no_truncation()
        backend.no_padding()
        without_dropout(backend)
        self.bos_token_id, self.unk_token_id = (self._id(n) for n in ("bos_token", "unk_token"))

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "PlainTokenizer":
        """A copy of transformers' tokenizer, or of another of these."""
        return cls.from_json(cls.described(tokenizer))

    @staticmethod
    def described(tokenizer: Tokenizer) -> str:
        """All that `from_json` needs, of either kind of tokenizer."""
        named = {k: v for k, v in tokenizer.special_tokens_map.items() if not isinstance(v, list | tuple)}
        return json.dumps(
            {
                "backend": tokenizer.backend_tokenizer.to_str(),
                "specials": {name: str(text) for name, text in named.items()},
                "chat_template": tokenizer.chat_template,
                "name": tokenizer.name_or_path,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> "PlainTokenizer":
        from tokenizers import Tokenizer

        content = json.loads(text)
        backend = Tokenizer.from_str(content["backend"])
        return cls(backend, content["specials"], content["chat_template"], content["name"])

    @classmethod
    def from_folder(cls, folder: Path) -> "PlainTokenizer | None":
        """The tokenizer of a model folder, None if it has no tokenizer.json. Raises PlanError."""
        file = Path(folder) / "tokenizer.json"
        if not is_regular(file):
            return None
        TokenizerTrial(file).check()
        from tokenizers import Tokenizer

        with untrusted(f"{folder}: its tokenizer does not load", REMEDY):
            backend = Tokenizer.from_file(str(file))
            config = tokenizer_config_of(Path(folder))
            specials = {n: _text_of(config[n]) for n in NAMED if config.get(n) is not None}
            add_listed(backend, config.get("added_tokens_decoder") or {}, list(specials.values()))
            return cls(backend, specials, _template_of(Path(folder), config), str(folder))

    def _id(self, name: str) -> int | None:
        text = self.special_tokens_map.get(name)
        if text is None:
            return None
        return self.backend_tokenizer.token_to_id(text)

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens_map.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._id("eos_token")

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def add_special_tokens(self, named: dict[str, str]) -> None:
        """Makes tokens of the vocabulary special ones, by their names."""
        self.backend_tokenizer.add_special_tokens(list(named.values()))
        self.special_tokens_map = {**self.special_tokens_map, **named}

    @property
    def added_tokens_decoder(self) -> dict:
        return self.backend_tokenizer.get_added_tokens_decoder()

    @property
    def all_special_tokens(self) -> list[str]:
        return list(self.special_tokens_map.values())

    def __call__(
        self,
        texts: Iterable[str],
        add_special_tokens: bool = True,
        return_offsets_mapping: bool = True,
        verbose: bool = False,
    ) -> SimpleNamespace:
        return SimpleNamespace(
            encodings=self.backend_tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        )

    def decode(
        self, ids: Iterable[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        return self.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)


def tokenizer_of_folder(folder: Path) -> PlainTokenizer | FullTokenizer | None:
    """The tokenizer of a model folder, without transformers if it has a tokenizer.json: of other files, such as
    tokenizer.model, transformers makes one as a run does. None if the folder has none of either. Raises PlanError.
    """
    plain = PlainTokenizer.from_folder(folder)
    if plain is None and has_vocabulary(folder):
        return load_tokenizer(folder)
    return plain


def add_listed(backend: Any, listed: dict, specials: list[str]) -> None:
    """Adds the tokens of tokenizer_config.json to those of tokenizer.json, as transformers does. New ones may have ids
    past the model's.
    """
    from tokenizers import AddedToken

    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for number in sorted(listed, key=int):
        token = listed[number]
        how = {}
        if isinstance(token, dict):
            names = ("single_word", "lstrip", "rstrip", "normalized")
            how = {name: token[name] for name in names if isinstance(token.get(name), bool)}
        if _text_of(token) not in known:
            known.add(_text_of(token))
            add = backend.add_tokens if how and not token.get("special") else backend.add_special_tokens
            add([AddedToken(_text_of(token), **how)])
    backend.add_special_tokens([text for text in specials if text not in known])


def _text_of(token: object) -> str:
    if isinstance(token, dict):
        return token["content"]
    return str(token)


def _template_of(folder: Path, config: dict):
    """The chat template; {name: template} of several, as transformers reads them."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    found = {
        name: file.read_text(encoding="utf-8")
        for name, file in files.items()
        if file.is_file() and file.stat().st_size <= MAX_CONFIG_BYTES
    }
    if found:
        if found.keys() == {"default"}:
            return found["default"]
        return found
    given = config.get("chat_template")
    if isinstance(given, list):
        return {t["name"]: t["template"] for t in given}
    return given
