"""What can go wrong with the connections between routers and fake engine replicas (`tests.fakes.engines`)."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import socket
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import uvloop

from serve_app.errors import EngineFailed
from serve_app.transport import Channel, Frame, Submit, TcpAddress
from serve_app.transport.messages import Batch, batch_decoder
from serve_app.transport.tcp import HEADER_BYTES, SUBMIT
from serve_app.types import Operation
from tests.fakes.engines import LOOPBACK, FakeCluster, FakeHandle, FakeReplica, until
from tests.fakes.router import LONG, REPLICA, SOON_S, Slots, asked, expected_text, nothing, received_text

Loop = Callable[[], asyncio.AbstractEventLoop]
SO_ATTACH_FILTER = 26  # Linux's
BPF_DROP = 0x06  # the program `return 0`: of each packet no byte is kept
# Ray's workers run uvloop where it is installed
loops = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


def known(replica: FakeReplica) -> dict[str, int]:
    """What the replica's end of the wire still knows, by kind; empty when it knows nothing."""
    server = replica.engine.server
    visitors = server.connections | set(server.by_router.values())
    counts = {
        "connections": len(visitors),
        "tickets": len(server.tickets),
        "requests": sum(len(visitor.requests) for visitor in visitors),
    }
    return {kind: count for kind, count in counts.items() if count}


def through(handle: Callable[[Any], Any], cluster: FakeCluster, router: str = "router") -> tuple[Channel, FakeHandle]:
    """A channel to `REPLICA` whose calls go through `handle`, and the handle below it."""
    below = cluster.handle()
    return Channel(handle(below), router, REPLICA, itertools.count(1), Slots()), below


async def running(link: Channel, cluster: FakeCluster, count: int = 1) -> list[asyncio.Task[str]]:
    """Requests without an end in sight, their first frames read; each tells how it failed."""

    async def ask(number: int) -> str:
        async with link.run(asked(f"prompt {number}", LONG), nothing) as stream:
            frames = await stream.next()
            begun.append(number)
            try:
                while frames[-1].usage is None:
                    frames += await stream.next()
            except EngineFailed as error:
                assert expected_text(f"prompt {number}", LONG).startswith(received_text(frames))
                return type(error).__name__
            return "ended"

    begun: list[int] = []
    requests = [asyncio.create_task(ask(number)) for number in range(count)]
    await until(lambda: len(begun) == count, SOON_S, "all run")
    return requests


async def failures(requests: list[asyncio.Task[str]]) -> set[str]:
    return set(await asyncio.wait_for(asyncio.gather(*requests), SOON_S))


class Relay:
    """A stand-in for `Handle` whose connections lead through a relay of ours, which can be cut or stand still."""

    def __init__(self, handle: FakeHandle) -> None:
        self._handle = handle
        self._passing = asyncio.Event()
        self._passing.set()
        self._near: list[asyncio.StreamWriter] = []  # to the router
        self._far: list[asyncio.StreamWriter] = []  # to the replica
        self._server: asyncio.Server | None = None

    async def call(self, method: str, *arguments: Any, replica_id: str) -> Any:
        answer = await self._handle.call(method, *arguments, replica_id=replica_id)
        return await self._open(answer) if method == "open_wire" else answer

    def stand_still(self) -> None:
        """Pass nothing on any more, either way."""
        self._passing.clear()

    def go_on(self) -> None:
        self._passing.set()

    def cut_near(self) -> None:
        """The router sees the end of its connections, the replica does not: a half-open connection."""
        self._passing.clear()
        for writer in self._near:
            writer.transport.abort()

    def cut_far(self) -> None:
        """The replica sees the end of its connections, too."""
        for writer in self._far:
            writer.transport.abort()

    async def _open(self, address: TcpAddress) -> TcpAddress:
        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            back, forth = await asyncio.open_connection(address.host, address.port)
            self._near.append(writer)
            self._far.append(forth)
            await asyncio.gather(self._pass(reader, forth), self._pass(back, writer))

        self._server = await asyncio.start_server(relay, LOOPBACK, 0)
        port = self._server.sockets[0].getsockname()[1]
        return msgspec.structs.replace(address, host=LOOPBACK, port=port)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2**16):
                await self._passing.wait()
                if writer.is_closing():  # uvloop's raises
                    break
                writer.write(data)
                await writer.drain()
        await self._passing.wait()
        writer.close()

    def close(self) -> None:
        self._passing.set()
        self.cut_far()
        for writer in self._near:
            writer.transport.abort()
        if self._server is not None:
            self._server.close()


