"""Replicas by ongoing requests: the load divided by the target number of requests per replica.

Load is the number of the model's requests, waiting or running, averaged over the look-back. Rows of batches are no load
unless the model's settings say so: they use what is idle, and keep one replica. Delays are not decided
here: Serve applies `upscale_delay_s`, `downscale_delay_s` and `downscale_to_zero_delay_s` to the decision.

Rules
- While no replica runs, nothing is averaged: the newest count decides, and Serve starts the replicas at once.
- A starting first replica is not cancelled before `START_HOLD_S` after the last waiting request: otherwise an engine
  whose start takes longer than clients wait would never run. Also, a restarted controller sees no replica and no load
  for a second, while all replicas run.
- A further starting replica is not cancelled before the load has been too low for it for `FURTHER_HOLD_S`: a start
  takes longer than a lull, and cancelling it in every lull would repeat the start for ever.
- A replica that has no place in Ray, or waits for memory, loses nothing when it is cancelled: the first one is held for
  `FURTHER_HOLD_S`, a further one not at all.
- Beyond the first, a replica that shares a device is added only if memory is reserved for it
  (`within_scale_up_limit`).
- No replica is added while one waits for memory: it would wait behind that one.
- Without room for one more, a change of settings comes before more replicas: Serve replaces no running replica while
  one that it has started has no place.
- Without the reports of every router no replica is removed; replicas may be added.

Invariant: the answer is within the bounds; with all else equal, more load never gives fewer replicas.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from typing import Protocol

from autoscaling.policies.signals import Cause, Decision, ScaleUpLimit, Signals

# Above the slowest start of a large engine (hundreds of GB of weights over a network). Holding a start costs an idle
# node at most; a cancelled start costs every client that was told to retry.
START_HOLD_S = 1800.0
FURTHER_HOLD_S = 120.0  # an engine's start takes half a minute to some minutes: a longer lull is an end
PLACE_S = 10.0  # Serve learns of a place that Ray has found within a second or two
ROUNDING = 1e-6  # the error of an average of equal numbers; it must not start a replica


def replicas_for(load: float, target_ongoing: float) -> int:
    """The fewest replicas with at most `target_ongoing` requests each; at least one for any load."""
    return max(1, math.ceil(load / target_ongoing - ROUNDING)) if load > 0 else 0


class Average:
    """The mean of a step function over the last `span_s` seconds, or since its first value. O(changes in the span)."""

    def __init__(self) -> None:
        self.steps: deque[tuple[float, float]] = deque()  # (since, value)

    def add(self, value: float, now: float, span_s: float) -> float:
        """Set `value` from `now` on; returns the mean up to `now`. An earlier time counts as the latest seen."""
        steps = self.steps
        now = max(now, steps[-1][0]) if steps else now
        if not steps or steps[-1][1] != value:
            steps.append((now, value))
        since = now - span_s
        while len(steps) > 1 and steps[1][0] <= since:
            steps.popleft()
        if steps[0][0] < since:
            steps[0] = (since, steps[0][1])  # a longer span later must weigh all values alike
        start = steps[0][0]
        if start >= now:
            return value
        ends = [*(at for at, _ in steps), now][1:]
        total = sum(step * (end - at) for (at, step), end in zip(steps, ends, strict=True))
        return total / (now - start)


class ReplicaSizing(Protocol):
    """The number of replicas of one model by its load alone, while some run; `RuledPolicy` keeps the rules."""

    def decide(self, signals: Signals) -> Decision:
        """The number, with its reason."""

    def forget(self) -> None:
        """What was seen so far says nothing about what comes."""


class ReplicaFloor(Protocol):
    """The least number of replicas of one model, whether any runs or not."""

    def decide(self, signals: Signals) -> Decision | None:
        """The number, with its reason; None: nothing is known."""


class RuledPolicy:
    """A policy of one model: its sizing, a floor under it, and the rules above. `has_own_delays`: the sizing decides
    when, too; Serve's delays would come on top."""

    has_own_delays = False

    def __init__(self, sizing: ReplicaSizing, floor: ReplicaFloor | None = None) -> None:
        self._sizing = sizing
        self._floor = floor
        self._complete = False  # whether the newest signals were complete
        self._demanded_at: float | None = None  # when a request last waited for a replica that does not run yet
        self._wanted_at: float | None = None  # when the load last justified the present target, while a part starts
        # While running ones have to be replaced: since when a replica has had no place, and whether that was too long.
        self._no_place_since: float | None = None
        self._full = False

    def decide(self, signals: Signals) -> Decision:
        """The number of replicas, with its reason."""
        floor = None if self._floor is None else self._floor.decide(signals)
        if not signals.running:
            self._sizing.forget()  # requests that waited for the first replica reach it at once
            return bounded(signals, at_least(floor, self._from_none(signals)))
        self._demanded_at = None
        if signals.running >= signals.target:
            self._wanted_at = None
        if signals.complete and not self._complete:
            self._sizing.forget()  # the earlier values were incomplete
        self._complete = signals.complete
        decision = at_least(floor, self._sizing.decide(signals))
        if decision.replicas < signals.target and not signals.complete:
            why = "not every router has reported its numbers"
            decision = kept(decision, signals.target, f"because {why}", Cause.UNREPORTED)
        if signals.running < signals.target:
            if decision.replicas >= signals.target or self._wanted_at is None:
                self._wanted_at = signals.now
            held = signals.at_work and signals.now - self._wanted_at <= FURTHER_HOLD_S
            if decision.replicas < signals.target and held:
                why = f"for {FURTHER_HOLD_S:.0f} s at most, while a part of it starts"
                decision = kept(decision, signals.target, why, Cause.STARTING)
        placed = self._placed(signals)
        if placed is not None and decision.replicas > placed:
            why = f"for {signals.outdated} have to be replaced and there is no room for more"
            decision = kept(decision, placed, why, Cause.ROLLOUT)
        return bounded(signals, decision)

    def _placed(self, signals: Signals) -> int | None:
        """The replicas that have a place, while running ones have to be replaced without room for more; None: else."""
        if not signals.outdated:
            self._no_place_since = None
            self._full = False
            return None
        if signals.stopping:  # what has no place gets theirs
            return signals.target if self._full else None
        if not signals.unplaced:
            self._no_place_since = None
        elif self._no_place_since is None:
            self._no_place_since = signals.now
        elif signals.now - self._no_place_since >= PLACE_S:
            self._full = True
        return max(signals.running, signals.target - signals.unplaced) if self._full else None

    def _from_none(self, signals: Signals) -> Decision:
        load = signals.load
        if load > 0 or signals.rows or signals.cold_start_requested:
            self._demanded_at = signals.now
            wanted = max(1, replicas_for(load, signals.target_ongoing))  # one for rows, or without a count
            return Decision(max(wanted, signals.target), load, load_reason(signals, load, wanted), Cause.COLD_START)
        if signals.target == 0:
            self._demanded_at = None
            return Decision(0, load, "nothing waits", Cause.IDLE)
        if self._demanded_at is None:
            self._demanded_at = signals.now
        hold_s = START_HOLD_S if signals.at_work else FURTHER_HOLD_S
        if signals.now - self._demanded_at <= hold_s:
            why = "the first replica starts; clients that waited for it may retry"
            return Decision(signals.target, load, why, Cause.STARTING)
        return Decision(0, load, f"nothing has waited for {hold_s:.0f} s, and no replica has started", Cause.IDLE)


