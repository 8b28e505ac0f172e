"""The benchmark of the handle: the order of its windows, its sums, and its callers against a made-up server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from benchmarks.common.processes import ENGINE_CORE
from benchmarks.handle.callers import HANDLE, SDK, STREAMED, WHOLE, CallSpec, drive
from benchmarks.handle.main import CLIENT, Analysis, Plan, Window, build, plan_of

TOKENS = 3
CHUNK = 'data: {{"id":"x","object":"chat.completion.chunk","created":1,"model":"m","choices":[{}]{}}}\n\n'
DELTA = '{"index":0,"delta":{"content":"a"},"finish_reason":null}'
USAGE = '"usage":{"prompt_tokens":1,"completion_tokens":%d,"total_tokens":2}'


def window(caller: str, number: int, latency_ms: float, cpu_s: dict[str, float]) -> Window:
    return Window(caller, WHOLE, 1, number, [latency_ms] * 10, [], cpu_s, 0.0)


def test_callers_alternate_in_every_round() -> None:
    plan = plan_of(["--quick", "--clients", "1,8"])
    windows = list(plan.windows())
    assert len(windows) == plan.rounds * 2 * 2 * 2
    assert [caller for *_, caller in windows[:4]] == [SDK, HANDLE] * 2
    assert {number for number, *_ in windows} == set(range(1, plan.rounds + 1))


def test_a_quick_run_is_smaller() -> None:
    quick = plan_of(["--quick"])
    full = plan_of([])
    assert quick.rounds * quick.window_s < full.rounds * full.window_s
    assert plan_of(["--rounds", "2", "--window-s", "1.5"]).window_s == 1.5


def test_figures_are_medians_and_cpu_a_call() -> None:
    windows = [
        w
        for number in (1, 2)
        for w in (
            window(SDK, number, 20.0, {CLIENT: 0.03, "router": 0.01, ENGINE_CORE: 1.0, "engine replica": 1.0}),
            window(HANDLE, number, 15.0, {CLIENT: 0.01, "router": 0.02, ENGINE_CORE: 5.0, "engine replica": 5.0}),
        )
    ]
    plan = Plan(2, 0.0, 1.0, TOKENS, 1, clients=(1,))
    result = build(Analysis(windows, 1, resamples=50), plan, {"date": "today"})
    figures = result["figures"]["whole, 1"][HANDLE]
    assert figures["latency_ms"]["p50"]["value"] == 15.0
    assert figures["cpu_ms_per_call"][CLIENT]["value"] == 1.0
    assert figures["ttft_ms"]["p50"]["value"] is None
    assert figures["calls"] == 20
    json.dumps(result, allow_nan=False)


@asynccontextmanager
async def server(tokens: int, status: int = 200) -> AsyncIterator[int]:
    """A server of answers of so many tokens; its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            asked: dict[str, Any] = json.loads(await reader.readexactly(length))
            usage = USAGE % tokens
            if asked.get("stream"):
                kind = "text/event-stream"
                reported = "".join(CHUNK.format(DELTA, "") for _ in range(tokens))
                reported += CHUNK.format("", f",{usage}") + "data: [DONE]\n\n"
            else:
                message = '{"index":0,"finish_reason":"length","message":{"role":"assistant","content":"a"}}'
                kind = "application/json"
                reported = CHUNK.format(message, f",{usage}").removeprefix("data: ").strip()
            writer.write(
                f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(reported)}\r\n\r\n"
                f"{reported}".encode()
            )
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        yield listening.sockets[0].getsockname()[1]


def spec(caller: str, mode: str, port: int) -> CallSpec:
    return CallSpec(caller, mode, "127.0.0.1", port, "sk-1", "m", "", "", 2, TOKENS, 0.1, 0.3, 1)


@pytest.mark.parametrize("mode", [WHOLE, STREAMED])
def test_calls_that_end_in_the_window_are_counted(mode: str, capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> dict[str, Any]:
        async with server(TOKENS) as port:
            return await drive(spec(SDK, mode, port))

    result = asyncio.run(scenario())
    assert result["calls"] == len(result["latency_ms"]) > 0
    assert len(result["ttft_ms"]) == (result["calls"] if mode == STREAMED else 0)
    pairs = zip(sorted(result["ttft_ms"]), sorted(result["latency_ms"]), strict=False)
    assert all(first <= whole for first, whole in pairs)
    assert capfd.readouterr().out == "begin\nend\n"


@pytest.mark.parametrize(("tokens", "status"), [(TOKENS - 1, 200), (TOKENS, 503)])
def test_an_answer_that_is_not_whole_fails_the_run(tokens: int, status: int) -> None:
    async def scenario() -> None:
        async with server(tokens, status) as port:
            await drive(spec(SDK, WHOLE, port))

    with pytest.raises(ExceptionGroup):
        asyncio.run(scenario())
