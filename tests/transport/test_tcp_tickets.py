"""Whoever has a ticket is let in by the replica's end of the wire, once and in time; nobody else is even read."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import psutil
import pytest

from serve_app.transport import tcp_server
from serve_app.transport.tcp import HEADER_BYTES, KEEPALIVE
from serve_app.transport.tcp_server import TICKET_BYTES
from tests.fakes.engines import LOOPBACK, FakeCluster, run
from tests.fakes.router import REPLICA, SOON_S, expected_text, text
from tests.fakes.tcp import Loop, Peer, encoded, known, loops, started

MANY = 1500  # tokens, some 250 kB of frames: several times what the small buffers below and the reader take in


@loops
def test_a_ticket_lets_in_and_what_is_handed_in_runs(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        peer = await Peer.enter(replica)
        assert peer.batches[0].slots == 4
        peer.hand_in(1, 20)
        await peer.read_until(1)
        assert text(peer.frames(1)) == expected_text("prompt 1", 20)
        peer.leave()

    run(scenario, loop=loop)


@loops
@pytest.mark.parametrize(
    "shown",
    [
        b"?" * TICKET_BYTES,
        b"",
        b"?",
        b"?" * (TICKET_BYTES - 1),
        b"?" * (TICKET_BYTES + 1),
        encoded(1, prompt="let me in", max_tokens=3),
    ],
    ids=["wrong", "empty", "short", "too short", "too long", "a request"],
)
def test_a_peer_without_a_valid_ticket_is_cut_and_gets_no_answer(shown: bytes, loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        address = await replica.engine.open_wire("router", REPLICA)
        peer = await Peer.connect(address)
        peer.send(shown)
        assert await peer.cut() == b""
        assert replica.work == 0
        assert known(replica) == {"tickets": 1}  # the good one still is: a stranger does not spend it
        good = await Peer.connect(address)
        good.send(address.ticket)
        await good.read()
        good.leave()

    run(scenario, loop=loop)


@loops
def test_one_connection_has_one_try(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        address = await replica.engine.open_wire("router", REPLICA)
        peer = await Peer.connect(address)
        peer.send(b"?" * TICKET_BYTES, address.ticket, encoded(1, prompt="a", max_tokens=3))
        assert await peer.cut() == b""
        assert (known(replica), replica.work) == ({"tickets": 1}, 0)
        replica.engine.server.tickets.clear()  # else the next 10 s would

    run(scenario, loop=loop)


@loops
def test_a_ticket_is_good_once(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        address = await replica.engine.open_wire("router", REPLICA)
        first = await Peer.connect(address)
        second = await Peer.connect(address)
        first.send(address.ticket)
        await first.read()
        second.send(address.ticket)
        assert await second.cut() == b""
        first.hand_in(1, 5)
        await first.read_until(1)  # the first one is none the worse for it
        first.leave()

    run(scenario, loop=loop)


@loops
def test_a_ticket_that_comes_late_is_worth_nothing_and_a_silent_visitor_is_cut(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        address = await replica.engine.open_wire("router", REPLICA)
        silent = await Peer.connect(address)
        slow = await Peer.connect(address)
        slow.writer.write(TICKET_BYTES.to_bytes(HEADER_BYTES) + address.ticket[:-1])  # all but one byte
        assert await silent.cut() == b""
        assert await slow.cut() == b""
        late = await Peer.connect(address)
        late.send(address.ticket)
        assert await late.cut() == b""
        assert known(replica) == {}

    run(scenario, loop=loop, waits={(tcp_server, "TICKET_LIFE_S"): 0.1})


@loops
def test_who_was_let_in_stays_however_long(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        peer = await Peer.enter(replica)
        peer.hand_in(1, 200)  # 0.2 s and more
        await peer.read_until(1)
        peer.leave()

    run(scenario, loop=loop, waits={(tcp_server, "TICKET_LIFE_S"): 0.05})


@loops
def test_32_mib_before_the_ticket_are_not_read(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        received = 0
        read = tcp_server.Framing.data_received

        def counting(self: Any, data: bytes) -> None:
            nonlocal received
            received += len(data)
            read(self, data)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tcp_server.Framing, "data_received", counting)
            peer = await Peer.connect(await replica.engine.open_wire("router", REPLICA))
            peer.send(b"x" * 32 * 2**20)
            with pytest.raises(ConnectionError):
                await asyncio.wait_for(peer.writer.drain(), SOON_S)
        peer.leave()
        assert 0 < received <= 2**18  # the one piece that held the length; both loops read no more at a time
        replica.engine.server.tickets.clear()  # else the next 10 s would

    run(scenario, loop=loop)


def test_it_listens_on_the_nodes_address_alone_and_notices_a_dead_peer() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        peer = await Peer.enter(replica)
        server = replica.engine.server
        port = (await replica.engine.open_wire("next", REPLICA)).port
        listening = [one.laddr for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        assert [end.ip for end in listening if end.port == port] == [LOOPBACK]
        server.tickets.clear()  # nobody comes with the second one
        (visitor,) = server.connections
        assert visitor.framing.transport is not None
        end: socket.socket = visitor.framing.transport.get_extra_info("socket")
        assert {key: end.getsockopt(key[0], getattr(socket, key[1])) for key in KEEPALIVE} == KEEPALIVE
        peer.leave()

    run(scenario)
