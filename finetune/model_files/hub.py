"""The Hugging Face Hub: cache, download and the reason when it cannot serve a model."""

import contextlib
import difflib
import functools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from finetune.errors import PlanError, first_line
from finetune.model_files import hub_connections
from finetune.system.files import cache_root, is_regular, open_file
from finetune.system.progress import Progress, duration
from finetune.system.terminal import is_terminal
from finetune.system.threads import in_background
from finetune.system.untrusted import untrusted

Answer = TypeVar("Answer")

HUB_PROBE_S = 3.0
ASKED_AGAIN_S = 60.0
# without a byte of an answer; a Hub that commits large files takes its time
HUB_TIMEOUT_S = 20.0
UPLOAD_TIMEOUT_S = 300.0
# that a Hub may ask to wait for before it is asked again
PATIENCE_S = 60
# for a whole answer, and the least bytes per second of one that takes longer
ANSWER_S = 60.0
SLOWEST_RATE = 10_000
# for a download beside its bytes: how long one may take before the first of them is on the disk
DOWNLOAD_S = 600.0
# the most bytes of an answer about a repository, plain and compressed, and of a file of settings without a length
MOST_OF_ANSWER = 64 * 2**20
MOST_COMPRESSED = 4 * 2**20
MOST_OF_SETTINGS = 2**30
COMMIT_BYTES = 65  # more than the name of a commit has
SETTINGS = (".json", ".jinja", ".txt")
HUB_PATTERNS = ["*.safetensors", "*.json", "*.model", "*.model.v*", "*.jinja", "*.tiktoken", "*.spm", "*.codes"]
HUB_PATTERNS += ["merges.txt", "vocab.txt", "dict.txt"]


def looks_like_hub_id(name: str) -> bool:
    parts = name.split("/")
    plain = all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", part) for part in parts)
    return plain and len(parts) <= 2 and ".." not in name and "--" not in name


def nearest(folder: Path) -> str:
    """A sentence that names the folders most similar to a missing one, or the nearest existing parent."""
    parent = folder.parent
    while not parent.is_dir() and parent != parent.parent:
        parent = parent.parent
    try:
        beside = sorted(p.name for p in parent.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError:
        beside = []
    if folder != parent:
        wanted = folder.relative_to(parent).parts[0]
    else:
        wanted = folder.name
    close = difflib.get_close_matches(wanted, beside, n=3, cutoff=0.5) or beside[:3]
    if parent == Path("."):
        where = "this folder"
    else:
        where = str(parent)
    if close:
        return f"In {where}: {', '.join(close)}. Check the path."
    return f"{where} has no folders. Check the path."


# ---- the Hub


def endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def offline() -> bool:
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(n, "").upper() in ("1", "ON", "YES", "TRUE") for n in names)


def hub_cache() -> Path:
    """The Hub cache folder by the current environment variables (the library reads them only once, at import)."""
    if os.environ.get("HF_HUB_CACHE"):
        return Path(os.environ["HF_HUB_CACHE"]).expanduser()
    home = os.environ.get("HF_HOME") or cache_root() / "huggingface"
    return Path(home).expanduser() / "hub"


def answer_in_time(seconds: float | None = None) -> None:
    """Sets a timeout for all later requests of huggingface_hub, which has none by default (default: HUB_TIMEOUT_S), and
    raises its HTTPError where a Hub asks to be left alone for longer than PATIENCE_S: the library would wait that long.
    """
    from huggingface_hub import get_session

    limit = seconds or HUB_TIMEOUT_S

    def limited(request: Any) -> None:
        asked = request.extensions.get("timeout") or {}
        request.extensions["timeout"] = {of: asked.get(of) or limit for of in ("connect", "read", "write", "pool")}
        hub_connections.remember(request)

    session = get_session()
    _take_off(session)
    hooks = session.event_hooks
    session.event_hooks = {
        "request": [*hooks["request"], limited],
        "response": [*hooks["response"], _patient, _bounded],
    }
    limited_here = _limited.get()
    if limited_here is not None:
        limited_here.append(session)


