"""Loads a model's tokenizer, and finds its end-of-answer and padding tokens."""

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from finetune.errors import PlanError
from finetune.model_files.entries import check_entries
from finetune.system.child import Child, ChildEnded
from finetune.system.files import check_inside, identity_of, is_plain_name
from finetune.system.terminal import say
from finetune.system.untrusted import untrusted

GENERATION = "generation_config.json"
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MAX_CONFIG_BYTES = 64 * 2**20
REMEDY = "Put the tokenizer files of the model next to its weights."
# How the files begin that are saved again with a tokenizer.
COPIED = (
    *("chat_template", "additional_chat_templates", "tokenizer", "special_tokens_map", "added_tokens"),
    *("vocab", "merges", "spiece"),
)


class Decoder(Protocol):
    """A tokenizer, as far as it turns ids into text."""

    def decode(self, ids: Any, /) -> str: ...


class Tokenizer(Decoder, Protocol):
    """The interface of transformers' tokenizers and of `PlainTokenizer`."""

    is_fast: bool
    chat_template: Any  # a text, {name: text} or None

    @property
    def backend_tokenizer(self) -> Any: ...  # of the tokenizers library
    @property
    def name_or_path(self) -> str: ...
    @property
    def special_tokens_map(self) -> dict: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def eos_token(self) -> str | None: ...
    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def unk_token_id(self) -> int | None: ...
    @property
    def added_tokens_decoder(self) -> dict: ...
    @property
    def all_special_tokens(self) -> list[str]: ...
    def get_vocab(self) -> dict[str, int]: ...
    def add_special_tokens(self, named: dict[str, str], /) -> Any: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def decode(
        self, ids: Any, *, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str: ...


class FullTokenizer(Tokenizer, Protocol):
    """The interface of transformers' tokenizers."""

    @property
    def pad_token_id(self) -> int | None: ...
    @property
    def bos_token(self) -> str | None: ...
    def convert_tokens_to_ids(self, tokens: str, /) -> int: ...
    def convert_ids_to_tokens(self, ids: Any, /) -> Any: ...
    def save_pretrained(self, folder: Any, /) -> Any: ...
    def apply_chat_template(self, messages: list[dict], /, **how: Any) -> Any: ...
    def add_tokens(self, words: Sequence, /) -> int: ...


def tokenizer_config_of(folder: Path) -> dict:
    """tokenizer_config.json over special_tokens_map.json; empty without either. Raises PlanError for values that
    transformers does not load.
    """
    check_entries(folder)
    found: dict = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = folder / name
        if not file.is_file():
            continue
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise PlanError(f"{file}: has over {MAX_CONFIG_BYTES >> 20} MiB. Use a tokenizer you trust.")
        with untrusted(f"{file}: cannot be read", REMEDY):
            content = dict(json.loads(file.read_text(encoding="utf-8")))
        for key, value in content.items():
            wanted, fits = CONFIG_VALUES.get(key, ("", None))
            if fits and not fits(value):
                raise PlanError(f"{file}: {key} is {json.dumps(value)[:80]}, must be {wanted}. {REMEDY}")
        found |= content
    return found


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


def are_added(value: Any) -> bool:
    return isinstance(value, dict) and all(n.isdecimal() and is_token(value[n]) for n in value)


def are_extra(value: Any) -> bool:
    values = list(value.values()) if isinstance(value, dict) else value
    return value is None or (isinstance(values, list) and all(map(is_token, values)))


def are_templates(value: Any) -> bool:
    """True for a chat template, or several, as {name: text} or a list of {"name": name, "template": text}."""
    if isinstance(value, list):
        return all(isinstance(t, dict) and {str} == {type(t.get(key)) for key in ("name", "template")} for t in value)
    if isinstance(value, dict):
        return all(isinstance(text, str) for text in value.values())
    return isinstance(value, str | None)


# What transformers asks of values in tokenizer_config.json: {key: (words, function that says if one fits)}.
CONFIG_VALUES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "model_max_length": ("a number", lambda value: value is None or is_number(value)),
    "tokenizer_class": ("text", lambda value: isinstance(value, str | None)),
    "chat_template": ("text, or a list of named ones", are_templates),
    "added_tokens_decoder": ("tokens by their ids", are_added),
    "additional_special_tokens": ("a list of tokens", are_extra),
    "extra_special_tokens": ("a list of tokens, or named ones", are_extra),
    "model_input_names": ("a list", lambda value: isinstance(value, list)),
    "split_special_tokens": ("true or false", lambda value: isinstance(value, bool)),
    **dict.fromkeys(("padding_side", "truncation_side"), ("left or right", lambda value: value in ("left", "right"))),
    **dict.fromkeys(NAMED, ("a token", lambda value: value is None or is_token(value))),
}


