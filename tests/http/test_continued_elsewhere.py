"""Replicas of two models under one name, as during a deploy: what one has begun goes on at its like alone."""

from __future__ import annotations

import asyncio

from serve_app.settings import SimulatedSettings
from serve_app.transport import NOT_CONTINUABLE
from serve_app.types import Outcome
from tests.fakes.asgi_client import BATCH_KEY, Client, Reply, ask, running
from tests.fakes.engines import FakeCluster, model, run, until
from tests.fakes.router import SOON_S, expected_text

OLD = model(slots=2)
NEW = OLD.model_copy(update={"simulated": SimulatedSettings(decode_step_s=0.001, prefill_tokens_per_s=1e9, seed=1)})
TOKENS = 300  # of an answer that is cut: 0.3 s at the fake's rate


async def mixed(cluster: FakeCluster, *, old: tuple[str, ...], new: tuple[str, ...]) -> Client:
    """A router on replicas of both; the model is the new one."""
    cluster.settings = OLD
    await cluster.add(*old)
    cluster.settings = NEW
    await cluster.add(*new)
    client = await Client(cluster).start()
    await until(lambda: client.model.replica_set.info is not None, SOON_S, "the engines' limits")
    return client


def place(cluster: FakeCluster) -> str:
    """The one replica that works."""
    (name,) = [name for name, one in cluster.replicas.items() if not one.dead and one.work]
    return name


async def at(cluster: FakeCluster, client: Client, *names: str) -> tuple[asyncio.Task[Reply], Reply]:
    """A stream that runs at one of these replicas, some tokens into its answer."""
    while True:  # each try goes to any replica
        reply = Reply()
        task = client.posting(ask("p", TOKENS), reply=reply)
        await until(lambda: len(reply.chunks) > 3, SOON_S, "some tokens")  # noqa: B023
        if place(cluster) in names:
            return task, reply
        await task


def test_a_stream_whose_replica_dies_continues_at_one_of_the_same_model_whatever_else_is_free() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await mixed(cluster, old=("a", "b"), new=("x", "y", "z"))
        task, _ = await at(cluster, client, "a", "b")
        cluster.kill(place(cluster))
        reply = await task
        assert reply.text == expected_text("p", TOKENS)
        assert client.figures("serve_app_not_continuable_total", "reason") == {}
        await until(client.at_rest, SOON_S, "all given back")

    run(scenario, NEW)


def test_a_stream_of_which_no_replica_of_its_model_is_left_ends_as_not_continuable_and_with_no_other_text() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await mixed(cluster, old=("a",), new=("x", "y"))
        task, _ = await at(cluster, client, "a")
        cluster.kill("a")
        reply = await task
        assert reply.events[-1]["error"]["code"] == NOT_CONTINUABLE
        part = "".join(event["choices"][0]["text"] for event in reply.events if event.get("choices"))
        assert part
        assert expected_text("p", TOKENS).startswith(part)
        assert client.figures("serve_app_not_continuable_total", "reason") == {("engine",): 1.0}
        assert client.outcomes[Outcome.ENGINE_FAILED] == 1
        await until(client.at_rest, SOON_S, "all given back")

    run(scenario, NEW)


def test_a_stopped_answer_of_which_its_client_has_nothing_begins_anew_when_only_another_model_is_left() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await mixed(cluster, old=("a",), new=())
        low = client.posting(ask("p", TOKENS, stream=False), key=BATCH_KEY)
        first, _ = await running(client, priority="high")
        second, _ = await running(client, priority="high")  # for its slot the answer stops
        await until(lambda: client.model.queue.waiting == 1, SOON_S, "it waits again")
        await cluster.add("x")
        await until(lambda: client.model.replica_set.is_usable("x"), SOON_S, "the new one is known")
        cluster.kill("a")
        reply = await low
        assert reply.status == 200
        undisturbed = await client.post(ask("p", TOKENS, stream=False))
        assert reply.text == undisturbed.text != expected_text("p", TOKENS)
        await asyncio.wait({first, second})

    run(scenario, NEW)
