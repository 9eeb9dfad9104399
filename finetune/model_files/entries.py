"""Files under the names that a model's folder is opened by. One that cannot be read would count as absent, and another
template or tokenizer would be used without a word.
"""

import os
from fnmatch import fnmatch
from pathlib import Path

from finetune.model_files.digest import check_blob
from finetune.model_files.hub import HUB_PATTERNS
from finetune.system.files import is_regular

WEIGHTS = ("model.safetensors", "adapter_model.safetensors", "adapters.safetensors")


def check_entries(folder: Path) -> None:
    """Raises PlanError for a link to nothing, a pipe or a folder under the name of a model's file, and for one of the
    Hub's cache, weights aside, with other content than its name says. Weights in other forms, whose blobs people remove
    (consolidated.safetensors), nobody opens; a shard that is not there is missed by the index.
    """
    for file in sorted(folder.glob("*")):
        if not any(fnmatch(file.name, pattern) for pattern in HUB_PATTERNS):
            continue
        if file.suffix == ".safetensors" and file.name not in WEIGHTS:
            continue
        if not is_regular(file):
            continue
        if file.suffix != ".safetensors" and os.access(file, os.R_OK):
            check_blob(file)
