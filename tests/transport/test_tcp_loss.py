"""What a lost, broken or standing connection means to the requests on it, and to those after them."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from serve_app.core.routing import outliers
from serve_app.errors import EngineUnreachable
from serve_app.transport import channel, tcp, tcp_server
from serve_app.transport.messages import TcpAddress
from tests.fakes.engines import FakeCluster, model, run, turns, until
from tests.fakes.router import REPLICA, SOON_S, Router, answer, expected_text, freeze, opened, text, thaw
from tests.fakes.tcp import Loop, Relay, cut_off, failures, known, loops, running, through
from tests.requires import requires

LOST_S = 20.0  # for what the kernel notices after one or two seconds


@loops
@pytest.mark.parametrize("loss", ["call", "connection", "both", "kill"])
def test_requests_without_a_first_frame_run_elsewhere_whatever_was_lost(loss: str, loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        router = await Router(cluster).start()
        freeze(cluster, "r1", "r2")
        requests = [router.asking() for _ in range(8)]
        await until(lambda: cluster["r1"].work == cluster["r2"].work == 4, SOON_S, "four on each")
        await until(lambda: cluster["r1"].count("hold") == 1, SOON_S, "the connection is held")
        if loss == "kill":
            cluster.kill("r1")
        if loss in ("call", "both"):
            cluster["r1"].fail_calls("hold")
        if loss in ("connection", "both"):
            cluster["r1"].cut_connections()
        await until(lambda: cluster["r1"].dead or not cluster["r1"].work, 1.0, "r1 has aborted them")
        thaw(cluster, "r1", "r2")
        await asyncio.gather(*requests)
        assert sorted(router.relayed) == [f"{n}" for n in range(1, 9)]  # nobody was answered twice
        await router.settled()

    run(scenario, loop=loop)


@loops
def test_a_lost_connection_fails_every_stream_on_it_and_the_next_one_serves(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, _ = opened(cluster)
        requests = await running(link, cluster, 20)
        cluster[REPLICA].cut_connections()
        assert await failures(requests) == {"EngineFailed"}
        assert await until(lambda: not cluster[REPLICA].work, SOON_S, "aborted") < 1.0
        assert link.connection is None
        assert text(await answer(link, "again", 4)) == expected_text("again", 4)

    run(scenario, model(slots=64), loop=loop)


@loops
@pytest.mark.parametrize("engine_frozen", [True, False])
def test_a_machine_that_is_cut_off_is_given_up_from_both_ends(
    engine_frozen: bool, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No reset comes from it. Without frames on the way the probes of the idle connection notice, with frames their
    missing acknowledgement."""
    requires("linux")
    names = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 1, "TCP_USER_TIMEOUT": 1000}
    sooner = {key: names.get(key[1], value) for key, value in tcp.KEEPALIVE.items()}
    monkeypatch.setattr(tcp, "KEEPALIVE", sooner)
    ends: list[asyncio.BaseTransport] = []
    made = tcp.Framing.connection_made

    def noted(framing: tcp.Framing, transport: asyncio.BaseTransport) -> None:
        ends.append(transport)
        made(framing, transport)

    monkeypatch.setattr(tcp.Framing, "connection_made", noted)

    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, _ = opened(cluster)
        requests = await running(link, cluster, 3)
        if engine_frozen:
            freeze(cluster, REPLICA)
        assert len(ends) == 2
        for end in ends:
            cut_off(end.get_extra_info("socket"))
        async with asyncio.timeout(LOST_S):
            assert set(await asyncio.gather(*requests)) == {"EngineFailed"}
        thaw(cluster, REPLICA)
        await until(lambda: not cluster[REPLICA].work, LOST_S, "the replica has aborted them")

    run(scenario, model(step_s=0.01), loop=loop)  # they would take 50 s


@loops
def test_a_half_open_connection_holds_nothing_once_the_router_is_back(loop: Loop) -> None:
    """The router has seen the end of it, the replica has not, and does not hear of the call's end either."""

    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        relays: list[Relay] = []

        def relayed(below: Any) -> Relay:
            relays.append(Relay(below))
            return relays[0]

        link, handle = through(relayed, cluster)
        handle.turns = lambda method: 10**9 if method == "hold" else 1  # the call, and so its end, does not arrive
        requests = await running(link, cluster, 3)
        relays[0].cut_near()
        assert await failures(requests) == {"EngineFailed"}
        handle.turns = lambda method: 1
        relays[0].go_on()
        assert text(await answer(link, "back", 4)) == expected_text("back", 4)
        assert await until(lambda: not cluster[REPLICA].work, SOON_S, "the old ones aborted") < 1.0
        relays[0].close()

    run(scenario, loop=loop)


