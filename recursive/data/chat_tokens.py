"""Conversations as tokens of a model that is trained from scratch: markers around turns, targets on the answers.

<|user|>..<|enduser|><|sep|><|assistant|>..<|endassistant|><|endoftext|>, a system turn in <|system|>..<|endsystem|>.
A marker is one token and only ever a marker: the same characters inside a turn are ordinary text.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from finetune.engine import IGNORE_INDEX
from finetune.errors import PlanError
from finetune.model_files.tokenizer import TokenizerTrial
from finetune.system.untrusted import untrusted

PAD = "<|pad|>"
END = "<|endoftext|>"
BEGIN = "<|startoftext|>"
SEPARATOR = "<|sep|>"
ROLES = {role: (f"<|{role}|>", f"<|end{role}|>") for role in ("user", "assistant", "system")}
MARKERS = (PAD, END, BEGIN, SEPARATOR, *(marker for pair in ROLES.values() for marker in pair))
TRAIN_ON = ("assistant", "all")
HALF_CHARACTER = re.compile("[\ud800-\udfff]")
LONGEST_WORD = 2**16  # a BPE merges the letters of a word in quadratic time


class Inner(Protocol):
    """The methods used of a tokenizers.Tokenizer; its library is imported where one is made."""

    encode_special_tokens: bool

    def add_special_tokens(self, tokens: list, /) -> int: ...
    def get_vocab_size(self) -> int: ...
    def token_to_id(self, token: str, /) -> int | None: ...
    def encode(self, text: str, /, *, add_special_tokens: bool): ...
    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str: ...
    def save(self, path: str, /) -> None: ...


@dataclass(frozen=True)
class ChatTokenizer:
    """A tokenizers.Tokenizer that has the markers. `folder`: where its tokenizer.json is."""

    inner: Inner
    folder: Path | None = None

    @classmethod
    def load(cls, folder: Path) -> "ChatTokenizer":
        """The tokenizer.json of a folder, tried in a child process first. Raises PlanError."""
        file = Path(folder) / "tokenizer.json"
        if not file.is_file():
            raise PlanError(f"{file}: no such file. Give a folder with a tokenizer.json.")
        TokenizerTrial(file).check()
        from tokenizers import Tokenizer

        with untrusted(f"{file}: does not load", "Use a tokenizer you trust."):
            inner = Tokenizer.from_file(str(file))
        inner.no_padding()
        inner.no_truncation()
        return cls(inner, Path(folder))

    @classmethod
    def train(cls, texts: list[str], vocab_size: int) -> "ChatTokenizer":
        """A byte-level BPE of at most `vocab_size` tokens, markers included, trained on `texts`."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        longest = max((len(word) for text in texts for word in text.split()), default=0)
        if longest > LONGEST_WORD:
            raise PlanError(
                f"--tokenizer: a word of {longest:,} characters is too long for a BPE; {LONGEST_WORD:,} at most. "
                "Correct or remove the row, or give a tokenizer that is trained."
            )
        inner = Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=list(MARKERS), initial_alphabet=alphabet, show_progress=False
        )
        inner.train_from_iterator(texts, trainer)
        return cls(inner)

    def with_markers(self) -> "ChatTokenizer":
        """This tokenizer, the markers added to its vocabulary where it lacks them."""
        self.inner.add_special_tokens(list(MARKERS))
        return self

    @property
    def vocab_size(self) -> int:
        return self.inner.get_vocab_size()

    def id_of(self, marker: str) -> int:
        token = self.inner.token_to_id(marker)
        if token is None:
            raise PlanError(f"{self.folder}/tokenizer.json: has no {marker}. Build it with dataset.build_chat_dataset.")
        return token

    def encode(self, text: str) -> list[int]:
        self.inner.encode_special_tokens = True  # markers that are typed are text
        return self.inner.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self.inner.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def conversation(self, turns: list[tuple[str, str]], train_on: str = "assistant") -> tuple[list[int], list[bool]]:
        """(tokens of a conversation, which of them are targets). `train_on`: assistant, or all of it."""
        ids = []
        is_target = []
        for i, (role, content) in enumerate(turns):
            begin, end = map(self.id_of, ROLES[role])
            turn = [begin, *self.encode(content), end]
            before = []
            if i:
                before = [self.id_of(SEPARATOR)]
            ids += before + turn
            answer = role == "assistant"
            is_target += [False] * len(before) + [False] + [answer] * (len(turn) - 1)
        ids.append(self.id_of(END))
        is_target.append(False)
        return ids, [True] * len(ids) if train_on == "all" else is_target

    def prompt(self, turns: list[tuple[str, str]]) -> list[int]:
        """Tokens up to where the answer to `turns` begins."""
        ids, _ = self.conversation(turns)
        return [*ids[:-1], self.id_of(SEPARATOR), self.id_of(ROLES["assistant"][0])]

    @property
    def stop_ids(self) -> set[int]:
        """Tokens that end an answer."""
        return {self.id_of(ROLES["assistant"][1]), self.id_of(END)}

    @property
    def pad_id(self) -> int:
        return self.id_of(PAD)

    def save_pretrained(self, folder: Path) -> None:
        """Writes tokenizer.json, and tokenizer_config.json for transformers."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.inner.encode_special_tokens = False
        self.inner.save(str(folder / "tokenizer.json"))
        names = {"pad_token": PAD, "eos_token": END, "bos_token": BEGIN}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def truncated(ids: list[int], is_target: list[bool], max_length: int) -> tuple[list[int], list[bool]]:
    """A conversation in `max_length` tokens: it loses its front, or the tail of an answer that alone is too long."""
    if len(ids) <= max_length:
        return ids, is_target
    last = max((i for i, target in enumerate(is_target) if target), default=len(ids) - 1)
    first = last
    while first > 0 and is_target[first - 1]:
        first -= 1
    start = min(max(0, last + 1 - max_length), max(0, first - 1))
    return ids[start : start + max_length], is_target[start : start + max_length]


def rows_of(conversations: list, tokenizer: ChatTokenizer, max_length: int, train_on: str):
    """(inputs, labels, conversations that were truncated): one row each, labels shifted by one, padded on the right."""
    inputs = np.full((len(conversations), max_length), tokenizer.pad_id, np.int32)
    labels = np.full((len(conversations), max_length), IGNORE_INDEX, np.int32)
    longer = 0
    for row, turns in enumerate(conversations):
        whole = tokenizer.conversation(turns, train_on)
        ids, is_target = truncated(*whole, max_length)
        longer += len(whole[0]) > max_length
        inputs[row, : len(ids)] = ids
        labels[row, : len(ids) - 1] = np.where(is_target[1:], ids[1:], IGNORE_INDEX)
    return inputs, labels, longer


# ---- formats: a JSON list of conversations -> turns

ROLE_WORDS: dict[str | None, str] = {"human": "user", "prompter": "user", "gpt": "assistant", "bot": "assistant"}


def turns_of(row: Any, form: str, where: str) -> list[tuple[str, str]]:
    """The (role, content) turns of a row. Raises PlanError naming what is wrong with it."""
    if not isinstance(row, dict):
        raise PlanError(f"{where}: is {type(row).__name__}, must be an object. Correct or remove the row.")
    if form == "alpaca":
        question = _text(row, "instruction", where)
        question += "\n\n" + _text(row, "input", where) if row.get("input") else ""
        return [("user", question), ("assistant", _text(row, "output", where))]
    key, role_key, text_key = {
        "sharegpt": ("conversations", "from", "value"),
        "openassistant": ("messages", "role", "content"),
    }[form]
    messages = row.get(key)
    if not isinstance(messages, list) or not messages:
        raise PlanError(f"{where}: has no list {key!r}. Give --format, or correct the row.")
    turns = []
    for message in messages:
        said = None
        if isinstance(message, dict):
            said = message.get(role_key)
        role = None
        if isinstance(said, str):
            role = ROLE_WORDS.get(said, said)
        if role not in ROLES:
            raise PlanError(f"{where}: {role_key} is {said!r}, must be user, assistant or system. Correct the row.")
        turns.append((role, _text(message, text_key, where)))
    return turns


def _text(row: dict, key: str, where: str) -> str:
    if not isinstance(row.get(key), str):
        raise PlanError(f"{where}: has no text {key!r}. Correct or remove the row.")
    if HALF_CHARACTER.search(row[key]):
        raise PlanError(f"{where}: {key!r} holds half of a surrogate pair. Correct or remove the row.")
    return row[key]


FORMATS = ("sharegpt", "alpaca", "openassistant")


def read_conversations(path: Path, form: str) -> list[list[tuple[str, str]]]:
    """Every conversation of a JSON or JSON Lines file as turns. Raises PlanError naming the row."""
    if path.exists() and not path.is_file():
        raise PlanError(f"--input-file {path}: is not a file. Give a JSON file.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise PlanError(f"--input-file {path}: no such file. Check the path.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"--input-file {path}: cannot be read ({error}). Save it as UTF-8.") from None
    try:
        rows = None
        if path.suffix == ".jsonl":
            lines = text.split("\n")  # splitlines would split at U+2028 too
            rows = [json.loads(line) for line in lines if line.strip()]
        if rows is None:
            rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"--input-file {path}: is not JSON ({error}). Correct it.") from None
    if not isinstance(rows, list) or not rows:
        raise PlanError(f"--input-file {path}: must hold a list of conversations, and one at least.")
    return [turns_of(row, form, f"{path}: row {i + 1}") for i, row in enumerate(rows)]
