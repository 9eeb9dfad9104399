"""The mark that represents an image in a message's text, from reading up to rendering.

While a row is taken apart, into the halves of a pair or the turns of a chat, its marks are numbered: text then says
which image it has, and equal texts have equal images. A conversation and a document have plain marks.
"""

import re
from collections.abc import Sequence
from typing import TypeVar

IMAGE_MARK = "\ufdd0"  # a noncharacter: no text of a person has it
RESERVED = re.compile("[\ufdd0-\ufddf]")
_ZERO = 0xFDD1
_NUMBERED = re.compile("\ufdd0([\ufdd1-\ufdda]+)")

Image = TypeVar("Image")


def numbered(number: int) -> str:
    """The mark of the image with this number in its row."""
    return IMAGE_MARK + "".join(chr(_ZERO + int(digit)) for digit in str(number))


def with_plain_marks(text: str) -> str:
    """`text` with marks that have no numbers."""
    if IMAGE_MARK in text:
        return _NUMBERED.sub(IMAGE_MARK, text)
    return text


def without_marks(text: str) -> str:
    """`text` alone."""
    return _NUMBERED.sub("", text)


def as_asked(text: str, placeholder: str) -> str:
    """`text` as a user asks it: without marks before it, and with a placeholder for each elsewhere."""
    plain = without_marks(text)
    if text.endswith(plain):
        return plain
    return _NUMBERED.sub(placeholder, text)


def marked_in(text: str, images: Sequence[Image]) -> list[Image]:
    """Images of a row whose numbered marks a text has, in order."""
    if IMAGE_MARK not in text:
        return []
    found = (match[1] for match in _NUMBERED.finditer(text))
    return [images[int("".join(str(ord(digit) - _ZERO) for digit in digits))] for digits in found]
