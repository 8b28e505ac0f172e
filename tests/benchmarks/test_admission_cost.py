"""The benchmark of the waiting line measures what it says."""

from __future__ import annotations

import pytest

from benchmarks import actor_events, admission, preemption_cost


def test_each_case_keeps_its_line_long_and_its_replicas_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, small in (("REPLICAS", 5), ("WAITING", 200), ("TENANTS", 20), ("SLOTS", 16), ("KV_TOKENS", 8_000)):
        monkeypatch.setattr(admission, name, small)
    for case in (admission.Case("slots"), admission.Case("both", 8_000, shares=True)):
        found = admission.measure(case, 2_000, 1)
        assert found["waiting"] > 100
        assert found["running"] > 25
        assert 0 < found["p50_us"] <= found["p99_us"] <= found["max_us"]
        assert found["longest_collection_us"] >= 0
        assert found["decisions_per_s"] > 0
        assert found["decisions_per_cpu_s"] > 0
        assert set(found["by_event"]) == set(admission.EVENT_WEIGHTS)


def test_in_mixed_overload_lower_requests_stop_and_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption_cost, "WAITING", 200)
    found = preemption_cost.measure(5, 2_000, 1)
    assert found["decisions"] == 2_000
    assert found["stops"] > 20
    assert found["waiting"] > 50
    assert found["decisions_per_s"] > 0


def test_each_large_event_of_the_actor_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, small in (("SCALE_UP_WAITING", 2_000), ("RECOVERY_ENGINES", 4), ("RECOVERY_WAITING", 600)):
        monkeypatch.setattr(actor_events, name, small)
    for name, small in (("SESSION_ENGINES", 4), ("SESSIONS", 24), ("PENDING", 8)):
        monkeypatch.setattr(actor_events, name, small)
    for name, small in (("END_ENGINES", 4), ("END_REQUESTS", 600)):
        monkeypatch.setattr(actor_events, name, small)
    found = actor_events.events()
    assert set(found["event_ms"]) == {"scale_up_2000", "recovery_4", "sessions_24", "router_end_600"}
    assert min(found["event_ms"].values()) > 0
    events = found["events"]
    assert events["scale_up_2000"]["waiting"] == 2_048 - 9 * actor_events.SLOTS
    assert events["recovery_4"]["waiting"] == 600 - 4 * actor_events.SLOTS
    assert events["router_end_600"]["running"] == 4 * actor_events.SLOTS
    assert events["sessions_24"]["open"] == 24 - 20 + 8, "as many as have closed make room for those that wait"
