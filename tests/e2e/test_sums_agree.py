"""Two thousand requests without kills: each place that counts them counts the same.

The places: the clients themselves, the counters and the histograms of GET /metrics, receipts, the request log, the
history, the use in the store, traces, and the ledger, which has nothing left of any of them.

Then the traces of a call by the Python handle and of a batch's rows.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from serve_app.core.spans import attributes as names
from tests.e2e import stack as stacks
from tests.e2e.joined import joined
from tests.e2e.observe import Observer, samples_of
from tests.e2e.stack import PEOPLE_KEY, REQUEST_TIMEOUT_S, Stack
from tests.fakes.otlp_receiver import OtlpReceiver, attributes_of, otlp_receiver
from tests.requires import requires
from tests.waiting import patient, wait_until

pytestmark = pytest.mark.long  # a stack of its own and 2,000 requests

REQUESTS = 2_000
CLIENTS = 24
ROUTERS = 2
MODELS = ("one", "two", "three")
TENANTS = ("red", "green", "blue")
LIMITED_KEY = "sk-sums-limited-0123456789"
SLOTS = 8
STEP_S = 0.002
TOKENS = 12
LEAVES_AFTER = 2  # frames, of a client that leaves while its answer runs
LONG = 3_000  # tokens of an answer whose client leaves: six seconds of the engine, which end with the client
FLUSH_S = 30.0  # of spans and of use: each is sent every few seconds
ID_HEADER = "x-serve-app-request-id"
PAGE = 1_000
SPANS = ("queue", "run", "relay")  # below that of an answered request, in this order
CALLER_TRACE = 0x4BF92F3577B34DA6A3CE929D0E0E4736
CALLER_SPAN = 0x00F067AA0BA902B7
ROWS = (1, 2, 3)  # the numbers of a file's lines
BATCH_S = 60.0  # three rows of a few milliseconds; a worker looks for new batches now and then
# By what a client saw: how the system names the ends of such requests.
OUTCOMES = {
    "ok": {"ok"},
    "refused": {"refused"},
    "bad": {"bad_request"},
    "left": {"cancelled_queued", "cancelled_running"},
}


def key_of(tenant: str) -> str:
    return f"sk-sums-{tenant}-0123456789"


def configured(traces: str) -> dict[str, Any]:
    model = {
        "engine": "simulated",
        "max_num_seqs": SLOTS,
        "simulated": {"decode_step_s": STEP_S},
        "cpus_per_rank": 0.5,
    }
    keys = [{"key": key_of(tenant), "tenant": tenant} for tenant in TENANTS]
    limited = {"key": LIMITED_KEY, "tenant": "limited", "limits": {"requests_per_minute": 1}}
    return {
        "models": [{"name": name, **model} for name in MODELS],
        "router": {"replicas": ROUTERS},
        "batch": {"workers": 1},
        "traces": {"endpoint": traces, "sample_ratio": 1.0},
        "auth": {"keys": [{"key": PEOPLE_KEY, "tenant": "people", "admin": True}, *keys, limited]},
    }


@dataclass
class Clients:
    """What the clients know. `tokens`: prompt and output tokens of the answers that were whole, by tenant and model."""

    ended: Counter[str] = field(default_factory=Counter)
    by_model: Counter[tuple[str, str]] = field(default_factory=Counter)
    tokens: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    ids: list[str] = field(default_factory=list)

    def count(self, how: str, model: str, request_id: str) -> None:
        self.ended[how] += 1
        self.by_model[how, model] += 1
        self.ids.append(request_id)


async def ask(client: httpx.AsyncClient, number: int, seen: Clients) -> None:
    """One request: most are answered, streamed or whole; some are refused, some are wrong, some clients leave."""
    kind = number % 20
    model = MODELS[number % len(MODELS)]
    tenant = TENANTS[number % len(TENANTS)]
    body: dict[str, Any] = {"model": model, "prompt": f"{number} boats on the river", "max_tokens": TOKENS}
    headers = {"Authorization": f"Bearer {LIMITED_KEY if kind == 1 else key_of(tenant)}"}
    if kind == 2:
        body["max_tokens"] = -1
    if kind == 3:
        body |= {"max_tokens": LONG, "stream": True}
        await leave(client, headers, body, seen)
        return
    if number % 2:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    answer = await client.post("/v1/completions", json=body, headers=headers)
    how = {200: "ok", 429: "refused", 400: "bad"}[answer.status_code]
    seen.count(how, model, answer.headers[ID_HEADER])
    if how == "ok":
        usage = usage_of(answer)
        seen.tokens["prompt", tenant if kind != 1 else "limited", model] += usage["prompt_tokens"]
        seen.tokens["output", tenant if kind != 1 else "limited", model] += usage["completion_tokens"]


async def leave(client: httpx.AsyncClient, headers: Mapping[str, str], body: Mapping[str, Any], seen: Clients) -> None:
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        assert answer.status_code == 200
        frames = 0
        async for line in answer.aiter_lines():
            frames += line.startswith("data: ")
            if frames == LEAVES_AFTER:
                break
        seen.count("left", str(body["model"]), answer.headers[ID_HEADER])


def usage_of(answer: httpx.Response) -> dict[str, int]:
    if answer.headers["content-type"].startswith("application/json"):
        usage: dict[str, int] = answer.json()["usage"]
        return usage
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    (found,) = [usage for event in events if (usage := httpx.Response(200, text=event).json().get("usage"))]
    return dict(found)


async def ask_all(stack: Stack) -> Clients:
    seen = Clients()
    numbers = iter(range(REQUESTS))

    async def asks() -> None:
        for number in numbers:
            await ask(client, number, seen)

    options: dict[str, Any] = {"timeout": patient(REQUEST_TIMEOUT_S), "limits": httpx.Limits(max_connections=None)}
    async with httpx.AsyncClient(base_url=stack.base_url, **options) as client, asyncio.TaskGroup() as asking:
        for _ in range(CLIENTS):
            asking.create_task(asks())
    return seen


@dataclass(frozen=True)
class Ended:
    """The stack after all requests, what the clients know, and the collector of traces."""

    stack: Stack
    seen: Clients
    collector: OtlpReceiver

    def total(self, name: str, **labels: str) -> float:
        return sum(sample.value for sample in samples_of(self.stack.get("/metrics").text, name, labels))

    def log(self) -> list[dict[str, Any]]:
        """All of the request log, page by page."""
        found: list[dict[str, Any]] = []
        cursor = None
        for _ in range(2 + REQUESTS // PAGE):
            params = {"limit": PAGE} | ({"cursor": cursor} if cursor else {})
            page = self.stack.get("/admin/requests", params=params).json()
            assert page["complete"], page["missing"]
            found += page["data"]
            cursor = page["next_cursor"]
            if cursor is None:
                return found
        raise AssertionError("the request log has more pages than requests fill")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    requires("linux")
    state: Path = tmp_path_factory.mktemp("sums")
    with otlp_receiver() as collector, stacks.own(state, configured(collector.url), "sums") as stack:
        seen = asyncio.run(ask_all(stack))
        for model in MODELS:
            Observer(stack).wait_idle(model)
        yield Ended(stack, seen, collector)


def test_the_clients_have_seen_each_kind_of_end(ended: Ended) -> None:
    assert ended.seen.ended.total() == REQUESTS == len(set(ended.seen.ids))
    assert set(ended.seen.ended) == set(OUTCOMES)


def test_counters_agree_with_the_clients_by_model_and_outcome(ended: Ended) -> None:
    for how, outcomes in OUTCOMES.items():
        for model in MODELS:
            counted = sum(ended.total("serve_app_requests_total", model=model, outcome=record) for record in outcomes)
            assert counted == ended.seen.by_model[how, model], (how, model)
    assert ended.total("serve_app_requests_total") == REQUESTS


def test_histograms_count_each_answered_request_once(ended: Ended) -> None:
    assert ended.total("serve_app_request_duration_seconds_count") == ended.seen.ended["ok"]
    with_first_token = ended.seen.ended["ok"] + ended.seen.ended["left"]
    assert ended.total("serve_app_time_to_first_token_seconds_count") == with_first_token


def test_the_request_log_has_each_request_once_as_the_clients_saw_it(ended: Ended) -> None:
    log = ended.log()
    assert Counter(record["request_id"] for record in log) == Counter(ended.seen.ids)
    for how, outcomes in OUTCOMES.items():
        assert sum(record["outcome"] in outcomes for record in log) == ended.seen.ended[how], how
    prompt: Counter[tuple[str, str, str]] = Counter()
    for record, (part, counted) in itertools.product(log, (("prompt", "prompt_tokens"), ("output", "output_tokens"))):
        if record["outcome"] == "ok":
            prompt[part, record["tenant"], record["model"]] += record[counted]
    assert prompt == ended.seen.tokens


def test_receipts_agree_with_the_request_log(ended: Ended) -> None:
    log = {record["request_id"]: record for record in ended.log()}
    for request_id in ended.seen.ids[::7]:
        receipt = ended.stack.get(f"/admin/requests/{request_id}").json()
        for name in ("outcome", "tenant", "model", "request_class", "prompt_tokens", "output_tokens"):
            assert receipt[name] == log[request_id][name], (request_id, name)


@pytest.mark.parametrize("by", ["total", "class", "model", "tenant"])
def test_the_history_adds_up_to_the_request_log(ended: Ended, by: str) -> None:
    answer = ended.stack.get("/admin/history", params={"by": by, "since": "2020-01-01T00:00:00Z"}).json()
    assert answer["complete"], answer["missing"]
    log = ended.log()
    expected = {
        "ok": ended.seen.ended["ok"],
        "refused": ended.seen.ended["refused"],
        "bad_request": ended.seen.ended["bad"],
        "cancelled": ended.seen.ended["left"],
        "failed": 0,
        "prompt_tokens": sum(record["prompt_tokens"] or 0 for record in log),
        "output_tokens": sum(record["output_tokens"] or 0 for record in log),
    }
    assert {name: sum(row[name] for row in answer["data"]) for name in expected} == expected


def test_tokens_agree_between_counters_and_the_request_log(ended: Ended) -> None:
    log = ended.log()
    for tenant, model in itertools.product((*TENANTS, "limited"), MODELS):
        own = [record for record in log if (record["tenant"], record["model"]) == (tenant, model)]
        labels = {"tenant": tenant, "model": model}
        output = sum(record["output_tokens"] or 0 for record in own)
        assert ended.total("serve_app_completion_tokens_total", **labels) == output, labels


def test_the_use_in_the_store_agrees_with_the_request_log(ended: Ended) -> None:
    log = ended.log()
    used = [record for record in log if record["outcome"] in OUTCOMES["ok"] | OUTCOMES["left"]]
    expected = (len(used), sum(record["output_tokens"] or 0 for record in used))

    def stored() -> tuple[int, int]:
        rows = ended.stack.get("/admin/usage", params={"by": "tenant"}).json()["data"]
        return sum(row["requests"] for row in rows), sum(row["output_tokens"] for row in rows)

    wait_until(stored, FLUSH_S, "requests and output tokens in the store", wanted=expected)


def test_each_request_has_one_trace(ended: Ended) -> None:
    def traced() -> Counter[str]:
        found = [attributes_of(span.attributes) for span in ended.collector.spans]
        return Counter(str(record["serve_app.request.id"]) for record in found if "serve_app.request.id" in record)

    wait_until(lambda: len(traced()), FLUSH_S, "requests with a trace", wanted=REQUESTS)
    assert traced() == Counter(ended.seen.ids)


def test_the_ledger_has_nothing_left_of_them(ended: Ended) -> None:
    figures = ended.stack.get("/admin/quota").json()
    assert [engine["kv_tokens_used"] for engine in figures["engines"]] == [0] * len(MODELS)
    assert ended.total("serve_app_waiting") == 0
    assert ended.total("serve_app_slots", state="granted") == 0


# Last: their requests are none of those that the tests above count.


def trace_of(ended: Ended, trace_id: int) -> list[Span]:
    """The spans of a trace in the order of their beginnings, once all of a request are there."""

    def found() -> list[Span]:
        own = [span for span in ended.collector.spans if int.from_bytes(span.trace_id) == trace_id]
        return sorted(own, key=lambda span: (span.start_time_unix_nano, -span.end_time_unix_nano))

    wait_until(lambda: len(found()) > len(SPANS), FLUSH_S, "spans of a request at the collector")
    return found()


def check_one_request(spans: list[Span], model: str, request_id: str) -> dict[str, Any]:
    """The spans are those of one answered request, each below its own. Returns the attributes of the request's span."""
    (request,) = [span for span in spans if span.name not in SPANS]
    below = [span for span in spans if span is not request]
    assert request.name == f"text_completion {model}"
    assert [span.name for span in below] == list(SPANS)
    assert {span.parent_span_id for span in below} == {request.span_id}
    assert len({span.span_id for span in spans}) == len(spans)
    found = attributes_of(request.attributes)
    assert (found[names.REQUEST_ID], found[names.OUTCOME], found[names.OUTPUT_TOKENS]) == (request_id, "ok", TOKENS)
    return found