class OngoingSizing:
    """See the module."""

    def __init__(self) -> None:
        self._average = Average()

    def decide(self, signals: Signals) -> Decision:
        """See `ReplicaSizing`."""
        return by_load(signals, self._average.add(signals.load, signals.now, signals.look_back_s))

    def forget(self) -> None:
        """See `ReplicaSizing`."""
        self._average = Average()


class OngoingRequestsPolicy(RuledPolicy):
    """See the module."""

    def __init__(self) -> None:
        super().__init__(OngoingSizing())


def by_load(signals: Signals, mean: float) -> Decision:
    """What the mean load needs while a replica runs."""
    needed = replicas_for(mean, signals.target_ongoing)
    replicas = max(needed, 1 if signals.rows else 0)
    if replicas > needed:
        cause = Cause.ROWS
    elif needed != replicas_for(signals.load, signals.target_ongoing):
        cause = Cause.LOOK_BACK
    else:
        cause = Cause.LOAD if needed else Cause.IDLE
    return Decision(replicas, mean, load_reason(signals, mean, replicas), cause)


def at_least(floor: Decision | None, decision: Decision) -> Decision:
    """The larger one; of equal ones the second."""
    return decision if floor is None or floor.replicas <= decision.replicas else floor


def kept(decision: Decision, replicas: int, why: str, cause: Cause) -> Decision:
    """The decision with a number of replicas that is there already, for this reason."""
    return replace(decision, replicas=replicas, reason=f"{decision.reason}; kept, {why}", cause=cause)


def load_reason(signals: Signals, load: float, wanted: int) -> str:
    """The reason of a decision by load, as text for operators."""
    if not signals.running and signals.cold_start_requested and not signals.load and not signals.rows:
        return "a request waits for the first replica"
    rows = f" and {signals.rows:.0f} rows of batches" if signals.rows else ""
    requests = f"{load:.1f} requests{rows}, {signals.waiting:.0f} of them waiting now"
    return f"{requests}, at {signals.target_ongoing:g} a replica: {wanted} wanted"


def bounded(signals: Signals, decision: Decision) -> Decision:
    """The decision within the bounds, with the bound that changed it."""
    if signals.blocked and decision.replicas > signals.target:
        decision = kept(decision, signals.target, f"for {signals.blocked:.0f} wait for memory", Cause.MEMORY)
    least = signals.min_replicas
    most = signals.max_replicas
    if decision.replicas < least:
        reason = f"{decision.reason}; min_replicas is {least}"
        return replace(decision, replicas=least, reason=reason, cause=Cause.MIN_REPLICAS)
    if decision.replicas > most:
        reason = f"{decision.reason}; max_replicas is {most}"
        return replace(decision, replicas=most, reason=reason, cause=Cause.MAX_REPLICAS)
    return decision


def within_scale_up_limit(decision: Decision, more: int, limit: ScaleUpLimit | None) -> Decision:
    """The decision with at most the further replicas that have reserved memory; the shortage is its reason.

    Args:
        more: the further replicas wanted.
        limit: those with reserved memory; None: the ledger does not decide that.
    """
    short = 0 if limit is None else more - limit.replicas
    if limit is None or short <= 0:
        return decision
    reason = f"{decision.reason}; {short} not started, {limit.reason}"
    return replace(decision, replicas=decision.replicas - short, reason=reason, cause=Cause.MEMORY)