def load_tokenizer(folder: Path) -> FullTokenizer:
    """Loads the transformers tokenizer of a model folder, never running code from it. Raises PlanError."""
    for file in (f for f in Path(folder).iterdir() if f.name.startswith(COPIED)):
        check_inside(file)  # its text would be copied to whatever folder the tokenizer is saved in
    tokenizer_config_of(Path(folder))
    trial = TokenizerTrial(Path(folder) / "tokenizer.json")  # meanwhile transformers is imported
    from transformers import AutoConfig

    trial.check()
    try:
        tokenizer = loaded_by_transformers(Path(folder))
    except PlanError:
        if (Path(folder) / "config.json").is_file():  # which transformers reads for the tokenizer's class
            with untrusted(f"{folder}: its config.json does not load", "Give another model."):
                AutoConfig.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        raise
    if not tokenizer.is_fast:
        raise PlanError(
            f"{folder}: has only a slow tokenizer, without character offsets. Save a tokenizer.json next to it."
        )
    generation_ends(folder)  # used only after training; report errors in it now
    return tokenizer


def loaded_by_transformers(folder: Path) -> FullTokenizer:
    """The tokenizer of a folder whose files were tried before, or written here. Raises PlanError."""
    from transformers import AutoTokenizer

    with untrusted(f"{folder}: its tokenizer does not load", REMEDY):
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        if not is_number(tokenizer.model_max_length):
            raise TypeError("model_max_length must be a number")
        dropout = without_dropout(tokenizer.backend_tokenizer) if tokenizer.is_fast else None
        tokenizer.decode(tokenizer("a b").input_ids)
        # It is saved with the adapter, as UTF-8: half a surrogate pair fails here and not after training.
        json.dumps([tokenizer.init_kwargs, tokenizer.chat_template], default=str, ensure_ascii=False).encode()
    if dropout:
        fact = f"its tokenizer leaves out merges at random (dropout {dropout:g}), and none of them here"
        say(f"note: {folder}: {fact}", file=sys.stderr)
    templates = tokenizer.chat_template
    for name in templates if isinstance(templates, dict) else ():
        if not is_plain_name(name):  # each is saved to a file of its name
            raise PlanError(f"{folder}: its chat template {name[:80]!r} is not named as a file can be. Rename it.")
    return tokenizer


def without_dropout(backend: Any) -> float | None:
    """Sets a BPE's dropout to none and returns the one before: rows must be the same tokens after a restart, on every
    rank and in use.
    """
    model = backend.model
    dropout = getattr(model, "dropout", None)
    if dropout:
        model.dropout = None
    return dropout


class TokenizerTrial:
    """A tokenizer.json loaded and tried in a limited child process, which starts at once. One that passed in this
    process is not tried again.
    """

    passed_files: ClassVar[set[tuple[int, ...]]] = set()  # by their identities

    def __init__(self, file: Path):
        self.file = file
        self.child: Child | None = None
        if file.is_file():
            with untrusted(f"{file}: cannot be opened", "Use a file that can be read."), file.open("rb") as opened:
                self.identity = identity_of(opened.fileno())
            if self.identity in self.passed_files:
                return
            self.printed = tempfile.TemporaryFile()
            module = "finetune.model_files.tokenizer_process"
            self.child = Child(module, os.fsencode(file.absolute()), stderr=self.printed)

    def check(self) -> None:
        """Waits for the child. Raises PlanError for a file that ends it."""
        if self.child is None:
            return
        try:
            fault = self.child.receive()[0].decode()
        except ChildEnded as ended:
            self.printed.seek(0)
            lines = self.printed.read().decode(errors="replace").strip().splitlines() or [str(ended)]
            slow = ended.status == -signal.SIGPROF
            why = f"does not load and encode a text ({lines[-1][:200]})"
            fault = "takes too long to load and to encode a text" if slow else why
        finally:
            self.child.close()
            self.printed.close()
        if fault:
            raise PlanError(f"{self.file}: {fault}. Use a tokenizer you trust.")
        self.passed_files.add(self.identity)


