"""The console over ASGI: its files, the login, what the cookie opens and what it does not."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

import pytest

from serve_app.http.console.page_files import POLICY
from serve_app.settings import KeySettings
from tests.fakes.asgi_client import BATCH_KEY, COMPLETIONS, KEY, SCRAPER_KEY, Client, Reply, ask, started
from tests.fakes.engines import MODEL, FakeCluster, model, run

SESSION = "/console/session"
HOST = "serve.example:8000"
PAGE = {"Host": HOST, "Origin": f"http://{HOST}"}
OWN = PAGE | {"X-Serve-App-Console": "1"}
FILES = {one.name for one in resources.files("serve_app.http.console").joinpath("files").iterdir() if one.is_file()}

Scenario = Callable[[Client], Awaitable[None]]


def check(scenario: Scenario, **settings: Any) -> None:
    async def with_client(cluster: FakeCluster) -> None:
        await scenario(await started(cluster, "r1", **settings))

    run(with_client, model())


async def log_in(client: Client, key: str = KEY, headers: dict[str, str] = PAGE) -> Reply:
    return await client.request("POST", SESSION, json.dumps({"key": key}).encode(), headers, key=None)


async def cookie(client: Client, key: str = KEY) -> dict[str, str]:
    """The header of a browser that has logged in."""
    reply = await log_in(client, key)
    assert reply.status == 204, reply.body
    return {"Cookie": reply.headers["set-cookie"].split(";")[0], "Host": HOST}


# Files


def test_the_page_and_its_files_are_there_without_a_key() -> None:
    async def scenario(client: Client) -> None:
        page = await client.get("/console/", key=None)
        assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert page.body.lower().startswith(b"<!doctype html>")
        for name in FILES:
            reply = await client.get(f"/console/{name}", key=None)
            assert reply.status == 200
            assert reply.headers["content-security-policy"] == POLICY.decode()
            assert reply.headers["x-content-type-options"] == "nosniff"
            assert reply.headers["referrer-policy"] == "no-referrer"
            head = await client.request("HEAD", f"/console/{name}", key=None)
            assert (head.status, head.body) == (200, b"")
            assert head.headers["content-length"] == str(len(reply.body))

    check(scenario)


def test_the_address_without_a_slash_leads_to_the_page() -> None:
    async def scenario(client: Client) -> None:
        reply = await client.get("/console", key=None)
        assert (reply.status, reply.headers["location"]) == (308, "console/")

    check(scenario)


def test_a_browser_asks_whether_a_file_has_changed_and_gets_it_only_then() -> None:
    async def scenario(client: Client) -> None:
        page = await client.get("/console/", key=None)
        etag = page.headers["etag"]
        assert page.headers["cache-control"] == "no-cache"
        for known in (etag, f'"old", W/{etag}'):
            again = await client.get("/console/", key=None, headers={"If-None-Match": known})
            assert (again.status, again.body) == (304, b"")
            assert "content-length" not in again.headers
        assert (await client.get("/console/", key=None, headers={"If-None-Match": '"old"'})).status == 200

    check(scenario)


@pytest.mark.parametrize(
    "name",
    [
        "nothing.js",
        "../console.py",
        "..%2fconsole.py",
        "../../../../etc/passwd",
        "files/index.html",
        ".",
        "..",
        "\\..\\x",
    ],
)
def test_no_path_leads_out_of_the_folder(name: str) -> None:
    async def scenario(client: Client) -> None:
        for path in (f"/console/{name}", f"/console//{name}", f"/console/{urllib.parse.unquote(name)}"):
            reply = await client.get(path, key=None)
            assert (reply.status, reply.error["code"]) == (404, "unknown_url"), path

    check(scenario)


# Login


def test_a_login_opens_what_the_key_opens() -> None:
    async def scenario(client: Client) -> None:
        browser = await cookie(client)
        own = json.loads((await client.get(SESSION, key=None, headers=browser)).body)
        assert own == {
            "name": "desk",
            "tenant": "people",
            "admin": False,
            "classes": ["high", "normal", "low"],
            "models": [MODEL],
            "names": [],
        }
        assert json.loads((await client.get("/v1/models", key=None, headers=browser)).body)["data"][0]["id"] == MODEL
        answered = await client.post(ask("p", 3, stream=False), key=None, headers=browser | OWN)
        assert answered.status == 200
        receipt = await client.get(
            f"/admin/requests/{answered.headers['x-serve-app-request-id']}", key=None, headers=browser
        )
        assert json.loads(receipt.body)["tenant"] == "people"

    check(scenario)


def test_a_login_is_good_at_every_router() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        first = await started(cluster, "r1")
        second = await Client(cluster, "second").start()
        browser = await cookie(first)
        assert (await second.get(SESSION, key=None, headers=browser)).status == 200

    run(scenario, model())


@pytest.mark.parametrize("body", [b"{}", b'{"key": ""}', b'{"key": 7}', b'{"key": "sk-wrong-0123456789"}'])
def test_a_wrong_key_logs_nobody_in(body: bytes) -> None:
    async def scenario(client: Client) -> None:
        reply = await client.request("POST", SESSION, body, PAGE, key=None)
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
        assert "set-cookie" not in reply.headers
        assert b"sk-wrong" not in reply.body

    check(scenario)


def test_a_scraper_s_key_has_nothing_to_see_here() -> None:
    async def scenario(client: Client) -> None:
        reply = await log_in(client, SCRAPER_KEY)
        assert (reply.status, reply.error["code"]) == (403, "model_not_allowed")
        for path in (SESSION, "/console/live"):
            assert (await client.get(path, key=SCRAPER_KEY)).status == 403

    check(scenario)


def test_the_cookie_is_sent_by_tls_alone_where_the_page_came_by_tls() -> None:
    async def scenario(client: Client) -> None:
        plain = await log_in(client)
        assert "Secure" not in plain.headers["set-cookie"]
        behind_proxy = {"Host": "serve_app", "Origin": "https://console.example", "Sec-Fetch-Site": "same-origin"}
        secure = await log_in(client, headers=behind_proxy)
        assert secure.headers["set-cookie"].endswith("; Secure")
        assert secure.headers["cache-control"] == "no-store"
        assert "content-length" not in secure.headers

    check(scenario)


def test_another_page_cannot_log_a_person_in_and_a_program_can() -> None:
    async def scenario(client: Client) -> None:
        for headers in (PAGE | {"Origin": "http://evil.example"}, PAGE | {"Sec-Fetch-Site": "cross-site"}):
            reply = await log_in(client, headers=headers)
            assert (reply.status, reply.error["code"]) == (403, "csrf")
            assert "set-cookie" not in reply.headers
        assert (await log_in(client, headers={"Host": HOST})).status == 204

    check(scenario)


def test_logging_out_takes_the_cookie_away() -> None:
    async def scenario(client: Client) -> None:
        browser = await cookie(client)
        forged = await client.request("DELETE", SESSION, headers=browser | PAGE, key=None)
        assert (forged.status, forged.error["code"]) == (403, "csrf")
        reply = await client.request("DELETE", SESSION, headers=browser | OWN, key=None)
        assert reply.status == 204
        assert "Max-Age=0" in reply.headers["set-cookie"]

    check(scenario)


@pytest.mark.parametrize("change", ["revoked", "replaced"])
def test_a_login_ends_with_its_key(change: str) -> None:
    async def scenario(client: Client) -> None:
        browser = await cookie(client)
        kept = client.edge.settings.auth.keys[1:]
        if change == "replaced":  # the same name, another key
            kept = (KeySettings(key="sk-people-another-key", tenant="people", name="desk"), *kept)
        auth = client.edge.settings.auth.model_copy(update={"keys": kept})
        client.edge.configure(client.edge.settings.model_copy(update={"auth": auth}))
        reply = await client.get(SESSION, key=None, headers=browser)
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")

    check(scenario)


def test_the_rights_are_the_key_s_rights_of_now() -> None:
    async def scenario(client: Client) -> None:
        browser = await cookie(client)
        first, *others = client.edge.settings.auth.keys
        keys = (first.model_copy(update={"admin": True, "models": ("elsewhere",)}), *others)
        auth = client.edge.settings.auth.model_copy(update={"keys": keys})
        client.edge.configure(client.edge.settings.model_copy(update={"auth": auth}))
        own = json.loads((await client.get(SESSION, key=None, headers=browser)).body)
        assert (own["admin"], own["models"]) == (True, [])

    check(scenario)


# What the cookie does not open


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/metrics"), ("GET", "/version"), ("GET", "/health"), ("POST", "/tokenize"), ("POST", "/v2/rerank")],
)
def test_the_cookie_counts_where_the_console_asks_and_nowhere_else(method: str, path: str) -> None:
    async def scenario(client: Client) -> None:
        browser = await cookie(client)
        reply = await client.request(method, path, b"{}", browser | OWN, key=None)
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")

    check(scenario)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", COMPLETIONS),
        ("POST", "/admin/keys"),
        ("POST", "/admin/keys/desk"),
        ("DELETE", "/admin/keys/desk"),
        ("POST", "/admin/drains"),
        ("POST", "/admin/defrag"),
        ("POST", "//admin//defrag/"),
        ("POST", "/v1/files"),
        ("DELETE", "/v1/files/x"),
        ("POST", "/v1/sessions"),
    ],
)
@pytest.mark.parametrize(
    "headers",
    [
        {},  # an old browser's form
        {"Origin": "http://evil.example", "Content-Type": "text/plain"},
        {"Origin": "http://evil.example", "X-Serve-App-Console": "1"},
        PAGE,
        {"X-Serve-App-Console": "1"},
        OWN | {"Sec-Fetch-Site": "cross-site"},
        OWN | {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_a_form_of_another_page_changes_nothing(method: str, path: str, headers: dict[str, str]) -> None:
    async def scenario(client: Client) -> None:
        browser = await cookie(client)
        body = json.dumps(ask("p", 3)).encode()
        reply = await client.request(method, path, body, browser | headers, key=None)
        assert (reply.status, reply.error["code"]) == (403, "csrf")
        assert not client.outcomes

    check(scenario)


def test_a_key_of_its_own_counts_and_the_cookie_beside_it_does_not() -> None:
    async def scenario(client: Client) -> None:
        browser = await cookie(client)
        own = await client.get(SESSION, key=BATCH_KEY, headers=browser)
        assert json.loads(own.body)["tenant"] == "batch"
        wrong = await client.get(SESSION, key="sk-wrong-0123456789", headers=browser)
        assert wrong.status == 401
        for name in ("x-api-key", "api-key"):
            assert (await client.get(SESSION, key=None, headers=browser | {name: "sk-wrong"})).status == 401
        # a program with a key needs neither Origin nor the header
        assert (await client.post(ask("p", 3), headers=browser)).status == 200

    check(scenario)


@pytest.mark.parametrize("path", [SESSION, "/console/live"])
def test_what_is_no_file_needs_a_key(path: str) -> None:
    async def scenario(client: Client) -> None:
        for headers in ({}, {"Cookie": "serve_app_console=1.9999999999.ZGVzaw.AAAA"}, {"Cookie": "a=b"}):
            reply = await client.get(path, key=None, headers=headers)
            assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")

    check(scenario)


def test_switched_off_nothing_of_it_is_there() -> None:
    async def scenario(client: Client) -> None:
        browser = await cookie(client)
        http = client.edge.settings.http.model_copy(update={"console": False})
        client.edge.configure(client.edge.settings.model_copy(update={"http": http}))
        for method, path in (
            ("GET", "/console"),
            ("GET", "/console/"),
            ("GET", "/console/index.html"),
            ("GET", "/console/live"),
            ("GET", SESSION),
            ("POST", SESSION),
        ):
            for key in (None, KEY):
                reply = await client.request(method, path, b"{}", key=key)
                assert (reply.status, reply.error["code"]) == (404, "unknown_url")
        assert (await client.get("/v1/models", key=None, headers=browser)).status == 401, "nor does the cookie count"
        assert (await client.get("/v1/models")).status == 200

    check(scenario)
