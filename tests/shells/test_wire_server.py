"""The replica's end of the wire lets in who has a ticket, runs what they hand in, and ends it with their connection."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import msgspec
import pytest

from serve_app.engine import deployment, outbox, wire_server
from serve_app.engine.protocol import Submit
from serve_app.engine.wire_server import TICKET_BYTES
from serve_app.errors import EngineFailed, EngineUnreachable
from serve_app.types import Operation
from serve_app.wire import CANCEL, HEADER_BYTES, KEEPALIVE, SUBMIT
from tests.shells.fake_engines import FakeCluster, FakeReplica, model, until
from tests.shells.fake_router import LONG, REPLICA, SOON_S, said, text
from tests.shells.fake_wire import LOOPBACK, LOOPS, Loop, Peer, known, run

MANY = 1500  # tokens, some 250 kB of frames: several times what the small buffers below and the reader take in
loops = pytest.mark.parametrize("loop", LOOPS, ids=["asyncio", "uvloop"])


async def started(cluster: FakeCluster) -> FakeReplica:
    await cluster.add(REPLICA)
    return cluster[REPLICA]


def holding(replica: FakeReplica, number: int, router: str = "peer") -> asyncio.Task[None]:
    return asyncio.create_task(replica.engine.hold(router, number, REPLICA))


def encoded(number: int, **body: Any) -> bytes:
    return SUBMIT + msgspec.msgpack.encode(Submit(number, "id", Operation.COMPLETION, body))


# -- tickets ----------------------------------------------------------------------------------------------------------


@loops
def test_a_ticket_lets_in_and_what_is_handed_in_runs(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        peer = await Peer.enter(replica)
        assert peer.batches[0].slots == 4
        peer.hand_in(1, 20)
        await holding(replica, 1)
        await peer.read_until(1)
        assert text(peer.frames(1)) == said("prompt 1", 20)
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
def test_who_shows_no_valid_ticket_is_cut_and_told_nothing(shown: bytes, loop: Loop) -> None:
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
        replica.engine._wire._tickets.clear()  # type: ignore[union-attr]  # else the next 10 s would

    run(scenario, loop=loop)


@loops
def test_a_ticket_is_good_once(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        address = await replica.engine.open_wire("router", REPLICA)
        first, second = await Peer.connect(address), await Peer.connect(address)
        first.send(address.ticket)
        await first.read()
        second.send(address.ticket)
        assert await second.cut() == b""
        first.hand_in(1, 5)
        await holding(replica, 1, "router")
        await first.read_until(1)  # the first one is none the worse for it
        first.leave()

    run(scenario, loop=loop)


@loops
def test_a_ticket_that_comes_late_is_worth_nothing_and_a_silent_visitor_is_cut(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        address = await replica.engine.open_wire("router", REPLICA)
        silent, slow = await Peer.connect(address), await Peer.connect(address)
        slow.writer.write(TICKET_BYTES.to_bytes(HEADER_BYTES) + address.ticket[:-1])  # all but one byte
        assert await silent.cut() == b""
        assert await slow.cut() == b""
        late = await Peer.connect(address)
        late.send(address.ticket)
        assert await late.cut() == b""
        assert known(replica) == {}

    run(scenario, loop=loop, waits={(wire_server, "TICKET_LIFE_S"): 0.1})


@loops
def test_who_was_let_in_stays_however_long(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        peer = await Peer.enter(replica)
        peer.hand_in(1, 200)  # 0.2 s and more
        call = holding(replica, 1)
        await peer.read_until(1)
        await call
        peer.leave()

    run(scenario, loop=loop, waits={(wire_server, "TICKET_LIFE_S"): 0.05})


@loops
def test_32_mib_before_the_ticket_are_not_read(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        received = 0
        read = wire_server.Framing.data_received

        def counting(self: Any, data: bytes) -> None:
            nonlocal received
            received += len(data)
            read(self, data)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wire_server.Framing, "data_received", counting)
            peer = await Peer.connect(await replica.engine.open_wire("router", REPLICA))
            peer.send(b"x" * 32 * 2**20)
            with pytest.raises(ConnectionError):
                await asyncio.wait_for(peer.writer.drain(), SOON_S)
        peer.leave()
        assert 0 < received <= 2**18  # the one piece that held the length; both loops read no more at a time
        replica.engine._wire._tickets.clear()  # type: ignore[union-attr]  # else the next 10 s would

    run(scenario, loop=loop)


def test_it_listens_on_the_nodes_address_alone_and_notices_a_dead_peer() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        peer = await Peer.enter(replica)
        wire = replica.engine._wire
        assert wire is not None
        assert wire._server is not None
        assert [end.getsockname()[0] for end in wire._server.sockets] == [LOOPBACK]
        (visitor,) = wire._visitors
        assert visitor.framing.transport is not None
        end: socket.socket = visitor.framing.transport.get_extra_info("socket")
        assert {key: end.getsockopt(key[0], getattr(socket, key[1])) for key in KEEPALIVE} == KEEPALIVE
        peer.leave()

    run(scenario)


# -- requests ---------------------------------------------------------------------------------------------------------


@loops
@pytest.mark.parametrize("held_first", [False, True])
def test_a_request_and_the_call_that_holds_it_may_come_in_any_order(held_first: bool, loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        peer = await Peer.enter(replica)
        if held_first:
            call = holding(replica, 1)
            await until(lambda: known(replica).get("held") == 1, SOON_S, "the call waits")
            peer.hand_in(1, 5)
        else:
            peer.hand_in(1, 5)
            await peer.read_until(1)
            assert known(replica) == {"connections": 1, "requests": 1}  # kept for the call to learn its end
            call = holding(replica, 1)
        await call
        await peer.read_until(1)
        assert known(replica) == {"connections": 1}
        peer.leave()

    run(scenario, loop=loop)


def test_a_call_whose_request_never_comes_fails_as_one_that_can_go_elsewhere() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        with pytest.raises(EngineUnreachable, match="no channel"):
            await holding(replica, 1)  # nobody was ever there
        peer = await Peer.enter(replica)
        with pytest.raises(EngineUnreachable, match="did not arrive"):
            await holding(replica, 1)
        with pytest.raises(EngineUnreachable, match="no channel"):
            await holding(replica, 1, "another router")
        peer.leave()
        await until(lambda: not known(replica), SOON_S, "it left")
        with pytest.raises(EngineUnreachable, match="no channel"):
            await holding(replica, 1)

    run(scenario, waits={(wire_server, "HOLD_WAIT_S"): 0.05})


@loops
@pytest.mark.parametrize("by", ["the call", "the wire"])
@pytest.mark.parametrize("when", ["before it came", "while it runs", "after it ended"])
def test_cancelling_aborts_the_request_and_no_other(by: str, when: str, loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        peer = await Peer.enter(replica)
        peer.hand_in(9, 60)
        kept = holding(replica, 9)
        tokens = 3 if when == "after it ended" else LONG
        call = holding(replica, 1)
        await until(lambda: known(replica).get("held") == 1, SOON_S, "the call waits")
        if when != "before it came":
            peer.hand_in(1, tokens)
            if when == "while it runs":
                await until(lambda: replica.work == 2, SOON_S, "both run")
            else:
                await call
        if by == "the call":
            call.cancel()
        else:
            peer.send(CANCEL + msgspec.msgpack.encode(1))
        if when == "before it came":  # as the router sends them: a hand-in is never behind its cancellation
            peer.hand_in(1, tokens)
            peer.send(CANCEL + msgspec.msgpack.encode(1))
        ended = await asyncio.wait({call}, timeout=SOON_S)
        assert ended[0]
        assert call.cancelled() is (when != "after it ended")
        await kept
        assert await until(lambda: not replica.work, SOON_S, "aborted") < 1.0
        await until(lambda: known(replica) == {"connections": 1}, SOON_S, "forgotten")
        await peer.read_until(9)
        peer.leave()

    run(scenario, loop=loop)


def test_a_request_that_is_cancelled_in_the_piece_it_came_in_leaves_its_call_nothing_to_trip_over() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        peer = await Peer.enter(replica)
        call = holding(replica, 1)
        await until(lambda: known(replica).get("held") == 1, SOON_S, "the call waits")
        peer.send(encoded(1, prompt="a", max_tokens=LONG), CANCEL + msgspec.msgpack.encode(1))
        await asyncio.wait({call}, timeout=SOON_S)
        assert call.cancelled()
        peer.leave()

    run(scenario)


def test_the_engines_failure_reaches_the_call_and_one_that_nobody_holds_is_forgotten() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        peer = await Peer.enter(replica)
        for number in (1, 2):
            peer.hand_in(number, LONG)
        await until(lambda: replica.work == 2, SOON_S, "both run")
        call = holding(replica, 1)
        await asyncio.sleep(0)
        await replica.engine._backend.shutdown()
        with pytest.raises(EngineFailed):
            await call
        peer.send(CANCEL + msgspec.msgpack.encode(2))
        await until(lambda: known(replica) == {"connections": 1}, SOON_S, "forgotten")
        peer.leave()

    run(scenario)


@loops
def test_a_request_of_30_mib_arrives_and_the_others_go_on(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        peer, other = await Peer.enter(replica), await Peer.enter(replica, "other")
        other.hand_in(1, 100)
        peer.hand_in(1, 3, prompt="x" * 30 * 2**20)
        await asyncio.gather(peer.read_until(1), other.read_until(1))
        assert peer.frames(1)[0].status == 200
        assert text(other.frames(1)) == said("prompt 1", 100)
        peer.leave()
        other.leave()

    run(scenario, loop=loop)


@loops
def test_a_thousand_requests_at_once_all_end_and_nothing_is_kept(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        peer = await Peer.enter(replica)
        numbers = range(1, 1001)
        for number in numbers:
            peer.hand_in(number, 1 + number % 7)
        calls = [holding(replica, number) for number in numbers]
        await peer.read_until(*numbers)
        await asyncio.gather(*calls)
        assert {number: text(peer.frames(number)) for number in numbers} == {
            number: said(f"prompt {number}", 1 + number % 7) for number in numbers
        }
        assert known(replica) == {"connections": 1}
        peer.leave()

    run(scenario, model(slots=64), loop=loop)


# -- ends -------------------------------------------------------------------------------------------------------------


@loops
@pytest.mark.parametrize("how", ["closes", "resets", "sends its end and stays"])
def test_the_end_of_a_connection_aborts_its_requests_within_a_second_and_no_others(how: str, loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        peer, other = await Peer.enter(replica), await Peer.enter(replica, "other")
        other.hand_in(1, 300)
        for number in range(1, 4):
            peer.hand_in(number, LONG)
        held = [holding(replica, 1), holding(replica, 2)]  # the third is not: its call was lost
        await until(lambda: replica.work == 4, SOON_S, "all run")
        if how == "resets":
            peer.leave()
        elif how == "closes":
            peer.writer.close()
        else:
            peer.writer.write_eof()
        assert await until(lambda: replica.work == 1, SOON_S, "the three aborted") < 1.0
        await asyncio.wait(held, timeout=SOON_S)
        assert all(call.cancelled() for call in held)
        await other.read_until(1)
        assert known(replica) == {"connections": 1, "requests": 1}
        peer.leave()
        other.leave()

    run(scenario, loop=loop)


def test_a_router_that_is_back_within_the_grace_finds_its_requests_aborted_all_the_same() -> None:
    """It has given them up with the connection: what would run on runs for nobody."""

    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        before = await Peer.enter(replica)
        before.hand_in(1, LONG)
        await until(lambda: replica.work == 1, SOON_S, "it runs")
        before.leave()
        after = await Peer.enter(replica)
        assert await until(lambda: not replica.work, SOON_S, "aborted") < 1.0
        after.hand_in(2, 5)
        await after.read_until(2)
        after.leave()
        deployment.BREAK_GRACE_S = 0.05  # of the end; `run` puts the constant back

    run(scenario, waits={(deployment, "BREAK_GRACE_S"): 60.0})


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
        await holding(replica, 2)
        await after.read_until(2)
        assert replica.attachments == 1
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
        peer, other = await Peer.enter(replica), await Peer.enter(replica, "other")
        other.hand_in(1, 200)
        peer.hand_in(7, LONG)
        await until(lambda: replica.work == 2, SOON_S, "both run")
        peer.send(nonsense, encoded(8, prompt="behind it", max_tokens=3))
        await peer.cut()
        assert await until(lambda: replica.work == 1, SOON_S, "its requests aborted") < 1.0
        await other.read_until(1)
        assert text(other.frames(1)) == said("prompt 1", 200)
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
        visitor = replica.engine._wire._routers["stuck"]  # type: ignore[union-attr]
        assert visitor.framing.transport is not None
        far: socket.socket = visitor.framing.transport.get_extra_info("socket")
        far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        box = replica.engine._attachments["stuck"].outbox
        for number in (1, 2, 3):
            stuck.hand_in(number, MANY)
        await until(lambda: visitor.framing._writable is not None, SOON_S, "its buffers are full")
        full = visitor.framing.transport.get_write_buffer_size()
        await until(lambda: [f.events > 50 for f in box._frames.values()] == [True] * 3, SOON_S, "they have grown")
        assert visitor.framing.transport.get_write_buffer_size() <= full < 2 * outbox.MAX_MESSAGE_BYTES
        other.hand_in(1, 100)
        await other.read_until(1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)  # 700 kB through the small ones would take seconds
        far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
        await stuck.read_until(1, 2, 3)  # and when it reads, nothing is missing
        assert {number: text(stuck.frames(number)) for number in (1, 2, 3)} == {
            number: said(f"prompt {number}", MANY) for number in (1, 2, 3)
        }
        stuck.leave()
        other.leave()

    run(scenario, model(step_s=0.0002), loop=loop)


@loops
def test_closing_ends_every_connection_and_request_and_lets_nobody_in(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        peer = await Peer.enter(replica)
        stranger = await Peer.connect(await replica.engine.open_wire("stranger", REPLICA))
        peer.hand_in(1, LONG)
        await until(lambda: replica.work == 1, SOON_S, "it runs")
        call = holding(replica, 1)
        await asyncio.sleep(0)
        wire = replica.engine._wire
        assert wire is not None
        assert wire._server is not None
        port = wire._server.sockets[0].getsockname()[1]
        await wire.close()
        await asyncio.gather(peer.cut(), stranger.cut())
        assert await until(lambda: not replica.work, SOON_S, "aborted") < 1.0
        await asyncio.wait({call}, timeout=SOON_S)
        assert call.cancelled()
        with pytest.raises(EngineUnreachable, match="ending"):
            await replica.engine.open_wire("router", REPLICA)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(LOOPBACK, port)
        wire._tickets.clear()  # else the next 10 s would

    run(scenario, loop=loop)
