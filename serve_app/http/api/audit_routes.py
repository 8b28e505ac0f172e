"""GET /admin/audit: the audit record, for keys with `admin`.

    ?since=2026-11-01T00:00:00Z     entries from then on; by default all
    &limit=100                      so many, 1,000 at most
    &cursor=...                     those behind the last page: its `next_cursor`

Entries come in the order in which they became visible, so a collector that keeps the last cursor misses none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from serve_app.http.api.local_routes import not_an_operator
from serve_app.http.error_responses import JSON, Answer
from serve_app.http.fields import query_number, query_words, time_of
from serve_app.http.keys import utc
from serve_app.store import AuditEntry, Author, Store
from serve_app.types import Identity

PARAMETERS = "since", "limit", "cursor"
DEFAULT_ENTRIES = 100
MAX_ENTRIES = 1000  # of a page: half a megabyte
MAX_NUMBER = 2**62  # of an entry


class AuditRoutes:
    """Answers the route.

    Args:
        store: that holds now.
    """

    def __init__(self, store: Callable[[], Store]) -> None:
        self._store = store

    async def answer(self, identity: Identity, query: bytes) -> Answer:
        """The complete answer.

        Raises:
            Forbidden: not an operator's key. BadRequest: a wrong parameter, see `param`. StoreAway.
        """
        if not identity.admin:
            raise not_an_operator()
        words = query_words(query, PARAMETERS)
        limit = query_number(words, "limit", DEFAULT_ENTRIES, MAX_ENTRIES)
        after = query_number(words, "cursor", 0, MAX_NUMBER)
        since = time_of(words["since"], "since") if "since" in words else 0.0
        found = await self._store().audit(since, after, limit + 1)
        page = found[:limit]
        next_cursor = str(page[-1].number) if page else words.get("cursor")
        answer = {
            "object": "list",
            "data": [shown_entry(entry) for entry in page],
            "has_more": len(found) > limit,
            "next_cursor": next_cursor,
        }
        return 200, JSON, msgspec.json.encode(answer)


def author_of(identity: Identity) -> Author:
    """The author of what this key changes."""
    return Author(identity.key_id, identity.tenant)


def shown_entry(entry: AuditEntry) -> dict[str, Any]:
    """An entry as JSON values."""
    return {
        "id": str(entry.number),
        "time": utc(entry.at),
        "author": entry.author.key_id,
        "tenant": entry.author.tenant or None,
        "action": entry.action,
        "target": entry.target,
        "digest_before": entry.digest_before,
        "digest_after": entry.digest_after,
        "details": dict(entry.details),
    }
