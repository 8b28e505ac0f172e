"""An attacker with one tenant's key: no route tells it anything of another tenant, and what is another tenant's is as
unknown to it as what never was."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from serve_app.core.memory import SessionRequest, session_name
from serve_app.engine.vllm_adapter.produced_tokens import PRODUCED
from serve_app.errors import BadRequest, ServeAppError
from serve_app.http.api import routes
from serve_app.http.api.session_routes import SessionRoutes
from serve_app.http.contract import check_values, split
from serve_app.http.error_responses import error_response
from serve_app.router import SessionClient
from serve_app.settings import HttpSettings
from serve_app.transport import Frame, Submit
from serve_app.types import Identity, Operation, RequestClass
from tests.fakes.asgi_client import BATCH_KEY, CHAT, COMPLETIONS, KEY, Client, Reply, ask, started
from tests.fakes.engines import MODEL, FakeCluster, model, run

# the tenants of KEY and BATCH_KEY
OWNER = "people"
ATTACKER = "batch"
SECRET = "xyzzy-plugh"  # of the owner's prompt
CLIENT_ID = "owner-trace-17"
IDEMPOTENCY = {"Idempotency-Key": "order-1"}
CALLS = [("GET", ""), ("POST", "/renew"), ("DELETE", "")]  # of a session, after its id
MIN_ID_BITS = 122  # of a random UUID


def check(scenario: Callable[[Client, FakeCluster], Awaitable[None]], **settings: Any) -> None:
    async def with_client(cluster: FakeCluster) -> None:
        await scenario(await started(cluster, "r1"), cluster)

    run(with_client, model(**settings))


def attacked(client: Client, method: str, path: str, body: Any = None, **headers: str) -> Awaitable[Reply]:
    """A request with the attacker's key."""
    data = b"" if body is None else json.dumps(body).encode()
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    return client.request(method, path, data, headers=sent, key=BATCH_KEY)


async def owner_s(client: Client) -> str:
    """A finished request of the owner; its id."""
    reply = await client.post(ask(SECRET, 3, stream=False), headers={"X-Request-Id": CLIENT_ID, **IDEMPOTENCY})
    assert reply.status == 200
    return reply.headers["x-serve-app-request-id"]


def without_ids(reply: Reply, *ids: str) -> tuple[int, dict[str, str], str]:
    """An answer with what it repeats of the request taken out."""
    text = reply.body.decode()
    for known_id in ids:
        text = text.replace(known_id, "ID")
    return reply.status, {name: value for name, value in reply.headers.items() if name != "content-length"}, text


BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3},
    COMPLETIONS: ask("hello", 3, stream=False),
    "/tokenize": {"model": MODEL, "prompt": "hello"},
    "/detokenize": {"model": MODEL, "tokens": [1, 2]},
}


def test_no_route_answers_another_tenant_with_anything_of_the_owner_s() -> None:
    """Every route of the table, with the owner's ids where one takes an id and with its Idempotency-Key."""

    async def scenario(client: Client, cluster: FakeCluster) -> None:
        secret_id = await owner_s(client)
        paths = [(method, path) for method, path, _ in routes.ROUTES]
        paths += [(method, f"/v1/sessions/s1{after}") for method, after in CALLS]
        paths += [("GET", f"/v1/models/{MODEL}")]
        paths += [("GET", f"/admin/requests/{name}") for name in (f"cmpl-{secret_id}", CLIENT_ID)]
        paths.remove(("GET", "/console/live"))  # it has no end; tests/core/live shows what is in it
        for method, path in paths:
            body = BODIES.get(path, {"model": MODEL, "input": "hello"}) if method == "POST" else None
            reply = await attacked(client, method, path, body, idempotency_key="order-1")
            asked_for = path.rpartition("/")[2]  # an error repeats the id it was asked for
            reported = (reply.body.decode() + str(reply.headers)).replace(asked_for, "")
            for secret in (OWNER, SECRET, secret_id, CLIENT_ID, KEY):
                assert secret not in reported, (method, path, secret)

    check(scenario)


@pytest.mark.parametrize("path", ["/metrics", "/admin/quota", "/tokenizer_info"])
def test_what_concerns_all_tenants_is_refused_without_a_look_at_it(path: str) -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        before = await attacked(client, "GET", path)
        await owner_s(client)
        after = await attacked(client, "GET", path)
        assert (before.status, before.error["code"]) == (403, "not_admin")
        assert after.body == before.body

    check(scenario)


