"""Malformed HTTP that never reaches the ASGI application: the server refuses it in OpenAI's error format.

Serve runs uvicorn and decodes some headers before it calls the application (`X-Request-Id`, `X-Session-Id`): a header
that is not UTF-8 raises there, and the answer is a plain 500.

Invariant: a malformed request is answered 400 with an OpenAI error, and the connection ends.
"""

from __future__ import annotations

from uvicorn.protocols.http import auto
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serve_app.errors import BadRequest
from serve_app.http.error_responses import error_response


class StrictProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with refusals in OpenAI's format."""

    refused: BadRequest | None = None

    def on_header(self, name: bytes, value: bytes) -> None:
        """Raises UnicodeDecodeError, which leads to `send_400_response`, for a value that is not UTF-8."""
        if not value.isascii():
            try:
                value.decode()
            except UnicodeDecodeError:
                shown = name.decode("latin-1")
                self.refused = BadRequest(f"the header {shown} is not UTF-8", param=shown)
                raise
        super().on_header(name, value)

    def send_400_response(self, msg: str) -> None:
        """See uvicorn."""
        error = self.refused or BadRequest("this is not an HTTP request that can be read", code="invalid_http")
        _, headers, body = error_response(error)
        headers += [(b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        head = b"".join(b"%s: %s\r\n" % header for header in headers)
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n" + head + b"\r\n" + body)
        self.transport.close()


def install_strict_protocol() -> None:
    """Use `StrictProtocol` in servers that start in this process from now on, as Serve's in a router replica."""
    auto.AutoHTTPProtocol = StrictProtocol
