"""Parts of files on the Hub, by HTTP range requests: what a dry run reads of a model or a dataset that is not here."""

import contextlib
import io
import json
import re
import shutil
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from finetune.errors import PlanError
from finetune.model_files.config_values import shown
from finetune.model_files.digest import is_blob
from finetune.model_files.files import GENERATION, INDEX, MAX_JSON_BYTES, WEIGHTS, ModelFiles, index_shards, read_folder
from finetune.model_files.hub import (
    answer_in_time,
    endpoint,
    hub_errors,
    hub_unreachable,
    in_time,
    looks_like_hub_id,
    well_formed,
)
from finetune.model_files.tokenizer_files import is_tokenizer_file
from finetune.system.files import cache_folder, is_plain_name, new_folder
from finetune.system.threads import Pool
from finetune.system.untrusted import untrusted

FIRST_BYTES = 2**16  # of a weight file: most headers are shorter
MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
MAX_FILE_BYTES = 2**44  # Linux' ext4 has no larger ones
MOST_SKIPPED = 2**28  # of a server that sends whole files
AT_ONCE = 8
PLACEHOLDERS = (".bin", ".pt", ".pth", ".gguf")  # what a folder is refused for, by its names alone
BNB_STATE = ".quant_state.bitsandbytes__"


class RemoteFile(io.RawIOBase):
    """A file of a Hub repository as one that can be read and sought, each read a range request.

    `kind`: model or dataset. `moved`: bytes of content that came over the network. Raises what huggingface_hub does.
    """

    def __init__(self, repo_id: str, name: str, revision: str, kind: str = "model"):
        from huggingface_hub import hf_hub_url

        url = hf_hub_url(repo_id, name, repo_type=kind, revision=revision, endpoint=endpoint())
        self.name = name
        self.url = url
        self.at = 0
        self.moved = 0
        self.digest = ""  # by which the Hub names the content
        self._size: int | None = None

    def read_range(self, first: int, length: int) -> bytes:
        """Up to `length` bytes from offset `first`: fewer at the end of the file."""
        before = self.moved
        return in_time(partial(self._receive, first, length), received=lambda: self.moved - before)

    def _receive(self, first: int, length: int) -> bytes:
        from huggingface_hub import get_session
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        headers = build_hf_headers() | {"Range": f"bytes={first}-{first + length - 1}", "Accept-Encoding": "identity"}
        found = bytearray()
        with get_session().stream("GET", self.url, headers=headers, follow_redirects=True) as response:
            if response.status_code == 416:  # nothing from there on
                return b""
            hf_raise_for_status(response)
            named = response.headers.get("etag", "").removeprefix("W/").strip('"')
            # A server to which it is passed on has names of its own.
            if not response.history and re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", named):
                self.digest = named
            whole = response.status_code == 200  # a server that knows no ranges sends all: the rest is left
            total = re.search(r"/(\d{1,18})$", response.headers.get("Content-Range", ""))
            if total:
                self._size = int(total[1])
            else:
                self._size = int(response.headers.get("Content-Length", 0))
            skip = first if whole else 0
            if skip > MOST_SKIPPED:
                raise PlanError(
                    f"{self.name}: {endpoint()} sends files whole, {skip / 2**20:,.0f} MiB before what is read. "
                    "Use another HF_ENDPOINT, or omit --dry_run."
                )
            for piece in response.iter_bytes():
                self.moved += len(piece)
                found += piece[skip:]
                skip = max(0, skip - len(piece))
                if len(found) >= length:
                    break
        return bytes(found[:length])

    @property
    def size(self) -> int:
        if self._size is None:
            self.read_range(0, 1)
        assert self._size is not None
        return self._size

    # ---- io.RawIOBase, for pyarrow

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence:
            self.at = offset + (0, self.at, self.size)[whence]
        else:
            self.at = offset
        return self.at

    def tell(self) -> int:
        return self.at

    def read(self, length: int = -1) -> bytes:
        if length is None or length < 0:
            length = self.size - self.at
        found = b""
        if length:
            found = self.read_range(self.at, length)
        self.at += len(found)
        return found

    def readinto(self, buffer: Any) -> int:
        found = self.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)


def looks_folder(kind: str, repo_id: str, commit: str) -> Path:
    """Folder of what was read of a repository at a commit, kept for later dry runs. PlanError for no commit's name."""
    if not is_plain_name(commit):
        raise PlanError(f"{repo_id}: {endpoint()} names the commit {commit[:80]!r}. Use another HF_ENDPOINT.")
    return cache_folder("hub_looks") / f"{kind}s--{repo_id.replace('/', '--')}" / commit


_looks: ContextVar[list[tuple[str, Path]] | None] = ContextVar("_looks", default=None)


@contextlib.contextmanager
def looks_judged() -> Iterator[None]:
    """A context whose looks at the Hub, new and kept ones, are removed if it ends in a PlanError that names their
    repository: the next dry run asks the Hub again, which may have answered wrongly.
    """
    looks: list[tuple[str, Path]] = []
    token = _looks.set(looks)
    try:
        yield
    except PlanError as error:
        for repo_id, path in looks:
            if repo_id not in str(error) and repo_id.replace("/", "--") not in str(error):  # by its id or folder
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)  # another dry run may remove it at the same time
            else:
                path.unlink(missing_ok=True)
        raise
    finally:
        _looks.reset(token)


