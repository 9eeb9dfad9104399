"""Images by URL, for --allow_urls: https alone, within a deadline and a size, and kept in the cache."""

import hashlib
from collections.abc import Callable
from functools import partial
from urllib.parse import urljoin, urlsplit

from finetune.errors import PlanError
from finetune.model_files.hub import answer_in_time, in_time, offline
from finetune.system.files import cache_folder, open_file, replace
from finetune.system.untrusted import untrusted

MAX_REDIRECTS = 5
REDIRECTS = (301, 302, 303, 307, 308)
SHOWN = 100  # characters of a URL in a message
DOWNLOAD = "Download the image and give its path."


def fetched(url: str, source: str, most_bytes: int, is_kept: Callable[[bytes], bool] = lambda data: True) -> bytes:
    """The bytes at a URL, from the cache if it was read before and they were worth keeping. Raises PlanError, which
    `source` begins.
    """
    folder = cache_folder("images") / _digest(url.encode())  # of its own: among all images it is slow to find
    said = f"{source}: {url[:SHOWN]}"
    for kept in sorted(folder.glob("*")):
        with open_file(kept, "rb") as file:
            data = file.read()
        if kept.name == _digest(data):  # as it was written
            return data
    if offline():
        raise PlanError(f"{said} was not read before, and HF_HUB_OFFLINE is set. {DOWNLOAD}")
    found = bytearray()
    with untrusted(f"{said} cannot be read", DOWNLOAD, reads=False):
        answer_in_time()
        in_time(partial(_receive, url, said, found, most_bytes), received=lambda: len(found))
    data = bytes(found)
    if not is_kept(data):  # such as a page that says to come back later
        return data
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replace(folder / _digest(data)) as file:
            file.write(data)
    except OSError:  # a cache only saves time
        return data
    return data


def _digest(data: bytes) -> str:
    """32 digits of the sha256."""
    return hashlib.sha256(data).hexdigest()[:32]


def _receive(url: str, said: str, found: bytearray, most_bytes: int) -> None:
    """Fills `found`. No header of the Hub's goes with the request, and none of its redirects leaves https."""
    from huggingface_hub import get_session

    for _ in range(MAX_REDIRECTS):
        if urlsplit(url).scheme != "https":
            raise PlanError(f"{said} leads to {url[:SHOWN]}, and only https is read. {DOWNLOAD}")
        with get_session().stream("GET", url, follow_redirects=False) as response:
            status = response.status_code
            if status in REDIRECTS and response.headers.get("Location"):
                url = urljoin(url, response.headers["Location"])
                continue
            if status != 200:
                raise PlanError(f"{said}: {urlsplit(url).hostname} answers {status}. {DOWNLOAD}")
            for piece in response.iter_bytes():
                found += piece
                if len(found) > most_bytes:
                    raise PlanError(f"{said} has over {most_bytes >> 20} MiB. Give a smaller image.")
            return
    raise PlanError(f"{said} leads to {MAX_REDIRECTS} other URLs, one after the other. {DOWNLOAD}")
