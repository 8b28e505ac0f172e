"""The queue of one model in one router: where a request waits for a slot on a replica.

`grant = await queue.acquire(arrival)`, and `queue.release` when the request has ended. `serve_app.router.queue_client`
sends these events to the quota actor, which has the queue of all routers, and receives the decisions.

Invariant: `acquire` ends with exactly one grant or error; a request whose client leaves before that is cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from serve_app.core.queue import (
    Action,
    Arrival,
    Grant,
    QueuePolicy,
    QueueStatus,
    RefusalReason,
    Refuse,
    ReplicaStart,
    ReplicaUse,
    refusal_error,
)
from serve_app.errors import ServeAppError
from serve_app.router.queue_client import QueueClient
from serve_app.types import RequestClass


@dataclass(frozen=True, slots=True)
class QueueView:
    """Counts of this router's part of a model's queue; classes by label, refusals by reason value (counters).
    `replicas`: the slots that the quota actor has booked for this router, credit included, and those in use."""

    waiting: Mapping[str, int]
    refused: Mapping[str, int]
    replicas: Mapping[str, ReplicaUse]


class ModelQueue:
    """The queue of one model, as this router uses it."""

    def __init__(self, client: QueueClient, model: str, policy: QueuePolicy) -> None:
        self.model = model
        self._client, self._core, self._policy = client, client.core, policy
        self._cold_start = ReplicaStart()
        self._usable: set[str] = set()
        self.known_engines: set[str] = set()  # engines that have not been dropped
        self._opened = self._closed = False
        self._refused: Counter[RefusalReason] = Counter()
        client.add(self)

    def open(self) -> None:
        """Begin to serve the queue, once the initial replicas have been reported. Idempotent."""
        if not self._opened:
            self._opened = True
            self._core.serve(self.model, self._policy)
            self._client.apply_actions([])

    async def acquire(self, arrival: Arrival) -> Grant:
        """Wait for a grant; `release` returns it.

        Raises:
            Overloaded, Unavailable: refused, with the reason and Retry-After.
            ValueError: a request of this id waits or runs already; nothing has changed.
        """
        self.open()
        now = time.monotonic()
        decided = self._client.register(arrival.request_id, self)
        try:
            actions = self._core.on_arrive(self.model, arrival, now)
            if not actions and not self._usable:
                self._cold_start.begin(now)
            self._client.apply_actions(actions)
            return await decided  # an immediate decision needs no turn of the event loop
        except (ServeAppError, ValueError):  # refused, or nothing has changed
            self._client.unregister(arrival.request_id)
            raise
        except BaseException:  # the client left, or an error; a grant that came meanwhile is returned, too
            self._client.unregister(arrival.request_id)
            self._client.apply_actions(self._core.on_cancel(arrival.request_id, time.monotonic()))
            raise

    def release(self, request_id: str, output_tokens: int | None = None, prompt_tokens: int | None = None) -> None:
        """Return the grant of a request that has ended or failed. Idempotent.

        Args:
            output_tokens, prompt_tokens: used by the request; None: not counted, the estimate is charged.
        """
        self._client.unregister(request_id)
        self._client.apply_actions(self._core.on_done(request_id, time.monotonic(), prompt_tokens, output_tokens))

    def progress(self, request_id: str, output_tokens: int) -> None:
        """Count output tokens that a granted request has produced since the last call."""
        self._core.on_progress(request_id, output_tokens)

    def request_kv_tokens(self, request_id: str, tokens: int) -> bool:
        """Request more KV tokens for a granted request; False: not granted yet. The request goes on in both cases."""
        had = self._core.grow(request_id, tokens)
        self._client.apply_actions([])
        return had

    def set_replica(self, replica_id: str, usable: bool, one_request: bool = False) -> None:
        """Set whether a replica takes requests now, however many run there; `one_request`: one at a time."""
        if self._closed:
            return  # the end of an ejection of a dropped engine
        now = time.monotonic()
        if usable and not self._usable:
            self._cold_start.replica_ready(now, is_new=replica_id not in self.known_engines)
        self.known_engines.add(replica_id)
        (self._usable.add if usable else self._usable.discard)(replica_id)
        if not self._usable and self.waiting:
            self._cold_start.begin(now)
        self._client.apply_actions(
            self._core.set_reachability(self.model, replica_id, usable, now, single_request=one_request)
        )

    def remove_replica(self, replica_id: str) -> None:
        """Drop a replica that has left and runs none of this router's requests."""
        self._usable.discard(replica_id)
        self.known_engines.discard(replica_id)
        self._core.drop_engine(replica_id)
        self._client.apply_actions([])

    def observe_start(self, start_s: float) -> None:
        """An engine reports how many seconds its own start took."""
        self._cold_start.reported(start_s)

    def configure(self, policy: QueuePolicy) -> None:
        """Apply new bounds, also to requests that already wait."""
        self._policy = policy
        if self._opened and self._client.is_current(self):
            self._core.serve(self.model, policy)
            self._client.apply_actions([])

    def refuse_all(self, make_error: Callable[[], ServeAppError]) -> None:
        """Refuse all requests that wait now."""
        for request_id, decided in self._client.decisions_of(self).items():
            if not decided.done():
                decided.set_exception(make_error())
                self._client.apply_actions(self._core.on_cancel(request_id, time.monotonic()))

    def close(self) -> None:
        """Unregister the queue; no request comes or runs any more."""
        self._closed = True
        self._client.remove(self)

    def deliver(self, action: Action, decision: asyncio.Future[Grant]) -> None:
        """Resolve `decision` with the grant or the refusal of `action`."""
        if isinstance(action, Grant):
            decision.set_result(action)
            return
        self._refused[action.reason] += 1
        if (
            action.reason is RefusalReason.NO_REPLICA
        ):  # this router measures how long a start takes, the shared queue does not
            action = Refuse(action.request_id, action.reason, self.expected_start_s())
        decision.set_exception(refusal_error(action))

    @property
    def waiting(self) -> int:
        """Number of this router's requests that wait."""
        return self._core.waiting(self.model)

    @property
    def granted(self) -> int:
        """Number of this router's requests on replicas."""
        return self._core.in_flight.counts[self.model]

    def ahead(self, request_class: RequestClass) -> tuple[tuple[RequestClass, int], ...]:
        """Number of waiting requests ahead of a new request of this class, by class."""
        return self._core.ahead(self.model, request_class)

    def status(self, request_id: str) -> QueueStatus | None:
        """A request's queue position by the actor's last report; requests a new report. None: it does not wait."""
        status = self._core.status(request_id)
        self._client.apply_actions([])
        if status is not None and not self._usable:
            return replace(status, expected_start_s=self.expected_start_s())
        return status

    @property
    def last_start_s(self) -> float | None:
        """Seconds that the last start of a replica took; None: not measured."""
        return self._cold_start.measured_s

    def expected_start_s(self) -> float:
        """Seconds until the first replica is expected while none runs."""
        return self._cold_start.remaining_s(time.monotonic())

    @property
    def blocked(self) -> int:
        """Engines of the model that wait for memory."""
        return self._client.blocked.get(self.model, 0)

    def view(self) -> QueueView:
        """The present counts, for metrics."""
        waiting = self._core.pending.count_by_class(self.model)
        return QueueView(
            waiting={level.label: count for level, count in waiting.items()},
            refused={reason.value: self._refused[reason] for reason in RefusalReason},
            replicas={name: self._slot_use(name) for name in sorted(self.known_engines)},
        )

    def _slot_use(self, replica_id: str) -> ReplicaUse:
        used, booked = self._core.account(replica_id)
        return ReplicaUse(booked.slots, used)