OWN_HOOKS = ("limited", "_patient", "_bounded")
_limited: ContextVar[list[Any] | None] = ContextVar("_limited", default=None)


@contextlib.contextmanager
def callers_requests() -> Iterator[None]:
    """A context at whose end requests of huggingface_hub have no limits of `answer_in_time`: later ones are the
    caller's.
    """
    sessions: list[Any] = []
    token = _limited.set(sessions)
    try:
        yield
    finally:
        _limited.reset(token)
        for session in sessions:
            _take_off(session)
        hub_connections.forget()


def _take_off(session: Any) -> None:
    found = session.event_hooks
    session.event_hooks = {event: [h for h in found[event] if h.__name__ not in OWN_HOOKS] for event in found}


def _patient(response: Any) -> None:
    """Raises HTTPError for an answer that asks to wait for more than PATIENCE_S, as huggingface_hub would."""
    from huggingface_hub.errors import HTTPError

    if response.status_code != 429 and response.status_code < 500:
        return
    limits = re.search(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d{1,18})", response.headers.get("ratelimit", ""))
    after = re.fullmatch(r"\s*(\d{1,18})\s*", response.headers.get("retry-after", ""))
    asked = limits if limits and response.status_code == 429 else after
    if asked and int(asked[1]) > PATIENCE_S:
        raise HTTPError(f"answers {response.status_code}, and asks to wait for {duration(int(asked[1]))}")


def _bounded(response: Any) -> None:
    """Ends an answer after as many bytes as it may have. Raises PlanError for a file named by a path: huggingface_hub
    would write it outside of its cache.
    """
    for header in ("x-linked-etag", "etag"):
        name = response.headers.get(header, "").removeprefix("W/").strip('"')
        if re.search(r"[/\\\0]", name) or name in (".", ".."):
            raise PlanError(f"{endpoint()} names a file {name[:80]!r}. Use another HF_ENDPOINT.")
    path = response.request.url.path
    most = None
    if "/api/" in path:
        most = MOST_COMPRESSED if "content-encoding" in response.headers else MOST_OF_ANSWER
    elif path.endswith(SETTINGS) and "/datasets/" not in path and "content-length" not in response.headers:
        most = MOST_OF_SETTINGS
    if most is not None and response.request.method != "HEAD":
        response.iter_raw = functools.partial(at_most, most, response.iter_raw)


def at_most(most: int, read: Callable[..., Iterator[bytes]], chunk_size: int | None = None) -> Iterator[bytes]:
    """The parts of an answer that `read` gives. Raises HTTPError after `most` bytes."""
    from huggingface_hub.errors import HTTPError

    left = most
    for part in read(chunk_size=chunk_size):
        left -= len(part)
        if left < 0:
            raise HTTPError(f"its answer is longer than {most / 2**20:,.0f} MiB")
        yield part


def in_time(
    ask: Callable[[], Answer],
    received: Callable[[], int] = lambda: 0,
    limit_s: float | None = None,
    meanwhile: Callable[[float], object] = lambda waited_s: None,
) -> Answer:
    """The answer of the Hub that `ask()` returns. Raises huggingface_hub's HTTPError once it has taken `limit_s`
    (default: ANSWER_S) and a second for each SLOWEST_RATE bytes `received`: every byte of a Hub that drips would be in
    time by itself. However much came before, at most `limit_s` are left for the rest. `meanwhile(seconds waited)` is
    called each second, and may raise.
    """
    from huggingface_hub.errors import HTTPError

    if limit_s is None:
        limit_s = ANSWER_S
    callers = hub_connections.present()
    answer = in_background(ask, wait_at_exit=False)
    began = time.monotonic()
    left = limit_s
    waited = 0.0
    here = 0
    while not answer.done():
        before = waited
        waited = time.monotonic() - began
        meanwhile(waited)
        grown = max(0, received() - here)  # a file that gets its name may be missed by a look
        here += grown
        left = min(limit_s, left + grown / SLOWEST_RATE - (waited - before))
        if left <= 0:
            hub_connections.give_up(answer, callers)
            raise HTTPError(f"timed out: no whole answer in {waited:.0f} s")
        wait([answer], min(left, 1.0))
    return answer.result()


