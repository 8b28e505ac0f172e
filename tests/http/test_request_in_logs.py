"""The request that a log record is about: of a router, and of the engine that runs it."""

from __future__ import annotations

import io
from typing import Any
from unittest import mock

import pytest

from serve_app.http.engine_calls import EngineCalls
from tests.fakes.asgi_client import Client, ask, started
from tests.fakes.engines import FakeCluster, run
from tests.fakes.json_logs import failures, written  # noqa: F401 - a fixture
from tests.http.test_tracing import ALL, FakeExport, exports  # noqa: F401 - a fixture

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
HEADERS = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}


@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "once"}], ids=["plain", "with a key"])
def test_a_failure_inside_the_router_names_its_request_and_trace(
    written: io.StringIO,  # noqa: F811
    headers: dict[str, str],
) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client: Client = await started(cluster, "r1")
        with mock.patch.object(EngineCalls, "_run_charged", side_effect=RuntimeError("a mistake")):
            first = await client.post(ask("one"), headers=headers | HEADERS)
            second = await client.post(ask("two"))
        assert (first.status, second.status) == (500, 500)
        ids = [reply.headers["x-serve-app-request-id"] for reply in (first, second)]
        found = failures(written)
        assert [line["request_id"] for line in found] == ids
        assert [line.get("trace_id") for line in found] == [TRACE, None]
        assert all("a mistake" in line["exception"] for line in found)

    run(scenario)


@pytest.mark.parametrize("headers", [{}, HEADERS], ids=["no caller", "a caller"])
@pytest.mark.parametrize("traces", [{}, ALL], ids=["off", "on"])
def test_a_failure_inside_the_engine_names_the_router_s_request_and_trace(
    written: io.StringIO,  # noqa: F811
    exports: list[FakeExport],  # noqa: F811
    headers: dict[str, str],
    traces: dict[str, Any],
) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1", traces=traces)
        (replica,) = cluster.replicas.values()
        with mock.patch.object(replica.engine.backend, "run", side_effect=RuntimeError("a mistake")):
            reply = await client.post(ask("one"), headers=headers)
        assert reply.status == 500
        (line,) = failures(written)
        traced = line.get("trace_id")
        if not traces:
            assert traced == (TRACE if headers else None)
            assert ("(traceparent none)" in line["message"]) == (not headers)
        else:
            assert f"00-{traced}-" in line["message"], "the request's own span, and not the caller's"
            assert reply.headers["traceresponse"].split("-")[1] == traced
            assert not headers or traced == TRACE
        assert line["message"].startswith(f"Request {line['request_id']} failed inside the engine replica")
        assert line["request_id"].startswith(reply.headers["x-serve-app-request-id"])

    run(scenario)
