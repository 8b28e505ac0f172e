"""Agent sessions of one tenant beside requests of another, at the HTTP door: what they leave, and when they end."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from serve_app.core.shared_queue import session_admission, session_reclaim
from serve_app.router import SessionClient
from serve_app.settings import KeySettings, Settings
from tests.fakes import quota as fake_quota
from tests.fakes.asgi_client import Client, Reply, ask, router_app, started
from tests.fakes.engines import MODEL, FakeCluster, model, run, until
from tests.fakes.router import SOON_S
from tests.fakes.sessions import ActorSessions

AGENTS = "sk-agents-0123456789"
OFFICE = "sk-office-0123456789"
POOL = 2000  # KV tokens of the engine; a tenth is kept for growth
SESSION_TOKENS = 160
SLOTS = 8
TOKENS = 140  # of an answer; with its prompt in whole blocks of 16 as many as a session holds
WAITS = {
    (fake_quota, "TOKENS"): POOL,
    (session_reclaim, "NOTICE_S"): 0.5,
    (session_admission, "REVIEW_S"): 0.05,
}


async def door(cluster: FakeCluster, **tenants: dict[str, Any]) -> Client:
    """A router with one engine, and keys of two tenants."""
    client = await started(cluster, "r1")
    keys = (
        KeySettings(key=AGENTS, tenant="agents", max_class="normal"),
        KeySettings(key=OFFICE, tenant="office", max_class="critical"),
    )
    reported = {"auth": {"keys": keys}, "admission": {"tenants": tenants}, "models": (cluster.settings,)}
    sessions = SessionClient(ActorSessions(cluster.quota).call, client.model.queue.core.sessions)
    settings = Settings.model_validate(reported)
    client.model.configure(cluster.settings, settings.admission, 1)
    client.edge = router_app(settings, {MODEL: client.model}, client.metrics, sessions=sessions)
    await until(lambda: client.model.replica_set.info is not None, SOON_S, "the engine's limits")
    models = cluster.quota.core.queue.models
    await until(lambda: models.by_name[MODEL].admission.scheduler.shares.keys() == tenants.keys(), SOON_S, "the shares")
    return client


async def call(client: Client, method: str, path: str = "", **fields: Any) -> tuple[int, dict[str, Any]]:
    body = json.dumps(fields).encode() if method == "POST" and not path else b""
    reply = await client.request(method, f"/v1/sessions{path}", body, key=AGENTS)
    return reply.status, json.loads(reply.body)


async def opened(client: Client) -> list[str]:
    """As many sessions as the agents' tenant is given."""
    names: list[str] = []
    while len(names) < POOL // SESSION_TOKENS:
        name = f"s{len(names)}"
        status, reported = await call(client, "POST", model=MODEL, session_id=name, kv_tokens=SESSION_TOKENS)
        if status != 201:
            assert (status, reported["error"]["code"]) == (429, "insufficient_memory")
            break
        names.append(name)
    return names


@contextlib.asynccontextmanager
async def renewing(client: Client, names: list[str]) -> AsyncIterator[dict[str, list[dict[str, Any]]]]:
    """All sessions are renewed for the block, again and again; yields what each renewal said."""
    reported: dict[str, list[dict[str, Any]]] = {name: [] for name in names}

    async def renew() -> None:
        while True:
            for name in names:
                reported[name].append((await call(client, "POST", f"/{name}/renew"))[1])
            await asyncio.sleep(0.02)  # until the block ends

    task = asyncio.create_task(renew())
    try:
        yield reported
    finally:
        task.cancel()
        await asyncio.wait({task})


def office(client: Client, count: int, **more: Any) -> list[asyncio.Task[Reply]]:
    return [client.posting(ask(f"office {number}", TOKENS, **more), key=OFFICE) for number in range(count)]


