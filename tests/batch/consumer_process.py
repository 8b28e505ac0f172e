"""A consumer in a process of its own, to be killed: answers rows with even numbers, and holds the others.

python -m tests.batch.consumer_process PORT STREAM
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import redis

from serve_app.batch.interfaces import RowAnswer
from tests.batch.streams import CLAIM_IDLE_S, SOON_S, FixedPaces, KeyedRouter, Streams
from tests.fakes.until import until


class HalfRouter(KeyedRouter):
    async def run_as(self, key_id: str, path: str, body: bytes, key: str) -> RowAnswer:
        if int(key.rpartition("-")[2]) % 2:
            self.calls[key] += 1
            await asyncio.Event().wait()
        return await super().run_as(key_id, path, body, key)


class ServerOf:
    """A server that another process has started."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"redis://127.0.0.1:{port}/0"

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, protocol=2, retry=None)


async def main(port: int, stream: str) -> None:
    server: Any = ServerOf(port)
    streams = Streams(server, stream.removesuffix(":stream"), claim_idle_s=CLAIM_IDLE_S)
    router = HalfRouter()
    async with streams.consumed(router, FixedPaces(64), name="child"):
        await until(lambda: len(streams.replies()) == 10 and len(streams.pending()) == 10, SOON_S, "half is answered")
        print("holds 10", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