def set_eos_token(tokenizer: Tokenizer, text: str) -> None:
    """Makes a token of the vocabulary the one that ends a text, for either kind of tokenizer. Raises PlanError."""
    if text not in tokenizer.get_vocab():
        raise PlanError(
            f"--eos_token {text}: is not a token of this tokenizer. Name one that is, or add it: --new_tokens {text}."
        )
    tokenizer.add_special_tokens({"eos_token": text})


def unknown_id(tokenizer: Tokenizer) -> int | None:
    """The id that stands for text without a token of its own; None if no id means that alone."""
    others = tokenizer.bos_token_id, tokenizer.eos_token_id
    if tokenizer.unk_token_id not in others:
        return tokenizer.unk_token_id
    return None


def opened_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text that goes on: with what the tokenizer puts before a text, without an end that it puts after it."""
    found = tokenizer(text, return_special_tokens_mask=True)
    return found.input_ids[: own_length(found.special_tokens_mask) or 1]


def own_length(special_tokens_mask: Sequence[int]) -> int:
    """The number of a text's tokens without those that the tokenizer puts after it; 0 if all are the tokenizer's."""
    return next((n for n in range(len(special_tokens_mask), 0, -1) if not special_tokens_mask[n - 1]), 0)


ENOUGH = 8  # last tokens of a prompt by which a tokenizer knows where in a text it is
ANCHORS = ("\n", "a", ".")  # texts that others go on after


def continued_ids(tokenizer: Tokenizer, prompt: Sequence[int], text: str) -> list[int]:
    """Ids of a text after a prompt's. A tokenizer of SentencePiece puts a space before a text that stands alone."""
    before = tokenizer.decode(list(prompt)[-ENOUGH:], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    how: dict[str, Any] = dict(add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    alone, joined = (encoding.ids for encoding in tokenizer([before, before + text], **how).encodings)
    if before and joined[: len(alone)] == alone:
        return joined[len(alone) :]
    return continued(tokenizer, text)[0]


def continued(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """(ids, first and last characters of each) of a text that goes on after another and shares no token with it."""
    how: dict[str, Any] = dict(add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    (own,) = tokenizer([text], **how).encodings
    for anchor in ANCHORS:
        alone, joined = tokenizer([anchor, anchor + text], **how).encodings
        number = len(alone.ids)
        if joined.ids[:number] == alone.ids:
            if joined.ids[number:] == own.ids:
                break
            size = len(anchor)
            return joined.ids[number:], [(max(0, a - size), max(0, b - size)) for a, b in joined.offsets[number:]]
    return own.ids, own.offsets


def end_ids(tokenizer: Tokenizer, folder: Path | None = None) -> set[int]:
    """Stop token ids that the model's files name: the tokenizer's EOS and those of `model_ends`."""
    ids = {id for id in (tokenizer.eos_token_id,) if id is not None}
    return ids | model_ends(Path(folder or tokenizer.name_or_path))


def model_ends(folder: Path) -> set[int]:
    """The ids at which transformers stops: of generation_config.json, without one of config.json. Raises PlanError."""
    file = folder / "config.json"
    if (folder / GENERATION).is_file() or not file.is_file():
        return generation_ends(folder)
    with untrusted(f"{file}: cannot be read", "Give another model."):
        content = json.loads(file.read_text(encoding="utf-8"))
        named = content.get("eos_token_id", (content.get("text_config") or {}).get("eos_token_id"))
    return {i for i in (named if isinstance(named, list) else [named]) if type(i) is int}


def generation_ends(folder: Path) -> set[int]:
    """EOS ids from the folder's generation_config.json; empty without such a file. Raises PlanError."""
    file = folder / GENERATION
    if not file.is_file():
        return set()
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{file}: is not JSON ({str(error)[:200]}). Fix or remove it.") from None
    if not isinstance(content, dict):
        raise PlanError(f"{file}: contains {type(content).__name__}, must contain an object. Fix or remove it.")
    named = content.get("eos_token_id")
    if isinstance(named, list):
        ids = named
    elif named is None:
        ids = []
    else:
        ids = [named]
    if not all(type(i) is int for i in ids):
        raise PlanError(
            f"{file}: eos_token_id is {json.dumps(named)[:80]}, must be a token id or a list of them. Fix or remove it."
        )
    return set(ids)


def pad_id(tokenizer: FullTokenizer) -> int:
    """Padding token id, or EOS if there is none: padding is never a target."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    return 0
