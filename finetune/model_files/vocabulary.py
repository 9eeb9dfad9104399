"""--new_tokens: words that become tokens of their own, and how many rows the embeddings have then."""

import re
from dataclasses import dataclass
from pathlib import Path

from finetune.errors import PlanError
from finetune.model_files.plain_tokenizer import PlainTokenizer
from finetune.model_files.tokenizer import FullTokenizer

LONGEST = 200  # characters of a token
FILE_NAME = re.compile(r"[^,]+\.(txt|json|jsonl|csv|tsv|md|yaml|yml|vocab|tokens?)")  # of no word
AGAIN = "Give words, comma-separated, or a file with one per line."


@dataclass(frozen=True)
class Vocabulary:
    """Token ids from `known` up to `size` are new: their rows start from the mean of those before."""

    known: int
    size: int

    @property
    def added(self) -> int:
        """The number of tokens that are new."""
        return self.size - self.known

    def kept(self, stored: int) -> tuple[slice, slice]:
        """Rows that stay as they are of a tensor of so many: the known tokens', and those beyond the new ones. Rows
        that a model keeps spare are the new tokens' before any is added.
        """
        old = min(self.known, stored)
        return slice(0, old), slice(max(old, min(self.size, stored)), stored)


def words_of(value: str | list | None) -> str | None:
    """The words of --new_tokens, comma-separated; of a file, its lines. Raises PlanError."""
    if not value:
        return None
    if isinstance(value, list):
        said = value
    else:
        said = [word.strip() for word in value.split(",")]
    file = None
    if isinstance(value, str):
        file = Path(value).expanduser()
    if file and len(value) < 4096 and file.is_file():
        try:
            said = [line.strip() for line in file.read_text(encoding="utf-8-sig").split("\n")]
        except UnicodeDecodeError as error:
            raise PlanError(f"--new_tokens {value}: is not UTF-8 text ({error}). {AGAIN}") from None
    elif isinstance(value, str) and FILE_NAME.fullmatch(value):
        raise PlanError(f"--new_tokens {value[:200]}: no such file. {AGAIN}")
    found = list(dict.fromkeys(word for word in said if word))
    if not found:
        raise PlanError(f"--new_tokens {value}: names no token. {AGAIN}")
    for word in found:
        if "," in word or not word.isprintable() or len(word) > LONGEST:
            why = "has a comma" if "," in word else "is no printable word of at most 200 characters"
            raise PlanError(f"--new_tokens {word[:80]!r}: {why}. {AGAIN}")
    return ",".join(found)


def tokens_of(words: str | None) -> list[str]:
    if words:
        return words.split(",")
    return []


def add_tokens(tokenizer: PlainTokenizer | FullTokenizer, words: str | None) -> None:
    """Adds what the tokenizer does not have yet, in order, so that ids are the same everywhere. Of either kind.

    Not as control tokens: those are escaped in messages and left out of decoded text, and a tool's tag is neither.
    """
    if not words:
        return
    from tokenizers import AddedToken

    added = [AddedToken(word, normalized=False, special=False) for word in tokens_of(words)]
    if isinstance(tokenizer, PlainTokenizer):
        tokenizer.backend_tokenizer.add_tokens(added)
    else:
        tokenizer.add_tokens(added)


def vocabulary_of(folder: Path, words: str) -> Vocabulary:
    """Tokens of a model's tokenizer without and with `words`. Raises PlanError."""
    tokenizer = PlainTokenizer.from_folder(folder)
    if tokenizer is None:
        raise PlanError(f"--new_tokens: {folder} has no tokenizer.json. Save one next to the model, or omit it.")
    known = _end_of_ids(tokenizer)
    add_tokens(tokenizer, words)
    return Vocabulary(known, _end_of_ids(tokenizer))


def _end_of_ids(tokenizer: PlainTokenizer) -> int:
    return 1 + max(tokenizer.backend_tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


def added_beyond(folder: Path, base: Path) -> str | None:
    """The words that a folder's tokenizer has as added tokens and the base's has not, in the order of their ids."""
    own = PlainTokenizer.from_folder(folder)
    before = PlainTokenizer.from_folder(base)
    if own is None or before is None:
        return None
    known = before.backend_tokenizer.get_vocab(with_added_tokens=True)
    found = sorted((i, token.content) for i, token in own.added_tokens_decoder.items() if token.content not in known)
    return ",".join(word for _, word in found) or None
