"""What others do, in the form of our policies, for comparison alone.

Their rules and defaults are those that their documents state; each has one number that is swept, its target.

- Serve: the mean of 30 seconds over the target; up after 30 seconds, down after 600 (Ray Serve's defaults).
- KPA: Knative's autoscaler. Stable window 60 s, panic window 6 s, panic from twice the target on, looks every 2 s.
- APA: AIBrix's. Window 60 s, no change within 10% above and 20% below the target, at most twice or half at once, and
  down to the highest number of the last 300 s.
- Static: a fixed number.
- Clairvoyant: knows when each request comes and for how long it runs alone. Each second it has what these need at its
  target, each replica started in time, and kept where it would be started again within a start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoscaling.policies import Cause, Decision, HighestSince, Signals

LOOK_BACK_S = 30.0
KPA_LOOK_S = 2.0
KPA_STABLE_S = 60.0
KPA_PANIC_S = 6.0
KPA_PANIC_LOAD = 2.0
APA_LOOK_S = 10.0
APA_WINDOW_S = 60.0
APA_UP = 0.1
APA_DOWN = 0.2
APA_COOL_DOWN_S = 300.0
MOST_DOWN = 2  # to a half at once


class WindowMean:
    """The mean of the numbers of the last `span_s` seconds."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._numbers: list[tuple[float, float]] = []

    def add(self, number: float, now: float) -> float:
        """Add a number; returns the mean."""
        self._numbers = [one for one in self._numbers if one[0] > now - self._span_s]
        self._numbers.append((now, number))
        return sum(one[1] for one in self._numbers) / len(self._numbers)


class Baseline:
    """What all have: the bounds, a target per replica, looks that come at intervals."""

    has_own_delays = True
    look_s = 0.0

    def __init__(self, target: float) -> None:
        self.target = target
        self._due_s = 0.0

    def decide(self, signals: Signals) -> Decision:
        """See `ReplicaPolicy`."""
        self.see(signals)
        wanted = signals.target
        if signals.now >= self._due_s:
            self._due_s = signals.now + self.look_s
            wanted = self.wanted(signals)
        wanted = min(max(wanted, signals.min_replicas), signals.max_replicas)
        return Decision(wanted, signals.load, type(self).__name__, Cause.LOAD)

    def see(self, signals: Signals) -> None:
        """Each signal, also between looks."""

    def wanted(self, signals: Signals) -> int:
        raise NotImplementedError

    def replicas_for(self, load: float) -> int:
        return math.ceil(load / self.target - 1e-6)


class ServeDefault(Baseline):
    """Its delays are those of the plan: Serve's."""

    has_own_delays = False

    def __init__(self, target: float) -> None:
        super().__init__(target)
        self._mean = WindowMean(LOOK_BACK_S)

    def wanted(self, signals: Signals) -> int:
        return self.replicas_for(self._mean.add(signals.load, signals.now))


class Kpa(Baseline):
    """Knative's."""

    look_s = KPA_LOOK_S

    def __init__(self, target: float) -> None:
        super().__init__(target)
        self._stable = WindowMean(KPA_STABLE_S)
        self._panic = WindowMean(KPA_PANIC_S)
        self._stable_load = self._panic_load = 0.0
        self._panicked_s: float | None = None
        self._most = 0  # of this panic

    def see(self, signals: Signals) -> None:
        self._stable_load = self._stable.add(signals.load, signals.now)
        self._panic_load = self._panic.add(signals.load, signals.now)

    def wanted(self, signals: Signals) -> int:
        ready = max(1, signals.running)
        least = ready // MOST_DOWN
        stable = max(least, self.replicas_for(self._stable_load))
        panic = max(least, self.replicas_for(self._panic_load))
        if self._panic_load / self.target >= KPA_PANIC_LOAD * ready:
            self._most = self._most if self._panicked_s is not None else ready
            self._panicked_s = signals.now
        elif self._panicked_s is not None and signals.now - self._panicked_s > KPA_STABLE_S:
            self._panicked_s = None
        if self._panicked_s is None:
            return stable
        self._most = max(self._most, panic)
        return self._most


class Apa(Baseline):
    """AIBrix's."""

    look_s = APA_LOOK_S

    def __init__(self, target: float) -> None:
        super().__init__(target)
        self._mean = WindowMean(APA_WINDOW_S)
        self._load = 0.0
        self._highest = HighestSince()

    def see(self, signals: Signals) -> None:
        self._load = self._mean.add(signals.load, signals.now)

    def wanted(self, signals: Signals) -> int:
        present = max(1, signals.target)
        use = self._load / present / self.target
        wanted = present
        if not 1.0 - APA_DOWN <= use <= 1.0 + APA_UP:
            wanted = min(max(self.replicas_for(self._load), present // MOST_DOWN), MOST_DOWN * present)
        return max(wanted, min(present, self._highest.add(wanted, signals.now, APA_COOL_DOWN_S, present)))


class Static(Baseline):
    """A fixed number: its target."""

    def wanted(self, signals: Signals) -> int:
        return round(self.target)


class Clairvoyant(Baseline):
    """Follows a plan: the replicas of each second from `began_s` on."""

    def __init__(self, plan: Sequence[int], began_s: float) -> None:
        super().__init__(1.0)
        self._plan = plan
        self._began_s = began_s

    def wanted(self, signals: Signals) -> int:
        second = int(max(0.0, signals.now - self._began_s))
        return self._plan[min(second, len(self._plan) - 1)]


def clairvoyant_plan(
    runs: Sequence[tuple[float, float]], slots: float, target: float, start_s: float, span_s: float
) -> list[int]:
    """The replicas to have asked for in each second, knowing what comes.

    Args:
        runs: when each request comes, and for how long it runs.
        target: requests per slot: more replicas the lower it is.
    """
    seconds = math.ceil(span_s) + 1
    change = [0] * (seconds + 1)
    for at_s, run_s in runs:
        if at_s < seconds:
            change[int(at_s)] += 1
            change[min(seconds, int(at_s + run_s) + 1)] -= 1
    needed: list[int] = []
    running = 0
    for more in change[:seconds]:
        running += more
        needed.append(max(1, math.ceil(running / (slots * target) - 1e-9)))
    _fill_gaps(needed, math.ceil(start_s) + 1)
    lead = math.ceil(start_s) + 1
    highest = HighestSince()
    plan = [0] * seconds
    for second in reversed(range(seconds)):  # the highest of this second and of a start that comes
        plan[second] = highest.add(needed[second], -float(second), float(lead))
    return plan


def _fill_gaps(needed: list[int], least: int) -> None:
    """Keep a replica where it is wanted again sooner than a start takes."""
    for level in range(2, max(needed) + 1):
        last: int | None = None
        for second, number in enumerate(needed):
            if number >= level:
                if last is not None and 1 < second - last <= least:
                    needed[last + 1 : second] = [max(level, one) for one in needed[last + 1 : second]]
                last = second
