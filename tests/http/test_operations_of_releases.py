"""A request reaches only replicas that know its operation, while a router and its engines are of two releases."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest import mock

import msgspec
import pytest

from serve_app.core.routing import RetryBudget
from serve_app.transport.messages import Batch, batch_decoder, batch_encoder
from serve_app.types import FIRST_OPERATIONS, Operation
from tests.fakes.asgi_client import Client, Reply, ask, running, started
from tests.fakes.engines import MODEL, FakeCluster, model, run, turns, until
from tests.fakes.router import LONG, SOON_S

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
MESSAGE: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "Hello"}]}


class OldBatch(msgspec.Struct, frozen=True, array_like=True):
    """`Batch` of release 0.5.0."""

    frames: list[Any]
    slots: int = 0
    drain_s: float | None = None
    fingerprint: str | None = None


async def old(cluster: FakeCluster, *names: str) -> None:
    """Start replicas of release 0.5.0, which do not say what they know, and would cut off a router for a message."""
    await cluster.add(*names)
    for name in names:
        cluster[name].engine.server.operations = None


async def mixed(cluster: FakeCluster, **settings: Any) -> Client:
    await old(cluster, "old")
    return await started(cluster, "new", **settings)


def test_a_message_goes_to_the_replica_that_knows_messages() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await mixed(cluster)
        replies = [await client.post(MESSAGE, MESSAGES) for _ in range(8)]
        assert [one.status for one in replies] == [200] * 8
        assert set(cluster.submits) == {"new"}
        assert not client.model.replica_set.ejected_count

    run(scenario)


def test_messages_at_once_wait_for_the_one_replica_that_knows_them() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await mixed(cluster)
        await client.post(ask("first", 5))
        cluster.submits.clear()
        replies = await asyncio.gather(*(client.post(MESSAGE, MESSAGES) for _ in range(9)))
        assert [one.status for one in replies] == [200] * 9
        assert cluster.submits == ["new"] * 9

    run(scenario, model(slots=1))


def test_all_replicas_run_what_all_know() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await mixed(cluster)
        await client.post(MESSAGE, MESSAGES)
        cluster.submits.clear()
        replies = await asyncio.gather(*(client.post(ask(f"{number}", 50)) for number in range(8)))
        assert [one.status for one in replies] == [200] * 8
        assert set(cluster.submits) == {"old", "new"}

    run(scenario)


def test_without_a_replica_that_knows_it_the_refusal_names_the_operation_and_nothing_else_is_lost() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await old(cluster, "r1", "r2")
        client = await Client(cluster).start()
        task, reply = await running(client)
        (used,) = (one for one in client.model.replica_set.channels.values() if one.requests)
        connection = used.connection
        assert connection is not None
        for _ in range(3):
            refused = await client.post(MESSAGE, MESSAGES)
            assert (refused.status, refused.error["code"]) == (529, "unknown_operation")  # a 503, as Anthropic says it
            assert "'messages'" in refused.error["message"]
            assert "retry-after" in refused.headers
        counted = await client.post({one: MESSAGE[one] for one in ("model", "messages")}, COUNT)
        assert counted.status == 529
        assert "'message_tokens'" in counted.error["message"]
        assert len(cluster.submits) == 1
        assert used.connection is connection, "an unknown operation would have cut it"
        assert not client.model.replica_set.ejected_count
        task.cancel()
        await asyncio.wait({task})
        assert reply.status == 200
        assert task.cancelled()

    run(scenario)


def test_messages_are_served_as_soon_as_a_replica_of_this_release_runs() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await old(cluster, "old")
        client = await Client(cluster).start()
        assert (await client.post(MESSAGE, MESSAGES)).status == 529
        await cluster.add("new")
        await turns(20)
        assert (await client.post(MESSAGE, MESSAGES)).status == 200
        assert (await client.post({one: MESSAGE[one] for one in ("model", "messages")}, COUNT)).status == 200
        cluster.remove("old")
        assert (await client.post(MESSAGE, MESSAGES)).status == 200
        assert set(cluster.submits) == {"new"}
        await until(client.at_rest, SOON_S, "all given back")

    run(scenario)


def test_who_waits_is_refused_when_the_last_replica_that_knows_the_operation_leaves() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await mixed(cluster)
        await client.post(MESSAGE, MESSAGES)
        reply = Reply()
        task = client.posting(MESSAGE | {"max_tokens": LONG, "stream": True}, path=MESSAGES, reply=reply)
        await until(lambda: bool(reply.chunks), SOON_S, "one runs")
        waiting = client.posting(MESSAGE, path=MESSAGES)
        await until(lambda: client.model.waiting == 1, SOON_S, "a message waits")
        cluster.remove("new")
        refused = await asyncio.wait_for(waiting, SOON_S)
        assert (refused.status, refused.error["code"]) == (529, "unknown_operation")
        task.cancel()
        await asyncio.wait({task})
        await until(client.at_rest, SOON_S, "all given back")

    run(scenario, model(slots=1))


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
def test_meeting_a_replica_of_an_earlier_release_is_no_loss(path: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await mixed(cluster)
        budget = client.model.retry_budget = mock.Mock(wraps=RetryBudget())
        body = {one: MESSAGE[one] for one in ("model", "messages")} if path == COUNT else MESSAGE
        replies = await asyncio.gather(*(client.post(body, path) for _ in range(6)))
        assert [one.status for one in replies] == [200] * 6
        assert not client.model.replica_set.channels["old"].may_know(Operation.MESSAGES), "it was met"
        assert not budget.take.called
        assert "lost replica" not in caplog.text

    run(scenario)


def test_a_replica_that_does_not_say_knows_the_operations_of_release_0_5_0() -> None:
    assert {one.value for one in FIRST_OPERATIONS} == {
        "chat", "completion", "responses", "embedding", "tokenize", "detokenize", "input_tokens", "tokenizer_info",
    }  # fmt: skip
    sent = msgspec.msgpack.encode(OldBatch([], 4))
    assert batch_decoder.decode(sent).operations is None


def test_a_router_of_release_0_5_0_reads_what_a_replica_sends() -> None:
    sent = batch_encoder.encode(Batch([], 4, None, "f", [one.value for one in Operation]))
    assert msgspec.msgpack.decode(sent, type=OldBatch) == OldBatch([], 4, None, "f")
