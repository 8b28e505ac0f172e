"""What a client that waits is told of the line, and that its answer is the same as without."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from serve_app.core.queue.admission import QueueStatus
from serve_app.http import queue_status
from serve_app.http.queue_status import QueueComments
from serve_app.types import Outcome, RequestClass
from tests.fakes.asgi_client import Client, Reply, ask, running
from tests.fakes.engines import MODEL, FakeCluster, run, until
from tests.fakes.router import SOON_S, expected_text

ASKED = {"X-Queue-Status": "1"}
QUICK = {(queue_status, "FIRST_COMMENT_S"): 0.01, (queue_status, "STATUS_POLL_S"): 0.01}


def comments(reply: Reply) -> list[str]:
    return [line.decode() for line in reply.body.split(b"\n\n") if line.startswith(b":")]


def positions(reply: Reply) -> list[int]:
    words = (comment.split() for comment in comments(reply) if comment.startswith(": queue "))
    return [int(found[2].removeprefix("position=")) for found in words]


def answer(reply: Reply) -> bytes:
    """The stream without its comments, as any reader of SSE sees it."""
    events = reply.body.split(b"\n\n")
    return b"\n\n".join(event for event in events if not event.startswith(b":"))


def check(scenario: Callable[[Client, FakeCluster], Awaitable[None]], **admission: object) -> None:
    async def started(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        await scenario(await Client(cluster, admission=dict(admission)).start(), cluster)

    run(started, waits=QUICK)


async def blocked(client: Client) -> asyncio.Task[Reply]:
    """A request that has all slots."""
    task, _ = await running(client, n=4)
    return task


async def notified(client: Client, prompt: str, **more: object) -> tuple[asyncio.Task[Reply], Reply]:
    """A request that waits and has been told so."""
    reply = Reply()
    body = ask(prompt, **more)  # type: ignore[arg-type]
    task = client.posting(body, headers=ASKED, reply=reply)
    await until(lambda: bool(reply.chunks), SOON_S, "a comment")
    return task, reply


async def end(task: asyncio.Task[Reply]) -> None:
    task.cancel()
    await asyncio.wait({task})


def test_who_waits_is_given_its_place_until_its_answer_begins() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        blocker = await blocked(client)
        first, before = await notified(client, "before")
        second, reply = await notified(client, "p")
        assert (before.status, reply.status) == (200, 200)
        assert (positions(before), positions(reply)) == ([1], [2])
        await end(first)
        await until(lambda: positions(reply) == [2, 1], SOON_S, "the new place")
        await end(blocker)
        await second
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["x-serve-app-request-id"]
        assert answer(reply).startswith(b"data: ")  # every comment came before the first frame
        assert answer(reply).endswith(b"data: [DONE]\n\n")
        assert reply.body.endswith(answer(reply))
        plain = await client.post(ask("p"))
        assert len(answer(reply).split(b"\n\n")) == len(plain.body.split(b"\n\n"))
        assert "".join(c["text"] for e in plain.events for c in e.get("choices", [])) == expected_text("p", 5)

    check(scenario)


def test_what_starts_at_once_or_is_not_streamed_has_no_comment() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        at_once = await client.post(ask("p"), headers=ASKED)
        assert (at_once.status, comments(at_once)) == (200, [])
        blocker = await blocked(client)
        whole = client.posting(ask("p", stream=False), headers=ASKED)
        unasked = client.posting(ask("p"), headers={"X-Queue-Status": "0"})
        _, _ = await notified(client, "another")  # those who asked before it have had their time
        await end(blocker)
        assert json.loads((await whole).body)["choices"]
        assert comments(await unasked) == []

    check(scenario)


def test_a_refusal_on_arrival_keeps_its_status() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        blocker = await blocked(client)
        with cluster.quota.standing_still():
            refused = client.posting(ask("p"), headers=ASKED)
            await until(lambda: client.model.queue.waiting == 1, SOON_S, "the actor is asked")
            await asyncio.sleep(5 * queue_status.FIRST_COMMENT_S)  # looks that find no decision of the actor
        reply = await refused
        assert (reply.status, reply.error["code"]) == (429, "queue_full")
        assert reply.headers["retry-after"]
        await end(blocker)

    check(scenario, max_queued=0)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_a_refusal_after_a_comment_is_the_stream_s_last_event(path: str) -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        blocker = await blocked(client)
        body = {"model": MODEL, "prompt" if path == "/v1/completions" else "input": "p", "stream": True}
        without = await client.post(body, path=path)
        assert without.status == 429
        reply = await client.post(body, path=path, headers=ASKED)
        assert reply.status == 200
        assert positions(reply)
        assert comments(reply)[-1].startswith(": retry_after_ms=")
        last = answer(reply).removesuffix(b"data: [DONE]\n\n")
        event = json.loads(last.partition(b"data: ")[2])
        assert {"error": event["error"]} == json.loads(without.body)
        assert reply.body.endswith(b"[DONE]\n\n") == (path == "/v1/completions")
        assert client.outcomes == {Outcome.REFUSED: 2}
        await end(blocker)

    check(scenario, max_wait_s=0.1)


def test_what_the_engine_refuses_after_a_comment_is_an_event_and_a_bad_request_all_the_same() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        blocker = await blocked(client)
        keyed = ASKED | {"Idempotency-Key": "one"}
        body = ask("word " * 9000)
        reply = Reply()
        task = client.posting(body, headers=keyed, reply=reply)
        await until(lambda: bool(reply.chunks), SOON_S, "a comment")
        await end(blocker)
        await task
        assert reply.status == 200
        (event,) = (json.loads(one.removeprefix(b"data: ")) for one in answer(reply).split(b"\n\n")[:-2])
        assert event["error"]["code"] == "context_length_exceeded"
        assert reply.body.endswith(b"data: [DONE]\n\n")
        repeat = await client.post(body, headers={"Idempotency-Key": "one"})
        assert (repeat.status, repeat.headers["x-idempotent-replay"]) == (400, "true")
        assert repeat.error == event["error"]
        assert client.outcomes == {Outcome.CANCELLED_RUNNING: 1, Outcome.BAD_REQUEST: 2}

    check(scenario)


def test_comments_are_not_part_of_an_answer_that_is_repeated() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        blocker = await blocked(client)
        reply = Reply()
        keyed = {"Idempotency-Key": "one"}
        task = client.posting(ask("p"), headers=ASKED | keyed, reply=reply)
        await until(lambda: bool(reply.chunks), SOON_S, "a comment")
        await end(blocker)
        await task
        repeat = await client.post(ask("p"), headers=keyed)
        assert repeat.body == answer(reply)
        assert positions(reply)

    check(scenario)


def test_a_client_that_leaves_after_a_comment_leaves_the_queue() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        blocker = await blocked(client)
        task, _ = await notified(client, "p")
        await end(task)
        await end(blocker)
        assert client.outcomes == {Outcome.CANCELLED_QUEUED: 1, Outcome.CANCELLED_RUNNING: 1}
        await until(client.at_rest, SOON_S, "all given back")

    check(scenario)


def test_a_comment_that_cannot_be_sent_ends_the_request_when_its_turn_comes() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        blocker = await blocked(client)

        async def gone(reply: Reply) -> None:
            raise OSError("the socket is closed")

        task = asyncio.create_task(client.post(ask("p"), headers=ASKED, reading=gone))
        await until(lambda: client.model.queue.waiting == 1, SOON_S, "it waits")
        await asyncio.sleep(5 * queue_status.FIRST_COMMENT_S)  # several comments have failed
        await end(blocker)
        with pytest.raises(OSError, match="socket"):
            await task
        await until(client.at_rest, SOON_S, "all given back")

    check(scenario)


def asked(*statuses: QueueStatus | None) -> list[str]:
    """What is told of these, one a look."""
    sent: list[str] = []

    async def scenario() -> None:
        looks = list(statuses)
        over = asyncio.Event()

        def ask() -> QueueStatus | None:
            if looks:
                return looks.pop(0)
            over.set()
            return None

        async def tell(text: str) -> None:
            sent.append(text)

        async with QueueComments(ask, tell) as telling:
            await over.wait()
            await telling.end()

    asyncio.run(asyncio.wait_for(scenario(), SOON_S))
    return sent


def status(position: int, start_s: float | None = None) -> QueueStatus:
    return QueueStatus("r", RequestClass.NORMAL, position, start_s)


def test_a_place_is_reported_when_it_changes_and_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("FIRST_COMMENT_S", 0.001), ("STATUS_POLL_S", 0.001), ("MAX_SILENCE_S", 60.0)):
        monkeypatch.setattr(queue_status, name, seconds)
    assert asked(None, status(3), status(3), None, status(2, 1.25), status(2, 0.5), status(4, 0.0)) == [
        "queue position=3",
        "queue position=2 expected_start_s=1.2",
        "queue position=4 expected_start_s=0.0",
    ]
    monkeypatch.setattr(queue_status, "MAX_SILENCE_S", 0.002)
    assert asked(*[status(3, 9.0)] * 5) == ["queue position=3 expected_start_s=9.0"] * 3