def test_a_call_by_the_python_handle_is_in_the_trace_of_its_caller(ended: Ended) -> None:
    caller = SpanContext(CALLER_TRACE, CALLER_SPAN, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    with joined(ended.stack) as llm, use_span(NonRecordingSpan(caller)):
        answer = llm.sync.complete("A call by handle", model=MODELS[0], max_tokens=TOKENS)
    spans = trace_of(ended, CALLER_TRACE)
    found = check_one_request(spans, MODELS[0], answer.id.removeprefix("cmpl-"))
    assert (spans[0].parent_span_id, found[names.TENANT]) == (CALLER_SPAN.to_bytes(8), "people")


def test_each_row_of_a_batch_has_a_trace_of_its_own_that_names_the_row(ended: Ended) -> None:
    body = {"model": MODELS[1], "prompt": "A row of a batch", "max_tokens": TOKENS}
    rows = [{"custom_id": str(row), "method": "POST", "url": "/v1/completions", "body": body} for row in ROWS]
    with ended.stack.client() as client:
        content = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
        file = client.files.create(file=("rows.jsonl", content), purpose="batch")
        made = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        ask_again = lambda: client.batches.retrieve(made.id)  # noqa: E731
        wait_until(lambda: ask_again().status, BATCH_S, "the batch", wanted="completed", poll_s=0.5)
        results = client.files.content(str(ask_again().output_file_id)).text.splitlines()
    ids = {one["custom_id"]: one["response"]["request_id"] for one in map(json.loads, results)}
    for row in ROWS:
        trace_id = int.from_bytes(hashlib.sha256(f"{made.id}-{row}".encode()).digest()[:16])
        spans = trace_of(ended, trace_id)
        found = check_one_request(spans, MODELS[1], ids[str(row)])
        assert (found[names.BATCH_ID], found[names.ROW_NUMBER], found[names.IS_ROW]) == (made.id, row, True)
        assert not spans[0].parent_span_id, "nobody has called it"
