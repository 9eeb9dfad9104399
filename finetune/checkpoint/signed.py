"""Pages that carry the digest of their own text: one is replaced while it is as it was written, whoever wrote it."""

import hashlib
from pathlib import Path

SIGNATURE = "<!-- sha256 of the page as it was written, which is replaced while it is so: {} -->\n"


def signed(text: str) -> str:
    """A page with the digest of its text in its last line."""
    return text + SIGNATURE.format(hashlib.sha256(text.encode()).hexdigest())


def is_as_signed(file: Path) -> bool:
    """True if a page is unmodified since it was written, by the signature in its last line."""
    text = file.read_text(encoding="utf-8", errors="replace")
    return signed(text.rpartition(SIGNATURE.partition("{}")[0])[0]) == text
