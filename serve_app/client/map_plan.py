"""Decides which items of a map are read, sent, tried again and yielded; it has no clock, no tasks and no items.

Read: an item is read from the source only when its request can be sent at once, so a refused map reads nothing.

Sent: at most `concurrency` requests run. A refused item is sent again at the moment that it was told, and not before;
until the earliest such moment no new item is sent. After a refusal by the queue, or for want of a replica, no more run
at once than the server has accepted: the *level* falls to what was still in flight (one at least), and grows with
answers as TCP's congestion window does (RFC 5681): by one an answer up to the level of the last refusal, and by one a
round above it. An item that is refused again although a later request was answered says nothing about the others: it
waits alone. A moment that a limit has reserved is kept at any level, and no new item is sent before it.

Yielded: in order or as completed.

Invariant: each item read is yielded once. At most `UNREAD_PER_CALL` x `concurrency` items are read and not yielded yet,
and nothing else is kept.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from serve_app.errors import (
    DROPPED,
    EngineFailed,
    EngineUnreachable,
    Overloaded,
    RateLimited,
    ServeAppError,
    Unavailable,
)

UNREAD_PER_CALL = 4  # a first item four times as long as the others stops nothing; 128 answers are a few hundred KB
FIRST_PAUSE_S = 1.0  # before an item is sent again, where the server told no moment; twice as long each time
MIN_PAUSE_S = 0.01  # against a server that tells none
MAX_PAUSE_S = 30.0  # of such a pause: routers that restart are found within half a minute
ENGINE_REPEATS = 1  # the router has tried other engines; a request that ends them must not go through all
NEVER_PASSES = frozenset({"deadline", "quota"})  # codes of `Overloaded`: the caller's deadline, tomorrow's tokens


@dataclass(frozen=True, slots=True)
class Repeat:
    """How a refused request may be sent again.

    Args:
        after_s: the moment that the server told, from now; None: it told none.
        is_reserved: a limit keeps that moment for this request.
        times: at most so often; None: as long as the caller is patient.
    """

    after_s: float | None
    is_reserved: bool = False
    times: int | None = None


def repeat_of(error: ServeAppError) -> Repeat | None:
    """How a request that ended with this error can be sent again, under its key. None: it would end the same way."""
    if isinstance(error, RateLimited):
        passes = error.retry_after_s is not None and error.code not in NEVER_PASSES
        return Repeat(error.retry_after_s, is_reserved=True) if passes else None
    if isinstance(error, Overloaded):
        return None if error.code in NEVER_PASSES else Repeat(error.retry_after_s)
    if isinstance(error, EngineUnreachable):
        return Repeat(error.retry_after_s)
    if isinstance(error, EngineFailed):
        return Repeat(error.retry_after_s, times=ENGINE_REPEATS)
    if isinstance(error, Unavailable):
        # A lost connection was repeated by the call itself (`repeats`), under the same key.
        return Repeat(error.retry_after_s, times=ENGINE_REPEATS if error.code == DROPPED else None)
    return None


@dataclass(slots=True)
class _Refused:
    """An item's refusals so far."""

    first_at: float
    sends: int  # of all items before the first of them
    count: int = 0
    limited: int = 0  # those that count against `Repeat.times`


