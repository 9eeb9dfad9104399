"""The page of runs that go on, served to this machine alone: on the loopback address, under a token."""

import contextlib
import hmac
import secrets
import socket
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from finetune.errors import PlanError, first_line
from finetune.run.page import REFRESH_S, page_of

ADDRESS = "127.0.0.1"
REQUEST_S = 30.0
MOST = 32  # connections at once: a process may have as few as 64 files open


class LivePage(ThreadingHTTPServer):
    """`url`: where the page is. It is made again for each request, from the files as they are then.

    A request has REQUEST_S to be sent and taken, over all its bytes. Of more than MOST connections at once the one that
    has waited longest is closed: those that say nothing lock nobody out.
    """

    daemon_threads = True

    def __init__(self, folders: list[Path], port: int = 0):
        self.folders = folders
        self.token = secrets.token_urlsafe(24)
        self.open: dict[socket.socket, float] = {}
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            raise PlanError(f"--port {port}: cannot be used ({error}). Use another, or 0 for a free one.") from None

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/{self.token}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers in a thread of its own, once there is room for it."""
        self.open[request] = time.monotonic()
        for longest in list(self.open)[:-MOST]:
            self._drop(longest)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Called twice a second: ends requests that take too long."""
        for request, since in list(self.open.items()):
            if time.monotonic() - since > REQUEST_S:
                self._drop(request)

    def _drop(self, request: socket.socket) -> None:
        self.open.pop(request, None)
        with contextlib.suppress(OSError):  # its thread was sooner
            request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        self.open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints no traceback for a client that disconnected; for anything else, as the base class does."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def allows(self, host: str, path: str) -> bool:
        """True if a request knows the token and names this server by a loopback name, which no foreign page can."""
        known = {f"{name}:{self.server_port}" for name in (ADDRESS, "localhost")}
        return host in known and hmac.compare_digest(path.encode(), f"/{self.token}/".encode())


class _Handler(BaseHTTPRequestHandler):
    server: LivePage

    def do_GET(self) -> None:
        if not self.server.allows(self.headers.get("Host", ""), self.path):
            self.send_error(404)
            return
        status = 200
        kind = "text/html"
        more = {}
        try:
            text = page_of(self.server.folders, live=True)
        except PlanError as error:  # the folder went away, or is being replaced
            status = 503
            kind = "text/plain"
            more = {"Refresh": str(REFRESH_S)}
            text = first_line(error)
        content = text.encode("utf-8", "replace")
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            **more,
        }
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not printed."""


def serve(folders: list[Path], port: int, say: Callable[[str], None]) -> int:
    """Serves until it is interrupted. Raises PlanError for folders that are no runs."""
    page_of(folders)
    with LivePage(folders, port) as server:
        say(f"live report: {server.url} (Ctrl-C ends it)")
        server.serve_forever()
    return 0
