"""What came over a connection to the replica ends with it, and a router that does not read stops no other."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import msgspec
import pytest

from serve_app.errors import EngineUnreachable
from serve_app.transport import frame_batcher
from serve_app.transport.tcp import CANCEL, SUBMIT
from tests.fakes.engines import LOOPBACK, FakeCluster, model, run, until
from tests.fakes.router import LONG, REPLICA, SOON_S, expected_text, text
from tests.fakes.tcp import Loop, Peer, encoded, holding, known, loops, started

MANY = 1500  # tokens, some 250 kB of frames: several times what the small buffers below and the reader take in


@loops
@pytest.mark.parametrize("how", ["closes", "resets", "sends its end and stays"])
def test_the_end_of_a_connection_aborts_its_requests_within_a_second_and_no_others(how: str, loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        peer = await Peer.enter(replica)
        other = await Peer.enter(replica, "other")
        other.hand_in(1, 300)
        for number in range(1, 4):
            peer.hand_in(number, LONG)
        call = holding(replica, peer)
        await until(lambda: replica.work == 4, SOON_S, "all run")
        if how == "resets":
            peer.leave()
        elif how == "closes":
            peer.writer.close()
        else:
            peer.writer.write_eof()
        assert await until(lambda: replica.work == 1, SOON_S, "the three aborted") < 1.0
        await asyncio.wait_for(call, SOON_S)
        await other.read_until(1)
        assert known(replica) == {"connections": 1}
        peer.leave()
        other.leave()

    run(scenario, loop=loop)


@loops
def test_the_later_connection_of_a_router_takes_over_and_the_one_before_ends_with_its_requests(loop: Loop) -> None:
    """So a half-open connection costs nothing once its router is back."""

    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        before = await Peer.enter(replica)
        before.hand_in(1, LONG)
        await until(lambda: replica.work == 1, SOON_S, "it runs")
        after = await Peer.enter(replica)
        await before.cut()
        assert await until(lambda: not replica.work, SOON_S, "aborted") < 1.0
        after.hand_in(2, 5)
        await after.read_until(2)
        assert known(replica) == {"connections": 1}
        after.leave()

    run(scenario, loop=loop)


@loops
@pytest.mark.parametrize(
    "nonsense",
    [
        b"",
        b"X",
        b"GET / HTTP/1.1\r\n\r\n",
        SUBMIT,
        SUBMIT + b"\xc1",
        SUBMIT + msgspec.msgpack.encode([1, 2, 3]),
        SUBMIT + b"\x94\x01\xa1\xff\xa4chat\x80",  # text that is no UTF-8
        SUBMIT + b"\x94\x01\xa1a\xa4chat" + b"\x81\xa1a" * 100_000,  # deeper than any stack
        CANCEL,
        CANCEL + b"\xa1a",
        encoded(7, prompt="twice", max_tokens=LONG),
    ],
    ids=["empty", "kind", "http", "bare", "opcode", "types", "utf-8", "depth", "bare cancel", "no number", "twice"],
)
def test_nonsense_ends_the_connection_it_came_over_and_no_other(nonsense: bytes, loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        unhandled: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        replica = await started(cluster)
        peer = await Peer.enter(replica)
        other = await Peer.enter(replica, "other")
        other.hand_in(1, 200)
        peer.hand_in(7, LONG)
        await until(lambda: replica.work == 2, SOON_S, "both run")
        peer.send(nonsense, encoded(8, prompt="behind it", max_tokens=3))
        await peer.cut()
        assert await until(lambda: replica.work == 1, SOON_S, "its requests aborted") < 1.0
        await other.read_until(1)
        assert text(other.frames(1)) == expected_text("prompt 1", 200)
        assert not peer.frames(8)
        other.leave()
        # the loop ends the connection itself when its end raises what is no protocol error, and says so
        assert [type(one["exception"]) for one in unhandled] in ([], [RecursionError])

    run(scenario, loop=loop)


@loops
def test_frames_for_a_router_that_reads_nothing_grow_together_and_the_others_go_on(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        address = await replica.engine.open_wire("stuck", REPLICA)
        end = socket.socket()
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        end.setblocking(False)
        await asyncio.get_running_loop().sock_connect(end, (address.host, address.port))
        stuck = Peer(*await asyncio.open_connection(sock=end, limit=1024))
        stuck.send(address.ticket)
        await stuck.read()
        other = await Peer.enter(replica, "other")
        visitor = replica.engine.server.by_router["stuck"]
        assert visitor.framing.transport is not None
        far: socket.socket = visitor.framing.transport.get_extra_info("socket")
        far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        box = visitor.batcher
        for number in (1, 2, 3):
            stuck.hand_in(number, MANY)
        await until(lambda: box.is_paused, SOON_S, "its buffers are full")
        full = visitor.framing.transport.get_write_buffer_size()
        await until(lambda: [f.events > 50 for f in box.frames.values()] == [True] * 3, SOON_S, "they have grown")
        assert visitor.framing.transport.get_write_buffer_size() <= full < 2 * frame_batcher.MAX_MESSAGE_BYTES
        other.hand_in(1, 100)
        await other.read_until(1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)  # 700 kB through the small ones would take seconds
        far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
        await stuck.read_until(1, 2, 3)  # and when it reads, nothing is missing
        assert {number: text(stuck.frames(number)) for number in (1, 2, 3)} == {
            number: expected_text(f"prompt {number}", MANY) for number in (1, 2, 3)
        }
        stuck.leave()
        other.leave()

    run(scenario, model(step_s=0.0002), loop=loop)


@loops
def test_closing_ends_every_connection_and_request_and_lets_nobody_in(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        peer = await Peer.enter(replica)
        address = await replica.engine.open_wire("stranger", REPLICA)
        stranger = await Peer.connect(address)
        peer.hand_in(1, LONG)
        await until(lambda: replica.work == 1, SOON_S, "it runs")
        call = holding(replica, peer)
        await asyncio.sleep(0)
        server = replica.engine.server
        await server.close()
        await asyncio.gather(peer.cut(), stranger.cut())
        assert await until(lambda: not replica.work, SOON_S, "aborted") < 1.0
        await asyncio.wait_for(call, SOON_S)
        with pytest.raises(EngineUnreachable, match="ending"):
            await replica.engine.open_wire("router", REPLICA)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(LOOPBACK, address.port)
        server.tickets.clear()  # else the next 10 s would

    run(scenario, loop=loop)