@contextlib.contextmanager
def well_formed(said: str) -> Iterator[None]:
    """A context in which an answer that no Hub gives is a PlanError; what huggingface_hub raises for others passes."""
    from huggingface_hub.errors import HFValidationError, HTTPError

    fact = f"{said}: {endpoint()} answers as no Hub does"
    with untrusted(fact, "Use another HF_ENDPOINT.", passing=(HTTPError, HFValidationError, OSError)):
        yield


def downloaded(fetch: Callable[[], Answer], folder: Path, said: str) -> Answer:
    """The result of huggingface_hub's download `fetch()`, whose files grow in `folder`. Raises PlanError for answers
    that no Hub gives, and huggingface_hub's HTTPError for one that takes too long.
    """
    before = bytes_in(folder)
    with well_formed(said):
        return in_time(fetch, received=lambda: bytes_in(folder) - before, limit_s=DOWNLOAD_S)


def blobs_of(repo_id: str, kind: str) -> Path:
    """The folder of the Hub cache in which a repository's files grow. `kind`: model or dataset."""
    return hub_cache() / f"{kind}s--{repo_id.replace('/', '--')}" / "blobs"


def check_ref(repo_id: str, revision: str | None, kind: str) -> None:
    """Raises PlanError if the Hub cache's file of a branch names no commit: what it names is opened as the repository.
    `kind`: model or dataset.
    """
    name = revision or "main"
    if {"", ".", ".."} & set(name.split("/")):
        raise PlanError(f"--revision {name}: is not a branch, tag or commit. Correct it.")
    folder = blobs_of(repo_id, kind).parent
    file = folder / "refs" / name
    if not is_regular(file):
        return
    commit = ""
    with contextlib.suppress(OSError), open_file(file, "rb") as found:  # a link, or unreadable: no name
        commit = found.read(COMMIT_BYTES).decode("ascii", errors="replace")
    if not re.fullmatch("[0-9A-Za-z]{1,64}", commit):
        raise PlanError(f"{file}: names no commit. Remove it.")
    if (folder / "snapshots" / commit).is_file():
        raise PlanError(f"{folder / 'snapshots' / commit}: is a file, not a folder. Remove it.")


def hub_folder(repo_id: str, revision: str | None, said: str, cached_only: bool = False) -> Path | None:
    """The snapshot folder of a Hub model, downloaded if not cached; its name is the commit.

    Weights, JSON and tokenizer files only: no pickles, no code. `cached_only` makes no network request: None if it is
    not cached. Raises PlanError.
    """
    from huggingface_hub import snapshot_download

    check_ref(repo_id, revision, "model")
    answer_in_time()
    blobs = blobs_of(repo_id, "model")
    began_with = time.monotonic()

    def describe() -> str:
        seconds = time.monotonic() - began_with
        return f"downloading {repo_id}: {bytes_in(blobs) / 2**20:,.0f} MiB here, {duration(seconds)}"

    drawn = is_terminal(sys.stderr)  # by huggingface_hub itself
    with (
        hub_errors(repo_id, revision, said, cached_only),
        Progress("downloading", describe=describe, quiet=cached_only or drawn),
    ):
        fetch = functools.partial(
            snapshot_download,
            repo_id,
            revision=revision,
            cache_dir=hub_cache(),
            endpoint=endpoint(),
            allow_patterns=HUB_PATTERNS,
        )
        if cached_only or offline():
            return Path(fetch(local_files_only=True))
        folder = Path(downloaded(fetch, blobs, said))
        if not folder.is_dir():
            raise PlanError(f"{said}: {endpoint()} names another commit of it at each request. Try again.")
        return folder
    return None


