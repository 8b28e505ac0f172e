"""The generator counts what a server sent, and no failure passes as a figure.

The servers here run in the test's own loop. A run lasts its window, a third of a second, plus one answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from benchmarks.common.loadgen import Request, decoding_s, drive, slices_of
from benchmarks.common.sse import Usage
from benchmarks.common.workload import Spec

TOKENS = 12
TOKENS_PER_EVENT = 2
GAP_S = 0.004  # between events; ten times what a busy loop adds
WINDOW_S = 0.3
RUN_TIMEOUT_S = 30.0  # a run takes under a second; a hung one must not hold the suite

Respond = Callable[[asyncio.StreamWriter], Awaitable[None]]


def sse(value: object) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    data = f"data: {text}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


def delta(**content: str) -> bytes:
    return sse({"choices": [{"index": 0, "delta": content}]})


async def whole_answer(writer: asyncio.StreamWriter, tokens: int = TOKENS) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + delta(role="assistant", content=""))
    for _ in range(TOKENS // TOKENS_PER_EVENT):
        await asyncio.sleep(GAP_S)  # the gap that is measured
        writer.write(delta(content="ab"))
    writer.write(sse({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": tokens}}))
    writer.write(sse("[DONE]") + b"0\r\n\r\n")


async def short_answer(writer: asyncio.StreamWriter) -> None:
    await whole_answer(writer, tokens=TOKENS - 1)


async def refusal(writer: asyncio.StreamWriter) -> None:
    body = b'{"error":{"message":"queue full"}}'
    writer.write(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))


async def error_in_mid_stream(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + delta(content="ab"))
    writer.write(sse({"error": {"message": "engine died"}}) + sse("[DONE]") + b"0\r\n\r\n")


async def cut_connection(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + delta(content="ab"))
    writer.close()


async def not_http(writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-OpenSSH_9.7\r\n")


def run(respond: Respond, *, clients: int = 3, max_requests: int = 10_000) -> dict[str, Any]:
    """One run of the generator against a server that gives this answer to every request."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
                json.loads(await reader.readexactly(int(length.split(b":")[1])))
                await respond(writer)
        except asyncio.IncompleteReadError:
            writer.close()  # the generator is done with this connection

    async def main() -> dict[str, Any]:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        spec = Spec("127.0.0.1", port, "key", "tiny", clients, TOKENS, 0.05, WINDOW_S, max_requests, 1)
        async with server:
            return await asyncio.wait_for(drive(spec), RUN_TIMEOUT_S)

    return asyncio.run(main())


def test_tokens_events_and_gaps_are_those_the_server_sent(capfd: pytest.CaptureFixture[str]) -> None:
    found = run(whole_answer)
    assert found["errors"] == 0
    assert capfd.readouterr().out.split() == ["begin", "end"]
    assert found["requests"] > 3
    assert min(found["ttft_ms"]) >= GAP_S * 1e3
    assert all(t >= GAP_S * 1e3 * (TOKENS / TOKENS_PER_EVENT) for t in found["latency_ms"])
    assert abs(found["tokens"] - TOKENS * found["requests"]) <= 2 * 3 * TOKENS  # answers that straddle an edge
    assert 0 < found["decoding_s"] < 3 * found["window_s"]
    assert all(len(gaps) <= TOKENS / TOKENS_PER_EVENT - 1 for gaps in found["gaps_us"])


def test_the_window_closes_by_count_before_it_closes_by_time() -> None:
    found = run(whole_answer, max_requests=2)
    assert found["errors"] == 0
    assert found["window_s"] < WINDOW_S
    assert found["requests"] <= 2 + 3


@pytest.mark.parametrize(
    ("respond", "message"),
    [
        (refusal, "status 429"),
        (short_answer, "11 tokens where 12"),
        (error_in_mid_stream, "engine died"),
        (cut_connection, "connection lost"),
        (not_http, "not HTTP"),
    ],
)
def test_any_answer_that_is_not_whole_fails_the_run(respond: Respond, message: str) -> None:
    found = run(respond)
    assert found["errors"] >= 1
    assert message in found["error_samples"][0]
    assert found["tokens"] == 0


def test_a_server_that_does_not_listen_fails_the_run() -> None:
    spec = Spec("127.0.0.1", 1, "key", "tiny", 2, TOKENS, 0.05, WINDOW_S, 10, 1)  # port 1: nobody's
    found = asyncio.run(asyncio.wait_for(drive(spec), RUN_TIMEOUT_S))
    assert "no connection" in found["error_samples"][0]


def test_slices_add_up_to_the_tokens_inside_the_window() -> None:
    request = Request(started=0.0, stamps=[0.5, 1.5, 2.5, 3.5], ended=3.5, usage=Usage(1, 8), done=True)
    assert slices_of([request], began=1.0, ended=3.0) == [2.0, 2.0]
    assert sum(slices_of([request], began=0.0, ended=4.0)) == pytest.approx(8.0)


def test_decoding_time_is_between_first_and_last_token_and_inside_the_window() -> None:
    def request(*stamps: float) -> Request:
        return Request(started=0.0, stamps=list(stamps))

    whole = request(2.0, 2.5, 4.0)
    reaches_in = request(0.5, 1.5)
    reaches_out = request(4.5, 9.0)
    outside = request(6.0, 7.0)
    without_tokens = request()
    of_one_token = request(3.0)
    everything = [whole, reaches_in, reaches_out, outside, without_tokens, of_one_token]
    assert decoding_s(everything, began=1.0, ended=5.0) == pytest.approx(2.0 + 0.5 + 0.5)
    assert decoding_s([request(0.0, 10.0)], began=1.0, ended=5.0) == pytest.approx(4.0)
