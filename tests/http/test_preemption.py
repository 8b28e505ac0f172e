"""A request of a lower class stops for one of a higher class, and its client gets the answer of an undisturbed one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from serve_app.core import continuation
from serve_app.http import queue_status
from serve_app.types import Outcome
from tests.fakes.asgi_client import BATCH_KEY, CHAT, COMPLETIONS, Client, Reply, ask, cancel, running, started
from tests.fakes.engines import MODEL, FakeCluster, model, run, until
from tests.fakes.router import SOON_S

TOKENS = 400  # of an answer that is stopped: 0.4 s at the fake's rate
SLOTS = 2


def body(number: int, path: str, *, stream: bool) -> dict[str, Any]:
    if path == COMPLETIONS:
        return ask(f"prompt {number}", TOKENS, stream=stream)
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": f"prompt {number}"}]}
    return asked | {"max_tokens": TOKENS, "stream": stream}


def answer_of(reply: Reply) -> Any:
    """What an answer says, without its id and time."""
    assert reply.status == 200
    is_whole = reply.headers["content-type"].startswith("application/json")
    lines = [line.removeprefix(b"data: ") for line in reply.body.splitlines() if line.startswith(b"data: {")]
    parts = [json.loads(line) for line in ([reply.body] if is_whole else lines)]
    return [{name: value for name, value in part.items() if name not in ("id", "created")} for part in parts]


async def two_slots(cluster: FakeCluster, *replicas: str, **settings: Any) -> Client:
    client = await started(cluster, *(replicas or ("r1",)), **settings)
    await until(lambda: client.model.replica_set.info is not None, SOON_S, "the engine's limits")
    return client


def low(client: Client, number: int, path: str = COMPLETIONS, *, stream: bool = True) -> asyncio.Task[Reply]:
    return client.posting(body(number, path, stream=stream), path=path, key=BATCH_KEY)


async def full(client: Client, path: str = COMPLETIONS, *, stream: bool = True) -> list[asyncio.Task[Reply]]:
    """Requests of the lowest class in every slot, some tokens into their answers."""
    steps = client.engine_steps()
    tasks = [low(client, number, path, stream=stream) for number in range(SLOTS)]
    await until(lambda: client.model.queue.granted == SLOTS, SOON_S, "a full engine")
    await until(lambda: client.engine_steps() > steps + 20, SOON_S, "some tokens")
    return tasks


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_request_that_stopped_for_a_higher_class_answers_as_an_undisturbed_one(path: str, stream: bool) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await two_slots(cluster)
        undisturbed = [answer_of(await low(client, number, path, stream=stream)) for number in range(SLOTS)]
        made = client.engine_tokens()
        tasks = await full(client, path, stream=stream)
        reply = await client.post(ask("first", 5, priority="high"))
        assert (reply.status, any(task.done() for task in tasks)) == (200, False)
        runs = client.model.queue.core.in_flight.running
        await until(lambda: any(one.arrival.produced_tokens for one in runs.values()), SOON_S, "what goes on says so")
        answers = [await task for task in tasks]
        assert [answer_of(answer) for answer in answers] == undisturbed
        stopped = [answer for answer in answers if receipt(client, answer).trace.preempted]
        assert len(stopped) == 1
        assert receipt(client, stopped[0]).trace.losses == 0
        # nothing is made twice but what left the engine after the stop
        assert client.engine_tokens() - made <= SLOTS * TOKENS + 5 + 5
        assert client.outcomes == {Outcome.OK: 2 * SLOTS + 1}
        assert client.figures("serve_app_preemptions_total", "model", "priority") == {(MODEL, "low"): 1.0}
        assert client.figures("serve_app_migrations_total", "model") == {}
        assert client.figures("serve_app_completion_tokens_total", "model") == {(MODEL,): 2.0 * SLOTS * TOKENS + 5}
        await until(client.at_rest, SOON_S, "all given back")

    run(scenario, model(slots=SLOTS))


def test_each_of_several_requests_that_come_at_once_gets_a_slot() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await two_slots(cluster)
        tasks = await full(client)
        firsts = [client.posting(ask(f"first {number}", 5, priority="high")) for number in range(SLOTS)]
        assert [(await first).status for first in firsts] == [200] * SLOTS
        assert not any(task.done() for task in tasks)
        answers = [await task for task in tasks]
        assert sum(receipt(client, answer).trace.preempted for answer in answers) == SLOTS
        await until(client.at_rest, SOON_S, "all given back")

    run(scenario, model(slots=SLOTS))


def test_a_stopped_stream_gets_comments_while_it_waits() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await two_slots(cluster)
        tasks = await full(client)
        firsts = [await running(client, priority="high") for _ in range(SLOTS)]
        await asyncio.sleep(2 * queue_status.FIRST_COMMENT_S)  # a client that waits so long gets a comment
        for task, _ in firsts:
            await cancel(task)
        for task in tasks:
            assert b"\n: queue position=" in (await task).body
        await until(client.at_rest, SOON_S, "all given back")

    run(scenario, model(slots=SLOTS))


def test_a_stopped_request_whose_client_leaves_leaves_nothing_behind() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await two_slots(cluster)
        tasks = await full(client)
        firsts = [await running(client, priority="high") for _ in range(SLOTS)]
        for task in [*tasks, *(task for task, _ in firsts)]:
            await cancel(task)
        await until(client.at_rest, SOON_S, "all given back")
        assert sum(client.outcomes.values()) == 2 * SLOTS

    run(scenario, model(slots=SLOTS))


def test_a_stream_that_is_too_long_to_be_recorded_is_not_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuation, "MAX_WORDS", 10)

    async def scenario(cluster: FakeCluster) -> None:
        client = await two_slots(cluster)
        tasks = await full(client)
        reply = await client.post(ask("first", 5, priority="high"))
        answers = [await task for task in tasks]
        assert reply.status == 200
        assert [receipt(client, answer).trace.preempted for answer in answers] == [0] * SLOTS
        assert client.outcomes == {Outcome.OK: SLOTS + 1}

    run(scenario, model(slots=SLOTS))


def test_no_request_of_the_same_class_stops_another() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await two_slots(cluster)
        tasks = await full(client)
        third = low(client, SLOTS)
        answers = [await task for task in [*tasks, third]]
        assert [receipt(client, answer).trace.preempted for answer in answers] == [0] * (SLOTS + 1)

    run(scenario, model(slots=SLOTS))


def receipt(client: Client, reply: Reply) -> Any:
    found = client.edge.parts.receipts.find(reply.headers["x-serve-app-request-id"], None)
    assert found is not None
    return found
