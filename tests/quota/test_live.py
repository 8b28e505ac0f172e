"""What the quota actor says to routers with consoles."""

from __future__ import annotations

import pickle
from dataclasses import replace

from serve_app.core.live import QuotaPart, WaitingRow
from serve_app.core.memory import Device, EngineReport, Rank, SessionRequest, session_name
from serve_app.core.queue import Arrival, QueuePolicy
from serve_app.core.quota import Quota
from serve_app.core.shared_queue import RouterMessage
from serve_app.core.shared_queue.messages import Arrive, CreditRequest, EngineReachability, Hello, ModelPolicy
from serve_app.quota.live import live_part
from serve_app.types import RequestClass

GB = 10**9
POLICY = QueuePolicy(max_queued=10, max_wait_s=60.0)
ACME = session_name("acme", "agent-7")


def quota_with(*arrivals: Arrival) -> Quota:
    """One engine with two slots, a session of `acme`, and requests that a router hands in at 1 s."""
    quota = Quota(3, {}, 0.0)
    quota.on_devices([Device("n", 0, 80 * GB)], 0.0)
    report = EngineReport("e", "m", (Rank("n", 0),), 60 * GB, 60 * GB)
    holds = quota.on_engine(report, 0.0).holds
    quota.on_engine(replace(report, holds=holds, kv_tokens=1600, kv_bytes=1, measured_bytes=(1,), slots=2), 0.0)
    events = (Hello(()), ModelPolicy("m", POLICY), EngineReachability("m", "e", True), CreditRequest("e", 0, 0))
    quota.on_exchange(RouterMessage("r", 1, 3, 1, events, 0, 0), 0.0)
    quota.on_open_session(SessionRequest(ACME, "m", 50, 60.0, None, "0.25 GB", granted_bytes=GB), 0.0)
    arrives = tuple(Arrive("m", arrival, 0.0) for arrival in arrivals)
    quota.on_exchange(RouterMessage("r", 1, 3, 1 + len(events), arrives, 0, 0), 1.0)
    return quota


def test_who_waits_is_reported_by_class_and_tenant_with_the_reasons() -> None:
    waits = [Arrival(f"w{number}", RequestClass.HIGH, "acme", slots=2, cost_tokens=10) for number in range(3)]
    quota = quota_with(*waits)
    part = live_part(quota, 3.5, ())
    assert part.waiting == {"m": 3}
    (row,) = part.rows
    assert (row.model, row.request_class, row.tenant, row.waiting, row.oldest_s) == ("m", "high", "acme", 3, 2.5)
    assert sum(row.reasons.values()) == 3
    assert row.reasons["slots"] >= 1, "the first one waits for slots, and others perhaps for their turn"


def test_a_session_is_named_as_its_tenant_names_it() -> None:
    (session,) = live_part(quota_with(), 10.0, ()).sessions
    assert session == {
        "session_id": "agent-7",
        "tenant": "acme",
        "model": "m",
        "replica": "e",
        "kv_tokens": 50,
        "used": 0,
        "bytes": GB,
        "expires_in_s": 50.0,
    }


def test_the_figures_have_what_the_views_read() -> None:
    figures = live_part(quota_with(), 1.0, ()).figures
    assert {"devices", "engines", "waiting", "kept", "draining", "fragmentation"} <= figures.keys()
    assert "queues" not in figures, "they name tenants, and are in the rows"


def test_a_part_crosses_processes_as_it_is() -> None:
    part = live_part(quota_with(Arrival("a", RequestClass.LOW, "t")), 1.0, ("t",))
    copy = pickle.loads(pickle.dumps(part))
    assert isinstance(copy, QuotaPart)
    assert copy == part
    row = WaitingRow("m", "low", None, 1, 0.0, {"slots": 1})
    assert pickle.loads(pickle.dumps(row)) == row
