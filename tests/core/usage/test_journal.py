from __future__ import annotations

import random

import pytest

from serve_app.core.limits import TokenPrices
from serve_app.core.usage import (
    RequestUse,
    UsageKey,
    UsageMeter,
    UsageRow,
    begin_line,
    end_line,
    meter_of,
    state_line,
)

KEY = UsageKey("2026-11-25", "key_1", "ac\nme \u2028", "m")
PRICES = TokenPrices(2.0, None, 10.0)
USE = RequestUse(100, 60, 20, 7, 3)


def test_a_killed_routers_last_batch_comes_again_under_its_number_and_the_rest_under_the_next() -> None:
    meter = UsageMeter("r")
    for name in ("a", "b", "c"):
        meter.begin(name, KEY, PRICES)
    meter.end("a", USE)
    sent = meter.next_batch()
    written = state_line(meter)
    meter.acknowledge(1)  # the journal does not know
    written += end_line("b", USE) + begin_line("d", KEY, None) + end_line("d", None) + begin_line("e", KEY, None)

    found = meter_of(written)
    assert found.next_batch() == sent
    found.acknowledge(1)
    last = found.next_batch()
    assert last is not None
    assert (last.source, last.seq, last.in_flight) == ("r", 2, ())
    assert last.rows == (UsageRow.of(KEY, (1, 100, 60, 20, 7, 3, 100 * 2 + 20 * 10, 2)),)
    found.acknowledge(2)
    assert not found.has_news


def test_a_router_killed_before_its_first_request_leaves_nothing_to_report() -> None:
    assert meter_of(state_line(UsageMeter("r"))).next_batch() is None


@pytest.mark.parametrize("seed", range(20))
def test_wherever_a_router_is_killed_its_journal_has_what_it_would_have_reported(seed: int) -> None:
    draw = random.Random(seed)
    meter = UsageMeter("r")
    written = state_line(UsageMeter("r"))
    number = 0
    for _ in range(200):
        act = draw.random()
        running = list(meter.in_flight)
        if act < 0.45:
            number += 1
            key = KEY._replace(day=draw.choice(("2026-11-25", "2026-11-26")), asked_model=draw.choice(("", "chat")))
            meter.begin(f"q{number}", key, PRICES)
            written += begin_line(f"q{number}", key, PRICES)
        elif act < 0.8 and running:
            request = draw.choice(running)
            use = draw.choice((USE, None))
            meter.end(request, use)
            written += end_line(request, use)
        elif act < 0.9 and meter.sent is None:
            if meter.next_batch() is not None:
                written = state_line(meter)
        elif meter.sent is not None:
            meter.acknowledge(meter.sent.seq)
    found = meter_of(written + b'["end","q1')  # it was killed inside a line
    if meter.sent is not None:
        assert found.sent == meter.sent
        meter.acknowledge(meter.sent.seq)
    if found.sent is not None:
        found.acknowledge(found.sent.seq)
    for request in list(meter.in_flight):
        meter.end(request, RequestUse(is_settled=False))
    assert found.next_batch() == meter.next_batch()


@pytest.mark.parametrize(
    "text", [b"", b"no json\n", b'["state","r",null]\n', b'["begin","a"]\n', b'["state","r",{"seq":1},[]]\n', b"[]\n"]
)
def test_what_is_no_journal_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="no journal of use"):
        meter_of(text)


def test_a_request_by_its_model_is_written_as_the_release_before_reads_it() -> None:
    assert begin_line("a", KEY, None) == b'["begin","a","2026-11-25","key_1","ac\\nme \\u2028","m",null]\n'
    meter = UsageMeter("r")
    meter.begin("a", KEY)
    meter.end("a", USE)
    meter.next_batch()
    assert b"asked_model" not in state_line(meter)
    found = meter_of(state_line(meter) + begin_line("b", KEY._replace(asked_model="chat"), PRICES) + end_line("b", USE))
    found.acknowledge(1)
    last = found.next_batch()
    assert last is not None
    assert [(row.asked_model, row.requests, row.cost_micro) for row in last.rows] == [("chat", 1, 400)]
