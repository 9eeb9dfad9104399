"""Uploads a folder that a run or an export wrote to a repository of the Hub."""

import os
import re
import sys
from pathlib import Path

from finetune.errors import PlanError, first_line
from finetune.model_files.hub import endpoint, offline

# What other programs open, what opens the base as it was trained, and the card. Checkpoints and logs stay here.
UPLOADED = (
    *("*.safetensors", "*.safetensors.index.json", "adapter_config.json", "base_model.json", "trained_blocks.json"),
    *("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.*", "vocab.*", "merges.txt", "spiece.model", "run_plan.json", "manifest.json", "README.md"),
    *("*.gguf", "Modelfile"),
)
ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def check_upload(repo_id: str, flag: str = "--push_to_hub") -> None:
    """Raises PlanError for a name that the Hub does not take, and for a token that it does not know. One request."""
    said = f"{flag} {repo_id}"
    if not ID.fullmatch(repo_id) or repo_id.endswith((".git", ".ipynb")) or "--" in repo_id or ".." in repo_id:
        raise PlanError(f"{said}: is not the id of a Hub repository. Give one such as your-name/my-model.")
    if offline():
        raise PlanError(f"{said}: HF_HUB_OFFLINE is set. Unset it, or omit the flag.")
    _asked(said, lambda api: api.whoami())


def upload(folder: Path, repo_id: str, message: str, flag: str = "--push_to_hub") -> str:
    """Uploads the folder's files and returns the repository's address; a new one is private. Raises PlanError."""

    def send(api) -> str:
        from huggingface_hub.utils import disable_progress_bars

        if not sys.stderr.isatty():
            disable_progress_bars()
        files = sorted({file.name for pattern in UPLOADED for file in folder.glob(pattern) if file.is_file()})
        api.create_repo(repo_id, private=True, exist_ok=True)
        api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message, allow_patterns=files)
        return f"{endpoint()}/{repo_id}"

    remedy = f"Everything is in {folder}: once that is mended, repeat the command, or run hf upload {repo_id} {folder}"
    return _asked(f"{flag} {repo_id}", send, remedy)


def _asked(said: str, send, remedy: str = "Set HF_TOKEN to a token that may write there"):
    from huggingface_hub import HfApi, get_token
    from huggingface_hub import errors as hub

    token = os.environ.get("HF_TOKEN") or get_token()
    if not token:
        raise PlanError(f"{said}: needs a token, and HF_TOKEN is not set. Set it, or run hf auth login.")
    try:
        return send(HfApi(endpoint=endpoint(), token=token))
    except hub.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "an error")
        fact = f"{endpoint()} answers {status}" + (", so HF_TOKEN may not do that" if status in (401, 403) else "")
    except (hub.HTTPError, hub.HFValidationError, OSError, RuntimeError, ValueError) as error:
        fact = f"{endpoint()}: {first_line(error)}"
    raise PlanError(f"{said}: {fact.replace(token, '***')}. {remedy}.")
