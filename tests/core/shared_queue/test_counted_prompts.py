"""A prompt counts for its tenant as its engine has counted it, from the first token on."""

from __future__ import annotations

from typing import Any

from serve_app.core.shared_queue.messages import CreditUsage, TokenProgress
from serve_app.types import RequestClass
from tests.core.shared_queue.test_faults import answer, connected, full

LOW = RequestClass.LOW


def test_a_prompt_is_charged_as_its_engine_has_counted_it_before_the_request_ends_and_once() -> None:
    world = connected(slots=1, routers=1)
    line = world.routers["r0"].line
    (first,) = full(world)
    waits = world.arrive("r0", LOW)
    world.settle(2)

    def told(kind: type[Any]) -> list[Any]:
        message = line.next_message(world.now, beat=True)
        assert message is not None
        return [one for one in message.events if isinstance(one, kind)]

    line.in_flight.progress(first, 1, 100_000)  # of credit
    assert [(one.prompt_tokens, one.output_tokens) for one in told(CreditUsage)] == [(100_000, 1)]
    world.cancel("r0", first)
    assert [one.prompt_tokens for one in told(CreditUsage)] == [0]
    world.deliver(answer(world, "r0"))
    line.on_lost(world.now)
    world.settle(2)
    assert waits.state == "runs"
    line.in_flight.progress(f"q{waits.number}", 2, 90_000)  # of the queue
    assert told(TokenProgress) == [(line.in_flight.running[f"q{waits.number}"].ticket, 2, 90_000)]
