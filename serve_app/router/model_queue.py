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
from dataclasses import replace

from serve_app.core.queue import (
    Arrival,
    Decision,
    Grant,
    Preempt,
    QueuePolicy,
    QueueStatus,
    RefusalReason,
    Refuse,
    ReplicaStart,
    refusal_error,
)
from serve_app.core.receipts import ServiceLevel
from serve_app.core.shared_queue import ClassCounts
from serve_app.errors import ServeAppError
from serve_app.router.queue_client import PendingGrant, QueueClient
from serve_app.types import RequestClass


class ModelQueue:
    """The queue of one model, as this router uses it. A later queue of the same name replaces it in the client;
    requests granted here go on."""

    def __init__(self, client: QueueClient, model: str, policy: QueuePolicy) -> None:
        self.model = model
        self.core = client.core
        self._client = client
        self._policy = policy
        self.replica_start = ReplicaStart()
        self.refused: Counter[RefusalReason] = Counter()
        self.on_preempt: Callable[[Preempt], None] = lambda stop: None  # a request that runs is to stop for others
        self._usable: set[str] = set()
        self.known_engines: set[str] = set()  # engines that have not been dropped
        client.engines[model] = self.known_engines
        self._opened = self._closed = False

    def open(self) -> None:
        """Begin to serve the queue, once the initial replicas have been reported. Idempotent."""
        if not self._opened:
            self._opened = True
            self.core.serve(self.model, self._policy)
            self._client.apply_actions([])

    async def acquire(
        self, arrival: Arrival, *, may_leave: bool = False, check: Callable[[], object] = lambda: None
    ) -> Grant:
        """Wait for a grant; `release` returns it.

        Args:
            may_leave: it is refused at once while no replica takes requests, and when the last one stops to.
            check: raises the error with which `check_waiting` refuses it.

        Raises:
            Overloaded, Unavailable: refused, with the reason and Retry-After.
            ValueError: a request of this id waits or runs already; nothing has changed.
        """
        self.open()
        now = time.monotonic()
        request_id = arrival.request_id
        requests = self._client.requests
        if request_id in requests:
            raise ValueError(f"{request_id!r} waits or runs already")
        if may_leave and not self._usable:
            raise self.no_replica_error()
        decided: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        requests[request_id] = PendingGrant(self, decided, self.on_preempt, may_leave, check)
        try:
            actions = self.core.on_arrive(self.model, arrival, now)
            if not actions and not self._usable:
                self.replica_start.begin(now)
            self._client.apply_actions(actions)
            decision = await decided  # an immediate decision needs no turn of the event loop
        except BaseException:  # the client left, or an error; a grant that came meanwhile is returned, too
            requests.pop(request_id, None)
            self._client.apply_actions(self.core.on_cancel(request_id, time.monotonic()))
            raise
        if isinstance(decision, Grant):
            return decision
        requests.pop(request_id, None)
        self.refused[decision.reason] += 1
        if decision.reason is RefusalReason.NO_REPLICA:  # the actor does not measure how long a start takes
            decision = replace(decision, retry_after_s=self.expected_start_s())
        raise refusal_error(decision)

    def release(self, request_id: str, output_tokens: int | None = None, prompt_tokens: int | None = None) -> None:
        """Return the grant of a request that has ended or failed. Idempotent.

        Args:
            output_tokens, prompt_tokens: used by the request; None: not counted, the estimate is charged.
        """
        self._client.requests.pop(request_id, None)
        self._client.apply_actions(self.core.on_done(request_id, time.monotonic(), prompt_tokens, output_tokens))

    def request_kv_tokens(self, request_id: str, tokens: int) -> None:
        """Request more KV tokens for a granted request, which goes on whether they are granted now or later."""
        self.core.in_flight.grow(request_id, tokens, time.monotonic())
        self._client.apply_actions([])

    def progress(self, request_id: str, output_tokens: int, prompt_tokens: int = 0) -> None:
        """Count tokens that an engine has produced for a granted request, and its prompt once that is counted."""
        self.core.in_flight.progress(request_id, output_tokens, prompt_tokens)

    def set_replica(self, replica_id: str, usable: bool, one_request: bool = False) -> None:
        """Set whether a replica takes requests now, however many run there; `one_request`: one at a time."""
        if self._closed:
            return  # the end of an ejection of a dropped engine
        now = time.monotonic()
        if usable and not self._usable:
            self.replica_start.replica_ready(now, is_new=replica_id not in self.known_engines)
        self.known_engines.add(replica_id)
        (self._usable.add if usable else self._usable.discard)(replica_id)
        if not self._usable and self.waiting:
            self.replica_start.begin(now)
        if not self._usable:
            self._refuse(self.no_replica_error, may_leave=True)
        self._client.apply_actions(
            self.core.set_reachability(self.model, replica_id, usable, now, single_request=one_request)
        )

    def set_fingerprint(self, replica_id: str, fingerprint: str | None) -> None:
        """A replica has told whose streams it may continue (`transport.Batch`)."""
        self.core.accounts.set_fingerprint(replica_id, fingerprint)

    def remove_replica(self, replica_id: str) -> None:
        """Drop a replica that has left and runs none of this router's requests."""
        self._usable.discard(replica_id)
        self.known_engines.discard(replica_id)
        self.core.in_flight.drop_engine(replica_id)
        self._client.apply_actions([])

    def configure(self, policy: QueuePolicy) -> None:
        """Apply new bounds, also to requests that already wait."""
        self._policy = policy
        if self._opened and self._client.engines.get(self.model) is self.known_engines:
            self.core.serve(self.model, policy)
            self._client.apply_actions([])

    def refuse_all(self, make_error: Callable[[], ServeAppError]) -> None:
        """Refuse all requests that wait now."""
        self._refuse(make_error)

    def check_waiting(self) -> None:
        """Refuse those that wait now and that no replica that runs could take."""
        for request in self._client.requests.values():
            if request.queue is self and not request.decision.done():
                try:
                    request.check()
                except ServeAppError as error:
                    request.decision.set_exception(error)

    def no_replica_error(self) -> ServeAppError:
        """The refusal of a request that does not wait for a replica."""
        self.refused[RefusalReason.NO_REPLICA] += 1
        return refusal_error(Refuse("", RefusalReason.NO_REPLICA, self.expected_start_s()))

    def _refuse(self, make_error: Callable[[], ServeAppError], *, may_leave: bool = False) -> None:
        """Refuse those that wait now; `may_leave`: of them, those that may."""
        for request in self._client.requests.values():
            if request.queue is self and not request.decision.done() and (request.may_leave or not may_leave):
                request.decision.set_exception(make_error())

    def close(self) -> None:
        """Close a queue whose model is gone and runs no request. Serve may stop the engines later without a message to
        any router, so they are dropped here, except those that the next queue of this name uses."""
        self._closed = True
        present = self._client.engines.get(self.model)
        if present is self.known_engines:
            del self._client.engines[self.model]
            self.core.retire(self.model)  # first: so other routers do not wait for a message of this router
            present = None
        for engine in self.known_engines - (present or set()):
            self.core.in_flight.drop_engine(engine)
        self._client.apply_actions([])

    @property
    def waiting(self) -> int:
        """Number of this router's requests that wait."""
        return self.core.pending.count(self.model)

    @property
    def waiting_anywhere(self) -> int:
        """Number of requests that wait at any router, by the quota actor's last figures, or here where that is more."""
        return sum(count for _, count in self.core.ahead(self.model, min(RequestClass)))

    @property
    def waiting_tokens(self) -> int:
        """KV tokens that this router's requests that wait are estimated to need."""
        return self.core.pending.tokens(self.model)

    def by_class(self, levels: Mapping[RequestClass, ServiceLevel], now: float) -> tuple[ClassCounts, ...]:
        """This router's requests by class."""
        return self.core.by_class(self.model, levels, now)

    @property
    def fill_ratio(self) -> float | None:
        """This router's part of the queue's bound that its waiting requests take; None: nothing may wait."""
        most = self._policy.max_queued
        return self.waiting / most if most else None

    @property
    def granted(self) -> int:
        """Number of this router's requests on replicas."""
        return self.core.in_flight.count(self.model)

    @property
    def blocked(self) -> int:
        """Engines of the model that wait for memory."""
        return self.core.router_session.state.blocked.get(self.model, 0)

    @property
    def fragmentation(self) -> tuple[tuple[str, float], ...]:
        """Nodes with the share of their free GPU memory into which no engine of a present model fits."""
        return self.core.router_session.state.fragmentation

    def ticket_of(self, request_id: str) -> str:
        """The id by which the quota actor knows a waiting request; empty: it does not know it yet."""
        return self.core.ticket_of(request_id)

    def is_waiting(self, request_id: str) -> bool:
        """Whether a request waits here."""
        request = self._client.requests.get(request_id)
        return request is not None and not request.decision.done()

    def status(self, request_id: str) -> QueueStatus | None:
        """A request's queue position by the actor's last report; requests a new report. None: it does not wait."""
        status = self.core.status(request_id)
        self._client.apply_actions([])
        if status is not None and not self._usable:
            return replace(status, expected_start_s=self.expected_start_s())
        return status

    def expected_start_s(self) -> float:
        """Seconds until the first replica is expected while none runs."""
        return self.replica_start.remaining_s(time.monotonic())
