"""The running requests that can be stopped, in the order of what they lose, without a walk over all of them.

What a request loses (its KV tokens times the time since its grant) grows with time, so no order by it lasts. Requests
of one class, as often stopped before, whose tokens are within a factor of two are in one group, by the time of their
grants: that order lasts, and protection ends in it. A group's requests are looked at from the youngest on, as long as
one with the fewest tokens of the group would lose less than the best that was found; so few are looked at.

Invariant: a request is in exactly one group, that of its present tokens, and among those of its replica, or in none.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter

from serve_app.core.pools import Holder
from serve_app.core.queue.class_queue import ClassQueue
from serve_app.core.queue.drain_rate import GUARDED_FROM
from serve_app.core.queue.events import Arrival
from serve_app.core.queue.session_place import SessionPlace
from serve_app.core.queue.tenant_queue import QueuedRequest, TenantQueue
from serve_app.types import RequestClass

RESUMED_S = 1.0  # what a prefill takes is then a small part of the run
QUANTUM_S = 30.0  # most answers end sooner
GROWN_S = 1.0  # between looks for what time alone changes: the length of running requests, the number of guard slots
MAX_DUE_LOOKS = 1_024  # running requests looked at for when the next one may stop


@dataclass(slots=True, eq=False)
class GrantedRequest:
    """A granted request, and the tokens that its tenant was charged so far. `holder`: has it in its account.

    `unconfirmed`: of these the input tokens by its estimate, until its engine has counted them. `was_due`: it was
    granted by the minimum share. `stopping_s`: since when it is to stop; None: it is not. `place`: of its session, in
    which it runs; None: it runs on the replica's own slots and tokens. `began_elsewhere`: its begin and its end are
    known late here, so they are no measure of how fast slots drain.
    """

    arrival: Arrival
    replica_id: str
    holder: Holder
    class_queue: ClassQueue
    tenant_queue: TenantQueue
    charged_prompt: int
    granted_s: float
    was_due: bool = False
    charged_output: int = 0
    unconfirmed: int = 0
    stopping_s: float | None = None
    number: int = 0  # of its grant, among those that can be stopped
    group: tuple[int, int] = (0, 0)
    place: SessionPlace | None = None
    began_elsewhere: bool = False

    @property
    def kv_tokens(self) -> int:
        """Its tokens in the KV cache, as far as they are known."""
        return self.charged_prompt + self.arrival.produced_tokens + self.charged_output

    def lost(self, now: float) -> float:
        """KV token-seconds that are lost if it stops."""
        return self.kv_tokens * (now - self.granted_s)


# When it was granted, the number of its grant, and the request.
_Entry = tuple[float, int, GrantedRequest]
# How often it was stopped, and the bits of its KV tokens.
_Group = tuple[int, int]


@dataclass(slots=True)
class _OnReplica:
    """What can be stopped on a replica."""

    runs: list[dict[str, GrantedRequest]] = field(default_factory=lambda: [{} for _ in RequestClass])
    slots: list[int] = field(default_factory=lambda: [0] * len(RequestClass))
    tokens: list[int] = field(default_factory=lambda: [0] * len(RequestClass))


class StoppableRuns:
    """The requests. O(log n) per method, and per request that `cheapest` yields, unless stated."""

    def __init__(self) -> None:
        self._groups: list[dict[_Group, list[_Entry]]] = [{} for _ in RequestClass]
        self._on: dict[str, _OnReplica] = {}
        self.looks_left = 0  # of `cheapest`; below zero: it has left out some

    def add(self, run: GrantedRequest) -> None:
        level = run.arrival.request_class
        self._insert(run)
        held = self._on.get(run.replica_id)
        if held is None:
            held = self._on[run.replica_id] = _OnReplica()
        held.runs[level][run.arrival.request_id] = run
        held.slots[level] += run.arrival.slots
        held.tokens[level] += run.arrival.cost

    def remove(self, run: GrantedRequest) -> None:
        level = run.arrival.request_class
        held = self._on[run.replica_id]
        self._take_out(run)
        del held.runs[level][run.arrival.request_id]
        held.slots[level] -= run.arrival.slots
        held.tokens[level] -= run.arrival.cost
        if not any(held.runs):
            del self._on[run.replica_id]

    def grown(self, run: GrantedRequest) -> None:
        """The tokens of a request have changed. O(1) mostly."""
        if run.kv_tokens.bit_length() != run.group[1]:
            self._take_out(run)
            self._insert(run)

    def could_free(self, replica_id: str, level: RequestClass) -> tuple[int, int]:
        """Slots and tokens of a replica's requests of this class and below."""
        held = self._on.get(replica_id)
        return (0, 0) if held is None else (sum(held.slots[: level + 1]), sum(held.tokens[: level + 1]))

    def able_on(
        self, replica_id: str, waiting: QueuedRequest, now: float
    ) -> list[tuple[int, float, int, GrantedRequest]]:
        """Those of a replica that may stop now for a waiting request, the cheapest first: class, what it loses, number.
        O(requests there)."""
        level = waiting.arrival.request_class
        found = []
        for of, runs in zip(RequestClass, self._on[replica_id].runs[: level + 1], strict=False):
            least_s = _protection_s(of, level, 0)  # first: most have not run for so long
            found += [
                (of, run.lost(now), run.number, run)
                for run in runs.values()
                if run.granted_s + least_s <= now and stoppable_from(run, waiting, now) <= now
            ]
        return sorted(found, key=itemgetter(0, 1, 2))

    def cheapest(self, of: RequestClass, waiting: QueuedRequest, now: float) -> Iterator[tuple[float, GrantedRequest]]:
        """The requests of class `of` that may stop now for a waiting one, with what they lose, in that order, while
        `looks_left`."""
        level = waiting.arrival.request_class
        # What it loses, or of a group, at least; whether it is known; number of the grant; the request; in its group:
        # the entries, and where.
        heap: list[tuple[float, bool, int, GrantedRequest, list[_Entry], int]] = []
        for (preempted, bits), entries in self._groups[of].items():
            if of == level and (preempted < waiting.arrival.preempted or 1 << bits <= waiting.cost):
                continue
            at = _protected_from(entries, _protection_s(of, level, preempted), now) - 1
            if at >= 0:
                granted_s, number, run = entries[at]
                heap.append(((now - granted_s) * (1 << (bits - 1)), False, number, run, entries, at))
        heapq.heapify(heap)
        while heap:
            bound, is_known, _, run, entries, at = heap[0]
            if is_known:
                heapq.heappop(heap)
                yield bound, run
                continue
            if self.looks_left <= 0:
                self.looks_left = -1
                heapq.heappop(heap)
                continue
            self.looks_left -= 1
            if at:
                granted_s, number, after = entries[at - 1]
                least = (now - granted_s) * (1 << (run.group[1] - 1))
                heapq.heapreplace(heap, (least, False, number, after, entries, at - 1))
            else:
                heapq.heappop(heap)
            if of < level or run.kv_tokens > waiting.cost:
                heapq.heappush(heap, (run.lost(now), True, run.number, run, entries, at))

    def next_able(self, waiting: QueuedRequest, is_allowed: Callable[[str], bool], now: float) -> float:
        """When the next request on an allowed replica may stop for this one; infinite: none. After so many looks, the
        moment of the next ones."""
        level = waiting.arrival.request_class
        due = math.inf
        looks = MAX_DUE_LOOKS
        for of in RequestClass:
            if of > level:
                break
            for (preempted, _), entries in self._groups[of].items():
                if of == level and preempted < waiting.arrival.preempted:
                    continue
                protection_s = _protection_s(of, level, preempted)
                at = _protected_from(entries, protection_s, now)
                early = islice(entries, at) if of == level and due > now + GROWN_S else ()
                for _, _, run in early:
                    looks -= 1
                    if looks < 0 or (run.kv_tokens <= waiting.cost and is_allowed(run.replica_id)):
                        due = now + GROWN_S  # they may have grown
                        break
                for granted_s, _, run in map(entries.__getitem__, range(at, len(entries))):
                    if granted_s + protection_s >= due:
                        break
                    looks -= 1
                    if looks < 0:
                        return min(due, now + GROWN_S)
                    if is_allowed(run.replica_id):
                        due = min(due, stoppable_from(run, waiting, now))
        return due

    def _insert(self, run: GrantedRequest) -> None:
        run.group = run.arrival.preempted, run.kv_tokens.bit_length()
        group = self._groups[run.arrival.request_class].setdefault(run.group, [])
        insort(group, (run.granted_s, run.number, run))

    def _take_out(self, run: GrantedRequest) -> None:
        groups = self._groups[run.arrival.request_class]
        group = groups[run.group]
        del group[bisect_left(group, (run.granted_s, run.number))]
        if not group:
            del groups[run.group]


def stoppable_from(run: GrantedRequest, waiting: QueuedRequest, now: float) -> float:
    """From when on a run may stop for a waiting request; infinite: never."""
    level = waiting.arrival.request_class
    of = run.arrival.request_class
    preempted = run.arrival.preempted
    since = run.granted_s + _protection_s(of, level, preempted)
    if of < level:
        return since
    if waiting.arrival.preempted > preempted:
        return math.inf
    return since if waiting.cost < run.kv_tokens else max(since, now + GROWN_S)


def _protection_s(of: RequestClass, level: RequestClass, preempted: int) -> float:
    """How long a request runs before it may stop for one of class `level`."""
    if of == level:
        return QUANTUM_S * 2.0**preempted
    return RESUMED_S * 2.0 ** max(0, preempted - 1) if preempted or level < GUARDED_FROM else 0.0


def _protected_from(entries: list[_Entry], protection_s: float, now: float) -> int:
    """How many of a group are protected no more; they are the first ones."""
    if entries[-1][0] + protection_s <= now:
        return len(entries)
    if entries[0][0] + protection_s > now:
        return 0
    return bisect_right(entries, now, key=lambda entry: entry[0] + protection_s)
