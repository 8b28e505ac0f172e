"""Engines that crash soon after their start, again and again: how long the next one waits; the clock is a number."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from serve_app.core.memory import Device, DrainRequest, EngineReport, Rank
from serve_app.core.memory.crash_loops import FIRST_PAUSE_S, FREE, KEPT_S, KILLED, MAX_PAUSE_S, CrashLoops
from serve_app.core.quota import Quota
from serve_app.core.times import ENGINE_SILENT_S

START_S = 10.0


class Model:
    """A model whose engines start within `START_S`, if they may, and crash."""

    def __init__(self) -> None:
        self.quota = Quota(1, {}, 0.0)
        self.now = 0.0
        self.number = 0
        self.quota.on_devices([Device("n", 0, 100, 0)], 0.0)

    def start(self) -> float:
        """Start one; returns how long it waited to load."""
        self.number += 1
        report = EngineReport(f"e{self.number}", "m", (Rank("n"),), 100, 100, processes=(("n", ((self.number, 1),)),))
        began = self.now
        while not (reply := self.quota.on_engine(report, self.now)).may_load:
            self.now += 0.5
        waited_s = self.now - began
        self.now += START_S
        self.report = replace(report, holds=reply.holds, kv_tokens=10, kv_bytes=1)
        self.quota.on_engine(self.report, self.now)
        return waited_s

    def crash(self, after_s: float) -> None:
        self.now += after_s
        self.quota.on_engine(self.report, self.now)
        self.now += ENGINE_SILENT_S
        self.quota.on_processes_gone(self.report.owner, self.now)

    def end(self) -> None:
        self.quota.on_engine(replace(self.report, gone=True), self.now)


def test_the_pauses_of_a_model_that_crashes_again_and_again_double_up_to_a_bound() -> None:
    model = Model()
    waits = []
    for _ in range(FREE + 6):
        waits.append(model.start())
        model.crash(1.0)
    assert waits[: FREE + 1] == [0.0] * (FREE + 1)
    pauses = [min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0**more) for more in range(5)]
    assert waits[FREE + 1 :] == pauses
    (loop,) = model.quota.grants.crash_loops.all(model.now)
    assert (loop.model, loop.crashes, loop.pause_s) == ("m", FREE + 6, MAX_PAUSE_S)


def test_an_engine_that_has_run_longer_than_it_took_to_start_ends_the_loop() -> None:
    model = Model()
    for _ in range(FREE + 1):
        model.start()
        model.crash(1.0)
    assert model.start() == FIRST_PAUSE_S
    model.crash(3 * START_S)
    assert model.start() == 0.0
    assert model.quota.grants.crash_loops.all(model.now) == []


def test_engines_that_end_on_purpose_do_not_count() -> None:
    model = Model()
    for number in range(2 * (FREE + 1)):
        assert model.start() == 0.0
        if number % 2:
            model.end()
        else:
            model.quota.drain(DrainRequest(model.report.owner), model.now)
            model.crash(1.0)


def test_crashes_of_long_ago_do_not_count() -> None:
    loops = CrashLoops()
    for number in range(FREE + 1):
        loops.on_crash("m", 1.0, 0.0, float(number))
    assert loops.pause_s("m", float(FREE)) == FIRST_PAUSE_S
    assert loops.pause_s("other", float(FREE)) == 0.0
    assert loops.pause_s("m", FREE + KEPT_S) == 0.0
    assert loops.all(FREE + KEPT_S) == []


def test_why_the_last_engine_of_a_model_has_died_is_kept_for_a_while() -> None:
    model = Model()
    model.start()
    model.crash(1.0)
    assert why(model) == [KILLED], "nobody could say why"
    model.start()
    model.report = replace(model.report, failed="out of memory")
    model.crash(1.0)
    assert why(model) == ["out of memory"], "that it is gone is no better cause"
    assert why(model, later_s=KEPT_S) == []


def test_an_engine_that_ends_as_it_was_asked_has_not_failed() -> None:
    model = Model()
    model.start()
    model.end()
    assert why(model) == []


def why(model: Model, later_s: float = 0.0) -> list[str]:
    return [one.why for one in model.quota.grants.crash_loops.failures(model.now + later_s)]


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.booleans()), max_size=40))
@example([(1.0, True)] * 6 + [(446.2037597205621, True)])  # by rounding it was 60.00000000000006 s once
def test_no_pause_is_longer_than_the_bound(crashes: list[tuple[float, bool]]) -> None:
    loops = CrashLoops()
    now = 0.0
    for later_s, is_short in crashes:
        now += later_s
        loops.on_crash("m", 10.0, 1.0 if is_short else 20.0, now)
        assert 0.0 <= loops.pause_s("m", now) <= MAX_PAUSE_S
