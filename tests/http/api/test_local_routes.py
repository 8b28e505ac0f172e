"""What the router answers by itself: models, health, readiness, metrics."""

from __future__ import annotations

import importlib.metadata
import json
from typing import Any

import pytest

from serve_app import names
from serve_app.router import replicas as replica_module
from serve_app.settings import AuthSettings
from tests.fakes.asgi_client import BATCH_KEY, CHAT, Client, ask, cancel, running, started
from tests.fakes.engines import MODEL, FakeCluster, model, run, turns

ROLE_KEY = "sk-of-a-role-0123456789"

SCRAPED = (
    "serve_app_requests_total",
    "serve_app_queue_wait_seconds_bucket",
    "serve_app_waiting",
    "serve_app_slots",
)


def test_local_routes_tell_models_health_readiness_and_metrics() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await Client(cluster).start()
        assert (await client.get("/health")).status == 200
        assert (await client.get("/ready")).error["code"] == "not_ready"
        await cluster.add("r1")
        await turns(20)
        assert (await client.get("/ready")).status == 200
        models = json.loads((await client.get("/v1/models")).body)
        assert [(card["id"], card["max_model_len"]) for card in models["data"]] == [(MODEL, 8192)]
        assert json.loads((await client.get(f"/v1/models/{MODEL}")).body)["id"] == MODEL
        assert (await client.get("/v1/models/no")).error["code"] == "model_not_found"
        assert (await client.get("/v1/nowhere")).status == 404
        assert (await client.get(CHAT)).status == 405
        head = await client.request("HEAD", "/health")
        assert (head.status, head.body, head.headers["content-length"]) == (200, b"", "15")
        task, _ = await running(client)
        scraped = (await client.get("/metrics")).body.decode()
        assert all(name in scraped for name in SCRAPED)
        assert 'serve_app_slots{router="router",model="sim",replica="r1",state="granted"} 1.0' in scraped
        assert 'serve_app_engine_running_sequences{model="sim",replica="r1"} 1.0' in scraped
        await cancel(task)
        cluster.kill("r1", reported=False)
        gone = (await client.get("/metrics")).body.decode()  # and it does not hang
        assert "serve_app_engine_running_sequences{" not in gone

    run(scenario, waits={(replica_module, "ANSWER_TIMEOUT_S"): 0.2})


def test_metrics_are_for_operators_and_scrapers() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        reply = await client.get("/metrics", key=BATCH_KEY)
        assert (reply.status, reply.error["code"]) == (403, "not_admin")
        assert (await client.get("/metrics")).status == 200
        keys = {"sk-operator-0123456789": {"admin": True}, BATCH_KEY: {}}
        auth = AuthSettings.model_validate({"keys": [{"key": key, **role} for key, role in keys.items()]})
        client.edge.configure(client.edge.settings.model_copy(update={"auth": auth}))
        assert [(await client.get("/metrics", key=key)).status for key in keys] == [200, 403]

    run(scenario)


OPEN = ("/metrics", "/v1/models", "/ready", "/version")  # of no tenant and no model


async def statuses(role: dict[str, Any], cluster: FakeCluster, *paths: str) -> tuple[Client, dict[str, int]]:
    """What a key of this role gets there."""
    client = await started(cluster, "r1")
    auth = AuthSettings.model_validate({"keys": [{"key": ROLE_KEY, **role}]})
    client.edge.configure(client.edge.settings.model_copy(update={"auth": auth}))
    return client, {path: (await client.get(path, key=ROLE_KEY)).status for path in paths}


def test_a_scraper_s_key_reads_metrics_alone() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        closed = ("/v1/files", "/v1/batches", "/v1/sessions/x", "/admin/usage", "/admin/keys", "/admin/requests/x")
        client, reported = await statuses({"metrics": True}, cluster, *OPEN, *closed)
        assert reported == dict.fromkeys(OPEN, 200) | dict.fromkeys(closed, 403)
        assert json.loads((await client.get("/v1/models", key=ROLE_KEY)).body)["data"] == []
        chat = await client.post(ask("may I?", model=MODEL), key=ROLE_KEY)
        assert (chat.status, chat.error["code"]) == (403, "model_not_allowed")

    run(scenario)


@pytest.mark.parametrize("more", [{"models": [MODEL]}, {"admin": True}], ids=["names a model", "is an operator's"])
def test_a_scraper_s_key_that_names_models_or_is_an_operator_s_may_use_them(more: dict[str, Any]) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client, reported = await statuses({"metrics": True, **more}, cluster, *OPEN)
        assert reported == dict.fromkeys(OPEN, 200)
        assert (await client.post(ask("may I?", model=MODEL), key=ROLE_KEY)).status == 200

    run(scenario)


def test_readiness_names_no_model_that_the_key_may_not_use() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await Client(cluster).start()  # without a replica
        keys = {"sk-of-the-model-0123": [MODEL], "sk-of-another-01234": ["other"]}
        auth = AuthSettings.model_validate({"keys": [{"key": key, "models": models} for key, models in keys.items()]})
        client.edge.configure(client.edge.settings.model_copy(update={"auth": auth}))
        reported = [(await client.get("/ready", key=key)).error["message"] for key in keys]
        assert reported == [f"no replica of {MODEL} is running", "no replica of any model is running"]

    run(scenario)


@pytest.mark.parametrize("configured", [None, 2048])
def test_a_model_that_has_never_started_has_its_configured_length_or_null(configured: int | None) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await Client(cluster).start()  # without a replica
        document = json.loads((await client.get(f"/v1/models/{MODEL}")).body)
        (listed,) = json.loads((await client.get("/v1/models")).body)["data"]
        assert document == listed
        assert document["max_model_len"] == configured

    run(scenario, model(max_model_len=configured))


def test_the_version_that_runs_is_reported_also_once_another_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    running = importlib.metadata.version("serve-app")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9.9")
    names.versions.cache_clear()

    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        document = json.loads((await client.get("/version")).body)
        assert document["version"] == running

    try:
        run(scenario)
    finally:
        names.versions.cache_clear()


def test_the_tokenizer_is_described_to_operators_alone() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        refused = await client.get("/tokenizer_info")
        assert (refused.status, refused.error["code"]) == (403, "not_admin")

    run(scenario)
