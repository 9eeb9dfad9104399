"""The child process that tries a tokenizer.json first; tokenizer.py starts it with the file's name.

The tokenizers library may end its process (a normalizer that doubles its text sixty times), panic, or search without
end; here that costs a child. An error that it raises is none of these: the parent's own load names it. The answer is
why the file is refused, or nothing.
"""

import contextlib
import json
import os
from collections.abc import Iterator

from finetune.system.child import limit_memory, limit_time, serve

# of processor time; ten times what the largest vocabulary takes
LOAD_S = 5.0
LOAD_S_PER_BYTE = 2e-6
# of memory: so much, and so much for each byte of the file
MAX_BYTES = 2**30
BYTES_PER_BYTE = 100
MAX_GROWTH = 4096  # times as long as a text may become in a normalizer or decoder; published ones stay below 100
ODD = (ValueError, TypeError, LookupError, AttributeError, RecursionError)  # of a file of another shape
MAX_ID = 2**24  # the library writes a vocabulary by counting to its largest id
TEXTS = (
    "The capital of France is Paris.\n\n  def f(x):\n\treturn x + 123456\n",
    "naïve Ünïcödé 日本語 한국어 العربية עברית हिन्दी ไทย 🙂👩‍👩‍👧 ﷺ \u2028\u0000\ufffd",
    *(word * 40 + "!" for word in ("a", "A", "1", " ", "ab ", "é", "日", ".", "\n", "_-")),
)


def answers(messages: Iterator[list[bytes]]) -> Iterator[tuple[bytes]]:
    file = os.fsdecode(next(messages)[0])
    size = os.path.getsize(file)
    limit_memory(MAX_BYTES + BYTES_PER_BYTE * size)
    limit_time(LOAD_S + LOAD_S_PER_BYTE * size)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    yield ((fault_of(file) or "").encode(),)


def fault_of(file: str) -> str | None:
    """Reason to refuse the file; None if it is accepted."""
    with open(file, encoding="utf-8") as opened, contextlib.suppress(*ODD):
        content = json.load(opened)
        for part in ("normalizer", "decoder"):
            if isinstance(content, dict) and growth_of(content.get(part)) > MAX_GROWTH:
                return f"its {part} makes a text over {MAX_GROWTH} times as long"
        vocabulary = content["model"]["vocab"]
        ids = []
        if isinstance(vocabulary, dict):
            ids = [*vocabulary.values()]
        largest = max([*ids, *(token["id"] for token in content.get("added_tokens") or ())], default=0)
        if largest >= MAX_ID:
            return f"has token id {largest}, the maximum is {MAX_ID - 1}"
    import tokenizers

    with contextlib.suppress(Exception):
        tokenizer = tokenizers.Tokenizer.from_file(file)
        for text in TEXTS:
            tokenizer.decode(tokenizer.encode(text).ids)
    return None


def growth_of(part: object) -> float:
    """Upper bound of the factor by which a normalizer or decoder of tokenizer.json can lengthen a text."""
    if not isinstance(part, dict):
        return 1.0
    growth = 1.0
    for inner in (*(part.get("normalizers") or ()), *(part.get("decoders") or ())):
        growth *= growth_of(inner)
    if part.get("type") == "Replace":
        pattern = part.get("pattern") or {}
        content = len(str(part.get("content") or ""))
        literal = None
        if isinstance(pattern, dict):
            literal = pattern.get("String")
        growth *= max(1.0, content / len(literal)) if literal else 1.0 + content
    elif part.get("type") in ("ByteLevel", "Precompiled"):
        growth *= 2.0
    return growth


if __name__ == "__main__":
    serve(answers)
