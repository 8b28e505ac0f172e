"""The messages of an answer on their way to the client: whole, or a stream whose end waits for `finish`.

Invariant: an answer that is no response (an error) passes, and names places in the body that the client sent.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from serve_app.core.responses import FAILED, SentStream, own_path, with_fields
from serve_app.http.response import Send

_STREAM = b"text/event-stream"
_LENGTH = b"content-length"


class SentAnswer:
    """One answer.

    Args:
        fields: set in every response object.
        stored: items before those that the client sent, see `own_path`.
        first, log: as for `SentStream`.
    """

    def __init__(
        self, fields: Mapping[str, Any], stored: int = 0, first: int = 0, log: list[bytes] | None = None
    ) -> None:
        self._fields = fields
        self._stored = stored
        self._first = first
        self._log = log
        self.stream: SentStream | None = None
        self._start: MutableMapping[str, Any] | None = None  # of a whole answer, until its length is known
        self._body = b""
        self._has_ended = False

    def over(self, send: Send) -> Send:
        """Where to send its messages instead."""
        self._send = send
        return self._take

    def response(self) -> dict[str, Any] | None:
        """The response that the answer has; None: it is an error."""
        if self.stream is not None:
            return self.stream.final or self.stream.left(FAILED)
        if self._start is None:
            return None
        if self._start["status"] != 200:
            self._body = own_path(self._body.decode(), self._stored).encode()
            return None
        self._body, response = with_fields(self._body, self._fields)
        return response

    def left(self, status: str, error: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """The response as far as the client has it, which ends with this status; None: it has nothing of one."""
        return None if self.stream is None else self.stream.left(status, error)

    def change_end(self, fields: Mapping[str, Any]) -> None:
        """Set these fields in its response, which has ended and is held back."""
        if self.stream is None:
            self._body, _ = with_fields(self._body, fields)
        elif self.stream.final is not None:
            self.stream.change_end(fields)

    async def finish(self) -> None:
        """Send what was held back."""
        if self.stream is not None and self._has_ended:
            held = self.stream.held if self._log is None else b""
            await self._send({"type": "http.response.body", "body": held, "more_body": False})
        elif self._start is not None:
            headers = [one for one in self._start["headers"] if one[0] != _LENGTH]
            headers.append((_LENGTH, b"%d" % len(self._body)))
            await self._send({**self._start, "headers": headers})
            await self._send({"type": "http.response.body", "body": self._body, "more_body": False})

    async def _take(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            if any(value.startswith(_STREAM) for name, value in message["headers"] if name == b"content-type"):
                self.stream = SentStream(self._fields, self._first, self._log)
                await self._send(message)
            else:
                self._start = message
        elif self.stream is not None:
            self._has_ended = not message.get("more_body", False)
            passed = self.stream.feed(message["body"])
            if passed and self._log is None:  # else a worker asks, and the events are in the store
                await self._send({"type": "http.response.body", "body": passed, "more_body": True})
        else:
            self._body += message["body"]