def test_a_receipt_of_another_tenant_is_refused_as_one_that_never_was() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        found = await owner_s(client)
        absent = "f" * len(found)
        for before in ("", "cmpl-", "chatcmpl-"):
            known, unknown = [
                await attacked(client, "GET", f"/admin/requests/{before}{one}") for one in (found, absent)
            ]
            assert known.error["code"] == "request_not_found"
            assert without_ids(known, found) == without_ids(unknown, absent)
        known, unknown = [await attacked(client, "GET", f"/admin/requests/{one}") for one in (CLIENT_ID, "absent")]
        assert without_ids(known, CLIENT_ID) == without_ids(unknown, "absent")

    check(scenario)


def test_an_equal_request_id_of_two_tenants_finds_each_its_own_receipt() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        theirs = await owner_s(client)
        own_headers = (await attacked(client, "POST", COMPLETIONS, ask("p"), x_request_id=CLIENT_ID)).headers
        receipt = json.loads((await attacked(client, "GET", f"/admin/requests/{CLIENT_ID}")).body)
        assert receipt["request_id"] == own_headers["x-serve-app-request-id"] != theirs
        assert receipt["tenant"] == ATTACKER
        owned = json.loads((await client.get(f"/admin/requests/{CLIENT_ID}")).body)
        assert owned["request_id"] == theirs

    check(scenario)


def test_an_idempotency_key_of_another_tenant_is_a_key_that_was_never_used() -> None:
    """Neither its answer comes, nor the refusal of another body under it."""

    async def scenario(client: Client, cluster: FakeCluster) -> None:
        await owner_s(client)
        for body in (ask("other", 3, stream=False), ask("other", 3, stream=False)):
            reply = await client.post(body, key=BATCH_KEY, headers=IDEMPOTENCY)
            assert reply.status == 200
        assert len(cluster.submits) == 2
        reused = await client.post(ask(SECRET, 3, stream=False), key=BATCH_KEY, headers=IDEMPOTENCY)
        assert (reused.status, reused.error["code"]) == (400, "idempotency_key_reused")  # by its own use of the key

    check(scenario)


def test_request_ids_and_generated_session_ids_cannot_be_guessed() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        ids = {(await client.post(ask("p", 1))).headers["x-serve-app-request-id"] for _ in range(20)}
        assert len(ids) == 20
        assert all(len(bytes.fromhex(one)) * 8 >= MIN_ID_BITS for one in ids)
        # a counter or a clock in a fixed place would leave columns of one digit
        assert all(len(set(column)) > 1 for column in zip(*ids, strict=True))

    check(scenario)


@pytest.mark.parametrize("settings", [{}, {"task": "embed"}])
def test_every_operation_with_a_prompt_carries_the_salt_of_its_tenant(settings: dict[str, Any]) -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        seen: list[Submit] = []
        through = cluster["r1"].engine.server.run

        async def recorded(submit: Submit, put: Callable[[Frame], None]) -> None:
            seen.append(submit)
            await through(submit, put)

        cluster["r1"].engine.server.run = recorded
        sent = {path: BODIES[path] for path in (CHAT, COMPLETIONS)}
        if settings:
            sent = {
                "/v1/embeddings": {"model": MODEL, "input": "hello"},
                "/v1/score": {"model": MODEL, "queries": "hello", "documents": ["hello"]},
                "/v1/rerank": {"model": MODEL, "query": "hello", "documents": ["hello"]},
            }
        for path, body in sent.items():
            for key in (KEY, BATCH_KEY, KEY):
                assert (await client.post(body | {"cache_salt": "chosen"}, path=path, key=key)).status == 200
            salt, other, again = [submit.cache_salt for submit in seen[-3:]]
            assert salt == again != other
            assert salt is not None
            assert len(salt) >= math.ceil(256 / 6)  # 256 bits in base64
            assert "cache_salt" not in seen[-1].body

    check(scenario, **settings)


# Sessions


def identity_of(tenant: str) -> Identity:
    return Identity(tenant, RequestClass.HIGH, RequestClass.NORMAL)