class MapPlan:
    """The state of one map. Items are named by their index in the source; `now` is in seconds, from any beginning.

    Args:
        concurrency: requests in flight at most.
        ordered: yield in the source's order; else as they end.
        patience_s: an item is not sent again at a moment later than this after its first refusal.
    """

    def __init__(self, concurrency: int, *, ordered: bool, patience_s: float) -> None:
        self._concurrency = concurrency
        self._ordered = ordered
        self._patience_s = patience_s
        self.max_unread = UNREAD_PER_CALL * concurrency
        self.has_source_ended = False
        self.read = self.taken = self.in_flight = 0
        self._new: deque[int] = deque()  # read, never sent
        self._delayed: list[tuple[float, int]] = []  # heaps of refused items by moment, under the level
        self._reserved: list[tuple[float, int]] = []  # and beside it
        self._refused: dict[int, _Refused] = {}
        self._ended: deque[int] = deque()  # not taken yet, as they ended
        self._ended_set: set[int] = set()
        self._level = self._threshold = float(concurrency)
        self._sends = self._sends_of_episode = 0  # requests sent in all; by the last cut of the threshold
        self._send_of: dict[int, int] = {}  # of the requests in flight: which of all sends
        self._answered_send = -1  # the latest send that was answered
        self._held_until = -math.inf  # no new item is sent before
        self._now = -math.inf  # of the last event

    @property
    def waiting(self) -> int:
        """Refused items that wait for their moment."""
        return len(self._delayed) + len(self._reserved)

    @property
    def level(self) -> int:
        """How many requests may be in flight, reserved ones apart."""
        return int(self._level)

    @property
    def wants_item(self) -> bool:
        """Whether to read the next item from the source."""
        return (
            not (self.has_source_ended or self._new or self._is_held)
            and self.read - self.taken < self.max_unread
            and self.in_flight < self.level
        )

    @property
    def is_over(self) -> bool:
        return self.has_source_ended and self.taken == self.read

    @property
    def next_moment(self) -> float | None:
        """When an item may be sent again, if nothing else happens. None: an event decides."""
        delayed = self._delayed[0][0] if self._delayed and self.in_flight < self.level else math.inf
        reserved = self._reserved[0][0] if self._reserved and self.in_flight < self._concurrency else math.inf
        held = self._held_until if self._now < self._held_until else math.inf
        moment = min(delayed, reserved, held)
        return None if moment == math.inf else moment

    def on_item(self) -> int:
        """An item was read; returns its index."""
        self.read += 1
        self._new.append(self.read - 1)
        return self.read - 1

    def to_send(self, now: float) -> Iterator[int]:
        """The items to send now, each counted as in flight when it comes out."""
        self._now = now
        while self._reserved and self.in_flight < self._concurrency and self._reserved[0][0] <= now:
            yield self._sent(heapq.heappop(self._reserved)[1])
        while self._delayed and self.in_flight < self.level and self._delayed[0][0] <= now:
            yield self._sent(heapq.heappop(self._delayed)[1])
        while self._new and not self._is_held and self.in_flight < self.level:
            yield self._sent(self._new.popleft())

    def on_ended(self, index: int, *, answered: bool) -> None:
        """A request in flight has its result: an answer, or an error that stays."""
        sent = self._leave_flight(index)
        if answered:
            self._answered_send = max(self._answered_send, sent)
            grown = 1.0 if self._level < self._threshold else 1.0 / self._level
            self._level = min(self._level + grown, float(self._concurrency))
        self._end(index)

    def on_refused(self, index: int, repeat: Repeat, now: float) -> bool:
        """A request in flight was refused. False: the item is not sent again, and the error is its result."""
        sent = self._leave_flight(index)
        refused = self._refused.setdefault(index, _Refused(now, self._sends))
        is_alone = self._answered_send >= refused.sends
        pause_s = _backoff_s(refused.count) if repeat.after_s is None else max(repeat.after_s, MIN_PAUSE_S)
        refused.count += 1
        refused.limited += repeat.times is not None
        in_vain = repeat.times is not None and refused.limited > repeat.times
        if in_vain or now + pause_s > refused.first_at + self._patience_s:
            self._end(index)
            return False
        if not (is_alone or repeat.is_reserved):
            self._lower(sent)
            self._held_until = min(now + pause_s, self._held_until if now < self._held_until else math.inf)
        heapq.heappush(self._reserved if repeat.is_reserved else self._delayed, (now + pause_s, index))
        return True

    def take(self) -> int | None:
        """The item whose result is yielded next; None: there is none yet."""
        if self._ordered:
            if self.taken not in self._ended_set:
                return None
            index = self.taken
            self._ended_set.discard(index)
        elif self._ended:
            index = self._ended.popleft()
        else:
            return None
        self.taken += 1
        return index

    @property
    def _is_held(self) -> bool:
        """Whether new items have to wait."""
        return bool(self._reserved) or self._now < self._held_until

    def _lower(self, sent: int) -> None:
        """Lower the level at the refusal of what was the `sent`-th send."""
        if sent >= self._sends_of_episode:  # not one of those that were in flight at the last refusal
            self._threshold = max(1.0, float(self.in_flight))
            self._sends_of_episode = self._sends
        self._level = max(1.0, min(self._level, float(self.in_flight)))

    def _sent(self, index: int) -> int:
        self.in_flight += 1
        self._send_of[index] = self._sends
        self._sends += 1
        return index

    def _leave_flight(self, index: int) -> int:
        self.in_flight -= 1
        return self._send_of.pop(index)

    def _end(self, index: int) -> None:
        self._refused.pop(index, None)
        if self._ordered:
            self._ended_set.add(index)
        else:
            self._ended.append(index)


def _backoff_s(count: int) -> float:
    """The pause after the refusal with this number, from 0, where the server told no moment."""
    return MAX_PAUSE_S if count > math.log2(MAX_PAUSE_S / FIRST_PAUSE_S) else FIRST_PAUSE_S * 2.0**count
