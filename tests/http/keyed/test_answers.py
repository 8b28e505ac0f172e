"""The answers at one router: all readers get the same bytes, and a tenant has its own room and no other's."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from serve_app.core.claims import KEPT_S, Claim, ClaimState
from serve_app.errors import AnswerNotKept
from serve_app.http.error_responses import Headers
from serve_app.http.idempotency import AnswerCopy, AnswerPart
from serve_app.http.keyed import answers
from serve_app.http.keyed.answers import ENTRY_BYTES, AnswerLog, AnswerStore, fingerprint, key_digest

HEADERS: Headers = [(b"content-type", b"application/json")]
WAIT_S = 5.0  # bound of a wait that ends in microseconds unless it hangs


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def claim(run: str, tenant: str = "tenant") -> Claim:
    return Claim(tenant, run.encode(), b"body", run, ClaimState.RUNNING, ("router",))


async def begun(store: AnswerStore, run: str, size: int = 0, tenant: str = "tenant") -> AnswerLog:
    """An answer in progress with so many bytes."""
    log = store.begin(claim(run, tenant))
    if size:
        await store.append(log, (200, HEADERS), b"x" * size, is_last=False)
    return log


async def kept(store: AnswerStore, run: str, size: int = 2, tenant: str = "tenant") -> AnswerLog:
    """A complete answer."""
    log = store.begin(claim(run, tenant))
    await store.append(log, (200, HEADERS), b"x" * size, is_last=True)
    store.keep(log)
    store.seal(log)
    return log


def test_what_has_come_is_readable_and_the_last_bytes_once_the_answer_is_sealed() -> None:
    async def scenario() -> None:
        store = AnswerStore(Clock())
        log = store.begin(claim("1"))
        assert log.part(0) is None
        await store.append(log, (200, HEADERS), b"one", is_last=False)
        await store.append(log, (200, HEADERS), b"two", is_last=True)
        assert log.part(0) == AnswerPart((200, HEADERS), b"one")
        assert log.part(3) is None
        store.keep(log)
        assert log.part(3) is None
        store.seal(log)
        assert log.part(3) == AnswerPart((200, HEADERS), b"two", is_last=True)
        assert log.part(0) == AnswerPart((200, HEADERS), b"onetwo", is_last=True)

    asyncio.run(scenario())


def test_a_reader_that_waits_is_woken_by_each_change() -> None:
    async def scenario() -> None:
        store = AnswerStore(Clock())
        log = await begun(store, "1")
        waiting = asyncio.ensure_future(log.changed())
        await asyncio.sleep(0)
        await store.append(log, (200, HEADERS), b"x", is_last=False)
        await asyncio.wait_for(waiting, WAIT_S)

    asyncio.run(scenario())


def test_a_long_answer_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "PART_BYTES", 10)

    async def scenario() -> list[tuple[int, bool]]:
        log = await kept(AnswerStore(Clock()), "1", 25)
        parts = []
        offset = 0
        while not parts or not parts[-1].is_last:
            found = log.part(offset)
            assert found is not None
            parts.append(found)
            offset += len(found.body)
        return [(len(part.body), part.is_last) for part in parts]

    assert asyncio.run(scenario()) == [(10, False), (10, False), (5, True)]


def test_what_ended_a_run_is_the_end_for_its_readers_and_the_run_is_forgotten() -> None:
    async def scenario() -> None:
        store = AnswerStore(Clock())
        error = AnswerNotKept("any")
        log = await begun(store, "1", 3)
        store.seal(log, error)
        store.forget(log)
        assert log.part(0) == AnswerPart((200, HEADERS), b"xxx")
        assert log.part(3) == AnswerPart((200, HEADERS), error=error)
        assert (store.bytes, store.runs(), store.running()) == (0, [], frozenset())

    asyncio.run(scenario())


def test_an_answer_is_forgotten_after_its_time() -> None:
    async def scenario() -> None:
        clock = Clock()
        store = AnswerStore(clock)
        await kept(store, "1")
        clock.now = KEPT_S - 1
        await kept(store, "2")
        running = await begun(store, "3")
        store.forget_expired()
        assert store.runs() == ["1", "2", "3"]
        clock.now = KEPT_S
        store.forget_expired()
        assert store.runs() == ["2", "3"]
        assert store.claim_of("2") == (replace(claim("2"), state=ClaimState.KEPT), 1.0)
        assert store.running() == {running.claim.run}

    asyncio.run(scenario())


def test_a_million_keys_of_a_tenant_cost_its_own_oldest_answers_and_nothing_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answers, "TENANT_BYTES", 20 * ENTRY_BYTES)

    async def scenario() -> None:
        store = AnswerStore(Clock())
        await kept(store, "light", tenant="light")
        for number in range(1000):
            await kept(store, f"{number}", ENTRY_BYTES)
            store.keep_copy(
                AnswerCopy(replace(claim(f"copy {number}"), state=ClaimState.KEPT), (200, []), b"x" * ENTRY_BYTES)
            )
            assert store.bytes <= 21 * ENTRY_BYTES + 2
        assert store.claim_of("light") is not None
        assert store.claim_of("999") is not None
        assert store.claim_of("copy 999") is not None
        assert store.claim_of("980") is None

    asyncio.run(scenario())


def test_where_all_tenants_have_used_up_the_router_s_room_a_new_answer_costs_its_own_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answers, "MAX_BYTES", 10 * ENTRY_BYTES)

    async def scenario() -> None:
        store = AnswerStore(Clock())
        for number in range(4):
            await kept(store, f"{number}", ENTRY_BYTES)
        late = await begun(store, "late", 4 * ENTRY_BYTES, tenant="other")
        assert not late.is_kept
        await kept(store, "4", ENTRY_BYTES)
        assert store.claim_of("0") is None
        assert all(store.claim_of(f"{number}") for number in (1, 2, 3))

    asyncio.run(scenario())


def test_answers_in_progress_count_and_the_tenant_s_oldest_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "TENANT_BYTES", 10 * ENTRY_BYTES)

    async def scenario() -> None:
        store = AnswerStore(Clock())
        logs = [await begun(store, f"{number}", ENTRY_BYTES) for number in range(6)]
        assert [log.is_kept for log in logs] == [False, False, True, True, True, True]
        light = await begun(store, "light", ENTRY_BYTES, tenant="light")
        assert light.is_kept

    asyncio.run(scenario())


def test_of_an_answer_that_is_not_kept_there_is_a_window_and_the_run_waits_for_its_fastest_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answers, "MAX_ANSWER_BYTES", 1000)
    monkeypatch.setattr(answers, "WINDOW_BYTES", 100)

    async def scenario() -> None:
        store = AnswerStore(Clock())
        log = await begun(store, "1", 1000)
        log.offsets["fast"] = log.offsets["slow"] = 0
        more = asyncio.ensure_future(store.append(log, (200, HEADERS), b"y" * 50, is_last=False))
        await asyncio.sleep(0)
        assert not log.is_kept
        assert not more.done(), "nothing is thrown away that nobody has read"
        log.offsets["fast"] = 1000
        store.trim(log)
        log.notify()
        await asyncio.wait_for(more, WAIT_S)
        assert log.start == 900
        assert store.bytes == ENTRY_BYTES + 150
        late = log.part(log.offsets["slow"])
        assert late is not None
        assert isinstance(late.error, AnswerNotKept)
        log.offsets.clear()
        await store.append(log, (200, HEADERS), b"z", is_last=True)
        store.keep(log)
        store.seal(log)
        assert store.bytes == ENTRY_BYTES
        found = store.claim_of("1")
        assert found is not None
        assert found[0].state is ClaimState.NOT_KEPT

    asyncio.run(scenario())


def test_a_copy_is_kept_once_and_not_if_it_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_ANSWER_BYTES", 10)
    store = AnswerStore(Clock())
    copy = AnswerCopy(replace(claim("1"), state=ClaimState.KEPT), (200, HEADERS), b"x" * 10)
    for _ in range(2):
        store.keep_copy(copy)
    store.keep_copy(replace(copy, claim=replace(copy.claim, run="2"), body=b"x" * 11))
    assert store.runs() == ["1"]
    assert store.logs["1"].part(0) == AnswerPart((200, HEADERS), b"x" * 10, is_last=True)
    assert store.bytes == ENTRY_BYTES + 10


def test_field_order_does_not_change_the_fingerprint() -> None:
    assert fingerprint("chat", {"a": 1, "b": 2}) == fingerprint("chat", {"b": 2, "a": 1})
    assert fingerprint("chat", {"a": 1}) != fingerprint("completion", {"a": 1})


def test_the_digest_of_a_key_depends_on_its_tenant_and_is_short() -> None:
    assert key_digest("a", "k") == key_digest("a", "k")
    assert len({key_digest("a", "k"), key_digest("b", "k"), key_digest("a", "l"), key_digest("ak", "")}) == 4
    assert len(key_digest("a", "k" * 255)) == 16
