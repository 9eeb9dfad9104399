"""Uploads a folder that a run or an export wrote to a repository of the Hub."""

import os
import re
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

from finetune.errors import PlanError, first_line
from finetune.model_files.hub import (
    SLOWEST_RATE,
    UPLOAD_TIMEOUT_S,
    answer_in_time,
    endpoint,
    hub_cache,
    in_time,
    offline,
    well_formed,
)
from finetune.model_files.manifest import MANIFEST, PUBLISHED_TOO
from finetune.model_files.sentence_files import MODULES, NORMALIZE, POOLING, SENTENCE_SETTINGS
from finetune.model_files.tokenizer_files import files_in
from finetune.system.json_files import JsonFileError, read_json
from finetune.system.terminal import is_terminal, say
from finetune.system.untrusted import untrusted

SENTENCES = (MODULES, f"{POOLING}/config.json", f"{NORMALIZE}/config.json", *SENTENCE_SETTINGS)
# What other programs open, what opens the base as it was trained, and the card. Checkpoints and logs stay here.
UPLOADED = (
    *(*PUBLISHED_TOO, *SENTENCES),
    *("*.safetensors", "*.safetensors.index.json", "adapter_config.json", "base_model.json", "trained_blocks.json"),
    *("config.json", "generation_config.json", "run_plan.json", "manifest.json", "README.md", "*.gguf", "Modelfile"),
)
# What decides which model is opened from a repository, and of it what a run writes beside what its manifest names.
ADAPTER_CONFIG = "adapter_config.json"
OF_RUNS = (MANIFEST, "run_plan.json")
OPENED = (
    *(*PUBLISHED_TOO, MODULES),
    *("*.safetensors", "*.safetensors.index.json", "adapter_config.json", "base_model.json", "trained_blocks.json"),
    *("config.json", *OF_RUNS),
)
SAY_AFTER_S = 30.0  # of waiting
ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def check_upload(repo_id: str, flag: str = "--push_to_hub") -> None:
    """Raises PlanError for a name that the Hub does not take, for an unknown token, and for one without the right to
    write there, as far as the Hub says. One request.
    """
    said = f"{flag} {repo_id}"
    if not ID.fullmatch(repo_id) or repo_id.endswith((".git", ".ipynb")) or "--" in repo_id or ".." in repo_id:
        raise PlanError(f"{said}: is not the id of a Hub repository. Give one such as your-name/my-model.")
    if offline():
        raise PlanError(f"{said}: HF_HUB_OFFLINE is set. Unset it, or omit the flag.")
    me = _asked(said, lambda api: api.whoami())
    with untrusted(f"{said}: {endpoint()} does not say whose HF_TOKEN is", "Use another HF_ENDPOINT.", reads=False):
        obstacle = obstacle_of(me, repo_id.partition("/")[0])
    if obstacle:
        raise PlanError(f"{said}: {obstacle}.")


def obstacle_of(me: dict, owner: str) -> str:
    """The reason, with a remedy, for which a token may not write to repositories of `owner`, by the Hub's answer about
    the token; empty where nothing there is against it.
    """
    role = ((me.get("auth") or {}).get("accessToken") or {}).get("role")
    if role == "read":
        return "HF_TOKEN may only read. Make one that may write (https://huggingface.co/settings/tokens)"
    # Not every server lists organizations; a fine-grained token may see other ones than it may write to.
    if role == "fineGrained" or not isinstance(me.get("orgs"), list):
        return ""
    roles = {str(org["name"]).lower(): org.get("roleInOrg") for org in me["orgs"]} | {str(me["name"]).lower(): None}
    if owner.lower() not in roles:
        return f"HF_TOKEN is of {me['name']}, who is no member of {owner}. Give {me['name']}/..., or an organization's"
    if roles[owner.lower()] == "read":
        return f"{me['name']} may only read in {owner}. Give one of {me['name']}'s, or ask for the right to write"
    return ""


