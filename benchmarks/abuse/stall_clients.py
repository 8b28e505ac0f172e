"""Clients of `benchmarks.abuse --stalls`: twenty that send one large request again and again, and one beside them.

Each request has a connection of its own, read to its end. The twenty run in a process of their own, so that their work
does not delay the one whose waits are measured. Invariant: each request that was sent is counted once.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter

# without a status; `LEFT`: the span was over
CUT = "cut"
TIMEOUT = "timeout"
LEFT = "left"
PAUSE_S = 0.05  # of an abuser after each answer: its own cost, on the same cores, stays small beside the stack's
READ_BYTES = 2**18
LAST_CHUNK = b"0\r\n\r\n"  # of an answer without a length
Address = tuple[str, int]


async def exchange(address: Address, request: bytes, timeout_s: float) -> tuple[str, float]:
    """One request to the end of its answer: the status, or why there is none, and the seconds it took."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(timeout_s):
            status = await _status(address, request)
    except TimeoutError:
        status = TIMEOUT
    except (OSError, EOFError, asyncio.LimitOverrunError):
        status = CUT
    return status, time.monotonic() - began


async def _status(address: Address, request: bytes) -> str:
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = 0
        end = b""
        while data := await reader.read(READ_BYTES):
            length += len(data)
            end = (end + data)[-len(LAST_CHUNK) :]
    finally:
        writer.close()
    expected = re.search(rb"\r\ncontent-length: *(\d+)", head)
    whole = end == LAST_CHUNK if expected is None else length == int(expected[1])
    return head.split(maxsplit=2)[1].decode() if whole else CUT


def flood(address: Address, request: bytes, clients: int, span_s: float, timeout_s: float) -> dict[str, int]:
    """So many clients for so long; how many of their requests ended in which status."""
    return asyncio.run(_flood(address, request, clients, span_s, timeout_s))


async def _flood(address: Address, request: bytes, clients: int, span_s: float, timeout_s: float) -> dict[str, int]:
    statuses: Counter[str] = Counter()
    begun = 0
    until = time.monotonic() + span_s

    async def client() -> None:
        nonlocal begun
        while time.monotonic() < until:
            begun += 1
            status, _ = await exchange(address, request, timeout_s)
            statuses[status] += 1
            await asyncio.sleep(PAUSE_S)

    tasks = [asyncio.create_task(client()) for _ in range(clients)]
    ended, late = await asyncio.wait(tasks, timeout=span_s)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    for task in ended:
        task.result()
    if left := begun - statuses.total():
        statuses[LEFT] = left
    return dict(statuses)


async def probe(
    address: Address, request: bytes, span_s: float, every_s: float, timeout_s: float
) -> list[tuple[str, float]]:
    """The request at equal distances, whether answers come or not; returns when the last one has ended."""
    began = time.monotonic()
    tasks = []
    for number in range(round(span_s / every_s)):
        await asyncio.sleep(max(0.0, began + number * every_s - time.monotonic()))
        tasks.append(asyncio.create_task(exchange(address, request, timeout_s)))
    return await asyncio.gather(*tasks)


async def until_fast(address: Address, request: bytes, fast_s: float, limit_s: float) -> float | None:
    """Seconds until the request is answered within `fast_s` three times in a row; None: not within `limit_s`."""
    began = time.monotonic()
    in_a_row = 0
    while (spent_s := time.monotonic() - began) < limit_s:
        status, wait_s = await exchange(address, request, limit_s)
        in_a_row = in_a_row + 1 if status == "200" and wait_s <= fast_s else 0
        if in_a_row == 3:
            return round(spent_s, 1)
        await asyncio.sleep(PAUSE_S)
    return None
