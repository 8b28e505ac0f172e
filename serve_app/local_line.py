"""Who decides about the requests of one model: what a router needs of a line, and a line in the router's own process.

The seam. `Decider` takes the events of one model in one router. What it decides reaches `perform` in order, in the same
call or at any time later, and for any request: nobody who hands in an event may count on an answer. So a line that is
somewhere else (in the quota actor, for all routers) is another `Decider`, and nothing else of the router changes.
`serve_app.waiters` carries out what is decided.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from serve_app.core.admission import Action, Admission, Arrival, Policy, QueueStatus, Snapshot
from serve_app.types import RequestClass

Perform = Callable[[list[Action]], None]


class Decider(Protocol):
    """The events of one model in one router, and what is known of its line."""

    def arrive(self, arrival: Arrival) -> None:
        """A request asks for a place. ValueError: one of this id waits or runs already; nothing has changed then."""
        ...

    def cancel(self, request_id: str) -> None:
        """The caller is gone, waiting or running."""
        ...

    def done(self, request_id: str, output_tokens: int | None = None) -> None:
        """A granted request has ended, well or not, after so much output (None: not counted, its estimate stands for
        it); again changes nothing."""
        ...

    def replica(self, replica_id: str, slots: int) -> None:
        """A replica has this many slots for us from now on, whatever it runs; 0: it drains."""
        ...

    def replica_gone(self, replica_id: str) -> None:
        """Nothing of ours runs on a replica that has left."""
        ...

    def start_told(self, start_s: float) -> None:
        """An engine says how many seconds its own start took."""
        ...

    def configure(self, policy: Policy) -> None:
        """Other bounds from now on, for those who wait, too."""
        ...

    def close(self) -> None:
        """Nothing comes any more, and nothing is to be decided by itself."""
        ...

    @property
    def waiting(self) -> int:
        """Requests in the line."""
        ...

    def ahead(self, request_class: RequestClass) -> tuple[tuple[RequestClass, int], ...]:
        """How many wait before a request of this class that comes now, by their class."""
        ...

    @property
    def granted(self) -> int:
        """Requests on replicas."""
        ...

    @property
    def start_s(self) -> float | None:
        """What the last start of a replica took; None: not measured."""
        ...

    def expected_start_s(self) -> float:
        """Seconds until a replica can be expected while there is none."""
        ...

    def status(self, request_id: str) -> QueueStatus | None:
        """Where a request stands in the line; None: it does not wait there, or that is not known yet."""
        ...

    def snapshot(self) -> Snapshot:
        """The present state in figures."""
        ...


class LocalLine:
    """A `Decider` in this process: `core.admission` with a clock, and the timer for what falls due by itself.

    Args:
        perform: carries out what was decided; called once for each event, since what else depends on the state of the
            line follows it there.
    """

    def __init__(self, policy: Policy, perform: Perform) -> None:
        self._admission = Admission(policy)
        self._perform = perform
        self._timer: asyncio.TimerHandle | None = None

    def arrive(self, arrival: Arrival) -> None:
        self._after(self._admission.on_arrive(arrival, time.monotonic()))

    def cancel(self, request_id: str) -> None:
        self._after(self._admission.on_cancel(request_id, time.monotonic()))

    def done(self, request_id: str, output_tokens: int | None = None) -> None:
        self._after(self._admission.on_done(request_id, time.monotonic(), output_tokens=output_tokens))

    def replica(self, replica_id: str, slots: int) -> None:
        self._after(self._admission.on_replica(replica_id, slots, time.monotonic()))

    def replica_gone(self, replica_id: str) -> None:
        self._after(self._admission.on_replica_gone(replica_id, time.monotonic()))

    def start_told(self, start_s: float) -> None:
        self._admission.on_start_told(start_s)

    def configure(self, policy: Policy) -> None:
        self._after(self._admission.on_policy(policy, time.monotonic()))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def waiting(self) -> int:
        return self._admission.waiting

    def ahead(self, request_class: RequestClass) -> tuple[tuple[RequestClass, int], ...]:
        return self._admission.ahead(request_class)

    @property
    def granted(self) -> int:
        return self._admission.granted

    @property
    def start_s(self) -> float | None:
        return self._admission.start_s

    def expected_start_s(self) -> float:
        return self._admission.expected_start_s(time.monotonic())

    def status(self, request_id: str) -> QueueStatus | None:
        return self._admission.status(request_id, time.monotonic())

    def snapshot(self) -> Snapshot:
        return self._admission.snapshot(time.monotonic())

    def _after(self, actions: list[Action]) -> None:
        """What every event ends with: it is carried out, and the next decision that falls due has its timer."""
        self._perform(actions)
        self.close()
        due = self._admission.next_due()
        if due is not None:
            delay_s = max(0.0, due - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._after(self._admission.on_tick(time.monotonic()))
