"""An endpoint on loopback that speaks OpenAI's Files and Batches, as far as a client sees them.

A batch passes through the states that the test gives, one for each time that it is asked for.
"""

from __future__ import annotations

import email
import json
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

CREATED_AT = 1_764_100_000  # 2025-11-25 19:46:40 UTC
DAY_S = 86_400


@dataclass
class BatchEndpoint:
    """What the endpoint has and what it was asked. `key`: the only one that it accepts."""

    key: str
    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    batches: dict[str, dict[str, Any]] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)  # what changes of a batch with each look at it
    asked: list[str] = field(default_factory=list)  # method and path
    refusals: dict[str, list[tuple[int, str] | None]] = field(default_factory=dict)  # by method and path, one a call
    cut_after: int | None = None  # bytes of a file's content, after which the connection ends

    def add(self, number: int, **fields: Any) -> str:
        """One more batch, newer than those before."""
        batch_id = f"batch_{number:032x}"
        self.batches[batch_id] = {
            "id": batch_id,
            "object": "batch",
            "endpoint": "/v1/chat/completions",
            "status": "validating",
            "input_file_id": f"file-{number:032x}",
            "created_at": CREATED_AT + number,
            "expires_at": CREATED_AT + number + DAY_S,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
        } | fields
        return batch_id

    def answer(self, method: str, target: str, headers: Any, body: bytes) -> tuple[int, bytes]:
        path = unquote(urlsplit(target).path)
        query = {name: values[0] for name, values in parse_qs(urlsplit(target).query).items()}
        self.asked.append(f"{method} {path}")
        if headers["Authorization"] != f"Bearer {self.key}":
            return _error(401, "no such key")
        waiting = self.refusals.get(f"{method} {path}")
        if waiting and (refusal := waiting.pop(0)) is not None:
            return _error(*refusal)
        match [method, *path.strip("/").split("/")[1:]]:
            case ["POST", "files"]:
                return self._upload(headers["Content-Type"], body)
            case ["DELETE", "files", file_id] if file_id in self.files:
                del self.files[file_id]
                return _object({"id": file_id, "deleted": True})
            case ["GET", "files", file_id, "content"] if file_id in self.files:
                return 200, self.files[file_id]
            case ["POST", "batches"]:
                return self._create(json.loads(body))
            case ["GET", "batches"]:
                return self._list(query)
            case ["GET", "batches", batch_id] if batch_id in self.batches:
                if self.steps:
                    self.batches[batch_id] |= self.steps.pop(0)
                return _object(self.batches[batch_id])
            case ["POST", "batches", batch_id, "cancel"] if batch_id in self.batches:
                self.batches[batch_id]["status"] = "cancelling"
                return _object(self.batches[batch_id])
        return _error(404, f"there is no {path}")

    def _upload(self, content_type: str, body: bytes) -> tuple[int, bytes]:
        form = email.message_from_bytes(b"Content-Type: " + content_type.encode() + b"\r\n\r\n" + body)
        parts = {part.get_param("name", header="content-disposition"): part for part in form.get_payload()}  # type: ignore[union-attr]
        assert parts["purpose"].get_payload() == "batch"  # type: ignore[union-attr]
        file_id = f"file-{len(self.names):032x}"
        self.files[file_id] = parts["file"].get_payload(decode=True)  # type: ignore[union-attr, assignment]
        (name,) = re.findall(rb'filename="([^"]*)"', body)  # `email` takes it for ASCII
        self.names[file_id] = name.decode()
        return _object({"id": file_id, "object": "file", "bytes": len(self.files[file_id])})

    def _create(self, asked: dict[str, Any]) -> tuple[int, bytes]:
        batch_id = self.add(len(self.batches) + 1, **asked)
        return _object(self.batches[batch_id])

    def _list(self, query: dict[str, str]) -> tuple[int, bytes]:
        newest = list(reversed(self.batches))
        first = newest.index(query["after"]) + 1 if "after" in query else 0
        shown = newest[first : first + int(query["limit"])]
        more = first + len(shown) < len(newest)
        return _object({"object": "list", "data": [self.batches[one] for one in shown], "has_more": more})


def _object(found: dict[str, Any]) -> tuple[int, bytes]:
    return 200, json.dumps(found).encode()


def _error(status: int, message: str) -> tuple[int, bytes]:
    return status, json.dumps({"error": {"message": message}}).encode()


@contextmanager
def batch_endpoint(key: str, steps: Sequence[dict[str, Any]] = ()) -> Iterator[BatchEndpoint]:
    """Runs one for as long as the block."""
    endpoint = BatchEndpoint(key, steps=list(steps))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            status, answer = endpoint.answer(self.command, self.path, self.headers, body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            cut = endpoint.cut_after if self.path.endswith("/content") else None
            self.wfile.write(answer[:cut])

        do_POST = do_DELETE = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Nothing into the test's output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    endpoint.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
