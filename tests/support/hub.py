"""A Hugging Face hub on 127.0.0.1 over local folders: enough of its API for listings, snapshots, single files and, with
`uploads`, new model repositories and commits.
"""

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@contextlib.contextmanager
def serve(models=None, datasets=None, token=None, uploads=None, log=None, me=None) -> Iterator[str]:
    """The endpoint's URL for HF_ENDPOINT. `models`, `datasets`: {repo id: folder}. With `token`, 401 without it.
    `uploads`: a folder in which uploaded repositories are made, as uploads/ORG/NAME. `log`: receives (method, path,
    status, bytes sent) of each answer. `me`: more of what it says of the token's owner, who is org.
    """
    repos = {("models", k): Path(v) for k, v in (models or {}).items()}
    repos |= {("datasets", k): Path(v) for k, v in (datasets or {}).items()}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.repos, server.token, server.log, server.uploads = repos, token, [], uploads and Path(uploads)
    server.sent = [] if log is None else log
    server.large, server.private = {}, {}
    server.me = {} if me is None else me
    with running(server) as address:
        yield address


@contextlib.contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[str]:
    """The address of a server of loopback, which answers meanwhile."""
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def commit_of(folder: Path) -> str:
    """A 40-digit name for what the folder holds now, as a hub's commit is."""
    digest = hashlib.sha1()
    for name, path in files_of(folder).items():
        digest.update(f"{name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def files_of(folder: Path) -> dict[str, Path]:
    return {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()}


def blob_of(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format, *args):
        pass

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def do_POST(self):
        sent = self.rfile.read(int(self.headers["Content-Length"])) or b"{}"
        if self.path.endswith("ndjson") or self.headers.get("Content-Type") == "application/x-ndjson":
            return self.answer([json.loads(line) for line in sent.splitlines()])
        self.answer(json.loads(sent))

    def do_PUT(self):
        """Bytes of a large file, by their sha256."""
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if hashlib.sha256(content).hexdigest() != self.path.rpartition("/")[2]:
            return self.fail(400, "BadDigest")
        self.server.large[self.path.rpartition("/")[2]] = content
        self.send({})

    def answer(self, body=None):
        if self.server.token and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            return self.fail(401, "GatedRepo")
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if self.server.uploads and self.uploading(parts, body):
            return None
        api = parts[0] == "api"
        parts = parts[1:] if api else parts
        kind = parts[0] if parts[0] in ("models", "datasets") else "models"
        parts = parts[1:] if parts[0] in ("models", "datasets") else parts
        for length in (2, 1):  # a repo id is name or org/name
            folder = self.server.repos.get((kind, "/".join(parts[:length])))
            if folder:
                return self.repo(folder, "/".join(parts[:length]), parts[length:], api, body)
        self.fail(404, "RepoNotFound")

    def uploading(self, parts, body) -> bool:
        """Answers what a client asks while it uploads; False if it asks something else."""
        name = "/".join(parts[2:4])
        folder = self.server.uploads / name
        match parts:
            case ["api", "whoami-v2"]:
                self.send({"type": "user", "name": "org", "auth": {}} | self.server.me)
            case ["api", "repos", "create"]:
                name = f"{body.get('organization') or 'org'}/{body['name']}"
                (self.server.uploads / name).mkdir(parents=True, exist_ok=True)
                self.server.repos[("models", name)] = self.server.uploads / name
                self.server.private.setdefault(name, body.get("private"))
                self.send({"url": f"http://127.0.0.1/{name}", "name": name})
            case ["api", "validate-yaml"]:
                self.send({"errors": [], "warnings": []})
            case ["api", "models", _, _, "preupload", _]:
                large = (".safetensors", ".gguf")
                modes = [("lfs" if f["path"].endswith(large) else "regular", f["path"]) for f in body["files"]]
                answer = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for mode, path in modes]
                self.send({"files": answer})
            case [_, repo, "info", "lfs", "objects", "batch"] if repo.endswith(".git"):
                here = f"http://127.0.0.1:{self.server.server_address[1]}/large/"
                found = [o | {"actions": {"upload": {"href": here + o["oid"]}}} for o in body["objects"]]
                self.send({"transfer": "basic", "objects": found})
            case ["api", "models", _, _, "commit", _]:
                for entry in body:
                    value = entry["value"]
                    if entry["key"] == "deletedFile":
                        (folder / value["path"]).unlink()
                    if entry["key"] in ("file", "lfsFile"):
                        target = folder / value["path"]
                        target.parent.mkdir(parents=True, exist_ok=True)
                        is_large = entry["key"] == "lfsFile"
                        target.write_bytes(
                            self.server.large[value["oid"]] if is_large else base64.b64decode(value["content"])
                        )
                commit = commit_of(folder)
                self.send({"commitUrl": f"http://127.0.0.1/{name}/commit/{commit}", "commitOid": commit})
            case _:
                return False
        return True

    def repo(self, folder, repo_id, rest, api, body):
        commit, files = commit_of(folder), files_of(folder)
        if len(rest) >= 2 and rest[1] not in ("main", commit):
            return self.fail(404, "RevisionNotFound")
        listing = [{"type": "file", "path": n, "size": p.stat().st_size, "oid": blob_of(p)} for n, p in files.items()]
        if api and (not rest or rest[0] == "revision"):
            siblings = [{"rfilename": n} for n in files]
            return self.send({"id": repo_id, "sha": commit, "private": False, "tags": [], "siblings": siblings})
        if api and rest[0] == "tree":
            under = "/".join(rest[2:])
            return self.send([f for f in listing if f["path"].startswith(under)])
        if api and rest[0] == "paths-info":
            return self.send([f for f in listing if f["path"] in body["paths"]])
        if not api and len(rest) >= 3 and rest[0] == "resolve":
            name = "/".join(rest[2:])
            if name in files:
                return self.file(files[name], commit)
        self.fail(404, "EntryNotFound", {"X-Repo-Commit": commit})

    def file(self, path, commit):
        content, headers = path.read_bytes(), {"ETag": f'"{blob_of(path)}"', "X-Repo-Commit": commit}
        wanted = self.headers.get("Range", "")
        if not wanted.startswith("bytes="):
            return self.send(content, 200, headers)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        first, last = int(first), min(int(last or len(content)), len(content) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        self.send(content[first : last + 1], 206, headers)

    def fail(self, status, code, headers=None):
        self.send({"error": code}, status, {"X-Error-Code": code, "X-Error-Message": code, **(headers or {})})

    def send(self, content, status=200, headers=None):
        self.server.log.append((self.command, self.path, status))
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        self.server.sent.append((self.command, self.path, status, 0 if self.command == "HEAD" else len(body)))
        if self.command != "HEAD":
            self.wfile.write(body)
