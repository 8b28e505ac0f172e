"""Replicas by service level: as few as keep first tokens within their classes' levels while more are started.

The load is what runs, and of what waits that which by the queue's own forecast would start too late: requests that
start in time need no further replica. Its mean is the offered load R, in requests that run at once; replicas get slots
for R + `SAFETY` * sqrt(R). That is square-root staffing (Halfin and Whitt, "Heavy-traffic limits for queues with many
exponential servers", 1981): the swings of independent arrivals grow with the root of their number, so that the part
kept free shrinks with size, and no target has to be guessed.

Rules
- A waiting request counts as the part of a slot that serves it within a start: further replicas have to work off what
  waits, but not all of it at once. Where its length or the engines' speed is not known, it counts as a whole slot.
- The mean is over the span of a start, within `LOOK_BACK_S`: what is shorter than that is over before a replica comes.
- A replica more is asked for at once. One less only when the smaller number would have been enough for `STARTS_HELD`
  starts, within `HOLD_S`, with `SPARE` roots more kept free: to start again costs a start, in which it serves nobody,
  and a load that stands at the edge between two numbers would start and end one for ever.
- Without known slots the target per replica counts as slots.
- All other rules are those of `ongoing_requests`.

The constants were chosen on synthetic loads alone (`benchmarks.autoscaling`).
"""

from __future__ import annotations

import math
from collections import deque

from autoscaling.policies.ongoing_requests import ROUNDING, Average, RuledPolicy
from autoscaling.policies.signals import Cause, Decision, Signals

SAFETY = 2.0
SPARE = 0.5
USUAL_START_S = 60.0  # until one was measured
LOOK_BACK_S = (15.0, 60.0)
STARTS_HELD = 10.0
HOLD_S = (60.0, 300.0)
LATE_SHOWN = 0.5  # requests: fewer round to none


class HighestSince:
    """The highest of the numbers of the last `span_s` seconds. O(1) amortised."""

    def __init__(self) -> None:
        self._falling: deque[tuple[float, int]] = deque()

    def add(self, number: int, now: float, span_s: float, before: int = 0) -> int:
        """Add a number; returns the highest. `before`: what counts as the last number before the first one."""
        falling = self._falling
        if not falling:
            falling.append((now, before))
        while falling and falling[-1][1] <= number:
            falling.pop()
        falling.append((now, number))
        while falling[0][0] < now - span_s:
            falling.popleft()
        return falling[0][1]


class SloSizing:
    """See the module. `safety`: in place of `SAFETY`."""

    def __init__(self, safety: float = SAFETY) -> None:
        self._safety = safety
        self._average = Average()
        self._highest = HighestSince()

    def forget(self) -> None:
        """See `ReplicaSizing`. What was wanted not long ago stays: it was too low at most."""
        self._average = Average()

    def decide(self, signals: Signals) -> Decision:
        """See `ReplicaSizing`."""
        start_s = signals.start_s or USUAL_START_S
        load = self._average.add(slots_needed(signals, start_s), signals.now, within(LOOK_BACK_S, start_s))
        slots = signals.slots or signals.target_ongoing
        needed = staffed(load, self._safety, slots)
        wanted = max(needed, 1 if load or signals.rows else 0)
        safe = staffed(load, self._safety + SPARE, slots)
        held = self._highest.add(max(wanted, safe), signals.now, within(HOLD_S, STARTS_HELD * start_s), signals.target)
        classes = [f"{one.late:.0f} of {one.request_class}" for one in signals.classes if one.late >= LATE_SHOWN]
        late = f" (late now: {', '.join(classes)})" if classes else ""
        reason = (
            f"{load:.1f} requests run or would start too late{late}, and {self._safety:g} times the root of it for "
            f"their swings, at {slots:.0f} slots a replica: {wanted} wanted"
        )
        kept = min(held, signals.target)
        if wanted < kept:
            return Decision(kept, load, f"{reason}; {held} not long ago", Cause.LOOK_BACK)
        return Decision(wanted, load, reason, Cause.LOAD if needed else Cause.ROWS if wanted else Cause.IDLE)


class SloPolicy(RuledPolicy):
    """See the module."""

    has_own_delays = True

    def __init__(self, safety: float = SAFETY) -> None:
        super().__init__(SloSizing(safety))


def slots_needed(signals: Signals, start_s: float) -> float:
    """Slots for what runs, and for what would start too late to be served within `start_s`."""
    counted = max(0.0, signals.load - signals.in_time)
    late = min(counted, max(0.0, signals.waiting - signals.in_time))
    if not (late and signals.granted and signals.served_tokens_s and signals.waiting_tokens):
        return counted
    run_s = signals.waiting_tokens / signals.waiting * signals.granted / signals.served_tokens_s
    return counted - late + late * min(1.0, run_s / start_s)


def staffed(load: float, safety: float, slots: float) -> int:
    """The replicas with slots for a load and `safety` times its root."""
    return math.ceil((load + safety * math.sqrt(load)) / slots - ROUNDING)


def within(bounds: tuple[float, float], value: float) -> float:
    """The value, within bounds."""
    return min(max(value, bounds[0]), bounds[1])
