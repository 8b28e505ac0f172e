"""The benchmark of the waiting line measures what it says."""

from __future__ import annotations

import pytest

from benchmarks import admission


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
        assert set(found["by_event"]) == {*admission.EVENT_WEIGHTS, admission.STOP}
        assert found["stops"] == 0


def test_with_preemption_low_requests_stop_and_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, small in (("REPLICAS", 5), ("WAITING", 200), ("TENANTS", 20), ("SLOTS", 16)):
        monkeypatch.setattr(admission, name, small)
    found = admission.measure(admission.WITH_PREEMPTION, 2_000, 1)
    assert found["stops"] > 10
    assert found["running"] > 25
    assert found["by_event"][admission.STOP] > 0
