"""Responses in the store, as the rest of the system asks for them.

Every call may be repeated: the second one changes nothing. StoreAway: the database cannot be used now, and nothing of
the call is in it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from serve_app.core.responses import Chain, StoredResponse


class ResponseStore:
    """Each method is a call of the one of the same name of `SqlResponses`.

    Args:
        call: runs a method of the `SqlStore`, wherever that is.
    """

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self._call = call

    async def chain(self, tenant: str, previous_id: str | None, item_ids: Sequence[str], max_bytes: int) -> Chain:
        """The turns up to `previous_id`, and stored items by their ids; without items, if they have more bytes."""
        return await self._call("responses.chain", tenant, previous_id, item_ids, max_bytes)  # type: ignore[no-any-return]

    async def add(self, record: StoredResponse, max_tenant_bytes: int) -> int:
        """Add a record. Returns how many of the tenant's were removed for it."""
        return await self._call("responses.add", record, max_tenant_bytes)  # type: ignore[no-any-return]

    async def response(self, response_id: str, tenant: str) -> StoredResponse:
        """Raises KeyError: none, another tenant's, or its time is over."""
        return await self._call("responses.response", response_id, tenant)  # type: ignore[no-any-return]

    async def delete(self, response_id: str, tenant: str) -> bool:
        """Whether there was one."""
        return await self._call("responses.delete", response_id, tenant)  # type: ignore[no-any-return]

    async def forget(self, limit: int, keep_s: float) -> int:
        """Remove records whose time is over, and those that nothing has continued for `keep_s`, at most `limit`.
        Returns how many."""
        return await self._call("responses.forget", limit, keep_s)  # type: ignore[no-any-return]
