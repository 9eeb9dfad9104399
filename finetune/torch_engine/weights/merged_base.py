"""--adapter_merge: the base of a new run is another base with its trained adapter merged, written to the output_dir."""

import json
from collections.abc import Callable
from pathlib import Path

from finetune.adapters.continued import read_saved
from finetune.adapters.saved import adapter_digest
from finetune.checkpoint.own_base import on_own_base
from finetune.checkpoint.store import storage
from finetune.errors import PlanError
from finetune.model_files.digest import file_digest
from finetune.model_files.files import ModelFiles, tokenizer_folder
from finetune.model_files.manifest import MANIFEST
from finetune.model_files.published import manifest_of
from finetune.model_files.tokenizer import load_tokenizer
from finetune.model_files.tokenizer_files import save_tokenizer
from finetune.plan.run_plan import RunPlan
from finetune.system.files import new_folder
from finetune.system.json_files import JsonFileError, read_json
from finetune.torch_engine.weights import merge
from finetune.torch_engine.weights.stream import config_dtype

FOLDER = "merged_base"
SOURCE = "merged_from.json"
OF_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def with_merged_base(plan: RunPlan, say: Callable[[str], None]) -> RunPlan:
    """The plan on the merged base, which is written once, in the base's dtype and checked. Raises PlanError."""

    def write(folder: Path) -> None:
        merged_base(read_saved(str(plan.settings.adapter)).folder, plan.files, folder, say)

    return on_own_base(plan, FOLDER, write, "base and --adapter, merged")


def merged_base(adapter: Path, base: ModelFiles | None, folder: Path, say: Callable[[str], None]) -> None:
    """Writes base and adapter merged into `folder`, unless they are there. Raises PlanError."""
    assert base is not None, "make_plan found the base"
    dtype = config_dtype(base.config)
    source = {"adapter": adapter_digest(adapter), "base": base.digest, "dtype": str(dtype)}
    own = tokenizer_folder(adapter, base)
    source |= {name: file_digest(own / name) for name in OF_TOKENIZERS if (own / name).is_file()}
    if folder.exists():
        if _source_in(folder) != source:
            raise PlanError(
                f"--adapter_merge: {folder} holds something else than this adapter, merged. Remove it, or give another "
                "--output_dir."
            )
        say(f"merged base: {folder}, from before")
        return
    with storage(folder), new_folder(folder) as made:
        merge.Merge.of(adapter, base.folder).write(made, dtype)
        checked = merge.check_written(adapter, base.folder, made, dtype)
        tokenizer = load_tokenizer(own)
        save_tokenizer(tokenizer, made, base.tokenizer_folder)
        (made / SOURCE).write_text(json.dumps(source, indent=1) + "\n")
        (made / MANIFEST).write_text(manifest_of(made, 0, ""))
    say(f"merged base: {folder}: {checked}")


def _source_in(folder: Path) -> dict | None:
    try:
        return read_json(folder / SOURCE, {str: str})
    except (JsonFileError, FileNotFoundError):
        return None
