"""A repeat under the same Idempotency-Key gets the same bytes and runs nothing."""

from __future__ import annotations

import asyncio

import pytest

from serve_app.errors import BadRequest
from serve_app.http.idempotency import Answer, Replays, fingerprint

OWNER = ("tenant", "key")
PRINT = fingerprint("chat", {"model": "m", "messages": []})
ANSWER = Answer(200, [(b"content-type", b"application/json")], b"{}")
WAIT_S = 5.0  # bound of a wait that ends in microseconds unless it hangs


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def settled(replays: Replays, owner: tuple[str, str] = OWNER, answer: Answer | None = ANSWER) -> None:
    assert await replays.claim(owner, PRINT) is None
    replays.settle(owner, answer)


def test_a_repeat_gets_the_kept_answer() -> None:
    async def scenario() -> Answer | None:
        replays = Replays(Clock())
        await settled(replays)
        return await replays.claim(OWNER, PRINT)

    assert asyncio.run(scenario()) == ANSWER


def test_a_repeat_waits_for_the_run_under_way() -> None:
    async def scenario() -> tuple[bool, Answer | None]:
        replays = Replays(Clock())
        assert await replays.claim(OWNER, PRINT) is None
        repeat = asyncio.ensure_future(replays.claim(OWNER, PRINT))
        await asyncio.sleep(0)
        early = repeat.done()
        replays.settle(OWNER, ANSWER)
        return early, await asyncio.wait_for(repeat, WAIT_S)

    assert asyncio.run(scenario()) == (False, ANSWER)


def test_a_run_without_an_answer_lets_exactly_one_repeat_run() -> None:
    async def scenario() -> list[bool]:
        replays = Replays(Clock())
        assert await replays.claim(OWNER, PRINT) is None
        repeats = [asyncio.ensure_future(replays.claim(OWNER, PRINT)) for _ in range(3)]
        await asyncio.sleep(0)
        replays.settle(OWNER, None)
        done, pending = await asyncio.wait(repeats, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1
        replays.settle(OWNER, ANSWER)
        return [await asyncio.wait_for(repeat, WAIT_S) == ANSWER for repeat in pending]

    assert asyncio.run(scenario()) == [True, True]


def test_another_request_under_the_same_key_is_refused_and_names_the_header() -> None:
    async def scenario() -> None:
        replays = Replays(Clock())
        await settled(replays)
        await replays.claim(OWNER, fingerprint("chat", {"model": "other"}))

    with pytest.raises(BadRequest) as caught:
        asyncio.run(scenario())
    assert caught.value.param == "Idempotency-Key"


def test_tenants_do_not_see_each_others_keys() -> None:
    async def scenario() -> Answer | None:
        replays = Replays(Clock())
        await settled(replays)
        return await replays.claim(("other", "key"), PRINT)

    assert asyncio.run(scenario()) is None


def test_an_answer_is_forgotten_after_its_time() -> None:
    async def scenario() -> Answer | None:
        clock = Clock()
        replays = Replays(clock, kept_s=10.0)
        await settled(replays)
        clock.now = 10.0
        return await replays.claim(OWNER, PRINT)

    assert asyncio.run(scenario()) is None


@pytest.mark.parametrize("bounds", [{"max_entries": 10}, {"max_bytes": 10 * len(ANSWER.body)}])
def test_memory_stays_within_its_bounds_and_the_newest_are_kept(bounds: dict[str, int]) -> None:
    async def scenario() -> tuple[int, bool]:
        replays = Replays(Clock(), **bounds)
        for number in range(1000):
            await settled(replays, ("tenant", str(number)))
        return len(replays._entries), await replays.claim(("tenant", "999"), PRINT) == ANSWER

    entries, newest_kept = asyncio.run(scenario())
    assert entries <= 11
    assert newest_kept


def test_field_order_does_not_change_the_fingerprint() -> None:
    assert fingerprint("chat", {"a": 1, "b": 2}) == fingerprint("chat", {"b": 2, "a": 1})
    assert fingerprint("chat", {"a": 1}) != fingerprint("completion", {"a": 1})
