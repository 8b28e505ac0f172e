"""The simulations of `benchmarks.line_attack`: who stays is served in the end, and what was starved is counted."""

from __future__ import annotations

import asyncio
import json
import math

import pytest

from benchmarks.abuse.clients import BAD_BODIES, Crowd
from benchmarks.line_attack.cases import POLICY, Loop
from benchmarks.line_attack.main import BARS, HIGH, LOW, MIXES, NORMAL, QUICK_MIXES, crowd, people, policy, value_of
from benchmarks.line_attack.network import ROUND_TRIP_S, Asked, Network
from benchmarks.line_attack.staying import ANSWER_S, SLOTS, WINDOW_S, Granted, Staying
from benchmarks.line_attack.staying import Crowd as Clients


def test_clients_who_stay_fill_the_slots_and_each_is_answered_in_turn() -> None:
    run = Staying([*people(HIGH), *crowd(NORMAL, 4, 20)], policy(), seed=1)
    run.run(180.0)
    served = sum(one.at_s >= WINDOW_S for one in run.granted)
    assert served == pytest.approx(SLOTS / ANSWER_S * (180.0 - WINDOW_S), rel=0.1)
    assert run.waits(NORMAL)
    assert run.starved() == 0


def test_the_same_seed_gives_the_same_run() -> None:
    first, second, other = (Staying([*crowd(LOW)], policy(), seed) for seed in (1, 1, 2))
    for run in (first, second, other):
        run.run(60.0)
    assert first.granted == second.granted != other.granted


def test_a_class_and_a_tenant_that_get_less_than_their_parts_are_starved() -> None:
    run = Staying([], policy(), seed=1)
    a = (LOW, "a")
    b = (LOW, "b")
    above = (HIGH, "people")
    run.wait_spans = {a: [(0.0, 120.0)], b: [(0.0, 90.0), (90.0, 120.0)]}
    run.largest = {a: 100, b: 100, above: 100}
    run.run(120.0)
    run.granted = [Granted(61.0, above, 100_000, 0.0)]
    assert run.starved() == 3  # of 5,000 tokens of its part the class got none, nor did either tenant
    run.granted += [Granted(62.0, a, 5_200, 0.0)]
    assert run.starved() == 1
    run.granted += [Granted(63.0, b, 2_700, 0.0)]
    assert run.starved() == 0
    run.wait_spans[b] = [(0.0, 90.0), (91.0, 120.0)]
    run.granted.pop()
    assert run.starved() == 0  # it did not wait throughout


def test_a_request_takes_a_round_trip_where_its_router_has_no_credit() -> None:
    network = Network({"e": (4, 10_000)}, POLICY)
    waits: list[float] = []

    def granted(asked: Asked) -> None:
        waits.append(asked.waited_s)
        network.clock.after(1.0, lambda: network.routers[0].end(asked, 5))

    for _ in range(8):
        network.routers[0].ask(network.arrival(NORMAL, "t", 100, 50), granted, lambda asked, retry_s: None)
    network.clock.run(5.0)
    assert len(waits) == 8
    assert min(waits) == 0.0
    assert max(waits) == pytest.approx(1.0, abs=4 * ROUND_TRIP_S)
    assert network.routers[0].queue.in_flight.running == {}
    assert len(network.routers[0].incarnations) == 2  # the first knew no epoch


def test_requests_go_on_after_the_actor_was_away() -> None:
    network = Network({"e": (4, 10_000)}, POLICY, routers=2)
    loop = Loop(network, NORMAL, 100, lambda: 0.5)
    loop.ask()
    network.clock.run(3.0)
    network.actor.away = True
    network.clock.run(1.0)
    network.actor.restart()
    served = len(loop.waits)
    network.clock.run(10.0)
    assert len(loop.waits) > served + 10
    assert network.routers[0].queue.router_session.epoch == 2


def test_every_figure_has_a_bar_and_a_quick_run_only_mixes_that_are_there() -> None:
    assert set(QUICK_MIXES) <= MIXES.keys()
    assert value_of({"a": 1, "b": 3}) == 4
    assert value_of({"value": 2.5, "a": {"value": 1}}) == 2.5
    json.dumps(BARS, allow_nan=False)
    assert all(math.isfinite(bar) for bar in BARS.values())
    assert Clients(LOW, "t", 1).tokens * SLOTS / ANSWER_S == pytest.approx(5_000, rel=0.01)


@pytest.mark.parametrize(
    ("data", "found", "counted"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", (200, 0.0), (0, 0)),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}", (0, 1.0), (1, 1)),
        (b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: [DONE]\n\n", (200, 0.0), (0, 0)),
        (b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: {}\n\n", (200, 0.0), (1, 0)),
        (b"HTTP/1.1 429 Busy\r\nRetry-After: 3\r\n\r\n", (429, 3.0), (0, 0)),
        (b"HTTP/1.1 500 No\r\n\r\n", (500, 0.0), (0, 1)),
        (b"", (0, 1.0), (1, 1)),
    ],
)
def test_what_came_back_is_judged(data: bytes, found: tuple[int, float], counted: tuple[int, int]) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(data)
        writer.close()

    async def asked() -> tuple[Crowd, tuple[int, float]]:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            crowd_ = Crowd("127.0.0.1", server.sockets[0].getsockname()[1], "tiny", ["k"], 1, 8)
            return crowd_, await crowd_.ask(b"{}", {})

    crowd_, judged = asyncio.run(asked())
    assert judged == found
    assert crowd_.counts.cut == counted[0]
    assert bool(crowd_.counts.samples) >= bool(counted[1])


def test_no_bad_body_is_a_good_one() -> None:
    for body in BAD_BODIES:
        try:
            document = json.loads(body)
        except ValueError:
            continue
        assert (
            not isinstance(document, dict)
            or document.get("model") != "tiny"
            or len(document) != 2
            or document["prompt"] != "a"
        )
