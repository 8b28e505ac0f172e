"""Who decides about the requests of one model: what a router needs of a line, and a line in the router's own process.

The seam. `Decider` takes the events of one model in one router. What it decides reaches `perform` in order, in the same
call or at any time later, and for any request: nobody who hands in an event may count on an answer. So a line that is
somewhere else (in the quota actor, for all routers) is another `Decider`, and nothing else of the router changes.
`serve_app.waiters` carries out what is decided.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from serve_app.core.admission import Action, Admission, Arrival, Policy, QueueStatus, Snapshot
from serve_app.core.waiting.events import ReplicaUse
from serve_app.types import RequestClass

Perform = Callable[[list[Action]], None]


class View(Protocol):
    """What a router can say of its requests in a line: by class label, by the value of a `Reason` (only ever growing),
    and by replica, what is booked there for this router and what of it requests hold."""

    @property
    def waiting(self) -> Mapping[str, int]: ...

    @property
    def refused(self) -> Mapping[str, int]: ...

    @property
    def replicas(self) -> Mapping[str, ReplicaUse]: ...


class Decider(Protocol):
    """The events of one model in one router, and what is known of its line."""

    def open(self) -> None:
        """The replicas that there are at the beginning have been told."""
        ...

    def arrive(self, arrival: Arrival) -> None:
        """A request asks for a place. ValueError: one of this id waits or runs already; nothing has changed then."""
        ...

    def cancel(self, request_id: str) -> None:
        """The caller is gone, waiting or running."""
        ...

    def done(self, request_id: str, output_tokens: int | None = None, prompt_tokens: int | None = None) -> None:
        """A granted request has ended, well or not, after so many tokens (None: not counted, the estimate stands for
        them); again changes nothing."""
        ...

    def progress(self, request_id: str, output_tokens: int) -> None:
        """A granted request has produced so many tokens more."""
        ...

    def grow(self, request_id: str, tokens: int) -> bool:
        """A granted request needs so many KV tokens more; False: it has not got them, and goes on all the same."""
        ...

    def replica(self, replica_id: str, slots: int, usable: bool, once: bool = False) -> None:
        """A replica has this many slots for this router from now on, whatever it runs; 0: it drains. `usable`: whether
        requests of ours can be handed to it now, however many run there; `once`: one, and then no more."""
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

    def status(self, request_id: str) -> QueueStatus | None:
        """Where a request stands, by the last word; None: it does not wait."""
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

    def snapshot(self) -> View:
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

    def open(self) -> None:
        """Nobody else has to know."""

    def arrive(self, arrival: Arrival) -> None:
        self._after(self._admission.on_arrive(arrival, time.monotonic()))

    def cancel(self, request_id: str) -> None:
        self._after(self._admission.on_cancel(request_id, time.monotonic()))

    def done(self, request_id: str, output_tokens: int | None = None, prompt_tokens: int | None = None) -> None:
        self._after(self._admission.on_done(request_id, time.monotonic(), prompt_tokens, output_tokens))

    def progress(self, request_id: str, output_tokens: int) -> None:
        self._after(self._admission.on_progress(request_id, output_tokens, time.monotonic()))

    def grow(self, request_id: str, tokens: int) -> bool:
        """KV tokens are not bounded here."""
        return True

    def replica(self, replica_id: str, slots: int, usable: bool, once: bool = False) -> None:
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