async def session_answer(cluster: FakeCluster, tenant: str, method: str, path: str) -> tuple[Any, ...]:
    """What a tenant is answered about a session, by the actor's own sessions."""
    sessions = cluster.quota.core.sessions
    calls: dict[str, Callable[[str], Any]] = {
        "renew_session": lambda name: sessions.renew(name, time.monotonic()),
        "look_session": sessions.view,
        "close_session": sessions.close,
    }

    async def call(method: str, name: str) -> Any:
        return calls[method](name)

    local = SessionRoutes(SessionClient(call, {}), {})
    try:
        return await local.answer(routes.resolve(method, path), identity_of(tenant), None, {}, 8)
    except ServeAppError as error:
        return error_response(error)


async def with_session(cluster: FakeCluster, tenant: str) -> None:
    await cluster.add("r1")
    ask_ = SessionRequest(session_name(tenant, "s1"), MODEL, 16, 600.0)
    cluster.quota.core.sessions.reserve(ask_, "r1", time.monotonic())


def test_a_session_of_another_tenant_is_refused_as_one_that_never_was() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await with_session(cluster, OWNER)
        for method, after in CALLS:
            status, headers, body = await session_answer(cluster, ATTACKER, method, f"/v1/sessions/s1{after}")
            absent = await session_answer(cluster, ATTACKER, method, f"/v1/sessions/s2{after}")
            assert status == 404
            assert (status, headers, body.replace(b"s1", b"s2")) == absent
        assert (await session_answer(cluster, OWNER, "GET", "/v1/sessions/s1"))[0] == 200

    run(scenario, model())


def test_a_session_id_with_a_space_reaches_no_session_of_a_tenant_whose_name_goes_on_after_it() -> None:
    """The tenant `acme` asks for `labs s1`, and the tenant `acme labs` has a session `s1`."""

    async def scenario(cluster: FakeCluster) -> None:
        await with_session(cluster, "acme labs")
        for method, after in CALLS:
            status, headers, body = await session_answer(cluster, "acme", method, f"/v1/sessions/labs s1{after}")
            absent = await session_answer(cluster, "acme", method, f"/v1/sessions/none{after}")
            assert (status, headers, body.replace(b"labs s1", b"none")) == absent
        assert (await session_answer(cluster, "acme labs", "GET", "/v1/sessions/s1"))[0] == 200

    run(scenario, model())


# Media


@pytest.mark.parametrize(
    ("operation", "field"),
    [(Operation.CHAT, "messages"), (Operation.EMBEDDING, "messages"), (Operation.RESPONSES, "input")],
)
def test_a_client_names_no_medium_in_the_engine_s_cache(operation: Operation, field: str) -> None:
    """By such a name vLLM finds the image that anybody has sent under it."""
    text = {"type": "text", "text": "what is this?"}
    image: dict[str, Any] = {"type": "image_url", "image_url": None, "uuid": "somebody-s"}
    with pytest.raises(BadRequest) as refused:
        check_values(operation, {field: ["plain", {"role": "user"}, {"role": "user", "content": [text, image]}]})
    assert refused.value.param == f"{field}.2.content.1.uuid"
    check_values(operation, {field: [{"role": "user", "content": [text, image | {"uuid": None}]}]})


def test_no_medium_is_named_in_a_batch_of_conversations_or_a_score_either() -> None:
    named = {"content": [{"type": "image_url", "image_url": None, "uuid": "somebody-s"}]}
    for operation, body, path in (
        (Operation.EMBEDDING, {"messages": [[{"role": "user", "content": "a"}], [named]]}, "messages.1.0"),
        (Operation.SCORE, {"queries": named, "documents": "a"}, "queries"),
        (Operation.SCORE, {"text_1": "a", "text_2": ["b", named]}, "text_2.1"),
        (Operation.RERANK, {"query": "a", "documents": [named]}, "documents.0"),
    ):
        with pytest.raises(BadRequest) as refused:
            check_values(operation, body)
        assert refused.value.param == f"{path}.content.0.uuid"


@pytest.mark.parametrize("operation", [Operation.CHAT, Operation.COMPLETION, Operation.RESPONSES])
def test_nobody_makes_an_engine_believe_that_it_has_produced_tokens(operation: Operation) -> None:
    attacker = Identity(tenant=ATTACKER, max_class=RequestClass.NORMAL, default_class=RequestClass.NORMAL)
    body = {"model": MODEL, "vllm_xargs": {PRODUCED: [1, 2]}}
    assert split(operation, body, {}, attacker, HttpSettings())[0] == {"model": MODEL}
