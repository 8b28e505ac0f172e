"""Use in the store, the same on every database."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from serve_app.core.usage import UsageBatch, UsageRow
from serve_app.store.records import UsageQuery, Used
from tests.store.conftest import OpenStore

ROW = UsageRow("2026-11-25", "k", "t", "m/x", 2, 10, 4, 5, kv_token_ms=2**40, wait_ms=9, cost_micro=7)


def test_a_batch_counts_once_however_often_it_is_sent(open_store: OpenStore) -> None:
    async def scenario() -> None:
        store = open_store()
        batch = UsageBatch("router", 1, (ROW,))
        await asyncio.gather(*(store.add_usage(batch) for _ in range(4)))
        assert await store.usage(UsageQuery()) == [replace(ROW, asked_model=ROW.model)]
        await store.add_usage(replace(batch, seq=2))
        await store.add_usage(batch)
        await store.add_usage(replace(batch, source="another"))
        (found,) = await store.usage(UsageQuery())
        assert (found.requests, found.kv_token_ms) == (3 * ROW.requests, 3 * ROW.kv_token_ms)

    asyncio.run(scenario())


def test_use_is_summed_by_what_is_asked_for(open_store: OpenStore) -> None:
    async def scenario() -> None:
        store = open_store()
        rows = (ROW, replace(ROW, day="2026-11-26"), replace(ROW, key_id="l"), replace(ROW, tenant="u"))
        await store.add_usage(UsageBatch("router", 1, rows))
        by_tenant = await store.usage(UsageQuery(by=("tenant",)))
        assert [(one.tenant, one.day, one.requests) for one in by_tenant] == [("t", "", 6), ("u", "", 2)]
        (total,) = await store.usage(UsageQuery(by=(), from_day="2026-11-25", to_day="2026-11-25"))
        assert total.requests == 6
        assert [one.key_id for one in await store.usage(UsageQuery(key_id="l"))] == ["l"]
        assert await store.usage(UsageQuery(by=(), tenant="' OR 1=1")) == []
        with pytest.raises(ValueError, match="hour"):
            await store.usage(UsageQuery(by=("hour",)))

    asyncio.run(scenario())


def test_use_is_summed_by_the_name_that_was_asked_for_and_by_the_model_that_ran(open_store: OpenStore) -> None:
    async def scenario() -> None:
        store = open_store()
        spare = replace(ROW, model="spare", asked_model="chat", requests=1)
        row = replace(spare, model="spare (batch)", asked_model="chat (batch)")
        rows = (ROW, replace(ROW, asked_model="chat", requests=3), spare, row)
        await store.add_usage(UsageBatch("router", 1, rows))
        await store.add_usage(UsageBatch("before", 1, (ROW,)))  # a router of the release before sends no names

        async def sums(*by: str, **only: str) -> list[tuple[str, str, int]]:
            return [(one.asked_model, one.model, one.requests) for one in await store.usage(UsageQuery(by, **only))]

        named = [("chat", "m/x", 3), ("chat", "spare", 1), ("chat (batch)", "spare (batch)", 1)]
        assert await sums("asked_model", "model") == [*named, ("m/x", "m/x", 4)]
        assert await sums("model") == [("", "m/x", 7), ("", "spare", 1), ("", "spare (batch)", 1)]
        assert await sums("asked_model") == [("chat", "", 4), ("chat (batch)", "", 1), ("m/x", "", 4)]
        assert await sums("asked_model", "model", asked_model="chat") == named
        assert await sums("model", asked_model="chat", model="m/x") == [("", "m/x", 3)]
        assert await sums(asked_model="m/x", tenant="t", key_id="k", from_day="2026-11-25") == [("", "", 4)]
        assert await sums(asked_model="chat", to_day="2026-11-24") == []
        assert await store.used("model:t\0m/x", "2026-11-01") == Used(7, 45, 21)
        (found,) = await store.usage(UsageQuery((), asked_model="chat", model="m/x"))
        assert replace(found, requests=ROW.requests) == replace(ROW, day="", key_id="", tenant="", model="")

    asyncio.run(scenario())


def test_what_a_scope_has_used_counts_from_its_day_on(open_store: OpenStore) -> None:
    async def scenario() -> None:
        store = open_store()
        await store.add_usage(UsageBatch("router", 1, (ROW, replace(ROW, day="2026-11-24"))))
        for scope in ("key:k", "tenant:t", "model:t\0m/x"):
            assert await store.used(scope, "2026-11-25") == Used(2, 15, 7)
            assert await store.used(scope, "2026-11-01") == Used(4, 30, 14)
            assert await store.used(scope, "2026-11-26") == Used()
        assert await store.used("model:t\0m", "2026-11-01") == Used()
        row = replace(ROW, model="m/x (batch)", requests=1, prompt_tokens=3, output_tokens=2, cost_micro=1)
        await store.add_usage(UsageBatch("router", 2, (row,)))
        for scope in ("key:k", "tenant:t", "model:t\0m/x"):
            assert await store.used(scope, "2026-11-01") == Used(4, 30, 14), "rows of batches are apart"
        assert await store.used("batch:t", "2026-11-01") == Used(1, 5, 1)
        assert await store.used("batch:other", "2026-11-01") == Used()
        assert await store.used("rows:k", "2026-11-01") == Used(1, 5, 1)
        assert await store.used("allowance:k", "2026-11-01") == Used(5, 35, 15), "a key with its rows"
        both = await store.usage(UsageQuery(by=("model",), model="m/x"))
        assert [one.model for one in both] == ["m/x", "m/x (batch)"]
        with pytest.raises(ValueError, match="nothing"):
            await store.used("nothing", "2026-11-01")

    asyncio.run(scenario())
