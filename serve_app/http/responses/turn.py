"""One turn of a conversation: its body with all turns before it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from serve_app.core.responses import Asked, Chain, MissingItem, expanded, forwarded, own_items, own_path
from serve_app.errors import BadRequest, NotFound
from serve_app.http.body import check_count
from serve_app.settings import HttpSettings

ID_BYTES = 16
SHOWN_ID_CHARS = 64  # of an unknown id, in the error


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn.

    Args:
        body: with the whole conversation as its input.
        own: the items of its own input.
        size: bytes of what was sent and of the turns before.
        sent: the body as it was sent.
        response_id: of the response that this is the background run of; empty: it is none.
        stored: items before its own.
    """

    asked: Asked
    tenant: str
    body: dict[str, Any]
    own: list[Any]
    size: int
    sent: Mapping[str, Any]
    response_id: str = ""
    stored: int = 0

    @property
    def fields(self) -> dict[str, Any]:
        """Those of the response object that an engine does not know."""
        found: dict[str, Any] = {"store": self.asked.store, "previous_response_id": self.asked.previous_id}
        return {**found, "id": self.response_id, "background": True} if self.response_id else found


def turn_of(turn: Turn, chain: Chain, bounds: HttpSettings) -> Turn:
    """The turn with what was read for it. Raises BadRequest: too many values; NotFound: an item is not there."""
    referred = [chain.references[one] for one in turn.asked.references if one in chain.references]  # each time it comes
    check_count(",".join((*chain.items, *referred)).encode(), bounds.max_json_values)
    stored = {item_id: msgspec.json.decode(text) for item_id, text in chain.references.items()}
    try:
        own = own_items(turn.sent.get("input"), stored)
    except MissingItem as error:
        shown = error.item_id[:SHOWN_ID_CHARS]
        raise NotFound(f"Item with id '{shown}' not found.", param=error.path, code="item_not_found") from None
    body = forwarded(turn.sent)
    if turn.asked.previous_id is not None or turn.asked.references:
        body = expanded(body, [msgspec.json.decode(text) for text in chain.items], own)
    return replace(turn, body=body, own=own, stored=len(chain.items))


@contextlib.contextmanager
def own_paths(turn: Turn | None) -> Iterator[None]:
    """An error of the block names the place in the body that was sent, and not in the whole conversation."""
    try:
        yield
    except BadRequest as error:
        if turn is not None and turn.stored:
            error.message = own_path(error.message, turn.stored)
            error.param = None if error.param is None else own_path(error.param, turn.stored)
        raise


def new_id(prefix: str) -> str:
    """Of an item or a response."""
    return f"{prefix}_{secrets.token_hex(ID_BYTES)}"
