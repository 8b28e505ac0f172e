"""A Hugging Face hub on the loopback: what huggingface_hub 2.4 asks of the real one for models, and its refusals.

GET      /api/models/ID/auth-check                 may this token read the files?
GET      /api/models/ID[/revision/REV]             commit, names and sizes of the files; of a gated model for all
GET      /api/models/ID/tree/REV                   the files with their hashes
HEAD/GET /ID/resolve/REV/FILE                      a small file; of weights a redirect with their size and hash
GET      /weights/SHA256                           weights, whole or from a byte on
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote

from serve_app.engine.start.model_lookup import WEIGHT_FILES

TOKEN = "hf_member"  # may read all that is gated or private
OTHER_TOKEN = "hf_stranger"  # a valid one, of an account that has not been let in
MAIN = "main"
CHUNK_S = 0.05  # of a slowed download: the time between two chunks
API = re.compile(r"/api/models/(?P<id>[^/]+/[^/]+)(?:/(?P<what>auth-check|revision|tree)(?:/(?P<revision>[^/]+))?)?")
FILE = re.compile(r"/(?P<id>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")

Files = Mapping[str, bytes]
Headers = dict[str, str]


class Hub(AbstractContextManager["Hub"]):
    """Serves `repos` at `url` while the context is open; every attribute may be changed meanwhile.

    Attributes:
        url: for HF_ENDPOINT.
        repos: the files of each model, by id; `files_of` reads them from a folder.
        gated, private, broken: ids of models that need `token`, that are hidden without it, and that answer 503.
        token: of the account that may read all; `OTHER_TOKEN` is valid, too, and any other is refused.
        bytes_per_s: of each download of weights; None: as fast as it goes.
        requests: what was asked, method and path.
    """

    def __init__(
        self,
        repos: Mapping[str, Files],
        *,
        gated: Iterable[str] = (),
        private: Iterable[str] = (),
        broken: Iterable[str] = (),
        bytes_per_s: float | None = None,
    ) -> None:
        self.repos: dict[str, Files] = dict(repos)
        self.gated = set(gated)
        self.private = set(private)
        self.broken = set(broken)
        self.token = TOKEN
        self.bytes_per_s = bytes_per_s
        self.requests: list[tuple[str, str]] = []
        self.closed = threading.Event()
        self._server = _Server(self)
        port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{port}"
        self.storage = f"http://localhost:{port}"  # another host: the client follows redirects within the hub's own

    def __enter__(self) -> Hub:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closed.set()
        self._server.shutdown()
        self._server.server_close()

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """This process's environment for a client of the hub with its cache in `home`; without a token."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING_FACE_"))}
        here = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1,localhost"}
        return own | here | more

    def downloads(self) -> list[str]:
        """The files whose content was asked for, without those asked by HEAD; weights by their hash."""
        asked = [path for method, path in self.requests if method == "GET"]
        return [path for path in asked if FILE.fullmatch(path) or path.startswith("/weights/")]


def files_of(folder: Path) -> dict[str, bytes]:
    """The files of a folder, by their path in it."""
    return {
        file.relative_to(folder).as_posix(): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()
    }


def commit_of(files: Files) -> str:
    """The commit of a model with exactly these files."""
    return hashlib.sha1(
        "".join(f"{name} {_blob_id(body)}\n" for name, body in sorted(files.items())).encode()
    ).hexdigest()


