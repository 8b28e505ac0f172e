"""Responses that are made in the background, as the rest of the system asks for them.

Every call may be repeated: the second one changes nothing. StoreAway: the database cannot be used now, and nothing of
the call is in it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, cast

from serve_app.core.responses import BackgroundJob, EventPage, EventPiece, StoredResponse
from serve_app.store.sent_calls import SentCalls


class BackgroundStore(Protocol):
    """The calls, as `background_by` makes them; each is one of `SqlBackground`."""

    async def create(
        self,
        record: StoredResponse,
        job: BackgroundJob,
        beginning: EventPiece,
        max_tenant_bytes: int,
        fingerprint: bytes | None = None,
    ) -> StoredResponse:
        """Add a response that waits for its run. Returns the one that is there under this id. Raises BodyTooLarge: the
        tenant's bytes have no room for it; ValueError: the one of this id was asked for with another fingerprint."""

    async def claim(self, worker: str, limit: int, lease_s: float) -> list[BackgroundJob]:
        """Lease jobs that nobody has to a worker; tenants take turns, and of a tenant the oldest comes first."""

    async def renew(self, worker: str, response_ids: Sequence[str], lease_s: float) -> None:
        """Lease these jobs for as long again, from now."""

    async def release(
        self, worker: str, response_id: str, *, count_attempt: bool, pause_s: float = 0.0, has_begun: bool = True
    ) -> None:
        """Give a job back that has not ended and that this worker has; nobody has it for `pause_s` then."""

    async def begin(self, response_id: str) -> int | None:
        """The number of the next event of a run; None: it has ended, is gone, or is cancelled and ends now."""

    async def write(self, response_id: str, piece: EventPiece | None, response: str | None) -> bool:
        """Add events, and the response without output as it is now. Returns whether its run is to end."""

    async def end(self, record: StoredResponse, piece: EventPiece | None, max_tenant_bytes: int) -> None:
        """The response has ended."""

    async def fail(self, response_id: str, error: dict[str, Any]) -> None:
        """The response has failed, and ends with this error."""

    async def cancel(self, response_id: str, tenant: str) -> None:
        """Cancel a response that has not ended."""

    async def end_cancelled(self, response_id: str) -> None:
        """The response was cancelled before anything of it was made."""

    async def events(self, response_id: str, tenant: str, after: int, limit: int) -> EventPage:
        """Events behind the number `after`. Raises KeyError: none of the tenant's that was made in the background."""


def background_by(call: Callable[..., Awaitable[Any]]) -> BackgroundStore:
    """The store over `call`, which runs a method of the `SqlStore`, wherever that is."""
    return cast(BackgroundStore, SentCalls(call, "background", claims="claim"))