def test_sessions_that_are_renewed_for_ever_are_taken_back_for_requests_that_wait() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await door(cluster)
        names = await opened(client)
        assert len(names) == POOL * 9 // 10 // SESSION_TOKENS, "one tenant's sessions fill the engine"
        most = 0
        tasks = list[asyncio.Task[Reply]]()
        runs = client.model.queue.core.in_flight.running
        async with renewing(client, names) as output:

            def half() -> bool:
                nonlocal most
                tasks.extend(office(client, SLOTS - sum(not task.done() for task in tasks)))
                most = max(most, len(runs))
                return most > SLOTS / 2

            await until(half, 4 * SOON_S, "over half of the slots are the others'")
            replies = await asyncio.gather(*tasks)
        assert {reply.status for reply in replies} == {200}
        ended = [name for name in names if output[name][-1].get("error")]
        assert ended
        for name in ended:
            *before, _ = [reported for reported in output[name] if "error" not in reported]
            assert any(reported["taken_back_in_s"] is not None for reported in before), "it had notice"
            status, received = await call(client, "GET", f"/{name}")
            assert (status, received["error"]["code"]) == (404, "session_taken_back")
            assert "its tenant's sessions held" in received["error"]["message"]
        kept = [name for name in names if name not in ended]
        assert len(kept) * SESSION_TOKENS >= POOL * 0.9 / 2 - SESSION_TOKENS
        for name in kept:
            assert (await call(client, "DELETE", f"/{name}"))[0] == 200
        await until(client.at_rest, SOON_S, "all given back")

    run(scenario, model(SLOTS, 0.002, session_slots=16, max_session_share=1.0), waits=WAITS)


def test_sessions_of_one_tenant_hold_half_of_a_model_by_default() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await door(cluster)
        names = await opened(client)
        assert len(names) == POOL * 9 // 20 // SESSION_TOKENS
        for name in names:
            await call(client, "DELETE", f"/{name}")

    run(scenario, model(SLOTS, session_slots=16), waits=WAITS)


def test_a_critical_request_of_a_tenant_with_a_share_is_served_beside_sessions_that_are_renewed_for_ever() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await door(cluster, office={"share": 0.5})
        names = await opened(client)
        assert len(names) == POOL * 9 // 20 // SESSION_TOKENS
        async with renewing(client, names):
            for number in range(3):
                reply = await client.post(ask(f"urgent {number}", 600, priority="critical"), key=OFFICE)
                assert reply.status == 200
        for name in names:
            assert (await call(client, "DELETE", f"/{name}"))[0] == 200

    run(scenario, model(SLOTS, session_slots=16, max_session_share=1.0), waits=WAITS)


def test_closing_a_session_while_its_request_runs_makes_no_room_for_another_until_that_ends() -> None:
    """A tenant held more than its part of the model by opening, asking for everything, closing, and opening again."""

    async def scenario(cluster: FakeCluster) -> None:
        client = await door(cluster)
        names = await opened(client)
        queue = client.model.queue.core
        await until(lambda: len(queue.sessions) == len(names), SOON_S, "the router has heard of the sessions")
        running = queue.in_flight.running
        all_of_it = ask("on", SESSION_TOKENS - 1)  # the prompt is one token
        tasks = [client.posting(all_of_it, key=AGENTS, headers={"X-Session-Id": name}) for name in names]
        drawn = cluster.quota.core.sessions.in_use
        leases = [session.lease for session in queue.sessions.values()]
        await until(lambda: all(map(drawn, leases)), SOON_S, "a request runs in each session")
        for name in names:
            assert (await call(client, "DELETE", f"/{name}"))[0] == 200
        assert await opened(client) == []
        office_session = json.dumps({"model": MODEL, "session_id": "d", "kv_tokens": POOL * 4 // 10}).encode()
        assert (await client.request("POST", "/v1/sessions", office_session, key=OFFICE)).status == 201
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await until(lambda: not running, SOON_S, "the requests have ended")
        assert len(await opened(client)) == len(names)

    run(scenario, model(SLOTS, 0.1, session_slots=16), waits=WAITS | {(session_admission, "RECALL_S"): 0.2})


def test_a_tenant_at_its_bound_that_closes_a_session_can_open_the_next_at_once() -> None:
    """The end of the last request and the closing reach the actor by two ways."""

    async def scenario(cluster: FakeCluster) -> None:
        client = await door(cluster)
        size = POOL * 9 // 20
        for turn in range(10):
            name = f"s{turn}"
            assert (await call(client, "POST", model=MODEL, session_id=name, kv_tokens=size))[0] == 201
            await until(lambda name=name: f"agents {name}" in client.model.queue.core.sessions, SOON_S, "it is known")
            reply = await client.post(ask("on", 5), key=AGENTS, headers={"X-Session-Id": name})
            assert reply.status == 200
            assert (await call(client, "DELETE", f"/{name}"))[0] == 200

    run(scenario, model(SLOTS, session_slots=16), waits=WAITS)
