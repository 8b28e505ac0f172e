"""Background responses: a router stores them, a worker runs them through a router, anybody of the tenant reads them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from serve_app.batch import background_feed
from serve_app.batch.background_feed import BackgroundFeed
from serve_app.batch.router_calls import RouterCalls
from serve_app.http.asgi_bridge import AsgiBridge
from serve_app.http.keys import RowOwner
from serve_app.http.python_calls import HttpRequest
from serve_app.http.responses import background_runs, following
from tests.fakes.asgi_client import BATCH_KEY, KEY, Client, Reply, cancel, router_app, started
from tests.fakes.engines import FakeCluster, model, run, until
from tests.fakes.router import LONG, SOON_S
from tests.fakes.stores import FakeStore, follower_of
from tests.http.test_stored_responses import RESPONSES, ask, error_of, events, got, posted, text_of

AUTH = {
    "keys": [
        {"key": KEY, "tenant": "people", "name": "desk", "max_class": "high"},
        {"key": BATCH_KEY, "tenant": "batch", "name": "batch"},
    ]
}
WAITS = {
    (background_runs, "WRITE_S"): 0.02,
    (background_feed, "LOOK_S"): 0.02,
    (background_feed, "RETRY_S"): 0.05,
    (background_feed, "PAUSE_S"): 0.0,  # which goes by the clock of the store, and that is not of the test
    (following, "LOOK_S"): 0.02,
}
RUN = re.compile("run-[0-9a-f]{32}")  # the task of a run with an Idempotency-Key
Scenario = Callable[[Client, FakeStore], Awaitable[None]]


@pytest.fixture
def store(tmp_path: Path) -> FakeStore:
    return FakeStore(tmp_path)


class LocalHandle:
    """The routers as a worker calls them: this one. `lost`: its calls fail."""

    def __init__(self, client: Client) -> None:
        self.loop = asyncio.get_running_loop()
        self._bridge = AsgiBridge(client.edge)
        self.lost = False
        self.calls = 0

    async def stream(
        self, key_id: str, tenant: str, method: str, path: str, headers: Any, body: bytes, response_id: str
    ) -> AsyncIterator[Any]:
        self.calls += 1
        if self.lost:
            raise ConnectionError("the router is gone")
        request = HttpRequest(method, path, headers, body)
        async with contextlib.aclosing(self._bridge.exchange(request, RowOwner(key_id, tenant, response_id))) as pieces:
            async for piece in pieces:
                yield piece


@contextlib.asynccontextmanager
async def worker(client: Client, store: FakeStore, now: Callable[[], float] = time.time) -> AsyncIterator[LocalHandle]:
    handle = LocalHandle(client)
    feed = BackgroundFeed(store.background, RouterCalls(handle, now))  # type: ignore[arg-type]
    feed.start()
    try:
        yield handle
    finally:
        await feed.close()


def check(store: FakeStore, scenario: Scenario, step_s: float = 0.001, **changed: Any) -> None:
    async def everything(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        given = client.edge.settings.model_dump() | {"auth": AUTH} | changed
        settings = client.edge.settings.model_validate(given)
        follower = follower_of(store)
        models = client.edge.parts.models
        client.edge = router_app(settings, models, client.metrics, limits=client.limits, follower=follower)
        await follower.follow()
        await scenario(client, store)

    run(everything, model(step_s=step_s), waits=WAITS)


def status(store: FakeStore, name: str) -> str:
    return str(store.sql.responses.response(name, "people").shown()["status"])


async def ended(store: FakeStore, name: str) -> None:
    await until(lambda: status(store, name) not in ("queued", "in_progress"), SOON_S, "an end")


def text_deltas(found: list[dict[str, Any]]) -> str:
    return "".join(event["delta"] for event in found if event["type"] == "response.output_text.delta")


def test_a_response_is_queued_then_made_and_read(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore) -> None:
        body = ask("hello", background=True, metadata={"a": "b"}, priority="high")
        queued = await posted(client, body)
        assert (queued["status"], queued["background"], queued["store"], queued["output"]) == ("queued", True, True, [])
        assert await got(client, queued["id"]) == queued
        wrong = await posted(client, ask("more", previous_response_id=queued["id"]), 400)
        assert error_of(wrong) == ("previous_response_id", "response_in_progress")
        async with worker(client, store) as handle:
            await ended(store, queued["id"])
        made = await got(client, queued["id"])
        assert (made["id"], made["status"], made["background"]) == (queued["id"], "incomplete", True)
        assert text_of(made) == text_of(await posted(client, ask("hello")))
        (item,) = (await got(client, f"{made['id']}/input_items"))["data"]
        assert item["content"][0]["text"] == "hello"
        assert handle.calls == 1
        ended_ok = client.figures("serve_app_requests_total", "priority", "outcome")
        assert ended_ok[("high", "ok")] == 2  # the request and its run
        more = ask("more", background=True, previous_response_id=made["id"])
        second = await posted(client, more)
        async with worker(client, store):
            await ended(store, second["id"])
        whole = [{"role": "user", "content": "hello"}, *made["output"], {"role": "user", "content": "more"}]
        assert text_of(await got(client, second["id"])) == text_of(await posted(client, ask(whole)))

    check(store, scenario)


def test_a_stream_can_be_taken_up_again_at_any_event(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore) -> None:
        reply = Reply()
        reading = client.posting(ask("go", 40, background=True, stream=True), path=RESPONSES, reply=reply)
        async with worker(client, store):
            await until(lambda: b"output_text.delta" in reply.body, SOON_S, "text")
            name = events(reply)[0]["response"]["id"]
            await cancel(reading)  # its client leaves, and the response goes on
            again = await client.get(f"{RESPONSES}/{name}", query="stream=true")
        found = events(again)
        assert [event["sequence_number"] for event in found] == list(range(len(found)))
        assert [event["type"] for event in found[:2]] == ["response.created", "response.queued"]
        assert {event["response"]["id"] for event in found if "response" in event} == {name}
        whole = await got(client, name)
        assert found[-1]["response"] == whole
        assert text_deltas(found) == text_of(whole)
        for after in (0, 1, 7, len(found) - 2, len(found) - 1, len(found) + 5):
            rest = await client.get(f"{RESPONSES}/{name}", query=f"stream=true&starting_after={after}")
            assert events(rest) == found[after + 1 :]

    check(store, scenario, step_s=0.005)


def test_a_run_of_a_worker_that_left_is_joined_by_the_next(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore) -> None:
        name = (await posted(client, ask("go", 60, background=True)))["id"]
        async with worker(client, store):
            await until(lambda: client.engine_tokens() > 10, SOON_S, "tokens")
        async with worker(client, store):
            await ended(store, name)
        assert client.engine_tokens() == 60

    check(store, scenario, step_s=0.005)


def test_a_run_that_is_lost_begins_again_behind_the_events_that_were_sent(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore) -> None:
        name = (await posted(client, ask("go", 60, background=True)))["id"]
        async with worker(client, store):
            await until(lambda: (store.sql.background.begin(name) or 0) > 10, SOON_S, "events")
        (task,) = (task for task in asyncio.all_tasks() if RUN.fullmatch(task.get_name()))
        task.cancel()  # as if its router had died
        async with worker(client, store):
            await ended(store, name)
        found = events(await client.get(f"{RESPONSES}/{name}", query="stream=true"))
        assert [event["sequence_number"] for event in found] == list(range(len(found)))
        assert [event["type"] for event in found].count("response.created") == 3  # queued, run, run
        assert found[-1]["response"] == await got(client, name)
        assert text_of(found[-1]["response"]) == text_of(await posted(client, ask("go", 60)))

    check(store, scenario, step_s=0.005)


def test_a_response_is_cancelled_before_and_during_its_run(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore) -> None:
        async def cancelled(name: str) -> dict[str, Any]:
            reply = await client.post({}, f"{RESPONSES}/{name}/cancel")
            assert reply.status == 200, reply.body
            return dict(json.loads(reply.body))

        waiting = (await posted(client, ask("one", background=True)))["id"]
        assert (await cancelled(waiting))["status"] == "cancelled"
        running = (await posted(client, ask("two", LONG, background=True)))["id"]
        async with worker(client, store):
            await until(lambda: status(store, running) == "in_progress", SOON_S, "a run")
            assert (await cancelled(running))["status"] == "cancelled"
            await until(client.at_rest, SOON_S, "nothing runs")
            await until(lambda: store.sql.background.begin(running) is None, SOON_S, "an end")
        made = await got(client, running)
        assert (made["status"], (await cancelled(running))["status"]) == ("cancelled", "cancelled")
        assert text_of(made)
        found = events(await client.get(f"{RESPONSES}/{running}", query="stream=true"))
        assert text_deltas(found) == text_of(made)

    check(store, scenario, step_s=0.005)


def test_a_response_outlives_a_store_and_routers_that_are_away(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore) -> None:
        name = (await posted(client, ask("go", 40, background=True)))["id"]
        async with worker(client, store) as handle:
            await until(lambda: status(store, name) == "in_progress", SOON_S, "a run")
            store.away = True
            await until(client.at_rest, SOON_S, "the answer is made")
            store.away = False
            await ended(store, name)
            handle.lost = True
            second = (await posted(client, ask("go", background=True)))["id"]
            await until(lambda: handle.calls > 2, SOON_S, "attempts")
            handle.lost = False
            await ended(store, second)
        assert text_of(await got(client, name)) == text_of(await posted(client, ask("go", 40)))

    check(store, scenario, step_s=0.005)


def test_a_response_that_cannot_be_made_fails_with_the_reason(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore) -> None:
        first = (await posted(client, ask("one", store=True)))["id"]
        name = (await posted(client, ask("two", background=True, previous_response_id=first)))["id"]
        await client.request("DELETE", f"{RESPONSES}/{first}")
        async with worker(client, store):
            await ended(store, name)
        made = await got(client, name)
        assert made["status"] == "failed"
        assert first in made["error"]["message"]
        last = events(await client.get(f"{RESPONSES}/{name}", query="stream=true"))[-1]
        assert (last["type"], last["response"]["error"]) == ("response.failed", made["error"])

    check(store, scenario)


def test_a_repeat_under_an_idempotency_key_is_the_same_response(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore) -> None:
        made = [await posted(client, ask("one", background=True), headers={"Idempotency-Key": "k"}) for _ in range(2)]
        assert made[0] == made[1]
        other = await posted(client, ask("one", background=True), headers={"Idempotency-Key": "l"})
        assert other["id"] != made[0]["id"]

    check(store, scenario)


def test_another_body_under_the_same_idempotency_key_is_refused(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore) -> None:
        first = await posted(client, ask("one", background=True), headers={"Idempotency-Key": "k"})
        for body in (ask("two", background=True), ask("one", background=True, metadata={"a": "b"})):
            refused = await posted(client, body, 400, headers={"Idempotency-Key": "k"})
            assert error_of(refused) == ("Idempotency-Key", "idempotency_key_reused")
        theirs = await posted(client, ask("two", background=True), key=BATCH_KEY, headers={"Idempotency-Key": "k"})
        assert theirs["id"] != first["id"]
        async with worker(client, store) as handle:
            await ended(store, first["id"])
            await until(lambda: handle.calls == 2, SOON_S, "the other tenant's, too")
        again = await posted(client, ask("one", background=True), headers={"Idempotency-Key": "k"})
        assert again == await got(client, first["id"])

    check(store, scenario)


def test_a_deadline_counts_from_the_acceptance(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore) -> None:
        soon = {"X-Deadline-Ms": "1"}
        late = (await posted(client, ask("one", background=True), headers=soon))["id"]
        in_time = (await posted(client, ask("two", background=True), headers={"X-Deadline-Ms": "3600000"}))["id"]
        assert status(store, late) == "queued"
        async with worker(client, store) as handle:
            await ended(store, late)
            await ended(store, in_time)
        assert handle.calls == 1  # what is late reaches no router
        made = await got(client, late)
        assert (made["status"], made["error"]["code"], made["output"]) == ("failed", "deadline", [])
        last = events(await client.get(f"{RESPONSES}/{late}", query="stream=true"))[-1]
        assert (last["type"], last["response"]["error"]) == ("response.failed", made["error"])
        assert status(store, in_time) == "incomplete"
        wrong = await posted(client, ask("two", background=True), 400, headers={"X-Deadline-Ms": "0"})
        assert wrong["error"]["param"] == "X-Deadline-Ms"

    check(store, scenario)


def test_a_run_that_its_queue_cannot_start_in_time_fails_with_the_missed_deadline(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore) -> None:
        full = [client.posting(ask("long", LONG, priority="high"), path=RESPONSES) for _ in range(4)]
        await until(lambda: client.model.queue.granted == 4, SOON_S, "no slot is free")
        name = (await posted(client, ask("one", background=True), headers={"X-Deadline-Ms": "3600000"}))["id"]
        two_before = time.time() + 3598.0  # seconds before its deadline
        async with worker(client, store, lambda: two_before) as handle:
            await ended(store, name)
        assert handle.calls == 1
        assert (await got(client, name))["error"]["code"] == "deadline"
        for task in full:
            await cancel(task)

    check(store, scenario, step_s=0.01)


def test_another_tenant_neither_reads_nor_cancels(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore) -> None:
        name = (await posted(client, ask("one", background=True)))["id"]
        await got(client, name, 404, key=BATCH_KEY, query="stream=true")
        reply = await client.post({}, f"{RESPONSES}/{name}/cancel", key=BATCH_KEY)
        assert (reply.status, status(store, name)) == (404, "queued")

    check(store, scenario)


@pytest.mark.parametrize(
    ("more", "param"), [({"background": 1}, "background"), ({"store": False}, "background"), ({"model": "no"}, "model")]
)
def test_what_cannot_be_run_is_refused_at_once(store: FakeStore, more: dict[str, Any], param: str) -> None:
    async def scenario(client: Client, store: FakeStore) -> None:
        reply = await client.post(ask("one", background=True) | more, RESPONSES)
        assert (reply.status in (400, 404), reply.error["param"]) == (True, param)

    check(store, scenario)


def test_without_workers_nothing_is_made_in_the_background(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore) -> None:
        assert error_of(await posted(client, ask("one", background=True), 400)) == ("background", "no_batch_workers")

    check(store, scenario, batch={"workers": 0})
