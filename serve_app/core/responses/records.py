"""Records of responses, and the order in which a tenant's are removed.

Invariant: a record has its whole turn: its own input items, then its output items. The bytes of a record are those of
its texts and `ENTRY_BYTES`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from serve_app.core.responses.items import with_id

ENTRY_BYTES = 512  # of a record besides its texts: ids, times, indexes
CANCELLED = "cancelled"
FAILED = "failed"
QUEUED = "queued"
MISSED_DEADLINE = {"code": "deadline", "message": "The response cannot start before its deadline."}  # its error


@dataclass(frozen=True, slots=True)
class StoredItem:
    """One item, as JSON. `is_output`: the model's, else the client's."""

    item_id: str
    is_output: bool
    text: str


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One turn. Times are seconds since 1970 UTC.

    Args:
        previous_id: the response that it continues.
        text: OpenAI's response object without its output, as JSON.
        items: of the input, then of the output.
    """

    response_id: str
    tenant: str
    previous_id: str | None
    created_at: float
    expires_at: float
    text: str
    items: tuple[StoredItem, ...]

    @property
    def size(self) -> int:
        """Bytes that count for the tenant."""
        texts = [self.text, *(item.text for item in self.items)]
        return ENTRY_BYTES + sum(len(text.encode()) for text in texts)

    def shown(self) -> dict[str, Any]:
        """OpenAI's response object."""
        output = [json.loads(item.text) for item in self.items if item.is_output]
        return {**json.loads(self.text), "output": output}


@dataclass(frozen=True, slots=True)
class BackgroundJob:
    """A response that is made in the background.

    Args:
        request: the body that makes it.
        session_id: the header of its client.
        attempts: that have failed.
        deadline_at: it starts before that, in seconds since 1970 UTC, or fails.
    """

    response_id: str
    tenant: str
    key_id: str
    request: Mapping[str, Any]
    session_id: str | None = None
    attempts: int = 0
    deadline_at: float | None = None


class EventPiece(NamedTuple):
    """Some events of a stream: the numbers of the first and the last one, and what is sent."""

    first: int
    last: int
    body: str


class EventPage(NamedTuple):
    """Events in order. `is_over`: no more will come after these."""

    pieces: list[EventPiece]
    is_over: bool


@dataclass(frozen=True, slots=True)
class Chain:
    """The turns that a new one continues.

    Args:
        ids: of the responses, the oldest first.
        items: their items as JSON, in order.
        references: stored items as JSON, by id.
        size: bytes of the items, and of the references as often as they are asked for; if it is too large: more than
            were asked for, as far as that was read.
        missing: the id of a response that is not stored (any more), is another tenant's, or came in the chain already
            and so is not the one that was continued; None: the chain is whole.
        is_running: the last of them has not ended.
        is_too_large: it has more bytes than were asked for, or too many turns, and no items here.
    """

    ids: tuple[str, ...] = ()
    items: tuple[str, ...] = ()
    references: Mapping[str, str] = field(default_factory=dict)
    size: int = 0
    missing: str | None = None
    is_too_large: bool = False
    is_running: bool = False


def record_of(
    response: Mapping[str, Any],
    inputs: Iterable[Mapping[str, Any]],
    *,
    tenant: str,
    now: float,
    keep_s: float,
    new_id: Callable[[str], str],
) -> StoredResponse:
    """The record of a response object as it was sent, with the items of its input."""
    outputs = [with_id(item, new_id) for item in response.get("output") or ()]
    items = [
        StoredItem(str(item["id"]), is_output, as_json(item))
        for is_output, some in ((False, inputs), (True, outputs))
        for item in some
    ]
    rest = {name: value for name, value in response.items() if name != "output"}
    return StoredResponse(
        response_id=str(response["id"]),
        tenant=tenant,
        previous_id=response.get("previous_response_id"),
        created_at=now,
        expires_at=now + keep_s,
        text=as_json(rest),
        items=tuple(items),
    )


def queued_response(
    response_id: str, model: str, body: Mapping[str, Any], fields: Mapping[str, Any], now: float
) -> dict[str, Any]:
    """OpenAI's object of a response that waits for its run. `body`: of the request; `fields`: the store's own."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(now),
        "model": model,
        "status": QUEUED,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata"),
        "output": [],
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "temperature": body.get("temperature"),
        "text": body.get("text"),
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools", []),
        "top_p": body.get("top_p"),
        "truncation": body.get("truncation", "disabled"),
        "usage": None,
        **fields,
    }


def ended(response: Mapping[str, Any], status: str, error: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The same response, which ends with this status."""
    return {**response, "status": status, "error": error, "incomplete_details": None}


def evicted(sizes: Iterable[tuple[str, int]], excess: int) -> list[str]:
    """Which records go so that `excess` bytes go with them, or all, by id. `sizes`: the first to go first."""
    gone: list[str] = []
    for name, size in sizes:
        if excess <= 0:
            break
        gone.append(name)
        excess -= size
    return gone


def as_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
