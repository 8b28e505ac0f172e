from __future__ import annotations

from serve_app.core.limits import TokenPrices
from serve_app.core.usage import InFlightUse, RequestUse, UsageKey, UsageMeter, UsageRow

KEY = UsageKey("2026-11-25", "key_1", "acme", "m")
LATER = KEY._replace(day="2026-11-26")
USE = RequestUse(prompt_tokens=100, cached_tokens=60, output_tokens=20, kv_token_ms=7, wait_ms=3)


def in_flight(key: UsageKey, count: int) -> InFlightUse:
    return InFlightUse(*key.of_model, count)


def test_a_batch_has_the_sums_and_what_is_in_flight_at_the_same_moment() -> None:
    meter = UsageMeter("r")
    for number in range(3):
        meter.begin(f"a{number}", KEY)
    meter.begin("b", LATER)
    meter.end("a0", USE)
    meter.end("a1", USE)
    batch = meter.next_batch()
    assert batch is not None
    assert (batch.source, batch.seq) == ("r", 1)
    assert batch.rows == (UsageRow.of(KEY, (2, 200, 120, 40, 14, 6)),)
    assert batch.in_flight == (in_flight(KEY, 1), in_flight(LATER, 1))


def test_requests_to_a_name_are_summed_apart_and_in_flight_by_their_model() -> None:
    meter = UsageMeter("r")
    named = KEY._replace(asked_model="chat")
    for request, key in (("a", KEY), ("b", named), ("c", named), ("d", named)):
        meter.begin(request, key)
    for request in ("a", "b", "c"):
        meter.end(request, USE)
    batch = meter.next_batch()
    assert batch is not None
    assert [(row.model, row.asked_model, row.requests) for row in batch.rows] == [("m", "", 1), ("m", "chat", 2)]
    assert batch.in_flight == (in_flight(KEY, 1),)


def test_an_unacknowledged_batch_is_sent_again_as_it_was() -> None:
    meter = UsageMeter("r")
    meter.begin("a", KEY)
    first = meter.next_batch()
    assert first is not None
    meter.end("a", USE)
    meter.acknowledge(first.seq + 1)  # nobody's
    assert meter.next_batch() is first
    meter.acknowledge(first.seq)
    second = meter.next_batch()
    assert second is not None
    assert (second.seq, len(second.rows), second.in_flight) == (2, 1, ())
    meter.acknowledge(first.seq)  # late
    assert meter.next_batch() is second


def test_what_the_store_has_not_acknowledged_is_counted_whether_it_was_sent_or_not() -> None:
    meter = UsageMeter("r")
    for name, use in (("a", USE), ("b", RequestUse(is_settled=False)), ("not counted", None)):
        meter.begin(name, KEY)
        meter.end(name, use)
    meter.begin("runs", KEY)
    assert meter.pending == 2
    first = meter.next_batch()
    assert first is not None
    meter.begin("c", LATER)
    meter.end("c", USE)
    assert meter.pending == 3
    meter.acknowledge(first.seq)
    assert meter.pending == 1
    _acknowledge(meter)
    assert meter.pending == 0


def test_nothing_is_sent_while_nothing_changes_but_a_heartbeat_of_what_is_in_flight() -> None:
    meter = UsageMeter("r")
    assert meter.next_batch(heartbeat=True) is None
    meter.begin("a", KEY)
    _acknowledge(meter)
    assert not meter.has_news
    assert meter.next_batch() is None
    beat = meter.next_batch(heartbeat=True)
    assert beat is not None
    assert beat.in_flight == (in_flight(KEY, 1),)
    meter.acknowledge(beat.seq)
    meter.end("a", None)  # not counted, and no longer in flight
    assert meter.has_news
    _acknowledge(meter)
    assert meter.next_batch(heartbeat=True) is None


def test_a_request_counts_once_by_its_first_day_and_prices() -> None:
    meter = UsageMeter("r")
    meter.begin("a", KEY, TokenPrices(2.0, 0.5, 10.0))
    meter.begin("a", LATER, TokenPrices(9.0, 9.0, 9.0))  # on another engine, after the loss of the first
    meter.end("a", USE)
    meter.end("a", USE)
    meter.end("unknown", USE)
    batch = meter.next_batch()
    assert batch is not None
    (row,) = batch.rows
    assert (row.day, row.requests, row.cost_micro) == (KEY.day, 1, 40 * 2 + 30 + 200)


def test_a_request_whose_tokens_are_unknown_is_unsettled() -> None:
    meter = UsageMeter("r")
    meter.begin("a", KEY, TokenPrices(2.0))
    meter.end("a", RequestUse(kv_token_ms=9, wait_ms=2, is_settled=False))
    batch = meter.next_batch()
    assert batch is not None
    assert batch.rows == (UsageRow.of(KEY, (0, 0, 0, 0, 9, 2, 0, 1)),)


def test_memory_does_not_grow_with_the_requests_while_the_store_is_away() -> None:
    meter = UsageMeter("r")
    assert meter.next_batch() is None
    for number in range(1000):
        meter.begin(str(number), KEY if number % 2 else LATER)
        meter.end(str(number), USE)
        meter.next_batch()
    sent = meter.next_batch()
    assert sent is not None
    assert len(sent.rows) == 1
    meter.acknowledge(sent.seq)
    rest = meter.next_batch()
    assert rest is not None
    assert sum(row.requests for row in rest.rows) == 999
    assert len(rest.rows) == 2


def _acknowledge(meter: UsageMeter) -> None:
    batch = meter.next_batch()
    assert batch is not None
    meter.acknowledge(batch.seq)
