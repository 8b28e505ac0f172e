"""What a client in the line is told through the real endpoint, and that the official SDK takes no notice of it."""

from __future__ import annotations

import asyncio
import re

import openai
import pytest

from tests.e2e.half_closed import read_until, send
from tests.e2e.observe import ABORT_S, Observer
from tests.e2e.stack import MAX_QUEUED, Stack
from tests.e2e.test_admission import load_on
from tests.waiting import wait_until

ASKED = {"X-Queue-Status": "1"}
TOKENS = 20


def test_the_place_comes_while_the_request_waits_and_the_answer_behind_it(
    stack: Stack, observer: Observer, simulated: str
) -> None:
    body = {"model": simulated, "prompt": "The river", "max_tokens": TOKENS, "stream": True}

    async def scenario() -> bytes:
        async with load_on(stack, observer) as load:
            blocker = await load.fill_slots()
            connection = await asyncio.to_thread(send, stack, "/v1/completions", body, headers=ASKED)
            with connection:
                before = await asyncio.to_thread(read_until, connection, b": queue position=1")
                assert not blocker.done()  # so nobody between us and the router holds it back
                blocker.cancel()
                return before + await asyncio.to_thread(read_until, connection, b"data: [DONE]")

    seen = asyncio.run(scenario())
    assert seen.startswith(b"HTTP/1.1 200 ")
    assert b"text/event-stream" in seen.partition(b"\r\n\r\n")[0]
    last = seen.rindex(b": queue ")
    first = seen.index(b"data: {")
    assert last < first
    assert re.search(rb"\n: queue position=1( expected_start_s=\d+\.\d)?\n\n", seen)


def test_who_closes_after_a_comment_leaves_the_queue(stack: Stack, observer: Observer, simulated: str) -> None:
    """The answer has begun by then, as the proxy sees it."""
    body = {"model": simulated, "prompt": "The river", "max_tokens": TOKENS, "stream": True}

    async def scenario() -> None:
        async with load_on(stack, observer) as load:
            await load.fill_slots()
            with await asyncio.to_thread(send, stack, "/v1/completions", body, headers=ASKED) as connection:
                await asyncio.to_thread(read_until, connection, b": queue position=1")
            await asyncio.to_thread(
                wait_until, lambda: observer.waiting(simulated), ABORT_S, "requests waiting", wanted=0
            )

    with observer.ends(simulated, "cancelled_queued"):
        asyncio.run(scenario())


def test_the_sdk_reads_the_same_answer_and_raises_what_ends_the_wait(
    stack: Stack, observer: Observer, simulated: str, batch_key: str
) -> None:
    """Of the batch: its class gives its place in a full line to a higher one."""

    async def ask(client: openai.AsyncOpenAI, **more: object) -> str:
        stream = await client.completions.create(
            model=simulated, prompt="The river", max_tokens=TOKENS, stream=True, extra_headers=more
        )
        return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

    async def scenario() -> None:
        async with load_on(stack, observer) as load, stack.async_client(batch_key) as client:
            alone = await ask(client)
            blocker = await load.fill_slots()
            waits = asyncio.create_task(ask(client, **ASKED))
            await load.waiting(1)
            low = [load.start(headers=stack.headers(batch_key)) for _ in range(MAX_QUEUED - 2)]
            await load.waiting(MAX_QUEUED - 1)
            youngest = await client.completions.create(
                model=simulated, prompt="a", max_tokens=1, stream=True, extra_headers=ASKED
            )  # returns with the first comment: the head is there, and no answer
            high = load.start(priority="high")
            with pytest.raises(openai.APIError) as caught:
                await anext(aiter(youngest))
            assert caught.value.code == "shed"
            assert not isinstance(caught.value, openai.APIStatusError)
            blocker.cancel()
            assert await waits == alone
            assert {(await task).status_code for task in (high, *low)} == {200}

    asyncio.run(scenario())
