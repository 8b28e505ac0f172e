"""The open loop against a server of the test's own, and what the stack is told of tenants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from benchmarks.common.arms import HOST, BenchmarkError, ModelChoice, our_settings
from benchmarks.common.traces import Request
from benchmarks.fairness.metric import Answer
from benchmarks.fairness.real import ADMISSION, CLOSED, Loader, drawn_lengths
from benchmarks.fairness.trace import HEAVY, LIGHT, Lengths
from serve_app.settings import parse

KEYS = {LIGHT: "key-of-light", HEAVY: "key-of-heavy"}
TOKEN = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
SECONDS = 0.5  # of an open loop here: loopback answers in milliseconds, and nothing is asserted of its timing


class Server:
    """Answers light's requests at once; of heavy's it sends two tokens and then waits until it is hung up on."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.answered = asyncio.Semaphore(0)
        self.hung_up = asyncio.Semaphore(0)
        self.status = 200

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        body = json.loads(await reader.readexactly(int(head.partition("content-length: ")[2].split()[0])))
        light = KEYS[LIGHT] in head
        self.asked.append((LIGHT if light else HEAVY, len(body["prompt"])))
        writer.write(f"HTTP/1.1 {self.status} X\r\nconnection: close\r\n\r\n".encode())
        if light:
            writer.write(TOKEN * body["max_tokens"] + b"data: [DONE]\n\n")
        else:
            writer.write(TOKEN * 2)
        self.answered.release()
        if not light:
            with suppress(ConnectionResetError):  # the other form of hanging up
                await reader.read()
            self.hung_up.release()
        writer.close()


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[int]:
    """The port of the server, for the block."""
    listening = await asyncio.start_server(server.answer, HOST, 0)
    async with listening:
        yield listening.sockets[0].getsockname()[1]


def requests() -> list[Request]:
    return [Request(0.01 * number, (LIGHT, HEAVY)[number % 2], 0, 5 + number, 7) for number in range(6)]


def test_an_open_loop_waits_for_nobody_and_counts_what_came_by_its_end() -> None:
    async def all_answered() -> None:
        for _ in requests():
            await server.answered.acquire()
        await asyncio.sleep(SECONDS)  # for what lies in the sockets

    async def run() -> list[Answer]:
        async with serving(server) as port:
            found = await Loader(port, KEYS, "m", 1).open(requests(), all_answered())
            for _ in range(3):  # those of heavy's: none is left waiting
                await asyncio.wait_for(server.hung_up.acquire(), 10.0)  # against hanging: it takes milliseconds
            return found

    server = Server()
    answers = asyncio.run(run())
    assert [(one.client, one.arrived_s, one.prompt_tokens) for one in answers] == [
        (one.tenant, one.at_s, one.prompt_tokens) for one in requests()
    ]
    assert [one.served_tokens for one in answers] == [7, 2, 7, 2, 7, 2]
    assert all(one.first_s is not None and one.first_s >= one.arrived_s for one in answers)
    assert sorted(server.asked) == sorted([*((one.tenant, one.prompt_tokens) for one in requests()), (LIGHT, 8)])


def test_a_closed_loop_counts_whole_answers() -> None:
    async def run() -> float:
        async with serving(server) as port:
            return await Loader(port, KEYS, "m", 1).closed([Lengths(3, 2)], 300.0, lambda: float(len(server.asked)))

    server = Server()  # its requests are the clock
    per_s = asyncio.run(run())
    assert len(server.asked) < 300 + CLOSED
    # counted: what is answered from the 100th request on to the 300th
    assert 200 - CLOSED <= per_s * 200.0 < 200 + CLOSED


def test_a_refusal_fails_the_run() -> None:
    async def run() -> None:
        async with serving(server) as port:
            await Loader(port, KEYS, "m", 1).open(requests()[:1], asyncio.sleep(SECONDS))  # its length

    server = Server()
    server.status = 429
    with pytest.RaisesGroup(pytest.RaisesExc(BenchmarkError, match="429")):
        asyncio.run(run())


def test_the_stack_is_informed_of_keys_their_tenants_and_a_queue_that_refuses_nobody() -> None:
    keys = [{"key": f"{name}-0123456789abcdef", "tenant": name} for name in (LIGHT, HEAVY)]
    settings = parse(our_settings(ModelChoice(path="tiny"), "own-0123456789abcdef", keys, ADMISSION))
    assert [{"key": key.key, "tenant": key.tenant} for key in settings.auth.keys[1:]] == keys
    assert settings.admission.max_queued_tokens is None
    assert parse(our_settings(ModelChoice(path="tiny"), "own-0123456789abcdef")).admission == parse({}).admission


def test_what_is_asked_fits_the_model() -> None:
    longest = max(one.prompt + one.output for one in drawn_lengths(1))
    assert longest < ModelChoice(path="tiny").max_model_len
    assert drawn_lengths(1) == drawn_lengths(1)
