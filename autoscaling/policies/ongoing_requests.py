"""Replicas by ongoing requests: as many as the load divided by what one replica should have.

Load is everything the model has to do, waiting or running, averaged over the look-back. Delays are not decided here:
Serve applies `upscale_delay_s`, `downscale_delay_s` and `downscale_to_zero_delay_s` to what this asks for.

Rules
- While no replica runs there is nothing to smooth: the newest count decides, and Serve starts at once what is asked.
- What is being started is not called off before `START_HOLD_S` after the last one gave up waiting: an engine that needs
  longer to start than clients are held for would never be there otherwise. And a controller that has just come back
  sees no replica and no load for a second, while all of them run.
- Nor is a further replica while it starts, before the load has been too low for it for `FURTHER_HOLD_S`: a start takes
  longer than a lull, and calling it off in every lull starts engines for ever and never has one.
- Beyond the first, a replica that shares a device is added only when memory is kept for it (`within_room`).
- No replica is added while one waits for memory: it would wait behind that one.
- Whoever cannot see every router takes nothing away; what it does see may add.

Invariant: the answer is within the bounds; with all else equal, more load never gives fewer replicas.
"""

from __future__ import annotations

import math
from collections import deque

from autoscaling.policies.signals import Decision, Room, Signals

# Above the slowest start of a large engine (hundreds of GB of weights over a network). Below it only costs a node that
# idles; a start called off costs every client that was told to come back.
START_HOLD_S = 1800.0
FURTHER_HOLD_S = 120.0  # an engine's start takes from half a minute to some: a lull of that length is an end
ROUNDING = 1e-6  # of an average of equal numbers; must not start a replica


def replicas_for(load: float, target_ongoing: float) -> int:
    """The fewest replicas that have no more than `target_ongoing` requests each; one at least for any load."""
    return max(1, math.ceil(load / target_ongoing - ROUNDING)) if load > 0 else 0


class Average:
    """The mean of a step function over the last `span_s` seconds, or since it is known. O(changes in the span)."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque()  # from when, which value

    def add(self, value: float, now: float, span_s: float) -> float:
        """`value` from `now` on; returns the mean up to `now`. An earlier moment counts as the latest seen."""
        steps = self._steps
        now = max(now, steps[-1][0]) if steps else now
        if not steps or steps[-1][1] != value:
            steps.append((now, value))
        since = now - span_s
        while len(steps) > 1 and steps[1][0] <= since:
            steps.popleft()
        if steps[0][0] < since:
            steps[0] = (since, steps[0][1])  # a longer span later knows no more of one value than of another
        start = steps[0][0]
        if start >= now:
            return value
        ends = [*(at for at, _ in steps), now][1:]
        total = sum(step * (end - at) for (at, step), end in zip(steps, ends, strict=True))
        return total / (now - start)


class Ongoing:
    """The policy of one model."""

    def __init__(self) -> None:
        self._average = Average()
        self._complete = False  # whether the newest signals were
        self._demanded: float | None = None  # when somebody last waited for a replica that does not run yet
        self._wanted: float | None = None  # when the present target was last wanted, while some of it starts

    def decide(self, signals: Signals) -> Decision:
        """How many replicas there should be."""
        if not signals.running:
            self._average = Average()  # what waited for the first replica is there at once when it comes
            return bounded(signals, *self._from_none(signals), signals.load)
        self._demanded = None
        if signals.running >= signals.target:
            self._wanted = None
        if signals.complete and not self._complete:
            self._average = Average()  # what was seen before was a part
        self._complete = signals.complete
        mean = self._average.add(signals.load, signals.now, signals.look_back_s)
        replicas, reason = _while_running(signals, mean)
        if signals.running < signals.target:
            if replicas >= signals.target or self._wanted is None:
                self._wanted = signals.now
            if replicas < signals.target and signals.now - self._wanted <= FURTHER_HOLD_S:
                replicas, reason = signals.target, f"{reason}; kept, for a part of it still starts"
        return bounded(signals, replicas, reason, mean)

    def _from_none(self, signals: Signals) -> tuple[int, str]:
        if signals.load > 0 or signals.rung:
            self._demanded = signals.now
            wanted = max(1, replicas_for(signals.load, signals.target_ongoing))  # one for a ring without a number
            return max(wanted, signals.target), asks(signals, signals.load, wanted)
        if signals.target == 0:
            self._demanded = None
            return 0, "nothing waits"
        if self._demanded is None:
            self._demanded = signals.now
        if signals.now - self._demanded <= START_HOLD_S:
            return signals.target, "the first replica starts; whoever waited for it may come back"
        return 0, f"nothing has waited for {START_HOLD_S:.0f} s, and no replica has started"


def _while_running(signals: Signals, mean: float) -> tuple[int, str]:
    wanted = replicas_for(mean, signals.target_ongoing)
    reason = asks(signals, mean, wanted)
    if wanted < signals.target and not signals.complete:
        return signals.target, f"{reason}; kept, for not every router has told its numbers"
    return wanted, reason


def asks(signals: Signals, load: float, wanted: int) -> str:
    """The reason of a decision by load, for a person to read."""
    if not signals.running and signals.rung and not signals.load:
        return "a request waits for the first replica"
    return (
        f"{load:.1f} requests, {signals.waiting:.0f} of them waiting now, at {signals.target_ongoing:g} a replica: "
        f"{wanted} wanted"
    )


def bounded(signals: Signals, replicas: int, reason: str, load: float) -> Decision:
    """The decision within the bounds, and whether a bound made it."""
    if signals.blocked and replicas > signals.target:
        replicas, reason = signals.target, f"{reason}; kept, for {signals.blocked:.0f} wait for memory"
    if replicas < signals.min_replicas:
        return Decision(signals.min_replicas, load, f"{reason}; min_replicas is {signals.min_replicas}")
    if replicas > signals.max_replicas:
        return Decision(signals.max_replicas, load, f"{reason}; max_replicas is {signals.max_replicas}")
    return Decision(replicas, load, reason)


def within_room(decision: Decision, more: int, room: Room | None) -> Decision:
    """The decision with those of so many further replicas that memory is kept for; what is missing is its reason.

    Args:
        room: None: the ledger is not the one to say.
    """
    short = 0 if room is None else more - room.held
    if room is None or short <= 0:
        return decision
    return Decision(decision.replicas - short, decision.load, f"{decision.reason}; {short} not started, {room.why}")
