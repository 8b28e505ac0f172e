"""Service levels: what keeps one and what misses it, at the edges of every rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.receipts.slo import ServiceLevel, SloVerdict, TokenPace, judge
from serve_app.types import Outcome

OK = Outcome.OK
LEFT = Outcome.CANCELLED_RUNNING
BOTH = ServiceLevel(ttft_s=2.0, itl_s=0.5)
FIRST = ServiceLevel(ttft_s=2.0)
NEXT = ServiceLevel(itl_s=0.5)
NOTHING = ServiceLevel()


Served = tuple[Outcome, float, float | None, float | None]


def stream(ttft_s: float | None, span_s: float = 0.0, tokens: float = 11, outcome: Outcome = OK) -> Served:
    return outcome, (ttft_s or 0.0) + span_s, ttft_s, span_s / (tokens - 1) if tokens > 1 else None


@pytest.mark.parametrize(
    ("level", "served", "verdict"),
    [
        (BOTH, stream(2.0, 5.0), SloVerdict.MET),  # a bound is within it
        (BOTH, stream(2.1, 5.0), SloVerdict.TTFT),
        (BOTH, stream(2.0, 5.1), SloVerdict.ITL),
        (BOTH, stream(2.1, 9.0), SloVerdict.TTFT),  # one reason: the first
        (FIRST, stream(2.0, 9000.0), SloVerdict.MET),
        (NEXT, stream(900.0, 5.0), SloVerdict.MET),
        (NEXT, stream(0.1, 5.1), SloVerdict.ITL),
        (BOTH, stream(1.0, 0.0, tokens=1), SloVerdict.MET),  # one token has no other after it
        (NOTHING, stream(900.0, 900.0), SloVerdict.MET),
    ],
)
def test_a_stream_is_held_to_its_first_token_and_to_the_mean_after_it(
    level: ServiceLevel, served: Served, verdict: SloVerdict
) -> None:
    assert judge(level, *served) is verdict


@pytest.mark.parametrize(
    ("served", "verdict"),
    [
        ((Outcome.CANCELLED_QUEUED, 1.9, None, None), SloVerdict.CLIENT_LEFT),
        ((Outcome.CANCELLED_QUEUED, 2.1, None, None), SloVerdict.TTFT),  # no token had come when it was due
        (stream(1.0, 5.0, outcome=LEFT), SloVerdict.CLIENT_LEFT),
        (stream(1.0, 5.1, outcome=LEFT), SloVerdict.ITL),
        (stream(2.1, 0.0, outcome=LEFT), SloVerdict.TTFT),
    ],
)
def test_who_leaves_has_missed_what_was_late_by_then(served: Served, verdict: SloVerdict) -> None:
    assert judge(BOTH, *served) is verdict


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        (Outcome.REFUSED, SloVerdict.REFUSED),
        (Outcome.ENGINE_FAILED, SloVerdict.FAILED),
        (Outcome.INTERNAL_ERROR, SloVerdict.FAILED),
        (Outcome.BAD_REQUEST, None),
        (Outcome.UNAUTHORIZED, None),
    ],
)
def test_a_refusal_and_a_failure_are_misses_however_quick_and_a_wrong_request_is_none(
    outcome: Outcome, verdict: SloVerdict | None
) -> None:
    assert judge(BOTH, *stream(0.1, outcome=outcome)) is verdict


@given(
    st.sampled_from(Outcome),
    st.none() | st.floats(0, 10),
    st.floats(0, 10),
    st.floats(0, 50),
    st.none() | st.floats(0.01, 10),
    st.none() | st.floats(0.01, 1),
)
def test_a_stricter_level_is_never_met_where_a_looser_one_is_missed(
    outcome: Outcome,
    ttft_s: float | None,
    span_s: float,
    tokens: float,
    ttft_slo_s: float | None,
    itl_slo_s: float | None,
) -> None:
    served = stream(ttft_s, span_s, tokens, outcome)
    strict = judge(ServiceLevel(ttft_slo_s, itl_slo_s), *served)
    loose = judge(
        ServiceLevel(None if ttft_slo_s is None else 2 * ttft_slo_s, None if itl_slo_s is None else 2 * itl_slo_s),
        *served,
    )
    assert (strict is None) == (loose is None) == (outcome in (Outcome.BAD_REQUEST, Outcome.UNAUTHORIZED))
    if strict in (SloVerdict.MET, SloVerdict.CLIENT_LEFT):
        assert loose is strict
    assert (strict is SloVerdict.MET) <= (outcome is OK)


def test_a_pace_is_the_first_the_last_and_the_longest_gap() -> None:
    pace = TokenPace()
    assert pace.first_at is None
    for now in (10.0, 10.5, 12.0, 12.1):
        pace.on_tokens(now)
    assert (pace.first_at, pace.last_at, pace.longest_gap_s) == (10.0, 12.1, 1.5)