def upload(folder: Path, repo_id: str, message: str, flag: str = "--push_to_hub") -> str:
    """Uploads the folder's files; the line that says where they are, and whether they open here alone. Raises
    PlanError.
    """

    def send(api: Any) -> str:
        from huggingface_hub.utils import disable_progress_bars

        if not is_terminal(sys.stderr):
            disable_progress_bars()
        api.create_repo(repo_id, private=True, exist_ok=True)
        old = stale(api, repo_id, files, said)
        api.upload_folder(
            repo_id=repo_id, folder_path=folder, commit_message=message, allow_patterns=files, delete_patterns=old
        )
        return f"uploaded to {endpoint()}/{repo_id} (a new repository is private){base_that_stays(folder)}"

    found = {file for pattern in UPLOADED for file in folder.glob(pattern) if file.is_file()}
    files = sorted(file.relative_to(folder).as_posix() for file in found | set(files_in(folder)))
    said = f"{flag} {repo_id}"
    remedy = f"Everything is in {folder}: once that is mended, repeat the command, or run hf upload {repo_id} {folder}"
    return _asked(said, send, remedy, UPLOAD_TIMEOUT_S, sum((folder / file).stat().st_size for file in files))


def _waiting(said: str) -> Callable[[float], None]:
    """A function of the seconds waited, which says so once."""
    told: list[float] = []

    def waiting(waited_s: float) -> None:
        if waited_s > SAY_AFTER_S and not told and not is_terminal(sys.stderr):  # else huggingface_hub draws it
            told.append(waited_s)
            say(f"{said}: waiting for {endpoint()}", file=sys.stderr)

    return waiting


def base_that_stays(folder: Path) -> str:
    """A line about an adapter whose base is a folder of this machine; empty for any other."""
    try:
        base = read_json(folder / ADAPTER_CONFIG, {}).get("base_model_name_or_path")
    except (FileNotFoundError, JsonFileError):
        return ""
    if not isinstance(base, str) or not Path(base).expanduser().is_dir():
        return ""
    return (
        f". Its base is the folder {base} of this machine, which is not there: elsewhere it opens where "
        f"{ADAPTER_CONFIG} names a base that is. export.py --push_to_hub uploads both as one model"
    )


def stale(api: Any, repo_id: str, files: list[str], said: str) -> list[str]:
    """Files of a repository that this folder's weights replace, and that other programs would open in their place.
    Raises PlanError if one of them is of no run: only those that a manifest there names are deleted.
    """
    if not any(fnmatch(file, "*.safetensors") for file in files):
        return []  # a GGUF beside a model is another form of it
    there = set(api.list_repo_files(repo_id))
    named: set[str] = set()
    if MANIFEST in there:
        named = _named(api.hf_hub_download(repo_id, MANIFEST, cache_dir=hub_cache()))
    opened = {name for name in there if any(fnmatch(name, pattern) for pattern in OPENED)}
    old = sorted((opened | (there & named)) - set(files))
    of_others = [name for name in old if not named or name not in named | set(OF_RUNS)]
    if of_others:
        raise PlanError(
            f"{said}: holds {of_others[0]}, which no run wrote and which programs would open in the place of what is "
            "uploaded. Give another repository, or delete it there."
        )
    return old


def _named(manifest: str) -> set[str]:
    """The names in a manifest; none if it is not a run's."""
    try:
        return set(read_json(Path(manifest), {"files": {str: object}, "run_id": str})["files"])
    except JsonFileError:
        return set()


Answer = TypeVar("Answer")


def _asked(
    said: str,
    send: Callable[[Any], Answer],
    remedy: str = "Set HF_TOKEN to a token that may write there",
    timeout_s: float | None = None,
    num_bytes: int = 0,
) -> Answer:
    """Answer of `send(api)`. `timeout_s`: of an answer, where it is not the usual; `num_bytes` are sent before it."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub import errors as hub

    token = os.environ.get("HF_TOKEN") or get_token()
    if not token:
        raise PlanError(f"{said}: needs a token, and HF_TOKEN is not set. Set it, or run hf auth login.")
    answer_in_time(timeout_s)
    api = HfApi(endpoint=endpoint(), token=token)
    try:
        with well_formed(said):
            limit_s = None
            if timeout_s is not None:
                limit_s = timeout_s + num_bytes / SLOWEST_RATE
            return in_time(lambda: send(api), limit_s=limit_s, meanwhile=_waiting(said))
    except hub.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "an error")
        fact = f"{endpoint()} answers {status}" + (", so HF_TOKEN may not do that" if status in (401, 403) else "")
    except PlanError:
        raise
    except (hub.HTTPError, hub.HFValidationError, OSError, RuntimeError, ValueError) as error:
        fact = f"{endpoint()}: {first_line(error)}"
    raise PlanError(f"{said}: {fact.replace(token, '***')}. {remedy}.")
