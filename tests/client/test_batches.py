"""Files and batches by the official SDK over the handle: the same objects as over HTTP, without a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import openai
import pytest

from serve_app.client import Client
from serve_app.http import asgi_bridge
from serve_app.http.api import file_routes
from serve_app.http.asgi_bridge import AsgiBridge
from tests.fakes import batches
from tests.fakes.batches import KEY, ROWS, Lane, jsonl, row
from tests.fakes.handle_calls import client_of

CHAT = "/v1/chat/completions"


def run(scenario: Callable[[Lane, Client], Awaitable[None]]) -> None:
    async def everything(lane: Lane) -> None:
        await scenario(lane, client_of(AsgiBridge(lane.app), KEY, asyncio.get_running_loop()))

    batches.run(everything)


def test_a_file_and_its_batch_by_the_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi_bridge, "PIECE_BYTES", 50)
    monkeypatch.setattr(file_routes, "PIECE_BYTES", 64)

    async def scenario(lane: Lane, llm: Client) -> None:
        lines = jsonl(*[row(str(number)) for number in range(20)])
        made = await llm.openai.files.create(file=("rows.jsonl", lines), purpose="batch")
        assert lane.files.content[made.id] == lines
        assert (await llm.openai.files.content(made.id)).content == lines
        batch = await llm.openai.batches.create(input_file_id=made.id, endpoint=CHAT, completion_window="24h")
        assert await llm.openai.batches.retrieve(batch.id) == batch
        assert (await llm.openai.batches.cancel(batch.id)).status == "cancelling"
        with pytest.raises(openai.ConflictError):
            await llm.openai.files.delete(made.id)

    run(scenario)


def test_a_query_reaches_the_router() -> None:
    async def scenario(lane: Lane, llm: Client) -> None:
        made = [(await llm.openai.files.create(file=(f"{n}.jsonl", ROWS), purpose="batch")).id for n in range(3)]
        assert [one.id async for one in llm.openai.files.list(limit=1, order="asc")] == made
        with pytest.raises(openai.BadRequestError) as refused:
            await llm.openai.files.list(limit=0)
        assert refused.value.param == "limit"

    run(scenario)


def test_content_that_is_lost_in_the_middle_is_an_error_and_no_short_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_routes, "PIECE_BYTES", 64)

    async def scenario(lane: Lane, llm: Client) -> None:
        made = await llm.openai.files.create(file=("rows.jsonl", ROWS), purpose="batch")
        lane.files.content[made.id] = ROWS[:100]
        with pytest.raises(openai.APIConnectionError):
            await llm.openai.files.content(made.id)

    run(scenario)
