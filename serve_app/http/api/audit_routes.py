"""GET /admin/audit: the audit record, for keys with `admin`; and the end of its old entries.

    ?since=2026-11-01T00:00:00Z     entries from then on; by default all
    &limit=100                      so many, 1,000 at most
    &cursor=...                     those behind the last page: its `next_cursor`

Entries come in the order in which they became visible, so a collector that keeps the last cursor misses none.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from serve_app.errors import StoreAway
from serve_app.http.api.local_routes import not_an_operator
from serve_app.http.error_responses import JSON, Answer
from serve_app.http.fields import query_number, query_words, time_of
from serve_app.http.keys import utc
from serve_app.settings import Settings
from serve_app.store import AuditEntry, Author, Store
from serve_app.types import Identity

logger = logging.getLogger("ray.serve")

PARAMETERS = "since", "limit", "cursor"
DEFAULT_ENTRIES = 100
MAX_ENTRIES = 1000  # of a page: half a megabyte
MAX_NUMBER = 2**62  # of an entry
SWEEP_S = 3600.0  # entries are kept for days: an hour more or less is no matter
SWEEP_ENTRIES = 10_000  # at once: a transaction of milliseconds
DAY_S = 86_400.0


class AuditRoutes:
    """Answers the route, and removes entries that are older than `store.audit_days`.

    Args:
        store, settings: those that hold now.
        now: seconds since 1970 UTC.
    """

    def __init__(
        self, store: Callable[[], Store], settings: Callable[[], Settings], now: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._settings = settings
        self._now = now

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

    async def sweep(self) -> int:
        """Remove the old entries. Returns how many. Raises StoreAway."""
        before = self._now() - self._settings().store.audit_days * DAY_S
        count = 0
        while (removed := await self._store().forget_audit(before, SWEEP_ENTRIES)) > 0:
            count += removed
        return count

    async def keep_swept(self) -> None:
        """Remove old entries from time to time, until cancelled."""
        while True:
            try:
                await self.sweep()
            except StoreAway as error:
                logger.info("Store keeps old entries of the audit record for another hour: %s", error)
            except Exception:
                logger.exception("Store could not remove old entries of the audit record. Report this traceback")
            await asyncio.sleep(SWEEP_S)


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
