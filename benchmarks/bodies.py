"""How long one hostile body holds a router's event loop: the longest time between two turns while it is answered.

    python -m benchmarks.bodies

One router on a simulated engine in one process, one body of about 7 MiB after another. What is answered 200 has the
engine's work in it too, since it shares the process here.
"""

from __future__ import annotations

import asyncio
import json
import time

from tests.fakes.asgi_client import CHAT, Client
from tests.fakes.engines import FakeCluster, run
from tests.fakes.quota import MODEL

SIZE = 7 * 2**20
TICK_S = 0.001


def _tools(values: bytes) -> bytes:
    return b'"tools":[{"type":"function","function":{"name":"f","parameters":{"enum":[' + values + b"1]}}}]"


def _times(unit: bytes) -> bytes:
    return unit * (SIZE // len(unit))


FIELDS = {
    "enum of integers in tools": _tools(_times(b"1,")),
    "enum of strings in tools": _tools(_times(b'"",')),
    "integers": b'"stop_token_ids":[' + _times(b"1,") + b"1]",
    "integers, one of 19 digits": b'"stop_token_ids":[' + _times(b"1,") + b"1234567890123456789]",
    "logit_bias": b'"logit_bias":{' + b",".join(b'"%d":1' % n for n in range(SIZE // 10)) + b"}",
    "schema as text": b'"structured_outputs":{"json":"{\\"enum\\":[' + _times(b"1,") + b'1]}"}',
    "text of brackets": b'"user":"' + _times(b"{[,") + b'"',
}


async def _measure(cluster: FakeCluster) -> dict[str, dict[str, float]]:
    await cluster.add("r1")
    client = await Client(cluster).start()
    longest_s = 0.0

    async def tick() -> None:
        nonlocal longest_s
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            longest_s, last = max(longest_s, now - last), now

    ticking = asyncio.create_task(tick())
    found = {}
    for name, field in FIELDS.items():
        head = b'{"model":"%s","max_tokens":1,"messages":[{"role":"user","content":"hi"}],' % MODEL.encode()
        await asyncio.sleep(10 * TICK_S)
        longest_s = 0.0
        began = time.monotonic()
        reply = await client.request("POST", CHAT, head + field + b"}")
        took_s = time.monotonic() - began
        found[name] = {"status": reply.status, "longest_block_ms": 1e3 * longest_s, "answered_ms": 1e3 * took_s}
    ticking.cancel()
    return {name: {key: round(value, 1) for key, value in one.items()} for name, one in found.items()}


if __name__ == "__main__":
    print(json.dumps(run(_measure, loop=asyncio.new_event_loop), indent=1))