@loops
def test_a_connection_that_stands_still_and_goes_on_loses_nothing(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        relays: list[Relay] = []

        def relayed(below: Any) -> Relay:
            relays.append(Relay(below))
            return relays[0]

        link, _ = through(relayed, cluster)
        requests = [asyncio.create_task(answer(link, f"p{n}", 100)) for n in range(4)]
        await until(lambda: cluster[REPLICA].work == 4, SOON_S, "all run")
        relays[0].stand_still()
        await until(lambda: not cluster[REPLICA].work, SOON_S, "all is made, nothing has come")
        late = asyncio.create_task(answer(link, "late", 5))
        await turns(50)
        assert not late.done()
        relays[0].go_on()
        reported = await asyncio.wait_for(asyncio.gather(*requests, late), SOON_S)
        assert [text(frames) for frames in reported[:4]] == [expected_text(f"p{n}", 100) for n in range(4)]
        assert text(reported[4]) == expected_text("late", 5)
        relays[0].close()

    run(scenario, loop=loop)


@loops
@pytest.mark.parametrize("nonsense", [b"", b"\xc1", b"\x91\x01"], ids=["empty", "opcode", "types"])
def test_nonsense_from_a_replica_is_a_broken_channel(nonsense: bytes, loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        unhandled: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        await cluster.add(REPLICA)
        link, _ = opened(cluster)
        requests = await running(link, cluster, 3)
        (visitor,) = cluster[REPLICA].engine.server.connections
        visitor.framing.send(nonsense)
        assert await failures(requests) == {"EngineFailed"}
        assert await until(lambda: not cluster[REPLICA].work, SOON_S, "aborted") < 1.0
        assert len(unhandled) == 1  # and the loop says what it was
        assert text(await answer(link, "next", 3)) == expected_text("next", 3)

    run(scenario, loop=loop)


@loops
@pytest.mark.parametrize("fault", ["refused", "no ticket", "silent", "has left"])
def test_a_channel_that_cannot_be_opened_fails_as_one_that_was_never_there(fault: str, loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        silent = socket.socket()
        silent.bind(("127.0.0.1", 0))
        if fault == "silent":
            silent.listen()

        class Faulty:
            def __init__(self, below: Any) -> None:
                self.below = below

            async def call(self, method: str, *arguments: Any, replica_id: str) -> Any:
                address: TcpAddress = await self.below.call(method, *arguments, replica_id=replica_id)
                if fault == "has left":
                    raise EngineUnreachable("engine replica r1 has left")
                if fault == "no ticket":
                    return TcpAddress(address.host, address.port, b"?" * 32)
                return TcpAddress(*silent.getsockname(), address.ticket)

        link, handle = through(Faulty, cluster)
        reported = await asyncio.gather(*(answer(link, "a", 3) for _ in range(3)), return_exceptions=True)
        silent.close()
        assert [type(error) for error in reported] == [EngineUnreachable] * 3, reported
        assert link.connection is None
        assert [method for method, _ in handle.calls] == ["open_wire"]

    short = {(channel, "CHANNEL_ATTACH_S"): 0.2, (tcp_server, "TICKET_LIFE_S"): 0.1}
    run(scenario, waits=short, loop=loop)


def test_a_connection_that_does_not_come_about_in_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        loop = asyncio.get_running_loop()

        async def never(*_: Any, **__: Any) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(loop, "create_connection", never)  # a packet filter that drops looks like this
        link, _ = opened(cluster)
        with pytest.raises(EngineUnreachable, match="no connection to"):
            await answer(link, "a", 3)
        assert link.connection is None

    run(scenario, waits={(tcp, "CHANNEL_CONNECT_S"): 0.05, (tcp_server, "TICKET_LIFE_S"): 0.1})


def test_a_replica_that_leaves_serves_set_finishes_what_runs_and_then_knows_nobody() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        router = await Router(cluster).start()
        requests = [router.asking(300) for _ in range(8)]
        await until(lambda: cluster["r1"].work == cluster["r2"].work == 4, SOON_S, "four on each")
        await until(lambda: len(router.relayed) == 8, SOON_S, "their first frames are there")
        cluster.remove("r1")
        await asyncio.gather(*requests)
        assert await until(lambda: not cluster["r1"].calls, SOON_S, "Serve sees it idle") < 1.0
        await until(lambda: not known(cluster["r1"]), SOON_S, "its channel is closed")
        await router.settled()
        cluster.remove("r2")  # else its channel would stand for IDLE_CLOSE_S

    run(scenario, waits={(channel, "IDLE_CLOSE_S"): 60.0, (outliers, "FIRST_EJECTION_S"): 0.1})
