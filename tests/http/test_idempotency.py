"""A repeat under the same Idempotency-Key gets the same bytes and runs nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from serve_app.errors import AnswerNotKept, BadRequest
from serve_app.http import idempotency
from serve_app.http.error_responses import Answer
from serve_app.http.idempotency import ENTRY_BYTES, IdempotencyCache, fingerprint

OWNER = ("tenant", "key")
PRINT = fingerprint("chat", {"model": "m", "messages": []})
ANSWER: Answer = (200, [(b"content-type", b"application/json")], b"{}")
WAIT_S = 5.0  # bound of a wait that ends in microseconds unless it hangs


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def end(replays: IdempotencyCache, owner: tuple[str, str] = OWNER, answer: Answer | None = ANSWER) -> None:
    if answer is not None:
        replays.add(owner, answer[2])
    replays.finish(owner, None if answer is None else answer[:2])


async def settled(replays: IdempotencyCache, owner: tuple[str, str] = OWNER, answer: Answer | None = ANSWER) -> None:
    assert await replays.claim(owner, PRINT) is None
    end(replays, owner, answer)


def of(size: int) -> Answer:
    return 200, [], b"x" * size


def test_a_repeat_gets_the_kept_answer() -> None:
    async def scenario() -> Answer | None:
        replays = IdempotencyCache(Clock())
        await settled(replays)
        return await replays.claim(OWNER, PRINT)

    assert asyncio.run(scenario()) == ANSWER


def test_a_repeat_waits_for_the_run_under_way() -> None:
    async def scenario() -> tuple[bool, Answer | None]:
        replays = IdempotencyCache(Clock())
        assert await replays.claim(OWNER, PRINT) is None
        repeat = asyncio.ensure_future(replays.claim(OWNER, PRINT))
        await asyncio.sleep(0)
        early = repeat.done()
        end(replays)
        return early, await asyncio.wait_for(repeat, WAIT_S)

    assert asyncio.run(scenario()) == (False, ANSWER)


def test_a_run_without_an_answer_lets_exactly_one_repeat_run() -> None:
    async def scenario() -> list[bool]:
        replays = IdempotencyCache(Clock())
        assert await replays.claim(OWNER, PRINT) is None
        repeats = [asyncio.ensure_future(replays.claim(OWNER, PRINT)) for _ in range(3)]
        await asyncio.sleep(0)
        end(replays, answer=None)
        done, pending = await asyncio.wait(repeats, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1
        end(replays)
        return [await asyncio.wait_for(repeat, WAIT_S) == ANSWER for repeat in pending]

    assert asyncio.run(scenario()) == [True, True]


def test_another_request_under_the_same_key_is_refused_and_names_the_header() -> None:
    async def scenario() -> None:
        replays = IdempotencyCache(Clock())
        await settled(replays)
        await replays.claim(OWNER, fingerprint("chat", {"model": "other"}))

    with pytest.raises(BadRequest) as caught:
        asyncio.run(scenario())
    assert caught.value.param == "Idempotency-Key"


def test_tenants_do_not_see_each_others_keys() -> None:
    async def scenario() -> Answer | None:
        replays = IdempotencyCache(Clock())
        await settled(replays)
        return await replays.claim(("other", "key"), PRINT)

    assert asyncio.run(scenario()) is None


def test_an_answer_is_forgotten_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "KEPT_S", 10.0)

    async def scenario() -> Answer | None:
        clock = Clock()
        replays = IdempotencyCache(clock)
        await settled(replays)
        clock.now = 10.0
        return await replays.claim(OWNER, PRINT)

    assert asyncio.run(scenario()) is None


def test_memory_stays_within_its_bound_and_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "MAX_BYTES", 20 * ENTRY_BYTES)

    async def scenario() -> None:
        replays = IdempotencyCache(Clock())
        for number in range(1000):
            await settled(replays, ("tenant", str(number)))
            assert replays.bytes <= 20 * ENTRY_BYTES
        assert await replays.claim(("tenant", "999"), PRINT) == ANSWER
        assert await replays.claim(("tenant", "900"), PRINT) is None

    asyncio.run(scenario())


def test_a_tenant_that_fills_the_store_takes_its_own_room_and_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "MAX_BYTES", 100 * ENTRY_BYTES)

    async def scenario() -> None:
        replays = IdempotencyCache(Clock())
        for number in range(20):
            await settled(replays, ("light", str(number)), of(ENTRY_BYTES))
        for number in range(1000):
            await settled(replays, ("heavy", str(number)), of(ENTRY_BYTES))
        for number in range(20):
            assert await replays.claim(("light", str(number)), PRINT) == of(ENTRY_BYTES)

    asyncio.run(scenario())


def test_answers_that_are_being_made_count_and_the_largest_tenants_oldest_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(idempotency, "MAX_BYTES", 100 * ENTRY_BYTES)

    async def scenario() -> None:
        replays = IdempotencyCache(Clock())
        for number in range(500):
            assert await replays.claim(("heavy", str(number)), PRINT) is None
            replays.add(("heavy", str(number)), b"x" * ENTRY_BYTES)
            assert replays.bytes <= 100 * ENTRY_BYTES
        await settled(replays, ("light", "one"), of(10 * ENTRY_BYTES))
        assert await replays.claim(("light", "one"), PRINT) == of(10 * ENTRY_BYTES)
        with pytest.raises(AnswerNotKept):
            await replays.claim(("heavy", "0"), PRINT)
        for number in range(500):
            replays.finish(("heavy", str(number)), (200, []))
        assert await replays.claim(("heavy", "499"), PRINT) == of(ENTRY_BYTES)

    asyncio.run(scenario())


def test_an_answer_too_long_to_keep_holds_nothing_and_a_repeat_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "MAX_ANSWER_BYTES", 1000)

    async def scenario() -> None:
        replays = IdempotencyCache(Clock())
        assert await replays.claim(OWNER, PRINT) is None
        repeat = asyncio.ensure_future(replays.claim(OWNER, PRINT))
        await asyncio.sleep(0)
        for _ in range(1001):
            replays.add(OWNER, b"x")
        with pytest.raises(AnswerNotKept, match="1000 bytes"):  # without waiting for the run's end
            await asyncio.wait_for(repeat, WAIT_S)
        assert replays.bytes == 0
        replays.finish(OWNER, (200, []))
        assert replays.bytes == ENTRY_BYTES
        with pytest.raises(AnswerNotKept) as caught:
            await replays.claim(OWNER, PRINT)
        assert caught.value.status == 409

    asyncio.run(scenario())


def test_a_long_answer_that_did_not_end_well_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "MAX_ANSWER_BYTES", 10)

    async def scenario() -> None:
        replays = IdempotencyCache(Clock())
        await settled(replays, answer=of(10))
        other = ("tenant", "other")
        assert await replays.claim(other, PRINT) is None
        replays.add(other, b"x" * 11)
        replays.finish(other, None)
        assert await replays.claim(other, PRINT) is None

    asyncio.run(scenario())


def test_a_claim_looks_at_no_other_answer_however_many_are_kept() -> None:
    """A store of 50,000 answers whose oldest is under way: before, each claim went through all of them."""

    class Counted(dict[str, Any]):
        looks = 0

        def __iter__(self) -> Any:
            Counted.looks += len(self)
            return super().__iter__()

        def items(self) -> Any:
            Counted.looks += len(self)
            return super().items()

    async def scenario() -> None:
        replays = IdempotencyCache(Clock())
        assert await replays.claim(("tenant", "under way"), PRINT) is None
        for number in range(50_000):
            await settled(replays, ("tenant", str(number)))
        tenant = replays.tenants["tenant"]
        tenant.entries = Counted(tenant.entries)
        for number in range(100):
            await settled(replays, ("tenant", f"more {number}"))
        assert Counted.looks == 0

    asyncio.run(scenario())


def test_field_order_does_not_change_the_fingerprint() -> None:
    assert fingerprint("chat", {"a": 1, "b": 2}) == fingerprint("chat", {"b": 2, "a": 1})
    assert fingerprint("chat", {"a": 1}) != fingerprint("completion", {"a": 1})
