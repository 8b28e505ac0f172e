"""Waits of the tests, bounded in seconds of a quiet machine.

A bound says what is promised where nothing else uses the machine. A machine may be three times slower for an hour,
and whatever a test waits for then takes three times as long, without a fault of ours. So a wait is bounded by a clock
of this module: every half second a thread does the same small piece of work, and while the work takes longer than on
the quiet machine, a second of this clock takes as much longer.

`wait_until` is the one loop that waits for a condition that nothing signals. `patient` is for a bound that others keep:
the timeout of a client, a process or a socket. `quiet_time` measures a duration that is promised. `during` is for a
span that is the same on every machine, as that of a load.

Invariant: a second of this clock is at least one of the wall's, and at most `SLOWEST`.
"""

from __future__ import annotations

import functools
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

PERIOD_S = 0.5  # between two pieces of work: they take 2 % of a core
ITERATIONS = 200_000
ITERATION_S = 50e-9  # one of `WORK` on the quiet machine
# 10 ms: above the slice that a kernel gives to a process, so that the wait for a core is in it. On a busy machine 2 ms
# were found as short as ever, while all else took four times as long.
WORK_S = ITERATIONS * ITERATION_S
SAMPLES = 5  # the slowness is their median: one pause of the machine changes nothing
FIRST_SAMPLES = 3
SLOWEST = 8.0  # a wait that does not end at all ends then
POLL_S = 0.02  # between two looks
# Names of a module, as the program had that measured `ITERATION_S`: those of a function are three times as fast.
WORK = compile("s = 0\nfor i in range(n):\n    s += i\n", "the work that is measured", "exec")
TRUE = object()  # as `wanted`: whatever is true

# Those of the real machine, also for a test that has a clock of its own in their place.
_now = time.monotonic
_sleep = time.sleep


class QuietClock:
    """Counts seconds of a quiet machine. Pure: it is told what time it is and how long the work took.

    Args:
        work_s: of the work on the quiet machine.
        now: the wall's seconds, as in all methods.
    """

    def __init__(self, work_s: float, now: float) -> None:
        self._work_s = work_s
        self._factors: deque[float] = deque(maxlen=SAMPLES)
        self._counted_to = now
        self._passed_s = 0.0

    @property
    def slowness(self) -> float:
        """How many of the wall's seconds a second of the quiet machine takes at present."""
        return statistics.median(self._factors) if self._factors else 1.0

    def on_sample(self, took_s: float, now: float) -> None:
        """The work has ended and took so long. What has passed is counted by the slowness from before."""
        self.read(now)
        self._factors.append(min(max(took_s / self._work_s, 1.0), SLOWEST))

    def read(self, now: float) -> float:
        """The seconds since the clock was made."""
        self._passed_s += max(0.0, now - self._counted_to) / self.slowness
        self._counted_to = max(now, self._counted_to)
        return self._passed_s


@dataclass(frozen=True, slots=True)
class Met(Generic[T]):
    """A condition that was met: what the look has found, and the wall's and the quiet machine's seconds until then."""

    found: T
    wall_s: float
    quiet_s: float


def is_met(found: object, wanted: object = TRUE) -> bool:
    """Whether what is found is true, or equals `wanted`."""
    return bool(found) if wanted is TRUE else found == wanted


class Machine:
    """Measures how slow a machine is, and waits by that.

    Args:
        work: the piece of work.
        now, sleep: the wall's seconds.
    """

    def __init__(
        self,
        work: Callable[[], object],
        now: Callable[[], float] = _now,
        sleep: Callable[[float], object] = _sleep,
        work_s: float = WORK_S,
    ) -> None:
        self._work = work
        self._now = now
        self._sleep = sleep
        self._lock = threading.Lock()
        self._clock = QuietClock(work_s, now())

    @property
    def slowness(self) -> float:
        with self._lock:
            return self._clock.slowness

    def quiet_time(self) -> float:
        with self._lock:
            return self._clock.read(self._now())

    def measure(self, due: float | None = None) -> None:
        """Do the work once. `due`: since when it could have begun; its wait for a core counts as the work does."""
        began = self._now() if due is None else due
        self._work()
        ended = self._now()
        with self._lock:
            self._clock.on_sample(ended - began, ended)

    def measure_for_ever(self) -> None:
        """The thread."""
        while True:
            due = self._now() + PERIOD_S
            self._sleep(PERIOD_S)  # until the next piece of work
            self.measure(due)

    def wait_until(
        self,
        look: Callable[[], T],
        bound_s: float,
        goal: str,
        *,
        wanted: object = TRUE,
        seen: Callable[[], object] | None = None,
        poll_s: float = POLL_S,
    ) -> Met[T]:
        """See the function of this name."""
        began = self._now()
        quiet_began_s = self.quiet_time()
        while True:
            looked = self._now()
            asked_s = self.quiet_time() - quiet_began_s
            found = look()
            if is_met(found, wanted):
                return Met(found, self._now() - began, self.quiet_time() - quiet_began_s)
            if asked_s > bound_s:
                raise AssertionError(
                    f"{goal}: not within {bound_s:g} s of a quiet machine, {looked - began:.1f} s of this one "
                    f"(slowness {self.slowness:.1f}); last seen: {found!r}"
                    + ("" if wanted is TRUE else f", wanted: {wanted!r}")
                    + ("" if seen is None else f"; {seen()}")
                )
            self._sleep(max(poll_s, self._now() - looked))  # bound: bound_s; looks take half of the time at most


_STARTING = threading.Lock()


@functools.cache
def _measured() -> Machine:
    machine = Machine(lambda: exec(WORK, {"n": ITERATIONS}))
    for _ in range(FIRST_SAMPLES):
        machine.measure()
    threading.Thread(target=machine.measure_for_ever, name="slowness", daemon=True).start()
    return machine


def _machine() -> Machine:
    """This one, measured from the first use on: a process whose tests wait for nothing has no thread for it."""
    with _STARTING:
        return _measured()


def wait_until(
    look: Callable[[], T],
    bound_s: float,
    goal: str,
    *,
    wanted: object = TRUE,
    seen: Callable[[], object] | None = None,
    poll_s: float = POLL_S,
) -> Met[T]:
    """Look until what is found is true, or equals `wanted`.

    Args:
        look: what it raises ends the wait.
        bound_s: seconds of a quiet machine. A look that began within them counts, however long it takes.
        goal: what is waited for, in words.
        seen: what a failure tells besides what was found.
        poll_s: between two looks, at least: one look costs others something, too.

    Raises:
        AssertionError: a look that began after the bound has not found it.
    """
    return _machine().wait_until(look, bound_s, goal, wanted=wanted, seen=seen, poll_s=poll_s)


def slowness() -> float:
    """How many times slower than the quiet machine this one is at present: 1 to `SLOWEST`."""
    return _machine().slowness


def quiet_time() -> float:
    """Seconds of a quiet machine, since any moment: for differences, in place of the wall's."""
    return _machine().quiet_time()


def patient(bound_s: float) -> float:
    """The wall's seconds for a bound that is not kept here: a client's timeout, the end of a process."""
    return bound_s * slowness()


def during(span_s: float) -> Iterator[float]:
    """Yields the wall's seconds that have passed, again and again until the span is over."""
    began = _now()
    while (passed_s := _now() - began) < span_s:
        yield passed_s
