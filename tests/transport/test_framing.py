"""Messages come out of the stream as they went in, however the network cuts it; nonsense ends the connection."""

from __future__ import annotations

import asyncio
import itertools
import tracemalloc
from collections.abc import Callable
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from serve_app.transport.tcp import HEADER_BYTES, Framing

LIMIT = 300  # bytes, so that hypothesis comes near it
MESSAGES = st.lists(st.binary(max_size=LIMIT), max_size=12)
CUTS = st.lists(st.integers(0, 12 * (LIMIT + HEADER_BYTES)), max_size=40)


class Ends:
    """A transport that keeps what is written and knows whether it was ended."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = self.aborted = False

    def get_extra_info(self, name: str) -> Any:
        return self

    def setsockopt(self, level: int, name: int, value: int) -> None:
        """Kept by a real socket, which other tests look at."""

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True


class End:
    """One end of a connection, and what it was told."""

    def __init__(self, limit: int = LIMIT, on_message: Callable[[bytes], None] | None = None) -> None:
        self.messages: list[bytes] = []
        self.losses = 0
        self.framing = Framing(on_message or self.messages.append, self._lost, limit)
        self.transport = Ends()
        self.framing.connection_made(self.transport)  # type: ignore[arg-type]

    def _lost(self) -> None:
        self.losses += 1

    def receive(self, data: bytes, cuts: list[int]) -> None:
        """Feed the bytes in pieces, for as long as the connection stands."""
        marks = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
        for start, end in itertools.pairwise(marks):
            if not self.transport.aborted:
                self.framing.data_received(data[start:end])


def framed(*messages: bytes) -> bytes:
    return b"".join(len(message).to_bytes(HEADER_BYTES) + message for message in messages)


@given(messages=MESSAGES, cuts=CUTS)
@example(messages=[b"", b""], cuts=[1, 2, 3, 4, 5, 6, 7])
@example(messages=[b"a" * LIMIT, b"", b"b"], cuts=list(range(LIMIT + 20)))
def test_messages_come_out_as_they_went_in_wherever_the_stream_is_cut(messages: list[bytes], cuts: list[int]) -> None:
    sender = End()
    receiver = End()
    for message in messages:
        sender.framing.send(message)
    assert sender.transport.written == framed(*messages)
    receiver.receive(sender.transport.written, cuts)
    assert receiver.messages == messages
    assert not receiver.transport.aborted


@given(before=MESSAGES, length=st.integers(LIMIT + 1, 2**32 - 1), behind=st.binary(max_size=50), cuts=CUTS)
def test_a_length_above_the_limit_ends_the_connection_before_anything_of_the_message_is_read(
    before: list[bytes], length: int, behind: bytes, cuts: list[int]
) -> None:
    end = End()
    end.receive(framed(*before) + length.to_bytes(HEADER_BYTES) + behind, cuts)
    assert end.messages == before
    assert end.transport.aborted


@given(messages=st.lists(st.binary(max_size=9), min_size=2, max_size=9), wrong=st.integers(0, 7), cuts=CUTS)
def test_nothing_is_delivered_after_the_receiver_has_aborted(
    messages: list[bytes], wrong: int, cuts: list[int]
) -> None:
    wrong = min(wrong, len(messages) - 1)

    def look(message: bytes) -> None:
        seen.append(message)
        if len(seen) == wrong + 1:
            end.framing.abort()

    seen: list[bytes] = []
    end = End(on_message=look)
    end.receive(framed(*messages), cuts)
    assert seen == messages[: wrong + 1]


def test_a_limit_that_is_raised_holds_for_what_comes_in_the_same_piece() -> None:
    def admit(message: bytes) -> None:
        seen.append(message)
        end.framing.limit = 1000

    seen: list[bytes] = []
    end = End(limit=32, on_message=admit)
    end.framing.data_received(framed(b"t" * 32, b"m" * 1000))
    assert seen == [b"t" * 32, b"m" * 1000]
    end.framing.data_received(framed(b"m" * 1001))
    assert end.transport.aborted


def test_a_long_message_in_many_small_pieces_costs_memory_and_time_in_proportion() -> None:
    # joining at each piece would copy 128 GiB
    size = 16 * 2**20
    piece = 1024
    end = End(limit=size)
    data = framed(b"x" * size)
    tracemalloc.start()
    try:
        for start in range(0, len(data), piece):
            end.framing.data_received(data[start : start + piece])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [len(message) for message in end.messages] == [size]
    assert peak < 4 * size  # the pieces, the whole, the message


def test_after_the_end_sending_and_ending_have_no_effect_and_nobody_waits() -> None:
    async def scenario() -> None:
        end = End()
        end.framing.connection_lost(None)
        end.framing.send(b"late")
        end.framing.close()
        end.framing.abort()
        assert (end.losses, end.transport.written) == (1, b"")
        assert (end.transport.closed, end.transport.aborted) == (False, False)

    asyncio.run(scenario())


def test_the_owner_learns_when_the_other_side_falls_behind_and_when_it_has_caught_up() -> None:
    pauses: list[bool] = []
    framing = Framing(lambda message: None, lambda: None, on_pause=pauses.append)
    for _ in range(2):
        framing.pause_writing()
        framing.resume_writing()
    assert pauses == [True, False] * 2
