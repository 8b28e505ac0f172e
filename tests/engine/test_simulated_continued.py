"""A stream of the simulated engine that another one continues has the bytes of its undisturbed run."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.engine.simulated import SimulatedEngine
from serve_app.errors import EngineFailed
from serve_app.transport import NOT_CONTINUABLE, EngineInfo, Frame, Submit, Unsent
from serve_app.types import Operation
from tests.effort import examples
from tests.engine.simulated_engine import CREATED, HELLO, MadeUpTime, run, submit

PROMPTS = st.lists(st.text("ab ", min_size=1, max_size=9).filter(str.strip), min_size=1, max_size=3)


def frames(asked: Submit, at_most: int | None = None, **simulated: Any) -> list[Frame]:
    """Its frames on an engine of its own; the engine dies after so many."""

    async def collect(engine: SimulatedEngine, time: MadeUpTime, info: EngineInfo) -> list[Frame]:
        assert info.continues
        time.now = 7.0
        found: list[Frame] = []
        async for frame in engine.run(asked):
            found.append(frame)
            if len(found) == at_most:
                break
        return found

    reported: list[Frame] = run(collect, simulated=simulated)
    assert (reported[0].status, reported[0].media) == (200, "sse")
    return reported


def continued(asked: Submit, had: list[Frame]) -> Submit:
    """The request that goes on after these frames."""
    groups = [group for frame in had for group in frame.groups]
    return msgspec.structs.replace(asked, created=CREATED, groups=groups, events=sum(frame.events for frame in had))


def body_of(had: list[Frame]) -> bytes:
    return b"".join(frame.body for frame in had)


@settings(max_examples=examples(60), deadline=None)
@given(
    prompts=PROMPTS, n=st.integers(1, 3), length=st.integers(1, 12), stop=st.sampled_from([None, "ba", "o k"]),
    is_chat=st.booleans(), usage=st.booleans(), cuts=st.lists(st.integers(1, 6), max_size=4),
)  # fmt: skip
def test_a_stream_cut_at_any_messages_has_the_bytes_of_the_undisturbed_one(
    prompts: list[str], n: int, length: int, stop: str | None, is_chat: bool, usage: bool, cuts: list[int]
) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompts[0]}]} if is_chat else {"prompt": prompts}
    asked |= {"n": n, "max_tokens": length, "stream": True, "stream_options": {"include_usage": usage}}
    request = submit(Operation.CHAT if is_chat else Operation.COMPLETION, asked | ({"stop": stop} if stop else {}))
    undisturbed = frames(request)
    had: list[Frame] = []
    for cut in cuts:
        left = len(undisturbed) - len(had)
        if cut >= left:
            break
        had += frames(continued(request, had), cut)
        assert len(undisturbed) == left + len(had) - cut
    had += frames(continued(request, had))
    assert body_of(had) == body_of(undisturbed)
    assert had[-1].usage == undisturbed[-1].usage
    assert [frame.groups for frame in had] == [frame.groups for frame in undisturbed]
    assert sum(frame.events for frame in had) == sum(frame.events for frame in undisturbed)


def test_the_time_of_an_answer_is_that_of_its_first_run() -> None:
    asked = submit(Operation.CHAT, HELLO | {"max_tokens": 3, "stream": True})
    for created in (5, CREATED + 9):
        (first, *_) = frames(msgspec.structs.replace(asked, created=created))
        assert b'"created":%d,' % created in first.body


def test_a_continued_stream_counts_its_new_tokens_alone() -> None:
    asked = submit(Operation.CHAT, HELLO | {"max_tokens": 9, "stream": True})
    had = frames(asked, 5)

    async def generated(engine: SimulatedEngine, time: MadeUpTime, info: EngineInfo) -> tuple[int, ...]:
        assert len([frame async for frame in engine.run(continued(asked, had))]) == 4
        load = engine.load()
        return load.generated_tokens, load.prompt_tokens, load.prefilled_tokens

    assert had[0].prompt is not None
    produced = sum(len(tokens) for frame in had for _, *tokens in frame.groups)
    assert run(generated) == (9 - produced, 0, had[0].prompt.prompt_tokens + produced)


@pytest.mark.parametrize(
    ("groups", "events"),
    [
        ([[0, 1]], 1), ([[1, 1]], 1), ([[-1, 1]], 1), ([[]], 1), ("more", 9), ("all", 3), ("some", 1), ("some", 3),
        ([], 1),
    ],
    ids=["other_tokens", "no_choice", "negative", "empty", "too_long", "ended", "too_few", "too_many", "no_groups"],
)  # fmt: skip
def test_what_cannot_be_continued_exactly_is_not(groups: Any, events: int) -> None:
    asked = submit(Operation.CHAT, HELLO | {"max_tokens": 3, "stream": True})
    if isinstance(groups, str):
        length = {"more": 9, "all": 3, "some": 2}[groups]
        longer = submit(Operation.CHAT, HELLO | {"max_tokens": length, "stream": True})
        groups = [group for frame in frames(longer) for group in frame.groups]
    with pytest.raises(EngineFailed) as failed:
        frames(msgspec.structs.replace(asked, groups=groups, events=events))
    assert failed.value.code == NOT_CONTINUABLE


def stopped(asked: Submit, at: int) -> Unsent:
    """What a whole answer has produced when it is stopped after so many tokens of an engine of its own."""

    async def reported(engine: SimulatedEngine, time: MadeUpTime, info: EngineInfo) -> Unsent:
        running = engine.run(asked)
        answer = asyncio.ensure_future(anext(running))
        while engine.load().generated_tokens < at:  # noqa: ASYNC110 - its made-up time passes with the loop's turns
            await asyncio.sleep(0)  # bound: it produces a token in a few turns
        unsent = engine.produced(asked)
        answer.cancel()
        await asyncio.wait({answer})
        await running.aclose()
        assert engine.produced(asked) == Unsent([])
        return unsent

    made: Unsent = run(reported)
    return made


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stops", [[1], [4], [2, 3, 1]])
def test_a_whole_answer_that_was_stopped_continues_with_what_it_has_produced(n: int, stops: list[int]) -> None:
    asked = submit(Operation.CHAT, HELLO | {"max_tokens": 12, "n": n})
    asked = msgspec.structs.replace(asked, created=CREATED)
    (undisturbed,) = whole(asked)
    groups: list[list[int]] = []
    for at in stops:
        more, prompt = stopped(msgspec.structs.replace(asked, groups=groups), at * n)
        assert sum(len(group) - 1 for group in more) >= at
        assert prompt is not None
        assert prompt.prompt_tokens == undisturbed.usage.prompt_tokens  # type: ignore[union-attr]
        groups += more
    (frame,) = whole(msgspec.structs.replace(asked, groups=groups))
    assert (frame.body, frame.usage) == (undisturbed.body, undisturbed.usage)
    made = [token for part in (groups, frame.groups) for choice, *tokens in part for token in tokens if not choice]
    assert made == [token for choice, *tokens in undisturbed.groups for token in tokens if not choice]


def whole(asked: Submit) -> list[Frame]:
    async def collect(engine: SimulatedEngine, time: MadeUpTime, info: EngineInfo) -> list[Frame]:
        return [frame async for frame in engine.run(asked)]

    found: list[Frame] = run(collect)
    assert (found[0].status, found[0].media) == (200, "json")
    return found


def test_a_stream_has_reported_all_in_its_frames() -> None:
    async def reported(engine: SimulatedEngine, time: MadeUpTime, info: EngineInfo) -> Unsent:
        asked = submit(Operation.CHAT, HELLO | {"max_tokens": 9, "stream": True})
        async for _ in engine.run(asked):
            return engine.produced(asked)
        raise AssertionError

    assert run(reported) == Unsent([])
