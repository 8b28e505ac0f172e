"""What a request produced before it was stopped is lost again when it is stopped again."""

from __future__ import annotations

from serve_app.core.queue import Arrival, Preempt
from tests.core.queue.events import HIGH, LOW, admission


def test_a_request_that_goes_on_is_as_dear_as_all_that_it_has_produced() -> None:
    queue = admission(a=2)
    # "again" runs for as long, and has produced as little in this run, but would be prefilled with 500 tokens more
    queue.on_arrive(Arrival("again", LOW, "t", prompt_tokens=10, preemptible=True, produced_tokens=500), 0.0)
    queue.on_arrive(Arrival("new", LOW, "t", prompt_tokens=20, preemptible=True), 0.0)
    assert queue.on_arrive(Arrival("high", HIGH, "t"), 5.0) == [Preempt("new", "a", keeps_place=True)]
