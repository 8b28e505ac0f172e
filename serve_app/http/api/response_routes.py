"""OpenAI's routes of stored responses.

    GET    /v1/responses/{id}               the response, as it was answered
    DELETE /v1/responses/{id}               it is gone, and what continues it cannot be continued
    GET    /v1/responses/{id}?stream=true   of one made with `background`: its events behind `starting_after`
    POST   /v1/responses/{id}/cancel        one made with `background` ends
    GET    /v1/responses/{id}/input_items   the items of its own input: limit, order, after

Invariant: another tenant's response is answered like an unknown one, to a key with `admin` too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec

from serve_app.core.responses import RESPONSE_ID, StoredResponse
from serve_app.errors import BadRequest, NotFound
from serve_app.http.api.batch_lane import page
from serve_app.http.api.routes import SHOWN_ID_CHARS, HttpRoute, ResponseCall
from serve_app.http.error_responses import JSON, Answer
from serve_app.http.fields import query_number, query_words
from serve_app.http.response import HttpExchange
from serve_app.http.responses import follow
from serve_app.store import Store
from serve_app.types import Identity, Operation

# items; OpenAI's
DEFAULT_PAGE = 20
MAX_PAGE = 100
MAX_DIGITS = 9  # of the number of an event
_IGNORED = ("include", "include[]", "include_obfuscation")  # what they ask for more is in every answer, or in none here
_GET_PARAMETERS = (*_IGNORED, "stream", "starting_after")
_ITEM_PARAMETERS = (*_IGNORED, "limit", "order", "after")


class ResponseRoutes:
    """Answers the routes.

    Args:
        get_store: the store that holds now.
    """

    def __init__(self, get_store: Callable[[], Store]) -> None:
        self._get_store = get_store

    async def answer(self, route: HttpRoute, identity: Identity, query: bytes) -> Answer:
        """The complete answer.

        Raises:
            BadRequest: a wrong parameter, see `param`; or the response cannot be cancelled or streamed again. NotFound:
            no such response of the tenant. StoreAway.
        """
        response_id = route.argument
        if RESPONSE_ID.fullmatch(response_id) is None:
            raise _not_found(response_id)
        if route.target is ResponseCall.DELETE:
            if not await self._get_store().responses.delete(response_id, identity.tenant):
                raise _not_found(response_id)
            return _answered({"id": response_id, "object": "response", "deleted": True})
        words = query_words(query, _ITEM_PARAMETERS if route.target is ResponseCall.ITEMS else _GET_PARAMETERS)
        found = await self._find(response_id, identity)
        if route.target is ResponseCall.ITEMS:
            return _items(found, words)
        if route.target is ResponseCall.CANCEL:
            if not found.shown().get("background"):
                raise BadRequest("Cannot cancel a synchronous response.")
            await self._get_store().background.cancel(response_id, identity.tenant)
            found = await self._find(response_id, identity)
        return _answered(found.shown())

    async def has_streamed(self, response_id: str, identity: Identity, query: bytes, exchange: HttpExchange) -> bool:
        """Send the events of a response; False: none are asked for. Raises as `answer`."""
        words = query_words(query, _GET_PARAMETERS)
        asked = words.get("stream", "false").lower()
        if asked not in ("true", "false"):
            raise BadRequest("`stream` must be true or false", param="stream")
        if asked == "false":
            return False
        after = words.get("starting_after", "-1")
        if after != "-1" and not (after.isascii() and after.isdigit() and len(after) <= MAX_DIGITS):
            raise BadRequest("`starting_after` must be the number of an event", param="starting_after")
        if RESPONSE_ID.fullmatch(response_id) is None:
            raise _not_found(response_id)
        exchange.operation = Operation.RESPONSES  # an error has the form of its events
        try:
            await follow(self._get_store().background, response_id, identity.tenant, int(after), exchange)
        except KeyError:
            await self._find(response_id, identity)
            raise BadRequest(
                "`stream`: a response that was not made with `background` is sent once", param="stream"
            ) from None
        return True

    async def _find(self, response_id: str, identity: Identity) -> StoredResponse:
        try:
            return await self._get_store().responses.response(response_id, identity.tenant)
        except KeyError:
            raise _not_found(response_id) from None


def _items(found: StoredResponse, words: dict[str, str]) -> Answer:
    """A page of the items of its input; the last one first, unless asked otherwise."""
    order = words.get("order", "desc")
    if order not in ("asc", "desc"):
        raise BadRequest("`order` must be asc or desc", param="order")
    limit = query_number(words, "limit", DEFAULT_PAGE, MAX_PAGE)
    items = [item for item in found.items if not item.is_output]
    if order == "desc":
        items.reverse()
    if (after := words.get("after")) is not None:
        places = [place for place, item in enumerate(items) if item.item_id == after]
        if not places:
            raise BadRequest("`after` must be the id of the last item of the page before", param="after")
        items = items[places[0] + 1 :]
    return page([json.loads(item.text) for item in items[: limit + 1]], limit)


def _answered(body: dict[str, Any]) -> Answer:
    return 200, JSON, msgspec.json.encode(body)


def _not_found(response_id: str) -> NotFound:
    return NotFound(f"Response with id '{response_id[:SHOWN_ID_CHARS]}' not found.", code="response_not_found")
