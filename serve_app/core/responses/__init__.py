"""Responses that are kept: which turns a conversation has, and what is stored of an answer.

Decides: what a body asks of the store, the whole input of a turn, the ids of items, what an answer that was sent or
left is as a record, and which records of a tenant go first.
In: bodies, stored items, the bytes of answers. Out: expanded bodies, records, bytes with the store's fields.
Never: reads a clock or a store.
"""

from serve_app.core.responses.asked import Asked, asked_of, forwarded, previous_not_found
from serve_app.core.responses.items import (
    ITEM_ID,
    RESPONSE_ID,
    MissingItem,
    expanded,
    input_items,
    own_items,
    own_path,
)
from serve_app.core.responses.records import (
    CANCELLED,
    FAILED,
    MISSED_DEADLINE,
    BackgroundJob,
    Chain,
    EventPage,
    EventPiece,
    StoredItem,
    StoredResponse,
    as_json,
    ended,
    evicted,
    queued_response,
    record_of,
)
from serve_app.core.responses.sent import SentStream, events_after, response_event, with_fields

__all__ = [
    "CANCELLED",
    "FAILED",
    "ITEM_ID",
    "MISSED_DEADLINE",
    "RESPONSE_ID",
    "Asked",
    "BackgroundJob",
    "Chain",
    "EventPage",
    "EventPiece",
    "MissingItem",
    "SentStream",
    "StoredItem",
    "StoredResponse",
    "as_json",
    "asked_of",
    "ended",
    "events_after",
    "evicted",
    "expanded",
    "forwarded",
    "input_items",
    "own_items",
    "own_path",
    "previous_not_found",
    "queued_response",
    "record_of",
    "response_event",
    "with_fields",
]
