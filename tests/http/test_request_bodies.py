"""What is read of a request's body ahead of the application."""

from __future__ import annotations

import asyncio
from typing import Any

from serve_app.ray_adapter.request_bodies import AHEAD_MESSAGES, BoundedBody

SETTLE = 50  # turns of the loop: whoever can go on has done so


class Client:
    """Sends numbered pieces as fast as they are read, and leaves after `size` of them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.read = 0

    async def __call__(self) -> dict[str, Any]:
        await asyncio.sleep(0)
        self.read += 1
        if self.read > self.size:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": b"%d" % self.read, "more_body": True}


def test_a_client_waits_while_the_application_takes_nothing_and_nothing_of_its_body_is_lost() -> None:
    async def scenario() -> None:
        client = Client(100)
        body = BoundedBody({"type": "http"}, client, asyncio.get_running_loop())
        fetching = body.fetch_until_disconnect_task()
        for _ in range(SETTLE):
            await asyncio.sleep(0)
        assert client.read <= AHEAD_MESSAGES + 1
        taken = [await body() for _ in range(100)]
        assert [message["body"] for message in taken] == [b"%d" % number for number in range(1, 101)]
        await fetching
        assert [(await body())["type"] for _ in range(2)] == ["http.disconnect"] * 2

    asyncio.run(scenario())


def test_a_request_that_ends_before_its_body_stops_the_reading() -> None:
    async def scenario() -> None:
        body = BoundedBody({"type": "http"}, Client(10**9), asyncio.get_running_loop())
        fetching = body.fetch_until_disconnect_task()
        await asyncio.sleep(0)
        fetching.cancel()
        await asyncio.wait({fetching})
        assert fetching.cancelled()

    asyncio.run(scenario())
