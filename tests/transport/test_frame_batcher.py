"""Frames leave in order, together, and grow together while the consumer is behind."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.errors import EngineFailed
from serve_app.transport import frame_batcher as outbox
from serve_app.transport.frame_batcher import MAX_MESSAGE_BYTES, FrameBatcher, merge
from serve_app.transport.messages import Frame, TokenUsage, batch_decoder


async def drain(box: FrameBatcher) -> list[bytes]:
    box.close()
    return [message async for message in box.messages()]


def test_frames_of_one_turn_leave_in_one_message() -> None:
    async def scenario() -> list[bytes]:
        outbox = FrameBatcher()
        for number in range(5):
            outbox.put(Frame(number, b"x"))
        return await drain(outbox)

    messages = asyncio.run(scenario())
    assert len(messages) == 1
    assert [frame.number for frame in batch_decoder.decode(messages[0]).frames] == [0, 1, 2, 3, 4]


def test_a_frame_is_not_held_back_when_the_consumer_waits() -> None:
    async def scenario() -> Frame:
        outbox = FrameBatcher()
        messages = outbox.messages()
        waiting = asyncio.ensure_future(anext(messages))
        await asyncio.sleep(0)
        outbox.put(Frame(1, b"now"))
        message = await asyncio.wait_for(waiting, 5)  # bound: fails instead of hanging
        return batch_decoder.decode(message).frames[0]

    assert asyncio.run(scenario()).body == b"now"


def test_a_changed_share_leaves_even_without_frames() -> None:
    async def scenario() -> list[bytes]:
        outbox = FrameBatcher()
        outbox.set_slots(7)
        return await drain(outbox)

    assert [batch_decoder.decode(message).slots for message in asyncio.run(scenario())] == [7]


def test_merging_keeps_the_head_and_the_end() -> None:
    usage = TokenUsage(prompt_tokens=1, completion_tokens=2)
    head = Frame(1, b"a", status=200, media="sse", groups=[[0, 5]], events=1)
    end = Frame(1, b"b", groups=[[0, 6]], events=2, usage=usage)
    assert merge(head, end) == Frame(1, b"ab", 200, "sse", [[0, 5], [0, 6]], 3, usage)


FRAMES = st.lists(
    st.tuples(st.integers(0, 3), st.binary(max_size=4), st.lists(st.integers(0, 9), max_size=3)), max_size=60
)


@given(frames=FRAMES, reads=st.sets(st.integers(0, 60)))
def test_nothing_is_lost_or_reordered_however_the_consumer_lags(
    frames: list[tuple[int, bytes, list[int]]], reads: set[int]
) -> None:
    async def scenario() -> list[bytes]:
        outbox, seen = FrameBatcher(), []
        messages = outbox.messages()
        for index, (number, body, tokens) in enumerate(frames):
            outbox.put(Frame(number, body, groups=[[0, *tokens]], events=1))
            if index in reads:
                seen.append(await anext(messages))
        outbox.close()
        return seen + [message async for message in messages]

    received: dict[int, Frame] = {}
    for message in asyncio.run(scenario()):
        for frame in batch_decoder.decode(message).frames:
            received[frame.number] = merge(received[frame.number], frame) if frame.number in received else frame
    for number in {number for number, _, _ in frames}:
        mine = [(body, tokens) for other, body, tokens in frames if other == number]
        assert received[number].body == b"".join(body for body, _ in mine)
        assert received[number].groups == [[0, *tokens] for _, tokens in mine]
        assert received[number].events == len(mine)


def test_a_long_answer_leaves_in_messages_the_channel_can_carry_and_lets_others_pass() -> None:
    usage = TokenUsage(completion_tokens=3)
    long = Frame(1, b"x" * (3 * MAX_MESSAGE_BYTES + 5), 200, "json", [[0, 1, 2, 3]], 1, usage)

    async def scenario() -> list[bytes]:
        outbox = FrameBatcher()
        outbox.put(long)
        outbox.put(Frame(2, b"short"))
        return await drain(outbox)

    messages = asyncio.run(scenario())
    assert all(len(message) < 2 * MAX_MESSAGE_BYTES for message in messages)
    frames = [frame for message in messages for frame in batch_decoder.decode(message).frames]
    parts = [frame for frame in frames if frame.number == 1]
    whole = parts[0]
    for part in parts[1:]:
        whole = merge(whole, part)
    assert whole == long
    assert [part.usage for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert [frame.body for frame in frames if frame.number == 2] == [b"short"]


def test_many_frames_leave_in_messages_the_channel_can_carry() -> None:
    async def scenario() -> list[bytes]:
        outbox = FrameBatcher()
        for number in range(64):
            outbox.put(Frame(number, b"y" * (MAX_MESSAGE_BYTES // 10)))
        return await drain(outbox)

    messages = asyncio.run(scenario())
    assert all(len(message) < 2 * MAX_MESSAGE_BYTES for message in messages)
    received = b"".join(frame.body for message in messages for frame in batch_decoder.decode(message).frames)
    assert len(received) == 64 * (MAX_MESSAGE_BYTES // 10)


def test_a_router_that_does_not_read_is_held_no_more_for_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_WAITING_BYTES", 100)
    box = FrameBatcher()
    box.put(Frame(1, b"x" * 60))
    with pytest.raises(EngineFailed, match="too slowly"):
        box.put(Frame(2, b"x" * 60))
    box.put(Frame(2, b"x" * 40))
    assert sum(len(frame.body) for frame in box.next_frames()) == 100
    box.put(Frame(3, b"x" * 100))
