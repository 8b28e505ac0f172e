"""Keys over HTTP: who may make them, what is told of them, and what an attacker gets."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from serve_app.http.api import routes
from serve_app.http.api.key_routes import KeyRoutes
from serve_app.http.keys import KeyRing
from serve_app.settings import AuthSettings, Settings
from tests.fakes.asgi_client import BATCH_KEY, KEY, Client, Reply, ask, router_app, started
from tests.fakes.engines import MODEL, FakeCluster, run, until
from tests.fakes.router import SOON_S
from tests.fakes.stores import FakeStore, follower_of, no_keys, record

ADMIN = "sk-admin-0123456789"
KEYS = "/admin/keys"
GOOD = {"name": "laptop", "tenant": "acme"}
LIMITS = {"requests_per_minute": 30, "tokens_per_minute": 1e5}
NAMES = (
    "Robert'); DROP TABLE api_keys;--",
    "\u0645\u0641\u062a\u0627\u062d",
    "\U0001f511" * 64,
    "../ops",
    "%2e%2e",
)

WRONG_FIELDS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"name": ""}, "name"),
    ({"name": "   "}, "name"),
    ({"name": "a\u0000b"}, "name"),
    ({"name": "a\nb"}, "name"),
    ({"name": "\u202eb"}, "name"),
    ({"name": "n" * 65}, "name"),
    ({"name": None}, "name"),
    ({"name": ["a"]}, "name"),
    ({"tenant": ""}, "tenant"),
    ({"tenant": "t" * 65}, "tenant"),
    ({"max_class": "urgent"}, "max_class"),
    ({"max_class": "low", "default_class": "normal"}, "default_class"),
    ({"admin": "yes"}, "admin"),
    ({"models": "tiny"}, "models"),
    ({"models": [1]}, "models.0"),
    ({"models": ["m"] * 257}, "models"),
    ({"models": ["m" * 257]}, "models.0"),
    ({"expires_at": "2001-01-01T00:00:00Z"}, "expires_at"),
    ({"expires_at": "2999-01-01T00:00:00"}, "expires_at"),
    ({"expires_at": "soon"}, "expires_at"),
    ({"expires_at": 4e9}, "expires_at"),
    ({"limits": {"requests_per_minute": -1}}, "limits.requests_per_minute"),
    ({"limits": {"burst_requests": 5}}, "limits"),
    ({"limits": {"rpm": 5}}, "limits.rpm"),
    ({"key": "sk-mine-0123456789"}, "key"),
    ({"key_id": "ops"}, "key_id"),
    ({"digest": "00"}, "digest"),
    ({"version": 1}, "version"),
)

Scenario = Callable[[Client], Awaitable[None]]


@pytest.fixture
def store(tmp_path: Path) -> FakeStore:
    return FakeStore(tmp_path)


def with_keys(store: FakeStore, scenario: Scenario) -> None:
    """Run on a router with an engine, an operator's key, and the store."""

    async def everything(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        people = {"key": KEY, "tenant": "people"}
        batch = {"key": BATCH_KEY}
        auth = {"keys": [{"key": ADMIN, "name": "ops", "admin": True}, people, batch]}
        acme = {"limits": {"max_concurrent": 9}, "models": {MODEL: {"tokens_per_day": 5}}, "over_limit": "wait"}
        given = client.edge.settings.model_dump() | {"auth": auth, "admission": {"tenants": {"acme": acme}}}
        follower = follower_of(store)
        settings = client.edge.settings.model_validate(given)
        client.edge = router_app(settings, client.edge.parts.models, client.metrics, follower=follower)
        await follower.follow()
        await scenario(client)

    run(everything)


def posted(reply: Reply, status: int = 201) -> dict[str, Any]:
    assert reply.status == status, reply.body
    return dict(json.loads(reply.body))


async def create(client: Client, **fields: Any) -> dict[str, Any]:
    return posted(await client.post(GOOD | fields, KEYS, key=ADMIN))


async def revoke(client: Client, made: dict[str, Any]) -> dict[str, Any]:
    return posted(await client.request("DELETE", f"{KEYS}/{made['id']}", key=ADMIN), 200)


async def rotate(client: Client, made: dict[str, Any], **fields: Any) -> Reply:
    return await client.post(fields, f"{KEYS}/{made['id']}/rotate", key=ADMIN)


async def got(client: Client, path: str) -> dict[str, Any]:
    return posted(await client.get(path, key=ADMIN), 200)


async def status_of(client: Client, made: dict[str, Any]) -> int:
    """Of a request with a key."""
    return (await client.post(ask("Hello"), key=made["key"])).status


def test_a_key_is_made_used_and_revoked(store: FakeStore) -> None:
    async def scenario(client: Client) -> None:
        made = await create(client, limits=LIMITS, max_class="critical", expires_at="2999-01-31T00:00:00+01:00")
        assert made["key"].startswith("sk-")
        assert re.fullmatch(r"key_[0-9a-f]{16}", made["id"])
        assert (made["state"], made["source"], made["expires_at"]) == ("active", "store", "2999-01-30T23:00:00Z")
        assert made["limits"] == LIMITS
        assert await status_of(client, made) == 200
        assert (await client.get(KEYS, key=made["key"])).error["code"] == "not_admin"
        gone = await revoke(client, made)
        assert gone["state"] == "revoked"
        refused = await client.post(ask("Hello"), key=made["key"])
        assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
        assert (await revoke(client, made))["revoked_at"] == gone["revoked_at"]

    with_keys(store, scenario)


def test_a_key_is_shown_once_and_its_digest_never(store: FakeStore, caplog: pytest.LogCaptureFixture) -> None:
    for name in (None, "ray.serve"):  # another test may have set the level of the latter
        caplog.set_level(logging.DEBUG, logger=name)

    async def scenario(client: Client) -> None:
        reply = await client.post(GOOD, KEYS, key=ADMIN)
        made = posted(reply)
        assert reply.headers["cache-control"] == "no-store"
        rotated = posted(await rotate(client, made), 200)
        replies = [await client.get(path, key=ADMIN) for path in (KEYS, f"{KEYS}/{made['id']}", f"{KEYS}/ops")]
        replies.append(await client.request("DELETE", f"{KEYS}/{made['id']}", key=ADMIN))
        replies.append(await client.post(ask("Hello"), key=made["key"]))
        shown = b"".join(reply.body for reply in replies).decode() + caplog.text
        assert made["id"] in caplog.text
        keys = [made["key"], rotated["key"], ADMIN, KEY]
        digests = [hashlib.sha256(key.encode()).hexdigest() for key in keys]
        assert [secret for secret in keys + digests if secret[:16] in shown] == []
        files = b"".join(one.read_bytes() for one in store.file.parent.iterdir())
        assert [key for key in keys if key.encode() in files] == []
        assert bytes.fromhex(digests[1]) in files

    with_keys(store, scenario)


def test_the_list_has_the_keys_of_the_file_too(store: FakeStore) -> None:
    async def scenario(client: Client) -> None:
        made = await create(client)
        listed = (await got(client, KEYS))["data"]
        of_file = [("ops", "configuration"), ("", "configuration"), ("", "configuration")]
        assert [(one["name"], one["source"]) for one in listed] == [*of_file, ("laptop", "store")]
        assert {one["id"] for one in listed} >= {made["id"], "ops"}
        for method, path in (("DELETE", "ops"), ("POST", "ops"), ("POST", "ops/rotate")):
            reply = await client.request(method, f"{KEYS}/{path}", b"{}", key=ADMIN)
            assert (reply.status, reply.error["code"]) == (409, "key_conflict")
            assert "auth.keys" in reply.error["message"]

    with_keys(store, scenario)


def test_the_limits_that_hold_for_a_key_are_reported(store: FakeStore) -> None:
    async def scenario(client: Client) -> None:
        made = await create(client, limits=LIMITS, batch_limits={"max_concurrent": 3})
        assert made["batch_limits"] == {"max_concurrent": 3}
        assert (await got(client, f"{KEYS}/{made['id']}"))["effective_limits"] == {
            "key": LIMITS,
            "tenant": {"max_concurrent": 9},
            "models": {MODEL: {"tokens_per_day": 5}},
            "over_limit": "wait",
            "batches": {"key": {"max_concurrent": 3}, "tenant": {}},
        }
        nothing = {"key": {}, "tenant": {}, "models": {}, "over_limit": "refuse", "batches": {"key": {}, "tenant": {}}}
        assert (await got(client, f"{KEYS}/ops"))["effective_limits"] == nothing

    with_keys(store, scenario)


def test_a_tenants_key_gets_nothing_and_its_body_is_not_read(store: FakeStore) -> None:
    calls_of_routes = [
        ("GET", KEYS),
        ("POST", KEYS),
        ("GET", f"{KEYS}/ops"),
        ("DELETE", f"{KEYS}/ops"),
        ("POST", f"{KEYS}/ops"),
        ("POST", f"{KEYS}/ops/rotate"),
        ("HEAD", f"{KEYS}/key_0"),
    ]

    async def scenario(client: Client) -> None:
        calls = store.calls
        with mock.patch("serve_app.http.body.read", side_effect=AssertionError("the body was read")):
            for method, path in calls_of_routes:
                for key in (KEY, BATCH_KEY):
                    reply = await client.request(method, path, b"x" * 10_000_000, key=key)
                    assert reply.status == 403
                    assert method == "HEAD" or reply.error["code"] == "not_admin"
                assert (await client.request(method, path, key=None)).status == 401
        assert store.calls == calls

    with_keys(store, scenario)


def test_a_wrong_field_is_named_and_nothing_is_made(store: FakeStore) -> None:
    async def scenario(client: Client) -> None:
        found = [(await client.post(GOOD | fields, KEYS, key=ADMIN)) for fields, _ in WRONG_FIELDS]
        reported = [(reply.status, reply.error["param"]) for reply in found]
        assert reported == [(400, param) for _, param in WRONG_FIELDS]
        assert await store.keys() == []

    with_keys(store, scenario)


def test_a_field_that_is_null_has_its_default(store: FakeStore) -> None:
    async def scenario(client: Client) -> None:
        fields = ("tenant", "max_class", "admin", "models", "expires_at", "limits", "unknown")
        made = posted(await client.post(GOOD | dict.fromkeys(fields), KEYS, key=ADMIN), 201)
        assert (made["tenant"], made["max_class"], made["admin"]) == ("default", "high", False)
        posted(await rotate(client, made, grace_s=None), 200)
        assert [await status_of(client, made)] == [200]

    with_keys(store, scenario)


def test_any_printable_name_is_a_name(store: FakeStore) -> None:
    async def scenario(client: Client) -> None:
        made = [await create(client, name=name, tenant=name) for name in NAMES]
        assert [(one["name"], one["tenant"]) for one in made] == [(name, name) for name in NAMES]
        assert [await status_of(client, one) for one in made] == [200] * len(NAMES)

    with_keys(store, scenario)


def test_an_unknown_id_is_a_404_and_not_repeated_at_length(store: FakeStore) -> None:
    async def scenario(client: Client) -> None:
        calls = store.calls
        for key_id in ("key_0", "' OR 1=1", "x" * 5000, "key_\u0000", "key_0/rotate/more", f"key_{'0' * 16}"):
            reply = await client.request("DELETE", f"{KEYS}/{key_id}", key=ADMIN)
            assert (reply.status, reply.error["code"]) == (404, "key_not_found")
            assert len(reply.body) < 400
        assert store.calls == calls + 1  # what is no id is not looked for

    with_keys(store, scenario)


def test_a_body_that_is_no_object_of_text_is_a_400(store: FakeStore) -> None:
    bodies = b"", b"[]", b"null", b"{", b'{"name": "\xff"}', b'{"name": "\\ud800"}', b"[" * 100_000

    async def scenario(client: Client) -> None:
        replies = [await client.request("POST", KEYS, body, key=ADMIN) for body in bodies]
        assert [reply.status for reply in replies] == [400] * len(bodies)
        assert await store.keys() == []

    with_keys(store, scenario)


def test_a_huge_body_is_a_413(store: FakeStore) -> None:
    async def scenario(client: Client) -> None:
        body = json.dumps(GOOD | {"models": ["m" * 200] * 50_000}).encode()
        assert (await client.request("POST", KEYS, body, key=ADMIN)).status == 413

    with_keys(store, scenario)


def test_a_rotation_gives_a_new_key_and_keeps_the_old_one_for_the_grace(store: FakeStore) -> None:
    async def scenario(client: Client) -> None:
        made = await create(client)
        second = posted(await rotate(client, made), 200)
        assert second["id"] == made["id"]
        assert second["key"] != made["key"]
        assert [await status_of(client, one) for one in (made, second)] == [200, 200]
        third = posted(await rotate(client, made, grace_s=0), 200)
        assert [await status_of(client, one) for one in (made, second, third)] == [401, 401, 200]
        for wrong in ({"grace_s": -1}, {"grace_s": 1e9}, {"grace_s": "1"}, {"grace": 1}):
            assert (await rotate(client, made, **wrong)).status == 400

    with_keys(store, scenario)


def test_the_grace_is_a_day_by_default(store: FakeStore) -> None:
    auth = AuthSettings.model_validate({"keys": [{"key": ADMIN, "admin": True}]})
    ring = KeyRing(auth, no_keys())
    settings = Settings()
    operator = ring.identify({b"x-api-key": ADMIN.encode()})

    async def body() -> tuple[dict[str, Any], int]:
        return {}, 2

    async def scenario() -> None:
        made = await store.create_key(record("sk-old-0123456789"))
        answers = KeyRoutes(follower_of(store), lambda: ring, lambda: settings, lambda: 2e9)
        await answers.answer(routes.resolve("POST", f"{KEYS}/{made.key_id}/rotate"), operator, body)
        assert (await store.key(made.key_id)).previous_until == 2e9 + 86_400

    asyncio.run(scenario())


def test_two_rotations_at_once_give_one_key(store: FakeStore) -> None:
    async def scenario(client: Client) -> None:
        made = await create(client)
        read = await store.key(made["id"])
        with mock.patch.object(store, "key", return_value=read):  # both have read the same state
            replies = [await rotate(client, made) for _ in range(2)]
        assert [reply.status for reply in replies] == [200, 409]
        assert await status_of(client, posted(replies[0], 200)) == 200

    with_keys(store, scenario)


def test_a_revoked_key_is_not_rotated_back_to_life(store: FakeStore) -> None:
    async def scenario(client: Client) -> None:
        made = await create(client)
        await revoke(client, made)
        assert (await rotate(client, made)).status == 409
        assert await status_of(client, made) == 401

    with_keys(store, scenario)


def test_a_request_that_runs_when_its_key_is_revoked_is_finished(store: FakeStore) -> None:
    async def scenario(client: Client) -> None:
        made = await create(client)
        reply = Reply()
        task = client.posting(ask("long", 40), key=made["key"], reply=reply)
        await until(lambda: bool(reply.chunks), SOON_S, "first frames")
        await revoke(client, made)
        assert await status_of(client, made) == 401
        assert not reply.ended
        await task
        assert reply.status == 200
        assert reply.events[-1]["choices"][0]["finish_reason"] == "length"

    with_keys(store, scenario)


def test_while_the_store_is_away_keys_work_and_their_routes_say_so(store: FakeStore) -> None:
    async def scenario(client: Client) -> None:
        made = await create(client)
        store.away = True
        assert await status_of(client, made) == 200
        for method, path in (("GET", KEYS), ("POST", KEYS), ("DELETE", f"{KEYS}/{made['id']}")):
            reply = await client.request(method, path, json.dumps(GOOD).encode(), key=ADMIN)
            assert (reply.status, reply.error["code"]) == (503, "no_store")
        assert (await got(client, f"{KEYS}/ops"))["id"] == "ops"

    with_keys(store, scenario)


def test_a_key_may_use_the_models_that_it_names_and_sees_no_others(store: FakeStore) -> None:
    async def scenario(client: Client) -> None:
        other, same, none = [await create(client, models=models) for models in (["other"], [MODEL], [])]
        for key, allowed in ((other, False), (same, True), (none, False)):
            asked = await client.post(ask("Hello"), key=key["key"])
            listed = json.loads((await client.get("/v1/models", key=key["key"])).body)["data"]
            answer = await client.get(f"/v1/models/{MODEL}", key=key["key"])
            assert [card["id"] for card in listed] == ([MODEL] if allowed else [])
            assert [reply.status for reply in (asked, answer)] == [200 if allowed else 403] * 2
            if not allowed:
                session = await client.post({"model": MODEL, "kv_tokens": 64}, "/v1/sessions", key=key["key"])
                codes = {(reply.error["code"], reply.error["param"]) for reply in (asked, answer, session)}
                assert codes == {("model_not_allowed", "model")}
        unknown = await client.post(ask("Hello") | {"model": "no-such"}, key=same["key"])
        assert (unknown.status, unknown.error["code"]) == (403, "model_not_allowed")
        gone = await client.post(ask("Hello") | {"model": "other"}, key=other["key"])
        assert gone.status == 404
        assert MODEL not in gone.error["message"]

    with_keys(store, scenario)
