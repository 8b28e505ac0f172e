"""The answer of a response on its way to the client: the store's fields are set in it, and its end waits until it is
stored.

Invariant: what is stored is what the client is sent; an answer that could not be stored says so at its end. Events
without a response object pass byte for byte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from serve_app.core.responses.records import as_json

_BEGINNINGS = (b"event: response.created\n", b"event: response.in_progress\n", b"event: response.queued\n")
_ENDS = (b"event: response.completed\n", b"event: response.incomplete\n", b"event: response.failed\n")
_ITEM_ADDED = b"event: response.output_item.added\n"
_ITEM_DONE = b"event: response.output_item.done\n"
_TEXT_DELTA = b"event: response.output_text.delta\n"
_BETWEEN = b"\n\n"
_EVENT = b"event: response."
_NUMBER = re.compile(rb'"sequence_number": ?\d+')
_DATA = "data: "
_INCOMPLETE = "incomplete"


def with_fields(body: bytes, fields: Mapping[str, Any]) -> tuple[bytes, dict[str, Any]]:
    """A whole answer with these fields set, as bytes and as an object."""
    response: dict[str, Any] = {**json.loads(body), **fields}
    return as_json(response).encode(), response


class SentStream:
    """The events of one stream.

    Args:
        fields: set in every response object.
        first: number of its first event; above 0 where others have been sent before.
        log: gets every event of the API as it is sent, the end too.
    """

    def __init__(self, fields: Mapping[str, Any], first: int = 0, log: list[bytes] | None = None) -> None:
        self._fields = fields
        self._log = log
        self._first = first
        self.next_number = first  # of the event that comes next
        self._rest = b""  # of an event whose end has not come
        self.begun: dict[str, Any] | None = None  # the response object of the last event with one
        self._items: list[dict[str, Any]] = []  # that have ended
        self._open: list[bytes] = []  # events of the item that is being written
        self.final: dict[str, Any] | None = None  # the response, once its end has come
        self.held = b""  # events from that on

    def feed(self, body: bytes) -> bytes:
        """Take what the engine sends next; returns what the client may have now."""
        *events, self._rest = (self._rest + body).split(_BETWEEN)
        passed = b""
        for event in events:
            sent = self._taken(event) + _BETWEEN
            if sent.startswith(_EVENT):
                if self._first:
                    sent = _NUMBER.sub(b'"sequence_number":%d' % self.next_number, sent, count=1)
                self.next_number += 1
                if self._log is not None:
                    self._log.append(sent)
            if self.final is None:
                passed += sent
            else:
                self.held += sent
        return passed

    def change_end(self, fields: Mapping[str, Any]) -> None:
        """Set these fields in the response at its end, which the client does not have yet."""
        event, between, rest = self.held.partition(_BETWEEN)
        self._fields = {**self._fields, **fields}
        event, self.final = self._with_fields(event)
        self.held = event + between + rest

    def left(self, status: str, error: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """The response as far as it was sent, which ends with this status; None: nothing of it was."""
        if self.begun is None:
            return None
        output = [*self._items, *self._partial()]
        ended = {"status": status, "error": error, "output": output, "incomplete_details": None}
        return {**self.begun, **ended}

    def _taken(self, event: bytes) -> bytes:
        if event.startswith(_BEGINNINGS):
            event, self.begun = self._with_fields(event)
        elif event.startswith(_ENDS):
            event, self.final = self._with_fields(event)
        elif event.startswith(_ITEM_DONE):
            self._items.append(_data(event)["item"])
            self._open = []
        elif event.startswith(_ITEM_ADDED) or (self._open and event.startswith(_TEXT_DELTA)):
            self._open.append(event)
        return event

    def _with_fields(self, event: bytes) -> tuple[bytes, dict[str, Any]]:
        """The event with the fields set in its response, and that response."""
        name, _, _ = event.partition(b"\n")
        data = _data(event)
        data["response"] = {**data["response"], **self._fields}
        return name + b"\ndata: " + as_json(data).encode(), data["response"]

    def _partial(self) -> list[dict[str, Any]]:
        """The message that is being written. A call of a tool whose arguments are cut could not be sent back."""
        if not self._open:
            return []
        item = _data(self._open[0])["item"]
        text = "".join(_data(event)["delta"] for event in self._open[1:])
        if item.get("type") != "message" or not text:
            return []
        part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": [], "logprobs": None}
        return [{**item, "status": _INCOMPLETE, "content": [part]}]


def _data(event: bytes) -> dict[str, Any]:
    """The JSON of an event."""
    found: dict[str, Any] = json.loads(event.decode().partition(_DATA)[2])
    return found


def events_after(piece: str, first: int, after: int) -> str:
    """The events of a piece that begins with number `first`, those behind number `after`."""
    if first > after:
        return piece
    between = _BETWEEN.decode()
    return between.join(piece.split(between)[after + 1 - first :])


def response_event(kind: str, number: int, response: Mapping[str, Any]) -> str:
    """An event with a response object that no engine sends."""
    event = {"type": f"response.{kind}", "sequence_number": number, "response": dict(response)}
    return f"event: response.{kind}\ndata: {as_json(event)}\n\n"