def _blob_id(body: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


def _is_weights(name: str) -> bool:
    return any(Path(name).match(pattern) for pattern in WEIGHT_FILES)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        super().__init__(("127.0.0.1", 0), _Handler)


class _Refused(Exception):
    """An answer that is a refusal, with what the client tells its errors apart by."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        named = {"X-Error-Code": code} if code else {}
        self.status = status
        self.headers = {**named, "X-Error-Message": message}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub = self.server.hub
        path = unquote(self.path.partition("?")[0])
        hub.requests.append((self.command, path))
        try:
            if path.startswith("/weights/"):
                return self._send_weights(path.rpartition("/")[2])
            if found := API.fullmatch(path):
                files = self._files(found["id"], found["revision"] or MAIN, readable=found["what"] == "auth-check")
                about: Any = {} if found["what"] == "auth-check" else _about(found["id"], files)
                return self._send(200, _tree(files) if found["what"] == "tree" else about)
            if found := FILE.fullmatch(path):
                return self._send_file(self._files(found["id"], found["revision"], readable=True), found["file"])
            raise _Refused(404, "", "Sorry, we can't find the page you are looking for.")
        except _Refused as refused:
            self._send(refused.status, {"error": str(refused)}, refused.headers)

    def _files(self, name: str, revision: str, *, readable: bool) -> Files:
        """The files of a model, if the request's token may see it, and `readable`: read its files."""
        hub = self.server.hub
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in ("", hub.token, OTHER_TOKEN):
            raise _Refused(401, "", "Invalid credentials in Authorization header")
        if name in hub.broken:
            raise _Refused(503, "", "under repair")
        member = token == hub.token
        if name not in hub.repos or (name in hub.private and not member):
            raise _Refused(404 if token else 401, "RepoNotFound", "Repository not found")
        if readable and name in hub.gated and not member:
            raise _Refused(403 if token else 401, "GatedRepo", f"Access to model {name} is restricted.")
        if revision not in (MAIN, commit_of(hub.repos[name])):
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return hub.repos[name]

    def _send_file(self, files: Files, name: str) -> None:
        if name not in files:
            raise _Refused(404, "EntryNotFound", "Entry not found")
        body = files[name]
        commit = {"X-Repo-Commit": commit_of(files)}
        if _is_weights(name):
            sha256 = hashlib.sha256(body).hexdigest()
            linked = {"X-Linked-Size": str(len(body)), "X-Linked-ETag": f'"{sha256}"'}
            self._send(302, b"", commit | linked | {"Location": f"{self.server.hub.storage}/weights/{sha256}"})
        else:
            self._send(200, body, commit | {"ETag": f'"{_blob_id(body)}"'})

    def _send_weights(self, sha256: str) -> None:
        bodies = [body for files in self.server.hub.repos.values() for name, body in files.items() if _is_weights(name)]
        body = next((one for one in bodies if hashlib.sha256(one).hexdigest() == sha256), None)
        if body is None:
            raise _Refused(404, "", "Access denied")
        begin = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = 0 if begin is None else int(begin[1])
        part = {} if begin is None else {"Content-Range": f"bytes {first}-{len(body) - 1}/{len(body)}"}
        self._send(206 if part else 200, body[first:], part)

    def _send(self, status: int, body: Any, headers: Headers | None = None) -> None:
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
            headers = {"Content-Type": "application/json", **(headers or {})}
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self._write(body)

    def _write(self, body: bytes) -> None:
        """Write the body; weights at the hub's rate, until the hub is closed."""
        hub = self.server.hub
        if hub.bytes_per_s is None or not self.path.startswith("/weights/"):
            self.wfile.write(body)
            return
        at = 0
        while at < len(body) and not hub.closed.wait(CHUNK_S):
            size = len(body) if hub.bytes_per_s is None else max(1, int(hub.bytes_per_s * CHUNK_S))
            self.wfile.write(body[at : at + size])
            at += size

    def log_message(self, format: str, *args: object) -> None:
        """Nothing into the test's output."""


def _about(name: str, files: Files) -> dict[str, Any]:
    siblings = [{"rfilename": file, "size": len(body), "blobId": _blob_id(body)} for file, body in files.items()]
    return {"id": name, "sha": commit_of(files), "siblings": siblings, "tags": [], "downloads": 0}


def _tree(files: Files) -> list[dict[str, Any]]:
    entries = []
    for name, body in files.items():
        entry: dict[str, Any] = {"type": "file", "path": name, "size": len(body), "oid": _blob_id(body)}
        if _is_weights(name):
            entry["lfs"] = {"oid": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 134}
        entries.append(entry)
    return entries
