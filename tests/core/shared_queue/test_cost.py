"""What an event costs does not grow with what runs and waits beside it: counted in steps of the interpreter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from serve_app.core.memory import SessionRequest, session_name
from tests.core.shared_queue.world import MODEL, World


def steps(act: Callable[[], Any]) -> int:
    """Bytecode instructions that a call takes."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


def review_steps(sessions: int) -> int:
    """Of a look at the sessions that wait, beside so many open ones on two engines, which take no more."""
    there = World({"e0": (4, 10_000), "e1": (4, 10_000)}, 1)
    there.settle(6)
    for number in range(sessions + 4):
        wait_until = there.now + 60.0 if number >= sessions else None
        name = session_name("t", f"s{number}")
        ask = SessionRequest(name, MODEL, 10, 60.0, per_engine=sessions // 2, wait_until=wait_until)
        there.quota.on_open_session(ask, there.now)
    admission = there.quota.queue.session_admission
    assert len(admission.waiting()) == 4
    return steps(lambda: admission.on_tick(there.now))


def test_a_look_at_the_sessions_that_wait_does_not_look_at_the_open_ones() -> None:
    assert review_steps(400) <= review_steps(20)
