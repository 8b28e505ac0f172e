"""A token through the router's whole app: one identity for limits, receipts, usage, request log, audit and console."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from serve_app.http.console.login_cookie import LoginCookies
from serve_app.http.tokens import JwksFollower
from serve_app.settings import JwtSettings
from tests.fakes.asgi_client import KEY, Client, Reply, ask, router_app, started
from tests.fakes.engines import FakeCluster, model, run
from tests.fakes.stores import FakeStore, follower_of
from tests.fakes.token_issuer import SETTINGS, FakeIssuer, jwk, rsa_key

SESSION = "/console/session"
HOST = "serve.example:8000"
PAGE = {"Host": HOST, "Origin": f"http://{HOST}"}
HASHED = SETTINGS.model_copy(update={"hash_subjects": True})

Scenario = Callable[[Client, FakeIssuer], Awaitable[None]]


def check(scenario: Scenario, jwt: JwtSettings = SETTINGS, **settings: Any) -> None:
    async def with_client(cluster: FakeCluster) -> None:
        issuer = FakeIssuer()
        client = await started(cluster, "r1", jwt=jwt, issuer=JwksFollower(issuer.read), **settings)
        await scenario(client, issuer)

    run(with_client, model())


def usage_keys(client: Client) -> set[tuple[str, str]]:
    batch = client.usage_meter.next_batch()
    return set() if batch is None else {(row.key_id, row.tenant) for row in batch.rows}


def test_a_token_is_answered_and_its_subject_is_named_in_usage_and_request_log() -> None:
    async def scenario(client: Client, issuer: FakeIssuer) -> None:
        reply = await client.post(ask("p"), key=issuer.token())
        assert reply.status == 200
        assert usage_keys(client) == {("jwt:alice", "research")}
        assert client.outcomes == {"ok": 1}
        receipt = json.loads((await client.get(f"/admin/requests/{request_id(reply)}", key=issuer.token())).body)
        assert (receipt["key_id"], receipt["tenant"]) == ("jwt:alice", "research")

    check(scenario)


def request_id(reply: Reply) -> str:
    return reply.headers["x-serve-app-request-id"]


def test_a_subject_is_hashed_where_that_is_asked_for() -> None:
    async def scenario(client: Client, issuer: FakeIssuer) -> None:
        assert (await client.post(ask("p"), key=issuer.token())).status == 200
        assert (await client.post(ask("p"), key=issuer.token(sub="bob"))).status == 200
        names = {key_id for key_id, _ in usage_keys(client)}
        assert len(names) == 2
        assert all(name.startswith("jwt:sha256:") and len(name) <= 64 for name in names)

    check(scenario, HASHED)


def test_keys_and_tokens_are_served_side_by_side_and_rights_are_the_claims_alone() -> None:
    async def scenario(client: Client, issuer: FakeIssuer) -> None:
        assert (await client.get("/v1/models")).status == 200
        plain = issuer.token()
        operator = issuer.token(roles=["operators"])
        listed = json.loads((await client.get("/v1/models", key=plain)).body)
        assert [one["id"] for one in listed["data"]] == ["sim"]
        assert (await client.get("/admin/keys", key=plain)).status == 403
        elsewhere = issuer.token(llm={"class": "high", "models": ["elsewhere"]})
        assert (await client.post(ask("p"), key=elsewhere)).error["code"] == "model_not_allowed"
        above = await client.post(ask("p", priority="critical"), key=plain)
        assert (above.status, above.error["code"]) == (403, "permission_denied")
        assert (await client.get("/health", key=operator)).status == 200

    check(scenario)


def test_a_subject_has_the_limits_of_keys_without_their_own() -> None:
    async def scenario(client: Client, issuer: FakeIssuer) -> None:
        auth = client.edge.settings.auth
        limits = auth.key_limits.model_copy(update={"max_concurrent": 7})
        auth = auth.model_copy(update={"key_limits": limits})
        client.edge.configure(client.edge.settings.model_copy(update={"auth": auth}))
        assert (await client.post(ask("p"), key=issuer.token())).status == 200
        (charged,) = client.limits.asked
        assert [name for name, _ in charged.scopes] == ["key:jwt:alice"]

    check(scenario)


@pytest.mark.parametrize("jwt", [SETTINGS, HASHED], ids=["named", "hashed"])
def test_receipts_usage_and_audit_say_of_a_token_what_its_key_is_called(jwt: JwtSettings, tmp_path: Path) -> None:
    async def scenario(client: Client, issuer: FakeIssuer) -> None:
        parts = client.edge.parts
        follower = follower_of(FakeStore(tmp_path))
        client.edge = router_app(
            client.edge.settings, parts.models, client.metrics, follower=follower, issuer=parts.issuer
        )
        await follower.follow()
        operator = issuer.token(roles=["operators"])
        made = await client.post({"name": "laptop", "tenant": "research"}, "/admin/keys", key=operator)
        assert made.status == 201, made.body
        asked = await client.post(ask("p"), key=issuer.token())
        (entry,) = json.loads((await client.get("/admin/audit", key=operator)).body)["data"]
        receipt = json.loads((await client.get(f"/admin/requests/{request_id(asked)}", key=operator)).body)
        ((used, _),) = usage_keys(client)
        assert (entry["action"], entry["tenant"], receipt["tenant"]) == ("key.create", "research", "research")
        assert entry["author"] == receipt["key_id"] == used
        if jwt is SETTINGS:
            assert used == "jwt:alice"
        else:
            assert used.startswith("jwt:sha256:")
            assert "alice" not in f"{entry}{receipt}"

    check(scenario, jwt)


def test_refusals_are_counted_by_reason_and_the_age_of_the_jwks_is_shown() -> None:
    async def scenario(client: Client, issuer: FakeIssuer) -> None:
        assert client.figures("serve_app_jwks_age_seconds") == {}
        await client.get("/v1/models", key=issuer.token())
        for token in (issuer.token(aud="else"), issuer.token(aud="else"), issuer.token(exp=1), "sk-unknown-0123456789"):
            reply = await client.get("/v1/models", key=token)
            assert reply.status == 401
            assert reply.headers["www-authenticate"] == "Bearer"
        counted = client.figures("serve_app_unauthorized_total", "reason")
        assert counted == {("audience",): 2, ("expired",): 1, ("unknown_key",): 1}
        assert client.outcomes == {"unauthorized": 4}
        client.metrics.read([client.model], client.edge.parts.issuer.age_s or 0.0)
        assert "serve_app_jwks_age_seconds" in client.metrics.render().decode()

    check(scenario)


def test_no_batch_is_made_with_a_token() -> None:
    async def scenario(client: Client, issuer: FakeIssuer) -> None:
        body = {"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        reply = await client.post(body, "/v1/batches", key=issuer.token())
        assert (reply.status, reply.error["code"]) == (403, "needs_api_key")

    check(scenario)


# The console


async def log_in(client: Client, secret: str) -> Reply:
    return await client.request("POST", SESSION, json.dumps({"key": secret}).encode(), PAGE, key=None)


async def cookie(client: Client, secret: str) -> dict[str, str]:
    reply = await log_in(client, secret)
    assert reply.status == 204, reply.body
    return {"Cookie": reply.headers["set-cookie"].split(";")[0], "Host": HOST}


async def session(client: Client, browser: dict[str, str]) -> Reply:
    return await client.get(SESSION, key=None, headers=browser)


def test_an_operator_logs_in_to_the_console_with_a_token_and_another_does_not() -> None:
    async def scenario(client: Client, issuer: FakeIssuer) -> None:
        refused = await log_in(client, issuer.token())
        assert (refused.status, refused.error["code"]) == (403, "permission_denied")
        assert (await log_in(client, issuer.token("k1", signed_by="stranger"))).status == 401
        token = issuer.token(roles=["operators"])
        browser = await cookie(client, token)
        assert token.split(".")[1] not in browser["Cookie"]
        own = json.loads((await session(client, browser)).body)
        assert (own["name"], own["tenant"], own["admin"]) == ("jwt:alice", "research", True)

    check(scenario)


def test_a_login_lasts_no_longer_than_its_token() -> None:
    async def scenario(client: Client, issuer: FakeIssuer) -> None:
        reply = await log_in(client, issuer.token(roles=["operators"]))
        words = reply.headers["set-cookie"].split("; ")
        (lasts,) = (int(word.removeprefix("Max-Age=")) for word in words if word.startswith("Max-Age="))
        assert 0 < lasts <= 330
        assert (await session(client, {"Cookie": words[0], "Host": HOST})).status == 200

    check(scenario)
    now = [1000.0]
    cookies = LoginCookies(bytes(32), lambda: now[0])
    _, value = cookies.header("jwt:{}", b"digest", is_secure=True, ends_at=1060.0)
    kept = value.partition(b";")[0]
    assert cookies.read(kept) is not None
    now[0] = 1060.0
    assert cookies.read(kept) is None


def test_a_login_ends_when_tokens_mean_something_else() -> None:
    async def scenario(client: Client, issuer: FakeIssuer) -> None:
        browser = await cookie(client, issuer.token(roles=["operators"]))
        for jwt in (SETTINGS.model_copy(update={"audience": "else"}), None):
            auth = client.edge.settings.auth.model_copy(update={"jwt": jwt})
            client.edge.configure(client.edge.settings.model_copy(update={"auth": auth}))
            assert (await session(client, browser)).status == 401

    check(scenario)


@pytest.mark.parametrize("change", ["identity", "signature"])
def test_a_changed_cookie_of_a_token_opens_nothing(change: str) -> None:
    async def scenario(client: Client, issuer: FakeIssuer) -> None:
        browser = await cookie(client, issuer.token(roles=["operators"]))
        name, _, value = browser["Cookie"].partition("=")
        parts = value.split(".")
        place = 2 if change == "identity" else 3
        middle = len(parts[place]) // 2
        swapped = "A" if parts[place][middle] != "A" else "B"
        parts[place] = parts[place][:middle] + swapped + parts[place][middle + 1 :]
        changed = {"Cookie": f"{name}={'.'.join(parts)}", "Host": HOST}
        assert (await session(client, changed)).status == 401

    check(scenario)


def test_a_login_waits_for_a_new_key_of_the_issuer() -> None:
    async def scenario(client: Client, issuer: FakeIssuer) -> None:
        issuer.published = [jwk("k2", rsa_key("k2"))]
        assert (await log_in(client, issuer.token("k2", roles=["operators"]))).status == 204
        assert (await log_in(client, KEY)).status == 204

    check(scenario)


def test_a_token_with_more_models_than_a_cookie_holds_is_refused() -> None:
    async def scenario(client: Client, issuer: FakeIssuer) -> None:
        many = {"class": "high", "models": [f"model-{number:04}" for number in range(200)]}
        reply = await log_in(client, issuer.token(roles=["operators"], llm=many))
        assert reply.status == 403
        assert "fewer models" in reply.error["message"]

    check(scenario)
