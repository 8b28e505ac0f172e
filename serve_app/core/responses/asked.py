"""What the body of a response asks of the store.

Invariant: a body that asks for nothing of the store is forwarded as it is, and needs no store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.core.responses.items import PREVIOUS, RESPONSE_ID, item_references
from serve_app.errors import BadRequest, NotFound

STORE = "store"
SHOWN_CHARS = 64  # of an unknown id, in the error
BACKGROUND = "background"
_OWN = frozenset((PREVIOUS, STORE, BACKGROUND))  # fields that are answered here and never forwarded


@dataclass(frozen=True, slots=True)
class Asked:
    """What a body asks for.

    Args:
        store: keep the answer.
        previous_id: of the response that this one continues.
        references: ids of stored items that stand in the input.
        background: make the answer without a client that waits.
    """

    store: bool = False
    previous_id: str | None = None
    references: tuple[str, ...] = ()
    background: bool = False

    @property
    def needs_store(self) -> bool:
        return self.store or self.previous_id is not None or bool(self.references)


def asked_of(body: Mapping[str, Any], *, by_default: bool) -> Asked:
    """What a body asks for. `by_default`: whether one that does not say so is stored.

    Raises:
        BadRequest: a field of a wrong type. NotFound: `previous_response_id` is no id of a response.
    """
    store = body.get(STORE, by_default)
    if type(store) is not bool:
        raise BadRequest(f"`{STORE}` must be true or false", param=STORE)
    background = body.get(BACKGROUND, False)
    if type(background) is not bool:
        raise BadRequest(f"`{BACKGROUND}` must be true or false", param=BACKGROUND)
    if background and body.get(STORE) is False:
        raise BadRequest(f"{BACKGROUND} can only be used when `{STORE}` is true", param=BACKGROUND)
    previous = body.get(PREVIOUS)
    if previous is not None and type(previous) is not str:
        raise BadRequest(f"`{PREVIOUS}` must be a string, the id of a response", param=PREVIOUS)
    if previous is not None and RESPONSE_ID.fullmatch(previous) is None:
        raise previous_not_found(previous)
    references = tuple(item_references(body.get("input")).values())
    return Asked(store or background, previous, references, background)


def forwarded(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body without the fields that are answered here."""
    return {name: value for name, value in body.items() if name not in _OWN}


def previous_not_found(response_id: str) -> NotFound:
    """OpenAI's words and code, by which clients know that they have to send the whole conversation."""
    shown = response_id[:SHOWN_CHARS]
    return NotFound(
        f"Previous response with id '{shown}' not found.", param=PREVIOUS, code="previous_response_not_found"
    )
