"""The queue of one model in one router: where a request waits for its place on a replica.

`grant = await queue.acquire(arrival)`, and `queue.done` when the request has ended. `serve_app.router.queue_client`
carries what this means to the quota actor, which has the queue of all routers, and brings decisions back.

Invariant: a request that asks gets exactly one answer, a grant or an error; one that leaves before is cancelled.
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
    Policy,
    QueueStatus,
    Reason,
    Refuse,
    ReplicaUse,
    StartUp,
    refusal_error,
)
from serve_app.errors import ServeAppError
from serve_app.router.queue_client import QueueClient
from serve_app.types import RequestClass


@dataclass(frozen=True, slots=True)
class QueueView:
    """This router's part of a model's queue, in figures; classes by label, reasons by value (only ever growing).
    `replicas`: what the quota actor has booked for this router, credit included, and what of it requests hold."""

    waiting: Mapping[str, int]
    refused: Mapping[str, int]
    replicas: Mapping[str, ReplicaUse]


class ModelQueue:
    """The queue of one model, as this router uses it."""

    def __init__(self, client: QueueClient, model: str, policy: Policy) -> None:
        self.model = model
        self._client, self._core, self._policy = client, client.core, policy
        self._start = StartUp()
        self._usable: set[str] = set()
        self.known: set[str] = set()  # engines that have not been forgotten
        self._opened = self._closed = False
        self._refused: Counter[Reason] = Counter()
        client.add(self)

    def open(self) -> None:
        """The replicas that there are at the beginning have been reported."""
        if not self._opened:
            self._opened = True
            self._core.serve(self.model, self._policy)
            self._client.after([])

    async def acquire(self, arrival: Arrival) -> Grant:
        """Wait for a place; `done` gives it back.

        Raises:
            Overloaded, Unavailable: refused, with the reason and Retry-After.
            ValueError: a request of this id waits or runs already; nothing has changed then.
        """
        self.open()
        now = time.monotonic()
        decided = self._client.begin(arrival.request_id, self)
        try:
            actions = self._core.on_arrive(self.model, arrival, now)
            if not actions and not self._usable:
                self._start.needed(now)
            self._client.after(actions)
            return await decided  # decided at once, it is over without a turn of the event loop
        except (ServeAppError, ValueError):  # refused, or nothing has changed
            self._client.end(arrival.request_id)
            raise
        except BaseException:  # the client left, or something failed; a grant that came meanwhile is given back, too
            self._client.end(arrival.request_id)
            self._client.after(self._core.on_cancel(arrival.request_id, time.monotonic()))
            raise

    def done(self, request_id: str, output_tokens: int | None = None, prompt_tokens: int | None = None) -> None:
        """A granted request has ended, well or not, after so many tokens (None: not counted, the estimate stands for
        them); again changes nothing."""
        self._client.end(request_id)
        self._client.after(self._core.on_done(request_id, time.monotonic(), prompt_tokens, output_tokens))

    def progress(self, request_id: str, output_tokens: int) -> None:
        """A granted request has produced so many tokens more."""
        self._core.on_progress(request_id, output_tokens)

    def grow(self, request_id: str, tokens: int) -> bool:
        """A granted request needs so many KV tokens more; False: it has not got them yet, and goes on all the same."""
        had = self._core.grow(request_id, tokens)
        self._client.after([])
        return had

    def replica(self, replica_id: str, usable: bool, once: bool = False) -> None:
        """Whether requests can be handed to a replica now, however many run there; `once`: one, and then no more."""
        if self._closed:
            return  # an ejection that was over, of an engine that was dropped
        now = time.monotonic()
        if usable and not self._usable:
            self._start.came(now, new=replica_id not in self.known)
        self.known.add(replica_id)
        (self._usable.add if usable else self._usable.discard)(replica_id)
        if not self._usable and self.waiting:
            self._start.needed(now)
        self._client.after(self._core.reach(self.model, replica_id, usable, now, once=once))

    def replica_gone(self, replica_id: str) -> None:
        """Nothing of ours runs on a replica that has left."""
        self._usable.discard(replica_id)
        self.known.discard(replica_id)
        self._core.drop(replica_id)
        self._client.after([])

    def start_told(self, start_s: float) -> None:
        """An engine reports how many seconds its own start took."""
        self._start.told(start_s)

    def configure(self, policy: Policy) -> None:
        """Other bounds from now on, for requests that wait, too."""
        self._policy = policy
        if self._opened and self._client.present(self):
            self._core.serve(self.model, policy)
            self._client.after([])

    def dismiss(self, why: Callable[[], ServeAppError]) -> None:
        """Refuse all requests that wait now."""
        for request_id, decided in self._client.requests(self).items():
            if not decided.done():
                decided.set_exception(why())
                self._client.after(self._core.on_cancel(request_id, time.monotonic()))

    def close(self) -> None:
        """Nothing comes any more, and nothing runs."""
        self._closed = True
        self._client.forget(self)

    def decide(self, action: Action, decided: asyncio.Future[Grant]) -> None:
        """Deliver a decision."""
        if isinstance(action, Grant):
            decided.set_result(action)
            return
        self._refused[action.reason] += 1
        if action.reason is Reason.NO_REPLICA:  # this router knows how long a start takes, the shared queue does not
            action = Refuse(action.request_id, action.reason, self.expected_start_s())
        decided.set_exception(refusal_error(action))

    @property
    def waiting(self) -> int:
        """Requests of this router that wait."""
        return self._core.waiting(self.model)

    @property
    def granted(self) -> int:
        """Requests of this router on replicas."""
        return self._core.running_of(self.model)

    def ahead(self, request_class: RequestClass) -> tuple[tuple[RequestClass, int], ...]:
        """How many wait before a request of this class that comes now, by their class."""
        return self._core.ahead(self.model, request_class)

    def status(self, request_id: str) -> QueueStatus | None:
        """Where a request stands, by the actor's last answer, which is asked for again; None: it does not wait."""
        status = self._core.status(request_id)
        self._client.after([])
        if status is not None and not self._usable:
            return replace(status, expected_start_s=self.expected_start_s())
        return status

    @property
    def start_s(self) -> float | None:
        """What the last start of a replica took, seconds; None: not measured."""
        return self._start.measured_s

    def expected_start_s(self) -> float:
        """Seconds until a replica can be expected while there is none."""
        return self._start.remaining_s(time.monotonic())

    @property
    def blocked(self) -> int:
        """Engines of the model that wait for memory."""
        return self._client.blocked.get(self.model, 0)

    def view(self) -> QueueView:
        """The present state in figures."""
        waiting = self._core.waiting_by_class(self.model)
        return QueueView(
            waiting={level.label: count for level, count in waiting.items()},
            refused={reason.value: self._refused[reason] for reason in Reason},
            replicas={name: self._use(name) for name in sorted(self.known)},
        )

    def _use(self, replica_id: str) -> ReplicaUse:
        used, booked = self._core.account(replica_id)
        return ReplicaUse(booked.slots, used)
