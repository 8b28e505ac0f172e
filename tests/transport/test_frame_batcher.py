"""Frames leave in order, together, and grow together while the router is behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.errors import EngineFailed
from serve_app.transport import frame_batcher as batcher_module
from serve_app.transport.frame_batcher import MAX_MESSAGE_BYTES, FrameBatcher, merge
from serve_app.transport.messages import Frame, TokenUsage, batch_decoder


class Sink:
    """Takes the messages of a batcher, of which it holds all that have come."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.box = FrameBatcher(self.messages.append)

    @property
    def frames(self) -> list[Frame]:
        return [frame for message in self.messages for frame in batch_decoder.decode(message).frames]


def collect(fill: Callable[[Sink], None]) -> Sink:
    """What leaves a turn after `fill` has put its frames."""

    async def scenario() -> Sink:
        sink = Sink()
        fill(sink)
        assert not sink.messages
        await asyncio.sleep(0)
        return sink

    return asyncio.run(scenario())


def test_frames_of_one_turn_leave_in_one_message_a_turn_later() -> None:
    def fill(sink: Sink) -> None:
        for number in range(5):
            sink.box.put(Frame(number, b"x"))

    sink = collect(fill)
    assert len(sink.messages) == 1
    assert [frame.number for frame in sink.frames] == [0, 1, 2, 3, 4]


def test_a_changed_share_leaves_even_without_frames() -> None:
    sink = collect(lambda sink: sink.box.set_slots(7))
    assert [batch_decoder.decode(message).slots for message in sink.messages] == [7]


def test_while_the_router_is_behind_frames_wait_and_leave_once_it_has_caught_up() -> None:
    async def scenario() -> None:
        sink = Sink()
        sink.box.pause(True)
        for body in (b"a", b"b"):
            sink.box.put(Frame(1, body))
            await asyncio.sleep(0)
        assert not sink.messages
        sink.box.pause(False)
        await asyncio.sleep(0)
        assert [frame.body for frame in sink.frames] == [b"ab"]

    asyncio.run(scenario())


def test_a_router_that_falls_behind_in_the_middle_of_a_long_answer_gets_the_rest_later() -> None:
    async def scenario() -> None:
        sent: list[bytes] = []

        def send(message: bytes) -> None:
            sent.append(message)
            box.pause(True)  # the buffers are full

        box = FrameBatcher(send)
        box.put(Frame(1, b"x" * 2 * MAX_MESSAGE_BYTES))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(sent) == 1
        box.pause(False)
        await asyncio.sleep(0)
        assert len(sent) == 2

    asyncio.run(scenario())


def test_merging_keeps_the_head_and_the_end() -> None:
    usage = TokenUsage(prompt_tokens=1, completion_tokens=2)
    prompt = TokenUsage(prompt_tokens=1)
    head = Frame(1, b"a", status=200, media="sse", groups=[[0, 5]], events=1, prompt=prompt)
    end = Frame(1, b"b", groups=[[0, 6]], events=2, usage=usage)
    assert merge(head, end) == Frame(1, b"ab", 200, "sse", [[0, 5], [0, 6]], 3, usage, prompt=prompt)


FRAMES = st.lists(
    st.tuples(st.integers(0, 3), st.binary(max_size=4), st.lists(st.integers(0, 9), max_size=3)), max_size=60
)


@given(frames=FRAMES, reads=st.sets(st.integers(0, 60)))
def test_nothing_is_lost_or_reordered_however_the_consumer_lags(
    frames: list[tuple[int, bytes, list[int]]], reads: set[int]
) -> None:
    async def scenario() -> list[Frame]:
        sink = Sink()
        sink.box.pause(True)
        for index, (number, body, tokens) in enumerate(frames):
            sink.box.put(Frame(number, body, groups=[[0, *tokens]], events=1))
            if index in reads:
                sink.box.pause(False)
                await asyncio.sleep(0)
                sink.box.pause(True)
        sink.box.pause(False)
        await asyncio.sleep(0)
        return sink.frames

    received: dict[int, Frame] = {}
    for frame in asyncio.run(scenario()):
        received[frame.number] = merge(received[frame.number], frame) if frame.number in received else frame
    for number in {number for number, _, _ in frames}:
        of_stream = [(body, tokens) for other, body, tokens in frames if other == number]
        assert received[number].body == b"".join(body for body, _ in of_stream)
        assert received[number].groups == [[0, *tokens] for _, tokens in of_stream]
        assert received[number].events == len(of_stream)


def test_a_long_answer_leaves_in_messages_the_channel_can_carry_and_lets_others_pass() -> None:
    usage = TokenUsage(completion_tokens=3)
    long = Frame(1, b"x" * (3 * MAX_MESSAGE_BYTES + 5), 200, "json", [[0, 1, 2, 3]], 1, usage)

    def fill(sink: Sink) -> None:
        sink.box.put(long)
        sink.box.put(Frame(2, b"short"))

    sink = collect(fill)
    assert all(len(message) < 2 * MAX_MESSAGE_BYTES for message in sink.messages)
    frames = sink.frames
    parts = [frame for frame in frames if frame.number == 1]
    whole = parts[0]
    for part in parts[1:]:
        whole = merge(whole, part)
    assert whole == long
    assert [part.usage for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert [frame.body for frame in frames if frame.number == 2] == [b"short"]


def test_many_frames_leave_in_messages_the_channel_can_carry() -> None:
    def fill(sink: Sink) -> None:
        for number in range(64):
            sink.box.put(Frame(number, b"y" * (MAX_MESSAGE_BYTES // 10)))

    sink = collect(fill)
    assert all(len(message) < 2 * MAX_MESSAGE_BYTES for message in sink.messages)
    assert sum(len(frame.body) for frame in sink.frames) == 64 * (MAX_MESSAGE_BYTES // 10)


def test_a_router_that_does_not_read_is_held_no_more_for_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batcher_module, "MAX_WAITING_BYTES", 100)

    async def scenario() -> None:
        box = FrameBatcher(lambda message: None)
        box.put(Frame(1, b"x" * 60))
        with pytest.raises(EngineFailed, match="too slowly"):
            box.put(Frame(2, b"x" * 60))
        box.put(Frame(2, b"x" * 40))
        assert sum(len(frame.body) for frame in box.next_frames()) == 100
        box.put(Frame(3, b"x" * 100))

    asyncio.run(scenario())