def look_at(repo_id: str, path: Path) -> None:
    """Notes a look at a repository that the present plan is made from."""
    looks = _looks.get()
    if looks is not None:
        looks.append((repo_id, path))


def model_on_paper(repo_id: str, revision: str | None) -> tuple[ModelFiles | None, str]:
    """(a Hub model by its config, tokenizer and the headers of its weights, None if the Hub cannot be reached; a line
    that says what was read, or why not).

    The weights' files have their headers and their sizes, and no content: only a dry run may see them. Raises PlanError
    for a repository that is not there, or that a run would refuse.
    """
    said = f"--model_name {repo_id}"
    if not looks_like_hub_id(repo_id):
        return None, ""
    if problem := hub_unreachable():
        return None, problem
    from huggingface_hub import HfApi

    answer_in_time()
    with hub_errors(repo_id, revision, said):
        with well_formed(said):
            info = in_time(lambda: HfApi(endpoint=endpoint()).model_info(repo_id, revision=revision))
            commit = str(info.sha)
            names = {f.rfilename for f in info.siblings or ()}
            long = next((name for name in names if not all(map(is_plain_name, PurePosixPath(name).parts))), None)
        if long:
            raise PlanError(f"{said}: has a file named {shown(long)}, which no file system takes. Give another model.")
        folder = looks_folder("model", repo_id, commit)
        moved = 0
        if not (folder / "config.json").is_file():
            moved = _read_model(repo_id, commit, names, folder, said)
    look_at(repo_id, folder)
    files = read_folder(folder, repo_id, commit, "hub", said)
    if moved >= 2**20:
        here = f"{moved / 2**20:.1f} MiB read"
    else:
        here = f"{moved / 2**10:.0f} KiB read"
    size = sum(path.stat().st_size for path in files.weight_files)
    what = "read before"
    if moved:
        what = f"{here} of its {size / 2**30:,.2f} GiB"
    return files, f"{repo_id} is not on this disk: its config and the headers of its weights, {what}"


def _read_model(repo_id: str, commit: str, names: set[str], folder: Path, said: str) -> int:
    """Writes `folder`; bytes that moved."""
    moved = 0
    with _not_removed(folder), new_folder(folder) as made:
        kept = ("config.json", "adapter_config.json", INDEX, GENERATION)
        texts = [name for name in sorted(names) if name in kept or is_tokenizer_file(name)]
        for name in texts:
            remote = RemoteFile(repo_id, name, commit)
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            content = remote.read_range(0, MAX_JSON_BYTES + 1)
            if remote.digest and len(content) <= MAX_JSON_BYTES and not is_blob(content, remote.digest):
                fact = f"{name} is not the file that {endpoint()} names (its digest differs)"
                raise PlanError(f"{said}: {fact}. Try again.")
            (made / name).write_bytes(content)
            moved += remote.moved
        for name in names:
            if "/" not in name and Path(name).suffix in PLACEHOLDERS:
                (made / name).touch()
        if WEIGHTS in names:
            shards = [WEIGHTS]
        elif INDEX in names:
            shards = index_shards(made, said)
        else:
            shards = []
        if missing := [name for name in shards if name not in names]:
            raise PlanError(f"{said}: {missing[0]} is missing on {endpoint()}. Give another model.")
        with Pool(AT_ONCE) as pool:
            moved += sum(pool.map(lambda name: _read_header(repo_id, name, commit, made / name, said), shards))
    return moved


@contextlib.contextmanager
def _not_removed(folder: Path) -> Iterator[None]:
    """A context in which a folder is written. Raises PlanError if another process removes it meanwhile."""
    try:
        yield
    except FileNotFoundError as error:
        raise PlanError(
            f"{folder.parent}: {error.strerror}: it was removed while it was written. Start again."
        ) from None


def _read_header(repo_id: str, name: str, commit: str, path: Path, said: str) -> int:
    """Writes a weight file's header, and the size of the file as a hole; bytes that moved."""
    from huggingface_hub.errors import HTTPError

    remote = RemoteFile(repo_id, name, commit)
    start = remote.read_range(0, FIRST_BYTES)
    with untrusted(f"{said}: {name} is damaged", "Give another model.", passing=(HTTPError, OSError)):
        length = 8 + int.from_bytes(start[:8], "little")
        if length > min(MAX_HEADER_BYTES, remote.size):
            raise ValueError(f"its header would have {length:,} bytes")
        if remote.size > MAX_FILE_BYTES:
            raise ValueError(f"it would have {remote.size:,} bytes")
        if length > len(start):
            start += remote.read_range(len(start), length - len(start))
        header = json.loads(start[8:length])
        state = next((tensor for tensor in header if BNB_STATE in tensor), None)
        state_bytes = b""
        first = 0
        if state:  # says how the weights are quantized
            first, last = header[state]["data_offsets"]
            if type(first) is not int or type(last) is not int or not 0 <= first <= last <= remote.size - length:
                raise ValueError(f"data_offsets of {state} are {first!r} and {last!r}")
            if last > first:
                state_bytes = remote.read_range(length + first, min(last - first, FIRST_BYTES))
    with open(path, "wb") as file:
        file.write(start[:length])
        file.truncate(remote.size)
        if state_bytes:
            file.seek(length + first)
            file.write(state_bytes)
    return remote.moved
