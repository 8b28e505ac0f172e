"""Finds the receipt of a request wherever it is: in a router's memory, or in the request log of a node.

Invariant: an answer without a receipt says what is known of the request: that it waits, that it runs, or that nobody
has heard of it, with the routers and nodes that did not answer. Of another tenant's request it says what it says of one
that never was.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from serve_app.core.receipts import MAX_RECEIPTS
from serve_app.errors import NotFound
from serve_app.http.api.record_routes import AskRouters, FindsRecords, recorded_receipt
from serve_app.http.api.routes import SHOWN_ID_CHARS
from serve_app.router import RouterAnswers


@dataclass(frozen=True, slots=True)
class ReceiptLookup:
    """See the module.

    Args:
        find_kept: a receipt in the memory of any router, by any id of its request and its tenant (None: any).
        keep_days: of the request log; 0: there is none.
    """

    find_kept: Callable[[str, str | None], Awaitable[dict[str, Any] | None]]
    cluster: FindsRecords
    ask_routers: AskRouters
    keep_days: Callable[[], float]

    async def find(self, request: str, tenant: str | None) -> dict[str, Any]:
        """The receipt as plain data.

        Raises:
            NotFound: there is none, with what is known.
        """
        kept = await self.find_kept(request, tenant)
        if kept is not None:
            return kept
        answers: RouterAnswers = await self.ask_routers("open_request", request, tenant)
        shown = request[:SHOWN_ID_CHARS]
        for _, is_open in answers.found:
            if is_open is not None:
                raise _not_ended(shown, is_open)
        recorded = await recorded_receipt(self.cluster, request, tenant)
        found = recorded.receipt or await self.find_kept(request, tenant)  # it may have ended between the first two
        if found is not None:
            return found
        missing = [f"router {name}" for name in answers.missing] + recorded.missing
        raise _unknown(shown, self.keep_days(), missing)


def _not_ended(shown: str, found: dict[str, Any]) -> NotFound:
    state = "waits" if found["waits"] else f"runs on {found['replica_id']}" if found["replica_id"] else "is prepared"
    message = (
        f"request {shown!r} has not ended: it {state}, since {found['since_s']:.1f} s; its receipt comes with its end"
    )
    return NotFound(message, code="request_not_ended")


def _unknown(shown: str, keep_days: float, missing: list[str]) -> NotFound:
    days = f"nor in the request log of the last {keep_days:g} days" if keep_days else "and no request log is kept"
    message = (
        f"no request {shown!r} is known to this key: it does not wait or run, and is not among the last "
        f"{MAX_RECEIPTS:,} of a router, {days}"
    )
    if missing:
        message += f"; no answer came from {', '.join(missing)}"
    return NotFound(message, code="request_not_found")
