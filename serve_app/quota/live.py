"""What the quota actor knows now, for people who watch: the ledger, who waits for what, sessions; decides nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from serve_app.core.live import QuotaPart, Wait, waiting_rows
from serve_app.core.memory import tenant_session_id
from serve_app.core.messages import message
from serve_app.core.queue import Admission
from serve_app.core.quota import Quota
from serve_app.quota.report import figures

# What those who watch do not read, of the figures.
LEFT_OUT = ("queues", "lines", "sessions", "sessions_waiting", "failures", "crash_loops")


@message
@dataclass(frozen=True, slots=True)
class LiveRequest:
    """Asks for what happens now. `tenants`: whose rows are wanted, however few of their requests wait."""

    tenants: tuple[str, ...] = ()


def live_part(core: Quota, now: float, tenants: Collection[str], defrag_above: float | None = None) -> QuotaPart:
    """The present state. O(waiting requests + engines + sessions)."""
    known = {name: value for name, value in figures(core, now, defrag_above).items() if name not in LEFT_OUT}
    queues = {model: state.admission for model, state in core.queue.models.by_name.items()}
    rows = [row for model, queue in sorted(queues.items()) for row in waiting_rows(model, _waits(queue, now), tenants)]
    waiting = {model: queue.waiting for model, queue in queues.items()}
    return QuotaPart(known, tuple(rows), waiting, tuple(_sessions(core, now)))


def _waits(queue: Admission, now: float) -> Iterator[Wait]:
    for request, reason in queue.wait_reasons():
        arrival = request.arrival
        yield Wait(arrival.request_class.label, arrival.tenant, now - request.arrived_s, reason.value)


def _sessions(core: Quota, now: float) -> Iterator[dict[str, Any]]:
    for entry in core.sessions.by_session_id.values():
        request = entry.request
        pool = core.ledger.pool(entry.lease)
        yield {
            "session_id": tenant_session_id(request.session_id),
            "tenant": request.tenant,
            "model": request.model,
            "replica": entry.engine,
            "kv_tokens": request.tokens,
            "used": 0 if pool is None else pool.used_tokens,
            "bytes": request.granted_bytes,
            "expires_in_s": round(core.sessions.view(request.session_id).expires_at - now, 1),
        }
