"""Reservations at the quota actor: of clients that were told a moment and left, and of requests that wait here for it.

What a request may have used of its pools is charged when its reservation is made (`Pool.reserve`). One that waits here
runs from its moment on, or sooner by what is free meanwhile, and as soon as slots of the concurrency are free. A
reservation is vacant once nobody will use it: its request ran sooner, or left. Its amounts stay reserved until its
moment, because they have not come before, and are spare then. One whose client stays away is vacant `GRACE_S` after it.

A client whose moment would be too far away is told an estimate instead. When it comes back, it waits here for the first
moment there is then.

Invariant: a reservation is of a client that is away, or of a request that waits here, or vacant, or over.
Invariant: a request whose grant fails is ended, and those behind it are served.
Invariant: a moment is kept, and what is reserved is used by its moment or spare from then on: the line loses nothing.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from serve_app.core.limits.policy import Amounts, Kind, Scopes
from serve_app.core.limits.pools import ROUNDING, Pool
from serve_app.core.limits.scopes import Key, Scope

GRACE_S = 1.5  # a client that reads whole seconds of Retry-After comes up to one second late
EARLY_S = 0.05  # a client that comes so much before its moment waits for it
RESERVED_S = 60.0  # ahead, at most: else clients that never come back make the line, and what others are told, endless
MAX_ESTIMATES = 1000  # clients of a scope that were told an estimate
MAX_SKIPPED = 32  # requests in a row that cannot run yet: then a scope has served all that it can, or nearly


Run = Callable[[str, object, Callable[[], object], Callable[[], object]], None]  # what, of whom, the step, its end


def at_once(_what: str, _of: object, act: Callable[[], object], _end: Callable[[], object]) -> None:
    """A `Run` whose steps do not fail."""
    act()


@dataclass(slots=True, eq=False)
class Entry:
    """One reservation.

    Args:
        key: of its request.
        need: as reserved; `wanted`: of the request that came back, since estimates change.
        due: its moment.
        held: what is still reserved of which pool.
        router, ticket: of the request that waits here; empty: there is none.
    """

    scopes: list[Scope]
    need: Amounts
    key: Key
    due: float
    number: str = ""
    wanted: Amounts = ()
    held: list[tuple[Scope, Kind, Pool]] = field(default_factory=list)
    router: str = ""
    ticket: str = ""
    is_vacant: bool = False
    is_over: bool = False

    def slots(self) -> Iterable[Pool]:
        return (scope.pools[Kind.CONCURRENT] for scope in self.scopes if Kind.CONCURRENT in scope.pools)


class LimitReservations:
    """All reservations.

    Args:
        on_granted: called with a reservation once its request, which waited here, may run.
        on_lost: called with the router and the ticket of a request whose grant has failed.
        run: runs a step, and its end after an error.
    """

    def __init__(self, on_granted: Callable[[Entry], None], on_lost: Callable[[str, str], None], run: Run) -> None:
        self._on_granted = on_granted
        self._on_lost = on_lost
        self._run = run
        self.tickets: dict[str, Entry] = {}  # of the requests that wait here
        self.away: dict[Key, deque[Entry]] = {}
        self.touched: dict[str, Scope] = {}  # something has come back to them
        self._entries: dict[str, Entry] = {}  # by number
        self._timers: list[tuple[float, int, Entry]] = []
        self._numbers = itertools.count()

    def add(self, entry: Entry, now: float) -> None:
        """Reserve what an entry needs."""
        entry.number = str(next(self._numbers))
        entry.wanted = entry.need
        self._entries[entry.number] = entry
        for scope in entry.scopes:
            scope.entries[entry.number] = None
            for kind, pool in scope.pools.items():
                if kind is not Kind.CONCURRENT:
                    pool.reserve(entry.number, entry.need[kind], entry.due - now)
                    entry.held.append((scope, kind, pool))

    def send_away(self, entry: Entry) -> None:
        """Keep a reservation for a client that was told its moment."""
        self.away.setdefault(entry.key, deque()).append(entry)
        self._set_timer(entry.due + GRACE_S, entry)

    def tell_estimate(self, scopes: list[Scope], key: Key, at: float, now: float) -> None:
        """A client was told this moment, and nothing is reserved for it."""
        estimates = scopes[0].estimates  # one key's loops make nobody else's forgotten
        estimates.setdefault(key, []).append(at)
        while len(estimates) > MAX_ESTIMATES or estimates[next(iter(estimates))][-1] < now - RESERVED_S:
            del estimates[next(iter(estimates))]

    def comes_back(self, scopes: list[Scope], key: Key, now: float) -> bool:
        """Whether a client was told an estimate that is over; once for each."""
        estimates = scopes[0].estimates
        if key not in estimates or estimates[key][0] > now + EARLY_S:
            return False
        estimates[key].pop(0)
        if not estimates[key]:
            del estimates[key]
        return True

    def wait(self, entry: Entry, router: str, ticket: str, wanted: Amounts, now: float) -> None:
        """The request is here, and waits unless it can run at once."""
        self._forget_away(entry)
        entry.router = router
        entry.ticket = ticket
        entry.wanted = wanted
        self.tickets[ticket] = entry
        for scope in entry.scopes:
            scope.waiting[entry.number] = None
        if not self._try(entry, now):
            self._set_timer(max(entry.due, now), entry)

    def cancel(self, entry: Entry, now: float) -> None:
        """The request that waited here has left for good."""
        self._leave(entry)
        self._vacate(entry, now)

    def end_router_session(self, router: str, now: float) -> None:
        """A router's session has ended: its waiting requests keep their places until they are handed in again."""
        for entry in [one for one in self.tickets.values() if one.router == router]:
            self._leave(entry)
            entry.due = max(entry.due, now)
            self.send_away(entry)

    def serve(self, now: float) -> None:
        """Grant the waiting requests that can run by what has come back to their scopes, in order."""
        while self.touched:
            scope = self.touched.pop(next(iter(self.touched)))
            scope.refill(now)
            slots = scope.pools.get(Kind.CONCURRENT)
            skipped = 0
            for number in list(scope.waiting):
                if skipped == MAX_SKIPPED or (slots is not None and slots.level < 1.0 - ROUNDING):
                    break
                if not self._try(self._entries[number], now):
                    skipped += 1

    def on_tick(self, now: float) -> None:
        """Run what is due."""
        while self._timers and self._timers[0][0] <= now:
            entry = heapq.heappop(self._timers)[2]
            if entry.is_over:
                continue
            if entry.ticket:
                if not self._try(entry, now) and (late_s := _debt_s(entry)) > 0.0:
                    self._set_timer(now + late_s, entry)
            elif entry.is_vacant or now >= entry.due + GRACE_S:
                self._forget_away(entry)
                self._end(entry)
            else:  # of an earlier wait
                self._set_timer(entry.due + GRACE_S, entry)

    def next_due(self) -> float | None:
        return self._timers[0][0] if self._timers else None

    def _try(self, entry: Entry, now: float) -> bool:
        """Let a waiting request run, if it can; one that fails is ended."""
        found: list[bool] = []

        def grant() -> None:
            found.append(self._grant(entry, now))

        end = partial(self._lose, entry, entry.router, entry.ticket)
        self._run("a grant near a limit", entry.ticket, grant, end)
        return any(found)

    def _lose(self, entry: Entry, router: str, ticket: str) -> None:
        """A grant has failed, before or after its request was charged."""
        if entry.ticket:
            self._leave(entry)
        if not entry.is_over:
            self._end(entry)
        self._on_lost(router, ticket)

    def _grant(self, entry: Entry, now: float) -> bool:
        """Let a waiting request run, if it can."""
        if any(pool.level < 1.0 - ROUNDING for pool in entry.slots()):
            return False
        wanted = entry.wanted
        early = []
        for scope in entry.scopes:
            scope.refill(now)
        if entry.due > now:  # a level that is not below zero covers all reservations already
            early = [one for one in entry.held if one[2].level < -ROUNDING]
            if not all(pool.has(wanted[kind]) for _, kind, pool in early):
                return False
        elif _debt_s(entry) > 0.0:
            return False
        for part in list(entry.held):
            _, kind, pool = part
            if part in early:
                pool.take(wanted[kind])
            else:
                entry.held.remove(part)
                pool.release(entry.number, entry.need[kind], is_used=True)
                pool.put(entry.need[kind] - wanted[kind])
        for pool in entry.slots():
            pool.take(1.0)
            pool.credit[entry.router] = pool.credit.get(entry.router, 0.0) + 1.0
        self._on_granted(entry)
        self._leave(entry)
        self._vacate(entry, now)
        return True

    def _leave(self, entry: Entry) -> None:
        """The request no longer waits here."""
        del self.tickets[entry.ticket]
        for scope in entry.scopes:
            del scope.waiting[entry.number]
        entry.router = entry.ticket = ""

    def _vacate(self, entry: Entry, now: float) -> None:
        """Nobody will use what is still reserved."""
        if not entry.held or entry.due <= now:
            self._end(entry)
            return
        entry.is_vacant = True
        self._set_timer(entry.due, entry)
        for scope in entry.scopes:  # no other reservation goes by the newest ones: these can be undone
            while scope.entries and (last := self._entries[next(reversed(scope.entries))]).is_vacant:
                for held in [one for one in last.held if one[0] is scope]:
                    held[2].undo(last.number, last.need[held[1]])
                    last.held.remove(held)
                del scope.entries[last.number]

    def _end(self, entry: Entry) -> None:
        """End a reservation: what it still has is spare."""
        entry.is_over = True
        del self._entries[entry.number]
        for _, kind, pool in entry.held:
            pool.release(entry.number, entry.need[kind], is_used=False)
        for scope in entry.scopes:
            scope.entries.pop(entry.number, None)
            self.touched[scope.name] = scope

    def _forget_away(self, entry: Entry) -> None:
        alike = self.away.get(entry.key)
        if alike is not None and entry in alike:
            alike.remove(entry)
            if not alike:
                del self.away[entry.key]

    def _set_timer(self, at: float, entry: Entry) -> None:
        heapq.heappush(self._timers, (at, next(self._numbers), entry))


def key_of(scopes: Scopes, fingerprint: bytes) -> Key:
    """The scopes and the bytes of a request, by which it is known when it comes back."""
    return tuple([name for name, _ in scopes]), fingerprint


def _debt_s(entry: Entry) -> float:
    """Seconds until what was reserved is there: others used more than their estimates."""
    return max((pool.debt_s(entry.wanted[kind]) for _, kind, pool in entry.held), default=0.0)
