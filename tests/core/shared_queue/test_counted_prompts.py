"""A prompt counts for its tenant as its engine has counted it, from the first token on."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.core.queue import Arrival
from serve_app.core.shared_queue.delivery import RouterSession
from serve_app.core.shared_queue.messages import CreditUsage, Done, TokenProgress
from serve_app.core.shared_queue.router_credit import RouterCredit
from serve_app.core.shared_queue.router_pending import PendingRequest
from serve_app.core.shared_queue.router_running import InFlight
from serve_app.core.shared_queue.states import RouterSessionReply
from serve_app.types import RequestClass
from tests.core.shared_queue.test_faults import answer, connected, full

LOW = RequestClass.LOW


def test_a_prompt_is_charged_as_its_engine_has_counted_it_before_the_request_ends_and_once() -> None:
    world = connected(slots=1, routers=1)
    queue = world.routers["r0"].queue
    (first,) = full(world)
    waits = world.arrive("r0", LOW)
    world.settle(2)

    def reported(kind: type[Any]) -> list[Any]:
        message = queue.next_message(world.now, beat=True)
        assert message is not None
        return [one for one in message.events if isinstance(one, kind)]

    queue.in_flight.progress(first, 1, 100_000)  # it has begun on credit
    known = queue.in_flight.running[first].ticket
    assert reported(TokenProgress) == [(known, 1, 100_000)]
    world.cancel("r0", first)
    assert [(one.ticket, one.prompt_tokens, one.output_tokens) for one in reported(Done)] == [(known, 100_000, 1)]
    world.deliver(answer(world, "r0"))
    queue.on_lost(world.now)
    world.settle(2)
    assert waits.state == "runs"
    queue.in_flight.progress(f"q{waits.number}", 2, 90_000)  # the actor has granted it
    assert reported(TokenProgress) == [(queue.in_flight.running[f"q{waits.number}"].ticket, 2, 90_000)]


@pytest.mark.parametrize("is_counted", [False, True], ids=["at the end", "while it runs"])
def test_a_request_that_continues_on_credit_and_is_never_announced_has_paid_for_its_prompt(is_counted: bool) -> None:
    session = RouterSession("r", 0)
    credit = RouterCredit()
    session.advance(RouterSessionReply.BOOKED)
    in_flight = InFlight(credit, session)
    in_flight.set_reachability("m", "e", True, False)
    credit.add("e", 4, 10_000)
    arrival = Arrival("q", LOW, "t", cost_tokens=1200, prompt_tokens=1000, produced_tokens=100)
    in_flight.begin_on_credit(PendingRequest("m", arrival, 0.0), 0.0)
    in_flight.progress("q", 1, 900 if is_counted else 0)
    in_flight.end("q", 900, 50)
    message = session.next_message(beat=True)
    assert message is not None
    usages = [one for one in message.events if isinstance(one, CreditUsage)]
    assert [(one.prompt_tokens, one.output_tokens) for one in usages] == [(0, 50)]
