"""Images by URL: over https alone, within bounds, and once."""

import contextlib
import shutil
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub.utils import close_session

from finetune.data.columns import RowOptions, RowReader
from finetune.data.images.fetch import _digest, fetched
from finetune.data.images.references import ImageOptions, ImageReference
from finetune.errors import PlanError
from finetune.model_files import hub
from finetune.system.files import cache_folder

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
SOURCE = "rows.jsonl:1: field 'image'"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, format, *args):
        pass

    def do_GET(self):
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        targets = {
            "/turn": "/a.png",
            "/plain": "http://127.0.0.1:1/a.png",
            "/file": "file:///etc/hostname",
            "/loop": "/loop",
        }
        if self.path in targets:
            self.send_response(302)
            self.send_header("Location", targets[self.path])
            self.end_headers()
        elif self.path == "/slow.png":
            self.send_response(200)
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            with contextlib.suppress(OSError):
                while not self.server.done.wait(0.05):
                    self.wfile.write(b"x")
        elif self.path.endswith((".png", ".html")):
            content = PNG if self.path.endswith(".png") else b"<html>later</html>"
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        else:
            self.send_error(404)


@pytest.fixture
def server(tmp_path, monkeypatch):
    """An https server of this machine whose certificate is trusted here."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl for a certificate")
    key = str(tmp_path / "key.pem")
    cert = str(tmp_path / "cert.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run(command, check=True, capture_output=True)
    monkeypatch.setenv("SSL_CERT_FILE", cert)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    close_session()
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.asked = []
    made.done = threading.Event()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    made.socket = context.wrap_socket(made.socket, server_side=True)
    thread = threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    made.url = f"https://127.0.0.1:{made.server_address[1]}"
    try:
        yield made
    finally:
        made.done.set()
        made.shutdown()
        made.server_close()
        thread.join()
        close_session()


def test_a_url_is_read_once_and_without_the_hubs_token(server):
    row = {"question": "?", "answer": "a", "image": f"{server.url}/a.png"}
    read = RowReader(RowOptions(images=ImageOptions(None, allow_urls=True))).read(row, "rows.jsonl:1")
    assert not server.asked  # reading a row asks nobody
    assert read.images[0].read_bytes() == PNG == fetched(f"{server.url}/a.png", SOURCE, 1000)
    assert server.asked == [("/a.png", None)]
    assert fetched(f"{server.url}/turn", SOURCE, 1000) == PNG


def test_a_kept_image_that_is_not_as_it_was_written_is_asked_for_again(server):
    url = f"{server.url}/b.png"
    assert fetched(url, SOURCE, 1000) == fetched(url, SOURCE, 1000) == PNG
    # a folder of its own: of 100,000 images, listing all took 0.12 s for each
    (kept,) = (cache_folder("images") / _digest(url.encode())).iterdir()
    kept.write_bytes(PNG[::-1])
    assert fetched(url, SOURCE, 1000) == fetched(url, SOURCE, 1000) == PNG
    assert [path for path, _ in server.asked] == ["/b.png"] * 2


def test_what_is_no_image_is_asked_for_again(server):
    """A page in the place of an image, as of a server that is busy."""
    reference = ImageReference(SOURCE, url=f"{server.url}/page.html")
    for _ in range(2):
        assert reference.read_bytes() == b"<html>later</html>"
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    ("path", "fact"),
    [
        ("none", "127.0.0.1 answers 404"),
        ("plain", "leads to http://127.0.0.1:1/a.png, and only https is read"),
        ("file", "leads to file:///etc/hostname, and only https is read"),
        ("loop", "leads to 5 other URLs"),
        ("b.png", "has over 0 MiB"),
    ],
)
def test_what_is_not_an_image_within_bounds_is_refused(server, path, fact):
    with pytest.raises(PlanError) as error:
        fetched(f"{server.url}/{path}", SOURCE, 100)
    assert str(error.value).startswith(f"{SOURCE}: {server.url}/{path}") and fact in str(error.value)


def test_a_server_that_drips_or_is_not_there_ends_in_a_line(server, monkeypatch):
    monkeypatch.setattr(hub, "ANSWER_S", 0.5)
    with pytest.raises(PlanError, match="/slow.png cannot be read .*timed out.*Download the image"):
        fetched(f"{server.url}/slow.png", SOURCE, 10_000_000)
    with pytest.raises(PlanError, match="https://127.0.0.1:1/a.png cannot be read .*Download the image"):
        fetched("https://127.0.0.1:1/a.png", SOURCE, 1000)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(PlanError, match="was not read before, and HF_HUB_OFFLINE is set"):
        fetched(f"{server.url}/c.png", SOURCE, 1000)


def test_a_certificate_that_nobody_trusts_is_refused(server, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE")
    close_session()
    with pytest.raises(PlanError, match="cannot be read .*CERTIFICATE"):
        fetched(f"{server.url}/a.png", SOURCE, 1000)
