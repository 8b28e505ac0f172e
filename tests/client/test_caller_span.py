"""A call by handle is in the trace of the caller's current span."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState

from serve_app.client.caller_span import with_caller_span
from serve_app.http import HttpRequest
from serve_app.http.asgi_bridge import AsgiBridge
from tests.fakes.asgi_client import KEY, started
from tests.fakes.engines import MODEL, FakeCluster
from tests.fakes.handle_calls import client_of, run
from tests.http.test_tracing import ALL, FakeExport, exports  # noqa: F401 - a fixture

TRACE = 0x4BF92F3577B34DA6A3CE929D0E0E4736
SPAN = 0x00F067AA0BA902B7
HEADER = f"00-{TRACE:032x}-{SPAN:016x}-01".encode()
ASKED = HttpRequest("POST", "/v1/chat/completions", [(b"authorization", b"Bearer x")], b"{}")
SAMPLED = TraceFlags(TraceFlags.SAMPLED)


@pytest.fixture
def span() -> Iterator[None]:
    """A span of the caller, which is current."""
    context = SpanContext(TRACE, SPAN, False, SAMPLED, TraceState([("vendor", "opaque")]))
    with trace.use_span(NonRecordingSpan(context)):
        yield


def test_without_a_span_nothing_is_added() -> None:
    assert with_caller_span(ASKED) is ASKED


@pytest.mark.usefixtures("span")
def test_the_current_span_becomes_the_parent_unless_the_caller_names_one() -> None:
    found = with_caller_span(ASKED)
    assert dict(found.headers) == {
        b"authorization": b"Bearer x",
        b"traceparent": HEADER,
        b"tracestate": b"vendor=opaque",
    }
    own = HttpRequest("POST", "/", [(b"traceparent", b"00-mine")], b"")
    assert with_caller_span(own) is own


@pytest.mark.usefixtures("span")
def test_a_call_and_the_sdk_are_in_the_caller_s_trace(exports: list[FakeExport]) -> None:  # noqa: F811
    async def scenario(cluster: FakeCluster) -> None:
        router = await started(cluster, "r1", traces=ALL)
        llm = client_of(AsgiBridge(router.edge), KEY, asyncio.get_running_loop())
        await llm.chat([{"role": "user", "content": "Hi"}], max_tokens=3)
        async for _ in llm.stream([{"role": "user", "content": "Hi"}], max_tokens=3):
            pass
        await llm.openai.completions.create(prompt="p", model=MODEL, max_tokens=3)
        assert [(one.context.trace_id, one.context.parent_id) for one in exports[0].traces] == [(TRACE, SPAN)] * 3

    run(scenario)
