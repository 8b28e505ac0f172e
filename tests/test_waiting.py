"""Waits by a clock that goes as fast as the machine: made-up work on a made-up machine, and no wait of its own."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Callable
from unittest import mock

import pytest

from tests import waiting
from tests.requires import ROOT
from tests.waiting import SAMPLES, SLOWEST, TRUE, Machine, QuietClock

WORK_S = 0.01
QUIET_S = 0.002  # of the work: below `WORK_S`, as on a faster machine


class World:
    """A machine whose time passes with sleeps and work alone."""

    def __init__(self, slowness: float = 1.0) -> None:
        self.now = 100.0
        self.slowness = slowness
        self.slept: list[float] = []
        self.machine = Machine(self.work, lambda: self.now, self.sleep, WORK_S)

    def work(self) -> None:
        self.now += WORK_S * self.slowness

    def sleep(self, seconds: float) -> None:
        """The thread measures meanwhile, as often as it is time."""
        self.slept.append(seconds)
        self.now += seconds

    def measured(self, times: int = SAMPLES) -> World:
        for _ in range(times):
            self.machine.measure()
        return self

    def looks(self, takes_s: float, found: Callable[[float], object]) -> Callable[[], object]:
        """A look of this length, which finds what is there at its beginning."""
        began = self.now

        def look() -> object:
            seen = found(self.now - began)
            self.now += takes_s
            return seen

        return look


def clock(*took_s: float) -> QuietClock:
    made = QuietClock(WORK_S, 0.0)
    for one_s in took_s:
        made.on_sample(one_s, 0.0)
    return made


def test_a_second_of_a_quiet_machine_is_a_second() -> None:
    for made in (clock(), clock(WORK_S), clock(QUIET_S)):
        assert (made.slowness, made.read(10.0)) == (1.0, 10.0)


def test_a_second_of_a_machine_three_times_slower_is_a_third() -> None:
    made = clock(3 * WORK_S)
    assert (made.slowness, made.read(30.0)) == (pytest.approx(3.0), pytest.approx(10.0))


def test_what_has_passed_is_counted_by_the_slowness_of_its_time() -> None:
    made = clock()
    made.on_sample(4 * WORK_S, 8.0)
    assert made.read(16.0) == pytest.approx(8.0 + 2.0)
    assert made.read(12.0) == pytest.approx(10.0), "the clock never goes back"


def test_one_pause_of_the_machine_changes_nothing_and_a_slow_hour_does() -> None:
    usual = [WORK_S] * SAMPLES
    assert clock(*usual, 1000 * WORK_S).slowness == 1.0
    assert clock(*usual, *[3 * WORK_S] * SAMPLES).slowness == pytest.approx(3.0)
    assert clock(*[3 * WORK_S] * SAMPLES, *usual).slowness == 1.0


def test_a_wait_has_an_end_however_slow_the_machine_is() -> None:
    assert clock(1000 * WORK_S).slowness == SLOWEST


def test_work_that_had_to_wait_for_a_core_counts_from_when_it_could_have_begun() -> None:
    world = World()
    due = world.now
    world.now += 3 * WORK_S
    world.machine.measure(due)
    assert world.machine.slowness == pytest.approx(4.0)


@pytest.mark.parametrize("slowness", [1.0, 3.0])
def test_a_wait_ends_at_its_bound_in_seconds_of_the_quiet_machine(slowness: float) -> None:
    world = World(slowness).measured()
    began = world.now
    with pytest.raises(AssertionError) as failed:
        world.machine.wait_until(lambda: 7, 10.0, "eight", wanted=8, seen=lambda: "a log")
    assert 10.0 * slowness < world.now - began < 10.1 * slowness
    for part in ("eight: not within 10 s", f"slowness {slowness:.1f}", "last seen: 7", "wanted: 8", "a log"):
        assert part in str(failed.value)


def test_a_wait_tells_what_was_found_and_how_long_it_took() -> None:
    world = World(4.0).measured()
    look = world.looks(0.0, lambda passed_s: passed_s >= 2.0 and "there")
    met = world.machine.wait_until(look, 1.0, "it", poll_s=0.25)
    assert (met.found, met.wall_s, met.quiet_s) == ("there", pytest.approx(2.0), pytest.approx(0.5))


def test_a_look_counts_that_began_in_time_however_long_it_takes() -> None:
    world = World()
    assert world.machine.wait_until(world.looks(60.0, lambda _: "late"), 1.0, "it").found == "late"
    with pytest.raises(AssertionError, match="last seen: None"):
        world.machine.wait_until(world.looks(60.0, lambda _: None), 1.0, "it")


def test_looks_take_half_of_the_time_at_most() -> None:
    world = World()
    world.machine.wait_until(world.looks(0.5, lambda passed_s: passed_s >= 2.0), 10.0, "it")
    world.machine.wait_until(world.looks(0.0, lambda passed_s: passed_s > 0.25), 10.0, "it", poll_s=0.1)
    assert world.slept == [0.5, 0.5, 0.1, 0.1, 0.1]


@pytest.mark.parametrize(
    ("found", "wanted", "ends"), [(0, 0, True), (0, TRUE, False), ([1], TRUE, True), ([1], [], False)]
)
def test_what_is_wanted_may_be_nothing(found: object, wanted: object, ends: bool) -> None:
    world = World()
    if ends:
        assert world.machine.wait_until(lambda: found, 1.0, "it", wanted=wanted).found == found
    else:
        with pytest.raises(AssertionError):
            world.machine.wait_until(lambda: found, 1.0, "it", wanted=wanted)


def test_what_a_look_raises_ends_the_wait() -> None:
    world = World()
    with pytest.raises(ZeroDivisionError):
        world.machine.wait_until(lambda: 1 / 0, 1.0, "it")
    assert world.slept == []


def test_the_thread_measures_again_and_again() -> None:
    world = World(2.0)
    turns = itertools.count()

    def sleep(seconds: float) -> None:
        world.sleep(seconds)
        if next(turns) == SAMPLES:
            raise InterruptedError

    machine = Machine(world.work, lambda: world.now, sleep, WORK_S)
    with pytest.raises(InterruptedError):
        machine.measure_for_ever()
    assert machine.slowness == pytest.approx(2.0)
    assert world.slept == [waiting.PERIOD_S] * (SAMPLES + 1)


def test_this_machine_is_measured_by_one_thread_whatever_time_a_test_makes_up() -> None:
    made_up = mock.patch("time.monotonic", return_value=5.0)
    no_sleep = mock.patch("time.sleep", side_effect=AssertionError("it has slept"))
    with made_up, no_sleep:
        assert waiting.wait_until(lambda: "here", 1.0, "it").found == "here"
        before = waiting.quiet_time()
        assert 1.0 <= waiting.slowness() <= SLOWEST
        assert waiting.patient(3.0) >= 3.0
        assert waiting.wait_until(lambda: waiting.quiet_time() > before, 60.0, "the clock goes on").found
    assert [thread.daemon for thread in threading.enumerate() if thread.name == "slowness"] == [True]


def test_a_process_that_waits_for_nothing_measures_nothing() -> None:
    code = "import threading, tests.waiting; print(threading.active_count())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_a_span_is_the_wall_s_on_every_machine() -> None:
    with mock.patch.object(waiting, "_now", side_effect=[0.0, 0.0, 4.0, 9.9, 10.0]):
        assert list(waiting.during(10.0)) == [0.0, 4.0, 9.9]
