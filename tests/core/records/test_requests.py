"""Which records answer a question, in which order, and what a record keeps of its receipt."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.continuation import NotContinued
from serve_app.core.estimate import EstimateSource, RequestCost
from serve_app.core.queue import WaitReason
from serve_app.core.receipts import Receipt, RequestMeasure, RequestTrace, SloVerdict, explain
from serve_app.core.records import RecordFilter, first_records, full_record, head_of, record_fields
from serve_app.core.routing import Route
from serve_app.types import Outcome, RequestClass


def receipt(request: str = "r", tenant: str = "acme", outcome: Outcome = Outcome.OK, total_s: float = 1.0) -> Receipt:
    return Receipt(request, RequestClass.HIGH, tenant, "chat", outcome, 5.0, 0.25, total_s, granted=True)


def record(request: str, at: float, **given: Any) -> dict[str, Any]:
    return full_record(record_fields(receipt(request, **given), at, {}))


FULL = Receipt(
    "0f" * 16,
    RequestClass.LOW,
    "acme",
    "chat",
    Outcome.ENGINE_FAILED,
    arrived=5.0,
    wait_s=0.5,
    total_s=2.5,
    granted=True,
    first_token_s=0.75,
    prompt_tokens=7,
    output_tokens=9,
    client_id="mine",
    refused="deadline",
    retry_after_s=1.5,
    deadline_s=3.0,
    itl_s=0.01,
    longest_gap_s=0.02,
    slo=SloVerdict.FAILED,
    ttft_slo_s=1.0,
    itl_slo_s=0.5,
    waits={"slots": 0.25, "limit": 0.125},
    key_id="jwt:alice",
    trace=RequestTrace(
        measure=RequestMeasure(sequences=2, slots=2, cost=RequestCost(7, 9, EstimateSource.TENANT)),
        limit_wait_s=0.125,
        router_losses=1,
        ahead=((RequestClass.HIGH, 2),),
        waited_for=WaitReason.SLOTS,
        replica_id="x7k2",
        route=Route.HOME,
        losses=1,
        preempted=2,
        moved=3,
        continued=(("y", 0.25),),
        not_continued=NotContinued.LOSSES,
        kv_token_s=12.5,
        trace_id="ab" * 16,
        trace_sampled=True,
    ),
)


@pytest.mark.parametrize("known", [FULL, receipt()])
def test_a_receipt_is_the_same_after_it_was_a_record(known: Receipt) -> None:
    """Its measure is kept as far as a receipt shows it."""
    kept = json.loads(json.dumps(record_fields(known, 1000.0, {})))
    found = Receipt.from_json_fields(full_record(kept) | {"waited_for": kept.get("waited_for")})
    assert found.to_json_fields() == known.to_json_fields()
    assert explain(found) == explain(known)


def test_a_record_names_the_seconds_of_each_wait_and_keeps_no_field_that_says_nothing() -> None:
    waited = replace(receipt(), waits={"slots": 0.5, "limit": 0.25})
    kept = record_fields(waited, 1000.0, {"key_id": "k", "runs": []})
    assert set(kept) == {
        *("at", "request_id", "request_class", "tenant", "model", "outcome", "arrived", "wait_s", "total_s"),
        *("granted", "waits", "key_id"),
    }
    shown = full_record(kept)
    assert shown["waited_for"] == shown["waits"] == {"slots": 0.5, "limit": 0.25}
    assert (shown["runs"], shown["prefix_blocks"], shown["refused"], shown["losses"]) == ([], [], None, 0)


def test_a_tenant_s_question_has_no_other_s_record() -> None:
    records = [record("a", 1.0), record("b", 2.0, tenant="other")]
    wanted = RecordFilter(tenant="acme")
    assert [one["request_id"] for one in records if wanted.has(head_of(one))] == ["a"]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (RecordFilter(is_failed=True), ["c", "d"]),
        (RecordFilter(is_failed=True, since=4.5), ["d"]),  # it has failed at 5.0
        (RecordFilter(is_failed=True, since=4.0, until=5.0), ["c"]),
        (RecordFilter(outcome="refused"), ["b"]),
        (RecordFilter(model="chat", since=2.0, until=3.0), ["b"]),
        (RecordFilter(model="code"), []),
        (RecordFilter(asked_model="helper"), ["b"]),
        (RecordFilter(asked_model="chat"), ["a", "c", "d"]),  # by its own name
        (RecordFilter(asked_model="helper", model="code"), []),
        (RecordFilter(request_class="high", since=4.0), ["d"]),
        (RecordFilter(request_class="low"), []),
        (RecordFilter(request="chatcmpl-c"), ["c"]),
        (RecordFilter(after=(3.0, "c")), ["a", "b"]),
    ],
)
def test_what_a_question_wants(wanted: RecordFilter, found: list[str]) -> None:
    outcomes = [Outcome.OK, Outcome.REFUSED, Outcome.ENGINE_FAILED, Outcome.INTERNAL_ERROR]
    records = [record(name, at + 1.0, outcome=outcomes[at]) for at, name in enumerate("abcd")]
    records[1]["asked_model"] = "helper"
    assert [one["request_id"] for one in records if wanted.has(head_of(one))] == found


def test_a_request_is_looked_for_by_the_bytes_of_its_ids() -> None:
    line = json.dumps(record_fields(FULL, 1.0, {})).encode()
    assert RecordFilter(request="mine").may_be_in(line)
    assert RecordFilter(request=f"chatcmpl-{FULL.request_id}").may_be_in(line)
    assert not RecordFilter(request="yours").may_be_in(line)


ENTRIES = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=30)


@given(ENTRIES, st.integers(1, 5), st.booleans())
def test_pages_have_every_record_once_in_order(entries: list[tuple[int, int]], limit: int, is_slow: bool) -> None:
    records = [record(f"r{number}", at, total_s=total) for number, (at, total) in enumerate(entries)]
    found: list[str] = []
    after = None
    while True:
        wanted = RecordFilter(is_slow=is_slow, after=after, limit=limit)
        page = first_records(wanted, [one for one in records if wanted.has(head_of(one))])
        found += [one["request_id"] for one in page]
        if len(page) < limit:
            break
        after = wanted.order(head_of(page[-1]))
    order = RecordFilter(is_slow=is_slow).order
    records.sort(key=lambda kept: order(head_of(kept)), reverse=True)
    assert found == [one["request_id"] for one in records]