@contextlib.contextmanager
def hub_errors(repo_id: str, revision: str | None, said: str, may_be_missing: bool = False):
    """A context in which what huggingface_hub raises becomes a PlanError; `may_be_missing`: what is not cached ends it
    without one.
    """
    from huggingface_hub import errors as hub

    try:
        yield
        return
    except hub.RevisionNotFoundError:
        if revision is None:
            raise PlanError(f"{said}: {endpoint()} names a commit of it that it does not have. Try again.") from None
        raise PlanError(f"--revision {revision}: {said} has no such branch, tag or commit on {endpoint()}.") from None
    except hub.GatedRepoError:
        raise PlanError(
            f"{said}: is gated on {endpoint()}, and {token_state()}. Accept its terms on the model page, then set "
            "HF_TOKEN."
        ) from None
    except hub.LocalEntryNotFoundError as error:
        if may_be_missing:
            return
        if offline():
            reason = "HF_HUB_OFFLINE is set"
        else:
            reason = first_line(error.__cause__ or error)
    except hub.RepositoryNotFoundError:
        reason = f"{endpoint()} does not have it, or it is private and {token_state()}"
    except hub.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "an error")
        reason = f"{endpoint()} answers {status}" + (f", and {token_state()}" if status in (401, 403) else "")
    except hub.HTTPError as error:  # errors of the HTTP library: connection refused, reset, or timed out
        reason = f"{endpoint()}: {first_line(error)}"
    except hub.HFValidationError as error:
        reason = first_line(error)
    except OSError as error:
        if error.errno is not None:  # of this machine's files
            raise
        reason = f"{endpoint()}: {first_line(error)}"
    raise PlanError(
        f"{said}: no such folder, and no Hub model of that name could be reached ({reason}). {nearest(Path(repo_id))}"
    )


def bytes_in(folder: Path) -> int:
    """Bytes of the files in a folder, also of those that are being written."""
    found = 0
    for file in folder.glob("*"):
        with contextlib.suppress(FileNotFoundError):  # a download that has just got its name
            found += file.stat().st_size
    return found


def token_state() -> str:
    return "HF_TOKEN has no access to it" if os.environ.get("HF_TOKEN") else "HF_TOKEN is not set"


def hub_unreachable() -> str | None:
    """Reason that the Hub cannot be reached now; None if it can. An HTTP answer of any status counts as reached."""
    if offline():
        return "HF_HUB_OFFLINE is set"
    return _no_answer(endpoint(), int(time.monotonic() // ASKED_AGAIN_S))


@functools.lru_cache(maxsize=2)
def _no_answer(of_endpoint: str, period: int) -> str | None:
    """The result of hub_unreachable at this endpoint, asked once in a period."""
    problem = hub_problem("api")
    return None if problem is None or problem.startswith("it answers") else problem


def hub_problem(repo_id: str) -> str | None:
    """Reason that the Hub cannot serve this model; None if it can. One request, no retries, HUB_PROBE_S at most,
    including DNS.
    """
    import http.client
    import urllib.error
    import urllib.request

    def ask() -> str | None:
        request = urllib.request.Request(f"{endpoint()}/{repo_id}/resolve/main/config.json", method="HEAD")
        try:
            with urllib.request.urlopen(request, timeout=HUB_PROBE_S):
                return None
        except urllib.error.HTTPError as error:
            return f"it answers {error.code}"
        except (OSError, ValueError, http.client.HTTPException) as error:
            return first_line(getattr(error, "reason", error))

    answer = in_background(ask, wait_at_exit=False)  # DNS can hang longer than any socket timeout
    wait([answer], HUB_PROBE_S)
    if answer.done():
        return answer.result()
    return f"no answer in {HUB_PROBE_S:g} s"
