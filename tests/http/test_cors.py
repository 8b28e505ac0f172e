"""Web pages may call where they are named, and nowhere else."""

from __future__ import annotations

import gzip
import json

from serve_app.http.error_responses import EXPOSED_HEADERS
from tests.fakes.asgi_client import COMPLETIONS, ask, started
from tests.fakes.engines import FakeCluster, model, run

PAGE = "https://chat.example"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


def test_a_page_that_is_named_may_call() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1", http={"cors_origins": (PAGE,)})
        asked = await client.request("OPTIONS", COMPLETIONS, headers=PREFLIGHT, key=None)
        assert asked.status == 200
        assert asked.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in asked.headers["access-control-allow-headers"]

        reply = await client.post(ask("p"), headers={"Origin": PAGE})
        assert reply.headers["access-control-allow-origin"] == PAGE
        exposed = reply.headers["access-control-expose-headers"].split(", ")
        assert exposed == [name.decode() for name in EXPOSED_HEADERS]
        refused = await client.post(ask("p"), headers={"Origin": PAGE}, key=None)
        assert refused.status == 401  # the key is asked for all the same
        other = await client.request("OPTIONS", COMPLETIONS, headers={**PREFLIGHT, "Origin": "https://x"}, key=None)
        assert (other.status, "access-control-allow-origin" in other.headers) == (400, False)

    run(scenario, model())


def test_no_page_may_call_by_default() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        assert (await client.request("OPTIONS", COMPLETIONS, headers=PREFLIGHT, key=None)).status == 401
        reply = await client.post(ask("p"), headers={"Origin": PAGE})
        assert not [name for name in reply.headers if name.startswith("access-control")]

    run(scenario, model())


def test_a_body_in_gzip_is_served_and_bounded_by_what_is_in_it() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1", http={"max_body_bytes": 2048})
        headers = {"Content-Encoding": "gzip"}
        body = json.dumps(ask("p")).encode()
        assert (await client.request("POST", COMPLETIONS, gzip.compress(body), headers)).status == 200
        bomb = await client.request("POST", COMPLETIONS, gzip.compress(bytes(10**6)), headers)
        assert (bomb.status, bomb.error["code"]) == (413, "body_too_large")

    run(scenario, model())
