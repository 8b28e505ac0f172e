"""What the reader of a stream gets is what the record says that it got, however its frames were cut on the way."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.errors import EngineFailed
from serve_app.transport.frame_batcher import split
from serve_app.transport.messages import Frame, TokenUsage
from serve_app.transport.stream import ResponseStream, UnreadBytes
from tests.fakes.router import nothing


def made(unread: UnreadBytes) -> ResponseStream:
    return ResponseStream(unread, nothing, nothing)


def in_parts(frame: Frame, cuts: list[int]) -> list[Frame]:
    """The frame as the batcher splits one that is too long."""
    parts: list[Frame] = []
    for cut in cuts:
        if 0 < cut < len(frame.body):
            head, frame = split(frame, cut)
            parts.append(head)
    return [*parts, frame]


pulled = st.tuples(st.integers(1, 3), st.lists(st.integers(1, 9), max_size=3))  # events, and where a frame is cut


@given(st.lists(pulled, min_size=1, max_size=8), st.data())
def test_a_stream_that_fails_has_given_its_reader_whole_events_and_recorded_just_these(
    pulls: list[tuple[int, list[int]]], data: st.DataObject
) -> None:
    frames: list[Frame] = []
    for number, (events, cuts) in enumerate(pulls):
        body = b"data: an event\n\n" * events
        first = {"status": 200, "media": "sse"} if not number else {}
        frames += in_parts(Frame(1, body, groups=[[0, number]], events=events, **first), cuts)  # type: ignore[arg-type]
    unread = UnreadBytes()
    arrived = data.draw(st.integers(0, len(frames)))
    reads = data.draw(st.sets(st.integers(0, arrived)))
    stream = made(unread)

    async def scenario() -> bytes:
        got = b""
        for number, frame in enumerate(frames[:arrived]):
            stream.produced.add(frame.groups, frame.events)
            stream.push(frame)
            if number in reads and stream.whole_frames:
                got += b"".join([one.body for one in await stream.next()])
        stream.fail(EngineFailed("lost"))
        if stream.whole_frames:
            got += b"".join([one.body for one in await stream.next()])
        with pytest.raises(EngineFailed):
            await stream.next()
        return got

    assert asyncio.run(scenario()) == b"data: an event\n\n" * stream.produced.events
    assert (unread.bytes, stream.buffered) == (0, 0)


def test_a_document_in_parts_is_given_to_its_reader_as_it_comes() -> None:
    head, rest = split(Frame(1, b"{}", 200, "json", events=1, usage=TokenUsage()), 1)

    async def scenario() -> list[bytes]:
        stream = made(UnreadBytes())
        stream.push(head)
        first = await stream.next()
        stream.push(rest)
        return [frame.body for frame in [*first, *await stream.next()]]

    assert asyncio.run(scenario()) == [b"{", b"}"]


def test_a_stream_whose_unread_part_is_dropped_does_not_continue_elsewhere_as_if_it_had_been_read() -> None:
    async def scenario() -> None:
        unread = UnreadBytes(max_bytes=100)
        lost = made(unread)
        other = made(unread)
        lost.push(Frame(1, b"x" * 60, 200, "sse", [[0, 7]], 1))
        lost.fail(EngineFailed("lost"), connection_lost=True)
        other.push(Frame(2, b"y" * 50, 200, "sse", [[0, 8]], 1))
        with pytest.raises(EngineFailed) as failed:
            await lost.next()
        assert failed.value.code == "slow_client"
        assert not lost.connection_lost

    asyncio.run(scenario())
