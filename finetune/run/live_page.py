"""The page of runs that go on, served to this machine alone: on the loopback address, under a token."""

import hmac
import secrets
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from finetune.errors import PlanError
from finetune.run.page import page_of

ADDRESS = "127.0.0.1"


class LivePage(ThreadingHTTPServer):
    """`url`: where the page is. It is made again for each request, from the files as they are then."""

    daemon_threads = True

    def __init__(self, folders: list[Path], port: int = 0):
        self.folders = folders
        self.token = secrets.token_urlsafe(24)
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            raise PlanError(f"--port {port}: cannot be used ({error}). Use another, or 0 for a free one.") from None

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/{self.token}/"

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
        content = page_of(self.server.folders, live=True).encode("utf-8", "replace")
        self.send_response(200)
        headers = {
            "Content-Type": "text/html; charset=utf-8",
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
        }
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
