"""Pictures in requests, and a server on loopback that has one."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import struct
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ASKED = "What is in this picture of the river?"
PICTURE_PATH = "/picture.png"
MOVED_PATH = "/moved.png"


def picture(seed: int = 0, width: int = 64, height: int = 64) -> bytes:
    """A PNG of noise, the same on every machine."""
    noise = hashlib.shake_256(f"picture {seed}".encode()).digest(3 * width * height)
    rows = b"".join(b"\0" + noise[at : at + 3 * width] for at in range(0, len(noise), 3 * width))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def chat_messages(url: str) -> dict[str, Any]:
    """The messages of a chat with one picture."""
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": ASKED}]
    return {"messages": [{"role": "user", "content": parts}]}


def anthropic_messages(data: bytes) -> dict[str, Any]:
    """The same for Anthropic's API."""
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    parts = [{"type": "image", "source": source}, {"type": "text", "text": ASKED}]
    return {"messages": [{"role": "user", "content": parts}]}


def response_input(url: str) -> dict[str, Any]:
    """The same for the Responses API."""
    parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": ASKED}]
    return {"input": [{"role": "user", "content": parts}]}


@dataclass(slots=True)
class PictureServer:
    """A server with a picture at `PICTURE_PATH`; `MOVED_PATH` redirects there. `asked`: the paths, in order."""

    address: str
    port: int = 0
    asked: list[str] = field(default_factory=list)

    def url(self, host: str = "", path: str = PICTURE_PATH) -> str:
        return f"http://{host or self.address}:{self.port}{path}"


@contextlib.contextmanager
def serving(address: str, data: bytes) -> Iterator[PictureServer]:
    """Serve a picture at this address, at a port of its own."""
    known = PictureServer(address)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known.asked.append(self.path)
            is_moved = self.path == MOVED_PATH
            self.send_response(302 if is_moved else 200)
            if is_moved:
                self.send_header("Location", known.url())
            self.send_header("Content-Length", "0" if is_moved else str(len(data)))
            self.end_headers()
            if not is_moved:
                self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing on the test's output."""

    server = ThreadingHTTPServer((address, 0), Handler)
    known.port = server.server_port
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield known
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
