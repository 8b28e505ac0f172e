"""A request that asks its model's queue gets one answer, wherever and whenever that is decided."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from serve_app.core.limits import RouterLimits
from serve_app.core.queue import Preempt
from serve_app.core.queue.admission import Action, Arrival, Grant, QueuePolicy, RefusalReason, Refuse
from serve_app.errors import NotFound, Overloaded
from serve_app.router.model_queue import ModelQueue
from serve_app.router.queue_client import QueueClient
from serve_app.types import RequestClass


class Elsewhere:
    """The core as a recorder: it takes events, and the test answers, when it likes."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.at_once: Callable[[Arrival], list[Action]] = lambda arrival: []
        self.limits = RouterLimits("elsewhere", lambda event: None)

    def serve(self, model: str, policy: QueuePolicy) -> None: ...

    def on_arrive(self, model: str, arrival: Arrival, now: float) -> list[Action]:
        self.events.append(("arrive", arrival.request_id))
        return self.at_once(arrival)

    def on_cancel(self, request_id: str, now: float) -> list[Action]:
        self.events.append(("cancel", request_id))
        return []

    def next_message(self, now: float, *, beat: bool = False) -> None: ...

    def next_due(self) -> None: ...


async def _nothing(_: Any) -> Any:
    raise AssertionError("nothing is sent")


class Lab:
    """A queue whose core is `Elsewhere`."""

    def __init__(self) -> None:
        self.client = QueueClient("router", _nothing, _nothing)
        self.core = self.client.core = Elsewhere()  # type: ignore[assignment]
        self.queue = ModelQueue(self.client, "m", QueuePolicy(max_queued=10, max_wait_s=10.0))

    def asking(self, name: str = "a") -> asyncio.Task[Grant]:
        return asyncio.create_task(self.queue.acquire(arrival(name)))


def arrival(name: str = "a") -> Arrival:
    return Arrival(name, RequestClass.NORMAL, "tenant")


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 5.0))  # against hanging: nothing here waits for anything


def test_a_decision_made_in_the_call_costs_no_turn_of_the_event_loop() -> None:
    async def scenario() -> None:
        lab = Lab()
        lab.core.at_once = lambda arrival: [Grant(arrival.request_id, "r1", 0.0)]
        asked = lab.queue.acquire(arrival())
        with pytest.raises(StopIteration) as ended:
            asked.send(None)
        assert ended.value.value == Grant("a", "r1", 0.0)

    run(scenario())


def test_a_decision_that_comes_later_and_in_another_order_reaches_its_request() -> None:
    async def scenario() -> None:
        lab = Lab()
        requests = {name: lab.asking(name) for name in "abc"}
        await asyncio.sleep(0)
        assert lab.core.events == [("arrive", name) for name in "abc"]
        lab.client.apply_actions(
            [Grant("c", "r2", 2.0), Refuse("a", RefusalReason.QUEUE_FULL, 3.0), Grant("unknown", "r1", 0.0)]
        )
        assert await requests["c"] == Grant("c", "r2", 2.0)
        with pytest.raises(Overloaded) as refused:
            await requests["a"]
        assert refused.value.retry_after_s == 3.0
        assert not requests["b"].done()
        lab.client.apply_actions([Grant("b", "r1", 4.0)])
        assert await requests["b"] == Grant("b", "r1", 4.0)

    run(scenario())


def test_a_decision_that_comes_twice_counts_once() -> None:
    async def scenario() -> None:
        lab = Lab()
        request = lab.asking()
        await asyncio.sleep(0)
        lab.client.apply_actions([Grant("a", "r1", 1.0), Refuse("a", RefusalReason.TIMEOUT, 1.0)])
        assert await request == Grant("a", "r1", 1.0)

    run(scenario())


@pytest.mark.parametrize("granted", [False, True], ids=["undecided", "granted in the same turn"])
def test_a_request_that_leaves_before_its_answer_is_cancelled_in_the_queue(granted: bool) -> None:
    async def scenario() -> None:
        lab = Lab()
        request = lab.asking()
        await asyncio.sleep(0)
        if granted:
            lab.client.apply_actions([Grant("a", "r1", 1.0)])
        request.cancel()
        await asyncio.wait({request})
        assert request.cancelled()
        assert lab.core.events == [("arrive", "a"), ("cancel", "a")]
        lab.client.apply_actions([Grant("a", "r1", 1.0)])  # too late: for nobody
        assert not lab.client.requests

    run(scenario())


def test_a_second_request_of_an_id_is_refused_and_the_first_one_goes_on_waiting() -> None:
    async def scenario() -> None:
        lab = Lab()
        first = lab.asking()
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="waits or runs already"):
            await lab.queue.acquire(arrival())
        lab.client.apply_actions([Grant("a", "r1", 1.0)])
        assert await first == Grant("a", "r1", 1.0)
        assert lab.core.events == [("arrive", "a")]

    run(scenario())


def test_requests_that_wait_are_dismissed_with_the_reason_and_those_granted_are_not() -> None:
    async def scenario() -> None:
        lab = Lab()
        requests = [lab.asking(name) for name in "ab"]
        await asyncio.sleep(0)
        lab.client.apply_actions([Grant("a", "r1", 1.0)])
        lab.queue.refuse_all(lambda: NotFound("the model is gone"))
        assert await requests[0] == Grant("a", "r1", 1.0)  # decided before
        with pytest.raises(NotFound, match="gone"):
            await requests[1]
        assert lab.core.events == [("arrive", "a"), ("arrive", "b"), ("cancel", "b")]

    run(scenario())


def test_an_error_after_the_arrival_gives_back_what_was_granted() -> None:
    async def scenario() -> None:
        lab = Lab()

        def breaks(arrival: Arrival) -> list[Action]:
            lab.client.apply_actions([Grant(arrival.request_id, "r1", 0.0)])
            raise AttributeError("when")

        lab.core.at_once = breaks
        with pytest.raises(AttributeError):
            await lab.asking()
        assert lab.core.events == [("arrive", "a"), ("cancel", "a")]
        assert not lab.client.requests

    run(scenario())


def test_a_request_that_is_stopped_with_the_message_that_grants_it_has_its_grant_when_it_is_reported() -> None:
    async def scenario() -> None:
        lab = Lab()
        reported = list[str]()
        lab.queue.on_preempt = lambda stop: reported.append(f"stop {stop.request_id}")

        async def ask() -> None:
            reported.append(f"grant {(await lab.queue.acquire(arrival())).replica_id}")

        asked = asyncio.create_task(ask())
        await asyncio.sleep(0)
        lab.client.apply_actions([Grant("a", "r1", 0.0), Preempt("a", "r1", keeps_place=True)])
        await asked
        await asyncio.sleep(0)
        assert reported == ["grant r1", "stop a"]

    run(scenario())
