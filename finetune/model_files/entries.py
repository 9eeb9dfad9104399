"""Files under the names that a model's folder is opened by. One that cannot be read would count as absent, and another
template or tokenizer would be used without a word.
"""

import hashlib
import os
import re
from fnmatch import fnmatch
from pathlib import Path

from finetune.errors import PlanError
from finetune.model_files.hub import HUB_PATTERNS
from finetune.system.files import is_regular

LARGEST_TEXT = 64 * 2**20  # bytes: larger blobs are named by their sha256, which digest.py compares


def check_entries(folder: Path) -> None:
    """Raises PlanError for a link to nothing, a pipe or a folder under the name of a model's file, and for a text of the
    Hub's cache with other content than its name says.
    """
    for file in sorted(folder.iterdir()):
        if any(fnmatch(file.name, pattern) for pattern in HUB_PATTERNS) and is_regular(file):
            _check_text(file)


def _check_text(file: Path) -> None:
    """Small files are named by the sha1 of their content: Git's, with a header before it, or of mirrors a plain one."""
    blob = file.resolve()
    if blob.parent.name != "blobs" or not re.fullmatch("[0-9a-f]{40}", blob.name):
        return
    if blob.stat().st_size > LARGEST_TEXT or not os.access(blob, os.R_OK):
        return
    content = blob.read_bytes()
    named = {hashlib.sha1(begin + content).hexdigest() for begin in (b"", b"blob %d\0" % len(content))}
    if blob.name not in named:
        raise PlanError(
            f"{file}: is not the file that the Hub has (its sha1 differs). Remove {blob}, and it is downloaded again."
        )
