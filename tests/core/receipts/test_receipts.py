"""Receipts: the latest are found by id, in bounded memory, and each says in words what happened."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.continuation import NotContinued
from serve_app.core.estimate import EstimateSource, RequestCost
from serve_app.core.queue import RefusalReason, WaitReason
from serve_app.core.receipts.explanation import explain
from serve_app.core.receipts.receipts import LIMIT_WAIT, Receipt, Receipts
from serve_app.core.receipts.slo import SloVerdict
from serve_app.core.receipts.trace import MAX_TEXT_CHARS, RequestMeasure, RequestTrace
from serve_app.core.routing import Route
from serve_app.types import Outcome, RequestClass

WAITED = Receipt(
    request_id="req-1",
    request_class=RequestClass.NORMAL,
    tenant="acme",
    model="llama",
    outcome=Outcome.OK,
    arrived=1000.0,
    wait_s=2.1,
    total_s=5.4,
    granted=True,
    first_token_s=2.3,
    prompt_tokens=97,
    output_tokens=180,
    trace=RequestTrace(
        RequestMeasure(cost=RequestCost(100, 240, EstimateSource.TENANT)),
        ahead=((RequestClass.NORMAL, 1), (RequestClass.HIGH, 3)),
        replica_id="llama#2",
        route=Route.NEXT,
        kv_token_s=1234.4,
    ),
)
NEW_HERE = RequestMeasure(cost=RequestCost(100, 240, EstimateSource.PRIOR))
REFUSED = Receipt(
    request_id="req-2",
    request_class=RequestClass.LOW,
    tenant="acme",
    model="llama",
    outcome=Outcome.REFUSED,
    arrived=1000.0,
    wait_s=0.0,
    total_s=0.004,
    refused=RefusalReason.QUEUE_FULL,
    retry_after_s=12.0,
)
costs = st.builds(
    RequestCost,
    prompt_tokens=st.integers(0, 10**6),
    output_tokens=st.integers(0, 10**6),
    source=st.sampled_from(EstimateSource),
)
traces = st.builds(
    RequestTrace,
    measure=st.builds(RequestMeasure, sequences=st.integers(0, 9), slots=st.integers(0, 9), cost=costs, key=st.none()),
    ahead=st.lists(st.tuples(st.sampled_from(RequestClass), st.integers(0, 9)), max_size=9).map(tuple),
    replica_id=st.none() | st.text(max_size=400),
    route=st.none() | st.sampled_from(Route),
    losses=st.integers(0, 3),
    continued=st.lists(st.tuples(st.text(max_size=400), st.floats(0, 100)), max_size=20).map(tuple),
    not_continued=st.none() | st.sampled_from(NotContinued),
    kv_token_s=st.floats(0, 1e6),
)
receipts = st.builds(
    Receipt,
    request_id=st.text(max_size=400),
    request_class=st.sampled_from(RequestClass),
    tenant=st.text(max_size=400),
    model=st.text(max_size=400),
    outcome=st.sampled_from(Outcome),
    arrived=st.floats(0, 1e6),
    wait_s=st.floats(0, 1e4),
    total_s=st.floats(0, 1e4),
    granted=st.booleans(),
    first_token_s=st.none() | st.floats(0, 1e4),
    prompt_tokens=st.none() | st.integers(0, 10**6),
    output_tokens=st.none() | st.integers(0, 10**6),
    refused=st.none() | st.sampled_from(RefusalReason),
    retry_after_s=st.none() | st.floats(0, 300),
    deadline_s=st.none() | st.floats(0, 300),
    itl_s=st.none() | st.floats(0, 10),
    longest_gap_s=st.none() | st.floats(0, 100),
    slo=st.none() | st.sampled_from(SloVerdict),
    ttft_slo_s=st.none() | st.floats(0.1, 100),
    itl_slo_s=st.none() | st.floats(0.1, 100),
    waits=st.dictionaries(st.sampled_from([*WaitReason, LIMIT_WAIT]), st.floats(0, 1e4)),
    session_id=st.none() | st.text(max_size=400),
    trace=traces,
)


def traced(receipt: Receipt, **facts: Any) -> Receipt:
    """The receipt, with other facts in its trace."""
    return replace(receipt, trace=replace(receipt.trace, **facts))


def test_a_wait_is_explained_by_who_was_ahead() -> None:
    assert explain(WAITED) == [
        "req-1: normal request of acme to llama, answered after 5.4 s.",
        "Waited 2.1 s: 3 requests of class high and 1 request of class normal waited when it came.",
        "Ran on llama#2, next on the ring, since its home was closed or at its load bound; first token after 2.3 s.",
        "Estimated 100 + 240 tokens (prompt + output, learned from this tenant), used 97 + 180; "
        "held 1,234 KV token-seconds.",
        "First token: no wait, 2.1 s in the router, 200 ms in the engine.",
    ]


def test_the_first_token_is_divided_into_waits_the_router_and_the_engine() -> None:
    waited = replace(WAITED, waits={"guard_slots": 0.096, "slots": 2.0})
    assert explain(waited)[-2:] == [
        "Waits by reason: 2.0 s slots, 96 ms guard_slots.",
        "First token: 2.1 s of waits, 4 ms in the router, 200 ms in the engine.",
    ]
    assert json.loads(json.dumps(waited.to_json_fields()))["waits"] == {"guard_slots": 0.096, "slots": 2.0}
    assert explain(replace(WAITED, waits={"limit": 2.1}))[-1] == (
        "First token: 2.1 s of waits, 0 ms in the router, 200 ms in the engine."
    )


@pytest.mark.parametrize(
    "other",
    [
        traced(WAITED, preempted=1),  # its last wait came after its first token
        traced(WAITED, losses=1),
        replace(WAITED, first_token_s=None),
        replace(WAITED, waits={"slots": 6.3}),  # a list: its prompts waited at once
    ],
)
def test_a_first_token_of_several_runs_is_not_divided(other: Receipt) -> None:
    assert not [line for line in explain(other) if line.startswith("First token")]


@pytest.mark.parametrize(("sampled", "end"), [(True, "sampled."), (False, "not sampled.")])
def test_the_last_sentence_tells_the_trace(sampled: bool, end: str) -> None:
    receipt = traced(WAITED, trace_id="4bf92f3577b34da6a3ce929d0e0e4736", trace_sampled=sampled)
    assert explain(receipt)[-1] == f"Trace 4bf92f3577b34da6a3ce929d0e0e4736, {end}"
    assert receipt.to_json_fields()["trace_sampled"] is sampled


@pytest.mark.parametrize("reason", WaitReason)
def test_every_reason_of_a_wait_has_a_sentence(reason: WaitReason) -> None:
    line = explain(traced(WAITED, ahead=(), waited_for=reason))[1]
    assert line.startswith("Waited 2.1 s; ")
    assert json.loads(json.dumps(traced(WAITED, waited_for=reason).to_json_fields()))["waited_for"] == reason.value


def test_a_refusal_is_explained_with_its_reason_and_what_the_client_was_answered() -> None:
    assert explain(REFUSED) == [
        "req-2: low request of acme to llama, refused after 4 ms.",
        "Waited 0 ms.",
        "Refused (queue_full): the queue, or its class in it, was full of requests with as much right to wait; the "
        "client was told to retry after 12.0 s.",
    ]


def test_a_request_that_was_stopped_or_moved_says_so() -> None:
    reported = " ".join(explain(traced(WAITED, preempted=2, moved=1)))
    assert "Stopped 2 times while it ran, for requests before it" in reported
    assert "Moved once off a replica that was taken away" in reported


def test_a_stream_that_lost_its_replica_is_informed_where_it_went_on_and_why_it_ended() -> None:
    moved = traced(WAITED, losses=2, continued=(("llama#3", 0.31), ("llama#4", 2.0)))
    assert explain(moved)[3] == (
        "Its stream lost its replica in the middle: continued on llama#3 after 310 ms, continued on llama#4 after "
        "2.0 s."
    )
    ended = traced(moved, continued=moved.trace.continued[:1], not_continued=NotContinued.QUEUE)
    assert explain(ended)[3] == (
        "Its stream lost its replica in the middle: continued on llama#3 after 310 ms; then not continued (queue): no "
        "replica took it within the longest wait."
    )
    waited = traced(ended, ahead=(), waited_for=WaitReason.NO_REPLICA)
    assert explain(waited)[1] == "Started after 2.1 s."
    assert explain(waited)[3].endswith("no replica took it within the longest wait; no replica ran yet.")
    for reason in NotContinued:
        (line,) = [one for one in explain(traced(WAITED, not_continued=reason)) if "in the middle" in one]
        assert line.startswith(f"Its stream lost its replica in the middle: not continued ({reason.value}): ")


def test_a_service_level_is_reported_with_what_became_of_it() -> None:
    served = replace(WAITED, itl_s=0.0171, longest_gap_s=0.25, slo=SloVerdict.TTFT, ttft_slo_s=2.0, itl_slo_s=0.05)
    lines = explain(served)
    assert lines[2].endswith("; first token after 2.3 s, then 17 ms a token with a pause of 250 ms at most.")
    assert lines[3] == (
        "Promised first token within 2.0 s and 50 ms between tokens: missed, the first token came too late."
    )
    assert explain(replace(REFUSED, slo=SloVerdict.REFUSED, ttft_slo_s=2.0))[-1] == (
        "Promised first token within 2.0 s: missed by the refusal."
    )
    for verdict in SloVerdict:
        assert any(line.startswith("Promised 50 ms between") for line in explain(replace(served, ttft_slo_s=None)))
        assert json.loads(json.dumps(replace(served, slo=verdict).to_json_fields()))["slo"] == verdict.value


@pytest.mark.parametrize(
    ("change", "line", "text"),
    [
        ({"wait_s": 0.001}, 1, "Started at once."),
        ({"ahead": ((RequestClass.HIGH, 1),)}, 1, "Waited 2.1 s: 1 request of class high waited when it came."),
        ({"ahead": ((RequestClass.HIGH, 0),)}, 1, "Started after 2.1 s."),
        (
            {"ahead": (), "deadline_s": 30.0},
            1,
            "Started after 2.1 s; its deadline was 30.0 s.",
        ),
        (
            {"route": None, "losses": 1, "first_token_s": None},
            2,
            "Ran on llama#2, after 1 replica was lost under it.",
        ),
        (
            {"route": Route.HOME, "losses": 2, "first_token_s": 0.25},
            2,
            "Ran on llama#2, the home of its session or prefix, after 2 replicas were lost under it; first token "
            "after 250 ms.",
        ),
        (
            {"prompt_tokens": None, "kv_token_s": 0.0, "measure": NEW_HERE},
            3,
            "Estimated 100 + 240 tokens (prompt + output, before anything was learned).",
        ),
    ],
)
def test_lines_say_what_applies_and_no_more(change: dict[str, Any], line: int, text: str) -> None:
    of_trace = {name: change[name] for name in change if hasattr(WAITED.trace, name)}
    own = {name: change[name] for name in change if name not in of_trace}
    assert explain(traced(replace(WAITED, **own), **of_trace))[line] == text


@settings(deadline=None)
@given(receipts)
def test_every_receipt_can_be_explained_and_sent(receipt: Receipt) -> None:
    lines = explain(receipt)
    assert 2 <= len(lines) <= 9
    assert all(lines)
    plain = json.loads(json.dumps(receipt.to_json_fields()))
    assert plain["outcome"] == receipt.outcome.value
    assert plain["request_class"] == receipt.request_class.label
    assert len(json.dumps(plain)) < 20_000


def test_plain_fields_are_words_and_figures() -> None:
    plain = WAITED.to_json_fields()
    assert plain["request_class"] == "normal"
    assert plain["ahead"] == {"normal": 1, "high": 3}
    assert (plain["route"], plain["source"], plain["refused"]) == ("next", "tenant", None)


@settings(deadline=None)
@given(st.lists(st.sampled_from("abcdefgh"), max_size=60), st.integers(1, 5))
def test_the_latest_are_kept_and_found(ids: list[str], most: int) -> None:
    kept = Receipts(most)
    order: list[str] = []  # the newest last, each once
    for number, request_id in enumerate(ids):
        kept.add(replace(WAITED, request_id=request_id, arrived=float(number)))
        order = [*(one for one in order if one != request_id), request_id][-most:]
        assert len(kept.kept) == len(order)
        found = kept.find(request_id, None)
        assert found is not None
        assert found.arrived == number
    assert list(kept.kept) == order
    assert all((kept.find(name, None) is None) == (name not in order) for name in "abcdefgh")


@pytest.mark.parametrize("name", ["a1", "chatcmpl-a1", "cmpl-a1", "resp_a1", "trace-17"])
def test_a_receipt_is_found_by_every_name_its_request_has(name: str) -> None:
    kept = Receipts()
    kept.add(replace(WAITED, request_id="a1", client_id="trace-17"))
    found = kept.find(name, None)
    assert found is not None
    assert found.request_id == "a1"


def test_of_two_requests_a_client_calls_alike_the_later_is_found_and_our_own_ids_come_first() -> None:
    kept = Receipts(3)
    kept.add(replace(WAITED, request_id="a1", client_id="same"))
    kept.add(replace(WAITED, request_id="a2", client_id="same"))
    kept.add(replace(WAITED, request_id="a3", client_id="a1"))
    assert [getattr(kept.find(name, None), "request_id", None) for name in ("same", "a1")] == ["a2", "a1"]


@pytest.mark.parametrize("name", ["a1", "chatcmpl-a1", "same"])
def test_a_tenant_finds_its_own_only_whatever_others_call_theirs(name: str) -> None:
    kept = Receipts()
    kept.add(replace(WAITED, request_id="a1", client_id="same", tenant="acme"))
    kept.add(replace(WAITED, request_id="b1", client_id="same", tenant="other"))
    kept.add(replace(WAITED, request_id="b2", client_id="a1", tenant="other"))
    found = kept.find(name, "acme")
    assert found is not None
    assert found.request_id == "a1"
    assert kept.find("b1", "acme") is None
    assert kept.find(name, "third") is None


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from("uvw")), max_size=40), st.integers(1, 4))
def test_a_client_s_name_for_a_request_is_forgotten_with_it(added: list[tuple[str, str]], most: int) -> None:
    kept = Receipts(most)
    for request_id, client_id in added:
        kept.add(replace(WAITED, request_id=request_id, client_id=client_id))
        kept_ids = {one.client_id: one.request_id for one in kept.kept.values()}
        for name in "uvw":
            found = kept.find(name, None)
            assert (None if found is None else found.request_id) in (kept_ids.get(name), None)
        assert len(kept.by_client) <= 2 * len(kept.kept)  # of its tenant, and of all


def test_a_repeat_of_a_kept_answer_is_reported_to_have_run_nowhere() -> None:
    assert explain(replace(REFUSED, outcome=Outcome.OK, refused=None))[1].endswith("nothing ran.")


def test_no_more_than_asked_for_are_listed() -> None:
    kept = Receipts()
    for number in range(5):
        kept.add(replace(WAITED, request_id=f"r{number}"))
    assert list(kept.kept)[-2:] == ["r3", "r4"]


def test_long_texts_are_cut_and_still_found() -> None:
    kept = Receipts()
    name = "x" * 10_000
    long = traced(WAITED, replica_id=name, ahead=WAITED.trace.ahead * 100)
    kept.add(replace(long, request_id=name, tenant=name, model=name))
    found = kept.find(name, None)
    assert found is not None
    assert {len(text or "") for text in (found.request_id, found.tenant, found.model, found.trace.replica_id)} == {
        MAX_TEXT_CHARS
    }
    assert len(found.trace.ahead) == len(RequestClass)


def test_memory_stays_where_it_is_once_full() -> None:
    kept = Receipts(500)

    def fill(start: int) -> None:
        for number in range(start, start + 2000):
            kept.add(replace(WAITED, request_id=f"request-{number:09d}", arrived=float(number)))

    fill(0)
    tracemalloc.start()
    try:
        fill(2000)
        first, _ = tracemalloc.get_traced_memory()
        fill(4000)
        second, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert second - first < 20_000
