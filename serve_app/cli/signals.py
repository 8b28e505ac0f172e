"""Raises SIGINT, SIGTERM and SIGHUP as one exception in the main thread."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """The user or the system ends this process. Not an Exception, so that no error handler swallows it."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Within the context each SIGINT, SIGTERM or SIGHUP raises `Interrupted`, also repeatedly. Main thread only."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise Interrupted(signal.Signals(number).name)

    before = {number: signal.signal(number, on_signal) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
