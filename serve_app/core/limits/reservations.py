"""Reservations at the quota actor: of clients that were told a moment and left, and of requests that wait here for it.

What a request may have used of its pools is charged when its reservation is made (`Pool.reserve`). One that waits here
runs from its moment on, or sooner if the spare covers it, and as soon as slots of the concurrency are free. One whose
client stays away is given up `GRACE_S` after its moment.

Invariant: a reservation is of a client that is away, or of a request that waits here, or over; and ends once.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from serve_app.core.limits.policy import Amounts, Kind
from serve_app.core.limits.pools import ROUNDING, Pool
from serve_app.core.limits.scopes import Scope

GRACE_S = 1.5  # a client that reads whole seconds of Retry-After comes up to one second late

Key = tuple[tuple[str, ...], bytes]  # scopes, and the fingerprint of the request


@dataclass(slots=True, eq=False)
class Entry:
    """One reservation.

    Args:
        due: its moment.
        router, ticket: of the request that waits here; empty: the client is away.
    """

    scopes: list[Scope]
    need: Amounts
    fingerprint: bytes
    due: float
    number: int = 0
    router: str = ""
    ticket: str = ""
    is_over: bool = False

    @property
    def key(self) -> Key:
        return tuple(scope.name for scope in self.scopes), self.fingerprint

    def charges(self) -> Iterator[tuple[Pool, float]]:
        """What is reserved of which pool."""
        for scope in self.scopes:
            for kind, pool in scope.pools.items():
                if kind is not Kind.CONCURRENT:
                    yield pool, self.need[kind]

    def slots(self) -> Iterable[Pool]:
        return (scope.pools[Kind.CONCURRENT] for scope in self.scopes if Kind.CONCURRENT in scope.pools)


class Reservations:
    """All reservations.

    Args:
        on_granted: called with the router and the ticket of a request that waited, once it may run.
    """

    def __init__(self, on_granted: Callable[[Entry], None]) -> None:
        self._on_granted = on_granted
        self.tickets: dict[str, Entry] = {}  # of the requests that wait here
        self.away: dict[Key, deque[Entry]] = {}
        self.touched: dict[str, Scope] = {}  # something has come back to them
        self._waiting: dict[int, Entry] = {}
        self._timers: list[tuple[float, int, Entry]] = []
        self._numbers = itertools.count()

    def add(self, entry: Entry, *, is_charged: bool = False) -> None:
        """Reserve what an entry needs. `is_charged`: the level is charged for it already."""
        entry.number = next(self._numbers)
        for pool, amount in entry.charges():
            if is_charged:
                pool.reserved += amount
                pool.overflow()
            else:
                pool.reserve(amount)
        for scope in entry.scopes:
            scope.entries += 1

    def send_away(self, entry: Entry) -> None:
        """Keep a reservation for a client that was told its moment."""
        self.away.setdefault(entry.key, deque()).append(entry)
        self._set_timer(entry.due + GRACE_S, entry)

    def come_back(self, entry: Entry, need: Amounts) -> None:
        """The client is here; its request may need something else by now, as estimates change."""
        self._forget_away(entry)
        before = list(entry.charges())
        entry.need = need
        for (pool, had), (_, amount) in zip(before, entry.charges(), strict=True):
            if amount > had:
                pool.reserve(amount - had)
            elif amount < had:
                pool.release(had - amount, is_used=False)

    def wait(self, entry: Entry, router: str, ticket: str, now: float) -> None:
        """The request waits here, unless it can run at once."""
        entry.router, entry.ticket = router, ticket
        self._waiting[entry.number] = self.tickets[ticket] = entry
        for scope in entry.scopes:
            scope.waiting[entry.number] = None
        if not self._grant(entry, now):
            self._set_timer(max(entry.due, now), entry)

    def leave(self, entry: Entry) -> None:
        """The request no longer waits here."""
        del self._waiting[entry.number], self.tickets[entry.ticket]
        for scope in entry.scopes:
            del scope.waiting[entry.number]
        entry.router = entry.ticket = ""

    def give_up(self, entry: Entry) -> None:
        """End a reservation that nobody uses."""
        self._forget_away(entry)
        for pool, amount in entry.charges():
            pool.release(amount, is_used=False)
        self._end(entry)

    def end_session(self, router: str, now: float) -> None:
        """A router's session has ended: its waiting requests keep their places until they are handed in again."""
        for entry in [one for one in self._waiting.values() if one.router == router]:
            self.leave(entry)
            entry.due = max(entry.due, now)
            self.send_away(entry)

    def serve(self, now: float) -> None:
        """Grant the waiting requests that can run by what has come back to their scopes, in order."""
        while self.touched:
            scope = self.touched.pop(next(iter(self.touched)))
            scope.refill(now)
            slots = scope.pools.get(Kind.CONCURRENT)
            for number in list(scope.waiting):
                if slots is not None and slots.level < 1.0 - ROUNDING:
                    break
                entry = self._waiting.get(number)
                if entry is not None:
                    self._grant(entry, now)

    def on_tick(self, now: float) -> None:
        """Run what is due."""
        while self._timers and self._timers[0][0] <= now:
            entry = heapq.heappop(self._timers)[2]
            if entry.is_over:
                continue
            if entry.ticket:
                self._grant(entry, now)
            elif now >= entry.due + GRACE_S:
                self.give_up(entry)
            else:  # of an earlier wait
                self._set_timer(entry.due + GRACE_S, entry)

    def next_due(self) -> float | None:
        return self._timers[0][0] if self._timers else None

    def _grant(self, entry: Entry, now: float) -> bool:
        """Let a waiting request run, if it can."""
        if any(pool.level < 1.0 - ROUNDING for pool in entry.slots()):
            return False
        if entry.due > now:
            uncovered = [(pool, amount) for pool, amount in entry.charges() if pool.level < -ROUNDING]
            if any(pool.spare < amount for pool, amount in uncovered):
                return False
            for pool, amount in uncovered:  # the spare takes the place of what was reserved
                pool.spare -= amount
                pool.level += amount
        for pool, amount in entry.charges():
            pool.release(amount, is_used=True)
        for pool in entry.slots():
            pool.take(1.0)
            pool.credit[entry.router] = pool.credit.get(entry.router, 0.0) + 1.0
        self._on_granted(entry)
        self.leave(entry)
        self._end(entry)
        return True

    def _forget_away(self, entry: Entry) -> None:
        alike = self.away.get(entry.key)
        if alike is not None and entry in alike:
            alike.remove(entry)
            if not alike:
                del self.away[entry.key]

    def _end(self, entry: Entry) -> None:
        entry.is_over = True
        for scope in entry.scopes:
            scope.entries -= 1
            self.touched[scope.name] = scope

    def _set_timer(self, at: float, entry: Entry) -> None:
        heapq.heappush(self._timers, (at, next(self._numbers), entry))
