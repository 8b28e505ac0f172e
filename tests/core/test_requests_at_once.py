"""How many requests an engine can run at once, by those that run."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.kv_budget import requests_at_once
from tests.effort import examples


@given(slots=st.integers(1, 512), running=st.integers(0, 512))
@settings(max_examples=examples(100))
def test_requests_of_one_sequence_each_take_a_slot_while_the_cache_has_room(slots: int, running: int) -> None:
    running = min(running, slots)
    assert requests_at_once(slots, running, running, 0.5 * running / slots) == pytest.approx(slots)


def test_a_request_of_eight_sequences_takes_eight_slots() -> None:
    assert 32 < requests_at_once(256, 32, 256, 0.1) < 45


def test_where_the_cache_is_full_no_more_run_than_do() -> None:
    assert 40 < requests_at_once(256, 40, 40, 1.0) < 48


@given(
    slots=st.integers(1, 512), requests=st.integers(0, 512), sequences=st.integers(0, 512), kv_share=st.floats(0.0, 1.0)
)
@settings(max_examples=examples(100))
def test_it_is_at_most_the_slots_and_never_nothing(slots: int, requests: int, sequences: int, kv_share: float) -> None:
    assert 0.0 < requests_at_once(slots, requests, min(sequences, slots), kv_share) <= slots
