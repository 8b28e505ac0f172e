"""The open loop against a server of these tests: nobody waits for another, and every request has one end."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.traces import AZURE_FILE
from benchmarks.overload import open_loop
from benchmarks.overload.answers import Answer
from benchmarks.overload.offered_load import GROUPS, HIGH, LOW, NORMAL, TENANTS
from benchmarks.overload.open_loop import Spec, drive

Serve = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]

HEAD = b"HTTP/1.1 %s\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
RATE = 100.0
SPAN_S = 0.5


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def finish(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """A whole answer, its tokens in two events."""
    token = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":%d}}\n\n' % body["max_tokens"]
    writer.write(
        HEAD % b"200 OK" + chunk(token) + chunk(token) + chunk(usage) + chunk(b"data: [DONE]\n\n") + chunk(b"")
    )


async def refuse(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    error = json.dumps({"error": {"code": "queue_full"}}).encode()
    writer.write(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: %d\r\n\r\n%s" % (len(error), error))


async def hold(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """No answer at all."""


async def cut(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD % b"200 OK" + chunk(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'))
    writer.close()


async def by_class(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    await {HIGH: finish, NORMAL: refuse, LOW: hold}[body["priority"]](body, writer)


@pytest.fixture(autouse=True)
def trace(tmp_path: Path) -> None:
    (tmp_path / AZURE_FILE).write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023-11-16 18:15:46.6805900,40,20\n" * 3
    )


def run(folder: Path, serve: Serve, **changes: Any) -> list[Answer]:
    """All requests of one open loop on a server of its own."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
                await serve(json.loads(await reader.readexactly(size)), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has left
        finally:
            writer.close()  # also when the loop ends with the connection open

    async def whole() -> dict[str, Any]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            given: dict[str, Any] = {
                "name": "t",
                "host": "127.0.0.1",
                "port": port,
                "model": "m",
                "folder": str(folder),
                "longest": 4096,
                "seed": 1,
                "rate": RATE,
                "warmup_s": 0.1,
                "window_s": SPAN_S - 0.2,
                "tail_s": 0.1,
                "clients": 0,
                "labels": {group: [["k", group, None]] * TENANTS for group in GROUPS},
                "patience_s": dict.fromkeys(GROUPS, 5.0),
            }
            return await drive(Spec(**given | changes))

    return [Answer.of(row) for row in asyncio.run(whole())["rows"]]


def ends(answers: list[Answer]) -> Counter[str]:
    return Counter(answer.outcome.value for answer in answers)


def test_each_request_ends_as_the_server_and_its_patience_decide(tmp_path: Path) -> None:
    answers = run(tmp_path, by_class, patience_s={HIGH: 5.0, NORMAL: 5.0, LOW: 0.2})
    for group, outcome in ((HIGH, "finished"), (NORMAL, "refused"), (LOW, "abandoned")):
        assert {a.outcome.value for a in answers if a.group == group} == {outcome}
    assert all(a.code == "queue_full" for a in answers if a.group == NORMAL)
    assert all(a.first_s is None and a.ended_s >= 0.2 for a in answers if a.group == LOW)
    assert all(a.first_s is not None and a.prompt_tokens == 9 for a in answers if a.group == HIGH)


def test_nobody_waits_for_an_answer_of_another(tmp_path: Path) -> None:
    """A server that answers nobody still gets every request, at its own moment."""
    silent, quick = (run(tmp_path, serve, patience_s=dict.fromkeys(GROUPS, 1.0)) for serve in (hold, finish))
    assert [(a.number, a.at_s) for a in silent] == [(a.number, a.at_s) for a in quick]
    assert ends(silent) == {"abandoned": len(quick)}


def test_a_broken_answer_is_a_failure_and_no_end_of_the_run(tmp_path: Path) -> None:
    answers = run(tmp_path, cut)
    assert ends(answers) == {"failed": len(answers)}
    assert all("connection lost" in a.code for a in answers)


def test_a_server_that_is_not_there_fails_each_request(tmp_path: Path) -> None:
    assert set(ends(run(tmp_path, hold, port=1))) == {"failed"}


def test_what_never_ends_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_loop, "DRAIN_S", 0.2)
    answers = run(tmp_path, hold, patience_s=dict.fromkeys(GROUPS, 60.0))
    assert {a.code for a in answers} == {"hung"}


def test_a_closed_loop_has_so_many_in_flight_and_no_patience(tmp_path: Path) -> None:
    flying = 0
    most = 0

    async def count(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        await asyncio.sleep(0.02)  # bound: long enough for all three to meet
        flying -= 1
        await finish(body, writer)

    answers = run(tmp_path, count, clients=3, tail_s=0.0, patience_s={})
    assert most == 3
    assert set(ends(answers)) == {"finished"}