class Peer:
    """Whoever connects to a replica: bytes, and no manners of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.batches: list[Batch] = []
        self.ticket = b""

    @classmethod
    async def connect(cls, address: TcpAddress, limit: int = 2**16) -> Peer:
        return cls(*await asyncio.open_connection(address.host, address.port, limit=limit))

    @classmethod
    async def enter(cls, replica: FakeReplica, router: str = "peer", limit: int = 2**16) -> Peer:
        """With a ticket of its own; returns once it is let in."""
        address = await replica.engine.open_wire(router, replica.name)
        peer = await cls.connect(address, limit)
        peer.ticket = address.ticket
        peer.send(peer.ticket)
        await peer.read()
        return peer

    def send(self, *messages: bytes) -> None:
        self.writer.write(b"".join(len(message).to_bytes(HEADER_BYTES) + message for message in messages))

    def hand_in(self, number: int, tokens: int, **body: Any) -> None:
        wanted = {"prompt": f"prompt {number}", "max_tokens": tokens, "stream": True} | body
        self.send(SUBMIT + msgspec.msgpack.encode(Submit(number, f"id-{number}", Operation.COMPLETION, wanted)))

    async def read(self) -> Batch:
        """The next message."""
        length = int.from_bytes(await self.reader.readexactly(HEADER_BYTES))
        batch = batch_decoder.decode(await self.reader.readexactly(length))
        self.batches.append(batch)
        return batch

    async def read_until(self, *numbers: int) -> None:
        """Read until the last frames of these requests have come."""
        while not set(numbers) <= self.ended():
            await asyncio.wait_for(self.read(), SOON_S)

    def frames(self, number: int) -> list[Frame]:
        return [frame for batch in self.batches for frame in batch.frames if frame.number == number]

    def ended(self) -> set[int]:
        frames = [frame for batch in self.batches for frame in batch.frames]
        return {frame.number for frame in frames if frame.usage is not None or frame.failure is not None}

    async def cut(self) -> bytes:
        """Wait for the replica to end the connection; what it has sent before that. TimeoutError: it does not."""
        reported = b""
        with contextlib.suppress(ConnectionError):
            while data := await asyncio.wait_for(self.reader.read(2**16), SOON_S):
                reported += data
        self.writer.close()
        return reported

    def leave(self) -> None:
        self.writer.transport.abort()


async def started(cluster: FakeCluster) -> FakeReplica:
    await cluster.add(REPLICA)
    return cluster[REPLICA]


def holding(replica: FakeReplica, peer: Peer) -> asyncio.Task[None]:
    return asyncio.create_task(replica.engine.hold(peer.ticket, REPLICA))


def encoded(number: int, **body: Any) -> bytes:
    return SUBMIT + msgspec.msgpack.encode(Submit(number, "id", Operation.COMPLETION, body))


def cut_off(end: Any) -> None:
    """Let this end of a connection receive no packet any more, as if the way to it were gone: the kernel acknowledges
    nothing, and the other end sees no reset. `end`: a socket."""
    instruction = (ctypes.c_uint64 * 1)(BPF_DROP)  # struct sock_filter
    program = struct.pack("HL", 1, ctypes.addressof(instruction))  # struct sock_fprog
    end.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
