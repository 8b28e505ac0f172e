"""A bound for every test: one that waits for ever fails where it stands, and the tests after it run.

`make test` ends a process whose test takes `faulthandler_timeout`, and with it all tests that the process had left. So
a test is ended here first, by an exception in the main thread: from its set-up, its body or its tear-down, and again
every few seconds while something catches it and waits anew. What blocks in C without looking at signals is left to
faulthandler.

Invariant: the exception is raised within a test's own phases, never in pytest's code between them.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Generator, Iterator
from types import FrameType

import pytest

SHARE = 0.85  # of `faulthandler_timeout`: the rest is for a tear-down that takes its time, too
USUAL_S = 3600.0  # for `faulthandler_timeout` where it is not set; as `make test-long` sets it
TEAR_DOWN_SHARE = 0.1  # what a tear-down has at least, however long the test took
AGAIN_S = 2.0


class TimeLimit:
    """Bounds each test's phases together.

    Args:
        limit_s: of a test.
        tear_down_s: what its tear-down has at least.
    """

    def __init__(self, limit_s: float, tear_down_s: float) -> None:
        self._limit_s = limit_s
        self._tear_down_s = tear_down_s
        self._deadline = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Generator[None, object, object]:
        self._deadline = time.monotonic() + self._limit_s
        with self._bounded():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        with self._bounded():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Generator[None, object, object]:
        self._deadline = max(self._deadline, time.monotonic() + self._tear_down_s)
        with self._bounded():
            return (yield)

    @contextlib.contextmanager
    def _bounded(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # Python's signals are the main thread's
            yield
            return
        before = signal.signal(signal.SIGALRM, self._end)
        signal.setitimer(signal.ITIMER_REAL, max(0.001, self._deadline - time.monotonic()), AGAIN_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)

    def _end(self, number: int, frame: FrameType | None) -> None:
        pytest.fail(f"the test waits for something that does not come: not done after {self._limit_s:g} s")


def pytest_configure(config: pytest.Config) -> None:
    stuck_s = float(config.getini("faulthandler_timeout") or USUAL_S)
    config.pluginmanager.register(TimeLimit(SHARE * stuck_s, TEAR_DOWN_SHARE * stuck_s), "time limit")
