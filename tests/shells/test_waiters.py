"""Who waits for a decision hears of it once, wherever and whenever it is made."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from serve_app.core.admission import Arrival, Grant, Reason, Refuse
from serve_app.errors import NotFound, Overloaded
from serve_app.types import RequestClass
from serve_app.waiters import Granted, Waiters


class Elsewhere:
    """A line that is somewhere else: it only takes events; the test answers, when it likes."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def arrive(self, arrival: Arrival) -> None:
        self.events.append(("arrive", arrival.request_id))

    def cancel(self, request_id: str) -> None:
        self.events.append(("cancel", request_id))


class Nearby(Elsewhere):
    """A line that grants in the very call."""

    def __init__(self, waiters: Waiters) -> None:
        super().__init__()
        self._waiters = waiters

    def arrive(self, arrival: Arrival) -> None:
        super().arrive(arrival)
        self._waiters.perform([Grant(arrival.request_id, "r1", 0.0)])


def arrival(name: str = "a") -> Arrival:
    return Arrival(name, RequestClass.NORMAL, "tenant")


def asking(waiters: Waiters, line: Any, name: str = "a") -> asyncio.Task[Granted]:
    return asyncio.create_task(waiters.granted(line, arrival(name)))


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 5.0))  # against hanging: nothing here waits for anything


def test_a_decision_made_in_the_call_costs_no_turn_of_the_event_loop() -> None:
    async def scenario() -> None:
        waiters = Waiters()
        asked = waiters.granted(Nearby(waiters), arrival())  # type: ignore[arg-type]
        with pytest.raises(StopIteration) as ended:
            asked.send(None)
        assert ended.value.value == Granted("r1", 0.0)

    run(scenario())


def test_a_decision_that_comes_later_and_in_another_order_reaches_whom_it_is_for() -> None:
    async def scenario() -> None:
        waiters, line = Waiters(), Elsewhere()
        requests = {name: asking(waiters, line, name) for name in "abc"}
        await asyncio.sleep(0)
        assert line.events == [("arrive", name) for name in "abc"]
        waiters.perform([Grant("c", "r2", 2.0), Refuse("a", Reason.QUEUE_FULL, 3.0), Grant("unknown", "r1", 0.0)])
        assert await requests["c"] == Granted("r2", 2.0)
        with pytest.raises(Overloaded) as refused:
            await requests["a"]
        assert refused.value.retry_after_s == 3.0
        assert not requests["b"].done()
        waiters.perform([Grant("b", "r1", 4.0)])
        assert await requests["b"] == Granted("r1", 4.0)

    run(scenario())


def test_a_decision_that_comes_twice_counts_once() -> None:
    async def scenario() -> None:
        waiters, line = Waiters(), Elsewhere()
        request = asking(waiters, line)
        await asyncio.sleep(0)
        waiters.perform([Grant("a", "r1", 1.0), Refuse("a", Reason.TIMEOUT, 1.0)])
        assert await request == Granted("r1", 1.0)

    run(scenario())


@pytest.mark.parametrize("granted", [False, True], ids=["undecided", "granted in the same turn"])
def test_who_leaves_before_it_hears_has_told_the_line(granted: bool) -> None:
    async def scenario() -> None:
        waiters, line = Waiters(), Elsewhere()
        request = asking(waiters, line)
        await asyncio.sleep(0)
        if granted:
            waiters.perform([Grant("a", "r1", 1.0)])
        request.cancel()
        await asyncio.wait({request})
        assert request.cancelled()
        assert line.events == [("arrive", "a"), ("cancel", "a")]
        waiters.perform([Grant("a", "r1", 1.0)])  # too late: for nobody

    run(scenario())


def test_a_second_request_of_a_name_is_refused_and_the_first_one_goes_on_waiting() -> None:
    async def scenario() -> None:
        waiters, line = Waiters(), Elsewhere()
        first = asking(waiters, line)
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="waits already"):
            await waiters.granted(line, arrival())  # type: ignore[arg-type]
        waiters.perform([Grant("a", "r1", 1.0)])
        assert await first == Granted("r1", 1.0)
        assert line.events == [("arrive", "a")]

    run(scenario())


def test_who_is_dismissed_is_told_why_and_leaves_the_line() -> None:
    async def scenario() -> None:
        waiters, line = Waiters(), Elsewhere()
        requests = [asking(waiters, line, name) for name in "ab"]
        await asyncio.sleep(0)
        waiters.perform([Grant("a", "r1", 1.0)])
        waiters.dismiss(line, lambda: NotFound("the model is gone"))  # type: ignore[arg-type]
        assert await requests[0] == Granted("r1", 1.0)  # decided before
        with pytest.raises(NotFound, match="gone"):
            await requests[1]
        assert line.events == [("arrive", "a"), ("arrive", "b"), ("cancel", "b")]

    run(scenario())


def test_an_error_after_the_arrival_gives_back_what_was_granted() -> None:
    class Breaking(Nearby):
        def arrive(self, arrival: Arrival) -> None:
            super().arrive(arrival)
            raise AttributeError("when")

    async def scenario() -> None:
        waiters = Waiters()
        line = Breaking(waiters)
        with pytest.raises(AttributeError):
            await asking(waiters, line)
        assert line.events == [("arrive", "a"), ("cancel", "a")]
        assert not waiters.alive()

    run(scenario())
